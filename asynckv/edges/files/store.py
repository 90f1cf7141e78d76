"""A directory of stored records: its owner, and the files that hold the bytes.

The bytes are one range of addresses, cut into *segments*: files of equal size. Their space is taken when the directory
is opened, so that a full disk is found then. A directory belongs to one process at a time, by a lock that ends with the
process. Other processes may read without a lock: a record that the owner changes meanwhile fails its checksum.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import sqlite3
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asynckv.edges.files.io import ALIGN, Extent
from asynckv.edges.folders import FULL, check_folder, check_parents, explained
from asynckv.errors import BackendError

OWNER = "owner"
SEGMENT_BYTES = 1 << 30
MAX_SEGMENTS = 99_999
MAX_OWNER = 4096  # bytes that are read of the file that names the owner


class Owner(Struct, frozen=True):
    pid: Annotated[int, Meta(ge=0)]
    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,256}\Z")]
    since: Annotated[str, Meta(pattern=r"^[0-9T:.+-]{1,64}\Z")]  # UTC, ISO 8601

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def _read_owner(fd: int) -> Owner | None:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(os.pread(fd, MAX_OWNER, 0), type=Owner)
    return None


def owner_of(folder: Path) -> tuple[Owner | None, bool]:
    """Return the present or last owner of a directory, and True if it has it now; take no lock."""
    try:
        fd = os.open(folder / OWNER, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None, False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_live = False
    except OSError:
        is_live = True
    try:
        return _read_owner(fd), is_live
    finally:
        os.close(fd)


_locks: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


class OwnerLock:
    """Ownership of a directory, until `release` or the end of the process.

    Args:
        folder: The directory; made if it does not exist.
        visit: True to own it for a moment, to tidy up; it has to exist.
    """

    def __init__(self, folder: Path, *, visit: bool = False) -> None:
        self._fd, self._is_visit = -1, visit
        try:
            if not visit:
                check_parents(folder)
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                check_folder(folder)
            while not self._take(folder):
                pass
        except OSError as exc:
            remedy = "" if visit else "; or name another directory"
            raise BackendError(f"{folder} cannot be written: {explained(folder, exc)}{remedy}") from None
        _locks.add(self)

    def _take(self, folder: Path) -> bool:
        """Lock the file that names the owner, and write it; return False if it was removed or renamed meanwhile."""
        path, there = folder / OWNER, None
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = _read_owner(fd) or "another process"
                raise BackendError(
                    f"{folder} belongs to {owner}; one directory has one owner at a time: "
                    + ("end that process" if self._is_visit else "give every rank one of its own, or end that process")
                ) from None
            with suppress(FileNotFoundError):
                there = path.lstat()
            if there is None or not os.path.samestat(there, os.fstat(fd)):
                return False
            mine = Owner(os.getpid(), socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))
            try:  # overwrite the old contents, because even a full disk has room for that
                os.ftruncate(fd, os.pwrite(fd, msgspec.json.encode(mine) + b"\n", 0))
            except OSError as exc:
                if exc.errno not in FULL:
                    raise
            self._fd, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _after_fork() -> None:
    """Release all locks, so that a child does not keep its parent's directory once the parent has ended."""
    for lock in tuple(_locks):
        with suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_after_fork)


def explained_index(folder: Path, exc: Exception) -> str:
    code = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
    return explained(
        folder, OSError(code.get(getattr(exc, "sqlite_errorcode", 0) & 0xFF, 0), " ".join(f"{exc}".split()))
    )


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:05}.kv"


def segment_extents(far: int, size: int, segment_bytes: int) -> Iterator[tuple[int, Extent]]:
    near = 0
    while size:
        number, offset = divmod(far, segment_bytes)
        part = min(size, segment_bytes - offset)
        yield number, Extent(near, -1, offset, part)
        near, far, size = near + part, far + part, size - part


class NoRoom(BackendError): ...


def check_room(folder: Path, num_bytes: int, *, refused: str = "") -> None:
    """Raise `NoRoom` if a disk has no room for segments of `num_bytes` in all, or has already `refused` them."""
    found = os.statvfs(folder)
    wanted = num_bytes - sum(path.lstat().st_blocks * 512 for path in folder.glob("segment-*.kv"))
    free, why = found.f_bavail * found.f_frsize, refused or os.strerror(errno.ENOSPC)
    if refused or (found.f_blocks and wanted > free):
        raise NoRoom(
            f"{folder} has no room for {num_bytes} bytes: {max(0, wanted)} more are needed, and {free} are free "
            f"({why}); free some, or give the file tier fewer, and start again"
        )


class Segments:
    """The files that hold the bytes: a range of `num_bytes`, in files of `segment_bytes`.

    Args:
        direct: True to bypass the page cache, if the file system can.
        is_owned: True if this process owns the directory; otherwise no file is made.
    """

    def __init__(
        self, folder: Path, num_bytes: int, segment_bytes: int, *, direct: bool, is_owned: bool = True
    ) -> None:
        self.num_bytes, self.segment_bytes = num_bytes, segment_bytes
        self.fds: list[int] = []  # descriptors by the number of the file; -1 where there is none
        self.lengths: list[int] = []
        self.kept: list[int] = []  # bytes that the file already had; records beyond them are lost
        self._folder = folder
        if num_bytes > MAX_SEGMENTS * segment_bytes:
            raise BackendError(
                f"{folder}: {num_bytes} bytes in files of {segment_bytes} are more than {MAX_SEGMENTS} files; use "
                f"larger ones (segment_bytes), in a new directory"
            )
        self.is_direct = direct and (_takes_direct(folder) if is_owned else _reads_direct(folder))
        created: list[Path] = []
        try:
            for number, start in enumerate(range(0, num_bytes, segment_bytes)):
                path, length = self.path(number), min(segment_bytes, num_bytes - start)
                if not is_owned:
                    self._open_to_read(path, length)
                    continue
                if not path.exists():
                    created.append(path)
                self._open(path, length)
            for path in folder.glob("segment-*.kv") if is_owned else ():
                if path.name >= self.path(len(self.fds)).name:
                    path.unlink()
        except OSError as exc:
            self.close()
            for path in created:
                with suppress(OSError):
                    path.unlink()
            if exc.errno in FULL:
                check_room(folder, num_bytes, refused=exc.strerror or str(exc))
            raise BackendError(
                f"{folder} cannot be used: {explained(folder, exc)}; or name another directory"
            ) from None

    def path(self, number: int) -> Path:
        return segment_path(self._folder, number)

    def _open(self, path: Path, length: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if self.is_direct else 0)
        fd = os.open(path, flags, 0o600)
        self.fds.append(fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
        self.kept.append(min(found.st_size, length))
        self.lengths.append(length)
        if found.st_size > length:
            os.ftruncate(fd, length)
        if found.st_size < length or found.st_blocks * 512 < length:
            os.posix_fallocate(fd, 0, length)

    def _open_to_read(self, path: Path, length: int) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if self.is_direct else 0)
        self.fds.append(-1)
        self.lengths.append(length)
        self.kept.append(0)
        with suppress(FileNotFoundError):
            self.fds[-1] = os.open(path, flags)
            found = os.fstat(self.fds[-1])
            if stat.S_ISREG(found.st_mode):
                self.kept[-1] = min(found.st_size, length)

    def extents(self, near: int, far: int, size: int) -> Iterator[Extent]:
        for number, extent in segment_extents(far, size, self.segment_bytes):
            yield Extent(near + extent.near, self.fds[number], extent.offset, extent.size)

    def has_kept(self, far: int, size: int) -> bool:
        if far + size > self.num_bytes or self.kept == self.lengths:
            return far + size <= self.num_bytes
        parts = segment_extents(far, size, self.segment_bytes)
        return all(extent.offset + extent.size <= self.kept[number] for number, extent in parts)

    def removed(self) -> str:
        for number, fd in enumerate(self.fds):
            if not os.fstat(fd).st_nlink:
                return self.path(number).name
        return ""

    def close(self) -> None:
        for fd in self.fds:
            if fd < 0:
                continue
            with suppress(OSError):  # other code may have closed the descriptor already
                os.close(fd)
        self.fds.clear()


def _takes_direct(folder: Path) -> bool:
    """Return True if a file system lets aligned reads and writes bypass the page cache; found by a trial."""
    path = folder / f"direct-{os.getpid()}.tmp"
    try:
        with mmap.mmap(-1, ALIGN) as page, _opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as fd:
            return os.pwrite(fd, page, 0) == ALIGN == os.preadv(fd, [page], 0)
    except OSError:
        return False
    finally:
        with suppress(OSError):
            path.unlink()


def _reads_direct(folder: Path) -> bool:
    try:
        some = next(folder.glob("segment-*.kv"))
        with mmap.mmap(-1, ALIGN) as page, _opened(some, os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECT) as fd:
            return os.preadv(fd, [page], 0) >= 0
    except (OSError, StopIteration):
        return False


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
