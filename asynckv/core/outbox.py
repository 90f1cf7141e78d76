"""Messages, commands and events that the core leaves for its driver.

The engine empties the outbox once per turn of its loop. It sends messages first, because a claim has to leave before
its read, then carries out commands, then posts. Releases may wait for the next turn, because only the end of a lease
waits for them. The engine asks for reads to post one by one (`DecodeSide.next_read`).
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import msgspec
from msgspec import Struct

from asynckv.core.attempts import Request
from asynckv.core.following import Following
from asynckv.core.lease import Lease
from asynckv.core.ledger import Ledger
from asynckv.core.notes import Note
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.timers import Timers
from asynckv.core.types import Address, KVTransferParams, ReplyTo, TransferId
from asynckv.core.wire import MAJOR, MAX_DETAIL, MAX_MESSAGES, SOFT_PACKET, Message, Packet, Refused, Release, Unwelcome
from asynckv.geometry.gather import Gathered
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.told import Told


class LoadPeer(Struct, frozen=True):
    """Load the peer's metadata, then call `load_ended`."""

    peer: Peer
    metadata: bytes


class RemovePeer(Struct, frozen=True):
    """Forget a peer in the data plane. None of its transfers is running or in doubt."""

    peer: Peer
    keep: bool = False  # True if the process lives, so that the connection may be kept for the next meeting


class PostRead(Struct, frozen=True):
    """Post a read, then report its end if that is known at once."""

    transfer_id: TransferId
    agent_name: str
    read: ReadRequest | Look
    pull: Pull


class DetachRead(Struct, frozen=True):
    """Let a staged read place nothing any more. If that can be promised, report it as `DETACHED`; as `FAILED` if it
    was not posted, because it waited for a packed copy."""

    transfer_id: TransferId
    is_posted: bool
    is_look: bool = False  # a look writes no block, so nothing has to be promised


class PackBlocks(Struct, frozen=True):
    """Make a packed copy in a slot, then call `copies.made`."""

    slot: int
    gathered: Gathered


class Milestone(enum.Enum):
    ENDED = enum.auto()  # the pull has its outcome; mostly its blocks have returned with it
    RETURNED = enum.auto()  # nothing can write the blocks any more that were held at the outcome
    RETIRED = enum.auto()  # a transfer may still write its blocks after `held_s`, so that they should be given up
    OVER = enum.auto()  # every rank knows its outcome, and its blocks have returned
    PAUSES = enum.auto()  # an attempt at a request has failed, and another follows


class PullReached(Struct, frozen=True):
    pull: Pull
    milestone: Milestone


class RequestReached(Struct, frozen=True):
    """A request pauses, has ended, or has its blocks back that were held at its end."""

    request: Request
    milestone: Milestone


class FollowReached(Struct, frozen=True):
    """A following has ended, with an offer or without, or an offer came after that; or it was offered its first piece,
    and goes on."""

    following: Following
    is_late: bool = False
    piece: KVTransferParams | None = None


class LeaseOver(Struct, frozen=True):
    lease: Lease


class PeerReached(Struct, frozen=True):
    peer: Peer
    before: PeerState
    after: PeerState


class Traced(Struct, frozen=True):
    """New entries of a pull's or lease's history. They are only made while tracing."""

    subject: Pull | Lease
    entries: tuple[tuple[float, str | Note], ...]


ForPlane = LoadPeer | RemovePeer | DetachRead | PackBlocks
ToTell = PullReached | RequestReached | FollowReached | LeaseOver | PeerReached | Traced | Told
Command = ForPlane | ToTell


_encode = msgspec.msgpack.Encoder().encode
_DETAILED = (Refused, Unwelcome)
_SENT = {kind: f"sent.{kind.__name__.lower()}" for kind in get_args(Message)}


@dataclass(slots=True)
class Outbox:
    """Messages to send, commands to execute, and counters."""

    incarnation: str
    trace: bool = False
    commands: list[Command] = field(default_factory=list)
    counters: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    is_urgent: bool = False  # True if one of the messages is no release, because a peer waits for it
    unlinked: dict[Address, None] = field(default_factory=dict)  # addresses to disconnect, once all messages have left
    messages: dict[tuple[Address | ReplyTo, str], list[Message]] = field(default_factory=dict)
    """Messages to send, by address or way back, and by the process start that they are for."""

    def send(self, to: Address | ReplyTo, target: str, message: Message) -> None:
        """Send a message to a process start, together with all others of this turn."""
        kind = type(message)
        if kind is not Release:
            self.is_urgent = True
            if isinstance(message, _DETAILED) and len(message.detail) > MAX_DETAIL:
                # Cut a detail that quotes a stranger's long ids, because a malformed message would say nothing at all.
                message = msgspec.structs.replace(message, detail=message.detail[: MAX_DETAIL - 4] + " ...")
        receiver = to, target
        if receiver in self.messages:
            self.messages[receiver].append(message)
        else:
            self.messages[receiver] = [message]
        self.counters[_SENT[kind]] += 1

    def take_packets(self) -> list[tuple[Address | ReplyTo, bytes]]:
        by_target, self.messages, self.is_urgent = self.messages, {}, False
        packets: list[tuple[Address | ReplyTo, bytes]] = []
        for (to, target), messages in by_target.items():
            for i in range(0, len(messages), MAX_MESSAGES):
                parts = [messages[i : i + MAX_MESSAGES]]
                while parts:
                    part = parts.pop(0)
                    try:
                        packet = _encode(Packet(MAJOR, self.incarnation, target, tuple(part)))
                    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError):
                        # This is a bug of ours, but messages to other peers must still leave.
                        self.counters["internal_errors"] += 1
                        continue
                    if len(packet) <= SOFT_PACKET or len(part) == 1:
                        packets.append((to, packet))
                    else:
                        half = len(part) // 2
                        parts[:0] = part[:half], part[half:]
        return packets


class Shared(NamedTuple):
    """Parts that the two sides of a rank share. `arrivals` numbers leases, pulls and followings together."""

    ledger: Ledger
    outbox: Outbox
    timers: Timers
    arrivals: Iterator[int]
