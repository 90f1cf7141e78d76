"""Random stores, loads, evictions, pins, faults and restarts: every byte is what was stored, or it is a miss."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable

import pytest

from asynckv import EngineConfig, PullError
from asynckv.errors import LocalProtocolError
from asynckv.testing import SimDisk
from tests.offloads import RECORD, SIZE, Rank, chain, layout_of

pytestmark = pytest.mark.anyio

BLOCKS = 48
PROMPTS = 12
MOST = 8
"""Blocks of a prompt."""


class Soak:
    """A rank, an allocator that scribbles over what is free, and what every block of every prompt holds."""

    def __init__(self, seed: int, disk: SimDisk, truth: dict[tuple[int, int], bytes]) -> None:
        self.rng = random.Random(seed)
        self.rank = Rank(
            layout_of(num_blocks=BLOCKS),
            seed=seed,
            disk=disk,
            host_bytes=self.rng.choice([12, 24, 40]) * RECORD,
            policy=self.rng.choice(["lru", "s3-fifo"]),
            max_bytes=self.rng.choice([1, 3, 100]) * RECORD,
            max_post_bytes=self.rng.choice([512, RECORD, 1 << 20]),
            write_back_bytes_per_s=self.rng.choice([0, 0, 20 * RECORD]),
            network_=EngineConfig(engine_id="worker-host"),
        )
        self.truth, self.free = truth, list(range(BLOCKS))
        self.loaded = self.missed = self.failed = 0
        self.tasks: set[asyncio.Task[None]] = set()

    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        self.rng.shuffle(self.free)
        return [self.free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        self.rank.scribble(blocks, self.rng.randrange(1 << 30))
        self.free += blocks

    async def store(self, prompt: int, count: int, blocks: list[int], is_cancelled: bool) -> None:
        """A request that has computed a prompt's blocks: its cache is the same whoever computes it."""
        for i, block in enumerate(blocks):
            self.rank.fill(block, self.truth.setdefault((prompt, i), self.rank.block(block)))
        offload = self.rank.offload
        await self.waited(
            f"s{prompt}", offload.store(f"s{prompt}", [(0, blocks)], chain(f"p{prompt}", count)), is_cancelled
        )
        await offload.returned(f"s{prompt}")
        self.give(blocks)

    async def load(self, prompt: int, count: int, blocks: list[int], is_cancelled: bool) -> None:
        offload, name = self.rank.offload, f"l{self.rng.random()}"
        hashes = chain(f"p{prompt}", count)
        call = offload.load(
            name, [(0, blocks)], hashes, num_tokens=count * SIZE, timeout_s=self.rng.choice([0.5, 30.0])
        )
        result = await self.waited(name, call, is_cancelled)
        if result is not None:
            tokens = result.num_tokens  # type: ignore[attr-defined]
            for i in range(tokens // SIZE):
                is_right = self.rank.block(blocks[i]) == self.truth[prompt, i]
                assert is_right, f"block {i} of prompt {prompt} is not what was stored"
            self.loaded += tokens // SIZE
            self.missed += count - tokens // SIZE
        await offload.returned(name)
        self.give(blocks)

    async def waited(self, name: str, call: Awaitable[object], is_cancelled: bool) -> object | None:
        """Wait for a call, which somebody may cancel in the middle."""
        task = asyncio.ensure_future(call)
        if is_cancelled:
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            if self.rng.random() < 0.5:
                task.cancel()
            else:
                self.rank.offload.cancel(name)
        try:
            return await task
        except PullError as exc:
            self.failed += 1
            with contextlib.suppress(asyncio.CancelledError):
                await exc.returned()
        except asyncio.CancelledError:
            self.failed += 1
        return None

    def move(self) -> None:
        """Let something happen on a plane: it goes on, ends, fails, or is in doubt for a while."""
        copies, records, rng = self.rank.copies, self.rank.records, self.rng
        assert records is not None
        if copies.moves and rng.random() < 0.8:
            one = rng.choice(list(copies.moves))
            what = rng.random()
            if what < 0.05:
                copies.fail(one)
            elif what < 0.1:
                copies.doubt(one)
            elif what < 0.5:
                copies.step(one)
            else:
                copies.finish(one)
        if records.moves and rng.random() < 0.8:
            two = rng.choice(list(records.moves))
            what = rng.random()
            if what < 0.05:
                records.fail(two)
            elif what < 0.1:
                records.doubt(two)
            else:
                records.finish(two)
        if rng.random() < 0.02 and records.disk.records:
            records.disk.rot([rng.choice(list(records.disk.records.values()))[0].key])

    def begin(self) -> None:
        """Ask for something."""
        offload, rng = self.rank.offload, self.rng
        prompt, count, what = rng.randrange(PROMPTS), rng.randint(1, MOST), rng.random()
        hashes = chain(f"p{prompt}", count)
        if what < 0.35:
            if (blocks := self.take(count)) is not None:
                self.go(self.store(prompt, count, blocks, rng.random() < 0.1))
        elif what < 0.8:
            count = offload.lookup(chain(f"p{prompt}", MOST)).tokens // SIZE if rng.random() < 0.9 else count
            if count and (blocks := self.take(count)) is not None:
                self.go(self.load(prompt, count, blocks, rng.random() < 0.1))
        elif what < 0.85:
            offload.touch(hashes)
        elif what < 0.9:
            pin = offload.pin(hashes)
            asyncio.get_running_loop().call_later(0, pin.release)
        elif what < 0.93:
            offload.evict(hashes if rng.random() < 0.9 else None)
        elif what < 0.95:
            self.go(self.lend(prompt, count))

    async def lend(self, prompt: int, count: int) -> None:
        with contextlib.suppress(LocalProtocolError, PullError):
            await self.rank.offload.lend("lent", chain(f"p{prompt}", count), num_tokens=count * SIZE, lease_s=2.0)

    def go(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)

    async def run(self, steps: int) -> None:
        copies, records = self.rank.copies, self.rank.records
        assert records is not None
        async with self.rank.running() as offload:
            copies.deferred = records.deferred = True
            for _ in range(steps):
                if self.rng.random() < 0.5:
                    self.begin()
                self.move()
                self.rank.clock.advance(self.rng.choice([0.0, 0.0, 0.01, 0.2]))
                await asyncio.sleep(0)
                for task in [task for task in self.tasks if task.done()]:
                    self.tasks.discard(task)
                    task.result()
                if self.rng.random() < 0.05:
                    offload.check_integrity()
                    self.rank.engine.check_integrity()
            if self.rng.random() < 0.5:
                return  # closed in the middle of everything
            while any(not task.done() for task in self.tasks) or copies.moves or records.moves:
                copies.finish()
                records.finish()
                self.rank.clock.advance(0.05)
                await asyncio.sleep(0)
            for task in self.tasks:
                task.result()
            assert len(self.free) == BLOCKS
            assert not self.rank.engine.holds()
            gauges = offload.statistics().gauges
            assert (gauges["jobs"], gauges["moves"], gauges["moves_in_doubt"]) == (0, 0, 0)


async def soak(seed: int, processes: int, steps: int) -> tuple[int, int, int]:
    """One disk through several processes."""
    rng, disk, truth = random.Random(seed), SimDisk(60 * RECORD), dict[tuple[int, int], bytes]()
    loaded = missed = failed = 0
    for _ in range(processes):
        one = Soak(rng.randrange(1 << 30), disk, truth)
        await one.run(steps)
        for task in one.tasks:
            task.cancel()
        await asyncio.gather(*one.tasks, return_exceptions=True)
        loaded, missed, failed = loaded + one.loaded, missed + one.missed, failed + one.failed
    return loaded, missed, failed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_every_byte_is_what_was_stored(seed: int) -> None:
    loaded, missed, failed = await soak(seed, 3, 400)
    assert loaded > 100, f"{loaded} blocks loaded, {missed} missed, {failed} given up"
