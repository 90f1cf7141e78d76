"""Packed copies: an owner gathers the pieces that a reader wants into one range, which the reader reads in long ranges.

A reader that needs one head of eight would read eight bytes for each in runs (`staging`), or pay for a descriptor per
piece. So it may send its owner a `Recipe`: how the pieces lie in the owner's blocks, and which blocks. The owner checks
the recipe against its own layout and against the blocks that it has lent, because a recipe comes from outside.

A packed copy has the pieces row after row, block after block, in the order of the reader's memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import product
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from asynckv.errors import LayoutError
from asynckv.geometry.blocks import runs_of
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_GROUPS, MAX_VIEWS, Int64s
from asynckv.geometry.layout import Bytes, Layout, Memory
from asynckv.geometry.plan import ReadRequest

PACK_BYTES = 2 << 20  # length of a slot for packed copies
MAX_ROWS = 1024
MAX_BLOCK_RUNS = 16_384

Extent = Annotated[int, Meta(ge=1, le=1 << 40)]
Stride = Annotated[int, Meta(ge=0, le=1 << 40)]


class Packing(Struct, frozen=True, array_like=True, gc=False):
    """An owner's memory for packed copies: slots of equal length, one behind another in host memory."""

    base: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    num_slots: Annotated[int, Meta(ge=1, le=65_536)]
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = PACK_BYTES

    @property
    def memory(self) -> Memory:
        return Memory(self.base, self.num_slots * self.slot_bytes)


def packs(layout: Layout) -> int:
    """Return the most bytes of a packed copy that a rank makes by default; 0 if it makes none."""
    return PACK_BYTES if all(memory.kind == "cpu" for memory in layout.memories) else 0


class Recipe(Struct, frozen=True, array_like=True, gc=False):
    """The contents of a packed copy.

    Attributes:
        group: The owner's group that the blocks are of.
        boxes: How the pieces of a row lie in a block: the length of a piece, and `(entries, byte stride)` of dims.
        rows: The first piece of block 0: memory, byte offset, and index of the row's box.
        blocks: Kernel blocks as `(first, number)`, the same for every row.
    """

    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    boxes: Annotated[
        tuple[tuple[Extent, Annotated[tuple[tuple[Extent, Stride], ...], Meta(max_length=8)]], ...],
        Meta(max_length=MAX_ROWS),
    ]
    rows: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_VIEWS)], Bytes, Annotated[int, Meta(ge=0)]], ...],
        Meta(min_length=1, max_length=MAX_ROWS),
    ]
    blocks: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=0, le=MAX_BLOCK_ID)], Annotated[int, Meta(ge=1, le=PACK_BYTES)]], ...],
        Meta(min_length=1, max_length=MAX_BLOCK_RUNS),
    ]


def can_ask(read: ReadRequest) -> bool:
    """Return True if a recipe has room for a staged read."""
    count = read.rows[1]
    return count <= MAX_ROWS and len(read.local) // count <= MAX_BLOCK_RUNS


def recipe(read: ReadRequest) -> Recipe:
    """Return the recipe for a packed copy of a staged read."""
    table, (first, count) = read.table, read.rows
    ids = read.remote[: len(read.remote) // count] - first * table.remote_blocks
    of = table.box_of[first : first + count].tolist()
    used = {box: at for at, box in enumerate(dict.fromkeys(of))}
    boxes = [table.boxes[box] for box in used]
    return Recipe(
        table.span.remote_group,
        tuple([(box.piece, tuple(zip(box.shape, box.in_run, strict=True))) for box in boxes]),
        tuple(
            [
                (memory, offset + table.boxes[box].skip, used[box])
                for (memory, offset, _), box in zip(table.remote[first : first + count].tolist(), of, strict=True)
            ]
        ),
        runs_of(ids),
    )


class Gathered(NamedTuple):
    """Pieces to copy: of every block, an array of pieces per row."""

    rows: tuple[tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]], ...]
    """Memory, offset of block 0's first piece, stride from block to block, length of a piece, shape, strides."""
    blocks: Int64s
    num_bytes: int


class Ranges:
    """The byte ranges that make up the blocks of a layout, each without a byte of another block.

    A range is that of block 0; those of other blocks follow by its stride. A dim that steps over whole blocks, such as
    tokens before blocks, makes a range of each step.
    """

    def __init__(self, layout: Layout) -> None:
        self.groups = layout.groups
        found: list[list[tuple[tuple[int, int], int, int]]] = [[] for _ in layout.groups]
        for view in layout.views:
            for part in view.parts:
                inner = [dim for dim in part.dims if dim.stride < view.stride]
                length = min(part.itemsize + sum([(dim.size - 1) * dim.stride for dim in inner]), view.stride)
                steps = [[i * dim.stride for i in range(dim.size)] for dim in part.dims if dim.stride >= view.stride]
                for start in [view.offset + part.offset + sum(each) for each in product(*steps)]:
                    found[view.group].append(((view.memory, start), start + length, view.stride))
        self._ranges = [sorted(ranges) for ranges in found]
        self._starts = [[start for start, _, _ in ranges] for ranges in self._ranges]

    def stride(self, group: int, memory: int, begin: int, end: int) -> int:
        """Return the stride of the range that contains these bytes, or 0."""
        at = bisect_right(self._starts[group], (memory, begin)) - 1
        if at < 0:
            return 0
        (of, _), until, stride = self._ranges[group][at]
        return stride if of == memory and end <= until else 0


def check_recipe(asked: Recipe, ranges: Ranges, lent: Int64s, slot_bytes: int) -> Gathered:
    """Return what a recipe means, or raise `LayoutError` if it is not about the lent blocks of its group.

    Args:
        lent: The lent blocks of that group, as the engine counts them.
    """
    if asked.group >= len(ranges.groups):
        raise LayoutError(f"a packed copy names group {asked.group}, but there are {len(ranges.groups)}")
    num_blocks, ratio = sum([number for _, number in asked.blocks]), ranges.groups[asked.group].ratio
    if num_blocks > len(lent) * ratio:
        raise LayoutError(f"a packed copy names {num_blocks} blocks, but {len(lent) * ratio} are lent")
    sizes = [piece * math.prod([size for size, _ in dims]) for piece, dims in asked.boxes]
    ends = [piece + sum([(size - 1) * stride for size, stride in dims]) for piece, dims in asked.boxes]
    if any(box >= len(sizes) for _, _, box in asked.rows):
        raise LayoutError(f"a packed copy names a box beyond its {len(sizes)}")
    num_bytes = num_blocks * sum([sizes[box] for _, _, box in asked.rows])
    if num_bytes > slot_bytes:
        raise LayoutError(f"a packed copy of {num_bytes} bytes is longer than a slot of {slot_bytes}")
    blocks = np.concatenate([np.arange(first, first + number, dtype=np.int64) for first, number in asked.blocks])
    if not np.isin(blocks // ratio, lent).all():
        raise LayoutError(f"a packed copy names blocks of group {asked.group} that are not lent to this reader")
    rows = []
    for memory, offset, box in asked.rows:
        if not (step := ranges.stride(asked.group, memory, offset, offset + ends[box])):
            raise LayoutError(f"a packed copy names {ends[box]} bytes at {offset} of memory {memory}, in no block")
        piece, dims = asked.boxes[box]
        rows.append((memory, offset, step, piece, tuple([size for size, _ in dims]), tuple([by for _, by in dims])))
    return Gathered(tuple(rows), blocks, num_bytes)
