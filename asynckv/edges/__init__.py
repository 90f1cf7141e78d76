"""Where the outside begins: NIXL, ZMQ, torch and the system's clock, one door each.

What is inside asks for a clock, a control plane and a data plane (`asynckv/ports.py`) and knows nothing of what is
behind them. That is here. The control plane is `zmq.py`, and the clock `clock.py`. The data plane is one of three, of
which `choice.py` takes one: `NixlPlane` in this process (`nixl.py`, with one `Agent` of `agent.py` for the loop and one
for each posting thread of `posters.py`), or with what serves, or with everything, in a process of its own
(`process.py`; its children are kept by `keeper.py`, run `process_main.py` and `process_child.py`, and are spoken to in
`process_wire.py`). `transports.py` says whether that is needed, `sharing.py` whether it can be done. `torch.py` turns
tensors into registered memory, and no plane knows it.
"""
