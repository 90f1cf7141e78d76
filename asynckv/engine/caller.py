"""The end of a request, for its caller: the wait, and the result or the error.

A cancelled caller waits until the pull has its outcome, because NIXL may still be writing into its blocks. The core
decides whether another attempt follows (`core/attempts.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec

from asynckv import errors
from asynckv.core.attempts import RETRYABLE, Request, RequestState, holder_of
from asynckv.core.following import Following
from asynckv.core.pull import Pull
from asynckv.core.types import How, KVTransferParams, Reason
from asynckv.engine.driver import Driver
from asynckv.errors import AsyncKVError, EngineClosed, PullCancelled, PullError
from asynckv.observe.log import phases
from asynckv.results import PullResult

ERRORS: Mapping[Reason, type[PullError]] = {
    Reason.CANCELLED: PullCancelled,
    Reason.ENGINE_CLOSED: errors.PeerUnreachable,
    Reason.TIMEOUT: errors.PullTimeout,
    Reason.NOT_LENT_YET: errors.NotLentYet,
    Reason.STANDSTILL: errors.PullTimeout,
    Reason.GEOMETRY: errors.GeometryRefused,
    Reason.UNPLANNABLE: errors.PlanRefused,
    Reason.REMOTE_TOO_SHORT: errors.RemoteTooShort,
    Reason.UNREACHABLE: errors.PeerUnreachable,
    Reason.WRONG_TARGET: errors.PeerUnreachable,
    Reason.PROTOCOL: errors.PeerUnreachable,
    Reason.PEER_LOST: errors.PeerLost,
    Reason.RESTARTED: errors.PeerLost,
    Reason.READ_FAILED: errors.ReadFailed,
    Reason.DIFFERS: errors.BytesDiffer,
    Reason.LEASE_LOST: errors.LeaseLost,
}
"""Errors of failed pulls by reason; every other reason is a refusal of the claim."""


class Caller:
    """A coroutine that waits for the end of a request. `begin_early` takes the first piece of one that is followed."""

    _news: asyncio.Event | None = None
    begin_early: Callable[[KVTransferParams], object] | None = None

    def ended(self, job: Request | Following) -> None:
        if self._news is not None:
            self._news.set()

    def returned(self, job: Request | Following, is_retired: bool) -> None:
        """Do nothing: `PullError.returned` asks the driver, and the core has released a late offer."""

    def offered(self, following: Following, piece: KVTransferParams) -> None:
        if self.begin_early is not None:
            with suppress(AsyncKVError):  # `pull` will refuse these blocks too, if they are still in use then
                self.begin_early(piece)

    async def offer(self, driver: Driver, following: Following) -> dict[str, Any]:
        """Wait for the params of a request that is followed, or raise `NoOffer`."""
        core, self._news = driver.core, asyncio.Event()
        try:
            if following.is_open:
                await self._news.wait()
        except asyncio.CancelledError:
            # Nobody hears of an offer that came just now.
            if following.params is None or core.is_early(following.request_id):
                core.cancel(following.request_id, driver.clock.now(), params=following.params)
            elif not core.is_read(following.params):
                core.discharge(following.follow_id, following.params, following.cohort.id, driver.clock.now())
            driver.soon()
            raise
        if following.reason is not None and core.is_early(following.request_id):
            # An offer may have come since its end, and is released with its head start.
            core.cancel(following.request_id, driver.clock.now(), params=following.params)
            driver.soon()
        return offer_of(following)

    async def wait(self, driver: Driver, request: Request) -> PullResult:
        """Wait for the result, or raise the error of the last attempt."""
        core, news = driver.core, asyncio.Event()
        self._news = news
        try:
            if request.state is not RequestState.OVER or not request.has_ended:
                await news.wait()
        except asyncio.CancelledError:
            core.abandon(request, driver.clock.now())
            driver.soon()
            # NIXL may still be writing: wait as long as `drain_s` allows, however often we are cancelled.
            while not request.has_ended and not driver.life.is_shut and driver.core is core:
                with suppress(asyncio.CancelledError), anyio.CancelScope(shield=True):
                    await news.wait()
            raise
        return outcome(driver, request)


def offer_of(following: Following) -> dict[str, Any]:
    """Return the params that a following was offered, or raise why it ended without. A later offer is released."""
    if following.reason is None:
        plain: dict[str, Any] = msgspec.to_builtins(following.params)
        return plain
    raise errors.NoOffer(
        f"request {following.request_id[:200]!r} was offered nothing: {following.detail}",
        request_id=following.request_id,
        failed_in="follow",
        reason=following.reason.value,
    )


def outcome(driver: Driver, request: Request) -> PullResult:
    """Return the result of a request that is over, or raise its error."""
    pull, head = request.pull, request.head
    if request.refusal is not None:
        raise request.refusal
    if not request.attempts:
        raise _early(driver, request)
    if pull is None or pull.reason is None:
        raise EngineClosed("the engine was closed")
    if request.stopped is Reason.CANCELLED and request.was_promised:
        last = error_of(driver, pull)
        raise _cancelled(last) from last
    if pull.reason is not Reason.COMPLETE:
        raise error_of(driver, pull)  # kept in no variable: its traceback would keep that
    assert pull.lists is not None
    return PullResult(
        request_id=pull.request_id,
        pull_id=pull.pull_id,
        num_bytes=pull.measures.num_bytes,
        num_posts=pull.num_posted,
        descriptors_planned=pull.measures.num_descriptors,
        descriptors_posted=pull.measures.num_descriptors_posted,
        phases=phases(pull),
        padding=tuple(pull.lists.padding(driver.core.identity.layout)),
        num_tokens=pull.lists.num_tokens,
        attempts=pull.attempt,
        num_pieces=0 if head is None else head.num_pieces,
        piece_bytes=0 if head is None else head.num_bytes,
    )


def error_of(driver: Driver, pull: Pull) -> PullError:
    assert pull.reason is not None
    held = None if pull.is_returned else driver.core.ledger.get(holder_of(pull))
    return ERRORS.get(pull.reason, errors.LeaseRefused)(
        f"request {pull.request_id[:200]!r} failed in {pull.failed_in}: {pull.detail}",
        request_id=pull.request_id,
        pull_id=pull.pull_id,
        failed_in=pull.failed_in,
        reason=pull.reason.value,
        held={} if held is None else {group: tuple(ids.tolist()) for group, ids in held.blocks.items()},
        wait_returned=None if pull.is_returned else partial(driver.until_returned, pull),
        is_retryable=pull.reason in RETRYABLE and pull.blame.how is not How.RECALLED,
        attempts=pull.attempt,
    )


def _early(driver: Driver, request: Request) -> PullError:
    """Return the error of a request that ended before its first attempt. A piece may still write its blocks."""
    wanted, pull, reason = request.wanted, request.pull, request.stopped or Reason.TIMEOUT
    is_cause = pull is not None and (pull.reason is reason or not pull.is_returned)  # else it ended long ago
    error = error_of(driver, pull) if pull is not None and is_cause and pull.reason is not Reason.COMPLETE else None
    if error is None or reason is Reason.CANCELLED:
        error = ERRORS[reason](
            f"request {wanted.request_id[:200]!r} ended before its first attempt: {reason}",
            request_id=wanted.request_id,
            reason=reason.value,
            failed_in="head_start",
            held={} if error is None else error.held,
            wait_returned=None if error is None else error.returned,
        )
    if reason is not Reason.CANCELLED:  # no pull says it in the log
        driver.recorder.pull_refused(wanted.request_id, wanted.params, error, driver.clock.now())
    return error


def _cancelled(last: PullError) -> PullCancelled:
    return PullCancelled(
        f"request {last.request_id[:200]!r}: cancelled between two attempts; the last one: {last}",
        request_id=last.request_id,
        pull_id=last.pull_id,
        reason=Reason.CANCELLED.value,
        failed_in="retry",
        held=last.held,
        wait_returned=last.returned,
        attempts=last.attempts,
    )
