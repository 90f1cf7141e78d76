"""One time axis for all processes: how far their clocks are apart, and what time it was by the reference's clock.

Processes of one host have one clock. How far the clocks of two hosts are apart follows from exchanges: a cause in one
process and its effect in another, of which the protocol says that one came first. Examples are a hello and its answer,
a grant and the end of the pull that needed it, an outcome and the end of the lease.

    the effect's clock - the cause's clock  <=  effect (by its clock) - cause (by its clock)

Exchanges in both directions give an interval. Where they contradict each other, the interval is between both, and the
contradiction is told. Clocks that no exchange connects have an axis of their own.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from asynckv import told
from asynckv.core.notes import Note
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.join import LoggedLease, LoggedPull, Process, Service, history, note_of, start_of

CLOCKS_S = 10.0  # most seconds between the clocks of two hosts, if nothing else is known of them
LATE_S = 0.001  # most seconds between an event and its line, usually
TOLD_S = 0.5  # least contradiction that is reported, because lines of a busy process look like smaller ones
MAX_TIME = 1e11  # seconds since 1970: some thousand years
DAY_S = 86_400
MAX_STEPS = 2048  # most entries of one history; the engine keeps fewer


class Step(NamedTuple):
    """One entry of a pull's or lease's life, by its process's clock."""

    at: float
    what: str | Note


class Pair(NamedTuple):
    """A cause in one process and its effect in another, each by its own clock."""

    cause: Process
    cause_at: float
    effect: Process
    effect_at: float


class Offset(NamedTuple):
    """Seconds by which a clock is ahead of its group's reference."""

    seconds: float  # subtract it to come to the reference's time
    within_s: float  # how much more or less it may be
    group: int = 0  # which clocks can be compared: those with one reference


def is_time(at: float) -> bool:
    """Return True for a plausible moment, and False for sums of nonsense in a log."""
    return abs(at) < MAX_TIME


def steps_of(lived: LoggedLease | LoggedPull) -> list[Step]:
    """Return a life by the wall clock; its history and transitions have seconds since a beginning.

    The earliest beginning counts, because every line with a beginning was written a little late.
    """
    ended, transitions = lived.ended, lived.transitions
    past = list(itertools.islice(history(ended), MAX_STEPS))
    told = [(x.number("at_s"), note_of(x.fields.get("to")) or "") for x in transitions[:MAX_STEPS]]
    begun = [record.at - at for record, (at, _) in zip(transitions, told, strict=False)]
    begun += [lived.lent_at] if isinstance(lived, LoggedLease) else []
    if ended is not None and not transitions and past:
        begun.append(ended.at - past[-1][0])
    began = min(filter(is_time, begun), default=math.nan)
    # Lines at level debug go on after the end of a life; the history does not.
    entries = sorted(told, key=lambda x: x[0]) if len(told) >= len(past) else past
    return [Step(began + at, what) for at, what in entries if is_time(began + at)]


def exchanges(service: Service) -> Iterator[Pair]:
    """Yield causes in one process with an effect in another."""
    for process in service.processes.values():
        yield from _handshakes(service, process)
    for request in service.requests:
        complete = [x for x in request.all_pulls if x.cause == "complete"]
        pulls = grouped((start, x) for x in complete for start in dict.fromkeys(map(start_of, x.peer_ranks)))
        for lease in request.leases.values():
            if own := [x for x in pulls.get(lease.process.start, ()) if x.process is not lease.process]:
                yield from _of_lease(lease, own)


def _handshakes(service: Service, decode: Process) -> Iterator[Pair]:
    """Yield the first hello, its answer, and the welcome."""
    left: dict[str, float] = {}
    came: dict[str, float] = {}
    for record in decode.of(told.PeerChanged):
        state, peer = record.text("state"), start_of(record.text("peer"))
        if state == "connecting" and record.text("before") == "new":
            left.setdefault(peer, record.at)
        elif state == "loading":
            came.setdefault(peer, record.at)
    for peer in dict.fromkeys((*left, *came)):
        if (prefill := service.started_as(peer)) is None:
            continue
        met = next((x.at for x in prefill.of(told.ReaderMet) if start_of(x.text("reader")) == decode.start), None)
        if met is not None and peer in left:
            yield Pair(decode, left[peer], prefill, met)
        # A log that begins later may lack the first welcome.
        if met is not None and peer in came and prefill.started is not None:
            yield Pair(prefill, met, decode, came[peer])


def _of_lease(lease: LoggedLease, pulls: Iterable[LoggedPull]) -> Iterator[Pair]:
    """Yield grants before the completion of their pulls, and outcomes before the ends of their leases."""
    granted = {x.text("pull_id"): x.at for x in reversed(lease.granted)}
    claimed = {x.pull_id: lease.lent_at + x.claimed_s for x in lease.claims.values() if not math.isnan(x.claimed_s)}
    released_by = set(map(start_of, lease.released))
    for pull, ended in ((x, x.ended) for x in pulls if x.ended is not None):
        at = granted.get(pull.pull_id, claimed.get(pull.pull_id, lease.lent_at))
        if lease.process.rank in ended.texts("read_ranks") and is_time(at):
            yield Pair(lease.process, at, pull.process, ended.at)
        if lease.ended is not None and pull.process.start in released_by:
            yield Pair(pull.process, ended.at, lease.process, lease.ended.at)


class Axis:
    """All times of a service, by one clock of each group; the service's own exchanges count if none are given."""

    def __init__(self, service: Service, pairs: Iterable[Pair] | None = None) -> None:
        self.service = service
        self.references: list[Process] = []  # the process with the reference clock of each group
        self.conflicts: list[tuple[str, str, float]] = []  # two clocks with contradicting exchanges; seconds
        self._offsets: dict[str, Offset] = {}
        ahead: dict[str, dict[str, float]] = defaultdict(dict)  # how far the second clock is ahead of the first at most
        for pair in exchanges(service) if pairs is None else pairs:
            found, effect = ahead[pair.cause.clock], pair.effect.clock
            found[effect] = min(pair.effect_at - pair.cause_at, found.get(effect, math.inf))
        for one, other in ((x, y) for x in list(ahead) for y in ahead[x] if x <= y):
            gap = -ahead[one][other] - (ahead[other].get(one, math.inf) if one != other else 0.0)
            if gap >= TOLD_S:
                self.conflicts.append((one, other, gap))
        times = [x for process in service.processes.values() for x in (process.first_at, process.last_at) if is_time(x)]
        self._is_dated = len({math.floor(x / DAY_S) for x in times}) > 1
        for process in sorted(service.processes.values(), key=lambda x: (not x.lends, -x.num_records, x.rank)):
            if process.clock not in self._offsets:
                self._reach(process, ahead)

    def _reach(self, reference: Process, ahead: dict[str, dict[str, float]]) -> None:
        """Align the clocks that can be compared with a reference, the nearest first."""
        reached = [reference.clock]
        self._offsets[reached[0]] = Offset(0.0, 0.0, len(self.references))
        for near in reached:
            before = self._offsets[near]
            for far, most in sorted(ahead[near].items()):
                # If only one direction is known, two clocks cannot be compared.
                if far not in self._offsets and near in ahead[far]:
                    least = -ahead[far][near]
                    within_s = before.within_s + abs(most - least) / 2 + LATE_S
                    self._offsets[far] = Offset(before.seconds + (least + most) / 2, within_s, before.group)
                    reached.append(far)
        self.references.append(reference)

    def offset(self, process: Process) -> Offset:
        """Return the seconds by which a process's clock is ahead, with the uncertainty."""
        return self._offsets[process.clock]

    def at(self, process: Process, at: float) -> float:
        """Return the axis's time for a moment of a process's clock."""
        return at - self.offset(process).seconds

    def group(self, process: Process) -> int:
        return self.offset(process).group

    def when(self, process: Process, at: float) -> tuple[float, float]:
        """Return the interval of an event on the first group's axis.

        For a process without exchanges with that group, the clocks are taken to differ by at most `CLOCKS_S`, because
        clocks are seldom further apart.
        """
        seconds, within_s, group = self.offset(process)
        seconds, within_s = (seconds, min(within_s, CLOCKS_S)) if group == 0 else (0.0, CLOCKS_S)
        return at - seconds - within_s, at - seconds + within_s

    def moment(self, at: float) -> str:
        """Write a time, with its date if the logs are not all of one day."""
        return clock_time(at)[0 if self._is_dated else 11 : 23] if 0 < at < MAX_TIME else "?"

    def compared(self, process: Process) -> str:
        reference = self.references[self.group(process)]
        if process.clock == reference.clock:
            return "by its own clock, which is the axis's" if process is reference else "by the same clock (one host)"
        return f"clock {shown_offset(self.offset(process))} against {reference.rank}"

    def notes(self) -> list[str]:
        """Describe contradictions between clocks."""
        named = {x.clock: x.host or x.rank for x in self.service.processes.values()}
        out = [
            f"exchanges of {named[one]} and {named[other]} contradict each other by up to {shown_seconds(seconds)}: a "
            f"clock was set or drifts, lines were written late, or two machines have one name"
            for one, other, seconds in self.conflicts
        ]
        out += [
            f"the clock of {process.rank} was set: it went back by {shown_seconds(x.seconds)} at {clock_time(x.at)}; "
            f"its times go on from there as if it had not been"
            for process in self.service.processes.values()
            for x in process.put_back
        ]
        if (groups := len(self.references)) > 1:
            out.append(
                f"{groups} groups of processes never answered each other in these logs: each goes by a clock of its "
                f"own, and times of two groups cannot be compared"
            )
        return out


def shown_offset(offset: Offset) -> str:
    scale, unit = (1.0, "s") if max(abs(offset.seconds), offset.within_s) >= 10 else (1e3, "ms")
    digits = max(0, min(6, 1 - math.floor(math.log10(offset.within_s * scale)))) if offset.within_s else 3
    return f"{offset.seconds * scale:+.{digits}f} {unit} ± {offset.within_s * scale:.{digits}f} {unit}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def clock_time(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="microseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"{at:.6f}"


def shown_seconds(seconds: float) -> str:
    """Write a duration with three digits that matter."""
    if not math.isfinite(seconds):
        return "?"
    seconds = float(f"{seconds:.3g}")
    size = abs(seconds)
    for least, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if size >= least:
            value = seconds * scale
            return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"
