"""The engines behind the router: which are up, which has the least work, and what their answers mean.

Every fault of an engine becomes an `EngineFault` with one word, `why`:

- `unreachable`: no connection. An engine that refuses one counts as down until its health is good again.
- `lost`: the connection broke before the answer was complete.
- `overloaded`: status 429 or 503.
- `kv_transfer_error`: a decode engine reports that it could not fetch the KV cache (vLLM reports `failed` instead).
- `failed`: any other status from 500 on, or an answer with the `finish_reason` "abort", because vLLM is about to end.
- `garbage`: an answer that does not fit this API.
- `silent`: two health checks in a row had no answer, and the engine sent nothing else: it was stopped, its loop is
  blocked, or its host is gone. An engine that refuses connections is not silent, because it may be finishing its work.
- `timeout`: no answer in time. Another engine might take as long again, so this is the last attempt.

An answer with status 4xx is the client's fault, and is passed on unchanged (`Refused`).

**A time-out proves little.** A connect that takes longer than `connect_s` counts like a late health check: two in a row
take an engine out (`Engine.late`). It does not count if the engine sent a byte of any answer meanwhile, and the connect
goes on. Time is counted in beats of the event loop, so a busy router waits longer. If time-outs alone took all engines
of a role out, the least late one is asked.

**Both legs at once.** A prefill engine can take part if its newest params say that it offers, and a decode engine if an
answer said that it follows (`Engine.is_apt`). Any fault forgets it, because a restart may change the engine.

Engines come and go (`sources`). A new one is checked before it is used. One that is no longer named gets no new
requests, and is watched until it has finished its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import io
import itertools
import math
import re
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
import msgspec
import prometheus_client as prometheus
import structlog

from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.server import Refused
from asynckv.tools.proxy.sources import Sources

STATUS = {"unreachable": 503, "overloaded": 503, "timeout": 504, "silent": 504}
UNHEARD = 2
"""Time-outs in a row that take an engine out, and health checks without any sign of life that end its requests."""
NO_HOST = (errno.EHOSTUNREACH, errno.ENETUNREACH)
OURS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of a connect that say nothing of the engine, because this host lacks descriptors, memory or ports."""
APART = 0.75
"""Part of `connect_s` after one time-out in which others do not count, because the same stall may have caused them."""
BEATS = 8
"""Turns of the event loop in `connect_s`; with fewer than half of them, the process was too busy to hear an engine."""
NO_LIMIT = aiohttp.ClientTimeout()
NEW = "not asked yet"
PREAMBLE = re.compile(
    rb'event: response\.(created|queued|in_progress)\s|data: .*"delta": ?{"role": ?"\w+", ?"content": ?""}'
)
"""Events of `/v1/responses` and of chats that vLLM sends before it begins to generate."""
BLANK = (b"\n\n", b"\n\r\n")
ABORTED = re.compile(rb'"finish_reason": ?"abort"')
MOST_UNREAD = 2**16  # bytes of a stream in which its first event is searched
MOST_ERROR, MOST_WHOLE = 2**20, 2**24  # bytes of the largest error, and of the largest answer that is read whole
SMALL = 2**18  # bytes of a body that is sent at once
SECONDS = re.compile(r"[0-9]{1,5}")
IDENTITY = ("engine_id", "tp_size", "pp_size", "endpoints")
"""Fields of asynckv's params that a decode engine needs to follow; `num_token_shards` too if it is there."""
MOST_IDENTITIES = 1000
Params = dict[str, msgspec.Raw]
asked: ContextVar[Engine | None] = ContextVar("asked", default=None)  # the engine that a task connects to for a request
log = structlog.get_logger()


class EngineFault(Refused):
    """Raised if an engine fails at a request; another engine may succeed."""

    def __init__(self, engine: Engine, why: str, text: str, retry_after: str = "") -> None:
        super().__init__(STATUS.get(why, 502), f"{engine} {text}", why)
        self.engine, self.why, self.text = engine, why, text
        self.retry_after = retry_after or self.retry_after


def _error_in(data: bytes) -> dict[str, Any] | None:
    """Return the error in an answer or an event; None if it is not an error."""
    if b"error" not in data and b"abort" not in data:
        return None
    if ABORTED.search(data):
        return {"code": 500}
    told = _objects(data)
    if told and told[0].get("type") == "error":  # of /v1/responses, as is "response.failed"
        return told[0]
    found = next(filter(None, (it.get("error") for it in told)), None)
    return found if isinstance(found, dict) else None


def _objects(data: bytes) -> list[dict[str, Any]]:
    """Return the object that an answer or an event has, and the response in it."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        told = msgspec.json.decode(data, type=dict[str, Any])
        return [it for it in (told, told.get("response")) if isinstance(it, dict)]
    return []


def follows(data: bytes, is_stream: bool = False) -> bool:
    """Return True if an answer, or an event of a stream, says that its engine follows."""
    if b'"asynckv_follows"' not in data:
        return False
    told = itertools.chain(*map(_objects, map(_data, _events(data)) if is_stream else [data]))
    params = (it.get("kv_transfer_params") for it in told)
    return any(isinstance(it, dict) and it.get("asynckv_follows") is True for it in params)


def identity_of(params: Params) -> bytes:
    """Return the part of params that decode engines need to follow their engine; empty if it does not offer."""
    with contextlib.suppress(msgspec.MsgspecError, KeyError):
        if msgspec.json.decode(params["asynckv_offers"]) is True:
            told = msgspec.json.decode(params["asynckv"], type=Params)
            shards = {name: told[name] for name in ("num_token_shards",) if name in told}
            return msgspec.json.encode({name: told[name] for name in IDENTITY} | shards)
    return b""


def _events(data: bytes) -> list[bytes]:
    return data.replace(*BLANK[::-1]).split(BLANK[0])


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))


def _code(error: Mapping[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _retry_after(given: str) -> str:
    """Return a header of an engine if it is fit for a client: seconds within a day or so, or a date."""
    if not SECONDS.fullmatch(given):
        try:
            given = email.utils.format_datetime(email.utils.parsedate_to_datetime(given[:40]), usegmt=True)
        except (ValueError, TypeError, IndexError, OverflowError):
            return ""
    return given


class Engine:
    """One engine, as the router knows it.

    Attributes:
        trouble: The reason why it is down; empty while it is up.
        is_slow: True if time-outs alone are the reason. It is asked all the same if no engine of its role is up.
        heard: Time at which it last sent anything, including a part of an answer.
        times_late: Time-outs in a row, of health checks and connects, since a health check was answered.
        unheard: Health checks in a row during which it sent nothing at all.
        working: The time-outs of its current requests, each with the fault if it has expired.
        lends_once: True if its params are not asynckv's, so that only one of several answers to a request may read.
        is_apt: True if it said that it offers or follows, so that both legs may leave at once.
        identity: What its newest params say of it; `earlier` has all that it had.
        ahead: Prefill legs whose offer it waits for.
    """

    def __init__(self, role: str, url: str, faults: prometheus.Counter, connect_s: float) -> None:
        self.role, self.url = role, url.rstrip("/")
        self.trouble = NEW
        self.heard = self.late_at = -math.inf
        self.unheard = self.times_late = self.last_turn = 0
        self.lends_once = self.is_slow = self.is_named = self.is_apt = self.is_several = False
        self.identity, self.earlier = b"", set[bytes]()
        self.ahead: set[object] = set()
        self.working: dict[asyncio.Timeout, str] = {}
        self.faults: set[str] = set()
        self._faults, self._connect_s = faults, connect_s

    def __str__(self) -> str:
        return f"{self.role} engine {self.url}"

    @property
    def outstanding(self) -> int:
        return len(self.working)

    def found(self, trouble: str, is_slow: bool = False) -> None:
        if bool(trouble) != bool(self.trouble) or self.trouble == NEW:
            say, event = (log.warning, "engine_down") if trouble else (log.info, "engine_up")
            say(event, role=self.role, engine=self.url, trouble=trouble, outstanding=self.outstanding)
            self.is_apt = False  # it may be another engine when it comes back
        self.trouble, self.is_slow = trouble, is_slow

    def lends(self, params: Params) -> None:
        """Learn from the params of an answer.

        An identity that comes back is no restart: the URL has several data-parallel ranks, and following needs one.
        """
        self.lends_once, identity = "asynckv" not in params, identity_of(params)
        if identity and identity != self.identity and not self.is_several:
            self.is_several = identity in self.earlier or len(self.earlier) >= MOST_IDENTITIES
            self.identity, self.earlier = identity, self.earlier | {identity}
            log.info("engine_identity", role=self.role, engine=self.url, has_ranks=self.is_several)
        self.is_apt = bool(identity) and not self.is_several

    def late(self, text: str) -> None:
        """Note that a health check or a connect had no answer in time."""
        now = time.monotonic()
        if now - self.late_at >= APART * self._connect_s:
            self.times_late, self.late_at = self.times_late + 1, now
        if self.times_late >= UNHEARD or self.trouble:  # a single late answer may be chance
            self.found(text, is_slow=self.is_slow or self.trouble in ("", NEW))

    def not_heard(self) -> None:
        """Note a health check without any sign of life; at the second in a row, requests end as `silent`."""
        self.unheard += 1
        if self.unheard >= UNHEARD:
            for limit in list(self.working):
                self.end(limit, "silent")

    def end(self, limit: asyncio.Timeout | None, why: str) -> None:
        """End a current request with a fault."""
        if limit in self.working and not limit.expired():
            self.working[limit] = why
            limit.reschedule(0)

    def fault(self, why: str, text: str, retry_after: str = "") -> EngineFault:
        self.is_apt = False
        self.faults.add(why)
        self._faults.labels(self.role, self.url, why).inc()
        log.warning("engine_fault", role=self.role, engine=self.url, why=why, text=text)
        return EngineFault(self, why, text, retry_after)

    async def head(self, answer: aiohttp.ClientResponse, most: int = MOST_WHOLE) -> bytes:
        """Read an answer until its end, or until more than `most` bytes are here."""
        found = bytearray()
        while len(found) <= most and (piece := await answer.content.readany()):
            self.heard = time.monotonic()
            found += piece
        return bytes(found)

    async def whole(self, answer: aiohttp.ClientResponse, most: int = MOST_WHOLE) -> bytes:
        if len(found := await self.head(answer, most)) > most:
            raise self.fault("garbage", f"sent an answer of more than {most >> 20} MiB, with status {answer.status}")
        return found

    def decoded(self, data: bytes, ticket: str) -> dict[str, msgspec.Raw]:
        if ABORTED.search(data):
            raise self.refusal(500, data, ticket)
        try:
            return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise self.fault("garbage", f"did not answer with a JSON object: {exc}") from exc

    def refusal(self, status: int, data: bytes, ticket: str, retry_after: str = "") -> Refused:
        """Return the error that an answer means, without the ticket that the engine was given."""
        data = data.replace(ticket.encode(), b"...") if ticket else data
        said, error = data[:1000].decode(errors="replace"), _error_in(data) or {}
        if 400 <= status < 500 and status != 429:
            reason = str(error.get("message", said))[:300]  # for the log; the client gets the answer itself
            return Refused(status, f"{self} refused the request with status {status}: {reason}", body=data)
        if error.get("type") == "kv_transfer_error":
            return self.fault("kv_transfer_error", f"could not fetch the KV cache: {said}")
        why = "overloaded" if status in (429, 503) else "failed" if status >= 500 else "garbage"
        return self.fault(why, f"answered with status {status}: {said}", _retry_after(retry_after))

    async def first_event(self, answer: aiohttp.ClientResponse, leg: Leg) -> bytes:
        """Read at least the first event of a stream, because vLLM sends status 200 before it knows of an error."""
        found, event = b"", b""
        if answer.content_type == "text/event-stream":
            while not event and len(found) < MOST_UNREAD and (piece := await answer.content.readany()):
                leg.hears()
                found += piece
                *whole, rest = _events(found)
                event = next((each for each in whole if not PREAMBLE.match(each)), b"")
            event = event or (b"" if PREAMBLE.match(rest) else rest) if found else b""
        if not event and len(found) < MOST_UNREAD:
            raise self.fault("garbage", f"sent no event, but {answer.content_type}")
        if error := _error_in(_data(event)):
            raise self.refusal(_code(error), _data(event), leg.ticket)
        return found

    def failed_at_end(self, end: bytes, ticket: str) -> Refused | None:
        """Return the error that ended a stream, if any. The client has it, but log and metrics need it too."""
        if b"error" not in end and b"abort" not in end:
            return None
        events = reversed(_events(end))
        event = _data(next((each for each in events if each.strip() not in (b"", b"data: [DONE]")), b""))
        error = _error_in(event)
        return None if error is None else self.refusal(_code(error), event, ticket)


class Leg:
    """One request to an engine, for a client's request.

    Attributes:
        ticket: The name of the loan for decode engines that follow, which no error shows; empty if none does.
        asking: Its time-out.
        heard: Time at which the engine was asked, or last sent something.
        is_writing: True while the client has to read, so that the engine is not waited for.
    """

    asking: asyncio.Timeout | None = None
    is_waiting = is_writing = False

    def __init__(self, engine: Engine, path: str, headers: dict[str, str], ticket: str = "") -> None:
        self.engine, self.path, self.headers, self.ticket = engine, path, headers, ticket
        self.heard = time.monotonic()

    def hears(self) -> None:
        """Note that data came."""
        self.heard, self.is_waiting = time.monotonic(), False
        self.engine.heard = self.heard


class Attempt:
    """A connect, and the beats since it began, or since its engine was last heard."""

    __slots__ = ("beats", "began", "engine")

    def __init__(self, engine: Engine | None) -> None:
        self.engine, self.began, self.beats = engine, time.monotonic(), 0


class Connector(aiohttp.TCPConnector):
    """Connections to engines; `attempts` are those that are being made, each with its time-out."""

    def __init__(self) -> None:
        # vLLM closes connections after 5 idle seconds; reusing one at that moment would lose a request.
        super().__init__(limit=0, keepalive_timeout=3.0)
        self.attempts: dict[asyncio.Timeout, Attempt] = {}

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: Any,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - the name is aiohttp's
    ) -> aiohttp.connector.Connection:
        async with asyncio.timeout(None) as limit:
            self.attempts[limit] = Attempt(asked.get())
            try:
                return await super().connect(req, traces, timeout)
            finally:
                del self.attempts[limit]


class Engines:
    def __init__(self, sources: Sources, limits: Limits, metrics: Any) -> None:
        labels, gauge = ["role", "engine"], partial(prometheus.Gauge, registry=metrics)
        names = [*labels, "why"]
        self._faults = prometheus.Counter("pd_proxy_engine_faults", "Faults of engines.", names, registry=metrics)
        self._up = gauge("pd_proxy_engine_up", "1 if the engine is up.", labels)
        self._outstanding = gauge("pd_proxy_engine_outstanding", "Requests in flight at the engine.", labels)
        self._known: dict[tuple[str, str], Engine] = {}
        self._sources, self._limits, self._turn = sources, limits, itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beats = 0
        self._briefly = aiohttp.ClientTimeout(limits.connect_s)

    async def __aenter__(self) -> Engines:
        self._connector = Connector()
        self.session = aiohttp.ClientSession(connector=self._connector, cookie_jar=aiohttp.DummyCookieJar())
        self.spawn(self._beat())
        await self._refresh()
        self.spawn(self._go_on_refreshing())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.session.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _beat(self) -> None:
        """Count time, and end connects that take long, unless the engine was heard meanwhile and no other is better."""
        while True:
            await asyncio.sleep(self._limits.connect_s / BEATS)
            self._beats += 1
            for limit, attempt in list(self._connector.attempts.items()):
                engine, attempt.beats = attempt.engine, attempt.beats + 1
                if engine is None or attempt.beats < BEATS or limit.expired():
                    continue
                if not (is_heard := engine.heard >= attempt.began):
                    engine.late("connects have no answer in time")
                if not is_heard or (engine.trouble and self.is_up(engine.role, {engine.url})):
                    limit.reschedule(0)
                attempt.began, attempt.beats = time.monotonic(), 0

    async def _go_on_refreshing(self) -> None:
        while True:
            await asyncio.sleep(self._limits.refresh_s)
            try:
                await self._refresh()
            except Exception:
                log.exception("refresh_failed")

    async def _refresh(self) -> None:
        """Add new engines, and drop those that are no longer named."""
        named = await self._sources.look()
        new = {key: Engine(*key, self._faults, self._limits.connect_s) for key in named if key not in self._known}
        await asyncio.gather(*map(self._look, new.values()))
        self._known |= new
        for key, engine in self._known.items():
            if engine.is_named and key not in named:
                log.info("engine_removed", role=engine.role, engine=engine.url, outstanding=engine.outstanding)
            engine.is_named = key in named  # an engine that returns still has its earlier work
        for engine in new.values():
            self.spawn(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while engine.is_named or engine.working:
            await asyncio.sleep(self._limits.health_s)
            await self._look(engine)
        del self._known[engine.role, engine.url]
        for why in engine.faults:
            self._faults.remove(engine.role, engine.url, why)

    async def _look(self, engine: Engine) -> None:
        began, beats = time.monotonic(), self._beats
        try:
            async with self.session.get(f"{engine.url}/health", timeout=self._briefly) as answer:
                engine.heard = time.monotonic()
                engine.times_late = engine.unheard = 0
                engine.found("" if answer.status == 200 else f"its health is status {answer.status}")
        except Exception as exc:  # no error of one engine may end the watching
            number, is_late = getattr(exc, "errno", None), isinstance(exc, TimeoutError)
            if number in OURS or (is_late and self._beats - beats < BEATS // 2):
                return  # this says nothing of the engine
            if is_late:
                engine.late("its health check had no answer in time")
            else:
                engine.found(str(exc) or type(exc).__name__)
            if engine.heard < began and (is_late or number in NO_HOST):
                engine.not_heard()
            else:
                engine.unheard = 0

    def of(self, role: str) -> list[Engine]:
        return [engine for engine in self._known.values() if engine.role == role and engine.is_named]

    def states(self) -> dict[str, list[dict[str, Any]]]:
        self._up.clear()  # removed engines must not be reported
        self._outstanding.clear()
        told: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
        for it in (it for role in told for it in self.of(role)):
            seen = {"trouble": it.trouble, "outstanding": it.outstanding, "at_once": it.is_apt, "ahead": len(it.ahead)}
            told[it.role].append({"engine": it.url, **seen})
            self._up.labels(it.role, it.url).set(not it.trouble)
            self._outstanding.labels(it.role, it.url).set(it.outstanding)
        return told

    def is_up(self, role: str, avoid: Collection[str] = ()) -> bool:
        """Return True if an engine of this role is up, except those to avoid."""
        return any(not engine.trouble and engine.url not in avoid for engine in self.of(role))

    def up(self, role: str, lost: Collection[str] = ()) -> list[Engine]:
        """Return the engines that may be asked: those that are up, or else those that are only slow, unless `lost`."""
        engines = self.of(role)
        if found := [engine for engine in engines if not engine.trouble]:
            return found
        if found := [engine for engine in engines if engine.is_slow and engine.url not in lost]:
            return found
        which = "; ".join(f"{engine.url} {engine.trouble}" for engine in engines) or "none is known"
        raise Refused(503, f"no {role} engine is up: {which}", "no_engine")

    def best(self, role: str, avoid: Collection[str], lost: Collection[str] = ()) -> Engine:
        """Return the least late engine with the fewest requests; one to avoid only if there is no other."""

        def cost(engine: Engine) -> tuple[bool, int, int, int]:
            late = engine.times_late if engine.is_slow else 0
            return engine.url in avoid, late, len(engine.working), engine.last_turn

        return min(self.up(role, lost), key=cost)

    def choose(self, role: str, avoid: Collection[str], lost: Collection[str] = ()) -> Engine:
        """Return the best engine, and note that it had its turn."""
        chosen = self.best(role, avoid, lost)
        chosen.last_turn = next(self._turn)
        return chosen

    @contextlib.asynccontextmanager
    async def ask(
        self, leg: Leg, body: Any, headers: Mapping[str, str] | None = None, *, within: aiohttp.ClientTimeout = NO_LIMIT
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask an engine for an answer with status 200; leaving before the answer ends closes the connection."""
        engine, data = leg.engine, b"" if body is None else msgspec.json.encode(body)
        asking = self.session.request(
            "POST" if data else "GET",
            engine.url + leg.path,
            # A small body is sent at once; a large one in parts, so that others get their turn.
            data=io.BytesIO(data) if len(data) > SMALL else data or None,
            headers=leg.headers if headers is None else {**leg.headers, **headers},
            timeout=within,
            allow_redirects=False,
        )
        asked.set(engine)
        leg.asking = limit = asyncio.timeout(None)
        try:
            async with limit:
                engine.working[limit] = ""
                async with asking as answer:
                    engine.heard = time.monotonic()
                    if answer.status != 200:
                        data = await engine.whole(answer, MOST_ERROR)
                        raise engine.refusal(answer.status, data, leg.ticket, answer.headers.get("Retry-After", ""))
                    yield answer
        except aiohttp.ClientConnectorError as exc:
            if exc.errno in OURS:
                raise Refused(503, f"the router has no room for a connection: {exc.strerror}", "overloaded") from exc
            engine.found(text := f"cannot be reached: {exc}")
            raise engine.fault("unreachable", text) from exc
        except aiohttp.ConnectionTimeoutError as exc:
            raise engine.fault("unreachable", f"cannot be reached: {exc}") from exc
        except TimeoutError as exc:
            if engine.working[limit] == "silent":
                raise engine.fault("silent", "sends nothing, not even to health checks") from exc
            raise engine.fault("timeout", "did not answer in time") from exc
        except aiohttp.ClientError as exc:
            raise engine.fault("lost", f"was lost: {exc or type(exc).__name__}") from exc
        finally:
            engine.working.pop(limit, None)

    async def tell(self, engine: Engine, path: str, headers: Mapping[str, str], body: Any) -> None:
        """Send a request of the router's own. Neither its answer nor its failure matters."""
        asked.set(None)
        with contextlib.suppress(Exception):
            data = msgspec.json.encode(body)
            async with self.session.post(engine.url + path, data=data, headers=headers, timeout=self._briefly):
                pass
