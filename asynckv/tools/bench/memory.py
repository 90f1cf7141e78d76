"""One rank's KV pool, and the pattern in it.

In every layout, an element is a function of (seed, request, layer, part, token, place in the whole model's axes). So a
byte of another request, token, layer, head or rank is detected. Tokens that requests share depend on their chunk
instead of the request.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.edges.sharing import shared_memory
from asynckv.edges.torch import CudaMirror, synchronize
from asynckv.geometry.check import Registration, register_memory
from asynckv.geometry.layout import TOKEN, Group, Layout, Part, TokenShard, View
from asynckv.tools.plan.layouts import with_addresses

Lists = Sequence[tuple[int, Sequence[int | None]]]
"""Per group: the first token, and the blocks from the one that holds this token, as the engines give them."""

Prefix = tuple[int, Sequence[int]]  # tokens per chunk, and the ids of a request's leading chunks
NOTHING_SHARED: Prefix = 1, ()

Words = npt.NDArray[Any]
Uint64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
POISON = 0xDEADBEEFDEADBEEF
SHARED = 0x5348415245440000
"""Replaces the request's number in the pattern of a shared chunk."""
CHUNK = 8 << 20  # bytes of pattern that are made at a time
TOKEN_STEP = np.uint64(0x9E3779B97F4A7C15)
AXIS_STEP = np.uint64(0xC2B2AE3D27D4EB4F)
DIM_STEP = np.uint64(0xD6E8FEB86659FD93)
"""Odd and different, so that sums of their multiples are the same for no two places of a model."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One part of one layer as an array `[kernel block, token (unless a state), unit or 1, dims ...]` of words."""

    group: int
    shard: TokenShard
    salt: int
    array: Words
    shift: np.uint64
    """Right shift of a 64-bit value; its upper bits are the element."""
    places: Uint64s
    """Amounts that the places along axis and dims add: `[unit, dims ...]`."""
    token_bytes: int


class Pool:
    def __init__(self, layout: Layout, seed: int) -> None:
        raw, placed = self._allocated(layout)
        self.registration: Registration = register_memory(placed, (raw, self))
        self._layout, self._seed = self.registration.layout, seed
        self._fields = [_field(layout, v, p, raw[v.memory]) for v in layout.views for p in v.parts]

    def _allocated(self, layout: Layout) -> tuple[list[npt.NDArray[np.uint8]], Layout]:
        """Allocate the memory, and return it as this process sees it, and the layout with its addresses."""
        raw = [np.frombuffer(shared_memory(m.length), np.uint8) for m in layout.memories]
        return raw, with_addresses(layout, [r.ctypes.data for r in raw])

    async def publish(self) -> None:
        """Wait until filled and poisoned blocks can be read by other processes."""

    def fetch(self) -> None:
        """Make writes of other processes visible here."""

    def fill(self, request: int, lists: Lists, tokens: int, prefix: Prefix = NOTHING_SHARED) -> None:
        """Write a request's pattern for all tokens, and the states after the last one."""
        for it, ids, _, expected in self._chunks(request, lists, tokens, prefix):
            it.array[ids] = expected

    def poison(self, lists: Lists) -> None:
        """Write a value that is in no request's pattern, so that an unwritten block is detected."""
        for it in self._fields:
            group = self._layout.groups[it.group]
            ids = _kernel_blocks(group, [b for b in lists[it.group][1] if b is not None])
            it.array[ids] = np.uint64(POISON) >> it.shift

    def check(self, request: int, lists: Lists, tokens: int, prefix: Prefix = NOTHING_SHARED) -> tuple[int, int]:
        """Compare with a request's pattern; return the number of bytes that were compared and of those that differ.

        Bytes before a list's first token must still be poison. Tokens after the last one, or before a window, are not
        checked.
        """
        compared = wrong = 0
        for it, ids, token, expected in self._chunks(request, lists, tokens, prefix):
            found = np.ascontiguousarray(it.array[ids])
            num_bytes = found.nbytes
            if token is not None:
                first = lists[it.group][0]
                wanted = (token >= self._begin(it, first, tokens)) & (token < tokens)
                num_bytes = int(wanted.sum()) * it.token_bytes
                if not wanted.all():
                    kept = token < first
                    expected[kept] = np.uint64(POISON) >> it.shift
                    found, expected = found[wanted | kept], expected[wanted | kept]
            compared += num_bytes
            wrong += _differ(found, expected)
        return compared, wrong

    def wanted(self, lists: Lists, tokens: int) -> int:
        """Return the number of a request's bytes that belong into these blocks."""
        total = 0
        for it in self._fields:
            group, (first, blocks) = self._layout.groups[it.group], lists[it.group]
            if all(b is None for b in blocks):
                continue
            here = it.shard.count(tokens) - it.shard.count(min(self._begin(it, first, tokens), tokens))
            total += it.token_bytes * (here if group.kind == "tokens" else int(first < tokens))
        return total

    def _begin(self, it: _Field, first: int, tokens: int) -> int:
        """Return the first token that is read: `first`, or one inside the group's window."""
        window = self._layout.groups[it.group].window
        return max(first, tokens - window + 1) if window else first

    def _chunks(
        self, request: int, lists: Lists, tokens: int, prefix: Prefix
    ) -> Iterator[tuple[_Field, Int64s, Int64s | None, Words]]:
        """Yield, per part and a few kernel blocks: ids, the tokens in each (None of states), and the expected words."""
        for it in self._fields:
            group = self._layout.groups[it.group]
            first, blocks = lists[it.group]
            salt = _mix(self._seed, request, it.salt)
            chunk_tokens, chunks = prefix
            if group.kind == "state":
                if (slots := [b for b in blocks if b is not None]) and first < tokens:
                    values = it.places + np.uint64((salt + tokens * int(TOKEN_STEP)) % (1 << 64))
                    yield it, np.array(slots[-1:]), None, (values >> it.shift).astype(it.array.dtype)[None]
                continue
            size, start = it.array.shape[1], first // group.block_size
            places = [i for i, b in enumerate(blocks) if b is not None]
            if not places:
                continue
            ids = _kernel_blocks(group, [b for b in (blocks[i] for i in places) if b is not None])
            kernel = ((np.array(places)[:, None] + start) * group.ratio + np.arange(group.ratio)).ravel()
            step = max(1, CHUNK // max(1, it.token_bytes * size))
            salts = np.array([*(_mix(self._seed, SHARED, c, it.salt) for c in chunks), salt], np.uint64)
            for lo in range(0, len(ids), step):
                token = _tokens(it.shard, kernel[lo : lo + step, None] * size + np.arange(size))
                mine = salts[np.minimum(token // chunk_tokens, len(chunks))] if chunks else np.uint64(salt)
                steps = token.astype(np.uint64) * TOKEN_STEP + mine
                values = steps.reshape(*steps.shape, *[1] * it.places.ndim) + it.places
                if it.shift:
                    values >>= it.shift
                yield it, ids[lo : lo + step], token, values.astype(it.array.dtype, copy=False)


class CudaPool(Pool):
    """A pool in GPU memory, which is filled and compared through a copy on the host."""

    def _allocated(self, layout: Layout) -> tuple[list[npt.NDArray[np.uint8]], Layout]:
        self._mirror = mirror = CudaMirror([m.length for m in layout.memories])
        placed = with_addresses(layout, mirror.bases)
        memories = (msgspec.structs.replace(m, kind="cuda", device=mirror.device) for m in placed.memories)
        return mirror.arrays, msgspec.structs.replace(placed, memories=tuple(memories))

    async def publish(self) -> None:
        await synchronize(self._mirror.upload())

    def fetch(self) -> None:
        self._mirror.download()


def _differ(found: Words, expected: Words) -> int:
    if np.array_equal(found, expected):
        return 0
    expected = np.ascontiguousarray(expected)
    return int(np.count_nonzero(found.view(np.uint8) != expected.view(np.uint8)))


def _tokens(shard: TokenShard, place: Int64s) -> Int64s:
    """Return the tokens at places of a rank: the places are those of its own tokens, in order."""
    turn, within = np.divmod(place, shard.interleave)
    return (turn * shard.size + shard.rank) * shard.interleave + within


def _kernel_blocks(group: Group, blocks: Sequence[int]) -> Int64s:
    ids = np.asarray(blocks, np.int64)
    return (ids[:, None] * group.ratio + np.arange(group.ratio)).ravel()


def _mix(*numbers: int) -> int:
    """Hash numbers into 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())


def _field(layout: Layout, view: View, part: Part, raw: npt.NDArray[np.uint8]) -> _Field:
    """Return a part as an array of words, as wide as its innermost dim allows in every layout of the model."""
    group = layout.groups[view.group]
    dims = {d.name: d for d in part.dims}
    token, axis = dims.get(TOKEN), dims.get(part.axis)
    rest = [d for d in part.dims if d is not token and d is not axis]
    # Only dims that are dense in every memory order may be grouped into wider words.
    last = next((d for d in rest if d.name == "dim" or d.name == f"dim{len(rest) - 1}"), None)
    word = (
        math.gcd(last.size * part.itemsize, 8) if last is not None and last.stride == part.itemsize else part.itemsize
    )
    sizes = [d.size * part.itemsize // word if d is last else d.size for d in sorted(rest, key=lambda d: d.name)]
    strides = [word if d is last else d.stride for d in sorted(rest, key=lambda d: d.name)]
    start = view.offset + part.offset
    array = np.lib.stride_tricks.as_strided(
        raw[start:][: len(raw) - start].view(np.uint8),
        shape=(group.num_kernel_blocks, token.size if token else 1, axis.size if axis else 1, *sizes, word),
        strides=(view.stride, token.stride if token else 1, axis.stride if axis else 1, *strides, 1),
    ).view({8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}[word])[..., 0]
    if group.kind == "state":
        array = array[:, 0]
    lo = part.held[0] if axis else 0
    units = (np.arange(axis.size if axis else 1, dtype=np.uint64) + np.uint64(lo)) * AXIS_STEP
    inner = (np.arange(math.prod(sizes), dtype=np.uint64) * DIM_STEP).reshape(sizes)
    places = units.reshape(-1, *[1] * len(sizes)) + inner
    name = zlib.crc32(f"{view.layer}/{part.name}".encode())
    token_bytes = (axis.size if axis else 1) * math.prod(sizes) * word
    return _Field(view.group, layout.shard(view.group), name, array, np.uint64(64 - 8 * word), places, token_bytes)
