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
from typing import NamedTuple

from asynckv.arguments import MAX_INTEGER, integer
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory

REMEDY = (
    "allocate it with asynckv.shared_tensor(shape, dtype) in place of torch.zeros, or with "
    "asynckv.shared_memory(num_bytes), which numpy.frombuffer takes"
)


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Allocate zeroed memory that a data plane in a process of its own can map.

    `torch.frombuffer` and `numpy.frombuffer` take the result, and keep it alive. Huge pages are requested; the system
    gives them to shared memory where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` allows it.

    Args:
        num_bytes: Number of bytes to allocate.

    Raises:
        ConfigError: `num_bytes` is not a number of bytes.
        BackendError: The system does not have that much memory.
    """
    num_bytes = integer("num_bytes", num_bytes, 1, MAX_INTEGER, ConfigError)
    try:
        fd = os.memfd_create("asynckv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)  # keeps a duplicate of the descriptor
        finally:
            os.close(fd)
    except (OSError, OverflowError) as exc:
        raise BackendError(f"{num_bytes} bytes of shared memory cannot be allocated: {exc}") from exc
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class NotShared(BackendError): ...


class Share(NamedTuple):
    fd: int
    offset: int
    address: int
    length: int


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
        self.shares: list[Share] = []
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
        self.shares = [Share(self._fds[m.file], m.offset, m.start, m.end - m.start) for m in needed.values()]


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


def _mappings() -> Iterator[_Mapping]:
    for line in Path("/proc/self/maps").read_text().splitlines():
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
