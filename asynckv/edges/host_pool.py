"""The host pool: memory of this process, aligned to huge pages, for blocks that do not fit the accelerator."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.arguments import MAX_INTEGER, integer
from asynckv.edges.pages import check_room, populate
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory

HUGE_PAGE = 2 << 20
NEEDED = "host memory", "lower host_bytes"  # what is allocated, and the remedy if there is no room


class HostPool:
    """A range of host memory, zeroed; freed by `close`. Its length is rounded up to a multiple of 4096.

    All of it is taken from the system at once, so that no copy waits for a page. With a `device` it is pinned for that
    GPU. Memory that cannot be pinned is used as well, but is slower (`how`).
    """

    def __init__(self, num_bytes: int, *, device: int | None = None) -> None:
        wanted = integer("num_bytes", num_bytes, 1, MAX_INTEGER - 2 * HUGE_PAGE, ConfigError)
        self.num_bytes = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        check_room(self.num_bytes, *NEEDED)
        try:
            self._map = mmap.mmap(-1, self.num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as exc:
            raise BackendError(f"{num_bytes} bytes of host memory cannot be mapped: {exc}; lower host_bytes") from None
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        start = -np.frombuffer(self._map, np.uint8).ctypes.data % HUGE_PAGE
        self.array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)[start : start + self.num_bytes]
        self.memory = Memory(self.array.ctypes.data, self.num_bytes)
        self.how = ""
        self._pinned: Pinned | None = None
        try:
            populate(self.array, *NEEDED)
        except BaseException:
            self.close()
            raise
        if device is not None:
            try:
                self._pinned = Pinned(self.memory.base, self.num_bytes, device)
                self.how = f"pinned for GPU {device}"
            except BackendError as exc:
                self.how = f"not pinned for GPU {device}, so copies are slower: {exc}"

    def describe(self) -> dict[str, str]:
        return {"host_memory": self.how} if self.how else {}

    def close(self) -> None:
        """Free the memory once nothing uses it: some ms per GB. Idempotent; may run on another thread."""
        if self._pinned is not None:
            self._pinned.release()
        self.array = None
        with suppress(BufferError):
            self._map.close()


FLAGS = 0x01 | 0x02  # `CU_MEMHOSTREGISTER_PORTABLE` and `_DEVICEMAP`


def load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        cause = str(exc)
    raise BackendError(f"there is no CUDA driver: {cause}")


class Pinned:
    """A range that is pinned until `release`, for a GPU by CUDA's number among those that this process may use."""

    def __init__(self, address: int, num_bytes: int, device: int) -> None:
        self._driver, self._address, self._context = load_driver(), ctypes.c_void_p(address), ctypes.c_void_p()
        self._device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        try:
            with self._current():
                self._call("cuMemHostRegister_v2", self._address, ctypes.c_size_t(num_bytes), FLAGS)
        except BaseException:
            self._leave()
            raise
        self._is_pinned = True

    def release(self) -> None:
        if not self._is_pinned:
            return
        self._is_pinned = False
        with suppress(BackendError), self._current():  # CUDA may have ended already when the interpreter ends
            self._call("cuMemHostUnregister", self._address)
        self._leave()

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _leave(self) -> None:
        with suppress(BackendError):
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        if (function := getattr(self._driver, name, None)) is None:
            raise BackendError(f"the CUDA driver has no {name}; it is too old")
        if code := function(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise BackendError(f"{name}: {(text.value or b'unknown').decode(errors='replace')} (error {code})")
