"""A sweep's points with their rounds taken together, and the table of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from asynckv.tools.bench.figures import FIGURES, Figure, named
from asynckv.tools.bench.journal import Head, Sweep
from asynckv.tools.bench.noise import Interval, median_of
from asynckv.tools.console import printable, without_control
from asynckv.tools.output import print_table

__all__ = ["SHOWN", "Summary", "show", "summarise"]

FLOOR_SHARE = named("ratio_to_floor.raw_nixl.gbytes_per_s", {"ratio_to_floor.raw_nixl.gbytes_per_s"})
TITLES = {
    "gbytes_per_s": "GB/s",
    "requests_per_s": "requests/s",
    "p50": "p50 ms",
    "p99": "p99 ms",
    "decode_cpu": "decode CPU µs",
}
SHOWN = tuple(TITLES)


@dataclass(frozen=True, slots=True)
class Summary:
    """One point.

    Attributes:
        reports: Of the rounds that have one.
        faults: Reasons of the rounds that were not good.
        commands: Of its runs; one, unless it was changed in between.
    """

    axes: dict[str, str]
    params: dict[str, Any]
    reports: list[dict[str, Any]]
    faults: list[str]
    runs: int
    commands: list[str]

    def interval(self, figure: Figure) -> Interval | None:
        """Take a figure's rounds together; None where no report has it."""
        found = [v for r in self.reports if (v := figure.of(r)) is not None]
        return median_of(found) if found else None


def summarise(sweep: Sweep) -> list[Summary]:
    """Gather the rows of every point that has any, in the grid's order."""
    rows = sorted(sweep.latest().values(), key=lambda row: row.round)
    by_key = {place.key: [row for row in rows if row.key == place.key] for place in sweep.head.points}
    return [
        Summary(
            place.axes,
            mine[0].params,
            [row.report for row in mine if row.report is not None],
            list(dict.fromkeys(f"{row.status}: {row.reason}" for row in mine if row.status != "good")),
            len(mine),
            list(dict.fromkeys(row.command for row in mine)),
        )
        for place in sweep.head.points
        if (mine := by_key[place.key])
    ]


def show(sweep: Sweep, console: Console) -> None:
    """Print the table: medians, one line per point."""
    found = summarise(sweep)
    if not found:
        return
    heads = list(map(without_control, sweep.head.axes))
    heads += [TITLES[name] for name in SHOWN]
    has_floor = any(point.interval(FLOOR_SHARE) is not None for point in found)
    if has_floor:
        heads.append("of raw NIXL")
    rows = []
    for point in found:
        cells = [without_control(point.axes[name]) for name in sweep.head.axes]
        for name in SHOWN:
            interval = point.interval(FIGURES[name])
            cells.append("" if interval is None else f"{interval.median:,.4g}")
        if has_floor:
            interval = point.interval(FLOOR_SHARE)
            cells.append("" if interval is None else f"{interval.median:.1%}")
        rows.append((*cells, ", ".join(dict.fromkeys(f.partition(":")[0] for f in point.faults))))
    styles = ["red" if point.faults else "" for point in found]
    print_table(console, [*heads, ""], rows, texts=(len(heads),), styles=styles)
    for fault, count in Counter(fault for point in found for fault in point.faults).items():
        where = "one point" if count == 1 else f"{count} points"
        console.print(f"  ! {where} {printable(fault)}", style="red", highlight=False)
    if sweep.head.rounds > 1:
        console.print(_rounds(found, sweep.head), highlight=False)


def _rounds(found: list[Summary], head: Head) -> str:
    """Say how many rounds the medians are of, where a sweep was interrupted not all."""
    runs, total = [point.runs for point in found], head.rounds
    if min(runs) == total and len(found) == len(head.points):
        return f"medians of {total} rounds"
    fewest, most = min(runs), max(runs)
    some = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    absent = len(head.points) - len(found)
    left = f"; {absent} of {len(head.points)} points have none yet" if absent else ""
    return f"medians of {some} of {total} rounds{left}"
