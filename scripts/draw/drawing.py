"""Common parts of pages and pictures: the frame, the colours and the paths.

A picture is a separate image in a page, so a theme that is switched by hand does not reach it. Each picture therefore
paints its own background, and follows the reader's system: light or dark.

Draw with `currentColor` (ink), with `colours(i)` (a fill with its ink), and with `colours(None)` (grey). All of them
work in both themes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from scripts.draw import bars
from scripts.draw.bars import EMPTY, INK

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"
PAPER = "#ffffff"
THEMES = f""".picture {{ color: {INK}; }}
@media (prefers-color-scheme: dark) {{
.picture {{ color: #e6e6e6; }}
.picture [fill="{PAPER}"] {{ fill: #131416; }}
.picture [fill="{EMPTY}"] {{ fill: #484848; }}
}}"""
"""Colours of a picture in light and dark. Its root has the class `picture`, its first rectangle the fill `PAPER`, and
its texts are `currentColor`. A picture cannot know the colours of its page, so it has its own background."""
CELL, LINE, MARGIN = 12.2, 24.4, 20
"""Units of one character in rich's SVGs, and of the margin."""
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
STYLE = f"""{THEMES}
.picture text {{ fill: currentColor; font-family: system-ui, "Segoe UI", "DejaVu Sans", Arial, sans-serif; }}
.picture .code {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.picture .bold {{ font-weight: bold; }}
.picture .line {{ fill: none; stroke: currentColor; stroke-width: 1.5; }}
.picture .head {{ fill: currentColor; }}"""
"""Texts, lines and arrow heads in the reader's ink. `.picture text` overrides `fill="..."`: use `text(ink=...)`."""


def colours(index: int | None) -> tuple[str, str]:
    """Return a fill of the palette (None: grey), and its ink for `text(ink=...)`."""
    fill, ink = bars.colours(index)
    return fill, "currentColor" if ink == INK else ink


def svg(title: str, width: float, height: float, body: str) -> str:
    """Frame a picture; screen readers read `title` out, but it is not drawn.

    The size is in pixels. A page shows it no wider than its own column (some 740 pixels, and 350 on a phone).
    """
    lines = (
        f'<svg class="picture" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f"<style>\n{STYLE}\n</style>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
        body.strip(),
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def text(
    x: float, y: float, words: str, *, size: float = 14, anchor: str = "start", kind: str = "", ink: str = ""
) -> str:
    """Write words with their base line at `y`; `kind` is `code`, `bold` or both, `ink` a colour for both themes."""
    about = f' class="{kind}"' if kind else ""
    about += f' style="fill: {ink}"' if ink else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{about}>{escape(words)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a straight arrow (down, up, left or right) for messages between parts."""
    dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    back_x, back_y = to_x - 9 * dx, to_y - 9 * dy
    tip = f"M{to_x:g} {to_y:g}L{back_x + 5 * dy:g} {back_y + 5 * dx:g}L{back_x - 5 * dy:g} {back_y - 5 * dx:g}Z"
    return f'<path d="M{x:g} {y:g}L{back_x:g} {back_y:g}" class="line"/>\n<path d="{tip}" class="head"/>'


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table of a page, with one line for each row."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines]) + "\n"


def between(page: Path, name: str, made: str, text: str | None = None) -> dict[Path, str]:
    """Return a page with new text between its marks `<!-- name -->` and `<!-- /name -->`; `text` is a changed page."""
    before, begin, rest = (page.read_text() if text is None else text).partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    return {page: f"{before}{begin}{made}{end}{after}"}


def to_svg(*drawn: RenderableType, width: int = 110, name: str = "asynckv") -> str:
    """Render pictures as one SVG, at most `width` characters wide; the same input gives the same text."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for picture in drawn:
        console.print(picture, highlight=False)
    rows = console.export_text(clear=False).rstrip().splitlines()
    size = max(map(cell_len, rows)) * CELL + 2 * MARGIN, len(rows) * LINE + 2 * MARGIN
    box = f'viewBox="{-MARGIN} {-MARGIN} {size[0]:.0f} {size[1]:.0f}"'
    form = FORM.replace("SIZE", f'width="{size[0] * SCALE:.0f}" height="{size[1] * SCALE:.0f}" {box}')
    text = console.export_svg(title="", theme=THEME, code_format=form, unique_id=name)
    text = text.replace(f"fill: {INK}", "fill: currentColor")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
