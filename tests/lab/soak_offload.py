"""Random engines that offload, on real NIXL and real files: `python -m tests.lab.soak_offload --help`.

Each seed stands for a model (groups of attention, latents, scales, windows, states) and for several engines after each
other in one directory, each with block sizes, orders of memory and a parallel size of its own. Their ranks store, load,
evict and cancel at once; blocks that are given back are overwritten at once, and every byte that a load says to be in
place, or that a tier has, is compared with what the prompt says. What is loaded is stored as it is, and only the rest
is computed. What an engine has left in files is asked for by the next.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import anyio
import typer

from asynckv import Engine, EngineConfig
from asynckv.errors import PullError
from asynckv.geometry.packed import record_form, record_sizes
from asynckv.layout import register_memory
from asynckv.offload import Offload, OffloadConfig
from asynckv.offload.entry import EntryState
from scripts import command
from tests.lab.caches import Blocks, Cache, Model, Pools, Shape, allocated, chain, draw_model, draw_shape
from tests.lab.offload_audit import check as check_offload

HASH_TOKENS = 16
PROMPTS, LONGEST = 5, 12
GIVE_UP_S = 30.0
AT_ONCE = 5


class Wrong(Exception):
    """A broken promise."""


class Rank:
    """One rank with its memory."""

    def __init__(self, model: Model, shape: Shape, tp_rank: int, directory: Path, rng: random.Random) -> None:
        self.memory, self.cache = allocated(model, shape, tp_rank)
        layout = self.cache.layout
        strides = [size.stride for size in record_sizes(record_form(layout))]
        room = 8 * max(strides) * len(set(strides))
        self.engine = Engine(EngineConfig(engine_id=f"tp{tp_rank}"), register_memory(layout, (self.memory,)))
        config = OffloadConfig(
            model="soak",
            hash_tokens=HASH_TOKENS,
            host_bytes=room * rng.choice([1, 2, 6]),
            directory=directory,
            file_bytes=room * rng.choice([1, 6]),
            policy=rng.choice(["lru", "s3-fifo"]),
            max_bytes=max(strides) * rng.choice([1, 4, 100]),
            max_post_bytes=rng.choice([4096, 1 << 20]),
            timeout_s=GIVE_UP_S,
        )
        self.offload = Offload(config, self.engine)

    def audit(self) -> None:
        """Whatever can be found in host memory is what its key says: all of its bytes."""
        for shelf in self.offload._mover.shelves:
            assert shelf.memory is not None
            assert shelf.memory.array is not None
            slots = Cache(self.cache.model, shelf.layout, [shelf.memory.array])
            for entry in [entry for index in shelf.catalogue.host.index for entry in index.values()]:
                if entry.state is not EntryState.READY:
                    continue
                group, (prompt, _, last) = shelf.kept[entry.group], entry.hash.decode().partition(":")
                every = slots.layout.groups[group].block_size // HASH_TOKENS
                if not slots.is_right(group, entry.slot, chain(prompt, int(last) + 1)[-every:]):
                    raise Wrong(
                        f"{shelf.far}: what is kept of group {group} as {entry.hash.decode()} is something else"
                    )


class Life:
    """All ranks of one engine, and its allocator."""

    def __init__(self, model: Model, shape: Shape, directory: Path, rng: random.Random) -> None:
        self.model, self.shape, self.rng = model, shape, rng
        # All ranks have tiers of the same size, in blocks.
        seed = rng.randrange(1 << 30)
        self.ranks = [Rank(model, shape, i, directory, random.Random(seed)) for i in range(shape.tp_size)]
        self.pools = Pools(shape)
        self.counts: Counter[str] = Counter()

    async def run(self, requests: int) -> None:
        """Make requests, some at a time."""
        async with AsyncExitStack() as stack:
            for rank in self.ranks:
                await stack.enter_async_context(rank.engine)
                await stack.enter_async_context(rank.offload)
            with anyio.fail_after(4 * GIVE_UP_S):
                for at in range(0, requests, AT_ONCE):
                    await asyncio.gather(*(self.request(number) for number in range(at, min(at + AT_ONCE, requests))))
                    for rank in self.ranks:
                        check_offload(rank.offload)
                        rank.engine.check_integrity()
                        if rank.engine.holds():
                            raise Wrong(f"{rank.engine.holds()} are held, and nothing runs")
                        rank.audit()
                if self.rng.random() < 0.9:
                    await self.written_back()  # or one of those blocks may take the room of one that was found
                    for prompt in range(PROMPTS):
                        await self.load_all(chain(f"p{prompt}", LONGEST))

    async def written_back(self) -> None:
        """Wait until all that is kept is in files."""
        for rank in self.ranks:
            while any(rank.offload.statistics().gauges[name] for name in ("to_write_back", "moves")):  # noqa: ASYNC110
                await asyncio.sleep(0.002)  # it has no event

    def take(self, hashes: int) -> Blocks | None:
        """Take blocks for a prompt."""
        return self.pools.take([hashes // every for every in self.shape.hashes], self.rng)

    def each(self, blocks: Sequence[Sequence[int | None]]) -> list[tuple[int, int, int]]:
        """Group, place and id of each block."""
        return [(g, at, block) for g, ids in enumerate(blocks) for at, block in enumerate(ids) if block is not None]

    async def request(self, number: int) -> None:
        """Load what is kept of a prompt, compute the rest of it, and store it; some of that given up in the middle."""
        rng, prompt, count = self.rng, self.rng.randrange(PROMPTS), self.rng.randint(1, LONGEST)
        hashes = chain(f"p{prompt}", count)
        if (blocks := self.take(count)) is None:
            return
        is_cancelled = rng.random() < 0.15
        tokens, loaded = min(rank.offload.lookup(hashes).tokens for rank in self.ranks), 0
        if tokens:
            own = (rank.offload._catalogue.lookup(hashes).tokens for rank in self.ranks)
            self.counts["from_others"] += min(own) < tokens
            load = [self.load(rank, f"load-{number}", blocks, hashes, tokens, is_cancelled) for rank in self.ranks]
            loaded = min(await asyncio.gather(*load))
        if rng.random() < 0.7:
            whole = self.compute(blocks, hashes, loaded)
            store = [self.store(rank, f"store-{number}", whole, hashes, is_cancelled) for rank in self.ranks]
            await asyncio.gather(*store)
        for rank in self.ranks:
            for group, _, block in self.each(blocks):
                rank.cache.scribble(group, block)
            if rng.random() < 0.03:
                said = rank.offload.evict(hashes)
                if not said.num_pinned and (left := rank.offload.lookup(hashes).tokens):
                    raise Wrong(f"{left} tokens are found of what was evicted")
        self.pools.give(blocks)

    def compute(self, blocks: Blocks, hashes: list[str], loaded: int) -> Blocks:
        """Fill what was not loaded; returns the blocks that are whole, which are not those that are then unneeded."""
        whole: Blocks = [[None] * len(ids) for ids in blocks]
        for group, at, block in self.each(blocks):
            every = self.shape.hashes[group]
            if (at + 1) * every * HASH_TOKENS > loaded:
                for rank in self.ranks:
                    rank.cache.fill(group, block, hashes[at * every : (at + 1) * every])
            elif at not in self.model.groups[group].in_place(every * HASH_TOKENS, 0, loaded):
                continue
            whole[group][at] = block
        return whole

    async def load_all(self, hashes: list[str]) -> None:
        """While nothing else goes on, what is found can be loaded."""
        if (blocks := self.take(len(hashes))) is None:
            return
        found = {rank.offload.lookup(hashes).tokens for rank in self.ranks}
        tokens = min(found)
        if tokens and (len(found) == 1 or not self.model.is_hybrid):
            load = [self.load(rank, "load-all", blocks, hashes, tokens, False) for rank in self.ranks]
            if (loaded := min(await asyncio.gather(*load))) < tokens:
                raise Wrong(f"{tokens} tokens of {hashes[0]} are found, and {loaded} can be loaded")
        for group, _, block in self.each(blocks):
            for rank in self.ranks:
                rank.cache.scribble(group, block)
        self.pools.give(blocks)

    async def load(
        self, rank: Rank, name: str, blocks: Blocks, hashes: list[str], tokens: int, is_cancelled: bool
    ) -> int:
        """Load a prompt, and look at every byte of it; returns how many tokens are in place."""
        groups = [(0, ids) for ids in blocks]
        work = asyncio.create_task(rank.offload.load(name, groups, hashes, num_tokens=tokens))
        if not await self.waited(rank, name, work, is_cancelled):
            return 0
        result = work.result()
        self.counts["tokens.loaded"] += result.num_tokens
        self.counts["tokens.missed"] += tokens - result.num_tokens
        self.counts["from_files"] += result.file_bytes > 0
        if result.num_tokens < tokens and self.model.is_hybrid:
            return 0
        firsts = [0] * len(blocks)
        for group, at, is_right in rank.cache.compared(self.shape, blocks, hashes, firsts, result.num_tokens):
            self.counts["blocks.compared"] += 1
            if not is_right:
                kind = self.model.groups[group].name
                raise Wrong(f"{name}: block {at} of group {group} ({kind}) is not what was stored")
        return result.num_tokens

    async def store(self, rank: Rank, name: str, blocks: Blocks, hashes: list[str], is_cancelled: bool) -> None:
        """Store a prompt."""
        work = asyncio.create_task(rank.offload.store(name, [(0, ids) for ids in blocks], hashes))
        if await self.waited(rank, name, work, is_cancelled):
            self.counts["blocks.stored"] += work.result().num_new

    async def waited(self, rank: Rank, name: str, work: asyncio.Task[object], is_cancelled: bool) -> bool:
        """Wait for a call that may be given up, and for its blocks."""
        if is_cancelled:
            await asyncio.sleep(self.rng.random() * 0.003)
            if self.rng.random() < 0.5:
                work.cancel()
            else:
                rank.offload.cancel(name)
        try:
            await work
        except (PullError, asyncio.CancelledError):
            self.counts["given_up"] += 1
            await rank.offload.returned(name)
            return False
        return True


async def soak(seed: int, directory: Path, engines: int = 3, requests: int = 30) -> Counter[str]:
    """Play one seed; returns what was counted.

    Raises:
        Wrong: Something that must never happen.
    """
    rng, counts = random.Random(repr(("soak", seed))), Counter[str]()
    model = draw_model(rng, HASH_TOKENS)
    for at in range(engines):
        shape = draw_shape(rng, model, num_blocks=48)
        engine = Life(model, shape, directory, rng)
        try:
            await engine.run(requests)
        except Exception as exc:
            raise Wrong(f"seed {seed}, engine {at} ({shape}; {model}): {exc}") from exc
        counts += engine.counts
    return counts


def soak_engines(
    seeds: Annotated[int, typer.Option(help="How many.")] = 20,
    first_seed: Annotated[int, typer.Option(help="The first.")] = 0,
    engines: Annotated[int, typer.Option(help="Of each seed, one after the other.")] = 4,
    requests: Annotated[int, typer.Option(help="Of each engine.")] = 60,
    json_to: command.Json = "-",
) -> int:
    """Soak random engines that offload."""
    for name, number, least in (("seeds", seeds, 1), ("first-seed", first_seed, 0)):
        command.check(least <= number < 1 << 40, f"--{name} {number} is not a number from {least} on")
    for name, number in (("engines", engines), ("requests", requests)):
        command.check(0 < number < 1 << 20, f"--{name} {number} is not a number from 1 on")
    counts, begun, wrong = Counter[str](), time.monotonic(), ""
    with command.output(json_to) as out:
        for seed in range(first_seed, first_seed + seeds):
            with tempfile.TemporaryDirectory() as directory:
                try:
                    counts += asyncio.run(soak(seed, Path(directory), engines, requests))
                except Wrong as exc:
                    wrong = str(exc)
                    break
        seconds = round(time.monotonic() - begun, 1)
        json.dump({"seeds": seeds, "seconds": seconds, "wrong": wrong, **dict(sorted(counts.items()))}, out, indent=2)
        out.write("\n")
    if wrong:
        print(f"soak_offload: {wrong}", file=sys.stderr)
    return int(bool(wrong))


EPILOG = (
    (__doc__ or "").partition("\n\n")[2]
    + """
[bold]Examples[/bold]

  python -m tests.lab.soak_offload --seeds 100

  python -m tests.lab.soak_offload --first-seed 17 --seeds 1

[bold]Exit status[/bold]  0 all good, 1 something is not (the report says what), 2 bad input, 130 Ctrl-C
"""
)
main = command.script(soak_engines, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
