"""How much one sender may cost us: a token bucket per sender.

Routes name connections and cannot be chosen by who connects, so nobody spends what is another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["Limiter"]

MAX_SENDERS = 16_384
"""Of more, those that have been silent for longest begin anew."""


class Limiter:
    """Token buckets.

    Args:
        rate: Tokens per second and sender.
        burst: Most that a sender can have saved.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, sender: Hashable, now: float) -> bool:
        """Spend one token of a sender; False if it has run out."""
        level = self._level(sender, now)
        is_good = level >= 1 - 1e-9
        self._set(sender, level - 1 if is_good else level, now)
        return is_good

    def charge(self, sender: Hashable, now: float, cost: float) -> None:
        """Take tokens of a sender, whether it has them or not; who stops gets another chance after a moment."""
        self._set(sender, max(self._level(sender, now) - cost, -self._burst), now)

    def _level(self, sender: Hashable, now: float) -> float:
        level, at = self._levels.get(sender, (self._burst, now))
        return min(self._burst, level + (now - at) * self._rate)

    def _set(self, sender: Hashable, level: float, now: float) -> None:
        self._levels[sender] = (level, now)
        self._levels.move_to_end(sender)
        if len(self._levels) > MAX_SENDERS:
            self._levels.popitem(last=False)
