"""Durations and shares of peers, which must be counted as they happen. The engine itself counts everything else.

A tally lives on its engine's loop and costs a few microseconds per pull. Readers get a copy.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from typing import Self

from asynckv.core.lease import Lease
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.types import Reason
from asynckv.observe.log import phases, written_blocks
from asynckv.observe.observer import Observer

BUCKETS_S = (*(m * 10.0**e for e in range(-4, 2) for m in (1.0, 2.5, 5.0)), 100.0)
"""Bounds of buckets: a small pull on one host takes some 300 us, one that misses its deadline 30 s or more."""

MAX_PEERS = 32
LEFT = "left"  # state of a gone peer that said goodbye, or had not been needed for long, and with which no pull failed
OTHER = "other"
"""Name of all engines beyond `MAX_PEERS`, because engines restart for ever, and each name keeps a series."""


class Durations:
    """A histogram of durations: `counts` by bucket, the last for all that exceed every bound, and their sum."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def copy(self) -> Durations:
        other = Durations()
        other.counts, other.total_s = self.counts.copy(), self.total_s
        return other


class MetricsTally(Observer):
    """Counts of one engine's observer."""

    def __init__(self) -> None:
        self.phases: dict[str, Durations] = {name: Durations() for name in PHASES}  # of every pull that has ended
        self.pulls = {outcome: Durations() for outcome in OUTCOMES}  # whole pulls
        self.leases = {state: Durations() for state in ENDS}
        self.offloads: dict[str, Durations] = {}
        self.lag = Durations()
        self.retried = Counter[str]()  # attempts that were followed by another, by the reason of their failure
        self.posts = self.rereads = self.blocks_given_up = 0
        self.peer_states = Counter[str]()
        self.peer_pulls = Counter[tuple[str, str]]()
        self.peer_bytes = Counter[str]()

    def copy(self) -> Self:
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | Durations):
                setattr(other, name, value.copy())
        for durations in (other.phases, other.pulls, other.leases, other.offloads):
            durations.update({name: each.copy() for name, each in durations.items()})
        return other

    def pull_ended(self, pull: Pull, now: float) -> None:
        """Count the pull's phases except its release, and the bytes that it moved."""
        of = self.phases
        for name, seconds in phases(pull).items():
            if name != "release":  # not `add`, because the call costs more than all the rest
                durations = of[name]
                durations.counts[bisect_left(BUCKETS_S, seconds)] += 1
                durations.total_s += seconds
        reason, num_bytes = pull.reason, 0
        if reason is Reason.COMPLETE:
            outcome, num_bytes = "complete", pull.measures.num_bytes
        else:
            outcome = "cancelled" if reason is Reason.CANCELLED else "failed"
        self.pulls[outcome].add(pull.published_at - pull.called_at)
        self.posts += pull.num_posted
        self.rereads += pull.measures.rereads
        peer = pull.params.engine_id
        if peer not in self.peer_bytes and len(self.peer_bytes) >= MAX_PEERS:
            peer = OTHER
        self.peer_pulls[peer, outcome] += 1
        self.peer_bytes[peer] += num_bytes

    def pull_retried(self, pull: Pull, now: float) -> None:
        self.retried[str(pull.reason)] += 1

    def pull_over(self, pull: Pull, now: float) -> None:
        self.phases["release"].add(max(pull.measures.released_at - pull.published_at, 0.0))

    def blocks_retired(self, pull: Pull, now: float) -> None:
        self.blocks_given_up += written_blocks(pull)

    def lease_ended(self, lease: Lease, now: float) -> None:
        self.leases[lease.state if lease.is_over else CLOSED].add(min(lease.ended_at, now) - lease.lent_at)

    def peer_changed(self, peer: Peer, before: PeerState, after: PeerState, now: float) -> None:
        is_orderly = after is PeerState.GONE and peer.is_orderly and not peer.num_failed
        self.peer_states[LEFT if is_orderly else after.value] += 1

    def offload_ended(self, call: str, seconds: float, now: float) -> None:
        self.offloads.setdefault(call, Durations()).add(seconds)

    def loop_came(self, lag_s: float, now: float) -> None:
        self.lag.add(lag_s if lag_s > 0.0 else 0.0)


PHASES = ("announced", "handshake", "queue", "plan", "post", "read", "detect", "confirm", "drain", "release")
OUTCOMES = ("complete", "cancelled", "failed")
CLOSED = "closed"
ENDS = ("released", "expired", "revoked", CLOSED)
