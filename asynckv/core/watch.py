"""Group requests that have been held for long by what they wait for, and report each group at intervals.

If a reader dies with ten thousand leases, the log gets one line in ten seconds instead of ten thousand.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
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
SLICE = 256  # steps of one turn of the loop


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
        self._gathered: OrderedDict[Lease | Pull, LeaseState | PullState] = OrderedDict()
        """Held requests, and the state of each when it was added last."""
        self._found: dict[tuple[LeaseState | PullState, str, bool], list[Lease | Pull]] = {}
        """Those of the report that is being made, by state, by what they wait for, and whether that is in order."""

    def add(self, held: Lease | Pull, now: float) -> None:
        if not self._gathered and not self._found:
            self.next_at = max(now + GATHER_S, self._said_at + PAUSE_S)
        self._gathered[held] = held.state

    def tick(self, now: float) -> None:
        if now < self.next_at:
            return
        steps = 0
        while self._gathered and steps < SLICE:
            held, state = self._gathered.popitem(last=False)
            steps += held.steps
            if held.state is state:
                # Ask now, because the reason for waiting may have changed since the request was added.
                kind = state, held.waits(now), held.is_orderly(now)
                self._found.setdefault(kind, []).append(held)
        if self._gathered:
            return  # the others follow in the next turns
        found, self._found, self.next_at = self._found, {}, math.inf
        kinds = sorted(found.items(), key=lambda kind: -len(kind[1]))
        for (state, waits, is_orderly), some in kinds[:MAX_KINDS]:
            self._say(state.value, waits, some, is_orderly)
        if rest := kinds[MAX_KINDS:]:
            others = [x for _, some in rest for x in some]
            self._say("", f"{len(rest)} other ways to be held", others, all(kind[2] for kind, _ in rest))
        if kinds:
            self._said_at = now

    def _say(self, state: str, waits: str, held: list[Lease | Pull], is_orderly: bool) -> None:
        oldest = heapq.nsmallest(OLDEST, held, key=lambda x: x.history[0][0])
        self._outbox.commands.append(HeldForLong(state, waits, len(held), tuple(oldest), is_orderly))
