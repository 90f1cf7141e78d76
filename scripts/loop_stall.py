"""Measure how long bulk reads keep an event loop away: `python -m scripts.loop_stall --help`.

A prefill engine in a process of its own, a decode engine in this one, real NIXL and ZMQ. The decode side pulls
in a closed loop while a timer of 1 ms on its loop notes how late it is called. Prints one JSON line.

`bulk` pulls blocks that lie in runs, 16 MiB per request; `scattered` pulls blocks anywhere, of 1 KiB pieces, so that
almost every piece is a NIXL descriptor of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from asynckv import Engine, EngineConfig, NixlConfig, PrefillGroup
from asynckv.bench.memory import Pool
from asynckv.config import MAX_POSTING_THREADS
from asynckv.core.types import Endpoint
from asynckv.tools.layouts import model_layout
from asynckv.tools.models import Heads, Model

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


async def prefill(workload: str) -> None:
    """Lend whatever the other process says, until it goes."""
    engine, _pool = make_engine("prefill", workload, 0)
    async with engine:
        print(msgspec.json.encode(engine.endpoint).decode(), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            for params in json.loads(line):
                engine.lend(params)
            print("lent", flush=True)


class Sampler:
    """How late a timer on the loop is called."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._again()

    def _tick(self) -> None:
        self.lags.append(time.perf_counter() - self._due)
        self._again()

    def _again(self) -> None:
        self._due = time.perf_counter() + TICK_S
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> list[float]:
        """Return milliseconds, sorted."""
        self._handle.cancel()
        return sorted(1e3 * max(0.0, lag) for lag in self.lags)


async def decode(workload: str, posting_threads: int | str, requests: int) -> dict[str, Any]:
    """Pull all requests, some in flight at a time."""
    _, _, _, blocks, in_flight = SHAPES[workload]
    command = [sys.executable, "-m", "scripts.loop_stall", workload, "--prefill"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:  # noqa: ASYNC220 - before the clock runs
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            endpoint = msgspec.json.decode(process.stdout.readline(), type=Endpoint)
            engine, _pool = make_engine("decode", workload, posting_threads)
            async with engine:
                group = PrefillGroup("prefill", [endpoint])
                ids = list(range(2 * blocks * in_flight))
                if workload == "scattered":
                    random.Random(1).shuffle(ids)
                lists = [ids[i * blocks : (i + 1) * blocks] for i in range(2 * in_flight)]

                def make(number: int) -> dict[str, Any]:
                    chosen = lists[number % in_flight]
                    return group.make_params(f"r{number}", [(0, chosen)], 16 * blocks, written=True)

                every = [make(n) for n in range(-in_flight, requests)]
                print(json.dumps(every), file=process.stdin, flush=True)
                process.stdout.readline()
                waiting = iter(enumerate(every))

                async def pull(last: int) -> int:
                    moved = 0
                    for number, params in waiting:
                        # Blocks of the own half of the pool, and no two requests in flight on the same.
                        target = lists[in_flight + places.pop()]
                        moved += (await engine.pull(f"d{number}", [(0, target)], params)).num_bytes
                        places.append(lists.index(target) - in_flight)
                        if number >= last:
                            break
                    return moved

                places = list(range(in_flight))
                await pull(in_flight - 1)  # connections
                gc.collect()
                sampler, began, cpu = Sampler(), time.perf_counter(), time.process_time()
                moved = sum(await asyncio.gather(*(pull(1 << 60) for _ in range(in_flight))))
                seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
                lags = sampler.stop()
                counters = engine.statistics().counters
        finally:
            process.kill()
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


def whole(least: int, most: int) -> Callable[[str], int]:
    """Make argparse's reader of a number in a range."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number in {least} ... {most}")
        return int(text)

    return read


def threads_of(text: str) -> int | str:
    """Read `--posting-threads`."""
    return text if text == "auto" else whole(0, MAX_POSTING_THREADS)(text)


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=SHAPES)
    parser.add_argument("--posting-threads", type=threads_of, default="auto", help="0 to 16, or auto")
    parser.add_argument("--requests", type=whole(1, 1_000_000), default=64, help="how many to pull")
    parser.add_argument("--transport", choices=("auto", "tcp"), default="auto")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.transport == "tcp":
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    if given.prefill:
        asyncio.run(prefill(given.workload))
        return
    print(json.dumps(asyncio.run(decode(given.workload, given.posting_threads, given.requests))))


if __name__ == "__main__":
    main()
