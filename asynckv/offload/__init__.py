"""Offload: which blocks are kept in host memory and in files, in which slots, and what is moved where.

Blocks that do not fit the accelerator go to host memory, from there to files, and come back before they are needed.
This folder decides that, and has no bytes. `asynckv/edges` has the memory, the files and the agent that copies between
them, `asynckv/geometry` says which bytes of a block lie where, and `asynckv/engine` joins them.

The ideas
---------

*Decide, then do.* Nothing in here reads a clock, opens a file or awaits. A caller asks for a job; moves come out; and
how the moves ended comes in. So a catalogue may live in a scheduler's process whose workers carry the moves out, and a
test plays a day of evictions in a second.

*A block is found by what it depends on.* Its key is the engine's own hash of all tokens up to its end, within a
namespace that says for which model and which layers. A block of another model or layers has another key, and is not
found.

*Two tables are the machines.* One is for a stored block in one tier (`entry`), one for a job (`job`). An event that a
table does not list raises before anything was changed.

*Sets of who, and memory follows the writer.* A slot is given to another block when nobody holds it and no transfer may
read or write it, and for no other reason. A transfer in doubt keeps the slots on both of its sides, and the caller's
blocks.

*One of each.* A block that is being stored or promoted is not stored or promoted a second time: another job that wants
it waits for it. If the first job is cancelled before its move was posted, one that waits stores the block.

*Nothing waits for ever.* A load needs one slot of host memory to bring any number of blocks from the file tier, and
fails if it cannot have that one. A store never waits for room.

A block's life
--------------

    device              host memory                          file
    store  ---move--->  WRITING, READY
                        READY        ---write-back--->       WRITING, READY
                        LEAVING, GONE (evicted)              READY
                        WRITING, READY  <---promotion---     READY
    load   <---move---  READY

Where to look
-------------

- `catalogue` is all of it put together: calls and the ends of moves enter there.
- `keys`: what blocks are called, and which of them a request needs that continues after some token. `found`: how long a
  stored prefix is.
- `tier`: the blocks of one tier. `entry`: one of them. `slots`: where they lie. `eviction`: which go first. `room`: how
  much of a prompt is stored if there is no room for all of it.
- `job`: one caller's request, and the moves that carry it out. `jobs`: all of them, and what each holds. `cutting`:
  cuts what jobs wait for into moves. `write_back`: what goes on to files. `traffic`: all moves that are under way, and
  their budgets.

Words
-----

- *tier*: host memory, or files. *Slot*: where one block lies in a tier; of a group, an ordinary block id.
- *position*: the place of a block in its request's list of blocks.
- *promotion*: from file to host memory. *Write-back*: the other way, after the store has ended.
- *held*, *pinned*: a job, a pin or a lease wants a block to stay.
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
