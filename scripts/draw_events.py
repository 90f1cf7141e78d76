"""Write docs/events.md from the table of events; a test compares."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from asynckv.observe.events import COMMON, EVENTS, Field
from scripts import command

TARGET = Path(__file__).parents[1] / "docs" / "events.md"

HEAD = """# Events

Drawn from the table in `asynckv/observe/events.py` by `scripts/draw_events.py`; a test fails when this page is stale,
and another one if any engine of any test logs a field that is not in here. [Logging](logging.md) says where lines go,
which requests are in them, and how to find what one is looking for.

Every line is one JSON object (or `key=value`, where the application's logging makes it so). Fields in *italics* are
left out where there is nothing to say. Lists of ranks name 64 at most, and words of others are cut at 512 letters.
Request ids are the callers' own words: what should not be in a log should not be in an id.

Fields of every event:

"""


def rows(fields: Iterable[Field], within: str = "") -> Iterator[str]:
    """Lines of a table of fields."""
    for field in fields:
        name = f"{within}{field.name}"
        yield f"| {f'`{name}`' if field.always else f'*`{name}`*'} | {field.kind} | {_cell(field.meaning)} |"
        yield from rows(field.of, f"{name}[].")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(fields: Iterable[Field]) -> str:
    """A table of fields."""
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows(fields)]) + "\n"


def page() -> str:
    """The whole page."""
    sides = {"prefill": "prefill side", "decode": "decode side", "both": "both sides"}
    parts = [HEAD + table(COMMON)]
    for name, event in EVENTS.items():
        parts.append(f"## {name}\n\n{sides[event.side]}, {' or '.join(event.levels)}. {event.meaning}\n")
        if event.fields:
            parts.append(table(event.fields))
    return "\n".join(parts)


def draw() -> None:
    """Write docs/events.md from the table of events.

    Run it after the table changes; a test compares the page.
    """
    TARGET.write_text(page())


main = command.script(draw, "draw_events", "[bold]Exit status[/bold]  0 written, 2 bad input")


if __name__ == "__main__":
    sys.exit(main())
