"""Messages between the engine's process and its data plane's process, in frames over a socket pair.

A frame is four bytes of length and a list of messages. Orders are obeyed in the order in which they are sent.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from asynckv.config import NixlConfig
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo

HEADER = 4
CHUNK = 1 << 18  # bytes that are received at a time


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=0):
    agent_name: str
    config: NixlConfig
    memories: tuple[Memory, ...]


class Load(msgspec.Struct, frozen=True, array_like=True, tag=1):
    remote: AgentInfo
    memories: tuple[Memory, ...]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    name: str


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    serving: bool


class Close(msgspec.Struct, frozen=True, array_like=True, tag=7): ...


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A question that the child answers with `Stats`, which shows that its loop turns."""


Order = Setup | Load | Drop | Watch | Close | Beat
orders: msgspec.msgpack.Decoder[list[Order]] = msgspec.msgpack.Decoder(list[Order])


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    agent: AgentInfo


class Unready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    cause: str


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    cause: str  # the reason if the load failed; empty if it succeeded


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=5):
    values: dict[str, int]


News = Ready | Unready | Loaded | Stats
news: msgspec.msgpack.Decoder[list[News]] = msgspec.msgpack.Decoder(list[News])


class Link:
    """One end of the socket pair; never blocks. After a frame of more than `most` bytes it takes nothing more."""

    def __init__(self, end: socket.socket, most: int = (1 << 32) - 1) -> None:
        end.setblocking(False)
        self._most = most
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._chunk = memoryview(bytearray(CHUNK))
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, messages: Sequence[Order] | Sequence[News]) -> bool:
        return self.send_bytes(self._encoder.encode(messages))

    def send_bytes(self, body: bytes) -> bool:
        self._unsent.append(memoryview(len(body).to_bytes(HEADER, "little") + body))
        return self.flush()

    def flush(self) -> bool:
        """Send kept bytes; return False if some are left. Drop them if the other end has gone."""
        while self._unsent:
            try:
                # The application may not ignore SIGPIPE.
                num_sent = self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()  # the other end has gone, which `receive` reports
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
        with contextlib.suppress(OSError):
            self._socket.close()
