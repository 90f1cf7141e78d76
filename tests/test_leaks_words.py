"""No verdict reads words: every text for people may be reworded, and `asynckv why` concludes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from asynckv import told
from asynckv.tools.diagnose.findings import find
from asynckv.tools.diagnose.leaks_pulls import failures
from asynckv.tools.diagnose.records import Record
from tests.lab.leaks_truth import one
from tests.test_leaks import BLOCKED, CASES, CELLS, FAILURES, seen_of

LOREM = "lorem ipsum dolor"
NAMED = {
    *("timestamp", "level", "event", "engine_id", "incarnation", "rank", "peer", "reader", "who", "address", "host"),
    *("request_id", "prefill_request_id", "pull_id", "same_as", "peer_incarnation", "reader_incarnation", "job"),
    *("owed", "ranks", "readers", "peer_ranks", "read_ranks", "failed_with", "unanswered", "held_by", "waits_for"),
    *(
        "cause",
        "how",
        "state",
        "before",
        "outcome",
        "failed_in",
        "said",
        "revoked_by",
        "note",
        "reason",
        "limit",
        "boot_id",
        "what",
    ),
}
"""Fields with ids, names, reasons and states. The texts of all others are words."""
WORDY = {told.DataPlaneRestarted.event, told.DataPlaneBroken.event, told.OffloadBroken.event, "settled"}
"""Events and notes with words as their cause, or how."""


def scrambled(value: Any, name: str = "") -> Any:
    """Return a value of a field with other words."""
    if isinstance(value, dict):
        wordy = {"cause", "how"} if {value.get("event"), value.get("note")} & WORDY else set[str]()
        return {k: LOREM if k in wordy else scrambled(v, k if name not in NAMED else name) for k, v in value.items()}
    if name == "refused":
        return [[*x[:4], LOREM, *x[5:]] for x in value]
    if name == "history":
        return [[at, what if isinstance(what, str) else scrambled(what)] for at, what in value]
    if isinstance(value, list):
        return [scrambled(x, name) for x in value]
    is_state = name == "to" and " " not in str(value)
    return LOREM if isinstance(value, str) and name not in NAMED and not is_state else value


def reworded(record: Record) -> Record:
    fields = scrambled({"event": record.event, **record.fields})
    return replace(record, said={k: v for k, v in fields.items() if k != "event"})


def concluded(records: list[Record]) -> list[Any]:
    """All that is concluded from some records, without its words."""
    seen = seen_of(records)
    leaks, found = seen.late, find(seen)
    return [
        *((x.cell, x.cause, x.state, x.request_id, x.reader, x.about, x.owed, x.missing, len(x.also)) for x in leaks),
        *((x.verdict.cause, x.verdict.reader, len(x.pulls)) for x in failures(seen.presence)),
        *((x.heading, x.code, x.requests) for x in (*found.wrong, *found.limits)),
    ]


EVERY = {
    **{name: records for name, (_, records) in (CASES | FAILURES).items()},
    **{f"cell {i}": records for i, records in enumerate(CELLS)},
    "blocked": BLOCKED,
}


def test_no_verdict_changes_when_every_text_is_another() -> None:
    changed = []
    for name, records in EVERY.items():
        if concluded(list(map(reworded, records))) != concluded(records):
            changed.append(name)
    assert changed == []
    assert len(EVERY) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), [("leaky", range(8)), ("faults", range(24, 28))])
def test_nor_does_one_about_what_engines_log(kind: str, seeds: range) -> None:
    """Simulated services: the lines of today's engines."""

    def edit(text: str) -> str:
        return "".join(json.dumps(scrambled(json.loads(x))) + "\n" for x in text.splitlines())

    for seed in seeds:
        (found, before), (others, after) = one(seed, kind), one(seed, kind, edit=edit)
        assert ([x.what for x in others], after) == ([x.what for x in found], before), seed
