"""The schedule, the prefix cache's model and the blocks of a wave: pure, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynckv.tools.bench.blocks import Allocation, Allocator
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.schedule import Engines, Place, PrefixCache, Request, make_schedule
from asynckv.tools.bench.workload import Workload
from asynckv.tools.plan.models import Heads, Model, Projection, State

STATE = State((Projection("x", 8, 4),), 3, 8, (4, 8), "float32")
MODEL = Model("tiny", (Heads(4, 16), Heads(4, 16, window=20), STATE))
DECODE, PREFILL = Place("decode", 0), Place("prefill", 0)


# -- the prefix cache ----------------------------------------------------------------------------------


class Oracle:
    """The same by ages: what was used longest ago leaves; of one prompt, its end first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock = capacity, 0
        self.used: dict[int, int] = {}

    def num_cached(self, chunks: Sequence[int]) -> int:
        n = 0
        while n < len(chunks) and chunks[n] in self.used:
            n += 1
        return n

    def use(self, chunks: Sequence[int]) -> None:
        for chunk in chunks[::-1]:
            self.clock += 1
            self.used[chunk] = self.clock
        newest = sorted(self.used, key=lambda c: -self.used[c])[: self.capacity]
        self.used = {c: self.used[c] for c in newest}


@given(st.integers(0, 8), st.lists(st.lists(st.integers(0, 9), unique=True, max_size=6), max_size=30))
def test_the_cache_agrees_with_a_naive_one(capacity: int, prompts: list[list[int]]) -> None:
    cache, oracle = PrefixCache(capacity), Oracle(capacity)
    for prompt in prompts:
        assert cache.num_cached(prompt) == oracle.num_cached(prompt)
        cache.use(prompt)
        oracle.use(prompt)
        assert len(cache._chunks) == len(oracle.used) <= capacity


def test_the_beginning_of_a_prompt_outlives_its_end() -> None:
    cache = PrefixCache(3)
    cache.use([1, 2, 3, 4])
    assert cache.num_cached([1, 2, 3, 4]) == 3
    cache.use([5])
    assert cache.num_cached([1, 2, 3, 4]) == 2


# -- the schedule --------------------------------------------------------------------------------------


def schedule(work: Workload, engines: Engines = Engines(), **options: Any) -> list[Request]:  # noqa: B008
    return make_schedule(work, Options(**options), engines)


def test_a_trace_keeps_its_gaps_and_speed_divides_them() -> None:
    work = Workload("t", (10,) * 3, arrivals_s=(0.0, 3.0, 9.0))
    assert [r.arrival_s for r in schedule(work, speed=1.0)] == [0.0, 3.0, 9.0]
    assert [r.arrival_s for r in schedule(work, speed=3.0)] == [0.0, 1.0, 3.0]
    assert [r.arrival_s for r in schedule(work)] == [0.0] * 3


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    times = np.array([r.arrival_s for r in schedule(Workload("t", (10,) * 5000), rate=200.0)])
    gaps = np.diff(times, prepend=0.0)
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.05)
    # Exponential gaps vary by as much as their mean.
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.06)


def test_a_shared_prefix_is_cached_once_it_was_pulled() -> None:
    work = Workload("t", (64, 64, 40, 64), chunks=((1, 2), (1, 2), (1, 2), (1, 3)), chunk_tokens=16)
    assert [r.cached for r in schedule(work)] == [0, 32, 32, 16]
    assert [r.cached for r in schedule(work, prefix_cache=0)] == [0] * 4
    assert [r.cached for r in schedule(work, engines=Engines(decode=2))] == [0, 0, 32, 16]


def test_a_last_chunk_that_is_not_full_is_cached_as_far_as_it_goes() -> None:
    work = Workload("t", (600, 600, 700), chunks=((1, 2), (1, 2), (1, 3)), chunk_tokens=512)
    assert [r.cached for r in schedule(work)] == [0, 600, 512]


def test_what_is_a_prompts_own_pushes_others_out() -> None:
    work = Workload("t", (16, 64, 16), chunks=((1,), (2,), (1,)), chunk_tokens=16)
    assert [r.cached for r in schedule(work, prefix_cache=80)] == [0, 0, 16]
    assert [r.cached for r in schedule(work, prefix_cache=64)] == [0, 0, 0]


@given(st.integers(1, 4), st.integers(1, 4))
def test_every_pair_of_engines_gets_its_turn(prefill: int, decode: int) -> None:
    engines = Engines(prefill, decode)
    turns = prefill * decode
    routes = [engines.route(n) for n in range(2 * turns)]
    assert routes[:turns] == routes[turns:]
    assert set(routes[:turns]) == {
        (Place("prefill", p), Place("decode", d)) for p in range(prefill) for d in range(decode)
    }


@given(st.integers(0, 3))
def test_a_seed_gives_its_schedule_again(seed: int) -> None:
    def make(s: int) -> list[Request]:
        work = Workload("t", (64,) * 20).sharing(32, 3, s)
        return schedule(work, rate=5.0, seed=s)

    assert make(seed) == make(seed)
    assert make(seed) != make(seed + 1)


# -- blocks --------------------------------------------------------------------------------------------


@st.composite
def waves(draw: st.DrawFn) -> tuple[Experiment, list[Request], dict[str, list[int]]]:
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=12))
    groups = [draw(st.integers(0, 1)) for _ in lengths]
    chunk = draw(st.sampled_from([8, 16, 24]))
    chunks = tuple(tuple(100 * g + i for i in range(min(n, 96) // chunk)) for n, g in zip(lengths, groups, strict=True))
    options = Experiment(
        Options(
            block_size=f"{draw(st.sampled_from([8, 16, 64]))}:16",
            engines=f"{draw(st.integers(1, 2))}:1",
            prefix_cache=draw(st.sampled_from([0, 64, 10_000])),
        ),
        MODEL,
        Workload("drawn", tuple(lengths), chunks=chunks, chunk_tokens=chunk),
    )
    sizes = {
        role: [draw(st.integers(20, 60)), draw(st.integers(8, 30)), draw(st.integers(1, 6))] for role in options.sides
    }
    return options, options.schedule(), sizes


@given(waves(), st.booleans())
def test_a_block_is_anothers_only_if_it_is_lent_with_the_same_tokens(
    wave: tuple[Experiment, list[Request], dict[str, list[int]]], is_random: bool
) -> None:
    options, requests, sizes = wave
    allocator = Allocator(sizes, options, np.random.default_rng(0) if is_random else None)
    taken: list[Allocation] = []
    for request in requests:
        if (found := allocator.take(request)) is None:
            break
        taken.append(found)
    content: dict[tuple[Place, int, int], object] = {}
    for request, lent, pulled in taken:
        size = options.sides[request.lender.role].block_size
        for group, (first, blocks) in enumerate(lent):
            assert first == 0
            for i, block in enumerate(blocks):
                if block is not None:
                    assert 0 <= block < sizes[request.lender.role][group]
                    whole = (i + 1) * size <= min(request.tokens, len(request.chunks) * options.workload.chunk_tokens)
                    mine = (i, tokens_of(options, request, (i + 1) * size)) if whole and group < 2 else object()
                    assert content.setdefault((request.lender, group, block), mine) == mine
        for group, (_, blocks) in enumerate(pulled):
            for block in blocks:
                if block is not None:
                    assert 0 <= block < sizes[request.reader.role][group]
                    assert content.setdefault((request.reader, group, block), mine := object()) is mine
    assert len(taken) == len(requests) or not fits(options, sizes, taken, requests[len(taken)])


def tokens_of(options: Experiment, request: Request, end: int) -> tuple[int, ...]:
    return request.chunks[: -(-end // options.workload.chunk_tokens)]


def fits(options: Experiment, sizes: dict[str, list[int]], taken: list[Allocation], request: Request) -> bool:
    """Whether a request would have fitted even if it shared nothing."""
    for place, cached in ((request.lender, 0), (request.reader, request.cached)):
        used: list[set[int]] = [set() for _ in sizes[place.role]]
        for other, lent, pulled in taken:
            for at, lists in ((other.lender, lent), (other.reader, pulled)):
                for group, (_, blocks) in enumerate(lists if at == place else ()):
                    used[group] |= {b for b in blocks if b is not None}
        needs = [sum(there) for _, there in options.places(place.role, request.tokens, cached)]
        if any(n > size - len(u) for n, size, u in zip(needs, sizes[place.role], used, strict=True)):
            return False
    return True


def test_equal_prefixes_are_lent_from_the_same_blocks() -> None:
    chunks = ((1, 2), (1, 2), (1, 3))
    options = Experiment(
        Options(), Model("one", (Heads(4, 16),)), Workload("t", (64,) * 3, chunks=chunks, chunk_tokens=16)
    )
    allocator = Allocator({"prefill": [20], "decode": [20]}, options)
    lent = [a.lent[0][1] for a in map(allocator.take, options.schedule()) if a is not None]
    assert lent == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7, 8]]
    assert (allocator.num_lent, allocator.num_shared) == (12, 3)
