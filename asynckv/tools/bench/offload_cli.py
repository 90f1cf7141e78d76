"""`asynckv bench offload`: what tiers are worth for a workload, and how fast they are."""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asynckv.config import POLICIES
from asynckv.errors import ConfigError
from asynckv.tools.bench.options import PROMPT_TOKENS
from asynckv.tools.output import check_writable, write_json
from asynckv.tools.parameters import options_given, taking_options

if TYPE_CHECKING:
    from asynckv.geometry.layout import Layout
    from asynckv.tools.bench.experiment import Experiment
    from asynckv.tools.bench.offload_replay import Prompts, Tiers

EPILOG = """
[bold]Examples[/bold]

  asynckv bench offload --layers 8 --requests 200 --host-mb 256 --file-mb 2048

  asynckv bench offload --trace trace.jsonl --layers 4 --max-prompt-tokens 8192 --requests 300 --directory /mnt/nvme

  asynckv bench offload --trace trace.jsonl --no-bytes --host-mb 65536,262144 --file-mb 0,1048576 --policy s3-fifo,lru

  asynckv bench offload --trace trace.jsonl --no-bytes --block-size 512 --json - | jq '.runs[].hit_rate'

[bold]Exit status[/bold]  0 all good, 1 a byte was wrong or a copy failed, 2 bad input, 130 Ctrl-C
"""

TAKEN = (
    "model",
    "hf_config",
    "layers",
    "kv_heads",
    "dtype",
    "block_size",
    "order",
    "prompt_tokens",
    "trace",
    "max_prompt_tokens",
    "shared_prefix",
    "requests",
    "seed",
)
"""Options of `asynckv bench` that mean the same here."""

MiB = 1 << 20
SPARE = 512 * MiB
MOST_MB = 1 << 34
MOST_RUNS = 256
tier, geometry, run = (partial(typer.Option, rich_help_panel=panel) for panel in ("Tiers", "Geometry", "Run"))


@partial(taking_options, names=TAKEN)
def offload(
    host_mb: Annotated[str, tier(help="MiB of host memory per rank; several sizes with commas between.")] = "1024",
    file_mb: Annotated[str, tier(help="MiB of files per rank, in the same way; 0 for none.")] = "0",
    policy: Annotated[str, tier(help="What leaves first: s3-fifo, lru, or both with a comma between.")] = "s3-fifo",
    directory: Annotated[
        str,
        tier(help="Where files are made, and removed again; else a temporary folder.", show_default="", metavar="DIR"),
    ] = "",
    tp: Annotated[int, geometry(help="Ranks of the engine; one of them is measured.", min=1, max=1024)] = 1,
    state_tokens: Annotated[
        int, geometry(help="Tokens between states that are kept, in models that have some.", min=1, max=MiB)
    ] = 512,
    device_tokens: Annotated[
        int,
        run(help="Tokens that the modelled prefix cache of the accelerator keeps; 0 for none.", min=0, max=1 << 40),
    ] = 0,
    no_bytes: Annotated[
        bool, run("--no-bytes", help="Only decide: hit rates of tiers of any size, thousands of requests a second.")
    ] = False,
    concurrency: Annotated[
        int | None,
        run(help="Requests that are loaded, and then stored, at a time.", show_default="4", min=1, max=1024),
    ] = None,
    json: Annotated[str | None, run(help="Write the report there; - for stdout.", metavar="FILE")] = None,
    **given: Any,
) -> None:
    """Store what a workload computes in tiers, load what it asks for again, verify every byte, report hits and speed.

    One rank's engine with its offload, in this process. Each request looks its prompt up, loads what is found,
    "computes" the rest, and stores that. With several sizes or policies each combination is a run. With --no-bytes
    the catalogue alone decides what would be found, so that sizes may be any.
    """
    from rich.console import Console

    from asynckv.observe.setup import configure_logging
    from asynckv.tools.bench import garbage, offload_replay, offload_report, offload_run
    from asynckv.tools.bench.experiment import Experiment
    from asynckv.tools.bench.memory import Pool
    from asynckv.tools.progress import Bar

    check_writable("--json", json)
    for name, value in (("directory", directory or None), ("concurrency", concurrency)):
        if no_bytes and value is not None:
            raise ConfigError(f"--{name} says nothing with --no-bytes, which moves none; leave one of them out")
    if directory and not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--directory {directory}: no folder in which files can be made")
    experiment = Experiment(_sharing(options_given(given | {"tp": str(tp)})))
    if experiment.sides["prefill"] != experiment.sides["decode"]:
        raise ConfigError("--block-size and --order take one value here: there is one engine")
    runs = [
        offload_replay.Tiers(name, host * MiB, file * MiB)
        for file in _sizes("--file-mb", file_mb, 0)
        for host in _sizes("--host-mb", host_mb, 1)
        for name in _policies(policy)
    ]
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{len(runs)} combinations of sizes and policies are asked for; at most {MOST_RUNS} are run")
    layout = offload_replay.kept_layout(experiment.layout("decode", 0, 0), state_tokens)
    hash_tokens = math.gcd(*(group.block_size for group in layout.groups))
    groups = offload_replay.groups_of(layout, hash_tokens)
    align = math.lcm(*(group.block_size for group in groups))
    prompts = offload_replay.Prompts(experiment.workload, hash_tokens, align, device_tokens)
    errors = Console(stderr=True)
    configure_logging("error", stream=sys.stderr)
    garbage.settle()
    with Bar(errors) as bar:
        total, step = len(prompts) * len(runs), bar.advance
        if no_bytes:
            bar.begin("requests", total)
            done = [tiers._asdict() | offload_replay.replay(prompts, groups, tiers, step) for tiers in runs]
        else:
            at_once = concurrency or 4
            sized = _sized(experiment, prompts, state_tokens, at_once, runs)
            bar.begin("requests", total)
            pool = Pool(sized, experiment.options.seed)
            done = [
                tiers._asdict() | offload_run.run(prompts, groups, tiers, pool, directory, at_once, step)
                for tiers in runs
            ]
    report = offload_report.make(experiment, prompts, layout, groups, done, with_bytes=not no_bytes)
    write_json(json, report)
    offload_report.show(report, errors if json == "-" else Console())
    raise typer.Exit(offload_report.status(report))


def _sized(experiment: Experiment, prompts: Prompts, state_tokens: int, concurrency: int, runs: list[Tiers]) -> Layout:
    """Lay out the engine's memory: room for one wave of requests.

    Raises:
        ConfigError: There is not so much memory.
    """
    from asynckv.tools.bench.experiment import memory_available
    from asynckv.tools.bench.offload_replay import kept_layout
    from asynckv.tools.bench.offload_run import blocks_needed

    one = kept_layout(experiment.layout("decode", 0, 0), state_tokens)
    layout = experiment.layout("decode", 0, 0, blocks_needed(prompts, one.groups, concurrency))
    need = sum(memory.length for memory in layout.memories) + max(tiers.host_bytes for tiers in runs)
    if need > (room := memory_available() - SPARE):
        raise ConfigError(
            f"{concurrency} requests and the host tier take {need / MiB:,.0f} MiB of memory, and {room / MiB:,.0f} can "
            f"be had; shorten prompts with --max-prompt-tokens, use fewer --layers or a smaller --host-mb or "
            f"--concurrency, or only decide with --no-bytes"
        )
    return kept_layout(layout, state_tokens)


def _sharing(options: Any) -> Any:
    """Let prompts come again, where nothing was said of what they have in common."""
    import msgspec

    if options.trace is None and options.shared_prefix is None:
        requests = options.requests or 100
        lengths = (options.prompt_tokens or PROMPT_TOKENS).replace(":", ",").split(",")
        longest = max((int(x) for x in lengths if x.strip().isdecimal()), default=1)
        return msgspec.structs.replace(options, shared_prefix=f"{longest}:{max(1, requests // 4)}")
    return options


def _sizes(name: str, text: str, least: int) -> list[int]:
    found = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not least <= int(part) <= MOST_MB:
            raise ConfigError(f"{name} {text!r}: {part!r} is no number of MiB from {least} to {MOST_MB}")
        found.append(int(part))
    return list(dict.fromkeys(found))


def _policies(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    for part in found:
        if part not in POLICIES:
            raise ConfigError(f"--policy {text!r}: {part!r} is none of {', '.join(POLICIES)}")
    return list(dict.fromkeys(found))
