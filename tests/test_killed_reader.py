"""A decode process is killed: what was lent to it returns with its last grant, and what others read is untouched."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from asynckv import LeaseConfig
from asynckv.core.types import Address
from tests.engines import Bench, pass_by, until
from tests.lab.fleet import Fleet

GRANT_S, LEASE_S = 2.0, 60.0
WITHIN_S = 20.0
"""Of so long a lease. A grant and a second are enough; the machine may be busy."""


async def test_an_engine_whose_packets_cannot_be_sent_is_noticed() -> None:
    bench = Bench(False)
    async with bench.pair(lease=LeaseConfig(lease_s=LEASE_S, grant_s=GRANT_S)) as (prefill, decode, group):
        params, lease = prefill.lent(group, "r", [3])
        decode.engine.announce("d", params)
        await until(lambda: lease._lease.grants)
        (grant,) = lease._lease.grants.values()
        ports = bench.network.ports
        # Both ways: the reader says nothing any more, and its connection has ended.
        gone = {to: ports.pop(to) for to in (grant.ways[0], Address(prefill.engine.endpoint.address))}
        ended = asyncio.ensure_future(lease.wait_released())
        await pass_by(bench, GRANT_S + 2.0)
        assert ended.done()
        assert ended.result().cause == "expired"
        ports.update(gone)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_stopped_first", [False, True])
async def test_what_a_killed_reader_held_returns_with_its_last_grant(short_path: Path, is_stopped_first: bool) -> None:
    directory = str(short_path / "sockets")
    async with Fleet() as fleet:
        prefill, victim, other = [
            await fleet.start(
                name, "tests.inspected:Side", name=name, directory=directory, lease_s=LEASE_S, grant_s=GRANT_S
            )
            for name in ("prefill", "victim", "other")
        ]
        params = await prefill.ask("lend", number=4)
        for number, each in enumerate(params):
            await (victim, other)[number % 2].ask("announce", number=number, params=each)

        async def until_prefill_has(states: list[str]) -> None:
            async with asyncio.timeout(WITHIN_S):
                while sorted(await prefill.ask("states")) != states:  # noqa: ASYNC110 - it announces that to nobody
                    await asyncio.sleep(0.05)

        await until_prefill_has(["granted"] * 4)
        if is_stopped_first:  # as a liveness probe does that finds it hanging: its grants have run out when it dies
            victim.signal(signal.SIGSTOP)
            await until_prefill_has(["granted", "granted", "lapsed", "lapsed"])
        await victim.kill()
        await until_prefill_has(["granted"] * 2)
