"""The table of results: a sweep's file has a head that says what is swept and where, then a line per finished run.

A line counts once it is whole: it is written in one piece and synced. A line that a crash tore off at the end is cut
away and measured again. The last head counts, and the last line of a point and round. A `Point` is the rounds of one
place of the grid taken together, for the table.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from asynckv.errors import ConfigError
from asynckv.tools.bench.figures import Figure
from asynckv.tools.bench.noise import Interval, median_of

SCHEMA = "asynckv.sweep/1"
MOST_ROUNDS = 1000


class Place(Struct, frozen=True):
    """One point of the grid."""

    key: str
    axes: dict[str, str]


class Head(Struct, frozen=True, kw_only=True, tag="sweep", tag_field="kind"):
    """What is swept, how often, on what."""

    schema: str = SCHEMA
    command: str
    rounds: int
    axes: dict[str, list[str]]
    points: list[Place]
    files: dict[str, str]
    environment: dict[str, str]


class Row(Struct, frozen=True, kw_only=True, tag="point", tag_field="kind"):
    """One point, measured once.

    Attributes:
        status: `good`; `bad`: it ran, but something failed, was wrong or leaked; `failed`: there is no report.
        seconds: What the whole run took.
        at: When it ended, UTC.
    """

    key: str
    round: int
    axes: dict[str, str]
    params: dict[str, Any]
    command: str
    status: Literal["good", "bad", "failed"]
    reason: str
    seconds: float
    at: str
    report: dict[str, Any] | None


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Head | Row] = msgspec.json.Decoder(Head | Row)
_START = _encoder.encode(Head(command="", rounds=1, axes={}, points=[], files={}, environment={}))[:40]
"""How every sweep's file begins."""


@dataclass(slots=True)
class Sweep:
    """What a file holds.

    Attributes:
        whole: Bytes of the whole lines.
        torn: Bytes after them, of a line that was never finished.
    """

    heads: list[Head] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    whole: int = 0
    torn: int = 0

    @property
    def head(self) -> Head:
        """What counts now."""
        return self.heads[-1]

    def latest(self) -> dict[tuple[str, int], Row]:
        """The row that counts, per point and round."""
        return {(row.key, row.round): row for row in self.rows}

    def order(self) -> Iterator[tuple[int, str]]:
        """All rounds and points as they are run: every second round backwards, so that drift falls on all alike."""
        keys = [place.key for place in self.head.points]
        for number in range(1, self.head.rounds + 1):
            for key in keys if number % 2 else reversed(keys):
                yield number, key

    def missing(self, *, retry_failed: bool = False) -> list[tuple[int, str]]:
        """What is still to be run; `retry_failed` counts what is not good as missing."""
        done = {where for where, row in self.latest().items() if row.status == "good" or not retry_failed}
        return [(number, key) for number, key in self.order() if (key, number) not in done]

    def points(self) -> list[Point]:
        """Take the rounds of every place together that has any, in the grid's order."""
        rows: dict[str, list[Row]] = {}
        for row in sorted(self.latest().values(), key=lambda row: row.round):
            rows.setdefault(row.key, []).append(row)
        return [Point(place.axes, rows[place.key]) for place in self.head.points if place.key in rows]


class Point(NamedTuple):
    """One place of the grid, measured."""

    axes: dict[str, str]
    rows: list[Row]

    @property
    def params(self) -> dict[str, Any]:
        return self.rows[0].params

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Of the rounds that have one."""
        return [row.report for row in self.rows if row.report is not None]

    @property
    def faults(self) -> list[str]:
        """Reasons of the rounds that were not good."""
        return list(dict.fromkeys(f"{row.status}: {row.reason}" for row in self.rows if row.status != "good"))

    def interval(self, figure: Figure) -> Interval | None:
        """Take a figure's rounds together; None where no report has it."""
        found = [v for report in self.reports if (v := figure.of(report)) is not None]
        return median_of(found) if found else None


def label(axes: Mapping[str, Any]) -> str:
    """Name a place of a grid."""
    return ", ".join(f"{name} {value}" for name, value in axes.items())


def read(data: bytes, name: str) -> Sweep:
    """Read a sweep's file.

    Raises:
        ConfigError: It is no sweep, of another schema, or damaged before its end.
    """
    found = Sweep()
    lines = data.split(b"\n")
    found.torn = len(lines.pop())
    found.whole = len(data) - found.torn
    for number, line in enumerate(lines, 1):
        entry = _entry(line, number, name)
        if isinstance(entry, Head):
            found.heads.append(entry)
        else:
            found.rows.append(entry)
    if not found.heads and not (data[: len(_START)] == _START[: len(data)]):
        raise ConfigError(f"{name}: is no sweep (asynckv bench sweep writes them)")
    return found


def _entry(line: bytes, number: int, name: str) -> Head | Row:
    if number == 1:
        try:
            schema = msgspec.json.decode(line)["schema"]
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError, RecursionError):
            schema = None
        if not isinstance(schema, str) or not schema.startswith("asynckv.sweep/"):
            raise ConfigError(f"{name}: is no sweep (asynckv bench sweep writes them)")
        if schema != SCHEMA:
            raise ConfigError(f"{name}: is of schema {schema}, and this asynckv reads {SCHEMA}")
    try:
        entry = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{name} line {number}: is damaged: {exc}") from exc
    if number == 1 and not isinstance(entry, Head):
        raise ConfigError(f"{name} line 1: is no head of a sweep")
    return entry


def is_sweep(data: bytes) -> bool:
    """Say whether a file was begun as a sweep, of whatever schema."""
    return b'"asynckv.sweep/' in data[:200]


def load(path: Path) -> Sweep:
    """Read a sweep that has at least begun.

    Raises:
        ConfigError: As `read`, or the file cannot be read, or not even its head is whole.
    """
    try:
        found = read(path.read_bytes(), str(path))
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    if not found.heads:
        raise ConfigError(f"{path}: holds no sweep yet")
    return found


class Journal:
    """The file, open for one writer.

    Args:
        path: Made if it is not there.

    Raises:
        ConfigError: It cannot be written, another sweep is writing it, or it holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, f"--out {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as exc:
            raise ConfigError(f"{self._name}: cannot be written: {exc.strerror}") from exc
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.sweep = read(path.read_bytes(), self._name)
                self.repaired = self.sweep.torn
                self._file.truncate(self.sweep.whole)
                os.fsync(self._file)
                _sync(path.parent)
            except BlockingIOError as exc:
                raise ConfigError(f"{self._name}: another sweep is writing it") from exc
            except OSError as exc:
                raise ConfigError(f"{self._name}: {exc.strerror or exc}") from exc
            undo.pop_all()

    def begin(self, head: Head) -> None:
        """Begin this sweep, or go on with it.

        Raises:
            ConfigError: The file holds another sweep, or one of another machine or version.
        """
        if self.sweep.heads:
            self._check(head)
            if self.sweep.head.rounds >= head.rounds:
                return
        self._append(head)
        self.sweep.heads.append(head)

    def add(self, row: Row) -> None:
        """Append a row; it is on the disk when this returns."""
        self._append(row)
        self.sweep.rows.append(row)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def _check(self, head: Head) -> None:
        old = self.sweep.head
        remedy = "use another --out, or remove the file to begin anew"
        if [p.key for p in old.points] != [p.key for p in head.points]:
            raise ConfigError(f"{self._name}: holds another sweep ({old.command}); {remedy}")
        if changed := sorted(n for n in old.files.keys() | head.files if old.files.get(n) != head.files.get(n)):
            raise ConfigError(f"{self._name}: {changed[0]} has changed since the sweep began; {remedy}")
        was, now = old.environment, head.environment
        if names := sorted(n for n in was.keys() | now if was.get(n) != now.get(n)):
            changes = ", ".join(f"{n} was {was.get(n, 'unknown')}, is {now.get(n, 'unknown')}" for n in names)
            raise ConfigError(f"{self._name}: was begun elsewhere: {changes}; {remedy}")

    def _append(self, line: Head | Row) -> None:
        data = _encoder.encode(line) + b"\n"
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
