"""What a directory of stored records knows: which key lies where, and which checksum its bytes must have.

A sqlite database, written by the file tier's thread in batches. It is never synced: a process that is killed leaves all
that it had committed with the system, and what a power failure leaves is either sound or thrown away. For nothing in
here has to be true. A checksum is made over the bytes *and* the key, so that a record is only ever served under the key
that it was stored under, whatever the index says: an index that is old, torn or foreign costs records, not truth.
That is why others may read along: they take a snapshot, and what the owner changes afterwards fails its checksum.

Nor has a database to be what it looks like. Only tables that are word for word ours are read, so that no view or
trigger runs what somebody has written into it; from each at most as many rows as its pages have room for; and whoever
reads another's does so until a deadline.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import xxhash

from asynckv.errors import BackendError

__all__ = [
    "ALIGN",
    "FORMAT",
    "INDEX",
    "MAX_CHANGES",
    "STORED_AT",
    "Entry",
    "FileIndex",
    "Said",
    "checksum",
    "damaged",
    "no_collection",
    "now",
    "one_line",
    "read_index",
]

INDEX = "index.sqlite"
FORMAT = 1
APPLICATION = 0x61736B76
"""`askv`: so that somebody else's database is not taken for one of ours."""

MAX_KEY = 1024
ALIGN = 4096

MAX_CHANGES = 1000
"""In one transaction: each may write a page or two to the log."""

RECORD_BYTES = 256
"""What one record may take in an index: it is a hundred or so, in pages that are not full."""

ROOM = "room"
"""A table that holds space for a moment."""

MAX_FEW = 64
"""Rows that are read of what there are few of: facts and layouts."""

MAX_TEXT = 256
"""Characters of a layout's fingerprint, and of a tag."""

MAX_VALUE = 1 << 20
"""Bytes of one value of another's index."""

MAX_COPY = 4 << 30
"""Bytes of another's index that are copied where it cannot be read in place."""

LEAST_ROW = 8
"""Bytes: less than any row takes in its page."""

STEPS = 100_000
"""Of sqlite's machine, some milliseconds, between two looks at the time."""

STORED_AT = "stored_at"
"""The fact of a directory that says when something was stored there last: nanoseconds since 1970."""

SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORMAT};
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE layouts (fingerprint TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE kinds (id INTEGER PRIMARY KEY, layout TEXT NOT NULL, tag TEXT NOT NULL, UNIQUE (layout, tag));
CREATE TABLE records (
    far INTEGER PRIMARY KEY,
    size INTEGER NOT NULL,
    key BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    stored_at INTEGER NOT NULL
);
"""


UNUSABLE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
"""What says nothing of the index itself; with anything else it is damaged."""


FROM = "FROM records LEFT JOIN kinds ON kind = id"
SENSIBLE = (
    " AND ".join(f"typeof({x}) = 'integer'" for x in ("size", "checksum", "stored_at"))
    + " AND typeof(key) = 'blob' AND typeof(layout) = 'text' AND typeof(tag) = 'text'"
    + f" AND length(key) <= {MAX_KEY} AND length(layout) <= {MAX_TEXT} AND length(tag) <= {MAX_TEXT}"
    + f" AND far >= 0 AND size > 0 AND far % {ALIGN} = 0 AND size % {ALIGN} = 0"
)
"""What a row has to be like: asked of sqlite, which takes any value in any column."""


class Entry(NamedTuple):
    """What is known of one stored record."""

    far: int
    size: int
    key: bytes
    checksum: int
    layout: str
    tag: str
    stored_at: int
    """Seconds since 1970."""


class Said(NamedTuple):
    """All that an index says at one time."""

    facts: dict[str, int]
    """Small ones, of the directory."""
    layouts: dict[str, bytes]
    """What was written down, by fingerprint."""
    entries: list[Entry]
    """By place."""
    malformed: list[int]
    """Places of records of no sensible shape."""


def checksum(key: bytes, data: memoryview | bytes) -> int:
    """Bind bytes to a key: xxh3-64, seeded with the key's own. Signed, as sqlite's integers are."""
    found = xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(key))
    return found - (1 << 64) if found >= 1 << 63 else found


@functools.cache
def _tables() -> dict[tuple[str, str], str | None]:
    """What an index consists of: by type and name, in the words that made it."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return _made(db)


def _made(db: sqlite3.Connection) -> dict[tuple[str, str], str | None]:
    rows = db.execute(f"SELECT type, name, sql FROM sqlite_schema WHERE name <> '{ROOM}' LIMIT {MAX_FEW}")
    return {(kind, name): sql for kind, name, sql in rows}


def open_index(path: Path, *, how: str = "mode=rwc", within_s: float = math.inf) -> sqlite3.Connection:
    """Open an index, and make it if it is not there, unless told otherwise in the words of a URI of sqlite's.

    All that is done with it has to be done `within_s`, or is interrupted.

    Raises:
        BackendError: It is of another format, of another application, or cannot be opened.
        sqlite3.DatabaseError: It is damaged.
    """
    is_made = how == "mode=rwc"
    if is_made:
        if path.is_symlink():
            raise BackendError(f"{path} is a link to another file; name another directory")
        with suppress(OSError):  # sqlite would let everybody read it; what is there is not opened: that ends its locks
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    uri = f"{path.absolute().as_uri()}?{how}"
    try:
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0)
    except sqlite3.OperationalError as exc:
        raise BackendError(f"{path} cannot be opened: {exc}") from None
    try:
        if not is_made:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        if within_s < math.inf:
            until = time.monotonic() + within_s
            db.set_progress_handler(lambda: time.monotonic() > until, STEPS)
        for pragma in "synchronous = OFF", "trusted_schema = OFF", "cell_size_check = ON":
            db.execute(f"PRAGMA {pragma}")
        version, application = (
            int(db.execute(f"PRAGMA {x}").fetchone()[0]) for x in ("user_version", "application_id")
        )
        has_tables = db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone() is not None
        if has_tables and application != APPLICATION:
            raise BackendError(f"{path} is no index of stored blocks; name another directory")
        if has_tables and version != FORMAT:
            raise BackendError(
                f"{path} is of format {version}, and this asynckv reads format {FORMAT}; name another directory, or "
                f"empty this one"
            )
        if not has_tables and is_made:
            db.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {SCHEMA} COMMIT;")
        elif _made(db) != _tables():
            raise _corrupt("its tables are not those of an index of stored blocks")
    except BaseException:
        db.close()
        raise
    return db


def read_index(folder: Path, *, records: bool = True, check: bool = False, within_s: float = math.inf) -> Said:
    """Say what an index says, whoever writes it meanwhile; changes nothing, and lets go of it at once.

    Args:
        folder: Where it is.
        records: Whether to read what is stored as well.
        check: Whether to look through all of it for damage.
        within_s: How long it may take.

    Raises:
        BackendError: It is damaged, of another format, or cannot be read, or not in time.
    """
    path = folder / INDEX
    try:
        sizes = [_size(path), _size(path.with_name(f"{INDEX}-wal"))]
        _size(path.with_name(f"{INDEX}-shm"))
        if sizes[1] is None:
            return _read(path, "immutable=1", records, check, within_s)  # sqlite would make files to read along
        try:
            return _read(path, "readonly_shm=1", records, check, within_s)
        except sqlite3.OperationalError as exc:  # its owner has ended, and a file of its is not there, or no good
            if exc.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_INTERRUPT):
                raise
            with TemporaryDirectory(prefix="asynckv-") as scratch:
                size, free = sum(each or 0 for each in sizes), shutil.disk_usage(scratch).free
                if size > min(MAX_COPY, free // 2):
                    raise BackendError(
                        f"{path} has to be copied to be read, and its {size} bytes are more than {MAX_COPY}, or than "
                        f"half of the {free} that are free in {scratch}; start and end its owner once"
                    ) from None
                for name in (INDEX, f"{INDEX}-wal"):
                    shutil.copyfile(folder / name, Path(scratch) / name, follow_symlinks=False)
                return _read(Path(scratch) / INDEX, "", records, check, within_s)
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code == sqlite3.SQLITE_INTERRUPT:
            raise BackendError(f"{path} was not read within {within_s:g} s: it is damaged, or its disk slow") from None
        if code in UNUSABLE:
            raise BackendError(f"{path} cannot be read: {one_line(exc)}") from None
        raise damaged(folder, one_line(exc)) from None
    except OSError as exc:
        raise BackendError(f"{path} cannot be read: {exc.strerror}") from None


def _size(path: Path) -> int | None:
    """Say how long a file is; None if there is none. What is no file might never end.

    Raises:
        BackendError: It is something else.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise BackendError(f"{path} is no regular file")
    return found.st_size


def _read(path: Path, how: str, records: bool, check: bool, within_s: float) -> Said:
    with closing(open_index(path, how=f"mode=ro&{how}", within_s=within_s)) as db:
        if check:
            _check(db)
        return _said(db, records)


def _check(db: sqlite3.Connection) -> None:
    """See that an index is sound.

    Raises:
        sqlite3.DatabaseError: It is not.
    """
    found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise _corrupt(one_line(found))


def _corrupt(how: str) -> sqlite3.DatabaseError:
    exc = sqlite3.DatabaseError(how)
    exc.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return exc


def one_line(said: object) -> str:
    """What sqlite says goes over several lines."""
    return " ".join(str(said).removeprefix("*** in database main ***").split())


def damaged(folder: Path, how: str) -> BackendError:
    """Say that an index is damaged, and what comes of it."""
    return BackendError(
        f"the index of {folder} is damaged ({how}), so what is stored there is lost: the next start makes a new one, "
        f"and begins empty"
    )


def _said(db: sqlite3.Connection, records: bool) -> Said:
    db.execute("BEGIN")
    rows = db.execute(f"SELECT name, value FROM meta LIMIT {MAX_FEW}")
    facts = {str(name): value for name, value in rows if type(value) is int}
    rows = db.execute(f"SELECT fingerprint, body FROM layouts LIMIT {MAX_FEW}")
    layouts = {str(name): body for name, body in rows if isinstance(body, bytes)}
    entries, malformed = list[Entry](), list[int]()
    if records:
        pages, page = (int(db.execute(f"PRAGMA {x}").fetchone()[0]) for x in ("page_count", "page_size"))
        limit = f"LIMIT {pages * page // LEAST_ROW}"  # pages that lead back to themselves would have no end
        malformed += [far for (far,) in db.execute(f"SELECT far {FROM} WHERE NOT ({SENSIBLE}) {limit}")]
        columns = "far, size, key, checksum, layout, tag, stored_at"
        with no_collection():
            entries += map(Entry._make, db.execute(f"SELECT {columns} {FROM} WHERE {SENSIBLE} ORDER BY far {limit}"))
    db.execute("COMMIT")
    return Said(facts, layouts, entries, malformed)


@contextmanager
def no_collection() -> Iterator[None]:
    """Make many tuples at once: Python's collector would look through all of them again and again, half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FileIndex:
    """One open index. All but the constructor belongs to one thread.

    Args:
        folder: Where it is, or is to be.
        replace: Whether a damaged one is thrown away: `dropped` says why, and empty tables follow.

    Raises:
        BackendError: It cannot be opened, is of another format, or is damaged.
    """

    def __init__(self, folder: Path, *, replace: bool = True) -> None:
        self._path = folder / INDEX
        self.dropped = ""
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in UNUSABLE:
                raise BackendError(f"{self._path} cannot be used: {exc}; name another directory") from None
            if not replace:
                raise damaged(folder, one_line(exc)) from None
            self.dropped = one_line(exc)
            self._remove()
            self._db = self._open()
        self._inode = self._path.stat().st_ino

    def _open(self) -> sqlite3.Connection:
        db = open_index(self._path)
        try:
            _check(db)
        except BaseException:
            db.close()
            raise
        return db

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self._path.with_name(INDEX + suffix).unlink()

    # -- what is there -------------------------------------------------------------------------------

    def said(self) -> Said:
        """Return all that it says."""
        return _said(self._db, records=True)

    def removed(self) -> str:
        """Name it, if somebody has removed it."""
        with suppress(FileNotFoundError):
            return INDEX if self._path.stat().st_ino != self._inode else ""
        return INDEX

    # -- room ----------------------------------------------------------------------------------------

    def lacks(self, num_records: int) -> int:
        """Say how many bytes `reserve` is going to take from the disk."""
        (pages, log), size = self._wanted(num_records), self._number("page_size")
        there = 0
        with suppress(FileNotFoundError):
            there = self._path.with_name(f"{INDEX}-wal").stat().st_size
        return max(0, pages - self._number("page_count")) * size + max(0, log * size - there)

    def reserve(self, num_records: int) -> None:
        """Take space for so many records, and for the log: a disk that is full later keeps neither from being written.

        Sqlite uses pages that it has again, and its log from the start, so they are only to be made once.

        Raises:
            sqlite3.Error: There is none.
        """
        db, (pages, log) = self._db, self._wanted(num_records)
        db.execute(f"PRAGMA wal_autocheckpoint = {log // 4}")
        size, missing = self._number("page_size"), max(0, pages - self._number("page_count"))
        # All at a time would be twice on the disk. What is written last makes the log as long as it has to be.
        for parts in [min(log, missing - done) for done in range(0, missing, log)], [log]:
            db.execute(f"DROP TABLE IF EXISTS {ROOM}")
            db.execute(f"CREATE TABLE {ROOM} (bytes BLOB)")
            for part in parts:
                db.execute(f"INSERT INTO {ROOM} VALUES (zeroblob(?))", (part * size,))
        db.execute(f"DROP TABLE {ROOM}")
        db.execute("PRAGMA wal_checkpoint")

    def _wanted(self, num_records: int) -> tuple[int, int]:
        """Pages of the index, and of its log: four times what is written back at a time, for changes of `MAX_CHANGES`
        and those who read."""
        pages = -(-num_records * RECORD_BYTES // self._number("page_size")) + 16
        log = 4 * max(64, min(1000, pages // 2))
        return max(pages, log), log

    def _number(self, pragma: str) -> int:
        return int(self._db.execute(f"PRAGMA {pragma}").fetchone()[0])

    # -- changes, small ones first -------------------------------------------------------------------

    def note(self, **facts: int) -> None:
        """Note small facts."""
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())

    def put_layout(self, fingerprint: str, body: bytes) -> None:
        """Write a layout down."""
        self._db.execute("INSERT OR REPLACE INTO layouts VALUES (?, ?)", (fingerprint, body))

    def change(self, stored: Mapping[int, Entry], forgotten: Iterable[int]) -> None:
        """Forget what lies at some places, and note what lies at others, all or nothing.

        Raises:
            sqlite3.Error: Nothing was changed.
        """
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany("DELETE FROM records WHERE far = ?", [(far,) for far in forgotten])
            kinds = {kind: self._kind(*kind) for kind in {(e.layout, e.tag) for e in stored.values()}}
            db.executemany(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?)",
                [(e.far, e.size, e.key, e.checksum, kinds[e.layout, e.tag], e.stored_at) for e in stored.values()],
            )
            if stored:
                self.note(**{STORED_AT: time.time_ns()})
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _kind(self, layout: str, tag: str) -> int:
        self._db.execute("INSERT OR IGNORE INTO kinds (layout, tag) VALUES (?, ?)", (layout, tag))
        found = self._db.execute("SELECT id FROM kinds WHERE layout = ? AND tag = ?", (layout, tag))
        return int(found.fetchone()[0])

    def close(self) -> None:
        """Close it; what was changed stays."""
        with closing(self._db):
            pass


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
