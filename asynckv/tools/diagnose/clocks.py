"""Whose clock says what: offsets between the clocks of processes, out of what they said to each other.

Every log line has the wall clock of its own process, and on two hosts the same moment has two names. What happened
gives bounds: a hello was sent before it was answered, a grant given before the pull that needed it was complete. So
from one cause and its effect,

    here's clock - there's clock  <=  effect (by here's clock) - cause (by there's clock)

and from exchanges in both directions an interval. Nothing in it is an estimate: if the lines are right, the true
offset lies inside, and its half width is the uncertainty that is shown.

Four things make that less simple:

- *Clocks drift.* A bound that was seen at one time holds at another with `DRIFT` more for every second between. So
  offsets are functions of time, computed at some knots.
- *A line may be late.* It is written after what it tells; by some microseconds, or by more where much happened at
  once. Every bound is given `LATE_S`, and of many bounds the tightest few are not believed.
- *Clocks are stepped.* Bounds before and after it then contradict each other. The step is found, told, and the bounds
  of one side are not used on the other; between the last exchange before it and the first after it both are possible.
- *Three clocks meet.* Bounds add up along every way through the graph, and the tightest way counts. Bounds that
  contradict each other round a circle are loosened until they do not, and that is told.

Processes of one host have one clock, until their exchanges contradict it (containers often have one name). Clocks that
no exchange connects cannot be compared: each such group has an axis of its own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["DRIFT", "LATE_S", "STEP_S", "Clocks", "Offset", "Pair", "Step", "align"]

DRIFT = 200e-6
"""How much faster one clock may run than another; crystals keep 100 ppm together, and NTP turns them by as much."""
LATE_S = 0.001
"""How long after its cause a line is usually written, at most."""
KNOTS = 129
"""Moments at which offsets are computed, at most."""
DOUBTED, ENOUGH = 25, 8
"""Of so many bounds the tightest is not believed, and one of fewer if they are enough: its line was late."""
NEAR_S = 10.0
"""Bounds that are so near in time are as good as new."""
MOST, STRETCHES, KEPT = 6_000, 256, 8
"""Bounds between two clocks; of more, the tightest of so many stretches of time are kept."""
FOLLOWING, LOOKED_AT = 8, 400
"""A step is believed if most of the next so many bounds of the same kind say so; they are looked for among so many."""
STEP_S = 0.02
"""A lesser step is not told: late lines look the same."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A cause in one process and its effect in another, each by its own clock.

    Attributes:
        kind: What they are, for people.
    """

    cause: str
    cause_at: float
    effect: str
    effect_at: float
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Offset:
    """How far a process's clock is ahead of its group's reference, at some moment.

    Attributes:
        seconds: Subtract it to come to the reference's time; nan if nothing is known.
        within_s: How much more or less it may be; inf if nothing is known.
    """

    seconds: float
    within_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """Somebody set a clock while the logs were written.

    Attributes:
        names: Of two clocks that agreed otherwise before than after.
        after: By the first one's clock: it was not set before.
        before: And not after that.
        seconds: By how much the first was put forward against the second, about.
    """

    names: tuple[str, str]
    after: float
    before: float
    seconds: float


@dataclass
class Clocks:
    """The clocks of some processes, and how far each is from its group's reference.

    Attributes:
        clock: Which clock a process has; those of one host share one. Its name is a process that has it.
        groups: Clocks that can be compared, the reference first.
        steps: Who was set while the logs were written.
        not_shared: Hosts whose processes contradict that they have one clock.
        doubted: By how much single exchanges contradict the others.
        widened_s: By how much bounds were loosened, because they contradicted each other round a circle.
        pairs: How many exchanges there were between different clocks.
    """

    clock: dict[str, str]
    groups: list[list[str]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    not_shared: list[str] = field(default_factory=list)
    doubted: list[float] = field(default_factory=list)
    widened_s: float = 0.0
    pairs: int = 0
    _group: dict[str, int] = field(default_factory=dict)
    _course: dict[str, _Course] = field(default_factory=dict)

    def group(self, process: str) -> int:
        """Return which group a process belongs to; what is in two groups cannot be compared."""
        return self._group[self.clock[process]]

    def reference(self, process: str) -> str:
        """Return the clock that this process's is compared with."""
        return self.groups[self.group(process)][0]

    def offset(self, process: str, at: float) -> Offset:
        """Return how far a process's clock was ahead of its group's reference when it showed `at`."""
        course = self._course.get(self.clock[process])
        return course.at(at) if course else Offset(0.0, 0.0)

    def align(self, process: str, at: float) -> float:
        """Return the reference's time for a moment of a process's clock."""
        return at - self.offset(process, at).seconds


class _Course:
    """One clock against its reference, at some moments of the reference."""

    def __init__(self, moments: Floats, low: Floats, high: Floats) -> None:
        self.low, self.high = low, high
        with np.errstate(invalid="ignore"):  # of what is not known at all
            self._shown = moments + (low + high) / 2
        # What it may have shown between two moments, wherever in between it was set.
        passed, half = np.diff(moments), np.maximum(high - low, 0) / 2
        left, right, unsure = self._shown[:-1], self._shown[1:], np.maximum(half[:-1], half[1:])
        self._least = np.minimum(left, right - passed) - unsure
        self._most = np.maximum(right, left + passed) + unsure
        was_set = np.abs(right - left - passed) > half[:-1] + half[1:] + DRIFT * passed
        self._is_steady = not np.any(was_set) and bool(np.all(right > left))

    def at(self, shown: float) -> Offset:
        """Return the offset when this clock showed something."""
        last = len(self._shown) - 1
        if self._is_steady:
            first = min(max(int(np.searchsorted(self._shown, shown, "right")) - 1, 0), max(last - 1, 0))
            found = [(first, min(first + 1, last))]
        else:  # it was set, and may have shown this more than once
            inside = np.flatnonzero((self._least <= shown) & (shown <= self._most))
            found = [(int(i), int(i) + 1) for i in inside]
            found += [(0, 0)] * bool(shown < self._shown[0]) + [(last, last)] * bool(shown > self._shown[-1])
            # Between two knots that are not as far apart as they should be there is always one of them.
            found = found or [(int(i := np.abs(self._shown - shown).argmin()), int(i))]
        spans = [self._between(one, other, shown) for one, other in found]
        low, high = min(x for x, _ in spans), max(x for _, x in spans)
        is_known = math.isfinite(low) and math.isfinite(high)
        return Offset((low + high) / 2, (high - low) / 2) if is_known else Offset(math.nan, math.inf)

    def _between(self, one: int, other: int, shown: float) -> tuple[float, float]:
        gaps = abs(shown - self._shown[one]), abs(shown - self._shown[other])
        drift = DRIFT * (gaps[0] + gaps[1])
        if self.high[one] + drift < self.low[other] or self.high[other] + drift < self.low[one]:
            # It was set in between.
            return float(min(self.low[one], self.low[other])), float(max(self.high[one], self.high[other]))
        nearest = one if gaps[0] <= gaps[1] else other
        drift = DRIFT * min(gaps)
        return float(self.low[nearest] - drift), float(self.high[nearest] + drift)


# -- one clock against another -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What is known of `here - there`: rows of (time, bound), in the order of time, that agree with each other."""

    lower: Floats
    upper: Floats
    since: float = -math.inf
    until: float = math.inf

    def at(self, moment: float) -> tuple[float, float]:
        """Return the least and the greatest it may be; of bounds that contradict each other neither is believed."""
        since_low, since_high = np.abs(self.lower[:, 0] - moment), np.abs(self.upper[:, 0] - moment)
        low, high = self.lower[:, 1] - DRIFT * since_low, self.upper[:, 1] + DRIFT * since_high
        i, j = (
            _doubted(len(x), int(np.count_nonzero(x <= x.min(initial=np.inf) + NEAR_S)))
            for x in (since_low, since_high)
        )
        least = -float(np.partition(-low, i)[i]) if len(low) else -math.inf
        most = float(np.partition(high, j)[j]) if len(high) else math.inf
        if least > most:
            lows, highs = np.sort(low)[::-1], np.sort(high)
            while i < len(lows) and j < len(highs) and lows[i] > highs[j]:
                i, j = i + 1, j + 1
            least = float(lows[i]) if i < len(lows) else -math.inf
            most = float(highs[j]) if j < len(highs) else math.inf
        return least, most


def _doubted(number: int, near: int) -> int:
    """Return how many of so many bounds are not believed: of those that are near in time, for others have aged."""
    return near // DOUBTED + 1 if number >= ENOUGH else 0


@dataclass(frozen=True, slots=True)
class _Edge:
    """One clock against another, from one step to the next.

    Attributes:
        doubted: By how much single bounds contradict the others.
    """

    runs: Sequence[_Bounds]
    doubted: Sequence[float] = ()

    def at(self, moment: float) -> tuple[float, float]:
        """Return the least and the greatest that `here - there` may be at a moment."""
        found = [run.at(moment) for run in self.runs if run.since <= moment <= run.until]
        if not found:  # between the last word before a step and the first after it
            around = [*[x for x in self.runs if x.until < moment][-1:], *[x for x in self.runs if x.since > moment][:1]]
            found = [run.at(moment) for run in around]
        low, high = min(x for x, _ in found), max(x for _, x in found)
        if not math.isfinite(high - low):  # a run so short that nothing was said in one direction
            ends = [x for run in self.runs for x in run.at(moment) if math.isfinite(x)]
            known = low if math.isfinite(low) else high if math.isfinite(high) else None
            if known is not None:  # by as much as it is known to have been set, either way
                far = max((abs(x - known) for x in ends), default=math.inf)
                low, high = max(low, known - far), min(high, known + far)
            else:
                low, high = min(ends, default=-math.inf), max(ends, default=math.inf)
        return low, high

    def middle(self, run: int, moment: float) -> float:
        """Return a rough value: of few bounds, all may contradict each other."""
        found = self.runs[run]
        sides = (float(np.median(x[:, 1])) if len(x) else math.nan for x in (found.lower, found.upper))
        told = [x for x in found.at(moment) if math.isfinite(x)] or [x for x in sides if math.isfinite(x)]
        return sum(told) / len(told)


Row = tuple[float, float, bool]
"""When, which bound, and whether it is an upper one."""


def _split(rows: Sequence[Row]) -> _Edge:
    """Split bounds, in the order of time, into runs in which they agree.

    Two bounds agree if the lower one, aged, is not above the upper one; in the order of time it is enough to look at
    the tightest so far. A bound that contradicts is a late line if the next of its kind agree with what was before, and
    a step if they do not. The step was after the last bound of the other kind that is contradicted.
    """
    runs: list[_Bounds] = []
    run: list[Row] = []
    doubted: list[float] = []
    low, high, then, since, first = -math.inf, math.inf, -math.inf, -math.inf, 0.0
    for i, (at, bound, is_upper) in enumerate(rows):
        if run:
            low, high = low - DRIFT * (at - then), high + DRIFT * (at - then)
        then = at
        if bound < low if is_upper else bound > high:
            next_ = [r for r in rows[i : i + LOOKED_AT] if r[2] is is_upper][:FOLLOWING]
            against = sum(b < low - DRIFT * (t - at) if u else b > high + DRIFT * (t - at) for t, b, u in next_)
            if against < 2 or 2 * against <= len(next_):
                doubted.append(low - bound if is_upper else bound - high)
                run.append(rows[i])  # of these two, neither will be believed
                continue
            sign = 1 if is_upper else -1
            told = [r for r in run if r[2] is not is_upper and sign * (bound - r[1]) + DRIFT * (at - r[0]) < 0]
            until, last, _ = max(told, default=run[-1])
            runs.append(_bounds([r for r in run if r[0] <= until], since, first, until, last))
            run, low, high, since, first = [], -math.inf, math.inf, at, bound
        run.append(rows[i])
        if is_upper:
            high = min(high, bound)
        else:
            low = max(low, bound)
    runs.append(_bounds(run, since, first, math.inf, 0.0))
    return _Edge(runs, doubted)


def _bounds(run: Sequence[Row], since: float, first: float, until: float, last: float) -> _Bounds:
    """Put a run together that is known to hold from its first bound to its last.

    A cause and its effect are not at one moment, and the step may have been in between: such a bound is as far from the
    others as the exchange took.
    """
    lower, upper = (np.array([r[:2] for r in run if r[2] is x], np.float64).reshape(-1, 2) for x in (False, True))
    whole = _Bounds(lower, upper)

    def took(at: float, bound: float) -> float:
        return (
            max((abs(bound - x) for x in whole.at(at) if math.isfinite(x)), default=0.0) if math.isfinite(at) else 0.0
        )

    return _Bounds(lower, upper, since + took(since, first), until - took(until, last))


# -- all of them -------------------------------------------------------------------------------------

Gathered = dict[tuple[str, str], list[tuple[Pair, float, bool]]]
"""Between two clocks, `here` and `there`: what was exchanged, a bound on `here - there`, whether it is an upper one."""


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
    gathered = _gather(known, clock, late_s)
    found = Clocks(clock, not_shared=not_shared, pairs=sum(clock[p.cause] != clock[p.effect] for p in known))
    # By here's own time first: that is enough to find out who was set, and roughly how far all are apart.
    edges = {
        names: _split(sorted((p.effect_at if up else p.cause_at, b, up) for p, b, up in rows))
        for names, rows in gathered.items()
    }
    blamed = _blame(edges)
    wanted = {clock[p]: i for i, p in reversed(list(enumerate(prefer))) if p in clock}
    ranked = sorted(
        dict.fromkeys(clock.values()),
        key=lambda c: (blamed[c], wanted.get(c, len(wanted)), -sum(c in names for names in edges), c),
    )
    for name in ranked:
        if name not in found._group:
            rough = _reach(name, edges)
            for member in rough:
                found._group[member] = len(found.groups)
            found.groups.append(list(rough))
            _solve(found, rough, gathered, blamed)
    return found


def _share(pairs: Sequence[Pair], hosts: Mapping[str, str], late_s: float) -> tuple[dict[str, str], list[str]]:
    """Give processes of one host one clock, unless their exchanges contradict it."""
    first: dict[str, str] = {}
    clock = {p: first.setdefault(host, p) if host else p for p, host in hosts.items()}
    inside: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pair in pairs:
        if clock[pair.cause] == clock[pair.effect]:
            inside[pair.cause, pair.effect].append(pair.effect_at - pair.cause_at + late_s)
    bad: dict[str, None] = {}
    for (one, _), gaps in inside.items():
        if sorted(gaps)[_doubted(len(gaps), len(gaps))] < -STEP_S:  # lines of a host that is busy may be late by less
            bad[hosts[one]] = None
    return {p: p if hosts[p] in bad else c for p, c in clock.items()}, list(bad)


def _gather(pairs: Sequence[Pair], clock: Mapping[str, str], late_s: float) -> Gathered:
    found: Gathered = defaultdict(list)
    for pair in pairs:
        cause, effect = clock[pair.cause], clock[pair.effect]
        gap = pair.effect_at - pair.cause_at + late_s
        if effect < cause:
            found[effect, cause].append((pair, gap, True))
        elif cause < effect:
            found[cause, effect].append((pair, -gap, False))
    for names, rows in found.items():
        if len(rows) > MOST:
            found[names] = [*_tightest([x for x in rows if x[2]]), *_tightest([x for x in rows if not x[2]])]
    # Of two clocks that only one direction is known of nothing can be said.
    return {names: rows for names, rows in found.items() if len({up for _, _, up in rows}) == 2}


def _tightest(rows: list[tuple[Pair, float, bool]]) -> Iterator[tuple[Pair, float, bool]]:
    """Keep the tightest bounds of one kind in every stretch of time, but for the few that are not believed."""
    rows.sort(key=lambda row: row[0].cause_at)
    size = -(-len(rows) // STRETCHES)
    for i in range(0, len(rows), max(size, KEPT)):
        stretch = sorted(rows[i : i + max(size, KEPT)], key=lambda row: row[1] if row[2] else -row[1])
        doubted = len(stretch) // DOUBTED
        yield from stretch[doubted : doubted + KEPT]


def _blame(edges: Mapping[tuple[str, str], _Edge]) -> Counter[str]:
    """Count against how many others each clock was stepped: who was set shows against everybody."""
    blamed: Counter[str] = Counter()
    for names, edge in edges.items():
        blamed.update(dict.fromkeys(names, len(edge.runs) > 1))
    return blamed


def _reach(reference: str, edges: Mapping[tuple[str, str], _Edge]) -> dict[str, float]:
    """Return whose clocks can be compared with the reference's, nearest first, and roughly how far ahead they are."""
    near: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for (here, there), edge in edges.items():
        last = edge.runs[-1]
        ahead = edge.middle(-1, float(np.median(np.concatenate([last.lower[:, 0], last.upper[:, 0]]))))
        near[there].append((here, ahead))
        near[here].append((there, -ahead))
    rough, queue = {reference: 0.0}, [reference]
    for name in queue:
        for other, ahead in near[name]:
            if other not in rough:
                rough[other] = rough[name] + ahead
                queue.append(other)
    return rough


def _solve(found: Clocks, rough: Mapping[str, float], gathered: Gathered, blamed: Mapping[str, int]) -> None:
    """Compute a group's offsets: the tightest way from and to the reference, at every knot."""
    names = list(rough)
    index = {name: i for i, name in enumerate(names)}
    if len(names) == 1:
        return
    edges: dict[tuple[str, str], _Edge] = {}
    moments: set[float] = set()
    marks: set[float] = set()
    for (here, there), rows in gathered.items():
        if here not in rough:
            continue
        # By the time of whichever of the two was not set, or is the nearer to the reference.
        by = min((here, there), key=lambda c: (blamed.get(c, 0), index[c]))
        edge = _split(sorted((_when(p, by, found.clock) - rough[by], b, up) for p, b, up in rows))
        edges[here, there] = edge
        found.doubted += edge.doubted
        moments.update(t for run in edge.runs for x in (run.lower, run.upper) if len(x) for t in x[[0, -1], 0].tolist())
        for i, (before, after) in enumerate(itertools.pairwise(edge.runs)):
            marks.update((before.until, after.since))
            by_s = edge.middle(i + 1, after.since) - edge.middle(i, before.until)
            if abs(by_s) >= STEP_S:
                found.steps.append(Step((here, there), before.until, after.since, by_s))
    ends = min(moments), max(moments)
    some = sorted(moments)[:: max(len(moments) // KNOTS, 1)]
    knots = np.array(sorted({*np.linspace(*ends, KNOTS).tolist(), *some, *marks}))
    bounds = {pair: np.array([edge.at(t) for t in knots.tolist()]) for pair, edge in edges.items()}
    # ways[a, b] is the most that b may be ahead of a.
    ways: dict[tuple[int, int], Floats] = {}
    for (here, there), between in bounds.items():
        ways[index[there], index[here]] = between[:, 1]
        ways[index[here], index[there]] = -between[:, 0]
    loose = np.zeros(len(knots))
    while True:
        high = _shortest(ways, len(names), loose)
        low = _shortest({(b, a): way for (a, b), way in ways.items()}, len(names), loose)
        wrong = ~np.all(high + low >= -1e-9, axis=1)
        if not np.any(wrong):
            break
        loose = np.where(wrong, np.maximum(2 * loose, LATE_S), loose)
    found.widened_s = max(found.widened_s, float(loose.max()))
    # Whichever was wrong of those that contradict each other was wrong by all of it.
    high, low = high + len(names) * loose[:, None], low + len(names) * loose[:, None]
    for name, i in index.items():
        if not i:
            continue
        known = np.isfinite(high[:, i]) & np.isfinite(low[:, i])
        if np.any(known):
            found._course[name] = _Course(knots[known], -low[known, i], high[known, i])
        else:
            everywhere = np.array([rough[name]])
            found._course[name] = _Course(knots[:1], everywhere - math.inf, everywhere + math.inf)


def _when(pair: Pair, name: str, clock: Mapping[str, str]) -> float:
    return pair.cause_at if clock[pair.cause] == name else pair.effect_at


def _shortest(ways: Mapping[tuple[int, int], Floats], number: int, loose: Floats) -> Floats:
    """Bellman and Ford, at all knots at once: how far is everybody from the first?"""
    far = np.full((len(loose), number), np.inf)
    far[:, 0] = 0.0
    for _ in range(number):
        before = far.copy()
        for (one, other), way in ways.items():
            np.minimum(far[:, other], far[:, one] + way + loose, out=far[:, other])
        if np.array_equal(before, far):
            break
    else:
        far[np.any(before != far, axis=1)] = -np.inf  # it goes round in a circle, and gets less each time
    return far
