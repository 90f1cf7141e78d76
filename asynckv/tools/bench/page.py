"""A sweep as one HTML page that opens without a network: plots against load, and a table of all points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from asynckv.tools import frame
from asynckv.tools.bench.figures import FIGURES, Figure
from asynckv.tools.bench.floor import KIND, NAMES
from asynckv.tools.bench.journal import Point, Sweep, label
from asynckv.tools.bench.summary import SHARE, table

HINT = (
    "Points are medians of their rounds. Bars are their 95 % intervals; with fewer than nine rounds they reach from "
    "the lowest to the highest."
)
ONCE = "Every point was run once, so the noise is not known."
SCOPE = "Loopback on one host is not a network between two."
FLOOR = "Dotted lines are the floor: the same bytes moved by a raw NIXL loop."
AXES = {
    "rate": "requests offered per second",
    "speed": "speed of the trace's clock",
    "concurrency": "pulls in flight per decode rank",
    "prompt-tokens": "prompt length (tokens)",
}
"""What is drawn along x, if it is an axis of the sweep: the first of these, else the first axis that there is."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "x")
UCX = ("backend", "ucx_transports", "ucx_tls", "ucx_net_devices", "ucx_error_handling_mode")


class Drawn(NamedTuple):
    """A figure in a plot; a dotted one is the floor's."""

    figure: Figure
    name: str = ""
    dash: str = "solid"


class Plot(NamedTuple):
    """What is drawn against the load, as far as it was measured."""

    title: str
    unit: str
    drawn: Sequence[Drawn]
    is_log: bool = False


def _floor(path: str, scale: float = 1.0, name: str = "") -> Drawn:
    return Drawn(Figure(path, path, "", "", f"floor.{KIND}.{path}", scale), name, "dot")


PLOTS = (
    Plot("Throughput in bytes", "GB/s", [Drawn(FIGURES["gbytes_per_s"]), _floor("gbytes_per_s")]),
    Plot("Throughput in requests", "requests/s", [Drawn(FIGURES["requests_per_s"]), _floor("requests_per_s")]),
    Plot(
        "Latency, from call to usable bytes",
        "ms",
        [Drawn(FIGURES["p50"], "p50"), Drawn(FIGURES["p99"], "p99", "dash"), _floor("p50_s", 1e3, "p50")],
        True,
    ),
    Plot("CPU of the decode side per request", "µs", [Drawn(FIGURES["decode_cpu"]), _floor("cpu_s_per_request", 1e6)]),
    Plot("Share of the floor's throughput", "ratio, 1 is the floor", [Drawn(SHARE)]),
)


def make(sweep: Sweep, name: str) -> str:
    """Make the page.

    Args:
        sweep: Finished or not; the page says which.
        name: Of its file.
    """
    found = sweep.points()
    axis = next((n for n in (*AXES, *sweep.head.axes) if n in sweep.head.axes), "concurrency")
    model = next((str(r["config"]["model"]) for p in found for r in p.reports), "")
    heads, rows = table(sweep, has_noise=True)
    numbered = [[str(number), *row] for number, row in enumerate(rows, 1)]
    all_points = frame.table(
        ["point", *heads[:-1], "faults"], numbered, label="All points", texts=[*sweep.head.axes, "faults"]
    )
    commands = dict.fromkeys(row.command for point in found for row in point.rows)
    body = (
        f'{_verdict(sweep, found)}<h2>Against load</h2>\n<div class="plots">\n'
        f"{''.join(_figure(plot, found, axis) for plot in PLOTS)}</div>\n<h2>All points</h2>\n{all_points}"
        f"<h2>Machine, versions, what all points share</h2>\n{_facts(sweep, found)}"
        "<h2>Commands</h2>\n<details><summary>The sweep, and every point by itself</summary>"
        f'<pre tabindex="0">{escape(chr(10).join([sweep.head.command, "", *commands]))}</pre></details>\n'
    )
    is_beside_floor = any(point.interval(SHARE) for point in found)
    hint = f"{HINT if sweep.head.rounds > 1 else ONCE} {SCOPE}{f' {FLOOR}' if is_beside_floor else ''}"
    return frame.make(f"asynckv sweep: {model or name}", hint, body)


def _x(point: Point, axis: str) -> Any:
    """Place a point along x: by a number, or by a word."""
    text = point.axes.get(axis, str(point.params.get(axis.replace("-", "_"), "")))
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _traces(drawn: Drawn, found: Sequence[Point], axis: str) -> list[dict[str, Any]]:
    """Draw one figure: a line for each combination of the other axes."""
    series: dict[str, list[Point]] = {}
    for point in found:
        series.setdefault(label({k: v for k, v in point.axes.items() if k != axis}), []).append(point)
    traces = []
    for number, (name, points) in enumerate(series.items()):
        measured = [(_x(point, axis), y) for point in points if (y := point.interval(drawn.figure)) is not None]
        if not measured:
            continue
        is_floor, ys = drawn.dash == "dot", [y for _, y in measured]
        line = ", ".join(x for x in (f"floor: {NAMES[KIND]}" if is_floor else "", name) if x)
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{line} {drawn.name}".strip() or "asynckv",
            "x": [x for x, _ in measured],
            "y": [y.median for y in ys],
            "line": {"dash": drawn.dash, "width": 2},
            "marker": {"symbol": "diamond-open" if is_floor else SYMBOLS[number % len(SYMBOLS)], "size": 8},
            # Colours are the page's, one set for each theme.
            "meta": number,
        }
        if any(y.low < y.high for y in ys):
            bars = {"array": [y.high - y.median for y in ys], "arrayminus": [y.median - y.low for y in ys]}
            trace["error_y"] = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 4} | bars
        traces.append(trace)
    return traces


def _figure(plot: Plot, found: Sequence[Point], axis: str) -> str:
    """Draw one plot, and say it in words for those who do not see it."""
    traces = [trace for drawn in plot.drawn for trace in _traces(drawn, found, axis)]
    if not traces:
        return ""
    name, xs, ys = AXES.get(axis, axis), {_x(p, axis) for p in found}, [v for trace in traces for v in trace["y"]]
    x: dict[str, Any] = {"title": {"text": name}}
    if len(xs) > 1 and all(isinstance(v, float) and v > 0 for v in xs):
        x |= {"type": "log", "tickvals": sorted(xs), "ticktext": [frame.plain(v) for v in sorted(xs)]}
    else:
        x["type"] = "category"
        for trace in traces:
            trace["x"] = [frame.plain(v) for v in trace["x"]]
    y = frame.log_axis(plot.unit, ys) if plot.is_log and all(v > 0 for v in ys) else frame.axis(plot.unit)
    parts = []
    for trace in traces:
        first, last = (f"{trace['y'][i]:.4g} at {frame.plain(trace['x'][i])}" for i in (0, -1))
        parts.append(f"{trace['name']}: {first}, {last}")
    said = f"{plot.title}, {plot.unit} against {name}. {'; '.join(parts)}. All figures are in the table below."
    return frame.figure(plot.title, said, traces, {"xaxis": x, "yaxis": y})


def _verdict(sweep: Sweep, found: Sequence[Point]) -> str:
    """Say first what matters: whether all points are good, where most goes through, which share of the floor."""
    faulty, runs = sum(bool(point.faults) for point in found), sum(len(point.rows) for point in found)
    said = [f"{runs:,} {'run' if runs == 1 else 'runs'} of {len(found):,} points; {faulty or 'none'} with faults."]
    if missing := len(sweep.missing()):
        total = len(sweep.head.points) * sweep.head.rounds
        said.append(f"Unfinished: {total - missing} of {total} runs are there.")
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


def _facts(sweep: Sweep, found: Sequence[Point]) -> str:
    facts: dict[str, Any] = dict(sweep.head.environment)
    environments: list[Mapping[str, Any]] = [r["environment"] for p in found for r in p.reports]
    for name in UCX:
        if values := dict.fromkeys(str(each[name]) for each in environments if name in each):
            facts[name] = "; ".join(values)
    for name, value in (found[0].params if found else {}).items():
        is_said = value is not None and value is not False and name.replace("_", "-") not in sweep.head.axes
        if is_said and all(point.params.get(name) == value for point in found):
            facts[name] = value
    if times := [row.at for row in sweep.rows]:
        facts["measured"] = f"{min(times)} to {max(times)}"
    return frame.facts({name.replace("_", " "): str(value) for name, value in facts.items()})
