"""Keeps a NIXL agent alive in child processes: one serves, one stands by.

UCX ends the process on some paths when a connection that emulates remote reads breaks (`docs/reliability.md`). Here
that process is a child, which maps the engine's memory at the same addresses and runs `NixlPlane`. Its end is reported
only once it was waited for, when it can no longer write. A start takes about a second, so the next is started ahead.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from asynckv.config import NixlConfig
from asynckv.edges.sharing import Shares
from asynckv.edges.survivor import wire
from asynckv.edges.survivor.main import COLLISION
from asynckv.errors import BackendError, EngineClosed
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo

SETTLE_S = 10.0  # seconds from the engine's start until the first standby child is started
AHEAD_S = 1.0  # seconds from a change of the serving child until the next standby child is started
CPUCLOCK_SCHED = 2  # of Linux: a process's clock of CPU time, by its id
CLOSE_S = 10.0  # seconds that a child may take to end by itself before it is killed
KILL_S = 5.0  # seconds that the kernel may take to end a child that was killed
MAX_NEWS = 64 * 1024 * 1024  # bytes of the largest frame that a child may send
MAX_COLLISIONS = 32  # children in a row that may find addresses taken, by a chance of some percent each for 64 GB
DEATHS = 10
DEATHS_S = 60.0  # after more than `DEATHS` within this time, the next child waits until the first of them is this old
STANDBY_S = 10.0  # delay before a standby child that ended is replaced; no reader depends on it
BEAT_S = 1.0
HUNG_S = 10.0  # a child that does not answer for this long while readers may read is killed: it may be stuck in NIXL


def check_processes() -> None:
    """Raise `BackendError` if no child can be kept: a sandbox may forbid it, or the interpreter cannot be started."""
    if not sys.executable:
        raise BackendError("this interpreter does not know its own path (sys.executable), so it cannot start another")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as exc:
        raise BackendError(f"this system does not let a process be watched (pidfd_open: {exc})") from exc


class _Process:
    """One child, until it was waited for; `collisions` counts those before it that found the addresses taken."""

    def __init__(self, shares: Shares, setup: wire.Setup, collisions: int) -> None:
        self.name, self.collisions = setup.agent_name, collisions
        self.ready: wire.Ready | None = None
        self.cause = ""  # the reason of its end, if it or the keeper gave one
        self.timer: asyncio.TimerHandle | None = None
        self.started_at = self.busy_at = time.monotonic()
        self.cpu_s = 0.0  # CPU time when it was last seen to be busy
        self.asked_at = math.inf  # time of the oldest question without an answer
        ours, theirs = socket.socketpair()
        # The child finds the same modules as this process, and never those of the current folder.
        home = str(Path(__file__).parents[2])
        path = os.pathsep.join([home, *(entry for entry in sys.path if entry)])
        out = 2 if _is_open(2) else subprocess.DEVNULL
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "asynckv.edges.survivor.main", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": path},
                pass_fds=(theirs.fileno(), *shares.fds),
                stdin=subprocess.DEVNULL,
                stdout=out,  # never mixed into the engine's stdout
                stderr=out,
                process_group=0,  # signals of the terminal are for the engine's process only
            )
            try:
                self.exit_fd = os.pidfd_open(self._popen.pid)
            except OSError:
                self._popen.kill()
                self._popen.wait()
                raise
        except (OSError, TypeError, ValueError) as exc:  # TypeError: an interpreter that does not know its own path
            ours.close()
            raise BackendError(f"the data plane's process cannot be started: {exc}") from exc
        finally:
            theirs.close()
        self.link = wire.Link(ours, MAX_NEWS)
        self.link.send_bytes(json.dumps(shares.shares).encode())
        self.link.send(setup)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def is_stuck(self, patience_s: float) -> bool:
        """Return True if it used no CPU for `patience_s`, or did not serve for ten times as long."""
        now = time.monotonic()
        with suppress(OSError):  # it has ended, which `_on_exit` handles
            if (cpu_s := time.clock_gettime(~self.pid << 3 | CPUCLOCK_SCHED)) > self.cpu_s:
                self.busy_at, self.cpu_s = now, cpu_s
        return now > self.busy_at + patience_s or now > self.started_at + 10 * patience_s

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, seconds))
        return self._popen.returncode is not None

    @property
    def is_collision(self) -> bool:
        return self._popen.returncode == COLLISION and self.collisions < MAX_COLLISIONS

    @property
    def end(self) -> str:
        status = self._popen.returncode
        if status == COLLISION:
            return f"found the addresses of the memory taken, {self.collisions + 1} times in a row"
        if self.cause:
            return self.cause
        if status >= 0:
            return f"exited with status {status}"
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.link.close()
        os.close(self.exit_fd)


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


class Keeper:
    """One agent after the other, in processes of their own. Only `close` blocks.

    Args:
        name: Name of the first agent; the next ones get a number.
        hear: Called with each message of the serving child.
        lost: Called once that child was waited for after its end, with the reason and the seconds until another serves.
        deaths: Most ends within a minute that are followed by another child at once.
        has_spare: True to keep another child on standby.
    """

    _loop: asyncio.AbstractEventLoop  # the loop of the last start

    def __init__(
        self,
        config: NixlConfig,
        name: str,
        hear: Callable[[wire.News], None],
        lost: Callable[[str, float], None],
        served: Callable[[], None],
        deaths: int = DEATHS,
        has_spare: bool = True,
    ) -> None:
        self._config, self._base_name = config, name
        self._hear, self._lost, self._served = hear, lost, served
        self._has_spare = has_spare
        self._starts = 0
        self._shares: Shares | None = None
        self._memories: tuple[Memory, ...] = ()
        self._current: _Process | None = None
        self._started: asyncio.Future[None] | None = None  # what `start` waits for
        self._next: _Process | None = None  # the standby child
        self.name, self.agent = name, AgentInfo("", b"")  # the agent that serves, or served last
        self.is_closing = False  # True if no other child may follow
        self._has_settled = False
        self._ended = asyncio.Event()  # set when there is no child
        self._deaths: deque[float] = deque(maxlen=deaths + 1)
        self._is_watched = False
        self._beat_at = -math.inf
        self._beat_timer: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self.frames_out = self.frames_in = 0

    @property
    def is_serving(self) -> bool:
        return self._current is not None and self._current.ready is not None

    @property
    def pid(self) -> int:
        return self._current.pid if self._current is not None and self.is_serving else 0

    def stands_by(self) -> bool:
        return self._next is not None and self._next.ready is not None

    @property
    def num_processes(self) -> int:
        return (self._current is not None) + (self._next is not None)

    # -- life --------------------------------------------------------------------------------------

    async def start(self, memories: Sequence[Memory]) -> AgentInfo:
        """Start a child and wait for its agent while it makes progress; start a standby child after `SETTLE_S`."""
        if self._shares is not None:
            raise BackendError("a data plane in a process of its own serves already; `close()` first")
        self._loop = asyncio.get_running_loop()
        self._shares, self._memories, self.is_closing = Shares(memories), tuple(memories), False
        self._has_settled = self._is_watched = False
        self._started = self._loop.create_future()
        try:
            self._current = self._spawn(0)
            await self._started
        except BaseException:
            self._started.cancel()
            self.close()
            raise
        finally:
            self._started = None
        return self.agent

    def _spawn(self, collisions: int) -> _Process:
        assert self._shares is not None
        self._starts += 1
        name = self._base_name if self._starts == 1 else f"{self._base_name}-{self._starts}"
        setup = wire.Setup(name, self._config, self._memories)
        process = _Process(self._shares, setup, collisions)
        self._ended.clear()
        self._loop.add_reader(process.link.fileno(), self._on_news, process)
        self._loop.add_reader(process.exit_fd, self._on_exit, process)
        self._look(process)
        return process

    def _fail_start(self, exc: Exception) -> bool:
        if self._started is None or self._started.done():
            return False
        self._started.set_exception(exc)
        return True

    def _see_off(self, process: _Process) -> None:
        if not self._loop.is_closed():
            for fd in (process.link.fileno(), process.exit_fd):
                self._loop.remove_reader(fd)
        process.close()
        if process is self._current:
            self._current = None
        else:
            self._next = None

    async def quiesce(self) -> None:
        self._begin_to_close()
        if self.num_processes:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._ended.wait()
        for process in (self._current, self._next):
            if process is not None:
                process.kill()

    def close(self) -> None:
        """Release everything within `CLOSE_S`; raise `BackendError` if a child may still write. Idempotent."""
        self._begin_to_close()
        deadline = time.monotonic() + CLOSE_S
        for process in (self._current, self._next):
            if process is None:
                continue
            if not process.wait(deadline - time.monotonic()):
                process.kill()
            if not process.wait(KILL_S):
                raise BackendError(
                    f"the data plane's process {process.pid} does not end, {KILL_S:g} s after it was killed: memory "
                    f"that is read into may still be written; keep it, and call close() again"
                )
            self._see_off(process)
        self._ended.set()
        if self._shares is not None:
            self._shares.close()
            self._shares = None
        self._deaths.clear()

    def _begin_to_close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None
        if self.is_closing:
            return
        self.order(wire.Close())
        self.is_closing = True
        self._fail_start(EngineClosed("the engine was closed while it started"))
        for process in (self._current, self._next):
            if process is not None and (process is self._next or process.ready is None):
                process.kill()  # it has never served, so no transfer is in flight

    # -- deaths ------------------------------------------------------------------------------------

    def _on_exit(self, process: _Process) -> None:
        if not process.wait(0.0):
            return
        self._take_news(process)  # messages sent before its end
        is_current = process is self._current
        self._see_off(process)
        if not self.num_processes:
            self._ended.set()
        if self.is_closing:
            return
        if process.is_collision:
            self._place(process.collisions + 1, is_current=is_current)
        elif is_current:
            self._die(process)
        else:
            self._later(STANDBY_S, self._stand_by)

    def _note_death(self) -> float:
        """Count one death, and return the seconds until another child may serve."""
        now = time.monotonic()
        self._deaths.append(now)
        are_many = len(self._deaths) == self._deaths.maxlen
        return max(0.0, self._deaths[0] + DEATHS_S - now) if are_many else 0.0

    def _die(self, process: _Process) -> None:
        if self._fail_start(BackendError(f"the data plane's process {process.end}")):
            return
        pause = self._note_death()
        self._lost(f"the data plane's process {process.end}", pause)
        if pause:
            self._later(pause, self._replace)
        else:
            self._replace()

    def _replace(self) -> None:
        if self.is_closing or self._current is not None:
            return
        self._current, self._next = self._next, None
        if self._current is None:
            self._place(0, is_current=True)
        elif self._current.ready is not None:
            self._serve(self._current.name, self._current.ready)

    def _place(self, collisions: int, *, is_current: bool) -> None:
        if self.is_closing or (self._current if is_current else self._next) is not None:
            return
        try:
            process = self._spawn(collisions)
        except BackendError as exc:
            pause = max(self._note_death(), AHEAD_S) if is_current else STANDBY_S
            self._later(pause, lambda: self._place(0, is_current=is_current))
            if is_current and not self._fail_start(exc):
                self._lost(str(exc), pause)
            return
        if is_current:
            self._current = process
        else:
            self._next = process

    def _stand_by(self) -> None:
        self._place(0, is_current=False)

    def _later(self, delay: float, call: Callable[[], None]) -> None:
        now = self._loop.time()
        self._timers = [timer for timer in self._timers if not timer.cancelled() and timer.when() > now]
        self._timers.append(self._loop.call_later(delay, call))

    def _look(self, process: _Process) -> None:
        """Kill a child that is stuck before it serves, but wait for one that makes slow progress on a busy host."""
        patience_s = self._config.process_start_s
        if process.is_stuck(patience_s):
            process.cause = (
                f"did not serve, and made no progress for {patience_s:g} s: see its output on stderr; raise "
                f'NixlConfig(process_start_s=...) on a busy host, or set NixlConfig(process="never")'
            )
            process.kill()
        else:
            process.timer = self._loop.call_later(min(BEAT_S, patience_s / 4), self._look, process)

    # -- news and orders ---------------------------------------------------------------------------

    def _on_news(self, process: _Process) -> None:
        if not self._take_news(process):
            # The child closed its socket, so it can serve no reader. The kernel reports its end through `exit_fd`.
            self._loop.remove_reader(process.link.fileno())
            if not self.is_closing:
                process.kill()

    def _take_news(self, process: _Process) -> bool:
        frames, is_there = process.link.receive()
        process.asked_at = math.inf if frames else process.asked_at
        for frame in frames:
            self.frames_in += 1
            try:
                news = wire.news.decode(frame)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
                # A child that sends such a frame is broken, so the rest of its messages is ignored.
                process.cause = f"sent a message that cannot be decoded: {exc}"
                process.kill()
                return False
            if isinstance(news, wire.Ready):
                self._on_ready(process, news)
            elif isinstance(news, wire.Unready):
                process.cause = news.cause
            elif process is self._current:
                self._hear(news)
        return is_there

    def _on_ready(self, process: _Process, ready: wire.Ready) -> None:
        process.ready = ready
        if process.timer is not None:
            process.timer.cancel()
        if process is self._current:
            self._serve(process.name, ready)
            if self._started is not None and not self._started.done():
                self._started.set_result(None)

    def _serve(self, name: str, ready: wire.Ready) -> None:
        self.name, self.agent = name, ready.agent
        if self._is_watched:
            self.watch(True)
        self._served()
        if self._has_spare:
            self._later(AHEAD_S if self._has_settled else SETTLE_S, self._stand_by)
        self._has_settled = True

    def watch(self, serving: bool) -> None:
        """Note whether remote readers may read: if so, the child makes progress for them, and must answer beats."""
        self._is_watched = serving
        self.order(wire.WatchReaders(serving))
        if serving and self._beat_timer is None and self._shares is not None:
            self._beat()

    def _beat(self) -> None:
        """Ask the serving child for an answer, and kill it if it has not answered for `HUNG_S`."""
        self._beat_timer = None
        if not self._is_watched or self.is_closing:
            return
        process, now = self._current, self._loop.time()
        was_away, self._beat_at = now > self._beat_at + 3 * BEAT_S, now
        if process is not None and process.ready is not None:
            if process.asked_at == math.inf:
                process.asked_at = now
                self.order(wire.Beat())
            elif was_away:
                process.asked_at = now  # this loop was blocked, so the answer may already have arrived
            elif now > process.asked_at + HUNG_S:
                process.cause = f"did not answer for {HUNG_S:g} s"
                process.kill()
        self._beat_timer = self._loop.call_later(BEAT_S, self._beat)

    def order(self, order: wire.Order) -> None:
        """Send an order to the serving child; drop it if none serves."""
        if self._current is not None and self.is_serving and not self.is_closing:
            self.frames_out += 1
            self._current.link.send(order)
