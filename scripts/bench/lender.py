"""What benchmarks of pulls between two processes share: the process that lends, measurements by turns, the report."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Hashable
from json import dumps
from typing import Any, Self, TypeVar

import msgspec

from asynckv import Engine, EngineConfig, LeaseConfig, LogConfig
from asynckv.config import PullConfig
from asynckv.tools.bench.processes import Failure
from scripts import command

Kind = TypeVar("Kind", bound=Hashable)


def quiet(engine_id: str, **pull: Any) -> EngineConfig:
    """Return the configuration of an engine that logs no success, and whose leases last."""
    return EngineConfig(
        engine_id=engine_id,
        lease=LeaseConfig(lease_s=600.0),
        log=LogConfig(successes_per_s=0.0, slow_per_s=0.0, held_fraction=0.0),
        pull=PullConfig(**pull),
    )


class Lender:
    """An engine that lends, in a process of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.aclose()

    def endpoint(self) -> Any:
        return msgspec.to_builtins(self.engine.endpoint)

    def lend(self, every: list[dict[str, Any]]) -> None:
        for params in every:
            self.engine.lend(params)


async def by_turns(
    kinds: tuple[Kind, Kind], rounds: int, requests: int, measure: Callable[[Kind, str], Awaitable[float]]
) -> tuple[list[float], list[float], list[float]]:
    """Return the medians of each round in microseconds, of both kinds, and the ratios of the second to the first."""
    p50: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        seconds: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        for i in range(requests):
            for kind in kinds if i % 2 else kinds[::-1]:
                seconds[kind].append(await measure(kind, f"{number}.{i}"))
        for kind, every in seconds.items() if number else ():  # the first round makes connections
            p50[kind].append(round(1e6 * statistics.median(every), 1))
    plain, other = p50.values()
    return plain, other, [round(b / a, 3) for a, b in zip(plain, other, strict=True)]


def tell(name: str, json: str, measure: Callable[[], dict[str, Any]]) -> int:
    """Measure, write what was found, and return the exit status: 1 if the owner's process was lost."""
    with command.output(json) as out:
        try:
            found = measure()
        except (Failure, TimeoutError) as exc:
            print(f"{name}: the owner's process was lost: {exc!r}", file=sys.stderr)
            return 1
        print(dumps(found), file=out)
    return 0
