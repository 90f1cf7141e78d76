"""The engine on the caller's own thread, for workers that allow no threads: it runs while it is pumped, and only then.

A turn is a turn of an ordinary event loop whose selector never sleeps: what is ready is done, and when nothing is left,
or time is up, the caller has its thread back.

What it costs is time, for nothing happens between two turns: every message that a request needs waits for the next
one. `docs/embedding.md` says how long that takes and when not to do it.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import os
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Self, TypeVar

from asynckv.arguments import number
from asynckv.config import EngineConfig
from asynckv.core.inspect import HeldBlocks
from asynckv.embed.desk import EngineDesk, checked, snapshot
from asynckv.embed.in_place import InPlace
from asynckv.embed.orders import Finished, Order
from asynckv.engine import Engine
from asynckv.errors import EngineClosed, LocalProtocolError, WrongThread
from asynckv.geometry.check import Registration
from asynckv.results import Statistics

__all__ = ["EnginePump"]

T = TypeVar("T")

CLOSE_S, LAST_S = 15.0, 1.0

_PUMPS: weakref.WeakSet[EnginePump] = weakref.WeakSet()


class _Selector(selectors.EpollSelector):
    """A selector that stops its loop rather than sleep."""

    stop: Callable[[], None]
    until = 0.0
    sleeps = False
    """It may sleep after all: whoever called waits for something."""
    is_quiet = True
    """Nothing was left to do when it was last asked."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.sleeps:
            return super().select(timeout)
        found = super().select(0)
        self.is_quiet = not found and (timeout is None or timeout > 0)
        if self.is_quiet or time.monotonic() >= self.until:
            self.stop()
        return found


class _Loop(asyncio.SelectorEventLoop):
    """A loop that has no threads to give work to."""

    is_pumped = True


class EnginePump:
    """An engine that runs while it is pumped, on the thread that started it.

    Call `pump`, `start`, `call`, `close` and `statistics` on that thread, where no event loop may be running. `submit`
    and `take_finished` may be called from any thread.

    Args:
        config: As for `Engine`; with `posting_threads="auto"` there are none.
        registration: As for `Engine`.

    Attributes:
        engine: For `call`.
    """

    def __init__(self, config: EngineConfig, registration: Registration) -> None:
        if isinstance(config, EngineConfig) and config.nixl.posting_threads == "auto":
            config = dataclasses.replace(config, nixl=dataclasses.replace(config.nixl, posting_threads=0))
        self.engine = Engine(config, registration)
        self._desk = EngineDesk(self.engine, self._wake)
        self._is_handed = False
        """Orders wait for the next turn."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: _Selector
        self._home = 0
        self._num_turns = 0
        self._is_closed = self._is_forked = False
        self._snapshot: tuple[float, Statistics] | None = None

    # -- life --------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start the engine on this thread, and return when it listens.

        Raises:
            BaseException: Whatever `Engine.start` raised; nothing is left running.
            TimeoutError: It took too long, and was called off.
        """
        timeout_s = number("timeout_s", timeout_s, 0)
        if self._is_closed:
            raise EngineClosed("the engine was closed; make a new one")
        if self._loop is not None:
            raise LocalProtocolError("the engine was started before; make a new one")
        self._home = threading.get_ident()
        self._selector = _Selector()
        self._loop = _Loop(self._selector)
        self._loop.set_default_executor(InPlace())
        self._selector.stop = self._loop.stop
        _PUMPS.add(self)
        try:
            self._wait(self.engine.start(), timeout_s)
        except BaseException:
            self.close()
            raise
        self._take_snapshot()
        return self

    def close(self, timeout_s: float = CLOSE_S) -> tuple[HeldBlocks, ...]:
        """End the engine. Everything under way ends, and `take_finished` tells how.

        Promises to readers are kept until a second before the time is up; those that run longer are cut short, and the
        memory must not be written before the process ends (`Engine.aclose`).

        Args:
            timeout_s: How long to wait.

        Returns:
            What was cut short.

        Raises:
            TimeoutError: It has not ended yet. Call again to go on.
            BackendError: Something is still inside NIXL, so that memory may still be written. Call again to try again.
        """
        timeout_s = number("timeout_s", timeout_s, 0)
        self._desk.shut()
        if self._loop is None or self._is_closed:
            self._is_closed = True
            return ()
        self._here("close")
        cut_short = self._wait(self._end(max(timeout_s - LAST_S, 0.0)), timeout_s)
        self._is_closed = True
        for task in asyncio.all_tasks(self._loop):  # of calls that were given up
            task.cancel()
        self._turn(0.0)
        self._loop.close()
        return cut_short

    def __enter__(self) -> Self:
        return self if self._loop is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a step ------------------------------------------------------------------------------------

    def pump(self, budget_s: float = 0.002) -> bool:
        """Let the engine work for about `budget_s`.

        At least one turn of the loop is made, and the clock is read between turns. A turn that reads takes some
        milliseconds.

        Returns:
            Whether there is more to do at once.

        Raises:
            EngineClosed: The engine is not running.
            WrongThread: This is not the thread that started it, or an event loop runs here.
            BaseException: What an interrupt or a bug raised out of the loop. You can go on pumping.
        """
        loop, budget_s = self._running("pump"), number("budget_s", budget_s, 0)
        if self._is_handed:
            self._is_handed = False
            loop.call_soon(self._desk.carry_out)
        self._num_turns += 1
        self._turn(budget_s)
        return not self._selector.is_quiet

    def submit(self, orders: Iterable[Order]) -> None:
        """Hand orders over; the engine carries them out in the order given, when it is pumped.

        If one of them is wrong, `Finished` says so, and the others are carried out.

        Raises:
            EngineClosed: The engine is not running; none of these is carried out.
        """
        if self._snapshot is None or self._is_closed:
            raise EngineClosed(f"the engine takes no orders: {self._cause}")
        self._desk.submit(orders)

    def take_finished(self) -> Finished:
        """Return what has ended since the last call; also after the engine was closed."""
        return self._desk.take_finished()

    def statistics(self, max_age_s: float = 1.0) -> Statistics:
        """Return a snapshot that is at most `max_age_s` old; after the engine was closed, the last one.

        Raises:
            EngineClosed: The engine was never started.
        """
        if self._snapshot is None:
            raise EngineClosed(f"the engine has no statistics: {self._cause}")
        if not self._is_closed and time.monotonic() - self._snapshot[0] > number("max_age_s", max_age_s, 0):
            self._here("statistics")
            self._take_snapshot()
        return self._snapshot[1]

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine of the engine, such as `pump.call(pump.engine.drain(5.0), 10.0)`; the engine works meanwhile.

        Raises:
            TimeoutError: It did not end in time, and was cancelled.
            EngineClosed: The engine is not running.
            WrongThread: This is not the thread that started it, or an event loop runs here.
        """
        timeout_s = checked(work, timeout_s)
        try:
            self._running("call")
        except BaseException:
            work.close()
            raise
        return self._wait(work, timeout_s)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _cause(self) -> str:
        if self._is_forked:
            return "the process was forked, and the engine is its parent's"
        return "it was closed" if self._is_closed else "it is not started; call start()"

    def _running(self, name: str) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._is_closed:
            raise EngineClosed(f"the engine is not running: {self._cause}")
        self._here(name)
        return self._loop

    def _here(self, name: str) -> None:
        if threading.get_ident() != self._home:
            raise WrongThread(f"{name}() was called on another thread than start(), which the engine belongs to")
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise WrongThread(
                f"{name}() was called where an event loop runs, and would hold it up; use an Engine on it"
            )

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run the loop, sleeping where it sleeps, until something is done."""
        loop = self._loop
        assert loop is not None
        self._is_handed = False
        loop.call_soon(self._desk.carry_out)
        task, until = loop.create_task(work), time.monotonic() + timeout_s
        task.add_done_callback(lambda _: loop.stop())
        timer = loop.call_later(timeout_s, loop.stop)
        self._selector.sleeps = True
        try:
            while not task.done() and time.monotonic() < until:  # something that was given up before may stop the loop
                loop.run_forever()
        finally:
            self._selector.sleeps = False
            timer.cancel()
            if is_time_up := not task.done():
                task.cancel()
                self._turn(0.0)
        if is_time_up:
            raise TimeoutError(f"{getattr(work, '__qualname__', 'it')} did not end within {timeout_s:g} s")
        return task.result()

    def _turn(self, budget_s: float) -> None:
        assert self._loop is not None
        self._selector.until = time.monotonic() + budget_s
        self._loop.run_forever()

    async def _end(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        await self._desk.finish()
        cut_short = await self.engine.aclose(timeout_s)
        await self._desk.settle()
        if self._snapshot is not None:
            self._take_snapshot()
        return cut_short

    def _wake(self) -> None:
        self._is_handed = True

    def _take_snapshot(self) -> None:
        self._snapshot = snapshot(self._desk, self.engine, turns=self._num_turns)

    def _forked(self) -> None:
        """This is the child of a fork: what is closed here, its parent's epoll forgets."""
        self._is_closed = self._is_forked = True
        self._desk.forget()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # for ever: else the interpreter's end closes them


def _after_fork() -> None:
    for pump in tuple(_PUMPS):
        pump._forked()


os.register_at_fork(after_in_child=_after_fork)
