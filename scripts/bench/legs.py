"""Compare both legs at once with one leg after the other, behind vLLM: `python -m scripts.bench legs --help`.

Two engines of `tests/vllm`, each behind vLLM's own API server with a tokenizer, serve two routers by turns: one sends
both legs at once, the other one leg after the other. Prompts are texts. A step of the model takes as long as `--step`
says.

`gap` is the time from the end of the prefill's last step to the begin of the decode engine's first step that has the
KV, and `answer` that from a client's request to its answer.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from json import dumps
from typing import Annotated, Any

import aiohttp
import typer

from asynckv.tools.bench.processes import Failure
from asynckv.tools.bench.report import quantiles
from scripts import command
from scripts.bench.vllm import Step
from tests.lab.fleet import Fleet, Process

START_S, RUN_S = 300.0, 600.0
WAYS = {"in_turn": 0, "at_once": 32}
REQUESTS = {"1000:1": 24, "1000:32": 96, "32000:1": 12, "32000:32": 64}
CASES = {
    **{name: f"{number} requests of a turn" for name, number in REQUESTS.items()},
    "waits": "the decode engine while requests only follow: a step of its scheduler, and its CPU time",
    "clients": "many clients at once",
}
"""With a colon: tokens of a prompt, and requests in flight."""
AT_ONCE = re.compile(r'pd_proxy_seconds_count\{until="end",way="at_once"\} (\d+)')
WAITING, CACHED, SECONDS = (0, 1, 32), (0, 8192), 4.0
BLOCK = 16


class Service:
    """The engines, the routers and the clients."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet, self.session, self.rng = fleet, session, random.Random(0)
        self.engines: dict[str, Process] = {}
        self.urls: dict[str, str] = {}

    async def start(self, folder: str, tokens: int, num_blocks: int, overlaps: bool, step: Step) -> None:
        for name in ("prefill", "decode"):
            how: Any = {"folder": folder, "tokens": tokens, "num_blocks": num_blocks, "overlaps": overlaps}
            self.engines[name] = await self._fleet.start(name, "scripts.bench.versus.served:Served", name=name, **how)
        for name, engine in self.engines.items():
            self.urls[name] = await engine.ask("address", START_S)
            await engine.ask("model_time", python_s=step.python_ms / 1e3, outside_s=step.outside_ms / 1e3)
        at: Any = {name: self.urls[name] for name in self.engines}
        for way, ahead in WAYS.items():
            router = await self._fleet.start(way, "tests.lab.tickets:Proxy", **at, ahead=ahead, prefill_s=RUN_S)
            self.urls[way] = await router.ask("address")

    def prompt(self, tokens: int) -> str:
        return " ".join(f"w{self.rng.randrange(10, 30_000)}" for _ in range(tokens))

    async def ask(self, where: str, prompt: str, name: str = "", **more: Any) -> Any:
        """Send a request, and return the answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0} | more
        headers = {"X-Request-Id": name} if name else {}
        async with self.session.post(f"{self.urls[where]}/v1/completions", json=body, headers=headers) as answer:
            told = await answer.json()
            if answer.status != 200:
                raise Failure(f"{where} answered with status {answer.status}: {told}")
            return told

    async def steps(self) -> dict[str, Any]:
        return {name: await engine.ask("take_steps", RUN_S) for name, engine in self.engines.items()}

    async def at_once(self, way: str) -> int:
        """Return how many requests' legs a router has sent at once."""
        async with self.session.get(f"{self.urls[way]}/metrics") as answer:
            return sum(map(int, AT_ONCE.findall(await answer.text())))

    async def turn(self, way: str, tokens: int, in_flight: int, requests: int) -> dict[str, Any]:
        """Send requests through one router, and return their times."""
        prompts = {f"{way}-{secrets.token_hex(4)}-": self.prompt(tokens) for _ in range(requests)}
        left, answers = list(prompts), list[float]()

        async def client() -> None:
            while left:
                name = left.pop()
                began = time.monotonic()
                await self.ask(way, prompts[name], name)
                answers.append(time.monotonic() - began)

        await self.steps()
        before = await self.at_once(way)
        await asyncio.gather(*(client() for _ in range(in_flight)))
        told, found = await self.steps(), Counter(requests=requests, at_once=await self.at_once(way) - before)
        ends, begins = dict[str, float](), dict[str, float]()
        for _, ended, scheduled in told["prefill"]["steps"]:
            for name, first, last, prompt in scheduled:
                found["given_back"] += prompt < tokens
                found["prefills"] += first == 0 and prompt == tokens
                if last == prompt == tokens:
                    ends[_external(name)] = ended
        for began, _, scheduled in told["decode"]["steps"]:
            for name, first, *_ in scheduled:
                found["computed_by_decode"] += first == 0
                begins.setdefault(_external(name), began)
        steps = {side: [ended - began for began, ended, _ in told[side]["steps"]] for side in self.engines}
        gaps = [begins[name] - ended for name, ended in ends.items()]
        return {"gaps": gaps, "answers": answers, "steps": steps, "counts": found}


def _external(name: str) -> str:
    """Return the client's id of a request of an engine, such as `cmpl-ID-0-random`."""
    return name[len("cmpl-") :].rsplit("-", 2)[0]


def _times(name: str, seconds: Sequence[float]) -> dict[str, float]:
    found = quantiles(seconds, **{f"{name}_p50_ms": 0.5, f"{name}_p99_ms": 0.99})
    return {key: round(1e3 * value, 2) for key, value in found.items()}


async def compare(service: Service, case: str, rounds: int) -> dict[str, Any]:
    """Measure one case both ways, by turns; the first round is not counted."""
    tokens, in_flight = map(int, case.split(":"))
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            found = await service.turn(way, tokens, in_flight, REQUESTS[case] if number else 4)
            if number:
                taken[way].append(found)
    told = {
        way: {
            **_times("gap", [gap for turn in turns for gap in turn["gaps"]]),
            **_times("answer", [each for turn in turns for each in turn["answers"]]),
            **_times("prefill_step", [each for turn in turns for each in turn["steps"]["prefill"]]),
            **_times("decode_step", [each for turn in turns for each in turn["steps"]["decode"]]),
            **sum((turn["counts"] for turn in turns), Counter[str]()),
        }
        for way, turns in taken.items()
    }
    ratio = statistics.median(
        statistics.median(a["gaps"]) / statistics.median(b["gaps"])
        for a, b in zip(taken["at_once"], taken["in_turn"], strict=True)
    )
    return {**told, "gap_ratio": round(ratio, 3)}


async def waits(service: Service) -> list[dict[str, Any]]:
    """Measure the decode engine while requests follow tickets that no request brings."""
    lent = await service.ask("prefill", service.prompt(32), kv_transfer_params={"do_remote_decode": True})
    params = lent["kv_transfer_params"]["asynckv"]
    known = {name: params[name] for name in ("engine_id", "tp_size", "pp_size", "endpoints")}
    decode, found = service.engines["decode"], []
    for cached in CACHED:
        prefix = service.prompt(cached)
        if cached:
            await service.ask("decode", prefix)
        for number in WAITING:
            tasks = []
            for _ in range(number):
                follow = {"do_remote_prefill": True, "asynckv_follow": known | {"ticket": secrets.token_hex(16)}}
                text = f"{prefix} {service.prompt(BLOCK * 2)}"
                tasks.append(asyncio.create_task(service.ask("decode", text, kv_transfer_params=follow)))
            await asyncio.sleep(1.5)
            before = await decode.ask("take_steps")
            await asyncio.sleep(SECONDS)
            after = await decode.ask("take_steps")
            seconds = after["at"] - before["at"]
            each = {"followers": number, "cached": cached, **_times("schedule", after["schedule_s"])}
            each["steps_per_s"] = round(len(after["schedule_s"]) / seconds, 1)
            each["cpu_ms_per_s"] = round(1e3 * (after["cpu_s"] - before["cpu_s"]) / seconds, 1)
            found.append(each)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def crowd(service: Service, clients: int) -> dict[str, Any]:
    """Let clients come at once, both ways."""
    found = {}
    for way in WAYS:
        await service.turn(way, 64, 1, 2)  # a router learns from the first answers what the engines can do
        began = time.monotonic()
        told = await service.turn(way, 64, clients, clients)
        seconds = round(time.monotonic() - began, 2)
        found[way] = {"served": len(told["answers"]), "seconds": seconds, **told["counts"]}
        found[way] |= _times("answer", told["answers"])
    return found


async def measure(cases: Sequence[str], rounds: int, step: Step, clients: int, overlaps: bool) -> None:
    tokens = max([CACHED[-1] + 1024, *(int(case.split(":")[0]) for case in cases if ":" in case)])
    num_blocks = 40 * (tokens // BLOCK + 4) + 4096
    with tempfile.TemporaryDirectory() as folder:
        limit = aiohttp.TCPConnector(limit=0)
        async with Fleet() as fleet, aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(RUN_S)) as it:
            service = Service(fleet, it)
            try:
                await service.start(folder, tokens, num_blocks, overlaps, step)
                for case in cases:
                    found: dict[str, Any] = {"case": case}
                    if case == "waits":
                        found["waits"] = await waits(service)
                    else:
                        found |= await (
                            crowd(service, clients) if case == "clients" else compare(service, case, rounds)
                        )
                    print(dumps(found | {"step": str(step), "overlaps": overlaps, "load": os.getloadavg()}), flush=True)
            except BaseException:
                print(*fleet.last_words(), sep="\n", file=sys.stderr)
                raise


def legs(
    cases: Annotated[list[str] | None, typer.Argument(metavar="CASE", help="Cases; by default all.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Turns of each way.")] = 3,
    step: Annotated[str, typer.Option(help="PYTHON:OUTSIDE, ms of each forward in Python and then outside.")] = "1:4",
    clients: Annotated[int, typer.Option(min=1, max=4000, help="Clients that come at once.")] = 2000,
    overlaps: Annotated[bool, typer.Option("--overlaps", help="Overlap steps (async scheduling).")] = False,
) -> int:
    """Compare both legs at once with one after the other, behind vLLM; needs the environment of `tox run -e vllm`."""
    names = command.chosen(cases, CASES, "case")
    try:
        asyncio.run(measure(names, rounds, Step.parse(step), clients, overlaps))
    except Failure as exc:
        print(f"legs: {exc}", file=sys.stderr)
        return 1
    return 0


EPILOG = f"""
[bold]Cases[/bold]

{command.listed(CASES)}

`prefills` is to be `requests`, and `gap_p50_ms` at most the pull, a step of prefill and two of decode (four with
`--overlaps`), if both legs leave at once.

[bold]Exit status[/bold]  0 measured, 1 a process was lost or a request failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(legs, EPILOG)
