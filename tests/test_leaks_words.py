"""No verdict reads words: every text for people may be reworded, and `asynckv why` concludes the same.

Lines of asynckv 0.2.0 had words alone, which one module reads (`old_words.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from asynckv import told
from asynckv.core.types import How
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.findings import find
from asynckv.tools.diagnose.leaks_pulls import failures
from asynckv.tools.diagnose.old_words import coded
from asynckv.tools.diagnose.records import Record
from tests.lab.leaks_truth import one
from tests.test_leaks import BLOCKED, CASES, CELLS, FAILURES, NAMES, RANK, D, P, begun, expired, gone, met, say, seen_of

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
    """As engines log it today: what was coded once is not read again in words."""
    changed = []
    for name, records in EVERY.items():
        records = list(map(coded, records))
        if concluded(list(map(reworded, records))) != concluded(records):
            changed.append(name)
    assert changed == []
    assert len(EVERY) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), [("leaky", range(8)), ("faults", range(24, 28))])
def test_nor_does_one_about_what_engines_log(kind: str, seeds: range) -> None:
    """Simulated services: the lines of today's engines, of which none has words alone."""

    def edit(text: str) -> str:
        return "".join(json.dumps(scrambled(json.loads(x))) + "\n" for x in text.splitlines())

    for seed in seeds:
        (found, before), (others, after) = one(seed, kind), one(seed, kind, edit=edit)
        assert ([x.what for x in others], after) == ([x.what for x in found], before), seed


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (f"{RANK[P]} (tcp://10.0.0.1:1) said goodbye", How.GOODBYE),
        (f"{RANK[P]} was silent for 4.0 s", How.SILENT),
        ("forgotten by request", How.FORGOTTEN),
        ("the remote process is gone (NIXL_ERR_REMOTE_DISCONNECT)", How.BROKEN),
    ],
)
def test_words_of_old_lines_become_codes(words: str, how: How) -> None:
    assert coded(gone(20.0, words)).text("how") == how
    assert coded(gone(20.0, words, how="idle")).text("how") == "idle", "a code counts"


def test_old_lines_name_the_key_the_rank_and_the_limit_in_words() -> None:
    where = f"{RANK[P]} (tcp://10.0.0.1:1#ab)"
    for words, how in (
        (f"{where} cannot be asked: its key is not in this engine's directory of authorized keys", "unlisted_listener"),
        (f"{where} did not answer within 5 s; it seems to turn our connection away: with keys, ...", "turned_away"),
        (f"{where} did not answer within 5 s", "no_answer"),
    ):
        ended = say(
            16, told.PullEnded, D, **NAMES, cause="peer_unreachable", detail=words, peer_ranks=[RANK[P], "x/tp0"]
        )
        assert (coded(ended).text("how"), coded(ended).texts("failed_with")) == (how, (RANK[P],))
    refused = [29.0, "renew", "expired", RANK[D], "lent for longer than max_lease_s 30.0"]
    notes = [[0.0, "lent"], [0.1, f"granted to {RANK[D]}, pull x-1"], [2.0, "gone: y"]]
    ended = coded(expired(refused=[refused], history=notes))
    assert ended.fields["refused"] == [[*refused, "max_lease_s"]]
    assert ended.fields["history"][1:] == [[0.1, {"note": "granted", "reader": RANK[D], "pull_id": "x-1"}], notes[2]]
    assert coded(ended).fields == ended.fields


def test_an_orderly_goodbye_in_other_words_is_no_death() -> None:
    lent = say(20.0, told.LeaseLent, P, **NAMES, blocks=4, lease_s=30.0)
    records = [begun(D), *met(), begun(P), lent, gone(25.0, "it took its leave", how="goodbye"), say(80.0, "later", D)]
    assert not seen_of(records).late
    lost = [*records[:-2], gone(25.0, "it took its leave", how="broken"), records[-1]]
    assert [x.cause for x in seen_of(lost).late] == [CAUSE.PREFILL_DIED]
