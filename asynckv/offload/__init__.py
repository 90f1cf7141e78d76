"""Offload: decides which blocks are kept in host memory and in files, in which slots, and which moves come next.

This folder has no bytes, clock, files or awaits. Jobs go in, moves come out, and the ends of moves go in.
`asynckv/edges` has the memory and the files, `asynckv/geometry` computes the bytes of a block, and `asynckv/tiers`
joins them.

- A block's key is the engine's hash of all tokens up to its end, within a namespace for the model and the layers.
- Two tables are the state machines: one for a stored block in one tier (`entry`), one for a job (`job`).
- A slot is reused only when no holder wants it and no transfer may read or write it. A transfer in doubt keeps the
  slots on both sides, and the caller's blocks.
- A block is not stored or promoted twice at a time: other jobs wait for the first move.
- A load can bring any number of blocks from files through one slot of host memory. A store never waits for room.

A block's life:

    device              host memory                          file
    store  ---move--->  WRITING, READY
                        READY        ---write-back--->       WRITING, READY
                        LEAVING, GONE (evicted)              READY
                        WRITING, READY  <---promotion---     READY
    load   <---move---  READY

Calls and the ends of moves enter through `catalogue`. A *slot* is a block's place in a tier, and a *position* its place
in the request's list. A *promotion* goes from file to host memory, and a *write-back* the other way.
"""

from __future__ import annotations

from asynckv.public import lazily

# Late, because these names lie in rooms above (`tiers`, `embed`), which import this one.
__all__, __getattr__ = lazily(__name__)
