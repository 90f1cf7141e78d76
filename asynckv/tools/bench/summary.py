"""The table of a sweep, a row per point with medians over its rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from asynckv.arguments import without_control
from asynckv.tools.bench import figures
from asynckv.tools.bench.figures import SHARE
from asynckv.tools.bench.journal import Head, Point, Sweep
from asynckv.tools.console import printable
from asynckv.tools.output import print_table

SHOWN = tuple(figures.FIGURES[name] for name in ("gbytes_per_s", "requests_per_s", "p50", "p99", "decode_cpu"))


def _table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Make heads and rows: the point's place, its figures, and what became of rounds that were not good."""
    points, rows = sweep.points(), []
    columns = [*SHOWN, *([SHARE] if any(point.interval(SHARE) for point in points) else [])]
    for point in points:
        row = [without_control(point.axes[name]) for name in sweep.head.axes]
        for figure in columns:
            form, interval = ".1%" if figure is SHARE else ",.4g", point.interval(figure)
            row.append("" if interval is None else format(interval.median, form))
        row.append(", ".join({f.partition(":")[0]: "" for f in point.faults}))
        rows.append(row)
    axes = map(without_control, sweep.head.axes)
    return [*axes, *(figures.head(each.name, each.unit) for each in columns), ""], rows


def show(sweep: Sweep, console: Console) -> None:
    """Print the table."""
    heads, rows = _table(sweep)
    if not rows:
        return
    points = sweep.points()
    print_table(
        console, heads, rows, texts=(len(heads) - 1,), styles=["red" if point.faults else "" for point in points]
    )
    for fault, count in Counter(fault for point in points for fault in point.faults).items():
        where = "one point" if count == 1 else f"{count} points"
        console.print(f"  ! {where} {printable(fault)}", style="red", highlight=False)
    if sweep.head.rounds > 1:
        console.print(_rounds(points, sweep.head), highlight=False)


def _rounds(points: Sequence[Point], head: Head) -> str:
    """Say how many rounds the medians are of, where a sweep was interrupted not all."""
    runs, total = [len(point.rows) for point in points], head.rounds
    if min(runs) == total and len(points) == len(head.points):
        return f"medians of {total} rounds"
    fewest, most = min(runs), max(runs)
    some = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    absent = len(head.points) - len(points)
    left = f"; {absent} of {len(head.points)} points have none yet" if absent else ""
    return f"medians of {some} of {total} rounds{left}"
