"""What a pull promises by number: until when it waits, where it failed, how often it asks; and that audits notice."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asynckv.core.flow import InFlight, Line, Posting
from asynckv.core.pull import PullState
from asynckv.core.source import RemoteRank, Role, Source
from asynckv.core.types import Address, PullId, Reason, TransferId
from tests.test_admission import ask, world_of
from tests.test_flow import state
from tests.world import Rank, World


def two(**pull: Any) -> tuple[World, Rank, Rank]:
    world, (prefill,), decode = world_of(**pull)
    return world, prefill, decode


# -- until when --------------------------------------------------------------------------------------------


def test_a_state_ends_at_the_latest_when_its_own_bound_or_its_callers_has_passed() -> None:
    world, prefill, decode = two(drain_s=2.0)
    pull = ask(world, prefill, decode, 1, timeout=30.0)
    world.deliver_all()
    assert (pull.state, pull.until) == (PullState.READING, 30.0)
    world.advance(1.0)
    decode.core.cancel("d1", world.time(decode))
    world.settle(decode)
    assert (pull.state, pull.until) == (PullState.DRAINING, 3.0)
    late = ask(world, prefill, decode, 2, timeout=1.5)
    world.deliver_all()
    decode.core.cancel("d2", world.time(decode))
    world.settle(decode)
    assert (late.state, late.until) == (PullState.DRAINING, 2.5)


# -- where it failed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [[None, 3], [3, 600]])
def test_a_pull_whose_turn_came_and_that_cannot_be_planned_fails_in_its_plan(blocks: list[int]) -> None:
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
    assert (state(again), again.planned_at < 1.0) == (PullState.QUEUED, True)
    world.advance(1.0)
    assert (again.reason, again.failed_in) == (Reason.NOT_LENT_YET, "queue")


# -- how often it asks -------------------------------------------------------------------------------------


def test_a_pause_is_at_most_64_times_the_first() -> None:
    """The same for claims and releases, where the first is so short that their longest pause is never reached."""
    source = Source(PullId("p"), RemoteRank(0, 0, (Address("tcp://a"), "start"), "a/tp0", True), Role.READ)
    pauses: list[tuple[float, float]] = []
    for number in range(10):
        source.claimed(number, 0.001, 0.0)
        source.released(0.001, 0.0)
        pauses.append((source.claim_at, source.release_at))
    assert pauses == [(0.001 * factor, 0.001 * factor) for factor in (1, 2, 4, 8, 16, 32, 64, 64, 64, 64)]


# -- lines -------------------------------------------------------------------------------------------------


def test_whoever_was_sent_away_may_stand_in_line_again() -> None:
    line, posting = Line(InFlight(), is_open=True), Posting(1 << 20, 1 << 20)
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
    decode.in_flight.enter(TransferId(99), 1, 1)


def _over_at_a_peer(decode: Any) -> None:
    next(iter(decode.peers.by_place.values())).line.in_flight.enter(TransferId(99), 1, 1)


def _miscounted(decode: Any) -> None:
    decode.in_flight.num_bytes += 1


def _queued(decode: Any) -> None:
    decode.admission.ask((), PullId("stray"), 0, 0)


def _not_queued(decode: Any) -> None:
    (waiting,) = [p for p in decode.pulls.values() if p.state is PullState.QUEUED]
    decode.admission.leave(waiting.pull_id)


def _counted(decode: Any) -> None:
    decode.admission._counted.add(PullId("stray"))


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
        (_counted, "count without being in flight"),
        (_started, "count as started without an outcome"),
        (_of_nobody, "which is over"),
    ],
)
def test_whatever_does_not_add_up_is_said(broken: Callable[[Any], None], said: str) -> None:
    world, prefill, decode = two(total_requests=1, window_requests=1)
    for number in (1, 2):
        ask(world, prefill, decode, number)
    world.deliver_all()
    assert decode.core.inspect.check_integrity() == []
    broken(decode.core.decode)
    assert any(said in line for line in decode.core.inspect.check_integrity())
