"""What doctor and its own processes say to each other, one JSON object per line, and what it says to one elsewhere."""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from asynckv.config import NixlConfig
from asynckv.geometry.layout import Memory
from asynckv.tools.doctor.facts import Measured

__all__ = [
    "DOCTOR",
    "Ask",
    "Offer",
    "Offered",
    "Ordered",
    "Place",
    "Result",
    "Said",
    "Stage",
    "decode_ask",
    "decode_offer",
    "decode_order",
    "decode_said",
]


class Place(Struct, frozen=True):
    """How memory that was offered is reached.

    Attributes:
        metadata: NIXL's, as hexadecimal digits.
        port, token: Of the raw socket; 0 if there is none.
    """

    name: str
    metadata: str
    memories: tuple[Memory, ...]
    host: str = ""
    port: int = 0
    token: str = ""


class Ordered(Struct, frozen=True):
    """What a process is to do: offer memory, or read what another offers.

    Attributes:
        size: Bytes to offer.
        host: Where the raw socket listens.
        place: What to read; empty for who offers.
        read: Whether bytes are read at all; else the connection is opened, and no more.
        seconds: How long to measure; 0 for a few reads only.
    """

    name: str
    config: NixlConfig
    size: int = 0
    host: str = "127.0.0.1"
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


# -- between two hosts -----------------------------------------------------------------------------------

DOCTOR = "asynckv-doctor"
"""What `asynckv doctor --serve` calls itself where an engine says its id."""

Word = Annotated[str, Meta(max_length=200)]


class Ask(Struct, frozen=True, tag="doctor-ask"):
    """Asks `--serve` for its memory. Nonces as in the protocol of engines."""

    nonce: Annotated[int, Meta(ge=0, lt=1 << 62)]


class Offer(Struct, frozen=True, tag="doctor-offer"):
    """The answer: a stranger's words, so every field has a bound.

    Attributes:
        refused: Why there is none.
        metadata: NIXL's, as hexadecimal digits.
        digest: SHA-256 of the metadata.
        clock: Seconds since 1970, when this was sent.
    """

    nonce: Annotated[int, Meta(ge=0, lt=1 << 62)]
    refused: Annotated[str, Meta(max_length=2000)]
    clock: float
    versions: Annotated[dict[Word, Word], Meta(max_length=16)]
    name: Word = ""
    metadata: Annotated[str, Meta(max_length=1 << 20)] = ""
    digest: Annotated[str, Meta(max_length=64)] = ""
    memories: Annotated[tuple[Memory, ...], Meta(max_length=4)] = ()
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    token: Annotated[str, Meta(max_length=128)] = ""


_asks = msgspec.json.Decoder(Ask)
_offers = msgspec.json.Decoder(Offer)


def decode_ask(data: bytes) -> Ask | None:
    """Decode what a stranger asks; None if it is no such question."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _asks.decode(data)
    return None


def decode_offer(data: bytes) -> Offer | None:
    """Decode what a stranger offers; None if it is no offer."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _offers.decode(data)
    return None
