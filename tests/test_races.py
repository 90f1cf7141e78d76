"""Calls that meet at awkward moments: cancel, close, drain and sleep between and beside attempts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from asynckv import (
    AsyncKVError,
    BackendError,
    LocalProtocolError,
    PlanRefused,
    PrefillRanks,
    PullCancelled,
    PullError,
    ReadFailed,
)
from asynckv.config import PullConfig
from asynckv.core import decode as decode_module
from asynckv.core.attempts import Request, RequestState
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.peer import PeerState
from asynckv.core.pull import PullRequest, PullState
from asynckv.core.types import Reason, ReplyTo, decode_params
from asynckv.core.wire import Claim, Goodbye, Release, decode_packet, encode_packet
from asynckv.geometry.plan import Plan
from tests.engines import Bench, Side, cancel, pass_by, passing, turn_loop
from tests.test_admission import ask, world_of
from tests.test_lifecycle import QUICK, reading, running
from tests.world import begin, reason


def fail(side: Side) -> None:
    side.data.fail(next(iter(side.data.running)))


async def test_a_drain_names_what_waits_for_another_attempt(sim: Bench) -> None:
    async with reading(sim, retries=3, timeout_s=30.0) as (_, decode, _, task, _):
        fail(decode)
        await pass_by(sim, 0.05)  # half of the pause
        left = await passing(sim, asyncio.create_task(decode.engine.drain(0.0)))
        (straggler,) = [hold for hold in left if hold.reason == "retrying"]
        assert (straggler.request_id, straggler.blocks) == ("d", {0: (6,)})
        await cancel(task)


async def test_closing_ends_the_drain_of_a_suspension(sim: Bench) -> None:
    async with reading(sim, timeout_s=3000.0) as (_, decode, _, task, _):
        suspending = asyncio.create_task(decode.engine.suspend(3600.0))
        await pass_by(sim, 0.5)
        closing = asyncio.create_task(decode.engine.aclose())
        await pass_by(sim, 15.0)
        assert (closing.done(), suspending.done()) == (True, True)
        with pytest.raises(PullCancelled):
            await task


async def test_closing_ends_a_drain(sim: Bench) -> None:
    async with reading(sim, timeout_s=3000.0) as (_, decode, _, task, _):
        decode.data.doubt(next(iter(decode.data.running)))
        await pass_by(sim, 6.0)
        draining = asyncio.create_task(decode.engine.drain(3600.0))
        await pass_by(sim, 0.5)
        await passing(sim, asyncio.create_task(decode.engine.aclose()))
        await pass_by(sim, 0.5)
        assert draining.done()
        with pytest.raises(ReadFailed):
            await task


async def test_a_failed_awakening_leaves_the_endpoint_as_it_was(sim: Bench) -> None:
    async with sim.pair() as (prefill, _, _):
        await passing(sim, asyncio.create_task(prefill.engine.suspend()))
        before, start = prefill.engine.endpoint, prefill.data.start

        async def refuse(memories: Any, on_ready: Any) -> None:
            await start(memories, on_ready)
            raise BackendError("no such memory")

        prefill.data.start = refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(BackendError):
            await prefill.engine.resume()
        assert prefill.engine.endpoint == before
        prefill.data.start = start  # type: ignore[method-assign]
        await prefill.engine.resume()
        assert prefill.engine.endpoint != before


@pytest.mark.parametrize("priority", [None, "urgent", float("nan"), 0.5, True, 1 << 60])
async def test_a_priority_that_is_none_is_refused_and_harms_no_other(sim: Bench, priority: Any) -> None:
    async with reading(sim) as (_, decode, _, task, params):
        with pytest.raises(LocalProtocolError, match="priority is"):
            await decode.engine.pull("x", [(0, [7])], params, priority=priority)
        decode.data.finish()
        await passing(sim, task)


async def test_a_pull_that_does_not_wait_long_closes_at_once(sim: Bench) -> None:
    """A peer that cannot be reached owes nothing but an acknowledgement."""
    async with sim.pair(lease=QUICK, pull=PullConfig(handshake_s=1.0)) as (_, decode, group):
        sim.network.fate = lambda sender, to, packet: "drop"
        params = group.make_params("r", [(0, [1])], 16, written=True)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params))
        with pytest.raises(PullError):
            await passing(sim, task)
        begun = sim.clock.now()
        await passing(sim, asyncio.create_task(decode.engine.aclose()))
        assert sim.clock.now() - begun <= 1.1
        sim.network.fate = lambda sender, to, packet: "deliver"


def overheard(sim: Bench, *kinds: type) -> list[tuple[str, str, list[str]]]:
    """Note of every packet from here on who said what to whom, of these kinds."""
    heard: list[tuple[str, str, list[str]]] = []

    def fate(sender: str, to: str, packet: bytes) -> Any:
        said = [type(m).__name__ for m in decode_packet(packet).messages if isinstance(m, kinds)]
        heard.extend([(sender, to, said)] if said else [])
        return "deliver"

    sim.network.fate = fate
    return heard


async def test_a_claim_leaves_before_the_read_that_it_goes_beside(sim: Bench) -> None:
    """Posting may take long, and the promise that covers a read is under way meanwhile."""
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        heard, honest = overheard(sim, Claim), decode.data.post_read

        def post_read(*args: Any) -> Any:
            heard.append(("", "", ["a read"]))
            return honest(*args)

        decode.data.post_read = post_read  # type: ignore[assignment, method-assign]
        for number in range(2):
            params, _ = prefill.lent(group, f"r{number}", [number], written=True)
            await decode.engine.pull(f"d{number}", [(0, [6])], params)
        assert [said for _, _, said in heard] == [["Claim"], ["a read"]] * 2


async def test_a_release_goes_in_one_packet_with_what_its_caller_asks_for_next(sim: Bench) -> None:
    """Nobody waits for it, and packets are what a small pull costs most."""
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        heard = overheard(sim, Claim, Release)
        for number in range(3):
            params, _ = prefill.lent(group, f"r{number}", [number], written=True)
            await decode.engine.pull(f"d{number}", [(0, [6])], params)
        await pass_by(sim, 0.2)
        assert [said for _, _, said in heard] == [["Claim"], ["Release", "Claim"], ["Release", "Claim"], ["Release"]]


async def test_a_closing_engine_says_goodbye_to_all_its_readers_once_it_has_kept_its_promises(sim: Bench) -> None:
    """Then they need not wait out its silence; and not before, for whoever hears it believes no promise any more."""
    async with reading(sim) as (prefill, decode, lent, task, _):
        second = sim.side("second", 7, lease=QUICK)
        async with second.engine:
            group = PrefillRanks("prefill", [prefill.engine.endpoint])
            params, _ = prefill.lent(group, "other", [2], written=True)
            await second.engine.pull("d2", [(0, [6])], params)
            heard = overheard(sim, Goodbye)
            closing = asyncio.create_task(prefill.engine.aclose())
            await pass_by(sim, 0.3)
            assert (heard, lent.is_over) == ([], False)
            decode.data.finish()
            await passing(sim, task)
            await passing(sim, closing)
            assert lent.is_over
            here = prefill.engine.endpoint.address
            readers = sorted([decode.engine.endpoint.address, second.engine.endpoint.address])
            assert sorted(heard) == [(here, reader, ["Goodbye"]) for reader in readers]
            await passing(sim, asyncio.create_task(second.engine.aclose()))


async def test_a_reader_that_closes_says_goodbye_too_and_a_stranger_is_not_counted(sim: Bench) -> None:
    """So no alert takes a decode engine that is restarted in order for one that was killed."""
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        await decode.engine.pull("d", [(0, [6])], params)
        prefill.engine._driver.core.receive(
            ReplyTo(b"stranger"), encode_packet("stranger", "", [Goodbye()]), sim.clock.now()
        )
        assert prefill.engine.statistics().counters.get("readers.left", 0) == 0
        heard = overheard(sim, Goodbye)
        await passing(sim, asyncio.create_task(decode.engine.aclose()))
        await pass_by(sim, 0.1)
        assert [(to, said) for _, to, said in heard] == [(prefill.engine.endpoint.address, ["Goodbye"])]
        assert prefill.engine.statistics().counters["readers.left"] == 1


def test_what_waits_for_its_handshake_or_to_be_lent_counts_as_waiting() -> None:
    for lend in (True, False):
        world, (prefill,), decode = world_of(total_requests=1, window_requests=1, max_queued=2)
        for i in range(2):
            ask(world, prefill, decode, i, lend=lend)
        with pytest.raises(AsyncKVError, match="2 pulls wait already"):
            ask(world, prefill, decode, 2, lend=lend)
        world.check()


def test_a_peer_that_answers_but_sends_nothing_takes_no_room_from_others() -> None:
    world, (*stalled, healthy), decode = world_of(3, total_requests=8, window_requests=4)
    for k, prefill in enumerate(stalled):
        for i in range(4):
            ask(world, prefill, decode, k * 10 + i)
    world.deliver_all()
    pull = ask(world, healthy, decode, 200)
    world.deliver_all()
    assert decode.core.decode.admission.waits(pull.pull_id)
    world.live(2.0, 0.25)
    assert pull.state is PullState.READING
    world.complete(decode, next(t for t, r in decode.reads.items() if r.agent_name == "agent-p2"))
    world.deliver_all()
    assert reason(pull) is Reason.COMPLETE
    world.check()


def test_what_is_posted_to_a_peer_that_sends_nothing_takes_no_room_from_others_either() -> None:
    """A doubt makes room in that peer's own window, so reads of its other requests are still posted."""
    world, (stalled, healthy), decode = world_of(2, max_post_bytes=64, window_bytes=256, total_bytes=256)
    for i in range(4):
        ask(world, stalled, decode, i)
    world.deliver_all()
    (peer,) = decode.core.decode.peers.by_place.values()
    while not peer.line.is_set_aside:
        world.advance(0.25)
        world.deliver_all()
    num_posted, in_flight = len(decode.posts), decode.core.decode.posting.in_flight
    assert in_flight.num_bytes == 0
    for transfer_id in list(decode.reads):
        world.tell(decode, TransferEnded(transfer_id, Ending.IN_DOUBT, "no disconnect"))
    assert peer.line.is_set_aside
    assert len(decode.posts) > num_posted
    assert (in_flight.num_bytes, in_flight.num_descriptors) == (0, 0)
    pull = ask(world, healthy, decode, 200)
    world.deliver_all()
    assert in_flight.num_bytes == 256
    while reason(pull) is None:
        world.complete(decode, next(t for t, r in decode.reads.items() if r.agent_name == "agent-p1"))
        world.deliver_all()
    assert reason(pull) is Reason.COMPLETE
    world.check()


@pytest.mark.parametrize("has_owed", [True, False])
def test_a_peer_that_is_idle_is_not_taken_for_one_that_sends_nothing(has_owed: bool) -> None:
    world, (prefill,), decode = world_of()
    ask(world, prefill, decode, 0)
    world.run()
    if has_owed:  # its read has ended, and it waits to be lent
        ask(world, prefill, decode, 1, lend=False, timeout=60.0)
        world.run()
    world.live(10.0, 0.25)
    ask(world, prefill, decode, 2)
    world.deliver_all()
    world.advance(0.3)
    world.deliver_all()
    assert decode.core.outbox.counters["peers.set_aside"] == 0
    world.live(2.0, 0.25)
    assert decode.core.outbox.counters["peers.set_aside"] == 1


@pytest.mark.parametrize("ending", [Ending.IN_DOUBT, Ending.FAILED])
def test_a_transfer_that_brings_nothing_is_no_sign_that_a_peer_moves(ending: Ending) -> None:
    """Nothing arrives from it, whatever becomes of its transfers one by one."""
    world, (prefill,), decode = world_of(total_requests=8, window_requests=8)
    for i in range(8):
        ask(world, prefill, decode, i)
    world.deliver_all()
    (peer,) = decode.core.decode.peers.by_place.values()
    for turn in range(8):
        assert not peer.line.is_set_aside or turn >= 4
        world.deliver_all()
        world.advance(0.25)
        if turn % 2:  # never as long as `suspect_s` without an end
            first = next(iter(decode.reads))
            world.tell(decode, TransferEnded(first, ending, "no disconnect"))
            decode.reads.pop(first, None)
    assert (peer.state, peer.line.is_set_aside) == (PeerState.READY, True)
    world.complete(decode, next(iter(decode.reads)))
    assert not peer.line.is_set_aside


def test_after_a_silence_there_is_no_more_room_than_before() -> None:
    world, (first, second), decode = world_of(2, total_requests=4, window_requests=4, total_bytes=256, window_bytes=256)
    for i in range(8):
        ask(world, first, decode, i)
    world.deliver_all()
    world.live(1.5, 0.25, is_heard=False)
    world.live(1.0, 0.25)
    others = [ask(world, second, decode, 100 + i) for i in range(4)]
    world.deliver_all()
    assert {p.state for p in others} == {PullState.QUEUED}
    assert decode.core.decode.posting.in_flight.num_bytes > 0
    world.run()
    assert {p.reason for p in others} == {Reason.COMPLETE}
    world.check()


@pytest.mark.parametrize("where", [(decode_module, "plan_read"), (Plan, "posts")], ids=["plan", "posts"])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_bug_while_a_pull_is_planned_fails_it_at_once_and_leaves_nothing_behind(
    sim: Bench, monkeypatch: pytest.MonkeyPatch, waits: bool, where: tuple[Any, str]
) -> None:
    """Whether it has room at once, or waits for its turn."""
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        first, _ = prefill.lent(group, "first", [2], written=True)
        await decode.engine.pull("first", [(0, [7])], first)
        params, lent = prefill.lent(group, "r", [1], written=True)

        def plan(*_: Any) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(*where, plan)
            if waits:
                patch.setattr(decode.engine._driver.core.decode.admission, "enter", lambda key, pull_id: False)
            with pytest.raises(PlanRefused, match="a bug"):
                await decode.engine.pull("d", [(0, [6])], params)
        assert (decode.engine.holds(), decode.engine.statistics().counters["internal_errors"]) == ((), 1)
        await pass_by(sim, 0.5)
        assert (running(decode), lent.is_over) == (0, True)


MAY_BE_READ_YET = {Reason.UNREACHABLE, Reason.PEER_LOST, Reason.READ_FAILED, Reason.LEASE_LOST}
"""Whoever has lent the request may lend it still: the same params, another connection."""


@pytest.mark.parametrize("reason", [each for each in Reason if each is not Reason.COMPLETE])
def test_what_is_tried_again_may_do_better_then(reason: Reason) -> None:
    """Never where the answer would be the same."""
    world, (prefill,), decode = world_of()
    pull = ask(world, prefill, decode, 0)
    request = Request(PullRequest("d0", [(0, [0])], pull.params), 1, 0.1, 50.0, 0.0)
    pull.retryable = request.retryable
    decode.core.decode.fail(pull, reason, "because", world.time(decode))
    request.pull = pull
    request.ended(world.time(decode))
    assert (request.state is RequestState.PAUSING) is (reason in MAY_BE_READ_YET)


@pytest.mark.parametrize("not_before", [0.0, 3.0, 60.0])
def test_an_attempt_begins_when_its_rank_may_be_met_again_or_not_at_all(not_before: float) -> None:
    """Sooner it would fail for the same cause; and later than the deadline nobody waits for it."""
    world, (prefill,), decode = world_of()
    pull = ask(world, prefill, decode, 0)
    request = Request(PullRequest("d0", [(0, [0])], pull.params), 1, 0.1, 50.0, 0.0)
    pull.retryable = request.retryable
    pull.could_not_meet(not_before)
    decode.core.decode.fail(pull, Reason.UNREACHABLE, "no answer", world.time(decode))
    request.pull = pull
    request.ended(1.0)
    begins = max(1.1, not_before)
    assert request.next_at == begins
    assert request.state is (RequestState.PAUSING if begins < 50.0 else RequestState.OVER)


def test_there_are_as_many_attempts_as_were_asked_for_and_pauses_between_them_have_a_bound() -> None:
    world, (prefill,), decode = world_of()
    request = Request(PullRequest("d0", [(0, [0])], ask(world, prefill, decode, 0).params), 8, 0.1, 1e6, 0.0)
    pauses = []
    while request.state is not RequestState.OVER:
        pull = ask(world, prefill, decode, request.attempts)
        pull.retryable = request.retryable
        decode.core.decode.fail(pull, Reason.READ_FAILED, "broken", world.time(decode))
        request.pull = pull
        request.ended(0.0)
        if request.state is RequestState.PAUSING:
            pauses.append(request.next_at)
            request.time(request.next_at)
            assert request.attempts == len(pauses) + 1
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
    assert request.attempts == 9


async def test_a_drain_waits_for_another_attempt(sim: Bench) -> None:
    async with reading(sim, retries=2, timeout_s=20.0) as (_, decode, _, task, _):
        fail(decode)
        draining = asyncio.create_task(decode.engine.drain(10.0))
        while not running(decode):
            await pass_by(sim, 0.05)
        assert not draining.done()
        decode.data.finish()
        await passing(sim, task)
        assert await passing(sim, draining) == ()


async def test_links_to_old_peers_end_with_a_sleep(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        await passing(sim, asyncio.create_task(decode.engine.pull("d", [(0, [6])], params)))
        await passing(sim, asyncio.create_task(decode.engine.suspend()))
        await decode.engine.resume()
        assert decode.engine.statistics().counters["control.links"] == 0


def test_an_announced_pull_has_the_priority_that_it_is_asked_with() -> None:
    world, (prefill,), decode = world_of(total_requests=1, window_requests=1)
    for i in range(3):
        ask(world, prefill, decode, i)
        world.deliver_all()
    params, _ = world.lent(prefill, "r9", [9], written=True)
    world.announce(decode, "d9", params, 30.0)
    world.deliver_all()
    begin(decode.core, PullRequest("d9", [(0, [9])], params, priority=-1), 30.0, world.time(decode))
    world.settle(decode)
    world.run()
    assert [p.request_id for p in decode.ended] == ["d0", "d9", "d1", "d2"]


def test_a_reader_that_greets_a_draining_engine_is_told_so() -> None:
    world, (prefill,), decode = world_of()
    params, _ = world.lent(prefill, "r", [3], written=True)
    prefill.core.shut()
    world.settle(prefill)
    pull = world.pull(decode, "d", [3], params)
    world.run()
    assert pull.reason is Reason.COMPLETE
    assert [peer.is_draining for peer in decode.core.decode.peers.by_place.values()] == [True]


def test_memory_epochs_are_kept_by_ranks_that_were_not_there() -> None:
    world, (prefill,), decode = world_of()
    old = world.params([prefill], "old", [3], 4, written=True)
    endpoints = [prefill.endpoint]
    fresh = PrefillRanks("prefill0", endpoints, memory_epoch=2).make_params("new", [(0, [4])], 4, written=True)
    world.lend(prefill, decode_params(fresh))
    assert prefill.core.prefill.memory_epoch == 2
    with pytest.raises(LocalProtocolError, match="registered anew"):
        world.lend(prefill, old)
    pull = world.pull(decode, "d", [3], old)
    world.run()
    assert pull.reason is Reason.STALE_MEMORY


async def test_any_order_of_calls_ends_and_leaves_nothing() -> None:
    for seed in range(40):
        await storm(random.Random(seed))


async def storm(rng: random.Random) -> None:
    sim = Bench(False)
    few = PullConfig(retries=2, timeout_s=3.0, total_requests=2, window_requests=2)
    prefill, decode = sim.side("prefill", 1, lease=QUICK), sim.side("decode", 100, lease=QUICK, pull=few)
    sides = [prefill, decode]
    for side in sides:
        await side.engine.start()
    decode.data.deferred = rng.random() < 0.5
    pulls: list[asyncio.Task[Any]] = []
    calls: list[asyncio.Task[Any]] = []
    for _ in range(60):
        engine, data = rng.choice(sides).engine, decode.data
        with contextlib.suppress(AsyncKVError):
            match rng.choices(
                ["pull", "suspend", "resume", "drain", "finish", "fail", "task", "call", "cancel"],
                [40, 10, 10, 2, 5, 5, 5, 5, 5],
            )[0]:
                case "pull":
                    epoch, n = prefill.engine.memory_epoch, len(pulls)
                    group = PrefillRanks("prefill", [prefill.engine.endpoint], memory_epoch=epoch, lease=QUICK)
                    params, _ = prefill.lent(group, f"r{n}", [n % 32], written=True)
                    pulls.append(asyncio.create_task(decode.engine.pull(f"d{n}", [(0, [n % 32])], params)))
                case "suspend":
                    calls.append(asyncio.create_task(engine.suspend(rng.choice([0.0, 0.1, 0.5]))))
                case "resume":
                    await engine.resume()
                case "drain":
                    calls.append(asyncio.create_task(engine.drain(0.1)))
                case "finish" if data.running:
                    data.finish(rng.choice(list(data.running)))
                case "fail" if data.running:
                    data.fail(rng.choice(list(data.running)), peer_lost=rng.random() < 0.5)
                case "task" if pulls:
                    rng.choice(pulls).cancel()
                case "call" if calls:
                    rng.choice(calls).cancel()
                case "cancel" if pulls:
                    decode.engine.cancel(f"d{rng.randrange(len(pulls))}")
                case _:
                    pass
        await turn_loop(rng.randint(0, 4))
        if rng.random() < 0.5:
            sim.clock.advance(rng.choice([0.01, 0.2, 1.0]))
        for side in sides:
            side.engine.check_integrity()
    tasks = pulls + calls + [asyncio.create_task(side.engine.aclose()) for side in sides]
    for _ in range(4000):
        if all(task.done() for task in tasks):
            break
        await asyncio.sleep(0)
        sim.clock.advance(0.02)
    assert all(task.done() for task in tasks)
    for task in tasks:
        assert task.cancelled() or isinstance(task.exception(), AsyncKVError | None)
    for side in sides:
        assert "internal_errors" not in side.engine.statistics().counters
        assert side.engine.holds() == () or side is prefill
