"""Simulate whole services under faults: `python -m tests.lab.simulate --help`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from asynckv.errors import ConfigError
from asynckv.tools.output import write_json
from asynckv.tools.progress import Bar
from scripts import command
from tests.lab import simulation

RUN, OUT = "Run", "Output"

EPILOG = """
[bold]Examples[/bold]

  python -m tests.lab.simulate --seeds 10000

  python -m tests.lab.simulate --first-seed 4711 --seeds 1 --faults loss,crash --events 500

  python -m tests.lab.simulate --first-seed 4711 --seeds 1 --logs DIR; asynckv why DIR/seed-4711/*.jsonl

  python -m tests.lab.simulate --offload --seeds 1000

  python -m tests.lab.simulate --follow --seeds 1000

  python -m tests.lab.simulate --head-start --seeds 1000

[bold]Exit status[/bold]  0 clean, 1 a violation, 2 bad input, 130 Ctrl-C
"""


def simulate(
    seeds: Annotated[
        int, typer.Option(help="How many services to simulate, one per seed.", rich_help_panel=RUN)
    ] = 1000,
    first_seed: Annotated[int, typer.Option(help="The first seed.", rich_help_panel=RUN)] = 0,
    faults: Annotated[
        str, typer.Option(help="What may go wrong: all, none, or kinds with commas between.", rich_help_panel=RUN)
    ] = "all",
    offload: Annotated[
        bool, typer.Option("--offload", help="Engines that offload, and faults of tiers.", rich_help_panel=RUN)
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Requests that are followed, and faults of tickets.", rich_help_panel=RUN)
    ] = False,
    head_start: Annotated[
        bool, typer.Option("--head-start", help="Prompts that are read while they are computed.", rich_help_panel=RUN)
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes; 0 for one per core.", rich_help_panel=RUN)] = 0,
    events: Annotated[
        int, typer.Option(help="Events to print before a violation, after minimising.", rich_help_panel=OUT)
    ] = 120,
    json: Annotated[
        str | None, typer.Option(help="Write the counts there; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Write there what each process logs, in a directory per seed, with how wrong its clock is.",
            rich_help_panel=OUT,
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Simulate whole services under faults, with virtual time, and look for anything that must never happen.

    Every seed stands for some prefill and decode ranks, requests, and a script of faults: lost, late and repeated
    packets, crashes, restarts, freezes, pauses anywhere, transfers that fail, never end, or land after their end.
    Real engines run on simulated planes; freed memory is overwritten at once. The same seed gives the same run.
    """
    services: dict[str, tuple[Sequence[str], simulation.Make]] = {
        "": (simulation.FAULTS, simulation.make_script),
        " --offload": (simulation.TIER_FAULTS, simulation.make_tier_script),
        " --follow": (simulation.FOLLOW_FAULTS, simulation.make_follow_script),
        " --head-start": (simulation.AHEAD_FAULTS, simulation.make_ahead_script),
    }
    option = " --offload" * offload + " --follow" * follow + " --head-start" * head_start
    if option not in services:
        raise ConfigError("--offload, --follow and --head-start are of different services; give one of them")
    known, make = services[option]
    chosen = known if faults == "all" else () if faults == "none" else tuple(x.strip() for x in faults.split(","))
    if strange := [x for x in chosen if x not in known]:
        raise ConfigError(f"--faults {strange[0]!r} is unknown; use all, none, or some of {', '.join(known)}")
    for name, number, least in (
        ("--seeds", seeds, 1),
        ("--first-seed", first_seed, 0),
        ("--jobs", jobs, 0),
        ("--events", events, 0),
    ):
        if not least <= number <= 1 << 40:
            raise ConfigError(f"{name} {number} is outside {least} ... {1 << 40}")
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"--logs {logs}: cannot be written: {exc.strerror}") from exc
    with Bar(Console(stderr=True)) as bar:
        bar.begin("seeds", seeds)
        found = simulation.simulate_many(
            range(first_seed, first_seed + seeds), chosen, jobs or os.cpu_count() or 1, bar.advance, logs, make
        )
    report = {
        "schema": "asynckv.simulate/1",
        "seeds": found.seeds,
        "requested": seeds,
        "interrupted": found.interrupted,
        "first_seed": first_seed,
        "faults": list(chosen),
        "violations": dict(found.violations),
        "counts": dict(sorted(found.counts.items())),
        "seconds": round(found.seconds, 3),
    }
    write_json(json, report)
    console = Console(stderr=json == "-")
    rate = found.seeds / found.seconds if found.seconds else 0.0
    num_faults = sum(n for k, n in found.counts.items() if k.startswith("fault."))
    done = "load.done" if offload else "request.received" if head_start else "pull.complete"
    console.print(
        f"{found.seeds:,} services in {found.seconds:.1f} s ({rate:.0f} per second): "
        f"{found.counts[done]:,} {done.partition('.')[0]}s complete, {num_faults:,} faults, "
        f"{len(found.violations)} violations",
        highlight=False,
    )
    # What is pasted into a shell, or comes out of a script, is neither broken into lines nor read as markup.
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    again = f"python -m tests.lab.simulate{option}"
    if found.interrupted:
        failed = f"; of these failed: {', '.join(map(str, found.violations)) or 'none'}" if found.seeds else ""
        say(
            f"INTERRUPTED after {found.seeds:,} of {seeds:,} seeds (from {first_seed}){failed}\n"
            f"go on: {again} --faults {faults} --first-seed {first_seed + found.seeds} --seeds {seeds - found.seeds}",
            style="yellow",
        )
        raise typer.Exit(130)
    if found.violations:
        seed, violation = next(iter(found.violations.items()))
        console.print(f"\nseed {seed}: {violation}\nminimised:", highlight=False, markup=False)
        small = simulation.minimise(make(seed, chosen))
        for line in small.explain(events):
            say(line)
        say(f"\nagain, all of it: {again} --first-seed {seed} --seeds 1 --faults {faults}")
        drawn = f"{make.__name__}({seed}{'' if faults == 'all' else f', {chosen}'})"
        say(f"minimised, in Python: from tests.lab.simulation import *; minimise({drawn})")
        if others := [str(other) for other in found.violations if other != seed]:
            say(f"other seeds with a violation: {', '.join(others)}")
        raise typer.Exit(1)


main = command.script(simulate, EPILOG)

if __name__ == "__main__":
    sys.exit(main())
