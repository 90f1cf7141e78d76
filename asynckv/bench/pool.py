"""One rank's KV blocks: the memory, its layout, and who has which block.

Plain anonymous memory, so that a worker needs neither torch nor an accelerator. All layers lie in one
registered range, one after the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.bench.models import Geometry
from asynckv.core.layout import Group, Layout, Memory, attention_view, shard
from asynckv.errors import ConfigError

__all__ = ["ORDERS", "Custody", "Pool", "PoolSpec", "parse_order"]

ORDERS = {
    "hnd": ("block", "kv", "head", "token", "dim"),
    "nhd": ("block", "kv", "token", "head", "dim"),
}
POISON = 0xA5
_HUGE = 2 << 20


def parse_order(text: str) -> tuple[str, ...]:
    """Resolve a memory order: `hnd`, `nhd`, or the five dims from slowest to fastest.

    Raises:
        ConfigError: It is no permutation.
    """
    order = ORDERS.get(text.lower()) or tuple(name.strip() for name in text.split(","))
    if sorted(order) != sorted(ORDERS["hnd"]):
        raise ConfigError(f"memory order {text!r} is neither hnd, nhd nor a permutation of {','.join(ORDERS['hnd'])}")
    return order


class PoolSpec(msgspec.Struct, frozen=True):
    """What one rank's pool looks like."""

    geometry: Geometry
    block_size: int
    num_blocks: int
    order: tuple[str, ...]
    tp_rank: int
    tp_size: int
    huge_pages: bool = False

    @property
    def heads(self) -> tuple[int, int]:
        """The KV heads that this rank holds."""
        return shard(self.geometry.num_kv_heads, self.tp_rank, self.tp_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        lo, hi = self.heads
        return self.geometry.token_bytes(hi - lo) * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.block_bytes * self.num_blocks


class Pool:
    """The memory of one rank, and its blocks as numpy sees them.

    Attributes:
        layers: Per layer an array of words `[block, kv, head, token, word]`, whatever the memory order.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self._map = mmap.mmap(-1, max(spec.num_bytes, mmap.PAGESIZE))
        if spec.huge_pages:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(self._map, np.uint8)
        memory.fill(POISON)  # every page is there before anything is timed
        self.layout = _layout(spec, Memory(memory.ctypes.data, len(memory)))
        self.layers = [self._words(i) for i in range(spec.geometry.num_layers)]

    @property
    def owners(self) -> tuple[object, ...]:
        """What keeps the memory alive."""
        return (self._map,)

    def _words(self, layer: int) -> npt.NDArray[Any]:
        view, spec = self.layout.views[layer], self.spec
        k, v = view.parts
        sizes, strides = ({d.name: getattr(d, field) for d in k.dims} for field in ("size", "stride"))
        row = sizes["dim"] * k.itemsize if strides["dim"] == k.itemsize else k.itemsize
        word = next(n for n in (8, 4, 2, 1) if row % n == 0)
        per_row, step = (row // word, word) if row > k.itemsize else (sizes["dim"], strides["dim"])
        return np.ndarray(
            (spec.num_blocks, 2, sizes["head"], sizes["token"], per_row),
            f"<u{word}",
            self._map,
            view.offset,
            (view.stride, v.offset - k.offset, strides["head"], strides["token"], step),
        )


def _layout(spec: PoolSpec, memory: Memory) -> Layout:
    geometry, (lo, hi) = spec.geometry, spec.heads
    sizes = {
        "block": spec.num_blocks,
        "kv": 2,
        "head": hi - lo,
        "token": spec.block_size,
        "dim": geometry.head_dim,
    }
    layer_bytes = spec.num_bytes // geometry.num_layers
    return Layout(
        model=geometry.model,
        tp_rank=spec.tp_rank,
        tp_size=spec.tp_size,
        memories=(memory,),
        groups=(Group("attention", spec.block_size, spec.num_blocks),),
        views=tuple(
            attention_view(
                layer=f"layers.{i}",
                order=spec.order,
                sizes=sizes,
                dtype=geometry.dtype,
                heads=(lo, hi),
                num_heads=geometry.num_kv_heads,
                offset=i * layer_bytes,
            )
            for i in range(geometry.num_layers)
        ),
    )


class Custody:
    """Which blocks of one rank are out; whatever is still out at the end has leaked."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._out: set[int] = set()

    @property
    def num_out(self) -> int:
        """Blocks that did not come back yet."""
        return len(self._out)

    def take(self, block_ids: Sequence[int]) -> None:
        """Hand blocks to a request.

        Raises:
            ValueError: A block is out already, doubled or not there: the benchmark's own mistake.
        """
        wanted = set(block_ids)
        if len(wanted) != len(block_ids) or wanted & self._out or not all(0 <= b < self._num_blocks for b in wanted):
            raise ValueError(f"blocks {sorted(wanted)[:8]} ... are not free")
        self._out |= wanted

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Take blocks back."""
        self._out -= set(block_ids)
