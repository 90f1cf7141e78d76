"""Write docs/events.md from the table of events; a test compares."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from asynckv.observe.events import COMMON, EVENTS, Field
from scripts.draw.drawing import DOCS

TARGET = DOCS / "events.md"

HEAD = """# Events

Every event that asynckv logs, with its fields: look up here what a line means. [Logging](logging.md) says how to search
the logs, where lines go, and which requests are in them.

Every line is one JSON object (or `key=value`, where the application's logging makes it so). Fields in *italics* are
left out where there is nothing to say. Lists of ranks name 64 at most, and words of others are cut at 512 letters.
Request ids are the callers' own words: what should not be in a log should not be in an id.

The page is drawn from the table in `asynckv/observe/events.py` by `scripts/draw`. A test fails when it is
stale, and another one if an engine of any test logs a field that is not in here.

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


SIDES = {"prefill": "prefill side", "decode": "decode side", "both": "both sides"}


def overview() -> str:
    """A line for each event, with the first sentence of its meaning."""
    lines = ["| event | logged by | level | what happened |", "|---|---|---|---|"]
    for name, event in EVENTS.items():
        first = event.meaning.partition(". ")[0].rstrip(".")
        lines.append(f"| [`{name}`](#{name}) | {SIDES[event.side]} | {', '.join(event.levels)} | {_cell(first)} |")
    return "\n".join(lines) + "\n\n"


def page() -> str:
    """The whole page."""
    parts = [f"{HEAD}{overview()}## Fields of every event\n\n{table(COMMON)}"]
    for name, event in EVENTS.items():
        said = f"{SIDES[event.side].capitalize()}, {' or '.join(event.levels)}. {event.meaning}"
        parts.append(f"## {name}\n\n{textwrap.fill(said, 120, break_on_hyphens=False)}\n")
        if event.fields:
            parts.append(table(event.fields))
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """The page."""
    return {TARGET: page()}
