"""Runs doctor's own processes (`probe.py`), each with a deadline, and gathers the results."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from asynckv.tools.doctor.facts import Ucx
from asynckv.tools.doctor.probe import Order, Place, Refused, Result, Said
from asynckv.tools.doctor.ucx_log import ENVIRONMENT, read_log

START_S = 15.0
READ_S = 15.0
CONNECT_S = 6.0  # a second more than an engine gives a handshake
END_S = 3.0
MOST_READ = 4 << 20
MOST_SAID = 1 << 20  # bytes of one message
MOST_DETAIL = 1500
START = "from asynckv.tools.doctor.probe import main; main()"

T = TypeVar("T", Place, Result)

_DECODER: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_STAMP = re.compile(r"^[EWIF]\d{4} [\d:.]+\s+\d+ \S+?\] ", re.MULTILINE)


class Ended(Exception):
    """A process of ours did not do what it was to: `how` is `refused`, `died` or `hung`."""

    def __init__(self, how: str, stage: str, detail: str) -> None:
        super().__init__(f"{how} at {stage}: {detail}")
        self.how, self.stage, self.detail = how, stage, detail


class Probe:
    def __init__(self, order: Order, folder: Path) -> None:
        self.stage = "start"
        self._errors = folder / f"{order.name}.err"
        home = str(Path(__file__).parents[3])
        path = os.pathsep.join([home, *(entry for entry in sys.path if entry)])
        log = {"UCX_LOG_FILE": str(folder / f"{order.name}.ucx"), "PYTHONPATH": path}
        path_of_order = folder / f"{order.name}.order"
        path_of_order.write_bytes(msgspec.msgpack.encode(order))
        # A packet comes whole or not at all, so a process that hangs within a message blocks nothing.
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._errors.open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(path_of_order), str(theirs.fileno())],
                env={"NIXL_LOG_LEVEL": "WARN"} | os.environ | ENVIRONMENT | log,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                process_group=0,  # signals of the terminal are for its parent
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(END_S if kind in (None, Ended) else 0.0)

    def hear(self, kind: type[T]) -> T:
        """Wait for a value of this kind; every stage has a deadline of its own."""
        seconds = {"connect": CONNECT_S, "read": READ_S}
        while True:
            self._link.settimeout(seconds.get(self.stage, START_S))
            try:
                packet = self._link.recv(MOST_SAID)
                said = _DECODER.decode(packet) if packet else None
            except TimeoutError:
                self._popen.kill()
                raise Ended("hung", self.stage, f"it was silent from the stage {self.stage!r} on") from None
            except OSError:
                said = None
            except msgspec.DecodeError as exc:
                self._popen.kill()
                raise Ended("died", self.stage, f"its message cannot be read: {exc}") from None
            match said:
                case None:
                    raise Ended("died", self.stage, self._death())
                case str():
                    self.stage = said
                case Refused(why):
                    raise Ended("refused", self.stage, why)
                case _ if isinstance(said, kind):
                    return said
                case _:
                    self._popen.kill()
                    raise Ended("died", self.stage, f"it sent {type(said).__name__} instead of {kind.__name__}")

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
        self._link.close()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_READ).decode(errors="replace")


def try_nixl(note: Callable[[str], None], place: Place | None = None) -> Ucx:
    """Move bytes between two processes of this host, as two ranks would, and say what UCX made of it.

    With the place of an engine's memory a connection to it is opened instead, and none of it is read.
    """
    began = time.monotonic()
    result, failure = Result(), None
    with tempfile.TemporaryDirectory(prefix="asynckv-doctor-") as name:
        folder = Path(name)
        order = Order(f"doctor-reader-{os.getpid()}", place, place is None)
        try:
            with contextlib.ExitStack() as running:
                if place is None:
                    note("starting a process that lends")
                    owner = running.enter_context(Probe(Order("doctor-owner"), folder))
                    order = replace(order, place=owner.hear(Place))
                    note("reading from it")
                else:
                    note("opening a connection of NIXL's")
                result = running.enter_context(Probe(order, folder)).hear(Result)
        except Ended as exc:
            failure = exc
        # The reader's comes first, because its report counts if both have one.
        logs = sorted(folder.glob("*.ucx"), reverse=True)
        found = read_log(chain.from_iterable(_text(path).splitlines() for path in logs))
    how = {"stage": failure.stage, "failure": failure.how, "detail": failure.detail} if failure else {}
    return replace(found, **asdict(result), **how, seconds=time.monotonic() - began)
