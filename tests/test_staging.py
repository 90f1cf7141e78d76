"""Staged reads: when they are chosen, what they read and place, their slots, and what becomes of detached ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asynckv.config import EngineConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.pull import Pull, PullState
from asynckv.core.slots import Slots
from asynckv.core.types import Reason, TransferId
from asynckv.geometry.kept import kept_tables
from asynckv.geometry.layout import Layout
from asynckv.geometry.match import assign
from asynckv.geometry.packed import placed as shelved
from asynckv.geometry.packed import record_form
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import WITHIN, Box, ReadCosts, runs
from asynckv.geometry.tables import DescTable, PeerTables
from tests.oracle import STAGED
from tests.world import Rank, World, make_layout

LOCAL = ReadCosts(descriptor_s=2.2e-6, read_s=0.25e-9, place_s=0.25e-9, slot_bytes=1 << 20)
"""As measured over CMA."""

NHD = ("kv", "block", "token", "head", "dim")
HND = ("kv", "block", "head", "token", "dim")


def side(order: Sequence[str], rank: int = 0, size: int = 1, **more: Any) -> Layout:
    """Eight heads of 128 elements of 2 bytes, in blocks of 16 tokens: 4 KiB per head and block."""
    kwargs = {"num_heads": 8, "head_dim": 128, "block_size": 16, "layers": 2} | more
    return make_layout(tp_rank=rank, tp_size=size, order=order, **kwargs)


def tables(here: Layout, there: Sequence[Layout], costs: ReadCosts | None = LOCAL) -> list[PeerTables]:
    ids = itertools.count(1)
    shares = zip(there, assign(here, there), strict=True)
    return [PeerTables(here, other, some, ids, costs) for other, some in shares if some]


def table(here: Layout, *there: Layout, costs: ReadCosts | None = LOCAL) -> DescTable:
    return tables(here, there, costs)[0].regular[0]


@pytest.mark.parametrize(
    ("here", "there", "length", "box", "over"),
    [
        pytest.param(
            side(HND), [side(NHD)], 32768, Box(256, (16, 8), (256, 4096), (2048, 256), 0), 1.0, id="nhd-to-hnd"
        ),
        pytest.param(
            side(NHD), [side(HND)], 32768, Box(256, (8, 16), (256, 2048), (4096, 256), 0), 1.0, id="hnd-to-nhd"
        ),
        pytest.param(
            side(NHD),
            [side(NHD, 0, 2), side(NHD, 1, 2)],
            16384,
            Box(1024, (16,), (2048,), (1024,), 0),
            1.0,
            id="2-to-1",
        ),
        pytest.param(side(NHD, 1, 2), [side(NHD)], 32768, Box(1024, (16,), (1024,), (2048,), 1024), 2.0, id="1-to-2"),
        pytest.param(
            side(HND, 1, 4), [side(NHD)], 32768, Box(256, (16, 2), (256, 4096), (2048, 256), 512), 4.0, id="1-to-4-hnd"
        ),
        pytest.param(
            side(HND, block_size=64), [side(HND)], 32768, Box(4096, (8,), (16384,), (4096,), 0), 1.0, id="16-to-64"
        ),
    ],
)
def test_whole_runs_are_read_where_pieces_are_small(
    here: Layout, there: Sequence[Layout], length: int, box: Box, over: float
) -> None:
    staged, direct = table(here, *there), table(here, *there, costs=None)
    assert set(staged.length.tolist()) == {length}
    assert set(staged.boxes) == {box}
    assert staged.dense.all()  # the runs of consecutive blocks touch
    assert staged.block_bytes == over * direct.block_bytes
    assert staged.num_rows < direct.num_rows
    assert not direct.boxes


@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(side(NHD), [side(NHD)], id="equal"),
        pytest.param(side(HND), [side(HND)], id="equal-hnd"),
        pytest.param(side(HND), [side(HND, 0, 2), side(HND, 1, 2)], id="heads-first-2-to-1"),
        pytest.param(side(HND, 1, 2), [side(HND)], id="heads-first-1-to-2"),
    ],
)
def test_plans_of_large_pieces_stay_direct_and_the_same(here: Layout, there: Sequence[Layout]) -> None:
    for found, usual in zip(tables(here, there), tables(here, there, None), strict=True):
        for staged, direct in zip(found.regular, usual.regular, strict=True):
            assert not staged.boxes
            assert (staged.length == direct.length).all()
            assert (staged.local == direct.local).all()
            assert (staged.remote == direct.remote).all()


def test_the_costs_decide() -> None:
    here, there = side(HND), side(NHD)
    assert table(here, there).boxes
    assert not table(here, there, costs=LOCAL._replace(descriptor_s=1e-8)).boxes
    assert not table(here, there, costs=LOCAL._replace(place_s=1e-6)).boxes
    assert not table(side(NHD, 0, 8), side(NHD), costs=LOCAL._replace(read_s=2e-9)).boxes  # eight bytes for each
    assert table(side(NHD, 0, 8), side(NHD)).boxes


def test_within_a_process_only_another_order_is_staged() -> None:
    def is_staged(here: Layout, *there: Layout) -> bool:
        kept = [shelved(record_form(each), 1 << 30, 1 << 24) for each in there]
        found = [each for each in kept_tables(here, kept, itertools.count(1), WITHIN) if each is not None]
        return any(table.boxes for each in found for table in each.regular)

    for here, there in ((NHD, HND), (HND, NHD)):
        assert is_staged(side(here), side(there))
        assert not is_staged(side(here), side(here))
    for size in (2, 4, 8):
        assert not is_staged(side(NHD), *(side(NHD, rank, size) for rank in range(size)))
        assert not is_staged(side(NHD, 0, size), side(NHD))


def test_a_run_is_no_longer_than_a_slot() -> None:
    small = LOCAL._replace(slot_bytes=5000)
    found = table(side(HND), side(NHD), costs=small)
    assert set(found.length.tolist()) == {2048}  # of one token; all tokens of a block would be 32 KiB


def test_no_run_reaches_into_another_block() -> None:
    # In memory, each token of all blocks follows the same token of the others.
    order = ("kv", "token", "block", "head", "dim")
    found = table(side(HND), side(order), costs=STAGED)
    assert found.boxes
    assert set(found.length.tolist()) == {2048}
    assert (found.length <= found.remote[:, 2]).all()


def test_bytes_between_the_slices_of_a_dim_are_read_only_if_they_are_its_own() -> None:
    # Of keys and values in turns, token by token, a run of keys ends with its last key.
    dims = [(4, 512, 512), (16, 2048, 8192)]
    *_, last = runs(2, [(256, 2, 2), *dims], (1024, 1024), 1 << 20)
    assert last.box.skip == 0
    assert last.length == 15 * 8192 + 4 * 512
    *_, last = runs(2, [(256, 2, 2), (4, 512, 512), (16, 2048, 4096)], (1024, 1024), 1 << 20)
    assert (last.box.skip, last.length) == (1024, 16 * 4096)


def test_small_pieces_are_told_only_where_nothing_helps() -> None:
    [direct] = tables(side(HND), [side(NHD)], None)
    assert "in pieces of 256 bytes" in direct.warnings[0]
    [staged] = tables(side(HND), [side(NHD)])
    assert staged.warnings == []
    [over] = tables(side(NHD, 0, 8), [side(NHD)])
    assert "8.0 bytes are read for each byte that is needed" in over.warnings[0]


def test_no_agent_has_more_slots_than_are_free() -> None:
    slots, taken = Slots[TransferId](8), 0
    for name in ("a", "b", "c", "d"):
        while slots.has_room(name):
            taken += 1
            slots.take(TransferId(taken), name)
    assert taken == 4 + 2 + 1 + 1
    assert not slots.has_room("e")
    slots.give_back(TransferId(1))
    assert slots.has_room("e")
    assert not slots.has_room("a")


def test_a_piece_that_is_longer_than_a_slot_is_cut() -> None:
    """A state of 16 KiB in one piece beside small pieces, in slots of 5,000 bytes."""
    first, *_ = runs(4, [(4096, 4, 4), (2, 1 << 20, 1 << 20)], (0, 0), 5000)
    assert (first.length, first.outer, first.box.num_bytes) == (4096, ((4, 4096, 4096), (2, 1 << 20, 1 << 20)), 4096)
    assert list(runs(1, [(10_007, 1, 1)], (0, 0), 5000)) == []  # a prime number of bytes


def test_a_group_with_a_piece_that_cannot_be_cut_is_read_directly() -> None:
    costs = STAGED._replace(slot_bytes=7)
    assert not table(side(HND), side(NHD), costs=costs).boxes


def test_slots_are_taken_one_by_one() -> None:
    slots = Slots[TransferId](3)
    found = {slots.take(TransferId(i), f"peer {i}") for i in range(3)}
    assert found == {0, 1, 2}
    assert not any(map(slots.has_room, "ab"))
    assert np.array_equal(sorted(found), range(3))


# -- in the core: what is detached is no longer the pull's -----------------------------------------------------------


def reading(**config: Any) -> tuple[World, Rank, Rank, Pull]:
    """A pull that reads two blocks by staged reads, none of which has ended."""
    world = World(EngineConfig(engine_id="x", pull=PullConfig(idle_s=30.0, **config)), reuse=False)
    prefill = world.add("p", make_layout(num_heads=8, head_dim=8))
    decode = world.add("d", make_layout(num_heads=8, head_dim=8, order=HND), seed=1, costs=STAGED)
    params, _ = world.lent(prefill, "r", [1, 2], written=True)
    pull = world.pull(decode, "q", [3, 4], params, timeout=3.0)
    world.deliver_all()
    assert pull.state is PullState.READING
    assert all(transfer.is_staged for transfer in decode.reads.values())
    return world, prefill, decode, pull


def test_staged_reads_fill_the_blocks() -> None:
    world, prefill, decode, pull = reading()
    world.run()
    assert pull.reason is Reason.COMPLETE
    for mine, theirs in zip((3, 4), (1, 2), strict=True):
        assert all(decode.buffers.head(mine, head) == prefill.buffers.head(theirs, head) for head in range(8))


@pytest.mark.parametrize("how", ["cancelled", "timeout", "doubt"])
def test_blocks_return_with_the_outcome_and_the_peer_stays_until_the_reads_end(how: str) -> None:
    world, prefill, decode, pull = reading()
    before, running = decode.buffers.block(3), list(decode.reads)
    match how:
        case "cancelled":
            world.cancel(decode, pull)
        case "timeout":
            world.advance(4.0)
        case _:
            decode.nic.detach(running[0])
            world.tell(decode, TransferEnded(running[0], Ending.DETACHED, "trouble"))
    assert pull.reason is {"cancelled": Reason.CANCELLED, "timeout": Reason.TIMEOUT}.get(how, Reason.READ_FAILED)
    assert pull in decode.returned
    assert not pull.holds_blocks
    assert decode.core.outbox.counters["transfers.detached"] == len(running)
    world.deliver_all()
    assert pull.is_over
    # Another request may have the blocks, and the same peer is read for it.
    params, _ = world.lent(prefill, "s", [5, 6], written=True)
    other = world.pull(decode, "t", [3, 4], params)
    world.deliver_all()
    for transfer_id in [each for each in decode.reads if each not in running]:
        world.complete(decode, transfer_id)
    world.deliver_all()
    assert other.reason is Reason.COMPLETE
    filled = decode.buffers.block(3)
    assert filled != before
    # A peer that nobody uses leaves the data plane only when nothing of it runs.
    world.live(50.0, 0.25)
    assert "agent-p" in decode.peers
    for transfer_id in running:
        world.complete(decode, transfer_id)
    assert decode.buffers.block(3) == filled
    assert not decode.core.decode.transfers
    world.live(50.0, 0.25)
    assert "agent-p" not in decode.peers


def test_an_end_that_was_on_its_way_when_a_read_was_detached_concerns_its_peer_alone() -> None:
    world, _, decode, pull = reading()
    running = list(decode.reads)
    for transfer_id in running:
        decode.reads[transfer_id].land()
        decode.reads[transfer_id].place()  # it is done, and nobody knows yet
    world.cancel(decode, pull)
    assert pull.reason is Reason.CANCELLED
    for transfer_id in running:
        world.tell(decode, TransferEnded(transfer_id, Ending.DONE))
    world.deliver_all()
    assert pull.is_over
    assert not decode.core.decode.transfers
    assert not decode.core.decode.posting.in_flight


def test_a_direct_read_is_never_detached() -> None:
    world = World()
    prefill, decode = world.add("p", make_layout()), world.add("d", make_layout(), seed=1, costs=STAGED)
    params, _ = world.lent(prefill, "r", [1, 2], written=True)
    pull = world.pull(decode, "q", [3, 4], params)
    world.deliver_all()
    world.cancel(decode, pull)
    assert pull.state is PullState.DRAINING
    assert not decode.returned
    world.complete_all()
    assert pull in decode.returned


# -- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4096, 3 * 32768, 5 * 32768, 12 * 32768, 1 << 30])
def test_chunks_are_whole_rows_or_blocks_of_one_row_and_nothing_is_left_out(most: int) -> None:
    found = table(side(HND), side(NHD))
    rows, blocks = np.arange(1, 4, dtype=np.int32)[:, None], np.array([7, 2, 3, 9, 4], np.int32)
    local, remote = (rows * 12 + blocks).ravel(), (rows * 12 + blocks[::-1]).ravel()
    read = ReadRequest(found, local, remote, 15 * 32768, 15)
    at = 0
    for first, count, start, stop in read.chunks(most):
        assert start == at
        at, size = stop, stop - start
        assert 0 < 32768 * size <= max(most, 32768)
        assert count == 1 or size == 5 * count
        assert np.array_equal(local[start:stop] // 12, np.repeat(np.arange(first, first + count), size // count))
    assert at == len(local)
