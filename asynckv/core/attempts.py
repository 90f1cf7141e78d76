"""One request over its attempts: whether another attempt follows, when, and which ranks hear that none does.

    EARLY -> PAUSING -> TRYING -> PAUSING ...
        \\_______\\________\\-> OVER

Every attempt is a pull with its own id. It begins once nothing of the attempt before it can write the blocks any more,
so a late first attempt can neither complete nor overwrite the second. While an attempt may follow, the prefill ranks
keep the request lent to this reader; `discharge` says when they must hear that none follows.

A request with a head start begins early, with pieces of what is still computed (`core/head_start.py`). Then its first
attempt waits for the piece that is being read, as another attempt waits for the one before.

`RankCore` begins the attempts, and its timers wake a request that pauses. The engine tells the `Waiter` what the outbox
says of the request.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asynckv.core.head_start import HeadStart
from asynckv.core.pull import Kind, Pull, PullRequest
from asynckv.core.types import Reason, Waiter, impossible
from asynckv.geometry.blocks import BlockList
from asynckv.geometry.bounds import NULL

RETRYABLE = frozenset({Reason.UNREACHABLE, Reason.PEER_LOST, Reason.READ_FAILED, Reason.LEASE_LOST})
"""Failures after which the same params may work: the lease may still stand, and another connection may serve."""

NONE = frozenset[Reason]()
MAX_PAUSE_S = 2.0


class RequestState(enum.StrEnum):
    EARLY = "early"  # it takes pieces, and its params are not known yet
    TRYING = "trying"
    PAUSING = "pausing"  # the next attempt may not begin yet, or the last one may still write its blocks
    OVER = "over"


class RequestEvent(enum.StrEnum):
    KNOWN = "known"  # the params of the whole have come
    ENDED = "ended"  # an attempt has ended, well or not, and none follows
    FAILED_FOR_NOW = "failed_for_now"  # an attempt failed, and another may succeed
    TIME = "time"  # the pause is over, and the blocks are free
    GIVEN_UP = "given_up"  # it was cancelled, the engine closes, the deadline passed, or the blocks were given up


S, E = RequestState, RequestEvent
ON_EVENT: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    S.EARLY: {E.KNOWN: S.PAUSING, E.GIVEN_UP: S.OVER},
    S.TRYING: {E.ENDED: S.OVER, E.FAILED_FOR_NOW: S.PAUSING},
    S.PAUSING: {E.TIME: S.TRYING, E.GIVEN_UP: S.OVER},
    S.OVER: {},
}
"""The events that each state takes, and where each leads. Any other event raises before anything has changed."""


def blocks_of(pull: Pull | None, head: HeadStart | None = None) -> dict[int, tuple[int, ...]]:
    """Return the ids of the blocks that a pull fills, or of all blocks of a request with a head start, by group."""
    lists: Sequence[BlockList] = head.blocks if head else pull.lists.local if pull and pull.lists else ()
    return {g: tuple(ids[ids != NULL].tolist()) for g, (_, ids) in enumerate(lists) if len(ids)}


def holder_of(pull: Pull) -> str:
    """Return the name under which the ledger holds a pull's blocks; for a piece, all blocks of its request."""
    head = pull.owner.head if pull.kind is Kind.PIECE and isinstance(pull.owner, Request) else None
    return pull.pull_id if head is None else head.holder


def head_start_of(pull: Pull) -> HeadStart | None:
    """Return what pieces have brought to a pull's request, or None without any."""
    head = pull.owner.head if isinstance(pull.owner, Request) else None
    return head if head is not None and head.num_pieces else None


@dataclass(slots=True, eq=False)
class Request:
    """The attempts at one request. The pause before a retry is `pause_s`, then doubles up to `MAX_PAUSE_S`."""

    wanted: PullRequest
    retries: int
    pause_s: float
    deadline: float
    begun_at: float
    state: RequestState = S.TRYING
    attempts: int = 1
    pull: Pull | None = None  # the last attempt, or before the first one the newest piece
    next_at: float = math.inf
    stopped: Reason | None = None  # why no attempt may follow, once the request was stopped
    refusal: Exception | None = None  # why the next attempt could not begin
    waiter: Waiter[Request] | None = None
    head: HeadStart | None = None
    is_known: bool = True  # False while its params are those of a piece
    scheduled_at: float = math.inf

    @property
    def has_ended(self) -> bool:
        """Return True if it is over, and the end of no read is waited for."""
        return self.state is S.OVER and (bool(self.attempts) or self.pull is None or self.pull.is_published)

    @property
    def retryable(self) -> frozenset[Reason]:
        """Return the failures of this attempt after which another attempt follows."""
        return RETRYABLE if self.attempts <= self.retries else NONE

    @property
    def is_free(self) -> bool:
        """Return True if no attempt can write the blocks any more."""
        return self.pull is None or self.pull.is_returned

    @property
    def was_promised(self) -> bool:
        return self.pull is not None and self.pull.reason in self.pull.retryable

    @property
    def discharge(self) -> Reason | None:
        """Return the reason to give the prefill ranks if they expect another attempt, and none follows; else None."""
        pull = self.pull
        if self.state is not S.OVER or not self.is_known or not self.wanted.is_last:
            return None  # nothing was lent to it, or the caller itself may try again
        if not self.attempts:
            return self.stopped or Reason.TIMEOUT
        if pull is None or not self.was_promised:
            return None  # the ranks expect nothing
        return self.stopped or (pull.reason if self.refusal is None else Reason.UNPLANNABLE)

    # -- events ------------------------------------------------------------------------------------

    def refused(self, refusal: Exception) -> None:
        """Note that an attempt could not begin, so that the outcome of the one before is final."""
        self.state, self.refusal = self._allow(E.ENDED), refusal

    def ended(self, now: float) -> None:
        """Take the outcome of the attempt."""
        pull, when = self.pull, math.inf
        assert pull is not None
        assert pull.reason is not None
        if pull.reason in pull.retryable and self.stopped is None:
            pause_s = min(self.pause_s * 2 ** min(self.attempts - 1, 16), MAX_PAUSE_S)
            when = max(now + pause_s, pull.not_before)
        event = E.FAILED_FOR_NOW if when < self.deadline else E.ENDED
        if event is E.FAILED_FOR_NOW and self.head is not None:
            self.head.newest = None  # nothing holds the blocks meanwhile, so the next attempt fills all of them
        self.state, self.next_at = ON_EVENT[self.state].get(event) or self._allow(event), when

    def time(self, now: float) -> None:
        """Begin the next attempt once the pause is over and the blocks are back; give up if none may begin any more."""
        after, pull = self._allow(E.TIME), self.pull
        # The end of the last attempt may come late, and no attempt begins once its caller has stopped waiting.
        is_hopeless = now >= self.deadline or (pull is not None and pull.is_retired and not pull.is_returned)
        if not self.attempts and pull is not None and pull.reason is Reason.DIFFERS:
            self.stopped = self.stopped or Reason.DIFFERS  # the request names the same blocks
        if self.stopped is not None or is_hopeless:
            self.state = self._allow(E.GIVEN_UP)
        elif now >= self.next_at and self.is_free:
            self.state, self.attempts = after, self.attempts + 1

    def known(self, wanted: PullRequest, retries: int, deadline: float, now: float) -> None:
        """Go on from pieces to the whole request, with its params."""
        self.state, self.is_known = self._allow(E.KNOWN), True
        self.wanted, self.retries, self.deadline, self.begun_at, self.next_at = wanted, retries, deadline, now, now

    def stop(self, reason: Reason, *, is_last: bool = False) -> None:
        """Let no other attempt follow; with `is_last` the caller makes none either, whatever was said before."""
        self.stopped = self.stopped or reason
        if self.state is S.EARLY:
            self.state = self._allow(E.GIVEN_UP)
        if is_last:
            self.wanted = replace(self.wanted, is_last=True)

    # -- inside ------------------------------------------------------------------------------------

    def _allow(self, event: RequestEvent) -> RequestState:
        after = ON_EVENT[self.state].get(event)
        return after or impossible(event, f"request {self.wanted.request_id[:200]!r}", self.state)
