"""NIXL, its threads and buffers, and the copies of blocks between memories of one rank."""
