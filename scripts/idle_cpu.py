"""Measure the CPU that an idle, connected pair of engines uses: `python -m scripts.idle_cpu [seconds]`.

Two engines in one process on real NIXL and ZMQ make one request, wait until nothing is owed, and idle.
Prints one JSON line with the share of one core.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from asynckv import Engine, EngineConfig, PrefillGroup
from asynckv.bench.memory import Pool
from asynckv.layouts import model_layout
from asynckv.models import Heads, Model


async def measure(seconds: float) -> float:
    """Return CPU seconds per second, both engines together."""
    layout = model_layout(Model("idle", (Heads(2, 64),) * 2), num_blocks=64)
    pools = [Pool(layout, seed) for seed in (1, 2)]
    prefill, decode = (
        Engine(EngineConfig(engine_id=name), pool.registration)
        for name, pool in zip(("prefill", "decode"), pools, strict=True)
    )
    async with prefill, decode:
        group = PrefillGroup("prefill", [prefill.endpoint])
        params = group.make_params("r", [(0, [1, 2])], 32, written=True)
        lent = prefill.lend(params)
        await decode.pull("d", [(0, [3, 4])], params)
        await lent.wait_released()
        await asyncio.sleep(0.5)
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu) / (time.perf_counter() - began)


if __name__ == "__main__":
    length = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    print(json.dumps({"seconds": length, "cpu_share_of_one_core": round(asyncio.run(measure(length)), 5)}))
