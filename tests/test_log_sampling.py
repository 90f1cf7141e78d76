"""Requests that end well are sampled, and the same ones on both sides."""

from __future__ import annotations

import random

import pytest

from asynckv.observe.sampling import Rate, Sampler


def token(rng: random.Random) -> str:
    return f"{rng.getrandbits(128):032x}"


def test_whoever_sees_few_logs_them_all() -> None:
    rng, sampler = random.Random(1), Sampler(10.0)
    assert all(sampler.take(token(rng), i * 0.2) for i in range(200))
    assert sampler.zeros == 0


@pytest.mark.parametrize("per_s", [30, 1000, 20_000])
def test_no_more_than_configured_and_not_many_fewer(per_s: int) -> None:
    rng, sampler = random.Random(2), Sampler(10.0)
    seconds = 20
    chosen = sum(sampler.take(token(rng), i / per_s) for i in range(per_s * seconds))
    assert 10 * seconds / 3 < chosen <= 10 * (seconds + 1)


@pytest.mark.parametrize("ratio", [1, 3, 8])
def test_what_one_side_logs_the_other_mostly_does_too(ratio: int) -> None:
    """A prefill engine serves several decode engines: it sees `ratio` times as many requests."""
    rng = random.Random(3)
    prefill, decode = Sampler(10.0), Sampler(10.0)
    both: list[tuple[bool, bool]] = []
    for i in range(60_000):
        now, name = i / 3000, token(rng)
        lent = prefill.take(name, now)
        if i % ratio == 0:
            both.append((lent, decode.take(name, now + 0.05)))
    lent_here = [read for lent, read in both if lent]
    assert len(lent_here) > 10
    assert sum(lent_here) / len(lent_here) > 0.75


def test_after_a_burst_all_are_logged_again() -> None:
    rng, sampler = random.Random(4), Sampler(10.0)
    for i in range(50_000):
        sampler.take(token(rng), i / 50_000)
    assert sampler.zeros > 5
    now = 1.0
    while sampler.zeros:
        now += 1.0
        sampler.take(token(rng), now)
    assert now < 15
    sampler.take(token(rng), now + 1000)
    assert sampler.take(token(rng), now + 1001)


def test_a_time_of_silence_forgets_the_burst() -> None:
    rng, sampler = random.Random(5), Sampler(10.0)
    for i in range(50_000):
        sampler.take(token(rng), i / 50_000)
    sampler.take(token(rng), 3600.0)
    assert sampler.zeros <= 1


def test_none_are_logged_if_none_are_wanted() -> None:
    sampler = Sampler(0.0)
    assert not sampler.take("0" * 32, 1.0)


def test_what_is_left_out_is_counted_once() -> None:
    rate = Rate(1.0, 2.0)
    assert [rate.take(0.0) for _ in range(5)] == [True, True, False, False, False]
    assert rate.left_out() == {"not_logged": 3}
    assert rate.left_out() == {}
    assert rate.take(1.0)
