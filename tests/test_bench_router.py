"""Programs of `scripts/bench` that run engines: routers (no client of a burst is refused), stalls, and many ranks."""

from __future__ import annotations

import json

import pytest

from asynckv.testing import SimNetwork
from scripts.bench import engine, loop_stall, router


@pytest.mark.slow
@pytest.mark.parametrize(("case", "spin"), [("burst-2000", "0"), ("burst-1000", "8")])
def test_all_clients_of_a_burst_are_served(case: str, spin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main([case, "--rounds", "1", "--spin", spin]) == 0
    plain, ours = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [plain["router"], ours["router"]] == ["plain", "asynckv"]
    assert ours["served"] == plain["served"] == [ours["of"]]


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main(["burst-3"]) == 2
    assert "unknown scenario 'burst-3'; choose from steady, burst-500" in capsys.readouterr().err


# -- stalls ----------------------------------------------------------------------------------------------------


@pytest.mark.nixl
@pytest.mark.slow
def test_a_short_run_prints_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert loop_stall.main(["bulk", "--requests", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gbytes"] == 0.27
    assert found["lag_ms"]["samples"] > 0


# -- a rank that has met many others ---------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_rank_that_has_met_many_is_measured_and_costs_little() -> None:
    network = SimNetwork()
    async with engine.Ranks(engines=9, network=network) as ranks, engine._wide("decode", network) as decode:
        found = await engine._meet(decode, await ranks.lend(), 0.5)
    assert found["ranks"] == 32
    assert 1 < found["kib_per_rank"] < 64
    assert found["idle_percent"] < 20  # of a moment, in which nine engines answer
    assert min(found["next_ms"], found["turn_ms"]) > 0
