"""A router of prefill and decode engines for OpenAI's clients: `python -m docs.examples.service.pd_proxy --help`.

To its clients the router looks like one engine. Of each request it makes two: a prefill engine computes the prompt and
one token, and answers with `kv_transfer_params`, which say where the KV cache lies; a decode engine gets the request
as the client wrote it, with these params, fetches the KV cache, and generates. What it answers is passed on unchanged,
piece by piece as it comes.

The router keeps nothing but counts. What can go wrong is settled in one loop, `Router._route`:

- Until the first piece was passed on, nothing is lost: if an engine cannot be reached, dies, or answers with an error
  of its own, the request is tried again, elsewhere if there is an elsewhere. Params are good for one use: they outlive
  a decode engine that was not reached at all; after anything else the prompt is computed anew.
- After the first piece, the client hears of an error as the last event of its stream. No other engine goes on with it:
  two engines need not say the same.
- An engine that falls silent (a stopped process, a dead host) takes nothing along: what waits for it fails, as above.
- A client that leaves cancels its handler. That closes the connection to the engine that works for it, which is how
  engines are told; a decode engine that is told gives the KV cache back to the prefill engine.
- When the router is stopped, what is under way has some time to end, and then ends in an error in the same way.

An engine that embeds asynckv need not fail when a prefill engine is lost: it asks the router for other params
(`X-Prefill-Again`, and `renew_params` of `Engine.pull`), and keeps its blocks and its place meanwhile.

Whatever speaks HTTP and passes `kv_transfer_params` in vLLM's way will do as an engine: vLLM with NixlConnector or
AsyncKVConnector, and `docs.examples.service.tiny_engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

import msgspec
import prometheus_client as prometheus
import structlog
import typer
from aiohttp import web

from docs.examples.service.pd_engines import Engine, EngineFault, Engines, Limits
from docs.examples.service.pd_http import COMPLETIONS, Bounds, Refused, errors_as_json, log_as_json, serving, until_told
from docs.examples.service.pd_traces import Trace
from scripts import command

OF_GENERATION = {"min_tokens", "min_completion_tokens", "stream_options"}
"""What a request may say of its generation that does not go with one token in one piece."""
AGAIN = "/prefill_again/"
GRACE_S = 0.5
"""After the drain, for writing the errors in which it ends; what is no completion (/metrics) has no longer either."""
MAX_NAMED = 8
"""Requests that `/health/ready` names, those that have waited for the longest."""
END = 16384
"""Bytes at the end of a stream, in which an error is looked for."""

log = structlog.get_logger()


class ClientLeft(Exception):
    """Nobody is there to write to."""


class Job:
    """One request of a client, on its way.

    Attributes:
        headers: What engines are told: the client's credentials, the id that all logs have in common, and where to have
            the prompt prefilled once more.
        lender: The prefill engine whose params are in use.
        engine: The one that works for it, and `heard`: when it was asked, or something came of it last.
        failure: The error that the engine's stream has ended with.
        trace: What it belongs to.
        avoid: Engines that have failed it.
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
        self.lender: Engine | None = None
        self.engine: Engine | None = None
        self.heard, self.is_waiting = self.began, False
        self.failure: Refused | None = None
        self.avoid: set[Engine] = set()
        self.token = secrets.token_urlsafe(16)
        given = request.headers.get("X-Request-Id", "")
        self.id = given if given.isascii() and given.isprintable() and 0 < len(given) <= 200 else uuid.uuid4().hex
        self.headers = {"X-Request-Id": self.id, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        if request.transport is not None:
            # As engines reach us, and never what the client calls us: they would talk to whatever it named.
            host, port = request.transport.get_extra_info("sockname")[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self.headers["X-Prefill-Again"] = f"http://{where}{AGAIN}{self.token}"
        if authorization := request.headers.get("Authorization"):
            self.headers["Authorization"] = authorization

    def asks(self, engine: Engine) -> None:
        """Take note of who works for it now."""
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


class Router:
    """Carries requests to engines, and answers to clients.

    Args:
        prefill, decode: URLs of engines.
        attempts: How often a request is tried.
        max_requests: More at a time are refused.
        max_body_mib: A larger body is refused.
        max_bodies_mib: What the bodies of all requests under way may hold; a request beyond it is refused.
        body_s: How long a body may take to arrive.
        drain_s: How long requests may go on when it is stopped.
        warn_s: Who has waited for as long for an engine is named in the log.
        provider: OpenTelemetry's; the one that is set for the process if left out.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        limits: Limits | None = None,
        *,
        attempts: int = 3,
        max_requests: int = 1024,
        max_body_mib: float = 16.0,
        max_bodies_mib: float = 1024.0,
        body_s: float = 60.0,
        drain_s: float = 30.0,
        warn_s: float = 10.0,
        provider: Any = None,
    ) -> None:
        self._provider = provider
        self._limits, self._drain_s, self._warn_s = limits or Limits(), drain_s, warn_s
        self._attempts, self._max_requests, self._max_body_mib = attempts, max_requests, max_body_mib
        self._max_bodies_mib, self._body_s, self._body_bytes = max_bodies_mib, body_s, 0
        self._registry = prometheus.CollectorRegistry()
        self.engines = Engines(prefill, decode, self._limits, self._registry)
        at: dict[str, Any] = {"registry": self._registry}
        self._answered = prometheus.Counter("pd_proxy_requests", "Requests ended.", ["path", "status"], **at)
        self._retried = prometheus.Counter("pd_proxy_retries", "Further attempts, by why.", ["why"], **at)
        self._seconds = prometheus.Histogram("pd_proxy_seconds", "Until prefill, first event, end.", ["until"], **at)
        self._in_flight = prometheus.Gauge("pd_proxy_in_flight", "Requests under way.", **at)
        self._jobs: dict[str, Job] = {}
        self._ends: float | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests under way."""
        return len(self._jobs)

    def app(self) -> web.Application:
        """Make the application, for `serving`."""
        app = web.Application(middlewares=[errors_as_json])
        app.router.add_routes([web.post(path, self._complete) for path in COMPLETIONS])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(AGAIN + "{token}", self._prefill_again)
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
        """Name once whoever waits for long. An answer in one piece takes as long as it takes, and is not judged."""
        while True:
            await asyncio.sleep(min(1.0, self._warn_s / 2))
            for job in self._jobs.values():
                engine, is_silent = job.engine, time.monotonic() - job.heard > self._warn_s
                if engine is None or job.is_waiting or not is_silent:
                    continue
                if engine.role == "prefill" or job.body.get("stream"):
                    job.is_waiting = True
                    log.warning("request_waits", role=engine.role, trouble=engine.trouble, **job.seen())

    async def _drain(self, app: web.Application) -> None:
        """Wait for what is under way, and end what takes too long; nothing new arrives any more."""
        self._ends = asyncio.get_running_loop().time() + self._drain_s
        for job in self._jobs.values():
            job.limit.reschedule(self._ends)
        if tasks := [job.task for job in self._jobs.values() if job.task is not None]:
            await asyncio.wait(tasks, timeout=self._drain_s + GRACE_S)

    async def _models(self, request: web.Request) -> web.Response:
        job, engine = Job(request), self.engines.choose("decode", set())
        async with self.engines.ask(engine, job.path, job.headers, None, self._limits.connect_s) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.Response:
        is_ready, states = self.engines.states()
        status = "ready" if is_ready else "not ready"
        longest = [job.seen() for job in sorted(self._jobs.values(), key=lambda job: job.heard)[:MAX_NAMED]]
        told = {"status": status, **states, "in_flight": self.num_in_flight, "silent_longest": longest}
        return web.json_response(told, status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.engines.states()
        text = prometheus.generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        job, status = Job(request, self._ends, self._provider), 500
        self._jobs[job.token] = job
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
                del self._jobs[job.token]
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
        # One prefill hands out one KV cache, and it is read once.
        prompt = body.get("prompt")
        is_many = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)
        if is_many or any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
            raise Refused(400, "n and best_of must be 1, and prompt a single one: send one request for each answer")
        return body

    async def _route(self, job: Job) -> web.StreamResponse:
        """Have a request prefilled and decoded, by other engines if need be."""
        params = None
        for attempt in itertools.count(1):
            job.notes["attempts"] = attempt
            try:
                if job.lender is None:
                    self.engines.up("decode")  # or the prefill would be for nothing
                    params = await self._prefill(job)
                return await self._decode(self.engines.choose("decode", job.avoid), job, params)
            except EngineFault as fault:
                if attempt == self._attempts or fault.why == "timeout" or job.stream is not None:
                    raise
                self._retried.labels(fault.why).inc()
                if fault.why != "kv_transfer_error":
                    job.avoid.add(fault.engine)
                if fault.why in ("kv_transfer_error", "failed") and job.lender is not None:
                    job.avoid.add(job.lender)  # vLLM does not say which of the two it was
                if fault.why != "unreachable" or fault.engine is job.lender:
                    job.lender = None  # its params may be used up
        raise AssertionError

    async def _prefill_again(self, request: web.Request) -> web.Response:
        """Give a decode engine other params than those that have failed it."""
        job = self._jobs.get(request.match_info["token"])
        if job is None or job.lender is None:
            raise Refused(404, "no such request is being decoded")
        self._retried.labels("renewed").inc()
        job.avoid.add(job.lender)
        decode = job.engine
        try:
            found = await self._prefill(job)
        finally:
            if decode is not None:
                job.asks(decode)
        return web.json_response({"kv_transfer_params": found})

    async def _prefill(self, job: Job) -> Any:
        """Have the prompt computed; returns where the KV cache lies, or None if there is nothing to fetch."""
        job.lender = engine = self.engines.choose("prefill", job.avoid)
        job.asks(engine)
        body = {name: value for name, value in job.body.items() if name not in OF_GENERATION}
        body |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        with job.trace.ask("prefill", engine.url) as trace:
            async with self.engines.ask(engine, job.path, job.headers | trace, body, self._limits.prefill_s) as answer:
                found = engine.decoded(await answer.read())
        self._passed("prefill", job)
        return found.get("kv_transfer_params")

    async def _decode(self, engine: Engine, job: Job, params: Any) -> web.StreamResponse:
        """Have the request decoded, and pass on what comes."""
        job.asks(engine)
        # Never the client's own params, for they name hosts to talk to.
        body = {name: value for name, value in job.body.items() if name != "kv_transfer_params"}
        body |= {"kv_transfer_params": params} if params else {}
        async with contextlib.AsyncExitStack() as asking:
            trace = asking.enter_context(job.trace.ask("decode", engine.url))
            answer = await asking.enter_async_context(self.engines.ask(engine, job.path, job.headers | trace, body))
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


async def _serve(router: Router, host: str, port: int, drain_s: float, bounds: Bounds) -> None:
    async with serving(router.app(), host, port, GRACE_S, bounds) as url:
        log.info("listening", url=url)
        await until_told()
        log.info("stopping", in_flight=router.num_in_flight, drain_s=drain_s)


Urls = Annotated[list[str], typer.Option(metavar="URL", help="An engine, such as http://10.0.0.7:8100; repeat it.")]


def proxy(
    prefill: Urls,
    decode: Urls,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="0: one that the system chooses; the log names it.", min=0, max=65535)
    ] = 8000,
    attempts: Annotated[int, typer.Option(help="How often a request is tried in all.", min=1)] = 3,
    connect_s: Annotated[float, typer.Option(help="For connecting to an engine, and for its health.")] = 2.0,
    prefill_s: Annotated[float, typer.Option(help="For one prefill.")] = 120.0,
    silence_s: Annotated[float, typer.Option(help="Longest silence of an engine.")] = 300.0,
    health_s: Annotated[float, typer.Option(help="How often engines are asked for their health.")] = 2.0,
    max_requests: Annotated[int, typer.Option(help="More at a time are refused with 503.", min=1)] = 1024,
    max_body_mib: Annotated[float, typer.Option(help="A larger body is refused with 413.")] = 16.0,
    max_bodies_mib: Annotated[
        float, typer.Option(help="What the bodies of all requests under way may hold; a request beyond it gets 503.")
    ] = 1024.0,
    body_s: Annotated[
        float, typer.Option(help="How long a client's body may take to arrive; then it gets 408.")
    ] = 60.0,
    idle_s: Annotated[
        float, typer.Option(help="A connection without a whole header is closed after so long, and so is an idle one.")
    ] = Bounds.idle_s,
    max_connections: Annotated[
        int, typer.Option(help="Clients' connections; more get 503. A third of `ulimit -n` at most.", min=1)
    ] = Bounds.connections,
    max_connections_per_host: Annotated[
        int, typer.Option(help="The same of one address, such as a load balancer's.", min=1)
    ] = Bounds.per_host,
    drain_s: Annotated[float, typer.Option(help="How long requests may go on after Ctrl-C or SIGTERM.")] = 30.0,
) -> int:
    """Route OpenAI's requests: prefill engines compute the prompt, decode engines fetch the KV cache and go on."""
    for url in (*prefill, *decode):
        command.check(url.startswith(("http://", "https://")), f"{url!r} is no URL, such as http://10.0.0.7:8100")
    limits = Limits(connect_s, prefill_s, silence_s, health_s)
    times = {"drain_s": drain_s, "body_s": body_s, "idle_s": idle_s}
    sizes = {"max_body_mib": max_body_mib, "max_bodies_mib": max_bodies_mib}
    for name, value in {**vars(limits), **times, **sizes}.items():
        command.check(0 < value < 1e6, f"--{name.replace('_', '-')} {value} is outside 0 ... 1000000")
    log_as_json()
    most: dict[str, Any] = {"max_requests": max_requests, **sizes}
    router = Router(prefill, decode, limits, attempts=attempts, body_s=body_s, drain_s=drain_s, **most)
    bounds = Bounds(idle_s, max_connections, max_connections_per_host)
    asyncio.run(_serve(router, host, port, drain_s, bounds))
    return 0


EPILOG = """
[bold]Serves[/bold]

  POST /v1/completions and /v1/chat/completions, streamed or not, one answer each

  GET /v1/models, /health, /health/ready (the engines' states, who waits for the longest), /metrics (for Prometheus)

[bold]Errors[/bold]  are JSON in OpenAI's form

  502: engines failed; 503: none is up, all are busy, or the router is stopping; 504: one did not answer in time; 499,
  in log and metrics: the client left

[bold]Examples[/bold]

  python -m docs.examples.service.pd_service   # all on this host, with tiny engines

  python -m docs.examples.service.pd_proxy --prefill http://10.0.0.7:8100 --prefill http://10.0.0.8:8100 --decode http://10.0.0.9:8200

[bold]Exit status[/bold]  0 stopped in order, 2 bad input
"""
main = command.script(proxy, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
