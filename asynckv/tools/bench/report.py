"""The figures of a run as data. `asynckv.tools.bench.report_text` makes the printed report of them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asynckv.errors import AsyncKVError
from asynckv.tools.bench import floor, head_start, machine
from asynckv.tools.bench.driver import Measured
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.schedule import Request
from asynckv.tools.bench.workload import Workload
from asynckv.tools.plan.layouts import model_bytes, model_groups

SCHEMA = "asynckv.bench/1"
PHASES = ("queue", "handshake", "plan", "post", "read", "detect", "confirm", "release")


def make(experiment: Experiment, found: Measured) -> dict[str, Any]:
    """Build the JSON report. A request is complete only if every decode rank completed it."""
    schedule, every = experiment.schedule(), [o for outcomes in found.outcomes.values() for o in outcomes]
    good = [o for o in every if not o.error]
    ranks = experiment.sides["decode"].tp * experiment.sides["decode"].pp  # all of them pull a request
    whole = [x for x in found.outcomes.values() if len(x) == ranks and not any(o.error for o in x)]
    # A request that is cached whole is answered without a transfer.
    read = [outcomes for outcomes in whole if any(o.num_bytes for o in outcomes)]
    latencies = {outcomes[0].number: max(o.seconds for o in outcomes) for outcomes in read}
    timed = found.followed or set(latencies)
    complete = [seconds for number, seconds in latencies.items() if number in timed]
    announced = set[int]() if experiment.options.chunks else latencies.keys() - timed
    calls = [max(o.seconds - o.late for o in outcomes) for outcomes in read]
    busy_s = sum(max((o.seconds - o.late for o in outcomes), default=0.0) for outcomes in found.outcomes.values())
    window, loan = sum(found.windows_s), "last chunk" if experiment.options.chunks else "loan"
    moved = sum(o.num_bytes for o in good)
    pulls = [o for o in good if o.num_bytes and o.number in timed]
    phases = {name: [o.phases.get(name, 0.0) for o in pulls] for name in PHASES} | {"release": found.release_s}
    return {
        "schema": SCHEMA,
        "config": _config(experiment, schedule),
        "environment": {**machine.environment(), "cpu_count": os.cpu_count(), **found.environment},
        "warmup": {
            "failed": sum(bool(o.error) for o in found.warmup),
            "max_latency_s": max((o.seconds for o in found.warmup), default=0.0),
        },
        "requests": {
            "submitted": found.submitted,
            "completed": len(whole),
            "read_nothing": len(whole) - len(read),
            "failed": len(found.outcomes) - len(whole),
        },
        "prefix": _prefix(experiment.workload, found, schedule),
        "bytes": {"moved": moved, **{name: found.bytes[name] for name in ("wanted", "verified", "wrong")}},
        "blocks": {name: found.blocks[name] for name in ("prefill_leaked", "decode_leaked", "quarantined")},
        "throughput": {
            "gbytes_per_s": moved / window / 1e9 if window else 0.0,
            "requests_per_s": len(read) / window if window else 0.0,
        },
        "latency_s": quantiles(complete, p50=0.5, p90=0.9, p99=0.99, max=1.0),
        "latency_histogram": histogram(complete),
        "announced_s": quantiles([latencies[number] for number in announced], p50=0.5, p90=0.9, p99=0.99, max=1.0),
        "pull_s": quantiles(calls, p50=0.5, p90=0.9, p99=0.99, max=1.0),
        "schedule": {
            "clock": "scheduled arrival" if experiment.is_open else loan if found.followed else "call of pull",
            "scheduled_per_s": found.submitted / found.scheduled_s if found.scheduled_s else 0.0,
            "achieved_per_s": len(whole) / window if window else 0.0,
            "late_s": quantiles([o.late for o in every], p50=0.5, p99=0.99, max=1.0),
        },
        "phases_s": {name: quantiles(values, p50=0.5, p99=0.99) for name, values in phases.items()},
        "cpu_s": found.cpu_s,
        "loop_lag_s": quantiles(found.lags, p99=0.99, max=1.0),
        "descriptors": {"planned": sum(o.planned for o in good), "posted": sum(o.posted for o in good)},
        "windows": {
            "count": len(found.windows_s),
            "seconds": window,
            "mean_in_flight": busy_s / window if window else 0.0,
        },
        "leases": dict(found.leases),
        "memory": {"pool_bytes_per_rank": found.pool_bytes, "peak_rss_bytes": found.peak_rss},
        "processes": found.pids,
        "warnings": _warnings(experiment),
        "problems": found.problems + floor.faults(found.floor),
        "errors": _errors(found),
        **floor.summary(found.floor),
        **head_start.summary(found.turns),
    }


def _warnings(experiment: Experiment) -> list[str]:
    try:
        small = experiment.small_pieces()
    except AsyncKVError:  # the run itself reports why there is no plan
        return []
    order = "asynckv plan shows every piece"
    if any(side.dcp > 1 for side in experiment.sides.values()):
        order = "try a longer --cp-interleave"
    elif not all(side.order.endswith("hnd") for side in experiment.sides.values()):
        order = "try --order hnd"
    return [f"{text}: {order}" for text in small]


def _config(experiment: Experiment, schedule: Sequence[Request]) -> dict[str, Any]:
    """Return the options that the report repeats, and values derived from the others."""
    options, model, work = experiment.options, experiment.model, experiment.workload
    return {
        **options.record(),
        "model": model.name,
        "layers": len(model.layers),
        "groups": [{"layers": len(n), **msgspec.to_builtins(kind)} for kind, n in model_groups(model)],
        "dtype": model.dtype,
        "token_bytes": model_bytes(model, "tokens"),
        "state_bytes": model_bytes(model, "state"),
        **msgspec.to_builtins(experiment.sides),
        "requests": len(work.prompt_tokens),
        "prompt_tokens": work.source,
        "prompts_capped": work.num_capped,
        "prompts_wholly_cached": sum(r.cached == r.tokens for r in schedule),
        "engines": msgspec.to_builtins(experiment.engines),
        "arrivals": options.arrivals,
        "speed": options.speed or 1.0,
        # These two apply only if the run has a floor, or shared prefixes.
        "rounds": floor.ROUNDS if options.floor else None,
        "prefix_cache": options.prefix_cache if work.chunks else None,
    }


def is_good(report: dict[str, Any]) -> bool:
    """Return True if all requests completed, every compared byte was right, and no block leaked."""
    moved, wanted, verified = (report["bytes"][k] for k in ("moved", "wanted", "verified"))
    is_whole = report["requests"]["completed"] == report["config"]["requests"] and moved >= wanted
    return is_whole and not faults(report) and (report["config"]["verify"] != "full" or verified == wanted)


def faults(report: Mapping[str, Any]) -> list[str]:
    """Return the faults of a run: their counts and the messages about them."""
    requests, moved, blocks = report["requests"], report["bytes"], report["blocks"]
    counts = {
        "of {:,} requests failed".format(report["config"]["requests"]): requests["failed"],
        "bytes wrong": moved["wrong"],
        "blocks leaked": sum(n for name, n in blocks.items() if name != "quarantined"),
        "blocks in quarantine": blocks.get("quarantined", 0),
        "pulls of the warm-up failed": report.get("warmup", {}).get("failed", 0),
    }
    said = [f"{n:,} {what}" for what, n in counts.items() if n] + [str(x) for x in report.get("problems", ())]
    return said and [*said, *(f"{n} x {cause}" for cause, n in report.get("errors", {}).items())]


def _prefix(workload: Workload, found: Measured, schedule: Sequence[Request]) -> dict[str, Any]:
    """Report the hits of the modelled caches, and the blocks that were lent to several requests at a time."""
    tokens, hit = sum(r.tokens for r in schedule), sum(r.cached for r in schedule)
    return {
        "shared": bool(workload.chunks),
        "chunk_tokens": workload.chunk_tokens if workload.chunks else None,
        "prompt_tokens": tokens,
        "hit_tokens": hit,
        "hit_rate": hit / tokens if tokens else 0.0,
        **{name: found.lent[name] for name in ("lent_blocks", "lent_shared")},
    }


def quantiles(values: Sequence[float], **at: float) -> dict[str, float]:
    """Return quantiles by name; zeros if there are no values."""
    if not values:
        return dict.fromkeys(at, 0.0)
    return {name: float(np.quantile(values, q, method="higher")) for name, q in at.items()}


def histogram(seconds: Sequence[float]) -> list[dict[str, float]]:
    """Count latencies in at most 10 ranges of equal ratio, from the least to the largest."""
    values = np.maximum(seconds, 1e-9)
    if not len(values):
        return []
    ranges = min(10, math.ceil(math.sqrt(len(np.unique(values)))))
    ends = np.geomspace(values.min(), values.max(), ranges + 1)[1:]
    counts = np.bincount(np.searchsorted(ends[:-1], values), minlength=ranges)
    return [{"up_to_s": float(end), "count": int(count)} for end, count in zip(ends, counts, strict=True)]


def _errors(found: Measured) -> dict[str, int]:
    """Count the failures by reason; each reason has its first message."""
    first: dict[str, str] = {}
    failed = [outcome for outcomes in found.outcomes.values() for outcome in outcomes if outcome.error]
    return dict(Counter(first.setdefault(o.reason, f"{o.reason}: {o.error}"[:400]) for o in failed))
