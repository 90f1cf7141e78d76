"""Plots of a report: each says in its title what is seen, and shares the time axis with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from asynckv.tools import frame
from asynckv.tools.diagnose.colours import BAD, PHASES, STATES, Colour
from asynckv.tools.diagnose.report_text import (
    EARLY_S,
    bytes_text,
    count_text,
    duration,
    ended_early,
    is_unusual,
    named,
    number,
    safe,
    share,
    time_text,
)
from asynckv.tools.diagnose.summary_model import Away, Engine, Kind, Pair, Summary

__all__ = [
    "away",
    "bands",
    "blocks",
    "failures",
    "latency",
    "offloaded",
    "phase_quantiles",
    "phases",
    "quarantine",
    "readers",
    "states",
    "throughput",
    "volume",
]

NONE = Colour("#8a94a0", "#7f8a97")
THIN = {"gone": 0.2}
"""A peer whose process died is gone for ever: that is not what to look at."""

MOST_LINES = 30
"""Rows of a plot with a row for each process or peer."""

MOST_CAUSES = 7
"""Colours that can be told apart."""

BAND, BAND_ENDED = "rgba(226,75,64,0.16)", "rgba(128,138,150,0.22)"
"""Of times: seen on light and on dark pages."""

FAR = 5.0
"""So many times what is usual is not drawn whole."""

FEW = 40
"""So few values are drawn with a mark each: a line through one is none."""


def _ms(at: float) -> float:
    return round(at * 1e3, 3)


def _time_axis(summary: Summary) -> dict[str, Any]:
    end = max(summary.last, summary.windows[-1] + summary.window_s)
    return {
        "type": "date",
        "range": [_ms(summary.windows[0]), _ms(end)],
        "title": {"text": f"UTC, {time_text(summary.first, with_day=True)[:10]}; one value per {_width(summary)}"},
        "tickangle": 0,
        "tickformat": _clock(end - summary.windows[0]),
        "hoverformat": "%H:%M:%S.%3f" if summary.window_s < 1 else "%H:%M:%S",
    }


def _clock(span: float) -> str:
    """How ticks are written, so that no two are alike: the day is below the axis."""
    if span < 10:
        return "%H:%M:%S.%L" if span < 2 else "%H:%M:%S.%1f"
    return "%H:%M:%S" if span < 3600 else "%H:%M" if span < 86400 else "%m-%d %H:%M"


def _width(summary: Summary) -> str:
    return duration(summary.window_s).replace(".00\u00a0", "\u00a0").replace(".0\u00a0", "\u00a0")


def _middles(summary: Summary) -> list[float]:
    return [_ms(start + summary.window_s / 2) for start in summary.windows]


def _label(text: str, most: int = 60) -> str:
    """Make a name fit for plotly, which takes some tags for markup."""
    return escape(safe(text, most), quote=False)


def _line(
    summary: Summary, name: str, values: Sequence[float | None], colour: Any, unit: str, **more: Any
) -> dict[str, Any]:
    is_sparse = sum(v is not None for v in values) <= FEW
    return {
        "type": "scatter",
        "mode": "lines+markers" if is_sparse else "lines",
        "name": name,
        "x": _middles(summary),
        "y": [None if v is None else float(f"{v:.6g}") for v in values],
        "line": {"width": 2, **more},
        "marker": {"size": 5},
        "meta": colour,
        "hovertemplate": f"%{{y:.4~g}} {unit} at %{{x}}<extra>%{{fullData.name}}</extra>",
    }


def _bars(summary: Summary, name: str, values: Sequence[float | None], colour: Any, unit: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": _middles(summary),
        "y": [None if v is None else float(f"{v:.6g}") for v in values],
        "width": _ms(summary.window_s) * 0.96,
        "marker": {"line": {"width": 0}},
        "meta": colour,
        "hovertemplate": f"%{{y:.4~g}} {unit} at %{{x}}<extra>%{{fullData.name}}</extra>",
    }


def _plot(
    summary: Summary, caption: str, spoken: str, traces: Sequence[Mapping[str, Any]], yaxis: dict[str, Any], **more: Any
) -> str:
    layout = {"xaxis": _time_axis(summary), "yaxis": yaxis, "shapes": bands(summary), **more.pop("layout", {})}
    return frame.figure(caption, f"{caption}. {spoken}", traces, layout, **more)


def bands(summary: Summary) -> list[dict[str, Any]]:
    """Mark through a plot when some event loop was away, and when some log had ended."""
    span = summary.last - summary.first
    away = sorted(summary.away, key=lambda x: -x.seconds)[:MOST_LINES]
    found = [(x.since, x.until, BAND) for x in away if x.seconds > span / 200]
    early = [x for x in ended_early(summary) if is_unusual(x, summary.last)]
    found += [(x.last, summary.last, BAND_ENDED) for x in early[:1]]
    place = {"type": "rect", "layer": "below", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}}
    return [{**place, "x0": _ms(since), "x1": _ms(until), "fillcolor": colour} for since, until, colour in found]


def readers(summary: Summary) -> list[Engine]:
    """Return processes of the decode side that were not there for some time: their loops were away, or logs end."""
    away = {x.rank for x in summary.away if x.seconds > EARLY_S}
    early = {x.rank for x in ended_early(summary) if is_unusual(x, summary.last)}
    return [x for x in summary.engines if not x.leases and x.rank in away | early]


def _sampled(summary: Summary) -> str:
    """Say how much of what ended the logs name."""
    pulls = summary.pulls
    if pulls.ended < pulls.logged + 0.5:
        return "Every pull that ended is in the logs."
    return (
        f"{pulls.logged:,} of {count_text(pulls.ended)} pulls are in the logs one by one, all that failed among them; "
        f"the rest is counted there."
    )


# -- pulls -------------------------------------------------------------------------------------------------


def throughput(summary: Summary) -> str:
    """Draw how many pulls ended."""
    pulls = summary.pulls
    traces = [_line(summary, "ended", pulls.ended_per_s, 0, "per second")]
    if pulls.failed:
        traces.append(_line(summary, "of these failed", pulls.failed_per_s, list(BAD), "per second", dash="dot"))
    most = max(pulls.ended_per_s)
    return _plot(
        summary,
        "Pulls that ended per second",
        f"At most {most:.4g} per second.",
        traces,
        frame.axis("pulls per second"),
        note=_sampled(summary),
    )


def volume(summary: Summary) -> str:
    """Draw how much was moved."""
    values = summary.pulls.bytes_per_s
    most = max(values)
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if most >= s or s == 1)
    return _plot(
        summary,
        "Bytes moved per second",
        f"At most {bytes_text(most)} per second.",
        [_line(summary, "moved", [v / size for v in values], 0, f"{unit}/s")],
        frame.axis(f"{unit}/s"),
        note="A pull's bytes count when it ends."
        + (" Estimated from those in the logs." if summary.pulls.ended > summary.pulls.logged + 0.5 else ""),
    )


def offloaded(summary: Summary) -> str:
    """Draw how much was moved between the tiers."""
    moves = {move: values for move, values in summary.offloads.bytes_per_s.items() if any(values)}
    most = max(max(values) for values in moves.values())
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if most >= s or s == 1)
    return _plot(
        summary,
        "Bytes moved between tiers per second",
        f"At most {bytes_text(most)} per second.",
        [
            _line(summary, move.replace("_", " "), [v / size for v in values], i, f"{unit}/s")
            for i, (move, values) in enumerate(moves.items())
        ],
        frame.axis(f"{unit}/s"),
        note="Logged at most once a minute by each rank, and spread evenly over that time.",
    )


def latency(summary: Summary) -> str:
    """Draw quantiles of what completed."""
    pulls = summary.pulls
    assert pulls.latency_s is not None
    rows: list[tuple[str, Sequence[float | None], Any, str]] = [
        ("slowest", pulls.max_s, list(NONE), "dot"),
        ("p99", pulls.p99_s, 1, "dash"),
        ("p50", pulls.p50_s, 0, "solid"),
    ]
    traces, values = [], []
    for name, found, series, dash in rows:
        ms = [None if v is None or v <= 0 else v * 1e3 for v in found]
        values += [v for v in ms if v is not None]
        traces.append(_line(summary, name, ms, series, "ms", dash=dash))
    kind = pulls.latency_s
    return _plot(
        summary,
        "Latency of pulls that completed, from call to usable bytes",
        f"p50 {duration(kind.p50)}, p99 {duration(kind.p99)}, slowest {duration(kind.max)} over all.",
        traces,
        frame.log_axis("ms", values),
        note=f"Over all: p50 {duration(kind.p50)}, p90 {duration(kind.p90)}, p99 {duration(kind.p99)}, "
        f"slowest {duration(kind.max)}.",
    )


def phases(summary: Summary) -> str:
    """Draw what the time went into."""
    found = summary.pulls.mean_phases_s
    traces = [
        _bars(summary, name, [None if v is None else v * 1e3 for v in found[name]], list(colour), "ms")
        for name, colour in PHASES.items()
        if name in found and name != "release" and any(found[name])
    ]
    means = summary.pulls.phases_s
    parts = {name: means[name].mean for name in PHASES if name in means and name != "release"}
    total = sum(parts.values())
    columns = zip(*(x["y"] for x in traces), strict=True)
    heights = sorted(height for column in columns if (height := sum(filter(None, column))))
    axis, beyond = frame.axis("ms, mean per pull"), ""
    if heights and heights[-1] > FAR * (usual := heights[int(0.9 * (len(heights) - 1))]):
        # One slow start would press all others flat.
        axis |= {"range": [0, 2 * usual]}
        higher = sum(x > 2 * usual for x in heights)
        beyond = f" {higher} of {len(heights)} values go beyond, up to {duration(heights[-1] / 1e3)}."
    said = ", ".join(f"{name} {share(mean, total)}" for name, mean in sorted(parts.items(), key=lambda x: -x[1])[:4])
    return _plot(
        summary,
        "Where the time of a pull that completed went, on average",
        f"{said}.",
        traces,
        axis,
        layout={"barmode": "stack"},
        note=f"Over all: {said}. What is stacked adds up to the latency; release comes after it.{beyond}",
    )


def phase_quantiles(kinds: Mapping[str, Kind], caption: str, note: str = "") -> str:
    """Draw quantiles of every phase, over all."""
    names = [name for name in PHASES if name in kinds and kinds[name].max > 0]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "showlegend": False,
            "y": [name],
            "x": [float(f"{getattr(kinds[name], quantile) * 1e3:.6g}")],
            "width": width,
            "opacity": opacity,
            "marker": {"line": {"width": 0}},
            "meta": list(PHASES[name]),
            "hovertemplate": f"{quantile} %{{x:.4~g}} ms<extra>{name}</extra>",
        }
        for quantile, width, opacity in (("p99", 0.35, 0.55), ("p50", 0.7, 1))
        for name in names
    ]
    said = "; ".join(f"{n}: p50 {duration(kinds[n].p50)}, p99 {duration(kinds[n].p99)}" for n in names)
    layout = {
        "xaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": ""}, "autorange": "reversed", "categoryorder": "array", "categoryarray": names},
        "barmode": "overlay",
        "meta": {"height": 110 + 28 * max(len(names), 3)},
    }
    return frame.figure(caption, f"{caption}. {said}.", traces, layout, note=note)


# -- what went wrong -------------------------------------------------------------------------------------------


def failures(summary: Summary) -> str:
    """Draw failures by cause."""
    words = {"pull": "", "attempt": "tried again: ", "lease": "lease "}
    shown = summary.failures[:MOST_CAUSES]
    traces = [
        _bars(summary, f"{words[x.side]}{_label(x.cause, 40)} ({x.count:,})", x.counts, i, "")
        for i, x in enumerate(shown)
    ]
    rest = summary.failures[MOST_CAUSES:]
    if rest:
        counts = [sum(column) for column in zip(*(x.counts for x in rest), strict=True)]
        traces.append(_bars(summary, f"{len(rest)} other causes ({sum(counts):,})", counts, list(NONE), ""))
    highest = max((sum(column) for column in zip(*(x.counts for x in summary.failures), strict=True)), default=0)
    whole = {"dtick": 1} if highest <= FEW else {"tickformat": ",d"}  # ticks between whole numbers are none
    return _plot(
        summary,
        "Failures by cause",
        "; ".join(f"{x.side} {x.cause}: {x.count}" for x in shown) + ".",
        traces,
        frame.axis(f"failures per {_width(summary)}") | whole,
        layout={"barmode": "stack"},
        note="Every failure is in the logs.",
        is_wide=True,
    )


def blocks(summary: Summary) -> str:
    """Draw what prefill sides had lent."""
    leases = summary.leases
    is_sampled = leases.lent > leases.logged + 0.5
    traces = [_line(summary, "lent (estimated)" if is_sampled else "lent", leases.blocks, 0, "blocks")]
    if is_sampled:
        traces.append(_line(summary, "in the logs: at least", leases.blocks_logged, 5, "blocks", dash="dash"))
    if any(leases.blocks_badly):
        traces.append(
            _line(summary, "of leases that were never released", leases.blocks_badly, list(BAD), "blocks", dash="dot")
        )
    note = (
        f"{leases.logged:,} of {count_text(leases.lent)} leases are in the logs one by one, all that ended badly among "
        "them."
        if is_sampled
        else "Every lease is in the logs."
    )
    return _plot(
        summary,
        "Prefill side: blocks that were lent",
        f"At most {max(leases.blocks):.4g}, on average over {_width(summary)}.",
        traces,
        frame.axis("blocks, mean"),
        note=note,
    )


def quarantine(summary: Summary) -> str:
    """Draw what decode sides could not give back."""
    found = summary.quarantine
    return _plot(
        summary,
        "Decode side: failed pulls whose blocks a transfer could still write",
        f"At most {max(found.pulls):.4g}; the longest took {duration(found.longest_s)}.",
        [_line(summary, "quarantined", found.pulls, list(BAD), "pulls")],
        frame.axis("pulls, mean"),
        note=f"{found.returned:,} came back, {found.retired:,} were retired, of {found.open:,} the logs do not say. "
        f"The longest took {duration(found.longest_s)}.",
    )


# -- rows of spans -------------------------------------------------------------------------------------------------


def _spans(
    summary: Summary,
    caption: str,
    spoken: str,
    rows: Sequence[str],
    spans: Mapping[str, Sequence[tuple[int, float, float, str]]],
    colours: Mapping[str, Any],
    note: str,
) -> str:
    """Draw spans of time in rows: per name its spans, each with the number of its row, begin, end and text."""
    least = (summary.windows[-1] + summary.window_s - summary.windows[0]) / 400  # what is too short to be seen
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": _label(name),
            "y": [row for row, *_ in found],
            "base": [_ms(since) for _, since, _, _ in found],
            "x": [_ms(max(until - since, least)) for _, since, until, _ in found],
            "width": THIN.get(name, 0.7),
            "marker": {"line": {"width": 0}},
            "meta": colours.get(name, list(NONE)),
            "customdata": [_label(text, 200) for *_, text in found],
            "hovertemplate": f"%{{customdata}}<extra>{_label(name)}</extra>",
        }
        for name, found in spans.items()
    ]
    ticks = [escape(named(row, 60), quote=False) for row in rows]
    yaxis = {
        "title": {"text": ""},
        "tickvals": list(range(len(rows))),
        "ticktext": ticks,
        "range": [len(rows) - 0.4, -0.6],
        "showgrid": False,
        "zeroline": False,
    }
    height = 96 + 24 * max(len(rows), 2)
    layout = {"barmode": "overlay", "meta": {"height": height}}
    return _plot(summary, caption, spoken, traces, yaxis, layout=layout, note=note, is_wide=True)


def away(summary: Summary) -> str:
    """Draw when event loops did not come to their engines."""
    by_rank: dict[str, list[Away]] = {}
    for span in summary.away:
        by_rank.setdefault(span.rank, []).append(span)
    ranked = sorted(by_rank, key=lambda r: -max(x.seconds for x in by_rank[r]))
    rows = ranked[:MOST_LINES]
    spans = [
        (i, x.since, x.until, f"{duration(x.seconds)}; meanwhile {x.leases:,} leases, {x.pulls:,} pulls")
        for i, rank in enumerate(rows)
        for x in by_rank[rank]
    ]
    worst = max(summary.away, key=lambda x: x.seconds)
    said = f"{number(len(summary.away), 'time', 'times')} in {number(len(ranked), 'process', 'processes')}"
    said = f"{said[0].upper()}{said[1:]}, for up to {duration(worst.seconds)}"
    more = f" {len(ranked) - len(rows):,} more are in the report as JSON." if len(ranked) > len(rows) else ""
    return _spans(
        summary,
        "When event loops did not come to their engines",
        f"{said} in {safe(worst.rank, 60)}.",
        rows,
        {"loop away": spans},
        {"loop away": list(BAD)},
        f"{said}. At most one in ten seconds is logged per process.{more}",
    )


def states(summary: Summary, pairs: Sequence[Pair]) -> str:
    """Draw the states of peers."""
    shown = pairs[:MOST_LINES]
    is_one = len({x.reader for x in pairs}) == 1
    rows = [x.peer if is_one else f"{named(x.peer, 28)} ← {named(x.reader, 28)}" for x in shown]
    lost = readers(summary)[:MOST_LINES]
    rows = [f"{named(x.rank, 40)} itself" for x in lost] + rows
    spans: dict[str, list[tuple[int, float, float, str]]] = {}
    for i, reader in enumerate(lost):
        gone = [("loop away", x.since, x.until) for x in summary.away if x.rank == reader.rank]
        gone += [("log ended", reader.last, summary.last)] if reader.stopped is None else []
        for name, since, until in gone:
            if until - since > EARLY_S:
                text = f"{name} for {duration(until - since)} from {time_text(since)}, by its own log"
                spans.setdefault(name, []).append((i, since, until, text))
    for i, found in enumerate(shown, len(lost)):
        for state, since, until in found.states:
            text = f"{state} for {duration(until - since)} from {time_text(since)}, seen by {found.reader}"
            spans.setdefault(state, []).append((i, since, until, text))
    first = "Those that failed most come first."
    if lost:
        first = "Processes that were not there come first, by their own logs; then peers, those that failed most first."
    order = sorted(spans, key=lambda s: list(STATES).index(s) if s in STATES else len(STATES))
    hidden = f" {len(pairs) - len(shown):,} more are in the report as JSON." if len(pairs) > len(shown) else ""
    return _spans(
        summary,
        "State of peers, as the processes that pull saw them",
        f"{len(shown)} peers.",
        rows,
        {state: spans[state] for state in order},
        {**{state: list(colour) for state, colour in STATES.items()}, "loop away": list(BAD), "log ended": list(NONE)},
        f"{first} A row ends with the log of the process that saw it.{hidden}",
    )
