"""Messages and params at the bounds of their types, as recipes: the largest and smallest that a correct peer may send.

A later version must read all of them. A smaller bound would lose packets between two versions, which shows only when a
request id is that long. At their upper bounds some are megabytes, so they are recorded as recipes. A recipe is JSON
with an object with `times` for every long part:

    {"text": "é", "times": 3}                     "ééé"
    {"bytes": "6b", "times": 3}                   b"kkk"
    {"items": 7, "times": 3}                      [7, 7, 7]
    {"keys": "k", "wide": 4, "value": 7, "times": 2}   {"0kkk": 7, "1kkk": 7}

Everything is derived from the types (`msgspec.inspect`), so a field that is added later is at its bounds too. A value
without a bound stays as in the example behind the recipe. Bounds that no type states (a packet's bytes) are separate
numbers (`limits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct, inspect

from asynckv.account import values
from asynckv.core import types, wire
from asynckv.geometry import bounds, check

LONG = 16  # number of repetitions above which a text is written as a recipe

WIDE, NARROW = "\U0001f600", "k"  # characters of four bytes and of one


def limits() -> dict[str, int]:
    """Return the bounds that no type states: limits on size, before and after decoding."""
    return {
        "bytes of a packet": wire.MAX_PACKET,
        "bytes of a packet to who listens": wire.MAX_REQUEST_PACKET,
        "bytes of an account": values.MAX_ACCOUNT,
        "bytes of a layout": check.MAX_LAYOUT_BYTES,
        "views of a layout": bounds.MAX_VIEWS,
        "groups of a layout": bounds.MAX_GROUPS,
        "parts of a layout": check.MAX_PARTS,
        "parts of a layer": check.MAX_LAYER_PARTS,
        "dimensions of a layout": check.MAX_DIMS,
    }


def packets(messages: Mapping[str, wire.Message]) -> dict[str, Any]:
    """Return recipes for packets: each kind of message at its upper and lower bounds, and a full packet."""
    found: dict[str, Any] = {}
    kinds = {type(message): message for message in messages.values()}
    for kind, message in kinds.items():
        for is_most, word in ((True, "most"), (False, "least")):
            found[f"{kind.__name__} at its {word}"] = _packet([_bound(inspect.type_info(kind), message, is_most)])
    found["as many messages as a packet may have"] = _packet(
        {"items": msgspec.to_builtins(wire.Ping(1)), "times": wire.MAX_MESSAGES}
    )
    return found


def _packet(messages: Any) -> list[Any]:
    return [wire.MAJOR, *({"text": NARROW, "times": 64},) * 2, messages]


def params(example: types.KVTransferParams) -> dict[str, Any]:
    """Return recipes for params: each field alone at its bounds, because all at once would be gigabytes."""
    kind = inspect.type_info(type(example))
    assert isinstance(kind, inspect.StructType)
    # Without shards, because their number must divide `tp_size`, whatever it is.
    found, plain = {}, msgspec.to_builtins(msgspec.structs.replace(example, num_token_shards=msgspec.UNSET))
    for field in kind.fields:
        for is_most, word in ((True, "most"), (False, "least")):
            # Only one long list at a time, because no real request has 64 groups of a million runs.
            value = _bound(field.type, getattr(example, field.name), is_most, nested=False)
            if field.name in plain and value != plain[field.name]:
                found[f"{field.name} at its {word}"] = {**plain, field.name: value}
    runs = {"items": [bounds.MAX_BLOCK_ID, 1], "times": bounds.MAX_RUNS}
    found["runs of blocks at their most"] = {**plain, "groups": [[bounds.MAX_TOKENS, runs]]}
    found["hashes as long as they may be"] = {**plain, "hashes": [{"text": WIDE, "times": types.MAX_HASH}]}
    for name, value in (("key", example.key), ("endpoints", example.endpoints[:1])):
        found[f"inside of {name} at the most"] = {**plain, name: _inside(value)}
    return found


def _inside(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_inside(x) for x in value]
    return _bound(inspect.type_info(type(value)), value, True)


def _bound(kind: inspect.Type, value: Any, is_most: bool, nested: bool = True) -> Any:
    """Return a value at the bound of its type. With `nested`, items of a list are at their bounds too."""
    match kind:
        case inspect.StructType() if isinstance(value, Struct):
            found = {f.encode_name: _bound(f.type, getattr(value, f.name), is_most, nested) for f in kind.fields}
            return [*([] if kind.tag is None else [kind.tag]), *found.values()] if kind.array_like else found
        case inspect.StrType(pattern=str()):
            return value
        case inspect.StrType():
            length = kind.max_length if is_most else kind.min_length or 0
            return value if length is None else _repeated("text", WIDE if is_most else NARROW, length)
        case inspect.BytesType():
            length = kind.max_length if is_most else kind.min_length or 0
            return {"bytes": bytes(value).hex(), "times": 1} if length is None else _repeated("bytes", "6b", length)
        case inspect.IntType() | inspect.FloatType():
            return _number(kind, value, is_most)
        case inspect.DictType(key_type=inspect.StrType(max_length=int() as wide), max_length=int() as most):
            number = kind.value_type
            assert isinstance(number, inspect.IntType)
            least = _number(number, 0, is_most)
            return {"keys": NARROW, "wide": wide, "value": least, "times": most} if is_most else {}
        case inspect.VarTupleType():
            length = kind.max_length if is_most else kind.min_length or 0
            if length is None or not value:
                return msgspec.to_builtins(value)
            item = _bound(kind.item_type, value[0], is_most) if nested else msgspec.to_builtins(value[0])
            return {"items": item, "times": length}
        case _:
            is_raw = isinstance(value, Raw)
            return {"bytes": bytes(value).hex(), "raw": True} if is_raw else msgspec.to_builtins(value)


def _repeated(what: str, item: str, times: int) -> Any:
    if what == "text" and times <= LONG:
        return item * times
    return {what: item, "times": times}


def _number(kind: inspect.IntType | inspect.FloatType, value: float, is_most: bool) -> float:
    step = 1 if isinstance(kind, inspect.IntType) else 0.5
    if is_most:
        return kind.le if kind.le is not None else value if kind.lt is None else kind.lt - step
    return kind.ge if kind.ge is not None else value if kind.gt is None else kind.gt + step


def expand(recipe: Any) -> Any:
    """Return the value that a recipe describes."""
    match recipe:
        case {"text": text, "times": times}:
            return text * times
        case {"bytes": data, "raw": True}:
            return Raw(bytes.fromhex(data))
        case {"bytes": data, "times": times}:
            return bytes.fromhex(data) * times
        case {"items": item, "times": times}:
            return [expand(item)] * times
        case {"keys": text, "wide": wide, "value": value, "times": times}:
            return {f"{i}".ljust(wide, text): value for i in range(times)}
        case dict():
            return {name: expand(value) for name, value in recipe.items()}
        case list():
            return [expand(value) for value in recipe]
        case _:
            return recipe
