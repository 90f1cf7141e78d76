"""Who may read next: which pulls may read at all, and whose read request is posted next. Decided here and nowhere else.

Three budgets, each in all and in part: requests per prefill engine, bytes and descriptors per peer.

- **Requests** are budgeted where a pull is admitted (`Admission`). Pulls of one prefill engine wait in one *flow*, in
  order of priority and arrival. The flows take turns: the one whose head has the best priority goes first, among equals
  the one that has waited for its turn longest. A flow that has its share in flight waits for itself alone. A pull
  counts from its admission until its bytes have landed, it goes back to the queue, or it has its outcome. What still
  runs after its outcome counts no more.
- **Bytes and descriptors** are budgeted where a read request is posted (`Posting`). Every peer has a *line* of sources
  with reads to post, first come first served, and the lines take turns. A pull that is larger than all budgets streams
  through them, and never waits for more than its next read request.

Pulls at ranks that have fallen silent, or from which nothing arrives any more, count against their own flow only while
that lasts, and so do their bytes: the dead take no room from the living.

It refuses to know: what a pull or a peer is. Pulls are ids here, peers are their lines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from asynckv.core.types import Place, PullId, TransferId
from asynckv.geometry.plan import ReadRequest

__all__ = ["Admission", "Flow", "FlowKey", "InFlight", "Line", "Posting"]

FlowKey = tuple[Place, ...]
"""The places of all ranks that a pull answers for: one prefill engine, as this rank sees it."""


# -- pulls -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Flow:
    """Those who read from one prefill engine."""

    key: FlowKey
    coming: set[PullId] = field(default_factory=set)
    """Asked for, and still meeting their ranks."""
    waiting: set[PullId] = field(default_factory=set)
    admitted: set[PullId] = field(default_factory=set)
    order: list[tuple[int, int, PullId]] = field(default_factory=list)
    """Heap of `(priority, arrival, pull)`; those that left the queue are skipped."""
    ticket: tuple[int, int] | None = None
    """Its priority and a running number, while it is among the flows that may go on: the smallest goes first."""

    @property
    def head(self) -> tuple[int, PullId] | None:
        """Who is next here, and its priority."""
        while self.order and self.order[0][2] not in self.waiting:
            heapq.heappop(self.order)
        return (self.order[0][0], self.order[0][2]) if self.order else None


class Admission:
    """The queue in front of a rank's reads.

    Args:
        total: Most pulls in flight.
        window: Most pulls in flight per prefill engine.
    """

    def __init__(self, total: int, window: int) -> None:
        self._total, self._window = total, window
        self._flows: dict[FlowKey, Flow] = {}
        self._flow_of: dict[PullId, Flow] = {}
        self._admitted: set[PullId] = set()
        self._counted: set[PullId] = set()
        """Admitted pulls that count against `total`."""
        self.turns: list[tuple[tuple[int, int], FlowKey]] = []
        """Flows that may go on, a heap by their tickets; empty if nobody waits."""
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Pulls in the queue."""
        return sum(len(flow.waiting) for flow in self._flows.values())

    @property
    def num_admitted(self) -> int:
        """Pulls in flight."""
        return len(self._admitted)

    def would_block(self, key: FlowKey) -> bool:
        """Whether a pull of the lowest priority that came now would have to wait for others."""
        flow = self._flows.get(key)
        full = flow is not None and (flow.waiting or len(flow.admitted) + len(flow.coming) >= self._window)
        coming = sum(len(flow.coming) for flow in self._flows.values())
        return bool(full) or len(self._counted) + coming >= self._total

    def expect(self, key: FlowKey, pull_id: PullId) -> None:
        """A pull was asked for and will `ask` once its ranks are met; harmless if it was expected before."""
        if pull_id not in self._flow_of:
            flow = self._flow_of[pull_id] = self._flow(key)
            flow.coming.add(pull_id)

    def _flow(self, key: FlowKey) -> Flow:
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(key)
        return flow

    def enter(self, key: FlowKey, pull_id: PullId) -> bool:
        """Admit a pull that comes where there is room and nobody waits; False if it has to `ask`."""
        if self.turns or len(self._counted) >= self._total:
            return False
        flow = self._flow(key)
        if flow.waiting or len(flow.admitted) >= self._window:
            return False
        self._flow_of[pull_id] = flow
        flow.coming.discard(pull_id)
        self._add(flow, pull_id)
        return True

    def _add(self, flow: Flow, pull_id: PullId) -> None:
        flow.admitted.add(pull_id)
        self._admitted.add(pull_id)
        self._counted.add(pull_id)

    def ask(self, key: FlowKey, pull_id: PullId, priority: int, arrival: int) -> None:
        """Queue a pull at its place by priority and arrival; `next` says when it may go on."""
        flow = self._flow_of[pull_id] = self._flow(key)
        flow.coming.discard(pull_id)
        flow.waiting.add(pull_id)
        heapq.heappush(flow.order, (priority, arrival, pull_id))
        self._enlist(flow)

    def waits(self, pull_id: PullId) -> bool:
        """It is in the queue."""
        flow = self._flow_of.get(pull_id)
        return flow is not None and pull_id in flow.waiting

    def next(self) -> PullId | None:
        """Admit the next pull, if one may go on."""
        while self.turns and len(self._counted) < self._total:
            ticket, key = heapq.heappop(self.turns)
            if not self._is_current(ticket, key):
                continue  # it has a better ticket by now, or is gone
            flow = self._flows[key]
            flow.ticket = None
            head = flow.head
            if head is None or len(flow.admitted) >= self._window:
                continue
            if head[0] != ticket[0]:
                self._enlist(flow)  # its urgent ones were cancelled
                continue
            pull_id = head[1]
            heapq.heappop(flow.order)
            flow.waiting.discard(pull_id)
            self._add(flow, pull_id)
            self._enlist(flow)
            return pull_id
        return None

    def leave(self, pull_id: PullId) -> None:
        """A pull waits for nothing and counts no more. Harmless if it never asked."""
        flow = self._flow_of.pop(pull_id, None)
        if flow is None:
            return
        flow.waiting.discard(pull_id)
        flow.coming.discard(pull_id)
        flow.admitted.discard(pull_id)
        self._admitted.discard(pull_id)
        self._counted.discard(pull_id)
        if not flow.waiting and not flow.admitted and not flow.coming:
            del self._flows[flow.key]
            return
        if len(flow.order) > 2 * len(flow.waiting) + 64:
            flow.order = [entry for entry in flow.order if entry[2] in flow.waiting]
            heapq.heapify(flow.order)
        self._enlist(flow)

    def discount(self, pull_id: PullId) -> None:
        """A pull waits for a rank from which nothing comes: it takes no room from others."""
        self._counted.discard(pull_id)

    def recount(self, pull_id: PullId) -> None:
        """It goes on. There may be more in flight then than there should be, for a while; nobody is added."""
        flow = self._flow_of.get(pull_id)
        if flow is not None and pull_id in flow.admitted:
            self._counted.add(pull_id)

    def audit(self, queued: set[PullId], reading: set[PullId]) -> list[str]:
        """List what does not add up, given who should be in the queue and who may be in flight, or on its way."""
        waiting = {p for flow in self._flows.values() for p in flow.waiting}
        wrong = [f"pull {p} should wait, and does not" for p in sorted(queued - waiting)]
        wrong += [f"pull {p} should not wait or count" for p in sorted(self._flow_of.keys() - queued - reading)]
        there = [p for flow in self._flows.values() for p in (*flow.coming, *flow.waiting, *flow.admitted)]
        if sorted(there) != sorted(self._flow_of):
            wrong.append(f"flows hold {len(there)} pulls, but {len(self._flow_of)} are known")
        if self._admitted != {p for flow in self._flows.values() for p in flow.admitted}:
            wrong.append(f"flows do not agree on who of {len(self._admitted)} is in flight")
        if stray := self._counted - self._admitted:
            wrong.append(f"pulls {sorted(stray)[:4]} count without being in flight")
        return wrong

    def _enlist(self, flow: Flow) -> None:
        """Give a flow that could go on a ticket, or a better one than it has."""
        if not flow.waiting:
            return
        head = flow.head
        if head is None or len(flow.admitted) >= self._window:
            return
        if flow.ticket is not None and flow.ticket[0] <= head[0]:
            return
        flow.ticket = (head[0], next(self._numbers))
        heapq.heappush(self.turns, (flow.ticket, flow.key))
        if len(self.turns) > 2 * len(self._flows) + 64:
            self.turns = [(ticket, key) for ticket, key in self.turns if self._is_current(ticket, key)]
            heapq.heapify(self.turns)

    def _is_current(self, ticket: tuple[int, int], key: FlowKey) -> bool:
        flow = self._flows.get(key)
        return flow is not None and flow.ticket == ticket


# -- read requests -----------------------------------------------------------------------------------


class InFlight:
    """Transfers in flight, and how much they may be; one that is larger than all of it goes alone."""

    def __init__(self, max_bytes: float = math.inf, max_descriptors: float = math.inf) -> None:
        self._max_bytes, self._max_descriptors = max_bytes, max_descriptors
        self._sizes: dict[TransferId, tuple[int, int]] = {}
        self.num_bytes = self.num_descriptors = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def fits(self, read: ReadRequest) -> bool:
        """Whether it may be posted now: its bytes *and* its descriptors."""
        return not self._sizes or (
            self.num_bytes + read.num_bytes <= self._max_bytes
            and self.num_descriptors + read.num_descriptors <= self._max_descriptors
        )

    def enter(self, transfer_id: TransferId, num_bytes: int, num_descriptors: int) -> None:
        """It is posted, or takes room again; harmless if it does already."""
        if transfer_id not in self._sizes:
            self._sizes[transfer_id] = num_bytes, num_descriptors
            self.num_bytes += num_bytes
            self.num_descriptors += num_descriptors

    def leave(self, transfer_id: TransferId) -> None:
        """It has ended, or takes room no more; harmless if that was so before."""
        size = self._sizes.pop(transfer_id, None)
        if size is not None:
            self.num_bytes -= size[0]
            self.num_descriptors -= size[1]

    def audit(self, running: Container[TransferId]) -> list[str]:
        """List what does not add up."""
        wrong = [f"transfer {t} is over and still takes room" for t in self._sizes if t not in running]
        sums = [sum(x) for x in zip(*self._sizes.values(), strict=True)] or [0, 0]
        if sums != [self.num_bytes, self.num_descriptors]:
            wrong.append(f"{self.num_bytes} bytes and {self.num_descriptors} descriptors are counted, not {sums}")
        return wrong


class Poster(Protocol):
    """Something with read requests to post, one after the other."""

    next_read: ReadRequest | None
    may_post: bool
    """It has been admitted, and has not failed."""
    not_lent_yet: bool
    """Posting would be in vain."""
    is_waiting: bool
    """It stands in a line."""


@dataclass(slots=True, eq=False)
class Line:
    """One peer's posters, in order of arrival, and what is in flight from it."""

    in_flight: InFlight
    posters: deque[Poster] = field(default_factory=deque)
    is_open: bool = False
    """The peer is ready."""
    is_set_aside: bool = False
    """Nothing comes from it: what is in flight takes no room from others."""
    has_turn: bool = False
    """It stands among the lines that may post."""

    def clear(self) -> None:
        """Send everybody away."""
        for poster in self.posters:
            poster.is_waiting = False
        self.posters.clear()


class Posting:
    """Whose read request is posted next.

    Args:
        max_bytes: Most in flight in all.
        max_descriptors: Most in flight in all.
    """

    def __init__(self, max_bytes: float, max_descriptors: float) -> None:
        self.in_flight = InFlight(max_bytes, max_descriptors)
        self.turns: deque[Line] = deque()
        """Lines that may post; empty if nobody has anything to post."""

    def offer(self, line: Line, poster: Poster) -> None:
        """Put a poster into its peer's line; harmless if it stands there already, or has nothing to post."""
        if not poster.is_waiting and poster.may_post and not poster.not_lent_yet and poster.next_read is not None:
            poster.is_waiting = True
            line.posters.append(poster)
            self.take_turn(line)

    def take_turn(self, line: Line) -> None:
        """Something has changed for a line: it may post when its turn comes."""
        if line.posters and not line.has_turn:
            line.has_turn = True
            self.turns.append(line)

    def next(self) -> Poster | None:
        """Return who posts its next read request now; `posted` says that it did."""
        while self.turns:
            line = self.turns[0]
            posters = line.posters
            while posters:
                poster = posters[0]
                if poster.next_read is not None and poster.may_post and not poster.not_lent_yet:
                    break
                posters.popleft().is_waiting = False
            read = posters[0].next_read if posters and line.is_open else None
            fits = read is not None and line.in_flight.fits(read)
            if fits and read is not None and not self.in_flight.fits(read):
                return None  # it keeps its turn
            self.turns.popleft()
            line.has_turn = False
            if fits:
                return posters[0]
        return None

    def posted(self, line: Line, transfer_id: TransferId, num_bytes: int, num_descriptors: int) -> None:
        """The first of a line has posted a read request; the line goes to the end of the lines."""
        line.in_flight.enter(transfer_id, num_bytes, num_descriptors)
        if not line.is_set_aside:
            self.in_flight.enter(transfer_id, num_bytes, num_descriptors)
        if line.posters[0].next_read is None:
            line.posters.popleft().is_waiting = False
        if line.posters:
            self.take_turn(line)

    def left(self, line: Line, transfer_id: TransferId) -> None:
        """A transfer takes no room any more."""
        line.in_flight.leave(transfer_id)
        self.in_flight.leave(transfer_id)

    def set_aside(self, line: Line, transfers: Iterable[TransferId]) -> None:
        """Nothing comes from a peer: its transfers take no room from others."""
        line.is_set_aside = True
        for transfer_id in transfers:
            self.in_flight.leave(transfer_id)

    def take_back(self, line: Line, sizes: Iterable[tuple[TransferId, int, int]]) -> None:
        """It goes on: what still runs takes room again."""
        line.is_set_aside = False
        for size in sizes:
            self.in_flight.enter(*size)
