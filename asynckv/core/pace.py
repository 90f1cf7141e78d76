"""The choice between two ways to read, made by doing both and taking the one that is faster lately."""

from __future__ import annotations

import math

PROBE_S = 1.0  # seconds between trials of the other way, to measure whether it is faster now


class Pace:
    """A measurement of two ways. The first one is favoured unless it takes more than `most` times as long per byte."""

    def __init__(self, most: float) -> None:
        self.probed_at = -math.inf
        self._most = most
        self._first = self._other = 0.0  # seconds per byte, lately; 0 while unknown

    @property
    def favours_first(self) -> bool:
        return not self._other or self._first <= self._most * self._other

    def choose(self, now: float) -> bool:
        """Return True for the first way; try the other than the favoured one once every `PROBE_S`."""
        if now - self.probed_at >= PROBE_S:
            self.probed_at = now
            return not self.favours_first
        return self.favours_first

    def note(self, *, is_first: bool, num_bytes: int, seconds: float) -> None:
        cost = seconds / num_bytes
        if is_first:
            self._first = (self._first + cost) / 2 if self._first else cost
        else:
            self._other = (self._other + cost) / 2 if self._other else cost
