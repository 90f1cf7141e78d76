"""The thread of the file tier: it takes moves, passes batches of records through the disk, and reports endings.

Requests of the loop and answers to it go through one lock, which either side holds for moments only. Everything else
belongs to the thread: the batches that run, the entries of records, and the changes that the index has not seen yet.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

from asynckv.arguments import shown
from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.aside import end_at_exit
from asynckv.edges.files.index import MAX_CHANGES, MAX_KEY, FileIndex, IndexRow, checksum, now
from asynckv.edges.files.io import ALIGN, Extent, FileIO, FileTooShort, transfer
from asynckv.edges.files.store import Segments, explained_index
from asynckv.edges.folders import FULL, explained
from asynckv.edges.nic.staging import bytes_at
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.offload.keys import short
from asynckv.ports import Record, RecordNews, RecordsEnded, RecordsLost

BATCH_BYTES = 8 << 20  # per batch, unless one record is larger: still in the CPU's caches when it is checked
IN_FLIGHT = 4  # batches at a time, where the back end queues them
MAX_PENDING = 256  # changes of the index that one transaction takes
COMMIT_S = 0.02  # seconds that a change of the index waits for others
LOOK_S = 1.0  # seconds after a write within which the files are checked for removal
MAX_ERRORS = 8  # failed places in a row after which a tier takes no more writes, or no more reads
NAPS_S = 0.00005, 0.0004  # first and longest pause between two checks of queued batches
NO_MORE = {*FULL, errno.EROFS}  # errors after which no later write will succeed


class Takes(IntEnum):
    NOTHING = 0
    READS = 1
    ALL = 2


@dataclass(slots=True, eq=False)
class _RecordMove:
    move_id: TransferId
    is_write: bool
    records: Sequence[Record]
    posted_at: float
    next: int = 0  # the first record that is in no batch yet
    running: int = 0  # batches
    lost: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)  # places of written records
    cause: str = ""
    is_void: bool = False  # True if it was given up, so that none of its records counts
    is_told_doubt: bool = False

    def void(self, cause: str) -> None:
        self.is_void, self.next, self.cause = True, len(self.records), cause

    @property
    def is_over(self) -> bool:
        return not self.running and self.next == len(self.records)


@dataclass(slots=True, eq=False)
class _Batch:
    move: _RecordMove
    positions: list[int]
    sums: list[int] = field(default_factory=list)


class Worker:
    """The thread, and the state that it shares with the loop under `_gate`.

    Args:
        segments: The files; the thread closes them at its end, with `index` and `io`.
        index, only_read: None, and the reason, if the directory is only read.
        slow_s: Seconds that a read, or a call to the system, may take.
        wake: Called when there is news, from the thread or from the loop.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        segments: Segments,
        index: FileIndex | None,
        only_read: str,
        io: FileIO,
        entries: dict[int, IndexRow],
        slow_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._memory, self._view, self._segments = memory, bytes_at(memory).data, segments
        self._folder, self.is_direct = segments.path(0).parent, segments.is_direct
        self._index, self._io, self._slow_s, self._wake = index, io, slow_s, wake
        self._entries = entries  # by place; only the thread changes it
        self._gate = threading.Condition()
        self._moves: dict[TransferId, _RecordMove] = {}
        self._queues: dict[bool, deque[_RecordMove]] = {False: deque(), True: deque()}
        self._forgotten: list[int] = []
        self._news: list[RecordNews] = []
        self._takes, self._cause = Takes.ALL if index is not None else Takes.READS, only_read
        self._is_stopping = False
        self._busy_since: float | None = None  # start of the present system call, or of the oldest batch in flight
        # From here on, only the thread uses these.
        self._batches: dict[int, _Batch] = {}
        self._number = 0
        self._nap_s = NAPS_S[0]
        self._stored: dict[int, IndexRow] = {}
        self._dropped: set[int] = set()  # with `_stored`, the changes that the index has not been told yet
        self._pending_since = 0.0
        self._failing: dict[bool, set[int]] = {False: set(), True: set()}  # places, since the last success
        self._looked_at, self._is_unseen = 0.0, False  # last check for removed files, and whether one is due
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"{name}-files", daemon=True)
        end_at_exit(self)
        self._thread.start()

    # -- called by the loop --------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take_news(self) -> list[RecordNews]:
        with self._gate:
            news, self._news = self._news, []
        return news

    def post(self, move_id: TransferId, is_write: bool, records: Sequence[Record]) -> None:
        wrong = next((cause for cause in map(self._wrong, records) if cause), "")
        with self._gate:
            assert move_id not in self._moves, f"move {move_id} has not ended"
            move = self._moves[move_id] = _RecordMove(move_id, is_write, tuple(records), time.monotonic())
            self._counts["moves"] += 1
            is_refused = self._takes < (Takes.ALL if is_write else Takes.READS)
            if cause := wrong or (self._cause if is_refused else "closed" if self._is_stopping else ""):
                move.void(cause)
                self._settle(move)
            else:
                self._queues[is_write].append(move)
                self._gate.notify()

    def _wrong(self, record: Record) -> str:
        key, near, far, size = record[:4]
        if size <= 0 or near % ALIGN or far % ALIGN or size % ALIGN:
            return f"a record of {size} bytes at {near} and {far}: all must be multiples of {ALIGN}"
        if near < 0 or near + size > self._memory.length or far < 0 or far + size > self._segments.num_bytes:
            return f"a record of {size} bytes at {near} and {far} is outside of the memory or the files"
        return f"a key of {len(key)} bytes; {MAX_KEY} at most" if len(key) > MAX_KEY else ""

    def forget(self, places: Iterable[int]) -> None:
        with self._gate:
            self._forgotten += places
            self._gate.notify()

    def look(self) -> bool:
        """Give up moves and calls that take too long; return True if there is a reason to look again."""
        at = time.monotonic()
        with self._gate:
            if self._busy_since is not None and at - self._busy_since >= self._slow_s:
                self._take(Takes.NOTHING, f"the disk under {self._folder} has not answered for {self._slow_s:g} s")
            is_off = self._takes is Takes.NOTHING
            for move in list(self._moves.values()):
                # A write cannot be late, because no request waits for it and reads go before it.
                is_late = not move.is_write and at - move.posted_at >= self._slow_s
                if is_late or is_off:
                    if not move.is_void:
                        move.void(self._cause if is_off else f"it took more than {self._slow_s:g} s")
                        self._counts["late"] += 1
                    if move.running and not move.is_told_doubt:
                        move.is_told_doubt = True
                        self._news.append(RecordsEnded(move.move_id, Ending.IN_DOUBT, move.cause))
                        self._wake()
                    self._settle(move)
            return bool(self._moves)

    def stop(self) -> None:
        with self._gate:
            self._is_stopping = True
            self._gate.notify()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the end; moves that had not ended are `FAILED`. Raise `BackendError` if the thread hangs."""
        if not self.wait(timeout_s):
            raise BackendError(
                f"the disk under {self._folder} has not answered in time: memory that it reads into may still be "
                f"written; keep it, and call close() again"
            )
        # The thread has closed both already, unless a batch was still running.
        self._io.close()
        self._segments.close()
        with self._gate:
            for move in list(self._moves.values()):
                move.void(move.cause or "the file tier was closed")
                move.running = 0
                self._settle(move)

    def statistics(self) -> dict[str, int]:
        with self._gate:
            return {
                **self._counts,
                "running": len(self._moves),
                "records": len(self._entries),
                "is_read_only": int(self._takes < Takes.ALL),
                "is_off": int(self._takes is Takes.NOTHING),
            }

    # -- under the lock, on either side --------------------------------------------------------------

    def _settle(self, move: _RecordMove) -> None:
        if not move.is_over or self._moves.pop(move.move_id, None) is None:
            return
        if move.is_void:
            self._forgotten += move.written
            self._news.append(RecordsEnded(move.move_id, Ending.FAILED, move.cause))
        elif move.lost:
            self._news.append(RecordsEnded(move.move_id, Ending.FAILED, move.cause, tuple(sorted(move.lost))))
        else:
            self._news.append(RecordsEnded(move.move_id, Ending.DONE))
        self._wake()

    def _take(self, takes: Takes, cause: str) -> None:
        """Take only `takes` from now on, unless it is less already, and report that once."""
        if self._takes <= takes:
            return
        self._takes, self._cause = takes, cause
        self._news.append(RecordsLost(cause, takes is Takes.NOTHING))
        for is_write in (True, False) if takes is Takes.NOTHING else (True,):
            for move in self._queues[is_write]:
                if not move.is_void:
                    move.void(cause)
                    self._settle(move)
            self._queues[is_write].clear()
        self._wake()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as exc:  # moves must end whatever the exception is
            with self._gate:
                self._take(Takes.NOTHING, f"the thread of the file tier broke: {exc!r}")
        for far in self._forgotten:
            self._drop(far)
        self._commit()
        # Closing may wait for the disk, so the thread does it and not the loop.
        if self._index is not None:
            with suppress(sqlite3.Error):
                self._index.close()
        with suppress(BackendError):  # batches that still run need their files
            self._io.close()
            self._segments.close()

    def _work(self) -> None:
        while True:
            with self._gate:
                if not self._wait():
                    return
                forgotten, self._forgotten = self._forgotten, []
                batch = self._next_batch() if len(self._batches) < IN_FLIGHT else None
                if batch is not None or self._batches:
                    self._busy_since = self._busy_since or time.monotonic()
            for far in forgotten:
                self._drop(far)
            if batch is not None:
                self._begin(batch)
            self._collect()
            if self._is_due():
                self._commit()
            self._look_for_files()

    def _wait(self) -> bool:
        """Wait for work; return False if there will be none any more. The lock is held."""
        if self._is_stopping and not self._batches:
            return False
        if self._forgotten or (len(self._batches) < IN_FLIGHT and any(self._queues.values())):
            return True
        if self._batches:
            self._gate.wait(self._nap_s)
            self._nap_s = min(2 * self._nap_s, NAPS_S[1])
        else:
            self._busy_since = None
            self._gate.wait(COMMIT_S if self._stored or self._dropped else LOOK_S if self._is_unseen else None)
        return True

    def _next_batch(self) -> _Batch | None:
        """Take records of the oldest move that reads, or else of the oldest that writes. The lock is held."""
        if self._is_stopping:
            return None
        for queue in self._queues.values():
            while queue:
                move = queue[0]
                positions: list[int] = []
                size = 0
                while move.next < len(move.records):
                    size += move.records[move.next].size
                    if positions and size > BATCH_BYTES:
                        break
                    positions.append(move.next)
                    move.next += 1
                if move.next == len(move.records):
                    queue.popleft()
                if positions:
                    move.running += 1
                    return _Batch(move, positions)
                self._settle(move)
        return None

    def _begin(self, batch: _Batch) -> None:
        move = batch.move
        if move.is_write:
            for i in batch.positions:
                self._drop(move.records[i].far)
            # Overwritten records are forgotten first, because a process that is killed meanwhile must not leave an
            # index that declares half-written bytes whole.
            if self._dropped and not self._commit():
                with self._gate:
                    move.void(self._cause)
                batch.positions = []
            self._is_unseen = True
        else:
            known = []
            for i in batch.positions:
                record = move.records[i]
                entry = self._entries.get(record.far)
                if entry is not None and (entry.key, entry.size) == (record.key, record.size):
                    known.append(i)
                    batch.sums.append(entry.checksum)
                else:
                    self._lose(move, i, "it is not stored there", "missing")
            batch.positions = known
        if not batch.positions:
            self._end(batch)
            return
        extents = [extent for i in batch.positions for extent in self._extents(move.records[i])]
        self._number += 1
        self._nap_s = NAPS_S[0]
        self._batches[self._number] = batch
        self._io.submit(self._number, extents, move.is_write)
        if move.is_write:  # computed while the disk writes
            batch.sums += [self._sum(move.records[i]) for i in batch.positions]

    def _sum(self, record: Record) -> int:
        return checksum(record.key, self._view[record.near : record.near + record.size])

    def _extents(self, record: Record) -> Iterable[Extent]:
        return self._segments.extents(record.near, record.far, record.size)

    def _collect(self) -> None:
        """Finish ended batches; after a failure end all that run, and repeat them by system calls."""
        failed = False
        for number, is_good in self._io.collect():
            if is_good:
                self._finish(self._batches.pop(number))
            failed = failed or not is_good
        if not failed:
            return
        self._counts["resets"] += 1
        try:
            self._io.reset()
            for number, is_good in self._io.collect():
                if is_good:
                    self._finish(self._batches.pop(number))
        except BackendError as exc:
            # Running batches may still write, so they stay with their moves, which are in doubt.
            with self._gate:
                self._take(Takes.NOTHING, str(exc))
            raise
        while self._batches:
            self._retry(self._batches.pop(min(self._batches)))

    def _retry(self, batch: _Batch) -> None:
        move, good, sums = batch.move, [], []
        for i, found in zip(batch.positions, batch.sums, strict=True):
            with self._gate:
                self._busy_since = time.monotonic()
            try:
                for extent in self._extents(move.records[i]):
                    transfer(self._view, extent, move.is_write)
            except OSError as exc:
                self._trouble(move, i, exc)
            else:
                self._failing[move.is_write].clear()
                good.append(i)
                sums.append(found)
        batch.positions, batch.sums = good, sums
        self._finish(batch)

    def _finish(self, batch: _Batch) -> None:
        move, at = batch.move, now()
        for i, expected in zip(batch.positions, batch.sums, strict=True):
            record = move.records[i]
            if move.is_write:
                entry = IndexRow(record.far, record.size, record.key, expected, record.layout, record.tag, at)
                self._entries[record.far] = self._stored[record.far] = entry
                self._dropped.discard(record.far)
                self._pending_since = self._pending_since or time.monotonic()
                move.written.append(record.far)
            elif self._sum(record) != expected:
                self._lose(move, i, "its bytes are not what was stored", "corrupted")
                continue
            self._failing[move.is_write].clear()
            self._counts["records_written" if move.is_write else "records_read"] += 1
            self._counts["bytes_written" if move.is_write else "bytes_read"] += record.size
        self._end(batch)

    def _end(self, batch: _Batch) -> None:
        self._nap_s = NAPS_S[0]
        with self._gate:
            batch.move.running -= 1
            self._busy_since = None
            self._settle(batch.move)

    def _lose(self, move: _RecordMove, i: int, cause: str, counted: str) -> None:
        self._counts[counted] += 1
        record = move.records[i]
        move.lost.append(i)
        number, offset = divmod(record.far, self._segments.segment_bytes)
        where = f"at {offset} of {self._segments.path(number)}"
        move.cause = move.cause or f"group {shown(record.tag)}, hash {short(record.key)}..., {where}: {cause}"
        if not move.is_write and (entry := self._entries.get(record.far)) is not None and entry.key == record.key:
            self._drop(record.far)

    def _trouble(self, move: _RecordMove, i: int, exc: OSError) -> None:
        word, what = exc.strerror or str(exc), "writing" if move.is_write else "reading"
        self._lose(move, i, f"{what} failed: {word}", "io_errors")
        failing = self._failing[move.is_write]
        if not isinstance(exc, FileTooShort):
            failing.add(move.records[i].far)
        with self._gate:
            if move.is_write and exc.errno in NO_MORE:
                why = explained(self._folder, exc)
                self._take(Takes.READS, f"{self._folder} takes no more writes: {why}, and start again")
            elif len(failing) >= MAX_ERRORS:
                # A disk that fails only on writes still serves its records.
                self._take(
                    Takes.READS if move.is_write else Takes.NOTHING,
                    f"{self._folder}: {what} failed for {len(failing)} records in a row, the last: {word}; see to the "
                    f"disk, and start again",
                )

    # -- the index -----------------------------------------------------------------------------------

    def _drop(self, far: int) -> None:
        if self._entries.pop(far, None) is not None and self._index is not None:
            self._stored.pop(far, None)
            self._dropped.add(far)
            self._pending_since = self._pending_since or time.monotonic()

    def _look_for_files(self) -> None:
        """Check, soon after a write, for removed files: records in them would be lost when the process ends."""
        at = time.monotonic()
        if self._index is not None and self._is_unseen and at - self._looked_at >= LOOK_S:
            self._looked_at, self._is_unseen = at, False
            gone = ""
            with suppress(OSError):  # this process may not look
                gone = self._segments.removed() or self._index.removed()
            if gone:
                with self._gate:
                    self._take(
                        Takes.READS,
                        f"{gone} was removed from {self._folder} while it was in use, so no more is stored there; the "
                        f"space is freed when this process ends: start again, and remove only directories without an "
                        f"owner (asynckv offload prune)",
                    )

    def _is_due(self) -> bool:
        number = len(self._stored) + len(self._dropped)
        return number >= MAX_PENDING or (number > 0 and time.monotonic() - self._pending_since >= COMMIT_S)

    def _commit(self) -> bool:
        """Write the changes to the index; return False if that failed. Then new records are known to this process only,
        and no more are taken.
        """
        stored, dropped, index = self._stored, self._dropped, self._index
        self._stored, self._dropped, self._pending_since = {}, set(), 0.0
        if index is None or not (stored or dropped):
            return True
        with self._gate:
            self._busy_since = self._busy_since or time.monotonic()
        try:
            places = sorted(dropped)
            while len(places) > MAX_CHANGES:
                index.change({}, places[-MAX_CHANGES:])
                del places[-MAX_CHANGES:]
            index.change(stored, places)
        except sqlite3.Error as exc:
            with self._gate:
                cause = explained_index(self._folder, exc)
                self._take(Takes.READS, f"the index of {self._folder} cannot be written: {cause}, and start again")
            return False
        self._counts["commits"] += 1
        return True
