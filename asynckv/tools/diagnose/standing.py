"""Open warnings, and parts of a service that could not be judged: what denies that all is well.

A log shows what has ended badly, because such lines are never left out. So a service is well if no warning is open, and
if the log of each rank that is named reaches to the end. Where a log does not reach to the moment at which its engine
answered, the engine's own counts of bad ends say whether the log lacks one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from asynckv import told
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.axis import clock_time, counted
from asynckv.tools.diagnose.causes import WELL
from asynckv.tools.diagnose.join import LoggedLease, LoggedPull, LoggedRequest, Process, Service, base_name, start_of
from asynckv.tools.diagnose.leaks_between import read_beside
from asynckv.tools.diagnose.leaks_values import listed
from asynckv.tools.diagnose.presence import SIGN_S, Presence
from asynckv.tools.diagnose.records import Record, integer

GOOD_COUNTS = frozenset({*WELL, "lent", "started", "released", "offered", "late"})
"""Counts of leases, pulls and follows that are no bad ends."""

LIMITED: Mapping[str, type[told.Told]] = {
    "internal_errors": told.InternalError,
    "pulls.overloaded": told.PullRefused,
    "loop.was_away": told.LoopWasAway,
}
"""Counts of events of which only some are logged, if there are many."""

LONG_AWAY_S = 10.0  # seconds from which on an absence of an event loop is wrong, even if no request was late by it

OF_PROCESSES = {*told.ENDS} - {x.event for x in (told.LeaseHeld, told.PullHeld, told.OffloadFailed)}
"""Warnings of a process about itself and its peers. The others are judged with their requests and copies."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Pulls of one rank that have waited for long when its log ends, for the same ranks."""

    reader: Process
    owners: tuple[str, ...]
    pulls: Sequence[tuple[LoggedRequest, LoggedPull]]

    @property
    def states(self) -> list[str]:
        """Progress at these ranks, as in `RankStatus`, the most frequent first."""
        return [x for x, _ in Counter(y for _, pull in self.pulls for y in _late(pull).values()).most_common()]

    @property
    def seconds(self) -> float:
        return max(pull.held[-1].number("state_s", 0.0) for _, pull in self.pulls)

    @property
    def until(self) -> float:
        return max(pull.held[-1].at for _, pull in self.pulls)

    def is_never_lent(self, presence: Presence) -> bool:
        """Return True if the owners live, and lent nothing since all of these were asked for."""
        owners = [x for x in map(presence.service.process_named, self.owners) if x is not None]
        if "not_lent" not in self.states or not owners or any(presence.fate(x).kind == "died" for x in owners):
            return False
        since = max(presence.near(self.reader, pull.begun_at) for _, pull in self.pulls)
        return not any(at > since for x in owners for at in presence.lends[x.base])


def waiting(presence: Presence, requests: Iterable[LoggedRequest]) -> list[Waiting]:
    """Find pulls of some requests with an open warning, the most frequent reason first."""
    pulls = ((request, x) for request in requests for x in request.all_pulls if _waits(presence, request, x))
    groups = grouped(((x.process, tuple(sorted(_late(x)))), (request, x)) for request, x in pulls)
    return sorted((Waiting(*key, found) for key, found in groups.items()), key=lambda x: -len(x.pulls))


def _late(pull: LoggedPull) -> dict[str, str]:
    """Return the ranks that a pull waits for, with its progress there."""
    states = {str(x): str(y) for x, y in pull.held[-1].mapping("ranks").items()}
    return {x: y for x, y in states.items() if y not in ("proven", "only_released", "released")} or states


def _waits(presence: Presence, request: LoggedRequest, pull: LoggedPull) -> bool:
    """Return True if a warning about a pull is the last word of it, on either side."""
    if not pull.is_open or (last := pull.held[-1]).level != "warning":
        return False
    is_over = any(x.at >= last.at and x.event in told.ENDS[last.event] for x in pull.records)
    # A goodbye ends all pulls, and a death is a finding of its own. A good end is no warning.
    is_told = not pull.process.says_info or presence.fate(pull.process).is_over
    readers = [set(map(start_of, x.released)) for x in request.leases.values()]
    is_released = bool(readers) and all(pull.process.start in x for x in readers)
    return pull.state != "quarantined" and not (is_over or is_told or is_released)


def open_warnings(presence: Presence) -> Iterator[tuple[Record, str]]:
    """Yield warnings of processes about themselves and their peers that nothing has ended, with their subjects."""
    for process in presence.service.processes.values():
        still: dict[tuple[str, str], Record] = {}
        for record in process.records:
            # Two starts of a peer are one, because the later one takes its place.
            subject = base_name(record.text("peer")) if record.event == told.PeerChanged.event else ""
            for key in [x for x in still if record.event in told.ENDS[x[0]] and x[1] == subject]:
                del still[key]
            if record.level == "warning" and record.event in OF_PROCESSES:
                still[record.event, subject] = record
        if process.says_info and process.stopped is None and process.successor is None:
            found = ((x, subject) for (_, subject), x in still.items())
            yield from (x for x in found if not x[1] or _is_unsettled(presence, x[0]))


def may_be_open(record: Record) -> bool:
    """Return True for a warning or error that another event has to end."""
    return record.event in told.ENDS and told.EVENTS[record.event].only_with in ("", *record.fields)


def _is_unsettled(presence: Presence, record: Record) -> bool:
    """Return True if a peer was silent or could not be met when last spoken of, and nothing shows what became of it."""
    peer = presence.service.process_named(record.text("peer"))
    is_past = peer is not None and (presence.fate(peer).is_over or peer.successor is not None)
    return record.text("state") in ("suspect", "new") and not is_past


# -- what could not be judged ------------------------------------------------------------------------------------------


def missing(presence: Presence) -> list[str]:
    """Name the starts of ranks that others mention, that have neither a log nor an answer, and that are not past.

    A rank is past if it said goodbye, or if a later start of it is known.
    """
    service = presence.service
    first: dict[str, float] = {}
    is_unknown = cache(lambda rank: start_of(rank) != "" and service.process_named(rank) is None)

    def name(names: Iterable[str], process: Process, at: float) -> None:
        for rank in filter(is_unknown, names):
            if not math.isnan(at):
                first[rank] = min(first.get(rank, math.inf), presence.near(process, at))

    past = set[str]()
    for request in service.requests:
        for lease in request.leases.values():
            name(itertools.chain(lease.owed, lease.released, lease.claims), lease.process, lease.lent_at)
        for pull in request.all_pulls:
            name(pull.peer_ranks, pull.process, pull.begun_at)
    for process in service.processes.values():
        for record in process.of(told.PeerChanged, told.ReaderMet, told.ReaderRefused):
            name([record.text("peer") or record.text("reader")], process, record.at)
            if record.text("state") == "gone" and record.level == "info":  # it said goodbye
                past.add(record.text("peer"))
    starts = [(base_name(rank), at) for rank, at in first.items()]
    starts += [(x.base, presence.near(x, x.first_at)) for x in service.processes.values() if x.num_records]
    begun = {base: max(found) for base, found in grouped(starts).items()}
    return sorted(x for x, at in first.items() if x not in past and at >= begun[base_name(x)])


def left_behind(presence: Presence) -> Iterator[tuple[str, str]]:
    """Yield ranks that announce a request which another rank of their engine has read, it is not known when."""
    for request in presence.service.requests:
        for pull in request.all_pulls:
            is_open = pull.state == "announced" and pull.ended is None and bool(pull.held)
            if is_open and any(map(math.isnan, read_beside(presence, request, pull))):
                yield pull.process.rank, request.name


def cut(presence: Presence) -> Iterator[tuple[str, str]]:
    """Yield ranks with logs that lack what other logs show of them, and what that is."""
    for process in presence.service.processes.values():
        if process.num_records and process.says_info and process.stopped is None and not process.answers:
            if (fate := presence.fate(process)).kind == "stopped":
                yield process.rank, f"it does not say that the engine was closed, but {fate.why}"
    leases = [(request, x) for request in presence.service.requests for x in request.leases.values()]
    unfinished = grouped((x.process, request.name) for request, x in leases if _is_unfinished(presence, x))
    failed = grouped((reader, request.name) for request, x in leases for reader in _untold(presence, request, x))
    for owner, names in unfinished.items():
        yield owner.rank, f"it does not show the ends of leases that would be over, or told of again: {listed(names)}"
    for reader, names in failed.items():
        yield reader.rank, f"it does not say why pulls failed that others heard of: {listed(names)}"


def _untold(presence: Presence, request: LoggedRequest, lease: LoggedLease) -> Iterator[Process]:
    """Yield readers whose failed pull one lease shows, and no log of them."""
    told_by = [x.process for x in request.all_pulls if x.ended is not None]
    readers = (presence.service.process_named(rank) for rank, how in lease.released.items() if how == "failed")
    yield from (x for x in readers if x is not None and x not in told_by)


def _is_unfinished(presence: Presence, lease: LoggedLease) -> bool:
    """Return True for a lease with a log that ends before it would be held for long, or over, and others do not."""
    if lease.lent is None or lease.ended is not None or lease.held or presence.fate(lease.process).kind != "silent":
        return False
    told_at = presence.when(lease.process, lease.lent_at + max(lease.lease_s / 3, SIGN_S))
    return presence.when(lease.process, lease.process.last_at)[1] < told_at[0] and presence.last > told_at[1] + SIGN_S


def dropped(records: Iterable[Record], is_past: Callable[[Record], bool]) -> Iterator[tuple[str, str]]:
    """Yield ranks that could not write some lines into their own logs, and how many, by the lines after them."""
    counts = Counter[str]()
    for record in records:  # few lines have the field, and to decode all would take long
        is_one = b'"log_dropped"' in record.said if isinstance(record.said, bytes) else "log_dropped" in record.said
        if is_one and not is_past(record):
            counts[record.rank] += max(record.integer("log_dropped", 0), 0)
    yield from ((rank, counted(number, "line")) for rank, number in (+counts).items())


def uncounted(presence: Presence, answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """Yield ranks that count bad ends which no log shows, and these: by their answers, or by their last lines.

    A log that begins late, as after a rotation, need not show all; nor does its reader claim more than its time.
    """
    shown, every = _shown(presence.service), presence.service.processes.values()
    counts = _counts(presence.service, answers)
    for process in (x for x in counts if _is_whole(x) or not presence.reaches(x)):
        # An engine that resumed counts on, under another name of its process.
        is_resumed = process.started is not None and process.started.event == told.EngineResumed.event
        mine = [x for x in every if x is process or (is_resumed and x.base == process.base)]
        bad = {x: integer(n, 0) for x, n in counts[process].items() if _is_bad(x)}
        more = Counter({x: n - sum(shown[y, x] for y in mine) for x, n in bad.items()})
        for name, event in LIMITED.items():
            more[name] *= not any(True for _ in process.of(event))
        if said := [f"{number:,} {name}" for name, number in sorted((+more).items())]:
            ends = f"its log ends at {clock_time(process.logged.at)}" if process.logged else "there is no log of it"
            yield process.rank, f"{', '.join(said)}" + (f"; {ends}" if process.answers else "")


def _counts(service: Service, answers: Iterable[Answer]) -> dict[Process, Mapping[str, Any]]:
    """Return the last counters of each process that says some: as it stopped, or in its answer."""
    counts = {x: x.stopped.mapping("counters") for x in service.processes.values() if x.stopped is not None}
    for answer in (x for x in answers if x.has_told):
        short = {"loop.was_away": 0} if answer.account.facts.lag.most_s < LONG_AWAY_S else {}
        counts[service.processes[answer.account.incarnation]] = {**answer.account.facts.counters, **short}
    return counts


def _shown(service: Service) -> Counter[tuple[Process, str]]:
    """Count the ends that logs show, by the names of counters."""
    shown: Counter[tuple[Process, str]] = Counter()
    for request in service.requests:
        shown.update((x.process, f"leases.{x.state}") for x in request.leases.values() if x.ended is not None)
        for pull in request.all_pulls:
            shown[pull.process, f"{'follows' if pull.is_follow else 'pulls'}.{pull.cause}"] += 1
            shown[pull.process, "blocks.kept"] += pull.held_transfers > 0
            shown[pull.process, "blocks.retired"] += pull.retired is not None
    return shown


def _is_whole(process: Process) -> bool:
    """Return True if a process's log has its begin, so that it shows all bad ends up to its own."""
    if process.answers:
        return process.logged is not None and process.logged.is_whole
    return process.started is not None


def _is_bad(counter: str) -> bool:
    kind, _, how = counter.partition(".")
    return (kind in ("leases", "pulls", "follows") and how not in GOOD_COUNTS) or kind == "blocks" or counter in LIMITED
