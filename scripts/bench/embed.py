"""Measure the cost of each way to embed an engine for the worker's thread: `python -m scripts.bench embed --help`.

A prefill engine in another process lends. A decode engine in this process is embedded in each of the ways, in turns,
next to a loop of steps: every step submits new requests and takes finished ones. A step computes for a number of
milliseconds, either in Python without system calls (`python`: it releases Python's lock only when forced), or outside
Python in pieces of half a millisecond (`free`, as kernel launches do). The work of a step is a fixed amount, so a delay
of the thread makes the step longer:

- `call`: time of the thread in `submit` and `take_finished`, per step;
- `longer`: extra time of a step, compared with a step alone;
- `latency`: time from `submit` until `take_finished` reports the end, which is never before the step has ended.

`thread + wait` is a thread with `wait(0.001)` at the end of its steps, if any request is in flight.

`burst` submits 256 requests of 8 MiB in one step of 30 ms.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import typer

from asynckv import Engine, EngineConfig, EngineDesk, EngineThread, Finished, LogConfig, Order, PrefillRanks, Pull
from asynckv.tools.bench import garbage
from asynckv.tools.bench.memory import Pool
from asynckv.tools.bench.report import quantiles
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from scripts.bench.lender import Lender, quiet
from tests.lab.fleet import Fleet

LAYERS, BLOCK_BYTES = 4, 1 << 18
"""A block holds 256 KiB: 16 tokens of 8 heads of 128, keys and values, in four layers."""
LENT_BLOCKS = 64
PATIENCE_S = 60.0
SMALL_BLOCKS, LARGE_BLOCKS = 1, 32
BURST_GOAL_MS = 2.0
PIECE_S = 0.0005
WAIT_S = 0.001


@dataclass(frozen=True)
class Case:
    """The requests of a case, and its steps."""

    kind: str
    step_s: float
    per_step: int = 8
    steps: int = 60
    blocks: int = SMALL_BLOCKS

    @property
    def num_requests(self) -> int:
        return self.per_step * self.steps


CASES = {
    f"{kind}-{ms}": Case(kind, ms / 1e3, steps=max(12, 1500 // ms))
    for kind in ("python", "free")
    for ms in (10, 30, 200)
}
CASES |= {f"burst-{kind}": Case(kind, 0.03, 256, 1, LARGE_BLOCKS) for kind in ("python", "free")}
ABOUT = {
    **{
        f"{kind}-N": f"steps of N ms ({', '.join(n for n in CASES if n.startswith(kind))})"
        for kind in ("python", "free")
    },
    "burst-KIND": "256 requests of 8 MiB in one step",
}


def make(num_blocks: int) -> Pool:
    """Return a KV cache."""
    return Pool(model_layout(Model("embed", (Heads(8, 128),) * LAYERS), num_blocks=num_blocks), seed=0)


class Prefill(Lender):
    """The process that lends the requests that it gets, always with the same blocks."""

    def __init__(self) -> None:
        self._pool = make(LENT_BLOCKS)
        super().__init__(Engine(quiet("prefill"), self._pool.registration))


# -- work ------------------------------------------------------------------------------------------------


def _spin(count: int) -> None:
    for _ in range(count):
        pass


def _pieces(count: int, data: bytes) -> None:
    for _ in range(count):
        zlib.crc32(data)  # releases Python's lock


def rate(work: Callable[[int], None], count: int) -> float:
    """Return the rate per second at which a thread does some work when nothing else runs."""
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        work(count)
        best = max(best, count / (time.perf_counter() - began))
    return best


def step_of(case: Case) -> Callable[[], None]:
    """Return a step of the wanted length."""
    if case.kind == "python":
        count = int(case.step_s * rate(_spin, 300_000))
        return lambda: _spin(count)
    whole = bytes(1 << 20)
    size = int(PIECE_S * (1 << 20) * rate(lambda n: _pieces(n, whole), 20))
    piece, pieces = bytes(size), max(1, round(case.step_s / PIECE_S))
    return lambda: _pieces(pieces, piece)


# -- ways ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The measurements of one way."""

    call_s: list[float] = field(default_factory=list)
    call_cpu_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    asked_at: dict[str, float] = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def _take(self, finished: Finished) -> None:
        now = time.perf_counter()
        self.latency_s += [now - self.asked_at.pop(result.request_id) for result in finished.finished_recving]
        for failed in finished.failed:
            del self.asked_at[failed.request_id]
            self.problems.append(repr(failed.error))

    def _steps(self, plan: Sequence[Sequence[Order]]) -> Iterator[Sequence[Order]]:
        """Yield the orders of every step, then empty ones until all requests ended; the first step is not measured."""
        yield plan[0]
        yield from self._until_all_ended()
        for measured in (self.call_s, self.call_cpu_s, self.step_s, self.latency_s):
            measured.clear()
        yield from plan[1:]
        yield from self._until_all_ended()

    def _until_all_ended(self) -> Iterator[Sequence[Order]]:
        until = time.monotonic() + PATIENCE_S
        while self.asked_at:
            if time.monotonic() > until:
                self.problems.append(f"{len(self.asked_at)} requests never ended")
                return
            yield ()

    def driven(
        self, desk: EngineThread | EngineDesk, plan: Sequence[Sequence[Order]], wait: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Take all steps of a plan, and yield where the work of each is to be done."""
        for orders in self._steps(plan):
            now = time.perf_counter()
            self.asked_at |= {order.request_id: now for order in orders if isinstance(order, Pull)}
            began, cpu = time.perf_counter(), time.thread_time()
            desk.submit(orders)
            handed, spent = time.perf_counter(), time.thread_time() - cpu
            yield
            worked, cpu = time.perf_counter(), time.thread_time()
            if wait and self.asked_at:
                wait()
            finished = desk.take_finished()
            ended, spent = time.perf_counter(), spent + time.thread_time() - cpu
            self._take(finished)
            self.call_s.append(handed - began + ended - worked)
            self.call_cpu_s.append(spent)
            self.step_s.append(ended - began)


def threaded(
    config: EngineConfig, pool: Pool, plan: Sequence[Sequence[Order]], work: Callable[[], None], wait_s: float = 0.0
) -> Run:
    run = Run()
    with EngineThread(config, pool.registration, switch_interval_s=None) as engine:  # set by `--switch-interval`
        for _ in run.driven(engine, plan, partial(engine.wait, wait_s) if wait_s else None):
            work()
    return run


def native(config: EngineConfig, pool: Pool, plan: Sequence[Sequence[Order]], work: Callable[[], None]) -> Run:
    async def main() -> Run:
        run = Run()
        async with Engine(config, pool.registration) as engine:
            for _ in run.driven(EngineDesk(engine), plan):
                await asyncio.to_thread(work)
        return run

    return asyncio.run(main())


WAYS: dict[str, Callable[[EngineConfig, Pool, Sequence[Sequence[Order]], Callable[[], None]], Run]] = {
    "native": native,
    "thread": threaded,
    "thread + wait": partial(threaded, wait_s=WAIT_S),
}


def figures(run: Run, case: Case, alone_s: float) -> dict[str, float]:
    """Summarise a run in milliseconds."""
    calls, cpu, asked = (every[: case.steps] for every in (run.call_s, run.call_cpu_s, run.step_s))
    found = quantiles(calls, call_p50_ms=0.5, call_max_ms=1.0) | quantiles(cpu, call_cpu_max_ms=1.0)
    found |= quantiles(run.latency_s, latency_p50_ms=0.5, latency_p99_ms=0.99)
    found["longer_ms"] = statistics.median(asked) - alone_s
    told = {name: round(1e3 * seconds, 4) for name, seconds in found.items()}
    return told | {"requests_per_s": round(len(run.latency_s) / sum(run.step_s), 1), "steps": len(run.step_s)}


async def measure(name: str, rounds: int) -> dict[str, Any]:
    """Run a case in every way, in turns."""
    case, began, problems = CASES[name], time.monotonic(), []
    every: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    pool = make(case.blocks * min(case.num_requests, 1024))
    work = step_of(case)
    alone = []
    async with Fleet() as fleet:
        lender = await fleet.start("prefill", "scripts.bench.embed:Prefill")
        group = PrefillRanks("prefill", [await lender.ask("endpoint")])
        config = EngineConfig(engine_id="decode", log=LogConfig(successes_per_s=0.0, slow_per_s=0.0, held_fraction=0.0))
        for number in range(rounds):
            for _ in range(max(3, case.steps // 4)):
                at = time.perf_counter()
                work()
                alone.append(time.perf_counter() - at)
            for way in sorted(WAYS, key=lambda way: (list(WAYS).index(way) + number) % len(WAYS)):
                plan = await planned(case, group, lender.ask, f"{way[-4:]}{number}")
                run = await asyncio.to_thread(WAYS[way], config, pool, plan, work)
                every[way].append(figures(run, case, statistics.median(alone)))
                problems += run.problems[:3]
    ways = {way: {k: statistics.median(f[k] for f in found) for k in found[0]} for way, found in every.items()}
    # Take the least of all rounds, because other load on the host only adds to it.
    least = min(found["call_max_ms"] for found in every["thread"])
    if name.startswith("burst") and least > BURST_GOAL_MS:
        problems.append(f"the calls of a step took at least {least} ms on a thread, but the goal is {BURST_GOAL_MS} ms")
    return {
        "scenario": name,
        "ok": not problems,
        "problems": problems,
        "seconds": round(time.monotonic() - began, 1),
        "switch_interval_ms": 1e3 * sys.getswitchinterval(),
        "alone_ms": round(1e3 * statistics.median(alone), 2),
        "ways": ways,
        "least_call_ms": least,
        "of_native": {
            way: {k: round(ways[way][k] / ways["native"][k], 2) for k in ("latency_p50_ms", "requests_per_s")}
            for way in list(WAYS)[1:]
        },
    }


async def planned(
    case: Case, group: PrefillRanks, ask: Callable[..., Awaitable[Any]], prefix: str
) -> list[list[Order]]:
    """Have requests lent, and return the orders of all steps."""
    places = min(case.num_requests, 1024)
    pulls: list[Order] = []
    every = []
    for i in range(case.num_requests + 1):
        source = [(i * case.blocks + b) % LENT_BLOCKS for b in range(case.blocks)]
        params = group.make_params(f"{prefix}-{i}", [(0, source)], 16 * case.blocks, written=True, lease_s=600.0)
        target = [(i % places) * case.blocks + b for b in range(case.blocks)]
        pulls.append(Pull(request_id=f"{prefix}-{i}", groups=[(0, target)], params=params, timeout_s=PATIENCE_S))
        every.append(params)
    await ask("lend", None, every=every)
    meeting, *pulls = pulls
    return [[meeting], *(pulls[i * case.per_step : (i + 1) * case.per_step] for i in range(case.steps))]


def bench(
    cases: Annotated[list[str] | None, typer.Argument(metavar="CASE", help="Cases to measure; by default all.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds, in turns.")] = 3,
    switch_interval: Annotated[
        int, typer.Option(min=10, max=1_000_000, help="sys.setswitchinterval, in microseconds.")
    ] = 500,
    json: command.Json = "-",
) -> int:
    """Measure the cost of each way to embed an engine for the worker's thread, with ratios to native asyncio."""
    names = command.chosen(cases, CASES, "case")
    sys.setswitchinterval(switch_interval / 1e6)
    garbage.settle()
    return command.report(json, [lambda name=name: asyncio.run(measure(name, rounds)) for name in names])  # type: ignore[misc]


main = command.script(bench, command.listed(ABOUT))
