"""A thread with a loop, for what needs one: vLLM's processes have none of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call something there, after all that was handed over before; nothing once it is closed."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def call(self, function: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Run something there, and wait for it; `TimeoutError` if it takes longer."""

        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout_s)

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        self.soon(self.loop.stop)
        self._thread.join(timeout_s)
