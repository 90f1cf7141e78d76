"""What another geometry has left becomes a rank's own: it is loaded, stored again, and is right in every byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from asynckv import EngineConfig, LocalProtocolError, ReadFailed
from asynckv.geometry.layout import Group, Layout, Memory, View, dense_part
from asynckv.offload import Offload
from asynckv.offload.job import JobEnded, JobKind, JobOutcome
from asynckv.offload.keys import needed
from asynckv.tiers.jobs import OffloadJob
from tests.engines import until
from tests.lab.tiers import SimDisk
from tests.offloads import BLOCKS, RECORD, SIZE, Rank, chain, layout_of, offloading

WIDTHS, TOKENS, COUNT = (32, 64, 96), 384, 64
"""Bytes per token, or per state, of three groups: attention, a window, states; and how many blocks each has."""

TRUTH = [np.random.default_rng(7).integers(0, 256, (TOKENS, width), np.uint8) for width in WIDTHS]
"""Per group, what belongs to each token; of states what there is after it."""

Lists = list[list[int | None]]


def layout_with(block_size: int, window: int) -> Layout:
    """Three groups, each with one layer and with pages of its own."""
    groups = (
        Group("attention", block_size, COUNT),
        Group("window", block_size, COUNT, window=window),
        Group("state", block_size, COUNT, kind="state"),
    )
    views, memories = [], []
    for at, (group, width) in enumerate(zip(groups, WIDTHS, strict=True)):
        rows = [] if group.kind == "state" else [("token", block_size)]
        part = dense_part("kv", "uint8", [*rows, ("dim", width)])
        stride = width * (block_size if rows else 1)
        views.append(View(at, at, f"layers.{at}", 0, stride, (part,)))
        memories.append(Memory((1 << 40) + (at << 30), stride * COUNT))
    return Layout(groups=groups, views=tuple(views), memories=tuple(memories))


def pages(rank: Rank, group: int) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = rank.arrays[group].reshape(COUNT, -1)
    return found


def truth(group: int, place: int, size: int) -> npt.NDArray[np.uint8]:
    end = (place + 1) * size
    begin = end - 1 if group == 2 else end - size
    return TRUTH[group][begin:end].ravel()


def lists(rank: Rank, rng: random.Random, first: int, tokens: int) -> Lists:
    size = rank.layout.groups[0].block_size
    return [list(rng.sample(range(COUNT), (tokens - first) // size)) for _ in WIDTHS]


async def load(rank: Rank, offload: Offload, rng: random.Random, first: int, most: int) -> tuple[int, Lists]:
    """Load the longest prefix below some tokens, and compare all that was to be written, and all that was not.

    Returns how long it is, and what was written, with None for what was not.
    """
    found = offload.lookup(chain("p", most // SIZE)).tokens
    if found <= first:
        return found, [[] for _ in WIDTHS]
    given, before = lists(rank, rng, first, found), [pages(rank, at).copy() for at in range(len(WIDTHS))]
    groups = [(first, ids) for ids in given]
    loaded = await offload.load("load", groups, chain("p", most // SIZE), num_tokens=found)
    assert loaded.num_tokens == found
    for at, (group, ids) in enumerate(zip(offload._own.groups, given, strict=True)):
        size = group.block_size
        for place in needed(group, first, found):
            block = ids[place - first // size]
            assert block is not None
            wrong = pages(rank, at)[block] != truth(at, place, size)
            assert not wrong.any(), f"{group.name}, block {place} of {found // size}: {wrong.sum()} of {wrong.size}"
            before[at][block] = pages(rank, at)[block]
        assert (pages(rank, at) == before[at]).all()
        written = needed(group, first, found)
        ids[:] = [block if i + first // size in written else None for i, block in enumerate(ids)]
    return found, given


async def stored(rank: Rank, offload: Offload, given: Sequence[list[int | None]], first: int, tokens: int) -> None:
    result = await offload.store("store", [(first, ids) for ids in given], chain("p", tokens // SIZE))
    assert not result.num_missed
    await until(lambda: not offload.statistics().gauges["to_write_back"])


@pytest.mark.parametrize("window", [1, 40, 100])
@pytest.mark.parametrize(("left", "own"), [(16, 64), (64, 16), (48, 32)])
async def test_what_was_loaded_and_stored_again_is_right_in_every_byte(left: int, own: int, window: int) -> None:
    """A block that is loaded is loaded whole, though the other geometry's window begins inside of it."""
    rng, disks = random.Random(f"{left}{own}{window}"), [SimDisk(1 << 21) for _ in range(2)]
    async with offloading(layout_with(left, window), disk=disks[0], host_bytes=1 << 21) as (rank, offload):
        given = lists(rank, rng, 0, TOKENS)
        for at, ids in enumerate(given):
            for place, block in enumerate(ids):
                pages(rank, at)[block] = truth(at, place, left)
        # So that lookups find more than all of it: of the window and the states some are not stored.
        for at in (1, 2):
            given[at][rng.randrange(TOKENS // left)] = None
        await stored(rank, offload, given, 0, TOKENS)
    rank = Rank(layout_with(own, window), seed=2, disk=disks[1], left=disks[:1], host_bytes=1 << 21)
    async with rank.running() as offload:
        ends = set()
        for _ in range(4):
            most = rng.randrange(TOKENS // own + 1) * own
            first = rng.randrange(most // own + 1) * own if rng.random() < 0.3 else 0
            tokens, given = await load(rank, offload, rng, first, most)
            if tokens > first:
                await stored(rank, offload, given, first, tokens)
                ends.add(tokens)
        tokens, given = await load(rank, offload, rng, 0, TOKENS)
        await stored(rank, offload, given, 0, tokens)
        assert tokens
    async with offloading(layout_with(own, window), seed=3, disk=disks[1], host_bytes=1 << 21) as (rank, offload):
        found = {(await load(rank, offload, rng, 0, most))[0] for most in range(0, TOKENS + 1, own)}
        assert tokens in found


async def left_by_another() -> SimDisk:
    """Leave a prompt in blocks of 64 tokens."""
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(block_size=64), disk=disk, host_bytes=64 * RECORD) as (_, offload):
        await offload.store("store", [(0, [0, 1])], chain("p", 8))
        await until(lambda: not offload.statistics().gauges["to_write_back"])
    return disk


@pytest.mark.parametrize("is_all", [False, True])
async def test_what_another_has_left_is_given_up_in_memory_and_not_in_its_files(is_all: bool) -> None:
    disk = await left_by_another()
    hashes = chain("p", 8)
    for _ in range(2):  # its files are as they were
        async with Rank(layout_of(), left=[disk], host_bytes=1 << 20).running() as offload:
            assert offload.lookup(hashes).tokens == 128
            with offload.pin(hashes):
                evicted = offload.evict(None if is_all else hashes)
                assert (evicted.num_blocks, evicted.num_pinned) == (0, 2)
                assert (await offload.load("a", [(0, list(range(8)))], hashes, num_tokens=128)).num_tokens == 128
                offload.evict(hashes)  # what has passed through host memory
                await until(lambda: offload.lookup(hashes).tokens == 128)
            assert offload.evict(None if is_all else hashes[:5]).num_blocks == (2 if is_all else 1)
            assert offload.lookup(hashes).tokens == 0
            assert (await offload.load("a", [(0, list(range(8)))], hashes, num_tokens=128)).num_tokens == 0
            await until(lambda: not offload._own.catalogue.jobs)
    assert len(disk.records) == 2


async def test_less_than_was_found_is_loaded_as_far_as_whole_blocks_of_all_reach() -> None:
    async with offloading(layout_of(), left=[await left_by_another()], host_bytes=1 << 20) as (rank, offload):
        before = rank.block(*range(8))
        loaded = await offload.load("a", [(0, list(range(7)))], chain("p", 8), num_tokens=112)
        assert loaded.num_tokens == 64
        assert rank.block(4, 5, 6, 7) == before[len(before) // 2 :]


async def test_a_block_of_another_that_fills_two_groups_is_loaded_from_the_first_token_of_either() -> None:
    def of(num_groups: int) -> Layout:
        """Two layers, in one group or in two."""
        rows, memories = dense_part("kv", "uint8", [("token", SIZE), ("dim", 64)]), ((1 << 40), (1 << 41))
        return Layout(
            groups=tuple(Group(f"group{g}", SIZE, BLOCKS) for g in range(num_groups)),
            views=tuple(View(at, at % num_groups, f"layers.{at}", 0, SIZE * 64, (rows,)) for at in range(2)),
            memories=tuple(Memory(base, SIZE * 64 * BLOCKS) for base in memories),
        )

    disk, hashes, ids = SimDisk(64 * RECORD), chain("p", 4), [7, 3, 5, 4]
    async with offloading(of(1), disk=disk) as (rank, offload):
        await offload.store("store", [(0, ids)], hashes)
        await until(lambda: not offload.statistics().gauges["to_write_back"])
        left = [array.reshape(BLOCKS, -1)[ids] for array in rank.arrays]
    async with offloading(of(2), seed=2, left=[disk]) as (rank, offload):
        loaded = await offload.load("load", [(0, ids), (2 * SIZE, ids[2:])], hashes, num_tokens=4 * SIZE)
        assert loaded.num_tokens == 4 * SIZE
        for at, begin in ((0, 0), (1, 2)):
            assert (rank.arrays[at].reshape(BLOCKS, -1)[ids[begin:]] == left[at][begin:]).all()


async def test_what_another_has_left_is_lent_once_it_was_stored() -> None:
    network = EngineConfig(engine_id="host")
    rank = Rank(layout_of(), left=[await left_by_another()], host_bytes=1 << 20, network_=network)
    async with rank.running() as offload:
        for tokens in (128, 112):
            with pytest.raises(LocalProtocolError, match="load them, store what was loaded, then lend"):
                await offload.lend("a", chain("p", 8), num_tokens=tokens)
        await offload.load("a", [(0, list(range(8)))], chain("p", 8), num_tokens=128)
        await offload.store("a", [(0, list(range(8)))], chain("p", 8))
        assert await offload.lend("a", chain("p", 8), num_tokens=128, lease_s=2.0)


async def test_a_load_holds_its_blocks_while_a_copy_of_any_shelf_may_write_them() -> None:
    """A copy of one shelf failed; the other's, given up for that, fell in doubt."""
    failed, held = (
        JobEnded("load-1", JobKind.LOAD, outcome, 0, 0, ((0,),), cause, is_held)
        for outcome, cause, is_held in ((JobOutcome.FAILED, "torn", False), (JobOutcome.CANCELLED, "", True))
    )
    for parts in ({"left0": failed, "left1": held}, {"left0": held, "left1": failed}):
        job = OffloadJob("load-1", "r", JobKind.LOAD, [], {0: np.array([3])}, 0.0, 9.0, [], SIZE, None)
        job.parts, job.held_by = {**parts}, {shelf for shelf, part in parts.items() if part is held}
        ended = job.end(1.0, 5.0)
        assert (ended.outcome, ended.is_held, job.retired_at) == (JobOutcome.FAILED, True, 6.0)
        with pytest.raises(ReadFailed, match="torn") as caught:
            job.how_it_ended()
        assert caught.value.held == {0: (3,)}


async def test_what_several_have_left_is_as_long_as_all_of_them_can_give() -> None:
    """One is of use after 48, 112 and 128 tokens, another after up to 96: the least of both is of no use to the one."""

    def windowed(tp_rank: int, tp_size: int) -> Layout:
        layout = layout_of(tp_rank, tp_size)
        return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(layout.groups[0], window=40),))

    disks = []
    for tp_rank, lost in ((0, 3), (1, 6)):
        disks.append(SimDisk(64 * RECORD))
        async with offloading(windowed(tp_rank, 2), disk=disks[-1], host_bytes=64 * RECORD) as (_, offload):
            given = [block if block != lost else None for block in range(8)]
            await offload.store("store", [(0, given)], chain("p", 8))
            await until(lambda: not offload.statistics().gauges["to_write_back"])
    async with offloading(windowed(0, 1), left=disks, host_bytes=1 << 20) as (_, offload):
        found = offload.lookup(chain("p", 8))
        assert (found.tokens, found.ready_tokens) == (48, 0)
        (group,) = found.groups
        assert (group.tokens, group.in_file, group.ready) == (96, 6, 0)
        assert offload.would_wait(chain("p", 8))
        for tokens, loaded in ((48, 48), (96, 0)):
            ids = list(range(tokens // SIZE))
            assert (await offload.load("a", [(0, ids)], chain("p", 8), num_tokens=tokens)).num_tokens == loaded


def _is_written(offload: Offload) -> bool:
    return not offload.statistics().gauges["to_write_back"]


@pytest.mark.parametrize("turn", [1, 4])
async def test_blocks_of_ranks_that_share_tokens_are_loaded_by_these_ranks_and_by_one_with_all_tokens(
    turn: int,
) -> None:
    hashes, disks = chain("p", 8), [SimDisk(64 * RECORD) for _ in range(2)]
    truth = [np.zeros((2, 8 * SIZE, 16), np.uint8) for _ in range(2)]  # per layer: keys and values of every token
    for tp_rank, disk in enumerate(disks):
        layout = layout_of(tp_rank, 2, num_heads=1, shards=2, interleave=turn)
        async with offloading(layout, seed=tp_rank, disk=disk, host_bytes=64 * RECORD) as (rank, offload):
            await offload.store("store", [(0, list(range(8)))], hashes)
            await until(partial(_is_written, offload))
            loaded = await offload.load("load", [(0, list(range(8, 16)))], hashes, num_tokens=8 * SIZE)
            assert loaded.num_tokens == 8 * SIZE
            held = [token for token in range(8 * SIZE) if token // turn % 2 == tp_rank]
            for whole, array in zip(truth, rank.arrays, strict=True):
                mine = array.reshape(2, BLOCKS, SIZE // 2, 16)
                assert (mine[:, :8] == mine[:, 8:16]).all()
                whole[:, held] = mine[:, :8].reshape(2, -1, 16)
    layout, ids = layout_of(num_heads=1, block_size=2 * SIZE), [7, 3, 5, 4]
    async with offloading(layout, seed=2, left=disks, host_bytes=1 << 20) as (rank, offload):
        loaded = await offload.load("load", [(0, ids)], hashes, num_tokens=8 * SIZE)
        assert loaded.num_tokens == 8 * SIZE
        for whole, array in zip(truth, rank.arrays, strict=True):
            assert (array.reshape(2, BLOCKS, 2 * SIZE, 16)[:, ids].reshape(2, -1, 16) == whole).all()
    async with offloading(layout, seed=2, left=disks[:1], host_bytes=1 << 20) as (_, offload):
        assert offload.lookup(hashes).tokens == 0, "half of the tokens are missing"
