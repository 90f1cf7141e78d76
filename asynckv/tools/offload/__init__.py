"""`asynckv offload`: inspect a directory of stored blocks, or remove it."""
