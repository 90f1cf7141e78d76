"""Holds, with their owners and times: in a list, in the logs of both sides, and under one name."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynckv import (
    AsyncKVError,
    ConfigError,
    EngineConfig,
    LeaseConfig,
    LogConfig,
    PeerLost,
    PeerUnreachable,
    PullCancelled,
    PullConfig,
    PullTimeout,
)
from asynckv.account.waits import waits_for
from asynckv.account.watch import GATHER_S, PAUSE_S
from asynckv.core.lease import LeaseState
from asynckv.core.ledger import FEW, Kind, Ledger
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import Address, Endpoint, Outcome, Reason, decode_params, rank_name
from asynckv.errors import LocalProtocolError
from asynckv.observe.log import phases
from asynckv.scheduler import PrefillRanks
from tests.documented import Lines
from tests.engines import Bench, pass_by, until
from tests.world import BLOCK, NUM_BLOCKS, make_layout, opened

# -- the list ----------------------------------------------------------------------------------------


def test_an_announcement_that_is_never_pulled_is_listed_though_it_holds_no_block() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "req", [3])
    world.announce(decode, "d-req", params, 300.0)
    world.deliver_all()
    world.live(60.0)
    assert decode.inspect.holds(world.time(decode)) == ()
    (request,) = decode.inspect.requests(world.time(decode))
    assert (request.kind, request.request_id, request.prefill_request_id) == ("announced", "d-req", "req")
    assert (request.state, request.blocks, request.attempt) == ("announced", 0, 1)
    assert (request.age_s, request.state_s, request.left_s) == pytest.approx((60.0, 60.0, 240.0))
    assert request.waits == "announced and never pulled; its lease is renewed at prefill/tp0@prefill- (world://prefill)"
    (rank,) = request.ranks
    assert (rank.rank, rank.state, rank.bytes_planned) == ("prefill/tp0@prefill-", "granted", 0)
    assert rank.granted_s is not None
    assert 5 < rank.granted_s < 10
    # And the other side names the reader that renews.
    (lease,) = prefill.inspect.requests(world.time(prefill))
    assert (lease.kind, lease.state, lease.blocks, lease.sequence) == ("lease", "lent", 1, request.sequence)
    assert lease.waits == "claimed and renewed by decode/tp0@decode-1"
    (reader,) = lease.ranks
    assert (reader.rank, reader.state, reader.pull_id) == ("decode/tp0@decode-1", "granted", request.pull_id)
    assert reader.heard_s is not None
    assert reader.heard_s < 5


def test_what_waits_for_its_turn_to_be_told_of_is_told_as_it_is_then() -> None:
    """A lease is overdue unclaimed, and claimed before it is said."""
    world, prefill, decode = opened(lease=LeaseConfig(lease_s=30.0))
    params, _ = world.lent(prefill, "req", [3])
    world.live(10.0)
    assert prefill.watch.next_at < math.inf
    world.announce(decode, "d-req", params, 300.0)
    world.deliver_all()
    world.settle(decode)
    world.deliver_all()
    (lease,) = prefill.inspect.requests(world.time(prefill))
    assert lease.ranks[0].state == "granted"
    (held,) = prefill.watch.tick(prefill.watch.next_at)
    assert held.waits == "claimed and renewed by decode/tp0@decode-1"


def test_a_pull_says_how_far_it_is_with_every_rank() -> None:
    world, prefill, decode = opened(pull=PullConfig(max_post_bytes=64))
    params = world.params([prefill], "req", [3], 4)
    pull = world.pull(decode, "d", [9], params, timeout=100)

    def state() -> tuple[str, str, int]:
        (request,) = decode.inspect.requests(world.time(decode))
        return request.state, request.ranks[0].state, request.ranks[0].bytes_read

    assert state() == ("connecting", "connecting", 0)
    world.deliver_all()
    assert state() == ("reading", "not_lent", 0)
    world.complete_reads(decode)
    state_then, rank_then, landed = state()
    assert (state_then, rank_then, landed > 0) == ("confirming", "not_lent", True)
    (request,) = decode.inspect.requests(world.time(decode))
    assert request.ranks[0].bytes_planned == landed
    world.lend(prefill, params)
    world.deliver_all()
    world.advance(0)
    assert state() == ("reading", "granted", 0)  # it had begun too early
    (request,) = decode.inspect.requests(world.time(decode))
    assert (request.kind, request.blocks, request.ranks[0].transfers) == ("pull", 1, len(decode.reads))
    world.complete(decode, next(iter(decode.reads)))
    assert 0 < state()[2] < landed
    world.run()
    assert pull.reason is Reason.COMPLETE
    for rank in (decode, prefill):
        assert rank.inspect.requests(world.time(rank)) == ()


def test_a_reader_that_is_gone_is_listed_with_when_it_was_last_heard_of() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "req", [3], written=True, readers=2)
    world.pull(decode, "d", [9], params)
    world.deliver_all()
    del world.ranks[decode.name]
    world.advance(25.0)
    (request,) = prefill.inspect.requests(world.time(prefill))
    gone, nobody = request.ranks
    assert (gone.rank, gone.state, gone.granted_s) == ("decode/tp0@decode-1", "lapsed", None)
    assert gone.heard_s == pytest.approx(25.0)
    assert (nobody.rank, nobody.state, nobody.heard_s) == ("*", "unclaimed", None)
    assert request.waits == "claimed and no longer renewed by decode/tp0@decode-1; not claimed by another decode engine"
    assert waits_for(lease) == ("decode/tp0@decode-1", "*")
    assert lease.owed() == ("decode/tp0", "*")
    assert lease.state is LeaseState.LENT


async def test_a_request_between_two_attempts_is_listed(sim: Bench) -> None:
    sim.network.fate = lambda sender, to, packet: "drop"
    async with sim.pair(pull=PullConfig(handshake_s=1.0, backoff_s=5.0)) as (_, decode, group):
        params = group.make_params("r", [(0, [1, 2])], 32)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6, 7])], params, retries=1))
        await until(lambda: decode.engine.requests())
        sim.clock.advance(1.1)
        await until(lambda: "retrying" in [r.kind for r in decode.engine.requests()])
        (request,) = [r for r in decode.engine.requests() if r.kind == "retrying"]
        assert (request.request_id, request.blocks) == ("d", 2)
        assert json.dumps([dataclasses.asdict(request)])
        decode.engine.cancel("d")
        with pytest.raises(PullCancelled, match="cancelled between two attempts") as caught:
            await task
        assert caught.value.failed_in == "retry"
        sim.network.fate = lambda sender, to, packet: "deliver"


# -- what is held for long ---------------------------------------------------------------------------


@example(lease_s=67.0, fraction=0.05, renewals=0)
@given(lease_s=st.floats(2.0, 1000.0), fraction=st.sampled_from([0.05, 1 / 3, 0.5, 2.0]), renewals=st.integers(0, 3))
@settings(max_examples=50)
def test_a_lease_is_warned_of_after_its_fraction_and_at_each_doubling(
    lease_s: float, fraction: float, renewals: int
) -> None:
    world, prefill, decode = opened(log=LogConfig(held_fraction=fraction), lease=LeaseConfig(grant_s=1000.0))
    params, lease = world.lent(prefill, "req", [3], lease_s=lease_s)
    if renewals:
        world.announce(decode, "d", params, 1e6)
        world.deliver_all()
        for _ in range(3 * renewals):  # three times in each promise
            world.advance(min(decode.core.next_at - decode.epoch - world.now, lease_s / 4))
            world.deliver_all()
        del world.ranks[decode.name]
    world.advance(2000.0)
    first, at = max(lease_s * fraction, 0.5), -PAUSE_S
    due = []
    for crossed in (first * 2**i for i in range(20)):
        # What is crossed before the last word was said is said with it.
        if crossed >= at:
            at = max(crossed + GATHER_S, at + PAUSE_S)
            due.append(at)
    assert [t for t, _ in prefill.said] == pytest.approx([at for at in due if at < lease.ended_at])
    assert {said.state for _, said in prefill.said} <= {"lent"}


def test_nothing_is_said_where_it_is_turned_off_or_all_is_well() -> None:
    for log, seconds in ((LogConfig(held_fraction=0), 100.0), (LogConfig(), 9.0)):
        world, prefill, decode = opened(log=log)
        params, _ = world.lent(prefill, "req", [3])
        world.announce(decode, "d", params, 300.0)
        world.live(seconds)
        assert prefill.said == decode.said == []


def test_an_announcement_is_warned_of_on_the_side_that_does_not_pull() -> None:
    world, prefill, decode = opened()
    params, _ = world.lent(prefill, "req", [3])
    world.announce(decode, "d", params, 300.0)
    world.deliver_all()
    world.live(50.0, step=0.05)
    for side in (prefill, decode):
        assert [t - side.epoch for t, _ in side.said] == pytest.approx([10.25, 20.25, 40.25], abs=0.1)
    assert {(s.state, s.number) for _, s in decode.said} == {("announced", 1)}
    # It has its time to be pulled, and its reader renews: no message is late.
    assert [s.is_orderly for side in (prefill, decode) for _, s in side.said] == [True] * 6
    assert "announced and never pulled; its lease is renewed at prefill/tp0@" in decode.said[0][1].waits


def test_a_pull_that_moves_on_is_not_warned_of_and_one_that_is_stuck_later_is() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4, written=True)
    world.announce(decode, "d", params, 300.0)
    world.deliver_all()
    world.live(9.0)
    world.lend(prefill, params)
    pull = world.pull(decode, "d", [9], params, timeout=100.0)
    world.deliver_all()
    world.live(9.0)
    assert decode.said == []
    world.live(2.0)
    ((_, said),) = decode.said
    assert (said.state, said.number, said.oldest) == ("reading", 1, (pull,))
    assert said.waits.startswith("still reading from prefill/tp0@prefill- (world://")


def test_an_unacknowledged_release_is_said_as_long_as_it_is_repeated() -> None:
    world, prefill, decode = opened(pull=PullConfig(gone_s=1000.0))
    params, _ = world.lent(prefill, "req", [3], written=True)
    pull = world.pull(decode, "d", [9], params)
    for _ in range(4):
        world.deliver_all()
        if decode.reads:
            break
    del world.ranks[prefill.name]
    world.complete_reads(decode)
    assert pull.reason is Reason.COMPLETE
    world.advance(60.0)
    assert [(s.state, s.number, round(t - decode.epoch)) for t, s in decode.said] == [
        ("notifying", 1, 10),
        ("notifying", 1, 20),
    ]
    assert decode.said[0][1].waits == "the release is not acknowledged by prefill/tp0@prefill- (world://prefill)"
    assert decode.core.is_idle


def test_two_thousand_leases_of_a_reader_that_died_are_a_line_in_ten_seconds() -> None:
    world, prefill, _ = opened(reuse=False)
    leases = []
    for i in range(2000):
        params = world.params([prefill], f"r{i}", [i % NUM_BLOCKS], BLOCK, lease_s=600.0)
        leases.append(prefill.core.lend(params, 1, world.time(prefill)))
        if i % 200 == 199:
            world.advance(2.0)
    world.settle(prefill)
    world.advance(590.0)
    times = [t for t, _ in prefill.said]
    assert all(b - a > PAUSE_S - 1e-6 for a, b in itertools.pairwise(times))
    assert len(times) <= 2 * 4  # twenty seconds long, at a third and at two thirds
    assert sum(said.number for _, said in prefill.said) == 4000
    first = prefill.said[0][1]
    assert (first.waits, first.oldest) == ("not claimed by any reader", tuple(leases[:3]))


def test_what_is_held_for_twice_as_long_before_it_was_said_is_counted_once() -> None:
    world, prefill, _ = opened()
    for i, lease_s in enumerate((24.0, 27.0, 27.0, 27.0)):
        world.lend(prefill, world.params([prefill], f"r{i}", [i], BLOCK, lease_s=lease_s))
    # After 8 and 16 seconds, and after 9 and 18: but there is a pause.
    world.advance(23.0)
    assert [(t, said.number) for t, said in prefill.said] == [(8.25, 1), (18.25, 4)]


def test_of_many_kinds_the_largest_are_named_and_all_are_counted() -> None:
    world, prefill, decode = opened()
    for i in range(12):
        params, _ = world.lent(prefill, f"r{i}", [i])
        if i < 11:
            world.pull(decode, f"d{i}", [i], params, timeout=5.0, cohort_id=f"cohort-{i}")
    world.deliver_all()
    del world.ranks[decode.name]
    world.advance(11.0)
    assert len(prefill.said) == 9
    assert sum(said.number for _, said in prefill.said) == 12
    assert prefill.said[-1][1].waits == "4 other ways to be held"


@pytest.mark.parametrize("fraction", [-1, 0.001, float("nan"), float("inf"), 1e6, True, "1/3", None])
def test_a_fraction_that_cannot_be_meant_is_refused(fraction: Any) -> None:
    with pytest.raises(ConfigError, match=r"held_fraction is .*from 0(.01)? to 1000 .*or 0 to warn of nothing"):
        LogConfig(held_fraction=fraction)


# -- one name for a rank -----------------------------------------------------------------------------


def test_a_rank_is_written_in_one_way() -> None:
    assert rank_name("decode", 3) == "decode/tp3"
    assert rank_name("decode", 3, 1, "5c3acdd90e818f26") == "decode/pp1/tp3@5c3acdd9"


async def test_whatever_names_a_rank_names_a_process_that_said_so_when_it_started(sim: Bench, logs: Lines) -> None:
    errors: list[Exception] = []
    texts: list[str] = []
    async with sim.pair(lease=LeaseConfig(lease_s=6.0, grant_s=2.0)) as (prefill, decode, group):
        for how in ("good", "fails", "stuck"):
            decode.data.deferred = how != "good"
            params, lent = prefill.lent(group, how, [1], written=True, lease_s=6.0)
            task = asyncio.create_task(decode.engine.pull(how, [(0, [len(how)])], params, timeout_s=4.0))
            await until(lambda: decode.data.running or not decode.data.deferred)
            await until(lambda: prefill.engine.requests())
            texts += [str(h.waits_for) for h in (*prefill.engine.holds(), *decode.engine.holds())]
            texts += [str(r) for r in (*prefill.engine.requests(), *decode.engine.requests())]
            if how == "fails":
                decode.data.fail(next(iter(decode.data.running)))
            elif how == "stuck":
                sim.clock.advance(4.1)
            try:
                await task
            except Exception as exc:
                errors.append(exc)
            decode.data.finish()
            await lent.wait_released()
        # One that is stopped, and one that is never there.
        await prefill.engine.aclose()
        await until(lambda: any(e.get("state") == "gone" for e in logs))
        with pytest.raises(PeerLost) as caught:
            await decode.engine.pull("gone", [(0, [1])], params)
        errors.append(caught.value)
    assert [type(e).__name__ for e in errors[:2]] == ["ReadFailed", "PullTimeout"]
    starts = {e["engine_id"]: e["incarnation"] for e in logs.of("engine_started")}
    found = [json.dumps(e) for e in logs if e["event"] != "engine_started"] + [str(e) for e in errors] + texts
    names = [match for text in found for match in re.findall(r"(?:(\w+)/)?\btp\d+(?:/pp\d)?(@\w{8}\b)?", text)]
    assert len(names) > 50
    assert {(engine, at) for engine, at in names} == {
        (engine, f"@{incarnation[:8]}") for engine, incarnation in starts.items()
    }


def test_what_a_program_compares_names_the_place_and_not_the_process() -> None:
    world, prefill, decode = opened()
    params, lease = world.lent(prefill, "req", [3], written=True)
    world.pull(decode, "d", [9], params)
    world.run()
    ((reader, discharge),) = lease.discharged.items()
    assert (str(reader), discharge.name, discharge.outcome) == ("decode/tp0", "decode/tp0@decode-1", Outcome.COMPLETE)
    # A pull's name is marked as such, after its reader's.
    notes = [str(what) for _, what in lease.history]
    pull_id = decode.ended[0].pull_id
    assert notes[1] == f"granted to decode/tp0@decode-1, pull {pull_id}"
    assert notes[2] == f"released by decode/tp0@decode-1, pull {pull_id}: complete"


# -- what is logged ----------------------------------------------------------------------------------


async def test_a_lease_that_ends_well_is_logged_as_a_whole_or_not_at_all(sim: Bench, logs: Lines) -> None:
    async with sim.pair(log=LogConfig(successes_per_s=3.0)) as (prefill, decode, group):
        for i in range(9):
            params, lent = prefill.lent(group, f"r{i}", [i], written=True)
            await decode.engine.pull(f"d{i}", [(0, [i])], params)
            await lent.wait_released()
        expired = prefill.engine.lend(group.make_params("never", [(0, [30])], 16))
        sim.clock.advance(31)
        await expired.wait_released()
    for i in range(9):
        said = [e["event"] for e in logs if e["engine_id"] == "prefill" and e.get("request_id") == f"r{i}"]
        assert said == (["lease_lent", "lease_granted", "lease_ended"] if i < 3 else [])
    granted = logs.of("lease_granted")
    ended = {e["pull_id"]: e for e in logs.of("pull_ended")}
    for e in granted:
        assert (ended[e["pull_id"]]["rank"], ended[e["pull_id"]]["sequence"]) == (e["reader"], e["sequence"])
    (failed,) = [e for e in logs.of("lease_ended") if e["cause"] == "expired"]
    assert (failed["request_id"], failed["owed"]) == ("never", ["*"])


async def test_what_waits_in_order_is_no_warning(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, "waits", [1], written=True)
        decode.engine.announce("d", params)
        prefill.engine.lend(group.make_params("lone", [(0, [2])], 16))
        await until(lambda: [x.state for x in decode.engine.requests()[0].ranks] == ["granted"])
        await pass_by(sim, 13.5)
        await decode.engine.pull("d", [(0, [1])], params)
    held = [(e["event"], e["level"], [x["request_id"] for x in e["oldest"]]) for e in logs if "oldest" in e]
    assert sorted(held) == [
        ("lease_held", "info", ["waits"]),
        ("lease_held", "warning", ["lone"]),
        ("pull_held", "info", ["d"]),
    ]


async def test_an_idle_engine_gives_a_sign_of_life_every_half_lease(sim: Bench, logs: Lines) -> None:
    async with sim.pair(lease=LeaseConfig(lease_s=30.0)) as (_, _, _):
        await pass_by(sim, 35.0, 2.5)
    alive = logs.of("engine_alive")
    assert sorted(e["engine_id"] for e in alive) == ["decode"] * 2 + ["prefill"] * 2
    assert {(e["level"], e["leases"], e["pulls"], e["blocks_held"], tuple(e["waits_for"])) for e in alive} == {
        ("info", 0, 0, 0, ())
    }


async def test_a_pull_that_is_refused_here_is_logged_with_what_joins_it(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, "p", [1], written=True)
        for groups in ([(0, [999])], [(0, [1]), (0, [2])]):
            with pytest.raises(AsyncKVError):
                await decode.engine.pull("d", groups, params)
        with pytest.raises(AsyncKVError):
            await decode.engine.pull("d", [(0, [1])], {"nonsense": 1})
        with pytest.raises(AsyncKVError):
            decode.engine.announce("d", {"nonsense": 1})
        with pytest.raises(AsyncKVError):
            decode.engine.announce("d", params | {"endpoints": "garbled"})
    refused = logs.of("pull_refused")
    assert [(e["cause"], e.get("prefill_request_id"), e.get("peer"), e.get("sequence")) for e in refused] == [
        ("PlanRefused", "p", "prefill", 0),
        ("PlanRefused", "p", "prefill", 0),
        ("RemoteProtocolError", None, None, None),
        ("RemoteProtocolError", None, None, None),
        ("RemoteProtocolError", "p", "prefill", None),
    ]
    assert all(e["request_id"] == "d" and e["detail"] and e["level"] == "warning" for e in refused)


async def test_a_claim_that_came_before_its_request_is_logged_as_granted_too(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params = group.make_params("r", [(0, [1])], 16)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [1])], params))
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
        prefill.engine.lend(params)
        await task
        await until(lambda: not prefill.engine.statistics().gauges["leases"])
    assert [e["event"] for e in logs if e["event"].startswith("lease")] == [
        "lease_lent",
        "lease_granted",
        "lease_ended",
    ]


async def test_a_failed_handshake_says_so_with_its_seconds(sim: Bench, logs: Lines) -> None:
    sim.network.fate = lambda sender, to, packet: "drop"
    async with sim.pair() as (_, decode, group):
        params = group.make_params("r", [(0, [1])], 16)
        task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params))
        await until(lambda: decode.engine.statistics().gauges["pulls"] == 1)
        sim.clock.advance(5.1)
        said = r"request 'd' failed in handshake: prefill/tp0@.* did not answer within 5 s"
        with pytest.raises(PeerUnreachable, match=said) as caught:
            await task
        assert caught.value.failed_in == pickle.loads(pickle.dumps(caught.value)).failed_in == "handshake"
        with pytest.raises(PeerUnreachable, match="next attempt"):
            await decode.engine.pull("e", [(0, [6])], params)
        sim.network.fate = lambda sender, to, packet: "deliver"
    line, _ = logs.of("pull_ended")
    assert (line["failed_in"], line["phases"]["handshake"]) == ("handshake", pytest.approx(5.0, abs=0.11))
    assert line["phases"]["read"] == line["phases"]["queue"] == 0
    (changed,) = [e for e in logs.of("peer_changed") if e["state"] == "new"]
    assert changed["pulls_failed"] == 1


async def test_seconds_inside_a_read_are_a_read_and_those_after_it_are_drained(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        decode.data.deferred = True
        for i, (how, seconds) in enumerate({"timeout": 6.0, "cancelled": 7.5}.items()):
            params, _ = prefill.lent(group, how, [i], written=True)
            pull = decode.engine.pull(how, [(0, [i])], params, timeout_s=6.0 if how == "timeout" else 60.0)
            task = asyncio.create_task(pull)
            await until(lambda: decode.data.running)
            sim.clock.advance(6.0)
            if how == "cancelled":
                decode.engine.cancel(how)
                sim.clock.advance(1.5)
                decode.data.finish()
            with pytest.raises((PullTimeout, PullCancelled), match="failed in read: "):
                await task
            decode.data.finish()
            (line,) = [e for e in logs.of("pull_ended") if e["request_id"] == how]
            assert (line["failed_in"], line["phases"]["read"], line["seconds"]) == ("read", 6.0, seconds)
            assert line["phases"]["drain"] == seconds - 6.0


@pytest.mark.parametrize("takes", [False, True])
async def test_a_goodbye_is_no_warning_unless_it_takes_pulls_along(sim: Bench, logs: Lines, takes: bool) -> None:
    async with sim.pair(lease=LeaseConfig(lease_s=2.0, grant_s=0.5)) as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True, lease_s=2.0)
        await decode.engine.pull("d", [(0, [1])], params)
        await lent.wait_released()
        if takes:
            other, _ = prefill.lent(group, "s", [2], lease_s=2.0)
            decode.engine.announce("e", other)
            await until(lambda: decode.engine.requests()[0].ranks[0].state == "granted")
        prefill.engine._driver.core.readers.say_goodbye()
        prefill.engine._driver.soon()
        await until(lambda: any(e.get("state") == "gone" for e in logs))
        assert decode.engine.statistics().gauges["pulls_waiting"] == 0
        assert [r.state for r in decode.engine.requests()] == []
        sim.clock.advance(3.0)
    (gone,) = [e for e in logs.of("peer_changed") if e["state"] == "gone"]
    assert (gone["level"], gone.get("pulls_failed", 0)) == (("warning", 1) if takes else ("info", 0))
    assert (gone["how"], gone["detail"].endswith("said goodbye")) == ("goodbye", True)
    failed = [(e["how"], e["failed_with"]) for e in logs.of("pull_ended") if e["cause"] == "peer_lost"]
    assert failed == [("goodbye", [gone["peer"]])] * takes


def test_phases_of_a_pull_that_was_never_pulled_are_its_announcement() -> None:
    world, prefill, decode = opened()
    params = world.params([prefill], "req", [3], 4)
    pull = world.announce(decode, "d", params, 20.0)
    world.live(25.0)
    assert (pull.reason, pull.failed_in) == (Reason.TIMEOUT, "announced")
    assert phases(pull)["announced"] == pytest.approx(20.0)


# -- The ledger of held blocks ----------------------------------------------------------------------------------------

MANY = [*range(20, 21 + 2 * FEW)]
"""Blocks beside which one is held as one of many."""


def take(ledger: Ledger, holder: str, kind: Kind, request_id: str, groups: Mapping[int, Sequence[int]]) -> None:
    ledger.hold(holder, kind, request_id, ledger.check(kind, groups), 0.0)


def test_a_page_is_one_block_whatever_group_names_it() -> None:
    ledger = Ledger([10, 8, 10], (0, 1, 0))
    take(ledger, "lease", "lent", "r1", {0: [5], 1: [3]})
    with pytest.raises(LocalProtocolError, match="block 5 of group 2 cannot be filled: it is lent to 'r1'"):
        take(ledger, "pull", "writing", "r2", {2: [5]})
    take(ledger, "other", "lent", "r3", {2: [5]})
    take(ledger, "pull", "writing", "r2", {1: [5], 2: [6]})
    assert (ledger.num_held("lent"), ledger.num_held("writing")) == (2, 2)
    assert ledger.audit() == []
    with pytest.raises(LocalProtocolError, match="block 7 is named in two groups that share its page"):
        take(ledger, "two", "writing", "r4", {0: [7], 2: [7]})
    for holder in ("lease", "other", "pull"):
        ledger.drop(holder)
    assert (ledger.num_held("lent"), ledger.num_held("writing"), len(ledger)) == (0, 0, 0)
    take(ledger, "pull", "writing", "r2", {2: [5, -1]})
    assert ledger.audit() == []


def test_a_rank_knows_which_of_its_groups_see_the_same_pages() -> None:
    """One page is lent through one group at a time, and never filled through another while it is lent."""
    whole = make_layout(layers=2)
    shared = (whole.views[0], msgspec.structs.replace(whole.views[1], memory=0, group=1))
    groups = tuple(msgspec.structs.replace(whole.groups[0], name=name) for name in "ab")
    layout = msgspec.structs.replace(whole, memories=whole.memories[:1], groups=groups, views=shared)
    core = RankCore(Identity("p", "a" * 32, "agent", b"", layout), EngineConfig(engine_id="p"))
    group = PrefillRanks("p", [Endpoint(0, Address("tcp://127.0.0.1:1"), "a" * 32)])

    def lend(name: str, *blocks: int) -> None:
        core.lend(decode_params(group.make_params(name, [(0, [b]) for b in blocks], BLOCK, written=True)), 1, 0.0)

    with pytest.raises(LocalProtocolError, match="block 3 is named in two groups that share its page"):
        lend("both", 3, 3)
    lend("apart", 3, 4)
    with pytest.raises(LocalProtocolError, match="block 3 of group 1 cannot be filled: it is lent to 'apart'"):
        core.ledger.check("writing", {1: [3]})
    assert core.ledger.num_held("lent") == 2


@pytest.mark.parametrize("beside", [[], MANY], ids=["few", "many"])
def test_dropping_one_lender_leaves_the_others(beside: list[int]) -> None:
    ledger = Ledger([100])
    for name in ("one", "two"):
        take(ledger, name, "lent", name, {0: [5, *beside]})
    ledger.drop("one")
    assert ledger.audit() == []
    assert [h.holder for h in ledger.holders_of(0, 5)] == ["two"]
    with pytest.raises(LocalProtocolError, match=r"block 5 of group 0 cannot be filled: it is lent to 'two'"):
        take(ledger, "pull", "writing", "r", {0: [5]})
    ledger.drop("two")
    take(ledger, "pull", "writing", "r", {0: [5]})


@pytest.mark.parametrize("beside", [[], MANY], ids=["few", "many"])
@pytest.mark.parametrize(("held", "wanted"), [("lent", "writing"), ("writing", "lent"), ("writing", "writing")])
def test_a_writer_is_alone(held: Kind, wanted: Kind, beside: list[int]) -> None:
    ledger = Ledger([100])
    take(ledger, "holder", held, "theirs", {0: [5, *beside]})
    for blocks in ([7, 5], [5, 7, *range(60, 60 + 2 * FEW)]):
        with pytest.raises(LocalProtocolError, match=r"block 5 of group 0 cannot be .* wait until it is returned"):
            take(ledger, "other", wanted, "ours", {0: blocks})
        # What was refused took nothing.
        assert (ledger.audit(), ledger.get("other")) == ([], None)
        assert ledger.holders_of(0, 7) == []


BLOCKS = st.lists(st.integers(-1, 39), unique=True, max_size=40)
STEP = st.tuples(st.sampled_from("abcd"), st.sampled_from(["lent", "writing", "drop"]), BLOCKS)


@given(st.lists(STEP, max_size=20))
def test_the_ledger_is_a_set_of_holders_per_block(steps: Sequence[tuple[str, str, list[int]]]) -> None:
    ledger, model = Ledger([40]), dict[str, tuple[str, set[int]]]()
    for holder, how, given_blocks in steps:
        blocks = {b for b in given_blocks if b >= 0}
        if how == "drop":
            ledger.drop(holder)
            model.pop(holder, None)
        elif holder in model:
            continue
        elif any(blocks & theirs and "writing" in (how, kind) for kind, theirs in model.values()):
            with pytest.raises(LocalProtocolError):
                take(ledger, holder, "lent" if how == "lent" else "writing", holder, {0: given_blocks})
        else:
            take(ledger, holder, "lent" if how == "lent" else "writing", holder, {0: given_blocks})
            model[holder] = how, blocks
        assert ledger.audit() == []
        assert {h.holder for h in ledger} == set(model)
        for block in range(40):
            assert {h.holder for h in ledger.holders_of(0, block)} == {h for h, (_, x) in model.items() if block in x}
        for kind in ("lent", "writing"):
            held = {b for how_held, theirs in model.values() if how_held == kind for b in theirs}
            assert ledger.num_held("lent" if kind == "lent" else "writing") == len(held)
