"""What engines log, and whether an event is what its type says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from asynckv import told


class Lines:
    """Events that engines of this process have logged so far. Tests have it as the fixture `logs`."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self.stream.getvalue().splitlines())

    def of(self, event: str, engine_id: str = "") -> list[dict[str, Any]]:
        return [e for e in self if e["event"] == event and engine_id in ("", e["engine_id"])]

    def one(self, event: str, engine_id: str = "") -> dict[str, Any]:
        (line,) = self.of(event, engine_id)
        return line


def problems(level: str, name: str, said: Mapping[str, Any]) -> list[str]:
    """Say how an event is not what its type says; empty is right. `said` is without the fields of every line."""
    kind = told.EVENTS.get(name)
    if kind is None:
        return [f"event {name!r} is not documented"]
    wrong = [f"{name}: level {level} is not documented"] if level not in kind.levels else []
    text = msgspec.json.encode(said)
    try:
        event = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as exc:
        return [*wrong, f"{name}: {exc}"]
    read = msgspec.json.decode(msgspec.json.encode(event))
    lost = {key for key, value in msgspec.json.decode(text).items() if read.get(key) != value}
    return [*wrong, *(f"{name}: field {key!r} is not documented, or not all that is in it" for key in sorted(lost))]
