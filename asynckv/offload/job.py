"""One caller's request to store or load, and the transfers that carry it out.

A *job* is what a caller asked for: it ends once, and is told how. A *move* is one transfer between two places. A
promotion or a write-back belongs to no job.

    RUNNING --all is moved--> OVER
    RUNNING --FAILED, CANCELLED--> DRAINING --nothing runs--> OVER
                                   DRAINING --only what is in doubt runs--> HELD --nothing is in doubt--> OVER

A job in doubt is told that it has failed on entering HELD, and that its blocks are its caller's again on leaving.
Transfers cannot be called back: a cancelled job ends when what was posted has ended.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from asynckv.core.types import members
from asynckv.errors import LocalProtocolError
from asynckv.offload.entry import Entry


class MoveKind(enum.StrEnum):
    """From where to where; the first matters most."""

    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Device to host."""
    PROMOTION = "promotion"
    """File to host."""
    WRITE_BACK = "write_back"
    """Host to file."""


class Piece(Struct, frozen=True, gc=False):
    """What a move carries of one group; the lists belong together, block by block."""

    group: int
    hashes: tuple[bytes, ...]  # the blocks' keys
    positions: tuple[int, ...]  # their places in the job's list of blocks; empty if the device has no part in it
    host_slots: tuple[int, ...]
    file_slots: tuple[int, ...]  # where they lie in the file tier; empty if it has no part in it


class Move(Struct, frozen=True):
    """One transfer, to be carried out and told of by `Catalogue.ended`.

    `job_id` says whose blocks of the device it reads or writes; a promotion has who asked first, a write-back none.
    """

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
    """How a job ended."""

    DONE = "done"
    """A load: all is in place. A store: all that there was room for, see `JobEnded.missing`."""
    MISSING = "missing"
    """Not all of it is stored, or not any more."""
    NO_ROOM = "no_room"
    """It must be brought from the file tier, and everything in host memory is pinned."""
    TIMEOUT = "timeout"
    FAILED = "failed"
    """A transfer failed."""
    CANCELLED = "cancelled"


class JobEnded(Struct, frozen=True):
    """A job has ended: said once of each."""

    job_id: str
    kind: JobKind
    outcome: JobOutcome
    blocks: int  # blocks that were moved for it, or by another job that it waited for
    known: int  # of a store, blocks that were stored already
    missing: tuple[tuple[int, ...], ...]  # per group, the positions that were not moved; of a MISSING load, not stored
    cause: str = ""
    is_held: bool = False  # a transfer in doubt may still touch the caller's blocks; `JobReturned` follows


class JobReturned(Struct, frozen=True):
    """Nothing touches the blocks of a job any more that ended while a transfer was in doubt."""

    job_id: str


class JobState(enum.StrEnum):
    """Where a job stands."""

    RUNNING = "running"
    DRAINING = "draining"
    HELD = "held"
    OVER = "over"


class JobEvent(enum.StrEnum):
    """What happens to a job besides the ends of its moves."""

    FAILED = "failed"
    """A transfer failed, a block is missing, there is no room, or the time is up."""
    CANCELLED = "cancelled"
    """The caller wants it no more."""


def all_is_moved(job: Job) -> bool:
    """All is moved."""
    return not (job.todo or job.waits or job.absent or job.running or job.doubtful)


def nothing_runs(job: Job) -> bool:
    """Nothing runs."""
    return not (job.running or job.doubtful)


def only_what_is_in_doubt_runs(job: Job) -> bool:
    """Only what is in doubt runs."""
    return not job.running and bool(job.doubtful)


def nothing_is_in_doubt(job: Job) -> bool:
    """Nothing is in doubt."""
    return not job.doubtful


S, E = members(JobState), members(JobEvent)
ON_EVENT: Mapping[JobState, Mapping[JobEvent, JobState]] = {
    S.RUNNING: {E.FAILED: S.DRAINING, E.CANCELLED: S.DRAINING},
    S.DRAINING: {E.FAILED: S.DRAINING, E.CANCELLED: S.DRAINING},
    S.HELD: {E.CANCELLED: S.HELD},
    S.OVER: {},
}

WHEN: Mapping[JobState, Mapping[Callable[[Job], bool], JobState]] = {
    S.RUNNING: {all_is_moved: S.OVER},
    S.DRAINING: {nothing_runs: S.OVER, only_what_is_in_doubt_runs: S.HELD},
    S.HELD: {nothing_is_in_doubt: S.OVER},
    S.OVER: {},
}
"""Looked at after every event and every end of a move; the first that holds counts."""


class Item(NamedTuple):
    position: int
    entry: Entry


@dataclass(slots=True, eq=False)
class Job:
    """The state machine of one job. Only the catalogue writes its fields."""

    job_id: str
    kind: JobKind
    until: float = math.inf  # when it fails unless all has been posted
    is_pinning: bool = False  # what it has loaded stays held until it is over, and then, if all is there, as a pin
    state: JobState = S.RUNNING
    outcome: JobOutcome = JobOutcome.DONE
    cause: str = ""
    todo: deque[Item] = field(default_factory=deque)  # what can be moved: READY blocks of a load, WRITING of a store
    waits: dict[Entry, int] = field(default_factory=dict)  # blocks that others are writing -> their positions
    absent: deque[Item] = field(default_factory=deque)  # what is in files alone, and has no slot in host memory yet
    running: set[int] = field(default_factory=set)  # moves that are posted and read or write the caller's blocks
    doubtful: set[int] = field(default_factory=set)  # those among the posted whose end is in doubt
    holding: set[Entry] = field(default_factory=set)  # in any tier
    loaded: list[Entry] = field(default_factory=list)  # what is held because it `is_pinning`
    missing: list[tuple[int, int]] = field(default_factory=list)  # `(group, position)` that will not be moved
    blocks: int = 0
    known: int = 0

    @property
    def is_over(self) -> bool:
        return self.state is S.OVER

    def receive(self, event: JobEvent, outcome: JobOutcome, cause: str = "") -> None:
        """Take an event; the first outcome counts. An event of a job that is over is a `LocalProtocolError`."""
        after = ON_EVENT[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.name} while job {self.job_id!r} is {self.state.name}")
        if self.state is S.RUNNING:
            self.outcome, self.cause = outcome, cause
        self.state = after

    def settle(self, num_groups: int) -> JobEnded | JobReturned | None:
        """Act on whatever condition holds; what is to be told."""
        before = self.state
        after = next((after for condition, after in WHEN[before].items() if condition(self)), before)
        if after is before:
            return None
        self.state = after
        if before is S.HELD:
            return JobReturned(self.job_id)
        missing: list[list[int]] = [[] for _ in range(num_groups)]
        for group, position in self.missing:
            missing[group].append(position)
        return JobEnded(
            self.job_id,
            self.kind,
            self.outcome,
            self.blocks,
            self.known,
            tuple(tuple(sorted(positions)) for positions in missing),
            self.cause,
            after is S.HELD,
        )
