"""The prefill side of one rank: its leases, what ended, and what came too early.

Requests are lent in any order. A claim for one that is not lent *yet* is answered `NotYet` and parked; lending
answers it. One whose key is spent (`core/spent.py`) will never be lent again: its claims are refused at once, with how
it ended where that is remembered. A key is spent when its request is lent, or withdrawn because it never will be.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from asynckv.config import LeaseConfig
from asynckv.core.lease import Lease, LeaseState, Lent
from asynckv.core.ledger import Ledger
from asynckv.core.outbox import LeaseEnded, LeaseGranted, Outbox, Timers, Traced
from asynckv.core.spent import SpentKeys
from asynckv.core.types import Key, PullId, Reason, ReplyTo
from asynckv.core.wire import Ack, Claim, NotYet, Refused, Release, Renew
from asynckv.errors import LocalProtocolError
from asynckv.geometry.blocks import blocks_of, check_blocks, check_covers
from asynckv.geometry.bounds import NULL
from asynckv.geometry.layout import Layout

__all__ = ["PrefillSide"]

MAX_ENDED = 8192
"""Requests that have ended and are remembered; of older ones a late reader hears that they are unknown."""

_ENDED_AS = {
    LeaseState.RELEASED: Reason.CONSUMED,
    LeaseState.EXPIRED: Reason.EXPIRED,
    LeaseState.REVOKED: Reason.REVOKED,
}


_Slot = tuple[str, str, ReplyTo]
"""Pull, process start and connection: nobody's message takes the place, or the answer, of another's. A release takes
the place of its pull's claim."""


@dataclass(frozen=True, slots=True)
class _Parked:
    message: Claim | Release
    route: ReplyTo
    source: str
    until: float


class PrefillSide:
    """All leases of one rank."""

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        outbox: Outbox,
        timers: Timers,
        config: LeaseConfig,
        minors: Mapping[tuple[str, ReplyTo], int],
    ) -> None:
        self.leases: dict[Key, Lease] = {}
        self.memory_epoch = 0
        self.closed_as = ""
        """How the engine takes nothing new, for people; empty while it does."""
        self._layout, self._ledger, self._outbox, self._timers = layout, ledger, outbox, timers
        self._config, self._minors = config, minors
        self.max_ended = MAX_ENDED
        self._parked: dict[Key, dict[_Slot, _Parked]] = {}
        self._parked_order: deque[tuple[float, Key, _Slot]] = deque()
        self._parked_by: Counter[ReplyTo] = Counter()
        """Connections, and how many of their messages are parked: what they call themselves is their own word."""
        self._ended: OrderedDict[Key, Reason] = OrderedDict()
        self.spent = SpentKeys()

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
            LocalProtocolError: The key is spent, or a block is being written.
        """
        key = lent.key
        if self._is_spent(key):
            raise LocalProtocolError(
                f"request {lent.request_id!r} (sequence {key.sequence}) {self._how_spent(key)}; make new params for it"
            )
        if key.memory_epoch < self.memory_epoch:
            raise LocalProtocolError(
                f"the params of request {lent.request_id!r} are of memory epoch {key.memory_epoch}, but the memory "
                f"was registered anew (epoch {self.memory_epoch}); make new params for it, with a PrefillGroup of the "
                f"engine's endpoint and memory_epoch as they are now"
            )
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
        # A rank that was restarted while others slept has memory as new as theirs.
        self.memory_epoch = key.memory_epoch
        lease = self.leases[key] = Lease(lent, now)
        self.spent.add(key)
        self._outbox.counters["leases.lent"] += 1
        for parked in self._take_parked(key):
            if parked.until > now and not lease.is_over:
                self._answer(lease, parked.message, parked.route, parked.source, now)
        self.after(lease, now)
        return lease

    def withdraw(self, key: Key, now: float) -> tuple[str, ...] | None:
        """Never lend a request whose params left, and say so to whoever waits for it; if it is lent, revoke it.

        Returns:
            The pulls that waited for it; None if it is, or was, lent or withdrawn already.
        """
        if (lease := self.leases.get(key)) is not None:
            self.revoke(lease, now)
            return None
        if self._is_spent(key):
            return None
        self.spent.add(key)
        self._end(key, Reason.WITHDRAWN)
        self._outbox.counters["requests.withdrawn"] += 1
        waited = []
        for parked in self._take_parked(key):
            if isinstance(parked.message, Claim):  # releases were acknowledged when they came
                waited.append(parked.message.pull_id)
                self._refuse(parked.message, parked.route, parked.source, Reason.WITHDRAWN)
        return tuple(waited)

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

    def receive(self, message: Claim | Renew | Release, route: ReplyTo, source: str, now: float) -> None:
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
        if reason is None and key in self.spent:
            reason = Reason.UNKNOWN
        if reason is None and self.is_closed:
            reason = Reason.ENGINE_CLOSED
        if isinstance(message, Release):
            if reason is None:
                self._park(message, route, source, now)
                return
            # Nothing is owed any more; saying so ends the repeats.
            self._outbox.counters["release.late"] += 1
            self._outbox.send(route, source, Ack(key, message.pull_id))
        elif reason is not None or isinstance(message, Renew):
            self._refuse(message, route, source, reason or Reason.UNKNOWN)
        else:
            self._park(message, route, source, now)

    def after(self, lease: Lease, now: float) -> None:
        """Settle what a change of a lease brings about."""
        if self._outbox.trace and len(lease.history) > lease.num_traced:
            self._outbox.commands.append(Traced(lease, tuple(lease.history[lease.num_traced :])))
            lease.num_traced = len(lease.history)
        if not lease.is_over:
            self._timers.wake(lease, lease.wake_at)
            return
        key = lease.lent.key
        if self.leases.pop(key, None) is None:
            return
        self._timers.forget(lease)
        self._ledger.drop(key.token)
        self._end(key, _ENDED_AS[lease.state])
        self._outbox.counters[f"leases.{lease.state}"] += 1
        self._outbox.commands.append(LeaseEnded(lease))

    def tick(self, now: float) -> None:
        """Forget what was parked for too long."""
        while self._parked_order and self._parked_order[0][0] <= now:
            _, key, slot = self._parked_order.popleft()
            waiting = self._parked.get(key, {})
            if slot in waiting and waiting[slot].until <= now:
                self._unpark(waiting.pop(slot))
                self._outbox.counters["parked.expired"] += 1
                if not waiting:
                    del self._parked[key]

    def _is_spent(self, key: Key) -> bool:
        return key in self.spent or key in self.leases or key in self._ended

    def _how_spent(self, key: Key) -> str:
        if key in self.leases:
            return "was lent before, and still is"
        match self._ended.get(key):
            case None if self.spent.num_given_up:
                return (
                    f"was lent or withdrawn before, or was open for too long: {self.spent.max_gaps:,} times others "
                    f"were lent beyond one that never was (withdraw those that are aborted)"
                )
            case None:
                return "was lent or withdrawn before"
            case Reason.WITHDRAWN:
                return "was withdrawn"
            case reason:
                return f"was lent before ({reason})"

    def _end(self, key: Key, reason: Reason) -> None:
        """Remember for a while how a request ended."""
        self._ended[key] = reason
        if len(self._ended) > self.max_ended:
            self._ended.popitem(last=False)

    def _take_parked(self, key: Key) -> list[_Parked]:
        """Take out what came early for a request."""
        parked = list(self._parked.pop(key, {}).values())
        for each in parked:
            self._unpark(each)
        return parked

    def _unpark(self, parked: _Parked) -> None:
        self._parked_by[parked.route] -= 1
        if not self._parked_by[parked.route]:
            del self._parked_by[parked.route]

    def _answer(self, lease: Lease, message: Claim | Renew | Release, route: ReplyTo, source: str, now: float) -> None:
        if lease.is_over:
            # Parked messages may end a lease before the last of them is answered.
            self.receive(message, route, source, now)
            return
        known = not lease.is_sampled or message.pull_id in lease.held
        answer = lease.receive(message, source, now)
        if not known and message.pull_id in lease.held:
            self._outbox.commands.append(LeaseGranted(lease, PullId(message.pull_id)))
        if isinstance(answer, Refused):
            self._outbox.counters[f"refused.{answer.reason}"] += 1
        self._outbox.send(route, source, answer)

    def _refuse(self, message: Claim | Renew, route: ReplyTo, source: str, reason: Reason) -> None:
        self._outbox.counters[f"refused.{reason}"] += 1
        detail = f"the engine is {self.closed_as}" if reason is Reason.ENGINE_CLOSED else ""
        if reason is Reason.WITHDRAWN and self._minors.get((source, route), 0) < 2:
            reason, detail = Reason.UNKNOWN, "the request was withdrawn"  # it does not know that reason
        self._outbox.send(route, source, Refused(message.key, message.pull_id, message.nonce, reason, detail))

    def _park(self, message: Claim | Release, route: ReplyTo, source: str, now: float) -> None:
        slot = (message.pull_id, source, route)
        waiting = self._parked.get(message.key, {})
        known = waiting.get(slot)
        # Half of the room is for whoever comes first. Then no connection goes beyond an eighth of all, so that one that
        # floods us leaves room for others.
        most, share = self._config.max_parked, max(self._config.max_parked // 8, 1)
        full = self.num_parked >= most or (self.num_parked >= most // 2 and self._parked_by[route] >= share)
        if known is None and full:
            self._outbox.counters["parked.refused"] += 1
            if isinstance(message, Claim):
                # Not remembered; its sender repeats it.
                self._outbox.send(route, source, NotYet(message.key, message.pull_id, message.nonce))
            return
        until, kept = now + self._config.parked_s, message
        if known is None:
            self._parked_order.append((until, message.key, slot))
        else:
            until = known.until  # a lifetime of its own: repeats do not extend it
            if isinstance(known.message, Release):
                kept = known.message  # a claim that comes behind it is late: it wants the request no more
            self._unpark(known)
        self._parked.setdefault(message.key, waiting)[slot] = _Parked(kept, route, source, until)
        self._parked_by[route] += 1
        if len(self._parked_order) > 8 * most:
            self._parked_order = deque(x for x in self._parked_order if x[2] in self._parked.get(x[1], ()))
        if isinstance(message, Claim):
            self._outbox.send(route, source, NotYet(message.key, message.pull_id, message.nonce))
        else:
            # Taken: it will be applied when the request is lent, or the lease will expire.
            self._outbox.send(route, source, Ack(message.key, message.pull_id))
