"""One request of a client becomes two: a prefill, and a decode.

To its clients the router looks like one engine. A prefill engine computes the prompt and one token, and answers with
`kv_transfer_params`, which say where the KV cache lies; a decode engine gets the request as the client wrote it, with
these params, fetches the KV cache, and generates. What it answers is passed on unchanged, piece by piece as it comes.

The router keeps nothing but counts. What can go wrong is settled in one loop, `Router._route`:

- Until the first piece was passed on, nothing is lost: if an engine cannot be reached, dies, or answers with an error
  of its own, the request is tried again, elsewhere if there is an elsewhere. Params are good for one use: they outlive
  a decode engine that was not reached at all; after anything else the prompt is computed anew.
- A request that two engines were lost with may be what kills them. It is not tried on a third.
- Where no prefill is to be had, or none can be shared (`CAUSES`), a decode engine computes the prompt itself, unless
  the router was told to refuse. Such requests are counted and logged by their cause.
- After the first piece, the client hears of an error as the last event of its stream. No other engine goes on with it:
  two engines need not say the same.
- An engine that falls silent (a stopped process, a dead host) takes nothing along: what waits for it fails, as above.
- A client that leaves cancels its handler. That closes the connection to the engine that works for it, which is how
  engines are told; a decode engine that is told gives the KV cache back to the prefill engine.
- When the router is stopped, what is under way has some time to end, and then ends in an error in the same way.

Whatever speaks HTTP and passes `kv_transfer_params` in vLLM's way will do as an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client as prometheus
import structlog
from aiohttp import web

from asynckv.tools.proxy.engines import Engine, EngineFault, Engines, Limits
from asynckv.tools.proxy.server import COMPLETIONS, Bounds, Refused, errors_as_json, serving, until_told
from asynckv.tools.proxy.sources import Sources
from asynckv.tools.proxy.traces import Trace

RESPONSES = "/v1/responses"
OF_GENERATION = {"min_tokens", "min_completion_tokens", "stream_options", "n", "best_of"}
"""What a request may say of its generation that does not go with one token in one piece."""
RANK = "X-data-parallel-rank"
"""vLLM's header: which data-parallel rank of the engine that gets it serves the request."""
CAUSES = {
    "no_prefill_engine": "no prefill engine is up",
    "prefill_failed": "the last attempt at a prefill failed",
    "transfer_failed": "at the last attempt, the decode engine could not fetch the KV cache, or failed with it",
    "no_params": "the prefill engine answered without kv_transfer_params",
    "n": "several answers, and params that are not asynckv's: only the first answer may read by them",
    "prompts": "several prompts in one request: params are of one",
    "beam_search": "vLLM's beam search reads no KV cache",
    "prompt_logprobs": "log-probabilities of the prompt need it computed where it is decoded",
}
"""Why a decode engine computes a prompt itself."""
LOST = {"lost", "silent"}
"""Faults of engines that have probably died."""
OF_TRANSFER = {"kv_transfer_error", "failed"}
"""Faults of decode engines that may come of the KV cache; vLLM does not say whether they do."""
GRACE_S = 0.5
"""After the drain, for writing the errors in which it ends; what is no completion (/metrics) has no longer either."""
MAX_NAMED = 8
"""Requests that `/health/ready` names, those that have waited for the longest."""
END = 16384
"""Bytes at the end of a stream, in which an error is looked for."""

log = structlog.get_logger()


class ClientLeft(Exception):
    """The client is gone."""


class Job:
    """One request of a client, on its way.

    Attributes:
        headers: What engines are told: the client's credentials, and the id that all logs have in common.
        params: Where the KV cache lies, and `lender`, the prefill engine that has said so.
        is_alone: A decode engine computes the prompt itself.
        engine: The one that works for it, and `heard`: when it was asked, or something came of it last.
        failure: The error that the engine's stream has ended with.
        trace: What it belongs to.
        avoid: Engines that have failed it, and `lost`: those that were lost while they worked on it.
        task: What handles it, until its answer is written.
        limit: When the router ends it; never, as long as the router runs.
        stream: What the client is reading, once that has begun.
        notes: For the log.
    """

    def __init__(self, request: web.Request, ends: float | None = None, provider: Any = None) -> None:
        self.trace = Trace(request.headers, provider)
        self.request, self.path, self.began = request, request.path, time.monotonic()
        self.task, self.limit = asyncio.current_task(), asyncio.timeout_at(ends)
        self.stream: web.StreamResponse | None = None
        self.body: dict[str, Any] = {}
        self.body_bytes = 0
        self.notes: dict[str, Any] = {}
        self.params: dict[str, Any] | None = None
        self.lender: Engine | None = None
        self.is_alone = False
        self.engine: Engine | None = None
        self.heard, self.is_waiting = self.began, False
        self.failure: Refused | None = None
        self.avoid: set[Engine] = set()
        self.lost: set[Engine] = set()
        given = request.headers.get("X-Request-Id", "")
        self.id = given if given.isascii() and given.isprintable() and 0 < len(given) <= 200 else uuid.uuid4().hex
        self.headers = {"X-Request-Id": self.id, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        if authorization := request.headers.get("Authorization"):
            self.headers["Authorization"] = authorization

    def asks(self, engine: Engine) -> None:
        """Take note of the engine that works for it now."""
        self.engine, self.notes[engine.role] = engine, engine.url
        self.hears()

    def hears(self) -> None:
        """Take note that something came, or begins."""
        self.heard, self.is_waiting = time.monotonic(), False

    def seen(self) -> dict[str, Any]:
        """Say where it is and for how long."""
        now, engine = time.monotonic(), self.engine.url if self.engine is not None else ""
        return {
            "id": self.id,
            "engine": engine,
            "silent_s": round(now - self.heard, 1),
            "age_s": round(now - self.began, 1),
        }


def why_alone(body: Mapping[str, Any]) -> str:
    """The cause for which no engine can be handed the KV cache of a request; empty if one can."""
    prompts = [body[name] for name in ("prompt", "prompt_embeds") if body.get(name) is not None]
    for it in prompts:
        if len(prompts) > 1 or (isinstance(it, list) and len(it) > 1 and not all(isinstance(x, int) for x in it)):
            return "prompts"
    if body.get("use_beam_search"):
        return "beam_search"
    of_echo = body.get("top_logprobs" if "messages" in body else "logprobs") if body.get("echo") else None
    return "" if body.get("prompt_logprobs") is None and of_echo is None else "prompt_logprobs"


class Router:
    """Carries requests to engines, and answers to clients.

    Args:
        prefill, decode, file: Where engines are found (`Sources`).
        is_computed: Where no prefill is to be had, decode engines compute the prompt; else the client gets 503.
        attempts: How often a request is tried.
        max_requests: More at a time are refused.
        max_body_mib: A larger body is refused.
        max_bodies_mib: What the bodies of all requests under way may hold; a request beyond it is refused.
        body_s: How long a body may take to arrive.
        drain_s: How long requests may go on when it is stopped.
        warn_s: A request that has waited for an engine for so long is named in the log.
        provider: OpenTelemetry's; the one that is set for the process if left out.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        limits: Limits | None = None,
        *,
        file: Path | None = None,
        is_computed: bool = True,
        attempts: int = 3,
        max_requests: int = 1024,
        max_body_mib: float = 16.0,
        max_bodies_mib: float = 1024.0,
        body_s: float = 60.0,
        drain_s: float = 30.0,
        warn_s: float = 10.0,
        provider: Any = None,
    ) -> None:
        self._provider, self._is_computed = provider, is_computed
        self._limits, self._drain_s, self._warn_s = limits or Limits(), drain_s, warn_s
        self._attempts, self._max_requests, self._max_body_mib = attempts, max_requests, max_body_mib
        self._max_bodies_mib, self._body_s, self._body_bytes = max_bodies_mib, body_s, 0
        self._registry = prometheus.CollectorRegistry()
        self.engines = Engines(Sources(prefill, decode, file), self._limits, self._registry)
        at: dict[str, Any] = {"registry": self._registry}
        self._answered = prometheus.Counter("pd_proxy_requests", "Requests ended.", ["path", "status"], **at)
        self._retried = prometheus.Counter("pd_proxy_retries", "Further attempts, by why.", ["why"], **at)
        self._decode_only = prometheus.Counter(
            "pd_proxy_decode_only", "Requests that a decode engine is to compute whole, by why.", ["cause"], **at
        )
        for cause in CAUSES:
            self._decode_only.labels(cause)
        self._seconds = prometheus.Histogram("pd_proxy_seconds", "Until prefill, first event, end.", ["until"], **at)
        self._in_flight = prometheus.Gauge("pd_proxy_in_flight", "Requests under way.", **at)
        self._jobs: set[Job] = set()
        self._ends: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests under way."""
        return len(self._jobs)

    def app(self) -> web.Application:
        """Make the application, for `serving`."""
        app = web.Application(middlewares=[errors_as_json])
        app.router.add_routes([web.post(path, self._complete) for path in (*COMPLETIONS, RESPONSES)])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._life)
        app.on_shutdown.append(self._drain)
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        async with self.engines:
            warning = asyncio.create_task(self._warn())
            yield
            warning.cancel()
            await asyncio.wait([warning])

    async def _warn(self) -> None:
        """Name once each request that waits for long. Answers in one piece take as long as they take."""
        while True:
            await asyncio.sleep(min(1.0, self._warn_s / 2))
            for job in self._jobs:
                engine, is_silent = job.engine, time.monotonic() - job.heard > self._warn_s
                if engine is None or job.is_waiting or not is_silent:
                    continue
                if engine.role == "prefill" or job.body.get("stream"):
                    job.is_waiting = True
                    log.warning("request_waits", role=engine.role, trouble=engine.trouble, **job.seen())

    async def _drain(self, app: web.Application) -> None:
        """Wait for what is under way, and end what takes too long; nothing new arrives any more."""
        self._ends = asyncio.get_running_loop().time() + self._drain_s
        for job in self._jobs:
            job.limit.reschedule(self._ends)
        if tasks := [job.task for job in self._jobs if job.task is not None]:
            await asyncio.wait(tasks, timeout=self._drain_s + GRACE_S)

    async def _models(self, request: web.Request) -> web.Response:
        job, engine = Job(request), self.engines.choose("decode", set())
        async with self.engines.ask(engine, job.path, job.headers, None, self._limits.connect_s) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        states, needed = self.engines.states(), ("decode",) if self._is_computed else ("prefill", "decode")
        is_ready = all(self.engines.is_up(role) for role in needed)
        longest = [job.seen() for job in sorted(self._jobs, key=lambda job: job.heard)[:MAX_NAMED]]
        told = {"status": "ready" if is_ready else "not ready", **states, "in_flight": self.num_in_flight}
        return web.json_response(told | {"silent_longest": longest}, status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.engines.states()
        text = prometheus.generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        job, status = Job(request, self._ends, self._provider), 500
        self._jobs.add(job)
        with (
            self._in_flight.track_inprogress(),
            structlog.contextvars.bound_contextvars(id=job.id),
            job.trace.request(job.path, job.id),
        ):
            try:
                if len(self._jobs) > self._max_requests:
                    raise Refused(503, f"{self._max_requests} requests are under way already", "overloaded")
                async with job.limit:
                    job.body = await self._read(job)
                    response = await self._route(job)
                status = response.status
                if job.failure is not None:
                    status, job.notes["error"] = job.failure.status, str(job.failure)
                return response
            except (Refused, TimeoutError) as exc:
                refused = exc if isinstance(exc, Refused) else Refused(503, "the router is stopping", "stopping")
                status, job.notes["error"] = refused.status, str(refused)
                if job.stream is not None:
                    await job.stream.write(refused.event())
                    return job.stream
                response = refused.response()
                response.headers["X-Request-Id"] = job.id
                return response
            except (asyncio.CancelledError, ClientLeft):
                status = 499
                raise asyncio.CancelledError from None
            finally:
                self._jobs.remove(job)
                self._body_bytes -= job.body_bytes
                self._answered.labels(job.path, status).inc()
                job.trace.answered(status)
                self._passed("end", job)
                log.info("request", path=job.path, status=status, **job.notes)

    async def _read_body(self, job: Job) -> bytes:
        """Read a body. What it holds is counted until its request ends, because a further attempt needs it."""
        body = bytearray()
        async for piece in job.request.content.iter_any():
            if len(body) + len(piece) > self._max_body_mib * 2**20:
                raise Refused(413, f"the body is larger than {self._max_body_mib:g} MiB")
            if self._body_bytes + len(piece) > self._max_bodies_mib * 2**20:
                raise Refused(503, f"bodies of requests hold {self._max_bodies_mib:g} MiB already", "overloaded")
            body += piece
            job.body_bytes += len(piece)
            self._body_bytes += len(piece)
        return bytes(body)

    async def _read(self, job: Job) -> dict[str, Any]:
        """Read what a client wants.

        Raises:
            Refused: It is no request, or none that two engines can share.
        """
        try:
            async with asyncio.timeout(self._body_s):
                data = await self._read_body(job)
            body = msgspec.json.decode(data, type=dict[str, Any])
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self._body_s:g} s") from None
        except (msgspec.MsgspecError, web.RequestPayloadError, ValueError, RecursionError) as exc:
            raise Refused(400, f"the body is no JSON object: {exc}") from None
        if not isinstance(body.get("stream"), bool | None):
            raise Refused(400, "stream is neither true nor false")
        if body.get("previous_response_id") or body.get("background"):
            what = "previous_response_id and background need the one engine that keeps a response"
            raise Refused(400, f"{what}; send the whole conversation as input")
        return body

    async def _route(self, job: Job) -> web.StreamResponse:
        """Have a request prefilled and decoded, by other engines if need be."""
        if cause := why_alone(job.body):
            self._leave_alone(job, cause)
        for attempt in itertools.count(1):
            job.notes["attempts"] = attempt
            try:
                if job.lender is None and not job.is_alone:
                    self.engines.up("decode")  # or the prefill would be for nothing
                    await self._prefill(job)
                return await self._decode(self.engines.choose("decode", job.avoid), job)
            except EngineFault as fault:
                why, engine = fault.why, fault.engine
                job.lost |= {engine} if why in LOST else set()
                if len(job.lost) > 1:
                    others = "another engine was lost with this request before, and a third is not tried"
                    raise EngineFault(engine, why, f"{fault.text}; {others}") from fault
                # Where it can be computed without those that failed, that is one attempt more.
                is_of_transfer = engine.role == "prefill" or (why in OF_TRANSFER and job.params is not None)
                is_last = attempt >= self._attempts or why == "timeout"
                if job.stream is not None or (is_last and not (is_of_transfer and self._is_computed)):
                    raise
                self._retried.labels(why).inc()
                if why != "kv_transfer_error":
                    job.avoid.add(engine)
                if why in OF_TRANSFER and job.lender is not None:
                    job.avoid.add(job.lender)
                if why != "unreachable" or engine is job.lender:
                    job.lender = job.params = None  # they may be used up
                if is_last:
                    self._leave_alone(job, "prefill_failed" if engine.role == "prefill" else "transfer_failed")
        raise AssertionError

    def _leave_alone(self, job: Job, cause: str) -> None:
        """Have a decode engine compute the prompt, too."""
        job.is_alone, job.lender, job.params = True, None, None
        job.notes["decode_only"] = cause
        self._decode_only.labels(cause).inc()

    async def _prefill(self, job: Job) -> None:
        """Have the prompt computed."""
        try:
            engine = self.engines.choose("prefill", job.avoid)
        except Refused:
            if not self._is_computed:
                raise
            return self._leave_alone(job, "no_prefill_engine")
        is_shared = any(job.body.get(name) not in (None, 1) for name in ("n", "best_of"))
        if is_shared and engine.lends_once:
            return self._leave_alone(job, "n")
        job.lender = engine
        job.asks(engine)
        body = {name: value for name, value in job.body.items() if name not in OF_GENERATION}
        body |= {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
        body |= {"max_output_tokens": 1, "store": False} if job.path == RESPONSES else {"max_tokens": 1}
        body |= {"stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        with job.trace.ask("prefill", engine.url) as trace:
            async with self.engines.ask(engine, job.path, job.headers | trace, body, self._limits.prefill_s) as answer:
                params = engine.decoded(await answer.read()).get("kv_transfer_params")
        self._passed("prefill", job)
        if not params or not isinstance(params, dict):
            return self._leave_alone(job, "no_params")
        # Each of several answers reads. An owner that is not asynckv's may free the blocks after the first read.
        engine.lends_once = "asynckv" not in params
        if is_shared and engine.lends_once:
            return self._leave_alone(job, "n")
        job.params = params

    async def _decode(self, engine: Engine, job: Job) -> web.StreamResponse:
        """Have the request decoded, and pass on what comes."""
        job.asks(engine)
        # Never the client's own params, for they name hosts to talk to.
        body = {name: value for name, value in job.body.items() if name != "kv_transfer_params"}
        body |= {"kv_transfer_params": job.params} if job.params else {}
        rank = {RANK: job.request.headers[RANK]} if RANK in job.request.headers else {}
        async with contextlib.AsyncExitStack() as asking:
            headers = job.headers | rank | asking.enter_context(job.trace.ask("decode", engine.url))
            answer = await asking.enter_async_context(self.engines.ask(engine, job.path, headers, body))
            headers = {"Content-Type": answer.headers.get("Content-Type", ""), "X-Request-Id": job.id}
            if not body.get("stream"):
                data = await answer.read()
                engine.decoded(data)
                return web.Response(body=data, headers=headers)
            first = await engine.first_event(answer)
            self._passed("first", job)
            response = web.StreamResponse(headers=headers)
            try:
                await response.prepare(job.request)
                job.stream = response
                job.hears()
                await response.write(first)
                end = first[-END:]
                async for piece in answer.content.iter_any():
                    engine.heard()
                    job.hears()
                    end = (end + piece)[-END:]
                    await response.write(piece)
                job.failure = engine.failed_at_end(end)
                await response.write_eof()
            except ConnectionError as exc:
                raise ClientLeft from exc
            return response

    def _passed(self, until: str, job: Job) -> None:
        seconds = time.monotonic() - job.began
        job.notes[f"{until}_s"] = round(seconds, 4)
        self._seconds.labels(until).observe(seconds)


async def serve(router: Router, host: str, port: int, drain_s: float, bounds: Bounds) -> None:
    """Serve until told to stop."""
    async with serving(router.app(), host, port, GRACE_S, bounds) as url:
        log.info("listening", url=url)
        await until_told()
        log.info("stopping", in_flight=router.num_in_flight, drain_s=drain_s)
