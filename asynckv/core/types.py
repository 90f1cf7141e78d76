"""The small values that the protocol speaks of: names, keys, endpoints, params, outcomes and reasons.

A *request id* is arbitrary text; each side has its own, and it decides nothing. A *key* names one lent request for
ever, and is compared wherever blocks are believed or freed. A *pull id* is one attempt of one decode rank to read it.

Everything that crosses the wire is a frozen `msgspec.Struct` with constraints, so that decoding is validation.
Durations (seconds, float) cross the wire; points in time never do.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Annotated, NewType, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from asynckv.arguments import MAX_NAME
from asynckv.errors import RemoteProtocolError
from asynckv.geometry.bounds import MAX_GROUPS, MAX_RANKS, MAX_RUNS, BlockRuns, Rank, Size, Tokens

T = TypeVar("T")

PullId = NewType("PullId", str)
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", int)

Address = NewType("Address", str)
"""Where a remote rank's control plane listens, such as `tcp://10.0.0.1:5555`."""

Place = tuple[Address, str]
"""Address and incarnation: which start of which remote process is meant."""

ReplyTo = NewType("ReplyTo", bytes)
"""Whom an incoming packet came from, as the control plane names it: good for answering, no more."""

MAX_ID = 16 * 1024
"""Characters of a request id."""

MAX_HASHES = 1 << 16
MAX_HASH = 128
"""Characters of one hash."""

MAX_TRACEPARENT, MAX_TRACESTATE = 64, 512
"""Characters of a trace's context: the first has 55, and W3C allows the second to be dropped if it has more."""

MAX_SECONDS = 7 * 86_400.0

# Bounds also reject nan and the infinities, which compare false with everything.
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
NonemptyName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
RequestText = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]


class Key(Struct, frozen=True, array_like=True, gc=False):
    """Names one lent request for ever: what is compared wherever blocks are believed or freed.

    Minted once by the prefill engine (its scheduler, say), handed to all of its ranks, never reused.

    Attributes:
        epoch: The minting process's start, random.
        memory_epoch: How often the prefill memory was registered anew; old references are refused.
        sequence: Grows by one per minted key. Requests are lent in any order, or never; it only tells keys apart.
        token: 128 random bits in hex, so that a key cannot be guessed.
    """

    epoch: Annotated[str, Meta(min_length=1, max_length=64)]
    memory_epoch: Annotated[int, Meta(ge=0, le=1 << 53)]
    sequence: Annotated[int, Meta(ge=0, le=1 << 53)]
    token: Annotated[str, Meta(min_length=16, max_length=64)]

    def __repr__(self) -> str:
        """Without the token: whatever is written down in a hurry, such as a traceback, must not tell it."""
        return f"Key(epoch={self.epoch!r}, memory_epoch={self.memory_epoch}, sequence={self.sequence})"


class Cohort(Struct, frozen=True, array_like=True, gc=False):
    """The group of ranks of one decode engine that together read one lent request, and who speaks."""

    id: NonemptyName
    tp_size: Size = 1
    tp_rank: Rank = 0
    pp_size: Size = 1
    pp_stage: Rank = 0


class Endpoint(Struct, frozen=True, gc=False):
    """How to reach one prefill rank, and which start of it is meant.

    Attributes:
        tp_rank: Its place among the ranks that share layers.
        address: Where its control plane listens, such as `tcp://10.0.0.1:5555`.
        incarnation: Names this start of the process.
        pp_stage: Its pipeline stage.
    """

    tp_rank: Rank
    address: NonemptyName
    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]
    pp_stage: Rank = 0


class KVTransferParams(Struct, frozen=True, kw_only=True, gc=False):
    """What travels from the prefill side to the decode side by way of a router: plain data.

    `PrefillRanks.make_params` makes them, as a dict that JSON can carry. They describe all ranks of the prefill engine,
    because one rank does not know the others. Whoever has them can claim and release the request.

    Attributes:
        schema: Version of this structure.
        engine_id: The prefill engine.
        request_id: The prefill side's id of the request; arbitrary text, never parsed.
        key: By which claims and releases are compared; cannot be guessed.
        tp_size: Ranks per pipeline stage of the prefill engine.
        pp_size: Its pipeline stages.
        endpoints: Every rank of the prefill engine.
        groups: Block ids per cache group, the same on all ranks.
        num_tokens: Tokens of the request whose KV is in these blocks.
        lease_s: How long a request stays lent if nobody claims it, counted by each rank from its `lend`. A claimed
            request stays lent for as long as its grants run, if that is longer.
        renew_s: How often a reader is to renew. It renews a shorter grant when half of it is over.
        written: The KV was complete when these params were made, so nobody can read it too early. Otherwise a reader
            has to show that it began after the request was lent.
        hashes: One per `hash_tokens` tokens, each covering all tokens before it as well, if the engines compare prompts
            that way. A reader takes only the tokens on which its own hashes agree.
        hash_tokens: Tokens per hash; 0 without hashes.
        traceparent: The trace that the request belongs to, as W3C writes it; empty if none.
        tracestate: The same for its vendors' state.
    """

    schema: Annotated[int, Meta(ge=1, le=1)] = 1
    engine_id: NonemptyName
    request_id: RequestText
    key: Key
    tp_size: Size = 1
    pp_size: Size = 1
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    groups: Annotated[tuple[BlockRuns, ...], Meta(max_length=MAX_GROUPS)]
    num_tokens: Tokens
    lease_s: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] = 30.0
    renew_s: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] = 3.0
    written: bool = False
    hashes: Annotated[tuple[Annotated[str, Meta(max_length=MAX_HASH)], ...], Meta(max_length=MAX_HASHES)] = ()
    hash_tokens: Tokens = 0
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT)] = ""
    tracestate: Annotated[str, Meta(max_length=MAX_TRACESTATE)] = ""


_described = msgspec.msgpack.Decoder(KVTransferParams)
"""Made on import, because two threads that first decode one `Struct` at once end the process with SIGSEGV (msgspec
0.22.0)."""


class Outcome(enum.StrEnum):
    """How one reader's attempt ended, as told to the prefill rank."""

    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RETRY = "retry"
    """This attempt is over, but its reader will try again: it is not struck off."""


class Reason(enum.StrEnum):
    """Why something ended or was refused. The values are stable: logs and metrics use them."""

    # a pull
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    DISCHARGED = "discharged"
    """Nothing of the request is needed; its prefill ranks are told that it is complete."""
    TIMEOUT = "timeout"
    NOT_LENT_YET = "not_lent_yet"
    """The deadline passed, and the last that a rank had said was that the request is not lent yet."""
    GEOMETRY = "geometry_refused"
    UNPLANNABLE = "unplannable"
    REMOTE_TOO_SHORT = "remote_too_short"
    UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    READ_FAILED = "read_failed"
    LEASE_LOST = "lease_lost"
    ENGINE_CLOSED = "engine_closed"
    QUEUE_FULL = "queue_full"
    STANDSTILL = "standstill"
    """The embedder took nothing for about a lease, and nothing of the request was being read."""
    # a refused claim, renewal or release
    UNKNOWN = "unknown_key"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    REVOKED = "revoked"
    WITHDRAWN = "withdrawn"
    """The prefill engine will never lend the request."""
    RESTARTED = "restarted"
    STALE_MEMORY = "stale_memory"
    BLOCKS_DIFFER = "blocks_differ"
    WRONG_REQUEST = "wrong_request"
    WRONG_TARGET = "wrong_target"
    WRONG_COHORT = "wrong_cohort"
    NOT_OWED = "not_owed"
    RELEASED_ALREADY = "released_already"
    FOREIGN_PULL = "foreign_pull"
    PROTOCOL = "protocol_version"
    OVERLOADED = "overloaded"
    # a lease
    RELEASED = "released"


AnyEnum = TypeVar("AnyEnum", bound=enum.Enum)


def members(kind: type[AnyEnum]) -> type[AnyEnum]:
    """Return an object that has the members of an enum for its attributes.

    Before 3.12 Python takes 0.4 us to look a member up on its class, and 0.02 us here: a sixth of a small pull.
    """
    return cast("type[AnyEnum]", SimpleNamespace(**kind.__members__))


def sendable(value: object, kind: type[T]) -> T:
    """Return a value as its receiver would see it, or raise `msgspec.ValidationError` that names the wrong field."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    except (msgspec.ValidationError, UnicodeEncodeError, TypeError, OverflowError, RecursionError) as exc:
        text = str(exc)
        raise msgspec.ValidationError(text if len(text) < 500 else f"{text[:300]} ... {text[-100:]}") from exc


SHOWN_LETTERS = 8
"""Letters of an incarnation by which people know a start of a process."""


def rank_name(engine_id: str, tp_rank: int, pp_stage: int = 0, incarnation: str = "") -> str:
    """Write a rank, for people: `prefill/pp1/tp3@0a1b2c3d`.

    The incarnation is cut to the letters that its process logged when it started.
    """
    stage = f"/pp{pp_stage}" if pp_stage else ""
    start = f"@{incarnation[:SHOWN_LETTERS]}" if incarnation else ""
    return f"{engine_id}{stage}/tp{tp_rank}{start}"


def _num_runs(groups: object) -> int:
    total = 0
    for pair in groups[:MAX_GROUPS] if isinstance(groups, list | tuple) else ():
        if isinstance(pair, list | tuple) and len(pair) > 1 and isinstance(pair[1], list | tuple):
            total += len(pair[1])
    return total


def decode_params(value: object) -> KVTransferParams:
    """Validate params that came through a router (a `KVTransferParams`, or a dict of JSON), or raise
    `RemoteProtocolError`.
    """
    try:
        if isinstance(value, KVTransferParams):
            return sendable(value, KVTransferParams)
        if isinstance(value, dict) and (runs := _num_runs(value.get("groups"))) > MAX_RUNS:
            # Before they are looked at: a scheduler's thread would check them for as long as they are many.
            raise RemoteProtocolError(f"params are malformed: {runs} runs of block ids; at most {MAX_RUNS} are taken")
        params = msgspec.convert(value, KVTransferParams)
        # Whether their text can be sent. Of all else their types say so, and a long prompt has thousands of runs.
        key, trace = params.key, (params.traceparent, params.tracestate)
        texts = params.engine_id, params.request_id, params.endpoints, params.hashes, trace
        msgspec.msgpack.encode((key, texts))
    except UnicodeEncodeError as exc:
        # `json.loads` makes lone surrogates, which no message could carry.
        raise RemoteProtocolError(f"params are malformed: text that is not valid Unicode: {exc.reason}") from exc
    except msgspec.ValidationError as exc:
        raise RemoteProtocolError(f"params are malformed: {exc}") from exc
    except (TypeError, OverflowError, RecursionError) as exc:
        raise RemoteProtocolError(f"params are malformed: what cannot be sent: {exc}") from exc
    return params
