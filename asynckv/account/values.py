"""A rank's account of itself, for people and tools: bounded plain values.

An *account* travels as bytes inside a `Status` (`core/wire.py`). Engines and tools of different versions understand
each other, because fields are only added, with defaults, and unknown fields are skipped. An account holds no secret: no
key's token, no metadata, no address in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asynckv.account.inspect import HeldBlocks, RequestStatus
from asynckv.errors import RemoteProtocolError
from asynckv.geometry.layout import TokenShard
from asynckv.told import StepWait

MAX_ACCOUNT = 4 * 1024 * 1024  # largest account in bytes that `decode_account` takes
Count = Annotated[int, Meta(ge=0)]


class PhaseCount(Struct, frozen=True, kw_only=True):
    """The number of requests of one kind in one phase.

    Attributes:
        kind: `lease`, `follow`, `announced`, `pull`, `early` or `retrying`; for an offload `store` or `load`.
        phase: For a lease `unclaimed` (no reader was heard of), `granted` (a grant runs), `lapsed` (a reader was heard
            of, no grant runs) or `ending`; otherwise the state, see `docs/structure.md`. A failed pull with blocks
            that may still be written is `quarantined`, and `retired` once they were given up. A failed store or
            load is named the same way, and before that `storing` or `loading`.
        number: Number of all such requests, not only of those in the account.
        oldest_s: Age of the oldest.
    """

    kind: str
    phase: str
    number: Count
    oldest_s: float


class PeerStatus(Struct, frozen=True, kw_only=True):
    """A prefill rank that this one reads from. `pulls` have something owed or held there, `follows` wait for its offer,
    and `transfers` run or are in doubt. `failures` counts failed handshakes in a row; `cause` says why the last one
    failed, or why the rank is gone; `is_orderly` if it said goodbye.
    """

    rank: str
    address: str
    state: str
    heard_s: float | None = None
    pulls: Count = 0
    follows: Count = 0
    transfers: Count = 0
    bytes_in_flight: Count = 0
    is_draining: bool = False
    is_orderly: bool = False
    failures: Count = 0
    cause: str = ""


class Lag(Struct, frozen=True, kw_only=True):
    """Delays of the event loop: number by bucket (upper bound in seconds as text, or `inf`), and above `log.away_s`."""

    last_s: float = 0.0
    most_s: float = 0.0
    was_away: Count = 0
    counts: Mapping[str, Count] = {}


class Facts(Struct, frozen=True, kw_only=True):
    """Facts that only the engine around a rank knows: its state, the values of `Engine.describe` and
    `Engine.statistics`, and the first of `num_retrying` requests that have a head start or wait for another attempt.
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
        refused: Why the account has nothing else; empty if it has.
        retry_s: Seconds after which to ask again; 0 if asking again is of no use.
        closed_as: Why the rank takes nothing new; empty while it does.
        counts: All requests by kind and phase.
        counted_s: Seconds since the requests were counted.
        requests: Some of the requests, oldest first.
        holds: Blocks of these requests, with as many ids as there is room for.
        after: Cursor that continues this answer; empty if nothing follows.
        num_peers: Number of peers by state.
        peers: Some of the peers, busy or troubled ones first.
        num_readers: Process starts that shook hands in order to read from this rank.
        budgets: Used and available amounts, by name.
        waits_for_step, step_s: What waits for a step of the engine around this rank, and for how long it made none, as
            in the log (`engine_alive`).
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
    token_shards: tuple[TokenShard, ...] = ()
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
    waits_for_step: Mapping[str, StepWait] = {}
    step_s: float | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Account] = msgspec.msgpack.Decoder(Account)


def encode_account(account: Account) -> bytes:
    return _encoder.encode(account)


def decode_account(data: bytes) -> Account:
    """Decode an engine's account, or raise `RemoteProtocolError`."""
    if len(data) > MAX_ACCOUNT:
        raise RemoteProtocolError(f"an account of {len(data)} bytes; at most {MAX_ACCOUNT} are taken")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"malformed account of {len(data)} bytes: {exc}") from exc
