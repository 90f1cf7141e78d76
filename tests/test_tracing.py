"""One trace over router, prefill and decode, with right parents, times and links; without an SDK there is none."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from asynckv import ConfigError, Endpoint, Metrics, PrefillRanks, Tracing, trace_context
from asynckv.core.types import MAX_TRACESTATE, decode_params
from asynckv.observe import tracing
from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.router import Router
from asynckv.tools.proxy.server import serving
from tests.engines import Bench, Side, turn_loop, until
from tests.observed import QUICK, end, passing, story

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Spans:
    """An application's SDK, and what it was given."""

    def __init__(self) -> None:
        self.provider, self._exporter = TracerProvider(), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def __iter__(self) -> Any:
        return iter(self._exporter.get_finished_spans())

    def of(self, name: str, request_id: str) -> list[ReadableSpan]:
        return [s for s in self if s.name == name and attributes(s).get("asynckv.request_id") == request_id]


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


@pytest.fixture
def spans() -> Spans:
    return Spans()


async def test_one_trace_over_both_sides_with_right_parents_and_times(bench: Bench, spans: Spans) -> None:
    async with bench.pair() as (prefill, decode, group):
        Tracing(prefill.engine, decode.engine, provider=spans.provider)
        before_ns = time.time_ns()
        with spans.provider.get_tracer("router").start_as_current_span("route") as router:
            params = group.make_params("r", [(0, [1])], 16, written=True, trace=trace_context())
        lent = prefill.engine.lend(params)
        await decode.engine.pull("d", [(0, [1])], params)
        await lent.wait_released()
        await until(lambda: spans.of("asynckv.release", "d"))
        after_ns = time.time_ns()
        (lease,), (pull,), (release,) = (
            spans.of("asynckv.lease", "r"),
            spans.of("asynckv.pull", "d"),
            spans.of("asynckv.release", "d"),
        )
        root = router.get_span_context()
        for span in (lease, pull, release):
            assert span.context is not None
            assert span.context.trace_id == root.trace_id
            assert span.status.status_code is StatusCode.UNSET
            assert span.start_time is not None
            assert span.end_time is not None
            assert before_ns - 1_000_000 <= span.start_time <= span.end_time <= after_ns
        assert lease.parent is not None
        assert pull.parent is not None
        assert lease.parent.span_id == pull.parent.span_id == root.span_id
        assert release.parent == pull.context
        assert (lease.kind, pull.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        assert events(lease)[:2] == ["lent", "granted"]
        assert events(lease)[-2:] == ["released", "released"]  # by whom, and then altogether
        happened = events(pull)
        for name in ("announced", "connecting", "queued", "admitted", "landed", "proven"):
            assert happened.count(name) == 1, happened
        assert "granted" in happened
        assert events(release) == ["released", "released"]
        assert attributes(pull)["asynckv.bytes"] == len(decode.blocks([1]))
        assert attributes(pull)["asynckv.prefill_request_id"] == "r"
        assert attributes(lease)["asynckv.sequence"] == attributes(pull)["asynckv.sequence"]
        assert attributes(lease)["asynckv.engine_id"] == "prefill"


async def test_a_lease_that_is_cut_short_has_its_span_and_is_counted(sim: Bench, spans: Spans) -> None:
    async with sim.pair() as (prefill, decode, group):
        Tracing(prefill.engine, provider=spans.provider)
        metrics = Metrics(prefill.engine)
        params, _ = prefill.lent(group, "r", [1], trace={"traceparent": TRACEPARENT})
        decode.data.deferred = True
        task = asyncio.create_task(decode.engine.pull("d", [(0, [3])], params))
        await until(lambda: prefill.engine.requests()[0].ranks[0].state == "granted")
        await passing(sim, asyncio.create_task(prefill.engine.aclose(0.0)))
        (lease,) = spans.of("asynckv.lease", "r")
        assert (attributes(lease)["asynckv.lease.end"], lease.status.status_code) == ("closed", StatusCode.ERROR)
        assert lease.start_time is not None
        assert lease.end_time is not None
        assert lease.start_time <= lease.end_time
        assert prefill.engine.statistics().counters["leases.closed"] == 1
        shown = {(x.name, x.labels.get("state")): x.value for family in metrics.collect() for x in family.samples}
        assert shown["asynckv_leases_ended_total", "closed"] == shown["asynckv_lease_age_seconds_count", "closed"] == 1
        await passing(sim, task)
        decode.data.finish()


async def test_places_without_a_block_are_no_blocks_of_a_span(sim: Bench, spans: Spans) -> None:
    async with sim.pair() as (prefill, _, group):
        Tracing(prefill.engine, provider=spans.provider)
        prefill.engine.lend(group.make_params("r", [(0, [None, 1])], 32, trace={"traceparent": TRACEPARENT}))
        await passing(sim, asyncio.create_task(prefill.engine.aclose(0.0)))
        (lease,) = spans.of("asynckv.lease", "r")
        assert attributes(lease)["asynckv.blocks"] == 1


async def test_durations_of_spans_are_those_of_the_log(sim: Bench, spans: Spans) -> None:
    async with sim.pair() as (prefill, decode, group):
        Tracing(prefill.engine, decode.engine, provider=spans.provider)
        params, _ = prefill.lent(group, "r", [1], written=True, trace={"traceparent": TRACEPARENT})
        decode.data.deferred = True
        task = asyncio.create_task(decode.engine.pull("d", [(0, [1])], params))
        await until(lambda: decode.data is not None and decode.data.running)
        for _ in range(30):
            sim.clock.advance(0.1)
            await turn_loop(5)
        decode.data.finish()
        result = await task
        (pull,) = spans.of("asynckv.pull", "d")
        assert pull.start_time is not None
        assert pull.end_time is not None
        took_s = sum(s for phase, s in result.phases.items() if phase not in ("post", "detect", "release"))
        assert (pull.end_time - pull.start_time) / 1e9 == pytest.approx(took_s, abs=1e-6)
        (admitted,) = [event for event in pull.events if event.name == "admitted"]
        (landed,) = [event for event in pull.events if event.name == "landed"]
        assert (landed.timestamp - admitted.timestamp) / 1e9 == pytest.approx(result.phases["read"], abs=1e-6)


async def test_a_first_attempt_has_no_link_to_an_earlier_request_of_its_id(sim: Bench, spans: Spans) -> None:
    async with sim.pair() as (prefill, decode, group):
        Tracing(decode.engine, provider=spans.provider)
        for name in ("r1", "r2"):
            params, _ = prefill.lent(group, name, [1], written=True, trace={"traceparent": TRACEPARENT})
            decode.data.deferred = name == "r1"
            task = asyncio.create_task(decode.engine.pull("d", [(0, [3])], params, retries=1))
            if name == "r1":  # it is given up between two attempts
                await until(lambda: decode.data.running)
                decode.data.fail(next(iter(decode.data.running)))
                await until(lambda: decode.engine.observation.reading().retrying)
                decode.engine.cancel("d")
            await asyncio.gather(task, return_exceptions=True)
        assert [len(span.links) for span in spans.of("asynckv.pull", "d")] == [0, 0]


async def test_failures_and_retries_are_told_with_their_cause(sim: Bench, spans: Spans) -> None:
    async with sim.pair(**QUICK) as (prefill, decode, group):
        Tracing(prefill.engine, decode.engine, provider=spans.provider)
        traces: dict[str, str] = {}

        def make(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
            traces[name] = f"{len(traces) + 1:032x}"
            return group.make_params(
                name, *args, **kwargs, trace={"traceparent": f"00-{traces[name]}-00f067aa0ba902b7-01"}
            )

        await story(sim, prefill, decode, group, make)
        await end(decode)
        await until(lambda: len(spans.of("asynckv.release", "d-stuck")) == 1)
        for span in spans:
            name = str(attributes(span)["asynckv.request_id"]).removeprefix("d-")
            assert span.context is not None
            assert f"{span.context.trace_id:032x}" == traces[name]
        first, second = spans.of("asynckv.pull", "d-retried")
        assert (attributes(first)["asynckv.attempt"], attributes(second)["asynckv.attempt"]) == (1, 2)
        assert [link.context for link in second.links] == [first.context]
        assert not first.links
        assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
        assert str(first.status.description).startswith("read_failed: failed in read: a transfer from prefill/tp0@")
        assert "failed" in events(first)
        outcomes = {
            str(attributes(span)["asynckv.request_id"]): (attributes(span).get("error.type"), span.status.status_code)
            for span in spans
            if span.name == "asynckv.pull"
        }
        assert outcomes == {
            "d-well": (None, StatusCode.UNSET),
            "d-retried": (None, StatusCode.UNSET),
            "d-cancelled": (None, StatusCode.UNSET),
            "d-withdrawn": ("withdrawn", StatusCode.ERROR),
            "d-stuck": ("timeout", StatusCode.ERROR),
        }
        (expired,) = spans.of("asynckv.lease", "expired")
        assert (attributes(expired)["error.type"], attributes(expired)["asynckv.lease.owed"]) == ("expired", ("*",))
        assert events(expired) == ["lent", "expired"]
        (stuck,) = spans.of("asynckv.release", "d-stuck")
        assert "retired" in events(stuck)


async def test_without_an_sdk_or_a_context_nothing_is_made(
    sim: Bench, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    honest = tracing.Tracing._add_events

    def add(self: Tracing, *args: Any) -> None:
        made.append("events")
        honest(self, *args)

    monkeypatch.setattr(tracing.Tracing, "_add_events", add)
    async with sim.pair() as (prefill, decode, group):
        assert trace_context() == {}
        silent = Tracing(prefill.engine, decode.engine)  # nobody has set a provider
        asked = Tracing(prefill.engine, decode.engine, provider=spans.provider)
        for name, context in (("plain", trace_context()), ("traced", {"traceparent": TRACEPARENT})):
            params, lent = prefill.lent(group, name, [1], written=True, trace=context)
            await decode.engine.pull(f"d-{name}", [(0, [1])], params)
            await lent.wait_released()
            await until(lambda: decode.engine.statistics().gauges["pulls"] == 0)
            await until(lambda: not asked._over)
            kept = (silent._lent, silent._over, silent._failed)
            assert not any(kept)
            if name == "plain":
                assert not list(spans)
                assert not any((asked._lent, asked._over, asked._failed))
        assert len(list(spans)) == 3
        assert len(made) == 3  # of the one who asked


async def test_of_what_never_ends_little_is_kept(sim: Bench, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_KEPT", 3)
    async with sim.pair() as (prefill, _, group):
        traced = Tracing(prefill.engine, provider=spans.provider)
        lent = [
            prefill.engine.lend(group.make_params(f"r{i}", [(0, [i])], 16, trace={"traceparent": TRACEPARENT}))
            for i in range(6)
        ]
        assert len(traced._lent) == 3
        for each in lent:
            each.withdraw()
        await until(lambda: not traced._lent)
        assert {attributes(span)["asynckv.request_id"] for span in spans} == {"r3", "r4", "r5"}


ENDPOINT = Endpoint(0, "tcp://127.0.0.1:5555", "abc")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("", "")),
        ({"traceparent": TRACEPARENT}, (TRACEPARENT, "")),
        ({"traceparent": TRACEPARENT, "tracestate": "a=1,b=2"}, (TRACEPARENT, "a=1,b=2")),
        ({"traceparent": TRACEPARENT, "tracestate": "a" * (MAX_TRACESTATE + 1)}, (TRACEPARENT, "")),
        ({"traceparent": TRACEPARENT, "tracestate": "a\n"}, (TRACEPARENT, "")),
        ({"traceparent": TRACEPARENT, "tracestate": 3}, (TRACEPARENT, "")),
        ({"traceparent": TRACEPARENT + "\n"}, ("", "")),
        ({"traceparent": TRACEPARENT.upper()}, ("", "")),
        ({"traceparent": "x" * 10_000, "tracestate": "a=1"}, ("", "")),
        ({"tracestate": "a=1"}, ("", "")),
        ({"traceparent": None}, ("", "")),
    ],
)
def test_a_context_that_is_none_is_left_out_and_fails_no_request(given: Any, found: tuple[str, str]) -> None:
    params = decode_params(PrefillRanks("p", [ENDPOINT]).make_params("r", [(0, [1])], 16, trace=given))
    assert (params.traceparent, params.tracestate) == found


def test_a_nearer_context_takes_the_place_of_that_in_the_params() -> None:
    params = PrefillRanks("p", [ENDPOINT]).make_params("r", [(0, [1])], 16, trace={"traceparent": TRACEPARENT})
    nearer = TRACEPARENT.replace("00f067aa0ba902b7", "00f067aa0ba902b8")
    assert decode_params(params | trace_context({"traceparent": nearer})).traceparent == nearer
    assert decode_params(params | trace_context({"traceparent": "garbage"})).traceparent == TRACEPARENT
    with pytest.raises(ConfigError, match="trace is 3; give headers"):
        trace_context(3)  # type: ignore[arg-type]


async def test_a_context_that_a_router_has_garbled_is_none(sim: Bench, spans: Spans) -> None:
    async with sim.pair() as (prefill, decode, group):
        traced = Tracing(prefill.engine, decode.engine, provider=spans.provider)
        params = group.make_params("r", [(0, [1])], 16, written=True) | {"traceparent": "00-zz", "tracestate": "\n"}
        lent = prefill.engine.lend(params)
        await decode.engine.pull("d", [(0, [1])], params)
        await lent.wait_released()
        assert not list(spans)
        assert decode.engine.statistics().counters.get("observers.failed", 0) == 0
        assert not traced._lent


# -- the router --------------------------------------------------------------------------------------


class Told:
    """An engine behind HTTP that does what its role asks of asynckv."""

    def __init__(self, side: Side, group: PrefillRanks, role: str) -> None:
        self.side, self.group, self.role = side, group, role
        self.headers: list[Mapping[str, str]] = []
        self.fails = 0

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        body, name = await request.json(), request.headers["X-Request-Id"]
        if self.fails:
            self.fails -= 1
            return web.json_response({"error": {"message": "not now"}}, status=500)
        if self.role == "prefill":
            params = self.group.make_params(name, [(0, [1])], 16, written=True, trace=request.headers)
            self.side.engine.lend(params)
            return web.json_response({"kv_transfer_params": {"asynckv": params}})
        params = body["kv_transfer_params"]["asynckv"] | trace_context(request.headers)
        await self.side.engine.pull(name, [(0, [2])], params)
        return web.json_response({"choices": []})

    def serving(self) -> Any:
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_post("/v1/completions", self.complete)
        return serving(app, "127.0.0.1", 0, drain_s=0.1)


async def test_a_clients_trace_goes_through_the_router_to_both_engines(sim: Bench, spans: Spans) -> None:
    async with sim.pair() as (prefill, decode, group):
        Tracing(prefill.engine, decode.engine, provider=spans.provider)
        lender, reader = Told(prefill, group, "prefill"), Told(decode, group, "decode")
        reader.fails = 1
        async with lender.serving() as lender_url, reader.serving() as reader_url:
            router = Router([lender_url], [reader_url], Limits(health_s=60))
            async with serving(router.app(), "127.0.0.1", 0, 0.1) as url, aiohttp.ClientSession() as session:
                ask: Any = {"json": {"prompt": "one"}, "headers": {"traceparent": TRACEPARENT, "X-Request-Id": "chat"}}
                async with session.post(f"{url}/v1/completions", **ask) as answer:
                    assert answer.status == 200
        await until(lambda: spans.of("asynckv.lease", "chat") and spans.of("asynckv.release", "chat"))
        found = {span.context.span_id: span for span in spans if span.context is not None}
        assert {f"{span.context.trace_id:032x}" for span in found.values() if span.context} == {TRACEPARENT[3:35]}
        up = {
            span.name: found[span.parent.span_id].name if span.parent and span.parent.span_id in found else ""
            for span in found.values()
        }
        assert up == {"asynckv.lease": "", "asynckv.pull": "", "asynckv.release": "asynckv.pull"}
        assert {headers["traceparent"] for headers in lender.headers + reader.headers} == {TRACEPARENT}
        (pull,) = spans.of("asynckv.pull", "chat")
        assert pull.parent is not None
        assert pull.parent.span_id == int(TRACEPARENT[36:52], 16)
        for lease in prefill.engine.requests():
            assert lease.kind == "lease"  # of the params that the decode engine never asked for


def test_what_is_no_engine_is_refused_and_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="engine is 3; give an Engine"):
        Tracing(3)
    honest = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return honest(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert trace_context() == {}
    with pytest.raises(ImportError, match=r"pip install 'asynckv\[tracing\]'"):
        Tracing()


def test_the_process_has_no_provider_of_its_own() -> None:
    """Else the tests above would show nothing."""
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
