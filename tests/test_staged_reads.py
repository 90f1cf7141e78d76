"""Staged reads on real NIXL: bytes, slots, detached reads, and what becomes of a slot after trouble."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from asynckv import Engine, EngineConfig, PrefillRanks, shared_memory
from asynckv.config import NixlConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic import posters, staging
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.nic.staging import Stage, item_bytes
from asynckv.errors import BackendError
from asynckv.geometry.layout import Layout, Memory
from asynckv.geometry.staging import SLOT_BYTES, Box
from asynckv.geometry.tables import DescTable, Span
from asynckv.layout import register_memory
from asynckv.offload import Offload, OffloadConfig
from scripts.bench.versus.workload import minor_faults
from tests.test_nixl_edge import ALL_BULK, HERE, TABLES, THERE, Bytes, Indices, Meddler, Side, check_reads, link, pairs
from tests.test_posters import Gate, while_the_loop_stands
from tests.test_staging import HND, NHD
from tests.world import make_layout

pytestmark = pytest.mark.nixl

THREAD = NixlConfig(posting_threads=1, staging_bytes=4 * SLOT_BYTES)

STAGED = DescTable(
    11,
    Span(0, 0, 0, 0, 1),
    np.array([512, 512, 1024]),
    # Of the first memory, and of the second: pieces of a block lie in between those of the others.
    np.array([[0, 64, 1024], [0, 64 + 512, 1024], [1, 0, 32]]),
    np.array([[0, 0, 512], [1, 8192, 1024], [0, 30000, 1024]]),
    HERE,
    THERE,
    (Box(64, (2, 4), (256, 64), (64, 128), 0), Box(128, (2,), (128,), (256,), 128), Box(32, (8,), (1024,), (128,), 96)),
    np.arange(3, dtype=np.int32),
)
EVEN = 2
"""Rows of one length: those of one read follow each other."""


def rows(first: int, count: int, seed: int) -> tuple[Indices, Indices]:
    """Descriptors of some rows of the table, with shuffled blocks that are the same for each."""
    local, remote = (x.reshape(3, HERE)[first : first + count].ravel() for x in pairs(STAGED, seed))
    return local, remote


def placed(mine: list[Bytes], theirs: list[Bytes], local: Indices, remote: Indices) -> None:
    """Do naively what a staged read has to do."""
    for i, j in zip(local.tolist(), remote.tolist(), strict=True):
        (row, block), (_, block_there) = divmod(i, HERE), divmod(j, THERE)
        (memory, offset, stride), (other, there, step) = STAGED.local[row].tolist(), STAGED.remote[row].tolist()
        piece, shape, in_local, in_run, skip = STAGED.box(row)
        for at in np.ndindex(*shape):
            to = offset + block * stride + int(np.dot(at, in_local))
            source = there + block_there * step + skip + int(np.dot(at, in_run))
            mine[memory][to : to + piece] = theirs[other][source : source + piece]


async def check_read(reader: Side, owner: Side, number: int, local: Indices, remote: Indices) -> None:
    """Have a staged read done, and find what it has to place in its places and nothing else changed."""
    want = [a.copy() for a in reader.arrays]
    placed(want, owner.arrays, local, remote)
    reader.read(number, "owner", STAGED, local, remote)
    assert await reader.heard(1) == [TransferEnded(TransferId(number), Ending.DONE)]
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))


async def staged(sides: list[Side], config: NixlConfig = THREAD) -> tuple[Side, Side]:
    reader, owner = await link(sides, config)
    assert reader.plane.costs is not None
    return reader, owner


def slots(reader: Side) -> int:
    """Return how many slots are in use."""
    (poster,) = reader.plane._posters
    assert poster.agent.stage is not None
    return poster.agent.stage.slots.num_in_use


@pytest.mark.parametrize(("chunk", "item"), [(SLOT_BYTES, 1024), (SLOT_BYTES, 16), (12_288, 32), (2048, 64), (1024, 8)])
async def test_pieces_are_placed_and_no_other_byte_is_written(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, chunk: int, item: int
) -> None:
    monkeypatch.setattr(staging, "item_bytes", lambda piece: min(piece, item))  # each divides all longer pieces
    reader, owner = await staged(sides)
    monkeypatch.setattr(staging, "SLOT_BYTES", chunk)  # of slots that are larger
    for number, (first, count) in enumerate([(0, EVEN), (EVEN, 1), (0, 1), (1, 1)]):
        await check_read(reader, owner, number, *rows(first, count, number))
    assert slots(reader) == 0


def test_block_ids_as_a_slice_name_the_same_blocks_in_the_same_order() -> None:
    blocks = np.arange(5)
    for size in range(1, 5):
        for ids in itertools.permutations(range(5), size):
            assert np.array_equal(blocks[staging.as_index(np.array(ids))], ids)


async def test_costs_are_measured_where_reads_can_be_staged(sides: list[Side]) -> None:
    reader, owner = await staged(sides)
    costs = reader.plane.costs
    assert costs is not None
    assert costs.slot_bytes == SLOT_BYTES
    # A descriptor costs more than a byte, and no less than nothing.
    assert 0 < costs.read_s < 1e-6
    assert 0 < costs.place_s < 1e-6
    assert 0 <= costs.descriptor_s < 1e-3
    assert owner.plane.costs is None  # it has no posting thread
    sides.append(Side("tiny", 3, NixlConfig(posting_threads=1, staging_bytes=1)))
    assert sides[-1].plane.statistics()["staging_slots"] == 1
    for config in (NixlConfig(posting_threads=1, staging_bytes=0), NixlConfig(posting_threads=0)):
        sides.append(Side(f"other-{config.posting_threads}", 3, config))
        assert sides[-1].plane.costs is None


async def test_what_is_detached_before_its_post_reads_nothing(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = await staged(sides)
    before = [a.copy() for a in reader.arrays]
    gate = Gate(monkeypatch)
    for number in (1, 2):
        reader.read(number, "owner", STAGED, *rows(0, EVEN, number))
    assert gate.entered.wait(10)
    assert reader.plane.detach(TransferId(1))
    assert reader.plane.detach(TransferId(2))
    assert not reader.plane.detach(TransferId(3))
    gate.leave.set()
    assert {(e.transfer_id, e.ending) for e in await reader.heard(2)} == {(1, Ending.FAILED), (2, Ending.FAILED)}
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, before, strict=True))
    (poster,) = reader.plane._posters
    assert poster.agent.stage is not None
    assert not poster.agent.stage._detached  # nothing is remembered of what has ended
    assert slots(reader) == 0


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold a thread just before it places what has landed: events for that it is there, and that it may go on."""
    there, go_on, place = threading.Event(), threading.Event(), Stage.place

    def held(*args: object) -> bool:
        there.set()
        assert go_on.wait(10)
        return place(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Stage, "place", held)
    yield there, go_on
    go_on.set()


async def test_what_has_landed_is_not_placed_once_it_is_detached(
    sides: list[Side], arriving: tuple[threading.Event, threading.Event]
) -> None:
    reader, owner = await staged(sides)
    before = [a.copy() for a in reader.arrays]
    there, go_on = arriving
    reader.read(1, "owner", STAGED, *rows(0, EVEN, 1))
    while not there.is_set():
        owner._poll()
    assert reader.plane.detach(TransferId(1))
    reader.arrays[0][:] = before[0][:] = 7  # the blocks are the caller's again
    go_on.set()
    assert [(e.transfer_id, e.ending) for e in await reader.heard(1)] == [(1, Ending.FAILED)]
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, before, strict=True))
    await check_read(reader, owner, 2, *rows(0, EVEN, 1))  # the slot serves the next read


@pytest.mark.parametrize(
    ("method", "cause"), [("_pieces", "it cannot be cut into chunks"), ("place", "its pieces could not be placed")]
)
async def test_a_placement_that_raises_fails_its_read_alone(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, method: str, cause: str
) -> None:
    reader, owner = await staged(sides)

    def raises(*_: object) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Stage, method, raises)
        reader.read(1, "owner", STAGED, *rows(0, EVEN, 1))
        [ended] = await reader.heard(1)
    assert ended.ending is Ending.FAILED
    assert ended.cause == f"{cause}: MemoryError('planted')"
    assert slots(reader) == 0
    await check_read(reader, owner, 2, *rows(0, EVEN, 2))


async def test_in_doubt_a_staged_read_is_detached_and_keeps_its_slot(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posters, "PATIENCE_S", 60.0)
    reader, owner = await staged(sides)
    (poster,) = reader.plane._posters
    want = [a.copy() for a in reader.arrays]
    # Nobody turns the owner's agent, so no connection is made, and nothing ends.
    for number in (1, 2, 3):
        reader.read(number, "owner", STAGED, *rows(0, EVEN, number))
    while_the_loop_stands(lambda: len(poster.agent.running) == 2)  # no more slots than are free
    assert slots(reader) == 2
    assert reader.plane.detach(TransferId(3))
    raw = poster.agent._raw
    poster.agent._raw = Meddler(raw, getXferStatus=lambda handle: 1 // 0)
    while_the_loop_stands(lambda: len(reader.plane._posters.inbox) == 3)
    # The third waits no longer, because no slot will come free; it was detached, so it is not even read.
    endings = {1: Ending.DETACHED, 2: Ending.DETACHED, 3: Ending.FAILED}
    assert {e.transfer_id: e.ending for e in reader.ended()} == endings
    assert (reader.plane.statistics()["running"], reader.plane.statistics()["in_doubt"]) == (0, 2)
    assert slots(reader) == 2
    poster.agent._raw = raw
    # They end after all: nothing is placed, and the slots serve again.
    assert {(e.transfer_id, e.ending) for e in await reader.heard(2)} == {(n, Ending.FAILED) for n in (1, 2)}
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))
    assert slots(reader) == reader.plane.statistics()["in_doubt"] == 0
    await check_read(reader, owner, 4, *rows(0, EVEN, 4))


async def test_a_staged_read_from_a_process_that_is_gone_gives_its_slot_back(sides: list[Side]) -> None:
    reader, _ = await staged(sides)
    (poster,) = reader.plane._posters
    reader.read(1, "owner", STAGED, *rows(0, EVEN, 1))
    while_the_loop_stands(lambda: poster.agent.running)
    poster.agent._lost = ZeroDivisionError
    poster.agent._raw = Meddler(poster.agent._raw, getXferStatus=lambda handle: 1 // 0)
    [ended] = await reader.heard(1)
    assert (ended.ending, ended.peer_lost) == (Ending.FAILED, True)
    assert slots(reader) == 0


async def test_without_a_slot_for_long_a_read_is_direct_and_cannot_be_detached(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posters, "PATIENCE_S", 0.0)
    reader, owner = await staged(sides)
    (poster,) = reader.plane._posters
    want = [a.copy() for a in reader.arrays]
    for number in (1, 2, 3):
        reader.read(number, "owner", STAGED, *rows(0, EVEN, 7))
    while_the_loop_stands(lambda: len(poster.agent.running) == 3)
    assert slots(reader) == 2
    assert [reader.plane.detach(TransferId(number)) for number in (1, 2, 3)] == [True, True, False]
    placed(want, owner.arrays, *rows(0, EVEN, 7))
    news = {e.transfer_id: e.ending for e in await reader.heard(3)}
    assert news == {1: Ending.FAILED, 2: Ending.FAILED, 3: Ending.DONE}
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))
    assert poster.agent.stage is not None
    assert not poster.agent.stage._direct


async def test_a_direct_read_is_not_detached(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = await link(sides, THREAD)
    gate = Gate(monkeypatch)
    reader.read(1, "owner", TABLES[0], *pairs(TABLES[0], 1))  # on the loop
    reader.plane._config = ALL_BULK
    reader.read(2, "owner", TABLES[0], *pairs(TABLES[0], 1))
    assert gate.entered.wait(10)
    assert not reader.plane.detach(TransferId(1))
    assert not reader.plane.detach(TransferId(2))
    gate.leave.set()
    assert {e.ending for e in await reader.heard(2)} == {Ending.DONE}


async def test_reads_wait_for_slots_and_all_are_done(sides: list[Side]) -> None:
    reader, owner = await staged(sides, NixlConfig(posting_threads=1, staging_bytes=2 * SLOT_BYTES))
    (poster,) = reader.plane._posters
    want = [a.copy() for a in reader.arrays]
    reads = [rows(n % EVEN, 1, 7) for n in range(6)]  # each row three times, with the same blocks
    for number, (local, remote) in enumerate(reads):
        placed(want, owner.arrays, local, remote)
        reader.read(number, "owner", STAGED, local, remote)
    while_the_loop_stands(lambda: poster.agent.running and sum(len(line.posts) for line in poster._lines.values()) == 5)
    assert slots(reader) == 1
    assert {(e.transfer_id, e.ending) for e in await reader.heard(6)} == {(n, Ending.DONE) for n in range(6)}
    assert all(np.array_equal(a, b) for a, b in zip(reader.arrays, want, strict=True))


async def test_a_thread_that_breaks_fails_what_waits_for_a_slot(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)
    reader, owner = await staged(sides)
    (poster,) = reader.plane._posters
    for number in (1, 2, 3):
        reader.read(number, "owner", STAGED, *rows(0, EVEN, number))
    while_the_loop_stands(lambda: len(poster._lines) == 1)
    monkeypatch.setattr(poster, "_ask", lambda *_: 1 // 0)
    while_the_loop_stands(lambda: not poster._thread.is_alive())
    news = [(e.transfer_id, e.ending) for e in reader.ended()]
    assert [ending for transfer_id, ending in news if transfer_id == 3] == [Ending.FAILED]
    assert [ending for transfer_id, ending in news if transfer_id == 1] == [Ending.IN_DOUBT, Ending.FAILED]
    # The loop reads piece by piece from here on.
    reader.news.clear()
    await check_read(reader, owner, 4, *rows(0, EVEN, 4))


async def test_a_trial_read_that_takes_too_long_leaves_all_reads_direct(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "time_read", lambda *_: math.inf)
    reader, owner = await link(sides, NixlConfig(posting_threads=2))
    assert reader.plane.costs is None
    assert reader.plane.statistics()["staging_slots"] == 16  # of the first thread, and no table is staged
    assert reader.plane.describe()["staged_reads"].startswith("none: ")
    await check_reads(reader, "owner", owner.arrays)


def test_staging_memory_that_cannot_be_had_is_an_error_that_names_the_field() -> None:
    plane = NixlPlane(NixlConfig(posting_threads=1, staging_bytes=1 << 50), "greedy")
    with pytest.raises(BackendError, match=r"of staging memory cannot be had: .*; lower nixl.staging_bytes"):
        asyncio.run(plane.start([], lambda: None))
    plane.close()


@pytest.mark.parametrize(
    ("piece", "item"), [(32, 32), (256, 256), (1000, 1000), (1152, 576), (4096, 1024), (1031, 1031), (2062, 2062)]
)
def test_long_pieces_are_copied_in_equal_items(piece: int, item: int) -> None:
    assert item_bytes(piece) == item


# -- Page faults of the process that copies ---------------------------------------------------------------------------

BLOCKS = 40
BLOCK_BYTES = 512 << 10  # 16 layers, keys and values of 16 KiB each
COUNT = (8 << 20) // BLOCK_BYTES
MOST_FAULTS = 300  # 8 MiB of fresh memory take 2,048


class Rank:
    """An engine whose KV cache is as fresh as `shared_memory` gives it."""

    def __init__(self, engine_id: str, layout: Layout) -> None:
        self.arrays = [np.frombuffer(shared_memory(m.length), np.uint8) for m in layout.memories]
        memories = tuple(Memory(a.ctypes.data, a.nbytes) for a in self.arrays)
        registration = register_memory(msgspec.structs.replace(layout, memories=memories), tuple(self.arrays))
        self.engine = Engine(EngineConfig(engine_id=engine_id), registration)

    def blocks(self, ids: list[int], **shape: int) -> list[npt.NDArray[np.uint8]]:
        return [a.reshape(2, BLOCKS, *shape.values(), -1)[:, ids] for a in self.arrays]

    def fill(self, ids: list[int]) -> None:
        rng = np.random.default_rng(len(ids))
        for array in self.arrays:
            part = array.reshape(2, BLOCKS, -1)
            part[:, ids] = rng.integers(0, 256, part[:, ids].shape, np.uint8)


def layout(**more: Any) -> Layout:
    return make_layout(num_blocks=BLOCKS, block_size=16, layers=16, num_heads=8, head_dim=64, **more)


def is_same(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], order: tuple[str, ...]) -> bool:
    if order == HND:
        ours = ours.reshape(2, -1, 8, 16, 128).swapaxes(2, 3)
    return np.array_equal(ours.ravel(), theirs.ravel())


@pytest.mark.slow
@pytest.mark.parametrize("order", [NHD, HND], ids=["direct", "staged"])
async def test_the_first_large_pull_waits_for_no_page(order: tuple[str, ...]) -> None:
    prefill, decode = Rank("prefill", layout()), Rank("decode", layout(order=order))
    theirs, mine = list(range(1, 1 + COUNT)), list(range(20, 20 + COUNT))
    prefill.fill([0, *theirs])
    async with prefill.engine, decode.engine:
        group = PrefillRanks("prefill", [prefill.engine.endpoint])
        for name, there, here in (("warm", [0], [0]), ("first", theirs, mine)):
            params = group.make_params(name, [(0, there)], 16 * len(there), written=True)
            prefill.engine.lend(params)
            before = minor_faults()
            result = await decode.engine.pull(name, [(0, here)], params)
            taken = minor_faults() - before
        assert result.num_bytes == COUNT * BLOCK_BYTES
        assert bool(decode.engine.statistics().counters["data.posts_staged"]) is (order == HND)
    assert taken < MOST_FAULTS
    assert all(is_same(a, b, order) for a, b in zip(decode.blocks(mine), prefill.blocks(theirs), strict=True))


@pytest.mark.slow
async def test_the_first_large_load_waits_for_no_page() -> None:
    side = Rank("worker", layout())
    stored, loaded = list(range(1, 1 + COUNT)), list(range(20, 20 + COUNT))
    side.fill([0, *stored])
    offload = Offload(OffloadConfig(model="toy", hash_tokens=16, host_bytes=2 * COUNT * BLOCK_BYTES), side.engine)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(side.engine)
        await stack.enter_async_context(offload)
        for name, of, to in (("warm", [0], [19]), ("first", stored, loaded)):
            hashes = [f"{name}-{i}" for i in of]
            await offload.store(name, [(0, of)], hashes)
            before = minor_faults()
            await offload.load(f"{name}-again", [(0, to)], hashes, num_tokens=16 * len(of))
            taken = minor_faults() - before
    assert taken < MOST_FAULTS
    assert all(map(np.array_equal, side.blocks(loaded), side.blocks(stored)))
