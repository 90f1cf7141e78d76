"""What the engine's process and its data plane's say to each other: frames of messages over a socket pair.

One frame is four bytes of length and a list of messages; whatever is said within one turn of a loop goes as one.
Index arrays travel as their bytes: both ends are one host, and one build.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.config import NixlConfig
from asynckv.core.types import TransferId
from asynckv.geometry.layout import Memory
from asynckv.ports import Ended

__all__ = [
    "AddTable",
    "Close",
    "Drop",
    "Ends",
    "IndexArray",
    "Link",
    "Load",
    "Loaded",
    "News",
    "Order",
    "Read",
    "Ready",
    "RemoveTable",
    "Setup",
    "Stats",
    "Unready",
    "Watch",
]

IndexArray = npt.NDArray[np.int32]

HEADER = 4
CHUNK = 1 << 18
"""Bytes that are received at a time."""


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Make the agent and register memory."""

    agent_name: str
    config: NixlConfig
    memories: tuple[Memory, ...]


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Load a peer, and say `Loaded` with the number."""

    number: int
    name: str
    metadata: bytes


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Forget a peer."""

    name: str
    keep: bool


class AddTable(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Prepare a piece table; rows as int64."""

    name: str
    table_id: int
    length: bytes
    local: bytes
    remote: bytes
    local_blocks: int
    remote_blocks: int
    memories: tuple[Memory, ...]
    theirs: tuple[Memory, ...]


class RemoveTable(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Forget a piece table."""

    name: str
    table_id: int


class Read(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Post a read; indices as int32."""

    transfer_id: TransferId
    name: str
    table_id: int
    local: bytes
    remote: bytes


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Make progress for remote readers, or not."""

    serving: bool


class Close(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Let go of everything and exit."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Say anything, to show that the loop turns: it is `Stats`."""


Order = Setup | Load | Drop | AddTable | RemoveTable | Read | Watch | Close | Beat


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The agent serves."""

    metadata: bytes
    facts: dict[str, str]


class Unready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """It cannot serve, and ends."""

    cause: str


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A peer is loaded, or refused for a cause."""

    number: int
    cause: str


class Ends(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """News of transfers."""

    news: tuple[Ended, ...]


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Gauges and counters."""

    values: dict[str, int]


News = Ready | Unready | Loaded | Ends | Stats


class Link:
    """One end of the socket pair; never blocks.

    Args:
        end: Its socket, which is this object's from here on.
        most: Bytes that a frame may have; from one that says it has more on, nothing is taken.
    """

    def __init__(self, end: socket.socket, most: int = (1 << 32) - 1) -> None:
        end.setblocking(False)
        self._most = most
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._chunk = memoryview(bytearray(CHUNK))
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._socket.fileno()

    def send(self, messages: Sequence[Order] | Sequence[News]) -> bool:
        """Send one frame, or keep what does not fit; False if something is left for `flush`."""
        return self.send_bytes(self._encoder.encode(messages))

    def send_bytes(self, body: bytes) -> bool:
        """Send one frame with this body."""
        self._unsent.append(memoryview(len(body).to_bytes(HEADER, "little") + body))
        return self.flush()

    def flush(self) -> bool:
        """Send what was kept; False if something is left. What the other end will never read is dropped."""
        while self._unsent:
            try:
                # An application may have left SIGPIPE as it is.
                num_sent = self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()  # it has ended, which whoever receives finds out
                return True
            if num_sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][num_sent:]
            else:
                self._unsent.popleft()
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the bodies of all frames that have arrived, and whether the other end is still there."""
        is_there = True
        while True:
            try:
                count = self._socket.recv_into(self._chunk)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                is_there = False
                break
            self._received += self._chunk[:count]
            if count < CHUNK:
                break
        frames = list(self._frames())
        return frames, is_there and int.from_bytes(self._received[:HEADER], "little") <= self._most

    def _frames(self) -> Iterator[bytes]:
        at, received = 0, self._received
        while len(received) - at >= HEADER:
            end = at + HEADER + int.from_bytes(received[at : at + HEADER], "little")
            if len(received) < end or end - at - HEADER > self._most:
                break
            yield bytes(received[at + HEADER : end])
            at = end
        if at:
            del received[:at]

    def close(self) -> None:
        """Close this end. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()
