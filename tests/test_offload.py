"""An offload on simulated tiers: what is stored comes back to the byte, and blocks are in use until nothing moves."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from asynckv import (
    BackendError,
    BlocksRetired,
    ConfigError,
    EngineClosed,
    EngineConfig,
    LocalProtocolError,
    LogConfig,
    Overloaded,
    PlanRefused,
    PullCancelled,
    PullConfig,
    PullError,
    PullTimeout,
    ReadFailed,
    WrongThread,
)
from asynckv.embed import Cancel, EngineDesk, Lookup, Store
from asynckv.geometry.layout import Layout
from asynckv.offload import Offload, OffloadConfig
from asynckv.offload.tier import Place
from asynckv.results import Evicted, Loaded, Stored
from asynckv.tools.cli import app
from tests.documented import Lines
from tests.engines import cancel, news_of, pass_until, passing, turn_loop, until
from tests.lab.offload_audit import check as check_offload
from tests.lab.tiers import SimCopies, SimDisk
from tests.observed import answer_of
from tests.offloads import BLOCKS, RECORD, SIZE, Rank, chain, hybrid, layout_of, offloading


async def test_what_is_stored_is_loaded_into_other_blocks() -> None:
    async with offloading(layout_of()) as (rank, offload):
        before = rank.block(3, 4, 9)
        stored = await offload.store("a", [(0, [3, 4, 9])], chain("p", 3))
        assert (stored.num_blocks, stored.num_new, stored.num_missed, stored.num_bytes) == (3, 3, 0, 3 * RECORD)
        rank.scribble([3, 4, 9])
        assert offload.lookup(chain("p", 5)).tokens == 48
        assert not offload.would_wait(chain("p", 5))
        loaded = await offload.load("b", [(0, [7, 5, 6, None])], chain("p", 5), num_tokens=48)
        assert (loaded.num_tokens, loaded.num_blocks, loaded.file_bytes) == (48, 3, 0)
        assert rank.block(7, 5, 6) == before


async def test_only_what_is_missing_is_loaded_and_nothing_else_is_written() -> None:
    async with offloading(layout_of()) as (rank, offload):
        before = rank.block(3, 4, 9)
        await offload.store("a", [(0, [3, 4, 9])], chain("p", 3))
        rank.scribble(range(32))
        others = rank.block(*range(20))
        loaded = await offload.load("b", [(0, [None, 21, 22])], chain("p", 3), num_tokens=48)
        assert (loaded.num_tokens, loaded.num_blocks) == (48, 2)
        loaded = await offload.load("c", [(SIZE, [23, 24])], chain("p", 3), num_tokens=48)
        assert (loaded.num_tokens, loaded.num_blocks) == (48, 2)
        assert rank.block(21, 22) == rank.block(23, 24) == before[RECORD:]
        assert rank.block(*range(20)) == others


async def test_a_block_that_ends_after_the_last_hash_is_not_stored() -> None:
    async with offloading(layout_of()) as (_, offload):
        stored = await offload.store("a", [(0, [1, 2, 3])], chain("p", 2))
        assert (stored.num_blocks, stored.num_missed) == (2, 0)
        assert (await offload.store("b", [(0, [None, 2])], chain("q", 2))).num_blocks == 1
        assert offload.lookup(chain("q", 2)).tokens == 0


async def test_a_miss_is_no_error_and_writes_nothing() -> None:
    async with offloading(layout_of()) as (rank, offload):
        before = rank.block(5, 6, 7)
        loaded = await offload.load("b", [(0, [5, 6, 7])], chain("p", 3), num_tokens=48)
        assert (loaded.num_tokens, loaded.num_blocks) == (0, 0)
        assert rank.block(5, 6, 7) == before


async def test_what_precedes_a_block_that_is_gone_is_loaded() -> None:
    async with offloading(layout_of()) as (rank, offload):
        await offload.store("a", [(0, [1, 2, 3, 4])], chain("p", 4))
        offload.evict(chain("p", 4)[2:3])
        before = rank.block(1, 2) + rank.block(7, 8)
        loaded = await offload.load("b", [(0, [5, 6, 7, 8])], chain("p", 4), num_tokens=64)
        assert (loaded.num_tokens, loaded.num_blocks) == (32, 2)
        assert rank.block(5, 6, 7, 8) == before
        loaded = await offload.load("c", [(32, [7, 8])], chain("p", 4), num_tokens=64)  # what it has is all there is
        assert (loaded.num_tokens, loaded.num_blocks) == (32, 0)
        counters = offload.statistics().counters
        assert (counters["load.done"], counters["load.missing"], counters["tokens.missed"]) == (1, 1, 64)


async def test_what_precedes_a_rotten_record_is_loaded(logs: Lines) -> None:
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(), disk=disk, policy="lru") as (rank, offload):
        before = rank.block(*range(10))
        await store_in_files(rank, offload, list(range(10)))
        disk.rot(key for key in (r.key for r, _ in disk.records.values()) if key.endswith((b"p-5", b"p-7")))
        assert offload.lookup(chain("p", 10)).tokens == 160
        loaded = await offload.load("b", [(0, list(range(10, 20)))], chain("p", 10), num_tokens=160)
        assert (loaded.num_tokens, loaded.num_blocks) == (80, 5)
        assert rank.block(*range(10, 15)) == before[: 5 * RECORD]
        assert offload.lookup(chain("p", 10)).tokens == 80
        assert offload.statistics().counters["records_lost"] == 2
        assert not any(r.key.endswith((b"p-5", b"p-7")) for r, _ in disk.records.values())
    failed = logs.one("offload_failed")
    assert (failed["cause"], failed["what"], failed["request_id"]) == ("failed", "load", "b")


async def test_a_load_that_is_given_up_ends_whatever_was_lost() -> None:
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(), disk=disk, policy="lru") as (rank, offload):
        await store_in_files(rank, offload, [1, 2, 3])
        disk.rot(key for key in (r.key for r, _ in disk.records.values()) if key.endswith(b"p-1"))
        for turns in range(1, 30):
            loading = asyncio.create_task(offload.load("b", [(0, [5, 6, 7])], chain("p", 3), num_tokens=48))
            await turn_loop(turns)
            if not offload.cancel("b"):
                break
            with pytest.raises(PullCancelled):
                await loading
            assert not rank.engine.holds()
        assert turns > 2
        assert (await loading).num_tokens == SIZE


async def test_stores_that_are_in_flight_twice_are_one() -> None:
    async with offloading(layout_of()) as (rank, offload):
        rank.copies.deferred = True
        first = asyncio.create_task(offload.store("a", [(0, [1, 2])], chain("p", 2)))
        second = asyncio.create_task(offload.store("b", [(0, [8, 9])], chain("p", 2)))
        await until(lambda: offload.statistics().gauges["jobs"] == 2)
        assert rank.copies.posts == 1
        assert offload.would_wait(chain("p", 2))
        rank.copies.finish()
        a, b = await asyncio.gather(first, second)
        assert (a.num_new, b.num_blocks, rank.copies.posts) == (2, 2, 1)


async def test_a_load_of_what_is_being_stored_waits_for_it() -> None:
    async with offloading(layout_of()) as (rank, offload):
        before = rank.block(1)
        storing = await rank.begun(offload.store("a", [(0, [1])], chain("p", 1)))
        loading = asyncio.create_task(offload.load("b", [(0, [9])], chain("p", 1), num_tokens=SIZE))
        await asyncio.sleep(0)
        rank.copies.deferred = False
        rank.copies.finish()
        assert (await storing).num_new == 1
        assert (await loading).num_tokens == SIZE
        assert rank.block(9) == before


# -- custody ---------------------------------------------------------------------------------------------------


async def test_blocks_that_are_stored_are_lent_and_those_that_are_loaded_into_are_written() -> None:
    async with offloading(layout_of()) as (rank, offload):
        storing = await rank.begun(offload.store("a", [(0, [1, 2])], chain("p", 2)))
        (held,) = rank.engine.holds()
        assert (held.request_id, held.reason, held.blocks) == ("a", "storing", {0: (1, 2)})
        rank.engine.check_integrity()
        again = asyncio.create_task(offload.store("b", [(0, [2])], chain("q", 1)))  # readers share
        with pytest.raises(
            LocalProtocolError, match="cannot be filled: it is still being read by a store of 'a'; wait"
        ):
            await offload.load("c", [(0, [2])], chain("p", 1), num_tokens=SIZE)
        await asyncio.sleep(0)
        rank.copies.finish()
        await storing
        await again
        assert not rank.engine.holds()
        loading = await rank.begun(offload.load("d", [(0, [5])], chain("p", 1), num_tokens=SIZE))
        assert [h.reason for h in rank.engine.holds()] == ["loading"]
        with pytest.raises(
            LocalProtocolError, match=r"block 5 .* cannot be read: it is still being written by a load of 'd'"
        ):
            await offload.store("e", [(0, [5])], chain("r", 1))
        with pytest.raises(LocalProtocolError, match="is being loaded already"):
            await offload.load("d", [(0, [6])], chain("p", 1), num_tokens=SIZE)
        rank.copies.finish()
        await loading
        assert not rank.engine.holds()


async def test_an_inspected_engine_tells_of_stores_and_loads() -> None:
    async with offloading(layout_of()) as (rank, offload):
        storing = await rank.begun(offload.store("a", [(0, [1, 2])], chain("p", 2)))
        account = (await answer_of(rank.engine)).account
        assert [(each.kind, each.phase, each.number) for each in account.counts] == [("store", "storing", 1)]
        assert [(hold.request_id, hold.reason, hold.blocks) for hold in account.holds] == [
            ("a", "storing", {0: (1, 2)})
        ]
        assert account.facts.counters["offload.store.done"] == 0
        assert account.facts.planes["offload.copies"] == "simulated"
        assert account.budgets["blocks_held"][0] == 2
        rank.copies.finish()
        await storing


async def test_a_cancelled_load_keeps_its_blocks_until_nothing_writes_them() -> None:
    async with offloading(layout_of(), max_post_bytes=RECORD) as (rank, offload):
        await offload.store("a", [(0, [1, 2, 3])], chain("p", 3))
        loading = await rank.begun(offload.load("b", [(0, [5, 6, 7])], chain("p", 3), num_tokens=48))
        await cancel(loading)
        assert [h.blocks for h in rank.engine.holds()] == [{0: (5, 6, 7)}]
        returned = asyncio.create_task(offload.returned("b"))
        await asyncio.sleep(0)
        assert not returned.done()
        rank.copies.finish()  # the piece that could not be called back
        await returned
        assert not rank.engine.holds()
        assert 3 * RECORD < rank.copies.num_bytes < 6 * RECORD  # one piece of several was loaded
        assert rank.block(5, 6, 7) != rank.block(1, 2, 3)


async def test_a_cancelled_store_is_finished_for_others_that_wait() -> None:
    async with offloading(layout_of()) as (rank, offload):
        first = await rank.begun(offload.store("a", [(0, [1])], chain("p", 1)))
        second = asyncio.create_task(offload.store("b", [(0, [2])], chain("p", 1)))
        await asyncio.sleep(0)
        await cancel(first)
        assert {h.request_id for h in rank.engine.holds()} == {"a", "b"}
        rank.copies.finish()
        assert (await second).num_blocks == 1
        await offload.returned("a")
        assert offload.lookup(chain("p", 1)).tokens == SIZE


async def test_a_step_looks_up_by_orders() -> None:
    async with offloading(layout_of()) as (rank, offload):
        desk = EngineDesk(rank.engine)
        desk.submit(
            [
                Store(request_id="a", groups=[(0, [1, 2])], hashes=chain("p", 2)),
                Lookup(request_id="b", hashes=chain("p", 2)),  # the store before it has begun
                Lookup(request_id="c", hashes=chain("p", 2), num_tokens=31),
                Lookup(request_id="d", hashes=chain("q", 2)),
                Lookup(request_id="e", hashes="no hashes"),
                Lookup(request_id=7, hashes=[]),  # type: ignore[arg-type]
            ]
        )
        await until(lambda: len(desk._news) == 6)
        told = desk.take_finished()
        assert [(request_id, found.tokens) for request_id, found in told.found] == [("b", 32), ("c", 16), ("d", 0)]
        assert told.stored
        assert [str(each.error).split()[0] for each in told.refused] == ["hashes", "request_id"]
        await rank.engine.suspend()
        desk.submit([Lookup(request_id="f", hashes=chain("p", 2))])
        [(_, found)] = (await news_of(desk)).found
        assert found.tokens == 0
        await offload.aclose()
        desk.submit([Lookup(request_id="g", hashes=chain("p", 2))])
        assert "has no offload" in str((await news_of(desk)).refused[0].error)


@pytest.mark.parametrize("is_retired", [False, True])
async def test_a_store_that_ends_by_a_bug_is_told_once_it_is_known_what_becomes_of_its_blocks(is_retired: bool) -> None:
    rank = Rank(layout_of(), timeout_s=2.0, held_s=60.0)
    async with rank.running():
        rank.copies.deferred, desk = True, EngineDesk(rank.engine)
        rank.offload._stored = lambda job: 1 // 0  # type: ignore[assignment, method-assign, return-value]
        desk.submit([Store(request_id="a", groups=[(0, [1, 2])], hashes=chain("p", 2))])
        await until(lambda: rank.copies.moves)
        rank.clock.advance(2.1)
        await turn_loop(9)
        assert not desk.has_news
        assert rank.engine.holds()
        if is_retired:
            rank.clock.advance(61.0)
        else:
            rank.copies.finish()
        told = await news_of(desk)
        (failed,) = told.offload_failed
        assert (failed.request_id, failed.is_held, told.offload_returned) == ("a", is_retired, [])
        assert told.offload_retired == ["a"] * is_retired
        assert isinstance(failed.error.__cause__ if is_retired else failed.error, ZeroDivisionError)
        rank.copies.finish()


@pytest.mark.parametrize("way", ["cancelled", "returned", "retired"])
async def test_a_store_that_fails_is_told_as_loads_are_and_so_are_its_blocks(way: str) -> None:
    rank = Rank(layout_of(), timeout_s=2.0, held_s=60.0)
    async with rank.running():
        rank.copies.deferred, desk = True, EngineDesk(rank.engine)
        desk.submit([Store(request_id="a", groups=[(0, [1, 2])], hashes=chain("p", 2))])
        await until(lambda: rank.copies.moves)
        if way == "cancelled":
            desk.submit([Cancel("a")])
            await asyncio.sleep(0)
            rank.copies.finish()
        else:
            rank.clock.advance(2.1)
        told = await news_of(desk)
        assert (told.offload_failed[0].request_id, told.offload_failed[0].is_held) == ("a", way != "cancelled")
        if way == "returned":
            rank.copies.finish()
        elif way == "retired":
            rank.clock.advance(61.0)
        if way != "cancelled":
            assert told.offload_failed[0].error.held == {0: (1, 2)}  # type: ignore[attr-defined]
            assert getattr(await news_of(desk), f"offload_{way}") == ["a"]


async def test_a_load_that_is_given_up_by_its_id_says_so() -> None:
    async with offloading(layout_of()) as (rank, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        loading = await rank.begun(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE))
        assert offload.cancel("b")
        await asyncio.sleep(0)
        assert not loading.done()
        rank.copies.finish()
        with pytest.raises(PullCancelled) as told:
            await loading
        assert told.value.held == {}
        assert not offload.cancel("b")


async def test_a_load_in_doubt_names_its_blocks_until_there_is_evidence() -> None:
    async with offloading(layout_of()) as (rank, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        loading = await rank.begun(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE))
        (move,) = rank.copies.moves
        rank.copies.doubt(move)
        with pytest.raises(ReadFailed) as told:
            await loading
        assert told.value.held == {0: (5,)}
        assert [(h.reason, h.waits_for) for h in rank.engine.holds()] == [("quarantined", ("a copy in doubt",))]
        rank.engine.check_integrity()
        returned = asyncio.create_task(told.value.returned())
        await asyncio.sleep(0)
        assert not returned.done()
        rank.copies.finish(move)
        await returned
        assert not rank.engine.holds()


async def test_nothing_more_is_loaded_into_blocks_that_a_copy_in_doubt_may_write() -> None:
    """Of three blocks one is lost, and what precedes it would be loaded again, into a block that is held."""
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(), disk=disk, policy="lru") as (rank, offload):
        await store_in_files(rank, offload, [1, 2, 3])
        await offload.load("a", [(0, [4])], chain("p", 1), num_tokens=SIZE)
        disk.rot(key for key in (r.key for r, _ in disk.records.values()) if key.endswith(b"p-1"))
        rank.copies.deferred = True
        loading = asyncio.create_task(offload.load("b", [(0, [5, 6, 7])], chain("p", 3), num_tokens=48))
        await until(lambda: rank.copies.moves and offload.lookup(chain("p", 3)).tokens == SIZE)
        (move,) = rank.copies.moves
        rank.copies.doubt(move)
        await until(lambda: loading.done() or len(rank.copies.moves) > 1)
        assert list(rank.copies.moves) == [move]
        with pytest.raises(ReadFailed) as told:
            await loading
        rank.copies.finish(move)
        await told.value.returned()


async def test_copies_that_are_in_time_are_not_looked_at_in_every_turn() -> None:
    class Counting(dict):  # type: ignore[type-arg]
        walks = 0

        def items(self) -> Any:
            self.walks += 1
            return super().items()

    async with offloading(layout_of()) as (rank, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        posted = offload._mover.posted = Counting(offload._mover.posted)
        loading = await rank.begun(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE, timeout_s=2.0))
        for _ in range(50):
            offload._mover.pump()
        assert posted.walks <= 1
        rank.clock.advance(2.1)
        with pytest.raises(PullError):
            await loading
        rank.copies.finish()


async def test_blocks_of_a_copy_that_never_ends_are_retired() -> None:
    async with offloading(layout_of(), held_s=60.0) as (rank, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        loading = await rank.begun(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE))
        rank.copies.doubt(next(iter(rank.copies.moves)))
        with pytest.raises(PullError) as told:
            await loading
        rank.clock.advance(61.0)
        with pytest.raises(BlocksRetired):
            await told.value.returned()
        assert [h.reason for h in rank.engine.holds()] == ["retired"]


async def test_a_load_whose_copy_hangs_is_told_in_its_time_and_its_blocks_follow() -> None:
    async with offloading(layout_of(), held_s=60.0) as (rank, offload):
        before = rank.block(1, 2)
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        rank.copies.deferred = True
        for name, blocks in (("back", [5, 6]), ("lost", [7, 8])):
            groups = [(0, blocks)]
            loading = await rank.begun(offload.load(name, groups, chain("p", 2), num_tokens=2 * SIZE, timeout_s=2.0))
            rank.clock.advance(1.9)
            await asyncio.sleep(0)
            assert not loading.done()
            rank.clock.advance(0.2)
            with pytest.raises(PullTimeout, match="has not ended") as told:
                await loading
            assert told.value.held == {0: tuple(blocks)}
            assert [h.reason for h in rank.engine.holds()] == ["quarantined"]
            assert [each.is_cancelled for each in rank.copies.moves.values()] == [True]
            rank.copies.doubt(next(iter(rank.copies.moves)))  # the plane has its doubts as well
            await asyncio.sleep(0)
            assert offload.statistics().counters["moves_doubted"] == (1 if name == "back" else 2)
            rank.engine.check_integrity()
            check_offload(offload)
            if name == "back":
                rank.copies.finish()
                await told.value.returned()
                assert rank.block(5, 6) == before
                assert not rank.engine.holds()
        rank.clock.advance(59.0)  # 61 s after the beginning
        await asyncio.sleep(0)
        assert [h.reason for h in rank.engine.holds()] == ["quarantined"]
        rank.clock.advance(2.0)
        with pytest.raises(BlocksRetired):
            await told.value.returned()
        rank.copies.deferred = False
        assert (await offload.load("c", [(0, [5, 6])], chain("p", 2), num_tokens=2 * SIZE)).num_tokens == 2 * SIZE


async def test_a_store_whose_copy_hangs_is_told_in_its_time_and_its_blocks_follow() -> None:
    async with offloading(layout_of(), timeout_s=2.0, held_s=60.0) as (rank, offload):
        rank.copies.deferred = True
        for name, blocks in (("back", [1, 2]), ("lost", [3, 4])):
            storing = [
                asyncio.create_task(offload.store(who, [(0, blocks)], chain(name, 2))) for who in (name, "waits for it")
            ]
            await until(lambda: rank.copies.moves)
            rank.clock.advance(1.9)
            await asyncio.sleep(0)
            assert not any(each.done() for each in storing)
            rank.clock.advance(0.2)
            with pytest.raises(PullTimeout, match=r"its store .* has not ended.* may still read") as told:
                await storing[0]
            assert told.value.held == {0: tuple(blocks)}
            assert (await storing[1]).num_missed == 2
            assert [(h.request_id, h.reason) for h in rank.engine.holds()] == [(name, "quarantined")]
            rank.engine.check_integrity()
            check_offload(offload)
            if name == "back":
                rank.copies.finish()
                await told.value.returned()
                assert not rank.engine.holds()
        rank.clock.advance(59.0)  # 61 s after the beginning
        await asyncio.sleep(0)
        assert [h.reason for h in rank.engine.holds()] == ["quarantined"]
        rank.clock.advance(2.0)
        with pytest.raises(BlocksRetired):
            await told.value.returned()
        rank.copies.deferred = False
        assert (await offload.store("again", [(0, [5, 6])], chain("lost", 2))).num_new == 2
        counters = offload.statistics().counters
        assert (counters["store.timeout"], counters["not_stored.timeout"], counters["jobs_retired"]) == (4, 8, 1)


async def test_what_a_store_has_not_begun_in_its_time_is_not_stored_and_what_it_has_begun_has_as_long_again() -> None:
    async with offloading(layout_of(), timeout_s=2.0, max_bytes=RECORD) as (rank, offload):
        rank.copies.deferred = True
        first, second, third = (
            asyncio.create_task(offload.store(f"r{i}", [(0, [i])], chain(f"p{i}", 1))) for i in range(3)
        )
        await until(lambda: rank.copies.moves)
        rank.clock.advance(1.9)
        rank.copies.finish()
        assert (await first).num_new == 1
        await until(lambda: rank.copies.moves)
        rank.clock.advance(1.9)
        assert (await third).num_missed == 1
        assert not second.done()
        rank.copies.finish()
        assert (await second).num_new == 1


async def test_a_copy_that_was_just_begun_when_the_time_is_over_is_waited_for() -> None:
    async with offloading(layout_of()) as (rank, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        groups = [(0, [5])]
        loading = await rank.begun(offload.load("b", groups, chain("p", 1), num_tokens=SIZE, timeout_s=0.01))
        rank.clock.advance(0.5)
        await asyncio.sleep(0)
        rank.copies.finish()
        assert (await loading).num_tokens == SIZE


async def test_what_a_copy_held_is_told_by_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    async with offloading(layout_of(), held_s=60.0, engine={"log": LogConfig(file=str(log))}) as (rank, offload):
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        rank.copies.fate = lambda move_id, op: "doubt"
        for name, block in (("back", 5), ("lost", 6)):
            with pytest.raises(PullError):
                await offload.load(name, [(0, [block])], chain("p", 1), num_tokens=SIZE)
            rank.clock.advance(4.0)
        rank.copies.finish(next(iter(rank.copies.moves)))
        await offload.returned("back")
        rank.clock.advance(61.0)
        with pytest.raises(BlocksRetired):
            await offload.returned("lost")
    said = [json.loads(line) for line in log.read_text().splitlines()]
    moved = next(each for each in said if each["event"] == "offload_moved")
    [stopped] = [each for each in said if each["event"] == "offload_stopped"]
    assert moved["counters"]["bytes.store"] == stopped["counters"]["bytes.store"] == 2 * RECORD
    assert moved["blocks"] == {"host": 2}
    told = CliRunner().invoke(app, ["why", str(log), "--json", str(tmp_path / "report.json")])
    assert told.exit_code == 1
    assert "2 stores or loads did not end in time" in told.stdout
    copies = json.loads((tmp_path / "report.json").read_text())["copies"]
    assert [(x["request_id"], x["what"], x["state"], x["blocks"]) for x in copies] == [
        ("lost", "load", "retired", 1),
        ("back", "load", "returned", 1),
    ]
    assert copies[1]["seconds"] == 8.0
    assert copies[0]["seconds"] >= 60.0


async def test_a_failed_copy_is_a_miss_from_its_first_gap_on() -> None:
    rank = Rank(layout_of(), max_bytes=RECORD)  # one block at a time
    async with rank.running() as offload:
        before = rank.block(1, 2, 3)
        await offload.store("a", [(0, [1, 2, 3])], chain("p", 3))
        moves = iter(["finish", "fail"])
        rank.copies.fate = lambda move_id, op: next(moves)
        loaded = await offload.load("b", [(0, [5, 6, 7])], chain("p", 3), num_tokens=48)
        assert loaded.num_tokens == SIZE
        assert rank.block(5) == before[:RECORD]
        rank.copies.fate = lambda move_id, op: "finish"
        assert (await offload.load("c", [(0, [5, 6, 7])], chain("p", 3), num_tokens=48)).num_tokens == 48
        assert rank.block(5, 6, 7) == before


async def test_a_failed_store_is_not_found() -> None:
    async with offloading(layout_of()) as (rank, offload):
        rank.copies.fate = lambda move_id, op: "fail"
        stored = await offload.store("a", [(0, [1, 2])], chain("p", 2))
        assert (stored.num_blocks, stored.num_missed) == (0, 2)
        assert offload.lookup(chain("p", 2)).tokens == 0
        rank.copies.fate = lambda move_id, op: "doubt"
        with pytest.raises(ReadFailed, match="may still read the blocks") as failed:
            await offload.store("b", [(0, [1, 2])], chain("p", 2))
        assert failed.value.held == {0: (1, 2)}
        assert offload.lookup(chain("p", 2)).tokens == 0
        rank.copies.finish()  # nothing reads the blocks any more, and what was written is nobody's
        await failed.value.returned()
        assert offload.lookup(chain("p", 2)).tokens == 0


async def test_a_load_that_takes_too_long_is_a_miss() -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD)) as (rank, offload):
        await store_in_files(rank, offload, [1])
        rank.records.deferred = True
        loading = asyncio.create_task(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE, timeout_s=2.0))
        await until(lambda: rank.records.moves)
        rank.clock.advance(2.1)
        assert (await loading).num_tokens == 0
        assert not rank.engine.holds()
        rank.records.finish()


# -- files -----------------------------------------------------------------------------------------------------


async def store_in_files(rank: Rank, offload: Offload, blocks: list[int]) -> None:
    """Store blocks so that they are in files alone."""
    await offload.store("p", [(0, blocks)], chain("p", len(blocks)))
    await until(lambda: offload.statistics().counters["blocks.write_back"] >= len(blocks))
    for i in range(16):  # as much as the host tier holds
        await offload.store("other", [(0, [30])], [f"filler-{i}"])
    await until(lambda: not offload.statistics().gauges["bytes_under_way"])


async def test_what_was_written_back_is_promoted_and_loaded() -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD), policy="lru") as (rank, offload):
        before = rank.block(1, 2)
        await store_in_files(rank, offload, [1, 2])
        rank.scribble([1, 2])
        found = offload.lookup(chain("p", 2))
        assert (found.tokens, found.ready_tokens, found.would_wait) == (32, 0, True)
        loaded = await offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32)
        assert (loaded.num_tokens, loaded.file_bytes) == (32, 2 * RECORD)
        assert rank.block(5, 6) == before


async def test_what_is_written_over_what_was_given_up_is_kept() -> None:
    """A file tier that is full gives up a block for each that it takes: the old one is forgotten, not the new one."""
    disk = SimDisk(4 * RECORD)
    async with offloading(layout_of(), disk=disk, policy="lru", max_bytes=RECORD) as (_, offload):
        for name in "pqr":
            await offload.store(name, [(0, [1, 2, 3, 4])], chain(name, 4))
            await until(lambda: not offload.statistics().gauges["to_write_back"] and not offload._mover.posted)
            await asyncio.sleep(0)
            assert {r.key[16:] for r, _ in disk.records.values()} == {h.encode() for h in chain(name, 4)}


async def test_files_are_found_again_by_the_next_process() -> None:
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(), disk=disk) as (rank, offload):
        before = rank.block(1, 2)
        await store_in_files(rank, offload, [1, 2])
    async with offloading(layout_of(), disk=disk, seed=7) as (rank, offload):
        assert offload.lookup(chain("p", 2)).tokens == 32
        await offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32)
        assert rank.block(5, 6) == before
    other = Rank(layout_of(), disk=disk, seed=8, model="another")
    async with other.running() as offload:
        assert offload.lookup(chain("p", 2)).tokens == 0


async def test_blocks_that_a_slow_disk_was_late_with_are_still_there() -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD), policy="lru") as (rank, offload):
        await store_in_files(rank, offload, [1, 2])
        records = rank.records
        records.deferred = True
        loading = asyncio.create_task(offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32))
        await until(lambda: records.moves)
        records.fail(*records.moves)
        assert (await loading).num_tokens == 0
        records.deferred = False
        assert (await offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32)).num_tokens == 32


async def test_what_a_disk_has_that_takes_no_more_is_read_on() -> None:
    """It is full of blocks: none is given up for one that could not be written."""
    async with offloading(layout_of(), disk=SimDisk(4 * RECORD), policy="lru") as (rank, offload):
        await offload.store("p", [(0, [1, 2, 3, 4])], chain("p", 4))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 4)
        rank.records.lose("no space left", reads=False)
        await offload.store("q", [(0, list(range(10, 26)))], chain("q", 16))
        await until(lambda: not offload._mover.posted)
        assert offload.statistics().gauges["kept.file"] == 4
        assert not offload.statistics().gauges["to_write_back"]
        assert offload.statistics().counters["not_written_back.files_lost"] == 16
        found = offload.lookup(chain("p", 4))
        assert (found.tokens, found.ready_tokens) == (64, 0)


async def test_a_closing_offload_writes_to_files_what_is_in_memory_alone(logs: Lines) -> None:
    disk = SimDisk(64 * RECORD)
    for seconds in (0.0, 5.0):
        async with offloading(layout_of(), disk=disk) as (rank, offload):
            rank.records.deferred = True
            await offload.store("a", [(0, [1, 2])], chain("p", 2))
            assert offload.statistics().gauges["to_write_back"] == 0 < len(offload._mover.posted)
            closing = asyncio.create_task(offload.aclose(seconds))
            await until(lambda offload=offload: offload._mover.cause)  # type: ignore[misc]
            with pytest.raises(EngineClosed):
                await offload.store("b", [(0, [3])], chain("q", 1))
            if seconds:
                rank.records.finish()
            await closing
    assert [(each["written_back"], each["lost"]) for each in logs.of("offload_stopped")] == [(0, 2), (2, 0)]
    assert len(disk.records) == 2


async def test_an_engine_that_closes_gives_its_files_a_second() -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD)) as (rank, offload):
        rank.records.deferred = True
        await offload.store("a", [(0, list(range(16)))], chain("p", 16))
        began = rank.clock.now()
    assert rank.clock.now() >= began + 1.0


async def test_a_closing_offload_writes_to_files_what_still_arrives() -> None:
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(), disk=disk) as (rank, offload):
        storing = await rank.begun(offload.store("a", [(0, [1, 2, 3])], chain("p", 3)))
        closing = asyncio.create_task(offload.aclose(30.0))
        await turn_loop(9)
        assert not closing.done()
        rank.copies.finish()
        await closing
        with pytest.raises(PullCancelled):
            await storing
    assert len(disk.records) == 3


async def test_an_offload_that_closes_and_waits_for_a_copy_takes_no_turns_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD)) as (rank, offload):
        rank.records.deferred = True
        await offload.store("a", [(0, list(range(8)))], chain("p", 8))
        storing = await rank.begun(offload.store("b", [(0, [20])], chain("q", 1)))
        turns, pump = list[float](), offload._mover.pump

        def counted() -> None:
            turns.append(rank.clock.now())
            pump()

        monkeypatch.setattr(offload._mover, "pump", counted)
        closing, began = asyncio.create_task(rank.engine.aclose(8.0)), rank.clock.now()
        while rank.clock.now() < began + 7.0:  # of which it writes to files for a second
            await asyncio.sleep(0)
            rank.clock.advance(0.01)
        assert not closing.done()
        assert len(turns) < 20
        rank.copies.finish()
        with pytest.raises(PullCancelled):
            await storing


async def test_a_copy_that_cannot_be_planned_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with offloading(layout_of(), held_s=1.0, engine={"pull": PullConfig(held_s=1.0)}) as (rank, offload):
        copying = rank.offload._mover.copying[offload._own]
        pieces = copying.pieces

        def broken(move: Any, blocks: Any) -> Any:
            if blocks[0][1][0] == 7:
                raise RuntimeError("a bug")
            return pieces(move, blocks)

        monkeypatch.setattr(copying, "pieces", broken)
        stores = [
            asyncio.create_task(offload.store(f"r{block}", [(0, [block])], chain(f"p{block}", 1)))
            for block in (6, 7, 8)
        ]
        first, broken_off, last = await asyncio.gather(*stores, return_exceptions=True)
        assert isinstance(first, Stored)
        assert isinstance(last, Stored)
        assert first.num_new == last.num_new == 1
        assert isinstance(broken_off, ReadFailed)
        assert [hold.blocks for hold in rank.engine.holds()] == [{0: (7,)}]  # it may have been begun
        assert rank.engine.statistics().counters["internal_errors"] == 1
        offload._mover.forsake()


async def test_more_jobs_than_there_may_be_are_refused_and_neither_kind_keeps_the_other_out() -> None:
    async with offloading(layout_of(), max_jobs=2) as (rank, offload):
        await offload.store("before", [(0, [8])], chain("q", 1))
        rank.copies.deferred = True
        running: list[asyncio.Task[Any]] = []
        calls: dict[str, Callable[[int], Coroutine[Any, Any, Any]]] = {
            "store": lambda i: offload.store("a", [(0, [i])], chain(f"p{i}", 1)),
            "load": lambda i: offload.load(f"b{i}", [(0, [10 + i])], chain("q", 1), num_tokens=SIZE),
        }
        for kind, call in calls.items():
            running.extend(asyncio.create_task(call(i)) for i in range(2))
            await until(lambda: len(rank.copies.moves) == len(running))
            with pytest.raises(Overloaded, match=rf"2 {kind}s wait or run already.* raise max_jobs") as caught:
                await call(9)
            assert (caught.value.reason, caught.value.is_retryable) == ("queue_full", True)
        rank.copies.deferred = False
        rank.copies.finish()
        await asyncio.gather(*running)
        assert (await offload.store("b", [(0, [9])], chain("r", 1))).num_new == 1
        counters = offload.statistics().counters
        assert counters["store.overloaded"] == counters["load.overloaded"] == 1


async def test_an_engine_lives_when_its_disk_does_not() -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD), policy="lru") as (rank, offload):
        await store_in_files(rank, offload, [1])
        rank.records.lose()
        await until(lambda: offload.lookup(chain("p", 1)).tokens == 0)
        before = rank.block(9)
        await offload.store("c", [(0, [9])], chain("q", 1))
        assert (await offload.load("d", [(0, [5])], chain("q", 1), num_tokens=SIZE)).num_tokens == SIZE
        assert rank.block(5) == before


# -- several groups ----------------------------------------------------------------------------------------------


async def test_windows_and_states_are_loaded_as_they_are_needed() -> None:
    rank = Rank(hybrid(), host_bytes=64 * 4096)
    pages = [array.reshape(BLOCKS, -1) for array in rank.arrays]
    async with rank.running() as offload:
        ids: list[list[int | None]] = [
            [*range(1, 9)],
            [*range(11, 19)],
            [None, 22, None, 24],
        ]  # after 64 and 128 tokens
        before = [page.copy() for page in pages]
        stored = await offload.store("a", [(0, ids[0]), (0, ids[1]), (0, ids[2])], chain("p", 8))
        assert (stored.num_blocks, stored.num_missed) == (18, 0)
        for page in pages:
            page[:] = 0xAA
        assert [offload.lookup(chain("p", n)).tokens for n in (8, 7, 4, 3)] == [128, 64, 64, 0]
        assert offload.lookup(chain("p", 8), num_tokens=127).tokens == 64
        others = [(0, [*range(25, 29)]), (0, [29, 30, 31, 20]), (0, [21, 23])]
        loaded = await offload.load("b", others, chain("p", 8), num_tokens=64)
        assert loaded.num_tokens == 64
        assert (pages[0][25:29] == before[0][1:5]).all()
        assert (pages[1][[30, 31, 20]] == before[1][12:15]).all()  # the last 39 tokens
        assert (pages[2][23] == before[2][22]).all()
        assert (pages[1][29] == 0xAA).all()
        assert (pages[2][21] == 0xAA).all()
        offload.evict()
        await offload.store("c", [(0, ids[0]), (0, [None] * 5 + ids[1][5:]), (0, ids[2])], chain("q", 8))
        assert [offload.lookup(chain("q", n)).tokens for n in (8, 4)] == [128, 0]
        loaded = await offload.load(
            "d", [(64, [5, 6, 7, 8]), (0, [1] * 0), (0, [None] * 3 + [9])], chain("q", 8), num_tokens=128
        )
        assert loaded.num_tokens == 128


async def test_a_stage_without_layers_of_a_group_keeps_nothing_of_it() -> None:
    whole = hybrid()
    views = tuple(view for view in whole.views if view.group != 1)
    rank = Rank(msgspec.structs.replace(whole, views=views, pp_size=2), host_bytes=64 * 4096, disk=SimDisk(64 * 4096))
    pages = [array.reshape(BLOCKS, -1) for array in rank.arrays]
    async with rank.running() as offload:
        before = [page.copy() for page in pages]
        groups = [(0, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (0, [9, 10])]
        assert (await offload.store("a", groups, chain("p", 4))).num_blocks == 6
        assert offload.lookup(chain("p", 4)).tokens == 64
        others = [(0, [21, 22, 23, 24]), (0, [25, 26, 27, 28]), (0, [29, 30])]
        assert (await offload.load("b", others, chain("p", 4), num_tokens=64)).num_tokens == 64
        assert (pages[0][21:25] == before[0][1:5]).all()
        assert (pages[2][30] == before[2][10]).all()
        assert (pages[1] == before[1]).all()


async def test_a_hybrid_models_blocks_are_lent_and_pulled() -> None:
    rank = Rank(hybrid(), host_bytes=64 * 4096, network_=EngineConfig(engine_id="worker-host"))
    decode = Rank(hybrid(), seed=50, network=rank.network, engine={"engine_id": "decode"})
    pages, there = ([array.reshape(BLOCKS, -1) for array in each.arrays] for each in (rank, decode))
    async with rank.running() as offload, decode.engine:
        await offload.store("a", [(0, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (0, [None, 10])], chain("p", 4))
        params = await offload.lend("a", chain("p", 4), num_tokens=64)
        await decode.engine.pull("d", [(0, [21, 22, 23, 24]), (0, [None, 26, 27, 28]), (0, [None, 30])], params)
        assert (there[0][21:25] == pages[0][1:5]).all()
        assert (there[1][26:29] == pages[1][6:9]).all()
        assert (there[2][30] == pages[2][10]).all()
        await until(lambda: not offload.statistics().gauges["pins"])


async def test_several_groups_share_a_disk_and_come_back() -> None:
    disk = SimDisk(64 * 4096)
    rank = Rank(hybrid(), host_bytes=64 * 4096, disk=disk)
    pages = [array.reshape(BLOCKS, -1) for array in rank.arrays]
    async with rank.running() as offload:
        before = [page.copy() for page in pages]
        groups = [(0, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (0, [9, 10])]
        await offload.store("a", groups, chain("p", 4))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 10)
    again = Rank(hybrid(), host_bytes=64 * 4096, disk=disk, seed=77)
    pages = [array.reshape(BLOCKS, -1) for array in again.arrays]
    async with again.running() as offload:
        groups = [(0, [21, 22, 23, 24]), (0, [25, 26, 27, 28]), (0, [29, 30])]
        assert (await offload.load("a", groups, chain("p", 4), num_tokens=64)).num_tokens == 64
        assert (pages[0][21:25] == before[0][1:5]).all()
        assert (pages[1][26:29] == before[1][6:9]).all()
        assert (pages[2][30] == before[2][10]).all()


# -- other geometries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("kv", "block", "token", "head", "dim"), ("block", "kv", "head", "token", "dim")])
@pytest.mark.parametrize("size", [16, 32, 64])
async def test_what_two_ranks_stored_is_loaded_by_one(size: int, order: tuple[str, ...]) -> None:
    disks = [SimDisk(64 * RECORD), SimDisk(64 * RECORD)]
    whole = Rank(layout_of(), seed=3)  # what the two ranks have, each its heads of it
    heads = [array.reshape(2, BLOCKS, SIZE, 4, 16) for array in whole.arrays]
    for tp_rank, disk in enumerate(disks):
        rank = Rank(layout_of(tp_rank, 2), disk=disk, policy="lru")
        for array, of in zip(rank.arrays, heads, strict=True):
            array.reshape(2, BLOCKS, SIZE, 2, 16)[:] = of[:, :, :, 2 * tp_rank : 2 * tp_rank + 2]
        async with rank.running() as offload:
            await offload.store("a", [(0, list(range(1, 9)))], chain("p", 8))
            await until(lambda: offload.statistics().counters["blocks.write_back"] == 8)
    one = Rank(layout_of(num_blocks=16, block_size=size, order=order), seed=4, left=disks, host_bytes=1 << 20)
    count = 128 // size
    async with one.running() as offload:
        found = offload.lookup(chain("p", 9))
        assert (found.tokens, found.ready_tokens) == (128, 0)
        blocks = list(range(15, 15 - count, -1))
        loaded = await offload.load("b", [(0, blocks)], chain("p", 9), num_tokens=128)
        assert loaded.num_tokens == 128
        for array, of in zip(one.arrays, heads, strict=True):
            sizes = {"kv": 2, "block": 16, "token": size, "head": 4, "dim": 16}
            placed = array.reshape([sizes[name] for name in order])
            placed = placed.transpose([order.index(name) for name in ("block", "kv", "token", "head", "dim")])
            got = placed[blocks].transpose(1, 0, 2, 3, 4).reshape(2, 8, SIZE, 4, 16)
            assert (got == of[:, 1:9]).all()
        await offload.store("b", [(0, blocks)], chain("p", 8))  # from now on it is this rank's own
        assert offload.lookup(chain("p", 9)).ready_tokens == 128
    disks[1].rot(record.key for record, _ in disks[1].records.values() if record.key.endswith(b"p-5"))
    two = Rank(layout_of(num_blocks=16, block_size=size, order=order), seed=4, left=disks, host_bytes=1 << 20)
    async with two.running() as offload:
        loaded = await offload.load("b", [(0, blocks)], chain("p", 8), num_tokens=128)
        assert loaded.num_tokens <= 5 * SIZE // size * size
        assert offload.lookup(chain("p", 9)).tokens == 5 * SIZE // size * size


async def test_larger_blocks_of_others_are_written_only_where_it_was_wanted() -> None:
    """A window of 40 tokens ends in the middle of a block of 64: its other tokens are not the load's to write."""

    def windowed(block_size: int) -> Layout:
        layout = layout_of(block_size=block_size)
        (group,) = layout.groups
        return msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, window=40),))

    disk = SimDisk(64 * RECORD)
    async with Rank(windowed(64), disk=disk, hash_tokens=16, host_bytes=64 * RECORD).running() as offload:
        await offload.store("a", [(0, [1, 2])], chain("p", 8))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 2)
    rank = Rank(windowed(16), seed=4, left=[disk], host_bytes=1 << 20)
    before = [rank.block(i) for i in range(BLOCKS)]
    async with rank.running() as offload:
        assert (await offload.load("b", [(0, list(range(10, 18)))], chain("p", 8), num_tokens=128)).num_tokens == 128
        assert [i for i in range(BLOCKS) if rank.block(i) != before[i]] == [15, 16, 17]


async def test_what_does_not_fit_is_left_alone() -> None:
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(0, 2), disk=disk) as (_, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 1)
    one = Rank(layout_of(), left=[disk])  # the other rank's heads are missing
    async with one.running() as offload:
        assert offload.lookup(chain("p", 1)).tokens == 0
        assert (await offload.store("a", [(0, [1])], chain("p", 1))).num_new == 1


# -- room ------------------------------------------------------------------------------------------------------


async def test_what_is_pinned_is_not_given_up() -> None:
    async with offloading(layout_of(), host_bytes=4 * RECORD, policy="lru") as (rank, offload):
        before = rank.block(1, 2)
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        with offload.pin(chain("p", 2)):
            for i in range(8):
                await offload.store("b", [(0, [3])], chain(f"q{i}", 1))
            assert offload.lookup(chain("p", 2)).tokens == 32
            stored = await offload.store("c", [(0, [3, 4, 5])], chain("r", 3))
            assert (stored.num_blocks, stored.num_missed) == (2, 1)
        await offload.load("d", [(0, [8, 9])], chain("p", 2), num_tokens=32)
        assert rank.block(8, 9) == before
        assert offload.evict(chain("p", 2)) == Evicted(2, 0)
        assert offload.lookup(chain("p", 2)).tokens == 0
        assert offload.evict().num_blocks > 0
        assert offload.lookup(chain("r", 3)).tokens == 0


async def test_a_pin_of_a_longer_prompt_keeps_what_a_lookup_of_it_finds() -> None:
    async with offloading(hybrid(), host_bytes=1 << 20) as (_, offload):
        await offload.store("a", [(0, [1, 2, 3, 4]), (0, [5, 6, 7, 8]), (0, [9, 10])], chain("p", 4))
        with offload.pin(chain("p", 12)):
            assert offload.evict().num_pinned == 4 + 3 + 1
            assert offload.lookup(chain("p", 12)).tokens == 64
        assert offload.evict().num_pinned == 0


async def test_stores_that_find_no_room_are_counted_and_told_once(logs: Lines) -> None:
    async with offloading(layout_of(), host_bytes=8 * RECORD) as (rank, offload):
        blocks = [[i, i + 1, i + 2] for i in range(0, 24, 3)]
        told = await asyncio.gather(
            *(offload.store(f"s{i}", [(0, ids)], chain(f"p{i}", 3)) for i, ids in enumerate(blocks))
        )
        assert [(each.num_new, each.num_missed) for each in told] == [(3, 0), (3, 0), (2, 1)] + [(0, 3)] * 5
        counters = offload.statistics().counters
        assert (counters["not_stored.no_room"], counters["store.done"]) == (16, 8)
        rank.clock.advance(61.0)
        with offload.pin(chain("p0", 3)):
            large = await offload.store("large", [(0, list(range(16)))], chain("q", 16))
        assert (large.num_new, large.num_missed) == (5, 11)
        assert offload.lookup(chain("q", 16)).tokens == 5 * SIZE
    first, second = logs.of("offload_failed")
    assert (first["cause"], first["what"], first["blocks"], first["held"]) == ("no_room", "store", 3, 0)
    assert "no room in host memory for 3 of 3 blocks: it keeps 8, of which 8 are being written" in first["detail"]
    assert (second["request_id"], second["blocks"], second["not_logged"]) == ("large", 11, 5)
    assert (
        "5 are being written and 3 are pinned, lent or being copied; store less at a time, or raise host_bytes"
        in second["detail"]
    )


async def test_a_prompt_that_is_larger_than_host_memory_is_found_as_far_as_it_fits() -> None:
    async with offloading(hybrid(), host_bytes=40 * RECORD) as (_, offload):
        blocks = [(0, list(range(count))) for count in (32, 32, 16)]
        stored = await offload.store("a", blocks, chain("p", 32))
        assert stored.num_missed > 0
        found = offload.lookup(chain("p", 32)).tokens
        assert found >= 6 * 2 * SIZE
        assert stored.num_blocks == found // SIZE * 2 + found // (2 * SIZE), "something is kept that is of no use"
        loaded = await offload.load("b", blocks, chain("p", 32), num_tokens=found)
        assert loaded.num_tokens == found


async def test_what_is_pinned_is_not_evicted() -> None:
    disk = SimDisk(64 * RECORD)
    async with offloading(layout_of(), disk=disk, policy="lru") as (rank, offload):
        before = rank.block(1, 2, 3)
        await offload.store("a", [(0, [1, 2, 3])], chain("p", 3))
        await offload.store("b", [(0, [4])], chain("q", 1))
        await until(lambda: not (now := offload.statistics().gauges)["moves"] and not now["to_write_back"])
        with offload.pin(chain("p", 2)):
            assert offload.evict(chain("p", 3)) == Evicted(4, 2)  # in host memory and in files, but for what is pinned
            assert offload.lookup(chain("p", 3)).tokens == 32
            assert offload.evict() == Evicted(2, 2)
            assert offload.lookup(chain("p", 3)).tokens == 32
            await offload.load("c", [(0, [8, 9])], chain("p", 2), num_tokens=32)
            assert rank.block(8, 9) == before[: 2 * RECORD]
        assert offload.evict() == Evicted(2, 0)
        assert offload.lookup(chain("p", 3)).tokens == 0


async def test_a_place_in_the_files_that_changes_hands_keeps_its_new_block() -> None:
    disk = SimDisk(8 * RECORD)
    async with offloading(layout_of(), host_bytes=8 * RECORD, disk=disk) as (_, offload):
        for i in range(12):
            await offload.store("a", [(0, [1, 2, 3])], chain(f"p{i}", 3))
            await until(lambda: not (now := offload.statistics().gauges)["moves"] and not now["to_write_back"])
        assert offload.statistics().counters["evicted.file"] > 8
        assert len(disk.records) == offload.statistics().gauges["kept.file"] == 8


async def test_what_is_evicted_under_a_load_still_arrives() -> None:
    async with offloading(layout_of(), host_bytes=4 * RECORD) as (rank, offload):
        before = rank.block(1, 2)
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        loading = await rank.begun(offload.load("b", [(0, [8, 9])], chain("p", 2), num_tokens=32))
        assert offload.evict() == Evicted(2, 0)
        others = [asyncio.create_task(offload.store(f"c{i}", [(0, [10 + i])], chain(f"q{i}", 1))) for i in range(4)]
        await asyncio.sleep(0)
        rank.copies.finish()
        assert (await loading).num_tokens == 32
        assert rank.block(8, 9) == before
        rank.copies.deferred = False
        rank.copies.finish()
        await asyncio.gather(*others)


# -- the network -----------------------------------------------------------------------------------------------


async def test_stored_blocks_are_lent_over_the_network_and_pinned_meanwhile() -> None:
    rank = Rank(layout_of(), host_bytes=4 * RECORD, network_=EngineConfig(engine_id="worker-host"), policy="lru")
    decode = Rank(layout_of(block_size=32, num_blocks=8), seed=50, network=rank.network, engine={"engine_id": "decode"})
    async with rank.running() as offload, decode.engine:
        before = rank.block(3, 4, 9, 11)
        await offload.store("a", [(0, [3, 4, 9, 11])], chain("p", 4))
        params = await offload.lend("a", chain("p", 4), num_tokens=64)
        assert (await offload.store("b", [(0, [1])], chain("q", 1))).num_missed == 1  # all is pinned
        result = await decode.engine.pull("d", [(0, [5, 2])], params, hashes=chain("p", 4))
        assert result.num_tokens == 64
        assert sorted(decode.block(5, 2)) == sorted(before)  # of 32 tokens each, so in another order
        await until(lambda: not offload.statistics().gauges["pins"])
        assert (await offload.store("b", [(0, [1])], chain("q", 1))).num_missed == 0
        with pytest.raises(LocalProtocolError, match="not all of its 16 tokens are kept"):
            await offload.lend("c", chain("unknown", 1), num_tokens=SIZE)
        await decode.engine.aclose()


async def test_what_is_in_files_alone_is_lent_as_well() -> None:
    disk = SimDisk(64 * RECORD)
    rank = Rank(layout_of(), disk=disk, network_=EngineConfig(engine_id="worker-host"), policy="lru")
    decode = Rank(layout_of(), seed=50, network=rank.network, engine={"engine_id": "decode"})
    async with rank.running() as offload, decode.engine:
        before = rank.block(1, 2)
        await store_in_files(rank, offload, [1, 2])
        assert offload.lookup(chain("p", 2)).ready_tokens == 0
        params = await offload.lend("a", chain("p", 2), num_tokens=32)
        await decode.engine.pull("d", [(0, [8, 9])], params)
        assert decode.block(8, 9) == before
        await until(lambda: not offload.statistics().gauges["pins"])


async def test_as_many_are_lent_at_once_as_there_is_room_for_and_the_others_are_told() -> None:
    rank = Rank(
        layout_of(),
        disk=SimDisk(64 * RECORD),
        network_=EngineConfig(engine_id="worker-host"),
        host_bytes=8 * RECORD,
        max_bytes=RECORD,  # so that they get their blocks in turns
        policy="lru",
    )
    decode = Rank(layout_of(), seed=50, network=rank.network, engine={"engine_id": "decode"})
    async with rank.running() as offload, decode.engine:
        before = {}
        for i in range(6):
            before[i] = rank.block(i, i + 6, i + 12)
            await offload.store(f"s{i}", [(0, [i, i + 6, i + 12])], chain(f"p{i}", 3))
            await until(lambda: not (now := offload.statistics().gauges)["moves"] and not now["to_write_back"])
        offload._catalogue.evict(place=Place.HOST)
        ways = [offload.lend(f"r{i}", chain(f"p{i}", 3), num_tokens=48) for i in range(6)]
        told = await asyncio.gather(*ways, return_exceptions=True)
        lent = [each for each in told if isinstance(each, dict)]
        refused = [each for each in told if isinstance(each, Overloaded)]
        assert [type(each) for each in told] == [dict, dict] + [Overloaded] * 4
        for each in refused:
            assert re.search(r"48 tokens cannot be brought .*[6-8] of [6-8] blocks are held by [23] pins", str(each))
            assert each.is_retryable
        for i in range(2):
            await decode.engine.pull(f"d{i}", [(0, [8, 9, 10])], lent[i])
            assert decode.block(8, 9, 10) == before[i]
        await until(lambda: not offload.statistics().gauges["pins"])
        params = await offload.lend("r5", chain("p5", 3), num_tokens=48)
        assert offload.statistics().counters["lent"] == 3
        await decode.engine.pull("d5", [(0, [8, 9, 10])], params)
        assert decode.block(8, 9, 10) == before[5]
        await until(lambda: not offload.statistics().gauges["pins"])


async def test_a_lend_that_is_cancelled_leaves_no_pin() -> None:
    network = EngineConfig(engine_id="worker-host")
    rank = Rank(layout_of(), disk=SimDisk(64 * RECORD), network_=network, policy="lru", max_bytes=RECORD)
    async with rank.running() as offload:
        await store_in_files(rank, offload, [1, 2, 3])
        for turns in range(40):
            lending = asyncio.create_task(offload.lend("a", chain("p", 3), num_tokens=48))
            await turn_loop(turns)
            if lending.done():
                break
            await cancel(lending)
            await until(lambda: not offload.statistics().gauges["jobs"])
            assert not offload.statistics().gauges["pins"]
            offload._catalogue.evict(place=Place.HOST)
        assert turns > 5
        assert await lending


async def test_what_is_given_up_while_it_is_brought_says_so_to_whoever_lends_it() -> None:
    network = EngineConfig(engine_id="worker-host")
    rank = Rank(layout_of(), disk=SimDisk(64 * RECORD), network_=network, policy="lru", max_bytes=RECORD)
    async with rank.running() as offload:
        await store_in_files(rank, offload, [1, 2, 3])
        lending = asyncio.create_task(offload.lend("a", chain("p", 3), num_tokens=48))
        await until(lambda: offload.statistics().gauges["jobs"])
        assert offload.cancel("a")
        with pytest.raises(PullCancelled):
            await lending
        assert not offload.statistics().gauges["pins"]
        assert not offload.statistics().counters["lent"]


# -- ends ------------------------------------------------------------------------------------------------------


async def test_an_offload_that_has_started_has_all_of_its_memory() -> None:
    """Else a lack of memory would be found out by a signal, and copies would wait for pages."""
    async with offloading(layout_of(), host_bytes=8 << 20) as (_, offload):
        pool = offload._own.memory
        assert pool is not None
        pages = (ctypes.c_ubyte * (pool.memory.length // mmap.PAGESIZE))()
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(pool.memory.base), ctypes.c_size_t(pool.memory.length), pages)
            == 0
        )
        assert all(page & 1 for page in pages)


async def test_an_engine_that_closes_closes_its_offload_first() -> None:
    rank = Rank(layout_of())
    async with rank.engine, rank.offload as offload:
        await offload.store("a", [(0, [1])], chain("p", 1))
        loading = await rank.begun(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE))
        closing = asyncio.create_task(rank.engine.aclose())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing.done()
        rank.copies.finish()
        with pytest.raises(PullCancelled):
            await loading
        await closing
        assert not rank.copies.is_open
        with pytest.raises(EngineClosed):
            await offload.store("c", [(0, [1])], chain("q", 1))


async def test_closing_does_not_wait_for_ever() -> None:
    rank = Rank(layout_of())
    async with rank.engine:
        await rank.offload.start()
        storing = await rank.begun(rank.offload.store("a", [(0, [1])], chain("p", 1)))
        (left,) = await passing(rank, asyncio.create_task(rank.offload.aclose(5.0)))
        assert (left.request_id, left.reason) == ("a", "storing")
        with pytest.raises((EngineClosed, PullCancelled)):
            await storing
        assert not rank.engine.holds()


async def test_a_start_that_fails_leaves_nothing_behind() -> None:
    rank = Rank(layout_of())
    async with rank.engine:
        rank.copies.start = None  # type: ignore[assignment, method-assign]
        with pytest.raises(TypeError):
            await rank.offload.start()
        assert rank.engine._driver.guests == []
        with pytest.raises(EngineClosed):
            await rank.offload.store("a", [(0, [1])], chain("p", 1))
        async with Offload(rank.offload.config, rank.engine, copies=SimCopies()) as offload:
            assert (await offload.store("a", [(0, [1])], chain("p", 1))).num_new == 1


@contextlib.contextmanager
def hanging(rank: Rank) -> Iterator[threading.Event]:
    """A disk that does not answer before it is told to."""
    go, begin = threading.Event(), rank.records.start

    def hang(*args: Any) -> Any:
        assert go.wait(30.0), "the loop waits for the files"
        return begin(*args)

    rank.records.start = hang  # type: ignore[assignment, method-assign]
    try:
        yield go
    finally:
        go.set()


async def test_the_loop_goes_on_while_files_are_opened() -> None:
    rank = Rank(layout_of(), disk=SimDisk(64 * RECORD))
    async with rank.engine:
        with hanging(rank) as go:
            starting = asyncio.create_task(rank.offload.start())
            await asyncio.sleep(0)
            closing = asyncio.create_task(rank.offload.aclose())  # nor are they closed while they are opened
            await asyncio.sleep(0)
            assert not closing.done()
            for call in (rank.offload.touch, rank.offload.pin, rank.offload.evict):
                with pytest.raises(EngineClosed, match="until its `start` has returned"):
                    call(chain("p", 1))
            go.set()
            with pytest.raises(EngineClosed):
                await starting
            await closing
        assert not rank.records.is_open


def stuck() -> None:
    raise BackendError("a thread is inside")


async def test_closing_has_one_time_for_all_of_it_and_a_second_attempt_tells_its_end(
    logs: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloading(layout_of(), disk=SimDisk(64 * RECORD)) as (rank, offload):
        await offload.store("a", [(0, [1])], chain("p", 1))
        rank.copies.deferred, given = True, list[float]()
        loading = await rank.begun(offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE))

        async def quiesce(timeout_s: float) -> None:
            given.append(round(timeout_s, 3))

        for plane in (rank.copies, rank.records):
            monkeypatch.setattr(plane, "quiesce", quiesce)
        with monkeypatch.context() as inside:
            inside.setattr(rank.copies, "close", stuck)
            closing = asyncio.create_task(offload.aclose(5.0))
            await until(lambda: offload._mover.cause)
            rank.clock.advance(3.0)
            rank.copies.finish()
            with pytest.raises(BackendError, match="inside"):
                await closing
            with pytest.raises(PullCancelled):
                await loading
        await offload.aclose(5.0)
        assert given == [2.0, 5.0, 5.0]
    assert logs.one("offload_stopped")


async def test_an_engine_that_is_closed_again_waits_for_its_offload_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(layout_of())
    async with rank.running():
        for _ in range(2):
            with monkeypatch.context() as inside:
                inside.setattr(rank.copies, "close", stuck)
                with pytest.raises(BackendError, match="inside"):
                    await rank.engine.aclose()
            assert rank.copies.is_open
        await rank.engine.aclose()
        assert not rank.copies.is_open


@pytest.mark.parametrize("way", ["cancelled", "closed", "engine closed"])
async def test_a_start_on_a_disk_that_hangs_is_given_up_in_time(way: str, logs: Lines) -> None:
    rank = Rank(layout_of(), disk=SimDisk(64 * RECORD))
    async with rank.engine:
        with hanging(rank) as go:
            starting = asyncio.create_task(rank.offload.start())
            await asyncio.sleep(0)
            if way == "cancelled":
                starting.cancel()
            else:
                closing = asyncio.create_task((rank.offload if way == "closed" else rank.engine).aclose(2.0))
            began = rank.clock.now()
            await pass_until(rank, starting.done, 0.01)
            assert rank.clock.now() - began < (1.1 if way == "cancelled" else 2.1)
            if way == "cancelled":
                assert starting.cancelled()
            else:
                assert "'simulated'" in str(starting.exception())
            if way == "closed":
                with pytest.raises(BackendError, match=r"files in 'simulated'.* close again to wait again"):
                    await closing
            if way == "engine closed":
                await until(closing.done)
                assert closing.result() == ()
            assert rank.engine._driver.guests == []
            assert not rank.records.is_open
            go.set()
            await until(lambda: rank.offload._tiers._tidying)
            await until(lambda: rank.offload._tiers._tidying.done())  # type: ignore[union-attr]
            assert not rank.records.is_open
            assert rank.offload._own.memory is None
        if way != "engine closed":
            await rank.offload.aclose(2.0)
    assert logs.one("offload_broken")


async def test_an_offload_that_starts_while_its_engine_ends_does_not_start() -> None:
    rank = Rank(layout_of())
    await rank.engine.start()
    starting = asyncio.create_task(rank.offload.start())
    await asyncio.sleep(0)
    await rank.engine.aclose()
    with pytest.raises(EngineClosed, match="ended while its offload started"):
        await starting
    assert not rank.copies.is_open


async def test_what_was_kept_survives_a_sleep_of_the_engine() -> None:
    async with offloading(layout_of()) as (rank, offload):
        before = rank.block(1, 2)
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        await rank.engine.suspend()
        assert not rank.copies.is_open
        with pytest.raises(EngineClosed, match="suspended"):
            await offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32)
        assert (offload.lookup(chain("p", 2)).tokens, offload.would_wait(chain("p", 2))) == (0, False)
        rank.scribble(range(32))
        await rank.engine.resume()
        assert (await offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32)).num_tokens == 32
        assert rank.block(5, 6) == before
        await offload.aclose()
        assert offload.lookup(chain("p", 2)).tokens == 0


async def test_nothing_is_found_where_nothing_can_be_loaded_any_more() -> None:
    async with offloading(layout_of()) as (rank, offload):
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        await rank.engine.suspend()
        other = Rank(layout_of(head_dim=16))
        await rank.engine.resume(other.engine.registration)
        assert offload.lookup(chain("p", 2)).tokens == 0
        with pytest.raises(EngineClosed, match="another form"):
            await offload.load("b", [(0, [5, 6])], chain("p", 2), num_tokens=32)


# -- what is refused -------------------------------------------------------------------------------------------


async def test_what_makes_no_sense_is_refused_with_nothing_changed() -> None:
    rank = Rank(layout_of())
    with pytest.raises(EngineClosed, match="not started"):
        await rank.offload.store("a", [(0, [1])], chain("p", 1))
    async with rank.running() as offload:
        with pytest.raises(PlanRefused, match="block id 99"):
            await offload.store("a", [(0, [99])], chain("p", 1))
        with pytest.raises(LocalProtocolError, match="num_tokens is 17"):
            await offload.load("a", [(0, [1, 2])], chain("p", 2), num_tokens=17)
        with pytest.raises(PlanRefused, match="begin at token 0"):
            await offload.load("a", [(5, [1])], chain("p", 1), num_tokens=SIZE)
        with pytest.raises(LocalProtocolError, match="hashes"):
            offload.lookup("abc")
        with pytest.raises(LocalProtocolError, match="request_id is None"):
            offload.cancel(None)  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as pool:
            remedy = r"with a coroutine that returns offload\.lookup\(\.\.\.\), and loop"
            with pytest.raises(WrongThread, match=rf"offload\.lookup was called .*{remedy}"):
                pool.submit(offload.lookup, chain("p", 1)).result()
        with pytest.raises(LocalProtocolError, match="has an offload already"):
            await Offload(offload.config, rank.engine).start()
        assert not rank.engine.holds()
        assert not offload.statistics().gauges["jobs"]


def test_sizes_that_do_not_align_are_refused_with_those_that_would() -> None:
    with pytest.raises(ConfigError, match=r"blocks of 24 tokens, but hashes cover 16.*24, 12, 8, 6.*enable"):
        Rank(layout_of(block_size=24))


def test_a_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match="give both, or neither"):
        OffloadConfig(model="m", hash_tokens=16, host_bytes=1 << 20, directory="/x")
    for directory in ("/x\0y", b"/x", 7):
        with pytest.raises(ConfigError, match=r"offload\.directory is .*; give a path"):
            OffloadConfig(model="m", hash_tokens=16, host_bytes=1, directory=directory, file_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="host_bytes is 1000, which cannot hold records of 4096 bytes; give 4096 or m"
    ):
        Rank(layout_of(), host_bytes=1000)
    with pytest.raises(ConfigError, match="it must be an OffloadConfig"):
        Offload({}, Rank(layout_of()).engine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="file_bytes is 1000, which"):
        Rank(layout_of(), disk=SimDisk(1000))
    with pytest.raises(ConfigError, match=r"network\.engine_id is 'worker', .* such as 'worker-host'"):
        Rank(layout_of(), network_=EngineConfig(engine_id="worker"))
    with pytest.raises(ConfigError, match="policy"):
        OffloadConfig(model="m", hash_tokens=16, host_bytes=1 << 20, policy="mru")  # type: ignore[arg-type]
    assert (Stored("a", 1, 1, 0, 2, 0.1).num_new, Loaded("a", 1, 1, 2, 0, 0.1).num_tokens) == (1, 1)


async def test_text_is_its_utf_8_bytes_and_hex_of_bytes_is_another_hash() -> None:
    async with offloading(layout_of()) as (_, offload):
        await offload.store("a", [(0, [1])], ["ab12"])
        assert offload.lookup([b"ab12"]).tokens == SIZE
        assert offload.lookup([bytes.fromhex("ab12")]).tokens == 0


async def test_of_a_window_only_what_the_next_token_needs_is_filled() -> None:
    rank = Rank(hybrid(), host_bytes=1 << 20)
    hashes = chain("p", 6)
    async with rank.running() as offload:
        await offload.store("a", [(0, [1, 2, 3, 4, 5, 6]), (0, [1, 2, 3, 4, 5, 6]), (0, [1, 2, 3])], hashes)
        blocks = [rank.arrays[1].reshape(BLOCKS, -1)[i].tobytes() for i in range(BLOCKS)]
        every = [(0, [7, 8, 9, 10, 11, 12, 13]), (0, [7, 8, 9, 10, 11, 12, 13]), (0, [7, 8, 9])]
        loaded = await offload.load("b", every, hashes, num_tokens=96)
        assert loaded.num_tokens == 96
        changed = {i for i in range(BLOCKS) if rank.arrays[1].reshape(BLOCKS, -1)[i].tobytes() != blocks[i]}
        assert changed == {10, 11, 12}  # a window of 40 tokens: those before are nobody's to read, and 13 is beyond
        nothing = await offload.load("c", [(0, [None] * 6), (0, [None] * 6), (0, [None] * 3)], hashes, num_tokens=96)
        assert (nothing.num_tokens, nothing.num_blocks) == (96, 0)
