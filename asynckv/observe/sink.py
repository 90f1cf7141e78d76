"""A log file of asynckv's own: JSON lines, for an engine inside an application that configures no logging.

Whoever logs must not wait for a disk. What is to be written is put into a bounded queue, and a thread takes it from
there, encodes and writes it, and rotates the files (`logging.handlers.RotatingFileHandler`). What does not fit into the
queue, or cannot be written because the disk is full or the folder is gone, is left out and counted; the next line that
can be written says how many there were (`log_dropped`). No request ends for that.

Engines of one process that are given the same file share it. Processes must not: each would rotate it under the others,
so the name carries what tells them apart (`{pid}`, `{rank}`).
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
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import Any, ClassVar

from asynckv.errors import ConfigError

__all__ = ["FileSink", "file_name"]

MAX_WAITING = 16_384
"""Lines that wait to be written, at most."""

MAX_BATCH = 1024
"""Lines that are taken to be written at a time; when the disk does not answer they are held beside those that wait."""

GATHER_S = 0.1
"""How long the first of them waits for more, unless there is a warning.

A thread that wakes for every line costs the event loop's time.
"""

CLOSE_S = 2.0
"""How long a sink that is closed waits for what is still to be written."""

Line = tuple[float, str, str, Mapping[str, Any], Mapping[str, Any]]
"""When, level, event, what every line of the engine says, and what this one does."""


def file_name(pattern: str, engine_id: str = "", rank: str = "") -> str:
    """Return the path that a pattern means here; what is put in for a name holds no character that a path could mind.

    Args:
        pattern: May have `{engine_id}`, `{rank}`, `{pid}` and `{host}`.
        engine_id: Of the engine.
        rank: Of the engine, such as `tp0`.
    """
    names = {"engine_id": engine_id, "rank": rank, "pid": str(os.getpid()), "host": socket.gethostname()}
    safe = {name: re.sub(r"[^A-Za-z0-9._-]+", "_", value).lstrip(".")[:100] or "_" for name, value in names.items()}
    return os.path.abspath(os.path.expanduser(pattern.format(**safe)))


class FileSink:
    """One file, and the thread that writes it.

    Raises:
        ConfigError: The file cannot be written.
    """

    _open: ClassVar[dict[str, FileSink]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _writing: ClassVar[set[FileSink]] = set()
    """Those that have a thread."""

    def __init__(self, path: str, max_bytes: int, backups: int) -> None:
        try:
            self._file = _File(path, max_bytes, backups)
            self._file.check()
        except OSError as exc:
            raise ConfigError(f"the log file {path} cannot be written: {exc.strerror or exc}") from exc
        self.path = path
        self._not_taken = self._not_written = 0  # each of them one thread's to count
        self._users = 0
        self._waiting: queue.SimpleQueue[Line | str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._hurry = threading.Event()
        self._told = 0
        """How many of those that were dropped a line that was written has told of."""

    @classmethod
    def shared(cls, path: str, max_bytes: int, backups: int) -> FileSink:
        """Return the sink of a file, one for all who write there; each closes it once.

        Raises:
            ConfigError: The file cannot be written.
        """
        with cls._lock:
            if path not in cls._open:
                cls._open[path] = cls(path, max_bytes, backups)
            sink = cls._open[path]
            sink._users += 1
            return sink

    @property
    def num_dropped(self) -> int:
        """Lines that are in no file."""
        return self._not_taken + self._not_written

    def put(self, level: str, event: str, bound: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Write a line soon; never waits, and never raises."""
        self._put((time.time(), level, event, bound, fields))
        if level in ("warning", "error"):
            # What is said last before a process dies is what is looked for afterwards.
            self._hurry.set()

    def write(self, text: str) -> None:
        """Write a line that is made already; as a stream does."""
        self._put(text.removesuffix("\n"))

    def flush(self) -> None:
        """Nothing: what is written is written soon."""

    def close(self, timeout_s: float = math.inf) -> None:
        """Write what is still to be written, for `CLOSE_S` or so long at most, once everybody has closed it."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            self._open.pop(self.path, None)
        self.end(timeout_s)

    def end(self, timeout_s: float = math.inf) -> None:
        """Write what is still to be written, for so long at most; whoever writes after that begins anew."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._writing.discard(self)
        self._hurry.set()
        self._waiting.put(None)
        thread.join(min(timeout_s, CLOSE_S))
        if thread.is_alive():  # the disk does not answer
            self._not_taken += self._waiting.qsize()

    # -- inside ------------------------------------------------------------------------------------

    def _put(self, line: Line | str) -> None:
        if self._waiting.qsize() >= MAX_WAITING or not self._is_served():
            self._not_taken += 1
            return
        self._waiting.put(line)

    def _is_served(self) -> bool:
        """Whether a thread writes; one is started if none does."""
        if self._thread is not None:
            return True
        if not self._starting.acquire(blocking=False):  # somebody is at it, and nobody waits
            return True
        try:
            if self._thread is None:
                hurry = threading.Event()
                name = f"asynckv log {os.path.basename(self.path)}"
                thread = threading.Thread(target=self._work, args=(hurry,), name=name, daemon=True)
                thread.start()
                self._hurry, self._thread = hurry, thread
                self._writing.add(self)
        except RuntimeError:  # there are too many threads, or the interpreter exits: the next line tries again
            return False
        finally:
            self._starting.release()
        return True

    def _work(self, hurry: threading.Event) -> None:
        """Write what is put, until told to end."""
        while True:
            batch = [self._waiting.get()]
            if self._waiting.qsize() < MAX_BATCH:
                hurry.wait(GATHER_S)
            hurry.clear()  # before the queue is emptied: whoever hurries afterwards finds his line in it
            with contextlib.suppress(queue.Empty):
                while len(batch) < MAX_BATCH:
                    batch.append(self._waiting.get_nowait())
            is_last = None in batch
            lines = [line for line in batch if line is not None]
            told, encoded = self._told, []
            for line in lines:
                dropped = self.num_dropped
                try:
                    encoded.append(self._encoded(line, dropped - told))
                except Exception:  # a value whose repr raises takes no other line with it
                    self._not_written += 1
                    continue
                if not isinstance(line, str):
                    told = dropped
            try:
                self._file.begin()
                self._file.write_lines(encoded)
                self._told = told
            except Exception:  # no disk, no folder: no request is to suffer for it
                self._file.give_up()
                self._not_written += len(encoded) - self._file.num_written
            if is_last:
                self._file.give_up()
                return

    def _encoded(self, line: Line | str, dropped: int) -> str:
        if isinstance(line, str):
            return line
        at, level, event, bound, fields = line
        stamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        said = {"timestamp": stamp, "level": level, "event": event, **bound, **fields}
        if dropped:
            said["log_dropped"] = dropped
        return json.dumps(said, default=_plain)


class _File(RotatingFileHandler):
    """The file, as the standard library rotates it; what goes wrong is raised."""

    def __init__(self, path: str, max_bytes: int, backups: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8", delay=True)
        self.num_written = 0
        """Lines of the last batch."""
        self._size = 0

    def check(self) -> None:
        """Find out whether it can be written.

        Raises:
            OSError: It cannot.
        """
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        os.close(os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))

    def begin(self) -> None:
        """Begin a batch: open the file again if somebody moved or removed it."""
        self.num_written = 0
        if self.stream is not None:
            try:
                here, there = os.fstat(self.stream.fileno()), os.stat(self.baseFilename)
                is_same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
            except OSError:
                is_same = False
            if not is_same:
                self.give_up()

    def write_lines(self, lines: list[str]) -> None:
        """Write lines, by as few calls as there are files; `num_written` says how many of them are written.

        Raises:
            OSError: Some are not.
        """
        # Not by `emit`, which looks at the file's name, makes a record and flushes for every line: that took a busy
        # loop as much time as all that is logged of a request.
        waiting: list[str] = []
        for line in lines:
            if self.stream is None:
                self.stream = self._open()
            if self._size + len(line) + 1 > self.maxBytes > 0 and self._size > 0:
                self._flush(waiting)
                self.doRollover()
                self.stream = self._open()
            self._size += len(line) + 1
            waiting.append(line)
        self._flush(waiting)

    def _flush(self, waiting: list[str]) -> None:
        if waiting and self.stream is not None:
            self.stream.write("\n".join(waiting) + "\n")
            self.stream.flush()
            self.num_written += len(waiting)
            waiting.clear()

    def give_up(self) -> None:
        """Close it, whatever becomes of what is not written yet."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.close()

    def _open(self) -> Any:
        """Open the file, in a folder that is made if need be, and end a line that was cut short."""
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        stream = super()._open()
        self._size = stream.tell() if os.path.isfile(self.baseFilename) else 0
        if self._size > 0:
            with open(self.baseFilename, "rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    stream.write("\n")
        return stream


def _plain(value: object) -> object:
    """Values that JSON does not know."""
    return list(value) if isinstance(value, set | frozenset) else repr(value)


def _at_exit() -> None:
    """Write what is still to be written: threads that are daemons are not waited for.

    Engines that are still open then are closed before this (`embed/thread.py`), which was registered later; so their
    last words are in the file as well.
    """
    for sink in tuple(FileSink._writing):
        sink.end()


def _after_fork() -> None:
    """Of a process that was forked none of the threads is here, and what waits is the parent's to write."""
    FileSink._lock = threading.Lock()
    for sink in tuple(FileSink._writing):
        sink._thread, sink._starting, sink._waiting = None, threading.Lock(), queue.SimpleQueue()
    FileSink._writing.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
