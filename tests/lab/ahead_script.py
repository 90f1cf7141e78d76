"""Scripts of services whose decode engines read prompts that are still computed, drawn from seeds.

A script is plain data, as those of `tests.lab.script` are, and has the same two lists: what is asked, and what
goes wrong meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.lab.script import Fault

MOST_TOKENS, CACHED = 96, 16
FULL, WINDOW, STATE = "tokens", "window", "state"
WINDOW_TOKENS = 20

SHAPED = ("preempt", "abort", "withdraw", "recall", "cancel", "cached", "scribble", "unfit")
OF_RANKS = ("crash", "close", "sleep", "freeze", "pause", "agent", "forget", "garbage", "hostile")
OF_PACKETS = ("partition", "loss", "delay", "duplicate", "offer_loss", "offer_delay", "offer_repeat")
OF_READS = ("slow", "fail", "doubt", "stuck")
AHEAD_FAULTS = (*SHAPED, *OF_RANKS, *OF_PACKETS, *OF_READS)
"""Kinds of faults that a script may hold. `preempt` takes the blocks of a prompt that is computed, and computes it anew
in others; `withdraw` and `recall` take its last loan back; `scribble` writes into blocks that are lent. A rank that
is `unfit` begins no head start of a request."""

FOLLOWED, PIECE, READ, LANDED, CLAIMED, OFFERED, PULLED = (
    "when it is followed",
    "when a piece is lent",
    "when a piece is read",
    "when a piece has landed",
    "when a piece is claimed",
    "when it is offered",
    "when its rest is read",
)
MOMENTS = (FOLLOWED, PIECE, PIECE, READ, READ, LANDED, LANDED, CLAIMED, CLAIMED, OFFERED, PULLED)
"""Moments of a fault of a request: it happens at one such moment of any rank, or a little later."""


@dataclass(frozen=True, slots=True)
class AheadAsk:
    """One request.

    Attributes:
        cached: Tokens that the decode engine has already.
        engine: Decode engine that reads it.
        stranger: Another decode engine that follows its ticket as well, or -1.
        late_s: Seconds by which the decode leg comes later than the prefill leg.
        again_s: Seconds after which its decode engines get another request with its ticket; none if negative.
        wanted: Tokens that the decode engine wants; 0: all.
        agrees: Tokens in which the hashes of both sides agree, if there are any hashes; -1: all.
        takes_pieces: True if the decode engine knows pieces.
        recall: True if the last loan may be recalled.
    """

    number: int
    at: float
    tokens: int
    cached: int
    engine: int
    stranger: int
    late_s: float
    again_s: float
    wanted: int
    agrees: int
    takes_pieces: bool
    recall: bool
    lease_s: float

    def __str__(self) -> str:
        return (
            f"{self.at:8.3f} s  request {self.number}: {self.tokens} tokens, {self.cached} cached, read by engine "
            f"{self.engine}{f' and {self.stranger}' * (self.stranger >= 0)}, {self.late_s:.3f} s late"
            f"{f', again after {self.again_s:.3f} s' * (self.again_s >= 0)}{', may be recalled' * self.recall}"
            f"{f', wanted {self.wanted}' * (self.wanted > 0)}{f', agrees to {self.agrees}' * (self.agrees >= 0)}"
            f"{', without pieces' * (not self.takes_pieces)}, lent for {self.lease_s:g} s"
        )


@dataclass(frozen=True, slots=True)
class AheadScript:
    """A seed's script.

    Attributes:
        prefill, decode: Ranks of the prefill engine and of each decode engine.
        sizes: Tokens per block of the prefill engine and of the decode engines.
        groups: Kinds of the cache groups.
        chunk: Tokens that the prefill engine computes in a step, of each prompt.
        pace_s: Seconds of a step.
        is_eager: Every finished block is lent at once, instead of by `PieceSizes`.
        hash_tokens: Tokens per hash; 0: there are no hashes.
        looks: Share of pulls that are looked at again.
    """

    seed: int
    prefill: int
    decode: int
    decode_engines: int
    sizes: tuple[int, int]
    groups: tuple[str, ...]
    chunk: int
    pace_s: float
    is_eager: bool
    hash_tokens: int
    looks: float
    asks: tuple[AheadAsk, ...]
    faults: tuple[Fault, ...]
    seconds: float
    wire: float = 1.0
    data: float = 1.0
    mishaps: tuple[()] = ()
    retries: int = 0
    shards: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1))

    @property
    def prefill_names(self) -> tuple[str, ...]:
        return tuple(f"p{i}" for i in range(self.prefill))

    @property
    def decode_names(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f"d{e}.{i}" for i in range(self.decode)) for e in range(self.decode_engines))

    def explain(self) -> Iterator[str]:
        """Tell what it stands for."""
        yield (
            f"a prefill engine of {self.prefill} ranks, {self.decode_engines} decode engines of {self.decode}, blocks "
            f"of {self.sizes[0]} and {self.sizes[1]} tokens, groups {' and '.join(self.groups)}, chunks of {self.chunk}"
            f" tokens in {self.pace_s:.4f} s, lent {'eagerly' if self.is_eager else 'by PieceSizes'}, hashes per "
            f"{self.hash_tokens} tokens, {self.retries} retries, tokens shared by (ranks, interleave) {self.shards}, "
            f"second looks {self.looks:g}, packets x{self.wire:g}, transfers x{self.data:g}"
        )


def make_ahead_script(seed: int, faults: Sequence[str] = AHEAD_FAULTS) -> AheadScript:
    """Draw a service, its requests and its faults from a seed."""
    rng = random.Random(repr(("ahead", seed)))
    prefill, decode = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    engines = rng.choice([1, 1, 2])
    sizes = rng.choice([(4, 4), (4, 16), (16, 4), (2, 8), (8, 2), (8, 8)])
    groups = rng.choice([(FULL,), (FULL,), (FULL, WINDOW), (FULL, STATE), (FULL, FULL, WINDOW)])
    hash_tokens = rng.choice([0, 0, sizes[0], rng.choice([4, 8])])
    asks, seconds = [], rng.uniform(0.5, 2.0)
    for number in range(rng.randint(2, 6)):
        tokens = rng.randint(30, MOST_TOKENS)
        is_partial = STATE not in groups and rng.random() < 0.4
        engine = rng.randrange(engines)
        asks.append(
            AheadAsk(
                number,
                at=rng.random() * seconds,
                tokens=tokens,
                cached=rng.choice([0, 0, 0, sizes[1] * rng.randint(0, CACHED // sizes[1]), rng.randint(0, CACHED)]),
                engine=engine,
                stranger=1 - engine if engines > 1 and rng.random() < 0.4 else -1,
                late_s=rng.choice([0.0, 0.0, 0.0, rng.random() * 0.3, rng.random() * 3.0]),
                again_s=rng.choice([-1.0] * 6 + [0.0, rng.random() * 0.5]),
                wanted=rng.randint(20, tokens) if is_partial and rng.random() < 0.5 else 0,
                agrees=rng.randint(0, tokens) if is_partial and hash_tokens else -1,
                takes_pieces=rng.random() < 0.93,
                recall=rng.random() < 0.2,
                lease_s=rng.choice([2.0, 4.0, 4.0]),
            )
        )
    asks.sort(key=lambda ask: ask.at)
    chosen = rng.sample(list(faults), min(len(faults), rng.choice([0, 1, 2, 3, 5])))
    if "preempt" in faults and rng.random() < 0.4:
        chosen += ["preempt"] * 3
    shards = [
        (2, rng.choice([x for x in (1, 2, 4) if size % (2 * x) == 0]))
        if ranks == 2 and STATE not in groups and rng.random() < 0.6
        else (1, 1)
        for size, ranks in zip(sizes, (prefill, decode), strict=True)
    ]
    if prefill == 2 and shards[0] == (1, 1):
        shards[1] = (1, 1)  # heads that prefill ranks share fit no tokens that decode ranks share
    script = AheadScript(
        seed,
        prefill,
        decode,
        engines,
        sizes,
        groups,
        chunk=rng.choice([3, 5, 7, 11, 16, 23]),
        pace_s=rng.choice([0.002, 0.01, 0.03, 0.1]),
        is_eager=rng.random() < 0.4,
        hash_tokens=hash_tokens,
        looks=rng.choice([0.0, 0.0, 1.0]),
        asks=tuple(asks),
        faults=(),
        seconds=seconds + 3.0,
        wire=rng.choice([1, 1, 20]),
        data=rng.choice([1, 1, 10, 40]),
        retries=rng.choice([0, 1, 3]),
        shards=(shards[0], shards[1]),
    )
    names = [*script.prefill_names, *(name for names in script.decode_names for name in names)]
    drawn = [_draw(rng, rng.choice(chosen), asks, names) for _ in range(rng.randint(1, 8) if chosen else 0)]
    looks = 1.0 if any(fault.kind == "scribble" for fault in drawn) else script.looks
    return replace(script, faults=tuple(drawn), looks=looks)


def _draw(rng: random.Random, kind: str, asks: Sequence[AheadAsk], names: Sequence[str]) -> Fault:
    ask = rng.choice(asks)
    seconds, p = rng.choice([0.05, 0.5, 2.0]) * rng.uniform(0.5, 1.5), rng.choice([0.1, 0.3, 1.0])
    if kind in SHAPED or (kind in ("crash", "close") and rng.random() < 0.6):
        moments = {"preempt": MOMENTS[1:9], "scribble": MOMENTS[5:7], "unfit": MOMENTS[:1]}
        when = rng.choice(moments.get(kind, MOMENTS))
        side = () if kind in SHAPED else (rng.choice(["p", "d"]),)
        at = ask.at + rng.choice([0.0, rng.random() * 0.5])
        return Fault(kind, at, seconds, (str(ask.number), *side), p, when=when)
    p = rng.choice([0.001, 0.01]) if kind == "pause" else p
    who = tuple(rng.sample(names, rng.choice([1, len(names)]) if kind not in OF_RANKS else 1))
    return Fault(kind, ask.at + rng.random() ** 2, seconds, who, p)
