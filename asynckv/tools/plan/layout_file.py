"""Layouts of one engine's ranks as files, JSON or TOML, that people can read and write.

On the wire the same structures are arrays without names. Here every field is named, and fields at their defaults are
left out.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View

SCHEMA = "asynckv.layout/1"
MOST_BYTES = 256 << 20

_NESTED: dict[tuple[type[Struct], str], type[Struct]] = {
    (Layout, "memories"): Memory,
    (Layout, "groups"): Group,
    (Layout, "views"): View,
    (View, "parts"): Part,
    (Part, "dims"): Dim,
}


@functools.cache
def _fields(kind: type[Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    # Every call of msgspec's reads the annotations anew.
    return msgspec.structs.fields(kind)


def dump_layouts(layouts: Sequence[Layout]) -> str:
    ranks = [_plain(layout) for layout in layouts]
    for rank in ranks:
        rank.pop("schema", None)
    return msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, "ranks": ranks}), indent=1).decode() + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        fields = _fields(type(value))
        return {f.name: _plain(x) for f in fields if (x := getattr(value, f.name)) != f.default or f.required}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def load_layouts(path: Path) -> list[Layout]:
    """Read an engine's ranks from a file; every layout is checked."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: is longer than {MOST_BYTES >> 20} MiB; write fewer ranks into one file")
    kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
    try:
        found: Any = tomllib.loads(raw.decode("utf-8")) if kind == "TOML" else json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: is not {kind}: {exc}") from exc
    try:
        return _ranks(found)
    except LayoutError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _ranks(found: Any) -> list[Layout]:
    if not isinstance(found, dict):
        raise LayoutError("holds no table of fields")
    if not found.keys() & {"schema", "ranks"}:
        raise LayoutError("is no layout file; asynckv layout writes one, also from a --hf-config")
    _only("", found, ("schema", "ranks"))
    if "schema" not in found:
        raise LayoutError(f"schema is missing; this version reads {SCHEMA!r}")
    if found["schema"] != SCHEMA:
        raise LayoutError(f"schema is {found['schema']!r:.80}, but this version reads {SCHEMA!r}; write the file anew")
    ranks = found.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise LayoutError("ranks is not a list of one or more layouts")
    layouts = []
    for i, rank in enumerate(ranks):
        layout = msgspec.convert(_built(Layout, rank, f"ranks[{i}]"), Layout)
        try:
            check_layout(layout)
        except LayoutError as exc:
            raise LayoutError(f"ranks[{i}]: {exc}") from exc
        layouts.append(layout)
    places = [(x.pp_stage, x.tp_rank) for x in layouts]
    sizes = {(x.pp_size, x.tp_size) for x in layouts}
    for place, count in Counter(places).items():
        if count > 1:
            raise LayoutError(f"(pp_stage, tp_rank) {place} is there twice; a file holds different ranks of one engine")
    if len(sizes) > 1:
        raise LayoutError(f"ranks are of (pp_size, tp_size) {sorted(sizes)[:4]}; a file holds ranks of one engine")
    return layouts


def _only(where: str, given: dict[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            near = max(known, key=lambda k: _likeness(name, k))
            hint = f"did you mean {near!r}? " if _likeness(name, near) > 0.5 else ""
            shown = name if name.isprintable() and len(name) < 64 else f"{name!r:.64}"
            raise LayoutError(f"{where + '.' if where else ''}{shown} is unknown; {hint}Known: {', '.join(known)}")


def _likeness(name: str, known: str) -> float:
    # Who writes pp_rank means pp_stage rather than tp_rank.
    return difflib.SequenceMatcher(None, name[:64], known).ratio() + 0.4 * (name[:3] == known[:3])


def _built(kind: type[Struct], given: Any, where: str) -> Any:
    """Check one table of fields against a structure, and return it as the structure itself."""
    if not isinstance(given, dict):
        raise LayoutError(f"{where} is not a table of fields")
    fields = _fields(kind)
    _only(where, given, [f.name for f in fields])
    values: dict[str, Any] = {}
    for field in fields:
        if field.name not in given:
            if field.required:
                raise LayoutError(f"{where}.{field.name} is missing")
            continue
        value = given[field.name]
        nested = _NESTED.get((kind, field.name))
        if nested is not None:
            if not isinstance(value, list):
                raise LayoutError(f"{where}.{field.name} is not a list")
            value = tuple(_built(nested, x, f"{where}.{field.name}[{i}]") for i, x in enumerate(value))
            if not value:
                raise LayoutError(f"{where}.{field.name} is empty")
        else:
            try:
                value = msgspec.convert(value, field.type)
                msgspec.json.encode(value)
            except UnicodeEncodeError as exc:
                raise LayoutError(f"{where}.{field.name} is {value!r:.80}: no text that can be encoded") from exc
            except msgspec.ValidationError as exc:
                text = re.sub(r" - at `\$.*`$", "", str(exc))
                if get_origin(field.type) is Literal:
                    text = f"use one of {', '.join(map(repr, get_args(field.type)))}"
                raise LayoutError(f"{where}.{field.name} is {value!r:.80}: {text}") from exc
        values[field.name] = value
    return kind(**values)
