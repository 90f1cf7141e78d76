"""Measure what a second look costs, and what it finds: `python -m scripts.bench look --help`.

- `pulls`: latency of a pull between two processes on this host, with and without a second look (1 MiB), by turns. One
  block holds 8 KiB, or 64 KiB.
- `writer`: the owner lends a request of 16 MiB as written, and goes on writing its blocks, one after another, for 2 ms,
  while the pull begins. The pull finds that, or publishes old bytes, or is late enough to get the right ones.
- `flipped`: one byte of 16 MiB changes between the two reads, of which the second reads all. A hook holds that back.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Annotated, Any

import numpy as np
import typer

from asynckv import BytesDiffer, Engine, PrefillRanks, configure_logging
from asynckv.edges.nic.agent import Agent
from asynckv.edges.sharing import shared_memory
from asynckv.layout import register_memory
from asynckv.tools.bench import garbage
from asynckv.tools.plan.layouts import model_layout, with_addresses
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from scripts.bench.lender import Lender, by_turns, quiet, tell
from tests.lab.fleet import Fleet

TOKENS, SMALL, LARGE, WRITES_S = 16, 1, 8, 0.002
SIZES = {"8 KiB": (SMALL, 1), "16 MiB": (SMALL, 2048), "16 MiB, large blocks": (LARGE, 256)}
"""KV heads of the model and blocks of each size. Keys or values of a block have 4 KiB, or 32 KiB."""

GOAL = 1.15
PATIENCE_S = 30.0


class Side(Engine):
    """An engine of one layer, with its memory of 16 MiB."""

    def __init__(self, engine_id: str, heads: int = SMALL, **pull: Any) -> None:
        self.num_blocks = 2048 // heads
        layout = model_layout(Model("look", (Heads(heads, 128),)), num_blocks=self.num_blocks, block_size=TOKENS)
        self.array = np.frombuffer(shared_memory(layout.memories[0].length), np.uint8)
        self.array[:] = 0
        registration = register_memory(with_addresses(layout, [self.array.ctypes.data]), (self.array,))
        super().__init__(quiet(engine_id, **pull), registration)


class Owner(Lender):
    """The process that lends."""

    def __init__(self, *, heads: int) -> None:
        self._side, self._writer = Side("owner", heads), threading.Thread()
        super().__init__(self._side)

    def write(self, value: int) -> None:
        """Write all blocks on another thread, keys and values, and return when it begins."""
        began = threading.Event()

        def write() -> None:
            blocks = self._side.array.reshape(2, 64, -1)
            began.set()
            first = time.perf_counter()
            for number in range(64):
                while time.perf_counter() < first + WRITES_S * number / 64:
                    time.sleep(0)
                blocks[:, number] = value

        self._writer = threading.Thread(target=write)
        self._writer.start()
        began.wait()

    def wait(self) -> None:
        self._writer.join()


async def pull(side: Side, group: PrefillRanks, lend: Any, name: str, blocks: int = 0) -> float:
    ids = list(range(blocks or side.num_blocks))
    params = group.make_params(name, [(0, ids)], TOKENS * len(ids), written=True)
    await lend(params)
    began = time.perf_counter()
    await side.pull(name, [(0, ids)], params, timeout_s=PATIENCE_S)
    return time.perf_counter() - began


@asynccontextmanager
async def pair(heads: int) -> AsyncIterator[tuple[Side, Side, PrefillRanks, Any]]:
    """Yield a reader that looks once, one that looks twice, and an owner in another process."""
    async with Fleet() as fleet, Side("plain", heads) as plain, Side("looks", heads, second_look=1.0) as looks:
        owner = await fleet.start("owner", "scripts.bench.look:Owner", heads=heads)
        yield plain, looks, PrefillRanks("owner", [await owner.ask("endpoint")]), owner


async def latency(rounds: int, requests: int) -> dict[str, Any]:
    """Return the medians of each round in microseconds, and their ratios."""
    found = dict[str, Any]()
    for size, (heads, blocks) in SIZES.items():
        async with pair(heads) as (plain, looks, group, owner):

            async def lend(params: dict[str, Any], owner: Any = owner) -> None:
                await owner.ask("lend", every=[params])

            async def timed(side: Side, name: str, blocks: int = blocks, lend: Any = lend) -> float:
                return await pull(side, group, lend, name, blocks)

            once, twice, ratios = await by_turns((plain, looks), rounds, requests, timed)
            found[size] = {"plain_p50_us": once, "looks_p50_us": twice, "ratios": ratios}
            found[size] |= {"ratio": statistics.median(ratios), "goal": GOAL}
    return found


async def written_on(pulls: int) -> dict[str, int]:
    """Return what becomes of pulls whose owner writes on."""
    outcomes = Counter[str]()
    async with pair(SMALL) as (_, looks, group, owner):
        for i in range(pulls):
            value, writing = i % 255 + 1, list[asyncio.Task[Any]]()

            async def lend(params: dict[str, Any], value: int = value, writing: list[Any] = writing) -> None:
                await owner.ask("lend", every=[params])
                writing.append(asyncio.create_task(owner.ask("write", value=value)))

            try:
                await pull(looks, group, lend, f"writer.{i}")
                outcomes["right" if (looks.array == value).all() else "published"] += 1
            except BytesDiffer:
                outcomes["found"] += 1
            await writing[0]
            await owner.ask("wait")
    return dict(outcomes)


async def flipped(pulls: int) -> dict[str, int]:
    """Return how many pulls of 16 MiB find one byte that changes between their two reads."""
    honest, changes, found = Agent._post_look, list[int](), 0
    async with Side("prefill") as owner, Side("decode", second_look=1.0, second_look_bytes="all") as reader:

        def post(self: Agent, *args: Any) -> Any:
            while changes:
                owner.array[changes.pop()] ^= 1
            return honest(self, *args)

        async def lend(params: dict[str, Any]) -> None:
            owner.lend(params)

        Agent._post_look = post  # type: ignore[method-assign, assignment]
        group = PrefillRanks("prefill", [owner.endpoint])
        for i in range(pulls):
            changes.append(random.randrange(len(owner.array)))
            try:
                await pull(reader, group, lend, f"flipped.{i}")
            except BytesDiffer:
                found += 1
        Agent._post_look = honest  # type: ignore[method-assign]
    return {"pulls": pulls, "found": found}


def look(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of pulls of each size.")] = 7,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Pulls of each kind in a round.")] = 60,
    pulls: Annotated[int, typer.Option(min=1, max=100_000, help="Pulls of an owner that goes on writing.")] = 1000,
    flips: Annotated[int, typer.Option(min=1, max=100_000, help="Pulls in which one byte changes.")] = 200,
    json: command.Json = "-",
) -> int:
    """Measure what a second look costs, and what it finds."""
    garbage.settle()
    configure_logging("error", stream=StringIO())  # each difference is logged

    def measure() -> dict[str, Any]:
        found = {"pulls": asyncio.run(latency(rounds, requests)), "writer": asyncio.run(written_on(pulls))}
        return found | {"flipped": asyncio.run(flipped(flips))}

    return tell("look", json, measure)


EPILOG = """
`ratios` has the median of each round with a second look, by that without; `ratio` is their median, which `goal` limits.
Of `writer`, `published` counts the pulls that completed with bytes that were written over later.

[bold]Exit status[/bold]  0 measured, 1 a process was lost, 2 bad input, 130 Ctrl-C
"""
main = command.script(look, EPILOG)
