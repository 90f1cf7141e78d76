"""Whose clock says what: offsets between the clocks of processes, out of what they said to each other.

From a cause in one process and its effect in another,

    the effect's clock - the cause's clock  <=  effect (by its clock) - cause (by its clock)

and from exchanges in both directions an interval. Processes of one host have one clock, until their exchanges
contradict it (containers often have one name). Other clocks are compared with a reference's, directly or by way of
clocks between them; those that no exchange connects have an axis of their own.

The nearest exchanges count, because clocks drift and are set. Of many bounds the tightest few are not believed, because
their lines were written late. If bounds contradict each other, the interval holds both, and the contradiction is told.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from asynckv.core import told
from asynckv.tools.diagnose.records import Record

DRIFT = 200e-6
"""How much faster one clock may run than another; crystals keep 100 ppm together, and NTP turns them by as much."""
LATE_S = 0.001
"""How long after its cause a line is usually written, at most."""
NEAR = 64
"""Bounds on either side of a moment that are looked at."""
DOUBTED = 20
"""One of so many bounds is not believed: the tightest, whose line was late."""
LOOKED_AT = 400
"""Moments at which contradictions between two clocks are looked for, at most."""
PUT_BACK_S = 2.0
"""Lines of one process are written in order but for less than this; a clock that goes back by more was set."""
SET_S = 0.02
"""A lesser contradiction is not told: late lines look the same."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A cause in one process and its effect in another, each by its own clock."""

    cause: str
    cause_at: float
    effect: str
    effect_at: float


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a process's clock is ahead of its group's reference, at some moment."""

    seconds: float  # subtract it to come to the reference's time
    within_s: float  # how much more or less it may be


@dataclass(frozen=True, slots=True)
class Conflict:
    """Exchanges of two clocks contradict each other: one of them was set, or lines were written late."""

    names: tuple[str, str]  # of the two clocks
    since: float  # from when on they do, by the reference's clock
    until: float  # and until when
    seconds: float  # by how much, at most


@dataclass
class Clocks:
    """The clocks of some processes, and how far each is from its group's reference.

    Attributes:
        clock: Which clock a process has; those of one host share one. Its name is a process that has it.
    """

    clock: dict[str, str]
    groups: list[list[str]] = field(default_factory=list)  # clocks that can be compared, the reference first
    conflicts: list[Conflict] = field(default_factory=list)  # where exchanges contradict each other
    not_shared: list[str] = field(default_factory=list)  # hosts whose processes contradict that they have one clock
    _group: dict[str, int] = field(default_factory=dict)
    _ways: dict[str, _Way] = field(default_factory=dict)

    def group(self, process: str) -> int:
        """Return which group a process belongs to; what is in two groups cannot be compared."""
        return self._group[self.clock[process]]

    def offset(self, process: str, at: float) -> Offset:
        """Return how far a process's clock was ahead of its group's reference when it showed `at`."""
        seconds = within_s = 0.0
        way = self._ways.get(self.clock[process])
        while way is not None:
            low, high, _ = way.bounds(at - seconds)
            seconds, within_s = seconds + (low + high) / 2, within_s + (high - low) / 2
            way = self._ways.get(way.to)
        return Offset(seconds, within_s)

    def align(self, process: str, at: float) -> float:
        """Return the reference's time for a moment of a process's clock."""
        return at - self.offset(process, at).seconds


class _Way:
    """One clock against another that is nearer to the reference.

    Attributes:
        to: The other clock.
        upper: Rows of (when by the first clock, how far it is ahead at most), by time.
        lower: The same, at least, with its sign changed.
    """

    def __init__(self, to: str, lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]]) -> None:
        self.to = to
        self.lower, self.upper = (np.array(sorted(x), np.float64) for x in (lower, upper))
        self.lower[:, 1] *= -1

    def bounds(self, at: float) -> tuple[float, float, float]:
        """Return how far ahead the clock is at least and at most, and by how much exchanges contradict that."""
        low, high = -_near(self.lower, at), _near(self.upper, at)
        gap = float(low[0] - high[0])
        if gap <= 0:
            return float(low[0]), float(high[0]), 0.0
        # Either value may hold. Where only one direction is known of one, it is as far away as the contradiction.
        least = next((x for x in low if x <= high[0]), high[0] - gap)
        most = next((x for x in high if x >= low[0]), low[0] + gap)
        return float(least), float(most), gap


def _near(rows: Floats, at: float) -> Floats:
    """Return the upper bounds that are nearest in time, as they hold at a moment, the tightest believed one first."""
    i = int(np.searchsorted(rows[:, 0], at))
    near = rows[max(i - NEAR, 0) : i + NEAR]
    bounds: Floats = np.sort(near[:, 1] + DRIFT * np.abs(near[:, 0] - at))
    return bounds[len(bounds) // DOUBTED :]


Rows = dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]]
"""Of one clock against others, by name: lower and upper bounds."""


def align(
    pairs: Iterable[Pair], hosts: Mapping[str, str], prefer: Sequence[str] = (), late_s: float = LATE_S
) -> Clocks:
    """Compare the clocks of processes.

    Args:
        pairs: Causes and effects.
        hosts: Every process, and the host that it says it runs on; empty if it does not say.
        prefer: Processes whose clocks are to be references, the best first.
        late_s: How late a cause's line may be.
    """
    known = [p for p in pairs if p.cause in hosts and p.effect in hosts and p.cause != p.effect]
    clock, not_shared = _share(known, hosts, late_s)
    found = Clocks(clock, not_shared=not_shared)
    rows: dict[str, Rows] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    for pair in known:
        cause, effect = clock[pair.cause], clock[pair.effect]
        if cause != effect:
            gap = pair.effect_at - pair.cause_at + late_s
            rows[effect][cause][1].append((pair.effect_at, gap))
            rows[cause][effect][0].append((pair.cause_at, -gap))
    wanted = {clock[p]: i for i, p in reversed(list(enumerate(prefer))) if p in clock}
    for name in sorted(dict.fromkeys(clock.values()), key=lambda c: (wanted.get(c, len(wanted)), -len(rows[c]), c)):
        if name not in found._group:
            _reach(found, name, rows)
    return found


def _share(pairs: Sequence[Pair], hosts: Mapping[str, str], late_s: float) -> tuple[dict[str, str], list[str]]:
    """Give processes of one host one clock, unless their exchanges contradict it."""
    first: dict[str, str] = {}
    clock = {p: first.setdefault(host, p) if host else p for p, host in hosts.items()}
    inside: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pair in pairs:
        if clock[pair.cause] == clock[pair.effect]:
            inside[pair.cause, pair.effect].append(pair.effect_at - pair.cause_at + late_s)
    # Lines of a host that is busy may be late by less.
    bad = {hosts[p]: None for (p, _), gaps in inside.items() if sorted(gaps)[len(gaps) // DOUBTED] < -SET_S}
    return {p: p if hosts[p] in bad else c for p, c in clock.items()}, list(bad)


def _reach(found: Clocks, reference: str, rows: Mapping[str, Rows]) -> None:
    """Find the clocks that can be compared with a reference, the nearest first, and a way from each."""
    found._group[reference] = len(found.groups)
    reached = [reference]
    for to in reached:
        # Of two clocks that only one direction is known of nothing can be said.
        near = [name for name, sides in rows[to].items() if name not in found._group and all(sides)]
        for name in sorted(near):
            found._group[name] = len(found.groups)
            found._ways[name] = _Way(to, *rows[name][to])
            found.conflicts += _conflict(found, name)
        reached += sorted(near)
    found.groups.append(reached)


def _conflict(found: Clocks, name: str) -> list[Conflict]:
    """Find the stretch of time in which the exchanges of two clocks contradict each other."""
    way = found._ways[name]
    times = np.unique(np.concatenate([way.lower[:, 0], way.upper[:, 0]]))
    some = times[np.linspace(0, len(times) - 1, min(len(times), LOOKED_AT)).astype(int)].tolist()
    gaps = [(found.align(name, at), gap) for at in some if (gap := way.bounds(at)[2]) >= SET_S]
    moments = [at for at, _ in gaps]
    return [Conflict((name, way.to), min(moments), max(moments), max(x for _, x in gaps))] if gaps else []


# -- a clock that was put back -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutBack:
    """A process's clock was put back: when, as it went before, and by how much at least."""

    at: float
    seconds: float


def mended(records: Sequence[Record]) -> tuple[Sequence[Record], dict[str, list[PutBack]]]:
    """Let a clock that was put back go on as it went before; the lines of each file tell in which order they came.

    Args:
        records: By time. How long a process was silent as its clock was put back is not known, and taken for nothing.
    """
    files: dict[tuple[str, str], list[tuple[int, Record]]] = defaultdict(list)
    for record in records:
        path, _, line = record.where.rpartition(":")
        files[record.incarnation, path].append((int(line) if line.isdecimal() else 0, record))
    found: dict[str, list[PutBack]] = {}
    moved: dict[int, Record] = {}
    for (incarnation, _), lines in files.items():
        lines.sort(key=itemgetter(0))
        first = before = lines[0][1].at
        ahead = 0.0
        for _, record in lines:
            # Lines that were put together, or exported, in the wrong order lie before all that stand above them.
            if before - record.at > PUT_BACK_S and record.at > first:
                found.setdefault(incarnation, []).append(PutBack(before + ahead, before - record.at))
                ahead += before - record.at
            first, before = min(first, record.at), record.at
            if record.event == told.EngineStarted.event:  # nothing is written before that
                first = -math.inf
            elif record.event in (told.EngineStopped.event, told.EngineSuspended.event):  # nor after
                first = math.inf
            if ahead:
                moved[id(record)] = replace(record, at=record.at + ahead)
    if moved:
        records = sorted((moved.get(id(x), x) for x in records), key=attrgetter("at"))
    return records, found
