"""Packed copies: an owner gathers the pieces that a reader wants into one range, which the reader reads in long ranges.

A reader that needs one head of eight would read eight bytes for each in runs (`staging`), or pay for a descriptor per
piece. So it may send its owner a `Recipe`: how the pieces lie in the owner's blocks, and which blocks. The owner checks
the recipe against its own layout and against the blocks that it has lent, because a recipe comes from outside.

A packed copy has the pieces row after row, block after block, in the order of the reader's memory.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from asynckv.errors import LayoutError
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_GROUPS, MAX_VIEWS, Int64s
from asynckv.geometry.layout import Bytes, Layout, Memory, View
from asynckv.geometry.plan import ReadRequest

PACK_BYTES = 2 << 20
"""Length of a slot for packed copies."""

MAX_ROWS = 4096

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
        Meta(min_length=1, max_length=16_384),
    ]


def recipe(read: ReadRequest) -> Recipe:
    """Return the recipe for a packed copy of a staged read."""
    table, (first, count) = read.table, read.rows
    ids = read.remote[: len(read.remote) // count] - first * table.remote_blocks
    cuts = np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1
    starts = np.concatenate(([0], cuts))
    numbers = np.concatenate((cuts, [len(ids)])) - starts
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
        tuple(zip(ids[starts].tolist(), numbers.tolist(), strict=True)),
    )


class Gathered(NamedTuple):
    """Pieces to copy: of every block, an array of pieces per row."""

    rows: tuple[tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]], ...]
    """Memory, offset of block 0's first piece, stride from block to block, length of a piece, shape, strides."""
    blocks: Int64s
    num_bytes: int


def check_recipe(asked: Recipe, layout: Layout, lent: Int64s, slot_bytes: int) -> Gathered:
    """Return what a recipe means, or raise `LayoutError` if it is not about the lent blocks of its group.

    Args:
        lent: The lent blocks of that group, as the engine counts them.
    """
    if asked.group >= len(layout.groups):
        raise LayoutError(f"a packed copy names group {asked.group}, but there are {len(layout.groups)}")
    group = layout.groups[asked.group]
    num_blocks = sum([number for _, number in asked.blocks])
    sizes = [piece * math.prod([size for size, _ in dims]) for piece, dims in asked.boxes]
    ends = [piece + sum([(size - 1) * stride for size, stride in dims]) for piece, dims in asked.boxes]
    if any(box >= len(sizes) for _, _, box in asked.rows):
        raise LayoutError(f"a packed copy names a box beyond its {len(sizes)}")
    num_bytes = num_blocks * sum([sizes[box] for _, _, box in asked.rows])
    if num_bytes > slot_bytes:
        raise LayoutError(f"a packed copy of {num_bytes} bytes is longer than a slot of {slot_bytes}")
    blocks = np.concatenate([np.arange(first, first + number, dtype=np.int64) for first, number in asked.blocks])
    if not np.isin(blocks // group.ratio, lent).all():
        raise LayoutError(f"a packed copy names blocks of group {asked.group} that are not lent to this reader")
    views = [(view, _ends(view)) for view in layout.views if view.group == asked.group]
    rows = []
    for memory, offset, box in asked.rows:
        for view, end in views:
            if view.memory == memory and view.offset <= offset and offset - view.offset + ends[box] <= end:
                piece, dims = asked.boxes[box]
                shape, strides = tuple([size for size, _ in dims]), tuple([stride for _, stride in dims])
                rows.append((memory, offset, view.stride, piece, shape, strides))
                break
        else:
            raise LayoutError(f"a packed copy names {ends[box]} bytes at {offset} of memory {memory}, in no block")
    return Gathered(tuple(rows), blocks, num_bytes)


def _ends(view: View) -> int:
    """Return the bytes of a kernel block from its first byte to the last one of its parts."""
    return max(
        part.offset + part.itemsize + sum([(dim.size - 1) * dim.stride for dim in part.dims]) for part in view.parts
    )
