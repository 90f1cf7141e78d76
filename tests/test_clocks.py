"""Offsets between clocks: the true one lies inside, or it is told that nothing can be said."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.tools.diagnose.clocks import DRIFT, LATE_S, Pair, align

Clock = Callable[[float], float]


def clock(ahead: float, drift: float = 0.0, steps: Sequence[tuple[float, float]] = ()) -> Clock:
    """What a clock shows at a true time."""
    return lambda at: at + ahead + drift * at + sum(by for when, by in steps if at >= when)


def talk(
    clocks: dict[str, Clock],
    rng: random.Random,
    *,
    number: int = 40,
    seconds: float = 100.0,
    late_s: float = LATE_S,
    between: Sequence[tuple[str, str]] = (),
) -> list[Pair]:
    """Exchanges at random: delays that are mostly short, and lines that are written a little late."""
    pairs = []
    ways = list(between) or [(a, b) for a in clocks for b in clocks if a != b]
    for _ in range(number):
        cause, effect = rng.choice(ways)
        sent = rng.uniform(0, seconds)
        came = sent + rng.choice((0.0, rng.expovariate(1000), rng.expovariate(10)))
        cause_line, effect_line = sent + rng.uniform(0, late_s), came + rng.expovariate(200)
        pairs.append(Pair(cause, clocks[cause](cause_line), effect, clocks[effect](effect_line)))
    rng.shuffle(pairs)
    return pairs


def true_offset(clocks: dict[str, Clock], process: str, reference: str, at: float) -> float:
    """How far ahead a clock is of the reference, where both look at the same moment."""
    return clocks[process](at) - clocks[reference](at)


@settings(max_examples=20)
@given(
    st.integers(0, 1 << 32),
    st.lists(
        st.tuples(st.floats(-1e5, 1e5), st.floats(-DRIFT / 2.1, DRIFT / 2.1)),
        min_size=2,
        max_size=5,
    ),
    st.integers(3, 120),
)
def test_the_true_offset_lies_inside(seed: int, given_clocks: list[tuple[float, float]], number: int) -> None:
    rng = random.Random(seed)
    clocks = {f"p{i}": clock(*each) for i, each in enumerate(given_clocks)}
    found = align(talk(clocks, rng, number=number), dict.fromkeys(clocks, ""))
    assert found.conflicts == []
    for process in clocks:
        reference = found.groups[found.group(process)][0]
        for at in (-20.0, 0.0, 31.0, 99.0, 150.0):
            offset = found.offset(process, clocks[process](at))
            # Rounding: times of today have 0.2 us, and so have clocks that are a day apart.
            assert abs(true_offset(clocks, process, reference, at) - offset.seconds) <= offset.within_s + 1e-4


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.floats(0.5, 1e4), st.sampled_from((-1, 1)), st.floats(5, 95))
def test_a_clock_that_was_set_is_found_and_never_silently_wrong(seed: int, by: float, sign: int, when: float) -> None:
    rng = random.Random(seed)
    clocks = {"a": clock(3.0), "b": clock(-2.0, 50e-6, [(when, sign * by)])}
    # Enough on both sides of it, in both directions: what nobody contradicts cannot be found.
    pairs = talk(clocks, rng, number=400)
    ways = [(clocks["a"], clocks["b"]), (clocks["b"], clocks["a"])]
    pairs += [
        Pair("ab"[i], one(at), "ba"[i], other(at + 0.001))
        for i, (one, other) in enumerate(ways)
        for at in (1.0, 2.0, 97.0, 98.0)
    ]
    found = align(pairs, dict.fromkeys(clocks, ""), prefer=["a"])
    (conflict,) = found.conflicts
    assert conflict.names == ("b", "a")
    assert conflict.seconds == pytest.approx(by, abs=0.3 + DRIFT * by)
    # By the reference's clock, which is as far from the other's as the contradiction is wide.
    assert conflict.since - by <= clocks["a"](when) <= conflict.until + by
    for at in (*range(0, 100, 3), when - 0.01, when + 0.01):
        offset = found.offset("b", clocks["b"](at))
        assert abs(true_offset(clocks, "b", "a", at) - offset.seconds) <= offset.within_s + 1e-6


def test_more_exchanges_make_it_sharper() -> None:
    clocks = {"a": clock(0.0), "b": clock(12.3)}
    few, many = (
        align(talk(clocks, random.Random(1), number=n), {"a": "", "b": ""}).offset("b", 62.3).within_s for n in (6, 600)
    )
    assert many < few
    assert LATE_S / 4 < many < 0.01


def test_what_was_learned_ages() -> None:
    clocks = {"a": clock(0.0), "b": clock(1.0)}
    found = align(talk(clocks, random.Random(2), number=200, seconds=10.0), {"a": "", "b": ""}, prefer=["a"])
    soon, late = found.offset("b", 6.0).within_s, found.offset("b", 1011.0).within_s
    assert late - soon == pytest.approx(1000 * DRIFT, rel=0.02)


def test_a_few_lines_that_are_very_late_do_no_harm() -> None:
    rng = random.Random(3)
    clocks = {"a": clock(0.0), "b": clock(7.0)}
    pairs = talk(clocks, rng, number=1000)
    for i in rng.sample(range(1000), 10):
        pair = pairs[i]  # its cause was written 0.3 s late
        pairs[i] = Pair(pair.cause, pair.cause_at + 0.3, pair.effect, pair.effect_at)
    found = align(pairs, {"a": "", "b": ""}, prefer=["a"])
    assert found.conflicts == []
    for at in range(100):
        offset = found.offset("b", clocks["b"](at))
        assert abs(7.0 - offset.seconds) <= offset.within_s < 0.02


def test_processes_of_one_host_share_its_clock() -> None:
    clocks = {"a": clock(0.0), "b1": clock(5.0), "b2": clock(5.0)}
    pairs = talk(clocks, random.Random(4), between=[("a", "b1"), ("b1", "a")])
    found = align(pairs, {"a": "one", "b1": "two", "b2": "two"}, prefer=["a"])
    assert found.clock == {"a": "a", "b1": "b1", "b2": "b1"}
    assert found.groups == [["a", "b1"]]
    assert found.offset("b2", 50.0) == found.offset("b1", 50.0)
    assert found.not_shared == []


def test_unless_their_exchanges_contradict_it() -> None:
    clocks = {"a": clock(0.0), "b": clock(5.0)}
    found = align(talk(clocks, random.Random(5)), {"a": "localhost", "b": "localhost"}, prefer=["a"])
    assert found.not_shared == ["localhost"]
    offset = found.offset("b", 50.0)
    assert abs(5.0 - offset.seconds) <= offset.within_s < 0.1


def test_one_host_is_exact() -> None:
    clocks = {"a": clock(0.0), "b": clock(0.0)}
    found = align(talk(clocks, random.Random(6)), {"a": "one", "b": "one"})
    assert found.offset("b", 50.0).within_s == 0.0
    assert found.groups == [["a"]]


def test_who_never_met_cannot_be_compared() -> None:
    clocks = {"a": clock(0.0), "b": clock(1.0), "c": clock(2.0), "d": clock(3.0)}
    pairs = talk(clocks, random.Random(7), between=[("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")])
    found = align(pairs, dict.fromkeys(clocks, ""), prefer=["b", "c"])
    assert found.groups == [["b", "a"], ["c", "d"]]
    assert found.group("a") != found.group("d")
    # Of who was only heard, and never answered, nothing is known.
    one_way = align(talk(clocks, random.Random(8), between=[("a", "b")]), {"a": "", "b": ""})
    assert len(one_way.groups) == 2


def test_a_way_round_is_as_good_as_its_parts() -> None:
    clocks = {f"p{i}": clock(100.0 * i) for i in range(5)}
    line = [(f"p{i}", f"p{i + 1}") for i in range(4)]
    pairs = talk(clocks, random.Random(9), number=400, between=line + [(b, a) for a, b in line])
    found = align(pairs, dict.fromkeys(clocks, ""), prefer=["p0"])
    widths = [found.offset(f"p{i}", 50.0 + 100 * i).within_s for i in range(5)]
    assert widths == sorted(widths)
    assert 0.0 == widths[0] < widths[4] < 0.1


def test_nothing_is_needed() -> None:
    found = align([], {})
    assert found.groups == []
    alone = align([], {"a": "", "b": "x"})
    assert alone.groups == [["a"], ["b"]]
    assert alone.align("a", 5.0) == 5.0


def test_where_only_one_direction_was_heard_before_a_step_it_is_as_wide_as_the_step() -> None:
    before = [Pair("a", float(at), "b", at + 5.001) for at in range(5)]
    after = [Pair("a", float(at), "b", at + 9.001) for at in range(10, 20)]
    after += [Pair("b", at + 9.0, "a", at + 0.001) for at in range(10, 20)]
    found = align([*before, *after], {"a": "", "b": ""}, prefer=["a"])
    assert len(found.conflicts) == 1
    early, late = found.offset("b", 7.0), found.offset("b", 24.0)
    assert abs(late.seconds - 9.0) <= late.within_s < 4.01
    assert abs(early.seconds - 5.0) <= early.within_s
    assert early.within_s > 1


def test_a_single_contradiction_is_not_believed() -> None:
    clocks = {"a": clock(0.0), "b": clock(1.0)}
    pairs = talk(clocks, random.Random(10), number=200)
    pairs.append(Pair("a", 50.5, "b", 51.0))  # half a second before it was sent
    found = align(pairs, {"a": "", "b": ""}, prefer=["a"])
    assert found.conflicts == []
    offset = found.offset("b", 51.0)
    assert abs(offset.seconds - 1.0) <= offset.within_s < 0.02


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.integers(2, 4), st.sampled_from([1.0, 60.0, 3600.0, 86400.0 * 3]))
def test_clocks_that_are_set_while_little_is_said_are_aligned_somehow(seed: int, number: int, seconds: float) -> None:
    rng = random.Random(seed)
    clocks = {
        f"p{i}": clock(rng.uniform(-5, 5), 0.0, [(rng.uniform(0.2, 0.8) * seconds, 10 ** rng.uniform(-1, 3))])
        for i in range(number)
    }
    pairs = talk(clocks, rng, number=rng.choice([1, 2, 4, 20]), seconds=seconds)
    found = align(pairs, dict.fromkeys(clocks, ""))
    for name in clocks:
        offset = found.offset(name, rng.uniform(0, seconds))
        assert offset.within_s >= 0
