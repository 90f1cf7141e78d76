"""Host memory that a GPU copies to and from by itself: pages that stay where they are, and are known to CUDA.

The driver (`libcuda.so.1`) is asked, in the primary context of the GPU that holds the engine's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from asynckv.errors import BackendError

FLAGS = 0x01 | 0x02  # `CU_MEMHOSTREGISTER_PORTABLE` and `_DEVICEMAP`


def load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        cause = str(exc)
    raise BackendError(f"there is no CUDA driver: {cause}")


class Pinned:
    """A range that is pinned until `release`.

    Args:
        device: The GPU that holds the engine's memory, as CUDA numbers those that this process may use.

    Raises:
        BackendError: It cannot be, and why; nothing is left behind.
    """

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
        """Give the range back; before its memory is. Idempotent."""
        if not self._is_pinned:
            return
        self._is_pinned = False
        with suppress(BackendError), self._current():  # CUDA ends before us where an interpreter ends
            self._call("cuMemHostUnregister", self._address)
        self._leave()

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Have the GPU's context current on this thread, whatever it had before."""
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
