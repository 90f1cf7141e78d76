"""The router's part of a trace: spans where OpenTelemetry is installed and set up.

Without OpenTelemetry, engines are sent the client's own `traceparent`, so that the trace goes on without the router.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

otel: Any
try:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    otel = None

MAX_HEADER = 512
"""Characters; W3C allows a longer tracestate to be dropped, and a traceparent has 55."""


class Trace:
    def __init__(self, headers: Mapping[str, str], provider: Any = None) -> None:
        found = ((name, headers.get(name, "")) for name in ("traceparent", "tracestate"))
        self._given = {name: value for name, value in found if 0 < len(value) <= MAX_HEADER}
        if otel is not None:
            self._tracer = otel.get_tracer("asynckv.pd_proxy", tracer_provider=provider)
            self._context = TraceContextTextMapPropagator().extract(self._given, Context())

    @contextlib.contextmanager
    def request(self, path: str, request_id: str) -> Iterator[None]:
        """Make the span of the whole request; those that follow are inside of it."""
        if otel is None:
            yield
            return
        attributes = {"http.request.method": "POST", "url.path": path, "asynckv.request_id": request_id}
        with self._tracer.start_as_current_span(
            "route", context=self._context, kind=otel.SpanKind.SERVER, attributes=attributes
        ) as span:
            self._context = otel.set_span_in_context(span, self._context)
            yield

    def answered(self, status: int) -> None:
        """Say on the span of the whole request how it ended."""
        if otel is not None:
            span = otel.get_current_span(self._context)
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(otel.StatusCode.ERROR)

    @contextlib.contextmanager
    def ask(self, role: str, url: str) -> Iterator[dict[str, str]]:
        """Make the span of one question to an engine; what is returned goes into its headers."""
        if otel is None:
            yield self._given
            return
        with self._tracer.start_as_current_span(
            role, context=self._context, kind=otel.SpanKind.CLIENT, attributes={"server.address": url}
        ):
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier)
            yield carrier
