"""The schedule: every request with its engines, its arrival, what of it is cached, and when it is cancelled.

Made once from the options, before anything runs, and the same for the same seed. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from asynckv.errors import ConfigError
from asynckv.tools.bench.prefixes import PrefixCache
from asynckv.tools.bench.workload import Workload


class Place(NamedTuple):
    """One engine: its role, and which one of that role."""

    role: str
    number: int


@dataclass(frozen=True, slots=True)
class Engines:
    """How many engines there are, and who lends to whom."""

    prefill: int = 1
    decode: int = 1

    @property
    def places(self) -> list[Place]:
        """All of them, prefill first."""
        return [Place(r, i) for r, n in (("prefill", self.prefill), ("decode", self.decode)) for i in range(n)]

    def name(self, place: Place) -> str:
        """Name an engine."""
        is_alone = (self.prefill if place.role == "prefill" else self.decode) == 1
        return place.role if is_alone else f"{place.role}-{place.number}"

    def route(self, number: int) -> tuple[Place, Place]:
        """Who lends a request, and who pulls it."""
        return Place("prefill", number % self.prefill), Place("decode", number // self.prefill % self.decode)

    def __str__(self) -> str:
        return f"{self.prefill} prefill, {self.decode} decode"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come: in a closed loop the next begins when one ends; else by a clock, however slow they are."""

    rate: float | None = None
    speed: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.speed is not None:
            raise ConfigError(
                f"--rate {self.rate:g} and --speed {self.speed:g} contradict each other: --speed is of the trace's "
                f"own times; leave one of them out"
            )

    @property
    def kind(self) -> Literal["closed", "poisson", "trace"]:
        """Name it, as the report does."""
        return "poisson" if self.rate is not None else "trace" if self.speed is not None else "closed"

    @property
    def is_open(self) -> bool:
        """Requests come by the clock."""
        return self.kind != "closed"

    def times(self, workload: Workload, seed: int) -> list[float]:
        """Seconds from the start of the schedule, ascending; all zero in a closed loop."""
        number = len(workload.prompt_tokens)
        if self.rate is not None:
            gaps = np.random.default_rng([seed, 2]).exponential(1 / self.rate, number)
            return [float(t) for t in np.cumsum(gaps)]
        if self.speed is None:
            return [0.0] * number
        if len(workload.arrivals_s) != number:
            raise ConfigError(
                f"--speed {self.speed:g} needs a --trace whose lines have a timestamp; use --rate for requests per "
                f"second"
            )
        return [t / self.speed for t in workload.arrivals_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request."""

    number: int
    tokens: int
    cached: int
    lender: Place
    reader: Place
    chunks: tuple[int, ...] = ()
    arrival_s: float = 0.0


def make_schedule(
    workload: Workload,
    *,
    engines: Engines,
    arrivals: Arrivals,
    cache_tokens: int,
    cached: Callable[[int], int],
    seed: int,
) -> list[Request]:
    """Work every request out."""
    times = arrivals.times(workload, seed)
    caches = {p: PrefixCache(cache_tokens // workload.chunk_tokens) for p in engines.places}
    out = []
    for i, tokens in enumerate(workload.prompt_tokens):
        lender, reader = engines.route(i)
        chunks = workload.chunks[i] if workload.chunks else ()
        if workload.chunks:
            held = _held(i, tokens, chunks, workload.chunk_tokens)
            there = min(caches[reader].num_cached(held) * workload.chunk_tokens, tokens)
            caches[reader].use(held)
        else:
            there = cached(tokens)
        out.append(
            Request(
                number=i,
                tokens=tokens,
                cached=there,
                lender=lender,
                reader=reader,
                chunks=chunks,
                arrival_s=times[i],
            )
        )
    return out


def _held(number: int, tokens: int, chunks: Sequence[int], size: int) -> list[int | tuple[int, int]]:
    """What a prompt puts into a cache: its chunks, and its own whole ones, which nobody else asks for."""
    return [*chunks, *((number, i) for i in range(len(chunks), max(len(chunks), tokens // size)))]
