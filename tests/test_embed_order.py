"""Orders are carried out in the order in which they were handed over, however often the loop is woken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from asynckv import (
    Engine,
    EngineClosed,
    EngineConfig,
    LocalProtocolError,
    PrefillRanks,
    PullCancelled,
    PullConfig,
    RemoteProtocolError,
    WrongThread,
)
from asynckv.embed import Announce, Cancel, EngineDesk, Follow, Lend, Load, Offer, Pull, Store, WithdrawTicket
from asynckv.embed import desk as embed_desk
from asynckv.engine import driver as driver_module
from asynckv.errors import NoOffer
from asynckv.testing import SimControl, SimData, SimNetwork
from tests.engines import Bench, Side, memory, news_of, pass_until, passing, turn_loop, until
from tests.offloads import SIZE, chain, layout_of
from tests.offloads import Rank as OffloadRank
from tests.test_follows import TICKET, target_of


@pytest.mark.nixl
@pytest.mark.parametrize("announced", [True, False])
async def test_a_cancellation_finds_the_pull_before_it_though_the_loop_is_woken_twice_in_a_turn(
    announced: bool,
) -> None:
    (ours, _), (theirs, _) = memory(1), memory(2)
    async with (
        Engine(EngineConfig(engine_id="prefill"), ours) as prefill,
        Engine(EngineConfig(engine_id="decode"), theirs) as decode,
    ):
        group = PrefillRanks("prefill", [prefill.endpoint])
        params = group.make_params("request", [(0, [1])], 16, written=True)
        lent, desk = prefill.lend(params), EngineDesk(decode)
        desk.submit(
            [
                *[Announce("request", params)] * announced,
                Pull(request_id="request", groups=[(0, [1])], params=params),
                Cancel("request"),
            ]
        )
        # A turn of a slice that was left, and one for a caller that has just handed more over.
        desk.carry_out()
        desk.carry_out()
        (failed,) = (await news_of(desk)).failed
        assert str(getattr(failed.error, "reason", "")) == "cancelled"
        assert (await lent.wait_released()).cause == "released"


@pytest.mark.nixl
async def test_a_bug_that_one_order_meets_is_told_with_it_and_strands_none_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        desk = EngineDesk(engine, lambda: None)
        monkeypatch.setattr(engine, "announce", lambda *args, **more: 1 // 0)
        orders = [Announce("a", {}), Lend({"from": "behind"}), Announce("b", {}), Lend({"from": "last"})]
        desk.submit(orders)
        while desk._handed:  # a busy machine may need several slices
            desk.carry_out()
        told = [(each.order, type(each.error)) for each in desk.take_finished().refused]
        assert [order for order, _ in told] == orders
        assert [kind is ZeroDivisionError for _, kind in told] == [True, False, True, False]


def test_what_is_handed_over_as_the_desk_ends_is_refused_and_not_lost() -> None:
    """The desk ends between the moment at which it was asked whether it takes orders, and the hand-over itself."""

    class Ending(deque[Any]):
        def extend(self, handed: Any) -> None:
            desk._refuse_all()
            super().extend(handed)

    desk = EngineDesk(Engine(EngineConfig(engine_id="prefill"), memory(1)[0]), lambda: None)
    desk._handed = Ending()
    desk.submit([Lend({}), Pull(request_id="pull", groups=[], params={}), Cancel("request")])
    told = desk.take_finished()
    assert [type(each.order) for each in told.refused] == [Lend, Cancel]
    assert [each.request_id for each in told.failed] == ["pull"]
    with pytest.raises(EngineClosed):
        desk.submit([Cancel("request")])


@pytest.mark.parametrize("fate", ["free", "returned", "retired"])
async def test_a_pull_that_ends_by_a_bug_is_told_once_it_is_known_what_becomes_of_its_blocks(
    fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Bench(real=False)
    async with sim.pair(pull=PullConfig(held_s=5.0)) as (prefill, decode, group):
        desk, decode.data.deferred = EngineDesk(decode.engine), True
        monkeypatch.setattr(decode.engine, "_result_of", lambda request: 1 // 0)
        params, _ = prefill.lent(group, "r", [1], written=True)
        desk.submit([Pull(request_id="r", groups=[(0, [2])], params=params)])
        await until(lambda: decode.data.running)
        [transfer] = decode.data.running
        if fate == "free":
            decode.data.fail(transfer)
        else:
            decode.data.doubt(transfer)
            await until(lambda: decode.engine.statistics().counters.get("pulls.read_failed"))
            await turn_loop(9)
            assert not desk.has_news
            if fate == "returned":
                decode.data.finish(transfer)
            await pass_until(sim, lambda: desk.has_news, 0.25)
        told = await news_of(desk)
        (failed,) = told.failed
        is_retired = fate == "retired"
        assert (failed.request_id, failed.is_held, told.returned) == ("r", is_retired, [])
        assert told.retired == ["r"] * is_retired
        assert isinstance(failed.error.__cause__ if is_retired else failed.error, ZeroDivisionError)
        if is_retired:
            decode.data.finish(transfer)


async def test_orders_of_which_no_end_is_told_are_told_as_failed_and_retired_once() -> None:
    """The loop ends in an unusual way, so that nothing says what becomes of the blocks."""
    async with Bench(real=False).pair() as (prefill, decode, group):
        desk, decode.data.deferred = EngineDesk(decode.engine), True
        for number in range(2):
            params, _ = prefill.lent(group, f"r{number}", [number], written=True)
            desk.submit([Pull(request_id=f"r{number}", groups=[(0, [number])], params=params)])
        await until(lambda: len(decode.data.running) == 2)
        decode.data.doubt(next(iter(decode.data.running)))
        (held,) = (await news_of(desk)).failed
        desk._abandon(RuntimeError("the loop is gone"))
        decode.data.finish()
        await until(lambda: not decode.engine.holds())
        told = desk.take_finished()
        assert [(x.request_id, x.is_held) for x in (held, *told.failed)] == [("r0", True), ("r1", True)]
        assert (told.retired, told.returned, told.finished_recving) == (["r0", "r1"], [], [])


@pytest.mark.nixl
async def test_what_the_loop_took_over_and_did_not_carry_out_is_refused_in_order_as_the_desk_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        desk = EngineDesk(engine)
        monkeypatch.setattr(embed_desk, "SLICE_S", -1.0)
        orders = [Lend({"number": number}) for number in range(4)]
        desk.submit(orders[:2])
        desk.carry_out()
        desk.submit(orders[2:])
        desk._refuse_all()
        assert [each.order for each in desk.take_finished().refused] == orders


@pytest.mark.nixl
async def test_a_step_handed_over_from_another_thread_is_refused_and_keeps_no_other_from_it() -> None:
    async with Engine(EngineConfig(engine_id="prefill"), memory(1)[0]) as engine:
        desk = EngineDesk(engine)
        with pytest.raises(WrongThread, match=r"desk\.submit was called from thread"):
            await asyncio.to_thread(desk.submit, [Lend({"from": "elsewhere"})])
        desk.submit([Lend({"from": "here"})])
        (refused,) = (await news_of(desk)).refused
        assert isinstance(refused.order, Lend)
        assert refused.order.params == {"from": "here"}


async def test_claims_leave_in_the_turn_in_which_their_pulls_begin_and_before_they_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packets that came just before had asked for a turn already, which would come before the pulls begin."""
    async with Bench(real=False).pair() as (prefill, decode, group):
        data, desk = decode.data, EngineDesk(decode.engine, lambda: None)
        driver, sent = decode.engine._driver, list[tuple[int, int]]()
        every = [group.make_params(f"r{number}", [(0, [number])], 16, written=True) for number in range(3)]
        for params in every:
            prefill.engine.lend(params)
        await decode.engine.pull("first", [(0, [0])], every[0])
        await until(lambda: not driver.core.decode.pulls)
        data.deferred, send = True, driver.control.send

        def noted(to: Any, packet: bytes) -> bool:
            planned = sum(pull.measures.planned_at < math.inf for pull in driver.core.decode.pulls.values())
            sent.append((planned, len(driver.core.decode.pulls)))
            return send(to, packet)

        monkeypatch.setattr(driver.control, "send", noted)
        desk.submit([Pull(request_id=f"r{n}", groups=[(0, [n])], params=every[n]) for n in (1, 2)])
        driver.soon()
        desk.carry_out()
        await asyncio.sleep(0)
        assert (sent, len(data.running)) == ([(0, 2)], 2)
        data.finish()
        await until(lambda: len(desk.take_finished().finished_recving) == 2)


async def test_orders_that_wait_do_not_put_the_turn_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else claims, grants and renewals would wait until all orders are carried out, which may be for ever."""
    ticks = itertools.count()
    monkeypatch.setattr(embed_desk, "SLICE_S", 1.0)  # a slice is one order
    monkeypatch.setattr(embed_desk, "time", SimpleNamespace(thread_time=lambda: float(next(ticks))))
    async with Bench(real=False).pair() as (prefill, decode, group):
        desk, driver, turns = EngineDesk(decode.engine, lambda: None), decode.engine._driver, 0
        turn = driver._turn

        def turned() -> None:
            nonlocal turns
            turns += 1
            turn()

        monkeypatch.setattr(driver, "_turn", turned)
        for number in range(20):
            params, _ = prefill.lent(group, f"r{number}", [number], written=True)
            pull = Pull(request_id=f"r{number}", groups=[(0, [number])], params=params)
            desk.submit([pull, Cancel(f"r{number}")])
        desk.carry_out()
        slices = 0
        while desk._handed:
            slices += 1
            await asyncio.sleep(0)
        assert (slices > 9, turns >= slices - 1) == (True, True)  # the first turn was due before
        failed = list[object]()
        while len(failed) < 20:
            failed += desk.take_finished().failed
            await asyncio.sleep(0)


def test_a_thread_that_holds_the_gil_ends_no_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 8 posts gives up the GIL, as a plane's may, and another thread keeps it for 5 ms, for two slices in all.
    The posts themselves take a tenth of one."""
    monkeypatch.setattr(driver_module, "POST_SLICE_S", 0.02)

    async def run() -> None:
        (ours, _), (theirs, _), network = memory(1), memory(2), SimNetwork()
        planes: list[dict[str, Any]] = [
            {"data": SimData(network, name), "control": SimControl(network)} for name in ("prefill", "decode")
        ]
        settings = PullConfig(max_post_descriptors=1)
        async with (
            Engine(EngineConfig(engine_id="prefill"), ours, **planes[0]) as prefill,
            Engine(EngineConfig(engine_id="decode", pull=settings), theirs, **planes[1]) as decode,
        ):
            group, driver = PrefillRanks("prefill", [prefill.endpoint]), decode._driver
            blocks, data, posts = [1, 3], planes[1]["data"], list[int]()
            post, turn, turns = data.post_read, driver._turn, 0

            def posted(*given: Any) -> Any:
                time.sleep(0)
                posts.append(turns)
                return post(*given)

            def turned() -> None:
                nonlocal turns
                turns += 1
                turn()

            for name in ("first", "second"):
                params = group.make_params(name, [(0, blocks)], 32, written=True)
                prefill.lend(params)
                await decode.pull(name, [(0, blocks)], params)
                monkeypatch.setattr(data, "post_read", posted)
                monkeypatch.setattr(driver, "_turn", turned)
            assert (len(posts), len(set(posts))) == (8, 1)

    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        asyncio.run(run())
    finally:
        is_over.set()
        spinner.join()


# -- tickets ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def followed(**options: Any) -> AsyncIterator[tuple[Side, Side, EngineDesk, dict[str, Any]]]:
    """Start two engines, of which one follows a ticket as "d", and has asked the other."""
    async with Bench(real=False).pair() as (prefill, decode, group):
        desk = EngineDesk(decode.engine, **options)
        desk.submit([Follow("d", target_of(prefill))])
        desk.carry_out()
        await until(lambda: prefill.engine._driver.core.prefill.parking.num_parked)
        yield prefill, decode, desk, group.make_params("p", [(0, [1])], 16)


async def test_a_follow_that_was_cancelled_is_told_as_such_and_an_offer_that_crosses_it_as_late() -> None:
    async with followed() as (prefill, _, desk, params):
        lent = prefill.engine.lend(params, ticket=TICKET)
        desk.submit([Cancel("d")])
        desk.carry_out()
        (told,) = (await news_of(desk)).not_offered
        assert isinstance(told.error, NoOffer)
        assert (told.request_id, told.error.reason, told.is_held) == ("d", "cancelled", False)
        assert (await news_of(desk)).offered == [Offer("d", params, is_late=True)]
        assert (await lent.wait_released()).cause == "released"
        assert desk.untaken == []


@pytest.mark.parametrize("by_cancel", [True, False])
async def test_a_follow_that_goes_on_releases_what_it_is_offered_and_that_is_told(by_cancel: bool) -> None:
    async with followed() as (prefill, _, desk, params):
        desk.submit([Cancel("d", follows_on=True)])
        desk.carry_out()
        lent = prefill.engine.lend(params, ticket=TICKET)
        if by_cancel:  # another rank was offered it first
            desk.submit([Cancel("d", params)])
            desk.carry_out()
        told = await news_of(desk)
        assert [getattr(each.error, "reason", "") for each in told.not_offered] == ["cancelled"]
        assert (told.offered or (await news_of(desk)).offered) == [Offer("d", params, is_late=True)]
        assert (await lent.wait_released()).cause == "released"
        assert (desk.has_news, desk.untaken) == (False, [])


async def test_a_second_follow_is_refused_and_the_first_goes_on() -> None:
    async with followed() as (prefill, _, desk, params):
        wrong: Any = 7
        orders = [
            Follow("d", target_of(prefill)),
            Follow("e", {}),
            Follow(wrong, target_of(prefill)),
            Follow("f", wrong),
        ]
        desk.submit(orders)
        desk.carry_out()
        told = desk.take_finished()
        assert [(each.order, type(each.error)) for each in told.refused] == [(orders[0], LocalProtocolError)]
        assert [(each.request_id, type(each.error)) for each in told.not_offered] == [
            ("e", RemoteProtocolError),
            (7, LocalProtocolError),
            ("f", RemoteProtocolError),
        ]
        prefill.engine.lend(params, ticket=TICKET)
        assert (await news_of(desk)).offered == [Offer("d", params)]


@pytest.mark.parametrize("how", ["withdrawn", "suspended", "abandoned", "bug", "not begun"])
async def test_a_follow_without_an_offer_is_told_once_however_it_ends(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with followed() as (prefill, decode, desk, params):
        expected: type[Exception] = NoOffer
        if how == "withdrawn":
            lender = EngineDesk(prefill.engine)
            lender.submit([WithdrawTicket(TICKET), WithdrawTicket("short")])
            assert [type(each.error) for each in (await news_of(lender)).refused] == [LocalProtocolError]
        elif how == "suspended":
            await decode.engine.suspend()
        elif how == "abandoned":
            expected = PullCancelled
            desk._abandon(RuntimeError("the loop is gone"))
        elif how == "bug":
            expected = ZeroDivisionError
            monkeypatch.setattr(decode.engine, "_offer_of", lambda following: 1 // 0)
            prefill.engine.lend(params, ticket=TICKET)
        else:
            expected = EngineClosed
            desk.submit([Cancel("d"), Follow("e", target_of(prefill))])
            desk._refuse_all()
        told = await news_of(desk)
        assert [(each.request_id, type(each.error)) for each in told.not_offered] == [
            ("e" if how == "not begun" else "d", expected)
        ]
        assert (told.offered, told.failed, told.retired) == ([], [], [])
        assert TICKET not in repr(told)
        assert how == "not begun" or not desk._flights
        await desk.settle()
        assert len(desk.take_finished().not_offered) == (how == "not begun")


async def test_a_follow_that_goes_on_leaves_a_store_of_its_request_alone() -> None:
    rank = OffloadRank(layout_of(), timeout_s=2.0, held_s=60.0)
    async with rank.engine:
        await rank.offload.start()
        desk, rank.copies.deferred = EngineDesk(rank.engine), True
        desk.submit([Store(request_id="s", groups=[(0, [1])], hashes=chain("s", 1)), Cancel("s", follows_on=True)])
        desk.carry_out()
        rank.copies.finish()
        assert [each.request_id for each in (await news_of(desk)).stored] == ["s"]


class Raising:
    """An application's `on_news` that raises once, when it is armed."""

    is_armed = False

    def __call__(self) -> None:
        if self.is_armed:
            self.is_armed = False
            raise RuntimeError("on_news")


async def test_an_on_news_that_raises_costs_no_job_its_end_or_its_blocks() -> None:
    rank, on_news = OffloadRank(layout_of(), timeout_s=2.0, held_s=60.0), Raising()
    async with rank.engine:
        await rank.offload.start()
        await rank.offload.store("s", [(0, [9])], chain("x", 1))
        desk, rank.copies.deferred = EngineDesk(rank.engine, on_news=on_news), True
        stores = [Store(request_id=x, groups=[(0, [i])], hashes=chain(x, 1)) for i, x in enumerate("ab", 1)]
        desk.submit(stores)
        desk.carry_out()
        on_news.is_armed = True
        rank.copies.finish()
        await until(lambda: not rank.engine.holds())
        assert {x.request_id for x in desk.take_finished().stored} == {"a", "b"}

        desk.submit([Store(request_id="late", groups=[(0, [3])], hashes=chain("late", 1))])
        desk.carry_out()
        on_news.is_armed = True
        rank.clock._now += 60.0  # the loop was away, so the next order finds the end of this one
        desk.submit([Load(request_id="l", groups=[(0, [5])], hashes=chain("x", 1), num_tokens=SIZE)])
        desk.carry_out()
        (late,) = desk.take_finished().offload_failed
        assert late.request_id == "late"
        assert [(x.request_id, x.reason) for x in rank.engine.holds()] == [("late", "quarantined"), ("l", "loading")]
        rank.copies.finish()
        await until(lambda: desk.has_news)
        assert [x.request_id for x in desk.take_finished().loaded] == ["l"]


async def test_an_on_news_that_raises_has_each_order_told_once_and_lets_the_engine_close() -> None:
    bench = Bench(real=False)
    async with bench.pair() as (prefill, decode, group):
        on_news, lending = Raising(), Raising()
        desk, lender = EngineDesk(decode.engine, on_news=on_news), EngineDesk(prefill.engine, on_news=lending)
        params, _ = prefill.lent(group, "r", [1], written=True)
        on_news.is_armed = True
        desk.submit([Pull(request_id="r", groups=[(0, [2])], params=params)])
        await until(lambda: desk.has_news)
        await desk.settle()
        told = desk.take_finished()
        assert ([x.request_id for x in told.finished_recving], told.failed, told.retired) == (["r"], [], [])

        kept = group.make_params("kept", [(0, [1])], 16, written=True)
        lender.submit([Lend(kept)])
        lender.carry_out()
        params, lent = prefill.lent(group, "other", [2], written=True)
        for name, each in (("kept", kept), ("other", params)):
            decode.engine.announce(name, each)
        waits = asyncio.create_task(lent.wait_released())
        await until(lambda: [x.ranks[0].state for x in prefill.engine.requests()] == ["granted"] * 2)
        lending.is_armed = True
        closing = asyncio.create_task(prefill.engine.aclose(0.0))
        await passing(bench, closing)
        assert (await waits).cause == "closed"
