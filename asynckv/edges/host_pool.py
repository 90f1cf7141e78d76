"""The host pool: memory of this process, in one range aligned to huge pages, for blocks that do not fit the
accelerator."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from asynckv.arguments import MAX_INTEGER, integer
from asynckv.edges.pinning import Pinned
from asynckv.edges.sharing import shared_memory
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory

HUGE_PAGE = 2 << 20
POPULATE_WRITE = 23  # `MADV_POPULATE_WRITE`, which Python does not name: since Linux 5.14
PIECE = 64 << 20  # what is taken at a time


class HostPool:
    """A range of host memory, zeroed; freed by `close`.

    Args:
        num_bytes: Its length; rounded up to 4096.
        shared: Other processes can map it.
        populate: Take all of it from the system now, 0.1 to 0.4 s per GB, so that no copy waits for a page.
        device: The GPU that it is pinned for; None if there is none.

    Attributes:
        how: What became of pinning it. Memory that cannot be pinned serves as well, and slower.

    Raises:
        ConfigError: It is no number of bytes.
        BackendError: The system has not so much memory.
    """

    def __init__(
        self, num_bytes: int, *, shared: bool = False, populate: bool = False, device: int | None = None
    ) -> None:
        wanted = integer("num_bytes", num_bytes, 1, MAX_INTEGER - 2 * HUGE_PAGE, ConfigError)
        self.num_bytes = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self.num_bytes + HUGE_PAGE
        if shared:
            self._map = shared_memory(length)
        else:
            try:
                self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError) as exc:
                raise _lacking(num_bytes, str(exc)) from None
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        start = -np.frombuffer(self._map, np.uint8).ctypes.data % HUGE_PAGE
        self.array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)[start : start + self.num_bytes]
        """Its bytes; None once closed."""
        self.memory = Memory(self.array.ctypes.data, self.num_bytes)
        self.is_shared = shared
        self.how = ""
        self._pinned: Pinned | None = None
        try:
            if populate:
                self._populate()
        except BaseException:
            self.close()
            raise
        if device is not None:
            try:
                self._pinned = Pinned(self.memory.base, self.num_bytes, device)
                self.how = f"pinned for GPU {device}"
            except BackendError as exc:
                self.how = f"not pinned for GPU {device}, so copies are slower: {exc}"

    def _populate(self) -> None:
        # Not `mmap.madvise`, which keeps the interpreter's lock, and with it every thread, for seconds; and in pieces,
        # because who maps memory meanwhile waits for the end of one.
        assert self.array is not None
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start in range(0, self.num_bytes, PIECE):
            address, length = self.memory.base + start, min(PIECE, self.num_bytes - start)
            if not madvise(address, length, POPULATE_WRITE):
                continue
            if (number := ctypes.get_errno()) != errno.EINVAL:
                raise _lacking(self.num_bytes, os.strerror(number))
            ctypes.memset(address, 0, length)  # the kernel is too old

    def describe(self) -> dict[str, str]:
        return {"host_memory": self.how} if self.how else {}

    def close(self) -> None:
        """Give the memory back, once nothing reads or writes it: some ms per GB. Idempotent; may run on another
        thread."""
        if self._pinned is not None:
            self._pinned.release()
        self.array = None
        with suppress(BufferError):
            self._map.close()


def _lacking(num_bytes: int, why: str) -> BackendError:
    free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    return BackendError(
        f"{num_bytes} bytes of host memory are not to be had ({why}; {free} bytes are free); lower host_bytes"
    )
