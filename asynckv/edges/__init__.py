"""Where the outside begins: NIXL, ZMQ, torch, files and the system's clock, one door each (`asynckv/ports.py`).

The control plane is `zmq.py`. The data plane is one of three, which `choice.py` chooses: `NixlPlane` in this process
(`nixl.py`), with what serves in a child (`ServingPlane` of `process.py`), or with everything there (`ProcessPlane`).
"""
