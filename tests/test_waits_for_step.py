"""Engines know for how long something has waited for a step of the engine around them; an idle one owes no step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from asynckv import EngineConfig, EngineDesk, EngineThread, LeaseConfig, Metrics
from asynckv.core.types import Reason
from asynckv.embed import Announce, Cancel, Lend, Pull
from asynckv.told import StepWait
from tests.engines import Bench, Side, memory, until
from tests.test_inspect import account
from tests.world import Rank, World, make_layout

LEASE_S = LeaseConfig().lease_s

LEASE = LeaseConfig(lease_s=30.0)


def waits(world: World, rank: Rank) -> dict[str, StepWait]:
    """Return what all three outputs read, after comparing it with the answer to a live question."""
    found = rank.inspect.waits_for_step(world.time(rank))
    assert account(world, rank).waits_for_step == found
    return found


def two() -> tuple[World, Rank, Rank]:
    world = World()
    return world, world.add("p", make_layout()), world.add("d", make_layout(base=1 << 41))


async def pass_s(sim: Bench, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        sim.clock.advance(0.5)
        await asyncio.sleep(0)


def shown(side: Side) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(Metrics(side.engine))
    samples = [x for family in registry.collect() for x in family.samples]
    return {x.labels["what"]: x.value for x in samples if x.name == "asynckv_waits_for_step_seconds"}


@pytest.mark.anyio
async def test_results_that_are_not_taken_are_logged_answered_and_shown(
    sim: Bench, events: list[dict[str, Any]]
) -> None:
    async with sim.pair(lease=LEASE) as (prefill, decode, group):
        desks = prefill_desk, desk = EngineDesk(prefill.engine), EngineDesk(decode.engine)
        params = group.make_params("r", [(0, [1])], 16, written=True)
        prefill_desk.submit([Lend(params)])
        desk.submit([Pull(request_id="d", groups=[(0, [6])], params=params)])
        await until(lambda: all(each.has_news for each in desks))
        told_at = sim.clock.now()
        await pass_s(sim, 40.0)
        waited_s = sim.clock.now() - told_at
        for side in (prefill, decode):
            wait = side.engine._driver.inspect.waits_for_step(sim.clock.now())
            assert list(wait) == ["result"]
            assert (wait["result"].number, abs(wait["result"].seconds - waited_s) < 0.01) == (1, True)
            assert shown(side) == {"result": wait["result"].seconds, "announcement": 0.0, "claim": 0.0}
        said = [e["waits_for_step"] for e in events if e["event"] == "engine_alive" and e.get("waits_for_step")]
        assert [x["result"]["number"] for x in said] == [1] * 4
        for each in desks:
            each.take_finished()
        so_far = len([*events])
        await pass_s(sim, 3600.0)
        idle = [e for e in [*events][so_far:] if e["event"] == "engine_alive"]
        assert (len(idle), [e for e in idle if e.get("waits_for_step")]) == (2 * 3600 // 15, []), "an hour of idling"
        assert shown(decode) == {"result": 0.0, "announcement": 0.0, "claim": 0.0}
        desk.submit([Cancel("d", {"nonsense": 1})])  # refused, and no scheduler waits for that
        await until(lambda: desk.has_news)
        await pass_s(sim, 5.0)
        assert decode.engine._driver.inspect.waits_for_step(sim.clock.now()) == {}


def test_announcements_wait_for_an_engine_that_makes_no_steps_also_when_they_were_let_go() -> None:
    world, prefill, decode = two()
    params = world.params([prefill], "r", [3], 4, written=True)
    world.lend(prefill, params)
    decode.core.decode.alive_at = world.time(decode)
    world.now += 2.0
    pull = decode.core.announce("d", params, "", 3600.0, world.time(decode))
    world.settle(decode)
    world.run()
    for seconds in range(1, 61):
        world.run(1.0)
        found = waits(world, decode)["announcement"]
        assert found.number == 1
        # Once the announcement was let go, the wait goes on: its engine still owes a pull or a cancellation.
        assert found.seconds == (seconds + 2.0 if pull.reason else seconds)
    assert pull.reason is Reason.STANDSTILL
    decode.core.decode.alive_at = world.time(decode)
    world.run(10.0)
    assert waits(world, decode) == {}


@pytest.mark.parametrize("alive", [True, False], ids=["makes steps", "runs this loop itself"])
def test_announcements_wait_for_no_step_of_an_engine_that_makes_steps_or_runs_this_loop(*, alive: bool) -> None:
    world, prefill, decode = two()
    params = world.params([prefill], "r", [3], 4, written=True)
    world.lend(prefill, params)
    decode.core.announce("d", params, "", 3600.0, world.time(decode))
    for _ in range(120):
        decode.core.decode.alive_at = world.time(decode) if alive else math.inf
        world.run(0.5)
        assert waits(world, decode) == {}


def test_a_claim_waits_for_a_lend_as_long_as_it_is_repeated() -> None:
    world, prefill, decode = two()
    params = [world.params([prefill], f"r{i}", [i + 1], 4) for i in range(3)]
    for i in range(2):
        world.pull(decode, f"d{i}", [i], params[i], timeout=600.0)
    world.run()
    assert waits(world, prefill) == {}, "so far it has only just come"
    for seconds in range(1, 100):  # a parked claim is dropped after 30 s, and the next one is parked anew
        world.run(1.0)
        found = waits(world, prefill).get("claim")
        if found is None:  # a long prompt takes as long
            assert seconds <= LEASE_S
        else:
            assert (found.number, abs(found.seconds - seconds) <= 0.5) == (2, True)
    world.lend(prefill, params[2])
    assert waits(world, prefill) == {}, "it lends others meanwhile"
    world.run(LEASE_S + 5.0)
    assert waits(world, prefill) == {"claim": StepWait(2, LEASE_S + 5.0)}
    for i in range(2):
        world.lend(prefill, params[i])
    world.run(60.0)
    assert waits(world, prefill) == {}


def test_a_claim_waits_for_no_step_of_an_engine_that_makes_steps() -> None:
    world, prefill, decode = two()
    world.pull(decode, "d", [1], world.params([prefill], "r", [1], 4), timeout=600.0)
    for _ in range(120):
        prefill.core.decode.alive_at = world.time(prefill)
        world.run(0.5)
        assert waits(world, prefill) == {}
    world.run(7.0)
    assert waits(world, prefill) == {"claim": StepWait(1, 7.5)}


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("listen", "is_asleep"),
    [
        (lambda thread: thread.take_finished(), False),
        (lambda thread: thread.wait(0.0), False),
        (EngineThread.fileno, True),
    ],
    ids=["take_finished", "wait", "fileno"],
)
def test_a_thread_that_waited_for_news_once_is_not_taken_for_asleep(
    listen: Callable[[EngineThread], object], *, is_asleep: bool
) -> None:
    """Only a thread that may watch the descriptor counts as alive without a call."""
    with EngineThread(EngineConfig(engine_id="e"), memory(1)[0]) as thread:
        listen(thread)
        thread.take_finished()
        assert math.isinf(thread.engine._driver.core.decode.alive_at) is is_asleep
        thread.submit([Announce("d", {"nonsense": 1})])  # refused, which is no news for a scheduler


def test_the_wait_is_one_value_that_old_readers_skip_and_new_ones_miss_in_old_answers() -> None:
    from asynckv.account.values import Account, decode_account, encode_account

    said = Account(engine_id="e", waits_for_step={"claim": StepWait(2, 7.0)})
    assert decode_account(encode_account(said)) == said
    old = msgspec.msgpack.encode({"engine_id": "e"})
    assert decode_account(old).waits_for_step == {}
