"""One ticket that a decode rank follows: what the rank knows of a request before it has its params.

    MEETING -> FOLLOWING -> OFFERED
          \\________\\----> ENDED -> LATE
                     \\--> SPARED ---/

An offer begins nothing by itself: the embedder announces or pulls its params on all ranks.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asynckv.core.notes import History
from asynckv.core.source import RemoteRank
from asynckv.core.types import Cohort, FollowParams, KVTransferParams, PullId, Reason, RequestId, Waiter, impossible

MAX_NONCES = 8


class FollowState(enum.StrEnum):
    MEETING = "meeting"
    FOLLOWING = "following"
    OFFERED = "offered"
    SPARED = "spared"  # its caller needs nothing of it, and the rank follows on to release what it is offered
    ENDED = "ended"
    LATE = "late"  # offered after it had ended for its caller, and released


class FollowEvent(enum.StrEnum):
    READY = "ready"  # its rank can be asked
    OFFER = "offer"
    KNOWN = "known"  # another rank was offered its params
    SPARE = "spare"
    END = "end"


S, E = FollowState, FollowEvent
ON_EVENT: Mapping[FollowState, Mapping[FollowEvent, FollowState]] = {
    S.MEETING: {E.READY: S.FOLLOWING, E.KNOWN: S.OFFERED, E.SPARE: S.SPARED, E.END: S.ENDED},
    S.FOLLOWING: {E.READY: S.FOLLOWING, E.OFFER: S.OFFERED, E.KNOWN: S.OFFERED, E.SPARE: S.SPARED, E.END: S.ENDED},
    S.OFFERED: {},
    S.SPARED: {E.READY: S.SPARED, E.OFFER: S.LATE, E.END: S.ENDED},
    S.ENDED: {E.OFFER: S.LATE},
    S.LATE: {},
}
"""The events that each state takes, and where each leads. Any other event raises before anything has changed."""


class Follower(Waiter["Following"], Protocol):
    def offered(self, following: Following, piece: KVTransferParams) -> None:
        """Take the first piece, for which the request needs blocks."""


@dataclass(slots=True, eq=False)
class Following:
    """One ticket that this rank follows. `reason` and `detail` say why it ended without an offer."""

    follow_id: PullId
    request_id: RequestId
    target: FollowParams = field(repr=False)
    cohort: Cohort
    rank: RemoteRank
    since: float
    deadline: float
    number: int = 0  # place among all leases, pulls and followings of the rank, in the order in which they began
    state: FollowState = S.MEETING
    params: KVTransferParams | None = None
    reason: Reason | None = None
    detail: str = ""
    waiter: Follower | None = None
    have: int = -1  # what it tells its rank (`Follow.have`)
    nonces: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_NONCES))
    retry_at: float = math.inf
    pause_s: float = 0.0
    scheduled_at: float = math.inf

    def receive(self, event: FollowEvent) -> None:
        after = ON_EVENT[self.state].get(event) or impossible(event, f"request {self.request_id[:80]!r}", self.state)
        self.state = after

    @property
    def is_open(self) -> bool:
        return self.state in (S.MEETING, S.FOLLOWING, S.SPARED)

    @property
    def is_over(self) -> bool:
        return not self.is_open

    @property
    def history(self) -> History:
        return [(self.since, self.state)]
