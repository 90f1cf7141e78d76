"""What a request's lists of blocks cost on the threads that have no time: pure code, no engine.

A scheduler makes params once per request, and every rank checks them on arrival. Per number of scattered blocks one
JSON line says how long that takes, as multiples of what nobody gets around: making the list of pairs that travels. So
machines and loads can be compared. With `--before`, another tree (`git archive COMMIT | tar -x -C DIR`) does the same
by turns with this one, and the ratios of the two are said as well.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from asynckv.core.types import Endpoint, decode_params
from asynckv.core.wire import blocks_digest
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.layout import Group, Layout
from asynckv.scheduler import PrefillGroup
from scripts import command

SPREAD = 4
"""Scattered among so many times as many blocks."""


def measure(blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Time each step of one request: its fastest and its median run, in microseconds."""
    ids = random.Random(blocks).sample(range(1, SPREAD * blocks + 1), blocks)
    array, tokens = np.array(ids), 16 * blocks
    ranks = [Endpoint(0, "tcp://127.0.0.1:40001", "0" * 32)]
    group = PrefillGroup("prefill", ranks, null_block=0)
    plain = group.make_params("cmpl-0123456789abcdef", [(0, ids)], tokens)
    params = decode_params(json.loads(json.dumps(plain)))
    layout = Layout(memories=(), groups=(Group("g", 16, SPREAD * blocks + 1),), views=())
    steps: dict[str, Callable[[], object]] = {
        "pairs": lambda: list(zip(ids, repeat(1))),
        "make": lambda: group.make_params("cmpl-0123456789abcdef", [(0, ids)], tokens),
        "make_of_array": lambda: group.make_params("cmpl-0123456789abcdef", [(0, array)], tokens),
        "decode": lambda: decode_params(plain),
        "digest": lambda: blocks_digest(params.groups, tokens, True),
        "pull_groups": lambda: check_block_ids(layout, [(0, ids)], tokens),
    }
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            took[name].append((time.perf_counter() - began) * 1e6)
    return {name: {"min_us": min(times), "median_us": statistics.median(times)} for name, times in took.items()}


def elsewhere(tree: str, blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measure another tree, in a process of its own."""
    line = [sys.executable, str(Path(__file__)), "--blocks", str(blocks), "--rounds", str(rounds), "--raw"]
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": tree}, stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def ratios(mine: dict[str, dict[str, float]], other: dict[str, dict[str, float]], suffix: str) -> dict[str, float]:
    """How many times as long as the other's each step took, by fastest and by median run."""
    return {
        f"{name}_{suffix}_{which.removesuffix('_us')}": round(found[which] / other[name][which], 2)
        for name, found in mine.items()
        for which in ("min_us", "median_us")
        if name != "pairs"
    }


def params(
    blocks: Annotated[list[int] | None, typer.Option(min=1, help="Scattered, of one request.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each step, by turns.")] = 300,
    before: Annotated[str, typer.Option(metavar="DIR", help="Another tree, to compare with.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Microseconds alone.")] = False,
) -> None:
    """Measure what a request's lists of blocks cost; prints a JSON line per number of blocks.

    make and decode are those of params, pull_groups is what a pull does with its own lists, digest what it does once
    with those of the params. `_x_pairs` is how many times as long as making the pairs alone, `_x_before` as the other
    tree.
    """
    command.check(not before or Path(before, "asynckv").is_dir(), f"--before {before}: there is no asynckv in it")
    for number in blocks or (16, 100, 1000, 8192):
        mine = measure(number, rounds)
        if raw:
            print(json.dumps(mine))
            continue
        line: dict[str, object] = {"blocks": number}
        line |= {f"{name}_us": round(found["median_us"], 1) for name, found in mine.items()}
        line |= ratios(mine, dict.fromkeys(mine, mine["pairs"]), "x_pairs")
        if before:
            turns = [(elsewhere(before, number, rounds), measure(number, rounds)) for _ in range(5)]
            theirs, ours = (
                {n: {w: statistics.median(t[side][n][w] for t in turns) for w in mine[n]} for n in mine}
                for side in (0, 1)
            )
            line |= ratios(ours, theirs, "x_before")
        print(json.dumps(line))


EPILOG = """
[bold]Examples[/bold]

  python -m scripts.bench_params --blocks 1000 | jq '[.make_us, .decode_us]'

  python -m scripts.bench_params --before /tmp/old | jq '[.blocks, .make_x_before_median]'

[bold]Exit status[/bold]  0 measured, 2 bad input, 130 Ctrl-C
"""
main = command.script(params, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
