"""A sweep as one HTML page that opens without a network: plots against load, and a table of all points."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from typing import Any

import msgspec

from asynckv.bench.figures import FIGURES, Figure, leaves, named
from asynckv.bench.journal import Sweep
from asynckv.bench.summary import SHOWN, Summary, summarise

__all__ = ["REMEDY", "is_installed", "make"]

REMEDY = "plots need plotly: pip install 'asynckv[plots]'"
HINT = (
    "Points are medians of their rounds, bars their 95 % intervals: of fewer than nine from the lowest to the highest."
)
ONCE = "Every point was run once: the noise is not known."
LOADS = ("rate", "speed", "concurrency", "prompt-tokens")
"""What is drawn along x, if it is an axis: the first of these, else the first axis."""
FIRST = "raw_nixl"
"""The floor that an engine on NIXL can reach."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "x")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot", "dot")
NAMES = {
    "rate": "requests offered per second",
    "speed": "speed of the trace's clock",
    "concurrency": "pulls in flight per decode rank",
    "prompt-tokens": "prompt length (tokens)",
}

Line = tuple[str, Sequence[tuple[Any, float, float, float]]]
"""A name, and x, y, lowest and highest y of each point."""


def is_installed() -> bool:
    """Say whether plots can be drawn."""
    return importlib.util.find_spec("plotly") is not None


def make(sweep: Sweep, name: str) -> str:
    """Make the page.

    Args:
        sweep: Finished or not; the page says which.
        name: Of its file.
    """
    from plotly.offline import get_plotlyjs

    found = summarise(sweep)
    axis = _load_axis(sweep)
    missing, total = len(sweep.missing()), len(sweep.head.points) * sweep.head.rounds
    model = next((str(r["config"]["model"]) for p in found for r in p.reports), "")
    title = f"asynckv sweep: {model or name}"
    parts = {
        "title": escape(title),
        "hint": escape(HINT if sweep.head.rounds > 1 else ONCE),
        "notes": _notes(sweep, found, missing, total),
        "figures": "".join(_figure(i, plot) for i, plot in enumerate(_plots(sweep, found, axis))),
        "table": _table(sweep, found),
        "facts": _facts(sweep, found),
        "commands": _commands(sweep, found),
        "plotly": get_plotlyjs(),
    }
    text = resources.files("asynckv.bench").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass, so that nothing inside a part is taken for a mark.
    head, *rest = text.split("@@")
    return head + "".join(parts[x] if i % 2 == 0 else x for i, x in enumerate(rest))


# -- plots -----------------------------------------------------------------------------------------


def _load_axis(sweep: Sweep) -> str:
    return next((n for n in (*LOADS, *sweep.head.axes) if n in sweep.head.axes), "concurrency")


def _x(point: Summary, axis: str) -> Any:
    text = point.axes.get(axis, str(point.params.get(axis.replace("-", "_"), "")))
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _series(point: Summary, axis: str) -> str:
    rest = [f"{v} tokens" if k == "prompt-tokens" else f"{k} {v}" for k, v in point.axes.items() if k != axis]
    return ", ".join(rest) or "all"


def _lines(found: Sequence[Summary], axis: str, figure: Figure) -> list[Line]:
    out: dict[str, list[tuple[Any, float, float, float]]] = {}
    for point in found:
        line = out.setdefault(_series(point, axis), [])
        if (interval := point.interval(figure)) is not None:
            line.append((_x(point, axis), interval.median, interval.low, interval.high))
    return list(out.items())


def _floors(
    found: Sequence[Summary], axis: str, name: str, scale: float = 1.0, only: str | None = None
) -> list[dict[str, Any]]:
    """What the machine itself can do with the same requests, dotted in the colour of its line.

    The raw NIXL loop is shown at once, other kinds at a click on their names. `only` leaves out the others.
    """
    order = list(dict.fromkeys(_series(point, axis) for point in found))
    # `engine` is no floor, but the engine in the same rounds.
    paths = dict.fromkeys(path for p in found for r in p.reports for path, _ in leaves(r, "floor"))
    kinds = [path.split(".")[1] for path in paths if path.endswith(f".{name}") and ".engine." not in path]
    traces = []
    for kind in sorted(kinds, key=lambda kind: kind != FIRST):
        if only not in (None, kind):
            continue
        figure = Figure(kind, kind, "", "", _scaled(f"floor.{kind}.{name}", scale))
        symbol = f"{SYMBOLS[kinds.index(kind) % len(SYMBOLS)]}-open"
        for series, points in _lines(found, axis, figure):
            text = f"floor: {kind.replace('_', ' ')}" + ("" if series == "all" else f", {series}")
            trace = _trace(text, points, "dot", symbol, order.index(series))
            traces.append(trace if kind == FIRST or FIRST not in kinds else trace | {"visible": "legendonly"})
    return traces


def _scaled(path: str, scale: float) -> Callable[[Mapping[str, Any]], float | None]:
    def of(report: Mapping[str, Any]) -> float | None:
        value = dict(leaves(report, path)).get(path)
        return None if value is None else value * scale

    return of


def _shares(found: Sequence[Summary]) -> list[Figure]:
    """Which part of each floor's throughput is reached."""
    paths = dict.fromkeys(path for p in found for r in p.reports for path, _ in leaves(r, "ratio_to_floor"))
    chosen = [path for path in paths if path.endswith(".gbytes_per_s")]
    chosen.sort(key=lambda path: path.split(".")[1] != FIRST)
    return [replace(named(path, set(paths)), title=path.split(".")[1].replace("_", " ")) for path in chosen]


def _plots(sweep: Sweep, found: Sequence[Summary], axis: str) -> list[dict[str, Any]]:
    figure = FIGURES
    plots = [
        _plot(
            "Throughput in bytes",
            "GB/s",
            [_style(_lines(found, axis, figure["gbytes_per_s"]))],
            _floors(found, axis, "gbytes_per_s"),
        ),
        _plot(
            "Throughput in requests",
            "requests/s",
            [_style(_lines(found, axis, figure["requests_per_s"]))],
            _floors(found, axis, "requests_per_s"),
        ),
        _plot(
            "Latency, from call to usable bytes",
            "ms",
            [
                _style(_lines(found, axis, figure["p50"]), "p50", "solid"),
                _style(_lines(found, axis, figure["p99"]), "p99", "dash"),
            ],
            [trace | {"name": f"{trace['name']} p50"} for trace in _floors(found, axis, "p50_s", 1e3, only=FIRST)],
            log=True,
        ),
        _plot(
            "CPU of the decode side per request",
            "µs",
            [_style(_lines(found, axis, figure["decode_cpu"]))],
            _floors(found, axis, "cpu_s_per_request", 1e6, only=FIRST),
        ),
    ]
    if shares := _shares(found):
        styled = [
            _style(_lines(found, axis, share), f"of {share.title}", DASHES[i % len(DASHES)])
            for i, share in enumerate(shares)
        ]
        plots.append(_plot("Share of the floor's throughput", "ratio, 1 is the floor", styled, []))
    label = NAMES.get(axis, axis)
    xs = list(dict.fromkeys(_x(point, axis) for point in found))
    return [_finished(plot, label, xs) for plot in plots]


def _style(lines: Sequence[Line], suffix: str = "", dash: str = "solid") -> list[dict[str, Any]]:
    traces = []
    for index, (name, points) in enumerate(lines):
        full = suffix if name == "all" else f"{name} {suffix}".strip()
        traces.append(_trace(full or "asynckv", points, dash, SYMBOLS[index % len(SYMBOLS)], index))
    return traces


def _trace(name: str, points: Any, dash: str, symbol: str, color: int) -> dict[str, Any]:
    xs, ys, lows, highs = ([p[i] for p in points] for i in range(4))
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": xs,
        "y": ys,
        "line": {"dash": dash, "width": 2},
        "marker": {"symbol": symbol, "size": 8},
        # Colours are the page's, one set for each theme.
        "meta": color,
    }
    if any(low < high for low, high in zip(lows, highs, strict=True)):
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [h - y for h, y in zip(highs, ys, strict=True)],
            "arrayminus": [y - low for low, y in zip(lows, ys, strict=True)],
            "thickness": 1.2,
            "width": 4,
        }
    return trace


def _plot(
    title: str,
    unit: str,
    styled: Sequence[Sequence[dict[str, Any]]],
    floors: Sequence[dict[str, Any]],
    *,
    log: bool = False,
) -> dict[str, Any]:
    return {"title": title, "unit": unit, "traces": [*(t for group in styled for t in group), *floors], "log": log}


def _finished(plot: Mapping[str, Any], label: str, xs: Sequence[Any]) -> dict[str, Any]:
    """Check the plot against plotly's own schema, with its axes."""
    import plotly.graph_objects as go

    x: dict[str, Any] = {"title": {"text": label}}
    if len(xs) > 1 and all(isinstance(v, float) and v > 0 for v in xs):
        x |= {"type": "log", "tickvals": sorted(xs), "ticktext": [f"{v:g}" for v in sorted(xs)]}
    else:
        x["type"] = "category"
        for trace in plot["traces"]:
            trace["x"] = [f"{v:g}" if isinstance(v, float) else v for v in trace["x"]]
    y: dict[str, Any] = {"title": {"text": plot["unit"]}, "rangemode": "tozero"}
    if plot["log"] and all(v > 0 for trace in plot["traces"] for v in trace["y"]):
        ticks = _ticks([v for trace in plot["traces"] for v in trace["y"]])
        y |= {"type": "log", "tickvals": ticks, "ticktext": [f"{v:g}" for v in ticks]}
        y["title"]["text"] += " (log scale)"
    drawn = go.Figure(data=plot["traces"], layout={"xaxis": x, "yaxis": y})
    # Without plotly's template: the page has its own colours.
    drawn.update_layout(template=None)
    return {"title": plot["title"], "text": _spoken(plot, label), "json": drawn.to_json()}


def _ticks(values: Sequence[float]) -> list[float]:
    """Choose ticks of a logarithmic axis, and write them out: plotly's own say 2 and 5 in every decade."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [float(f"{step}e{decade}") for decade in decades for step in steps]


def _spoken(plot: Mapping[str, Any], label: str) -> str:
    """Say the plot in words, for those who do not see it."""
    parts = []
    for trace in plot["traces"]:
        if trace["x"] and "visible" not in trace:
            ends = [(_plain(trace["x"][i]), f"{trace['y'][i]:.4g}") for i in (0, -1)]
            parts.append(f"{trace['name']}: {ends[0][1]} at {ends[0][0]}, {ends[1][1]} at {ends[1][0]}")
    return f"{plot['title']}, {plot['unit']} against {label}. {'; '.join(parts)}. All figures are in the table below."


def _plain(x: Any) -> str:
    return f"{x:g}" if isinstance(x, float) else str(x)


def _figure(index: int, plot: Mapping[str, Any]) -> str:
    # A "</script" inside a string must not end the script.
    data = plot["json"].replace("<", "\\u003c")
    return (
        f'<figure><figcaption id="plot-{index}">{escape(plot["title"])}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(plot["text"])}"></div>'
        f'<script type="application/json">{data}</script></figure>\n'
    )


# -- text ------------------------------------------------------------------------------------------


def _notes(sweep: Sweep, found: Sequence[Summary], missing: int, total: int) -> str:
    notes = []
    if missing:
        notes.append(f"Unfinished: {total - missing} of {total} runs are there.")
    faulty = sum(bool(point.faults) for point in found)
    if faulty:
        notes.append(f"{faulty} of {len(found)} points failed or were bad; the table has the reasons.")
    if len({msgspec.json.encode(head.environment) for head in sweep.heads}) > 1:
        notes.append("Measured on more than one machine or version: figures may not be comparable.")
    return "".join(f'<p class="note" role="note">{escape(note)}</p>' for note in notes)


def _table(sweep: Sweep, found: Sequence[Summary]) -> str:
    shares = _shares(found)
    shown = [*(FIGURES[name] for name in SHOWN), *shares]
    heads = [escape(name) for name in sweep.head.axes] + ["runs"]
    for figure in shown:
        unit = "share of its GB/s" if figure in shares else figure.unit
        heads.append(f"{escape(figure.title)}<small>{escape(unit)}</small>")
    rows = []
    for point in found:
        cells = [f'<th scope="row">{escape(point.axes[name])}</th>' for name in sweep.head.axes]
        cells.append(f"<td>{point.runs}</td>")
        for figure in shown:
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


def _facts(sweep: Sweep, found: Sequence[Summary]) -> str:
    facts: dict[str, str] = {}
    for name in dict.fromkeys(n for head in sweep.heads for n in head.environment):
        held = dict.fromkeys(head.environment.get(name, "unknown") for head in sweep.heads)
        facts[name.replace("_", " ")] = ", then ".join(held)
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
    return "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())


def _commands(sweep: Sweep, found: Sequence[Summary]) -> str:
    lines = [sweep.head.command, "", *(command for point in found for command in point.commands)]
    return escape("\n".join(lines))
