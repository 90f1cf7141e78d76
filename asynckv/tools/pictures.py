"""Geometry drawn with coloured bars, for terminals and, through rich, as SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from asynckv.arguments import without_control

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5500", "#117777")
"""Paul Tol's bright scheme, told apart with colour-blind eyes too; the labels say the same without colour."""
DARK_INK = (1, 3, 4)
"""The colours of the palette on which black is read better than white."""
EMPTY = "#dddddd"
SHARED = -1
PAPER, INK = "#ffffff", "#141414"
THEMES = f""".picture {{ color: {INK}; }}
@media (prefers-color-scheme: dark) {{
.picture {{ color: #e6e6e6; }}
.picture [fill="{PAPER}"] {{ fill: #131416; }}
.picture [fill="{EMPTY}"] {{ fill: #484848; }}
}}"""
"""What a picture's colours are where the reader's system is dark. Its root has the class `picture`, its first
rectangle the fill `PAPER`, and what is written on it is `currentColor`. A picture in a page is an image of its own: it
cannot know the page's colours, so it brings its background."""
CELL, LINE, MARGIN = 12.2, 24.4, 20
"""Units of one character of rich's SVGs, and around all of them."""
SCALE = 0.7
"""Pixels per unit: letters are 14 pixels high."""
FORM = (
    """<svg class="picture" SIZE xmlns="http://www.w3.org/2000/svg">
<style>
THEMES
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
<rect x="MARGIN" y="MARGIN" width="100%" height="100%" fill="PAPER"/>
<g clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
""".replace("THEMES", THEMES.replace("{", "{{").replace("}", "}}"))
    .replace("PAPER", PAPER)
    .replace("MARGIN", f"-{MARGIN}")
)
THEME = TerminalTheme((255, 255, 255), (20, 20, 20), [(0, 0, 0)] * 8)


class Segment(NamedTuple):
    """A stretch `[lo, hi)` of a bar."""

    lo: float
    hi: float
    label: str = ""
    colour: int | None = None
    """Index into the palette; None for what nobody cares about, `SHARED` for what several do."""
    short: str = ""
    """Where the label does not fit. Neither is ever cut: half a number is a wrong one."""


class Bar(NamedTuple):
    """One row."""

    name: str
    segments: Sequence[Segment]
    note: str = ""


def bars(title: str, extent: float, rows: Iterable[Bar], *, width: int = 72) -> RenderableType:
    """Draw rows over one axis from 0 to `extent`."""
    rows = list(rows)
    margin = max((len(row.name) for row in rows), default=0) + 1
    lines = [Text(without_control(title), style="bold")]
    for row in rows:
        line = Text(f"{row.name:<{margin}}")
        at = 0
        for segment in sorted(row.segments, key=lambda s: s.lo):
            start, end = (round(x * width / extent) for x in (segment.lo, segment.hi))
            line.append(" " * (start - at))
            size = max(end - max(start, at), 1)
            colour, ink = colours(segment.colour)
            label = next((x for x in (segment.label, segment.short) if len(x) < size), "")
            # A gap of one column, so that neighbours of one colour are seen apart.
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
    """Background, and what can be read on it (`INK` where both follow the reader's theme)."""
    if index is None:
        return EMPTY, INK
    if index == SHARED:
        return "#555555", "#ffffff"
    index %= len(PALETTE)
    return PALETTE[index], "#000000" if index in DARK_INK else "#ffffff"


def to_svg(*pictures: RenderableType, width: int = 110, name: str = "asynckv") -> str:
    """Render pictures as one SVG, at most `width` characters wide; the same input gives the same text."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for picture in pictures:
        console.print(picture, highlight=False)
    rows = console.export_text(clear=False).rstrip().splitlines()
    size = max(map(cell_len, rows)) * CELL + 2 * MARGIN, len(rows) * LINE + 2 * MARGIN
    box = f'viewBox="{-MARGIN} {-MARGIN} {size[0]:.0f} {size[1]:.0f}"'
    form = FORM.replace("SIZE", f'width="{size[0] * SCALE:.0f}" height="{size[1] * SCALE:.0f}" {box}')
    text = console.export_svg(title="", theme=THEME, code_format=form, unique_id=name)
    text = text.replace(f"fill: {INK}", "fill: currentColor")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
