"""Real workers broken on purpose: a short run of every scenario of `tests/lab/chaos.py`, and its command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.lab import chaos
from tests.lab.arena import Arena

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(90)]

DEADLINE_S = 60.0


async def misled(arena: Arena) -> None:
    """Compare what is published with another request's bytes."""
    prefill = await arena.start("prefill")
    lent = await prefill.lend(4, reads=True)
    await prefill.pull(lent | {"number": 1 << 20, "cached": 0})
    await arena.finish()


def children() -> set[str]:
    """Processes that this one has started and not collected."""
    return set(Path("/proc/thread-self/children").read_text().split())


@pytest.mark.anyio
@pytest.mark.parametrize("name", sorted(chaos.SCENARIOS.keys() - {"survive"}))  # which is the next test
async def test_what_is_published_is_right_whatever_breaks(name: str) -> None:
    before = children()
    async with asyncio.timeout(DEADLINE_S):
        record = await chaos.run(name, seconds=1.0, seed=1)
    assert record["problems"] == []
    assert sum(pulls["complete"] for pulls in record["pulls"].values()) > 0
    assert {pulls["bytes_wrong"] for pulls in record["pulls"].values()} == {0}
    assert children() <= before


@pytest.mark.anyio
@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport", ["tcp", "cma"])
async def test_who_is_not_hurt_survives_whatever_happens_to_the_other_side(transport: str) -> None:
    before = children()
    async with asyncio.timeout(180):
        record = await chaos.run("survive", seed=2, transport=transport, cycles=2 * len(chaos.SURVIVED))
    assert record["problems"] == []
    assert record["survivors_lost"] == 0
    # Both sides were hurt in every way, and each was read meanwhile.
    assert record["faults"] == dict.fromkeys(chaos.SURVIVED, 2)
    assert {name: len(seen["fds"]) for name, seen in record["usage"].items()} == {"decode": 5, "prefill": 5}
    assert min(record["pulls"]["prefill"]["complete"], record["pulls_from_decode"]["complete"]) > 40
    assert record["pulls_from_decode"]["bytes_wrong"] == 0
    assert children() <= before


def test_wrong_bytes_end_a_run_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(chaos.SCENARIOS, "misled", misled)
    assert chaos.main(["misled", "--seconds", "1"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["problems"] == ["prefill: wrong bytes were published"]
    assert record["pulls"]["prefill"]["bytes_wrong"] > 0
