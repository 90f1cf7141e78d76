"""The control plane on real sockets: what it refuses, what it survives, and what it counts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq
from anyio.from_thread import start_blocking_portal

from asynckv import Engine, EngineClosed, EngineConfig, PrefillRanks, PullError
from asynckv.config import KeysConfig
from asynckv.core.types import Address, ReplyTo
from asynckv.core.wire import MAX_PACKET, MAX_REQUEST_PACKET
from asynckv.edges.control import door
from asynckv.edges.control import zmq as edge
from asynckv.edges.control.door import Connection, Door
from asynckv.edges.control.zmq import ZmqPlane, make_pair
from asynckv.errors import BackendError, ConfigError
from asynckv.keys import KeyPair, encode_z85, write_pair
from asynckv.testing import SimData, SimNetwork
from tests.commands import python
from tests.engines import memory, open_files, until
from tests.lab.attack import CURVE_GREETING, HANDSHAKE_COMMANDS
from tests.lab.strangers import GREETING, Proxy, place

LOOPBACK = "tcp://127.0.0.1:0"
PATIENCE_S = 20.0


class Inbox:
    """Keeps what arrived, and lets one wait for something."""

    def __init__(self) -> None:
        self.packets: list[tuple[Address | ReplyTo, bytes]] = []
        self.principals: list[str] = []
        self.changed = asyncio.Event()

    def __call__(self, origin: Address | ReplyTo, data: bytes, principal: str = "") -> None:
        self.packets.append((origin, data))
        self.principals.append(principal)
        self.changed.set()

    @property
    def bodies(self) -> list[bytes]:
        return [data for _, data in self.packets]

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(PATIENCE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def wait(self, number: int) -> None:
        await self.until(lambda: len(self.packets) >= number)

    async def idle_until(self, holds: Callable[[], bool]) -> None:
        """Wait for what announces itself to nobody, such as a counter."""
        with anyio.fail_after(PATIENCE_S):
            while not holds():
                await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def running(plane: ZmqPlane, *start: Any) -> AsyncIterator[ZmqPlane]:
    """Start a plane, and close it whatever happens."""
    try:
        await plane.start(*start)
        yield plane
    finally:
        await plane.aclose()


@asynccontextmanager
async def keyed(*keys: KeysConfig | None) -> AsyncIterator[list[tuple[ZmqPlane, Inbox]]]:
    async with AsyncExitStack() as stack:
        out = [(ZmqPlane(LOOPBACK, keys=each), Inbox()) for each in keys]
        for plane, inbox in out:
            await stack.enter_async_context(running(plane, inbox))
        yield out


def planes(number: int) -> AbstractAsyncContextManager[list[tuple[ZmqPlane, Inbox]]]:
    return keyed(*[None] * number)


def door_of(plane: ZmqPlane) -> Door:
    assert plane._door is not None
    return plane._door


async def met(asker: ZmqPlane, plane: ZmqPlane, inbox: Inbox) -> ReplyTo:
    """Let a plane ask another, and return the way to answer it."""
    assert asker.send(plane.address, b"hello")
    await inbox.wait(1)
    route = inbox.packets[0][0]
    assert isinstance(route, bytes)
    return ReplyTo(route)


@contextmanager
def stranger(address: str, route: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A DEALER that keeps no manners, in a context of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if route:
            dealer.routing_id = route
        dealer.connect(address)
        yield dealer


async def check_alive(plane: ZmqPlane, inbox: Inbox, keys: KeysConfig | None = None) -> None:
    """Check that the listener still hears and answers newcomers."""
    known = len(inbox.packets)
    async with keyed(keys) as [(other, answers)]:
        assert other.send(plane.address, b"are you there?")
        await inbox.until(lambda: b"are you there?" in inbox.bodies[known:])
        route = next(origin for origin, data in inbox.packets[known:] if data == b"are you there?")
        assert plane.send(route, b"yes")
        await answers.wait(1)
        assert answers.packets == [(plane.address, b"yes")]


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://10.0.0.1:0", "tcp://eth0:0"])
async def test_listening_beyond_loopback_needs_consent(bind: str) -> None:
    with pytest.raises(ConfigError, match="allow_insecure"):
        ZmqPlane(bind, advertise="tcp://10.0.0.1:5555")


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
async def test_a_wildcard_needs_an_address_to_advertise(bind: str) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        ZmqPlane(bind, allow_insecure=True)
    with pytest.raises(ConfigError, match="wildcard"):
        ZmqPlane(bind, advertise=bind, allow_insecure=True)


@pytest.mark.parametrize("bind", ["", "127.0.0.1:0", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://127.0.0.1:70000"])
async def test_what_is_no_address_is_refused_by_name(bind: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as caught:
        ZmqPlane(bind)
    assert repr(bind) in str(caught.value)


async def test_the_advertised_address_gets_the_port_that_the_system_chose() -> None:
    inbox = Inbox()
    async with running(ZmqPlane("tcp://0.0.0.0:0", "tcp://127.0.0.1:0", allow_insecure=True), inbox) as plane:
        assert place(plane.address)[0] == "127.0.0.1"
        assert place(plane.address)[1] > 0
        await check_alive(plane, inbox)


async def test_a_port_in_use_and_a_foreign_interface_are_named() -> None:
    async with planes(1) as [(plane, inbox)]:
        for bind in (plane.address, "tcp://192.0.2.1:0"):
            other = ZmqPlane(bind, allow_insecure=True)
            with pytest.raises(BackendError) as caught:
                await other.start(Inbox())
            assert repr(str(bind)) in str(caught.value)
            assert not other.send(plane.address, b"never started")
            await other.aclose()
        await check_alive(plane, inbox)


# -- sending ---------------------------------------------------------------------------------------

NO_ADDRESSES = [
    "",
    "x",
    "tcp://",
    "tcp://:1",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:99999",
    "tcp://[::1:1",
    "tcp://*:5",
    "tcp://127.0.0.1:+5",
    "tcp://a\0b:1",
    "http://127.0.0.1:1",
    "ipc:///tmp/x",
    "inproc://x",
    "tcp://127.0.0.1:x",
]


class Names:
    """A name service that can be slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.now: dict[str, list[str]] = {}
        monkeypatch.setattr(edge, "getaddrinfo", self.ask)

    def ask(self, host: str, port: None, **_: object) -> list[Any]:
        self.asked.append(host)
        if host.startswith("slow") and not self.may_answer.wait(PATIENCE_S):
            raise AssertionError("nobody let it answer")
        if host.startswith("unknown"):
            raise OSError("no such name")
        if host in self.now:
            return [(2, 1, 6, "", (number, 0)) for number in self.now[host]]
        if host.startswith("both"):
            return [(10, 1, 6, "", ("::1", 0, 0, 0)), (2, 1, 6, "", ("127.0.0.1", 0))]
        return [(2, 1, 6, "", ("127.0.0.1", 0))]


async def test_a_name_that_resolves_slowly_delays_no_other_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would ask in its one thread: one such address in params stopped a rank's whole control plane."""
    names = Names(monkeypatch)
    async with planes(2) as [(a, at_a), (b, at_b)]:
        slow = Address(b.address.replace("127.0.0.1", "slow.example"))
        assert a.send(slow, b"first")
        assert a.send(slow, b"second")
        for _ in range(20):
            a.send(slow, b"more than is kept")
        assert a.send(b.address, b"by number")
        await at_b.wait(1)
        assert at_b.packets[0][1] == b"by number"
        assert a.refusal(slow) == ""
        names.may_answer.set()
        await at_b.wait(1 + edge.MAX_UNSENT)
        assert [x[1] for x in at_b.packets[1:3]] == [b"first", b"second"]
        assert a.send(slow, b"known now")
        await at_b.wait(2 + edge.MAX_UNSENT)
        assert names.asked == ["slow.example"]
        await check_alive(a, at_a)


async def test_an_unknown_name_is_told_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    async with planes(1) as [(plane, inbox)]:
        address = Address("tcp://unknown.example:5555")
        assert plane.send(address, b"lost")
        await inbox.idle_until(lambda: bool(plane.refusal(address)))
        assert "no resolver of this host knows the name 'unknown.example'" in plane.refusal(address)
        assert not plane.send(address, b"lost, too")
        assert names.asked == ["unknown.example"]
        monkeypatch.setattr(edge, "NAMED_S", 0.0)
        assert plane.refusal(address) == "", "that was a while ago, and it may be known by now"
        plane.send(address, b"asked anew")
        await inbox.idle_until(lambda: len(names.asked) == 2)


async def test_a_name_of_both_kinds_is_taken_as_ipv4_and_is_good_until_another_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though names that are asked for slowly take all the room there is for asking."""
    names = Names(monkeypatch)
    async with planes(2) as [(a, _), (b, at_b)]:
        both = Address(b.address.replace("127.0.0.1", "both.example"))
        a.send(both, b"first")
        await at_b.wait(1)
        monkeypatch.setattr(edge, "NAMED_S", 0.0)
        for n in range(edge.MAX_RESOLVING):
            a.send(Address(f"tcp://slow{n}.example:5555"), b"x")
        await at_b.idle_until(lambda: len(a._resolving) == edge.MAX_RESOLVING)
        a.disconnect(both)
        assert a.send(both, b"second")
        await at_b.wait(2)
        names.may_answer.set()


async def test_an_engine_with_another_address_now_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that starts again has its name, and another address; libzmq asks the old one for ever."""
    names = Names(monkeypatch)
    monkeypatch.setattr(edge, "NAMED_S", 0.0)
    async with planes(1) as [(asker, _)]:
        inboxes = [Inbox(), Inbox()]
        first = ZmqPlane("tcp://127.0.0.2:0")
        await first.start(inboxes[0])
        address = Address(first.address.replace("127.0.0.2", "pod.example"))
        names.now["pod.example"] = ["127.0.0.2", "127.0.0.9"]
        asker.send(address, b"one")
        await inboxes[0].wait(1)
        link = asker._links[address]
        names.now["pod.example"].reverse()  # as services do that spread those who ask
        asked = len(names.asked)
        await inboxes[0].idle_until(lambda: asker.send(address, b"two") and len(names.asked) > asked)
        await inboxes[0].idle_until(lambda: not asker._resolving)
        assert asker._links[address] is link
        await first.aclose()
        second = ZmqPlane(first.address.replace("127.0.0.2", "127.0.0.3"))
        await second.start(inboxes[1])
        names.now["pod.example"] = ["127.0.0.3"]
        await inboxes[1].idle_until(lambda: asker.send(address, b"three") and bool(inboxes[1].packets))
        await second.aclose()


async def test_a_name_that_could_not_be_asked_for_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch)
    async with planes(2) as [(a, _), (b, at_b)]:
        address = Address(b.address.replace("127.0.0.1", "pod.example"))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_more_threads)
            assert not a.send(address, b"lost")
        a.send(address, b"first")
        await at_b.wait(1)
        a.disconnect(address)
        monkeypatch.setattr(edge, "NAMED_S", 0.0)
        monkeypatch.setattr(edge, "getaddrinfo", no_more_threads)
        a.send(address, b"second, as what it was is good until another is known")
        await at_b.idle_until(lambda: not a._resolving)
        await at_b.wait(2)


def no_more_threads(*_: object) -> None:
    raise RuntimeError("can't start new thread")


async def test_a_host_is_named_by_where_its_link_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of one host, and addresses of one IPv6 network, are made up at will."""
    Names(monkeypatch)
    async with planes(1) as [(plane, inbox)]:
        for address, host in (
            ("tcp://one.example:9", "127.0.0.1"),
            ("tcp://other.example:9", "127.0.0.1"),
            ("tcp://127.0.0.2:9", "127.0.0.2"),
            ("tcp://[2001:db8:0:1::2]:9", "2001:db8:0:1::/64"),
            ("tcp://[2001:db8:0:1:f::3]:9", "2001:db8:0:1::/64"),
        ):
            assert plane.host(Address(address)) == "", "nobody was asked there"
            plane.send(Address(address), b"x")
            await inbox.idle_until(lambda: not plane._unlinked)
            assert plane.host(Address(address)) == host


async def test_names_under_way_and_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    monkeypatch.setattr(edge, "MAX_NAMES", 20)
    monkeypatch.setattr(edge, "MAX_RESOLVING", 16)
    async with planes(1) as [(plane, inbox)]:
        for n in range(100):
            plane.send(Address(f"tcp://slow{n}.example:5555"), b"x")
        assert len(plane._resolving) == edge.LINKS, "each look-up is a thread to start"
        await inbox.idle_until(lambda: not plane._put_off)
        await inbox.idle_until(lambda: len(names.asked) == edge.MAX_RESOLVING)
        assert len(plane._resolving) == len(plane._unlinked) == edge.MAX_RESOLVING
        plane.disconnect(Address("tcp://slow0.example:5555"))
        assert len(plane._unlinked) == edge.MAX_RESOLVING - 1
        names.may_answer.set()
        await inbox.idle_until(lambda: not plane._resolving)
        for n in range(100, 130):
            plane.send(Address(f"tcp://known{n}.example:5555"), b"x")
            await inbox.idle_until(lambda: not plane._unlinked)
        assert len(plane._numbers) == 20
        await check_alive(plane, inbox)


async def test_of_many_endpoints_a_few_are_connected_to_in_a_turn_and_descriptors_are_counted_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client names endpoints in params, and each link takes the loop half a millisecond."""
    made, counted, connect, count = list[str](), list[int](), zmq.Socket.connect, door.free_files

    def note(one: zmq.Socket[bytes], address: str) -> None:
        made.extend([address] * address.startswith("tcp:"))
        connect(one, address)

    def count_files() -> int:
        counted.append(count())
        return counted[-1]

    monkeypatch.setattr(zmq.Socket, "connect", note)
    monkeypatch.setattr(edge, "free_files", count_files)
    monkeypatch.setattr(edge, "LINKS_S", 0.0)
    monkeypatch.setattr(edge, "COUNT_FILES_S", PATIENCE_S)
    async with planes(2) as [(a, at_a), (b, at_b)]:
        made.clear()
        counted.clear()
        assert a.send(b.address, b"first")
        invented = [Address(f"tcp://127.1.{n // 100}.{n % 100 + 1}:9") for n in range(300)]
        assert all(a.send(each, b"hello") for each in invented)
        assert (len(made), len(a._links), a.statistics()["links"]) == (edge.LINKS, edge.LINKS, edge.LINKS)
        assert [a.send(invented[-1], b"more") for _ in range(edge.MAX_UNSENT)] == [True] * (edge.MAX_UNSENT - 1) + [
            False
        ]
        for each in invented[:100]:
            a.disconnect(each)
        most, last = 0, len(made)
        while a._put_off:
            await anyio.lowlevel.checkpoint()
            most, last = max(most, len(made) - last), len(made)
        assert most == edge.LINKS
        assert set(made[edge.LINKS :]) == set(invented[100:]), "whoever gave up waits for nothing"
        assert len(counted) == 1
        await at_b.wait(1)
        await check_alive(a, at_a)
        for each in invented:
            a.disconnect(each)
        assert len(a._unlinked) == len(a._put_off) == 0
        far = (Address(f"tcp://127.2.{n // 100}.{n % 100 + 1}:9") for n in range(edge.MAX_UNLINKED + 100))
        assert [a.send(each, b"hello") for each in far].count(False) >= 100 - edge.LINKS


async def test_addresses_that_cannot_be_are_dropped_and_counted() -> None:
    async with planes(1) as [(plane, inbox)]:
        for address in NO_ADDRESSES:
            assert not plane.send(Address(address), b"lost"), address
        counts = plane.statistics()
        assert counts["bad_address"] == counts["dropped_out"] == len(NO_ADDRESSES)
        assert counts["links"] == counts["packets_out"] == 0
        await check_alive(plane, inbox)


async def test_a_lone_surrogate_in_an_address_is_dropped_like_any_nonsense() -> None:
    # `json.loads` makes such text, so a router can bring it.
    async with planes(1) as [(plane, _)]:
        # Nothing may keep a traceback: it would hold an open socket, for which closing waits for ever.
        try:
            outcome = str(plane.send(Address("tcp://\ud800:1"), b"lost"))
        except UnicodeEncodeError as exc:
            outcome = repr(exc)
    assert outcome == "False"


async def test_answers_to_unknown_routes_are_dropped_and_counted() -> None:
    async with planes(2) as [(a, at_a), (b, at_b)]:
        assert a.send(b.address, b"hello")
        await at_b.wait(1)
        for route in (b"", b"nobody", b"\0" * 5, b"x" * 300):
            assert not b.send(ReplyTo(route), b"lost")
        assert b.statistics()["dropped_out"] == 4
        # A refused answer leaves nothing behind in the socket that the next one would be joined to.
        assert b.send(at_b.packets[0][0], b"answer")
        await at_a.wait(1)
        assert at_a.packets == [(b.address, b"answer")]


async def test_a_full_queue_drops_and_counts() -> None:
    # Listens, but never speaks ZMQ, so nothing is ever taken from the queue.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with planes(1) as [(plane, _)]:
            address = Address(f"tcp://127.0.0.1:{mute.getsockname()[1]}")
            sent = [plane.send(address, b"x") for _ in range(edge.QUEUE + 10)]
            assert sent == [True] * edge.QUEUE + [False] * 10
            counts = plane.statistics()
            assert (counts["packets_out"], counts["dropped_out"]) == (edge.QUEUE, 10)


async def test_a_packet_reaches_a_listener_that_binds_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    inbox = Inbox()
    async with planes(1) as [(plane, _)]:
        assert plane.send(Address(f"tcp://127.0.0.1:{port}"), b"early")
        async with running(ZmqPlane(f"tcp://127.0.0.1:{port}"), inbox):
            await inbox.wait(1)
            assert inbox.bodies == [b"early"]


@pytest.mark.slow
async def test_ten_thousand_packets_arrive_in_order_both_ways_at_once() -> None:
    number, stride = 10_000, 500
    async with planes(2) as [(a, at_a), (b, at_b)]:
        for start in range(0, number, stride):
            for i in range(start, start + stride):
                assert a.send(b.address, b"%d" % i)
                assert b.send(a.address, b"%d" % i)
            await at_a.wait(start + stride)
            await at_b.wait(start + stride)
        expected = [b"%d" % i for i in range(number)]
        assert at_a.bodies == at_b.bodies == expected
        assert a.statistics()["packets_in"] == a.statistics()["packets_out"] == number


async def test_a_plane_that_has_just_started_has_counted_nothing() -> None:
    async with planes(1) as [(plane, _)]:
        assert {name for name, count in plane.statistics().items() if count} == set()
        assert plane.statistics().keys() >= {"packets_in", "packets_out", "links"}


async def test_a_burst_longer_than_a_batch_is_read_to_its_end() -> None:
    # ZMQ's descriptor announces it once; whoever stops early hears nothing more.
    number = 641
    async with planes(2) as [(a, _), (b, at_b)]:
        for i in range(number):
            assert a.send(b.address, b"%d" % i)
        await at_b.wait(number)
        assert at_b.bodies == [b"%d" % i for i in range(number)]


async def test_answers_sent_while_packets_arrive_lose_no_wake_up() -> None:
    async with planes(2) as [(a, _), (b, _)]:
        done = asyncio.Event()

        def bounce(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
            assert b.send(origin, data)

        def again(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
            if int(data) == 0:
                done.set()
            else:
                assert a.send(b.address, b"%d" % (int(data) - 1))

        b._on_packet, a._on_packet = bounce, again
        assert a.send(b.address, b"2000")
        with anyio.fail_after(PATIENCE_S):
            await done.wait()


# -- hostile bytes ---------------------------------------------------------------------------------


async def test_packets_of_the_wrong_number_of_frames_are_dropped_and_counted() -> None:
    async with planes(1) as [(plane, inbox)]:
        with stranger(plane.address) as dealer:
            for frames in ([b"", b"with a delimiter"], [b"a", b"b", b"c"], [b"x"] * 1000):
                dealer.send_multipart(frames)
            dealer.send(b"well made")
            await inbox.wait(1)
            assert inbox.bodies == [b"well made"]
            assert plane.statistics()["dropped_frames"] == 3
        await check_alive(plane, inbox)


async def test_an_answer_of_many_frames_is_dropped_and_counted() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with planes(1) as [(plane, inbox)]:
            assert plane.send(Address(f"tcp://127.0.0.1:{port}"), b"ask")
            identity, _ = await anyio.to_thread.run_sync(router.recv_multipart)
            router.send_multipart([identity, b"", b"two frames"])
            router.send_multipart([identity, b"one frame"])
            await inbox.wait(1)
            assert inbox.bodies == [b"one frame"]
            assert plane.statistics()["dropped_frames"] == 1


@pytest.mark.parametrize("size", [MAX_REQUEST_PACKET + 1, pytest.param(100 * 1024 * 1024, marks=pytest.mark.slow)])
async def test_a_frame_beyond_the_limit_never_arrives(size: int) -> None:
    async with planes(1) as [(plane, inbox)]:
        with stranger(plane.address) as dealer, dealer.get_monitor_socket() as monitor:
            dealer.send(bytes(size))

            def wait_cut_off() -> None:
                monitor.rcvtimeo = int(PATIENCE_S * 1000)
                while struct.unpack("=HI", monitor.recv_multipart()[0])[0] != zmq.EVENT_DISCONNECTED:
                    pass

            await anyio.to_thread.run_sync(wait_cut_off)
            dealer.disable_monitor()
        await check_alive(plane, inbox)
        assert inbox.bodies == [b"are you there?"]


async def test_a_packet_of_just_the_limit_arrives() -> None:
    async with planes(2) as [(a, at_a), (b, at_b)]:
        assert a.send(b.address, bytes(MAX_REQUEST_PACKET))
        await at_b.wait(1)
        assert at_b.bodies == [bytes(MAX_REQUEST_PACKET)]
        # An answer may carry a whole layout.
        assert b.send(at_b.packets[0][0], bytes(MAX_PACKET))
        await at_a.wait(1)
        assert at_a.bodies == [bytes(MAX_PACKET)]


READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
RAW = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "half a greeting": GREETING[:20],
    "no handshake": GREETING + b"\0\x05hello",
    "endless command": GREETING + b"\x06" + b"\xff" * 8,
    "endless frame": GREETING + READY + b"\x02" + b"\x7f" + b"\xff" * 7 + b"x" * 100,
    "bad metadata": GREETING + b"\x04\x10\x05READY\xff" + b"x" * 9,
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
async def test_raw_bytes_on_the_port_do_not_disturb(data: bytes) -> None:
    async with planes(1) as [(plane, inbox)]:
        stream = await anyio.connect_tcp(*place(plane.address))
        async with stream:
            if data.startswith(GREETING + READY):
                # Only after the handshake is it a frame.
                await stream.send(GREETING + READY)
                answer = b""
                while len(answer) < 64 + 2 or len(answer) < 64 + 2 + answer[65]:
                    answer += await stream.receive()
                data = data.removeprefix(GREETING + READY)
            await stream.send(data)
            await check_alive(plane, inbox)
        assert inbox.bodies == [b"are you there?"]


async def test_a_stranger_cannot_take_over_a_known_route() -> None:
    async with planes(2) as [(a, at_a), (b, at_b)]:
        route = await met(a, b, at_b)
        with stranger(b.address, route) as thief:
            thief.send(b"stolen")
            await at_b.wait(2)
            assert at_b.packets[1][0] != route
            assert b.send(route, b"for a only")
            await at_a.wait(1)
            assert at_a.bodies == [b"for a only"]


class Raw:
    """A peer that speaks ZMTP by hand, while the event loop is away."""

    def __init__(self, address: str, patience_s: float = PATIENCE_S, room: int = 0) -> None:
        self.socket = socket.create_connection(place(address), patience_s)
        if room:  # of its kernel, for what it does not read
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        self.greet(READY)

    def greet(self, ready: bytes) -> None:
        """Shake hands, one step after the other: libzmq hangs up on a command that comes with the greeting."""
        self.socket.sendall(GREETING)
        answer = b""
        while len(answer) < 64:
            answer += self.socket.recv(64 - len(answer))
        self.socket.sendall(ready)
        while len(answer) < 64 + 2 or len(answer) < 64 + 2 + answer[65]:
            answer += self.socket.recv(4096)

    def is_cut(self, endless: bytes, most: int) -> bool:
        """Send until the other side ends the connection."""
        try:
            for _ in range(most // len(endless)):
                self.socket.sendall(endless)
        except OSError:
            return True
        return False

    def leave_rudely(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


async def test_a_peer_cannot_choose_its_route() -> None:
    async with planes(2) as [(a, _), (b, at_b)]:
        route = await met(a, b, at_b)
        last = int.from_bytes(route[1:], "big")
        for i in range(1, 9):
            # The ids that libzmq would give next. It aborts when it meets one of them.
            with stranger(b.address, b"\0" + (last + 8 + i).to_bytes(4, "big")) as dealer:
                dealer.send(b"chosen")
                await at_b.wait(1 + i)
                assert at_b.packets[i][0] == b"\0" + (last + i).to_bytes(4, "big")
        await check_alive(b, at_b)


async def test_a_peer_that_leaves_while_much_is_unread_ends_nothing() -> None:
    async with planes(1) as [(plane, inbox)]:
        for _ in range(3):
            raw = Raw(plane.address)
            ping = b"\4\7\4PING\0\1"
            raw.socket.sendall((b"\0\1x" * 3 + ping) * 1000)
            raw.leave_rudely()
        await check_alive(plane, inbox)


async def test_a_message_of_many_parts_holds_up_no_other_and_its_connection_is_not_heard_for_a_while() -> None:
    async with planes(1) as [(plane, inbox)]:
        raw = Raw(plane.address)
        raw.socket.sendall(b"\1\0" * 300_000 + b"\0\0")
        turns = asyncio.get_running_loop().create_task(_count_turns(inbox))
        await check_alive(plane, inbox)
        await inbox.idle_until(lambda: plane.statistics().get("muted") == 1)
        began = time.monotonic()
        raw.socket.sendall(b"\0\1x")
        await inbox.wait(2)
        assert time.monotonic() - began > door.MUTE_S - door.LOOK_S - 0.5
        turns.cancel()
        raw.socket.close()
        assert inbox.bodies == [b"are you there?", b"x"]


async def test_a_connection_that_sends_far_too_much_is_not_heard_for_a_while_and_others_are() -> None:
    plane, inbox = ZmqPlane(LOOPBACK), Inbox()

    def on_packet(origin: Address | ReplyTo, data: bytes, principal: str) -> bool:
        inbox(origin, data, principal)
        return data == b"flood"

    async with running(plane, on_packet):
        keeper, flood, good = door_of(plane), Raw(plane.address), Raw(plane.address)
        await inbox.idle_until(lambda: len(keeper.connections) == 2)
        flood.socket.sendall(b"\0\5flood")
        await inbox.wait(1)
        assert plane.statistics()["muted"] == 1
        flood.socket.sendall(b"\0\5later")
        good.socket.sendall(b"\0\4good")
        await inbox.wait(2)
        assert inbox.bodies == [b"flood", b"good"]
        for raw in (flood, good):
            raw.socket.close()


async def test_where_the_kernel_has_no_filters_the_connection_of_a_message_of_many_parts_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drop(one: socket.socket, is_on: bool) -> None:
        raise OSError(errno.ENOPROTOOPT, "no such option")

    monkeypatch.setattr(door, "_drop", drop)
    async with planes(1) as [(plane, inbox)]:
        raw = Raw(plane.address)
        raw.socket.sendall(b"\1\0" * 100 + b"\0\0")
        await inbox.idle_until(lambda: plane.statistics()["connections.closed"] == 1)
        with contextlib.suppress(ConnectionResetError):
            assert raw.socket.recv(1) == b""
        raw.socket.close()
        await check_alive(plane, inbox)


async def _count_turns(inbox: Inbox) -> None:
    while True:
        await asyncio.sleep(0)
        inbox.changed.set()


async def test_a_message_that_never_ends_is_cut_off_while_the_loop_is_away() -> None:
    async with planes(1) as [(plane, inbox)]:
        raw = Raw(plane.address)
        assert raw.is_cut(b"\1\0" * 50_000, most=200 * door.MAX_AHEAD)
        raw.socket.close()
        assert plane.statistics()["cut.unread"] == 1
        await check_alive(plane, inbox)


async def test_small_messages_without_end_are_cut_off_as_well() -> None:
    async with planes(1) as [(plane, inbox)]:
        # Each takes three bytes of the connection, and 64 of memory.
        raw, sent = Raw(plane.address), threading.Event()

        def flood() -> bool:
            was_cut = raw.is_cut(b"\0\1x" * 10_000, most=200 * door.MAX_AHEAD)
            sent.set()
            return was_cut

        flooding = asyncio.create_task(anyio.to_thread.run_sync(flood))
        await inbox.wait(1)  # the loop takes what it can, and is not as fast; then it is away
        sent.wait(PATIENCE_S)
        inbox.packets.clear()
        assert await flooding
        raw.socket.close()
        assert plane.statistics()["cut.unread"] == 1


async def test_what_ended_connections_leave_behind_is_bounded_while_the_loop_is_away() -> None:
    async with planes(1) as [(plane, _)]:
        left = (b"\0\xc8" + bytes(200)) * (door.MAX_AHEAD // 300)

        def come_and_go() -> bool:
            try:
                for _ in range(40):
                    raw = Raw(plane.address, patience_s=1.0)
                    raw.socket.sendall(left)
                    raw.socket.shutdown(socket.SHUT_WR)
                    raw.socket.recv(1)
                    raw.socket.close()
            except OSError:
                return True
            return False

        assert come_and_go()  # the kernel takes no more connections
        assert plane.statistics()["shut"] == 1
        # The loop is back. A newcomer's first try was not heard, and the kernel tries again after a second.
        raw = await anyio.to_thread.run_sync(Raw, plane.address)
        raw.socket.close()


async def test_a_quiet_peer_has_its_turn_while_another_has_a_thousand_packets_waiting() -> None:
    async with planes(3) as [(loud, _), (quiet, _), (plane, inbox)]:
        # Both connections are known before the flood.
        assert loud.send(plane.address, b"loud")
        assert quiet.send(plane.address, b"quiet")
        await inbox.wait(2)
        connections = door_of(plane).connections.values()
        await inbox.idle_until(lambda: len(connections) == 2 and all(x.arrived and x.quiet for x in connections))
        arrived = sum(each.arrived for each in connections)
        for _ in range(1000):
            loud.send(plane.address, b"loud")
        quiet.send(plane.address, b"now")
        # Before the loop takes any of them, all are there.
        ends = time.monotonic() + PATIENCE_S
        while sum(each.arrived for each in connections) < arrived + 1000 * (2 + 4) + 2 + 3:
            assert time.monotonic() < ends
        await inbox.until(lambda: b"now" in inbox.bodies)
        assert inbox.bodies.index(b"now") < 500
        await inbox.idle_until(lambda: plane.statistics()["packets_in"] == 1003)


@pytest.mark.parametrize("parts", [b"\0\5hello", b"\1\0\1\0\0\0"])
async def test_a_peer_of_an_older_protocol_is_not_heard_and_stops_nothing(parts: bytes) -> None:
    async with planes(1) as [(plane, inbox)]:
        # libzmq takes it for ZMTP 2.0, and does not say where its messages come from.
        raw = socket.create_connection(place(plane.address))
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\1\5\0\0" + parts)
        await inbox.idle_until(lambda: plane.statistics().get("dropped_frames") == 1)
        await check_alive(plane, inbox)
        raw.close()
        assert inbox.bodies == [b"are you there?"]


async def test_principals_take_turns_and_so_do_their_connections() -> None:
    waiting = edge._Waiting()
    for principal, route in (("many", b"1"), ("many", b"1"), ("many", b"2"), ("many", b"3"), ("one", b"4")):
        assert waiting.put(principal, ReplyTo(route), b"packet")
    assert [waiting.take()[1] for _ in range(5)] == [b"1", b"4", b"2", b"3", b"1"]
    assert not waiting
    assert [waiting.put("many", ReplyTo(b"1"), b"") for _ in range(edge.MAX_WAITING + 1)].count(False) == 1
    # A principal's connections share its room; half of it is for those of which nothing waits.
    assert waiting.put("many", ReplyTo(b"2"), bytes(edge.MAX_WAITING_ALL // 2))
    assert not waiting.put("many", ReplyTo(b"2"), b"packet")
    assert waiting.put("many", ReplyTo(b"3"), b"packet")
    assert waiting.put("one", ReplyTo(b"4"), b"packet")


def test_what_was_taken_makes_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packet = bytes(edge.MAX_WAITING_ALL // 8)
    monkeypatch.setattr(edge, "MAX_WAITING_TOTAL", 2 * edge.MAX_WAITING_ALL)
    waiting = edge._Waiting()
    for _ in range(50):
        assert waiting.put("one", ReplyTo(b"1"), packet)
        assert waiting.put("one", ReplyTo(b"1"), packet)
        assert waiting.take()[2] == packet
        assert waiting.take()[2] == packet
        assert not waiting
    assert waiting.put("one", ReplyTo(b"1"), packet)
    for _ in range(50):  # one of the principal's waits all the time
        assert waiting.put("one", ReplyTo(b"1"), packet)
        assert waiting.take()[2] == packet
    assert waiting.take()[2] == packet
    assert not waiting
    # All principals share some room; half of it is for those of whom nothing waits.
    count = 0
    while waiting.put(f"principal {count // 3}", ReplyTo(b"%d" % count), packet):
        count += 1
    assert count == 8 - 1
    more = [waiting.put(f"another {n}", ReplyTo(b"x"), packet) for n in range(10)]
    assert more == [True] * 8 + [False] * 2
    while waiting:
        waiting.take()
    assert waiting._total == waiting._bytes.total() == 0


@asynccontextmanager
async def reading(raws: list[Raw]) -> AsyncIterator[None]:
    """Read what peers are sent, in a thread."""
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for each in select.select([raw.socket for raw in raws], [], [], 0.01)[0]:
                each.recv(1 << 20)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, read)
        try:
            yield
        finally:
            done.set()
    for raw in raws:
        raw.socket.close()


async def ask(plane: ZmqPlane, inbox: Inbox, room: int = 4096) -> tuple[Raw, ReplyTo]:
    """Connect a peer that says one thing and reads nothing."""
    number, keeper = len(inbox.packets), door_of(plane)
    num_seen = len(keeper.connections)
    raw = await anyio.to_thread.run_sync(partial(Raw, plane.address, room=room))
    # The door has seen it, so what it is sent is counted.
    await inbox.idle_until(lambda: len(keeper.connections) > num_seen)
    raw.socket.sendall(b"\0\1x")
    await inbox.wait(number + 1)
    return raw, ReplyTo(bytes(inbox.packets[-1][0]))  # type: ignore[arg-type]


async def test_bytes_that_libzmq_read_before_the_door_looked_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LOOK_S", 1e6)
    monkeypatch.setattr(door, "REST_S", 1e6)
    async with planes(1) as [(plane, inbox)]:
        raw, _ = await ask(plane, inbox)
        keeper, entered, leave = door_of(plane), threading.Event(), threading.Event()
        (connection,) = keeper.connections.values()
        connection.look()
        take, before = keeper._take, connection.arrived
        await inbox.idle_until(lambda: not keeper._busy)

        def late() -> Iterable[door.Opened]:
            entered.set()
            assert leave.wait(PATIENCE_S)
            return take()

        keeper._take = late
        keeper.ring()
        assert entered.wait(PATIENCE_S)
        raw.socket.sendall(b"\0\1x")
        await inbox.wait(2)
        leave.set()
        await inbox.idle_until(lambda: connection.arrived == before + 3)
        raw.socket.close()


async def test_answers_that_a_peer_does_not_read_are_bounded_in_bytes_until_it_has_read() -> None:
    packet, fit = bytes(65_536), edge.MAX_UNREAD // 65_536
    async with planes(1) as [(plane, inbox)]:
        raw, route = await ask(plane, inbox)
        sent = [plane.send(route, packet) for _ in range(4 * fit)]
        assert not sent[-1]
        await check_alive(plane, inbox)  # of the same principal
        sent += [plane.send(route, packet) for _ in range(4 * fit)]
        assert not sent[-1]
        # What the peer's kernel takes, sooner or later, is a few packets at most.
        assert fit - 1 <= sent.count(True) <= fit + 4
        assert plane.statistics()["dropped_unread"] == plane.statistics()["dropped_out"] == sent.count(False)
        plane._look_at = float("inf")  # it need not wait for a look at all
        async with reading([raw]):
            await inbox.idle_until(lambda: plane.send(route, packet))


async def test_bytes_that_all_peers_together_do_not_read_are_bounded_and_a_peer_that_reads_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packet = bytes(65_536)
    monkeypatch.setattr(edge, "MAX_UNREAD_TOTAL", 20 * len(packet))
    numbers = itertools.count()
    monkeypatch.setattr(ZmqPlane, "_principal", lambda self, frame: f"somebody {next(numbers)}")
    async with planes(1) as [(plane, inbox)]:
        peers = [await ask(plane, inbox) for _ in range(4)]
        assert len(set(inbox.principals)) == 4
        for _, route in peers[:3]:
            while plane.send(route, packet):
                pass
        assert 9 * len(packet) <= plane._unread_all <= 14 * len(packet)
        assert plane.send(peers[3][1], packet)
        async with reading([raw for raw, _ in peers]):
            for _, route in peers:
                await inbox.idle_until(partial(plane.send, route, packet))


async def test_a_peer_that_reads_too_little_is_told_from_one_that_has_gone() -> None:
    async with planes(1) as [(plane, inbox)]:
        raw, route = await ask(plane, inbox)
        while plane.send(route, bytes(65_536)):
            pass
        assert plane.refusal(route) == ""
        raw.leave_rudely()
        await inbox.idle_until(lambda: not plane.send(route, b"x") and plane.refusal(route) != "")
        assert plane.refusal(route) == "the connection has ended"


async def test_what_is_ahead_of_the_loop_costs_one_connection_though_the_loop_goes_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "MAX_AHEAD_ALL", 250_000)
    cut, real = threading.Event(), Door._cut

    def slowly(self: Door, connection: Connection, cause: str) -> None:
        for other in self.connections.values():
            other.delivered = other.arrived  # as the loop counts while a system call lets it
        real(self, connection, cause)
        cut.set()

    monkeypatch.setattr(Door, "_cut", slowly)
    async with planes(1) as [(plane, inbox)]:
        raws = [Raw(plane.address) for _ in range(4)]
        for raw in raws:
            raw.socket.sendall((b"\0\xc8" + bytes(200)) * 500)
        assert cut.wait(PATIENCE_S)  # and the loop stands still
        await check_alive(plane, inbox)
        assert plane.statistics()["cut.unread"] <= 2
        for raw in raws:
            raw.socket.close()


async def test_a_connection_that_cannot_be_watched_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def dup(fd: int) -> int:
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "too many open files")

    async with planes(1) as [(plane, inbox)]:
        keeper = door_of(plane)
        await inbox.idle_until(lambda: keeper._listener is not None)
        monkeypatch.setattr(os, "dup", dup)
        with socket.create_connection(place(plane.address), PATIENCE_S) as one:
            await inbox.idle_until(lambda: plane.statistics().get("cut.unwatched", 0) == 1)
            while one.recv(4096):
                pass
        await check_alive(plane, inbox)


async def test_an_answer_larger_than_the_bound_is_sent_to_a_peer_that_reads() -> None:
    async with planes(1) as [(plane, inbox)]:
        raw, route = await ask(plane, inbox)
        assert plane.send(route, b"small")
        assert plane.send(route, bytes(MAX_PACKET // 2))
        assert not plane.send(route, b"more")
        raw.socket.close()


async def test_answers_that_the_connections_of_one_principal_do_not_read_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packet = bytes(65_536)
    monkeypatch.setattr(edge, "MAX_UNREAD_ALL", 40 * len(packet))
    async with planes(1) as [(plane, inbox)]:
        peers = [await ask(plane, inbox) for _ in range(4)]
        for _, route in peers[:3]:
            plane._look_at = 0.0  # as if the time between two looks were over
            while plane.send(route, packet):
                pass
        left = [c.look_unread() for c in door_of(plane).connections.values()]
        assert max(left) <= edge.MAX_UNREAD
        # Half of the room is taken, and the other half is for those that have read everything.
        assert sum(left) <= edge.MAX_UNREAD_ALL // 2 + 2 * len(packet)
        assert plane.send(peers[3][1], packet)
        assert not any(plane.send(route, packet) for _, route in peers[:3])
        async with reading([raw for raw, _ in peers]):
            for _, route in peers:
                await inbox.idle_until(partial(plane.send, route, packet))


async def test_a_listener_that_answers_without_end_is_cut_off() -> None:
    def serve(listener: socket.socket) -> bool:
        raw = Raw.__new__(Raw)
        raw.socket, _ = listener.accept()
        raw.socket.settimeout(PATIENCE_S)
        raw.greet(READY.replace(b"DEALER", b"ROUTER"))
        with raw.socket:
            return raw.is_cut(b"\1\0" * 50_000, most=100 * door.MAX_LINK_AHEAD)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with planes(1) as [(plane, inbox)]:
            assert plane.send(Address(f"tcp://127.0.0.1:{listener.getsockname()[1]}"), b"hello")
            assert await anyio.to_thread.run_sync(serve, listener)
            await inbox.idle_until(lambda: plane.statistics().get("cut.unread") == 1)
            await check_alive(plane, inbox)


def poll_fails(keeper: door.Door) -> None:
    keeper._epoll.close()


def getsockopt_fails(keeper: door.Door) -> None:
    (connection,) = keeper.connections.values()
    connection.duplicate.close()


@pytest.mark.parametrize("break_it", [poll_fails, getsockopt_fails])
async def test_a_door_keeper_that_fails_ends_its_plane_loudly(
    break_it: Callable[[door.Door], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "QUIET_TICKS", 1 << 60)  # a connection from which something came is looked at for ever
    plane, inbox, refused = ZmqPlane(LOOPBACK), Inbox(), list[tuple[str, str]]()
    try:
        await plane.start(inbox, lambda *why: refused.append(why))
        raw = Raw(plane.address)
        raw.socket.sendall(b"\0\1x")
        await inbox.wait(1)
        keeper, route = plane._door, inbox.packets[0][0]
        assert keeper is not None
        with anyio.fail_after(PATIENCE_S):
            while not keeper._busy:  # libzmq may have read it before the keeper was told
                raw.socket.sendall(b"\0\1x")
                await anyio.lowlevel.checkpoint()
        break_it(keeper)
        keeper.ring()
        await inbox.idle_until(lambda: len(refused) > 0)
        [(cause, why)] = refused
        assert cause == "ended"
        # Whether Python or the kernel says that the descriptor is closed depends on where the thread was.
        causes = "ValueError|OSError" if break_it is poll_fails else "KeyError"
        assert re.search(f"door keeper failed: ({causes})", why)
        # Nothing is taken any more, and nothing sent.
        with raw.socket, contextlib.suppress(ConnectionResetError):
            assert raw.socket.recv(4096) == b""
        with pytest.raises(OSError, match="refused"):
            await anyio.to_thread.run_sync(socket.create_connection, place(plane.address))
        assert not plane.send(route, b"answer")
        async with planes(1) as [(other, _)]:
            assert not plane.send(other.address, b"question")
            assert plane.refusal(other.address) == why
        assert plane.statistics()["links"] == 0
    finally:
        with anyio.fail_after(PATIENCE_S):
            await plane.aclose()


async def test_an_engine_whose_control_plane_has_ended_says_so_and_takes_nothing_new() -> None:
    network, plane = SimNetwork(), ZmqPlane(LOOPBACK)
    sides = [
        Engine(EngineConfig(engine_id=name), memory(seed)[0], data=SimData(network, name), control=control)
        for seed, (name, control) in enumerate({"prefill": ZmqPlane(LOOPBACK), "decode": plane}.items())
    ]
    async with sides[0] as prefill, sides[1] as decode:
        group = PrefillRanks("prefill", [prefill.endpoint])
        never, later = (group.make_params(name, [(0, [3])], 16, written=True) for name in ("never", "later"))
        pull = asyncio.create_task(decode.pull("d1", [(0, [7])], never))
        await until(lambda: prefill.statistics().gauges["parked"] == 1)
        poll_fails(door_of(plane))
        door_of(plane).ring()
        with (
            anyio.fail_after(PATIENCE_S),
            pytest.raises(PullError, match=r"door keeper failed: (ValueError|OSError)") as failed,
        ):
            await pull
        assert failed.value.reason == "engine_closed"
        with pytest.raises(EngineClosed, match=r"cut off .* door keeper failed: (ValueError|OSError)"):
            await decode.pull("d2", [(0, [8])], later)
        assert decode.statistics().counters["internal_errors"] == 1
        assert "door keeper failed" in decode.observation.condition()[1]
        assert prefill.observation.condition() == ("running", "")


@pytest.mark.parametrize("is_late", [False, True])
async def test_connections_that_say_nothing_make_room_for_others(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load a packet may be handled before libzmq's word that there is a connection: it is no silent one."""
    may_watch, take = threading.Event(), ZmqPlane._take_events

    def late(plane: ZmqPlane, loop: asyncio.AbstractEventLoop) -> Iterator[door.Opened]:
        may_watch.wait(PATIENCE_S)
        return take(plane, loop)

    monkeypatch.setattr(door, "MAX_CONNECTIONS", 16)
    if is_late:
        monkeypatch.setattr(ZmqPlane, "_take_events", late)
    async with planes(2) as [(a, at_a), (b, at_b)]:
        assert a.send(b.address, b"early")
        await at_b.wait(1)
        may_watch.set()
        idle = [socket.create_connection(place(b.address)) for _ in range(20)]
        await at_b.idle_until(lambda: b.statistics().get("cut.too_many", 0) == 20 + 1 - 8)
        idle[0].settimeout(PATIENCE_S)
        while idle[0].recv(4096):
            pass
        assert b.send(at_b.packets[0][0], b"still there")
        await at_a.wait(1)
        await check_alive(b, at_b)
        for each in idle:
            each.close()


@asynccontextmanager
async def answering(places: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ZmqPlane, Inbox]]:
    """A listener with room for a few connections, which answers what is lawful."""
    monkeypatch.setattr(door, "MAX_CONNECTIONS", places)
    plane, inbox = ZmqPlane(LOOPBACK), Inbox()

    def on_packet(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        if data == b"a":
            assert plane.send(origin, b"yes")
        inbox(origin, data, principal)

    async with running(plane, on_packet):
        yield plane, inbox


async def enter(plane: ZmqPlane, inbox: Inbox, host: str, says: bytes) -> socket.socket:
    """Connect from an address, and once the door keeper has let that in, say something that is taken."""

    def num_accepted() -> int:
        return plane.statistics()["connections.accepted"]

    accepted, taken = num_accepted(), len(inbox.packets)
    one = socket.socket()
    one.settimeout(PATIENCE_S)
    one.bind((host, 0))
    with contextlib.suppress(OSError):  # it was not let in
        one.connect(place(plane.address))
    await inbox.idle_until(lambda: num_accepted() > accepted)
    with contextlib.suppress(OSError, EOFError):  # it was not let in
        one.sendall(GREETING)
        if says:
            _read(one, 64)
            one.sendall(READY)
            _read(one, _read(one, 2)[1])
            one.sendall(b"\0\1" + says)
            await inbox.wait(taken + 1)
    return one


def _read(one: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += one.recv(size - len(found)) or _left()
    return found


def _left() -> bytes:
    raise EOFError


@pytest.mark.parametrize("says", [b"", b"x", b"a"])
async def test_connections_of_many_hosts_take_no_place_from_a_host_that_was_answered(
    says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they say nothing, or rubbish, or what is lawful: the host with most is the honest one."""
    async with answering(16, monkeypatch) as (plane, inbox):
        honest = [await enter(plane, inbox, "127.0.0.1", b"a") for _ in range(4)]
        others = [await enter(plane, inbox, f"127.0.1.{n + 1}", says) for n in range(40)]
        await inbox.idle_until(lambda: plane.statistics().get("cut.too_many", 0) == 4 + 40 - 16)
        known = len(inbox.packets)
        for one in honest:
            one.sendall(b"\0\1a")
        await inbox.wait(known + 4)
        if says != b"a":
            honest.append(await enter(plane, inbox, "127.0.0.1", b"a"))
        assert inbox.bodies[known:] == [b"a"] * len(honest)
        for one in (*honest, *others):
            one.close()


async def test_hosts_that_took_all_places_give_one_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(16, monkeypatch) as (plane, inbox):
        takers = [await enter(plane, inbox, f"127.0.1.{n % 2}", b"a") for n in range(16)]
        late = [await enter(plane, inbox, f"127.0.2.{n + 1}", b"a") for n in range(4)]
        assert len(inbox.packets) == 20
        for one in (*takers, *late):
            one.close()


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_a_descriptor_that_is_closed_or_anothers_by_now_is_not_watched(is_accepted: bool) -> None:
    async with planes(1) as [(plane, inbox)]:
        keeper = door_of(plane)
        await inbox.idle_until(lambda: keeper._listener is not None)
        before = open_files()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
            number = other.fileno()
            keeper._on_opened(door.Opened(number, "tcp://127.0.0.1:9", is_accepted))
        keeper._on_opened(door.Opened(number, "tcp://127.0.0.1:9", is_accepted))
        assert not keeper.connections
        assert keeper.orphaned == 2 * door.UNSEEN * is_accepted
        assert open_files() <= before


async def test_connections_that_have_ended_leave_no_descriptor() -> None:
    async with planes(1) as [(plane, inbox)]:
        await check_alive(plane, inbox)
        await inbox.idle_until(lambda: plane.statistics()["connections.closed"] == 1)
        before = open_files()
        for i in range(1, 6):
            Raw(plane.address).leave_rudely()
            await inbox.idle_until(lambda i=i: plane.statistics()["connections.closed"] == 1 + i)  # type: ignore[misc]
        await inbox.idle_until(lambda: open_files() <= before)


def test_too_few_descriptors_are_told_before_libzmq_would_abort() -> None:
    code = (
        "import asyncio, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "from asynckv.edges.control.zmq import ZmqPlane\n"
        "asyncio.run(ZmqPlane('tcp://127.0.0.1:0').start(lambda *packet: None))"
    )
    done = python("-c", code, timeout_s=PATIENCE_S)
    assert done.returncode == 1
    assert "of 40 file descriptors are free" in done.stderr
    assert "ulimit -n" in done.stderr


def test_links_leave_descriptors_for_everybody_else() -> None:
    """Whoever names endpoints in params says how many links there are; libzmq aborts where it gets no descriptor."""
    code = """if 1:
        import asyncio, os, resource
        from asynckv.edges.control.zmq import ZmqPlane

        async def main():
            fds = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (fds + 400, fds + 400))
            plane, got = ZmqPlane("tcp://127.0.0.1:0"), asyncio.Event()
            await plane.start(lambda *packet: got.set())
            port = int(plane.address.rpartition(":")[2])
            others = [f"tcp://127.0.{i // 250}.{i % 250 + 1}:{port}" for i in range(1, 301)]
            for each in others:
                plane.send(each, b"hello")
            async with asyncio.timeout(20):
                while plane._put_off:
                    await asyncio.sleep(0.01)
            counts = plane.statistics()
            assert 50 < counts["links"] < 170, counts
            assert counts["refused.no_files"] == 300 - counts["links"]
            assert not plane.send(others[-1], b"hello")
            assert "ulimit -n" in plane.refusal(others[-1])
            for each in others[:20]:
                plane.disconnect(each)
            async with asyncio.timeout(20):
                while not plane.send(plane.address, b"hello"):
                    await asyncio.sleep(0.01)
                await got.wait()
            await plane.aclose()

        asyncio.run(main())"""
    done = python("-c", code, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr


# -- keys ------------------------------------------------------------------------------------------


class Keyring:
    """Keys of some engines that all authorize each other, and of strangers that nobody does."""

    def __init__(self, path: Path) -> None:
        self.path, self.authorized = path, path / "authorized"
        self.pairs: dict[str, KeyPair] = {}

    def make(self, name: str, is_authorized: bool = True) -> KeysConfig:
        pair = self.pairs[name] = make_pair()
        secret, public = write_pair(self.path / name, name, pair)
        self.authorized.mkdir(exist_ok=True)
        if is_authorized:
            self.admit(public)
        return KeysConfig(secret=secret, authorized=self.authorized)

    def admit(self, public: Path) -> None:
        """Add a key as files are to be added: whole, under its name."""
        copy = self.path / "copy"
        copy.write_bytes(public.read_bytes())
        copy.rename(self.authorized / public.name)


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


def rejected(plane: ZmqPlane) -> dict[str, int]:
    return {k: v for k, v in plane.statistics().items() if k.startswith("rejected.")}


async def test_engines_with_keys_talk_both_ways_and_name_their_keys(ring: Keyring) -> None:
    a_keys, b_keys = ring.make("a"), ring.make("b")
    async with keyed(a_keys, b_keys) as [(a, at_a), (b, at_b)]:
        assert b.address.endswith("#" + ring.pairs["b"].public.hex())
        for i in range(100):
            assert a.send(b.address, b"question %d" % i)
            assert b.send(a.address, b"counter-question %d" % i)
        await at_b.wait(100)
        await at_a.wait(100)
        assert at_b.bodies == [b"question %d" % i for i in range(100)]
        assert b.send(at_b.packets[0][0], b"answer")
        await at_a.wait(101)
        assert at_a.packets[-1] == (b.address, b"answer")
        assert rejected(a) == rejected(b) == {}
        await at_b.idle_until(lambda: b.statistics()["connections.admitted"] == 1)
        assert set(at_b.principals) == {f"key:{ring.pairs['a'].public.hex()}"}
        assert b.statistics()["connections.accepted"] == 1


async def test_nothing_readable_crosses_a_link_with_keys(ring: Keyring) -> None:
    a_keys, b_keys = ring.make("a"), ring.make("b")
    async with keyed(a_keys, b_keys) as [(a, at_a), (b, at_b)], Proxy(b.address) as tap:
        assert a.send(Address(tap.address), b"question" * 10)
        await at_b.wait(1)
        assert b.send(at_b.packets[0][0], b"metadata" * 10)
        await at_a.wait(1)
        assert b"metadata" not in tap.answered
        assert b"question" not in tap.asked
        assert len(tap.answered) > 80


ATTACKERS = {
    "no key": ("no_key", None, None),
    "an unlisted key": ("unlisted_key", "unlisted", "unlisted"),
    "a stolen public key": ("wrong_key", "listed", "unlisted"),
    "another listener in mind": ("wrong_key", "listed", "listed"),
}


@pytest.mark.parametrize("name", ATTACKERS)
async def test_a_peer_that_proves_no_listed_key_gets_nothing_and_is_counted_by_cause(ring: Keyring, name: str) -> None:
    cause, public, secret = ATTACKERS[name]
    victim_keys = ring.make("victim")
    ring.make("listed")
    ring.make("unlisted", is_authorized=False)
    async with keyed(victim_keys) as [(victim, inbox)], Proxy(victim.address) as tap:
        endpoint = tap.address.partition("#")[0]
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            if public is not None and secret is not None:
                dealer.curve_publickey = encode_z85(ring.pairs[public].public).encode()
                dealer.curve_secretkey = encode_z85(ring.pairs[secret].secret).encode()
                believed = "unlisted" if name == "another listener in mind" else "victim"
                dealer.curve_serverkey = encode_z85(ring.pairs[believed].public).encode()
            dealer.connect(endpoint)
            dealer.send(b"let me in")
            await inbox.idle_until(lambda: bool(rejected(victim)))
            assert not dealer.poll(0)
        assert set(rejected(victim)) == {f"rejected.{cause}"}
        assert inbox.packets == []
        # The greeting, a fresh key, and an error: no frame.
        assert tap.commands() <= HANDSHAKE_COMMANDS
        await check_alive(victim, inbox, ring.make("newcomer"))
        assert inbox.bodies == [b"are you there?"]
        assert victim.statistics()["packets_in"] == 1


RAW_ATTACKS = {
    "half a greeting, then away": (GREETING[:12], True, "no_key"),
    "another mechanism": (GREETING, False, "no_key"),
    "no command": (CURVE_GREETING + b"\0\x05hello", False, "handshake"),
    "a bad hello": (CURVE_GREETING + b"\x04\xc8\x05HELLO" + bytes(194), False, "handshake"),
    "an endless command": (CURVE_GREETING + b"\x06" + b"\x7f" + b"\xff" * 7, False, ""),
    "http": (RAW["http"], False, ""),
    "an old protocol": (b"\xff" + bytes(8) + b"\x7f\x01\x05\0\0", False, ""),
    "the oldest protocol": (b"\x01\0\x03\0hi", False, ""),
}


@pytest.mark.parametrize("name", RAW_ATTACKS)
async def test_raw_bytes_on_a_port_with_keys_get_nothing(ring: Keyring, name: str) -> None:
    data, leaves, cause = RAW_ATTACKS[name]
    async with keyed(ring.make("victim")) as [(victim, inbox)], Proxy(victim.address) as tap:
        stream = await anyio.connect_tcp(*place(tap.address))
        async with stream:
            await stream.send(data)
            if not leaves:
                with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    with anyio.fail_after(PATIENCE_S):
                        while True:
                            await stream.receive()
        await inbox.idle_until(lambda: victim.statistics().get("connections.closed", 0) == 1)
        # What is no ZMTP 3 at all libzmq drops without a word: neither admitted nor named.
        assert rejected(victim) == ({f"rejected.{cause}": 1} if cause else {})
        assert not victim.statistics()["connections.admitted"]
        assert tap.commands() <= HANDSHAKE_COMMANDS
        await check_alive(victim, inbox, ring.make("newcomer"))
        assert inbox.bodies == [b"are you there?"]


async def test_a_peer_that_never_finishes_the_handshake_is_cut_off(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "HANDSHAKE_IVL_MS", 200)
    async with keyed(ring.make("victim"), None) as [(victim, inbox), (insecure, _)]:
        for plane in (victim, insecure):
            async with await anyio.connect_tcp(*place(plane.address)) as stream:
                await stream.send(GREETING[:5])
                with anyio.fail_after(PATIENCE_S), contextlib.suppress(anyio.EndOfStream):
                    while True:
                        await stream.receive()
            await inbox.idle_until(lambda plane=plane: bool(rejected(plane)))  # type: ignore[misc]
            assert rejected(plane) == {"rejected.timeout": 1}


async def test_a_key_that_is_added_or_removed_counts_for_new_connections(ring: Keyring) -> None:
    b_keys, late_keys = ring.make("b"), ring.make("late", is_authorized=False)
    async with keyed(b_keys, late_keys) as [(b, at_b), (late, _)]:
        assert late.send(b.address, b"early")
        await at_b.idle_until(lambda: rejected(b).get("rejected.unlisted_key", 0) > 0)
        assert not b.send(late.address, b"to a stranger")
        assert b.statistics()["refused.unlisted_listener"] == 1
        ring.admit(ring.path / "late" / "late.key")
        # ZMQ itself never asks again; the plane does, for what is sent later.
        await at_b.idle_until(lambda: late.send(b.address, b"later") and bool(at_b.packets))
        assert set(at_b.bodies) == {b"later"}
        assert late.statistics()["links_renewed"] >= 1
        (ring.authorized / "late.key").unlink()
        assert late.send(b.address, b"still connected")
        await at_b.until(lambda: at_b.bodies[-1] == b"still connected")
        known = len(at_b.packets)
        before = rejected(b)["rejected.unlisted_key"]
        late.disconnect(b.address)
        assert late.send(b.address, b"anew")
        await at_b.idle_until(lambda: rejected(b)["rejected.unlisted_key"] > before)
        assert len(at_b.packets) == known


async def test_an_engine_that_is_turned_away_is_told_at_once_and_comes_again_although_libzmq_takes_what_is_lost(
    ring: Keyring,
) -> None:
    """A connection that is refused before `connect` has returned is in libzmq's table for ever, with its queue."""
    told, keys = list[tuple[str, str]](), ring.make("late", is_authorized=False)
    async with (
        keyed(ring.make("b")) as [(b, at_b)],
        running(ZmqPlane(LOOPBACK, keys=keys), Inbox(), lambda *why: told.append(why)) as late,
    ):
        assert late.send(b.address, b"early")
        await at_b.idle_until(lambda: bool(told))
        assert told == [("turned_away", b.address)]
        ring.admit(ring.path / "late" / "late.key")
        link = late._links[b.address]
        link.socket.connect("tcp://127.0.0.1:9")  # nobody listens there, so all that is sent waits
        await at_b.idle_until(lambda: late.send(b.address, b"later") and bool(at_b.packets))
        assert late._links[b.address] is not link
        assert set(at_b.bodies) == {b"later"}
        assert late.statistics()["links_renewed"] == 1


async def test_a_link_is_not_refused_for_what_became_of_an_earlier_one_or_once_it_was_heard(ring: Keyring) -> None:
    async with keyed(ring.make("a"), ring.make("b")) as [(a, at_a), (b, at_b)]:
        told: list[str] = []
        a._on_refused = lambda cause, who: told.append(cause)
        assert a.send(b.address, b"hello")
        link, event = a._links[b.address], zmq.EVENT_HANDSHAKE_FAILED_AUTH
        a._on_events([(event, 400, link.endpoint, link._made_at - 1.0)])
        assert not link.is_refused
        await at_b.wait(1)
        assert b.send(at_b.packets[0][0], b"yes")
        await at_a.wait(1)
        a._on_events([(event, 400, link.endpoint, link._made_at + 1.0)])
        assert not link.is_refused
        link._received = 0
        a._on_events([(event, 400, link.endpoint, link._made_at + 1.0)])
        assert link.is_refused
        assert [cause for cause in told if cause == "turned_away"] == ["turned_away"]


async def test_a_link_that_fails_before_connect_has_returned_is_refused(
    ring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then libzmq loses the end of the session."""
    b, late = ZmqPlane(LOOPBACK, keys=ring.make("b")), ZmqPlane(LOOPBACK, keys=ring.make("l", is_authorized=False))
    take, connect, is_over = ZmqPlane._take_events, zmq.Socket.connect, threading.Event()

    def note(plane: ZmqPlane, loop: asyncio.AbstractEventLoop) -> Iterator[door.Opened]:
        opened = list(take(plane, loop))
        yield from opened
        if plane is late and any(not each.endpoint for each in opened):
            is_over.set()

    def connect_slowly(socket: zmq.Socket[bytes], address: str) -> None:
        connect(socket, address)
        if address.startswith("tcp:"):
            assert is_over.wait(PATIENCE_S)

    monkeypatch.setattr(ZmqPlane, "_take_events", note)
    with start_blocking_portal() as elsewhere:
        elsewhere.call(b.start, lambda *packet: None)
        await late.start(Inbox())
        try:
            monkeypatch.setattr(zmq.Socket, "connect", connect_slowly)
            late.send(b.address, b"early")  # taken or not: nobody gets it
            await Inbox().idle_until(lambda: late._links[b.address].is_refused)
        finally:
            elsewhere.call(b.aclose)
            await late.aclose()


async def test_a_link_to_a_listener_of_another_mechanism_is_made_anew_and_no_key_is_blamed(ring: Keyring) -> None:
    async with keyed(ring.make("victim"), None) as [(victim, _), (insecure, inbox)]:
        told: list[str] = []
        insecure._on_refused = lambda cause, who: told.append(cause)
        address = Address(victim.address.partition("#")[0])
        assert insecure.send(address, b"hello")
        await inbox.idle_until(lambda: insecure._links[address].is_refused)
        assert not told


async def test_a_connection_that_was_answered_is_not_muted_for_a_message_of_another_route() -> None:
    async with planes(2) as [(a, at_a), (b, at_b)]:
        route, connections = await met(a, b, at_b), door_of(b).connections
        await at_b.idle_until(lambda: len(connections) == 1)
        assert b.send(route, b"yes")
        await at_a.wait(1)
        [connection] = connections.values()
        b._dropped(connection.fd, 100, 0, b"gone")
        assert (connection.muted_until, b.statistics().get("muted", 0)) == (0.0, 0)
        for _ in range(2):
            b._dropped(connection.fd, 100, 0, route)
        assert connection.muted_until
        assert b.statistics()["muted"] == 1


async def test_addresses_are_refused_unless_their_key_is_listed(ring: Keyring) -> None:
    a_keys, b_keys = ring.make("a"), ring.make("b")
    unlisted = make_pair().public.hex()
    async with keyed(a_keys, b_keys, None) as [(a, _), (b, at_b), (insecure, at_insecure)]:
        endpoint = b.address.partition("#")[0]
        for sender, to, cause in (
            (a, endpoint, "refused.no_key"),
            (a, insecure.address, "refused.no_key"),
            (a, f"{endpoint}#{unlisted}", "refused.unlisted_listener"),
            (insecure, b.address, "refused.needs_keys"),
            (a, f"{endpoint}#{'0' * 63}", "bad_address"),
            (a, f"{endpoint}#", "bad_address"),
            (a, f"{endpoint}#{unlisted.upper()}", "bad_address"),
            (a, f"{endpoint}#{unlisted}#{unlisted}", "bad_address"),
        ):
            before = sender.statistics().get(cause, 0)
            assert not sender.send(Address(to), b"secret"), to
            assert sender.statistics()[cause] == before + 1, to
            assert sender.statistics()["links"] == 0
        assert at_b.packets == at_insecure.packets == []
        assert b.statistics().get("connections.accepted", 0) == 0


async def test_nothing_is_said_to_a_listener_that_cannot_prove_its_key(ring: Keyring) -> None:
    a_keys, impostor_keys = ring.make("a"), ring.make("impostor")
    ring.make("victim")
    async with keyed(a_keys, impostor_keys) as [(a, _), (impostor, inbox)]:
        endpoint = impostor.address.partition("#")[0]
        assert a.send(Address(f"{endpoint}#{ring.pairs['victim'].public.hex()}"), b"for the victim")
        await inbox.idle_until(lambda: rejected(impostor).get("rejected.wrong_key", 0) > 2)
        assert inbox.packets == []


async def test_no_peer_is_admitted_while_the_authenticator_does_not_answer(ring: Keyring) -> None:
    a_keys, b_keys = ring.make("a"), ring.make("b")
    async with keyed(a_keys, b_keys) as [(a, _), (b, at_b)]:
        assert b._zap is not None
        b._zap.close(0)
        assert a.send(b.address, b"let me in")
        await at_b.idle_until(lambda: bool(rejected(b)))
        # Which of these depends on how far the closing had come.
        assert rejected(b).keys() <= {"rejected.unanswered", "rejected.no_key", "rejected.timeout"}
        assert not b.statistics()["connections.admitted"]
        assert at_b.packets == []


async def test_a_plane_with_keys_leaves_nothing_behind(ring: Keyring) -> None:
    a_keys, b_keys = ring.make("a"), ring.make("b")

    async def live() -> None:
        async with keyed(a_keys, b_keys) as [(a, _), (b, at_b)]:
            assert a.send(b.address, b"x")
            await at_b.wait(1)
            with stranger(b.address.partition("#")[0]) as dealer:
                dealer.send(b"x")
                await at_b.idle_until(lambda: bool(rejected(b)))

    await live()  # the executor's thread comes with the first
    before, tasks = open_files(), len(asyncio.all_tasks())
    for _ in range(5):
        await live()
    assert (open_files() <= before, len(asyncio.all_tasks())) == (True, tasks)


async def test_a_port_in_use_leaves_nothing_behind_either(ring: Keyring) -> None:
    keys = ring.make("a")
    async with keyed(keys) as [(plane, inbox)]:
        taken = plane.address.partition("#")[0]
        await inbox.idle_until(lambda: plane._door is not None and plane._door._listener is not None)
        before = open_files()
        for _ in range(3):
            other = ZmqPlane(taken, keys=keys)
            with pytest.raises(BackendError, match="choose another port"):
                await other.start(Inbox())
            await other.aclose()
        assert open_files() <= before


async def test_a_link_that_zmq_has_given_up_is_replaced(ring: Keyring) -> None:
    # Who listens wants another mechanism; later an engine listens at that address.
    picky = socket.create_server(("127.0.0.1", 0))
    port = picky.getsockname()[1]
    async with planes(1) as [(plane, _)]:
        address = Address(f"tcp://127.0.0.1:{port}")
        assert plane.send(address, b"early")
        peer, _ = await anyio.to_thread.run_sync(picky.accept)
        with peer, picky:
            peer.sendall(CURVE_GREETING)
            while await anyio.to_thread.run_sync(peer.recv, 100):
                pass
        inbox = Inbox()
        async with running(ZmqPlane(f"tcp://127.0.0.1:{port}"), inbox):
            await inbox.idle_until(lambda: plane.send(address, b"later") and bool(inbox.packets))


# -- life ------------------------------------------------------------------------------------------


async def test_a_bug_in_the_handler_is_loud_and_does_not_end_the_listener() -> None:
    loop, heard, inbox = asyncio.get_running_loop(), list[object](), Inbox()

    def explode(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        inbox(origin, data)
        if data.startswith(b"bomb"):
            raise ZeroDivisionError(data)

    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda loop, context: heard.append(context["exception"]))
    try:
        async with running(ZmqPlane(LOOPBACK), explode) as plane, planes(1) as [(other, _)]:
            for packet in (b"bomb 1", b"bomb 2", b"peace"):
                assert other.send(plane.address, packet)
            await inbox.wait(3)
        assert inbox.bodies == [b"bomb 1", b"bomb 2", b"peace"]
        assert [type(exc) for exc in heard] == [ZeroDivisionError] * 2
    finally:
        loop.set_exception_handler(before)


async def test_a_plane_may_be_closed_from_within_its_handler() -> None:
    plane, inbox = ZmqPlane(LOOPBACK), Inbox()
    closing: list[asyncio.Task[None]] = []

    def close(origin: Address | ReplyTo, data: bytes, principal: str) -> None:
        inbox(origin, data)
        closing.append(asyncio.get_running_loop().create_task(plane.aclose()))

    await plane.start(close)
    async with planes(1) as [(other, _)]:
        assert other.send(plane.address, b"close")
        await inbox.wait(1)
        with anyio.fail_after(PATIENCE_S):
            await asyncio.gather(*closing)
        assert not plane.send(other.address, b"late")


async def test_closing_waits_only_a_moment_for_packets_that_are_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        plane = ZmqPlane(LOOPBACK)
        await plane.start(Inbox())
        assert plane.send(Address(f"tcp://127.0.0.1:{mute.getsockname()[1]}"), bytes(1 << 20))
        with anyio.fail_after(PATIENCE_S):
            await plane.aclose()
            await plane.aclose()
        assert not plane.send(plane.address, b"closed")


async def test_the_loop_runs_on_while_a_plane_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        plane = ZmqPlane(LOOPBACK)
        await plane.start(Inbox())
        assert plane.send(Address(f"tcp://127.0.0.1:{mute.getsockname()[1]}"), b"lingers")
        closing = asyncio.get_running_loop().create_task(plane.aclose())
        turns = 0
        with anyio.fail_after(PATIENCE_S):
            while not closing.done():
                turns += 1
                await anyio.lowlevel.checkpoint()
        assert turns > 100


async def test_a_plane_that_was_never_started_can_be_closed() -> None:
    plane = ZmqPlane(LOOPBACK)
    await plane.aclose()
    await plane.aclose()
    plane.disconnect(Address("tcp://127.0.0.1:1"))
    assert not plane.send(Address("tcp://127.0.0.1:1"), b"x")
