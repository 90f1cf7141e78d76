"""Packed copies: an owner gathers the pieces that a reader wants into one range, which the reader reads in long ranges.

A reader that needs one head of eight would read eight bytes for each in runs (`staging`), or pay for a descriptor per
piece. So it may send its owner a `Recipe`: how the pieces lie in the owner's blocks, and which blocks. The owner checks
the recipe against its own layout and against the blocks that it has lent, because a recipe comes from outside.

A packed copy has the pieces row after row, block after block, in the order of the reader's memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate, groupby, product
from operator import itemgetter
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from asynckv.errors import LayoutError
from asynckv.geometry.blocks import as_columns, expanded, runs_of
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_GROUPS, MAX_VIEWS, Int64s
from asynckv.geometry.layout import Bytes, Layout, Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.strides import MAX_RANGES, StridedDim, count_descriptors, step_along, strided_descriptors

PACK_BYTES = 2 << 20  # length of a slot for packed copies
MAX_ROWS = 1024
MAX_BLOCK_RUNS = 16_384
MAX_PIECES = 1024  # pieces of a row that are looked up one by one, where other blocks lie between them

Extent = Annotated[int, Meta(ge=1, le=1 << 40)]
Stride = Annotated[int, Meta(ge=0, le=1 << 40)]
Dims = tuple[tuple[Extent, Stride], ...]


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
    boxes: Annotated[tuple[tuple[Extent, Annotated[Dims, Meta(max_length=8)]], ...], Meta(max_length=MAX_ROWS)]
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
    runs: tuple[Int64s, Int64s]  # the blocks, as first ids and counts; listed by the thread that copies
    num_bytes: int

    @property
    def blocks(self) -> Int64s:
        return expanded(*self.runs)


class Ranges:
    """The byte ranges that make up the blocks of a layout, each without a byte of another block.

    A range is that of block 0; those of other blocks follow by its stride. A dim that steps over whole blocks, such as
    tokens before blocks, makes a range of each step. Ranges may lie in the gaps of others, such as scales between rows
    of keys. A part with other *blocks* in its gaps has a range for each of its pieces.
    """

    def __init__(self, layout: Layout) -> None:
        self.groups = layout.groups
        self._starts: list[list[tuple[int, int]]] = []
        self._ends: list[list[tuple[int, int, int]]] = []
        """Memory, end and stride of the range that ends last, of each range and those before it."""
        self._meshed: list[bool] = []
        found: list[list[_Range]] = [[] for _ in layout.groups]
        for view in layout.views:
            for part in view.parts:
                inner = [(dim.size, dim.stride, dim.stride) for dim in part.dims if dim.stride < view.stride]
                length = part.itemsize + sum([(size - 1) * step for size, step, _ in inner])
                steps = [[i * dim.stride for i in range(dim.size)] for dim in part.dims if dim.stride >= view.stride]
                for start in [view.offset + part.offset + sum(each) for each in product(*steps)]:
                    one = _Range(view.memory, start, start + length, view.stride, part.itemsize, inner)
                    found[view.group].append(one)
        for group, ranges in zip(layout.groups, found, strict=True):
            meshed = _meshed(ranges, group.num_kernel_blocks)
            pieces = [piece for at in meshed for piece in ranges[at].pieces()]
            clean = [each for at, each in enumerate(ranges) if at not in meshed]
            ranges = sorted(clean + pieces, key=itemgetter(0, 1))
            self._meshed.append(bool(meshed))
            self._starts.append([(-1, 0), *[(each.memory, each.start) for each in ranges]])
            ends = [(-1, 0, 0), *[(each.memory, each.end, each.stride) for each in ranges]]
            self._ends.append(list(accumulate(ends, max)))

    def strides(self, group: int, rows: Sequence[tuple[int, int, int]], boxes: Sequence[tuple[int, Dims]]) -> list[int]:
        """Return for each row of a recipe the stride of the blocks that its pieces lie in, or 0."""
        starts, ends = self._starts[group], self._ends[group]
        lengths = [piece + sum([(size - 1) * step for size, step in dims]) for piece, dims in boxes]
        found = []
        for memory, begin, box in rows:  # without a call for each, because there may be thousands
            of, until, stride = ends[bisect_right(starts, (memory, begin)) - 1]
            if of != memory or begin + lengths[box] > until:
                stride = self._stride_of_pieces(group, memory, begin, *boxes[box]) if self._meshed[group] else 0
            found.append(stride)
        return found

    def _stride_of_pieces(self, group: int, memory: int, begin: int, piece: int, dims: Dims) -> int:
        """Return the stride of the blocks that pieces with other blocks between them lie in, or 0."""
        if math.prod([size for size, _ in dims]) > MAX_PIECES:
            return 0
        found = set[int]()
        for at in step_along([(size, step, 0) for size, step in dims])[0].tolist():
            place = bisect_right(self._starts[group], (memory, begin + at)) - 1
            of, until, stride = self._ends[group][place]
            found.add(stride if of == memory and begin + at + piece <= until else 0)
        return found.pop() if len(found) == 1 else 0


class _Range(NamedTuple):
    memory: int
    start: int  # of block 0
    end: int
    stride: int
    itemsize: int
    dims: list[StridedDim]

    def pieces(self) -> list[_Range]:
        """Return the ranges of the range's pieces; none if they are too many."""
        if count_descriptors(self.itemsize, self.dims) > MAX_RANGES:
            return []
        offsets, _, length = strided_descriptors(self.itemsize, self.dims)
        begins = (self.start + offsets).tolist()
        return [self._replace(start=begin, end=begin + length) for begin in begins]


def _meshed(ranges: list[_Range], num_blocks: int) -> set[int]:
    """Return the indices of at least all ranges with bytes of other blocks of their group in their gaps."""
    found = {at for at, each in enumerate(ranges) if each.end - each.start > each.stride}
    # A range that is longer than the stride is compared as several, so that it is found in the gaps of others.
    places = sorted(
        [
            (r.memory, r.stride, begin % r.stride, begin // r.stride, min(r.end - begin, r.stride), at)
            for at, r in enumerate(ranges)
            for begin in range(r.start, r.end, r.stride)
        ]
    )
    for (_, stride), same in groupby(places, key=itemgetter(0, 1)):
        # Modulo the stride all blocks lie in one. Ranges that overlap there do so as blocks that are so far apart as
        # their turns. A range at the end of the stride may reach into the next one, so the stride is walked twice.
        some = [place[2:] for place in same]
        ends, turns, bad = dict[int, int](), list[int](), set[int]()  # by turn: the last end so far
        for lo, turn, length, _ in some + [(lo + stride, turn - 1, length, at) for lo, turn, length, at in some]:
            near = turns[bisect_right(turns, turn - num_blocks) : bisect_left(turns, turn + num_blocks)]
            bad.update([x for other in near if other != turn and ends[other] > lo for x in (turn, other)])
            if turn not in ends:
                insort(turns, turn)
            ends[turn] = max(ends.get(turn, 0), lo + length)
        found |= {at for _, turn, _, at in some if bad.intersection((turn, turn - 1))}
    return found


def check_recipe(asked: Recipe, ranges: Ranges, lent: Int64s, slot_bytes: int) -> Gathered:
    """Return what a recipe means, or raise `LayoutError` if it is not about the lent blocks of its group.

    The time for that depends on the length of the recipe alone, and not on how many blocks it means or were lent.

    Args:
        lent: The lent blocks of that group, as the engine counts them, in ascending order.
    """
    if asked.group >= len(ranges.groups):
        raise LayoutError(f"a packed copy names group {asked.group}, but there are {len(ranges.groups)}")
    ratio, runs = ranges.groups[asked.group].ratio, as_columns(asked.blocks)
    firsts, counts = runs
    num_blocks = int(counts.sum())
    if num_blocks > len(lent) * ratio:
        raise LayoutError(f"a packed copy names {num_blocks} blocks, but {len(lent) * ratio} are lent")
    boxes = [(piece, tuple([size for size, _ in dims]), tuple([by for _, by in dims])) for piece, dims in asked.boxes]
    sizes = [piece * math.prod(shape) for piece, shape, _ in boxes]
    if max(box for _, _, box in asked.rows) >= len(sizes):
        raise LayoutError(f"a packed copy names a box beyond its {len(sizes)}")
    num_bytes = num_blocks * sum([sizes[box] for _, _, box in asked.rows])
    if num_bytes > slot_bytes:
        raise LayoutError(f"a packed copy of {num_bytes} bytes is longer than a slot of {slot_bytes}")
    low, high = firsts // ratio, (firsts + counts - 1) // ratio
    at, last = lent.searchsorted(low), lent.searchsorted(high)
    # Lent blocks differ, so that none is missing between two of them if they are as far apart as their ids.
    is_known = bool((last < len(lent)).all()) and bool(((lent[at] == low) & (lent[last] == high)).all())
    if not is_known or (last - at != high - low).any():
        raise LayoutError(f"a packed copy names blocks of group {asked.group} that are not lent to this reader")
    strides = ranges.strides(asked.group, asked.rows, asked.boxes)
    if 0 in strides:
        memory, offset, box = asked.rows[strides.index(0)]
        raise LayoutError(f"a packed copy names {sizes[box]} bytes at {offset} of memory {memory}, in no block")
    rows = [(memory, at, step, *boxes[box]) for (memory, at, box), step in zip(asked.rows, strides, strict=True)]
    return Gathered(tuple(rows), runs, num_bytes)
