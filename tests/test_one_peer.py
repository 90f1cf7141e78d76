"""The cost of one peer that keeps to the protocol: work in proportion to its messages, short turns, shared slots."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from asynckv.account.waits import waits, waits_for
from asynckv.config import EngineConfig, LeaseConfig, LimitsConfig
from asynckv.core import copies, wire
from asynckv.core import rank as core_rank
from asynckv.core.copies import MAX_WAITING
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.rank import COSTS, SLICE, RankCore
from asynckv.core.types import Cohort, KVTransferParams, Outcome, ReplyTo
from asynckv.core.wire import (
    MAX_MESSAGES,
    MAX_REQUEST_PACKET,
    Claim,
    Granted,
    Hello,
    Message,
    Pack,
    Packed,
    Ping,
    Pong,
    Release,
    Renew,
    StatusRequest,
    Unpack,
    blocks_digest,
    decode_packet,
    encode_packet,
)
from asynckv.errors import LayoutError
from asynckv.geometry import tables
from asynckv.geometry.check import check_layout
from asynckv.geometry.gather import PACK_BYTES, Packing, Ranges, Recipe, check_recipe
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View
from asynckv.geometry.match import assign
from asynckv.geometry.tables import PeerTables
from tests.oracle import PACKED, execute, gather
from tests.test_packed_copies import Owner, decoded, plan
from tests.world import Buffers, World, make_layout

WAY, KEY = ReplyTo(b"way"), "key:peer"
RANKS, SOME = 4096, 600
TURN_EVENTS = 25_000
"""Calls of functions, Python's and others, in one turn: some milliseconds."""


def events_of(work: Callable[[], object]) -> int:
    """Count the calls that some work makes: exact, on any machine."""
    seen = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen


class Lender:
    """A prefill rank that has lent a request, and a peer with its params."""

    def __init__(self, **limits: float) -> None:
        limits = {"messages_per_s": 1e9, "message_burst": 10**9} | limits
        config = EngineConfig(
            engine_id="x",
            lease=LeaseConfig(lease_s=30.0, grant_s=4.0),
            limits=LimitsConfig(**limits),  # type: ignore[arg-type]
        )
        self.world = World(config)
        self.world.auto_pack = False
        layout = make_layout(num_blocks=4096, num_heads=8, head_dim=8)
        self.rank = self.world.add("p", layout, engine_id="prefill", packing=Packing(1 << 40, 32))
        self.core: RankCore = self.rank.core
        self.params, self.lease = self.lend("r")

    def lend(self, name: str) -> tuple[KVTransferParams, Lease]:
        params = self.world.params([self.rank], name, list(range(4000)), 16_000, written=True)
        return params, self.core.lend(params, 1, 0.0)

    def claim(
        self, pull_id: str, cohort: Cohort, params: KVTransferParams | None = None, seconds: float = 9.0
    ) -> Claim:
        params = params or self.params
        digest = blocks_digest(params)
        return Claim(params.key, params.request_id, cohort, pull_id, 1, digest, seconds)

    def release(self, pull_id: str, cohort: Cohort, outcome: Outcome = Outcome.COMPLETE) -> Release:
        return Release(self.params.key, self.params.request_id, cohort, pull_id, outcome)

    def hear(self, messages: Sequence[Message], now: float = 0.0, way: ReplyTo = WAY) -> list[Message]:
        """Take messages, and all turns that follow at this time; return the answers."""
        for at in range(0, len(messages), MAX_MESSAGES):
            data = encode_packet("s", self.core.identity.incarnation, messages[at : at + MAX_MESSAGES])
            self.core.receive(way, data, now, KEY)
            while self.core.read_on_at <= now:
                self.core.tick(now)
        packets = self.core.outbox.take_packets()
        self.core.outbox.commands.clear()
        return [message for to, data in packets if to == way for message in decode_packet(data).messages]

    def turns(self, until: float) -> Iterator[int]:
        """Let time pass, and count the calls of each turn."""
        while (now := self.rank.next_at) <= until:
            yield events_of(partial(self._turn, now))
            self.core.outbox.commands.clear()

    def _turn(self, now: float) -> None:
        self.rank.tick(now)
        self.core.outbox.take_packets()


# -- one request under thousands of ranks ------------------------------------------------------------------------------


def spoken_for(number: int, outcome: Outcome | None = None) -> Lender:
    """Lend a request that so many ranks of one engine have claimed, and have released with some outcome."""
    lender = Lender()
    cohorts = [Cohort("d", number, rank) for rank in range(number)]
    answers = lender.hear([lender.claim(f"p{each.tp_rank}", each) for each in cohorts])
    assert all(isinstance(answer, Granted) for answer in answers)
    if outcome is not None:
        lender.hear([lender.release(f"p{each.tp_rank}", each, outcome) for each in cohorts], 1.0)
    return lender


@pytest.mark.parametrize("how", ["releases to try again", "lets grants lapse", "grants of many lengths"])
def test_thousands_of_readers_that_leave_take_short_turns_and_work_in_proportion(how: str) -> None:
    totals = []
    for number in (RANKS // 8, RANKS):
        lender = spoken_for(number, Outcome.RETRY if how.startswith("releases") else None)
        lender.core.prefill.unreachable(WAY)
        if how == "grants of many lengths":
            for rank, grant in enumerate(lender.lease.grants.values()):
                grant.until = 1.0 + rank * 2e-4
            lender.lease.deadlines[:] = [(grant.until, grant.pull_id) for grant in lender.lease.grants.values()]
            lender.lease.look_at = 1.0
            lender.core.timers.wake(lender.lease, 1.0)
        events = list(lender.turns(60.0))
        assert max(events) < TURN_EVENTS
        assert lender.lease.state is LeaseState.EXPIRED
        assert len(lender.lease.gone) == number
        assert lender.lease.since < 10.0, "nobody waits for the whole lease"
        totals.append(sum(events))
    assert totals[1] < 10 * totals[0]


def test_thousands_of_readers_that_pause_are_asked_in_short_turns() -> None:
    lender = spoken_for(RANKS)
    assert max(lender.turns(29.0)) < TURN_EVENTS
    assert lender.core.outbox.counters["sent.ping"] >= 3 * RANKS
    assert not lender.lease.is_over


def test_grants_that_lapse_one_by_one_cost_no_look_at_all_readers() -> None:
    lender = spoken_for(RANKS)
    list(lender.turns(4.5))
    late = [lender.claim(f"late {n}", Cohort("d", RANKS, 0), seconds=0.001) for n in range(40)]
    before = lender.core.outbox.counters["sent.ping"]
    most = 0
    for n, claim in enumerate(late):
        lender.hear([claim], 4.5 + n / 500)
        most = max([most, *lender.turns(4.5 + n / 500 + 0.0015)])
    assert lender.core.outbox.counters["sent.ping"] - before < 100
    assert most < 500


@pytest.mark.parametrize("is_early", [False, True])
def test_a_thousand_readers_of_one_request_are_served(is_early: bool) -> None:
    lender = Lender()
    cohorts = [Cohort("d", 128, rank, 8, stage) for rank in range(128) for stage in range(8)]
    params = lender.world.params([lender.rank], "s", [3], 4, written=True)
    claims = [lender.claim(f"p{n}", each, params) for n, each in enumerate(cohorts)]
    if is_early:
        lender.hear(claims)
        lease = lender.core.lend(params, 1, 0.1)
        list(lender.turns(0.1))
    else:
        lease = lender.core.lend(params, 1, 0.1)
        assert {type(answer) for answer in lender.hear(claims, 0.1)} == {Granted}
    assert len(lease.grants) == len(cohorts) == 1024
    assert len(lease.owed()) == 64
    assert waits(lease, 0.2).endswith("and 1020 more")
    releases = [Release(params.key, "s", each, f"p{n}", Outcome.COMPLETE) for n, each in enumerate(cohorts)]
    lender.hear(releases, 0.3)
    assert lease.state is LeaseState.RELEASED


def test_what_was_parked_is_taken_in_short_turns() -> None:
    lender = Lender()
    params = lender.world.params([lender.rank], "s", [3], 4, written=True)
    lender.hear([lender.claim(f"p{rank}", Cohort("d", RANKS, rank), params) for rank in range(2048)])
    assert lender.core.prefill.parking.num_parked == 2048
    leases = []
    assert events_of(lambda: leases.append(lender.core.lend(params, 1, 0.1))) < TURN_EVENTS
    assert max(lender.turns(0.1)) < TURN_EVENTS
    assert len(leases[0].grants) == 2048
    lender.hear([lender.claim(f"p{n}", Cohort("d"), another_key(lender, n)) for n in range(2048)], 0.2)
    assert lender.core.prefill.parking.num_parked == 2048
    assert max(lender.turns(60.0)) < TURN_EVENTS
    assert lender.core.prefill.parking.num_parked == 0


@pytest.mark.parametrize("how", ["binds nothing", "binds another request"])
def test_a_claim_costs_the_same_however_many_ranks_its_engine_has(how: str) -> None:
    """A listing of the ranks would take as long as a thousand pings, for a message of a hundred bytes."""
    seconds = {}
    for size in (1, RANKS):
        lender = spoken_for(1)
        claims = []
        for n in range(200):
            if how == "binds nothing":
                claims.append(lender.claim(f"q{n}", Cohort(f"other {n}", size)))
                continue
            params = lender.world.params([lender.rank], f"s{n}", [n], 4, written=True)
            lender.core.lend(params, 1, 0.0)
            claims.append(lender.claim("q", Cohort(f"other {n}", size), params))
        data = encode_packet("s", "", claims)
        before = time.process_time()
        lender.core.receive(WAY, data, 0.1, KEY)
        seconds[size] = time.process_time() - before
    assert seconds[RANKS] < 5 * seconds[1] + 0.01


def test_what_is_said_of_thousands_of_owed_readers_is_bounded() -> None:
    lender = Lender()
    lender.hear([lender.claim("p", Cohort("d", RANKS, 9))])
    lease = lender.lease
    status = lender.rank.inspect.status(lease, 1.0)
    assert [x.rank for x in status.ranks[:9]] == [f"d/tp{rank}" for rank in range(9)]
    assert len(status.ranks) == 256
    assert status.waits == "claimed and renewed by d/tp9@s; not claimed by d/tp0, d/tp1, d/tp2, d/tp3 and 4091 more"
    assert events_of(lambda: (waits(lease, 1.0), lease.owed(), waits_for(lease, 64))) < 1000
    assert len(lease.owed()) == 64
    assert len(list(lease.owing())) == RANKS


def test_readers_that_have_released_count_as_work_of_a_question() -> None:
    lender = Lender()
    lender.hear([lender.release(f"p{rank}", Cohort("d", RANKS, rank)) for rank in range(RANKS - 1)])
    lease = lender.lease
    assert events_of(lambda: waits(lease, 1.0)) < 10 * lease.steps


def test_a_report_about_many_requests_takes_several_turns() -> None:
    lender = Lender()
    for number in range(2000):
        params = lender.world.params([lender.rank], f"more {number}", [number], 4, written=True)
        lender.core.lend(params, 1, 0.0)
    assert max(lender.turns(29.0)) < TURN_EVENTS
    assert lender.rank.watch.next_at > 29.0


# -- one rule for all messages -----------------------------------------------------------------------------------------

ONE = Recipe(0, ((64, ()),), ((0, 0, 0),), ((5, 1),))
ROWS = Recipe(0, ((1, ()),), ((0, 0, 0),) * 1024, ((1, 1),))
BOXES = Recipe(0, ((1, ((1, 1),) * 8),) * 1024, ((0, 0, 0),), ((1, 1),))
RUNS = Recipe(0, ((1, ()),), ((0, 0, 0),), ((1, 1),) * 3900)
Make = Callable[[Lender, int], Message]


def another_key(lender: Lender, n: int) -> KVTransferParams:
    return msgspec.structs.replace(lender.params, key=msgspec.structs.replace(lender.params.key, sequence=9_000 + n))


MESSAGES: dict[str, Make] = {
    "ping": lambda x, n: Ping(n),
    "pong": lambda x, n: Pong(n),
    "renewal": lambda x, n: Renew(x.params.key, f"p{n}", n + 1, 9.0),
    "renewal of nothing": lambda x, n: Renew(x.params.key, f"none {n}", n + 1, 9.0),
    "repeated claim": lambda x, n: x.claim(f"p{n}", Cohort("d", SOME, n)),
    "next claim": lambda x, n: x.claim(f"q{n}", Cohort("d", SOME, n)),
    "foreign claim": lambda x, n: x.claim(f"p{n}", Cohort("d", SOME, n + 1)),
    "claim of another engine": lambda x, n: x.claim(f"q{n}", Cohort(f"e{n}", SOME, n)),
    "early claim": lambda x, n: x.claim(f"q{n}", Cohort("d"), another_key(x, n)),
    "release": lambda x, n: x.release(f"p{n}", Cohort("d", SOME, n)),
    "release to try again": lambda x, n: x.release(f"p{n}", Cohort("d", SOME, n), Outcome.RETRY),
    "release of nothing": lambda x, n: x.release(f"none {n}", Cohort("d", SOME, n), Outcome.RETRY),
    "pack": lambda x, n: Pack(x.params.key, f"p{n}", n, ONE),
    "pack of all blocks": lambda x, n: Pack(x.params.key, f"p{n}", n, but_blocks(((0, 4000),))),
    "pack of blocks that are not lent": lambda x, n: Pack(x.params.key, f"p{n}", n, but_blocks(((4090, 1),))),
    "pack of rows": lambda x, n: Pack(x.params.key, f"p{n}", n, ROWS),
    "pack of boxes": lambda x, n: Pack(x.params.key, f"p{n}", n, BOXES),
    "pack of runs": lambda x, n: Pack(x.params.key, f"p{n}", n, RUNS),
    "unpack": lambda x, n: Unpack(x.params.key, f"p{n}", n),
    "hello": lambda x, n: Hello(n, wire.MAJOR, wire.MINOR, "prefill", 0, Cohort("d")),
    "hello to another": lambda x, n: Hello(n, wire.MAJOR, wire.MINOR, "other", 0, Cohort("d")),
    "question": lambda x, n: StatusRequest(n),
    "question about requests": lambda x, n: StatusRequest(n, 256),
    "follow": lambda x, n: wire.Follow(f"{n:032x}", n, Cohort("d")),
    "follow no more": lambda x, n: wire.Unfollow(f"{n:032x}", n),
    "answer to nobody": lambda x, n: Granted(x.params.key, f"p{n}", n, 1.0, 1.0),
}
ANSWERS = {wire.Welcome, wire.Unwelcome, wire.NotYet, wire.Refused, wire.Ack, wire.Status, wire.Packed}
ANSWERS |= {wire.Goodbye, wire.Draining, wire.Offered}
EVENTS_PER_PING = 24


def but_blocks(blocks: Any) -> Recipe:
    return msgspec.structs.replace(ONE, blocks=blocks)


def test_every_kind_of_message_has_a_price() -> None:
    lender = Lender()
    tried = {type(make(lender, 0)) for make in MESSAGES.values()}
    assert COSTS.keys() == set(get_args(wire.Message)) == tried | ANSWERS


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("is_meant", [True, False])
def test_a_peer_pays_for_the_work_of_each_message(name: str, is_meant: bool) -> None:
    """A packet as full as it may be, beside thousands of grants."""
    lender = spoken_for(SOME)
    messages: list[Message] = []
    while len(messages) < MAX_MESSAGES:
        messages.append(MESSAGES[name](lender, len(messages)))
        data = encode_packet("s", "" if is_meant else "another start", messages)
        if len(data) > MAX_REQUEST_PACKET:
            data = encode_packet("s", "" if is_meant else "another start", messages[:-1])
            break
    core, now = lender.core, 0.5
    turns = [events_of(lambda: core.receive(WAY, data, now, KEY))]
    while core.read_on_at <= now:
        turns.append(events_of(lambda: core.tick(now)))
    level, at = core._messages.buckets[KEY]
    assert at == now
    paid = lender.core.config.limits.message_burst - level
    assert sum(turns) < EVENTS_PER_PING * paid
    assert max(turns) < EVENTS_PER_PING * (SLICE + core_rank._cost_of_copy(Pack(lender.params.key, "p", 1, BOXES)))


def test_a_flood_of_one_connection_is_dropped_by_its_work() -> None:
    answered = {}
    for name in ("ping", "renewal", "repeated claim", "pack"):
        lender = spoken_for(SOME)
        lender.core._messages._burst = 600.0
        answers = [lender.hear([MESSAGES[name](lender, n)], 0.5) for n in range(1000)]
        answered[name] = lender.core.outbox.counters[core_rank._RECEIVED[type(MESSAGES[name](lender, 0))]]
        assert answers
    assert answered["ping"] == 600
    assert answered["renewal"] == 300
    assert answered["pack"] <= 61


def test_a_large_packet_is_handled_in_turns_in_order_and_others_are_served_between() -> None:
    lender = spoken_for(SOME)
    core = lender.core
    packet = encode_packet("s", "", [MESSAGES["pack"](lender, n) for n in range(MAX_MESSAGES)])
    last = encode_packet("s", "", [lender.release("p1", Cohort("d", SOME, 1))])
    core.receive(WAY, packet, 0.5, KEY)
    assert 0 < core.outbox.counters["received.pack"] < MAX_MESSAGES // 4
    assert core.next_at <= 0.5
    core.receive(WAY, last, 0.5, KEY)
    core.receive(ReplyTo(b"other"), encode_packet("t", "", [Ping(1)]), 0.5, "key:other")
    assert core.outbox.counters["sent.pong"] == 1, "it waits for nobody"
    assert core.outbox.counters["received.release"] == 0, "it came behind the packs"
    while core.read_on_at <= 0.5:
        assert core.outbox.counters["received.release"] == 0
        core.tick(0.5)
    assert core.outbox.counters["received.pack"] == MAX_MESSAGES
    assert core.outbox.counters["received.release"] == 1
    assert core.next_at > 0.5


def test_packets_behind_large_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_rank, "MAX_SENDERS", 3)
    lender = spoken_for(SOME)
    core = lender.core
    packet = encode_packet("s", "", [MESSAGES["pack"](lender, n) for n in range(MAX_MESSAGES)])
    for key in "abcd":
        core.receive(ReplyTo(key.encode()), packet, 0.5, f"key:{key}")
    assert core.outbox.counters["dropped.too_many"] == 1
    for _ in range(40):
        core.receive(ReplyTo(b"a"), encode_packet("s", "", [Ping(1)]), 0.5, "key:a")
    assert core.outbox.counters["dropped.too_many"] > 20
    while core.read_on_at <= 0.5:
        core.tick(0.5)
    assert core.outbox.counters["received.pack"] == 3 * MAX_MESSAGES
    assert not core._unread


def test_nobody_waits_behind_a_large_packet_of_another_connection() -> None:
    """All engines of a fleet may have one key, so a key is no reason to wait, let alone to be dropped."""
    lender = spoken_for(SOME)
    core = lender.core
    core.receive(WAY, encode_packet("s", "", [MESSAGES["pack"](lender, n) for n in range(MAX_MESSAGES)]), 0.5, KEY)
    for n in range(63):
        packet = encode_packet("s", "", [MESSAGES["repeated claim"](lender, n)])
        core.receive(ReplyTo(b"way %d" % n), packet, 0.5, KEY)
    assert core.outbox.counters["sent.granted"] == SOME + 63
    # Small packets that wait behind the large one are taken together, as far as they take little.
    for n in range(core_rank.MAX_UNREAD - 8):
        core.receive(WAY, encode_packet("s", "", [MESSAGES["repeated claim"](lender, n)]), 0.5, KEY)
    num_turns = 0
    while core.read_on_at <= 0.5:
        core.tick(0.5)
        num_turns += 1
    assert core.outbox.counters["sent.granted"] == SOME + 63 + core_rank.MAX_UNREAD - 8
    assert num_turns <= 1 + MAX_MESSAGES * core_rank.COSTS[Pack] // SLICE + 1


def test_an_empty_packet_costs_as_much_as_a_ping() -> None:
    core = Lender(messages_per_s=1.0, message_burst=100).core
    for _ in range(200):
        core.receive(WAY, encode_packet("s", "", []), 0.5, KEY)
    assert core.outbox.counters["dropped.too_many"] == 100


def test_a_handshake_too_many_takes_no_other_message_along() -> None:
    lender = spoken_for(SOME)
    for name in ("hello", "question"):
        lender.hear([MESSAGES[each](lender, n) for n, each in enumerate([name] * 400 + ["release"])], 0.5)
    assert 0 < lender.core.outbox.counters["dropped.too_many_hellos"] < 800
    assert lender.core.outbox.counters["received.release"] == 2


# -- slots for packed copies -------------------------------------------------------------------------------------------


class Crowd(Owner):
    """An owner of 16 slots, a peer with six connections that keeps every copy, and an honest reader."""

    def __init__(self, thief: str, honest: str) -> None:
        super().__init__(16)
        self.thief, self.honest = thief, honest
        self.other = self.world.params([self.rank], "s", [5], 4, written=True)
        self.lend(self.other)
        for way in range(6):
            self.claim(f"p{way}", sender=f"s{way}", way=b"%d" % way, key=thief)
        for nonce, way in itertools.product(range(MAX_WAITING), range(6)):
            self.pack(nonce, f"p{way}", sender=f"s{way}", way=b"%d" % way, key=thief)
        self.claim("mine", params=self.other, sender="good", way=b"good", key=honest)

    def ask(self, nonce: int) -> None:
        assert self.pack(nonce, "mine", params=self.other, sender="good", way=b"good", key=self.honest) == []

    def made_for(self, slot: int) -> list[str]:
        """End the work on a slot, and return the pulls that hear of it."""
        self.world.finish_copy(self.rank, slot)
        packets = self.rank.core.outbox.take_packets()
        self.world.settle(self.rank)
        return [m.pull_id for _, data in packets for m in decode_packet(data).messages if isinstance(m, Packed)]


@pytest.mark.parametrize(
    ("thief", "honest"), [("key:thief", "key:good"), ("host:10.0.0.7", "host:10.0.0.8")], ids=["keys", "hosts"]
)
def test_many_connections_of_one_peer_have_the_slots_of_one(thief: str, honest: str) -> None:
    crowd = Crowd(thief, honest)
    for _ in range(40):
        for slot in crowd.making:
            crowd.made(slot)
    assert crowd.copies.slots.num_in_use == 8, "half are left for others"
    assert crowd.copies.num_waiting <= MAX_WAITING
    for nonce in range(4):
        crowd.ask(nonce)
    assert len(crowd.making) == 4
    assert [crowd.made_for(slot) for slot in crowd.making] == [["mine"]] * 4


def test_a_reader_waits_for_few_copies_of_a_peer_that_asks_for_many() -> None:
    """The thread makes them in order, so few are handed to it."""
    crowd = Crowd("key:thief", "key:good")
    crowd.ask(1)
    heard = []
    while "mine" not in heard:
        heard += crowd.made_for(next(iter(crowd.rank.making)))
    assert len(heard) <= 1 + copies.MAX_MAKING
    # Peers that wait take turns, however many wishes each has.
    crowd.ask(2)
    assert len(crowd.rank.making) <= 2 * copies.MAX_MAKING


# -- parts in the gaps of others ---------------------------------------------------------------------------------------


class Interleaved:
    """Keys in rows, with scales between the rows: of the same block, or of the one before."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.heads, entry, self.before = rng.choice((2, 4)), rng.choice((1, 2, 4)), rng.random() < 0.3
        row, scales, pad = self.heads * 64, 16 // entry, rng.choice((0, 4, 60))
        step = row + 4 + pad
        first = rng.randrange(16 - scales + 1)
        stride = 16 * step + rng.choice((0, step, 24))
        late = stride if self.before else 0  # then a scale lies in the gaps of the next block's keys
        self.there = self.layout(step, 64, row + first * step + late, step, stride, self.heads, 0, 16, entry)
        self.here = self.layout(64, 0, 4 * 64, 4, 4 * 64 + 4 * 4, 1, rng.randrange(self.heads), 4, entry)
        self.ids = rng.sample(range(1, 10), 3)
        for each in (self.here, self.there):
            check_layout(each)

    def layout(
        self,
        token: int,
        head: int,
        scale: int,
        between: int,
        stride: int,
        held: int,
        first: int,
        block: int,
        entry: int,
    ) -> Layout:
        dims = Dim("token", block, token), Dim("head", held, head or 64), Dim("dim", 32, 2)
        k = Part("k", "float16", 2, 0, dims, "head", (first, first + held), self.heads)
        scales = Part("scale", "float32", 4, scale, (Dim("token", block // entry, between),), tokens_per_entry=entry)
        parts, size = (k, scales), 41 * stride + 4096
        views = (View(0, 0, "layer", 0, stride, parts),)
        groups = (Group("g", block, 40 if block == 4 else 10),)
        rank, ranks = (first, self.heads) if held == 1 else (0, 1)
        return Layout(tp_rank=rank, tp_size=ranks, memories=(Memory(1 << 40, size),), groups=groups, views=views)

    def bytes_of(self, block: int) -> set[int]:
        found = set[int]()
        for view in self.there.views:
            for part in view.parts:
                steps = itertools.product(*[[i * dim.stride for i in range(dim.size)] for dim in part.dims])
                for at in [view.offset + part.offset + block * view.stride + sum(each) for each in steps]:
                    found.update(range(at, at + part.itemsize))
        return found


@pytest.mark.parametrize("seed", range(24))
def test_parts_that_lie_in_the_gaps_of_others_are_packed_to_the_byte(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_WHOLE", math.inf)
    case = Interleaved(seed)
    ours, theirs = Buffers(case.here, 1), Buffers(case.there, 2)
    written = [np.zeros(len(a), np.bool_) for a in ours.arrays]
    costs = PACKED._replace(slot_bytes=1 << 20)
    maps = PeerTables(case.here, case.there, assign(case.here, [case.there])[0], itertools.count(1), costs, PACK_BYTES)
    assert [found.span.remote_offset for found in maps.regular] == [0, 4, 8, 12]
    assert all(found.pack_bytes for found in maps.regular)
    for n, found in enumerate(maps.regular):
        local = [4 * at + n for at in range(3)]
        execute(plan(found, local, case.ids), ours, theirs, written, (1 << 20, 512), lent=[(0, case.ids)])
    (here,), (there,) = case.here.views, case.there.views
    for (at, block), n in itertools.product(enumerate(case.ids), range(4)):
        for mine, other in zip(here.parts, there.parts, strict=True):
            lo = mine.held[0] - other.held[0] if mine.axis else 0
            for steps in itertools.product(*[range(dim.size) for dim in mine.dims]):
                to = (4 * at + n) * here.stride + mine.offset
                source = block * there.stride + other.offset
                for dim, twin, i in zip(mine.dims, other.dims, steps, strict=True):
                    to += i * dim.stride
                    source += {"token": i + n * dim.size, "head": i + lo}.get(dim.name, i) * twin.stride
                size = mine.itemsize
                assert ours.arrays[0][to : to + size].tobytes() == theirs.arrays[0][source : source + size].tobytes()


@pytest.mark.parametrize("seed", range(24))
def test_no_recipe_gets_a_byte_of_a_block_that_is_not_lent(seed: int) -> None:
    case, rng = Interleaved(seed), random.Random(seed)
    (view,), ranges, lent = case.there.views, Ranges(case.there), np.sort(case.ids)
    foreign = set[int]().union(*[case.bytes_of(block) for block in range(10) if block not in case.ids])
    theirs, num_taken = Buffers(case.there, 2), 0
    row = case.heads * 64
    token = view.parts[0].dims[0].stride
    for _ in range(400):
        piece = rng.choice((4, 64, row, row + 4, token, view.stride, rng.randrange(1, 2 * view.stride)))
        dims = ((rng.choice((1, 2, 15, 16, 17)), rng.choice((token, 64, view.stride))),) if rng.random() < 0.6 else ()
        offset = max(rng.choice((0, row, view.parts[1].offset, token)) + rng.choice((0, 0, 0, -4, 64, token)), 0)
        asked = Recipe(0, ((piece, dims),), ((0, offset, 0),), ((rng.choice(case.ids), 1),))
        try:
            taken = check_recipe(decoded(asked), ranges, lent, PACK_BYTES)
        except LayoutError:
            continue
        num_taken += 1
        gather(taken, theirs)  # which stays within the memory
        ((_, at, stride, length, shape, strides),) = taken.rows
        for steps in itertools.product(*map(range, shape)):
            begin = at + int(taken.blocks[0]) * stride + sum(i * by for i, by in zip(steps, strides, strict=True))
            assert foreign.isdisjoint(range(begin, begin + length))
    assert num_taken > 10


def test_no_gap_holds_a_piece_of_a_part_that_is_longer_than_a_block() -> None:
    """Rows of `long` reach into the next blocks, where they lie between the two entries of `short`."""
    short = Part("short", "float16", 2, 44, (Dim("token", 2, 10),), tokens_per_entry=2)
    long = Part("long", "float16", 2, 36, (Dim("token", 4, 40), Dim("dim", 4, 10)))
    views = (View(0, 0, "layer", 288, 48, (short, long)),)
    layout = Layout(memories=(Memory(1 << 40, 4096),), groups=(Group("g", 4, 6),), views=views)
    check_layout(layout)
    ranges, lent = Ranges(layout), np.array([1])
    for offset in (332, 342):
        check_recipe(Recipe(0, ((2, ()),), ((0, offset, 0),), ((1, 1),)), ranges, lent, PACK_BYTES)
    assert 288 + 36 + 40 + 2 * 10 == 332 + 48 + 4, "here a row of block 0 begins"
    with pytest.raises(LayoutError, match="in no block"):
        check_recipe(Recipe(0, ((12, ()),), ((0, 332, 0),), ((1, 1),)), ranges, lent, PACK_BYTES)
