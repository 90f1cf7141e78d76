"""What is late, and why: recorded logs of real processes, causes from hand-made lines, two at once, hostile lines."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from asynckv import told
from asynckv.account.inspect import RankStatus, RequestStatus
from asynckv.account.values import Account, Facts
from asynckv.edges.kernel import identity
from asynckv.errors import ConfigError
from asynckv.tools import cli
from asynckv.tools.cli import app
from asynckv.tools.diagnose import why_text
from asynckv.tools.diagnose.ask import Answer, Trouble
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, HEADING, SAID, WHY, OwnerView, remedy_of
from asynckv.tools.diagnose.findings import Seen, find
from asynckv.tools.diagnose.join import Service, join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.leaks_live import look_here, records_of, tell
from asynckv.tools.diagnose.leaks_pulls import Failure, failures
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs, Record, read_logs
from asynckv.tools.diagnose.timeline_model import ground
from asynckv.tools.diagnose.why_report import report

RECORDED = Path(__file__).parent / "data" / "leaks.jsonl"
C = CAUSE

P, D, E = "aaaaaaaa" + "0" * 24, "bbbbbbbb" + "1" * 24, "cccccccc" + "2" * 24
OTHER = "eeeeeeee" + "3" * 24
RANK = {P: "prefill/tp0@aaaaaaaa", D: "decode/tp0@bbbbbbbb", E: "decode/tp1@cccccccc", OTHER: "other/tp0@eeeeeeee"}
PULL = f"{D[:16]}-1"
NAMES = {"request_id": "gen-a", "prefill_request_id": "a", "pull_id": PULL, "peer": "prefill", "sequence": 0}
LEASE: dict[str, Any] = {"request_id": "a", "sequence": 0, "blocks": 4}


def say(at: float, event: type[told.Told] | str, start: str = P, **fields: Any) -> Record:
    name = event if isinstance(event, str) else event.event
    return Record(1e9 + at, name, "info", RANK[start].partition("/")[0], RANK[start], start, fields)


def line(record: Record) -> dict[str, Any]:
    """The same as it stands in a log."""
    bound = {"engine_id": record.engine_id, "rank": record.rank, "incarnation": record.incarnation}
    return {"timestamp": record.at, "event": record.event, "level": record.level, **bound, **record.fields}


def begun(start: str, at: float = 0.0) -> Record:
    return say(at, told.EngineStarted, start, host="h", lease_s=30.0, grant_s=10.0, address="tcp://10.0.0.1:1")


def stopped(start: str, at: float = 200.0) -> Record:
    return say(at, told.EngineStopped, start)


def met(at: float = 5.0) -> list[Record]:
    peer = {"peer": RANK[P], "peer_incarnation": P, "address": "tcp://10.0.0.1:1"}
    return [
        say(at, told.PeerChanged, D, **peer, before="new", state="connecting"),
        say(at + 0.01, told.ReaderMet, P, reader=RANK[D], reader_incarnation=D, minor=3),
        say(at + 0.02, told.PeerChanged, D, **peer, before="connecting", state="loading"),
    ]


def expired(claimed: bool = True, at: float = 40.0, **fields: Any) -> Record:
    claims = {RANK[D]: {"pull_id": PULL, "claimed_s": 0.1, "heard_s": 2.0}} if claimed else {}
    owed = [RANK[D]] if claimed else ["*"]
    said = {"cause": "expired", **LEASE, "seconds": 30.0, "readers": {}, "owed": owed, "claims": claims}
    return say(at, told.LeaseEnded, **{**said, **fields})


def pull_ended(at: float, cause: str, **fields: Any) -> Record:
    said = {"cause": cause, **NAMES, "peer_ranks": [RANK[P]], "read_ranks": [RANK[P]], "seconds": 5.0}
    return say(at, told.PullEnded, D, **{**said, **fields})


def waits(start: str, at: float, **seconds: float) -> Record:
    """A sign of life of an engine that something waits for, by its kind."""
    return say(at, told.EngineAlive, start, waits_for_step={k: {"number": 2, "seconds": s} for k, s in seconds.items()})


def alive(start: str, at: float) -> Record:
    return say(at, told.EngineAlive, start)


def unoffered(at: float, cause: str = "no_offer", name: str = "gen-a", start: str = D) -> Record:
    """A request followed its prefill rank for ten seconds."""
    said = {"request_id": name, "pull_id": f"{start[:16]}-f{name}", "peer": "prefill", "peer_ranks": [RANK[P]]}
    return say(at, told.FollowFailed, start, **said, cause=cause, detail="", seconds=10.0)


def unanswered(at: float = 60.0, cause: str = "timeout", outcome: str = "complete") -> Record:
    return say(at, told.ReleaseUnanswered, D, **NAMES, cause=cause, ranks=[RANK[P]], seconds=30.0, outcome=outcome)


def away(start: str, at: float, seconds: float) -> Record:
    return say(at, told.LoopWasAway, start, seconds=seconds, leases=1, pulls=1, parked=0)


def lost(at: float) -> Record:
    peer = {"peer": RANK[P], "peer_incarnation": P, "address": "tcp://10.0.0.1:1"}
    return say(at, told.PeerChanged, D, **peer, before="ready", state="gone", cause="peer_lost", detail="forgotten")


def gone(at: float, how: str, **who: str) -> Record:
    who = {"peer": RANK[P], "peer_incarnation": P, "before": "ready", "state": "gone", **who}
    return say(at, told.PeerChanged, D, **who, cause="peer_lost", how=how, detail="in words")


def asked_before() -> list[Record]:
    """The reader has met the rank for another request."""
    other = {**NAMES, "request_id": "gen-b", "prefill_request_id": "b", "sequence": 7, "pull_id": f"{D[:16]}-9"}
    return [say(6, told.PullEnded, D, **other, cause="complete", seconds=0.1)]


def retrying(records: list[Record]) -> list[Record]:
    """The same where the reader's last release said that it would try again."""
    claim = {"reader": RANK[D], "pull_id": PULL}
    notes = [[0.1, {"note": "granted", **claim}], [2.0, {"note": "released", **claim, "outcome": "retry"}]]
    return [replace(x, said={**x.fields, "history": notes}) if x.event == told.LeaseEnded.event else x for x in records]


def no(after_s: float, said: str, cause: str, detail: str = "") -> list[Any]:
    """Return what a lease remembers of a refusal to its reader."""
    return [after_s, said, cause, RANK[D], detail]


BOTH = [begun(P), begun(D), *met(), stopped(P), stopped(D)]
RUNNING = [begun(P), begun(D), *met()]
REFUSED = no(3.0, "release", "wrong_cohort", "lent to 'x'")
KEPT = {"held_transfers": 3, "failed_in": "read", "detail": "still reading"}
DIED = [begun(P), begun(D), *met(), stopped(P)]
RESTARTED = replace(begun(E, 60.0), rank="decode/tp0@cccccccc", engine_id="decode")

SILENT = [begun(P), begun(D), *met(), *(say(10.0 + 5 * i, "of_work", D) for i in range(10))]
"""A reader that wrote a line each 5 s, and then no more."""

READS_ELSEWHERE = {"peer_ranks": ["prefill/tp1@dddddddd", RANK[P]], "read_ranks": ["prefill/tp1@dddddddd"]}
LAST = {**NAMES, "pull_id": f"{D[:16]}-2"}
HIT = pull_ended(15, "complete", read_ranks=[], seconds=0.0)
ANOTHER = [
    say(7, told.PullEnded, D, **{**NAMES, "prefill_request_id": "w", "sequence": 7}, cause="complete", seconds=0.1),
    say(200, told.EngineStopped, OTHER),
]
"""The reader that died had been asked for others before."""

STRANGERS = [begun(P), begun(D), stopped(P), stopped(D)]


def claimed(*records: Record) -> list[Record]:
    """Return the lines of two that have met, of a lease that expired after a claim, and more."""
    return [*BOTH, expired(), *records]


def unclaimed(*records: Record, among: Sequence[Record] = BOTH) -> list[Record]:
    return [*among, expired(False), *records]


CASES: dict[str, tuple[CAUSE, list[Record]]] = {
    "release lost": (C.RELEASE_LOST, claimed(pull_ended(15, "complete"), unanswered())),
    "release refused": (C.RELEASE_REFUSED, [*BOTH, expired(refused=[REFUSED]), pull_ended(15, "complete")]),
    "release too early": (
        C.RELEASE_TOO_EARLY,
        [*BOTH, expired(False, refused=[no(-31.0, "release", "parked_too_long")])],
    ),
    "max_lease": (
        C.MAX_LEASE,
        [*BOTH, expired(refused=[[*no(29.0, "renew", "expired", "lent for longer than 30 s"), "max_lease_s"]])],
    ),
    "decode away": (C.DECODE_LOOP_AWAY, claimed(pull_ended(45, "lease_lost", seconds=34.0), away(D, 45, 30))),
    "prefill away": (C.PREFILL_LOOP_AWAY, claimed(pull_ended(15, "complete"), unanswered(), away(P, 40, 28))),
    "too short": (C.LEASE_TOO_SHORT, claimed(pull_ended(41, "lease_lost", seconds=30.0))),
    "closed reader": (C.READER_CLOSED, [*RUNNING, stopped(P), stopped(D, 20.0), expired()]),
    "closed owner": (C.PREFILL_CLOSED, [*BOTH, expired(cause="closed", revoked_by="closed")]),
    "died after claim": (C.READER_DIED, [*DIED, expired()]),
    "died before claim": (C.READER_DIED, [*DIED, expired(False), RESTARTED]),
    "died before claim, or was cut off": (C.NEVER_CLAIMED, [*DIED, expired(False)]),
    "never heard of": (C.NEVER_HEARD_OF, unclaimed()),
    "never heard of, without a step": (
        C.NO_STEP,
        unclaimed(say(45, told.EngineAlive, D, step_s=40.0, waits_for_step={})),
    ),
    "never shook hands": (C.NEVER_SHOOK_HANDS, unclaimed(pull_ended(16, "peer_unreachable"), among=STRANGERS)),
    "never shook hands there": (
        C.NEVER_SHOOK_HANDS,
        unclaimed(pull_ended(16, "timeout", failed_in="handshake", failed_with=[RANK[P]])),
    ),
    "wrong target": (C.WRONG_TARGET, unclaimed(pull_ended(16, "wrong_target"))),
    "stale": (C.STALE_PARAMS, unclaimed(pull_ended(16, "restarted"))),
    "queued": (C.LEASE_TOO_SHORT, unclaimed(pull_ended(42, "timeout", failed_in="queue", seconds=31.0))),
    "came too late": (C.LEASE_TOO_SHORT, unclaimed(pull_ended(45, "expired", seconds=0.1))),
    "came too late, for it was away": (
        C.DECODE_LOOP_AWAY,
        unclaimed(away(D, 55, 50), pull_ended(55.3, "cancelled", seconds=0.2, detail="cancelled")),
    ),
    "came too late, long after it was away": (
        C.LEASE_TOO_SHORT,
        unclaimed(away(D, 55, 50), pull_ended(80, "expired", seconds=0.1)),
    ),
    "was away for a short part of it": (
        C.LEASE_TOO_SHORT,
        unclaimed(away(D, 41, 14), pull_ended(41.2, "expired", seconds=0.1)),
    ),
    "away, and never spoke of it": (C.DECODE_UNRESPONSIVE, unclaimed(away(D, 55, 50))),
    "away before": (C.NEVER_HEARD_OF, unclaimed(away(D, 10.2, 50))),
    "fell silent": (C.NEVER_CLAIMED, [*SILENT, expired(False, at=80.0), say(200, "of_later")]),
    "silent, with nothing to say": (
        C.NEVER_HEARD_OF,
        [*SILENT, alive(D, 70.0), alive(D, 85.0), expired(False, at=80.0), say(88, "of_later")],
    ),
    "one rank away": (
        C.DECODE_LOOP_AWAY,
        [
            *(*BOTH, begun(E), stopped(E), away(E, 55, 50)),
            expired(False, owed=["decode/tp1"], readers={RANK[D]: "complete"}),
        ],
    ),
    "announced": (C.ANNOUNCED_AND_FORGOTTEN, [*BOTH, pull_ended(60, "timeout", failed_in="announced", seconds=50.0)]),
    "retry": (C.NO_ATTEMPT_FOLLOWED, retrying(claimed(pull_ended(12, "read_failed")))),
    "one rank": (
        C.RANK_NEVER_SPOKE,
        [*BOTH, begun(E), stopped(E), expired(False, owed=["decode/tp1"], readers={RANK[D]: "complete"})],
    ),
    "stuck, returned": (
        C.STUCK_TRANSFER,
        [
            *BOTH,
            pull_ended(15, "timeout", **KEPT),
            say(25, told.BlocksReturned, D, **NAMES, seconds_after_failure=10.0),
        ],
    ),
    "stuck, retired": (
        C.STUCK_TRANSFER,
        [
            *BOTH,
            pull_ended(15, "timeout", **KEPT),
            say(75, told.BlocksRetired, D, **NAMES, seconds_after_failure=60.0, blocks=4, held_by=[RANK[P]]),
        ],
    ),
    "data plane": (
        C.DATA_PLANE_DIED,
        [*BOTH, pull_ended(15, "read_failed", **KEPT), say(14, told.DataPlaneRestarted, P, cause="signal 6")],
    ),
    "read from the dead": (
        C.PREFILL_DIED,
        [begun(P), begun(D), *met(), stopped(D), pull_ended(15, "peer_lost", **KEPT)],
    ),
    "data plane later": (
        C.STUCK_TRANSFER,
        [
            *BOTH,
            pull_ended(15, "timeout", **KEPT),
            say(15.5, told.DataPlaneRestarted, D, cause="our agent has died", seconds=0.2),
            say(16, told.BlocksReturned, D, **NAMES, seconds_after_failure=1.0),
        ],
    ),
    "only released": (C.LEASE_TOO_SHORT, unclaimed(pull_ended(43, "complete", **READS_ELSEWHERE), among=STRANGERS)),
    "only released, of a hit": (C.LEASE_TOO_SHORT, unclaimed(pull_ended(43, "complete", read_ranks=[]))),
    "released before it was lent": (
        C.RELEASE_TOO_EARLY,
        unclaimed(pull_ended(8, "engine_closed", failed_in="handshake", read_ranks=[], seconds=0.1)),
    ),
    "turned away for an earlier start": (
        C.STALE_PARAMS,
        [
            *(*STRANGERS, expired(False)),
            pull_ended(16, "engine_closed", failed_in="handshake", peer_ranks=["prefill/tp0@99999999"], read_ranks=[]),
            say(16.1, told.ReaderRefused, P, reader=RANK[D], said="hello", cause="restarted", detail="asked for x"),
        ],
    ),
    "turned away": (C.KEYS_REFUSED, unclaimed(pull_ended(16, "peer_unreachable", how="turned_away"))),
    "nobody says that who died had heard of it": (C.NEVER_CLAIMED, [*DIED, *asked_before(), expired(False)]),
    "closed long after": (C.RELEASE_LOST, claimed(pull_ended(15, "complete"), unanswered(200.0, "engine_closed"))),
    "renamed, and turned away": (
        C.KEYS_REFUSED,
        unclaimed(pull_ended(16, "peer_unreachable", prefill_request_id="cmpl-a", how="turned_away"), among=STRANGERS),
    ),
    "renamed, and too late": (
        C.OTHER_REQUEST_ID,
        unclaimed(pull_ended(45, "expired", prefill_request_id="cmpl-a", seconds=0.1)),
    ),
    "of a start that is suspended": (
        C.STALE_PARAMS,
        unclaimed(pull_ended(16, "engine_closed", peer_ranks=["prefill/tp0@dddddddd"])),
    ),
    "decode away, in short": (
        C.DECODE_LOOP_AWAY,
        claimed(
            away(D, 45, 34.5), say(45.1, told.PullEnded, D, **NAMES, cause="lease_lost", same_as="x-1", seconds=0.04)
        ),
    ),
    "decode away while it greeted": (
        C.DECODE_LOOP_AWAY,
        unclaimed(away(D, 36, 24), pull_ended(36, "peer_unreachable", seconds=25), among=STRANGERS),
    ),
    "given up, in short": (
        C.RELEASE_LOST,
        claimed(lost(15.0), say(15.0, told.PullEnded, D, **NAMES, cause="peer_lost", same_as="x-1", seconds=0.04)),
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
            *retrying(claimed(pull_ended(12, "read_failed"))),
            pull_ended(14, "peer_lost", pull_id=f"{D[:16]}-2", seconds=1.0),
            replace(unanswered(44), said={**unanswered(44).fields, **LAST, "outcome": "failed"}),
        ],
    ),
    "looked at late": (
        C.PREFILL_LOOP_AWAY,
        [*BOTH, expired(False, late_s=6.0), pull_ended(15, "discharged", read_ranks=[], seconds=0.0), unanswered()],
    ),
    "one of two engines died": (
        C.NEVER_CLAIMED,
        [*DIED, say(5, told.EngineStarted, OTHER, host="h"), say(6, told.PeerChanged, OTHER), *ANOTHER, expired(False)],
    ),
    "renewed for as long as may be": (
        C.MAX_LEASE,
        [
            say(0, told.EngineStarted, P, host="h", lease_s=30.0, grant_s=10.0, max_lease_s=30.0),
            *BOTH[1:],
            expired(claims={RANK[D]: {"pull_id": PULL, "claimed_s": 0.1, "heard_s": 29.0}}),
            pull_ended(41, "lease_lost", seconds=30.0),
        ],
    ),
    "a retry was lost, and none followed": (
        C.NO_ATTEMPT_FOLLOWED,
        claimed(
            pull_ended(15, "peer_lost", unanswered=[RANK[P]]),
            say(15, told.PullRetried, D, **NAMES, cause="peer_lost", attempt=2, after_s=0.4),
        ),
    ),
    "another attempt came too late": (
        C.LEASE_TOO_SHORT,
        claimed(
            pull_ended(15, "peer_lost", unanswered=[RANK[P]]),
            say(15, told.PullRetried, D, **NAMES, cause="peer_lost", attempt=2, after_s=0.4),
            say(41, told.PullEnded, D, **LAST, cause="expired", peer_ranks=[RANK[P]], read_ranks=[RANK[P]]),
        ),
    ),
    "a hit's release is lost, and nobody met": (C.RELEASE_LOST, unclaimed(HIT, unanswered(), among=STRANGERS)),
    "it lived on for longer than claims take": (
        C.NEVER_CLAIMED,
        [*DIED, ANOTHER[0], expired(False), say(20, "of_later", D)],
    ),
    "a rank lived on for longer than claims take": (
        C.RANK_NEVER_SPOKE,
        [*DIED, expired(False, owed=["decode/tp0"], readers={RANK[E]: "complete"}), say(20, "of_later", D)],
    ),
    "owner died": (
        C.PREFILL_DIED,
        [begun(P), begun(D), *met(), stopped(D), say(10, told.LeaseLent, P, **LEASE, lease_s=30.0)],
    ),
}


def found(records: list[Record]) -> list[Leak]:
    return find_leaks(Presence(Axis(join(records))))


def of_decode(records: list[Record]) -> list[Record]:
    """The same without the prefill side's log."""
    return [x for x in records if x.incarnation != P]


def refused(cause: str, detail: str = "") -> Record:
    return say(15.1, told.ReleaseRefused, D, **NAMES, cause=cause, ranks=[RANK[P]], detail=detail)


def lease_held(at: float, waits: str = "", **entry: Any) -> Record:
    """A prefill rank warns of a lease that it holds: unless said otherwise, lent ten seconds before, and unclaimed."""
    entry = {**LEASE, "lent_s": 10.0, "left_s": 20.0, "claims": {}, **entry}
    return say(at, told.LeaseHeld, state="lent", waits=waits, requests=1, oldest=[entry])


CLAIM = {RANK[D]: {"pull_id": PULL, "heard_s": 9.0, "claimed_s": 0.1}}
OLD_CLAIM = {RANK[D]: {"pull_id": PULL, "heard_s": 2.0, "claimed_s": 0.1}}
FORGOTTEN = pull_ended(39, "timeout", failed_in="announced", seconds=30.0)
PROMISED = [1.0, {"note": "promised", "rank": RANK[P], "seconds": 2.0}]
PROMISE = say(12, told.PullEnded, D, **NAMES, cause="read_failed", history=[PROMISED])
CLOSED = [*RUNNING, stopped(P), stopped(D, 41.0)]
SECOND = "dddddddd" + "4" * 24
RANK[SECOND] = "prefill/tp1@dddddddd"
UNFIT = pull_ended(15, "geometry_refused", failed_in="handshake", detail=f"{RANK[P]}: layouts differ: dtype")
SECOND_GONE = gone(45, "silent", peer=RANK[SECOND], peer_incarnation=SECOND)
UNLISTED = pull_ended(16, "peer_unreachable", failed_in="handshake", detail="its key", how="unlisted_listener")
RETURNED = say(15.3, told.BlocksReturned, D, **NAMES, seconds_after_failure=0.3)
AGAIN = {"pull_id": f"{D[:16]}-2", "prefill_request_id": "b", "peer": "other", "sequence": 3}
ELSEWHERE = pull_ended(14, "complete", **AGAIN, seconds=1.0, peer_ranks=[RANK[OTHER]], read_ranks=[RANK[OTHER]])
CELLS: list[list[Record]] = [
    *([*BOTH, expired(claimed), FORGOTTEN] for claimed in (True, False)),
    retrying(claimed(FORGOTTEN)),
    [begun(P), stopped(P), expired()],
    retrying([begun(P), stopped(P), expired()]),
    claimed(pull_ended(15, "read_failed", **KEPT)),
    [begun(P), lease_held(20, owed=[RANK[D]], claims=CLAIM)],
    *(retrying(CASES[x][1]) for x in ("decode away", "prefill away", "closed reader", "died after claim")),
    retrying(CASES["renewed for as long as may be"][1]),
    [*BOTH, pull_ended(15, "timeout", **KEPT), away(P, 16, 5)],
    *([*BOTH, expired(refused=[no(3.0, "claim", x)])] for x in ("wrong_request", "restarted")),
    [*CLOSED, expired(False), pull_ended(39, "cancelled", seconds=28), unanswered(41, "engine_closed")],
    *(of_decode([*BOTH, refused(x)]) for x in ("parked_too_long", "wrong_request", "restarted", "wrong_cohort")),
    of_decode(CASES["release lost"][1]),
    *(of_decode([*BOTH, pull_ended(15, x), unanswered()]) for x in ("peer_unreachable", "wrong_target")),
    of_decode([*CASES["turned away"][1], unanswered()]),
    of_decode([*BOTH, pull_ended(15, "peer_lost", **KEPT)]),
    claimed(pull_ended(45, "peer_lost")),
    retrying(claimed(pull_ended(15, "peer_lost", failed_in="announced", how="silent"))),
    unclaimed(UNFIT, unanswered(cause="geometry_refused"), among=STRANGERS),
    of_decode([*BOTH, UNFIT, unanswered(cause="geometry_refused")]),
    [*BOTH, begun(SECOND), expired(), pull_ended(45, "peer_lost", peer_ranks=[RANK[P], RANK[SECOND]]), SECOND_GONE],
    [*RUNNING, PROMISE, unanswered(), gone(20, "silent"), say(90, "of_later", D)],
    unclaimed(UNLISTED, among=STRANGERS),
    of_decode([*BOTH, UNLISTED, unanswered()]),
    retrying(claimed(pull_ended(12, "read_failed"), ELSEWHERE)),
    claimed(pull_ended(12, "read_failed"), unanswered(60.0, outcome="retry"), ELSEWHERE),
    [*BOTH, pull_ended(15, "timeout", **KEPT), RETURNED],
    [*BOTH, pull_ended(15, "timeout", **KEPT), RETURNED, away(D, 15, 4.5)],
    [begun(P), begun(D), *met(), stopped(D, 9.0), stopped(P), expired(False)],
]
"""What, with `CASES`, puts a request into each cell of the table."""


def test_every_cell_of_the_table_has_its_cause_and_its_evidence() -> None:
    leaks = [leak for records in (*CELLS, *(x for _, x in CASES.values())) for leak in found(records)]
    hangs = join([*RUNNING, expired(), say(500, "of_later")])
    hangs.processes[D].hangs = True
    leaks += find_leaks(Presence(Axis(hangs)))
    for leak in leaks:
        owner, reader = leak.cell
        assert leak.cause is WHY[owner][reader]
        assert leak.evidence.startswith(SAID[owner])
        assert "?" not in leak.sentence.replace("?@", "")
    failures = [x for _, records in FAILURES.values() for x in failed(records)]
    told_of = {x.cell for x in leaks} | {(x.owner, x.reader) for x, _ in (*failures, *failed(BLOCKED))}
    assert told_of == {(owner, reader) for owner, row in WHY.items() for reader in row}


F, P2 = "dddddddd" + "3" * 24, "eeeeeeee" + "4" * 24
RANK |= {F: "third/tp0@dddddddd", P2: "prefill/tp0@eeeeeeee"}


def lent(at: float, start: str = P, **fields: Any) -> Record:
    return say(at, told.LeaseLent, start, **{**LEASE, "lease_s": 30.0, **fields})


def test_a_process_that_lives_is_not_told_to_have_died() -> None:
    """Logs of a service that runs: their ends say nothing, whatever else has ended meanwhile."""
    quiet = [begun(P), begun(D), *met(), alive(D, 45.0), begun(F), stopped(F, 50.5)]
    assert not found([*quiet, lent(50.0)])
    # Nobody would have told this one of the other's end.
    [leak] = found([*quiet, expired(False, at=49.0), say(56.0, "of_later")])
    assert leak.cause is C.NEVER_HEARD_OF
    # The logs end soon after its lease: it may be on its way.
    [leak] = found([*quiet, expired(False, at=49.0)])
    assert leak.cause is C.NEVER_CLAIMED
    # Two services have one name, and run side by side.
    assert not found([begun(P), begun(P2, 5.0), lent(76.0, P2, sequence=1), alive(P2, 90.0), lent(100.0)])
    # Its level leaves goodbyes out, and those who heard it do not.
    assert not found([begun(D), *met(), begun(P), lent(20.0), gone(25.0, "goodbye")])
    assert not found([begun(D), *met(), begun(P), lent(20.0), gone(25.0, "forgotten")])
    lost = [begun(D), *met(), begun(P), lent(20.0), gone(24.0, "silent")]
    [leak] = found([*lost, say(60.0, "of_later", D)])
    assert leak.cause is C.PREFILL_DIED
    # It was silent, and so is everybody else soon after: its loop may be away.
    assert all(x.cause is not C.PREFILL_DIED for x in found(lost))
    assert not found([*lost[:-1], say(30.0, "of_later", D), gone(19.0, "broken")])


def test_an_announcement_is_forgotten_when_its_time_is_up() -> None:
    announced = {**NAMES, "state_s": 2.0, "left_s": 5.0, "ranks": {RANK[P]: "granted"}}
    held = say(20.0, told.PullHeld, D, state="announced", waits="", requests=1, oldest=[announced])
    assert not found([*RUNNING, held, say(21, "of_later", D)])
    [leak] = found([*RUNNING, held, say(25.5, "of_later", D)])
    assert leak.cause is C.ANNOUNCED_AND_FORGOTTEN


def test_logs_that_were_cut_at_one_moment_tell_of_no_death() -> None:
    """A process whose loop is away says nothing either, and the logs end before it can say so."""
    [leak] = found([*RUNNING, expired(), say(42, "of_later")])
    assert leak.cause is C.READER_SILENT
    [leak] = found([*RUNNING, expired(), say(75, "of_later")])
    assert (leak.cause, leak.cell[0]) == (C.READER_DIED, OwnerView.CLAIMED)
    [leak] = found([*RUNNING, alive(D, 40.0), expired(False), say(42, "of_later")])
    assert leak.cause is C.NEVER_CLAIMED
    # Its release may still be answered, or given up.
    [leak] = found([*RUNNING, expired(), pull_ended(15, "complete"), say(42, "of_later", D)])
    assert leak.cause is C.READER_SILENT


def test_a_process_that_died_long_before_a_request_was_lent_is_not_its_reader() -> None:
    ended = [stopped(P, 2000.0)]
    [leak] = found([*RUNNING, *ended, expired(False, at=45.0)])
    assert leak.cause is C.NEVER_CLAIMED
    assert f"or arrived at {RANK[D]}, which died or was cut off meanwhile" in leak.sentence
    [leak] = found([*RUNNING, *ended, expired(False, at=800.0)])
    assert leak.cause is C.NEVER_HEARD_OF
    assert f"{RANK[D]} had died before it was lent" in leak.sentence
    # Another decode engine lives: it is asked, and the dead one is not named.
    lives = [say(5, told.EngineStarted, OTHER, host="h"), say(6, told.PeerChanged, OTHER), *ANOTHER[1:]]
    other = say(7, told.PullEnded, OTHER, **{**NAMES, "prefill_request_id": "w", "sequence": 7}, cause="complete")
    [leak] = found([*RUNNING, *lives, other, say(1500, told.EngineStopped, OTHER), *ended, expired(False, at=800.0)])
    assert leak.cause is C.NEVER_HEARD_OF
    assert RANK[D] not in leak.sentence
    # One that is restarted late is known to be dead only then.
    again = replace(begun(E, 900.0), rank="decode/tp0@cccccccc", engine_id="decode")
    [leak] = found([*RUNNING, again, stopped(E, 1900.0), *ended, expired(False, at=800.0)])
    assert (leak.cause, leak.cell[0]) == (C.READER_DIED, OwnerView.UNCLAIMED)


OWNERS = {
    C.READER_DIED: {"died after claim": OwnerView.CLAIMED},
    C.LEASE_TOO_SHORT: {"too short": OwnerView.CLAIMED, "another attempt came too late": OwnerView.CLAIMED},
    C.PREFILL_DIED: {"read from the dead": OwnerView.READ, "owner died": OwnerView.DIED},
}
"""What the owner knows: within one cause it tells whether a reader had claimed. It had not, where no case says so."""


@pytest.mark.parametrize("name", CASES)
def test_a_cause_is_named_and_nothing_else(name: str) -> None:
    cause, records = CASES[name]
    [leak] = found(records)
    assert leak.cause is cause
    if cause in OWNERS:
        assert leak.cell[0] is OWNERS[cause].get(name, OwnerView.UNCLAIMED)
    assert leak.request_id == "a"
    assert "?" not in leak.sentence.replace("?@", "")
    assert not re.search("(Prefill|Decode)/tp", shown(records)), "names are as they were logged"
    told = json.loads(json.dumps(plain(records)))
    assert [x["cause"] for x in told["late"]] == [cause.value]
    assert cause.value in [x["code"] for x in told["findings"]] or told["findings"][0]["requests"] == ["a"]


def test_what_was_released_revoked_or_withdrawn_is_not_late() -> None:
    for records in (
        [*BOTH, expired(cause="released", owed=[]), pull_ended(38, "complete")],
        [*BOTH, expired(cause="revoked"), pull_ended(38, "revoked")],
        [*BOTH, say(10, told.RequestWithdrawn, **LEASE, waited=1), pull_ended(11, "withdrawn")],
        # The answer was lost, not the release: a lease that expired is always in the log.
        [*BOTH, pull_ended(15, "complete"), unanswered()],
        # Held for long, and released well, which was not logged.
        [*BOTH, lease_held(20), say(90, "of_later")],
        [*BOTH, pull_ended(38, "peer_lost")],
        # It has failed, and has no outcome yet.
        [*RUNNING, say(20, told.PullHeld, D, state="draining", waits="", requests=1, oldest=[{**NAMES, "state_s": 1}])],
    ):
        assert not found(records)


def test_what_is_held_when_the_log_ends_is_told() -> None:
    [leak] = found([begun(P), lease_held(20, "not claimed by any reader")])
    assert (leak.cause, leak.state, leak.missing) == (C.NEVER_CLAIMED, "held", ("the decode side",))
    [leak] = found([begun(P), lease_held(20, claims=OLD_CLAIM)])
    assert leak.cause is C.READER_SILENT
    assert "heard of last 2 s" in leak.sentence


def test_what_is_announced_is_not_late_before_its_time_is_up() -> None:
    warned = lease_held(23, lent_s=13.0, left_s=9.0, owed=[RANK[D]], claims=CLAIM)

    def waits(left_s: float) -> list[Record]:
        announced = {**NAMES, "state_s": 13.0, "left_s": left_s, "ranks": {RANK[P]: "granted"}}
        held = say(23.5, told.PullHeld, D, state="announced", waits="", requests=1, oldest=[announced])
        return [*RUNNING, warned, held, say(24.0, "of_later", D)]

    assert not found(waits(287.0))
    [leak] = found(waits(0.2))
    assert leak.cause is C.ANNOUNCED_AND_FORGOTTEN


def test_logs_that_end_at_different_moments_make_nothing_late_that_was_read() -> None:
    """Files that were copied one after the other: what one knows of the end of a request, the other does not yet."""
    warned = lease_held(24, lent_s=14.0, left_s=16.0, owed=["*"])
    read = [pull_ended(25, "complete", seconds=2.0), say(26, "of_later", D)]
    assert not found([*RUNNING, warned, *read])
    assert not found([*RUNNING, lent(10), say(41, "of_later"), *read])
    # Had nobody claimed it, its end would be told of: a grant is a line that may be left out.
    assert not found([*RUNNING, lent(10), say(55, "of_later"), say(55, "of_later", D)])
    # The decode side's file ends first: that its only rank is not done is not known.
    leaks = found([*RUNNING, warned, say(30, "of_later")])
    assert [(x.cause, x.state) for x in leaks] == [(C.NEVER_CLAIMED, "held")]
    # Its release may yet be given up, and it is an engine of one rank.
    leaks = found([*RUNNING, expired(False), pull_ended(39, "complete"), say(42, "of_later", D)])
    assert [CATALOGUE[x.cause].is_class for x in leaks] == [True]


def in_order(records: list[Record]) -> list[Record]:
    """Records with the places of their lines, each process in a file of its own; they are given in its order."""
    lines = Counter[str]()
    out = []
    for record in records:
        lines[record.incarnation] += 1
        out.append(replace(record, where=f"{record.rank}.log:{lines[record.incarnation]}"))
    return out


@pytest.mark.parametrize("name", ["release lost", "never heard of", "too short", "died after claim", "stuck, returned"])
def test_a_clock_that_was_put_back_changes_no_cause_and_is_told(name: str) -> None:
    cause, records = CASES[name]
    records = sorted(records, key=lambda x: x.at)
    for start in (P, D):
        own = [x for x in records if x.incarnation == start]
        for first in own[2:-1]:
            moved = [replace(x, at=x.at - 60) if x in own and x.at >= first.at else x for x in records]
            leaks = found(in_order(moved))
            said = ["its clock was set" if "was set: it went back" in x.sentence else x.cause for x in leaks]
            assert all(x in (cause, "its clock was set") for x in said), first
            assert "its clock was set" in said, first


def test_files_in_the_wrong_order_are_no_clock_that_was_put_back() -> None:
    records = sorted(CASES["release lost"][1], key=lambda x: x.at)
    for order in (records[::-1], [*records[5:], *records[:5]]):
        service = join(in_order(order))
        assert not any(x.put_back for x in service.processes.values())
        assert [x.cause for x in find_leaks(Presence(Axis(service)))] == [C.RELEASE_LOST]


def failed(records: list[Record]) -> list[Failure]:
    return failures(Presence(Axis(join(records))))


BLOCKED = [
    *(*BOTH, expired(cause="released", owed=[], at=50.0), away(P, 51, 22)),
    *(pull_ended(38 + i / 10, "timeout", pull_id=f"{D[:16]}-{i}", seconds=8.0) for i in range(112)),
    pull_ended(60, "complete", pull_id=f"{D[:16]}-900"),
]


def test_pulls_that_a_blocked_loop_made_fail_are_told_though_nothing_was_late() -> None:
    assert not found(BLOCKED)
    [failure] = failed(BLOCKED)
    verdict, pulls = failure
    assert (verdict.cause, verdict.names["by"], len(pulls)) == (C.PREFILL_LOOP_AWAY, RANK[P], 112)
    assert CATALOGUE[verdict.cause].heading is HEADING.STOPPED
    assert failure.sentence == (
        f"pulls of {RANK[D]} from {RANK[P]} failed (112 timeout): the prefill engine's loop was away for 22 s"
    )


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("geometry_refused", "`asynckv plan PREFILL DECODE`"),
        ("protocol_version", "Upgrade the side"),
        ("unplannable", "give every cache group the blocks"),
        ("remote_too_short", "`num_tokens`"),
        ("queue_full", "`pull.max_queued`"),
        ("blocks_differ", "pass on params unchanged"),
    ],
)
def test_each_refusal_by_the_reader_has_a_remedy_of_its_own(cause: str, remedy: str) -> None:
    ended = pull_ended(15, cause, failed_in="handshake", detail="of one kind")
    other = pull_ended(16, "queue_full" if cause != "queue_full" else "unplannable", pull_id=f"{D[:16]}-2")
    told_of = {each.verdict.remedy for each in failed([*BOTH, ended, other])}
    assert len(told_of) == 2, "one finding each"
    assert any(remedy in each for each in told_of)
    # What the engine refuses before a pull begins is told by the name of its error.
    errors = {"unplannable": "PlanRefused", "remote_too_short": "RemoteTooShort", "queue_full": "Overloaded"}
    assert remedy in remedy_of(C.REFUSED_LOCALLY, errors.get(cause, cause))


def test_a_lease_of_a_reader_with_another_geometry_blames_no_network() -> None:
    [leak] = found(unclaimed(UNFIT, unanswered(), among=STRANGERS))
    assert (leak.cause, "layouts differ: dtype" in leak.sentence) == (C.REFUSED_LOCALLY, True)
    assert "asynckv plan" in leak.remedy
    assert "address" not in leak.remedy


FAILURES: dict[str, tuple[CAUSE, list[Record]]] = {
    "a rank died": (
        C.PREFILL_DIED,
        [*RUNNING, pull_ended(15, "peer_lost"), gone(15, "silent"), say(60, "of_later", D)],
    ),
    "its own loop": (C.DECODE_LOOP_AWAY, [*BOTH, pull_ended(15, "lease_lost"), away(D, 15, 4)]),
    "a data plane": (
        C.DATA_PLANE_DIED,
        [*BOTH, pull_ended(15, "read_failed"), say(14, told.DataPlaneRestarted, P, cause="signal 6")],
    ),
    "another id": (C.OTHER_REQUEST_ID, [*BOTH, pull_ended(15, "wrong_request")]),
    "other bytes": (C.BYTES_DIFFER, [*BOTH, pull_ended(15, "differs"), away(D, 15, 4)]),
    "no step of the reader's engine": (C.SCHEDULER_STUCK, [*BOTH, pull_ended(15, "standstill")]),
    "no step of the lender's engine": (
        C.SCHEDULER_STUCK,
        [*BOTH, pull_ended(35, "not_lent_yet", seconds=20.0), waits(P, 30, claim=20.0)],
    ),
    "keys": (C.KEYS_REFUSED, [*BOTH, pull_ended(15, "peer_unreachable", how="turned_away")]),
    "unreachable": (C.NEVER_SHOOK_HANDS, [*BOTH, pull_ended(15, "peer_unreachable")]),
    "broken": (C.CONNECTION_LOST, [*BOTH, pull_ended(15, "read_failed")]),
    "queued": (C.TIMEOUT_TOO_SHORT, [*BOTH, pull_ended(15, "timeout", failed_in="queue")]),
    "its grant ran out": (C.LEASE_TOO_SHORT, [*BOTH, pull_ended(15, "lease_lost")]),
    "its caller's time was up": (C.TIMEOUT_TOO_SHORT, [*BOTH, pull_ended(15, "timeout", failed_in="read")]),
    "announced": (C.ANNOUNCED_AND_FORGOTTEN, [*BOTH, pull_ended(15, "timeout", failed_in="announced")]),
    "the listener's key": (C.LISTENER_UNLISTED, [*BOTH, UNLISTED]),
    "nothing was lent": (C.PREFILL_LENDS_NOTHING, [*BOTH, pull_ended(15, "not_lent_yet", failed_in="queue")]),
    "others were lent": (
        C.NOT_LENT_IN_TIME,
        [*BOTH, lent(12.0, request_id="b", sequence=5), pull_ended(15, "not_lent_yet", failed_in="queue")],
    ),
    "another size": (C.RELEASE_REFUSED, [*BOTH, pull_ended(15, "wrong_cohort")]),
    "closed": (C.READER_CLOSED, [*BOTH, pull_ended(15, "engine_closed")]),
    "of an earlier start": (C.STALE_PARAMS, [*RUNNING, stopped(P), pull_ended(15, "engine_closed")]),
    "at a wrong address": (C.WRONG_TARGET, [*BOTH, pull_ended(15, "wrong_target")]),
    "refused here": (C.REFUSED_LOCALLY, [*BOTH, pull_ended(15, "queue_full", detail="1,000 wait")]),
    "refused at the handshake": (C.REFUSED_LOCALLY, [*BOTH, pull_ended(15, "geometry_refused", failed_in="handshake")]),
    "sent to two readers": (C.PARAMS_GIVEN_TWICE, [*BOTH, pull_ended(15, "consumed")]),
    "said goodbye": (C.PREFILL_CLOSED, [*BOTH, pull_ended(15, "peer_lost"), gone(15, "goodbye")]),
    "no request with its ticket": (C.NO_OFFER, [*BOTH, unoffered(25), away(P, 20, 2)]),
    "no request with its ticket, and others": (C.NO_OFFER, [*BOTH, lent(20.0, request_id="b"), unoffered(25)]),
    "no request with its ticket, by the reader alone": (C.NO_OFFER, of_decode([*BOTH, unoffered(25)])),
    "another ticket": (C.OTHER_TICKET, [*BOTH, unoffered(25), expired(False, at=48.0, offers=0)]),
    "lent when nobody followed": (C.NOT_LENT_IN_TIME, [*BOTH, unoffered(25), expired(False, at=60.0, offers=0)]),
    "followed a stuck engine": (C.SCHEDULER_STUCK, [*BOTH, unoffered(35), waits(P, 33, claim=20.0)]),
    "followed what another read": (C.PARAMS_GIVEN_TWICE, [*BOTH, unoffered(15, "consumed")]),
    "followed what has expired": (C.LEASE_TOO_SHORT, [*BOTH, unoffered(15, "expired")]),
    "followed an older version": (C.REFUSED_LOCALLY, [*BOTH, unoffered(15, "protocol_version")]),
    "followed in vain": (C.NEVER_SHOOK_HANDS, [*BOTH, unoffered(15, "peer_unreachable")]),
    "followed another engine": (C.WRONG_TARGET, [*BOTH, unoffered(15, "wrong_target")]),
    "followed an earlier start": (C.STALE_PARAMS, [*BOTH, unoffered(15, "restarted")]),
    "followed a rank that died": (
        C.PREFILL_DIED,
        [*RUNNING, unoffered(15, "peer_lost"), gone(15, "silent"), say(60, "of_later", D)],
    ),
    "not known": (C.NOT_KNOWN, of_decode([*BOTH, pull_ended(15, "peer_lost"), gone(15, "silent")])),
    "queued behind it": (
        C.NOT_KNOWN,
        of_decode([*BOTH, pull_ended(15, "timeout", failed_in="queue"), gone(17, "silent")]),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_why_a_pull_failed_is_told(name: str) -> None:
    cause, records = FAILURES[name]
    [failure] = failed(records)
    assert failure.verdict.cause is cause
    itself = cause in (C.DECODE_LOOP_AWAY, C.READER_CLOSED, C.REFUSED_LOCALLY) or "reader's engine" in name
    assert failure.verdict.names["by"] == RANK[D if itself else P]
    assert "?" not in failure.sentence


@pytest.mark.parametrize("cause", ["withdrawn", "revoked", "cancelled"])
def test_a_follow_that_the_prefill_side_or_the_caller_ended_is_no_failure(cause: str) -> None:
    assert not failed([*BOTH, unoffered(15, cause)])


def test_follows_are_joined_by_the_decode_engines_own_ids_and_tickets_are_followed_on_one_rank_only() -> None:
    service = join([*BOTH, begun(E), unoffered(25), unoffered(25, start=E), unoffered(26, name="gen-b")])
    assert [sorted(x.process.rank for x in r.all_pulls) for r in service.requests] == [[RANK[D], RANK[E]], [RANK[D]]]
    # Another rank of the prefill engine was followed, so that the request was offered.
    beside = replace(expired(False, at=48.0, offers=2), incarnation=OTHER, rank="prefill/tp1@eeeeeeee")
    [failure] = failed([*BOTH, unoffered(25), expired(False, at=48.0, offers=0), beside])
    assert failure.verdict.cause is C.NO_OFFER


def test_one_sides_logs_say_what_they_can_and_no_more() -> None:
    def only(start: str, records: list[Record]) -> list[Record]:
        return [x for x in records if x.incarnation == start]

    assert {x.cause for x in found(only(P, CASES["died after claim"][1]))} == {C.READER_SILENT}
    assert {x.cause for x in found(only(P, CASES["never heard of"][1]))} == {C.NEVER_CLAIMED}
    retried = only(P, CASES["retry"][1])
    assert {x.cause for x in found(retried)} == {C.NO_ATTEMPT_FOLLOWED}
    # Another attempt was turned down.
    refused = {"refused": [no(4.0, "claim", "released_already")]}
    again = [replace(x, said={**x.fields, **refused}) if x.event == told.LeaseEnded.event else x for x in retried]
    assert {x.cause for x in found(again)} == {C.READER_SILENT}
    assert {x.cause for x in found(only(D, CASES["release lost"][1]))} == {C.RELEASE_UNANSWERED}
    assert {x.cause for x in found(only(D, CASES["announced"][1]))} == {C.ANNOUNCED_AND_FORGOTTEN}
    assert not found(only(D, CASES["died after claim"][1]))
    [leak] = found(only(P, CASES["died after claim"][1]))
    assert leak.missing == (RANK[D],)


def test_a_prefill_log_that_ends_early_says_no_more_than_one_that_is_missing() -> None:
    key = {**NAMES, "prefill_request_id": "b"}
    refused = say(15.1, told.ReleaseRefused, D, **key, cause="wrong_request", ranks=[RANK[P]], detail="")
    failed = pull_ended(15, "wrong_request", prefill_request_id="b")
    lent = say(10, told.LeaseLent, P, **LEASE, lease_s=30.0)
    later = say(90, "of_later", D)
    # The lease may have expired at 45 at the latest, and a second may pass until that is told.
    for end, is_late in ((12.0, True), (45.5, True), (47.0, False)):
        records = [*RUNNING, failed, refused, say(end, "of_later", P), later]
        leaks = found(records)
        assert [(x.cause, x.state, x.missing) for x in leaks] == [(C.OTHER_REQUEST_ID, "unknown", (RANK[P],))] * is_late
        assert f"{RANK[P]} died or was cut off: its log ends at " in plain(records)["findings"][is_late]["what"]
    assert not found([*BOTH, failed, refused])
    [leak] = found([*RUNNING, pull_ended(15, "complete"), unanswered(46, "timeout"), later, say(40, "of_later", P)])
    assert (leak.cause, leak.state) == (C.RELEASE_UNANSWERED, "unknown")
    # A lease whose end is told is judged, however early the log ends.
    ended = expired(cause="released", owed=[], at=16.0, seconds=6.0)
    assert not found([*RUNNING, lent, pull_ended(15, "complete"), unanswered(46, "timeout"), ended, later])


def test_what_a_log_of_warnings_lacks_says_nothing() -> None:
    def warnings(records: list[Record]) -> list[Record]:
        started = (told.EngineStarted, told.EngineStopped, told.ReaderMet, told.PeerChanged, told.LeaseLent)
        quiet = {x.event for x in started}
        return [replace(x, level="warning") for x in records if x.event not in quiet]

    def held(at: float, left: float) -> Record:
        return lease_held(at, lent_s=at - 10, left_s=left, claims=OLD_CLAIM)

    assert found([begun(P), held(20, 20.0)])
    assert not found(warnings([held(20, 20.0)]))
    assert not found(warnings([held(20, 20.0), held(30, 10.0)]))
    [leak] = found(warnings([held(20, 20.0), held(30, 10.0), held(50, 5.0)]))
    assert (leak.cause, leak.state) == (C.READER_SILENT, "held")
    # Nor is its reader dead for want of a goodbye.
    records = [*warnings([pull_ended(9, "timeout", pull_id=f"{D[:16]}-7", prefill_request_id="z")]), *DIED[:1]]
    leaks = {x.request_id: x for x in found([*records, expired(), stopped(P)])}
    assert (leaks["a"].cause, leaks["a"].missing) == (C.READER_SILENT, (RANK[D],))
    assert RANK[D] in [x["evidence"] for x in plain(records)["limits"] if x["code"] == "warnings_only"]


def test_a_death_that_is_only_inferred_is_told_with_its_reserve() -> None:
    claims = {RANK[D]: {"pull_id": PULL, "claimed_s": 0.1, "heard_s": 7.0}}
    [leak] = found([*DIED, expired(claims=claims)])
    assert leak.sentence.startswith(
        f"{RANK[D]} claimed it, was heard of last 7 s after it was lent (at 01:46:57.000), and died or was cut off "
        f"(its log ends at 01:46:45.020 without a goodbye"
    )
    assert leak.sentence.endswith("; what it did after 01:46:45.020 is not in its log)")
    again = "dddddddd" + "3" * 24
    rank = "decode/tp0@dddddddd"
    restarted = Record(1e9 + 30, told.EngineStarted.event, "info", "decode", rank, again, {"host": "h"})
    [leak] = found([*DIED, expired(claims=claims), restarted])
    assert ", and died (its log ends at " in leak.sentence


def test_another_request_id_that_only_the_prefill_side_tells_of_is_quoted() -> None:
    detail = "the key belongs to another prefill request id, not to 'cmpl-\\n'"
    refused = [no(0.001, "claim", "wrong_request", detail)]
    [leak] = found([begun(P), expired(False, refused=refused), stopped(P)])
    assert (leak.cause, leak.reader, leak.owed, leak.other_request_id) == (C.OTHER_REQUEST_ID, RANK[D], ("*",), "")
    assert leak.sentence == (
        f"{RANK[D]} spoke of it as another id than it was lent under (claim wrong_request, {detail}), so that its "
        f"claim was refused"
    )


def test_what_was_read_after_a_log_had_ended_is_not_held() -> None:
    held = lease_held(20, claims={RANK[D]: {"pull_id": PULL, "claimed_s": 9.9, "heard_s": 9.9}})
    done = pull_ended(20.1, "complete", seconds=0.2)
    assert not found([*RUNNING, held, done])
    assert [x.state for x in found([*RUNNING, held])] == ["held"]
    for more in (unanswered(50), say(20.2, told.ReleaseRefused, D, **NAMES, cause="x", ranks=[RANK[P]])):
        assert found([*RUNNING, held, done, more])


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
    assert {x.request_id: x.cause for x in leaks} == {"a": C.RELEASE_LOST, "b": C.LEASE_TOO_SHORT}
    assert {x.request_id: x.cell[0] for x in leaks} == {"a": OwnerView.CLAIMED, "b": OwnerView.UNCLAIMED}


PREFILL = ("prefill", "other", "guarded", "short", "closing")

EXPECTED = {
    "before": C.NEVER_CLAIMED,  # of several decode engines one had died, and no log tells for which it was
    "reading": C.READER_DIED,
    "announced": C.ANNOUNCED_AND_FORGOTTEN,
    "renamed": C.OTHER_REQUEST_ID,
    "unmet": C.NEVER_SHOOK_HANDS,
    "keys": C.KEYS_REFUSED,
    "away": C.DECODE_LOOP_AWAY,
    "killed": C.PREFILL_DIED,
    "retry": C.NO_ATTEMPT_FOLLOWED,
    "lost": C.NEVER_HEARD_OF,
    "late": C.LEASE_TOO_SHORT,
    "elsewhere": C.WRONG_TARGET,
    "stale": C.STALE_PARAMS,
    "longest": C.MAX_LEASE,
    "early": C.RELEASE_TOO_EARLY,
    "closed": C.PREFILL_CLOSED,
}
PREFILL_ONLY = {
    "before": C.NEVER_CLAIMED,
    "reading": C.READER_SILENT,
    "renamed": C.OTHER_REQUEST_ID,
    "unmet": C.NEVER_CLAIMED,
    "keys": C.NEVER_CLAIMED,
    "away": C.READER_SILENT,
    "retry": C.NO_ATTEMPT_FOLLOWED,
    "lost": C.NEVER_CLAIMED,
    "late": C.NEVER_CLAIMED,
    "elsewhere": C.NEVER_CLAIMED,
    "stale": C.NEVER_CLAIMED,
    "longest": C.MAX_LEASE,
    "early": C.RELEASE_TOO_EARLY,
    "closed": C.PREFILL_CLOSED,
}
DECODE_ONLY = {
    "announced": C.ANNOUNCED_AND_FORGOTTEN,
    "another": C.OTHER_REQUEST_ID,
    "unmet": C.NEVER_SHOOK_HANDS,
    "keys": C.KEYS_REFUSED,
    "elsewhere": C.WRONG_TARGET,
}


def named(leaks: list[Leak]) -> dict[str, str]:
    # A pull that is given no time at all may fail while its read is under way, and have its blocks a moment later.
    assert {x.request_id for x in leaks if x.side == "decode"} <= {"retry"}
    return {x.request_id: x.cause.value for x in leaks if x.side == "prefill"}


def test_recorded_logs_of_real_processes() -> None:
    logs = read_logs([RECORDED])
    assert not logs.skipped

    def of(*engines: str) -> dict[str, str]:
        return named(found([x for x in logs.records if not engines or x.engine_id in engines]))

    everybody = {x.engine_id for x in logs.records}
    assert of() == {k: v.value for k, v in EXPECTED.items()}
    alone = of(*PREFILL)
    assert alone.pop("announced", "reader_silent") == "reader_silent"
    assert alone.pop("killed", "prefill_died") == "prefill_died"  # if others go on for long
    assert alone == {k: v.value for k, v in PREFILL_ONLY.items()}
    assert of(*(everybody - set(PREFILL))) == {k: v.value for k, v in DECODE_ONLY.items()}


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    told = run.invoke(app, ["why", str(RECORDED)])
    assert told.exit_code == 1
    assert told.stdout.splitlines()[0].endswith(" things are wrong.")
    assert "its params never arrived, or arrived at" in told.stdout
    assert "what to do" in told.stdout
    told = run.invoke(app, ["why", "D-late", str(RECORDED), "--json", str(tmp_path / "x.json")])
    assert told.exit_code == 1
    assert told.stdout.startswith("late (decode: D-late)  lease expired, pull expired")
    assert "lease_too_short: alive/tp0@" in told.stdout
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["schema"] == "asynckv.why/1"
    assert [x["request_id"] for x in report["late"]] == ["late"]
    assert report["request"]["request_id"] == "late"
    well = tmp_path / "well.log"
    well.write_text("".join(json.dumps(line(x)) + "\n" for x in BOTH))
    told = run.invoke(app, ["why", str(well)])
    assert told.exit_code == 0
    assert re.fullmatch(r"All is well: 0 requests, 1 prefill rank and 1 decode rank, .* UTC\.\n", told.stdout)


def test_a_request_is_found_by_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "x.log"

    def ask(name: str) -> tuple[int, str]:
        told = CliRunner().invoke(app, ["why", name, str(path)])
        if isinstance(told.exception, ConfigError):
            return 2, str(told.exception)
        return told.exit_code, " ".join(told.output.split())

    key = {**NAMES, "prefill_request_id": "cmpl-ff6a", "request_id": "D-1"}
    odd = {**NAMES, "pull_id": f"{D[:16]}-2", "prefill_request_id": "chat\nx", "request_id": "D-2", "sequence": 7}
    records = [
        *BOTH,
        expired(False, request_id="chatcmpl-ff6a", refused=[no(0.1, "claim", "wrong_request")]),
        pull_ended(11, "wrong_request", **key),
        expired(
            cause="released",
            owed=[],
            request_id="chat\nx",
            sequence=7,
            readers={RANK[D]: "complete"},
            claims={RANK[D]: {"pull_id": odd["pull_id"], "claimed_s": 0.1, "heard_s": 0.1}},
            at=38.0,
        ),
        pull_ended(38, "complete", **odd),
    ]
    path.write_text("".join(json.dumps(line(x)) + "\n" for x in records))
    for name in ("chatcmpl-ff6a", "cmpl-ff6a", "D-1", PULL, "0", "#0", "chatc", "cmpl"):
        code, text = ask(name)
        assert (code, text.startswith("chatcmpl-ff6a (decode: D-1)")) == (1, True), name
        assert "other_request_id: " in text
    for name in ("chat\\nx", "chat\nx", "D-2", "7"):
        code, text = ask(name)
        assert (code, text.startswith("chat\\nx (decode: D-2) lease released, pull complete")) == (0, True), name
    code, text = ask("chat")
    assert (code, text.startswith("2 requests match chat; ")) == (2, True)
    assert "chat\\nx #7 lease released, pull complete" in text
    assert "chatcmpl-ff6a #0 lease expired" in text
    code, text = ask("cmpl-ff6b")
    assert (code, "no such request among 2" in text, "cmpl-ff6a" in text) == (2, True, True)
    # Tried again on another prefill engine, under the same id and sequence.
    again = replace(lent(42.0, OTHER, request_id="chat\nx", sequence=7), said={**LEASE, "request_id": "again-5"})
    first = expired(False, request_id="again-5", sequence=0, at=50.0)
    ended = replace(expired(cause="released", owed=[], at=60.0, request_id="again-5"), incarnation=OTHER)
    ended = replace(ended, engine_id="other", rank=RANK[OTHER])
    records = [*BOTH, again, first, ended, say(300, told.EngineStopped, OTHER)]
    path.write_text("".join(json.dumps(line(x)) + "\n" for x in records))
    assert ask("prefill:again-5")[0] == 1
    code, text = ask("again-5")
    assert (code, "only prefill:again-5" in text, "only other:again-5" in text) == (2, True, True)
    code, text = ask("other:again-5")
    assert (code, "again-5 lease released" in text) == (0, True)
    assert ask("")[0] == ask(" ")[0] == 2


def seen_in(service: Service, logs: Logs, answers: Sequence[Answer] = ()) -> Seen:
    """All that is known of a service."""
    presence = Presence(Axis(service))
    return Seen(logs, presence, ground(presence), find_leaks(presence), answers=answers)


def seen_of(records: list[Record], logs: Logs | None = None) -> Seen:
    return seen_in(join(records), logs or Logs(records))


def plain(records: list[Record], logs: Logs | None = None) -> dict[str, Any]:
    seen = seen_of(records, logs)
    return report(find(seen), seen)


def shown(records: list[Record], *, width: int = 0, logs: Logs | None = None) -> str:
    seen = seen_of(records, logs)
    out = io.StringIO()
    console = Console(file=out, force_terminal=bool(width), width=width or None)
    why_text.show_findings(report(find(seen), seen), console)
    why_text.show_late(seen.axis, seen.late, console)
    return out.getvalue()


def test_the_most_frequent_cause_comes_first_and_names_its_requests() -> None:
    lapsed = [expired(False, request_id=f"x{i}", sequence=i, at=40.0 + i) for i in range(1, 12)]
    found = [x for x in plain([*BOTH, expired(refused=[REFUSED]), *lapsed])["findings"] if x["requests"]]
    assert [(x["code"], len(x["requests"])) for x in found] == [("never_heard_of", 11), ("release_refused", 1)]
    text = shown([*BOTH, expired(refused=[REFUSED]), *lapsed])
    assert f"requests: {', '.join(f'x{i}' for i in range(1, 9))} and 3 more, 44 blocks\n" in text


def test_text_has_the_width_of_its_terminal_and_no_padding_elsewhere() -> None:
    records = [*BOTH, expired(refused=[REFUSED])]
    assert all(x == x.rstrip() for x in shown(records).splitlines())
    assert any(len(x) > 100 for x in shown(records).splitlines())
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown(records, width=80))
    assert max(len(x.rstrip()) for x in text.splitlines()) <= 80
    assert "\n   what to do: " in text


def test_blocks_that_may_still_be_written_are_counted() -> None:
    failed = pull_ended(15, "timeout", **KEPT, blocks=4)
    back = {**NAMES, "seconds_after_failure": 10.0}
    for records in (
        [*BOTH, failed, say(25, told.BlocksReturned, D, **back)],
        [*BOTH, pull_ended(15, "timeout", **KEPT), say(25, told.BlocksReturned, D, **back, blocks=4)],
        [begun(D), failed],
    ):
        [leak] = [x for x in found(records) if x.side == "decode"]
        assert leak.blocks == 4
    [leak] = found(CASES["stuck, returned"][1])
    assert leak.blocks == -1


def test_what_is_not_known_is_left_out_and_one_is_no_plural(tmp_path: Path) -> None:
    text = shown([begun(D), *met()[::2], pull_ended(15, "complete"), unanswered(46), stopped(D, 300.0)])
    assert f"held: blocks of {RANK[P]}" in text
    text = shown([*BOTH, expired(False, blocks=1)])
    assert f"held: 1 block of {RANK[P]} for 30.0 s since 01:46:50.000; expired" in text
    assert "owed by: a decode engine that never spoke up" in text
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("".join(json.dumps(line(x)) + "\n" for x in BOTH) + "GET /\n" * (name == "b.log"))
    read = read_logs([tmp_path])
    assert [(x.num_others, x.num_repeated) for x in read.sources] == [(0, 0), (1, len(BOTH))]
    text = shown([*read.records, expired(False)], logs=read)
    assert f"of 2 files; 1 line of other programs; {len(BOTH)} lines there twice: 1 request, " in text


@pytest.mark.parametrize("argv", [["why"], ["why", "--json", "-"]])
def test_a_closed_pipe_is_no_error_of_ours(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["asynckv", *argv, str(RECORDED)])
        with pytest.raises(SystemExit) as caught:
            sys.exit(cli.run())
    assert caught.value.code == 141


def test_one_sides_logs_are_told_to_be_that() -> None:
    theirs = [begun(D), *met()[::2], stopped(D), pull_ended(15, "complete")]
    assert f"there is no log of {RANK[P]}" in shown(theirs)
    assert "Nothing wrong was found, but not all could be judged: " in shown(theirs)


def test_a_process_that_answers_lives_and_one_that_does_not_is_told(tmp_path: Path) -> None:
    well = tmp_path / "well.log"
    well.write_text("".join(json.dumps(line(x)) + "\n" for x in BOTH))
    left = tmp_path / "prefill.pp0.tp0.aaaaaaaa.sock"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(left))
    told = CliRunner().invoke(app, ["why", str(well), str(left)])
    assert (told.exit_code, "One thing is wrong." in told.stdout) == (1, True)
    assert f"process gone: {RANK[P]} does not answer" in told.stdout
    # Of a directory logs are read, and sockets asked.
    told = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert (told.exit_code, f"process gone: {RANK[P]} does not answer" in told.stdout) == (1, True)
    well.unlink()
    told = CliRunner().invoke(app, ["why", str(tmp_path)])
    assert (told.exit_code, "its process has ended" in told.stdout) == (1, True), "no answer at all is a finding, too"


def answering(start: str, counters: dict[str, int], *requests: RequestStatus) -> Answer:
    facts = Facts(uptime_s=100.0, counters=counters)
    engine_id = RANK[start].partition("/")[0]
    account = Account(engine_id=engine_id, rank=RANK[start], incarnation=start, requests=requests, facts=facts)
    return Answer(address=f"/run/{start}.sock", account=account)


def test_engines_that_answer_are_alive_and_prefill_engines_are_no_readers() -> None:
    held = RequestStatus("lease", "a", "a", "lent", 20.0, 20.0, 10.0, 4, "a claim", (), sequence=0)
    prefill, decode = answering(P, {"leases.lent": 3}, held), answering(D, {"pulls.started": 2})
    other = answering(OTHER, {"leases.lent": 1})
    [leak] = found(list(records_of([prefill, decode, other], 1e9)))
    assert leak.cause is C.NEVER_CLAIMED
    assert f"{RANK[D]} knows nothing of it" in leak.sentence
    assert "died" not in leak.sentence
    assert RANK[OTHER] not in leak.sentence
    assert not leak.missing


def test_an_engine_that_does_not_answer_may_have_been_given_it() -> None:
    """Known while it lasts: it was asked. With its log or without; of a claim nobody says that its reader died."""

    def judged(records: list[Record], *unanswered: str) -> Leak:
        service = join(records)
        asked: dict[str, Any] = {"address": "/run/d.sock", "error": "no answer", "trouble": Trouble.AWAY}
        tell(service, [Answer(**asked, account=Account(rank=x)) for x in unanswered], 2e9)
        [leak] = find_leaks(Presence(Axis(service)))
        return leak

    late, now = expired(False), say(500, "of_later")
    leak = judged([*RUNNING, late, now], RANK[D])
    assert leak.cause is C.DECODE_UNRESPONSIVE
    assert f"{RANK[D]} may have been given it, but it does not answer (its log ends at 01:46:45" in leak.sentence
    assert not leak.reader  # whether it was given to this one is not known
    # Its log is not there. Prefill engines are not meant.
    leak = judged([begun(P), late, now], "decode/tp0@01234567", "prefill/tp1@01234568")
    assert "it was not claimed: decode/tp0@01234567 may have been given it, but it does not answer" in leak.sentence
    # Another one was away: either.
    asked = [say(7, told.PullEnded, OTHER, **{**NAMES, "prefill_request_id": "w", "sequence": 7}, cause="complete")]
    leak = judged([*RUNNING, late, *asked, away(OTHER, 60, 55), alive(OTHER, 480), now], RANK[D])
    assert f"; or {RANK[OTHER]}, but its event loop was away for 55 s then" in leak.sentence
    # One that went on for longer than it was lent was there.
    assert judged([*RUNNING, late, say(90, "of_later", D), now], RANK[D]).cause is not C.DECODE_UNRESPONSIVE
    # It had claimed.
    leak = judged([*RUNNING, expired(), now], RANK[D])
    assert (leak.cause, leak.cell[0]) == (C.DECODE_UNRESPONSIVE, OwnerView.CLAIMED)
    assert "and then: it does not answer (its log ends at " in leak.sentence
    # Of an engine of which others have spoken, it is known that it was given it.
    owed = expired(False, owed=["decode/tp1"], readers={RANK[D]: "complete"})
    leak = judged([*RUNNING, begun(E), owed, say(60, "of_later", D), now], RANK[E])
    assert f"{RANK[E]} was given it, as other ranks of its engine were, but it does not answer" in leak.sentence


def test_a_process_that_was_asked_in_vain_is_named_as_in_the_logs() -> None:
    def told_of(records: list[Record], *answers: Answer) -> tuple[list[str], list[str]]:
        service = join(records)
        tell(service, answers, 2e9)
        every = service.processes.values()
        return [x.rank for x in every if x.hangs], [x.start for x in every if x.gone]

    by_socket = Answer(address="/run/d.sock", error="no answer", trouble=Trouble.AWAY, account=Account(rank=RANK[E]))
    by_address = Answer(address="tcp://10.0.0.1:1", error="no answer", trouble=Trouble.AWAY)
    ended = Answer(address="/run/o.sock", error="it has ended", trouble=Trouble.GONE, account=Account(rank=RANK[OTHER]))
    stranger = Answer(address="tcp://10.0.0.9:1", error="no answer", trouble=Trouble.AWAY)
    keyed = Answer(address="/run/k.sock", error="it has keys", trouble=Trouble.KEYS, account=Account(rank=RANK[OTHER]))
    assert told_of([begun(P), begun(D)], by_socket, ended, stranger, keyed) == ([RANK[E]], ["eeeeeeee"])
    assert told_of([begun(D)], by_address) == ([RANK[D]], [])


def test_a_reader_that_was_asked_and_is_gone_has_died_though_no_log_of_it_is_there() -> None:
    claims = (RankStatus(RANK[D], "granted", pull_id=PULL, granted_s=5.0, heard_s=8.0),)
    held = RequestStatus("lease", "a", "a", "lent", 20.0, 20.0, 10.0, 4, "a claim", claims, sequence=0)
    asked = [answering(P, {"leases.lent": 3}, held)]
    gone = Answer(address="/run/d.sock", error="its process has ended", account=Account(rank=RANK[D]))

    def judged(trouble: Trouble) -> Leak:
        answers = [*asked, replace(gone, trouble=trouble)]
        service = join(records_of(answers, 1e9))
        tell(service, answers, 1e9)
        [leak] = find_leaks(Presence(Axis(service)))
        return leak

    leak = judged(Trouble.GONE)
    assert leak.cause is C.READER_DIED
    assert "and died (its process has ended (there is no log of it)" in leak.sentence
    leak = judged(Trouble.AWAY)
    assert "it does not answer (there is no log of it)" in leak.sentence, leak.sentence


def test_a_pid_is_evidence_in_its_own_namespace_and_boot_alone(tmp_path: Path) -> None:
    def process(pid: int, state: str = "S", began: int = 500) -> Path:
        (tmp_path / f"{pid}/ns").mkdir(parents=True)
        (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) b) {state} {'0 ' * 18}{began} {'0 ' * 5}\n")
        return tmp_path / f"{pid}/ns/pid"

    process(1)
    process(7)
    process(9, "T", 700)
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot-1\n")
    (me := process(os.getpid())).touch()
    (tmp_path / "self").symlink_to(str(os.getpid()))
    here = {"boot_id": "boot-1", "pid_namespace": me.stat().st_ino, "host": socket.gethostname()}
    assert identity(tmp_path) == {"boot_id": "boot-1", "pid_namespace": me.stat().st_ino, "pid_began": 500}

    def looked(*said: Record, proc: Path = tmp_path) -> tuple[dict[str, str], list[str], list[str]]:
        look_here(service := join(said), proc)
        every = service.processes.values()
        gone = {x.start: x.gone for x in every if x.gone}
        return gone, [x.start for x in every if x.halted], [x.rank for x in every if x.is_elsewhere]

    def begins(process: str, pid: int, pid_began: int = 500, at: float = 0.0, **more: Any) -> Record:
        return say(at, told.EngineStarted, process, **here | {"pid": pid, "pid_began": pid_began} | more)

    there, ended = begins(P, 7), begins(D, 8)
    died = {"bbbbbbbb": "pid 8 is not there any more"}
    assert looked(there, ended)[0] == died
    assert looked(begins(P, 7, answers=True), ended)[0] == died
    assert looked(there, begins(D, 7, 400))[0] == {"bbbbbbbb": "pid 7 is not there any more"}, "another has its pid"
    assert looked(there, ended, begins(E, 7))[0] == died, "also if a later start of its rank runs"
    assert looked(there, ended, say(2e9, told.EngineStopped, D))[0] == {}
    assert looked(there, begins(D, 8, answers=True))[0] == {}, "it answers"
    assert looked(begins(D, 9, 700))[1] == ["bbbbbbbb"]
    # The logs may have been copied before their goodbyes.
    assert looked(ended) == ({}, [], [RANK[D]])
    # Containers of a pod, pods in their host's network, hosts of one name, and logs of older versions.
    for other in (
        {"pid_namespace": 1},
        {"boot_id": "boot-2"},
        {"pid_namespace": None},
        {"boot_id": None},
        {"pid_began": None, "boot_id": None, "pid_namespace": None},
    ):
        assert looked(there, begins(D, 8, **other), begins(E, 9, **other)) == ({}, [], [])
        assert looked(begins(P, 8, **other), begins(D, 9, **other)) == ({}, [], [])
    # It hides processes, is of another namespace, or is not there.
    (tmp_path / "1/stat").write_text("")
    assert looked(there, ended)[0] == {}
    (tmp_path / "1/stat").write_text((tmp_path / "7/stat").read_text())
    (tmp_path / "self").unlink()
    (tmp_path / "self").symlink_to("1")
    assert looked(there, ended)[0] == {}
    assert looked(there, ended, proc=tmp_path / "nothing") == ({}, [], [])


def test_a_process_that_is_there_has_not_died_but_may_hang() -> None:
    claimed = say(5.1, told.LeaseGranted, **LEASE, reader=RANK[D], pull_id=PULL, seconds=10.0, after_s=0.1)
    records = [begun(P), begun(D), *met(), claimed, expired(at=40.0), alive(P, 120.0)]

    def judged(is_there: bool) -> tuple[CAUSE, list[str], list[str]]:
        service = join(records)
        service.processes[D].is_here = is_there
        found = find(seen_in(service, Logs()))
        [late] = found.late
        return late.cause, [x.code for x in found.wrong], [x.code for x in found.limits]

    assert judged(False) == (C.READER_DIED, ["died or was cut off"], [])
    assert judged(True) == (C.DECODE_UNRESPONSIVE, ["decode_unresponsive"], ["ends_early"])


def test_only_what_was_late_since_a_repair(tmp_path: Path) -> None:
    log = tmp_path / "both.log"
    records = [*BOTH, expired(False, at=100.0), expired(False, at=140.0, sequence=1, request_id="b")]
    log.write_text("".join(f"{json.dumps(line(x))}\n" for x in records))

    def told(since: str) -> tuple[int, str, list[str]]:
        result = CliRunner().invoke(app, ["why", str(log), "--since", since, "--json", str(tmp_path / "why.json")])
        report = json.loads((tmp_path / "why.json").read_text())
        assert report["read"]["since"]
        return result.exit_code, result.stdout.splitlines()[0], [x["request_id"] for x in report["late"]]

    assert told("150s") == (1, "One thing is wrong since 2001-09-09 01:47:30 UTC.", ["a", "b"])
    assert told("90s") == (1, "One thing is wrong since 2001-09-09 01:48:30 UTC.", ["b"])
    code, text, late = told("01:49:10")
    assert (code, text.startswith("All is well since 2001-09-09 01:49:10 UTC: "), late) == (0, True, [])
    assert told("2001-09-09T01:49:10Z")[0] == 0
    assert told("01:51")[2] == ["a", "b"]  # later than the last event: of the day before
    for wrong, why in (("2002-01-01", "no event is later than --since 2002-01-01"), ("noon", "is no time")):
        result = CliRunner().invoke(app, ["why", str(log), "--since", wrong])
        assert why in str(result.exception)


def test_what_was_over_before_a_repair_is_so_by_the_clock_of_all() -> None:
    """The decode rank's host is a thousand seconds ahead, as the handshake shows."""
    refused = say(20.0, told.PullRefused, D, **NAMES, cause="Overloaded", detail="d", log_dropped=3)
    records = [
        replace(x, at=x.at + 1000.0, said={**x.fields, "host": "other"}) if x.incarnation == D else x
        for x in (*BOTH, replace(refused, level="warning"))
    ]
    for since, codes in ((10.0, ["Overloaded", "dropped"]), (30.0, [])):
        seen = find(replace(seen_of(sorted(records, key=lambda x: x.at)), since=1e9 + since))
        assert [x.code for x in (*seen.wrong, *seen.limits)] == codes


def test_every_cause_is_documented_under_one_heading() -> None:
    assert set(CATALOGUE) == set(CAUSE)
    assert {x.heading for x in CATALOGUE.values()} == set(HEADING)
    assert len(HEADING) == 9


VALUES = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from([*RANK.values(), PULL, "a", "*", "lent"])
)
JSON = st.recursive(
    VALUES, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, *LEASE]), x, max_size=3)
)
FIELDS = [
    *NAMES,
    *LEASE,
    *("cause", "state", "owed", "claims", "refused", "history", "oldest", "ranks", "readers", "seconds"),
    *("held_transfers", "same_as", "unanswered", "peer_incarnation", "reader_incarnation", "detail", "failed_in"),
]
ROWS = st.builds(
    lambda event, start, at, fields: say(at, event, start, **fields),
    st.sampled_from(list(told.EVENTS.values())),
    st.sampled_from([P, D, E]),
    st.floats(-1e3, 1e3),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8),
)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROWS, max_size=8), st.sampled_from(list(CASES)))
def test_hostile_lines_end_in_a_report(rows: list[Record], name: str) -> None:
    records = [*CASES[name][1], *rows]
    json.dumps(plain(records))
    shown(records)
