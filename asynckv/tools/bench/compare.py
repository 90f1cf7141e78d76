"""Compare two sides, each one report or several, and find the changes that are more than noise.

Runs of the same point on one side show a figure's noise. One run shows none, so only the ratio is reported. Figures of
runs with faults are used only if a side has no other runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools.bench import figures, table
from asynckv.tools.bench.figures import DEFAULT, FLOORS, Figure
from asynckv.tools.bench.noise import LEVEL, median_of, ratio_of
from asynckv.tools.bench.table import Run, Side, flat
from asynckv.tools.console import grouped, printable
from asynckv.tools.output import print_table

SCHEMA = "asynckv.compare/1"
NAMES = "before", "after"
Verdict = Literal["better", "worse", "noise", "unsure", "undefined"]


class Change(Struct, frozen=True):
    """One figure of one point. `excess` is how much it is worse: 0.05 for 5 % fewer requests/s or 5 % more ms.

    `ratio` is None if before is zero; its interval is None with fewer than two runs on either side.
    """

    before: float
    after: float
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    excess: float


# -- judging ---------------------------------------------------------------------------------------


def judge(
    before: Sequence[float],
    after: Sequence[float],
    better: Literal["higher", "lower"],
    within: Sequence[tuple[float, float] | None] = (None, None),
) -> Change:
    """Compare the runs of one figure. A change counts if the interval of the ratio does not contain 1.

    `within` holds the intervals that the runs themselves found; single runs are judged by them.
    """
    first, second = median_of(before).median, median_of(after).median
    if not first:
        return Change(first, second, 1.0 if not second else None, None, None, "undefined" if second else "noise", 0.0)
    ratio = second / first
    excess = {"higher": 1 - ratio, "lower": ratio - 1}[better]
    level = LEVEL
    if len(before) == len(after) == 1 and within[0] and within[1] and within[0][0] > 0:
        low, high = within[1][0] / within[0][1], within[1][1] / within[0][0]
    elif min(len(before), len(after)) < 2 or not min(before) > 0:
        return Change(first, second, ratio, None, None, "unsure", excess)
    else:
        found = ratio_of(before, after)
        low, high, level = found.low, found.high, found.level
    verdict: Verdict = "better" if (ratio > 1) == (better == "higher") else "worse"
    if low <= 1 <= high:
        verdict = "noise"
    elif level < LEVEL:
        verdict = "unsure"
    return Change(first, second, ratio, low, high, verdict, excess)


# -- matching --------------------------------------------------------------------------------------


def compare(before: Side, after: Side, fail_above: float | None = None) -> dict[str, Any]:
    """Compare two sides point by point; `exceeded` lists what is worse by more than `fail_above` and not within noise.

    Points match if all parameters agree, except those that have one value on each side, but not the same: these count
    as changed.
    """
    sides = before, after
    for side in sides:
        if not (before.is_sweep and after.is_sweep):
            # Reports have no options, so match all runs by their recorded configuration.
            side.runs = [run._replace(params=flat(run.report["config"])) for run in side.runs if run.report]
        if not any(run.report for run in side.runs):
            raise ConfigError(f"{side.name}: every point failed, so there is nothing to compare")
    reports = [run.report for side in sides for run in side.runs if run.report]
    chosen = [*DEFAULT, *(each for each in FLOORS if all(each.of(report) is not None for report in reports))]
    changed, keys, shown = _columns(sides)
    there = [_points(side, keys) for side in sides]
    lost = [key for key in there[0] if key not in there[1]]
    if len(lost) == len(there[0]):
        apart = "; ".join(
            f"{name} ({', '.join(map(str, a))} against {', '.join(map(str, b))})"
            for name, (a, b) in _values(sides, keys).items()
            if not set(a) & set(b)
        )
        raise ConfigError(f"no point of {before.name} is in {after.name}: they differ in {apart or 'everything'}")

    def label(key: Sequence[Any]) -> dict[str, Any]:
        return {name: value for name, value in zip(keys, key, strict=True) if name in shown}

    points = [
        {"point": label(key)} | _compared(chosen, [side[key] for side in there]) for key in there[0] if key in there[1]
    ]
    return {
        "schema": SCHEMA,
        "before": before.name,
        "after": after.name,
        "changed": changed,
        "environment": _environments(sides),
        "points": points,
        "only_before": [label(key) for key in lost],
        "only_after": [label(key) for key in there[1] if key not in there[0]],
        "failed": {
            name: [
                {"point": {k: v for k, v in run.params.items() if k in shown}, "reason": run.reason}
                for run in side.runs
                if not run.report
            ]
            for name, side in zip(NAMES, sides, strict=True)
        },
        "overall": {f.name: _overall(f, points) for f in chosen if any(f.name in p["metrics"] for p in points)},
        "exceeded": [] if fail_above is None else _exceeded(points, [label(key) for key in lost], fail_above),
    }


def _compared(chosen: Sequence[Figure], held: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Compare the runs of one point; those with faults count only if a side has no others."""
    measured = [[run for run in runs if run.report] for runs in held]
    judged = [[r.report for r in runs if not r.fault] or [r.report for r in runs] for runs in measured]
    metrics, caveats = {}, dict[str, list[int]]()
    for figure in chosen:
        one, two = ([v for report in reports if (v := figure.of(report)) is not None] for reports in judged)
        if one and two:
            change = judge(one, two, figure.better, (figure.within(judged[0][0]), figure.within(judged[1][0])))
            metrics[figure.name] = {"unit": figure.unit, "better": figure.better, **msgspec.to_builtins(change)}
    for i, reports in enumerate(judged):
        for each in reports:
            # Collect the reservations of a report about its own figures.
            for text in [*each.get("warnings", []), *each.get("floor", {}).get("caveats", [])]:
                caveats.setdefault(text, [0, 0])[i] += 1
    return {
        "runs": [len(runs) for runs in measured],
        "judged": [len(reports) for reports in judged],
        "unhealthy": [sum(bool(run.fault) for run in runs) for runs in held],
        "faulty": [
            {"side": name, "run": run.name, "says": run.fault}
            for name, runs in zip(NAMES, measured, strict=True)
            for run in runs
            if run.fault
        ],
        "metrics": metrics,
        "caveats": caveats,
    }


def _exceeded(points: Sequence[Mapping[str, Any]], lost: Sequence[Any], fail_above: float) -> list[dict[str, Any]]:
    found = []
    for point in points:
        for name, change in point["metrics"].items():
            if change["verdict"] in ("worse", "unsure") and change["excess"] > fail_above:
                found.append({"point": point["point"], "metric": name, "excess": change["excess"]})
        if (more := point["unhealthy"][1] - point["unhealthy"][0]) > 0:
            found.append({"point": point["point"], "metric": "unhealthy_runs", "excess": float(more)})
    return [*found, *({"point": label, "metric": "missing", "excess": 1.0} for label in lost)]


def _columns(sides: Sequence[Side]) -> tuple[dict[str, list[Any]], list[str], set[str]]:
    """Return the changed parameters, the parameters that identify a point, and those of them that vary.

    A parameter that only one side has comes from another version, and is ignored.
    """
    one, two = (dict.fromkeys(name for run in side.runs for name in run.params) for side in sides)
    found = _values(sides, [name for name in one if name in two])
    changed = {n: [*a, *b] for n, (a, b) in found.items() if len(a) == len(b) == 1 and a != b}
    keys = [n for n in found if n not in changed]
    return changed, keys, {n for n in keys if len({*found[n][0], *found[n][1]}) > 1}


def _values(sides: Sequence[Side], names: Sequence[str]) -> dict[str, list[list[Any]]]:
    return {n: [list(dict.fromkeys(run.params.get(n) for run in side.runs)) for side in sides] for n in names}


def _points(side: Side, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Run]]:
    """Group the runs by point, and keep the points with at least one report."""
    found = grouped((tuple(run.params.get(k) for k in keys), run) for run in side.runs)
    return {key: runs for key, runs in found.items() if any(run.report for run in runs)}


def _environments(sides: Sequence[Side]) -> dict[str, list[list[str]]]:
    """Return the machines and versions that differ, within a side or between the sides."""
    names = dict.fromkeys(n for side in sides for e in side.environments for n in e)
    found = {n: [list(dict.fromkeys(e[n] for e in s.environments if n in e)) for s in sides] for n in names}
    # A name that only one side has (a sweep compared with a report) is no difference.
    return {n: both for n, both in found.items() if all(both) and (both[0] != both[1] or len(both[0]) > 1)}


def _overall(figure: Figure, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    changes = [p["metrics"][figure.name] for p in points if figure.name in p["metrics"]]
    ratios = [c["ratio"] for c in changes if c["ratio"]]
    return {
        "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "lowest": min(ratios, default=None),
        "highest": max(ratios, default=None),
        **{v: sum(c["verdict"] == v for c in changes) for v in ("better", "worse", "noise", "unsure")},
    }


# -- showing ---------------------------------------------------------------------------------------

MOST_FAULTY = 5
TEXTS = {
    "better": "[green]better[/green]",
    "worse": "[red]worse[/red]",
    "noise": "[dim]within noise[/dim]",
    "unsure": "[yellow]unsure[/yellow]",
    "undefined": "[yellow]was zero[/yellow]",
}


def show(result: dict[str, Any], console: Console) -> None:
    result = printable(result)
    say = console.print
    say(f"before {result['before']}, after {result['after']}")
    for name, (old, new) in result["changed"].items():
        say(f"  changed: {name} was {old}, is {new}")
    for name, (olds, news) in result["environment"].items():
        say(f"  [yellow]differs:[/yellow] {name} {' / '.join(olds)} -> {' / '.join(news)}")
    for point in result["points"]:
        for i, side in enumerate(NAMES):
            _show_faulty([e for e in point["faulty"] if e["side"] == side], side, point["runs"][i], say)
    for point in result["points"]:
        before, after = point["judged"]
        runs = "one run each" if before == after == 1 else f"{before} and {after} runs"
        say(f"{_where(point['point'])} [dim]({runs})[/dim]")
        rows = []
        for name, change in point["metrics"].items():
            values = _value(change["before"]), _value(change["after"]), _change(change["ratio"])
            between = "" if change["low"] is None else f"{_change(change['low'])} ... {_change(change['high'])}"
            rows.append((f"  {figures.head(name, change['unit'])}", *values, between, TEXTS[change["verdict"]]))
        heads = ["", "before", "after", "change", "between", ""]
        print_table(console, heads, rows, texts=(0, 4, 5), wrapped=(5,), is_markup=True)
        for text, (olds, news) in point["caveats"].items():
            say(f"  [yellow]![/yellow] {text} ({olds} of {before} runs before, {news} of {after} after)")
    if len(result["points"]) > 1:
        for name, all_ in result["overall"].items():
            say(
                f"  {figures.head(name)}: {_change(all_['geometric_mean'])} over all points "
                f"({_change(all_['lowest'])} to {_change(all_['highest'])}); {all_['better']} better, "
                f"{all_['worse']} worse, {all_['noise']} within noise, {all_['unsure']} unsure"
            )
    for side in NAMES:
        for label in result[f"only_{side}"]:
            say(f"  only in {side}: {_where(label)}")
    for side, failed in result["failed"].items():
        for each in failed:
            say(f"  failed {side}: {_where(each['point'])}: {each['reason']}", style="red")
    if min(n for point in result["points"] for n in point["runs"]) == 1:
        say(
            "With one run on a side, the noise of the figures is unknown. Make more runs: sweeps with --rounds, or "
            "several reports."
        )
    elif any(c["verdict"] == "unsure" for p in result["points"] for c in p["metrics"].values()):
        console.print("unsure: the sides differ, but with so few runs this may be chance; make 4 or more per side.")
    for each in result["exceeded"]:
        metric, point, excess = each["metric"], _where(each["point"]), each["excess"]
        much = f" by {excess:.1%}" if excess <= 1 else f": {_change(1 + excess)}"
        texts = {
            "missing": f"{point} is missing after",
            "unhealthy_runs": f"{point}: more runs with faults than before",
        }
        say(f"  ! {texts.get(metric, f'{point}: {metric} is worse{much}')}", style="red")


def _show_faulty(there: Sequence[Mapping[str, Any]], side: str, runs: int, say: Callable[..., None]) -> None:
    """Print the runs of a side that had faults, before any figure, because they explain most."""
    for each in there[:MOST_FAULTY]:
        say(f"  [red]! {each['run']}: {each['says']}[/red]")
    if there:
        more = f"{len(there) - MOST_FAULTY} more runs {side} had faults; " if len(there) > MOST_FAULTY else ""
        is_used = len(there) == runs
        text = "every run had faults, so the figures include them" if is_used else "the figures exclude these runs"
        say(f"    [red]{more}{side}: {text}[/red]")


def _where(label: Mapping[str, Any]) -> str:
    return table.label(label) or "the run"


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


def _change(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if 0.5 <= ratio <= 2:
        return f"{ratio - 1:+.1%}"
    factor = ratio if ratio > 1 else 1 / ratio if ratio > 0 else math.inf
    number = f"{factor:,.1f}" if factor < 10 else f"{factor:,.0f}"
    return "to 0" if math.isinf(factor) else f"x{number}" if ratio > 1 else f"1/{number}"
