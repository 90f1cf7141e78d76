"""Offsets between clocks: the true one lies inside, or it is told that nothing can be said."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.tools.diagnose.axis import CLOCKS_S, LATE_S, Axis, Offset, Pair
from asynckv.tools.diagnose.join import Process, Service


def aligned(
    ahead: Mapping[str, float], talk: Sequence[tuple[str, float, str, float]], hosts: Mapping[str, str] | None = None
) -> tuple[Axis, dict[str, Process]]:
    """Align processes of which each is so far ahead; the first is the reference. Times of exchanges are true ones."""
    processes = {
        name: Process(name, name, f"{name}/tp0", host=(hosts or {}).get(name, ""), lends=i == 0, num_records=-i)
        for i, name in enumerate(ahead)
    }
    pairs = [
        Pair(processes[cause], left + ahead[cause], processes[effect], came + ahead[effect])
        for cause, left, effect, came in talk
    ]
    return Axis(Service(processes), pairs), processes


def talked(
    names: Sequence[str], rng: random.Random, number: int = 40, ways: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, float, str, float]]:
    """Exchanges at random: delays that are mostly short, and lines that are written a little late."""
    out = []
    for _ in range(number):
        cause, effect = rng.choice(ways or [(a, b) for a in names for b in names if a != b])
        sent = rng.uniform(0, 100)
        came = sent + rng.choice((0.0, rng.expovariate(1000), rng.expovariate(10)))
        out.append((cause, sent + rng.uniform(0, LATE_S), effect, came + rng.expovariate(200)))
    return out


def both(*ways: tuple[str, str]) -> list[tuple[str, str]]:
    return [*ways, *((b, a) for a, b in ways)]


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=5), st.integers(3, 120))
def test_the_true_offset_lies_inside(seed: int, shifts: list[float], number: int) -> None:
    ahead = {f"p{i}": shift for i, shift in enumerate(shifts)}
    axis, processes = aligned(ahead, talked(list(ahead), random.Random(seed), number))
    assert axis.conflicts == []
    for name, process in processes.items():
        reference = axis.references[axis.group(process)]
        offset = axis.offset(process)
        # Rounding: times of today have 0.2 us, and so have clocks that are a day apart.
        assert abs(ahead[name] - ahead[reference.incarnation] - offset.seconds) <= offset.within_s + 1e-4
        assert axis.at(process, 50.0 + ahead[name]) == pytest.approx(
            50.0 + ahead[reference.incarnation], abs=offset.within_s + 1e-4
        )


def test_more_exchanges_make_it_sharper() -> None:
    ahead = {"a": 0.0, "b": 12.3}
    found = [aligned(ahead, talked("ab", random.Random(1), number)) for number in (6, 600)]
    few, many = (axis.offset(processes["b"]).within_s for axis, processes in found)
    assert many < few
    assert LATE_S / 4 < many < 0.01


def test_a_clock_that_was_set_is_told_and_both_values_lie_inside() -> None:
    before = [("a", float(at), "b", at + 0.001) for at in range(5)]
    after = [("a", float(at), "b", at + 4.001) for at in range(10, 20)]
    after += [("b", at + 4.0, "a", at + 0.001) for at in range(10, 20)]
    axis, processes = aligned({"a": 0.0, "b": 5.0}, [*before, *after])
    ((one, other, seconds),) = axis.conflicts
    assert (one, other) == ("a", "b")
    assert seconds == pytest.approx(4.0, abs=0.01)
    assert any("a clock was set" in x for x in axis.notes())
    offset = axis.offset(processes["b"])
    for shift in (5.0, 9.0):
        assert abs(offset.seconds - shift) <= offset.within_s + 1e-9


def test_lines_that_are_late_widen_the_interval() -> None:
    talk = [*talked("ab", random.Random(3), 1000), ("a", 50.3, "b", 50.0)]
    axis, processes = aligned({"a": 0.0, "b": 7.0}, talk)
    assert axis.conflicts == [], "too little to be told"
    offset = axis.offset(processes["b"])
    assert offset.seconds + offset.within_s == pytest.approx(7.0, abs=2 * LATE_S)
    assert offset.within_s < 0.16


def test_processes_of_one_host_share_its_clock() -> None:
    ahead = {"a": 0.0, "b1": 5.0, "b2": 5.0}
    talk = talked("", random.Random(4), ways=both(("a", "b1")))
    axis, processes = aligned(ahead, talk, {"a": "one", "b1": "two", "b2": "two"})
    assert axis.references == [processes["a"]]
    assert axis.offset(processes["b2"]) == axis.offset(processes["b1"])
    assert axis.notes() == []


def test_one_host_is_exact_and_exchanges_that_contradict_it_are_told() -> None:
    hosts = {"a": "localhost", "b": "localhost"}
    for shift in (0.0, 5.0):
        axis, processes = aligned({"a": 0.0, "b": shift}, talked("ab", random.Random(6)), hosts)
        assert axis.offset(processes["b"]) == Offset(0.0, 0.0)
        assert len(axis.references) == 1
        assert [x[:2] for x in axis.conflicts] == ([("localhost", "localhost")] if shift else [])
        assert any("two machines have one name" in x for x in axis.notes()) is bool(shift)


def test_who_never_met_cannot_be_compared() -> None:
    ways = both(("a", "b"), ("c", "d"))
    axis, processes = aligned({"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0}, talked("", random.Random(7), ways=ways))
    assert [axis.group(x) for x in processes.values()] == [0, 0, 1, 1]
    assert axis.references == [processes["a"], processes["c"]]
    assert axis.when(processes["d"], 50.0) == (50.0 - CLOCKS_S, 50.0 + CLOCKS_S)
    # Of a process that was only heard, and never answered, nothing is known.
    one_way, _ = aligned({"a": 0.0, "b": 1.0}, talked("", random.Random(8), ways=[("a", "b")]))
    assert len(one_way.references) == 2


def test_a_way_round_is_as_good_as_its_parts() -> None:
    ahead = {f"p{i}": 100.0 * i for i in range(5)}
    ways = both(*((f"p{i}", f"p{i + 1}") for i in range(4)))
    axis, processes = aligned(ahead, talked("", random.Random(9), 400, ways))
    widths = [axis.offset(x).within_s for x in processes.values()]
    assert widths == sorted(widths)
    assert 0.0 == widths[0] < widths[4] < 0.1


def test_nothing_is_needed() -> None:
    assert aligned({}, [])[0].references == []
    axis, processes = aligned({"a": 0.0, "b": 0.0}, [], {"b": "x"})
    assert axis.references == list(processes.values())
    assert axis.at(processes["a"], 5.0) == 5.0
