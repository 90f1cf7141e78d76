"""The prefill side of one rank: what is granted, what is parked, and which blocks can be lent."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckv.config import LeaseConfig, LimitsConfig
from asynckv.core import prefill, readers
from asynckv.core.lease import MAX_ATTEMPTS, MAX_HISTORY, Lease, LeaseState, Lent, Reader
from asynckv.core.ledger import FEW
from asynckv.core.prefill import _blocks_of
from asynckv.core.spent import MAX_EPOCHS, SpentKeys
from asynckv.core.timers import Timers
from asynckv.core.types import MAX_ID, Address, Cohort, Key, KVTransferParams, Outcome, Reason, ReplyTo, RequestId
from asynckv.core.wire import (
    MAJOR,
    MINOR,
    Ack,
    Claim,
    Draining,
    Goodbye,
    Granted,
    Hello,
    Message,
    NotYet,
    Ping,
    Pong,
    Refused,
    Release,
    Renew,
    Unwelcome,
    Welcome,
    blocks_digest,
    decode_packet,
    encode_packet,
)
from asynckv.errors import AsyncKVError, ConfigError, LocalProtocolError, PlanRefused
from asynckv.geometry.blocks import as_columns, check_blocks, check_covers, expanded
from asynckv.geometry.bounds import NULL, BlockRuns, Int64s
from asynckv.geometry.layout import Group
from asynckv.told import ReaderRefused
from tests.world import Rank, World, alone, make_layout

READER = Cohort("decode")
ONE, OTHER = ReplyTo(b"one"), ReplyTo(b"other")

numbers = itertools.count()


def claim(params: KVTransferParams, pull_id: str = "pull", nonce: int = 1) -> Claim:
    digest = blocks_digest(params)
    return Claim(params.key, params.request_id, READER, pull_id, nonce, digest, 600.0)


def say(rank: Rank, message: Claim | Renew | Release, now: float, reply_to: ReplyTo = ONE) -> list[Message]:
    """Say something to a rank, and return all that it answers."""
    rank.core.prefill.receive(message, reply_to, "process", now)
    return [m for _, data in rank.core.outbox.take_packets() for m in decode_packet(data).messages]


# -- readers that are gone -----------------------------------------------------------------------------


def claimed_by(world: World, name: str, prefill: Rank, params: KVTransferParams) -> Rank:
    """A start of the decode rank's process, which has claimed."""
    reader = world.add(name, make_layout(), engine_id="decode")
    world.announce(reader, f"by {name}", params, 600.0)
    world.run()
    return reader


def ended_after(world: World, lease: Lease) -> float:
    began = world.now
    while not lease.is_over:
        world.advance(0.5)
        world.letters.clear()
    return world.now - began


LONG = LeaseConfig(lease_s=30.0, grant_s=4.0)


@pytest.mark.parametrize("grants", [1, 3])
def test_a_lease_of_a_killed_reader_ends_with_its_last_grant(grants: int) -> None:
    world, prefill = alone(lease=LONG)
    params, lease = world.lent(prefill, "r", [3])
    reader = claimed_by(world, "d", prefill, params)
    for _ in range(grants):  # renewed a few times
        world.advance(1.5)
        world.run()
    (grant,) = lease.grants.values()
    runs_s = grant.until - world.time(prefill)
    del world.ranks["d"], world.ports[reader.route]  # its connection ends
    assert runs_s <= ended_after(world, lease) <= runs_s + 1.5
    assert (lease.state, lease.gone) == (LeaseState.EXPIRED, {Reader("decode", 0)})
    assert len(prefill.core.ledger) == 0
    assert prefill.core.outbox.counters["leases.expired"] == 1


def test_a_lease_of_a_stopped_reader_lasts_for_its_whole_time() -> None:
    """Its connection stands, so it may go on; it was sent pings, to find that out."""
    world, prefill = alone(lease=LONG)
    params, lease = world.lent(prefill, "r", [3])
    reader = claimed_by(world, "d", prefill, params)
    del world.ranks["d"]
    assert ended_after(world, lease) == pytest.approx(30.0, abs=0.5)
    assert not lease.gone
    assert 4 <= prefill.core.outbox.counters["sent.ping"] <= 7
    assert world.ports[reader.route] is reader


def test_a_second_process_of_one_name_ends_nothing_of_a_first_that_lives() -> None:
    """A mistake of whoever set them up. The first lets its grant lapse, and answers when it is asked."""
    world, prefill = alone(lease=LONG)
    params, other = (world.params([prefill], name, [block], 4) for name, block in (("r", 3), ("other", 4)))
    lease = world.lend(prefill, params)
    claimed_by(world, "d", prefill, params)
    claimed_by(world, "again", prefill, other)
    began = world.now
    while not lease.is_over:
        world.advance(0.5)
        world.letters = [x for x in world.letters if x.sender.name != "d" or is_pong(x.data)]
        world.deliver_all()
    assert world.now - began == pytest.approx(30.0, abs=1.0)
    assert not lease.gone


def test_with_keys_a_later_start_ends_what_the_one_before_let_lapse_and_another_key_does_not() -> None:
    for key, is_gone in (("key:mine", True), ("key:another", False)):
        world, rank = alone(lease=LONG)
        params = world.params([rank], "r", [3], 4)
        lease, hello = world.lend(rank, params), Hello(1, MAJOR, MINOR, "prefill", 0, READER)
        rank.core.readers.greet(hello, ONE, "process", "key:mine", "", False)
        rank.core.prefill.receive(claim(params), ONE, "process", 0.0, "key:mine")
        rank.core.readers.greet(hello, OTHER, "next process", key, "", False)
        for now in (4.0, 5.0, 6.0):
            rank.core.tick(now)
        assert lease.is_over is is_gone


@pytest.mark.parametrize("said", ["", "pong", "renew"])
def test_a_connection_from_which_something_comes_has_not_ended(said: str) -> None:
    """It was thought to have ended. It is there until that is found out anew."""
    world, rank = alone(lease=LONG)
    params, lease = world.lent(rank, "r", [3])
    say(rank, claim(params), 0.0)
    rank.core.prefill.unreachable(ONE)
    if said == "pong":
        rank.core.prefill.answered(ONE, 1.0)
    elif said == "renew":
        say(rank, Renew(params.key, "pull", 2, 600.0), 1.0)
    for now in (4.5, 6.5):
        rank.core.tick(now)
        assert lease.is_over is (not said)
    rank.core.prefill.unreachable(ONE)
    rank.core.tick(9.0)
    assert lease.is_over


def is_pong(data: bytes) -> bool:
    return all(isinstance(message, Pong) for message in decode_packet(data).messages)


def test_a_reader_whose_connection_broke_and_came_back_is_not_gone() -> None:
    """Renewed over a second connection, it pauses. Of a killed one both have ended."""
    for num_ended, is_gone in ((1, False), (2, True)):
        world, rank = alone(lease=LONG)
        params, lease = world.lent(rank, "r", [3])
        say(rank, claim(params), 0.0)
        say(rank, Renew(params.key, "pull", 2, 600.0), 3.0, OTHER)
        for way in (ONE, OTHER)[:num_ended]:
            rank.core.prefill.unreachable(way)
        rank.core.tick(7.0)
        assert lease.is_over is is_gone
    lease_ways = [ReplyTo(b"%d" % n) for n in range(9)]
    world, rank = alone(lease=LONG)
    params, lease = world.lent(rank, "r", [3])
    for n, way in enumerate(lease_ways):
        say(rank, claim(params, nonce=n), 0.1 * n, way)
    release = Release(params.key, params.request_id, READER, "pull", Outcome.RETRY)
    say(rank, release, 1.0, OTHER)
    (stray,) = lease.tick(5.0).strays
    assert stray.ways == (*lease_ways[6:], OTHER)
    params, lease = world.lent(rank, "retried", [4])
    say(rank, claim(params), 1.0)
    say(rank, msgspec.structs.replace(release, key=params.key, request_id=params.request_id), 2.0, OTHER)
    (stray,) = lease.tick(6.0).strays
    assert stray.ways == (ONE, OTHER)


def test_a_reader_whose_connection_broke_often_and_came_back_is_not_gone() -> None:
    world, rank = alone(lease=LONG)
    params, lease = world.lent(rank, "r", [3])
    ways = [ReplyTo(b"%d" % n) for n in range(6)]
    say(rank, claim(params), 0.0, ways[0])
    for n, way in enumerate(ways[1:], 1):
        say(rank, Renew(params.key, "pull", n + 1, 600.0), 3.0 * n, way)
    for way in ways[:-1]:
        rank.core.prefill.unreachable(way)
    rank.core.tick(20.0)
    assert not lease.is_over
    rank.core.prefill.unreachable(ways[-1])
    rank.core.tick(25.0)
    assert lease.is_over


def test_a_reader_has_time_to_answer_a_ping() -> None:
    """The lease is woken for a warning a moment after it was sent."""
    world, prefill = alone(lease=LONG)
    params, other = (world.params([prefill], name, [block], 4) for name, block in (("r", 3), ("other", 4)))
    lease = world.lend(prefill, params)
    claimed_by(world, "d", prefill, params)
    claimed_by(world, "again", prefill, other)
    lease.warn_at = lease.look_at + 0.001
    world.advance(lease.look_at + 0.002 - world.now)
    assert lease.past
    assert not lease.gone
    assert not lease.is_over


def test_a_later_start_of_a_reader_says_that_the_one_before_is_gone() -> None:
    """Also if the host was lost, and nothing ended its connection. Its grant is kept all the same."""
    world, prefill = alone(lease=LONG)
    params, other = (world.params([prefill], name, [block], 4) for name, block in (("r", 3), ("other", 4)))
    lease = world.lend(prefill, params)
    claimed_by(world, "d", prefill, params)
    del world.ranks["d"]
    world.advance(1.0)
    again = claimed_by(world, "again", prefill, other)
    assert lease.grants
    assert again.core.identity.incarnation != "d"
    assert 2.0 <= ended_after(world, lease) <= 4.5
    assert (lease.state, lease.gone) == (LeaseState.EXPIRED, {Reader("decode", 0)})


def test_a_process_start_is_replaced_by_a_later_one_of_the_same_rank_with_the_same_key() -> None:
    _, rank = alone(lease=LONG)
    readers = rank.core.readers
    hello = Hello(1, MAJOR, MINOR, "prefill", 0, READER)
    others = (
        (msgspec.structs.replace(hello, reader=Cohort("decode", 2, 1)), "key:a"),
        (msgspec.structs.replace(hello, reader=Cohort("decode", 1, 0, 2, 1)), "key:a"),
        (msgspec.structs.replace(hello, reader=Cohort("another")), "key:a"),
        (hello, "key:b"),
    )
    assert not readers.is_replaced("start 1", "key:a")  # never met
    readers.greet(hello, OTHER, "start 1", "key:b", "", False)  # a thief was first with that name
    readers.greet(hello, ONE, "start 1", "key:a", "", False)
    for i, (said, key) in enumerate(others):
        readers.greet(said, OTHER, f"other {i}", key, "", False)
        assert not readers.is_replaced("start 1", "key:a")
    readers.greet(hello, OTHER, "start 2", "key:a", "", False)
    assert [readers.is_replaced(f"start {n}", "key:a") for n in (1, 2)] == [True, False]
    readers.greet(hello, ONE, "start 1", "key:a", "", False)  # it lives after all
    assert [readers.is_replaced(f"start {n}", "key:a") for n in (1, 2)] == [False, True]


def test_what_is_remembered_of_process_starts_and_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckv.core.readers.MAX_READERS", 3)
    monkeypatch.setattr("asynckv.core.prefill.MAX_UNREACHABLE", 3)
    _, rank = alone(lease=LONG)
    readers, prefill = rank.core.readers, rank.core.prefill
    for n in range(9):
        readers.greet(Hello(1, MAJOR, MINOR, "prefill", 0, Cohort(f"d{n // 2}")), ONE, f"start {n}", "", "", False)
        prefill.unreachable(ReplyTo(b"%d" % n))
        prefill.answered(ReplyTo(b"%d" % n), float(n))
        prefill.unreachable(ReplyTo(b"%d" % n))
    assert len(readers._met) == len(prefill._unreachable) == len(prefill._answered) == 3
    assert len(readers._newest) == 2
    assert readers.is_replaced("start 6", "")
    assert not readers.is_replaced("start 0", "")  # forgotten
    # One that came back is forgotten before the one that had taken its place.
    for n, engine in ((10, "d"), (11, "d"), (10, "d"), (12, "e"), (13, "e")):
        readers.greet(Hello(1, MAJOR, MINOR, "prefill", 0, Cohort(engine)), ONE, f"start {n}", "", "", False)
    assert [readers.is_replaced(f"start {n}", "") for n in (10, 11, 12, 13)] == [False, False, True, False]


def test_of_connections_that_answer_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckv.core.prefill.MAX_UNREACHABLE", 3)
    monkeypatch.setattr("asynckv.core.prefill.MAX_ENGINES", 3)
    world, rank = alone(lease=LONG)
    for n in (1, 2, 1, 3, 1, 4):
        rank.core.prefill.answered(ReplyTo(b"%d" % n), float(n))
        (lease,) = lent_to(world, rank, f"engine{n}", 1)
        (pull,) = lease.grants
        release = Release(lease.lent.key, lease.lent.request_id, Cohort(f"engine{n}"), pull, Outcome.COMPLETE)
        rank.core.prefill.receive(release, ReplyTo(b"%d" % n), f"engine{n}", 1.0)
    assert list(rank.core.prefill._answered) == [b"3", b"1", b"4"]
    assert list(rank.core.prefill._read_at) == ["engine3", "engine1", "engine4"]


# -- no room ---------------------------------------------------------------------------------------------


def lent_to(world: World, prefill: Rank, engine: str, number: int, claims: bool = True, key: str = "") -> list[Lease]:
    """Lend requests of a block each, which a decode engine has claimed, or nobody."""
    leases = []
    for _ in range(number):
        block = next(numbers)
        params = world.params([prefill], f"{engine}-{block}", [block % 12], 4)
        leases.append(world.lend(prefill, params))
        if claims:
            digest = blocks_digest(params)
            message = Claim(params.key, params.request_id, Cohort(engine), f"pull-{block}", 1, digest, 600.0)
            prefill.core.prefill.receive(message, ReplyTo(engine.encode()), engine, world.time(prefill), key)
    return leases


def renewed(prefill: Rank, leases: list[Lease], now: float) -> None:
    for lease in leases:
        for grant in list(lease.grants.values()):
            prefill.core.prefill.receive(
                Renew(lease.lent.key, grant.pull_id, 2, 600.0), grant.ways[0], grant.sender, now
            )


def states(leases: list[Lease]) -> str:
    return "".join(lease.state.value[0] for lease in leases)


def test_room_is_made_by_the_reader_engine_that_holds_most_and_its_oldest_request_goes_first() -> None:
    world, prefill = alone(lease=LONG)
    slow, quick = lent_to(world, prefill, "slow", 9), lent_to(world, prefill, "quick", 2)
    assert prefill.core.prefill.reclaim(3, 3.9) == ()  # each is kept for one grant
    renewed(prefill, slow + quick, 3.9)
    assert prefill.core.prefill.reclaim(0, 4.0) == ()
    assert prefill.core.prefill.reclaim(1, 4.0) == (slow[0],)
    assert (states(slow), states(quick), slow[0].revoked_by) == ("e" + 8 * "l", "ll", "no_room")
    assert prefill.core.prefill.reclaim(1, 4.1) == (), "that one's block has not returned, and is on its way"
    assert prefill.core.prefill.reclaim(100, 4.1) == (slow[1], slow[2]), "half of the 12 blocks are its share"
    assert states(slow) == "eee" + 6 * "l"
    assert slow[0].grants, "a promise is kept"
    prefill.core.tick(8.0)
    assert (states(slow), len(prefill.core.ledger)) == ("rrr" + 6 * "l", 8)
    assert prefill.core.prefill.reclaim(100, 8.1) == (), "nor does its share shrink"


def test_the_only_reader_engine_keeps_all_and_so_does_one_among_equals() -> None:
    world, prefill = alone(lease=LONG)
    leases = lent_to(world, prefill, "only", 6)
    assert prefill.core.prefill.reclaim(6, 5.0) == ()
    leases += lent_to(world, prefill, "other", 6)
    assert prefill.core.prefill.reclaim(6, 20.0) == ()
    assert states(leases) == "l" * 12


def test_a_reader_engine_that_has_read_lately_has_a_share_though_it_holds_nothing() -> None:
    """It is the one that waits: there was no room to prefill its prompts."""
    world, prefill = alone(lease=LONG)
    (read,), slow = lent_to(world, prefill, "quick", 1), lent_to(world, prefill, "slow", 8)
    cohort, (pull,) = Cohort("quick"), read.grants
    release = Release(read.lent.key, read.lent.request_id, cohort, pull, Outcome.COMPLETE)
    prefill.core.prefill.receive(release, ReplyTo(b"quick"), "quick", 1.0)
    assert read.is_over
    assert prefill.core.prefill.reclaim(4, 30.9) == tuple(slow[:2])
    world, prefill = alone(lease=LONG)
    (read,), slow = lent_to(world, prefill, "quick", 1), lent_to(world, prefill, "slow", 8)
    (pull,) = read.grants
    release = Release(read.lent.key, read.lent.request_id, cohort, pull, Outcome.COMPLETE)
    prefill.core.prefill.receive(release, ReplyTo(b"quick"), "quick", 1.0)
    assert prefill.core.prefill.reclaim(4, 31.0) == (), "that was long ago"


def test_requests_that_are_too_new_do_not_keep_those_of_another_engine() -> None:
    world, prefill = alone(lease=LONG)
    old = lent_to(world, prefill, "old", 8)
    world.advance(3.0)
    new = lent_to(world, prefill, "new", 9)  # of the same blocks, as of a prefix that both read
    assert prefill.core.prefill.reclaim(1, 5.0) == (old[0],)
    assert states(new) == "l" * 9


def test_unclaimed_requests_are_those_of_one_more_engine() -> None:
    world, prefill = alone(lease=LONG)
    nobody = lent_to(world, prefill, "", 8, claims=False)
    assert prefill.core.prefill.reclaim(6, 5.0) == (), "whose they are is not known, and nobody else is"
    lent_to(world, prefill, "one", 1)
    assert prefill.core.prefill.reclaim(6, 5.0) == tuple(nobody[:2])
    lent_to(world, prefill, "other", 1)
    assert prefill.core.prefill.reclaim(6, 5.0) == tuple(nobody[2:4])
    assert states(nobody) == "rrrrllll", "nothing was promised"


def test_names_that_hold_nothing_any_more_are_those_of_one_more_however_many_they_are() -> None:
    """Without keys one reader has as many names as it likes, and must not leave others a share of nothing."""
    world, prefill = alone(lease=LONG)
    honest = lent_to(world, prefill, "honest", 4)
    for n in range(8):
        (lease,) = lent_to(world, prefill, f"evil{n}", 1)
        (pull,) = lease.grants
        release = Release(lease.lent.key, lease.lent.request_id, Cohort(f"evil{n}"), pull, Outcome.COMPLETE)
        prefill.core.prefill.receive(release, ReplyTo(b"x"), f"evil{n}", 1.0)
    assert prefill.core.prefill.reclaim(100, 5.0) == ()
    assert states(honest) == "llll"


def test_names_that_an_engine_makes_up_give_it_no_larger_share() -> None:
    """Nine cohorts of one key hold nine blocks; another engine's three, which are newer, stay."""
    world, prefill = alone(lease=LONG)
    evil = [lent_to(world, prefill, f"evil{n}", 1, key="key:evil")[0] for n in range(9)]
    honest = lent_to(world, prefill, "honest", 3, key="key:honest")
    assert prefill.core.prefill.reclaim(100, 5.0) == tuple(evil[:3])
    assert states(honest) == "lll"


def test_without_keys_an_engine_goes_by_the_name_with_which_it_shook_hands() -> None:
    world, prefill = alone(lease=LONG)
    leases = []
    for n in range(9):
        hello = Hello(1, MAJOR, MINOR, "prefill", 0, Cohort("d"))
        prefill.core.readers.greet(hello, ReplyTo(b"x"), f"cohort{n}", "", "", False)
        leases += lent_to(world, prefill, f"cohort{n}", 1)
    lent_to(world, prefill, "other", 1)
    assert prefill.core.prefill.reclaim(100, 5.0) == tuple(leases[:3])


def test_reader_engines_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynckv.core.prefill.MAX_ENGINES", 2)
    world, prefill = alone(lease=LONG)
    for engine in "abcd":
        lent_to(world, prefill, engine, 1)
    prefill.core.tick(600.0)
    assert list(prefill.core.prefill._read_at) == ["c", "d"]


# -- grants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lease_s", "seconds"), [(2.5, 2.5), (10.0, 10.0), (60.0, 10.0)])
def test_no_grant_is_longer_than_its_request_is_lent_for(lease_s: float, seconds: float) -> None:
    world, rank = alone(lease=LeaseConfig(lease_s=30.0, grant_s=10.0, max_lease_s=600.0))
    params, lease = world.lent(rank, "r", [3], lease_s=lease_s)
    (answer,) = say(rank, claim(params), lease.lent_at + 1.0)
    assert isinstance(answer, Granted)
    assert answer.seconds == seconds


def test_no_reader_holds_a_request_for_longer_than_any_lease_may_last() -> None:
    world, rank = alone(lease=LeaseConfig(lease_s=5.0, grant_s=2.0, max_lease_s=12.0))
    params, lease = world.lent(rank, "r", [3], lease_s=5.0)
    now = lease.lent_at
    say(rank, claim(params), now)
    while not lease.is_over:
        now += 0.5
        say(rank, Renew(params.key, "pull", 1, 600.0), now)
        rank.core.tick(now)
        assert now <= lease.lent_at + 12.0
    assert len(rank.core.ledger) == 0


def test_the_longest_lease_counts_from_when_the_request_was_lent() -> None:
    """However late somebody comes, and whatever attempt it is."""
    world, rank = alone(lease=LeaseConfig(lease_s=10.0, grant_s=4.0, max_lease_s=12.0))
    params = world.params([rank], "r", [3], 4, lease_s=10.0)
    begun = world.lend(rank, params).lent_at
    say(rank, claim(params, "first"), begun + 7.0)
    for pull_id, message in (("first", Renew(params.key, "first", 2, 600.0)), ("second", claim(params, "second"))):
        (answer,) = say(rank, message, begun + 10.5)
        assert isinstance(answer, Granted), pull_id
        assert answer.seconds == 1.5


def test_no_request_is_lent_for_longer_than_any_lease_may_last() -> None:
    """Params may say what they like: a scheduler has other settings, or a router has changed them."""
    world, rank = alone(lease=LeaseConfig(lease_s=5.0, grant_s=2.0, max_lease_s=12.0))
    params = msgspec.structs.replace(world.params([rank], "r", [3], 4, lease_s=5.0), lease_s=12.5)
    with pytest.raises(ConfigError, match="lease_s"):
        rank.core.lend(params, 1, 0.0)
    assert len(rank.core.ledger) == 0


def test_a_renewal_prolongs_the_attempt_that_asks_and_no_other() -> None:
    """Two attempts of one reader: the one that is given up holds nothing for longer because the other goes on."""
    world, rank = alone(lease=LeaseConfig(lease_s=30.0, grant_s=4.0))
    params, lease = world.lent(rank, "r", [3], lease_s=30.0)
    for pull_id in ("first", "second"):
        say(rank, claim(params, pull_id), 0.0)
    say(rank, Renew(params.key, "second", 2, 600.0), 2.0)
    say(rank, Release(params.key, "r", READER, "second", Outcome.COMPLETE), 3.0)
    rank.core.tick(3.9)
    assert not lease.is_over
    rank.core.tick(4.0)
    assert lease.is_over
    # What never held a promise has none to renew.
    again, _ = world.lent(rank, "r2", [4], lease_s=30.0)
    say(rank, claim(again, "first"), 5.0)
    (answer,) = say(rank, Renew(again.key, "third", 2, 600.0), 6.0)
    assert isinstance(answer, Refused)
    assert answer.reason is Reason.EXPIRED


def test_a_release_is_final_for_its_attempt() -> None:
    """Said again it is acknowledged and changes nothing, whatever it says now: another attempt may be under way."""
    world, rank = alone()
    params, lease = world.lent(rank, "r", [3])
    say(rank, claim(params, "first"), 0.0)
    for outcome in (Outcome.RETRY, Outcome.COMPLETE, Outcome.RETRY):
        (answer,) = say(rank, Release(params.key, "r", READER, "first", outcome), 1.0)
        assert isinstance(answer, Ack)
        assert lease.owed() == ("decode/tp0",)
    assert len(lease.history) == 3  # lent, granted, released


def test_a_grant_never_says_that_a_request_has_been_lent_for_longer_than_it_was() -> None:
    """A reader believes what it read since then: a microsecond too much is a read of somebody else's blocks."""
    world, rank = alone()
    params, lease = world.lent(rank, "r", [3])
    for number in range(200):
        now = lease.lent_at + number * 0.0123456789
        (answer,) = say(rank, claim(params, nonce=number), now)
        assert isinstance(answer, Granted)
        assert 0 <= now - lease.lent_at - answer.lent_for_s < 1e-5


@pytest.mark.parametrize("how", ["releases", "lapses"])
def test_what_one_request_remembers_of_its_readers_is_bounded(how: str) -> None:
    """Every attempt is another, and is remembered: who tries without end is refused, and what it says is not kept."""
    world, rank = alone(lease=LeaseConfig(lease_s=3000.0, grant_s=2.0, max_lease_s=6000.0))
    params, lease = world.lent(rank, "r", [3], lease_s=3000.0)
    refusals = list[Refused]()
    for number in range(MAX_ATTEMPTS + 10):
        message: Claim | Release = Release(params.key, "r", READER, f"pull {number}", Outcome.RETRY)
        if how == "lapses":
            message = msgspec.structs.replace(claim(params, f"pull {number}"), seconds=0.005)
        refusals += [answer for answer in say(rank, message, 0.01 * number) if isinstance(answer, Refused)]
    assert [answer.reason for answer in refusals] == [Reason.OVERLOADED] * 10
    assert len(lease.history) <= MAX_HISTORY + 1


def test_what_another_key_says_in_the_name_of_a_reader_is_refused_counted_and_told() -> None:
    world, rank = alone()
    params = world.params([rank], "r", [3], 4)

    def hear(message: Claim | Release, route: ReplyTo, key: str) -> list[Message]:
        packet = encode_packet("process", rank.core.identity.incarnation, [message])
        rank.core.receive(route, packet, world.now, f"key:{key}")
        return [m for _, data in rank.core.outbox.take_packets() for m in decode_packet(data).messages]

    # The claim comes early. It is granted as what its connection proved, when the request is lent.
    assert [type(m) for m in hear(claim(params), ONE, "reader")] == [NotYet]
    rank.core.lend(params, 1, world.now)
    rank.core.outbox.take_packets()
    lease = rank.core.prefill.leases[params.key]
    assert len(lease.grants) == 1
    rank.core.outbox.commands.clear()
    (answer,) = hear(Release(params.key, "r", READER, "pull", Outcome.COMPLETE), ReplyTo(b"thief"), "thief")
    assert isinstance(answer, Refused)
    assert answer.reason is Reason.FOREIGN_PULL
    assert rank.core.outbox.counters["refused.foreign_pull"] == 1
    assert [type(command) for command in rank.core.outbox.commands] == [ReaderRefused]
    assert lease.owed() == ("decode/tp0",)
    # The reader releases over a new connection.
    release = Release(params.key, "r", READER, "pull", Outcome.COMPLETE)
    assert [type(m) for m in hear(release, ReplyTo(b"new"), "reader")] == [Ack]
    assert lease.is_over


def test_the_connections_of_one_key_share_what_it_may_say() -> None:
    world, rank = alone(limits=LimitsConfig(messages_per_s=1.0, message_burst=4))
    packet = encode_packet("process", rank.core.identity.incarnation, [Ping(1)])

    def answered(principal: str) -> int:
        for number in range(10):
            rank.core.receive(ReplyTo(b"%d %b" % (number, principal.encode())), packet, world.now, principal)
        return len(rank.core.outbox.take_packets())

    assert answered("key:one") == 4
    assert answered("key:another") == 4
    assert answered("host:127.0.0.1") == 10  # engines on one host do not


def test_the_connections_of_one_key_share_its_room_for_what_comes_early() -> None:
    world, rank = alone(lease=LeaseConfig(max_parked=16))
    params = [world.params([rank], f"r{number}", [3], 4) for number in range(20)]

    def park(number: int, key: str) -> None:
        message = claim(params[number], f"pull {number}")
        rank.core.prefill.receive(message, ReplyTo(b"%d" % number), "process", 0.0, key)

    for number in range(12):
        park(number, "key:one")
    assert rank.core.prefill.parking.num_parked == 8  # half, for whoever comes first
    park(12, "key:another")
    park(13, "key:another")
    park(14, "key:another")
    assert rank.core.prefill.parking.num_parked == 10  # and an eighth for each key


# -- what came early -----------------------------------------------------------------------------------


def test_repeats_do_not_extend_what_is_parked() -> None:
    world, rank = alone(lease=LeaseConfig(parked_s=5.0))
    params = world.params([rank], "r", [3], 4)
    prefill, counters = rank.core.prefill, rank.core.outbox.counters
    for after_s in (0.0, 2.0, 4.9):
        assert [type(m) for m in say(rank, claim(params), after_s)] == [NotYet]
        assert (prefill.parking.num_parked, prefill.parking.next_at) == (1, 5.0)
    rank.core.tick(4.99)
    assert prefill.parking.num_parked == 1
    rank.core.tick(5.0)
    assert (prefill.parking.num_parked, counters["parked.expired"]) == (0, 1)
    # Whoever still asks is parked anew, and answered when it is lent.
    say(rank, claim(params), 5.1)
    assert prefill.parking.next_at == pytest.approx(10.1)
    rank.core.lend(params, 1, 6.0)
    assert [type(m) for _, d in rank.core.outbox.take_packets() for m in decode_packet(d).messages] == [Granted]


def test_a_message_parked_for_too_long_is_not_answered_though_it_was_not_swept_up() -> None:
    world, rank = alone(lease=LeaseConfig(parked_s=5.0))
    params = world.params([rank], "r", [3], 4)
    say(rank, claim(params), 0.0)
    lease = rank.core.lend(params, 1, 5.0)
    assert (lease.grants, list(rank.core.outbox.take_packets())) == ({}, [])
    assert rank.core.prefill.parking.num_parked == 0


def test_an_early_release_takes_the_place_of_its_claim_and_a_late_claim_not_its() -> None:
    world, rank = alone()
    params = world.params([rank], "r", [3], 4)
    release = Release(params.key, "r", READER, "pull", Outcome.COMPLETE)
    assert [type(m) for m in (*say(rank, claim(params), 0.0), *say(rank, release, 0.1))] == [NotYet, Ack]
    assert [type(m) for m in say(rank, claim(params), 0.2)] == [NotYet]
    assert rank.core.prefill.parking.num_parked == 1
    # Another connection has a place of its own.
    say(rank, claim(params), 0.3, OTHER)
    assert rank.core.prefill.parking.num_parked == 2
    lease = rank.core.lend(params, 1, 1.0)
    assert lease.is_over
    assert lease.discharged.popitem()[1].outcome is Outcome.COMPLETE


def test_each_start_of_a_process_has_a_place_of_its_own() -> None:
    """A successor that says the same as the process before it is answered too, and so is that one, if it lives."""
    world, rank = alone()
    params = world.params([rank], "r", [3], 4)
    for sender in ("one start", "another start"):
        rank.core.prefill.receive(claim(params), ONE, sender, 0.0)
    assert rank.core.prefill.parking.num_parked == 2


def test_there_is_an_end_to_what_is_parked_however_many_connections_there_are() -> None:
    """Who finds no room is told to wait if it claims; a release that is not kept is not acknowledged either."""
    world, rank = alone(lease=LeaseConfig(max_parked=16))
    params = world.params([rank], "r", [3], 4)
    for number in range(32):
        way = ReplyTo(b"%d" % number)
        assert [type(m) for m in say(rank, claim(params, f"pull {number}"), 0.0, way)] == [NotYet]
    assert rank.core.prefill.parking.num_parked == 16
    release = Release(params.key, "r", READER, "released", Outcome.COMPLETE)
    assert say(rank, release, 0.0, OTHER) == []


def test_of_what_has_ended_the_newest_is_remembered() -> None:
    """How the others ended is forgotten; that they have not."""
    world, rank = alone()
    rank.core.prefill.max_ended = 4
    asked = list[Reason]()
    requests = [world.params([rank], f"r{number}", [number], 4) for number in range(8)]
    for params in requests:
        lease = world.lend(rank, params)
        rank.core.prefill.revoke(lease, 0.0)
        world.settle(rank)
    for params in requests:
        (answer,) = say(rank, claim(params), 1.0)
        assert isinstance(answer, Refused)
        asked.append(answer.reason)
    assert asked == [Reason.UNKNOWN] * 4 + [Reason.REVOKED] * 4


def test_what_was_withdrawn_is_never_lent_however_long_ago() -> None:
    world, rank = alone()
    rank.core.prefill.max_ended = 1
    params, other = (world.params([rank], name, [3], 4) for name in ("r", "other"))
    for each in (params, other):
        rank.core.withdraw(each, 0.0)
    with pytest.raises(LocalProtocolError, match="was lent or withdrawn before"):
        rank.core.lend(params, 1, 1.0)
    (answer,) = say(rank, claim(params), 1.0)
    assert isinstance(answer, Refused)
    assert answer.reason is Reason.UNKNOWN


def test_what_is_parked_is_bounded_by_its_memory_and_not_by_its_number_alone() -> None:
    """Who has a long name for its request takes more of the room for what comes early."""
    world, rank = alone(lease=LeaseConfig(max_parked=100, parked_s=5.0))
    prefill, counters = rank.core.prefill, rank.core.outbox.counters
    params = world.params([rank], "r", [3], 4)

    def early(number: int, length: int, reply_to: ReplyTo) -> None:
        key = msgspec.structs.replace(params.key, sequence=1000 + number)
        say(rank, msgspec.structs.replace(claim(params), key=key, request_id="x" * length), 0.0, reply_to)

    for number in range(50):
        early(number, MAX_ID, ReplyTo(b"%d" % number))
    taken = 17 * 6  # the last may exceed by what one takes
    assert (prefill.parking.num_parked, counters["parked.refused"]) == (taken, 44)
    # No message grows where there is no room.
    early(0, MAX_ID, ReplyTo(b"0"))
    assert (prefill.parking.num_parked, counters["parked.refused"]) == (taken, 44)
    rank.core.tick(5.0)
    assert prefill.parking.num_parked == 0
    for number in range(100):
        early(number, 1000, ReplyTo(b"%d" % number))
    assert prefill.parking.num_parked == 100
    early(0, MAX_ID, ReplyTo(b"0"))
    assert (prefill.parking.num_parked, counters["parked.refused"]) == (100, 45)
    assert world.lend(rank, params).grants == {}


# -- which blocks can be lent --------------------------------------------------------------------------


def by_arrays(index: int, group: Group, offer: BlockRuns, lent: Lent) -> Int64s:
    """Check one list of blocks as if there were many."""
    where = f"group {index} ({group.name!r})"
    check_covers(where, group, offer, lent.num_tokens)
    runs = [run for run in offer.runs if run[0] != NULL]
    if sum(count for _, count in runs) > group.num_blocks:
        raise LocalProtocolError(f"request 'r' names more blocks than the group's {group.num_blocks}")
    blocks = expanded(*as_columns(runs))
    check_blocks(where, group, blocks)
    return blocks


@given(
    runs=st.lists(st.tuples(st.integers(NULL, 40), st.integers(1, 2 * FEW)), max_size=4),
    single=st.lists(st.tuples(st.integers(NULL, 40), st.just(1)), max_size=FEW),
    num_blocks=st.integers(1, 48),
    first_token=st.integers(0, 40),
    num_tokens=st.integers(0, 100),
    null_block=st.sampled_from([NULL, 0]),
    window=st.sampled_from([0, 1, 8]),
    kind=st.sampled_from(["tokens", "tokens", "state"]),
)
def test_few_blocks_are_refused_for_the_same_reasons_as_many(
    runs: list[tuple[int, int]],
    single: list[tuple[int, int]],
    num_blocks: int,
    first_token: int,
    num_tokens: int,
    null_block: int,
    window: int,
    kind: Literal["tokens", "state"],
) -> None:
    group = Group("g", 4, num_blocks, kind=kind, window=window, null_block=null_block)
    for offered in (runs, single):
        offer = BlockRuns(first_token, tuple(offered))
        lent = Lent(
            key=Key("epoch", 0, 7, "0" * 32),
            request_id=RequestId("r"),
            groups=(offer,),
            num_tokens=num_tokens,
            lease_s=30.0,
            grant_s=10.0,
            max_lease_s=60.0,
            readers=1,
            tp_rank=0,
            tp_size=1,
        )
        wanted, found = (outcome(check, group, offer, lent) for check in (by_arrays, _blocks_of))
        assert found == wanted


def outcome(check: Callable[[int, Group, BlockRuns, Lent], Int64s], group: Group, offer: BlockRuns, lent: Lent) -> Any:
    try:
        return check(0, group, offer, lent).tolist()
    except AsyncKVError as exc:
        return type(exc), str(exc)


# -- what is remembered of requests that are not lent yet, or were lent once -----------------------------------


PARKED = LeaseConfig(lease_s=10.0, grant_s=4.0, parked_s=5.0, max_parked=8)


def release(params: KVTransferParams, pull_id: str = "pull") -> Release:
    return Release(params.key, params.request_id, READER, pull_id, Outcome.COMPLETE)


def many(world: World, rank: Rank, number: int) -> list[KVTransferParams]:
    return [world.params([rank], f"r{i}", [3], 4) for i in range(number)]


def test_nothing_is_kept_of_a_request_whose_messages_were_parked_for_too_long() -> None:
    world, rank = alone(lease=PARKED)
    for params in many(world, rank, 4):
        assert isinstance(say(rank, claim(params), 0.0)[0], NotYet)
    side = rank.core.prefill
    side.tick(4.9)
    assert (len(side.parking.by_key), side.parking.num_parked) == (4, 4)
    side.tick(5.0)
    assert (len(side.parking.by_key), side.parking.num_parked, len(side.parking._order), side.parking.next_at) == (
        0,
        0,
        0,
        math.inf,
    )


def test_a_release_that_takes_the_place_of_a_claim_has_all_of_its_own_time() -> None:
    """It was acknowledged, so nobody repeats it: if it were forgotten with the claim the lease would have to expire."""
    world, rank = alone(lease=PARKED)
    [params] = many(world, rank, 1)
    say(rank, claim(params), 0.0)
    assert isinstance(say(rank, release(params), 3.0)[0], Ack)
    rank.core.prefill.tick(5.0)
    assert rank.core.prefill.parking.num_parked == 1
    world.now = 7.9
    assert world.lend(rank, params).is_over


def test_what_is_remembered_of_what_was_parked_is_bounded_however_much_is_lent_meanwhile() -> None:
    world, rank = alone(lease=PARKED)
    for params in many(world, rank, 300):
        say(rank, release(params), 0.0)
        assert world.lend(rank, params).is_over
    assert len(rank.core.prefill.parking._order) <= 8 * PARKED.max_parked + 1


def test_of_releases_that_were_given_up_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_FORGOTTEN", 3)
    world, rank = alone(lease=LeaseConfig(lease_s=10.0, grant_s=4.0, parked_s=5.0))
    made = many(world, rank, 5)
    for at, params in enumerate(made):
        say(rank, release(params), 0.1 * at)
    rank.core.prefill.tick(6.0)
    world.now = 6.0
    refused = [[(x.what, x.reason) for x in world.lend(rank, params).refused] for params in made]
    assert refused == [[], [], *[[("release", "parked_too_long")]] * 3]


def test_a_late_reader_hears_how_the_request_ended_though_the_memory_is_another_by_now() -> None:
    world, rank = alone(lease=PARKED)
    ended, never = many(world, rank, 2)
    world.lend(rank, ended)
    say(rank, release(ended), 1.0)
    rank.core.prefill.memory_epoch += 1
    reasons = []
    for params in (ended, never):
        (answer,) = say(rank, claim(params), 2.0)
        assert isinstance(answer, Refused)
        reasons.append(answer.reason)
    assert reasons == [Reason.CONSUMED, Reason.STALE_MEMORY]


def test_a_lease_that_is_over_wakes_no_timer() -> None:
    """Its time is far away, and a lease that waits for it is kept."""
    world, rank = alone(lease=PARKED)
    [params] = many(world, rank, 1)
    lease = world.lend(rank, params)
    assert rank.core.timers.next_at == 4.0  # to see whether a grant has run out
    say(rank, release(params), 1.0)
    assert (lease.is_over, lease.scheduled_at, rank.core.timers.next_at) == (True, math.inf, math.inf)


@pytest.mark.parametrize("blocks", [[3, 5], list(range(3, 9)), [3, 4, 6]])
def test_a_placeholder_that_is_named_as_a_block_is_refused_however_few_there_are(blocks: list[int]) -> None:
    """The engine's placeholder holds no KV: what it is lent as would be read as zeros, or as anything."""
    layout = make_layout()
    [group] = layout.groups
    world = World()
    rank = world.add("p", msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, null_block=5),)))
    params = world.params([rank], "r", blocks, 4 * len(blocks))
    if 5 in blocks:
        with pytest.raises(PlanRefused, match="names block 5, which is its placeholder"):
            world.lend(rank, params)
    else:
        world.lend(rank, params)


# -- Spent keys -------------------------------------------------------------------------------------------------------


def key(sequence: int, epoch: str = "e") -> Key:
    return Key(epoch, 0, sequence, "0" * 32)


def size(spent: SpentKeys) -> int:
    """Numbers that are kept."""
    return sum(len(firsts) + len(lasts) for firsts, lasts in spent._runs.values())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40))))
def test_spent_keys_are_the_set_of_what_was_added(added: list[tuple[str, int]]) -> None:
    spent, model = SpentKeys(), set()
    for epoch, sequence in added:
        assert spent.add(key(sequence, epoch)) is ((epoch, sequence) not in model)
        model.add((epoch, sequence))
        assert {(e, s) for e in "abc" for s in range(42) if key(s, e) in spent} == model
    assert spent.num_given_up == 0
    gaps = sum((e, s) not in model and (e, s + 1) in model for e in "abc" for s in range(41))
    assert spent.num_gaps == gaps


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60)), max_size=60), st.integers(0, 4))
def test_what_was_added_stays_whatever_has_to_be_given_up(added: list[tuple[str, int]], most: int) -> None:
    spent, model = SpentKeys(most), set()
    for epoch, sequence in added:
        was_open, given_up = sum(key(s, e) not in spent for e in "ab" for s in range(61)), spent.num_given_up
        is_new = key(sequence, epoch) not in spent
        spent.add(key(sequence, epoch))
        model.add((epoch, sequence))
        assert all(key(s, e) in spent for e, s in model)
        # What is given up is said, and nothing above the newest is.
        given_up = spent.num_given_up - given_up
        assert was_open - sum(key(s, e) not in spent for e in "ab" for s in range(61)) == given_up + is_new
        assert all(key(1 + max(s for d, s in model if d == e), e) not in spent for e, _ in model)
        assert spent.num_gaps <= most


def test_the_oldest_gap_is_given_up_first() -> None:
    spent = SpentKeys(2)
    for sequence in (1, 3, 6):
        spent.add(key(sequence))
    assert [s for s in range(8) if key(s) not in spent] == [2, 4, 5, 7]


def test_any_number_of_requests_is_open_in_one_gap() -> None:
    spent = SpentKeys()
    spent.add(key(1 << 50))
    for sequence in range(200_000, 0, -1):
        spent.add(key(sequence))
    assert spent.num_gaps == 2
    assert key(0) not in spent
    assert key(200_001) not in spent


def test_a_hundred_thousand_requests_in_random_order_are_all_taken() -> None:
    spent, order = SpentKeys(), list(range(100_000))
    random.Random(0).shuffle(order)
    for sequence in order:
        spent.add(key(sequence))
    assert (size(spent), spent.num_given_up) == (2, 0)


def test_memory_is_bounded_when_one_request_in_two_is_never_lent() -> None:
    spent = SpentKeys(1000)
    for sequence in range(1, 10_000, 2):
        spent.add(key(sequence))
    assert 980 <= spent.num_gaps <= 1000
    assert spent.num_given_up == 5000 - spent.num_gaps
    assert size(spent) == 2 * spent.num_gaps + 2


def test_a_scheduler_that_leaves_gaps_without_end_takes_none_from_others() -> None:
    spent = SpentKeys(100)
    for sequence in (1, 3, 5):
        spent.add(key(sequence, "careful"))
    for sequence in range(1, 10_000, 2):
        spent.add(key(sequence, "careless"))
    spent.add(key(7, "careful"))
    assert [s for s in range(9) if key(s, "careful") not in spent] == [0, 2, 4, 6, 8]


def test_schedulers_are_bounded_and_the_one_that_lends_is_not_forgotten() -> None:
    spent = SpentKeys()
    for epoch in range(2 * MAX_EPOCHS):
        spent.add(key(5, str(epoch)))
        spent.add(key(2 * epoch, "busy"))
    assert len(spent._runs) == MAX_EPOCHS
    assert spent.num_forgotten == MAX_EPOCHS + 1
    assert all(key(2 * epoch, "busy") in spent for epoch in range(2 * MAX_EPOCHS))
    assert spent.num_gaps == sum(len(firsts) - 1 for firsts, _ in spent._runs.values())


def test_of_many_schedulers_with_a_gap_each_as_many_gaps_are_closed_as_there_is_no_room_for() -> None:
    spent = SpentKeys(max_gaps=256)  # so many that several are closed at once, where one scheduler has them
    for number in range(300):
        spent.add(key(1, f"e{number}"))
    assert (spent.num_gaps, spent.num_given_up) == (256, 44)
    assert sum(key(0, f"e{number}") in spent for number in range(300)) == 44


# -- Memory that readers can fill -------------------------------------------------------------------------------------


class Woken:
    """Something that wants to be woken."""

    scheduled_at = math.inf


def test_what_is_never_to_be_woken_is_not_kept_until_its_time() -> None:
    timers, kept = Timers(), Woken()
    timers.wake(kept, 1e6)
    for at_a_time in (1, 1000):
        items = [Woken() for _ in range(at_a_time)]
        for number in range(0, 1000, at_a_time):
            for item in items:
                timers.wake(item, 2e6 + number)
            for item in items:
                timers.forget(item)
        assert len(timers._heap) < 130
    assert timers.next_at == 1e6
    assert timers.pop(1e6) is kept


# -- readers -----------------------------------------------------------------------------------------------


def greeted(rank: Rank, number: int, minor: int = MINOR) -> list[Message]:
    """Let a reader shake hands, and return what it is answered."""
    hello = Hello(number, MAJOR, minor, "prefill", 0, Cohort(f"decode-{number}"))
    route = ReplyTo(b"%d" % number)
    rank.core.readers.greet(hello, route, f"start-{number}", "", rank.core.prefill.closed_as, False)
    return heard(rank)


def heard(rank: Rank) -> list[Message]:
    return [m for _, data in rank.core.outbox.take_packets() for m in decode_packet(data).messages]


def test_of_readers_that_shook_hands_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_READERS", 3)
    _, rank = alone()
    for number in (1, 2, 3, 1, 4, 5):
        assert len(greeted(rank, number)) == 1
    side = rank.core.readers
    assert [source for source, _ in side.minor_versions] == ["start-1", "start-4", "start-5"]
    assert len(side._met) == 3
    rank.core.readers.say_goodbye()
    assert len(heard(rank)) == 3


def test_a_reader_that_can_understand_it_hears_at_once_that_an_engine_drains() -> None:
    _, rank = alone()
    for minor in (0, 1):
        assert [type(m) for m in greeted(rank, minor, minor)] == [Welcome]
    rank.core.readers.say_draining()
    assert [type(m) for m in heard(rank)] == [Draining]


def test_a_packet_of_another_version_is_answered_in_words_of_this_one() -> None:
    _, rank = alone()
    (body,) = [encode_packet("start-1", "", [Goodbye()])]
    rank.core.receive(ReplyTo(b"1"), body.replace(bytes([0x90 + 4, MAJOR]), bytes([0x90 + 4, MAJOR + 1]), 1), 0.0)
    (answer,) = heard(rank)
    assert isinstance(answer, Unwelcome)
    assert (answer.nonce, answer.reason) == (0, Reason.PROTOCOL)
    assert f"protocol version {MAJOR + 1} is not {MAJOR}" in answer.detail


def test_an_answer_to_no_question_is_counted_once() -> None:
    _, rank = alone()
    rank.core.receive(ReplyTo(b"1"), encode_packet("start-1", "", [Draining()]), 0.0)
    rank.core.receive(Address("world://q"), encode_packet("start-2", "", [Hello(1, 1, 1, "q", 0, Cohort("d"))]), 0.0)
    assert rank.core.outbox.counters["dropped.unexpected"] == 2
    assert heard(rank) == []


def test_of_readers_that_ask_while_there_is_no_agent_a_few_are_answered_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others ask again."""
    monkeypatch.setattr(readers, "MAX_WAITING", 3)
    _, rank = alone()
    rank.core.agent_lost()
    assert [greeted(rank, number) for number in (1, 2, 3, 4, 5, 2)] == [[]] * 6
    rank.core.agent_replaced("another", b"metadata")
    assert len(heard(rank)) == 3
    assert len(greeted(rank, 4)) == 1


def test_a_bug_that_one_lease_meets_ends_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rank = alone()
    lease = world.lend(rank, world.params([rank], "r", [3], 4))
    tick_lease, met = rank.core.prefill.tick_lease, list[float]()

    def fail(lease: Lease, now: float) -> bool:
        if not met:
            met.append(now)
            raise RuntimeError("a bug")
        return tick_lease(lease, now)

    monkeypatch.setattr(rank.core.prefill, "tick_lease", fail)
    with pytest.raises(RuntimeError):
        rank.core.tick(10.0)
    assert rank.core.next_at == 11.0
    for now in (11.0, 30.0):
        rank.core.tick(now)
    assert lease.is_over
