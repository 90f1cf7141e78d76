"""ZMQ, its door for strangers, and the socket for questions on this host."""
