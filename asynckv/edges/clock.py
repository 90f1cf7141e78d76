"""The system's clock, by which deadlines go on while this host is suspended; asyncio's timers go by another one."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from asynckv.ports import TimerHandle

# A suspended host must not stop its deadlines: BOOTTIME counts the time asleep, MONOTONIC does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class _Timer:
    """A timer that goes back to sleep if the loop's clock woke it before ours was there."""

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
            self._handle.cancel()  # it holds us, and we hold it
            self._callback()

    def cancel(self) -> None:
        self._handle.cancel()


class LoopClock:
    def __init__(self) -> None:
        # Nothing lies between the caller and the system: the time is read several times for every request.
        self.now: Callable[[], float] = functools.partial(time.clock_gettime, _CLOCK)

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        return _Timer(when, callback)
