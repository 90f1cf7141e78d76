"""A log file of asynckv's own: JSON lines, for an engine inside an application that configures no logging.

Logging never waits for a disk. Lines wait in a queue that is bounded in bytes, and a thread encodes and writes them and
rotates the files (`logging.handlers.RotatingFileHandler`). Lines that do not fit or cannot be written are counted, and
the next line has their number (`log_dropped`). If a full file cannot be renamed, the sink goes on with it for a while,
and a line says why once (`log_not_rotated`).

Each wake-up of the thread, and each return from the kernel, costs a busy event loop time. So the thread wakes at most
twice a second unless there is a warning.

Engines of one process may share a file, but processes must not. The name can have `{pid}` and `{rank}` to differ.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import re
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import Any, ClassVar

from asynckv.errors import ConfigError

MAX_WAITING = 32 << 20
"""Limit of the bytes of lines that wait or are being written, measured as objects in memory (`_size`)."""

MAX_BATCH = 1 << 20
"""Limit of the bytes, measured in the same way, of one write, because a batch is in memory three more times then."""

LINE_BYTES = 256

NESTED = frozenset({dict, list, tuple, set, frozenset})

GATHER_S = 0.5  # seconds between writes unless there is a warning, because each write costs a busy loop 0.1 ms
CLOSE_S = 2.0  # seconds that closing a sink waits for unwritten lines
Line = tuple[float, str, str, Mapping[str, Any], Mapping[str, Any]]
"""Time, level, event, the fields of every line of the engine, and the fields of this one."""


def file_name(pattern: str, engine_id: str = "", rank: str = "") -> str:
    """Return the path of a pattern with `{engine_id}`, `{rank}`, `{pid}` and `{host}`. Characters that are unsafe in a
    path are replaced in their values.
    """
    names = {"engine_id": engine_id, "rank": rank, "pid": str(os.getpid()), "host": socket.gethostname()}
    safe = {name: re.sub(r"[^A-Za-z0-9._-]+", "_", value).lstrip(".")[:100] or "_" for name, value in names.items()}
    return os.path.abspath(os.path.expanduser(pattern.format(**safe)))


class FileSink:
    """A file and the thread that writes it. Raises `ConfigError` if the file cannot be written."""

    _open: ClassVar[dict[str, FileSink]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _writing: ClassVar[set[FileSink]] = set()

    def __init__(self, path: str, max_bytes: int, backups: int) -> None:
        try:
            _File(path, max_bytes, backups).check()
        except OSError as exc:
            raise ConfigError(f"the log file {path} cannot be written: {exc.strerror or exc}") from exc
        self.path, self._max_bytes, self._backups = path, max_bytes, backups
        self._not_taken = self._not_written = 0  # each is counted by one thread only
        self._users = 0
        self._mutex = threading.RLock()  # re-entrant, because a finalizer may log
        self._lines = _Lines(self._mutex)
        self._thread: threading.Thread | None = None
        self._is_starting = False
        self._told = 0  # number of dropped lines that a written line has reported
        self._told_trouble = ""

    @classmethod
    def shared(cls, path: str, max_bytes: int, backups: int) -> FileSink:
        """Return the one sink of a file. Each of its users closes it once."""
        with cls._lock:
            if path not in cls._open:
                cls._open[path] = cls(path, max_bytes, backups)
            sink = cls._open[path]
            sink._users += 1
            return sink

    @property
    def num_dropped(self) -> int:
        return self._not_taken + self._not_written

    def put(self, level: str, event: str, bound: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Write a line soon, without waiting or raising."""
        # Warnings are urgent, because the last lines before a process dies matter most afterwards.
        self._put((time.time(), level, event, bound, fields), _size(fields.values()), level in ("warning", "error"))

    def write(self, text: str) -> None:
        """Write a finished line, as a stream does."""
        self._put(text.removesuffix("\n"), len(text), False)

    def flush(self) -> None:
        """Do nothing, because lines are written soon anyway."""

    def close(self, timeout_s: float = math.inf) -> None:
        """Write the remaining lines once every user has closed the sink, within `CLOSE_S` and `timeout_s`."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._open.pop(self.path, None)
        self.end(timeout_s)

    def end(self, timeout_s: float = math.inf) -> None:
        """Write the remaining lines within `CLOSE_S` and `timeout_s`. A later line starts another thread."""
        with self._mutex:
            thread, lines = self._thread, self._lines
            self._thread, self._lines = None, _Lines(self._mutex)
            self._writing.discard(self)
            lines.end()
        if thread is None:
            return
        thread.join(min(timeout_s, CLOSE_S))
        if thread.is_alive():  # the disk does not answer
            with self._mutex:
                self._not_taken += lines.clear()

    @classmethod
    def end_all(cls) -> None:
        """Write the remaining lines of all files when the process ends, because it does not wait for daemon threads.
        Engines that are still open are closed before this (`embed/thread.py`, registered later).
        """
        for sink in tuple(cls._writing):
            sink.end()

    # -- inside ------------------------------------------------------------------------------------

    def _put(self, line: Line | str, size: int, is_urgent: bool) -> None:
        with self._mutex:
            if not (self._is_served() and self._lines.put(line, size + LINE_BYTES, is_urgent)):
                self._not_taken += 1

    def _is_served(self) -> bool:
        """Return True if a thread writes, and start one if none does."""
        if self._thread is not None or self._is_starting:
            return True
        self._is_starting = True
        try:
            # The thread owns all its objects, because one that hangs on a disk may have a successor.
            file = _File(self.path, self._max_bytes, self._backups)
            name = f"asynckv log {os.path.basename(self.path)}"
            thread = threading.Thread(target=self._work, args=(self._lines, file), name=name, daemon=True)
            thread.start()
            self._thread = thread
            self._writing.add(self)
        except RuntimeError:  # too many threads, or the interpreter exits; the next line tries again
            return False
        finally:
            self._is_starting = False
        return True

    def _work(self, lines: _Lines, file: _File) -> None:
        while batch := lines.take():
            self._write(batch, file)
        file.give_up()

    def _write(self, lines: list[Line | str], file: _File) -> None:
        told, trouble, encoded = self._told, file.trouble, list[str]()
        told_trouble = self._told_trouble
        for line in lines:
            dropped = self.num_dropped
            try:
                text = self._encoded(line, dropped - told, trouble if trouble != told_trouble else "")
            except Exception:  # a value with a broken repr must not lose other lines
                self._not_written += 1
                continue
            encoded.append(text)
            if not isinstance(line, str):
                told, told_trouble = dropped, trouble
        try:
            file.begin()
            file.write_lines(encoded)
            self._told, self._told_trouble = told, told_trouble
        except Exception:  # a failing disk or missing folder must not harm a request
            file.give_up()
            self._not_written += len(encoded) - file.num_written

    def _encoded(self, line: Line | str, dropped: int, trouble: str) -> str:
        if isinstance(line, str):
            return line
        at, level, event, bound, fields = line
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        said = {"timestamp": stamp, "level": level, "event": event, **bound, **fields}
        if dropped:
            said["log_dropped"] = dropped
        if trouble:
            said["log_not_rotated"] = trouble
        return _encode(said)


class _Lines:
    """Lines that wait for one thread, and its sleep. All callers except `take` hold `mutex`."""

    def __init__(self, mutex: threading.RLock) -> None:
        self._mutex = mutex
        self._waiting: deque[tuple[Line | str, int]] = deque()
        self._num_bytes = self._num_taken = 0
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_rung, self._is_asleep, self._is_ended = False, True, False

    def put(self, line: Line | str, size: int, is_urgent: bool) -> bool:
        if self._num_bytes + size > MAX_WAITING:
            return False
        self._waiting.append((line, size))
        self._num_bytes += size
        if is_urgent or self._is_asleep or self._num_bytes >= MAX_BATCH:
            self._ring()
        return True

    def take(self) -> list[Line | str]:
        """Wait for lines and return them; an empty list means that no more will come."""
        with self._mutex:
            self._num_bytes -= self._num_taken  # the batch before is written
            self._num_taken = 0
        batch: list[Line | str] = []
        while not batch:
            if not self._is_ended:
                with contextlib.suppress(queue.Empty):
                    self._bell.get(timeout=None if self._is_asleep else GATHER_S)
            with self._mutex:
                self._is_rung = False
                while self._waiting and self._num_taken < MAX_BATCH:
                    line, size = self._waiting.popleft()
                    batch.append(line)
                    self._num_taken += size
                self._is_asleep = not batch
                if self._waiting:
                    self._ring()
                if self._is_ended:
                    break
        return batch

    def end(self) -> None:
        self._is_ended = True
        self._ring()

    def clear(self) -> int:
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def _ring(self) -> None:
        if not self._is_rung:
            self._is_rung = True
            self._bell.put(None)


class _File(RotatingFileHandler):
    """The file, rotated by the standard library; errors are raised."""

    def __init__(self, path: str, max_bytes: int, backups: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8", delay=True)
        self.num_written = 0
        self.trouble = ""  # reason why the full file is still written
        self._size = self._limit = 0
        self._identity: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise `OSError` if the file cannot be written."""
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))

    def begin(self) -> None:
        """Begin a batch. Reopen the file if another program moved or removed it."""
        self.num_written = 0
        if self.stream is not None:
            try:
                found = os.stat(self.baseFilename)
                is_same = (found.st_dev, found.st_ino) == self._identity
            except OSError:
                is_same = False
            if not is_same:
                self.give_up()

    def write_lines(self, lines: list[str]) -> None:
        """Write lines with one call per file, and count them in `num_written`. Raises `OSError`."""
        # `emit` would check the file's name, make a record and flush for every line, which cost a busy loop as much
        # time as making all the events of a request.
        waiting: list[str] = []
        for line in lines:
            if self.stream is None:
                self.stream = self._open()
            if self._size + len(line) + 1 > self._limit > 0 and self._size > 0:
                self._flush(waiting)
                self._rotate(len(line) + 1)
            self._size += len(line) + 1
            waiting.append(line)
        self._flush(waiting)

    def _flush(self, waiting: list[str]) -> None:
        if waiting and self.stream is not None:
            self.stream.write("\n".join(waiting) + "\n")
            self.stream.flush()
            self.num_written += len(waiting)
            waiting.clear()

    def _rotate(self, more: int) -> None:
        """Rename the file and begin another. If that fails, go on with it up to the size of all files together."""
        failed: OSError | None = None
        try:
            self.doRollover()
        except OSError as exc:
            failed = exc
        self.trouble = f"{failed.strerror or failed}: {failed.filename2 or failed.filename}" if failed else ""
        self.stream = self._open()
        if failed:
            # Renaming is tried again when the file has grown by another `max_bytes`, and then with every batch.
            self._limit = self.maxBytes * math.ceil((self._size + more) / self.maxBytes)
            if self._limit > self.maxBytes * (self.backupCount + 1):
                raise failed

    def give_up(self) -> None:
        """Close the file, even if that loses unwritten text."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()

    def _open(self) -> Any:
        """Open the file, making its folder if necessary, and complete a line that was cut short."""
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        stream = super()._open()
        found = os.fstat(stream.fileno())
        self._identity = found.st_dev, found.st_ino
        is_file = stat.S_ISREG(found.st_mode)
        self._size, self._limit = (stream.tell(), self.maxBytes) if is_file else (0, 0)
        if self._size > 0:
            with open(self.baseFilename, "rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    stream.write("\n")
        return stream


def _plain(value: object) -> object:
    return list(value) if isinstance(value, set | frozenset) else repr(value)


_encode = json.JSONEncoder(default=_plain).encode


def _size(values: Iterable[object], depth: int = 4) -> int:
    """Estimate the bytes that values and their contents take in memory, without formatting them."""
    values = tuple(values)
    size = sum(map(sys.getsizeof, values))
    nested: list[Any] = [x for x in values if type(x) in NESTED] if depth else []
    for value in nested:
        size += _size((*value, *value.values()) if isinstance(value, dict) else value, depth - 1)
    return size


def _after_fork() -> None:
    """Reset all sinks in a forked process, which has none of the threads; the parent writes the waiting lines."""
    FileSink._lock = threading.Lock()
    for sink in {*FileSink._open.values(), *FileSink._writing}:
        sink._thread, sink._is_starting, sink._mutex = None, False, threading.RLock()
        sink._lines = _Lines(sink._mutex)
    FileSink._writing.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(FileSink.end_all)
