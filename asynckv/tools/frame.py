"""The frame of pages with plots: one HTML file that opens without a network, in the reader's theme, and on paper.

What is shown is up to others. A plot is traces and a layout for plotly; colours are the frame's to choose, one set for
each theme: a trace's `meta` is the number of a series, or its two colours, for a light page and for a dark one.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

_CODE = re.compile(r"`([^`<>]{1,200})`")
_NAME = re.compile(
    r"(?P<engine>[^\s,;:()<>&`/]{1,60}(?:/pp\d{1,6})?/)(?P<rank>tp\d{1,6}(?:@[0-9a-f]{1,16})?)"
    r"|(?<!\S)[\w.-]{1,60}-\d+(?![^\s,])|(?<!\S)[\w.-]{1,60}:\d+(?![^\s,])"
)
"""A rank, a request's id that ends in a number, or a line of a file."""

LONG = 80
"""Letters of a cell that is a sentence."""

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
) -> str:
    """Draw one plot, checked against plotly's own schema.

    Args:
        caption: What is seen.
        spoken: The same in words, for those who do not see it.
        traces: Of plotly.
        layout: Of plotly; `meta` may have a `height` in pixels, without the legend.
    """
    import plotly.graph_objects as go

    drawn = go.Figure(data=list(traces), layout=dict(layout))
    # Without plotly's template: the page has its own colours.
    drawn.update_layout(template=None)
    has_legend = any(trace.get("showlegend", True) for trace in traces)
    height = (layout.get("meta") or {}).get("height", 340) + (21 if has_legend else 0)
    # A "</script" inside a string must not end the script.
    data = drawn.to_json().replace("<", "\\u003c")
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f'<div class="plot" role="img" aria-label="{escape(spoken)}" style="min-height:{height}px"></div>'
        f'<script type="application/json">{data}</script></figure>\n'
    )


def axis(unit: str) -> dict[str, Any]:
    """Make an axis from zero."""
    return {"title": {"text": unit}, "rangemode": "tozero"}


def log_axis(unit: str, values: Sequence[float]) -> dict[str, Any]:
    """Make a logarithmic axis with its ticks written out: plotly's own say 2 and 5 in every decade."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return {
        "title": {"text": f"{unit} (log scale)"},
        "type": "log",
        "tickvals": ticks,
        "ticktext": [plain(v) for v in ticks],
    }


def plain(x: Any) -> str:
    """Write a number without what it does not need."""
    return f"{x:g}" if isinstance(x, float) else str(x)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, texts: Sequence[str] = ()) -> str:
    """Make a table of texts; the first cell of a row names it, and the columns in `texts` are words, not numbers."""
    kinds = [' class="text"' if head in texts else "" for head in heads]
    top = "".join(f'<th scope="col"{kind}>{escape(head)}</th>' for head, kind in zip(heads, kinds, strict=True))
    body = "".join(
        f'<tr><th scope="row">{_words(name)}</th>'
        f"{''.join(f'<td{_long(cell, kind)}>{_words(cell)}</td>' for cell, kind in zip(cells, kinds[1:], strict=True))}"
        "</tr>\n"
        for name, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="words"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n'
    )


def _words(text: str) -> str:
    """Make HTML of a text: what stands in backticks is code, and names are not broken at their hyphens."""
    shown = _CODE.sub(r"<code>\1</code>", escape(text))
    return _NAME.sub(_name, shown)


def _name(found: re.Match[str]) -> str:
    """Keep a name in one line; that of a rank may be broken before the rank."""
    parts = [found["engine"], found["rank"]] if found["engine"] else [found[0]]
    return "<wbr>".join(f'<span class="name">{x}</span>' for x in parts)


def _long(cell: str, kind: str) -> str:
    """Give a sentence room."""
    return ' class="text long"' if kind and len(cell) > LONG else kind


def verdict(said: Sequence[str], *, is_good: bool | None) -> str:
    """Say first what matters: whether all is well (None: nothing tells), and one sentence for each thing."""
    kind, first = {True: ("good", "All well."), False: ("bad", "Look here:"), None: ("", "Nothing to judge:")}[is_good]
    rest = _words(" ".join(said)) if len(said) < 2 else f"<ul>{''.join(f'<li>{_words(x)}</li>' for x in said)}</ul>"
    return f'<div class="verdict {kind}"><strong>{first}</strong> {rest}</div>\n'


def facts(named: Mapping[str, str]) -> str:
    """Make a list of names and texts."""
    return f"<dl>{''.join(f'<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>' for k, v in named.items())}</dl>\n"
