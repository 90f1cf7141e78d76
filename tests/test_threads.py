"""An engine belongs to one event loop: who calls from elsewhere is told so, and no turn is ever lost."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVarTuple

import anyio
import pytest
import structlog

from asynckv import (
    BackendError,
    Engine,
    EngineClosed,
    EngineConfig,
    LentRequest,
    LocalProtocolError,
    PeerUnreachable,
    PrefillRanks,
    PullConfig,
    PullTimeout,
    ReadFailed,
    Statistics,
    WrongThread,
)
from asynckv.core.events import TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.layout import register_memory
from asynckv.ports import AgentInfo
from asynckv.testing import SimControl, SimData, SimNetwork
from tests.commands import python
from tests.engines import Bench, memory, passing, turn_loop, until
from tests.lab.world import Process, World, WorldClock, WorldControl, WorldData

Ts = TypeVarTuple("Ts")

HARMLESS = {"config", "registration", "incarnation", "endpoint", "memory_epoch", "observation", "request_id", "is_over"}
"""What may be read from any thread."""


def public(kind: type) -> set[str]:
    """Names of what callers may use, with the two that `async with` does."""
    return {name for name in dir(kind) if not name.startswith("_") or name in ("__aenter__", "__aexit__")}


def calls(params: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Arguments for every public method of an engine."""
    return {
        "__aenter__": (),
        "__aexit__": (None, None, None),
        "start": (),
        "drain": (1.0,),
        "aclose": (),
        "suspend": (),
        "resume": (),
        "lend": (params,),
        "withdraw": (params,),
        "withdraw_ticket": ("f" * 32,),
        "lend_piece": (params | {"written": True, "recall": True}, "f" * 32),
        "end_pieces": ("f" * 32,),
        "is_followed": ("f" * 32,),
        "recall": ([params],),
        "reclaim": (1,),
        "follow": ("another", {"ticket": "f" * 32, "engine_id": "prefill", "endpoints": params["endpoints"]}),
        "announce": ("another", params),
        "pull": ("another", [(0, [2])], params),
        "cancel": ("d",),
        "returned": ("d",),
        "forget_peer": ("sim://1",),
        "statistics": (),
        "holds": (),
        "requests": (),
        "describe": (),
        "check_integrity": (),
    }


def elsewhere(call: Callable[[], Any]) -> BaseException | None:
    """Call in a thread, without a loop of its own and within one; what both raise, if it is the same."""

    async def inside() -> Any:
        found = call()
        return await found if inspect.isawaitable(found) else found

    def plain() -> Any:
        found = call()
        return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found

    kinds = []
    for way in (plain, lambda: asyncio.run(inside())):
        with ThreadPoolExecutor(1) as pool:
            kinds.append(pool.submit(way).exception(timeout=10))
    assert type(kinds[0]) is type(kinds[1]), kinds
    return kinds[0]


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


async def test_every_public_method_is_refused_from_another_thread_and_nothing_changes(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        lent_params, lent = prefill.lent(group, "lent", [1], written=True)
        announced = group.make_params("r", [(0, [3])], 16, written=True)
        decode.engine.announce("d", announced)
        await until(lambda: prefill.engine.statistics().gauges["parked"] == 1)
        await turn_loop(5)
        for side in (prefill, decode):
            engine = side.engine
            arguments = calls(group.make_params("new", [(0, [2])], 16))
            assert arguments.keys() == public(Engine) - HARMLESS, "a method of which nobody has said what it does"
            before = state(engine)
            for name, args in arguments.items():
                method = getattr(engine, name)
                error = elsewhere(lambda method=method, args=args: method(*args))  # type: ignore[misc]
                assert isinstance(error, WrongThread), f"{name}: {error!r}"
                if not name.startswith("__"):
                    is_async = inspect.iscoroutinefunction(method)
                    remedy = f"run_coroutine_threadsafe(engine.{name}" if is_async else f"threadsafe(engine.{name}"
                    assert remedy in str(error)
                assert state(engine) == before, name
        before = state(prefill.engine)
        assert public(LentRequest) - HARMLESS == {"owed", "wait_released", "withdraw"}
        for name in sorted(public(LentRequest) - HARMLESS):
            assert isinstance(elsewhere(getattr(lent, name)), WrongThread), name
        assert state(prefill.engine) == before
        # And everything goes on.
        prefill.engine.lend(announced)
        with anyio.fail_after(10):
            await decode.engine.pull("d", [(0, [5])], announced)
            await decode.engine.pull("e", [(0, [6])], lent_params)
            assert (await lent.wait_released()).cause == "released"
        assert decode.blocks([5, 6]) == prefill.blocks([3, 1])


def state(engine: Engine) -> tuple[Any, ...]:
    """All that a call may change."""
    engine.check_integrity()
    core, outbox = engine._driver.core, engine._driver.core.outbox
    known = (
        engine.statistics(),
        len(engine.holds()),
        core.prefill.closed_as,
        core.next_at,
        bool(outbox.messages),
        len(outbox.commands),
    )
    driver = engine._driver
    lent = {lease: lease.on_end for lease in core.prefill.leases.values()}
    own = driver._due is None, engine._driver.core.requests, lent, set(driver._loading)
    return known, own, engine._ending._closing, engine._ending._suspending


async def test_what_cannot_change_is_read_from_any_thread(sim: Bench) -> None:
    async with sim.pair() as (prefill, _, group):
        lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
        for name in HARMLESS:
            owner = lent if hasattr(lent, name) else prefill.engine
            assert elsewhere(lambda owner=owner, name=name: getattr(owner, name)) is None  # type: ignore[misc]
        lent.withdraw()


async def test_an_error_that_holds_blocks_is_waited_for_on_the_engines_loop(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        params, _ = prefill.lent(group, "r", [1], written=True)
        assert decode.data is not None
        decode.data.deferred = True
        task = asyncio.create_task(decode.engine.pull("d", [(0, [2])], params, timeout_s=2.0))
        await until(lambda: decode.data is not None and decode.data.running)
        with pytest.raises(PullTimeout) as told:
            await passing(sim, task)
        error = told.value
        assert error.held == {0: (2,)}
        assert isinstance(elsewhere(error.returned), WrongThread)
        for transfer in list(decode.data.running):
            decode.data.finish(transfer)
        with anyio.fail_after(10):
            await error.returned()


def test_outside_of_its_loop_an_engine_answers_questions_and_does_nothing() -> None:
    sim = Bench(False)
    engine = sim.side("prefill", 1).engine
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    params = PrefillRanks("prefill", [engine.endpoint]).make_params("r", [(0, [1])], 16)
    before = state(engine)
    with pytest.raises(WrongThread, match=r"call_soon_threadsafe\(engine\.lend, \.\.\.\)"):
        engine.lend(params)
    with pytest.raises(WrongThread, match=r"run_coroutine_threadsafe\(engine\.drain\(\.\.\.\), loop\)"):
        asyncio.run(engine.drain(0.0))
    assert state(engine) == before
    loop.run_until_complete(engine.aclose())
    loop.close()
    assert engine.statistics().gauges["leases"] == 0
    with pytest.raises(WrongThread, match="after the engine's event loop was closed"):
        asyncio.run(engine.aclose())


def test_an_engine_that_was_not_started_says_so() -> None:
    engine = Bench(False).side("prefill", 1).engine
    for ask in (engine.statistics, engine.holds, engine.check_integrity):
        with pytest.raises(EngineClosed, match="not started"):
            ask()
    with pytest.raises(WrongThread, match=r"outside of an event loop; await engine\.start"):
        engine.cancel("r")

    async def main() -> None:
        with pytest.raises(EngineClosed, match="not started"):
            await engine.pull("r", [], {}, retries=1)
        await engine.aclose()

    asyncio.run(main())


async def test_the_remedies_that_the_error_names_work(sim: Bench) -> None:
    async with sim.pair() as (prefill, decode, group):
        loop = asyncio.get_running_loop()
        params = group.make_params("r", [(0, [1])], 16, written=True)

        def scheduler() -> int:
            loop.call_soon_threadsafe(prefill.engine.lend, params)
            pulled = asyncio.run_coroutine_threadsafe(decode.engine.pull("d", [(0, [2])], params), loop)
            return pulled.result(timeout=10).num_bytes

        with ThreadPoolExecutor(1, "scheduler") as pool, pytest.raises(WrongThread, match="from thread 'scheduler_0'"):
            pool.submit(prefill.engine.holds).result(timeout=10)
        assert await asyncio.to_thread(scheduler) == len(decode.blocks([2]))
        assert decode.blocks([2]) == prefill.blocks([1])


async def test_params_are_made_on_any_thread(sim: Bench) -> None:
    async with sim.pair() as (_, _, group):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda i: group.make_params(f"r{i}", [(0, [i % 8])], 16), range(2000)))
    keys = [tuple(params["key"]) for params in made]
    assert sorted(sequence for _, _, sequence, _ in keys) == list(range(2000))
    assert len({token for *_, token in keys}) == 2000
    assert [params["request_id"] for params in made] == [f"r{i}" for i in range(2000)]


# -- no turn is lost ---------------------------------------------------------------------------------------


class Broken(Exception):
    """What a plane, a log or a loop raises once."""


class OnceBroken:
    """Raises the n-th time that it is asked."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Broken


class BrokenControl(SimControl):
    """A control plane that raises once."""

    def __init__(self, network: SimNetwork, strike: OnceBroken) -> None:
        super().__init__(network)
        self._strike = strike

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        self._strike()
        return super().send(to, packet)

    def disconnect(self, address: Address) -> None:
        self._strike()
        super().disconnect(address)


class BrokenData(SimData):
    """A data plane that raises once, before or after it has posted."""

    def __init__(self, network: SimNetwork, name: str, strike: OnceBroken) -> None:
        super().__init__(network, name)
        self._strike = strike

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        self._strike()
        return super().post_read(transfer_id, name, read)

    def watch(self, serving: bool) -> None:
        self._strike()
        super().watch(serving)


async def served(bench: Bench, prefill: Engine, decode: Engine, number: int) -> None:
    """One request, from its params to the end of its lease, however long repeats take."""
    group = PrefillRanks("prefill", [prefill.endpoint])
    params = group.make_params(f"r{number}", [(0, [1])], 16, written=True)
    lent = prefill.lend(params)
    # Blocks of its own: one that may have been posted by a plane that raised is kept from everybody.
    task = asyncio.create_task(decode.pull(f"r{number}", [(0, [2 + number])], params, timeout_s=20.0))
    ended = asyncio.create_task(lent.wait_released())
    await passing(bench, asyncio.gather(task, ended, return_exceptions=True))
    try:
        await task
    except ReadFailed:
        assert decode.statistics().counters["internal_errors"]


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("plane", ["control", "data"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_plane_that_raises_costs_no_turn(role: str, plane: str, nth: int) -> None:
    bench = Bench(False)
    never = OnceBroken(-1)
    engines = {}
    for i, name in enumerate(("prefill", "decode")):
        strike = OnceBroken(nth) if name == role else never
        control = BrokenControl(bench.network, strike if plane == "control" else never)
        data = BrokenData(bench.network, f"{name}-{i}", strike if plane == "data" else never)
        config = EngineConfig(engine_id=name, pull=PullConfig(held_s=2.0))
        engines[name] = Engine(config, memory(i)[0], data=data, control=control, clock=bench.clock)
    prefill, decode = engines["prefill"], engines["decode"]
    await prefill.start()
    await decode.start()
    for number in range(3):
        await served(bench, prefill, decode, number)
    for engine in engines.values():
        engine.check_integrity()
    await passing(bench, asyncio.gather(*(engine.aclose() for engine in engines.values())))


async def timed_out(bench: Bench, prefill: Engine, decode: Engine) -> None:
    """A request that is never lent."""
    params = PrefillRanks("prefill", [prefill.endpoint]).make_params("never", [(0, [1])], 16)
    await passing(bench, asyncio.create_task(decode.pull("never", [(0, [9])], params, timeout_s=1.0)))


async def test_a_log_that_raises_loses_no_outcome(sim: Bench) -> None:
    def broken(logger: object, method: str, event: object) -> Any:
        raise Broken

    structlog.configure(processors=[broken])
    async with sim.pair() as (prefill, decode, _):
        await served(sim, prefill.engine, decode.engine, 0)
        with pytest.raises(PullTimeout):
            await timed_out(sim, prefill.engine, decode.engine)
        await served(sim, prefill.engine, decode.engine, 1)
        counters = decode.engine.statistics().counters
        assert counters["log.failed"] >= 4
        assert "internal_errors" not in counters


class BrokenLoop(asyncio.SelectorEventLoop):
    """An event loop that has no room for another callback, for a while."""

    is_full = False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if self.is_full:
            raise Broken
        return super().call_soon(callback, *args, context=context)


def test_a_turn_that_could_not_be_had_is_asked_for_again() -> None:
    loop, bench = BrokenLoop(), Bench(False)

    async def main() -> None:
        async with bench.pair() as (prefill, decode, group):
            await turn_loop(3)
            params = group.make_params("r", [(0, [1])], 16, written=True)
            engines = prefill.engine, decode.engine
            before = [state(engine)[:2] for engine in engines]
            acts: list[Callable[[], object]] = [
                lambda: prefill.engine.lend(params),
                lambda: decode.engine.announce("d", params),
                lambda: decode.engine.forget_peer("sim://1"),
                lambda: decode.engine.cancel("d"),
            ]
            for act in acts:
                loop.is_full = True
                try:
                    with pytest.raises(Broken):
                        act()
                finally:
                    loop.is_full = False
            assert [state(engine)[:2] for engine in engines] == before
            prefill.engine.lend(params)
            with anyio.fail_after(10):
                await decode.engine.pull("d", [(0, [2])], params)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


# -- a loop that is away -----------------------------------------------------------------------------------


class Alone:
    """One engine in a simulated process, whose loop does what the application tells it to."""

    def __init__(self) -> None:
        self.world = World(1)
        self.process = self.world.processes["p"] = Process(self.world, "p", epoch=500.0)
        registration, arrays = memory(1)
        data = WorldData(self.process, "agent", arrays, registration.layout.memories)
        self.engine = Engine(
            EngineConfig(engine_id="prefill"),
            register_memory(registration.layout),
            data=data,
            control=WorldControl(self.process, "sim://p"),
            clock=WorldClock(self.process),
        )
        self.process.spawn(self.engine.start)
        self.world.run(0.1)

    def lend(self) -> None:
        group = PrefillRanks("prefill", [self.engine.endpoint])
        params = group.make_params("r", [(0, [1])], 16, lease_s=3000.0)
        self.process.call_at(self.world.now, self.engine.lend, params)

    def compute(self, at: float, seconds: float) -> None:
        """The application's step: nothing else runs on the loop meanwhile."""

        def step() -> None:
            self.process.now += seconds

        self.process.call_at(at, step)

    @property
    def statistics(self) -> Statistics:
        return self.engine.statistics()


@pytest.fixture
def alone() -> Iterator[Alone]:
    found = Alone()
    yield found
    assert not found.world.violation
    found.world.close()


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.getMessage().startswith("loop_was_away")]


@pytest.mark.parametrize("is_lent", [True, False])
@pytest.mark.parametrize("at", [5.0, 5.1, 6.3, 7.4])
def test_a_loop_that_was_away_says_so_at_once(
    alone: Alone, caplog: pytest.LogCaptureFixture, at: float, is_lent: bool
) -> None:
    if is_lent:
        alone.lend()
    alone.compute(at, 6.0)
    alone.world.run(at + 6.01)
    [record] = said(caplog)
    seconds = record.seconds  # type: ignore[attr-defined]
    assert 6.0 - (0.3 if is_lent else 2.6) < seconds <= 6.01
    assert record.leases == is_lent  # type: ignore[attr-defined]
    statistics = alone.statistics
    assert statistics.loop_lag_most_s == pytest.approx(seconds, abs=1e-3)
    assert statistics.loop_lags["10"] == 1
    assert statistics.counters["loop.was_away"] == 1
    alone.world.run(at + 60)
    assert len(said(caplog)) == 1
    assert alone.statistics.loop_lag_s < 0.01


def test_a_process_that_was_stopped_was_away(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    alone.world.at(20.0, lambda: alone.process.freeze(9.0))
    alone.world.run(30.0)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_loop_that_has_nothing_to_do_was_not_away(
    alone: Alone, caplog: pytest.LogCaptureFixture, is_lent: bool
) -> None:
    if is_lent:
        alone.lend()
    alone.world.run(1000.0)
    assert not said(caplog)
    statistics = alone.statistics
    assert statistics.loop_lag_most_s < 0.01
    # Idle, an engine is woken every 2.5 s.
    assert sum(statistics.loop_lags.values()) <= (4200 if is_lent else 410)


def test_a_longer_absence_is_told_of_however_often_it_was_away_before(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    alone.lend()
    steps = [2.0, 2.0, 2.0, 2.0, 2.0, 4.0]
    for i, seconds in enumerate(steps):
        alone.compute(10.0 + sum(steps[:i]) + 0.5 * i, seconds)
    alone.world.run(40.0)
    told = [round(r.seconds) for r in said(caplog)]  # type: ignore[attr-defined]
    assert told == [2, 2, 2, 2, 4]
    assert said(caplog)[-1].not_logged_s == pytest.approx(2.0, abs=0.3)  # type: ignore[attr-defined]


def test_steps_that_are_always_too_long_do_not_fill_the_log(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    alone.lend()
    for i in range(100):
        alone.compute(10.0 + 3.0 * i, 2.0)
    alone.world.run(320.0)
    assert 25 <= len(said(caplog)) <= 35
    assert alone.statistics.counters["loop.was_away"] == 100
    logged = sum(1 + getattr(record, "not_logged", 0) for record in said(caplog))
    assert 90 <= logged <= 100


@pytest.mark.slow
@pytest.mark.nixl
async def test_a_step_that_holds_a_real_loop_is_noticed_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with Bench(True).pair() as (prefill, _, group):
        lent = prefill.engine.lend(group.make_params("r", [(0, [1])], 16))
        await asyncio.sleep(0.5)
        assert not said(caplog)
        asyncio.get_running_loop().call_soon(time.sleep, 1.6)  # the application's step: the loop is held by it
        began = time.monotonic()
        while not said(caplog):  # noqa: ASYNC110 - a log rings no bell
            await asyncio.sleep(0)
        assert 1.6 <= time.monotonic() - began < 2.5
        assert all(1.3 < r.seconds < 2.5 for r in said(caplog))  # type: ignore[attr-defined]
        assert prefill.engine.statistics().loop_lag_most_s > 1.3
        lent.withdraw()


async def test_who_waited_for_a_loop_that_is_away_is_told_once_in_full(
    sim: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async with sim.pair() as (_, decode, group):
        sim.network.fate = lambda sender, to, packet: "drop"

        async def fail(count: int) -> list[logging.LogRecord]:
            caplog.clear()
            pulls = [
                decode.engine.pull(f"d{i}", [(0, [i])], group.make_params(f"r{i}", [(0, [i])], 16))
                for i in range(count)
            ]
            ends = await passing(sim, asyncio.gather(*pulls, return_exceptions=True))
            assert all(isinstance(end, PeerUnreachable) for end in ends)
            return [r for r in caplog.records if r.getMessage().startswith("pull_ended")]

        first, *others = await fail(30)
        assert hasattr(first, "history")
        assert len(others) == 29
        assert {r.same_as for r in others} == {first.pull_id}  # type: ignore[attr-defined]
        assert {r.request_id for r in (first, *others)} == {f"d{i}" for i in range(30)}  # type: ignore[attr-defined]
        assert max(len(r.getMessage()) for r in others) < 300
        # Later it is said again.
        sim.clock.advance(60)
        [again] = await fail(1)
        assert hasattr(again, "history")
        sim.network.fate = lambda sender, to, packet: "deliver"


def engine_on(data: SimData) -> Engine:
    return Engine(EngineConfig(engine_id="e"), memory(1)[0], data=data, control=SimControl(SimNetwork()))


@pytest.mark.parametrize("name", ["start", "aclose", "drain"])
def test_while_a_data_plane_starts_the_engine_has_its_home(name: str) -> None:
    """A signal handler's thread may close an engine that is just being started: it must not find it free."""
    inside, go = threading.Event(), threading.Event()

    class Slow(SimData):
        async def start(self, memories: Any, on_ready: Any) -> AgentInfo:
            inside.set()
            assert go.wait(30)
            return await super().start(memories, on_ready)

    engine = engine_on(Slow(SimNetwork(), "a"))

    async def life() -> None:
        async with engine:
            assert engine.memory_epoch == 0

    async def elsewhere() -> None:
        with pytest.raises(WrongThread, match=f"engine.{name} was called from"):
            await (engine.drain(0) if name == "drain" else getattr(engine, name)())

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asyncio.run, life())
        assert inside.wait(30)
        try:
            assert engine.memory_epoch == 0
            asyncio.run(elsewhere())
        finally:
            go.set()
        first.result(30)


async def test_an_engine_lets_go_of_one_memory_before_it_takes_another() -> None:
    """Of two that resume it at once, one that fails must not close what the other has begun."""
    gate, fails = asyncio.Event(), [False]
    gate.set()

    class Fails(SimData):
        async def start(self, memories: Any, on_ready: Any) -> AgentInfo:
            if fails.pop():
                raise BackendError("no")
            return await super().start(memories, on_ready)

        async def quiesce(self) -> None:
            await gate.wait()

    engine = engine_on(Fails(SimNetwork(), "a"))
    async with engine:
        await engine.suspend()
        gate.clear()
        fails += [False, True]
        first = asyncio.create_task(engine.resume())
        await until(lambda: fails == [False])
        with pytest.raises(LocalProtocolError, match="another resume is under way"):
            await engine.resume()
        gate.set()
        with pytest.raises(BackendError):
            await first
        await engine.resume()
        assert engine.memory_epoch == 1


async def test_an_engine_whose_data_plane_still_starts_takes_nothing_but_its_end() -> None:
    """The loop turns meanwhile: a child takes seconds to start on a busy host."""
    inside, go = asyncio.Event(), asyncio.Event()

    class Slow(SimData):
        async def start(self, memories: Any, on_ready: Any) -> AgentInfo:
            inside.set()
            await go.wait()
            return await super().start(memories, on_ready)

        async def quiesce(self) -> None:
            go.set()

    engine = engine_on(Slow(SimNetwork(), "a"))
    starting = asyncio.create_task(engine.start())
    await inside.wait()
    for call in (engine.statistics, engine.holds, engine.requests, lambda: engine.withdraw({})):
        with pytest.raises(EngineClosed, match="not started"):
            call()
    with pytest.raises(LocalProtocolError, match="started before"):
        await engine.start()
    assert await engine.aclose() == ()
    with pytest.raises(EngineClosed, match="closed while it started"):
        await starting
    with pytest.raises(EngineClosed, match="was closed"):
        await engine.start()


async def test_an_engine_that_is_resumed_slowly_is_resumed_once_and_may_be_closed_meanwhile() -> None:
    inside, go = asyncio.Event(), asyncio.Event()
    go.set()

    class Slow(SimData):
        async def start(self, memories: Any, on_ready: Any) -> AgentInfo:
            inside.set()
            await go.wait()
            return await super().start(memories, on_ready)

    engine = engine_on(Slow(SimNetwork(), "a"))
    await engine.start()
    await engine.suspend()
    inside.clear()
    go.clear()
    resuming = asyncio.create_task(engine.resume())
    await inside.wait()
    with pytest.raises(LocalProtocolError, match="another resume is under way"):
        await engine.resume()
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(EngineClosed, match="closed while it started"):
        await resuming
    await closing
    assert engine.memory_epoch == 0


FORKED = """
import asyncio, os, sys
from asynckv import Engine, EngineClosed, EngineConfig, EngineDesk, EngineThread, PrefillRanks
from asynckv.testing import SimControl, SimData, SimNetwork
from tests.engines import memory

def made(network=SimNetwork()):
    return Engine(EngineConfig(engine_id="e"), memory(1)[0], data=SimData(network, "e"), control=SimControl(network))

def refused(call):
    try:
        call()
    except EngineClosed as exc:
        assert "forked after its engine was made" in str(exc), exc
        assert "'spawn'" in str(exc), exc
    else:
        raise AssertionError(call)

async def child(engine, fresh, lent, params, thread):
    for call in (engine.start, engine.aclose, fresh.start, lambda: engine.pull("r", [(0, [2])], params)):
        try:
            await asyncio.wait_for(call(), 5)
        except EngineClosed as exc:
            assert "forked after its engine was made" in str(exc), exc
        else:
            raise AssertionError(call)
    for call in (
        engine.statistics, engine.holds, engine.requests, lent.owed, lambda: engine.lend(params),
        lambda: engine.cancel("r"), lambda: engine.observation.ask(engine.holds, 1.0), thread.start,
    ):
        refused(call)
    engine.endpoint, engine.memory_epoch, engine.config

async def parent():
    async with made() as engine:
        params = PrefillRanks("e", [engine.endpoint]).make_params("r", [(0, [1])], 16, written=True)
        lent, fresh, thread = engine.lend(params), made(), EngineThread(EngineConfig(engine_id="t"), memory(1)[0])
        if not (pid := os.fork()):
            try:
                refused(lambda: engine.withdraw(params))
                asyncio.run(child(engine, fresh, lent, params, thread))
            except BaseException as exc:
                print(repr(exc), file=sys.stderr)
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        engine.withdraw(params)
        engine.statistics()
        await lent.wait_released()
    print("good")

asyncio.run(parent())
"""


def test_the_child_of_a_fork_is_told_that_the_engine_stayed_with_the_parent() -> None:
    done = python("-W", "ignore", "-c", FORKED)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
