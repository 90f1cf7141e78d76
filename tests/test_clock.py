"""The clock that engines run by: boot time, and timers on the loop."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from asynckv.edges.clock import LoopClock
from asynckv.testing import ManualClock
from tests.engines import until


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


# -- the clock by hand -----------------------------------------------------------------------------------------


def test_timers_run_by_time_and_then_by_age_each_at_its_own_moment() -> None:
    clock, seen = ManualClock(100.0), list[tuple[str, float]]()

    def note(name: str, when: float) -> None:
        clock.call_at(when, lambda: seen.append((name, clock.now())))

    note("late", 103.0)
    note("first", 101.0)
    note("second", 101.0)
    note("never", 110.0)
    clock.advance(5.0)
    assert seen == [("first", 101.0), ("second", 101.0), ("late", 103.0)]
    assert clock.now() == 105.0


def test_a_timer_set_by_a_timer_runs_in_the_same_advance_if_it_is_due() -> None:
    clock, seen = ManualClock(0.0), list[float]()

    def again() -> None:
        seen.append(clock.now())
        clock.call_at(clock.now() + 1.0, again)

    clock.call_at(1.0, again)
    clock.advance(3.5)
    assert seen == [1.0, 2.0, 3.0]
    assert clock.now() == 3.5


def test_without_a_loop_a_timer_in_the_past_waits_for_the_next_advance_and_time_does_not_turn_back() -> None:
    clock, seen = ManualClock(10.0), list[float]()
    clock.call_at(3.0, lambda: seen.append(clock.now()))
    assert seen == []
    clock.advance(0.0)
    assert seen == [10.0]


async def test_on_a_loop_a_timer_in_the_past_runs_in_the_next_turn_unless_it_is_cancelled() -> None:
    clock, seen = ManualClock(10.0), list[str]()
    clock.call_at(10.0, lambda: seen.append("due"))
    clock.call_at(3.0, lambda: seen.append("cancelled")).cancel()
    assert seen == []
    await anyio.lowlevel.checkpoint()
    assert seen == ["due"]


def test_a_cancelled_timer_never_runs() -> None:
    clock, seen = ManualClock(0.0), list[str]()
    second = clock.call_at(2.0, lambda: seen.append("second"))

    def first() -> None:
        seen.append("first")
        second.cancel()

    timer = clock.call_at(1.0, first)
    clock.advance(5.0)
    timer.cancel()
    clock.advance(5.0)
    assert seen == ["first"]


def test_an_exception_stops_the_advance_and_keeps_the_other_timers() -> None:
    clock, seen = ManualClock(0.0), list[float]()

    def fail() -> None:
        raise ZeroDivisionError

    clock.call_at(1.0, fail)
    clock.call_at(2.0, lambda: seen.append(clock.now()))
    with pytest.raises(ZeroDivisionError):
        clock.advance(5.0)
    assert clock.now() == 1.0
    clock.advance(5.0)
    assert seen == [2.0]


def test_time_neither_goes_back_nor_stands_still_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(5.0)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="clock"):
            clock.advance(wrong)
    assert clock.now() == 5.0

    def again() -> None:
        clock.call_at(clock.now() + 1e-20, again)

    monkeypatch.setattr("asynckv.testing.clock.MOST_PER_ADVANCE", 100)
    again()
    with pytest.raises(AssertionError, match="without delay"):
        clock.advance(1.0)
