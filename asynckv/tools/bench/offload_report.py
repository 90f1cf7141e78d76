"""The report of `asynckv bench offload`: what stands in the JSON, and the same for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from asynckv.tools.bench.machine import environment
from asynckv.tools.console import printable, size
from asynckv.tools.output import print_table

if TYPE_CHECKING:
    from asynckv.geometry.layout import Layout
    from asynckv.offload.keys import StoredGroup
    from asynckv.tools.bench.experiment import Experiment
    from asynckv.tools.bench.offload_replay import Prompts

SCHEMA = "asynckv.bench.offload/1"


def make(
    experiment: Experiment,
    prompts: Prompts,
    layout: Layout,
    groups: Sequence[StoredGroup],
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """Put a report together."""
    workload = experiment.workload
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "model": experiment.model.name,
        "layers": len(experiment.model.layers),
        "tp": layout.tp_size,
        "order": experiment.options.order,
        "hash_tokens": prompts.hash_tokens,
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
        "runs": runs,
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print it."""
    workload = report["workload"]
    console.print(
        f"{printable(report['model'])}, {report['layers']} layers, tp {report['tp']}; {printable(workload['source'])}: "
        f"{workload['requests']:,} requests, {workload['prompt_tokens']:,} tokens",
        highlight=False,
    )
    _hits(report["runs"], console)
    best = report["runs"][0]["hit_rate"]["best"]
    console.print(f"share of all prompts' tokens; a cache that forgets nothing would find {best:.1%}", highlight=False)


def _hits(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    rows = []
    for run in runs:
        rate, evicted = run["hit_rate"], run["evicted"]
        row = (
            run["policy"],
            size(run["host_bytes"]),
            size(run["file_bytes"]) if run["file_bytes"] else "-",
            *(f"{rate[name]:.1%}" for name in ("all", "host", "file", "device")),
            f"{evicted['host'] + evicted['file']:,}",
        )
        rows.append(row)
    heads = ("policy", "host", "files", "hits", "in host", "in files", "on device", "evicted")
    print_table(console, heads, rows)
