"""A head start: a prompt that is read in pieces while it is computed, beside one pull of it at its end.

Requests go in turns (`WAYS`). A prefill worker computes a prompt by waiting. Times count from the end of the last
chunk. Those of a late follower count from its call.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from asynckv.scheduler import PieceSizes, PrefillRanks
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench.noise import median_of

if TYPE_CHECKING:
    from asynckv.engine import Engine

HEAD_START, ONE_PULL, ONE_CHUNK, LATE = WAYS = ("head_start", "one_pull", "one_chunk", "late_follower")
HEAD = ("in turns", "p50", "ratio to one pull", "ratio to one chunk", "CPU decode", "CPU prefill", "read", "pieces")
FIGURES = ("p50_s", "decode", "prefill", "read", "wanted", "pieces")  # time, CPU seconds of each side, and bytes
Turns = dict[str, list[dict[str, float]]]  # way -> figures of each request


async def compute(engine: Engine, ranks: PrefillRanks, work: p.Work, seconds: float) -> None:
    """Wait for the time of each chunk, and lend pieces of what is finished to a reader that takes some."""
    groups, sizes = engine.registration.layout.groups, PieceSizes()
    brings = [group.kind != "state" and not group.window for group in groups]  # the others come with the loan
    whole = math.lcm(*(group.block_size for group, is_brought in zip(groups, brings, strict=True) if is_brought))
    for chunk in range(1, work.num_chunks + 1):
        await asyncio.sleep(seconds)
        end = work.tokens * chunk // work.num_chunks // whole * whole
        if (piece := sizes.take(end, work.tokens, is_followed=engine.is_followed(work.ticket))) is None:
            continue
        lists = list[tuple[int, list[int | None]]]()
        for group, (_, blocks), is_brought in zip(groups, work.lists, brings, strict=True):
            of_piece = slice(piece.start // group.block_size, piece.stop // group.block_size)
            lists.append((piece.start, blocks[of_piece] if is_brought else []))
        name = f"{work.params['request_id']}/{chunk}"
        params = ranks.make_params(name, lists, piece.stop, written=True, recall=True)
        engine.lend_piece(params, work.ticket)


def summary(turns: Turns) -> dict[str, Any]:
    """Return medians by way, and their ratios to one pull and to one chunk; empty without turns of all ways."""
    if not all(turns.values()):
        return {}
    found: dict[str, Any] = {
        way: {name: median_of([turn[name] for turn in each]).median for name in FIGURES} | {"requests": len(each)}
        for way, each in turns.items()
    }
    for each in found.values():
        each["of_one_pull"] = {name: each[name] / found[ONE_PULL][name] for name in FIGURES[:3]}
        each["of_one_chunk"] = each["p50_s"] / found[ONE_CHUNK]["p50_s"]
    return {"head_start": found}


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    out = list[tuple[str, ...]]()
    for way, it in found.get("head_start", {}).items():
        shares = it["of_one_pull"]
        costs = [f"{it[side] * 1e3:.1f} ms (x {shares[side]:.2f})" for side in ("decode", "prefill")]
        times = f"{it['p50_s'] * 1e3:.2f} ms", f"{shares['p50_s']:.2f}", f"{it['of_one_chunk']:.2f}"
        name, read = f"{way.replace('_', ' ')} ({it['requests']})", f"{it['read'] / it['wanted']:.1%}"
        out.append((name, *times, *costs, read, f"{it['pieces']:g}"))
    return out
