"""How often something may happen: token buckets, one for each of whoever shares the limit.

Every proven key has a bucket. Without keys every connection has one: the control plane numbers connections itself, so a
peer cannot spend another's tokens. A kind of log line has one for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_BUCKETS = 16_384
"""Of more, those that have been silent for longest begin anew."""


class Limiter:
    """Token buckets of `burst` tokens, which gain `rate` a second."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, whose: Hashable, now: float) -> bool:
        level, at = self._buckets.get(whose) or self._new(whose, now)
        level = min(self._burst, level + (now - at) * self._rate)
        is_good = level >= 1 - 1e-9
        self._buckets[whose] = (level - 1 if is_good else level, now)
        self._buckets.move_to_end(whose)
        return is_good

    def charge(self, whose: Hashable, now: float, cost: float) -> None:
        """Spend tokens even below zero. Debt is capped, so that a client that stops asking recovers."""
        level, at = self._buckets.get(whose) or self._new(whose, now)
        level = min(self._burst, level + (now - at) * self._rate)
        self._buckets[whose] = (max(level - cost, -self._burst), now)
        self._buckets.move_to_end(whose)

    def _new(self, whose: Hashable, now: float) -> tuple[float, float]:
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.popitem(last=False)
        self._buckets[whose] = self._burst, now
        return self._buckets[whose]
