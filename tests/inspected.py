"""Engines in processes of their own, to be inspected from outside, and to be treated badly."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self

import msgspec

from asynckv import (
    AsyncKVError,
    Endpoint,
    Engine,
    EngineConfig,
    InspectConfig,
    KeysConfig,
    LeaseConfig,
    LogConfig,
    NixlConfig,
    NoOffer,
    PrefillRanks,
    PullConfig,
)
from tests.engines import memory


class Side:
    """One rank, and what its driver may ask for.

    Args:
        name: Of the engine.
        directory: Of its socket, and of its log if it has one.
        log: How its log's name begins; empty: it has none.
        lease, pull, keys: Fields of these parts of its configuration.
        config: Other fields of its configuration.
    """

    def __init__(
        self,
        *,
        name: str,
        directory: str,
        lease_s: float = 120.0,
        grant_s: float = 10.0,
        log: str = "",
        rank: int = 0,
        ranks: int = 1,
        head_dim: int = 32,
        lease: dict[str, Any] | None = None,
        pull: dict[str, Any] | None = None,
        keys: dict[str, str] | None = None,
        **config: Any,
    ) -> None:
        self._lease = LeaseConfig(lease_s=lease_s, grant_s=grant_s, **lease or {})
        settings = EngineConfig(
            engine_id=name,
            inspect=InspectConfig(directory=directory),
            lease=self._lease,
            pull=PullConfig(**pull or {}),
            log=LogConfig(file=f"{directory}/{log}-{{pid}}.jsonl", away_s=2.5) if log else LogConfig(),
            nixl=NixlConfig(posting_threads=0, process="never"),
            keys=KeysConfig(**keys) if keys else None,
            **config,
        )
        self.engine = Engine(settings, memory(1, rank, ranks, head_dim)[0])
        self._calls: set[asyncio.Task[str]] = set()

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.aclose(timeout_s=0)

    def address(self) -> str:
        """Tell where the engine listens."""
        return self.engine.endpoint.address

    def endpoint(self) -> dict[str, Any]:
        """Tell how readers find this rank."""
        told: dict[str, Any] = msgspec.to_builtins(self.engine.endpoint)
        return told

    # -- prefill ---------------------------------------------------------------------------------------------------

    def make(self, number: int, endpoints: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Make params of a request of a block, on this rank or on several, that is not lent yet."""
        found = [self.engine.endpoint] if endpoints is None else msgspec.convert(endpoints, list[Endpoint])
        group = PrefillRanks(self.engine.config.engine_id, found, lease=self._lease)
        return group.make_params(f"cmpl-{number}", [(0, [number % 32])], 16)

    def lend_it(self, params: dict[str, Any], ticket: str = "") -> None:
        self.engine.lend(params, ticket=ticket)

    def lend(self, number: int, first: int = 0) -> list[dict[str, Any]]:
        """Lend so many requests of a block each."""
        params = [self.make(n) for n in range(first, first + number)]
        for each in params:
            self.engine.lend(each)
        return params

    def withdraw_ticket(self, ticket: str) -> None:
        """Say that no request will be lent under a ticket."""
        self.engine.withdraw_ticket(ticket)

    def withdraw(self, params: dict[str, Any]) -> None:
        """Say that a request was aborted."""
        self.engine.withdraw(params)

    def gauge(self, name: str) -> int:
        """Tell a gauge."""
        return self.engine.statistics().gauges[name]

    # -- decode ----------------------------------------------------------------------------------------------------

    def announce(self, number: int, params: dict[str, Any], wait_s: float | None = None) -> str:
        """Announce a request and never pull it; tell the error if that was refused."""
        try:
            self.engine.announce(f"req-{number}", params, wait_s=wait_s)
        except AsyncKVError as exc:
            return type(exc).__name__
        return ""

    async def pull(
        self, number: int, params: dict[str, Any], block: int = 0, timeout_s: float = 2.0, is_last: bool = True
    ) -> str:
        """Pull a request, and tell what came of it."""
        blocks = [(0, [block])]
        try:
            await self.engine.pull(f"req-{number}", blocks, params, timeout_s=timeout_s, is_last=is_last)
        except AsyncKVError as exc:
            return type(exc).__name__
        return "complete"

    async def follow(self, number: int, endpoint: dict[str, Any], ticket: str, wait_s: float) -> str:
        """Follow a ticket to a prefill rank, and tell what came of it."""
        follow = {"ticket": ticket, "engine_id": "prefill", "endpoints": [endpoint]}
        try:
            await self.engine.follow(f"req-{number}", follow, wait_s=wait_s)
        except NoOffer as exc:
            return exc.reason
        return "offered"

    def begin(self, *, follows: bool = False, **options: Any) -> None:
        """Begin to pull or follow a request, and do not wait for it."""
        task = asyncio.create_task((self.follow if follows else self.pull)(**options))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def cancel(self, number: int, params: dict[str, Any]) -> None:
        """Give a request up."""
        self.engine.cancel(f"req-{number}", params)

    # -- both ------------------------------------------------------------------------------------------------------

    def states(self) -> list[str]:
        """Tell what has become of everything that is read of others, or lent to them."""
        return [rank.state for request in self.engine.requests() for rank in request.ranks]

    def block(self, seconds: float, *, computes: bool = False) -> None:
        """Keep the loop away, asleep or at work; the answer comes before that."""

        def away() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(0.0 if computes else seconds)

        asyncio.get_running_loop().call_soon(away)

    async def close(self) -> None:
        """Close the engine without time for its promises."""
        await self.engine.aclose(timeout_s=0)
