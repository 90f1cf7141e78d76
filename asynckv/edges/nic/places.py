"""Places into which second looks are read, and the comparison with what the caller has: on the device that has both."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from asynckv.edges.nic.staging import bytes_at
from asynckv.edges.torch import cuda_bytes, cuda_memory, first_difference_of_tensors
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import NUM_PLACES, PLACE_BYTES, Difference, Look, first_difference

SIZE = NUM_PLACES * PLACE_BYTES
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


class Places:
    """Memory for looks, of each kind that the caller's memory has. A place is one look's at a time."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._kinds = [(memory.kind, memory.device) for memory in memories]
        self._bases = [memory.base for memory in memories]
        self._ours = list[Any]()
        self._areas, self.memories = dict[tuple[str, int], Any](), dict[tuple[str, int], Memory]()
        try:
            for memory in memories:
                self._ours.append(bytes_at(memory) if memory.kind == "cpu" else cuda_bytes(memory))
            for kind, device in dict.fromkeys(self._kinds):
                area: Any = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8) if kind == "cpu" else cuda_memory(SIZE, device)
                base = area.ctypes.data if kind == "cpu" else area.data_ptr()
                self._areas[kind, device], self.memories[kind, device] = area, Memory(base, SIZE, kind, device)
        except (OSError, RuntimeError, ImportError) as exc:
            text = f"{SIZE} bytes for second looks cannot be had: {exc}; set pull.second_look to 0"
            raise BackendError(text) from exc

    def of(self, look: Look) -> Memory:
        """Return the memory with the place of a look."""
        return self.memories[self._kinds[int(look.pieces[0, 0])]]

    def compare(self, look: Look) -> Difference | None:
        """Compare what was read into a look's place with what the caller has."""
        kind, at, pairs = self._kinds[int(look.pieces[0, 0])], look.place * PLACE_BYTES, []
        if kind[0] == "cpu" and self._is_same(look):
            return None
        for memory, offset, length in look.pieces[:, (0, 1, 4)].tolist():
            pairs.append((self._ours[memory][offset : offset + length], self._areas[kind][at : at + length]))
            at += length
        return first_difference(pairs) if kind[0] == "cpu" else first_difference_of_tensors(pairs)

    def _is_same(self, look: Look) -> bool:
        """Compare host memory in place, which takes a tenth of the time of numpy's comparison."""
        theirs = self.of(look).base + look.place * PLACE_BYTES
        for memory, offset, length in look.ranges(0).tolist():
            if _memcmp(self._bases[memory] + offset, theirs, length):
                return False
            theirs += length
        return True
