"""Plans of copies between the memory of a rank and the ranges in which blocks are only stored (`packed`).

`plan_copies` copies blocks to slots one for one, to store or to load, where the range has the rank's own form.
`plan_load` loads blocks that ranks of another geometry stored, by their tokens, like a pull.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from asynckv.errors import LayoutError, PlanRefused
from asynckv.geometry.blocks import BlockList, check_blocks
from asynckv.geometry.bounds import BlockRuns, Int32s, Int64s
from asynckv.geometry.layout import Group, Layout
from asynckv.geometry.match import assign, compare, in_words
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import Plan, Section, plan_read
from asynckv.geometry.staging import ReadCosts
from asynckv.geometry.tables import PeerTables

Ids = Sequence[int] | npt.NDArray[np.integer]


def kept_tables(
    local: Layout, kept: Sequence[Layout], ids: Iterator[int], costs: ReadCosts | None = None
) -> tuple[PeerTables | None, ...]:
    """Map the bytes of ranges to the bytes of a rank's memory; once per form.

    The ranges are the rank's own, or those of all ranks of an engine that together hold all that it needs. Return one
    entry per range, None if nothing of it is needed; raise `LayoutError` if they do not fit, or lack something.
    """
    for range_ in kept:
        if differences := compare(local, range_):
            raise LayoutError(
                f"blocks that tp{range_.tp_rank} of {range_.tp_size} stored do not fit: {in_words(differences)}"
            )
    shares = assign(local, kept)
    both = zip(kept, shares, strict=True)
    return tuple(PeerTables(local, each, some, ids, costs) if some else None for each, some in both)


def plan_copies(tables: PeerTables, blocks: Sequence[tuple[Ids, Ids]]) -> Plan:
    """Plan copies between each group's blocks and slots one for one, where a range has the rank's own form."""
    if len(blocks) != len(tables.local.groups):
        raise PlanRefused(f"blocks of {len(blocks)} groups are given, but the layout has {len(tables.local.groups)}")
    sections = []
    for pair in tables.group_pairs:
        name = f"group {pair.local_index} ({pair.local.name!r})"
        ids, slots = (np.asarray(each, np.int64) for each in blocks[pair.local_index])
        here, there = ((g.block_size, g.ratio) for g in (pair.local, pair.remote))
        mine, theirs = (replace(shard, group=0) for shard in pair.shards)
        if mine != theirs:
            raise PlanRefused(f"{name}: {mine} cannot be copied one for one to {theirs}; load them by their tokens")
        if here != there or pair.local_index != pair.remote_index:
            raise PlanRefused(
                f"{name}: blocks of {here[0]} tokens in {here[1]} kernel blocks cannot be copied one for one to group "
                f"{pair.remote_index} with {there[0]} in {there[1]}; load them by their tokens"
            )
        if ids.shape != slots.shape:
            raise PlanRefused(f"{name}: {ids.size} blocks and {slots.size} slots; each block needs one slot")
        if not len(ids):
            continue
        _check_ids(f"{name}, blocks", pair.local, ids)
        _check_ids(f"{name}, slots", pair.remote, slots)
        order = slots.argsort(kind="stable")
        sections.append(
            Section(
                tables.table(pair.whole),
                _kernel_blocks(ids[order], pair.local.ratio),
                _kernel_blocks(slots[order], pair.local.ratio),
            )
        )
    return Plan(tuple(sections))


def _check_ids(where: str, group: Group, ids: Int64s) -> None:
    if int(ids.min()) < 0:
        raise PlanRefused(f"{where}: {int(ids.min())} is not an id")
    check_blocks(where, group, ids)


def _kernel_blocks(ids: Int64s, ratio: int) -> Int32s:
    if ratio > 1:
        ids = (ids[:, None] * ratio + np.arange(ratio)).ravel()
    return ids.astype(np.int32)


def plan_load(tables: PeerTables, local: Sequence[BlockList], kept: Sequence[BlockRuns], num_tokens: int) -> Plan:
    """Plan a load of `num_tokens` into blocks from `check_block_ids`, from the slots of a rank with any geometry."""
    # One more token is offered than wanted, because states are stored only at block ends, not after the last token.
    return plan_read(tables, BlockLists(local, kept, num_tokens, num_tokens + 1))
