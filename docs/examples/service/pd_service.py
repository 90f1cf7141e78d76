"""Run a prefill/decode service on this host: `python -m docs.examples.service.pd_service`.

This starts tiny engines (`tiny_engine.py`) as processes, and a router (`asynckv proxy`) in front of them, and prints
commands to try. All engines write their logs into one directory, and listen there for questions, so that `asynckv why`
needs only its name. Ctrl-C ends everything; the logs stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from aiohttp import web

from asynckv.tools.bench.processes import Failure
from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.router import GRACE_S, Router
from asynckv.tools.proxy.server import log_as_json, serving, told_to_stop
from scripts import command
from tests.lab.fleet import Fleet, Process

START_S = 300.0
DRAIN_S = 5.0

TRY = """
{prefill} prefill and {decode} decode engines behind one router: {url}

Try

  curl {url}/v1/completions -d '{{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}}'
  curl {url}/health/ready
  curl {url}/metrics
  asynckv why {directory}      # is all well? which requests hold blocks?
  kill -9 PROCESS   # of an engine, as listed above
  asynckv why {directory}      # what happened?

The weights are random, so the answers are, too. Ctrl-C ends everything; the logs in {directory} stay.
"""


async def serve(prefill: int, decode: int, host: str, port: int, directory: Path) -> None:
    """Start engines and router, and serve until a signal to stop."""
    async with serving(web.Application(), host, port, GRACE_S):
        pass  # check the port first, because starting the engines takes long
    names = [f"{role}{i}" for role, count in (("prefill", prefill), ("decode", decode)) for i in range(count)]
    print(
        f"starting {len(names)} engines, each of which loads torch and transformers first", file=sys.stderr, flush=True
    )

    async def address(name: str, process: Process) -> str:
        url: str = await process.ask("address", START_S)
        print(f"{name}, process {process.pid}, listens on {url}", file=sys.stderr, flush=True)
        return url

    told = told_to_stop()
    async with Fleet() as fleet:
        try:
            started = [
                await fleet.start(
                    name,
                    "docs.examples.service.tiny_engine:TinyEngine",
                    role=name.rstrip("0123456789"),
                    directory=os.fspath(directory),
                )
                for name in names
            ]
            urls = await asyncio.gather(*map(address, names, started))
        except Failure as exc:
            raise Failure("\n".join([str(exc), *fleet.last_words()])) from exc
        router = Router(urls[:prefill], urls[prefill:], Limits(drain_s=DRAIN_S))
        async with serving(router.app(), host, port, GRACE_S) as url:
            print(TRY.format(prefill=prefill, decode=decode, url=url, directory=quote(str(directory))), flush=True)
            await told.wait()
            count = router.num_in_flight
            print(f"stopping: {count} requests in flight, with {DRAIN_S:g} s to end", file=sys.stderr, flush=True)
        print(
            f"ending {len(started)} engines, which takes some seconds; their logs stay in {directory}",
            file=sys.stderr,
            flush=True,
        )
        await asyncio.gather(*(process.end() for process in started), return_exceptions=True)


def service(
    prefill: Annotated[int, typer.Option(help="Number of prefill engines.")] = 2,
    decode: Annotated[int, typer.Option(help="Number of decode engines.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the router.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the router; 0 for a free one.")] = 0,
    dir: Annotated[
        Path | None,
        typer.Option(help="Directory for logs and sockets; by default a new one, which stays.", metavar="DIR"),
    ] = None,
) -> int:
    """Start tiny prefill and decode engines with a router on this host, and print commands to try."""
    for name, value in (("--prefill", prefill), ("--decode", decode)):
        command.check(1 <= value <= 16, f"{name} {value} is outside 1 ... 16")
    command.check(0 <= port < 65536, f"--port {port} is outside 0 ... 65535")
    log_as_json()
    directory = Path(tempfile.mkdtemp(prefix="asynckv-service-")) if dir is None else dir.resolve()
    try:
        asyncio.run(serve(prefill, decode, host, port, directory))
    except Failure as exc:
        print(f"pd_service: {exc}", file=sys.stderr)
        return 1
    finally:
        if dir is None:
            with contextlib.suppress(OSError):  # a directory with files stays
                directory.rmdir()
    return 0


EPILOG = """
[bold]Exit status[/bold]  0 stopped by Ctrl-C or SIGTERM, 1 an engine did not start, 2 bad input, or the port is taken
"""
main = command.script(service, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
