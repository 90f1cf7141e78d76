"""Metrics for Prometheus: counters, current state and durations of engines.

`Metrics` is a collector for the application's registry, and may show several engines. `docs/metrics.md` is made from
the table `FAMILIES`.

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
from collections.abc import Iterable, Iterator, Mapping
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
from asynckv.observe.metrics_tally import BUCKETS_S, ENDS, LEFT, Durations, Tally
from asynckv.observe.observer import Observed, Reading, observation_of
from asynckv.version import VERSION

log = logging.getLogger("asynckv")

WAIT_S = 0.25
AGES_S = (1, 5, 10, 30, 60, 300)


class Family(NamedTuple):
    """Description of one metric; its labels come after `engine_id` and `rank`."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    # -- the engine
    "engine_info": Family(
        "info", "Identity of this start of the engine.", ("incarnation", "version", "nixl", "backend", "ucx_tls")
    ),
    "engine_state": Family("gauge", "1 for the current state, otherwise 0.", ("state",)),
    "reading_age_seconds": Family("gauge", "Age of the figures; above 0 if the event loop did not answer this scrape."),
    "data_plane_up": Family("gauge", "1 while the data plane serves, 0 while its process is being replaced."),
    # -- pulls: the decode side
    "pulls": Family(
        "gauge", "Open pulls and announcements; notifying: only the release is not acknowledged yet.", ("state",)
    ),
    "pulls_waiting": Family("gauge", "Pulls that have begun but do not read yet."),
    "pulls_waiting_limit": Family("gauge", "Limit of waiting pulls (max_queued); further ones are refused."),
    "pulls_queued": Family("gauge", "Pulls that only the limits keep from reading."),
    "pulls_admitted": Family("gauge", "Pulls that the limits allow to read."),
    "pulls_admitted_limit": Family("gauge", "Limit of admitted pulls (total_requests)."),
    "pulls_retrying": Family("gauge", "Requests that wait for another attempt."),
    "pull_oldest_seconds": Family("gauge", "Age of the oldest pull without an outcome, or 0."),
    "pulls_started": Family("counter", "Pulls and announcements that began; every attempt counts."),
    "pulls_ended": Family("counter", "Pulls that ended; every attempt counts.", ("reason",)),
    "pulls_rejected": Family("counter", "Pulls refused because max_queued pulls already waited."),
    "pulls_retried": Family("counter", "Failed attempts that were followed by another.", ("reason",)),
    "pull_duration_seconds": Family("histogram", "Time from the call to the outcome.", ("outcome",)),
    "pull_phase_seconds": Family("histogram", "Time that pulls spent in each phase.", ("phase",)),
    "pull_rereads": Family("counter", "Ranks read again, because the first read came before the lease."),
    "read_bytes": Family("counter", "Bytes read by transfers, whether or not their pulls ended well."),
    "transfers": Family(
        "gauge", "Transfers in flight, and those in doubt, which failed but may still write.", ("state",)
    ),
    "transfers_posted": Family("counter", "Transfers posted by pulls that have ended."),
    "transfers_ended": Family("counter", "Transfers that ended or fell in doubt.", ("result",)),
    "descriptors_planned": Family("counter", "Descriptors (contiguous pieces) to read, before merging."),
    "descriptors_posted": Family("counter", "Descriptors posted, after merging."),
    "in_flight_bytes": Family("gauge", "Bytes of transfers in flight."),
    "in_flight_limit_bytes": Family("gauge", "Limit of bytes in flight (total_bytes)."),
    "in_flight_descriptors": Family("gauge", "Descriptors of transfers in flight."),
    "in_flight_descriptors_limit": Family("gauge", "Limit of descriptors in flight (total_descriptors)."),
    # -- peers
    "peers": Family("gauge", "Prefill ranks that this engine knows.", ("state",)),
    "peer_changes": Family(
        "counter", "Prefill ranks that entered a state (left: said goodbye; else gone).", ("state",)
    ),
    "peer_pulls_ended": Family("counter", "Pulls that ended, by prefill engine.", ("peer", "outcome")),
    "peer_read_bytes": Family("counter", "Bytes of completed pulls, by prefill engine.", ("peer",)),
    # -- blocks, on both sides
    "blocks": Family("gauge", "Blocks lent, being written, quarantined (may still be written) or retired.", ("state",)),
    "blocks_given_up": Family("counter", "Blocks retired (lost to the process) since the start."),
    "quarantined_oldest_seconds": Family("gauge", "Age of the oldest quarantined blocks, or 0."),
    # -- leases: the prefill side
    "leases": Family("gauge", "Requests that are lent.", ("state",)),
    "leases_older_than": Family("gauge", "Requests that have been lent for longer than the label says.", ("seconds",)),
    "lease_oldest_seconds": Family("gauge", "Age of the oldest lease, or 0."),
    "leases_lent": Family("counter", "Requests that were lent."),
    "leases_ended": Family("counter", "Leases that ended.", ("state",)),
    "lease_age_seconds": Family("histogram", "Age of leases at their end.", ("state",)),
    "requests_withdrawn": Family("counter", "Requests that will never be lent."),
    "refusals": Family("counter", "Claims, renewals and releases that were refused.", ("reason",)),
    "late_releases": Family("counter", "Releases that came after their lease had ended."),
    "parked_messages": Family("gauge", "Claims and releases kept until their request is lent."),
    "parked_messages_limit": Family("gauge", "Limit of parked messages (max_parked)."),
    "parked_messages_dropped": Family("counter", "Early claims and releases that were dropped.", ("reason",)),
    "keys_overtaken": Family(
        "counter", "Keys given up or forgotten, because too many were made but not lent.", ("how",)
    ),
    # -- messages
    "messages": Family("counter", "Messages on the control plane.", ("direction", "type")),
    "messages_dropped": Family("counter", "Messages that were not accepted or could not be sent.", ("reason",)),
    "packets": Family("counter", "Packets, each of several messages.", ("direction",)),
    "connections_rejected": Family("counter", "Connections that the listener did not admit.", ("cause",)),
    "connections_refused": Family("counter", "Addresses that this engine refused to connect to.", ("cause",)),
    # -- what is kept outside of the accelerator, where there is an offload
    "offload_blocks": Family(
        "gauge", "Blocks in a tier; leaving ones are in use but no longer found.", ("state", "tier")
    ),
    "offload_bytes": Family("gauge", "Bytes of the kept blocks.", ("tier",)),
    "offload_limit_bytes": Family("gauge", "Size of a tier (host_bytes, file_bytes).", ("tier",)),
    "offload_up": Family(
        "gauge", "1 while a tier is used; 0 if its disk failed or the offload is off.", ("what", "tier")
    ),
    "offload_waiting_blocks": Family("gauge", "Blocks in host memory that wait to be written to files."),
    "offload_duration_seconds": Family("histogram", "Time from the call to its outcome.", ("call",)),
    "offload_blocks_moved": Family("counter", "Blocks moved, by kind of move.", ("move",)),
    "offload_bytes_moved": Family("counter", "Bytes moved, by kind of move.", ("move",)),
    "offload_stores_ended": Family("counter", "Stores that ended.", ("outcome",)),
    "offload_loads_ended": Family("counter", "Loads that ended.", ("outcome",)),
    "offload_tokens": Family("counter", "Tokens looked up, found, loaded, or missed by loads.", ("what",)),
    "offload_evicted": Family("counter", "Blocks evicted to make room.", ("tier",)),
    "offload_not_stored": Family("counter", "Blocks that stores left out.", ("reason",)),
    "offload_not_written_back": Family("counter", "Blocks not written from host memory to files.", ("reason",)),
    "offload_records_lost": Family("counter", "File records that were not what was stored, or could not be read."),
    "offload_disk_failures": Family(
        "counter", "Disk failures: files take no more writes, or are not used at all.", ("what",)
    ),
    "offload_moves_failed": Family("counter", "Moves between tiers that failed."),
    # -- how it fares
    "loop_lag_seconds": Family("histogram", "Delay of the engine's timer: for how long the event loop was away."),
    "loop_away": Family("counter", "Times that the event loop was away for longer than log.away_s."),
    "data_plane_losses": Family("counter", "Deaths of the data plane's process."),
    "data_plane_restarts": Family("counter", "Replacements of the data plane's process."),
    "internal_errors": Family("counter", "Bugs in asynckv; the log has tracebacks."),
    "observer_errors": Family("counter", "Exceptions raised by metrics, traces and other observers."),
    "log_events_lost": Family("counter", "Events that could not be logged.", ("reason",)),
}
"""Every metric: its name without `asynckv_` (and a counter's without `_total`), and its description."""

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_REFUSALS = tuple(reason for reason in Reason if reason in REFUSED | UNWELCOME)
_OUTCOMES = tuple(reason for reason in Reason if reason not in (Reason.RELEASED, Reason.DISCHARGED))
_PLAIN = {
    "pulls.started": "pulls_started",
    "pulls.overloaded": "pulls_rejected",
    "bytes.read": "read_bytes",
    "descriptors.planned": "descriptors_planned",
    "descriptors.posted": "descriptors_posted",
    "leases.lent": "leases_lent",
    "requests.withdrawn": "requests_withdrawn",
    "release.late": "late_releases",
    "loop.was_away": "loop_away",
    "agents_lost": "data_plane_losses",
    "agents_replaced": "data_plane_restarts",
    "internal_errors": "internal_errors",
    "observers.failed": "observer_errors",
}
"""Counters of the engine that each are one metric."""

_OFFLOAD = {
    "offload.records_lost": "offload_records_lost",
    "offload.moves_failed": "offload_moves_failed",
    "offload.to_write_back": "offload_waiting_blocks",
}
"""The same for engines with an offload; its gauges follow the same rules."""

_BY_CAUSE: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "pulls.": ("pulls_ended", (), _OUTCOMES),
    "leases.": ("leases_ended", (), ENDS),
    "refused.": ("refusals", (), _REFUSALS),
    "transfers.": ("transfers_ended", (), ("done", "failed", "in_doubt", "detached")),
    "dropped.": ("messages_dropped", (), ("malformed", "unexpected", "stale_answer", "too_many", "not_sent")),
    "parked.": ("parked_messages_dropped", (), ("expired", "refused")),
    "keys.": ("keys_overtaken", (), ("given_up", "forgotten")),
    "sent.": ("messages", ("out",), ()),
    "received.": ("messages", ("in",), ()),
    "control.rejected.": ("connections_rejected", (), ()),
    "control.refused.": ("connections_refused", (), ()),
    "control.packets_": ("packets", (), ("in", "out")),
    "log.": ("log_events_lost", (), ("failed", "dropped")),
    "offload.kept.": ("offload_blocks", ("kept",), ()),
    "offload.leaving.": ("offload_blocks", ("leaving",), ()),
    "offload.kept_bytes.": ("offload_bytes", (), ()),
    "offload.limit_bytes.": ("offload_limit_bytes", (), ()),
    "offload.reads.": ("offload_up", ("reads",), ()),
    "offload.writes.": ("offload_up", ("writes",), ()),
    "offload.files_lost.": ("offload_disk_failures", (), ()),
    "offload.blocks.": ("offload_blocks_moved", (), ()),
    "offload.bytes.": ("offload_bytes_moved", (), ()),
    "offload.store.": ("offload_stores_ended", (), ()),
    "offload.load.": ("offload_loads_ended", (), ()),
    "offload.tokens.": ("offload_tokens", (), ()),
    "offload.evicted.": ("offload_evicted", (), ()),
    "offload.not_stored.": ("offload_not_stored", (), ()),
    "offload.not_written_back.": ("offload_not_written_back", (), ()),
}
"""Prefix of the engine's counters -> metric, labels before the rest of the name, and values shown from 0 on."""


class Metrics(Collector):
    """A collector for the registry of the application: `prometheus_client.REGISTRY.register(Metrics(engine))`.

    Give it every engine of the process (`Engine`, `EngineThread` or `EngineDesk`), started or not. A registry takes one
    `Metrics`, so `add` engines that come later.

    Args:
        engines: The engines to show.
        wait_s: Seconds that a scrape waits for an engine's event loop; 0: it always shows the previous reading.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, *engines: Any, wait_s: float = WAIT_S) -> None:
        self._wait_s = number("wait_s", wait_s, 0, 60.0, ConfigError)
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
        self.engine, self.tally = engine, Tally()
        self.names = engine.engine_id, engine.rank
        self._last: tuple[float, Reading, Tally] | None = None
        self._fresh: tuple[float, Reading, Tally] | None = None
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

    def _read(self) -> tuple[float, Reading, Tally]:
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
        yield from _info(reading)
        yield from _gauges(reading)
        yield from _counters(reading.counters)
        yield from _tallied(tally)


FRESH_S = 0.05

LONG_S, REST = 0.002, 10
"""A reading that took longer than `LONG_S` (tens of thousands of leases) is reused for `REST` times as long."""


def _families() -> dict[str, Metric]:
    out: dict[str, Metric] = {}
    for name, family in FAMILIES.items():
        labels = ("engine_id", "rank", *family.labels)
        if family.kind == "info":
            names = ("engine_id", "rank")
            out[name] = InfoMetricFamily(f"asynckv_{name.removesuffix('_info')}", family.help, labels=names)
        else:
            out[name] = _KINDS[family.kind](f"asynckv_{name}", family.help, labels=labels)
    return out


def _add(family: Any, labels: tuple[str, ...], value: Any) -> None:
    if isinstance(value, Durations):
        buckets, so_far = [], 0
        for most, count in zip((*BUCKETS_S, math.inf), value.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if most == math.inf else f"{most:g}", so_far))
        family.add_metric(labels, buckets, value.total_s)
    else:
        family.add_metric(labels, value if isinstance(value, dict) else float(value))


def _info(reading: Reading) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    facts = {"incarnation": reading.incarnation, "version": VERSION}
    facts |= {name: reading.planes.get(name, "") for name in ("nixl", "backend", "ucx_tls")}
    yield "engine_info", (), facts


def _gauges(reading: Reading) -> Iterator[tuple[str, tuple[str, ...], float]]:
    gauges, limits = reading.gauges, reading.limits
    states: tuple[tuple[str, Any, Mapping[str, int]], ...] = (
        ("pulls", PullState, reading.pulls),
        ("peers", PeerState, reading.peers),
        ("leases", (LeaseState.LENT, LeaseState.ENDING), reading.leases),
    )
    for name, all_states, found in states:
        for state in all_states:
            yield name, (state.value,), found.get(state.value, 0)
    held = gauges["blocks_quarantined"]
    blocks = {
        "lent": gauges["blocks_lent"],
        "writing": max(gauges["blocks_writing"] - held, 0),
        "quarantined": max(held - reading.blocks_retired, 0),
        "retired": reading.blocks_retired,
    }
    for state, number_of in blocks.items():
        yield "blocks", (state,), number_of
    beside = {state: gauges[f"transfers_{state}"] for state in ("in_doubt", "detached")}
    for state, number_of in {"running": gauges["transfers"] - sum(beside.values()), **beside}.items():
        yield "transfers", (state,), number_of
    for age_s in AGES_S:
        yield "leases_older_than", (str(age_s),), sum(age > age_s for age in reading.lease_ages_s)
    plain = {
        "data_plane_up": not reading.data_down,
        "pulls_waiting": reading.waiting,
        "pulls_waiting_limit": limits["queued"],
        "pulls_queued": gauges["pulls_queued"],
        "pulls_admitted": gauges["pulls_admitted"],
        "pulls_admitted_limit": limits["requests"],
        "pulls_retrying": reading.retrying,
        "pull_oldest_seconds": reading.oldest_s["pull"],
        "lease_oldest_seconds": reading.oldest_s["lease"],
        "quarantined_oldest_seconds": reading.oldest_s["quarantined"],
        "in_flight_bytes": gauges["bytes_in_flight"],
        "in_flight_limit_bytes": limits["bytes"],
        "in_flight_descriptors": reading.descriptors_in_flight,
        "in_flight_descriptors_limit": limits["descriptors"],
        "parked_messages": gauges["parked"],
        "parked_messages_limit": limits["parked"],
    }
    for name, value in plain.items():
        yield name, (), value
    for gauge, amount in gauges.items():
        if (where := place_of(gauge)) is not None:
            yield *where, amount


def _counters(counters: Mapping[str, int]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for name in _PLAIN.values():
        found[name, ()] = 0
    for name, labels, causes in _BY_CAUSE.values():
        for cause in causes:
            found[name, (*labels, str(cause))] = 0
    for counter, count in counters.items():
        if (where := place_of(counter)) is not None:
            found[where] = found.get(where, 0) + count
    for (name, labels), count in found.items():
        yield name, labels, count


def place_of(counter: str) -> tuple[str, tuple[str, ...]] | None:
    """Return metric and labels of an engine's counter or an offload's gauge; None if it is not shown."""
    if counter in _PLAIN:
        return _PLAIN[counter], ()
    if counter in _OFFLOAD:
        return _OFFLOAD[counter], ()
    for beginning, (name, labels, _) in _BY_CAUSE.items():
        if counter.startswith(beginning) and counter not in NOT_SHOWN:
            return name, (*labels, counter.removeprefix(beginning))
    return None


NOT_SHOWN = frozenset({"transfers.late_news"})


def _tallied(tally: Tally) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for phase, durations in tally.phases.items():
        yield "pull_phase_seconds", (phase,), durations
    for outcome, durations in tally.pulls.items():
        yield "pull_duration_seconds", (outcome,), durations
    for state, durations in tally.leases.items():
        yield "lease_age_seconds", (state,), durations
    for call, durations in tally.offloads.items():
        yield "offload_duration_seconds", (call,), durations
    yield "loop_lag_seconds", (), tally.lag
    yield "transfers_posted", (), tally.posts
    yield "pull_rereads", (), tally.rereads
    yield "blocks_given_up", (), tally.blocks_given_up
    for reason in sorted(RETRYABLE):
        yield "pulls_retried", (reason.value,), tally.retried[reason.value]
    for peer_state in (*(state.value for state in PeerState), LEFT):
        yield "peer_changes", (peer_state,), tally.peer_states[peer_state]
    for labels, count in tally.peer_pulls.items():
        yield "peer_pulls_ended", labels, count
    for peer, num_bytes in tally.peer_bytes.items():
        yield "peer_read_bytes", (peer,), num_bytes
