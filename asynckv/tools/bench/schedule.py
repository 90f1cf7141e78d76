"""The schedule: each request with its engines, its arrival and its cached tokens, all known before the run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asynckv.errors import ConfigError
from asynckv.tools.bench.options import Options
from asynckv.tools.bench.workload import Workload, cached_tokens


class Place(NamedTuple):
    """One engine: its role, and its number within the role."""

    role: str
    number: int


@dataclass(frozen=True, slots=True)
class Engines:
    prefill: int = 1
    decode: int = 1

    @property
    def places(self) -> list[Place]:
        return [Place(r, i) for r, n in (("prefill", self.prefill), ("decode", self.decode)) for i in range(n)]

    def name(self, place: Place) -> str:
        is_alone = getattr(self, place.role) == 1
        return place.role if is_alone else f"{place.role}-{place.number}"

    def route(self, number: int) -> tuple[Place, Place]:
        """Return the engine that lends a request, and the engine that pulls it."""
        return Place("prefill", number % self.prefill), Place("decode", number // self.prefill % self.decode)


def _times(workload: Workload, options: Options) -> list[float]:
    """Return arrivals in seconds from the start of the schedule, ascending; all zero in a closed loop."""
    number = len(workload.prompt_tokens)
    if options.rate is not None:
        gaps = np.random.default_rng([options.seed, 2]).exponential(1 / options.rate, number)
        return [float(t) for t in np.cumsum(gaps)]
    if options.speed is None:
        return [0.0] * number
    if len(workload.arrivals_s) != number:
        raise ConfigError(
            f"--speed {options.speed:g} needs a --trace with a timestamp in its lines; without one, use --rate"
        )
    return [t / options.speed for t in workload.arrivals_s]


class Request(NamedTuple):
    number: int
    tokens: int
    cached: int
    lender: Place
    reader: Place
    chunks: tuple[int, ...] = ()
    arrival_s: float = 0.0


class PrefixCache:
    """A model of the decode side's prefix cache: it says which chunks of a prompt would be cached.

    The least recently used chunks are evicted first, and within a prompt its end before its beginning. The model
    follows the order of the schedule, so its answers do not depend on the clock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chunks: OrderedDict[Hashable, None] = OrderedDict()

    def num_cached(self, chunks: Sequence[Hashable]) -> int:
        return next((n for n, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def use(self, chunks: Sequence[Hashable]) -> None:
        """Make a prompt's chunks the most recently used, and evict the oldest."""
        # The beginning is used last, because every prompt that shares a part of this one shares its beginning.
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > self.capacity:
            self._chunks.popitem(last=False)


def make_schedule(workload: Workload, options: Options, engines: Engines) -> list[Request]:
    times = _times(workload, options)
    caches = {p: PrefixCache(options.prefix_cache // workload.chunk_tokens) for p in engines.places}
    out = []
    for i, tokens in enumerate(workload.prompt_tokens):
        lender, reader = engines.route(i)
        chunks = workload.chunks[i] if workload.chunks else ()
        if workload.chunks:
            # Besides those that are shared, whole ones of its own that no other prompt uses.
            held = [*chunks, *((i, n) for n in range(len(chunks), tokens // workload.chunk_tokens))]
            there = min(caches[reader].num_cached(held) * workload.chunk_tokens, tokens)
            caches[reader].use(held)
        else:
            there = cached_tokens(options.prefix_hit, tokens)
        out.append(Request(i, tokens, there, lender, reader, chunks, times[i]))
    return out
