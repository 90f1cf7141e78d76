"""What is late, and why: recorded logs of real processes, causes from hand-made lines, two at once, hostile lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from asynckv.cli import app
from asynckv.diagnose import causes, leaks_page
from asynckv.diagnose.causes import CATALOGUE, CAUSE
from asynckv.diagnose.join import join
from asynckv.diagnose.leaks import Leak, find_leaks
from asynckv.diagnose.records import Logs, Record, read_logs
from asynckv.observe.events import EVENT
from tests.test_leaks_real import DECODE_ONLY, EXPECTED, PREFILL, PREFILL_ONLY, named

RECORDED = Path(__file__).parent / "data" / "leaks.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "leaks.md"
C = CAUSE

P, D, E = "aaaaaaaa" + "0" * 24, "bbbbbbbb" + "1" * 24, "cccccccc" + "2" * 24
OTHER = "eeeeeeee" + "3" * 24
RANK = {P: "prefill/tp0@aaaaaaaa", D: "decode/tp0@bbbbbbbb", E: "decode/tp1@cccccccc", OTHER: "other/tp0@eeeeeeee"}
PULL = f"{D[:16]}-1"
NAMES = {
    "request_id": "gen-a",
    "prefill_request_id": "a",
    "pull_id": PULL,
    "peer": "prefill",
    "sequence": 0,
}
LEASE: dict[str, Any] = {"request_id": "a", "sequence": 0, "blocks": 4}


def say(at: float, event: str, start: str = P, **fields: Any) -> Record:
    return Record(1e9 + at, event, "info", RANK[start].partition("/")[0], RANK[start], start, fields)


def begun(start: str, at: float = 0.0) -> Record:
    return say(at, EVENT.ENGINE_STARTED, start, host="h", lease_s=30.0, grant_s=10.0, address="tcp://10.0.0.1:1")


def stopped(start: str, at: float = 200.0) -> Record:
    return say(at, EVENT.ENGINE_STOPPED, start)


def met(at: float = 5.0) -> list[Record]:
    peer = {"peer": RANK[P], "peer_incarnation": P, "address": "tcp://10.0.0.1:1"}
    return [
        say(at, EVENT.PEER_CHANGED, D, **peer, before="new", state="connecting"),
        say(at + 0.01, EVENT.READER_MET, P, reader=RANK[D], reader_incarnation=D, minor=3),
        say(at + 0.02, EVENT.PEER_CHANGED, D, **peer, before="connecting", state="loading"),
    ]


def expired(claimed: bool = True, at: float = 40.0, **fields: Any) -> Record:
    claims = {RANK[D]: {"pull_id": PULL, "claimed_s": 0.1, "heard_s": 2.0}} if claimed else {}
    owed = [RANK[D]] if claimed else ["*"]
    said = {"cause": "expired", **LEASE, "seconds": 30.0, "readers": {}, "owed": owed, "claims": claims}
    return say(at, EVENT.LEASE_ENDED, **{**said, **fields})


def pull_ended(at: float, cause: str, **fields: Any) -> Record:
    said = {"cause": cause, **NAMES, "peer_ranks": [RANK[P]], "read_ranks": [RANK[P]], "seconds": 5.0}
    return say(at, EVENT.PULL_ENDED, D, **{**said, **fields})


def unanswered(at: float = 60.0, cause: str = "timeout") -> Record:
    return say(at, EVENT.RELEASE_UNANSWERED, D, **NAMES, cause=cause, ranks=[RANK[P]], seconds=30.0, outcome="complete")


def away(start: str, at: float, seconds: float) -> Record:
    return say(at, EVENT.LOOP_WAS_AWAY, start, seconds=seconds, leases=1, pulls=1, parked=0)


BOTH = [begun(P), begun(D), *met(), stopped(P), stopped(D)]
RUNNING = [begun(P), begun(D), *met()]
REFUSED = [3.0, "release", "wrong_cohort", RANK[D], "lent to 'x'"]
KEPT = {"held_transfers": 3, "failed_in": "read", "detail": "still reading"}
DIED = [begun(P), begun(D), *met(), stopped(P)]

READS_ELSEWHERE = {"peer_ranks": ["prefill/tp1@dddddddd", RANK[P]], "read_ranks": ["prefill/tp1@dddddddd"]}
LAST = {**NAMES, "pull_id": f"{D[:16]}-2"}
ANOTHER = [
    say(7, EVENT.PULL_ENDED, D, **{**NAMES, "prefill_request_id": "w", "sequence": 7}, cause="complete", seconds=0.1),
    say(200, EVENT.ENGINE_STOPPED, OTHER),
]
"""The reader that died had been asked for others before."""

CASES: dict[str, tuple[CAUSE, list[Record]]] = {
    "release lost": (C.RELEASE_LOST, [*BOTH, expired(), pull_ended(15, "complete"), unanswered()]),
    "release refused": (C.RELEASE_REFUSED, [*BOTH, expired(refused=[REFUSED]), pull_ended(15, "complete")]),
    "release too early": (
        C.RELEASE_TOO_EARLY,
        [*BOTH, expired(False, refused=[[-31.0, "release", "parked_too_long", RANK[D], ""]])],
    ),
    "max_lease": (
        C.MAX_LEASE,
        [*BOTH, expired(refused=[[29.0, "renew", "expired", RANK[D], "lent for longer than max_lease_s 30.0"]])],
    ),
    "decode away": (
        C.DECODE_LOOP_AWAY,
        [*BOTH, expired(), pull_ended(45, "lease_lost", seconds=34.0), away(D, 45, 30)],
    ),
    "prefill away": (
        C.PREFILL_LOOP_AWAY,
        [*BOTH, expired(), pull_ended(15, "complete"), unanswered(), away(P, 40, 28)],
    ),
    "too short": (C.LEASE_TOO_SHORT, [*BOTH, expired(), pull_ended(41, "lease_lost", seconds=30.0)]),
    "closed reader": (C.READER_CLOSED, [*RUNNING, stopped(P), stopped(D, 20.0), expired()]),
    "closed owner": (C.PREFILL_CLOSED, [*BOTH, expired(cause="closed", revoked_by="closed")]),
    "died after claim": (C.DIED_AFTER_CLAIM, [*DIED, expired()]),
    "died before claim": (C.DIED_BEFORE_CLAIM, [*DIED, expired(False)]),
    "never heard of": (C.NEVER_HEARD_OF, [*BOTH, expired(False)]),
    "never shook hands": (
        C.NEVER_SHOOK_HANDS,
        [begun(P), begun(D), stopped(P), stopped(D), expired(False), pull_ended(16, "peer_unreachable")],
    ),
    "wrong target": (C.WRONG_TARGET, [*BOTH, expired(False), pull_ended(16, "wrong_target")]),
    "stale": (C.STALE_PARAMS, [*BOTH, expired(False), pull_ended(16, "restarted")]),
    "queued": (
        C.EXPIRED_WHILE_QUEUED,
        [*BOTH, expired(False), pull_ended(42, "timeout", failed_in="queue", seconds=31.0)],
    ),
    "came too late": (C.CAME_TOO_LATE, [*BOTH, expired(False), pull_ended(45, "expired", seconds=0.1)]),
    "announced": (
        C.ANNOUNCED_AND_FORGOTTEN,
        [*BOTH, pull_ended(60, "timeout", failed_in="announced", seconds=50.0)],
    ),
    "retry": (
        C.NO_ATTEMPT_FOLLOWED,
        [
            *BOTH,
            expired(
                history=[
                    [0.0, "lent"],
                    [0.1, f"granted to {RANK[D]}, pull {PULL}"],
                    [2.0, f"released by {RANK[D]}, pull {PULL}: retry"],
                ]
            ),
            pull_ended(12, "read_failed"),
        ],
    ),
    "one rank": (
        C.RANK_NEVER_SPOKE,
        [*BOTH, begun(E), stopped(E), expired(False, owed=["decode/tp1"], readers={RANK[D]: "complete"})],
    ),
    "bug": (
        C.INTERNAL_ERROR,
        [*RUNNING, expired(), say(20, EVENT.INTERNAL_ERROR, D, error="X()"), say(90, "of_later", D)],
    ),
    "stuck, returned": (
        C.STUCK_TRANSFER,
        [
            *BOTH,
            pull_ended(15, "timeout", **KEPT),
            say(25, EVENT.BLOCKS_RETURNED, D, **NAMES, seconds_after_failure=10.0),
        ],
    ),
    "stuck, retired": (
        C.STUCK_TRANSFER,
        [
            *BOTH,
            pull_ended(15, "timeout", **KEPT),
            say(75, EVENT.BLOCKS_RETIRED, D, **NAMES, seconds_after_failure=60.0, blocks=4, held_by=[RANK[P]]),
        ],
    ),
    "data plane": (
        C.DATA_PLANE_DIED,
        [*BOTH, pull_ended(15, "read_failed", **KEPT), say(14, EVENT.DATA_PLANE_RESTARTED, P, cause="signal 6")],
    ),
    "read from the dead": (
        C.READ_FROM_THE_DEAD,
        [begun(P), begun(D), *met(), stopped(D), pull_ended(15, "peer_lost", **KEPT)],
    ),
    "data plane later": (
        C.STUCK_TRANSFER,
        [
            *BOTH,
            pull_ended(15, "timeout", **KEPT),
            say(15.5, EVENT.DATA_PLANE_RESTARTED, D, cause="our agent has died", seconds=0.2),
            say(16, EVENT.BLOCKS_RETURNED, D, **NAMES, seconds_after_failure=1.0),
        ],
    ),
    "only released": (
        C.CAME_TOO_LATE,
        [begun(P), begun(D), stopped(P), stopped(D), expired(False), pull_ended(43, "complete", **READS_ELSEWHERE)],
    ),
    "only released, of a hit": (C.CAME_TOO_LATE, [*BOTH, expired(False), pull_ended(43, "complete", read_ranks=[])]),
    "released before it was lent": (
        C.RELEASE_TOO_EARLY,
        [*BOTH, expired(False), pull_ended(8, "engine_closed", failed_in="handshake", read_ranks=[], seconds=0.1)],
    ),
    "turned away for an earlier start": (
        C.STALE_PARAMS,
        [
            begun(P),
            begun(D),
            *(stopped(x) for x in (P, D)),
            expired(False),
            pull_ended(16, "engine_closed", failed_in="handshake", read_ranks=[], seconds=0.1),
            say(16.1, EVENT.READER_REFUSED, P, reader=RANK[D], said="hello", cause="restarted", detail="asked for x"),
        ],
    ),
    "keys, in the detail alone": (
        C.KEYS_REFUSED,
        [*BOTH, expired(False), pull_ended(16, "peer_unreachable", detail="it seems to turn our connection away")],
    ),
    "a stranger is refused": (
        C.RELEASE_LOST,
        [
            *BOTH,
            expired(refused=[[3.0, "release", "foreign_pull", "decode/tp0@99999999", ""]]),
            pull_ended(15, "complete"),
            unanswered(),
        ],
    ),
    "the last attempt's release is lost": (
        C.RELEASE_LOST,
        [
            *BOTH,
            expired(
                history=[
                    [0.1, f"granted to {RANK[D]}, pull {PULL}"],
                    [2.0, f"released by {RANK[D]}, pull {PULL}: retry"],
                ]
            ),
            pull_ended(12, "read_failed"),
            pull_ended(14, "peer_lost", pull_id=f"{D[:16]}-2", seconds=1.0),
            say(
                44,
                EVENT.RELEASE_UNANSWERED,
                D,
                **LAST,
                cause="timeout",
                ranks=[RANK[P]],
                seconds=30.0,
                outcome="failed",
            ),
        ],
    ),
    "looked at late": (
        C.PREFILL_LOOP_AWAY,
        [*BOTH, expired(False, late_s=6.0), pull_ended(15, "discharged", read_ranks=[], seconds=0.0), unanswered()],
    ),
    "one of two engines died": (
        C.NEVER_CLAIMED,
        [
            *DIED,
            say(5, EVENT.ENGINE_STARTED, OTHER, host="h"),
            say(6, EVENT.PEER_CHANGED, OTHER),
            *ANOTHER,
            expired(False),
        ],
    ),
    "owner died": (
        C.PREFILL_DIED,
        [begun(P), begun(D), *met(), stopped(D), say(10, EVENT.LEASE_LENT, P, **LEASE, lease_s=30.0)],
    ),
}


def found(records: list[Record]) -> list[Leak]:
    return find_leaks(join(records))


F, P2 = "dddddddd" + "3" * 24, "eeeeeeee" + "4" * 24
RANK |= {F: "third/tp0@dddddddd", P2: "prefill/tp0@eeeeeeee"}


def lent(at: float, start: str = P, **fields: Any) -> Record:
    return say(at, EVENT.LEASE_LENT, start, **{**LEASE, "lease_s": 30.0, **fields})


def gone(at: float, detail: str) -> Record:
    who = {"peer": RANK[P], "peer_incarnation": P, "before": "ready", "state": "gone"}
    return say(at, EVENT.PEER_CHANGED, D, **who, cause="peer_lost", detail=detail)


def test_who_lives_is_not_told_to_have_died() -> None:
    """Logs of a service that runs: their ends say nothing, whatever else has ended meanwhile."""
    quiet = [begun(P), begun(D), *met(), begun(F), stopped(F, 50.5)]
    assert not found([*quiet, lent(50.0)])
    # Nobody would have told this one of the other's end.
    [leak] = found([*quiet, expired(False, at=49.0)])
    assert leak.cause is C.NEVER_HEARD_OF
    # Two services have one name, and run side by side.
    assert not found([begun(P), begun(P2, 5.0), lent(6.0, P2, sequence=1), lent(100.0)])
    # Its level leaves goodbyes out, and those who heard it do not.
    assert not found([begun(D), *met(), begun(P), lent(20.0), gone(25.0, f"{RANK[P]} said goodbye")])
    assert not found([begun(D), *met(), begun(P), lent(20.0), gone(25.0, "forgotten by request")])
    [leak] = found([begun(D), *met(), begun(P), lent(20.0), gone(25.0, "no answer for 4.0 s")])
    assert leak.cause is C.PREFILL_DIED


@pytest.mark.parametrize("name", CASES)
def test_a_cause_is_named_and_nothing_else(name: str) -> None:
    cause, records = CASES[name]
    [leak] = found(records)
    assert leak.cause is cause
    assert leak.request_id == "a"
    assert "?" not in leak.sentence.replace("?@", "")
    shown = leaks_page.report([leak], join(records), Logs(records))
    assert json.loads(json.dumps(shown))["leaked"] == 1


def test_what_was_released_revoked_or_withdrawn_is_not_late() -> None:
    held = {**LEASE, "lent_s": 10.0, "left_s": 20.0, "claims": {}}
    for records in (
        [*BOTH, expired(cause="released", owed=[]), pull_ended(38, "complete")],
        [*BOTH, expired(cause="revoked"), pull_ended(38, "revoked")],
        [*BOTH, say(10, EVENT.REQUEST_WITHDRAWN, **LEASE, waited=1), pull_ended(11, "withdrawn")],
        # The answer was lost, not the release: a lease that expired is always in the log.
        [*BOTH, pull_ended(15, "complete"), unanswered()],
        # Held for long, and released well, which was not logged.
        [*BOTH, say(20, EVENT.LEASE_HELD, state="lent", waits="", requests=1, oldest=[held]), say(90, "of_later")],
        [*BOTH, pull_ended(38, "peer_lost")],
    ):
        assert not found(records)


def test_what_is_held_when_the_log_ends_is_told() -> None:
    held = {**LEASE, "lent_s": 10.0, "left_s": 20.0, "claims": {}}
    warned = say(20, EVENT.LEASE_HELD, state="lent", waits="not claimed by anybody", requests=1, oldest=[held])
    [leak] = found([begun(P), warned])
    assert (leak.cause, leak.state, leak.missing) == (C.NEVER_CLAIMED, "held", ("the decode side",))
    claims = {RANK[D]: {"pull_id": PULL, "heard_s": 8.0, "claimed_s": 0.1}}
    warned = say(20, EVENT.LEASE_HELD, state="lent", waits="", requests=1, oldest=[{**held, "claims": claims}])
    [leak] = found([begun(P), warned])
    assert leak.cause is C.READER_SILENT
    assert "heard of last 2 s" in leak.sentence
    announced = {**NAMES, "state_s": 11.0, "left_s": 100.0, "ranks": {RANK[P]: "granted"}}
    both = [
        *RUNNING,
        warned,
        say(20.5, EVENT.PULL_HELD, D, state="announced", waits="", requests=1, oldest=[announced]),
    ]
    [leak] = found(both)
    assert leak.cause is C.ANNOUNCED_AND_FORGOTTEN


def test_one_sides_logs_say_what_they_can_and_no_more() -> None:
    def only(start: str, records: list[Record]) -> list[Record]:
        return [x for x in records if x.incarnation == start]

    assert {x.cause for x in found(only(P, CASES["died after claim"][1]))} == {C.READER_SILENT}
    assert {x.cause for x in found(only(P, CASES["never heard of"][1]))} == {C.NEVER_CLAIMED}
    assert {x.cause for x in found(only(D, CASES["release lost"][1]))} == {C.RELEASE_UNANSWERED}
    assert {x.cause for x in found(only(D, CASES["announced"][1]))} == {C.ANNOUNCED_AND_FORGOTTEN}
    assert not found(only(D, CASES["died after claim"][1]))
    [leak] = found(only(P, CASES["died after claim"][1]))
    assert leak.missing == (RANK[D],)


def test_two_at_once_are_both_named() -> None:
    def other(record: Record) -> Record:
        """The same of a request `b`."""
        names = {"request_id": "gen-b" if "pull_id" in record.fields else "b", "sequence": 1, "pull_id": f"{D[:16]}-2"}
        fields = {k: names.get(k, v) for k, v in record.fields.items()}
        fields |= {"prefill_request_id": "b"} if "prefill_request_id" in fields else {}
        if "claims" in fields:
            fields["claims"] = {k: {**v, "pull_id": f"{D[:16]}-2"} for k, v in fields["claims"].items()}
        return Record(record.at, record.event, record.level, record.engine_id, record.rank, record.incarnation, fields)

    first = [expired(), pull_ended(15, "complete"), unanswered()]
    second = [other(expired(False)), other(pull_ended(45, "expired", seconds=0.1))]
    leaks = found([*BOTH, *first, *second])
    assert {x.request_id: x.cause for x in leaks} == {"a": C.RELEASE_LOST, "b": C.CAME_TOO_LATE}


def test_recorded_logs_of_real_processes() -> None:
    logs = read_logs([RECORDED])
    assert not logs.skipped

    def of(*engines: str) -> dict[str, str]:
        return named(find_leaks(join([x for x in logs.records if not engines or x.engine_id in engines])))

    everybody = {x.engine_id for x in logs.records}
    assert of() == {k: v.value for k, v in EXPECTED.items()}
    alone = of(*PREFILL)
    assert alone.pop("announced", "reader_silent") == "reader_silent"
    assert alone == {k: v.value for k, v in PREFILL_ONLY.items()}
    assert of(*(everybody - set(PREFILL))) == {k: v.value for k, v in DECODE_ONLY.items()}


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    told = run.invoke(app, ["leaks", str(RECORDED), "--details"])
    assert told.exit_code == 1
    assert "died_after_claim" in told.stdout
    assert "whoever had them died" in told.stdout
    assert "what to do" in told.stdout
    told = run.invoke(app, ["leaks", str(RECORDED), "--json", str(tmp_path / "x.json"), "--request", "D-late"])
    assert told.exit_code == 1
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["schema"] == "asynckv.leaks/1"
    assert [x["request_id"] for x in report["leaks"]] == ["late"]
    well = tmp_path / "well.log"
    well.write_text("".join(x for x in RECORDED.read_text().splitlines(True) if '"engine_started"' in x))
    told = run.invoke(app, ["leaks", str(well)])
    assert told.exit_code == 0
    assert "Nothing was late" in told.stdout


def test_the_command_refuses_bad_input(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.touch()
    for arguments in (
        ["leaks", str(empty)],
        ["leaks", str(tmp_path / "none")],
        ["leaks", str(RECORDED), "--limit", "-1"],
    ):
        assert CliRunner().invoke(app, arguments).exit_code != 0


def test_every_cause_is_documented() -> None:
    assert set(CATALOGUE) == set(CAUSE)
    text = DOCS.read_text()
    begin, end = "<!-- catalogue -->\n", "<!-- /catalogue -->"
    assert text.partition(begin)[2].partition(end)[0] == causes.markdown() + "\n", "run python -m scripts.draw_leaks"


VALUES = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from([*RANK.values(), PULL, "a", "*", "lent"])
)
JSON = st.recursive(
    VALUES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, *LEASE]), x, max_size=3)
)
FIELDS = [
    *NAMES,
    *LEASE,
    *(
        "cause",
        "state",
        "owed",
        "claims",
        "refused",
        "history",
        "oldest",
        "ranks",
        "readers",
        "seconds",
        "held_transfers",
    ),
    *("same_as", "unanswered", "peer_incarnation", "reader_incarnation", "detail", "failed_in"),
]
ROWS = st.builds(
    lambda event, start, at, fields: say(at, event, start, **fields),
    st.sampled_from(list(EVENT)),
    st.sampled_from([P, D, E]),
    st.floats(-1e3, 1e3),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROWS, max_size=8), st.sampled_from(list(CASES)))
def test_hostile_lines_end_in_a_report(rows: list[Record], name: str) -> None:
    records = [*CASES[name][1], *rows]
    service = join(records)
    report = leaks_page.report(find_leaks(service), service, Logs(records))
    json.dumps(report)
