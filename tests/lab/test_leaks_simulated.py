"""`asynckv why` over logs of simulated services with faults, whose truth is known; and its judge judges.

A thousand services are judged by `python -m tests.lab.leaks_truth`; here are some dozens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab.leaks_truth import MODES, judged, one
from tests.lab.leaky import make_leaky
from tests.lab.mishaps import MISHAPS
from tests.lab.truth import watch

pytestmark = pytest.mark.slow

LEAKY, FAULTS = range(24), range(24, 48)


def test_every_late_request_is_named_with_its_true_cause_and_none_else() -> None:
    found, counts = judged("leaky", LEAKY, MODES[:3])
    assert found == []
    assert counts["late requests"] > 30
    assert counts["requests"] > 3 * counts["late requests"]
    # Of many kinds, with the logs of both sides, and of one.
    assert len({cause for cause in counts if cause.startswith("both.")}) >= 10
    assert counts["prefill.never_claimed"] > 10
    assert counts["decode.stuck_transfer"] + counts["decode.timeout_too_short"] > 3


def test_so_it_is_where_everything_goes_wrong_at_once() -> None:
    found, counts = judged("faults", FAULTS, MODES[:3])
    assert found == []
    assert counts["late requests"] > 10


@pytest.mark.parametrize(
    ("mode", "kind"),
    # Where all goes wrong at once, a torn file of a rank that is restarted looks as if it had died while it lent.
    [("cut", "leaky"), ("cut", "faults"), ("torn", "leaky"), ("set", "leaky"), ("set", "faults")],
)
def test_logs_that_end_early_or_whose_clock_was_put_back_tell_no_falsehood(mode: str, kind: str) -> None:
    """Of a service that lives, all logs of which end at one moment, or each at another."""
    found, counts = judged(kind, LEAKY, (mode,))
    assert found == []
    assert counts[f"{mode}.reader_silent"] + counts[f"{mode}.never_claimed"] > 0


def without(*events: str) -> Callable[[str], str]:
    """Leave some events out of a log, as if they had not been written."""
    return lambda text: "".join(x for x in text.splitlines(True) if json.loads(x)["event"] not in events)


def changed(event: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[str], str]:
    """Write something else than what happened."""

    def edit(text: str) -> str:
        lines = [json.loads(x) for x in text.splitlines()]
        return "".join(json.dumps(change(x) if x["event"] == event else x) + "\n" for x in lines)

    return edit


@pytest.mark.parametrize(
    ("seeds", "edit", "what"),
    [
        (range(8), without("lease_ended"), "missed"),
        (range(8), without("blocks_retired", "blocks_returned", "pull_ended"), "missed"),
        (range(12), without("pull_ended", "pull_held", "release_refused", "release_unanswered"), "wrong"),
        (range(2, 12), without("loop_was_away"), "wrong"),
        (range(6), changed("lease_ended", lambda x: x | {"cause": "expired", "owed": ["*"]}), "false"),
        (range(8), changed("lease_ended", lambda x: x | {"refused": [], "owed": ["*"], "claims": {}}), "wrong"),
    ],
)
def test_the_judge_sees_what_logs_hide(seeds: range, edit: Callable[[str], str], what: str) -> None:
    whats = (x.what.partition(":")[0] for seed in seeds for x in one(seed, "leaky", ["both"], edit)[0])
    assert what in whats


def test_a_witness_knows_what_is_late_without_any_log() -> None:
    for seed in range(40):
        script = make_leaky(seed)
        if [x.kind for x in script.mishaps] == ["aborted"] and not script.faults:
            break
    service, logs, witness = watch(script)
    assert service.world.violation == ""
    for log in logs.processes:
        log.stream.truncate(0)
    leases, pulls = witness.late()
    assert pulls == []
    assert {x.ask for x in leases} == {script.mishaps[0].ask}
    assert all("never_asked" in owed.whys for lease in leases for owed in lease.owed)


def test_every_mishap_befalls_somebody() -> None:
    kinds = {x.kind for seed in range(200) for x in make_leaky(seed).mishaps}
    assert kinds == set(MISHAPS)
