"""STUB until the real one is merged."""

from __future__ import annotations

import mmap

import numpy as np

from asynckv.geometry.layout import Memory


class HostPool:
    def __init__(self, num_bytes: int) -> None:
        self._mmap = mmap.mmap(-1, num_bytes)
        self.array = np.frombuffer(self._mmap, np.uint8)
        self.memory = Memory(self.array.ctypes.data, num_bytes)

    def close(self) -> None:
        pass
