"""What a process left out of its log: how much, when, and which logged success stands for how many.

Every process says now and then how many successes it left out since it last said so, and, when it stops in order, how
many there were in all. In between nothing is known, so they are spread evenly. It says one number for pulls and leases:
in a process that has both they are split as its totals say, or as what it did log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asynckv.core import told
from asynckv.tools.diagnose.records import Record
from asynckv.tools.diagnose.summary_time import Windows

__all__ = ["Edges", "Tally", "bounded", "edges", "lease_key", "tally"]

COUNTING = {told.PullEnded.event, told.LeaseLent.event, told.LeaseEnded.event}
"""What says how many successes were left out since the one before."""

NO_ENDS = ("pulls.started", "pulls.overloaded")
MOST = 1 << 53


class Edges(NamedTuple):
    """What one process said just outside the time that counts: its numbers are of both sides of the edge.

    Attributes:
        since: Where the time begins.
        before: When it last said a number before that, or anything at first; nan if it did not.
        until: Where it ends.
        after: When it said the next number after that; nan if it did not.
        number: Which one.
    """

    since: float = math.nan
    before: float = math.nan
    until: float = math.nan
    after: float = math.nan
    number: int = 0


def edges(records: Iterable[Record], since: float, until: float) -> dict[str, Edges]:
    """Find what processes, by their ranks, said just outside the time that counts; records are in order."""
    before: dict[str, float] = {}
    after: dict[str, tuple[float, int]] = {}
    for record in records:
        if record.at < since:
            if record.event in COUNTING or record.rank not in before:
                before[record.rank] = record.at
        elif record.at > until and record.event in COUNTING:
            after.setdefault(record.rank, (record.at, record.integer("successes_not_logged", 0)))
    return {
        rank: Edges(since, before.get(rank, math.nan), until, *after.get(rank, (math.nan, 0)))
        for rank in {*before, *after}
    }


@dataclass(slots=True)
class Tally:
    """Pulls or leases of one process.

    Attributes:
        sampled: Records that stand for others as well, by window.
        missing: How many were left out, by window.
        others: How many records there are that stand for themselves.
        totals: What the process said as it stopped, by the name of its counter; empty if it did not.
    """

    sampled: list[list[Record]]
    missing: list[float]
    others: int
    totals: Mapping[str, int]

    @property
    def number(self) -> float:
        """How many there were in all."""
        return sum(map(len, self.sampled)) + math.fsum(self.missing) + self.others

    def weigh(self, weights: dict[int, float]) -> None:
        """Give every sample its weight: what was left out goes to the nearest window that has any."""
        having = [i for i, found in enumerate(self.sampled) if found]
        carried = dict.fromkeys(having, 0.0)
        for i, amount in enumerate(self.missing):
            if amount and having:
                carried[min(having, key=lambda j: (abs(j - i), j))] += amount
        for i, amount in carried.items():
            for record in self.sampled[i]:
                weights[id(record)] = 1 + amount / len(self.sampled[i])


def bounded(value: float) -> float:
    """Return a number of bytes or seconds that can be summed: a log may say anything."""
    return min(max(value, 0.0), float(MOST))


def lease_key(record: Record) -> tuple[str, int]:
    """What a lease is known by in one process."""
    return record.text("request_id"), record.integer("sequence")


def tally(records: Sequence[Record], windows: Windows, edges: Edges | None = None) -> tuple[Tally, Tally]:
    """Count one process's pulls and leases."""
    edges = edges or Edges()
    left_out, before = windows.zeros(), records[0].at
    outside = edges.before
    pulls: list[list[Record]] = [[] for _ in left_out]
    leases: list[list[Record]] = [[] for _ in left_out]
    num_failed = num_bad = num_unknown = 0
    lent = set()
    for record in records:
        if record.event not in COUNTING:
            continue
        if (number := record.integer("successes_not_logged", 0)) > 0:
            # Some of the first were before the time that counts.
            before, part = (
                (before, 1.0) if math.isnan(outside) else (edges.since, _part(outside, edges.since, record.at))
            )
            windows.spread(left_out, before, record.at, min(number, MOST) * part)
        before, outside = record.at, math.nan
        if record.event == told.LeaseLent.event:
            leases[windows.index(record.at)].append(record)
            lent.add(lease_key(record))
        elif record.event == told.LeaseEnded.event:
            if lease_key(record) not in lent:
                num_bad += record.text("cause") != "released"
                num_unknown += record.text("cause") == "released"
        elif record.level == "info":
            pulls[windows.index(record.at)].append(record)
        else:  # failed, or slow: all of these are logged
            num_failed += 1
    if edges.number > 0 and edges.after > before:
        # ... and some of the first that are told of after it were in it.
        begun = edges.since if outside < edges.since else before
        whole = outside if outside < edges.since else before
        part = max(edges.until - begun, 0.0) / (edges.after - whole)
        windows.spread(left_out, begun, edges.until, min(edges.number, MOST) * part)
    totals, end = _totals(records)
    num_pulls, num_leases = sum(map(len, pulls)), sum(map(len, leases))
    if totals:
        ends = sum(n for name, n in totals.items() if name.startswith("pulls.") and name not in NO_ENDS)
        wanted = [
            max(ends - num_pulls - num_failed, 0.0),
            max(totals.get("leases.lent", 0) - num_leases - num_bad, 0.0),
        ]
    else:
        said = math.fsum(left_out)
        share = num_pulls / (num_pulls + num_leases) if num_pulls + num_leases else float(num_failed > 0)
        # A lease that is left out when it is lent, and ends badly, is logged then.
        wanted = [said * share, max(said * (1 - share) - num_bad, 0.0)]
    missing = [_shaped(left_out, x, x / (sum(wanted) or 1.0), windows, before, end) for x in wanted]
    return (
        Tally(pulls, missing[0], num_failed, {k: n for k, n in totals.items() if k.startswith("pulls.")}),
        Tally(leases, missing[1], num_bad + num_unknown, {}),
    )


def _part(before: float, since: float, at: float) -> float:
    """Return which part of a span is after some moment in it."""
    return (at - since) / (at - before) if before < since <= at else 1.0


def _shaped(
    left_out: Sequence[float], wanted: float, part: float, windows: Windows, before: float, end: float
) -> list[float]:
    """Spread a number as what was left out is, and what is beyond that after the process's last word of it."""
    shape = [x * part for x in left_out]
    said = math.fsum(shape)
    if said >= wanted:
        return [x * wanted / said for x in shape] if said else shape
    windows.spread(shape, before, max(end, before), wanted - said)
    return shape


def _totals(records: Iterable[Record]) -> tuple[dict[str, int], float]:
    """What a process said as it stopped; nothing if its log does not have its start, for then that is of more."""
    is_whole = False
    for record in records:
        if record.event == told.EngineStarted.event:
            is_whole = True
        elif record.event == told.EngineStopped.event and is_whole:
            counters = record.mapping("counters")
            known = {k: n for k, n in counters.items() if isinstance(n, int) and not isinstance(n, bool)}
            return {k: n for k, n in known.items() if 0 <= n <= MOST}, record.at
    return {}, 0.0
