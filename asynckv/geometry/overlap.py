"""A check that no byte belongs to two things of one group, and that groups in one memory share its pages.

A part over all blocks is one strided array: the blocks are a dim like any other. Two such arrays, k and v, can lie:

    kkkkkkkk vvvvvvvv                 apart, because their ranges are apart
    kv...... kv...... kv......        meshed along a dim that both have, so that one entry of it shows all
    k v k  vk  v                      meshed in another way, so that they are compared descriptor by descriptor

So ranges are sorted. Those that mesh lose their common outermost dim, and are sorted again. The time for that depends
on the number of parts, not of blocks. Only a little of the third kind is allowed (`MAX_CHECKED`). Different groups may
lie in the same memory on purpose (`pools`), or share a range as slots of their own sizes (`Layout.slotted`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from asynckv.errors import LayoutError
from asynckv.geometry.layout import Layout, Part, View
from asynckv.geometry.strides import count_descriptors, strided_descriptors

MAX_CHECKED = 1 << 14  # descriptors that are compared one by one, of parts with dims that are not nested
Range = TypeVar("Range", bound=tuple[Any, ...])
_Step = tuple[int, int, bool]  # byte stride, entries, and whether they are the blocks


class Spot(NamedTuple):
    lo: int
    hi: int  # behind the last byte
    view: View
    part: Part
    steps: tuple[_Step, ...]  # the blocks and the dims, the largest stride first; those of one entry are left out

    @property
    def name(self) -> str:
        return f"layer {self.view.layer!r} part {self.part.name!r}"


def part_bytes(part: Part) -> int:
    return part.itemsize + sum([d.stride * (d.size - 1) for d in part.dims])


def spot(view: View, part: Part, blocks: int, length: int) -> Spot:
    """Return the place in its memory of a part with `length` bytes per block, over `blocks` kernel blocks."""
    lo = view.offset + part.offset
    steps = [(d.stride, d.size, False) for d in part.dims if d.size > 1]
    if blocks > 1:
        steps.append((view.stride, blocks, True))
    steps.sort(reverse=True)
    return Spot(lo, lo + view.stride * (blocks - 1) + length, view, part, tuple(steps))


def check_overlap(spots: Sequence[Spot]) -> None:
    """Raise `LayoutError` if a byte belongs to two parts or two blocks of one group."""
    places: dict[tuple[int, int], list[Spot]] = {}
    for each in spots:
        places.setdefault((each.view.group, each.view.memory), []).append(each)
    budget = [MAX_CHECKED]
    for group in places.values():
        _check_apart(group, budget)


def _check_apart(spots: list[Spot], budget: list[int]) -> None:
    """Refuse a byte in two of these arrays, or twice in one; drop a common outermost dim where one entry shows all."""
    for cluster in clusters(spots):
        first = cluster[0]
        if len(cluster) == 1 and _is_nested(first):
            continue
        lo = min(s.lo for s in cluster)
        hi = max(s.hi for s in cluster)
        stride, size, _ = first.steps[0] if first.steps else (0, 0, False)
        if stride and hi - lo - stride * (size - 1) <= stride and all(s.steps[:1] == first.steps[:1] for s in cluster):
            skip = stride * (size - 1)
            _check_apart([s._replace(hi=s.hi - skip, steps=s.steps[1:]) for s in cluster], budget)
        else:
            _check_descriptors(cluster, budget)


def clusters(ranges: list[Range]) -> Iterator[list[Range]]:
    """Yield the ranges `(begin, end, ...)` in ascending order, those together that mesh."""
    ranges.sort(key=lambda each: each[:2])
    cluster, end = ranges[:1], ranges[0][1]
    for each in ranges[1:]:
        if each[0] < end:
            cluster.append(each)
        else:
            yield cluster
            cluster = [each]
        end = max(end, each[1])
    yield cluster


def _is_nested(one: Spot) -> bool:
    reach = one.part.itemsize
    for stride, size, _ in reversed(one.steps):
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True


def _check_descriptors(cluster: list[Spot], budget: list[int]) -> None:
    """Compare descriptor by descriptor. All need one block stride: then one block, modulo the stride, shows all."""
    view = cluster[0].view
    stride, blocks = next(((step, size) for step, size, is_block in cluster[0].steps if is_block), (view.stride, 1))
    starts, lengths, owners = [], [], []
    for i, each in enumerate(cluster):
        if each.view.stride != stride and blocks > 1:
            raise LayoutError(
                f"{cluster[0].name} and {each.name} overlap in memory {view.memory} with different strides "
                f"{stride} and {each.view.stride}; place them apart or give them one stride"
            )
        dims = [(size, step, step) for step, size, is_block in each.steps if not is_block]
        # Each part costs some time, however few ranges it has.
        budget[0] -= max(count_descriptors(each.part.itemsize, dims), 16)
        if budget[0] < 0:
            raise LayoutError(
                f"{cluster[0].name} and {len(cluster) - 1} others interleave in more than {MAX_CHECKED} pieces per "
                f"block, too many to check; give them dims of the same strides, or place them apart"
            )
        offsets, _, size = strided_descriptors(each.part.itemsize, dims)
        if size > stride and blocks > 1:
            raise LayoutError(f"{each.name}: a block has {size} contiguous bytes, more than the stride {stride}")
        starts.append(each.lo + offsets)
        lengths.append(np.full(len(offsets), size))
        owners.append(np.full(len(offsets), i))
    start, length, owner = (np.concatenate(x) for x in (starts, lengths, owners))
    order = np.argsort(start, kind="stable")
    start, length, owner = start[order], length[order], owner[order]
    # Modulo the stride, keys of all blocks and values of all blocks would seem to overlap. So each is a separate run,
    # because all blocks of one end before the next one begins.
    reach = np.maximum.accumulate(start + length + (blocks - 1) * stride)
    run = np.concatenate(([0], np.cumsum(start[1:] >= reach[:-1])))
    if blocks > 1:
        start = start % stride
        order = np.lexsort((start, run))
        start, length, owner, run = start[order], length[order], owner[order], run[order]
    last = np.append(run[1:] != run[:-1], True)
    first = np.flatnonzero(np.append(True, last[:-1]))
    # In each run the last range of a block may reach into the first of the next block, one stride further.
    following = np.append(start[1:], 0)
    following[last] = start[first] + stride if blocks > 1 else (1 << 62)
    if (bad := np.flatnonzero(start + length > following)).size:
        at = int(bad[0])
        one, two = (cluster[owner[x]] for x in (at, first[run[at] - run[0]] if last[at] else at + 1))
        raise LayoutError(
            f"{one.name} and {two.name} overlap in memory {view.memory}; place them apart, or, if the model lets one "
            f"layer use the KV of the other, declare it an alias (aliases)"
        )


def pools(layout: Layout) -> tuple[int, ...]:
    """Return the pool number of each group: groups of one pool see the same pages, so an id means the same memory."""
    blocks = [group.num_kernel_blocks for group in layout.groups]
    return check_pools(
        layout, [spot(view, p, blocks[view.group], part_bytes(p)) for view in layout.views for p in view.parts]
    )


def check_pools(layout: Layout, spots: Sequence[Spot]) -> tuple[int, ...]:
    """Sweep every memory from end to end, and return the same as `pools`; refuse overlaps with other page sizes."""
    pool = list(range(len(layout.groups)))
    if len(pool) == 1 or layout.slotted is True:
        return tuple(pool)
    rows = sorted([(s.view.memory, s.lo, s.hi, s.view.group, s.view.stride) for s in spots])
    here: list[tuple[int, int, int]] = []
    """(end, group, page) of all that covers the byte of the sweep; any two share the group or the page size."""
    known: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    swept = -1
    for memory, lo, hi, index, stride in rows:
        page = stride * layout.groups[index].ratio
        while here and (here[0][0] <= lo or memory != swept):
            for count, value in zip(known, heapq.heappop(here)[1:], strict=True):
                count[value] -= 1
                if not count[value]:
                    del count[value]
        swept = memory
        if all(count.keys() - {value} for count, value in zip(known, (index, page), strict=True)):
            other, size = next((g, p) for _, g, p in here if g != index and p != page)
            raise LayoutError(
                f"groups {other} and {index} overlap in memory {memory} with pages of {size} and {page} bytes; "
                f"give them one page size, or place them apart"
            )
        if here and pool[here[0][1]] != pool[index]:
            old, new = sorted((pool[here[0][1]], pool[index]), reverse=True)
            pool = [new if x == old else x for x in pool]
        heapq.heappush(here, (hi, index, page))
        known[0][index] += 1
        known[1][page] += 1
    return tuple(pool)
