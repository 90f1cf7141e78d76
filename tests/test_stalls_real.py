"""Schedulers of real processes that hang: `asynckv why` names them from logs, live, and both, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asynckv.tools.diagnose.causes import HEADING
from tests.lab.fleet import Fleet, Process
from tests.lab.why_live import ask

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(120)]


async def says(folder: Path, name: str, what: str, seconds: float) -> None:
    """Wait until a sign of life says that something has waited for so long."""
    async with asyncio.timeout(60.0):
        while not any(seconds < wait(x, what) for x in lines(folder, name)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    texts = [log.read_text().splitlines(keepends=True) for log in folder.glob(f"{name}-*.jsonl")]
    return [json.loads(x) for text in texts for x in text if x.endswith("\n")]


def wait(line: Mapping[str, Any], what: str) -> float:
    return float(line.get("waits_for_step", {}).get(what, {}).get("seconds", 0.0))


CASES = [("decode", "result", 11.0, "1 result not taken for "), ("prefill", "claim", 10.0, "1 claim not lent for ")]


async def test_schedulers_that_hang_are_named(short_path: Path) -> None:
    await asyncio.gather(*(check(short_path / case[0], *case) for case in CASES))


async def check(folder: Path, hangs: str, what: str, seconds: float, said: str) -> None:
    """Make one scheduler of a service hang, and ask in each way."""

    def look(kind: str) -> list[Any]:
        sources = sorted(str(x) for x in folder.glob(f"*.{kind}")) if kind else [str(folder)]
        return list(ask(sources, folder.parent / f"{hangs}.json")[1]["findings"])

    async with Fleet() as fleet:
        engines: dict[str, Process] = {}
        for name in ("prefill", "decode"):
            setup: dict[str, Any] = {"name": name, "directory": str(folder), "lease_s": 4.0, "grant_s": 2.0}
            engines[name] = await fleet.start(name, "tests.lab.stepper:Stepper", **setup)
        prefill, decode = engines.values()
        await asyncio.gather(prefill.ask("addresses", 60.0), decode.ask("addresses", 60.0))  # they have started
        params = await prefill.ask("make", request_id="well")
        assert await decode.ask("pull", request_id="well", params=params) == "complete"
        await engines[hangs].ask("hang" if hangs == "prefill" else "hang_in_step")
        params = await prefill.ask("make", request_id="lost")
        pulling = asyncio.create_task(decode.ask("pull", None, request_id="lost", params=params))
        await says(folder, hangs, what, seconds)
        for kind in ("jsonl", "sock", ""):
            [finding] = await asyncio.to_thread(look, kind)
            assert (finding["heading"], finding["code"]) == (HEADING.STOPPED.value, "scheduler_stuck"), kind
            assert finding["what"].startswith(f"the scheduler of {hangs}/tp0@"), kind
            assert said in finding["what"], kind
            assert f"py-spy dump --pid {engines[hangs].pid}" in finding["remedy"], kind
        pulling.cancel()
        for engine in engines.values():
            await engine.kill()
