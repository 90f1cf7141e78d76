"""The event loop that an engine belongs to. An engine has no locks: a call from another thread or loop is refused
before anything has happened, and is told where to make it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from asynckv.errors import AsyncKVError, EngineClosed, WrongThread

T = TypeVar("T")
NOT_STARTED = "the engine is not started; use `async with Engine(...)`"

OWNERS = {
    "EngineDesk": "desk",
    "Home": "engine.observation",
    "LentRequest": "lent",
    "Offload": "offload",
    "Observation": "engine.observation",
    "PullError": "error",
}
"""Attributes that callers may set on their objects; all others are the engine's."""


_homes: weakref.WeakSet[Home] = weakref.WeakSet()


def _after_fork() -> None:
    """Leave all engines to the parent: their threads and loops run there, and NIXL serves no child of a fork."""
    for home in tuple(_homes):
        home.leave()
        home.is_left = True


os.register_at_fork(after_in_child=_after_fork)


class Home:
    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self.is_settled = False  # the engine has a core as well: its methods can be called
        self.is_left = False  # the engine belongs to the parent of this forked process
        _homes.add(self)

    def settle(self) -> None:
        self.loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def leave(self) -> None:
        """The engine could not be started: it may be elsewhere."""
        self.loop, self._thread, self.is_settled = None, 0, False

    def here(self, call: Callable[..., Any], *, is_first: bool = False) -> None:
        """Refuse calls from elsewhere than the engine's loop; with `is_first` any loop will do while there is none."""
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            raise self._wrong_place(call) from None
        if self.loop is not None and not is_here:
            raise self._wrong_place(call)
        if not self.is_settled and (self.is_left or not is_first):
            raise self._wrong_place(call) if self.is_left else EngineClosed(NOT_STARTED)

    def asked(self, question: Callable[..., Any]) -> None:
        """Refuse a question of another thread than that of the engine's event loop, which goes on."""
        is_elsewhere = threading.get_ident() != self._thread and self.loop is not None and not self.loop.is_closed()
        if self.is_left or is_elsewhere:
            raise self._wrong_place(question)

    def ask(self, question: Callable[[], T], timeout_s: float) -> T:
        """Ask on the loop's thread, and wait for the answer for `timeout_s`, then raise `TimeoutError`."""
        loop = self.loop
        if loop is None or not self.is_settled:
            raise self._wrong_place(self.ask) if self.is_left else EngineClosed(NOT_STARTED)
        if threading.get_ident() == self._thread or loop.is_closed():
            return question()
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def answered() -> None:
            if answer.set_running_or_notify_cancel():  # else no caller waits any more
                try:
                    answer.set_result(question())
                except Exception as exc:
                    answer.set_exception(exc)

        try:
            loop.call_soon_threadsafe(answered)
        except RuntimeError:  # it was closed just now
            return question()
        try:
            return answer.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if answer.cancel() or not answer.done():
                raise TimeoutError(f"the engine's event loop did not answer within {timeout_s:g} s") from None
            return answer.result()

    def _wrong_place(self, call: Callable[..., Any]) -> AsyncKVError:
        owner, _, name = call.__qualname__.rpartition(".")
        what = f"{OWNERS.get(owner, 'engine')}.{name}"
        if self.is_left:
            return EngineClosed(
                f"{what} was called in a process that was forked after its engine was made, and the engine stayed with "
                f"the parent; make an engine in this process, or start it with multiprocessing's 'spawn'"
            )
        if self.loop is None:
            where = (
                "outside of an event loop; await engine.start() in the one that the engine is to run on, then call it "
                "there"
            )
        elif self.loop.is_closed():
            where = (
                "after the engine's event loop was closed, so that nothing can be done; close engines before their loop"
            )
        else:
            if inspect.iscoroutinefunction(call):
                remedy = f"asyncio.run_coroutine_threadsafe({what}(...), loop)"
            elif owner == "Offload":  # the caller wants its answer
                remedy = f"asyncio.run_coroutine_threadsafe with a coroutine that returns {what}(...), and loop"
            else:
                remedy = f"loop.call_soon_threadsafe({what}, ...)"
            where = (
                f"from thread {threading.current_thread().name!r} or another event loop than the one that the engine "
                f"was started on; nothing was changed: use {remedy}, where loop is the engine's; "
                f"beside an EngineThread its own submit, call and statistics"
            )
        return WrongThread(f"{what} was called {where}")
