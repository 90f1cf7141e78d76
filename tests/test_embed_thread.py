"""The engine's thread: what waits for what, which callers learn of its end, and the cost of a hand-over."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import uvloop

import asynckv.embed.thread
from asynckv import (
    BackendError,
    ConfigError,
    EngineClosed,
    EngineConfig,
    LeaseConfig,
    LocalProtocolError,
    NixlConfig,
    PrefillRanks,
    PullConfig,
    WrongThread,
)
from asynckv.edges.bell import Bell
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.embed import Cancel, EngineThread, Finished, Lend, Pull
from asynckv.embed.thread import MAX_CRASHES
from asynckv.ports import AgentInfo
from tests.commands import python
from tests.engines import memory
from tests.ways import PATIENCE_S, Held, Stuck, end, on_loop

pytestmark = pytest.mark.nixl

CONFIG = EngineConfig(
    engine_id="prefill",
    lease=LeaseConfig(lease_s=2.0, grant_s=0.5),
    pull=PullConfig(drain_s=0.2),
    nixl=NixlConfig(posting_threads=0),
)


@pytest.fixture
def made() -> EngineThread:
    return EngineThread(CONFIG, memory(1)[0])


@pytest.fixture
def thread(made: EngineThread) -> Iterator[EngineThread]:
    made.start(PATIENCE_S)
    yield made
    made.close(PATIENCE_S)


def params_of(thread: EngineThread, name: str = "r", block: int = 1) -> dict[str, Any]:
    return PrefillRanks("prefill", [thread.engine.endpoint]).make_params(name, [(0, [block])], 16, written=True)


def test_what_a_question_raises_is_raised_where_it_was_asked(thread: EngineThread) -> None:
    def question() -> None:
        raise KeyError("asked")

    with pytest.raises(KeyError, match="asked"):
        thread.engine.observation.ask(question, PATIENCE_S)


def end_of(thread: EngineThread) -> list[BaseException]:
    """Ask until nothing but `EngineClosed` comes; what came before."""
    found: list[BaseException] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            thread.take_finished()
        except EngineClosed:
            return found
        except BaseException as exc:
            found.append(exc)
        thread.wait(0.01)
    raise AssertionError("it never ended")


# -- hand-overs ------------------------------------------------------------------------------------------


def test_a_hand_over_wakes_the_loop_once_however_many_orders(thread: EngineThread) -> None:
    before = thread.statistics(3600.0).counters["embed.wakeups"]
    thread.submit([Cancel(f"r{i}") for i in range(1000)])
    deadline = time.monotonic() + PATIENCE_S
    while thread._desk.num_orders < 1000 and time.monotonic() < deadline:
        thread.call(asyncio.sleep(0), PATIENCE_S)
    with Stuck(thread):
        for i in range(100):
            thread.submit([Cancel(f"r{i}")])
        thread.submit([])
    while thread._desk.num_orders < 1100 and time.monotonic() < deadline:
        thread.call(asyncio.sleep(0), PATIENCE_S)
    assert thread._num_wakeups - before == 2, "one for each hand-over, and one for all that came while it was busy"
    while (counters := thread.statistics(0.0).counters)["embed.orders"] < 1100 and time.monotonic() < deadline:
        thread.call(asyncio.sleep(0), PATIENCE_S)
    assert (counters["embed.handovers"], counters["embed.orders"]) == (101, 1100)


def test_nothing_waits_for_a_loop_that_is_stuck(thread: EngineThread) -> None:
    with Stuck(thread):
        thread.submit([Cancel("r")])
        assert not thread.take_finished()
        assert thread.statistics(0.0).gauges["leases"] == 0
        assert not thread.wait(0.0)
        with pytest.raises(TimeoutError, match=r"sleep did not end within 0.01 s; its thread is at .*in wait"):
            thread.call(asyncio.sleep(0), 0.01)


def test_many_threads_hand_over_and_take_and_each_thing_is_told_once(thread: EngineThread) -> None:
    every, taken = 400, []
    bad = [Pull(request_id=f"r{i}", groups=[], params={}) for i in range(every)]

    def hammer(number: int) -> None:
        for order in bad[number::4]:
            thread.submit([order])
            taken.append(thread.take_finished())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hammer, range(4)))
    deadline = time.monotonic() + PATIENCE_S
    while sum(len(t.failed) for t in taken) < every and time.monotonic() < deadline:
        assert thread.wait(PATIENCE_S)
        taken.append(thread.take_finished())
    assert sorted(f.request_id for t in taken for f in t.failed) == sorted(order.request_id for order in bad)


def test_whoever_waits_is_woken(thread: EngineThread) -> None:
    poll = select.poll()
    poll.register(thread.fileno(), select.POLLIN)
    assert not poll.poll(0)
    assert not thread.wait(0.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(thread.wait, PATIENCE_S) for _ in range(2)]
        thread.submit([Lend({})])
        assert poll.poll(1e3 * PATIENCE_S)
        assert [each.result(PATIENCE_S) for each in waiting] == [True, True]
    assert len(thread.take_finished().refused) == 1
    assert not poll.poll(0)
    assert not thread.wait(0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(thread.wait, PATIENCE_S)]
        thread.close(PATIENCE_S)
        assert waiting[0].result(PATIENCE_S) is False


@pytest.mark.parametrize("what", ["news", "the end"])
def test_all_threads_that_wait_return_when_there_is_news(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """One thread is about to poll. Then another silences the bell, just after it was rung."""
    thread.fileno()
    bell, others = thread._news_bell, threading.Event()
    silence, at_poll, found = bell.silence, threading.Event(), list[list[tuple[int, int]]]()

    class Poll:
        def __init__(self) -> None:
            self._poll = poll()
            self.register = self._poll.register

        def poll(self, _: float) -> None:
            at_poll.set()
            assert others.wait(PATIENCE_S)
            found.append(self._poll.poll(0))

    def silence_late() -> None:
        if at_poll.is_set():
            thread.submit([Lend({})]) if what == "news" else thread.close(PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while not (thread._has_news or thread._is_over) and time.monotonic() < deadline:
                time.sleep(0)
        silence()

    poll = select.poll
    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(bell, "silence", silence_late)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(thread.wait, PATIENCE_S)
        assert at_poll.wait(PATIENCE_S)
        assert thread.wait(PATIENCE_S) is (what == "news")
        others.set()
        assert waits.result(PATIENCE_S) is (what == "news")
    assert found[0]


def test_news_that_came_before_a_thread_listened_are_signalled(thread: EngineThread) -> None:
    thread.submit([Lend({})])
    deadline = time.monotonic() + PATIENCE_S
    while not thread._has_news and time.monotonic() < deadline:
        time.sleep(0)
    assert select.select([thread.fileno()], [], [], 0)[0]


def test_a_bell_that_was_closed_rings_at_no_file_that_has_its_number_now() -> None:
    bell, other = Bell(), os.eventfd(0, os.EFD_NONBLOCK)
    number = bell.fileno()
    bell.close()
    try:
        os.dup2(other, number)
        bell.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
        os.close(number)


def test_all_who_ask_first_at_once_hear_the_same_bell(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[int] = []

    class Made(Bell):
        def __init__(self) -> None:
            super().__init__()
            monkeypatch.undo()
            others.append(thread.fileno())  # another caller asks just now

    monkeypatch.setattr(asynckv.embed.thread, "Bell", Made)
    asked = thread.fileno()
    assert others in ([], [asked])


# -- the start -------------------------------------------------------------------------------------------


def test_a_start_that_fails_is_raised_by_name_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = EngineConfig(engine_id="e", bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        thread, before = EngineThread(config, memory(1)[0]), set(threading.enumerate())
        with pytest.raises(BackendError, match=r"Address (already )?in use"):
            thread.start(PATIENCE_S)
    assert not thread._thread.is_alive()
    for left in set(threading.enumerate()) - before:  # told to end
        left.join(PATIENCE_S)
    assert set(threading.enumerate()) <= before
    assert not thread.take_finished()
    with pytest.raises(EngineClosed, match="failed to start: BackendError"):
        thread.submit([Cancel("r")])
    with pytest.raises(EngineClosed, match="no statistics"):
        thread.statistics()
    with pytest.raises(LocalProtocolError, match="started before"):
        thread.start()
    thread.close()
    thread.close()


class Slow(NixlPlane):
    """NIXL that takes its time to start."""

    def __init__(self, honest: Any) -> None:
        super().__init__(honest._config, honest._name)
        self.inside, self.go = threading.Event(), threading.Event()

    async def start(self, memories: Any, on_ready: Any) -> AgentInfo:
        self.inside.set()
        assert self.go.wait(PATIENCE_S)
        return await super().start(memories, on_ready)


@pytest.mark.slow
def test_a_start_that_takes_too_long_is_called_off(made: EngineThread) -> None:
    plane = made.engine._driver.data = Slow(made.engine._driver.data)
    with pytest.raises(TimeoutError, match=r"did not start within 0.05 s; its thread is at .*, in wait"):
        made.start(0.05)
    with pytest.raises(EngineClosed):
        made.submit([Cancel("r")])
    with pytest.raises(TimeoutError, match="did not end"):
        made.close(0.05)
    plane.go.set()
    made.close(PATIENCE_S)
    assert not made._thread.is_alive()


@pytest.mark.slow
def test_whoever_closes_while_it_starts_ends_the_start(made: EngineThread) -> None:
    plane = made.engine._driver.data = Slow(made.engine._driver.data)
    with ThreadPoolExecutor(2) as pool:
        starting = pool.submit(made.start, PATIENCE_S)
        assert plane.inside.wait(PATIENCE_S)
        closing = pool.submit(made.close, PATIENCE_S)
        while not made._is_closing:
            time.sleep(0)
        plane.go.set()
        closing.result(PATIENCE_S)
        assert isinstance(starting.exception(PATIENCE_S), EngineClosed)
    assert not made._thread.is_alive()


def test_whoever_closes_as_the_thread_begins_waits_for_its_end(
    made: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = made._thread.start

    def begin_and_close() -> None:
        begin()
        made._started.result(PATIENCE_S)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(made.close, PATIENCE_S).result(PATIENCE_S)

    monkeypatch.setattr(made._thread, "start", begin_and_close)
    with pytest.raises(EngineClosed, match="closed while it started"):
        made.start(PATIENCE_S)
    assert not made._thread.is_alive()


def test_a_close_that_comes_before_the_thread_has_a_loop_ends_the_start() -> None:
    def make_loop() -> asyncio.AbstractEventLoop:
        closed.close()
        return asyncio.new_event_loop()

    closed = EngineThread(CONFIG, memory(1)[0], loop_factory=make_loop)
    with pytest.raises(EngineClosed, match="closed while it started"):
        closed.start(PATIENCE_S)
    assert not closed._thread.is_alive()


def test_nothing_runs_before_the_start_and_after_a_close_there_is_none(made: EngineThread) -> None:
    with pytest.raises(EngineClosed, match="not started"):
        made.submit([Cancel("r")])
    with pytest.raises(EngineClosed, match="not started"):
        made.call(asyncio.sleep(0), 1.0)
    assert not made.take_finished()
    made.close()
    with pytest.raises(EngineClosed):
        made.start()


# -- the end ---------------------------------------------------------------------------------------------


def test_an_exception_that_ends_the_loop_is_told_once_and_by_name(thread: EngineThread) -> None:
    params = params_of(thread)
    thread.submit([Lend(params), Lend(params_of(thread, "other", 2))])
    thread.call(asyncio.sleep(0), PATIENCE_S)

    on_loop(thread, end)
    found: list[BaseException] = []
    told = Finished()
    deadline = time.monotonic() + PATIENCE_S
    while not found or len(told.finished_sending) < 2:
        assert time.monotonic() < deadline
        try:
            told.finished_sending += thread.take_finished().finished_sending
        except BaseException as exc:
            found.append(exc)
        thread.wait(0.05)
    assert [(type(exc), str(exc)) for exc in found] == [(SystemExit, "enough")]
    # The engine was ended in order, and told so.
    assert {end.cause for end in told.finished_sending} == {"revoked"}
    assert end_of(thread) == []
    with pytest.raises(EngineClosed, match="SystemExit: enough"):
        thread.submit([Cancel("r")])
    with pytest.raises(EngineClosed, match="SystemExit: enough"):
        thread.call(asyncio.sleep(0), 1.0)
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive()


def test_whoever_hears_that_the_loop_has_ended_finds_that_no_orders_are_taken(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread.fileno()
    assert thread._news_bell is not None
    ring, was_shut = thread._news_bell.ring, list[bool]()

    def note() -> None:
        was_shut.append(thread._desk._is_shut)
        ring()

    monkeypatch.setattr(thread._news_bell, "ring", note)
    on_loop(thread, end)
    thread._thread.join(PATIENCE_S)
    assert was_shut
    assert all(was_shut)
    with pytest.raises(SystemExit, match="enough"):
        thread.submit([Cancel("r")])


def test_an_engine_that_is_closed_while_it_starts_does_not_start(
    made: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(made.engine, "start", hang)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(made.start, PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        made.close(PATIENCE_S)
        with pytest.raises(EngineClosed, match="closed while it started"):
            starting.result(PATIENCE_S)


@pytest.mark.parametrize("method", ["submit", "call", "close"])
def test_whoever_asks_next_is_told(thread: EngineThread, method: str) -> None:
    on_loop(thread, end)
    thread._thread.join(PATIENCE_S)
    ask: dict[str, Callable[[], Any]] = {
        "submit": lambda: thread.submit([Cancel("r")]),
        "call": lambda: thread.call(asyncio.sleep(0), PATIENCE_S),
        "close": lambda: thread.close(PATIENCE_S),
    }
    with pytest.raises(SystemExit, match="enough"):
        ask[method]()
    assert end_of(thread) == []


def test_what_a_call_raises_is_not_told_again_when_it_ends_the_loop(thread: EngineThread) -> None:
    async def end() -> None:
        raise SystemExit("enough")

    with pytest.raises(SystemExit, match="enough"):
        thread.call(end(), PATIENCE_S)
    assert end_of(thread) == []


def test_a_loop_that_is_stopped_from_outside_ends_the_engine(thread: EngineThread) -> None:
    assert thread._loop is not None
    on_loop(thread, thread._loop.stop)
    thread._thread.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="stopped from outside"):
        thread.take_finished()
    assert end_of(thread) == []


def test_closing_a_stuck_loop_is_bounded_and_can_be_tried_again(thread: EngineThread) -> None:
    params = params_of(thread)
    thread.submit([Lend(params)])
    with Stuck(thread):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"did not end within 0.05 s; its thread is at .*, in wait"):
            thread.close(0.05)
        assert time.monotonic() - began < PATIENCE_S / 2
        with pytest.raises(EngineClosed):
            thread.submit([Cancel("r")])
        assert not thread.take_finished()
    thread.close(PATIENCE_S)
    assert [end.request_id for end in thread.take_finished().finished_sending] == ["r"]
    assert not thread._thread.is_alive()


def test_whoever_closes_has_what_was_handed_over_before_carried_out(thread: EngineThread) -> None:
    names = [f"r{i}" for i in range(20)]
    with Stuck(thread):
        for block, name in enumerate(names):
            # A pull has its turn before what follows it.
            thread.submit([Pull(request_id=name, groups=[], params={}), Lend(params_of(thread, name, block))])
        with pytest.raises(TimeoutError):
            thread.close(0.0)
    thread.close(PATIENCE_S)
    told = thread.take_finished()
    assert [end.request_id for end in told.finished_sending] == [failed.request_id for failed in told.failed] == names
    assert not told.refused


def test_of_those_who_close_at_once_the_one_with_least_time_is_heard(thread: EngineThread) -> None:
    with Stuck(thread):
        for timeout_s in (60.0, 0.25, 30.0):
            thread._ask_to_end(timeout_s)
    thread._thread.join(PATIENCE_S)
    assert thread._close_s == 0.25


def test_each_pull_is_told_once_though_the_loop_cannot_end_the_engine() -> None:
    prefill = EngineThread(CONFIG, memory(1)[0]).start(PATIENCE_S)
    decode = EngineThread(dataclasses.replace(CONFIG, engine_id="decode"), memory(2)[0])
    plane = decode.engine._driver.data = Held(cast(NixlPlane, decode.engine._driver.data))
    decode.start(PATIENCE_S)
    plane.is_holding = True
    every = {name: params_of(prefill, name, i) for i, name in enumerate(("held", "reading", "waiting"))}
    prefill.submit([Lend(every["held"]), Lend(every["reading"])])
    decode.submit([Pull(request_id=name, groups=[(0, [i])], params=every[name]) for i, name in enumerate(every)])
    told, deadline = Finished(), time.monotonic() + PATIENCE_S
    while plane.running < 2:
        assert time.monotonic() < deadline
        decode.wait(0.01)
    decode.submit([Cancel("held")])
    while not told.failed:
        assert decode.wait(PATIENCE_S)
        told = decode.take_finished()
    assert told.failed[0].is_held

    began = time.monotonic()
    with Stuck(decode):  # so that nothing is ended between them
        for _ in range(MAX_CRASHES):
            on_loop(decode, end)
    decode._thread.join(PATIENCE_S)
    # Lent blocks are still read for as long as was promised, and belong to no other request before.
    assert time.monotonic() - began >= CONFIG.lease.grant_s
    with pytest.raises(SystemExit, match="enough"):
        decode.take_finished()
    last = decode.take_finished()
    assert [(f.request_id, f.is_held) for f in told.failed + last.failed] == [(name, True) for name in every]
    assert (last.retired, last.returned, last.finished_recving) == (list(every), [], [])
    prefill.close(PATIENCE_S)


def test_who_closes_with_less_time_than_whoever_closes_already_is_heard(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = thread.engine.aclose, list[float | None]()
    came, hurried = threading.Event(), asyncio.Event()

    async def aclose(timeout_s: float | None = None) -> Any:
        asked.append(timeout_s)
        came.set()
        if len(asked) == 1:
            await hurried.wait()
        hurried.set()
        return await honest(timeout_s)

    monkeypatch.setattr(thread.engine, "aclose", aclose)
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(thread.close, PATIENCE_S)
        assert came.wait(PATIENCE_S)
        thread.close(5.0)
        patient.result(PATIENCE_S)
    assert asked == [PATIENCE_S - 1.0, 4.0]


def test_whoever_waits_for_a_call_that_the_loop_never_came_to_is_told(thread: EngineThread) -> None:
    """It was handed over in the loop's last turn."""
    waiting = Future[None]()
    thread._calls.add(waiting)
    thread.close(PATIENCE_S)
    assert isinstance(waiting.exception(0), EngineClosed)


def test_a_call_that_is_handed_over_as_the_thread_ends_is_told(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has failed the calls that it knew, before it knew this one."""

    def too_late(work: Any, _: asyncio.AbstractEventLoop) -> Future[None]:
        work.close()
        thread.close(PATIENCE_S)
        return Future()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", too_late)
    with pytest.raises(EngineClosed, match="ended meanwhile: it was closed"):
        thread.call(asyncio.sleep(0), 1.0)


def test_many_may_close_at_once_and_again(thread: EngineThread) -> None:
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(thread.close, PATIENCE_S) for _ in range(8)]:
            each.result(PATIENCE_S)
    thread.close()
    assert not thread._thread.is_alive()


def test_closing_on_its_own_thread_waits_for_nothing(thread: EngineThread) -> None:
    async def close() -> None:
        thread.close()
        with pytest.raises(WrongThread, match="await it"):
            thread.call(asyncio.sleep(0), 1.0)

    thread.call(close(), PATIENCE_S)
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive()
    thread.close()


def test_a_call_that_is_under_way_when_the_engine_is_closed_is_told(thread: EngineThread) -> None:
    begun = threading.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.call, forever(), PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        thread.close(PATIENCE_S)
        assert isinstance(waiting.exception(PATIENCE_S), EngineClosed)


def test_no_order_is_lost_when_the_engine_is_closed_meanwhile(thread: EngineThread) -> None:
    accepted: list[str] = []
    begun = threading.Barrier(5)

    def hammer(number: int) -> None:
        begun.wait(PATIENCE_S)
        for i in range(100_000):
            name = f"{number}-{i}"
            try:
                thread.submit([Pull(request_id=name, groups=[], params={})])
            except EngineClosed:
                return
            accepted.append(name)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(hammer, number) for number in range(4)]
        begun.wait(PATIENCE_S)
        thread.close(PATIENCE_S)
        for each in running:
            each.result(PATIENCE_S)
    told = [f.request_id for f in thread.take_finished().failed]
    assert sorted(told) == sorted(accepted)


def test_a_thread_that_is_used_as_a_context_is_closed() -> None:
    with EngineThread(CONFIG, memory(1)[0]) as thread:
        assert thread.engine.endpoint.address
    assert not thread._thread.is_alive()


def test_another_kind_of_loop_serves_as_well() -> None:
    with EngineThread(CONFIG, memory(1)[0], loop_factory=uvloop.new_event_loop) as thread:
        thread.submit([Lend(params_of(thread)), Lend({})])
        while not thread.take_finished().refused:
            assert thread.wait(PATIENCE_S)
        assert type(thread._loop).__module__.startswith("uvloop")
        stuck = threading.Event()
        on_loop(thread, stuck.set)
        assert stuck.wait(PATIENCE_S)
    assert [end.request_id for end in thread.take_finished().finished_sending] == ["r"]


SCRIPT = """
import os, sys, threading
from asynckv import *
from tests.engines import memory

config = NixlConfig(posting_threads=1)
prefill = EngineThread(EngineConfig(engine_id="prefill", nixl=config), memory(1)[0]).start()
decode = EngineThread(EngineConfig(engine_id="decode", nixl=config), memory(2)[0]).start()
params = PrefillRanks("prefill", [prefill.engine.endpoint]).make_params("r", [(0, [1])], 16, written=True)
prefill.submit([Lend(params)])
decode.submit([Pull(request_id="r", groups=[(0, [2])], params=params)])
while not (finished := decode.take_finished()):
    assert decode.wait(10)
assert finished.finished_recving, finished
"""


def script(text: str) -> subprocess.CompletedProcess[str]:
    return python("-W", "error", "-c", SCRIPT + text)


@pytest.mark.slow
def test_a_process_that_forgets_to_close_ends_and_closes_its_engines() -> None:
    done = script(
        "import atexit\n"
        "def last(): print(prefill._thread.is_alive(), decode._thread.is_alive(), prefill._cause)\n"
        "from asynckv.embed import thread\n"
        "atexit.unregister(thread._at_exit); atexit.register(last); atexit.register(thread._at_exit)\n"
    )
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "False False it was closed"), done.stderr


DESCRIBED = """
import sys, threading
from asynckv import *
import asynckv.edges.survivor.process, tests.engines  # a type may be described on import, before other names

described = []
def watch(frame, event, _):
    if event == "call" and frame.f_code.co_filename.endswith("msgspec/_utils.py"):
        described.append((frame.f_code.co_name, frame.f_locals))
sys.setprofile(watch), threading.setprofile(watch)
"""


@pytest.mark.slow
def test_no_engine_is_the_first_to_decode_a_type() -> None:
    """Two threads that were it at once made msgspec end the process with SIGSEGV."""
    done = python("-c", DESCRIBED + SCRIPT + "prefill.close(); decode.close()\nprint(described)")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.slow
def test_the_child_of_a_fork_has_no_engine_and_the_parent_keeps_its_own() -> None:
    done = script(
        "pid = os.fork()\n"
        "if not pid:\n"
        "    found = []\n"
        "    recall = lambda: prefill.recall([])\n"  # the parent's engine may still lend
        "    for ask in (lambda: prefill.submit([Cancel('r')]), recall, prefill.take_finished, prefill.close):\n"
        "        try: found.append(ask())\n"
        "        except EngineClosed as exc: found.append('forked' in str(exc))\n"
        "    os._exit(0 if found == [True, True, True, ()] else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "prefill.close(); decode.close()\n"
        "print('good')\n"
    )
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "before", "after"), [(0.0005, 0.005, 0.0005), (0.0005, 0.0001, 0.0001), (None, 0.005, 0.005)]
)
def test_the_switch_interval_is_lowered_where_it_is_longer(given: float | None, before: float, after: float) -> None:
    was = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        with EngineThread(CONFIG, memory(1)[0], switch_interval_s=given):
            assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(was)


def test_a_switch_interval_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="switch_interval_s is 0"):
        EngineThread(CONFIG, memory(1)[0], switch_interval_s=0)
