"""Count the Python calls of one warm small pull, on either side. `python -m scripts.count_calls --help`.

Two engines run on simulated planes (no sockets, no NIXL) in one event loop. After a warm-up, every call of a function
of the package is counted for the engine that caused it. Code below the ports is not counted. The figures are exact and
repeatable, even on a busy host, because the engines' clock stands still. What a change costs is the CPU time of such a
pull, on a quiet host and in turns with another checkout: a call more may be cheaper than the lines that it replaces.

    python -m scripts.count_calls                        # a table of files
    python -m scripts.count_calls --json -               # {"decode": ..., "prefill": ..., "files": ...}
    python -m scripts.count_calls --cpu --against ../other
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

import asynckv
from asynckv import Engine, EngineConfig, PrefillRanks
from asynckv.testing import ManualClock, SimControl, SimData, SimNetwork
from asynckv.tools.bench.memory import Pool
from asynckv.tools.output import print_table, write_json
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model

PACKAGE = str(Path(asynckv.__file__).parent)
BELOW = (f"{PACKAGE}/testing", f"{PACKAGE}/observe")
BLOCKS = 64


class Calls:
    """A profiler that counts calls."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._stack: list[str] = []
        self._last: dict[str, str] = {}
        self.by_side: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()  # calls into another file than that of the side's call before
        self.by_file: Counter[tuple[str, str]] = Counter()
        self.by_function: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            owner = frame.f_locals.get("self")
            side = self._names.get(id(owner)) or (self._stack[-1] if self._stack else "")
            self._stack.append(side)
            if side and code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(BELOW):
                file = code.co_filename.removeprefix(f"{PACKAGE}/")
                self.by_side[side] += 1
                self.changes[side] += self._last.get(side, file) != file
                self._last[side] = file
                self.by_file[side, file] += 1
                self.by_function[side, f"{file}:{code.co_qualname}"] += 1
        elif event == "return" and self._stack:
            self._stack.pop()


async def count(warm: int, pulls: int, profiles: bool = True) -> tuple[Calls, float]:
    """Pull one block after another; return the calls of the last pulls, and the CPU seconds of both sides for one."""
    network = SimNetwork()
    sides, clock = dict[str, Engine](), ManualClock()
    layout = model_layout(Model("small", (Heads(2, 32),)), num_blocks=BLOCKS)
    for name in ("prefill", "decode"):
        data, control, memory = SimData(network, name), SimControl(network), Pool(layout, seed=0).registration
        sides[name] = Engine(EngineConfig(engine_id=name), memory, data=data, control=control, clock=clock)
    prefill, decode = sides.values()
    async with prefill, decode:
        group = PrefillRanks("prefill", [prefill.endpoint])
        calls = Calls({id(x): side for side, engine in sides.items() for x in (engine, engine._driver, engine._home)})
        began = 0.0
        for number in range(warm + pulls):
            params = group.make_params(f"p{number}", [(0, [1])], 16, written=True)
            if number == warm:
                sys.setprofile(calls if profiles else None)
                began = time.process_time()
            lent = prefill.lend(params)
            await decode.pull(f"d{number}", [(0, [2])], params)
            await lent.wait_released()
        # Let the release be acknowledged, and the timers be set.
        for _ in range(20):
            await asyncio.sleep(0)
        sys.setprofile(None)
        return calls, (time.process_time() - began) / pulls


def cpu_us(trees: Sequence[Path], rounds: int, warm: int, pulls: int) -> list[list[float]]:
    """Measure the CPU microseconds of a pull in each tree, in turns, each time in a process of its own."""
    asked = [sys.executable, __file__, "--one", "--warm", str(warm), "--pulls", str(pulls)]
    out: list[list[float]] = [[] for _ in trees]
    for number in range(rounds):
        for i in range(len(trees)):
            tree = (i + number) % len(trees)
            environment = os.environ | {"PYTHONPATH": str(trees[tree].resolve())}
            done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True, timeout=300)
            out[tree].append(float(done.stdout))
    return out


def show_cpu(against: Path | None, rounds: int, warm: int, pulls: int) -> None:
    here = Path(PACKAGE).parent
    trees = [here] + ([against] if against else [])
    found = cpu_us(trees, rounds, warm, pulls)
    for tree, figures in zip(trees, found, strict=True):
        low, middle, high = statistics.quantiles(figures, n=4)
        print(f"{tree}: {middle:.0f} us of CPU for a pull of both sides (quartiles {low:.0f} to {high:.0f})")
    if against:
        low, middle, high = statistics.quantiles([x / y for x, y in zip(*found, strict=True)], n=4)
        print(f"ratio of {here.name} to {against.name}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")


def main(
    warm: Annotated[int, typer.Option(min=1, help="Pulls before counting begins.")] = 20,
    pulls: Annotated[int, typer.Option(min=1, help="Pulls that are counted.")] = 20,
    functions: Annotated[int, typer.Option(min=0, help="Show this many functions of each side.")] = 0,
    to_json: Annotated[str, typer.Option("--json", help="Write JSON to this file; - for stdout.")] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure CPU time, in rounds, instead of calls.")] = False,
    against: Annotated[Path | None, typer.Option(help="Another checkout, measured in turns.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of --cpu.")] = 15,
    one: Annotated[bool, typer.Option("--one", hidden=True)] = False,
) -> None:
    """Count the Python calls of one warm small pull, or measure its CPU time."""
    if one:
        print(1e6 * asyncio.run(count(warm, pulls, profiles=False))[1])
        return
    if cpu:
        return show_cpu(against, rounds, max(warm, 100), max(pulls, 300))
    calls, _ = asyncio.run(count(warm, pulls))
    found: dict[str, Any] = {side: round(number / pulls, 2) for side, number in sorted(calls.by_side.items())}
    changes = {side: round(number / pulls, 2) for side, number in sorted(calls.changes.items())}
    files = {f"{side} {file}": round(n / pulls, 2) for (side, file), n in calls.by_file.most_common()}
    if to_json:
        write_json(to_json, found | {"changes": changes, "files": files})
        return
    console, rows = Console(), sorted(calls.by_file.items(), key=lambda x: (x[0][0], -x[1]))
    cells = [(side, file, f"{number / pulls:.2f}") for (side, file), number in rows]
    print_table(console, ("side", "file", "calls per pull"), cells, texts=(0, 1))
    for side in found if functions else ():
        for (of, name), number in calls.by_function.most_common():
            if of == side and number / pulls >= 0.5:
                console.print(f"{side:8} {number / pulls:6.2f} {name}", highlight=False)
    console.print(found, "changes of file:", changes)


if __name__ == "__main__":
    typer.run(main)
