"""`asynckv proxy`: the options of the router."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from asynckv.errors import BackendError, ConfigError

EPILOG = """
[bold]What it is for[/bold]  a small, correct router

  It chooses the engine with the fewest requests under way, on one core.
  llm-d, the vLLM production stack and Dynamo choose by prefix and load:
  asynckv runs behind them as well.

[bold]Serves[/bold]

  POST /v1/completions, /v1/chat/completions, /v1/responses; streamed or not

  GET /v1/models; /metrics, for Prometheus; /health; /health/ready: how the
  engines are, and what waits for the longest

[bold]Engines[/bold]  are named in any of these ways, or in several

  --prefill http://10.0.0.7:8100 --decode http://10.0.0.9:8200

  --decode dns+http://decode:8000   # each address of the name is an engine

  --engines FILE   # a line for each, such as: decode http://10.0.0.9:8200

  FILE and names are looked at every --refresh-s. A new engine is used when
  its /health is good. One that vanishes finishes what it has. If FILE is
  broken, or a name is unknown, the engines stay as they were. To change
  FILE, write a new one and rename it.

[bold]Decoded without a transfer[/bold]  the decode engine computes the prompt, too

  That happens where no prefill is to be had, for several prompts in one
  request, and for vLLM's beam search and log-probabilities of the prompt.
  The log (decode_only) and pd_proxy_decode_only_total have the cause.

[bold]X-data-parallel-rank[/bold]  says which rank of a vLLM serves a request

  A client's goes to the decode engine. The prefill engine has other ranks,
  and chooses by itself; its params say which one it was.

[bold]Errors[/bold]  are JSON in OpenAI's form

  502: engines failed, or two were lost with this request. 503: none is up,
  all are busy, or the router is stopping. 504: one did not answer in time.
  499, in log and metrics: the client left

[bold]Examples[/bold]

  asynckv proxy --prefill http://10.0.0.7:8100 --decode http://10.0.0.9:8200

  asynckv proxy --engines engines.txt --host 0.0.0.0 --no-prefill refuse

  python -m docs.examples.service.pd_service   # tiny engines; in a clone

[bold]Exit status[/bold]  0 stopped in order, 2 bad input, or an extra is missing
"""
positive = partial(typer.Option, min=1e-6, max=1e6)
Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="An engine; repeat it.")]


def proxy(
    prefill: Urls = None,
    decode: Urls = None,
    engines: Annotated[Path | None, typer.Option(metavar="FILE", help="More engines; read again and again.")] = None,
    no_prefill: Annotated[
        Literal["compute", "refuse"],
        typer.Option(help="Where no prefill is to be had: decode engines compute the prompt, or the client gets 503."),
    ] = "compute",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one; the log names it.", min=0, max=65535)] = 8000,
    attempts: Annotated[int, typer.Option(help="How often a request is tried in all.", min=1)] = 3,
    connect_s: Annotated[float, positive(help="For connecting to an engine, and for its health.")] = 2.0,
    prefill_s: Annotated[float, positive(help="For one prefill.")] = 120.0,
    silence_s: Annotated[float, positive(help="Longest silence of a stream.")] = 300.0,
    health_s: Annotated[float, positive(help="How often engines are asked for their health.")] = 2.0,
    refresh_s: Annotated[float, positive(help="How often FILE is read, and names are resolved.")] = 5.0,
    max_requests: Annotated[int, typer.Option(help="More at a time are refused with 503.", min=1)] = 1024,
    max_body_mib: Annotated[float, positive(help="A larger body is refused with 413.")] = 16.0,
    max_bodies_mib: Annotated[float, positive(help="Of all bodies under way; more are refused with 503.")] = 1024.0,
    body_s: Annotated[float, positive(help="How long a body may take to arrive; then 408.")] = 60.0,
    idle_s: Annotated[float, positive(help="How long a connection may lack a whole header, or read nothing.")] = 75.0,
    max_connections: Annotated[
        int, typer.Option(help="Clients' connections; more get 503. A third of `ulimit -Hn` at most.", min=1)
    ] = 2048,
    max_connections_per_host: Annotated[int, typer.Option(help="Of one address, such as a balancer's.", min=1)] = 1536,
    drain_s: Annotated[float, positive(help="How long requests may go on after Ctrl-C or SIGTERM.")] = 30.0,
) -> int:
    """Route OpenAI's requests: prefill engines compute the prompt, decode engines fetch the KV cache and go on."""
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
