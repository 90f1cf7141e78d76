"""Compare asynckv and vLLM's NixlConnector on the same workload, in turns: `python -m scripts.bench vs_vllm --help`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from asynckv.tools.bench.noise import Interval, median_of
from asynckv.tools.bench.processes import Failure
from asynckv.tools.output import consoles, print_table, write_json
from scripts import command
from scripts.bench.versus.vllm_side import write_config
from scripts.bench.versus.workload import Setup, Window
from scripts.bench.vllm import Case
from tests.lab.fleet import Fleet, Process

SCHEMA = "asynckv.versus/1"
REMOTE_BLOCKS = 1024
START_S, WINDOW_S = 180.0, 180.0
MOST_REQUESTS = 200_000
KEYS = ("requests_per_s", "gbytes_per_s", "p50_ms", "p99_ms", "cpu_us", "prefill_cpu_us", "step_p99_ms")
RATIOS = ("requests_per_s", "p50_ms", "p99_ms", "cpu_us", "both_cpu_us")

CONTENDERS = {
    "asynckv": "driven by steps, like vLLM: it submits when a step begins and takes results when it ends; the engine's "
    "loop runs by itself in between (with steps of 0 ms: whenever the loop turns)",
    "vllm": "NixlConnector as shipped, with NIXL's progress thread",
    "vllm-no-progress-thread": "the same code with an agent without this thread: a harder rival on a small host",
}
QUICK = "1x4096:1:1,1x4096:1:64,32x16384:16:16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options of a run."""

    vllm_python: Path
    vllm_source: Path
    cases: list[Case]
    contenders: list[str]
    steps: list[float]
    rounds: int
    seconds: float
    seed: int


class Engine:
    """A prefill and a decode process of one kind, stopped except in their own windows."""

    def __init__(self, kind: str, fleet: Fleet) -> None:
        self.kind, self._fleet, self._first = kind, fleet, 0
        self.versions: dict[str, Any] = {}

    async def start(self, case: Case, local_blocks: int, given: Given) -> None:
        """Start both processes, and introduce them to each other."""
        setup = Setup(
            role="producer",
            layers=case.layers,
            block_bytes=case.block_bytes,
            num_blocks=REMOTE_BLOCKS,
            seed=given.seed,
            folder=str(self._fleet.folder),
            progress_thread=self.kind != "vllm-no-progress-thread",
        )
        write_config(setup)
        self._prefill = await self._start("prefill", setup, given)
        self._decode = await self._start("decode", replace(setup, role="consumer", num_blocks=local_blocks), given)
        processes = self._fleet.processes
        prefill, decode = await asyncio.gather(*(each.ask("ready", START_S) for each in processes))
        self.versions = decode["versions"]
        for process in processes:
            await process.ask("meet", peer=prefill)
        self.pause()

    async def _start(self, role: str, setup: Setup, given: Given) -> Process:
        name, fields = f"{self.kind}-{role}", asdict(setup)
        if self.kind == "asynckv":
            return await self._fleet.start(name, "scripts.bench.versus.asynckv_side:Side", **fields)
        target = "scripts.bench.versus.vllm_side:Side"
        return await self._fleet.start(name, target, python=str(given.vllm_python), **fields)

    async def window(self, window: Window) -> dict[str, Any]:
        """Measure once.

        Raises:
            Failure: A process ended, a request was not released, failed, or held wrong bytes.
        """
        window = replace(window, first=self._first)
        self._first += window.requests
        for process in self._fleet.processes:
            process.signal(signal.SIGCONT)
        asked = (each.ask("window", WINDOW_S, **asdict(window)) for each in (self._prefill, self._decode))
        served, found = await asyncio.gather(*asked)
        self.pause()
        if found["wrong"] or found["failed"] or served["left"] or found["requests"] != window.requests:
            raise Failure(
                f"{self.kind}: of {window.requests} requests {found['failed']} failed, {found['wrong']} of "
                f"{found['checked']} compared held wrong bytes, {served['left']} were not released"
            )
        # Add both processes, because a side that polls pays for the other side's savings.
        found["prefill_cpu_us"] = served["cpu_s"] / window.requests * 1e6
        found["prefill_faults"] = served["faults"] / window.requests
        found["both_cpu_us"] = found["cpu_us"] + found["prefill_cpu_us"]
        measured: dict[str, Any] = found
        return measured

    def pause(self) -> None:
        """Stop both processes."""
        for process in self._fleet.processes:
            process.signal(signal.SIGSTOP)

    async def end(self) -> None:
        """Let both processes end in order."""
        for process in reversed(self._fleet.processes):
            process.signal(signal.SIGCONT)
            with contextlib.suppress(Failure):
                await process.end()


@contextlib.asynccontextmanager
async def engines(cases: Sequence[Case], given: Given) -> AsyncIterator[dict[str, Engine]]:
    """Start the processes for cases of one geometry."""
    local_blocks = max(case.blocks * case.in_flight for case in cases)
    found: dict[str, Engine] = {}
    fleets: list[Fleet] = []
    async with contextlib.AsyncExitStack() as stack:
        try:
            for kind in dict.fromkeys(given.contenders):
                said(f"starting {kind} for {cases[0].layers} x {cases[0].block_bytes} bytes ...")
                # vLLM's Python has its own modules.
                env = {} if kind == "asynckv" else {"PYTHONPATH": str(given.vllm_source)}
                fleets.append(await stack.enter_async_context(Fleet(env)))
                found[kind] = Engine(kind, fleets[-1])
                stack.push_async_callback(found[kind].end)
                await found[kind].start(cases[0], local_blocks, given)
            yield found
        except Failure as exc:
            words = "\n".join(line for fleet in fleets for line in fleet.last_words())
            raise Failure(f"{exc}\n{words}") from exc


async def measure(case: Case, step_ms: float, running: Mapping[str, Engine], given: Given) -> dict[str, Any]:
    """Run all rounds of one case at one length of step."""
    names = list(running)
    requests = max(2 * case.in_flight, 16)
    window = Window(first=0, requests=requests, blocks=case.blocks, concurrency=case.in_flight, step_ms=step_ms)
    windows: dict[str, Window] = {}
    for name, engine in running.items():
        # The first window is compared in full; the second shows how many requests last `--seconds`.
        await engine.window(replace(window, check_all=True))
        rate = (await engine.window(window))["requests_per_s"]
        most = max(3 * case.in_flight, min(int(rate * given.seconds), MOST_REQUESTS))
        windows[name] = replace(window, requests=most)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(given.rounds):
        said(f"{case}, steps of {step_ms:g} ms, round {number + 1} of {given.rounds}")
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        rounds.append({name: await running[name].window(windows[name]) for name in order})
    measured = (*KEYS, "both_cpu_us", "faults", "prefill_faults")
    figures = {name: {key: median_of([r[name][key] for r in rounds]) for key in measured} for name in names}
    ratios = {
        f"asynckv / {theirs}": {
            key: median_of([r["asynckv"][key] / r[theirs][key] for r in rounds if r[theirs][key]]) for key in RATIOS
        }
        for theirs in names
        if "asynckv" in names and theirs != "asynckv"
    }
    return {"case": str(case), "step_ms": step_ms, "figures": figures, "ratios": ratios, "rounds": rounds}


def said(text: str) -> None:
    """Print the progress."""
    print(text, file=sys.stderr, flush=True)


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of figures and a table of ratios."""
    cpu = ("decode CPU µs/request", "prefill CPU µs/request")
    heads = ("case", "steps", "contender", "requests/s", "GB/s", "p50 ms", "p99 ms", *cpu, "step p99")
    print_table(console, heads, _cells(rows, "figures", KEYS), texts=(0, 2))
    if ratios := _cells(rows, "ratios", RATIOS):
        compared = ("case", "steps", "ratio", "requests/s", "p50", "p99", "decode CPU", "CPU of both sides")
        print_table(console, compared, ratios, texts=(0, 2))
    level = min((i.level for row in rows for r in row["figures"].values() for i in r.values()), default=0.0)
    console.print(
        f"Medians (and intervals); ratios are taken within a round. More requests/s is better; for all other figures "
        f"less is better. CPU: all threads of a process, per request. Intervals hold the true median with {level:.0%} "
        f"if rounds are independent."
    )


def _cells(rows: Sequence[Mapping[str, Any]], part: str, keys: Sequence[str]) -> list[tuple[str, ...]]:
    return [
        (row["case"], f"{row['step_ms']:g} ms" if row["step_ms"] else "busy", name, *(_figure(found[x]) for x in keys))
        for row in rows
        for name, found in row[part].items()
    ]


def _figure(value: Interval) -> str:
    return f"{_short(value.median)} ({_short(value.low)}–{_short(value.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


async def run(given: Given) -> dict[str, Any]:
    """Measure everything."""
    rows: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}
    for geometry in dict.fromkeys((case.layers, case.block_bytes) for case in given.cases):
        cases = [case for case in given.cases if (case.layers, case.block_bytes) == geometry]
        async with engines(cases, given) as running:
            versions |= {kind: engine.versions for kind, engine in running.items()}
            rows += [await measure(case, step, running, given) for case in cases for step in given.steps]
    return {"schema": SCHEMA, "versions": versions, "cpu_count": os.cpu_count(), "seed": given.seed, "rows": rows}


def compare(
    vllm_python: command.VllmPython = command.VLLM_PYTHON,
    vllm_source: command.VllmSource = command.VLLM_SOURCE,
    cases: Annotated[str, typer.Option(help="Cases, comma-separated.")] = QUICK,
    contenders: Annotated[str, typer.Option(help="Contenders, comma-separated.")] = ",".join(CONTENDERS),
    steps_ms: Annotated[str, typer.Option(help="Lengths of a model step; 0 is a busy loop.")] = "0,10,30",
    rounds: Annotated[int, typer.Option(help="Alternating rounds.")] = 5,
    seconds: Annotated[float, typer.Option(help="Approximate length of one window.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of block ids.")] = 0,
    json: command.TableJson = None,
) -> int:
    """Measure asynckv and vLLM's NixlConnector on the same workload, in turns.

    Both move the same blocks of the same memory, in the same order, between two processes on this host over NIXL
    (UCX), and check the bytes. Processes that are not being measured are stopped (SIGSTOP), because vLLM's idle
    processes use a core each. Every round measures each contender once, with another one first; ratios are taken
    within a round.
    """
    chosen = [Case.parse(text) for text in cases.split(",")]
    for case in chosen:
        is_whole = case.block_bytes in (4096, 8192) or not case.block_bytes % 16384
        command.check(
            is_whole and case.blocks <= REMOTE_BLOCKS and not case.order,
            f"--cases {case}: blocks are of 4096, 8192 or a multiple of 16384 bytes, at most {REMOTE_BLOCKS} blocks",
        )
    wanted = command.chosen([name.strip() for name in contenders.split(",")], CONTENDERS, "contender")
    try:
        steps = [float(text) for text in steps_ms.split(",")]
    except ValueError:
        steps = []
    is_good = steps and all(0 <= step <= 10_000 for step in steps)
    command.check(bool(is_good), f"--steps-ms {steps_ms!r} is not a list of milliseconds such as 0,10,30")
    command.check(
        1 <= rounds <= 1000 and 0 < seconds <= 600,
        f"--rounds {rounds} must be in 1 ... 1000, --seconds {seconds:g} in (0, 600]",
    )
    console, _ = consoles(json)
    given = Given(
        vllm_python=vllm_python,
        vllm_source=vllm_source,
        cases=chosen,
        contenders=wanted,
        steps=steps,
        rounds=rounds,
        seconds=seconds,
        seed=seed,
    )
    if wanted != ["asynckv"]:
        command.check_vllm(vllm_python, vllm_source)
    try:
        report = asyncio.run(run(given))
    except Failure as exc:
        said(f"vs_vllm: {exc}")
        return 1
    write_json(json, report)
    show(report["rows"], console)
    return 0


EPILOG = f"""
[bold]Contenders[/bold]

{command.listed(CONTENDERS)}

[bold]Cases[/bold]  LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT

[bold]vLLM is not a dependency[/bold]  `tox run -e vllm` makes its environment; nothing is compiled

[bold]Exit status[/bold]  0 measured, 1 a process or a request failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(compare, EPILOG)
