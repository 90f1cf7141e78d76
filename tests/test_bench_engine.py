"""`python -m scripts.bench engine`: a rank that has met many others."""

from __future__ import annotations

import pytest

from asynckv.testing import SimNetwork
from scripts.bench import engine


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
