"""Processes between an engine's control plane and its peers, and processes that should not be there at all.

`Proxy` keeps what both sides say, and delays, swallows, truncates, cuts and refuses as long as it is told to.
`Stranger` is a ZMQ peer that sends anything; `shout` writes to a raw connection. What they send starts from
`every_message` and `mutate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Self

import msgspec
import zmq

from asynckv.account.values import Account, encode_account
from asynckv.core import wire as m
from asynckv.core.types import Cohort, KVTransferParams, Outcome, Reason
from asynckv.errors import RemoteProtocolError
from asynckv.geometry.gather import Recipe
from asynckv.geometry.layout import Layout
from asynckv.keys import KeyPair

HUGE = 100 << 20
"""Bytes of a frame that no listener takes."""

KEPT = 1 << 20
"""Most that is kept of what was said."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HANDSHAKE = GREETING + bytes([4, len(READY)]) + READY
"""With which a DEALER of ZMTP 3.0 begins."""


def place(address: str) -> tuple[str, int]:
    """Host and port of a control plane's address."""
    host, _, port = address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a raw connection; whenever one is cancelled, it is closed."""
    opening = asyncio.create_task(asyncio.open_connection(host, port))
    try:
        yield await asyncio.shield(opening)
    finally:
        with contextlib.suppress(OSError):
            _, writer = await opening
            writer.transport.abort()
            await writer.wait_closed()


class Proxy:
    """Stands between clients and a listener.

    Attributes:
        asked, answered: What clients and listener said, as far as it is kept.
        is_bad: Whether it misbehaves.
        flow: While it is cleared, everything waits.
        did: What it did, how often.
    """

    def __init__(self, address: str, rng: random.Random | None = None) -> None:
        self._target, self._key = place(address), address.partition("#")[2]
        self._rng = rng or random.Random(0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: list[bytearray] = []
        self.asked, self.answered = bytearray(), bytearray()
        self.address = ""
        self.is_bad = False
        self.flow = asyncio.Event()
        self.flow.set()
        self.did: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.address += f"#{self._key}" * bool(self._key)
        return self

    async def __aexit__(self, *_: object) -> None:
        # What was accepted last has a task of its own some turns later. Until then the server stays: asyncio leaves a
        # transport open that it makes for a closed server.
        for listener in self._server.sockets:  # none, if it was left before
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _turn in range(5):
            await asyncio.sleep(0)
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never reaches its own `finally`.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers = bytearray()
        self._answers.append(answers)
        try:
            if self.is_bad and self._rng.random() < 0.2:
                self.did["refused"] += 1
                return
            async with connected(*self._target) as (there, back):
                pumps = [
                    asyncio.create_task(self._pump(reader, back, self.asked)),
                    asyncio.create_task(self._pump(there, writer, answers, self.answered)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for each in pumps:
                        each.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            self.did["nobody_there"] += 1

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *kept: bytearray) -> None:
        while data := await reader.read(1 << 16):
            await self.flow.wait()
            for each in kept:
                each.extend(data[: KEPT - len(each)])
            does = ("passed", "delayed", "cut", "truncated", "swallowed")
            (deed,) = self._rng.choices(does, (70, 18, 4, 4, 4)) if self.is_bad else does[:1]
            self.did[deed] += 1
            if deed == "delayed":
                await asyncio.sleep(self._rng.expovariate(1 / 0.08))
            elif deed == "truncated":
                data = data[: self._rng.randrange(len(data))]
            elif deed == "swallowed":
                # The rest goes nowhere for a while; then the connection breaks.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._rng.uniform(0.1, 1.0)):
                        while await reader.read(1 << 16):
                            pass
            if deed not in ("cut", "swallowed"):
                writer.write(data)
                await writer.drain()
            if deed not in does[:2]:
                return

    def commands(self) -> set[bytes]:
        """Names of the commands that the listener sent; a frame of a message is named so."""
        found = set()
        for answers in map(bytes, self._answers):
            at = 64  # the greeting is the same for everybody
            while at + 2 <= len(answers):
                flags, size, head = answers[at], answers[at + 1], 2
                if flags & 2:
                    size, head = int.from_bytes(answers[at + 1 : at + 9], "big"), 9
                body = answers[at + head : at + head + size]
                found.add(body[1 : 1 + body[0]] if flags & 4 and body else b"a frame")
                at += head + size
        return found


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change some bytes, or cut, repeat and insert some."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(out) + 1), rng.randint(1, 16)
        new = (b"", rng.randbytes(1), rng.randbytes(size), bytes(out[at : at + 4 * size]) * 2)
        out[at : at + rng.choice((0, 1, size) * 3 + (len(out),))] = rng.choice(new)
    return bytes(out)


def every_message(params: KVTransferParams, layout: Layout, cohort: Cohort) -> list[m.Message]:
    """One of each message, valid, about a request that is lent: what mutations start from."""
    key, name, pull = params.key, params.request_id, f"{cohort.id}-1"
    digest = m.blocks_digest(params)
    encoded = msgspec.Raw(msgspec.msgpack.encode(layout))
    return [
        m.Hello(7, m.MAJOR, m.MINOR, params.engine_id, 0, cohort),
        m.Welcome(7, m.MAJOR, m.MINOR, "x", "agent", b"metadata", bytes(32), encoded),
        m.Unwelcome(7, Reason.WRONG_TARGET, "detail"),
        m.Claim(key, name, cohort, pull, 8, digest, 5.0),
        m.Renew(key, pull, 9, 5.0),
        m.Granted(key, pull, 8, 10.0, 1.0),
        m.NotYet(key, pull, 8),
        m.Refused(key, pull, 8, Reason.EXPIRED),
        m.Release(key, name, cohort, pull, Outcome.FAILED),
        m.Ack(key, pull),
        m.Ping(10),
        m.Pong(10),
        m.StatusRequest(11),
        m.StatusRequest(12, m.MAX_TOLD, "7", name),
        m.Status(11, "x", 0, 1, {"leases": 1}),
        m.Status(12, "x", 0, 1, {"leases": 1}, encode_account(Account(rank="x/tp0@0a1b2c3d", num_readers=1))),
        m.Goodbye(),
        m.Pack(key, pull, 13, Recipe(0, ((16, ()),), ((0, 0, 0),), ((1, 1),))),
        m.Packed(key, pull, 13, 0),
        m.Unpack(key, pull, 13),
    ]


def packets(source: str, target: str, messages: Sequence[m.Message]) -> list[bytes]:
    """Encode messages, each alone and all together."""
    return [m.encode_packet(source, target, x) for x in (*([each] for each in messages), messages)]


def is_malformed(data: bytes) -> bool:
    """The engine's one decoder refuses it."""
    try:
        m.decode_packet(data)
    except RemoteProtocolError:
        return True
    return False


class Stranger:
    """A DEALER that sends anything, with keys if it has some. Blocks.

    A ping after each batch tells when the batch was taken.
    """

    def __init__(
        self, address: str, pair: KeyPair | None = None, within_s: float = 5.0, routing_id: bytes = b""
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, int(within_s * 1000))
        self._socket.setsockopt(zmq.RCVTIMEO, int(within_s * 1000))
        if routing_id:
            self._socket.setsockopt(zmq.ROUTING_ID, routing_id)
        endpoint, _, key = address.partition("#")
        if pair is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key))
        self._socket.connect(endpoint)
        self._nonces = itertools.count(1 << 40)

    def send(self, batch: list[list[bytes]]) -> bool:
        """Send; False if not all was taken."""
        try:
            for frames in batch:
                self._socket.send_multipart(frames)
            ping = m.Ping(next(self._nonces))
            self._socket.send(m.encode_packet("stranger", "", [ping]))
            while m.Pong(ping.nonce) not in m.decode_packet(self._socket.recv()).messages:
                pass
        except zmq.Again:
            return False
        return True

    def send_huge(self) -> bool:
        """Send a frame that is too large; True if the listener cut the connection for it."""
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.send(bytes(HUGE), copy=False)
        was_cut = bool(monitor.poll(10_000))
        self._socket.disable_monitor()
        monitor.close(0)
        return was_cut

    def close(self) -> None:
        self._context.destroy(0)


async def shout(address: str, chunks: Iterable[bytes]) -> int:
    """Write to a raw TCP connection until all is said or the other side has had enough; the bytes it took."""
    reader, writer = await asyncio.open_connection(*place(address))
    sent = 0
    try:
        async with asyncio.timeout(5.0):
            for chunk in chunks:
                if chunk.startswith(HANDSHAKE):
                    # What follows is only taken for frames once the other side is ready.
                    writer.write(HANDSHAKE)
                    size = (await reader.readexactly(len(GREETING) + 2))[-1]
                    await reader.readexactly(size)
                    chunk, sent = chunk.removeprefix(HANDSHAKE), sent + len(HANDSHAKE)
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
    except (OSError, EOFError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return sent
