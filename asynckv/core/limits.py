"""How often something may happen: token buckets, one for each of whoever shares the limit.

A bucket holds up to `burst` tokens and gains `rate` a second; what happens takes one, and does not happen if there is
none. Every key that connections prove has one. Without keys every connection has one, and the control plane numbers
connections itself, so a peer cannot spend what is another's. A kind of log line has one for itself. This is the only
token bucket there is. It refuses to know what it limits, and reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_BUCKETS = 16_384
"""Of more, those that have been silent for longest begin anew."""


class Limiter:
    """Token buckets.

    Args:
        rate: Tokens per second and bucket.
        burst: Most that a bucket can hold, and what it begins with.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """Level, and when it was that."""

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, whose: Hashable, now: float) -> bool:
        """Spend one token; False if there is none."""
        level, at = self._buckets.get(whose) or self._new(whose, now)
        level = min(self._burst, level + (now - at) * self._rate)
        is_good = level >= 1 - 1e-9
        self._buckets[whose] = (level - 1 if is_good else level, now)
        self._buckets.move_to_end(whose)
        return is_good

    def charge(self, whose: Hashable, now: float, cost: float) -> None:
        """Spend tokens, whether there are so many or not; debts end, so that who stops gets another chance."""
        level, at = self._buckets.get(whose) or self._new(whose, now)
        level = min(self._burst, level + (now - at) * self._rate)
        self._buckets[whose] = (max(level - cost, -self._burst), now)
        self._buckets.move_to_end(whose)

    def _new(self, whose: Hashable, now: float) -> tuple[float, float]:
        """Begin a bucket, if need be in place of the one that was used least lately."""
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.popitem(last=False)
        self._buckets[whose] = self._burst, now
        return self._buckets[whose]
