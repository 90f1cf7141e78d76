"""An offload on real NIXL and real files: beside an engine's thread, over restarts, and under everything at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynckv import EngineConfig, EngineThread
from asynckv.embed import Cancel, Finished
from asynckv.errors import LocalProtocolError, PullCancelled
from asynckv.layout import register_memory
from asynckv.offload import Load, Lookup, Offload, OffloadConfig, Store
from asynckv.results import Loaded
from tests.lab.offload_audit import check as check_offload
from tests.offloads import BLOCKS, RECORD, SIZE, Rank, chain, layout_of

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

GIVE_UP_S = 20.0
MOST_S = 0.05
"""Several times what was measured."""


async def written_back(offload: Offload, count: int) -> None:
    """Wait until so many blocks are in files."""
    with anyio.fail_after(GIVE_UP_S):
        while offload.statistics().counters["blocks.write_back"] < count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)


def finished(thread: EngineThread, number: int) -> Finished:
    """Take what has ended until that are so many things."""
    found, until = Finished(), time.monotonic() + GIVE_UP_S
    while sum(len(getattr(found, name)) for name in Finished.__slots__) < number:
        assert thread.wait(max(until - time.monotonic(), 0.0)), f"not {number} within {GIVE_UP_S:g} s: {found}"
        news = thread.take_finished()
        for name in Finished.__slots__:
            getattr(found, name).extend(getattr(news, name))
    return found


def test_a_step_stores_and_loads_by_orders() -> None:
    rank = Rank(layout_of(), real=True)
    registration = register_memory(rank.layout, tuple(rank.arrays))
    with EngineThread(EngineConfig(engine_id="worker"), registration) as thread:
        thread.submit([Store(request_id="x", groups=[(0, [1])], hashes=chain("p", 1))])
        (failed,) = finished(thread, 1).offload_failed
        assert isinstance(failed.error, LocalProtocolError)
        assert "has no offload" in str(failed.error)
        offload = Offload(OffloadConfig(model="toy", hash_tokens=SIZE, host_bytes=64 * RECORD), thread.engine)
        thread.call(offload.start(), GIVE_UP_S)
        before = rank.block(3, 4, 9)
        thread.submit([Store(request_id="a", groups=[(0, [3, 4, 9])], hashes=chain("p", 3))])
        (stored,) = finished(thread, 1).stored
        thread.submit([Lookup(request_id="b", hashes=chain("p", 4))])
        ((request_id, found),) = finished(thread, 1).found
        assert (request_id, found.tokens) == ("b", 48)
        assert (stored.request_id, stored.num_blocks) == ("a", 3)
        assert thread.engine.observation.ask(lambda: offload.lookup(chain("p", 4), 47), 1.0).tokens == 32
        rank.scribble([3, 4, 9])
        thread.submit(
            [
                Load(request_id="b", groups=[(0, [7, 5, 6])], hashes=chain("p", 3), num_tokens=48),
                Load(request_id="c", groups=[(0, [99])], hashes=chain("p", 1), num_tokens=SIZE),
                Load(request_id="d", groups=[(0, [9])], hashes=chain("p", 1), num_tokens=SIZE),
                Cancel("d"),
            ]
        )
        told = finished(thread, 3)
        assert [x.num_tokens for x in told.loaded if x.request_id == "b"] == [48]
        assert "block id 99" in str(next(x.error for x in told.offload_failed if x.request_id == "c"))
        assert all(isinstance(x.error, PullCancelled) for x in told.offload_failed if x.request_id == "d")
        assert rank.block(7, 5, 6) == before


async def test_a_thousand_blocks_are_stored_without_keeping_the_loop() -> None:
    """The longest turn of the loop, in time of its own, while a thousand blocks are stored and loaded."""
    count, layers = 1000, 32
    rank = Rank(layout_of(num_blocks=count, layers=layers), real=True, host_bytes=count * 16 * RECORD * 2)
    async with rank.engine, rank.offload as offload:
        gc.collect()  # or a turn may be that in which Python collects what other tests have left behind
        gc.freeze()
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


async def test_a_rank_that_changed_its_memory_order_loads_what_it_left(tmp_path: Path) -> None:
    """Its loads are staged, and the right bytes are in the right places."""
    files: dict[str, Any] = {"directory": tmp_path, "file_bytes": 64 * RECORD}
    before = Rank(layout_of(), seed=3, real=True, **files)
    async with before.engine, before.offload as offload:
        await offload.store("a", [(0, list(range(1, 9)))], chain("p", 8))
        await written_back(offload, 8)
    order = ("kv", "block", "head", "token", "dim")
    after = Rank(layout_of(order=order), seed=4, real=True, **files)
    expected, blocks = [array.copy() for array in after.arrays], list(range(20, 28))
    for to, of in zip(expected, before.arrays, strict=True):
        turned = of.reshape(2, BLOCKS, SIZE, 4, 16)[:, 1:9].transpose(0, 1, 3, 2, 4)
        to.reshape(2, BLOCKS, 4, SIZE, 16)[:, blocks] = turned
    async with after.engine, after.offload as offload:
        (copying,) = offload._tiers.others.values()
        assert all(table.boxes for table in copying._tables.regular)
        loaded = await offload.load("b", [(0, blocks)], chain("p", 8), num_tokens=128)
        assert loaded.num_tokens == 128
        assert all(map(np.array_equal, after.arrays, expected))


@pytest.mark.parametrize("is_live", [True, False])
async def test_what_two_ranks_have_stored_four_load_at_once(tmp_path: Path, is_live: bool) -> None:
    """Two read one directory, whose owner may live on, and goes on storing."""
    files: dict[str, Any] = {"directory": tmp_path, "file_bytes": 64 * RECORD}
    whole = Rank(layout_of(), seed=3, real=True)
    heads = [array.reshape(2, BLOCKS, SIZE, 4, 16) for array in whole.arrays]
    async with contextlib.AsyncExitStack() as owners:
        for tp_rank in range(2):
            rank = Rank(layout_of(tp_rank, 2), real=True, engine={"engine_id": f"two-{tp_rank}"}, **files)
            for array, of in zip(rank.arrays, heads, strict=True):
                array.reshape(2, BLOCKS, SIZE, 2, 16)[:] = of[:, :, :, 2 * tp_rank : 2 * tp_rank + 2]
            await owners.enter_async_context(rank.engine)
            await owners.enter_async_context(rank.offload)
            await rank.offload.store("a", [(0, list(range(1, 9)))], chain("p", 8))
            await written_back(rank.offload, 8)
        if not is_live:
            await owners.aclose()
        four = [
            Rank(layout_of(r, 4), seed=10 + r, real=True, engine={"engine_id": f"four-{r}"}, **files) for r in range(4)
        ]
        async with contextlib.AsyncExitStack() as stack:
            for rank in four:
                await stack.enter_async_context(rank.engine)
            async with anyio.create_task_group() as tasks:
                for rank in four:
                    tasks.start_soon(stack.enter_async_context, rank.offload)
            assert [rank.offload.lookup(chain("p", 9)).tokens for rank in four] == [128] * 4
            blocks = list(range(20, 28))
            async with anyio.create_task_group() as tasks:
                for rank in four:
                    load = rank.offload.load("b", [(0, blocks)], chain("p", 8), num_tokens=128)
                    tasks.start_soon(_expect_tokens, load, 128)
            for tp_rank, rank in enumerate(four):
                for array, of in zip(rank.arrays, heads, strict=True):
                    got = array.reshape(2, BLOCKS, SIZE, 1, 16)[:, blocks]
                    assert (got == of[:, 1:9, :, tp_rank : tp_rank + 1]).all()


async def _expect_tokens(load: Awaitable[Loaded], count: int) -> None:
    assert (await load).num_tokens == count


class Requests:
    """Random requests on one process' tiers, and what every block of every prompt holds."""

    def __init__(self, rng: random.Random, truth: dict[tuple[int, int], bytes], rank: Rank) -> None:
        self.rng, self.truth, self.rank, self.free = rng, truth, rank, list(range(64))
        self.loaded = self.from_files = 0

    async def request(self, number: int) -> None:
        """Load what is kept of a prompt, perhaps given up in the middle; then compute it, and store it."""
        rng, rank, offload, prompt, count = self.rng, self.rank, self.rank.offload, self.rng.randrange(9), 8
        blocks = [self.free.pop(rng.randrange(len(self.free))) for _ in range(count)]
        hashes, groups = chain(f"p{prompt}", count), [(0, blocks)]
        found = offload.lookup(hashes)
        if found.tokens:
            call = offload.load(f"l{number}", groups, hashes, num_tokens=found.tokens, timeout_s=GIVE_UP_S)
            load = asyncio.create_task(call)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.002)
                load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                result = await load
                for i in range(result.num_tokens // SIZE):
                    is_right = rank.block(blocks[i]) == self.truth[prompt, i]
                    assert is_right, f"block {i} of prompt {prompt} is not what was stored"
                self.loaded += result.num_blocks
                self.from_files += result.file_bytes > 0
            await offload.returned(f"l{number}")
        rank.scribble(blocks, number)
        for i, block in enumerate(blocks):
            rank.fill(block, self.truth.setdefault((prompt, i), rank.block(block)))
        await offload.store(f"s{number}", groups, hashes)
        rank.scribble(blocks, number + 1)
        if rng.random() < 0.05:
            offload.evict(hashes)
        self.free.extend(blocks)


async def test_random_requests_on_real_tiers_are_right_to_the_byte(tmp_path: Path) -> None:
    """Stores, loads, evictions and cancellations at once, over restarts; the host tier holds a third of it all."""
    rng, truth = random.Random(11), dict[tuple[int, int], bytes]()
    loaded = from_files = 0
    for _ in range(3):
        config: dict[str, Any] = {"directory": tmp_path, "file_bytes": 60 * RECORD, "max_post_bytes": 4096}
        rank = Rank(layout_of(num_blocks=64), seed=rng.randrange(1 << 20), real=True, host_bytes=24 * RECORD, **config)
        requests = Requests(rng, truth, rank)
        async with rank.engine, rank.offload as offload:
            with anyio.fail_after(2 * GIVE_UP_S):
                for at in range(0, 120, 6):
                    async with anyio.create_task_group() as tasks:
                        for number in range(at, at + 6):
                            tasks.start_soon(requests.request, number)
                    check_offload(offload)
            assert not rank.engine.holds()
            rank.engine.check_integrity()
        loaded, from_files = loaded + requests.loaded, from_files + requests.from_files
    assert loaded > 500
    assert from_files > 0


async def test_stored_blocks_are_pulled_over_the_network(tmp_path: Path) -> None:
    files: dict[str, Any] = {"directory": tmp_path, "file_bytes": 64 * RECORD}
    rank = Rank(layout_of(), real=True, network_=EngineConfig(engine_id="worker-host"), **files)
    decode = Rank(layout_of(num_blocks=8, block_size=32), seed=50, real=True, engine={"engine_id": "decode"})
    async with rank.engine, rank.offload as offload, decode.engine:
        await offload.store("a", [(0, [3, 4, 9, 11])], chain("p", 4))
        params = await offload.lend("a", chain("p", 4), num_tokens=64)
        rank.scribble(range(32))
        result = await decode.engine.pull("d", [(0, [5, 2])], params, hashes=chain("p", 4))
        assert result.num_tokens == 64
        await offload.load("b", [(0, [0, 1, 2, 3])], chain("p", 4), num_tokens=64)
        assert sorted(decode.block(5, 2)) == sorted(rank.block(0, 1, 2, 3))
        with anyio.fail_after(GIVE_UP_S):
            while offload.statistics().gauges["pins"]:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)
