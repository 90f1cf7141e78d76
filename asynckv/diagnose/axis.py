"""One time axis for all processes: which exchanges the logs tell of, and what time it was by the reference's clock.

A cause and its effect are two moments of two processes of which the protocol says that one came first:

- a hello leaves (`peer_changed`, connecting), it is answered (`reader_met`), and the welcome comes (`peer_changed`,
  loading);
- a grant is given (`lease_granted`) before the pull that needed it is complete (`pull_ended`);
- an outcome is told (`pull_ended`) before its release ends the lease (`lease_ended`);
- at level debug, and of what was slow or failed, every step is told: the first claim leaves after a pull has begun, an
  answer comes after the grant that it tells of, a release is taken after it was sent and before its acknowledgement.

When a request began is worked out from when it ended and how long it took, for what counts seconds within a process is
no wall clock. Of several lines that say when something began the earliest is right: the others were written late.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from asynckv.diagnose.clocks import Clocks, Offset, Pair, align
from asynckv.diagnose.join import Lease, Process, Pull, Request, Service, start_of
from asynckv.diagnose.records import Record, number
from asynckv.observe.events import EVENT

__all__ = ["Axis", "Step", "exchanges", "lease_steps", "make_axis", "pull_steps"]

_GRANTED = re.compile(r"granted to (?P<name>.+), pull (?P<pull>[^ ,]+)\Z", re.DOTALL)
_RELEASED = re.compile(r"released by (?P<name>.+), pull (?P<pull>[^ ,]+): (?P<outcome>[a-z]+)\Z", re.DOTALL)
_ANSWERED = re.compile(r"(?P<name>.+) granted [0-9.e+-]+ s\Z", re.DOTALL)
_SETTLED = re.compile(r"release (?P<name>.+): acknowledged\Z", re.DOTALL)
MAX_STEPS = 2048
"""Of one history; the engine keeps fewer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a pull's or lease's life, by its process's clock."""

    at: float
    text: str


def _history(record: Record | None) -> list[tuple[float, str]]:
    value = record.fields.get("history") if record is not None else None
    found = []
    for entry in value[:MAX_STEPS] if isinstance(value, list) else ():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str):
            if math.isfinite(at := number(entry[0])):
                found.append((at, entry[1]))
    return found


def _steps(told: list[tuple[float, str]], origins: list[float]) -> list[Step]:
    known = [x for x in origins if math.isfinite(x)]
    return [Step(min(known) + at, text) for at, text in told] if known else []


def _transitions(records: list[Record]) -> tuple[list[tuple[float, str]], list[float]]:
    told = [(x.number("at_s"), x.text("to")) for x in records[:MAX_STEPS]]
    known = [(at, text) for at, text in told if math.isfinite(at)]
    return sorted(known, key=lambda x: x[0]), [x.at - x.number("at_s") for x in records[:MAX_STEPS]]


def pull_steps(pull: Pull) -> list[Step]:
    """Return a pull's life, as far as it is told step by step."""
    told, origins = _transitions(pull.transitions)
    history = _history(pull.ended)
    if pull.ended is not None and history:
        # Its end is logged at once, so the last entry is of then.
        origins.append(pull.ended.at - history[-1][0])
    # At level debug everything is told, and before the end is logged it may not be: it goes on after its outcome.
    return _steps(told if len(told) >= len(history) else history, origins)


def lease_steps(lease: Lease) -> list[Step]:
    """Return a lease's life, as far as it is told step by step."""
    told, origins = _transitions(lease.transitions)
    history = _history(lease.ended)
    return _steps(told if len(told) >= len(history) else history, [*origins, *_lent(lease)])


def _lent(lease: Lease) -> list[float]:
    """Return all that is said about when it was lent."""
    found = [lease.ended.at - lease.ended.number("seconds")] if lease.ended is not None else []
    found += [lease.lent.at] if lease.lent is not None else []
    found += [x.at - x.number("after_s") for x in lease.granted]
    found += [record.at - number(entry.get("lent_s")) for record, entry in lease.held]
    return [x for x in found if math.isfinite(x)]


def lent_at(lease: Lease) -> float:
    """Return when it was lent, by its process's clock."""
    return min(_lent(lease), default=lease.lent_at)


def exchanges(service: Service) -> Iterator[Pair]:
    """Go through all causes in one process that had an effect in another; processes by their incarnation."""
    met: set[tuple[str, str]] = set()
    for process in service.processes.values():
        yield from _handshakes(service, process, met)
    for request in service.requests:
        yield from _of_request(service, request)


def _handshakes(service: Service, decode: Process, met: set[tuple[str, str]]) -> Iterator[Pair]:
    left: dict[str, float] = {}
    came: dict[str, float] = {}
    for record in decode.of(EVENT.PEER_CHANGED):
        state, peer = record.text("state"), start_of(record.text("peer"))
        if state == "connecting" and record.text("before") == "new":
            left.setdefault(peer, record.at)
        elif state == "loading":
            came.setdefault(peer, record.at)
    for peer in {*left, *came}:
        prefill = service.process_named(f"x/tp0@{peer}") if peer else None
        if prefill is None:
            continue
        welcomed = [x.at for x in prefill.of(EVENT.READER_MET) if start_of(x.text("reader")) == decode.start]
        if welcomed and peer in left:
            yield Pair(decode.incarnation, left[peer], prefill.incarnation, welcomed[0], "a hello")
        # Of a log that begins later the first welcome may be missing.
        if welcomed and peer in came and prefill.started is not None:
            yield Pair(prefill.incarnation, welcomed[0], decode.incarnation, came[peer], "a welcome")
        met.add((decode.incarnation, prefill.incarnation))


def _of_request(service: Service, request: Request) -> Iterator[Pair]:
    pulls = {pull.pull_id: pull for pull in request.all_pulls}
    for lease in request.leases.values():
        prefill = lease.process.incarnation
        granted: dict[str, float] = {}
        lent = lent_at(lease)
        for record in lease.granted:
            after = record.number("after_s")
            granted[record.text("pull_id")] = min(record.at, lent + after) if math.isfinite(lent + after) else record.at
        steps = lease_steps(lease)
        released: dict[str, float] = {}
        for step in steps:
            if found := _GRANTED.match(step.text):
                granted[found["pull"]] = min(granted.get(found["pull"], math.inf), step.at)
            elif found := _RELEASED.match(step.text):
                released.setdefault(found["pull"], step.at)
        for pull in pulls.values():
            if pull.process.incarnation != prefill and lease.process.start in {start_of(x) for x in pull.peer_ranks}:
                at = granted.get(pull.pull_id, math.nan)
                yield from _of_pull(lease, pull, lent, at, released.get(pull.pull_id, math.nan))


def _of_pull(lease: Lease, pull: Pull, lent: float, granted: float, released: float) -> Iterator[Pair]:
    """Go through what one reader and one owner said to each other about a request."""
    prefill, decode, ended = lease.process.incarnation, pull.process.incarnation, pull.ended
    steps = pull_steps(pull)
    told = {step.text: step.at for step in reversed(steps)}
    if math.isfinite(granted) and steps:
        yield Pair(decode, steps[0].at, prefill, granted, "a claim")
    answers = [s.at for s in steps if (m := _ANSWERED.match(s.text)) and start_of(m["name"]) == lease.process.start]
    if answers and math.isfinite(granted):
        yield Pair(prefill, granted, decode, answers[0], "a grant")
    elif ended is not None and pull.cause == "complete" and lease.process.rank in ended.texts("read_ranks"):
        if math.isfinite(at := granted if math.isfinite(granted) else lent):
            yield Pair(prefill, at, decode, ended.at, "a grant, and the end of its pull")
    outcome = told.get("notifying", ended.at if ended is not None else math.nan)
    if not math.isfinite(outcome):
        return
    if math.isfinite(released):
        yield Pair(decode, outcome, prefill, released, "a release")
        done = [s.at for s in steps if (m := _SETTLED.match(s.text)) and start_of(m["name"]) == lease.process.start]
        if done:
            yield Pair(prefill, released, decode, done[0], "its acknowledgement")
    elif (
        pull.cause == "complete"
        and lease.ended is not None
        and lease.ended.text("cause") == "released"
        and any(start_of(name) == pull.process.start for name in lease.released)
    ):
        yield Pair(decode, outcome, prefill, lease.ended.at, "a release, and the end of its lease")


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

    def compared(self, process: Process, at: float) -> str:
        """Say how a process's clock was aligned."""
        reference = self.references[self.group(process)]
        if self.clocks.clock[process.incarnation] == reference.incarnation:
            return "by its own clock, which is the axis's" if process is reference else "by the same clock (one host)"
        offset = self.offset(process, at)
        if not math.isfinite(offset.within_s):
            return f"not comparable with {reference.rank} at that time"
        return f"clock {shown_offset(offset)} against {reference.rank}"

    def notes(self) -> list[str]:
        """Say what must be known about the clocks."""
        name = {x.incarnation: x.rank for x in self.service.processes.values()}
        out = []
        for step in self.clocks.steps:
            one, other = (name[x] for x in step.names)
            out.append(
                f"the clock of {one} was put {'forward' if step.seconds > 0 else 'back'} by "
                f"{shown_seconds(abs(step.seconds))} against that of {other}, or that one's the other way"
            )
        out += [
            f"processes of {host!r} say that they share a host, and what they exchanged says that they do not"
            for host in self.clocks.not_shared
        ]
        if self.clocks.widened_s:
            by = shown_seconds(self.clocks.widened_s)
            out.append(f"exchanges contradict each other by {by}; the uncertainty includes it")
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


def shown_seconds(seconds: float) -> str:
    """Write a duration with three digits that matter."""
    size = abs(seconds)
    for least, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if size >= least:
            value = seconds * scale
            return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def make_axis(service: Service) -> Axis:
    """Align the clocks of a service's processes."""
    processes = service.processes
    prefer = sorted(processes.values(), key=lambda x: (not x.lends, -x.num_records, x.rank))
    hosts = {x.incarnation: x.host for x in processes.values()}
    return Axis(service, align(exchanges(service), hosts, [x.incarnation for x in prefer]))
