"""What a service did, from its logs: series over time and tables, for `asynckv report`.

Pure: records go in, one value comes out, which is the report as JSON, and from which its page is drawn.

Failures are logged one by one; of what ended well only some are, and each process says how many it left out
(`summary_samples.py`). So every logged success gets a weight: it stands for those that were left out about the same
time, in the same process. Sums of weights are what ended; what is said of bytes, latency, phases and blocks held is as
good as the samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from asynckv.core import told
from asynckv.tools.diagnose import summary_rest as rest
from asynckv.tools.diagnose.axis import make_axis
from asynckv.tools.diagnose.colours import PHASES, WITHIN
from asynckv.tools.diagnose.join import Process, Service, join
from asynckv.tools.diagnose.records import Logs, Record, number
from asynckv.tools.diagnose.summary_model import Failure, Kind, Leases, Pulls, Quarantine, Read, Summary
from asynckv.tools.diagnose.summary_offload import offloads
from asynckv.tools.diagnose.summary_rest import GOOD, MAX_CAUSES, MAX_TEXT
from asynckv.tools.diagnose.summary_samples import Edges, Tally, bounded, edges, lease_key, tally
from asynckv.tools.diagnose.summary_time import Windows, quantiles

__all__ = ["Aligned", "align", "summarise"]

MAX_NOTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Aligned:
    """What logs say, by one clock.

    Attributes:
        records: By time.
        moved: The time by that clock of what a rank's clock showed.
        clocks: What must be known of it.
    """

    service: Service
    records: Sequence[Record]
    moved: Callable[[str, float], float]
    clocks: Sequence[str] = ()


def summarise(logs: Logs, since: float = -math.inf, until: float = math.inf, aligned: Aligned | None = None) -> Summary:
    """Sum up what logs say.

    Args:
        logs: All of them: what a request's end means may depend on what was said long before.
        since: Seconds since 1970: earlier events do not count.
        until: Nor do later ones.
        aligned: Of `align`, by whose clock `since` and `until` are; made here if left out.
    """
    by_one = aligned or align(logs)
    service, records = by_one.service, by_one.records
    outside: dict[str, Edges] = {}
    if since > -math.inf or until < math.inf:
        outside = edges(records, since, until)
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
    windows = Windows(records[0].at, records[-1].at, sum(x.event == told.PullEnded.event for x in records))
    by_process: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_process[record.rank].append(record)
    weights: dict[int, float] = {}
    pulls, leases = Pulls(ended_per_s=windows.zeros(), bytes_per_s=windows.zeros()), Leases(blocks=windows.zeros())
    engines = [rest.engine(rank, found) for rank, found in by_process.items()]
    exact = set()
    for engine, found in zip(engines, by_process.values(), strict=True):
        of_pulls, of_leases = tally(found, windows, outside.get(engine.rank))
        of_pulls.weigh(weights)
        of_leases.weigh(weights)
        _add_pulls(of_pulls, weights, windows, pulls)
        leases.lent += of_leases.number
        engine.pulls, engine.leases = of_pulls.number, of_leases.number
        if of_pulls.totals:
            exact.add(engine.rank)
    retried = _retried(records)
    failures = _failures(records, retried, windows)
    _sum_pulls(records, weights, retried, exact, windows, pulls)
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
        clocks=list(by_one.clocks),
        late=rest.late(logs, service, by_one.moved, since, until),
        peers=rest.peers(by_process, weights),
        missing=service.missing(),
        unseen=rest.unseen(service, by_one.moved, since, until),
        away=rest.away(records),
        held=rest.held(records),
        warned=rest.warned(records),
        offloads=offloads(by_process, windows),
        engines=sorted(engines, key=lambda x: (x.engine_id, x.rank.split("@")[0], x.first)),
    )


def align(logs: Logs) -> Aligned:
    """Give records of several hosts the times of one clock, and say what must be known of that."""
    service = join(logs)
    if len({x.host for x in service.processes.values() if x.host}) < 2:
        return Aligned(service, logs.records, lambda _, at: at)
    axis = make_axis(service)

    def moved(process: Process | None, at: float) -> float:
        there = axis.at(process, at) if process is not None else at
        return there if math.isfinite(there) and there > 0 else at

    records = [dataclasses.replace(x, at=moved(service.processes.get(x.incarnation), x.at)) for x in logs.records]
    said = ["The processes run on several hosts; their clocks are aligned by what they said to each other."]
    return Aligned(
        service,
        sorted(records, key=attrgetter("at")),
        lambda rank, at: moved(service.process_named(rank), at),
        said + [f"Clocks: {x}." for x in axis.notes()[:MAX_NOTES]],
    )


# -- pulls and leases --------------------------------------------------------------------------------------


def _add_pulls(found: Tally, weights: Mapping[int, float], windows: Windows, pulls: Pulls) -> None:
    """Add one process's pulls that went well."""
    mean = _mean([(bounded(r.number("bytes", 0.0)), weights[id(r)]) for rows in found.sampled for r in rows])
    for i, (rows, missing) in enumerate(zip(found.sampled, found.missing, strict=True)):
        pulls.ended_per_s[i] += (len(rows) + missing) / windows.seconds
        moved = math.fsum(bounded(r.number("bytes", 0.0)) for r in rows)
        of_missing = moved / len(rows) if rows else mean
        pulls.bytes_per_s[i] += (moved + missing * of_missing) / windows.seconds
    pulls.ended += found.number
    for cause in GOOD:
        setattr(pulls, cause, getattr(pulls, cause) + found.totals.get(f"pulls.{cause}", 0))


def _mean(values: Iterable[tuple[float, float]]) -> float:
    rows = list(values)
    total = math.fsum(weight for _, weight in rows)
    return math.fsum(value * weight for value, weight in rows) / total if total else 0.0


def _retried(records: Iterable[Record]) -> set[tuple[str, str]]:
    """Find attempts that another one followed: process and pull id."""
    latest: dict[tuple[str, str], tuple[int, str]] = {}
    found = set()
    for record in records:
        if record.event == told.PullRetried.event:
            found.add((record.rank, record.text("pull_id")))
        elif record.event == told.PullEnded.event:
            # The line that says so is of level info, and may not be there.
            key, attempt = (record.rank, record.text("request_id")), record.integer("attempt", 1)
            if key in latest and latest[key][0] < attempt:
                found.add((record.rank, latest[key][1]))
            latest[key] = attempt, record.text("pull_id")
    return found


def _is_failed(record: Record) -> bool:
    return record.event == told.PullEnded.event and record.text("cause") not in GOOD


def _sum_pulls(
    records: Iterable[Record],
    weights: Mapping[int, float],
    retried: set[tuple[str, str]],
    exact: set[str],
    windows: Windows,
    pulls: Pulls,
) -> None:
    took: list[list[tuple[float, float]]] = [[] for _ in range(windows.count)]
    phases: dict[str, list[list[tuple[float, float]]]] = defaultdict(lambda: [[] for _ in range(windows.count)])
    pulls.failed_per_s = windows.zeros()
    for record in records:
        if record.event != told.PullEnded.event:
            continue
        i, cause, weight = windows.index(record.at), record.text("cause"), weights.get(id(record), 1.0)
        pulls.logged += 1
        if id(record) not in weights:
            pulls.ended_per_s[i] += 1 / windows.seconds
            pulls.bytes_per_s[i] += bounded(record.number("bytes", 0.0)) / windows.seconds
        if cause not in GOOD:
            if (record.rank, record.text("pull_id")) in retried:
                pulls.retried += 1
            else:
                pulls.failed += 1
                pulls.failed_per_s[i] += 1 / windows.seconds
            continue
        if record.rank not in exact:
            setattr(pulls, cause, getattr(pulls, cause) + weight)
        seconds = record.number("seconds")
        if cause != "complete" or not seconds >= 0:
            continue
        took[i].append((bounded(seconds), weight))
        if seconds > pulls.slowest.get("seconds", -1.0):
            pulls.slowest = {"seconds": seconds, "request_id": record.text("request_id"), "rank": record.rank}
        named = record.mapping("phases")
        for name in (*PHASES, *WITHIN):
            if (value := number(named.get(name))) >= 0:
                phases[name][i].append((bounded(value), weight))
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
            if record.event not in (told.LeaseLent.event, told.LeaseEnded.event):
                continue
            key = lease_key(record)
            if record.event == told.LeaseLent.event:
                leases.logged += 1
                lent[key] = record
                continue
            begun = lent.pop(key, None)
            since = record.at - max(record.number("seconds", 0.0), 0.0)
            blocks, is_good = bounded(record.integer("blocks", 0)), record.text("cause") == "released"
            if begun is None:  # failed, and not among the samples; or its beginning is not in the logs
                leases.logged += 1
            weight = weights.get(id(begun), 1.0) if begun and is_good else 1.0
            windows.hold(leases.blocks, since, record.at, blocks * weight)
            windows.hold(leases.blocks_logged, since, record.at, blocks)
            if not is_good:
                leases.ended_badly += 1
                windows.hold(leases.blocks_badly, since, record.at, blocks)
        leases.open += len(lent)
        for begun in lent.values():
            blocks = bounded(begun.integer("blocks", 0))
            windows.hold(leases.blocks, begun.at, records[-1].at, blocks * weights.get(id(begun), 1.0))
            windows.hold(leases.blocks_logged, begun.at, records[-1].at, blocks)


def _quarantine(by_process: Mapping[str, Sequence[Record]], windows: Windows) -> Quarantine:
    found = Quarantine(pulls=windows.zeros())
    for records in by_process.values():
        since: dict[str, float] = {}
        for record in records:
            pull = record.text("pull_id")
            if record.event == told.PullEnded.event and record.integer("held_transfers", 0) > 0:
                since[pull] = record.at
            elif record.event in (told.BlocksReturned.event, told.BlocksRetired.event):
                seconds = max(record.number("seconds_after_failure", 0.0), 0.0)
                begun = since.pop(pull, record.at - seconds)
                found.longest_s = max(found.longest_s, record.at - begun)
                if record.event == told.BlocksReturned.event:
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
        elif record.event == told.LeaseEnded.event and cause != "released":
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
