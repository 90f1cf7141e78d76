"""`asynckv offload`: what an offload has left in a directory; verify it, and make room."""
