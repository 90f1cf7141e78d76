"""Requests told step by step, on cores alone: what each situation of the design comes to."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core import wire as m
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull, PullState
from asynckv.core.spent import SpentKeys
from asynckv.core.types import Cohort, Endpoint, KVTransferParams, Outcome, Reason, ReplyTo, decode_params
from asynckv.errors import ConfigError, EngineClosed, LocalProtocolError, PlanRefused, RemoteProtocolError
from asynckv.scheduler import PrefillRanks
from tests.world import NUM_BLOCKS, Rank, World, alone, make_layout, opened, ranks_of, reason


def lent() -> tuple[World, Rank, Rank, KVTransferParams, Lease]:
    """Lend a block that is computed."""
    world, prefill, decode = opened()
    return world, prefill, decode, *world.lent(prefill, "req", [3], written=True)


def group(world: World, tp_prefill: int, tp_decode: int, heads: int = 4) -> tuple[list[Rank], list[Rank]]:
    prefill = ranks_of(world, "prefill", tp_prefill, num_heads=heads)
    return prefill, ranks_of(world, "decode", tp_decode, base=20, num_heads=heads)


def reading(timeout: float = 30) -> tuple[World, Rank, Rank, Lease, Pull]:
    """Let a block be read that is computed; the read hangs."""
    world, prefill, decode, params, lease = lent()
    pull = world.pull(decode, "d-req", [9], params, timeout=timeout)
    world.deliver_all()
    return world, prefill, decode, lease, pull


def test_a_request_from_lend_to_release() -> None:
    world, prefill, decode = opened()
    want = [prefill.buffers.block(b) for b in (3, 1)]
    params, lease = world.lent(prefill, "req", [3, 1], written=True)
    it = world.pull(decode, "d-req", [9, 4], params)
    world.run()
    assert (it.reason, it.state, lease.state) == (Reason.COMPLETE, PullState.RELEASED, LeaseState.RELEASED)
    assert [decode.buffers.block(b) for b in (9, 4)] == want
    assert {str(r): x.outcome for r, x in lease.discharged.items()} == {"decode/tp0": Outcome.COMPLETE}
    assert prefill.core.is_idle
    assert decode.core.is_idle


def test_a_consumed_request_is_refused_at_once_and_the_refusal_names_its_reader() -> None:
    world, _, decode, params, _ = lent()
    world.pull(decode, "one", [9], params)
    world.run()
    again = world.pull(decode, "two", [9], params)
    world.run()
    assert again.reason in (Reason.LEASE_LOST, Reason.CONSUMED)
    assert "refused: consumed (released by 'decode'; lent with num_readers=1)" in again.detail


def test_of_many_decode_engines_that_read_a_request_a_refusal_names_a_few() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "req", [3], written=True, readers=6)
    for i in range(7):
        pull = world.pull(decode, f"sibling{i}", [i], params, cohort_id=f"d/{i}")
        world.run()
    assert "(released by 'd/0', 'd/1', 'd/2', 'd/3' and others; lent with num_readers=6)" in pull.detail


def test_an_unclaimed_lease_expires_and_names_whom_it_waited_for() -> None:
    world, prefill, _ = opened()
    lease = world.lend(prefill, world.params([prefill], "req", [3], 4))
    world.advance(29.9)
    assert lease.state is LeaseState.LENT
    world.advance(0.2)
    assert (lease.state, lease.owed()) == (LeaseState.EXPIRED, ("*",))
    assert prefill.core.is_idle


def test_a_reader_that_dies_is_named_when_the_lease_expires() -> None:
    world = World()
    prefill, decode = group(world, 1, 2)
    params = world.params(prefill, "req", [3], 4, written=True)
    lease = world.lend(prefill[0], params)
    world.pull(decode[0], "d-req", [1], params)
    world.run()
    assert lease.state is LeaseState.LENT
    world.advance(31)
    assert (lease.state, lease.owed()) == (LeaseState.EXPIRED, ("decode/tp1",))
    assert {str(r) for r in lease.discharged} == {"decode/tp0"}


def test_bytes_without_proof_are_not_published() -> None:
    world, prefill, decode, _, it = reading(timeout=100)  # granted for 10 s, the read hangs
    (transfer_id,) = decode.reads
    for letter in world.letters:
        assert not letter.answer
    prefill.core.prefill.revoke(next(iter(prefill.core.prefill.leases.values())), world.time(prefill))
    world.settle(prefill)
    world.letters.clear()
    world.live(12.0, 0.1, is_heard=False)  # renewals are lost as well
    assert prefill.core.is_idle, "the promise ran out, the blocks went back and were overwritten"
    world.complete(decode, transfer_id)
    assert it.state is PullState.CONFIRMING
    world.run()
    assert it.reason is Reason.LEASE_LOST
    assert decode.core.is_idle


def test_a_claim_sent_after_the_read_proves_it_without_any_clock() -> None:
    world, _, decode, _, it = reading(timeout=100)
    (transfer_id,) = decode.reads
    world.live(11.5, 0.1, is_heard=False)
    world.complete(decode, transfer_id)  # past every grant, but the lease itself still stands
    assert it.state is PullState.CONFIRMING
    world.run()
    assert it.reason is Reason.COMPLETE


def test_a_revoked_lease_keeps_its_promise() -> None:
    world, prefill, _, lease, it = reading()
    world.revoke(prefill, lease)
    assert lease.state is LeaseState.ENDING
    world.advance(1.0)
    world.run()
    assert (it.reason, lease.state) == (Reason.COMPLETE, LeaseState.REVOKED)


@pytest.mark.parametrize("before_s", [0.05, 0.003, 1e-6])
def test_a_grant_is_kept_to_its_last_moment_whatever_is_heard_before(before_s: float) -> None:
    """A lease that was revoked hears an old claim once more, just before its last grant runs out."""
    world, prefill, decode, params, lease = lent()
    it = world.pull(decode, "d-req", [9], params)
    while not lease.grants:
        claims = world.letters[:1]
        world.deliver()
    world.letters.clear()
    world.lend(prefill, world.params([prefill], "other", [4], 4))  # so that the rank has other things to do
    world.revoke(prefill, lease)
    (grant,) = lease.grants.values()
    world.now = grant.until - before_s
    world.letters[:] = claims
    world.deliver()
    assert (lease.state, [*lease.grants]) == (LeaseState.ENDING, [it.pull_id])
    assert [h.request_id for h in prefill.core.ledger] == ["req", "other"]
    world.advance(before_s)
    assert lease.state is LeaseState.REVOKED
    assert [h.request_id for h in prefill.core.ledger] == ["other"]


@pytest.mark.parametrize(("after_s", "is_believed"), [(-1e-6, True), (0.0, False), (0.003, False), (0.05, False)])
def test_bytes_are_believed_to_the_last_moment_of_a_promise_and_not_beyond(after_s: float, is_believed: bool) -> None:
    world, prefill, decode = opened()
    want = prefill.buffers.block(3)
    params, _ = world.lent(prefill, "req", [3], written=True)
    it = world.pull(decode, "d-req", [9], params)
    world.deliver_all()
    (source,) = it.sources
    world.now = source.covered_until + after_s - decode.epoch
    world.complete_reads(decode)
    assert reason(it) is (Reason.COMPLETE if is_believed else None)
    assert decode.buffers.block(9) == want
    assert it.state is (PullState.NOTIFYING if is_believed else PullState.CONFIRMING)


def test_each_stage_of_a_decode_engine_releases_for_itself() -> None:
    """Of two pipeline stages each holds a layer; one that has read its own has not released for the other."""
    world = World()
    prefill, whole = world.add("p", make_layout(), engine_id="prefill", seed=1), make_layout(base=1 << 41)
    stages = [
        world.add(
            f"d{stage}",
            msgspec.structs.replace(
                whole,
                pp_stage=stage,
                pp_size=2,
                memories=(whole.memories[stage],),
                views=(msgspec.structs.replace(whole.views[stage], memory=0),),
            ),
            engine_id="decode",
            seed=stage,
        )
        for stage in range(2)
    ]
    want = prefill.buffers.block(3)
    params, lease = world.lent(prefill, "req", [3], written=True)
    for stage, others in ((1, ["decode/tp0"]), (0, [])):
        assert lease.state is LeaseState.LENT
        it = world.pull(stages[stage], "d-req", [9], params)
        world.run()
        assert it.reason is Reason.COMPLETE
        assert [*lease.owed()] == others
    assert lease.state is LeaseState.RELEASED
    assert {str(reader) for reader in lease.discharged} == {"decode/tp0", "decode/pp1/tp0"}
    assert b"".join(rank.buffers.block(9) for rank in stages) == want


def test_a_lease_frees_only_after_every_distinct_reader() -> None:
    world = World()
    prefill, decode = group(world, 1, 4)
    params = world.params(prefill, "req", [3], 4, written=True)
    lease = world.lend(prefill[0], params)
    for rank in decode[:3]:
        world.pull(rank, "d-req", [1], params)
        world.run()
        assert lease.state is LeaseState.LENT
    world.pull(decode[3], "d-req", [1], params)
    world.run()
    assert lease.state is LeaseState.RELEASED


def test_repeated_and_forged_releases_change_nothing_but_counters() -> None:
    world = World()
    prefill, decode = group(world, 1, 2)
    params = world.params(prefill, "req", [3], 4)
    lease = world.lend(prefill[0], params)
    core, route = prefill[0].core, ReplyTo(b"d0")

    def say(request_id: str, cohort: Cohort, pull_id: str, source: str = "d0") -> None:
        message = m.Release(params.key, request_id, cohort, pull_id, Outcome.COMPLETE)
        core.receive(route, m.encode_packet(source, core.identity.incarnation, [message]), 0.0)
        world.settle(prefill[0])

    for _ in range(5):
        say("req", Cohort("decode", 2, 0), "a")
    say("other", Cohort("decode", 2, 1), "b")
    say("req", Cohort("decode", 3, 1), "c")
    say("req", Cohort("decode", 2, 7), "d")
    say("req", Cohort("elsewhere", 2, 1), "e")
    assert (lease.is_over, lease.owed()) == (False, ("decode/tp1",))
    say("req", Cohort("decode", 2, 1), "f", "d1")
    assert (lease.is_over, lease.state) == (True, LeaseState.RELEASED)
    assert decode


def test_one_source_cannot_take_all_the_room_for_early_claims() -> None:
    world, prefill = alone(lease=LeaseConfig(max_parked=8))
    flood, other = (world.add(f"d{i}", make_layout(base=(i + 2) << 40), engine_id=f"decode{i}") for i in range(2))
    group = [world.params([prefill], f"r{i}", [i % 8], 4) for i in range(8)]
    for i in range(8):
        world.pull(flood, f"f{i}", [i], group[i])
    world.deliver_all()
    # Half of the room for 8 is for whoever comes first; the others are told to come again.
    assert prefill.inspect.gauges()["parked"] == 4
    assert prefill.core.outbox.counters["parked.refused"] == 4
    pull = world.pull(other, "o", [1], group[0])
    world.deliver_all()
    assert prefill.inspect.gauges()["parked"] == 5
    world.lend(prefill, group[0], readers=2)
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert prefill.inspect.gauges()["parked"] == 3


@pytest.mark.parametrize("is_early", [True, False])
def test_a_closed_engine_parks_nothing(is_early: bool) -> None:
    world, prefill, decode = opened()
    world.lend(prefill, world.params([prefill], "other", [5], 4))
    pull = world.pull(decode, "d", [2], world.params([prefill], "r", [1], 4))
    if is_early:
        world.deliver_all()
    assert prefill.inspect.gauges()["parked"] == is_early
    prefill.core.shut()
    world.settle(prefill)
    world.run()
    assert pull.reason is Reason.ENGINE_CLOSED
    assert prefill.inspect.gauges()["parked"] == 0


def test_long_texts_about_strangers_are_cut_and_not_lost() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "r", [1])
    first = world.pull(decode, "a", [2], params, timeout=5.0, cohort_id="x" * 512)
    world.run()
    assert first.reason is Reason.COMPLETE
    assert lease.is_over


def test_a_release_that_comes_before_the_lend_frees_at_once() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    it = world.pull(decode, "d-req", [1], params, timeout=1)
    world.cancel(decode, "d-req")
    world.run()
    world.complete_all()
    assert it.reason is Reason.CANCELLED
    world.run()
    lease = world.lend(prefill, params)
    assert lease.state is LeaseState.RELEASED
    assert prefill.core.is_idle


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_requests_are_lent_in_any_order_while_their_readers_wait(order: tuple[int, ...]) -> None:
    world, prefill, decode = opened()
    made = [world.params([prefill], f"req{i}", [i], 4) for i in range(4)]
    pulls = [world.pull(decode, f"d{i}", [i], params) for i, params in enumerate(made)]
    world.run()
    assert [p.reason for p in pulls] == [None] * 4
    for i in order:
        want = prefill.buffers.block(i)
        lease = world.lend(prefill, made[i])
        world.run()
        assert (pulls[i].reason, lease.state) == (Reason.COMPLETE, LeaseState.RELEASED)
        assert decode.buffers.block(i) == want
    assert prefill.core.is_idle
    assert decode.core.is_idle


def test_an_early_release_below_the_newest_ends_its_lease_when_it_is_lent() -> None:
    world, prefill, decode = opened()
    early, late = (world.params([prefill], f"req{i}", [i], 4) for i in range(2))
    world.lend(prefill, late)
    it = world.pull(decode, "d-req", [1], early)
    world.run()
    world.cancel(decode, "d-req")
    world.run()
    assert it.reason is Reason.CANCELLED
    assert world.lend(prefill, early).state is LeaseState.RELEASED


def test_what_has_ended_is_refused_at_once_however_long_ago() -> None:
    world, prefill, decode = opened()
    first, _ = world.lent(prefill, "first", [3], written=True)
    world.pull(decode, "d-first", [1], first)
    world.run()
    prefill.core.prefill._ended.clear()  # as after very many others
    late = world.pull(decode, "late", [2], first)
    world.run()
    assert (late.reason, "unknown" in late.detail) == (Reason.UNKNOWN, True)
    with pytest.raises(LocalProtocolError, match="was lent or withdrawn before; make new params"):
        world.lend(prefill, first)
    assert (len(prefill.core.ledger), prefill.core.ledger.audit()) == (0, [])


def test_a_withdrawn_request_is_refused_to_readers_that_wait_and_to_readers_that_come() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    waits = world.pull(decode, "waits", [1], params)
    world.run()
    world.withdraw(prefill, params)
    comes = world.pull(decode, "comes", [2], params)
    world.run()
    assert (waits.reason, comes.reason) == (Reason.WITHDRAWN, Reason.WITHDRAWN)
    with pytest.raises(LocalProtocolError, match="was withdrawn; make new params"):
        world.lend(prefill, params)
    before = dict(prefill.core.outbox.counters)
    prefill.core.withdraw(params, world.time(prefill))
    assert prefill.core.outbox.counters == before
    assert prefill.core.is_idle
    assert prefill.core.prefill.parking.num_parked == 0


def test_withdrawing_what_is_lent_revokes_it_and_keeps_its_promises() -> None:
    world, prefill, decode, params, lease = lent()
    it = world.pull(decode, "d-req", [1], params)
    world.deliver_all()
    world.withdraw(prefill, params)
    assert lease.state is LeaseState.ENDING
    world.run()
    assert (it.reason, prefill.leases_ended) == (Reason.COMPLETE, [lease])
    assert str(lease.state) == "revoked"
    prefill.core.withdraw(params, world.time(prefill))
    assert str(lease.state) == "revoked"


def announce(world: World, decode: Rank, params: KVTransferParams) -> Pull:
    pull = world.announce(decode, "d-req", params, 300.0)
    world.run()
    return pull


def test_a_reader_that_has_only_announced_lets_go_of_a_withdrawn_request_at_its_next_renewal() -> None:
    """A third of the grant, and not the whole: nothing is read that the promise would have to cover."""
    world, prefill, decode, params, lease = lent()
    announced = announce(world, decode, params)
    world.withdraw(prefill, params)
    assert lease.state is LeaseState.ENDING
    world.run(10.0 / 3 + 0.1)
    assert (str(lease.state), announced.reason, announced.is_over) == ("revoked", Reason.REVOKED, True)
    pull = world.pull(decode, "d-req", [9], params)
    world.run()
    assert pull.reason is Reason.REVOKED


def test_what_is_pulled_after_the_withdrawal_and_under_a_promise_is_right() -> None:
    """The blocks are not the engine's before the reader is through, so its bytes are what was lent."""
    world, prefill, decode = opened()
    want = prefill.buffers.block(3)
    params, lease = world.lent(prefill, "req", [3], written=True)
    announce(world, decode, params)
    world.withdraw(prefill, params)
    world.run(1.0)
    pull = world.pull(decode, "d-req", [9], params)
    assert not lease.is_over
    world.run()
    assert (pull.reason, lease.state) == (Reason.COMPLETE, LeaseState.REVOKED)
    assert decode.buffers.block(9) == want
    assert prefill.buffers.block(3) != want  # overwritten when the lease had ended


def test_a_rank_that_wants_its_blocks_back_ends_a_pull_that_still_meets_another() -> None:
    """What is not begun is not worth the blocks of both sides until the promise runs out."""
    world = World(EngineConfig(engine_id="x", pull=PullConfig(handshake_s=20.0)))
    prefill, (decode,) = group(world, 2, 1)
    params, leases = world.lent_by(prefill, "req", [3], written=True)
    del world.ranks["p1"]
    pull = world.pull(decode, "d-req", [9], params)
    world.run(1.0)
    world.withdraw(prefill[0], params)
    world.run(10.0 / 3)
    assert (pull.reason, pull.failed_in, leases[0].is_over) == (Reason.REVOKED, "handshake", True)


def test_the_params_of_another_engine_are_not_withdrawn() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    with pytest.raises(LocalProtocolError, match="for engine 'prefill'"):
        decode.core.withdraw(params, 0.0)


def test_a_pull_whose_request_is_not_lent_in_time_says_so() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4, written=True)
    it = world.pull(decode, "d-req", [1], params, timeout=3)
    world.run(4)
    assert it.reason is Reason.NOT_LENT_YET
    assert re.match(r"not lent yet by prefill/tp0@\S+ \(\S+\) when the deadline passed", it.detail)


def test_an_answer_that_should_have_been_repeated_since_is_published_with_its_age() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4, written=True)
    it = world.pull(decode, "d-req", [1], params, timeout=9)
    world.run()
    world.lend(prefill, params)
    world.letters.clear()
    world.advance(9.5)
    assert it.reason is Reason.NOT_LENT_YET
    assert "(its last answer was 9 s ago) when the deadline passed" in it.detail


def test_a_release_takes_the_place_of_its_early_claim_and_that_claim_changes_nothing_when_it_comes_again() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    it = world.pull(decode, "d-req", [1], params)
    world.run()
    parked = next(iter(prefill.core.prefill.parking.by_key.values()))
    (claim,) = parked.values()
    world.cancel(decode, "d-req")
    world.run()
    assert it.reason is Reason.CANCELLED
    assert [type(p.message) for p in parked.values()] == [m.Release]
    assert isinstance(claim.message, m.Claim)
    prefill.core.prefill.receive(claim.message, claim.reply_to, claim.sender, world.time(prefill))
    assert prefill.core.prefill.parking.num_parked == 1
    assert world.lend(prefill, params).state is LeaseState.RELEASED


def test_a_reader_of_an_older_version_hears_of_a_withdrawal_in_words_that_it_knows() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    it = world.pull(decode, "d-req", [1], params)
    world.run()
    spoken = prefill.core.readers.minor_versions
    spoken.update(dict.fromkeys(spoken, 1))
    world.withdraw(prefill, params)
    world.run()
    assert (it.reason, "the request was withdrawn" in it.detail) == (Reason.UNKNOWN, True)


def test_what_is_remembered_to_have_ended_is_not_lent_again_though_its_scheduler_is_forgotten() -> None:
    world, prefill, decode = opened()
    first, second = (world.params([prefill], f"r{i}", [i], 4, written=True) for i in range(2))
    prefill.core.prefill.revoke(world.lend(prefill, first), world.time(prefill))
    prefill.core.withdraw(second, world.time(prefill))
    prefill.core.prefill.spent = SpentKeys()  # as after very many other schedulers
    with pytest.raises(LocalProtocolError, match=r"lent before \(revoked\)"):
        world.lend(prefill, first)
    with pytest.raises(LocalProtocolError, match="withdrawn"):
        world.lend(prefill, second)
    prefill.core.withdraw(first, world.time(prefill))
    late = world.pull(decode, "late", [1], first)
    world.run()
    assert late.reason is Reason.REVOKED


def test_a_pull_whose_claim_is_not_answered_says_so() -> None:
    world, prefill, decode = opened()
    warm, _ = world.lent(prefill, "warm", [0], written=True)
    world.pull(decode, "warm", [0], warm)
    world.run()
    params, _ = world.lent(prefill, "req", [3], written=True)
    it = world.pull(decode, "d-req", [1], params, timeout=3)
    world.letters.clear()
    world.complete_all()
    world.advance(4)
    assert (it.reason, it.detail[:38]) == (Reason.TIMEOUT, "no answer to the claim from prefill/tp")


def test_ten_thousand_requests_are_lent_in_any_order() -> None:
    world, prefill, _ = opened()
    made = [world.params([prefill], f"req{i}", [], 0) for i in range(10_000)]
    random.Random(1).shuffle(made)
    for params in made:
        if int(params.request_id[3:]) % 10:
            world.lend(prefill, params).revoke(world.time(prefill))
    for params in made:
        if int(params.request_id[3:]) % 10:
            with pytest.raises(LocalProtocolError, match=r"lent (or withdrawn )?before"):
                world.lend(prefill, params)
        else:
            world.lend(prefill, params)
    assert prefill.core.prefill.spent.num_gaps == 0


def test_lending_one_key_twice_is_refused() -> None:
    world, prefill, _ = opened()
    params, _ = world.lent(prefill, "req", [3])
    with pytest.raises(LocalProtocolError, match="lent before"):
        world.lend(prefill, params)
    world.advance(40)
    with pytest.raises(LocalProtocolError, match="lent before"):
        world.lend(prefill, params)


def test_one_failed_transfer_of_four_is_reported_after_the_other_three() -> None:
    world, prefill, decode = opened(pull=PullConfig(max_post_bytes=128))
    params, _ = world.lent(prefill, "req", [3, 4], written=True)
    it = world.pull(decode, "d-req", [1, 2], params)
    world.deliver_all()
    first, *others = list(decode.reads)
    assert len(others) == 3
    world.tell(decode, TransferEnded(first, Ending.FAILED, "broken"))
    for transfer_id in others:
        assert it.reason is None
        world.complete(decode, transfer_id)
    assert it.reason is Reason.READ_FAILED
    assert it.is_returned


def test_blocks_stay_held_while_a_cancelled_read_may_still_write() -> None:
    world, _, decode, _, it = reading()
    world.cancel(decode, "d-req")
    assert not it.is_published
    world.advance(5.1)
    assert (it.reason, it.is_returned) == (Reason.CANCELLED, False)
    with pytest.raises(LocalProtocolError, match="still being written"):
        world.pull(decode, "again", [9], it.params)
    world.run()
    assert it.is_returned
    assert decode.core.is_idle


def test_a_transfer_in_doubt_keeps_its_blocks_whatever_else_ends() -> None:
    world, _, decode, _, it = reading()
    (transfer_id,) = decode.reads
    world.tell(decode, TransferEnded(transfer_id, Ending.IN_DOUBT, "NIXL_ERR_NOT_FOUND"))
    world.advance(60)
    assert (it.reason, it.state, it.is_returned) == (Reason.READ_FAILED, PullState.QUARANTINED, False)
    assert decode.inspect.gauges()["blocks_quarantined"] == 1
    decode.reads.clear()
    world.tell(decode, TransferEnded(transfer_id, Ending.DONE))
    assert it.is_returned
    assert decode.core.is_idle


def test_a_pull_of_a_silent_peer_ends_by_its_deadline_with_every_block() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    it = world.pull(decode, "d-req", [9], params, timeout=2.0)
    world.live(3.0, 0.1, is_heard=False)
    assert it.reason is Reason.TIMEOUT
    assert "no handshake with prefill/tp0@prefill- (world://prefill)" in it.detail
    assert it.is_returned


def test_a_peer_that_cannot_be_loaded_in_time_is_given_up_and_met_again() -> None:
    world, prefill, decode = opened()
    world.auto_load = False
    params, _ = world.lent(prefill, "req", [3], written=True)
    it = world.pull(decode, "d-req", [9], params, timeout=20)
    world.deliver_all()
    world.advance(5.1)
    assert it.reason is Reason.UNREACHABLE
    assert "was not loaded within 5 s" in it.detail
    world.advance(2.0)
    again = world.pull(decode, "again", [9], params)
    assert again.reason is Reason.UNREACHABLE, "the first attempt still runs, and NIXL knows a peer once"
    world.load(decode)
    assert not decode.peers, "what was loaded too late was removed"
    world.auto_load = True
    world.run()
    late, _ = world.lent(prefill, "late", [4], written=True)
    good = world.pull(decode, "late", [9], late)
    world.run()
    assert good.reason is Reason.COMPLETE


def loading_beside_another(timeout: float) -> tuple[World, Rank, Pull, Peer]:
    """A data plane that takes one peer at a time has the one of a pull wait for another, which comes back."""
    world, prefill, decode = opened()
    other = world.add("o", make_layout(base=3 << 40), engine_id="other", seed=3)
    world.auto_load = False
    pulls = []
    for block, rank in enumerate((other, prefill), 8):
        params, _ = world.lent(rank, "req", [3], written=True)
        pulls.append(world.pull(decode, f"of-{rank.name}", [block], params, timeout=timeout))
        world.deliver_all()
    return world, decode, pulls[1], decode.loading.pop(0)


def test_a_peer_that_waits_until_another_was_loaded_has_its_own_time() -> None:
    """One whose metadata hangs what tries it took a good one's handshake along."""
    world, decode, it, first = loading_beside_another(30.0)
    world.advance(4.0)
    decode.core.decode.load_ended(first, "it hung", world.time(decode))
    world.advance(4.0)
    world.load(decode)
    world.run()
    assert reason(it) is Reason.COMPLETE


def test_a_peer_that_waits_for_one_after_the_other_is_given_up_in_the_end() -> None:
    world, decode, it, first = loading_beside_another(60.0)
    for _ in range(7):
        world.advance(4.0)
        assert it.reason is None
        decode.core.decode.load_ended(first, "it hung", world.time(decode))
    world.advance(2.1)
    assert reason(it) is Reason.UNREACHABLE


def test_a_peer_that_answers_late_has_all_the_time_to_be_loaded() -> None:
    world, prefill, decode = opened()
    world.auto_load = False
    params, _ = world.lent(prefill, "req", [3], written=True)
    it = world.pull(decode, "d-req", [9], params)
    world.advance(4.0)
    world.deliver_all()
    world.advance(4.0)
    world.load(decode)
    world.run()
    assert reason(it) is Reason.COMPLETE


def test_a_hundred_requests_share_one_handshake_and_its_failure() -> None:
    world, prefill, decode = opened()
    pulls = [
        world.pull(decode, f"d{i}", [i], world.params([prefill], f"r{i}", [1], 4), timeout=20)
        for i in range(NUM_BLOCKS)
    ]
    assert decode.core.outbox.counters["sent.hello"] == 1
    world.live(6.0, 0.1, is_heard=False)
    assert {(p.reason, p.detail) for p in pulls} == {
        (Reason.UNREACHABLE, "prefill/tp0@prefill- (world://prefill) did not answer within 5 s")
    }
    late = world.pull(decode, "late", [1], world.params([prefill], "late", [1], 4))
    assert late.reason is None or "did not answer" in late.detail


def test_a_restarted_engine_refuses_old_references_and_serves_new_ones() -> None:
    world, prefill, decode = opened()
    old, _ = world.lent(prefill, "old", [3], written=True)
    reborn = world.add("prefill", make_layout(), seed=3)
    failed = world.pull(decode, "old", [9], old)
    world.run()
    assert failed.reason is Reason.RESTARTED
    new, _ = world.lent(reborn, "new", [3], written=True)
    good = world.pull(decode, "new", [9], new)
    world.run()
    assert good.reason is Reason.COMPLETE


def test_the_wrong_engine_at_an_address_is_named_with_both_ids() -> None:
    world, prefill, decode = opened()
    other = PrefillRanks("somebody-else", [Endpoint(0, prefill.address, prefill.core.identity.incarnation)])
    it = world.pull(decode, "d", [9], decode_params(other.make_params("req", [(0, [1])], 4)))
    world.run()
    assert it.reason is Reason.WRONG_TARGET
    for part in ("prefill/tp0@prefill- listens", "somebody-else/tp0@prefill- (world://prefill)"):
        assert part in it.detail


def test_layouts_that_differ_are_refused_at_the_handshake() -> None:
    world = World()
    prefill = world.add("p", make_layout(head_dim=4), engine_id="prefill")
    decode = world.add("d", make_layout(base=1 << 41), engine_id="decode")
    it = world.pull(decode, "d", [9], world.params([prefill], "req", [1], 4))
    world.run()
    assert it.reason is Reason.GEOMETRY
    assert "local dim=2, head, token, remote dim=4, head, token" in it.detail
    assert not decode.reads


def test_an_announcement_that_is_never_pulled_releases_the_request() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "req", [3])
    world.announce(decode, "d-req", params, 5.0)
    world.live(6.0, 0.1)
    assert lease.state is LeaseState.RELEASED
    assert decode.core.is_idle


def test_an_announcement_made_again_has_its_time_anew() -> None:
    world, prefill, decode = opened()
    params, other = (world.params([prefill], name, [3], 4, written=True) for name in ("req", "other"))
    lease = world.lend(prefill, params)
    it = decode.core.announce("d-req", params, "", 5.0, world.time(decode))
    for _ in range(6):
        world.settle(decode)
        world.live(4.0, 1.0)
        # From now on: it may be longer or shorter than what was left.
        assert decode.core.announce("d-req", params, "", 5.0, world.time(decode)) is it
    for given, cohort_id in ((other, ""), (params, "sibling")):
        with pytest.raises(LocalProtocolError, match="was announced with other params or another cohort_id"):
            decode.core.announce("d-req", given, cohort_id, 5.0, world.time(decode))
    assert (it.reason, lease.is_over, decode.core.outbox.counters["pulls.started"]) == (None, False, 1)
    world.announce(decode, "d-req", params, 1.0)
    world.advance(1.1)
    world.deliver_all()
    assert (it.reason, lease.state) == (Reason.TIMEOUT, LeaseState.RELEASED)
    again = decode.core.announce("d-req", params, "", 5.0, world.time(decode))
    assert again is not it


def test_what_a_rank_lends_itself_is_refused_before_anything_and_may_be_discharged() -> None:
    world, prefill, _ = opened()
    params, lease = world.lent(prefill, "req", [3], written=True)
    with pytest.raises(PlanRefused, match="'d-req' is lent by this very rank"):
        prefill.core.announce("d-req", params, "", 5.0, world.time(prefill))
    with pytest.raises(PlanRefused, match="'d-req' is lent by this very rank"):
        world.pull(prefill, "d-req", [9], params)
    assert not prefill.core.decode.pulls
    world.discharge(prefill, "d-req", params)
    world.deliver_all()
    assert lease.state is LeaseState.RELEASED
    assert prefill.core.is_idle


def test_what_is_being_pulled_cannot_be_announced() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    world.pull(decode, "d-req", [9], params)
    with pytest.raises(LocalProtocolError, match="is being pulled already"):
        decode.core.announce("d-req", params, "", 5.0, world.time(decode))


def test_siblings_each_release_and_strangers_are_refused() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "req", [3], written=True, readers=2)
    pulls = [world.pull(decode, f"sibling{i}", [i], params, cohort_id=f"decode/{i}") for i in range(3)]
    world.run()
    assert [p.reason for p in pulls] == [Reason.COMPLETE, Reason.COMPLETE, Reason.WRONG_COHORT]
    assert lease.state is LeaseState.RELEASED


def test_closing_takes_nothing_new_and_keeps_promises() -> None:
    world, prefill, _, _, it = reading()
    world.close(prefill)
    assert not prefill.core.is_idle
    with pytest.raises(EngineClosed):
        prefill.core.lend(world.params([prefill], "new", [4], 4), 1, 0.0)
    world.run()
    assert it.reason is Reason.COMPLETE
    assert prefill.core.is_idle


@pytest.mark.parametrize("lease_s", [0.0, 1.0, -1.0, float("nan"), 1e12])
def test_absurd_leases_are_refused(lease_s: float) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        LeaseConfig(lease_s=lease_s)
    endpoint = Endpoint(0, "tcp://127.0.0.1:1", "i")
    with pytest.raises(ConfigError, match="lease_s"):
        PrefillRanks("p", [endpoint]).make_params("req", [(0, [1])], 4, lease_s=lease_s)


def test_endpoints_with_holes_is_refused() -> None:
    ranks: Sequence[Endpoint] = [Endpoint(r, f"tcp://127.0.0.1:{r + 1}", "i") for r in (0, 2)]
    with pytest.raises(ConfigError, match=r"\[\(0, 0\), \(0, 2\)\]"):
        PrefillRanks("p", ranks, tp_size=3)


SHARING = [Endpoint(r, f"tcp://127.0.0.1:{r + 1}", "i") for r in range(4)]


def test_params_without_shards_keep_their_bytes() -> None:
    params = PrefillRanks("p", SHARING).make_params("req", [(0, [1])], 4)
    assert "num_token_shards" not in params
    assert b"num_token_shards" not in msgspec.msgpack.encode(decode_params(params))
    said = PrefillRanks("p", SHARING, num_token_shards=2).make_params("req", [(0, [1])], 4)
    assert (said["num_token_shards"], decode_params(said).num_token_shards) == (2, 2)
    assert set(said) - set(params) == {"num_token_shards"}


@pytest.mark.parametrize("shards", [3, 8])
def test_a_number_of_shards_that_does_not_divide_the_ranks_is_refused(shards: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_token_shards {shards} does not divide the tp_size 4 .*Layout"):
        PrefillRanks("p", SHARING, num_token_shards=shards)
    params = PrefillRanks("p", SHARING).make_params("req", [(0, [1])], 4) | {"num_token_shards": shards}
    for given in (params, msgspec.convert(params, KVTransferParams)):
        with pytest.raises(RemoteProtocolError, match=f"num_token_shards {shards} does not divide tp_size 4"):
            decode_params(given)


@pytest.mark.parametrize("shards", [0, -1, 1 << 40, "2", 2.5, True])
def test_a_malformed_number_of_shards_is_refused(shards: Any) -> None:
    params = PrefillRanks("p", SHARING).make_params("req", [(0, [1])], 4)
    with pytest.raises(RemoteProtocolError, match=r"malformed.*num_token_shards"):
        decode_params(params | {"num_token_shards": shards})
    with pytest.raises(ConfigError, match="num_token_shards"):
        PrefillRanks("p", SHARING, num_token_shards=shards)


@pytest.mark.parametrize(("real", "said"), [(1, 2), (2, 1), (2, 4)])
def test_a_rank_lends_and_withdraws_nothing_under_another_number_of_shards(real: int, said: int) -> None:
    world = World()
    ranks = ranks_of(world, "prefill", 4, num_heads=1, shards=real)
    params = world.params(ranks, "req", [3], 4)
    assert (params.num_token_shards or 1) == real
    other = msgspec.structs.replace(params, num_token_shards=said)
    for call in (world.lend, world.withdraw):
        with pytest.raises(
            LocalProtocolError, match=rf"num_token_shards {real}, not {said}; give PrefillRanks the number of its"
        ):
            call(ranks[0], other)
    assert not world.lend(ranks[0], params).is_over


@pytest.mark.parametrize(("real", "said"), [(1, 2), (2, 1), (2, 4)])
def test_params_with_another_number_of_shards_than_the_layouts_are_refused_at_the_handshake(
    real: int, said: int
) -> None:
    world = World()
    prefill = ranks_of(world, "prefill", 4, num_heads=1, shards=real)
    decode = world.add("d", make_layout(3, 4, num_heads=1, base=1 << 50), engine_id="decode")
    params, _ = world.lent_by(prefill, "req", [3], written=True)
    changed = msgspec.structs.replace(params, num_token_shards=said)
    for name in ("first", "again"):  # the second finds that all ranks are known
        pull = world.pull(decode, name, [9], changed)
        world.run(10.0)
        assert pull.reason is Reason.GEOMETRY
        assert re.search(
            rf"num_token_shards {real}, but the params say {said}; give PrefillRanks .*, and every rank the same$",
            pull.detail,
        )
        assert not decode.reads
    routes = decode.core.decode.routes
    honest = routes.answered_for("d", params)
    assert (routes.answered_for("d", changed) is honest, honest.ready) == (False, {})
    assert [rank.tp_rank for rank in honest.ranks] == ([3] if real == 1 else [2, 3])
    params, leases = world.lent_by(prefill, "honest", [3], written=True)
    pull = world.pull(decode, "honest", [9], params)
    world.run()
    assert (pull.reason, leases[3].owed()) == (Reason.COMPLETE, () if real == 1 else ("decode/tp2",))


def test_a_peer_that_is_gone_with_a_transfer_in_doubt_starves_no_other() -> None:
    world, prefill, decode, _, _ = reading()
    (transfer_id,) = decode.reads
    world.tell(decode, TransferEnded(transfer_id, Ending.IN_DOUBT, "doubt"))
    decode.core.decode.forget(prefill.address, world.time(decode))
    world.settle(decode)
    world.advance(100.0)
    assert decode.core.next_at > world.time(decode)
    world.tell(decode, TransferEnded(transfer_id, Ending.DONE))
    world.advance(100.0)
    assert not decode.core.decode.peers.by_place


def test_a_read_goes_on_under_a_promise_that_is_not_renewed() -> None:
    world, prefill, _, lease, it = reading()
    world.revoke(prefill, lease)
    world.live(8.0, 0.1)  # renewals are refused: revoked
    assert not it.is_published
    world.complete_all()
    world.run()
    assert it.reason is Reason.COMPLETE


def test_blocks_that_cannot_hold_the_tokens_are_not_lent() -> None:
    world, prefill = alone()
    params = world.params([prefill], "req", [3, 5], 1000)
    said = "2 blocks of 4 tokens from token 0 on end at token 8, but num_tokens is 1000"
    with pytest.raises(PlanRefused, match=said):
        world.lend(prefill, params)
    assert prefill.core.is_idle
    world.lend(prefill, world.params([prefill], "req", [3, 5], 8))


FORK = """
import json, os
from asynckv import Endpoint, PrefillRanks
group = PrefillRanks("prefill", [Endpoint(0, "tcp://127.0.0.1:1", "i")])
make = lambda name: group.make_params(name, [(0, [1])], 4)["key"]
make("before")
child = os.fork()
os.write(1, json.dumps(make("after")).encode() + b"\\n")  # in one piece
if child:
    os.waitpid(child, 0)
"""


def test_a_forked_scheduler_mints_keys_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60)
    keys = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(sequence for _, _, sequence, _ in keys) == [0, 1]
    assert len({epoch for epoch, _, _, _ in keys}) == 2


def test_a_loop_that_is_always_late_notices_a_silent_peer_too() -> None:
    """What we were away is no silence of theirs, but what we were there is, however little of it at a time."""
    world, _, decode, _, it = reading(timeout=100)
    (peer,) = decode.core.decode.peers.by_place.values()
    seen = []
    for _ in range(70):
        world.letters.clear()
        world.now += 0.6
        world.tick(decode)
        seen.append(peer.state)
    assert seen[0] is PeerState.READY
    assert PeerState.SUSPECT in seen
    assert peer.state is PeerState.GONE
    assert it.failure is not None
    assert it.failure[0] is Reason.PEER_LOST


def test_a_peer_that_answers_is_never_silent_to_a_loop_that_is_always_late() -> None:
    world, _, decode, _, _ = reading(timeout=1000)
    (peer,) = decode.core.decode.peers.by_place.values()
    for late in (*[0.6] * 50, 40.0, 600.0, 0.6):
        world.now += late
        world.tick(decode)
        assert peer.state is PeerState.READY
        world.deliver_all()
