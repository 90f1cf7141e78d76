"""Queues that decide which pulls may read, and which source posts its next read request.

- **Requests** are budgeted where a pull is admitted (`Admission`), in all and per prefill engine. Pulls of one prefill
  engine wait in one *flow*, in order of priority and arrival. Flows take turns: the best priority goes first, then the
  flow that has waited longest. A pull counts from its admission until its bytes have landed, it goes back to the queue,
  or it has its outcome.
- **Bytes and descriptors** are budgeted where a read request is posted (`Posting`), in all and per peer. Every peer has
  a *line* of sources with reads to post, first come first served, and lines take turns. A pull that is larger than all
  budgets streams through them.

Pulls and bytes at ranks that send nothing count only against their own flow. This module knows pulls by their ids, and
peers by their lines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from msgspec import Struct

from asynckv.core.source import Source
from asynckv.core.types import Place, PullId, TransferId
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest

FlowKey = tuple[Place, ...]  # places of all ranks that a pull answers for: one prefill engine, as this rank sees it


# -- pulls -------------------------------------------------------------------------------------------


WAITING, READING = range(2)  # rooms of a pull: it waits for its turn, or was admitted
NO_PULLS = (0, 0)


class PullPlace(Struct, eq=False):
    flow: Flow
    room: int
    counts: bool  # True if the pull takes room from others


@dataclass(slots=True, eq=False)
class Flow:
    key: FlowKey
    num: list[int] = field(default_factory=partial(list, NO_PULLS))
    order: list[tuple[int, int, PullId]] = field(default_factory=list)
    """Heap of `(priority, arrival, pull)`. Entries of pulls that left the queue are skipped."""
    ticket: tuple[int, int] | None = None
    """Priority and running number while the flow may go on. The flow with the smallest ticket goes first."""


class Admission:
    """The queue in front of a rank's reads: at most `total` pulls in flight, and `window` per prefill engine."""

    def __init__(self, total: int, window: int) -> None:
        self._total, self._window = total, window
        self._places: dict[PullId, PullPlace] = {}
        self._flows: dict[FlowKey, Flow] = {}
        self.num, self._num_counted = list(NO_PULLS), 0
        self.turns: list[tuple[tuple[int, int], FlowKey]] = []
        """Heap of the flows that may go on, by ticket; empty if no pull waits."""
        self._numbers = itertools.count()

    def _move(self, pull_id: PullId, flow: Flow, room: int) -> None:
        """Put a pull into a room of its flow. Besides, `enter` admits a pull that has no room yet."""
        before = self._places.pop(pull_id, None)
        if before is not None:
            flow.num[before.room] -= 1
            self.num[before.room] -= 1
            self._num_counted -= before.counts
        flow.num[room] += 1
        self.num[room] += 1
        self._num_counted += room == READING
        self._places[pull_id] = PullPlace(flow, room, room == READING)

    def enter(self, key: FlowKey, pull_id: PullId) -> bool:
        if self.turns or self._num_counted >= self._total:
            return False
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(key)
        if flow.num[WAITING] or flow.num[READING] >= self._window:
            return False
        flow.num[READING] += 1
        self.num[READING] += 1
        self._num_counted += 1
        self._places[pull_id] = PullPlace(flow, READING, True)
        return True

    def ask(self, key: FlowKey, pull_id: PullId, priority: int, arrival: int) -> None:
        """Queue a pull by priority and arrival. `next` returns it when it may go on."""
        flow = self._flows.setdefault(key, Flow(key))
        self._move(pull_id, flow, WAITING)
        heapq.heappush(flow.order, (priority, arrival, pull_id))
        self._enlist(flow)

    def waits(self, pull_id: PullId) -> bool:
        place = self._places.get(pull_id)
        return place is not None and place.room == WAITING

    def next(self) -> PullId | None:
        while self.turns and self._num_counted < self._total:
            ticket, key = heapq.heappop(self.turns)
            if not self._is_current(ticket, key):
                continue  # the flow has a better ticket by now, or is gone
            flow = self._flows[key]
            flow.ticket = None
            head = self._head(flow)
            if head is None or flow.num[READING] >= self._window:
                continue
            if head[0] != ticket[0]:
                self._enlist(flow)  # the urgent pulls of this flow were cancelled
                continue
            heapq.heappop(flow.order)
            self._move(head[1], flow, READING)
            self._enlist(flow)
            return head[1]
        return None

    def leave(self, pull_id: PullId) -> None:
        if (place := self._places.pop(pull_id, None)) is None:
            return
        flow = place.flow
        flow.num[place.room] -= 1
        self.num[place.room] -= 1
        self._num_counted -= place.counts
        if not any(flow.num):
            del self._flows[flow.key]
            return
        if not flow.order:
            return
        if len(flow.order) > 2 * flow.num[WAITING] + 64:
            flow.order = [entry for entry in flow.order if self.waits(entry[2])]
            heapq.heapify(flow.order)
        self._enlist(flow)

    def count(self, pull_id: PullId, counts: bool) -> None:
        """Set whether a pull in flight takes room from others. It does not while its rank sends nothing."""
        place = self._places.get(pull_id)
        if place is not None and place.room == READING:
            self._num_counted += counts - place.counts
            place.counts = counts

    def _head(self, flow: Flow) -> tuple[int, PullId] | None:
        while flow.order and not self.waits(flow.order[0][2]):
            heapq.heappop(flow.order)
        return (flow.order[0][0], flow.order[0][2]) if flow.order else None

    def _enlist(self, flow: Flow) -> None:
        """Give a flow that can go on a ticket, or a better ticket than it has."""
        if not flow.num[WAITING] or flow.num[READING] >= self._window:
            return
        head = self._head(flow)
        if head is None or (flow.ticket is not None and flow.ticket[0] <= head[0]):
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
    """Transfers in flight, with a budget of bytes and descriptors. A transfer beyond the whole budget goes alone."""

    def __init__(self, max_bytes: float = math.inf, max_descriptors: float = math.inf) -> None:
        self._max_bytes, self._max_descriptors = max_bytes, max_descriptors
        self.sizes: dict[TransferId, tuple[int, int]] = {}
        """Bytes and descriptors of each transfer. `Posting` changes them itself, to save calls."""
        self.num_bytes = self.num_descriptors = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def fits(self, read: ReadRequest | Look) -> bool:
        """True if a read fits beside others. Alone, every read fits."""
        return (
            self.num_bytes + read.num_bytes <= self._max_bytes
            and self.num_descriptors + read.num_descriptors <= self._max_descriptors
        )

    def enter(self, transfer_id: TransferId, num_bytes: int, num_descriptors: int) -> None:
        """Count a transfer that is posted, or takes room again. Counting it twice has no effect."""
        if transfer_id not in self.sizes:
            self.sizes[transfer_id] = num_bytes, num_descriptors
            self.num_bytes += num_bytes
            self.num_descriptors += num_descriptors

    def leave(self, transfer_id: TransferId) -> None:
        size = self.sizes.pop(transfer_id, None)
        if size is not None:
            self.num_bytes -= size[0]
            self.num_descriptors -= size[1]


@dataclass(slots=True, eq=False)
class PeerLine:
    """One peer's posters, in order of arrival, and the transfers in flight from the peer."""

    in_flight: InFlight
    posters: deque[Source] = field(default_factory=deque)
    is_open: bool = False
    is_set_aside: bool = False  # True while the peer sends nothing: its transfers then take no room from others
    has_turn: bool = False

    def clear(self) -> None:
        for poster in self.posters:
            poster.is_waiting = False
        self.posters.clear()


class Posting:
    def __init__(self, max_bytes: float, max_descriptors: float) -> None:
        self.in_flight = InFlight(max_bytes, max_descriptors)
        self.turns: deque[PeerLine] = deque()  # lines that may post; empty if no line has anything to post

    def offer(self, line: PeerLine, poster: Source) -> None:
        """Put a poster into its peer's line, unless it stands there already or has nothing to post."""
        if not poster.is_waiting and poster.may_post and not poster.not_lent_yet and poster.next_read is not None:
            poster.is_waiting = True
            line.posters.append(poster)
            if not line.has_turn:
                line.has_turn = True
                self.turns.append(line)

    def take_turn(self, line: PeerLine) -> None:
        """Give a line a turn to post, because something has changed for it."""
        if line.posters and not line.has_turn:
            line.has_turn = True
            self.turns.append(line)

    def next(self) -> Source | None:
        """Return the source that posts its next read request now. The caller then calls `posted`."""
        while self.turns:
            line = self.turns[0]
            posters = line.posters
            while posters:
                poster = posters[0]
                if poster.next_read is not None and poster.may_post and not poster.not_lent_yet:
                    break
                posters.popleft().is_waiting = False
            read = posters[0].next_read if posters and line.is_open else None
            fits = read is not None and (not line.in_flight.sizes or line.in_flight.fits(read))
            if fits and read is not None and self.in_flight.sizes and not self.in_flight.fits(read):
                return None  # the line keeps its turn
            self.turns.popleft()
            line.has_turn = False
            if fits:
                return posters[0]
        return None

    def pass_over(self, line: PeerLine) -> None:
        """Take the source that was to post out of its line, because what it needs besides is in use."""
        line.posters.popleft().is_waiting = False
        self.take_turn(line)

    def posted(self, line: PeerLine, transfer_id: TransferId, num_bytes: int, num_descriptors: int) -> None:
        for room in (line.in_flight,) if line.is_set_aside else (line.in_flight, self.in_flight):
            room.sizes[transfer_id] = num_bytes, num_descriptors
            room.num_bytes += num_bytes
            room.num_descriptors += num_descriptors
        if line.posters[0].next_read is None:
            line.posters.popleft().is_waiting = False
        if line.posters:
            self.take_turn(line)

    def left(self, line: PeerLine, transfer_id: TransferId) -> None:
        for room in (line.in_flight, self.in_flight):
            if (size := room.sizes.pop(transfer_id, None)) is not None:
                room.num_bytes -= size[0]
                room.num_descriptors -= size[1]
