"""Measure planning, and the handling of an unknown peer's layout; this is pure code, without an engine.

Each memory order and block order makes one JSON line. It has the cost once per peer and per request, from lists of ids
to plans for all remote ranks. `--layouts` makes a line for each of the largest layouts of real models, and of the most
expensive layouts within the limits and beyond.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from asynckv.config import PullConfig
from asynckv.errors import LayoutError
from asynckv.geometry.blocks import check_block_ids, runs_of
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.gather import PACK_BYTES
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View
from asynckv.geometry.match import assign, compare
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import plan_read
from asynckv.geometry.staging import TYPICAL, ReadCosts
from asynckv.geometry.tables import PeerTables
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Latent, Model
from scripts import command


def tables(here: Layout, there: Sequence[Layout], costs: ReadCosts | None = None) -> list[PeerTables]:
    pack_bytes, shares = PACK_BYTES if costs else 0, assign(here, there)
    return [PeerTables(here, t, s, itertools.count(1), costs, pack_bytes) for t, s in zip(there, shares, strict=True)]


def share(interleave: int, tokens: int = 32_768, ranks: int = 8, layers: int = 61) -> dict[str, object]:
    """Plan a request of a TP-1 rank from ranks that share tokens (heads, if 0), by typical costs; return CPU times."""
    model = Model("m", (Latent(512, 64) if interleave else Heads(ranks, 128),) * layers)
    here = model_layout(model, num_blocks=tokens // 64, block_size=64)
    how: Any = (
        {"dcp": ranks, "cp_interleave": interleave, "block_size": 64 * ranks} if interleave else {"block_size": 64}
    )
    there = [model_layout(model, tp_rank=r, tp_size=ranks, num_blocks=tokens // 64, **how) for r in range(ranks)]
    config, took = PullConfig(), list[tuple[float, float]]()
    for _ in range(10):
        began = time.process_time()
        maps = tables(here, there, TYPICAL)
        made = time.process_time()
        mine = check_block_ids(here, [(0, list(range(tokens // 64)))])
        lists = BlockLists(mine, [BlockRuns(0, ((0, tokens // how["block_size"]),))], tokens)
        posts = [
            plan_read(peer, lists).count_posts(config.max_post_bytes, config.max_post_descriptors) for peer in maps
        ]
        took.append((made - began, time.process_time() - made))
    peers_ms, request_ms = (round(statistics.median(column) * 1e3, 2) for column in zip(*took, strict=True))
    shared = str(there[0].shard(0)) if interleave else "heads"
    return {"share": shared, "peers_ms": peers_ms, "request_ms": request_ms, "posts": sum(n for n, _ in posts)}


def measure(order: str, scattered: bool, blocks: int, layers: int, ranks: int) -> dict[str, object]:
    """Plan one request of a TP-1 rank that reads `ranks` remote ranks."""
    model = Model("m", (Heads(max(8, ranks), 128),) * layers)
    here = model_layout(model, num_blocks=2 * blocks, order=order)
    there = [model_layout(model, tp_rank=r, tp_size=ranks, num_blocks=2 * blocks, order=order) for r in range(ranks)]
    began = time.perf_counter()
    maps = tables(here, there)
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


def pooled(layers: int, tokens: int = 16, *, order: str = "hnd", pad: int = 0) -> Layout:
    """Return attention layers one after another in one memory; rows grow by `pad` bytes from layer to layer."""
    views, at, heads = [], 0, 8
    for i in range(layers):
        row = 256 + pad * i
        steps = (row * tokens, row) if order == "hnd" else (row, row * heads)
        dims = (Dim("head", heads, steps[0]), Dim("token", tokens, steps[1]), Dim("dim", 128, 2))
        size = row * tokens * heads
        parts = tuple(Part(n, "bfloat16", 2, size * k, dims, "head", (0, heads), heads) for k, n in enumerate("kv"))
        views.append(View(0, 0, f"layers.{i}", at, 2 * size, parts))
        at += 2 * size * 64
    return Layout(memories=(Memory(0, at),), groups=(Group("g", tokens, 64),), views=tuple(views))


def flat(
    views: int,
    parts: int = 1,
    groups: int = 1,
    *,
    step: int = 4096,
    dims: Callable[[int], tuple[Dim, ...]] = lambda _: (),
) -> Layout:
    """Return small views in one memory, which alternate between groups."""
    return Layout(
        memories=(Memory(0, 1 << 55),),
        groups=tuple(Group(f"g{i}", 1, 4) for i in range(groups)),
        views=tuple(
            View(
                0,
                i % groups,
                f"l{i}",
                i // groups * step,
                1 << 40,
                tuple(Part(f"p{j}", "int8", 1, 64 * j, (Dim("token", 1, 1), *dims(i))) for j in range(parts)),
            )
            for i in range(views)
        ),
    )


def dear_layouts() -> Iterator[tuple[str, Layout]]:
    """Yield expensive layouts by name."""
    yield "256 layers", pooled(256)
    each = pooled(256)
    apart = tuple(msgspec.structs.replace(v, parts=(p,)) for v in each.views for p in v.parts)
    yield "256 layers, a view per part", msgspec.structs.replace(each, views=apart)
    yield "256 layers, tokens first", pooled(256, order="nhd")
    yield "256 layers, rows of 256 lengths", pooled(256, order="nhd", pad=2)
    yield "256 layers, blocks of 17 tokens", pooled(256, 17)
    yield "256 layers, blocks of 1001 tokens", pooled(256, 1001)
    yield "2,048 views", flat(2048)
    yield "2,048 views of 64 groups", flat(2048, groups=64)
    yield "2,048 views that share dims", flat(2048, dims=lambda _: (Dim("a", 2, 1 << 24), Dim("b", 2, 1 << 26)))
    yield "2,048 shapes", flat(2048, dims=lambda i: (Dim("a", 2, 2 + i), Dim("b", 2, 8192), Dim("c", 2, 16_384 + i)))
    yield (
        "1,000 that interleave",
        flat(1000, step=2, dims=lambda i: (Dim("a", 2 + i % 2, 1 << 20), Dim("b", 4, 1 << 24))),
    )
    yield "64,000 views", flat(64_000)
    yield "40,000 views of 8 parts", flat(40_000, 8)
    yield "64,000 views of 64 groups", flat(64_000, groups=64)


def inspect(name: str, there: Layout) -> dict[str, object]:
    """Handle an unknown peer's layout as a handshake does, and time each step."""
    here = pooled(256)
    data = msgspec.msgpack.encode(there)
    peers = itertools.count(1)
    steps: dict[str, Callable[[], object]] = {
        "decode": lambda: decode_layout(data),
        "check": lambda: check_layout(there),
        "compare": lambda: compare(here, there),
        "assign": lambda: assign(here, [there]),
        "map": lambda: PeerTables(here, there, assign(here, [there])[0], peers),
    }
    out: dict[str, object] = {"layout": name, "bytes": len(data)}
    for step, do in steps.items():
        took, refused = [], ""
        for _ in range(5):
            began = time.process_time()
            try:
                do()
            except LayoutError as exc:
                refused = str(exc)
            took.append(time.process_time() - began)
        out[f"{step}_ms"] = round(min(took) * 1e3, 2)
        if refused:
            return {**out, "refused": refused[:160]}
    return out


def plan(
    blocks: Annotated[int, typer.Option(min=1, help="Blocks per request.")] = 10_000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 64,
    ranks: Annotated[int, typer.Option(min=1, help="Prefill ranks that one decode rank reads.")] = 8,
    shared: Annotated[bool, typer.Option("--shared", help="Compare sharing tokens with sharing heads.")] = False,
    layouts: Annotated[bool, typer.Option("--layouts", help="Measure layouts of unknown peers instead.")] = False,
) -> None:
    """Measure the time of planning, and print a JSON line per case.

    The cases are blocks in runs and scattered, in two memory orders. Each gives milliseconds per peer and per request
    (the median of ten), and the peak of memory. With --shared: CPU milliseconds for the tables of 8 peers of 61 layers,
    and for the plan of 32,768 tokens and the number of its posts. With --layouts: CPU milliseconds per step of a
    handshake (best of 5).
    """
    if layouts:
        for name, layout in dear_layouts():
            print(json.dumps(inspect(name, layout)))
        return
    for interleave in (0, 1, 16, 64) if shared else ():
        print(json.dumps(share(interleave)))
    for order, scattered in () if shared else itertools.product(("hnd", "nhd"), (False, True)):
        print(json.dumps(measure(order, scattered, blocks, layers, ranks)))


EPILOG = """
[bold]Examples[/bold]

  python -m scripts.bench plan --blocks 1000 --ranks 1 | jq .per_request_ms

  python -m scripts.bench plan --layouts | jq -c '[.layout, .map_ms, .refused]'

[bold]Exit status[/bold]  0 measured, 2 bad input, 130 Ctrl-C
"""
main = command.script(plan, EPILOG)
