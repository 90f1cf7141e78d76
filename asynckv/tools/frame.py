"""The frame of pages with plots: one HTML file that opens without a network, in the reader's theme, and on paper.

What is shown is up to others. A plot is traces and a layout for plotly; colours are the frame's to choose, one set for
each theme: a trace's `meta` is the number of a series, or its two colours, for a light page and for a dark one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

__all__ = ["REMEDY", "facts", "figure", "is_installed", "make", "table"]

REMEDY = "plots need plotly: pip install 'asynckv[plots]'"


def is_installed() -> bool:
    """Say whether plots can be drawn."""
    return importlib.util.find_spec("plotly") is not None


def make(title: str, hint: str, body: str) -> str:
    """Make a page.

    Args:
        title: A text.
        hint: A text, below it.
        body: HTML, in which all that comes from elsewhere is escaped.
    """
    from plotly.offline import get_plotlyjs

    parts = {"title": escape(title), "hint": f'<p class="hint">{escape(hint)}</p>', "body": body}
    parts["plotly"] = get_plotlyjs()
    text = resources.files("asynckv.tools").joinpath("frame.html").read_text(encoding="utf-8")
    # In one pass, so that nothing inside a part is taken for a mark.
    head, *rest = text.split("@@")
    return head + "".join(parts[x] if i % 2 == 0 else x for i, x in enumerate(rest))


def figure(
    caption: str,
    spoken: str,
    traces: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    *,
    note: str = "",
    is_wide: bool = False,
) -> str:
    """Draw one plot, checked against plotly's own schema.

    Args:
        caption: What is seen.
        spoken: The same in words, for those who do not see it.
        traces: Of plotly.
        layout: Of plotly; `meta` may have a `height` in pixels, without the legend.
        note: Below the caption: what to know to read it.
        is_wide: It has a row of the page to itself.
    """
    import plotly.graph_objects as go

    drawn = go.Figure(data=list(traces), layout=dict(layout))
    # Without plotly's template: the page has its own colours.
    drawn.update_layout(template=None)
    # A "</script" inside a string must not end the script.
    data = drawn.to_json().replace("<", "\\u003c")
    return (
        f"<figure{' class=wide' if is_wide else ''}><figcaption>{escape(caption)}"
        f"{f'<small>{escape(note)}</small>' if note else ''}</figcaption>"
        f'<div class="plot" role="img" aria-label="{escape(spoken)}"></div>'
        f'<script type="application/json">{data}</script></figure>\n'
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, label: str) -> str:
    """Make a table of texts; the first cell of a row names it."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


def facts(named: Mapping[str, str]) -> str:
    """Make a list of names and texts."""
    return f"<dl>{''.join(f'<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>' for k, v in named.items())}</dl>\n"
