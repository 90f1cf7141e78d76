"""Group requests that have been held for long by what they wait for, and report each group at intervals.

If a reader dies with ten thousand leases, the log gets one line in ten seconds instead of ten thousand.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

from asynckv.core.lease import Lease, LeaseState
from asynckv.core.outbox import HeldForLong, Outbox
from asynckv.core.pull import Pull, PullState

MIN_WARN_S = 0.5  # seconds before which nothing is reported, however short the lease in a stranger's params is
GATHER_S = 0.25

PAUSE_S = 10.0  # seconds between two reports
MAX_KINDS = 8
"""Groups in one report. All further groups are reported as one."""

OLDEST = 3


@lru_cache(64)
def warn_after(lease_s: float, fraction: float) -> float:
    """Return how long a request may be held under a lease before it is reported; infinite if reports are off."""
    if not fraction:
        return math.inf
    return lease_s * fraction if lease_s * fraction > MIN_WARN_S else MIN_WARN_S


class Watch:
    def __init__(self, outbox: Outbox) -> None:
        self.next_at = math.inf
        self._outbox = outbox
        self._said_at = -math.inf
        self._gathered: dict[Lease | Pull, LeaseState | PullState] = {}
        """Held requests, and the state of each when it was added last."""

    def add(self, held: Lease | Pull, now: float) -> None:
        if not self._gathered:
            self.next_at = max(now + GATHER_S, self._said_at + PAUSE_S)
        self._gathered[held] = held.state

    def tick(self, now: float) -> None:
        if now < self.next_at:
            return
        gathered, self._gathered, self.next_at = self._gathered, {}, math.inf
        found: dict[tuple[LeaseState | PullState, str], list[Lease | Pull]] = {}
        for held, state in gathered.items():
            if held.state is state:
                # Ask now, because the reason for waiting may have changed since the request was added.
                found.setdefault((state, held.waits(now)), []).append(held)
        kinds = [(state, waits, left) for (state, waits), left in found.items()]
        kinds.sort(key=lambda kind: -len(kind[2]))
        for state, waits, left in kinds[:MAX_KINDS]:
            self._say(state.value, waits, left, now)
        if rest := kinds[MAX_KINDS:]:
            self._say("", f"{len(rest)} other ways to be held", [x for _, _, left in rest for x in left], now)
        if kinds:
            self._said_at = now

    def _say(self, state: str, waits: str, held: list[Lease | Pull], now: float) -> None:
        oldest = heapq.nsmallest(OLDEST, held, key=lambda x: x.history[0][0])
        is_orderly = all(x.is_orderly(now) for x in held)
        self._outbox.commands.append(HeldForLong(state, waits, len(held), tuple(oldest), is_orderly))
