"""What pages and pictures share: a frame, its colours, and where the files are.

A picture is an image of its own in a page: a theme that is switched by hand does not reach it. So each paints its own
background, and follows the reader's system: light or dark.

Draw with `currentColor` (ink), with `colours(i)` (a fill, and the ink that is read on it), and with `colours(None)`
(grey). All of them are right in both.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from asynckv.tools import pictures
from asynckv.tools.pictures import INK, PAPER, THEMES

__all__ = ["DOCS", "PICTURES", "STYLE", "between", "colours", "svg", "text"]

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"
STYLE = f"""{THEMES}
.picture text {{ fill: currentColor; font-family: system-ui, "Segoe UI", "DejaVu Sans", Arial, sans-serif; }}
.picture .code {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.picture .bold {{ font-weight: bold; }}
.picture .line {{ fill: none; stroke: currentColor; stroke-width: 1.5; }}
.picture .head {{ fill: currentColor; }}"""
"""Texts, lines and arrow heads in the reader's ink. `.picture text` wins over `fill="..."`: use `text(ink=...)`."""


def colours(index: int | None) -> tuple[str, str]:
    """A fill of the palette (None: grey), and the ink that is read on it, for `text(ink=...)`."""
    fill, ink = pictures.colours(index)
    return fill, "currentColor" if ink == INK else ink


def svg(title: str, width: float, height: float, body: str) -> str:
    """Frame a picture: `title` is read out by screen readers, and not drawn.

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


def between(page: str, begin: str, made: str, end: str) -> str:
    """Put what is made from code between two marks of a page that is written by hand."""
    before, begin, rest = page.partition(begin)
    _, end, after = rest.partition(end)
    return f"{before}{begin}{made}{end}{after}"
