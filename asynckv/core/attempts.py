"""One request over its attempts: whether another attempt follows, when, and which ranks hear that none does.

    TRYING -> PAUSING -> TRYING ...
         \\_______\\-> OVER

Every attempt is a pull with its own id. It begins once nothing of the attempt before it can write the blocks any more,
so a late first attempt can neither complete nor overwrite the second. While an attempt may follow, the prefill ranks
keep the request lent to this reader; `discharge` says when they must hear that none follows.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

from asynckv.core.pull import Pull, PullRequest
from asynckv.core.types import Reason, impossible
from asynckv.geometry.bounds import NULL

RETRYABLE = frozenset({Reason.UNREACHABLE, Reason.PEER_LOST, Reason.READ_FAILED, Reason.LEASE_LOST})
"""Failures after which the same params may work: the lease may still stand, and another connection may serve."""

MAX_PAUSE_S = 2.0


class RequestState(enum.StrEnum):
    TRYING = "trying"
    PAUSING = "pausing"  # the next attempt may not begin yet, or the last one may still write its blocks
    OVER = "over"


class RequestEvent(enum.StrEnum):
    ENDED = "ended"  # an attempt has ended, well or not, and none follows
    FAILED_FOR_NOW = "failed_for_now"  # an attempt failed, and another may succeed
    TIME = "time"  # the pause is over, and the blocks are free
    GIVEN_UP = "given_up"
    """The request was cancelled, the engine closes, the deadline passed, or the blocks never came back."""


S, E = RequestState, RequestEvent
ON_EVENT: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    S.TRYING: {E.ENDED: S.OVER, E.FAILED_FOR_NOW: S.PAUSING},
    S.PAUSING: {E.TIME: S.TRYING, E.GIVEN_UP: S.OVER},
    S.OVER: {},
}
"""The events that each state takes, and where each leads. Any other event raises before anything has changed."""


def blocks_of(pull: Pull) -> dict[int, tuple[int, ...]]:
    """Return the ids of the blocks that a pull fills, by group."""
    lists = pull.lists.local if pull.lists else ()
    return {g: tuple(ids[ids != NULL].tolist()) for g, (_, ids) in enumerate(lists) if len(ids)}


class Request:
    """The attempts at one request. The pause before a retry is `pause_s`, then doubles up to `MAX_PAUSE_S`."""

    def __init__(self, wanted: PullRequest, retries: int, pause_s: float, deadline: float, now: float) -> None:
        self.state = S.TRYING
        self.wanted, self.deadline, self.begun_at = wanted, deadline, now
        self.attempts = 1
        self.pull: Pull | None = None
        self.next_at = math.inf
        self.stopped: Reason | None = None  # why no attempt may follow, once the request was stopped
        self._retries, self._pause_s = retries, pause_s
        self._given_up_for: Reason | None = None  # reason that is reported instead of the last attempt's failure
        self.retryable = RETRYABLE if retries else frozenset[Reason]()
        """Failures of this attempt after which another attempt follows."""

    @property
    def was_promised(self) -> bool:
        return self.pull is not None and self.pull.reason in self.pull.retryable

    @property
    def discharge(self) -> Reason | None:
        """Return the reason to give the prefill ranks if they expect another attempt, and none follows; else None."""
        pull, is_last = self.pull, self.wanted.is_last or self.stopped is Reason.CANCELLED
        if self.state is not S.OVER or pull is None or not self.was_promised or not is_last:
            return None
        return self.stopped or self._given_up_for or pull.reason

    # -- events ------------------------------------------------------------------------------------

    def refused(self) -> None:
        """Note that an attempt could not begin, so that the outcome of the one before is final."""
        after = self._allow(E.ENDED)
        self._given_up_for = Reason.UNPLANNABLE
        self._enter(after)

    def abandoned(self, now: float) -> None:
        """Note that the attempt has its outcome, but no other follows because the caller is gone."""
        self._given_up_for = Reason.CANCELLED
        self.ended(now)
        if self.state is not S.OVER:
            self.give_up()

    def ended(self, now: float) -> None:
        pull = self.pull
        assert pull is not None
        assert pull.reason is not None
        when = math.inf
        if pull.reason in self.retryable and self.stopped is None:
            pause_s = min(self._pause_s * 2 ** min(self.attempts - 1, 16), MAX_PAUSE_S)
            when = max(now + pause_s, pull.not_before)
        after = self._allow(E.FAILED_FOR_NOW if when < self.deadline else E.ENDED)
        self.next_at = when
        self._enter(after)

    def time(self, now: float) -> None:
        after = self._allow(E.TIME)
        # The end of the last attempt may come late, and no attempt begins once its caller has stopped waiting.
        if self.stopped is None and now < self.deadline:
            self._enter(after)
        else:
            self.give_up()

    def stop(self, reason: Reason) -> None:
        self.stopped = self.stopped or reason

    def give_up(self) -> None:
        self._enter(self._allow(E.GIVEN_UP))

    # -- inside ------------------------------------------------------------------------------------

    def _allow(self, event: RequestEvent) -> RequestState:
        after = ON_EVENT[self.state].get(event)
        return after or impossible(event, f"request {self.wanted.request_id[:200]!r}", self.state)

    def _enter(self, after: RequestState) -> None:
        self.state = after
        if after is S.TRYING:
            self.attempts += 1
            if self.attempts > self._retries:
                self.retryable = frozenset()
