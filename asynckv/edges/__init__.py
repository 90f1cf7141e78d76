"""Adapters to the outside: NIXL, ZMQ, torch, files and the system's clock, each behind one port of `asynckv/ports.py`.

The control plane is `zmq.py`. The data plane is `NixlPlane` in this process (`nixl.py`). Where remote readers can end
that process, `choice.py` puts the agent that serves them into a child process (`ServingPlane` of `process.py`).
"""
