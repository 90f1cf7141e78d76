"""What a directory of stored records knows: which key lies where, and which checksum its bytes must have.

A sqlite database, written by the file tier's thread in batches. It is never synced: a process that is killed leaves all
that it had committed with the system, and what a power failure leaves is either sound or thrown away. For nothing in
here has to be true. A checksum is made over the bytes *and* the key, so that a record is only ever served under the key
that it was stored under, whatever the index says: an index that is old, torn or foreign costs records, not truth.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from asynckv.errors import BackendError

__all__ = ["ALIGN", "FORMAT", "INDEX", "Entry", "FileIndex", "checksum", "now", "open_index", "read_entries"]

INDEX = "index.sqlite"
FORMAT = 1
APPLICATION = 0x61736B76
"""`askv`: so that somebody else's database is not taken for one of ours."""

MAX_KEY = 1024
ALIGN = 4096

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


def _damaged(how: str) -> sqlite3.DatabaseError:
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


def read_entries(db: sqlite3.Connection, malformed: list[int]) -> Iterator[Entry]:
    """Return all records, by place; of those of no sensible shape the places are noted."""
    malformed += [far for (far,) in db.execute(f"SELECT far {FROM} WHERE NOT ({SENSIBLE})")]
    columns = "far, size, key, checksum, layout, tag, stored_at"
    yield from map(Entry._make, db.execute(f"SELECT {columns} {FROM} WHERE {SENSIBLE} ORDER BY far"))


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
                raise _damaged(str(found))
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

    def meta(self) -> dict[str, int]:
        """Return small facts of the directory."""
        rows = self._db.execute("SELECT name, value FROM meta")
        return {str(name): value for name, value in rows if type(value) is int}

    def put_meta(self, **facts: int) -> None:
        """Note small facts."""
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())

    def layouts(self) -> dict[str, bytes]:
        """Return the layouts that were written down."""
        rows = self._db.execute("SELECT fingerprint, body FROM layouts")
        return {str(name): body for name, body in rows if isinstance(body, bytes)}

    def put_layout(self, fingerprint: str, body: bytes) -> None:
        """Write a layout down."""
        self._db.execute("INSERT OR REPLACE INTO layouts VALUES (?, ?)", (fingerprint, body))

    def entries(self, malformed: list[int]) -> Iterator[Entry]:
        """Return all records, by place; of those of no sensible shape the places are noted."""
        return read_entries(self._db, malformed)

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
