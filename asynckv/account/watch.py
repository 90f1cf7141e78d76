"""Group requests that have been held for long by what they wait for, and report each group at intervals.

If a reader dies with ten thousand leases, the log gets one line in ten seconds instead of ten thousand.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict

from msgspec import Struct

from asynckv.account.waits import is_orderly, waits
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.pull import Pull, PullState

GATHER_S = 0.25

PAUSE_S = 10.0  # seconds between two reports
MAX_KINDS = 8
"""Groups in one report. All further groups are reported as one."""

OLDEST = 3
SLICE = 256  # steps of one turn of the loop


class HeldAlike(Struct, frozen=True):
    """Requests that have been held for long, in one state and waiting for the same thing, with the oldest of them."""

    state: str
    waits: str
    number: int
    oldest: tuple[Lease | Pull, ...]
    is_orderly: bool = False


class Watch:
    def __init__(self) -> None:
        self.next_at = math.inf
        self._said_at = -math.inf
        self._gathered: OrderedDict[Lease | Pull, LeaseState | PullState] = OrderedDict()
        """Held requests, and the state of each when it was added last."""
        self._found: dict[tuple[LeaseState | PullState, str, bool], list[Lease | Pull]] = {}
        """Those of the report that is being made, by state, by what they wait for, and whether that is in order."""

    def add(self, held: Lease | Pull, now: float) -> None:
        if not self._gathered and not self._found:
            self.next_at = max(now + GATHER_S, self._said_at + PAUSE_S)
        self._gathered[held] = held.state

    def tick(self, now: float) -> list[HeldAlike]:
        """Return the report that is due, by group; nothing if it follows in a later turn."""
        if now < self.next_at:
            return []
        steps = 0
        while self._gathered and steps < SLICE:
            held, state = self._gathered.popitem(last=False)
            steps += held.steps
            if held.state is state:
                # Ask now, because the reason for waiting may have changed since the request was added.
                kind = state, waits(held, now), is_orderly(held, now)
                self._found.setdefault(kind, []).append(held)
        if self._gathered:
            return []  # the others follow in the next turns
        found, self._found, self.next_at = self._found, {}, math.inf
        kinds = sorted(found.items(), key=lambda kind: -len(kind[1]))
        groups = [(state.value, words, orderly, some) for (state, words, orderly), some in kinds[:MAX_KINDS]]
        if rest := kinds[MAX_KINDS:]:
            others = [x for _, some in rest for x in some]
            groups.append(("", f"{len(rest)} other ways to be held", all(kind[2] for kind, _ in rest), others))
        if kinds:
            self._said_at = now
        return [HeldAlike(state, words, len(some), _oldest(some), orderly) for state, words, orderly, some in groups]


def _oldest(some: list[Lease | Pull]) -> tuple[Lease | Pull, ...]:
    return tuple(heapq.nsmallest(OLDEST, some, key=lambda x: x.history[0][0]))
