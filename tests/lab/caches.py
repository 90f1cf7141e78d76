"""Caches of random models, cut and laid out in random ways, in which every byte is known.

A `Model` says what a cache holds, on any engine: groups of layers with attention, latents, scales, windows or
states, each with dims and dtypes of its own. A `Shape` says how one engine holds it: ranks, block sizes, kernel blocks,
orders of dims, pages. Both are drawn from a seed. What a layer holds of some tokens is a digest of the hash that covers
them, so a block's bytes are known from the prompt alone, and any rank of any shape can be filled and judged.

Nothing in here knows how anything is moved: a block is found by what its layout declares.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from asynckv.geometry.layout import ITEMSIZE, TOKEN, Dim, Group, Layout, Memory, Part, TokenShard, View, shard
from asynckv.testing.fabric import Bytes, bytes_at

Places = npt.NDArray[np.int64]
Blocks = list[list[int | None]]
"""Of each group; `None` where no block is needed, or it is there already."""
FREED = 0xEE
"""Byte that fills unused memory."""

STYLES = ("layers", "regions", "blocks", "pages")
"""A memory per layer, with its parts side by side in a block, or each in a region of its own; all layers of a block
side by side; or one memory of pages that all groups share, so that a block id of one group is none of another's."""


@dataclass(frozen=True)
class PartKind:
    """An array that each layer of a group has: its dims without tokens, of the whole model."""

    name: str
    dtype: str
    dims: tuple[tuple[str, int], ...]
    axis: str = ""
    tokens: int = 1
    """That one entry covers; 0: a whole kernel block has one, or a state is one."""


@dataclass(frozen=True)
class GroupKind:
    """Layers that are alike."""

    name: str
    parts: tuple[PartKind, ...]
    num_layers: int
    is_state: bool = False
    window: int = 0

    def in_place(self, size: int, first: int, tokens: int) -> range:
        """Which blocks of some size are filled by a load, or a pull, that begins at one token and ends at another."""
        end, begin = -(-tokens // size), first // size
        if self.is_state:  # the one after the last token, wherever that is
            begin = end - 1 if first < tokens else end
        elif self.window:
            begin = max(begin, (tokens - self.window + 1) // size)
        return range(max(begin, 0), end)


@dataclass(frozen=True)
class Model:
    """The content of a cache.

    Attributes:
        hash_tokens: Tokens per hash.
    """

    groups: tuple[GroupKind, ...]
    hash_tokens: int
    heads: int

    @property
    def is_hybrid(self) -> bool:
        """A shorter prefix needs other blocks than a longer one."""
        return any(kind.is_state or kind.window for kind in self.groups)

    def __str__(self) -> str:
        return ", ".join(
            f"{g.name}: {g.num_layers} layers of {'+'.join(f'{p.name}[{p.dtype}]' for p in g.parts)}"
            f"{f', window {g.window}' if g.window else ''}"
            for g in self.groups
        )


@dataclass(frozen=True)
class Shape:
    """The arrangement of a cache in an engine.

    Attributes:
        hashes: Per group, how many hashes a block covers.
        ratios: Per group, kernel blocks per block.
        seed: Of orders and gaps.
        shards: Number of neighbouring ranks that share the tokens of every group that can be shared.
        turn: Consecutive tokens on one of them.
    """

    tp_size: int
    hashes: tuple[int, ...]
    ratios: tuple[int, ...]
    num_blocks: int
    style: str
    seed: int
    shards: int = 1
    turn: int = 1

    @property
    def align(self) -> int:
        """Hashes between ends of blocks in all groups."""
        return math.lcm(*self.hashes)

    def pool(self, group: int) -> int:
        """Groups of one pool share pages: an id there is one block."""
        return 0 if self.style == "pages" else group

    def __str__(self) -> str:
        return (
            f"TP {self.tp_size}, {'/'.join(map(str, self.hashes))} hashes per block, ratios "
            f"{'/'.join(map(str, self.ratios))}, {self.num_blocks} blocks, {self.style}"
            f"{f', tokens shared by {self.shards}, {self.turn} at a time' if self.shards > 1 else ''}"
        )

    def shards_of(self, model: Model, group: int) -> int:
        """How many ranks share the tokens of a group: one where they cannot, and each has all."""
        kind, size = model.groups[group], self.hashes[group] * model.hash_tokens
        kernel, entry = size // self.ratios[group] // self.shards, max(part.tokens for part in kind.parts)
        is_plain = not (kind.is_state or kind.window) and all(part.tokens for part in kind.parts)
        is_even = size % (self.shards * self.turn) == 0 and (kernel % self.turn == 0 or self.turn % kernel == 0)
        return self.shards if is_plain and is_even and kernel and self.turn % entry == 0 else 1


def draw_model(rng: random.Random, hash_tokens: int = 4) -> Model:
    """Draw a model."""
    heads = rng.choice([4, 4, 2, 1])
    groups = []
    for i in range(rng.choice([1, 1, 2, 2, 3])):
        dtype, width = rng.choice(["bfloat16", "float8_e4m3fn", "float32"]), rng.choice([2, 3, 8])
        kind = rng.choice(["attention", "attention", "latent", "scaled", "window", "state"])
        per_head = (("head", heads), ("dim", width))
        keys = PartKind("k", dtype, per_head, "head"), PartKind("v", dtype, per_head, "head")
        parts: tuple[PartKind, ...] = keys
        if kind == "latent":
            parts = (PartKind("kv", dtype, (("dim", 4 * width),)),)
        elif kind == "scaled":
            parts = (*keys, PartKind("scale", "float32", (("head", heads),), "head", rng.choice([1, hash_tokens])))
        elif kind == "state":
            parts = (
                PartKind("conv", dtype, (("head", heads), ("tap", 3)), "head", 0),
                PartKind("state", "float32", per_head, "head", 0),
            )
        window = rng.choice([2, 5, 9]) * hash_tokens // 2 if kind == "window" else 0
        groups.append(GroupKind(f"{kind}{i}", parts, rng.choice([1, 2]), kind == "state", window))
    return Model(tuple(groups), hash_tokens, heads)


def draw_shape(rng: random.Random, model: Model, *, tp_size: int = 0, num_blocks: int = 24) -> Shape:
    """Draw how an engine of some ranks holds it."""
    tp_size = tp_size or rng.choice([1, 1, 1, 2, 4])
    hashes = tuple(rng.choice([1, 1, 2, 4]) for _ in model.groups)
    # A kernel block has whole entries of every part.
    ratios = tuple(
        1 if kind.is_state else rng.choice([1, 1, many]) for kind, many in zip(model.groups, hashes, strict=True)
    )
    style, seed = rng.choice(STYLES), rng.randrange(1 << 30)
    shared = random.Random(repr(("shards", seed)))  # what is drawn otherwise stays what it was
    shards = shared.choice([n for n in (1, 1, 2, 4) if tp_size % n == 0])
    return Shape(tp_size, hashes, ratios, num_blocks, style, seed, shards, shared.choice([1, 1, 2, 4]))


def chain(name: str, count: int) -> list[str]:
    """Hashes of a prompt."""
    return [f"{name}:{i}" for i in range(count)]


@lru_cache(maxsize=1 << 16)
def _said(hash_: str, layer: str, kind: PartKind, held: tuple[int, int], hash_tokens: int) -> Bytes:
    """Return a rank's bytes of a layer's part for the tokens of a hash: tokens first, then dims by name, then bytes."""
    dims = sorted(kind.dims)
    tokens = [hash_tokens // kind.tokens] if kind.tokens else []
    shape = [*tokens, *(size for _, size in dims), ITEMSIZE[kind.dtype]]
    said = hashlib.shake_128(f"{hash_}/{layer}/{kind.name}".encode()).digest(math.prod(shape))
    found = np.frombuffer(said, np.uint8).reshape(shape)
    if kind.axis:
        found = found.take(range(*held), [name for name, _ in dims].index(kind.axis) + len(tokens))
    return found


def layout_of(model: Model, shape: Shape, tp_rank: int = 0, *, base: int = 1 << 40) -> Layout:
    """Return one rank's layout; its memories follow each other from a base on."""
    rng, n = random.Random(shape.seed), shape.num_blocks
    groups, views, lengths, shared = [], list[View](), list[int](), list[TokenShard]()
    pages = [0] * len(model.groups)
    for g, (kind, hashes, ratio) in enumerate(zip(model.groups, shape.hashes, shape.ratios, strict=True)):
        size = hashes * model.hash_tokens
        groups.append(Group(kind.name, size, n, ratio, "state" if kind.is_state else "tokens", kind.window))
        page, mine = 0, list[View]()
        if (shards := shape.shards_of(model, g)) > 1:
            shared.append(TokenShard(g, shards, tp_rank % shards, shape.turn))
        for at in range(kind.num_layers):
            parts, regions = list[Part](), list[int]()
            offset = 0
            for part in kind.parts:
                # Neighbours that share tokens have the same heads.
                place = tp_rank // shards, shape.tp_size // shards
                made = _part(rng, part, size // ratio // shards, model.heads, *place)
                span = _up(made.itemsize * math.prod(dim.size for dim in made.dims) + rng.choice([0, 0, 16]), 16)
                parts.append(made)
                regions.append(span)
                offset += span
            stride = max(regions) if shape.style == "regions" else offset
            starts = [i * n * ratio * stride for i in range(len(parts))]
            if shape.style != "regions":
                starts = [sum(regions[:i]) for i in range(len(parts))]
            placed = tuple(_moved(part, start) for part, start in zip(parts, starts, strict=True))
            memory = len(lengths) if shape.style in ("layers", "regions") else g * (shape.style == "blocks")
            mine.append(View(memory, g, f"{kind.name}.{at}", page, stride, placed))
            if shape.style in ("layers", "regions"):
                lengths.append(n * ratio * stride * (len(parts) if shape.style == "regions" else 1))
            else:
                page += stride
        if shape.style in ("blocks", "pages"):
            pages[g] = page
        views += mine
    if shape.style == "blocks":
        lengths = [n * ratio * page for ratio, page in zip(shape.ratios, pages, strict=True)]
        views = [_strided(view, pages[view.group]) for view in views]
    elif shape.style == "pages":
        # One size of pages for all: whatever kernel blocks they have.
        unit = 16 * math.lcm(*shape.ratios)
        page = max(_up(p * ratio, unit) for p, ratio in zip(pages, shape.ratios, strict=True))
        lengths = [n * page]
        views = [_strided(view, page // shape.ratios[view.group]) for view in views]
    bases = [base + sum(_up(each, 4096) for each in lengths[:i]) for i in range(len(lengths))]
    return Layout(
        schema=2 if shared else 1,
        model="simulated",
        tp_rank=tp_rank,
        tp_size=shape.tp_size,
        memories=tuple(map(Memory, bases, lengths)),
        groups=tuple(groups),
        views=tuple(views),
        token_shards=tuple(shared) or UNSET,
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _part(rng: random.Random, kind: PartKind, tokens: int, heads: int, tp_rank: int, tp_size: int) -> Part:
    held = shard(heads, tp_rank, tp_size) if kind.axis else (0, 0)
    dims = [(name, held[1] - held[0] if name == kind.axis else size) for name, size in kind.dims]
    if kind.tokens:
        dims.append((TOKEN, tokens // kind.tokens))
    rng.shuffle(dims)
    made, step = [], ITEMSIZE[kind.dtype]
    for name, size in reversed(dims):
        made.append(Dim(name, size, step))
        step *= size
    extent = dict(kind.dims)[kind.axis] if kind.axis else 0
    place = kind.axis, held, extent, kind.tokens or 1
    return Part(kind.name, kind.dtype, ITEMSIZE[kind.dtype], 0, tuple(reversed(made)), *place)


def _moved(part: Part, offset: int) -> Part:
    return Part(part.name, part.dtype, part.itemsize, offset, part.dims, *_rest(part))


def _rest(part: Part) -> tuple[str, tuple[int, int], int, int]:
    return part.axis, part.held, part.extent, part.tokens_per_entry


def _strided(view: View, stride: int) -> View:
    return View(view.memory, view.group, view.layer, view.offset, stride, view.parts)


class Cache:
    """The bytes of a layout: a rank's own memory, or the slots of a tier.

    Args:
        model: The model that the layout belongs to.
        layout: The declared layout.
        arrays: One per memory.
    """

    def __init__(self, model: Model, layout: Layout, arrays: Sequence[Bytes]) -> None:
        self.model, self.layout, self.arrays = model, layout, arrays
        self._parts: Mapping[tuple[str, str], PartKind] = {
            (f"{kind.name}.{at}", part.name): part
            for kind in model.groups
            for at in range(kind.num_layers)
            for part in kind.parts
        }
        self._first = [
            [
                (view, part, _index(view, part, group.ratio), group.ratio * view.stride)
                for view in layout.views
                if view.group == g
                for part in view.parts
            ]
            for g, group in enumerate(layout.groups)
        ]
        """Per group and part, where the bytes of its first block lie, and how far it is to the next."""

    def fill(self, group: int, block: int, hashes: Sequence[str]) -> None:
        """Let a block hold what its tokens say, which end with some hashes: all of its own."""
        for view, part, index in self._parts_of(group, block):
            self.arrays[view.memory][index] = self._truth(view, part, hashes)

    def is_right(self, group: int, block: int, hashes: Sequence[str], skipped: int = 0) -> bool:
        """Whether a block holds what these say, which are the first of its own, but for some that are skipped."""
        every = self.layout.groups[group].block_size // self.model.hash_tokens
        for view, part, index in self._parts_of(group, block):
            truth, first = self._truth(view, part, hashes), 0
            if part.has_tokens:
                first, index = skipped * len(index) // every, index[: len(truth)]
            if not np.array_equal(self.arrays[view.memory][index[first:]], truth[first:]):
                return False
        return True

    def compared(
        self, shape: Shape, blocks: Blocks, hashes: Sequence[str], firsts: Sequence[int], tokens: int
    ) -> Iterator[tuple[int, int, bool]]:
        """Compare the blocks of a prompt, of which so many tokens are in place, in each group from its first on.

        Yields group, place and whether all bytes are right.
        """
        for group, (kind, every, first) in enumerate(zip(self.model.groups, shape.hashes, firsts, strict=True)):
            size = every * self.model.hash_tokens
            for at in kind.in_place(size, first, tokens):
                if (block := blocks[group][at]) is not None:
                    # A window begins inside of a block.
                    outside = -(-(tokens - kind.window + 1 - at * size) // self.model.hash_tokens) if kind.window else 0
                    mine = hashes[at * every : min((at + 1) * every, tokens // self.model.hash_tokens)]
                    yield group, at, self.is_right(group, block, mine, min(max(outside, 0), every))

    def scribble(self, group: int, block: int) -> None:
        """Use a block for something else."""
        for view, _, index in self._parts_of(group, block):
            self.arrays[view.memory][index] = FREED

    def places(self, group: int, block: int) -> Iterator[tuple[int, Places]]:
        """Where each byte of a block lies: the memory, and places in it."""
        for view, _, index in self._parts_of(group, block):
            yield view.memory, index.ravel()

    def _parts_of(self, group: int, block: int) -> Iterator[tuple[View, Part, Places]]:
        for view, part, first, step in self._first[group]:
            yield view, part, first + block * step

    def _truth(self, view: View, part: Part, hashes: Sequence[str]) -> Bytes:
        kind = self._parts[view.layer, part.name]
        if not kind.tokens:
            return _said(hashes[-1], view.layer, kind, part.held, self.model.hash_tokens)  # the state at the end
        whole = [_said(each, view.layer, kind, part.held, self.model.hash_tokens) for each in hashes]
        found = whole[0] if len(whole) == 1 else np.concatenate(whole)
        for shared in self.layout.token_shards or ():
            if shared.group == view.group:  # blocks begin with the first rank's tokens
                tokens = np.arange(len(found)) * kind.tokens
                found = found[tokens // shared.interleave % shared.size == shared.rank]
        return found


def allocated(model: Model, shape: Shape, tp_rank: int) -> tuple[Bytes, Cache]:
    """Make a rank's own memory, which holds nothing, and its cache in it."""
    lengths = [-(-memory.length // 4096) * 4096 for memory in layout_of(model, shape, tp_rank).memories]
    memory = np.full(sum(lengths) + 4096, FREED, np.uint8)
    layout = layout_of(model, shape, tp_rank, base=-(-memory.ctypes.data // 4096) * 4096)
    return memory, Cache(model, layout, [bytes_at(each) for each in layout.memories])


class Pools:
    """The free blocks of an engine: groups of one pool share theirs."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.free = [list(range(shape.num_blocks)) for _ in range(1 + max(map(shape.pool, range(len(shape.hashes)))))]

    def take(self, counts: Sequence[int], rng: random.Random) -> Blocks | None:
        """Take so many blocks of each group, if they are free."""
        wanted = Counter(dict.fromkeys(range(len(self.free)), 0))
        for group, count in enumerate(counts):
            wanted[self._shape.pool(group)] += count
        if any(len(self.free[pool]) < count for pool, count in wanted.items()):
            return None
        for pool in self.free:
            rng.shuffle(pool)
        return [[self.free[self._shape.pool(group)].pop() for _ in range(count)] for group, count in enumerate(counts)]

    def give(self, blocks: Blocks) -> None:
        """Take blocks of each group back."""
        for group, ids in enumerate(blocks):
            self.free[self._shape.pool(group)] += [block for block in ids if block is not None]


def _index(view: View, part: Part, ratio: int) -> Places:
    """Where the bytes of a view's first block lie in its memory: tokens first, then dims by name, then bytes."""
    dims = sorted(part.dims, key=lambda dim: (dim.name != TOKEN, dim.name))
    index = np.array(view.offset + part.offset, np.int64)
    for size, step in [(ratio, view.stride), *((dim.size, dim.stride) for dim in dims), (part.itemsize, 1)]:
        index = index[..., None] + np.arange(size) * step
    return index.reshape(-1, *index.shape[2:]) if part.has_tokens else index[0]
