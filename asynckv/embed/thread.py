"""The engine on a thread and event loop of its own, for workers whose own thread is busy computing.

Every call may come from any thread, and none waits for the network: a step hands its orders over, and takes what has
ended. See `orders` for what crosses.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from asynckv.config import EngineConfig
from asynckv.embed.desk import Desk
from asynckv.embed.orders import Finished, Order
from asynckv.engine import Engine
from asynckv.errors import EngineClosed
from asynckv.geometry.check import Registration

__all__ = ["EngineThread"]

T = TypeVar("T")


class EngineThread:
    """An engine on a thread of its own."""

    def __init__(self, config: EngineConfig, registration: Registration) -> None:
        self.engine = Engine(config, registration)
        self._desk = Desk(self.engine)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"asynckv-{config.engine_id}", daemon=True)
        self._waiting: list[Order] = []
        self._lock = threading.Lock()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, timeout_s: float = 60.0) -> Self:
        """Start the thread, and return when the engine listens."""
        self._thread.start()
        self.call(self.engine.start(), timeout_s)
        return self

    def submit(self, orders: Sequence[Order]) -> None:
        """Hand orders over; they are carried out in the order given, soon."""
        with self._lock:
            is_asked = bool(self._waiting)
            self._waiting.extend(orders)
        if orders and not is_asked:
            self._loop.call_soon_threadsafe(self._carry_out)

    def _carry_out(self) -> None:
        with self._lock:
            orders, self._waiting = self._waiting, []
        self._desk.carry_out(orders)

    def take_finished(self) -> Finished:
        """Return what has ended since the last call."""
        return self._desk.take()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine of the engine on its loop, and wait for it."""
        if not self._thread.is_alive():
            work.close()
            raise EngineClosed("the engine's thread is not running")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def close(self, timeout_s: float = 10.0) -> None:
        """End the engine and the thread."""
        if self._thread.is_alive():
            self.call(self.engine.aclose(), timeout_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
            self._loop.close()
