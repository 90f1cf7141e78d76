"""Write the section Events of docs/logging.md from the types of events. A test compares the two."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Struct, structs

from asynckv.told import ADVICE, ENDS, EVENTS, Line, Told
from scripts.draw.drawing import DOCS, between, table

KINDS = {str: "text", int: "integer", float: "seconds", list: "list", dict: "object", UnionType: "text or object"}
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
    """Return type and meaning, by name, of the fields that many events have: one meaning of each name."""
    fields = (field for event in EVENTS.values() for _, field in flat(fields_of(event)))
    counts = Counter((field.name, field.kind, field.meaning) for field in fields).most_common()
    return {name: (kind, meaning) for (name, kind, meaning), number in reversed(counts) if number >= SHARED}


def flat(fields: Iterable[Field], within: str = "") -> Iterator[tuple[str, Field]]:
    """Yield all fields, also those of the objects in lists, each with its full name as the page shows it."""
    for field in fields:
        name = f"{within}{field.name}"
        yield f"`{name}`" if field.always else f"*`{name}`*", field
        yield from flat(field.of, f"{name}[].")


def explained(fields: Iterable[Field]) -> Iterator[str]:
    """Yield a table of the fields that are an event's own, and a line with the names of all others."""
    rows = [(name, field.kind, field.meaning, shared().get(field.name)) for name, field in flat(fields)]
    if own := [row[:3] for row in rows if row[1:3] != row[3]]:
        yield table(HEAD, own)
    if others := [row[0] for row in rows if row[1:3] == row[3]]:
        yield textwrap.fill(f"[Shared](#shared-fields): {', '.join(others)}.", 120, break_on_hyphens=False) + "\n"


HEAD = "| field | type | meaning |"


def meaning(event: type[Struct]) -> str:
    """Return the meaning of an event, in one line."""
    return " ".join((event.__doc__ or "").split())


def lasting(event: type[Told]) -> str:
    """Return what ends a warning of this type, in one line."""
    ends = " or ".join(f"`{name}`" for name in EVENTS if name in ENDS.get(event.event, ()))
    only = f" if `{event.only_with}` is above 0" if event.only_with else ""
    return f" Open until {ends}{only}." if ends else " Advice." if event.until == ADVICE else ""


def overview() -> str:
    """Return links to all events."""
    return textwrap.fill(", ".join(f"[`{name}`](#{name})" for name in EVENTS), 120) + "\n\n"


def page() -> str:
    """Return the section from its overview on."""
    common = table(HEAD, ((name, field.kind, field.meaning) for name, field in flat(fields_of(Line))))
    parts = [f"{overview()}### Fields of every event\n\n{common}"]
    common = table(HEAD, ((f"`{name}`", *said) for name, said in sorted(shared().items())))
    parts.append(f"### Shared fields\n\n{common}")
    for name, event in EVENTS.items():
        parts.append(f"### {name}\n\n{textwrap.fill(meaning(event) + lasting(event), 120, break_on_hyphens=False)}\n")
        parts += explained(fields_of(event))
    return "\n".join(parts)


def files() -> dict[Path, str]:
    """Return the page with its section made anew."""
    return between(DOCS / "logging.md", "events", page())
