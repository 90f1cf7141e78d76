"""Scripts of the faults of tiers, with their times, for an engine that offloads, drawn from seeds.

A script is plain data, as those of `tests.lab.script` are, and has the same two lists: what is asked, and what
goes wrong meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.lab.caches import Model, Shape, draw_model, draw_shape
from tests.lab.script import Fault

COPY_FAULTS = ("slow", "fail", "doubt", "stuck")
DISK_FAULTS = ("disk_slow", "disk_fail", "disk_doubt", "disk_stuck", "disk_full", "disk_gone", "rot")

TIER_FAULTS = (*COPY_FAULTS, *DISK_FAULTS, "cancel", "kill", "restart", "reshape", "sleep", "pause", "freeze", "loss")
"""Kinds of faults that a script of tiers may hold. `restart` and `reshape` end all ranks, and begin them with the same
or another geometry; `kill` ends one, which comes back."""

RANKS = ("p0", "p1", "p2", "p3", "d")
"""Of the engine that offloads, at most; and the one that pulls what is lent."""

SHORT, LONG = 8, 16
"""Hashes of a prompt."""


@dataclass(frozen=True, slots=True)
class TierAsk:
    """Something that is asked of the engine.

    Attributes:
        kind: `compute` stores a prompt, `reuse` loads what is kept of it, `both` does one after the other.
        hashes: So many of the prompt.
        cached: So many of them are there already.
        timeout_s: Of a load, or for how long it is pinned or lent.
    """

    number: int
    at: float
    kind: str
    prompt: int
    hashes: int
    cached: int
    timeout_s: float

    def __str__(self) -> str:
        return (
            f"{self.at:8.3f} s  request {self.number}: {self.kind} prompt {self.prompt}, {self.hashes} hashes, "
            f"{self.cached} cached, {self.timeout_s:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class TierScript:
    """A seed's script.

    Attributes:
        shapes: Geometries of the engine, one after the other.
        reader: That of the engine that pulls.
        host, file: Records of each group that the tiers have room for, more or less.
        gentle: Fates of ends: how the engine is ended when it is restarted.
    """

    seed: int
    model: Model
    shapes: tuple[Shape, ...]
    reader: Shape
    asks: tuple[TierAsk, ...]
    faults: tuple[Fault, ...]
    seconds: float
    host: float
    file: float
    policy: str
    max_records: float
    """Of the largest, that are moved at a time."""
    post_bytes: int
    data: float = 1.0
    """Slowness of copies."""

    def explain(self) -> Iterator[str]:
        """Tell what it stands for."""
        yield f"{self.model}, {self.model.hash_tokens} tokens per hash"
        yield from (f"engine: {shape}" for shape in self.shapes)
        yield f"reader: {self.reader}"
        yield (
            f"host tier {self.host:g} records, files {self.file:g}, {self.policy}, {self.max_records:g} records at a "
            f"time, {self.post_bytes} bytes per copy, copies x{self.data:g}"
        )


def prompt_hashes(prompt: int, count: int) -> list[str]:
    """A prompt's hashes: those with an odd number begin as the one before, and go on otherwise."""
    return [f"p{prompt - (prompt % 2 and i < SHORT // 2)}:{i}" for i in range(count)]


def make_tier_script(seed: int, faults: Sequence[str] = TIER_FAULTS) -> TierScript:
    """Draw an engine, its requests and its faults from a seed."""
    rng = random.Random(repr(("tiers", seed)))
    model = draw_model(rng)
    num_blocks = rng.choice([32, 48])
    shapes = tuple(draw_shape(rng, model, num_blocks=num_blocks) for _ in range(4))
    reader = draw_shape(rng, model, tp_size=1, num_blocks=num_blocks)
    seconds = rng.uniform(1.5, 5.0)
    prompts, asks = rng.choice([2, 4, 8]), []
    bursts = [rng.uniform(0.0, seconds) for _ in range(rng.randint(2, 6))]
    for number in range(rng.randint(6, 50)):
        hashes = rng.randint(1, LONG)
        kind = rng.choice(["compute"] * 4 + ["reuse"] * 4 + ["both"] * 3 + ["lend", "pin", "evict", "touch"])
        cached = rng.choice([0, 0, 0, rng.randint(0, hashes)])
        wait = rng.choice([0.05, 1.0, 4.0])
        at = (
            min(rng.choice(bursts) + rng.random() ** 2 * 0.1, seconds)
            if rng.random() < 0.7
            else rng.uniform(0, seconds)
        )
        asks.append(TierAsk(number, at, kind, rng.randrange(prompts), hashes, cached, wait))
    asks.sort(key=lambda ask: ask.at)
    drawn = []
    if faults and rng.random() < 0.85:
        kinds = rng.sample(list(faults), min(len(faults), rng.randint(1, 4)))
        drawn = [_draw(rng, rng.choice(kinds), asks, seconds) for _ in range(rng.randint(1, 9))]
    sizes = random.Random(repr(("sizes", seed)))
    if len(model.groups) > 1 and sizes.random() < 0.5:
        model = _with_sizes(sizes, model)
    host, file, data = rng.choice([3, 6, 12, 40]), rng.choice([0, 6, 40, 100]), rng.choice([1, 10, 30, 100])
    if "reshape" in faults and rng.random() < 0.4:
        # What one geometry has left is asked for by the next, and by the one after that.
        drawn = drawn[: rng.choice([0, 1, 9])] + [
            _draw(rng, "reshape", asks, seconds) for _ in range(rng.randint(1, 4))
        ]
        asks = [replace(ask, prompt=ask.prompt % 2, kind="both" if ask.number % 2 else ask.kind) for ask in asks]
        file, data = 100, min(data, 10)
    return TierScript(
        seed,
        model,
        shapes,
        reader,
        tuple(asks),
        tuple(drawn),
        seconds,
        host=host,
        file=file,
        policy=rng.choice(["lru", "s3-fifo"]),
        max_records=rng.choice([1, 3, 100]),
        post_bytes=rng.choice([64, 512, 1 << 20]),
        data=data,
    )


def _with_sizes(rng: random.Random, model: Model) -> Model:
    """Let one group have larger records than the others: tiers are cut into pieces of several sizes then."""
    wide = rng.randrange(len(model.groups))
    groups = list(model.groups)
    parts = [
        replace(part, dims=tuple((name, 16 * size if name == "dim" else size) for name, size in part.dims))
        for part in groups[wide].parts
    ]
    groups[wide] = replace(groups[wide], parts=tuple(parts))
    return replace(model, groups=tuple(groups))


def _draw(rng: random.Random, kind: str, asks: Sequence[TierAsk], seconds: float) -> Fault:
    ask = rng.choice(asks)
    at = min(ask.at + rng.random() ** 2 * 0.5, seconds)
    long = rng.choice([0.05, 0.5, 2.0]) * rng.uniform(0.5, 1.5)
    targets = (str(ask.number),) if kind == "cancel" else (rng.choice(RANKS[: rng.choice([1, 1, 5])]),)
    p = rng.choice([0.05, 0.3, 1.0]) if kind != "pause" else rng.choice([0.001, 0.01, 0.05])
    if kind == "cancel":
        at = min(ask.at + rng.random() ** 3 * 0.5, seconds)
    return Fault(kind, at, long, targets, p)
