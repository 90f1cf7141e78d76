"""Who may read now: budgets of requests, in all and per prefill engine; fair between engines, by priority.

Pulls of one prefill engine wait in one *lane*, in order of priority and arrival. The lanes take turns:
the one whose head has the best priority goes first, among equals the one that has waited for its turn
longest. A lane that has its share in flight waits for itself alone.

What is counted is a pull from its admission to its outcome, whatever still drains afterwards. Pulls at
ranks that have fallen silent, or from which nothing arrives any more, count against their own lane only
while that lasts, so that the dead take no room from the living.

Bytes and descriptors are budgeted where they are posted (`DecodeSide.next_post`): a pull that is larger than
all budgets streams through them, and never waits for more than its next post.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Container
from dataclasses import dataclass, field

from asynckv.core.pull import Pull
from asynckv.core.types import Address, PullId, TransferId
from asynckv.geometry.plan import ReadRequest

__all__ = ["Admission", "Flow", "LaneKey", "Window"]

LaneKey = tuple[tuple[Address, str], ...]
"""Address and incarnation of every rank that a pull answers for: one prefill engine, as this rank sees it."""


@dataclass(slots=True, eq=False)
class Flow:
    """Those who read from one prefill engine."""

    key: LaneKey
    coming: set[PullId] = field(default_factory=set)
    """Asked for, and still meeting their ranks."""
    waiting: dict[PullId, Pull] = field(default_factory=dict)
    admitted: set[PullId] = field(default_factory=set)
    order: list[tuple[int, int, PullId]] = field(default_factory=list)
    """Heap of `(priority, arrival, pull)`; those that left the queue are skipped."""
    turn: tuple[int, int] | None = None
    """Priority and number of its place among the lanes that may go on."""

    @property
    def head(self) -> tuple[int, Pull] | None:
        """Who is next here, and its priority."""
        while self.order and self.order[0][2] not in self.waiting:
            heapq.heappop(self.order)
        return (self.order[0][0], self.waiting[self.order[0][2]]) if self.order else None


class Window:
    """Posts in flight, and how much they may be; one that is larger than all of it goes alone."""

    def __init__(self, max_bytes: float = math.inf, max_descriptors: float = math.inf) -> None:
        self._max_bytes, self._max_descriptors = max_bytes, max_descriptors
        self._held: dict[TransferId, tuple[int, int]] = {}
        self.num_bytes = self.num_descriptors = 0

    def __len__(self) -> int:
        return len(self._held)

    def fits(self, post: ReadRequest) -> bool:
        """Whether it may be posted now."""
        return not self._held or (
            self.num_bytes + post.num_bytes <= self._max_bytes
            and self.num_descriptors + post.num_descriptors <= self._max_descriptors
        )

    def enter(self, transfer_id: TransferId, num_bytes: int, num_descriptors: int) -> None:
        """It is posted, or takes room again; harmless if it does already."""
        if transfer_id not in self._held:
            self._held[transfer_id] = num_bytes, num_descriptors
            self.num_bytes += num_bytes
            self.num_descriptors += num_descriptors

    def leave(self, transfer_id: TransferId) -> None:
        """It has ended, or takes room no more; harmless if that was so before."""
        num_bytes, num_descriptors = self._held.pop(transfer_id, (0, 0))
        self.num_bytes -= num_bytes
        self.num_descriptors -= num_descriptors

    def audit(self, running: Container[TransferId]) -> list[str]:
        """List what does not add up."""
        wrong = [f"transfer {t} is over and still takes room" for t in self._held if t not in running]
        sums = [sum(x) for x in zip(*self._held.values(), strict=True)] or [0, 0]
        if sums != [self.num_bytes, self.num_descriptors]:
            wrong.append(f"a window counts {self.num_bytes} bytes and {self.num_descriptors} descriptors, not {sums}")
        return wrong


class Admission:
    """The queue in front of a rank's reads.

    Args:
        total: Most pulls in flight.
        window: Most pulls in flight per prefill engine.
    """

    def __init__(self, total: int, window: int) -> None:
        self._total, self._window = total, window
        self._lanes: dict[LaneKey, Flow] = {}
        self._lane_of: dict[PullId, Flow] = {}
        self._admitted: set[PullId] = set()
        self._counted: set[PullId] = set()
        """Admitted pulls that count against `total`."""
        self._turns: list[tuple[tuple[int, int], LaneKey]] = []
        self._places = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Pulls in the queue."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def num_admitted(self) -> int:
        """Pulls in flight."""
        return len(self._admitted)

    def would_block(self, key: LaneKey) -> bool:
        """Whether a pull of the lowest rank that came now would have to wait for others."""
        lane = self._lanes.get(key)
        full = lane is not None and (lane.waiting or len(lane.admitted) + len(lane.coming) >= self._window)
        coming = sum(len(lane.coming) for lane in self._lanes.values())
        return bool(full) or len(self._counted) + coming >= self._total

    def expect(self, key: LaneKey, pull: Pull) -> None:
        """A pull was asked for and will `ask` once its ranks are met; harmless if it was expected before."""
        if pull.pull_id not in self._lane_of:
            lane = self._lane_of[pull.pull_id] = self._lane(key)
            lane.coming.add(pull.pull_id)

    def _lane(self, key: LaneKey) -> Flow:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Flow(key)
        return lane

    def enter(self, key: LaneKey, pull: Pull) -> bool:
        """Admit a pull that comes where there is room and nobody waits; False if it has to `ask`."""
        if self._turns or len(self._counted) >= self._total:
            return False
        lane = self._lane(key)
        if lane.waiting or len(lane.admitted) >= self._window:
            return False
        self._lane_of[pull.pull_id] = lane
        lane.coming.discard(pull.pull_id)
        self._add(lane, pull.pull_id)
        return True

    def _add(self, lane: Flow, pull_id: PullId) -> None:
        lane.admitted.add(pull_id)
        self._admitted.add(pull_id)
        self._counted.add(pull_id)

    def ask(self, key: LaneKey, pull: Pull) -> None:
        """Queue a pull at its place by priority and arrival; `next` says when it may go on."""
        lane = self._lane_of[pull.pull_id] = self._lane(key)
        lane.coming.discard(pull.pull_id)
        lane.waiting[pull.pull_id] = pull
        heapq.heappush(lane.order, (pull.priority, pull.arrival, pull.pull_id))
        self._enlist(lane)

    def waits(self, pull: Pull) -> bool:
        """It is in the queue."""
        lane = self._lane_of.get(pull.pull_id)
        return lane is not None and pull.pull_id in lane.waiting

    def next(self) -> Pull | None:
        """Admit the next pull, if one may go on."""
        while self._turns and len(self._counted) < self._total:
            turn, key = heapq.heappop(self._turns)
            if not self._is_current(turn, key):
                continue  # overtaken by a better place, or gone
            lane = self._lanes[key]
            lane.turn = None
            head = lane.head
            if head is None or len(lane.admitted) >= self._window:
                continue
            if head[0] != turn[0]:
                self._enlist(lane)  # its urgent ones were cancelled
                continue
            pull = head[1]
            heapq.heappop(lane.order)
            del lane.waiting[pull.pull_id]
            self._add(lane, pull.pull_id)
            self._enlist(lane)
            return pull
        return None

    def leave(self, pull: Pull) -> None:
        """A pull waits for nothing and counts no more. Harmless if it never asked."""
        lane = self._lane_of.pop(pull.pull_id, None)
        if lane is None:
            return
        lane.waiting.pop(pull.pull_id, None)
        lane.coming.discard(pull.pull_id)
        lane.admitted.discard(pull.pull_id)
        self._admitted.discard(pull.pull_id)
        self._counted.discard(pull.pull_id)
        if not lane.waiting and not lane.admitted and not lane.coming:
            del self._lanes[lane.key]
            return
        if len(lane.order) > 2 * len(lane.waiting) + 64:
            lane.order = [entry for entry in lane.order if entry[2] in lane.waiting]
            heapq.heapify(lane.order)
        self._enlist(lane)

    def discount(self, pull_id: PullId) -> None:
        """A pull waits for a rank from which nothing comes: it takes no room from others."""
        self._counted.discard(pull_id)

    def recount(self, pull_id: PullId) -> None:
        """It goes on. There may be more in flight then than there should be, for a while; nobody is added."""
        lane = self._lane_of.get(pull_id)
        if lane is not None and pull_id in lane.admitted:
            self._counted.add(pull_id)

    def audit(self, queued: set[PullId], reading: set[PullId]) -> list[str]:
        """List what does not add up, given who should be in the queue and who may be in flight, or on its way."""
        waiting = {p for lane in self._lanes.values() for p in lane.waiting}
        wrong = [f"pull {p} should wait, and does not" for p in sorted(queued - waiting)]
        wrong += [f"pull {p} should not wait or count" for p in sorted(self._lane_of.keys() - queued - reading)]
        there = [p for lane in self._lanes.values() for p in (*lane.coming, *lane.waiting, *lane.admitted)]
        if sorted(there) != sorted(self._lane_of):
            wrong.append(f"lanes hold {len(there)} pulls, but {len(self._lane_of)} are known")
        if self._admitted != {p for lane in self._lanes.values() for p in lane.admitted}:
            wrong.append(f"lanes do not agree on who of {len(self._admitted)} is in flight")
        if stray := self._counted - self._admitted:
            wrong.append(f"pulls {sorted(stray)[:4]} count without being in flight")
        return wrong

    def _enlist(self, lane: Flow) -> None:
        """Give a lane that could go on its place among the others, or a better one than it has."""
        if not lane.waiting:
            return
        head = lane.head
        if head is None or len(lane.admitted) >= self._window or (lane.turn is not None and lane.turn[0] <= head[0]):
            return
        lane.turn = (head[0], next(self._places))
        heapq.heappush(self._turns, (lane.turn, lane.key))
        if len(self._turns) > 2 * len(self._lanes) + 64:
            self._turns = [(turn, key) for turn, key in self._turns if self._is_current(turn, key)]
            heapq.heapify(self._turns)

    def _is_current(self, turn: tuple[int, int], key: LaneKey) -> bool:
        lane = self._lanes.get(key)
        return lane is not None and lane.turn == turn
