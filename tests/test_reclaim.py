"""A prefill engine has no room: what is taken back, and what becomes of those that wanted to read it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynckv import EngineClosed, LeaseConfig, LeaseRefused, LocalProtocolError, PrefillRanks
from tests.engines import Bench, until

pytestmark = pytest.mark.anyio


async def test_a_reader_engine_that_only_announces_makes_room_for_another() -> None:
    """The slow one's oldest requests end as revoked, at its next renewal; it is told so when it pulls. Others live."""
    bench = Bench(False)
    config: dict[str, Any] = {"lease": LeaseConfig(lease_s=30.0, grant_s=3.0)}
    prefill, slow, quick = [bench.side(name, i, **config) for i, name in enumerate(("prefill", "slow", "quick"))]
    with pytest.raises(EngineClosed):
        prefill.engine.reclaim(1)
    async with prefill.engine, slow.engine, quick.engine:
        group = PrefillRanks("prefill", [prefill.engine.endpoint])
        params = [group.make_params(f"r{i}", [(0, [*range(6 * i, 6 * i + 6)])], 96) for i in range(5)]
        leases = [prefill.engine.lend(each) for each in params]
        for i, each in enumerate(params):
            (quick if i == 4 else slow).engine.announce(f"d{i}", each)
        await until(lambda: all(lease._lease.grants for lease in leases))
        assert prefill.engine.reclaim(6) == 0
        ended: list[str] = []
        for lease in leases:
            task = asyncio.ensure_future(lease.wait_released())
            task.add_done_callback(lambda done: ended.append(f"{done.result().request_id} {done.result().cause}"))

        async def let_pass(seconds: float) -> None:
            for _ in range(int(seconds * 10)):
                bench.clock.advance(0.1)
                for _ in range(10):
                    await asyncio.sleep(0)

        await let_pass(3.0)
        assert prefill.engine.reclaim(6) == 1
        assert prefill.engine.reclaim(6) == 0, "its blocks are on their way"
        await let_pass(1.5)  # a third of a grant, and some turns
        assert ended == ["r0 revoked"]
        with pytest.raises(LeaseRefused, match="revoked"):
            await slow.engine.pull("d0", [(0, [*range(6)])], params[0])
        assert (await quick.engine.pull("d4", [(0, [*range(6)])], params[4])).num_tokens == 96
        assert (await slow.engine.pull("d1", [(0, [*range(6, 12)])], params[1])).num_tokens == 96
        for wrong in (-1, 1.5, None, "many"):
            with pytest.raises(LocalProtocolError, match="num_blocks"):
                prefill.engine.reclaim(wrong)  # type: ignore[arg-type]
        for i in (2, 3):
            slow.engine.cancel(f"d{i}")
        await let_pass(1.0)
        assert len(ended) == 5
