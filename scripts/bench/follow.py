"""Measure what it costs to hear of a request by its ticket: `python -m scripts.bench follow --help`.

- `pulls`: time from `lend` to the result of a pull between two processes on this host, by turns. The reader follows a
  ticket (`followed`), or had the params before the loan and announced them (`announced`). One block holds 8 KiB.
  `round_trip_us` is the time of a question about a ticket that is lent, with its answer.
- `waiting`: CPU time of both processes while the reader only follows so many tickets.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

from asynckv import Engine, PrefillRanks, configure_logging
from asynckv.core.types import FollowParams
from asynckv.tools.bench import garbage
from scripts import command
from scripts.bench.lender import Lender, by_turns, tell
from scripts.bench.recall import PATIENCE_S, SIZES, TOKENS, setup
from tests.lab.fleet import Fleet

WAITING = (0, 1, 32, 1000)
HEAD_START_S = 0.01


class Owner(Lender):
    """The process that lends."""

    def __init__(self) -> None:
        super().__init__(Engine(*setup("owner")))
        self._lent_at = 0.0

    async def offer(self, params: dict[str, Any], ticket: str, *, waits: bool = True) -> AsyncIterator[None]:
        """Wait for the reader's message, answer, and lend after that, because the answer is work for the reader."""
        while waits and not self.engine.statistics().gauges["parked"]:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0.001)
        yield None
        await asyncio.sleep(HEAD_START_S)
        self._lent_at = time.perf_counter()
        self.engine.lend(params, ticket=ticket)

    def lent_at(self) -> float:
        return self._lent_at

    def cpu_s(self) -> float:
        return time.process_time()


def follow_of(params: dict[str, Any]) -> dict[str, Any]:
    """Return what a reader follows: a new ticket, and the ranks of these params."""
    known = {name: params[name] for name in FollowParams.__struct_fields__ if name in params}
    return known | {"ticket": secrets.token_hex(16)}


async def pulls(engine: Engine, owner: Any, group: PrefillRanks, rounds: int, requests: int) -> dict[str, Any]:
    """Return the medians of each round in microseconds, and their ratios."""
    found: dict[str, Any] = {}
    for size, (blocks, _) in SIZES.items():
        groups, tokens = [(0, list(range(blocks)))], TOKENS * blocks

        async def pull(
            follows: bool, name: str, groups: list[tuple[int, list[int]]] = groups, tokens: int = tokens
        ) -> float:
            name = f"{tokens}.{name}.{follows}"
            params = group.make_params(name, groups, tokens, written=follows)
            follow = follow_of(params)

            async def ended() -> float:
                if not follows:
                    engine.announce(name, params)
                    await asyncio.sleep(HEAD_START_S / 2)  # what is known to be not lent yet is not read too early
                told = await engine.follow(name, follow) if follows else params
                await engine.pull(name, groups, told, timeout_s=PATIENCE_S)
                return time.perf_counter()

            result = asyncio.create_task(ended())
            await owner.ask("offer", params=params, ticket=follow["ticket"])
            return await result - float(await owner.ask("lent_at"))

        announced, followed, ratios = await by_turns((False, True), rounds, requests, pull)
        found[size] = {"announced_p50_us": announced, "followed_p50_us": followed, "ratios": ratios}
        found[size] |= {"ratio": statistics.median(ratios), "goal": SIZES[size][1] if blocks > 1 else None}
        found[size]["more_us"] = round(statistics.median(b - a for a, b in zip(announced, followed, strict=True)), 1)
    return found


async def round_trip_us(engine: Engine, owner: Any, group: PrefillRanks, requests: int) -> float:
    """Return the median time in which a rank answers what is offered under a ticket."""
    params = group.make_params("trip", [(0, [0])], TOKENS, written=True)
    follow, seconds = follow_of(params), []
    await owner.ask("offer", params=params, ticket=follow["ticket"], waits=False)
    for number in range(requests + 1):
        began = time.perf_counter()
        await engine.follow(f"trip{number}", follow)
        seconds.append(time.perf_counter() - began)
    engine.cancel("trip", params)
    return round(1e6 * statistics.median(seconds[1:]), 1)  # the first waits for the loan


async def waiting(engine: Engine, owner: Any, group: PrefillRanks, seconds: float) -> dict[str, Any]:
    """Return the CPU time in milliseconds per second of both sides, for each number of followed tickets."""
    params, tasks, found = group.make_params("never", [(0, [0])], TOKENS), list[asyncio.Task[Any]](), {}
    for number in WAITING:
        for i in range(len(tasks), number):
            tasks.append(asyncio.create_task(engine.follow(f"waits{i}", follow_of(params))))
        await asyncio.sleep(2.0)  # the first repeats come at shorter intervals
        cpu_s, their_s = time.process_time(), await owner.ask("cpu_s")
        await asyncio.sleep(seconds)
        spent = {"decode": time.process_time() - cpu_s, "prefill": await owner.ask("cpu_s") - their_s}
        found[str(number)] = {f"{side}_ms_per_s": round(1e3 * cpu / seconds, 2) for side, cpu in spent.items()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return found


async def measure(rounds: int, requests: int, seconds: float) -> dict[str, Any]:
    load = os.getloadavg()
    async with Fleet() as fleet, Engine(*setup("reader")) as engine:
        owner = await fleet.start("owner", "scripts.bench.follow:Owner")
        group = PrefillRanks("owner", [await owner.ask("endpoint")])
        found: dict[str, Any] = {"pulls": await pulls(engine, owner, group, rounds, requests)}
        found["round_trip_us"] = await round_trip_us(engine, owner, group, requests)
        found["waiting"] = await waiting(engine, owner, group, seconds)
    return found | {"load_before": load, "load_after": os.getloadavg()}


def follow(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of pulls of each size.")] = 7,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Pulls of each kind in a round.")] = 60,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of each wait.")] = 10.0,
    json: command.Json = "-",
) -> int:
    """Measure the time from a loan to the result of a reader that follows, and the CPU time of readers that wait."""
    garbage.settle()
    configure_logging("error")
    return tell("follow", json, lambda: asyncio.run(measure(rounds, requests, seconds)))


EPILOG = """
`ratios` has the median of each round of followed requests, by that of announced ones; `ratio` is their median, which
`goal` limits. `more_us` is the median of their differences, which is to be at most `round_trip_us`.

[bold]Exit status[/bold]  0 measured, 1 a process was lost, 2 bad input, 130 Ctrl-C
"""
main = command.script(follow, EPILOG)
