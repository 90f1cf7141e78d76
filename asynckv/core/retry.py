"""Whether a pull that failed is tried again, and when: pure, one object per request.

Every attempt is a pull of its own, with an id of its own, and begins when nothing of the one before can
write its blocks any more. So a late first attempt can neither complete nor overwrite the second.
"""

from __future__ import annotations

import math

from asynckv.core.types import Reason

__all__ = ["RETRYABLE", "RETRYABLE_ELSEWHERE", "Retry"]

RETRYABLE = frozenset({Reason.UNREACHABLE, Reason.PEER_LOST, Reason.READ_FAILED, Reason.LEASE_LOST})
"""What the same params may get over: the lease may still stand, and another connection serve."""

RETRYABLE_ELSEWHERE = RETRYABLE | {
    Reason.RESTARTED,
    Reason.ENGINE_CLOSED,
    Reason.EXPIRED,
    Reason.REVOKED,
    Reason.WITHDRAWN,
    Reason.CONSUMED,
    Reason.UNKNOWN,
    Reason.STALE_MEMORY,
}
"""What new params get over: the request has to be prefilled again, here or elsewhere."""

MAX_PAUSE_S = 2.0


class Retry:
    """The attempts at one request.

    Args:
        most: Attempts after the first.
        pause_s: Before the first retry; then doubling to `MAX_PAUSE_S`.
        deadline: Of the whole request.
        has_source: The caller can give new params.
    """

    def __init__(self, most: int, pause_s: float, deadline: float, has_source: bool = False) -> None:
        self._most, self._pause_s, self.deadline = most, pause_s, deadline
        self._curable = RETRYABLE_ELSEWHERE if has_source else RETRYABLE
        self.attempts = 1
        """Begun so far."""

    @property
    def is_last(self) -> bool:
        """No further attempt would follow this one."""
        return self.attempts > self._most

    @property
    def retryable(self) -> frozenset[Reason]:
        """Failures of this attempt after which another follows."""
        return frozenset() if self.is_last else self._curable

    def next_at(self, reason: Reason, not_before: float, now: float) -> float:
        """When to try again after a failure; infinite if not at all.

        Args:
            reason: Why this attempt failed.
            not_before: End of the back-off of a rank that could not be met.
        """
        if reason not in self.retryable:
            return math.inf
        when = max(now + min(self._pause_s * 2 ** min(self.attempts - 1, 16), MAX_PAUSE_S), not_before)
        return when if when < self.deadline else math.inf
