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

from asynckv.bench import floor
from asynckv.bench.driver import Measured
from asynckv.bench.experiment import Experiment
from asynckv.bench.schedule import Engines, Request
from asynckv.bench.workload import Workload
from asynckv.observe.console import printable
from asynckv.observe.release import release
from asynckv.tools.layouts import model_groups

__all__ = ["SCHEMA", "is_good", "make", "rows", "show", "status"]

SCHEMA = "asynckv.bench/1"
PHASES = ("queue", "handshake", "plan", "post", "read", "detect", "confirm", "release")


def make(experiment: Experiment, found: Measured) -> dict[str, Any]:
    """Build the JSON report. A request is complete only if every decode rank completed it."""
    schedule = experiment.schedule()
    completed = 0
    complete: list[float] = []
    calls: list[float] = []
    failed = cancelled = cut = 0
    asked = {r.number for r in schedule if r.cancel_s is not None}
    for number, outcomes in found.outcomes.items():
        errors = [o.reason for o in outcomes if o.error]
        is_whole = len(outcomes) == experiment.num_ranks(number)
        if is_whole and not errors:
            completed += 1
            if not any(o.num_bytes for o in outcomes):
                continue  # cached whole: an answer of the engine's own, not a transfer
            complete.append(max(o.seconds for o in outcomes))
            calls.append(max(o.seconds - o.late for o in outcomes))
        elif is_whole and number in asked and set(errors) == {"cancelled"}:
            cut += 1
        elif found.interrupted and (not errors or set(errors) <= {"cancelled", "EngineClosed"}):
            cancelled += 1
        else:
            failed += 1
    good = [o for outcomes in found.outcomes.values() for o in outcomes if not o.error]
    window = sum(found.windows_s)
    moved = sum(o.num_bytes for o in good)
    phases = {name: [o.phases.get(name, 0.0) for o in good if o.num_bytes] for name in PHASES} | {
        "release": found.release_s
    }
    return {
        "schema": SCHEMA,
        "interrupted": found.interrupted,
        "config": _config(experiment, schedule),
        "environment": {
            "asynckv": release(),
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
            "completed": completed,
            "read_nothing": completed - len(complete),
            "failed": failed,
            "cancelled": cancelled,
        },
        "cancellations": {
            "asked": len(asked),
            "cancelled": cut,
            "too_late": sum(n in asked for n, o in found.outcomes.items() if not any(x.error for x in o)),
        },
        "prefix": _prefix(experiment.workload, found, schedule),
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
        "pull_s": _quantiles(calls, p50=0.5, p90=0.9, p99=0.99, max=1.0),
        "schedule": {
            "clock": "scheduled arrival" if experiment.arrivals.is_open else "call of pull",
            "scheduled_per_s": found.submitted / found.scheduled_s if found.scheduled_s else 0.0,
            "achieved_per_s": completed / window if window else 0.0,
            "late_s": _quantiles(
                [o.late for outcomes in found.outcomes.values() for o in outcomes], p50=0.5, p99=0.99, max=1.0
            ),
        },
        "phases_s": {name: _quantiles(values, p50=0.5, p99=0.99) for name, values in phases.items()},
        "cpu_s": found.cpu_s,
        "loop_lag_s": _quantiles(found.lags, p99=0.99, max=1.0),
        "descriptors": {"planned": sum(o.planned for o in good), "posted": sum(o.posted for o in good)},
        "windows": {"count": len(found.windows_s), "seconds": window},
        "leases": found.lease_ends,
        "memory": {"pool_bytes_per_rank": found.pool_bytes, "peak_rss_bytes": found.peak_rss},
        "processes": found.pids,
        "problems": found.problems + floor.faults(found.floor),
        "errors": _errors(found, asked),
        **floor.summary(found.floor),
    }


def _config(experiment: Experiment, schedule: Sequence[Request]) -> dict[str, Any]:
    """Say what was run: the options as they are, and what the others amount to."""
    options, model, work = experiment.options, experiment.model, experiment.workload
    return {
        **options.record(),
        "model": model.name,
        "layers": len(model.layers),
        "groups": [{"layers": len(n), **msgspec.to_builtins(kind)} for kind, n in model_groups(model)],
        "dtype": model.dtype,
        "token_bytes": model.token_bytes(),
        "state_bytes": model.state_bytes(),
        **msgspec.to_builtins(experiment.sides),
        "requests": len(work.prompt_tokens),
        "prompt_tokens": work.source,
        "prompts_capped": work.num_capped,
        "prompts_wholly_cached": sum(r.cached == r.tokens for r in schedule),
        "engines": msgspec.to_builtins(experiment.engines),
        "arrivals": experiment.arrivals.kind,
        # These mean nothing without what they are about.
        "rounds": options.rounds if options.floor else None,
        "prefix_cache": options.prefix_cache if work.chunks else None,
    }


def is_good(report: dict[str, Any]) -> bool:
    """Everything completed but what was to be cancelled, every compared byte was right, and nothing leaked."""
    moved, wanted, verified = (report["bytes"][k] for k in ("moved", "wanted", "verified"))
    return (
        report["requests"]["completed"] + report["cancellations"]["cancelled"] == report["config"]["requests"]
        and report["bytes"]["wrong"] == 0
        and (report["config"]["verify"] != "full" or verified == wanted)
        and moved >= wanted
        and not report["warmup"]["failed"]
        and not any(report["blocks"].values())
        and not report["problems"]
    )


def status(found: Measured, report: dict[str, Any]) -> int:
    """Return the exit status of a run."""
    return 130 if found.interrupted else 0 if is_good(report) else 1


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Say the report in rows of a table: a name, and a text."""
    requests, moved, latency = report["requests"], report["bytes"], report["latency_s"]
    verified = f"{moved['verified'] / moved['wanted']:.1%} of them verified" if moved["wanted"] else "none wanted"
    nothing = requests["completed"] == requests["read_nothing"] > 0
    ms = {k: _seconds(v) for k, v in latency.items()}
    apart = f", and {requests['read_nothing']} that read nothing" if requests["read_nothing"] else ""
    left = report["config"]["requests"] - requests["submitted"]
    clock = report["schedule"]["clock"]
    found = [
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
            f"{requests['cancelled']} cancelled by Ctrl-C" + (f", {left} never submitted" if left else ""),
        ),
        *_cancellations(report["cancellations"]),
        *_shared(report["prefix"]),
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
        (
            "throughput",
            "{gbytes_per_s:.3f} GB/s, {requests_per_s:.1f} requests/s".format(**report["throughput"]) + apart,
        ),
        (
            "warm-up",
            f"{report['config']['warmup']} between every two engines before the clock ran, the slowest pull took "
            f"{report['warmup']['max_latency_s'] * 1e3:.2f} ms; {report['warmup']['failed']} failed"
            if report["config"]["warmup"]
            else "none: the latencies hold the first connections",
        ),
        (
            "latency",
            "none: nothing was read"
            if nothing
            else f"p50 {ms['p50']}, p90 {ms['p90']}, p99 {ms['p99']}, max {ms['max']}, from the {clock}",
        ),
        *_schedule(report),
        (
            "phases (p50)",
            ", ".join(f"{name} {_seconds(q['p50'])}" for name, q in report["phases_s"].items()),
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
        found.insert(1, ("capped", f"{report['config']['prompts_capped']} prompts were cut by --max-prompt-tokens"))
    return found + floor.lines(report)


def show(report: dict[str, Any], console: Console) -> None:
    """Print the table."""
    report = printable(report)
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows(report):
        table.add_row(name, value)
    console.print(table)
    for text in [*report["problems"], *(f"{n} x {cause}" for cause, n in report["errors"].items())]:
        console.print(f"  ! {text}", style="red", highlight=False)


def _workload(config: dict[str, Any]) -> str:
    whole = config["prompts_wholly_cached"]
    cached = f"; {whole} of {config['requests']} are cached whole, so nothing of them is read" if whole else ""
    hit = "" if config["prefix_cache"] is not None else f", prefix hit {config['prefix_hit']}"
    match config["arrivals"]:
        case "closed":
            load = f"{config['concurrency']} in flight"
        case "trace":
            load = f"arrivals of the trace at speed {config['speed']:g}"
        case kind:
            load = f"{kind} arrivals at {config['rate']:g}/s"
    engines = config["engines"]
    announced = "; announced, so claims are granted before each window opens" if config["announced"] else ""
    many = engines["prefill"] + engines["decode"] > 2 or engines["both_ways"]
    who = f"; engines: {Engines(**engines)}" if many else ""
    return (
        f"{config['prompt_tokens']} tokens{hit}{cached}; {load}, blocks {config['block_order']}, seed "
        f"{config['seed']}{who}{announced}"
    )


def _prefix(workload: Workload, found: Measured, schedule: Sequence[Request]) -> dict[str, Any]:
    """What the readers' modelled caches held, and what was lent to several requests at a time."""
    tokens, hit = sum(r.tokens for r in schedule), sum(r.cached for r in schedule)
    return {
        "shared": bool(workload.chunks),
        "chunk_tokens": workload.chunk_tokens if workload.chunks else None,
        "prompt_tokens": tokens,
        "hit_tokens": hit,
        "hit_rate": hit / tokens if tokens else 0.0,
        "lent_blocks": found.lent_places,
        "lent_shared": found.shared_places,
    }


def _shared(prefix: dict[str, Any]) -> list[tuple[str, str]]:
    if not prefix["shared"]:
        return []
    return [
        (
            "prefixes",
            f"{prefix['hit_rate']:.1%} of {prefix['prompt_tokens']:,} prompt tokens were cached at the reader; "
            f"{prefix['lent_shared']:,} of {prefix['lent_blocks']:,} lent blocks were lent to another request as well",
        )
    ]


def _cancellations(found: dict[str, int]) -> list[tuple[str, str]]:
    if not found["asked"]:
        return []
    return [("to be cancelled", "{asked}: {cancelled} were, {too_late} had completed before".format(**found))]


def _schedule(report: dict[str, Any]) -> list[tuple[str, str]]:
    if report["config"]["arrivals"] == "closed":
        return []
    it, pull = report["schedule"], {k: _seconds(v) for k, v in report["pull_s"].items()}
    late = {k: _seconds(v) for k, v in it["late_s"].items()}
    return [
        ("", f"p50 {pull['p50']}, p90 {pull['p90']}, p99 {pull['p99']}, max {pull['max']}, from the call of pull"),
        (
            "schedule",
            f"{it['scheduled_per_s']:.1f} requests/s scheduled, {it['achieved_per_s']:.1f} achieved; pull was called "
            f"late by p50 {late['p50']}, p99 {late['p99']}, max {late['max']}",
        ),
    ]


def _seconds(value: float) -> str:
    """Milliseconds, or microseconds where those would be 0.05 or 0.00."""
    return f"{value * 1e3:.2f} ms" if value >= 1e-4 or not value else f"{value * 1e6:.1f} µs"


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


def _errors(found: Measured, asked: set[int]) -> dict[str, int]:
    """The first message of every reason, and how often it occurred, but for those that were asked to be cancelled."""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for outcomes in found.outcomes.values():
        for outcome in outcomes:
            if outcome.error and not (outcome.number in asked and outcome.reason == "cancelled"):
                text = first.setdefault(outcome.reason, f"{outcome.reason}: {outcome.error}"[:400])
                counts[text] = counts.get(text, 0) + 1
    return counts
