"""Where the outside begins: NIXL, ZMQ, torch and the system's clock, one door each."""
