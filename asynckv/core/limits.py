"""Rate limits by token buckets, with one bucket for each sharer of a limit.

Every proven key has a bucket. Without keys every connection has one. The control plane itself numbers connections, so a
peer cannot spend another's tokens. A kind of log line has a bucket of its own.

What is kept of many peers or requests is bounded too (`remember`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from functools import lru_cache
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_BUCKETS = 16_384  # number of buckets; beyond that, the sharers that were silent for longest begin anew
MIN_WARN_S = 0.5  # seconds before which nothing is reported, however short the lease in a stranger's params is


@lru_cache(64)
def warn_after(lease_s: float, fraction: float) -> float:
    """Return how long a request may be held under a lease before it is reported; infinite if reports are off."""
    if not fraction:
        return math.inf
    return lease_s * fraction if lease_s * fraction > MIN_WARN_S else MIN_WARN_S


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Keep an entry as the latest one. Beyond `most` entries the oldest is forgotten."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


class Limiter:
    """Token buckets of `burst` tokens, which gain `rate` a second."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self.buckets: OrderedDict[Hashable, list[float]] = OrderedDict()
        """Tokens of each sharer, and the time at which they were counted. A caller may spend more of them, even below
        zero. Debt is capped, so that a client that stops asking recovers."""

    def take(self, sharer: Hashable, now: float) -> bool:
        """Take a token, if there is one."""
        if (bucket := self.buckets.get(sharer)) is None:
            if len(self.buckets) >= MAX_BUCKETS:
                self.buckets.popitem(last=False)
            bucket = self.buckets[sharer] = [self._burst, now]
        level = min(self._burst, max(bucket[0], -self._burst) + (now - bucket[1]) * self._rate)
        is_good = level >= 1 - 1e-9
        bucket[:] = level - 1 if is_good else level, now
        self.buckets.move_to_end(sharer)
        return is_good

    def charge(self, sharer: Hashable, now: float, cost: float) -> None:
        """Spend tokens, whether there are so many or not."""
        if not self.take(sharer, now):
            cost += 1
        self.buckets[sharer][0] -= cost - 1
