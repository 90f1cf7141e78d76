"""What the router and the tiny engine have in common as HTTP servers: errors in OpenAI's form, a life, a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from asynckv.errors import ConfigError

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


class Refused(Exception):
    """What a client is told instead of an answer.

    Args:
        body: Said instead of an error of our own: an engine's, passed on.
    """

    def __init__(self, status: int, text: str, kind: str = "invalid_request_error", body: bytes = b"") -> None:
        super().__init__(text)
        error = {"message": text, "type": kind, "param": None, "code": status}
        self.status, self.body = status, body or msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Say it as the last event of a stream, wherever that was cut."""
        return b"\n\ndata: " + self.body + b"\n\n"

    def response(self) -> web.Response:
        """Say it as an answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return web.Response(body=self.body, status=self.status, headers=headers, content_type="application/json")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer whatever was raised, also by aiohttp itself (no such path, a body too large)."""
    try:
        return await handler(request)
    except Refused as exc:
        return exc.response()
    except web.HTTPException as exc:
        return Refused(exc.status, f"{request.method} {request.path}: {exc.reason}").response()
    except ConnectionError:
        raise  # nobody is there to hear of it, as aiohttp knows
    except Exception:
        log.exception("handler_failed", path=request.path)
        return Refused(500, "the server failed; its log says how", "internal_error").response()


@contextlib.asynccontextmanager
async def serving(app: web.Application, host: str, port: int, drain_s: float) -> AsyncIterator[str]:
    """Serve an application; the value is its URL. At the end it takes nothing new, and finishes what it has begun."""
    # A client that leaves cancels its handler. At the end aiohttp waits for handlers twice before it cancels them.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=drain_s / 2, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as exc:
            raise ConfigError(f"--host {host} --port {port}: {exc.strerror}") from exc
        yield site.name
    finally:
        await runner.cleanup()


async def until_told() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()


def log_as_json() -> None:
    """Write events as lines of JSON on stderr."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # It writes a traceback for whoever sends what is no HTTP; what fails in a handler is logged by `errors_as_json`.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
