"""Trace one request from prefill to decode, and print its spans as they end: `python docs/examples/traced.py`.

This needs `pip install 'asynckv[tracing]' opentelemetry-sdk`. Two engines in one process stand for two workers. The
important parts are the SDK at the top, and the line that puts the context into the params.
"""

from __future__ import annotations

import asyncio

from kv import memory
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import asynckv
from asynckv import Engine, EngineConfig, PrefillRanks, Tracing


def line(span: ReadableSpan) -> str:
    """Format a span as a line; without `formatter`, the exporter prints all of it as JSON."""
    took_ms = ((span.end_time or 0) - (span.start_time or 0)) / 1e6
    events = ", ".join(event.name for event in span.events)
    return f"{span.context.trace_id:032x} {span.name:15} {took_ms:6.1f} ms  {events}\n"


provider = TracerProvider()
# For a collector, use BatchSpanProcessor(OTLPSpanExporter()) from opentelemetry-exporter-otlp.
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
trace.set_tracer_provider(provider)


async def main() -> None:
    """Lend four blocks, and fetch them."""
    memories = [memory(seed)[1] for seed in (0, 1)]
    async with (
        Engine(EngineConfig(engine_id="prefill"), memories[0]) as prefill,
        Engine(EngineConfig(engine_id="decode"), memories[1]) as decode,
    ):
        Tracing(prefill, decode)
        group = PrefillRanks("prefill", [prefill.endpoint])
        with trace.get_tracer("example").start_as_current_span("request"):
            context = asynckv.trace_context()  # a server passes the headers of the HTTP request
            params = group.make_params("cmpl-1", [(0, [3, 4, 5, 6])], 64, written=True, trace=context)
            lent = prefill.lend(params)
            await decode.pull("req-1", [(0, [0, 1, 2, 3])], params)
            await lent.wait_released()
    provider.shutdown()


asyncio.run(main())
