"""Draw the picture of docs/structure.md: one worker process, its core, and the parts around it.

It is drawn by hand from the docstring of `asynckv/core/__init__.py`.
"""

from __future__ import annotations

from pathlib import Path

from scripts.draw import drawing
from scripts.draw.drawing import PICTURES, arrow, colours, text

WIDTH, HEIGHT = 740, 404
LEFT, MIDDLE, RIGHT = 30, 220, 400
"""Left, middle and right of the boxes of the engine and the edges."""

CORE = 550
"""Left of the core."""

ENGINE, EDGES, PURE = 0, 2, 3
"""Colours of the palette."""


def box(left: float, top: float, right: float, bottom: float, colour: int) -> str:
    """Return the box of a part of the process."""
    fill, _ = colours(colour)
    place = f'x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"'
    return f'<rect {place} rx="8" fill="{fill}"/>'


def named(left: float, top: float, right: float, colour: int, name: str, *lines: str) -> list[str]:
    """Return a part with its file and its purpose."""
    _, ink = colours(colour)
    words = [text(left + 12, top + 22, name, kind="code bold", ink=ink)]
    words += [text(left + 12, top + 24 + 17 * i, line, size=13, ink=ink) for i, line in enumerate(lines, 1)]
    return [box(left, top, right, top + 34 + 17 * len(lines), colour), *words]


def structure() -> str:
    """Return the whole picture."""
    x, between = (LEFT + RIGHT) / 2, (RIGHT + CORE) / 2
    parts = [
        f'<rect x="12" y="34" width="{WIDTH - 24}" height="300" rx="10" class="line" stroke-dasharray="6 4"/>',
        text(WIDTH - 24, 54, "one worker process of your engine", size=13, anchor="end"),
        text(x + 14, 20, "your calls", size=13),
        arrow(x, 8, x, 60),
        *named(LEFT, 60, RIGHT, ENGINE, "engine/engine.py", "lend, announce, pull: callers wait here"),
        arrow(x - 10, 111, x - 10, 144),
        arrow(x + 10, 144, x + 10, 111),
        *named(
            LEFT, 144, RIGHT, ENGINE, "engine/driver.py", "one turn after another, on the event loop:",
            "events in, commands out",
        ),
        arrow(RIGHT, 168, CORE, 168),
        arrow(CORE, 190, RIGHT, 190),
        text(between, 160, "events, and the time", size=13, anchor="middle"),
        text(between, 208, "messages, commands", size=13, anchor="middle"),
        *named(
            CORE, 72, WIDTH - 30, PURE, "core/rank.py", "decides all; pure:", "no clock, no socket,", "no await",
            "", "prefill.py", "leases", "", "decode.py", "pulls and peers",
        ),
        arrow(120, 212, 120, 252),
        arrow(140, 252, 140, 212),
        arrow(300, 212, 300, 252),
        arrow(320, 252, 320, 212),
        *named(LEFT, 252, MIDDLE - 8, EDGES, "edges/control/zmq.py", "packets"),
        *named(MIDDLE, 252, RIGHT, EDGES, "edges/nic/nixl.py", "bytes"),
        arrow(120, 303, 120, 366),
        arrow(140, 366, 140, 303),
        arrow(310, 366, 310, 303),
        text(152, 358, "decisions", size=13),
        text(322, 358, "KV, read one-sidedly", size=13),
        text(x, 390, "the ranks of other engines", size=13, anchor="middle", kind="bold"),
    ]  # fmt: skip
    return drawing.svg(
        "One worker process: the engine takes calls, its driver feeds the pure core and the edges, which carry packets "
        "and bytes to the ranks of other engines",
        WIDTH,
        HEIGHT,
        "\n".join(parts),
    )


def files() -> dict[Path, str]:
    """Return the picture by its path."""
    return {PICTURES / "structure.svg": structure()}
