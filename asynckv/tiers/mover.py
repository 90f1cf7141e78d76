"""Moves that catalogues want are carried out here, and their jobs get the ends.

A turn (`pump`) removes evicted blocks from files, hands moves to planes, and wakes callers. Blocks are the engine's
again when nothing reads or writes them any more.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from msgspec import structs

from asynckv import told
from asynckv.account.inspect import HeldBlocks
from asynckv.config import OffloadConfig
from asynckv.core.events import Ending
from asynckv.core.types import Reason, TransferId, Waiter
from asynckv.engine.driver import Driver, wait_until
from asynckv.errors import EngineClosed, Overloaded
from asynckv.geometry.blocks import BlockList
from asynckv.geometry.bounds import Int64s
from asynckv.observe.sampling import Rate
from asynckv.offload.catalogue import Positions
from asynckv.offload.job import JobEnded, JobKind, JobOutcome, JobReturned, Move, MoveKind
from asynckv.ports import CopyOp, CopyPlane, RecordsEnded, RecordsLost, TimerHandle
from asynckv.tiers.copying import Copying
from asynckv.tiers.jobs import OffloadJob, Shorter
from asynckv.tiers.shelf import Shelf

LATE_S = 1.0
"""Seconds that a load's copy may take beyond its job's deadline: it takes milliseconds, or hangs. Copies of stores wait
for those of loads, and have `timeout_s` after they are posted."""

IN_ONE_TURN = 256  # blocks that are taken, and posted, in one turn of the loop: a thousand take 2 ms for each
MAX_FAILURES = 10  # failures that are logged at once; then one per second
NO_ROOM_S = 60.0  # at least so long is between two lines of stores that found no room: where one does, so do many
COUNTERS = (
    *("lookups", "lookup_hits", "lent", "moves_failed", "moves_doubted", "records_lost", "jobs_retired"),
    *(f"files_lost.{what}" for what in ("writes", "all")),
    *(f"tokens.{what}" for what in ("looked_up", "found", "loaded", "missed")),
    *(f"{what}.{kind.value}" for kind in MoveKind for what in ("bytes", "blocks")),
    *(f"{kind.value}.{outcome.value}" for kind in JobKind for outcome in JobOutcome),
    *(f"not_stored.{why}" for why in ("no_room", "failed", "missing", "cancelled", "timeout")),
    *(f"{kind.value}.overloaded" for kind in JobKind),
)
"""Counters of an offload, for its metrics and `Offload.statistics`."""


@dataclass(slots=True)
class _Posted:
    shelf: Shelf
    move: Move
    since: float
    is_doubtful: bool = False


class Mover:
    """Carries out moves of all shelves; `own` is the rank's own."""

    def __init__(self, driver: Driver, config: OffloadConfig, copies: CopyPlane, own: Shelf) -> None:
        self._driver, self._config, self.copies = driver, config, copies
        self.shelves: tuple[Shelf, ...] = (own,)  # shelves with blocks, the rank's own first
        self.copying: dict[Shelf, Copying] = {}  # copies between the device and each shelf
        self.is_open = False  # True if shelves were opened, and belong to the loop
        self.is_copying = self._is_flushing = False
        self.cause = "it has not started yet"  # why no move begins; empty while moves may begin
        self.jobs: dict[str, OffloadJob] = {}  # jobs that have not ended, or with blocks that a copy may still touch
        self._running: Counter[JobKind] = Counter()
        self._by_request: dict[str, dict[str, OffloadJob]] = {}
        self.posted: dict[TransferId, _Posted] = {}  # moves that have not ended, including those in doubt
        self._held: dict[str, OffloadJob] = {}  # ended jobs with blocks that a copy in doubt may still touch
        self.ids = count(1)  # of jobs, pins and transfers
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.on_moved: Callable[[], None] = lambda: None  # called after the end of a move
        self._late_at = math.inf  # no copy is late before
        self._timer: TimerHandle | None = None
        self._due: asyncio.Handle | None = None  # the next turn, if one was asked for
        self._idle = asyncio.Event()
        self._failures, self._no_room = Rate(1.0, MAX_FAILURES), Rate(1 / NO_ROOM_S, 1)

    def begin(
        self,
        kind: JobKind,
        request_id: str,
        blocks: Sequence[BlockList],
        ids: Mapping[int, Int64s],
        timeout_s: float,
        chain: list[bytes],
        tokens: int,
        where: Mapping[Shelf, Positions | None],
        shorter: Shorter | None = None,
        waiter: Waiter[OffloadJob] | None = None,
    ) -> OffloadJob:
        """Take a request's blocks, and let catalogues store or load them.

        Args:
            blocks: Per group, the caller's list; empty if blocks are only pinned in host memory under the job's id.
            timeout_s: When what is not posted is given up.
            where: Which blocks of each shelf's groups; None for all that are needed.
            shorter: Says what is loaded where some of it is lost; nothing if left out.
        """
        if self.cause:
            raise EngineClosed(f"the offload takes nothing: {self.cause}")
        if self._running[kind] >= self._config.max_jobs:
            self.counts[f"{kind.value}.overloaded"] += 1
            raise Overloaded(
                f"the {kind.value} of request {request_id[:200]!r} is not taken: {self._running[kind]} {kind.value}s "
                f"wait or run already; ask again later, or raise max_jobs",
                request_id=request_id,
                reason=Reason.QUEUE_FULL,
                is_retryable=True,
            )
        core, now = self._driver.core, self._driver.clock.now()
        use: Literal["lent", "writing"] = "lent" if kind is JobKind.STORE else "writing"
        held = core.ledger.check(use, ids)
        until = now + timeout_s
        job_id = f"{kind.value}-{next(self.ids)}"
        job = OffloadJob(job_id, request_id, kind, blocks, held, now, until, chain, tokens, shorter, waiter)
        for shelf, positions in where.items():
            if kind is JobKind.STORE:
                shelf.catalogue.store(job.job_id, chain, tokens, positions=positions, until=until, is_prefix=True)
            else:
                shelf.catalogue.load(job.job_id, chain, tokens, positions=positions, until=until, is_pinning=not blocks)
            job.parts[shelf.far] = None
        core.ledger.hold(job.job_id, use, request_id, held, now)
        core.ledger.occupants[job.job_id] = self.jobs[job.job_id] = job
        self._running[kind] += 1
        self._by_request.setdefault(request_id, {})[job.job_id] = job
        if sum(map(len, held.values())) > IN_ONE_TURN:
            self.soon()
        else:
            self._driver.safely(self.pump)  # a bug in it is none of this job's, which holds its blocks
        return job

    def of_request(self, request_id: str) -> list[OffloadJob]:
        return list(self._by_request.get(request_id, {}).values())

    def unpin(self, name: str) -> None:
        was_pinned = [shelf.catalogue.unpin(name) for shelf in self.shelves]
        if any(was_pinned) and not self.cause:
            self.soon()

    async def outcome(self, job: OffloadJob) -> JobEnded:
        """Wait for a job's end; raise its error if it was given up, or blocks are held. If cancelled, give it up."""
        try:
            await job.is_over.wait()
        except asyncio.CancelledError:
            if job.ended is None:
                self.give_up([job])
            raise
        return job.how_it_ended()

    def give_up(self, jobs: Iterable[OffloadJob]) -> None:
        """Begin nothing more of some jobs, and wait for what runs."""
        loads = set()
        for job in jobs:
            job.shorter = None
            for shelf in self.shelves:
                shelf.catalogue.cancel(job.job_id)
            if job.kind is JobKind.LOAD:  # a store's copies go on: others may wait for them
                loads.add(job.job_id)
        for transfer_id, posted in self.posted.items():
            if posted.move.job_id in loads and posted.move.kind is MoveKind.LOAD:
                self.copies.cancel(transfer_id)
        self.pump()

    # -- between the catalogue and the planes --------------------------------------------------------

    def soon(self) -> None:
        self._due = self._due or asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Do what the catalogue wants, and tell what became of jobs."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self.is_open:
            return  # catalogues are another thread's still
        now = self._driver.clock.now()
        for shelf in self.shelves:
            moves = shelf.catalogue.moves(now) if self._is_moving else []
            # A place in the files that was given up for one of these moves is forgotten before it is written anew.
            shelf.forget()
            for move in moves:
                self._post(shelf, move)
        self._doubt(now)
        while told := [(shelf, news) for shelf in self.shelves for news in shelf.catalogue.news()]:
            for shelf, news in told:  # of which others may follow
                self._take_news(shelf, news, now)
            if not self.cause:
                self.soon()  # there may be room for what has waited for it
        self._retire(now)
        self._arm(now)

    @property
    def _is_moving(self) -> bool:
        """Something may be begun, if only to write to files what is in memory alone."""
        return self._is_flushing or not self.cause

    def _take_news(self, shelf: Shelf, news: JobEnded | JobReturned, now: float) -> None:
        """A part of a job has ended, or touches its caller's blocks no more."""
        if (job := self.jobs.get(news.job_id)) is None:
            return  # it was closed
        if isinstance(news, JobReturned):
            job.held_by.discard(shelf.far)
        else:
            job.parts[shelf.far] = news
            if news.is_held:
                job.held_by.add(shelf.far)
            if news.outcome is not JobOutcome.DONE:
                for other in self.shelves:  # a prefix needs all of them
                    other.catalogue.cancel(job.job_id)
        if job.ended is None and all(part is not None for part in job.parts.values()) and not self._goes_on(job):
            ended = job.end(now, self._config.held_s)
            if ended.is_held:
                self._held[job.job_id] = job
            self.counts[f"{ended.kind.value}.{ended.outcome.value}"] += 1
            self._driver.tell(self._driver.observers.offload_ended, ended.kind.value, now - job.begun_at, now)
            if job.kind is JobKind.STORE and (missed := sum(map(len, ended.missing))):
                why = JobOutcome.NO_ROOM if ended.outcome is JobOutcome.DONE else ended.outcome
                self.counts[f"not_stored.{why.value}"] += missed
                if why is JobOutcome.NO_ROOM:
                    self._log_failed(job, structs.replace(ended, outcome=why), self._no_room)
            if ended.outcome in (JobOutcome.FAILED, JobOutcome.TIMEOUT, JobOutcome.NO_ROOM):
                self._log_failed(job, ended, self._failures)
            job.tell_ended()
        if job.ended is not None and not job.held_by:
            self._release(job)

    def _goes_on(self, job: OffloadJob) -> bool:
        """Load what precedes the blocks that are lost; False if that is nothing of use."""
        parts = [part for part in job.parts.values() if part is not None]
        outcomes = {part.outcome for part in parts}
        is_lost = JobOutcome.FAILED in outcomes or JobOutcome.MISSING in outcomes
        if not is_lost or JobOutcome.TIMEOUT in outcomes or job.shorter is None or job.held_by or self.cause:
            return False
        if (less := job.shorter(job)) is None:
            return False
        for part in parts:
            if part.outcome is JobOutcome.FAILED:
                self._log_failed(job, part, self._failures)
        job.tokens, where = less
        job.parts = dict.fromkeys(shelf.far for shelf in where)
        for shelf, positions in where.items():
            shelf.catalogue.load(job.job_id, job.chain, job.tokens, positions=positions, until=job.until)
        return True

    def _doubt(self, now: float) -> None:
        """Fail jobs with overdue copies, and hold the blocks of these copies."""
        if now < self._late_at:
            return
        when = math.inf
        for transfer_id, posted in self.posted.items():
            job = self.jobs.get(posted.move.job_id)
            if job is None or posted.is_doubtful or posted.move.kind is MoveKind.PROMOTION:
                continue
            takes_s = LATE_S if job.kind is JobKind.LOAD else self._config.timeout_s
            if (late_at := max(job.until, posted.since + takes_s)) > now:
                when = min(when, late_at)
                continue
            posted.is_doubtful = True
            self.counts["moves_doubted"] += 1
            self.copies.cancel(transfer_id)  # if it has not begun, its blocks come back at once
            cause = f"a copy was begun {now - posted.since:.3g} s ago and has not ended"
            posted.shelf.catalogue.overdue(posted.move.move_id, cause)
        self._late_at = when

    def _retire(self, now: float) -> None:
        for job in self._held.values():
            if job.retired_at <= now and not job.is_retired:
                job.is_retired = True
                job.tell_returned()
                self.counts["jobs_retired"] += 1
                self._log_late(told.OffloadRetired, job)

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = [job.retired_at for job in self._held.values() if not job.is_retired]
        wakes = [shelf.catalogue.wake_at for shelf in self.shelves] if self._is_moving else []
        when = min([self._late_at, *wakes, *held])
        if when < math.inf and (self.is_copying or self._is_flushing):
            self._timer = self._driver.clock.call_at(max(when, now), self.soon)

    def _release(self, job: OffloadJob) -> None:
        """Nothing touches a job's blocks any more: they are the engine's."""
        core = self._driver.core
        core.ledger.drop(job.job_id)
        if job.ended is not None and job.ended.is_held:
            self._log_late(told.OffloadReturned, job)
        if self.jobs.pop(job.job_id, None) is not None:
            self._running[job.kind] -= 1
            same = self._by_request[job.request_id]
            del same[job.job_id]
            if not same:
                del self._by_request[job.request_id]
        self._held.pop(job.job_id, None)
        job.is_free = True
        job.tell_returned()
        self._driver.soon()  # a caller may wait until nothing is held

    def _post(self, shelf: Shelf, move: Move) -> None:
        """Hand a move to its plane; a bug that one meets does not take the others of this turn with it."""
        transfer_id, now = TransferId(next(self.ids)), self._driver.clock.now()
        self.posted[transfer_id] = _Posted(shelf, move, now)
        self._late_at = min(self._late_at, now + min(LATE_S, self._config.timeout_s))
        try:
            self._hand_over(shelf, move, transfer_id)
        except Exception as exc:
            self._driver._internal_error(exc)
            # It may have been taken over, and then something touches its blocks.
            asyncio.get_running_loop().call_soon(self._arrived, transfer_id, Ending.IN_DOUBT, repr(exc))

    def _hand_over(self, shelf: Shelf, move: Move, transfer_id: TransferId) -> None:
        match move.kind:
            case MoveKind.LOAD if not self.jobs[move.job_id].blocks:
                # It is where it was to be brought.
                asyncio.get_running_loop().call_soon(self._arrived, transfer_id, Ending.DONE, "")
            case MoveKind.LOAD | MoveKind.STORE:
                op = CopyOp.READ if move.kind is MoveKind.LOAD else CopyOp.WRITE
                pieces = self.copying[shelf].pieces(move, self.jobs[move.job_id].blocks)
                self.copies.post(transfer_id, op, shelf.far, pieces)
            case MoveKind.PROMOTION | MoveKind.WRITE_BACK:
                assert shelf.records is not None
                op = CopyOp.READ if move.kind is MoveKind.PROMOTION else CopyOp.WRITE
                shelf.records.post(transfer_id, op, shelf.block_records.of(move))

    def _arrived(self, transfer_id: TransferId, ending: Ending, cause: str) -> None:
        self._ended(transfer_id, ending, cause)
        self.pump()

    def on_copies(self) -> None:
        for news in self.copies.poll():
            self._ended(news.transfer_id, news.ending, news.cause)
        self.pump()

    def on_records(self, shelf: Shelf) -> None:
        if shelf.records is None or not self.is_open:
            return
        for news in shelf.records.poll():
            if isinstance(news, RecordsEnded):
                self._ended(news.move_id, news.ending, news.cause, news.lost)
            else:
                self._lose_files(shelf, news)
        self.pump()

    def _ended(self, transfer_id: TransferId, ending: Ending, cause: str, lost: Sequence[int] = ()) -> None:
        posted = self.posted.get(transfer_id)
        if posted is None:
            return
        move = posted.move
        if ending is Ending.IN_DOUBT:
            if posted.is_doubtful:
                return
            posted.is_doubtful = True
            self.counts["moves_doubted"] += 1
        else:
            del self.posted[transfer_id]
            self._idle.set()
        if ending is Ending.FAILED and lost:
            ending = Ending.DONE  # but for those
        if ending is Ending.DONE:
            self.counts[f"bytes.{move.kind.value}"] += move.num_bytes
            self.counts[f"blocks.{move.kind.value}"] += move.num_blocks - len(lost)
            self.counts["records_lost"] += len(lost)
            if (job := self.jobs.get(move.job_id)) is not None:
                if move.kind is MoveKind.PROMOTION:
                    job.file_bytes += move.num_bytes
                else:
                    job.num_bytes += move.num_bytes
        elif ending is not Ending.IN_DOUBT:
            self.counts["moves_failed"] += 1
        posted.shelf.catalogue.ended(move.move_id, ending, cause, lost)
        self.on_moved()

    def _lose_files(self, shelf: Shelf, news: RecordsLost) -> None:
        shelf.files_lost = news.cause
        shelf.catalogue.switch_off(reads=news.reads)
        self._idle.set()
        self.counts[f"files_lost.{'all' if news.reads else 'writes'}"] += 1
        self._driver.recorder.log(told.OffloadFilesLost(news.cause, int(news.reads)))

    def _log_failed(self, job: OffloadJob, ended: JobEnded, rate: Rate) -> None:
        now = self._driver.clock.now()
        if ended.is_held or rate.take(now):
            failed = told.OffloadFailed(
                cause=ended.outcome.value,
                detail=ended.cause,
                what=job.kind.value,
                request_id=job.request_id,
                job=job.job_id,
                blocks=sum(map(len, ended.missing)),
                held=int(ended.is_held),
                seconds=round(now - job.begun_at, 6),
            )
            self._driver.recorder.log(failed, more=rate.left_out())

    def _log_late(self, kind: type[told.OffloadLate], job: OffloadJob) -> None:
        blocks, seconds = sum(map(len, job.ids.values())), round(self._driver.clock.now() - job.ended_at, 6)
        self._driver.recorder.log(kind(job.kind.value, job.request_id, job.job_id, blocks, seconds))

    # -- its end -------------------------------------------------------------------------------------

    async def end_work(self, timeout_s: float, flush_s: float = 0.0) -> tuple[HeldBlocks, ...]:
        """Cancel waiting jobs; wait `timeout_s` for running ones, `flush_s` for writes to files; return holders."""
        driver, began = self._driver, self._driver.clock.now()
        self._is_flushing = flush_s > 0 and self.is_open
        self.give_up(self.jobs.values())
        # What still arrives is to be in files as well.
        until = began + flush_s if self._is_flushing else began
        await wait_until(
            driver.clock, self._idle, lambda: not (self.to_write_back or any(self._running_of(MoveKind.STORE))), until
        )
        self._is_flushing = False
        await wait_until(
            driver.clock, self._idle, lambda: all(x.is_doubtful for x in self.posted.values()), began + timeout_s
        )
        now = driver.clock.now()
        return tuple(hold for hold in driver.inspect.holds(now) if hold.pull_id in self.jobs)

    @property
    def to_write_back(self) -> int:
        own = self.shelves[0].catalogue
        return len(own.host.onward) + sum(move.num_blocks for move in self._running_of(MoveKind.WRITE_BACK))

    def _running_of(self, kind: MoveKind) -> Iterator[Move]:
        return (each.move for each in self.posted.values() if each.move.kind is kind and not each.is_doubtful)

    async def let_go_of_device(self, timeout_s: float) -> None:
        """End the copy plane, with `timeout_s` for its threads; raise `BackendError` if it may still write."""
        if self.is_copying:
            await self.copies.quiesce(timeout_s)
            self.copies.close()
            self.is_copying = False

    def forsake(self, kinds: Sequence[MoveKind] = tuple(MoveKind)) -> None:
        """End the moves of a plane that is gone, because nothing touches their blocks any more."""
        for transfer_id, posted in list(self.posted.items()):
            if posted.move.kind in kinds:
                self._ended(transfer_id, Ending.FAILED, "the plane was closed")
        self.pump()
        if self.cause:
            for job in list(self.jobs.values()):
                job.closed()
                self._release(job)
