"""Who was not there while a request was lent: a reader that could not have claimed it, whether or not it was given it.

While that lasts, a process does not answer whoever asks it, or its log ends and others go on. Afterwards it says itself
for how long its event loop was away. None of this tells that the request was given to this reader: of several that were
not there each may have been meant, and the params may have been lost on their way to any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from asynckv.core import told
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Lease, Process, Pull
from asynckv.tools.diagnose.leaks_processes import Processes
from asynckv.tools.diagnose.leaks_values import Story, engine_of, in_seconds, listed, moment

__all__ = ["absent", "came_back_too_late", "is_long_away", "quiet", "unresponsive", "whole"]

C = CAUSE

MOST = 0.9
"""Whose loop was away for such a part of the lease's time could not claim it. Who was there for longer would have: a
decode engine claims as soon as it hears of a request. Not all of it: when an absence began is known to some seconds."""
SOON = 0.5
"""Who comes back and asks for a request within such a part of a lease asks late because it was away."""


def absent(processes: Processes, lease: Lease, readers: Iterable[Process]) -> dict[str, str]:
    """Say of each reader that was surely not there for most of a lease's time why; names of ranks are its keys."""
    out = {}
    until = processes.span(lease)[1]
    for reader in readers:
        fate, away_s = processes.fate(reader), is_long_away(processes, lease, reader)[0]
        if fate.hangs and fate.after < until:
            out[reader.rank] = fate.why
        elif away_s and fate.kind != "died":
            out[reader.rank] = f"its event loop was away for {in_seconds(away_s)} s then"
    return out


def quiet(processes: Processes, readers: Iterable[Process]) -> dict[str, str]:
    """Say of each reader whose log ends, though it used to write more often than that, when it did."""
    return {
        x.rank: f"its log ends at {moment(x.last_at)} without a goodbye, and others go on"
        for x in readers
        if processes.is_quiet(x)
    }


def whole(found: dict[str, str], readers: Iterable[Process]) -> dict[str, str]:
    """Leave out ranks of an engine of which others were there: they would have spoken of a request that it had."""
    there = {engine_of(x.rank) for x in readers if x.rank not in found}
    return {rank: why for rank, why in found.items() if engine_of(rank) not in there}


def is_long_away(processes: Processes, lease: Lease, reader: Process) -> tuple[float, float]:
    """For how long a reader's loop was away over most of a lease's time, and when it came back by its own clock."""
    name = lease.process.incarnation
    since, until = (sum(processes.when(name, x)) / 2 for x in (lease.lent_at, lease.lent_at + lease.seconds))
    for record in reader.of(told.LoopWasAway):
        seconds, back = record.number("seconds", 0.0), sum(processes.when(reader.incarnation, record.at)) / 2
        if min(until, back) - max(since, back - seconds) > MOST * max(until - since, 0.0):
            return seconds, record.at
    return 0.0, -math.inf


def came_back_too_late(processes: Processes, lease: Lease, pull: Pull) -> Story | None:
    """A reader spoke of a request when its lease was over, and as it came back: it was not there before."""
    away_s, back_at = is_long_away(processes, lease, pull.process)
    if not away_s or not back_at - away_s <= pull.begun_at <= back_at + SOON * lease.seconds:
        return None
    names = {"reader": pull.process.rank, "holder": lease.process.rank, "away_s": in_seconds(away_s)}
    return Story(C.DECODE_LOOP_AWAY, names)


def unresponsive(found: dict[str, str], given: str = "may have been given it", missing: tuple[str, ...] = ()) -> Story:
    """Tell of readers that were not there."""
    by_why: dict[str, list[str]] = {}
    for rank, why in found.items():
        by_why.setdefault(why, []).append(rank)
    (why, ranks), *rest = by_why.items()
    why = "; or ".join([why, *(f"{listed(more)}, but {other}" for other, more in rest)])
    return Story(C.DECODE_UNRESPONSIVE, {"reader": listed(ranks), "given": given, "why": why}, missing=missing)
