"""The control plane's sockets among strangers: whatever arrives, the listener lives."""

from __future__ import annotations

import asyncio

import anyio
import pytest
import zmq

from asynckv import BackendError, ConfigError
from asynckv.core.messages import MAX_PACKET
from asynckv.core.types import Address
from asynckv.edges.zmq import ZmqPlane

pytestmark = pytest.mark.anyio


class Inbox:
    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.event = asyncio.Event()

    def __call__(self, origin: object, packet: bytes) -> None:
        self.packets.append(packet)
        self.event.set()

    async def wait(self, count: int) -> None:
        with anyio.fail_after(10):
            while len(self.packets) < count:
                self.event.clear()
                await self.event.wait()


@pytest.fixture
async def heard() -> Inbox:
    return Inbox()


async def test_strangers_do_not_stop_the_listener(heard: Inbox) -> None:
    listener, friend = ZmqPlane("tcp://127.0.0.1:0"), ZmqPlane("tcp://127.0.0.1:0")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    try:
        await listener.start(heard)
        await friend.start(Inbox())
        port = int(listener.address.rpartition(":")[2])
        stranger.connect(listener.address)
        stranger.send_multipart([b"many", b"frames", b"in", b"one"])
        stranger.send_multipart([b""])
        stranger.send(bytes(MAX_PACKET + 1))  # ends the stranger's connection, nothing else
        # Not even ZMQ.
        with anyio.fail_after(10):
            async with await anyio.connect_tcp("127.0.0.1", port) as raw:
                await raw.send(b"GET / HTTP/1.1\r\n\r\n" * 100)
                assert await raw.receive()  # ZMQ's own greeting
        friend.send(listener.address, b"hello")
        await heard.wait(2)
        assert heard.packets == [b"", b"hello"]
        assert listener.statistics()["dropped_frames"] == 1
    finally:
        stranger.close()
        await listener.aclose()
        await friend.aclose()
        context.term()


async def test_a_handler_that_raises_does_not_stop_the_listener() -> None:
    listener, friend = ZmqPlane("tcp://127.0.0.1:0"), ZmqPlane("tcp://127.0.0.1:0")
    seen, told, done = [], [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))

    def handle(origin: object, packet: bytes) -> None:
        seen.append(packet)
        if packet == b"bad":
            raise RuntimeError(packet)
        done.set()

    try:
        await listener.start(handle)
        await friend.start(Inbox())
        friend.send(listener.address, b"bad")
        friend.send(listener.address, b"good")
        with anyio.fail_after(10):
            await done.wait()
        assert seen == [b"bad", b"good"]
        assert told == ["a packet could not be handled"]
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
        await listener.aclose()
        await friend.aclose()


async def test_nonsense_addresses_are_dropped_and_counted(heard: Inbox) -> None:
    plane = ZmqPlane("tcp://127.0.0.1:0")
    try:
        await plane.start(heard)
        for address in (
            "",
            "nonsense",
            "tcp://",
            "tcp://127.0.0.1:99999",
            "ipc:///tmp/x",
            "tcp://127.0.0.1:x",
            "tcp://[::",
        ):
            assert not plane.send(Address(address), b"x")
        assert plane.statistics()["bad_address"] == 7
    finally:
        await plane.aclose()


async def test_a_port_in_use_is_named(heard: Inbox) -> None:
    first = ZmqPlane("tcp://127.0.0.1:0")
    second: ZmqPlane | None = None
    try:
        await first.start(heard)
        second = ZmqPlane(first.address)
        with pytest.raises(BackendError, match=first.address):
            await second.start(heard)
    finally:
        await first.aclose()
        if second is not None:
            await second.aclose()


@pytest.mark.parametrize(
    ("bind", "advertise", "insecure", "message"),
    [
        ("tcp://0.0.0.0:0", "", False, "not encrypted"),
        ("tcp://10.1.2.3:0", "", False, "allow_insecure"),
        ("tcp://0.0.0.0:0", "", True, "set advertise"),
        ("tcp://*:0", "tcp://0.0.0.0:1", True, "wildcard"),
        ("udp://127.0.0.1:0", "", False, "not an address"),
        ("tcp://127.0.0.1", "", False, "not an address"),
    ],
)
async def test_addresses_that_cannot_serve_are_refused(bind: str, advertise: str, insecure: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZmqPlane(bind, advertise, insecure)


async def test_closing_is_idempotent_even_if_never_started() -> None:
    plane = ZmqPlane("tcp://127.0.0.1:0")
    await plane.aclose()
    await plane.aclose()
    assert not plane.send(Address("tcp://127.0.0.1:1"), b"x")
