"""A run's figures as data and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from asynckv.bench.driver import Measured, Options
from asynckv.layouts import model_groups
from asynckv.observe.console import printable

__all__ = ["SCHEMA", "is_good", "make", "show"]

SCHEMA = "asynckv.bench/1"
PHASES = ("queue", "handshake", "plan", "post", "read", "detect", "confirm", "release")


def make(options: Options, found: Measured) -> dict[str, Any]:
    """Build the JSON report. A request is complete only if every decode rank completed it."""
    complete: list[float] = []
    failed = cancelled = 0
    for outcomes in found.outcomes.values():
        errors = [o.reason for o in outcomes if o.error]
        if len(outcomes) == options.num_decode and not errors:
            complete.append(max(o.seconds for o in outcomes))
        elif found.interrupted and (not errors or set(errors) <= {"cancelled", "EngineClosed"}):
            cancelled += 1
        else:
            failed += 1
    good = [o for outcomes in found.outcomes.values() for o in outcomes if not o.error]
    window = sum(found.windows_s)
    moved = sum(o.num_bytes for o in good)
    phases = {name: [o.phases.get(name, 0.0) for o in good] for name in PHASES} | {"release": found.release_s}
    return {
        "schema": SCHEMA,
        "interrupted": found.interrupted,
        "config": {
            "model": options.model.name,
            "layers": len(options.model.layers),
            "groups": [{"layers": len(n), **msgspec.to_builtins(kind)} for kind, n in model_groups(options.model)],
            "dtype": options.model.dtype,
            "token_bytes": options.model.token_bytes(),
            "state_bytes": options.model.state_bytes(),
            "prefill": msgspec.to_builtins(options.prefill),
            "decode": msgspec.to_builtins(options.decode),
            "prefix_hit": options.prefix_hit,
            "block_order": options.block_order,
            "concurrency": options.concurrency,
            "warmup": options.warmup,
            "requests": len(options.workload.prompt_tokens),
            "prompt_tokens": options.workload.source,
            "prompts_capped": options.workload.num_capped,
            "prompts_wholly_cached": sum(options.cached(n) == n for n in options.workload.prompt_tokens),
            "verify": options.verify,
            "seed": options.seed,
            "lease_s": options.lease_s,
            "timeout_s": options.timeout_s,
            "transport": options.transport,
        },
        "environment": {
            "asynckv": version("asynckv"),
            "python": platform.python_version(),
            "pyzmq": version("pyzmq"),
            "numpy": version("numpy"),
            "cpu_count": os.cpu_count(),
            "platform": platform.platform(),
            **found.environment,
        },
        "warmup": {
            "failed": sum(bool(o.error) for o in found.warmup),
            "max_latency_s": max((o.seconds for o in found.warmup), default=0.0),
        },
        "requests": {
            "submitted": found.submitted,
            "completed": len(complete),
            "failed": failed,
            "cancelled": cancelled,
        },
        "bytes": {
            "moved": moved,
            "wanted": found.bytes_wanted,
            "verified": found.bytes_verified,
            "wrong": found.bytes_wrong,
        },
        "blocks": {
            "prefill_leaked": found.prefill_leaked,
            "decode_leaked": found.decode_leaked,
            "quarantined": found.quarantined,
        },
        "throughput": {
            "gbytes_per_s": moved / window / 1e9 if window else 0.0,
            "requests_per_s": len(complete) / window if window else 0.0,
        },
        "latency_s": _quantiles(complete, p50=0.5, p90=0.9, p99=0.99, max=1.0),
        "phases_s": {name: _quantiles(values, p50=0.5, p99=0.99) for name, values in phases.items()},
        "cpu_s": found.cpu_s,
        "loop_lag_s": _quantiles(found.lags, p99=0.99, max=1.0),
        "descriptors": {"planned": sum(o.planned for o in good), "posted": sum(o.posted for o in good)},
        "windows": {"count": len(found.windows_s), "seconds": window},
        "leases": found.lease_ends,
        "memory": {"pool_bytes_per_rank": found.pool_bytes, "peak_rss_bytes": found.peak_rss},
        "processes": found.pids,
        "problems": found.problems,
        "errors": _errors(found),
    }


def is_good(report: dict[str, Any]) -> bool:
    """Everything that was asked for completed, every compared byte was right, and nothing leaked."""
    moved, wanted, verified = (report["bytes"][k] for k in ("moved", "wanted", "verified"))
    return (
        report["requests"]["completed"] == report["config"]["requests"]
        and report["bytes"]["wrong"] == 0
        and (report["config"]["verify"] != "full" or verified == wanted)
        and moved >= wanted
        and not report["warmup"]["failed"]
        and not any(report["blocks"].values())
        and not report["problems"]
    )


def show(report: dict[str, Any], console: Console) -> None:
    """Print the table."""
    report = printable(report)
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    requests, moved, latency = report["requests"], report["bytes"], report["latency_s"]
    verified = f"{moved['verified'] / moved['wanted']:.1%} of them verified" if moved["wanted"] else "none wanted"
    ms = {k: f"{v * 1e3:.2f} ms" for k, v in latency.items()}
    rows = [
        (
            "model",
            "{model}, {layers} layers, {token_bytes:,} bytes per token, {state_bytes:,} per state".format(
                **report["config"]
            ),
        ),
        *((role, _side(report["config"][role])) for role in ("prefill", "decode")),
        ("workload", _workload(report["config"])),
        (
            "requests",
            f"{requests['completed']} of {report['config']['requests']} completed, {requests['failed']} failed, "
            f"{requests['cancelled']} cancelled",
        ),
        (
            "bytes",
            f"{_bytes(moved['moved'])} moved, {_bytes(moved['wanted'])} wanted, {verified}, "
            f"{moved['wrong']} bytes wrong",
        ),
        (
            "blocks",
            "{prefill_leaked} leaked on prefill, {decode_leaked} on decode, {quarantined} in quarantine".format(
                **report["blocks"]
            ),
        ),
        ("throughput", "{gbytes_per_s:.3f} GB/s, {requests_per_s:.1f} requests/s".format(**report["throughput"])),
        (
            "warm-up",
            f"{report['config']['warmup']} before the clock ran, the slowest pull took "
            f"{report['warmup']['max_latency_s'] * 1e3:.2f} ms; {report['warmup']['failed']} failed"
            if report["config"]["warmup"]
            else "none: the latencies hold the first connections",
        ),
        ("latency", f"p50 {ms['p50']}, p90 {ms['p90']}, p99 {ms['p99']}, max {ms['max']}"),
        (
            "phases (p50)",
            ", ".join(f"{name} {q['p50'] * 1e3:.2f} ms" for name, q in report["phases_s"].items()),
        ),
        ("CPU", "prefill {prefill:.2f} s, decode {decode:.2f} s".format(**report["cpu_s"])),
        ("loop lag", f"p99 {report['loop_lag_s']['p99'] * 1e3:.2f} ms, max {report['loop_lag_s']['max'] * 1e3:.2f} ms"),
        ("descriptors", "{planned:,} planned, {posted:,} posted after merging".format(**report["descriptors"])),
        ("windows", "{count} of {seconds:.3f} s in all".format(**report["windows"])),
        (
            "transport",
            f"{report['environment'].get('ucx_transports', '?')}, error mode "
            f"{report['environment'].get('ucx_error_handling_mode', '?')}",
        ),
    ]
    if report["config"]["prompts_capped"]:
        rows.insert(1, ("capped", f"{report['config']['prompts_capped']} prompts were cut by --max-prompt-tokens"))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    for text in [*report["problems"], *(f"{n} x {cause}" for cause, n in report["errors"].items())]:
        console.print(f"  ! {text}", style="red", highlight=False)


def _workload(config: dict[str, Any]) -> str:
    whole = config["prompts_wholly_cached"]
    cached = f"; {whole} of {config['requests']} are cached whole, so nothing of them is read" if whole else ""
    return (
        f"{config['prompt_tokens']} tokens, prefix hit {config['prefix_hit']}{cached}; "
        f"{config['concurrency']} in flight, blocks {config['block_order']}, seed {config['seed']}"
    )


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return f"{number:.0f} bytes"


def _side(side: dict[str, Any]) -> str:
    stages = f", pp {side['pp']}" if side["pp"] > 1 else ""
    ratio = f" of {side['ratio']} kernel blocks" if side["ratio"] > 1 else ""
    return f"tp {side['tp']}{stages}, {side['block_size']} tokens per block{ratio}, {side['order']}"


def _quantiles(values: Sequence[float], **at: float) -> dict[str, float]:
    if not values:
        return dict.fromkeys(at, 0.0)
    return {name: float(np.quantile(values, q, method="higher")) for name, q in at.items()}


def _errors(found: Measured) -> dict[str, int]:
    """The first message of every reason, and how often the reason occurred."""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for outcomes in found.outcomes.values():
        for outcome in outcomes:
            if outcome.error:
                text = first.setdefault(outcome.reason, f"{outcome.reason}: {outcome.error}"[:400])
                counts[text] = counts.get(text, 0) + 1
    return counts
