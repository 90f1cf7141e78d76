"""`asynckv proxy`: the options of the router."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from asynckv.errors import BackendError, ConfigError
from asynckv.tools.output import HELP, taking_options
from asynckv.tools.proxy.limits import Limits

Urls = Annotated[list[str] | None, typer.Option(metavar="URL", help="URL of an engine; repeat the option for more.")]


@partial(taking_options, declared=Limits)
def proxy(
    prefill: Urls = None,
    decode: Urls = None,
    engines: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP["proxy"]["engines"])] = None,
    no_prefill: Annotated[Literal["compute", "refuse"], typer.Option(help=HELP["proxy"]["no_prefill"])] = "compute",
    host: Annotated[str, typer.Option(help=HELP["proxy"]["host"])] = "127.0.0.1",
    port: Annotated[int, typer.Option(help=HELP["proxy"]["port"], min=0, max=65535)] = 8000,
    **given: Any,
) -> int:
    """Route OpenAI requests: prefill engines compute the prompt, decode engines fetch the KV cache and generate."""
    try:
        import asyncio

        from asynckv.tools.proxy.router import Router, serve
        from asynckv.tools.proxy.server import log_as_json
    except ModuleNotFoundError as exc:
        raise BackendError(f"the router needs {exc.name}: pip install 'asynckv[proxy]'") from exc
    for role, urls in (("prefill", prefill), ("decode", decode)):
        if not urls and engines is None:
            raise ConfigError(f"there is no {role} engine; give --{role} URL, or --engines FILE")
    log_as_json()
    limits = Limits(**given)
    router = Router(prefill or (), decode or (), limits, file=engines, is_computed=no_prefill == "compute")
    asyncio.run(serve(router, host, port, limits))
    return 0
