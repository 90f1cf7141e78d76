"""Time in windows: what ended in each, how much was held in each on average, and quantiles of weighted values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["Windows", "quantiles"]

LEAST, MOST = 24, 100
"""Windows, about: what a plot can show."""

ENOUGH = 3
"""Values in a window, on average."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0)
NICE_S = (*SECONDS, *(60.0 * x for x in (1, 2, 5, 10, 15, 30, 60, 120, 240, 360, 720, 1440)))


class Windows:
    """Windows of one width, over all that happened.

    Args:
        first: Seconds since 1970.
        last: Not before it.
        values: How many there are to be shown: few in a window say little.
    """

    def __init__(self, first: float, last: float, values: int = 1 << 30) -> None:
        span, most = max(last - first, 0.0), min(max(values // ENOUGH, LEAST), MOST)
        self.seconds = next((s for s in NICE_S if span / s <= most), NICE_S[-1])
        while span / self.seconds > most:
            self.seconds *= 2
        self.first = min(math.floor(first / self.seconds) * self.seconds, first)  # a product may be rounded up
        self.count = int((last - self.first) / self.seconds) + 1

    def index(self, at: float) -> int:
        """Return which window a moment lies in; the first or the last for those outside."""
        return min(max(int((at - self.first) / self.seconds), 0), self.count - 1)

    def starts(self) -> list[float]:
        """Return when each begins."""
        return [self.first + i * self.seconds for i in range(self.count)]

    def zeros(self) -> list[float]:
        """Return a nothing for each."""
        return [0.0] * self.count

    def parts(self, start: float, end: float) -> Iterator[tuple[int, float]]:
        """Split a span among the windows: which, and for how many seconds of it; a moment has none."""
        start, end = max(start, self.first), min(end, self.first + self.count * self.seconds)
        if end <= start:
            return
        for i in range(self.index(start), self.index(end) + 1):
            begin = self.first + i * self.seconds
            if (seconds := min(end, begin + self.seconds) - max(start, begin)) > 0:
                yield i, seconds

    def spread(self, into: list[float], start: float, end: float, amount: float) -> None:
        """Spread an amount evenly over a span."""
        if end - start <= 0:
            into[self.index(end)] += amount
            return
        parts = list(self.parts(start, end))
        total = sum(seconds for _, seconds in parts)
        for i, seconds in parts:
            into[i] += amount * seconds / total
        if not parts:
            into[self.index(end)] += amount

    def hold(self, into: list[float], start: float, end: float, amount: float) -> None:
        """Add what is held during a span to each window's mean."""
        for i, seconds in self.parts(start, end):
            into[i] += amount * seconds / self.seconds


def quantiles(values: Sequence[tuple[float, float]], *at: float) -> list[float]:
    """Return quantiles of values with weights: the least value that this part of the weight does not exceed."""
    if not values:
        return [0.0] * len(at)
    ordered = sorted(values)
    total = math.fsum(weight for _, weight in ordered)
    found, reached, wanted = [], 0.0, sorted(at)
    rows = iter(ordered)
    value = ordered[0][0]
    for q in wanted:
        # Sums of weights are not exact.
        while reached < q * total * (1 - 1e-12) and (row := next(rows, None)) is not None:
            value = row[0]
            reached += row[1]
        found.append(value)
    by_q = dict(zip(wanted, found, strict=True))
    return [by_q[q] for q in at]
