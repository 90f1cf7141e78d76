"""Faults of other eyes: how looks are judged; and a rollout without a trace, with real engines."""

from __future__ import annotations

from typing import Any

import pytest

from asynckv.tools.diagnose.causes import HEADING
from tests.lab import alert_live
from tests.lab.why_fresh import CASES
from tests.lab.why_live import CAUSES, MISSED, OPEN, RIGHT, WAYS, WRONG, judge

RANKS = {"prefill": "prefill/tp0@aaaaaaaa", "decode": "decode/tp0@bbbbbbbb", "other": "other/tp0@cccccccc"}


def finding(heading: str, what: str, code: str = "scheduler_stuck") -> dict[str, Any]:
    said = {"heading": HEADING[heading].value, "code": code, "what": what}
    return said | {"evidence": "", "remedy": "look at the scheduler"}


HANGS, ELSEWHERE = (finding("STOPPED", f"{RANKS[x]} makes no steps") for x in ("decode", "other"))


@pytest.mark.parametrize(
    ("name", "way", "status", "findings", "verdict"),
    [
        ("decode_hangs_with_results", "logs", 1, [HANGS], RIGHT),
        ("decode_hangs_with_results", "logs", 1, [ELSEWHERE], WRONG),
        ("decode_hangs_with_results", "logs", 1, [HANGS, finding("NETWORK", "a cut")], WRONG),
        ("decode_hangs_with_results", "live", 1, [finding("UNKNOWN", "late")], OPEN),
        ("decode_hangs_with_results", "live", 3, [], OPEN),
        ("decode_hangs_with_results", "live", 0, [], MISSED),
        ("decode_hangs_with_results", "prefill", 0, [], OPEN),
        ("idle_embedders_make_no_steps", "both", 0, [], RIGHT),
        ("idle_embedders_make_no_steps", "both", 3, [], WRONG),
        ("idle_embedders_make_no_steps", "decode", 3, [], RIGHT),
        ("idle_embedders_make_no_steps", "decode", 0, [], MISSED),
        ("idle_embedders_make_no_steps", "decode", 1, [finding("UNKNOWN", "late")], WRONG),
        ("a_crash_loop", "logs", 1, [finding("GONE", f"{RANKS['decode']} died")] * 2, WRONG),
        ("lent_when_all_readers_were_closed", "prefill", 1, [finding("NEVER_CAME", "nobody")], RIGHT),
        ("lent_when_all_readers_were_closed", "logs", 1, [finding("NEVER_CAME", "nobody")], WRONG),
        ("decode_stopped_after_its_announcement", "logs", 1, [finding("STOPPED", RANKS["decode"], "stopped")], RIGHT),
        ("decode_stopped_after_its_announcement", "logs", 1, [finding("STOPPED", RANKS["decode"], "died")], WRONG),
        ("decode_stopped_after_its_announcement", "prefill", 0, [], MISSED),
        ("decode_loop_was_blocked", "live", 0, [], OPEN),
    ],
)
def test_a_look_is_judged_by_the_truth(
    name: str, way: str, status: int, findings: list[dict[str, Any]], verdict: str
) -> None:
    ranks = {x: {rank} for x, rank in RANKS.items()}
    assert judge({**CASES, **CAUSES}[name], way, ranks, status, {"findings": findings}).verdict == verdict


def test_cases_are_of_all_kinds_and_can_be_known() -> None:
    assert {x.kind for x in CASES.values()} == set(range(1, 9))
    for case in CASES.values():
        assert case.may.keys() <= HEADING.__members__.keys()
        assert case.knows <= set(WAYS)
        assert {"logs", "both"} <= case.knows


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.anyio
@pytest.mark.timeout(120)
async def test_no_client_and_no_operator_notices_a_rollout() -> None:
    found = await alert_live.rollout(away_s=0.5, apart_s=0.0, is_scraped=False)
    assert found["is_well"], found
    assert found["outcomes"]["complete"] > 100
