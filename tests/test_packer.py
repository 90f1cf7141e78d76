"""Packed copies on real NIXL: the thread that makes them, and reads of them into the places of their pieces."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from asynckv import ConfigError, Engine, EngineConfig, NixlConfig, PrefillRanks
from asynckv.config import MAX_PACKING
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic import packer
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.nic.packer import Packer
from asynckv.edges.sharing import shared_memory
from asynckv.edges.survivor.process import ServingPlane
from asynckv.errors import BackendError
from asynckv.geometry.gather import PACK_BYTES, Gathered, Packing, Ranges, check_recipe, recipe
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.layout import register_memory
from asynckv.ports import CopyMade, DataNews
from tests.engines import until
from tests.oracle import gather
from tests.test_nixl_edge import Bytes, Side, contents
from tests.test_packed_copies import plan, table
from tests.test_staging import NHD, side
from tests.world import Buffers

pytestmark = pytest.mark.nixl

QUIET = NixlConfig(posting_threads=0)
"""One loop, and no thread but the one that packs."""

ROWS = (
    (0, 512, 1024, 64, (2, 3), (256, 80)),
    (1, 8, 512, 8, (4,), (100,)),
    (1, 40_000, 999, 33, (), ()),
    (0, 0, 2048, 1, (2, 2, 2, 2), (9, 5, 3, 1)),
)


class Owned:
    """An owner's memory."""

    def __init__(self, seed: int) -> None:
        self.arrays: list[Bytes] = contents(seed)
        self.memories = [Memory(a.ctypes.data, a.nbytes) for a in self.arrays]


def gathered(*ids: int, rows: Any = ROWS) -> Gathered:
    sizes = [piece * int(np.prod(shape, dtype=np.int64)) for _, _, _, piece, shape, _ in rows]
    return Gathered(rows, (np.array(ids, np.int64), np.ones(len(ids), np.int64)), len(ids) * sum(sizes))


@pytest.fixture
async def packing() -> Any:
    owned, news = Owned(5), asyncio.Event()
    made = Packer(owned.memories, 3, asyncio.get_running_loop(), news.set)
    yield made, owned, news
    made.close()
    assert not pack_threads()


def pack_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asynckv packs"]


def slot_of(made: Packer, slot: int) -> bytes:
    return made._area[slot * PACK_BYTES : (slot + 1) * PACK_BYTES].tobytes()


@pytest.mark.parametrize(
    "ids", [(0,), (3, 4, 5), (5, 4, 3), (0, 2, 4), (1, 1, 1), (2, 3, 5, 4), (4, 0, 1, 2), (0, 1, 2, 3, 7, 6, 5, 4)]
)
async def test_pieces_are_gathered_whatever_the_order_of_blocks(packing: Any, ids: tuple[int, ...]) -> None:
    made, owned, news = packing
    before = [a.copy() for a in owned.arrays]
    want = gathered(*ids)
    made.pack(1, want)
    await asyncio.wait_for(news.wait(), 10)
    assert list(made.made) == [CopyMade(1)]
    copy = gather(want, owned).tobytes()
    assert len(copy) == want.num_bytes
    assert slot_of(made, 1) == copy.ljust(PACK_BYTES, b"\0")
    assert not any(slot_of(made, 0))
    assert not any(slot_of(made, 2))
    assert all(np.array_equal(a, b) for a, b in zip(owned.arrays, before, strict=True))


async def test_a_slot_may_be_full_to_its_last_byte(packing: Any) -> None:
    made, owned, news = packing
    rows = ((0, 0, 0, 64 * 1024, (), ()),)
    made.pack(2, gathered(*range(32), rows=rows))
    await asyncio.wait_for(news.wait(), 10)
    assert slot_of(made, 2) == owned.arrays[0].tobytes() * 32


async def test_the_memory_is_told_as_readers_need_it(packing: Any) -> None:
    made, _, _ = packing
    assert made.packing == Packing(made._area.ctypes.data, 3, PACK_BYTES)
    assert made.packing.memory == Memory(made._area.ctypes.data, 3 * PACK_BYTES)


async def test_a_copy_that_cannot_be_made_is_told_and_the_next_is_made(packing: Any) -> None:
    made, owned, _ = packing
    beyond = gathered(0, rows=((0, 60_000, 1024, 8192, (), ()),))
    far_beyond = gathered(1 << 31, rows=((0, 0, 1024, 8, (), ()),))
    no_memory = gathered(0, rows=((7, 0, 1024, 8, (), ()),))
    for slot, wrong in enumerate((beyond, far_beyond, no_memory)):
        made.pack(slot, wrong)
    made.pack(0, gathered(1, 2))
    await until(lambda: len(made.made) == 4)
    assert [news.slot for news in made.made] == [0, 1, 2, 0]
    assert [bool(news.cause) for news in made.made] == [True, True, True, False]
    assert "IndexError" in made.made[2].cause
    assert slot_of(made, 0)[: gathered(1, 2).num_bytes] == gather(gathered(1, 2), owned).tobytes()


async def test_no_thread_runs_before_the_first_copy(packing: Any) -> None:
    made, _, _ = packing
    assert not pack_threads()
    made.pack(0, gathered(1))
    assert len(pack_threads()) == 1
    made.pack(1, gathered(1))
    assert len(pack_threads()) == 1
    made.close()
    assert not pack_threads()


async def test_a_copy_without_a_thread_is_told_and_the_next_is_made(
    packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, news = packing

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        made.pack(1, gathered(1))
    await asyncio.wait_for(news.wait(), 10)
    assert made.wait(0.0)
    made.pack(2, gathered(1))
    await until(lambda: len(made.made) == 2)
    assert [(each.slot, bool(each.cause)) for each in made.made] == [(1, True), (2, False)]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold a copy just before it is made: events for that it is there, and that it may go on."""
    there, go_on, honest = threading.Event(), threading.Event(), Packer._gather

    def late(*args: Any) -> None:
        there.set()
        assert go_on.wait(10)
        honest(*args)

    monkeypatch.setattr(Packer, "_gather", late)
    yield there, go_on
    go_on.set()


async def test_memory_is_not_let_go_while_a_copy_is_being_made(
    packing: Any, held: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = packing
    there, go_on = held
    monkeypatch.setattr(packer, "CLOSE_S", 0.0)
    made.pack(0, gathered(1))
    made.pack(1, gathered(1))
    assert there.wait(10)
    with pytest.raises(BackendError, match="a packed copy is still being made"):
        made.close()
    await made.quiesce()
    assert pack_threads()
    go_on.set()
    monkeypatch.setattr(packer, "CLOSE_S", 10.0)
    await made.quiesce()
    made.close()
    assert [news.slot for news in made.made] == [0], "what had not begun is not made"


async def test_a_plane_that_closes_waits_for_the_copy_under_way(
    sides: list[Side], held: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Side("owner", 2, QUIET)
    sides.append(owner)
    there, go_on = held
    owner.plane.pack(0, gathered(1))
    assert there.wait(10)
    monkeypatch.setattr(packer, "CLOSE_S", 0.0)
    with pytest.raises(BackendError, match="still being made"):
        owner.plane.close()
    go_on.set()
    monkeypatch.setattr(packer, "CLOSE_S", 10.0)
    await owner.plane.quiesce()
    owner.plane.close()
    assert not pack_threads()


async def test_memory_for_copies_is_mapped_until_no_agent_serves_it(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Side("owner", 2, QUIET)
    sides.append(owner)
    assert owner.plane._packer is not None
    mapped, honest = weakref.ref(owner.plane._packer._area), Agent.close

    def refuse(agent: Agent) -> None:
        assert mapped() is not None
        raise BackendError("is still referred to")

    with monkeypatch.context() as patch:
        patch.setattr(Agent, "close", refuse)
        with pytest.raises(BackendError, match="still referred to"):
            owner.plane.close()
    assert mapped() is not None
    assert Agent.close is honest
    owner.plane.close()
    assert mapped() is None


def test_a_loop_that_is_gone_is_not_called() -> None:
    async def start() -> Packer:
        return Packer(owned.memories, 1, asyncio.get_running_loop(), lambda: None)

    owned = Owned(1)
    made = asyncio.run(start())
    made.pack(0, gathered(1))
    made.pack(0, gathered(2))
    made.stop()
    assert made.wait(10)
    made.close()


async def test_memory_for_copies_that_cannot_be_had_is_an_error_that_names_the_field() -> None:
    with pytest.raises(BackendError, match=r"no room for packed copies: .*; lower nixl.packing_bytes"):
        Packer([], 1 << 42, asyncio.get_running_loop(), lambda: None)
    with pytest.raises(ConfigError, match="packing_bytes"):
        NixlConfig(packing_bytes=MAX_PACKING + 1)
    assert MAX_PACKING // PACK_BYTES == 65_536


# -- two planes ------------------------------------------------------------------------------------------------------

HERE, THERE = side(NHD, 3, 8), side(NHD)
"""One head of eight: 256 bytes of each 2 KiB."""

OURS, THEIRS = [4, 5, 6, 9, 1, 2, 3], [1, 2, 7, 8, 10, 3, 4]
THREAD = NixlConfig(posting_threads=1, bulk_bytes=1)


class Two:
    """A reader and an owner with caches of these layouts."""

    def __init__(self, sides: list[Side], reader: NixlConfig, owner: NixlConfig = QUIET) -> None:
        self.ours, self.theirs = Buffers(HERE, 1), Buffers(THERE, 2)
        self.reader = Side("reader", 1, reader, arrays=self.ours.arrays)
        sides.append(self.reader)
        self.owner = Side("owner", 2, owner, arrays=self.theirs.arrays)
        sides.append(self.owner)
        self.table, self.ranges = table(HERE, THERE), Ranges(THERE)

    async def link(self) -> None:
        self.owner.plane.watch(True)
        await self.reader.plane.add_remote_agent(self.owner.agent, self.owner.memories)

    def reads(self, max_bytes: int = 1 << 30) -> list[ReadRequest]:
        return list(plan(self.table, OURS, THEIRS).posts(max_bytes, 1 << 20))

    async def make(self, read: ReadRequest, slot: int) -> None:
        number = len(self.owner.made)
        asked = check_recipe(recipe(read), self.ranges, np.sort(THEIRS), PACK_BYTES)
        self.owner.plane.pack(slot, asked)
        await until(lambda: len(self.owner.made) > number)
        assert self.owner.made[number] == CopyMade(slot)

    def post(self, number: int, read: ReadRequest) -> None:
        if (ended := self.reader.plane.post_read(TransferId(number), "owner", read)) is not None:
            self.reader.news.append(ended)

    def is_right(self) -> bool:
        return all(self.ours.head(a, 3) == self.theirs.head(b, 3) for a, b in zip(OURS, THEIRS, strict=True))


@pytest.mark.parametrize("config", [QUIET, THREAD], ids=["on the loop", "by a thread"])
@pytest.mark.parametrize("max_bytes", [1 << 30, 3 * 4096, 4096])
async def test_a_packed_copy_is_read_to_the_places_of_its_pieces(
    sides: list[Side], config: NixlConfig, max_bytes: int
) -> None:
    two = Two(sides, config)
    await two.link()
    others = [block for block in range(12) if block not in OURS]
    before = [two.ours.block(block) for block in others]
    reads = two.reads(max_bytes)
    packing = two.owner.agent.packing
    assert packing is not None
    slots = [packing.num_slots - 1 - number % packing.num_slots for number in range(len(reads))]
    for number, (read, slot) in enumerate(zip(reads, slots, strict=True)):
        await two.make(read, slot)
        two.post(number, read._replace(slot=slot))
        assert await two.reader.heard(1) == [TransferEnded(TransferId(number), Ending.DONE)]
    assert two.is_right()
    assert [two.ours.block(block) for block in others] == before
    found = two.reader.plane.statistics()
    assert found["posts"] == len(reads)
    assert found.get("posts_staged", 0) == found["running"] == 0


async def test_several_copies_are_read_at_once(sides: list[Side]) -> None:
    two = Two(sides, QUIET)
    await two.link()
    reads = two.reads(3 * 4096)
    assert len(reads) > 4
    for number, read in enumerate(reads):
        await two.make(read, number)
    for number, read in enumerate(reads):
        two.post(number, read._replace(slot=number))
    assert {(e.transfer_id, e.ending) for e in await two.reader.heard(len(reads))} == {
        (number, Ending.DONE) for number in range(len(reads))
    }
    assert two.is_right()


async def test_a_slot_is_used_again(sides: list[Side]) -> None:
    two = Two(sides, QUIET, NixlConfig(posting_threads=0, packing_bytes=1))
    await two.link()
    assert two.owner.agent.packing is not None
    assert two.owner.agent.packing.num_slots == 1
    for number, read in enumerate(two.reads(2 * 4096)):
        await two.make(read, 0)
        two.post(number, read._replace(slot=0))
        await two.reader.heard(1)
    assert two.is_right()


@pytest.mark.parametrize("why", ["no slot", "no memory"])
async def test_a_slot_that_the_owner_does_not_have_fails_the_read_alone(sides: list[Side], why: str) -> None:
    owner = NixlConfig(posting_threads=0, packing_bytes=0 if why == "no memory" else 1)
    two = Two(sides, NixlConfig(posting_threads=1), owner)
    await two.link()
    assert (two.owner.agent.packing is None) is (why == "no memory")
    before = [a.copy() for a in two.reader.arrays]
    (read,) = two.reads()
    two.post(1, read._replace(slot=40_000))
    (ended,) = await two.reader.heard(1)
    assert ended.ending is Ending.FAILED
    assert not ended.peer_lost
    assert all(np.array_equal(a, b) for a, b in zip(two.reader.arrays, before, strict=True))
    two.post(2, read)  # the owner makes no copy, so the reader reads the blocks
    assert await two.reader.heard(1) == [TransferEnded(TransferId(2), Ending.DONE)]
    assert two.is_right()


async def test_a_plane_without_memory_for_copies_has_no_thread_and_tells_none(sides: list[Side]) -> None:
    sides.append(Side("none", 1, NixlConfig(posting_threads=0, packing_bytes=0)))
    assert sides[-1].agent.packing is None
    await sides[-1].plane.quiesce()
    sides.append(Side("some", 1, QUIET))
    assert sides[-1].agent.packing is not None
    assert not pack_threads()


@pytest.mark.slow
async def test_a_serving_process_has_the_copies_as_well(sides: list[Side]) -> None:
    ours, theirs = Buffers(HERE, 1), Buffers(THERE, 2)
    shared = [np.frombuffer(shared_memory(array.nbytes), np.uint8) for array in theirs.arrays]
    for here, there in zip(shared, theirs.arrays, strict=True):
        here[:] = there
    memories = [Memory(array.ctypes.data, array.nbytes) for array in shared]
    owner, news = ServingPlane(QUIET, "served", NixlPlane(QUIET, "reads")), list[DataNews]()
    agent = await owner.start(memories, lambda: news.extend(owner.poll()))
    try:
        reader = Side("reader", 1, QUIET, arrays=ours.arrays)
        sides.append(reader)
        owner.watch(True)
        await reader.plane.add_remote_agent(agent, memories)
        assert agent.packing is not None
        slot = agent.packing.num_slots - 1
        (read,) = plan(table(HERE, THERE), OURS, THEIRS).posts(1 << 30, 1 << 20)
        owner.pack(slot, check_recipe(recipe(read), Ranges(THERE), np.sort(THEIRS), PACK_BYTES))
        await until(lambda: news == [CopyMade(slot)])
        ended = reader.plane.post_read(TransferId(1), agent.name, read._replace(slot=slot))
        assert (ended or (await reader.heard(1))[0]) == TransferEnded(TransferId(1), Ending.DONE)
        assert all(ours.head(a, 3) == theirs.head(b, 3) for a, b in zip(OURS, THEIRS, strict=True))
    finally:
        await owner.quiesce()
        owner.close()


@pytest.mark.slow
async def test_engines_read_by_packed_copies_where_a_reader_needs_one_head_of_each_token() -> None:
    """Everything at once, with the costs that are measured here."""
    layouts = [(NHD, 0, 1), *[(NHD, rank, 8) for rank in range(8)]]
    caches = [Buffers(side(*each, num_blocks=32, base=0), number) for number, each in enumerate(layouts)]
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for number, cache in enumerate(caches):
            memories = [Memory(a.ctypes.data, a.nbytes) for a in cache.arrays]
            layout = msgspec.structs.replace(cache.layout, memories=tuple(memories))
            config = EngineConfig(
                engine_id="decode" if number else "prefill",
                nixl=NixlConfig(posting_threads=1 if number else 0, staging_bytes=2 << 20),
            )
            engine = Engine(config, register_memory(layout, tuple(cache.arrays)))
            engines.append(await stack.enter_async_context(engine))
        owner, *readers = engines
        theirs, mine = list(range(3, 27)), list(range(26, 2, -1))
        params = PrefillRanks("prefill", [owner.endpoint]).make_params("r", [(0, theirs)], 24 * 16, written=True)
        lent = owner.lend(params)
        for engine in readers:
            await engine.pull("d", [(0, mine)], params)
        end = await lent.wait_released()
        assert (end.cause, end.owed) == ("released", ())
        for head, cache in enumerate(caches[1:]):
            assert all(cache.head(a, head) == caches[0].head(b, head) for a, b in zip(mine, theirs, strict=True))
        for engine in engines:
            engine.check_integrity()
        counters = owner.statistics().counters
        asked = sum(engine.statistics().counters.get("sent.pack", 0) for engine in readers)
        assert counters["copies.asked"] == counters["copies.made"] == asked >= 8
        assert counters.get("copies.refused", 0) == 0
