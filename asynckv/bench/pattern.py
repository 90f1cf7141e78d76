"""What the blocks are filled with: a function of seed, request and logical place, nothing else.

Every 8-byte word is the xor of a hash of its row (seed, request, layer, key or value, global head,
token) and a hash of its place in the row. Two requests therefore differ in every word, whatever lay in
a block before cannot pass for what belongs there, and the same token has the same bytes in any memory
order and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.bench.pool import Pool
from asynckv.core.layout import runs_of

__all__ = ["SAMPLE_EVERY", "Checked", "Pattern", "chosen_blocks"]

SAMPLE_EVERY = 16
"""With `--verify sample`: one block in so many, and the first and last of every request."""

_CHUNK_BYTES = 256 * 1024
_PLACES = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
_MASK = (1 << 64) - 1
Words = npt.NDArray[Any]
Checked = tuple[int, int]
"""Bytes compared, and bytes that were wrong."""


def chosen_blocks(num_blocks: int, request: int, verify: str) -> Sequence[int]:
    """Choose which of a request's blocks, by position, are filled and verified."""
    if verify == "full":
        return range(num_blocks)
    if verify == "off" or num_blocks == 0:
        return ()
    return sorted({0, num_blocks - 1, *range(request % SAMPLE_EVERY, num_blocks, SAMPLE_EVERY)})


class Pattern:
    """Fills and checks the blocks of one rank."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self._pool = pool
        self._seed = seed
        blocks, _, heads, tokens, words = pool.layers[0].shape
        first_head = pool.spec.heads[0]
        self._word = pool.layers[0].dtype
        self._columns = _hash(np.arange(words, dtype=np.uint64) + np.uint64(1 << 40)).astype(self._word)
        # Adding is enough: sums of multiples of unrelated odd constants do not meet by chance.
        self._places = (
            _times(np.arange(2), _PLACES[0])[:, None, None]
            + _times(np.arange(first_head, first_head + heads), _PLACES[1])[:, None]
            + _times(np.arange(tokens), _PLACES[2])
        )
        layer_block_bytes = pool.spec.block_bytes // len(pool.layers)
        self._blocks_at_once = max(1, min(_CHUNK_BYTES // layer_block_bytes, blocks))
        shape = (self._blocks_at_once, 2, heads, tokens, words)
        self._scratch = np.empty(shape, self._word)
        self._differs = np.empty(shape, np.bool_)

    def fill(self, request: int, block_ids: Sequence[int], positions: Sequence[int]) -> int:
        """Write a request's pattern into the blocks at `positions` of its list; bytes written."""
        done = 0
        for words, rows in self._pieces(request, block_ids, positions):
            np.bitwise_xor(rows[..., None], self._columns, out=words)
            done += words.size * words.itemsize
        return done

    def check(self, request: int, block_ids: Sequence[int], positions: Sequence[int]) -> Checked:
        """Compare the blocks at `positions` with a request's pattern."""
        done = wrong = 0
        for words, rows in self._pieces(request, block_ids, positions):
            expected, differs = self._scratch[: len(words)], self._differs[: len(words)]
            np.bitwise_xor(rows[..., None], self._columns, out=expected)
            np.not_equal(words, expected, out=differs)
            done += words.size * words.itemsize
            if differs.any():
                wrong += int(np.count_nonzero((words ^ expected).reshape(-1).view(np.uint8)))
        return done, wrong

    def _pieces(self, request: int, ids: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[Words, Words]]:
        """Yield blocks of one layer that lie side by side, with the hash of every row in them."""
        block_size = self._pool.spec.block_size
        chunks = list(_chunks([ids[i] for i in positions], positions, self._blocks_at_once))
        for layer, words in enumerate(self._pool.layers):
            base = _mix(_mix(_mix(self._seed) + request) + layer)
            for first, places in chunks:
                starts = _times(np.asarray(places) * block_size, _PLACES[2]) + np.uint64(base)
                rows = _hash(starts[:, None, None, None] + self._places).astype(self._word, copy=False)
                yield words[first : first + len(places)], rows


def _chunks(ids: Sequence[int], positions: Sequence[int], most: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Cut into `(first block id, positions)` of consecutive ids, at most so many at once."""
    at = 0
    for first, count in runs_of(ids):
        for i in range(0, count, most):
            n = min(most, count - i)
            yield first + i, positions[at + i : at + i + n]
        at += count


def _times(values: npt.ArrayLike, factor: int) -> npt.NDArray[np.uint64]:
    return np.asarray(values, dtype=np.uint64) * np.uint64(factor)


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64 bits (the finish of splitmix64); one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix(value: int) -> int:
    """Do the same to one number; Python's own integers do not warn when they wrap."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
