"""Engines in processes of their own, on real NIXL and ZMQ, whose requests are leaked on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Self

from asynckv import AsyncKVError, Engine, EngineConfig, PrefillRanks
from asynckv.config import KeysConfig, LeaseConfig, LogConfig, PullConfig
from asynckv.engine.lent import LentRequest
from tests.engines import memory

LEASE_S = 2.0

LEASES: dict[str, dict[str, Any]] = {"short": {"max_lease_s": LEASE_S + 0.5, "parked_s": 0.3}}
"""How the leases of some engines differ."""


class Side:
    """One process; its engines log to `FOLDER/ENGINE-PID.log`."""

    def __init__(self, *, engines: list[str], folder: str, keys: dict[str, str]) -> None:
        self._engines: dict[str, Engine] = {}
        for seed, name in enumerate(engines):
            config = EngineConfig(
                engine_id=name,
                lease=LeaseConfig(lease_s=LEASE_S, grant_s=LEASE_S, **LEASES.get(name, {})),
                pull=PullConfig(handshake_s=1.0, release_timeout_s=LEASE_S, announce_s=3.0, timeout_s=5.0, gone_s=4.0),
                # One warning of an absence in ten seconds: a slow start on a busy machine is not to take it.
                log=LogConfig(file=str(Path(folder) / "{engine_id}-{pid}.log"), away_s=2.5),
                keys=KeysConfig(secret=keys[name], authorized=keys[f"{name}.authorized"]) if name in keys else None,
            )
            self._engines[name] = Engine(config, memory(seed)[0])
        self._groups: dict[str, PrefillRanks] = {}
        self._lent: dict[str, LentRequest] = {}
        self._stack = contextlib.AsyncExitStack()
        self._next = 0

    async def __aenter__(self) -> Self:
        for name, engine in self._engines.items():
            await self._stack.enter_async_context(engine)
            self._groups[name] = PrefillRanks(name, [engine.endpoint])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # -- prefill ---------------------------------------------------------------------------------------------------

    def make(self, engine: str, request_id: str) -> dict[str, Any]:
        """Make params of a request that is not lent yet."""
        self._next += 1
        return self._groups[engine].make_params(request_id, [(0, [self._next])], 16, written=True, lease_s=LEASE_S)

    def lend(self, engine: str, request_id: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Lend a request, whose params were made before or are made now."""
        params = self.make(engine, request_id) if params is None else params
        self._lent[request_id] = self._engines[engine].lend(params)
        return params

    async def ended(self, request_id: str) -> str:
        """Wait until a lease is over."""
        return (await self._lent[request_id].wait_released()).cause

    # -- decode ----------------------------------------------------------------------------------------------------

    async def pull(self, engine: str, request_id: str, params: dict[str, Any], **options: Any) -> str:
        self._next += 1
        try:
            await self._engines[engine].pull(f"D-{request_id}", [(0, [self._next % 30])], params, **options)
        except AsyncKVError as exc:
            return type(exc).__name__
        return "complete"

    def announce(self, engine: str, request_id: str, params: dict[str, Any], wait_s: float | None = None) -> None:
        self._engines[engine].announce(f"D-{request_id}", params, wait_s=wait_s)

    async def claimed(self, engine: str, request_id: str) -> None:
        """Wait until an announced request was granted."""
        while True:
            for status in self._engines[engine].requests():
                if status.request_id == f"D-{request_id}" and any(x.state == "granted" for x in status.ranks):
                    return
            await asyncio.sleep(0.01)

    async def idle(self, engine: str) -> None:
        """Wait until no pull is under way, releases included."""
        while self._engines[engine].requests():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    async def discharge(self, engine: str, request_id: str, params: dict[str, Any]) -> None:
        """Say that nothing of a request is needed, and wait until that was taken."""
        self._engines[engine].cancel(f"D-{request_id}", params)
        await self._done(engine, request_id)

    async def forgotten(self, engine: str) -> None:
        """Wait until nothing is remembered of requests that are not lent yet."""
        while self._engines[engine].statistics().gauges["parked"]:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    async def close(self, engine: str) -> None:
        """Close an engine without time for its promises."""
        await self._engines[engine].aclose(0.0)

    async def _done(self, engine: str, request_id: str) -> None:
        while any(x.request_id == f"D-{request_id}" for x in self._engines[engine].requests()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def address(self, engine: str) -> str:
        return self._engines[engine].endpoint.address

    async def held(self, engine: str, seconds: float) -> None:
        """Wait until everything has been held for so long."""
        requests = self._engines[engine].requests
        while min(x.state_s for x in requests()) < seconds:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    def block(self, seconds: float) -> None:
        """Keep the loop away."""
        time.sleep(seconds)
