"""What a pull promises by number: until when it waits, where it failed, how often it asks; and that audits notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from asynckv.core.flow import InFlight, PeerLine, Posting
from asynckv.core.pull import Effect, PullState
from asynckv.core.source import UNBLAMED, Role
from asynckv.core.types import PullId, Reason, TransferId
from asynckv.core.wire import Claim, NotYet
from tests.lab.oracles import wrong_in
from tests.test_admission import ask, asking, state, world_of
from tests.test_proof import Reading
from tests.world import Rank, World, make_layout


def two(**pull: Any) -> tuple[World, Rank, Rank]:
    world, (prefill,), decode = world_of(**pull)
    return world, prefill, decode


# -- until when --------------------------------------------------------------------------------------------


def test_a_state_ends_at_the_latest_when_its_own_bound_or_its_callers_has_passed() -> None:
    world, prefill, decode, pull = asking(1, timeout=30.0, drain_s=2.0)
    world.deliver_all()
    assert (pull.state, pull.until) == (PullState.READING, 30.0)
    world.advance(1.0)
    world.cancel(decode, "d1")
    assert (pull.state, pull.until) == (PullState.DRAINING, 3.0)
    late = ask(world, prefill, decode, 2, timeout=1.5)
    world.deliver_all()
    world.cancel(decode, "d2")
    assert (late.state, late.until) == (PullState.DRAINING, 2.5)


# -- where it failed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [[None, 3], [3, 600]])
def test_a_pull_whose_turn_came_and_that_cannot_be_planned_fails_in_its_plan(blocks: list[int | None]) -> None:
    """Its first block is not offered, or its second is none that there is."""
    world, prefill, decode = two()
    pull = world.pull(decode, "d", [7, 8], world.params([prefill], "r", blocks, 8, written=True))
    world.deliver_all()
    assert pull.reason is (Reason.UNPLANNABLE if 600 in blocks else Reason.REMOTE_TOO_SHORT)
    assert pull.failed_in == "plan"


def test_a_pull_that_waits_for_its_turn_fails_in_the_queue_also_when_it_waits_again() -> None:
    world, prefill, decode = two(total_requests=1, window_requests=1, max_post_bytes=64, window_bytes=64)
    again = ask(world, prefill, decode, 1, lend=False, timeout=3.0)
    waiting = ask(world, prefill, decode, 2, timeout=2.0)
    world.deliver()
    world.deliver()
    assert [again.state, waiting.state] == [PullState.READING, PullState.QUEUED]
    world.advance(2.0)
    assert (waiting.reason, waiting.failed_in) == (Reason.TIMEOUT, "queue")
    world.deliver_all()
    world.complete(decode, next(iter(decode.reads)))
    assert (state(again), again.measures.planned_at < 1.0) == (PullState.QUEUED, True)
    world.advance(1.0)
    assert (again.reason, again.failed_in) == (Reason.NOT_LENT_YET, "queue")


# -- lines -------------------------------------------------------------------------------------------------


def test_a_pull_that_was_sent_away_may_stand_in_line_again() -> None:
    line, posting = PeerLine(InFlight(), is_open=True), Posting(1 << 20, 1 << 20)
    read: Any = SimpleNamespace(num_bytes=1, num_descriptors=1)
    poster: Any = SimpleNamespace(next_read=read, may_post=True, not_lent_yet=False, is_waiting=False)
    posting.offer(line, poster)
    line.clear()
    assert (list(line.posters), poster.is_waiting, posting.next()) == ([], False, None)
    posting.offer(line, poster)
    assert posting.next() is poster


def test_a_rank_that_is_asked_for_more_and_sends_nothing_is_set_aside_none_the_later() -> None:
    """What is posted is no sign of life: only what arrives is."""
    world, prefill, decode = two(suspect_s=2.0, heartbeat_s=0.25)
    ask(world, prefill, decode, 1)
    world.deliver_all()
    (peer,) = decode.core.decode.peers.by_place.values()
    begun = world.now
    for number in range(2, 30):
        if peer.line.is_set_aside:
            break
        ask(world, prefill, decode, number)
        world.advance(0.25)
        world.deliver_all()
    assert peer.line.is_set_aside
    assert world.now - begun <= 2.5


# -- audits ------------------------------------------------------------------------------------------------


def _over_in_all(decode: Any) -> None:
    decode.posting.in_flight.enter(TransferId(99), 1, 1)


def _over_at_a_peer(decode: Any) -> None:
    next(iter(decode.peers.by_place.values())).line.in_flight.enter(TransferId(99), 1, 1)


def _miscounted(decode: Any) -> None:
    decode.posting.in_flight.num_bytes += 1


def _queued(decode: Any) -> None:
    decode.admission.ask((), PullId("stray"), 0, 0)


def _not_queued(decode: Any) -> None:
    (waiting,) = [p for p in decode.pulls.values() if p.state is PullState.QUEUED]
    decode.admission.leave(waiting.pull_id)


def _started(decode: Any) -> None:
    decode.started.add(PullId("stray"))


def _of_nobody(decode: Any) -> None:
    decode.pulls.pop(next(iter(decode.transfers.values())).pull.pull_id)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_over_in_all, "transfer 99 is over and still takes room"),
        (_over_at_a_peer, "transfer 99 is over and still takes room"),
        (_miscounted, "descriptors are counted, not"),
        (_queued, "pull stray should not wait or count"),
        (_not_queued, "should wait, and does not"),
        (_started, "count as started without an outcome"),
        (_of_nobody, "which is over"),
    ],
)
def test_whatever_does_not_add_up_is_said(broken: Callable[[Any], None], said: str) -> None:
    world, prefill, decode = two(total_requests=1, window_requests=1)
    for number in (1, 2):
        ask(world, prefill, decode, number)
    world.deliver_all()
    assert wrong_in(decode.core.decode) == []
    broken(decode.core.decode)
    assert any(said in line for line in wrong_in(decode.core.decode))


# -- what is asked of a rank, and heard of it ---------------------------------------------------------------


def test_what_was_said_before_a_grant_and_is_heard_after_it_holds_nothing_up() -> None:
    """Messages may overtake each other: a rank that has granted a request has lent it."""
    it = Reading(8, max_post_bytes=64, window_bytes=64)
    claims = [it.ask(), *(ask for _, ask in it.wait(1.0))]
    it.grant(claims[-1], 20.0)
    it.say(NotYet(claims[0].key, claims[0].pull_id, claims[0].nonce))
    for _ in range(32):
        assert len(it.decode.reads) == 1
        it.land()
    assert it.outcome is Reason.COMPLETE


def test_a_pull_that_was_given_up_asks_for_no_longer_than_it_drains() -> None:
    it = Reading(drain_s=2.0)
    it.grant(it.ask(), 1.0)
    it.world.cancel(it.decode, it.pull)
    asked = [(at, ask.seconds) for at, ask in it.wait(1.9)]
    assert asked
    assert all(at + seconds == pytest.approx(2.0, abs=0.02) for at, seconds in asked)


def test_a_rank_of_which_nothing_is_needed_has_nothing_to_prove() -> None:
    """Of a window of one token nothing is lent or read: it completes though the rank never answers a claim."""
    layout = make_layout()
    one = structs.replace(layout, groups=(structs.replace(layout.groups[0], window=1),))
    world = World()
    prefill, decode = world.add("p", one, engine_id="prefill"), world.add("d", one, engine_id="decode")
    pull = world.pull(decode, "d", [7, 8], world.params([prefill], "r", [None, None], 8, written=True))
    world.deliver()
    world.deliver()
    assert (pull.reason, decode.reads) == (Reason.COMPLETE, {})


def test_a_request_is_tried_again_when_the_last_of_its_ranks_may_be_and_fails_for_the_first() -> None:
    _, _, _, pull = asking(1)
    [source] = pull.sources
    for not_before in (3.0, 5.0, 4.0):
        pull.could_not_meet(not_before)
    for reason in (Reason.UNREACHABLE, Reason.PEER_LOST):
        pull.goes_without(source, reason, f"it is {reason}")
    assert (pull.not_before, pull.unmet) == (5.0, (Reason.UNREACHABLE, "it is peer_unreachable", UNBLAMED))


def test_a_rank_that_was_given_up_claims_anew_when_it_is_read_after_all() -> None:
    """It had claimed before, and another pull has met the rank anew: the old claim's grant would end unrenewed."""
    world, _, _, pull = asking(1)
    [source] = pull.sources
    for seen in range(2):
        assert pull.met(source, world.now) == [Effect.SEND]
        [(_, claim)] = pull.make_messages(itertools.count(seen), world.now)
        assert isinstance(claim, Claim)
        assert pull.met(source, world.now) == []
        pull.goes_without(source, Reason.UNREACHABLE, "its agent was lost")
        source.role = Role.READ
