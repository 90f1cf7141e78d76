"""The engine on simulated planes and a manual clock, and on real NIXL and ZMQ: the same stories."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import anyio
import pytest
import structlog

from asynckv import (
    BlocksRetired,
    Engine,
    EngineClosed,
    EngineConfig,
    LeaseConfig,
    LocalProtocolError,
    PeerUnreachable,
    PlanRefused,
    PrefillRanks,
    PullCancelled,
    PullError,
    PullTimeout,
    ReadFailed,
    RemoteProtocolError,
    RemoteTooShort,
)
from asynckv.config import NixlConfig, PullConfig
from asynckv.core.decode import DecodeSide
from asynckv.core.events import Ending, TransferEnded
from asynckv.observe.setup import configure_logging
from asynckv.testing import SimControl, SimData
from asynckv.testing.fabric import Fate
from tests.documented import Lines
from tests.engines import BLOCKS, Bench, cancel, memory, passing, reading, turn_loop, until


async def test_a_request_from_params_to_release(bench: Bench) -> None:
    async with bench.pair(nixl=NixlConfig()) as (prefill, decode, group):
        params, lent = prefill.lent(group, "req:1,\n", [3, 4, 9], 40, written=True)
        result = await decode.engine.pull("d1", [(0, [7, 5, 6])], params)
        with anyio.fail_after(10):
            end = await lent.wait_released()
        assert decode.blocks([7, 5, 6]) == prefill.blocks([3, 4, 9])
        assert (end.cause, end.readers, end.owed) == ("released", {"decode/tp0": "complete"}, ())
        assert result.num_bytes == len(decode.blocks([7, 5, 6]))
        assert [tuple(p) for p in result.padding] == [(0, 6, 8, 8)]
        assert set(result.phases) == {"queue", "handshake", "plan", "post", "read", "detect", "confirm", "release"}
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)
        gauges = prefill.engine.statistics().gauges
        assert (gauges["leases"], gauges["blocks_lent"]) == (0, 0)


async def test_params_may_travel_ahead_of_the_data(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        params = group.make_params("req", [(0, [3, 4])], 32)
        decode.engine.announce("d", params)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [1, 2])], params))
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
        for array in prefill.arrays:
            array.reshape(2, BLOCKS, -1)[:, [3, 4]] = 77  # the KV is only written now
        prefill.engine.lend(params)
        with anyio.fail_after(10):
            await task
        assert decode.blocks([1, 2]) == prefill.blocks([3, 4])
        assert set(decode.blocks([1, 2])) == {77}


async def test_many_requests_at_once(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        all_params = [group.make_params(f"r{i}", [(0, [i])], 16, written=True) for i in range(BLOCKS)]
        for params in all_params:
            prefill.engine.lend(params)
        async with anyio.create_task_group() as tasks:
            for i, params in enumerate(all_params):
                tasks.start_soon(decode.engine.pull, f"d{i}", [(0, [BLOCKS - 1 - i])], params)
        assert decode.blocks(list(range(BLOCKS))) == prefill.blocks(list(range(BLOCKS))[::-1])
        seen = decode.engine.statistics()
        assert seen.gauges["peers"] == 1
        assert seen.counters["sent.hello"] <= 2, "a Hello is repeated if the answer is late, and serves all requests"


async def test_a_full_prefix_hit_is_a_release_without_a_read(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        result = await decode.engine.pull("d", [(16, [])], params)
        with anyio.fail_after(10):
            assert (await lent.wait_released()).cause == "released"
        assert (result.num_bytes, result.num_posts) == (0, 0)
        assert "sent.hello" not in decode.engine.statistics().counters


async def test_bad_input_names_the_value_and_leaves_nothing(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        params = group.make_params("r", [(0, [1])], 16, written=True)
        for blocks, message in [([-1], "-1"), ([BLOCKS], f"{BLOCKS}"), ([2, 2], "given twice")]:
            with pytest.raises(PlanRefused, match=message):
                await decode.engine.pull("d", [(0, blocks)], params)
        with pytest.raises(PlanRefused, match=f"block id {BLOCKS + 5}"):
            prefill.engine.lend(group.make_params("big", [(0, [BLOCKS + 5])], 16))
        with pytest.raises(RemoteProtocolError, match="num_tokens"):
            await decode.engine.pull("d", [(0, [1])], {**params, "num_tokens": "many"})
        with pytest.raises(LocalProtocolError, match="timeout"):
            await decode.engine.pull("d", [(0, [1])], params, timeout_s=float("nan"))
        prefill.engine.lend(params)
        with pytest.raises(RemoteTooShort, match="needs KV from token"):
            await decode.engine.pull("d", [(16, [1, 2])], {**params, "num_tokens": 40})
        assert decode.engine.statistics().gauges["blocks_writing"] == 0


async def test_closing_is_idempotent_and_fails_what_waits(bench: Bench) -> None:
    async with bench.pair(lease=LeaseConfig(lease_s=2.0, grant_s=1.0)) as (_, decode, group):
        params = group.make_params("never lent", [(0, [1])], 16)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [1])], params))
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 1)
        closing = asyncio.create_task(decode.engine.aclose())
        with anyio.fail_after(20):
            with pytest.raises(PullCancelled):
                await task
            await closing
            await decode.engine.aclose()
        with pytest.raises(EngineClosed):
            await decode.engine.pull("d", [(0, [1])], params)
        with pytest.raises(EngineClosed, match="make a new one"):
            await decode.engine.start()


async def test_a_cancelled_caller_leaves_no_hold_behind(bench: Bench) -> None:
    async with bench.pair() as (prefill, decode, group):
        # UCX may abort a process that closes an agent while its first connection is being made (docs/reliability.md).
        first, _ = prefill.lent(group, "first", [2])
        await decode.engine.pull("first", [(0, [2])], first)
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)
        params = group.make_params("r", [(0, [1])], 16)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [1])], params))
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 1)
        await cancel(task)
        assert decode.engine.statistics().gauges["blocks_writing"] == 0
        lent = prefill.engine.lend(params)
        with anyio.fail_after(10):
            assert (await lent.wait_released()).cause == "released"


@pytest.mark.parametrize("turns", range(1, 13))
async def test_cancel_at_every_turn_of_the_loop(sim: Bench, turns: int) -> None:
    async with sim.pair() as (prefill, decode, group):
        decode.data.deferred = True
        params, _ = prefill.lent(group, "r", [1], written=True)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [1])], params))
        await turn_loop(turns)
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
            decode.data.finish()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)
        await until(lambda: prefill.engine.statistics().gauges["leases"] == 0)
        assert decode.engine.statistics().gauges["blocks_writing"] == 0


async def test_a_stuck_read_fails_in_time_and_names_its_blocks(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        _, task, data = await reading(prefill, decode, group, timeout_s=3.0)
        sim.clock.advance(3.1)
        with pytest.raises(PullTimeout, match="failed in read: still reading from prefill/tp0@") as caught:
            await task
        assert caught.value.held == {0: (6,)}
        returned = asyncio.create_task(caught.value.returned())
        await asyncio.sleep(0)
        assert not returned.done()
        assert decode.engine.statistics().gauges["blocks_quarantined"] == 1
        data.finish()
        with anyio.fail_after(5):
            await returned


async def test_a_block_in_use_is_refused_and_the_request_can_be_pulled_into_others(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        decode.data.deferred = True
        (first, _), (second, _) = (prefill.lent(group, f"r{i}", [i], written=True) for i in (1, 2))
        one = asyncio.create_task(decode.engine.pull("one", [(0, [6])], first))
        await until(lambda: decode.data.running)
        with pytest.raises(LocalProtocolError, match=r"block 6 .* still being written by a pull of 'one'"):
            await decode.engine.pull("two", [(0, [6])], second)
        two = asyncio.create_task(decode.engine.pull("two", [(0, [7])], second))
        await until(lambda: len(decode.data.running) == 2)
        decode.data.finish()
        await asyncio.gather(one, two)
        assert decode.blocks([6, 7]) == prefill.blocks([1, 2])


async def test_blocks_that_come_back_late_are_logged(sim: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="asynckv"):
        async with sim.pair() as (prefill, decode, group):
            _, task, data = await reading(prefill, decode, group)
            (transfer_id,) = data.running
            data.doubt(transfer_id)
            with pytest.raises(ReadFailed) as caught:
                await task
            assert caught.value.held == {0: (6,)}
            data.finish(transfer_id)
            with anyio.fail_after(5):
                await caught.value.returned()
    assert [r.getMessage().split()[0] for r in caplog.records] == ["pull_ended", "blocks_returned"]
    assert all(" blocks=1" in r.getMessage() for r in caplog.records)


async def test_blocks_that_never_come_back_are_retired_with_an_alarm(
    sim: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="asynckv"):
        async with sim.pair() as (prefill, decode, group):
            _, task, data = await reading(prefill, decode, group, timeout_s=5.0)
            (transfer_id,) = data.running
            sim.clock.advance(6)
            with pytest.raises(PullTimeout) as caught:
                await task
            [hold] = decode.engine.holds()
            assert (hold.request_id, hold.reason, hold.blocks) == ("d", "quarantined", {0: (6,)})
            there = prefill.engine.endpoint
            assert hold.waits_for == (f"prefill/tp0@{there.incarnation[:8]} ({there.address})",)
            assert 593 < hold.left_s <= 600
            waiting = asyncio.create_task(caught.value.returned())
            await asyncio.sleep(0)
            sim.clock.advance(600)
            with pytest.raises(BlocksRetired, match="never use them again"):
                await waiting
            with pytest.raises(BlocksRetired):
                await decode.engine.returned("d")
            assert [h.reason for h in decode.engine.holds()] == ["retired"]
            # Evidence may come after all.
            data.finish(transfer_id)
            await until(lambda: not decode.engine.holds())
    names = [r.getMessage().split()[0] for r in caplog.records if r.getMessage().startswith("blocks")]
    assert names == ["blocks_retired", "blocks_returned"]


async def test_one_bad_event_takes_no_others_along(
    sim: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sim.pair() as (prefill, decode, group):
        honest, calls = DecodeSide.ended, []

        def ended(self: DecodeSide, news: TransferEnded, detect_s: float, now: float) -> None:
            calls.append(news)
            if len(calls) == 1:
                raise ZeroDivisionError("a bug")
            honest(self, news, detect_s, now)

        decode.data.deferred = True
        monkeypatch.setattr(DecodeSide, "ended", ended)
        tasks = []
        for i in range(2):
            params, _ = prefill.lent(group, f"r{i}", [i], written=True)
            tasks.append(asyncio.create_task(decode.engine.pull(f"d{i}", [(0, [6 + i])], params, timeout_s=5.0)))
        await until(lambda: len(decode.data.running) == 2)
        with caplog.at_level(logging.ERROR, logger="asynckv"):
            decode.data.finish()
            await until(lambda: any(task.done() for task in tasks))
        assert decode.engine.statistics().counters["internal_errors"] == 1
        assert "ZeroDivisionError" in caplog.records[0].getMessage()
        sim.clock.advance(6)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(type(r).__name__ for r in results) == ["PullResult", "PullTimeout"]
        # What was lost by the bug is found by its age.
        (lost,) = decode.engine._driver.core.decode.transfers
        decode.engine._driver.core.decode.ended(TransferEnded(lost, Ending.DONE), 0.0, sim.clock.now())
        decode.engine._driver.soon()


async def test_a_bug_while_a_peer_is_loaded_is_told_at_once_to_the_pulls_that_wait_for_it(
    sim: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any) -> None:
        raise ZeroDivisionError("a bug of the plane's")

    async with sim.pair() as (prefill, decode, group):
        monkeypatch.setattr(decode.data, "add_remote_agent", broken)
        params, _ = prefill.lent(group, "r", [1], written=True)
        begun = sim.clock.now()
        with anyio.fail_after(5), pytest.raises(PeerUnreachable, match="a bug of the plane's"):
            await decode.engine.pull("d", [(0, [6])], params)
        assert sim.clock.now() == begun


async def test_a_bug_that_one_command_meets_keeps_no_other_from_being_carried_out(
    sim: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two peers are forgotten in one turn, and the data plane fails over the first."""
    async with sim.pair() as (prefill, decode, group):
        data, second = decode.data, sim.side("second", 7)
        async with second.engine:
            for number, (side, key) in enumerate(
                [(prefill, group), (second, PrefillRanks("second", [second.engine.endpoint]))]
            ):
                params, _ = side.lent(key, f"r{number}", [1], written=True)
                await decode.engine.pull(f"d{number}", [(0, [6])], params)
            honest, calls = data.remove_remote_agent, list[str]()

            def remove(name: str, *, keep: bool = False) -> None:
                calls.append(name)
                if len(calls) == 1:
                    raise ZeroDivisionError("a bug")
                honest(name, keep=keep)

            monkeypatch.setattr(data, "remove_remote_agent", remove)
            await until(lambda: not decode.engine._driver.core.decode.pulls)
            for side in (prefill, second):
                decode.engine.forget_peer(side.engine.endpoint.address)
            await until(lambda: len(calls) == 2)
            assert [*data.remotes] == calls[:1]


async def test_a_bug_in_a_timer_costs_no_deadline(sim: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sim.pair() as (_, decode, group):
        core, ticks, begun = decode.engine._driver.core, list[float](), sim.clock.now()
        honest = core.tick

        def tick(now: float) -> None:
            ticks.append(now)
            if len(ticks) <= 3:
                raise ZeroDivisionError("a bug")
            honest(now)

        monkeypatch.setattr(core, "tick", tick)
        task = asyncio.create_task(
            decode.engine.pull("d", [(0, [6])], group.make_params("r", [(0, [1])], 16), timeout_s=1.0)
        )
        with pytest.raises(PullError):
            await passing(sim, task, 0.01)
        assert sim.clock.now() - begun <= 1.5
        assert decode.engine.statistics().counters["internal_errors"] == 3


async def test_a_read_whose_posting_raised_may_have_been_posted_and_holds_its_blocks(
    sim: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sim.pair() as (prefill, decode, group):
        data = decode.data
        data.deferred, honest = True, data.post_read

        def post_read(*args: Any) -> None:
            honest(*args)
            raise ZeroDivisionError("a bug of the plane's, after it had posted")

        monkeypatch.setattr(data, "post_read", post_read)
        params, lent = prefill.lent(group, "r", [1], written=True)
        with pytest.raises(ReadFailed, match="posting it failed: ZeroDivisionError") as caught:
            await decode.engine.pull("d", [(0, [6])], params, timeout_s=5.0)
        assert caught.value.held == {0: (6,)}
        assert (await lent.wait_released()).readers == {"decode/tp0": "failed"}
        with pytest.raises(LocalProtocolError, match="block 6 of group 0 cannot be filled"):
            await decode.engine.pull("other", [(0, [6])], params)
        waiting = asyncio.create_task(caught.value.returned())
        await asyncio.sleep(0)
        assert not waiting.done()
        data.finish()
        await waiting
        assert decode.engine.statistics().counters["internal_errors"] == 1


@pytest.mark.nixl
async def test_one_process_under_two_addresses_serves_both() -> None:
    async with Bench(True).pair() as (prefill, decode, group):
        addresses = [prefill.engine.endpoint.address, prefill.engine.endpoint.address.replace("127.0.0.1", "localhost")]
        for i, address in enumerate([*addresses, addresses[0]]):
            params = group.make_params(f"r{i}", [(0, [i])], 16, written=True)
            params["endpoints"][0]["address"] = address
            lent = prefill.engine.lend(params)
            await decode.engine.pull(f"d{i}", [(0, [10 + i])], params)
            assert decode.blocks([10 + i]) == prefill.blocks([i])
            await lent.wait_released()
        assert decode.engine.statistics().counters["data.peers"] == 1
        # One of them goes: the other reads on.
        decode.engine.forget_peer(addresses[1])
        await asyncio.sleep(0)
        params, _ = prefill.lent(group, "r9", [9], written=True)
        await decode.engine.pull("d9", [(0, [20])], params)
        assert decode.blocks([20]) == prefill.blocks([9])


@pytest.mark.nixl
async def test_a_living_peer_that_was_idle_is_met_again_without_a_new_connection() -> None:
    async with Bench(True).pair(pull=PullConfig(idle_s=0.02)) as (prefill, decode, group):
        fds = []
        for i in range(5):
            params, lent = prefill.lent(group, f"r{i}", [i], written=True)
            await decode.engine.pull(f"d{i}", [(0, [10 + i])], params)
            assert decode.blocks([10 + i]) == prefill.blocks([i])
            await lent.wait_released()
            await until(
                lambda: all(p.state.value == "gone" for p in decode.engine._driver.core.decode.peers.by_place.values())
            )
            fds.append(len(os.listdir("/proc/self/fd")))
            # A tombstone of an idle peer stops no pull: it is met anew.
        assert fds[2] == fds[-1]


async def test_leases_of_a_closed_engine_end_for_callers_that_wait(sim: Bench) -> None:
    prefill = sim.side("prefill", 1)
    async with prefill.engine:
        group = PrefillRanks("prefill", [prefill.engine.endpoint])
        lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
        prefill.engine._driver.core.prefill.revoke = lambda lease, now, by="": None  # type: ignore[method-assign]
        closing = asyncio.create_task(prefill.engine.aclose())
        await turn_loop(3)
        sim.clock.advance(20)
        await closing
        with anyio.fail_after(5):
            end = await lent.wait_released()
    assert (end.cause, end.owed) == ("closed", ("*",))


async def test_lost_and_repeated_packets_change_nothing(sim: Bench) -> None:
    kinds: list[Fate] = ["drop", "repeat", "deliver"]
    fates = iter(kinds * 1000)
    sim.network.fate = lambda sender, to, packet: next(fates)
    async with sim.pair() as (prefill, decode, group):
        for i in range(8):
            params, lent = prefill.lent(group, f"r{i}", [i], written=True)
            task = asyncio.create_task(decode.engine.pull(f"d{i}", [(0, [i + 8])], params))
            for _ in range(200):
                await turn_loop(5)
                if task.done() and lent.is_over:
                    break
                sim.clock.advance(0.05)
            await task
            assert lent.is_over
        assert decode.blocks(list(range(8, 16))) == prefill.blocks(list(range(8)))
        sim.network.fate = lambda sender, to, packet: "deliver"


@pytest.mark.nixl
async def test_nothing_reaches_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    async with Bench(True).pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        await decode.engine.pull("d", [(0, [1])], params)
    assert capfd.readouterr().out == ""


async def test_failures_are_logged_with_their_history(sim: Bench, logs: Lines) -> None:
    configure_logging("debug", stream=logs.stream)
    async with sim.pair(pull=PullConfig(timeout_s=2.0)) as (prefill, decode, group):
        good, _ = prefill.lent(group, "good", [1], written=True)
        await decode.engine.pull("d-good", [(0, [1])], good)
        bad = group.make_params("bad", [(0, [2])], 16, written=True)
        task = asyncio.create_task(decode.engine.pull("d-bad", [(0, [2])], bad))
        await turn_loop(20)
        sim.clock.advance(2.1)
        with pytest.raises(PullTimeout):
            await task
    ended = {e["request_id"]: e for e in logs.of("pull_ended")}
    assert ended["d-good"]["cause"] == "complete"
    assert "history" not in ended["d-good"]
    failure = ended["d-bad"]
    assert (failure["cause"], failure["prefill_request_id"], failure["level"]) == ("not_lent_yet", "bad", "warning")
    assert failure["history"][0] == [0.0, "announced"]
    assert failure["engine_id"] == "decode"
    assert len(failure["incarnation"]) == 32
    assert {"engine_started", "peer_changed", "lease_ended", "engine_stopped"} <= {e["event"] for e in logs}
    assert [e["to"] for e in logs.of("pull_transition") if e["request_id"] == "d-good"][:4] == [
        "announced",
        "connecting",
        "queued",
        "reading",
    ]


async def test_a_rank_that_shares_tokens_logs_and_tells_its_share(sim: Bench, logs: Lines) -> None:
    for dcp in (4, 1):
        registration, _ = memory(1, 6, 8, dcp=dcp)
        data, control = SimData(sim.network, f"n{dcp}"), SimControl(sim.network)
        engine = Engine(EngineConfig(engine_id="prefill"), registration, data=data, control=control, clock=sim.clock)
        async with engine:
            await until(lambda: logs.of("engine_started"))
    assert [each.get("token_shards") for each in logs.of("engine_started")] == [[[0, 4, 2, 4]], None]


async def test_an_application_without_structlog_hears_only_warnings(
    sim: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    assert not structlog.is_configured()
    with caplog.at_level(logging.WARNING, logger="asynckv"):
        async with sim.pair() as (prefill, _, group):
            lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
            await turn_loop(3)
            sim.clock.advance(31)
            end = await lent.wait_released()
            assert (end.cause, end.owed) == ("expired", ("*",))
    *held, record = caplog.records
    assert {r.getMessage().split()[0] for r in held} == {"lease_held"}
    assert record.getMessage().startswith("lease_ended engine_id=")
    assert "cause=expired" in record.getMessage()
    assert record.cause == "expired"  # type: ignore[attr-defined]


async def test_what_is_printed_says_what_it_is_and_no_secret(sim: Bench) -> None:
    async with sim.pair() as (prefill, _, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        shown = repr(prefill.engine)
        assert shown.startswith("<Engine prefill/tp0@")
        assert ", running, sim://" in shown
        assert repr(group) == "<PrefillRanks 'prefill', tp_size 1, pp_size 1>"
        assert repr(lent) == "<LentRequest 'r' lent>"
        assert params["key"][3] not in f"{shown}{group!r}{lent!r}"
    assert ", closed, " in repr(prefill.engine)
