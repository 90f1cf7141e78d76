"""Two sides, each one report or many: what changed between them, and whether that is more than noise.

A figure's noise is what it varies by between runs of the same point on the same side. One run shows none of it,
so nothing is said about one run but the ratio. Runs with faults are named; their figures count only where a side has
no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools.bench import figures, journal, report
from asynckv.tools.bench.figures import Figure
from asynckv.tools.bench.noise import LEVEL, median_of, ratio_of
from asynckv.tools.bench.sides import Run, Side, flat
from asynckv.tools.console import printable
from asynckv.tools.output import print_table

__all__ = ["SCHEMA", "Change", "compare", "judge", "show"]

SCHEMA = "asynckv.compare/1"
Verdict = Literal["better", "worse", "changed", "noise", "unsure", "undefined"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one point.

    Attributes:
        before, after: Medians, in the figure's unit.
        ratio: after / before; None where before is zero.
        low, high: Its interval; None with fewer than two runs on either side.
        excess: By how much it is worse: 0.05 for 5 % fewer requests/s or 5 % more ms.
    """

    before: float
    after: float
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    excess: float


# -- judging ---------------------------------------------------------------------------------------


Range = tuple[float, float]


def judge(
    before: Sequence[float],
    after: Sequence[float],
    better: Literal["higher", "lower", ""],
    within: tuple[Range | None, Range | None] = (None, None),
) -> Change:
    """Compare one figure's runs on two sides.

    A change counts where the interval of the ratio (`asynckv.tools.bench.noise`) does not hold 1, and is worth enough.

    Args:
        before, after: The figure of each run.
        better: Which way is better.
        within: The intervals that the runs themselves found, for single runs.
    """
    first, second = median_of(before).median, median_of(after).median
    if not first:
        return Change(first, second, 1.0 if not second else None, None, None, "undefined" if second else "noise", 0.0)
    ratio = second / first
    excess = {"higher": 1 - ratio, "lower": ratio - 1, "": 0.0}[better]
    level = LEVEL
    if len(before) == len(after) == 1 and within[0] and within[1] and within[0][0] > 0:
        low, high = within[1][0] / within[0][1], within[1][1] / within[0][0]
    elif min(len(before), len(after)) < 2 or not min(before) > 0:
        return Change(first, second, ratio, None, None, "unsure", excess)
    else:
        found = ratio_of(before, after)
        low, high, level = found.low, found.high, found.level
    verdict: Verdict = "changed"
    if low <= 1 <= high:
        verdict = "noise"
    elif level < LEVEL:
        verdict = "unsure"
    elif better:
        verdict = "better" if (ratio > 1) == (better == "higher") else "worse"
    return Change(first, second, ratio, low, high, verdict, excess)


# -- matching --------------------------------------------------------------------------------------


def compare(before: Side, after: Side, metrics: Sequence[str] = (), fail_above: float | None = None) -> dict[str, Any]:
    """Compare two sides point by point.

    Points match where all parameters agree, but for those that have one value on each side and not the same: these
    are what was changed.

    Args:
        before, after: The sides.
        metrics: Figures to compare; by default the usual ones, and ratios to raw NIXL where all reports have them.
        fail_above: What is worse by more than this, and not within noise, is listed as exceeded.

    Raises:
        ConfigError: A metric is unknown, or no point is on both sides.
    """
    if not (before.is_sweep and after.is_sweep):
        # Reports have no options, so all are matched by what they say they ran.
        for side in (before, after):
            side.runs = [run._replace(params=flat(run.report["config"])) for run in side.runs]
            side.failed = []
    for side in (before, after):
        if not side.runs:
            raise ConfigError(f"{side.name}: every point failed, so there is nothing to compare")
    chosen = _chosen(before, after, metrics)
    changed, keys, shown = _columns(before, after)
    sides = [_by_key(((run.params, run) for run in side.runs), keys) for side in (before, after)]
    failures = [_by_key(side.failed, keys) for side in (before, after)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        raise ConfigError(
            f"no point of {before.name} is in {after.name}: they differ in {_what(before, after, keys) or 'everything'}"
        )
    points, exceeded = [], []
    for key in common:
        label = _label(keys, key, shown)
        rows, held = {}, (sides[0][key], sides[1][key])
        faulty = [
            {"side": name, "run": run.name, "says": says}
            for name, runs in zip(("before", "after"), held, strict=True)
            for run in runs
            if (says := _fault(run.report))
        ]
        a, b = (_judged(runs) for runs in held)
        for figure in chosen:
            one, two = ([v for r in runs if (v := figure.of(r)) is not None] for runs in (a, b))
            if not one or not two:
                continue
            change = judge(one, two, figure.better, (figure.within(a[0]), figure.within(b[0])))
            rows[figure.name] = {"unit": figure.unit, "better": figure.better, **msgspec.to_builtins(change)}
            if fail_above is not None and change.verdict in ("worse", "unsure") and change.excess > fail_above:
                exceeded.append({"point": label, "metric": figure.name, "excess": change.excess})
        health = [_health(runs, failed.get(key, [])) for runs, failed in zip(held, failures, strict=True)]
        if fail_above is not None and health[1] > health[0]:
            exceeded.append({"point": label, "metric": "unhealthy_runs", "excess": float(health[1] - health[0])})
        points.append(
            {
                "point": label,
                "runs": [len(runs) for runs in held],
                "judged": [len(a), len(b)],
                "unhealthy": health,
                "faulty": faulty,
                "metrics": rows,
                "caveats": _caveats(a, b),
            }
        )
    lost = [key for key in sides[0] if key not in sides[1]]
    for key in lost if fail_above is not None else ():
        label = _label(keys, key, shown)
        exceeded.append({"point": label, "metric": "missing", "excess": 1.0})
    return {
        "schema": SCHEMA,
        "before": before.name,
        "after": after.name,
        "changed": changed,
        "environment": _environments(before, after),
        "points": points,
        "only_before": [_label(keys, key, shown) for key in lost],
        "only_after": [_label(keys, key, shown) for key in sides[1] if key not in sides[0]],
        "failed": {
            name: [{"point": {k: v for k, v in params.items() if k in shown}, "reason": why} for params, why in failed]
            for name, failed in (("before", before.failed), ("after", after.failed))
        },
        "overall": {f.name: _overall(f, points) for f in chosen if any(f.name in p["metrics"] for p in points)},
        "exceeded": exceeded,
    }


def _chosen(before: Side, after: Side, metrics: Sequence[str]) -> list[Figure]:
    reports = [run.report for side in (before, after) for run in side.runs]
    known = set(dict(figures.leaves(reports[0])))
    everywhere = known.intersection(*(dict(figures.leaves(r)) for r in reports[1:]))
    if not metrics:
        floors = [name for name in figures.FLOORS if name in everywhere]
        return [figures.named(name, everywhere) for name in (*figures.DEFAULT, *floors)]
    chosen = [figures.named(name, known.union(*(dict(figures.leaves(r)) for r in reports[1:]))) for name in metrics]
    for figure in chosen:
        for side in (before, after):
            if all(figure.of(run.report) is None for run in side.runs):
                raise ConfigError(f"--metrics {figure.name!r} is in no report of {side.name}")
    return chosen


def _columns(before: Side, after: Side) -> tuple[dict[str, list[Any]], list[str], set[str]]:
    """What was changed, the parameters that a point is known by, and those of them that vary."""
    names = dict.fromkeys(n for side in (before, after) for params in _params(side) for n in params)
    found = {name: [_values(side, name) for side in (before, after)] for name in names}
    changed = {n: [*a, *b] for n, (a, b) in found.items() if len(a) == len(b) == 1 and a != b}
    keys = [n for n in names if n not in changed]
    return changed, keys, {n for n in keys if len(set(found[n][0]) | set(found[n][1])) > 1}


def _values(side: Side, name: str) -> list[Any]:
    return list(dict.fromkeys(params.get(name) for params in _params(side)))


def _params(side: Side) -> Iterator[dict[str, Any]]:
    yield from (run.params for run in side.runs)
    yield from (params for params, _ in side.failed)


def _by_key(items: Iterable[tuple[dict[str, Any], Any]], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Any]]:
    out: dict[tuple[Any, ...], list[Any]] = {}
    for params, value in items:
        out.setdefault(tuple(params.get(k) for k in keys), []).append(value)
    return out


def _label(keys: Sequence[str], key: Sequence[Any], shown: set[str]) -> dict[str, Any]:
    return {name: value for name, value in zip(keys, key, strict=True) if name in shown}


def _what(before: Side, after: Side, keys: Sequence[str]) -> str:
    found = []
    for name in keys:
        a, b = (_values(side, name) for side in (before, after))
        if not set(a) & set(b):
            found.append(f"{name} ({', '.join(map(str, a))} against {', '.join(map(str, b))})")
    return "; ".join(found)


def _health(runs: Sequence[Run], failed: Sequence[str]) -> int:
    """How many runs were not clean."""
    return len(failed) + sum(bool(_fault(run.report)) for run in runs)


def _fault(found: Mapping[str, Any]) -> str:
    """Say what went wrong in a run, in short."""
    return "; ".join(text[:120] for text in report.faults(found)[:5])


def _judged(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Leave runs with faults out, unless there are no others."""
    return [run.report for run in runs if not _fault(run.report)] or [run.report for run in runs]


def _caveats(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """What the reports say against their own figures, and how many of them on either side do."""
    found: dict[str, list[int]] = {}
    for i, reports in enumerate((before, after)):
        for each in reports:
            for text in [*each.get("warnings", []), *each.get("floor", {}).get("caveats", [])]:
                found.setdefault(text, [0, 0])[i] += 1
    return found


def _is_large(ratio: float) -> bool:
    return not 0.5 <= ratio <= 2


def _environments(before: Side, after: Side) -> dict[str, list[list[str]]]:
    """What differs between the machines and versions, within a side or between them."""
    names = dict.fromkeys(n for side in (before, after) for e in side.environments for n in e)
    found = {n: [list(dict.fromkeys(e[n] for e in s.environments if n in e)) for s in (before, after)] for n in names}
    # What only one side states, such as a sweep beside a report, says nothing.
    return {n: both for n, both in found.items() if all(both) and (both[0] != both[1] or len(both[0]) > 1)}


def _overall(figure: Figure, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    changes = [p["metrics"][figure.name] for p in points if figure.name in p["metrics"]]
    ratios = [c["ratio"] for c in changes if c["ratio"]]
    return {
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "lowest": min(ratios, default=None),
        "highest": max(ratios, default=None),
        **{v: sum(c["verdict"] == v for c in changes) for v in ("better", "worse", "changed", "noise", "unsure")},
    }


# -- showing ---------------------------------------------------------------------------------------

MOST_FAULTY = 5
TEXTS = {
    "better": "[green]better[/green]",
    "worse": "[red]worse[/red]",
    "changed": "changed",
    "noise": "[dim]within noise[/dim]",
    "unsure": "[yellow]unsure[/yellow]",
    "undefined": "[yellow]was zero[/yellow]",
}


def show(result: dict[str, Any], console: Console) -> None:
    """Print what was found."""
    result = printable(result)
    console.print(f"before {result['before']}, after {result['after']}", highlight=False)
    for name, (old, new) in result["changed"].items():
        console.print(f"  changed: {name} was {old}, is {new}", highlight=False)
    for name, (olds, news) in result["environment"].items():
        console.print(f"  [yellow]differs:[/yellow] {name} {' / '.join(olds)} -> {' / '.join(news)}", highlight=False)
    _show_faulty(result["points"], console)
    for point in result["points"]:
        console.print(f"{_where(point['point'])} [dim]({_runs(*point['judged'])})[/dim]", highlight=False)
        rows = [
            (
                f"  {figures.head(name, change['unit'])}",
                _value(change["before"]),
                _value(change["after"]),
                _change(change["ratio"]),
                _interval(change),
                TEXTS[change["verdict"]],
            )
            for name, change in point["metrics"].items()
        ]
        heads = ["", "before", "after", "change", "between", ""]
        print_table(console, heads, rows, texts=(0, 4, 5), wrapped=(5,), is_markup=True)
        for text, (olds, news) in point["caveats"].items():
            many = f"{olds} of {point['judged'][0]} runs before, {news} of {point['judged'][1]} after"
            console.print(f"  [yellow]![/yellow] {text} ({many})", highlight=False)
    if len(result["points"]) > 1:
        for name, all_ in result["overall"].items():
            console.print(
                f"  {figures.head(name)}: {_change(all_['geometric_mean'])} over all points "
                f"({_change(all_['lowest'])} to {_change(all_['highest'])}); {all_['better']} better, "
                f"{all_['worse']} worse, {all_['noise']} within noise, {all_['unsure']} unsure",
                highlight=False,
            )
    for name, side in (("only_before", "before"), ("only_after", "after")):
        for label in result[name]:
            console.print(f"  only in {side}: {_where(label)}", highlight=False)
    for side, failed in result["failed"].items():
        for each in failed:
            console.print(f"  failed {side}: {_where(each['point'])}: {each['reason']}", style="red", highlight=False)
    runs = [n for point in result["points"] for n in point["runs"]]
    if min(runs) == 1:
        console.print(
            "With one run on a side, how much the figures vary by themselves is unknown. More runs tell: sweeps with "
            "--rounds, or several reports.",
            highlight=False,
        )
    elif any(c["verdict"] == "unsure" for p in result["points"] for c in p["metrics"].values()):
        console.print("unsure: apart, but with so few runs that may be chance; 4 or more per side tell.")
    for each in result["exceeded"]:
        metric, point = each["metric"], _where(each["point"])
        text = {
            "missing": f"{point} is missing after",
            "unhealthy_runs": f"{point}: more runs with faults than before",
        }.get(metric, f"{point}: {metric} is worse{_worse(each['excess'])}")
        console.print(f"  ! {text}", style="red", highlight=False)


def _where(label: Mapping[str, Any]) -> str:
    return journal.label(label) or "the run"


def _show_faulty(points: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Name the runs with faults before any figure, for those explain most."""
    for point in points:
        for i, side in enumerate(("before", "after")):
            there = [each for each in point["faulty"] if each["side"] == side]
            is_used = len(there) == point["runs"][i]
            for each in there[:MOST_FAULTY]:
                console.print(f"  [red]! {each['run']}: {each['says']}[/red]", highlight=False)
            if there:
                more = f"{len(there) - MOST_FAULTY} more runs {side} had faults; " if len(there) > MOST_FAULTY else ""
                text = "every run had faults, so the figures are theirs" if is_used else "figures without these runs"
                console.print(f"    [red]{more}{side}: {text}[/red]", highlight=False)


def _runs(before: int, after: int) -> str:
    return "one run each" if before == after == 1 else f"{before} and {after} runs"


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


def _change(ratio: float | None) -> str:
    """Say a small change in percent, and a large one as a factor."""
    if ratio is None:
        return ""
    if not _is_large(ratio):
        return f"{ratio - 1:+.1%}"
    factor = ratio if ratio > 1 else 1 / ratio if ratio > 0 else math.inf
    number = f"{factor:,.1f}" if factor < 10 else f"{factor:,.0f}"
    return "to 0" if math.isinf(factor) else f"x{number}" if ratio > 1 else f"1/{number}"


def _worse(excess: float) -> str:
    return f" by {excess:.1%}" if excess <= 1 else f": {_change(1 + excess)}"


def _interval(change: Mapping[str, Any]) -> str:
    return "" if change["low"] is None else f"{_change(change['low'])} ... {_change(change['high'])}"
