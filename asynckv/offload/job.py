"""One caller's request to store or load, and the transfers that carry it out.

A *job* is one call of the caller; it ends once, with one result. A *move* is one transfer between two places. A
promotion or a write-back belongs to no job.

    RUNNING --all blocks are moved--> OVER
    RUNNING --STOPPED--> DRAINING --no move runs--> OVER
                         DRAINING --only moves in doubt run--> HELD --no move is in doubt--> OVER

A job in doubt reports its failure on entering HELD, and returns its blocks to the caller on leaving. Transfers cannot
be stopped, so a cancelled job ends when its posted moves have ended.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from asynckv.core.types import impossible, members
from asynckv.offload.entry import Entry, EntryState
from asynckv.offload.tier import Tier


class MoveKind(enum.StrEnum):
    """Source and destination of a move; the first kind matters most."""

    LOAD = "load"  # host to device
    STORE = "store"  # device to host
    PROMOTION = "promotion"  # file to host
    WRITE_BACK = "write_back"  # host to file


class Piece(Struct, frozen=True, gc=False):
    """The blocks of one group in a move; the lists have one entry per block."""

    group: int
    hashes: tuple[bytes, ...]  # the blocks' keys
    positions: tuple[int, ...]  # places in the job's list of blocks; empty for moves without the device
    host_slots: tuple[int, ...]
    file_slots: tuple[int, ...]  # slots in the file tier; empty for moves without it


class Move(Struct, frozen=True):
    """One transfer to carry out and then report by `Catalogue.ended`; a write-back has no `job_id`."""

    move_id: int
    kind: MoveKind
    job_id: str
    pieces: tuple[Piece, ...]
    num_bytes: int

    @property
    def num_blocks(self) -> int:
        return sum(len(piece.hashes) for piece in self.pieces)


class JobKind(enum.StrEnum):
    LOAD = "load"
    STORE = "store"


class JobOutcome(enum.StrEnum):
    DONE = "done"  # a load has all blocks in place, a store all that had room (`JobEnded.missing`)
    MISSING = "missing"  # some blocks are not stored, or not any more
    NO_ROOM = "no_room"  # blocks must be brought from the file tier, but everything in host memory is pinned
    TIMEOUT = "timeout"
    FAILED = "failed"  # a transfer failed
    CANCELLED = "cancelled"


class JobEnded(Struct, frozen=True):
    """The end of a job, reported once."""

    job_id: str
    kind: JobKind
    outcome: JobOutcome
    blocks: int  # blocks that were moved for it, or by another job that it waited for
    known: int  # blocks that a store found stored already
    missing: tuple[tuple[int, ...], ...]  # per group, the positions that were not moved; for a MISSING load, not stored
    cause: str = ""
    is_held: bool = False  # a transfer in doubt may still touch the caller's blocks; `JobReturned` follows


class JobReturned(Struct, frozen=True):
    """The end of all transfers of a job that had ended in doubt: nothing touches its blocks any more."""

    job_id: str


class JobState(enum.StrEnum):
    RUNNING = "running"
    DRAINING = "draining"
    HELD = "held"
    OVER = "over"


class JobEvent(enum.StrEnum):
    """Event of a job besides the ends of its moves."""

    STOPPED = "stopped"  # a transfer failed, a block is missing, there is no room or no time, or the caller cancelled


def all_is_moved(job: Job) -> bool:
    """All blocks are moved."""
    return not (job.todo or job.waits or job.absent or job.running or job.doubtful)


def nothing_runs(job: Job) -> bool:
    """No move runs."""
    return not (job.running or job.doubtful)


def only_what_is_in_doubt_runs(job: Job) -> bool:
    """Only moves in doubt run."""
    return not job.running and bool(job.doubtful)


def nothing_is_in_doubt(job: Job) -> bool:
    """No move is in doubt."""
    return not job.doubtful


S, E = members(JobState), members(JobEvent)
ON_EVENT: Mapping[JobState, Mapping[JobEvent, JobState]] = {
    S.RUNNING: {E.STOPPED: S.DRAINING},
    S.DRAINING: {},
    S.HELD: {},
    S.OVER: {},
}

WHEN: Mapping[JobState, Mapping[Callable[[Job], bool], JobState]] = {
    S.RUNNING: {all_is_moved: S.OVER},
    S.DRAINING: {nothing_runs: S.OVER, only_what_is_in_doubt_runs: S.HELD},
    S.HELD: {nothing_is_in_doubt: S.OVER},
    S.OVER: {},
}
"""Checked after every event and every end of a move; the first true condition counts."""


class Item(NamedTuple):
    position: int
    entry: Entry


@dataclass(slots=True, eq=False)
class Job:
    """The state machine of one job. The catalogue and its parts (`Jobs`, `Cutting`) write its fields."""

    job_id: str
    kind: JobKind
    until: float = math.inf  # time at which it fails unless all moves are posted
    is_pinning: bool = False  # True if loaded blocks stay held, and become a pin if all are loaded
    state: JobState = S.RUNNING
    outcome: JobOutcome = JobOutcome.DONE
    cause: str = ""
    todo: deque[Item] = field(default_factory=deque)  # blocks that can be moved: READY for a load, WRITING for a store
    waits: dict[Entry, int] = field(default_factory=dict)  # blocks that other jobs write -> their positions
    absent: deque[Item] = field(default_factory=deque)  # blocks that are only in files, without a slot in host memory
    running: set[int] = field(default_factory=set)  # posted moves that read or write the caller's blocks
    doubtful: set[int] = field(default_factory=set)  # posted moves with an end in doubt
    loaded: list[Entry] = field(default_factory=list)  # entries held because it `is_pinning`
    missing: list[tuple[int, int]] = field(default_factory=list)  # `(group, position)` that will not be moved
    blocks: int = 0
    known: int = 0

    def receive(self, event: JobEvent, outcome: JobOutcome, cause: str = "") -> None:
        """Take an event and its outcome. An impossible event raises `LocalProtocolError`."""
        self.state = ON_EVENT[self.state].get(event) or impossible(event, f"job {self.job_id!r}", self.state)
        self.outcome, self.cause = outcome, cause

    def settle(self, num_groups: int) -> JobEnded | JobReturned | None:
        """Change the state if a condition holds; return the news for the caller."""
        before = self.state
        after = next((after for condition, after in WHEN[before].items() if condition(self)), before)
        if after is before:
            return None
        self.state = after
        if before is S.HELD:
            return JobReturned(self.job_id)
        places: list[list[int]] = [[] for _ in range(num_groups)]
        for group, position in self.missing:
            places[group].append(position)
        missing, is_held = tuple(tuple(sorted(positions)) for positions in places), after is S.HELD
        return JobEnded(self.job_id, self.kind, self.outcome, self.blocks, self.known, missing, self.cause, is_held)


class Jobs:
    """Jobs that are not over, by name, with separate lists of those that can go on."""

    def __init__(self, num_groups: int, host: Tier, file: Tier) -> None:
        self._num_groups, self._host, self._file = num_groups, host, file
        self.by_name: dict[str, Job] = {}
        self.ready: dict[JobKind, dict[str, Job]] = {kind: {} for kind in JobKind}
        self.absent: dict[str, Job] = {}
        self.pins: dict[str, list[tuple[Tier, Entry]]] = {}
        self._news: list[JobEnded | JobReturned] = []
        self._deadline = math.inf  # not after the first deadline of a job, so that jobs are not checked in every turn

    def begin(self, job_id: str, kind: JobKind, until: float, *, is_pinning: bool = False) -> Job:
        job = self.by_name[job_id] = Job(job_id, kind, until, is_pinning=is_pinning)
        self._deadline = min(self._deadline, until)
        return job

    def news(self) -> list[JobEnded | JobReturned]:
        news, self._news = self._news, []
        return news

    def do(self, job: Job, position: int, entry: Entry) -> None:
        job.todo.append(Item(position, entry))
        self.ready[job.kind][job.job_id] = job

    def do_all(self, job: Job, items: Sequence[Item]) -> None:
        """Hold blocks of host memory for a job, and queue them for its moves."""
        if items:
            name, hold = job.job_id, self._host.hold
            for _, entry in items:
                hold(entry, name)
            job.todo += items
            self.ready[job.kind][name] = job

    def wait(self, job: Job, position: int, entry: Entry) -> None:
        """Let a job wait for a block that another job writes."""
        self._host.hold(entry, job.job_id)
        job.waits[entry] = position

    def fetch(self, job: Job, position: int, source: Entry) -> None:
        """Hold a block of the file tier for a job, and queue it for promotion."""
        self._file.hold(source, job.job_id)
        job.absent.append(Item(position, source))
        self.absent[job.job_id] = job

    def waiting(self, entry: Entry) -> list[Job]:
        names = self.by_name.keys() & entry.holders
        return [job for name in sorted(names) if entry in (job := self.by_name[name]).waits] if names else []

    def fail(self, job: Job, outcome: JobOutcome, cause: str = "") -> None:
        """Begin nothing more of a job; the first outcome counts."""
        if job.state is JobState.RUNNING:
            job.receive(JobEvent.STOPPED, outcome, cause)
            self._abandon(job, f"the job that stored it ended as {outcome}" + (f": {cause}" if cause else ""))
        self.settle(job)

    def lost(self, entry: Entry, outcome: JobOutcome, cause: str) -> None:
        """Fail the jobs that wait for a block that will not be written."""
        for job in self.waiting(entry):
            if entry in job.waits:  # it may have failed with another job that it waited for
                job.missing.append((entry.group, job.waits.pop(entry)))
                self._host.let_go(entry, job.job_id)
                self.fail(job, outcome, cause)

    def _abandon(self, job: Job, cause: str) -> None:
        """Let go of all blocks that were not posted. If another store waits for a block, it takes the block over."""
        todo, waits, absent, loaded = job.todo, job.waits, job.absent, job.loaded
        job.todo, job.waits, job.absent, job.loaded = deque(), {}, deque(), []
        self.ready[job.kind].pop(job.job_id, None)
        self.absent.pop(job.job_id, None)
        for entry in loaded:
            self._host.let_go(entry, job.job_id)
        for position, entry in absent:
            job.missing.append((entry.group, position))
            self._file.let_go(entry, job.job_id)
        for entry, position in waits.items():
            job.missing.append((entry.group, position))
            self._host.let_go(entry, job.job_id)
        for position, entry in todo:
            job.missing.append((entry.group, position))
            if job.kind is JobKind.STORE and entry.state is EntryState.WRITING:
                heir = next((other for other in self.waiting(entry) if other.kind is JobKind.STORE), None)
                if heir is not None:
                    self.do(heir, heir.waits.pop(entry), entry)
                else:
                    self._host.drop(entry)
                    self.lost(entry, JobOutcome.MISSING, cause)
            self._host.let_go(entry, job.job_id)

    def settle(self, job: Job) -> None:
        if (told := job.settle(self._num_groups)) is not None:
            self._news.append(told)
        if job.state is S.OVER and self.by_name.pop(job.job_id, None) is not None and job.is_pinning:
            if job.outcome is JobOutcome.DONE:
                self.pins[job.job_id] = [(self._host, entry) for entry in job.loaded]

    def time_out(self, now: float) -> float:
        """Fail jobs that are past their deadline; return the time of the next call."""
        if not self.by_name:
            self._deadline = math.inf
        if now >= self._deadline:
            self._deadline = math.inf
            for job in list(self.by_name.values()):
                if job.until < math.inf and job.state is JobState.RUNNING and (job.todo or job.waits or job.absent):
                    if now >= job.until:
                        self.fail(job, JobOutcome.TIMEOUT, "it was not carried out in time")
                    else:
                        self._deadline = min(self._deadline, job.until)
        return self._deadline
