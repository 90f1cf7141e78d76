"""A sweep as one HTML page that opens without a network: plots against load, and a table of all points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from asynckv.tools import frame
from asynckv.tools.bench.figures import FIGURES, Figure, at
from asynckv.tools.bench.floor import KIND, NAMES
from asynckv.tools.bench.journal import Point, Sweep, label
from asynckv.tools.bench.noise import Interval
from asynckv.tools.bench.summary import SHARE, shown
from asynckv.tools.frame import REMEDY, is_installed

__all__ = ["REMEDY", "is_installed", "make"]

HINT = (
    "Points are medians of their rounds. Bars are their 95 % intervals; with fewer than nine rounds they reach from "
    "the lowest to the highest."
)
ONCE = "Every point was run once, so the noise is not known."
FLOOR = "Dotted lines are the floor: the same bytes moved by a raw NIXL loop."
LOADS = ("rate", "speed", "concurrency", "prompt-tokens")
"""What is drawn along x, if it is an axis: the first of these, else the first axis."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "x")
AXES = {
    "rate": "requests offered per second",
    "speed": "speed of the trace's clock",
    "concurrency": "pulls in flight per decode rank",
    "prompt-tokens": "prompt length (tokens)",
}


def make(sweep: Sweep, name: str) -> str:
    """Make the page.

    Args:
        sweep: Finished or not; the page says which.
        name: Of its file.
    """
    found = sweep.points()
    axis = _load_axis(sweep)
    missing, total = len(sweep.missing()), len(sweep.head.points) * sweep.head.rounds
    model = next((str(r["config"]["model"]) for p in found for r in p.reports), "")
    body = (
        f"{_verdict(found)}{_notes(sweep, found, missing, total)}\n<h2>Against load</h2>\n"
        f'<div class="plots">\n{"".join(_figure(plot, found, axis) for plot in _plots(found))}</div>\n'
        '<h2>All points</h2>\n<div class="scroll" tabindex="0" role="region" aria-label="All points">'
        f"{_table(sweep, found)}</div>\n"
        f"<h2>Machine, versions, what all points share</h2>\n{_facts(sweep, found)}"
        "<h2>Commands</h2>\n<details><summary>The sweep, and every point by itself</summary>"
        f'<pre tabindex="0">{_commands(sweep, found)}</pre></details>\n'
    )
    hint = f"{HINT if sweep.head.rounds > 1 else ONCE} Loopback on one host is not a network between two."
    if _has(found, SHARE):
        hint += f" {FLOOR}"
    return frame.make(f"asynckv sweep: {model or name}", hint, body)


# -- plots -----------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """A figure in a plot.

    Attributes:
        name: Of its lines, beside what they are lines of.
        is_floor: It is what the machine itself can do with the same requests.
    """

    figure: Figure
    name: str = ""
    dash: str = "solid"
    is_floor: bool = False


class Plot(NamedTuple):
    """One plot: what is drawn against the load."""

    title: str
    unit: str
    drawn: Sequence[Drawn]
    is_log: bool = False


class Row(NamedTuple):
    """One dot of a plot, as a row of a flat table."""

    line: str
    series: int
    drawn: Drawn
    symbol: str
    x: Any
    y: Interval


def _load_axis(sweep: Sweep) -> str:
    return next((n for n in (*LOADS, *sweep.head.axes) if n in sweep.head.axes), "concurrency")


def _x(point: Point, axis: str) -> Any:
    text = point.axes.get(axis, str(point.params.get(axis.replace("-", "_"), "")))
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _series(point: Point, axis: str) -> str:
    return label({k: v for k, v in point.axes.items() if k != axis})


def _floor(found: Sequence[Point], name: str, scale: float = 1.0, suffix: str = "") -> list[Drawn]:
    """A dotted line, where the floor was measured."""
    figure = Figure(KIND, KIND, "", "", at(f"floor.{KIND}.{name}", scale))
    return [Drawn(figure, suffix, "dot", is_floor=True)] if _has(found, figure) else []


def _has(found: Sequence[Point], figure: Figure) -> bool:
    return any(figure.of(report) is not None for point in found for report in point.reports)


def _plots(found: Sequence[Point]) -> list[Plot]:
    bytes_, requests, p50, p99, cpu = (
        FIGURES[n] for n in ("gbytes_per_s", "requests_per_s", "p50", "p99", "decode_cpu")
    )
    plots = [
        Plot("Throughput in bytes", "GB/s", [Drawn(bytes_), *_floor(found, "gbytes_per_s")]),
        Plot("Throughput in requests", "requests/s", [Drawn(requests), *_floor(found, "requests_per_s")]),
        Plot(
            "Latency, from call to usable bytes",
            "ms",
            [Drawn(p50, "p50"), Drawn(p99, "p99", "dash"), *_floor(found, "p50_s", 1e3, "p50")],
            True,
        ),
        Plot(
            "CPU of the decode side per request",
            "µs",
            [Drawn(cpu), *_floor(found, "cpu_s_per_request", 1e6)],
        ),
    ]
    if _has(found, SHARE):
        plots.append(Plot("Share of the floor's throughput", "ratio, 1 is the floor", [Drawn(SHARE)]))
    return plots


def _rows(found: Sequence[Point], axis: str, plot: Plot) -> Iterator[Row]:
    order = list(dict.fromkeys(_series(point, axis) for point in found))
    for drawn in plot.drawn:
        for point in found:
            if (y := point.interval(drawn.figure)) is None:
                continue
            series = _series(point, axis)
            index = order.index(series)
            if drawn.is_floor:
                line = ", ".join(x for x in (f"floor: {NAMES[KIND]}", series) if x)
                symbol = "diamond-open"
            else:
                line, symbol = series, SYMBOLS[index % len(SYMBOLS)]
            yield Row(f"{line} {drawn.name}".strip() or "asynckv", index, drawn, symbol, _x(point, axis), y)


def _trace(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    drawn, ys = rows[0].drawn, [row.y for row in rows]
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [row.x for row in rows],
        "y": [y.median for y in ys],
        "line": {"dash": drawn.dash, "width": 2},
        "marker": {"symbol": rows[0].symbol, "size": 8},
        # Colours are the page's, one set for each theme.
        "meta": rows[0].series,
    }
    if any(y.low < y.high for y in ys):
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [y.high - y.median for y in ys],
            "arrayminus": [y.median - y.low for y in ys],
            "thickness": 1.2,
            "width": 4,
        }
    return trace


def _figure(plot: Plot, found: Sequence[Point], axis: str) -> str:
    """Draw one plot."""
    lines: dict[str, list[Row]] = {}
    for row in _rows(found, axis, plot):
        lines.setdefault(row.line, []).append(row)
    traces = [_trace(name, rows) for name, rows in lines.items()]
    label, xs, ys = AXES.get(axis, axis), {_x(p, axis) for p in found}, [v for trace in traces for v in trace["y"]]
    x: dict[str, Any] = {"title": {"text": label}}
    if len(xs) > 1 and all(isinstance(v, float) and v > 0 for v in xs):
        x |= {"type": "log", "tickvals": sorted(xs), "ticktext": [frame.plain(v) for v in sorted(xs)]}
    else:
        x["type"] = "category"
        for trace in traces:
            trace["x"] = [frame.plain(v) for v in trace["x"]]
    y = frame.log_axis(plot.unit, ys) if plot.is_log and all(v > 0 for v in ys) else frame.axis(plot.unit)
    return frame.figure(plot.title, _spoken(plot, label, traces), traces, {"xaxis": x, "yaxis": y})


def _spoken(plot: Plot, label: str, traces: Sequence[Mapping[str, Any]]) -> str:
    """Say the plot in words, for those who do not see it."""
    parts = []
    for trace in traces:
        ends = [(frame.plain(trace["x"][i]), f"{trace['y'][i]:.4g}") for i in (0, -1)]
        parts.append(f"{trace['name']}: {ends[0][1]} at {ends[0][0]}, {ends[1][1]} at {ends[1][0]}")
    return f"{plot.title}, {plot.unit} against {label}. {'; '.join(parts)}. All figures are in the table below."


# -- text ------------------------------------------------------------------------------------------


def _verdict(found: Sequence[Point]) -> str:
    """Say first what matters: whether all points are good, where most goes through, which share of the floor."""
    faulty, runs = sum(bool(point.faults) for point in found), sum(len(point.rows) for point in found)
    said = [f"{runs:,} {'run' if runs == 1 else 'runs'} of {len(found):,} points; {faulty or 'none'} with faults."]
    for name, of in (("gbytes_per_s", "Most bytes"), ("requests_per_s", "Most requests")):
        reached = [(y.median, point) for point in found if (y := point.interval(FIGURES[name]))]
        if reached:
            most, point = max(reached, key=lambda x: x[0])
            p99 = point.interval(FIGURES["p99"])
            late = f", p99 {p99.median:,.4g} {FIGURES['p99'].unit}" if p99 else ""
            said.append(f"{of}: {most:,.4g} {FIGURES[name].unit} at {label(point.axes)}{late}.")
    if shares := [y.median for point in found if (y := point.interval(SHARE))]:
        said.append(f"Share of the floor's bytes per second ({NAMES[KIND]}): {min(shares):.0%} to {max(shares):.0%}.")
    return frame.verdict(said, is_good=not faulty)


def _notes(sweep: Sweep, found: Sequence[Point], missing: int, total: int) -> str:
    notes = []
    if missing:
        notes.append(f"Unfinished: {total - missing} of {total} runs are there.")
    faulty = sum(bool(point.faults) for point in found)
    if faulty:
        notes.append(f"{faulty} of {len(found)} points failed or were bad; the table has the reasons.")
    return "".join(f'<p class="note" role="note">{escape(note)}</p>' for note in notes)


def _table(sweep: Sweep, found: Sequence[Point]) -> str:
    columns = shown(found)
    heads = [escape(name) for name in sweep.head.axes] + ["runs"]
    for figure in columns:
        unit = "share of its GB/s" if figure is SHARE else figure.unit
        heads.append(f"{escape(NAMES[KIND] if figure is SHARE else figure.title)}<small>{escape(unit)}</small>")
    rows = []
    for point in found:
        cells = [f'<th scope="row">{escape(point.axes[name])}</th>' for name in sweep.head.axes]
        cells.append(f"<td>{len(point.rows)}</td>")
        for figure in columns:
            interval = point.interval(figure)
            if interval is None:
                cells.append("<td>–</td>")
                continue
            noise = f"<small>{interval.low:,.4g} … {interval.high:,.4g}</small>" if interval.low < interval.high else ""
            cells.append(f"<td>{interval.median:,.4g}{noise}</td>")
        rows.append(f"<tr{' class=bad' if point.faults else ''}>{''.join(cells)}</tr>")
        if point.faults:
            width = len(heads)
            rows.append(f'<tr class="reason"><td colspan="{width}">{escape("; ".join(point.faults))}</td></tr>')
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _facts(sweep: Sweep, found: Sequence[Point]) -> str:
    facts = {name.replace("_", " "): value for name, value in sweep.head.environment.items()}
    for name in ("backend", "ucx_transports", "ucx_tls", "ucx_net_devices", "ucx_error_handling_mode"):
        values = dict.fromkeys(
            str(r["environment"][name]) for p in found for r in p.reports if name in r["environment"]
        )
        if values:
            facts[name.replace("_", " ")] = "; ".join(values)
    same = {
        k: v
        for k, v in (found[0].params if found else {}).items()
        if v is not None and v is not False and all(p.params.get(k) == v for p in found)
    }
    facts |= {k.replace("_", " "): str(v) for k, v in same.items() if k.replace("_", "-") not in sweep.head.axes}
    times = [row.at for row in sweep.rows]
    if times:
        facts["measured"] = f"{min(times)} to {max(times)}"
    return frame.facts(facts)


def _commands(sweep: Sweep, found: Sequence[Point]) -> str:
    commands = dict.fromkeys(row.command for point in found for row in point.rows)
    return escape("\n".join([sweep.head.command, "", *commands]))
