"""What `asynckv offload` does with a directory of stored blocks; it reads with system calls, and needs no NIXL."""

from __future__ import annotations

import mmap
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from asynckv.edges.file_index import ALIGN, INDEX, Entry, FileIndex, Said, checksum, damaged, open_index, read_index
from asynckv.edges.file_io import transfer
from asynckv.edges.file_store import Owner, OwnerLock, owner_of, segment_extents, segment_path
from asynckv.errors import ConfigError

__all__ = ["Checked", "Folder", "Kind", "Pruned", "check", "look", "prune_folder"]

MAX_NAMED = 8
"""Directories that are named to whoever named the one above."""

MAX_RECORD = 1 << 30
"""Bytes that are read at a time, at most: a record of more is a lie of the index."""


class Kind(Struct, frozen=True):
    """Blocks of one group in one layout."""

    tag: str
    layout: str
    blocks: int
    bytes: int


class Folder(Struct, frozen=True, kw_only=True):
    """What a directory holds."""

    schema: str = "asynckv.offload.inspect/1"
    folder: str
    owner: Owner | None
    is_live: bool
    """The owner has it now."""
    num_bytes: int
    """Of the range that the last owner divided."""
    segments: int
    bytes_on_disk: int
    blocks: int
    bytes_stored: int
    oldest: str
    newest: str
    malformed: int
    kinds: tuple[Kind, ...]


class Checked(Struct, frozen=True, kw_only=True):
    """What a check found."""

    schema: str = "asynckv.offload.verify/1"
    folder: str
    blocks: int
    sound: int
    bad: dict[str, int]
    """How many are not, by cause."""
    dropped: bool
    bytes_read: int
    seconds: float


class Pruned(Struct, frozen=True, kw_only=True):
    """What was forgotten."""

    schema: str = "asynckv.offload.prune/1"
    folder: str
    blocks: int
    blocks_before: int
    bytes_freed: int


def look(folder: Path) -> Folder:
    """Say what a directory holds, whoever has it; changes nothing.

    Raises:
        ConfigError: It is no directory of stored blocks.
        BackendError: It is of another format, or damaged.
    """
    _expect(folder)
    owner, is_live = owner_of(folder)
    said = read_index(folder)
    entries = said.entries
    kinds: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        kinds[entry.tag, entry.layout] += 1
        sizes[entry.tag, entry.layout] += entry.size
    segments = list(folder.glob("segment-*.kv"))
    return Folder(
        folder=str(folder),
        owner=owner,
        is_live=is_live,
        num_bytes=said.facts.get("num_bytes", 0),
        segments=len(segments),
        bytes_on_disk=sum(_on_disk(path) for path in segments),
        blocks=len(entries),
        bytes_stored=sum(sizes.values()),
        oldest=_when(min((entry.stored_at for entry in entries), default=0)),
        newest=_when(max((entry.stored_at for entry in entries), default=0)),
        malformed=len(said.malformed),
        kinds=tuple(Kind(tag, layout, kinds[tag, layout], sizes[tag, layout]) for tag, layout in sorted(kinds)),
    )


def check(folder: Path, *, drop: bool, progress: Callable[[int, int], None] = lambda done, total: None) -> Checked:
    """Read every block, and compare it with its checksum.

    Raises:
        ConfigError: It is no directory of stored blocks.
        BackendError: A process has it, or the index is damaged.
    """
    began = time.monotonic()
    bad: Counter[str] = Counter()
    forgotten: list[int] = []
    bytes_read = 0
    with _owned(folder) as (index, said, segment_bytes):
        entries, malformed = said.entries, said.malformed
        if malformed:
            bad["the index says nothing sensible of it"] = len(malformed)
        fds: dict[int, int] = {}
        buffer = mmap.mmap(-1, ALIGN)
        try:
            for done, entry in enumerate(entries):
                if done % 64 == 0:
                    progress(done, len(entries))
                if len(buffer) < entry.size <= MAX_RECORD:
                    buffer.close()
                    buffer = mmap.mmap(-1, entry.size)
                with memoryview(buffer) as view:
                    cause = _wrong_with(entry, folder, segment_bytes, fds, view)
                bytes_read += entry.size
                if cause:
                    bad[cause] += 1
                    forgotten.append(entry.far)
        finally:
            buffer.close()
            for fd in fds.values():
                if fd >= 0:
                    os.close(fd)
        progress(len(entries), len(entries))
        if drop and bad:
            index.change({}, [*malformed, *forgotten])
    return Checked(
        folder=str(folder),
        blocks=len(entries) + len(malformed),
        sound=len(entries) - len(forgotten),
        bad=dict(bad),
        dropped=drop and bool(bad),
        bytes_read=bytes_read,
        seconds=time.monotonic() - began,
    )


def prune_folder(folder: Path, *, older_than_s: float | None = None, layout: str | None = None) -> Pruned:
    """Forget some blocks, or all, and remove files without any.

    Args:
        folder: Of the file tier.
        older_than_s: Those that were stored longer ago.
        layout: Those in a layout whose fingerprint begins so.

    Raises:
        ConfigError: It is no directory of stored blocks, or no layout begins so.
        BackendError: A process has it, or the index is damaged.
    """
    with _owned(folder) as (index, said, segment_bytes):
        entries, malformed = said.entries, said.malformed
        if layout is not None and not any(entry.layout.startswith(layout) for entry in entries):
            known = ", ".join(sorted({entry.layout[:16] for entry in entries})) or "none"
            raise ConfigError(f"no block in {folder} is in a layout {layout!r}; there are {known}")
        latest = time.time() - older_than_s if older_than_s is not None else None
        gone = [
            entry
            for entry in entries
            if (latest is None or entry.stored_at < latest) and (layout is None or entry.layout.startswith(layout))
        ]
        places = {entry.far for entry in gone}
        index.change({}, [*malformed, *places])
        used = {
            number
            for entry in entries
            if entry.far not in places
            for number in range(entry.far // segment_bytes, (entry.far + entry.size - 1) // segment_bytes + 1)
        }
        kept = {segment_path(folder, number) for number in used}
        freed = 0
        for path in folder.glob("segment-*.kv"):
            if path not in kept:
                freed += _on_disk(path)
                path.unlink()
    return Pruned(
        folder=str(folder),
        blocks=len(gone) + len(malformed),
        blocks_before=len(entries) + len(malformed),
        bytes_freed=freed,
    )


def _expect(folder: Path) -> None:
    if not (folder / INDEX).is_file():
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no directory; name the directory of a file tier")
        ranks = sorted(path.parent.name for path in folder.glob(f"*/{INDEX}"))
        more = f" ... ({len(ranks)} in all)" if len(ranks) > MAX_NAMED else ""
        which = f"one of those in it: {', '.join(ranks[:MAX_NAMED])}{more}" if ranks else "the directory of a file tier"
        raise ConfigError(f"{folder} holds no stored blocks; name {which}")


@contextmanager
def _owned(folder: Path) -> Iterator[tuple[FileIndex, Said, int]]:
    """Own a directory, with its index, what it says, and the size of its files."""
    _expect(folder)
    lock = OwnerLock(folder)
    try:
        try:
            db = open_index(folder / INDEX, mode="rw")
        except sqlite3.DatabaseError as exc:
            raise damaged(folder, exc) from None
        db.close()
        index = FileIndex(folder)
        try:
            if index.dropped:
                raise damaged(folder, index.dropped)
            said = index.said()
            segment_bytes = said.facts.get("segment_bytes", 0)
            if segment_bytes < ALIGN:
                raise damaged(folder, "it does not say how long its files are")
            yield index, said, segment_bytes
        except sqlite3.Error as exc:
            raise damaged(folder, exc) from None
        finally:
            index.close()
    finally:
        lock.release()


def _wrong_with(entry: Entry, folder: Path, segment_bytes: int, fds: dict[int, int], buffer: memoryview) -> str:
    """Say what is wrong with a block, if anything is."""
    if entry.size > len(buffer):
        return "the index says nothing sensible of it"
    try:
        for number, extent in segment_extents(entry.far, entry.size, segment_bytes):
            if number not in fds:
                fds[number] = -1
                with suppress(OSError):
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                    fds[number] = os.open(segment_path(folder, number), flags)
            if fds[number] < 0:
                return "its file is missing"
            transfer(buffer, extent._replace(fd=fds[number]), is_write=False)
    except OSError as exc:
        return f"it cannot be read: {exc.strerror}"
    return "" if checksum(entry.key, buffer[: entry.size]) == entry.checksum else "its bytes are not what was stored"


def _on_disk(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _when(seconds: int) -> str:
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else "never"
    return "at no sensible time"
