"""The clock that engines run by: boot time, and timers on the loop."""

from __future__ import annotations

import asyncio

import pytest

from asynckv.edges.clock import LoopClock
from tests.engines import until

pytestmark = pytest.mark.anyio


async def test_a_timer_fires_once_and_not_before_its_time_and_one_that_was_cancelled_never() -> None:
    clock, fired = LoopClock(), list[tuple[str, float]]()
    begun = clock.now()
    for name, seconds in (("past", -1.0), ("kept", 0.03), ("forgotten", 0.02)):
        timer = clock.call_at(begun + seconds, lambda name=name: fired.append((name, clock.now())))  # type: ignore[misc]
    timer.cancel()
    timer.cancel()
    assert fired == []
    await until(lambda: clock.now() > begun + 0.06)
    await asyncio.sleep(0)
    assert [name for name, _ in fired] == ["past", "kept"]
    assert fired[1][1] >= begun + 0.03
