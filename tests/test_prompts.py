"""Prompts that a scheduler counts: in the log, in metrics, and what `asynckv why` makes of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from asynckv.embed import EngineDesk
from asynckv.embed.orders import CountPrompts
from asynckv.engine import Engine
from asynckv.integrations.vllm.options import WORDS
from asynckv.observe.metrics import Metrics
from asynckv.told import PromptsCounted
from asynckv.tools.cli import app
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.causes import HEADING
from asynckv.tools.diagnose.findings import Finding, Seen, find
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks_live import records_of
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs, Record
from asynckv.tools.diagnose.timeline_model import ground
from tests.documented import Lines
from tests.engines import Bench, pass_by, until
from tests.observed import answer_of
from tests.test_findings import START, say, screen, well

NONE = PromptsCounted(without_params=200, in_a_row=200, in_a_row_s=12.0)


def said(logs: Lines) -> list[dict[str, Any]]:
    names = ("level", "with_params", "without_params", "computed_locally", "in_a_row")
    return [{name: x[name] for name in names if name in x} for x in logs.of("prompts_counted")]


async def count(engine: Engine, counted: PromptsCounted) -> None:
    EngineDesk(engine).submit([CountPrompts(counted)])
    await until(lambda: engine._driver.recorder.prompts is counted)


async def test_counts_are_logged_soon_then_seldom_and_the_last_ones_in_any_case(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (_, decode, _):
        for i in range(1, 21):
            await count(decode.engine, PromptsCounted(with_params=i))
            await pass_by(sim, 5.0)
        await pass_by(sim, 60.0)
        lines = said(logs)
        assert lines[0]["with_params"] == 1
        assert lines[-1]["with_params"] == 20  # within a minute, although nothing followed
        assert len(lines) == 8  # after 1, 2, 4, 8 s and so on
        await pass_by(sim, 200.0)
        assert said(logs) == lines
        await count(decode.engine, PromptsCounted(with_params=21))
        await pass_by(sim, 3.0)
        await count(decode.engine, PromptsCounted(with_params=22))
    assert [x["with_params"] for x in said(logs)[-2:]] == [21, 22]
    assert {x["level"] for x in said(logs)} == {"info"}


async def test_the_first_of_a_cause_and_a_long_row_are_logged_at_once_as_warnings(sim: Bench, logs: Lines) -> None:
    async with sim.pair() as (_, decode, _):
        for computed in ({"spent": 1}, {"spent": 2}, {"spent": 2, "no_params": 1}, {"spent": 2, "no_params": 9}):
            await count(decode.engine, PromptsCounted(with_params=9, computed_locally=computed))
        assert [(x["level"], x["computed_locally"]) for x in said(logs)] == [
            ("warning", {"spent": 1}),
            ("warning", {"spent": 2, "no_params": 1}),
        ]
        for row in (49, 50, 51):
            await count(decode.engine, PromptsCounted(without_params=row, in_a_row=row, in_a_row_s=30.0))
        assert [(x["level"], x["in_a_row"]) for x in said(logs)[2:]] == [("warning", 50)]


async def test_metrics_show_the_counts(sim: Bench) -> None:
    async with sim.pair() as (_, decode, _):
        registry, metrics = CollectorRegistry(), Metrics(decode.engine)
        registry.register(metrics)

        def shown() -> list[str]:
            text = generate_latest(registry).decode().splitlines()
            return [x for x in text if x.startswith(("asynckv_prompts_total", "asynckv_computed_locally_total"))]

        assert [float(x.split()[-1]) for x in shown()] == [0.0] * (2 + len(WORDS["computed_locally"]))
        await count(decode.engine, PromptsCounted(3, 2, {"no_params": 1}, in_a_row=2, in_a_row_s=4.0))
        here = 'engine_id="decode"'
        assert {x.replace(',rank="tp0"', "") for x in shown() if not x.endswith(" 0.0")} == {
            f'asynckv_prompts_total{{{here},params="with_params"}} 3.0',
            f'asynckv_prompts_total{{{here},params="without_params"}} 2.0',
            f'asynckv_computed_locally_total{{cause="no_params",{here}}} 1.0',
        }


# -- what is made of them --------------------------------------------------------------------------


def counted(at: float, *values: Any, **fields: Any) -> Record:
    event = PromptsCounted(*values, **fields)
    return say(at, "prompts_counted", **{x: getattr(event, x) for x in event.__struct_fields__})


def found(*lines: Record) -> tuple[list[Finding], list[Finding]]:
    """Findings and shares, by what is logged."""
    everything, _ = screen([*well(), *lines])
    return list(everything.wrong), list(everything.notes)


def test_an_engine_that_gets_no_params_is_found_with_the_share() -> None:
    (finding,), limits = found(counted(9.0, 0, 200, in_a_row=200, in_a_row_s=12.0))
    assert (finding.heading, finding.code) == (HEADING.NEVER_CAME, "without_params")
    assert "decode/tp0@dddddddd computed 200 of 200 prompts itself (100.0%)" in finding.what
    assert "does not pass on the kv_transfer_params" in finding.evidence
    assert limits == []


def test_a_row_that_began_after_good_times_is_found_too_and_not_once_it_is_repaired() -> None:
    lines = (counted(5.0, 9_000), counted(60.0, 9_000, 60, in_a_row=60, in_a_row_s=40.0), counted(80.0, 9_900, 60))
    assert [x.code for x in found(*lines)[0]] == ["without_params"]
    logs = Logs(sorted([*well(), *lines], key=lambda x: x.at))
    presence = Presence(Axis(join(logs)))
    later = find(Seen(logs, presence, ground(presence), (), since=START + 70.0))
    assert (later.wrong, later.notes) == ([], [])


@pytest.mark.parametrize(
    "line",
    [
        counted(9.0, 29, 1, in_a_row=1),
        counted(9.0, 1, 29, in_a_row=29, in_a_row_s=400.0),  # so few may be chance
        counted(9.0, 1, 80, in_a_row=80, in_a_row_s=3.0),  # so short a time may be one client's
        counted(9.0, 0, 49, in_a_row=49, in_a_row_s=400.0),
        counted(9.0, 100, 0, {"malformed": 4}),
        counted(9.0, 100, 0, {"prompt_logprobs": 90}),
    ],
)
def test_a_share_is_told_and_is_not_wrong(line: Record) -> None:
    wrong, limits = found(line)
    assert wrong == []
    (share,) = limits
    assert f"of {(line.integer('with_params', 0) + line.integer('without_params', 0))} prompts itself" in share.what


def test_params_that_are_not_read_are_found_by_their_causes() -> None:
    wrong, limits = found(counted(9.0, 30, 0, {"no_params": 30, "spent": 1}))
    assert [(x.heading, x.code) for x in wrong] == [(HEADING.NEVER_CAME, "no_params")]
    assert "30 of 30 prompts itself (100.0%): no_params" in wrong[0].what
    assert [x.code for x in limits] == ["spent"]
    wrong, limits = found(counted(9.0, 0, 0, {"not_lent": 20, "of_next_year": 30}))
    assert [(x.heading, x.code) for x in wrong] == [(HEADING.DROPPED, "of_next_year")]
    # A prefill engine does not count the prompts that it lends, so that these have no share.
    assert [x.what.partition(" ")[2] for x in limits] == ["did not lend 20 prompts: not_lent"]


def test_one_odd_request_of_a_young_engine_is_not_wrong() -> None:
    for prompts, counts in ((1, {"malformed": 1}), (15, {"spent": 1}), (100, {"other_prompt": 9})):
        wrong, limits = found(counted(9.0, prompts, 0, counts))
        assert (wrong, len(limits)) == ([], 1)
    wrong, limits = found(counted(9.0, 2_000, 0, {}), counted(10.0, 2_000, 0, {"not_asked": 10}))
    assert (wrong, len(limits)) == ([], 1)


def test_prompts_that_came_before_the_router_was_mended_are_forgiven() -> None:
    first = say(8.0, "prompts_counted", without_params=60, in_a_row=60, in_a_row_s=2.0)
    assert [x.code for x in found(first)[0]] == ["without_params"]
    assert found(first, counted(9.0, 100_000, 60, {}))[0] == []


def test_a_cause_that_began_after_long_good_times_is_found_in_the_log() -> None:
    lines = [counted(5.0, 100_000, 0, {"spent": 3}), counted(60.0, 100_100, 0, {"spent": 3, "not_asked": 90})]
    wrong, limits = found(*lines, counted(80.0, 200_000, 0, {"spent": 5, "not_asked": 90}))
    assert [x.code for x in wrong] == ["not_asked"]
    assert "90 of 200,000 prompts itself (0.0%)" in wrong[0].what
    assert [x.code for x in limits] == ["spent"]


def test_hostile_counts_are_bounded_and_say_nothing() -> None:
    strange = say(9.0, "prompts_counted", with_params="many", without_params=-3, computed_locally=[1], in_a_row=1e400)
    many = say(8.0, "prompts_counted", computed_locally={f"c{i}": 50 for i in range(10_000)} | {"x": "y"})
    assert found(many, strange) == ([], [])
    assert len(found(many)[0]) == 12


async def test_a_running_engine_is_judged_by_the_same_rules_as_its_log(sim: Bench, logs: Lines, tmp_path: Path) -> None:
    async with sim.pair() as (_, decode, _):
        records = list(records_of([await answer_of(decode.engine)], 1e9))
        assert "prompts_counted" not in {x.event for x in records}
        await count(decode.engine, NONE)
        answer = await answer_of(decode.engine)
        records = list(records_of([answer], 1e9))
        presence = Presence(Axis(join(records)))
        live = find(Seen(Logs(records), presence, ground(presence), (), answers=[answer]))
    log, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    log.write_text(logs.stream.getvalue())
    ended = CliRunner().invoke(app, ["why", str(log), "--json", str(out)])
    assert ended.exit_code == 1, ended.output
    logged = json.loads(out.read_text())["findings"]
    assert [asdict(x) for x in live.wrong] == [{**x, "requests": (), "blocks": -1, "ranks": ()} for x in logged]
    assert live.wrong[0].code == "without_params"
