"""Retries, drains, sleep and wake: a late first attempt changes nothing, and nothing old is served anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asynckv import (
    BackendError,
    BlocksRetired,
    EngineClosed,
    LeaseConfig,
    LeaseRefused,
    LocalProtocolError,
    PeerLost,
    PrefillRanks,
    PullCancelled,
    PullError,
    PullTimeout,
    ReadFailed,
    Registration,
)
from asynckv.config import PullConfig
from tests.engines import Bench, Side, cancel, memory, pass_by, pass_until, passing, until

QUICK = LeaseConfig(lease_s=4.0, grant_s=2.0)


def running(side: Side) -> int:
    return len(side.data.running)


@contextlib.asynccontextmanager
async def reading(sim: Bench, **how: Any) -> AsyncIterator[tuple[Side, Side, Any, asyncio.Task[Any], Any]]:
    """A pull whose read is under way."""
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        decode.data.deferred = True
        params, lent = prefill.lent(group, "r", [1], written=True)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params, **how))
        await until(lambda: running(decode))
        yield prefill, decode, lent, task, params


# -- retries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer_lost", [False, True])
async def test_a_failed_read_is_tried_again_within_the_deadline(sim: Bench, peer_lost: bool) -> None:
    async with reading(sim, retries=2) as (prefill, decode, lent, task, _):
        decode.data.fail(next(iter(decode.data.running)), peer_lost=peer_lost)
        await until(lambda: not running(decode))
        await pass_until(sim, lambda: running(decode))
        assert not lent.is_over
        decode.data.finish()
        result = await passing(sim, task)
        assert result.attempts == 2
        assert decode.blocks([6]) == prefill.blocks([1])
        end = await lent.wait_released()
        assert (end.cause, end.readers) == ("released", {"decode/tp0": "complete"})


async def test_without_retries_a_failure_is_the_end(sim: Bench) -> None:
    async with reading(sim) as (_, decode, lent, task, _):
        decode.data.fail(next(iter(decode.data.running)))
        with pytest.raises(ReadFailed) as caught:
            await task
        assert (caught.value.is_retryable, caught.value.attempts) == (True, 1)
        assert (await lent.wait_released()).readers == {"decode/tp0": "failed"}


async def test_no_attempt_begins_while_an_earlier_one_may_still_write(sim: Bench) -> None:
    async with reading(sim, retries=2, timeout_s=10.0) as (prefill, decode, _, task, _):
        first = next(iter(decode.data.running))
        decode.data.doubt(first)
        await pass_by(sim, 2.5)
        assert list(decode.data.running) == [first]
        assert not task.done()
        # It lands late: into blocks that are still its own. Only then does the second begin.
        decode.data.finish(first)
        await pass_until(sim, lambda: list(decode.data.running) not in ([], [first]))
        assert first not in decode.data.running
        decode.data.finish()
        assert (await passing(sim, task)).attempts == 2
        assert decode.blocks([6]) == prefill.blocks([1])


async def test_blocks_that_stay_held_end_the_retries_with_the_deadline(sim: Bench) -> None:
    async with reading(sim, retries=5, timeout_s=3.0) as (_, decode, _, task, _):
        first = next(iter(decode.data.running))
        decode.data.doubt(first)
        begun = sim.clock.now()
        with pytest.raises(ReadFailed) as caught:
            await passing(sim, task)
        assert sim.clock.now() - begun <= 3.3
        assert caught.value.held == {0: (6,)}
        decode.data.finish(first)
        await caught.value.returned()
        # Nobody will try again, and the prefill side knows.
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)


async def test_each_attempt_has_the_time_that_is_left_of_its_request(sim: Bench) -> None:
    async with reading(sim, retries=1, timeout_s=3.0) as (_, decode, _, task, _):
        data, begun = decode.data, sim.clock.now()
        await pass_by(sim, 2.0)
        data.fail(next(iter(data.running)))
        with pytest.raises(PullTimeout) as caught:
            await passing(sim, task)
        assert caught.value.attempts == 2
        assert sim.clock.now() - begun <= 3.3
        data.finish()


async def test_the_last_failure_discharges_the_reader(sim: Bench) -> None:
    async with reading(sim, retries=1) as (_, decode, lent, task, _):
        for _ in range(2):
            await pass_until(sim, lambda: running(decode))
            assert not lent.is_over
            decode.data.fail(next(iter(decode.data.running)))
        with pytest.raises(ReadFailed) as caught:
            await passing(sim, task)
        assert caught.value.attempts == 2
        assert (await lent.wait_released()).readers == {"decode/tp0": "failed"}


@pytest.mark.parametrize("is_last", [True, False])
async def test_cancelling_between_two_attempts_gives_up_and_discharges(sim: Bench, is_last: bool) -> None:
    async with reading(sim, retries=3, is_last=is_last) as (_, decode, lent, task, params):
        assert decode.engine.observation.reading().retrying == 0, "no attempt has failed yet"
        decode.data.fail(next(iter(decode.data.running)))
        await until(lambda: decode.engine.statistics().gauges["pulls_waiting"] == 0)
        assert decode.engine.observation.reading().retrying == 1
        with pytest.raises(LocalProtocolError, match="being pulled already"):
            await decode.engine.pull("d", [(0, [7])], params)
        with pytest.raises(LocalProtocolError, match="being pulled already"):
            decode.engine.announce("d", params)
        assert decode.engine.cancel("d")
        with pytest.raises(PullCancelled, match="between two attempts"):
            await passing(sim, task)
        assert (await lent.wait_released()).readers == {"decode/tp0": "cancelled"}
        assert not decode.engine.cancel("d")


async def test_blocks_that_were_given_by_an_iterator_are_filled_by_a_second_attempt(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        decode.data.deferred = True
        params, _ = prefill.lent(group, "r", [1], written=True)
        task = asyncio.create_task(decode.engine.pull("d", iter([(0, [6])]), params, retries=1))  # type: ignore[arg-type]
        await until(lambda: running(decode))
        decode.data.deferred = False
        decode.data.fail(next(iter(decode.data.running)))
        assert (await passing(sim, task)).attempts == 2
        assert decode.blocks([6]) == prefill.blocks([1])


async def test_cancelling_between_two_attempts_names_the_blocks_that_may_still_be_written(sim: Bench) -> None:
    async with reading(sim, retries=3) as (_, decode, _, task, _):
        (transfer,) = decode.data.running
        decode.data.doubt(transfer)
        await until(lambda: decode.engine.observation.reading().retrying)
        assert decode.engine.cancel("d")
        with pytest.raises(PullCancelled, match="between two attempts") as caught:
            await passing(sim, task)
        assert caught.value.held == {0: (6,)}
        decode.data.finish(transfer)
        await caught.value.returned()


async def test_a_cancelled_task_between_two_attempts_discharges(sim: Bench) -> None:
    async with reading(sim, retries=3) as (_, decode, lent, task, _):
        decode.data.fail(next(iter(decode.data.running)))
        await until(lambda: decode.engine.statistics().gauges["pulls_waiting"] == 0)
        await cancel(task)
        assert (await lent.wait_released()).cause == "released"


async def test_what_no_retry_can_cure_is_told_at_once(sim: Bench) -> None:
    async with sim.pair(lease=QUICK, pull=PullConfig(retries=5)) as (prefill, decode, group):
        params = group.make_params("r", [(0, [1])], 16, written=True)
        prefill.engine.lend(params).withdraw()
        with pytest.raises(LeaseRefused, match="revoked") as caught:
            await decode.engine.pull("d", [(0, [6])], params)
        assert (caught.value.attempts, caught.value.is_retryable) == (1, False)


# -- drain ------------------------------------------------------------------------------------------------------------


async def test_a_drain_completes_a_reader_in_the_middle_of_its_pull(sim: Bench) -> None:
    async with reading(sim) as (prefill, decode, lent, task, params):
        draining = asyncio.create_task(prefill.engine.drain(5.0))
        await pass_by(sim, 2.0)
        assert not draining.done()
        with pytest.raises(EngineClosed, match="draining"):
            prefill.engine.lend(params)
        decode.data.finish()
        await passing(sim, task)
        assert await passing(sim, draining) == ()
        assert (await lent.wait_released()).cause == "released"


async def test_a_drain_names_the_stragglers_at_its_deadline_and_cancels_nothing(sim: Bench) -> None:
    async with reading(sim) as (prefill, decode, lent, task, _):
        draining = asyncio.create_task(prefill.engine.drain(1.0))
        (straggler,) = await passing(sim, draining)
        assert (straggler.request_id, straggler.reason, straggler.blocks) == ("r", "lent", {0: (1,)})
        assert straggler.waits_for == (f"decode/tp0@{decode.engine.incarnation[:8]}",)
        assert not lent.is_over
        decode.data.finish()
        await passing(sim, task)


async def test_a_reader_that_waits_for_a_request_that_will_not_be_lent_is_told_so(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        other = group.make_params("s", [(0, [2])], 16, written=True)
        params = group.make_params("r", [(0, [1])], 16)
        prefill.engine.lend(other)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params))
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
        draining = asyncio.create_task(prefill.engine.drain(3.0))
        with pytest.raises(PullError) as caught:
            await asyncio.wait_for(task, 5)
        assert caught.value.reason == "engine_closed"
        (peer,) = decode.engine._driver.core.decode.peers.by_place.values()
        assert peer.is_draining
        await decode.engine.pull("e", [(0, [7])], other)
        assert await passing(sim, draining) == ()


async def test_what_was_announced_may_still_be_pulled_while_draining(sim: Bench) -> None:
    async with sim.pair(lease=QUICK) as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        decode.engine.announce("d", params)
        await until(lambda: decode.engine.statistics().counters.get("sent.claim"))
        draining = asyncio.create_task(decode.engine.drain(3.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="draining"):
            await decode.engine.pull("other", [(0, [7])], params)
        await decode.engine.pull("d", [(0, [6])], params)
        assert await passing(sim, draining) == ()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
async def test_a_drain_without_end_is_refused(sim: Bench, seconds: float) -> None:
    async with sim.pair() as (prefill, _, _):
        with pytest.raises(LocalProtocolError, match=r"timeout_s is .*; it must be a finite number"):
            await prefill.engine.drain(seconds)


@pytest.mark.parametrize(
    ("timeout_s", "cancelled_at", "ended_at", "outcome"),
    [(3.0, 60.0, 3.0, PullTimeout), (30.0, 1.0, 6.0, asyncio.CancelledError), (3.0, 1.0, 3.0, asyncio.CancelledError)],
    ids=["at the deadline", "drain_s after the cancellation", "or at the deadline"],
)
async def test_a_read_that_does_not_end_is_told_at_the_deadline_or_drain_s_after_a_cancellation(
    sim: Bench, timeout_s: float, cancelled_at: float, ended_at: float, outcome: type[BaseException]
) -> None:
    async with reading(sim, timeout_s=timeout_s) as (_, decode, _, task, _):
        began, passed = sim.clock.now(), 0.0
        while not task.done():
            if not task.cancelling() and passed >= cancelled_at:
                task.cancel()  # as the caller's own `asyncio.timeout` does
            await asyncio.sleep(0)
            sim.clock.advance(0.02)
            passed = sim.clock.now() - began
        decode.data.finish()
        assert passed == pytest.approx(ended_at, abs=0.1)
        with pytest.raises(outcome):
            await task


# -- sleep and wake ---------------------------------------------------------------------------------------


async def test_after_sleep_old_references_are_refused_and_new_ones_work(bench: Bench) -> None:
    async with bench.pair(lease=QUICK) as (prefill, decode, group):
        for cycle in range(3):
            params = group.make_params("r", [(0, [1])], 16, written=True)
            unlent = group.make_params("s", [(0, [2])], 16)
            lent = prefill.engine.lend(params)
            await passing(bench, asyncio.create_task(decode.engine.pull("d", [(0, [6])], params)))
            assert decode.blocks([6]) == prefill.blocks([1])
            await passing(bench, asyncio.create_task(lent.wait_released()))
            kept, still = prefill.lent(group, "t", [3], written=True)
            (cut,) = await passing(bench, asyncio.create_task(prefill.engine.suspend()))
            assert (cut.request_id, cut.waits_for) == ("t", ("*",))
            assert await prefill.engine.suspend() == ()
            assert ((await lent.wait_released()).cause, (await still.wait_released()).cause) == ("released", "revoked")
            with pytest.raises(EngineClosed, match="suspended"):
                prefill.engine.lend(params)
            with pytest.raises(PullError):
                await passing(bench, asyncio.create_task(decode.engine.pull("e", [(0, [7])], kept, timeout_s=2.5)))
            address = prefill.engine.endpoint.address
            await prefill.engine.resume()
            assert prefill.engine.endpoint.address == address
            assert prefill.engine.memory_epoch == cycle + 1
            with pytest.raises(LocalProtocolError, match="registered anew"):
                prefill.engine.lend(unlent)
            for old in (params, unlent, kept):
                with pytest.raises(PullError) as caught:
                    await passing(bench, asyncio.create_task(decode.engine.pull("e", [(0, [7])], old, timeout_s=2.5)))
                assert caught.value.reason in ("restarted", "peer_lost")
            group = PrefillRanks(
                "prefill", [prefill.engine.endpoint], memory_epoch=prefill.engine.memory_epoch, lease=QUICK
            )
            prefill.engine.check_integrity()
        params, _ = prefill.lent(group, "r", [1], written=True)
        await passing(bench, asyncio.create_task(decode.engine.pull("d", [(0, [8])], params)))
        assert decode.blocks([8]) == prefill.blocks([1])


async def test_a_reader_may_sleep_and_wake_with_other_memory(bench: Bench) -> None:
    async with bench.pair(lease=QUICK) as (prefill, decode, group):
        for _ in range(2):
            params, _ = prefill.lent(group, "r", [1], written=True)
            await passing(bench, asyncio.create_task(decode.engine.pull("d", [(0, [6])], params)))
            assert decode.blocks([6]) == prefill.blocks([1])
            assert await passing(bench, asyncio.create_task(decode.engine.suspend(1.0))) == ()
            registration, arrays = memory(500)
            await decode.engine.resume(registration)
            decode.arrays = arrays


async def test_a_pull_under_way_is_cut_short_by_sleep_with_every_block(sim: Bench) -> None:
    async with reading(sim, retries=4) as (_, decode, _, task, _):
        suspending = asyncio.create_task(decode.engine.suspend())
        with pytest.raises(PullCancelled) as caught:
            await passing(sim, task)
        assert caught.value.held == {0: (6,)}
        (cut,) = await passing(sim, suspending)
        assert cut.request_id == "d"
        await caught.value.returned()
        assert running(decode) == 0
        assert decode.engine.holds() == ()
        await decode.engine.resume()


async def test_waking_with_memory_that_cannot_be_registered_leaves_it_asleep() -> None:
    bench = Bench(False)
    async with bench.pair() as (prefill, _, group):
        with pytest.raises(LocalProtocolError, match="not suspended"):
            await prefill.engine.resume()
        await passing(bench, asyncio.create_task(prefill.engine.suspend()))
        start = prefill.data.start

        async def refuse(memories: Any, on_ready: Any) -> None:
            await start(memories, on_ready)
            raise BackendError("no such memory")

        prefill.data.start = refuse  # type: ignore[assignment, method-assign]
        other: Registration = memory(3)[0]
        with pytest.raises(BackendError):
            await prefill.engine.resume(other)
        with pytest.raises(EngineClosed, match="suspended"):
            prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
        prefill.data.start = start  # type: ignore[method-assign]
        await prefill.engine.resume()
        assert prefill.engine.registration is not other


async def test_an_engine_may_be_closed_in_its_sleep_and_a_second_time(bench: Bench) -> None:
    side = bench.side("x", 1)
    async with side.engine:
        await passing(bench, asyncio.create_task(side.engine.suspend()))
        await passing(bench, asyncio.create_task(side.engine.aclose()))
        await side.engine.aclose()
        for call in (side.engine.suspend, side.engine.resume):
            with pytest.raises(EngineClosed):
                await call()


async def test_a_lost_peer_and_a_timeout_say_whether_to_try_again(sim: Bench) -> None:
    async with reading(sim, timeout_s=2.0) as (_, decode, _, task, _):
        with pytest.raises(PullTimeout) as caught:
            await passing(sim, task, 0.1)
        assert not caught.value.is_retryable
        decode.data.finish()
    async with reading(sim) as (_, decode, _, task, _):
        decode.data.fail(next(iter(decode.data.running)), peer_lost=True)
        with pytest.raises(PeerLost) as lost:
            await task
        assert (lost.value.is_retryable, lost.value.held) == (True, {})


# -- closing that fails ---------------------------------------------------------------------------------------------


def refuse_to_close(side: Side, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Something stays inside the back end, for so many tries; returns the tries."""
    close, tries = side.data.close, list[int]()

    def planted() -> None:
        tries.append(len(tries) + 1)
        if len(tries) <= times:
            raise BackendError("a thread did not come out of NIXL")
        close()

    monkeypatch.setattr(side.data, "close", planted)
    return tries


@contextlib.asynccontextmanager
async def in_doubt(sim: Bench) -> AsyncIterator[tuple[Side, list[asyncio.Task[None]]]]:
    """A pull whose task was cancelled, while one of its reads may still write; and who waits for its blocks."""
    async with reading(sim) as (_, decode, _, task, _):
        decode.data.doubt(next(iter(decode.data.running)))
        with pytest.raises(ReadFailed) as caught:
            await passing(sim, task)
        assert caught.value.held == {0: (6,)}
        waiting = [asyncio.create_task(who("d")) for who in (decode.engine.returned, lambda _: caught.value.returned())]
        yield decode, waiting


@pytest.mark.parametrize("how", ["aclose", "suspend"])
async def test_closing_that_failed_is_tried_again_and_returns_blocks_only_then(
    sim: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with in_doubt(sim) as (decode, waiting):
        tries = refuse_to_close(decode, monkeypatch, 2)
        for number in (1, 2):
            with pytest.raises(BackendError, match="did not come out"):
                await passing(sim, asyncio.create_task(getattr(decode.engine, how)()))
            assert tries == list(range(1, number + 1))
            assert not any(each.done() for each in waiting)
            assert [hold.request_id for hold in decode.engine.holds()] == ["d"]
        # Asleep or not, it may be closed for good.
        await passing(sim, asyncio.create_task(decode.engine.aclose()))
        assert await asyncio.gather(*waiting) == [None, None]
        assert decode.engine.holds() == ()
        await decode.engine.returned("d")
        await decode.engine.aclose()
        assert len(tries) == 3


async def test_a_sleep_that_failed_is_tried_again(sim: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_doubt(sim) as (decode, waiting):
        refuse_to_close(decode, monkeypatch, 1)
        with pytest.raises(BackendError, match="did not come out"):
            await passing(sim, asyncio.create_task(decode.engine.suspend()))
        with pytest.raises(LocalProtocolError, match="is not suspended"):
            await decode.engine.resume()
        await passing(sim, asyncio.create_task(decode.engine.suspend()))
        assert await asyncio.gather(*waiting) == [None, None]
        await decode.engine.resume()
        assert decode.engine.memory_epoch == 1


async def test_the_data_plane_is_closed_though_the_control_plane_cannot_be(
    sim: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_doubt(sim) as (decode, waiting):
        closed = refuse_to_close(decode, monkeypatch, 0)

        async def broken() -> None:
            raise OSError("a socket that cannot be closed")

        monkeypatch.setattr(decode.engine._driver.control, "aclose", broken)
        with pytest.raises(OSError, match="cannot be closed"):
            await passing(sim, asyncio.create_task(decode.engine.aclose()))
        assert closed == [1]
        await passing(sim, asyncio.create_task(decode.engine.aclose()))
        assert await asyncio.gather(*waiting) == [None, None]


@pytest.mark.parametrize("how", ["aclose", "suspend"])
async def test_the_data_plane_is_let_go_of_only_when_its_threads_have_come_out(
    sim: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with in_doubt(sim) as (decode, waiting):
        came, out, closed = asyncio.Event(), asyncio.Event(), refuse_to_close(decode, monkeypatch, 0)

        async def quiesce() -> None:
            came.set()
            await out.wait()

        monkeypatch.setattr(decode.data, "quiesce", quiesce)
        ending = asyncio.create_task(getattr(decode.engine, how)())
        asked = asyncio.create_task(came.wait())
        try:
            await passing(sim, asyncio.create_task(asyncio.wait({asked, ending}, return_when=asyncio.FIRST_COMPLETED)))
            assert asked.done(), "nobody asked whether they have"
            await pass_by(sim, 5.0)
            assert (closed, ending.done(), [each.done() for each in waiting]) == ([], False, [False, False])
        finally:
            out.set()
        await passing(sim, ending)
        assert closed == [1]
        assert await asyncio.gather(*waiting) == [None, None]


@pytest.mark.parametrize("how", ["aclose", "suspend"])
async def test_blocks_behind_closing_that_failed_are_given_up_in_time(
    sim: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with in_doubt(sim) as (decode, waiting):
        refuse_to_close(decode, monkeypatch, 1)
        with pytest.raises(BackendError, match="did not come out"):
            await passing(sim, asyncio.create_task(getattr(decode.engine, how)()))
        # Nobody closes again.
        outcomes = await passing(sim, asyncio.gather(*waiting, return_exceptions=True), 0.5)
        assert [type(outcome) for outcome in outcomes] == [BlocksRetired, BlocksRetired]
        await passing(sim, asyncio.create_task(decode.engine.aclose()))
        # With the agent ends what could write them.
        await decode.engine.returned("d")
