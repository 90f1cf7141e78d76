"""One service out of many logs: its processes, and its requests as both sides speak of them.

A request has a name on each side, and several attempts on the decode side. They are joined over processes by, in this
order: the unique pull id (leases name the pulls that claimed them); the prefill engine, the sequence of its key and the
prefill request id, with the start of the prefill process, because a restarted scheduler counts from zero again; and
last the prefill engine and its process with the sequence alone, so that a pull with another request id under this key
is found, and noticed.

Clocks of different hosts are not compared here. Seconds since a request was lent, or a pull asked for, are each
process's own. So is `at` of a record, which can be compared only within one host.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import msgspec

from asynckv import told
from asynckv.core.following import FollowState
from asynckv.core.notes import AnyNote, GrantedTo, Note, Promised, Released
from asynckv.core.types import SHOWN_LETTERS, How
from asynckv.told import LastClaim, RefusedMessage
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.causes import WELL
from asynckv.tools.diagnose.clocks import PutBack, mended
from asynckv.tools.diagnose.records import Logs, Record, number

GATHERED_S = 11.0  # most seconds by which a line is late: events about requests are gathered for some seconds
FOLLOWS = frozenset(FollowState)
DURATIONS = tuple(x for x in told.EngineStarted.__struct_fields__ if x.endswith("_s"))
_RANK = re.compile(r"(?P<base>.+?/tp\d+)(?:@(?P<start>[0-9a-f]{1,64}))?(?: \(.*\))?\Z", re.DOTALL)


def base_name(rank: str) -> str:
    """Return the name of a rank without the start of its process: `decode/tp0` of `decode/tp0@0a1b2c3d`."""
    found = _RANK.match(rank)
    return found["base"] if found else rank


def start_of(rank: str) -> str:
    """Return the start of the process in a rank's name: `0a1b2c3d`; empty if it names none."""
    found = _RANK.match(rank)
    return (found["start"] or "")[:SHOWN_LETTERS] if found else ""


def engine_of(rank: str) -> str:
    """Return the engine, or cohort, that a rank's name begins with."""
    return base_name(rank).rpartition("/tp")[0].partition("/pp")[0]


@dataclass(frozen=True, slots=True)
class Logged:
    """The end of a process's log, where its engine has answered as well; `is_whole` if the log has its begin, too."""

    at: float
    says_info: bool = False
    is_whole: bool = False


@dataclass(slots=True, eq=False)
class Process:
    """One start of one rank's process (or, after `suspend`, of its engine: its incarnation is a new one)."""

    incarnation: str
    engine_id: str
    rank: str  # its name, with the start
    host: str = ""  # name of its machine or container; empty in old logs
    boot_id: str = ""  # the boot of its machine, if its log says it
    started: Record | None = None  # what it said as it started; None if that is not in the logs
    stopped: Record | None = None  # what it said as it stopped in order
    first_at: float = math.inf  # of its records, by its own clock
    last_at: float = -math.inf  # the same of the last
    successor: Process | None = None  # the next start of the same rank, if the logs have one; not one beside it
    lends: bool = False  # it spoke as a prefill side
    pulls: bool = False  # it spoke as a decode side
    answers: bool = False  # it was asked, and answered: it lives
    hangs: bool = False  # it was asked, and did not answer, although its process is there
    halted: str = ""  # the evidence that it is stopped or paused
    gone: str = ""  # the evidence that there is no such process any more
    is_here: bool = False  # its process is on this host
    is_elsewhere: bool = False  # no process of these logs is on this host, nor this one
    says_info: bool = False  # its log has lines below a warning: only then does the lack of one say anything
    num_records: int = 0
    durations: dict[str, float] = field(default_factory=dict)  # of its configuration, as far as it said them
    logged: Logged | None = None  # what there is of its log, if it was asked as well
    over: list[str] = field(default_factory=list)  # held for long by its log, and not listed by its answer
    put_back: Sequence[PutBack] = ()  # when its clock was put back; its times continue as before
    records: list[Record] = field(default_factory=list)  # of itself and of its peers, by time; requests have the others
    _by_event: dict[str, list[Record]] = field(default_factory=dict)

    @property
    def start(self) -> str:
        """The first letters of the incarnation, as others name it."""
        return self.incarnation[:SHOWN_LETTERS]

    @property
    def base(self) -> str:
        """The name of its rank, without the start."""
        return base_name(self.rank)

    @property
    def pid(self) -> tuple[int, int] | None:
        """The namespace of its pid, and the pid; None if its log does not say it."""
        said = self.started
        return (said.integer("pid_namespace"), said.integer("pid")) if said and said.integer("pid") >= 0 else None

    @property
    def clock(self) -> str:
        """The name of its clock, which is that of its machine: the boot, or the host if its log does not say that."""
        return self.boot_id or self.host or self.incarnation

    def ends_before(self, due_at: float) -> bool:
        """Return True if its log ends before a line that was due at some moment must be there."""
        return self.last_at <= due_at + GATHERED_S

    def of(self, *events: type[told.Told]) -> Iterator[Record]:
        """Yield its lines about itself and its peers; for several events, one after the other."""
        self._by_event = self._by_event or grouped((x.event, x) for x in self.records)
        return itertools.chain.from_iterable(self._by_event.get(x.event, ()) for x in events)

    def since(self, event: type[told.Told], at: float) -> Iterator[Record]:
        """Yield its lines about itself and its peers from a moment on; none if the moment is not known."""
        if math.isnan(at):
            return iter(())
        next(self.of(event), None)
        found = self._by_event.get(event.event, [])
        return itertools.islice(found, bisect.bisect_left(found, at, key=attrgetter("at")), None)


@dataclass(slots=True, eq=False)
class LoggedLease:
    """One request on one prefill rank."""

    process: Process
    request_id: str
    sequence: int
    lent: Record | None = None
    granted: list[Record] = field(default_factory=list)
    held: list[Record] = field(default_factory=list)  # warnings that named it, each with its entry's fields
    ended: Record | None = None
    transitions: list[Record] = field(default_factory=list)
    left_out: tuple[str, ...] = ()  # ranks that have not claimed it, of an engine with a rank that has

    @property
    def state(self) -> str:
        """The end of the lease (`released`, `expired`, `revoked`); `lent` or `ending` if the logs show none."""
        if self.ended is not None:
            return self.ended.text("cause") or "ended"
        return (self.held[-1].text("state") or "lent") if self.held else "lent"

    @property
    def is_open(self) -> bool:
        """True if it is held when the log ends. A good end without a line was not sampled."""
        if self.ended is not None or self.lent is not None or not self.held:
            return self.ended is None and self.lent is not None
        held = self.held[-1]
        # A release is no warning: in a log of warnings only one past its lease says that it was not released.
        promised = (x.number("lent_s") + x.number("left_s") for x in self.held[:-1])
        is_told = self.process.says_info or any(until <= held.number("lent_s", 0.0) for until in promised)
        # Without a claim it would have expired, and been told, a moment after its lease.
        may_last = bool(self.claims) or self.process.last_at <= held.at + held.number("left_s", math.inf) + 1.0
        return is_told and may_last and self.process.ends_before(held.at + held.number("lent_s", 0.0))

    @property
    def lent_at(self) -> float:
        """Time of the lend, by its process's clock."""
        said = self.lent.at if self.lent is not None else math.inf
        if self.ended is not None and not math.isnan(seconds := self.ended.number("seconds")):
            return min(self.ended.at - seconds, said)  # a line may be late
        if self.lent is not None:
            return said
        for record in self.held:
            if not math.isnan(seconds := record.number("lent_s")):
                return record.at - seconds
        return min((x.at for x in (*self.granted, *self.transitions)), default=math.nan)

    @property
    def records(self) -> list[Record]:
        every = (self.lent, self.ended, *self.granted, *self.transitions, *self.held)
        return [x for x in every if x is not None]

    @property
    def seconds(self) -> float:
        """Seconds for which it has been lent, up to the end of its process's log."""
        if self.ended is not None and not math.isnan(seconds := self.ended.number("seconds")):
            return seconds
        return self.process.last_at - self.lent_at

    @property
    def blocks(self) -> int:
        """Number of blocks; -1 if it is not known."""
        said = (self.ended, self.lent, *reversed(self.held))
        return next((n for x in said if x is not None and (n := x.integer("blocks")) >= 0), -1)

    @property
    def lease_s(self) -> float:
        """Seconds for which it stays lent without a claim."""
        said = self.lent.number("lease_s") if self.lent is not None else math.nan
        return said if not math.isnan(said) else self.process.durations.get("lease_s", math.nan)

    @property
    def owed(self) -> tuple[str, ...]:
        """Readers that had not released at the last line about it; `*` is a decode engine that never contacted it."""
        if self.ended is not None:
            return self.ended.texts("owed")
        if self.held:
            last = self.held[-1]
            has_names = isinstance(last.fields.get("owed"), list)
            return last.texts("owed") if has_names else tuple(last.mapping("claims")) or self.left_out or ("*",)
        return ()

    @property
    def released(self) -> dict[str, str]:
        readers = self.ended.mapping("readers") if self.ended is not None else {}
        return {str(k): str(v) for k, v in readers.items()}

    @property
    def claims(self) -> dict[str, LastClaim]:
        """The last claim of every reader that made one, by its name; a time that no log says is nan."""
        out: dict[str, LastClaim] = {}

        def claim(name: str, pull_id: object, claimed_s: float, heard_s: float = math.nan) -> None:
            known = out.get(name)
            if known is not None and known.pull_id == pull_id:
                claimed_s = known.claimed_s if math.isnan(claimed_s) else claimed_s
                heard_s = known.heard_s if math.isnan(heard_s) else heard_s
            out[name] = LastClaim(str(pull_id or ""), claimed_s, heard_s)

        for record in self.granted:
            claim(record.text("reader"), record.text("pull_id"), max(record.number("after_s"), 0.0))
        for record in self.held:
            for name, said in record.objects("claims").items():
                claimed_s, heard_s = number(said.get("claimed_s")), number(said.get("heard_s"))
                # Beside `claimed_s` it counts from when it was lent, as where a lease ends; alone it is an age.
                if math.isnan(claimed_s):
                    heard_s = record.number("lent_s") - heard_s
                claim(name, said.get("pull_id") or "", claimed_s, heard_s)
        if self.ended is not None:
            for at_s, note in history(self.ended):
                if isinstance(note, GrantedTo):
                    is_known = note.reader in out and out[note.reader].pull_id == note.pull_id
                    claim(note.reader, note.pull_id, at_s, math.nan if is_known else at_s)
            for name, said in self.ended.objects("claims").items():
                claim(name, said.get("pull_id") or "", number(said.get("claimed_s")), number(said.get("heard_s")))
        return out

    @property
    def retrying(self) -> frozenset[str]:
        """Readers that released for now, and announced another attempt."""
        notes = (x for _, x in history(self.ended) if isinstance(x, GrantedTo | Released))
        last = {x.reader: isinstance(x, Released) and x.outcome == "retry" for x in notes}
        return frozenset(name for name, retries in last.items() if retries)

    @property
    def refused(self) -> list[RefusedMessage]:
        """Messages for this very key that were refused."""
        values = [x.fields.get("refused") for x in (self.ended, *reversed(self.held)) if x is not None]
        said: list[Any] = next((x for x in values if isinstance(x, list)), [])
        rows = (x for x in said if isinstance(x, list) and len(x) >= 4)
        return [RefusedMessage(number(x[0]), *map(str, x[1:6])) for x in rows]

    @property
    def pull_ids(self) -> frozenset[str]:
        return frozenset(x.pull_id for x in self.claims.values() if x.pull_id)


def note_of(said: object) -> str | Note | None:
    """Return an entry of a history: a state, or a note; None for anything else."""
    if isinstance(said, str):
        return said
    with contextlib.suppress(msgspec.ValidationError):
        note: Note = msgspec.convert(said, AnyNote, strict=False)
        return note
    return None


def history(ended: Record | None) -> Iterator[tuple[float, str | Note]]:
    """Yield the steps of a request's life in its last line, if there is one."""
    value = ended.fields.get("history") if ended is not None else None
    for x in value if isinstance(value, list) else ():
        if isinstance(x, list) and len(x) == 2 and (what := note_of(x[1])) is not None:
            yield number(x[0]), what


@dataclass(slots=True, eq=False)
class LoggedPull:
    """One attempt of one decode rank, or an announcement."""

    process: Process
    pull_id: str
    request_id: str = ""
    prefill_request_id: str = ""
    sequence: int = -1
    peer: str = ""
    ended: Record | None = None
    held: list[Record] = field(default_factory=list)
    retried: list[Record] = field(default_factory=list)
    unanswered: list[Record] = field(default_factory=list)
    refused: list[Record] = field(default_factory=list)
    returned: Record | None = None
    retired: Record | None = None
    transitions: list[Record] = field(default_factory=list)
    like: LoggedPull | None = None  # the pull that failed in the same words, where the log says no more than that

    @property
    def cause(self) -> str:
        """Reason of its end; empty if the logs show none."""
        return self.ended.text("cause") if self.ended is not None else ""

    @property
    def said(self) -> Record | None:
        """The most informative end: its own, or that of the pull that failed in the same words."""
        return self.like.ended if self.like is not None and self.like.ended is not None else self.ended

    @property
    def is_follow(self) -> bool:
        """True if it only followed a ticket, so that its request has no params."""
        last = self.ended or next(reversed(self.held), None)
        return last is not None and (last.event == told.FollowFailed.event or last.text("state") in FOLLOWS)

    @property
    def failed_in(self) -> str:
        return self.said.text("failed_in") if self.said is not None else ""

    @property
    def how(self) -> str:
        """The way in which the rank was lost, or not met, with which it failed (`How`); empty if neither."""
        return self.said.text("how") if self.said is not None else ""

    @property
    def is_recalled(self) -> bool:
        """True if it failed because the prefill engine took its blocks back at once, as it may."""
        return self.how == How.RECALLED

    @property
    def is_well(self) -> bool:
        return self.cause in WELL or self.is_recalled

    @property
    def failed_with(self) -> tuple[str, ...]:
        return self.said.texts("failed_with") if self.said is not None else ()

    @property
    def detail(self) -> str:
        """Detail of its failure; empty if it only repeats the cause."""
        said = self.said.text("detail") if self.said is not None else ""
        return said if said != self.cause else ""

    @property
    def records(self) -> list[Record]:
        ended = (self.ended, self.returned, self.retired)
        more = (*self.unanswered, *self.refused, *self.retried, *self.transitions, *self.held)
        return [x for x in (*ended, *more) if x is not None]

    @property
    def last_at(self) -> float:
        return max((x.at for x in self.records), default=math.nan)

    @property
    def begun_at(self) -> float:
        """Time of the call or announcement, by its process's clock."""
        if self.ended is not None and not math.isnan(seconds := self.ended.number("seconds")):
            # Only the history has an announcement's time: its pull counts from the call.
            return self.ended.at - max([seconds, *(at for at, _ in history(self.ended))])
        for record in self.held:
            if not math.isnan(seconds := record.number("age_s", record.number("state_s"))):
                return record.at - seconds
        return min((x.at for x in (*self.transitions, *self.retried)), default=math.nan)

    @property
    def state(self) -> str:
        """State at the end of the logs: its end, or the state in a warning."""
        if self.ended is not None:
            return self.cause
        return self.held[-1].text("state") if self.held else ""

    @property
    def is_open(self) -> bool:
        """True if a warning is its last word, and no further line was due before its process's log ends."""
        if self.ended is not None or not self.held:
            return False
        return self.process.ends_before(self.held[-1].at + self.held[-1].number("state_s", 0.0))

    @property
    def is_announced(self) -> bool:
        """True if it is open, and was announced only."""
        return self.is_open and self.state == "announced"

    @property
    def will_be_tried_again(self) -> bool:
        """True if another attempt was promised that need not have ended when its process's log ends."""
        promised = (x.at + x.number("after_s", 0.0) for x in self.retried)
        return self.process.stopped is None and self.process.ends_before(max(promised, default=-math.inf))

    @property
    def attempt(self) -> int:
        return self.ended.integer("attempt", 1) if self.ended is not None else 1

    @property
    def peer_ranks(self) -> tuple[str, ...]:
        if self.said is not None and (names := self.said.texts("peer_ranks")):
            return names
        for record in reversed(self.held):
            if isinstance(ranks := record.fields.get("ranks"), dict):
                return tuple(str(x) for x in ranks)
        of_releases = (x.texts("ranks") for x in (*self.unanswered, *self.refused))
        return next(filter(None, of_releases), ())

    def was_granted_by(self, rank: str) -> bool:
        """True if a prefill rank granted its blocks, by its own history."""
        told_by = (x.rank for _, x in history(self.ended) if isinstance(x, Promised))
        return any(x in (base_name(rank), rank) for x in told_by)

    @property
    def held_transfers(self) -> int:
        """Transfers that might still write its blocks at its outcome."""
        return max(self.ended.integer("held_transfers", 0), 0) if self.ended is not None else 0

    @property
    def held_blocks(self) -> int:
        """Blocks that were not free at its outcome; -1 if the number is not known."""
        records = (self.returned, self.retired, self.ended)
        return next((n for x in records if x is not None and (n := x.integer("blocks")) >= 0), -1)


@dataclass(slots=True, eq=False)
class LoggedRequest:
    """One lent request on all ranks of both sides."""

    engine_id: str  # the prefill engine
    sequence: int
    request_id: str  # the prefill side's id
    leases: dict[str, LoggedLease] = field(default_factory=dict)  # by the prefill rank's name
    pulls: dict[str, LoggedPull] = field(default_factory=dict)  # by pull id
    others: dict[str, LoggedPull] = field(default_factory=dict)  # pulls of this key that speak of another request id
    before: list[Record] = field(default_factory=list)  # of a side that never lent or pulled it: withdrawn, or refused

    @property
    def name(self) -> str:
        """Its id on the prefill side, or on the decode side if that is not known."""
        return self.request_id or next(iter(self.decode_ids), "")

    @property
    def all_pulls(self) -> tuple[LoggedPull, ...]:
        return (*self.pulls.values(), *self.others.values())

    @property
    def decode_ids(self) -> list[str]:
        refused = (x.text("request_id") for x in self.before if x.event == told.PullRefused.event)
        return list(dict.fromkeys(x for x in (*(p.request_id for p in self.all_pulls), *refused) if x))

    def records(self) -> list[Record]:
        spoken_of: tuple[LoggedLease | LoggedPull, ...] = (*self.leases.values(), *self.all_pulls)
        return sorted((*self.before, *(y for x in spoken_of for y in x.records)), key=attrgetter("at"))


@dataclass(slots=True, eq=False)
class Service:
    """All processes and requests in some logs."""

    processes: dict[str, Process] = field(default_factory=dict)
    requests: list[LoggedRequest] = field(default_factory=list)
    _by_start: dict[str, Process] = field(default_factory=dict)

    def add(self, process: Process) -> None:
        self.processes[process.incarnation] = process
        self._by_start.clear()

    def ranks_by_address(self) -> dict[str, str]:
        """Return the addresses at which ranks listen, or are reached, by the logs."""
        every = self.processes.values()
        known = {x.text("address"): x.text("peer") for process in every for x in process.of(told.PeerChanged)}
        return known | {x.started.text("address"): x.rank for x in every if x.started is not None}

    def started_as(self, start: str) -> Process | None:
        """Find a process by its start, as others name it."""
        if not self._by_start and self.processes:
            self._by_start = {x.start: x for x in self.processes.values()}
        return self._by_start.get(start)

    def process_named(self, rank: str) -> Process | None:
        """Find the process that a rank's name means."""
        return self.started_as(start_of(rank))

    def process_of(self, pull_id: str) -> Process | None:
        """Find the process that made a pull: its id begins as the incarnation of its process does."""
        start = pull_id.partition("-")[0]
        found = self.started_as(start[:SHOWN_LETTERS])
        return found if found is not None and found.incarnation.startswith(start) else None


LEASE_EVENTS = {x.event for x in told.EVENTS.values() if issubclass(x, told.OfLease)} - {told.RequestWithdrawn.event}
PULL_EVENTS = {x.event for x in told.EVENTS.values() if issubclass(x, told.OfPull)} | {told.FollowFailed.event}
PLACES = {
    told.LeaseLent.event: "lent",
    told.LeaseGranted.event: "granted",
    told.LeaseEnded.event: "ended",
    told.PullEnded.event: "ended",
    told.FollowFailed.event: "ended",
    told.PullRetried.event: "retried",
    told.ReleaseUnanswered.event: "unanswered",
    told.ReleaseRefused.event: "refused",
    told.BlocksReturned.event: "returned",
    told.BlocksRetired.event: "retired",
}
SIDES = {x.event: x.side for x in told.EVENTS.values()}


def join(logs: Logs | Iterable[Record]) -> Service:
    records, put_back = mended(logs.records if isinstance(logs, Logs) else sorted(logs, key=lambda x: x.at))
    builder = _Builder()
    for record in records:
        builder.take(record)
    service = builder.finish()
    for incarnation, lines in logs.counted.items() if isinstance(logs, Logs) else ():
        service.processes[incarnation].num_records += lines
    for incarnation, found in put_back.items():
        service.processes[incarnation].put_back = found
    _find_left_out(service)
    return service


def _find_left_out(service: Service) -> None:
    """Find ranks that leases wait for, of lines that do not name them: others of the engines that have claimed."""
    for request in service.requests:
        for lease in (x for x in request.leases.values() if x.ended is None and x.held):
            held, spoke = lease.held[-1], {base_name(x) for x in lease.claims}
            spoke |= {x.process.base for x in request.all_pulls if x.ended is not None and x.ended.at < held.at}
            engines = {x.rpartition("/tp")[0] for x in spoke}
            met = {base_name(x.text("reader")) for x in lease.process.of(told.ReaderMet)}
            lease.left_out = tuple(sorted(x for x in met - spoke if x.rpartition("/tp")[0] in engines))


class _Builder:
    """Take records by time, and join them at the end."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}
        self._leases: dict[tuple[str, int, str], LoggedLease] = {}
        self._unnamed: dict[tuple[str, str], LoggedLease] = {}
        self._pulls: dict[str, LoggedPull] = {}
        self._before: list[Record] = []

    def take(self, record: Record) -> None:
        process, event = self.speaks(record), record.event
        if event in LEASE_EVENTS:
            _place(self._lease(process, record), record)
        elif event in PULL_EVENTS:
            _place(self._pull(process, record), record)
        else:
            process.records.append(record)
        if event in (told.RequestWithdrawn.event, told.PullRefused.event):
            self._before.append(record)
        elif event in (told.LeaseHeld.event, told.PullHeld.event):
            subject = self._lease if event == told.LeaseHeld.event else self._pull
            for entry in record.entries("oldest"):
                held = replace(record, said={**record.fields, **entry})
                subject(process, held).held.append(held)

    def finish(self) -> Service:
        for starts in grouped((x.base, x) for x in self._processes.values()).values():
            starts.sort(key=lambda x: x.first_at)
            for i, process in enumerate(starts):  # some may run beside it
                next_ = bisect.bisect_left(starts, process.last_at, i + 1, key=attrgetter("first_at"))
                process.successor = starts[next_] if next_ < len(starts) else None
        for pull in self._pulls.values():
            if pull.ended is not None and (like := self._pulls.get(pull.ended.text("same_as"))) is not None:
                pull.like, pull.peer = like, pull.peer or like.peer
        return Service(self._processes, list(_Joiner(self._leases.values()).joined(self._pulls, self._before)))

    def speaks(self, record: Record) -> Process:
        if (process := self._processes.get(record.incarnation)) is None:
            process = self._processes[record.incarnation] = Process(record.incarnation, record.engine_id, record.rank)
        process.first_at, process.last_at = min(process.first_at, record.at), max(process.last_at, record.at)
        process.num_records += 1
        process.lends |= (side := SIDES.get(record.event)) == "prefill"
        process.pulls |= side == "decode"
        process.says_info |= record.level not in ("warning", "error")
        if record.event in (told.EngineStarted.event, told.EngineResumed.event):
            process.started = process.started or record
            process.host = process.host or record.text("host")
            process.boot_id = process.boot_id or record.text("boot_id")
            process.answers |= record.fields.get("answers") is True
            process.lends |= process.answers and record.fields.get("lends") is True
            process.pulls |= process.answers and record.fields.get("pulls") is True
            for name in DURATIONS:
                if not math.isnan(seconds := record.number(name)):
                    process.durations[name] = seconds
        elif record.event in (told.EngineStopped.event, told.EngineSuspended.event):
            process.stopped = record
        return process

    def _lease(self, process: Process, record: Record) -> LoggedLease:
        name, sequence = record.text("request_id"), record.integer("sequence")
        if sequence < 0 and (known := self._unnamed.get((process.incarnation, name))) is not None:
            return known
        key = (process.incarnation, sequence, name)
        if (lease := self._leases.get(key)) is None:
            lease = self._leases[key] = LoggedLease(process, name, sequence)
        self._unnamed[process.incarnation, name] = lease
        return lease

    def _pull(self, process: Process, record: Record) -> LoggedPull:
        name = record.text("pull_id") or f"{process.start}-?{record.fields.get('request_id')}"
        if (pull := self._pulls.get(name)) is None:
            pull = self._pulls[name] = LoggedPull(process, name)
        pull.request_id = pull.request_id or record.text("request_id")
        pull.prefill_request_id = pull.prefill_request_id or record.text("prefill_request_id")
        pull.peer = pull.peer or record.text("peer")
        pull.sequence = pull.sequence if pull.sequence >= 0 else record.integer("sequence")
        return pull


def _place(subject: LoggedLease | LoggedPull, record: Record) -> None:
    """Add a record to others of its kind, or keep it as the last of its kind."""
    name = PLACES.get(record.event, "transitions")
    if isinstance(found := getattr(subject, name), list):
        found.append(record)
    else:
        setattr(subject, name, record)


class _Joiner:
    """Join leases of several ranks, then their pulls."""

    def __init__(self, leases: Iterable[LoggedLease]) -> None:
        self._requests: list[LoggedRequest] = []
        self._exact: dict[tuple[str, int, str], list[LoggedRequest]] = defaultdict(list)
        self._by_pull: dict[str, LoggedRequest] = {}
        # The lender, and the ranks that readers say they met; of lent requests also without their names.
        self._by_start: dict[tuple[tuple[str, int, str], str], LoggedRequest] = {}
        self._by_sequence: dict[tuple[str, int, str], list[LoggedRequest]] = defaultdict(list)
        self._ranks: Counter[tuple[tuple[str, int, str], str]] = Counter()
        self._by_name: dict[str, list[LoggedRequest]] = defaultdict(list)
        for lease in leases:
            self._add(lease)

    def joined(self, pulls: Mapping[str, LoggedPull], before: Iterable[Record]) -> list[LoggedRequest]:
        for request in self._requests:
            for lease in request.leases.values():
                self._by_pull |= dict.fromkeys(lease.pull_ids, request)
        # Join the most explicit pulls first, so that those that failed in the same words find them.
        for pull in sorted(pulls.values(), key=lambda x: (x.sequence < 0, x.like is not None)):
            request = self._request_of(pull)
            if not pull.prefill_request_id or request.request_id in ("", pull.prefill_request_id):
                request.pulls[pull.pull_id] = pull
                self._note(request, pull.peer_ranks)
            else:
                request.others[pull.pull_id] = pull
            self._by_pull[pull.pull_id] = request
        for record in before:
            is_ours = record.event == told.RequestWithdrawn.event
            engine_id = record.engine_id if is_ours else record.text("peer")
            name = record.text("request_id" if is_ours else "prefill_request_id")
            key = engine_id, record.integer("sequence"), name
            found = self._exact.get(key) if name else None
            (found[-1] if found else self._new(*key)).before.append(record)
        return self._requests

    def _add(self, lease: LoggedLease) -> None:
        key = lease.process.engine_id, lease.sequence, lease.request_id
        # A further lease of a rank belongs to its next start: the first to the first request, and so on.
        found, before = self._exact[key], self._ranks[key, lease.process.base]
        self._ranks[key, lease.process.base] += 1
        request = found[before] if before < len(found) else self._new(*key)
        request.leases[lease.process.rank] = lease
        self._note(request, [lease.process.rank])
        self._by_sequence[key[0], key[1], start_of(lease.process.rank)].append(request)

    def _note(self, request: LoggedRequest, ranks: Iterable[str]) -> None:
        key = request.engine_id, request.sequence, request.request_id
        for start in filter(None, map(start_of, ranks)):
            self._by_start.setdefault((key, start), request)

    def _new(self, engine_id: str, sequence: int, request_id: str) -> LoggedRequest:
        request = LoggedRequest(engine_id, sequence, request_id)
        self._requests.append(request)
        self._exact[engine_id, sequence, request_id].append(request)
        self._by_name[request_id].append(request)
        return request

    def _request_of(self, pull: LoggedPull) -> LoggedRequest:
        if (known := self._by_pull.get(pull.pull_id)) is not None:
            return known
        peer = pull.peer or next((engine_of(x) for x in pull.peer_ranks), "")
        if pull.is_follow:  # without params, only the decode engine's own id joins its ranks
            name = f"{pull.process.engine_id} follows for {pull.request_id}"
            self._by_pull[name] = known = self._by_pull.get(name) or self._new(peer, -1, "")
            return known
        key = peer, pull.sequence, pull.prefill_request_id
        starts = list(filter(None, dict.fromkeys(map(start_of, pull.peer_ranks))))
        known = self._of_its_key(key, starts, pull)
        if known is None and pull.sequence >= 0:
            known = self._of_its_sequence(peer, starts, pull)
        elif known is None:
            named = [x for x in self._by_name.get(pull.prefill_request_id, []) if peer in ("", x.engine_id)]
            known = named[0] if len(named) == 1 else None
        return known or self._new(*key)

    def _of_its_key(self, key: tuple[str, int, str], starts: Sequence[str], pull: LoggedPull) -> LoggedRequest | None:
        """Find the request of a whole key, and of the starts that a pull met."""
        exact = self._exact.get(key, [])
        if exact and not starts:
            return exact[0]
        if (known := next((x for y in starts if (x := self._by_start.get((key, y))) is not None), None)) is not None:
            return known
        # Its params may name earlier starts of the ranks that lent it.
        is_one = len(exact) == 1 and not {*map(base_name, pull.peer_ranks)}.isdisjoint(map(base_name, exact[0].leases))
        return exact[0] if is_one else None

    def _of_its_sequence(self, peer: str, starts: Sequence[str], pull: LoggedPull) -> LoggedRequest | None:
        """Find the request of a key whose other id a pull has.

        Two schedulers may count alike. The key is surely the same if its other id was refused for it.
        """
        lent = [x for start in starts for x in self._by_sequence.get((peer, pull.sequence, start), [])]
        for request in lent:
            wrong = (y.who for x in request.leases.values() for y in x.refused if y.reason == "wrong_request")
            # The ids of a router or a server contain those of engines, and a reader that was refused, or came too
            # late, does not learn that its id differs.
            is_longer = request.request_id not in ("", pull.prefill_request_id)
            is_longer = is_longer and request.request_id in pull.prefill_request_id
            if pull.process.start in map(start_of, wrong) or (pull.cause != "complete" and is_longer):
                return request
        # Of several that one counts alike, the pull belongs to whichever has no reader yet.
        was_refused = "wrong_request" in (pull.cause, *(x.text("cause") for x in pull.refused))
        return min(lent, key=lambda x: bool(x.pulls), default=None) if was_refused else None
