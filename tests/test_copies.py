"""The copy plane on real NIXL: bytes both ways by the tables' indices, order, cancellation, faults and the end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic import posters
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.copies import NixlCopies
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.tables import DescTable
from asynckv.ports import CopyOp, CopyPlane
from tests.engines import Polled, open_files
from tests.test_nixl_edge import HERE, TABLES, THERE, Meddler, contents, copied, request
from tests.test_posters import Gate, while_the_loop_stands
from tests.test_staged_reads import EVEN, STAGED, placed, rows

pytestmark = pytest.mark.nixl

PATIENCE_S = 10.0
INDICES = np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32)


class Tiers(Polled[TransferEnded]):
    """A copy plane between a near memory and two far ones of two ranges each."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.sides = {"near": contents(1), "pool": contents(2), "other": contents(3)}
        self.plane: CopyPlane = NixlCopies("tiers", **options)
        self.start()

    def start(self) -> None:
        near, *far = ([Memory(a.ctypes.data, a.nbytes) for a in arrays] for arrays in self.sides.values())
        self.plane.start(near, dict(zip(("pool", "other"), far, strict=True)), self._poll)

    def _poll(self) -> None:
        self.news += self.plane.poll()
        self.changed.set()


def move(seed: int, count: int = 7) -> ReadRequest:
    """Some pairs of blocks in all rows of a table, shuffled."""
    rng, table = np.random.default_rng(seed), TABLES[seed % 2]
    near, far = rng.permutation(HERE)[:count], rng.permutation(THERE)[:count]
    rows = np.arange(table.num_rows, dtype=np.int32)[:, None]
    local = (rows * HERE + near).ravel().astype(np.int32)
    remote = (rows * THERE + far).ravel().astype(np.int32)
    return request(table, local, remote)


def staged(seed: int) -> ReadRequest:
    local, remote = rows(0, EVEN, seed)
    return ReadRequest(STAGED, local, remote, int(STAGED.length[0]) * len(local), len(local))


Make = Callable[..., Tiers]


@pytest.fixture
def make(anyio_backend: str) -> Iterator[Make]:
    """Tiers that are closed in the end, whatever happened."""
    found: list[Tiers] = []

    def make_them(**options: Any) -> Tiers:
        found.append(Tiers(**options))
        return found[-1]

    yield make_them
    for tiers in found:
        tiers.plane.close()


def swapped(table: DescTable) -> DescTable:
    """The same table with its sides exchanged: what a write does to the far side is what a read does to this one's."""
    return DescTable(
        table.table_id, table.span, table.length, table.remote, table.local, table.remote_blocks, table.local_blocks
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("op", CopyOp)
async def test_blocks_come_and_go_by_the_indices_of_a_table(make: Make, op: CopyOp, threads: int) -> None:
    tiers = make(threads=threads)
    want = {each: [a.copy() for a in arrays] for each, arrays in tiers.sides.items()}
    for number, far in enumerate(("pool", "other")):
        piece = move(number)
        if op is CopyOp.READ:
            copied(want["near"], want[far], piece.table, piece.local, piece.remote)
        else:
            copied(want[far], want["near"], swapped(piece.table), piece.remote, piece.local)
        tiers.plane.post(TransferId(number), op, far, [piece])
    assert sorted(await tiers.heard(2)) == [TransferEnded(TransferId(n), Ending.DONE) for n in (0, 1)]
    for each, arrays in tiers.sides.items():
        assert all(map(np.array_equal, arrays, want[each])), each
    assert sum(tiers.plane.statistics()[f"bytes_{word}"] for word in ("read", "written")) == sum(
        move(n).num_bytes for n in (0, 1)
    )


async def test_a_move_of_nothing_ends_and_its_pieces_are_made_as_there_is_room(make: Make) -> None:
    tiers = make(window_bytes=1)
    taken: list[int] = []

    def pieces() -> Iterator[ReadRequest]:
        for number in range(20):
            taken.append(number)
            yield move(number)

    tiers.plane.post(TransferId(1), CopyOp.WRITE, "pool", pieces())
    assert len(taken) == 1
    tiers.plane.post(TransferId(2), CopyOp.READ, "pool", [])
    assert {ended.ending for ended in await tiers.heard(2)} == {Ending.DONE}
    assert len(taken) == 20
    assert tiers.plane.statistics()["running"] == tiers.plane.statistics()["backlog_bytes"] == 0


async def test_what_is_read_goes_before_what_is_written_and_the_oldest_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tiers = make(window_bytes=1)
    for number, op in enumerate((CopyOp.WRITE, CopyOp.WRITE, CopyOp.READ, CopyOp.READ)):
        tiers.plane.post(TransferId(number), op, "pool", [move(0)] * 2)
    gate.leave.set()
    assert [ended.transfer_id for ended in await tiers.heard(4)] == [2, 3, 0, 1]


async def test_a_cancelled_move_ends_when_what_was_posted_has(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    tiers = make(window_bytes=1)
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)] * 5)
    tiers.plane.post(TransferId(2), CopyOp.READ, "pool", [move(0)] * 5)
    assert gate.entered.wait(PATIENCE_S)
    for number in (1, 2, 3):
        tiers.plane.cancel(TransferId(number))
    assert await tiers.heard(1) == [TransferEnded(TransferId(2), Ending.FAILED, "cancelled")]
    assert tiers.plane.poll() == []  # the first is in NIXL still
    gate.leave.set()
    assert await tiers.heard(1) == [TransferEnded(TransferId(1), Ending.FAILED, "cancelled")]
    assert tiers.plane.statistics()["pieces"] == 1


async def test_what_a_cancelled_move_has_handed_over_is_not_copied_any_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tiers = make()
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)] * 5)
    tiers.plane.post(TransferId(2), CopyOp.WRITE, "pool", [move(0)] * 5)
    assert gate.entered.wait(PATIENCE_S)
    assert tiers.plane.statistics()["pieces"] == 10
    for number in (1, 2):
        tiers.plane.cancel(TransferId(number))
    gate.leave.set()
    assert sorted(await tiers.heard(2)) == [TransferEnded(TransferId(n), Ending.FAILED, "cancelled") for n in (1, 2)]
    counts = tiers.plane.statistics()
    assert (counts["bytes_read"], counts["bytes_written"]) == (move(0).num_bytes, 0)  # the one that had begun
    assert counts["backlog_bytes"] == 0


async def test_every_piece_is_a_copy_of_its_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # The size of a piece bounds how long a cancelled move is still copied.
    gate = Gate(monkeypatch)
    tiers = make()
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)] * 5)
    gate.leave.set()
    assert await tiers.heard(1) == [TransferEnded(TransferId(1), Ending.DONE)]
    assert len(gate.posted) == 5


async def test_what_was_copied_before_its_move_was_cancelled_is_told_as_done(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it was handed over and has begun: there is nothing left to cancel."""
    gate = Gate(monkeypatch)
    tiers = make()
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)])
    assert gate.entered.wait(PATIENCE_S)
    tiers.plane.cancel(TransferId(1))
    gate.leave.set()
    assert await tiers.heard(1) == [TransferEnded(TransferId(1), Ending.DONE)]


async def test_what_had_ended_when_the_plane_was_closed_is_told_as_it_ended(make: Make) -> None:
    tiers = make()
    assert isinstance(tiers.plane, NixlCopies)
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)])
    (poster,) = tiers.plane._posters
    while not tiers.plane._posters.inbox:  # nothing is awaited: the loop does not hear of it before
        poster.wait(0.001)
    tiers.plane.close()
    assert tiers.plane.poll() == [TransferEnded(TransferId(1), Ending.DONE)]


async def test_what_cannot_be_posted_fails_by_itself(make: Make) -> None:
    tiers = make()
    outside = replace(TABLES[1], length=TABLES[1].length * 1000)

    def broken() -> Iterator[ReadRequest]:
        yield move(0)
        raise RuntimeError("no more")

    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0), request(outside, *INDICES), move(0)])
    tiers.plane.post(TransferId(2), CopyOp.READ, "nowhere", [move(0)])
    tiers.plane.post(TransferId(3), CopyOp.READ, "pool", broken())
    tiers.plane.post(TransferId(4), CopyOp.READ, "pool", [move(0)])
    heard = {ended.transfer_id: ended for ended in await tiers.heard(4)}
    assert [heard[TransferId(n)].ending for n in (1, 2, 3, 4)] == [
        Ending.REFUSED,
        Ending.FAILED,
        Ending.FAILED,
        Ending.DONE,
    ]
    assert "nowhere" in heard[TransferId(2)].cause
    assert "no more" in heard[TransferId(3)].cause


async def test_a_move_in_doubt_is_told_once_and_has_failed_when_its_bytes_are_settled(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = threading.Event()
    post, sweep = Agent.post, Agent.sweep
    doubtful: list[TransferId] = []

    def doubted(agent: Agent, number: TransferId, *args: Any) -> TransferEnded | None:
        if number > 2:
            return post(agent, number, *args)
        doubtful.append(number)
        return TransferEnded(number, Ending.IN_DOUBT, f"trouble {number}")

    def later(agent: Agent) -> list[TransferEnded]:
        ended = [TransferEnded(n, Ending.DONE) for n in doubtful] if settled.is_set() else []
        del doubtful[: len(ended)]
        return sweep(agent) + ended

    monkeypatch.setattr(Agent, "post", doubted)
    monkeypatch.setattr(Agent, "sweep", later)
    monkeypatch.setattr(Agent, "is_busy", property(lambda agent: True))
    tiers = make()
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)] * 2)
    tiers.plane.post(TransferId(2), CopyOp.READ, "pool", [move(0)])
    assert await tiers.heard(2) == [
        TransferEnded(TransferId(1), Ending.IN_DOUBT, "trouble 1"),
        TransferEnded(TransferId(2), Ending.DONE),
    ]
    assert tiers.plane.statistics()["in_doubt"] == 1
    settled.set()
    assert await tiers.heard(1) == [TransferEnded(TransferId(1), Ending.FAILED, "trouble 1")]
    assert tiers.plane.statistics()["backlog_bytes"] == 0


async def test_what_a_staged_load_in_doubt_writes_late_is_in_a_slot(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posters, "PATIENCE_S", 60.0)  # no read waits for a slot in doubt
    tiers = make()
    assert isinstance(tiers.plane, NixlCopies)
    (poster,) = tiers.plane._posters
    stage, raw = poster.agent.stage, poster.agent._raw
    assert stage is not None
    want = [a.copy() for a in tiers.sides["near"]]
    settled = threading.Event()

    def says(handle: int) -> int:
        return raw.getXferStatus(handle) if settled.is_set() else 1 // 0

    poster.agent._raw = Meddler(raw, postXferReq=lambda *of: int(raw.postXferReq(*of)) or 1 // 0, getXferStatus=says)
    for number in (1, 2):
        tiers.plane.post(TransferId(number), CopyOp.READ, "pool", [staged(number)])
    failed = await tiers.heard(2)
    assert {(e.transfer_id, e.ending) for e in failed} == {(1, Ending.FAILED), (2, Ending.FAILED)}
    assert (stage.slots.num_in_use, tiers.plane.statistics()["in_doubt"]) == (2, 2)
    assert tiers.plane.statistics()["backlog_bytes"] == 0
    poster.agent._raw = Meddler(raw, getXferStatus=says)
    # No slot is left for the same tier, so its pieces are read one by one.
    tiers.plane.post(TransferId(3), CopyOp.READ, "pool", [staged(3)])
    assert await tiers.heard(1) == [TransferEnded(TransferId(3), Ending.DONE)]
    placed(want, tiers.sides["pool"], *rows(0, EVEN, 3))
    assert all(map(np.array_equal, tiers.sides["near"], want))
    settled.set()
    while_the_loop_stands(lambda: stage.slots.num_in_use == 0)
    tiers.plane.post(TransferId(4), CopyOp.READ, "pool", [staged(4)])
    assert await tiers.heard(1) == [TransferEnded(TransferId(4), Ending.DONE)]
    placed(want, tiers.sides["pool"], *rows(0, EVEN, 4))
    assert all(map(np.array_equal, tiers.sides["near"], want))
    assert tiers.plane.statistics()["in_doubt"] == len(stage._detached) == len(stage._direct) == 0


async def test_a_thread_that_breaks_fails_what_it_had_and_all_that_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(agent: Agent, *args: Any) -> None:
        raise RuntimeError("broken")

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    tiers = make()
    with monkeypatch.context() as patch:
        patch.setattr(Agent, "post", breaks)
        tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)])
        assert [ended.ending for ended in await tiers.heard(2)] == [Ending.IN_DOUBT, Ending.FAILED]
    tiers.plane.post(TransferId(2), CopyOp.READ, "pool", [move(0)])
    (ended,) = await tiers.heard(1)
    assert (ended.ending, "has ended" in ended.cause) == (Ending.FAILED, True)
    assert tiers.plane.statistics()["threads"] == 0
    assert [context["message"] for context in reported] == ["a copying thread broke"]
    tiers.plane.close()
    tiers.start()
    tiers.plane.post(TransferId(3), CopyOp.READ, "pool", [move(0)])
    assert (await tiers.heard(1))[0].ending is Ending.DONE


async def test_closing_ends_what_waits_and_another_start_works(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    tiers = make(window_bytes=1)
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)] * 5)
    tiers.plane.post(TransferId(2), CopyOp.WRITE, "pool", [move(0)] * 5)
    assert gate.entered.wait(PATIENCE_S)
    async with anyio.create_task_group() as group:
        group.start_soon(tiers.plane.quiesce)
        await anyio.lowlevel.checkpoint()
        gate.leave.set()
    tiers.plane.close()
    tiers.plane.close()
    assert {ended.ending for ended in [*tiers.news, *tiers.plane.poll()]} == {Ending.FAILED}
    tiers.news.clear()
    tiers.plane.post(TransferId(3), CopyOp.READ, "pool", [move(0)])
    (ended,) = tiers.plane.poll()
    assert ended.ending is Ending.FAILED
    tiers.start()
    with pytest.raises(BackendError, match="close"):
        tiers.start()
    tiers.plane.post(TransferId(4), CopyOp.READ, "pool", [move(0)])
    assert await tiers.heard(1) == [TransferEnded(TransferId(4), Ending.DONE)]


async def test_what_is_set_for_the_network_is_not_for_copies(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    before = open_files()
    tiers = make()
    tiers.plane.post(TransferId(1), CopyOp.READ, "pool", [move(0)])
    assert await tiers.heard(1) == [TransferEnded(TransferId(1), Ending.DONE)]
    assert not any("socket:" in each for each in open_files() - before)
    assert os.environ["UCX_TLS"] == "tcp"


async def test_memory_that_nixl_refuses_is_refused_at_the_start(anyio_backend: str) -> None:
    plane = NixlCopies("refused")
    with pytest.raises(BackendError, match="cannot register"):
        plane.start([Memory(0, 1 << 40, "cuda")], {}, lambda: None)
    plane.close()
