"""Measure the cost of logging at the default level: `python -m scripts.bench log --help`.

Pairs of engines in one process move small requests, in turns, in a new random order for every round. One pair logs
nothing (level `error`), and another such pair is the control. In a third, the application writes JSON lines to a file
(`configure_logging`); the fourth writes its own file (`LogConfig(file=...)`). The cost of a round is compared with that
of the silent pair in the same round. The result is the median of these ratios, with a 95 % interval (bootstrap).

There are two figures, because each can mislead: requests per wall-clock second, which other load on the host disturbs,
and CPU per request of all threads, including the writing one. A turn also pays for lines that are still unwritten at
its end, and the next turn starts a new thread, so the figure is rather too high.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console
from rich.table import Table

from asynckv import Engine, LogConfig, PrefillRanks
from asynckv.observe.setup import configure_logging
from asynckv.observe.sink import FileSink
from asynckv.ports import TimerHandle
from asynckv.testing import SimControl, SimData, SimNetwork
from asynckv.tools.bench import garbage
from scripts import command
from scripts.bench.engine import Pair, _config, _memory

SCHEMA = 1
MOST = 1.02
"""Largest cost of a request with logging, as a ratio."""

WIDTH = 64
"""Requests in flight."""

RESAMPLES = 2000
MODES = {
    "off": "nothing is logged",
    "again": "nothing is logged either: this shows how much two equal pairs differ",
    "application": "the application's structlog writes JSON lines to a file",
    "file": "the engine writes its own file, in a thread",
}
Round = tuple[float, float]
"""Requests per second, and CPU seconds per request."""


class _Turns:
    """A clock that stops during other pairs' turns, because logs are limited per second of work."""

    def __init__(self) -> None:
        self._lost_s, self._stopped_at = 0.0, math.inf

    def now(self) -> float:
        """Return the seconds of this pair's turns."""
        return min(time.monotonic(), self._stopped_at) - self._lost_s

    def cpu(self) -> float:
        """Return the thread's CPU seconds."""
        return time.thread_time()

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back at that time, or earlier if other pairs had a turn meanwhile."""
        return asyncio.get_running_loop().call_later(max(when - self.now(), 0.0), callback)

    def go_on(self) -> None:
        """Start the clock."""
        if self._stopped_at < math.inf:
            self._lost_s += time.monotonic() - self._stopped_at
            self._stopped_at = math.inf

    def stop(self) -> None:
        """Stop the clock."""
        self._stopped_at = time.monotonic()


@contextlib.asynccontextmanager
async def _pair(mode: str, folder: Path, is_real: bool) -> AsyncIterator[tuple[Pair, _Turns]]:
    own = LogConfig(file=folder / "own-{engine_id}.jsonl" if mode == "file" else "")
    network, clock = SimNetwork(), _Turns()
    async with contextlib.AsyncExitStack() as stack:
        if mode in ("off", "again"):
            configure_logging("error")
        elif mode == "application":
            configure_logging("info", stream=stack.enter_context((folder / "application.jsonl").open("w")))
        else:
            structlog.reset_defaults()
        names, engines = (f"decode-{mode}", f"prefill-{mode}"), []
        for name in names:
            config = replace(_config(name), log=own)
            planes: dict[str, Any] = {} if is_real else {"data": SimData(network, name), "control": SimControl(network)}
            engines.append(await stack.enter_async_context(Engine(config, _memory(WIDTH), clock=clock, **planes)))
        decode, prefill = engines
        yield Pair(decode, [prefill], [PrefillRanks(names[1], [prefill.endpoint])]), clock


async def _measured(rounds: int, requests: int, is_real: bool, folder: Path) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {mode: [] for mode in MODES}
    rng = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        pairs = {mode: await stack.enter_async_context(_pair(mode, folder, is_real)) for mode in MODES}
        # An engine takes its level when it is made, but the rest of the configuration when it logs.
        stream = stack.enter_context((folder / "application.jsonl").open("a"))
        configure_logging("info", stream=stream)
        for pair, clock in pairs.values():
            await pair.requests(requests, WIDTH, [0])
            clock.stop()
        for _ in range(rounds):
            for mode in rng.sample(list(MODES), len(MODES)):
                garbage.settle()
                pair, clock = pairs[mode]
                clock.go_on()
                began = time.perf_counter()
                cpu = await pair.requests(requests, WIDTH, [0])
                left = time.process_time()
                FileSink.end_all()
                cpu += (time.process_time() - left) / requests
                found[mode].append((requests / (time.perf_counter() - began), cpu))
                clock.stop()
        for _, clock in pairs.values():
            clock.go_on()
    return found


def _ratio(costs: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios within rounds, and its interval."""
    rng = random.Random(2)
    ratios = [a / b for a, b in zip(costs, base, strict=True)]
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def _figures(found: Mapping[str, Sequence[Round]]) -> dict[str, dict[str, Any]]:
    base = found["off"]
    out: dict[str, dict[str, Any]] = {}
    for mode, rounds in found.items():
        out[mode] = {
            "requests_per_s": statistics.median(x[0] for x in rounds),
            "cpu_us": statistics.median(x[1] for x in rounds) * 1e6,
            # Both are ratios of time, so above 1 is slower.
            "wall_ratio": _ratio([1 / x[0] for x in rounds], [1 / x[0] for x in base]),
            "cpu_ratio": _ratio([x[1] for x in rounds], [x[1] for x in base]),
        }
    return out


def _met(ratio: Sequence[float]) -> str:
    """Return whether the cost is within `MOST`, or 'maybe' if the interval contains it."""
    return "no" if ratio[1] > MOST else "yes" if ratio[2] <= MOST else "maybe"


def _table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("logging", "requests/s", "CPU/request", "time, of off", "CPU, of off", f"<= {MOST:g}")
    for mode, each in figures.items():
        wall, cpu = each["wall_ratio"], each["cpu_ratio"]
        table.add_row(
            mode,
            f"{each['requests_per_s']:,.0f}",
            f"{each['cpu_us']:.1f} us",
            *("" if mode == "off" else f"{x[0]:.3f} [dim]{x[1]:.3f} ... {x[2]:.3f}[/dim]" for x in (wall, cpu)),
            "" if mode == "off" else _met(cpu),
        )
    return table


def measure(
    rounds: Annotated[int, typer.Option(help="Rounds of each pair.", min=3, max=10_000)] = 51,
    requests: Annotated[int, typer.Option(help="Requests in a round.", min=100, max=1_000_000)] = 4000,
    real: Annotated[bool, typer.Option("--real", help="Use NIXL and ZMQ instead of simulated planes.")] = False,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write the figures; '-' is stdout, without the table.")
    ] = None,
) -> int:
    """Compare engines that log at the default level with engines that do not, in the same run.

    They move small requests, 64 in flight, with both sides in one process. Over simulated planes a request costs least,
    so the cost of logging is largest.
    """
    garbage.settle()
    with tempfile.TemporaryDirectory(prefix="asynckv-bench-log-") as folder:
        with Console(stderr=True).status(f"{rounds} rounds of {requests} requests of each ..."):
            found = asyncio.run(_measured(rounds, requests, real, Path(folder)))
        structlog.reset_defaults()
        lines = {path.name: path.read_text().count("\n") for path in sorted(Path(folder).iterdir())}
    figures = _figures(found)
    if json_to != "-":
        Console(width=120 if not sys.stdout.isatty() else None).print(_table(figures))
        Console().print(f"{sum(lines.values())} lines: {', '.join(f'{n} in {name}' for name, n in lines.items())}")
    if json_to:
        report = {"schema": SCHEMA, "planes": "real" if real else "simulated", "figures": figures, "lines": lines}
        with command.output(json_to) as out:
            json.dump(report, out, indent=2)
            out.write("\n")
    return 1 if any(_met(each["cpu_ratio"]) == "no" for each in figures.values()) else 0


EPILOG = f"""
[bold]Pairs[/bold]

{command.listed(MODES)}

[bold]Example[/bold]

  python -m scripts.bench log --rounds 51 --json - | jq .figures.file.cpu_ratio

[bold]Exit status[/bold]  0 {(MOST - 1):.0%} of CPU at most (or uncertain), 1 more, 2 bad input, 130 Ctrl-C
"""
main = command.script(measure, EPILOG)
