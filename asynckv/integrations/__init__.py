"""asynckv inside inference engines. Nothing here is imported unless it is asked for by name."""
