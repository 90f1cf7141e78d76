"""Posting threads: bulk reads run here, so that neither a copy nor a drained socket holds up the event loop.

Each thread has a NIXL agent of its own: its own UCX worker, connections and lock. (Several workers in one agent copy no
faster, and share a lock on which the loop would wait.) It publishes no metadata, so remote readers never reach it.

The thread posts reads, checks transfers, and sleeps in epoll on UCX's descriptors and a bell. Orders arrive by a
queue. Reads that wait there behind one another for the same peer and table become one transfer, and end together, which
saves NIXL calls and waits for Python's lock. News leaves in batches, the first at once and then one per `TELL_S`. The
thread's end destroys its agent, and nothing writes after that.
"""

from __future__ import annotations

import asyncio
import enum
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import anyio.to_thread
import numpy as np

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.aside import end_at_exit
from asynckv.edges.bell import Bell
from asynckv.edges.nic.agent import Agent, make_epoll
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import AgentInfo

MAX_QUEUED = 1024  # most reads that wait for one thread; the core's windows are far below
JOIN_BYTES = 8 << 20  # most bytes of joined reads: twice as much saved no more CPU, and a peer's window is only 32 MiB
JOIN_PIECES = 1024  # most descriptors of joined reads: small pieces take longer than the post, so more saved nothing
SAFETY_S = 0.005  # some wake-ups are missed; a sleep this short finds the ends that they would have announced
POLL_S = 0.001  # seconds between two checks of all transfers while bytes arrive, or if UCX has no descriptors
NAP_S = 0.00002  # pause after bytes that ended no transfer: a tight loop would keep Python's lock from the event loop
RESTLESS_S = 0.1  # progress is made for this long after a peer was dropped, or UCX would keep the connection's socket
DOUBT_S = 0.25
PATIENCE_S = 0.5  # a staged read waits this long for any slot of its peer's to come free, then it is read directly
TELL_S = 0.0005
CLOSE_S = 10.0  # seconds that `close` of a plane waits for its threads; one post takes milliseconds


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of the agent's, with a future that the caller may wait for."""

    make: Callable[[Agent], None]
    made: Future[None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Post:
    transfer_id: TransferId
    name: str
    read: ReadRequest | Look
    is_off: Callable[[], bool]


_Order = _Change | _Post


@dataclass(slots=True)
class _Line:
    moved_at: float  # when it began, or one of its reads last had a slot
    posts: deque[_Post] = field(default_factory=deque)


class _Woken(enum.Enum):
    BY_ORDER = enum.auto()
    BY_UCX = enum.auto()
    BY_TIME = enum.auto()


class Poster:
    """One posting thread.

    Args:
        agent: The thread's agent, with its memory registered; the thread owns it from here on.
        tell: Called on the thread with news, in batches.
        broke: Called on the loop when the thread ends by an exception. All its reads are reported before or after:
            unposted ones as `FAILED`, others as `IN_DOUBT`, and as `FAILED` once its agent is known to be gone.
        tell_s: Seconds that news may wait for more while there is more to post.
        joins: True if reads that wait behind one another for the same peer and table become one transfer.
    """

    def __init__(
        self,
        name: str,
        agent: Agent,
        tell: Callable[[list[TransferEnded]], None],
        loop: asyncio.AbstractEventLoop,
        broke: Callable[[BaseException], None],
        *,
        tell_s: float = TELL_S,
        joins: bool = True,
    ) -> None:
        self.name, self._joins = name, joins
        self.agent, self._tell, self._loop, self._broke, self._tell_s = agent, tell, loop, broke, tell_s
        self._orders: deque[_Order] = deque()
        self._lines: dict[str, _Line] = {}  # staged reads that wait for a slot, by the agent that they read
        self._gate = threading.Lock()  # held to order and to end, so that every order is either obeyed or refused
        self._changing: Future[None] | None = None
        self._joined: dict[TransferId, list[TransferId]] = {}  # reads that end with the one whose transfer they joined
        self._mine: dict[TransferId, int] = {}  # bytes of the reads that were posted; 0 for those in doubt
        self._news: list[TransferEnded] = []
        self._told_at = self._swept_at = 0.0
        self.num_taken = 0  # reads that were handed over
        self._queued_bytes = 0
        self._ended_bytes = 0
        self._copied = (0, 0.0)
        self._restless_until = 0.0
        self._is_asleep = self._is_stopping = False
        self._is_alive = True
        self.posts = self.joined = self.batches = self.wakeups = self.rescued = 0
        self._bell = Bell()
        # The thread is a daemon, because the interpreter would otherwise wait for it before `atexit` tells it to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        end_at_exit(self)
        self._thread.start()

    # -- called by the loop ------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """True if orders are still obeyed; False in the child of a fork, which no thread survives."""
        return self._is_alive and not self._is_stopping and self._thread.is_alive()

    @property
    def backlog(self) -> int:
        return self._queued_bytes - self._ended_bytes

    def load(self, remote: AgentInfo, memories: Sequence[Memory]) -> Future[None]:
        return self._change(partial(_load, remote, memories))

    def drop(self, name: str, *, keep: bool = False) -> None:
        """Forget a remote agent, or with `keep` only its descriptor lists, after all earlier orders."""
        self._change(lambda agent: agent.drop_lists(name) if keep else self._drop(agent, name))

    def _change(self, make: Callable[[Agent], None]) -> Future[None]:
        change = _Change(make)
        if not self._order(change):
            change.made.set_exception(BackendError(f"{self.name} has ended"))
        return change.made

    def post(
        self, transfer_id: TransferId, name: str, read: ReadRequest | Look, is_off: Callable[[], bool] = lambda: False
    ) -> bool:
        """Take a read over, or return False if ended or full; it ends as `FAILED` if `is_off` is true at its turn."""
        if self.num_taken - self.posts >= MAX_QUEUED:
            return False
        if not self._order(_Post(transfer_id, name, read, is_off)):
            return False
        self.num_taken += 1
        self._queued_bytes += read.num_bytes
        return True

    def detach(self, transfer_id: TransferId) -> bool:
        """Let a staged read that was handed over place nothing any more; return False if it is read directly."""
        return self.agent.stage is not None and self.agent.stage.detach(transfer_id)

    def forget(self, transfer_id: TransferId) -> None:
        """Note that the end of a read that was handed over is known."""
        if self.agent.stage is not None:
            self.agent.stage.forget(transfer_id)

    def take_pace(self) -> tuple[int, float]:
        copied, self._copied = self._copied, (0, 0.0)
        return copied

    def stop(self) -> None:
        self._is_stopping = True
        self._bell.ring()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, and raise `BackendError` unless its agent is gone."""
        if not self.wait(timeout_s):
            raise BackendError(f"{self.name} did not return from NIXL in time")
        self._bell.close()
        if not self._is_alive:
            # If it is alive, a fork left the thread behind, perhaps with its agent locked.
            self.agent.close()

    def _order(self, order: _Order) -> bool:
        with self._gate:
            if not self.is_alive:
                return False
            self._orders.append(order)
        if self._is_asleep:
            self._bell.ring()
        return True

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as exc:  # transfers must be told whatever the exception is
            self._fail(exc)
        else:
            self._refuse(BackendError(f"{self.name} was closed"))
            with suppress(BackendError):  # `join` checks again
                self.agent.close()

    def _work(self) -> None:
        agent, why = self.agent, _Woken.BY_ORDER
        sleeper = make_epoll()
        try:
            for fd in (self._bell.fileno(), *agent.fds):
                sleeper.register(fd, select.EPOLLIN)
            while not self._is_stopping:
                self._obey(agent)
                # Without transfers, only events of UCX need progress.
                if agent.is_busy or why is not _Woken.BY_ORDER:
                    found = self._ask(agent, why)
                    if why is _Woken.BY_UCX and agent.running and not found:
                        # Bytes are arriving, so let some gather, and let the event loop have Python's lock meanwhile.
                        time.sleep(NAP_S)
                if self._news:
                    self._flush()
                why = self._sleep(sleeper, agent)
        finally:
            sleeper.close()

    def _ask(self, agent: Agent, why: _Woken) -> bool:
        now = time.monotonic()
        if why is _Woken.BY_UCX and agent.running and now - self._swept_at < POLL_S:
            found = agent.look()
        else:
            self._swept_at = now
            found = agent.sweep()
            self.rescued += len(found) if why is _Woken.BY_TIME else 0
        self._note(found)
        return bool(found)

    def _note(self, found: list[TransferEnded]) -> None:
        """Add the agent's news, once for each read of a joined transfer."""
        self._news += found
        for ended in found if self._joined else ():
            self._news += [ended._replace(transfer_id=other) for other in self._joined.get(ended.transfer_id, ())]
            if ended.ending is not Ending.IN_DOUBT:
                self._joined.pop(ended.transfer_id, None)

    def _next(self, agent: Agent) -> _Order | None:
        """Return the next order to obey: the first read of a line that may go on, or the first other order."""
        for name, line in self._lines.items():
            if self._may_go(agent, name):
                post = line.posts.popleft()
                if not line.posts:
                    del self._lines[name]
                return post
        while self._orders:
            order = self._orders.popleft()
            if agent.stage is None or not isinstance(order, _Post) or not order.read.is_staged:
                return order
            if order.name not in self._lines and agent.stage.slots.has_room(order.name):
                return order
            self._lines.setdefault(order.name, _Line(time.monotonic())).posts.append(order)
        return None

    def _may_go(self, agent: Agent, name: str) -> bool:
        """Return True if a line's first read has a slot now, or will have none soon, so that it is read directly."""
        line, now = self._lines[name], time.monotonic()
        if agent.stage is None or agent.stage.slots.has_room(name):
            line.moved_at = now
            return True
        only_doubtful = not any(transfer.staged for transfer in agent.running.values())
        return only_doubtful or now - line.moved_at > PATIENCE_S

    def _obey(self, agent: Agent) -> None:
        while not self._is_stopping and (order := self._next(agent)) is not None:
            match order:
                case _Post():
                    if reads := self._take(order):
                        self._post(agent, reads)
                case _Change(make, made):
                    if made.set_running_or_notify_cancel():
                        self._changing = made
                        _carry_out(make, agent, made)
                        self._changing = None
                case _:
                    assert_never(order)
            now = time.monotonic()
            if agent.running and now - self._swept_at > POLL_S:
                self._swept_at = now
                self._note(agent.sweep())
            if self._news and now - self._told_at > self._tell_s:
                self._flush()

    def _take(self, first: _Post) -> list[_Post]:
        """Take a read, and the reads behind it that may join it; return those whose pulls are not off."""
        taken, size, pieces = [first], first.read.num_bytes, len(first.read.local)
        self._mine[first.transfer_id] = size
        # A staged read is as large as its slot, and a look has no table.
        joins = self._joins and not isinstance(first.read, Look) and not first.read.table.boxes
        while joins and self._orders and isinstance(order := self._orders[0], _Post):
            read = order.read
            size, pieces = size + read.num_bytes, pieces + len(read.local)
            if (order.name, read.table) != (first.name, first.read.table) or size > JOIN_BYTES or pieces > JOIN_PIECES:
                break
            self._mine[order.transfer_id] = read.num_bytes
            self._orders.popleft()
            taken.append(order)
        self.posts += len(taken)
        off = [order.transfer_id for order in taken if order.is_off()]
        self._news += [TransferEnded(transfer_id, Ending.FAILED, "cancelled") for transfer_id in off]
        return [order for order in taken if order.transfer_id not in off]

    def _post(self, agent: Agent, orders: list[_Post]) -> None:
        """Post reads as one transfer, which has the id of the first; they end together."""
        first, *others = orders
        read = first.read
        if others and not isinstance(read, Look):
            self._joined[first.transfer_id] = [order.transfer_id for order in others]
            reads = [order.read for order in orders]
            local, remote = (np.concatenate([getattr(read, side) for read in reads]) for side in ("local", "remote"))
            sizes = (sum(getattr(read, size) for read in reads) for size in ("num_bytes", "num_descriptors"))
            read = ReadRequest(read.table, local, remote, *sizes)
        began = time.monotonic()
        ended = agent.post(first.transfer_id, first.name, read)
        if others and ended is not None and ended.ending is Ending.FAILED and not ended.peer_lost:
            # Nothing was posted, and perhaps only one of the reads is wrong.
            del self._joined[first.transfer_id]
            for order in orders:
                self._post(agent, [order])
            return
        self.joined += len(others)
        if ended is not None:
            self._note([ended])
            if ended.ending is Ending.DONE:
                num_bytes, seconds = self._copied
                self._copied = (num_bytes + read.num_bytes, seconds + time.monotonic() - began)

    def _drop(self, agent: Agent, name: str) -> None:
        agent.drop(name)
        self._restless_until = time.monotonic() + RESTLESS_S

    def _flush(self) -> None:
        news, self._news = self._news, []
        for ended in news:
            self._ended_bytes += self._mine.pop(ended.transfer_id, 0)
            if ended.ending in (Ending.IN_DOUBT, Ending.DETACHED):
                self._mine[ended.transfer_id] = 0
        self._told_at = time.monotonic()
        self.batches += 1
        self._tell(news)

    def _sleep(self, sleeper: select.epoll, agent: Agent) -> _Woken:
        timeout: float | None = None
        if agent.running:
            timeout = SAFETY_S if agent.fds else POLL_S
        elif time.monotonic() < self._restless_until:
            timeout = SAFETY_S
        elif agent.is_busy:
            timeout = DOUBT_S
        self._is_asleep = True
        try:
            # An order after this check finds `_is_asleep` set, and so wakes the thread.
            if self._orders or self._is_stopping or any(self._may_go(agent, name) for name in self._lines):
                return _Woken.BY_ORDER
            events = sleeper.poll(timeout)
        finally:
            self._is_asleep = False
        why = _Woken.BY_ORDER if events else _Woken.BY_TIME
        for fd, _ in events:
            if fd == self._bell.fileno():
                self._bell.silence()
            else:
                self.wakeups += 1
                why = _Woken.BY_UCX
        return why

    # -- the thread's end --------------------------------------------------------------------------

    def _refuse(self, cause: BackendError) -> None:
        """Fail all waiting orders, none of which was posted, and take no more from here on."""
        with self._gate:
            self._is_alive = False
            left = [*(post for line in self._lines.values() for post in line.posts), *self._orders]
            self._orders.clear()
            self._lines.clear()
        for order in left:
            match order:
                case _Post(transfer_id, read=read):
                    self._mine[transfer_id] = read.num_bytes
                    self._news.append(TransferEnded(transfer_id, Ending.FAILED, str(cause)))
                case _Change(made=made):
                    if made.set_running_or_notify_cancel():
                        made.set_exception(cause)
                case _:
                    assert_never(order)

    def _fail(self, exc: BaseException) -> None:
        """End by an exception: report every transfer, then again those that had been posted once the agent is gone."""
        cause = f"{self.name} ended by {exc!r}"
        if self._changing is not None and not self._changing.done():
            self._changing.set_exception(BackendError(cause))
        ended = {news.transfer_id for news in self._news if news.ending not in (Ending.IN_DOUBT, Ending.DETACHED)}
        posted = sorted(self._mine.keys() - ended)
        self._refuse(BackendError(cause))
        self._news += [TransferEnded(transfer_id, Ending.IN_DOUBT, cause) for transfer_id in posted]
        self._flush()
        # The exception may be kept for ever, and its frames refer to the agent.
        _clear_frames(exc)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._broke, exc)
        try:
            self.agent.close()
        except BackendError:
            return  # the agent lives, so posted reads stay in doubt
        # Posted reads can no longer write.
        self._news = [TransferEnded(transfer_id, Ending.FAILED, cause) for transfer_id in posted]
        self._flush()


def _load(remote: AgentInfo, memories: Sequence[Memory], agent: Agent) -> None:
    if not agent.is_connected(remote.name):
        agent.forget_broken(remote.name)
        agent.load(remote, memories)


def _carry_out(make: Callable[[Agent], None], agent: Agent, made: Future[None]) -> None:
    refused = ""
    try:
        make(agent)
    except BackendError as exc:
        refused = str(exc)
    if refused:
        # A new exception, because the first one's traceback refers to this frame, which refers to it.
        made.set_exception(BackendError(refused))
    else:
        made.set_result(None)


def _clear_frames(exc: BaseException) -> None:
    left, seen = [exc], set[int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions


class Posters(list[Poster]):
    """The posting threads of one plane; `told` is called on the loop when they have put news into `inbox`."""

    _loop: asyncio.AbstractEventLoop  # of the last start

    def __init__(self, told: Callable[[], None], what: str) -> None:
        super().__init__()
        self.inbox: deque[TransferEnded] = deque()
        self.num_broken = 0
        self._told, self._what = told, what
        self._is_told = False
        self._close_by: float | None = None  # deadline of `join`, if `quiesce` has begun the wait off the loop

    def start(self, name: str, agent: Agent, tell_s: float = TELL_S, *, joins: bool = True) -> None:
        self._loop, self._is_told = asyncio.get_running_loop(), False
        self.append(Poster(name, agent, self._hear, self._loop, self._tell_broken, tell_s=tell_s, joins=joins))

    def stop(self) -> None:
        for poster in self:
            poster.stop()

    async def quiesce(self, timeout_s: float | None = None) -> None:
        """Stop all, and wait for them off the loop, at most `timeout_s` or `CLOSE_S`, so that `join` need not wait."""
        self.stop()
        if self:
            self._close_by = time.monotonic() + (CLOSE_S if timeout_s is None else timeout_s)
            await anyio.to_thread.run_sync(self._wait, self._close_by)

    def _wait(self, deadline: float) -> None:
        for poster in self:
            poster.wait(max(0.0, deadline - time.monotonic()))

    def join(self) -> list[str]:
        """Wait for all, at most `CLOSE_S` or the time that `quiesce` left; keep those that do not end; return why."""
        self.stop()
        deadline = self._close_by if self._close_by is not None else time.monotonic() + CLOSE_S
        self._close_by = None
        left, causes = [], []
        for poster in self:
            try:
                poster.join(max(0.0, deadline - time.monotonic()))
            except BackendError as exc:
                left.append(poster)
                causes.append(str(exc))
        self[:] = left
        return causes

    def _hear(self, news: list[TransferEnded]) -> None:
        self.inbox.extend(news)
        if not self._is_told:
            self._is_told = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_told)

    def _on_told(self) -> None:
        self._is_told = False
        self._told()

    def _tell_broken(self, exc: BaseException) -> None:
        self.num_broken += 1
        self._loop.call_exception_handler({"message": f"{self._what} broke", "exception": exc})
