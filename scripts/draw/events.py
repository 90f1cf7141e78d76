"""Write docs/logging.md from the types of events; a test compares."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

from asynckv.core.told import EVENTS, Line
from scripts.draw.drawing import DOCS, between

KINDS = {str: "text", int: "integer", float: "seconds", list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event.

    Attributes:
        always: Every event of its kind has it.
        of: The fields of what a list of objects holds.
    """

    name: str
    kind: str
    meaning: str
    always: bool
    of: tuple[Field, ...] = ()


def fields_of(kind: type[Struct]) -> tuple[Field, ...]:
    """Return the fields of a type."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_field(x, *get_args(hints[x.name])) for x in structs.fields(kind))


def _field(field: structs.FieldInfo, kind: Any, meaning: str) -> Field:
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    of: tuple[Field, ...] = ()
    if get_origin(kind) is list and isinstance(within := get_args(kind)[0], type) and issubclass(within, Struct):
        of = fields_of(within) if not within.__struct_config__.array_like else ()
    return Field(field.name, KINDS[get_origin(kind) or kind], meaning, field.required, of)


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


def meaning(event: type[Struct]) -> str:
    """Return what an event means, in one line."""
    return " ".join((event.__doc__ or "").split())


def overview() -> str:
    """A line for each event, with the first sentence of its meaning."""
    lines = ["| event | logged by | level | what happened |", "|---|---|---|---|"]
    for name, event in EVENTS.items():
        first = meaning(event).partition(". ")[0].rstrip(".")
        lines.append(f"| [`{name}`](#{name}) | {SIDES[event.side]} | {', '.join(event.levels)} | {_cell(first)} |")
    return "\n".join(lines) + "\n\n"


def page() -> str:
    """The section from its overview on."""
    parts = [f"{overview()}### Fields of every event\n\n{table(fields_of(Line))}"]
    for name, event in EVENTS.items():
        said = f"{SIDES[event.side].capitalize()}, {' or '.join(event.levels)}. {meaning(event)}"
        parts.append(f"### {name}\n\n{textwrap.fill(said, 120, break_on_hyphens=False)}\n")
        if fields := fields_of(event):
            parts.append(table(fields))
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """The page with its section made anew."""
    return between(DOCS / "logging.md", "events", page())
