"""The control plane on ZMQ: the only file that imports it.

One ROUTER listens, one DEALER per remote address asks. The sockets are plain ones, driven by their
descriptors: ZMQ's descriptor is edge-triggered, so a reader goes on until there is nothing left, and
after every send the socket is looked at once more, since sending may have eaten the edge.

Delivery is at most once and in order per link. Queues are bounded; what does not fit is dropped and
counted, because the core repeats what matters. Nothing that arrives can end the listener.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from asynckv.core.messages import MAX_PACKET
from asynckv.core.types import Address, Route
from asynckv.errors import BackendError, ConfigError

__all__ = ["ZmqPlane"]

QUEUE = 8192
"""Packets per link that wait in either direction."""

BATCH = 64
"""Packets taken from one socket before others get their turn."""

LINGER_MS = 200

MAX_LINKS = 65_535
"""Peers that one rank may have; ZMQ's own default is 1,023."""

OnPacket = Callable[[Address | Route, bytes], None]


def _host(address: str) -> str:
    """Return the host of `tcp://host:port`.

    Raises:
        ConfigError: It is not such an address.
    """
    try:
        address.encode("ascii")
        parts = urlsplit(address)
        port = address.rpartition(":")[2]
        host = parts.hostname or parts.netloc.rpartition(":")[0]
        if parts.scheme != "tcp" or not host or not (port == "*" or 0 <= int(port) < 65_536):
            raise ValueError
    except ValueError:
        raise ConfigError(f"{address!r} is not an address such as tcp://127.0.0.1:5555") from None
    return host


def _is_wildcard(host: str) -> bool:
    return host in ("*", "0.0.0.0", "::")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ZmqPlane:
    """A ROUTER to be asked, and DEALERs to ask with.

    Args:
        bind: Where to listen, such as `tcp://127.0.0.1:0`; port 0 lets the system choose.
        advertise: What others are told, if it is not the bound address.
        allow_insecure: Listen beyond loopback although nothing is encrypted.

    Raises:
        ConfigError: The addresses cannot serve.
    """

    def __init__(self, bind: str, advertise: str = "", allow_insecure: bool = False) -> None:
        host = _host(bind)
        if not _is_loopback(host) and not allow_insecure:
            raise ConfigError(
                f"bind {bind!r} is not a loopback address, and the control plane is not encrypted: anybody who reaches "
                f"it could claim and release blocks; bind to 127.0.0.1, or set allow_insecure=True in a trusted network"
            )
        if _is_wildcard(host) and not advertise:
            raise ConfigError(f"bind {bind!r} is a wildcard, which peers cannot connect to; set advertise as well")
        if advertise and _is_wildcard(_host(advertise)):
            raise ConfigError(f"advertise {advertise!r} is a wildcard, which peers cannot connect to")
        self._bind, self._advertise = bind, advertise
        self._address = Address("")
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: _Link | None = None
        self._links: dict[Address, _Link] = {}
        self._on_packet: OnPacket = lambda origin, data: None
        self._counts: Counter[str] = Counter()

    @property
    def address(self) -> Address:
        """Where others reach this rank."""
        return self._address

    async def start(self, on_packet: OnPacket) -> None:
        """Bind the listener."""
        self._context, self._on_packet = zmq.Context(), on_packet
        self._context.set(zmq.MAX_SOCKETS, min(MAX_LINKS, self._context.get(zmq.SOCKET_LIMIT)))
        socket = self._socket(zmq.ROUTER, self._bind)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(self._bind)
        except zmq.ZMQError as exc:
            socket.close(0)
            raise BackendError(
                f"cannot listen at {self._bind!r}: {exc.strerror or exc}; choose another port (0 lets the system "
                f"choose), or an address of this host"
            ) from exc
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = bound.rpartition(":")[2]
        if not self._advertise and _is_wildcard(_host(bound)):
            # Spelled so that it did not look like one (`tcp://0:0`).
            socket.close(0)
            raise ConfigError(
                f"bind {self._bind!r} is a wildcard, which peers cannot connect to; set advertise as well"
            )
        advertised = self._advertise or bound
        if advertised.endswith((":0", ":*")):
            advertised = advertised.rpartition(":")[0] + ":" + port
        self._address = Address(advertised)
        self._router = _Link(socket, self._from_router)

    def send(self, to: Address | Route, packet: bytes) -> bool:
        """Send, or drop and count."""
        if self._context is None or self._router is None:
            return False
        if isinstance(to, bytes):
            sent = self._router.send([to, packet])
        else:
            link = self._links.get(Address(to)) or self._connect(Address(to))
            sent = link is not None and link.send([packet])
        self._counts["packets_out" if sent else "dropped_out"] += 1
        self._counts["bytes_out"] += len(packet) if sent else 0
        return sent

    def disconnect(self, address: Address) -> None:
        """Drop a link."""
        if (link := self._links.pop(address, None)) is not None:
            link.close(LINGER_MS)

    def statistics(self) -> dict[str, int]:
        """Count packets, bytes and drops."""
        return {"packets_in": 0, "packets_out": 0, **self._counts, "links": len(self._links)}

    async def aclose(self) -> None:
        """Close every socket; what was sent gets a moment to leave."""
        context, self._context = self._context, None
        if context is None:
            return
        links, self._links = [*self._links.values()], {}
        if self._router is not None:
            links.append(self._router)
        self._router = None
        for link in links:
            link.close(LINGER_MS)
        # Waits for lingering sockets, so not on the loop.
        await asyncio.get_running_loop().run_in_executor(None, context.term)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_PACKET),
            (zmq.SNDHWM, QUEUE),
            (zmq.RCVHWM, QUEUE),
            (zmq.LINGER, LINGER_MS),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, 10_000),
            (zmq.HEARTBEAT_TIMEOUT, 30_000),
            (zmq.IPV6, int("[" in address)),
        ):
            socket.setsockopt(option, value)
        return socket

    def _connect(self, address: Address) -> _Link | None:
        try:
            _host(address)
            socket = self._socket(zmq.DEALER, address)
        except (ConfigError, UnicodeError, zmq.ZMQError):
            self._counts["bad_address"] += 1
            return None
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(0)
            self._counts["bad_address"] += 1
            return None
        link = _Link(socket, lambda frames: self._from_dealer(address, frames))
        self._links[address] = link
        return link

    def _from_router(self, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self._deliver(Route(frames[0]), frames[1])
        else:
            self._counts["dropped_frames"] += 1

    def _from_dealer(self, address: Address, frames: list[bytes]) -> None:
        if len(frames) == 1:
            self._deliver(address, frames[0])
        else:
            self._counts["dropped_frames"] += 1

    def _deliver(self, origin: Address | Route, packet: bytes) -> None:
        self._counts["packets_in"] += 1
        self._counts["bytes_in"] += len(packet)
        self._on_packet(origin, packet)


class _Link:
    """One socket on the event loop."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket, self._on_frames = socket, on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_due = False
        self._loop.add_reader(self._fd, self._receive)
        self._look_again()

    def send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False  # full, or nobody there any more
        finally:
            self._look_again()
        return True

    def close(self, linger_ms: int) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger_ms)

    def _look_again(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._is_due = False
        self._receive()

    def _receive(self) -> None:
        for _ in range(BATCH):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as exc:
                self._loop.call_exception_handler({"message": "a control socket failed", "exception": exc})
                return
            try:
                self._on_frames(frames)
            except Exception as exc:
                # A bug in what handles packets; the listener lives.
                self._loop.call_exception_handler({"message": "a packet could not be handled", "exception": exc})
        self._look_again()
