"""What a rank says of itself to people and tools: bounded plain values.

An *account* travels as bytes inside a `Status` (`core/wire.py`), so that engines and tools of different versions
understand each other: fields are only added, with defaults, and unknown ones are skipped. It holds no secret: no key's
token, no metadata, no address in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asynckv.core.inspect import HeldBlocks, RequestStatus
from asynckv.errors import RemoteProtocolError

MAX_ACCOUNT = 4 * 1024 * 1024
"""Bytes; whoever asks takes no more of an answer."""

Count = Annotated[int, Meta(ge=0)]


class PhaseCount(Struct, frozen=True, kw_only=True):
    """How many requests are at the same.

    Attributes:
        kind: `lease`, `announced`, `pull` or `retrying`; of an offload `store` or `load`.
        phase: Of a lease `unclaimed` (no reader has spoken up), `granted` (a promise runs), `lapsed` (a reader has
            spoken up, no promise runs) or `ending`; of others the state, see `docs/structure.md`. A pull that failed
            and whose blocks something may still write is `quarantined`, and `retired` if they were given up. Of a
            store or load the same, and before that `storing` or `loading`.
        number: Of them all, not only of those that are told.
        oldest_s: For how long the oldest is there.
    """

    kind: str
    phase: str
    number: Count
    oldest_s: float


class PeerStatus(Struct, frozen=True, kw_only=True):
    """A prefill rank that this one reads from. `pulls` have something owed or held there, `transfers` run or are in
    doubt, `failures` are handshakes that failed in a row, and `cause` says why the last failed, or why it is gone.
    """

    rank: str
    address: str
    state: str
    heard_s: float | None = None
    pulls: Count = 0
    transfers: Count = 0
    bytes_in_flight: Count = 0
    is_draining: bool = False
    failures: Count = 0
    cause: str = ""


class Lag(Struct, frozen=True, kw_only=True):
    """How late the engine's event loop came; how often at most so late (seconds as text, or `inf`), or `log.away_s`."""

    last_s: float = 0.0
    most_s: float = 0.0
    was_away: Count = 0
    counts: Mapping[str, Count] = {}


class Facts(Struct, frozen=True, kw_only=True):
    """What only the engine around a rank knows: its state, what `Engine.describe` and `Engine.statistics` say, and the
    first of `num_retrying` requests that wait for another attempt.
    """

    version: str = ""
    host: str = ""
    pid: int = 0
    address: str = ""
    life: str = ""
    uptime_s: float = 0.0
    planes: Mapping[str, str] = {}
    counters: Mapping[str, int] = {}
    lag: Lag = Lag()
    retrying: tuple[RequestStatus, ...] = ()
    num_retrying: Count = 0


class Account(Struct, frozen=True, kw_only=True):
    """One rank, as it sees itself.

    Attributes:
        refused: Why nothing else is said; empty if something is.
        retry_s: Ask again after so long; 0 if that is of no use.
        closed_as: How it takes nothing new; empty while it does.
        counts: All requests by kind and phase.
        counted_s: Seconds since that was counted.
        requests: Some of the requests, the oldest first.
        holds: The blocks of these, with as many ids as there is room for.
        after: Cursor that continues this answer; empty if nothing follows.
        num_peers: All peers by state.
        peers: Some peers: busy or troubled ones first.
        num_readers: Process starts that shook hands, to read from this rank.
        budgets: Used and available, by name.
    """

    refused: str = ""
    retry_s: float = 0.0
    engine_id: str = ""
    rank: str = ""
    incarnation: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_stage: int = 0
    pp_size: int = 1
    memory_epoch: int = 0
    closed_as: str = ""
    facts: Facts = Facts()
    counts: tuple[PhaseCount, ...] = ()
    counted_s: float = 0.0
    requests: tuple[RequestStatus, ...] = ()
    holds: tuple[HeldBlocks, ...] = ()
    after: str = ""
    num_peers: Mapping[str, int] = {}
    peers: tuple[PeerStatus, ...] = ()
    num_readers: int = 0
    budgets: Mapping[str, tuple[int, int]] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Account] = msgspec.msgpack.Decoder(Account)


def encode_account(account: Account) -> bytes:
    return _encoder.encode(account)


def decode_account(data: bytes) -> Account:
    """Decode what an engine said of itself, or raise `RemoteProtocolError`."""
    if len(data) > MAX_ACCOUNT:
        raise RemoteProtocolError(f"an account of {len(data)} bytes; at most {MAX_ACCOUNT} are taken")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"malformed account of {len(data)} bytes: {exc}") from exc
