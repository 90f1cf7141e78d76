"""What ranks say to each other, and the one door through which bytes from outside come in.

    decode rank  ->  prefill rank          prefill rank  ->  decode rank
    Hello                                  Welcome | Unwelcome
    Claim, Renew                           Granted | NotYet | Refused
    Release                                Ack
    Ping, StatusRequest                    Pong, Status
    Pong                                   Ping, Draining, Goodbye

Everything is idempotent and may be lost, repeated or reordered. A packet names the process start it comes from
(`sender`) and the one it is meant for (`target`). A claim carries a `nonce` that the answer returns. Durations are
told, points in time never are.

**The door is `decode_packet`.** Messages are a closed union whose bounds stand with their types, so that decoding is
validation: what comes out is a value of which the core may believe types and ranges, or a `RemoteProtocolError`. Only
the layout inside a `Welcome` stays closed, because it is large: `decode_layout` looks at its length first. (Params come
through a router, and `decode_params` checks them.)

Fields are only ever added at the end with defaults, and kinds of messages are only sent to peers that know them (a
minor version). Anything else is a new major version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from asynckv.core.types import MAX_ID, Cohort, Key, Outcome, Reason, RequestText, Seconds
from asynckv.errors import RemoteProtocolError
from asynckv.geometry.bounds import BlockRuns, Name, Rank, Size

MAJOR = 1
MINOR = 3
"""1: `Draining`. 2: the reason `withdrawn`. 3: what is wanted of a status, and the account in it."""

MAX_PACKET = 16 * 1024 * 1024
"""Bytes; the control plane refuses anything larger before it is decoded."""

MAX_REQUEST_PACKET = 128 * 1024
"""Bytes; a listener refuses anything larger, since only a `Welcome` has a reason to be."""

SOFT_PACKET = 64 * 1024
"""Bytes; more is cut into several packets, so that only a single message is larger: a `Claim` or a `Release` whose
request id is long, of 70 KB at most, or a `Welcome`, whose metadata may have 8 MB."""

MAX_MESSAGES = 512

Incarnation = Annotated[str, Meta(max_length=64)]
PullText = Annotated[str, Meta(min_length=1, max_length=128)]
Nonce = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

RELEASE_NONCE = 0
"""The nonce in the refusal of a `Release`, which carries none itself; no claim or renewal has it."""

MAX_TOLD = 256
"""Requests in one account."""

MAX_CURSOR = 256

MAX_DETAIL = 4096
Detail = Annotated[str, Meta(max_length=MAX_DETAIL)]

UNWELCOME = frozenset({Reason.PROTOCOL, Reason.WRONG_TARGET, Reason.RESTARTED, Reason.ENGINE_CLOSED})
REFUSED = frozenset(
    {
        Reason.UNKNOWN,
        Reason.CONSUMED,
        Reason.EXPIRED,
        Reason.REVOKED,
        Reason.WITHDRAWN,
        Reason.RESTARTED,
        Reason.STALE_MEMORY,
        Reason.BLOCKS_DIFFER,
        Reason.WRONG_REQUEST,
        Reason.WRONG_COHORT,
        Reason.NOT_OWED,
        Reason.RELEASED_ALREADY,
        Reason.FOREIGN_PULL,
        Reason.OVERLOADED,
        Reason.ENGINE_CLOSED,
    }
)
"""What a rank may give as its reason. All others are for the reader to find out: nobody tells it that it is through."""


def _check_reason(reason: Reason, sayable: frozenset[Reason]) -> None:
    if reason not in sayable:  # in a packet, msgspec makes this an error of its own
        raise ValueError(f"reason {reason.value!r} is not for a peer to give")


class Hello(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Ask a rank who it is and what it holds. Names whom the asker expects to find."""

    nonce: Nonce
    major: Annotated[int, Meta(ge=0, le=65_535)]
    minor: Annotated[int, Meta(ge=0, le=65_535)]
    engine_id: Name
    tp_rank: Rank
    reader: Cohort
    pp_stage: Rank = 0


class Welcome(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Answer to `Hello`: the layout, and NIXL metadata under a digest that is checked before loading."""

    nonce: Nonce
    major: Annotated[int, Meta(ge=0, le=65_535)]
    minor: Annotated[int, Meta(ge=0, le=65_535)]
    engine_id: Name
    agent_name: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Of the engine's id, of up to 512 characters, and what makes it one of a kind."""
    metadata: Annotated[bytes, Meta(min_length=1, max_length=8 * 1024 * 1024)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of `metadata`."""
    layout: Raw
    """A `Layout`, encoded: `decode_layout` looks at its length first."""


class Unwelcome(Struct, frozen=True, array_like=True, tag=3, gc=False):
    nonce: Nonce
    reason: Reason
    detail: Detail

    def __post_init__(self) -> None:
        _check_reason(self.reason, UNWELCOME)


class Claim(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Ask for the promise that the lent blocks stay as they are. Sent beside the read."""

    key: Key
    request_id: RequestText
    cohort: Cohort
    pull_id: PullText
    nonce: Nonce
    """Unique per transmission, so that an old answer is never matched to a newer question."""
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    seconds: Seconds
    """How long the reader still needs at most."""


class Renew(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Ask to extend a promise that was granted before."""

    key: Key
    pull_id: PullText
    nonce: Nonce
    seconds: Seconds


class Granted(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The blocks stay as they are for `seconds`, counted from any moment before this was sent.

    `lent_for_s` says for how long, at least, they have been what they are. A reader that started
    before that read something else, which is how params may travel ahead of the data.
    """

    key: Key
    pull_id: PullText
    nonce: Nonce
    seconds: Seconds
    lent_for_s: Seconds


class NotYet(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The request is not lent yet. The claim is answered once it is, if that is soon and there was room to keep it; its
    reader repeats it in any case."""

    key: Key
    pull_id: PullText
    nonce: Nonce


class Refused(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """No promise, now or ever, for this pull."""

    key: Key
    pull_id: PullText
    nonce: Nonce
    reason: Reason
    detail: Detail = ""

    def __post_init__(self) -> None:
        _check_reason(self.reason, REFUSED)


class Release(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """This attempt is over. Sent to every rank that its reader answers for, read or not."""

    key: Key
    request_id: RequestText
    cohort: Cohort
    pull_id: PullText
    outcome: Outcome


class Ack(Struct, frozen=True, array_like=True, tag=10, gc=False):
    """A release was taken, or will never be needed again."""

    key: Key
    pull_id: PullText


class Ping(Struct, frozen=True, array_like=True, tag=11, gc=False):
    """Are you there?"""

    nonce: Nonce


class Pong(Struct, frozen=True, array_like=True, tag=12, gc=False):
    """I am here."""

    nonce: Nonce


class StatusRequest(Struct, frozen=True, array_like=True, tag=13, gc=False):
    """What do you hold? For people and tools."""

    nonce: Nonce
    most: Annotated[int, Meta(ge=0, le=MAX_TOLD)] = 0
    """Requests in the account that the answer carries; 0 asks for gauges alone, as all did before minor version 3."""
    after: Annotated[str, Meta(max_length=MAX_CURSOR)] = ""
    """Where the last account ended."""
    request_id: Annotated[str, Meta(max_length=MAX_ID)] = ""
    """Tell of this request alone, by either side's id."""
    read: Annotated[bytes, Meta(max_length=32)] = b""
    """Was a digest of the account that was read last; engines no longer look at it."""


class Status(Struct, frozen=True, array_like=True, tag=14, gc=False):
    nonce: Nonce
    engine_id: Name
    tp_rank: Rank
    tp_size: Size
    gauges: Annotated[dict[Annotated[str, Meta(max_length=128)], Annotated[int, Meta(ge=0)]], Meta(max_length=256)]
    account: bytes = b""
    """An `Account`, encoded: `decode_account` looks at its length first. Of an older version there is none."""


class Goodbye(Struct, frozen=True, array_like=True, tag=15, gc=False):
    """This process start will serve nobody any more."""


class Draining(Struct, frozen=True, array_like=True, tag=16, gc=False):
    """This process start lends nothing new; what is lent can be read to its end.

    Since minor version 1: nobody who said hello as an older one is told.
    """


Message = (
    Hello
    | Welcome
    | Unwelcome
    | Claim
    | Renew
    | Granted
    | NotYet
    | Refused
    | Release
    | Ack
    | Ping
    | Pong
    | StatusRequest
    | Status
    | Goodbye
    | Draining
)


class Packet(Struct, frozen=True, array_like=True, gc=False):
    """What travels in one ZMQ frame."""

    major: Annotated[int, Meta(ge=0, le=65_535)]
    sender: Annotated[str, Meta(min_length=1, max_length=64)]
    target: Incarnation
    """The start of the process that is meant; empty if any will do."""
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]


class OtherVersion(RemoteProtocolError):
    """A packet of another major version of the protocol."""


class _Header(Struct, frozen=True, array_like=True, gc=False):
    """The first field of any packet of any major version."""

    major: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)
_header: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)


def encode_packet(sender: str, target: str, messages: Sequence[Message]) -> bytes:
    return _encoder.encode(Packet(MAJOR, sender, target, tuple(messages)))


def decode_packet(data: bytes) -> Packet:
    """Decode bytes from outside: the only door. Raises `RemoteProtocolError` (or `OtherVersion`), and nothing else."""
    try:
        packet = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        other = _other_major(data)
        kind = OtherVersion if other else RemoteProtocolError
        raise kind(f"{other}malformed packet of {len(data)} bytes: {exc}") from exc
    if packet.major != MAJOR:
        raise OtherVersion(f"protocol version {packet.major} is not {MAJOR}; upgrade the older side")
    return packet


def _other_major(data: bytes) -> str:
    try:
        major = _header.decode(data).major
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return f"protocol version {major} is not {MAJOR}; " if major != MAJOR else ""


def blocks_digest(
    groups: Sequence[BlockRuns], num_tokens: int, written: bool, hashes: Sequence[str] = (), hash_tokens: int = 0
) -> bytes:
    """Digest of lent blocks and tokens, by which owner and reader know that they speak of the same ones.

    It covers all blocks that the params name, so that it is computed once per request, and the hashes of the prompt,
    because params come through a client's hands.
    """
    said: tuple[object, ...] = (tuple(groups), num_tokens, written)
    if hashes:
        said += (tuple(hashes), hash_tokens)
    return hashlib.sha256(_encoder.encode(said)).digest()[:16]
