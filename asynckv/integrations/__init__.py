"""Integrations into inference engines. Each is imported only by its own name."""
