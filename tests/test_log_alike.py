"""Many requests that fail alike share lines of the log, and whoever reads the log still finds each of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asynckv import LeaseRefused
from asynckv.core.types import Address
from asynckv.core.wire import Release
from asynckv.observe.log import MAX_TOLD
from asynckv.told import MAX_NAMED
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import read_logs
from tests.documented import Lines
from tests.engines import Bench, Side, pass_by, until
from tests.test_leaks_records import row, write
from tests.test_log_evidence import drops, name_of

MANY = 300


async def expire(sim: Bench, prefill: Side, group: Any) -> list[dict[str, Any]]:
    params: list[dict[str, Any]] = [group.make_params(f"r{i}", [(0, [i % 8])], 16, written=True) for i in range(MANY)]
    lent = [prefill.engine.lend(x) for x in params]
    await pass_by(sim, 30.2)
    for x in lent:
        await x.wait_released()
    return params


async def refusal(decode: Side, request_id: str, params: dict[str, Any]) -> BaseException | None:
    """Pull without that any time passes."""
    task = asyncio.create_task(decode.engine.pull(request_id, [(0, [1])], params))
    await until(lambda: task.done() and not decode.engine.holds())
    return task.exception()


def logs_of(logs: Lines, path: Path) -> Any:
    (path / "a.jsonl").write_text(logs.stream.getvalue())
    return read_logs([path / "a.jsonl"])


async def test_leases_of_a_killed_reader_share_lines_too(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params = [group.make_params(f"r{i}", [(0, [i % 8])], 16, written=True) for i in range(MANY)]
        lent = [prefill.engine.lend(x) for x in params]
        for i, each in enumerate(params):
            decode.engine.announce(f"d{i}", each)
        await until(lambda: all(x._lease.grants for x in lent))
        (grant,) = lent[0]._lease.grants.values()
        ports = sim.network.ports
        gone = {to: ports.pop(to) for to in (grant.ways[0], Address(prefill.engine.endpoint.address))}
        await pass_by(sim, 15.0)
        ports.update(gone)
        assert (len(logs.of("lease_ended")) - MAX_TOLD) < 10
        lines = logs.of("leases_ended_alike")
        assert sum(x["requests"] for x in lines) + len(logs.of("lease_ended")) == MANY
        assert "gone" in str(logs.of("lease_ended")[0]["history"])


async def test_leases_that_expire_alike_share_lines_and_are_all_named(sim: Bench, logs: Lines, tmp_path: Path) -> None:
    async with sim.pair() as (prefill, _, group):
        await expire(sim, prefill, group)
        full = logs.of("lease_ended")
        assert len(full) == MAX_TOLD
        assert all(x["history"][-1][1] == "expired" and x["owed"] == ["*"] for x in full)
        await pass_by(sim, 3.0)  # the rest is told without an end of the engine
        lines = logs.of("leases_ended_alike")
        assert [x["requests"] for x in lines] == [64, 64, 64, 64, MANY - MAX_TOLD - 4 * MAX_NAMED]
        assert {(x["cause"], x["level"]) for x in lines} == {("expired", "warning")}
    service = join(read := logs_of(logs, tmp_path))
    assert not read.skipped
    ended = {x.text("request_id"): x for x in read.records if x.event == "lease_ended"}
    assert set(ended) == {f"r{i}" for i in range(MANY)}
    assert [ended[f"r{i}"].integer("sequence") for i in range(MANY)] == list(range(MANY))
    for x in ended.values():
        assert x.number("seconds") == pytest.approx(30.0, abs=0.1)
        assert (x.integer("blocks"), x.texts("owed")) == (1, ("*",))
    leaks = [x for x in find_leaks(Presence(Axis(service))) if x.request_id.startswith("r")]
    assert len(leaks) == MANY
    # Whether the decode engine's log reaches far enough is not known: lines have the time of the wall, leases do not.
    assert {x.cause for x in leaks} <= {CAUSE.NEVER_CLAIMED, CAUSE.NEVER_HEARD_OF}


async def test_pulls_that_are_refused_alike_share_lines_and_say_as_whom(
    sim: Bench, logs: Lines, tmp_path: Path
) -> None:
    async with sim.pair() as (prefill, decode, group):
        params = await expire(sim, prefill, group)
        for i, x in enumerate(params):
            assert isinstance(await refusal(decode, f"d{i}", x), LeaseRefused)
        first, *short = logs.of("pull_ended")
        assert len(short) == MAX_TOLD
        assert "history" in first
    # What had not been told is told before the engine's last line.
    last = [x["event"] for x in logs if x["engine_id"] == "decode"]
    assert last.index("pulls_ended_alike") < last.index("engine_stopped")
    assert sum(x["requests"] for x in logs.of("pulls_ended_alike")) == MANY - 1 - MAX_TOLD
    pulls = {x.request_id: x for r in join(logs_of(logs, tmp_path)).requests for x in r.pulls.values()}
    assert set(pulls) == {f"d{i}" for i in range(MANY)}
    assert {(x.cause, x.failed_in, x.detail) for x in pulls.values()} == {
        (first["cause"], first["failed_in"], first["detail"])
    }
    assert all(pulls[f"d{i}"].prefill_request_id == f"r{i}" for i in range(MANY))


async def test_failures_that_take_turns_are_each_told_in_full_once(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, decode, group):
        params = await expire(sim, prefill, group)
        for i, x in enumerate(params[:20]):
            wrong = {**x, "engine_id": "another"} if i % 2 else x
            assert await refusal(decode, f"d{i}", wrong) is not None
    lines = logs.of("pull_ended")
    assert len(lines) == 20
    assert len([x for x in lines if "history" in x]) == len({(x["cause"]) for x in lines}) == 2


async def test_readers_that_claimed_are_named_with_their_pulls(sim: Bench, logs: Lines, tmp_path: Path) -> None:
    many = MAX_TOLD + 5
    async with sim.pair() as (prefill, decode, group):
        sim.network.fate = drops(Release)
        params = [group.make_params(f"r{i}", [(0, [i % 8])], 16, written=True) for i in range(many)]
        for i, x in enumerate(params):
            prefill.engine.lend(x)
            assert await refusal(decode, f"d{i}", x) is None
        await pass_by(sim, 35.0)
        assert len(logs.of("lease_ended")) == MAX_TOLD
        [line] = logs.of("leases_ended_alike")
        assert (line["cause"], line["alike"]["owed"]) == ("expired", [name_of(decode)])
    requests = join(logs_of(logs, tmp_path)).requests
    assert len(requests) == many
    for request in requests:  # both sides are joined by the pull id, which only the claim knows
        [lease] = request.leases.values()
        assert {x.pull_id for x in lease.claims.values()} == set(request.pulls)


async def test_a_lease_whose_history_says_more_keeps_a_line_of_its_own(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (prefill, _, group):
        lent = [prefill.engine.lend(group.make_params(f"r{i}", [(0, [i % 8])], 16)) for i in range(2 * MAX_TOLD + 4)]
        for x in lent[::2]:
            x.withdraw()
        await pass_by(sim, 33.0)
        [line] = logs.of("leases_ended_alike")
        assert (line["cause"], line["requests"]) == ("expired", 2)
        assert line["each"]["request_id"] == ["r65", "r67"]
        own = [x for x in logs.of("lease_ended") if x["cause"] == "revoked"]
        assert len(own) == MAX_TOLD + 2
        assert all(len(x["history"]) == 3 for x in own)


def test_a_line_about_many_is_read_as_a_line_for_each(tmp_path: Path) -> None:
    alike = {"cause": "expired", "owed": ["*"], "blocks": 2}
    each = {"request_id": ["a", "b"], "sequence": [1, None], "ago_s": [0.5, 0.0]}
    logs = read_logs(
        [write(tmp_path / "a.log", row("leases_ended_alike", cause="expired", requests=2, alike=alike, each=each))]
    )
    first, second = logs.records
    assert (first.event, first.text("request_id"), first.integer("sequence"), first.texts("owed")) == (
        "lease_ended",
        "a",
        1,
        ("*",),
    )
    assert (second.event, second.text("request_id"), second.integer("sequence")) == ("lease_ended", "b", -1)
    assert second.at - first.at == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 0),
        ({"alike": 3, "each": []}, 0),
        ({"alike": [], "each": {"request_id": "ab"}}, 0),
        ({"alike": None, "each": {"request_id": ["a", "b"], "sequence": [1]}}, 1),
        ({"alike": {"ago_s": 1e23}, "each": {"request_id": ["a", 7]}}, 2),
    ],
)
def test_a_damaged_line_about_many_is_no_harm(tmp_path: Path, fields: dict[str, Any], number: int) -> None:
    logs = read_logs([write(tmp_path / "a.log", row("pulls_ended_alike", **fields), row())])
    assert len([x for x in logs.records if x.event == "pull_ended"]) == number
    assert len(logs.records) == number + 1
    assert all(1795362402.1 - 61 <= x.at <= 1795362403 for x in logs.records)
    join(logs)
