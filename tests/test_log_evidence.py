"""What the logs say of a request whose blocks did not come back in time: enough to tell the causes apart."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest

from asynckv import LeaseConfig, PullConfig, PullError, PullTimeout
from asynckv.core.lease import MAX_REFUSALS
from asynckv.core.types import Cohort, Outcome, PullId, ReplyTo, decode_params
from asynckv.core.wire import Claim, Hello, Message, Release, blocks_digest, decode_packet, encode_packet
from asynckv.edges.kernel import identity
from asynckv.engine.lag import LoopLag
from tests.documented import Lines
from tests.engines import Bench, Side, pass_by, until


def drops(*kinds: type[Message]) -> Any:
    """Lose every packet that has a message of such a kind."""

    def fate(sender: str, to: str, packet: bytes) -> str:
        return "drop" if any(isinstance(m, kinds) for m in decode_packet(packet).messages) else "deliver"

    return fate


def name_of(side: Side) -> str:
    return f"{side.engine.config.engine_id}/tp0@{side.engine.incarnation[:8]}"


async def test_a_start_says_where_it_runs_and_how_long_things_last(sim: Bench, logs: Lines) -> None:
    async with sim.pair():
        pass
    started = logs.one("engine_started", "decode")
    assert (started["host"], started["pid"]) == (socket.gethostname(), os.getpid())
    assert identity().items() <= started.items()
    assert set(identity()) == {"boot_id", "pid_namespace", "pid_began"}
    lease, pull = LeaseConfig(), PullConfig()
    said = {name: started[name] for name in ("lease_s", "grant_s", "timeout_s", "announce_s", "held_s")}
    assert said == {
        "lease_s": lease.lease_s,
        "grant_s": lease.grant_s,
        "timeout_s": pull.timeout_s,
        "announce_s": pull.announce_s,
        "held_s": pull.held_s,
    }
    assert started["release_timeout_s"] == pull.release_timeout_s


async def test_a_log_that_ends_says_with_what(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        await decode.engine.pull("d", [(0, [6])], params)
        await lent.wait_released()
    assert logs.one("engine_stopped", "prefill")["counters"]["leases.released"] == 1
    stopped = logs.one("engine_stopped", "decode")
    assert (stopped["counters"]["pulls.complete"], stopped["cut_short"]) == (1, 0)


async def test_a_reader_is_met_once_per_start_of_its_process(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        for i in range(2):
            params, _ = prefill.lent(group, f"r{i}", [i], written=True)
            await decode.engine.pull(f"d{i}", [(0, [6])], params)
        met = logs.one("reader_met", "prefill")
        assert (met["reader"], met["reader_incarnation"]) == (name_of(decode), decode.engine.incarnation)
        states = [e["state"] for e in logs if e["event"] in ("peer_changed", "reader_met") and e.get("state")]
        assert states[:2] == ["connecting", "loading"]
    order = [(e["event"], e.get("state")) for e in logs]
    assert order.index(("peer_changed", "connecting")) < order.index(("reader_met", None))
    assert order.index(("reader_met", None)) < order.index(("peer_changed", "loading"))


async def test_a_reader_that_is_turned_down_is_named_with_the_cause(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params = group.make_params("r", [(0, [1])], 16, written=True)
        wrong = {**params, "engine_id": "another"}
        with pytest.raises(PullError):
            await decode.engine.pull("d", [(0, [6])], wrong)
        (refused,) = logs.of("reader_refused", "prefill")
        assert (refused["reader"], refused["said"], refused["cause"]) == (name_of(decode), "hello", "wrong_target")
        assert "correct the endpoint" in refused["detail"]
        # What was meant for an earlier start of this process.
        core = prefill.engine._driver.core
        claim = Claim(decode_params(params).key, "r", Cohort("decode"), "p-1", 7, bytes(16), 1.0)
        core.receive(ReplyTo(b"x"), encode_packet("5" * 32, "6" * 32, [claim]), sim.clock.now())
        prefill.engine._driver.soon()
        await until(lambda: len(logs.of("reader_refused")) == 2)
        refused = logs.of("reader_refused")[1]
        assert (refused["reader"], refused["said"], refused["cause"]) == ("decode/tp0@55555555", "claim", "restarted")


async def test_doctor_is_no_reader_whose_log_one_would_look_for(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, _, _):
        core = prefill.engine._driver.core
        for name in ("asynckv-doctor-77", "decode"):
            hello = Hello(1, 1, 0, "prefill", 0, Cohort(name))
            core.receive(ReplyTo(name.encode()), encode_packet(f"{name:0>32}", "", [hello]), sim.clock.now())
        prefill.engine._driver.soon()
        await until(lambda: logs.of("reader_met"))
        assert logs.one("reader_met", "prefill")["reader"].startswith("decode/")


async def test_strangers_cannot_fill_the_log(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, _, _):
        core = prefill.engine._driver.core
        for i in range(300):
            for engine_id in ("another", "prefill"):
                hello = Hello(1, 1, 0, engine_id, 0, Cohort(f"stranger-{i}"))
                to = ReplyTo(i.to_bytes(4))
                core.receive(to, encode_packet(f"{i:032x}", "", [hello]), sim.clock.now())
        prefill.engine._driver.soon()
        await until(lambda: len(logs.of("reader_met")) == 300)
        assert len(logs.of("reader_refused")) == 10
        sim.clock.advance(2.0)
        hello = Hello(1, 1, 0, "another", 0, Cohort("stranger"))
        core.receive(ReplyTo(b"1"), encode_packet("7" * 32, "", [hello]), sim.clock.now())
        prefill.engine._driver.soon()
        await until(lambda: len(logs.of("reader_refused")) == 11)
        assert logs.of("reader_refused")[-1]["not_logged"] == 290


async def test_a_release_under_another_id_is_seen_on_both_sides(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, lent = prefill.lent(group, "chatcmpl-1", [1], written=True)
        renamed = {**params, "request_id": "chatcmpl-2"}
        decode.engine.cancel("d", renamed)
        await until(lambda: logs.of("release_refused"))
        await pass_by(sim, 32.0, 8.0)  # 10, 20, 30
        await lent.wait_released()
    said = logs.one("release_refused", "decode")
    assert (said["request_id"], said["prefill_request_id"], said["sequence"]) == ("d", "chatcmpl-2", 0)
    assert (said["peer"], said["ranks"], said["cause"]) == ("prefill", [name_of(prefill)], "wrong_request")
    assert said["rank"] == name_of(decode)
    for entry in (logs.one("lease_ended", "prefill"), logs.of("lease_held", "prefill")[0]["oldest"][0]):
        ((after, what, reason, who, detail, limit),) = entry["refused"]
        assert (after, what, reason, who, limit or "none") == (0.0, "release", "wrong_request", name_of(decode), "none")
        assert "another prefill request id" in detail
    assert logs.one("lease_ended", "prefill")["owed"] == ["*"]


async def test_a_release_that_is_never_acknowledged_is_a_warning(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        sim.network.fate = drops(Release)
        await decode.engine.pull("d", [(0, [6])], params)
        await pass_by(sim, 31.0)
        await lent.wait_released()
        await until(lambda: logs.of("release_unanswered"))
    said, pulled = logs.one("release_unanswered", "decode"), logs.one("pull_ended")
    assert (said["cause"], said["outcome"], said["ranks"]) == ("timeout", "complete", [name_of(prefill)])
    ids = ("request_id", "prefill_request_id", "sequence", "peer", "pull_id")
    assert [said[k] for k in ids] == [pulled[k] for k in ids] == ["d", "r", 0, "prefill", said["pull_id"]]
    assert said["seconds"] == pytest.approx(30.0, abs=0.2)
    ended = logs.one("lease_ended")
    assert (ended["cause"], ended["owed"], "refused" in ended) == ("expired", [name_of(decode)], False)
    claim = ended["claims"][name_of(decode)]
    assert claim["pull_id"] == said["pull_id"]
    assert 0 <= claim["claimed_s"] <= claim["heard_s"] < 1


async def test_an_engine_that_closes_names_its_unacknowledged_releases(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        sim.network.fate = drops(Release)
        await decode.engine.pull("d", [(0, [6])], params)
    said = logs.one("release_unanswered", "decode")
    assert (said["cause"], said["sequence"], said["ranks"]) == ("engine_closed", 0, [name_of(prefill)])
    assert logs.one("lease_ended")["revoked_by"] == "closed"


async def test_a_pull_that_fails_says_what_it_waited_for(sim: Bench, logs: Lines) -> None:
    async with sim.pair(pull=PullConfig(total_requests=1, window_requests=1)) as (prefill, decode, group):
        decode.data.deferred = True
        tasks = []
        for i, written in enumerate((True, True)):
            params, _ = prefill.lent(group, f"r{i}", [i], written=written)
            tasks.append(asyncio.create_task(decode.engine.pull(f"d{i}", [(0, [i])], params, timeout_s=6.0)))
            await until(lambda: decode.data.running)
        await until(lambda: not decode.engine.statistics().gauges["pulls_unanswered"])
        params = group.make_params("r2", [(0, [2])], 16)
        tasks.append(asyncio.create_task(decode.engine.pull("d2", [(0, [2])], params, timeout_s=6.0)))
        await until(lambda: any(r.state == "not_lent" for x in decode.engine.requests() for r in x.ranks))
        sim.clock.advance(6.1)
        for task in tasks:
            with pytest.raises(PullError):
                await task
        decode.data.finish()
    ended = {e["request_id"]: e for e in logs.of("pull_ended")}
    assert ended["d0"]["waited_for"].startswith("still reading from prefill/tp0@")
    assert ended["d1"]["waited_for"] == "still queued behind others"
    assert ended["d2"]["waited_for"].startswith("not lent yet by prefill/tp0@")
    # In short, when the same has just been said, but with all that joins it.
    assert {ended[k]["sequence"] for k in ended} == {0, 1, 2}
    assert {ended[k]["peer"] for k in ended} == {"prefill"}
    assert all("sequence" in e and "peer" in e for e in logs.of("blocks_returned"))


async def test_a_release_that_came_too_early_is_told_when_its_request_is_lent(sim: Bench, logs: Lines) -> None:
    async with sim.pair(lease=LeaseConfig(parked_s=5.0)) as (prefill, decode, group):
        params = group.make_params("r", [(0, [1])], 16, written=True)
        decode.engine.cancel("d", params)
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
        sim.clock.advance(6.0)
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 0)
        lent = prefill.engine.lend(params)
        sim.clock.advance(31.0)
        await lent.wait_released()
    ((after, what, reason, who, detail, _),) = logs.one("lease_ended")["refused"]
    assert (what, reason, who) == ("release", "parked_too_long", name_of(decode))
    assert after <= 0
    assert "parked_s 5" in detail


@pytest.mark.parametrize(("how", "cause"), [("caller", "revoked"), ("withdraw", "revoked"), ("suspended", "revoked")])
async def test_a_lease_that_was_taken_back_says_by_whom(sim: Bench, logs: Lines, how: str, cause: str) -> None:
    async with sim.pair() as (prefill, _, group):
        params, lent = prefill.lent(group, "r", [1], written=True)
        if how == "caller":
            lent.withdraw()
        elif how == "withdraw":
            prefill.engine.withdraw(params)
        else:
            await prefill.engine.suspend()
        await lent.wait_released()
    ended = logs.one("lease_ended")
    assert (ended["cause"], ended["revoked_by"]) == (cause, how)


async def test_a_lease_that_was_looked_at_too_late_says_how_late(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, _, group):
        prefill.engine._driver.lag = lag = LoopLag(1.0, lambda: {"waited_s": sim.clock.now() / 4})
        lag.note(sim.clock.now() + 28.0)
        lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16, written=True))
        sim.clock.advance(29.0)
        await asyncio.sleep(0)
        assert lag.note(sim.clock.now())
        sim.clock._now += 12.0  # the loop is away
        sim.clock.advance(0.0)
        await lent.wait_released()
    assert (logs.one("lease_ended")["cause"], logs.one("lease_ended")["late_s"]) == ("expired", 11.0)
    away = logs.of("loop_was_away", "prefill")[0]
    assert away["seconds"] > 11
    assert away["waited_s"] == 12.0 / 4


async def test_what_a_reader_repeats_is_kept_once(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, _, group):
        params = decode_params(group.make_params("r", [(0, [1])], 16, written=True))
        lent = prefill.engine.lend(params)
        core, digest = prefill.engine._driver.core, blocks_digest(params)
        for i in range(200):
            for who in ("9" * 32, f"{i:08x}" * 4):
                release = Release(params.key, "wrong", Cohort("d"), PullId(f"p{i}"), Outcome.COMPLETE)
                claim = Claim(params.key, "wrong", Cohort("d"), f"p{i}", i + 1, digest, 1.0)
                core.receive(ReplyTo(b"x"), encode_packet(who, "", [release, claim]), sim.clock.now())
        (lease,) = core.prefill.leases.values()
        assert len(lease.refused) == MAX_REFUSALS
        lent.withdraw()
        await lent.wait_released()
    ended = logs.one("lease_ended")
    assert len({tuple(x[1:4]) for x in ended["refused"]}) == len(ended["refused"]) == MAX_REFUSALS


async def test_a_failure_is_never_left_out(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        tasks = []
        for i in range(30):
            params = group.make_params(f"r{i}", [(0, [i])], 16)
            tasks.append(asyncio.create_task(decode.engine.pull(f"d{i}", [(0, [i])], params, timeout_s=1.0)))
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 30)
        sim.clock.advance(1.1)
        for task in tasks:
            with pytest.raises(PullTimeout):
                await task
    assert {e["sequence"] for e in logs.of("pull_ended")} == set(range(30))


async def test_of_the_claims_that_came_before_their_request_only_the_first_are_logged(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, _, group):
        params = decode_params(group.make_params("r", [(0, [1])], 16, written=True))
        digest = blocks_digest(params)
        claims = [Claim(params.key, "r", Cohort("c"), PullId(f"p{i}"), i + 1, digest, 1.0) for i in range(20)]
        prefill.engine._driver.core.receive(ReplyTo(b"x"), encode_packet("9" * 32, "", claims), sim.clock.now())
        prefill.engine.lend(params)
    assert [line["pull_id"] for line in logs.of("lease_granted")] == [f"p{i}" for i in range(8)]


async def test_no_line_is_long_however_much_there_is_to_say(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        name = "n" * 16_000
        params = decode_params(group.make_params(name, [(0, [1])], 16, written=True))
        lent = prefill.engine.lend(params)
        core, digest = prefill.engine._driver.core, blocks_digest(params)
        for i in range(600):
            cohort, pull_id = Cohort("c" * 500), PullId(f"p{i}".ljust(120, "p"))
            claim = Claim(params.key, name, cohort, pull_id, i + 1, digest, 1.0)
            release = Release(params.key, name, cohort, pull_id, Outcome.RETRY)
            core.receive(ReplyTo(b"x"), encode_packet("9" * 32, "", [claim, release]), sim.clock.now())
        prefill.engine._driver.soon()
        for i in range(50):
            prefill.engine._driver._internal_error(ValueError("v" * 100_000))
            decode.engine._driver.on_refused("x" * 9000, f"{i}" * 100_000)
        sim.clock.advance(40.0)
        await lent.wait_released()
    assert max(map(len, logs.stream.getvalue().splitlines())) < 100_000
    ended = logs.one("lease_ended")
    assert (len(ended["history"]), len(ended["request_id"])) == (129, 4096)
    assert ended["history"][32][1].endswith(" entries are left out")
    assert ended["history"][-1][1] == "expired"
    assert len(logs.of("internal_error")) == len(logs.of("refused")) == 10
    assert len(logs.of("lease_granted")) <= 8
