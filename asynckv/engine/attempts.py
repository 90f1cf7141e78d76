"""A caller's wait for a pull, through one attempt or several, and the result that it gets.

A cancelled caller waits until the pull has its outcome, because NIXL may still be writing into its blocks. The core
decides whether another attempt follows (`core/attempts.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import anyio

from asynckv import errors
from asynckv.core.attempts import RETRYABLE, Request, RequestState, blocks_of
from asynckv.core.lifecycle import LifeState
from asynckv.core.pull import Pull
from asynckv.core.types import Reason
from asynckv.engine.driver import Driver, Waiting, wait_until
from asynckv.errors import AsyncKVError, EngineClosed, PullCancelled, PullError
from asynckv.geometry.layout import Layout
from asynckv.observe.log import phases
from asynckv.observe.observer import Observer
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
    Reason.LEASE_LOST: errors.LeaseLost,
}
"""Errors of failed pulls by reason; every other reason is a refusal of the claim."""


# -- one attempt -----------------------------------------------------------------------------------------


async def attempt(driver: Driver, request: Request, seconds: float, now: float) -> Waiting:
    """Pull once, to its outcome; if this raises, nothing was begun."""
    core, clock = driver.core, driver.clock
    driver.soon()  # also after a refusal, because a message to a peer may be waiting
    wanted = request.wanted
    try:
        pull = core.pull(wanted, seconds, now, attempt=request.attempts, retryable=request.retryable)
    except AsyncKVError as exc:
        if request.attempts == 1:
            driver.recorder.pull_refused(wanted.request_id, wanted.params, exc, now)
        raise
    request.pull = pull
    waiting = driver.waiting[pull.pull_id] = Waiting(pull, driver.home)
    try:
        while pull.reason is None:
            waiting.outcome = asyncio.get_running_loop().create_future()
            await waiting.outcome
    except asyncio.CancelledError:
        core.decode.cancel(pull, clock.now())
        driver.soon()
        # NIXL may still be writing: wait as long as `drain_s` allows, however often we are cancelled.
        while pull.reason is None and not driver.life.is_shut and driver.core is core:
            with suppress(asyncio.CancelledError, EngineClosed), anyio.CancelScope(shield=True):
                waiting.outcome = asyncio.get_running_loop().create_future()
                await waiting.outcome
        if pull.reason is not None:
            request.abandoned(clock.now())
            let_go(driver, request)  # it had failed just before
        raise
    return waiting


def result_of(pull: Pull, layout: Layout) -> PullResult:
    assert pull.lists is not None
    return PullResult(
        request_id=pull.request_id,
        pull_id=pull.pull_id,
        num_bytes=pull.num_bytes,
        num_posts=pull.num_posted,
        descriptors_planned=pull.num_descriptors,
        descriptors_posted=pull.num_descriptors_posted,
        phases=phases(pull),
        padding=tuple(pull.lists.padding(layout)),
        num_tokens=pull.lists.num_tokens,
        attempts=pull.attempt,
    )


def error_of(waiting: Waiting) -> PullError:
    pull = waiting.pull
    assert pull.reason is not None
    return ERRORS.get(pull.reason, errors.LeaseRefused)(
        f"request {pull.request_id[:200]!r} failed in {pull.failed_in}: {pull.detail}",
        request_id=pull.request_id,
        pull_id=pull.pull_id,
        failed_in=pull.failed_in,
        reason=pull.reason.value,
        held={} if pull.is_returned else blocks_of(pull),
        wait_returned=None if pull.is_returned else waiting.until_returned,
        is_retryable=pull.reason in RETRYABLE,
        attempts=pull.attempt,
    )


def let_go(driver: Driver, request: Request) -> None:
    """Tell the prefill ranks that no attempt follows, if they were told that one would."""
    reason = request.discharge
    if reason is not None and not driver.life.is_shut and driver.life.state is not LifeState.SUSPENDED:
        with suppress(AsyncKVError):
            driver.core.let_go(request.wanted, reason, driver.clock.now())
        driver.soon()


# -- several ---------------------------------------------------------------------------------------------


class Retries:
    """A request with attempts that follow each other, and its caller, which waits."""

    def __init__(self, driver: Driver, request: Request) -> None:
        self.request = request
        self._driver = driver
        self._wake = asyncio.Event()

    def end(self, reason: Reason) -> None:
        self.request.stop(reason)
        self._wake.set()

    async def result(self, seconds: float, now: float) -> PullResult:
        """Try until it is over, the first attempt for `timeout_s` at most; raise what the last attempt raised."""
        driver, request = self._driver, self.request
        while True:
            try:
                waiting = await attempt(driver, request, seconds, now)
            except AsyncKVError:
                request.refused()
                let_go(driver, request)
                raise
            request.ended(driver.clock.now())
            if waiting.pull.reason is Reason.COMPLETE:
                return result_of(waiting.pull, driver.core.identity.layout)
            error = error_of(waiting)
            try:
                await self._until_next(error)
            finally:
                if request.state is RequestState.PAUSING:
                    request.give_up()
                let_go(driver, request)
            if request.state is RequestState.OVER:
                if request.stopped is Reason.CANCELLED and request.was_promised:
                    raise _cancelled(error) from error
                raise error
            now = driver.clock.now()
            seconds = max(request.deadline - now, 1e-3)

    async def _until_next(self, error: PullError) -> None:
        """Wait for the pause, and for the blocks, until the next attempt may begin, or none follows."""
        driver, request, clock = self._driver, self.request, self._driver.clock
        if request.state is not RequestState.PAUSING or request.pull is None:
            return
        driver.recorder.pull_tried_again(request.pull, request.next_at - clock.now())
        driver.tell(Observer.pull_retried, request.pull, clock.now())
        await wait_until(clock, self._wake, lambda: request.stopped is not None, request.next_at)
        returned = asyncio.ensure_future(error.returned())
        returned.add_done_callback(lambda _: self._wake.set())
        try:
            await wait_until(
                clock, self._wake, lambda: returned.done() or request.stopped is not None, request.deadline
            )
            if returned.done() and not returned.cancelled() and returned.exception() is None:
                request.time(clock.now())
            else:
                request.give_up()
        finally:
            returned.cancel()


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
