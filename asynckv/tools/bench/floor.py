"""The floor: the same bytes between the same buffers, moved by a raw NIXL loop in the same run as the engine.

Before or after each window of the engine, in turn, the decode worker moves the wave's requests by a plain loop. It uses
the same descriptors in the same order, cut into posts as the engine cuts them. Planning and comparing are not timed.
The prefill worker only serves, with a second NIXL agent over the same memory.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np

from asynckv.config import NixlConfig, PullConfig
from asynckv.core.types import decode_params
from asynckv.errors import AsyncKVError
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.match import assign
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import Plan, plan_read
from asynckv.geometry.tables import PeerTables
from asynckv.tools.bench import garbage
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench.memory import Pool
from asynckv.tools.bench.noise import median_of


class Round(msgspec.Struct):
    """One window of the engine (CPU of the decode process), and the floor's sample of the same wave.

    The floor also moves requests that failed in the engine, so a round with failed requests is in no ratio.
    """

    window_s: float
    seconds: list[float]
    num_bytes: int
    cpu_s: float
    concurrency: int
    sample: p.Sample
    failed: int = 0


class Floor:
    """A worker's part in the floor: a second agent over the same memory, which serves or reads."""

    def __init__(self, pool: Pool, verify: bool, config: PullConfig) -> None:
        from asynckv.tools.bench.nixl_raw import RawLoop

        self._pool, self._verify, self._config = pool, verify, config
        self._here = pool.registration.layout
        self.plane = RawLoop(NixlConfig(posting_threads=0), f"floor-{os.getpid()}-{id(self)}")
        self._lender = ""  # name of the agent that is read, once it is loaded

    def open(self) -> p.Opened:
        """Start, and return the agent and layout by which the other side reads."""
        return p.Opened(self.plane.open(self._here.memories), self._here)

    async def connect(self, opened: p.Opened) -> None:
        """Start, and load the agent of the prefill worker, unless this is done already."""
        if self._lender:
            return
        self.open()
        self._lender = opened.agent.name
        (share,) = assign(self._here, [opened.layout])
        self._map = PeerTables(self._here, opened.layout, share, itertools.count(1))
        await self.plane.add_remote_agent(opened.agent, opened.layout.memories)

    def close(self) -> None:
        self.plane.close()

    async def measure(self, works: Sequence[p.Work], concurrency: int) -> p.Sample:
        """Move all requests once more. This blocks the event loop, so that nothing else runs while the clock does."""
        # Requests that are cached whole have nothing to move, and the engine's figures exclude them too.
        plans = [plan for work in works if (plan := self._plan(work)).num_bytes]
        num_bytes = sum(plan.num_bytes for plan in plans)
        if self._verify:
            for work in works:
                await anyio.to_thread.run_sync(self._pool.poison, work.lists)
        config = self._config
        requests = [list(plan.posts(config.max_post_bytes, config.max_post_descriptors)) for plan in plans]
        window = {"window_bytes": config.window_bytes, "window_descriptors": config.window_descriptors}
        try:
            lists = self.plane.prepare_lists(self._lender, requests)
            garbage.settle()
            cpu, began = time.process_time(), time.perf_counter()
            ends = self.plane.read_all(lists, requests, concurrency=concurrency, **window)
        except AsyncKVError as exc:
            return p.Sample([], 0.0, num_bytes, 0.0, 0, str(exc))
        window_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        wrong = await anyio.to_thread.run_sync(self._wrong, works) if self._verify else 0
        return p.Sample(ends, window_s, num_bytes, cpu_s, wrong)

    def _plan(self, work: p.Work) -> Plan:
        params = decode_params(work.params)
        mine = check_block_ids(self._here, work.lists, params.num_tokens)
        return plan_read(self._map, BlockLists(mine, params.groups, params.num_tokens))

    def _wrong(self, works: Sequence[p.Work]) -> int:
        return sum(self._pool.check(x.number, x.lists, x.tokens, x.prefix)[1] for x in works)


def latencies(ends: Sequence[float], concurrency: int) -> list[float]:
    """Return latencies as in a closed loop: a request starts when there is room, and is done at its end."""
    ordered = sorted(ends)
    return [end - (ordered[i - concurrency] if i >= concurrency else 0.0) for i, end in enumerate(ends)]


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Summarise all rounds: `floor`, and `ratio_to_floor` (engine over floor, within each round)."""
    if not rounds:
        return {}
    notes = caveats(rounds)
    errors = [r.sample.error for r in rounds if r.sample.error]
    rounds = [r for r in rounds if not r.failed]
    engine = [_figures(r.num_bytes, r.window_s, r.seconds, r.cpu_s) for r in rounds]
    floor: dict[str, Any] = {
        "engine": _medians(engine),
        "not_measured": {KIND: errors[0]} if errors else {},
        "caveats": notes,
    }
    both = [
        (mine, _figures(s.num_bytes, s.window_s, latencies(s.ends, r.concurrency), s.cpu_s))
        for r, mine in zip(rounds, engine, strict=True)
        if not (s := r.sample).error
    ]
    if not both:
        return {"floor": floor, "ratio_to_floor": {}}
    floor[KIND] = _medians([theirs for _, theirs in both])
    ratio = _medians([{key: mine[key] / theirs[key] for key in mine if theirs[key]} for mine, theirs in both])
    return {"floor": floor, "ratio_to_floor": {KIND: ratio}}


def faults(rounds: Sequence[Round]) -> list[str]:
    found = [f"floor: {r.sample.wrong} bytes that the raw NIXL loop moved are wrong" for r in rounds if r.sample.wrong]
    return found + sorted({f"floor: {r.sample.error}" for r in rounds if r.sample.error})


KIND = "raw_nixl"
NAME = "raw NIXL loop"
HEAD = ("floor (the bare transfer)", "GB/s", "p50", "engine reaches", "p50 x", "CPU x")

ROUNDS = 10  # waves of a run with a floor; small pools make more
QUIET_S = 0.005  # highest p99 of the event loop lag on cores without other work
LEAST_ROUNDS = 6  # rounds that an interval needs to reach `noise.LEVEL`
LEAST_TURNS = 2
"""Times that a round must refill what is in flight; with fewer, its start and end dominate the figures."""


def table(report: dict[str, Any]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows below `HEAD` (the floor, and the share of it that the engine reaches), and notes on them."""
    if "floor" not in report:
        return [], []
    rows = list[tuple[str, ...]]()
    notes = [f"the {NAME} was not measured: {why}" for why in report["floor"]["not_measured"].values()]
    if (ratio := report["ratio_to_floor"].get(KIND)) is not None:
        at = report["floor"][KIND]
        fast = at["p50_s"]["median"]
        share, slower, cpu = (ratio[key] for key in ("gbytes_per_s", "p50_s", "cpu_s_per_request"))
        p50 = f"{fast * 1e3:.2f} ms" if fast >= 1e-4 else f"{fast * 1e6:.1f} µs"
        reached = f"{share['median']:.1%} ({share['low']:.1%}-{share['high']:.1%})"
        costs = (f"{each['median']:.2f}" for each in (slower, cpu))
        rows.append((NAME, f"{at['gbytes_per_s']['median']:.3f}", p50, reached, *costs))
        if (threads := report["config"]["posting_threads"]) not in (0, 1):
            notes.append(f"the floor has one thread; the engine posts with --posting-threads {threads}")
        if (lag := report["loop_lag_s"]["p99"]) > QUIET_S:
            notes.append(
                f"the machine was not quiet (event loop lag p99 {lag * 1e3:.0f} ms): the intervals may be too narrow"
            )
    return rows, [*notes, *report["floor"]["caveats"]]


def caveats(rounds: Sequence[Round]) -> list[str]:
    """Return reasons to doubt the ratios, with the number of requests that would be enough."""
    if faulty := sum(r.failed > 0 for r in rounds):
        text = f"requests failed in {faulty} of {len(rounds)} rounds: these rounds are in no ratio"
        return [text, *caveats([r for r in rounds if not r.failed])]
    if not rounds:
        return []
    per_round, at_once = min(len(r.seconds) for r in rounds), max(r.concurrency for r in rounds)
    most_rounds, least = max(len(rounds), ROUNDS), LEAST_TURNS * at_once
    if len(rounds) >= LEAST_ROUNDS and per_round >= least:
        return []
    few = [f"{len(rounds)} rounds, of which {LEAST_ROUNDS} make an interval"] if len(rounds) < LEAST_ROUNDS else []
    few += [f"{per_round} requests in a round with {at_once} in flight"] if per_round < least else []
    return [
        f"too few requests for these ratios and the throughput: {' and '.join(few)}; give --requests "
        f"{most_rounds * least}, or a lower --concurrency"
    ]


def _figures(num_bytes: int, window_s: float, seconds: Sequence[float], cpu_s: float) -> dict[str, float]:
    return {
        "gbytes_per_s": num_bytes / window_s / 1e9 if window_s else 0.0,
        "requests_per_s": len(seconds) / window_s if window_s else 0.0,
        "p50_s": float(np.quantile(seconds, 0.5, method="higher")) if seconds else 0.0,
        "cpu_s_per_request": cpu_s / len(seconds) if seconds else 0.0,
    }


def _medians(values: Sequence[dict[str, float]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: msgspec.to_builtins(median_of([v[key] for v in values if key in v])) for key in keys}
