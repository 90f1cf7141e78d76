"""`/metrics`, `/healthz` and `/readyz` over HTTP, for applications that serve no HTTP of their own.

The endpoint runs on its own threads, so it works with every form of an engine, and answers when the engine's loop does
not. It ends with the last engine. It does not authenticate clients, so it listens on loopback by default.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer
except ImportError as exc:
    raise ImportError("metrics need prometheus_client: pip install 'asynckv[metrics]'") from exc

from asynckv.arguments import MAX_NAME, flag, integer, is_loopback_host, number, text
from asynckv.arguments import shown as as_shown
from asynckv.core.lifecycle import LifeState
from asynckv.errors import ConfigError, EngineClosed, LocalProtocolError
from asynckv.observe.metrics import Metrics
from asynckv.observe.observer import Observed, Observer

Environ = dict[str, Any]
Respond = Callable[..., Any]

SILENT_S = 10.0  # seconds of silence after which a client's connection is closed

MOST_S = 30.0
"""Seconds that a client may take in all, because one that sends a letter every few seconds is never silent."""

MAX_CLIENTS = 32
"""Limit of connections, each with a thread. A further one closes the oldest, so silent clients keep no other out."""

POLL_S = 0.1


class _Server(ThreadingWSGIServer):
    def __init__(self, address: tuple[str, int], *args: Any) -> None:
        self._until: dict[Any, float] = {}
        """Client -> when it must be done. The acceptor makes entries, and each thread removes its own."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, *args)

    def _hang_up(self, request: Any) -> None:
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        oldest = next(iter(tuple(self._until)), None)
        if oldest is not None and len(self._until) >= MAX_CLIENTS:
            self._until.pop(oldest, None)
            self._hang_up(oldest)
        self._until[request] = time.monotonic() + MOST_S
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._until.pop(request, None)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._until.pop(request, None)

    def service_actions(self) -> None:
        """Close connections that take too long; called a few times a second."""
        now = time.monotonic()
        for request, until in tuple(self._until.items()):
            if now > until:
                self._hang_up(request)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, because most are clients that hang up."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def address_string(self) -> str:
        """Return the address, because looking up its name may take long."""
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because probes come every second."""


class MetricsEndpoint:
    """Serve metrics and health over HTTP while open: `with MetricsEndpoint(Metrics(engine), port=9400): ...`.

    `/metrics` shows everything in the registry. `/healthz` is 200 if the event loop of every engine answers and its
    data plane serves. `/readyz` is 200 if every engine is started and takes new work. Otherwise they are 503, with the
    reason in a JSON body. An engine is not healthy if its loop is away for long. One that drains is healthy, but not
    ready.

    Args:
        metrics: The metrics to serve, and with them the engines that health is asked of.
        host: The address to listen on, which must be loopback unless `allow_remote`.
        port: The port to listen on; 0 lets the system choose.
        registry: The registry that `/metrics` shows, such as `prometheus_client.REGISTRY` with the application's own
            metrics; only `metrics` if left out.
        wait_s: Seconds within which an engine's loop must answer, or else counts as away.
        allow_remote: Allow other addresses than loopback. Every client that reaches the address may read.

    Raises:
        ConfigError: An argument is out of range, or the address is not loopback.

    Attributes:
        url: The URL of the endpoint, once it listens.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        registry: CollectorRegistry | None = None,
        wait_s: float = 1.0,
        allow_remote: bool = False,
    ) -> None:
        if not isinstance(metrics, Metrics):
            raise ConfigError(f"metrics is {as_shown(metrics)}; give asynckv.Metrics(engine)")
        self._host = text("host", host, MAX_NAME, 1, ConfigError)
        self._port = integer("port", port, 0, 65535, ConfigError)
        self._wait_s = number("wait_s", wait_s, 0, 60.0, ConfigError)
        if not flag("allow_remote", allow_remote, ConfigError) and not is_loopback_host(host):
            raise ConfigError(
                f"host {host!r} is not a loopback address, and clients are not authenticated: any that reaches it can "
                f"read engine ids, versions and figures; give 127.0.0.1, or allow_remote=True on a trusted network"
            )
        self._metrics = metrics
        if registry is None:
            registry = CollectorRegistry()
            registry.register(metrics)
        self._show = make_wsgi_app(registry)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._watcher = _Watcher(self)
        self._is_over = False
        self.url = ""

    def start(self) -> Self:
        """Start to listen.

        Raises:
            ConfigError: The address cannot be bound.
            LocalProtocolError: The endpoint listens already, or has ended.
        """
        if self._server is not None:
            raise LocalProtocolError(f"the endpoint listens at {self.url} already")
        if self._is_over:
            raise LocalProtocolError("the endpoint has ended; make a new one")
        try:
            server = make_server(self._host, self._port, self._answer, _Server, _Handler)
        except (OSError, OverflowError) as exc:
            raise ConfigError(f"metrics cannot be served on {self._host} port {self._port}: {exc}") from exc
        self._server = server
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{server.server_port}"
        for engine in self._metrics.engines:
            engine.observe(self._watcher)
        self._thread = threading.Thread(
            target=server.serve_forever, args=(POLL_S,), name="asynckv-metrics", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening. Idempotent, and allowed from any thread."""
        server, self._server, self._is_over = self._server, None, True
        if server is None:
            return
        for engine in self._metrics.engines:
            engine.unobserve(self._watcher)
        server.shutdown()
        server.server_close()

    def __enter__(self) -> Self:
        return self if self._server is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answers -----------------------------------------------------------------------------------

    def _answer(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _say(respond, "405 Method Not Allowed", {"error": "only GET is answered"})
        match environ.get("PATH_INFO"):
            case "/metrics":
                shown: Iterable[bytes] = self._show(environ, respond)
                return shown
            case "/healthz" | "/readyz" as path:
                return self._judge(respond, must_run=path == "/readyz")
            case _:
                return _say(respond, "404 Not Found", {"error": "there are /metrics, /healthz and /readyz"})

    def _judge(self, respond: Respond, *, must_run: bool) -> Iterable[bytes]:
        """Answer whether each engine is healthy, and takes new work if it `must_run`, with reasons if not."""
        found = []
        for engine in self._metrics.engines:
            state, why = self._condition(engine)
            if must_run and not why and state != LifeState.RUNNING.value:
                why = f"the engine is {state}"
            found.append({"engine_id": engine.engine_id, "rank": engine.rank, "ok": not why, "why": why})
        is_well = bool(found) and all(each["ok"] for each in found)
        body = {"ok": is_well, "engines": found} | ({} if found else {"why": "no engine is shown"})
        return _say(respond, "200 OK" if is_well else "503 Service Unavailable", body)

    def _condition(self, engine: Observed) -> tuple[str, str]:
        """Return an engine's state, and its fault, if any; not to have started yet is no fault."""
        try:
            state, plane_down = engine.ask(engine.condition, self._wait_s)
        except EngineClosed:
            return "not started", ""
        except TimeoutError:
            return "", f"the event loop did not answer within {self._wait_s:g} s"
        return state, plane_down or ("something is stuck in the data plane" if state == LifeState.STUCK.value else "")


class _Watcher(Observer):
    def __init__(self, endpoint: MetricsEndpoint) -> None:
        self._endpoint, self._num_stopped = endpoint, 0

    def engine_stopped(self) -> None:
        """Close the endpoint with the last engine, on another thread, because this is the engine's loop."""
        self._num_stopped += 1
        if self._num_stopped >= len(self._endpoint._metrics.engines):
            threading.Thread(target=self._endpoint.close, name="asynckv-metrics-end", daemon=True).start()


def _say(respond: Respond, status: str, body: dict[str, Any]) -> list[bytes]:
    data = json.dumps(body).encode() + b"\n"
    headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Cache-Control": "no-store"}
    respond(status, [*headers.items()])
    return [data]
