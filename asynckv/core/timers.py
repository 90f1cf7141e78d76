"""Timers of pulls, leases and peers. Each item asks for the next time at which it must be woken."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Protocol


class Timed(Protocol):
    scheduled_at: float


class Timers:
    """A heap of items by the time at which to wake them. Entries that are out of date are skipped."""

    def __init__(self) -> None:
        self.earliest = math.inf  # time before which no item is due; `next_at` is the exact time of the next one
        self._heap: list[tuple[float, int, Timed]] = []
        self._order = itertools.count()
        self._stale = 0

    @property
    def next_at(self) -> float:
        while self._heap and self._heap[0][2].scheduled_at != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.earliest = self._heap[0][0] if self._heap else math.inf
        return self.earliest

    def wake(self, item: Timed, when: float) -> None:
        """Wake the item at `when`, or earlier if it already asked for an earlier time."""
        if when < item.scheduled_at:
            item.scheduled_at = when
            if when < self.earliest:
                self.earliest = when
            heapq.heappush(self._heap, (when, next(self._order), item))

    def forget(self, item: Timed) -> None:
        if item.scheduled_at < math.inf:
            item.scheduled_at = math.inf
            self._stale += 1
            if self._stale > 64 and 2 * self._stale > len(self._heap):
                # Without this, ended items would stay until their time comes, which is far away for a lease.
                self._heap = [entry for entry in self._heap if entry[2].scheduled_at == entry[0]]
                heapq.heapify(self._heap)
                self._stale = 0

    def pop(self, now: float) -> Timed | None:
        if self.next_at > now:
            return None
        item = heapq.heappop(self._heap)[2]
        item.scheduled_at = math.inf
        return item
