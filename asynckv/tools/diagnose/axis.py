"""One time axis for all processes: which exchanges the logs tell of, and what time it was by the reference's clock.

An exchange is a cause and its effect, of which the protocol says that one came first: a hello and its answer, a grant
and the end of the pull that needed it, an outcome and the end of the lease. When something began is worked out from
when it ended and how long it took, because what counts seconds within a process is no wall clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from asynckv.core import told
from asynckv.core.notes import Granted, Note
from asynckv.tools.diagnose.clocks import DRIFT, Clocks, Offset, Pair, align
from asynckv.tools.diagnose.join import Lease, Process, Pull, Service, history, note_of, start_of
from asynckv.tools.diagnose.records import Record, number

CLOCKS_S = 10.0
"""How far the clocks of two hosts may be apart where nothing else is known of them."""
MAX_TIME = 1e11
"""Seconds since 1970: some thousand years."""
MAX_STEPS = 2048
"""Of one history; the engine keeps fewer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a pull's or lease's life, by its process's clock.

    Attributes:
        within_s: How much earlier or later it may have been: it was worked out over so many seconds, and what counts
            them need not run as the wall clock does.
    """

    at: float
    what: str | Note
    within_s: float = 0.0


When = Callable[[str, float], tuple[float, float]]
"""Between which moments of one time for all something happened: the start of a process, and a time by its clock."""


def is_time(at: float) -> bool:
    """Tell moments from what nonsense in a log adds up to."""
    return abs(at) < MAX_TIME


Entry = tuple[float, str | Note]
Told = tuple[float, float]
"""A line's time, and how many seconds after something it says that it was written."""


def _worked_out(lines: Iterable[Told], what: str | Note = "") -> Step:
    """Return when something was; every line that knows was written a little late, so the earliest is right."""
    found = [(at - after, DRIFT * abs(after)) for at, after in lines if is_time(at - after)]
    at, within = min(found, key=lambda x: x[0] + x[1], default=(math.nan, 0.0))
    return Step(at, what, within)


def _history(record: Record | None) -> list[Entry]:
    told = itertools.islice(history(record), MAX_STEPS) if record is not None else ()
    return [(at, what) for at, what in told if math.isfinite(at)]


def _transitions(records: Sequence[Record]) -> list[Entry]:
    told = [(x.number("at_s"), note_of(x.text("to"))) for x in records[:MAX_STEPS]]
    return sorted(((at, what) for at, what in told if math.isfinite(at)), key=lambda x: x[0])


def _steps(told: Sequence[Entry], lines: Sequence[Told]) -> list[Step]:
    """Put what is told, in seconds since the first, on the wall clock; lines say how long after the first they were."""
    if not lines:
        return []
    # Of many lines those about the same moment, and the one that says earliest when it began, are enough.
    best = min(lines, key=lambda x: x[0] - x[1] + DRIFT * abs(x[1]))
    near: dict[float, float] = {}
    for at, after in lines:
        near[after] = min(at, near.get(after, math.inf))
    return [_worked_out([(best[0], best[1] - at), (near.get(at, math.nan), 0.0)], what) for at, what in told]


def pull_steps(pull: Pull) -> list[Step]:
    """Return a pull's life, as far as it is told step by step."""
    told, lived = _transitions(pull.transitions), _history(pull.ended)
    lines = [(x.at, x.number("at_s")) for x in pull.transitions[:MAX_STEPS] if math.isfinite(x.number("at_s"))]
    if pull.ended is not None and lived:
        # Its end is logged at once, so the last entry is of then.
        lines.append((pull.ended.at, lived[-1][0]))
    # At level debug it is told on after its end, which the history there is not.
    return _steps(told if len(told) >= len(lived) else lived, lines)


def lease_steps(lease: Lease) -> list[Step]:
    """Return a lease's life, as far as it is told step by step."""
    told, lived = _transitions(lease.transitions), _history(lease.ended)
    lines = [(x.at, x.number("at_s")) for x in lease.transitions[:MAX_STEPS] if math.isfinite(x.number("at_s"))]
    return _steps(told if len(told) >= len(lived) else lived, [*lines, *_lines(lease)])


def _lines(lease: Lease) -> list[Told]:
    """Return all lines that say how long it had been lent."""
    found = [(x.at, x.number("seconds")) for x in (lease.ended,) if x is not None]
    found += [(lease.lent.at, 0.0)] if lease.lent is not None else []
    found += [(x.at, x.number("after_s")) for x in lease.granted]
    found += [(record.at, number(entry.get("lent_s"))) for record, entry in lease.held]
    return [(at, after) for at, after in found if math.isfinite(after)]


def lent_at(lease: Lease) -> float:
    """Return when it was lent, by its process's clock."""
    at = _worked_out(_lines(lease)).at
    return at if is_time(at) else lease.lent_at if is_time(lease.lent_at) else math.nan


def granted_in(steps: Iterable[Step]) -> Iterator[tuple[str, str, float]]:
    """Go through the promises in a lease's life: which pull, whose, and when it got the first."""
    seen: set[str] = set()
    for step in steps:
        if isinstance(note := step.what, Granted) and note.pull_id not in seen:
            seen.add(note.pull_id)
            yield note.pull_id, note.reader, step.at


def exchanges(service: Service) -> Iterator[Pair]:
    """Go through causes in one process that had an effect in another; processes by their incarnation."""
    for process in service.processes.values():
        yield from _handshakes(service, process)
    for request in service.requests:
        pulls: dict[str, list[Pull]] = {}
        for pull in request.all_pulls:
            for start in {start_of(x) for x in pull.peer_ranks}:
                pulls.setdefault(start, []).append(pull)
        for lease in request.leases.values():
            own = [x for x in pulls.get(lease.process.start, ()) if x.process is not lease.process]
            if complete := [x for x in own if x.cause == "complete"]:
                yield from _of_lease(lease, complete)


def _handshakes(service: Service, decode: Process) -> Iterator[Pair]:
    """A hello leaves, it is answered, and the welcome comes: the first of each."""
    left: dict[str, float] = {}
    came: dict[str, float] = {}
    for record in decode.of(told.PeerChanged):
        state, peer = record.text("state"), start_of(record.text("peer"))
        if state == "connecting" and record.text("before") == "new":
            left.setdefault(peer, record.at)
        elif state == "loading":
            came.setdefault(peer, record.at)
    for peer in {*left, *came}:
        prefill = service.process_named(f"x/tp0@{peer}") if peer else None
        if prefill is None:
            continue
        met = next((x.at for x in prefill.of(told.ReaderMet) if start_of(x.text("reader")) == decode.start), None)
        if met is not None and peer in left:
            yield Pair(decode.incarnation, left[peer], prefill.incarnation, met)
        # Of a log that begins later the first welcome may be missing.
        if met is not None and peer in came and prefill.started is not None:
            yield Pair(prefill.incarnation, met, decode.incarnation, came[peer])


def _of_lease(lease: Lease, pulls: Iterable[Pull]) -> Iterator[Pair]:
    """A request was granted to a pull before that was complete, and the outcome was told before the lease was over."""
    prefill, granted = lease.process.incarnation, {x.text("pull_id"): x.at for x in reversed(lease.granted)}
    claimed = {x.pull_id: lease.lent_at + x.claimed_s for x in lease.claims.values() if not math.isnan(x.claimed_s)}
    released_by = set(map(start_of, lease.released))
    for pull in pulls:
        decode, ended = pull.process.incarnation, pull.ended
        if ended is None:
            continue
        at = granted.get(pull.pull_id, claimed.get(pull.pull_id, lease.lent_at))
        if lease.process.rank in ended.texts("read_ranks") and is_time(at):
            yield Pair(prefill, at, decode, ended.at)
        if lease.ended is not None and pull.process.start in released_by:
            yield Pair(decode, ended.at, prefill, lease.ended.at)


class Axis:
    """All times of a service, by one clock of each group.

    Attributes:
        references: The process whose clock each group goes by.
    """

    def __init__(self, service: Service, clocks: Clocks) -> None:
        self.service, self.clocks = service, clocks
        self.references = [service.processes[group[0]] for group in clocks.groups]

    def at(self, process: Process, at: float) -> float:
        """Return the axis's time for a moment of a process's clock."""
        return self.clocks.align(process.incarnation, at)

    def offset(self, process: Process, at: float) -> Offset:
        """Return how far its clock is ahead, and how sure that is."""
        return self.clocks.offset(process.incarnation, at)

    def group(self, process: Process) -> int:
        """Return which axis it is on."""
        return self.clocks.group(process.incarnation)

    def when(self, incarnation: str, at: float) -> tuple[float, float]:
        """Return between which moments of the first group's axis something happened.

        Of a process that exchanged nothing with that group it is only known that clocks are seldom more than
        `CLOCKS_S` apart.
        """
        if self.clocks.group(incarnation):
            return at - CLOCKS_S, at + CLOCKS_S
        offset = self.clocks.offset(incarnation, at)
        within_s = min(offset.within_s, CLOCKS_S)
        return at - offset.seconds - within_s, at - offset.seconds + within_s

    def compared(self, process: Process, at: float) -> str:
        """Say how a process's clock was aligned."""
        reference = self.references[self.group(process)]
        if self.clocks.clock[process.incarnation] == reference.incarnation:
            return "by its own clock, which is the axis's" if process is reference else "by the same clock (one host)"
        return f"clock {shown_offset(self.offset(process, at))} against {reference.rank}"

    def notes(self) -> list[str]:
        """Say what must be known about the clocks."""
        name = {x.incarnation: x.rank for x in self.service.processes.values()}
        out = [
            f"exchanges between {name[x.names[0]]} and {name[x.names[1]]} contradict each other by up to "
            f"{shown_seconds(x.seconds)}, from {clock_time(x.since)} to {clock_time(x.until)}: a clock was set, or "
            f"lines were written late; the uncertainty includes it"
            for x in self.clocks.conflicts
        ]
        out += [
            f"processes of {host!r} say that they share a host, and what they exchanged says that they do not"
            for host in self.clocks.not_shared
        ]
        out += [
            f"the clock of {name[process]} was set: it went back by {shown_seconds(x.seconds)} at {clock_time(x.at)}; "
            f"its times go on from there as if it had not been"
            for process, found in self.service.put_back.items()
            for x in found
        ]
        if (groups := len(self.clocks.groups)) > 1:
            out.append(
                f"{groups} groups of processes never answered each other in these logs: each goes by a clock of its "
                f"own, and times of two groups cannot be compared"
            )
        return out


def shown_offset(offset: Offset) -> str:
    """Write an offset with its uncertainty."""
    scale, unit = (1.0, "s") if max(abs(offset.seconds), offset.within_s) >= 10 else (1e3, "ms")
    digits = max(0, min(6, 1 - math.floor(math.log10(offset.within_s * scale)))) if offset.within_s else 3
    return f"{offset.seconds * scale:+.{digits}f} {unit} ± {offset.within_s * scale:.{digits}f} {unit}"


def counted(number: int, what: str) -> str:
    """Write how many there are of something."""
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("s") else "s")


def clock_time(at: float) -> str:
    """Write a moment of the axis."""
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


def make_axis(service: Service) -> Axis:
    """Align the clocks of a service's processes."""
    processes = service.processes
    prefer = sorted(processes.values(), key=lambda x: (not x.lends, -x.num_records, x.rank))
    hosts = {x.incarnation: x.host for x in processes.values()}
    return Axis(service, align(exchanges(service), hosts, [x.incarnation for x in prefer]))
