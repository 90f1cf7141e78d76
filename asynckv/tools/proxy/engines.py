"""The engines behind the router: which are up, which has the least work, and what their answers mean.

Every fault of an engine becomes an `EngineFault` with one word, `why`:

- `unreachable`: no connection. The engine counts as down until its health is good again.
- `lost`: the connection broke before the answer was complete.
- `overloaded`: status 429 or 503.
- `kv_transfer_error`: a decode engine reports that it could not fetch the KV cache (vLLM reports `failed` instead).
- `failed`: any other status from 500 on, or an answer with the `finish_reason` "abort", because vLLM is about to end.
- `garbage`: an answer that does not fit this API.
- `silent`: two health checks in a row had no answer, and the engine sent nothing else: it was stopped, its loop is
  blocked, or its host is gone. An engine that refuses connections is not silent, because it may be finishing its work.
- `timeout`: no answer in time. Another engine might take as long again, so this is the last attempt.

An answer with status 4xx is the client's fault, and is passed on unchanged (`Refused`).

Engines come and go (`sources`). A new one is checked before it is used. One that is no longer named gets no new
requests, and is watched until it has finished its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import re
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
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
"""Health checks without a sign of life from an engine, after which its requests end as `silent`."""
NO_HOST = (errno.EHOSTUNREACH, errno.ENETUNREACH)
NEW = "not asked yet"
PREAMBLE = re.compile(
    rb'event: response\.(created|queued|in_progress)\s|data: .*"delta": ?{"role": ?"\w+", ?"content": ?""}'
)
"""Events of `/v1/responses` and of chats that vLLM sends before it begins to generate."""
BLANK = (b"\n\n", b"\n\r\n")
ABORTED = re.compile(rb'"finish_reason": ?"abort"')
MOST_UNREAD = 2**16  # bytes of a stream in which its first event is searched
log = structlog.get_logger()


class EngineFault(Refused):
    """Raised if an engine fails at a request; another engine may succeed."""

    def __init__(self, engine: Engine, why: str, text: str) -> None:
        super().__init__(STATUS.get(why, 502), f"{engine} {text}", why)
        self.engine, self.why, self.text = engine, why, text


def _error_in(data: bytes) -> dict[str, Any] | None:
    """Return the error in an answer or an event; None if it is not an error."""
    if ABORTED.search(data):
        return {"code": 500}
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        told = msgspec.json.decode(data, type=dict[str, Any])
        if told.get("type") == "error":  # of /v1/responses, as is "response.failed"
            return told
        inner = told.get("response")
        found = told.get("error") or (inner.get("error") if isinstance(inner, dict) else None)
        return found if isinstance(found, dict) else None
    return None


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))


def _code(error: Mapping[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


class Engine:
    """One engine, as the router knows it.

    Attributes:
        trouble: The reason why it is down; empty while it is up.
        unheard: Health checks in a row since it last sent anything, including a part of an answer.
        working: The time-outs of its current requests; they expire only if it falls silent.
        lends_once: True if its params are not asynckv's, so that only one of several answers to a request may read.
    """

    def __init__(self, role: str, url: str, faults: prometheus.Counter) -> None:
        self.role, self.url = role, url.rstrip("/")
        self.trouble = NEW
        self.unheard = self.last_turn = 0
        self.lends_once = self.is_late = self.is_named = False
        self.working: set[asyncio.Timeout] = set()
        self.faults: set[str] = set()
        self._faults = faults

    def __str__(self) -> str:
        return f"{self.role} engine {self.url}"

    @property
    def outstanding(self) -> int:
        return len(self.working)

    def found(self, trouble: str) -> None:
        if bool(trouble) != bool(self.trouble) or self.trouble == NEW:
            say, event = (log.warning, "engine_down") if trouble else (log.info, "engine_up")
            say(event, role=self.role, engine=self.url, trouble=trouble, outstanding=self.outstanding)
        self.trouble = trouble

    def not_heard(self) -> None:
        """Note a failed health check; requests end as `silent` if the engine sent nothing else since the last one."""
        if self.unheard >= UNHEARD:
            for limit in self.working:
                if not limit.expired():
                    limit.reschedule(0)

    def fault(self, why: str, text: str) -> EngineFault:
        if why == "unreachable":
            self.found(text)
        self.faults.add(why)
        self._faults.labels(self.role, self.url, why).inc()
        log.warning("engine_fault", role=self.role, engine=self.url, why=why, text=text)
        return EngineFault(self, why, text)

    def decoded(self, data: bytes) -> dict[str, Any]:
        if ABORTED.search(data):
            raise self.refusal(500, data)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise self.fault("garbage", f"did not answer with a JSON object: {exc}") from exc

    def refusal(self, status: int, data: bytes) -> Refused:
        """Return the error that an answer other than 200 means."""
        said, error = data[:1000].decode(errors="replace"), _error_in(data) or {}
        if 400 <= status < 500 and status != 429:
            reason = str(error.get("message", said))[:300]  # for the log; the client gets the answer itself
            return Refused(status, f"{self} refused the request with status {status}: {reason}", body=data)
        if error.get("type") == "kv_transfer_error":
            return self.fault("kv_transfer_error", f"could not fetch the KV cache: {said}")
        why = "overloaded" if status in (429, 503) else "failed" if status >= 500 else "garbage"
        return self.fault(why, f"answered with status {status}: {said}")

    async def first_event(self, answer: aiohttp.ClientResponse) -> bytes:
        """Read at least the first event of a stream, because vLLM sends status 200 before it knows of an error."""
        found, event = b"", b""
        if answer.content_type == "text/event-stream":
            while not event and len(found) < MOST_UNREAD and (piece := await answer.content.readany()):
                found += piece
                *whole, rest = found.replace(*BLANK[::-1]).split(BLANK[0])
                event = next((each for each in whole if not PREAMBLE.match(each)), b"")
            event = event or (b"" if PREAMBLE.match(rest) else rest) if found else b""
        if not event and len(found) < MOST_UNREAD:
            raise self.fault("garbage", f"sent no event, but {answer.content_type}")
        if error := _error_in(_data(event)):
            raise self.refusal(_code(error), _data(event))
        return found

    def failed_at_end(self, end: bytes) -> Refused | None:
        """Return the error that ended a stream, if any. The client has it, but log and metrics need it too."""
        events = reversed(end.replace(*BLANK[::-1]).split(BLANK[0]))
        event = _data(next((each for each in events if each.strip() not in (b"", b"data: [DONE]")), b""))
        error = _error_in(event)
        return None if error is None else self.refusal(_code(error), event)


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

    async def __aenter__(self) -> Engines:
        # vLLM closes connections after 5 idle seconds; reusing one at that moment would lose a request.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        self.session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        await self._refresh()
        self._spawn(self._go_on_refreshing())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.session.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        new = {key: Engine(*key, self._faults) for key in named if key not in self._known}
        await asyncio.gather(*map(self._look, new.values()))
        self._known |= new
        for key, engine in self._known.items():
            if engine.is_named and key not in named:
                log.info("engine_removed", role=engine.role, engine=engine.url, outstanding=engine.outstanding)
            engine.is_named = key in named  # an engine that returns still has its earlier work
        for engine in new.values():
            self._spawn(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while engine.is_named or engine.working:
            await asyncio.sleep(self._limits.health_s)
            await self._look(engine)
        del self._known[engine.role, engine.url]
        for why in engine.faults:
            self._faults.remove(engine.role, engine.url, why)

    async def _look(self, engine: Engine) -> None:
        engine.unheard += 1
        try:
            timeout = aiohttp.ClientTimeout(self._limits.connect_s)
            async with self.session.get(f"{engine.url}/health", timeout=timeout) as answer:
                engine.unheard = 0
                engine.found("" if answer.status == 200 else f"its health is status {answer.status}")
                engine.is_late = False
        except Exception as exc:  # no error of one engine may end the watching
            was_late, engine.is_late = engine.is_late, isinstance(exc, TimeoutError)
            if was_late or engine.trouble or not engine.is_late:  # a single late answer may be chance
                engine.found(str(exc) or "its health check had no answer in time")
            if engine.is_late or getattr(exc, "errno", None) in NO_HOST:
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
            told[it.role].append({"engine": it.url, "trouble": it.trouble, "outstanding": it.outstanding})
            self._up.labels(it.role, it.url).set(not it.trouble)
            self._outstanding.labels(it.role, it.url).set(it.outstanding)
        return told

    def is_up(self, role: str, avoid: Collection[str] = ()) -> bool:
        """Return True if an engine of this role is up, except those to avoid."""
        return any(not engine.trouble and engine.url not in avoid for engine in self.of(role))

    def up(self, role: str) -> list[Engine]:
        if found := [engine for engine in self.of(role) if not engine.trouble]:
            return found
        which = "; ".join(f"{engine.url} {engine.trouble}" for engine in self.of(role)) or "none is known"
        raise Refused(503, f"no {role} engine is up: {which}", "no_engine")

    def choose(self, role: str, avoid: Collection[str]) -> Engine:
        """Return the living engine with the fewest requests; one to avoid only if there is no other."""
        chosen = min(self.up(role), key=lambda engine: (engine.url in avoid, engine.outstanding, engine.last_turn))
        chosen.last_turn = next(self._turn)
        return chosen

    @contextlib.asynccontextmanager
    async def ask(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: Any, **within: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask an engine for an answer with status 200; leaving before the answer ends closes the connection."""
        timeout = aiohttp.ClientTimeout(**within, sock_connect=self._limits.connect_s)
        url = engine.url + path
        method, data = ("GET", None) if body is None else ("POST", io.BytesIO(msgspec.json.encode(body)))
        asked = self.session.request(method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                engine.working.add(limit)
                async with asked as answer:
                    engine.unheard = 0
                    if answer.status != 200:
                        raise engine.refusal(answer.status, await answer.read())
                    yield answer
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise engine.fault("unreachable", f"cannot be reached: {exc}") from exc
        except TimeoutError as exc:
            if limit.expired():
                raise engine.fault("silent", "sends nothing, not even to health checks") from exc
            raise engine.fault("timeout", "did not answer in time") from exc
        except aiohttp.ClientError as exc:
            raise engine.fault("lost", f"was lost: {exc or type(exc).__name__}") from exc
        finally:
            engine.working.discard(limit)
