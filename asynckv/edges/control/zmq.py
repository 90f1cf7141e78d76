"""The control plane on ZMQ: the only file that imports it.

One ROUTER listens, and one DEALER per remote address sends requests. ZMQ's descriptors are edge-triggered, so the loop
reads a socket until nothing is left, and checks it once more after every send. Delivery is at most once and in order
per link. Queues are bounded. Packets that do not fit are dropped and counted; the core repeats important messages.

With keys (`KeysConfig`) every link is CURVE: a connection is admitted when it has proven a key on the allow-list, and
an address names the key that the listener will prove: `tcp://10.0.0.1:5555#<64 hex digits>`. ZMQ asks over a socket of
its own (ZAP) whether a key may enter, and reports on another (a monitor) each connection that was turned away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import re
import struct
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, getaddrinfo
from urllib.parse import urlsplit

import zmq

from asynckv.config import KeysConfig
from asynckv.core.limits import remember
from asynckv.core.types import Address, ReplyTo
from asynckv.core.wire import MAX_PACKET, MAX_REQUEST_PACKET
from asynckv.edges.control.door import SPARE_FILES, Connection, Door, Opened, free_files
from asynckv.edges.transports import is_loopback
from asynckv.errors import BackendError, ConfigError
from asynckv.keys import AllowList, KeyPair, decode_z85, encode_z85, read_pair

RECEIVE_BUFFER = MAX_REQUEST_PACKET  # of one connection of our listener, in the kernel
QUEUE = 8192  # packets per link that wait to be sent to a listener
REPLY_QUEUE = 128  # packets that wait to be sent to one connection of our listener
MAX_UNREAD, MAX_UNREAD_ALL, MAX_UNREAD_TOTAL, LOOK_UNREAD_S = 1024 * 1024, 2 * MAX_PACKET, 8 * MAX_PACKET, 0.1
"""Most bytes that the kernels of peers did not take, per connection, per principal and in all, and seconds between two
checks. More are dropped and counted; one packet counts as at most half of a connection's bound."""

TURN_S = 0.002  # seconds of one loop turn that all sockets together may take; each handles at least one message
DIRECT = 16  # packets of one turn that are handled as they arrive; the others wait for the turns of their senders
MAX_WAITING, MAX_WAITING_ALL, MAX_WAITING_TOTAL = 4096, 16 * 1024 * 1024, 128 * 1024 * 1024
"""Most packets of one connection, bytes of one principal and bytes in all that may wait for such a turn. More are
dropped and counted."""

WAITING_BYTES = 128  # memory that a packet needs in addition to its own bytes
SLICE = 512  # parts of a message that are dropped between two looks at the clock
CURVE_BYTES = 33  # bytes that CURVE adds to a frame: a name, a nonce, a code and flags
MAX_ROUTES = 16_384  # connections with a remembered principal; for others libzmq is asked again
LINGER_MS = 200
RENEW_S = 0.5
"""Age from which a dead link is replaced: ZMQ never tries again once a listener refused the key or broke the
protocol. A link with a full queue is treated as dead after `STUCK_S` of silence."""

STUCK_S = 10.0
MAX_LINKS = 65_535  # peers that one rank may have; ZMQ's own default is 1,023
NAMED_S = 5.0  # seconds for which the result of a name look-up, also a failed one, is used for new links
MAX_NAMES, MAX_RESOLVING = 512, 256  # names kept; look-ups at a time
LINKS, LINKS_S = 4, 0.01  # links or look-ups that are begun at once, and seconds until as many more are
MAX_UNLINKED, MAX_UNSENT = 1024, 8  # addresses that wait for a link, and packets that wait for one of them
LINK_FILES = 4  # descriptors that a link takes
COUNT_FILES_S = 0.1  # seconds between two counts of the free descriptors, which take a millisecond
HANDSHAKE_IVL_MS = 5_000  # a connection that has not proven a key (without keys: spoken ZMTP) by then is cut off
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asynckv"
MONITOR_ENDPOINT = "inproc://asynckv-monitor-"
KEY_MARK = "#"
_OPENED = {zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED}
_COUNTED = {
    zmq.EVENT_ACCEPTED: "connections.accepted",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "connections.admitted",
    zmq.EVENT_DISCONNECTED: "connections.closed",
}
_LOST = zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # after these libzmq connects no more
_FAILED = (*_LOST, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_LEFT = {errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED}
OnPacket = Callable[[Address | ReplyTo, bytes, str], bool | None]
OnRefused = Callable[[str, str], None]


def make_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(decode_z85(public), decode_z85(secret))


def _split(address: str) -> tuple[str, bytes | None]:
    """Return the endpoint for ZMQ to connect to, and the public key that the listener has to prove."""
    endpoint, mark, text = address.partition(KEY_MARK)
    if not mark:
        return endpoint, None
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ConfigError(f"{address!r:.200} does not end in a key of 64 hexadecimal digits")
    return endpoint, bytes.fromhex(text)


def _host(address: str) -> str:
    try:
        address.encode("ascii")
        parts = urlsplit(address)
        port = address.rpartition(":")[2]
        host = parts.hostname or parts.netloc.rpartition(":")[0]
        if parts.scheme != "tcp" or not host or not (port == "*" or (port.isdecimal() and int(port) < 65_536)):
            raise ValueError
    except ValueError:
        raise ConfigError(f"{address!r} is not an address such as tcp://127.0.0.1:5555") from None
    return host


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of `tcp://host:port`, with or without a key behind it."""
    host, port, _ = _target(address)
    return host, int(port)


@lru_cache(4096)
def _target(address: str) -> tuple[str, str, bytes | None]:
    """Return host, port and key of an address to connect to, or raise `ConfigError`."""
    endpoint, key = _split(address)
    host, port = _host(endpoint), endpoint.rpartition(":")[2]
    if port == "*" or not int(port):
        raise ConfigError(f"{address!r:.200} names no port to connect to")
    if not re.fullmatch("[A-Za-z0-9_.-]+", host):
        try:
            ip_address(host)
        except ValueError:
            raise ConfigError(f"{host!r:.200} is not a host name") from None
    return host, port, key


def _endpoint(number: str, port: str) -> str:
    return f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}"


def _is_wildcard(host: str) -> bool:
    return host in ("*", "0.0.0.0", "::")


def _load(keys: KeysConfig) -> tuple[KeyPair, AllowList]:
    """Read an engine's keys, or raise a `ConfigError` that names the file and the remedy."""
    path = Path(keys.secret)
    pair = read_pair(path)
    if zmq.curve_public(encode_z85(pair.secret).encode()) != encode_z85(pair.public).encode():
        raise ConfigError(
            f"the key file {str(path)!r} holds two keys that do not belong together; make new ones with asynckv keygen"
        )
    return pair, AllowList(Path(keys.authorized))


def _cause(event: int, value: int, has_keys: bool) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "unlisted_key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if value == errno.EFAULT:
            return "unanswered"
        # A ZMQ client without keys leaves by itself as soon as it sees that a key is required.
        return ("no_key" if has_keys else "left") if value in _LEFT else "timeout"
    if value == zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "wrong_key"
    if value == zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and has_keys:
        return "no_key"
    return "handshake"


_REFUSALS = {
    "no_key": "its address names no key, and this engine has keys: give both engines keys, or neither",
    "needs_keys": "its address names a key, and this engine has none: set EngineConfig.keys",
    "unlisted_listener": "its key is not in this engine's directory of authorized keys: copy its .key file there",
    "no_files": "this process has almost no file descriptors left, and a connection takes four: raise ulimit -n",
}
"""Reasons why this engine does not connect to a listener, each with the remedy."""


class ZmqPlane:
    """A ROUTER that listens, and a DEALER per remote listener.

    Args:
        bind: Address to listen at, such as `tcp://127.0.0.1:0`; port 0 lets the system choose. None: do not listen.
        advertise: Address that peers are told, if it is not the bound address.
        allow_insecure: True to listen beyond loopback although nothing is encrypted.
    """

    def __init__(
        self, bind: str | None, advertise: str = "", allow_insecure: bool = False, keys: KeysConfig | None = None
    ) -> None:
        for name, address in (("bind", bind or ""), ("advertise", advertise)):
            if KEY_MARK in address:
                raise ConfigError(
                    f"{name} {address!r:.200} carries a key, which the engine adds itself; leave out the part from "
                    f"{KEY_MARK!r} on"
                )
        if bind is not None:
            self._check(bind, advertise, allow_insecure or keys is not None)
        self._bind, self._advertise = bind, advertise
        self._pair: KeyPair | None = None
        self._peers: AllowList | None = None
        if keys is not None:
            self._pair, self._peers = _load(keys)
        self.address = Address("")  # of the listener, once it has started
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: _Link | None = None
        self._zap: _Link | None = None
        self._door: Door | None = None
        self._ended = ""  # the reason if the plane failed, and sends and takes nothing any more
        self._principals: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # with the connection's descriptor
        self._unread: Counter[str] = Counter()  # bytes by principal; some may have been taken since the last check
        self._unread_all = 0
        self._events: zmq.Socket[bytes] | None = None
        self._events_lock = threading.Lock()  # the loop connects monitors, and the door's thread reads them
        self._monitors = itertools.count()
        self._waiting = _Waiting()
        self._num_direct, self._look_at = 0, 0.0
        self._links: dict[Address, _Link] = {}
        self._numbers: OrderedDict[str, tuple[float, str]] = OrderedDict()  # by host: time of look-up, IP address
        self._resolving: set[str] = set()
        self._unlinked: dict[Address, list[bytes]] = {}  # packets of addresses that wait for a turn or for a look-up
        self._put_off: dict[Address, None] = {}  # those of them that wait for a turn, the oldest first
        self._num_begun = 0  # links and look-ups of this turn
        self._files, self._count_at = 0, -math.inf  # descriptors left for links, and when they are counted again
        self._on_packet: OnPacket = lambda origin, data, principal: None
        self._on_refused: OnRefused = lambda cause, peer: None
        self._counts: Counter[str] = Counter()

    @staticmethod
    def _check(bind: str, advertise: str, is_protected: bool) -> None:
        host = _host(bind)
        if not is_loopback(bind) and not is_protected:
            raise ConfigError(
                f"bind {bind!r} is not a loopback address, and the control plane is not encrypted: any host that can "
                f"reach it could claim and release blocks; give keys (asynckv keygen makes them), bind to 127.0.0.1, "
                f"or set allow_insecure=True in a trusted network"
            )
        if _is_wildcard(host) and not advertise:
            raise ConfigError(f"bind {bind!r} is a wildcard, which peers cannot connect to; set advertise as well")
        if advertise and _is_wildcard(_host(advertise)):
            raise ConfigError(f"advertise {advertise!r} is a wildcard, which peers cannot connect to")

    async def start(self, on_packet: OnPacket, on_refused: OnRefused = lambda cause, peer: None) -> None:
        self._context, self._on_packet, self._on_refused = zmq.Context(), on_packet, on_refused
        self._turn = _Turn()
        self._context.set(zmq.MAX_SOCKETS, min(MAX_LINKS, self._context.get(zmq.SOCKET_LIMIT)))
        events = self._context.socket(zmq.PULL)
        # A bounded queue would make libzmq's thread wait for the door's.
        events.setsockopt(zmq.RCVHWM, 0)
        self._events = events
        loop = asyncio.get_running_loop()
        self._door = Door(
            int(events.getsockopt(zmq.FD)),
            partial(self._take_events, loop),
            self._counts,
            lambda exc: loop.call_soon_threadsafe(self._on_door_failed, exc),
        )
        if self._bind is None:
            return
        socket = self._socket(zmq.ROUTER, self._bind)
        try:
            self._guard(socket)
            self.address = self._listen(socket, self._bind)
        except BaseException:
            self._close_sockets()
            socket.close(0)
            raise
        # From here on libzmq numbers all connections itself, because a peer could choose the id of another one, or the
        # next number, for which libzmq aborts. The listener has copied its options, so it still speaks ZMTP.
        socket.setsockopt(zmq.ROUTER_RAW, 1)
        self._router = _Link(socket, self._turn, 2, self._from_router, self._dropped, self._serve, self._door)

    def _listen(self, socket: zmq.Socket[bytes], bind: str) -> Address:
        try:
            socket.bind(bind)
        except zmq.ZMQError as exc:
            raise BackendError(
                f"cannot listen at {bind!r}: {exc.strerror or exc}; choose another port (0 lets the system "
                f"choose), or an address of this host"
            ) from exc
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = bound.rpartition(":")[2]
        if not self._advertise and _is_wildcard(_host(bound)):
            # Some spellings are only known as wildcards once bound (`tcp://0:0`).
            raise ConfigError(f"bind {bind!r} is a wildcard, which peers cannot connect to; set advertise as well")
        advertised = self._advertise or bound
        if advertised.endswith((":0", ":*")):
            advertised = advertised.rpartition(":")[0] + ":" + port
        if self._pair is not None:
            advertised += KEY_MARK + self._pair.public.hex()
        return Address(advertised)

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        if self._context is None or self._ended or (self._router is None and self._bind is not None):
            return False
        if isinstance(to, bytes):
            sent = self._router is not None and self._answer(self._router, ReplyTo(to), packet)
        elif (link := self._links.get(Address(to))) is None:
            sent = self._send_first(Address(to), packet)
        else:
            if link.name and link.is_unheard():
                self._number(link.name[0])  # libzmq retries the same IP address for ever, and the name may have moved
            sent = not link.is_refused and link.send([packet])
            if not sent and link.is_dead():
                self.disconnect(Address(to))
                self._counts["links_renewed"] += 1
                sent = self._send_first(Address(to), packet)
        self._counts["packets_out" if sent else "dropped_out"] += 1
        self._counts["bytes_out"] += len(packet) if sent else 0
        return sent

    def _send_first(self, address: Address, packet: bytes) -> bool:
        """Send over a link that is made now or in one of the next turns; return False if the packet is dropped."""
        if address not in self._unlinked:
            if len(self._unlinked) >= MAX_UNLINKED or not self._may_link(address):
                return False
            self._unlinked[address], self._put_off[address] = [], None
            self._begin_links()
        if (link := self._links.get(address)) is not None:
            return link.send([packet])
        kept = self._unlinked.get(address)
        if kept is None or len(kept) >= MAX_UNSENT:
            return False
        kept.append(packet)
        return True

    def _begin_links(self) -> None:
        """Make links that were put off, a few in a turn, because each takes the loop half a millisecond."""
        while self._put_off and self._num_begun < LINKS and self._context is not None:
            if not self._num_begun:
                self._turn.loop.call_later(LINKS_S, self._end_turn)
            self._num_begun += 1
            del self._put_off[address := next(iter(self._put_off))]
            if (link := self._connect(address)) is not None:
                for packet in self._unlinked.pop(address):
                    link.send([packet])
            elif _target(address)[0] not in self._resolving:
                self._counts["dropped_out"] += len(self._unlinked.pop(address))

    def _end_turn(self) -> None:
        self._num_begun = 0
        self._begin_links()

    def _answer(self, router: _Link, route: ReplyTo, packet: bytes) -> bool:
        principal, fd = self._principals.get(route, ("", -1))
        connection = self._door.connections.get(fd) if self._door is not None else None
        if connection is None:
            return router.send([route, packet])  # the door has not seen the connection yet, or it has ended
        connection.principal, connection.route, size = principal, route, self._on_wire(len(packet))
        left = connection.sent - connection.taken
        if not self._has_room(principal, left, size) and not self._has_room(principal, self._look(connection), size):
            self._counts["dropped_unread"] += 1
            router.error = 0
            return False
        if sent := router.send([route, packet]):
            connection.sent += size
            self._unread[principal] += size
            self._unread_all += size
        return sent

    def _has_room(self, principal: str, left: int, size: int) -> bool:
        share = 2 if left else 1  # half is reserved for connections without unread bytes
        is_small = left + min(size, MAX_UNREAD // 2) <= MAX_UNREAD
        theirs, everybodys = self._unread[principal] + size, self._unread_all + size
        return is_small and theirs <= MAX_UNREAD_ALL // share and everybodys <= MAX_UNREAD_TOTAL // share

    def _look(self, connection: Connection) -> int:
        """Return the bytes that a connection has not read; check all connections every `LOOK_UNREAD_S`."""
        if self._door is not None and (now := self._turn.now()) >= self._look_at:
            self._look_at, self._unread = now + LOOK_UNREAD_S, Counter()
            for each in [each for each in list(self._door.connections.values()) if each.sent > each.taken]:
                self._unread[each.principal] += each.look_unread()
            self._unread_all = self._unread.total()
        return connection.look_unread()

    def refusal(self, to: Address | ReplyTo) -> str:
        """Return why nothing can be sent: the address's form, name or key, or an ended connection or plane; else ""."""
        if self._ended:
            return self._ended
        if isinstance(to, bytes):
            return "the connection has ended" if self._router is None or self._router.error == zmq.EHOSTUNREACH else ""
        address = to
        try:
            host, _, key = _target(address)
        except ConfigError as exc:
            return str(exc)
        asked_at, number = self._numbers.get(host, (-math.inf, ""))
        if not number and self._context is not None and self._turn.now() - asked_at < NAMED_S:
            return f"no resolver of this host knows the name {host!r}; correct the endpoint, or the name service"
        return _REFUSALS.get(self._refusal(address, key) or "", "")

    def host(self, address: Address) -> str:
        """Return the IP address that a link goes to; for IPv6 its /64 network, because one host may have all of it."""
        link = self._links.get(address)
        host = _host(link.endpoint) if link is not None else ""
        return str(ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host

    def disconnect(self, address: Address) -> None:
        self._unlinked.pop(address, None)
        self._put_off.pop(address, None)
        if (link := self._links.pop(address, None)) is not None:
            link.close(LINGER_MS)
            if self._door is not None:
                self._door.sweep()

    def statistics(self) -> dict[str, int]:
        zeros = dict.fromkeys(("packets_in", "packets_out", *_COUNTED.values()), 0)
        counts = {**zeros, **self._counts, "links": len(self._links)}
        if self._peers is not None:
            self._peers.refresh()
            counts |= {"authorized_keys": len(self._peers), "key_errors": self._peers.errors}
        return counts

    async def aclose(self) -> None:
        context, self._context = self._context, None
        if context is None:
            return
        self._close_sockets()
        door, self._door, events = self._door, None, self._events

        def close() -> None:
            if door is not None:
                door.close()
            if events is not None:
                events.close(0)
            context.term()

        await asyncio.get_running_loop().run_in_executor(None, close)

    def _close_sockets(self) -> None:
        if self._zap is not None:
            self._zap.close(0)  # first, so that no new connection is admitted
        for link in filter(None, [self._router, *self._links.values()]):
            link.close(LINGER_MS)
        self._zap, self._router, self._links, self._unlinked, self._put_off = None, None, {}, {}, {}

    def _on_door_failed(self, cause: Exception) -> None:
        if (door := self._door) is not None:  # None while the plane is being closed
            self._ended = f"the control plane has ended, because its door keeper failed: {cause!r}; restart the engine"
            self._close_sockets()
            door.close()
            self._door = None
            self._on_refused("ended", self._ended)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        is_listener = kind == zmq.ROUTER
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_REQUEST_PACKET if is_listener else MAX_PACKET),
            (zmq.SNDHWM, REPLY_QUEUE if is_listener else QUEUE),
            # libzmq aborts if a peer leaves while such a queue is full; the door bounds them.
            (zmq.RCVHWM, 0),
            # Bytes in the kernel's buffer are still read after a connection was cut off.
            (zmq.RCVBUF, RECEIVE_BUFFER if is_listener else -1),
            (zmq.LINGER, LINGER_MS),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_IVL_MS),
            # Keep-alives end a connection half a minute after its peer vanished. (ZMQ's own heartbeats can abort, too.)
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 4),
            (zmq.IPV6, int("[" in address)),
        ):
            socket.setsockopt(option, value)
        if is_listener:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._pair is not None:
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
        return socket

    def _may_link(self, address: Address) -> bool:
        """Return False, and count, if a link to this address is refused."""
        try:
            key = _target(address)[2]
        except ConfigError:
            self._counts["bad_address"] += 1
            return False
        if (cause := self._refusal(address, key)) is not None:
            self._counts[f"refused.{cause}"] += 1
            self._on_refused(cause, address)
        return cause is None

    def _connect(self, address: Address) -> _Link | None:
        if not self._may_link(address):
            return None
        host, port, key = _target(address)
        if not (number := self._number(host)):
            return None
        endpoint = _endpoint(number, port)
        self._files -= LINK_FILES
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._socket(zmq.DEALER, endpoint)
            if key is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            self._watch(socket, (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED, *_LOST))
            began = self._turn.now()
            socket.connect(endpoint)
        except zmq.ZMQError:
            if socket is not None:
                socket.close(0)
            self._counts["bad_address"] += 1
            return None
        link = _Link(socket, self._turn, 1, partial(self._from_dealer, address), self._dropped)
        self._links[address], link._made_at = link, began  # its handshake may have failed since
        if number != host:
            link.name = host, number
        return link

    def _number(self, host: str) -> str:
        """Return the IP address of a host; empty if it has none, or while a thread of its own looks it up."""
        with contextlib.suppress(ValueError):
            return str(ip_address(host))  # in the spelling that libzmq uses in its events
        now = self._turn.now()
        asked_at, number = self._numbers.get(host, (-math.inf, ""))
        if now - asked_at < NAMED_S:
            return number
        if host not in self._resolving and len(self._resolving) < MAX_RESOLVING:
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                threading.Thread(target=self._resolve, args=(host,), daemon=True, name="asynckv-name").start()
                self._resolving.add(host)
        return number  # the last known address, until the new look-up ends

    def _resolve(self, host: str) -> None:
        try:
            found = getaddrinfo(host, None, type=SOCK_STREAM)
            # IPv4 comes first, as in libzmq: a listener is on IPv4 unless its address has brackets.
            numbers = [str(each[4][0]) for each in sorted(found, key=lambda each: each[0] != AF_INET)]
        except Exception:  # after any error the name can be looked up again
            numbers = []
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._turn.loop.call_soon_threadsafe(self._resolved, host, numbers)

    def _resolved(self, host: str, numbers: list[str]) -> None:
        self._resolving.discard(host)
        number = self._numbers.get(host, (0.0, ""))[1]  # kept after a failed look-up, because the service may recover
        if numbers and number not in numbers:
            number = numbers[0]
        remember(self._numbers, host, (self._turn.now(), number), MAX_NAMES)
        for address in [each for each, link in self._links.items() if link.name and link.name[0] == host]:
            if self._links[address].name != (host, number):
                self.disconnect(address)
        self._put_off |= dict.fromkeys(each for each in self._unlinked if _target(each)[0] == host)
        self._begin_links()

    def _refusal(self, address: Address, key: bytes | None) -> str | None:
        if (key is None) != (self._peers is None):
            return "needs_keys" if key is not None else "no_key"
        if key is not None and self._peers is not None and key not in self._peers:
            return "unlisted_listener"
        if address in self._links or self._context is None:
            return None
        if (now := self._turn.now()) >= self._count_at:
            # Of a link's descriptors two are taken only later, when libzmq's threads have made the connection.
            coming = LINK_FILES // 2 * sum(link.is_new() for link in self._links.values())
            self._files, self._count_at = free_files() - coming - SPARE_FILES // 2, now + COUNT_FILES_S
        return "no_files" if self._files < LINK_FILES else None

    # -- admission ---------------------------------------------------------------------------------

    def _guard(self, router: zmq.Socket[bytes]) -> None:
        """Make the listener, before it is bound, ask about every key, and report connections that it turned away."""
        assert self._context is not None
        if self._pair is not None:
            zap = self._context.socket(zmq.ROUTER)
            self._zap = _Link(zap, self._turn, 16, self._from_zap)
            zap.setsockopt(zmq.LINGER, 0)
            zap.bind(ZAP_ENDPOINT)
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # Without this, libzmq admits every connection while no handler answers its questions.
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._watch(router, (zmq.EVENT_LISTENING, *_COUNTED, *_FAILED))

    def _watch(self, socket: zmq.Socket[bytes], events: Iterable[int]) -> None:
        endpoint = f"{MONITOR_ENDPOINT}{next(self._monitors)}"
        socket.monitor(endpoint, sum(events))
        with self._events_lock:
            assert self._events is not None
            self._events.connect(endpoint)
        if self._door is not None:
            self._door.ring()  # libzmq signals no events on a socket that was not polled since it connected

    def _take_events(self, loop: asyncio.AbstractEventLoop) -> Iterator[Opened]:
        taken, others = list[list[bytes]](), list[tuple[zmq.Event, int, str, float]]()
        with self._events_lock, contextlib.suppress(zmq.Again):
            assert self._events is not None
            while True:
                taken.append(self._events.recv_multipart(zmq.NOBLOCK))
        for head, endpoint in taken:
            number, value = struct.unpack("=HI", head)
            event = zmq.Event(number)
            if event == zmq.EVENT_LISTENING:
                yield Opened(value, endpoint.decode(), is_listener=True)
                continue
            if event in _OPENED:
                yield Opened(value, endpoint.decode(), event == zmq.EVENT_ACCEPTED)
            elif event == zmq.EVENT_DISCONNECTED:
                gone = self._door.connections.get(value) if self._door is not None else None
                yield Opened(value, "")
                if gone is not None and not gone.is_accepted:
                    continue  # only connections of the listener are counted
            if event != zmq.EVENT_CONNECTED:
                others.append((event, value, endpoint.decode(), self._turn.now()))
        if others:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_events, others)

    def _from_zap(self, frames: list[zmq.Frame]) -> None:
        """Answer one question of libzmq (ZAP, RFC 27): whether the owner of this key may enter."""
        route, _, version, request, _domain, _address, _identity, mechanism, *credentials = [x.bytes for x in frames]
        is_known = (
            self._peers is not None
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and credentials[0] in self._peers
        )
        status = (b"200", b"OK", credentials[0].hex().encode()) if is_known else (b"400", b"unlisted key", b"")
        if not is_known:
            key = credentials[0].hex() if len(credentials) == 1 else "?"
            self._on_refused("unlisted_key", f"{_address.decode(errors='replace')} with key {key}")
        if self._zap is not None:
            self._zap.send([route, b"", version, request, *status, b""])

    def _on_events(self, events: list[tuple[zmq.Event, int, str, float]]) -> None:
        for event, value, endpoint, at in events:
            if event in _COUNTED:
                self._counts[_COUNTED[event]] += 1
            elif failed := [x for x, y in self._links.items() if event in _LOST and y.may_be(endpoint, at)]:
                for address in failed:
                    self._links[address].is_refused = True
                    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._pair is not None:
                        self._on_refused("turned_away", address)
            elif event in _FAILED:
                cause = _cause(event, value, self._pair is not None)
                self._counts[f"rejected.{cause}"] += 1
                if self._pair is not None and cause != "unlisted_key":
                    self._on_refused(cause, "")
        if self._router is not None:
            self._router.look_again()  # once all is taken, `forgive` clears the bytes of ended connections

    def _from_router(self, frames: list[zmq.Frame]) -> None:
        if (fd := _fd_of(frames[1])) < 0:
            return self._dropped(fd, 1, len(frames[1]))
        route, packet = frames[0].bytes, self._take(fd, frames[1], is_accepted=True)
        principal, _ = self._principals.get(route, ("", fd))
        if principal:
            self._principals.move_to_end(route)
        else:
            principal, _ = self._principals[route] = self._principal(frames[1]), fd
            if len(self._principals) > MAX_ROUTES:
                del self._unread[self._principals.popitem(last=False)[1][0]]  # the next check counts them anew
        if self._num_direct < DIRECT and not self._waiting:
            self._num_direct += 1
            self._deliver(ReplyTo(route), packet, principal)
        elif not self._waiting.put(principal, ReplyTo(route), packet):
            self._counts["dropped_in"] += 1

    def _serve(self, until: float) -> bool:
        """End a turn of the listener: hand over waiting packets, and return True if more wait."""
        self._num_direct = 0
        while self._waiting:
            principal, route, packet = self._waiting.take()
            self._deliver(route, packet, principal)
            if self._turn.now() >= until:
                break
        return bool(self._waiting)

    def _from_dealer(self, address: Address, frames: list[zmq.Frame]) -> None:
        self._deliver(address, self._take(_fd_of(frames[0]), frames[0], is_accepted=False), "")

    def _take(self, fd: int, frame: zmq.Frame, is_accepted: bool) -> bytes:
        packet = frame.bytes
        self._counts["packets_in"] += 1
        self._counts["bytes_in"] += len(packet)
        if self._door is not None:
            self._door.deliver(fd, self._on_wire(len(packet)), is_accepted)
        return packet

    def _on_wire(self, size: int) -> int:
        """Return the exact bytes of a frame on a connection: with a larger count a peer could be ahead unseen."""
        size += CURVE_BYTES * (self._pair is not None)
        return size + (2 if size < 256 else 9)

    def _dropped(self, fd: int, parts: int, num_bytes: int, route: bytes = b"") -> None:
        """Count a dropped message: it had too many parts, or an older protocol that libzmq gives no descriptor for."""
        self._counts["dropped_frames"] += 1
        if self._door is None:
            return
        self._mute(self._door, self._door.deliver(fd, num_bytes + parts * self._on_wire(0), is_accepted=True), route)

    def _mute(self, door: Door, connection: Connection | None, route: bytes) -> None:
        # Another connection may have the descriptor by now, or this one may be muted already.
        if connection is not None and connection.route in (b"", route) and not connection.muted_until:
            self._counts["muted"] += 1
            connection.mute()
            door.ring()

    def _principal(self, frame: zmq.Frame) -> str:
        if self._pair is not None:
            return f"key:{frame.get('User-Id')}"
        return f"host:{frame.get('Peer-Address')}"

    def _deliver(self, origin: Address | ReplyTo, packet: bytes, principal: str) -> None:
        try:
            if self._on_packet(origin, packet, principal) and isinstance(origin, bytes) and self._door is not None:
                _, fd = self._principals.get(origin, ("", -1))
                self._mute(self._door, self._door.connections.get(fd), origin)
        except Exception as exc:
            # A bug in the handler of packets must not end the listener.
            self._turn.loop.call_exception_handler({"message": "a packet could not be handled", "exception": exc})


def _fd_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came from; -1 if libzmq does not know."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1  # before ZMTP 3.0


class _Waiting:
    """Packets that arrived faster than they are handled: principals take turns, and within one its connections."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[ReplyTo, deque[bytes]]] = OrderedDict()
        self._bytes: Counter[str] = Counter()
        self._total = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, principal: str, route: ReplyTo, packet: bytes) -> bool:
        queues, size = self._queues.get(principal), len(packet) + WAITING_BYTES
        number = len(queues.get(route, ())) if queues is not None else 0
        # Half of a principal's room is reserved for connections without a waiting packet.
        room = MAX_WAITING_ALL // (2 if number else 1)
        is_full = self._total + size > MAX_WAITING_TOTAL // (2 if queues else 1)  # half is for other principals
        if number >= MAX_WAITING or self._bytes[principal] + size > room or is_full:
            return False
        self._bytes[principal] += size
        self._total += size
        self._queues.setdefault(principal, OrderedDict()).setdefault(route, deque()).append(packet)
        return True

    def take(self) -> tuple[str, ReplyTo, bytes]:
        """Take the next packet; its connection and its principal go to the end of their queues."""
        principal, queues = self._queues.popitem(last=False)
        route, queue = queues.popitem(last=False)
        packet = queue.popleft()
        self._total -= len(packet) + WAITING_BYTES
        if queue:
            queues[route] = queue
        if queues:
            self._queues[principal] = queues
            self._bytes[principal] -= len(packet) + WAITING_BYTES
        else:
            del self._bytes[principal]
        return principal, route, packet


class _Turn:
    """The time that the sockets of a plane share in one turn of the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self._until: float | None = None

    def until(self) -> float:
        if self._until is None:
            self._until = self.now() + TURN_S
            self.loop.call_soon(self._end)
        return self._until

    def _end(self) -> None:
        self._until = None


class _Link:
    """One socket on the event loop.

    Args:
        most: Most parts of a message; a message with more is dropped.
        on_dropped: Called for a dropped message with its connection's descriptor, its parts, their bytes, the first.
        on_turn: Called with the end of this turn when nothing more is taken in it; returns True if there is more to do.
        door: Notified when everything was taken.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        turn: _Turn,
        most: int,
        on_frames: Callable[[list[zmq.Frame]], None],
        on_dropped: Callable[[int, int, int, bytes], None] = lambda fd, parts, num_bytes, first: None,
        on_turn: Callable[[float], bool] | None = None,
        door: Door | None = None,
    ) -> None:
        self.socket, self._most, self._on_frames, self._on_dropped = socket, most, on_frames, on_dropped
        self._turn, self._on_turn, self._door, self._loop = turn, on_turn, door, turn.loop
        self._made_at = self._loop.time()
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.is_refused = False  # as libzmq reports it
        self.name: tuple[str, str] | None = None  # the host name and its IP address, if the address has a name
        self._heard = 0, 0.0  # messages received at the last check that saw more, and its time
        self.error = 0  # error number of the last failed send: `EHOSTUNREACH` if the connection has ended
        self._sent = self._received = 0
        self._received_before = -1  # messages received at the first of the present failed sends; -1 without one
        self._failing_since = 0.0
        self._skipped = 0  # dropped parts of a message that has not ended
        self._skipped_bytes, self._first = 0, b""
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_due = False
        self._loop.add_reader(self._fd, self._receive)
        self.look_again()

    def send(self, frames: list[bytes]) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            self.error = exc.errno or 0  # the queue is full, or the connection has ended
            return False
        finally:
            self.look_again()
        self._sent += 1
        self._received_before = -1
        return True

    def is_unheard(self) -> bool:
        """Return True if no message has arrived for `RENEW_S`; called whenever a packet is sent."""
        if self._received != self._heard[0]:
            self._heard = self._received, self._loop.time()
        return self._loop.time() - max(self._heard[1], self._made_at) >= RENEW_S

    def may_be(self, endpoint: str, at: float) -> bool:
        """Return True if a handshake with `endpoint` that failed at `at` may have been this link's."""
        return self.endpoint == endpoint and self._made_at < at and not self._received

    def is_new(self) -> bool:
        return self._loop.time() - self._made_at < RENEW_S

    def is_dead(self) -> bool:
        """Return True, after a failed send, if ZMQ has given the connection up or is as good as stuck."""
        now = self._loop.time()
        if self._received != self._received_before:
            self._received_before, self._failing_since = self._received, now
        if self.is_new():
            return False
        # With fewer sends than the queue holds, it cannot be full, so ZMQ has no connection.
        return self.is_refused or self._sent < QUEUE or now - self._failing_since >= STUCK_S

    def close(self, linger_ms: int) -> None:
        self._loop.remove_reader(self._fd)
        self.socket.close(linger_ms)

    def look_again(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._is_due = False
        self._receive()

    def _receive(self) -> None:
        until = self._turn.until()
        # Half of the time is left for `on_turn`, which handles packets afterwards.
        take_until = until if self._on_turn is None else until - TURN_S / 2
        is_drained, orphaned = False, self._door.orphaned if self._door is not None else 0
        while not self.socket.closed:
            try:
                if frames := self._next():
                    self._received += 1
                    self._on_frames(frames)
            except zmq.Again:
                is_drained = True
                if self._door is not None:
                    self._door.forgive(orphaned)
                break
            except zmq.ZMQError as exc:
                self._loop.call_exception_handler({"message": "a control socket failed", "exception": exc})
                return
            except Exception as exc:
                self._loop.call_exception_handler({"message": "a message could not be taken", "exception": exc})
            if self._turn.now() >= take_until:
                break
        if (self._on_turn is not None and self._on_turn(until)) or not (is_drained or self.socket.closed):
            self.look_again()

    def _next(self) -> list[zmq.Frame]:
        """Take a message, or raise `zmq.Again`; return an empty list while parts of too long a message are dropped."""
        frames: list[zmq.Frame] = []
        if not self._skipped:
            frames.append(self.socket.recv(zmq.NOBLOCK, copy=False))
            # libzmq shows a message once all of it has arrived, so none of these waits.
            while frames[-1].more and len(frames) < self._most:
                frames.append(self.socket.recv(zmq.NOBLOCK, copy=False))
            if not frames[-1].more:
                return frames
            self._skipped_bytes, self._first = sum(map(len, frames[self._most - 1 :])), frames[0].bytes
        for _ in range(SLICE):
            part = self.socket.recv(zmq.NOBLOCK, copy=False)
            self._skipped += 1
            self._skipped_bytes += len(part)
            if not part.more:
                self._on_dropped(_fd_of(part), 1 + self._skipped, self._skipped_bytes, self._first)
                self._skipped = 0
                break
        return []
