"""Measure how long bulk reads block an event loop: `python -m scripts.bench loop_stall --help`.

A prefill engine runs in another process and a decode engine in this one, with real NIXL and ZMQ. The decode side pulls
in a closed loop, while a timer of 1 ms on its loop records how late it is called. The result is one JSON line.

`bulk` pulls contiguous blocks, 16 MiB per request; `scattered` pulls blocks anywhere, in pieces of 1 KiB, so that
almost every piece is a separate NIXL descriptor.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
from typing import Annotated, Any, Literal, Self

import msgspec
import typer

from asynckv import Engine, EngineConfig, NixlConfig, PrefillRanks
from asynckv.config import MAX_POSTING_THREADS
from asynckv.core.types import Endpoint
from asynckv.tools.bench.memory import Pool
from asynckv.tools.bench.processes import Failure
from asynckv.tools.bench.rank import LagSampler
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from tests.lab.fleet import TRANSPORTS, Fleet

TICK_S = 0.001
SHAPES = {
    # layers, kv heads, head dim; blocks per request, requests in flight
    "bulk": (4, 8, 128, 64, 8),
    "scattered": (4, 2, 16, 1600, 4),
}


def make_engine(role: str, workload: str, posting_threads: int | str) -> tuple[Engine, Pool]:
    """Make one side with a pool for all requests in flight."""
    layers, heads, dim, blocks, in_flight = SHAPES[workload]
    layout = model_layout(Model(workload, (Heads(heads, dim),) * layers), num_blocks=2 * blocks * in_flight)
    pool = Pool(layout, seed=0)
    config = EngineConfig(engine_id=role, nixl=NixlConfig(posting_threads=posting_threads))
    return Engine(config, pool.registration), pool


class Prefill:
    """The process that lends the requests that it gets."""

    def __init__(self, *, workload: str) -> None:
        self._engine, self._pool = make_engine("prefill", workload, 0)

    async def __aenter__(self) -> Self:
        await self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()

    def endpoint(self) -> Any:
        return msgspec.to_builtins(self._engine.endpoint)

    def lend(self, every: list[dict[str, Any]]) -> None:
        for params in every:
            self._engine.lend(params)


async def decode(workload: str, posting_threads: int | str, requests: int) -> dict[str, Any]:
    """Pull all requests, some in flight at a time."""
    _, _, _, blocks, in_flight = SHAPES[workload]
    async with Fleet() as fleet:
        lender = await fleet.start("prefill", "scripts.bench.loop_stall:Prefill", workload=workload)
        endpoint = msgspec.convert(await lender.ask("endpoint"), Endpoint)
        engine, _pool = make_engine("decode", workload, posting_threads)
        async with engine:
            group = PrefillRanks("prefill", [endpoint])
            ids = list(range(2 * blocks * in_flight))
            if workload == "scattered":
                random.Random(1).shuffle(ids)
            lists = [ids[i * blocks : (i + 1) * blocks] for i in range(2 * in_flight)]

            def make(number: int) -> dict[str, Any]:
                chosen = lists[number % in_flight]
                return group.make_params(f"r{number}", [(0, chosen)], 16 * blocks, written=True)

            every = [make(n) for n in range(-in_flight, requests)]
            await lender.ask("lend", None, every=every)
            waiting = iter(enumerate(every))

            async def pull(last: int) -> int:
                moved = 0
                for number, params in waiting:
                    # Use the own half of the pool, and no block for two requests in flight.
                    target = lists[in_flight + places.pop()]
                    moved += (await engine.pull(f"d{number}", [(0, target)], params)).num_bytes
                    places.append(lists.index(target) - in_flight)
                    if number >= last:
                        break
                return moved

            places = list(range(in_flight))
            await pull(in_flight - 1)  # connections
            gc.collect()
            sampler, began, cpu = LagSampler(TICK_S), time.perf_counter(), time.process_time()
            sampler.start()
            moved = sum(await asyncio.gather(*(pull(1 << 60) for _ in range(in_flight))))
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            lags = sorted(1e3 * lag for lag in sampler.stop())
            counters = engine.statistics().counters
    return {
        "workload": workload,
        "posting_threads": posting_threads,
        "transport": os.environ.get("UCX_TLS", "auto"),
        "gbytes": round(moved / 1e9, 2),
        "gbytes_per_s": round(moved / seconds / 1e9, 2),
        "cores": round(cpu / seconds, 2),
        "lag_ms": {
            "samples": len(lags),
            "p50": round(lags[len(lags) // 2], 2),
            "p99": round(lags[len(lags) * 99 // 100], 2),
            "max": round(lags[-1], 2),
        },
        "data": {name: value for name, value in counters.items() if name.startswith("data.") and value},
    }


def stall(
    workload: Annotated[Literal["bulk", "scattered"], typer.Argument(help="Workload.")],
    posting_threads: Annotated[str, typer.Option(metavar="N", help="0 to 16, or auto.")] = "auto",
    requests: Annotated[str, typer.Option(metavar="N", help="Number of requests to pull.")] = "64",
    transport: Annotated[Literal["auto", "tcp"], typer.Option(help="Transport of UCX.")] = "auto",
) -> int:
    """Measure how long bulk reads block an event loop, and print one JSON line.

    A prefill engine runs in another process and a decode engine in this one, with real NIXL and ZMQ. The decode side
    pulls in a closed loop, while a timer of 1 ms on its loop records how late it is called.
    """
    number = command.whole("--requests", requests, 1, 1_000_000)
    threads: int | str = posting_threads
    if posting_threads != "auto":
        threads = command.whole("--posting-threads", posting_threads, 0, MAX_POSTING_THREADS)
    os.environ.update(TRANSPORTS[transport])
    try:
        print(json.dumps(asyncio.run(decode(workload, threads, number))))
    except Failure as exc:
        print(f"loop_stall: {exc}", file=sys.stderr)
        return 1
    return 0


EPILOG = """
[bold]Workloads[/bold]

  [cyan]bulk[/cyan]: contiguous blocks, 16 MiB per request

  [cyan]scattered[/cyan]: blocks anywhere, in pieces of 1 KiB; almost every piece is a separate NIXL descriptor

[bold]Example[/bold]

  python -m scripts.bench loop_stall bulk --posting-threads 0 | jq .lag_ms

[bold]Exit status[/bold]  0 measured, 1 the prefill process was lost, 2 bad input, 130 Ctrl-C
"""
main = command.script(stall, EPILOG)
