"""`asynckv proxy`: the options of the router."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from asynckv.errors import BackendError, ConfigError

positive = partial(typer.Option, min=1e-6, max=1e6)
Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="URL of an engine; repeat the option for more.")]


def proxy(
    prefill: Urls = None,
    decode: Urls = None,
    engines: Annotated[Path | None, typer.Option(metavar="FILE", help="More engines; read every --refresh-s.")] = None,
    no_prefill: Annotated[
        Literal["compute", "refuse"],
        typer.Option(help="If no prefill is available: decode engines compute the prompt, or the client gets 503."),
    ] = "compute",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one, which the log names.", min=0, max=65535)] = 8000,
    attempts: Annotated[int, typer.Option(help="Attempts per request, including the first.", min=1)] = 3,
    connect_s: Annotated[float, positive(help="Time-out for connecting to an engine, and for its health check.")] = 2.0,
    prefill_s: Annotated[float, positive(help="Time-out for one prefill.")] = 120.0,
    silence_s: Annotated[float, positive(help="Longest time without data in a stream from an engine.")] = 300.0,
    health_s: Annotated[float, positive(help="Interval between health checks of an engine.")] = 2.0,
    refresh_s: Annotated[float, positive(help="Interval at which FILE is read and names are resolved.")] = 5.0,
    max_requests: Annotated[int, typer.Option(help="Requests in flight; more are refused with 503.", min=1)] = 1024,
    max_body_mib: Annotated[float, positive(help="Largest body; a larger one is refused with 413.")] = 16.0,
    max_bodies_mib: Annotated[float, positive(help="Largest sum of all bodies; more are refused with 503.")] = 1024.0,
    body_s: Annotated[float, positive(help="Time-out for the arrival of a body; then 408.")] = 60.0,
    idle_s: Annotated[float, positive(help="Time-out for lack of a whole header, or for reading nothing.")] = 75.0,
    max_connections: Annotated[
        int, typer.Option(help="Connections of clients; more get 503. At most a third of `ulimit -Hn`.", min=1)
    ] = 2048,
    max_connections_per_host: Annotated[int, typer.Option(help="Per client address, or load balancer.", min=1)] = 1536,
    drain_s: Annotated[float, positive(help="Time for requests to finish after Ctrl-C or SIGTERM.")] = 30.0,
) -> int:
    """Route OpenAI requests: prefill engines compute the prompt, decode engines fetch the KV cache and generate."""
    try:
        import asyncio

        from asynckv.tools.proxy.engines import Limits
        from asynckv.tools.proxy.router import Router, serve
        from asynckv.tools.proxy.server import Bounds, log_as_json
    except ModuleNotFoundError as exc:
        raise BackendError(f"the router needs {exc.name}: pip install 'asynckv[proxy]'") from exc
    for role, urls in (("prefill", prefill), ("decode", decode)):
        if not urls and engines is None:
            raise ConfigError(f"there is no {role} engine; give --{role} URL, or --engines FILE")
    limits = Limits(connect_s, prefill_s, silence_s, health_s, refresh_s)
    log_as_json()
    router = Router(
        prefill or (),
        decode or (),
        limits,
        file=engines,
        is_computed=no_prefill == "compute",
        attempts=attempts,
        max_requests=max_requests,
        max_body_mib=max_body_mib,
        max_bodies_mib=max_bodies_mib,
        body_s=body_s,
        drain_s=drain_s,
    )
    asyncio.run(serve(router, host, port, drain_s, Bounds(idle_s, max_connections, max_connections_per_host)))
    return 0
