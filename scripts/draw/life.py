"""Draw the first two pictures that a reader sees: the life of a request, and the calls between processes.

In the life, time runs downwards. The left side shows the blocks of a prefill rank, the right side the work of a decode
rank. It is drawn by hand from `docs/structure.md`, "A request's life". Two bars on the right show the key idea:
bytes are believed if the reads end before the grant does.
"""

from __future__ import annotations

from pathlib import Path

from scripts.draw import drawing
from scripts.draw.drawing import PICTURES, arrow, colours, text

WIDTH = 440
"""Narrow, so that its words are readable on a phone, where it is scaled to some 350 pixels."""
OWNER, READER = 36, 352
"""Positions of the lines of the two engines."""

LENT, GRANT, READS, PULL = 0, 2, 3, 1
"""Colours of the palette."""

BAR = 14


def bar(x: float, top: float, bottom: float, colour: int) -> str:
    """Return a bar for a span of time."""
    return f'<rect x="{x:g}" y="{top:g}" width="{BAR}" height="{bottom - top:g}" fill="{colours(colour)[0]}"/>'


def message(start: float, end: float, y: float, *, wide: bool = False, dashed: bool = False) -> str:
    """Return an arrow from one engine to the other; a wide one stands for the bytes."""
    way = 1 if end > start else -1
    size = 11 if wide else 7
    style = ' style="stroke-width: 9"' if wide else ' stroke-dasharray="5 4"' if dashed else ""
    tip = f"M{end:g} {y:g}L{end - way * 1.6 * size:g} {y - size:g}V{y + size:g}Z"
    return (
        f'<path d="M{start:g} {y:g}H{end - way * 1.5 * size:g}" class="line"{style}/>\n<path d="{tip}" class="head"/>'
    )


def head(x: float, edge: float, anchor: str, name: str, does: str) -> list[str]:
    """Return an engine's name and line; `edge` is where the words begin or end."""
    return [
        text(edge, 28, name, size=18, anchor=anchor, kind="bold"),
        text(edge, 48, does, anchor=anchor),
        f'<path d="M{x:g} 60V540" class="line" style="stroke-width: 1"/>',
    ]


def notes(x: float, y: float, anchor: str, *lines: str) -> list[str]:
    """Return lines of text next to an engine; the first one is a call or a state."""
    first, *others = lines
    return [
        text(x, y, first, anchor=anchor, kind="bold"),
        *(text(x, y + 18 * i, line, anchor=anchor, size=13) for i, line in enumerate(others, 1)),
    ]


def life() -> str:
    """Return the picture of the life of a request."""
    middle = (OWNER + READER) / 2
    left, right = OWNER + BAR / 2 + 4, READER - BAR / 2 - 4
    lender, reader = OWNER + BAR / 2 + 10, READER - BAR / 2 - 10
    grant, reads = READER + BAR / 2 + 6, READER + BAR / 2 + 24
    lines = [
        *head(OWNER, 16, "start", "Prefill engine", "computes the prompt's KV"),
        *head(READER, WIDTH - 16, "end", "Decode engine", "generates the tokens"),
        *notes(lender, 84, "start", "lend", "Its blocks stay as they are: a lease."),
        bar(OWNER - BAR / 2, 72, 494, LENT),
        message(left, right, 142, dashed=True),
        text(middle, 134, "params, by way of a router (HTTP)", anchor="middle"),
        *notes(reader, 168, "end", "pull", "into blocks that its scheduler chose"),
        bar(READER - BAR / 2, 154, 406, PULL),
        message(right, left, 216),
        text(middle, 208, "claim (ZMQ)", anchor="middle"),
        bar(grant, 216, 490, GRANT),
        text(WIDTH - 6, 230, "reads", anchor="end", kind="bold"),
        bar(reads, 238, 378, READS),
        message(left, right, 272, wide=True),
        text(middle, 254, "KV, read by NIXL: the owner is not asked", anchor="middle"),
        message(left, right, 322),
        text(middle, 314, "granted: the blocks stay for 10 s", anchor="middle"),
        message(left, right, 364, wide=True),
        *notes(reader, 400, "end", "proven", "The reads ended before the grant:", "the blocks were still lent."),
        text(grant - 2, 508, "grant", kind="bold"),
        message(right, left, 476),
        text(middle, 468, "release, repeated until acknowledged", anchor="middle"),
        *notes(lender, 504, "start", "free again", "when every reader has released,", "or the lease has run out"),
        text(WIDTH - 16, 548, "time ↓", size=13, anchor="end"),
    ]
    return "\n".join(lines)


def box(x: float, y: float, width: float, height: float, *, is_outer: bool = False) -> str:
    """Return a box for a process or for a whole engine."""
    style = 'fill="none" class="line"' if is_outer else f'fill="{colours(None)[0]}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" {style}/>'


def process(x: float, y: float, name: str, has: str = "") -> list[str]:
    """Return a process of an engine, with the class of asynckv in it."""
    middle = x + 66
    words = [text(middle, y + (20 if has else 28), name, anchor="middle")]
    words += [text(middle, y + 38, has, size=12, anchor="middle", kind="code")] if has else []
    return [box(x, y, 132, 46), *words]


def workers() -> str:
    """Return the picture of the processes, and the messages between them."""
    lines = [
        box(170, 12, 100, 32),
        text(220, 33, "client", anchor="middle"),
        arrow(220, 44, 220, 68),
        box(170, 68, 100, 32),
        text(220, 89, "router", anchor="middle"),
        '<path d="M170 84H86V124" class="line"/>',
        '<path d="M270 84H354V124" class="line"/>',
        arrow(86, 116, 86, 132),
        arrow(354, 116, 354, 132),
        text(220, 120, "params: JSON,", size=13, anchor="middle"),
        text(220, 136, "unchanged", size=13, anchor="middle"),
    ]
    for left, name, has in ((10, "Prefill engine", "PrefillRanks"), (278, "Decode engine", "")):
        lines += [
            box(left, 132, 152, 284, is_outer=True),
            text(left + 76, 154, name, size=16, anchor="middle", kind="bold"),
            *process(left + 10, 166, "scheduler", has),
            arrow(left + 40, 212, left + 40, 268),
            text(left + 50, 244, "orders", size=13),
            *process(left + 10, 270, "worker 0", "EngineThread"),
            *process(left + 10, 356, "worker 1", "EngineThread"),
        ]
    for top in (270, 356):
        lines += [
            text(220, top + 6, "claims (ZMQ)", size=13, anchor="middle"),
            message(284, 156, top + 14),
            message(156, 284, top + 42, wide=True),
        ]
    lines += [text(220, top + 66, "KV (NIXL)", size=13, anchor="middle") for top in (270, 356)]
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """Return the pictures by their paths."""
    of_life = (
        "The life of a request. The prefill engine lends blocks and sends params by way of a router. The decode engine "
        "claims the request and reads the KV at the same time. The grant comes back. The reads end before the grant "
        "does: the blocks were still lent, so the bytes are proven. A release frees the blocks."
    )
    of_workers = (
        "A client asks the router. The router asks the prefill engine, and passes its params unchanged to the decode "
        "engine. In each engine the scheduler gives orders to its workers; the prefill scheduler has a PrefillRanks, "
        "each worker an EngineThread. The workers of the decode engine send claims by ZMQ to those of the prefill "
        "engine, and read the KV by NIXL."
    )
    return {
        PICTURES / "life.svg": drawing.svg(of_life, WIDTH, 560, life()),
        PICTURES / "workers.svg": drawing.svg(of_workers, WIDTH, 430, workers()),
    }
