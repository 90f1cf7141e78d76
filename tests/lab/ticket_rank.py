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

MODEL, NUM_BLOCKS, BLOCK = Model("tickets", (Heads(4, 64),) * 2), 96, 16
LEASE = LeaseConfig(lease_s=4.0, grant_s=1.0)
PULL = PullConfig(timeout_s=4.0, handshake_s=2.0, gone_s=3.0, drain_s=0.5, follow_s=6.0, release_timeout_s=3.0)


def packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


class Rank:
    """One rank, as a process: an engine with its memory, which takes orders step by step."""

    def __init__(self, *, name: str, tp_rank: int, tp_size: int) -> None:
        configure_logging("error")
        layout = model_layout(MODEL, tp_rank=tp_rank, tp_size=tp_size, num_blocks=NUM_BLOCKS, block_size=BLOCK)
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

    def step(self, orders: str, works: list[tuple[str, int, list[int], int]]) -> Any:
        """Write or compare blocks of requests, and hand over the orders of the scheduler."""
        found = []
        for what, number, blocks, tokens in works:
            lists, each = [(0, blocks)], (0, 0)
            if what == "poison":
                self._pool.poison(lists)
            elif what == "fill":
                self._pool.fill(number, lists, tokens)
            else:
                each = self._pool.check(number, lists, tokens)
            found.append(each)
        self._desk.submit(unpacked(orders))
        return packed(self._desk.take_finished()), found

    def left(self) -> dict[str, int]:
        """Return what is held, owed or waited for."""
        self._engine.check_integrity()
        follows = len(self._engine._driver.core.decode.follows.by_id)
        gauges = {**self._engine.statistics().gauges, "follows": follows}
        return {name: gauges[name] for name in (*BUSY, "parked", "follows") if gauges[name]}
