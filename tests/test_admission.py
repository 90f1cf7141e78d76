"""Budgets and the order of reads: a pull that waits loses nothing, and one that cannot read takes no room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv import ConfigError, Overloaded
from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.flow import READING, WAITING, Admission, FlowKey
from asynckv.core.peer import PeerState
from asynckv.core.pull import Pull, PullState
from asynckv.core.types import Address, PullId, Reason, TransferId
from tests.lab.oracles import wrong_in, wrong_in_admission
from tests.world import Rank, World, make_layout, reason

SMALL: dict[str, Any] = {"max_post_bytes": 64, "window_bytes": 256, "total_bytes": 512}


def world_of(prefills: int = 1, **pull: Any) -> tuple[World, list[Rank], Rank]:
    config = EngineConfig(engine_id="x", lease=LeaseConfig(lease_s=10.0, grant_s=3.0), pull=PullConfig(**pull))
    world = World(config)
    ranks = [
        world.add(f"p{i}", make_layout(base=(i + 1) << 40, num_blocks=512), engine_id=f"prefill{i}", seed=i)
        for i in range(prefills)
    ]
    return world, ranks, world.add("d", make_layout(base=1 << 60, num_blocks=512), engine_id="decode", seed=99)


def ask(
    world: World, prefill: Rank, decode: Rank, number: int, *, lend: bool = True, priority: int = 0, timeout: float = 30
) -> Pull:
    """One request of one block: prefill block `number` to decode block `number`."""
    params = world.params([prefill], f"r{number}", [number], 4, written=lend)
    if lend:
        world.lend(prefill, params)
    return world.pull(decode, f"d{number}", [number], params, timeout=timeout, priority=priority)


def asking(number: int, *, lend: bool = True, timeout: float = 30, **pull: Any) -> tuple[World, Rank, Rank, Pull]:
    """Return a world of two ranks and one request."""
    world, (prefill,), decode = world_of(**pull)
    return world, prefill, decode, ask(world, prefill, decode, number, lend=lend, timeout=timeout)


def reading(decode: Rank) -> list[str]:
    return [p.request_id for p in decode.core.decode.pulls.values() if p.state is PullState.READING]


def step(world: World, decode: Rank) -> None:
    """Let one read end."""
    world.deliver_all()
    world.complete(decode, next(iter(decode.reads)))
    world.deliver_all()


def test_hundreds_asked_at_once_complete_in_order_under_a_budget_for_four() -> None:
    world, (prefill,), decode = world_of(total_requests=4, window_requests=4)
    want = prefill.buffers.block(299)
    pulls = [ask(world, prefill, decode, i) for i in range(300)]
    world.deliver_all()
    while any(reason(p) is None for p in pulls):
        running = [p for p in pulls if p.state is PullState.READING]
        assert len(running) <= 4
        # What only waits costs no plan, and its claims keep its lease.
        assert all(source.plan is None for p in pulls if p.state is PullState.QUEUED for source in p.sources)
        step(world, decode)
        world.check()
    assert {p.reason for p in pulls} == {Reason.COMPLETE}
    assert [p.request_id for p in decode.ended] == [p.request_id for p in pulls]
    world.run()
    assert decode.buffers.block(299) == want
    assert (prefill.core.is_idle, decode.core.is_idle) == (True, True)
    assert decode.core.decode.admission.num[READING] == 0


def test_a_second_peer_with_one_request_waits_for_at_most_one_turn() -> None:
    world, (first, second), decode = world_of(2, total_requests=2, window_requests=2)
    many = [ask(world, first, decode, i) for i in range(50)]
    world.deliver_all()
    other = ask(world, second, decode, 100)
    world.deliver_all()
    ended = 0
    while reason(other) is None:
        step(world, decode)
        ended = sum(reason(p) is not None for p in many)
    assert ended <= 3  # two were in flight, one has the turn before


def test_the_urgent_overtake_and_equals_keep_their_order() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1)
    pulls = []
    for i, priority in enumerate([0, 5, 5, 0, -1, -1, 0]):
        pulls.append(ask(world, prefill, decode, i, priority=priority))
        world.deliver_all()
    while any(reason(p) is None for p in pulls):
        step(world, decode)
    assert [p.request_id for p in decode.ended] == ["d0", "d4", "d5", "d3", "d6", "d1", "d2"]


def test_an_urgent_pull_of_one_peer_goes_before_others_of_another() -> None:
    world, (first, second), decode = world_of(2, total_requests=1, window_requests=1)
    for i in range(10):
        ask(world, first, decode, i)
    world.deliver_all()
    ask(world, second, decode, 100, priority=-1)
    world.deliver_all()
    for _ in range(2):
        step(world, decode)
    assert [p.request_id for p in decode.ended] == ["d0", "d100"]


def test_cancelled_ones_leave_the_queue_at_once() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1)
    pulls = [ask(world, prefill, decode, i) for i in range(20)]
    world.deliver_all()
    for pull in pulls[1:19]:
        world.cancel(decode, pull)
    assert {p.reason for p in pulls[1:19]} == {Reason.CANCELLED}
    assert decode.core.decode.admission.num[WAITING] == 1
    assert len(decode.returned) == 18
    step(world, decode)
    step(world, decode)
    assert [p.reason for p in (pulls[0], pulls[19])] == [Reason.COMPLETE, Reason.COMPLETE]
    world.run()
    assert prefill.core.is_idle


def test_a_pull_larger_than_every_budget_still_runs_and_alone() -> None:
    # One block is 64 bytes and more than one descriptor: no post fits into these budgets.
    world, (prefill,), decode = world_of(
        max_post_bytes=64, window_bytes=8, total_bytes=8, window_descriptors=1, total_descriptors=1
    )
    params, _ = world.lent(prefill, "big", list(range(40)), written=True)
    pull = world.pull(decode, "d-big", list(range(40)), params)
    small = ask(world, prefill, decode, 100)
    world.deliver_all()
    posts = 0
    while reason(pull) is None or reason(small) is None:
        assert len(decode.reads) == 1
        posts += 1
        step(world, decode)
    assert posts >= 41
    assert (pull.reason, small.reason) == (Reason.COMPLETE, Reason.COMPLETE)
    world.check()


def test_what_waits_keeps_its_lease_for_longer_than_it_lasts() -> None:
    world, prefill, decode, first = asking(0, timeout=100, total_requests=1, window_requests=1, timeout_s=100.0)
    queued = ask(world, prefill, decode, 1, timeout=100)
    world.deliver_all()
    world.live(30.0)
    assert (first.state, queued.state) == (PullState.READING, PullState.QUEUED)
    step(world, decode)
    step(world, decode)
    assert (first.reason, queued.reason) == (Reason.COMPLETE, Reason.COMPLETE)


def test_a_deadline_in_the_queue_says_so() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1)
    ask(world, prefill, decode, 0)
    queued = ask(world, prefill, decode, 1, timeout=3)
    world.deliver_all()
    world.advance(3.1)
    assert queued.reason is Reason.TIMEOUT
    assert "still queued" in queued.detail


def test_requests_that_are_not_lent_yet_give_way_to_those_that_are() -> None:
    """Else no prefill rank would lend: it may need the blocks that wait behind them."""
    world, (prefill,), decode = world_of(total_requests=2, window_requests=2)
    want = prefill.buffers.block(204)
    early = [world.params([prefill], f"e{i}", [200 + i], 4) for i in range(5)]
    ahead = [world.pull(decode, f"ahead{i}", [200 + i], params) for i, params in enumerate(early)]
    world.deliver_all()
    ready = [ask(world, prefill, decode, i) for i in range(5)]
    for _ in range(40):
        world.deliver_all()
        world.complete_all()
    assert {p.reason for p in ready} == {Reason.COMPLETE}
    assert {reason(p) for p in ahead} == {None}
    assert decode.core.decode.admission.num[READING] == 0
    for params in early:
        world.lend(prefill, params)
    world.run()
    assert {p.reason for p in ahead} == {Reason.COMPLETE}
    assert decode.buffers.block(204) == want
    world.check()


def test_a_peer_that_has_fallen_silent_takes_no_room_from_others() -> None:
    world, (dead, alive), decode = world_of(2, total_requests=4, window_requests=4, **SMALL)
    stuck = [ask(world, dead, decode, i) for i in range(8)]
    world.deliver_all()
    assert len(reading(decode)) == 4
    del world.ranks["p0"]
    world.live(2.5, 0.25)
    healthy = [ask(world, alive, decode, 100 + i) for i in range(8)]
    world.deliver_all()
    stuck_reads = {t for t, r in decode.reads.items() if r.agent_name == "agent-p0"}
    while any(reason(p) is None for p in healthy):
        world.complete(decode, next(t for t in decode.reads if t not in stuck_reads))
        world.deliver_all()
    assert {p.reason for p in healthy} == {Reason.COMPLETE}
    assert {reason(p) for p in stuck} == {None}
    world.check()


def test_a_full_queue_refuses_at_once() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1, max_queued=2)
    params = [world.params([prefill], f"r{i}", [i], 4, written=True) for i in range(4)]
    asked = []
    for i in range(3):
        world.lend(prefill, params[i])
        asked.append(world.pull(decode, f"d{i}", [i], params[i]))
        world.deliver_all()
    with pytest.raises(Overloaded, match="2 pulls wait already") as caught:
        world.pull(decode, "d3", [3], params[3])
    assert (caught.value.reason, caught.value.held) == ("queue_full", {})
    assert decode.core.ledger.num_held("writing") == 3
    step(world, decode)
    world.lend(prefill, params[3])
    world.pull(decode, "d3", [3], params[3])
    world.run()
    assert [p.reason for p in decode.ended] == [Reason.COMPLETE] * 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"total_requests": 0}, "total_requests is 0"),
        ({"window_bytes": 0}, "window_bytes is 0"),
        ({"total_bytes": 1 << 20}, r"window_bytes 33554432 is above total_bytes 1048576.*raise total_bytes"),
        ({"window_requests": 2048}, "window_requests 2048 is above total_requests 1024"),
        ({"max_queued": -1}, "max_queued is -1"),
        ({"timeout_s": 1.0}, "timeout_s 1.0 is below 2 s, the shortest lease"),
        ({"retries": -1}, r"retries is -1; it must be an integer from 0"),
        ({"retry_s": 0.0}, "retry_s is 0.0"),
    ],
)
def test_budgets_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PullConfig(**config)


def ticket(number: int, priority: int) -> Any:
    return SimpleNamespace(pull_id=f"pull-{number}", priority=priority, arrival=number)


Step = tuple[str, int, int]


@settings(max_examples=200)
@given(
    total=st.integers(1, 4),
    window=st.integers(1, 4),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "next", "next", "leave", "set aside"]), st.integers(0, 40), st.integers(0, 3)
        ),
        max_size=120,
    ),
)
def test_any_order_of_calls_keeps_budgets_order_and_turns(total: int, window: int, steps: list[Step]) -> None:
    """Against a model that looks at everybody each time."""
    admission = Admission(total, window)
    waiting: list[tuple[int, Any]] = []
    flying: list[tuple[int, Any]] = []
    counted: set[str] = set()
    tickets: dict[str, Any] = {}
    passed: dict[int, dict[int, int]] = {}
    for number, (what, which, lane) in enumerate(steps):
        if what == "ask":
            pull = ticket(number, which % 3)
            admission.ask(((Address(f"lane{lane}"), "x"),), pull.pull_id, pull.priority, pull.arrival)
            tickets[pull.pull_id] = pull
            waiting.append((lane, pull))
        elif what == "next":
            room = {w for w in range(4) if sum(n == w for n, _ in flying) < window}
            could = [(n, p) for n, p in waiting if n in room] if len(counted) < total else []
            found_id = admission.next()
            if not could:
                assert found_id is None
                continue
            assert found_id is not None
            found = tickets[found_id]
            best = min(p.priority for _, p in could)
            chosen = next((n, p) for n, p in waiting if p is found)
            assert found.priority == best
            assert found is next(p for n, p in waiting if n == chosen[0] and p.priority == best), "first come"
            for other in {n for n, p in could if p.priority == best} - {chosen[0]}:
                count = passed.setdefault(other, {})
                count[chosen[0]] = count.get(chosen[0], 0) + 1
            passed[chosen[0]] = {}
            waiting.remove(chosen)
            flying.append(chosen)
            counted.add(found.pull_id)
            if best == 0 and {p.priority for _, p in waiting} <= {0}:
                assert all(n <= 2 for c in passed.values() for n in c.values()), "a lane was passed by again and again"
        elif (waiting or flying) and what == "leave":
            chosen = (waiting + flying)[which % len(waiting + flying)]
            admission.leave(chosen[1].pull_id)
            (waiting if chosen in waiting else flying).remove(chosen)
            counted.discard(chosen[1].pull_id)
        elif flying and what == "set aside":
            admission.count(flying[which % len(flying)][1].pull_id, False)
            counted.discard(flying[which % len(flying)][1].pull_id)
        queued, reading = {p.pull_id for _, p in waiting}, {p.pull_id for _, p in flying}
        assert wrong_in_admission(admission, queued, reading) == []
        assert (admission.num[WAITING], admission.num[READING]) == (len(waiting), len(flying))
        assert len(counted) <= total


def test_a_read_that_never_ends_takes_no_room_once_its_pull_has_failed() -> None:
    world, prefill, decode, pull = asking(1, max_post_bytes=64, window_bytes=64, drain_s=1.0)
    world.deliver_all()
    (stuck,) = decode.reads
    world.cancel(decode, pull)
    other = ask(world, prefill, decode, 2)
    world.deliver_all()
    assert list(decode.reads) == [stuck]
    world.advance(1.1)
    world.deliver_all()
    assert (reason(pull), len(decode.reads)) == (Reason.CANCELLED, 2)
    while other.reason is None:
        world.complete(decode, next(transfer for transfer in decode.reads if transfer != stuck))
        world.deliver_all()
    assert reason(other) is Reason.COMPLETE


# -- which pulls and messages take room from others ------------------------------------------------------------


def posted_at(decode: Rank, prefill: str) -> list[TransferId]:
    return [t for t, read in decode.reads.items() if read.agent_name == f"agent-{prefill}"]


def state(pull: Pull) -> PullState:
    """Read anew: mypy would remember what it was before."""
    return pull.state


def test_a_pull_that_hears_in_the_queue_that_its_request_is_not_lent_yet_makes_way_for_the_next() -> None:
    world, prefill, decode, first = asking(1, total_requests=1, window_requests=1)
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


def test_a_pull_whose_turn_comes_while_its_rank_is_silent_keeps_no_other_from_reading() -> None:
    world, (healthy, silent), decode = world_of(2, total_requests=1, window_requests=1, heartbeat_s=0.25)
    world.deliver_all()
    first = ask(world, healthy, decode, 1)
    waiting = ask(world, silent, decode, 2)
    world.deliver_all()
    assert [state(p) for p in (first, waiting)] == [PullState.READING, PullState.QUEUED]
    assert decode.core.decode.admission.waits(waiting.pull_id)
    del world.ranks["p1"]
    last = ask(world, healthy, decode, 3)
    world.live(2.0, 0.25)  # nothing is heard of the one, and much of the other
    peers = {p.engine_id: p.state for p in decode.core.decode.peers.by_place.values()}
    assert peers == {"prefill0": PeerState.READY, "prefill1": PeerState.SUSPECT}
    while reason(first) is None:
        world.complete(decode, posted_at(decode, "p0")[0])
        world.deliver_all()
    assert [state(p) for p in (waiting, last)] == [PullState.QUEUED, PullState.READING]
    assert decode.inspect.check_integrity() + wrong_in(decode.core.decode) == []


@pytest.mark.parametrize("when", ["it is set aside", "it is asked"])
def test_a_pull_from_a_rank_that_sends_nothing_takes_no_room_from_others(when: str) -> None:
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
    world, _, decode, pull = asking(1, max_post_bytes=64, window_bytes=256, total_bytes=512)
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


def test_a_pull_that_has_its_bytes_from_a_silent_rank_and_reads_from_another_counts_as_before() -> None:
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
    params, _ = world.lent_by([first, second], "r", [3, 4, 5, 6], written=True)
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
    next_params, _ = world.lent(other, "r2", [3], written=True)
    waiting = world.pull(decode, "d-r2", [6], next_params)
    world.deliver_all()
    assert state(waiting) is PullState.QUEUED, "the only place is taken"
    while reason(pull) is None:
        world.complete(decode, posted_at(decode, "p1")[0])
        world.deliver_all()
    assert state(waiting) is PullState.READING


def test_a_pull_that_fails_while_others_of_its_reads_run_is_woken_when_it_has_drained_for_long() -> None:
    world, _, decode, pull = asking(1, max_post_bytes=64, drain_s=0.25)
    world.deliver_all()
    world.advance(1.0)  # until the next renewal the pull need not be woken
    world.tell(decode, TransferEnded(next(iter(decode.reads)), Ending.FAILED, "why"))
    assert (state(pull), pull.scheduled_at) == (PullState.DRAINING, 1.25)
