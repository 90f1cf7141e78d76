"""Budgets at the door of a rank: which pulls and messages take room from others, and which do not."""

from __future__ import annotations

import pytest

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.flow import WAITING, Admission, FlowKey
from asynckv.core.peer import PeerState
from asynckv.core.pull import Pull, PullState
from asynckv.core.types import Address, PullId, Reason, TransferId
from tests.lab.oracles import wrong_in
from tests.test_admission import ask, world_of
from tests.world import Rank, World, make_layout, reason


def posted_at(decode: Rank, prefill: str) -> list[TransferId]:
    return [t for t, read in decode.reads.items() if read.agent_name == f"agent-{prefill}"]


def state(pull: Pull) -> PullState:
    """Read anew: mypy would remember what it was before."""
    return pull.state


def test_who_hears_in_the_queue_that_its_request_is_not_lent_yet_makes_way_for_the_next() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1)
    first = ask(world, prefill, decode, 1)
    early, late = ask(world, prefill, decode, 2, lend=False), ask(world, prefill, decode, 3)
    world.deliver_all()
    assert [state(p) for p in (first, early, late)] == [PullState.READING, PullState.QUEUED, PullState.QUEUED]
    admission = decode.core.decode.admission
    assert [admission.waits(p.pull_id) for p in (early, late)] == [False, True]
    world.complete(decode, next(iter(decode.reads)))
    assert [state(p) for p in (early, late)] == [PullState.QUEUED, PullState.READING]
    world.run()
    assert reason(late) is Reason.COMPLETE
    world.lend(prefill, early.params)
    world.run()
    assert reason(early) is Reason.COMPLETE
    world.check()


def test_whose_turn_comes_while_its_rank_is_silent_keeps_nobody_else_from_reading() -> None:
    world, (healthy, silent), decode = world_of(2, total_requests=1, window_requests=1, heartbeat_s=0.25)
    world.deliver_all()
    first = ask(world, healthy, decode, 1)
    waiting = ask(world, silent, decode, 2)
    world.deliver_all()
    assert [state(p) for p in (first, waiting)] == [PullState.READING, PullState.QUEUED]
    assert decode.core.decode.admission.waits(waiting.pull_id)
    del world.ranks["p1"]
    last = ask(world, healthy, decode, 3)
    for _ in range(8):  # nothing is heard of the one, and much of the other
        world.advance(0.25)
        world.deliver_all()
    peers = {p.engine_id: p.state for p in decode.core.decode.peers.by_place.values()}
    assert peers == {"prefill0": PeerState.READY, "prefill1": PeerState.SUSPECT}
    while reason(first) is None:
        world.complete(decode, posted_at(decode, "p0")[0])
        world.deliver_all()
    assert [state(p) for p in (waiting, last)] == [PullState.QUEUED, PullState.READING]
    assert decode.core.inspect.check_integrity() + wrong_in(decode.core.decode) == []


@pytest.mark.parametrize("when", ["it is set aside", "it is asked"])
def test_who_reads_from_a_rank_that_sends_nothing_counts_for_nobody_else(when: str) -> None:
    """Whether it was admitted before that was seen, or is admitted now."""
    world, (stalled, healthy), decode = world_of(2, total_requests=2, window_requests=2)
    ask(world, stalled, decode, 1)
    world.deliver_all()
    (peer,) = decode.core.decode.peers.by_place.values()
    while not peer.line.is_set_aside:
        world.advance(0.25)
        world.deliver_all()
    if when == "it is asked":
        more = ask(world, stalled, decode, 2)
        world.deliver_all()
        assert state(more) is PullState.READING
    pulls = [ask(world, healthy, decode, 200 + i) for i in range(2)]
    world.deliver_all()
    assert [state(pull) for pull in pulls] == [PullState.READING] * 2
    world.check()


def test_what_is_in_doubt_takes_no_room_again_when_its_rank_goes_on() -> None:
    world, (prefill,), decode = world_of(max_post_bytes=64, window_bytes=256, total_bytes=512)
    pull = ask(world, prefill, decode, 1)
    world.deliver_all()
    (peer,) = decode.core.decode.peers.by_place.values()
    doubted, *others = list(decode.reads)
    while not peer.line.is_set_aside:
        world.advance(0.25)
        world.deliver_all()
    world.tell(decode, TransferEnded(doubted, Ending.IN_DOUBT, "no disconnect"))
    assert reason(pull) is None, "it drains what else runs"
    world.complete(decode, others[0])
    assert not peer.line.is_set_aside
    in_flight = decode.core.decode.posting.in_flight
    assert (len(in_flight), in_flight.num_bytes) == (2, 128)
    world.check()


def test_what_left_the_queue_is_not_kept_there() -> None:
    """Ids of pulls that were cancelled while they waited, and tickets of flows that are gone, are swept up."""
    admission = Admission(1, 1)
    key: FlowKey = ((Address("tcp://a"), "start"),)
    for number in range(3000):
        name = PullId(f"{number}")
        admission.ask(key, name, 0, number)
        other: FlowKey = ((Address(f"tcp://{number}"), "start"),)
        admission.ask(other, PullId(f"other-{number}"), 0, number)
        if number:  # the first reads
            admission.leave(name)
            admission.leave(PullId(f"other-{number}"))
        else:
            assert admission.next() == name
            admission.ask(key, PullId("waits"), 0, number)
    (flow,) = [flow for flow in admission._flows.values() if flow.key == key]
    assert len(flow.order) <= 2 * flow.num[WAITING] + 65
    assert len(admission.turns) <= 2 * len(admission._flows) + 65


def test_who_has_its_bytes_from_a_silent_rank_and_reads_from_another_counts_as_before() -> None:
    """A rank that falls silent takes only those out of the budget that wait for it."""
    config = EngineConfig(
        engine_id="x",
        lease=LeaseConfig(lease_s=60.0, grant_s=20.0),
        pull=PullConfig(total_requests=1, window_requests=1, max_post_bytes=64),
    )
    world = World(config)
    first, second = (world.add(f"p{r}", make_layout(r, 2, base=(r + 1) << 40), engine_id="prefill") for r in (0, 1))
    other = world.add("q", make_layout(base=9 << 40), engine_id="other")
    decode = world.add("d", make_layout(base=30 << 40), engine_id="decode")
    params = world.params([first, second], "r", [3, 4, 5, 6], 16, written=True)
    for rank in (first, second):
        world.lend(rank, params)
    pull = world.pull(decode, "d-r", [1, 2, 3, 4], params)
    world.deliver_all()
    while posted_at(decode, "p0"):
        world.complete(decode, posted_at(decode, "p0")[0])
        world.deliver_all()
    assert [source.proven for source in pull.sources] == [True, False]
    del world.ranks["p0"]
    for _ in range(5):
        # The other one lives, and something arrives from it now and then.
        world.advance(decode.core.config.pull.suspect_s / 2)
        world.complete(decode, posted_at(decode, "p1")[0])
        world.deliver_all()
    states = {p.tp_rank: p.state for p in decode.core.decode.peers.by_place.values() if p.engine_id == "prefill"}
    assert states == {0: PeerState.SUSPECT, 1: PeerState.READY}
    assert pull.state is PullState.READING
    next_params = world.params([other], "r2", [3], 4, written=True)
    world.lend(other, next_params)
    waiting = world.pull(decode, "d-r2", [6], next_params)
    world.deliver_all()
    assert state(waiting) is PullState.QUEUED, "the only place is taken"
    while reason(pull) is None:
        world.complete(decode, posted_at(decode, "p1")[0])
        world.deliver_all()
    assert state(waiting) is PullState.READING


def test_a_pull_that_fails_while_others_of_its_reads_run_is_woken_when_it_has_drained_for_long() -> None:
    world, (prefill,), decode = world_of(max_post_bytes=64, drain_s=0.25)
    pull = ask(world, prefill, decode, 1)
    world.deliver_all()
    world.advance(1.0)  # until the next renewal the pull need not be woken
    world.tell(decode, TransferEnded(next(iter(decode.reads)), Ending.FAILED, "why"))
    assert (state(pull), pull.scheduled_at) == (PullState.DRAINING, 1.25)
