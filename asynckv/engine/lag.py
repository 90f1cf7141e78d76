"""Delays of the event loop that an engine shares, measured by the engine's timer."""

from __future__ import annotations

from bisect import bisect_left

LAGS_S = (0.001, 0.01, 0.1, 1.0, 10.0)


class LoopLag:
    def __init__(self, away_s: float) -> None:
        self._away_s = away_s
        self._counts = [0] * (len(LAGS_S) + 1)
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

    def counts(self) -> dict[str, int]:
        return dict(zip((*(f"{s:g}" for s in LAGS_S), "inf"), self._counts, strict=True))
