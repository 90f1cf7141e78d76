"""Draw geometry with coloured bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5500", "#117777")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart; labels say the same without colour."""
DARK_INK = (1, 3, 4)
"""Colours of the palette on which black is easier to read than white."""
EMPTY = "#dddddd"
INK = "#141414"


class Segment(NamedTuple):
    """A stretch `[lo, hi)` of a bar."""

    lo: float
    hi: float
    label: str = ""
    colour: int | None = None
    """Index into the palette; None for grey."""


class Bar(NamedTuple):
    """One row."""

    name: str
    segments: Sequence[Segment]
    note: str = ""


def bars(title: str, extent: float, rows: Iterable[Bar], *, width: int = 72) -> RenderableType:
    """Draw rows over one axis from 0 to `extent`."""
    rows = list(rows)
    margin = max((len(row.name) for row in rows), default=0) + 1
    lines = [Text(title, style="bold")]
    for row in rows:
        line = Text(f"{row.name:<{margin}}")
        at = 0
        for segment in sorted(row.segments, key=lambda s: s.lo):
            start, end = (round(x * width / extent) for x in (segment.lo, segment.hi))
            line.append(" " * (start - at))
            size = max(end - max(start, at), 1)
            colour, ink = colours(segment.colour)
            # A label is never cut, because half a number is wrong.
            label = segment.label if len(segment.label) < size else ""
            # A gap of one column separates neighbours of one colour.
            body = f"{label:^{size}}"
            line.append(body[:-1] if size > 1 else body, style=f"{ink} on {colour}")
            if size > 1:
                line.append(" ")
            at = max(start, at) + size
        if row.note:
            line.append(" " * max(width - at + 1, 1) + row.note)
        lines.append(line)
    return Group(*lines, Text(""))


def colours(index: int | None) -> tuple[str, str]:
    """Return a background and an ink for it (`INK` if both follow the reader's theme)."""
    if index is None:
        return EMPTY, INK
    index %= len(PALETTE)
    return PALETTE[index], "#000000" if index in DARK_INK else "#ffffff"
