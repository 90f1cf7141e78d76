"""A clock that moves only when a test advances it."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable

MOST_PER_ADVANCE = 1_000_000


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def fire(self) -> None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that stands still between calls of `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    cpu = now  # a slice of CPU never ends while the clock stands still

    @property
    def next_at(self) -> float | None:
        """Time of the next timer, or None if none is set."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def call_at(self, when: float, callback: Callable[[], None]) -> _Timer:
        """Call `callback` once the clock is advanced to `when` or beyond; in the loop's next turn if it already is."""
        timer = _Timer(callback)
        if when <= self._now:
            with contextlib.suppress(RuntimeError):  # without a loop the next `advance` calls it
                asyncio.get_running_loop().call_soon(timer.fire)
                return timer
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Move time forward, and call due timers in order, each at its own time."""
        if not seconds >= 0:
            raise ValueError(f"a clock cannot move by {seconds} seconds: it never goes back")
        end, left = self._now + seconds, MOST_PER_ADVANCE
        while self._timers and self._timers[0][0] <= end:
            left -= 1
            assert left >= 0, "timers set each other without delay, for ever"
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            timer.fire()
        self._now = end
