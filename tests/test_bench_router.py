"""Programs of `scripts/bench` that run engines: routers (no client of a burst is refused), and small pulls."""

from __future__ import annotations

import asyncio
import json

import pytest

from asynckv.testing import SimNetwork
from scripts.bench import engine, router


@pytest.mark.slow
@pytest.mark.parametrize(("case", "spin"), [("burst-2000", "0"), ("burst-1000", "8")])
def test_all_clients_of_a_burst_are_served(case: str, spin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main([case, "--rounds", "1", "--spin", spin]) == 0
    plain, ours = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [plain["router"], ours["router"]] == ["plain", "asynckv"]
    assert ours["served"] == plain["served"] == [ours["of"]]


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main(["burst-3"]) == 2
    assert "unknown scenario 'burst-3'; choose from steady, burst-1000" in capsys.readouterr().err


# -- a rank that has met many others ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_rank_that_has_met_many_is_measured_and_costs_little() -> None:
    network = SimNetwork()
    async with engine.Ranks(engines=9, network=network) as ranks, engine._wide("decode", network) as decode:
        found = await engine._meet(decode, await ranks.lend(), 0.5)
    assert found["ranks"] == 32
    assert 1 < found["kib_per_rank"] < 64
    assert found["idle_percent"] < 20  # of a moment, in which nine engines answer
    assert min(found["next_ms"], found["turn_ms"]) > 0


# -- a pull ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pulls", "is_announced"), [(1, False), (1, True), (64, False)])
async def test_a_pull_is_four_messages_and_pulls_at_once_share_packets(pulls: int, is_announced: bool) -> None:
    """A claim, its grant, a release and its receipt: alone each goes in a packet of its own."""

    async def work(pair: engine.Pair) -> engine.Figures:
        await pair.one(0, 0)  # the handshake
        before = await sent(pair)
        if is_announced:
            params = pair.groups[0].make_params("p", [(0, [1])], 16, written=True)
            pair.prefill[0].lend(params)
            pair.decode.announce("d", params)
            await pair.decode.pull("d", [(0, [1])], params)
        else:
            await pair.requests(pulls, pulls, [0])
        return {kind: (number - before[kind]) / pulls for kind, number in (await sent(pair)).items()}

    found = await engine._simulated(work)
    assert found["messages"] == 4.0
    assert found["packets"] == 4.0 if pulls == 1 else found["packets"] < 1.0


async def sent(pair: engine.Pair) -> dict[str, int]:
    for _ in range(20):  # turns, in which the last release is acknowledged
        await asyncio.sleep(0)
    counters = [each.statistics().counters for each in (pair.decode, *pair.prefill)]
    return {
        "messages": sum(n for each in counters for name, n in each.items() if name.startswith("sent.")),
        "packets": sum(each["control.packets_out"] for each in counters),
    }
