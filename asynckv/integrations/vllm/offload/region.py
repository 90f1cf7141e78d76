"""The host memory of an engine: one region that the scheduler's process and all workers map.

It is a file in `/dev/shm` named after the engine's id. The first job that ends shows that all have mapped it. The file
is then unlinked, and the memory lives as long as the processes. Each process holds a lock on the file, so that the next
engine can remove the file of a killed one.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.edges.host_pool import NEEDED, Pinned
from asynckv.edges.pages import memory_available, populate
from asynckv.edges.sharing import shm_use
from asynckv.errors import AsyncKVError, BackendError, ConfigError
from asynckv.geometry.layout import Memory

FOLDER = Path("/dev/shm")  # names in it cannot be guessed without the engine's id
PREFIX = "asynckv-offload-"
HEAD = mmap.ALLOCATIONGRANULARITY  # length of the header: the shape, and the ranks that have mapped the memory
RANKS = 1024  # offset in the header of one byte per rank


class Shape(NamedTuple):
    """Shape of the region: `slots`, each of `blocks` (vLLM's chunk) of `block_bytes`, padded, on `ranks`."""

    block_bytes: int
    blocks: int
    ranks: int
    slots: int

    @property
    def slot_bytes(self) -> int:
        return self.block_bytes * self.blocks * self.ranks


class Region:
    """Memory of an engine: one per data-parallel rank."""

    def __init__(self, engine_id: str, shape: Shape) -> None:
        self.path = path_of(engine_id)
        self.num_bytes = num_bytes = shape.slots * shape.slot_bytes
        sweep()
        self._fd = _opened(self.path)
        try:
            if os.fstat(self._fd).st_uid != os.geteuid():
                raise BackendError(f"{self.path} belongs to another user; remove it")
            self._agree(shape)
            # Another process of the engine may have allocated it; then only the page tables of this one are missing.
            have, limit = memory_available()
            if num_bytes - os.fstat(self._fd).st_blocks * 512 > have:
                raise OSError(f"{have} bytes are available: {limit}")
            os.posix_fallocate(self._fd, HEAD, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes, offset=HEAD)
        except (OSError, OverflowError, AsyncKVError) as exc:
            os.close(self._fd)
            if isinstance(exc, AsyncKVError):
                raise
            self.path.unlink(missing_ok=True)
            raise BackendError(
                f"{num_bytes} bytes of host memory cannot be had in {FOLDER} ({exc}): {shm_use(FOLDER)}; lower "
                f"host_bytes, or give the container more shared memory (docker run --shm-size), or remove files that "
                f"no process holds"
            ) from None
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.memory = Memory(self.array.ctypes.data, num_bytes)
        with suppress(BackendError):  # copies work without, but wait for pages
            populate(self.array, *NEEDED, is_new=False)
        self._pinned: Pinned | None = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on the header against other processes."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, HEAD)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, HEAD)

    def _agree(self, shape: Shape) -> None:
        with self._alone():
            said = ", ".join(f"{name}={value}" for name, value in shape._asdict().items()).encode()
            found = os.pread(self._fd, RANKS, 0).rstrip(b"\0")
            if not found:
                os.ftruncate(self._fd, HEAD)
                os.pwrite(self._fd, said, 0)
            elif found != said:
                raise ConfigError(
                    f"this process would divide the host memory by {said.decode()}, but another one of the engine by "
                    f"{found.decode(errors='replace')}: all must have layers of the same bytes; use a "
                    f"pipeline-parallel size that divides the number of layers, or, if these are two engines, give "
                    f"each an engine_id of its own"
                )

    def join(self, rank: int) -> None:
        """Note that a rank uses the region; raise `ConfigError` if another process is this rank."""
        with self._alone():
            if os.pread(self._fd, 1, RANKS + rank) == b"\1":
                raise ConfigError(
                    f"another process has this host memory as rank {rank} of an engine of this id: two engines "
                    f"would write into each other's blocks; leave engine_id out, or give each its own"
                )
            os.pwrite(self._fd, b"\1", RANKS + rank)

    def joined(self) -> int:
        """Return the number of ranks that use the region; ranks on other hosts have their own."""
        return sum(os.pread(self._fd, HEAD - RANKS, RANKS))

    def pin(self, device: int) -> None:
        self._pinned = Pinned(self.memory.base, self.num_bytes, device)

    def close(self) -> None:
        """Give the memory back. Idempotent. Nothing may read or write it any more."""
        if self._pinned is not None:
            self._pinned.release()
        self.array = np.zeros(0, np.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with suppress(BufferError):  # it is unmapped with the last array that uses it
            self._map.close()


def path_of(engine_id: str) -> Path:
    return FOLDER / f"{PREFIX}{hashlib.sha256(engine_id.encode()).hexdigest()[:32]}"


def sweep() -> None:
    """Remove files of engines that were killed while they started: those that no process has locked."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or just removed
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def _opened(path: Path) -> int:
    """Open or create a region's file, and lock it as in use."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError as exc:
            raise BackendError(f"{path} cannot be opened ({exc}); remove it if no engine uses it") from None
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)  # another process removed it before it was locked, so open again
