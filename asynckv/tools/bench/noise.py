"""Noise of figures: an interval of order statistics, which assumes nothing of how noise is distributed.

`median_of` is of one side's rounds (the sign test's interval), `ratio_of` of two sides' (the rank-sum test's): order
the values, leave out as many at both ends as chance allows, and say what the rest is worth. Few rounds cannot give
0.95; then the interval is the whole range, and `level` says how sure that is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

LEVEL = 0.95
MOST_EXACT = 400  # pairs of runs; beyond it the rank sum is as good as normal
Floats = npt.NDArray[np.float64]


class Interval(Struct, frozen=True):
    """A median, or a ratio of medians, and the two values between which the true one lies with a chance of `level`.

    `rounds` is how many there were, on the side that has fewer.
    """

    median: float
    low: float
    high: float
    level: float
    rounds: int


def median_of(values: Sequence[float]) -> Interval:
    if not values:
        return Interval(0.0, 0.0, 0.0, 0.0, 0)
    number, ordered = len(values), np.sort(np.array(values, float))
    # How many values lie below the true median is a matter of so many coins.
    below = [math.comb(number, k) / 2**number for k in range((number + 1) // 2)]
    return _interval(float(np.median(ordered)), ordered, np.array(below), number)


def ratio_of(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Compare rounds with others, which must be above zero: `after` over `before`."""
    a, b = np.array(before, float), np.array(after, float)
    ratios = np.sort(np.divide.outer(b, a).ravel())
    ratio = float(np.median(b) / np.median(a))
    found = _interval(ratio, ratios, _rank_sums(len(a), len(b)), min(len(a), len(b)))
    # The ratio of the medians is not the median of the ratios: an interval without its own figure would puzzle.
    return Interval(ratio, min(found.low, ratio), max(found.high, ratio), found.level, found.rounds)


def _interval(middle: float, ordered: Floats, chances: Floats, rounds: int) -> Interval:
    """Cut as many values off at both ends as leave `LEVEL`."""
    levels = np.maximum(1 - 2 * np.cumsum(chances), 0.0)
    cut = max(int(np.count_nonzero(levels >= LEVEL)) - 1, 0)
    return Interval(middle, float(ordered[cut]), float(ordered[-1 - cut]), float(levels[cut]), rounds)


@functools.cache
def _rank_sums(first: int, second: int) -> Floats:
    """Chances that 0, 1, 2 ... pairs of runs stand the other way round, if two sides are alike (Mann and Whitney)."""
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
