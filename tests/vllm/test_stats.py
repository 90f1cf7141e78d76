"""Statistics as vLLM's logger and Prometheus classes take them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from asynckv.errors import PeerLost
from asynckv.integrations.vllm.stats import MAX_SAMPLES, AsyncKVPromMetrics, AsyncKVStats, Tally
from asynckv.results import PullResult

PHASES = {"handshake": 0.1, "queue": 0.2, "plan": 0.0, "post": 9.0, "read": 0.3, "detect": 9.0, "confirm": 0.0}


def result(num_bytes: int = 1 << 20) -> PullResult:
    return PullResult("a", "x", num_bytes, 1, 8, 4, PHASES, (), 16)


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_told_of_nothing_and_once_a_second_otherwise() -> None:
    clock = Clock()
    tally = Tally(clock)
    clock.now = 5.0
    assert tally.take() is None
    tally.received(result())
    stats = tally.take()
    assert stats is not None
    assert stats.data["duration_s"] == pytest.approx([0.6])
    tally.received(result())
    clock.now = 5.9
    assert tally.take() is None
    clock.now = 6.0
    assert tally.take() is not None
    assert tally.take(at_once=True) is None
    tally.received(result())
    assert tally.take() is None
    assert tally.take(at_once=True) is not None


def test_a_mean_has_three_places() -> None:
    tally = Tally()
    tally.received(result(1_234_567))
    stats = tally.take(at_once=True)
    assert stats is not None
    assert stats.reduce()["Avg MiB per pull"] == 1.177


def test_what_is_sent_is_plain_and_adds_up() -> None:
    clock = Clock()
    stats = []
    for reason in ("peer_lost", ""):
        tally = Tally(clock)
        tally.received(result())
        tally.failed(PeerLost("gone", reason=reason))
        tally.failed(KeyError("a bug"))
        tally.lease("released")
        tally.lease("expired")
        clock.now += 2.0
        taken = tally.take()
        assert taken is not None
        stats.append(AsyncKVStats(json.loads(json.dumps(taken.to_dict()))))
    both = stats[0].aggregate(stats[1])
    assert both.data["failed"] == {"peer_lost": 1, "PeerLost": 1, "KeyError": 2}
    assert both.data["leases"] == {"released": 2, "expired": 2}
    assert both.data["bytes"] == [1 << 20] * 2
    reduced = both.reduce()
    assert reduced["Num pulls"] == 2
    assert reduced["Num failed pulls"] == 4
    assert reduced["Avg MiB per pull"] == 1.0
    assert reduced["Avg descriptors per pull"] == 4.0
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
    assert AsyncKVStats().reduce()["Num pulls"] == 0


def test_an_interval_without_end_does_not_grow() -> None:
    tally = Tally(Clock())
    for _ in range(MAX_SAMPLES + 10):
        tally.received(result())
    assert len(tally._stats.data["bytes"]) == MAX_SAMPLES


def test_multi_connector_finds_the_class_where_it_logs() -> None:
    child = {"kv_connector": "AsyncKVConnector", "kv_connector_module_path": "asynckv.integrations.vllm"}
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{**child, "kv_role": "kv_both"}]},
    )
    assert KVConnectorFactory.supports_hma_config(config)  # vLLM asks this of every configuration
    logging, lines = KVConnectorLogging(config), []
    tally = Tally(clock := Clock())
    tally.received(result())
    clock.now = 5.0
    stats = tally.take()
    assert stats is not None
    for _ in range(2):
        logging.observe({"AsyncKVConnector": stats.to_dict()})
    assert len(stats.data["bytes"]) == 1
    logging.log(lambda *line: lines.append(line))
    assert "'Num pulls': 2" in lines[0][1]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_prometheus_counts_per_engine_and_cause(registry: CollectorRegistry) -> None:
    def on(kind: Any) -> Callable[..., Any]:
        return lambda **given: kind(**given, registry=registry)

    class Config:
        kv_transfer_config = None

    metrics = AsyncKVPromMetrics(
        Config(),
        {Gauge: on(Gauge), Counter: on(Counter), Histogram: on(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    data = {"duration_s": [0.02, 0.4], "bytes": [8, 9], "descriptors": [1, 2], "failed": {"peer_lost": 2}, "leases": {}}
    metrics.observe(data, engine_idx=1)
    metrics.observe({"leases": {"expired": 3}}, engine_idx=0)
    text = prometheus_client.generate_latest(registry).decode()
    for engine in "01":  # an increase from nothing would not be seen
        labels = f'engine="{engine}",model_name="m"'
        assert f'vllm:asynckv_computed_locally_total{{cause="no_params",{labels}}} 0.0' in text
        assert f'vllm:asynckv_prompts_total{{{labels},params="without_params"}} 0.0' in text
    assert 'vllm:asynckv_pull_seconds_count{engine="1",model_name="m"} 2.0' in text
    assert 'vllm:asynckv_failed_pulls_total{cause="peer_lost",engine="1",model_name="m"} 2.0' in text
    assert 'vllm:asynckv_ended_leases_total{cause="expired",engine="0",model_name="m"} 3.0' in text
