"""Runs doctor's own processes (`probe.py`), each with a deadline, and gathers what came of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Self

import msgspec

from asynckv.config import NixlConfig
from asynckv.tools.doctor.facts import Ucx
from asynckv.tools.doctor.probe import Order, Place, Refused, Result
from asynckv.tools.doctor.ucx_log import ENVIRONMENT, read_log

__all__ = ["Ended", "Probe", "try_nixl"]

START_S = 15.0
READ_S = 15.0
CONNECT_S = 6.0
"""A second more than an engine gives a handshake."""

END_S = 3.0
MOST_READ = 4 << 20
MOST_DETAIL = 1500
START = "from asynckv.tools.doctor.probe import main; main()"

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

    def __init__(self, order: Order, folder: Path) -> None:
        self.stage = "start"
        self._errors = folder / f"{order.name}.err"
        home = str(Path(__file__).parents[3])
        path = os.pathsep.join([home, *(entry for entry in sys.path if entry)])
        log = {"UCX_LOG_FILE": str(folder / f"{order.name}.ucx"), "PYTHONPATH": path}
        self._link, theirs = multiprocessing.Pipe()
        with theirs, self._errors.open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(theirs.fileno())],
                env={"NIXL_LOG_LEVEL": "WARN"} | os.environ | ENVIRONMENT | log,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                process_group=0,  # what the terminal sends is for its parent
            )
        with contextlib.suppress(OSError):  # it has died: what it says next tells
            self._link.send(order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(END_S if kind in (None, Ended) else 0.0)

    def hear(self, read_s: float = READ_S) -> Place | Result:
        """Wait for what it has to say; every stage has a deadline of its own.

        Raises:
            Ended: It refused, died, or said nothing by then.
        """
        seconds = {"connect": CONNECT_S, "read": read_s}
        while True:
            try:
                if not self._link.poll(seconds.get(self.stage, START_S)):
                    self._popen.kill()
                    raise Ended("hung", self.stage, f"nothing was heard of it any more at the stage {self.stage!r}")
                said: str | Place | Result | Refused = self._link.recv()
            except (EOFError, OSError):
                raise Ended("died", self.stage, self._death()) from None
            match said:
                case str():
                    self.stage = said
                case Refused(why):
                    raise Ended("refused", self.stage, why)
                case _:
                    return said

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
        text = _STAMP.sub("", _text(self._errors))
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
        return "; ".join([how, *dict.fromkeys(lines[-4:])])[:MOST_DETAIL]

    def end(self, seconds: float) -> None:
        """Let it end in order, or end it."""
        self._link.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_READ).decode(errors="replace")


def try_nixl(config: NixlConfig, seconds: float, note: Callable[[str], None], place: Place | None = None) -> Ucx:
    """Move bytes between two processes of this host, as two ranks would, and say what UCX made of it.

    With the place of an engine's memory a connection to it is opened instead, and none of it is read.
    """
    began = time.monotonic()
    result, failure = Result(), None
    with tempfile.TemporaryDirectory(prefix="asynckv-doctor-") as name:
        folder = Path(name)
        order = Order(f"doctor-reader-{os.getpid()}", config, place, place is None, seconds)
        try:
            with contextlib.ExitStack() as running:
                if place is None:
                    note("starting a process that lends")
                    said = running.enter_context(Probe(Order("doctor-owner", config), folder)).hear()
                    assert isinstance(said, Place)
                    order = order._replace(place=said)
                    note("measuring" if seconds else "reading from it")
                else:
                    note("opening a connection of NIXL's")
                said = running.enter_context(Probe(order, folder)).hear(2 * seconds + READ_S)
                assert isinstance(said, Result)
                result = said
        except Ended as exc:
            failure = exc
        # The reader's first: where both tell of something, its word counts.
        logs = sorted(folder.glob("*.ucx"), reverse=True)
        found = read_log(chain.from_iterable(_text(path).splitlines() for path in logs))
    return msgspec.structs.replace(
        found,
        stage=failure.stage if failure else "done",
        failure=failure.how if failure else "",
        detail=failure.detail if failure else "",
        plugins=result.plugins,
        facts=result.facts,
        measured=result.measured,
        seconds=time.monotonic() - began,
    )
