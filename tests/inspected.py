"""Engines in processes of their own, to be inspected from outside."""

from __future__ import annotations

from typing import Any, Self

from asynckv import AsyncKVError, InspectConfig, LeaseConfig, LogConfig, NixlConfig, PrefillRanks
from tests.engines import Bench


class Side:
    """One rank, and what its driver may ask for."""

    def __init__(
        self, *, name: str, directory: str, lease_s: float = 120.0, grant_s: float = 10.0, has_log: bool = False
    ) -> None:
        self._lease = LeaseConfig(lease_s=lease_s, grant_s=grant_s)
        side = Bench(True).side(
            name,
            1,
            inspect=InspectConfig(directory=directory),
            lease=self._lease,
            log=LogConfig(file=f"{directory}/{name}-{{pid}}.jsonl") if has_log else LogConfig(),
            nixl=NixlConfig(posting_threads=0, process="never"),
        )
        self.engine = side.engine

    async def __aenter__(self) -> Self:
        await self.engine.start()
        self._group = PrefillRanks(self.engine.config.engine_id, [self.engine.endpoint], lease=self._lease)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.aclose(timeout_s=0)

    def address(self) -> str:
        """Tell where the engine listens."""
        return self.engine.endpoint.address

    def lend(self, number: int, first: int = 0) -> list[dict[str, Any]]:
        """Lend so many requests of a block each."""
        params = [self._group.make_params(f"cmpl-{n}", [(0, [n % 32])], 16) for n in range(first, first + number)]
        for each in params:
            self.engine.lend(each)
        return params

    def announce(self, number: int, params: dict[str, Any]) -> None:
        """Announce a request and never pull it."""
        self.engine.announce(f"req-{number}", params)

    async def pull(self, number: int, params: dict[str, Any], block: int = 0) -> str:
        """Pull a request, and tell what came of it."""
        try:
            await self.engine.pull(f"req-{number}", [(0, [block])], params, timeout_s=2.0)
        except AsyncKVError as exc:
            return type(exc).__name__
        return "complete"

    def states(self) -> list[str]:
        """Tell what has become of everything that is read of others, or lent to them."""
        return [rank.state for request in self.engine.requests() for rank in request.ranks]
