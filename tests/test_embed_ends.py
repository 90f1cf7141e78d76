"""The fate of orders and news when an engine ends in an unusual way: all at once, by an interrupt, by a fork."""

from __future__ import annotations

import asyncio
import os
import select
import time
from typing import Any

import pytest

from asynckv import Engine, EngineClosed, EngineConfig, PrefillRanks, PullError, RemoteProtocolError
from asynckv.embed import Announce, Cancel, EngineDesk, EngineThread, Lend, Pull
from tests.engines import memory

pytestmark = pytest.mark.nixl


def test_a_pull_that_was_carried_out_just_before_the_engine_ends_has_begun() -> None:
    """Its prefill ranks are told that it ends. Nothing else would tell them, and its lease would have to run out."""

    async def run() -> None:
        (ours, _), (theirs, _) = memory(1), memory(2)
        async with Engine(EngineConfig(engine_id="prefill"), ours) as prefill:
            decode = Engine(EngineConfig(engine_id="decode"), theirs)
            await decode.start()
            params = PrefillRanks("prefill", [prefill.endpoint]).make_params("r", [(0, [1])], 16, written=True)
            lent, desk = prefill.lend(params), EngineDesk(decode, lambda: None)
            desk.submit([Pull(request_id="r", groups=[(0, [1])], params=params)])
            desk.carry_out()
            await desk.finish()
            assert list(decode._driver.core.decode.by_request) == ["r"]
            await decode.aclose()
            await desk.settle()
            (failed,) = desk.take_finished().failed
            assert isinstance(failed.error, PullError)
            assert (await lent.wait_released()).cause == "released"

    asyncio.run(run())


def test_an_interrupt_in_the_middle_of_an_order_is_raised_and_the_order_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
            desk = EngineDesk(engine, lambda: None)

            def interrupted(*args: Any, **more: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(engine, "announce", interrupted)
            orders = [Announce("a", {}), Lend({"from": "behind"})]
            desk.submit(orders)
            with pytest.raises(KeyboardInterrupt):
                desk.carry_out()
            desk.carry_out()
            told = [(each.order, type(each.error)) for each in desk.take_finished().refused]
            assert told == [(orders[0], EngineClosed), (orders[1], RemoteProtocolError)]

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_takes_nothing_that_its_parent_is_told() -> None:
    with EngineThread(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        engine.submit([Lend({"number": 1})])
        until = time.monotonic() + 10
        while not engine._desk.has_news and time.monotonic() < until:
            engine.wait(0.01)
        if not (pid := os.fork()):
            try:
                found = bool(engine.take_finished())
            except EngineClosed:
                found = False
            finally:
                os._exit(found)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [type(each.order) for each in engine.take_finished().refused] == [Lend]
        engine.submit([Cancel("r")])


def test_a_loan_of_which_no_end_is_told_is_told_as_closed_once() -> None:
    """A loop that ends in an unusual way tells no more ends; a worker waits for each of its orders."""

    async def run() -> None:
        async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
            params = PrefillRanks("prefill", [engine.endpoint]).make_params("r", [(0, [1])], 16, written=True)
            desk = EngineDesk(engine, lambda: None)
            desk.submit([Lend(params)])
            desk.carry_out()
            desk._abandon(RuntimeError("the loop is gone"))
            engine.withdraw(params)
            await asyncio.sleep(0)
            [sent] = desk.take_finished().finished_sending
            assert (sent.request_id, sent.cause, sent.owed) == ("r", "closed", ("*",))

    asyncio.run(run())


def test_what_is_handed_over_while_orders_are_carried_out_wakes_the_loop_again(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = EngineThread(EngineConfig(engine_id="prefill"), memory(1)[0])
    thread._wake()
    with monkeypatch.context() as patch:
        patch.setattr(thread._desk, "carry_out", thread._wake)
        for _ in range(2):
            thread._on_bell()
            assert select.select([thread._bell.fileno()], [], [], 0)[0], "else what was handed over waits for ever"
    silence = thread._bell.silence

    def silence_late() -> None:
        thread._wake()  # just before
        silence()

    monkeypatch.setattr(thread._bell, "silence", silence_late)
    thread._on_bell()
    thread._wake()
    assert select.select([thread._bell.fileno()], [], [], 0)[0], "else no later order wakes the loop"
