"""Measure stores to and loads from host memory and files: `python -m scripts.bench offload --help`.

This works for all kinds of layouts, in turns with raw copies of the same bytes (`scripts/bench/offload_copies.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from typing import Annotated, Any

import numpy as np
import typer

from asynckv.config import COPY_THREADS, MAX_COPY_THREADS
from asynckv.tools.bench import garbage
from asynckv.tools.output import consoles, write_json
from asynckv.tools.plan.layouts import ORDERS
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from scripts.bench.offload_copies import (
    ABOUT,
    FACTOR,
    LEAST,
    LOOKED_UP,
    Rig,
    figures,
    interval,
    lookup_us,
    measured,
    met,
    show,
)

SCHEMA = 2


def measure(
    order: Annotated[str, typer.Option(help=f"Order of the engine's memory: {', '.join(ORDERS)}.")] = "nhd",
    blocks: Annotated[int, typer.Option(help="Blocks per request.", min=1, max=100_000)] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1, max=1000)] = 32,
    heads: Annotated[int, typer.Option(help="KV heads on this rank, of 128 elements of 2 bytes.", min=1, max=128)] = 8,
    block_size: Annotated[int, typer.Option(help="Tokens per block.", min=1, max=4096)] = 16,
    runs: Annotated[bool, typer.Option("--runs", help="Use contiguous blocks and slots, not scattered ones.")] = False,
    at_once: Annotated[int, typer.Option(help="Requests in flight together.", min=1, max=1000)] = 1,
    transfer_mib: Annotated[int, typer.Option(help="MiB of one transfer; urgent work waits for its end.", min=1)] = 32,
    threads: Annotated[int, typer.Option(help="Threads that copy.", min=1, max=MAX_COPY_THREADS)] = COPY_THREADS,
    rounds: Annotated[int, typer.Option(help="Rounds of every way.", min=3, max=10_000)] = 31,
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for temporary files; by default the system's.")
    ] = "",
    host_only: Annotated[bool, typer.Option("--host-only", help="Measure without files.")] = False,
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Use it for files; by default bypass it if possible.")
    ] = False,
    json: command.TableJson = None,
) -> int:
    """Measure how fast blocks are stored and loaded, compared with raw copies of the same bytes in the same rounds."""
    command.check(order in ORDERS, f"--order {order!r} is none of {', '.join(ORDERS)}")
    blocks *= at_once
    need = 3 * FACTOR * blocks * layers * heads * block_size * 512
    have = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    command.check(
        need < have,
        f"{blocks} blocks of {layers} layers need {need >> 20} MiB of memory, but {have >> 20} are free; use fewer",
    )
    command.check(
        not folder or os.access(folder, os.W_OK | os.X_OK), f"--folder {folder}: files cannot be created there"
    )
    console, progress = consoles(json)
    with contextlib.ExitStack() as stack:
        within = "" if host_only else stack.enter_context(tempfile.TemporaryDirectory("", "akv-", folder or None))
        with progress.status(f"{rounds} rounds of {blocks} blocks ..."):
            model = Model("bench", (Heads(heads, 128),) * layers)
            rig = Rig(
                model, blocks=blocks, max_bytes=transfer_mib << 20, at_once=at_once, block_size=block_size, order=order
            )
            garbage.settle()
            found = asyncio.run(measured(rig, rounds, threads, within, is_run=runs, is_direct=not page_cache))
        ways = figures(found, rig.num_bytes)
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "order": order,
            "blocks": blocks,
            "at_once": at_once,
            "block_bytes": rig.record.num_bytes,
            "record_bytes": rig.record.stride,
            "runs": runs,
            "threads": threads,
            "transfer_mib": transfer_mib,
            "page_cache": page_cache,
            "descriptors_per_block": round(rig.num_descriptors / blocks, 3),
            "tables_ms": round(rig.tables_s * 1e3, 3),
            "plan_us_per_block": round(float(np.median(rig.plan_s)) * at_once / blocks * 1e6, 3),
            "lookup_us": interval(lookup_us(LOOKED_UP)),
            "ways": ways,
        }
    write_json(json, report)
    show(ways, console)
    console.print(
        f"{blocks} blocks of {rig.record.num_bytes:,} bytes in {at_once} requests at once, "
        f"{report['descriptors_per_block']:g} descriptors and {report['plan_us_per_block']:g} us of planning per "
        f"block; {LOOKED_UP:,} blocks are looked up in {report['lookup_us']['median']:.0f} us; on a busy "
        f"machine, CPU says more than time"
    )
    return 1 if any(met(each["of_raw"]) == "no" for each in ways.values()) else 0


EPILOG = f"""
[bold]Ways[/bold]

{command.listed(ABOUT)}

[bold]Examples[/bold]

  python -m scripts.bench offload --order cross-nhd --runs

  python -m scripts.bench offload --host-only --blocks 16 --at-once 8

  python -m scripts.bench offload --heads 1 --json - | jq .ways.store.of_raw

[bold]Exit status[/bold]  0 {LEAST:.0%} of raw or more (or uncertain), 1 less, 2 bad input, 130 Ctrl-C
"""
main = command.script(measure, EPILOG)
