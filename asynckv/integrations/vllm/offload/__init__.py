"""asynckv as a spec of vLLM's `OffloadingConnector`: blocks go to host memory and to files, and come back from there.

vLLM's connector decides which blocks of a request are worth keeping, and asks a spec of its own where they are to go.
It makes the spec in each process: in the scheduler's for a manager, which knows what is kept, and in every worker's for
what moves the bytes. Between the two travel jobs, each for blocks of one request, and which jobs have ended: a manager
cannot ask a worker for anything else. So the bytes go two ways here:

    workers      device <---> host memory     with the jobs of vLLM, by the copy plane
    scheduler    host memory <---> files      whenever the catalogue says so, by the record plane

Host memory is one region that all processes of an engine have mapped: of every slot each rank has a part. A file's
record is such a slot, the parts of all ranks in one; so there is one directory, one index and one checksum for them.

- `options`: what a user may say.
- `spec`: the class that vLLM makes, and what a record is.
- `region`: the host memory.
- `manager`: the catalogue, in vLLM's words. `open_moves`: what workers carry out. `seen`: what vLLM has been told.
  `files`: the thread on which its files are.
- `worker`: the other half.

vLLM is imported when the class is asked for, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckv.integrations.vllm.offload.spec import AsyncKVOffloadingSpec

__all__ = ["AsyncKVOffloadingSpec"]


def __getattr__(name: str) -> Any:
    if name != "AsyncKVOffloadingSpec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asynckv.integrations.vllm.offload.spec import AsyncKVOffloadingSpec

    return AsyncKVOffloadingSpec
