"""Files of results: sweeps, which can be resumed, and reports, which can be compared.

A sweep's file has a head, which describes the grid and the machine, and one line per finished run. A line is written in
one piece and synced. A line that a crash cut off is removed, and its run is measured again. The last head counts, and
the last line of each point and round.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from asynckv.errors import ConfigError
from asynckv.tools.bench import report
from asynckv.tools.bench.figures import Figure, number_at
from asynckv.tools.bench.noise import Interval, median_of
from asynckv.tools.bench.protocol import MALFORMED
from asynckv.tools.console import grouped

SCHEMA = "asynckv.sweep/1"
BEGIN = f'{{"kind":"sweep","schema":"{SCHEMA}"'.encode()
Status = Literal["good", "bad", "failed"]


class Place(Struct, frozen=True):
    key: str
    axes: dict[str, str]


class Head(Struct, frozen=True, kw_only=True, tag="sweep", tag_field="kind"):
    """The first line of a sweep: its grid, its rounds and its machine."""

    schema: str = SCHEMA
    command: str
    rounds: int
    axes: dict[str, list[str]]
    points: list[Place]
    environment: dict[str, str]


class Row(Struct, frozen=True, kw_only=True, tag="point", tag_field="kind"):
    """One run of one point. `bad`: it has a report with failures, wrong bytes or leaks; `failed`: no report."""

    key: str
    round: int
    axes: dict[str, str]
    params: dict[str, Any]
    command: str
    status: Status
    reason: str
    seconds: float
    at: str
    report: dict[str, Any] | None


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Head | Row] = msgspec.json.Decoder(Head | Row)


@dataclass(slots=True)
class Sweep:
    """The lines of a file; `torn` is the number of bytes in an unfinished last line."""

    heads: list[Head] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    torn: int = 0

    def take(self, line: Head | Row) -> None:
        if isinstance(line, Head):
            self.heads.append(line)
        else:
            self.rows.append(line)

    @property
    def head(self) -> Head:
        return self.heads[-1]

    def latest(self) -> dict[tuple[str, int], Row]:
        return {(row.key, row.round): row for row in self.rows}

    def missing(self) -> list[tuple[int, str]]:
        """Return rounds and points to run, in order; every second round runs backwards, to spread drift evenly."""
        done, keys = self.latest(), [place.key for place in self.head.points]
        runs = ((i, key) for i in range(1, self.head.rounds + 1) for key in (keys if i % 2 else reversed(keys)))
        return [(i, key) for i, key in runs if (key, i) not in done]

    def points(self) -> list[Point]:
        """Return the measured points with their rounds, in the grid's order."""
        rows = grouped((row.key, row) for row in sorted(self.latest().values(), key=lambda row: row.round))
        return [Point(place.axes, rows[place.key]) for place in self.head.points if place.key in rows]


class Point(NamedTuple):
    axes: dict[str, str]
    rows: list[Row]

    @property
    def faults(self) -> list[str]:
        """Return the reasons of the rounds that were not good."""
        return list(dict.fromkeys(f"{row.status}: {row.reason}" for row in self.rows if row.status != "good"))

    def interval(self, figure: Figure) -> Interval | None:
        """Return the median of a figure over the rounds; None if no report has it."""
        found = [v for row in self.rows if row.report and (v := figure.of(row.report)) is not None]
        return median_of(found) if found else None


def label(axes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in axes.items())


def read(data: bytes, name: str) -> Sweep:
    """Read a sweep's file; refuse another kind of file, another schema, and damage before the last line."""
    if data[: len(BEGIN)] != BEGIN[: len(data)]:
        raise ConfigError(f"{name}: is not a sweep of schema {SCHEMA}, as asynckv bench sweep writes it")
    *lines, torn = data.split(b"\n")
    sweep = Sweep(torn=len(torn))
    for number, line in enumerate(lines, 1):
        try:
            sweep.take(_decoder.decode(line))
        except MALFORMED as exc:
            raise ConfigError(f"{name} line {number}: is damaged: {exc}") from exc
    return sweep


class Journal:
    """A sweep's file, open for one writer; it is created if needed."""

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, f"--out {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as exc:
            raise ConfigError(f"{self._name}: cannot be written: {exc.strerror}") from exc
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = path.read_bytes()
            self.sweep = read(data, self._name)
            self._file.truncate(len(data) - self.sweep.torn)
        except BaseException as exc:
            self.close()
            if isinstance(exc, BlockingIOError):
                raise ConfigError(f"{self._name}: another sweep is writing it") from exc
            if isinstance(exc, OSError):
                raise ConfigError(f"{self._name}: {exc.strerror or exc}") from exc
            raise

    def begin(self, head: Head) -> None:
        """Begin or resume this sweep; refuse another grid, another machine or another version."""
        if self.sweep.heads:
            old, remedy = self.sweep.head, "use another --out, or remove the file to start again"
            if [p.key for p in old.points] != [p.key for p in head.points]:
                raise ConfigError(f"{self._name}: holds another sweep ({old.command}); {remedy}")
            was, now = old.environment, head.environment
            if names := sorted(name for name in was.keys() | now if was.get(name) != now.get(name)):
                changes = ", ".join(f"{n} was {was.get(n, 'unknown')}, is {now.get(n, 'unknown')}" for n in names)
                raise ConfigError(f"{self._name}: was started in another environment: {changes}; {remedy}")
            if old.rounds >= head.rounds:
                return
        self.add(head)

    def add(self, line: Head | Row) -> None:
        """Append a line, and return when it is on disk."""
        data = _encoder.encode(line) + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file)
        except OSError as exc:
            raise ConfigError(f"{self._name}: cannot be written: {exc.strerror}") from exc
        self.sweep.take(line)

    def close(self) -> None:
        self._file.close()


# -- what is compared ------------------------------------------------------------------------------


OBJECTS = ("config", "environment", "blocks")
NUMBERS = (
    *("requests.completed", "requests.failed", "bytes.wrong"),
    *("throughput.gbytes_per_s", "throughput.requests_per_s"),
    *("latency_s.p50", "latency_s.p99", "cpu_s.decode"),
)


class Run(NamedTuple):
    """One run: its parameters, its report, its name, and the reason if it has no report."""

    params: dict[str, Any]
    report: dict[str, Any]
    name: str
    reason: str = ""

    @property
    def fault(self) -> str:
        return "; ".join(text[:120] for text in report.faults(self.report)[:5]) if self.report else self.reason


@dataclass(slots=True)
class Side:
    """One side of a comparison; a failed run has an empty report."""

    name: str
    is_sweep: bool = True
    runs: list[Run] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)


def load(text: str) -> Side:
    """Read one side: a report, a sweep, or a directory of them; refuse an unfinished sweep."""
    side = Side(text)
    for path in _files(Path(text)):
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
        if b'"asynckv.sweep/' in data[:200]:
            _add_sweep(side, path, read(data, str(path)))
            continue
        found = _report(data, path)
        side.is_sweep = False
        side.runs.append(Run(flat(found["config"]), found, str(path)))
        side.environments.append({k: str(v) for k, v in found["environment"].items()})
    return side


def refuse_repeated(texts: Sequence[str]) -> None:
    """Refuse a file that is given twice, because it would hide the noise, and make any change look certain."""
    seen: dict[Path, Path] = {}
    for path in (path for text in texts for path in _files(Path(text))):
        there = path.resolve()
        if there in seen:
            also = f" (as {seen[there]})" if seen[there] != path else ""
            raise ConfigError(f"{path}: was given twice{also}; give each file once, because it is one measurement")
        seen[there] = path


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
    if not found:
        raise ConfigError(f"{path}: holds no .json or .jsonl file")
    return found


def _report(data: bytes, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with suppress(*MALFORMED):
        found = msgspec.json.decode(data, type=dict[str, Any])
    if "schema" not in found:
        raise ConfigError(f"{path}: is neither a report of asynckv bench nor a sweep")
    _check_shape(found, path)
    return found


def _check_shape(found: Mapping[str, Any], path: Path) -> None:
    if (schema := found.get("schema")) != report.SCHEMA:
        raise ConfigError(f"{path}: has schema {schema}, but this asynckv compares {report.SCHEMA} and {SCHEMA}")
    absent = [name for name in OBJECTS if name not in found] + [x for x in NUMBERS if number_at(found, x) is None]
    if absent:
        raise ConfigError(f"{path}: is damaged: {', '.join(absent)} cannot be read")


def _add_sweep(side: Side, path: Path, found: Sweep) -> None:
    if not found.heads:
        raise ConfigError(f"{path}: holds no sweep yet")
    if missing := found.missing():
        total = len(found.head.points) * found.head.rounds
        raise ConfigError(
            f"{path}: is unfinished, with {total - len(missing)} of {total} runs; continue by: {found.head.command}"
        )
    for row in found.latest().values():
        if row.report is not None:
            _check_shape(row.report, path)
        name = f"{path} (round {row.round}, {row.key})"
        side.runs.append(Run(flat(row.params), row.report or {}, name, row.reason))
    side.environments.append(found.head.environment)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return every leaf of nested parameters by its dotted path."""
    if isinstance(value, Mapping):
        return {k: v for key, sub in value.items() for k, v in flat(sub, f"{name}.{key}".strip(".")).items()}
    return {name: json.dumps(value) if isinstance(value, list) else value}
