"""Small values of the protocol: names, keys, endpoints, params, outcomes and reasons.

A *request id* is arbitrary text; each side has its own, and it decides nothing. A *key* names one lent request for
ever, and is compared wherever blocks are trusted or freed. A *pull id* is one attempt of one decode rank to read it.

Everything that crosses the wire is a frozen `msgspec.Struct` with constraints, so that decoding is validation.
Durations (seconds, float) cross the wire; points in time never do.
"""

from __future__ import annotations

import enum
from contextlib import suppress
from types import SimpleNamespace
from typing import Annotated, NewType, NoReturn, Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from asynckv.arguments import MAX_NAME
from asynckv.errors import LocalProtocolError, RemoteProtocolError
from asynckv.geometry.bounds import MAX_GROUPS, MAX_RANKS, MAX_RUNS, BlockRuns, Rank, Size, Tokens

T = TypeVar("T")
Job = TypeVar("Job", contravariant=True)

PullId = NewType("PullId", str)
RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", int)

Address = NewType("Address", str)  # where a remote rank's control plane listens, such as `tcp://10.0.0.1:5555`
Place = tuple[Address, str]  # address and incarnation: which start of which remote process is meant
ReplyTo = NewType("ReplyTo", bytes)
"""Origin of an incoming packet, as the control plane names it. It is only good for answers."""

MAX_ID = 16 * 1024  # characters of a request id
MAX_HASHES = 1 << 16
MAX_HASH = 128  # characters of one hash
MAX_TRACEPARENT, MAX_TRACESTATE = 64, 512
"""Characters of a trace's context. The first has 55, and W3C allows a longer second one to be dropped."""

MAX_SECONDS = 7 * 86_400.0

# Bounds also reject nan and the infinities, which compare false with everything.
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
NonemptyName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
RequestText = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Ticket = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]  # `$` alone lets a line feed pass


class Key(Struct, frozen=True, array_like=True, gc=False):
    """The name of one lent request for ever, compared wherever blocks are trusted or freed.

    The prefill engine (such as its scheduler) mints the key once, hands it to all of its ranks, and never reuses it.

    Attributes:
        epoch: Random name of the start of the minting process.
        memory_epoch: Number of times that the prefill memory was registered anew. Older keys are refused.
        sequence: Number that grows by one per key. It only tells keys apart: requests are lent in any order, or never.
        token: 128 random bits in hex, so that a key cannot be guessed.
    """

    epoch: Annotated[str, Meta(min_length=1, max_length=64)]
    memory_epoch: Annotated[int, Meta(ge=0, le=1 << 53)]
    sequence: Annotated[int, Meta(ge=0, le=1 << 53)]
    token: Annotated[str, Meta(min_length=16, max_length=64)]

    def __repr__(self) -> str:
        """Leave the token out, because texts such as tracebacks must not reveal it."""
        return f"Key(epoch={self.epoch!r}, memory_epoch={self.memory_epoch}, sequence={self.sequence})"


class Cohort(Struct, frozen=True, array_like=True, gc=False):
    """The ranks of one decode engine that together read one lent request, and the rank that sends the message."""

    id: NonemptyName
    tp_size: Size = 1
    tp_rank: Rank = 0
    pp_size: Size = 1
    pp_stage: Rank = 0

    def name(self, incarnation: str) -> str:
        return rank_name(self.id, self.tp_rank, self.pp_stage, incarnation)


class Endpoint(Struct, frozen=True, gc=False):
    """The address of one prefill rank, and the start of its process.

    Attributes:
        tp_rank: Place among the ranks that share layers.
        address: Address at which the rank's control plane listens, such as `tcp://10.0.0.1:5555`.
        incarnation: Name of this start of the process.
        pp_stage: Pipeline stage.
    """

    tp_rank: Rank
    address: NonemptyName
    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]
    pp_stage: Rank = 0


class KVTransferParams(Struct, frozen=True, kw_only=True, gc=False):
    """Plain data that travels from the prefill side to the decode side by way of a router.

    `PrefillRanks.make_params` makes params as a dict that JSON can carry. They describe all ranks of the prefill
    engine, because one rank does not know the others. Any process with the params can claim and release the request.

    Attributes:
        schema: Version of this structure.
        engine_id: The prefill engine.
        request_id: The prefill side's id of the request; arbitrary text, never parsed.
        key: Unguessable key that claims and releases must match.
        tp_size: Ranks per pipeline stage of the prefill engine.
        pp_size: Pipeline stages of the prefill engine.
        endpoints: Every rank of the prefill engine.
        groups: Block ids per cache group, the same on all ranks.
        num_tokens: Number of the request's tokens with KV in these blocks.
        lease_s: Seconds for which an unclaimed request stays lent, counted by each rank from its `lend`. A claimed
            request stays lent for as long as its grants run, if that is longer.
        renew_s: Seconds between a reader's renewals. A reader renews a shorter grant when half of it is over.
        written: True if the KV was complete when these params were made, so that no read can be too early. Otherwise a
            reader has to show that it began after the request was lent.
        hashes: One hash per `hash_tokens` tokens, covering all tokens before it as well, if the engines compare prompts
            that way. A reader takes only the tokens on which its own hashes agree.
        hash_tokens: Tokens per hash; 0 without hashes.
        traceparent: Trace that the request belongs to, as W3C writes it; empty if none.
        tracestate: Vendors' state of that trace.
        num_token_shards: Number of neighbouring prefill ranks that share tokens. Not encoded if none do.
        recall: True if the owner may take the blocks back at once, so that a reader has to confirm its read once that
            has ended. Not encoded otherwise.
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
    num_token_shards: Size | UnsetType = UNSET
    recall: bool | UnsetType = UNSET


SAME_SHARDS = "give PrefillRanks the number of its ranks' layouts, and every rank the same"
"""Remedy for params that say another `num_token_shards` than a layout."""


class FollowParams(Struct, frozen=True, kw_only=True, gc=False):
    """A ticket that a decode engine follows before there are params, and the prefill engine that has it too.

    Attributes:
        ticket: 128 random bits as 32 hexadecimal digits, as secret as a key.
        engine_id: The prefill engine.
        tp_size: Its ranks per pipeline stage.
        pp_size: Its pipeline stages.
        endpoints: Every rank of it.
        num_token_shards: Number of its neighbouring ranks that share tokens.
    """

    ticket: Ticket
    engine_id: NonemptyName
    tp_size: Size = 1
    pp_size: Size = 1
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=MAX_RANKS)]
    num_token_shards: Size | UnsetType = UNSET

    def __repr__(self) -> str:
        """Leave the ticket out, because texts such as tracebacks must not reveal it."""
        return f"FollowParams(engine_id={self.engine_id!r}, endpoints={self.endpoints!r})"


_described = tuple(map(msgspec.msgpack.Decoder, (KVTransferParams, FollowParams)))
"""Decoders that are made on import, because two threads that first decode one `Struct` at once end the process with
SIGSEGV (msgspec 0.22.0)."""


class Outcome(enum.StrEnum):
    """The outcome of one reader's attempt, as the prefill rank hears it."""

    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RETRY = "retry"  # this attempt is over, but its reader will try again, and so stays owed


class Reason(enum.StrEnum):
    """The reason why something ended or was refused. The values are stable, because logs and metrics use them."""

    # a pull
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    DISCHARGED = "discharged"  # the reader needs nothing of the request; the prefill ranks hear that it is complete
    TIMEOUT = "timeout"
    NOT_LENT_YET = "not_lent_yet"  # the deadline passed, and a rank's last answer was that the request is not lent yet
    GEOMETRY = "geometry_refused"
    UNPLANNABLE = "unplannable"
    REMOTE_TOO_SHORT = "remote_too_short"
    UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    READ_FAILED = "read_failed"
    LEASE_LOST = "lease_lost"
    ENGINE_CLOSED = "engine_closed"
    QUEUE_FULL = "queue_full"
    DIFFERS = "differs"  # a second look found other bytes than the read
    NO_OFFER = "no_offer"  # the time to follow a ticket is over
    STANDSTILL = "standstill"
    """The embedder took no results for about a lease, and nothing of the request was being read."""
    # a refused claim, renewal or release
    UNKNOWN = "unknown_key"
    CONSUMED = "consumed"
    EXPIRED = "expired"
    REVOKED = "revoked"
    WITHDRAWN = "withdrawn"  # the prefill engine will never lend the request
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


class How(enum.StrEnum):
    """Ways in which a remote rank could not be met, was lost, or took its blocks back; a `Reason` says what that means
    for a pull. The values are stable, because tools that read logs go by them and never by words.
    """

    # it could not be met
    NO_ANSWER = "no_answer"
    NOT_LOADED = "not_loaded"  # the data plane did not load its metadata in time
    TURNED_AWAY = "turned_away"  # our key is not in its directory
    UNLISTED_LISTENER = "unlisted_listener"  # its key is not in our directory
    NO_KEY = "no_key"  # its address names no key, and we have keys
    NEEDS_KEYS = "needs_keys"  # its address names a key, and we have none
    NO_FILES = "no_files"  # this process has no file descriptors left
    GAVE_WAY = "gave_way"  # it never answered, and others needed its room
    # it was lost
    GOODBYE = "goodbye"  # it said so
    SILENT = "silent"
    BROKEN = "broken"  # a transfer ended because of it
    FORGOTTEN = "forgotten"  # a router said that it is gone
    REPLACED = "replaced"  # another start of it answers
    LEFT = "left"  # this side closed its connections
    IDLE = "idle"
    # it serves, and has taken the blocks back
    RECALLED = "recalled"


class Waiter(Protocol[Job]):
    """A caller that waits for a request, or for a job of an offload. Its engine or its offload calls it."""

    def ended(self, job: Job) -> None:
        """Take the end: the outcome of the last attempt, or why the next one could not begin."""

    def returned(self, job: Job, is_retired: bool) -> None:
        """Take back blocks that were held at the end, or hear that they are given up. Jobs tell it in any case."""


AnyEnum = TypeVar("AnyEnum", bound=enum.Enum)


def members(kind: type[AnyEnum]) -> type[AnyEnum]:
    """Return an object with the members of an enum as its attributes.

    Before 3.12 Python takes 0.4 us to find a member on its class, and 0.02 us here: a sixth of a small pull's time.
    """
    return cast("type[AnyEnum]", SimpleNamespace(**kind.__members__))


def impossible(event: enum.Enum, what: str, state: enum.Enum) -> NoReturn:
    """Refuse an event that a state machine does not take in its state."""
    raise LocalProtocolError(f"{event.name} while {what} is {state.name}")


def sendable(value: object, kind: type[T]) -> T:
    """Return a value as its receiver would see it, or raise a `msgspec.ValidationError` that names the wrong field."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    except (msgspec.ValidationError, UnicodeEncodeError, TypeError, OverflowError, RecursionError) as exc:
        text = str(exc)
        raise msgspec.ValidationError(text if len(text) < 500 else f"{text[:300]} ... {text[-100:]}") from exc


SHOWN_LETTERS = 8  # characters of an incarnation that people see


def rank_name(engine_id: str, tp_rank: int, pp_stage: int = 0, incarnation: str = "") -> str:
    """Return a rank's name for people: `prefill/pp1/tp3@0a1b2c3d`.

    The incarnation is cut to `SHOWN_LETTERS`, as its process logged it when it started.
    """
    stage = f"/pp{pp_stage}" if pp_stage else ""
    start = f"@{incarnation[:SHOWN_LETTERS]}" if incarnation else ""
    return f"{engine_id}{stage}/tp{tp_rank}{start}"


def decode_params(value: object) -> KVTransferParams:
    """Validate params that came through a router (a `KVTransferParams`, or a dict of JSON), or raise
    `RemoteProtocolError`.
    """
    try:
        if isinstance(value, KVTransferParams):
            params = sendable(value, KVTransferParams)
        else:
            runs, groups = 0, value.get("groups") if isinstance(value, dict) else None
            for pair in groups[:MAX_GROUPS] if isinstance(groups, list | tuple) else ():
                if isinstance(pair, list | tuple) and len(pair) > 1 and isinstance(pair[1], list | tuple):
                    runs += len(pair[1])
            if runs > MAX_RUNS:
                # Refuse before validation, because checking so many would hold up the scheduler's thread.
                raise RemoteProtocolError(
                    f"params are malformed: {runs} runs of block ids; at most {MAX_RUNS} are taken"
                )
            params = msgspec.convert(value, KVTransferParams)
            # Check that all text can be sent. Types ensure that for the rest, such as thousands of runs of block ids.
            key, trace = params.key, (params.traceparent, params.tracestate)
            texts = params.engine_id, params.request_id, params.endpoints, params.hashes, trace
            msgspec.msgpack.encode((key, texts))
    except UnicodeEncodeError as exc:
        # `json.loads` makes lone surrogates, which no message could carry.
        raise RemoteProtocolError(f"params are malformed: text that is not valid Unicode: {exc.reason}") from exc
    except msgspec.ValidationError as exc:
        raise RemoteProtocolError(f"params are malformed: {of_vllm(value) or exc}") from exc
    except (TypeError, OverflowError, RecursionError) as exc:
        raise RemoteProtocolError(f"params are malformed: a value cannot be sent: {exc}") from exc
    if params.num_token_shards and params.tp_size % params.num_token_shards:
        raise _undivided(params)
    return params


def decode_follow(value: object) -> FollowParams:
    """Validate what a router gave a decode engine to follow, or raise `RemoteProtocolError`."""
    try:
        follow = sendable(value, FollowParams)
    except msgspec.ValidationError as exc:
        raise RemoteProtocolError(f"params to follow are malformed: {exc}") from exc
    if follow.num_token_shards and follow.tp_size % follow.num_token_shards:
        raise _undivided(follow)
    return follow


def check_ticket(ticket: object) -> str:
    """Return a ticket, or raise `LocalProtocolError`, which does not show it."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(ticket, Ticket)
    raise LocalProtocolError("a ticket has another form than 32 lowercase hex digits")


def _undivided(params: KVTransferParams | FollowParams) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"params are malformed: num_token_shards {params.num_token_shards} does not divide tp_size {params.tp_size}"
    )


OF_NIXL_CONNECTOR = ("remote_engine_id", "remote_host", "remote_port", "remote_block_ids", "remote_request_id")
"""Names in the `kv_transfer_params` of vLLM's own `NixlConnector`, and in those of asynckv's connector for its sake."""


def of_vllm(value: object) -> str:
    """Return whose params these are, if they are vLLM's `kv_transfer_params` and not the entry of asynckv in them."""
    found = [name for name in OF_NIXL_CONNECTOR if isinstance(value, dict) and name in value]
    if not isinstance(value, dict) or not (found or "asynckv" in value):
        return ""
    if "asynckv" in value:
        return "they are all of vLLM's kv_transfer_params; give the entry 'asynckv' of them"
    if value.get("remote_engine_id") == "asynckv":
        return f"the router passed on only NixlConnector's fields ({', '.join(found)}) of an asynckv engine's params"
    return (
        f"they are those of vLLM's NixlConnector ({', '.join(found)}); run AsyncKVConnector in the prefill engine, or "
        f"DualConnector in vLLM's decode engine"
    )
