"""A benchmark's report on the page: what it reached, of what, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from asynckv.errors import ConfigError
from asynckv.tools import frame
from asynckv.tools.bench import report as bench
from asynckv.tools.bench import report_text, sides
from asynckv.tools.bench.figures import FIGURES, at
from asynckv.tools.bench.floor import NAMES
from asynckv.tools.diagnose import report_plots as plots
from asynckv.tools.diagnose.report_text import Card, duration, safe
from asynckv.tools.diagnose.summary_model import Bench, Kind

__all__ = ["cards", "compared", "read", "section", "verdict"]

MOST_FAULTS = 50
DAMAGES = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What a report raises that lacks something."""


def read(found: dict[str, Any], name: str) -> Bench:
    """Take a report.

    Raises:
        ConfigError: It lacks what a report has.
    """
    sides.check(found, name)
    try:
        one = Bench(name=name, is_good=bench.is_good(found), report=found)
        for look in (report_text.parts, report_text.verdict, _phases, _shares, _wrong):
            look(found)
        verdict(one)
        return one
    except DAMAGES as exc:
        raise ConfigError(
            f"{name}: is damaged, or of another version of asynckv ({type(exc).__name__}: {exc})"
        ) from exc


def verdict(one: Bench) -> str:
    """Say in one sentence how it went."""
    found = one.report
    requests, moved = found["requests"], found["throughput"]
    said = f"{safe(one.name, 60)}: {requests['completed']:,} of {found['config']['requests']:,} requests completed, "
    said += f"{moved['gbytes_per_s']:.3g} GB/s, {moved['requests_per_s']:,.4g} requests/s, p99 "
    said += duration(found["latency_s"]["p99"])
    if found["interrupted"]:
        cut = found.get("interruption") or {"says": "before its end; the figures are not those of the whole run"}
        name = safe(one.name, 60)
        figures = f". {said[len(name) + 2 :]}" if requests["completed"] else ""
        said = f"{name} was INTERRUPTED {safe(str(cut['says']), 200)}{figures}"
    elif not one.is_good:
        leaked = sum(x for x in found["blocks"].values() if isinstance(x, int))
        bad = [
            f"{requests['failed']:,} failed",
            f"{found['bytes']['wrong']:,} bytes wrong",
            f"{leaked:,} blocks leaked",
        ]
        bad += [safe(str(x), 120) for x in found["problems"][:2]]
        said += f"; {', '.join(bad)}"
    return f"{said}."


def cards(one: Bench, prefix: str) -> list[Card]:
    """The figures of the first screen."""
    found = one.report
    if found["interrupted"] and not found["requests"]["completed"]:
        return []
    shown = [
        Card(f"{prefix}{figure.title}", f"{value:,.4g}", figure.unit)
        for name in ("gbytes_per_s", "requests_per_s", "p50", "p99", "loop_lag_p99")
        if (value := (figure := FIGURES[name]).of(found)) is not None
    ]
    share = at("ratio_to_floor.raw_nixl.gbytes_per_s", 100)(found)
    if share is not None:
        shown.append(Card(f"{prefix}share", f"{share:.0f} %", "of the raw NIXL loop"))
    return shown


def compared(benches: Sequence[Bench]) -> str:
    """Put the figures of several runs side by side."""
    rows = [
        ["requests failed", *(f"{one.report['requests']['failed']:,}" for one in benches)],
        ["memory order, prefill and decode", *(safe(_orders(one.report["config"]), 60) for one in benches)],
    ]
    for figure in FIGURES.values():
        values = [figure.of(one.report) for one in benches]
        if any(v is not None for v in values):
            texts = ["–" if v is None else f"{v:,.0f}" if v >= 1000 else f"{v:,.4g}" for v in values]
            rows.append([f"{figure.title} ({figure.unit})" if figure.unit else figure.title, *texts])
    return frame.table(["figure", *(safe(one.name, 60) for one in benches)], rows, label="Figures of all runs")


def _orders(config: Mapping[str, Any]) -> str:
    return ", ".join(str(config.get(role, {}).get("order", "–")) for role in ("prefill", "decode"))


def section(one: Bench) -> str:
    """Draw one run."""
    found = one.report
    figures = [
        plots.phase_quantiles(
            _phases(found),
            "How long each phase of a pull took",
            "Thick: p50. Pale: p99. Release comes after the result.",
        )
    ]
    if shares := _shares(found):
        figures.append(_floors(shares))
    said = {name: safe(text, 600) for name, text in report_text.facts(found)}
    said |= {
        str(name).replace("_", " "): safe(str(value), 200)
        for name, value in found["environment"].items()
        if isinstance(value, str | int | float)
    }
    wrong = _wrong(found)
    tables = "".join(
        frame.table(part.head, [[safe(x, 200) for x in row] for row in part.rows], label=part.head[0])
        + "".join(f"<p>{escape(safe(note, 400))}</p>" for note in part.notes)
        for part in report_text.parts(found)
        if part.head and part.rows
    )
    table = frame.table(["what went wrong"], [[x] for x in wrong[:MOST_FAULTS]], label="Faults") if wrong else ""
    return f'<div class="plots">\n{"".join(figures)}</div>\n{table}{tables}<div class="rows">{frame.facts(said)}</div>'


def _wrong(found: Mapping[str, Any]) -> list[str]:
    return [safe(str(x), 400) for x in (*found["problems"], *(f"{n} × {x}" for x, n in found["errors"].items()))]


def _phases(found: Mapping[str, Any]) -> dict[str, Kind]:
    return {
        name: Kind(p50=float(q["p50"]), p90=0.0, p99=float(q["p99"]), max=float(q["p99"]), mean=0.0)
        for name, q in found["phases_s"].items()
    }


def _shares(found: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Which part of each floor's throughput was reached, and between what the true one lies."""
    ratios = found.get("ratio_to_floor", {})
    return {
        NAMES.get(str(kind), str(kind).replace("_", " ")): (x["median"] * 100, x["low"] * 100, x["high"] * 100)
        for kind, ratio in ratios.items()
        if (x := ratio.get("gbytes_per_s"))
    }


def _floors(shares: Mapping[str, tuple[float, float, float]]) -> str:
    names = list(shares)
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": "share",
        "showlegend": False,
        "y": [safe(x, 40) for x in names],
        "x": [round(shares[x][0], 2) for x in names],
        "width": 0.6,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [round(shares[x][2] - shares[x][0], 2) for x in names],
            "arrayminus": [round(shares[x][0] - shares[x][1], 2) for x in names],
        },
        "marker": {"line": {"width": 0}},
        "meta": 0,
        "hovertemplate": "%{x:.1f} %<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "% of the floor's GB/s"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": ""}, "autorange": "reversed"},
        "meta": {"height": 110 + 44 * max(len(names), 2)},
    }
    said = "; ".join(f"{x}: {shares[x][0]:.0f} %" for x in names)
    caption = "The share of the floor that was reached"
    note = (
        "The floor: the same bytes moved without an engine. A bar ends at the median of the rounds; its line is the "
        "interval that holds the true one."
    )
    return frame.figure(caption, f"{caption}. {said}.", [trace], layout, note=note)
