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

    def take(self, sender: Hashable, now: float, cost: float = 1.0) -> bool:
        """Spend tokens of a sender; False if it has run out."""
        level, at = self._levels.get(sender, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate)
        is_good = level > 0
        # Debts are bounded too: who stops gets another chance after a moment.
        self._levels[sender] = (max(level - cost, -self._burst) if is_good else level, now)
        self._levels.move_to_end(sender)
        if len(self._levels) > MAX_SENDERS:
            self._levels.popitem(last=False)
        return is_good
