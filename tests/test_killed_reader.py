"""A decode process is killed: what was lent to it returns with its last grant, and what others read is untouched."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from asynckv.testing.fleet import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(120)]
GRANT_S, LEASE_S = 2.0, 60.0
WITHIN_S = 20.0
"""Of so long a lease. A grant and a second are enough; the machine may be busy."""


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

        async def until(states: list[str]) -> None:
            async with asyncio.timeout(WITHIN_S):
                while sorted(await prefill.ask("states")) != states:  # noqa: ASYNC110 - it announces that to nobody
                    await asyncio.sleep(0.05)

        await until(["granted"] * 4)
        if is_stopped_first:  # as a liveness probe does that finds it hanging: its grants have run out when it dies
            victim.signal(signal.SIGSTOP)
            await until(["granted", "granted", "lapsed", "lapsed"])
        await victim.kill()
        await until(["granted"] * 2)
