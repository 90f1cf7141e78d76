"""The system's clock, which counts time while this host is suspended; asyncio's timers use a clock that does not."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from asynckv.ports import TimerHandle

# Deadlines must not stop while a host is suspended: BOOTTIME counts the time asleep, MONOTONIC does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class _Timer:
    """A timer that is armed again if the loop's clock fired it before our clock reached its time."""

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self._when, self._callback = when, callback
        self._loop = asyncio.get_running_loop()
        self._arm()

    def _arm(self) -> None:
        self._handle = self._loop.call_later(max(0.0, self._when - time.clock_gettime(_CLOCK)), self._fire)

    def _fire(self) -> None:
        if time.clock_gettime(_CLOCK) < self._when:
            self._arm()
        else:
            self._handle.cancel()  # breaks a reference cycle: the handle refers to this timer
            self._callback()

    def cancel(self) -> None:
        self._handle.cancel()


class LoopClock:
    def __init__(self) -> None:
        # A partial saves a Python frame, because the time is read several times for every request.
        self.now: Callable[[], float] = functools.partial(time.clock_gettime, _CLOCK)
        self.cpu: Callable[[], float] = time.thread_time

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        return _Timer(when, callback)
