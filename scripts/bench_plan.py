"""How long planning takes: `python -m scripts.bench_plan [--blocks N] [--layers N] [--ranks N]`.

Prints one JSON line per memory order and block order: what is computed once per peer, and per request
(the median of ten), from lists of ids to plans for all remote ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import tracemalloc

import numpy as np

from asynckv.core.layout import runs_of
from asynckv.core.plan import BlockLists, PeerMap, check_block_ids, plan_read
from asynckv.core.sources import assign
from asynckv.core.types import BlockRuns
from asynckv.layouts import model_layout
from asynckv.models import Heads, Model


def measure(order: str, scattered: bool, blocks: int, layers: int, ranks: int) -> dict[str, object]:
    """Plan one request of a TP-1 rank that reads `ranks` remote ranks."""
    model = Model("m", (Heads(max(8, ranks), 128),) * layers)
    here = model_layout(model, num_blocks=2 * blocks, order=order)
    there = [model_layout(model, tp_rank=r, tp_size=ranks, num_blocks=2 * blocks, order=order) for r in range(ranks)]
    began = time.perf_counter()
    shares = assign(here, there)
    maps = [PeerMap(here, t, s, itertools.count(1)) for t, s in zip(there, shares, strict=True)]
    peer_s = time.perf_counter() - began
    rng = np.random.default_rng(0)
    mine, theirs = (
        (rng.permutation(2 * blocks)[:blocks] if scattered else np.arange(blocks)).tolist() for _ in range(2)
    )
    offer = [BlockRuns(0, runs_of(theirs))]
    took = []
    for _ in range(10):
        began = time.perf_counter()
        lists = BlockLists(check_block_ids(here, [(0, mine)]), offer, 16 * blocks)
        plans = [plan_read(peer, lists) for peer in maps]
        took.append(time.perf_counter() - began)
    tracemalloc.start()
    lists = BlockLists(check_block_ids(here, [(0, mine)]), offer, 16 * blocks)
    plans = [plan_read(peer, lists) for peer in maps]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "order": order,
        "blocks": "scattered" if scattered else "runs",
        "per_peer_ms": round(peer_s / ranks * 1e3, 3),
        "per_request_ms": round(statistics.median(took) * 1e3, 3),
        "peak_bytes_per_block": round(peak / blocks, 1),
        "pieces": sum(p.num_descriptors for p in plans),
    }


def main() -> None:
    """Measure all four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    given = parser.parse_args()
    for order, scattered in itertools.product(("hnd", "nhd"), (False, True)):
        print(json.dumps(measure(order, scattered, given.blocks, given.layers, given.ranks)))


if __name__ == "__main__":
    main()
