"""Memory that another process can map: its allocation, and a check whether registered memory is of that kind.

A region can be shared if it lies in `MAP_SHARED` mappings of a file that can be opened again: by a descriptor of this
process (a memfd, torch's `share_memory_()`), or by a path (`multiprocessing.shared_memory`, a file).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asynckv.arguments import MAX_INTEGER, integer, without_control
from asynckv.edges.pages import check_room, populate
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory

REMEDY = (
    "allocate it with asynckv.shared_tensor(shape, dtype) in place of torch.zeros, or with "
    "asynckv.shared_memory(num_bytes), which numpy.frombuffer takes"
)

WHAT = "shared memory"
SHM = Path("/dev/shm")
MOST_HOLDERS = 3


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed memory that a data plane in a process of its own can map.

    `torch.frombuffer` and `numpy.frombuffer` take the result, and keep it alive. All of it is taken from the system
    here, 0.1 to 0.4 s per GB, so that no read waits for a page. Huge pages are requested; the system gives them to
    shared memory where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` allows it.

    Args:
        num_bytes: Number of bytes to allocate.

    Raises:
        ConfigError: `num_bytes` is not a number of bytes.
        BackendError: The host or a control group has less memory available; names both numbers and the limit.
    """
    num_bytes = integer("num_bytes", num_bytes, 1, MAX_INTEGER, ConfigError)
    check_room(num_bytes, WHAT)
    memory = map_shared(num_bytes)
    populate(np.frombuffer(memory, np.uint8), WHAT)
    return memory


def map_shared(num_bytes: int) -> mmap.mmap:
    """Map shared memory without its pages; `populate` allocates them, or their first use."""
    try:
        fd = os.memfd_create("asynckv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)  # keeps a duplicate of the descriptor
        finally:
            os.close(fd)
    except (OSError, OverflowError) as exc:
        raise NotShared(f"{num_bytes} bytes of {WHAT} cannot be allocated: {exc}") from exc
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class NotShared(BackendError): ...


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    is_shared: bool
    offset: int
    file: tuple[int, int]
    path: str


class Shares:
    """The mappings under some regions, with descriptors of their own; raises `NotShared` for a region without one."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.shares: list[tuple[int, int, int, int]] = []  # descriptor, offset in its file, address, length
        self._fds: dict[tuple[int, int], int] = {}
        try:
            self._find(memories)
        except BaseException:
            self.close()
            raise

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self._fds.values())

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self.shares.clear()

    def _find(self, memories: Sequence[Memory]) -> None:
        mappings, files = list(_mappings()), _open_files()
        needed: dict[int, _Mapping] = {}
        for number, memory in enumerate(memories):
            where = f"memory {number} ({memory.length} bytes)"
            if memory.kind != "cpu":
                raise NotShared(f"{where} is {memory.kind} memory, which a data plane in its own process cannot map")
            for mapping in _under(memory, mappings, where):
                needed[mapping.start] = mapping
                if mapping.file in self._fds:
                    continue
                fd = _reopen(mapping, files)
                if fd < 0:
                    raise NotShared(
                        f"{where} is shared, but neither a descriptor nor a path leads to it any more; {REMEDY}"
                    )
                self._fds[mapping.file] = fd
        self.shares = [(self._fds[m.file], m.offset, m.start, m.end - m.start) for m in needed.values()]


def _under(memory: Memory, mappings: Sequence[_Mapping], where: str) -> Iterator[_Mapping]:
    at, end = memory.base, memory.base + memory.length
    for mapping in mappings:
        if mapping.end <= at:
            continue
        if mapping.start > at or not mapping.is_shared:
            break
        yield mapping
        at = mapping.end
        if at >= end:
            return
    raise NotShared(f"{where} is private to this process; {REMEDY}")


def _mappings(process: Path = Path("/proc/self")) -> Iterator[_Mapping]:
    # The kernel escapes "\n" in a path, and no other line end.
    for line in os.fsdecode((process / "maps").read_bytes()).split("\n")[:-1]:
        place, mode, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(x, 16) for x in place.split("-"))
        major, minor = (int(x, 16) for x in device.split(":"))
        is_shared = mode.startswith("rw") and mode.endswith("s")
        yield _Mapping(
            start, end, is_shared, int(offset, 16), (os.makedev(major, minor), int(inode)), path[0] if path else ""
        )


def _open_files() -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            fd = int(name)
            status = os.fstat(fd)
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR:
                found.setdefault((status.st_dev, status.st_ino), fd)
    return found


def _reopen(mapping: _Mapping, files: dict[tuple[int, int], int]) -> int:
    """Return a new descriptor of a mapping's file; -1 if neither a descriptor nor a path leads to it."""
    with suppress(OSError):
        if mapping.file in files:
            return os.dup(files[mapping.file])
        fd = os.open(mapping.path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) == mapping.file:
            return fd
        os.close(fd)
    return -1


def shm_use(folder: Path = SHM) -> str:
    """Say how much of a memory file system is free, and name its largest files with the processes that hold them.

    A file without a name counts as well, because its memory is free only when the last process has let it go. The
    processes of other users are not seen.
    """
    system, device = os.statvfs(folder), os.stat(folder).st_dev
    sizes, names, holders = dict[int, int](), dict[int, str](), dict[int, dict[str, None]]()
    for above, _, files in os.walk(folder):
        for path in (os.path.join(above, name) for name in files):
            with suppress(OSError):  # it was removed just now
                status = os.lstat(path)
                sizes[status.st_ino], names[status.st_ino] = status.st_blocks * 512, path
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            for mapping in _mappings(process):
                if mapping.file[0] == device and mapping.path.startswith(f"{folder}/"):
                    comm = (process / "comm").read_text(errors="replace").strip()
                    inode, who = mapping.file[1], f"{process.name} ({comm})"
                    sizes.setdefault(inode, mapping.end - mapping.start)
                    names.setdefault(inode, mapping.path)
                    holders.setdefault(inode, {})[who] = None
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:MOST_HOLDERS]
    held_by = {x: ", ".join(list(holders.get(x, {"no process seen": None}))[:MOST_HOLDERS]) for x in largest}
    said = (without_control(f"{names[x]}, {sizes[x]} bytes, held by {held_by[x]}") for x in largest)
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    return f"{free} of {total} bytes of {folder} are free; its largest files: {'; '.join(said) or 'none'}"
