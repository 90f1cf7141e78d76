"""Sweeps: a grid of runs over lists of options. Each run is a separate process and one line of the file.

So no run affects the next one, and the command in each line repeats that run alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from asynckv.arguments import without_control
from asynckv.errors import ConfigError
from asynckv.tools.bench import figures, machine, report
from asynckv.tools.bench.figures import SHARE
from asynckv.tools.bench.options import OF_SINGLE_RUNS
from asynckv.tools.bench.table import Head, Journal, Place, Row, Status, Sweep, label
from asynckv.tools.console import printable
from asynckv.tools.output import print_table

MOST_POINTS = 10_000
SHOWN = tuple(figures.FIGURES[name] for name in ("gbytes_per_s", "requests_per_s", "p50", "p99", "decode_cpu"))

# -- the grid --------------------------------------------------------------------------------------


class Point(NamedTuple):
    """One run of a grid: its arguments, its place (option without dashes -> value), and all parameters.

    The key is a digest of all parameters, including defaults, so the same point has the same key in every sweep.
    """

    key: str
    argv: tuple[str, ...]
    axes: dict[str, str]
    params: dict[str, Any]


class Grid(NamedTuple):
    """The options with several values, and all points; the last axis varies fastest."""

    axes: dict[str, list[str]]
    points: list[Point]

    def head(self, command: str, rounds: int) -> Head:
        places = [Place(point.key, point.axes) for point in self.points]
        here = machine.environment()
        return Head(command=command, rounds=rounds, axes=self.axes, points=places, environment=here)


def values(text: str) -> list[str]:
    """Split a list at semicolons if there are any, otherwise at commas; a separator at the end is allowed.

    Semicolons are for values that contain commas: `128:0.8,8192:0.2;1024`, or `128:0.8,8192:0.2;` alone.
    """
    mark, name = (";", "semicolon") if ";" in text else (",", "comma")
    found = [x.strip() for x in text.split(mark)]
    if not any(found):
        raise ConfigError("holds no value")
    if not found[-1]:
        found.pop()
    if not all(found):
        raise ConfigError(f"a value of the list is empty; remove the extra {name}")
    return found


def expand(command: Any, args: Sequence[str]) -> Grid:
    given = _options(command, args)
    if (size := math.prod(map(len, given.values()))) > MOST_POINTS:
        raise ConfigError(f"the sweep has {size} points, more than {MOST_POINTS}; shorten a list")
    axes = {name: [str(x) for x in found] for name, found in given.items() if len(found) > 1}
    points: dict[str, Point] = {}
    for chosen in product(*given.values()):
        pairs = dict(zip(given, chosen, strict=True))
        argv = [x for name, value in pairs.items() for x in (f"--{name}", value) if x is not None]
        # Parse every point first, so that wrong values are found before anything is measured.
        params = command.make_context("asynckv bench", list(argv)).params
        plain = {k: v for k, v in sorted(params.items()) if k not in OF_SINGLE_RUNS}
        key = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
        place = {name: str(pairs[name]) for name in axes}
        if key in points:
            raise ConfigError(f"two points of the sweep are the same: {label(points[key].axes)} and {label(place)}")
        points[key] = Point(key, tuple(argv), place, plain)
    return Grid(axes, list(points.values()))


def _options(command: Any, args: Sequence[str]) -> dict[str, Sequence[str | None]]:
    """Return the values of every option by its name without dashes; a flag has the value None."""
    context = command.context_class(command, info_name="asynckv bench")
    found, left, order = command.make_parser(context).parse_args(list(args))
    if left:
        raise ConfigError(f"{left[0]!r} is no option of asynckv bench; asynckv bench --help lists them")
    given: dict[str, Sequence[str | None]] = {}
    for param in order:
        flag, text = param.opts[0], found[param.name]
        name = flag.lstrip("-")
        if param.name in OF_SINGLE_RUNS:
            raise ConfigError(f"{flag} is for single runs; the reports of a sweep are the lines of --out")
        if name == "chunks":
            raise ConfigError(f"{flag} is for single runs, because the figures of a sweep are those of one way to read")
        if name in given:
            raise ConfigError(f"{flag} was given twice; an axis is one list, such as {flag} 1,16,64")
        try:
            given[name] = [None] if param.is_flag else values(text)
        except ConfigError as exc:
            raise ConfigError(f"{flag} {text!r}: {exc}") from None
    return given


# -- running ---------------------------------------------------------------------------------------


def target_of(out: str) -> Path:
    """Return the path of the results: FILE.jsonl, or sweep.jsonl in a directory."""
    if not out:
        raise ConfigError("--out is empty; give a FILE.jsonl or a directory")
    path = Path(out)
    if path.suffix == ".jsonl" and not path.is_dir():
        return path
    if (path.suffix or path.exists()) and not path.is_dir():
        raise ConfigError(f"--out {out} is neither a FILE.jsonl nor a directory")
    return path / "sweep.jsonl"


def judged(returncode: int, stdout: bytes, stderr: bytes) -> tuple[Status, str, dict[str, Any] | None]:
    """Return the result of a run: status, the reason if it is not good, and the report if there is one."""
    found: dict[str, Any] = {}
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        found = msgspec.json.decode(stdout, type=dict[str, Any])
    if returncode not in (0, 1) or found.get("schema") != report.SCHEMA:
        lines = stderr.decode(errors="replace").splitlines()
        said = [line.removeprefix("asynckv: ") for line in lines if line.startswith("asynckv: ")] or lines
        how = f"killed by signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
        return "failed", (said[-1].strip()[:600] if said else how), None
    if returncode == 0:
        return "good", "", found
    return "bad", "; ".join(report.faults(found))[:600] or "incomplete", found


def _measure(argv: Sequence[str]) -> tuple[int, bytes, bytes, bool]:
    """Run one point; return exit status, stdout, stderr, and whether Ctrl-C came (the run then ended in order)."""
    command = [sys.executable, "-m", "asynckv", "bench", *argv, "--json", "-"]
    piped: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **piped) as process:
        is_interrupted = False
        while True:
            try:
                out, errors = process.communicate()
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
            else:
                return process.returncode, out, errors, is_interrupted


def run(journal: Journal, points: Sequence[Point], progress: Callable[[int, Point, int, Row | None], None]) -> bool:
    """Run what the journal lacks, in its order; return True if Ctrl-C or SIGTERM ended it before the last run.

    `progress` is called with the number of finished runs, a point and its round: when the run begins, and again with
    its row when that is written.
    """
    by_key = {point.key: point for point in points}
    todo = journal.sweep.missing()
    total = len(journal.sweep.head.points) * journal.sweep.head.rounds
    done, is_interrupted = total - len(todo), False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for index, key in todo:
            point = by_key[key]
            progress(done, point, index, None)
            began = time.monotonic()
            returncode, out, errors, is_interrupted = _measure(point.argv)
            status, reason, found = judged(returncode, out, errors)
            if is_interrupted and found is None:
                break
            row = Row(
                key=key,
                round=index,
                axes=point.axes,
                params=point.params,
                command=shlex.join(["asynckv", "bench", *point.argv]),
                status=status,
                reason=reason,
                seconds=round(time.monotonic() - began, 3),
                at=datetime.now(UTC).isoformat(timespec="seconds"),
                report=found,
            )
            journal.add(row)
            done += 1
            progress(done, point, index, row)
            if is_interrupted:
                break
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    return is_interrupted and done < total


# -- showing ---------------------------------------------------------------------------------------


def result(row: Row) -> str:
    said = [] if row.status == "good" else [f"{row.status}: {printable(row.reason)}"]
    if row.report is not None:
        rates, latency = row.report["throughput"], row.report["latency_s"]
        said.append(
            f"{rates['gbytes_per_s']:.3f} GB/s, {rates['requests_per_s']:.1f} requests/s, "
            f"p50 {latency['p50'] * 1e3:.2f} ms, p99 {latency['p99'] * 1e3:.2f} ms"
        )
    return "; ".join(said)


def show(sweep: Sweep, console: Console) -> None:
    """Print a row per point, with medians over its rounds, and the reasons of runs that were not good."""
    points, head = sweep.points(), sweep.head
    if not points:
        return
    columns = [*SHOWN, *([SHARE] if any(point.interval(SHARE) for point in points) else [])]
    rows = []
    for point in points:
        row = [without_control(point.axes[name]) for name in head.axes]
        for figure in columns:
            form, interval = ".1%" if figure is SHARE else ",.4g", point.interval(figure)
            row.append("" if interval is None else format(interval.median, form))
        row.append(", ".join({fault.partition(":")[0]: "" for fault in point.faults}))
        rows.append(row)
    heads = [*map(without_control, head.axes), *(figures.head(each.name, each.unit) for each in columns), ""]
    styles = ["red" if point.faults else "" for point in points]
    print_table(console, heads, rows, texts=(len(heads) - 1,), styles=styles)
    for fault, count in Counter(fault for point in points for fault in point.faults).items():
        where = "one point" if count == 1 else f"{count} points"
        console.print(f"  ! {where} {printable(fault)}", style="red")
    if head.rounds > 1:
        console.print(_rounds([len(point.rows) for point in points], head))


def _rounds(runs: Sequence[int], head: Head) -> str:
    """Return the number of rounds behind the medians; an interrupted sweep lacks some."""
    total, absent = head.rounds, len(head.points) - len(runs)
    if min(runs) == total and not absent:
        return f"medians of {total} rounds"
    some = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
    left = f"; {absent} of {len(head.points)} points have none yet" if absent else ""
    return f"medians of {some} of {total} rounds{left}"
