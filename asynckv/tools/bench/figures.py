"""The figures of a report by name: where each is, its unit, and which way is better."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asynckv.errors import ConfigError
from asynckv.tools.bench.noise import LEVEL

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a report.

    Attributes:
        path: Where it is, with dots between.
        scale: Makes the figure's unit of it.
        is_per_request: It is shared out over the requests of a transfer.
    """

    name: str
    title: str
    unit: str
    better: Literal["higher", "lower", ""]
    path: str
    scale: float = 1.0
    is_per_request: bool = False

    def of(self, report: Report) -> float | None:
        """Return it in the figure's unit; None where a report does not have it."""
        value = _number(_find(report, self.path))
        if value is None or not self.is_per_request:
            return None if value is None else value * self.scale
        # Those that read nothing, being cached whole, are no requests of a transfer.
        number = report["requests"]["completed"] - report["requests"].get("read_nothing", 0)
        return value * self.scale / number if number else None

    def within(self, report: Report) -> tuple[float, float] | None:
        """Return the interval that the run itself found, where it measured in rounds."""
        value = _find(report, self.path)
        if not isinstance(value, Mapping) or value.get("level", 0.0) < LEVEL:
            return None
        return value["low"] * self.scale, value["high"] * self.scale


def _find(report: Report, path: str) -> Any:
    value: Any = report
    for part in filter(None, path.split(".")):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float | None:
    """Read a number, or the median of one that was measured in rounds."""
    if isinstance(value, Mapping):
        value = value.get("median")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("gbytes_per_s", "throughput", "GB/s", "higher", "throughput.gbytes_per_s"),
        Figure("requests_per_s", "throughput", "requests/s", "higher", "throughput.requests_per_s"),
        Figure("p50", "latency p50", "ms", "lower", "latency_s.p50", 1e3),
        Figure("p90", "latency p90", "ms", "lower", "latency_s.p90", 1e3),
        Figure("p99", "latency p99", "ms", "lower", "latency_s.p99", 1e3),
        Figure("max", "latency max", "ms", "lower", "latency_s.max", 1e3),
        Figure("decode_cpu", "decode CPU per request", "µs", "lower", "cpu_s.decode", 1e6, is_per_request=True),
        Figure("prefill_cpu", "prefill CPU per request", "µs", "lower", "cpu_s.prefill", 1e6, is_per_request=True),
        Figure("loop_lag_p99", "loop lag p99", "ms", "lower", "loop_lag_s.p99", 1e3),
        Figure("descriptors", "descriptors per request", "", "lower", "descriptors.posted", is_per_request=True),
    )
}
FLOORS = {
    "ratio_to_floor.raw_nixl.gbytes_per_s": "GB/s / raw NIXL",
    "ratio_to_floor.raw_nixl.p50_s": "p50 / raw NIXL",
    "ratio_to_floor.raw_nixl.cpu_s_per_request": "CPU / raw NIXL",
}
"""Looked at beside the usual figures where reports have them."""
DEFAULT = ("gbytes_per_s", "requests_per_s", "p50", "p99", "decode_cpu", "descriptors")


def head(name: str, unit: str = "") -> str:
    """Name a figure as the head of a column."""
    return unit if unit and name.endswith("per_s") else FLOORS.get(name) or f"{name} {unit}".rstrip()


def leaves(report: Report, under: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a report, by its dotted path; with `under` those of that part only."""
    part = _find(report, under)
    if (number := _number(part)) is not None:
        yield under, number
    elif isinstance(part, Mapping):
        for key in part:
            yield from leaves(report, f"{under}.{key}" if under else str(key))


def named(name: str, known: set[str]) -> Figure:
    """Find a figure by its name, or by a number's path in the report, such as `phases_s.read.p50`.

    Args:
        name: What is looked for.
        known: The paths that there are.

    Raises:
        ConfigError: There is none.
    """
    if (figure := FIGURES.get(name)) is not None:
        return figure
    if name not in known:
        near = difflib.get_close_matches(name, [*FIGURES, *sorted(known)], 1)
        raise ConfigError(
            f"--metrics {name!r} is unknown{f'; did you mean {near[0]}?' if near else ''}; there are "
            f"{', '.join(FIGURES)}, and every number's path in the reports, such as phases_s.read.p50"
        )
    root = name.split(".")[0]
    if root == "ratio_to_floor":
        better: Literal["higher", "lower"] = "higher" if name.endswith("per_s") else "lower"
        return Figure(name, name, "", better, name)
    if root in ("latency_s", "phases_s", "loop_lag_s", "cpu_s"):
        return Figure(name, name, "ms", "lower", name, 1e3)
    return Figure(name, name, "", "", name)
