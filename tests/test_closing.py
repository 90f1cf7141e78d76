"""Closing in less time than promises run: what is cut short is named, and no reader believes bytes because of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import pytest

from asynckv import LeaseConfig, LocalProtocolError, PeerLost, PeerUnreachable, PullConfig, PullError
from asynckv.core.lifecycle import LifeState
from tests.engines import BLOCKS, Bench, Side, pass_by, passing, until
from tests.test_lifecycle import reading, running


def closing(side: Side, timeout_s: float | None = None) -> asyncio.Task[Any]:
    return asyncio.create_task(side.engine.aclose(timeout_s))


async def test_a_promise_is_cut_short_named_and_its_reader_fails(sim: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async with reading(sim, timeout_s=3000.0) as (prefill, decode, lent, task, _):
        await until(lambda: lent._lease.grants)
        caplog.clear()
        begun = sim.clock.now()
        task_of_closing = closing(prefill, 0.5)
        await pass_by(sim, 0.4)
        # Told, but not betrayed: what was promised is read on.
        assert not task_of_closing.done()
        assert not task.done()
        (cut,) = await passing(sim, task_of_closing)
        assert sim.clock.now() - begun <= 0.6
        assert (cut.request_id, cut.reason, cut.blocks) == ("r", "ending", {0: (1,)})
        assert 0 < cut.left_s <= 2.0
        (said,) = [r.getMessage() for r in caplog.records if "engine_closed_with_stragglers" in r.getMessage()]
        assert "promises_cut_short=['r']" in said
        assert (await lent.wait_released()).cause == "closed"
        with pytest.raises(PeerLost, match="said goodbye") as caught:
            await passing(sim, task)
        # It lands all the same: it is not believed, and the blocks are held until then.
        assert caught.value.held == {0: (6,)}
        decode.data.finish()
        await caught.value.returned()
        assert await prefill.engine.aclose() == (cut,)


async def test_a_deadline_is_kept_while_planes_are_closed(sim: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(sim, timeout_s=1.0) as (_, decode, _, task, _):
        let_go = asyncio.Event()
        monkeypatch.setattr(decode.data, "quiesce", let_go.wait)  # as a posting thread inside NIXL
        begun, task_of_closing = sim.clock.now(), closing(decode, 0.1)
        with pytest.raises(PullError, match="cancelled"):
            await passing(sim, task)
        seconds, is_closed = sim.clock.now() - begun, task_of_closing.done()
        let_go.set()  # or a failure would wait for the engine's end
        assert (seconds < 1.1, is_closed) == (True, False)
        await passing(sim, task_of_closing)


async def test_what_ends_in_time_is_not_cut_short(sim: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asynckv")
    async with reading(sim) as (prefill, decode, lent, task, _):
        await until(lambda: lent._lease.grants)
        task_of_closing = closing(prefill, 2.0)
        await pass_by(sim, 0.2)
        decode.data.finish()
        assert (await passing(sim, task)).num_bytes
        assert await passing(sim, task_of_closing) == ()
        assert (await lent.wait_released()).cause == "revoked"
        assert not any("stragglers" in record.getMessage() for record in caplog.records)


async def test_without_a_time_every_promise_is_kept(sim: Bench) -> None:
    async with reading(sim, timeout_s=3000.0) as (prefill, _, lent, task, _):
        await until(lambda: lent._lease.grants)
        until_s = max(grant.until for grant in lent._lease.grants.values())
        assert await passing(sim, closing(prefill)) == ()
        assert sim.clock.now() >= until_s
        with pytest.raises(PullError):
            await passing(sim, task)


async def test_a_later_call_has_less_time_and_all_return_the_same(sim: Bench) -> None:
    async with reading(sim, timeout_s=3000.0) as (prefill, _, lent, task, _):
        await until(lambda: lent._lease.grants)
        calls = [closing(prefill), closing(prefill, 3000.0)]
        await pass_by(sim, 0.1)
        assert not any(call.done() for call in calls)
        begun = sim.clock.now()
        calls.append(closing(prefill, 0.0))
        found = [await passing(sim, call) for call in calls]
        assert sim.clock.now() - begun <= 0.6
        assert found[0] == found[1] == found[2]
        assert [cut.request_id for cut in found[0]] == ["r"]
        with pytest.raises(PullError):
            await passing(sim, task)


async def test_a_promise_that_is_longer_than_a_drain_is_kept_to_its_end(sim: Bench) -> None:
    times = {"lease": LeaseConfig(lease_s=20.0, grant_s=8.0), "pull": PullConfig(drain_s=0.5)}
    async with sim.pair(**times) as (prefill, decode, group):
        decode.data.deferred = True
        params, lent = prefill.lent(group, "r", [1], written=True)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params, timeout_s=3000.0))
        await until(lambda: lent._lease.grants)
        until_s = max(grant.until for grant in lent._lease.grants.values())
        assert await passing(sim, closing(prefill)) == ()
        assert sim.clock.now() >= until_s
        assert (await lent.wait_released()).cause == "revoked"
        decode.data.finish()
        with pytest.raises(PullError):
            await passing(sim, task)


async def test_who_closes_later_with_more_time_prolongs_nothing(sim: Bench) -> None:
    async with reading(sim, timeout_s=3000.0) as (prefill, _, lent, task, _):
        await until(lambda: lent._lease.grants)
        begun, calls = sim.clock.now(), [closing(prefill, 0.5)]
        await pass_by(sim, 0.1)
        calls += [closing(prefill, 3000.0), closing(prefill)]
        for call in calls:
            assert [cut.request_id for cut in await passing(sim, call)] == ["r"]
        assert sim.clock.now() - begun <= 0.7
        with pytest.raises(PullError):
            await passing(sim, task)


async def test_a_suspension_under_way_is_cut_short_with_the_engine(sim: Bench) -> None:
    async with reading(sim, timeout_s=3000.0) as (prefill, _, lent, task, _):
        await until(lambda: lent._lease.grants)
        suspending = asyncio.create_task(prefill.engine.suspend(3600.0))
        await pass_by(sim, 0.1)
        begun = sim.clock.now()
        assert [cut.request_id for cut in await passing(sim, closing(prefill, 0.2))] == ["r"]
        assert sim.clock.now() - begun <= 0.6
        assert [cut.request_id for cut in await passing(sim, suspending)] == ["r"]
        with pytest.raises(PullError):
            await passing(sim, task)


async def test_a_close_that_was_cancelled_can_be_made_again(sim: Bench) -> None:
    """A loop that ends cancels all of its tasks."""
    async with reading(sim, timeout_s=3000.0) as (_, decode, _, task, _):
        call = closing(decode)
        await until(lambda: decode.engine._ending.is_closing)
        assert decode.engine._ending._closing is not None
        decode.engine._ending._closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await passing(sim, call)
        await passing(sim, closing(decode, 0.3))
        assert decode.engine._life.state is LifeState.CLOSED
        with pytest.raises(Exception, match=r"cancelled|closed"):
            await passing(sim, task)


async def test_a_read_of_ones_own_is_cut_short_with_the_agent(sim: Bench) -> None:
    """Only when the agent is gone are the blocks the caller's: nothing can write them any more."""
    async with reading(sim, timeout_s=3000.0) as (prefill, decode, _, task, _):
        begun = sim.clock.now()
        (cut,) = await passing(sim, closing(decode, 0.3))
        assert sim.clock.now() - begun <= 0.6
        assert (cut.request_id, cut.reason, cut.blocks) == ("d", "draining", {0: (6,)})
        assert running(decode) == 0
        with pytest.raises(Exception, match=r"cancelled|closed"):
            await passing(sim, task)
        assert decode.engine._life.state is LifeState.CLOSED
        await pass_by(sim, 0.1)
        assert not prefill.engine._life.is_shut


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), "2", True])
async def test_absurd_times_are_refused(sim: Bench, timeout_s: Any) -> None:
    async with sim.pair() as (prefill, _, _):
        with pytest.raises(LocalProtocolError, match="timeout_s"):
            await prefill.engine.aclose(timeout_s)
        assert prefill.engine._life.state is LifeState.RUNNING


async def test_an_engine_that_was_never_started_is_closed_at_once(sim: Bench) -> None:
    assert await sim.side("prefill", 1).engine.aclose(0.0) == ()


@pytest.mark.nixl
async def test_readers_on_real_nixl_take_no_bytes_of_an_owner_that_had_no_time() -> None:
    """No transport keeps them from reading on: the goodbye does, and the caller's word not to write meanwhile."""
    async with Bench(True).pair() as (prefill, decode, group):
        first, second = (group.make_params(name, [(0, [1, 2])], 32, written=True) for name in ("r", "s"))
        lent = [prefill.engine.lend(params) for params in (first, second)]
        await decode.engine.pull("d1", [(0, [20, 21])], first)
        decode.engine.announce("d2", second)
        await until(lambda: lent[1]._lease.grants)
        with anyio.fail_after(3.0):
            cut = await prefill.engine.aclose(0.3)
        assert [hold.request_id for hold in cut if hold.blocks] == ["s"]
        assert cut[0].left_s > 5.0
        await until(lambda: decode.engine.statistics().gauges["pulls_waiting"] == 0)
        # From here on the memory belongs to another owner.
        for array in prefill.arrays:
            array[:] = 0xEE
        before = decode.blocks([22, 23])
        with pytest.raises((PeerLost, PeerUnreachable)) as caught:
            await decode.engine.pull("d2", [(0, [22, 23])], second, timeout_s=5.0)
        assert caught.value.held == {}
        assert decode.blocks([22, 23]) == before


@pytest.mark.nixl
async def test_pulls_under_way_on_real_nixl_end_with_the_right_bytes_or_with_none() -> None:
    async with Bench(True).pair() as (prefill, decode, group):
        requests = [group.make_params(f"r{i}", [(0, [i])], 16, written=True) for i in range(BLOCKS)]
        for params in requests:
            prefill.engine.lend(params)
        pulls = [
            asyncio.create_task(decode.engine.pull(f"d{i}", [(0, [i])], params, timeout_s=8.0))
            for i, params in enumerate(requests)
        ]
        await until(lambda: any(pull.done() for pull in pulls))
        await prefill.engine.aclose(0.0)
        ends = await asyncio.gather(*pulls, return_exceptions=True)
        for number, end in enumerate(ends):
            if isinstance(end, BaseException):
                assert isinstance(end, PullError), end
            else:
                assert decode.blocks([number]) == prefill.blocks([number])
