"""The messages between ranks, and the one door through which bytes from outside come in.

    decode rank  ->  prefill rank          prefill rank  ->  decode rank
    Hello                                  Welcome | Unwelcome
    Claim, Renew                           Granted | NotYet | Refused
    Follow, Unfollow                       Offered
    Pack, Unpack                           Packed
    Release                                Ack
    Ping, StatusRequest                    Pong, Status
    Pong, Goodbye                          Ping, Draining, Goodbye

Every message is idempotent and may be lost, repeated or reordered. A packet names the process start it comes from
(`sender`) and the one it is meant for (`target`). A claim carries a `nonce` that the answer returns. Messages carry
durations, never points in time.

**The door is `decode_packet`** (or `decode`, where every call counts). Messages are a closed union with bounds in their
types, so that decoding is validation. The result is a value with types and ranges that the core can trust, or an error.
Only the layout inside a `Welcome` stays encoded, because it is large and `decode_layout` checks its length first.
(Params come through a router, and `decode_params` checks them.)

Fields are only added at the end, with defaults, and a new kind of message is only sent to peers that know it (a minor
version). Any other change is a new major version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from asynckv.core.types import (
    MAX_ID,
    Cohort,
    Key,
    KVTransferParams,
    Outcome,
    Reason,
    RequestText,
    Seconds,
    Ticket,
    decode_params,
)
from asynckv.errors import RemoteProtocolError
from asynckv.geometry.bounds import MAX_TOKENS, Name, Rank, Size
from asynckv.geometry.gather import Packing, Recipe

MAJOR = 1
MINOR = 8
"""Minor version. 1 added `Draining`, 2 the reason `withdrawn`, 3 the options of a status request and its account, 4
packed copies, 5 layouts that say what they guess (`Layout.guessed_axis`), 6 tokens that ranks share, 7 tickets, 8
pieces."""

SETTLES = 5  # the minor version since which ranks settle guesses, so that an older one may be refused without need
OFFERS = 7  # the minor version since which a rank can be followed

MAX_PACKET = 16 * 1024 * 1024
"""Largest packet in bytes. The control plane refuses a larger one before it is decoded."""

MAX_REQUEST_PACKET = 128 * 1024
"""Largest packet in bytes that a listener takes, because only a `Welcome` needs to be larger."""

SOFT_PACKET = 64 * 1024
"""Bytes above which messages are split over several packets. Only a single message is larger: a `Claim` or `Release`
with a long request id, of 70 KB at most, a `Pack` of 115 KB, or a `Welcome` with up to 8 MB of metadata."""

MAX_MESSAGES = 512

MAX_OFFER = 12 * 1024 * 1024  # bytes of offered params; the most runs and hashes of a request take less

Incarnation = Annotated[str, Meta(max_length=64)]
PullText = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_NONCE = (1 << 63) - 1
Nonce = Annotated[int, Meta(ge=0, le=MAX_NONCE)]

RELEASE_NONCE = 0
"""Nonce in the refusal of a `Release`, which carries none itself. No claim or renewal has this nonce."""

MAX_TOLD = 256  # requests in one account at most
MAX_CURSOR = 256

MAX_DETAIL = 4096
Detail = Annotated[str, Meta(max_length=MAX_DETAIL)]

_OF_PROCESS = frozenset({Reason.RESTARTED, Reason.ENGINE_CLOSED})
_OF_LOAN = frozenset({Reason.WITHDRAWN, Reason.CONSUMED, Reason.EXPIRED, Reason.REVOKED})
_OF_PARAMS = frozenset({Reason.UNKNOWN, Reason.STALE_MEMORY, Reason.BLOCKS_DIFFER, Reason.WRONG_REQUEST})
_OF_READER = frozenset({Reason.WRONG_COHORT, Reason.NOT_OWED, Reason.FOREIGN_PULL, Reason.RELEASED_ALREADY})
NOT_OFFERED = _OF_PROCESS | _OF_LOAN
UNWELCOME = _OF_PROCESS | {Reason.PROTOCOL, Reason.WRONG_TARGET}
REFUSED = _OF_PROCESS | _OF_LOAN | _OF_PARAMS | _OF_READER | {Reason.OVERLOADED}
"""Reasons that a rank may give. A reader finds all other reasons itself, and takes none of them from a peer."""


def _check_reason(reason: Reason, sayable: frozenset[Reason]) -> None:
    if reason not in sayable:  # in a packet, msgspec makes this an error of its own
        raise ValueError(f"reason {reason.value!r} cannot come from a peer")


class Hello(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Ask a rank for its name and layout. The message names the rank that the asker expects to find."""

    nonce: Nonce
    major: Annotated[int, Meta(ge=0, le=65_535)]
    minor: Annotated[int, Meta(ge=0, le=65_535)]
    engine_id: Name
    tp_rank: Rank
    reader: Cohort
    pp_stage: Rank = 0


class Welcome(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Answer a `Hello` with the layout, and with NIXL metadata under a digest that is checked before loading."""

    nonce: Nonce
    major: Annotated[int, Meta(ge=0, le=65_535)]
    minor: Annotated[int, Meta(ge=0, le=65_535)]
    engine_id: Name
    agent_name: Annotated[str, Meta(min_length=1, max_length=1024)]
    """The engine's id, of up to 512 characters, and a part that makes the name unique."""
    metadata: Annotated[bytes, Meta(min_length=1, max_length=8 * 1024 * 1024)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]  # SHA-256 of `metadata`
    layout: Raw
    """Encoded `Layout`. `decode_layout` checks its length first."""
    packing: Packing | None = None  # memory for packed copies, since minor version 4; None if the rank makes none


class Unwelcome(Struct, frozen=True, array_like=True, tag=3, gc=False):
    nonce: Nonce
    reason: Reason
    detail: Detail

    def __post_init__(self) -> None:
        _check_reason(self.reason, UNWELCOME)


class _OfPull(Struct, frozen=True, array_like=True, gc=False):
    """A message about one pull. The nonce names a transmission, or a packed copy, and the answer returns it."""

    key: Key
    pull_id: PullText
    nonce: Nonce


class Claim(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Ask for a grant: the promise that the lent blocks stay unchanged. Sent together with the read."""

    key: Key
    request_id: RequestText
    cohort: Cohort
    pull_id: PullText
    nonce: Nonce  # unique per transmission, so that an old answer is never matched to a newer question
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    seconds: Seconds  # longest time that the reader still needs


class Renew(_OfPull, frozen=True, tag=5):
    """Ask to extend an earlier grant."""

    seconds: Seconds


class Granted(_OfPull, frozen=True, tag=6):
    """Promise that the blocks stay unchanged for `seconds`, counted from any moment before this was sent.

    The blocks have been lent for at least `lent_for_s`. Params may travel ahead of the data, so a read that began
    earlier than that may have read other data.
    """

    seconds: Seconds
    lent_for_s: Seconds


class NotYet(_OfPull, frozen=True, tag=7):
    """Say that the request is not lent yet. The claim is answered once it is, if that is soon and there was room for
    it. The reader repeats the claim in any case."""


class Refused(_OfPull, frozen=True, tag=8):
    """Refuse a grant to this pull, now and for ever."""

    reason: Reason
    detail: Detail = ""

    def __post_init__(self) -> None:
        _check_reason(self.reason, REFUSED)


class Release(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """End an attempt. Sent to every rank that the reader answers for, read or not."""

    key: Key
    request_id: RequestText
    cohort: Cohort
    pull_id: PullText
    outcome: Outcome


class Ack(Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Acknowledge a release that was taken, or that is not needed any more."""

    key: Key
    pull_id: PullText


class Ping(Struct, frozen=True, array_like=True, tag=11, gc=False):
    """Ask a process to answer."""

    nonce: Nonce


class Pong(Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Answer a `Ping`."""

    nonce: Nonce


class StatusRequest(Struct, frozen=True, array_like=True, tag=13, gc=False):
    """Ask a rank what it holds, for people and tools."""

    nonce: Nonce
    most: Annotated[int, Meta(ge=0, le=MAX_TOLD)] = 0
    """Requests in the account of the answer; 0 asks for gauges alone, as every question did before minor version 3."""
    after: Annotated[str, Meta(max_length=MAX_CURSOR)] = ""  # cursor at which the last account ended
    request_id: Annotated[str, Meta(max_length=MAX_ID)] = ""  # id, on either side, of the only request to list
    read: Annotated[bytes, Meta(max_length=32)] = b""
    """Unused; older versions sent a digest of the account that they had read last."""


class Status(Struct, frozen=True, array_like=True, tag=14, gc=False):
    nonce: Nonce
    engine_id: Name
    tp_rank: Rank
    tp_size: Size
    gauges: Annotated[dict[Annotated[str, Meta(max_length=128)], Annotated[int, Meta(ge=0)]], Meta(max_length=256)]
    account: bytes = b""
    """Encoded `Account`; `decode_account` checks its length first. An older version sends none."""


class Goodbye(Struct, frozen=True, array_like=True, tag=15, gc=False):
    """Say that this process start serves no rank any more."""


class Draining(Struct, frozen=True, array_like=True, tag=16, gc=False):
    """Say that this process start lends nothing new, and that lent blocks can be read to their end.

    Since minor version 1; a reader that said hello as an older version is not told.
    """


class Pack(_OfPull, frozen=True, tag=17):
    """Ask for a packed copy of blocks that a grant of this pull promises. Sent to ranks with memory for packed copies.

    The answer is `Packed`. It may be late or lost, and the reader does not wait for it for long. The nonce names the
    copy, and is unique among those of the reader's process start.
    """

    recipe: Recipe


class Packed(_OfPull, frozen=True, tag=18):
    """Name the slot with a packed copy, which stays as it is for as long as the grant; or refuse to make one."""

    slot: Annotated[int, Meta(ge=-1, lt=65_536)]
    """-1: the rank makes no copy, now or at all, so that the reader reads the blocks."""


class Unpack(_OfPull, frozen=True, tag=19):
    """Say that a packed copy is not read any more. A release says so of all copies of its pull."""


class _OfTicket(Struct, frozen=True, array_like=True, gc=False):
    ticket: Ticket
    nonce: Nonce

    def __repr__(self) -> str:
        """Show a message in texts such as tracebacks, which must not reveal a ticket or the key in params."""
        return f"{type(self).__name__}(nonce={self.nonce})"


class Follow(_OfTicket, frozen=True, tag=20):
    """Ask to be told the params of the request that brings a ticket to the prefill engine, once it is lent.

    A ticket that the rank does not know may be ahead of its request. Its follower is parked, and repeats this.
    """

    cohort: Cohort
    have: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    """Tokens that the follower has, without a gap. It may be offered a piece behind these. -1: the request alone."""


class Unfollow(_OfTicket, frozen=True, tag=21):
    """Say that a follower wants no offer any more."""


class Offered(_OfTicket, frozen=True, tag=22):
    """Tell a follower the params of its request, which is lent; or the reason why it will not be, or is no more."""

    params: Raw = Raw(b"\xc0")
    """Encoded `KVTransferParams`, or None. `decode_offer` checks its length first."""
    reason: Reason | None = None
    detail: Detail = ""
    is_piece: bool = False  # True if the params are of a finished part of the request, which is computed on

    def __post_init__(self) -> None:
        if self.reason is not None:
            _check_reason(self.reason, NOT_OFFERED)


OfReader = Claim | Renew | Release  # about one lent request
ToOwner = Hello | OfReader | Follow | Unfollow | Pack | Unpack | StatusRequest
ToReader = Welcome | Unwelcome | Granted | NotYet | Refused | Ack | Offered | Packed | Status | Draining
Message = ToOwner | ToReader | Ping | Pong | Goodbye


class Packet(Struct, frozen=True, array_like=True, gc=False):
    """The content of one ZMQ frame."""

    major: Annotated[int, Meta(ge=0, le=65_535)]
    sender: Annotated[str, Meta(min_length=1, max_length=64)]
    target: Incarnation  # process start that the packet is for; empty if it is for any
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]


class OtherVersion(RemoteProtocolError):
    """A packet of another major version of the protocol."""


class _Header(Struct, frozen=True, array_like=True, gc=False):
    """The first field of any packet of any major version."""

    major: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)
decode = _decoder.decode
"""Decode a packet, without a look at its version, or raise one of `UNREADABLE`. `decode_packet` then says why."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_header: msgspec.msgpack.Decoder[_Header] = msgspec.msgpack.Decoder(_Header)
_params: msgspec.msgpack.Decoder[KVTransferParams] = msgspec.msgpack.Decoder(KVTransferParams)


def encode_packet(sender: str, target: str, messages: Sequence[Message]) -> bytes:
    return _encoder.encode(Packet(MAJOR, sender, target, tuple(messages)))


def decode_packet(data: bytes) -> Packet:
    """Decode bytes from outside: the only door. Raise `RemoteProtocolError` (or `OtherVersion`), and nothing else."""
    try:
        packet = decode(data)
    except UNREADABLE as exc:
        other = _other_major(data)
        kind = OtherVersion if other else RemoteProtocolError
        raise kind(f"{other}malformed packet of {len(data)} bytes: {exc}") from exc
    if packet.major != MAJOR:
        raise OtherVersion(f"protocol version {packet.major} is not {MAJOR}; upgrade the older side")
    return packet


def _other_major(data: bytes) -> str:
    try:
        major = _header.decode(data).major
    except UNREADABLE:
        return ""
    return f"protocol version {major} is not {MAJOR}; " if major != MAJOR else ""


def encode_offer(params: KVTransferParams) -> Raw:
    return Raw(_encoder.encode(params))


def decode_offer(offered: Offered) -> KVTransferParams:
    """Decode the params of an offer, or raise `RemoteProtocolError`."""
    if len(memoryview(offered.params)) > MAX_OFFER:
        raise RemoteProtocolError(f"the offered params are longer than {MAX_OFFER} bytes")
    try:
        return decode_params(_params.decode(offered.params))
    except UNREADABLE as exc:
        raise RemoteProtocolError(f"the offered params are malformed: {exc}") from exc


def blocks_digest(params: KVTransferParams) -> bytes:
    """Return a digest of lent blocks and tokens, with which owner and reader check that they mean the same ones.

    It covers all blocks that the params name, so that it is computed once per request. It also covers the hashes of the
    prompt, because params come through a client's hands. It covers `recall` too, so that a reader before 0.5.0, which
    confirms nothing, is refused.
    """
    said: tuple[object, ...] = (params.groups, params.num_tokens, params.written)
    if params.hashes:
        said += (params.hashes, params.hash_tokens)
    if params.recall:
        said += ("recall",)
    return hashlib.sha256(_encoder.encode(said)).digest()[:16]
