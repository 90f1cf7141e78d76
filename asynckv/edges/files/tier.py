"""The record plane on files: blocks that outlive the process, in a directory of its own.

A thread does the work (`worker.py`); the loop never waits for the disk. A record is served only if a checksum over
its bytes and its key matches. So nothing depends on the order in which bytes and index reach the disk.

A tier that is *only read* takes a snapshot of a directory that may belong to another process, without its lock, and
changes nothing there. Records that the owner overwrites are misses here.

A failing disk causes misses. A failed batch is tried again record by record. If the disk is full, or writes fail in a
row, the tier takes no more writes. If reads fail in a row, or a call does not return within `slow_s`, the tier takes
nothing any more. Each of the two is reported once. A read that waits for longer than `slow_s` is a miss as well.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import anyio.to_thread

from asynckv.arguments import MAX_INTEGER, integer
from asynckv.core.events import Ending
from asynckv.core.types import TransferId
from asynckv.edges.files.index import DamagedIndex, FileIndex, IndexRow, Said, read_index
from asynckv.edges.files.io import ALIGN, FileIO, no_collection
from asynckv.edges.files.store import SEGMENT_BYTES, NoRoom, OwnerLock, Segments, check_room
from asynckv.edges.files.worker import Worker
from asynckv.edges.folders import check_folder
from asynckv.errors import BackendError, ConfigError
from asynckv.geometry.layout import Memory
from asynckv.ports import CopyOp, Record, RecordNews, RecordsEnded, RecordsLost, StoredRecord

SLOW_S = 10.0
CLOSE_S = 10.0
Opened = tuple[FileIndex | None, Segments, dict[int, IndexRow]]  # records by place


class FileTier:
    """A `RecordPlane` in one directory.

    Args:
        folder: The directory; made if it does not exist.
        num_bytes: Bytes that all records together may take on the disk. Rounded down to a multiple of 4096.
        name: Name of its NIXL agents, unique per process start.
        open_io: Makes the object that moves the bytes; NIXL's if left out.
        direct: True to bypass the page cache where the file system can.
        slow_s: Seconds after which a read is a miss, and after which a call to the disk ends the tier.
        segment_bytes: Bytes of one file; a directory keeps the size that it was made with.
        read_only: True to read the records of other processes, which may still own the directory, and write nothing.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        num_bytes: int,
        *,
        name: str = "tier",
        open_io: Callable[[str, Memory, Mapping[int, int]], FileIO] | None = None,
        direct: bool = True,
        slow_s: float = SLOW_S,
        segment_bytes: int = SEGMENT_BYTES,
        read_only: bool = False,
    ) -> None:
        self._folder = Path(folder)
        self._num_bytes = integer("num_bytes", num_bytes, ALIGN, MAX_INTEGER, ConfigError) // ALIGN * ALIGN
        self._segment_bytes = integer("segment_bytes", segment_bytes, ALIGN, MAX_INTEGER, ConfigError) // ALIGN * ALIGN
        if not slow_s > 0:
            raise ConfigError(f"slow_s is {slow_s}; it must be more than 0 seconds")
        self._name, self._open_io, self._direct, self._slow_s = name, open_io or _nixl_files, direct, float(slow_s)
        self._read_only = read_only
        self._starts = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_ready: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._close_by: float | None = None  # deadline of `close`, if `quiesce` has begun the wait off the loop
        self._worker: Worker | None = None
        self._lock: OwnerLock | None = None
        self._news: list[RecordNews] = []
        self.found: Counter[str] = Counter()  # counts of the start: records found, and records dropped by cause

    def start(
        self,
        memory: Memory,
        on_ready: Callable[[], None],
        loop: asyncio.AbstractEventLoop | None = None,
        layouts: Mapping[str, bytes] = MappingProxyType({}),
    ) -> list[StoredRecord]:
        if self._worker is not None:
            raise BackendError(f"the file tier in {self._folder} has not ended; `close()` first")
        if memory.kind != "cpu" or memory.base % ALIGN:
            raise BackendError(f"records go to and from host memory that begins at a multiple of {ALIGN}")
        self._loop, self._on_ready, self._layouts = loop or asyncio.get_running_loop(), on_ready, layouts
        self._starts += 1
        self.found = Counter(index_damaged=0)
        self._news.clear()
        with ExitStack() as undo:
            undo.callback(self._let_go)
            (index, segments, entries), only_read = self._open_as_can_be()
            undo.callback(segments.close)
            undo.callback(index.close if index is not None else lambda: None)
            lengths = {fd: size for fd, size in zip(segments.fds, segments.lengths, strict=True) if fd >= 0}
            io = self._open_io(f"{self._name}-{self._starts}", memory, lengths)
            undo.pop_all()
        self._worker = Worker(self._name, memory, segments, index, only_read, io, entries, self._slow_s, self._wake)
        if only_read and not self._read_only:
            self._news.append(RecordsLost(only_read, reads=False))
            self._wake()
        with no_collection():
            oldest_first = sorted(entries.values(), key=lambda entry: entry.stored_at)
            return [StoredRecord(e.key, e.far, e.size, e.layout, e.tag) for e in oldest_first]

    def _open_as_can_be(self) -> tuple[Opened, str]:
        """Open the directory, for writing if possible; return it and the reason if it is only read."""
        if self._read_only:
            check_folder(self._folder)
            return self._open(is_owned=False), "the file tier was opened to be read only"
        self._lock = OwnerLock(self._folder)
        try:
            return self._open(is_owned=True), ""
        except DamagedIndex:
            FileIndex.set_aside(self._folder)
            self.found["index_damaged"] = 1
            return self._open(is_owned=True), ""
        except NoRoom as exc:  # other writers have filled the disk, but stored records are still served
            with suppress(BackendError):
                opened = self._open(is_owned=False)
                if opened[2]:
                    return opened, f"{exc}; until then it is only read"
                opened[1].close()
            raise

    def _open(self, is_owned: bool) -> Opened:
        folder, index = self._folder, None
        with ExitStack() as undo:
            if is_owned:
                check_room(folder, self._num_bytes)
                index = FileIndex(folder)
                undo.callback(index.close)
            said = index.said() if index is not None else read_index(folder)
            size = said.facts.get("segment_bytes", 0)
            if size < ALIGN or size % ALIGN:
                size = self._segment_bytes
            segments = Segments(folder, self._num_bytes, size, direct=self._direct, is_owned=is_owned)
            undo.callback(segments.close)
            entries, bad = self._recover(said, segments)
            if index is not None:
                index.prepare(bad, self._layouts, segment_bytes=size, num_bytes=self._num_bytes)
            undo.pop_all()
        return index, segments, entries

    def _recover(self, said: Said, segments: Segments) -> tuple[dict[int, IndexRow], list[int]]:
        """Return the records that can still be there, the newest where some overlap; and the places of all others."""
        entries, malformed = said.entries, said.malformed
        self.found["malformed"] = len(malformed)
        kept = [entry for entry in entries if segments.has_kept(entry.far, entry.size)]
        self.found["beyond"] = sum(entry.far + entry.size > segments.num_bytes for entry in entries)
        self.found["missing"] = len(entries) - len(kept) - self.found["beyond"]
        doubled = {
            min((a, b), key=lambda each: each.stored_at).far for a, b in pairwise(kept) if a.far + a.size > b.far
        }
        self.found["overlapping"] = len(doubled)
        good = {entry.far: entry for entry in kept if entry.far not in doubled}
        self.found["records"] = len(good)
        self.found["bytes"] = sum(entry.size for entry in good.values())
        return good, [*malformed, *(entry.far for entry in entries if entry.far not in good)]

    async def quiesce(self, timeout_s: float | None = None) -> None:
        if self._worker is not None:
            self._worker.stop()
            in_time = CLOSE_S if timeout_s is None else timeout_s
            self._close_by = time.monotonic() + in_time
            await anyio.to_thread.run_sync(self._worker.wait, in_time)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._worker is not None:
            self._worker.stop()
            deadline = self._close_by if self._close_by is not None else time.monotonic() + CLOSE_S
            self._close_by = None
            self._worker.join(max(0.0, deadline - time.monotonic()))
            self._news += self._worker.take_news()
            self._worker = None
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        if self._worker is None:
            self._news.append(RecordsEnded(move_id, Ending.FAILED, "the file tier is closed"))
            self._wake()
            return
        self._worker.post(move_id, op is CopyOp.WRITE, records)
        self._arm()

    def forget(self, places: Iterable[int]) -> None:
        if self._worker is not None:
            self._worker.forget(places)

    def poll(self) -> list[RecordNews]:
        news, self._news = self._news, []
        if self._worker is not None:
            news += self._worker.take_news()
        return news

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ready)

    def _ready(self) -> None:
        if self._news or (self._worker is not None and self._worker.has_news):
            self._on_ready()

    def _arm(self) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(self._slow_s / 4, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._worker is not None and self._worker.look():
            self._arm()

    def statistics(self) -> dict[str, int]:
        found = {f"found_{name}": number for name, number in tuple(self.found.items())}
        return found | (self._worker.statistics() if self._worker is not None else {})

    def describe(self) -> dict[str, str]:
        is_direct = self._worker is not None and self._worker.is_direct
        return {
            "folder": str(self._folder),
            "back_end": "NIXL POSIX",
            "page_cache": "bypassed" if is_direct else "used",
        }


def _nixl_files(name: str, memory: Memory, fds: Mapping[int, int]) -> FileIO:
    from asynckv.edges.files.nixl import NixlFiles

    return NixlFiles(name, memory, fds)
