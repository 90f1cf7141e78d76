"""How much of a prompt is stored where host memory has no room for all of it.

Groups share the bytes of a tier, and a prefix is of use only if all of them have it. So none keeps more than the
longest beginning of the prompt for which there is room in all of them, which is worked out before anything is evicted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from asynckv.offload.entry import Entry
from asynckv.offload.found import longest
from asynckv.offload.keys import StoredGroup
from asynckv.offload.tier import Tier


def make_room(
    groups: Sequence[StoredGroup],
    host: Tier,
    file: Tier | None,
    keys: Sequence[Sequence[bytes]],
    new: Sequence[Sequence[int]],
    spared: Sequence[Entry],
) -> list[list[Entry]]:
    """Find room for a prompt's new blocks, or for those of its longest beginning that can be used.

    Args:
        keys: Per group, those of all blocks of the prompt.
        new: Per group, which are to be stored, in order.
        spared: What was used in this tick: it is not evicted.

    Returns:
        Per group, entries for the first of the new blocks.
    """
    kinds, room = host.slots.kinds, host.slots.room()

    def by_kind(counts: Sequence[int]) -> list[int]:
        wanted = [0] * len(room.slots)
        for kind, count in zip(kinds, counts, strict=True):
            wanted[kind] += count
        return wanted

    counts = [*map(len, new)]
    if not room.fits(by_kind(counts)):
        room = host.room(spared)
        if not room.fits(by_kind(counts)):
            counts = _fitting(groups, host, file, keys, new, lambda counts: room.fits(by_kind(counts)))
    wanted = by_kind(counts)
    host.may_take = room.over(wanted)
    made: list[list[Entry]] = [[] for _ in groups]
    # Who has to take chunks of others comes first: they cannot be had once their owners have put new blocks into them.
    for at in sorted(range(len(groups)), key=lambda at: room.short(wanted, kinds[at]), reverse=True):
        made[at] = host.make(at, [keys[at][place] for place in new[at][: counts[at]]], host.tick)
    host.may_take = math.inf
    if [*map(len, made)] != counts:  # a chunk was taken that another needed
        have = [*map(len, made)]
        counts = _fitting(
            groups, host, file, keys, new, lambda counts: all(n <= m for n, m in zip(counts, have, strict=True))
        )
        for at, entries in enumerate(made):
            for entry in entries[counts[at] :]:
                host.drop(entry)
            del entries[counts[at] :]
    return made


def _count(places: Sequence[int], tokens: int, group: StoredGroup) -> int:
    return bisect_right(places, tokens // group.block_size - 1)


def _fitting(
    groups: Sequence[StoredGroup],
    host: Tier,
    file: Tier | None,
    keys: Sequence[Sequence[bytes]],
    new: Sequence[Sequence[int]],
    fits: Callable[[Sequence[int]], bool],
) -> list[int]:
    """Return how many new blocks each group stores of the longest prefix that can be used, and that fits."""
    low, high = 0, max((some[-1] + 1) * group.block_size for group, some in zip(groups, new, strict=True) if some)
    while low < high:
        middle = (low + high + 1) // 2
        is_good = fits([_count(some, middle, group) for some, group in zip(new, groups, strict=True)])
        low, high = (middle, high) if is_good else (low, middle - 1)
    codes = []
    for at, (group, places) in enumerate(zip(groups, new, strict=True)):
        known = np.ones(low // group.block_size, np.uint8)
        if group.is_state or group.window:
            tiers = [tier.index[at] for tier in (host, file) if tier is not None]
            mine = keys[at][: len(known)]
            known[:] = [any(key in index for index in tiers) for key in mine] + [0] * (len(known) - len(mine))
            known[list(places[: _count(places, low, group)])] = 1
        codes.append(known)
    tokens = longest(groups, codes).tokens
    return [_count(some, tokens, group) for some, group in zip(new, groups, strict=True)]
