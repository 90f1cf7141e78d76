"""The table of a sweep: medians over the rounds, a line per point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from asynckv.tools.bench import figures
from asynckv.tools.bench.journal import Head, Point, Sweep
from asynckv.tools.console import printable, without_control
from asynckv.tools.output import print_table

__all__ = ["SHARE", "show", "shown"]

SHARE = figures.named(share := "ratio_to_floor.raw_nixl.gbytes_per_s", {share})
SHOWN = tuple(figures.FIGURES[name] for name in ("gbytes_per_s", "requests_per_s", "p50", "p99", "decode_cpu"))


def shown(points: Sequence[Point]) -> list[figures.Figure]:
    """Choose the columns: the share of the floor where it was measured."""
    return [*SHOWN, *([SHARE] if any(point.interval(SHARE) for point in points) else [])]


def show(sweep: Sweep, console: Console) -> None:
    """Print the table."""
    if not (points := sweep.points()):
        return
    columns, rows = shown(points), []
    for point in points:
        cells = [without_control(point.axes[name]) for name in sweep.head.axes]
        for figure in columns:
            interval = point.interval(figure)
            form = ".1%" if figure is SHARE else ",.4g"
            cells.append("" if interval is None else format(interval.median, form))
        rows.append((*cells, ", ".join(dict.fromkeys(fault.partition(":")[0] for fault in point.faults))))
    heads = [*map(without_control, sweep.head.axes), *(figures.head(each.name, each.unit) for each in columns)]
    styles = ["red" if point.faults else "" for point in points]
    print_table(console, [*heads, ""], rows, texts=(len(heads),), styles=styles)
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
