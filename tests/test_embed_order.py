"""Orders are carried out in the order in which they were handed over, however often the loop is woken."""

from __future__ import annotations

import asyncio

import pytest

from asynckv import Engine, EngineConfig, PrefillGroup, WrongThread
from asynckv.embed import Announce, Cancel, EngineDesk, Lend, Pull
from tests.engines import memory, until


@pytest.mark.nixl
@pytest.mark.parametrize("announced", [True, False])
def test_a_cancellation_finds_the_pull_before_it_though_the_loop_is_woken_twice_in_a_turn(announced: bool) -> None:
    async def run() -> None:
        (ours, _), (theirs, _) = memory(1), memory(2)
        async with (
            Engine(EngineConfig(engine_id="prefill"), ours) as prefill,
            Engine(EngineConfig(engine_id="decode"), theirs) as decode,
        ):
            group = PrefillGroup("prefill", [prefill.endpoint])
            params = group.make_params("request", [(0, [1])], 16, written=True)
            lent, desk = prefill.lend(params), EngineDesk(decode)
            desk.submit(
                [
                    *[Announce("request", params)] * announced,
                    Pull(request_id="request", groups=[(0, [1])], params=params),
                    Cancel("request"),
                ]
            )
            # A turn of a slice that was left, and one for somebody who has just handed more over.
            desk.carry_out()
            desk.carry_out()
            await until(lambda: desk.has_news)
            (failed,) = desk.take_finished().failed
            assert str(getattr(failed.error, "reason", "")) == "cancelled"
            assert (await lent.wait_released()).cause == "released"

    asyncio.run(run())


@pytest.mark.nixl
def test_who_hands_over_from_another_thread_is_refused_and_keeps_nobody_else_from_it() -> None:
    async def run() -> None:
        async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
            desk = EngineDesk(engine)
            with pytest.raises(WrongThread, match=r"desk\.submit was called from thread"):
                await asyncio.to_thread(desk.submit, [Lend({"from": "elsewhere"})])
            desk.submit([Lend({"from": "here"})])
            await until(lambda: desk.has_news)
            (refused,) = desk.take_finished().refused
            assert isinstance(refused.order, Lend)
            assert refused.order.params == {"from": "here"}

    asyncio.run(run())
