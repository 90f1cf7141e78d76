"""Packed copies: when they are chosen, recipes and their check, and what both cores make of every course of events."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core import copies
from asynckv.core.asks import MAX_ASKED, PATIENCE_S, PAUSE_S
from asynckv.core.copies import MAX_WAITING, NO_SLOT
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.lease import Lease
from asynckv.core.pull import Pull, PullRequest, PullState
from asynckv.core.slots import Slots
from asynckv.core.types import Cohort, Key, KVTransferParams, Outcome, Reason, ReplyTo
from asynckv.core.wire import (
    Ack,
    Claim,
    Granted,
    Message,
    Pack,
    Packed,
    Refused,
    Release,
    Renew,
    Unpack,
    blocks_digest,
    decode_packet,
    encode_packet,
)
from asynckv.errors import LayoutError
from asynckv.geometry import tables
from asynckv.geometry.gather import MAX_BLOCK_RUNS, MAX_ROWS, PACK_BYTES, Packing, Ranges, Recipe, check_recipe, recipe
from asynckv.geometry.gather import can_ask as can_ask_for
from asynckv.geometry.layout import Layout
from asynckv.geometry.match import assign
from asynckv.geometry.plan import Plan, ReadRequest, Section
from asynckv.geometry.staging import Box, ReadCosts
from asynckv.geometry.tables import DescTable, PeerTables, Span
from asynckv.told import ReaderRefused
from tests.oracle import PACKED, execute
from tests.test_staging import HND, LOCAL, NHD, side
from tests.world import Buffers, Rank, World, begin, make_layout

MESHED = ("kv", "token", "block", "head", "dim")
"""In memory, each token of all blocks follows the same token of the others."""


def table(here: Layout, there: Layout, costs: ReadCosts = LOCAL, pack_bytes: int = PACK_BYTES) -> DescTable:
    tables = PeerTables(here, there, assign(here, [there])[0], itertools.count(1), costs, pack_bytes)
    return tables.regular[0]


def plan(found: DescTable, local: Sequence[int], remote: Sequence[int]) -> Plan:
    return Plan((Section(found, np.array(local, np.int32), np.array(remote, np.int32)),))


def first(found: DescTable, local: Sequence[int], remote: Sequence[int], limits: tuple[int, int]) -> ReadRequest:
    return next(plan(found, local, remote).posts(*limits))


# -- the choice, and its arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "is_packed"),
    [
        pytest.param(side(NHD, 3, 8), side(NHD), True, id="1-to-8"),
        pytest.param(side(NHD, 1, 2), side(NHD), False, id="1-to-2-is-staged-for-less"),
        pytest.param(side(HND), side(NHD), False, id="nhd-to-hnd-reads-no-more-than-it-needs"),
        pytest.param(side(HND, 1, 2), side(HND), False, id="heads-first-is-direct"),
        pytest.param(side(NHD, 0, 4, block_size=64), side(NHD), True, id="blocks-of-16-to-64"),
    ],
)
def test_an_owner_is_asked_where_a_reader_would_read_too_much(here: Layout, there: Layout, is_packed: bool) -> None:
    found = table(here, there)
    assert bool(found.pack_bytes) is is_packed
    assert not table(here, there, pack_bytes=0).pack_bytes
    tables = PeerTables(here, there, assign(here, [there])[0], itertools.count(1), LOCAL, PACK_BYTES)
    assert not any("bytes are read for each byte" in warning for warning in tables.warnings)


def test_the_costs_of_the_messages_and_of_the_copy_decide() -> None:
    here, there = side(NHD, 1, 4), side(NHD)
    assert table(here, there).pack_bytes
    assert not table(here, there, LOCAL._replace(ask_s=1e-6)).pack_bytes
    assert not table(here, there, LOCAL._replace(place_s=1e-6)).pack_bytes


def test_no_row_is_longer_than_a_packed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer says how long its slots are, and may say anything."""
    here, there = side(NHD, 3, 8), side(NHD)
    assert table(here, there).row_bytes.tolist() == [4096] * 4
    cheap = PACKED._replace(slot_bytes=1 << 20)
    assert table(here, there, cheap, 4096).pack_bytes == 4096
    for most in (4095, 256):  # a refused copy would be read in far more descriptors than are needed
        assert not table(here, there, cheap, most).pack_bytes
    monkeypatch.setattr(tables, "MOST_WHOLE", math.inf)
    for most in (4095, 256):
        found = table(here, there, cheap, most)
        assert (found.pack_bytes, set(found.row_bytes.tolist())) == (most, {256})
    assert not table(here, there, cheap, 255).pack_bytes


def test_what_is_wanted_lies_densely_here() -> None:
    assert Box(4, (2, 3), (12, 4), (100, 7), 5).in_local_order() == Box(4, (2, 3), (12, 4), (100, 7), 5)
    assert Box(4, (2, 3), (4, 8), (100, 7), 5).in_local_order() == Box(4, (3, 2), (8, 4), (7, 100), 5)
    assert Box(4, (2, 3), (16, 4), (100, 7), 5).in_local_order() is None
    assert Box(4, (2,), (5,), (100,), 0).in_local_order() is None
    assert Box(4, (), (), (), 3).in_local_order() == Box(4, (), (), (), 3)


LOCAL_IDS, REMOTE_IDS = [4, 5, 6, 9, 1, 2, 3], [1, 2, 7, 8, 10, 3, 4]


@pytest.mark.parametrize("pack_bytes", [4096, 3 * 4096, 5 * 4096, 1 << 20])
@pytest.mark.parametrize("limits", [(1 << 30, 1 << 20), (4096, 1 << 20), (1 << 30, 1), (1 << 30, 3), (9000, 2), (1, 1)])
def test_every_byte_comes_once_and_no_copy_is_longer_than_a_slot(pack_bytes: int, limits: tuple[int, int]) -> None:
    here, there = side(NHD, 3, 8), side(NHD)
    found = table(here, there, pack_bytes=pack_bytes)
    ours, theirs = Buffers(here, 1), Buffers(there, 2)
    written = [np.zeros(len(a), np.bool_) for a in ours.arrays]
    whole = plan(found, LOCAL_IDS, REMOTE_IDS)
    assert whole.num_bytes == 7 * 4 * 4096
    execute(whole, ours, theirs, written, limits, lent=[(0, REMOTE_IDS)])
    for mine, other in zip(LOCAL_IDS, REMOTE_IDS, strict=True):
        assert ours.head(mine, 3) == theirs.head(other, 3)
    assert sum(int(each.sum()) for each in written) == whole.num_bytes
    assert all(post.num_bytes <= min(pack_bytes, max(limits[0], 4096)) for post in whole.posts(*limits))


def test_descriptors_are_those_of_the_long_ranges_here() -> None:
    # Blocks 4 to 6, 9, and 1 to 3 touch here, whatever the remote blocks are.
    found = table(side(NHD, 3, 8), side(NHD))
    (read,) = plan(found, LOCAL_IDS, REMOTE_IDS).posts(1 << 30, 1 << 20)
    assert read.num_descriptors == 3 * found.num_rows == len(read.places())
    assert read.places()[:3].tolist() == [[0, 4 * 4096, 3 * 4096], [0, 9 * 4096, 4096], [0, 4096, 3 * 4096]]
    assert (read.is_staged, read._replace(slot=0).is_staged) == (True, False)


@pytest.mark.parametrize("order", [NHD, HND, MESHED])
def test_ranges_of_blocks_are_found_in_any_order_of_memory(
    order: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_WHOLE", math.inf)
    here, there = side(HND, 1, 2), side(order)
    found = table(here, there, PACKED._replace(slot_bytes=1 << 20))
    assert found.pack_bytes
    ours, theirs = Buffers(here, 1), Buffers(there, 2)
    written = [np.zeros(len(a), np.bool_) for a in ours.arrays]
    execute(plan(found, LOCAL_IDS, REMOTE_IDS), ours, theirs, written, (1 << 20, 512), lent=[(0, REMOTE_IDS)])
    assert all(ours.head(4, head) == theirs.head(1, head) for head in range(4, 8))


@pytest.mark.parametrize(("rows", "blocks"), [(MAX_ROWS + 1, 1), (1, MAX_BLOCK_RUNS + 1)])
def test_what_a_recipe_has_no_room_for_is_not_asked_for(rows: int, blocks: int) -> None:
    ones = np.full(rows, 4)
    places = np.stack([np.zeros(rows, np.int64), np.arange(rows) * 4, np.full(rows, 4 * rows)], axis=1)
    box, box_of = Box(4, (), (), (), 0), np.zeros(rows, np.int32)
    big = DescTable(1, Span(0, 0, 0, 0, 1), ones, places, places, blocks, 2 * blocks, (box,), box_of, PACK_BYTES)
    (read,) = plan(big, range(blocks), range(0, 2 * blocks, 2)).posts(1 << 30, 1 << 30)
    assert not can_ask_for(read)
    less = ReadRequest(big, read.local[:-1], read.remote[:-1], 0, 0)
    assert can_ask_for(less)
    decoded(recipe(less))


def decoded(asked: Recipe) -> Recipe:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Recipe)


# -- recipes from strangers ------------------------------------------------------------------------------------------

OWNER = side(NHD)
LENT = np.array([1, 2, 3, 7], np.int64)
TOKEN, BLOCK = 2048, 16 * 2048
HONEST = Recipe(0, ((256, ((16, TOKEN),)),), ((0, 256, 0), (1, 256, 0)), ((1, 3), (7, 1)))


def checked(asked: Recipe, owner: Layout = OWNER, lent: Any = LENT, slot_bytes: int = PACK_BYTES) -> Any:
    return check_recipe(decoded(asked), Ranges(owner), lent, slot_bytes)


def but(**fields: Any) -> Recipe:
    return msgspec.structs.replace(HONEST, **fields)


def one(piece: int, *dims: tuple[int, int], offset: int = 0, blocks: Any = ((1, 1),)) -> Recipe:
    return Recipe(0, ((piece, dims),), ((0, offset, 0),), blocks)


def test_an_honest_recipe_is_taken_to_the_last_byte() -> None:
    found = checked(HONEST)
    assert found.num_bytes == 2 * 4 * 4096
    assert found.blocks.tolist() == [1, 2, 3, 7]
    assert found.rows[0] == (0, 256, BLOCK, 256, (16,), (TOKEN,))
    assert checked(one(BLOCK)).num_bytes == BLOCK
    assert checked(HONEST, slot_bytes=found.num_bytes).num_bytes == found.num_bytes
    values = 12 * BLOCK  # of the first layer, behind all its keys
    assert checked(one(256, (16, TOKEN), offset=values + TOKEN - 256)).rows[0][1] == values + TOKEN - 256


HOSTILE = {
    "a group beyond": but(group=1),
    "a box beyond": but(rows=((0, 256, 1),)),
    "no box": but(boxes=()),
    "a memory beyond": but(rows=((2, 0, 0),)),
    "an offset beyond": but(rows=((0, 1 << 50, 0),)),
    "a block before": but(blocks=((0, 2),)),
    "a block behind": but(blocks=((3, 2),)),
    "a block between": but(blocks=((1, 7),)),
    "the last block id": but(blocks=(((1 << 31) - 1, 1),)),
    "a byte beyond the block": one(BLOCK, offset=1),
    "longer than a block": one(BLOCK + 1),
    "strides beyond the block": one(256, (17, TOKEN)),
    "a stride over all blocks": one(256, (2, 1 << 40)),
    "another block of the keys": one(BLOCK, offset=5 * BLOCK),
    "half of another block": one(BLOCK, offset=BLOCK // 2),
    "longer than a slot": one(1, (1 << 40, 0)),
    "longer than a slot in all": one(256, *[(1 << 40, 0)] * 8),
    "longer than a slot by its blocks": one(1, blocks=((1, PACK_BYTES), (1, 1))),
    "longer than a slot by its rows": but(rows=((0, 0, 0),) * 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_recipe_that_is_not_about_lent_blocks_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="a packed copy"):
        checked(HOSTILE[name])


def test_a_recipe_is_refused_whose_run_of_blocks_has_one_in_its_middle_that_is_not_lent() -> None:
    assert checked(one(1, blocks=((1, 3),))).num_bytes == 3
    with pytest.raises(LayoutError, match="not lent to this reader"):
        checked(one(1, blocks=((1, 3),)), lent=np.array([1, 3, 9]))


def test_in_meshed_memory_a_recipe_gets_no_byte_of_another_block() -> None:
    owner, step = side(MESHED), 12 * TOKEN  # from token to token
    lent = np.array([11])
    assert checked(one(TOKEN, offset=15 * step, blocks=((11, 1),)), owner, lent).num_bytes == TOKEN
    for piece, dims, offset in (
        (TOKEN, (), TOKEN),  # block 12, which there is not: the next token of block 0
        (TOKEN, (), 3 * step - TOKEN),
        (TOKEN, ((16, step),), 0),  # of all tokens: no range, however right
        (TOKEN + 1, (), 0),
        (TOKEN, (), 16 * step - 1),
    ):
        with pytest.raises(LayoutError, match="in no block"):
            checked(one(piece, *dims, offset=offset, blocks=((11, 1),)), owner, lent)


def test_another_group_has_blocks_and_views_of_its_own() -> None:
    other = msgspec.structs.replace(OWNER.groups[0], name="other")
    views = tuple(msgspec.structs.replace(view, group=number) for number, view in enumerate(OWNER.views))
    owner = msgspec.structs.replace(OWNER, groups=(*OWNER.groups, other), views=views)
    assert checked(but(group=1, rows=((1, 256, 0),)), owner).num_bytes == 4 * 4096
    with pytest.raises(LayoutError, match="in no block"):
        checked(but(group=1), owner)
    with pytest.raises(LayoutError, match="but 0 are lent"):
        checked(but(group=1, rows=((1, 256, 0),)), owner, np.zeros(0, np.int64))


def test_blocks_are_lent_as_the_engine_counts_them() -> None:
    owner = side(NHD, ratio=4)
    asked = one(256, (4, TOKEN), blocks=((4, 12), (28, 4)))
    assert checked(asked, owner).blocks.tolist() == [*range(4, 16), *range(28, 32)]
    for wrong in ((3, 1), (16, 1), (27, 1), (32, 1)):
        with pytest.raises(LayoutError, match="not lent"):
            checked(one(256, (4, TOKEN), blocks=(wrong,)), owner)


LARGEST = {
    "blocks": one(1, blocks=((1, PACK_BYTES),) * 16_384),
    "one run": one(1, blocks=((0, PACK_BYTES),)),
    "single blocks": one(1, blocks=((7, 1),) * 16_384),
    "rows": Recipe(0, ((1, ((1, 1 << 40),) * 8),) * 4096, tuple((0, i, i) for i in range(4096)), ((1, 1),)),
    "rows in no block": Recipe(0, ((1, ()),), ((0, 0, 0),) * 4095 + ((0, 1 << 50, 0),), ((1, 1),)),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_recipes_cost_little(name: str) -> None:
    asked, ranges = LARGEST[name], Ranges(OWNER)
    tracemalloc.start()
    began = time.process_time()
    with contextlib.suppress(LayoutError):
        check_recipe(asked, ranges, LENT, PACK_BYTES)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert seconds < 0.5


def test_a_block_is_packed_once_or_a_short_message_would_take_long() -> None:
    lent = np.array([1, 2, 3, 7, 1 << 30], np.int64)
    assert checked(one(1, blocks=((1, 3), (7, 1))), lent=lent).num_bytes == 4
    asked, ranges = one(1, blocks=((1, PACK_BYTES),)), Ranges(OWNER)
    tracemalloc.start()
    for twice in (asked, one(1, blocks=((1, 3),) * 2), one(1, blocks=((1, 1),) * 6)):
        with pytest.raises(LayoutError, match="but 5 are lent"):
            check_recipe(twice, ranges, lent, PACK_BYTES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "fields",
    [
        {"group": -1},
        {"group": 64},
        {"boxes": ((0, ()),)},
        {"boxes": ((256, ((0, 1),)),)},
        {"boxes": ((256, ((1, -1),)),)},
        {"boxes": ((256, ((1, 1),) * 9),)},
        {"boxes": ((256, ()),) * (MAX_ROWS + 1)},
        {"rows": ()},
        {"rows": ((0, -1, 0),)},
        {"rows": ((0, 0, -1),)},
        {"rows": ((-1, 0, 0),)},
        {"rows": ((0, 0, 0),) * (MAX_ROWS + 1)},
        {"blocks": ()},
        {"blocks": ((-1, 1),)},
        {"blocks": ((0, 0),)},
        {"blocks": ((0, PACK_BYTES + 1),)},
        {"blocks": ((1, 1),) * (MAX_BLOCK_RUNS + 1)},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_recipe_out_of_bounds_is_no_recipe(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(but(**fields))


# -- the owner -------------------------------------------------------------------------------------------------------

SIDES: dict[str, Any] = {"num_heads": 8, "head_dim": 8}
ROW = 4 * 8 * 8 * 2  # bytes of a block's keys or values in one layer
GRANT_S = 4.0
UNKNOWN = Key("00" * 16, 1, 2, "11" * 16)


def config() -> EngineConfig:
    return EngineConfig(
        engine_id="x",
        lease=LeaseConfig(lease_s=30.0, grant_s=GRANT_S),
        pull=PullConfig(idle_s=60.0, release_retry_s=0.2),
    )


class Owner:
    """An owner that has lent blocks 1 and 2 of a request to one engine, and readers in our hands."""

    def __init__(self, num_slots: int = 4) -> None:
        self.world = World(config())
        self.world.auto_pack = False
        packing = Packing(1 << 40, num_slots, 4 * ROW)
        self.rank = self.world.add("p", make_layout(**SIDES), packing=packing)
        self.copies = self.rank.core.prefill.copies
        self.params = self.world.params([self.rank], "r", [1, 2], 8, written=True)
        self.lease = self.lend(self.params)
        self.nonces = itertools.count(1)

    def lend(self, params: KVTransferParams, readers: int = 1) -> Lease:
        return self.world.lend(self.rank, params, readers)

    def says(self, *messages: Message, sender: str = "reader", way: bytes = b"way", key: str = "") -> list[Message]:
        """Let a reader say something, and return what it is answered."""
        data = encode_packet(sender, self.rank.core.identity.incarnation, list(messages))
        core = self.rank.core
        core.receive(ReplyTo(way), data, self.world.now, key)
        return self.answers(way)

    def answers(self, way: bytes = b"way") -> list[Message]:
        packets = self.rank.core.outbox.take_packets()
        self.world.settle(self.rank)
        return [m for to, data in packets if to == ReplyTo(way) for m in decode_packet(data).messages]

    def claim(
        self, pull_id: str = "pull", cohort: str = "d", params: KVTransferParams | None = None, **more: Any
    ) -> list[Message]:
        params = params or self.params
        digest = blocks_digest(params)
        nonce = next(self.nonces)
        return self.says(Claim(params.key, params.request_id, Cohort(cohort), pull_id, nonce, digest, 600.0), **more)

    def pack(
        self, nonce: int, pull_id: str = "pull", params: KVTransferParams | None = None, **more: Any
    ) -> list[Message]:
        asked = Recipe(0, ((ROW, ()),), ((0, 0, 0),), (((params or self.params).groups[0].runs[0][0], 1),))
        return self.says(Pack((params or self.params).key, pull_id, nonce, more.pop("asked", asked)), **more)

    def unpack(self, nonce: int, pull_id: str = "pull", **more: Any) -> list[Message]:
        return self.says(Unpack(self.params.key, pull_id, nonce), **more)

    def release(
        self, pull_id: str = "pull", outcome: Outcome = Outcome.COMPLETE, cohort: str = "d", **more: Any
    ) -> None:
        params = self.params
        (ack,) = self.says(Release(params.key, params.request_id, Cohort(cohort), pull_id, outcome), **more)
        assert isinstance(ack, Ack)

    def made(self, slot: int, failure: str = "", way: bytes = b"way") -> list[Message]:
        self.world.finish_copy(self.rank, slot, failure)
        return self.answers(way)

    def refuses(self, answers: list[Message], nonce: int, pull_id: str = "pull") -> bool:
        return answers == [Packed(self.params.key, pull_id, nonce, NO_SLOT)]

    @property
    def making(self) -> list[int]:
        return sorted(self.rank.making)

    def is_clean(self) -> bool:
        assert self.rank.inspect.check_integrity() == []
        return not (
            self.copies.by_key or self.copies.num_waiting or self.copies._making or self.copies.slots.num_in_use
        )


def claimed(num_slots: int = 4) -> Owner:
    owner = Owner(num_slots)
    owner.claim()
    return owner


def two_asked() -> tuple[Owner, int]:
    """Return an owner that makes one of two copies of one reader, in one of two slots."""
    owner = claimed(2)
    owner.pack(1)
    owner.pack(2)
    (slot,) = owner.making
    return owner, slot


def test_a_copy_is_made_once_and_named_once_it_is_made() -> None:
    owner = claimed()
    assert owner.pack(7) == []
    (slot,) = owner.making
    assert owner.pack(7) == [], "it is being made"
    assert owner.making == [slot]
    named = [Packed(owner.params.key, "pull", 7, slot)]
    assert owner.made(slot) == named
    copy = owner.rank.nic._copies[slot * 4 * ROW :][:ROW]
    assert copy.tobytes() == owner.rank.buffers.arrays[0][ROW : 2 * ROW].tobytes()
    assert owner.pack(7) == named, "the answer was lost"
    assert owner.making == []
    counters = owner.rank.core.outbox.counters
    assert (counters["copies.asked"], counters["copies.made"], counters["copies.refused"]) == (1, 1, 0)
    owner.unpack(7)
    assert owner.is_clean()


def test_blocks_that_are_lent_in_any_order_are_packed() -> None:
    owner = Owner()
    params, _ = owner.world.lent(owner.rank, "other", [7, 3, 5], written=True)
    owner.claim("other", params=params)
    assert owner.pack(7, "other", params) == []
    assert len(owner.making) == 1


@pytest.mark.parametrize(
    "how",
    ["no grant", "another sender", "another pull", "no such key", "released", "lapsed", "another key", "no memory"],
)
def test_without_a_running_grant_of_its_own_a_reader_gets_no_copy(how: str) -> None:
    owner = Owner()
    if how == "no memory":
        owner.copies.slot_bytes = 0
    if how != "no grant":
        owner.claim(key="key:one")
    answers: list[Message]
    match how:
        case "another sender":
            answers = owner.pack(7, sender="thief", key="key:one")
        case "another pull":
            answers = owner.pack(7, "other", key="key:one")
        case "another key":
            answers = owner.pack(7, key="key:other")
        case "no such key":
            owner.params = msgspec.structs.replace(owner.params, key=UNKNOWN)
            answers = owner.pack(7, key="key:one")
        case "released":
            owner.release(key="key:one")
            answers = owner.pack(7, key="key:one")
        case "lapsed":
            owner.world.now = GRANT_S
            answers = owner.pack(7, key="key:one")
        case _:
            answers = owner.pack(7, key="key:one")
    assert owner.refuses(answers, 7, "other" if how == "another pull" else "pull")
    assert owner.making == []
    assert owner.is_clean()
    assert owner.rank.core.outbox.counters["copies.refused"] == 1
    assert all(not grant.has_copies for grant in owner.lease.grants.values())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_by_name_and_changes_nothing_else(name: str) -> None:
    owner = claimed()
    core = owner.rank.core
    data = encode_packet("reader", core.identity.incarnation, [Pack(owner.params.key, "pull", 7, HOSTILE[name])])
    core.receive(ReplyTo(b"way"), data, owner.world.now)
    (refused,) = core.outbox.commands
    assert owner.refuses(owner.answers(), 7)
    assert isinstance(refused, ReaderRefused)
    assert (refused.said, refused.cause) == ("pack", Reason.BLOCKS_DIFFER)
    assert refused.detail.startswith("a packed copy")
    assert owner.is_clean()
    assert owner.pack(8) == [], "the next one is honest"
    assert len(owner.making) == 1


def test_a_release_frees_all_copies_of_its_pull() -> None:
    owner = claimed(8)
    for nonce in (1, 2, 3):
        owner.pack(nonce)
    slots = owner.making
    owner.made(slots[0])
    owner.made(slots[1])
    owner.release()
    assert owner.lease.is_over
    assert owner.copies.slots.num_in_use == 1, "the third is being made"
    assert not owner.copies.by_key
    assert owner.made(slots[2]) == [], "nobody asks for it"
    assert owner.is_clean()


def test_a_copy_that_is_being_made_when_its_grant_ends_keeps_its_slot() -> None:
    owner = claimed(2)
    owner.pack(1)
    (slot,) = owner.making
    owner.release(outcome=Outcome.RETRY)
    owner.claim("next")
    owner.pack(1, "next")
    assert slot in owner.making
    assert len(owner.making) == 1, "one of two slots is busy, and the other is left for other readers"
    assert owner.made(slot) == []
    (slot,) = owner.making
    assert owner.made(slot) == [Packed(owner.params.key, "next", 1, slot)]


def test_a_copy_that_was_not_made_is_refused_and_its_slot_is_free() -> None:
    owner, slot = two_asked()
    answers = owner.made(slot, "MemoryError()")
    assert owner.refuses(answers, 1)
    assert owner.making == [slot], "the next copy is made there"
    owner.release()
    assert owner.made(slot, "MemoryError()") == []
    assert owner.is_clean()
    assert owner.rank.core.outbox.counters["copies.made"] == 0


def test_unpack_makes_way_for_what_waits() -> None:
    owner, slot = two_asked()
    owner.made(slot)
    assert owner.making == []
    owner.unpack(1, sender="thief")
    owner.unpack(3)
    owner.unpack(1, "other")
    assert owner.making == []
    owner.unpack(1)
    assert owner.making == [slot]
    owner.unpack(1)
    owner.unpack(2)  # while it is being made
    assert owner.making == [slot]
    owner.made(slot)
    assert owner.is_clean()


def test_a_stranger_with_another_key_unpacks_nothing() -> None:
    owner = Owner(2)
    owner.claim(key="key:one")
    owner.pack(1, key="key:one")
    (slot,) = owner.making
    owner.made(slot)
    owner.unpack(1, key="key:other")
    owner.unpack(1)
    assert owner.copies.slots.num_in_use == 1
    owner.unpack(1, key="key:one")
    assert owner.is_clean()


def test_what_waits_can_be_unpacked_and_is_then_never_made() -> None:
    owner = claimed(2)
    for nonce in (1, 2, 3):
        owner.pack(nonce)
    (slot,) = owner.making
    owner.unpack(2)
    owner.made(slot)
    owner.unpack(1)
    assert owner.making == [slot]
    assert owner.made(slot) == [Packed(owner.params.key, "pull", 3, slot)]


def test_of_one_reader_few_copies_wait() -> None:
    owner = claimed(2)
    for nonce in range(1 + MAX_WAITING):
        assert owner.pack(nonce) == []
    assert owner.refuses(owner.pack(99), 99)
    assert owner.pack(3) == [], "it waits already"
    owner.unpack(5)
    assert owner.pack(99) == []


def test_a_reader_with_many_names_has_the_room_of_one() -> None:
    """Names are made up; a connection is one."""
    owner = Owner(4)
    for name in map(str, range(8)):
        owner.claim(name, sender=name)
        for nonce in range(4):
            owner.pack(nonce, name, sender=name)
    assert len(owner.making) == 2
    assert owner.copies.num_waiting == MAX_WAITING
    other = owner.world.params([owner.rank], "s", [5], 4, written=True)
    owner.lend(other)
    owner.claim("other", params=other, sender="other", way=b"w2")
    owner.pack(1, "other", params=other, sender="other", way=b"w2")
    assert len(owner.making) == 3


def test_of_all_connections_few_copies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_WAITING_IN_ALL", 5)
    owner = Owner(1)
    for way in range(3):
        owner.claim(str(way), sender=str(way), way=b"%d" % way)
    for nonce in range(2):
        for way in range(3):
            assert owner.pack(nonce, str(way), sender=str(way), way=b"%d" % way) == []
    assert owner.refuses(owner.pack(9, "1", sender="1", way=b"1"), 9, "1")


def test_a_refusal_for_want_of_room_leaves_nothing_behind() -> None:
    owner = claimed(2)
    for nonce in range(1 + MAX_WAITING):
        owner.pack(nonce)
    other = owner.world.params([owner.rank], "s", [5], 4, written=True)
    owner.lend(other)
    owner.claim("pull2", params=other)
    owner.pack(99, "pull2", params=other)
    assert other.key not in owner.copies.by_key


def test_two_readers_share_the_slots() -> None:
    owner = Owner(4)
    owner.params = owner.world.params([owner.rank], "s", [5], 4, written=True)
    owner.lease = owner.lend(owner.params, readers=2)
    owner.claim("one", "d1", sender="s1", way=b"w1")
    owner.claim("two", "d2", sender="s2", way=b"w2")
    for nonce in range(8):
        owner.pack(nonce, "one", sender="s1", way=b"w1")
    assert len(owner.making) == 2, "never more than are free"
    owner.pack(1, "two", sender="s2", way=b"w2")
    assert len(owner.making) == 3
    owner.pack(2, "two", sender="s2", way=b"w2")
    assert len(owner.making) == 3
    for slot in owner.making:
        owner.made(slot)
    # The first reader keeps its copies; the second one's turn comes again and again all the same.
    for nonce in range(1, 5):
        owner.unpack(nonce, "two", sender="s2", way=b"w2")
        owner.pack(nonce + 2, "two", sender="s2", way=b"w2")
        (slot,) = owner.making
        assert owner.made(slot, way=b"w2") == [Packed(owner.params.key, "two", nonce + 1, slot)]
    owner.release("two", cohort="d2", sender="s2", way=b"w2")
    owner.release("one", cohort="d1", sender="s1", way=b"w1")
    for slot in owner.making:
        owner.made(slot)
    assert owner.is_clean()


def test_readers_that_wait_for_a_slot_take_turns() -> None:
    owner = Owner(1)
    owner.params = owner.world.params([owner.rank], "s", [5], 4, written=True)
    owner.lease = owner.lend(owner.params, readers=2)
    for nonce, name in enumerate(("one", "one", "one", "two")):
        owner.claim(name, name, sender=name, way=name.encode())
        owner.pack(nonce, name, sender=name, way=name.encode())
    turns = []
    for _ in range(4):
        (copy,) = owner.copies._making.values()
        turns.append(copy.nonce)
        owner.made(copy.slot)
        owner.unpack(copy.nonce, copy.pull_id, sender=copy.sender, way=bytes(copy.reply_to))
    assert turns == [0, 1, 3, 2]


def test_slots_are_shared_as_staging_memory_is() -> None:
    slots: Slots[int] = Slots(8)
    taken = itertools.count()
    for name in "abcd":
        while slots.has_room(name):
            slots.take(next(taken), name)
    assert slots.num_in_use == 8 == next(taken)
    slots.give_back(1)
    assert slots.has_room("e")
    assert not slots.has_room("a")
    assert slots.take(9, "e") in range(8)


def test_with_a_grant_its_copies_end_and_it_is_never_granted_again() -> None:
    owner = claimed()
    owner.pack(1)
    owner.pack(2)
    slots = owner.making
    owner.made(slots[0])
    owner.world.advance(GRANT_S + 0.01)
    assert not owner.lease.is_over
    assert owner.copies.slots.num_in_use == len(slots) - 1
    assert not owner.copies.by_key
    for slot in slots[1:]:
        owner.made(slot)
    assert owner.is_clean()
    (refused,) = owner.claim()
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Reason.EXPIRED, "its grant ran out, and its packed copies with it")
    (refused,) = owner.says(Renew(owner.params.key, "pull", 9, 600.0))
    assert isinstance(refused, Refused)
    assert owner.refuses(owner.pack(3), 3)
    (granted,) = owner.claim("again")
    assert isinstance(granted, Granted)
    assert owner.pack(3, "again") == []
    owner.release("again")
    assert owner.lease.is_over


def test_without_copies_a_pull_is_granted_again() -> None:
    owner = claimed()
    owner.pack(1, asked=HOSTILE["a group beyond"])
    owner.world.advance(GRANT_S + 0.01)
    (granted,) = owner.claim()
    assert isinstance(granted, Granted)


def test_a_grant_that_is_renewed_before_anybody_looks_keeps_its_copies() -> None:
    """It ran out, and nothing was done about it: neither the blocks nor the slot went to another."""
    owner = claimed()
    owner.pack(1)
    (slot,) = owner.making
    owner.made(slot)
    owner.world.now = GRANT_S + 1.0
    (granted,) = owner.claim()
    assert isinstance(granted, Granted)
    assert owner.pack(1) == [Packed(owner.params.key, "pull", 1, slot)]


@pytest.mark.parametrize("how", ["revoked", "closed"])
def test_an_owner_that_takes_its_blocks_back_keeps_copies_for_as_long_as_the_grant(how: str) -> None:
    owner, slot = two_asked()
    owner.made(slot)
    if how == "revoked":
        owner.rank.core.prefill.revoke(owner.lease, owner.world.now)
    else:
        owner.rank.core.close(owner.world.now)
    owner.world.settle(owner.rank)
    assert owner.copies.slots.num_in_use == 1
    owner.unpack(1)
    assert owner.made(slot) == [Packed(owner.params.key, "pull", 2, slot)]
    owner.pack(3)
    owner.world.advance(GRANT_S + 0.01)
    assert owner.lease.is_over
    assert owner.is_clean()
    assert owner.refuses(owner.pack(4), 4)


# -- both ends -------------------------------------------------------------------------------------------------------

COSTS = PACKED._replace(least_packed=0)
Kind = type[Message]


class Pair:
    """A reader of blocks 1 and 2 of an owner that packs, and letters between them."""

    def __init__(self, num_slots: int = 8, slot_bytes: int = ROW, blocks: Sequence[int] = (1, 2), **costs: Any) -> None:
        self.world = World(config(), reuse=False)
        packing = Packing(1 << 40, num_slots, slot_bytes)
        self.owner = self.world.add("p", make_layout(**SIDES), packing=packing)
        self.reader = self.new_reader("d", **costs)
        self.num = 0
        self.lease, self.pull = self.begin(blocks)

    def new_reader(self, name: str, **costs: Any) -> Rank:
        there = make_layout(order=HND, **SIDES)
        return self.world.add(name, there, seed=1, costs=COSTS._replace(**costs), engine_id="d")

    def begin(self, theirs: Sequence[int], mine: Sequence[int] = (3, 4)) -> tuple[Lease, Pull]:
        self.num += 1
        self.theirs, self.mine = theirs, mine
        params = self.world.params([self.owner], f"r{self.num}", list(theirs), 4 * len(theirs), written=True)
        lease = self.world.lend(self.owner, params)
        return lease, self.start(f"q{self.num}", params)

    def start(self, name: str, params: KVTransferParams) -> Pull:
        """Pull, with another attempt to follow what may be tried again."""
        request = PullRequest(name, [(0, list(self.mine))], params)
        pull = begin(self.reader.core, request, 20.0, self.world.time(self.reader), retries=1)
        self.world.settle(self.reader)
        return pull

    def until(self, kind: Kind) -> Pair:
        """Deliver letters until one says this, which stays."""
        while self.world.letters and not self.says(kind, self.world.letters[0].data):
            self.world.deliver()
        assert self.world.letters, f"nobody says {kind.__name__}"
        return self

    @staticmethod
    def says(kind: Kind, data: bytes) -> bool:
        return any(isinstance(message, kind) for message in decode_packet(data).messages)

    def lose(self, kind: Kind) -> int:
        """Lose what letters say of one kind; return how often it was said."""
        lost = 0
        for letter in self.world.letters:
            packet = decode_packet(letter.data)
            kept = [message for message in packet.messages if not isinstance(message, kind)]
            lost += len(packet.messages) - len(kept)
            letter.data = encode_packet(packet.sender, packet.target, kept)
        return lost

    @property
    def asked(self) -> int:
        return self.reader.core.outbox.counters["sent.pack"]

    def is_right(self) -> bool:
        both, (ours, theirs) = zip(self.mine, self.theirs, strict=True), (self.reader.buffers, self.owner.buffers)
        return all(ours.head(a, head) == theirs.head(b, head) for a, b in both for head in range(8))

    def ends_well(self) -> None:
        """Let the pull run to its end: every byte in place, and nothing left behind."""
        self.world.run()
        assert self.pull.reason is Reason.COMPLETE
        assert self.is_right()
        assert self.is_clean()

    def is_clean(self) -> bool:
        self.world.check()
        copies, decode = self.owner.core.prefill.copies, self.reader.core.decode
        asks = [peer.asks for peer in decode.peers.by_place.values()]
        assert not copies.by_key
        assert not copies.slots.num_in_use
        assert not decode.transfers
        assert not decode.posting.in_flight
        return not any(each._asked or each._waiting for each in asks)


def test_packed_copies_fill_the_blocks() -> None:
    pair = Pair()
    pair.ends_well()
    assert all(read.slot >= 0 for read in pair.reader.posts.values())
    counters, number = pair.owner.core.outbox.counters, len(pair.reader.posts)
    assert number == 8
    assert counters["copies.asked"] == counters["copies.made"] == pair.asked == number
    assert counters["sent.packed"] == number
    assert counters["received.unpack"] == number - 1  # the release says it of the last one
    assert (pair.lease.num_packed, pair.pull.measures.num_packed) == (number, number)
    assert pair.pull.is_over
    assert pair.lease.is_over


def test_small_copies_are_not_worth_a_round_trip() -> None:
    pair = Pair(least_packed=ROW + 1)
    pair.ends_well()
    assert pair.asked == 0
    assert all(read.is_staged for read in pair.reader.posts.values())


def test_slots_that_are_too_short_are_not_asked_for() -> None:
    """A peer says how long its slots are. Reads of a row each would keep the loop busy for long."""
    pair = Pair(slot_bytes=ROW, least_packed=2 * ROW)
    pair.ends_well()
    assert not any(read.table.pack_bytes for read in pair.reader.posts.values())


def test_few_copies_are_asked_for_at_a_time() -> None:
    pair = Pair(num_slots=64).until(Pack)
    assert pair.asked == MAX_ASKED
    assert not pair.reader.reads
    pair.until(Packed)
    pair.world.deliver()
    assert pair.asked == 2 * MAX_ASKED
    pair.ends_well()


def test_what_the_owner_refuses_is_staged() -> None:
    pair = Pair()
    pair.world.auto_pack = False
    pair.world.deliver_all()
    for slot in list(pair.owner.making):
        pair.world.finish_copy(pair.owner, slot, "trouble")
    pair.world.auto_pack = True
    pair.world.settle(pair.owner)
    pair.ends_well()
    assert sorted(read.is_staged for read in pair.reader.posts.values()) == [False] * 4 + [True] * 4
    assert pair.pull.measures.num_packed == 4


@pytest.mark.parametrize("lost", [Pack, Packed])
def test_a_reader_without_an_answer_reads_the_blocks_and_asks_nothing_for_a_while(lost: Kind) -> None:
    pair = Pair().until(lost)
    assert pair.lose(lost) == MAX_ASKED
    pair.world.deliver_all()
    pair.world.advance(PATIENCE_S - 0.01)
    assert not pair.reader.reads
    pair.world.advance(0.02)
    assert len(pair.reader.reads) == 8
    assert pair.reader.core.outbox.counters["copies.late"] == 8
    pair.ends_well()
    assert pair.is_clean()
    began = pair.world.now
    pair.begin([5, 6])
    pair.world.run()
    assert pair.asked == MAX_ASKED
    assert pair.is_right()
    pair.world.run(PAUSE_S - (pair.world.now - began) - 0.1)
    pair.begin([5, 6])
    pair.world.run()
    assert pair.asked == MAX_ASKED
    pair.world.run(0.2)
    pair.begin([7, 8])
    pair.world.run()
    assert pair.asked == MAX_ASKED + 7  # one shows how long it takes without a copy
    assert pair.is_right()
    assert pair.is_clean()


def test_an_answer_that_comes_too_late_is_passed_over_and_the_slot_comes_back() -> None:
    pair = Pair().until(Packed)
    late = [letter for letter in pair.world.letters if pair.says(Packed, letter.data)]
    pair.world.letters = [letter for letter in pair.world.letters if letter not in late]
    pair.world.advance(PATIENCE_S + 0.01)
    assert len(pair.reader.reads) == 8
    pair.world.letters += late
    pair.world.run()
    assert pair.reader.core.outbox.counters["dropped.stale_answer"] >= MAX_ASKED
    assert all(read.is_staged for read in pair.reader.posts.values())
    assert pair.is_right()
    assert pair.pull.is_over
    assert pair.is_clean()


def test_a_reader_that_waits_no_more_says_so_or_slots_would_be_in_use_until_its_release() -> None:
    pair = Pair().until(Packed)
    pair.lose(Packed)
    pair.world.deliver_all()
    assert pair.owner.core.prefill.copies.slots.num_in_use == MAX_ASKED
    pair.world.advance(PATIENCE_S + 0.01)
    pair.world.deliver_all()
    assert not pair.lease.is_over
    assert pair.owner.core.outbox.counters["received.unpack"] == 8  # of those that were not asked for too
    assert not pair.owner.core.prefill.copies.slots.num_in_use
    pair.ends_well()


def test_stale_and_foreign_answers_change_nothing() -> None:
    pair = Pair().until(Packed)
    (letter,) = pair.world.letters
    packet = decode_packet(letter.data)
    packed = packet.messages[0]
    assert isinstance(packed, Packed)
    core, now = pair.reader.core, pair.world.time(pair.reader)
    for wrong, sender in (
        (packed, "somebody"),
        (msgspec.structs.replace(packed, nonce=999), packet.sender),
        (msgspec.structs.replace(packed, pull_id="other"), packet.sender),
        (msgspec.structs.replace(packed, key=msgspec.structs.replace(packed.key, token="00" * 16)), packet.sender),
    ):
        core.receive(letter.origin, encode_packet(sender, packet.target, [wrong]), now)
        pair.world.settle(pair.reader)
        assert not pair.reader.reads, wrong
    pair.world.deliver(0, keep=True)
    reads = dict(pair.reader.reads)
    assert len(reads) == MAX_ASKED
    pair.world.deliver(0)  # again
    assert dict(pair.reader.reads) == reads
    pair.ends_well()


def two_owners(*, auto_pack: bool = True) -> tuple[World, list[Rank], Rank, Pull]:
    """Return two ranks that pack for one reader, which has asked both."""
    world = World(config(), reuse=False)
    world.auto_pack = auto_pack
    owners = [
        world.add(f"p{n}", make_layout(n, 2, **SIDES), engine_id="p", packing=Packing(1 << 40, 8, ROW))
        for n in range(2)
    ]
    reader = world.add("d", make_layout(order=HND, **SIDES), seed=1, costs=COSTS)
    params, _ = world.lent_by(owners, "r", [1, 2], written=True)
    pull = world.pull(reader, "q", [3, 4], params)
    world.deliver_all()
    return world, owners, reader, pull


def test_an_owner_answers_only_for_its_own_copies() -> None:
    """One rank would have the slot of another read, with other bytes."""
    world, owners, reader, pull = two_owners(auto_pack=False)
    first, other = (peer for peer in reader.core.decode.peers.by_place.values() if peer.asks._asked)
    nonce = next(iter(first.asks._asked))
    forged = Packed(pull.params.key, pull.pull_id, nonce, 7)
    before = reader.core.outbox.counters["dropped.stale_answer"]
    packet = encode_packet(other.incarnation, reader.core.identity.incarnation, [forged])
    reader.core.receive(other.address, packet, world.time(reader))
    world.settle(reader)
    assert reader.core.outbox.counters["dropped.stale_answer"] == before + 1
    assert nonce in first.asks._asked
    assert not reader.reads
    for owner in owners:
        for slot in list(owner.making):
            world.finish_copy(owner, slot)
        world.settle(owner)
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert pull.measures.num_packed == 8


def test_a_slow_rank_keeps_no_slot_of_another_in_use() -> None:
    world, owners, reader, pull = two_owners()
    for transfer_id in list(reader.reads):
        if reader.core.decode.transfers[transfer_id].peer.tp_rank == 0:
            world.complete(reader, transfer_id)
    world.deliver_all()
    assert [owner.core.prefill.copies.slots.num_in_use for owner in owners] == [0, 4]
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert not any(owner.core.prefill.copies.slots.num_in_use for owner in owners)


@pytest.mark.parametrize("when", ["nothing was heard", "copies are being made", "copies are made"])
def test_a_pull_that_is_cancelled_while_it_waits_for_copies_returns_its_blocks_at_once(when: str) -> None:
    pair = Pair()
    pair.world.auto_pack = when == "copies are made"
    pair.until(Pack)
    if when != "nothing was heard":
        pair.world.deliver()
    pair.world.cancel(pair.reader, pair.pull)
    assert pair.pull.reason is Reason.CANCELLED
    assert pair.reader.returned == [pair.pull]
    assert not pair.reader.posts
    assert not pair.reader.core.decode.transfers
    pair.world.deliver_all()
    assert pair.pull.is_over
    assert pair.lease.is_over
    assert not pair.owner.core.prefill.copies.by_key
    for slot in list(pair.owner.making):
        pair.world.finish_copy(pair.owner, slot)
        pair.world.settle(pair.owner)
    pair.world.run()
    assert not pair.reader.posts
    assert pair.is_clean()


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "peer lost", "destroyed"])
def test_a_pull_that_ends_in_the_turn_of_an_answer_reads_nothing(how: str, is_packed: bool) -> None:
    pair = Pair().until(Packed)
    letter, core = pair.world.letters.pop(0), pair.reader.core
    packet, now = decode_packet(letter.data), pair.world.time(pair.reader)
    answers = [message for message in packet.messages if isinstance(message, Packed)]
    if not is_packed:
        answers = [msgspec.structs.replace(message, slot=NO_SLOT) for message in answers]
    core.receive(letter.origin, encode_packet(packet.sender, packet.target, answers), now)
    assert len(core.decode.answered) == len(answers) > 0
    match how:
        case "cancelled":
            core.decode.cancel(pair.pull, now)
        case "peer lost":
            core.decode.forget(pair.owner.address, now)
        case _:
            core.close(now)
            core.decode.destroyed(now)
    pair.world.settle(pair.reader)
    assert not pair.reader.posts
    assert pair.reader.returned == [pair.pull]
    assert not core.decode.transfers
    assert not core.decode.answered
    for _ in range(8):
        pair.world.run(5.0)
    assert pair.pull.is_over
    assert pair.is_clean()


def test_a_pull_that_is_cancelled_while_a_copy_is_read_waits_for_the_read() -> None:
    """It goes into the blocks directly."""
    pair = Pair().until(Packed)
    pair.world.deliver()
    running = list(pair.reader.reads)
    assert len(running) == MAX_ASKED
    pair.world.cancel(pair.reader, pair.pull)
    assert pair.pull.state is PullState.DRAINING
    assert not pair.reader.returned
    assert list(pair.reader.reads) == running, "what was only asked for is not posted"
    pair.world.complete_all()
    assert pair.reader.returned == [pair.pull]
    pair.world.run()
    assert pair.pull.is_over
    assert pair.is_clean()


def test_another_pull_asks_when_one_is_cancelled() -> None:
    pair = Pair().until(Pack)
    pair.lose(Pack)
    lease, pull = pair.begin([5, 6], [7, 8])
    assert pair.asked == MAX_ASKED
    pair.world.cancel(pair.reader, pair.pull)
    assert pair.asked == 2 * MAX_ASKED
    pair.world.run()
    assert pull.reason is Reason.COMPLETE
    assert lease.is_over
    assert pair.is_right()
    assert pair.is_clean()


def test_a_read_of_a_copy_in_doubt_keeps_the_copy_until_it_ends() -> None:
    pair = Pair(blocks=[1]).until(Packed)
    pair.world.deliver()
    doubted, *others = list(pair.reader.reads)
    pair.world.tell(pair.reader, TransferEnded(doubted, Ending.IN_DOUBT, "trouble"))
    for each in others:
        pair.world.complete(pair.reader, each)
    pair.world.deliver_all()
    assert pair.reader.core.outbox.counters["sent.unpack"] == 2
    assert not pair.reader.returned
    pair.world.tell(pair.reader, TransferEnded(doubted, Ending.FAILED, "after all"))
    assert pair.reader.core.outbox.counters["sent.unpack"] == 2  # the release says it of this one
    pair.world.run()
    assert pair.pull.reason is Reason.READ_FAILED
    assert pair.is_clean()


@pytest.mark.parametrize("when", ["asked", "read"])
def test_a_pull_whose_grant_ran_out_with_its_copies_fails_and_may_be_tried_again(when: str) -> None:
    pair = Pair().until(Packed)
    if when == "read":
        pair.world.deliver()  # and the reads hang
    pair.world.letters.clear()
    began = pair.world.now
    while pair.world.now - began < GRANT_S + 1.0:  # nothing that is said arrives
        pair.world.advance(0.25)
        pair.world.letters.clear()
    assert not pair.owner.core.prefill.copies.by_key
    assert pair.pull.reason is None
    pair.world.run()
    assert pair.pull.reason is Reason.LEASE_LOST
    assert pair.pull.is_over
    assert not pair.lease.is_over
    assert pair.is_clean()
    pair.world.run(1.0)
    assert [pull.reason for pull in pair.reader.ended] == [Reason.LEASE_LOST, Reason.COMPLETE]
    assert pair.lease.is_over
    assert pair.is_right()
    assert pair.is_clean()


@pytest.mark.parametrize("others", [False, True])
def test_a_peer_that_is_lost_while_it_is_asked_fails_its_pulls_and_is_asked_no_more(others: bool) -> None:
    pair = Pair().until(Pack)
    pulls = [pair.pull]
    if others:
        pulls.append(pair.begin([5, 6], [7, 8])[1])
    pair.world.letters.clear()
    asked = pair.asked
    pair.world.forget(pair.reader, pair.owner.address)
    assert [pull.reason for pull in pulls] == [Reason.PEER_LOST] * len(pulls)
    assert len(pair.reader.returned) == len(pulls)
    assert pair.asked == asked, "a lost rank is asked for nothing"
    assert not pair.reader.posts
    pair.world.deliver_all()
    for _ in range(40):
        pair.world.run(1.0)
    assert pair.is_clean()


def test_our_agent_is_destroyed_while_copies_are_asked_for() -> None:
    pair = Pair().until(Pack)
    pair.world.close(pair.reader)
    pair.reader.core.decode.destroyed(pair.world.time(pair.reader))
    pair.world.settle(pair.reader)
    assert pair.reader.returned == [pair.pull]
    pair.world.run()
    assert pair.lease.is_over
    assert pair.is_clean()


@pytest.mark.parametrize("who", ["reader", "owner"])
@pytest.mark.parametrize("how", ["close", "shut"])
def test_either_side_closes_or_drains_while_copies_wait(who: str, how: str) -> None:
    pair = Pair(num_slots=2)
    pair.world.auto_pack = False
    pair.world.deliver_all()
    assert len(pair.owner.making) == 1
    rank = pair.reader if who == "reader" else pair.owner
    if how == "close":
        rank.core.close(pair.world.time(rank))
    else:
        rank.core.shut()
    pair.world.settle(rank)
    (slot,) = pair.owner.making
    pair.world.deliver_all()
    pair.world.auto_pack = True
    pair.world.finish_copy(pair.owner, slot)
    pair.world.settle(pair.owner)
    pair.world.run()
    if (who, how) == ("reader", "close"):
        assert pair.pull.reason is Reason.CANCELLED
    else:
        # An owner that closes keeps its promises.
        assert pair.pull.reason is Reason.COMPLETE
        assert pair.is_right()
    assert pair.lease.is_over
    assert pair.is_clean()


def test_two_readers_are_served_by_one_owner() -> None:
    pair = Pair(num_slots=4)
    other = pair.world.add("e", make_layout(order=HND, **SIDES), seed=3, costs=COSTS, engine_id="e")
    params = pair.world.params([pair.owner], "s", [5, 6], 8, written=True)
    lease = pair.world.lend(pair.owner, params)
    pull = pair.world.pull(other, "q", [7, 8], params)
    pair.world.run()
    assert (pair.pull.reason, pull.reason) == (Reason.COMPLETE, Reason.COMPLETE)
    assert pair.is_right()
    for mine, theirs in zip((7, 8), (5, 6), strict=True):
        assert all(other.buffers.head(mine, h) == pair.owner.buffers.head(theirs, h) for h in range(8))
    assert pull.measures.num_packed + pair.pull.measures.num_packed == 16
    assert lease.is_over
    assert pair.is_clean()


def test_an_owner_of_an_earlier_version_is_not_asked() -> None:
    world = World(config(), reuse=False)
    owner = world.add("p", make_layout(**SIDES))
    reader = world.add("d", make_layout(order=HND, **SIDES), seed=1, costs=COSTS)
    params, _ = world.lent(owner, "r", [1, 2], written=True)
    pull = world.pull(reader, "q", [3, 4], params)
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert reader.core.outbox.counters["sent.pack"] == 0
    assert all(read.is_staged for read in reader.posts.values())
