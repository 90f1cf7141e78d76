"""Messages, commands and events that the core leaves for its driver.

The engine empties the outbox once per turn of its loop: messages first, because a claim has to leave before its read;
then commands; then it posts. Releases may wait for the next turn, because only the end of a lease waits for one. Reads
to post are asked for one by one (`DecodeSide.next_read`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import get_args

import msgspec
from msgspec import Struct

from asynckv.core.lease import Lease
from asynckv.core.notes import Note
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.told import Told
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.core.wire import (
    MAX_DETAIL,
    MAX_MESSAGES,
    SOFT_PACKET,
    Message,
    Refused,
    Release,
    Unwelcome,
    encode_packet,
)
from asynckv.geometry.plan import ReadRequest


class LoadPeer(Struct, frozen=True):
    """Load the peer's metadata, then say `load_ended`."""

    peer: Peer
    metadata: bytes


class RemovePeer(Struct, frozen=True):
    """Forget a peer in the data plane; none of its transfers is running or in doubt."""

    peer: Peer
    keep: bool = False
    """Its process lives: the connection may be kept for when it is met again."""


class Disconnect(Struct, frozen=True):
    address: Address


class PostRead(Struct, frozen=True):
    """Post a read, then say how it ended if that is known at once."""

    transfer_id: TransferId
    agent_name: str
    read: ReadRequest


class PullEnded(Struct, frozen=True):
    pull: Pull


class BlocksReturned(Struct, frozen=True):
    """Nothing can write this pull's blocks any more."""

    pull: Pull


class BlocksRetired(Struct, frozen=True):
    """Something may still write this pull's blocks after so long a time that they should be given up."""

    pull: Pull


class PullOver(Struct, frozen=True):
    pull: Pull


class HeldForLong(Struct, frozen=True):
    """Requests have been held for long, all in one state and waiting for the same; some that are held longest."""

    state: str
    waits: str
    number: int
    oldest: tuple[Lease | Pull, ...]
    is_orderly: bool = False


class LeaseEnded(Struct, frozen=True):
    lease: Lease


class PeerChanged(Struct, frozen=True):
    peer: Peer
    before: PeerState
    after: PeerState


class Traced(Struct, frozen=True):
    """New entries of a pull's or lease's history; only asked for when tracing."""

    subject: Pull | Lease
    entries: tuple[tuple[float, str | Note], ...]


Command = (
    LoadPeer
    | RemovePeer
    | Disconnect
    | PullEnded
    | BlocksReturned
    | BlocksRetired
    | PullOver
    | LeaseEnded
    | HeldForLong
    | PeerChanged
    | Traced
    | Told
)


_DETAILED = (Refused, Unwelcome)
_SENT = {kind: f"sent.{kind.__name__.lower()}" for kind in get_args(Message)}


@dataclass(slots=True)
class Outbox:
    """Messages to send, commands to execute, and what was counted."""

    incarnation: str
    trace: bool = False
    commands: list[Command] = field(default_factory=list)
    counters: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    is_urgent: bool = False
    """Somebody waits for one of the messages, which is no release."""
    messages: dict[tuple[Address | ReplyTo, str], list[Message]] = field(default_factory=dict)
    """What is to be sent: by address, or way back, and the process start that is meant."""

    def send(self, to: Address | ReplyTo, target: str, message: Message) -> None:
        """Send a message to a process start, with all others of this turn."""
        kind = type(message)
        if kind is not Release:
            self.is_urgent = True
            if isinstance(message, _DETAILED) and len(message.detail) > MAX_DETAIL:
                # What names a stranger's ids can be long; what is refused as malformed says nothing at all.
                message = msgspec.structs.replace(message, detail=message.detail[: MAX_DETAIL - 4] + " ...")
        whom = to, target
        if whom in self.messages:
            self.messages[whom].append(message)
        else:
            self.messages[whom] = [message]
        self.counters[_SENT[kind]] += 1

    def take_packets(self) -> list[tuple[Address | ReplyTo, bytes]]:
        by_target, self.messages, self.is_urgent = self.messages, {}, False
        packets: list[tuple[Address | ReplyTo, bytes]] = []
        for (to, target), messages in by_target.items():
            for i in range(0, len(messages), MAX_MESSAGES):
                packets += zip(itertools.repeat(to), self._packets(target, messages[i : i + MAX_MESSAGES]))
        return packets

    def _packets(self, target: str, messages: list[Message]) -> list[bytes]:
        try:
            packet = encode_packet(self.incarnation, target, messages)
        except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError):
            # A bug of ours, and no reason to say nothing to anybody else.
            self.counters["internal_errors"] += 1
            return []
        if len(packet) <= SOFT_PACKET or len(messages) == 1:
            return [packet]
        half = len(messages) // 2
        return self._packets(target, messages[:half]) + self._packets(target, messages[half:])
