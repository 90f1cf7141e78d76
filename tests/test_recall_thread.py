"""`EngineThread.recall`: what comes before a recall, when it returns, and what it returns as the engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from asynckv import (
    EngineClosed,
    HeldBlocks,
    LeaseConfig,
    LocalProtocolError,
    PrefillRanks,
    RemoteProtocolError,
    WrongThread,
)
from asynckv.core.lease import LeaseState
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.embed import EngineThread, Finished, Lend, Pull
from asynckv.embed.thread import LAST_S, MAX_CRASHES
from tests.engines import memory
from tests.test_embed_thread import CONFIG
from tests.ways import PATIENCE_S, Held, Stuck, end, on_loop

pytestmark = pytest.mark.nixl


@pytest.fixture
def owner() -> Iterator[EngineThread]:
    made = EngineThread(CONFIG, memory(1)[0]).start(PATIENCE_S)
    yield made
    with contextlib.suppress(SystemExit):  # the tests that end its loop have seen that
        made.close(PATIENCE_S)


def request(
    owner: EngineThread, name: str, blocks: list[int], *, recall: bool = True, engine_id: str = "prefill"
) -> dict[str, Any]:
    group = PrefillRanks(engine_id, [owner.engine.endpoint])
    return group.make_params(name, [(0, blocks)], 16 * len(blocks), written=True, recall=recall)


def lend(owner: EngineThread, name: str, blocks: list[int], *, recall: bool = True) -> dict[str, Any]:
    params = request(owner, name, blocks, recall=recall)
    owner.submit([Lend(params)])
    while owner._desk._handed:
        owner.call(asyncio.sleep(0), PATIENCE_S)
    return params


async def _held(owner: EngineThread) -> list[tuple[str, str]]:
    return [(hold.request_id, hold.reason) for hold in owner.engine.holds()]


def held(owner: EngineThread) -> list[tuple[str, str]]:
    """Return the requests that hold blocks, and why."""
    return owner.call(_held(owner), PATIENCE_S)


def named(holds: tuple[HeldBlocks, ...]) -> list[tuple[str, dict[int, tuple[int, ...]]]]:
    return [(hold.request_id, dict(hold.blocks)) for hold in holds]


def told(owner: EngineThread) -> Finished:
    assert owner.wait(PATIENCE_S)
    return owner.take_finished()


# -- what comes before it, and when it returns -----------------------------------------------------------


def test_orders_that_were_submitted_before_a_recall_come_first_and_later_ones_after_it(owner: EngineThread) -> None:
    every = [request(owner, f"r{i}", [i]) for i in range(20)]
    with ThreadPoolExecutor(1) as pool:
        with Stuck(owner):
            owner.submit([Lend(params) for params in every])
            recalled = pool.submit(owner.recall, every, PATIENCE_S)
            while len(owner._desk._handed) <= len(every):
                time.sleep(0)
            owner.submit([Lend(request(owner, "later", [0]))])
        assert recalled.result(PATIENCE_S) == ()
    ends: list[tuple[str, str]] = []
    while len(ends) < len(every):
        finished = told(owner)
        ends += [(end.request_id, end.cause) for end in finished.finished_sending]
        assert not finished.refused
    assert ends == [(f"r{i}", "revoked") for i in range(20)]
    assert held(owner) == [("later", "lent")]


def test_a_recall_returns_the_other_holders_of_its_blocks_and_of_each_only_these(owner: EngineThread) -> None:
    params = lend(owner, "r", [1, 2])
    lend(owner, "plain", [2, 3], recall=False)
    lend(owner, "marked", [1, 2, 4])
    lend(owner, "apart", [5])
    assert named(owner.recall([params])) == [("plain", {0: (2,)}), ("marked", {0: (1, 2)})]
    assert [request_id for request_id, _ in held(owner)] == ["plain", "marked", "apart"]
    assert owner.recall([]) == ()


def test_a_late_recall_raises_and_stays_ordered_and_another_call_waits_for_it(owner: EngineThread) -> None:
    params = lend(owner, "r", [1])
    with Stuck(owner):
        with pytest.raises(
            TimeoutError, match=r"within 0\.01 s, and stays ordered: write none.*; its thread is at .*wait"
        ):
            owner.recall([params], 0.01)
        with pytest.raises(TimeoutError, match="stays ordered"):
            owner.recall([params], 0)
    finished = told(owner)
    assert [end.request_id for end in finished.finished_sending] == ["r"], "the recall was lost with its caller's time"
    assert owner.recall([params]) == ()


def test_threads_that_recall_the_same_requests_at_once_all_return(owner: EngineThread) -> None:
    params = lend(owner, "r", [1, 2])
    lend(owner, "plain", [2], recall=False)
    with ThreadPoolExecutor(4) as pool:
        with Stuck(owner):
            calls = [pool.submit(owner.recall, [params, params], PATIENCE_S) for _ in range(4)]
        found = {str(named(call.result(PATIENCE_S))) for call in calls}
    assert found == {str([("plain", {0: (2,)})])}


def test_a_request_that_was_recalled_before_its_lend_is_never_lent(owner: EngineThread) -> None:
    params = request(owner, "r", [1])
    assert owner.recall([params]) == ()
    owner.submit([Lend(params)])
    (refused,) = told(owner).refused
    assert "withdrawn" in str(refused.error)
    assert held(owner) == []


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, "1", float("nan"), float("inf"), -1.0, True, 1e300])
def test_a_time_out_that_is_no_duration_is_refused_and_nothing_is_recalled(owner: EngineThread, timeout_s: Any) -> None:
    params = lend(owner, "r", [1])
    with pytest.raises(LocalProtocolError, match=r"timeout_s is .*; it must be a finite number"):
        owner.recall([params], timeout_s)
    assert held(owner) == [("r", "lent")]


@pytest.mark.parametrize("is_over", [False, True])
def test_a_bad_request_among_good_ones_is_refused_and_nothing_is_recalled(owner: EngineThread, is_over: bool) -> None:
    good = lend(owner, "r", [1])
    unmarked, strange = request(owner, "u", [2], recall=False), request(owner, "s", [2], engine_id="other")
    others = [
        (unmarked, LocalProtocolError, "'u' was not made to be recalled"),
        (strange, LocalProtocolError, "'other'"),
    ]
    if is_over:
        owner.close(PATIENCE_S)
    for bad, error, says in [
        *others,
        (good | {"key": 5}, RemoteProtocolError, "malformed"),
        (None, RemoteProtocolError, "malformed"),
    ]:
        for requests in ([bad], [good, bad], [bad, good]):
            with pytest.raises(error, match=says):
                owner.recall(requests)  # type: ignore[arg-type]
    for wrong in (good, None, 5):
        with pytest.raises(LocalProtocolError, match=r"requests is .*; give a list"):
            owner.recall(wrong)  # type: ignore[arg-type]
    assert is_over or held(owner) == [("r", "lent")]


def test_a_thread_that_was_never_started_recalls_nothing(owner: EngineThread) -> None:
    params, other = request(owner, "r", [1]), EngineThread(CONFIG, memory(1)[0])
    with pytest.raises(EngineClosed, match="not started"):
        other.recall([params])
    other.close()
    with pytest.raises(EngineClosed, match="closed before it was started"):
        other.recall([params])


def test_the_engines_own_thread_is_told_where_to_recall(owner: EngineThread) -> None:
    params = lend(owner, "r", [1])

    async def recall() -> None:
        with pytest.raises(WrongThread, match=r"use engine\.recall\(\)"):
            owner.recall([params])
        assert owner.engine.recall([params]) == ()

    owner.call(recall(), PATIENCE_S)
    assert held(owner) == []
    with pytest.raises(WrongThread):
        owner.engine.recall([params])


# -- the engine's end ------------------------------------------------------------------------------------


class Reader:
    """An engine that reads some requests of an owner, and hears of no end of a read before it is closed."""

    def __init__(self, owner: EngineThread, *requests: dict[str, Any]) -> None:
        self._thread = EngineThread(dataclasses.replace(CONFIG, engine_id="decode"), memory(2)[0])
        self._plane = self._thread.engine._driver.data = Held(cast(NixlPlane, self._thread.engine._driver.data))
        self._thread.start(PATIENCE_S)
        self._plane.is_holding = True
        ids = [params["request_id"] for params in requests]
        pulls = zip(ids, requests, strict=True)
        self._thread.submit([Pull(request_id=x, groups=[(3 * 16, [int(x[-1])])], params=p) for x, p in pulls])
        deadline = time.monotonic() + PATIENCE_S
        while owner.call(_granted(owner), PATIENCE_S) < len(requests):
            assert time.monotonic() < deadline

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._thread.call(self._plane.let_go(), PATIENCE_S)
        self._thread.close(PATIENCE_S)


async def _granted(owner: EngineThread) -> int:
    return sum(len(lease.grants) for lease in owner.engine._driver.core.prefill.leases.values())


def lent_to_a_reader(owner: EngineThread) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lend a request with the mark, and one without that shares two of its blocks."""
    return lend(owner, "r1", [1, 2, 3, 4]), lend(owner, "r2", [2, 3, 5, 6], recall=False)


def test_a_recall_while_the_engine_closes_returns_what_is_promised_still() -> None:
    config = dataclasses.replace(CONFIG, lease=LeaseConfig(lease_s=60.0, grant_s=20.0))
    owner = EngineThread(config, memory(1)[0]).start(PATIENCE_S)
    marked, plain = lent_to_a_reader(owner)
    with ThreadPoolExecutor(1) as pool:
        with Reader(owner, marked, plain):
            closing = pool.submit(owner.close, 2 * PATIENCE_S)
            while owner.engine._driver.core.prefill.closed_as != "closed":
                time.sleep(0)
            assert named(owner.recall([marked], PATIENCE_S)) == [("r2", {0: (2, 3)})]
            assert not closing.done()
        assert closing.result(PATIENCE_S) == ()  # its reader has read to the end, and released
    assert owner.recall([marked]) == ()


def test_a_recall_after_the_end_returns_the_promises_that_the_end_cut_short(owner: EngineThread) -> None:
    marked, plain = lent_to_a_reader(owner)
    apart = lend(owner, "r3", [7, 8, 9, 10], recall=False)
    with Reader(owner, marked, plain, apart):
        assert {hold.request_id for hold in owner.close(LAST_S)} == {"r1", "r2", "r3"}
        (hold,) = owner.recall([marked])
        assert (hold.request_id, hold.blocks, hold.left_s > 0) == ("r2", {0: (2, 3)}, True)


def test_a_recall_during_an_end_that_crashes_returns_the_blocks_that_another_grant_keeps(owner: EngineThread) -> None:
    marked, plain = lent_to_a_reader(owner)
    with Reader(owner, marked, plain), ThreadPoolExecutor() as pool:
        closing = pool.submit(owner.close, 2 * PATIENCE_S)
        while owner.engine._driver.core.prefill.closed_as != "closed":
            time.sleep(0)
        on_loop(owner, end)
        assert named(owner.recall([marked], PATIENCE_S)) == [("r2", {0: (2, 3)})]
    with pytest.raises(SystemExit):
        closing.result(PATIENCE_S)


def test_a_recall_after_a_crash_that_ends_the_engine_in_order_returns(owner: EngineThread) -> None:
    marked, plain = lent_to_a_reader(owner)
    with Reader(owner, marked, plain):
        on_loop(owner, end)
        assert {request_id for request_id, _ in named(owner.recall([marked], PATIENCE_S))} <= {"r2"}
        owner._thread.join(PATIENCE_S)
        assert owner.recall([marked]) == ()


@pytest.mark.slow
def test_a_recall_after_a_crash_that_ends_no_engine_returns_when_all_promises_have_run_out(owner: EngineThread) -> None:
    marked, plain = lent_to_a_reader(owner)
    with Reader(owner, marked, plain):
        with Stuck(owner):
            for _ in range(MAX_CRASHES):
                on_loop(owner, end)
            began = time.monotonic()
        assert owner.recall([marked], PATIENCE_S) == ()
        assert time.monotonic() - began >= CONFIG.lease.grant_s
        leases = owner.engine._driver.core.prefill.leases.values()
        assert LeaseState.LENT not in {lease.state for lease in leases}, "nothing is granted any more"


def test_a_recall_that_ends_the_loop_says_so_and_another_call_returns(
    owner: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = lend(owner, "r", [1])
    monkeypatch.setattr(owner.engine, "recall", lambda _: end())
    with pytest.raises(EngineClosed, match="ended the engine's loop while this was carried out"):
        owner.recall([params], PATIENCE_S)
    monkeypatch.undo()
    assert owner.recall([params], PATIENCE_S) == ()
    with pytest.raises(SystemExit, match="enough"):
        owner.close(PATIENCE_S)


def test_a_recall_that_is_ordered_as_the_thread_ends_returns(owner: EngineThread) -> None:
    """The thread has answered all recalls that it knew, before it knew this one."""
    params = lend(owner, "r", [1])

    class TooLate(deque[Any]):
        def append(self, order: Any) -> None:
            owner.close(PATIENCE_S)
            super().append(order)

    owner._desk._handed = TooLate(owner._desk._handed)
    assert owner.recall([params], PATIENCE_S) == ()


def test_threads_that_recall_while_the_engine_is_closed_all_return(owner: EngineThread) -> None:
    every = [lend(owner, f"r{i}", [i]) for i in range(4)]
    begun = threading.Barrier(5)

    def hammer(params: dict[str, Any]) -> int:
        begun.wait(PATIENCE_S)
        count = 0
        while not owner._is_over or not count:
            assert owner.recall([params], PATIENCE_S) == ()
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(hammer, params) for params in every]
        begun.wait(PATIENCE_S)
        owner.close(PATIENCE_S)
        assert all(each.result(PATIENCE_S) for each in running)


def test_a_recall_is_carried_out_while_the_end_of_the_engine_waits(
    owner: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = lend(owner, "r", [1])
    began, go = asyncio.Event(), asyncio.Event()

    async def aclose(_: float | None = None) -> tuple[HeldBlocks, ...]:
        began.set()
        await go.wait()
        return ()

    monkeypatch.setattr(owner.engine, "aclose", aclose)
    owner._ask_to_end()
    owner.call(began.wait(), PATIENCE_S)
    assert owner.recall([params], PATIENCE_S) == ()
    assert held(owner) == []
    monkeypatch.undo()
    on_loop(owner, go.set)
