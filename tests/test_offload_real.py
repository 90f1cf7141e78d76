"""An offload on real NIXL and real files: beside an engine's thread, over restarts, and under everything at once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynckv import EngineConfig, EngineThread, Load, Offload, OffloadConfig, Store, register_memory
from asynckv.embed import Cancel, Finished
from asynckv.errors import LocalProtocolError, PullCancelled
from tests.offloads import BLOCKS, RECORD, SIZE, Rank, chain, layout_of

pytestmark = [pytest.mark.nixl, pytest.mark.anyio]

GIVE_UP_S = 20.0
MOST_S = 0.05
"""Several times what was measured."""


async def written_back(offload: Offload, count: int) -> None:
    """Wait until so many blocks are in files."""
    with anyio.fail_after(GIVE_UP_S):
        while offload.statistics().counters["write_back_blocks"] < count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)


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
    """The longest turn of the loop, in time of its own, while a thousand blocks are stored and loaded."""
    count, layers = 1000, 32
    rank = Rank(layout_of(num_blocks=count, layers=layers), real=True, host_bytes=count * 16 * RECORD * 2)
    async with rank.engine, rank.offload as offload:
        turns: list[float] = []

        def turn(since: float) -> None:
            now = time.thread_time()
            turns.append(now - since)
            asyncio.get_running_loop().call_soon(turn, now)

        ids = list(range(count))
        random.Random(5).shuffle(ids)
        turn(time.thread_time())
        stored = await offload.store("a", [(0, ids)], chain("p", count))
        in_store, before = max(turns), rank.block(*ids)
        rank.scribble(range(count))
        turns.clear()
        loaded = await offload.load("b", [(0, ids)], chain("p", count), num_tokens=count * SIZE)
        assert (stored.num_new, loaded.num_tokens) == (count, count * SIZE)
        assert rank.block(*ids) == before
        assert (in_store, max(turns[1:])) < (MOST_S, MOST_S)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64])
async def test_two_ranks_leave_files_that_one_rank_loads(tmp_path: Path, size: int) -> None:
    files: dict[str, Any] = {"directory": tmp_path, "file_bytes": 64 * RECORD}
    whole = Rank(layout_of(), seed=3, real=True)  # what the two ranks have, each its heads of it
    heads = [array.reshape(2, BLOCKS, SIZE, 4, 16) for array in whole.arrays]
    for tp_rank in range(2):
        rank = Rank(layout_of(tp_rank, 2), real=True, **files)
        for array, of in zip(rank.arrays, heads, strict=True):
            array.reshape(2, BLOCKS, SIZE, 2, 16)[:] = of[:, :, :, 2 * tp_rank : 2 * tp_rank + 2]
        async with rank.engine, rank.offload as offload:
            await offload.store("a", [(0, list(range(1, 9)))], chain("p", 8))
            await written_back(offload, 8)
    one = Rank(layout_of(num_blocks=16, block_size=size), seed=4, real=True, host_bytes=1 << 20, **files)
    blocks = list(range(15, 15 - 128 // size, -1))
    async with one.engine, one.offload as offload:
        found = offload.lookup(chain("p", 9))
        assert (found.tokens, found.ready_tokens) == (128, 0)
        loaded = await offload.load("b", [(0, blocks)], chain("p", 8), num_tokens=128)
        assert loaded.num_tokens == 128
        for array, of in zip(one.arrays, heads, strict=True):
            got = array.reshape(2, 16, size, 4, 16)[:, blocks].reshape(2, 8, SIZE, 4, 16)
            assert (got == of[:, 1:9]).all()
        await offload.store("b", [(0, blocks)], chain("p", 8))  # from now on it is this rank's own
        await written_back(offload, 128 // size)
    again = Rank(layout_of(num_blocks=16, block_size=size), seed=5, real=True, host_bytes=1 << 20, **files)
    async with again.engine, again.offload as offload:
        assert offload._catalogue.lookup(chain("p", 8)).tokens == 128
        await offload.load("c", [(0, blocks)], chain("p", 8), num_tokens=128)
        assert again.block(*blocks) == one.block(*blocks)
