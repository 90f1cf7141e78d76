"""A scheduler that makes no steps is what is wrong, and explains what waits for it; an idle one is well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from asynckv import told
from asynckv.account.inspect import RankStatus, RequestStatus
from asynckv.account.values import Account, Facts
from asynckv.told import StepWait
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.causes import HEADING
from asynckv.tools.diagnose.findings import Finding, find
from asynckv.tools.diagnose.join import join
from asynckv.tools.diagnose.leaks_live import records_of
from asynckv.tools.diagnose.records import Logs, Record
from tests.test_leaks import (
    NAMES,
    RANK,
    D,
    P,
    alive,
    asked_before,
    begun,
    expired,
    lent,
    met,
    pull_ended,
    say,
    seen_in,
    stopped,
    waits,
)

RUNNING = [begun(P), begun(D), *met(), *asked_before()]


def wrong(records: Sequence[Record], answers: Sequence[Answer] = ()) -> list[Finding]:
    logs = Logs(sorted([*records, *records_of(answers, 1e9 + 60.0)], key=lambda x: x.at))
    seen = seen_in(join(logs), logs, answers)
    return list(find(seen).wrong)


def signs(start: str, *at: float) -> list[Record]:
    return [alive(start, each) for each in at]


def answer(start: str, waits_for_step: dict[str, StepWait]) -> Answer:
    facts = Facts(version="0.2.0", host="h", pid=4711, life="running", uptime_s=60.0)
    name, engine_id = RANK[start], RANK[start].partition("/")[0]
    account = Account(engine_id=engine_id, rank=name, incarnation=start, facts=facts, waits_for_step=waits_for_step)
    return Answer(address="socket", account=account, at=1e9 + 60.0)


@pytest.mark.parametrize("what", ["result", "announcement"])
@pytest.mark.parametrize("way", ["logs", "live", "both"])
def test_a_stuck_decode_scheduler_is_named_first(what: str, way: str) -> None:
    logs = [*RUNNING, *signs(P, 20, 35, 50), waits(D, 35, **{what: 11.0}), waits(D, 50, **{what: 26.0})]
    asked = [answer(P, {}), answer(D, {what: StepWait(2, 36.0)})]
    [finding] = wrong(logs if way != "live" else [], asked if way != "logs" else ())
    seconds = 26.0 if way == "logs" else 36.0
    assert finding.heading is HEADING.STOPPED
    words = {"result": "2 results not taken", "announcement": "2 announcements not pulled"}[what]
    assert finding.what == f"the scheduler of {RANK[D]} makes no steps: {words} for {seconds} s"
    assert finding.remedy.startswith("`py-spy dump" + (" --pid 4711`" if way == "live" else "`"))
    assert "of its scheduler's" in finding.remedy


@pytest.mark.parametrize("way", ["logs", "live", "both"])
def test_a_prefill_engine_that_never_lends_is_named(way: str) -> None:
    logs = [*RUNNING, *signs(D, 20, 35, 50), waits(P, 35, claim=9.0), waits(P, 50, claim=24.0)]
    asked = [answer(D, {}), answer(P, {"claim": StepWait(2, 34.0)})]
    [finding] = wrong(logs if way != "live" else [], asked if way != "logs" else ())
    said = f"the scheduler of {RANK[P]} makes no steps: 2 claims not lent for {24.0 if way == 'logs' else 34.0} s"
    assert (finding.heading, finding.what) == (HEADING.STOPPED, said)


@pytest.mark.parametrize("step_s", [None, 15.0])
def test_an_engine_without_steps_may_compute_one_long_prompt(step_s: float | None) -> None:
    """Where the embedder runs the loop itself, and announced requests claim before they are computed."""
    sign = waits(P, 50, claim=15.0)
    said = {**sign.fields, "step_s": step_s} if step_s else sign.fields
    assert bool(wrong([*RUNNING, *signs(D, 20, 35, 50), replace(sign, said=said)])) is (step_s is not None)


def test_it_explains_the_late_requests_and_failed_pulls_so_that_no_router_is_blamed() -> None:
    dropped = [lent(10.0), expired(False)]
    stuck = [waits(D, 25, result=20.0), waits(D, 40, result=35.0), waits(D, 55, result=50.0)]
    blamed = wrong([*RUNNING, *signs(P, 20, 35, 50), *signs(D, 25, 40, 55), *dropped])
    assert [x.heading for x in blamed] == [HEADING.NEVER_CAME], "the same of a decode engine that has nothing to take"
    [finding] = wrong([*RUNNING, *signs(P, 20, 35, 50), *stuck, *dropped])
    assert (finding.heading, finding.requests, finding.blocks) == (HEADING.STOPPED, ("a",), 4)
    # Pulls that were given up, and those that waited for a lend, hang on it as well.
    [finding] = wrong([*RUNNING, *signs(P, 20, 35, 50), *stuck, pull_ended(45, "standstill")])
    assert (finding.what.startswith(f"the scheduler of {RANK[D]} makes no steps"), finding.requests) == (True, ("a",))
    never_lent = [waits(P, 35, claim=15.0), waits(P, 50, claim=30.0), pull_ended(52, "not_lent_yet", seconds=30.0)]
    [finding] = wrong([*RUNNING, *signs(D, 25, 40, 55), *never_lent])
    assert (finding.what.startswith(f"the scheduler of {RANK[P]} makes no steps"), finding.requests) == (True, ("a",))


def test_a_stall_that_is_over_is_told_only_with_what_it_did() -> None:
    over = [waits(D, 25, result=20.0), waits(D, 40, result=35.0), alive(D, 55)]
    assert wrong([*RUNNING, *signs(P, 20, 35, 50), *over]) == []
    [finding] = wrong([*RUNNING, *signs(P, 20, 35, 50), *over, lent(10.0), expired(False)])
    assert finding.what == f"the scheduler of {RANK[D]} made no steps: 2 results not taken for 35.0 s"
    # An engine that answers that nothing waits any more refutes its log.
    stuck = [waits(D, 25, result=20.0), waits(D, 40, result=35.0)]
    assert [x.heading for x in wrong([*RUNNING, *signs(P, 20, 35, 50), *stuck])] == [HEADING.STOPPED]
    assert wrong([*RUNNING, *signs(P, 20, 35, 50), *stuck], [answer(D, {}), answer(P, {})]) == []


def test_an_engine_that_was_closed_makes_no_steps_and_is_well() -> None:
    stuck = waits(D, 40, result=25.0)
    assert wrong([*RUNNING, *signs(P, 20, 35, 50), stuck, stopped(D, 45.0)]) == []
    [finding] = wrong([*RUNNING, *signs(P, 20, 35, 50), stuck, stopped(D, 45.0), lent(10.0), expired(False)])
    assert finding.what == f"the scheduler of {RANK[D]} made no steps: 2 results not taken for 25.0 s"


@pytest.mark.parametrize(
    ("namespace", "place"), [(None, "on the host"), (0xEFFFFFFC, "on the host"), (4026532999, "in the container")]
)
def test_a_pid_is_one_of_a_container_where_its_log_says_so(namespace: int | None, place: str) -> None:
    pid = {"pid": 7} | ({"pid_namespace": namespace} if namespace else {})
    logs = [replace(x, said={**x.fields, **pid}) if x.event == "engine_started" else x for x in RUNNING]
    [finding] = wrong([*logs, *signs(P, 20, 35, 50), waits(D, 50, result=26.0)])
    assert finding.remedy.startswith(f"`py-spy dump --pid 7` {place} of {RANK[D]}")


@pytest.mark.parametrize("seconds", [{}, {"result": 2.0}, {"claim": 8.0}])
def test_an_idle_engine_and_a_long_step_are_well(seconds: dict[str, float]) -> None:
    hour = [x for at in range(20, 3600, 15) for x in (waits(D, at, **seconds), alive(P, at))]
    assert wrong([*RUNNING, *hour]) == []


@pytest.mark.parametrize("has_log", [True, False])
def test_a_pull_that_waits_for_a_lend_names_the_lender_from_the_readers_log_alone(*, has_log: bool) -> None:
    ranks: dict[str, Any] = {"ranks": {RANK[P]: "not_lent"}, **NAMES}
    held = say(50, told.PullHeld, D, state="queued", waits="words", requests=1, oldest=[{**ranks, "state_s": 15.0}])
    held.level = "warning"
    lender = [begun(P), *signs(P, 20, 35, 50)] if has_log else []
    [finding] = wrong([begun(D), *signs(D, 20, 35, 51), *lender, held])
    said = f"1 pull of {RANK[D]} waited for {RANK[P]}, for 15.0 s: not lent yet"
    heading = HEADING.STOPPED if has_log else HEADING.UNKNOWN
    assert (finding.heading, finding.what, finding.requests) == (heading, said, ("a",))


def test_a_decode_engine_without_a_step_may_hang_so_that_the_router_is_not_blamed() -> None:
    """Nothing waits for it, because it never heard of the request; an idle one looks the same."""
    dropped = [lent(10.0), expired(False)]

    def said(*step_s: float | None) -> Finding:
        signs_of_d = [say(at, told.EngineAlive, D, step_s=s) for at, s in zip((25, 40, 55), step_s, strict=True)]
        [finding] = wrong([*RUNNING, *signs(P, 20, 35, 50), *dropped, *signs_of_d])
        return finding

    for none in ((17.0, 32.0, 47.0), (15.5, 0.1, 0.1)):
        finding = said(*none)
        assert finding.heading is HEADING.UNKNOWN
        assert f"{RANK[D]} made no step meanwhile: its scheduler hangs, or the params never came" in finding.evidence
        assert finding.remedy.startswith("`py-spy dump`")
        assert finding.remedy.endswith("look for the request in the router.")
    for steps in ((0.1, 0.2, 0.1), (None, None, None), (0.1, 5.0, 20.0)):
        assert said(*steps).heading is HEADING.NEVER_CAME


def test_the_same_is_said_of_engines_that_are_asked() -> None:
    ranks = (RankStatus("*", "unclaimed"),)
    held = RequestStatus("lease", "a", "a", "lent", 12.0, 12.0, 18.0, 4, "not claimed", ranks, sequence=0)
    lender, idle = answer(P, {}), answer(D, {})
    lender = replace(lender, account=msgspec.structs.replace(lender.account, requests=(held,)))
    pulled = Facts(version="0.2.0", counters={"pulls.started": 3}, uptime_s=60.0)
    for step_s in (30.0, 0.1, None):
        account = msgspec.structs.replace(idle.account, step_s=step_s, facts=pulled)
        [finding] = wrong([], [lender, replace(idle, account=account)])
        assert finding.heading is HEADING.UNKNOWN
        assert ("made no step meanwhile" in finding.evidence) is (step_s == 30.0)


def test_a_rank_that_does_not_lend_explains_a_lease_of_another() -> None:
    """Its readers wait for it, until their time is up, and then also the lease of the rank that did lend is over."""
    other, engine = f"{'e' * 32}", "prefill/tp1@eeeeeeee"
    stuck = [
        replace(x, rank=engine, incarnation=other)
        for x in (begun(P), waits(P, 25, claim=13.0), waits(P, 40, claim=28.0))
    ]
    failed = pull_ended(
        38.0, "not_lent_yet", begun_at=10.5, failed_with=[engine], peer_ranks=[RANK[P], engine], failed_in="queue"
    )
    [finding] = wrong([*RUNNING, *signs(P, 20, 35, 50), lent(10.0), expired(), failed, *stuck])
    assert finding.heading is HEADING.STOPPED
    assert engine in finding.what
    assert finding.requests == ("a",)
