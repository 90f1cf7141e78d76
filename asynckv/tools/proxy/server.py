"""The HTTP server of the router and of the example engines: errors in OpenAI's form, start and stop, and a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import structlog
from aiohttp import web

from asynckv.errors import ConfigError
from asynckv.observe.setup import configure_logging
from asynckv.tools.proxy.limits import Limits

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


class Refused(Exception):
    """An error that a client gets instead of an answer."""

    retry_after = "1"

    def __init__(self, status: int, text: str, kind: str = "invalid_request_error", body: bytes = b"") -> None:
        super().__init__(text)
        error = {"message": text, "type": kind, "param": None, "code": status}
        self.status, self.body = status, body or msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        return b"data: " + self.body + b"\n\n"

    def response(self) -> web.Response:
        headers = {"Retry-After": self.retry_after} if self.status == 503 else None
        return web.Response(body=self.body, status=self.status, headers=headers, content_type="application/json")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as JSON, also those of aiohttp itself (unknown path, body too large)."""
    try:
        return await handler(request)
    except Refused as exc:
        return exc.response()
    except web.HTTPException as exc:
        return Refused(exc.status, f"{request.method} {request.path}: {exc.reason}").response()
    except ConnectionError:
        raise  # the client is gone, and aiohttp knows it
    except Exception:
        log.exception("handler_failed", path=request.path)
        return Refused(500, "the server failed; see its log", "server_error").response()


READ_BUFFER, MAX_HEADERS = 65_536, 64
"""Bytes of a body that may wait to be read, and headers (of 8 KiB each), per connection."""
BACKLOG = 4096
"""Connections that may wait for the event loop; the kernel's own limit (`net.core.somaxconn`) is often the same."""
SPARE, PROBE_S = 16, 1.0
"""Connections above the limits that are read before refusal, and for how long, so that health probes succeed."""


class _Guard(asyncio.Protocol):
    """A new connection: passed to the HTTP server if there is room or it asks for /health, otherwise refused."""

    def __init__(self, server: web.Server, limits: Limits, waiting: set[_Guard]) -> None:
        self._server, self._limits, self._waiting, self._why = server, limits, waiting, ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, limits = transport, self._limits
        # With this option the kernel closes the connection of a client that reads nothing.
        idle_ms, peer = int(1000 * limits.idle_s), transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, idle_ms)
        host, *_ = transport.get_extra_info("peername")
        others = self._server.connections
        most = min(limits.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        if len(others) >= most:
            self._why = f"there are {len(others)} connections already"
        # The hosts are counted only if one of them can have so many, because this takes time for every connection.
        elif (
            len(others) >= limits.max_connections_per_host <= [x.peername and x.peername[0] for x in others].count(host)
        ):
            self._why = f"there are {limits.max_connections_per_host} connections of {host} already"
        self._waiting.add(self)
        if self._why and len(others) + len(self._waiting) <= most + SPARE:
            asyncio.get_running_loop().call_later(PROBE_S, self.data_received, b"")
        else:
            self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        if self not in self._waiting:
            return  # this connection is decided already
        self._waiting.remove(self)
        if not self._why or data.startswith(b"GET /health"):
            handler = self._server()
            self._transport.set_protocol(handler)
            handler.connection_made(self._transport)
            return handler.data_received(data)
        body = Refused(503, self._why, "overloaded").body
        head = "503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json"
        self._transport.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self._transport.close()


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, host: str, port: int, drain_s: float, limits: Limits | None = None
) -> AsyncIterator[str]:
    """Serve an application, and yield its URL. At the end, accept nothing new and finish the current requests."""
    limits = limits or Limits()
    # aiohttp closes a connection without a whole request after this time.
    bounded: dict[str, Any] = {"keepalive_timeout": limits.idle_s, "read_bufsize": READ_BUFFER}
    # A client that disconnects cancels its handler. At the end aiohttp waits twice before it cancels handlers.
    at_end: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": drain_s / 2}
    runner = web.AppRunner(app, access_log=None, max_headers=MAX_HEADERS, **bounded, **at_end)
    await runner.setup()
    listener: asyncio.Server | None = None
    try:
        http = runner.server
        assert http is not None
        try:
            waiting: set[_Guard] = set()
            listener = await asyncio.get_running_loop().create_server(
                lambda: _Guard(http, limits, waiting), host, port, backlog=BACKLOG
            )
        except OSError as exc:
            raise ConfigError(f"--host {host} --port {port}: {exc.strerror}") from exc
        where = f"[{host}]" if ":" in host else host
        yield f"http://{where}:{listener.sockets[0].getsockname()[1]}"
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()


def told_to_stop(at_once: Callable[[], None] = lambda: None) -> asyncio.Event:
    """Return an event that Ctrl-C or SIGTERM sets; a second signal calls `at_once`."""
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: at_once() if told.is_set() else told.set())
    return told


def log_as_json() -> None:
    configure_logging()
    # aiohttp logs a traceback for invalid HTTP; errors in handlers are logged by `errors_as_json`.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
