"""How much of a prompt is stored where host memory has no room for all of it.

Groups share the bytes of a tier, and a prefix is of use only if all of them have it. So if one finds no room for all of
its blocks, none keeps more than the longest beginning of the prompt for which there is room in all of them: what lies
beyond would be found by no lookup, and would have taken the place of something that is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from asynckv.offload.entry import Entry
from asynckv.offload.found import longest
from asynckv.offload.keys import StoredGroup
from asynckv.offload.tier import Tier

__all__ = ["make_room"]


def make_room(
    groups: Sequence[StoredGroup],
    host: Tier,
    file: Tier | None,
    keys: Sequence[Sequence[bytes]],
    new: Sequence[Sequence[int]],
    spare: int,
) -> list[list[Entry]]:
    """Find room for a prompt's new blocks, or for those of its longest beginning that can be used.

    Args:
        groups: Whose blocks these are.
        host: Where there is to be room.
        file: What it has counts as kept.
        keys: Per group, those of all blocks of the prompt.
        new: Per group, which are to be stored, in order.
        spare: See `Tier.make`.

    Returns:
        Per group, entries for the first of the new blocks.
    """
    wanted, tokens = (
        new,
        max(((some[-1] + 1) * g.block_size for g, some in zip(groups, new, strict=True) if some), default=0),
    )
    while True:
        made = [host.make(at, [keys[at][place] for place in some], spare) for at, some in enumerate(wanted)]
        if all(len(have) == len(some) for have, some in zip(made, wanted, strict=True)):
            return made
        num_bytes = sum(len(have) * group.record_bytes for have, group in zip(made, groups, strict=True))
        for have in made:
            for entry in have:
                host.drop(entry)
        below = tokens if wanted is new else tokens * 7 // 8 + 1  # records of several sizes leave gaps
        tokens = _fitting(groups, host, file, keys, new, num_bytes, below)
        wanted = [some[: _count(some, tokens, group)] for some, group in zip(new, groups, strict=True)]


def _count(places: Sequence[int], tokens: int, group: StoredGroup) -> int:
    """How many of some blocks end within so many tokens."""
    return bisect_right(places, tokens // group.block_size - 1)


def _fitting(
    groups: Sequence[StoredGroup],
    host: Tier,
    file: Tier | None,
    keys: Sequence[Sequence[bytes]],
    new: Sequence[Sequence[int]],
    num_bytes: int,
    below: int,
) -> int:
    """Return the longest prefix below some tokens that can be used, and whose new blocks take so many bytes at most."""
    low, high = 0, below - 1  # what takes more bytes than there are is above
    while low < high:
        middle = (low + high + 1) // 2
        taken = (_count(some, middle, g) * g.record_bytes for some, g in zip(new, groups, strict=True))
        low, high = (middle, high) if sum(taken) <= num_bytes else (low, middle - 1)
    codes = []
    for at, (group, places) in enumerate(zip(groups, new, strict=True)):
        known = np.ones(low // group.block_size, np.uint8)
        if group.is_state or group.window:
            tiers = [tier.index[at] for tier in (host, file) if tier is not None]
            mine = keys[at][: len(known)]
            known[:] = [any(key in index for index in tiers) for key in mine] + [0] * (len(known) - len(mine))
            known[list(places[: _count(places, low, group)])] = 1
        codes.append(known)
    return longest(groups, codes).tokens
