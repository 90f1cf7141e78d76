"""Statistics in vLLM's own form: for its log, and for its Prometheus endpoint.

Each worker and the scheduler's half count events (`Tally`), and return the differences as plain JSON. vLLM adds them up
and sends them to the process that logs and answers `/metrics`. There `AsyncKVStats` and `AsyncKVPromMetrics` are made
from the data alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from asynckv.integrations.vllm.compat import KVConnectorPromMetrics, KVConnectorStats
from asynckv.integrations.vllm.options import WORDS
from asynckv.results import PullResult
from asynckv.told import PromptsCounted

EVERY_S = 1.0
MAX_SAMPLES = 4096  # durations per interval and worker, because vLLM sends them between processes


class AsyncKVStats(KVConnectorStats):
    """Statistics of one interval, of one worker or of several together.

    `data` is plain JSON. `duration_s`, `bytes` and `descriptors` have an entry per successful pull. `failed`, `leases`,
    `computed_locally` and `prompts` (both from the scheduler) count by cause or kind.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        # Copied, because vLLM gives the same data to several loggers of a process, and one adds to it.
        self.data = {name: value.copy() for name, value in (data or {}).items()}
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {name: [] for name in _SAMPLES} | {name: {} for name in _COUNTERS}

    def aggregate(self, other: Any) -> AsyncKVStats:
        for name, value in other.data.items():
            if isinstance(value, dict):
                mine = self.data.setdefault(name, {})
                for cause, count in value.items():
                    mine[cause] = mine.get(cause, 0) + count
            else:
                self.data.setdefault(name, []).extend(value)
        return self

    def reduce(self) -> dict[str, int | float]:
        durations, leases = sorted(self.data["duration_s"]), self.data["leases"]
        out: dict[str, int | float] = {"Num pulls": len(durations)}
        if durations:
            out |= {
                "Avg pull time (ms)": round(1e3 * sum(durations) / len(durations), 3),
                "P90 pull time (ms)": round(1e3 * durations[min(len(durations) * 9 // 10, len(durations) - 1)], 3),
                "Avg MiB per pull": round(sum(self.data["bytes"]) / 2**20 / len(durations), 3),
                "Avg descriptors per pull": round(sum(self.data["descriptors"]) / len(durations), 1),
            }
        out["Num failed pulls"] = sum(self.data["failed"].values())
        out["Num prompts computed locally"] = sum(self.data["computed_locally"].values())
        out["Num leases released"] = leases.get("released", 0)
        out["Num leases expired"] = leases.get("expired", 0)
        return out

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def to_dict(self) -> dict[str, Any]:
        return self.data  # as vLLM's class, which a version may lack


class Tally:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stats = AsyncKVStats()
        self._taken_at = clock()

    def received(self, result: PullResult) -> None:
        data = self._stats.data
        if len(data["bytes"]) >= MAX_SAMPLES:
            return
        data["duration_s"].append(sum(s for phase, s in result.phases.items() if phase in _PHASES))
        data["bytes"].append(result.num_bytes)
        data["descriptors"].append(result.descriptors_posted)

    def failed(self, error: Exception) -> None:
        self._count("failed", str(getattr(error, "reason", "") or "") or type(error).__name__)

    def lease(self, cause: str) -> None:
        self._count("leases", cause)

    def _count(self, kind: str, cause: str) -> None:
        counts = self._stats.data[kind]
        counts[cause] = counts.get(cause, 0) + 1

    def take(self, at_once: bool = False) -> AsyncKVStats | None:
        """Return the counts and reset them; None if there are none, or if the last call was less than a second ago."""
        if self._stats.is_empty() or ((now := self._clock()) - self._taken_at < EVERY_S and not at_once):
            return None
        stats, self._stats, self._taken_at = self._stats, AsyncKVStats(), now
        return stats


class SchedulerTally(Tally):
    """Counts of the scheduler's half, which also go to the first worker's engine as totals."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._total, self._since = PromptsCounted(), 0.0
        self.has_total = False  # True if the totals have changed since they were taken

    def computed_locally(self, cause: str) -> bool:
        """Count a request that is computed here, at least in part, instead of a transfer; True if it is the first."""
        self._count("computed_locally", cause)
        counts = self._total.computed_locally
        counts[cause] = counts.get(cause, 0) + 1
        return counts[cause] == 1

    def prompt(self, has_params: bool) -> str:
        """Count a prompt; return words to log if now many have lacked params, once until the next `ends_row`."""
        total, was_alarming, now = self._total, self._total.is_alarming, self._clock()
        self._count("prompts", "with_params" if has_params else "without_params")
        total.with_params += has_params
        total.without_params += not has_params
        if not has_params:
            self._since = self._since if total.in_a_row else now
            total.in_a_row += 1
            total.in_a_row_s = round(now - self._since, 3)
        said = f"all {total.in_a_row} prompts of the last {total.in_a_row_s:.0f} s came without params: "
        return said + WORDS["prompts"]["without_params"] if total.is_alarming > was_alarming else ""

    def ends_row(self) -> None:
        """Begin the count in a row anew: a router asked for a transfer, which junk of a client does not."""
        self._total.in_a_row, self._total.in_a_row_s = 0, 0.0

    def _count(self, kind: str, cause: str) -> None:
        super()._count(kind, cause)
        self.has_total = True

    def take_total(self) -> PromptsCounted | None:
        """Return a copy of the totals, or None if they have not changed."""
        if not self.has_total:
            return None
        self.has_total = False
        return msgspec.structs.replace(self._total, computed_locally=self._total.computed_locally.copy())


_COUNTERS: Mapping[str, tuple[str, str, str]] = WORDS["counters"]
_FROM_ZERO = {"computed_locally": WORDS["computed_locally"], "prompts": ("with_params", "without_params")}
"""Values of the last label that are shown from 0 on, because Prometheus would not see their first increase."""

_SAMPLES = ("duration_s", "bytes", "descriptors")
_PHASES = frozenset({"handshake", "queue", "plan", "read", "confirm"})  # the consecutive phases of a pull


class AsyncKVPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def histogram(name: str, documentation: str, buckets: list[float]) -> Any:
            metric = self._histogram_cls(
                name=f"vllm:asynckv_{name}", documentation=documentation, buckets=buckets, labelnames=labelnames
            )
            return {index: metric.labels(*values) for index, values in per_engine_labelvalues.items()}

        times = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
        self._histograms = {
            "duration_s": histogram("pull_seconds", "Time from asking for a request's KV to having it.", times),
            "bytes": histogram("pull_bytes", "Bytes read per request.", [2.0**i for i in range(12, 36, 2)]),
            "descriptors": histogram(
                "pull_descriptors", "Descriptors that were posted per request.", [4.0**i for i in range(9)]
            ),
        }
        self._counters = {}
        for kind, (name, label, documentation) in _COUNTERS.items():
            counter = self._counters[kind] = self._counter_cls(
                name=f"vllm:asynckv_{name}", documentation=documentation, labelnames=[*labelnames, label]
            )
            for values in per_engine_labelvalues.values():
                for cause in _FROM_ZERO.get(kind, ()):
                    counter.labels(*values, cause)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data.get(key, ()):
                histogram[engine_idx].observe(value)
        labels = self.per_engine_labelvalues[engine_idx]
        for kind, counter in self._counters.items():
            for cause, count in transfer_stats_data.get(kind, {}).items():
                counter.labels(*labels, cause).inc(count)
