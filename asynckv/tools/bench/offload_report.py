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
    *,
    with_bytes: bool,
) -> dict[str, Any]:
    """Put a report together."""
    workload = experiment.workload
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "mode": "bytes" if with_bytes else "catalogue alone",
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


def status(report: Mapping[str, Any]) -> int:
    """Exit status: 1 if a byte was wrong, or something failed."""
    return int(any(any(run.get("faults", {}).values()) for run in report["runs"]))


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
    if report["mode"] == "bytes":
        _speeds(report["runs"], console)
        _faults(report["runs"], console)


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
            f"{run['requests_per_s']:,.0f}",
        )
        rows.append(row)
    heads = ("policy", "host", "files", "hits", "in host", "in files", "on device", "evicted", "requests/s")
    print_table(console, heads, rows)


def _speeds(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    """How fast, in the order of the runs above."""
    heads = (
        "policy",
        "load GB/s",
        "from host",
        "store GB/s",
        "load ms p50",
        "p99",
        "from files p50",
        "p99",
        "lookup µs p50/p99",
    )
    rows = []
    for run in runs:
        speed, near, far = run["gb_per_s"], run["load_s"], run["load_with_files_s"]
        row = (
            run["policy"],
            *(f"{speed[name]:.2f}" for name in ("load", "load_from_host", "store")),
            *(f"{of[at] * 1e3:.1f}" for of in (near, far) for at in ("p50", "p99")),
            "/".join(f"{run['lookup_s'][at] * 1e6:.0f}" for at in ("p50", "p99")),
        )
        rows.append(row)
    print_table(console, heads, rows)


def _faults(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    compared, faults = sum(run["compared_bytes"] for run in runs), dict[str, int]()
    for run in runs:
        for name, count in run["faults"].items():
            faults[name] = faults.get(name, 0) + count
        for text, count in run["errors"].items():
            console.print(f"{count:,} times {printable(text)}", style="red", highlight=False, soft_wrap=True)
    said = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in faults.items() if count)
    console.print(f"{compared:,} loaded bytes compared; {said or 'none wrong, nothing failed'}", highlight=False)
