"""One rank of the engines in `tests.lab.tickets`, as a process that imports no more than it needs."""

from __future__ import annotations

import base64
import pickle
from typing import Any, Self

import msgspec

from asynckv import Engine, EngineConfig, EngineDesk, LeaseConfig, PullConfig, configure_logging
from asynckv.tools.bench.memory import Pool
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from tests.lab.arena import BUSY

MODEL, NUM_TOKENS = Model("tickets", (Heads(4, 64),) * 2), 1536
LEASE = LeaseConfig(lease_s=4.0, grant_s=1.0)
PULL = PullConfig(timeout_s=4.0, handshake_s=2.0, gone_s=3.0, drain_s=0.5, follow_s=6.0, release_timeout_s=3.0)


def packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


class Rank:
    """One rank, as a process: an engine with its memory, which takes orders step by step."""

    def __init__(self, *, name: str, tp_rank: int, tp_size: int, block_size: int) -> None:
        configure_logging("error")
        sizes: Any = {"num_blocks": NUM_TOKENS // block_size, "block_size": block_size}
        layout = model_layout(MODEL, tp_rank=tp_rank, tp_size=tp_size, **sizes)
        self._is_prefill = name == "prefill"
        self._pool = Pool(layout, seed=1)
        self._engine = Engine(EngineConfig(engine_id=name, lease=LEASE, pull=PULL), self._pool.registration)

    async def __aenter__(self) -> Self:
        await self._engine.start()
        self._desk = EngineDesk(self._engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()

    def endpoint(self) -> Any:
        return msgspec.to_builtins(self._engine.endpoint)

    def step(self, orders: str, works: list[tuple[str, int, list[int], int, int]]) -> Any:
        """Write or compare blocks of requests, and carry out the orders of the scheduler.

        A prefill engine takes blocks back first, and then overwrites them. A decode engine overwrites blocks that came
        back, and then has them filled again.
        """
        if self._is_prefill:
            self._carry_out(orders)
        found = [self._work(*work) for work in works]
        if not self._is_prefill:
            self._carry_out(orders)
        return packed(self._desk.take_finished()), found

    def _carry_out(self, orders: str) -> None:
        self._desk.submit(unpacked(orders))
        while self._desk._handed:
            self._desk.carry_out()

    def _work(self, what: str, number: int, blocks: list[int], tokens: int, first: int) -> tuple[int, int]:
        lists = [(first, blocks)]
        if what == "check":
            return self._pool.check(number, lists, tokens)
        if what == "poison":
            self._pool.poison(lists)
        else:
            self._pool.fill(number, lists, tokens)
        return 0, 0

    def pieces(self) -> dict[str, int]:
        """Return what has become of pieces."""
        return {name: n for name, n in self._engine.statistics().counters.items() if name.startswith("pieces.")}

    def left(self) -> dict[str, int]:
        """Return what is held, owed or waited for."""
        self._engine.check_integrity()
        follows = len(self._engine._driver.core.decode.follows.by_id)
        gauges = {**self._engine.statistics().gauges, "follows": follows}
        return {name: gauges[name] for name in (*BUSY, "parked", "follows") if gauges[name]}
