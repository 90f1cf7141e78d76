"""Layouts of one engine's ranks as JSON files.

The wire sends the same structures as arrays without names. Here every field is named, and defaults are left out, so
that people can read and write the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, TokenShard, View

SCHEMA = "asynckv.layout/1"
Role = Literal["prefill", "decode"]
_NESTED: dict[type[Struct], dict[str, type[Struct]]] = {
    Layout: {"memories": Memory, "groups": Group, "views": View, "token_shards": TokenShard},
    View: {"parts": Part},
    Part: {"dims": Dim},
}
_fields = cache(fields)


def _some(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], Meta(min_length=1)]


def _named(kind: type[Struct]) -> type[Struct]:
    """Make a copy of a wire structure that encodes its fields by name."""
    nested, made = _NESTED.get(kind, {}), list[Any]()
    for field in _fields(kind):
        type_ = _some(_named(nested[field.name])) if field.name in nested else field.type
        made.append((field.name, type_) if field.required else (field.name, type_, field.default))
    return msgspec.defstruct(kind.__name__, made, kw_only=True, forbid_unknown_fields=True)


class _Head(Struct):
    schema: str = ""


_File: Any = msgspec.defstruct(
    "File", [("schema", str), ("ranks", _some(_named(Layout))), ("role", Role | None, None)], forbid_unknown_fields=True
)


def dump_layouts(layouts: Sequence[Layout], role: Role | None = None) -> str:
    """Return the text of a layout file; with a role, `asynckv plan` refuses it in the other engine's place."""
    head = {"schema": SCHEMA} | ({"role": role} if role else {})
    whole = msgspec.json.encode({**head, "ranks": [_plain(layout) for layout in layouts]})
    return msgspec.json.format(whole, indent=1).decode() + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        found = ((f, getattr(value, f.name)) for f in _fields(type(value)))
        return {f.name: _plain(x) for f, x in found if f.required or x != f.default}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def load_layouts(path: Path, role: Role | None = None) -> list[Layout]:
    """Read an engine's ranks from a file; every layout is checked, and the role if one is given and in the file."""
    try:
        return _ranks(path.read_bytes(), role)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LayoutError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _ranks(raw: bytes, role: Role | None) -> list[Layout]:
    schema = msgspec.json.decode(raw, type=_Head).schema
    if not schema:
        raise LayoutError("is not a layout file; write one with asynckv layout, which also takes --hf-config")
    if schema != SCHEMA:
        raise LayoutError(f"schema is {schema!r:.80}, but this version reads {SCHEMA!r}; write the file anew")
    file = msgspec.json.decode(raw, type=_File)
    if role and file.role not in (None, role):
        raise LayoutError(
            f"these are ranks of a {file.role} engine, in the place of the {role} engine; the order is asynckv plan "
            f"PREFILL DECODE"
        )
    layouts = [_wired(Layout, rank) for rank in file.ranks]
    for i, layout in enumerate(layouts):
        try:
            check_layout(layout)
        except LayoutError as exc:
            raise LayoutError(f"ranks[{i}]: {exc}") from exc
    places = [(x.pp_stage, x.tp_rank) for x in layouts]
    sizes = {(x.pp_size, x.tp_size, x.num_token_shards) for x in layouts}
    for place, count in Counter(places).items():
        if count > 1:
            raise LayoutError(f"(pp_stage, tp_rank) {place} is there twice; a file holds different ranks of one engine")
    if len(sizes) > 1:
        raise LayoutError(
            f"ranks are of (pp_size, tp_size, num_token_shards) {sorted(sizes)[:4]}; a file holds ranks of one engine"
        )
    return layouts


def _wired(kind: type[Struct], named: Struct) -> Any:
    values = msgspec.structs.asdict(named)
    for name, inner in _NESTED.get(kind, {}).items():
        if values[name]:  # else it was left out
            values[name] = tuple(_wired(inner, each) for each in values[name])
    return kind(**values)
