"""One side of a comparison: reports and sweeps, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asynckv.errors import ConfigError
from asynckv.tools.bench import journal, report


def _having(kind: type, *names: str) -> type[msgspec.Struct]:
    """Make the type of an object that has these fields, and maybe others."""
    return msgspec.defstruct("Having", [(name, kind) for name in names])


Figures = dict[str, float]
SHAPE = msgspec.defstruct(
    "Shape",
    [
        ("config", dict),
        ("environment", dict),
        ("blocks", dict),
        ("interrupted", bool),
        ("requests", _having(int, "completed", "failed")),
        ("bytes", _having(int, "wrong")),
        ("throughput", _having(float, "gbytes_per_s", "requests_per_s")),
        ("latency_s", _having(float, "p50", "p90", "p99", "max")),
        ("cpu_s", _having(float, "decode", "prefill")),
        ("pull_s", Figures, {}),
        ("loop_lag_s", Figures, {}),
        ("descriptors", Figures, {}),
        ("phases_s", dict[str, Figures], {}),
        ("ratio_to_floor", dict[str, dict[str, Figures]], {}),
    ],
)
"""What every report has, and what holds numbers only."""


class Run(NamedTuple):
    """One run: its parameters, its report, what to call it, and why it has no report."""

    params: dict[str, Any]
    report: dict[str, Any]
    name: str
    reason: str = ""

    @property
    def fault(self) -> str:
        """Say what went wrong, in short."""
        return "; ".join(text[:120] for text in report.faults(self.report)[:5]) if self.report else self.reason


@dataclass(slots=True)
class Side:
    """One side's runs; a run that failed has an empty report."""

    name: str
    is_sweep: bool = True
    runs: list[Run] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Of the runs that have one."""
        return [run.report for run in self.runs if run.report]


def load(text: str) -> Side:
    """Read one side: a report, a sweep, or a directory of them.

    Raises:
        ConfigError: A file is neither, of another schema, interrupted or unfinished.
    """
    side = Side(text)
    held = [(path, _read(path)) for path in _files(Path(text))]
    side.is_sweep = all(isinstance(found, journal.Sweep) for _, found in held)
    for path, found in held:
        if isinstance(found, journal.Sweep):
            _add_sweep(side, path, found)
        else:
            if found["interrupted"]:
                raise ConfigError(f"{path}: was interrupted, so its figures are of another run; measure it again")
            side.runs.append(Run(flat(found["config"]), found, str(path)))
            side.environments.append({k: str(v) for k, v in found["environment"].items()})
    return side


def refuse_repeated(texts: Sequence[str]) -> None:
    """Refuse a file that is given twice: its noise would be none, and the change as sure as anything.

    Raises:
        ConfigError: There is one.
    """
    seen: dict[Path, Path] = {}
    for path in (path for text in texts for path in _files(Path(text))):
        there = path.resolve()
        if there in seen:
            also = f" (as {seen[there]})" if seen[there] != path else ""
            raise ConfigError(f"{path}: was given twice{also}; every file is one measurement, so name it once")
        seen[there] = path


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix in (".json", ".jsonl"))
    if not found:
        raise ConfigError(f"{path}: holds no .json or .jsonl file")
    return found


def _read(path: Path) -> dict[str, Any] | journal.Sweep:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    try:
        found: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = None
    if journal.is_sweep(data) and "config" not in (found or {}):
        return journal.load(path)
    if not isinstance(found, dict) or not isinstance(found.get("schema"), str):
        raise ConfigError(f"{path}: is neither a report of asynckv bench nor a sweep")
    if found["schema"] != report.SCHEMA:
        raise ConfigError(
            f"{path}: is of schema {found['schema']}, and this asynckv compares {report.SCHEMA} and {journal.SCHEMA}"
        )
    check(found, str(path))
    return found


def check(found: Mapping[str, Any], where: str) -> None:
    """Refuse a report that lacks what every report has."""
    try:
        msgspec.convert(found, SHAPE)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: is damaged: {exc}") from exc


def _add_sweep(side: Side, path: Path, found: journal.Sweep) -> None:
    if missing := found.missing():
        total = len(found.head.points) * found.head.rounds
        raise ConfigError(
            f"{path}: is unfinished, {total - len(missing)} of {total} runs are there; go on with: {found.head.command}"
        )
    for row in found.latest().values():
        if row.report is not None:
            if row.report.get("schema") != report.SCHEMA:
                raise ConfigError(f"{path}: holds a report of schema {row.report.get('schema')}, not {report.SCHEMA}")
            check(row.report, str(path))
        name = f"{path} (round {row.round}, {row.key})"
        side.runs.append(Run(flat(row.params), row.report or {}, name, row.reason))
    side.environments.append(found.head.environment | {f"content of {k}": v for k, v in found.head.files.items()})


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Name every leaf of nested parameters by its dotted path."""
    if isinstance(value, Mapping):
        return {k: v for key, sub in value.items() for k, v in flat(sub, f"{name}.{key}".strip(".")).items()}
    return {name: json.dumps(value) if isinstance(value, list) else value}
