"""The router: what engines are asked, and what clients get when they fail, are slow, or are gone.

The engines of most tests do what a test says, behind real sockets. The slow tests at the end have tiny engines in
processes of their own, with real KV caches between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from asynckv.errors import ConfigError
from asynckv.tools import cli
from asynckv.tools.diagnose.ask import ask_all, targets
from asynckv.tools.proxy import router as router_module
from asynckv.tools.proxy import sources as sources_module
from asynckv.tools.proxy.engines import UNHEARD
from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.router import CAUSES, GRACE_S, RANK, RESPONSES, Router
from asynckv.tools.proxy.server import COMPLETIONS, serving, told_to_stop
from asynckv.tools.proxy.sources import Sources
from docs.examples.service import pd_service
from tests.engines import cancel

QUICK = Limits(connect_s=5, prefill_s=30, silence_s=30, health_s=0.01, refresh_s=0.01)
IMPATIENT = {
    "prefill": Limits(connect_s=5, prefill_s=0.2, silence_s=30, health_s=5),
    "decode": Limits(connect_s=5, prefill_s=30, silence_s=0.2, health_s=5),
}
HEAR_S = 30.0
SLACK_S = 10.0
"""What a busy machine may add to a time; far less than `HEAR_S`."""
START_S = 300.0
"""Processes import much, and a busy machine takes long for it."""
PARAMS = {"do_remote_prefill": True, "remote": [1, 2, 3]}
ASK = {"prompt": "one two", "max_tokens": 9}

Act = Callable[["Fake", web.Request], Awaitable[web.StreamResponse]]


# -- engines that do what they are told ------------------------------------------------------------------------


class Fake:
    """An engine that does what a test says.

    Attributes:
        acts: What it does with its next requests, the last one with all that follow.
        asked: Bodies and headers of what it was asked.
        left: Set when one of its requests was cancelled; `busy` when one has begun.
        health: The status of its health; without one it does not answer.
    """

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.asked: list[tuple[dict[str, Any], Mapping[str, str]]] = []
        self.busy, self.left, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.hears = asyncio.Event()
        self.hears.set()
        self.health: int | None = 200
        self.url = ""

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((await request.json(), request.headers.copy()))
        self.busy.set()
        act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        try:
            return await act(self, request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise

    async def _health(self, request: web.Request) -> web.Response:
        if self.health is None:
            await asyncio.Event().wait()
        return web.Response(status=self.health or 500)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": ["tiny"]})

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_routes([web.post(path, self._complete) for path in (*COMPLETIONS, RESPONSES)])
        return app

    @contextlib.asynccontextmanager
    async def running(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Fake]:
        async with serving(self._app(), host, port, drain_s=0.1) as self.url:
            yield self

    @contextlib.asynccontextmanager
    async def accepting(self) -> AsyncIterator[Fake]:
        """Run behind a socket that takes no connection while `hears` is not set: the kernel drops further attempts."""

        async def closes(request: web.Request, response: web.StreamResponse) -> None:
            response.force_close()  # so that the router has to connect anew

        app = self._app()
        app.on_response_prepare.append(closes)
        loop, runner = asyncio.get_running_loop(), web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()

        async def accept() -> None:
            while True:
                made, _ = await loop.sock_accept(listener)
                await self.hears.wait()
                await loop.connect_accepted_socket(runner.server, made)  # type: ignore[arg-type]

        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            listener.setblocking(False)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            accepting = asyncio.create_task(accept())
            try:
                yield self
            finally:
                accepting.cancel()
                await runner.cleanup()

    @contextlib.asynccontextmanager
    async def deaf(self) -> AsyncIterator[None]:
        """Fill the queue of `accepting`, so that connects get no answer."""
        self.hears.clear()
        port = int(self.url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            for _ in range(3):  # one is accepted and waits, one fits into the queue
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                await asyncio.sleep(0)
            yield
        self.hears.set()


def says(value: Any, status: int = 200, kind: str = "application/json", **headers: str) -> Act:
    """Answer with JSON, or with bytes as they are."""

    async def act(fake: Fake, request: web.Request) -> web.StreamResponse:
        data = value if isinstance(value, bytes) else msgspec.json.encode(value)
        return web.Response(body=data, status=status, content_type=kind, headers=headers)

    return act


def says_events(events: bytes) -> Act:
    return says(events, kind="text/event-stream")


def streams(*pieces: bytes, is_cut: bool = False, and_then: bytes = b"") -> Act:
    """Answer with a stream, without end if `and_then`; each piece but the first waits until the test says so."""

    async def act(fake: Fake, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in itertools.chain(pieces, itertools.cycle([and_then] if and_then else [])):
            await response.write(piece)
            await asyncio.wait_for(fake.go_on.wait(), HEAR_S)
            fake.go_on.clear()
        if is_cut and request.transport is not None:
            request.transport.abort()
        return response

    return act


def endless(head: bytes, more: bytes = b"x" * 2**20, status: int = 200, kind: str = "application/json") -> Act:
    """Answer without end."""

    async def act(fake: Fake, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": kind})
        await response.prepare(request)
        await response.write(head)
        while True:
            await response.write(more)

    return act


async def hangs(fake: Fake, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def dies(fake: Fake, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.Event().wait()
    raise AssertionError


async def no_http(fake: Fake, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    await asyncio.Event().wait()
    raise AssertionError


def error(kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": "no luck " * 500, "type": kind, "param": None, "code": code}}


def prefills(name: str = "a") -> Fake:
    return Fake(says({"choices": [], "kv_transfer_params": {**PARAMS, "of": name}}))


async def lends(fake: Fake, request: web.Request) -> web.StreamResponse:
    """Lend by asynckv's params, each of another number, when the test says so."""
    number = len(fake.asked)
    if number in lent(fake):
        await asyncio.wait_for(fake.hears.wait(), HEAR_S)
    params = {"do_remote_prefill": True, "asynckv": {"number": number}}
    return web.json_response({"choices": [], "kv_transfer_params": params if number in lent(fake) else None})


def lent(fake: Fake) -> list[int]:
    """The numbers of the loans of an engine that `lends`."""
    return [n for n, (body, _) in enumerate(fake.asked, 1) if body["kv_transfer_params"].get("do_remote_decode")]


def given_back(fake: Fake) -> list[int]:
    told = [body["kv_transfer_params"] for body, _ in fake.asked]
    return sorted(it["asynckv"]["number"] for it in told if "asynckv" in it and it["do_remote_prefill"] is None)


def read_by(fake: Fake) -> list[int]:
    """The numbers of the loans that a decode engine was asked to read."""
    return [body["kv_transfer_params"]["asynckv"]["number"] for body, _ in fake.asked]


def decodes() -> Fake:
    return Fake(says({"choices": [{"text": "three"}]}))


Posted = contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]


class Client:
    """Talks to a router."""

    def __init__(self, url: str, session: aiohttp.ClientSession, router: Router | None = None) -> None:
        self.url, self.session, self._router = url, session, router

    @property
    def router(self) -> Router:
        assert self._router is not None, "it runs elsewhere"
        return self._router

    async def ask(self, body: Any = ASK, path: str = COMPLETIONS[0], **more: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.session.post(self.url + path, data=io.BytesIO(data), **more) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    def post(self, body: Any = ASK, path: str = COMPLETIONS[0], **more: Any) -> Posted:
        return self.session.post(self.url + path, json=body, **more)

    def streaming(self, **body: Any) -> Posted:
        return self.post({**ASK, "stream": True, **body})

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def ready(self) -> tuple[int, dict[str, Any]]:
        async with self.session.get(f"{self.url}/health/ready") as answer:
            found: dict[str, Any] = await answer.json()
            return answer.status, found

    def fall_silent(self, fake: Fake) -> None:
        """As if the router had looked at its health in vain, for the last time."""
        for engine in self.router.engines._known.values():
            if engine.url == fake.url:
                engine.unheard = UNHEARD
                engine.found("did not say in time how it is", is_slow=True)
                engine.not_heard()

    async def until_given_back(self, fake: Fake) -> None:
        async def are_back() -> bool:
            await self.ready()
            return given_back(fake) == lent(fake)

        await self.until(are_back)

    async def until(self, is_so: Callable[[], Awaitable[bool]]) -> None:
        """Ask again and again, until it is so or too late."""
        async with asyncio.timeout(HEAR_S):
            while not await is_so():
                pass

    async def until_seen(self, is_so: Callable[[], object]) -> None:
        """Ask for the readiness, until something else is so or it is too late."""
        async with asyncio.timeout(HEAR_S):
            while not is_so():
                await self.ready()

    async def until_ready(self, status: int = 200) -> None:
        async with asyncio.timeout(HEAR_S):
            while (await self.ready())[0] != status:
                pass

    async def until_counted(self, name: str, value: int = 1) -> None:
        """Ask for the metrics until one has a value."""
        async with asyncio.timeout(HEAR_S):
            while (await self.metrics()).get(name) != value:
                pass


@contextlib.asynccontextmanager
async def routed(
    prefill: Sequence[Fake | str],
    decode: Sequence[Fake | str],
    limits: Limits = QUICK,
    *,
    file: Path | None = None,
    is_computed: bool = True,
    warn_s: float = 10.0,
    **more: Any,
) -> AsyncIterator[Client]:
    """A router before engines, fakes or URLs."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in (*prefill, *decode):
            if isinstance(fake, Fake):
                await stack.enter_async_context(fake.running())
        urls = [[x.url if isinstance(x, Fake) else x for x in side] for side in (prefill, decode)]
        limits = replace(limits, **more)
        router = Router(urls[0], urls[1], limits, file=file, is_computed=is_computed, warn_s=warn_s)
        url = await stack.enter_async_context(serving(router.app(), "127.0.0.1", 0, GRACE_S, limits))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(HEAR_S)))
        yield Client(url, session, router)


NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there."""


# -- what engines are asked ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMPLETIONS)
async def test_prefill_is_asked_for_one_token_and_decode_for_the_rest(path: str) -> None:
    prefill, decode = prefills(), Fake(says_events(b"data: {}\n\n"))
    theirs = {
        **ASK,
        "stream": True,
        "model": "m",
        "max_completion_tokens": 9,
        "min_tokens": 4,
        "stream_options": {"include_usage": True},
        "kv_transfer_params": {"remote_host": "evil"},
        "ec_transfer_params": {"remote_host": "evil"},
        "vllm_xargs": {"a": 1, "kv_transfer_params": {"x": 1}, "ec_transfer_params": {}},
    }
    headers = {"X-Request-Id": "id-1", "Authorization": "Bearer key", "Cookie": "none of theirs"}
    async with routed([prefill], [decode]) as client, client.post(theirs, path, headers=headers) as answer:
        assert (answer.status, await answer.read()) == (200, b"data: {}\n\n")
    del theirs["ec_transfer_params"]
    theirs["vllm_xargs"] = {"a": 1}
    ((first, told),) = prefill.asked
    assert first == {
        "vllm_xargs": {"a": 1},
        "prompt": "one two",
        "model": "m",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert (told["X-Request-Id"], told["Authorization"], "Cookie" in told) == ("id-1", "Bearer key", False)
    ((second, told),) = decode.asked
    assert second == {**theirs, "kv_transfer_params": {**PARAMS, "of": "a"}}
    assert (told["X-Request-Id"], told["Authorization"]) == ("id-1", "Bearer key")


async def test_models_are_those_of_the_decode_engines() -> None:
    async with routed([prefills()], [decodes()]) as client, client.session.get(f"{client.url}/v1/models") as answer:
        assert await answer.json() == {"data": ["tiny"]}


async def test_without_params_decode_computes_the_prompt_itself() -> None:
    prefill, decode = Fake(says({"choices": [], "kv_transfer_params": None})), decodes()
    async with routed([prefill], [decode]) as client:
        assert (await client.ask({**ASK, "kv_transfer_params": {"remote_host": "evil"}}))[0] == 200
    assert decode.asked[0][0] == ASK


@pytest.mark.parametrize(("given", "is_kept"), [("good-1", True), ("x" * 300, False), ("sch\u00f6n", False)])
async def test_request_ids_are_passed_on_or_made(given: str, is_kept: bool) -> None:
    prefill, decode = prefills(), decodes()
    async with routed([prefill], [decode]) as client, client.post(headers={"X-Request-Id": given}) as answer:
        name = answer.headers["X-Request-Id"]
        assert (name == given) is is_kept
    assert prefill.asked[0][1]["X-Request-Id"] == decode.asked[0][1]["X-Request-Id"] == name


async def test_streams_pass_piece_by_piece_unchanged() -> None:
    pieces = [b'data: {"choices": []}\n\n', b'data: {"\xc3', b'\xbc"]}\n\ndata: {}\r\n\r\n', b"data: [DONE]\n\n"]
    decode = Fake(streams(*pieces))
    async with routed([prefills()], [decode]) as client, client.streaming() as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        # The next piece is sent only when this one has arrived. Half an event waits for its other half.
        for piece in (pieces[0], b"", pieces[1] + pieces[2], pieces[3]):
            assert await answer.content.readexactly(len(piece)) == piece
            while decode.go_on.is_set():
                await client.ready()
            decode.go_on.set()
        assert await answer.content.read() == b""


async def test_the_engine_with_the_least_to_do_is_chosen() -> None:
    busy, idle = Fake(hangs), prefills("idle")
    async with routed([busy, idle], [decodes()]) as client:
        first = asyncio.create_task(client.ask())
        await asyncio.wait_for(busy.busy.wait(), HEAR_S)
        for _ in range(3):
            assert (await client.ask())[0] == 200
        assert (len(busy.asked), len(idle.asked)) == (1, 3)
        await cancel(first)


# -- engines that fail ------------------------------------------------------------------------------------------


async def test_what_an_engine_refuses_is_passed_on_as_it_said_it() -> None:
    refusal = error("BadRequestError", 400)
    for prefill, decode in ((Fake(says(refusal, 400)), decodes()), (prefills(), Fake(says(refusal, 400)))):
        async with routed([prefill], [decode]) as client:
            with capture_logs() as events:
                assert await client.ask() == (400, refusal)
        assert len(prefill.asked) == 1
        (ended,) = [event for event in events if event["event"] == "request"]
        assert "refused the request with status 400: no luck no luck" in ended["error"]


@pytest.mark.parametrize(
    "act",
    [says(b"busy", 503), says(b"oh", 500), dies, no_http, says(b"<html>"), says([1]), says(b"", 302)],
    ids=["503", "500", "dies", "no_http", "html", "list", "302"],
)
async def test_another_prefill_engine_is_asked_when_one_fails(act: Act) -> None:
    bad, good, decode = Fake(act), prefills("good"), decodes()
    async with routed([bad, good], [decode]) as client:
        assert (await client.ask())[0] == 200
        assert (len(bad.asked), len(good.asked), len(decode.asked)) == (1, 1, 1)
    assert decode.asked[0][0]["kv_transfer_params"]["of"] == "good"


EVENT = b"data: " + json.dumps(error("InternalServerError", 500)).encode() + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "act",
    [says(b"oh", 500), dies, no_http, says(b"<html>"), says(b""), says_events(EVENT)],
    ids=["500", "dies", "no_http", "html", "empty", "error_event"],
)
async def test_when_decode_fails_the_prompt_is_prefilled_anew_for_another(act: Act, is_stream: bool) -> None:
    bad, prefill = Fake(act), prefills()
    good = Fake(says_events(b": so be it\n\ndata: {}\n\n")) if is_stream else decodes()
    async with routed([prefill], [bad, good]) as client:
        async with client.streaming(stream=is_stream) as answer:
            assert answer.status == 200
            assert (await answer.read()).startswith(b": so be it" if is_stream else b'{"choices"')
        # Params are good for one use, and the first decode engine may have used them.
        assert (len(prefill.asked), len(bad.asked), len(good.asked)) == (2, 1, 1)


@pytest.mark.parametrize(
    "act",
    [
        says(error("kv_transfer_error", 503), 503),
        says_events(b"data: " + json.dumps(error("kv_transfer_error", 503)).encode()),
    ],
    ids=["status", "event"],
)
async def test_a_lost_kv_cache_is_computed_by_another_prefill_engine(act: Act) -> None:
    prefill = [prefills("a"), prefills("b")]
    decode = Fake(act, says_events(b": so be it\n\ndata: {}\n\n"))
    async with routed(prefill, [decode, NOWHERE]) as client, client.streaming() as answer:
        assert (answer.status, await answer.read()) == (200, b": so be it\n\ndata: {}\n\n")
    assert [len(it.asked) for it in prefill] == [1, 1]
    assert [body["kv_transfer_params"]["of"] for body, _ in decode.asked] == ["a", "b"]


async def test_params_outlive_a_decode_engine_that_cannot_be_reached() -> None:
    prefill, gone, good = prefills(), decodes(), decodes()
    async with contextlib.AsyncExitStack() as stack:
        async with gone.running():
            client = await stack.enter_async_context(routed([prefill], [gone.url, good], RARELY))
        assert (await client.ask())[0] == 200
        assert (len(prefill.asked), len(gone.asked), len(good.asked)) == (1, 0, 1)
        # It is known to be down now, and not tried again before its health says otherwise.
        assert "cannot be reached" in (await client.ready())[1]["decode"][0]["trouble"]


async def test_an_engine_without_room_gets_a_request_once_and_the_client_hears_when_to_come_back() -> None:
    prefill, decode = Fake(lends), Fake(says(b"full", 429, **{"Retry-After": "17"}))
    async with routed([prefill], [decode]) as client:

        async def ask() -> tuple[int, str, str]:
            async with client.post() as answer:
                return answer.status, answer.headers["Retry-After"], (await answer.json())["error"]["type"]

        assert await asyncio.gather(*(ask() for _ in range(10))) == [(503, "17", "overloaded")] * 10
        await client.until_given_back(prefill)
    assert (len(lent(prefill)), len(decode.asked)) == (10, 10)
    short = next(body for body, _ in prefill.asked if body["kv_transfer_params"].get("asynckv"))
    assert {**short, "kv_transfer_params": None} == {"prompt": "x", "max_tokens": 1, "kv_transfer_params": None}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_second_decode_engine_gets_the_params_that_the_first_had_no_room_for(status: int) -> None:
    prefill, full, good = Fake(lends), Fake(says(b"full", status)), decodes()
    async with routed([prefill], [full, good], attempts=1) as client:
        assert [(await client.ask())[0] for _ in range(10)] == [200] * 10
    assert lent(prefill) == read_by(good) == list(range(1, 11))
    assert full.asked


async def test_params_that_were_used_up_by_an_engine_that_then_had_no_room_are_made_anew() -> None:
    prefill, full = Fake(lends), Fake(says(b"full", 503))
    good = Fake(says(error("kv_transfer_error", 503), 503), says({"choices": []}))
    async with routed([prefill], [full, good]) as client:
        assert (await client.ask())[0] == 200
    assert len(full.asked) == 1
    assert lent(prefill) == read_by(good)
    assert len(lent(prefill)) == 2


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("0", "0"),
        ("99999", "99999"),
        ("Wed, 21 Oct 2065 07:28:00 GMT", "Wed, 21 Oct 2065 07:28:00 GMT"),
        ("100000", "1"),
        ("-1", "1"),
        ("1.5", "1"),
        ("\u0661", "1"),
        ("Wed, 99 Oct 2065 07:28:00 GMT", "1"),
        ("x" * 4000, "1"),
    ],
)
async def test_only_a_reasonable_retry_after_is_passed_on(given: str, passed: str) -> None:
    prefill, decode = (Fake(says(b"full", 503, **{"Retry-After": after})) for after in ("9", given))
    async with routed([prefill], [decode]) as client, client.post() as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, passed)


@pytest.mark.parametrize("path", [*COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_burst_of_clients_that_leaves_gives_its_loans_back(
    at: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "LATE_S", HEAR_S)
    prefill, decode = Fake(lends), Fake(hangs)
    at_work = decode if at == "decode" else prefill
    if at == "prefill":
        prefill.hears.clear()
    async with routed([prefill], [decode]) as client:
        asked = [asyncio.create_task(client.ask(path=path)) for _ in range(20)]
        await client.until_seen(lambda: len(at_work.asked) == 20)
        for task in asked:
            task.cancel()
        await client.until_counted("pd_proxy_in_flight", 0)
        prefill.hears.set()
        await client.until_given_back(prefill)
        assert len(lent(prefill)) == 20


async def test_none_up_is_said_in_json() -> None:
    prefill = prefills()
    for engines in (([NOWHERE, f"{NOWHERE}9"], [decodes()], "prefill"), ([prefill], [NOWHERE], "decode")):
        async with routed(engines[0], engines[1], is_computed=False) as client:
            async with client.post() as answer:
                assert (answer.status, answer.content_type) == (503, "application/json")
                assert answer.headers["Retry-After"] == "1"
                told = (await answer.json())["error"]
            assert told["code"] == 503
            assert told["type"] == "no_engine"
            assert f"no {engines[2]} engine is up: {NOWHERE} " in told["message"]
            assert (await client.ready())[0] == 503
    assert not prefill.asked  # it would be for nothing


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("act", "status", "kind"),
    [
        (says(b"busy", 429), 503, "overloaded"),
        (says(b"oh", 500), 502, "failed"),
        (dies, 502, "lost"),
        (says(b"\x00"), 502, "garbage"),
        (hangs, 504, "timeout"),
    ],
    ids=["overloaded", "failed", "lost", "garbage", "timeout"],
)
async def test_after_some_attempts_the_client_hears_why(role: str, act: Act, status: int, kind: str) -> None:
    bad = Fake(act)
    sides = ([bad], [decodes()]) if role == "prefill" else ([prefills()], [bad])
    limits = IMPATIENT[role] if act is hangs else QUICK
    async with routed(*sides, limits, attempts=2, is_computed=False) as client:
        # An answer in one piece may take its time.
        found, told = await client.ask({**ASK, "stream": kind == "timeout"})
        assert (found, told["error"]["type"], told["error"]["code"]) == (status, kind, status)
        assert f"{role} engine {bad.url}" in told["error"]["message"]
        # A request that has let one engine's time pass has none for another, and an engine without room gets none soon.
        assert len(bad.asked) == (1 if kind in ("timeout", "overloaded") else 2)
        metrics = await client.metrics()
        name = f'pd_proxy_engine_faults_total{{engine="{bad.url}",role="{role}",why="{kind}"}}'
        assert metrics[name] == len(bad.asked)


@pytest.mark.parametrize("is_cut", [True, False], ids=["lost", "timeout"])
async def test_a_stream_that_is_cut_short_ends_in_an_error(is_cut: bool) -> None:
    head = b'data: {"choices": []}\n\ndata: {"ch'
    decode = Fake(streams(head, is_cut=is_cut))
    async with routed([prefills()], [decode], QUICK if is_cut else IMPATIENT["decode"]) as client:
        with capture_logs() as events:
            async with client.streaming() as answer:
                assert await answer.content.readuntil(b"\n\n") == head[:-10]
                if is_cut:
                    decode.go_on.set()
                rest = await answer.content.read()
    told = json.loads(rest.removeprefix(b"data: "))["error"]  # instead of the half event
    assert (told["type"], told["code"]) == (("lost", 502) if is_cut else ("timeout", 504))
    (ended,) = [event for event in events if event["event"] == "request"]
    assert (ended["status"], ended["error"]) == (told["code"], told["message"])


ABORTED = {"choices": [{"text": "", "delta": {}, "finish_reason": "abort"}]}
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_an_engine_that_is_about_to_end_aborts_and_another_is_asked(is_stream: bool) -> None:
    aborts, event = says(ABORTED), says_events(ROLE + b"data: " + json.dumps(ABORTED).encode() + b"\n\n")
    good = says_events(ROLE + b'data: {"choices"}\n\n') if is_stream else says({"choices": []})
    async with routed([Fake(aborts), prefills()], [Fake(event if is_stream else aborts), Fake(good)]) as client:
        async with client.streaming(stream=is_stream) as answer:
            assert (answer.status, b"abort" in await answer.read()) == (200, False)
        assert (await client.metrics())['pd_proxy_retries_total{why="failed"}'] >= 2


async def test_engines_that_are_not_reached_use_up_no_attempt() -> None:
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as life:
        gone = [await life.enter_async_context(prefills().running()) for _ in range(4)]
        good, urls = decodes(), [it.url for it in gone]
        client = await stack.enter_async_context(routed(urls[:3], [urls[3], good], RARELY, attempts=1))
        await life.aclose()
        assert (await client.ask())[0] == 200


@pytest.mark.slow
async def test_one_late_answer_does_not_take_an_engine_out() -> None:
    decode = decodes()
    limits = Limits(connect_s=0.3, prefill_s=30, silence_s=30, health_s=0.3)
    async with routed([prefills()], [decode], limits) as client:
        engine = client.router.engines.of("decode")[0]
        decode.health = None

        async def is_down() -> bool:
            seen.append((engine.times_late > 0, bool(engine.trouble)))
            await client.ready()
            return bool(engine.trouble)

        seen: list[tuple[bool, bool]] = []
        await client.until(is_down)
        assert list(dict.fromkeys(seen)) in (
            [(False, False), (True, False)],
            [(False, False), (True, False), (True, True)],
        )


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    decode = Fake(says_events(b"data: {}\n\n" * 2_000_000))
    said = msgspec.json.encode({**ASK, "stream": True})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(said)
    async with routed([prefills()], [decode], idle_s=0.5) as client, connection(client, head + said):
        await client.until_counted('pd_proxy_requests_total{path="/v1/completions",status="499"}')


async def test_an_engine_that_comes_back_still_has_its_work() -> None:
    decode = Fake(hangs)
    async with routed([prefills()], [decode], RARELY) as client:
        engines, named = client.router.engines, client.router.engines._sources._given
        asked = asyncio.create_task(client.ask())
        await asyncio.wait_for(decode.busy.wait(), HEAR_S)
        (engine,) = engines.of("decode")
        del named["decode", decode.url]
        await engines._refresh()
        assert engines.of("decode") == []
        named["decode", decode.url] = None
        await engines._refresh()
        assert (engines.of("decode"), engine.outstanding) == ([engine], 1)
        await cancel(asked)


async def test_cookies_of_engines_are_not_sent_to_others() -> None:
    async def sets_cookie(fake: Fake, request: web.Request) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": PARAMS}, headers={"Set-Cookie": "a=b"})

    prefill = Fake(sets_cookie)
    async with routed([prefill], [decodes()]) as client:
        client.session.cookie_jar.clear()
        for _ in range(2):
            assert (await client.ask())[0] == 200
    assert "Cookie" not in prefill.asked[1][1]


# -- engines that fall silent --------------------------------------------------------------------------------

RARELY = Limits(connect_s=5, prefill_s=30, silence_s=30, health_s=1000)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_client_of_an_engine_that_falls_silent_is_served_by_another(at: str, is_stream: bool) -> None:
    silent = Fake(hangs)
    prefill = [silent, prefills("b")] if at == "prefill" else [prefills("a")]
    says_it = says_events(b": so be it\n\ndata: {}\n\n") if is_stream else says({"choices": []})
    decode = [Fake(says_it)] if at == "prefill" else [silent, Fake(says_it)]
    async with routed(prefill, decode, RARELY) as client:
        with capture_logs() as events:
            asked = asyncio.create_task(
                client.session.post(client.url + COMPLETIONS[0], json=ASK | {"stream": is_stream})
            )
            await asyncio.wait_for(silent.busy.wait(), HEAR_S)
            client.fall_silent(silent)
            async with await asked as answer:
                assert answer.status == 200
                assert (await answer.read()).startswith(b": so be it" if is_stream else b'{"choices"')
        # It is told, so that it gives back what it holds when it goes on.
        await asyncio.wait_for(silent.left.wait(), HEAR_S)
        # Params are good for one use, and a silent decode engine may have used them.
        assert len(prefill[-1].asked) == (1 if at == "prefill" else 2)
        assert (await client.metrics())['pd_proxy_retries_total{why="silent"}'] == 1
    (down,) = [event for event in events if event["event"] == "engine_down"]
    assert (down["engine"], down["outstanding"]) == (silent.url, 1)
    (ended,) = [event for event in events if event["event"] == "request"]
    assert (ended["status"], ended["attempts"], "error" in ended) == (200, 2, False)


async def test_a_stream_of_an_engine_that_falls_silent_breaks_and_no_other_goes_on_with_it() -> None:
    head = b'data: {"choices": []}\n\ndata: {"ch'
    silent, other = Fake(streams(head)), Fake(streams(b"data: {}\n\n"))
    async with routed([prefills()], [silent, other], RARELY) as client:
        with capture_logs() as events:
            async with client.streaming() as answer:
                assert await answer.content.readuntil(b"\n\n") == head[:-10]
                client.fall_silent(silent)
                told = json.loads((await answer.content.read()).removeprefix(b"data: "))["error"]
        assert (told["type"], told["code"]) == ("silent", 504)
        await asyncio.wait_for(silent.left.wait(), HEAR_S)
        assert not other.asked
        assert (await client.metrics())['pd_proxy_requests_total{path="/v1/completions",status="504"}'] == 1
    (ended,) = [event for event in events if event["event"] == "request"]
    assert (ended["status"], ended["error"]) == (504, told["message"])


async def test_without_another_engine_the_client_hears_it_at_once() -> None:
    silent = Fake(hangs)
    async with routed([prefills()], [silent], RARELY) as client:
        asked = asyncio.create_task(client.ask())
        await asyncio.wait_for(silent.busy.wait(), HEAR_S)
        client.fall_silent(silent)
        status, told = await asked
        assert (status, told["error"]["type"]) == (503, "no_engine")


@pytest.mark.slow
async def test_only_an_engine_that_sends_nothing_at_all_is_given_up() -> None:
    """Two looks of a second in vain, while one of three engines goes on with its stream and one answers 503."""
    head = b"data: {}\n\n"
    stopped, busy, ending = (Fake(streams(head, *[head] * 99)) for _ in range(3))
    limits = Limits(connect_s=1, prefill_s=30, silence_s=30, health_s=0.05)
    async with routed([prefills()], [stopped, busy, ending], limits) as client, contextlib.AsyncExitStack() as stack:
        answers = [await stack.enter_async_context(client.streaming()) for _ in range(3)]
        for answer in answers:
            assert await answer.content.readexactly(len(head)) == head
        stopped.health, busy.health, ending.health = None, None, 503
        broken = asyncio.create_task(answers[0].content.read())
        async with asyncio.timeout(HEAR_S):
            while not broken.done():
                busy.go_on.set()
                assert await answers[1].content.readexactly(len(head)) == head
                await asyncio.wait([broken], timeout=0.1)
        assert json.loads((await broken).removeprefix(b"data: "))["error"]["type"] == "silent"
        troubles = [it["trouble"] for it in (await client.ready())[1]["decode"]]
        assert all(troubles)
        for fake, answer in ((busy, answers[1]), (ending, answers[2])):
            fake.go_on.set()
            assert await answer.content.readexactly(len(head)) == head


async def test_a_request_that_has_had_nothing_for_long_is_named() -> None:
    slow = Fake(hangs)
    async with routed([prefills()], [slow], RARELY, warn_s=0.02) as client:
        with capture_logs() as events:
            ids = [f"id-{i}" for i in range(10)]
            asked = [
                asyncio.create_task(client.ask(ASK | {"stream": name != "id-0"}, headers={"X-Request-Id": name}))
                for name in ids
            ]

            def named() -> list[Any]:
                # A prefill takes as long on a busy machine, and may be named as well.
                return [it for it in events if it["event"] == "request_waits" and it["role"] == "decode"]

            await client.until_seen(lambda: len(slow.asked) == 10 and len(named()) == 9)
            _, told = await client.ready()
        waits = named()
        assert sorted(event["id"] for event in waits) == ids[1:]  # once each; an answer in one piece takes its time
        assert {event["engine"] for event in waits} == {slow.url}
        assert all(event["silent_s"] <= event["age_s"] for event in waits)
        assert (told["in_flight"], len(told["silent_longest"])) == (10, 8)
        assert {it["engine"] for it in told["silent_longest"]} == {slow.url}
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)


async def test_an_error_that_ends_a_stream_is_in_log_and_metrics() -> None:
    failed = b"data: " + json.dumps(error("InternalServerError", 500)).encode() + b"\n\ndata: [DONE]\n\n"
    talks = b'data: {"choices": [{"text": "\\"error\\""}]}\n\ndata: [DONE]\n\n'
    decode = Fake(*(says_events(b"data: {}\n\n" * 9000 + end) for end in (failed, talks)))
    async with routed([prefills()], [decode]) as client:
        with capture_logs() as events:
            for end in (failed, talks):
                async with client.streaming() as answer:
                    assert (await answer.read()).endswith(end)
        metrics = await client.metrics()
    ended = [event for event in events if event["event"] == "request"]
    assert [event["status"] for event in ended] == [502, 200]
    assert "answered with status 500: " in ended[0]["error"]
    assert metrics['pd_proxy_requests_total{path="/v1/completions",status="502"}'] == 1
    assert metrics[f'pd_proxy_engine_faults_total{{engine="{decode.url}",role="decode",why="failed"}}'] == 1


# -- where no KV cache can be handed over ------------------------------------------------------------------------

REFUSES = says(error("kv_transfer_error", 503), 503)
ALONE: list[tuple[str, Act | None, dict[str, Any], int]] = [
    ("no_prefill_engine", None, ASK, 0),
    ("prefill_failed", says(b"oh", 500), ASK, 2),
    ("prefill_failed", dies, ASK, 2),
    ("prefill_failed", hangs, ASK, 1),
    ("transfer_failed", says({"kv_transfer_params": PARAMS}), ASK, 2),
    ("transfer_failed", says({"kv_transfer_params": PARAMS}), {**ASK, "user": "of vLLM"}, 2),
    ("no_params", says({"kv_transfer_params": None}), ASK, 1),
    ("no_params", says({"kv_transfer_params": [1]}), ASK, 1),
    ("n", says({"kv_transfer_params": PARAMS}), {**ASK, "n": 2}, 1),
    ("n", says({"kv_transfer_params": PARAMS}), {**ASK, "best_of": 2}, 1),
    ("prompts", says({}), {"prompt": ["a", "b"]}, 0),
    ("prompts", says({}), {"prompt": [[1], [2]]}, 0),
    ("prompts", says({}), {"prompt": "a", "prompt_embeds": "AAAA"}, 0),
    ("beam_search", says({}), {**ASK, "use_beam_search": True}, 0),
    ("prompt_logprobs", says({}), {**ASK, "prompt_logprobs": 0}, 0),
    ("prompt_logprobs", says({}), {**ASK, "echo": True, "logprobs": 0}, 0),
    ("prompt_logprobs", says({}), {"messages": [], "echo": True}, 0),
]


@pytest.mark.parametrize(("cause", "act", "body", "count"), ALONE)
async def test_a_decode_engine_computes_what_it_cannot_be_handed(
    cause: str, act: Act | None, body: dict[str, Any], count: int
) -> None:
    limits = IMPATIENT["prefill"] if act is hangs else QUICK
    prefill, decode = Fake(act or hangs), decodes()
    fails = REFUSES if body is ASK else says(b"oh", 500)  # vLLM does not say why
    decode.acts[:0] = [fails, fails] if cause == "transfer_failed" else []
    async with routed([NOWHERE if act is None else prefill], [decode], limits, attempts=2) as client:
        assert (await client.ready())[0] == 200
        with capture_logs() as events:
            assert await client.ask(body) == (200, {"choices": [{"text": "three"}]})
        metrics = await client.metrics()
    assert len(prefill.asked) == count
    assert decode.asked[-1][0] == body
    counted = {name: value for name, value in metrics.items() if name.startswith("pd_proxy_decode_only_total")}
    assert counted == {f'pd_proxy_decode_only_total{{cause="{name}"}}': float(name == cause) for name in CAUSES}
    (ended,) = [event for event in events if event["event"] == "request"]
    assert (ended["decode_only"], ended["status"]) == (cause, 200)


async def test_where_that_is_not_wanted_a_failed_transfer_is_said() -> None:
    async with routed([prefills()], [Fake(REFUSES)], attempts=2, is_computed=False) as client:
        status, told = await client.ask()
        assert (status, told["error"]["type"]) == (502, "kv_transfer_error")


async def test_several_answers_share_one_prefill_by_asynckvs_params() -> None:
    params = {"do_remote_prefill": True, "asynckv": {"key": 1}}
    prefill, decode = Fake(says({"kv_transfer_params": params})), decodes()
    several = {**ASK, "n": 3, "best_of": 4}
    async with routed([prefill], [decode]) as client:
        assert (await client.ask(several))[0] == 200
    assert not {"n", "best_of"} & prefill.asked[0][0].keys()
    assert decode.asked[0][0] == {**several, "kv_transfer_params": params}


async def test_an_engine_that_lends_by_other_params_is_not_asked_in_vain_twice() -> None:
    prefill, decode = prefills(), decodes()
    async with routed([prefill], [decode]) as client:
        for _ in range(3):
            assert (await client.ask({**ASK, "n": 2}))[0] == 200
        assert (await client.ask({**ASK, "n": 1}))[0] == 200
        assert (await client.metrics())['pd_proxy_decode_only_total{cause="n"}'] == 3
    assert len(prefill.asked) == 2
    assert ["kv_transfer_params" in body for body, _ in decode.asked] == [False, False, False, True]


async def test_a_data_parallel_rank_is_the_decode_engines() -> None:
    prefill, decode = prefills(), decodes()
    async with routed([prefill], [decode]) as client:
        assert (await client.ask(headers={RANK.lower(): "3"}))[0] == 200
    assert (RANK in prefill.asked[0][1], decode.asked[0][1][RANK]) == (False, "3")


# -- /v1/responses -----------------------------------------------------------------------------------------------

INPUT = {"input": "one two", "max_output_tokens": 9, "stream": True}
HEAD_OF_RESPONSE = b"".join(
    b'event: response.%b\ndata: {"type": "response.%b", "response": {"error": null}}\n\n' % (name, name)
    for name in (b"created", b"in_progress")
)
DELTA = b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "three"}\n\n'
RESPONSE_ERRORS = [
    b'event: error\ndata: {"type": "error", "code": "server_error", "message": "no luck"}\n\n',
    b'event: response.failed\ndata: {"type": "response.failed", "response": {"error": {"code": "x"}}}\n\n',
    b'data: {"error": {"message": "no luck", "code": 500}}\n\n',
]


async def test_a_response_is_prefilled_and_decoded_as_well() -> None:
    prefill, decode = prefills(), Fake(says_events(HEAD_OF_RESPONSE + DELTA))
    async with routed([prefill], [decode]) as client, client.post(INPUT, RESPONSES) as answer:
        assert (answer.status, await answer.read()) == (200, HEAD_OF_RESPONSE + DELTA)
    asked = {"input": "one two", "max_output_tokens": 1, "stream": False, "store": False}
    assert prefill.asked[0][0] == {**asked, "kv_transfer_params": {"do_remote_decode": True}}
    assert decode.asked[0][0] == {**INPUT, "kv_transfer_params": {**PARAMS, "of": "a"}}


@pytest.mark.parametrize("end", [*RESPONSE_ERRORS, b""], ids=["error", "failed", "openai", "nothing"])
async def test_a_response_that_fails_before_its_text_is_had_from_another_engine(end: bytes) -> None:
    bad, good = Fake(says_events(HEAD_OF_RESPONSE + end)), Fake(says_events(HEAD_OF_RESPONSE + DELTA))
    async with routed([prefills()], [bad, good]) as client, client.post(INPUT, RESPONSES) as answer:
        assert (answer.status, await answer.read()) == (200, HEAD_OF_RESPONSE + DELTA)


async def test_a_response_that_fails_later_is_in_the_log_and_one_with_a_long_head_is_passed_on() -> None:
    late = says_events(HEAD_OF_RESPONSE + DELTA + RESPONSE_ERRORS[1])
    long = HEAD_OF_RESPONSE.replace(b"null}", b'null, "instructions": "%b"}' % (b"x" * 100_000)) + DELTA
    async with routed([prefills()], [Fake(late, says_events(long))]) as client:
        with capture_logs() as events:
            for _ in range(2):
                async with client.post(INPUT, RESPONSES) as answer:
                    assert answer.status == 200
                    told = await answer.read()
    assert told == long
    assert [event["status"] for event in events if event["event"] == "request"] == [502, 200]


# -- connects that take long ------------------------------------------------------------------------------------

CONNECT_S = 0.2
SLOW = Limits(connect_s=CONNECT_S, prefill_s=HEAR_S, silence_s=HEAR_S, health_s=1000)


async def test_slow_connects_do_not_take_out_an_engine_that_is_heard() -> None:
    head = b"data: {}\n\n"
    decode = Fake(streams(head, and_then=head), says({"choices": []}))
    async with decode.accepting(), routed([prefills()], [decode.url], SLOW) as client, client.streaming() as answer:

        async def goes_on() -> None:
            while True:
                assert await answer.content.readexactly(len(head)) == head
                decode.go_on.set()

        going_on = asyncio.create_task(goes_on())
        await asyncio.wait_for(decode.busy.wait(), HEAR_S)
        async with decode.deaf():
            asked = asyncio.create_task(client.ask())
            assert not (await asyncio.wait([asked, going_on], timeout=5 * CONNECT_S))[0]
            assert (await client.ready())[1]["decode"][0]["trouble"] == ""
        assert (await asked)[0] == 200
        assert not any("faults" in name for name in await client.metrics())
        await cancel(going_on)


async def test_an_engine_whose_host_drops_every_packet_is_found_while_clients_come() -> None:
    decode, other = decodes(), decodes()
    async with decode.accepting(), routed([prefills()], [decode.url, other], SLOW) as client, decode.deaf():
        engine = client.router.engines.of("decode")[0]
        began = asyncio.get_running_loop().time()

        async def is_out() -> bool:
            assert (await client.ask())[0] == 200
            return bool(engine.trouble)

        await client.until(is_out)
        assert asyncio.get_running_loop().time() - began < 2.5 * CONNECT_S + SLACK_S
        assert engine.is_slow
        assert not decode.asked


async def test_the_least_bad_engine_is_asked_if_time_outs_alone_took_all_out() -> None:
    decode = decodes()
    async with decode.accepting(), routed([prefills()], [decode.url, NOWHERE], SLOW) as client:
        async with decode.deaf():
            while not (await client.ready())[1]["decode"][0]["trouble"]:
                assert (await client.ask())[0] == 503
        assert (await client.ready())[0] == 503
        assert (await client.ask())[0] == 200
        assert (await client.ready())[1]["decode"][0]["trouble"]  # until a health check says otherwise


async def test_an_error_of_this_host_takes_no_engine_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with routed([prefills()], [decodes()], RARELY) as client:
        async with connection(client, b"") as (reader, writer):
            with monkeypatch.context() as patched:
                patched.setattr(asyncio.get_running_loop(), "sock_connect", fails)
                client.router.engines.session.connector._conns.clear()  # type: ignore[union-attr]
                body = msgspec.json.encode(ASK)
                writer.write(HEAD.replace(b"65536", b"%d" % len(body)) + body)
                assert b" 503 " in await asyncio.wait_for(reader.readline(), HEAR_S)
        assert (await client.ask())[0] == 200


# -- answers that are too large ---------------------------------------------------------------------------------


async def test_an_endless_answer_of_a_prefill_engine_is_garbage() -> None:
    prefill, decode = Fake(endless(b'{"a": "')), decodes()
    async with routed([prefill], [decode]) as client:
        assert (await client.ask())[0] == 200
        assert (await client.metrics())['pd_proxy_decode_only_total{cause="prefill_failed"}'] == 1


async def test_an_endless_error_is_garbage() -> None:
    decode = Fake(endless(b"", status=400))
    async with routed([prefills()], [decode], attempts=1, is_computed=False) as client:
        status, told = await client.ask()
        assert (status, told["error"]["type"]) == (502, "garbage")


async def test_an_event_without_an_end_is_garbage() -> None:
    decode = Fake(endless(b"data: {}\n\n", kind="text/event-stream"))
    async with routed([prefills()], [decode]) as client, client.streaming() as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: {}\n\n"
        assert json.loads((await answer.content.read()).removeprefix(b"data: "))["error"]["type"] == "garbage"


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_large_answer_in_one_piece_is_passed_on_as_it_arrives(is_cut: bool) -> None:
    parts = [b'{"choices": "', *[b"x" * 2**20] * 17, b'"}']

    async def act(fake: Fake, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for part in parts[:-1]:
            await response.write(part)
        await asyncio.wait_for(fake.go_on.wait(), HEAR_S)  # until the client has most of it
        if is_cut and request.transport is not None:
            request.transport.abort()
        else:
            await response.write(parts[-1])
        return response

    decode = Fake(act)
    async with routed([prefills()], [decode]) as client, client.streaming(stream=False) as answer:
        assert len(await answer.content.readexactly(2**24)) == 2**24
        decode.go_on.set()
        if is_cut:
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
        else:
            assert await answer.content.read() == b"".join(parts)[2**24 :]


# -- a request that kills engines ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["prefill", "decode", "both"])
async def test_a_request_that_two_engines_were_lost_with_is_not_tried_on_a_third(at: str) -> None:
    prefill = [Fake(dies), prefills()] if at == "both" else [Fake(dies) if at == "prefill" else prefills()]
    prefill += [Fake(dies), prefills()] if at == "prefill" else []
    decode = [decodes()] if at == "prefill" else [Fake(dies), Fake(dies), decodes()]
    async with routed(prefill, decode, attempts=9) as client:
        status, told = await client.ask()
        assert (status, told["error"]["type"]) == (502, "lost")
        assert "another engine was lost with this request before, so a third is not tried" in told["error"]["message"]
    assert sum(bool(it.asked) for it in (*prefill, *decode) if it.acts == [dies]) == 2
    assert not decode[-1].asked


async def test_a_request_may_be_lost_twice_with_one_engine() -> None:
    decode = Fake(dies, dies, says({"choices": []}))
    async with routed([prefills()], [decode]) as client:
        assert (await client.ask())[0] == 200
    assert len(decode.asked) == 3


# -- engines that come and go ----------------------------------------------------------------------------------


async def urls_of(client: Client, role: str) -> list[str]:
    return [it["engine"] for it in (await client.ready())[1][role]]


async def test_engines_of_a_file_come_and_go_and_finish_what_they_have(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    old, new, prefill = Fake(streams(b"data: {}\n\n", b"data: [DONE]\n\n")), decodes(), prefills()
    async with prefill.running(), old.running(), new.running():
        file.write_text(f"# ours\nprefill {prefill.url}\ndecode {old.url}/  # for now\n")
        with capture_logs() as events:
            async with routed([], [], file=file) as client, client.streaming() as answer:
                assert await answer.content.readline() == b"data: {}\n"
                new.health = 500
                file.write_text(f"prefill {prefill.url}\ndecode {new.url}\n")

                async def is_taken_up() -> bool:
                    return await urls_of(client, "decode") == [new.url]

                await client.until(is_taken_up)
                assert (await client.ask())[0] == 503  # it has been looked at, and is not well
                new.health = 200
                await client.until_ready()
                assert (await client.ask())[0] == 200
                assert not any(old.url in name for name in await client.metrics() if "_up" in name)
                old.go_on.set()
                while b"DONE" not in await asyncio.wait_for(answer.content.readline(), HEAR_S):
                    old.go_on.set()
    gone = [event for event in events if event["event"] == "engine_removed"]
    assert [(event["engine"], event["outstanding"]) for event in gone] == [(old.url, 1)]


async def test_a_file_that_is_broken_or_gone_leaves_the_engines_and_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("prefill http://a\ndecode http://b:1\n")
    sources = Sources([], ["http://c"], file)
    want = await sources.look()
    assert list(want) == [("decode", "http://c"), ("prefill", "http://a"), ("decode", "http://b:1")]
    with capture_logs() as events:
        for damage, count in (
            (lambda: file.write_text("decode b:1\n"), 1),
            (file.unlink, 2),
            (lambda: file.write_text("decode http://a..b\n"), 3),
            (lambda: file.write_text("prefill http://a\ndecode http://b"), 4),
            (lambda: file.write_text("prefill http://a\n"), 5),
        ):
            damage()
            for _ in range(3):
                assert await sources.look() == want
                assert len(events) == count
    assert "--engines" in events[0]["trouble"]
    assert "'b:1' is not a URL" in events[0]["trouble"]
    assert "No such file" in events[1]["trouble"]
    assert "the last line has no newline" in events[3]["trouble"]
    assert "no longer names a decode engine" in events[4]["trouble"]
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"--engines .*can't decode"):
        Sources([], [], file)


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "huge"])
async def test_a_file_of_another_kind_is_refused_and_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    file, other = tmp_path / "engines", tmp_path / "other"
    good = "prefill http://a\ndecode http://b\n"
    file.write_text(good)
    sources = Sources([], [], file)
    file.unlink()
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "directory":
            file.mkdir()
        case "device":
            file.symlink_to("/dev/zero")
        case _:
            file.write_text(good + "#" * 2**21 + "\n")
    text = {"directory": "Is a directory", "huge": "larger than 1 MiB"}.get(kind, "not a regular file")
    with pytest.raises(ConfigError, match=text):
        Sources([], [], file)
    with capture_logs() as events:
        assert list(await sources.look()) == [("prefill", "http://a"), ("decode", "http://b")]
    assert text in events[0]["trouble"]
    other.write_text(good)
    (file.rmdir if kind == "directory" else file.unlink)()
    file.symlink_to(other)  # as Kubernetes mounts a ConfigMap
    assert len(await sources.look()) == 2


async def test_a_source_that_hangs_is_asked_once_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hang, asked = threading.Event(), []

    def resolve(host: str, port: int, *_: Any) -> list[Any]:
        asked.append(host)
        if host == "hangs":
            hang.wait(HEAR_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sources_module, "PATIENCE_S", 0.05)
    sources = Sources(["dns+http://hangs:1"], ["dns+http://works:2"])
    with capture_logs() as events:
        for _ in range(3):
            assert list(await sources.look()) == [("decode", "http://127.0.0.1:2")]
    assert asked.count("hangs") == 1
    assert [event["trouble"] for event in events] == ["there was no answer within 0.05 s"]
    hang.set()
    async with asyncio.timeout(HEAR_S):
        while len(await sources.look()) < 2:
            pass


async def test_every_address_of_a_name_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["127.0.0.1"]

    def resolve(host: str, port: int, *_: Any) -> list[Any]:
        assert host == "decode"
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, port)) for it in hosts]
        return [*found, (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]  # the same engine

    first, second, prefill = decodes(), decodes(), prefills()
    async with first.running(), prefill.running():
        port = int(first.url.rpartition(":")[2])
        async with second.running("127.0.0.2", port):
            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            with capture_logs() as events:
                async with routed([prefill], [f"dns+http://decode:{port}/"]) as client:
                    assert await urls_of(client, "decode") == [first.url]
                    hosts.append("127.0.0.2")

                    async def are_both() -> bool:
                        return await urls_of(client, "decode") == [first.url, second.url]

                    await client.until(are_both)
                    assert [(await client.ask())[0] for _ in range(2)] == [200, 200]
                    hosts.clear()
                    await client.until_seen(lambda: any(it["event"] == "engines_not_found" for it in events))
                    assert await are_both()
    assert len(first.asked) == len(second.asked) == 1
    assert "Name or service not known" in next(it["trouble"] for it in events if it["event"] == "engines_not_found")


async def test_a_real_resolver_is_asked_and_ipv6_addresses_are_in_brackets() -> None:
    found = await Sources(["dns+http://localhost:8100/api"], []).look()
    assert ("prefill", "http://127.0.0.1:8100/api") in found or ("prefill", "http://[::1]:8100/api") in found
    assert list(await Sources(["dns+http://[::1]"], []).look()) == [("prefill", "http://[::1]:80")]


# -- clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": "\xff"}',
        b'{"n": [1]}',
        b"{%b}" % b",".join(b'"%d":1' % i for i in range(1001)),
        b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
        {**ASK, "stream": "yes"},
        {"input": "one", "previous_response_id": "resp_1"},
        {"input": "one", "background": True},
    ],
    ids=lambda body: str(body)[:24],
)
async def test_malformed_bodies_are_refused(body: Any) -> None:
    prefill = prefills()
    async with routed([prefill], [decodes()]) as client:
        status, told = await client.ask(body)
        assert (status, told["error"]["code"], told["error"]["type"]) == (400, 400, "invalid_request_error")
        assert not prefill.asked


CHAT = COMPLETIONS[1]


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (path, fields, text)
        for paths, fields, text in [
            (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options needs stream to be true"),
            (COMPLETIONS, {"stream_options": {"a": 1}, "stream": False}, "stream_options needs stream to be true"),
            (COMPLETIONS, {"stream_options": 5, "stream": True}, "stream_options: Expected `object`"),
            (COMPLETIONS, {"stream_options": [], "stream": True}, "stream_options: Expected `object`"),
            (COMPLETIONS, {"stream_options": {"include_usage": "maybe"}, "stream": True}, "include_usage is neither"),
            (COMPLETIONS, {"stream_options": {"include_usage": [1]}, "stream": True}, "stream_options: Expected"),
            (COMPLETIONS, {"n": "two"}, "n is 'two', not a whole number"),
            (COMPLETIONS, {"n": 1.5}, "n is '1.5', not a whole number"),
            (COMPLETIONS, {"n": 0}, "n is 0, less than 1"),
            (COMPLETIONS, {"max_tokens": "7x"}, "max_tokens is '7x', not a whole number"),
            (COMPLETIONS, {"max_tokens": "inf"}, "max_tokens is 'inf', not a whole number"),
            (COMPLETIONS, {"max_tokens": -1}, "max_tokens is -1, less than 1"),
            (COMPLETIONS, {"max_tokens": [7]}, "the body is not a JSON object: Expected"),
            (COMPLETIONS, {"min_tokens": "some"}, "min_tokens is 'some', not a whole number"),
            (COMPLETIONS, {"min_tokens": 10}, "min_tokens is 10, outside 0 ... 9"),
            (COMPLETIONS, {"min_tokens": -1}, "min_tokens is -1, outside 0 ... 9"),
            ([CHAT], {"max_completion_tokens": "many"}, "max_completion_tokens is 'many', not a whole number"),
            ([CHAT], {"max_completion_tokens": 0}, "max_completion_tokens is 0, less than 1"),
            ([RESPONSES], {"max_output_tokens": "many"}, "max_output_tokens is 'many', not a whole number"),
        ]
        for path in paths
    ],
    ids=str,
)
async def test_what_no_engine_takes_is_refused_before_the_prefill(path: str, fields: dict[str, Any], text: str) -> None:
    prefill, decode = prefills(), decodes()
    async with routed([prefill], [decode]) as client:
        status, told = await client.ask({**ASK, **fields}, path)
        assert (status, told["error"]["code"], told["error"]["type"]) == (400, 400, "invalid_request_error")
        assert text in told["error"]["message"]
    assert not prefill.asked + decode.asked


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS[0], {"max_tokens": "7", "n": 1.0, "min_tokens": None}),
        (COMPLETIONS[0], {"max_tokens": None, "n": None, "stream_options": None}),
        (COMPLETIONS[0], {"max_tokens": 0, "echo": True}),
        (COMPLETIONS[0], {"stream_options": {}, "max_completion_tokens": "any", "max_output_tokens": [1]}),
        (COMPLETIONS[1], {"max_tokens": 0, "max_completion_tokens": 5, "min_tokens": True}),
        (RESPONSES, {"max_tokens": "any", "stream_options": {"include_usage": True}}),
        # Beam search ignores `min_tokens`, and no prefill is for nothing.
        *((path, {"use_beam_search": True, "max_tokens": 5, "min_tokens": 7}) for path in COMPLETIONS),
        (COMPLETIONS[1], {"use_beam_search": True, "max_tokens": 0}),
    ],
    ids=str,
)
async def test_what_vllm_takes_is_not_refused(path: str, fields: dict[str, Any]) -> None:
    prefill, decode = prefills(), decodes()
    body = {**ASK, **fields}
    params = {} if "use_beam_search" in fields else {"kv_transfer_params": {**PARAMS, "of": "a"}}
    async with routed([prefill], [decode]) as client:
        assert (await client.ask(body, path))[0] == 200
    assert decode.asked[0][0] == {**body, **params}


async def test_a_body_that_cannot_be_unpacked_is_refused() -> None:
    async with routed([prefills()], [decodes()]) as client:
        status, told = await client.ask(b"hello", headers={"Content-Encoding": "gzip"}, compress=None)
        assert status == 400
        assert "content-encoding" in told["error"]["message"]


async def test_large_prompts_arrive_whole() -> None:
    prefill, decode = prefills(), decodes()
    large = {"prompt": "x" * 5_000_000}
    async with routed([prefill], [decode]) as client:
        assert (await client.ask(large))[0] == 200
    assert prefill.asked[0][0]["prompt"] == decode.asked[0][0]["prompt"] == large["prompt"]


async def test_token_ids_and_a_list_of_one_prompt_are_taken() -> None:
    async with routed([prefills()], [decodes()]) as client:
        for prompt in ([1, 2, 3], ["a"], [[1, 2]]):
            assert (await client.ask({"prompt": prompt}))[0] == 200
        assert not sum(value for name, value in (await client.metrics()).items() if "decode_only_total" in name)


async def test_huge_bodies_are_refused() -> None:
    async with routed([prefills()], [decodes()], max_body_mib=0.5) as client:
        status, told = await client.ask({"prompt": "x" * 2**20})
        assert (status, told["error"]["message"]) == (413, "the body is larger than 0.5 MiB")


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 65536\r\n\r\n"


@contextlib.asynccontextmanager
async def connection(client: Client, said: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that says no more than this by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rsplit(":", 1)[1]))
    writer.write(said)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_slow_bodies_are_refused() -> None:
    async with routed([prefills()], [decodes()], body_s=0.2) as client, connection(client, HEAD) as (reader, writer):
        answer = asyncio.create_task(reader.readline())
        async with asyncio.timeout(HEAR_S / 2):  # long before any engine is taken for silent
            while not answer.done():  # a body that goes on and on is late all the same
                writer.write(b" ")
                await asyncio.wait([answer], timeout=0.01)
        assert b" 408 " in await answer


@pytest.mark.parametrize("said", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half"])
async def test_a_connection_without_a_whole_header_is_closed(said: bytes) -> None:
    async with routed([prefills()], [decodes()], idle_s=0.2) as client, connection(client, said) as (reader, _):
        assert await asyncio.wait_for(reader.read(), HEAR_S) == b""


async def test_a_request_that_takes_long_is_not_an_idle_connection() -> None:
    decode = Fake(streams(b"data: {}\n\n", b"data: [DONE]\n\n"))
    async with routed([prefills()], [decode], idle_s=0.01) as client, client.streaming() as answer:
        assert await answer.content.readline() == b"data: {}\n"
        async with connection(client, b"") as (reader, _):
            assert await asyncio.wait_for(reader.read(), HEAR_S) == b""  # the time is over for who says nothing
        decode.go_on.set()
        while b"DONE" not in await asyncio.wait_for(answer.content.readline(), HEAR_S):
            decode.go_on.set()


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (replace(QUICK, max_connections=2), "there are 2 connections already"),
        (replace(QUICK, max_connections_per_host=2), "there are 2 connections of 127.0.0.1 already"),
    ],
)
async def test_connections_are_bounded_and_a_client_beyond_them_hears_so(limits: Limits, why: str) -> None:
    half = b"GET /health HTTP/1.1\r\n"
    async with routed([prefills()], [decodes()], limits) as client:
        async with connection(client, half), connection(client, half), connection(client, HEAD) as (reader, _):
            head, _, body = (await asyncio.wait_for(reader.read(), HEAR_S)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"Connection: close" in head
            assert json.loads(body)["error"]["message"] == why
            async with connection(client, half + b"Host: x\r\n\r\n") as (reader, _):  # a probe
                assert b" 200 " in await asyncio.wait_for(reader.readline(), HEAR_S)

        async def is_served() -> bool:
            async with connection(client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") as (reader, _):
                return b" 200 " in await asyncio.wait_for(reader.readline(), HEAR_S)

        await client.until(is_served)  # when those have left


async def test_bodies_hold_so_much_in_all_and_no_more() -> None:
    async with routed([prefills()], [decodes()], max_bodies_mib=0.1) as client:
        body = msgspec.json.encode({**ASK, "pad": "x" * 60_000})
        async with connection(client, HEAD + b"{" + bytes(59_999)):
            await client.until_seen(lambda: client.router._body_bytes == 60_000)
            status, told = await client.ask(body)
            assert (status, told["error"]["type"]) == (503, "overloaded")
            assert told["error"]["message"] == "bodies of requests already hold 0.1 MiB"
            assert (await client.ask())[0] == 200

        async def has_room() -> bool:
            return (await client.ask(body))[0] == 200

        await client.until(has_room)
        assert client.router._body_bytes == 0


async def test_other_paths_and_methods_are_refused_in_the_same_form() -> None:
    async with routed([prefills()], [decodes()]) as client:
        for method, path, status in (("GET", COMPLETIONS[0], 405), ("POST", "/v1/nothing", 404)):
            async with client.session.request(method, client.url + path) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["code"] == status


@pytest.mark.parametrize("at", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_cancels_the_engine_that_works_for_it(at: str) -> None:
    prefill = Fake(hangs) if at == "prefill" else prefills()
    decode = Fake(streams(b"data: {}\n\n") if at == "stream" else hangs)
    async with routed([prefill], [decode]) as client:
        asked = asyncio.create_task(client.ask({**ASK, "stream": at == "stream"}))
        engine = prefill if at == "prefill" else decode
        await asyncio.wait_for(engine.busy.wait(), HEAR_S)
        await cancel(asked)
        await asyncio.wait_for(engine.left.wait(), HEAR_S)
        await client.until_counted('pd_proxy_requests_total{path="/v1/completions",status="499"}')
        assert (await client.metrics())["pd_proxy_in_flight"] == 0
        _, told = await client.ready()
        assert not any(it["outstanding"] for it in (*told["prefill"], *told["decode"]))


async def test_more_than_there_is_room_for_are_refused() -> None:
    prefill = Fake(hangs)
    async with routed([prefill], [decodes()], max_requests=1) as client, connection(client, HEAD):  # has no place
        first = asyncio.create_task(client.ask())
        await asyncio.wait_for(prefill.busy.wait(), HEAR_S)
        status, told = await client.ask()
        assert (status, told["error"]["type"]) == (503, "overloaded")
        await cancel(first)


async def test_what_is_under_way_is_finished_when_the_router_is_stopped() -> None:
    async def later(fake: Fake, request: web.Request) -> web.StreamResponse:
        await asyncio.wait_for(fake.go_on.wait(), HEAR_S)
        return web.json_response({"choices": []})

    decode, prefill = Fake(later), prefills()
    async with prefill.running(), decode.running(), aiohttp.ClientSession() as session:
        life = contextlib.AsyncExitStack()
        router = Router([prefill.url], [decode.url], Limits(drain_s=HEAR_S))
        url = await life.enter_async_context(serving(router.app(), "127.0.0.1", 0, GRACE_S))
        asked = asyncio.create_task(Client(url, session).ask())
        await asyncio.wait_for(decode.busy.wait(), HEAR_S)
        closing = asyncio.create_task(life.aclose())

        async def is_closed() -> bool:
            try:
                await Client(url, session).ready()
            except aiohttp.ClientConnectorError:
                return True
            return False

        await Client(url, session).until(is_closed)
        decode.go_on.set()
        assert await asked == (200, {"choices": []})
        await closing


async def test_what_is_lent_while_the_router_stops_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "GRACE_S", HEAR_S)
    monkeypatch.setattr(router_module, "LATE_S", HEAR_S)
    prefill = Fake(lends)
    prefill.hears.clear()
    async with prefill.running(), aiohttp.ClientSession() as session:
        life = contextlib.AsyncExitStack()
        async with decodes().running() as decode:
            router = Router([prefill.url], [decode.url], Limits(drain_s=0.1))
            url = await life.enter_async_context(serving(router.app(), "127.0.0.1", 0, GRACE_S))
            asked = asyncio.create_task(Client(url, session).ask())
            await asyncio.wait_for(prefill.busy.wait(), HEAR_S)
            closing = asyncio.create_task(life.aclose())
            assert (await asked)[0] == 503
            prefill.hears.set()
            await asyncio.wait_for(closing, HEAR_S)
    assert given_back(prefill) == lent(prefill) == [1]


@pytest.mark.parametrize("at", ["prefill", "decode", "stream", "full"])
async def test_what_takes_too_long_when_the_router_is_stopped_ends_in_an_error(at: str) -> None:
    head = b"data: {}\n\n"
    floods = endless(head, head * 10_000, kind="text/event-stream")
    is_stream = at in ("stream", "full")
    prefill = Fake(hangs) if at == "prefill" else prefills()
    decode = Fake({"stream": streams(head), "full": floods}.get(at, hangs))
    async with prefill.running(), decode.running(), aiohttp.ClientSession() as session:
        router, life = Router([prefill.url], [decode.url], Limits(drain_s=0.1)), contextlib.AsyncExitStack()
        url = await life.enter_async_context(serving(router.app(), "127.0.0.1", 0, GRACE_S))

        async def ask() -> aiohttp.ClientResponse:
            return await session.post(url + COMPLETIONS[0], json={**ASK, "stream": is_stream})

        asked = asyncio.create_task(ask())
        engine = prefill if at == "prefill" else decode
        await asyncio.wait_for(engine.busy.wait(), HEAR_S)
        if is_stream:
            answer = await asked
            assert await answer.content.readexactly(len(head)) == head
        assert router.num_in_flight == 1
        with capture_logs() as events:
            began = asyncio.get_running_loop().time()
            await life.aclose()
            # Who does not even read what it is sent cannot hold up the end: nothing but two graces is left to it.
            assert 0.09 < asyncio.get_running_loop().time() - began < 0.1 + 2 * GRACE_S + SLACK_S
        await asyncio.wait_for(engine.left.wait(), HEAR_S)
        if at != "full":
            answer = await asked
            assert answer.status == (200 if is_stream else 503)
            told = json.loads((await answer.read()).strip().removeprefix(b"data: "))["error"]
            assert (told["code"], told["type"], told["message"]) == (503, "stopping", "the router is stopping")
        answer.close()
        (ended,) = [event for event in events if event["event"] == "request"]
        assert (ended["status"], ended["error"]) == (503, "the router is stopping")


# -- what is seen of it ------------------------------------------------------------------------------------------


async def test_readiness_follows_the_engines() -> None:
    prefill, decode = prefills(), decodes()
    async with routed([prefill], [decode]) as client:
        status, told = await client.ready()
        assert (status, told["status"]) == (200, "ready")
        idle = {"trouble": "", "outstanding": 0, "at_once": False, "ahead": 0}
        assert told["prefill"] == [{"engine": prefill.url, **idle}]
        decode.health = 500
        await client.until_ready(503)
        assert (await client.ready())[1]["decode"][0]["trouble"] == "its health is status 500"
        assert (await client.ask())[0] == 503
        decode.health = 200
        await client.until_ready()
        assert (await client.ask())[0] == 200
        async with client.session.get(f"{client.url}/health") as answer:
            assert answer.status == 200


async def test_metrics_count_what_happened() -> None:
    bad, good, decode = Fake(says(b"oh", 500)), prefills(), decodes()
    async with routed([bad, good], [decode]) as client:
        await client.ask()
        await client.ask({**ASK, "stream": "yes"})
        metrics = await client.metrics()
    assert metrics['pd_proxy_requests_total{path="/v1/completions",status="200"}'] == 1
    assert metrics['pd_proxy_requests_total{path="/v1/completions",status="400"}'] == 1
    assert metrics['pd_proxy_retries_total{why="failed"}'] == 1
    assert metrics[f'pd_proxy_engine_faults_total{{engine="{bad.url}",role="prefill",why="failed"}}'] == 1
    assert metrics[f'pd_proxy_engine_up{{engine="{decode.url}",role="decode"}}'] == 1
    assert metrics[f'pd_proxy_engine_outstanding{{engine="{decode.url}",role="decode"}}'] == 0
    assert metrics['pd_proxy_seconds_count{until="prefill",way="in_turn"}'] == 1
    assert metrics['pd_proxy_seconds_count{until="end",way="in_turn"}'] == 1
    assert metrics['pd_proxy_seconds_count{until="end",way="none"}'] == 1
    assert metrics["pd_proxy_in_flight"] == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--prefill http://a", "there is no decode engine; give --decode URL, or --engines FILE"),
        ("--decode http://a", "there is no prefill engine; give --prefill URL, or --engines FILE"),
        ("--prefill a:1 --decode http://b", "'a:1' is not a URL, such as http://10.0.0.7:8100, or dns+http://"),
        ("--prefill dns+https://a --decode http://b", "'dns+https://a' is not a URL"),
        ("--prefill http://a:99999 --decode http://b", "'http://a:99999' is not a URL"),
        ("--prefill http://a..b --decode http://b", "'http://a..b' is not a URL"),
        (f"--prefill http://{'a' * 64} --decode http://b", "is not a URL"),
        ("--prefill http://u:p@a --decode http://b", "is not a URL"),
        ("--engines /nowhere/file", "--engines /nowhere/file: cannot be read: No such file"),
        ("--prefill http://a --decode http://b --attempts 0", "--attempts"),
        ("--prefill http://a --decode http://b --connect-s nan", "Invalid value for '--connect-s'"),
        ("--prefill http://a --decode http://b --no-prefill wait", "'wait' is not one of 'compute', 'refuse'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asynckv", "proxy", *line.split()])
    assert cli.run() == 2
    said = capsys.readouterr().err
    assert said.startswith("asynckv: ")
    assert says in said
    assert said.count("\n") == 1


def test_help_teaches_and_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asynckv", "proxy", "--help"])
    assert cli.run() == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("llm-d", "/health/ready", "--no-prefill", "dns+http://", RANK, "Exit status"))
    monkeypatch.setattr(sys, "argv", ["asynckv", "proxy", "--prefill", "http://a", "--decode", "http://b"])
    monkeypatch.delitem(sys.modules, "asynckv.tools.proxy.router")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli.run() == 2
    assert capsys.readouterr().err == "asynckv: the router needs aiohttp: pip install 'asynckv[proxy]'\n"


@contextlib.asynccontextmanager
async def running(*command: str, stdout: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command that writes its log into a pipe, and kill it in the end."""
    process = await asyncio.create_subprocess_exec(*command, stdout=stdout, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_command_serves_logs_and_ends_in_order() -> None:
    async with prefills().running() as prefill, decodes().running() as decode:
        command = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", sys.executable, "-m", "asynckv", "proxy")
        engines = ("--port", "0", "--prefill", prefill.url, "--decode", decode.url)
        async with running(*command, *engines) as process:
            assert process.stderr is not None
            async with asyncio.timeout(START_S):
                events: list[dict[str, Any]] = [{"event": ""}]
                while events[-1]["event"] != "listening":
                    events.append(json.loads(await process.stderr.readline()))
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == hard > 256
            async with aiohttp.ClientSession() as session:
                client = Client(events[-1]["url"], session)
                assert (await client.ask(headers={"X-Request-Id": "id-1"}))[0] == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), HEAR_S) == 0
            (ended, stopping) = [json.loads(line) for line in (await process.stderr.read()).splitlines()]
        assert (ended["event"], ended["id"], ended["status"], ended["attempts"]) == ("request", "id-1", 200, 1)
        assert (ended["prefill"], ended["decode"]) == (prefill.url, decode.url)
        assert (stopping["event"], stopping["in_flight"]) == ("stopping", 0)


HANGING = """
import socket, sys, threading
known = socket.getaddrinfo
socket.getaddrinfo = lambda host, *more, **named: (
    threading.Event().wait() if "hangs" in str(host) else known(host, *more, **named)
)
from asynckv.tools import cli
sys.exit(cli.run())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    async with prefills().running() as prefill:
        urls = ("--prefill", prefill.url, "--decode", "http://hangs", "--decode", "dns+http://also-hangs")
        command = (sys.executable, "-c", HANGING, "proxy", "--port", "0", *urls)
        async with running(*command) as process:
            assert process.stderr is not None
            async with asyncio.timeout(START_S):
                while b'"listening"' not in (line := await process.stderr.readline()):
                    assert line
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), HEAR_S) == 0


async def serve_two_thousand(client: Client) -> None:
    """Let so many clients ask for a stream at once, from one address, and see that all get it to its end."""
    body = msgspec.json.encode({**ASK, "stream": True})
    said = HEAD.replace(b"65536", b"%d" % len(body)) + body
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    async def served() -> bool:
        async with connection(client, said) as (reader, _):
            return b" 200 " in await reader.readline() and (await reader.readuntil(b"[DONE]")).endswith(b"[DONE]")

    async with asyncio.timeout(240):
        assert sum(await asyncio.gather(*(served() for _ in range(2000)))) == 2000


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_thousand_clients_at_once_are_served_by_default() -> None:
    """With one engine of each role, which take few connections at a time."""
    events = says_events(b"data: {}\n\ndata: [DONE]\n\n")
    async with routed([prefills()], [Fake(events)], Limits()) as client:
        await serve_two_thousand(client)


async def test_a_second_signal_ends_what_is_under_way() -> None:
    twice = asyncio.Event()
    told = told_to_stop(twice.set)
    try:
        for event in (told, twice):
            assert not event.is_set()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(event.wait(), HEAR_S)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


# -- one command for all --------------------------------------------------------------------------------------------


async def test_a_taken_port_is_said_before_any_engine_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: "):
            await pd_service.serve(1, 1, "127.0.0.1", port, Path("unused"))
    assert capsys.readouterr() == ("", "")


def test_the_documented_installation_brings_what_the_router_needs() -> None:
    root = Path(__file__).parents[1]
    command = next(
        line for line in (root / "docs/deploy.md").read_text().splitlines() if line.startswith(".venv/bin/pip install")
    )
    named = {re.split("[>=<]", word)[0] for word in shlex.split(command)}
    assert {".[proxy]", "transformers"} <= named


# -- tiny engines, with real KV caches between them -----------------------------------------------------------------

DECODE_BLOCKS = 64
"""Of 8 tokens: few, so that requests have to wait for some."""


class Tiny:
    """A tiny engine in a process of its own."""

    def __init__(self, role: str, *options: str) -> None:
        command = [sys.executable, "-m", "docs.examples.service.tiny_engine", "--role", role, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = ""

    def wait_until_started(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        self.url = json.loads(line)["url"]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(HEAR_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    async def state(self, client: Client) -> dict[str, Any]:
        async with client.session.get(f"{self.url}/health") as answer:
            found: dict[str, Any] = await answer.json()
            return found


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[list[Tiny], Tiny]]:
    """Two prefill engines and a decode engine."""
    prefill = [Tiny("prefill", "--step-ms", "5") for _ in range(2)]
    decode = Tiny("decode", "--step-ms", "5", "--blocks", str(DECODE_BLOCKS))
    try:
        for engine in (*prefill, decode):
            engine.wait_until_started()
        yield prefill, decode
        assert [engine.end() for engine in (*prefill, decode)].count(0) >= 2
    finally:
        for engine in (*prefill, decode):
            engine.process.kill()
            engine.process.wait()


async def until_idle(client: Client, *engines: Tiny) -> None:
    """Wait until engines work on nothing and hold no block."""

    async def is_idle() -> bool:
        states = [await engine.state(client) for engine in engines]
        return not any(state["running"] or state["waiting"] or state["blocks_held"] for state in states)

    await client.until(is_idle)


def asks(text: str, count: int, is_chat: bool = False) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    return {**said, "max_tokens": count}


async def alone(client: Client, engine: Tiny, body: dict[str, Any], path: str = COMPLETIONS[0]) -> str:
    status, told = await Client(engine.url, client.session).ask(body, path)
    assert status == 200
    return said(told)


def said(told: dict[str, Any]) -> str:
    choice = told["choices"][0]
    text: str = choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]
    return text


Tinies = tuple[list[Tiny], Tiny]


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", COMPLETIONS)
async def test_tokens_are_those_of_one_process(tiny: Tinies, path: str) -> None:
    prefill, decode = tiny
    async with routed([it.url for it in prefill], [decode.url]) as client:
        texts = ["a", "Once upon a time", "The quick brown fox jumps over the lazy dog. " * 5]
        answers = set()
        for text in texts:
            body = asks(text, 24, path == COMPLETIONS[1])
            want = await alone(client, prefill[0], body, path)
            status, told = await client.ask(body, path)
            assert (status, said(told)) == (200, want)
            async with client.post({**body, "stream": True}, path) as answer:
                events = [line.removeprefix(b"data: ") async for line in answer.content if line.strip()]
            assert events.pop().strip() == b"[DONE]"
            assert "".join(said(json.loads(event)) for event in events) == want
            answers.add(want)
        assert len(answers) == len(texts)  # what is said depends on what was asked
        await until_idle(client, *prefill, decode)


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(600)
async def test_many_clients_at_once(tiny: Tinies) -> None:
    prefill, decode = tiny
    async with routed([it.url for it in prefill], [decode.url]) as client:
        bodies = [asks(f"client {i} asks something", 8) for i in range(8)]
        want = [await alone(client, prefill[0], body) for body in bodies]
        answers = await asyncio.gather(*(client.ask(body) for body in bodies * 8))
        assert [(status, said(told)) for status, told in answers] == [(200, text) for text in want] * 8
        await until_idle(client, *prefill, decode)
        metrics = await client.metrics()
        assert metrics['pd_proxy_requests_total{path="/v1/completions",status="200"}'] == 64
        assert metrics["pd_proxy_in_flight"] == 0


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(600)
async def test_a_client_that_leaves_frees_the_blocks_of_both_sides(tiny: Tinies) -> None:
    prefill, decode = tiny
    async with routed([it.url for it in prefill], [decode.url]) as client:
        # While its prompt is computed: 150 steps of 5 ms.
        asked = asyncio.create_task(client.ask(asks("x" * 9600, 8)))

        async def is_prefilled() -> bool:
            return any([(await it.state(client))["blocks_held"] for it in prefill])

        await client.until(is_prefilled)
        await cancel(asked)
        await until_idle(client, *prefill, decode)
        # While it is decoded: 4000 steps.
        async with client.streaming(**asks("a long story", 4000)) as answer:
            await answer.content.readany()
            assert (await decode.state(client))["blocks_held"] == 2
        await until_idle(client, *prefill, decode)
        # While it waits for blocks, announced and lent.
        async with client.streaming(**asks("x" * 8 * DECODE_BLOCKS, 4000)) as answer:
            await answer.content.readany()
            asked = asyncio.create_task(client.ask(asks("another", 4)))

            async def is_waiting() -> bool:
                return bool((await decode.state(client))["waiting"])

            await client.until(is_waiting)
            assert await is_prefilled()
            await cancel(asked)
            await until_idle(client, *prefill)
        await until_idle(client, *prefill, decode)


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(600)
async def test_a_killed_prefill_engine_is_replaced_before_its_kv_cache_was_fetched(tiny: Tinies) -> None:
    prefill, decode = tiny
    async with routed([it.url for it in prefill], [decode.url]) as client:
        body = asks("what was lost comes back", 16)
        want = await alone(client, decode, body)
        # Everything that decode has is taken, so the next request is prefilled, and waits to be fetched.
        async with client.streaming(**asks("x" * 8 * DECODE_BLOCKS, 4000)) as answer:
            await answer.content.readany()
            await until_idle(client, *prefill)
            asked = asyncio.create_task(client.ask(body))

            async def is_waiting() -> bool:
                return bool((await decode.state(client))["waiting"])

            await client.until(is_waiting)
            (victim,) = [it for it in prefill if (await it.state(client))["blocks_held"]]
            victim.process.kill()
        status, told = await asked
        assert (status, said(told)) == (200, want)
        (other,) = [it for it in prefill if it is not victim]
        await until_idle(client, other, decode)
        assert (await client.metrics())['pd_proxy_retries_total{why="kv_transfer_error"}'] == 1


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(600)
async def test_one_command_starts_it_all_and_ctrl_c_ends_it(short_path: Path) -> None:
    # Asyncio's handler for the signal is there before the command says that it is up, whatever a shell has turned off.
    command = (sys.executable, "-m", "docs.examples.service.pd_service", "--prefill", "1", "--dir", str(short_path))
    async with running(*command, stdout=asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(START_S):
            while b"curl" not in (line := await process.stdout.readline()):
                assert line
        url = line.split()[1].decode().removesuffix(COMPLETIONS[0])
        async with aiohttp.ClientSession() as session:
            status, told = await Client(url, session).ask(asks("hello", 5))
            assert (status, told["usage"]["completion_tokens"]) == (200, 5)
        answers = await ask_all(targets([str(short_path)])[1])
        assert [answer.account.engine_id.partition("-")[0] for answer in answers] == ["decode", "prefill"]
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), HEAR_S) == 0
        told = (await process.stderr.read()).decode()
        for name in ("prefill0", "decode0"):
            assert re.search(f"^{name}, process [0-9]+, listens on http://", told, re.MULTILINE)
        assert "stopping: 0 requests in flight" in told
        lasts = {path.stem: path.read_text().splitlines()[-1] for path in sorted(short_path.iterdir())}  # noqa: ASYNC240
        assert sorted(lasts) == [answer.account.engine_id for answer in answers]
        assert all(json.loads(last)["event"] == "engine_stopped" for last in lasts.values())
