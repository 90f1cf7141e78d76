"""The index of a directory of stored records: the place of each key, and the checksum that its bytes must have.

It is a sqlite database that the file tier's thread writes in batches and never syncs. The index may be wrong, because
every read is verified by a checksum over key and bytes: an old, torn or foreign index loses records, but never returns
wrong bytes. So other processes may read it meanwhile. A damaged index is renamed (`set_aside`), and a new one is made.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import xxhash

from asynckv.edges.files.io import ALIGN, no_collection
from asynckv.edges.files.store import NoRoom, explained_index
from asynckv.errors import BackendError

INDEX = "index.sqlite"
FORMAT = 1
APPLICATION = 0x61736B76  # `askv`: so that the database of another program is not taken for one of ours
MAX_KEY = 1024
MAX_CHANGES = 1000  # per transaction, because each may write a page or two to the log
STORED_AT = "stored_at"  # time at which a directory last stored something: nanoseconds since 1970
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
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "NOMEM", "PERM", "READONLY")
}
"""Error codes that say nothing about the index itself; any other code means that it is damaged."""

FROM = "FROM records LEFT JOIN kinds ON kind = id"
SOUND = (
    "typeof(size) = 'integer' AND typeof(stored_at) = 'integer' AND typeof(key) = 'blob' AND typeof(layout) = 'text'"
    f" AND typeof(tag) = 'text' AND far >= 0 AND size > 0 AND far % {ALIGN} = 0 AND size % {ALIGN} = 0"
)
"""Condition that the rest of the file tier needs of a row, because sqlite takes any value in any column."""


class IndexRow(NamedTuple):
    far: int
    size: int
    key: bytes
    checksum: int
    layout: str
    tag: str
    stored_at: int  # seconds since 1970


class Said(NamedTuple):
    facts: dict[str, int]  # numbers about the directory, by name
    layouts: dict[str, bytes]  # encoded layouts, by fingerprint
    entries: list[IndexRow]  # by place
    malformed: list[int]  # places of rows that are not `SOUND`


def checksum(key: bytes, data: memoryview | bytes) -> int:
    """Return a checksum that binds bytes to a key: xxh3-64, seeded with the key's own; signed, as sqlite's integers."""
    found = xxhash.xxh3_64_intdigest(data, xxhash.xxh3_64_intdigest(key))
    return found - (1 << 64) if found >= 1 << 63 else found


class DamagedIndex(BackendError):
    def __init__(self, folder: Path, how: str) -> None:
        super().__init__(
            f"the index of {folder} is damaged ({how}), so the blocks stored there are lost: the next start sets it "
            f"aside and begins empty"
        )


def _code(exc: Exception) -> int:
    return int(getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)) & 0xFF


@contextmanager
def typed(folder: Path) -> Iterator[None]:
    """Turn errors of sqlite and Python about an index into `DamagedIndex`, `NoRoom`, or another `BackendError`."""
    try:
        yield
    except (sqlite3.Error, ValueError) as exc:  # ValueError: a text that cannot be decoded
        code = _code(exc)
        is_told = code == sqlite3.SQLITE_READONLY and os.access(folder / INDEX, os.W_OK)  # by a damaged header
        if is_told or code not in UNUSABLE or getattr(exc, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_READ:
            raise DamagedIndex(folder, " ".join(str(exc).split())) from None
        kind = NoRoom if code == sqlite3.SQLITE_FULL else BackendError
        raise kind(f"the index of {folder} cannot be used: {explained_index(folder, exc)}") from exc


def _open(path: Path, how: str, *, check: bool = True) -> sqlite3.Connection:
    """Open an index with the options `how` of a sqlite URI, make its tables if it has none, and `check` all of it."""
    uri = f"{path.absolute().as_uri()}?{how}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=1.0)
    try:
        for pragma in "synchronous = OFF", "cell_size_check = ON":
            db.execute(f"PRAGMA {pragma}")
        # A start that was killed could leave a table `room` up to version 0.1.
        tables = [sql for name, sql in db.execute("SELECT name, sql FROM sqlite_schema") if name != "room"]
        is_ours = all(sql is None or sql in SCHEMA for sql in tables)
        pragmas = "user_version", "application_id"
        version, application = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in pragmas)
        if not is_ours and application != APPLICATION:
            raise BackendError(f"{path} is not an index of stored blocks; name another directory")
        if application == APPLICATION and FORMAT < version < 100:  # a larger number is damage
            raise BackendError(
                f"{path} is of format {version}, and this asynckv reads format {FORMAT}; name another directory, or "
                f"empty this one"
            )
        if not is_ours or (tables and (application, version) != (APPLICATION, FORMAT)):
            raise sqlite3.DatabaseError("its tables are not those of an index of stored blocks")
        if not tables and how == "mode=rwc":
            db.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {SCHEMA} COMMIT;")
        if check and (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found.removeprefix("*** in database main ***"))
    except BaseException:
        db.close()
        raise
    return db


def read_index(folder: Path, *, records: bool = True) -> Said:
    """Return the contents of an index, with its `records` if wanted; change nothing, as its owner may be writing."""
    path, names = folder / INDEX, (INDEX, f"{INDEX}-wal")
    try:
        with typed(folder):
            if not (folder / names[1]).exists():
                return _read(path, "mode=ro&immutable=1", records)  # otherwise sqlite would make files in the folder
            try:
                return _read(path, "mode=ro&readonly_shm=1", records)
            except sqlite3.OperationalError as exc:  # the owner has ended, and one of its files is missing or unusable
                if _code(exc) == sqlite3.SQLITE_BUSY:
                    raise
                with TemporaryDirectory(prefix="asynckv-") as scratch:
                    for name in names:
                        shutil.copyfile(folder / name, Path(scratch) / name, follow_symlinks=False)
                    return _read(Path(scratch) / INDEX, "mode=ro", records)
    except OSError as exc:
        raise BackendError(f"{path} cannot be read: {exc.strerror or exc}") from None


def _read(path: Path, how: str, records: bool) -> Said:
    with closing(_open(path, how, check=records)) as db:
        return _said(db, records)


def _said(db: sqlite3.Connection, records: bool) -> Said:
    db.execute("BEGIN")
    facts = {str(name): value for name, value in db.execute("SELECT * FROM meta") if type(value) is int}
    layouts = {str(name): body for name, body in db.execute("SELECT * FROM layouts") if isinstance(body, bytes)}
    entries, malformed = list[IndexRow](), list[int]()
    if records:
        malformed += [far for (far,) in db.execute(f"SELECT far {FROM} WHERE NOT ({SOUND})")]
        columns = "far, size, key, checksum, layout, tag, stored_at"
        with no_collection():
            entries += map(IndexRow._make, db.execute(f"SELECT {columns} {FROM} WHERE {SOUND} ORDER BY far"))
    db.execute("COMMIT")
    return Said(facts, layouts, entries, malformed)


class FileIndex:
    """One open index. All methods except the constructor belong to one thread."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / INDEX
        if path.is_symlink():
            raise BackendError(f"{path} is a link to another file; name another directory")
        # sqlite would make a file that all users can read. One that exists is not opened: closing it ends its locks.
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with typed(folder):
            self._db = _open(path, "mode=rwc")
        self._inode = path.stat().st_ino

    @staticmethod
    def set_aside(folder: Path) -> None:
        for name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
            (folder / f"{name}.damaged").unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                (folder / name).rename(folder / f"{name}.damaged")

    def said(self) -> Said:
        with typed(self._path.parent):
            return _said(self._db, records=True)

    def prepare(self, forgotten: Iterable[int], layouts: Mapping[str, bytes], **facts: int) -> None:
        """Forget the records at some places, and note layouts of others and numbers about the directory."""
        with typed(self._path.parent):
            self.note(**facts)
            self._db.executemany("INSERT OR REPLACE INTO layouts VALUES (?, ?)", layouts.items())
            self.change({}, forgotten)

    def removed(self) -> str:
        with suppress(FileNotFoundError):
            return INDEX if self._path.stat().st_ino != self._inode else ""
        return INDEX

    def note(self, **facts: int) -> None:
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())

    def change(self, stored: Mapping[int, IndexRow], forgotten: Iterable[int]) -> None:
        """Forget the records at some places and note those stored at others, all or nothing."""
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
        self._db.close()


def now() -> int:
    return int(time.time())
