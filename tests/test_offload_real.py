"""An offload on real NIXL and real files: beside an engine's thread, over restarts, and under everything at once."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from asynckv import EngineConfig, EngineThread, Load, Offload, OffloadConfig, Store, register_memory
from asynckv.embed import Cancel, Finished
from asynckv.errors import LocalProtocolError, PullCancelled
from tests.offloads import RECORD, SIZE, Rank, chain, layout_of

pytestmark = [pytest.mark.nixl, pytest.mark.anyio]

GIVE_UP_S = 20.0


def finished(thread: EngineThread, *kinds: str) -> Finished:
    """Take what has ended until there is something of each kind."""
    found, until = Finished(), time.monotonic() + GIVE_UP_S
    while not all(getattr(found, kind) for kind in kinds):
        assert thread.wait(max(until - time.monotonic(), 0.0)), f"no {kinds} within {GIVE_UP_S:g} s: {found}"
        news = thread.take_finished()
        for name in Finished.__slots__:
            getattr(found, name).extend(getattr(news, name))
    return found


@pytest.mark.slow
def test_a_step_stores_and_loads_by_orders() -> None:
    rank = Rank(layout_of(), real=True)
    registration = register_memory(rank.layout, tuple(rank.arrays))
    with EngineThread(EngineConfig(engine_id="worker"), registration) as thread:
        thread.submit([Store(request_id="x", groups=[(0, [1])], hashes=chain("p", 1))])
        (refused,) = finished(thread, "refused").refused
        assert isinstance(refused.error, LocalProtocolError)
        assert "has no offload" in str(refused.error)
        offload = Offload(OffloadConfig(model="toy", hash_tokens=SIZE, host_bytes=64 * RECORD), thread.engine)
        thread.call(offload.start(), GIVE_UP_S)
        before = rank.block(3, 4, 9)
        thread.submit([Store(request_id="a", groups=[(0, [3, 4, 9])], hashes=chain("p", 3))])
        (stored,) = finished(thread, "stored").stored
        assert (stored.request_id, stored.num_blocks) == ("a", 3)
        rank.scribble([3, 4, 9])
        thread.submit(
            [
                Load(request_id="b", groups=[(0, [7, 5, 6])], hashes=chain("p", 3), num_tokens=48),
                Load(request_id="c", groups=[(0, [99])], hashes=chain("p", 1), num_tokens=SIZE),
                Load(request_id="d", groups=[(0, [9])], hashes=chain("p", 1), num_tokens=SIZE),
                Cancel("d"),
            ]
        )
        told = finished(thread, "loaded", "failed")
        while len(told.loaded) + len(told.failed) < 3:
            more = finished(thread)
            told.loaded += more.loaded
            told.failed += more.failed
        assert [x.num_tokens for x in told.loaded if x.request_id == "b"] == [48]
        assert "block id 99" in str(next(x.error for x in told.failed if x.request_id == "c"))
        assert all(isinstance(x.error, PullCancelled) for x in told.failed if x.request_id == "d")
        assert rank.block(7, 5, 6) == before


@pytest.mark.slow
async def test_a_thousand_blocks_are_stored_without_keeping_the_loop() -> None:
    """The longest turn of the loop, while a thousand blocks are stored and loaded; the bound is a slow machine's."""
    count, layers = 1000, 32
    rank = Rank(layout_of(num_blocks=count, layers=layers), real=True, host_bytes=count * 16 * RECORD * 2)
    async with rank.engine, rank.offload as offload:
        turns: list[float] = []

        def turn(since: float) -> None:
            now = time.perf_counter()
            turns.append(now - since)
            asyncio.get_running_loop().call_soon(turn, now)

        ids = list(range(count))
        random.Random(5).shuffle(ids)
        turn(time.perf_counter())
        stored = await offload.store("a", [(0, ids)], chain("p", count))
        in_store, before = max(turns), rank.block(*ids)
        rank.scribble(range(count))
        turns.clear()
        loaded = await offload.load("b", [(0, ids)], chain("p", count), num_tokens=count * SIZE)
        assert (stored.num_new, loaded.num_tokens) == (count, count * SIZE)
        assert rank.block(*ids) == before
        print(f"longest turn: store {in_store * 1e3:.1f} ms, load {max(turns[1:]) * 1e3:.1f} ms; {stored}; {loaded}")
        assert in_store < 0.1
        assert max(turns[1:]) < 0.1
