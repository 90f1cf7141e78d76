"""Measure what it costs that a request may be recalled: `python -m scripts.bench recall --help`.

- `call`: time of `EngineThread.recall` of one lent request, from the embedder's thread. It is measured alone, and next
  to a thread that holds Python's lock for 5 ms at a time, as native code of a step may do. Each call needs the lock on
  both threads, so it waits for several such pieces.
- `pulls`: latency of a pull between two processes on this host, with and without the mark, by turns. A reader of a
  request with the mark asks once more when its last byte has landed. One block holds 8 KiB.
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from asynckv import Engine, EngineConfig, EngineThread, PrefillRanks, configure_logging
from asynckv.embed import Lend
from asynckv.tools.bench import garbage
from asynckv.tools.bench.memory import Pool
from asynckv.tools.bench.report import quantiles
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from scripts.bench.lender import Lender, by_turns, quiet, tell
from tests.lab.fleet import Fleet

BLOCKS, TOKENS = 2048, 16  # 16 MiB
HELD_US = 5_000
SIZES = {"8 KiB": (1, 1.3), "16 MiB": (BLOCKS, 1.05)}
"""Blocks of each size, and the goal for the ratio of the latency with the mark to that without."""

PATIENCE_S = 30.0


def setup(engine_id: str) -> tuple[EngineConfig, Any]:
    """Return the arguments of an engine of one layer and one KV head."""
    layout = model_layout(Model("recall", (Heads(1, 128),)), num_blocks=BLOCKS, block_size=TOKENS)
    return quiet(engine_id), Pool(layout, seed=0).registration


class Owner(Lender):
    """The process that lends."""

    def __init__(self) -> None:
        super().__init__(Engine(*setup("owner")))


async def pulls(rounds: int, requests: int) -> dict[str, Any]:
    """Pull with and without the mark by turns; return the medians of each round in microseconds, and their ratios."""
    found: dict[str, Any] = {}
    async with Fleet() as fleet, Engine(*setup("reader")) as engine:
        owner = await fleet.start("owner", "scripts.bench.recall:Owner")
        group = PrefillRanks("owner", [await owner.ask("endpoint")])

        for size, (blocks, goal) in SIZES.items():
            ids = list(range(blocks))

            async def pull(recall: bool, name: str, ids: list[int] = ids) -> float:
                groups, name = [(0, ids)], f"{len(ids)}.{name}.{recall}"
                params = group.make_params(name, groups, TOKENS * len(ids), written=True, recall=recall)
                await owner.ask("lend", every=[params])
                began = time.perf_counter()
                await engine.pull(name, groups, params, timeout_s=PATIENCE_S)
                return time.perf_counter() - began

            plain, marked, ratios = await by_turns((False, True), rounds, requests, pull)
            found[size] = {"plain_p50_us": plain, "recall_p50_us": marked, "ratios": ratios}
            found[size] |= {"ratio": statistics.median(ratios), "goal": goal}
    return found


@contextmanager
def step(is_busy: bool) -> Iterator[None]:
    """Hold Python's lock on another thread, for 5 ms at a time."""
    hold, is_over = ctypes.PyDLL(None).usleep, threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            hold(HELD_US)  # PyDLL keeps the lock in a call

    thread = threading.Thread(target=compute)
    if is_busy:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if is_busy:
            thread.join()


def call(calls: int) -> dict[str, Any]:
    """Return quantiles of the time of `EngineThread.recall` in milliseconds, alone and beside a step."""
    found: dict[str, Any] = {}
    with EngineThread(*setup("owner")) as thread:
        group = PrefillRanks("owner", [thread.engine.endpoint])
        for name, is_busy in (("alone", False), ("beside_a_step", True)):
            seconds = []
            with step(is_busy):
                for i in range(calls):
                    params = group.make_params(f"{name}{i}", [(0, [1])], TOKENS, written=True, recall=True)
                    thread.submit([Lend(params)])
                    while not thread.engine._driver.core.prefill.leases:
                        time.sleep(0.0001)
                    began = time.perf_counter()
                    thread.recall([params], PATIENCE_S)
                    seconds.append(time.perf_counter() - began)
                    thread.take_finished()
            told = quantiles(seconds, p50_ms=0.5, p99_ms=0.99, max_ms=1.0)
            found[name] = {key: round(1e3 * value, 3) for key, value in told.items()} | {"calls": calls}
    return found


def recall(
    calls: Annotated[
        int, typer.Option(min=1, max=100_000, help="Calls of `EngineThread.recall`, alone and beside.")
    ] = 1000,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of pulls of each size.")] = 7,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Pulls of each kind in a round.")] = 60,
    json: command.Json = "-",
) -> int:
    """Measure the time of a recall, and the latency of pulls that may be recalled."""
    garbage.settle()
    configure_logging("error")  # each recall is logged
    return tell("recall", json, lambda: {"call": call(calls), "pulls": asyncio.run(pulls(rounds, requests))})


EPILOG = """
`ratios` has the median of each round with the mark, by that without; `ratio` is their median, which `goal` limits.

[bold]Exit status[/bold]  0 measured, 1 a process was lost, 2 bad input, 130 Ctrl-C
"""
main = command.script(recall, EPILOG)
