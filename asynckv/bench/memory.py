"""One rank's KV pool, and the pattern in it.

Every 8-byte word that a request's KV consists of is a function of (seed, request, tp_rank, layer, block
of the request, word of the block), so that a byte of another request, block, layer or rank shows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from asynckv.bench.models import Geometry
from asynckv.core.layout import ITEMSIZE, Group, Layout, Memory, attention_view, shard
from asynckv.errors import ConfigError
from asynckv.registration import Registration, register_memory

__all__ = ["ORDERS", "Pool"]

ORDERS = {
    "nhd": ("kv", "block", "token", "head", "dim"),
    "hnd": ("kv", "block", "head", "token", "dim"),
    "block-nhd": ("block", "kv", "token", "head", "dim"),
    "block-hnd": ("block", "kv", "head", "token", "dim"),
}

Words = npt.NDArray[np.uint64]
MIX = np.uint64(0x9E3779B97F4A7C15)
POISON = np.uint64(0xDEADBEEFDEADBEEF)
CHUNK = 8 << 20
"""Bytes that are made at a time."""


class Pool:
    """The KV cache of one rank: one memory per layer.

    Args:
        geometry: The model.
        order: A key of `ORDERS`.
        tp_rank, tp_size: This rank's share of the heads.
        block_size: Tokens per block.
        num_blocks: Blocks in the pool.
    """

    def __init__(
        self, geometry: Geometry, order: str, tp_rank: int, tp_size: int, block_size: int, num_blocks: int, seed: int
    ) -> None:
        lo, hi = shard(geometry.num_kv_heads, tp_rank, tp_size)
        dims = ORDERS[order]
        sizes = {"kv": 2, "block": num_blocks, "token": block_size, "head": hi - lo, "dim": geometry.head_dim}
        itemsize = ITEMSIZE[geometry.dtype]
        if geometry.head_dim * itemsize % 8:
            raise ConfigError(
                f"--head-dim {geometry.head_dim} of {geometry.dtype} is {geometry.head_dim * itemsize} bytes; the "
                f"pattern needs a multiple of 8"
            )
        self.block_bytes = 2 * block_size * (hi - lo) * geometry.head_dim * itemsize
        self._maps = [mmap.mmap(-1, self.block_bytes * num_blocks) for _ in range(geometry.num_layers)]
        raw = [np.frombuffer(m, np.uint8) for m in self._maps]
        shape = [sizes[d] if d != "dim" else geometry.head_dim * itemsize // 8 for d in dims]
        at = dims.index("block")
        self._layers: list[Words] = [np.moveaxis(r.view(np.uint64).reshape(shape), at, 0) for r in raw]
        for array in raw:
            array[::4096] = 0  # touched now, not under the clock
        layout = Layout(
            model=geometry.model,
            tp_rank=tp_rank,
            tp_size=tp_size,
            memories=tuple(Memory(r.ctypes.data, r.nbytes) for r in raw),
            groups=(Group("attention", block_size, num_blocks),),
            views=tuple(
                attention_view(
                    layer=f"layers.{i}",
                    order=dims,
                    sizes=sizes,
                    dtype=geometry.dtype,
                    heads=(lo, hi),
                    num_heads=geometry.num_kv_heads,
                    memory=i,
                )
                for i in range(geometry.num_layers)
            ),
        )
        self.registration: Registration = register_memory(layout, (raw, self._maps))
        words = self.block_bytes // 8
        self._template = np.random.default_rng(seed ^ 0x5EED).integers(0, 1 << 63, words, np.uint64)
        self._seed, self._rank = seed, tp_rank
        self._step = max(1, CHUNK // self.block_bytes)

    def fill(self, request: int, blocks: Sequence[int]) -> None:
        """Write a request's pattern."""
        for layer, ids, expected in self._chunks(request, blocks):
            layer[ids] = expected

    def poison(self, blocks: Sequence[int]) -> None:
        """Write what no request's pattern holds, so that a block nobody filled shows."""
        for layer in self._layers:
            layer[np.asarray(blocks)] = POISON

    def count_wrong(self, request: int, blocks: Sequence[int], only: Sequence[int] | None = None) -> int:
        """Compare with a request's pattern, all blocks or `only` some places; the bytes that differ."""
        wrong = 0
        for layer, ids, expected in self._chunks(request, blocks, only):
            found = np.ascontiguousarray(layer[ids])
            if not np.array_equal(found, expected):
                wrong += int(np.count_nonzero(found.view(np.uint8) != expected.view(np.uint8)))
        return wrong

    def _chunks(
        self, request: int, blocks: Sequence[int], only: Sequence[int] | None = None
    ) -> Iterator[tuple[Words, npt.NDArray[np.int64], Words]]:
        chosen = slice(None) if only is None else np.asarray(only, np.int64)
        ids = np.asarray(blocks, np.int64)[chosen]
        for number, layer in enumerate(self._layers):
            salts = np.random.default_rng((self._seed, request, self._rank, number)).integers(
                0, 1 << 63, len(blocks), np.uint64
            )[chosen]
            for lo in range(0, len(ids), self._step):
                words = self._template ^ salts[lo : lo + self._step, None]
                words *= MIX
                yield layer, ids[lo : lo + self._step], words.reshape(-1, *layer.shape[1:])
