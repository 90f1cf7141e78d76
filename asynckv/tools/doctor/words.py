"""What doctor and its own processes say to each other, one JSON object per line."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from asynckv.config import NixlConfig
from asynckv.geometry.layout import Memory
from asynckv.tools.doctor.facts import Measured

__all__ = ["Offered", "Ordered", "Place", "Result", "Said", "Stage", "decode_order", "decode_said"]


class Place(Struct, frozen=True):
    """How memory that was offered is reached.

    Attributes:
        metadata: NIXL's, as hexadecimal digits.
    """

    name: str
    metadata: str
    memories: tuple[Memory, ...]


class Ordered(Struct, frozen=True):
    """What a process is to do: offer memory, or read what another offers.

    Attributes:
        size: Bytes to offer.
        place: What to read; empty for who offers.
        read: Whether bytes are read at all; else the connection is opened, and no more.
        seconds: How long to measure; 0 for a few reads only.
    """

    name: str
    config: NixlConfig
    size: int = 0
    place: Place | None = None
    read: bool = True
    seconds: float = 0.0


class Stage(Struct, frozen=True, tag="stage"):
    """It has come so far."""

    stage: str


class Offered(Struct, frozen=True, tag="offered"):
    """Memory can be read."""

    place: Place
    facts: dict[str, str]


class Result(Struct, frozen=True, tag="result"):
    """It is done, or was refused."""

    refused: str = ""
    measured: Measured | None = None
    plugins: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)


Said = Stage | Offered | Result
_orders = msgspec.json.Decoder(Ordered)
_said: msgspec.json.Decoder[Said] = msgspec.json.Decoder(Said)


def decode_order(line: bytes) -> Ordered:
    """Decode an order."""
    return _orders.decode(line)


def decode_said(line: bytes) -> Said:
    """Decode what a process of ours said."""
    return _said.decode(line)
