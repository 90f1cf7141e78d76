"""What a directory of stored records knows: which key lies where, and which checksum its bytes must have.

A sqlite database, written by the file tier's thread in batches. It is never synced: a process that is killed leaves all
that it had committed with the system, and what a power failure leaves is either sound or thrown away. For nothing in
here has to be true. A checksum is made over the bytes *and* the key, so that a record is only ever served under the key
that it was stored under, whatever the index says: an index that is old, torn or foreign costs records, not truth.
That is why others may read along: they take a snapshot, and what the owner changes afterwards fails its checksum.
"""

from __future__ import annotations

import gc
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from asynckv.errors import BackendError

__all__ = [
    "ALIGN",
    "FORMAT",
    "INDEX",
    "STORED_AT",
    "Entry",
    "FileIndex",
    "Said",
    "checksum",
    "damaged",
    "no_collection",
    "now",
    "open_index",
    "read_index",
]

INDEX = "index.sqlite"
FORMAT = 1
APPLICATION = 0x61736B76
"""`askv`: so that somebody else's database is not taken for one of ours."""

MAX_KEY = 1024
ALIGN = 4096

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
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
"""What says nothing of the index itself; with anything else it is damaged."""


def _corrupt(how: str) -> sqlite3.DatabaseError:
    exc = sqlite3.DatabaseError(how)
    exc.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return exc


FROM = "FROM records LEFT JOIN kinds ON kind = id"
SENSIBLE = (
    " AND ".join(f"typeof({x}) = 'integer'" for x in ("size", "checksum", "stored_at"))
    + " AND typeof(key) = 'blob' AND typeof(layout) = 'text' AND typeof(tag) = 'text'"
    + f" AND length(key) <= {MAX_KEY} AND far >= 0 AND size > 0 AND far % {ALIGN} = 0 AND size % {ALIGN} = 0"
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


def open_index(path: Path, *, mode: str = "rwc", immutable: bool = False) -> sqlite3.Connection:
    """Open an index, and make it if it is not there (mode `rwc`).

    Raises:
        BackendError: It is of another format, of another application, or cannot be opened.
        sqlite3.DatabaseError: It is damaged.
    """
    if mode == "rwc":
        if path.is_symlink():
            raise BackendError(f"{path} is a link to another file; name another directory")
        with suppress(OSError):  # sqlite would let everybody read it; what is there is not opened: that ends its locks
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    uri = f"{path.absolute().as_uri()}?mode={mode}{'&immutable=1' if immutable else ''}"
    try:
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0)
    except sqlite3.OperationalError as exc:
        raise BackendError(f"{path} cannot be opened: {exc}") from None
    try:
        db.execute("PRAGMA synchronous = OFF")
        version, application = (
            int(db.execute(f"PRAGMA {x}").fetchone()[0]) for x in ("user_version", "application_id")
        )
        has_tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if has_tables and application != APPLICATION:
            raise BackendError(f"{path} is no index of stored blocks; name another directory")
        if has_tables and version != FORMAT:
            raise BackendError(
                f"{path} is of format {version}, and this asynckv reads format {FORMAT}; name another directory, or "
                f"empty this one"
            )
        if not has_tables and mode == "rwc":
            db.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {SCHEMA} COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


def read_index(folder: Path, *, records: bool = True) -> Said:
    """Say what an index says, whoever writes it meanwhile; changes nothing, and lets go of it at once.

    Raises:
        BackendError: It is damaged, of another format, or cannot be opened.
    """
    # Reading beside a writer makes files; without a log there is none, or it has not got far.
    has_log = (folder / f"{INDEX}-wal").exists()
    try:
        try:
            return _read(folder, records, immutable=not has_log)
        except (sqlite3.OperationalError, BackendError):
            if os.access(folder, os.W_OK):
                raise
            return _read(folder, records, immutable=True)
    except sqlite3.Error as exc:
        raise damaged(folder, exc) from None


def damaged(folder: Path, exc: object) -> BackendError:
    """Make the error that says of an index that it is damaged."""
    return BackendError(f"the index of {folder} is damaged ({exc}); the next start makes a new one")


def _read(folder: Path, records: bool, *, immutable: bool) -> Said:
    with closing(open_index(folder / INDEX, mode="ro", immutable=immutable)) as db:
        return _said(db, records)


def _said(db: sqlite3.Connection, records: bool) -> Said:
    db.execute("BEGIN")
    facts = {str(name): value for name, value in db.execute("SELECT name, value FROM meta") if type(value) is int}
    rows = db.execute("SELECT fingerprint, body FROM layouts")
    layouts = {str(name): body for name, body in rows if isinstance(body, bytes)}
    entries, malformed = list[Entry](), list[int]()
    if records:
        malformed += [far for (far,) in db.execute(f"SELECT far {FROM} WHERE NOT ({SENSIBLE})")]
        columns = "far, size, key, checksum, layout, tag, stored_at"
        with no_collection():
            entries += map(Entry._make, db.execute(f"SELECT {columns} {FROM} WHERE {SENSIBLE} ORDER BY far"))
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

    A damaged one is thrown away: `dropped` says why, and empty tables follow.

    Args:
        folder: Where it is, or is to be.

    Raises:
        BackendError: It cannot be opened, or is of another format.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / INDEX
        self.dropped = ""
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as exc:
            if exc.sqlite_errorcode & 0xFF in UNUSABLE:
                raise BackendError(f"{self._path} cannot be used: {exc}; name another directory") from None
            self.dropped = str(exc)
            self._remove()
            self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        db = open_index(self._path)
        try:
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise _corrupt(str(found))
            db.execute("SELECT far, size, key, checksum, kind, stored_at FROM records LIMIT 1").fetchone()
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

    def note(self, **facts: int) -> None:
        """Note small facts."""
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())

    def put_layout(self, fingerprint: str, body: bytes) -> None:
        """Write a layout down."""
        self._db.execute("INSERT OR REPLACE INTO layouts VALUES (?, ?)", (fingerprint, body))

    # -- changes -------------------------------------------------------------------------------------

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
