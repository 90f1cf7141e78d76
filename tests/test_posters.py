"""Posting threads on real NIXL: bytes, order, batches; what they do when something breaks, and how they end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asynckv import Engine, PullError, PullResult
from asynckv.config import LeaseConfig, NixlConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.pace import Pace
from asynckv.core.types import TransferId
from asynckv.edges.nic import nixl, posters
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.posters import Poster
from asynckv.engine import ending
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory
from asynckv.geometry.tables import DescTable
from asynckv.ports import AgentInfo
from tests.commands import python
from tests.engines import Bench, until
from tests.test_nixl_edge import (
    ALL_BULK,
    HERE,
    SIZE,
    TABLES,
    Bytes,
    Indices,
    Meddler,
    Side,
    check_reads,
    contents,
    copied,
    link,
    pairs,
    request,
)

pytestmark = pytest.mark.nixl


@pytest.fixture
def collected() -> Iterator[None]:
    """No collection by itself: what only it would end is seen to live."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Gate:
    """Holds posting threads just before a post, as a long copy would, and notes the transfers that are posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.posted: list[TransferId] = []
        post = Agent.post

        def held(agent: Agent, transfer_id: TransferId, *args: Any) -> TransferEnded | None:
            if threading.current_thread() is not threading.main_thread():
                self.entered.set()
                assert self.leave.wait(10)
                self.posted.append(transfer_id)
            return post(agent, transfer_id, *args)

        monkeypatch.setattr(Agent, "post", held)


def while_the_loop_stands(condition: Callable[[], object]) -> None:
    """Wait for what threads do, while nobody turns the owner's agent: no connection is made, so nothing ends."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def poster_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "-poster" in t.name]


@pytest.mark.parametrize("threads", [1, 2])
async def test_bulk_is_read_exactly_and_never_posted_on_the_loop(sides: list[Side], threads: int) -> None:
    reader, owner = await link(sides, NixlConfig(posting_threads=threads, bulk_bytes=1))
    for _ in range(3):
        await check_reads(reader, "owner", owner.arrays)
    found = reader.plane.statistics()
    assert found["posts"] == found["posts_handed"] == 3 * len(TABLES)
    assert sum(found[f"poster{i + 1}.posts"] for i in range(threads)) == found["posts"]
    assert found["posting_threads"] == threads
    assert found["running"] == found["in_doubt"] == found["unreleased"] == 0
    assert len(poster_threads()) == threads
    assert reader.plane.describe()["posting_threads"].startswith(f"{threads}, each with an agent of its own")


async def test_small_reads_stay_on_the_loop(sides: list[Side]) -> None:
    # The first row of the first table has descriptors of 512 bytes, that of the second 256.
    reader, owner = await link(sides, NixlConfig(posting_threads=1, bulk_bytes=512 * 4, bulk_descriptors=6))
    rows = np.arange(8, dtype=np.int32)
    for table, count, handed in ((0, 3, 0), (0, 4, 1), (1, 5, 1), (1, 6, 2)):
        reader.read(count, "owner", TABLES[table], rows[:count], rows[:count])
        (ended,) = await reader.heard(1)
        assert ended.ending is Ending.DONE
        assert reader.plane.statistics()["posts_handed"] == handed
    want = contents(1)
    for t, count in ((TABLES[0], 4), (TABLES[1], 6)):
        copied(want, owner.arrays, t, rows[:count], rows[:count])
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))


async def test_a_read_of_a_quarter_is_bulk_beside_others(sides: list[Side]) -> None:
    reader, _ = await link(sides, NixlConfig(posting_threads=1, bulk_bytes=512 * 4))
    one = np.zeros(1, np.int32)
    while not reader.plane._posts_copy:
        reader.read(0, "owner", TABLES[0], one, one)
        await reader.heard(1)
    # The third is handed over because the second is, the fourth is smaller, and the fifth is alone again.
    for number, table, handed in ((1, 0, 0), (2, 0, 1), (3, 0, 2), (4, 1, 2), (5, 0, 2), (6, 0, 3)):
        if number == 5:
            await reader.heard(4)
        reader.plane._posts_copy = True  # on a busy host UCX may finish a copy after the post
        reader.read(number, "owner", TABLES[table], one, one)
        assert reader.plane.statistics()["posts_handed"] == handed
    assert {ended.ending for ended in await reader.heard(2)} == {Ending.DONE}


async def test_many_ends_wake_the_loop_once(sides: list[Side]) -> None:
    reader, owner = await link(sides)
    await check_reads(reader, "owner", owner.arrays)
    owner.plane.watch(False)
    calls, posted = reader.calls, reader.plane.statistics()["poster1.posts"]
    one = np.zeros(1, np.int32)
    for number in range(300):
        reader.read(100 + number, "owner", TABLES[1], one, one)
    # The loop must not turn, so that it hears of everything at once.
    while_the_loop_stands(lambda: reader.plane.statistics()["poster1.posts"] == posted + 300)
    news = await reader.heard(300)
    assert {e.ending for e in news} == {Ending.DONE}
    assert reader.calls - calls < 10


async def test_what_is_too_much_for_a_thread_is_posted_on_the_loop(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posters, "MAX_QUEUED", 2)
    reader, owner = await link(sides)
    await check_reads(reader, "owner", owner.arrays)
    handed = reader.plane.statistics()["posts_handed"]
    gate = Gate(monkeypatch)
    one = np.zeros(1, np.int32)
    reader.read(30, "owner", TABLES[1], one, one)
    await until(gate.entered.is_set)
    for number in (31, 32, 33):
        reader.read(number, "owner", TABLES[1], one, one)
    assert [e.transfer_id for e in await reader.heard(1)] == [33]
    assert reader.plane.statistics()["running"] == 3
    gate.leave.set()
    assert [e.transfer_id for e in await reader.heard(3)] == [30, 31, 32]
    assert reader.plane.statistics()["posts_handed"] == handed + 3


# -- joined reads ----------------------------------------------------------------------------------


async def held_read(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, *, connected: bool = True
) -> tuple[Side, Side, Gate]:
    """Start read 1, and hold its thread before it is posted, so that later reads wait behind one another."""
    reader, owner = await link(sides)
    if connected:
        await check_reads(reader, "owner", owner.arrays)
    gate = Gate(monkeypatch)
    one = np.zeros(1, np.int32)
    reader.read(1, "owner", TABLES[1], one, one)
    await until(gate.entered.is_set)
    return reader, owner, gate


def fourth(t: DescTable, number: int) -> tuple[Indices, Indices]:
    """A fourth of the pairs of a table; those of four consecutive numbers have no descriptor in common."""
    local, remote = pairs(t, 3)
    return local[number % 4 :: 4], remote[number % 4 :: 4]


async def test_reads_that_wait_for_one_table_become_one_transfer(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner, gate = await held_read(sides, monkeypatch)
    want = [a.copy() for a in reader.arrays]
    copied(want, owner.arrays, TABLES[1], np.zeros(1, np.int32), np.zeros(1, np.int32))
    for number, which in ((2, 1), (3, 1), (4, 1), (5, 0), (6, 0), (7, 1)):
        reader.read(number, "owner", TABLES[which], *fourth(TABLES[which], number))
        copied(want, owner.arrays, TABLES[which], *fourth(TABLES[which], number))
    before = reader.plane.statistics()
    gate.leave.set()
    news = await reader.heard(7)
    assert sorted(news) == [TransferEnded(TransferId(n), Ending.DONE) for n in range(1, 8)]
    assert gate.posted == [1, 2, 5, 7]
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))
    found = reader.plane.statistics()
    assert found["poster1.joined"] == 3
    # The first was counted when it was taken.
    assert found["poster1.posts"] - before["poster1.posts"] == 6
    assert found["running"] == found["poster1.backlog_bytes"] == 0


async def test_what_is_off_joins_nothing(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, owner, gate = await held_read(sides, monkeypatch)
    (poster,) = reader.plane._posters
    want = [a.copy() for a in reader.arrays]
    copied(want, owner.arrays, TABLES[1], np.zeros(1, np.int32), np.zeros(1, np.int32))
    for number, goes_off in ((2, True), (3, False), (4, True), (5, False)):
        read = request(TABLES[1], *fourth(TABLES[1], number))
        poster.post(TransferId(number), "owner", read, gate.leave.is_set if goes_off else lambda: False)
        if not goes_off:
            copied(want, owner.arrays, TABLES[1], read.local, read.remote)
    gate.leave.set()
    news = {ended.transfer_id: (ended.ending, ended.cause) for ended in await reader.heard(5)}
    off, done = (Ending.FAILED, "cancelled"), (Ending.DONE, "")
    assert news == {1: done, 2: off, 3: done, 4: off, 5: done}
    assert gate.posted == [1, 3]
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))
    assert poster.backlog == 0


@pytest.mark.parametrize(("bound", "most"), [("JOIN_BYTES", 256 * 8), ("JOIN_PIECES", 8), ("JOIN_PIECES", 11)])
async def test_a_joined_transfer_has_a_limited_size(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(posters, bound, most)
    reader, _, gate = await held_read(sides, monkeypatch)
    for number in range(2, 7):
        reader.read(number, "owner", TABLES[1], *fourth(TABLES[1], number))
    # One that is too large by itself is posted alone.
    reader.read(7, "owner", TABLES[1], *pairs(TABLES[1], 3))
    gate.leave.set()
    assert {ended.ending for ended in await reader.heard(7)} == {Ending.DONE}
    assert gate.posted == [1, 2, 4, 6, 7]


async def test_a_wrong_read_does_not_fail_those_that_it_joins(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _, gate = await held_read(sides, monkeypatch)
    for number in (2, 3, 4):
        beyond = np.full(1, HERE + (number == 3) - 1, np.int32)
        reader.read(number, "owner", TABLES[1], beyond, beyond)
    gate.leave.set()
    news = {ended.transfer_id: ended.ending for ended in await reader.heard(4)}
    assert news == {1: Ending.DONE, 2: Ending.DONE, 3: Ending.FAILED, 4: Ending.DONE}
    assert gate.posted == [1, 2, 2, 3, 4]
    assert reader.plane.statistics()["poster1.joined"] == 0


async def test_a_refused_table_refuses_every_read_of_it(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _, gate = await held_read(sides, monkeypatch)
    beyond = replace(TABLES[1], table_id=77, remote=TABLES[1].remote + np.array([0, 1 << 40, 0]))
    for number in (2, 3, 4):
        reader.read(number, "owner", beyond, *fourth(beyond, number))
    gate.leave.set()
    news = {ended.transfer_id: ended.ending for ended in await reader.heard(4)}
    assert news == {1: Ending.DONE} | dict.fromkeys((2, 3, 4), Ending.REFUSED)
    assert gate.posted == [1, 2]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_joined_reads_share_doubt_and_disconnection(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    reader, owner, gate = await held_read(sides, monkeypatch, connected=False)
    (poster,) = reader.plane._posters
    want = [a.copy() for a in reader.arrays]
    copied(want, owner.arrays, TABLES[1], np.zeros(1, np.int32), np.zeros(1, np.int32))
    for number in (2, 3, 4):
        reader.read(number, "owner", TABLES[1], *fourth(TABLES[1], number))
        copied(want, owner.arrays, TABLES[1], *fourth(TABLES[1], number))
    gate.leave.set()
    while_the_loop_stands(lambda: list(poster.agent.running) == [1, 2])

    def trouble(handle: int) -> None:
        raise poster.agent._lost("planted") if is_lost else ZeroDivisionError("planted")

    raw = poster.agent._raw
    poster.agent._raw = Meddler(raw, getXferStatus=trouble)
    while_the_loop_stands(lambda: len(reader.plane._posters.inbox) == 4)
    news = reader.ended()
    ending = Ending.FAILED if is_lost else Ending.IN_DOUBT
    assert {(e.transfer_id, e.ending, e.peer_lost) for e in news} == {(n, ending, is_lost) for n in range(1, 5)}
    found = reader.plane.statistics()
    assert (found["running"], found["in_doubt"], found["poster1.joined"]) == (0, 0 if is_lost else 4, 2)
    assert found["poster1.backlog_bytes"] == 0
    poster.agent._raw = raw
    if not is_lost:
        assert sorted(await reader.heard(4)) == [TransferEnded(TransferId(n), Ending.DONE) for n in range(1, 5)]
        assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))
    assert not poster._joined
    assert not poster._mine
    assert reader.plane.statistics()["in_doubt"] == 0


async def test_after_another_start_threads_serve_again(sides: list[Side]) -> None:
    reader, owner = await link(sides)
    await check_reads(reader, "owner", owner.arrays)
    reader.plane.close()
    assert poster_threads() == []
    reader.plane.begin(reader.memories, reader._poll)
    await reader.plane.add_remote_agent(owner.agent, owner.memories)
    await check_reads(reader, "owner", owner.arrays)
    assert reader.plane.statistics()["poster1.posts"] == len(TABLES)


# -- trouble ---------------------------------------------------------------------------------------


async def test_an_exception_in_a_thread_ends_what_it_had_and_is_reported(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner, gate = await held_read(sides, monkeypatch)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    post = Agent.post

    def break_in_the_second(agent: Agent, transfer_id: TransferId, *args: Any) -> TransferEnded | None:
        ended = post(agent, transfer_id, *args)
        if transfer_id == 2:
            raise ZeroDivisionError("planted")
        return ended

    monkeypatch.setattr(Agent, "post", break_in_the_second)
    for number, t in ((2, TABLES[1]), (3, TABLES[0])):
        reader.read(number, "owner", t, *pairs(t, 5))
    gate.leave.set()
    # What was posted may still be written until the agent is gone; what was not, never.
    doubted = [Ending.IN_DOUBT, Ending.FAILED]
    news = await reader.heard(4)
    if (1, Ending.IN_DOUBT) in [(e.transfer_id, e.ending) for e in news] and len(news) < 5:
        news += await reader.heard(1)
    endings = {number: [e.ending for e in news if e.transfer_id == number] for number in (1, 2, 3)}
    # The first may be done when it is posted, or still under way when the thread breaks.
    assert endings.pop(1) in ([Ending.DONE], doubted)
    assert endings == {2: doubted, 3: [Ending.FAILED]}
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]
    found = reader.plane.statistics()
    assert (found["posters_broken"], found["posting_threads"]) == (1, 0)
    assert found["running"] == found["in_doubt"] == 0
    # The loop does its work from here on.
    monkeypatch.undo()
    await check_reads(reader, "owner", owner.arrays)


class _Unwritable(dict[TransferId, Any]):
    """As memory that is used up: breaks a thread just after NIXL took a read."""

    def __setitem__(self, key: TransferId, value: Any) -> None:
        raise MemoryError("planted")


def break_in_flight(reader: Side, spoil: Callable[[Agent], None]) -> tuple[list[tuple[int, Ending, bool]], Poster]:
    """Break a thread while one of its reads runs; return what it told, and whether its agent was gone by then."""
    (poster,) = reader.plane._posters
    told: list[tuple[int, Ending, bool]] = []
    gone = weakref.finalize(poster.agent._raw, lambda: None)
    tell = poster._tell

    def spy(news: list[TransferEnded]) -> None:
        told.extend((ended.transfer_id, ended.ending, not gone.alive) for ended in news)
        tell(news)

    poster._tell = spy
    local, remote = pairs(TABLES[0], 0)
    reader.read(1, "owner", TABLES[0], local, remote)
    while_the_loop_stands(lambda: poster.agent.running)
    spoil(poster.agent)
    reader.read(2, "owner", TABLES[0], local, remote)
    while_the_loop_stands(lambda: not poster._thread.is_alive())
    return told, poster


def _spoil(agent: Agent) -> None:
    agent.running = _Unwritable(agent.running)


async def test_failed_is_told_only_when_nothing_of_the_agent_is_left(sides: list[Side], collected: None) -> None:
    kept: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: kept.append(context))
    reader, _ = await link(sides)
    told, _ = break_in_flight(reader, _spoil)
    # The exception, and with it its traceback, is kept: it must not keep the agent.
    await until(lambda: kept)
    assert [type(context["exception"]) for context in kept] == [MemoryError]
    doubt, failed = Ending.IN_DOUBT, Ending.FAILED
    assert [(number, ending) for number, ending, _ in told] == [(1, doubt), (2, doubt), (1, failed), (2, failed)]
    assert [is_gone for _, ending, is_gone in told if ending is failed] == [True, True]
    assert kept[0]["exception"].__traceback__ is not None


async def test_what_was_in_doubt_before_a_thread_broke_has_ended_with_its_agent(
    sides: list[Side], collected: None
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    reader, _ = await link(sides)
    (poster,) = reader.plane._posters
    local, remote = pairs(TABLES[0], 0)
    reader.read(1, "owner", TABLES[0], local, remote)
    while_the_loop_stands(lambda: poster.agent.running)
    poster.agent._raw = Meddler(poster.agent._raw, getXferStatus=lambda handle: 1 // 0)
    while_the_loop_stands(lambda: reader.plane._posters.inbox)
    assert [(each.transfer_id, each.ending) for each in reader.ended()] == [(1, Ending.IN_DOUBT)]
    found = reader.plane.statistics()
    assert (found["running"], found["in_doubt"]) == (0, 1)
    _spoil(poster.agent)
    reader.read(2, "owner", TABLES[0], local, remote)
    while_the_loop_stands(lambda: not poster._thread.is_alive())
    told = [(each.transfer_id, each.ending) for each in reader.ended()]
    assert told[-2:] == [(1, Ending.FAILED), (2, Ending.FAILED)]
    found = reader.plane.statistics()
    assert (found["running"], found["in_doubt"]) == (0, 0)


async def test_what_runs_stays_in_doubt_while_somebody_keeps_the_agent(sides: list[Side]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    reader, _ = await link(sides)
    keeping: list[Any] = []

    def spoil(agent: Agent) -> None:
        keeping.append(agent._raw)
        _spoil(agent)

    told, poster = break_in_flight(reader, spoil)
    assert [(number, ending) for number, ending, _ in told] == [(1, Ending.IN_DOUBT), (2, Ending.IN_DOUBT)]
    assert not poster.agent.is_closed
    with pytest.raises(BackendError, match=r"reader-poster1 is still referred to.* may still be written"):
        reader.plane.close()
    with pytest.raises(BackendError, match=r"reader-poster1 of the last start is still inside NIXL"):
        reader.plane.begin(reader.memories, reader._poll)
    keeping.clear()
    reader.plane.close()
    assert poster.agent.is_closed


async def test_the_loops_agent_has_to_be_gone_as_well(sides: list[Side]) -> None:
    reader, _ = await link(sides)
    assert reader.plane._agent is not None
    keeping = [reader.plane._agent._raw]
    with pytest.raises(BackendError, match="agent reader is still referred to"):
        reader.plane.close()
    keeping.clear()
    reader.plane.close()


async def test_a_threads_end_is_the_end_of_its_agent(sides: list[Side]) -> None:
    reader, _ = await link(sides)
    (poster,) = reader.plane._posters
    poster.stop()
    # Nobody has joined it, nor closed the plane.
    await until(lambda: not poster._thread.is_alive())
    assert poster.agent.is_closed


@pytest.mark.parametrize("where", ["loop", "poster", "table"])
async def test_a_refusal_that_is_kept_keeps_no_agent(
    sides: list[Side], where: str, collected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner = await link(sides)
    await check_reads(reader, "owner", owner.arrays)
    assert reader.plane._agent is not None
    (poster,) = reader.plane._posters
    lives = [weakref.finalize(agent._raw, lambda: None) for agent in (reader.plane._agent, poster.agent)]
    load = poster.load

    def halve(agent: AgentInfo, memories: Any) -> Any:
        return load(agent._replace(metadata=agent.metadata[: len(agent.metadata) // 2]), memories)

    if where == "poster":
        monkeypatch.setattr(poster, "load", halve)
    other = Side("other", 3, NixlConfig(posting_threads=0))
    sides.append(other)
    beyond = [Memory(m.base + (1 << 40), m.length) for m in owner.memories]

    if where == "table":
        await reader.plane.add_remote_agent(other.agent, beyond)
        read = request(TABLES[0], *pairs(TABLES[0], 0))
        assert reader.plane.post_read(TransferId(77), "other", read) is None
        (refused,) = await reader.heard(1)
        assert refused.ending is Ending.REFUSED
        with pytest.raises(BackendError) as refusal:
            reader.plane._agent.prepare("other", replace(TABLES[0], table_id=77))
    else:
        agent = other.agent if where == "poster" else AgentInfo("other", b"garbage")
        with pytest.raises(BackendError) as refusal:
            await reader.plane.add_remote_agent(agent, other.memories)
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("the agent was kept until a collection"))
    reader.plane.close()
    monkeypatch.setattr(gc, "collect", collect)
    assert refusal.value.__traceback__ is not None
    assert not any(life.alive for life in lives)


async def test_what_is_ordered_as_a_thread_breaks_is_refused_not_forgotten(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    reader, owner = await link(sides)
    await check_reads(reader, "owner", owner.arrays)
    (poster,) = reader.plane._posters
    obey, is_broken = poster._obey, threading.Event()

    def planted(agent: Agent) -> None:
        if is_broken.is_set():
            raise MemoryError("planted")
        obey(agent)

    class Late(deque[Any]):
        """Breaks the thread between the look whether it lives and the append."""

        def append(self, order: Any) -> None:
            if not is_broken.is_set():
                is_broken.set()
                poster._bell.ring()
                poster._thread.join(0.3)
            super().append(order)

    monkeypatch.setattr(poster, "_obey", planted)
    monkeypatch.setattr(poster, "_orders", Late(poster._orders))
    local, remote = pairs(TABLES[1], 1)
    reader.read(1, "owner", TABLES[1], local, remote)
    assert [(e.transfer_id, e.ending) for e in await reader.heard(1)] == [(1, Ending.FAILED)]
    found = reader.plane.statistics()
    assert (found["running"], found["in_doubt"], found["poster1.backlog_bytes"]) == (0, 0, 0)
    # Nothing piles up before somebody who is gone.
    for number in range(100):
        poster.drop(str(number))
    assert not poster._orders
    with pytest.raises(BackendError, match="reader-poster1 has ended"):
        poster.load(AgentInfo("somebody", b""), ()).result(0)


@pytest.mark.parametrize("look", [1, 2, 3])
async def test_an_order_that_comes_just_after_a_look_is_obeyed_without_another(sides: list[Side], look: int) -> None:
    """The thread looks for the order that woke it, for one after it, and for the last time before it sleeps."""
    sides.append(Side("reader", 1, ALL_BULK))  # without a peer, UCX has no events that would wake it too
    (poster,) = sides[0].plane._posters
    looks, late = itertools.count(1), list[Future[None]]()

    class Looked(deque[Any]):
        def __len__(self) -> int:
            found = super().__len__()
            if threading.current_thread() is poster._thread and next(looks) == look:
                late.append(poster._change(lambda _: None))
            return found

    await until(lambda: poster._is_asleep)
    poster._orders = Looked()
    poster._change(lambda _: None).result(10)
    await until(lambda: late and late[0].done())


async def test_a_thread_does_not_sleep_while_a_read_waits_whose_slot_is_free(sides: list[Side]) -> None:
    """The slot came free after the thread had looked for reads, so that nothing runs and no event wakes the thread."""
    sides.append(Side("reader", 1, ALL_BULK))
    (poster,) = sides[0].plane._posters

    class NoSleep:
        def poll(self, _: float | None) -> list[tuple[int, int]]:
            raise AssertionError("the thread sleeps")

    await until(lambda: poster._is_asleep)
    poster._lines["owner"] = posters._Line(time.monotonic())
    try:
        assert poster._sleep(NoSleep(), poster.agent) is posters._Woken.BY_ORDER  # type: ignore[arg-type]
    finally:
        poster._lines.clear()


@pytest.mark.parametrize("last", [Ending.IN_DOUBT, Ending.DETACHED])
async def test_a_read_that_may_still_write_as_the_thread_breaks_has_failed_when_its_agent_is_gone(
    sides: list[Side], last: Ending
) -> None:
    sides.append(Side("reader", 1, ALL_BULK))
    (poster,), told = sides[0].plane._posters, list[TransferEnded]()

    def broken(_: Agent) -> None:
        poster._mine[TransferId(1)] = 0
        poster._news.append(TransferEnded(TransferId(1), last))  # it was found, and is not told yet
        raise MemoryError("planted")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    poster._tell = told.extend
    change = poster._change(broken)
    await until(lambda: not poster._thread.is_alive())
    with pytest.raises(BackendError, match=r"reader-poster1 ended by MemoryError\('planted'\)"):
        change.result(0)
    assert [ended.ending for ended in told] == [last, Ending.IN_DOUBT, Ending.FAILED]


async def test_news_that_come_while_the_loop_is_told_of_others_are_told_as_well() -> None:
    told: list[list[TransferEnded]] = []
    ends = [TransferEnded(TransferId(number), Ending.DONE) for number in (1, 2)]

    def take() -> None:
        told.append(list(group.inbox))
        group.inbox.clear()
        if len(told) == 1:
            group._hear(ends[1:])  # from a thread, just after the loop has taken what was there

    group = posters.Posters(take, "a thread")
    group._loop = asyncio.get_running_loop()
    group._hear(ends[:1])
    await until(lambda: told == [ends[:1], ends[1:]])


async def test_reads_under_way_are_shared_out_among_threads(sides: list[Side]) -> None:
    reader, _ = await link(sides, NixlConfig(posting_threads=2, bulk_bytes=1))
    local, remote = pairs(TABLES[0], 0)
    for number in range(10):
        reader.read(number, "owner", TABLES[0], local, remote)
        while_the_loop_stands(lambda: sum(len(p.agent.running) for p in reader.plane._posters) > number)  # noqa: B023
    found = reader.plane.statistics()
    assert (found["poster1.posts"], found["poster2.posts"]) == (5, 5)
    assert found["poster1.backlog_bytes"] == found["poster2.backlog_bytes"] > 0


async def test_threads_without_reads_take_turns(sides: list[Side]) -> None:
    reader, owner = await link(sides, NixlConfig(posting_threads=2, bulk_bytes=1))
    for _ in range(4):
        await check_reads(reader, "owner", owner.arrays)
    found = reader.plane.statistics()
    assert found["poster1.posts"] == found["poster2.posts"] == 2 * len(TABLES)
    assert found["poster1.backlog_bytes"] == found["poster2.backlog_bytes"] == 0


async def test_a_start_whose_posting_threads_have_no_agent_fails_and_may_be_tried_again(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = nixl.NixlPlane._make_agent

    def refuse(plane: nixl.NixlPlane, name: str, memories: Any) -> Agent:
        if "poster2" in name:
            raise BackendError("no more agents")
        return make(plane, name, memories)

    plane = nixl.NixlPlane(NixlConfig(posting_threads=2), "reader")
    monkeypatch.setattr(nixl.NixlPlane, "_make_agent", refuse)
    with pytest.raises(BackendError, match="no more agents"):
        plane.begin((), lambda: None)
    monkeypatch.undo()
    assert poster_threads() == []
    plane._posters._is_told = True  # as a callback of the last start that never ran, on a loop that was closed
    plane.begin((), lambda: None)
    assert not plane._posters._is_told
    assert plane.statistics()["posting_threads"] == 2
    plane.close()


async def test_what_waits_for_a_peer_that_was_lost_is_not_posted(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner = await link(sides)
    await check_reads(reader, "owner", owner.arrays)
    gate = Gate(monkeypatch)
    local, remote = pairs(TABLES[1], 3)
    for number in (1, 2):
        reader.read(number, "owner", TABLES[1], local, remote)
    await until(gate.entered.is_set)
    (poster,) = reader.plane._posters
    # What a disconnect that some transfer meets leaves behind.
    poster.agent._gone.add("owner")
    gate.leave.set()
    before = [a.copy() for a in reader.arrays]
    news = await reader.heard(2)
    assert [(e.ending, e.peer_lost) for e in news] == [(Ending.FAILED, True)] * 2
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, before, strict=True))


async def test_what_is_dropped_is_dropped_by_every_thread(sides: list[Side]) -> None:
    reader, owner = await link(sides, NixlConfig(posting_threads=2, bulk_bytes=1))
    for _ in range(2):
        await check_reads(reader, "owner", owner.arrays)
    agents = [poster.agent for poster in reader.plane._posters]
    assert [agent.is_connected("owner") for agent in agents] == [True, True]
    reader.plane.remove_remote_agent("owner")
    await until(lambda: not any(agent.is_connected("owner") for agent in agents))
    assert not any(agent._agent.check_remote_metadata("owner") for agent in agents)
    # What comes too late fails there, and whoever is met again is loaded again by all.
    local, remote = pairs(TABLES[0], 0)
    reader.read(1, "owner", TABLES[0], local, remote)
    assert [(e.ending, e.cause) for e in await reader.heard(1)] == [(Ending.FAILED, "peer owner is not loaded")]
    await reader.plane.add_remote_agent(owner.agent, owner.memories)
    await check_reads(reader, "owner", owner.arrays)


# -- the end ---------------------------------------------------------------------------------------


async def test_closing_with_bulk_in_flight_ends_the_threads(sides: list[Side]) -> None:
    reader, _ = await link(sides, NixlConfig(posting_threads=2, bulk_bytes=1))
    local, remote = pairs(TABLES[0], 0)
    # Nobody turns the owner's loop, so connections are not made and nothing ends.
    for number in range(20):
        reader.read(number, "owner", TABLES[0], local, remote)
    assert reader.plane.statistics()["running"] == 20
    reader.plane.close()
    assert poster_threads() == []
    assert reader.ended() == []
    assert reader.plane.statistics()["running"] == 0
    before: list[Bytes] = [a.copy() for a in reader.arrays]
    await anyio.sleep(0.02)
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, before, strict=True))


async def stuck_read(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> tuple[Side, Gate]:
    """Start a read whose thread stays inside NIXL until the gate is left; closing has little patience."""
    monkeypatch.setattr(posters, "CLOSE_S", 0.05)
    reader, _, gate = await held_read(sides, monkeypatch)
    return reader, gate


async def test_closing_says_so_when_a_thread_does_not_come_out_of_nixl(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, gate = await stuck_read(sides, monkeypatch)
    with pytest.raises(BackendError, match=r"reader-poster1 did not return from NIXL .* may still be written"):
        reader.plane.close()
    with pytest.raises(BackendError, match="still inside NIXL"):
        reader.plane.begin(reader.memories, reader._poll)
    gate.leave.set()
    monkeypatch.setattr(posters, "CLOSE_S", 10.0)
    reader.plane.close()
    assert poster_threads() == []


async def test_waiting_for_threads_off_the_loop_leaves_nothing_to_wait_for(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, gate = await stuck_read(sides, monkeypatch)
    await reader.plane.quiesce()
    waited: list[float] = []
    wait = Poster.wait

    def spy(poster: Poster, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return wait(poster, timeout_s)

    monkeypatch.setattr(Poster, "wait", spy)
    with pytest.raises(BackendError, match="did not return from NIXL"):
        reader.plane.close()
    assert waited == [0.0]
    gate.leave.set()
    # Without it, closing waits by itself.
    monkeypatch.setattr(posters, "CLOSE_S", 10.0)
    reader.plane.close()
    assert poster_threads() == []


STUCK = {
    "nixl": NixlConfig(posting_threads=1, bulk_bytes=1),
    "pull": PullConfig(drain_s=0.1),
    "lease": LeaseConfig(grant_s=0.6),
}


@contextlib.asynccontextmanager
async def stuck_pull(gate: Gate) -> AsyncIterator[tuple[Engine, Poster, asyncio.Task[PullResult]]]:
    """A pull whose read is inside NIXL on a posting thread, until the gate opens."""
    async with Bench(True).pair(**STUCK) as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1, 2, 3], written=True)
        pulled = asyncio.create_task(decode.engine.pull("d", [(0, [4, 5, 6])], params))
        with anyio.fail_after(10):
            await anyio.to_thread.run_sync(gate.entered.wait)
        plane = decode.engine._driver.data
        assert isinstance(plane, nixl.NixlPlane)
        yield decode.engine, plane._posters[0], pulled


@pytest.mark.parametrize("how", ["aclose", "suspend"])
async def test_the_loop_turns_while_an_engine_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(ending, "GRACE_S", 0.1)
    async with stuck_pull(gate) as (engine, poster, decode):
        closing = asyncio.create_task(getattr(engine, how)())
        with pytest.raises(PullError):
            await decode
        await until(lambda: poster._is_stopping)
        assert not closing.done()
        # Only the loop opens the gate: if it stood still, closing would fail.
        gate.leave.set()
        await closing
        assert poster.name not in poster_threads()
        assert poster.agent.is_closed


@pytest.mark.parametrize("how", ["aclose", "suspend"])
async def test_an_engine_whose_thread_is_inside_nixl_returns_nothing_until_it_is_out(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(ending, "GRACE_S", 0.1)
    async with stuck_pull(gate) as (engine, _, decode):
        monkeypatch.setattr(posters, "CLOSE_S", 0.05)
        with pytest.raises(BackendError, match="may still be written"):
            await getattr(engine, how)()
        with pytest.raises(PullError) as caught:
            await decode
        assert caught.value.held == {0: (4, 5, 6)}
        waiting = [asyncio.create_task(engine.returned("d")), asyncio.create_task(caught.value.returned())]
        with pytest.raises(BackendError, match="may still be written"):
            await engine.aclose()
        assert not any(each.done() for each in waiting)
        monkeypatch.setattr(posters, "CLOSE_S", 10.0)
        gate.leave.set()
        await engine.aclose()
        assert await asyncio.gather(*waiting) == [None, None]


async def _leave_open() -> None:
    """Read in bulk, fork, and leave without closing anything."""
    made: list[Side] = []
    reader, owner = await link(made)
    await check_reads(reader, "owner", owner.arrays)
    child = os.fork()
    if not child:
        # No thread survives a fork: what is asked for there must not wait for one.
        os._exit(reader.plane.statistics()["posting_threads"])
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222
    assert status == 0
    assert reader.plane.statistics()["posting_threads"] == 1
    local, remote = pairs(TABLES[0], 0)
    for number in range(50):
        reader.read(number, "owner", TABLES[0], local, remote)


def test_the_interpreter_ends_though_nobody_closed() -> None:
    code = "import asyncio; from tests import test_posters; asyncio.run(test_posters._leave_open())"
    done = python("-c", code, timeout_s=40)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bulk_is_handed_over_as_long_as_threads_are_not_much_slower() -> None:
    pace = Pace(2 * nixl.PACE)
    assert pace.favours_first, "nothing is known"
    pace.note(is_first=True, num_bytes=10, seconds=1e6)
    assert pace.favours_first, "of the loop nothing is known"
    pace = Pace(2 * nixl.PACE)
    pace.note(is_first=False, num_bytes=1000, seconds=1.0)
    even = 2.0 * nixl.PACE  # two threads copy at once
    pace.note(is_first=True, num_bytes=1000, seconds=1.5 * even)
    assert not pace.favours_first
    pace.note(is_first=True, num_bytes=1000, seconds=0.4 * even)
    assert pace.favours_first, "0.95 on average"
    pace.note(is_first=False, num_bytes=1000, seconds=0.4)
    assert not pace.favours_first, "the loop copies faster than it did"


@pytest.mark.parametrize("wrong", [{"posting_threads": n} for n in (-1, 17, True, 1.0, "two", None)])
def test_numbers_of_threads_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"posting_threads is .* 0 \(post on the loop\) to 16, or 'auto'"):
        NixlConfig(**wrong)


@pytest.mark.parametrize("name", ["bulk_bytes", "bulk_descriptors"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_what_is_bulk_is_a_number_above_zero(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be an integer from 1 "):
        NixlConfig(**{name: value})


# -- processes that read from each other -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("threads", [2])
async def test_three_processes_read_from_each_other_at_once(transport: str, threads: int) -> None:
    env = {**os.environ, **({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"} if transport == "tcp" else {})}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.test_posters", str(threads)]
    workers = [
        await asyncio.create_subprocess_exec(*command, str(seed), env=env, stdin=pipe, stdout=pipe, limit=1 << 20)
        for seed in (2, 3, 4)
    ]
    try:
        with anyio.fail_after(40):
            for turn in range(2):
                lines = [await worker.stdout.readline() for worker in workers if worker.stdout]
                for worker in workers:
                    assert worker.stdin is not None
                    worker.stdin.write(b"".join(lines) if turn == 0 else b"over\n")
                assert all(lines), turn
            assert [json.loads(line) for line in lines] == [{"handed": 80 if threads else 0, "left": 0}] * 3
            assert [await worker.wait() for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def _mesh(threads: int, seed: int) -> None:
    """Read twenty times from each of two other processes, which do the same."""
    given = contents(seed)
    side = Side(f"mesh{seed}", seed + 10, NixlConfig(posting_threads=threads, bulk_bytes=1), given)
    side.plane.watch(True)
    metadata = base64.b64encode(side.agent.metadata).decode()
    print(json.dumps([seed, metadata, [a.ctypes.data for a in given]]), flush=True)
    peers = [json.loads(await asyncio.to_thread(sys.stdin.readline)) for _ in range(3)]
    others = [peer for peer in peers if peer[0] != seed]
    for number, blob, bases in others:
        agent = AgentInfo(f"mesh{number}", base64.b64decode(blob))
        await side.plane.add_remote_agent(agent, [Memory(base, SIZE) for base in bases])
    for _ in range(20):
        for number, _, _ in others:
            await check_reads(side, f"mesh{number}", contents(number))
    found = side.plane.statistics()
    print(json.dumps({"handed": found["posts_handed"], "left": found["running"]}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    side.plane.close()


if __name__ == "__main__":
    asyncio.run(_mesh(int(sys.argv[1]), int(sys.argv[2])))
