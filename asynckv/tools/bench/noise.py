"""Noise of figures: intervals from order statistics, which assume nothing about the distribution of the noise.

`median_of` uses the rounds of one side (the sign test's interval), `ratio_of` those of two sides (the rank-sum test's).
Both sort the values and drop as many at both ends as chance allows. With few rounds the interval cannot reach 0.95;
then it is the whole range, and `level` gives its confidence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

LEVEL = 0.95
MOST_EXACT = 400  # pairs of runs; above this the rank sum is practically normal
Floats = npt.NDArray[np.float64]


class Interval(Struct, frozen=True):
    """A median or a ratio of medians, and the bounds between which the true value lies with probability `level`.

    `rounds` is the number of rounds, of the side that has fewer.
    """

    median: float
    low: float
    high: float
    level: float
    rounds: int


def median_of(values: Sequence[float]) -> Interval:
    number, ordered = len(values), np.sort(np.array(values, float))
    # The number of values below the true median is distributed as heads of `number` coins.
    below = [math.comb(number, k) / 2**number for k in range((number + 1) // 2)]
    return _interval(float(np.median(ordered)), ordered, np.array(below), number)


def ratio_of(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the ratio `after` over `before`, with its interval; all values must be above zero."""
    a, b = np.array(before, float), np.array(after, float)
    ratios = np.sort(np.divide.outer(b, a).ravel())
    ratio = float(np.median(b) / np.median(a))
    found = _interval(ratio, ratios, _rank_sums(len(a), len(b)), min(len(a), len(b)))
    # The ratio of the medians is not the median of the ratios, so widen the interval to contain it.
    return Interval(ratio, min(found.low, ratio), max(found.high, ratio), found.level, found.rounds)


def _interval(middle: float, ordered: Floats, chances: Floats, rounds: int) -> Interval:
    """Drop as many values at both ends as `LEVEL` allows."""
    levels = np.maximum(1 - 2 * np.cumsum(chances), 0.0)
    cut = max(int(np.count_nonzero(levels >= LEVEL)) - 1, 0)
    return Interval(middle, float(ordered[cut]), float(ordered[-1 - cut]), float(levels[cut]), rounds)


@functools.cache
def _rank_sums(first: int, second: int) -> Floats:
    """Return the chances of 0, 1, 2 ... inverted pairs of runs if both sides are alike (Mann and Whitney)."""
    pairs = first * second
    if pairs > MOST_EXACT:
        deviation = math.sqrt(pairs * (first + second + 1) / 12)
        edges = [0.5 * math.erfc((pairs / 2 - k - 0.5) / deviation / math.sqrt(2)) for k in range(pairs // 2)]
        return np.diff(np.array(edges), prepend=0.0)
    # The coefficients of a Gaussian binomial: multiply by 1 - x^(second + i), divide by 1 - x^i.
    counts = np.zeros(pairs + 1)
    counts[0] = 1.0
    for i in range(1, first + 1):
        shift = second + i
        counts[shift:] -= counts[:-shift].copy() if shift <= pairs else 0.0
        for k in range(i, pairs + 1):
            counts[k] += counts[k - i]
    return counts / math.comb(first + second, first)
