"""Offload: which blocks are kept in host memory and in files, in which slots, and what is moved where.

This folder decides, and has no bytes, clock, files or awaits: jobs go in, moves come out, and how moves ended goes in.
`asynckv/edges` has the memory and the files, `asynckv/geometry` says which bytes of a block lie where, and
`asynckv/engine` joins them.

- A block's key is the engine's hash of all tokens up to its end, within a namespace for the model and the layers.
- Two tables are the machines: one for a stored block in one tier (`entry`), one for a job (`job`).
- A slot is given to another block when no holder wants it and no transfer may read or write it, and for no other
  reason. A transfer in doubt keeps the slots on both sides, and the caller's blocks.
- A block that is being stored or promoted is not stored or promoted a second time: other jobs wait for it.
- A load needs one slot of host memory to bring any number of blocks from files. A store never waits for room.

A block's life:

    device              host memory                          file
    store  ---move--->  WRITING, READY
                        READY        ---write-back--->       WRITING, READY
                        LEAVING, GONE (evicted)              READY
                        WRITING, READY  <---promotion---     READY
    load   <---move---  READY

`catalogue` is where calls and the ends of moves enter. A *slot* is where a block lies in a tier, a *position* its place
in its request's list, a *promotion* goes from file to host memory, a *write-back* the other way.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from asynckv.public import homes

_HOME = homes(__name__)
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # Later, because the engine itself imports what is in this folder.
    if name not in _HOME:
        raise AttributeError(f"module 'asynckv.offload' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
