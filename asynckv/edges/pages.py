"""Pages of host memory: whether there is room for them, and their allocation before anything is copied into them.

The system allocates a page when it is first written. A copy into fresh memory takes 2,048 page faults per 8 MiB, which
is several times as long as the copy itself.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asynckv.arguments import MAX_INTEGER
from asynckv.errors import BackendError

POPULATE_WRITE = 23  # `MADV_POPULATE_WRITE` of Linux 5.14 and later, which Python does not name
PIECE = 64 << 20  # bytes that are populated at a time
REMEDY = "allocate fewer blocks (in vLLM: num_gpu_blocks_override or kv_cache_memory_bytes), or raise that limit"

# By the controller's name in `/proc/self/cgroup`, which is empty in version 2: the limit, the use, and the parts of the
# use that the kernel takes back before it ends a process.
CGROUP_FILES = {
    "": ("memory.max", "memory.current", "active_file", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}


def memory_available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return the bytes that this process can still allocate, and the file that limits them.

    Beyond them the kernel ends a process, and reports no error. The memory of the host counts, and the limits of all
    control groups around this process. What cannot be read limits nothing.
    """
    found = [(MAX_INTEGER, "no known limit")]
    if (kib := _number(proc / "meminfo", "MemAvailable:")) is not None:
        found.append((kib << 10, f"MemAvailable of {proc / 'meminfo'}"))
    for controller, (limit, use, *kept) in CGROUP_FILES.items():
        for at in control_groups(controller, proc, cgroups):
            if (most := _number(at / limit)) is not None:
                freed = sum(_number(at / "memory.stat", each) or 0 for each in kept)
                found.append((max(0, most - max(0, (_number(at / use) or 0) - freed)), str(at / limit)))
    return min(found)


def control_groups(controller: str, proc: Path, cgroups: Path, pid: int | str = "self") -> list[Path]:
    """Return the folders of the groups around a process, its own first; `controller` is empty for version 2.

    A container without a namespace of its own finds its group at the top, and not under its path.
    """
    top = cgroups / controller
    own = re.search(rf"^\d+:(?:.*,)?{controller}(?:,.*)?:/(.*)$", text_of(proc / f"{pid}/cgroup"), re.MULTILINE)
    inner = top / own[1] if own else top
    return [at for at in (inner, *inner.parents) if at == top or top in at.parents]


def text_of(path: Path) -> str:
    with suppress(OSError, ValueError), path.open("rb") as file:  # a path with a zero byte is no path
        return file.read(1 << 20).decode(errors="replace")
    return ""


def _number(path: Path, name: str = "") -> int | None:
    """Return the number that follows a name at the start of a line; None if there is none, as in `max`."""
    match = re.search(rf"^{name}[ \t]*(\d{{1,19}})\b", text_of(path), re.MULTILINE)
    return int(match[1]) if match else None


def check_room(num_bytes: int, what: str, remedy: str = REMEDY) -> None:
    have, limit = memory_available()
    if num_bytes > have:
        raise BackendError(
            f"{num_bytes} bytes of {what} cannot be allocated, because {have} bytes are available ({limit}); {remedy}"
        )


def populate(memory: npt.NDArray[np.uint8], what: str, remedy: str = REMEDY, *, is_new: bool = True) -> None:
    """Allocate the pages of mapped memory; no byte changes, and other threads run meanwhile.

    It takes 0.1 to 0.4 s per GB.

    Args:
        is_new: False if the pages may be in use: no room is asked for, and kernels before 5.14 do nothing.

    Raises:
        BackendError: There is no room, or the system refused for another reason.
    """
    # `mmap.madvise` would hold the interpreter's lock, and so stop every thread, for seconds. It is done in pieces,
    # because a thread that maps memory meanwhile waits for the end of one, and other processes may take memory too.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start in range(0, memory.nbytes, PIECE):
        piece = memory[start : start + PIECE]
        if is_new:
            check_room(memory.nbytes - start, what, remedy)
        if not madvise(piece.ctypes.data, piece.nbytes, POPULATE_WRITE):
            continue
        if (number := ctypes.get_errno()) != errno.EINVAL:
            raise BackendError(f"{memory.nbytes} bytes of {what} cannot be allocated: {os.strerror(number)}; {remedy}")
        if not is_new:
            return
        piece[:: mmap.PAGESIZE] |= 0
