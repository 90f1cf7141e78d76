"""A prefill and a decode engine, on simulated planes with a manual clock, or on real NIXL and ZMQ."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

import anyio
import msgspec
import numpy as np
import numpy.typing as npt

from asynckv import Engine, EngineConfig, NixlConfig, PrefillRanks, Registration
from asynckv.embed import EngineDesk, Finished
from asynckv.engine import LentRequest
from asynckv.geometry.layout import Memory, TokenShard
from asynckv.layout import register_memory
from asynckv.results import PullResult
from asynckv.testing import ManualClock, SimControl, SimData, SimNetwork
from tests.lab.oracles import wrong_in
from tests.world import make_layout

BLOCKS = 32
T = TypeVar("T")


class Polled(Generic[T]):
    """What something has told, and a wait for more of it. Whoever adds to it sets `changed`."""

    def __init__(self) -> None:
        self.news: list[T] = []
        self.changed = asyncio.Event()

    async def until(self, holds: Callable[[], object]) -> None:
        with anyio.fail_after(20):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def heard(self, count: int = 1) -> list[T]:
        """Wait for so many news, and take them."""
        await self.until(lambda: len(self.news) >= count)
        news, self.news = self.news[:count], self.news[count:]
        return news


class Side:
    """An engine with its memory."""

    def __init__(self, engine: Engine, arrays: list[npt.NDArray[np.uint8]], data: SimData | None) -> None:
        self.engine, self.arrays, self._data = engine, arrays, data

    @property
    def data(self) -> SimData:
        assert self._data is not None
        return self._data

    def blocks(self, ids: list[int]) -> bytes:
        # kv, block, ... : the block is the second dim
        return b"".join(a.reshape(2, BLOCKS, -1)[:, ids].tobytes() for a in self.arrays)

    def lent(
        self, group: PrefillRanks, request_id: str, ids: list[int], num_tokens: int = 0, **options: Any
    ) -> tuple[dict[str, Any], LentRequest]:
        """Lend full blocks, or `num_tokens` in them."""
        params = group.make_params(request_id, [(0, ids)], num_tokens or 16 * len(ids), **options)
        return params, self.engine.lend(params)


def memory(
    seed: int, tp_rank: int = 0, tp_size: int = 1, head_dim: int = 32, dcp: int = 1
) -> tuple[Registration, list[npt.NDArray[np.uint8]]]:
    """Return a rank's memory; of `dcp` ranks that share the tokens of a block, each holds 16, by 4."""
    layout = make_layout(tp_rank, tp_size, num_blocks=BLOCKS, block_size=16, head_dim=head_dim)
    if dcp > 1:
        groups = (msgspec.structs.replace(layout.groups[0], block_size=16 * dcp),)
        shards = (TokenShard(0, dcp, tp_rank % dcp, 4),)
        layout = msgspec.structs.replace(layout, schema=2, groups=groups, token_shards=shards)
    arrays = [
        np.random.default_rng(seed + i).integers(0, 256, m.length, np.uint8) for i, m in enumerate(layout.memories)
    ]
    layout = msgspec.structs.replace(layout, memories=tuple(Memory(a.ctypes.data, a.nbytes) for a in arrays))
    return register_memory(layout, tuple(arrays)), arrays


class Bench:
    """A prefill and a decode engine, on planes of one kind."""

    def __init__(self, real: bool) -> None:
        self.real = real
        self.network = SimNetwork()
        self.clock = ManualClock()

    def side(self, engine_id: str, seed: int, **config: Any) -> Side:
        registration, arrays = memory(seed)
        if self.real:
            # What is read here is posted on the loop: agents of posting threads would only be made and closed.
            config = {"nixl": NixlConfig(posting_threads=0), **config}
        settings = EngineConfig(engine_id=engine_id, **config)
        if self.real:
            return Side(Engine(settings, registration), arrays, None)
        data = SimData(self.network, f"{engine_id}-{seed}")
        engine = Engine(settings, registration, data=data, control=SimControl(self.network), clock=self.clock)
        return Side(engine, arrays, data)

    @contextlib.asynccontextmanager
    async def pair(self, **config: Any) -> AsyncIterator[tuple[Side, Side, PrefillRanks]]:
        prefill, decode = self.side("prefill", 1, **config), self.side("decode", 100, **config)
        async with prefill.engine, decode.engine:
            try:
                yield prefill, decode, PrefillRanks("prefill", [prefill.engine.endpoint])
                for side in (prefill, decode):
                    side.engine.check_integrity()
                    assert wrong_in(side.engine._driver.core.decode) == []
            finally:
                closing = [asyncio.create_task(side.engine.aclose()) for side in (decode, prefill)]
                while not self.real and not all(task.done() for task in closing):
                    # Promises run out only as time passes.
                    await asyncio.sleep(0)
                    self.clock.advance(0.01)
                await asyncio.gather(*closing)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something holds."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def turn_loop(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


class Timed(Protocol):
    clock: ManualClock


async def pass_until(bench: Timed, condition: Callable[[], object], step: float = 0.02) -> None:
    """Let time pass until something holds."""
    with anyio.fail_after(20):
        while not condition():
            bench.clock.advance(step)
            await asyncio.sleep(0)


async def passing(bench: Timed, task: asyncio.Future[T], step: float = 0.02) -> T:
    """Let time pass until a task is done."""
    await pass_until(bench, task.done, step)
    return await task


async def pass_by(bench: Timed, seconds: float, step: float = 0.05) -> None:
    """Let time pass, with some turns of the loop for each bit."""
    for _ in range(round(seconds / step)):
        await turn_loop(4)
        bench.clock.advance(step)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and see it end by that."""
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert task.cancelled()


async def news_of(desk: EngineDesk) -> Finished:
    """Wait until a desk has something to tell, and take it."""
    await until(lambda: desk.has_news)
    return desk.take_finished()


def open_files() -> set[str]:
    """Return all descriptors and what each is of; not their number, because others' may be closed meanwhile."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


async def reading(
    prefill: Side, decode: Side, group: PrefillRanks, **options: Any
) -> tuple[LentRequest, asyncio.Task[PullResult], SimData]:
    """Lend block 1, and pull it into block 6 by a read that ends only when it is told to."""
    data = decode.data
    data.deferred = True
    params = group.make_params("r", [(0, [1])], 16, written=True)
    lent = prefill.engine.lend(params)
    task = asyncio.create_task(decode.engine.pull("d", [(0, [6])], params, **options))
    await until(lambda: data.running)
    return lent, task, data
