"""Adapters to the outside: NIXL, ZMQ, torch, files and the system's clock, each behind one port of `asynckv/ports.py`.

    control   ZMQ, its door for strangers, and the socket for questions on this host
    nic       NIXL in this process: the data plane, its threads, staged and packed copies
    survivor  NIXL in a child process, where remote readers can end the process that they read from
    files     blocks in files

These rooms do not know each other, but `survivor` and `files` use `nic`; `choice.py` says where NIXL runs. What lies
beside it serves them all: clock, kernel, memory, torch, transports.
"""
