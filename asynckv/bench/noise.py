"""Medians over alternating rounds, with an interval that assumes nothing about how noise is distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

__all__ = ["Interval", "median_of"]

LEVEL = 0.95


class Interval(Struct, frozen=True):
    """A median, and the two values between which the true one lies.

    Attributes:
        level: How sure that is: the chance of it if rounds are independent. Few rounds cannot give 0.95; then the
            interval is the whole range, and `level` says what that is worth.
    """

    median: float
    low: float
    high: float
    level: float
    rounds: int


def median_of(values: Sequence[float]) -> Interval:
    """Sum rounds up: the median, and the order statistics that enclose it (the sign test's interval)."""
    if not values:
        return Interval(0.0, 0.0, 0.0, 0.0, 0)
    ordered, number = sorted(values), len(values)
    # The median lies outside [x(k), x(n+1-k)] if fewer than k values are on one side of it.
    tail, cut = 0.5**number, 0
    level = 1 - 2 * tail
    for k in range(1, number // 2):
        tail += math.comb(number, k) * 0.5**number
        if 1 - 2 * tail < LEVEL:
            break
        cut, level = k, 1 - 2 * tail
    return Interval(statistics.median(ordered), ordered[cut], ordered[number - 1 - cut], max(level, 0.0), number)
