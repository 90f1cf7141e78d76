"""The prefill side of one rank: what is granted, what is parked, and which blocks can be lent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckv.config import EngineConfig, LeaseConfig
from asynckv.core.lease import Lent
from asynckv.core.ledger import FEW, Int64s
from asynckv.core.prefill import _blocks_of
from asynckv.core.types import MAX_ID, Cohort, Key, Outcome, Params, ReplyTo, RequestId
from asynckv.core.wire import Ack, Claim, Granted, Message, NotYet, Release, Renew, blocks_digest, decode_packet
from asynckv.errors import AsyncKVError, LocalProtocolError
from asynckv.geometry.blocks import blocks_of, check_blocks, check_covers
from asynckv.geometry.bounds import NULL, BlockRuns
from asynckv.geometry.layout import Group
from tests.world import Rank, World, make_layout

READER = Cohort("decode")
ONE, OTHER = ReplyTo(b"one"), ReplyTo(b"other")


def prefill_rank(config: LeaseConfig) -> tuple[World, Rank]:
    world = World(EngineConfig(engine_id="x", lease=config))
    return world, world.add("p", make_layout(), engine_id="prefill")


def claim(params: Params, pull_id: str = "pull", nonce: int = 1) -> Claim:
    digest = blocks_digest(params.groups, params.num_tokens, params.written)
    return Claim(params.key, params.request_id, READER, pull_id, nonce, digest, 600.0)


def say(rank: Rank, message: Claim | Renew | Release, now: float, reply_to: ReplyTo = ONE) -> list[Message]:
    """Say something to a rank, and return all that it answers."""
    rank.node.prefill.receive(message, reply_to, "process", now)
    return [m for _, data in rank.node.outbox.take_packets() for m in decode_packet(data).messages]


# -- grants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lease_s", "seconds"), [(2.5, 2.5), (10.0, 10.0), (60.0, 10.0)])
def test_no_grant_is_longer_than_its_request_is_lent_for(lease_s: float, seconds: float) -> None:
    world, rank = prefill_rank(LeaseConfig(lease_s=30.0, grant_s=10.0, max_lease_s=600.0))
    params = world.params([rank], "r", [3], 4, lease_s=lease_s)
    lease = world.lend(rank, params)
    (answer,) = say(rank, claim(params), lease.lent_at + 1.0)
    assert isinstance(answer, Granted)
    assert answer.seconds == seconds


def test_nobody_holds_a_request_for_longer_than_any_lease_may_last() -> None:
    world, rank = prefill_rank(LeaseConfig(lease_s=5.0, grant_s=2.0, max_lease_s=12.0))
    params = world.params([rank], "r", [3], 4, lease_s=5.0)
    lease = world.lend(rank, params)
    now = lease.lent_at
    say(rank, claim(params), now)
    while not lease.is_over:
        now += 0.5
        say(rank, Renew(params.key, "pull", 1, 600.0), now)
        rank.node.tick(now)
        assert now <= lease.lent_at + 12.0
    assert len(rank.node.ledger) == 0


# -- what came early -----------------------------------------------------------------------------------


def test_repeats_do_not_extend_what_is_parked() -> None:
    world, rank = prefill_rank(LeaseConfig(parked_s=5.0))
    params = world.params([rank], "r", [3], 4)
    prefill, counters = rank.node.prefill, rank.node.outbox.counters
    for after_s in (0.0, 2.0, 4.9):
        assert [type(m) for m in say(rank, claim(params), after_s)] == [NotYet]
        assert (prefill.num_parked, prefill.next_at) == (1, 5.0)
    rank.node.tick(4.99)
    assert prefill.num_parked == 1
    rank.node.tick(5.0)
    assert (prefill.num_parked, counters["parked.expired"]) == (0, 1)
    # Whoever still asks is parked anew, and answered when it is lent.
    say(rank, claim(params), 5.1)
    assert prefill.next_at == pytest.approx(10.1)
    rank.node.lend(params, 1, 6.0)
    assert [type(m) for _, d in rank.node.outbox.take_packets() for m in decode_packet(d).messages] == [Granted]


def test_what_was_parked_for_too_long_is_not_answered_though_nobody_has_swept_it_up() -> None:
    world, rank = prefill_rank(LeaseConfig(parked_s=5.0))
    params = world.params([rank], "r", [3], 4)
    say(rank, claim(params), 0.0)
    lease = rank.node.lend(params, 1, 5.0)
    assert (lease.grants, list(rank.node.outbox.take_packets())) == ({}, [])
    assert rank.node.prefill.num_parked == 0


def test_an_early_release_takes_the_place_of_its_claim_and_a_late_claim_not_its() -> None:
    world, rank = prefill_rank(LeaseConfig())
    params = world.params([rank], "r", [3], 4)
    release = Release(params.key, "r", READER, "pull", Outcome.COMPLETE)
    assert [type(m) for m in (*say(rank, claim(params), 0.0), *say(rank, release, 0.1))] == [NotYet, Ack]
    assert [type(m) for m in say(rank, claim(params), 0.2)] == [NotYet]
    assert rank.node.prefill.num_parked == 1
    # Another connection has a place of its own.
    say(rank, claim(params), 0.3, OTHER)
    assert rank.node.prefill.num_parked == 2
    lease = rank.node.lend(params, 1, 1.0)
    assert lease.is_over
    assert lease.outcomes.popitem()[1] is Outcome.COMPLETE


def test_what_is_parked_is_bounded_by_its_memory_and_not_by_its_number_alone() -> None:
    """Who has a long name for its request takes more of the room for what comes early."""
    world, rank = prefill_rank(LeaseConfig(max_parked=100, parked_s=5.0))
    prefill, counters = rank.node.prefill, rank.node.outbox.counters
    params = world.params([rank], "r", [3], 4)

    def early(number: int, length: int, reply_to: ReplyTo) -> None:
        key = msgspec.structs.replace(params.key, sequence=1000 + number)
        say(rank, msgspec.structs.replace(claim(params), key=key, request_id="x" * length), 0.0, reply_to)

    for number in range(50):
        early(number, MAX_ID, ReplyTo(b"%d" % number))
    taken = 17 * 6  # the last may exceed by what one takes
    assert (prefill.num_parked, counters["parked.refused"]) == (taken, 44)
    # No message grows where there is no room.
    early(0, MAX_ID, ReplyTo(b"0"))
    assert (prefill.num_parked, counters["parked.refused"]) == (taken, 44)
    rank.node.tick(5.0)
    assert prefill.num_parked == 0
    for number in range(100):
        early(number, 1000, ReplyTo(b"%d" % number))
    assert prefill.num_parked == 100
    early(0, MAX_ID, ReplyTo(b"0"))
    assert (prefill.num_parked, counters["parked.refused"]) == (100, 45)
    assert world.lend(rank, params).grants == {}


# -- which blocks can be lent --------------------------------------------------------------------------


def by_arrays(index: int, group: Group, offer: BlockRuns, lent: Lent) -> Int64s:
    """Check one list of blocks as if there were many."""
    where = f"group {index} ({group.name!r})"
    check_covers(where, group, offer, lent.num_tokens)
    runs = [run for run in offer.runs if run[0] != NULL]
    if sum(count for _, count in runs) > group.num_blocks:
        raise LocalProtocolError(f"request 'r' names more blocks than the {group.num_blocks} there are")
    blocks = blocks_of(runs)
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
            written=True,
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
