"""Real NIXL agents: bytes, failures and wake-ups; over TCP between two processes as well."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import itertools
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest

from asynckv import EngineConfig
from asynckv.config import NixlConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.choice import choose_plane
from asynckv.edges.nic import agent as nixl_agent
from asynckv.edges.nic import nixl
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.metadata import is_known, renamed
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.survivor.taster import Taster
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.tables import DescTable, Span
from asynckv.ports import AgentInfo, CopyMade
from tests.engines import Polled, until
from tests.test_process import children

pytestmark = pytest.mark.nixl

PATIENCE_S = 10.0
SIZE = 64 * 1024
HERE, THERE = 16, 24

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int32]


def table(table_id: int, lengths: list[int], local: list[list[int]], remote: list[list[int]]) -> DescTable:
    """A table whose sides differ in memory, offset, stride and number of blocks."""
    length, mine, theirs = (np.array(x, np.int64) for x in (lengths, local, remote))
    return DescTable(table_id, Span(0, 0, 0, 0, 1), length, mine, theirs, HERE, THERE)


TABLES = (
    table(0, [512, 96, 8], [[0, 0, 1024], [1, 64, 2048], [0, 520, 1024]], [[1, 0, 512], [0, 3, 100], [1, 40000, 999]]),
    table(7, [256], [[1, 512, 2048]], [[0, 8192, 256]]),
)


class Side(Polled[TransferEnded]):
    """A plane with two memories, polled whenever it asks to be."""

    def __init__(
        self,
        name: str,
        seed: int,
        config: NixlConfig | None = None,
        lent: Sequence[Bytes] = (),
        arrays: list[Bytes] | None = None,
    ) -> None:
        super().__init__()
        self.plane = NixlPlane(config or NixlConfig(posting_threads=0), name)
        self.arrays = contents(seed) if arrays is None else arrays
        self.memories = [Memory(a.ctypes.data, a.nbytes) for a in (*self.arrays, *lent)]
        self.made: list[CopyMade] = []
        self.calls = 0
        self.agent = self.plane.begin(self.memories, self._poll)

    def _poll(self) -> None:
        self.calls += 1
        copies = len(self.made)
        if (found := self.ended()) or len(self.made) > copies:
            self.news += found
            self.changed.set()

    def ended(self) -> list[TransferEnded]:
        """Poll; file packed copies that were made, and return the ends of transfers."""
        found = self.plane.poll()
        self.made += [news for news in found if isinstance(news, CopyMade)]
        return [news for news in found if isinstance(news, TransferEnded)]

    def read(self, transfer_id: int, name: str, table: DescTable, local: Indices, remote: Indices) -> None:
        """Post, and file what is known at once under the news."""
        ended = self.plane.post_read(TransferId(transfer_id), name, request(table, local, remote))
        if ended is not None:
            self.news.append(ended)


def request(table: DescTable, local: Indices, remote: Indices) -> ReadRequest:
    rows = np.clip(local // table.local_blocks, 0, table.num_rows - 1)
    return ReadRequest(table, local, remote, int(table.length[rows].sum()), len(local))


def contents(seed: int) -> list[Bytes]:
    return list(np.random.default_rng(seed).integers(0, 256, (2, SIZE), np.uint8))


def pairs(t: DescTable, seed: int) -> tuple[Indices, Indices]:
    """Every row of the table with shuffled blocks: `row * blocks + block` on either side."""
    rng = np.random.default_rng(seed)
    rows = np.arange(t.num_rows)[:, None]
    local = (rows * HERE + rng.permutation(HERE)).ravel()
    remote = (rows * THERE + rng.permutation(THERE)[:HERE]).ravel()
    return local.astype(np.int32), remote.astype(np.int32)


def copied(mine: Sequence[Bytes], theirs: Sequence[Bytes], t: DescTable, local: Indices, remote: Indices) -> None:
    """Do naively what a read has to do."""
    for i, j in zip(local.tolist(), remote.tolist(), strict=True):
        (row, block), (other, block_there) = divmod(i, t.local_blocks), divmod(j, t.remote_blocks)
        assert row == other
        memory, offset, stride = t.local[row].tolist()
        from_memory, from_offset, from_stride = t.remote[row].tolist()
        to, source, length = (offset + block * stride, from_offset + block_there * from_stride, int(t.length[row]))
        mine[memory][to : to + length] = theirs[from_memory][source : source + length]


async def check_reads(reader: Side, name: str, theirs: Sequence[Bytes]) -> None:
    """Read through every table, and compare every byte of memory with a naive copy."""
    want = [a.copy() for a in reader.arrays]
    for number, t in enumerate(TABLES):
        local, remote = pairs(t, number)
        copied(want, theirs, t, local, remote)
        reader.read(number, name, t, local, remote)
    news = await reader.heard(len(TABLES))
    assert {(e.transfer_id, e.ending) for e in news} == {(n, Ending.DONE) for n in range(len(TABLES))}
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))


ALL_BULK = NixlConfig(posting_threads=1, bulk_bytes=1)


async def link(sides: list[Side], config: NixlConfig = ALL_BULK) -> tuple[Side, Side]:
    reader, owner = Side("reader", 1, config), Side("owner", 2)
    sides += [reader, owner]
    owner.plane.watch(True)
    await reader.plane.add_remote_agent(owner.agent, owner.memories)
    return reader, owner


@pytest.fixture
async def linked(sides: list[Side]) -> tuple[Side, Side]:
    return await link(sides, NixlConfig(posting_threads=0))


async def test_strided_tables_read_what_they_name_and_nothing_else(linked: tuple[Side, Side]) -> None:
    reader, owner = linked
    await check_reads(reader, "owner", owner.arrays)
    assert reader.plane.statistics()["running"] == reader.plane.statistics()["unreleased"] == 0


@pytest.mark.parametrize(("local", "remote"), [(-1, 0), (0, -1), (HERE, 0), (0, THERE), (1 << 30, 0)])
async def test_indices_outside_of_a_table_are_refused(linked: tuple[Side, Side], local: int, remote: int) -> None:
    reader, _ = linked
    reader.read(1, "owner", TABLES[1], np.array([local], np.int32), np.array([remote], np.int32))
    (ended,) = reader.news
    assert (ended.ending, ended.peer_lost) == (Ending.FAILED, False)
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, contents(1), strict=True))


async def test_a_table_of_two_kinds_of_memory_is_refused(linked: tuple[Side, Side]) -> None:
    reader, owner = linked
    reader.plane.remove_remote_agent("owner")
    mixed = [owner.memories[0], Memory(1 << 40, SIZE, "cuda")]
    await reader.plane.add_remote_agent(owner.agent, mixed)
    local, remote = pairs(TABLES[0], 0)
    reader.read(1, "owner", TABLES[0], local, remote)
    (ended,) = reader.news
    assert ended.ending is Ending.REFUSED
    assert "mixes cpu and cuda memory" in ended.cause


async def test_metadata_under_another_name_is_not_kept(sides: list[Side]) -> None:
    reader, owner = Side("reader", 1), Side("owner", 2)
    sides += [reader, owner]
    with pytest.raises(BackendError, match="'owner', but 'somebody' was announced"):
        await reader.plane.add_remote_agent(AgentInfo("somebody", owner.agent.metadata), owner.memories)
    with pytest.raises(BackendError, match="refuses the metadata"):
        await reader.plane.add_remote_agent(AgentInfo("nobody", b""), owner.memories)
    assert reader.plane.statistics()["peers"] == 0
    owner.plane.watch(True)
    await reader.plane.add_remote_agent(owner.agent, owner.memories)
    await check_reads(reader, "owner", owner.arrays)


async def test_a_back_end_that_is_missing_is_named_with_those_that_are_there() -> None:
    plane = NixlPlane(NixlConfig(backend="NOWHERE"), "nobody")
    with pytest.raises(BackendError, match=r"'NOWHERE' cannot be created.* plug-ins found: .*UCX"):
        plane.begin((), lambda: None)
    plane.close()


async def test_completions_wake_the_loop(linked: tuple[Side, Side]) -> None:
    reader, owner = linked
    described = reader.plane.describe()
    assert described["completions"].endswith("epoll descriptors of UCX")
    assert described["nixl_variant"].startswith("nixl")
    await check_reads(reader, "owner", owner.arrays)
    assert reader.plane.statistics()["wakeups"] > 0


async def test_an_idle_plane_does_nothing(linked: tuple[Side, Side]) -> None:
    reader, owner = linked
    await check_reads(reader, "owner", owner.arrays)
    owner.plane.watch(False)
    # The timers that run out once more, and what UCX still has to say about the connection.
    with anyio.fail_after(PATIENCE_S):
        while True:
            calls, cpu = reader.calls + owner.calls, time.process_time()
            await asyncio.sleep(0.05)
            if reader.calls + owner.calls == calls:
                break
    assert time.process_time() - cpu < 0.01


async def test_closing_under_a_running_read_is_harmless(linked: tuple[Side, Side]) -> None:
    reader, _ = linked
    local, remote = pairs(TABLES[0], 0)
    # The first read has to wait for the connection, which nobody can make before the loop turns.
    assert reader.plane.post_read(TransferId(1), "owner", request(TABLES[0], local, remote)) is None
    assert reader.plane.statistics()["running"] == 1
    reader.plane.close()
    assert reader.ended() == []
    assert reader.plane.statistics()["running"] == 0
    calls, later = reader.calls, asyncio.get_running_loop().time() + 0.05
    await until(lambda: asyncio.get_running_loop().time() > later)
    assert reader.calls == calls, "what is closed asks to be polled"


@pytest.mark.parametrize(
    ("torch", "there", "chosen"),
    [
        ("cuda: str = '12.8'", "nixl_cu12 nixl_cu13", "nixl_cu12"),
        ("cuda = '13.0'", "nixl_cu12 nixl_cu13", "nixl_cu13"),
        ("hip = None\ncuda = None", "nixl_cu12 nixl_cu13", "nixl_cu13"),
        ("", "nixl_cu12", "nixl_cu12"),
        ("cuda = '12.8'", "nixl_cu13", "nixl_cu13"),
    ],
)
def test_the_variant_of_nixl_is_that_of_torchs_cuda_where_it_is_there(
    torch: str, there: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nixl_cu13._bindings", "nixl_cu12._bindings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "version.py").write_text(torch)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    found = {"torch": spec if torch else None} | dict.fromkeys(there.split(), spec)
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    assert nixl._variant() == chosen


def test_the_epoll_set_that_watches_those_of_all_agents_is_no_agents_own() -> None:
    with select.epoll() as one, select.epoll() as other, select.epoll() as all_of_them:
        for each in (one, other):
            all_of_them.register(each.fileno(), select.EPOLLIN)
        own = {one.fileno(), other.fileno()}
        assert set(nixl_agent._own(own | {all_of_them.fileno()})) == own
        assert set(nixl_agent._own(own)) == own


def test_loading_nixl_leaves_the_applications_logging_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    root, ours, raises = logging.getLogger(), logging.NullHandler(), logging.raiseExceptions

    def meddling(name: str) -> str:
        root.handlers.clear()
        logging.raiseExceptions = not raises
        return name

    monkeypatch.setattr(importlib, "import_module", meddling)
    before = list(root.handlers)
    try:
        root.addHandler(ours)
        assert nixl.load_nixl().endswith("._api")
        assert root.handlers == [*before, ours]
        assert logging.raiseExceptions is raises
    finally:
        root.removeHandler(ours)
        logging.raiseExceptions = raises


# -- evidence --------------------------------------------------------------------------------------


class Meddler:
    """NIXL's own agent object, some of whose calls do something else as well."""

    def __init__(self, raw: Any, **instead: Any) -> None:
        self._raw, self._instead = raw, instead

    def __getattr__(self, name: str) -> Any:
        return self._instead.get(name) or getattr(self._raw, name)


def meddle(reader: Side, **instead: Any) -> Any:
    """Put calls in place of those of the loop's agent; return the object that has the real ones."""
    agent = reader.plane._agent
    assert agent is not None
    raw = agent._raw
    agent._raw = Meddler(raw, **instead)
    return raw


def endings(news: Sequence[TransferEnded]) -> list[tuple[int, str]]:
    return [(each.transfer_id, each.ending.value) for each in news]


@pytest.mark.parametrize("where", ["postXferReq", "getXferStatus"])
async def test_an_exception_that_is_no_disconnect_is_no_end(linked: tuple[Side, Side], where: str) -> None:
    reader, owner = linked
    raised: list[int] = []

    def after_all(handle: int, *args: Any) -> Any:
        found = getattr(raw, where)(handle, *args)
        if not raised:
            raised.append(handle)
            raise RuntimeError("unheard of")
        return found

    raw = meddle(reader, **{where: after_all})
    want = [a.copy() for a in reader.arrays]
    local, remote = pairs(TABLES[0], 0)
    copied(want, owner.arrays, TABLES[0], local, remote)
    reader.read(1, "owner", TABLES[0], local, remote)
    (doubted, *_) = reader.news = [*reader.news, *reader.ended()]
    assert (doubted.ending, doubted.cause, doubted.peer_lost) == (Ending.IN_DOUBT, "RuntimeError('unheard of')", False)
    # NIXL went on with it all the same, and it is asked about until it says so.
    assert endings(await reader.heard(2)) == [(1, "in_doubt"), (1, "done")]
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))
    found = reader.plane.statistics()
    assert (found["running"], found["in_doubt"], found["unreleased"]) == (0, 0, 0)


async def test_what_nixl_itself_does_not_know_any_more_may_still_write(linked: tuple[Side, Side]) -> None:
    reader, _ = linked
    reader.read(1, "owner", TABLES[0], *pairs(TABLES[0], 0))
    assert reader.plane.statistics()["running"] == 1
    # As measured: NIXL then says "not found" of the transfer, whose bytes land nevertheless.
    assert reader.plane._agent is not None
    reader.plane._agent._agent.remove_remote_agent(reader.plane._agent._remotes["owner"].alias)
    (doubted,) = reader.ended()
    assert (doubted.ending, doubted.peer_lost) == (Ending.IN_DOUBT, False)
    assert reader.ended() == []
    found = reader.plane.statistics()
    assert (found["running"], found["in_doubt"]) == (0, 1)


@pytest.mark.parametrize("ending", ["done", "in_doubt", "running"])
async def test_memory_that_something_may_still_write_is_not_deregistered(
    linked: tuple[Side, Side], ending: str
) -> None:
    """The agent is destroyed with it instead, which ends what runs before the memory goes."""
    reader, _ = linked
    agent = reader.plane._agent
    assert agent is not None
    raw = agent._raw
    if ending != "done":
        meddle(reader, getXferStatus=lambda handle: 1 // 0 if ending == "in_doubt" else 1)
    one = np.zeros(1, np.int32)
    reader.read(1, "owner", TABLES[1], one, one)
    news = await reader.heard(1) if ending == "done" else reader.ended()
    assert endings(news) == ([] if ending == "running" else [(1, ending)])
    agent._raw = raw
    honest, done = agent._agent, list[str]()

    def noting(name: str) -> Any:
        def call(*args: Any) -> Any:
            done.append(name)
            return getattr(honest, name)(*args)

        return call

    agent._agent = Meddler(honest, **{n: noting(n) for n in ("deregister_memory", "remove_remote_agent")})
    reader.plane._agent = None  # for whoever else asks while it closes
    agent._let_go()
    assert set(done) == ({"deregister_memory", "remove_remote_agent"} if ending == "done" else set())


@pytest.mark.parametrize("posting_threads", [0, 1])
async def test_a_connection_that_broke_is_made_anew_though_a_transfer_over_it_is_in_doubt(
    sides: list[Side], posting_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is met again is read again: what may never end must not keep a process that lives from ever being read."""
    reader, owner = await link(sides, NixlConfig(posting_threads=posting_threads, bulk_bytes=1))
    agent = reader.plane._posters[0].agent if posting_threads else reader.plane._agent
    assert agent is not None
    raw, handles = agent._raw, list[int]()

    def status(handle: int) -> Any:
        handles.append(handle)
        raise agent._lost("broken") if handle != handles[0] else RuntimeError("unheard of")

    agent._raw = Meddler(raw, getXferStatus=status, postXferReq=lambda handle, _: 1)
    local, remote = pairs(TABLES[0], 0)
    reader.read(11, "owner", TABLES[0], local, remote)
    assert endings(await reader.heard(1)) == [(11, "in_doubt")]
    (doubted,) = agent.doubtful.values()
    released, release = list[Any](), agent._agent.release_dlist_handle

    def note(handle: Any) -> None:
        released.append(handle)
        release(handle)

    monkeypatch.setattr(agent._agent, "release_dlist_handle", note)
    reader.read(12, "owner", TABLES[1], *pairs(TABLES[1], 0))
    (lost,) = await reader.heard(1)
    assert (lost.transfer_id, lost.ending, lost.peer_lost) == (12, Ending.FAILED, True)
    agent._raw = raw
    # The peer is gone, and met again, while what is in doubt keeps it loaded.
    await reader.plane.add_remote_agent(owner.agent, owner.memories)
    await check_reads(reader, "owner", owner.arrays)
    assert reader.plane.statistics()["in_doubt"] == 1
    # What describes the memory that may still be written is kept with the transfer; all else is made anew.
    assert released
    assert doubted.lists is not None
    assert not {id(doubted.lists.local), id(doubted.lists.remote)} & set(map(id, released))
    reader.plane.remove_remote_agent("owner")
    assert reader.plane.statistics()["peers"] == 1
    await check_reads(reader, "owner", owner.arrays)


async def test_an_old_doubt_says_nothing_of_the_connection_that_was_made_since(sides: list[Side]) -> None:
    """NIXL may say later on that the old connection has broken: the new one is read over all the same."""
    reader, owner = await link(sides, NixlConfig(posting_threads=0, bulk_bytes=1))
    agent = reader.plane._agent
    assert agent is not None
    raw, handles = agent._raw, list[int]()

    def status(handle: int) -> Any:
        handles.append(handle)
        raise agent._lost("broken") if handle != handles[0] else RuntimeError("unheard of")

    def status_later(handle: int) -> Any:
        if handle == handles[0]:
            raise agent._lost("broken")
        return raw.getXferStatus(handle)

    agent._raw = Meddler(raw, getXferStatus=status, postXferReq=lambda handle, _: 1)
    for number in (11, 12):
        reader.read(number, "owner", TABLES[number - 11], *pairs(TABLES[number - 11], 0))
        await reader.heard(1)
    agent._raw = raw
    await reader.plane.add_remote_agent(owner.agent, owner.memories)
    agent._raw = Meddler(raw, getXferStatus=status_later)
    (ended,) = reader.ended()
    assert ended == TransferEnded(TransferId(11), Ending.FAILED, "the remote process is gone (broken)")
    agent._raw = raw
    await check_reads(reader, "owner", owner.arrays)


async def test_a_handle_that_nixl_keeps_is_released_later(linked: tuple[Side, Side]) -> None:
    reader, owner = linked
    refused, released = list[int](), list[int]()

    def release(handle: int) -> None:
        if len(refused) < 3:
            refused.append(handle)
            raise RuntimeError("not now")
        raw.releaseXferReq(handle)
        released.append(handle)

    raw = meddle(reader, releaseXferReq=release)
    one = np.zeros(1, np.int32)
    for number in range(3):
        reader.read(number, "owner", TABLES[1], one, one)
    # The end is told at once: it is the bytes' and not the handle's.
    assert {each.ending for each in await reader.heard(3)} == {Ending.DONE}
    assert len(set(refused)) == 3
    reader.ended()
    assert sorted(released) == sorted(refused)
    assert reader.plane.statistics()["unreleased"] == 0
    meddle(reader)
    await check_reads(reader, "owner", owner.arrays)


def land_untold(agent: Agent, handles: list[int], owner: Side) -> None:
    """Wait until NIXL has done all of these; the loop does not turn, so nobody is told."""
    deadline = time.monotonic() + PATIENCE_S
    while any(int(agent._raw.getXferStatus(handle)) for handle in handles):
        owner.plane.poll()
        assert time.monotonic() < deadline


def five_reads(reader: Side) -> tuple[Agent, list[int]]:
    for number in range(5):
        reader.read(number, "owner", TABLES[1], np.zeros(1, np.int32), np.zeros(1, np.int32))
    agent = reader.plane._agent
    assert agent is not None
    return agent, [transfer.handle for transfer in agent.running.values()]


@pytest.mark.parametrize("doubt", [False, True])
async def test_one_poll_tells_every_end(linked: tuple[Side, Side], doubt: bool) -> None:
    reader, owner = linked
    agent, handles = five_reads(reader)
    assert len(handles) == 5
    if doubt:
        raw = meddle(reader, getXferStatus=lambda handle: 1 // 0)
        assert endings(reader.ended()) == [(number, "in_doubt") for number in range(5)]
        agent._raw = raw
    land_untold(agent, handles, owner)
    assert sorted(endings(reader.ended())) == [(number, "done") for number in range(5)]


async def test_a_poll_asks_until_nothing_new_is_found(linked: tuple[Side, Side]) -> None:
    """A question about one transfer may be what ends another that was asked about before."""
    reader, owner = linked
    agent, handles = five_reads(reader)
    land_untold(agent, handles, owner)
    ended = set[int]()

    def status(handle: int) -> int:
        # The last one first.
        if set(handles[handles.index(handle) + 1 :]) <= ended:
            ended.add(handle)
            return int(raw.getXferStatus(handle))
        return 1

    raw = meddle(reader, getXferStatus=status)
    assert endings(reader.ended()) == [(number, "done") for number in (4, 3, 2, 1, 0)]


@pytest.mark.parametrize("doubt", [False, True])
async def test_an_end_without_a_wake_up_of_ucx_is_found_all_the_same(linked: tuple[Side, Side], doubt: bool) -> None:
    reader, _ = linked
    for fd in reader.plane._fds:
        asyncio.get_running_loop().remove_reader(fd)
    one = np.zeros(1, np.int32)
    reader.read(1, "owner", TABLES[1], one, one)
    assert reader.plane.statistics()["running"] == 1
    if doubt:
        raw = meddle(reader, getXferStatus=lambda handle: 1 // 0)
        assert endings(reader.ended()) == [(1, "in_doubt")]
        assert reader.plane._agent is not None
        reader.plane._agent._raw = raw
    looks = itertools.count()
    # Not at the first look: there is another as long as it takes.
    raw = meddle(reader, getXferStatus=lambda handle: 1 if next(looks) < 4 else raw.getXferStatus(handle))
    assert endings(await reader.heard(1)) == [(1, "done")]


# -- what is kept ----------------------------------------------------------------------------------


async def test_one_name_is_one_agent_with_one_memory(linked: tuple[Side, Side], sides: list[Side]) -> None:
    reader, owner = linked
    other = Side("other", 3)
    sides.append(other)
    for agent, memories in ((AgentInfo("owner", other.agent.metadata), owner.memories), (owner.agent, other.memories)):
        with pytest.raises(BackendError, match="owner is loaded with other metadata; give every start of a process"):
            await reader.plane.add_remote_agent(agent, memories)
    await check_reads(reader, "owner", owner.arrays)
    # Whoever was refused has no part in it.
    reader.plane.remove_remote_agent("owner")
    assert reader.plane.statistics()["peers"] == 0


@pytest.mark.parametrize("posting_threads", [0, 1])
async def test_agents_that_are_kept_connected_are_the_last_few(
    sides: list[Side], posting_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MAX_KEPT", 2)
    reader = Side("reader", 1, NixlConfig(posting_threads=posting_threads, bulk_bytes=1))
    owners = [Side(f"owner{number}", 2 + number, NixlConfig(posting_threads=0)) for number in range(4)]
    sides += [reader, *owners]
    for owner in owners:
        owner.plane.watch(True)
        await reader.plane.add_remote_agent(owner.agent, owner.memories)
        await check_reads(reader, owner.agent.name, owner.arrays)
        reader.plane.remove_remote_agent(owner.agent.name, keep=True)
        if owner is owners[1]:
            # Met again, it is in use, and none of those that make room.
            await reader.plane.add_remote_agent(owners[0].agent, owners[0].memories)

    async def knows(*want: bool) -> None:
        assert reader.plane.statistics()["peers"] == sum(want)
        for agent in (reader.plane._agent, *(poster.agent for poster in reader.plane._posters)):
            assert agent is not None
            known, names = agent.is_connected, [owner.agent.name for owner in owners]
            await until(lambda: [known(name) for name in names] == list(want))  # noqa: B023
            of_nixl = agent._agent.check_remote_metadata
            assert [any(of_nixl(f"{name}~{load}") for load in range(9)) for name in names] == list(want)
            # Of those that nothing is read from now, nothing is prepared.
            remotes = agent._remotes
            await until(lambda: not any(remotes[name].lists for name in names[1:] if name in remotes))  # noqa: B023

    await knows(True, False, True, True)
    await check_reads(reader, "owner0", owners[0].arrays)
    reader.plane.remove_remote_agent("owner0", keep=True)
    await knows(True, False, False, True)
    await reader.plane.add_remote_agent(owners[3].agent, owners[3].memories)
    await check_reads(reader, "owner3", owners[3].arrays)


@pytest.mark.parametrize("bound", [("MAX_LISTS", 3), ("MAX_KEPT_ROWS", TABLES[0].num_rows + 2)])
@pytest.mark.parametrize("doubt", [False, True])
async def test_descriptor_lists_make_room_for_others_but_never_under_a_transfer(
    linked: tuple[Side, Side], doubt: bool, bound: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, *bound)
    reader, owner = linked
    await check_reads(reader, "owner", owner.arrays)
    agent = reader.plane._agent
    assert agent is not None
    released: list[Any] = []
    release = agent._agent.release_dlist_handle

    def note(handle: Any) -> None:
        released.append(handle)
        release(handle)

    monkeypatch.setattr(agent._agent, "release_dlist_handle", note)
    raw = meddle(reader, getXferStatus=lambda handle: 1 // 0 if doubt else 1, postXferReq=lambda handle, _: 1)
    local, remote = pairs(TABLES[0], 0)
    reader.read(1, "owner", TABLES[0], local, remote)
    if doubt:
        assert endings(reader.ended()) == [(1, "in_doubt")]
    (used,) = (agent.doubtful if doubt else agent.running).values()
    agent._raw = raw
    for number in range(10):
        each = replace(TABLES[1], table_id=number)
        reader.read(100 + number, "owner", each, np.array([number], np.int32), np.array([number], np.int32))
        # On a busy machine some of these reads still run, and keep theirs as well.
        busy = {id(each.lists) for each in (*agent.running.values(), *agent.doubtful.values())}
        assert len(agent._remotes["owner"].lists) <= max(3, len(busy) + 1)
    assert id(TABLES[0]) in agent._remotes["owner"].lists
    assert used.lists is not None
    assert used.lists.local not in released
    assert used.lists.remote not in released
    assert len(released) == 2 * (12 - len(agent._remotes["owner"].lists))


# -- two processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda n: f"{n}-posting-threads")
def over_tcp(request: pytest.FixtureRequest) -> dict[str, Any]:
    env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    command = [sys.executable, "-W", "error", __file__, "reader", str(request.param)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # fails if anything else reached stdout
    return found


@pytest.mark.slow
def test_reads_over_tcp_are_exact_and_awaited(over_tcp: dict[str, Any]) -> None:
    assert over_tcp["exact"]
    assert over_tcp["completions"].endswith("epoll descriptors of UCX")
    assert over_tcp["posts_handed"] == (over_tcp["posts"] if over_tcp["posting_threads"] else 0)


@pytest.mark.slow
def test_the_death_of_an_owner_ends_what_reads_from_it(over_tcp: dict[str, Any]) -> None:
    assert over_tcp["while_stopped"] == {"news": 0, "running": 4}
    assert over_tcp["after_kill"] == [["failed", True]] * 4
    assert over_tcp["next_post"] == ["failed", True]
    assert over_tcp["left"] == {"running": 0, "in_doubt": 0, "unreleased": 0, "peers": 0}
    assert over_tcp["owner_stdout"] == ""


async def _owner() -> None:
    owner = Side("owner", 2)
    owner.plane.watch(True)
    metadata = base64.b64encode(owner.agent.metadata).decode()
    print(json.dumps([metadata, [m.base for m in owner.memories]]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    owner.plane.close()


async def _reader(posting_threads: int) -> dict[str, Any]:
    pipe = subprocess.PIPE
    # This process is the test's own: its loop may wait.
    with subprocess.Popen([sys.executable, __file__, "owner"], stdin=pipe, stdout=pipe, text=True) as process:  # noqa: ASYNC220
        try:
            assert process.stdout is not None
            metadata, bases = json.loads(process.stdout.readline())
            reader = Side("reader", 1, NixlConfig(posting_threads=posting_threads, bulk_bytes=1))
            remote = [Memory(base, SIZE) for base in bases]
            await reader.plane.add_remote_agent(AgentInfo("owner", base64.b64decode(metadata)), remote)
            await check_reads(reader, "owner", contents(2))
            found: dict[str, Any] = {**reader.plane.describe(), **reader.plane.statistics(), "exact": True}

            # An owner that is stopped sends nothing, so its death certainly finds the reads running.
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # noqa: ASYNC222
            local, there = pairs(TABLES[0], 5)
            for transfer_id in range(10, 14):
                reader.read(transfer_id, "owner", TABLES[0], local, there)
            while (now := reader.plane.statistics())["posts_handed"] > sum(  # noqa: ASYNC110 - it has no event
                now.get(f"poster{i}.posts", 0) for i in (1, 2)
            ):
                await asyncio.sleep(0)
            reader.news += reader.ended()
            found["while_stopped"] = {"news": len(reader.news), "running": reader.plane.statistics()["running"]}
            process.kill()
            found["after_kill"] = [[e.ending.value, e.peer_lost] for e in await reader.heard(4)]
            reader.read(20, "owner", TABLES[0], local, there)
            (ended,) = await reader.heard(1)
            found["next_post"] = [ended.ending.value, ended.peer_lost]
            reader.plane.remove_remote_agent("owner")
            found["left"] = {k: reader.plane.statistics()[k] for k in ("running", "in_doubt", "unreleased", "peers")}
            found["owner_stdout"] = process.stdout.read()
            reader.plane.close()
            return found
        finally:
            process.kill()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["owner"]:
            asyncio.run(_owner())
        case ["reader", posting_threads]:
            print(json.dumps(asyncio.run(_reader(int(posting_threads)))))
        case other:
            raise SystemExit(f"unknown role {other}")


# -- Metadata of agents -----------------------------------------------------------------------------------------------

POOL_BYTES = 1 << 16


class Owner:
    """A real agent with two regions."""

    def __init__(self, name: str = "owner") -> None:
        self.arrays = [np.zeros(POOL_BYTES, np.uint8) for _ in range(2)]
        self.memories = [Memory(a.ctypes.data, POOL_BYTES) for a in self.arrays]
        self.agent = Agent(nixl.load_nixl(), name, "UCX", nixl.DEFAULTS)
        self.agent.register(self.memories)
        self.metadata = self.agent.info().metadata

    @property
    def address_at(self) -> int:
        """Where UCX's worker address begins."""
        return self.metadata.index(b"|c", 40) + 2 + 8

    @property
    def key_at(self) -> int:
        """Where the last memory key begins."""
        return self.metadata.rindex(b"|", 0, -1) + 1 + 8 + 24


@pytest.fixture
def owner() -> Iterator[Owner]:
    each = Owner()
    yield each
    each.agent.close()


def mutations(metadata: bytes, count: int, seed: int) -> Iterator[bytes]:
    chosen = random.Random(seed)
    for _ in range(count):
        blob, at = bytearray(metadata), chosen.randrange(len(metadata))
        match chosen.randrange(5):
            case 0:
                blob[at] ^= 1 << chosen.randrange(8)
            case 1:
                for _ in range(chosen.randrange(1, 9)):
                    blob[chosen.randrange(len(blob))] = chosen.choice((0, 127, 255, chosen.randrange(256)))
            case 2:
                del blob[at : at + chosen.randrange(1, 30)]
            case 3:
                blob[at:at] = chosen.randbytes(chosen.randrange(1, 30))
            case _:
                blob[at : at + chosen.randrange(1, 9)] = chosen.randbytes(chosen.randrange(1, 9))
        yield bytes(blob)


def with_byte(blob: bytes, at: int, value: int) -> bytes:
    return blob[:at] + bytes([value]) + blob[at + 1 :]


def test_an_agents_own_metadata_is_known_and_can_have_another_name(owner: Owner) -> None:
    assert is_known(owner.metadata)
    again = renamed(owner.metadata, "owner", "söme other name")
    assert is_known(again)
    assert renamed(again, "söme other name", "owner") == owner.metadata


def test_metadata_that_would_end_the_process_is_refused_before_nixl_has_it(owner: Owner) -> None:
    reader = Owner("reader")
    try:
        for wrong, cause in (
            (b"", "does not begin"),
            (owner.metadata[:-1], "field"),
            (owner.metadata + b"x", "1 bytes follow"),
            (with_byte(owner.metadata, owner.address_at, 0x2F), "worker address is of a version"),
            (with_byte(owner.metadata, owner.metadata.index(b"|t\x04") + 2 + 8, 9), "of a kind"),
            (with_byte(owner.metadata, owner.key_at + 7, 0x40), "memory keys is incomplete"),
            (with_byte(owner.metadata, owner.key_at, 0xFF)[: owner.key_at + 3], "field"),
        ):
            with pytest.raises(
                BackendError, match=f"^NIXL refuses the metadata of owner, or would end the process: .*{cause}"
            ):
                reader.agent.load(AgentInfo("owner", wrong), owner.memories)
        with pytest.raises(BackendError, match="is of agent 'owner', but 'other' was announced"):
            reader.agent.load(AgentInfo("other", owner.metadata), owner.memories)
    finally:
        reader.agent.close()


def test_a_load_that_nixl_refuses_does_not_spoil_the_name(owner: Owner) -> None:
    """Inside NIXL it does: whoever lied about a rank's metadata first would have kept that rank away for ever."""
    reader = Owner("reader")
    nothing = owner.metadata[: owner.metadata.index(b"|n\x08") + 2 + 8] + bytes(8) + b"|"  # the connection is good
    try:
        with pytest.raises(BackendError, match=r"^NIXL refuses the metadata of owner: nixlNotFound"):
            reader.agent.load(AgentInfo("owner", nothing), owner.memories)
        reader.agent.load(AgentInfo("owner", owner.metadata), owner.memories)
        assert reader.agent.is_connected("owner")
    finally:
        reader.agent.close()


def test_no_mutation_ends_in_anything_but_a_refusal(owner: Owner) -> None:
    taken = 0
    for blob in mutations(owner.metadata, 20_000, 1):
        try:
            renamed(blob, "owner", "other")
            taken += 1
        except BackendError:
            pass
    assert 1000 < taken < 15_000  # what is UCX's own is opaque


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_thousands_of_mutations_end_no_process_but_one_that_tries_them(owner: Owner) -> None:
    taster, taken = Taster(NixlConfig(), "tries", None), 0
    for blob in (owner.metadata, *mutations(owner.metadata, 4000, 5), owner.metadata):
        try:
            await taster.try_out(AgentInfo("owner", blob), owner.memories)
            taken += 1
        except BackendError:
            if blob == owner.metadata:
                raise
        owner.agent.sweep()
    assert taken > 100
    assert taken + taster.num_refused == 4002
    await taster.quiesce()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "is_trusted", "tries"),
    [("auto", True, 0), ("auto", False, 1), ("always", True, 1), ("always", False, 1), ("never", False, 0)],
)
async def test_metadata_of_untrusted_peers_is_tried_first(
    owner: Owner, wanted: Any, is_trusted: bool, tries: int
) -> None:
    reader, before = Owner("reader"), children()
    config = NixlConfig(try_metadata=wanted, process="never", posting_threads=0)
    said: list[str] = []
    plane = choose_plane(EngineConfig(engine_id="e", nixl=config), reader.memories, "reads", said.append)
    await plane.start(reader.memories, lambda: None)
    try:
        await plane.add_remote_agent(AgentInfo("owner", owner.metadata, is_trusted), owner.memories)
        assert len(children() - before) == tries
        with pytest.raises(BackendError, match="NIXL refuses the metadata of liar"):
            await plane.add_remote_agent(AgentInfo("liar", owner.metadata[:-1], is_trusted), owner.memories)
        assert plane.statistics()["metadata_refused"] == tries
        assert not said
    finally:
        await plane.quiesce()
        plane.close()
        reader.agent.close()
    assert children() == before


async def test_the_end_of_a_process_that_tried_nobody_is_not_the_next_peers_fault(owner: Owner) -> None:
    taster = Taster(NixlConfig(), "tries", None)
    remote = AgentInfo("owner", owner.metadata)
    await taster.try_out(remote, owner.memories)
    assert taster._child is not None
    os.kill(taster._child.keeper.pid, signal.SIGKILL)
    async with asyncio.timeout(10.0):
        while taster._child.keeper.pid:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
    await taster.try_out(remote, owner.memories)
    assert taster.num_refused == 0
    await taster.quiesce()
