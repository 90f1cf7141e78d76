"""Spans for OpenTelemetry: one trace over router, prefill and decode, if a context came with the params.

The params carry the context as W3C's `traceparent` and `tracestate` (`make_params(..., trace=headers)`). A request
without a context has no spans.

A prefill rank makes a span for each lease (`asynckv.lease`). A decode rank makes one for each attempt (`asynckv.pull`,
linked to the attempt before) and one for the release in the background (`asynckv.release`). Spans are made when their
subject is over, so a transition costs nothing. Without an SDK no spans are made.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asynckv.account.waits import waits_for
from asynckv.core import notes
from asynckv.core.lease import Lease, LeaseState
from asynckv.core.limits import remember
from asynckv.core.notes import Note
from asynckv.core.pull import Pull, PullState
from asynckv.core.types import KVTransferParams, PullId, Reason, rank_name
from asynckv.observe.log import lent_blocks
from asynckv.observe.observer import Observer, observation_of
from asynckv.scheduler import trace_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, TracerProvider

MAX_KEPT = 4096  # limit of the remembered contexts of attempts, and of leases
SAME_CLOCK_NS = 50_000_000  # difference beyond which the wall clock must have been set, or the engine has another clock
MAX_EVENTS = 128  # limit of the events of one span; those in the middle of the history are left out
MAX_TEXT = 256
MAX_NAMED = 8

_NAMES: Mapping[str, str] = {
    PullState.READING: "admitted",
    PullState.CONFIRMING: "landed",
    LeaseState.ENDING: "revoked",
}
"""Transitions with another name in traces, which name what happened instead of what the pull waits for."""

_NOTES: Mapping[type[Note], str] = {
    notes.GrantedTo: "granted",
    notes.Promised: "granted",
    notes.AnsweredNotYet: "not_lent_yet",
    notes.Unrenewed: "not_renewed",
    notes.ReadAgain: "read_again",
    notes.Released: "released",
    notes.Settled: "released",
    notes.Lapsed: "lapsed",
    notes.Revoked: "revoked",
    notes.Recalled: "recalled",
    notes.Retired: "retired",
}
"""Names of the events of notes; other notes are a `note`."""


def trace_context(headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the context of the current span, or the context that came in `headers`.

    Use it for `make_params(..., trace=trace_context())`, or in a decode engine that knows a nearer context than the
    params have: `params | trace_context(headers)`.

    The result is empty outside of a span, without an SDK or OpenTelemetry, and if the headers hold no context.

    Raises:
        ConfigError: `headers` is not a mapping of headers.
    """
    if headers is not None:
        parent, state = trace_of(headers)
        return {"traceparent": parent, "tracestate": state} if parent else {}
    try:
        from opentelemetry import trace
    except ImportError:
        return {}
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


class Tracing(Observer):
    """Make spans of the leases and pulls of engines: `Tracing(engine)`, before or after the engine is started.

    Args:
        engines: The engines to trace, in any form.
        provider: The provider of tracers; the process's own if left out.

    Raises:
        ConfigError: One of the arguments is not an engine.
        ImportError: OpenTelemetry's API is not installed.
    """

    def __init__(self, *engines: Any, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as exc:
            raise ImportError("traces need OpenTelemetry: pip install 'asynckv[tracing]'") from exc
        self._api = trace
        self._tracer = trace.get_tracer("asynckv", tracer_provider=provider)
        self._extract = TraceContextTextMapPropagator().extract
        self._offset_ns = 0
        self._lent: OrderedDict[Lease, tuple[Context, str]] = OrderedDict()
        self._over: OrderedDict[PullId, SpanContext] = OrderedDict()
        self._failed: OrderedDict[str, SpanContext] = OrderedDict()
        for engine in engines:
            self.add(engine)

    def add(self, engine: Any) -> None:
        observation_of(engine).observe(self)

    # -- what happens ------------------------------------------------------------------------------

    def lease_lent(self, lease: Lease, params: KVTransferParams, now: float) -> None:
        """Remember the trace in which the request was lent, and the engine."""
        if params.traceparent and (parent := self._parent(params)) is not None:
            remember(self._lent, lease, (parent, params.engine_id), MAX_KEPT)

    def lease_ended(self, lease: Lease, now: float) -> None:
        if not self._lent or (lent_in := self._lent.pop(lease, None)) is None:
            return
        parent, engine_id = lent_in
        span = self._span("asynckv.lease", "PRODUCER", parent, lease.lent_at, now)
        if span is None:
            return
        lent, end = lease.lent, lease.state.value if lease.is_over else "closed"
        span.set_attributes(
            {
                "asynckv.request_id": lent.request_id[:MAX_TEXT],
                "asynckv.sequence": lent.key.sequence,
                "asynckv.engine_id": engine_id,
                "asynckv.tp_rank": lent.tp_rank,
                "asynckv.blocks": lent_blocks(lease),
                "asynckv.lease.end": end,
                "asynckv.lease.owed": waits_for(lease, MAX_NAMED),
            }
        )
        self._add_events(span, lease.history)
        if lease.state is not LeaseState.RELEASED:
            self._fail(span, end, f"owed by {', '.join(waits_for(lease, MAX_NAMED)) or 'no reader'}")
        span.end(self._wall_ns(min(lease.ended_at, now)))

    def pull_ended(self, pull: Pull, now: float) -> None:
        params = pull.params
        if not params.traceparent or (parent := self._parent(params)) is None:
            return
        before = self._failed.pop(pull.request_id, None) if pull.attempt > 1 else None
        links = [self._api.Link(before)] if before is not None else []
        span = self._span("asynckv.pull", "CONSUMER", parent, pull.history[0][0], now, links)
        if span is None:
            return
        reason = pull.reason
        span.set_attributes(
            {
                "asynckv.request_id": pull.request_id[:MAX_TEXT],
                "asynckv.prefill_request_id": params.request_id[:MAX_TEXT],
                "asynckv.pull_id": pull.pull_id,
                "asynckv.sequence": params.key.sequence,
                "asynckv.attempt": pull.attempt,
                "asynckv.peer": params.engine_id,
                "asynckv.reader": rank_name(pull.cohort.id, pull.cohort.tp_rank, pull.cohort.pp_stage),
                "asynckv.outcome": str(reason),
                "asynckv.bytes": pull.measures.num_bytes if reason is Reason.COMPLETE else 0,
                "asynckv.posts": pull.num_posted,
            }
        )
        self._add_events(
            span, pull.history[: _num_to_outcome(pull)], "proven" if reason is Reason.COMPLETE else "failed"
        )
        if reason is Reason.CANCELLED:
            span.set_attribute("asynckv.cancelled", True)
        elif reason is not Reason.COMPLETE:
            self._fail(span, str(reason), f"failed in {pull.failed_in}: {pull.detail}")
        span.end(self._wall_ns(pull.published_at))
        remember(self._over, pull.pull_id, span.get_span_context(), MAX_KEPT)
        if reason in pull.retryable:
            remember(self._failed, pull.request_id, span.get_span_context(), MAX_KEPT)

    def pull_over(self, pull: Pull, now: float) -> None:
        if not self._over or (before := self._over.pop(pull.pull_id, None)) is None:
            return
        parent = self._api.set_span_in_context(self._api.NonRecordingSpan(before))
        span = self._span("asynckv.release", "INTERNAL", parent, pull.published_at, now)
        if span is not None:
            span.set_attributes({"asynckv.request_id": pull.request_id[:MAX_TEXT], "asynckv.pull_id": pull.pull_id})
            self._add_events(span, pull.history[_num_to_outcome(pull) :])
            span.end(self._wall_ns(max(pull.measures.released_at, pull.published_at)))

    # -- inside ------------------------------------------------------------------------------------

    def _parent(self, params: KVTransferParams) -> Context | None:
        """Return the context in the params, or None if it is not valid."""
        from opentelemetry.context import Context

        carrier = {"traceparent": params.traceparent, "tracestate": params.tracestate}
        context = self._extract(carrier, Context())
        return context if self._api.get_current_span(context).get_span_context().is_valid else None

    def _wall_ns(self, at: float) -> int:
        return self._offset_ns + round(at * 1e9)

    def _span(
        self, name: str, kind: str, parent: Context, began: float, now: float, links: Sequence[Any] = ()
    ) -> Span | None:
        """Begin a span at a time in the past. Return None if the SDK does not record it."""
        # This is called some time after `now`, so the smallest offset is the most exact one.
        offset_ns = time.time_ns() - round(now * 1e9)
        if not 0 <= offset_ns - self._offset_ns < SAME_CLOCK_NS:
            self._offset_ns = offset_ns
        began_ns = self._wall_ns(began)
        span = self._tracer.start_span(name, parent, self._api.SpanKind[kind], links=links, start_time=began_ns)
        return span if span.is_recording() else None

    def _add_events(self, span: Span, history: Sequence[tuple[float, str | Note]], outcome: str = "") -> None:
        """Add an event for each transition, and for each note with its words."""
        if len(history) > MAX_EVENTS:
            half = MAX_EVENTS // 2
            history = (*history[:half], *history[-half:])
        for at, what in history:
            name, detail = _event(what, outcome)
            attributes = {"asynckv.detail": detail[:MAX_TEXT]} if detail else None
            span.add_event(name, attributes, self._wall_ns(at))

    def _fail(self, span: Span, cause: str, detail: str) -> None:
        span.set_attribute("error.type", cause)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, f"{cause}: {detail}"[:MAX_TEXT]))


def _num_to_outcome(pull: Pull) -> int:
    return next((i for i, (_, what) in enumerate(pull.history, 1) if what is PullState.NOTIFYING), len(pull.history))


def _event(what: str | Note, outcome: str) -> tuple[str, str]:
    """Return the event name of a history's entry, and its words if it has any."""
    if isinstance(what, Note):
        return _NOTES.get(type(what), "note"), str(what)
    if what is PullState.NOTIFYING and outcome:
        return outcome, ""
    return _NAMES.get(what, str(what)), ""
