"""The router turns each request of a client into two: a prefill and a decode.

To its clients the router looks like one engine. A prefill engine computes the prompt and one token, and answers with
`kv_transfer_params`, which locate the KV cache. A decode engine gets the client's request with these params, fetches
the KV cache, and generates. Its answer is passed on unchanged, piece by piece as it arrives.

Both legs leave at once if both engines said that they can (`Engine.is_apt`). The decode leg names the prefill engine
and a ticket, which the prefill leg brings, and waits for the offer (`Router._follow`).

The router stores only counts. One loop, `Router._route`, handles all faults:

- Until the first piece was passed on, a request can be retried: if an engine is unreachable, dies, falls silent or
  answers with an error, another engine is tried if there is one. Params are good for one use. They can be reused if the
  decode engine was not reached, or had no room; after any other fault the prompt is computed again.
- An engine without room is not asked twice: if there is no other, the client is told when to come back.
- If the prefill leg brings no offer, the decode leg that follows it ends, unless it has sent its first piece.
- Until the prefill leg has answered, only the prefill leg can be late, because a follower has nothing to say.
- If no answer came of params, the prefill engine is asked to take its KV cache back (`Router._give_back`).
- If two engines were lost with a request, the request may be the cause, so it is not tried on a third.
- If no prefill is available or its KV cache cannot be used (`CAUSES`), a decode engine computes the prompt itself.
- After the first piece, the client gets an error as the last event of its stream, also when the router stops. No other
  engine continues the stream, because two engines may generate different text.
- A client that disconnects cancels its handler. This closes the connection to the engine, which tells the engine.

An engine can be any server that speaks HTTP and passes `kv_transfer_params` as vLLM does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import resource
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp.web as web
import msgspec
import prometheus_client as prometheus
import structlog
from aiohttp import ClientResponse, ClientTimeout

from asynckv.edges.aside import Aside
from asynckv.tools.proxy.engines import (
    BLANK,
    MOST_WHOLE,
    Engine,
    EngineFault,
    Engines,
    Leg,
    Params,
    follows,
    identity_of,
)
from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.server import COMPLETIONS, Refused, errors_as_json, serving, told_to_stop
from asynckv.tools.proxy.sources import Sources

RESPONSES = "/v1/responses"
OF_GENERATION = {"min_tokens", "min_completion_tokens", "stream_options", "n", "best_of"}
"""Fields of a request that contradict a prefill, which generates one token in one piece."""
NUMBERS = {
    COMPLETIONS[0]: {"n", "min_tokens", "max_tokens"},
    COMPLETIONS[1]: {"n", "min_tokens", "max_tokens", "max_completion_tokens"},
    RESPONSES: {"max_output_tokens"},
}
"""Whole numbers that a prefill request leaves out or replaces, so that no prefill engine checks them."""
OF_STREAM = {"include_usage", "continuous_usage_stats"}
TRUTHS = {"0", "1", "f", "t", "n", "y", "no", "yes", "off", "on", "false", "true"}  # texts that vLLM takes for booleans
OF_HOSTS = {"kv_transfer_params", "ec_transfer_params"}  # a client must not set these
LOOKED_AT = {"stream", "previous_response_id", "background", "n", "best_of", "use_beam_search", "echo", "logprobs"}
LOOKED_AT |= {"prompt_logprobs"}
"""Fields of a request that the router decodes, each a `SCALAR`."""
LOOKED_AT_BY = {path: LOOKED_AT | names for path, names in NUMBERS.items()}
SCALAR = msgspec.json.Decoder(str | float | bool | None)
MAX_FIELDS = 1000
PASSED_ON = ("Authorization", "traceparent", "tracestate")
RANK = "X-data-parallel-rank"  # vLLM's header that selects the data-parallel rank of the engine that gets it
CAUSES = ["no_prefill_engine", "prefill_failed", "transfer_failed", "no_params", "n", "prompts", "beam_search"]
CAUSES += ["prompt_logprobs"]
"""Causes for which a decode engine computes a prompt itself; docs/deploy.md has a table."""
LOST = {"lost", "silent"}
UNTOUCHED = {"unreachable", "overloaded"}
"""Faults after which params are still good, because the engine has not read the KV cache."""
OF_TRANSFER = {"kv_transfer_error", "failed"}
"""Faults of decode engines that the KV cache may have caused; vLLM does not report whether it did."""
GRACE_S = 0.5  # time after the drain to write its errors; other requests (such as /metrics) also get only this long
MAX_NAMED = 8  # requests that `/health/ready` lists
END = 16384  # last bytes of a stream, which are searched for an error
DONE = b"data: [DONE]\n\n"
MOST_EVENT = 2**24  # bytes of one event of a stream
LATE_S, LOOKS = 0.15, 5
"""Once a client has left during a prefill, its engine may answer for this time, so many times, because an engine that
is cut off just when it lends holds the blocks until the lease ends."""
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

log = structlog.get_logger()


class Loan(Leg):
    """The prefill leg, and the KV cache that it lends.

    Attributes:
        identity: The engine that the decode leg follows.
        task: Asks for the params.
        follower: Expires if the decode leg is to end; None if no decode leg follows, or it has sent its first piece.
        is_read: True once a decode engine generates from the KV cache.
    """

    identity: bytes
    task: asyncio.Task[Params]
    follower: asyncio.Timeout | None = None
    is_read = False

    @property
    def params(self) -> Params | None:
        """Location of the KV cache, once the engine has answered."""
        is_answered = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if is_answered else None

    @property
    def is_offered(self) -> bool:
        return self.params is not None and identity_of(self.params) == self.identity

    def reads(self) -> None:
        """Note the first piece of the decode leg, which the prefill leg cannot end any more."""
        self.is_read = True
        if self.follower is not None:
            self.follower.reschedule(None)
            self.follower = None


class Job:
    """One request of a client in flight.

    Attributes:
        headers: Headers for engines: the client's credentials and trace, and the request id of all logs.
        body: The fields of the request as they came; `asked` has those that are `LOOKED_AT`.
        loan: The prefill leg, until its params are given back.
        decoding: The newest decode leg.
        is_shared: True if several answers need the KV cache.
        failure: The error that ended the engine's stream.
        avoid: URLs of engines that failed the request; `lost` has those that were lost while they worked on it.
        limit: Time-out of the request; it expires only while the router stops.
        notes: Fields for the log.
    """

    def __init__(self, request: web.Request, ends: float | None = None) -> None:
        self.request, self.path, self.began = request, request.path, time.monotonic()
        self.task, self.limit = asyncio.current_task(), asyncio.timeout_at(ends)
        self.stream: web.StreamResponse | None = None
        self.body: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}
        self.body_bytes = 0
        self.notes: dict[str, Any] = {}
        self.loan: Loan | None = None
        self.decoding: Leg | None = None
        self.is_alone = self.is_shared = False
        self.failure: Refused | None = None
        self.avoid: set[str] = set()
        self.lost: set[str] = set()
        given = request.headers.get("X-Request-Id", "")
        self.id = given if given.isascii() and given.isprintable() and 0 < len(given) <= 200 else uuid.uuid4().hex
        self.headers = {"X-Request-Id": self.id, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        self.headers |= {name: request.headers[name] for name in PASSED_ON if name in request.headers}

    @property
    def leg(self) -> Leg | None:
        """The leg that is waited for."""
        return self.loan if self.loan is not None and not self.loan.task.done() else self.decoding

    @property
    def heard(self) -> float:
        return self.began if self.leg is None else self.leg.heard

    def seen(self) -> dict[str, Any]:
        engine = self.leg.engine.url if self.leg is not None else ""
        silent_s, age_s = (round(time.monotonic() - since, 1) for since in (self.heard, self.began))
        return {"id": self.id, "engine": engine, "silent_s": silent_s, "age_s": age_s}


class Name(str):
    """The name of a field, as a separate type, so that msgspec lets `fields` count the names."""


def fields(data: bytes) -> dict[str, Any]:
    """Read an object without `OF_HOSTS`; values stay raw, because Python objects may be thirty times as large."""
    count = itertools.count(1)

    def counted(kind: type, name: str) -> Name:
        if next(count) > MAX_FIELDS:
            raise ValueError(f"it has more than {MAX_FIELDS} fields")
        return Name(name)

    found = msgspec.json.decode(data, type=dict[Name, msgspec.Raw], dec_hook=counted)
    return {str(name): value for name, value in found.items() if name not in OF_HOSTS}


def _is_one(prompt: bytes) -> bool:
    """Return True if a prompt is a text, tokens, or a list of one of these."""
    if not prompt.startswith(b"[") or prompt.translate(None, b"-0123456789, \t\r\n") == b"[]":
        return True
    with contextlib.suppress(msgspec.ValidationError):  # raised at the second prompt
        return bool(msgspec.json.decode(prompt, type=tuple[msgspec.Raw]))
    return False


def why_alone(job: Job) -> str:
    """Return the cause why a request cannot use a transferred KV cache; empty if it can."""
    asked = job.asked
    prompts = [bytes(job.body.get(name, b"null")) for name in ("prompt", "prompt_embeds")]
    if prompts.count(b"null") == 0 or not all(map(_is_one, prompts)):
        return "prompts"
    if asked.get("use_beam_search"):
        return "beam_search"
    # For a chat, vLLM uses `top_logprobs`, which is 0 by default.
    is_echo = asked.get("echo") and ("messages" in job.body or asked.get("logprobs") is not None)
    return "prompt_logprobs" if is_echo or asked.get("prompt_logprobs") is not None else ""


def _number(name: str, value: str | float | bool) -> float:
    """Return the whole number that vLLM takes a value for, such as "7"."""
    with contextlib.suppress(ValueError):
        if (number := float(value)).is_integer():
            return number
    raise Refused(400, f"{name} is {str(value)[:40]!r}, not a whole number")


def check(job: Job) -> None:
    """Refuse what no engine takes in the fields that a prefill request leaves out or replaces, before any prefill."""
    asked = job.asked
    numbers = {name: _number(name, asked[name]) for name in NUMBERS[job.path] & asked.keys() if asked[name] is not None}
    asked |= numbers
    name = next((it for it in ("max_completion_tokens", "max_output_tokens", "max_tokens") if it in numbers), "")
    most, least = numbers.get(name, math.inf), 0 if asked.get("echo") else 1
    if most < least:
        raise Refused(400, f"{name} is {most:g}, less than {least}")
    if not 0 <= numbers.get("min_tokens", 0) <= max(most, 1):
        raise Refused(400, f"min_tokens is {numbers['min_tokens']:g}, outside 0 ... {max(most, 1):g}")
    if numbers.get("n", 1) < 1:
        raise Refused(400, f"n is {numbers['n']:g}, less than 1")
    if job.path == RESPONSES or (given := bytes(job.body.get("stream_options", b"null"))) == b"null":
        return
    try:
        options = fields(given)
        told = {name: SCALAR.decode(options[name]) for name in OF_STREAM & options.keys()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise Refused(400, f"stream_options: {exc}") from None
    if options and not asked.get("stream"):
        raise Refused(400, "stream_options needs stream to be true")
    for name, value in told.items():
        if not (value in (None, 0, 1) or (isinstance(value, str) and value.lower() in TRUTHS)):
            raise Refused(400, f"stream_options: {name} is neither true nor false")


class Router:
    """Carry requests to engines, and answers to clients.

    A request that has waited for an engine for `warn_s` is logged.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        limits: Limits | None = None,
        *,
        file: Path | None = None,
        is_computed: bool = True,
        warn_s: float = 10.0,
    ) -> None:
        self._is_computed = is_computed
        self._limits, self._warn_s, self._body_bytes = limits or Limits(), warn_s, 0
        self._registry = prometheus.CollectorRegistry()
        self.engines = Engines(Sources(prefill, decode, file), self._limits, self._registry)
        at: dict[str, Any] = {"registry": self._registry}
        self._answered = prometheus.Counter("pd_proxy_requests", "Requests ended.", ["path", "status"], **at)
        self._retried = prometheus.Counter("pd_proxy_retries", "Further attempts, by reason.", ["why"], **at)
        self._decode_only = prometheus.Counter(
            "pd_proxy_decode_only", "Requests that a decode engine computes alone, by cause.", ["cause"], **at
        )
        for cause in CAUSES:
            self._decode_only.labels(cause)
        text = "Seconds until prefill, first event and end, by the way of the two legs: at_once, in_turn, or alone."
        self._seconds = prometheus.Histogram("pd_proxy_seconds", text, ["until", "way"], buckets=BUCKETS, **at)
        in_flight = prometheus.Gauge("pd_proxy_in_flight", "Requests in flight.", **at)
        in_flight.set_function(lambda: len(self._jobs))
        self._jobs: set[Job] = set()
        self._admitted: set[Job] = set()  # those with a body
        self._giving: set[asyncio.Task[None]] = set()
        self._ends: float | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._jobs)

    def app(self) -> web.Application:
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
            self.engines.spawn(self._watch())
            yield

    async def _watch(self) -> None:
        """End requests with engines that take too long, and log each once if it waits for long.

        An answer in one piece has no time limit. One task for all requests is cheaper than a timer for every piece.
        """
        limits = self._limits
        while True:
            await asyncio.sleep(min(1.0, self._warn_s / 2, limits.prefill_s / 8, limits.silence_s / 8))
            for job in self._jobs:
                if (leg := job.leg) is None or leg.is_writing or not (leg is job.loan or job.asked.get("stream")):
                    continue
                engine, waited_s = leg.engine, time.monotonic() - leg.heard
                if waited_s > (limits.prefill_s if engine.role == "prefill" else limits.silence_s):
                    engine.end(leg.asking, "timeout")
                elif waited_s > self._warn_s and not leg.is_waiting:
                    leg.is_waiting = True
                    log.warning("request_waits", role=engine.role, trouble=engine.trouble, **job.seen())

    async def _drain(self, app: web.Application) -> None:
        """Wait for requests in flight, and end those that take too long; no new ones arrive."""
        self.end_within(self._limits.drain_s)
        if tasks := [job.task for job in self._jobs if job.task is not None]:
            await asyncio.wait(tasks, timeout=self._limits.drain_s + GRACE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKS * LATE_S + GRACE_S):
                while self._giving:  # those that wait for a prefill are followed by others
                    await asyncio.wait(self._giving)

    def end_within(self, seconds: float) -> None:
        self._ends = asyncio.get_running_loop().time() + seconds
        for job in self._jobs:
            with contextlib.suppress(RuntimeError):  # the request has ended already, and is only writing
                job.limit.reschedule(self._ends)

    async def _models(self, request: web.Request) -> web.Response:
        engine = self.engines.choose("decode", ())
        leg = Leg(engine, request.path, Job(request).headers)
        async with self.engines.ask(leg, None, within=ClientTimeout(self._limits.connect_s)) as answer:
            return web.Response(body=await engine.whole(answer), content_type="application/json")

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
        job, status = Job(request, self._ends), 500
        self._jobs.add(job)
        structlog.contextvars.bind_contextvars(id=job.id)  # aiohttp handles each request in a context of its own
        try:
            async with job.limit:
                await self._read(job)
                # A request counts only once its body is here.
                if len(self._admitted) >= self._limits.max_requests:
                    raise Refused(503, f"{self._limits.max_requests} requests are already in flight", "overloaded")
                self._admitted.add(job)
                response = await self._route(job)
            status = response.status
            if job.failure is not None:
                status, job.notes["error"] = job.failure.status, str(job.failure)
            return response
        except (Refused, TimeoutError) as exc:
            refused = exc if isinstance(exc, Refused) else Refused(503, "the router is stopping", "stopping")
            status, job.notes["error"] = refused.status, str(refused)
            if job.stream is None:
                response = refused.response()
                response.headers["X-Request-Id"] = job.id
                return response
            if job.asked.get("stream"):
                await job.stream.write(refused.event())
            elif request.transport is not None:
                request.transport.abort()  # so that the client does not take a part of the answer for all of it
            return job.stream
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            self._jobs.remove(job)
            self._admitted.discard(job)
            self._body_bytes -= job.body_bytes
            self._give_back(job)
            self._answered.labels(job.path, status).inc()
            self._passed("end", job)
            log.info("request", path=job.path, status=status, **job.notes)

    async def _read_body(self, job: Job) -> bytes:
        """Read a body, and count its bytes until the request ends, because a further attempt needs the body."""
        body = bytearray()
        async for piece in job.request.content.iter_any():
            if len(body) + len(piece) > self._limits.max_body_mib * 2**20:
                raise Refused(413, f"the body is larger than {self._limits.max_body_mib:g} MiB")
            if self._body_bytes + len(piece) > self._limits.max_bodies_mib * 2**20:
                raise Refused(503, f"bodies of requests already hold {self._limits.max_bodies_mib:g} MiB", "overloaded")
            body += piece
            job.body_bytes += len(piece)
            self._body_bytes += len(piece)
        return bytes(body)

    async def _read(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self._limits.body_s):
                data = await self._read_body(job)
            data.decode()  # fields that are not decoded could hold bytes that are not UTF-8
            body = fields(data)
            job.asked = {name: SCALAR.decode(body[name]) for name in LOOKED_AT_BY[job.path] & body.keys()}
            if (extra := bytes(body.get("vllm_xargs", b""))).startswith(b"{"):
                body["vllm_xargs"] = fields(extra)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
        except (msgspec.MsgspecError, web.RequestPayloadError, ValueError, RecursionError) as exc:
            raise Refused(400, f"the body is not a JSON object: {exc}") from None
        if not isinstance(job.asked.get("stream"), bool | None):
            raise Refused(400, "stream is neither true nor false")
        if job.asked.get("previous_response_id") or job.asked.get("background"):
            what = "previous_response_id and background need the engine that keeps the response"
            raise Refused(400, f"{what}; send the whole conversation as input")
        job.body = body

    async def _route(self, job: Job) -> web.StreamResponse:
        """Have a request prefilled and decoded, and retry with other engines if needed."""
        if cause := why_alone(job):
            self._leave_alone(job, cause)
        else:
            check(job)  # alone, vLLM's beam search ignores some of these fields
        spent = 0
        for job.notes["attempts"] in itertools.count(1):
            try:
                if job.loan is None and not job.is_alone:
                    self._borrow(job)
                if (followed := await self._follow(job)) is not None:
                    return followed
                params = await self._params(job)
                return await self._decode(self.engines.choose("decode", job.avoid, job.lost), job, params)
            except EngineFault as fault:
                why, engine = fault.why, fault.engine
                job.lost |= {engine.url} if why in LOST else set()
                if len(job.lost) > 1:
                    others = "another engine was lost with this request before, so a third is not tried"
                    raise EngineFault(engine, why, f"{fault.text}; {others}") from fault
                job.avoid |= {engine.url} if why != "kv_transfer_error" else set()
                # Such an engine has done nothing, so this attempt is free if there are others to try.
                is_free = why in UNTOUCHED and self.engines.is_up(engine.role, job.avoid)
                spent += not is_free
                # If a decode engine can compute the prompt instead, that is one more attempt.
                is_of_transfer = engine.role == "prefill" or (why in OF_TRANSFER and job.loan is not None)
                is_last = not is_free and (spent >= self._limits.attempts or why in ("timeout", "overloaded"))
                if job.stream is not None or (is_last and not (is_of_transfer and self._is_computed)):
                    raise
                self._retried.labels(why).inc()
                if why in OF_TRANSFER and job.loan is not None:
                    job.avoid.add(job.loan.engine.url)
                if why not in UNTOUCHED or engine.role == "prefill":
                    self._give_back(job)  # the params may be used up
                if is_last:
                    self._leave_alone(job, "prefill_failed" if engine.role == "prefill" else "transfer_failed")
        raise AssertionError

    def _leave_alone(self, job: Job, cause: str) -> None:
        """Let a decode engine compute the prompt too."""
        self._give_back(job)
        job.is_alone = True
        job.notes |= {"decode_only": cause, "way": "alone"}
        self._decode_only.labels(cause).inc()

    def _give_back(self, job: Job) -> None:
        """Forget a loan, and end its prefill leg, or ask the engine to take its KV cache back before the lease expires.

        This is right even if a decode engine reads the KV cache, because the first reader keeps all others out. Only
        asynckv's params can be given back by a request that does not read.
        """
        loan, job.loan = job.loan, None
        if loan is not None and not loan.task.done():
            self._give(self._give_back_later(job, loan))
        elif loan is not None and not loan.is_read:
            self._tell(job, loan)

    def _tell(self, job: Job, loan: Loan) -> None:
        if "asynckv" in (params := loan.params or {}):
            short: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
            if job.path == COMPLETIONS[1]:
                short = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            elif job.path == RESPONSES:
                short = {"input": "x", "max_output_tokens": 1, "store": False}
            short |= {name: job.body[name] for name in ("model",) if name in job.body}
            short["kv_transfer_params"] = params | {"do_remote_prefill": None, "give_back": True}
            self._give(self.engines.tell(loan.engine, job.path, job.headers, short))

    def _give(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.engines.spawn(work)
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def _give_back_later(self, job: Job, loan: Loan) -> None:
        """Wait a little for a prefill leg that is not needed any more, because its answer may be here, but not read."""
        try:
            for _ in range(LOOKS):
                await asyncio.wait([loan.task], timeout=LATE_S)
            if loan.task.done() and not loan.is_read:
                self._tell(job, loan)
        finally:
            loan.task.cancel()

    def _borrow(self, job: Job) -> None:
        """Begin the prefill leg; it brings a ticket if a decode leg can leave at once."""
        decode = self.engines.best("decode", job.avoid, job.lost)  # without one the prefill would be wasted
        try:
            engine = self.engines.choose("prefill", job.avoid, job.lost)
        except Refused:
            if not self._is_computed:
                raise
            return self._leave_alone(job, "no_prefill_engine")
        job.is_shared = any(job.asked.get(name) not in (None, 1) for name in ("n", "best_of"))
        if job.is_shared and engine.lends_once:
            return self._leave_alone(job, "n")
        ticket = secrets.token_hex(16) if engine.is_apt and self._may_follow(decode) else ""
        job.notes |= {"prefill": engine.url, "way": "at_once" if ticket else "in_turn"}
        job.loan = loan = Loan(engine, job.path, job.headers, ticket)
        loan.identity, loan.task = engine.identity, asyncio.create_task(self._ask_for_params(job, loan))
        loan.task.add_done_callback(lambda _: self._prefilled(job, loan))

    def _may_follow(self, engine: Engine) -> bool:
        return engine.is_apt and len(engine.ahead) < self._limits.ahead

    def _prefilled(self, job: Job, loan: Loan) -> None:
        """Let a decode leg that follows go on, or end it if the prefill leg has no offer for it."""
        loan.is_read &= loan.is_offered or not loan.ticket
        if job.decoding is not None:
            job.decoding.engine.ahead.discard(loan)
            job.decoding.heard = time.monotonic()  # from now on it can be late
        if loan.follower is not None and not loan.is_offered:
            loan.follower.reschedule(0)

    async def _follow(self, job: Job) -> web.StreamResponse | None:
        """Send a decode leg while the prefill leg goes on; return None if none can follow, or no offer will come."""
        if (loan := job.loan) is None or not loan.ticket or loan.task.done():
            return None
        if not self._may_follow(self.engines.best("decode", job.avoid, job.lost)):
            return None
        engine = self.engines.choose("decode", job.avoid, job.lost)
        follow = {"ticket": loan.ticket, **msgspec.json.decode(loan.identity, type=Params)}
        engine.ahead.add(loan)
        limit = loan.follower = asyncio.timeout(None)
        try:
            async with limit:
                return await self._decode(engine, job, {"do_remote_prefill": True, "asynckv_follow": follow})
        except EngineFault as fault:
            if fault.why not in OF_TRANSFER or loan.task.done() or job.stream is not None:
                raise
            # It may have heard of the prefill leg's end a little before us, which then decides.
            loan.follower = None
            await asyncio.wait([loan.task], timeout=LOOKS * LATE_S)
            if loan.is_offered or not loan.task.done():
                raise
            return None
        except TimeoutError:
            if not limit.expired():
                raise
            if loan.params:
                self._retried.labels("identity").inc()
            return None
        finally:
            engine.ahead.discard(loan)
            loan.follower = None

    async def _params(self, job: Job) -> Params | None:
        """Wait for the prefill leg, and return its params; None for a request that is left alone."""
        if (loan := job.loan) is None:
            return None
        params = await asyncio.shield(loan.task)
        job.notes["way"] = "in_turn"
        if params and not (job.is_shared and loan.engine.lends_once):
            return params
        self._leave_alone(job, "n" if params else "no_params")
        return None

    async def _ask_for_params(self, job: Job, loan: Loan) -> Params:
        engine, ticket = loan.engine, {"asynckv_ticket": loan.ticket} if loan.ticket else {}
        body = {name: value for name, value in job.body.items() if name not in OF_GENERATION}
        body |= {"max_completion_tokens": 1} if "max_completion_tokens" in body else {}
        body |= {"max_output_tokens": 1, "store": False} if job.path == RESPONSES else {"max_tokens": 1}
        body |= {"stream": False, "kv_transfer_params": {"do_remote_decode": True, **ticket}}
        async with self.engines.ask(loan, body) as answer:
            told = engine.decoded(await engine.whole(answer), loan.ticket).get("kv_transfer_params")
        self._passed("prefill", job)
        with contextlib.suppress(msgspec.MsgspecError):  # it is not an object
            if params := msgspec.json.decode(told or b"{}", type=Params):
                engine.lends(params)
                return params
        return {}

    async def _decode(self, engine: Engine, job: Job, params: Mapping[str, Any] | None) -> web.StreamResponse:
        job.decoding = leg = Leg(engine, job.path, job.headers, job.loan.ticket if job.loan is not None else "")
        job.notes["decode"] = engine.url
        if params and not params.keys().isdisjoint(("asynckv_offers", "asynckv_follow")):
            params = {**params, "asynckv_ask": True}
        body = job.body | ({"kv_transfer_params": params} if params else {})
        rank = {RANK: job.request.headers[RANK]} if RANK in job.request.headers else {}
        async with self.engines.ask(leg, body, rank) as answer:
            is_whole = False
            headers = {"Content-Type": answer.headers.get("Content-Type", ""), "X-Request-Id": job.id}
            if job.asked.get("stream"):
                piece = await engine.first_event(answer, leg)
                self._passed("first", job)
            elif is_whole := len(piece := await engine.head(answer)) <= MOST_WHOLE:
                engine.decoded(piece, leg.ticket)
                engine.is_apt |= follows(piece)
            if job.loan is not None:
                job.loan.reads()
                engine.ahead.discard(job.loan)
            if is_whole:
                return web.Response(body=piece, headers=headers)
            job.stream = web.StreamResponse(headers=headers)
            try:
                await job.stream.prepare(job.request)
                await self._pass_on(leg, job, job.stream, answer, piece)
                await job.stream.write_eof()
            except ConnectionError as exc:
                raise asyncio.CancelledError from exc  # the client has disconnected
            return job.stream

    async def _pass_on(
        self, leg: Leg, job: Job, response: web.StreamResponse, answer: ClientResponse, piece: bytes
    ) -> None:
        """Pass an answer on as it arrives: a stream by whole events, so that an error can follow."""
        engine, is_stream, rest, end = leg.engine, job.asked.get("stream"), b"", b""
        while piece:
            leg.hears()
            rest = rest + piece if rest else piece
            cut = len(rest)
            if is_stream and not rest.endswith(BLANK):
                cut = max((rest.rfind(it) + len(it) for it in BLANK if it in rest), default=0)
            if cut:
                whole, rest = rest[:cut], rest[cut:]
                end = end if whole == DONE else whole
                engine.is_apt |= follows(whole, is_stream=True)
                leg.is_writing = True
                await response.write(whole)
                leg.is_writing = False
            elif len(rest) > MOST_EVENT:
                raise engine.fault("garbage", f"sent an event of more than {MOST_EVENT >> 20} MiB")
            piece = await answer.content.readany()
        if is_stream:
            job.failure = engine.failed_at_end((end + rest)[-END:], leg.ticket)
        if rest:
            await response.write(rest)

    def _passed(self, until: str, job: Job) -> None:
        seconds = time.monotonic() - job.began
        job.notes[f"{until}_s"] = round(seconds, 4)
        self._seconds.labels(until, job.notes.get("way", "none")).observe(seconds)


class Threads(Aside, ThreadPoolExecutor):
    """Threads of the event loop, such as those that resolve names. The end of the process does not wait for them."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


async def serve(router: Router, host: str, port: int, limits: Limits) -> None:
    """Serve until a signal to stop; at a second signal, end the requests in flight."""
    told = told_to_stop(lambda: router.end_within(0))  # first, because process 1 ignores unhandled signals
    asyncio.get_running_loop().set_default_executor(Threads("asynckv-proxy"))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with serving(router.app(), host, port, GRACE_S, limits) as url:
        log.info("listening", url=url)
        await told.wait()
        log.info("stopping", in_flight=router.num_in_flight, drain_s=limits.drain_s)
