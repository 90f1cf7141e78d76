"""`asynckv report`."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asynckv.errors import ConfigError
from asynckv.tools.output import check_writable, write, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynckv.tools.diagnose.records import Record

__all__ = ["EPILOG", "report"]

OUT, TIME = "Output", "Time"
SNIFFED = 1 << 16
"""Bytes by which a file is recognised."""

SHORT = 80
"""Bytes of the first line of an object that is written in many."""

LONGEST_TITLE = 80
"""Letters in the title of a page that is named by its engines."""

MAX_BENCH = 1 << 28
"""Bytes of a report of `asynckv bench`."""

EPILOG = """
[bold]Examples[/bold]

  asynckv report prefill.log decode.log -o report.html

  asynckv report logs/ --since 10m --title "Friday's outage"

  asynckv bench --layers 4 --floor --json bench.json --log bench.log; asynckv report bench.json bench.log

  asynckv report logs/ --json - | jq .failures

[bold]Exit status[/bold]  0 written, whatever it says; 2 bad input, nothing of asynckv's in it, or no plotly; 130 Ctrl-C
"""


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Logs (JSON lines of any number of processes; files, directories, - for stdin) and reports of "
            "asynckv bench --json, in any order.",
            metavar="LOGS|BENCH.JSON...",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the page; - for stdout.",
            show_default="report.html; none with --json alone",
            metavar="FILE",
            rich_help_panel=OUT,
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Write what the page says there; - for stdout.", metavar="FILE", rich_help_panel=OUT),
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.", rich_help_panel=OUT)] = "",
    since: Annotated[
        str | None,
        typer.Option(
            help="Leave out earlier events: a time (2026-01-31T12:00 or 12:00, UTC), or so long before the last event "
            "(90s, 10m, 2h).",
            metavar="TIME",
            rich_help_panel=TIME,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="Leave out later events, in the same forms.", metavar="TIME", rich_help_panel=TIME),
    ] = None,
) -> None:
    """Write a page about what a service did: throughput, latency, phases, blocks held, peers, failures, leaks, lag.

    Everything is inside one HTML file, which opens without a network.
    """
    from rich.console import Console

    from asynckv.tools import frame
    from asynckv.tools.diagnose import report_bench, report_page
    from asynckv.tools.diagnose.reading import read_with_progress
    from asynckv.tools.diagnose.records import Logs
    from asynckv.tools.diagnose.summary import align, summarise

    target = output or (None if json is not None else "report.html")
    if target == "-" and json == "-":
        raise ConfigError("--output - and --json - cannot share stdout; give one of them a file")
    check_writable("--output", target)
    check_writable("--json", json)
    errors = Console(stderr=True)
    benches, names = _sorted(inputs)
    logs = read_with_progress(names, errors) if names else Logs()
    if names and not logs.records and not benches:
        raise ConfigError(logs.nothing)
    if target is not None and not frame.is_installed():
        raise ConfigError(f"{frame.REMEDY}; or write --json, which needs none")
    if names and not logs.records:
        errors.print(f"asynckv: {logs.nothing}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    aligned = align(logs)
    summary = summarise(logs, *_between(aligned.records, since, until), aligned)
    summary.bench = [report_bench.read(value, name) for name, value in benches]
    write_json(json, summary)
    if target is None:
        return
    began = time.monotonic()
    page = report_page.make(summary, title or _title(summary))
    write("--output", target, page)
    size = f"{len(page.encode()) / 1e6:.1f} MB"
    if target != "-":
        errors.print(
            f"{target}: {size}, {summary.read.events:,} events, drawn in {time.monotonic() - began:.1f} s",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _sorted(inputs: list[str]) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Tell reports of `asynckv bench` from logs, by what is in them."""
    benches, logs = [], []
    for name in dict.fromkeys(inputs):
        found = _report(name) if name != "-" and Path(name).is_file() else None
        if found is None:
            logs.append(name)
        else:
            benches.append((name, found))
    return benches, logs


def _report(name: str) -> dict[str, Any] | None:
    """Read a file that is one JSON object with a schema of asynckv's; None if it is something else."""
    try:
        with open(name, "rb") as file:
            data = file.read(SNIFFED)
            first, newline, _ = data.partition(b"\n")
            if not data.lstrip().startswith(b"{"):
                return None
            found = _decoded(first)
            # One object in many lines, or in one that is long; a log has one in each line.
            if found is None and (not newline or len(first) < SHORT):
                data += file.read(MAX_BENCH - len(data) + 1)
                found = _decoded(data)
    except OSError as exc:
        raise ConfigError(f"{name}: {exc.strerror or exc}") from exc
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, str) or not schema.startswith("asynckv."):
        return None
    if len(data) > MAX_BENCH:
        raise ConfigError(f"{name}: is longer than any report of asynckv bench ({MAX_BENCH >> 20} MiB)")
    if schema.startswith("asynckv.sweep/"):
        raise ConfigError(f"{name}: is a sweep; asynckv bench page {name} draws it")
    if schema != "asynckv.bench/1":
        raise ConfigError(f"{name}: is of schema {schema[:80]}; this reads logs and reports of asynckv.bench/1")
    return dict(found)


def _decoded(data: bytes) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _between(records: Sequence[Record], since: str | None, until: str | None) -> tuple[float, float]:
    """Work out which times count."""
    from asynckv.tools.diagnose.reading import moment

    first, last = (records[0].at, records[-1].at) if records else (0.0, 0.0)
    least = moment("--since", since, last) if since is not None else -math.inf
    most = moment("--until", until, last) if until is not None else math.inf
    if not records:
        return -math.inf, math.inf
    if not any(least <= x.at <= most for x in records):
        begin, end = (datetime.fromtimestamp(x, UTC).isoformat(" ", "seconds") for x in (first, last))
        raise ConfigError(f"no event is between --since and --until; there are some from {begin} to {end}")
    return least, most


def _title(summary: Any) -> str:
    if summary.engines:
        names = list(dict.fromkeys(x.engine_id for x in summary.engines))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        said = f"{', '.join(x[:40] for x in names[:4])}{more}"
        return f"asynckv: {said if len(said) <= LONGEST_TITLE else f'{len(names):,} engines'}"
    return f"asynckv bench: {Path(summary.bench[0].name).name}"
