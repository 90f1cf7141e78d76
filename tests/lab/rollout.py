"""Healthy services of real engines under a steady load, of which nobody may notice anything: `rollout` and `load`.

    python -m tests.lab.rollout rollout --away-s 25     # every pod of both roles is replaced in order, one by one
    python -m tests.lab.rollout load --rate 67 --seconds 300 --busy 2

Two prefill and two decode engines serve requests that a small router hands over, as `docs/deploy.md` says: it sends
nothing to a pod that is about to go, and waits until nothing is under way there before the pod drains and closes. At
the end `asynckv why` is asked with all logs, and with logs and sockets. It has to say one line, with exit status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.engines import BLOCKS
from tests.lab.fleet import Fleet, Process
from tests.lab.why_live import run_why

ROLES = ("prefill", "decode")
TIMEOUT_S = 20.0


class Pod:
    """A place for an engine, whose process is replaced.

    Attributes:
        is_up: True while the router sends requests here.
        busy: Requests under way here.
        blocks: Free blocks, of which its scheduler gives one to each pull.
    """

    process: Process

    def __init__(self, name: str) -> None:
        self.name, self.is_up, self.busy = name, False, 0
        self.blocks = asyncio.Queue[int]()
        for block in range(BLOCKS):
            self.blocks.put_nowait(block)


class Traffic:
    """Pods of both roles, and a router.

    Attributes:
        outcomes: How often which outcome came of a request.
        slowest_s: Time of the slowest request.
    """

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self.directory, self._fleet = directory, fleet
        self.pods = {role: [Pod(f"{role}{x}") for x in range(2)] for role in ROLES}
        self.outcomes, self.slowest_s = Counter[str](), 0.0

    async def start(self, pod: Pod) -> None:
        """Start a pod's process, and send requests there when it is ready."""
        options: dict[str, Any] = {"lease_s": 30.0, "grant_s": 10.0, "log": pod.name}
        pod.process = await self._fleet.start(
            pod.name, "tests.lab.why_fresh:Rank", name=pod.name, directory=str(self.directory), **options
        )
        await pod.process.ask("address", 60.0)
        pod.is_up = True

    async def replace(self, pod: Pod, away_s: float) -> None:
        """Replace a pod in order."""
        pod.is_up = False
        while pod.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pod.process.ask("drain", 40.0)
        await pod.process.end()
        await asyncio.sleep(away_s)
        await self.start(pod)

    @contextlib.contextmanager
    def _at(self, role: str) -> Any:
        """Choose the pod with the fewest requests of those that are up."""
        pod = min((x for x in self.pods[role] if x.is_up), key=lambda x: (x.busy, random.random()))
        pod.busy += 1
        try:
            yield pod
        finally:
            pod.busy -= 1

    async def _request(self, number: int) -> None:
        began, outcome = time.monotonic(), ""
        try:
            with self._at("prefill") as prefill:
                [params] = await prefill.process.ask("lend", TIMEOUT_S, number=1, first=number)
                with self._at("decode") as decode:
                    block = await decode.blocks.get()
                    outcome = await decode.process.ask(
                        "pull", 2 * TIMEOUT_S, number=number, params=params, block=block, timeout_s=TIMEOUT_S
                    )
                    decode.blocks.put_nowait(block)
        except Exception as exc:
            outcome = repr(exc)
        self.outcomes[outcome] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    @contextlib.asynccontextmanager
    async def load(self, rate: float) -> AsyncIterator[None]:
        """Send so many requests per second, and wait for the last ones."""
        async with asyncio.TaskGroup() as group:

            async def send() -> None:
                began = time.monotonic()
                for number in range(1_000_000):
                    await asyncio.sleep(began + number / rate - time.monotonic())
                    group.create_task(self._request(number))

            sending = group.create_task(send())
            try:
                yield
            finally:
                sending.cancel()


@contextlib.asynccontextmanager
async def traffic(folder: Path) -> AsyncIterator[Traffic]:
    """Start all pods."""
    async with Fleet() as fleet:
        found = Traffic(fleet, folder / "s")
        found.directory.mkdir(parents=True)
        await asyncio.gather(*(found.start(pod) for role in ROLES for pod in found.pods[role]))
        yield found


async def judge(found: Traffic, folder: Path) -> dict[str, Any]:
    """Ask with all logs, and with logs and sockets."""
    logs = sorted(found.directory.glob("*.jsonl*"))
    told: dict[str, Any] = {"outcomes": dict(found.outcomes), "slowest_s": round(found.slowest_s, 3)}
    for way, sources in (("logs", list(map(str, logs))), ("both", [str(found.directory)])):
        status, _ = await run_why(sources, folder / f"{way}.json")
        told[way] = {"status": status, "lines": (folder / f"{way}.txt").read_text().splitlines()}
    told["lines"] = sum(len(x.read_text().splitlines()) for x in logs)
    told["is_well"] = set(found.outcomes) == {"complete"} and all(
        told[way]["status"] == 0 and len(told[way]["lines"]) == 1 for way in ("logs", "both")
    )
    return told


async def rollout(folder: Path, rate: float, away_s: float) -> dict[str, Any]:
    """Replace every pod, the decode side first."""
    async with traffic(folder) as found:
        async with found.load(rate):
            await asyncio.sleep(1.0)
            for pod in (*found.pods["decode"], *found.pods["prefill"]):
                await found.replace(pod, away_s)
            await asyncio.sleep(1.0)
        return await judge(found, folder)


async def load(folder: Path, rate: float, seconds: float, busy: int) -> dict[str, Any]:
    """Serve for a while, beside loops that take processors away."""
    loops = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(busy)]
    try:
        async with traffic(folder) as found:
            async with found.load(rate):
                await asyncio.sleep(seconds)
            return await judge(found, folder)
    finally:
        for each in loops:
            each.kill()
            await each.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Run a service, and print what came of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rollout", "load"))
    parser.add_argument("--rate", type=float, default=20.0, metavar="N", help="requests per second (default: 20)")
    parser.add_argument("--away-s", type=float, default=2.0, metavar="S", help="time without a pod (default: 2)")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of load (default: 30)")
    parser.add_argument("--busy", type=int, default=2, metavar="N", help="loops beside it (default: 2)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and answers there")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rollout-") as kept:
        folder = Path(kept)
        work = (
            rollout(folder, given.rate, given.away_s)
            if given.what == "rollout"
            else load(folder, given.rate, given.seconds, given.busy)
        )
        told = asyncio.run(work)
        if given.keep:
            shutil.copytree(folder, given.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
    print(json.dumps(told, indent=1))
    sys.exit(not told["is_well"])


if __name__ == "__main__":
    main()
