"""Real workers under pressure: a short run of every scenario of `tests/lab/pressure.py`, and its command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.lab import pressure
from tests.lab.arena import Arena
from tests.lab.pressure import Sizes

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(90)]

SHORT = {
    "load": Sizes(pulls=1500),
    # A peer that holds up others does so for seconds; what neighbours on this machine do is no matter here.
    "isolate": Sizes(rounds=1, round_s=1.2, peers=3, crowd=3, ratio=8.0),
    "drain": Sizes(mib=32),
    "sleep": Sizes(cycles=2, trials=1),
    "retry": Sizes(trials=1),
}


async def misled(arena: Arena, sizes: Sizes) -> None:
    """Compare what is published with another request's bytes."""
    await arena.decode.start()
    prefill = await arena.start("prefill")
    lent = await prefill.lend(4, reads=True)
    await prefill.pull(lent | {"number": 1 << 20, "cached": 0})
    await pressure.settle(arena, prefill, arena.decode)


def children() -> set[str]:
    """Processes that this one has started and not collected."""
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.mark.anyio
@pytest.mark.parametrize(("name", "transport"), [*((name, "tcp") for name in SHORT), ("sleep", "auto")])
async def test_what_is_promised_holds_under_pressure(name: str, transport: str) -> None:
    before = children()
    async with asyncio.timeout(80.0):
        record = await pressure.run(name, sizes=SHORT[name], seed=1, transport=transport)
    assert record["problems"] == []
    assert {pulls["bytes_wrong"] for pulls in record["pulls"].values()} == {0}
    assert children() <= before


def test_every_scenario_has_a_short_run() -> None:
    assert SHORT.keys() == pressure.SCENARIOS.keys()


def test_wrong_bytes_end_a_run_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(pressure.SCENARIOS, "misled", misled)
    assert pressure.main(["misled"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["problems"] == ["prefill: wrong bytes were published"]
    assert record["pulls"]["prefill"]["bytes_wrong"] > 0


def test_a_ratio_compares_medians_and_has_an_interval() -> None:
    found = pressure.ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found == {"median": 4.0, "alone": 2.0, "ratio": 2.0, "low": 2.0, "high": 2.0}
    wide = pressure.ratio([1.0, 1.0, 9.0], [1.0, 1.0, 1.0])
    assert (wide["ratio"], wide["low"], wide["high"]) == (1.0, 1.0, 9.0)
