"""A request of which nothing is needed is released wherever it stands, and is not taken for a failure."""

from __future__ import annotations

import asyncio
import logging

import anyio
import pytest

from asynckv import EngineClosed, LeaseConfig, LocalProtocolError, PullCancelled, PullConfig
from asynckv.core.types import Outcome
from tests.engines import Bench, pass_by, passing, until
from tests.test_lifecycle import reading
from tests.world import World, make_layout, opened

STAGES = ["nothing", "announced", "greeted", "claimed", "parked"]
"""States that a request may have reached when it is discharged."""


@pytest.mark.parametrize("stage", STAGES)
async def test_a_discharge_frees_at_once_and_is_no_failure(
    bench: Bench, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynckv")
    times = 1 if bench.real else 2
    async with bench.pair() as (prefill, decode, group):
        params = group.make_params("r", [(0, [1, 3])], 32, written=stage != "parked")
        lent = None if stage == "parked" else prefill.engine.lend(params)
        if stage != "nothing":
            decode.engine.announce("d", params)
        if stage == "greeted":
            await until(lambda: decode.engine.statistics().counters.get("sent.hello"))
        elif stage == "claimed":
            await until(lambda: lent is not None and lent._lease.grants)
        elif stage == "parked":
            await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
        for _ in range(times):
            decode.engine.cancel("d", params)
        if stage == "parked":
            await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)
            lent = prefill.engine.lend(params)
        assert lent is not None
        with anyio.fail_after(10):
            end = await lent.wait_released()
        assert (end.cause, end.readers, end.owed) == ("released", {"decode/tp0": "complete"}, ())
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)
        counters = decode.engine.statistics().counters
        assert (counters["pulls.started"], counters["pulls.discharged"]) == (times, times)
        assert ("sent.hello" in counters) == (stage != "nothing")
        assert (decode.engine.requests(), decode.engine.holds()) == ((), ())
        assert not decode.engine.cancel("d"), "without params there is nothing to give up"
    said = [record.getMessage() for record in caplog.records]
    assert any("pull_ended" in text and "cause=discharged" in text for text in said)
    warned = [text for text, record in zip(said, caplog.records, strict=True) if record.levelno > logging.INFO]
    assert [text for text in warned if "loop_was_away" not in text] == []


async def test_after_its_discharge_a_request_is_used_up(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        params, other = (group.make_params(name, [(0, [1])], 16, written=True) for name in ("r", "s"))
        prefill.engine.lend(params)
        decode.engine.cancel("d", params)
        lent = prefill.engine.lend(other)
        # The id is free at once; and what is over may be discharged as well.
        await decode.engine.pull("d", [(0, [4])], other)
        assert decode.blocks([4]) == prefill.blocks([1])
        decode.engine.cancel("d", other)
        with anyio.fail_after(10):
            assert (await lent.wait_released()).readers == {"decode/tp0": "complete"}
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)


async def test_an_attempt_that_was_not_the_last_is_followed_by_a_discharge(sim: Bench) -> None:
    async with reading(sim, is_last=False) as (_, decode, lent, task, params):
        decode.data.fail(next(iter(decode.data.running)))
        with pytest.raises(Exception, match="a transfer from"):
            await task
        await pass_by(sim, 0.3)
        assert not lent.is_over
        decode.engine.cancel("d", params)
        assert (await lent.wait_released()).readers == {"decode/tp0": "complete"}


@pytest.mark.parametrize("is_retried", [False, True])
async def test_what_is_pulled_or_retried_is_cancelled_with_params_as_well(sim: Bench, is_retried: bool) -> None:
    async with reading(sim, retries=3) as (_, decode, _, task, params):
        if is_retried:
            decode.data.fail(next(iter(decode.data.running)))
            await until(lambda: decode.engine.statistics().gauges["pulls_waiting"] == 0)
        assert decode.engine.cancel("d", params)
        if not is_retried:
            decode.data.fail(next(iter(decode.data.running)))
        with pytest.raises(PullCancelled):
            await passing(sim, task)


async def test_other_params_than_were_announced_are_refused(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, other = (group.make_params(name, [(0, [1])], 16) for name in ("r", "s"))
        decode.engine.announce("d", params)
        for given, cohort_id in ((other, ""), (params, "sibling")):
            with pytest.raises(LocalProtocolError, match="announced with other params or another cohort_id"):
                decode.engine.cancel("d", given, cohort_id=cohort_id)
        decode.engine.cancel("d", params)
        lent = prefill.engine.lend(params)
        await pass_by(sim, 0.5)
        assert lent.is_over


async def test_a_draining_engine_discharges_and_a_sleeping_one_cannot(bench: Bench) -> None:
    async with bench.pair(lease=LeaseConfig(lease_s=2.0, grant_s=1.0)) as (prefill, decode, group):
        first, second = (group.make_params(name, [(0, [1])], 16, written=True) for name in ("r", "s"))
        lent = [prefill.engine.lend(first), prefill.engine.lend(second)]
        decode.engine.announce("d", first)
        draining = asyncio.create_task(decode.engine.drain(5.0))
        await until(lambda: bool(decode.engine._driver.core.prefill.closed_as))
        decode.engine.cancel("d", first)
        decode.engine.cancel("never announced", second)
        assert await passing(bench, draining) == ()
        assert [(await each.wait_released()).cause for each in lent] == ["released", "released"]
        await passing(bench, asyncio.create_task(decode.engine.suspend()))
        with pytest.raises(EngineClosed, match="suspended"):
            decode.engine.cancel("d", first)
        await passing(bench, asyncio.create_task(decode.engine.aclose()))
        with pytest.raises(EngineClosed, match="closed"):
            decode.engine.cancel("d", first)


@pytest.mark.parametrize("is_announced", [True, False])
async def test_an_unreachable_rank_is_given_up_and_nothing_is_left(sim: Bench, is_announced: bool) -> None:
    pull = PullConfig(release_timeout_s=5.0, handshake_s=2.0)
    async with sim.pair(pull=pull, lease=LeaseConfig(lease_s=4.0, grant_s=1.0)) as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True, lease_s=4.0)
        honest, sim.network.fate = sim.network.fate, lambda *_: "drop"
        if is_announced:
            decode.engine.announce("d", params)
        decode.engine.cancel("d", params)
        decode.engine.cancel("d", params)
        assert decode.engine.requests()
        await pass_by(sim, 6.0)
        assert (decode.engine.requests(), decode.engine.statistics().gauges["pulls"]) == ((), 0)
        # The prefill side heard nothing, and goes by its own clock.
        assert (await lent.wait_released()).cause == "expired"
        sim.network.fate = honest


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (4, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("is_ahead", [True, False])
def test_every_rank_hears_of_a_discharge_the_unread_ones_as_well(prefill: int, decode: int, is_ahead: bool) -> None:
    """One head that every prefill rank holds: all but one of them are skipped by each reader."""
    world = World()
    owners = [world.add(f"p{i}", make_layout(i, prefill, num_heads=1), engine_id="prefill") for i in range(prefill)]
    readers = [world.add(f"d{i}", make_layout(i, decode, num_heads=1), engine_id="decode") for i in range(decode)]
    params = world.params(owners, "r", [1, 2], 8, written=not is_ahead)
    leases = [] if is_ahead else [world.lend(owner, params) for owner in owners]
    for number, reader in enumerate(readers):
        if number % 2:  # siblings of one cohort need not do the same before
            world.announce(reader, "d", params, 60.0)
            world.deliver_all()
        assert not any(lease.is_over for lease in leases) or number
        world.discharge(reader, "d", params)
        world.deliver_all()
    leases = leases or [world.lend(owner, params) for owner in owners]
    assert [lease.state.value for lease in leases] == ["released"] * prefill
    assert {x.outcome for lease in leases for x in lease.discharged.values()} == {Outcome.COMPLETE}
    for rank in (*owners, *readers):
        assert rank.core.is_idle
        assert rank.inspect.check_integrity() == []


def test_an_early_discharge_is_remembered_for_all_of_its_time() -> None:
    """The claim before it was parked long ago: its place is about to be given up, the release's is not."""
    world, owner, reader = opened()
    params = world.params([owner], "r", [1], 4)
    world.announce(reader, "d", params, 60.0)
    world.deliver_all()
    assert owner.core.prefill.parking.num_parked == 1
    world.now = owner.core.config.lease.parked_s - 1.0
    world.discharge(reader, "d", params)
    world.deliver_all()
    world.now += 5.0
    owner.core.tick(world.time(owner))
    assert owner.core.prefill.parking.num_parked == 1
    assert world.lend(owner, params).state.value == "released"
    assert owner.core.prefill.parking.num_parked == 0


def test_what_was_discharged_early_and_never_lent_is_forgotten() -> None:
    world, owner, reader = opened()
    params = world.params([owner], "r", [1], 4)
    world.announce(reader, "d", params, 60.0)
    world.deliver_all()
    world.now = 10.0
    world.discharge(reader, "d", params)
    world.deliver_all()
    world.now += owner.core.config.lease.parked_s
    owner.core.tick(world.time(owner))
    assert owner.core.prefill.parking.num_parked == 0
    assert owner.core.next_at > world.now + 1.0
