"""Faults of real processes while the service runs: seen by logs alone, by asking alone, and by both.

What is wrong has to be named, with what to do about it, or be said not to be known; nothing that is well is blamed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asynckv.tools.bench.processes import ROOT
from tests.lab.fleet import Fleet, Process

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(150)]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
PATIENCE_S = 40.0
LEASE_S, GRANT_S = 5.0, 3.0

GONE, STOPPED = "process gone", "stopped or blocked"


async def look(*argv: str) -> dict[str, Any]:
    """What `asynckv why` says."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "asynckv", "why", *argv, "--json", "-", "--timeout", "1"]
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=ENV, limit=1 << 24)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode in (0, 1), err
    found: dict[str, Any] = json.loads(out)
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """What a log says so far; its last line may not be whole yet."""
    return [json.loads(x) for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]


async def until(path: Path, says: Callable[[dict[str, Any]], bool], since: int = 0) -> None:
    """Wait until a log has a line, behind so many others."""
    async with asyncio.timeout(PATIENCE_S):
        while not any(map(says, lines(path)[since:])):  # noqa: ASYNC110 - nobody tells of a file
            await asyncio.sleep(0.1)


class Service:
    """A prefill engine and two decode engines, in a directory with their logs and their sockets."""

    def __init__(self, directory: Path, prefill: Process, decode: Process, other: Process) -> None:
        self.directory, self.prefill, self.decode, self.other = directory, prefill, decode, other

    def log(self, name: str) -> Path:
        """The log of an engine's process."""
        return next(self.directory.glob(f"{name}-*.jsonl"))

    def rank(self, name: str) -> str:
        """Its rank, as everybody writes it."""
        return str(lines(self.log(name))[0]["rank"])

    async def lend(self, number: int) -> dict[str, Any]:
        """Lend a request."""
        [params] = await self.prefill.ask("lend", number=1, first=number)
        return dict(params)

    async def expired(self, number: int) -> None:
        """Wait until its lease has expired."""
        name = f"cmpl-{number}"
        await until(self.log("prefill"), lambda x: x["event"] == "lease_ended" and x["request_id"] == name)

    async def ways(self) -> dict[str, dict[str, Any]]:
        """Look in each way."""
        logs = [str(x) for x in sorted(self.directory.glob("*.jsonl"))]
        sockets = [str(x) for x in sorted(self.directory.glob("*.sock"))]
        return {
            "logs": await look(*logs),
            "live": await look(*sockets),
            "both": await look(str(self.directory)),
        }


Fault = Callable[[Service], Awaitable[dict[str, str]]]


async def killed_after_its_announcement(service: Service) -> dict[str, str]:
    await service.decode.ask("announce", number=1, params=await service.lend(1))
    await until(service.log("prefill"), lambda x: x["event"] == "lease_granted" and x["request_id"] == "cmpl-1")
    await service.decode.kill()
    await service.expired(1)
    return dict.fromkeys(("logs", "live", "both"), GONE) | {"about": "decode"}


async def stopped_after_its_announcement(service: Service) -> dict[str, str]:
    await service.decode.ask("announce", number=1, params=await service.lend(1))
    await until(service.log("prefill"), lambda x: x["event"] == "lease_granted" and x["request_id"] == "cmpl-1")
    service.decode.signal(signal.SIGSTOP)
    await service.expired(1)
    return dict.fromkeys(("logs", "live", "both"), STOPPED) | {"about": "decode"}


async def prefill_killed_while_it_lends(service: Service) -> dict[str, str]:
    await service.decode.ask("announce", number=1, params=await service.lend(1))
    await until(service.log("prefill"), lambda x: x["event"] == "lease_granted" and x["request_id"] == "cmpl-1")
    await service.prefill.kill()
    await until(service.log("decode"), lambda x: x["event"] == "peer_changed" and x["state"] == "gone")
    await until(service.log("other"), lambda x: x["event"] == "engine_alive")
    return dict.fromkeys(("logs", "live", "both"), GONE) | {"about": "prefill"}


async def id_changed_by_a_router(service: Service) -> dict[str, str]:
    params = await service.lend(1)
    assert await service.decode.ask("pull", number=1, params=params | {"request_id": "changed"}) != "complete"
    await service.expired(1)
    wrong = "wrong address, key or id"
    return {"logs": wrong, "live": "", "both": wrong, "about": "decode"}


async def params_dropped_while_a_healthy_engine_idles(service: Service) -> dict[str, str]:
    await service.lend(1)
    await service.expired(1)
    for log in (service.log("decode"), service.log("other")):  # each gives one more sign of life: nothing has come
        await until(log, lambda x: x["event"] == "engine_alive", len(lines(log)))
    dropped = "params never came|not known"  # they may come late, for as long as a pull may take
    return {"logs": dropped, "live": "", "both": dropped, "about": ""}


async def refused_by_its_own_engine(service: Service) -> dict[str, str]:
    assert await service.decode.ask("pull", number=1, params=await service.lend(1), block=999) == "PlanRefused"
    await service.expired(1)
    refused = "the decode scheduler dropped or refused it"
    return {"logs": refused, "live": "", "both": refused, "about": "decode"}


async def announced_and_waiting_in_order(service: Service) -> dict[str, str]:
    await service.decode.ask("announce", number=1, params=await service.lend(1))
    await until(service.log("prefill"), lambda x: x["event"] == "lease_held")
    return {"logs": "", "live": "", "both": "", "about": ""}


@pytest.mark.parametrize(
    "fault",
    [
        killed_after_its_announcement,
        stopped_after_its_announcement,
        prefill_killed_while_it_lends,
        id_changed_by_a_router,
        params_dropped_while_a_healthy_engine_idles,
        refused_by_its_own_engine,
        announced_and_waiting_in_order,
    ],
    ids=lambda fault: fault.__name__,
)
async def test_what_is_wrong_is_named_and_nothing_else(fault: Fault, short_path: Path) -> None:
    directory = short_path / "s"
    async with Fleet() as fleet:
        kind: dict[str, Any] = {"directory": str(directory), "lease_s": LEASE_S, "grant_s": GRANT_S, "has_log": True}
        names = ("prefill", "decode", "other")
        service = Service(directory, *[await fleet.start(x, "tests.inspected:Side", name=x, **kind) for x in names])
        # Both decode engines have met the prefill engine before.
        for number, decode in ((20, service.decode), (21, service.other)):
            assert await decode.ask("pull", number=number, params=await service.lend(number)) == "complete"
        ranks = {name: service.rank(name) for name in names}
        expected = await fault(service)
        about = expected.pop("about")
        ways = await service.ways()
        service.decode.signal(signal.SIGCONT)
    for way, found in ways.items():
        headings = {x["heading"] for x in found["findings"]}
        assert headings <= set(expected[way].split("|")), (way, found["findings"])
        assert headings or not expected[way], (way, found["findings"], found["limits"])
        said = json.dumps([found["findings"], [x for x in found["late"] if about]])
        assert not about or not headings or ranks[about] in said, (way, said)
        blamed = " ".join(x["what"] for x in found["findings"])
        assert not any(rank in blamed for name, rank in ranks.items() if name not in (about, "prefill")), (way, blamed)
