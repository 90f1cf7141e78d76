"""Draw the life of a request across the two engines: the first picture that a reader sees.

Time runs downwards. On the left is what a prefill rank holds, on the right what a decode rank does. It is drawn by hand
from `docs/structure.md`, "The life of a request". It shows what is different here: two bars on the right, the reads and
the grant. Bytes are believed if the first ends before the second.
"""

from __future__ import annotations

import sys

from scripts import command, drawing
from scripts.drawing import colours, text

WIDTH, HEIGHT = 780, 460
OWNER, READER = 190, 560
"""Where the two engines' lines are."""

LENT, GRANT, READS, PULL = 0, 2, 3, 1
"""Colours of the palette."""

BAR = 14


def bar(x: float, top: float, bottom: float, colour: int) -> str:
    """A time during which something is so."""
    return f'<rect x="{x:g}" y="{top:g}" width="{BAR}" height="{bottom - top:g}" fill="{colours(colour)[0]}"/>'


def arrow(start: float, end: float, y: float, *, wide: bool = False, dashed: bool = False) -> str:
    """What goes from one engine to the other; wide: the bytes."""
    way = 1 if end > start else -1
    size = 11 if wide else 7
    style = ' style="stroke-width: 9"' if wide else ' stroke-dasharray="5 4"' if dashed else ""
    tip = f"M{end:g} {y:g}L{end - way * 1.6 * size:g} {y - size:g}V{y + size:g}Z"
    return (
        f'<path d="M{start:g} {y:g}H{end - way * 1.5 * size:g}" class="line"{style}/>\n<path d="{tip}" class="head"/>'
    )


def head(x: float, name: str, does: str) -> list[str]:
    """An engine's name, over its line."""
    return [
        text(x, 26, name, size=18, anchor="middle", kind="bold"),
        text(x, 46, does, anchor="middle"),
        f'<path d="M{x:g} 58V{HEIGHT - 20}" class="line" style="stroke-width: 1"/>',
    ]


def notes(x: float, y: float, anchor: str, *lines: str) -> list[str]:
    """Lines beside an engine; the first one is a call or a state."""
    first, *others = lines
    return [
        text(x, y, first, anchor=anchor, kind="bold"),
        *(text(x, y + 18 * i, line, anchor=anchor, size=13) for i, line in enumerate(others, 1)),
    ]


def life() -> str:
    """The whole picture."""
    middle = (OWNER + READER) / 2
    left, right = OWNER + BAR / 2 + 4, READER - BAR / 2 - 4
    beside, after = OWNER - BAR / 2 - 10, READER + BAR / 2 + 46
    grant, reads = READER + BAR / 2 + 6, READER + BAR / 2 + 24
    lines = [
        *head(OWNER, "Prefill engine", "computes the prompt's KV"),
        *head(READER, "Decode engine", "generates the tokens"),
        *notes(beside, 92, "end", "lend", "Its blocks stay as", "they are: a lease."),
        bar(OWNER - BAR / 2, 80, 384, LENT),
        arrow(left, right, 104, dashed=True),
        text(middle, 96, "params, by way of a router (HTTP)", anchor="middle"),
        *notes(after, 124, "start", "pull", "into blocks that its", "scheduler chose"),
        bar(READER - BAR / 2, 112, 336, PULL),
        arrow(right, left, 160),
        text(middle, 152, "claim (ZMQ)", anchor="middle"),
        bar(grant, 160, 392, GRANT),
        bar(reads, 180, 316, READS),
        arrow(left, right, 212, wide=True),
        text(middle, 196, "KV, read by NIXL: the owner is not asked", anchor="middle"),
        arrow(left, right, 262),
        text(middle, 254, "granted: the blocks stay for 10 s", anchor="middle"),
        arrow(left, right, 304, wide=True),
        *notes(after, 220, "start", "reads"),
        *notes(after, 330, "start", "proven", "Reads ended before", "the grant: the bytes", "are the request's."),
        text(grant - 2, 412, "grant", kind="bold"),
        arrow(right, left, 366),
        text(middle, 358, "release, repeated until acknowledged", anchor="middle"),
        *notes(beside, 374, "end", "free again", "when every reader", "has released, or the", "lease has run out"),
        text(20, HEIGHT - 14, "time ↓", size=13),
    ]
    return "\n".join(lines)


def pictures() -> dict[str, str]:
    """Every file's text by its name."""
    title = (
        "The life of a request. The prefill engine lends blocks and sends params by way of a router. The decode engine "
        "claims the request and reads the KV at the same time. The grant comes back. The reads end before the grant "
        "does, so the bytes are proven. A release frees the blocks."
    )
    return {"life.svg": drawing.svg(title, WIDTH, HEIGHT, life())}


def draw() -> None:
    """Draw the life of a request into docs/pictures; a test compares what lies there."""
    drawing.write(pictures())


main = command.script(draw, "draw_life", "[bold]Exit status[/bold]  0 written, 2 bad input")


if __name__ == "__main__":
    sys.exit(main())
