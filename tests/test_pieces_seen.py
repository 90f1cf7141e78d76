"""What is seen of a head start: in accounts, results, logs, metrics and `why`. No fate of a piece is a warning."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from asynckv import Engine, LogConfig, Metrics, PrefillRanks, PullConfig, PullResult
from asynckv.account.values import Facts
from asynckv.testing.fabric import SimData
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.findings import Findings, find
from asynckv.tools.diagnose.leaks_live import records_of
from asynckv.tools.diagnose.reading import Looking
from tests.engines import Bench, until
from tests.observed import registered
from tests.test_follows import TICKET, target_of
from tests.test_head_start import Service, served
from tests.test_inspect import account
from tests.test_inspect_ask import looking, pair

HERE = [(0, [1, 2, 3, 4])]
BYTES = 16 * 1024  # one block of a side


def test_a_head_start_is_listed_as_such_with_all_blocks_of_its_request_and_without_its_pieces() -> None:
    service, world, _, decode = served()
    service.early(2)
    world.now += 3.0
    now = world.time(decode)
    follow, early = decode.inspect.requests(now)
    assert (follow.kind, early.kind, early.state, early.request_id) == ("follow", "early", "early", "d")
    assert (early.blocks, early.age_s, early.left_s) == (4, 3.0, 357.0)
    assert ("early", {0: (1, 2, 3, 4)}) in [(x.reason, x.blocks) for x in decode.inspect.holds(now)]
    seen = account(world, decode)
    assert [(x.kind, x.phase, x.number) for x in seen.counts] == [("early", "early", 1), ("follow", "following", 1)]
    assert [x.kind for x in seen.requests] == ["follow"]
    assert [x.request_id for x in decode.inspect.stragglers(now)] == ["d"]
    assert decode.inspect.gauges()["pulls_unanswered"] == 0
    params, _ = service.lend()
    service.pull(params)
    assert [x.kind for x in decode.inspect.requests(now)] == ["early"], "the piece is still read"
    service.ended_well()
    assert decode.inspect.requests(now) == ()


def test_blocks_that_a_piece_may_still_write_are_shown_until_they_are_given_up_and_after_that() -> None:
    service, world, _, decode = served(pull=PullConfig(held_s=20.0))
    service.early(2)
    world.live(15.0)
    assert decode.said == [], "a piece that hangs is not reported as held"
    params, _ = service.lend()
    service.pull(params, 5.0)
    for seconds, reason in ((6.0, "quarantined"), (20.0, "retired")):
        world.live(seconds)
        (seen,) = decode.inspect.requests(world.time(decode))
        (hold,) = decode.inspect.holds(world.time(decode))
        assert (seen.kind, seen.blocks, hold.reason, hold.blocks) == ("pull", 4, reason, {0: (1, 2, 3, 4)})
        assert [(x.kind, x.phase) for x in account(world, decode).counts] == [("pull", reason)]
    assert {x.state for _, x in decode.said} == {"quarantined"}


def test_why_does_not_take_a_head_start_for_late_however_long_its_prompt_is_computed() -> None:
    service, world, _, decode = served()
    service.early(2)
    world.now += 50.0
    follow, early = decode.inspect.requests(world.time(decode))
    told = replace(account(world, decode), facts=Facts(retrying=(early,), num_retrying=1, uptime_s=60.0))
    lines = list(records_of([Answer(address="decode", account=told, at=1000.0)], 1000.0))
    assert [x.fields["state"] for x in lines if x.event == "pull_held"] == [follow.state, "early"]
    assert [x for x in lines if x.level == "warning"] == []


def counted(engine: Engine, name: str) -> int:
    return engine.statistics().counters.get(f"pieces.{name}", 0)


async def story(prefill: Engine, decode: Engine, data: SimData, group: PrefillRanks) -> PullResult:
    """Live through all fates of a piece: one is read, one is recalled while it is read, and one is never read."""

    def piece(first: int, end: int) -> None:
        params = group.make_params(
            f"p/{end}", [(16 * first, [5, 6, 7, 8][first:end])], 16 * end, written=True, recall=True
        )
        prefill.lend_piece(params, TICKET)

    follow = asyncio.create_task(decode.follow("d", target_of(prefill), groups=HERE))
    await until(lambda: prefill.is_followed(TICKET))
    piece(0, 1)
    await until(lambda: counted(decode, "complete") and prefill.is_followed(TICKET))
    data.deferred = True
    piece(1, 2)
    await until(lambda: data.running)
    prefill.end_pieces(TICKET)
    data.deferred = False
    data.finish()
    await until(lambda: counted(decode, "unknown_key") and prefill.is_followed(TICKET))
    params = group.make_params("p", [(0, [5, 6, 7, 8])], 64, written=True)
    lent = prefill.lend(params, ticket=TICKET)
    piece(1, 3)  # too late
    result = await decode.pull("d", HERE, await follow)
    await lent.wait_released()
    return result


def said(findings: Findings) -> list[Any]:
    return [*findings.wrong, *findings.limits, *findings.notes, *findings.late]


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_the_line_of_a_pull_tells_of_its_pieces_and_nothing_warns_of_what_became_of_them(
    level: Any, tmp_path: Path
) -> None:
    async with Bench(False).pair(log=LogConfig(file=str(tmp_path / "{engine_id}.jsonl"), level=level)) as two:
        prefill, decode, group = two
        result = await story(prefill.engine, decode.engine, decode.data, group)
        assert prefill.blocks([5, 6, 7, 8]) == decode.blocks([1, 2, 3, 4])
    assert (result.num_pieces, result.piece_bytes, result.num_bytes) == (1, BYTES, 3 * BYTES)
    lines = [
        json.loads(x) for name in ("prefill", "decode") for x in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    (ended,) = (x for x in lines if x["event"] == "pull_ended")
    assert (ended["pieces"], ended["piece_bytes"], ended["bytes"]) == (1, BYTES, 3 * BYTES)
    assert {x["level"] for x in lines} <= {"debug", "info"}
    assert {x["request_id"] for x in lines if x["event"].startswith(("lease_", "pull_"))} == {"p", "d"}
    assert {x.get("pull_id", result.pull_id) for x in lines} == {result.pull_id}
    assert said(find(Looking([str(tmp_path)], None, None, None, 1.0).look())) == []


async def test_why_finds_nothing_wrong_with_a_head_start_that_lasts() -> None:
    async with pair() as (prefill, decode, group):
        follow = asyncio.create_task(decode.follow("d", target_of(prefill), groups=HERE))
        await until(lambda: prefill.is_followed(TICKET))
        params = group.make_params("p/1", [(0, [5])], 16, written=True, recall=True)
        prefill.lend_piece(params, TICKET)
        await until(lambda: counted(decode, "complete"))
        seen, stories = await anyio.to_thread.run_sync(looking, decode.endpoint.address, "d")
        assert [x.kind for x in seen.answers[0].requests] == ["follow", "early"]
        found = find(seen)
        assert (found.wrong, found.late, [x.code for x in found.notes]) == ([], [], ["follow"])
        assert stories
        decode.cancel("d")
        with pytest.raises(Exception, match="cancelled"):
            await follow


async def test_metrics_count_pieces_apart_from_pulls_and_loans() -> None:
    async with Bench(False).pair() as (prefill, decode, group):
        await story(prefill.engine, decode.engine, decode.data, group)
        registry = registered(Metrics(prefill.engine, decode.engine))

        def value(name: str, engine: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"asynckv_{name}", {"engine_id": engine, "rank": "tp0", **labels})

        assert (value("pieces_lent_total", "prefill"), value("pieces_offered_total", "prefill")) == (2, 2)
        ends = {x: value("pieces_ended_total", "decode", reason=x) for x in ("complete", "unknown_key", "timeout")}
        assert ends == {"complete": 1, "unknown_key": 1, "timeout": 0}
        assert (value("leases_lent_total", "prefill"), value("pulls_started_total", "decode")) == (1, 1)
        assert value("pulls_ended_total", "decode", reason="complete") == 1
        assert value("pulls_ended_total", "decode", reason="unknown_key") == 0


def test_a_piece_that_one_rank_never_lends_does_not_hold_up_the_pull() -> None:
    service = Service(2, 1)
    world, (first, second) = service.world, service.prefill
    service.early(1, [first])
    world.run(1.0)
    for rank in (first, second):  # a preemption, before the second rank has got the order
        rank.core.prefill.offers.end_pieces(TICKET)
    params, _ = service.lend()
    world.run()
    service.pull(params)
    world.live(3.0)
    service.ended_well()
