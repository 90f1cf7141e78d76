"""What Prometheus is shown: counted right, named by its conventions, from whatever thread it asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from asynckv import (
    BackendError,
    ConfigError,
    EngineConfig,
    EngineThread,
    LocalProtocolError,
    Metrics,
    MetricsEndpoint,
    NixlConfig,
    Observer,
    PrefillRanks,
    WrongThread,
)
from asynckv.core.pull import Pull as CorePull
from asynckv.observe import endpoint as endpoints
from asynckv.observe import metrics as metrics_module
from asynckv.observe.metrics import FAMILIES, place_of
from asynckv.observe.metrics_tally import BUCKETS_S, MAX_PEERS, PHASES, Durations, MetricsTally
from tests.engines import Bench, memory, until
from tests.lab.tiers import SimDisk
from tests.observed import QUICK, end, lived, passing, registered, story
from tests.offloads import RECORD, SIZE, Rank, chain, layout_of
from tests.test_arguments import HOSTILE

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exposed(*engines: Any, **how: Any) -> str:
    return generate_latest(registered(Metrics(*engines, **how))).decode()


def parsed(text: str) -> Samples:
    """Every sample by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, engine_id: str, **labels: str) -> float:
    return samples[f"asynckv_{name}", frozenset({"engine_id": engine_id, "rank": "tp0", **labels}.items())]


# -- what is counted ---------------------------------------------------------------------------------


async def test_a_story_of_failures_is_told_in_numbers(sim: Bench) -> None:
    text = await lived(sim)
    samples = parsed(text)
    ended = {
        dict(labels)["reason"]: count
        for (name, labels), count in samples.items()
        if name == "asynckv_pulls_ended_total" and ("engine_id", "decode") in labels and count
    }
    assert ended == {"complete": 2, "read_failed": 1, "cancelled": 1, "withdrawn": 1, "timeout": 1}
    assert value(samples, "pulls_started_total", "decode") == 6
    assert value(samples, "pulls_retried_total", "decode", reason="read_failed") == 1
    assert value(samples, "leases_lent_total", "prefill") == 4
    leases = {s: value(samples, "leases_ended_total", "prefill", state=s) for s in ("released", "expired", "revoked")}
    assert leases == {"released": 3, "expired": 1, "revoked": 0}
    assert value(samples, "lease_age_seconds_count", "prefill", state="expired") == 1
    assert 30 <= value(samples, "lease_age_seconds_sum", "prefill", state="expired") < 30.5
    assert value(samples, "requests_withdrawn_total", "prefill") == 1
    assert value(samples, "refusals_total", "prefill", reason="withdrawn") == 1
    assert value(samples, "transfers_ended_total", "decode", result="failed") == 1
    assert value(samples, "blocks", "decode", state="retired") == 1
    assert value(samples, "blocks", "decode", state="quarantined") == 0
    assert value(samples, "blocks_given_up_total", "decode") == 1
    assert value(samples, "quarantined_oldest_seconds", "decode") >= 30
    assert value(samples, "peer_pulls_ended_total", "decode", peer="prefill", outcome="failed") == 3
    moved = value(samples, "peer_read_bytes_total", "decode", peer="prefill")
    assert 0 < moved < value(samples, "read_bytes_total", "decode")  # of those that failed some bytes came as well
    assert value(samples, "pull_duration_seconds_count", "decode", outcome="failed") == 3
    assert value(samples, "pull_phase_seconds_count", "decode", phase="read") == 6
    assert 3 <= value(samples, "pull_phase_seconds_sum", "decode", phase="read") < 3.2
    assert value(samples, "engine_state", "decode", state="running") == 1
    assert sum(v for (name, labels), v in samples.items() if name == "asynckv_engine_state") == 2


async def test_every_counter_of_an_engine_is_shown_or_known(bench: Bench) -> None:
    """What another counter would be shown as has to be said in `observe/metrics.toml`, or here that it is not."""
    async with bench.pair(**QUICK) as (prefill, decode, group):
        if bench.real:
            params, _ = prefill.lent(group, "r", [1], written=True)
            await decode.engine.pull("d", [(0, [1])], params)
        else:
            await story(bench, prefill, decode, group)
            await end(decode)
        counters = {**prefill.engine.statistics().counters, **decode.engine.statistics().counters}
    assert "pulls.complete" in counters
    hidden = {name for name in counters if place_of(name) is None and not name.startswith("data.")}
    assert hidden <= HIDDEN, "show it, or say why not"


HIDDEN = {
    "blocks.kept",  # counts pulls for `asynckv why`; `blocks` has what is kept now
    "blocks.retired",  # counts pulls; blocks_given_up counts blocks
    "control.bytes_in",
    "control.bytes_out",
    "control.connections.accepted",  # with keys
    "control.connections.admitted",
    "control.connections.closed",
    "control.links",
    "peers.set_aside",  # peer_changes{state="suspect"}
}


async def test_what_is_under_way_is_shown_by_state_and_age(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        lent = [prefill.engine.lend(group.make_params(f"r{i}", [(0, [i])], 16, written=True)) for i in range(3)]
        sim.clock.advance(12.0)
        params = group.make_params("late", [(0, [7])], 16, written=True)
        lent.append(prefill.engine.lend(params))
        decode.engine.announce("d", params)
        await until(lambda: decode.engine.statistics().gauges["pulls_unanswered"] == 0)
        samples = parsed(exposed(prefill.engine, decode.engine))
        assert value(samples, "leases", "prefill", state="lent") == 4
        over = {s: value(samples, "leases_older_than", "prefill", seconds=s) for s in ("1", "5", "10", "30", "300")}
        assert over == {"1": 3, "5": 3, "10": 3, "30": 0, "300": 0}
        assert value(samples, "lease_oldest_seconds", "prefill") == pytest.approx(12.0, abs=0.1)
        assert value(samples, "blocks", "prefill", state="lent") == 4
        assert value(samples, "pulls", "decode", state="announced") == 1
        assert value(samples, "peers", "decode", state="ready") == 1
        sim.clock.advance(2.0)
        samples = parsed(exposed(prefill.engine, decode.engine))
        assert value(samples, "pull_oldest_seconds", "decode") == pytest.approx(2.0, abs=0.1)
        decode.engine.cancel("d")
        for each in lent:
            each.withdraw()


async def test_tiers_are_shown_and_a_disk_that_is_lost_is_counted() -> None:
    disk = SimDisk(64 * RECORD)
    rank = Rank(layout_of(), disk=disk)
    registry = registered(Metrics(rank.engine))
    async with rank.running() as offload:
        await offload.store("a", [(0, [1, 2])], chain("p", 2))
        await until(lambda: offload.statistics().counters["blocks.write_back"] == 2)
        await offload.load("b", [(0, [5])], chain("p", 1), num_tokens=SIZE)
        assert rank.records is not None
        rank.records.lose(reads=False)
        await until(lambda: offload.statistics().counters["files_lost.writes"])
        samples = parsed(generate_latest(registry).decode())
        said, own = rank.engine.statistics(), offload.statistics()
        assert "files_off" in offload.describe()
    for tier in ("host", "file"):
        assert value(samples, "offload_blocks", "worker", state="kept", tier=tier) == 2
        assert value(samples, "offload_blocks", "worker", state="leaving", tier=tier) == 0
        assert value(samples, "offload_bytes", "worker", tier=tier) == 2 * RECORD
    assert value(samples, "offload_limit_bytes", "worker", tier="host") == 16 * RECORD
    assert value(samples, "offload_bytes_moved_total", "worker", move="store") == 2 * RECORD
    assert value(samples, "offload_disk_failures_total", "worker", what="writes") == 1
    assert value(samples, "offload_duration_seconds_count", "worker", call="store") == 1
    assert value(samples, "offload_duration_seconds_count", "worker", call="load") == 1
    for tier, what, up in (("host", "writes", 1), ("file", "reads", 1), ("file", "writes", 0)):
        assert value(samples, "offload_up", "worker", what=what, tier=tier) == up
    assert value(samples, "offload_waiting_blocks", "worker") == 0
    for of_offload, of_engine in ((own.counters, said.counters), (own.gauges, said.gauges)):
        assert {f"offload.{name}" for name in of_offload} == {name for name in of_engine if name.startswith("offload.")}
    mine = {f"offload.{name}" for name in (*own.counters, *own.gauges)}
    hidden = {n for n in mine if place_of(n) is None and not n.startswith(("offload.copies.", "offload.files."))}
    assert hidden <= HIDDEN_OF_OFFLOAD, "show it, or say why not"


HIDDEN_OF_OFFLOAD = {
    *(f"offload.{name}" for name in ("jobs", "pins", "moves", "moves_in_doubt", "bytes_under_way")),  # of milliseconds
    "offload.lookups",  # tokens{what="looked_up"} says more
    "offload.lookup_hits",
    "offload.lent",  # leases_lent of the host tier's own engine
    "offload.moves_doubted",  # blocks{state="quarantined"}
    "offload.jobs_retired",
}


async def test_durations_are_counted_as_the_log_tells_them(sim: Bench) -> None:
    pulls: list[CorePull] = []

    class Kept(Observer):
        def pull_ended(self, pull: CorePull, now: float) -> None:
            pulls.append(pull)

    async with sim.pair() as (prefill, decode, group):
        kept, tally = Kept(), MetricsTally()
        for observer in (kept, tally):
            decode.engine.observation.observe(observer)
        params, _ = prefill.lent(group, "r", [1], written=True)
        result = await decode.engine.pull("d", [(0, [1])], params)
        counted = {name: durations.total_s for name, durations in tally.phases.items() if sum(durations.counts)}
        assert {**counted, "release": 0.0} == result.phases
        assert set(result.phases) < set(PHASES)
        (pull,) = pulls
        assert tally.pulls["complete"].total_s == pull.published_at - pull.called_at


def test_a_duration_is_in_the_first_bucket_that_holds_it() -> None:
    durations = Durations()
    for seconds in (0.0, 1e-4, 1.1e-4, 0.3, 100.0, 1e9):
        durations.add(seconds)
    assert (BUCKETS_S[0], BUCKETS_S[-1], len(BUCKETS_S)) == (1e-4, 100.0, 19)
    assert list(BUCKETS_S) == sorted(BUCKETS_S)
    assert (durations.counts[0], durations.counts[1], durations.counts[-2], durations.counts[-1]) == (2, 1, 1, 1)


async def test_labels_take_few_values_and_name_no_request(sim: Bench) -> None:
    registry = CollectorRegistry()
    async with sim.pair(**QUICK) as (prefill, decode, group):
        registry.register(Metrics(prefill.engine, decode.engine))
        for i in range(MAX_PEERS + 10):
            other = PrefillRanks(f"prefill-{i}", [prefill.engine.endpoint])
            params = other.make_params(f"r{i}", [(0, [1])], 16)
            await passing(sim, asyncio.create_task(decode.engine.pull(f"d{i}", [(0, [1])], params, timeout_s=0.5)))
        await story(sim, prefill, decode, group)
        text, endpoint = generate_latest(registry).decode(), prefill.engine.endpoint
        await end(decode)
    samples = parsed(text)
    peers = {dict(labels).get("peer") for _, labels in samples} - {None}
    assert len(peers) == MAX_PEERS + 1
    assert "other" in peers
    assert len(samples) < 1500
    values = {value for _, labels in samples for value in dict(labels).values()}
    assert not values & {endpoint.address, "d-well", "well", "d-stuck", "d1", "r1"}
    assert {n for n, labels in samples if endpoint.incarnation in dict(labels).values()} == {"asynckv_engine_info"}


async def test_the_text_is_as_prometheus_wants_it(sim: Bench) -> None:
    text = await lived(sim)
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds == {
        f"asynckv_{name}": "gauge" if family.kind == "info" else family.kind for name, family in FAMILIES.items()
    }
    samples = parsed(text)
    for name, labels in samples:
        if name.endswith("_bucket"):
            whole = name.removesuffix("_bucket") + "_count", labels - {("le", dict(labels)["le"])}
            assert samples[name, labels] <= samples[whole]
    engine = sim.side("other", 3).engine
    registry = registered(Metrics(engine))
    assert list(parse_openmetrics(generate_openmetrics(registry).decode()))  # type: ignore[no-untyped-call]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
async def test_promtool_finds_no_fault_with_it(sim: Bench) -> None:
    text = await lived(sim)
    done = await anyio.run_process(["promtool", "check", "metrics"], input=text.encode(), check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")


def test_a_registry_refuses_two_collectors_and_one_takes_several_engines() -> None:
    sim = Bench(False)
    one, two = sim.side("one", 1).engine, sim.side("two", 2).engine
    metrics, registry = Metrics(one), CollectorRegistry()
    registry.register(metrics)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Metrics(two))
    metrics.add(two)
    metrics.add(two)
    samples = parsed(generate_latest(registry).decode())
    assert {dict(labels)["engine_id"] for _, labels in samples} == {"one", "two"}
    assert value(samples, "engine_state", "two", state="new") == 1
    metrics.remove(one)
    assert {dict(labels)["engine_id"] for _, labels in parsed(generate_latest(registry).decode())} == {"two"}
    assert one._driver.observers.everyone == (one._recorder,)


@pytest.mark.parametrize("what", HOSTILE)
def test_arguments_are_taken_or_refused(what: str) -> None:
    given: Any = HOSTILE[what]
    engine = Bench(False).side("e", 1).engine
    calls: list[Callable[[], object]] = [
        lambda: Metrics(given),
        lambda: Metrics(wait_s=given),
        lambda: MetricsEndpoint(given),
        *(
            lambda name=name: MetricsEndpoint(Metrics(engine), **{name: given})
            for name in ("host", "port", "wait_s", "allow_remote")
        ),
    ]
    for call in calls:
        refused: ConfigError | None = None
        try:
            call()
        except ConfigError as exc:
            refused = exc
        assert refused is None or 10 < len(str(refused)) < 2000
        assert refused is not None or what in ("1.5", "true", "numpy integer", "numpy float", "numpy bool"), what
    with pytest.raises(LocalProtocolError, match="observer is"):
        engine.observation.observe(given)


# -- observers ---------------------------------------------------------------------------------------


async def test_what_an_observer_raises_is_counted_and_changes_nothing(
    sim: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Observer):
        def pull_ended(self, pull: CorePull, now: float) -> None:
            raise RuntimeError("a bug of the observer's")

    async with sim.pair() as (prefill, decode, group):
        broken, tally = Broken(), MetricsTally()
        decode.engine.observation.observe(broken)
        decode.engine.observation.observe(tally)
        for i in range(3):
            params, lent = prefill.lent(group, f"r{i}", [1], written=True)
            await decode.engine.pull(f"d{i}", [(0, [1])], params)
            await lent.wait_released()
        counters = decode.engine.statistics().counters
        assert (counters["observers.failed"], counters.get("internal_errors", 0)) == (3, 0)
        told = [record for record in caplog.records if "a bug of the observer's" in record.getMessage()]
        assert len(told) == 2, "the first and the second, of three"
        assert sum(tally.pulls["complete"].counts) == 3
        decode.engine.observation.unobserve(broken)
        samples = parsed(exposed(decode.engine))
        assert value(samples, "observer_errors_total", "decode") == 3


async def test_a_bug_in_here_spoils_nothing_else_that_is_shown(
    sim: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with sim.pair() as (_, decode, _):
        registry = registered(Metrics(decode.engine))
        generate_latest(registry)

        def bug() -> Any:
            raise KeyError("a bug")

        monkeypatch.setattr(decode.engine.observation, "reading", bug)
        samples = parsed(generate_latest(registry).decode())
        assert value(samples, "engine_state", "decode", state="running") == 1
        assert [r.getMessage() for r in caplog.records if r.exc_info] == [
            "asynckv: no reading of decode/tp0 could be taken for its metrics"
        ]


# -- from other threads ------------------------------------------------------------------------------


@pytest.mark.nixl
@pytest.mark.slow
async def test_a_scrape_from_another_thread_reads_what_is_true_there() -> None:
    async with Bench(True).pair() as (prefill, decode, group):
        metrics = Metrics(prefill.engine, decode.engine, wait_s=5.0)
        registry = registered(metrics)
        counts: list[float] = []

        def scrape(under_way: int = 1) -> None:
            samples = parsed(generate_latest(registry).decode())
            started = value(samples, "pulls_started_total", "decode")
            ended = value(samples, "pulls_ended_total", "decode", reason="complete")
            # What has ended is counted at once, and told to observers in the loop's next turn.
            timed = value(samples, "pull_duration_seconds_count", "decode", outcome="complete")
            assert ended - under_way <= timed <= ended <= started
            counts.append(ended)

        with pytest.raises(WrongThread):
            await asyncio.to_thread(decode.engine.observation.reading)
        for i in range(40):
            params, lent = prefill.lent(group, f"r{i}", [i % 32], written=True)
            scraping = asyncio.ensure_future(asyncio.to_thread(scrape)) if i % 4 == 0 else None
            await decode.engine.pull(f"d{i}", [(0, [i % 32])], params)
            await lent.wait_released()
            if scraping is not None:
                await scraping
        await asyncio.to_thread(scrape, 0)
        assert counts == sorted(counts)
        assert counts[-1] == 40


async def test_a_loop_that_is_away_is_shown_as_it_was_and_for_how_long_that_is_so(sim: Bench) -> None:
    async with sim.pair() as (_, decode, _):
        metrics = Metrics(decode.engine, wait_s=0.01)
        registry = registered(metrics)
        generate_latest(registry)
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(generate_latest(registry).decode()))
        time.sleep(0.06)  # noqa: ASYNC251 - the loop is away
        thread.start()
        thread.join()
        samples = parsed(texts[0])
        assert value(samples, "engine_state", "decode", state="running") == 1
        assert value(samples, "reading_age_seconds", "decode") > 0.05
        await asyncio.sleep(0)  # nobody waits for the answer any more
        assert value(parsed(generate_latest(registry).decode()), "reading_age_seconds", "decode") == 0


def test_a_scrape_has_to_wait_for_some_time() -> None:
    """A question that waits for nothing is called back before the loop can answer, so no reading would be taken."""
    with pytest.raises(ConfigError, match="wait_s"):
        Metrics(wait_s=0)


@pytest.mark.nixl
def test_a_thread_is_scraped_from_outside_and_after_its_end() -> None:
    registration, _ = memory(1)
    engine = EngineThread(EngineConfig(engine_id="e"), registration)
    metrics = Metrics(engine, wait_s=5.0)
    registry = registered(metrics)
    assert value(parsed(generate_latest(registry).decode()), "engine_state", "e", state="new") == 1
    engine.start()
    assert value(parsed(generate_latest(registry).decode()), "engine_state", "e", state="running") == 1
    engine.close()
    samples = parsed(generate_latest(registry).decode())
    assert value(samples, "engine_state", "e", state="closed") == 1
    assert value(samples, "pulls", "e", state="reading") == 0


# -- the endpoint ------------------------------------------------------------------------------------


def get(url: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


async def fetched(url: str, path: str) -> tuple[int, Any]:
    status, text = await asyncio.to_thread(get, url, path)
    return status, json.loads(text) if path != "/metrics" else text


async def test_probes_say_how_an_engine_is_and_why(sim: Bench) -> None:
    side = sim.side("e", 1)
    with MetricsEndpoint(Metrics(side.engine), wait_s=5.0) as endpoint:
        url = endpoint.url
        assert (await fetched(url, "/healthz"))[0] == 200
        status, body = await fetched(url, "/readyz")
        assert (status, body["engines"][0]["why"]) == (503, "the engine is not started")
        await side.engine.start()
        assert await fetched(url, "/readyz") == (
            200,
            {"ok": True, "engines": [{"engine_id": "e", "rank": "tp0", "ok": True, "why": ""}]},
        )
        status, text = await fetched(url, "/metrics")
        assert value(parsed(text), "engine_state", "e", state="running") == 1
        side.engine._driver.data_down = "exit status 6"
        assert (await fetched(url, "/healthz"))[1]["engines"][0][
            "why"
        ] == "the data plane does not serve: exit status 6"
        assert (await fetched(url, "/readyz"))[0] == 503
        side.engine._driver.data_down = ""
        await side.engine.drain(0.1)
        assert (await fetched(url, "/healthz"))[0] == 200
        assert (await fetched(url, "/readyz"))[1]["engines"][0]["why"] == "the engine is draining"
        assert (await fetched(url, "/else"))[0] == 404
        await side.engine.aclose()
        # With its last engine it ends by itself.
        with anyio.fail_after(5):
            assert endpoint._thread is not None
            await asyncio.to_thread(endpoint._thread.join)
        with pytest.raises((urllib.error.URLError, ConnectionError)):  # refused, or hung up on
            await fetched(url, "/healthz")
    with pytest.raises(LocalProtocolError, match="has ended"):
        endpoint.start()


def test_clients_are_bounded_in_number_and_in_time(sim: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_CLIENTS", 2)
    monkeypatch.setattr(endpoints, "MOST_S", 0.4)
    with MetricsEndpoint(Metrics(sim.side("e", 1).engine)) as endpoint, contextlib.ExitStack() as stack:
        port = int(endpoint.url.rpartition(":")[2])
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        for each in slow:
            each.sendall(b"GET ")
        # One more is served at once, in place of the oldest.
        assert get(endpoint.url, "/readyz")[0] == 503
        slow[0].settimeout(5.0)
        assert slow[0].recv(1) == b""
        slow[1].settimeout(5.0)  # a client that says a letter now and then is hung up on all the same
        with contextlib.suppress(ConnectionError):  # on a busy machine it was, before it said so
            slow[1].sendall(b"/")
            assert slow[1].recv(1) == b""
        assert get(endpoint.url, "/readyz")[0] == 503


async def test_a_reading_that_takes_long_serves_others_as_well(sim: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "LONG_S", 0.0)
    async with sim.pair() as (prefill, _, group):
        metrics = Metrics(prefill.engine)
        shown = metrics._shown[0]
        first = shown._read()
        shown._fresh_until = time.monotonic() + 60
        prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
        assert shown._read() is first
        shown._fresh_until = time.monotonic()
        assert shown._read()[1].gauges["leases"] == 1


def test_a_copy_of_a_tally_is_shared_with_no_other() -> None:
    tally = MetricsTally()
    before = tally.copy()
    for durations in (tally.phases["read"], tally.pulls["failed"], tally.leases["expired"], tally.lag):
        durations.add(1.0)
    tally.peer_bytes["p"] += 1
    tally.posts += 1
    assert sum(sum(d.counts) for d in (before.phases["read"], before.pulls["failed"], before.lag)) == 0
    assert (sum(before.leases["expired"].counts), before.peer_bytes, before.posts) == (0, {}, 0)
    after = tally.copy()
    assert (after.lag.total_s, after.peer_bytes["p"], after.posts, after.phases["read"].total_s) == (1.0, 1, 1, 1.0)


async def test_a_loop_that_does_not_answer_is_no_health(sim: Bench) -> None:
    async with sim.pair() as (_, decode, _):
        with MetricsEndpoint(Metrics(decode.engine, wait_s=0.01), wait_s=0.05) as endpoint:
            found: list[tuple[int, str]] = []
            thread = threading.Thread(target=lambda: found.append(get(endpoint.url, "/healthz")))
            thread.start()
            thread.join()  # the loop waits here, and is away
            status, text = found[0]
            assert status == 503
            assert "the event loop did not answer within 0.05 s" in text
            assert (await fetched(endpoint.url, "/healthz"))[0] == 200


def test_the_endpoint_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    metrics = Metrics()
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="allow_remote=True"):
            MetricsEndpoint(metrics, host=host)
    with MetricsEndpoint(metrics, host="0.0.0.0", allow_remote=True) as endpoint:
        port = endpoint.url.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"cannot be served on 0.0.0.0 port {port}: .*in use"):
            MetricsEndpoint(metrics, host="0.0.0.0", port=int(port), allow_remote=True).start()
        status, text = get(f"http://127.0.0.1:{port}", "/readyz")
        assert (status, json.loads(text)) == (503, {"ok": False, "engines": [], "why": "no engine is shown"})
    with MetricsEndpoint(metrics) as endpoint, pytest.raises(LocalProtocolError, match="listens at"):
        endpoint.start()
    endpoint.close()


@pytest.mark.nixl
@pytest.mark.slow
def test_a_thread_is_probed_while_it_runs_and_the_endpoint_ends_with_it() -> None:
    registration, _ = memory(1)
    with EngineThread(EngineConfig(engine_id="e"), registration) as thread:
        endpoint = MetricsEndpoint(Metrics(thread), wait_s=5.0).start()
        assert get(endpoint.url, "/readyz")[0] == 200
        serving = endpoint._thread
        assert serving is not None
    serving.join(5)
    assert not serving.is_alive()


def test_an_endpoint_ends_with_an_engine_that_could_not_be_started() -> None:
    """Else it would say for ever that all is well, and keep its port from the next attempt."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        registration, _arrays = memory(1)
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        nixl = NixlConfig(process="never", posting_threads=0)
        thread = EngineThread(EngineConfig(engine_id="e", bind=bind, nixl=nixl), registration)
        endpoint = MetricsEndpoint(Metrics(thread)).start()
        with pytest.raises(BackendError):
            thread.start()
        thread.close()
        endpoint_thread = endpoint._thread
        assert endpoint_thread is not None
        endpoint_thread.join(10.0)
        assert not endpoint_thread.is_alive()


# -- what happens to an engine -----------------------------------------------------------------------


async def test_a_data_plane_that_dies_is_seen_until_another_serves(sim: Bench) -> None:
    async with sim.pair() as (_, decode, _):
        registry = registered(Metrics(decode.engine))
        with MetricsEndpoint(Metrics(decode.engine), wait_s=5.0) as endpoint:
            decode.data.lose_agent()
            await until(lambda: decode.engine.observation.condition()[1])
            samples = parsed(generate_latest(registry).decode())
            assert value(samples, "data_plane_up", "decode") == 0
            assert value(samples, "data_plane_losses_total", "decode") == 1
            status, body = await fetched(endpoint.url, "/healthz")
            assert (status, body["engines"][0]["why"]) == (503, "the data plane does not serve: killed on request")
            decode.data.replace_agent()
            await until(lambda: not decode.engine.observation.condition()[1])
            samples = parsed(generate_latest(registry).decode())
            assert value(samples, "data_plane_up", "decode") == 1
            assert value(samples, "data_plane_restarts_total", "decode") == 1
            assert (await fetched(endpoint.url, "/readyz"))[0] == 200


async def test_counters_go_on_over_a_sleep_and_the_state_is_told(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        registry = registered(Metrics(decode.engine))
        incarnations = set()
        for turn in range(2):
            params, lent = prefill.lent(group, f"r{turn}", [1], written=True)
            await decode.engine.pull(f"d{turn}", [(0, [1])], params)
            await lent.wait_released()
            samples = parsed(generate_latest(registry).decode())
            assert value(samples, "pulls_ended_total", "decode", reason="complete") == turn + 1
            assert value(samples, "pull_duration_seconds_count", "decode", outcome="complete") == turn + 1
            incarnations |= {dict(labels)["incarnation"] for name, labels in samples if name == "asynckv_engine_info"}
            await passing(sim, asyncio.create_task(decode.engine.suspend()))
            samples = parsed(generate_latest(registry).decode())
            assert value(samples, "engine_state", "decode", state="suspended") == 1
            assert value(samples, "pulls_ended_total", "decode", reason="complete") == turn + 1
            await decode.engine.resume()
        assert len(incarnations) == 2
