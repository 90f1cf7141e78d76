"""Measure the time from a fault to its alert: real engines, a router, and a real Prometheus with the deployed rules.

Each fault has a service of its own: two prefill and two decode engines (`tests/lab/stepper.py`), `asynckv proxy`, and
20 requests a second. `prometheus` scrapes and evaluates as deploy/prometheus/prometheus.yml says. `rollout` restarts
all engines in order, one after the other, each away for 25 s.

    python -m tests.lab.alert_live                      # all faults, and the rollout
    python -m tests.lab.alert_live decode_killed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from asynckv.tools.proxy.limits import Limits
from asynckv.tools.proxy.router import Router
from asynckv.tools.proxy.server import log_as_json, serving
from tests.lab.fleet import Fleet, Process
from tests.lab.why_live import ask

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
PER_S, WARM_S, PATIENCE_S = 20.0, 22.0, 75.0
AWAY_S, APART_S = 25.0, 12.0
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


class Service:
    """Engines, a router, a load and a Prometheus."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.folder, self.fleet = folder, fleet
        self.engines: dict[str, Process] = {}
        self.ports: dict[str, list[int]] = {}
        self.start_s = 0.0  # how long a start took at least
        self.answers, self.is_loaded = Counter[int](), True
        self.fired: dict[str, float] = {}
        self._ids = itertools.count()

    async def start(self, name: str) -> None:
        began, (port, metrics_port) = time.monotonic(), self.ports.get(name, (0, 0))
        here: dict[str, Any] = {
            "name": name,
            "directory": str(self.folder / "logs"),
            "port": port,
            "metrics_port": metrics_port,
        }
        process = self.engines[name] = await self.fleet.start(name, "tests.lab.stepper:Stepper", **here)
        urls = await process.ask("addresses", 60.0)
        self.start_s = min(self.start_s or 60.0, time.monotonic() - began)
        self.ports[name] = [int(url.rpartition(":")[2]) for url in urls]

    def urls(self, role: str) -> list[str]:
        return [f"http://127.0.0.1:{port}" for name, (port, _) in self.ports.items() if name.startswith(role)]

    async def params(self) -> dict[str, Any]:
        params: dict[str, Any] = await self.engines["prefill-0"].ask("make", request_id=f"mine-{next(self._ids)}")
        return params

    async def send_requests(self, router: str) -> None:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as all_,
        ):

            async def one() -> None:
                body = {"prompt": "a", "max_tokens": 1}
                try:
                    async with session.post(f"{router}/v1/completions", json=body) as answer:
                        await answer.read()
                        self.answers[answer.status] += 1
                except (aiohttp.ClientError, TimeoutError):
                    self.answers[0] += 1

            while True:
                if self.is_loaded:
                    all_.create_task(one())
                await asyncio.sleep(1 / PER_S)

    async def watch_alerts(self, prometheus: str) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(0.5)
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{prometheus}/api/v1/alerts") as answer:
                        found = (await answer.json())["data"]["alerts"]
                    for alert in (x for x in found if x["state"] == "firing"):
                        self.fired.setdefault(alert["labels"]["alertname"], time.monotonic())


def configuration(service: Service, router: str) -> str:
    """Return the deployed configuration, with the addresses of this service."""
    text = (DEPLOY / "prometheus.yml").read_text()
    targets = [f"127.0.0.1:{port}" for _, port in service.ports.values()]
    text = text.replace("['127.0.0.1:9400']", json.dumps(targets))
    return text.replace("['127.0.0.1:8000']", json.dumps([router.removeprefix("http://")]))


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Service]:
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not installed: apt-get install prometheus"
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="alert-")))
        service = Service(folder, await stack.enter_async_context(Fleet()))
        await asyncio.gather(*map(service.start, NAMES))
        router = Router(service.urls("prefill"), service.urls("decode"), Limits(drain_s=1.0))
        url = await stack.enter_async_context(serving(router.app(), "127.0.0.1", 0, 2.0))
        shutil.copy(DEPLOY / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(configuration(service, url))
        where = f"--web.listen-address=127.0.0.1:{free_port()}"
        options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", where)
        with (folder / "prometheus.log").open("wb") as log:
            prometheus = await asyncio.create_subprocess_exec(program, *options, stdout=log, stderr=log)
        tasks = [
            asyncio.create_task(service.send_requests(url)),
            asyncio.create_task(service.watch_alerts("http://" + where.partition("=")[2])),
        ]
        try:
            await asyncio.sleep(WARM_S)
            yield service
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            prometheus.terminate()
            await prometheus.wait()
            for engine in service.engines.values():
                if not engine.is_lost:
                    with contextlib.suppress(ProcessLookupError):
                        engine.signal(signal.SIGCONT)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# -- what is done ------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, Callable[[Service], Awaitable[None]]]] = {}
"""Alert that has to fire, and what is done."""


def fault(alert: str) -> Callable[[Callable[[Service], Awaitable[None]]], None]:
    def register(inject: Callable[[Service], Awaitable[None]]) -> None:
        FAULTS[inject.__name__] = alert, inject

    return register


@fault("AsynckvSchedulerStuck")
async def decode_scheduler_hangs(service: Service) -> None:
    await service.engines["decode-0"].ask("hang")


@fault("AsynckvSchedulerStuck")
async def prefill_never_lends(service: Service) -> None:
    await service.engines["prefill-0"].ask("hang")


@fault("AsynckvParamsGivenTwice")
async def params_given_to_two_engines(service: Service) -> None:
    for _ in range(4):
        params = await service.params()
        pulls = [service.engines[x].ask("pull", request_id="twice", params=params) for x in ("decode-0", "decode-1")]
        await asyncio.gather(*pulls)


@fault("AsynckvParamsGivenTwice")
async def params_given_twice_to_one_engine(service: Service) -> None:
    for i in range(4):
        params = await service.params()
        for name in ("first", "second"):
            await service.engines["decode-0"].ask("pull", request_id=f"{name}-{i}", params=params)


@fault("AsynckvEngineLost AsynckvProcessLost")
async def decode_killed(service: Service) -> None:
    await service.engines["decode-0"].kill()


@fault("AsynckvEngineLost AsynckvProcessLost AsynckvPeersGone")
async def prefill_killed(service: Service) -> None:
    await service.engines["prefill-0"].kill()


@fault("AsynckvEngineLost AsynckvProcessLost")
async def decode_killed_while_idle(service: Service) -> None:
    service.is_loaded = False
    await asyncio.sleep(2.0)
    await service.engines["decode-0"].kill()


@fault("AsynckvEngineLost AsynckvNotAnswering")
async def decode_stopped(service: Service) -> None:
    service.engines["decode-0"].signal(signal.SIGSTOP)


@fault("AsynckvEngineLost AsynckvNotAnswering AsynckvPeersGone")
async def prefill_stopped(service: Service) -> None:
    service.engines["prefill-0"].signal(signal.SIGSTOP)


@fault("AsynckvLoopSilent")
async def loop_of_decode_blocked(service: Service) -> None:
    await service.engines["decode-0"].ask("block", seconds=60.0)


async def measure(name: str) -> dict[str, Any]:
    """Inject a fault, and return the seconds from it to each alert."""
    alerts, inject = FAULTS[name]
    async with running() as service:
        early, began = sorted(service.fired), time.monotonic()
        await inject(service)
        while time.monotonic() < began + PATIENCE_S and not any(x in service.fired for x in alerts.split()):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)
        found = {alert: round(at - began, 1) for alert, at in service.fired.items()}
        return {"fault": name, "alerts": found, "before the fault": early}


async def rollout() -> dict[str, Any]:
    """Restart every engine in order. Return the alerts, the statuses of all answers, and what `asynckv why` finds."""
    async with running() as service:
        for name in NAMES:
            await service.engines[name].end()
            await asyncio.sleep(max(AWAY_S - service.start_s, 0.0))
            await service.start(name)
            await asyncio.sleep(APART_S)
        with contextlib.redirect_stdout(io.StringIO()):
            _, found = await asyncio.to_thread(ask, [str(service.folder / "logs")], service.folder / "why.json")
        said = [x["what"] for x in found["findings"]]
        return {"rollout": len(NAMES), "alerts": sorted(service.fired), "answers": dict(service.answers), "why": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FAULTS)}, rollout; all if left out")
    log_as_json()
    for name in parser.parse_args().names or [*FAULTS, "rollout"]:
        found = asyncio.run(rollout() if name == "rollout" else measure(name))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
