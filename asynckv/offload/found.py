"""Finds the length of a stored prefix, and the part of a prompt to store if there is no room for all of it.

A prefix of `n` tokens can be used if every group has the blocks to continue after `n` tokens: every block, the blocks
of a window, or the state at exactly `n`. The groups must agree on `n`, so none keeps more of a prompt than the longest
beginning for which all have room. The code uses arrays, because a prompt has thousands of blocks, and schedulers ask
often.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from asynckv.offload.entry import Entry
from asynckv.offload.keys import StoredGroup, block_hashes, needed
from asynckv.offload.tier import Tier

ABSENT, READY, IN_FILE, STORING = range(4)  # codes of one block; READY is in host memory
FEW = 256  # blocks per look-up; most prompts are not stored, so the first look-up is the last
Codes = npt.NDArray[np.uint8]


class GroupFound(Struct, frozen=True, gc=False):
    """Stored blocks of one group."""

    tokens: int  # the longest prefix that this group alone could use
    ready: int  # blocks of the common prefix that are needed and in host memory
    in_file: int  # blocks of it that must be brought from the file tier first
    storing: int  # blocks of it that are being written into host memory


class Found(Struct, frozen=True, gc=False):
    """Stored prefix of a prompt."""

    tokens: int  # length of the longest prefix that all groups can use
    ready_tokens: int  # length of the longest prefix that can be loaded without waiting for files or for a store
    groups: tuple[GroupFound, ...]  # the same for each group

    @property
    def would_wait(self) -> bool:
        """True if loading all of it would wait for the file tier, or for a store."""
        return any(group.in_file or group.storing for group in self.groups)


def longest(groups: Sequence[StoredGroup], codes: Sequence[Codes], align: int = 1) -> Found:
    """Return the longest stored prefix, a multiple of `align`, from the codes of every group's blocks."""
    align = math.lcm(align, *(group.block_size for group in groups))
    there = [_usable(group, code != ABSENT) for group, code in zip(groups, codes, strict=True)]
    ready = [_usable(group, code == READY) for group, code in zip(groups, codes, strict=True)]
    tokens = _common(groups, there, align)
    found = []
    for group, code, usable in zip(groups, codes, there, strict=True):
        blocks = needed(group, 0, tokens)
        counts = np.bincount(code[blocks.start : blocks.stop], minlength=4).tolist()
        found.append(GroupFound(_last(usable) * group.block_size, *counts[1:]))
    return Found(tokens, _common(groups, ready, align), tuple(found))


def _usable(group: StoredGroup, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return for the end of every block whether the group could continue there."""
    if group.is_state:
        return present
    places = np.arange(1, len(present) + 1)
    gap = np.maximum.accumulate(np.where(present, 0, places))  # number of blocks up to the last absent one
    if not group.window:
        return np.equal(gap, 0)
    least = np.minimum(places, -(-(group.window - 1) // group.block_size))
    return np.greater_equal(places - gap, least)


def _common(groups: Sequence[StoredGroup], usable: Sequence[npt.NDArray[np.bool_]], align: int) -> int:
    ends = min(len(u) * group.block_size for group, u in zip(groups, usable, strict=True)) // align
    both = np.ones(ends, np.bool_)
    for group, u in zip(groups, usable, strict=True):
        every = align // group.block_size
        both &= u[every - 1 :: every][:ends]
    return _last(both) * align


def _last(usable: npt.NDArray[np.bool_]) -> int:
    if not usable.any():
        return 0
    return len(usable) - int(usable[::-1].argmax())


def known(
    groups: Mapping[int, StoredGroup], hash_tokens: int, host: Tier, file: Tier, keys: list[bytes]
) -> list[Codes]:
    codes = dict.fromkeys(groups, np.zeros(0, np.uint8))
    most = len(keys) * hash_tokens
    # Groups that need every block come first, because no group is needed beyond their first gap.
    for g, group in sorted(groups.items(), key=lambda each: not each[1].needs_all):
        mine = block_hashes(keys, group.block_size, hash_tokens)[: most // group.block_size]
        if not group.needs_all:
            codes[g] = _codes(host, file, g, mine)
            continue
        parts = [np.zeros(0, np.uint8)]
        for first in range(0, len(mine), FEW):
            parts.append(_codes(host, file, g, mine[first : first + FEW]))
            if not parts[-1].all():
                parts[-1] = parts[-1][: int(parts[-1].argmin())]
                break
        codes[g] = np.concatenate(parts)
        most = min(most, len(codes[g]) * group.block_size)
    return list(codes.values())


def _codes(host: Tier, file: Tier, g: int, hashes: list[bytes]) -> Codes:
    """Return the code of each block without reading entries, because each read would miss the processor's cache."""
    writing = host.writing[g]
    codes = np.fromiter(map(host.index[g].__contains__, hashes), np.uint8, len(hashes))
    if writing:
        codes[[i for i, key in enumerate(hashes) if key in writing]] = STORING
    if file.index[g]:
        writing = file.writing[g]
        absent = np.flatnonzero(codes == ABSENT)
        rest = [hashes[i] for i in absent.tolist()]
        codes[absent] = IN_FILE * np.fromiter(map(file.index[g].__contains__, rest), np.uint8, len(rest))
        if writing:
            codes[[i for i in absent.tolist() if hashes[i] in writing]] = ABSENT
    return codes


def make_room(
    groups: Sequence[StoredGroup],
    host: Tier,
    file: Tier,
    keys: Sequence[Sequence[bytes]],
    new: Sequence[Sequence[int]],
    spared: Sequence[Entry],
) -> list[list[Entry]]:
    """Find room for a prompt's new blocks, or for those of its longest beginning that can be used.

    Args:
        keys: Per group, the keys of all blocks of the prompt.
        new: Per group, the positions to store, in order. Entries for the first of these are returned.
        spared: Entries that were used in this tick, which are not evicted.
    """
    kinds, room = host.slots.kinds, host.slots.room()

    def by_kind(counts: Sequence[int]) -> list[int]:
        wanted = [0] * len(room.slots)
        for kind, count in zip(kinds, counts, strict=True):
            wanted[kind] += count
        return wanted

    def up_to(tokens: int) -> list[int]:
        return [bisect_right(some, tokens // x.block_size - 1) for x, some in zip(groups, new, strict=True)]

    def fitting(fits: Callable[[Sequence[int]], bool]) -> list[int]:
        """Return the number of new blocks per group for the longest usable prefix that fits."""
        low, high = 0, max((some[-1] + 1) * x.block_size for x, some in zip(groups, new, strict=True) if some)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(up_to(middle)) else (low, middle - 1)
        codes = []
        for at, (group, places, count) in enumerate(zip(groups, new, up_to(low), strict=True)):
            known = np.full(low // group.block_size, group.needs_all, np.uint8)
            if not group.needs_all:
                mine = keys[at][: len(known)]
                known[: len(mine)] = [key in host.index[at] or key in file.index[at] for key in mine]
                known[list(places[:count])] = 1
            codes.append(known)
        return up_to(longest(groups, codes).tokens)

    counts = [*map(len, new)]
    if not room.fits(by_kind(counts)):
        room = host.room(spared)
        if not room.fits(by_kind(counts)):
            counts = fitting(lambda counts: room.fits(by_kind(counts)))
    wanted = by_kind(counts)
    host.may_take = room.over(wanted)
    made: list[list[Entry]] = [[] for _ in groups]
    # Groups that must take chunks of others come first, before the owners put new blocks into these chunks.
    for at in sorted(range(len(groups)), key=lambda at: room.short(wanted, kinds[at]), reverse=True):
        made[at] = host.make(at, [keys[at][place] for place in new[at][: counts[at]]], spares=True)
    host.may_take = math.inf
    if (have := [*map(len, made)]) != counts:  # one group took a chunk that another needed
        counts = fitting(lambda counts: all(n <= m for n, m in zip(counts, have, strict=True)))
        for at, entries in enumerate(made):
            for entry in entries[counts[at] :]:
                host.drop(entry)
            del entries[counts[at] :]
    return made
