"""A lent request for its owner: wait for its end, list the readers that have not released, or take it back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asynckv.arguments import shown
from asynckv.core.lease import Lease
from asynckv.core.types import KVTransferParams, decode_params
from asynckv.engine.driver import Driver
from asynckv.errors import LocalProtocolError
from asynckv.results import LeaseEnd


def recallable(requests: Iterable[KVTransferParams | Mapping[str, Any]], driver: Driver) -> list[KVTransferParams]:
    """Check params of requests that are to be recalled, on any thread."""
    if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
        raise LocalProtocolError(f"requests is {shown(requests)}; give a list with the params of each")
    found = [decode_params(params) for params in requests]
    for params in found:
        driver.core.prefill.check_ours(params)
        if not params.recall:
            raise LocalProtocolError(
                f"request {params.request_id[:200]!r} was not made to be recalled, so its grants are kept; withdraw it "
                f"and wait for its end, or make its params with recall=True"
            )
    return found


class LentRequest:
    """A lent request, as the prefill rank that lent it sees it."""

    def __init__(self, driver: Driver, lease: Lease) -> None:
        self._driver = driver
        self._lease = lease
        self._ended: asyncio.Event | None = None  # made for a caller that waits
        self._calls: list[Callable[[LeaseEnd], None]] = []
        if not lease.is_over:  # else it was released before it was lent
            lease.on_end = self._end

    def __repr__(self) -> str:
        return f"<LentRequest {self.request_id!r} {self._lease.state.value}>"

    @property
    def request_id(self) -> str:
        """The prefill side's id."""
        return self._lease.lent.request_id

    @property
    def is_over(self) -> bool:
        """Whether the blocks are the engine's again."""
        return self._lease.is_over

    def owed(self) -> tuple[str, ...]:
        """Name the readers that have not released yet; `*` for a decode engine that never claimed the request."""
        self._driver.home.asked(self.owed)
        return self._lease.owed()

    def withdraw(self) -> None:
        """Grant nothing more; the blocks are the engine's again when no promise runs, or now if it may be recalled."""
        driver = self._driver
        driver.home.here(self.withdraw)
        driver.soon()
        driver.core.prefill.revoke(self._lease, driver.clock.now())

    async def wait_released(self) -> LeaseEnd:
        """Wait until the blocks are the engine's again, whatever the reason."""
        self._driver.home.here(self.wait_released)
        if self._lease.on_end is not None:
            self._ended = self._ended or asyncio.Event()
            await self._ended.wait()
        return self._how()

    def _when_released(self, call: Callable[[LeaseEnd], None]) -> None:
        """Call this on the loop once the blocks are the engine's again, at once if they are."""
        if self._lease.on_end is not None:
            self._calls.append(call)
        else:
            call(self._how())

    def _end(self) -> None:
        self._lease.on_end = None
        if self._ended is not None:
            self._ended.set()
        for call in self._calls:
            call(self._how())

    def _how(self) -> LeaseEnd:
        lease = self._lease
        cause = lease.state.value if lease.is_over else "closed"
        return LeaseEnd(
            lease.lent.request_id,
            cause,
            {str(reader): x.outcome.value for reader, x in lease.discharged.items()},
            () if cause == "released" else lease.owed(),
            min(lease.ended_at, self._driver.clock.now()) - lease.lent_at,
        )
