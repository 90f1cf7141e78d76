"""Where the outside begins: NIXL, ZMQ, torch, files and the system's clock, one door each (`asynckv/ports.py`).

The control plane is `zmq.py`. The data plane is `NixlPlane` in this process (`nixl.py`); where remote readers can end
it, `choice.py` puts what serves them into a child (`ServingPlane` of `process.py`).
"""
