"""Write the section Events of docs/logging.md from the types of events. A test compares the two."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

from asynckv.core.told import EVENTS, Line
from scripts.draw.drawing import DOCS, between

KINDS = {str: "text", int: "integer", float: "seconds", list: "list", dict: "object"}
SHARED = 3
"""A field that stands in this many places is explained once, and only named there."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an event.

    Attributes:
        always: True if every event of its kind has the field.
        of: Fields of the objects in a list.
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


@functools.cache
def shared() -> dict[str, tuple[str, str]]:
    """Return type and meaning, by name, of the fields that many events have."""
    fields = [field for event in EVENTS.values() for field in fields_of(event)]
    fields += [inner for field in fields for inner in field.of]
    counts = Counter((field.name, field.kind, field.meaning) for field in fields)
    most = {said[0]: said for said, _ in reversed(counts.most_common())}  # one meaning of each name
    return {
        name: (kind, meaning)
        for (name, kind, meaning), number in counts.items()
        if number >= SHARED and most[name] == (name, kind, meaning)
    }


def _is_shared(field: Field) -> bool:
    return shared().get(field.name) == (field.kind, field.meaning)


def rows(fields: Iterable[Field], within: str = "") -> Iterator[str]:
    """Yield the lines of a table of fields."""
    for field in fields:
        name = f"{within}{field.name}"
        yield f"| {_name(field, name)} | {field.kind} | {_cell(field.meaning)} |"
        yield from rows([x for x in field.of if not _is_shared(x)], f"{name}[].")


def _name(field: Field, name: str = "") -> str:
    return f"`{name or field.name}`" if field.always else f"*`{name or field.name}`*"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


HEAD = "| field | type | meaning |\n|---|---|---|"


def table(fields: Iterable[Field]) -> str:
    """Return a table of fields."""
    return "\n".join([HEAD, *rows(fields)]) + "\n"


def explained(fields: tuple[Field, ...]) -> Iterator[str]:
    """Yield a table of the fields that are an event's own, and a line with the names of all others."""
    if own := [field for field in fields if not _is_shared(field)]:
        yield table(own)
    names = [_name(field) for field in fields if _is_shared(field)]
    for field in fields:
        names += [_name(x, f"{field.name}[].{x.name}") for x in field.of if _is_shared(x)]
    if names:
        yield textwrap.fill(f"[Shared](#shared-fields): {', '.join(names)}.", 120, break_on_hyphens=False) + "\n"


SIDES = {"prefill": "prefill side", "decode": "decode side", "both": "both sides"}


def meaning(event: type[Struct]) -> str:
    """Return the meaning of an event, in one line."""
    return " ".join((event.__doc__ or "").split())


def overview() -> str:
    """Return a table with one line for each event."""
    lines = ["| event | logged by | level |", "|---|---|---|"]
    for name, event in EVENTS.items():
        lines.append(f"| [`{name}`](#{name}) | {SIDES[event.side]} | {', '.join(event.levels)} |")
    return "\n".join(lines) + "\n\n"


def page() -> str:
    """Return the section from its overview on."""
    parts = [f"{overview()}### Fields of every event\n\n{table(fields_of(Line))}"]
    lines = [f"| `{name}` | {kind} | {_cell(said)} |" for name, (kind, said) in shared().items()]
    parts.append("\n".join(["### Shared fields\n", HEAD, *lines, ""]))
    for name, event in EVENTS.items():
        parts.append(f"### {name}\n\n{textwrap.fill(meaning(event), 120, break_on_hyphens=False)}\n")
        parts += explained(fields_of(event))
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """Return the page with its section made anew."""
    return between(DOCS / "logging.md", "events", page())
