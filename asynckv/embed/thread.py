"""Run the engine on its own thread and event loop, for workers that compute on their own thread.

Every call may come from any thread. Only `start`, `call`, `recall` and `close` wait for the engine's thread.

The two threads share the GIL. The caller's thread keeps it in all of these calls (`bell`), so submitting costs
microseconds. The engine's thread gets it when the caller's thread computes outside of Python, sleeps, or has held it
for the switch interval.

However the thread ends, it ends the engine first, so grants to readers are kept. It is a daemon, because a stuck loop
must not keep the process alive. When the interpreter exits, an engine that is still open is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import dataclasses
import os
import select
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, ParamSpec, Self, TypeVar

from asynckv.account.inspect import HeldBlocks
from asynckv.arguments import number, seconds, shown
from asynckv.config import EngineConfig
from asynckv.core.types import KVTransferParams
from asynckv.edges.bell import Bell
from asynckv.embed.desk import EngineDesk, Recall
from asynckv.embed.orders import Finished, Order
from asynckv.engine import Engine
from asynckv.engine.lent import recallable
from asynckv.errors import ConfigError, EngineClosed, LocalProtocolError, WrongThread
from asynckv.geometry.check import Registration
from asynckv.results import Statistics

P = ParamSpec("P")
T = TypeVar("T")

START_S = 60.0
CLOSE_S = 15.0  # longer than `lease.grant_s` (10 s), because blocks that a reader is reading are kept for up to that
LAST_S = 1.0  # part of the time for closing that is left for the steps after the last grant
LEFTOVERS_S = 1.0  # seconds for cancelling the coroutines of `call` that are left when the engine has ended
MAX_CRASHES = 3  # number of exceptions that may end the loop while it ends the engine, before the thread gives up
_THREADS: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class _InPlace(concurrent.futures.ThreadPoolExecutor):
    """Run submitted work at once, on the caller's thread, where no threads are wanted or no more can be made."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future


SWITCH_INTERVAL_S = 0.0005
"""A turn of the loop releases the GIL some ten times. If another thread computes in Python, each time costs a wait of
this long. With Python's default of 5 ms an engine falls behind by seconds (docs/performance.md)."""


class EngineThread:
    """An engine on its own thread.

    Args:
        config, registration: As for `Engine`.
        loop_factory: Makes the thread's event loop, such as `uvloop.new_event_loop`.
        switch_interval_s: Seconds to which `start` lowers the interpreter's switch interval
            (`sys.setswitchinterval`), permanently and for all threads of the process. None leaves it unchanged.

    Raises:
        ConfigError: An argument is out of range.

    Attributes:
        engine: The engine, for `call`. Its properties for any thread (`endpoint`, `memory_epoch`, ...) may be read.
    """

    _main: asyncio.Task[None]  # on the thread's loop

    def __init__(
        self,
        config: EngineConfig,
        registration: Registration,
        *,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        switch_interval_s: float | None = SWITCH_INTERVAL_S,
    ) -> None:
        if switch_interval_s is not None:
            switch_interval_s = seconds("switch_interval_s", switch_interval_s, ConfigError)
        self._switch_interval_s = switch_interval_s
        self.engine = Engine(config, registration)
        self._loop_factory = loop_factory
        self._thread = threading.Thread(target=self._run, name=f"asynckv-{config.engine_id}", daemon=True)
        self._bell, self._is_rung = Bell(), False
        self._news_bell = Bell()  # wakes threads that wait for news
        self._waiting: set[int] = set()  # threads that are in `wait`, and 0 if one may watch `fileno`
        self._desk = EngineDesk(self.engine, self._wake, self._on_news)
        self._num_wakeups = 0
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._closers: list[concurrent.futures.Future[None]] = []
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ask = asyncio.Event()  # set to end the engine
        self._is_asked_for = self._is_closing = self._is_over = self._has_crashed = False
        self._untold: list[BaseException] = []
        self._cause = "it is not started; call start()"
        self._start_error: BaseException | None = None
        self._is_ending, self._close_s = False, CLOSE_S - LAST_S
        self._hurrying: asyncio.Task[None] | None = None
        self._cut_short: tuple[HeldBlocks, ...] = ()
        self._snapshot: tuple[float, Statistics] | None = None
        self._is_snapshot_wanted = False

    # -- life --------------------------------------------------------------------------------------

    def start(self, timeout_s: float = START_S) -> Self:
        """Start the thread, and return when the engine accepts connections.

        Raises:
            BaseException: Any exception of `Engine.start`. Nothing is left running.
            TimeoutError: The start took longer than `timeout_s`, and was cancelled.
            LocalProtocolError: The thread was started before.
        """
        timeout_s = number("timeout_s", timeout_s, 0)
        if self._is_asked_for:
            raise LocalProtocolError("the engine's thread was started before; make a new one")
        if self._is_closing:
            raise EngineClosed("the engine was closed; make a new one")
        until = time.monotonic() + timeout_s
        if self._switch_interval_s is not None and sys.getswitchinterval() > self._switch_interval_s:
            sys.setswitchinterval(self._switch_interval_s)
        self._is_asked_for = True  # first, because a thread that closes meanwhile has to wait for it
        try:
            self._thread.start()
        except BaseException:
            self._is_asked_for = False
            raise
        _THREADS.add(self)
        try:
            self._started.result(timeout_s)
        except BaseException as exc:
            self._is_closing = True
            self._ask_to_end()
            is_time_up = isinstance(exc, concurrent.futures.TimeoutError) and not self._started.done()
            self._thread.join(max(until - time.monotonic(), 1.0))
            if is_time_up:
                raise TimeoutError(f"the engine did not start within {timeout_s:g} s{self._whereabouts()}") from None
            raise
        if self._is_closing:
            raise EngineClosed("the engine was closed while it started")
        return self

    def close(self, timeout_s: float = CLOSE_S) -> tuple[HeldBlocks, ...]:
        """End the engine and its thread. All work in flight ends, and `take_finished` reports it.

        The engine takes no more orders. Call this from any thread, at any time, and repeatedly. On the engine's own
        thread it only requests the end, without waiting.

        Grants to readers are kept until a second before `timeout_s` is up. Longer grants are cut short and returned.
        Their memory must not be written before the process ends (`Engine.aclose`).

        Raises:
            TimeoutError: The engine has not ended yet, but continues to end. Call again to wait again.
            BackendError: A call is still inside NIXL, so memory may still be written. Call again to try again.
            BaseException: The exception that ended the loop earlier, if it was not raised to a caller yet.
        """
        timeout_s = number("timeout_s", timeout_s, 0)
        self._is_closing = True
        self._desk._shut()
        if not self._is_asked_for:
            self._cause = "it was closed before it was started"
            return ()
        if self._is_over:
            self._tell_cause()
            return self._cut_short
        until, outcome = time.monotonic() + timeout_s, concurrent.futures.Future[None]()
        self._closers.append(outcome)
        self._ask_to_end(max(timeout_s - LAST_S, 0.0))
        if threading.current_thread() is self._thread:
            return ()
        if not self._is_over:  # otherwise the thread no longer sets the result
            try:
                outcome.result(timeout_s)
            except concurrent.futures.TimeoutError:
                raise TimeoutError(f"the engine did not end within {timeout_s:g} s{self._whereabouts()}") from None
        self._thread.join(max(until - time.monotonic(), 0.1))
        self._tell_cause()
        return self._cut_short

    def __enter__(self) -> Self:
        return self if self._is_asked_for else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a step ------------------------------------------------------------------------------------

    def submit(self, orders: Iterable[Order]) -> None:
        """Submit orders from any thread. The engine carries them out soon, in the sequence given.

        If one order is wrong, `Finished` reports it, and the others are carried out.

        Raises:
            EngineClosed: The engine is not running, and carries out none of these orders.
            BaseException: The exception that ended the loop. It is raised once.
        """
        if self._is_closing or self._snapshot is None:
            self._tell_cause()
            raise EngineClosed(f"the engine takes no orders: {self._cause}")
        self._shows_life()  # first, so that the loop does not take these orders' requests for abandoned ones
        self._desk.submit(orders)

    def take_finished(self) -> Finished:
        """Return the results since the last call; also after the engine was closed.

        Call it in every step, or as soon as `wait` or `fileno` signals news. If neither this nor `submit` is called for
        about the length of a lease, the engine gives up requests of which nothing was read (`standstill`), because
        their blocks belong to another engine, which needs them.

        Raises:
            BaseException: The exception that ended the loop. It is raised once.
            EngineClosed: The loop ended by an exception that was raised before, and no result is left to take.
        """
        if self._untold:
            self._tell_cause()
        if self._waiting:
            self._news_bell.silence()
        finished = self._desk.take_finished()
        self._shows_life()
        if self._has_crashed and self._is_over and not finished:
            raise EngineClosed(f"the engine's thread has ended: {self._cause}")
        return finished

    def fileno(self) -> int:
        """Return a file descriptor for `select` and similar calls, which is readable while there are results to take.

        It may occasionally be readable although there are none.
        """
        self._waiting.add(0)  # first, so that news from now on ring
        if self._has_news or self._is_over:
            self._news_bell.ring()
        return self._news_bell.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait for up to `timeout_s`, or until there is news or the engine has ended; return True if there is news.

        News is a result for `take_finished` to return, or an exception for it to raise."""
        until, bell, poll = time.monotonic() + number("timeout_s", timeout_s, 0), self._news_bell, select.poll()
        poll.register(bell.fileno(), select.POLLIN)
        self._waiting.add(me := threading.get_ident())
        self._shows_life()
        try:
            while not (self._has_news or self._is_over):
                bell.silence()
                if self._has_news or self._is_over:
                    bell.ring()  # for other threads that wait
                elif (left := until - time.monotonic()) <= 0:
                    break
                else:
                    poll.poll(1e3 * min(left, 3600.0))  # limited: the milliseconds have to fit into an integer
        finally:
            self._waiting.discard(me)
            self._shows_life()
        return self._has_news

    def statistics(self, max_age_s: float = 1.0) -> Statistics:
        """Return the last snapshot that the loop took. If it is older than `max_age_s`, the loop takes another soon.

        This never waits, so the snapshot may be older. Counters that begin with `embed.` count this thread's calls of
        `submit`, orders and wake-ups.

        Raises:
            EngineClosed: The engine was never started.
        """
        if self._snapshot is None:
            raise EngineClosed(f"the engine has no statistics: {self._cause}")
        max_age_s = number("max_age_s", max_age_s, 0)
        taken_at, statistics = self._snapshot
        if time.monotonic() - taken_at > max_age_s and not self._is_closing:
            self._is_snapshot_wanted = True
            self._wake()
        return statistics

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the engine's loop and wait for it: `thread.call(thread.engine.drain(5.0), 10.0)`.

        Raises:
            TimeoutError: The coroutine did not end in time, and was cancelled.
            EngineClosed: The thread is not running, or ended meanwhile.
            WrongThread: The caller is on the engine's thread, and should await the coroutine instead.
            BaseException: The coroutine's exception; or the one that ended the loop, which is raised once.
        """
        if not asyncio.iscoroutine(work):
            raise LocalProtocolError(f"work is {shown(work)}; give a coroutine, such as engine.drain(5.0)")
        try:
            timeout_s, loop = number("timeout_s", timeout_s, 0), self._loop
            if threading.current_thread() is self._thread:
                raise WrongThread("call() was called on the engine's own thread, which would wait for itself; await it")
            if loop is None or self._is_over:
                self._tell_cause()
                raise EngineClosed(f"the engine's thread is not running: {self._cause}")
            try:
                future = asyncio.run_coroutine_threadsafe(work, loop)
            except RuntimeError:  # it was closed just now
                raise EngineClosed(f"the engine's thread is not running: {self._cause}") from None
        except BaseException:
            work.close()
            raise
        self._calls.add(future)
        try:
            if self._is_over:
                self._fail(future)
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # it ended just now, or the coroutine itself raised TimeoutError
                return future.result()
            where = self._whereabouts()
            name = getattr(work, "__qualname__", "it")
            raise TimeoutError(f"{name} did not end within {timeout_s:g} s{where}") from None
        except (concurrent.futures.CancelledError, EngineClosed):
            if not self._is_closing:
                raise
            self._tell_cause()
            raise EngineClosed(f"the engine's thread ended meanwhile: {self._cause}") from None
        except BaseException as exc:
            with suppress(ValueError):
                self._untold.remove(exc)
            raise
        finally:
            future.cancel()
            self._calls.discard(future)

    def recall(
        self, requests: Iterable[KVTransferParams | Mapping[str, Any]], timeout_s: float = 1.0
    ) -> tuple[HeldBlocks, ...]:
        """Take requests back at once, for a thread that is about to write their blocks (see `Engine.recall`).

        Orders that were submitted before come first. An engine that has ended grants nothing, so it has recalled all.

        Args:
            requests: Params that were made with `recall=True`.
            timeout_s: Seconds to wait until the engine has carried this out.

        Returns:
            Other holders of these blocks, and of each only the shared blocks. If the engine has ended, grants of these
            blocks that its end cut short. Do not write any of them.

        Raises:
            TimeoutError: The engine is late. **Write none of the blocks** before another call with these params has
                returned. The recall stays ordered.
            EngineClosed: The engine was never started. Or the blocks may still be lent, because its loop ended while it
                carried this out (call again), or because it belongs to the parent of this forked process.
            LocalProtocolError: Params are of another engine, or were made without `recall=True`. Nothing has changed.
            RemoteProtocolError: Params are malformed. Nothing was changed.
            WrongThread: The caller is on the engine's thread: use `engine.recall`.
        """
        timeout_s = number("timeout_s", timeout_s, 0, threading.TIMEOUT_MAX)
        if threading.current_thread() is self._thread:
            raise WrongThread("recall() was called on the engine's own thread, which would wait; use engine.recall()")
        if self._snapshot is None or self.engine._home.is_left:
            raise EngineClosed(f"the engine recalls nothing: {self._cause}")
        found = recallable(requests, self.engine._driver)
        recall = Recall(found)
        self._desk._hand((recall,))  # behind all orders that were submitted before
        try:
            others = recall.done.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(
                f"the recall was not carried out within {timeout_s:g} s, and stays ordered: write none of these blocks "
                f"before another recall of them has returned{self._whereabouts()}"
            ) from None
        if others is None:
            others = self.engine._driver.inspect.sharing(found, self.engine._clock.now(), has_ended=True)
        return others

    # -- for other threads -------------------------------------------------------------------------

    def _wake(self) -> None:
        """Wake the loop, unless an earlier wake-up is still pending."""
        if not self._is_rung:
            self._is_rung = True
            self._bell.ring()

    def _shows_life(self) -> None:
        """Record that the embedding thread is alive. While it waits for news, it counts as alive."""
        if self._started.done() and not self._is_over:
            self.engine._shows_life(is_asleep=True)
            if not self._waiting or self._has_news:  # more results may have come since it took them
                self.engine._shows_life()

    def _ask_to_end(self, timeout_s: float = CLOSE_S - LAST_S) -> None:
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it was closed meanwhile
                loop.call_soon_threadsafe(self._end_soon, timeout_s)

    @property
    def _has_news(self) -> bool:
        return self._desk.has_news or bool(self._untold)

    def _fail(self, future: concurrent.futures.Future[Any]) -> None:
        """Fail the future of a coroutine that the loop will no longer run."""
        with suppress(concurrent.futures.InvalidStateError):
            future.set_exception(EngineClosed(f"the engine's thread has ended: {self._cause}"))

    def _tell_cause(self) -> None:
        """Raise the exception that ended the loop, once."""
        try:
            cause = self._untold.pop()
        except IndexError:
            return
        raise cause

    def _whereabouts(self) -> str:
        """Return the thread's current line, for the error of a caller that has waited too long."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        last = traceback.extract_stack(frame)[-1]
        return f"; its thread is at {last.filename}:{last.lineno}, in {last.name}"

    # -- on the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            loop = self._loop_factory()
            try:
                self._run_loop(loop)
            finally:
                loop.close()
        except BaseException as exc:
            self._crashed(exc)
        self._is_closing = self._is_over = True
        self._desk._refuse_all()
        for call in tuple(self._calls):
            self._fail(call)
        for closer in tuple(self._closers):
            closer.set_result(None)
        self._on_news()
        if not self._started.done():
            error = self._start_error or (self._untold.pop() if self._untold else None)
            self._started.set_exception(error or EngineClosed("the engine was closed while it started"))

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        # Not run_until_complete: threads that other code makes on the loop would live as long as its coroutine.
        self._main = main = loop.create_task(self._live())
        main.add_done_callback(lambda _: loop.stop())
        self._loop = loop
        if self._is_closing:
            self._end_soon()
        num_crashes = 0
        while not main.done() and num_crashes < MAX_CRASHES:
            try:
                loop.run_forever()
                if not main.done():
                    raise RuntimeError("the engine's event loop was stopped from outside")
            except BaseException as exc:
                num_crashes += 1
                self._crashed(exc)
                self._end_soon()
        if not main.done() or main.cancelled() or main.exception() is not None:
            # The engine could not be ended. It must grant nothing more, because its loop runs once more below. Readers
            # of lent blocks may continue until their grants end.
            with suppress(Exception):
                self.engine._driver.core.close(self.engine._clock.now())
            time.sleep(self.engine.config.lease.grant_s)
            self._desk._abandon(RuntimeError(self._cause))
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=LEFTOVERS_S))
        if main.done() and not main.cancelled():
            main.result()

    def _crashed(self, exc: BaseException) -> None:
        """Record the exception that ended the loop. Only the first is raised, because later ones follow from it."""
        if not self._has_crashed:
            self._cause = f"{type(exc).__name__}: {exc}"
            self._untold.append(exc)
        self._has_crashed = self._is_closing = True
        self._desk._shut()
        self._on_news()

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(_InPlace())  # a start that fails leaves no thread
        try:
            await self.engine.start()
        except asyncio.CancelledError:
            self._cause = "it was closed while it started"
            return
        except BaseException as exc:
            self._cause, self._start_error = f"it failed to start: {exc!r}", exc
            return
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor())
        loop.add_reader(self._bell.fileno(), self._on_bell)
        self._take_snapshot()
        self._started.set_result(None)
        is_ended = False
        while not is_ended:
            await self._ask.wait()
            self._ask.clear()
            is_ended = await self._end()

    async def _end(self) -> bool:
        """End the engine and all orders; return False if a call is still inside NIXL."""
        self._is_ending = True
        await self._desk.finish()
        closers = len(self._closers)
        # When the interpreter exits, no other executor accepts work any more.
        asyncio.get_running_loop().set_default_executor(_InPlace())
        try:
            self._cut_short = await self.engine.aclose(self._close_s)
        except Exception as exc:
            for closer in self._closers[:closers]:
                closer.set_exception(exc)
            del self._closers[:closers]
            self._is_ending = False
            return False
        await self._desk.settle()
        self._take_snapshot()
        if not self._has_crashed:
            self._cause = "it was closed"
        return True

    def _end_soon(self, timeout_s: float = CLOSE_S - LAST_S) -> None:
        """Cancel the start, shorten a running end, or begin the end, depending on the state of `_live`."""
        if not self._started.done():
            self._main.cancel()
        elif self._is_ending:
            # A caller with less time than earlier callers shortens the wait.
            self._hurrying = self._main.get_loop().create_task(self._hurry(timeout_s))
        else:
            self._close_s = min(self._close_s, timeout_s) if self._ask.is_set() else timeout_s
            self._ask.set()

    async def _hurry(self, timeout_s: float) -> None:
        with suppress(Exception):  # the first caller of `close` gets it
            await self.engine.aclose(timeout_s)

    def _on_bell(self) -> None:
        self._bell.silence()
        self._is_rung = False  # before orders are taken, so that any that are submitted from here on ring again
        self._num_wakeups += 1
        self._desk.carry_out()
        if self._is_snapshot_wanted:
            self._is_snapshot_wanted = False
            self._take_snapshot()

    def _on_news(self) -> None:
        if self._waiting:
            self._news_bell.ring()
            if self._started.done() and self.engine._is_asleep:
                self.engine._shows_life()

    def _take_snapshot(self) -> None:
        found, desk = self.engine.statistics(), self._desk
        own = {"handovers": desk.num_handovers, "orders": desk.num_orders, "wakeups": self._num_wakeups}
        counters = {**found.counters, **{f"embed.{name}": count for name, count in own.items()}}
        self._snapshot = time.monotonic(), dataclasses.replace(found, counters=counters)

    # -- forks and exits -----------------------------------------------------------------------------

    def _forked(self) -> None:
        """Mark the engine as ended in the child of a fork, because the thread stays with the parent."""
        self._is_asked_for = self._is_closing = self._is_over = self._has_crashed = True
        self._cause = "the process was forked, and its threads stayed with the parent"
        self._news_bell, self._loop = Bell(), None
        self._waiting.clear()
        self._untold.clear()
        self._desk._forget()


def _after_fork() -> None:
    for thread in tuple(_THREADS):
        thread._forked()
    _THREADS.clear()


def _at_exit() -> None:
    for thread in tuple(_THREADS):
        thread._is_closing = True
        thread._ask_to_end()
    for thread in tuple(_THREADS):
        with suppress(BaseException):  # no caller is left to raise it to
            thread.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
