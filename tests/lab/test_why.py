"""Faults of real processes while the service runs: what is wrong is named, or said not to be known; nothing else is.

Besides: how looks are judged, and a rollout without a trace.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from asynckv.tools.diagnose.causes import HEADING
from tests.lab import alert_live
from tests.lab.why_fresh import CASES, Fresh
from tests.lab.why_live import CAUSES, FREEZER, MISSED, OPEN, RIGHT, WAYS, WRONG, Injected, Look, examine_all, judge

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
        ("announced_and_waiting_in_order", "prefill", 1, [finding("UNKNOWN", "late")], OPEN),
        ("announced_and_waiting_in_order", "decode", 1, [finding("UNKNOWN", "late")], WRONG),
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


LEFT_TO_THE_COMMAND = [
    "the_only_decode_engine_killed",
    "decode_killed_before_it_heard",
    "decode_restarted_under_its_name",
    "prefill_restarted_under_its_name",
    "a_decode_rank_killed_after_its_announcement",
    "decode_stopped_before_it_heard",
    "decode_loop_blocked_until_now",
    "prefill_loop_was_blocked",
    "a_network_that_swallows_everything",
    "a_network_that_is_cut_for_good",
    "a_geometry_that_does_not_fit",
    "blocks_that_another_pull_holds",
    "a_queue_that_is_full",
    "params_that_a_router_garbled",
    "params_sent_to_two_engines",
    "params_sent_twice",
    "a_listeners_key_that_is_not_known",
    "the_only_decode_engine_closed_in_order",
    "a_decode_rank_that_never_pulls",
    "healthy_engines_that_idle",
    "cancelled_by_its_caller",
    "withdrawn_by_the_prefill_side",
]
"""They have much in common with others, and each takes its seconds."""


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(300)
async def test_what_is_wrong_is_named_and_nothing_else() -> None:
    assert set(LEFT_TO_THE_COMMAND) < set(CAUSES)
    found: dict[str, list[Look]] = {}
    may_freeze = os.access(FREEZER, os.W_OK)
    names = [x for x in CAUSES if x not in LEFT_TO_THE_COMMAND and (may_freeze or "paused" not in x)]
    await examine_all(Injected, names, 2, found.__setitem__)
    wrong = [(name, x.way, x.said) for name, looks in found.items() for x in looks if x.verdict in (WRONG, MISSED)]
    assert wrong == []
    with_logs = {name: {x.verdict for x in looks if x.way in ("logs", "both")} for name, looks in found.items()}
    assert [name for name, verdicts in with_logs.items() if RIGHT not in verdicts] == []


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(150)
async def test_schedulers_that_hang_are_named_in_each_way() -> None:
    stuck = {
        "decode_hangs_with_results": ("decode/tp0", "2 results not taken for "),
        "prefill_hangs_before_it_lends": ("prefill/tp0", "2 claims not lent for "),
    }
    found: dict[str, list[Look]] = {}
    await examine_all(Fresh, list(stuck), 2, found.__setitem__)
    for name, (rank, what) in stuck.items():
        for look in (x for x in found[name] if x.way in ("logs", "live", "both")):  # one side alone may not know
            assert (look.verdict, look.is_named) == (RIGHT, True), look
            assert f"scheduler_stuck: the scheduler of {rank}@" in look.said
            assert what in look.said or look.way == "decode", look


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(150)
async def test_no_client_and_no_operator_notices_a_rollout() -> None:
    found = await alert_live.rollout(away_s=0.5, apart_s=0.0, is_scraped=False)
    assert found["is_well"], found
    assert found["outcomes"]["complete"] > 100
