"""asynckv as a spec of vLLM's `OffloadingConnector`: blocks go to host memory and to files, and come back from there.

vLLM makes the spec in the scheduler's process for a manager, which knows what is kept, and in every worker's for what
moves the bytes. A manager cannot ask a worker for anything but vLLM's jobs, so the bytes go two ways:

    workers      device <---> host memory     with the jobs of vLLM, by the copy plane
    scheduler    host memory <---> files      whenever the catalogue says so, by the record plane

Host memory is one region that all processes of an engine have mapped (`region`): of every slot each rank has a part. A
file's record is such a slot, so there is one directory and one index. vLLM is imported when the class is asked for.
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
