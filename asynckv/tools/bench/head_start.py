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
HEAD = ("in turns", "p50", "of one pull", "of a chunk", "CPU decode", "CPU prefill", "read", "pieces")
Turns = dict[str, list[dict[str, float]]]
"""Way -> figures of each request: its time, CPU of both sides, pieces, and bytes (`wanted`, and `read` in all)."""


async def compute(engine: Engine, ranks: PrefillRanks, work: p.Work, seconds: float) -> None:
    """Wait for the time of each chunk, and lend pieces of what is finished to a reader that takes some."""
    groups, sizes = engine.registration.layout.groups, PieceSizes()
    whole = math.lcm(*(group.block_size for group in groups))
    for chunk in range(1, work.num_chunks + 1):
        await asyncio.sleep(seconds)
        end = work.tokens * chunk // work.num_chunks // whole * whole
        if (piece := sizes.take(end, work.tokens, is_followed=engine.is_followed(work.ticket))) is None:
            continue
        lists = list[tuple[int, list[int | None]]]()
        for group, (_, blocks) in zip(groups, work.lists, strict=True):
            first, end = piece.start // group.block_size, piece.stop // group.block_size
            comes_with_loan = group.kind == "state" or group.window
            lists.append((piece.start, [] if comes_with_loan else blocks[first:end]))
        name = f"{work.params['request_id']}/{chunk}"
        params = ranks.make_params(name, lists, piece.stop, written=True, recall=True)
        engine.lend_piece(params, work.ticket)


def summary(turns: Turns) -> dict[str, Any]:
    """Return medians by way, and their ratios to those of one pull; empty without turns of all ways."""
    if not all(turns.values()):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for way, of_way in turns.items():
        p50, decode, prefill, read, wanted, pieces = (
            median_of([turn[name] for turn in of_way]).median
            for name in ("p50", "decode", "prefill", "read", "wanted", "pieces")
        )
        found[way] = {"requests": len(of_way), "p50_s": p50, "decode_cpu_s": decode, "prefill_cpu_s": prefill}
        found[way] |= {"read_of_prompt": read / wanted, "pieces": pieces}
    for each in found.values():
        names = ("p50_s", "decode_cpu_s", "prefill_cpu_s")
        each["of_one_pull"] = {name: each[name] / found[ONE_PULL][name] for name in names}
        each["of_one_chunk"] = each["p50_s"] / found[ONE_CHUNK]["p50_s"]
    return {"head_start": found}


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    out = list[tuple[str, ...]]()
    for way, it in found.get("head_start", {}).items():
        ratio = it["of_one_pull"]
        costs = [f"{it[x] * 1e3:.1f} ms (x {ratio[x]:.2f})" for x in ("decode_cpu_s", "prefill_cpu_s")]
        shares = f"{ratio['p50_s']:.2f}", f"{it['of_one_chunk']:.2f}", *costs, f"{it['read_of_prompt']:.1%}"
        name = f"{way.replace('_', ' ')} ({it['requests']})"
        out.append((name, f"{it['p50_s'] * 1e3:.2f} ms", *shares, f"{it['pieces']:g}"))
    return out
