"""What a service did, from its logs: series over time and tables, for `asynckv report`.

Pure: records go in, one value comes out, which is the report as JSON, and from which its page is drawn.

Failures are logged one by one; of what ended well only some are, and each process says how many it left out since
it last said so. So every logged success gets a weight: it stands for those that were left out about the same time, in
the same process. Sums of weights are what ended; what is said of bytes, latency, phases and blocks held is as good as
the samples. What was left out after a process's last word is not known.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from asynckv.diagnose import leaks_page
from asynckv.diagnose.colours import PHASES, WITHIN
from asynckv.diagnose.join import join
from asynckv.diagnose.leaks import find_leaks
from asynckv.diagnose.records import Logs, Record
from asynckv.diagnose.summary_time import Windows, quantiles
from asynckv.observe.events import EVENT

__all__ = ["SCHEMA", "Away", "Bench", "Engine", "Failure", "Held", "Pair", "Read", "Summary", "Warned", "summarise"]

SCHEMA = "asynckv.report/1"
GOOD = ("complete", "cancelled", "discharged")
"""How a pull ends that nobody has to look at."""

COUNTING = {EVENT.PULL_ENDED, EVENT.LEASE_LENT, EVENT.LEASE_ENDED}
"""What says how many successes were left out since the one before."""

MAX_STATES = 200
"""States of one peer that are kept."""

MAX_LATE = 200
"""Requests with late blocks that are told one by one."""

MAX_TEXT = 300
MAX_CAUSES = 200
"""Different causes: what comes after is counted as `other`."""


class Kind(Struct, kw_only=True):
    """Quantiles and mean of what took time, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float


class Pulls(Struct, kw_only=True):
    """What ended on decode sides: one pull is one request on one decode rank, or one attempt of it.

    Attributes:
        ended: All, with those that were left out of the logs; so are the next three, and `num_bytes`.
        failed: For good. Every one of them is in the logs.
        retried: Attempts that failed, and were tried again.
        logged: How many are in the logs.
        latency_s: From the call to usable bytes, of those that completed.
        slowest: The longest of them: request id, where, and seconds.
        phases_s: Of those that completed.
        ended_per_s: In each window; so are all that follow, with null where nothing is known.
        mean_phases_s: Of those that completed in each window.
    """

    ended: float = 0.0
    complete: float = 0.0
    cancelled: float = 0.0
    discharged: float = 0.0
    failed: int = 0
    retried: int = 0
    logged: int = 0
    num_bytes: float = 0.0
    latency_s: Kind | None = None
    slowest: dict[str, Any] = field(default_factory=dict)
    phases_s: dict[str, Kind] = field(default_factory=dict)
    ended_per_s: list[float] = field(default_factory=list)
    failed_per_s: list[float] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)
    p50_s: list[float | None] = field(default_factory=list)
    p99_s: list[float | None] = field(default_factory=list)
    max_s: list[float | None] = field(default_factory=list)
    mean_phases_s: dict[str, list[float | None]] = field(default_factory=dict)


class Leases(Struct, kw_only=True):
    """What prefill sides lent.

    Attributes:
        lent: All, with those that were left out of the logs.
        logged: How many are in the logs.
        ended_badly: Expired or revoked; every one of them is in the logs.
        open: Lent, and no end in the logs.
        blocks: Mean number that was lent in each window, with those that were left out.
        blocks_logged: The same of what is in the logs alone: a lower bound.
        blocks_badly: Of leases that ended badly.
    """

    lent: float = 0.0
    logged: int = 0
    ended_badly: int = 0
    open: int = 0
    blocks: list[float] = field(default_factory=list)
    blocks_logged: list[float] = field(default_factory=list)
    blocks_badly: list[float] = field(default_factory=list)


class Quarantine(Struct, kw_only=True):
    """Failed pulls into whose blocks a transfer could still write.

    Attributes:
        pulls: Mean number in each window.
        returned: How many came back.
        retired: How many never did, and gave up their blocks.
        open: Neither, as far as the logs go.
        longest_s: For the longest time.
    """

    pulls: list[float] = field(default_factory=list)
    returned: int = 0
    retired: int = 0
    open: int = 0
    longest_s: float = 0.0


class Failure(Struct, kw_only=True):
    """One way to fail.

    Attributes:
        side: `pull`, `attempt` (tried again), or `lease`.
        failed_in: In which phases, and how often.
        detail: What the first one says.
        counts: In each window.
    """

    side: str
    cause: str
    count: int
    first: float
    last: float
    failed_in: dict[str, int]
    detail: str
    where: str
    counts: list[int]


class Pair(Struct, kw_only=True):
    """A peer, as one process saw it.

    Attributes:
        pulls: From it, with those that were left out; a pull from several ranks counts for each.
        num_bytes: Of a pull from several ranks an equal part for each.
        states: `[state, since, until]`.
        not_ready_s: Seconds in which it was not ready after it had been once.
        last_good: When something last went well: a pull, or it became ready.
    """

    peer: str
    reader: str
    pulls: float = 0.0
    num_bytes: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    states: list[tuple[str, float, float]] = field(default_factory=list)
    not_ready_s: float = 0.0
    last_good: float | None = None


class Away(Struct, kw_only=True):
    """An event loop did not come to its engine; `not_logged`: how often more, since that was last logged."""

    rank: str
    since: float
    until: float
    seconds: float
    leases: int
    pulls: int
    not_logged: int
    not_logged_s: float


class Held(Struct, kw_only=True):
    """What was held for long and waited for the same."""

    side: str
    state: str
    waits: str
    warnings: int
    most: int
    oldest_s: float
    first: float
    last: float
    example: str


class Warned(Struct, kw_only=True):
    """Other warnings and errors of one name."""

    event: str
    level: str
    count: int
    first: float
    last: float
    example: str


class Engine(Struct, kw_only=True):
    """One start of one rank's process.

    Attributes:
        started: None if the logs do not have its start.
        stopped: None if its log just ends.
        last: Its last word.
    """

    rank: str
    engine_id: str
    host: str = ""
    pid: int | None = None
    version: str = ""
    started: float | None = None
    stopped: float | None = None
    first: float = 0.0
    last: float = 0.0
    events: int = 0
    warnings: int = 0
    errors: int = 0
    pulls: float = 0.0
    leases: float = 0.0


class Read(Struct, kw_only=True):
    """What was read."""

    files: int = 0
    lines: int = 0
    events: int = 0
    others: int = 0
    repeated: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)


class Late(Struct, kw_only=True):
    """Blocks that came back late: what `asynckv leaks` finds.

    Attributes:
        requests: How many.
        causes: By cause: its title, how many `requests` and `blocks`, the `longest_s`, an `example`, a `remedy`.
        worst: Of those that were held longest: as in the report of `asynckv leaks`.
    """

    requests: int = 0
    causes: dict[str, dict[str, Any]] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)


class Bench(Struct, kw_only=True):
    """A report of `asynckv bench`, as it is."""

    name: str
    is_good: bool
    report: dict[str, Any]


class Summary(Struct, kw_only=True):
    """The report.

    Attributes:
        first: Of the events that count, seconds since 1970, as all times.
        windows: Beginnings of the windows.
    """

    schema: str = SCHEMA
    first: float = 0.0
    last: float = 0.0
    window_s: float = 0.0
    windows: list[float] = field(default_factory=list)
    read: Read = field(default_factory=Read)
    pulls: Pulls = field(default_factory=Pulls)
    leases: Leases = field(default_factory=Leases)
    quarantine: Quarantine = field(default_factory=Quarantine)
    failures: list[Failure] = field(default_factory=list)
    late: Late = field(default_factory=Late)
    peers: list[Pair] = field(default_factory=list)
    away: list[Away] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    bench: list[Bench] = field(default_factory=list)


def summarise(logs: Logs, since: float = -math.inf, until: float = math.inf) -> Summary:
    """Sum up what logs say.

    Args:
        logs: All of them: what a request's end means may depend on what was said long before.
        since: Seconds since 1970: earlier events do not count.
        until: Nor do later ones.
    """
    records = logs.records
    if since > -math.inf or until < math.inf:
        records = [x for x in records if since <= x.at <= until]
    read = Read(
        files=len(logs.sources),
        lines=logs.num_lines,
        events=len(records),
        others=logs.num_others,
        repeated=logs.num_repeated,
        skipped=[{"reason": x.reason, "lines": x.lines, "where": x.where, "first": x.first} for x in logs.skipped],
    )
    if not records:
        return Summary(read=read)
    windows = Windows(records[0].at, records[-1].at, sum(x.event == EVENT.PULL_ENDED for x in records))
    by_process: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_process[record.rank].append(record)
    weights: dict[int, float] = {}
    pulls, leases = Pulls(ended_per_s=windows.zeros(), bytes_per_s=windows.zeros()), Leases(blocks=windows.zeros())
    engines = [_engine(rank, found) for rank, found in by_process.items()]
    for engine, found in zip(engines, by_process.values(), strict=True):
        _weigh(found, windows, weights, pulls, leases, engine)
    retried = _retried(records)
    failures = _failures(records, retried, windows)
    _sum_pulls(records, weights, retried, windows, pulls)
    _sum_leases(by_process, weights, windows, leases)
    return Summary(
        first=records[0].at,
        last=records[-1].at,
        window_s=windows.seconds,
        windows=windows.starts(),
        read=read,
        pulls=pulls,
        leases=leases,
        quarantine=_quarantine(by_process, windows),
        failures=failures,
        late=_late(logs, since, until),
        peers=_peers(by_process, weights),
        away=_away(records),
        held=_held(records),
        warned=_warned(records),
        engines=sorted(engines, key=lambda x: (x.engine_id, x.rank.split("@")[0], x.first)),
    )


# -- samples -------------------------------------------------------------------------------------------


def _is_sampled(record: Record) -> str:
    """Say what a record is a sample of: pulls or leases that went well and were not slow; empty if of nothing."""
    if record.event == EVENT.PULL_ENDED and record.level == "info":
        return "pull"
    return "lease" if record.event == EVENT.LEASE_LENT else ""


def _weigh(
    records: Sequence[Record],
    windows: Windows,
    weights: dict[int, float],
    pulls: Pulls,
    leases: Leases,
    engine: Engine,
) -> None:
    """Find out what each logged success of one process stands for, and count what ended."""
    left_out, before = windows.zeros(), records[0].at
    sampled: dict[str, list[list[Record]]] = {kind: [[] for _ in left_out] for kind in ("pull", "lease")}
    for record in records:
        if (number := record.integer("successes_not_logged", 0)) > 0:
            windows.spread(left_out, before, record.at, number)
        if record.event in COUNTING:
            before = record.at
        if kind := _is_sampled(record):
            sampled[kind][windows.index(record.at)].append(record)
    counts = {kind: sum(map(len, found)) for kind, found in sampled.items()}
    total = sum(counts.values())
    has_pulls = any(record.event == EVENT.PULL_ENDED for record in records)
    # A process says one number for both: what it left out is as what it did not.
    share = counts["pull"] / total if total else float(has_pulls)
    for kind, part in (("pull", share), ("lease", 1 - share)):
        missing = [x * part for x in left_out]
        for i, carried in _carried(missing, [len(x) for x in sampled[kind]]):
            for record in sampled[kind][i]:
                weights[id(record)] = 1 + carried / len(sampled[kind][i])
        if kind == "pull":
            mean = _mean([(r.number("bytes", 0.0), weights[id(r)]) for found in sampled[kind] for r in found])
            for i, found in enumerate(sampled[kind]):
                pulls.ended_per_s[i] += (len(found) + missing[i]) / windows.seconds
                moved = sum(r.number("bytes", 0.0) for r in found)
                of_missing = moved / len(found) if found else mean
                pulls.bytes_per_s[i] += (moved + missing[i] * of_missing) / windows.seconds
            pulls.ended += counts[kind] + sum(missing)
            engine.pulls += counts[kind] + sum(missing)
        else:
            leases.lent += counts[kind] + sum(missing)
            engine.leases += counts[kind] + sum(missing)


def _carried(missing: Sequence[float], counts: Sequence[int]) -> Iterable[tuple[int, float]]:
    """Give what was left out to the windows that have samples: where there are none, to the nearest that has."""
    having = [i for i, n in enumerate(counts) if n]
    carried = dict.fromkeys(having, 0.0)
    for i, amount in enumerate(missing):
        if amount and having:
            carried[min(having, key=lambda j: (abs(j - i), j))] += amount
    return carried.items()


def _mean(values: Iterable[tuple[float, float]]) -> float:
    rows = list(values)
    total = math.fsum(weight for _, weight in rows)
    return math.fsum(value * weight for value, weight in rows) / total if total else 0.0


# -- pulls and leases --------------------------------------------------------------------------------------


def _retried(records: Iterable[Record]) -> set[tuple[str, str]]:
    """Find attempts that another one followed: process and pull id."""
    latest: dict[tuple[str, str], tuple[int, str]] = {}
    found = set()
    for record in records:
        if record.event == EVENT.PULL_RETRIED:
            found.add((record.rank, record.text("pull_id")))
        elif record.event == EVENT.PULL_ENDED:
            # The line that says so is of level info, and may not be there.
            key, attempt = (record.rank, record.text("request_id")), record.integer("attempt", 1)
            if key in latest and latest[key][0] < attempt:
                found.add((record.rank, latest[key][1]))
            latest[key] = attempt, record.text("pull_id")
    return found


def _is_failed(record: Record) -> bool:
    return record.event == EVENT.PULL_ENDED and record.text("cause") not in GOOD


def _sum_pulls(
    records: Iterable[Record],
    weights: Mapping[int, float],
    retried: set[tuple[str, str]],
    windows: Windows,
    pulls: Pulls,
) -> None:
    took: list[list[tuple[float, float]]] = [[] for _ in range(windows.count)]
    phases: dict[str, list[list[tuple[float, float]]]] = defaultdict(lambda: [[] for _ in range(windows.count)])
    pulls.failed_per_s = windows.zeros()
    for record in records:
        if record.event != EVENT.PULL_ENDED:
            continue
        i, cause, weight = windows.index(record.at), record.text("cause"), weights.get(id(record), 1.0)
        pulls.logged += 1
        if id(record) not in weights:
            pulls.ended += 1
            pulls.ended_per_s[i] += 1 / windows.seconds
            pulls.bytes_per_s[i] += record.number("bytes", 0.0) / windows.seconds
        if cause not in GOOD:
            if (record.rank, record.text("pull_id")) in retried:
                pulls.retried += 1
            else:
                pulls.failed += 1
                pulls.failed_per_s[i] += 1 / windows.seconds
            continue
        setattr(pulls, cause, getattr(pulls, cause) + weight)
        seconds = record.number("seconds")
        if cause != "complete" or math.isnan(seconds):
            continue
        took[i].append((seconds, weight))
        if seconds > pulls.slowest.get("seconds", -1.0):
            pulls.slowest = {"seconds": seconds, "request_id": record.text("request_id"), "rank": record.rank}
        named = record.mapping("phases")
        for name in (*PHASES, *WITHIN):
            if isinstance(value := named.get(name), int | float) and 0 <= value < math.inf:
                phases[name][i].append((value, weight))
    pulls.num_bytes = math.fsum(pulls.bytes_per_s) * windows.seconds
    everything = [row for rows in took for row in rows]
    pulls.latency_s = _kind(everything) if everything else None
    for rows in took:
        p50, p99, most = quantiles(rows, 0.5, 0.99, 1.0) if rows else (None, None, None)
        pulls.p50_s.append(p50)
        pulls.p99_s.append(p99)
        pulls.max_s.append(most)
    for name in (*PHASES, *WITHIN):
        if name in phases:
            pulls.phases_s[name] = _kind([row for rows in phases[name] for row in rows])
            pulls.mean_phases_s[name] = [_mean(rows) if rows else None for rows in phases[name]]


def _kind(rows: Sequence[tuple[float, float]]) -> Kind:
    p50, p90, p99, most = quantiles(rows, 0.5, 0.9, 0.99, 1.0)
    return Kind(p50=p50, p90=p90, p99=p99, max=most, mean=_mean(rows))


def _sum_leases(
    by_process: Mapping[str, Sequence[Record]], weights: Mapping[int, float], windows: Windows, leases: Leases
) -> None:
    leases.blocks_logged, leases.blocks_badly = windows.zeros(), windows.zeros()
    for records in by_process.values():
        lent: dict[tuple[str, int], Record] = {}
        for record in records:
            key = record.text("request_id"), record.integer("sequence")
            if record.event == EVENT.LEASE_LENT:
                leases.logged += 1
                lent[key] = record
                continue
            if record.event != EVENT.LEASE_ENDED:
                continue
            begun = lent.pop(key, None)
            since = record.at - max(record.number("seconds", 0.0), 0.0)
            blocks, is_good = max(record.integer("blocks", 0), 0), record.text("cause") == "released"
            if begun is None:  # failed, and not among the samples; or its beginning is not in the logs
                leases.logged += 1
                leases.lent += 1
            weight = weights.get(id(begun), 1.0) if begun and is_good else 1.0
            windows.hold(leases.blocks, since, record.at, blocks * weight)
            windows.hold(leases.blocks_logged, since, record.at, blocks)
            if not is_good:
                leases.ended_badly += 1
                windows.hold(leases.blocks_badly, since, record.at, blocks)
        leases.open += len(lent)
        for begun in lent.values():
            blocks = max(begun.integer("blocks", 0), 0)
            windows.hold(leases.blocks, begun.at, records[-1].at, blocks * weights.get(id(begun), 1.0))
            windows.hold(leases.blocks_logged, begun.at, records[-1].at, blocks)


def _quarantine(by_process: Mapping[str, Sequence[Record]], windows: Windows) -> Quarantine:
    found = Quarantine(pulls=windows.zeros())
    for records in by_process.values():
        since: dict[str, float] = {}
        for record in records:
            pull = record.text("pull_id")
            if record.event == EVENT.PULL_ENDED and record.integer("held_transfers", 0) > 0:
                since[pull] = record.at
            elif record.event in (EVENT.BLOCKS_RETURNED, EVENT.BLOCKS_RETIRED):
                seconds = max(record.number("seconds_after_failure", 0.0), 0.0)
                begun = since.pop(pull, record.at - seconds)
                found.longest_s = max(found.longest_s, record.at - begun)
                if record.event == EVENT.BLOCKS_RETURNED:
                    found.returned += 1
                    windows.hold(found.pulls, begun, record.at, 1)
                else:
                    found.retired += 1
                    windows.hold(found.pulls, begun, records[-1].at, 1)
        for begun in since.values():
            found.open += 1
            found.longest_s = max(found.longest_s, records[-1].at - begun)
            windows.hold(found.pulls, begun, records[-1].at, 1)
    return found


def _failures(records: Iterable[Record], retried: set[tuple[str, str]], windows: Windows) -> list[Failure]:
    found: dict[tuple[str, str], Failure] = {}
    said = {(r.rank, r.text("pull_id")): r for r in records if _is_failed(r)}
    for record in records:
        cause = record.text("cause")
        if _is_failed(record):
            side = "attempt" if (record.rank, record.text("pull_id")) in retried else "pull"
            full = said.get((record.rank, record.text("same_as")), record)
            detail, phase = full.text("detail"), full.text("failed_in")
        elif record.event == EVENT.LEASE_ENDED and cause != "released":
            side, phase = "lease", ""
            owed = record.texts("owed")
            detail = f"owed by {', '.join(owed)}" if owed else ""
        else:
            continue
        key = side, cause if len(found) < MAX_CAUSES or (side, cause) in found else "other"
        if (failure := found.get(key)) is None:
            failure = found[key] = Failure(
                side=side,
                cause=key[1][:MAX_TEXT],
                count=0,
                first=record.at,
                last=record.at,
                failed_in={},
                detail=detail[:MAX_TEXT],
                where=record.where,
                counts=[0] * windows.count,
            )
        failure.count += 1
        failure.last = record.at
        failure.counts[windows.index(record.at)] += 1
        if phase and (phase in failure.failed_in or len(failure.failed_in) < 16):
            failure.failed_in[phase[:40]] = failure.failed_in.get(phase[:40], 0) + 1
    return sorted(found.values(), key=lambda x: (-x.count, x.side, x.cause))


def _late(logs: Logs, since: float, until: float) -> Late:
    service = join(logs)
    leaks = [
        x
        for x in find_leaks(service)
        if math.isnan(x.since)
        or (x.since <= until and x.since + (0.0 if math.isnan(x.seconds) else x.seconds) >= since)
    ]
    found = leaks_page.report(leaks, service, logs)
    for entry in found["leaks"]:
        found["causes"][entry["cause"]].setdefault("example", entry["sentence"])
    worst = sorted(found["leaks"], key=lambda x: -(x["seconds"] or 0.0))
    return Late(requests=len(leaks), causes=found["causes"], worst=worst[:MAX_LATE])


# -- peers, loops, warnings, processes -------------------------------------------------------------------


def _peers(by_process: Mapping[str, Sequence[Record]], weights: Mapping[int, float]) -> list[Pair]:
    pairs: dict[tuple[str, str], Pair] = {}

    def pair(peer: str, reader: str) -> Pair:
        return pairs.setdefault((peer, reader), Pair(peer=peer, reader=reader))

    for reader, records in by_process.items():
        said = {r.text("pull_id"): r for r in records if r.event == EVENT.PULL_ENDED}
        for record in records:
            if record.event == EVENT.PEER_CHANGED and (peer := record.text("peer")):
                seen, state = pair(peer, reader), record.text("state")[:40]
                if seen.states:
                    seen.states[-1] = (*seen.states[-1][:2], record.at)
                if len(seen.states) < MAX_STATES:
                    seen.states.append((state, record.at, record.at))
                if state == "ready":
                    seen.last_good = record.at
            elif record.event == EVENT.PULL_ENDED:
                full = said.get(record.text("same_as"), record)
                ranks = full.texts("read_ranks") or full.texts("peer_ranks") or (full.text("peer"),)
                cause, weight = record.text("cause"), weights.get(id(record), 1.0)
                for peer in filter(None, ranks):
                    seen = pair(peer, reader)
                    seen.pulls += weight
                    seen.num_bytes += record.number("bytes", 0.0) * weight / len(ranks)
                    if cause == "complete":
                        seen.last_good = record.at
                    elif cause not in GOOD:
                        seen.failures[cause] = seen.failures.get(cause, 0) + 1
    for seen in pairs.values():
        if seen.states:
            state, since, _ = seen.states[-1]
            seen.states[-1] = state, since, by_process[seen.reader][-1].at
            seen.not_ready_s = _not_ready(seen.states)
    return sorted(pairs.values(), key=lambda x: (-sum(x.failures.values()), -x.not_ready_s, x.peer, x.reader))


def _not_ready(states: Sequence[tuple[str, float, float]]) -> float:
    was_ready, seconds = False, 0.0
    for state, since, until in states:
        was_ready = was_ready or state == "ready"
        if was_ready and state != "ready":
            seconds += until - since
    return seconds


def _away(records: Iterable[Record]) -> list[Away]:
    return [
        Away(
            rank=record.rank,
            since=record.at - seconds,
            until=record.at,
            seconds=seconds,
            leases=record.integer("leases", 0),
            pulls=record.integer("pulls", 0),
            not_logged=record.integer("not_logged", 0),
            not_logged_s=record.number("not_logged_s", 0.0),
        )
        for record in records
        if record.event == EVENT.LOOP_WAS_AWAY and (seconds := record.number("seconds", 0.0)) > 0
    ]


def _held(records: Iterable[Record]) -> list[Held]:
    found: dict[tuple[str, str], Held] = {}
    for record in records:
        if record.event not in (EVENT.LEASE_HELD, EVENT.PULL_HELD):
            continue
        side = "lease" if record.event == EVENT.LEASE_HELD else "pull"
        key = side, record.text("waits")[:MAX_TEXT]
        oldest = record.entries("oldest")
        ages = [x for e in oldest for n in ("lent_s", "state_s") if isinstance(x := e.get(n), int | float)]
        if (held := found.get(key)) is None:
            if len(found) >= MAX_CAUSES:
                continue
            name = oldest[0].get("request_id") if oldest else ""
            held = found[key] = Held(
                side=side,
                state=record.text("state")[:40],
                waits=key[1],
                warnings=0,
                most=0,
                oldest_s=0.0,
                first=record.at,
                last=record.at,
                example=str(name)[:MAX_TEXT],
            )
        held.warnings += 1
        held.last = record.at
        held.most = max(held.most, record.integer("requests", 0))
        held.oldest_s = max([held.oldest_s, *(float(x) for x in ages if 0 <= x < math.inf)])
    return sorted(found.values(), key=lambda x: (-x.most, -x.oldest_s, x.waits))


TOLD = {EVENT.PULL_ENDED, EVENT.LEASE_ENDED, EVENT.LEASE_HELD, EVENT.PULL_HELD, EVENT.LOOP_WAS_AWAY}
"""What other parts of the report tell."""


def _warned(records: Iterable[Record]) -> list[Warned]:
    found: dict[str, Warned] = {}
    for record in records:
        if record.level not in ("warning", "error") or record.event in TOLD:
            continue
        if (warned := found.get(record.event)) is None:
            if len(found) >= MAX_CAUSES:
                continue
            texts = [x for n in ("cause", "detail", "error", "who", "peer", "reader") if (x := record.text(n))]
            warned = found[record.event] = Warned(
                event=record.event,
                level=record.level,
                count=0,
                first=record.at,
                last=record.at,
                example=", ".join([record.rank, *texts])[:MAX_TEXT],
            )
        warned.count += 1
        warned.last = record.at
    return sorted(found.values(), key=lambda x: (x.level != "error", -x.count, x.event))


def _engine(rank: str, records: Sequence[Record]) -> Engine:
    levels = Counter(record.level for record in records)
    engine = Engine(
        rank=rank,
        engine_id=records[0].engine_id,
        first=records[0].at,
        last=records[-1].at,
        events=len(records),
        warnings=levels["warning"],
        errors=levels["error"],
    )
    for record in records:
        if record.event == EVENT.ENGINE_STARTED:
            engine.started = record.at if engine.started is None else engine.started
            engine.host, engine.version = record.text("host")[:MAX_TEXT], record.text("version")[:MAX_TEXT]
            engine.pid = pid if (pid := record.integer("pid", 0)) > 0 else None
        elif record.event == EVENT.ENGINE_STOPPED:
            engine.stopped = record.at
    return engine
