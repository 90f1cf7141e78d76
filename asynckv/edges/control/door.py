"""The door keeper of a control plane: it bounds connections, and the bytes that wait behind each.

libzmq gathers all parts of a message before it shows any, at 64 bytes of memory for two on the wire. It also aborts the
process if a peer leaves while a bounded receive queue is full (`docs/reliability.md`). So the queues have no bound, and
this thread bounds them from outside: it asks the kernel how many bytes have arrived on a duplicate of each descriptor
(`TCP_INFO`), subtracts the bytes that the loop was given, and shuts down connections that are too far ahead.

The thread sleeps while nothing arrives: a descriptor is watched until bytes come, then checked every `TICK_S` until it
is quiet. A tick takes the GIL twice; to watch a descriptor anew and to be woken by it takes it four times. libzmq may
read bytes before this thread is scheduled; epoll then reports them only if the connection can be written. So all are
checked every `LOOK_S`, or every `REST_S` if none is busy. Beyond the limits on connections, the one of least worth
ends: the oldest that has said nothing, or else the oldest that was never answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import resource
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from asynckv.edges.bell import Bell
from asynckv.errors import ConfigError

TICK_S = 0.02
QUIET_TICKS = 2  # ticks without a byte after which a connection is watched by epoll again
MAX_AHEAD = 1024 * 1024  # bytes that one connection may be ahead of the loop; memory holds 32 times as many at worst
MAX_AHEAD_ALL = 4 * MAX_AHEAD  # the same of all, and of all that have ended: beyond it no new connection is taken
MAX_LINK_AHEAD = 20 * 1024 * 1024  # the same of one link to a listener, because a single answer may have 16 MiB
UNSEEN = 64 * 1024  # bytes that a connection may leave behind unseen, if it ends before this thread is scheduled
LOOK_S = 0.25  # seconds between two checks of all connections if one is busy or muted
REST_S = 5.0  # the same if none is: each check of an idle engine costs 0.1 ms
MUTE_S = 2.0  # a connection is not heard for this long after a message with too many parts
SWEEPS_S = (0.3, 1.0, 5.0)  # times of checks after a socket was closed; it lingers for 0.2 s
MAX_CONNECTIONS = 4096
ANSWERED = 2
LARGE = 4  # a host with more than this part of all connections loses one to another host's newcomer
SPARE_FILES = 128  # descriptors that must be free at the start: libzmq aborts the process when it gets none
_ACKED_AT, _RECEIVED_AT = 120, 128  # `tcpi_bytes_acked` and `tcpi_bytes_received` in `struct tcp_info`
_ATTACH_FILTER, _DETACH_FILTER, _BPF_RET = 26, 27, 6
_worth = attrgetter("worth")
OnFailed = Callable[[Exception], object]


@dataclass(frozen=True, slots=True)
class Opened:
    """News that a descriptor became a connection, or, with an empty endpoint, no longer is one."""

    fd: int  # the descriptor, as libzmq numbers it
    endpoint: str
    is_accepted: bool = False  # True if it came to our listener
    is_listener: bool = False  # True if it is our listener

    def peer(self, one: socket.socket) -> tuple[str, int]:
        """Return the other side's address; `OSError` if something else has the descriptor's number by now."""
        ours, theirs = one.getsockname(), one.getpeername()
        if (ours if self.is_accepted else theirs)[1] != int(self.endpoint.rpartition(":")[2]):
            raise OSError(errno.EBADF, "another connection has that descriptor number")
        return str(theirs[0]), int(theirs[1])


@dataclass(slots=True, eq=False)
class Connection:
    fd: int  # libzmq's number of its descriptor
    duplicate: socket.socket  # its own descriptor, so that the number never comes to mean another connection
    host: str
    is_accepted: bool
    delivered: int = 0  # bytes on the wire that the loop was given; the loop adds to it
    arrived: int = 0  # bytes on the wire, as last seen
    quiet: int = 0  # ticks without a byte
    spoke_early: bool = False  # True if the loop got bytes of it before the thread saw it
    muted_until: float = 0.0  # time at which it is heard again; 0 if it is not muted
    principal: str = ""
    route: bytes = b""
    sent: int = 0  # bytes that libzmq was given for it
    taken: int = 0  # bytes that the peer's kernel took

    def look(self) -> None:
        info = self.duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        arrived = struct.unpack_from("=Q", info, _RECEIVED_AT)[0]
        self.quiet = 0 if arrived > self.arrived else self.quiet + 1
        self.arrived = arrived

    def has_news(self) -> bool:
        before = self.arrived
        try:
            self.look()
        except OSError:
            return True
        return self.arrived > before

    @property
    def worth(self) -> int:
        """Return 0 if nothing was heard of it, 1 if it was never answered, as rubbish is not, and else `ANSWERED`."""
        if self.muted_until or not (self.delivered or self.spoke_early):
            return 0
        return ANSWERED if self.sent else 1

    @property
    def ahead(self) -> int:
        return self.arrived - self.delivered

    def look_unread(self) -> int:
        with contextlib.suppress(OSError):  # the connection has ended
            info = self.duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
            self.taken = struct.unpack_from("=Q", info, _ACKED_AT)[0]
        self.sent = max(self.sent, self.taken)  # `sent` lacks the handshake, which libzmq sends itself
        return self.sent - self.taken

    def mute(self, is_on: bool = True) -> None:
        """Drop arriving packets for `MUTE_S`; the peer's kernel sends them again, ever more slowly."""
        try:
            _drop(self.duplicate, is_on)
        except OSError:  # the connection has ended, or this kernel has no filters
            self.shut()
        self.muted_until = time.monotonic() + MUTE_S if is_on else 0.0  # last: the loop mutes only while it is 0

    def shut(self) -> None:
        """End the connection: libzmq sees that the peer has gone, and a peer that waits to send more is reset."""
        with contextlib.suppress(OSError):
            self.duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.duplicate.shutdown(socket.SHUT_RDWR)


class Door:
    """The thread that watches the connections of one control plane.

    Args:
        fd: Descriptor that is readable when `take` has something.
        take: Returns the connections opened and closed since the last call; called in the thread.
        on_failed: Called in the thread with the reason if it ends without `close`, after all connections were shut.
    """

    def __init__(
        self, fd: int, take: Callable[[], Iterable[Opened]], counts: Counter[str], on_failed: OnFailed
    ) -> None:
        most, free = resource.getrlimit(resource.RLIMIT_NOFILE)[0], free_files()
        if free < SPARE_FILES:
            raise ConfigError(
                f"only {free} of {most} file descriptors are free, and an engine needs {SPARE_FILES}: libzmq would "
                f"abort the process; raise the limit (ulimit -n 4096)"
            )
        self.most = min(MAX_CONNECTIONS, free // 4)  # each takes two
        self.most_per_host = self.most // 2
        self.connections: dict[int, Connection] = {}  # by libzmq's number of the descriptor
        self.orphaned = 0  # all bytes ever left undelivered by ended connections; only the thread adds to it
        self._forgiven = 0  # of these, bytes that were delivered since, or cannot be; only the loop adds to it
        self._listener: socket.socket | None = None
        self._is_shut = False
        self._early: Counter[int] = Counter()  # bytes of links that the thread has not seen yet
        self._take, self._counts, self._on_failed = take, counts, on_failed
        self._hosts: dict[str, dict[Connection, None]] = {}  # accepted connections, the oldest first
        self._watched: dict[int, Connection] = {}  # all, by the number of the duplicate
        self._busy: set[Connection] = set()  # connections from which bytes have arrived lately
        self._sweeps: list[float] = []  # times of checks for descriptors that libzmq closed without an event
        self._epoll = select.epoll()
        self._bell = Bell()
        self._is_closed = False
        self._fd = fd
        for each in (fd, self._bell.fileno()):
            self._epoll.register(each, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="asynckv-door", daemon=True)
        self._thread.start()

    def deliver(self, fd: int, num_bytes: int, is_accepted: bool) -> Connection | None:
        if (connection := self.connections.get(fd)) is not None:
            connection.delivered += num_bytes
        elif is_accepted:
            self._forgiven += num_bytes
            self._early[fd] += 0  # notes that it spoke, without a count: the bytes may be of one that has ended
            if (seen := self.connections.get(fd)) is not None:
                seen.spoke_early = True  # the thread saw it at this very moment
        else:
            self._early[fd] += num_bytes
        return connection

    def forgive(self, orphaned: int) -> None:
        """Note that the loop has taken all there was, so that no bytes wait that were orphaned before."""
        self._forgiven = max(self._forgiven, orphaned)

    def sweep(self) -> None:
        """Close duplicates once libzmq has closed the sockets behind them, which it does not announce."""
        now = time.monotonic()
        self._sweeps = [now + each for each in SWEEPS_S]
        self.ring()

    def ring(self) -> None:
        self._bell.ring()

    def close(self) -> None:
        self._is_closed = True
        self.ring()
        self._thread.join()
        for connection in self.connections.values():
            connection.duplicate.close()
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()
        self._bell.close()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as exc:  # connections would be unbounded without this thread, so all are shut
            for connection in self.connections.values():
                connection.shut()
            with contextlib.suppress(OSError, RuntimeError):  # the listener's descriptor is bad, or the loop is closed
                self._on_failed(exc)
                self._shut(True)

    def _watch(self) -> None:
        tick_at = looked_at = 0.0
        while not self._is_closed:
            is_at_rest = not self._busy and not any(each.muted_until for each in self.connections.values())
            look_at = looked_at + (REST_S if is_at_rest else LOOK_S)
            wake_at = min(
                *self._sweeps, tick_at if self._must_tick() else math.inf, look_at if self.connections else math.inf
            )
            has_opened = self._poll(None if wake_at == math.inf else max(wake_at - time.monotonic(), 0.0))
            if has_opened or time.monotonic() >= look_at:
                self._bell.silence()
                for opened in self._take():
                    self._on_opened(opened)
            if self._sweeps and time.monotonic() >= self._sweeps[0]:
                self._sweeps = self._sweeps[1:]
                for fd in [fd for fd, c in self.connections.items() if not _is_same(fd, c.duplicate.fileno())]:
                    self._forget(fd)
            if time.monotonic() >= look_at:
                looked_at = self._look()
            if self._must_tick() and time.monotonic() >= tick_at:
                self._tick()
                tick_at = time.monotonic() + TICK_S

    def _must_tick(self) -> bool:
        return bool(self._busy) or self._is_shut

    def _poll(self, wait_s: float | None) -> bool:
        """Wait, attend to connections with news, and return True if libzmq or the bell has something to say."""
        has_opened = False
        for fd, _ in self._epoll.poll(wait_s):
            if fd in (self._fd, self._bell.fileno()):
                has_opened = True
            elif fd in self._watched and self._watched[fd].has_news():
                self._attend(self._watched[fd])
        return has_opened

    def _look(self) -> float:
        """Attend to all connections with news, end the silence of muted ones whose time is up; return the time."""
        for each in self.connections.values():
            if each not in self._busy and each.has_news():
                self._attend(each)
        now = time.monotonic()
        for each in [x for x in self.connections.values() if 0 < x.muted_until < now + LOOK_S]:
            each.mute(is_on=False)
        return now

    def _attend(self, connection: Connection) -> None:
        self._busy.add(connection)
        self._epoll.modify(connection.duplicate.fileno(), _UNWATCHED)

    def _on_opened(self, opened: Opened) -> None:
        self._forget(opened.fd)
        spoke_early, early = opened.fd in self._early, self._early.pop(opened.fd, 0)
        if not opened.endpoint:
            return
        try:
            duplicate = socket.socket(fileno=os.dup(opened.fd))
        except OSError as exc:
            self.orphaned += UNSEEN * opened.is_accepted
            if exc.errno != errno.EBADF:  # with EBADF it has been closed already
                self._end_unwatched(opened)
            return
        if opened.is_listener:
            self._listener = duplicate
            return
        try:
            theirs = opened.peer(duplicate)
        except (OSError, IndexError, TypeError):
            self.orphaned += UNSEEN * opened.is_accepted
            duplicate.close()
            return
        connection = Connection(opened.fd, duplicate, theirs[0], opened.is_accepted, early, spoke_early=spoke_early)
        self.connections[opened.fd] = self._watched[duplicate.fileno()] = connection
        connection.spoke_early = connection.spoke_early or opened.fd in self._early  # it may speak at this very moment
        self._epoll.register(duplicate.fileno(), _WATCHED)
        if opened.is_accepted:
            self._hosts.setdefault(connection.host, {})[connection] = None
            self._make_room(connection)

    def _end_unwatched(self, opened: Opened) -> None:
        with contextlib.suppress(OSError, IndexError, TypeError):
            lent = socket.socket(fileno=opened.fd)  # libzmq's descriptor, so it is detached and not closed
            try:
                opened.peer(lent)
                lent.shutdown(socket.SHUT_RDWR)
                self._counts["cut.unwatched"] += 1
            finally:
                lent.detach()

    def _forget(self, fd: int) -> None:
        connection = self.connections.pop(fd, None)
        if connection is None:
            return
        if connection.is_accepted:
            with contextlib.suppress(OSError):
                connection.look()
            self.orphaned += max(connection.ahead, UNSEEN)
            theirs = self._hosts[connection.host]
            del theirs[connection]
            if not theirs:
                del self._hosts[connection.host]
        self._busy.discard(connection)
        del self._watched[connection.duplicate.fileno()]
        self._epoll.unregister(connection.duplicate.fileno())
        connection.duplicate.close()

    def _make_room(self, newest: Connection) -> None:
        theirs, most = self._hosts[newest.host], max(self._hosts.values(), key=len)
        if is_much := len(theirs) > self.most_per_host:
            others = [c for c in theirs if c is not newest]
        elif sum(map(len, self._hosts.values())) > self.most:
            others = [c for c in self.connections.values() if c.is_accepted and c is not newest]
        else:
            return
        least = min(others, key=_worth)
        if least.worth == ANSWERED:
            # The last to come ends, unless another host with a large part of all places can give one.
            may_stay = not is_much and newest not in most and len(most) > self.most // LARGE
            least = next(reversed(most)) if may_stay else newest
        self._cut(least, "too_many")

    def _tick(self) -> None:
        for connection in list(self._busy):
            try:
                connection.look()
            except OSError:
                self._cut(connection, "unread")
                continue
            if connection.ahead < 0:
                # The loop was given bytes of an earlier connection with this descriptor.
                self.orphaned += connection.ahead
                connection.delivered = connection.arrived
            if connection.ahead > (MAX_AHEAD if connection.is_accepted else MAX_LINK_AHEAD):
                self._cut(connection, "unread")
            elif connection.quiet > QUIET_TICKS:
                self._busy.discard(connection)
                self._epoll.modify(connection.duplicate.fileno(), _WATCHED)
        # Each `ahead` is read once, because the loop delivers meanwhile, and the sum must lose what it counted.
        accepted = sorted(((c.ahead, c) for c in self.connections.values() if c.is_accepted), key=itemgetter(0))
        ahead = sum(num_bytes for num_bytes, _ in accepted)
        while ahead > MAX_AHEAD_ALL:
            num_bytes, connection = accepted.pop()
            ahead -= num_bytes
            self._cut(connection, "unread")
        orphans = self.orphaned - self._forgiven
        if self._is_shut is not (is_shut := orphans > MAX_AHEAD_ALL / (2 if self._is_shut else 1)):
            self._shut(is_shut)

    def _shut(self, is_shut: bool) -> None:
        self._is_shut = is_shut
        self._counts["shut"] += is_shut
        if self._listener is not None:
            _drop(self._listener, is_shut)

    def _cut(self, connection: Connection, cause: str) -> None:
        self._counts[f"cut.{cause}"] += 1
        connection.shut()
        self._forget(connection.fd)


def free_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def _drop(one: socket.socket, is_on: bool) -> None:
    nothing = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RET, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(nothing))
    one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER if is_on else _DETACH_FILTER, program)


def _is_same(fd: int, duplicate: int) -> bool:
    try:
        return os.fstat(fd).st_ino == os.fstat(duplicate).st_ino
    except OSError:
        return False


# Arriving bytes make the kernel report whatever is possible at that moment: writing, if libzmq has read them already.
_WATCHED = select.EPOLLIN | select.EPOLLOUT | select.EPOLLET
_UNWATCHED = select.EPOLLET
