"""Compare asynckv and vLLM's NixlConnector on the same workload, in turns: `python -m scripts.bench vs_vllm --help`.

Both move the same blocks of the same memory, in the same order, between two processes on this host over NIXL (UCX), and
check the bytes. Processes that are not being measured are stopped (SIGSTOP), because vLLM's idle processes use a core
each. Every round measures each contender once, with another one first; ratios are taken within a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from asynckv.errors import ConfigError
from asynckv.tools.bench.noise import Interval, median_of
from asynckv.tools.bench.processes import Failure
from asynckv.tools.output import check_writable
from scripts import command
from scripts.bench.versus.vllm_side import write_config
from scripts.bench.versus.workload import Setup, Window
from tests.lab.fleet import Fleet, Process

SCHEMA = "asynckv.versus/1"
REMOTE_BLOCKS = 1024
START_S, WINDOW_S = 180.0, 180.0
MOST_REQUESTS = 200_000
KEYS = ("requests_per_s", "gbytes_per_s", "p50_ms", "p99_ms", "cpu_us", "prefill_cpu_us", "step_p99_ms")
RATIOS = ("requests_per_s", "p50_ms", "p99_ms", "cpu_us", "both_cpu_us")

ENGINES = {
    "asynckv": "asynckv",
    "asynckv-announced": "asynckv",
    "asynckv-asyncio": "asynckv",
    "vllm": "vllm",
    "vllm-no-progress-thread": "vllm-no-progress-thread",
    "vllm-pinned": "vllm-pinned",
}
"""The kind of processes in which each contender is measured."""

QUICK = "1x4096:1:1,1x4096:1:64,32x16384:16:16"
ALL = (
    "1x4096:1:1,1x4096:1:64,1x4096:1:256,32x16384:16:1,32x16384:16:16,32x16384:16:64,32x16384:16:256,32x16384:64:1,"
    "32x16384:64:16,32x16384:64:64,32x16384:16:16:contiguous,32x16384:64:16:contiguous"
)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    layers: int
    block_bytes: int
    blocks: int
    concurrency: int
    order: str

    def __str__(self) -> str:
        order = ":contiguous" if self.order == "contiguous" else ""
        return f"{self.layers}x{self.block_bytes}:{self.blocks}:{self.concurrency}{order}"

    @property
    def geometry(self) -> tuple[int, int]:
        """Return the geometry, for which processes are started."""
        return self.layers, self.block_bytes

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse `32x16384:16:64` or `...:contiguous`.

        Raises:
            ValueError: The text is not a case.
        """
        shape, blocks, concurrency, *order = text.strip().split(":")
        layers, block_bytes = shape.split("x")
        case = cls(int(layers), int(block_bytes), int(blocks), int(concurrency), *(order or ["random"]))
        limits = ((case.layers, 1024), (case.blocks, REMOTE_BLOCKS), (case.concurrency, 4096))
        sizes = (4096, 8192) if case.block_bytes < 16384 else range(16384, 1 << 24, 16384)
        if not all(1 <= value <= most for value, most in limits) or case.block_bytes not in sizes:
            raise ValueError(text)
        if case.order not in ("random", "contiguous"):
            raise ValueError(text)
        return case


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options of a run."""

    vllm_python: str | None
    vllm_source: Path | None
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
            keep_affinity=self.kind == "vllm-pinned",
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
        python = given.vllm_python or sys.executable
        return await self._fleet.start(name, "scripts.bench.versus.vllm_side:Side", python=python, **fields)

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
    local_blocks = max(case.blocks * case.concurrency for case in cases)
    found: dict[str, Engine] = {}
    fleets: list[Fleet] = []
    async with contextlib.AsyncExitStack() as stack:
        try:
            for kind in dict.fromkeys(ENGINES[name] for name in given.contenders):
                said(f"starting {kind} for {cases[0].layers} x {cases[0].block_bytes} bytes ...")
                # vLLM's Python has its own modules.
                env = {} if kind == "asynckv" else {"PYTHONPATH": str(given.vllm_source or "")}
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
    names = [n for n in given.contenders if n != "asynckv-asyncio" or not step_ms]
    windows: dict[str, Window] = {}
    for name in names:
        window = Window(
            first=0,
            requests=max(2 * case.concurrency, 16),
            blocks=case.blocks,
            concurrency=case.concurrency,
            order=case.order,
            step_ms=None if name == "asynckv-asyncio" else step_ms,
            announced=name == "asynckv-announced",
        )
        # The first window is compared in full; the second shows how many requests last `--seconds`.
        engine = running[ENGINES[name]]
        await engine.window(replace(window, check_all=True))
        rate = (await engine.window(window))["requests_per_s"]
        most = max(3 * case.concurrency, min(int(rate * given.seconds), MOST_REQUESTS))
        windows[name] = replace(window, requests=most)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(given.rounds):
        said(f"{case}, steps of {step_ms:g} ms, round {number + 1} of {given.rounds}")
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        rounds.append({name: await running[ENGINES[name]].window(windows[name]) for name in order})
    measured = (*KEYS, "both_cpu_us", "faults", "prefill_faults")
    figures = {name: {key: median_of([r[name][key] for r in rounds]) for key in measured} for name in names}
    ratios = {
        f"{mine} / {theirs}": {
            key: median_of([r[mine][key] / r[theirs][key] for r in rounds if r[theirs][key]]) for key in RATIOS
        }
        for mine in names
        if mine.startswith("asynckv")
        for theirs in names
        if theirs.startswith("vllm")
    }
    return {"case": str(case), "step_ms": step_ms, "figures": figures, "ratios": ratios, "rounds": rounds}


def said(text: str) -> None:
    """Print the progress."""
    print(text, file=sys.stderr, flush=True)


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of figures and a table of ratios."""
    table = Table(title="Medians over the rounds (and interval)", box=None, padding=(0, 1))
    cpu = ("decode CPU µs/request", "prefill CPU µs/request")
    for title in ("case", "steps", "contender", "requests/s", "GB/s", "p50 ms", "p99 ms", *cpu, "step p99"):
        table.add_column(title, justify="left" if title in ("case", "contender") else "right", no_wrap=True)
    for row in rows:
        for name, figures in row["figures"].items():
            cells = [_figure(figures[key]) for key in KEYS]
            table.add_row(row["case"], _steps(row, name), name, *cells)
        table.add_section()
    console.print(table)
    table = Table(title="Ratios within a round: median (and interval)", box=None, padding=(0, 1))
    for title in ("case", "steps", "ratio", "requests/s", "p50", "p99", "decode CPU", "CPU of both sides"):
        table.add_column(title, justify="left" if title in ("case", "ratio") else "right", no_wrap=True)
    for row in rows:
        for name, ratios in row["ratios"].items():
            table.add_row(row["case"], _steps(row, name), name, *(_figure(ratios[key]) for key in RATIOS))
        table.add_section()
    if table.row_count:
        console.print(table)
    level = min((i.level for row in rows for r in row["figures"].values() for i in r.values()), default=0.0)
    console.print(
        f"More requests/s is better; for all other figures less is better. CPU: all threads of a process, per request. "
        f"Intervals hold the true median with {level:.0%} if rounds are independent."
    )


def _steps(row: Mapping[str, Any], name: str) -> str:
    if "asynckv-asyncio" in name:
        return "none"
    return f"{row['step_ms']:g} ms" if row["step_ms"] else "busy"


def _figure(value: Interval) -> str:
    return f"{_short(value.median)} ({_short(value.low)}–{_short(value.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def missing(given: Given) -> str:
    """Return the reason why vLLM cannot run, or an empty text."""
    if not given.vllm_python:
        return "vLLM is not installed here: give --vllm-python (and --vllm-source), or --contenders asynckv"
    check = (
        "import importlib.util, sys\n"
        "sys.exit(' '.join(n for n in sys.argv[1:] if not importlib.util.find_spec(n)) or 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(given.vllm_source or "")}
    try:
        argv = [given.vllm_python, "-c", check, "vllm", "nixl", "torch"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    except OSError as exc:
        return f"--vllm-python {given.vllm_python}: {exc.strerror}"
    if done.returncode:
        return f"vLLM is not installed: {given.vllm_python} lacks {done.stderr.strip() or 'something'}"
    return ""


async def run(given: Given) -> dict[str, Any]:
    """Measure everything."""
    rows: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}
    for geometry in dict.fromkeys(case.geometry for case in given.cases):
        cases = [case for case in given.cases if case.geometry == geometry]
        async with engines(cases, given) as running:
            versions |= {kind: engine.versions for kind, engine in running.items()}
            rows += [await measure(case, step, running, given) for case in cases for step in given.steps]
    return {"schema": SCHEMA, "versions": versions, "cpu_count": os.cpu_count(), "seed": given.seed, "rows": rows}


def compare(
    vllm_python: Annotated[str | None, typer.Option(help="Python of the environment with vLLM's requirements.")] = None,
    vllm_source: Annotated[
        Path | None, typer.Option(help="Folder of vLLM's source, if it is not installed there.")
    ] = None,
    cases: Annotated[str, typer.Option(help="Cases, comma-separated, or `quick` or `all`.")] = "quick",
    contenders: Annotated[
        str, typer.Option(help="Contenders, comma-separated.")
    ] = "asynckv,asynckv-announced,asynckv-asyncio,vllm,vllm-no-progress-thread",
    steps_ms: Annotated[str, typer.Option(help="Lengths of a model step; 0 is a busy loop.")] = "0,10,30",
    rounds: Annotated[int, typer.Option(help="Alternating rounds.")] = 5,
    seconds: Annotated[float, typer.Option(help="Approximate length of one window.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of block ids.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the report; '-' is stdout, without the tables.")
    ] = None,
) -> int:
    """Measure asynckv and vLLM's NixlConnector on the same workload, in turns.

    Both move the same blocks of the same memory, in the same order, between two processes on this host over NIXL
    (UCX), and check the bytes. Processes that are not being measured are stopped (SIGSTOP), because vLLM's idle
    processes use a core each. Every round measures each contender once; ratios are taken within a round.
    """
    names = {"quick": QUICK, "all": ALL}.get(cases, cases)
    try:
        chosen = [Case.parse(text) for text in names.split(",")]
    except (ValueError, TypeError):
        raise ConfigError(
            f"--cases {names!r}: a case is LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT[:contiguous], block bytes 4096, "
            f"8192 or a multiple of 16384, at most {REMOTE_BLOCKS} blocks"
        ) from None
    wanted = [name.strip() for name in contenders.split(",")]
    unknown = [name for name in wanted if name not in ENGINES]
    command.check(not unknown, f"--contenders: {', '.join(unknown)} unknown; choose from {', '.join(ENGINES)}")
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
    check_writable("--json", json)
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
    if any(name.startswith("vllm") for name in wanted) and (why := missing(given)):
        raise ConfigError(f"{why}\n{INSTALL}")
    try:
        report = asyncio.run(run(given))
    except Failure as exc:
        said(f"vs_vllm: {exc}")
        return 1
    if json == "-":
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        if json:
            Path(json).write_bytes(msgspec.json.encode(report))
        show(report["rows"], Console() if sys.stdout.isatty() else Console(width=240))
    return 0


INSTALL = """To install it separately (no GPU, nothing is compiled, a few minutes):

  python3.11 -m venv VENV

  VENV/bin/pip install torch==2.13.0 numpy setuptools setuptools_scm setuptools-rust wheel packaging jinja2 cmake ninja

  VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 SETUPTOOLS_SCM_PRETEND_VERSION=0.33.0 \\
    VENV/bin/pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.33.0 && tar xzf vllm-0.33.0.tar.gz

  VENV/bin/pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1 -r scripts/bench/versus/requirements-vllm.txt

then: python -m scripts.bench vs_vllm --vllm-python VENV/bin/python --vllm-source vllm-0.33.0
"""
CONTENDERS = {
    "asynckv": "driven by steps, like vLLM: it submits when a step begins and takes results when it ends; the engine's "
    "loop runs by itself in between (with steps of 0 ms: whenever the loop turns)",
    "asynckv-announced": "the same, but requests are announced a round of the loop ahead, so that claims arrive early",
    "asynckv-asyncio": "no steps: a task per request in flight, as an asyncio application pulls (next to 0 ms steps)",
    "vllm": "NixlConnector as shipped, with NIXL's progress thread",
    "vllm-no-progress-thread": "the same code with an agent without this thread: a harder rival on a small host",
    "vllm-pinned": "as shipped, and with vLLM's CPU pinning of the worker",
}
EPILOG = f"""
[bold]Contenders[/bold]

{command.listed(CONTENDERS)}

[bold]Cases[/bold]  LAYERSxBLOCK_BYTES:BLOCKS:IN_FLIGHT, or with :contiguous instead of random block ids; `quick`, `all`

[bold]vLLM is not a dependency[/bold]

{INSTALL}
[bold]Exit status[/bold]  0 measured, 1 a process or a request failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(compare, EPILOG)
