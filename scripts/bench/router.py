"""Compare `asynckv proxy` with a plain aiohttp proxy in turns: `python -m scripts.bench router --help`.

Two imitated engines and a generator of load run in processes of their own. Only the router differs from turn to turn.
The plain proxy does what a router must do at least: it sends a request to the prefill engine with
`do_remote_decode`, then to the decode engine with the params, and passes the pieces of the answer on. It has no health
checks, no retries, no limits, no metrics and no log.

CPU time is that of the router's process, from its start of work to its end; memory is the largest resident size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Self

import aiohttp
import typer
from aiohttp import web

from asynckv.tools.bench.report import quantiles
from asynckv.tools.diagnose.process import look
from scripts import command
from scripts.bench.versus.vllm_side import free_port
from tests.lab.fleet import Fleet, memory_kib

START_S, RUN_S, BACKLOG = 60.0, 300.0, 4096
PROMPT = " ".join(["word"] * 300)


@dataclass(frozen=True, slots=True)
class Case:
    """One load: clients, requests of each (one after the other on one connection), and events of an answer."""

    clients: int
    each: int
    events: int
    about: str


CASES = {
    "steady": Case(100, 10, 20, "100 clients that keep their connections, 10 answers of 20 events each"),
    "burst-1000": Case(1000, 1, 5, "1,000 clients at once, one answer of 5 events each"),
    "burst-2000": Case(2000, 1, 5, "2,000 clients at once"),
}


# -- processes -------------------------------------------------------------------------------------


class Served:
    """A server of aiohttp in a process of its own."""

    def __init__(self) -> None:
        self._app = web.Application(client_max_size=2**24)

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(self._app, access_log=None)
        await self._runner.setup()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        await web.SockSite(self._runner, self._socket, backlog=BACKLOG).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def address(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"


class Imitation(Served):
    """An engine that computes nothing: params for a prefill, otherwise a stream of events, 10 ms apart."""

    def __init__(self, *, events: int) -> None:
        super().__init__()
        self._events = events
        self._app.router.add_post("/v1/completions", self._complete)
        self._app.router.add_get("/health", self._health)
        self._app.router.add_get("/v1/models", self._health)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            params = {
                "do_remote_prefill": True,
                "asynckv": {"ranks": [["127.0.0.1", 1]] * 4, "blocks": list(range(40))},
            }
            return web.json_response({"choices": [{"index": 0, "text": "a"}], "kv_transfer_params": params})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
        event = json.dumps({"id": "cmpl", "object": "text_completion", "model": "m", "choices": [choice]}).encode()
        for _ in range(self._events):
            await response.write(b"data: " + event + b"\n\n")
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response


class Plain(Served):
    """The least that a router between two legs does."""

    def __init__(self, *, prefill: str, decode: str) -> None:
        super().__init__()
        self._prefill, self._decode = prefill, decode
        self._app.router.add_post("/v1/completions", self._complete)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(RUN_S)
        )
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._session.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        async with self._session.post(self._prefill + request.path, json=first) as answer:
            body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
        async with self._session.post(self._decode + request.path, json=body) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        return response


class Load:
    """A generator of load, which reads answers without a library, so that it is cheap."""

    async def send(self, port: int, clients: int, each: int) -> dict[str, Any]:
        body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 20, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        data, ends, seconds = f"{head}\r\n\r\n".encode() + body, Counter[str](), []

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(each):
                began = time.monotonic()
                writer.write(data)
                head = await reader.readuntil(b"\r\n\r\n")
                status = head.split(maxsplit=2)[1].decode()
                if b"chunked" in head:
                    while (size := int(await reader.readline(), 16)) or await reader.readline() != b"\r\n":
                        await reader.readexactly(size + 2)
                else:
                    fields = dict(line.lower().split(b": ") for line in head.splitlines()[1:] if line)
                    await reader.readexactly(int(fields[b"content-length"]))
                ends[status] += 1
                seconds.append(time.monotonic() - began)
            writer.close()

        async def counted() -> None:
            try:
                await client()
            except (OSError, EOFError) as exc:
                ends[type(exc).__name__] += 1

        await asyncio.gather(*(counted() for _ in range(clients)))
        return {"ends": dict(ends), "seconds": seconds}


# -- one turn --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[int]:
    quiet = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*arguments, stdout=quiet, stderr=quiet)
    try:
        yield child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await child.wait()
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def _until_it_answers(port: int, body: bytes) -> None:
    """Wait for the first good answer, after which connections and code are warm."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                url = f"http://127.0.0.1:{port}/v1/completions"
                async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                    await answer.read()
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


Arm = Callable[[Fleet, str, str, int], contextlib.AbstractAsyncContextManager[tuple[int, int]]]


@contextlib.asynccontextmanager
async def plain(fleet: Fleet, prefill: str, decode: str, _port: int) -> AsyncIterator[tuple[int, int]]:
    worker = await fleet.start("plain", "scripts.bench.router:Plain", prefill=prefill, decode=decode)
    yield int((await worker.ask("address")).rpartition(":")[2]), worker.pid


def program(*command: str) -> Arm:
    """Return an arm that runs a router as a program."""

    @contextlib.asynccontextmanager
    async def run(_fleet: Fleet, prefill: str, decode: str, port: int) -> AsyncIterator[tuple[int, int]]:
        async with _process(*command, "--prefill", prefill, "--decode", decode, "--port", str(port)) as pid:
            yield port, pid

    return run


async def turn(arm: Arm, case: Case, spin: int) -> dict[str, Any]:
    """Run one router under one load."""
    async with Fleet() as fleet, contextlib.AsyncExitStack() as stack:
        imitation = "scripts.bench.router:Imitation"
        engines = [await fleet.start(role, imitation, events=case.events) for role in ("prefill", "decode")]
        load = await fleet.start("load", "scripts.bench.router:Load")
        prefill, decode = [await engine.ask("address") for engine in engines]
        port, pid = await stack.enter_async_context(arm(fleet, prefill, decode, free_port()))
        await _until_it_answers(port, json.dumps({"model": "m", "prompt": PROMPT, "stream": True}).encode())
        for _ in range(spin):
            await stack.enter_async_context(_process(sys.executable, "-c", "while True: pass"))
        cpu_s = look(pid).cpu_s
        found = await load.ask("send", RUN_S, port=port, clients=case.clients, each=case.each)
        cpu_s = look(pid).cpu_s - cpu_s
        served = found["ends"].get("200", 0)
        return {
            "served": served,
            "of": case.clients * case.each,
            "ends": found["ends"],
            "cpu_ms_a_request": 1e3 * cpu_s / max(served, 1),
            **quantiles(found["seconds"], p50_s=0.5, p99_s=0.99),
            "mib": memory_kib("VmHWM", pid) >> 10,
        }


async def _compare(arms: dict[str, Arm], names: list[str], rounds: int, spin: int, out: Any) -> None:
    for name in names:
        turns: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for number in range(rounds):
            for arm in list(arms)[:: -1 if number % 2 else 1]:
                turns[arm].append(await turn(arms[arm], CASES[name], spin))
                print(f"[{name}] {arm}: {turns[arm][-1]}", file=sys.stderr, flush=True)
        for arm, each in turns.items():
            ratios = [a["cpu_ms_a_request"] / b["cpu_ms_a_request"] for a, b in zip(each, turns["plain"], strict=True)]
            record = {"case": name, "router": arm, "spin": spin, "served": [it["served"] for it in each]}
            record |= {"of": each[0]["of"], "cpu_of_plain": round(statistics.median(ratios), 2)}
            for figure in ("cpu_ms_a_request", "p50_s", "p99_s", "mib"):
                record[figure] = round(statistics.median(it[figure] for it in each), 3)
            print(json.dumps(record), file=out, flush=True)


def router(
    cases: command.Scenarios = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Turns of each router.")] = 3,
    spin: Annotated[int, typer.Option(min=0, max=64, help="Processes that burn a core each meanwhile.")] = 0,
    vllm_router: Annotated[str, typer.Option(metavar="FILE", help="Also compare this program, vllm-router.")] = "",
    json: command.Json = "-",
) -> int:
    """Compare `asynckv proxy` with a plain aiohttp proxy in turns, between imitated engines."""
    chosen = command.chosen(cases, CASES)
    arms: dict[str, Arm] = {"plain": plain, "asynckv": program(sys.executable, "-m", "asynckv", "proxy")}
    if vllm_router:
        quiet = ("--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_port()))
        arms["vllm-router"] = program(vllm_router, "--vllm-pd-disaggregation", *quiet)
    with command.output(json) as out:
        asyncio.run(_compare(arms, chosen, rounds, spin, out))
    return 0


EPILOG = f"""
[bold]Cases[/bold]

{command.listed({name: case.about for name, case in CASES.items()})}

[bold]Example[/bold]

  python -m scripts.bench router steady burst-1000 --rounds 5 | jq .cpu_of_plain

[bold]Exit status[/bold]  0 measured, 2 bad input, 130 Ctrl-C
"""
main = command.script(router, EPILOG)
