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
    """What a move carries of one group; the lists belong together, block by block.

    Attributes:
        hashes: The blocks' keys.
        positions: Their places in the list of blocks of the job's request; empty if the device has no part in it.
        file_slots: Where they lie in the file tier; empty if it has no part in it.
    """

    group: int
    hashes: tuple[bytes, ...]
    positions: tuple[int, ...]
    host_slots: tuple[int, ...]
    file_slots: tuple[int, ...]


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
    """A job has ended: said once of each.

    Attributes:
        blocks: Blocks that were moved for it, or by another job that it waited for.
        known: Of a store, blocks that were stored already.
        missing: Per group, the positions that were not moved; if a load moved nothing because it is MISSING, those that
            are not stored.
        is_held: A transfer in doubt may still touch the caller's blocks; `JobReturned` follows.
    """

    job_id: str
    kind: JobKind
    outcome: JobOutcome
    blocks: int
    known: int
    missing: tuple[tuple[int, ...], ...]
    cause: str = ""
    is_held: bool = False


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


class Job:
    """The state machine of one job. Its fields are everybody's to read, and only the catalogue's to write.

    Attributes:
        todo: What can be moved at once: of a load, READY blocks; of a store, WRITING ones that it has to fill.
        waits: Blocks that another store or a promotion is writing -> their positions.
        absent: What is in the file tier alone, and has no slot in host memory yet.
        running: Moves that are posted and read or write the caller's blocks.
        doubtful: Those among the posted whose end is in doubt.
        holding: What it holds, in any tier.
        missing: `(group, position)` that will not be moved.
        until: When it fails unless all has been posted.
        is_pinning: What it has loaded stays held until it is over, and after that, if all is there, as a pin of its
            name.
        loaded: What is held so.
    """

    __slots__ = (
        "absent",
        "blocks",
        "cause",
        "doubtful",
        "holding",
        "is_pinning",
        "job_id",
        "kind",
        "known",
        "loaded",
        "missing",
        "outcome",
        "running",
        "state",
        "todo",
        "until",
        "waits",
    )

    def __init__(self, job_id: str, kind: JobKind, until: float = math.inf, *, is_pinning: bool = False) -> None:
        self.job_id, self.kind, self.until, self.is_pinning = job_id, kind, until, is_pinning
        self.state = S.RUNNING
        self.outcome, self.cause = JobOutcome.DONE, ""
        self.todo: deque[Item] = deque()
        self.waits: dict[Entry, int] = {}
        self.absent: deque[Item] = deque()
        self.running: set[int] = set()
        self.doubtful: set[int] = set()
        self.holding: set[Entry] = set()
        self.loaded: list[Entry] = []
        self.missing: list[tuple[int, int]] = []
        self.blocks = self.known = 0

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
