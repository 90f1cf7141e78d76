"""Runs doctor's own processes (`probe.py`), each with a deadline, and gathers what came of it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from asynckv.config import NixlConfig
from asynckv.tools.doctor import words
from asynckv.tools.doctor.facts import Ucx
from asynckv.tools.doctor.probe import SCRATCH
from asynckv.tools.doctor.ucx_log import ENVIRONMENT, Said, read_log

__all__ = ["Ended", "Probe", "connect_to", "probe_here"]

START_S = 15.0
READ_S = 15.0
CONNECT_S = 6.0
"""A second more than an engine gives a handshake."""

END_S = 3.0
MOST_LINE = 32 << 20
MOST_DETAIL = 1500

_STAMP = re.compile(r"^[EWIF]\d{4} [\d:.]+\s+\d+ \S+?\] ", re.MULTILINE)


class Ended(Exception):
    """A process of ours did not do what it was to: `how` is `refused`, `died` or `hung`."""

    def __init__(self, how: str, stage: str, detail: str) -> None:
        super().__init__(f"{how} at {stage}: {detail}")
        self.how, self.stage, self.detail = how, stage, detail


class Probe:
    """One process of ours.

    Args:
        order: What it is to do.
        folder: For its log.
    """

    def __init__(self, order: words.Ordered, folder: Path) -> None:
        self.stage = "start"
        self._log, self._errors = folder / f"{order.name}.ucx", folder / f"{order.name}.err"
        self._unread = b""
        home = str(Path(__file__).parents[3])
        path = os.pathsep.join([home, *(entry for entry in sys.path if entry)])
        environment = os.environ | ENVIRONMENT | {"UCX_LOG_FILE": str(self._log), "PYTHONPATH": path}
        environment.setdefault("NIXL_LOG_LEVEL", "WARN")
        with self._errors.open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "asynckv.tools.doctor.probe"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                process_group=0,  # what the terminal sends is for its parent
            )
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):  # it has died: what it says next tells
            self._popen.stdin.write(msgspec.json.encode(order) + b"\n")
            self._popen.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(END_S if kind is None else 0.0)

    @property
    def fd(self) -> int:
        """Readable when it has something to say."""
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def hear(self, read_s: float = READ_S) -> words.Offered | words.Result:
        """Wait for what it has to say; every stage has a deadline of its own.

        Raises:
            Ended: It refused, died, or said nothing by then.
        """
        limits = {"connect": CONNECT_S, "read": read_s}
        deadline = time.monotonic() + START_S
        while True:
            match words.decode_said(self._line(deadline)):
                case words.Stage(stage):
                    self.stage = stage
                    deadline = time.monotonic() + limits.get(stage, START_S)
                case words.Result(refused=refused) if refused:
                    raise Ended("refused", self.stage, refused)
                case said:
                    return said

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            ready = _wait(self.fd, deadline - time.monotonic())
            if not ready:
                raise Ended("hung", self.stage, f"nothing was heard of it any more at the stage {self.stage!r}")
            data = os.read(self.fd, 1 << 20)
            if not data or len(self._unread) > MOST_LINE:
                raise Ended("died", self.stage, self._death())
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_S)
        status = self._popen.returncode
        if status is None:
            return "it closed its output and went on"
        how = f"exit status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-status).name
        return f"{how}; {self.last_words()}" if self.last_words() else how

    def last_words(self) -> str:
        """What it, or NIXL in it, wrote to stderr: the last lines."""
        text = _STAMP.sub("", _tail(self._errors))
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
        return "; ".join(dict.fromkeys(lines[-4:]))[:MOST_DETAIL]

    def end(self, seconds: float) -> None:
        """Let it end in order, or end it."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def log(self) -> Said:
        """What UCX logged in it."""
        return read_log(_tail(self._log).splitlines())


def _wait(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], max(0.0, seconds))[0])


def _tail(path: Path, most: int = 4 << 20) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _offer(config: NixlConfig, folder: Path) -> Iterator[tuple[Probe, words.Offered]]:
    """Have a process offer memory for as long as the context lasts.

    Raises:
        Ended: It did not come to that.
    """
    with Probe(words.Ordered("doctor-owner", config, SCRATCH), folder) as owner:
        try:
            said = owner.hear()
        except Ended as exc:
            exc.detail += _complaints(owner)
            raise
        assert isinstance(said, words.Offered)
        yield owner, said


def _complaints(probe: Probe) -> str:
    said = probe.log()
    found = [*said.unavailable, *said.errors]
    return f"; UCX: {'; '.join(found)}" if found else ""


def probe_here(config: NixlConfig, seconds: float, note: Callable[[str], None]) -> Ucx:
    """Move bytes between two processes of this host, as two ranks would, and say what UCX made of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asynckv-doctor-") as name:
        folder = Path(name)
        logs = Said()
        try:
            note("starting a process that lends")
            with _offer(config, folder) as (owner, offered):
                note("reading from it" if not seconds else "measuring")
                try:
                    found = _read(config, folder, offered.place, seconds, True)
                finally:
                    owner.end(END_S)
                    logs = owner.log()
        except Ended as exc:
            logs = _merged(logs, *(read_log(_tail(path).splitlines()) for path in folder.glob("*.ucx")))
            return _ucx(logs, words.Result(), exc, time.monotonic() - began)
        result, read_logs, failure = found
        return _ucx(_merged(read_logs, logs), result, failure, time.monotonic() - began)


def connect_to(config: NixlConfig, place: words.Place) -> Ucx:
    """Open a connection to an engine's memory, and read none of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asynckv-doctor-") as name:
        result, logs, failure = _read(config, Path(name), place, 0.0, False)
        return _ucx(logs, result, failure, time.monotonic() - began)


def _read(
    config: NixlConfig, folder: Path, place: words.Place, seconds: float, read: bool
) -> tuple[words.Result, Said, Ended | None]:
    name = f"doctor-reader-{os.getpid()}"
    failure: Ended | None = None
    result = words.Result()
    with Probe(words.Ordered(name, config, place=place, read=read, seconds=seconds), folder) as reader:
        try:
            said = reader.hear(2 * seconds + READ_S)
            assert isinstance(said, words.Result)
            result = said
        except Ended as exc:
            failure = exc
        reader.end(END_S if failure is None else 0.0)
        return result, reader.log(), failure


def _merged(first: Said, *others: Said) -> Said:
    for other in others:
        first = Said(
            version=first.version or other.version,
            library=first.library or other.library,
            lanes=tuple(dict.fromkeys([*first.lanes, *other.lanes])),
            uses=first.uses or other.uses,
            unknown=tuple(dict.fromkeys([*first.unknown, *other.unknown])),
            unavailable=tuple(dict.fromkeys([*first.unavailable, *other.unavailable])),
            errors=tuple(dict.fromkeys([*first.errors, *other.errors])),
        )
    return first


def _ucx(logs: Said, result: words.Result, failure: Ended | None, seconds: float) -> Ucx:
    return Ucx(
        stage=failure.stage if failure else "done",
        failure=failure.how if failure else "",
        detail=failure.detail if failure else "",
        version=logs.version,
        library=logs.library,
        plugins=result.plugins,
        lanes=logs.lanes,
        uses=logs.uses,
        unknown=logs.unknown,
        unavailable=logs.unavailable,
        errors=logs.errors,
        facts=result.facts,
        measured=result.measured,
        seconds=seconds,
    )
