"""Metrics for Prometheus: counters, current state and durations of engines.

`Metrics` is a collector for the application's registry, and may show several engines. `docs/metrics.md` is made from
`metrics.toml`.

A scrape comes on another thread. The reading is taken *on* the loop, between two turns, and the scrape waits for it at
most a quarter of a second. If the loop does not answer in time, the scrape shows the last reading, with its age in
`asynckv_reading_age_seconds`.

A label never holds a request's id or an address, and has few values: of the engines that are read from, the first 32
have a name, and the others are `other`.
"""

from __future__ import annotations

import logging
import math
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import accumulate
from typing import Any, NamedTuple

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise ImportError("metrics need prometheus_client: pip install 'asynckv[metrics]'") from exc

from asynckv.arguments import number
from asynckv.core.attempts import RETRYABLE
from asynckv.core.lease import LeaseState
from asynckv.core.lifecycle import LifeState
from asynckv.core.peer import PeerState
from asynckv.core.pull import PullState
from asynckv.core.types import Reason
from asynckv.core.wire import REFUSED, UNWELCOME
from asynckv.errors import ConfigError, EngineClosed
from asynckv.observe.metrics_tally import BUCKETS_S, ENDS, LEFT, Durations, MetricsTally
from asynckv.observe.observer import Observed, Reading, observation_of
from asynckv.told import StepWait
from asynckv.version import VERSION

log = logging.getLogger("asynckv")

WAIT_S = 0.25
AGES_S = (1, 5, 10, 30, 60, 300)


class Family(NamedTuple):
    """Description of one metric; its labels come after `engine_id` and `rank`, and its values of counters `of` it."""

    kind: str
    help: str
    labels: tuple[str, ...]
    of: tuple[str, ...]


_TABLE = tomllib.loads(files(__package__).joinpath("metrics.toml").read_text(encoding="utf-8"))
FAMILIES = {
    name: Family(kind, help, tuple(labels), tuple(of)) for name, (kind, labels, of, help) in _TABLE["families"].items()
}
"""Every metric by its name without `asynckv_` (and a counter's without `_total`), from `metrics.toml`."""

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_REFUSALS = tuple(reason for reason in Reason if reason in REFUSED | UNWELCOME)
_OUTCOMES = tuple(reason for reason in Reason if reason not in (Reason.RELEASED, Reason.DISCHARGED))
_FROM_ZERO: Mapping[str, Iterable[str]] = {
    "pulls_ended": _OUTCOMES,
    "leases_ended": ENDS,
    "refusals": _REFUSALS,
    **_TABLE["from_zero"],
}
_SOURCES = {source.partition("*")[0]: (name, source) for name, each in FAMILIES.items() for source in each.of}
"""Source up to its `*` -> metric and source."""


class Metrics(Collector):
    """A collector for the registry of the application: `prometheus_client.REGISTRY.register(Metrics(engine))`.

    Give it every engine of the process (`Engine`, `EngineThread` or `EngineDesk`), started or not. A registry takes one
    `Metrics`, so `add` engines that come later.

    Args:
        engines: The engines to show.
        wait_s: Seconds that a scrape waits for an engine's event loop, 1 ms or more.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, *engines: Any, wait_s: float = WAIT_S) -> None:
        self._wait_s = number("wait_s", wait_s, 1e-3, 60.0, ConfigError)
        self._shown: tuple[_Shown, ...] = ()
        for engine in engines:
            self.add(engine)

    @property
    def engines(self) -> tuple[Observed, ...]:
        return tuple(shown.engine for shown in self._shown)

    def add(self, engine: Any) -> None:
        """Show another engine. Has no effect if it is shown already."""
        found = observation_of(engine)
        if all(shown.engine is not found for shown in self._shown):
            self._shown = (*self._shown, _Shown(found))

    def remove(self, engine: Any) -> None:
        """Stop showing an engine."""
        found = observation_of(engine)
        for shown in self._shown:
            if shown.engine is found:
                shown.engine.unobserve(shown.tally)
        self._shown = tuple(shown for shown in self._shown if shown.engine is not found)

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without values, for a registry that looks for duplicates."""
        return list(_families().values())

    def collect(self) -> Iterable[Metric]:
        families = _families()
        for shown in self._shown:
            shown.refresh(self._wait_s)
            for name, labels, value in shown.samples():
                _add(families[name], (*shown.names, *labels), value)
        return list(families.values())


class _Shown:
    def __init__(self, engine: Observed) -> None:
        self.engine, self.tally = engine, MetricsTally()
        self.names = engine.engine_id, engine.rank
        self._last: tuple[float, Reading, MetricsTally] | None = None
        self._fresh: tuple[float, Reading, MetricsTally] | None = None
        self._fresh_until = -math.inf
        engine.observe(self.tally)

    def refresh(self, wait_s: float) -> None:
        """Take another reading, if the engine's loop answers in time."""
        try:
            self._last = self.engine.ask(self._read, wait_s)
        except (TimeoutError, EngineClosed):
            pass
        except Exception:  # a bug of asynckv must not cost the application's other metrics
            log.exception("asynckv: no reading of %s/%s could be taken for its metrics", *self.names)

    def _read(self) -> tuple[float, Reading, MetricsTally]:
        """Take a reading, on the loop. One that took long also serves the next scrapes."""
        if self._fresh is not None and time.monotonic() < self._fresh_until:
            return self._fresh
        began = time.thread_time()
        self._fresh = time.monotonic(), self.engine.reading(), self.tally.copy()
        took_s = time.thread_time() - began
        self._fresh_until = time.monotonic() + REST * took_s if took_s > LONG_S else -math.inf
        return self._fresh

    def samples(self) -> Iterator[tuple[str, tuple[str, ...], Any]]:
        """Yield the last reading: metric, labels after the engine's, value."""
        last = self._last
        state = last[1].state if last is not None else LifeState.NEW.value
        for each in LifeState:
            yield "engine_state", (each.value,), each.value == state
        if last is None:
            return
        taken_at, reading, tally = last
        age_s = time.monotonic() - taken_at
        yield "reading_age_seconds", (), age_s if age_s > FRESH_S else 0.0
        facts = {"incarnation": reading.incarnation, "version": VERSION}
        facts |= {name: reading.planes.get(name, "") for name in ("nixl", "backend", "ucx_tls")}
        yield "engine_info", (), facts
        yield from _gauges(reading)
        yield from _counters(reading.counters)
        yield from _tallied(tally)


FRESH_S = 0.05
NO_WAIT = StepWait(0, 0.0)

LONG_S, REST = 0.002, 10
"""A reading that took longer than `LONG_S` (tens of thousands of leases) is reused for `REST` times as long."""


def _families() -> dict[str, Metric]:
    engine, out = ("engine_id", "rank"), dict[str, Metric]()
    for name, family in FAMILIES.items():
        if family.kind == "info":
            out[name] = InfoMetricFamily(f"asynckv_{name.removesuffix('_info')}", family.help, labels=engine)
        else:
            out[name] = _KINDS[family.kind](f"asynckv_{name}", family.help, labels=(*engine, *family.labels))
    return out


def _add(family: Any, labels: tuple[str, ...], value: Any) -> None:
    if isinstance(value, Durations):
        bounds = *(f"{most:g}" for most in BUCKETS_S), "+Inf"
        family.add_metric(labels, [*zip(bounds, accumulate(value.counts), strict=True)], value.total_s)
    else:
        family.add_metric(labels, value if isinstance(value, dict) else float(value))


def _by_label(**values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield the values of metrics with one label."""
    return ((name, (label,), value) for name, each in values.items() for label, value in each.items())


def _gauges(reading: Reading) -> Iterator[tuple[str, tuple[str, ...], float]]:
    gauges, held = reading.gauges, reading.gauges["blocks_quarantined"]
    beside = {state: gauges[f"transfers_{state}"] for state in ("in_doubt", "detached")}
    yield from _by_label(
        pulls={state.value: reading.pulls.get(state.value, 0) for state in PullState},
        peers={state.value: reading.peers.get(state.value, 0) for state in PeerState},
        leases={state.value: reading.leases.get(state.value, 0) for state in (LeaseState.LENT, LeaseState.ENDING)},
        blocks={
            "lent": gauges["blocks_lent"],
            "writing": max(gauges["blocks_writing"] - held, 0),
            "quarantined": max(held - reading.blocks_retired, 0),
            "retired": reading.blocks_retired,
        },
        transfers={"running": gauges["transfers"] - sum(beside.values()), **beside},
        leases_older_than={str(age_s): sum(age > age_s for age in reading.lease_ages_s) for age_s in AGES_S},
    )
    waits = {what: reading.waits_for_step.get(what, NO_WAIT).seconds for what in ("result", "announcement", "claim")}
    yield from _by_label(waits_for_step_seconds=waits)
    yield "data_plane_up", (), not reading.data_down
    yield "pulls_waiting", (), reading.waiting
    yield "pulls_retrying", (), reading.retrying
    yield "in_flight_descriptors", (), reading.descriptors_in_flight
    more = {f"limit.{name}": most for name, most in reading.limits.items()}
    more |= {f"oldest.{name}": age_s for name, age_s in reading.oldest_s.items()}
    for gauge, amount in (*gauges.items(), *more.items()):
        if (where := place_of(gauge)) is not None:
            yield *where, amount


def _counters(counters: Mapping[str, int]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for name, family in FAMILIES.items():
        if family.of and family.kind == "counter" and not name.startswith("offload_"):  # an engine may have no offload
            zeros = [(str(cause),) for cause in _FROM_ZERO.get(name, ())] if family.labels else [()]
            found |= {(name, labels): 0 for labels in zeros}
    for counter, count in counters.items():
        if (where := place_of(counter)) is not None:
            found[where] = found.get(where, 0) + count
    for (name, labels), count in found.items():
        yield name, labels, count


def place_of(counter: str) -> tuple[str, tuple[str, ...]] | None:
    """Return metric and labels of a counter or gauge of an engine or its offload; None if it is not shown."""
    if counter in NOT_SHOWN:
        return None
    name, source = _SOURCES.get(counter, ("", "*"))
    if "*" not in source:
        return name, ()
    for beginning, (name, source) in _SOURCES.items():
        if "*" in source and counter.startswith(beginning):
            return name, (*source.split()[1:], counter.removeprefix(beginning))
    return None


NOT_SHOWN = frozenset({"transfers.late_news"})


def _tallied(tally: MetricsTally) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    yield from _by_label(
        pull_phase_seconds=tally.phases,
        pull_duration_seconds=tally.pulls,
        lease_age_seconds=tally.leases,
        offload_duration_seconds=tally.offloads,
        pulls_retried={reason.value: tally.retried[reason.value] for reason in sorted(RETRYABLE)},
        peer_changes={state: tally.peer_states[state] for state in (*(state.value for state in PeerState), LEFT)},
        peer_read_bytes=tally.peer_bytes,
    )
    yield "loop_lag_seconds", (), tally.lag
    yield "transfers_posted", (), tally.posts
    yield "pull_rereads", (), tally.rereads
    yield "blocks_given_up", (), tally.blocks_given_up
    for labels, count in tally.peer_pulls.items():
        yield "peer_pulls_ended", labels, count
