"""Measure the overhead of whole engines, besides the bytes they move: `python -m scripts.bench engine --help`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import typer
from rich.console import Console

from asynckv import Engine, EngineConfig, NixlConfig, PrefillRanks, Registration
from asynckv.config import LeaseConfig, LimitsConfig, PullConfig
from asynckv.layout import register_memory
from asynckv.observe.setup import configure_logging
from asynckv.testing import SimControl, SimData, SimNetwork
from asynckv.tools.bench import garbage
from asynckv.tools.bench.processes import Failure
from asynckv.tools.output import consoles, print_table, write_json
from asynckv.tools.plan.layouts import model_layout, with_addresses
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from tests.lab.fleet import Fleet

SCHEMA = 1
WIDE = 4  # ranks of a prefill engine in `wide`
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """The upper limit of a figure."""

    most: float
    unit: str


GOALS: Mapping[str, Goal] = {
    "handshake.ms": Goal(50.0, "ms"),
    "handshake.wire_kib": Goal(64.0, "KiB"),
    "idle.cpu_percent": Goal(1.0, "% of a core"),
    "memory.kib_per_request": Goal(20.0, "KiB, both sides"),
    "flight.ratio_1024": Goal(1.3, "x of 64"),
    "flight.ratio_10000": Goal(1.3, "x of 64"),
    "peers.ratio_256": Goal(1.1, "x of 16 peers"),
    "peers.ratio_255_idle": Goal(1.1, "x of none"),
    "wide.idle_percent": Goal(2.0, "% of a core"),
    "wide.real_idle_percent": Goal(2.0, "% of a core"),
    "wide.turn_ms": Goal(20.0, "ms"),
    "wide.real_turn_ms": Goal(20.0, "ms"),
    "logging.ratio": Goal(1.02, "x of none"),
}


def _memory(
    num_blocks: int, layers: int = 1, heads: int = 1, head_dim: int = 8, tp: tuple[int, int] = (0, 1)
) -> Registration:
    model = Model("bench", (Heads(heads, head_dim),) * layers)
    layout = model_layout(model, num_blocks=num_blocks, tp_rank=tp[0], tp_size=tp[1])
    arrays = tuple(np.empty(m.length, np.uint8) for m in layout.memories)
    return register_memory(with_addresses(layout, [a.ctypes.data for a in arrays]), arrays)


@dataclass(slots=True)
class Pair:
    """One decode engine, its prefill engines, and a closed loop of one-block requests between them."""

    decode: Engine
    prefill: list[Engine]
    groups: list[PrefillRanks]
    data: SimData | None = None
    """Data plane of the decode engine, if it is simulated."""
    numbers: int = 0

    async def requests(self, total: int, in_flight: int, of: Sequence[int]) -> float:
        """Run `total` requests, and return CPU seconds per request of both sides."""
        todo = iter(range(total))

        async def reader(slot: int) -> None:
            for _ in todo:
                which = of[slot % len(of)]
                await self.one(which, slot)

        garbage.settle()
        cpu = time.process_time()
        async with asyncio.TaskGroup() as group:
            for slot in range(min(in_flight, total)):
                group.create_task(reader(slot))
        return (time.process_time() - cpu) / total

    async def one(self, which: int, slot: int) -> None:
        """Lend one block and pull it."""
        self.numbers += 1
        blocks = [(0, [slot])]
        params = self.groups[which].make_params(f"p{self.numbers}", blocks, 16, written=True)
        self.prefill[which].lend(params)
        await self.decode.pull(f"d{self.numbers}", blocks, params, timeout_s=300.0)


def _config(name: str) -> EngineConfig:
    # Large limits, because the queue and its back-pressure are not to be measured.
    return EngineConfig(
        engine_id=name,
        pull=PullConfig(window_requests=1 << 16, total_requests=1 << 16, max_queued=1 << 16),
        limits=LimitsConfig(messages_per_s=1e9, message_burst=1 << 30),
    )


async def _simulated(work: Callable[[Pair], Awaitable[Figures]], peers: int = 1, num_blocks: int = 64) -> Figures:
    network = SimNetwork()

    def engine(name: str) -> Engine:
        return Engine(_config(name), _memory(num_blocks), data=planes[name], control=SimControl(network))

    names = [f"prefill-{i}" for i in range(peers)]
    planes = {name: SimData(network, name) for name in ("decode", *names)}
    decode, prefill = engine("decode"), [engine(name) for name in names]
    async with contextlib.AsyncExitStack() as stack:
        for each in (*prefill, decode):
            await stack.enter_async_context(each)
        groups = [PrefillRanks(f"prefill-{i}", [e.endpoint]) for i, e in enumerate(prefill)]
        return await work(Pair(decode, prefill, groups, planes["decode"]))


# -- cases -----------------------------------------------------------------------------------------


async def handshake() -> Figures:
    """Meet three peers for the first time, and pull once more from each.

    The peers have 64 layers and 20,000 blocks, on real NIXL and ZMQ, with both sides in one process. The time is that
    from the call to the outcome, without the time of the same request after the handshake.
    """
    first: list[float] = []
    again: list[float] = []
    wire: list[int] = []
    async with Engine(EngineConfig(engine_id="decode"), _memory(20_000, layers=64)) as decode:
        for i in range(3):
            name = f"prefill-{i}"
            async with Engine(EngineConfig(engine_id=name), _memory(20_000, layers=64)) as prefill:
                pair = Pair(decode, [prefill], [PrefillRanks(name, [prefill.endpoint])])
                bytes_before = _bytes(prefill)
                for figures in (first, again):
                    began = time.perf_counter()
                    await pair.one(0, i)
                    figures.append(time.perf_counter() - began)
                    pair.numbers += 1
                wire.append(_bytes(prefill) - bytes_before)
    seconds = statistics.median(a - b for a, b in zip(first, again, strict=True))
    return {"ms": seconds * 1e3, "wire_kib": statistics.median(wire) / 1024, "later_ms": statistics.median(again) * 1e3}


def _bytes(engine: Engine) -> int:
    counters = engine.statistics().counters
    return counters.get("control.bytes_in", 0) + counters.get("control.bytes_out", 0)


async def idle(seconds: float = 20.0, peers: int = 100) -> Figures:
    """Connect to every peer once on real planes, wait until nothing is owed, and do nothing."""
    async with contextlib.AsyncExitStack() as stack:
        names = ("decode", *(f"prefill-{i}" for i in range(peers)))
        engines = [Engine(EngineConfig(engine_id=name), _memory(256)) for name in names]
        decode, *prefill = [await stack.enter_async_context(engine) for engine in engines]
        pair = Pair(decode, prefill, [PrefillRanks(f"prefill-{i}", [e.endpoint]) for i, e in enumerate(prefill)])
        await pair.requests(peers, 4, range(peers))
        for which in range(peers):
            await pair.one(which, which)
        await asyncio.gather(*(engine.drain(10.0) for engine in prefill))
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        return {"cpu_percent": (time.process_time() - cpu) / seconds * 100, "peers": peers}


async def memory() -> Figures:
    """Start reads that do not end, and measure their memory."""

    async def work(pair: Pair) -> Figures:
        data = pair.data
        assert data is not None
        await pair.requests(64, 8, [0])
        data.deferred = True
        number = 4000
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tasks = [asyncio.create_task(pair.one(0, slot)) for slot in range(number)]
        while len(data.running) < number:  # noqa: ASYNC110 - the loop has to turn
            await asyncio.sleep(0)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        data.finish()
        await asyncio.gather(*tasks)
        return {"kib_per_request": taken / number / 1024, "in_flight": number}

    return await _simulated(work, num_blocks=4096)


async def flight() -> Figures:
    """Run the same loop with 64, 1,024 and 10,000 requests in flight, in alternating rounds."""
    widths = (64, 1024, 10_000)

    async def work(pair: Pair) -> Figures:
        await pair.requests(1000, 64, [0])
        rounds: dict[int, list[float]] = {width: [] for width in widths}
        for _ in range(5):
            for width in widths:
                rounds[width].append(await pair.requests(max(3000, 2 * width), width, [0]))
        found = {width: statistics.median(costs) for width, costs in rounds.items()}
        ratios = {
            f"ratio_{w}": statistics.median(b / a for a, b in zip(rounds[64], rounds[w], strict=True))
            for w in widths[1:]
        }
        return {f"us_{w}": cost * 1e6 for w, cost in found.items()} | ratios

    return await _simulated(work, num_blocks=16_384)


async def peers() -> Figures:
    """Keep one request in flight at 16 and 256 engines each, and 256 at one, alone and with 255 idle engines."""

    async def alone(pair: Pair) -> Figures:
        await pair.requests(1000, 64, [0])
        return {"us": statistics.median([await pair.requests(4000, 256, [0]) for _ in range(5)])}

    async def many(pair: Pair) -> Figures:
        everybody = range(len(pair.prefill))
        await pair.requests(2000, 256, everybody)
        spread: dict[int, list[float]] = {16: [], 256: []}
        one: list[float] = []
        for _ in range(5):
            for number, costs in spread.items():
                costs.append(await pair.requests(4000, number, everybody[:number]))
            one.append(await pair.requests(4000, 256, [0]))
        return {"idle": statistics.median(one)} | {str(n): statistics.median(costs) for n, costs in spread.items()}

    single = (await _simulated(alone, num_blocks=512))["us"]
    found = await _simulated(many, peers=256, num_blocks=512)
    return {
        "us_at_1": single * 1e6,
        "us_at_1_beside_255": found["idle"] * 1e6,
        "us_at_16": found["16"] * 1e6,
        "us_at_256": found["256"] * 1e6,
        "ratio_256": found["256"] / found["16"],
        "ratio_255_idle": found["idle"] / single,
    }


class Ranks:
    """Prefill engines of TP `WIDE`, which all lend the same block."""

    def __init__(self, *, engines: int, network: SimNetwork | None = None) -> None:
        self._ranks = [_wide(f"prefill-{i}", network, (rank, WIDE)) for i in range(engines) for rank in range(WIDE)]

    async def __aenter__(self) -> Self:
        for each in self._ranks:
            await each.start()
        self._groups = [
            PrefillRanks(
                f"prefill-{i // WIDE}",
                [x.endpoint for x in self._ranks[i : i + WIDE]],
                lease=LeaseConfig(lease_s=300.0),
            )
            for i in range(0, len(self._ranks), WIDE)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._ranks:
            await each.aclose()

    async def lend(self) -> list[dict[str, Any]]:
        """Lend a request of every engine, and return their params."""
        every = [group.make_params("p", [(0, [0])], 16, written=True) for group in self._groups]
        for each, params in zip(self._ranks, (x for x in every for _ in range(WIDE)), strict=True):
            each.lend(params)
        return every


def _wide(name: str, network: SimNetwork | None, tp: tuple[int, int] = (0, 1)) -> Engine:
    registration = _memory(256, heads=WIDE, tp=tp)
    if network is None:
        return Engine(EngineConfig(engine_id=name, nixl=NixlConfig(posting_threads=0)), registration)
    plane = SimData(network, f"{name}-{tp[0]}")
    return Engine(EngineConfig(engine_id=name), registration, data=plane, control=SimControl(network))


async def _meet(decode: Engine, every: Sequence[dict[str, Any]], seconds: float) -> Figures:
    """Meet all engines at once but the last, do nothing for a while, and meet the last."""
    turns = [0.0]

    async def watch() -> None:
        while True:
            began = time.thread_time()  # other processes may take the core
            await asyncio.sleep(0.001)
            turns.append(time.thread_time() - began)

    async def pull(number: int) -> float:
        began = time.perf_counter()
        await decode.pull(f"d{number}", [(0, [number])], every[number])
        return time.perf_counter() - began

    *many, last = range(len(every))
    half = len(many) // 2
    garbage.settle()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    await asyncio.gather(*map(pull, many[:half]))
    await asyncio.sleep(1.0)  # all releases are acknowledged
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(pull, many[half:]))
    await asyncio.sleep(1.0)
    watching.cancel()
    cpu = time.process_time()
    await asyncio.sleep(seconds)
    idle = (time.process_time() - cpu) / seconds * 100
    first_ms = 1e3 * await pull(last)
    return {
        "ranks": WIDE * len(many),
        "kib_per_rank": taken / (WIDE * half) / 1024,
        "idle_percent": idle,
        "next_ms": first_ms,
        "turn_ms": 1e3 * max(turns),
    }


async def wide(seconds: float = 20.0, engines: int = 64, real: int = 8) -> Figures:
    """Meet 256 simulated ranks of 64 engines, and 32 real ones of 8, which run in another process.

    Measured are the decode rank's memory per rank, its CPU when nothing is owed, the next handshake, and the longest
    turn of its loop.
    """
    network = SimNetwork()
    async with Ranks(engines=engines + 1, network=network) as ranks, _wide("decode", network) as decode:
        found = await _meet(decode, await ranks.lend(), seconds)
    async with Fleet() as fleet, _wide("decode", None) as decode:
        others = await fleet.start("prefill", "scripts.bench.engine:Ranks", engines=real + 1)
        more = await _meet(decode, await others.ask("lend"), seconds)
    return found | {f"real_{name}": value for name, value in more.items()}


async def logging() -> Figures:
    """Run two pairs of engines in turns, one with logs at the default level and one without."""
    rounds: dict[str, list[float]] = {}
    quiet, loud = io.StringIO(), io.StringIO()
    for _ in range(7):
        for name in ("none", "default"):
            configure_logging(
                "error" if name == "none" else "info", form="json", stream=quiet if name == "none" else loud
            )

            async def work(pair: Pair) -> Figures:
                await pair.requests(500, 64, [0])
                return {"us": await pair.requests(6000, 64, [0])}

            rounds.setdefault(name, []).append((await _simulated(work))["us"])
    ratio = statistics.median(b / a for a, b in zip(rounds["none"], rounds["default"], strict=True))
    return {"ratio": ratio, "us_none": statistics.median(rounds["none"]) * 1e6, "lines": loud.getvalue().count("\n")}


CASES: Mapping[str, Callable[[], Awaitable[Figures]]] = {
    "handshake": handshake,
    "idle": idle,
    "memory": memory,
    "flight": flight,
    "peers": peers,
    "wide": wide,
    "logging": logging,
}


# -- the command -----------------------------------------------------------------------------------


class Alone:
    """A fresh process for one case, so that no case pays for an earlier one."""

    def __init__(self, *, case: str) -> None:
        self._case = case
        configure_logging("error")

    async def figures(self) -> Figures:
        return await CASES[self._case]()


async def _run(cases: Sequence[str], progress: Console) -> dict[str, float]:
    found: dict[str, float] = {}
    async with Fleet() as fleet:
        for case in cases:
            with progress.status(f"{case} ..."):
                process = await fleet.start(case, "scripts.bench.engine:Alone", case=case)
                try:
                    figures = await process.ask("figures", None)
                except Failure as exc:
                    raise Failure("\n".join([str(exc), *process.last_words()])) from exc
                await process.end()
            found |= {f"{case}.{name}": value for name, value in figures.items()}
    return found


def _row(name: str, value: float) -> tuple[str, ...]:
    if (goal := GOALS.get(name)) is None:
        return name, f"{value:.4g}", "", ""
    return name, f"{value:.4g}", f"<= {goal.most:g} {goal.unit}", "yes" if value <= goal.most else "no"


def measure(
    cases: Annotated[str, typer.Option(help="Cases, comma-separated.")] = ",".join(CASES),
    json: command.TableJson = None,
) -> int:
    """Measure the overhead of whole engines, besides the bytes they move, and compare it with goals.

    Every case runs in its own process. CPU is that of the process, which other load on the host affects less; ratios
    are made within one run.
    """
    chosen = command.chosen(cases.split(","), CASES, "case")
    console, progress = consoles(json)
    try:
        figures = asyncio.run(_run(chosen, progress))
    except Failure as exc:
        print(f"engine: {exc}", file=sys.stderr)
        return 1
    print_table(console, ("figure", "measured", "goal", "met"), [_row(*each) for each in figures.items()], texts=(0, 2))
    write_json(json, {"schema": SCHEMA, "figures": figures, "goals": {n: g.most for n, g in GOALS.items()}})
    return 0


EPILOG = f"""
[bold]Cases[/bold]

{command.listed(command.first_lines(CASES))}

[bold]Example[/bold]

  python -m scripts.bench engine --cases flight,peers --json - | jq .figures

[bold]Exit status[/bold]  0 measured, 1 a case failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(measure, EPILOG)
