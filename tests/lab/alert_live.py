"""Real services under a steady load: what alerts of a fault, and when; and healthy ones, of which nothing is noticed.

Two prefill and two decode engines (`tests/lab/stepper.py`) serve behind `asynckv proxy`. Each fault has a service of
its own. `prometheus` scrapes it, with the rules of deploy/prometheus, and the time from the fault to its alert is
measured. `rollout` restarts all engines in order, one after the other; `load` leaves them alone,
beside loops that take processors away. At their end `asynckv why` is asked with all logs, and with logs and sockets:
it has to say one line, with exit status 0, and every pull has to be complete.

    python -m tests.lab.alert_live                      # all faults, the rollout, and the load
    python -m tests.lab.alert_live decode_killed
    python -m tests.lab.alert_live load --rate 67 --seconds 300 --busy 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import sys
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
from scripts.bench.versus.vllm_side import free_port
from tests.lab.fleet import Fleet, Process
from tests.lab.why_live import run_why

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
PER_S, WARM_S, PATIENCE_S = 20.0, 22.0, 75.0
AWAY_S, APART_S = 25.0, 12.0
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


class Service:
    """Engines, a router, a load and a Prometheus."""

    router: Router

    def __init__(self, folder: Path, fleet: Fleet, rate: float) -> None:
        self.folder, self.fleet, self.rate = folder, fleet, rate
        self.engines: dict[str, Process] = {}
        self.ports: dict[str, list[int]] = {}
        self.start_s = 0.0  # how long a start took at least
        self.outcomes, self.is_loaded = Counter[str](), True
        self.under_way, self.slowest_s = 0, 0.0
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

    async def retire(self, name: str) -> None:
        """Let an engine say that it is about to go, and wait until the router has nothing under way there."""
        await self.engines[name].ask("retire")
        url, role = f":{self.ports[name][0]}", name.partition("-")[0]
        engine = next(x for x in self.router.engines.of(role) if x.url.endswith(url))
        while engine.outstanding or not engine.trouble:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def until_up(self) -> None:
        """Wait until the router sends requests to all engines."""
        while any(engine.trouble for role in ("prefill", "decode") for engine in self.router.engines.of(role)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

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
                body, began = {"prompt": "a", "max_tokens": 1}, time.monotonic()
                try:
                    async with session.post(f"{router}/v1/completions", json=body) as answer:
                        said = await answer.json(content_type=None)
                        self.outcomes[said.get("pulled", str(answer.status))] += 1
                except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
                    self.outcomes[repr(exc)] += 1
                self.under_way, self.slowest_s = self.under_way - 1, max(self.slowest_s, time.monotonic() - began)

            began = time.monotonic()
            for number in itertools.count():
                await asyncio.sleep(began + number / self.rate - time.monotonic())
                if self.is_loaded:
                    self.under_way += 1
                    all_.create_task(one())

    async def judge(self) -> dict[str, Any]:
        """End the load, and ask with all logs, and with logs and sockets."""
        self.is_loaded = False
        while self.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        logs = [str(x) for x in sorted((self.folder / "logs").glob("*.jsonl*"))]
        told: dict[str, Any] = {"outcomes": dict(self.outcomes), "slowest_s": round(self.slowest_s, 3)}
        for way, sources in (("logs", logs), ("both", [str(self.folder / "logs")])):
            status, _ = await run_why(sources, self.folder / f"{way}.json")
            told[way] = {"status": status, "lines": (self.folder / f"{way}.txt").read_text().splitlines()}
        told["is_well"] = set(self.outcomes) == {"complete"} and all(
            told[way]["status"] == 0 and len(told[way]["lines"]) == 1 for way in ("logs", "both")
        )
        return told

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
async def prometheus(service: Service, router: str) -> AsyncIterator[str]:
    """Run a Prometheus, and yield its URL."""
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not installed: apt-get install prometheus"
    folder, url = service.folder, f"127.0.0.1:{free_port()}"
    shutil.copy(DEPLOY / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(configuration(service, router))
    options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with (folder / "prometheus.log").open("wb") as log:
        argv = (program, *options, f"--web.listen-address={url}")
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
    try:
        yield f"http://{url}"
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def running(rate: float = PER_S, *, is_scraped: bool = True, keep: Path | None = None) -> AsyncIterator[Service]:
    """Run a service under load, with a Prometheus if it `is_scraped`; its files are left where they are to be kept."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="alert-")))
        if keep is not None:
            ignored = shutil.ignore_patterns("*.sock", "data")
            stack.callback(shutil.copytree, folder, keep, dirs_exist_ok=True, ignore=ignored)
        service = Service(folder, await stack.enter_async_context(Fleet()), rate)
        await asyncio.gather(*map(service.start, NAMES))
        service.router = router = Router(service.urls("prefill"), service.urls("decode"), Limits(drain_s=1.0))
        url = await stack.enter_async_context(serving(router.app(), "127.0.0.1", 0, 2.0))
        tasks = [asyncio.create_task(service.send_requests(url))]
        if is_scraped:
            watched = await stack.enter_async_context(prometheus(service, url))
            tasks.append(asyncio.create_task(service.watch_alerts(watched)))
        try:
            await asyncio.sleep(WARM_S if is_scraped else 1.0)
            yield service
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for engine in service.engines.values():
                if not engine.is_lost:
                    with contextlib.suppress(ProcessLookupError):
                        engine.signal(signal.SIGCONT)


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


async def rollout(away_s: float, apart_s: float = APART_S, **options: Any) -> dict[str, Any]:
    """Restart every engine in order; return the alerts as well."""
    async with running(**options) as service:
        for name in NAMES:
            await service.retire(name)
            await service.engines[name].end()
            await asyncio.sleep(max(away_s - service.start_s, 0.0))
            await service.start(name)
            await asyncio.sleep(apart_s)
            await service.until_up()
        return {"rollout": len(NAMES), "alerts": sorted(service.fired), **await service.judge()}


async def load(rate: float, seconds: float, busy: int, **options: Any) -> dict[str, Any]:
    """Serve for a while, beside loops that take processors away."""
    loops = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(busy)]
    try:
        async with running(rate, is_scraped=False, **options) as service:
            await asyncio.sleep(seconds)
            return {"load": rate, **await service.judge()}
    finally:
        for each in loops:
            each.kill()
            await each.wait()


def main() -> None:
    """Run services, print a line of JSON for each, and fail if a healthy one was not well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FAULTS)}, rollout, load; all if left out")
    parser.add_argument("--away-s", type=float, default=AWAY_S, metavar="S", help="without an engine (default: 25)")
    parser.add_argument("--rate", type=float, default=PER_S, metavar="N", help="requests per second of load")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of load (default: 30)")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="loops beside the load (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and answers of rollout and load there")
    given, is_well = parser.parse_args(), True
    log_as_json()
    for name in given.names or [*FAULTS, "rollout", "load"]:
        if name == "rollout":
            work = rollout(given.away_s, keep=given.keep)
        else:
            options = given.rate, given.seconds, given.busy
            work = load(*options, keep=given.keep) if name == "load" else measure(name)
        found = asyncio.run(work)
        is_well &= found.get("is_well", True)
        print(json.dumps(found), flush=True)
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
