"""One process of asynckv on the workload of `scripts.bench.versus.workload`, run by `scripts.bench.vs_vllm`."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import Any

from asynckv import Engine, EngineConfig, PrefillRanks
from asynckv.config import LeaseConfig
from asynckv.errors import AsyncKVError
from asynckv.layout import register_memory
from asynckv.tools.plan.layouts import model_layout, with_addresses
from asynckv.tools.plan.models import Heads, Model
from scripts.bench.lender import Lender
from scripts.bench.versus.workload import (
    BLOCK_TOKENS,
    SERVE_S,
    Checks,
    Memory,
    Setup,
    Window,
    board,
    lend_ahead,
    minor_faults,
    numbers,
    sources,
)


class Side(Lender):
    """An engine, its memory, and params that each process makes for itself.

    A router would carry the params. Here both sides make the same ones from one seed, before the clock runs.
    """

    def __init__(self, **fields: Any) -> None:
        setup = Setup(**fields)
        self.setup, self.memory, self.board = setup, Memory(setup), board(setup.folder)
        heads, size = setup.heads
        model = Model("versus", (Heads(heads, size),) * setup.layers, dtype="float16")
        layout = model_layout(model, block_size=BLOCK_TOKENS, num_blocks=setup.num_blocks, order="block-hnd")
        layout = with_addresses(layout, [array.ctypes.data for array in self.memory.arrays])
        config = EngineConfig(engine_id=setup.role, lease=LeaseConfig(lease_s=600.0))
        super().__init__(Engine(config, register_memory(layout, (self.memory,))))
        self._group: PrefillRanks | None = None
        self._remote_blocks = 0

    def ready(self) -> dict[str, Any]:
        """Return a description of this process, with its endpoint."""
        if self.setup.role == "producer":
            self.memory.fill()
        return {"versions": self.engine.describe(), "num_blocks": self.setup.num_blocks, "endpoint": self.endpoint()}

    def meet(self, peer: dict[str, Any]) -> None:
        """Take the prefill rank's endpoint, from which params are made."""
        self._remote_blocks = peer["num_blocks"]
        source = random.Random(self.setup.seed)
        self._group = PrefillRanks(
            "producer",
            [peer["endpoint"]],
            lease=LeaseConfig(lease_s=600.0),
            token_hex=lambda size: source.randbytes(size).hex(),
        )

    async def window(self, **fields: Any) -> dict[str, Any]:
        """Lend a window's requests, or pull them."""
        window = Window(**fields)
        return await (self._serve(window) if self.setup.role == "producer" else self._pull(window))

    def params(self, window: Window, remote_blocks: int) -> dict[int, dict[str, Any]]:
        """Return the params of all requests of a window, which are the same in both processes."""
        assert self._group is not None
        lists = sources(self.setup.seed, remote_blocks, window.blocks)
        tokens = window.blocks * BLOCK_TOKENS
        return {
            i: self._group.make_params(f"p-{i}", [(0, lists[i % len(lists)])], tokens, written=True)
            for i in numbers(window)
        }

    async def _serve(self, window: Window) -> dict[str, Any]:
        """Lend ahead of the reader until all requests were released (prefill)."""
        params = self.params(window, self.setup.num_blocks)
        lent: deque[Any] = deque()
        cpu, faults, left = time.process_time(), minor_faults(), window.requests
        try:
            async with asyncio.timeout(SERVE_S):
                for i, each in params.items():
                    if len(lent) >= lend_ahead(window):
                        await lent.popleft().wait_released()
                        left -= 1
                    lent.append(self.engine.lend(each))
                    self.board.value = i + 1
                while lent:
                    left -= (await lent.popleft().wait_released()).cause == "released"
        except TimeoutError:
            pass
        return {"left": left, "cpu_s": time.process_time() - cpu, "faults": minor_faults() - faults}

    async def _pull(self, window: Window) -> dict[str, Any]:
        """Pull in a closed loop of steps (decode)."""
        pulls = _Pulls(self, window, self._remote_blocks)
        await pulls.by_steps(window.step_ms / 1e3)
        return pulls.checks.result()


class _Pulls:
    """One window on the decode side."""

    def __init__(self, side: Side, window: Window, remote_blocks: int) -> None:
        self._engine, self._board, self._window = side.engine, side.board, window
        self._params = side.params(window, remote_blocks)
        self._todo = deque(numbers(window))
        self._done: list[tuple[int, list[int], float]] = []
        self.checks = Checks(side.memory, window, remote_blocks)

    async def by_steps(self, step_s: float) -> None:
        """Submit when a step begins and collect when it ends; the engine's loop runs by itself in between."""
        checks = self.checks
        tasks: set[asyncio.Task[None]] = set()
        while self._todo or tasks:
            began = time.perf_counter()
            while checks.free and self._todo and self._todo[0] < self._board.value:
                number, local = self._todo.popleft(), checks.free.popleft()
                task = asyncio.create_task(self._pull(number, local, time.perf_counter()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(step_s)
            now = time.perf_counter()
            checks.steps.append(now - began)
            done, self._done = self._done, []
            for number, local, since in done:
                checks.done(number, local, now - since)

    async def _pull(self, number: int, local: list[int], since: float) -> None:
        try:
            await self._engine.pull(f"d-{number}", [(0, local)], self._params[number])
        except AsyncKVError:
            self.checks.failed += 1
        self._done.append((number, local, since))
