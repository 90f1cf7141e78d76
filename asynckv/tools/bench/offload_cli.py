"""`asynckv bench offload`: the hit rate that tiers of given sizes reach on a workload."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asynckv.arguments import one_of
from asynckv.config import POLICIES
from asynckv.errors import ConfigError
from asynckv.tools.bench.options import Options
from asynckv.tools.console import printable, size
from asynckv.tools.output import HELP, consoles, print_table, taking_options, write_json

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "asynckv.bench.offload/1"
TAKEN = (
    *("model", "hf_config", "layers", "kv_heads", "dtype", "block_size", "order"),
    *("prompt_tokens", "trace", "max_prompt_tokens", "shared_prefix", "requests", "seed"),
)
"""Options of `asynckv bench` that mean the same here."""

MiB = 1 << 20
MOST_MB = 1 << 34
MOST_RUNS = 256
tier, geometry, run = (partial(typer.Option, rich_help_panel=panel) for panel in ("Tiers", "Geometry", "Run"))


@partial(taking_options, declared=Options, names=TAKEN)
def offload(
    host_mb: Annotated[str, tier(help=HELP["bench offload"]["host_mb"])] = "1024",
    file_mb: Annotated[str, tier(help=HELP["bench offload"]["file_mb"])] = "0",
    policy: Annotated[str, tier(help=HELP["bench offload"]["policy"])] = "s3-fifo",
    tp: Annotated[int, geometry(help=HELP["bench offload"]["tp"], min=1, max=1024)] = 1,
    state_tokens: Annotated[int, geometry(help=HELP["bench offload"]["state_tokens"], min=1, max=MiB)] = 512,
    json: Annotated[str | None, run(help=HELP["bench offload"]["json"], metavar="FILE")] = None,
    **given: Any,
) -> None:
    """Compute the share of a workload's tokens that tiers of given sizes would hold.

    This runs the engine's own catalogue but moves no bytes, so the sizes may exceed this machine's. Each request looks
    its prompt up, loads the tokens that are found, "computes" the rest, and stores them. Several sizes or policies make
    one run per combination.
    """
    from asynckv.tools.bench import machine, offload_replay
    from asynckv.tools.bench.experiment import Experiment
    from asynckv.tools.progress import Bar

    shown, errors = consoles(json)
    experiment = Experiment(Options(**given, tp=str(tp)))
    if not experiment.workload.chunks:
        raise ConfigError("these prompts have nothing in common; give --shared-prefix, or a --trace with hash_ids")
    if experiment.sides["prefill"] != experiment.sides["decode"]:
        raise ConfigError("--block-size and --order take one value here: there is one engine")
    runs = [
        offload_replay.Tiers(name, host * MiB, file * MiB)
        for file in _sizes("--file-mb", file_mb, 0)
        for host in _sizes("--host-mb", host_mb, 1)
        for name in dict.fromkeys(one_of("--policy", x.strip(), POLICIES, ConfigError) for x in policy.split(","))
    ]
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{len(runs)} combinations of sizes and policies are asked for; at most {MOST_RUNS} are run")
    layout = offload_replay.kept_layout(experiment.layout("decode", 0, 0), state_tokens)
    hash_tokens = math.gcd(*(group.block_size for group in layout.groups))
    groups = offload_replay.groups_of(layout, hash_tokens)
    align = math.lcm(*(group.block_size for group in groups))
    prompts = offload_replay.Prompts(experiment.workload, hash_tokens, align)
    with Bar(errors) as bar:
        bar.begin("requests", len(prompts) * len(runs))
        done = [tiers._asdict() | offload_replay.replay(prompts, groups, tiers, bar.advance) for tiers in runs]
    workload = experiment.workload
    report = {
        "schema": SCHEMA,
        "environment": machine.environment(),
        "model": experiment.model.name,
        "layers": len(experiment.model.layers),
        "tp": tp,
        "order": experiment.options.order,
        "hash_tokens": hash_tokens,
        "groups": [
            {"name": g.name, "block_size": g.block_size, "record_bytes": g.record_bytes, "window": g.window}
            for g in groups
        ],
        "workload": {
            "source": workload.source,
            "requests": len(prompts),
            "prompt_tokens": sum(workload.prompt_tokens),
            "capped": workload.num_capped,
            "seed": experiment.options.seed,
        },
        "runs": done,
    }
    write_json(json, report)
    _show(report, shown)


def _show(report: dict[str, Any], console: Console) -> None:
    workload, rows = report["workload"], []
    console.print(
        f"{printable(report['model'])}, {report['layers']} layers, tp {report['tp']}; {printable(workload['source'])}: "
        f"{workload['requests']:,} requests, {workload['prompt_tokens']:,} tokens"
    )
    for run in report["runs"]:
        tiers = size(run["host_bytes"]), size(run["file_bytes"]) if run["file_bytes"] else "-"
        rates = (f"{run['hit_rate'][name]:.1%}" for name in ("all", "host", "file"))
        rows.append((run["policy"], *tiers, *rates, f"{sum(run['evicted'].values()):,}"))
    print_table(console, ("policy", "host", "files", "hits", "in host", "in files", "evicted"), rows)
    best = report["runs"][0]["hit_rate"]["best"]
    console.print(f"hits are shares of all prompt tokens; a cache without eviction would find {best:.1%}")


def _sizes(name: str, text: str, least: int) -> list[int]:
    parts = text.split(",")
    if wrong := [x for x in parts if not x.strip().isdecimal() or not least <= int(x) <= MOST_MB]:
        raise ConfigError(f"{name} {text!r}: {wrong[0]!r} is no number of MiB from {least} to {MOST_MB}")
    return list(dict.fromkeys(map(int, parts)))
