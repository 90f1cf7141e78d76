"""The figures of a report by name, each with its place, its unit and the direction that is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asynckv.tools.bench.noise import LEVEL

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a report: its dotted path, the factor to its unit, and whether to divide by the requests."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    path: str
    scale: float = 1.0
    is_per_request: bool = False

    def of(self, report: Report) -> float | None:
        """Return the number in the figure's unit; None if the report lacks it."""
        value = number_at(report, self.path)
        if value is None or not self.is_per_request:
            return None if value is None else value * self.scale
        # A request that is cached whole reads nothing, so it has no transfer to count.
        number = report["requests"]["completed"] - report["requests"].get("read_nothing", 0)
        return value * self.scale / number if number else None

    def within(self, report: Report) -> tuple[float, float] | None:
        """Return the interval that the run itself found, if it measured in rounds."""
        value = _find(report, self.path)
        if not isinstance(value, Mapping) or value.get("level", 0.0) < LEVEL:
            return None
        return value["low"] * self.scale, value["high"] * self.scale


def _find(report: Report, path: str) -> Any:
    value: Any = report
    for part in filter(None, path.split(".")):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def number_at(report: Report, path: str) -> float | None:
    """Return a number, or the median of a number that was measured in rounds."""
    value = _find(report, path)
    if isinstance(value, Mapping):
        value = value.get("median")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


DEFAULT = (
    Figure("gbytes_per_s", "GB/s", "higher", "throughput.gbytes_per_s"),
    Figure("requests_per_s", "requests/s", "higher", "throughput.requests_per_s"),
    Figure("p50", "ms", "lower", "latency_s.p50", 1e3),
    Figure("p99", "ms", "lower", "latency_s.p99", 1e3),
    Figure("decode_cpu", "µs", "lower", "cpu_s.decode", 1e6, is_per_request=True),
    Figure("descriptors", "", "lower", "descriptors.posted", is_per_request=True),
)
FIGURES = {figure.name: figure for figure in DEFAULT}
HEADS = {
    "ratio_to_floor.raw_nixl.gbytes_per_s": "GB/s / raw NIXL",
    "ratio_to_floor.raw_nixl.p50_s": "p50 / raw NIXL",
    "ratio_to_floor.raw_nixl.cpu_s_per_request": "CPU / raw NIXL",
}
FLOORS = tuple(Figure(name, "", "higher" if name.endswith("per_s") else "lower", name) for name in HEADS)
SHARE = FLOORS[0]


def head(name: str, unit: str = "") -> str:
    return unit if unit and name.endswith("per_s") else HEADS.get(name) or f"{name} {unit}".rstrip()
