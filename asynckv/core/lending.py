"""The prefill side of one rank: its leases, what ended, and what came too early.

A claim for a request that is not lent *yet* is answered `NotYet` and parked; lending answers it. A key
below the newest sequence that is not there was consumed, or never will be: it is refused at once.
(So requests should be lent in the order in which their params were made.) Whatever came for a request
that has ended is answered from a bounded memory of endings.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from asynckv.core.commands import Desk, LeaseEnded, Timers, Traced
from asynckv.core.layout import Layout, blocks_of
from asynckv.core.lease import Lease, LeaseState, Lent
from asynckv.core.ledger import Ledger
from asynckv.core.messages import Ack, Claim, NotYet, Refused, Release, Renew
from asynckv.core.plan import check_blocks, check_covers
from asynckv.core.types import NULL, Key, Reason, Route
from asynckv.errors import LocalProtocolError

__all__ = ["Lending"]

MAX_ENDED = 8192
"""Requests that have ended and are remembered; of older ones a late reader hears that they are unknown."""

_ENDED_AS = {
    LeaseState.RELEASED: Reason.CONSUMED,
    LeaseState.EXPIRED: Reason.EXPIRED,
    LeaseState.REVOKED: Reason.REVOKED,
}


_Slot = tuple[type, str, str, Route]
"""Kind, pull, process start and connection: nobody's message takes the place, or the answer, of another's."""


@dataclass(frozen=True, slots=True)
class _Parked:
    message: Claim | Release
    route: Route
    source: str
    until: float


class Lending:
    """All leases of one rank."""

    def __init__(
        self, layout: Layout, ledger: Ledger, desk: Desk, timers: Timers, parked_s: float, max_parked: int
    ) -> None:
        self.leases: dict[Key, Lease] = {}
        self.memory_epoch = 0
        self.closed_as = ""
        """How the engine takes nothing new, for people; empty while it does."""
        self._layout, self._ledger, self._desk, self._timers = layout, ledger, desk, timers
        self._parked_s, self._max_parked = parked_s, max_parked
        self._parked: dict[Key, dict[_Slot, _Parked]] = {}
        self._parked_order: deque[tuple[float, Key, _Slot]] = deque()
        self._parked_by: Counter[Route] = Counter()
        """Connections, and how many of their messages are parked: what they call themselves is their own word."""
        self._ended: OrderedDict[Key, Reason] = OrderedDict()
        self._newest: dict[str, int] = {}
        self._floor: dict[str, int] = {}
        """Sequences up to this one are forgotten, so they cannot be told from used ones."""

    @property
    def num_parked(self) -> int:
        """Claims and releases that wait for their request to be lent."""
        return self._parked_by.total()

    @property
    def next_at(self) -> float:
        """When a parked message falls due."""
        return self._parked_order[0][0] if self._parked_order else math.inf

    def lend(self, lent: Lent, now: float) -> Lease:
        """Lend a request's blocks, and answer whoever came before.

        Raises:
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: The key was used before, or a block is being written.
        """
        key = lent.key
        if key in self.leases or key in self._ended or key.sequence <= self._floor.get(key.epoch, -1):
            raise LocalProtocolError(
                f"request {lent.request_id!r} was lent before under sequence {key.sequence}; make new params for it"
            )
        if key.memory_epoch < self.memory_epoch:
            raise LocalProtocolError(
                f"the params of request {lent.request_id!r} are of memory epoch {key.memory_epoch}, but the memory "
                f"was registered anew (epoch {self.memory_epoch}); make new params for it, with a PrefillGroup of the "
                f"engine's endpoint and memory_epoch as they are now"
            )
        # A rank that was restarted while others slept has memory as new as theirs.
        self.memory_epoch = key.memory_epoch
        if len(lent.groups) != len(self._layout.groups):
            raise LocalProtocolError(
                f"request {lent.request_id!r} names {len(lent.groups)} groups, "
                f"but the layout has {len(self._layout.groups)}"
            )
        blocks = {}
        for index, (group, offer) in enumerate(zip(self._layout.groups, lent.groups, strict=True)):
            check_covers(f"group {index} ({group.name!r})", group, offer, lent.num_tokens)
            # Placeholders are dropped and the sum is bounded before anything is allocated by it.
            runs = [run for run in offer.runs if run[0] != NULL]
            if sum(count for _, count in runs) > group.num_blocks:
                raise LocalProtocolError(
                    f"request {lent.request_id!r} names more blocks than the {group.num_blocks} there are"
                )
            blocks[index] = blocks_of(runs)
            check_blocks(f"group {index} ({group.name!r})", group, blocks[index])
        self._ledger.take(key.token, "lent", lent.request_id, blocks, now)
        lease = self.leases[key] = Lease(lent, now)
        self._newest[key.epoch] = max(self._newest.get(key.epoch, -1), key.sequence)
        self._desk.counters["leases.lent"] += 1
        for parked in self._parked.pop(key, {}).values():
            self._unpark(parked)
            if parked.until > now and not lease.is_over:
                self._answer(lease, parked.message, parked.route, parked.source, now)
        self.after(lease, now)
        return lease

    @property
    def is_closed(self) -> bool:
        """Nothing will be lent any more, so nothing is worth waiting for."""
        return bool(self.closed_as)

    def shut(self, how: str) -> None:
        """Lend nothing any more: who waits for a request that was not lent is told so."""
        self.closed_as = how
        parked = [p for waiting in self._parked.values() for p in waiting.values()]
        self._parked.clear()
        self._parked_order.clear()
        self._parked_by.clear()
        for p in parked:
            if isinstance(p.message, Claim):
                self._refuse(p.message, p.route, p.source, Reason.ENGINE_CLOSED)

    def revoke(self, lease: Lease, now: float) -> None:
        """Take a lent request back; its blocks return when no promise runs any more."""
        lease.revoke(now)
        self.after(lease, now)

    def receive(self, message: Claim | Renew | Release, route: Route, source: str, now: float) -> None:
        """Take a reader's message."""
        lease = self.leases.get(message.key)
        if lease is not None:
            self._answer(lease, message, route, source, now)
            self.after(lease, now)
            return
        key = message.key
        reason = self._ended.get(key)
        if reason is None and key.memory_epoch < self.memory_epoch:
            reason = Reason.STALE_MEMORY
        if reason is None and key.sequence <= self._newest.get(key.epoch, -1):
            reason = Reason.UNKNOWN
        if reason is None and self.is_closed:
            reason = Reason.ENGINE_CLOSED
        if isinstance(message, Release):
            if reason is None:
                self._park(message, route, source, now)
                return
            # Nothing is owed any more; saying so ends the repeats.
            self._desk.counters["release.late"] += 1
            self._desk.send(route, source, Ack(key, message.pull_id))
        elif reason is not None or isinstance(message, Renew):
            self._refuse(message, route, source, reason or Reason.UNKNOWN)
        else:
            self._park(message, route, source, now)

    def after(self, lease: Lease, now: float) -> None:
        """Settle what a change of a lease brings about."""
        if self._desk.trace and len(lease.history) > lease.num_traced:
            self._desk.commands.append(Traced(lease, tuple(lease.history[lease.num_traced :])))
            lease.num_traced = len(lease.history)
        if not lease.is_over:
            self._timers.wake(lease, lease.wake_at)
            return
        key = lease.lent.key
        if self.leases.pop(key, None) is None:
            return
        self._timers.forget(lease)
        self._ledger.drop(key.token)
        self._ended[key] = _ENDED_AS[lease.state]
        if len(self._ended) > MAX_ENDED:
            old, _ = self._ended.popitem(last=False)
            self._floor[old.epoch] = max(self._floor.get(old.epoch, -1), old.sequence)
        self._desk.counters[f"leases.{lease.state}"] += 1
        self._desk.commands.append(LeaseEnded(lease))

    def tick(self, now: float) -> None:
        """Forget what was parked for too long."""
        while self._parked_order and self._parked_order[0][0] <= now:
            _, key, slot = self._parked_order.popleft()
            waiting = self._parked.get(key, {})
            if slot in waiting and waiting[slot].until <= now:
                self._unpark(waiting.pop(slot))
                self._desk.counters["parked.expired"] += 1
                if not waiting:
                    del self._parked[key]

    def _unpark(self, parked: _Parked) -> None:
        self._parked_by[parked.route] -= 1
        if not self._parked_by[parked.route]:
            del self._parked_by[parked.route]

    def _answer(self, lease: Lease, message: Claim | Renew | Release, route: Route, source: str, now: float) -> None:
        if lease.is_over:
            # Parked messages may end a lease before the last of them is answered.
            self.receive(message, route, source, now)
            return
        answer = lease.receive(message, source, now)
        if isinstance(answer, Refused):
            self._desk.counters[f"refused.{answer.reason}"] += 1
        self._desk.send(route, source, answer)

    def _refuse(self, message: Claim | Renew, route: Route, source: str, reason: Reason) -> None:
        self._desk.counters[f"refused.{reason}"] += 1
        detail = f"the engine is {self.closed_as}" if reason is Reason.ENGINE_CLOSED else ""
        self._desk.send(route, source, Refused(message.key, message.pull_id, message.nonce, reason, detail))

    def _park(self, message: Claim | Release, route: Route, source: str, now: float) -> None:
        slot = (type(message), message.pull_id, source, route)
        waiting = self._parked.get(message.key, {})
        known = waiting.get(slot)
        # No connection takes more than an eighth, so that one that floods us leaves room for others.
        full = self.num_parked >= self._max_parked or self._parked_by[route] >= max(self._max_parked // 8, 1)
        if known is None and full:
            self._desk.counters["parked.refused"] += 1
            if isinstance(message, Claim):
                # Not remembered; its sender repeats it.
                self._desk.send(route, source, NotYet(message.key, message.pull_id, message.nonce))
            return
        until = now + self._parked_s
        if known is None:
            self._parked_order.append((until, message.key, slot))
        else:
            until = known.until  # a lifetime of its own: repeats do not extend it
            self._unpark(known)
        self._parked.setdefault(message.key, waiting)[slot] = _Parked(message, route, source, until)
        self._parked_by[route] += 1
        if len(self._parked_order) > 8 * self._max_parked:
            self._parked_order = deque(x for x in self._parked_order if x[2] in self._parked.get(x[1], ()))
        if isinstance(message, Claim):
            self._desk.send(route, source, NotYet(message.key, message.pull_id, message.nonce))
        else:
            # Taken: it will be applied when the request is lent, or the lease will expire.
            self._desk.send(route, source, Ack(message.key, message.pull_id))
