"""Delays of the event loop that an engine shares, measured by the engine's timer."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

LAGS_S = (0.001, 0.01, 0.1, 1.0, 10.0)
NOTED_S = 1.0  # least time between two readings of the kernel's counters


class LoopLag:
    """Counts of the delays.

    Args:
        away_s: Delay from which the loop was away.
        waits: Reads the kernel's counters of the time without a processor, in seconds by name.
    """

    def __init__(self, away_s: float, waits: Callable[[], dict[str, float]] = dict) -> None:
        self._away_s, self._waits = away_s, waits
        self._counts = [0] * (len(LAGS_S) + 1)
        self._noted = dict[str, float]()
        self.noted_at = -math.inf
        self.last_s = self.most_s = 0.0
        self.num_away = 0

    def take(self, lag_s: float) -> bool:
        """Count a firing of the timer; whether it was so late that the loop was away."""
        self.last_s = lag_s = max(lag_s, 0.0)
        self.most_s = max(self.most_s, lag_s)
        self._counts[bisect_left(LAGS_S, lag_s)] += 1
        is_away = lag_s > self._away_s
        self.num_away += is_away
        return is_away

    def note(self, now: float) -> dict[str, float]:
        """Read the kernel's counters, and return what they counted since the last reading."""
        before, self._noted, self.noted_at = self._noted, self._waits(), now
        return {name: round(max(x - before[name], 0.0), 3) for name, x in self._noted.items() if name in before}

    def counts(self) -> dict[str, int]:
        return dict(zip((*(f"{s:g}" for s in LAGS_S), "inf"), self._counts, strict=True))
