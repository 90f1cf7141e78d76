"""Places into which second looks are read, and the comparison with what the caller has: on the device that has both."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from asynckv.edges.nic.staging import bytes_at
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import NUM_PLACES, PLACE_BYTES, SHOWN, Difference, Look, first_difference


class Places:
    """Memory for looks, of each kind that the caller's memory has. A place is one look's at a time."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        size, areas = NUM_PLACES * PLACE_BYTES, dict[tuple[Literal["cpu", "cuda"], int], Any]()
        try:
            for kind, device in {(memory.kind, memory.device) for memory in memories}:
                if kind == "cpu":
                    areas[kind, device] = np.frombuffer(mmap.mmap(-1, size), np.uint8)
                else:
                    import torch

                    areas[kind, device] = torch.empty(size, dtype=torch.uint8, device=f"{kind}:{device}")
        except (OSError, RuntimeError, ImportError) as exc:
            raise BackendError(
                f"{size} bytes for second looks cannot be had: {exc}; set pull.second_look to 0"
            ) from exc
        self._kinds = [(memory.kind, memory.device) for memory in memories]
        self._ours = [bytes_at(memory) if memory.kind == "cpu" else _on_gpu(memory) for memory in memories]
        self._areas = areas
        self.memories = {
            (kind, device): Memory(
                base=area.ctypes.data if kind == "cpu" else area.data_ptr(), length=size, kind=kind, device=device
            )
            for (kind, device), area in areas.items()
        }

    def of(self, look: Look) -> Memory:
        """Return the memory with the place of a look."""
        return self.memories[self._kinds[int(look.pieces[0, 0])]]

    def compare(self, look: Look) -> Difference | None:
        """Compare what was read into a look's place with what the caller has."""
        kind, at, pairs = self._kinds[int(look.pieces[0, 0])], look.place * PLACE_BYTES, []
        for memory, offset, length in look.pieces[:, (0, 1, 4)].tolist():
            pairs.append((self._ours[memory][offset : offset + length], self._areas[kind][at : at + length]))
            at += length
        return first_difference(pairs) if kind[0] == "cpu" else first_difference_of_tensors(pairs)


def first_difference_of_tensors(pairs: Sequence[tuple[Any, Any]]) -> Difference | None:
    """Compare pairs of tensors of bytes on their device, which is waited for once."""
    import torch

    differ = torch.stack([(mine != theirs).any() for mine, theirs in pairs]).tolist()
    if True not in differ:
        return None
    mine, theirs = pairs[piece := differ.index(True)]
    at = int((mine != theirs).nonzero()[0])
    return Difference(piece, *(bytes(each[at : at + SHOWN].tolist()) for each in (mine, theirs)))


def _on_gpu(memory: Memory) -> Any:
    import torch

    interface = {"shape": (memory.length,), "typestr": "|u1", "data": (memory.base, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{memory.device}")
