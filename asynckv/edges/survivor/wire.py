"""Messages between the engine's process and its data plane's process, in frames over a socket pair.

A frame is four bytes of length and a message. Orders are obeyed in the order in which they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

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


class WatchReaders(msgspec.Struct, frozen=True, array_like=True, tag=6):
    serving: bool


class Close(msgspec.Struct, frozen=True, array_like=True, tag=7): ...


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A question that the child answers with `Stats`, which shows that its loop turns."""


Order = Setup | Load | Drop | WatchReaders | Close | Beat
orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    agent: AgentInfo


class Unready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    cause: str


class LoadEnded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    cause: str  # the reason if the load failed; empty if it succeeded


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=5):
    values: dict[str, int]


News = Ready | Unready | LoadEnded | Stats
news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


class Link:
    """One end of the socket pair, on the running event loop; never blocks. What does not fit is sent as there is room.
    After a frame of more than `most` bytes it takes nothing more.
    """

    def __init__(self, end: socket.socket, most: int = (1 << 32) - 1) -> None:
        end.setblocking(False)
        self._socket, self._most, self._loop = end, most, asyncio.get_running_loop()
        self._unsent, self._received = bytearray(), bytearray()
        self._encoder = msgspec.msgpack.Encoder()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Order | News) -> None:
        self.send_bytes(self._encoder.encode(message))

    def send_bytes(self, body: bytes) -> None:
        self._unsent += len(body).to_bytes(HEADER, "little") + body
        if not self._has_sent_all():
            self._loop.add_writer(self.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._has_sent_all():
            self._loop.remove_writer(self.fileno())

    def _has_sent_all(self) -> bool:
        """Send what there is room for; drop all of it if the other end has gone."""
        try:
            while self._unsent:
                # The application may not ignore SIGPIPE.
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()  # the other end has gone, which `receive` reports
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the bodies of all frames that have arrived, and whether the other end is still there."""
        frames, is_there = list[bytes](), True
        try:
            while data := self._socket.recv(CHUNK):
                self._received += data
                if len(data) < CHUNK:
                    break
            else:
                is_there = False
        except BlockingIOError:
            pass
        except OSError:
            is_there = False
        while (size := self._size) <= min(self._most, len(self._received) - HEADER):
            frames.append(bytes(self._received[HEADER : HEADER + size]))
            del self._received[: HEADER + size]
        return frames, is_there and size <= self._most

    @property
    def _size(self) -> int:
        """Return the length of the next frame, or a part of it if not all of its header has arrived."""
        return int.from_bytes(self._received[:HEADER], "little")

    def close(self) -> None:
        # A writer may wait although all was sent since, or dropped.
        if self._socket.fileno() >= 0 and not self._loop.is_closed():
            self._loop.remove_writer(self.fileno())
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.close()
