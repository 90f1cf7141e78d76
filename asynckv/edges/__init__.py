"""Adapters to the outside: NIXL, ZMQ, torch, files, the clock. The planes and the clock implement `asynckv/ports.py`.

    control   ZMQ, its door for strangers, and the socket for questions on this host
    nic       NIXL in this process: the data plane, its threads, staged and packed copies
    survivor  NIXL in a child process, where remote readers can end the process that they read from
    files     blocks in files

These rooms do not know each other, but `survivor` and `files` use `nic`; `choice.py` says where NIXL runs. The rest
lies beside it: clock, kernel, memory, torch, transports.
"""
