"""The end of an engine: drained, suspended until it is resumed, or closed for good.

The order keeps memory safe. First pulls are cancelled and leases revoked, and running grants are kept. Then all peers
get a goodbye, and the data plane is closed, which fails while a call is still inside it. Blocks that might have been
written are given back only when the agent is gone.

Suspending and closing are tasks of their own, so that a cancelled caller does not leave them half done, and later
callers wait for them. Grants that a caller has no time for are cut short, which is safe as long as the memory is not
written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from asynckv import told
from asynckv.account.inspect import HeldBlocks
from asynckv.config import EngineConfig
from asynckv.core.lease import LeaseState
from asynckv.core.lifecycle import LifeEvent, LifeState
from asynckv.core.news import release_unanswered
from asynckv.core.types import Reason
from asynckv.edges.control.local import LocalDoor
from asynckv.engine.driver import Driver, kept

GRACE_S = 1.0  # seconds for which closing waits for acknowledgements alone, or for loading peers when time is up
PROMISED = frozenset(LeaseState)  # why blocks are held that a reader may still read by a promise
LOG_S = 0.25  # seconds for which closing waits for the log's last lines when time is up: a disk takes milliseconds
MAX_NAMED = 64  # most requests with grants that were cut short that the log names


class Shutdown:
    def __init__(self, driver: Driver, config: EngineConfig) -> None:
        self._driver, self._config = driver, config
        self._life, self._recorder = driver.life, driver.recorder
        self._closing: asyncio.Task[tuple[HeldBlocks, ...]] | None = None
        self._close_by = math.inf  # nothing is waited for any longer, not even the end of promises
        self._suspending: asyncio.Task[tuple[HeldBlocks, ...]] | None = None
        self._left: tuple[HeldBlocks, ...] = ()
        self.is_busy = False
        self._is_stopped = False
        self.door: LocalDoor | None = None

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    async def drain(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        """Take nothing new, and wait for what is under way; return what is left of it."""
        driver = self._driver
        core = driver.core
        driver.soon()
        self._life.receive(LifeEvent.DRAIN)
        core.shut()
        await driver.wait(lambda: core.is_idle or self.is_closing, timeout_s)
        stragglers = driver.inspect.stragglers(driver.clock.now())
        self._recorder.log(told.DrainIncomplete(len(stragglers), _names(stragglers)) if stragglers else told.Drained())
        return stragglers

    async def suspend(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        """Let go of the memory, or wait until it is let go of; return what had to be cut short."""
        if self._suspending is None or self._suspending.done():
            self._life.receive(LifeEvent.SUSPEND)
            self._suspending = asyncio.get_running_loop().create_task(self._suspend(timeout_s))
        return await kept(self._suspending)

    async def close(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]:
        """End everything, or wait until all has ended; if that failed before, try again. Return what was cut short."""
        clock, turned = self._driver.clock, self._driver.turned
        if timeout_s is not None and (until := clock.now() + timeout_s) < self._close_by:
            self._close_by = until
            clock.call_at(until, turned.set)
        closing = self._closing
        if closing is None or (closing.done() and (closing.cancelled() or closing.exception() is not None)):
            closing = self._closing = asyncio.get_running_loop().create_task(self._close())
        return await kept(closing)

    async def close_planes(self) -> None:
        """Let go of both planes, whatever has become of the work."""
        if self._life.takes(LifeEvent.SHUT):  # or what came up after all was closed is closed
            self._life.receive(LifeEvent.SHUT)
        try:
            if (door := self.door) is not None:
                self.door = None
                await door.close()
            await self._driver.control.aclose()
        finally:
            try:
                await self.close_data()
            except BaseException:
                if self._life.takes(LifeEvent.STUCK):
                    self._life.receive(LifeEvent.STUCK)
                raise
            if self._life.takes(LifeEvent.DESTROYED):
                self._life.receive(LifeEvent.DESTROYED)

    def tell_stopped(self) -> None:
        """Tell observers, once, that nothing is told any more."""
        if not self._is_stopped:
            self._is_stopped = True
            self._driver.tell(self._driver.observers.engine_stopped)

    async def close_data(self) -> None:
        data, self.is_busy = self._driver.data, True  # this one, whatever the engine has got when that is over
        try:
            await data.quiesce()
        finally:
            self.is_busy = False
            data.close()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _is_late(self) -> bool:
        return self._driver.clock.now() >= self._close_by

    async def _suspend(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        driver = self._driver
        stragglers = await self.drain(timeout_s)
        for guest in driver.guests:
            await guest.let_go(None)
        self._left = await self._end_work("suspended")
        driver.core.decode.leave(driver.clock.now())
        driver.at_once()
        # Before loading ends, as no turn of the loop may lie between that and the end of the agent.
        await driver.data.quiesce()
        await driver.end_loading(self._config.pull.handshake_s)
        driver.data.close()
        driver.destroyed()
        driver.at_once()
        self._life.receive(LifeEvent.LET_GO)
        self._recorder.log(told.EngineSuspended(len(stragglers)))
        return stragglers

    async def _close(self) -> tuple[HeldBlocks, ...]:
        driver, left = self._driver, tuple[HeldBlocks, ...]()
        driver.turned.set()
        if self._suspending is not None and not self._suspending.done():
            await asyncio.gather(self._suspending, return_exceptions=True)
            left = self._left
        # Again if an earlier closing was cancelled, because the grants still have to be kept.
        if self._life.takes(LifeEvent.CLOSE):
            self._life.receive(LifeEvent.CLOSE)
            driver.core.shut("closed")
            for guest in tuple(driver.guests):
                in_time = None if self._close_by == math.inf else max(self._close_by - driver.clock.now(), 0.0)
                left += await guest.let_go(in_time)
            left += await self._end_work("closed")
        in_time = max(self._close_by - driver.clock.now(), GRACE_S)
        await driver.end_loading(min(self._config.pull.handshake_s, in_time))
        try:
            if self._life.takes(LifeEvent.SHUT):
                await self.close_planes()
        finally:
            if self._life.state is LifeState.STUCK and driver.home.is_settled:
                # Callers that wait for blocks hear after `held_s` that these are retired, unless it is closed again.
                driver.soon()
        if driver.home.is_settled:
            driver.stop()
            driver.destroyed()
            self._recorder.log(self._how_it_ended(left))
            self.tell_stopped()
            await self._recorder.aclose(max(self._close_by - driver.clock.now(), LOG_S))
        return left

    def _how_it_ended(self, left: Sequence[HeldBlocks]) -> told.EngineStopped:
        """Return the last line of a log, which tells an orderly end from a crash."""
        counters = self._driver.core.outbox.counters
        kinds = ("leases.", "pulls.", "refused.", "blocks.", "parked.", "requests.", "internal_errors")
        counted = {name: n for name, n in sorted(counters.items()) if n and name.startswith(kinds)}
        return told.EngineStopped(round(self._driver.clock.now() - self._driver.began_at, 3), len(left), counted)

    async def _end_work(self, how: str) -> tuple[HeldBlocks, ...]:
        """Cancel pulls, revoke leases, keep the promises that run, say goodbye; return what was not waited for."""
        driver, core = self._driver, self._driver.core
        core.close(driver.clock.now(), how)
        driver.soon()
        # Grants are kept although the engine closes: the longest running one, or a drain, bounds this wait. Missing
        # acknowledgements are not waited for that long, nor are holders of blocks alone: those end with the agent.
        patience = max(self._config.lease.grant_s, self._config.pull.drain_s) + 1.0
        await driver.wait(lambda: self._is_late or not core.is_bound, patience)
        if not core.is_bound:
            await driver.wait(lambda: self._is_late or core.is_idle, GRACE_S)
        left = driver.inspect.stragglers(driver.clock.now())
        if left:
            promised = [hold.request_id[:80] for hold in left if hold.reason in PROMISED]
            cut_short = promised[:MAX_NAMED] or None
            self._recorder.log(told.EngineClosedWithStragglers(len(left), _names(left), how, cut_short))
            for pull in core.decode.pulls.values():
                if pull.is_published and (unsettled := tuple(x.name for x in pull.sources if not x.is_settled)):
                    now, detail = driver.clock.now(), f"this side {how}"
                    self._recorder.log(release_unanswered(pull, unsettled, Reason.ENGINE_CLOSED, now, detail))
        core.say_goodbye()
        driver.at_once()
        return left


def _names(stragglers: Sequence[HeldBlocks]) -> list[str]:
    return [
        f"{h.request_id[:80]} ({h.reason}, waits for {', '.join(h.waits_for[:8]) or 'no peer'})" for h in stragglers[:8]
    ]
