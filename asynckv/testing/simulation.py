"""Whole services in one thread: real engines, simulated planes, a seeded script of faults, a hostile allocator.

`simulate(seed)` runs some prefill and decode ranks for a few virtual seconds while everything goes wrong that
the script says: packets are lost, repeated, late; processes crash, restart, freeze, pause anywhere; transfers
are slow, fail, are in doubt, never end, and land after they were reported dead. Blocks that are given back are
overwritten at once, on both sides. Afterwards: one outcome per request and in time, every published byte right,
no byte written into a block that was given back, no block lost, everything idle.

The same seed gives the same run, event by event.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.group import PrefillGroup
from asynckv.core.layout import Group, Layout, Memory, attention_view, shard
from asynckv.core.messages import decode_packet
from asynckv.core.topology import owed_readers
from asynckv.core.types import Route
from asynckv.engine import Engine
from asynckv.errors import AsyncKVError, BlocksRetired, EngineClosed, LocalProtocolError, PullError
from asynckv.ports import Ending
from asynckv.registration import Registration
from asynckv.testing.world import (
    Process,
    Transfer,
    TransferFate,
    Violation,
    World,
    WorldClock,
    WorldControl,
    WorldData,
)

__all__ = [
    "FAULTS",
    "Ask",
    "Fault",
    "Found",
    "Outcome",
    "Script",
    "make_script",
    "minimise",
    "play",
    "simulate",
    "simulate_many",
]

FAULTS = (
    "loss",
    "duplicate",
    "delay",
    "partition",
    "crash",
    "freeze",
    "pause",
    "slow",
    "fail",
    "doubt",
    "stuck",
    "cancel",
    "revoke",
    "forget",
    "close",
    "garbage",
)
"""Kinds of faults that a script may hold."""

BLOCK, NUM_BLOCKS, HEAD_DIM = 4, 16, 2
FREED, UNUSED = 0xEEEE, 0xDDDD
PROBE = 1_000_000
QUIET_S = 45.0
"""How long everything may take to settle once the faults are over."""

LEASE = LeaseConfig(lease_s=4.0, grant_s=2.0, max_lease_s=15.0, parked_s=5.0)
PULL = PullConfig(
    timeout_s=6.0,
    announce_s=6.0,
    handshake_s=2.0,
    drain_s=1.0,
    held_s=10.0,
    release_timeout_s=5.0,
    heartbeat_s=0.5,
    suspect_s=1.2,
    gone_s=4.0,
    backoff_s=0.2,
    max_backoff_s=1.0,
    idle_s=8.0,
    max_post_bytes=128,
    max_post_descriptors=8,
    window_bytes=512,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong for a while.

    Attributes:
        kind: One of `FAULTS`.
        who: Names of ranks, or numbers of requests for `cancel` and `revoke`.
        p: How likely, where that makes sense.
    """

    kind: str
    at: float
    seconds: float
    who: tuple[str, ...] = ()
    p: float = 1.0

    def __str__(self) -> str:
        who = f" {' '.join(self.who)}" if self.who else ""
        return f"{self.at:8.3f} s  {self.kind}{who} for {self.seconds:.3f} s (p {self.p:.2f})"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the service.

    Attributes:
        ahead: The params travel before the KV is written and lent.
        engines: Decode engines that read it.
        shares: Number of an earlier request whose first blocks it has in common, or -1.
        cached: Tokens that the decode side has already.
    """

    number: int
    at: float
    tokens: int
    ahead: bool
    engines: tuple[int, ...]
    shares: int
    cached: int
    announce_s: float
    retries: int
    lease_s: float = 4.0
    routed_s: float = 0.5
    """How long the params are under way, at most."""

    def __str__(self) -> str:
        return (
            f"{self.at:8.3f} s  request {self.number}: {self.tokens} tokens, {self.cached} cached, read by "
            f"{' and '.join(f'engine {e}' for e in self.engines)}"
            f"{', params ahead' if self.ahead else ''}{f', shares with {self.shares}' if self.shares >= 0 else ''}"
            f"{f', announced {self.announce_s:.2f} s before' if self.announce_s else ''}"
        )


@dataclass(frozen=True, slots=True)
class Script:
    """What a seed stands for."""

    seed: int
    prefill: int
    decode: int
    decode_engines: int
    heads: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    seconds: float
    wire: float = 1.0
    """How slow packets are, next to 50 to 250 microseconds."""
    data: float = 1.0
    """How slow transfers are, next to 0.02 to 2 milliseconds."""

    @property
    def is_long(self) -> bool:
        """It is watched for so long that even what is remembered of the dead must be gone."""
        return self.seed % 10 == 0


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        violation: What must never happen and did; empty if nothing.
        counts: How often what happened.
        events: Lines of what happened, formatted when asked for.
    """

    script: Script
    violation: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[float, str, str, Any]] = field(default_factory=list)

    def events(self, last: int = 200) -> Iterator[str]:
        """Tell the last events before the end."""
        for at, who, what, detail in self.trace[-last:]:
            if isinstance(detail, bytes):
                detail = _messages(detail)
            yield f"{at:11.6f}  {who:<12} {what} {detail}".rstrip()

    def explain(self, last: int = 200) -> Iterator[str]:
        """Tell what was violated, by which requests and faults, and the last events."""
        script = self.script
        yield f"{self.violation or 'no violation'}"
        yield (
            f"{script.prefill} prefill ranks, {script.decode_engines} decode engines of {script.decode} ranks, "
            f"{script.heads} heads, wire x{script.wire:g}, transfers x{script.data:g}"
        )
        yield from map(str, script.asks)
        yield from map(str, script.faults)
        yield from self.events(last)


def _messages(packet: bytes) -> str:
    try:
        return ", ".join(type(m).__name__ for m in decode_packet(packet).messages)
    except AsyncKVError as exc:
        return f"garbage ({exc})"


# -- scripts ----------------------------------------------------------------------------------------------------


def make_script(seed: int, faults: Sequence[str] = FAULTS) -> Script:
    """Draw a service, its requests and its faults from a seed."""
    rng = random.Random(repr(("script", seed)))
    if rng.random() < 0.1 and {"slow", "pause"} <= set(faults):
        # A small request whose reader is away again and again while its few reads take longer than a promise.
        ask = Ask(0, 0.5, rng.randint(1, 2 * BLOCK), rng.random() < 0.3, (0,), -1, 0, 0.0, 0, 2.0, 0.01)
        long = (Fault("slow", 0.4, 8.0, ("d0.0",), 1.0), Fault("pause", 0.5 + rng.random(), 8.0, ("d0.0",), 0.15))
        return Script(seed, 1, 1, 1, 12, (ask,), long, 9.0)
    prefill, decode = rng.choice([(1, 1), (1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (4, 2)])
    engines = rng.choice([1, 1, 1, 2])
    seconds = rng.uniform(3.0, 8.0)
    asks = []
    for number in range(rng.randint(2, 7)):
        tokens = rng.randint(1, 4 * BLOCK)
        cached = rng.choice([0, 0, 0, 0, rng.randint(0, tokens), tokens])
        shares = rng.randrange(number) if number and rng.random() < 0.25 else -1
        both = tuple(range(engines)) if engines == 1 or rng.random() < 0.6 else (rng.randrange(engines),)
        asks.append(
            Ask(
                number,
                rng.uniform(0.0, seconds * 0.7),
                tokens,
                rng.random() < 0.35,
                both,
                shares,
                cached,
                rng.choice([0.0, 0.0, rng.uniform(0.001, 1.0)]),
                rng.choice([0, 1, 2]),
                rng.choice([2.0, 2.0, 4.0]),
                rng.choice([0.5, 0.5, 2.5]),
            )
        )
    asks.sort(key=lambda a: a.at)
    names = [f"p{i}" for i in range(prefill)] + [f"d{e}.{i}" for e in range(engines) for i in range(decode)]
    kinds = list(faults)
    drawn = [_draw(rng, rng.choice(kinds), names, asks, seconds) for _ in range(rng.randint(0, 5) if kinds else 0)]
    if rng.random() < 0.5:
        recipe = rng.choice(RECIPES)
        drawn += _cook(rng, recipe, names, asks, seconds) if set(recipe) <= set(kinds) else []
    heads = rng.choice([12, 12, 12, 1])
    wire, data = rng.choice([1, 1, 20, 400]), rng.choice([1, 1, 30, 400])
    return Script(seed, prefill, decode, engines, heads, tuple(asks), tuple(drawn), seconds, wire, data)


RECIPES = (
    ("slow", "delay", "loss"),
    ("slow", "pause"),
    ("slow", "pause"),
    ("slow", "partition"),
    ("slow", "freeze"),
    ("fail", "delay", "duplicate"),
    ("doubt", "delay", "loss"),
    ("doubt", "crash"),
    ("slow", "cancel", "delay"),
    ("slow", "revoke", "pause"),
    ("stuck", "delay"),
    ("stuck", "cancel", "close"),
    ("slow", "cancel", "close"),
    ("duplicate", "delay", "loss"),
)
"""Faults that are worse together: on one rank, from one request on."""


def _cook(
    rng: random.Random, recipe: Sequence[str], names: list[str], asks: Sequence[Ask], seconds: float
) -> list[Fault]:
    ask, who = rng.choice(asks), rng.choice(names)
    out = []
    for kind in recipe:
        at = min(ask.at + rng.random() ** 2 * 1.0, seconds)
        target = str(ask.number) if kind in ("cancel", "revoke") else who
        p = rng.choice([0.02, 0.1, 0.2]) if kind == "pause" else rng.choice([0.3, 0.6, 1.0])
        out.append(Fault(kind, at, rng.uniform(0.5, 5.0), (target,), p))
    return out


def _draw(rng: random.Random, kind: str, names: list[str], asks: Sequence[Ask], seconds: float) -> Fault:
    # Most faults meet a request under way.
    at = rng.choice(asks).at + rng.random() ** 2 * 1.5 if rng.random() < 0.7 else rng.uniform(0.0, seconds)
    at, long = min(at, seconds), rng.choice([0.05, 0.5, 1.0, 3.0]) * rng.uniform(0.5, 1.5)
    who: tuple[str, ...]
    if kind in ("cancel", "revoke"):
        chosen = rng.choice(asks)
        at, who = min(chosen.at + rng.random() ** 3 * 2.0, seconds), (str(chosen.number),)
    elif kind == "partition":
        who = tuple(rng.sample(names, rng.randint(1, len(names) - 1)))
    elif kind in ("loss", "duplicate", "delay", "slow", "fail", "doubt", "stuck", "pause"):
        who = tuple(rng.sample(names, rng.choice([1, len(names)]) if rng.random() < 0.5 else 1))
    else:
        who = (rng.choice(names),)
    p = rng.choice([0.02, 0.1, 0.3, 1.0]) if kind != "pause" else rng.choice([0.001, 0.01, 0.05])
    return Fault(kind, at, long, who, p)


# -- the service --------------------------------------------------------------------------------------------------

Words = npt.NDArray[np.uint16]


def _value(content: int, head: int) -> int:
    """What a block's elements of one head are: never what freed or unused memory holds."""
    digest = hashlib.blake2b(repr((content, head)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "little") % 0xD000 + 1


def _layout(role: str, rank: int, size: int, heads: int, base: int) -> Layout:
    order = ("kv", "block", "token", "head", "dim") if role == "prefill" else ("block", "head", "kv", "token", "dim")
    held = shard(heads, rank, size)
    sizes = {"kv": 2, "block": NUM_BLOCKS, "token": BLOCK, "head": held[1] - held[0], "dim": HEAD_DIM}
    view = attention_view(layer="a", order=order, sizes=sizes, dtype="float16", heads=held, num_heads=heads, memory=0)
    length = 2 * NUM_BLOCKS * BLOCK * (held[1] - held[0]) * HEAD_DIM * 2
    return Layout(
        tp_rank=rank,
        tp_size=size,
        memories=(Memory(base, length),),
        groups=(Group("attention", BLOCK, NUM_BLOCKS),),
        views=(view,),
    )


@dataclass(slots=True, eq=False)
class _Lent:
    """One request on one prefill rank's memory, as the prefill engine's allocator sees it."""

    ask: Ask
    blocks: list[int]
    contents: list[int]
    params: dict[str, Any]
    open: set[str] = field(default_factory=set)
    """Ranks that have not given it back."""


class _Rank:
    """One rank of an engine, over all of its process's starts."""

    def __init__(self, service: Service, role: str, engine: int, rank: int) -> None:
        self.service, self.role, self.engine_number, self.rank = service, role, engine, rank
        self.name = f"p{rank}" if role == "prefill" else f"d{engine}.{rank}"
        self.engine_id = "prefill" if role == "prefill" else f"decode{engine}"
        script, rng = service.script, service.world.random_of("rank", self.name)
        self.size = script.prefill if role == "prefill" else script.decode
        base = (1 + rank + 16 * (role == "decode") + 32 * engine) << 40
        self.layout = _layout(role, rank, self.size, script.heads, base)
        self.held = self.layout.views[0].parts[0].held
        self.rate, self.epoch = rng.choice([0.9996, 1.0, 1.0004]), rng.uniform(0, 1e7)
        self.starts = 0
        self.free: list[int] = []
        self.owner: dict[int, object] = {}
        """Decode: which attempt owns which block."""
        self.lend_at = 0.0
        self.process: Process
        self.engine: Engine
        self.words: Words

    def start(self) -> None:
        """Start a process with memory of its own."""
        world = self.service.world
        self.starts += 1
        name = f"{self.name}#{self.starts}"
        process = self.process = world.processes[name] = Process(world, name, epoch=self.epoch, rate=self.rate)
        memory = np.empty(self.layout.memories[0].length, np.uint8)
        words: Words = memory.view(np.uint16)
        heads = self.held[1] - self.held[0]
        if self.role == "prefill":
            words = words.reshape(2, NUM_BLOCKS, BLOCK, heads, HEAD_DIM).transpose(1, 3, 0, 2, 4)
        else:
            words = words.reshape(NUM_BLOCKS, heads, 2, BLOCK, HEAD_DIM)
        self.words = words
        self.words[:] = UNUSED
        self.free = list(range(NUM_BLOCKS))
        self.owner = {}
        data = WorldData(process, f"agent-{name}", [memory], self.layout.memories)
        data.on_post, data.on_land = self._posted, self._landing
        self.data = data
        self.owners: dict[int, dict[int, object]] = {}
        self.engine = Engine(
            EngineConfig(engine_id=self.engine_id, lease=LEASE, pull=PULL),
            Registration(self.layout),
            data=data,
            control=WorldControl(process, f"sim://{self.name}"),
            clock=WorldClock(process),
            token_hex=world.token(name),
        )
        process.spawn(self.engine.start)
        world.note(self.name, "started", name)

    # -- hostile checks ------------------------------------------------------------------------------

    def _block_of(self, start: int) -> int:
        return start // (self.layout.memories[0].length // NUM_BLOCKS)

    def _posted(self, transfer: Transfer) -> None:
        """Remember whose blocks a transfer may write."""
        blocks = {self._block_of(start) for _, start, _ in transfer.spots}
        if strange := [b for b in blocks if b not in self.owner]:
            raise Violation(f"{self.process.name} posts a read into block {strange[0]}, which nobody gave it")
        self.owners[int(transfer.transfer_id)] = {b: self.owner[b] for b in blocks}

    def _landing(self, transfer: Transfer, spots: Sequence[tuple[int, int, int]]) -> None:
        """Nothing lands in a block that was given back."""
        owners = self.owners[int(transfer.transfer_id)]
        for _, start, _ in spots:
            block = self._block_of(start)
            if self.owner.get(block) is not owners[block]:
                raise Violation(
                    f"transfer {transfer.transfer_id} writes block {block} of {self.process.name} after it came back"
                )


class Service:
    """Prefill and decode engines, their schedulers and the router between them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.world = World(script.seed)
        self.world.fate = self._fate
        self.world.transfer_fate = self._transfer_fate
        self.world.is_calm = self._is_calm
        self.prefill = [_Rank(self, "prefill", 0, r) for r in range(script.prefill)]
        self.decode = [
            [_Rank(self, "decode", e, r) for r in range(script.decode)] for e in range(script.decode_engines)
        ]
        self.ranks = {r.name: r for r in (*self.prefill, *(r for e in self.decode for r in e))}
        self.rng = self.world.random_of("service")
        self.free = list(range(NUM_BLOCKS))
        self.lent: dict[int, _Lent] = {}
        self.uses: Counter[int] = Counter()
        """Prefill engine's blocks and how many requests have them."""
        self.content: dict[int, int] = {}
        self.num_contents = 0
        self.tasks: dict[int, list[tuple[_Rank, Process, asyncio.Task[None]]]] = {}
        self.outcomes: Counter[str] = Counter()
        self.group: PrefillGroup | None = None
        self.attempts: list[_Attempt] = []
        self.leases: list[tuple[_Rank, Process, Any]] = []
        self.discharged: dict[tuple[int, str], float] = {}
        """Requests, the readers that need them no more, and since when."""

    # -- running --------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Play the script to its end, and check."""
        world, script = self.world, self.script
        for rank in self.ranks.values():
            rank.start()
        world.at(0.0, self._new_group)
        for ask in script.asks:
            world.at(0.01 + ask.at, partial(self._ask, ask, 3))
        for fault in script.faults:
            world.at(0.01 + fault.at, partial(self._begin, fault))
        try:
            world.run(script.seconds)
            self._heal()
            # Now and then for so long that even tombstones must be gone.
            world.run(script.seconds + QUIET_S * (2 if script.is_long else 1))
            if not world.violation:
                self._check()
            if not world.violation:
                self._probe()
        finally:
            world.close()
        counts = self.outcomes + world.counts
        return Outcome(script, world.violation, counts, world.trace)

    def _probe(self) -> None:
        """With the faults over, a fresh request must complete on every rank that has a block for it."""
        world, engines = self.world, tuple(range(self.script.decode_engines))
        able = {r.name for e in self.decode for r in e if r.free and not r.process.is_dead}
        count = len(self.attempts)
        self._ask(Ask(PROBE, world.now, BLOCK, False, engines, -1, 0, 0.0, 0, 4.0, 0.01), 0)
        world.run(world.now + PULL.timeout_s + 1.0)
        for attempt in self.attempts[count:]:
            if attempt.rank.name in able and attempt.reason != "complete" and not world.violation:
                world.violate(f"a fresh request on {attempt.rank.name} failed: {attempt.reason}")

    def _new_group(self) -> None:
        roster = [r.engine.endpoint for r in self.prefill]
        self.group = PrefillGroup("prefill", roster, lease=LEASE, token_hex=self.world.token("group", self.world.now))

    # -- faults ---------------------------------------------------------------------------------------

    def _active(self, kind: str, *names: str) -> float:
        """The likelihood of a fault of this kind at any of these ranks now."""
        now = self.world.now - 0.01
        most = 0.0
        for fault in self.script.faults:
            if fault.kind == kind and fault.at <= now < fault.at + fault.seconds and set(names) & set(fault.who):
                most = max(most, fault.p)
        return most if now < self.script.seconds else 0.0

    def _fate(self, sender: str, to: str, rng: random.Random) -> Sequence[float]:
        names = sender.split("#")[0], to.split("#")[0]
        usual = (5e-5 + rng.random() * 2e-4) * self.script.wire
        faults = rng.random(), rng.random(), rng.random()
        now = self.world.now - 0.01
        for fault in self.script.faults:
            if fault.kind == "partition" and fault.at <= now < min(fault.at + fault.seconds, self.script.seconds):
                if (names[0] in fault.who) != (names[1] in fault.who):
                    return ()
        if faults[0] < self._active("loss", *names):
            return ()
        if faults[1] < self._active("delay", *names):
            usual += rng.random() ** 2 * 3.0
        if faults[2] < self._active("duplicate", *names):
            return (usual, usual + rng.random() ** 2 * 4.0)
        return (usual,)

    def _transfer_fate(self, reader: WorldData, owner: WorldData, rng: random.Random) -> TransferFate:
        names = reader.process.name.split("#")[0], owner.process.name.split("#")[0]
        r = [rng.random() for _ in range(6)]
        usual = TransferFate((2e-5 + r[0] ** 3 * 2e-3) * self.script.data, inline=r[1] < 0.3)
        if r[2] < self._active("stuck", *names):
            # It never ends, and may land whenever it likes.
            return TransferFate(math.inf, late_s=r[0] * 8 if r[1] < 0.7 else math.inf)
        if r[3] < self._active("doubt", *names):
            after = r[0] * 6 if r[1] < 0.8 else math.inf
            late = after * r[5] if after < math.inf else r[5] * 6
            return TransferFate(
                r[0] * 0.1,
                Ending.IN_DOUBT,
                lands=r[5],
                late_s=late,
                after_s=after,
                after=Ending.DONE if r[4] < 0.3 else Ending.FAILED,
                cause="in doubt",
            )
        if r[4] < self._active("fail", *names):
            return TransferFate(r[0] * 0.01, Ending.FAILED, lands=r[5], cause="failed", peer_lost=r[1] < 0.2)
        if r[5] < self._active("slow", *names):
            return TransferFate(r[0] * 4.0)
        return usual

    def _begin(self, fault: Fault) -> None:
        world = self.world
        if world.now > self.script.seconds:
            return
        world.note("script", fault.kind, fault)
        world.counts[f"fault.{fault.kind}"] += 1
        for who in fault.who:
            rank = self.ranks.get(who)
            match fault.kind:
                case "crash" if rank is not None:
                    self._crash(rank, fault.seconds)
                case "close" if rank is not None:
                    self._close(rank)
                case "freeze" if rank is not None:
                    rank.process.freeze(min(fault.seconds, self.script.seconds - world.now))
                case "pause" if rank is not None:
                    rank.process.pauses = fault.p
                    world.at(world.now + fault.seconds, partial(setattr, rank.process, "pauses", 0.0))
                case "forget" if rank is not None:
                    self._forget(rank)
                case "garbage" if rank is not None:
                    self._garbage(rank)
                case "cancel":
                    self._cancel(int(who))
                case "revoke":
                    for owner, process, lease in self.leases:
                        if not process.is_dead and lease.ask == int(who):
                            process.call_at(world.now, lease.revoke)
                            world.note(owner.name, "revokes", who)
                case _:
                    pass

    def _is_calm(self, until: float) -> bool:
        deaths = (f for f in self.script.faults if f.kind in ("crash", "close"))
        return not any(f.at < until and f.at + 5.0 > self.world.now for f in deaths)

    def _heal(self) -> None:
        for process in self.world.processes.values():
            process.pauses = 0.0

    def _crash(self, rank: _Rank, down_s: float) -> None:
        self._kill(rank)
        self.world.at(self.world.now + down_s, lambda: self._restart(rank))

    def _kill(self, rank: _Rank) -> None:
        process, data = rank.process, rank.data
        if process.is_dead:
            return
        self.world.note(rank.name, "killed", process.name)
        process.kill()
        for other in self.ranks.values():
            if other is not rank and not other.process.is_dead:
                other.data.lose(data)
        if rank.role == "prefill":
            for lent in list(self.lent.values()):
                self._given_back(rank, lent)

    def _restart(self, rank: _Rank) -> None:
        if rank.process.is_dead:
            rank.start()
            if rank.role == "prefill":
                # Once it listens, its scheduler hands out its new address book.
                self.world.at(self.world.now + 1e-3, self._new_group)

    def _close(self, rank: _Rank) -> None:
        process, engine = rank.process, rank.engine
        if process.is_dead:
            return

        async def close() -> None:
            try:
                await engine.aclose()
            finally:
                self.world.note(rank.name, "closed")
                self.world.at(self.world.now, lambda: self._crash(rank, 0.1) if rank.process is process else None)

        process.spawn(close)

    def _forget(self, rank: _Rank) -> None:
        for other in self.ranks.values():
            if other is not rank and not other.process.is_dead:
                engine, address = other.engine, f"sim://{rank.name}"

                def forget(engine: Engine = engine, address: str = address) -> None:
                    with suppress(EngineClosed):
                        engine.forget_peer(address)

                other.process.call_at(self.world.now, forget)

    def _garbage(self, rank: _Rank) -> None:
        rng = self.world.random_of("garbage", rank.name, self.world.now)
        seen = [d for _, _, what, d in self.world.trace if isinstance(d, bytes)]
        packets = [rng.randbytes(rng.randint(1, 40))]
        for packet in [p for p in rng.sample(seen, min(len(seen), 4)) if p]:
            bad = bytearray(packet)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            packets += [bytes(bad), packet]
        control = self.world.listeners.get(f"sim://{rank.name}")
        if control is not None:
            for packet in packets:
                when = self.world.now + rng.random() * 0.01
                rank.process.call_at(when, control.deliver, Route(b"stranger"), packet)

    def _cancel(self, number: int) -> None:
        for rank, process, task in self.tasks.get(number, ()):
            if not process.is_dead and not task.done():
                self.world.note(rank.name, "cancels", number)
                if self.rng.random() < 0.5:
                    process.call_at(self.world.now, task.cancel)
                else:
                    process.call_at(self.world.now, self._give_up, rank, number)

    def _give_up(self, rank: _Rank, number: int) -> None:
        if rank.engine.cancel(f"D{number}"):
            self.discharged.setdefault((number, rank.name), rank.process.now)

    # -- the prefill engine -----------------------------------------------------------------------------

    def _ask(self, ask: Ask, patience: int) -> None:
        world = self.world
        count = -(-ask.tokens // BLOCK)
        shared = self.lent.get(ask.shares)
        common = list(shared.blocks[: max(min(len(shared.blocks), count) - 1, 0)]) if shared is not None else []
        group = self.group
        if len(self.free) < count - len(common) or group is None:
            if patience:
                world.at(world.now + 0.5, lambda: self._ask(ask, patience - 1))
            else:
                self.outcomes["asks.given_up"] += 1
            return
        fresh = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(count - len(common))]
        for block in fresh:
            self.num_contents += 1
            self.content[block] = self.num_contents
        blocks = common + fresh
        for block in blocks:
            self.uses[block] += 1
        params = group.make_params(
            f"P:{ask.number},\n", [(0, blocks)], ask.tokens, written=not ask.ahead, lease_s=ask.lease_s
        )
        lent = self.lent[ask.number] = _Lent(ask, blocks, [self.content[b] for b in blocks], params)
        self.outcomes["asks"] += 1
        now = world.now
        written_at = now + (self.rng.random() ** 2 * 1.0 if ask.ahead else 0.0)
        for rank in self.prefill:
            if rank.process.is_dead:
                continue
            lent.open.add(rank.name)
            # In the order in which params were made, as the contract says.
            rank.lend_at = lend_at = max(written_at + self.rng.random() ** 3 * 0.3, rank.lend_at)
            if ask.ahead:
                # KV is written, and lent at once.
                rank.process.call_at(lend_at, self._write, rank, lent)
                rank.process.call_at(lend_at, self._lend, rank, lent)
            else:
                # `written` is said of every rank's KV before the params leave.
                self._fill(rank, rank.words, lent)
                rank.process.call_at(lend_at, self._lend, rank, lent)
        if not lent.open:
            self._settle(lent)
        for engine in ask.engines:
            for reader in self.decode[engine]:
                if self.rng.random() < 0.03:
                    continue  # the router lost it
                at = now + self.rng.random() ** 3 * ask.routed_s
                reader.process.call_at(at, self._read, reader, lent, ask.retries)

    def _write(self, rank: _Rank, lent: _Lent) -> None:
        # A process may be ahead of the world: what it does to memory is seen when the world is there.
        self.world.at(rank.process.now, partial(self._fill, rank, rank.words, lent))

    def _fill(self, rank: _Rank, words: Words, lent: _Lent) -> None:
        for block, content in zip(lent.blocks, lent.contents, strict=True):
            for head in range(*rank.held):
                words[block, head - rank.held[0]] = _value(content, head)

    def _lend(self, rank: _Rank, lent: _Lent) -> None:
        process = rank.process
        try:
            handle = rank.engine.lend(lent.params, readers=len(lent.ask.engines))
        except (AsyncKVError, EngineClosed) as exc:
            self.world.note(rank.name, "does not lend", repr(exc))
            self._given_back(rank, lent)
            return
        holder = _Lease(lent.ask.number, handle)
        self.leases.append((rank, process, holder))

        async def wait() -> None:
            try:
                end = await handle.wait_released()
            except asyncio.CancelledError:
                return
            if holder.ended:
                self.world.violate(f"two ends of lease {lent.ask.number} on {rank.name}")
            holder.ended, holder.ended_at = end.cause, process.now
            self.outcomes[f"lease.{end.cause}"] += 1
            self.world.note(rank.name, "lease ended", (lent.ask.number, end.cause))
            self.world.at(process.now, partial(self._given_back, rank, lent))

        process.loop.create_task(wait())

    def _given_back(self, rank: _Rank, lent: _Lent) -> None:
        """A rank's blocks are the engine's again: overwritten at once, used again once all ranks have them back."""
        if rank.name not in lent.open:
            return
        lent.open.discard(rank.name)
        if not rank.process.is_dead:
            for block in lent.blocks:
                others = [x for x in self.lent.values() if x is not lent and rank.name in x.open and block in x.blocks]
                if not others:
                    rank.words[block] = FREED
        if not lent.open:
            self._settle(lent)

    def _settle(self, lent: _Lent) -> None:
        for block in lent.blocks:
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free.append(block)
        self.lent.pop(lent.ask.number, None)

    # -- the decode engines -----------------------------------------------------------------------------

    def _read(self, rank: _Rank, lent: _Lent, retries: int) -> None:
        if rank.process.is_dead:
            return
        attempt = _Attempt(self, rank, lent)
        self.attempts.append(attempt)
        task = rank.process.loop.create_task(attempt.run(retries))
        self.tasks.setdefault(lent.ask.number, []).append((rank, rank.process, task))

    @property
    def _is_mild(self) -> bool:
        """Nothing keeps a reader's releases from arriving in time."""
        return all(
            f.kind in ("duplicate", "slow", "fail", "doubt", "stuck", "cancel", "forget", "garbage")
            or (f.kind == "loss" and f.seconds <= 1.3)
            for f in self.script.faults
        )

    def _was_done_with(self, rank: _Rank, lease: _Lease) -> bool:
        """Everybody who owed a release had been discharged for a while when the lease ended."""
        ask = next(a for a in self.script.asks if a.number == lease.ask)
        readers = owed_readers(rank.rank, self.script.prefill, self.script.decode)
        since = [self.discharged.get((ask.number, self.decode[e][r].name)) for e in ask.engines for r in readers]
        # A release that was lost is repeated after 0.2, 0.6, 1.4 and 3 seconds.
        slack = 3.3 if any(f.kind == "loss" for f in self.script.faults) else 1.0
        return all(at is not None and at < lease.ended_at - slack for at in since)

    # -- afterwards -------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Everything has had its time: one outcome each, nothing held, everything idle."""
        world = self.world
        for attempt in self.attempts:
            if attempt.is_open and not attempt.process.is_dead:
                world.violate(f"{attempt} never ended")
                return
        for rank, process, task in [x for tasks in self.tasks.values() for x in tasks]:
            if task.done() and not task.cancelled() and (exc := task.exception()) is not None and not process.is_dead:
                world.violate(f"an attempt on {rank.name} ended with {exc!r}")
                return
        for rank, process, lease in self.leases:
            if not process.is_dead and not lease.ended:
                world.violate(f"the lease of request {lease.ask} on {rank.name} never ended")
                return
            if lease.ended == "expired" and self._is_mild and self._was_done_with(rank, lease):
                world.violate(f"the lease of request {lease.ask} on {rank.name} expired with all its readers done")
                return
        for rank in self.ranks.values():
            if rank.process.is_dead or rank.engine._node_or_none is None or rank.data.is_closed:
                continue
            node = rank.engine._node
            if wrong := node.check_integrity():
                world.violate(f"{rank.name}: {'; '.join(wrong)}")
                return
            if node.desk.counters["internal_errors"]:
                world.violate(f"{rank.name}: internal errors")
                return
            if node.desk.counters["dropped.malformed"] and not any(f.kind == "garbage" for f in self.script.faults):
                world.violate(
                    f"{rank.name} was sent {node.desk.counters['dropped.malformed']} malformed packets by its own kind"
                )
                return
            if late := [h for h in rank.engine.holds() if h.reason not in ("retired", "quarantined")]:
                world.violate(f"{rank.name} still holds blocks of {late[0].request_id}: {late[0].reason}")
                return
            stuck = [t for t in rank.data.transfers.values() if not t.is_over]
            if not stuck and not node.is_idle:
                world.violate(f"{rank.name} is not idle: {node.gauges()}")
                return
            holds = [h for h in node.ledger if h.kind == "lent"]
            if holds or (len(node.ledger) and not stuck):
                world.violate(f"{rank.name} holds blocks for nobody: {[h.request_id for h in node.ledger]}")
                return
            if not stuck and sorted(rank.free) != list(range(NUM_BLOCKS)) and rank.role == "decode":
                world.violate(f"{rank.name} has lost blocks: {sorted(set(range(NUM_BLOCKS)) - set(rank.free))}")
                return
            if node.lending.num_parked or (self.script.is_long and node.pulling.peers and not stuck):
                peers = [f"{p.name} {p.state.value}" for p in node.pulling.peers.values()]
                world.violate(f"{rank.name} remembers too long: {node.lending.num_parked} parked, peers {peers}")
                return
            for peer in node.pulling.peers.values():
                if not stuck and (len(peer.window) or peer.queue):
                    world.violate(f"{rank.name} counts {peer.window.num_bytes} bytes in flight from {peer.name}")
                    return


@dataclass(slots=True)
class _Lease:
    ask: int
    handle: Any
    ended: str = ""
    ended_at: float = 0.0

    def revoke(self) -> None:
        """Take it back."""
        self.handle.revoke()


class _Attempt:
    """One decode rank's attempt at one request."""

    def __init__(self, service: Service, rank: _Rank, lent: _Lent) -> None:
        self.service, self.rank, self.lent, self.process = service, rank, lent, rank.process
        self.is_open = True
        self.announced_at = math.inf
        self.reason = ""

    def __str__(self) -> str:
        return f"request {self.lent.ask.number} on {self.process.name}"

    async def run(self, retries: int) -> None:
        """Pull, check, give back; again if it fails and retries are left."""
        service, rank, ask = self.service, self.rank, self.lent.ask
        engine, world = rank.engine, service.world
        request_id = f"D{ask.number}"
        try:
            if ask.announce_s:
                engine.announce(request_id, self.lent.params)
                self.announced_at = self.process.now
                await asyncio.sleep(ask.announce_s)
            for attempt in range(retries + 1):
                if not await self._pull(request_id, attempt == retries):
                    break
                if attempt < retries:
                    await asyncio.sleep(service.rng.random() ** 2 * 0.5)
        except asyncio.CancelledError:
            service.outcomes["pull.task_cancelled"] += 1
        except (EngineClosed, LocalProtocolError) as exc:
            world.note(rank.name, "cannot pull", exc)
            service.outcomes[f"pull.{type(exc).__name__}"] += 1
        except PullError as exc:
            # Refused before it began.
            service.outcomes[f"pull.{exc.reason}"] += 1
        finally:
            self.is_open = False

    async def _pull(self, request_id: str, is_last: bool) -> bool:
        """One pull; True if another may do better."""
        service, rank, ask = self.service, self.rank, self.lent.ask
        world, engine = service.world, rank.engine
        first = ask.cached
        count = -(-ask.tokens // BLOCK) - first // BLOCK if first < ask.tokens else 0
        while len(rank.free) < count:
            # All blocks may be held by transfers that never end: that is no pull's fault.
            self.is_open = False
            await asyncio.sleep(0.2)
        self.is_open = True
        token = object()
        blocks = [rank.free.pop(service.rng.randrange(len(rank.free))) for _ in range(count)]
        for block in blocks:
            rank.owner[block] = token
            rank.words[block] = UNUSED
        called, frozen = self.process.now, self.process.frozen_s
        if called > self.announced_at + PULL.announce_s * 0.99:
            # Announced and not pulled in time: the engine has given it up.
            service.discharged.setdefault((ask.number, rank.name), called)
        again = False
        cancelled = None
        try:
            await engine.pull(request_id, [(first, blocks)], self.lent.params, is_last=is_last)
        except PullError as exc:
            service.outcomes[f"pull.{exc.reason}"] += 1
            self.reason = f"{exc.reason}: {exc}"
            world.note(rank.name, "pull failed", (ask.number, exc.reason, str(exc)[:160]))
            again = exc.reason not in ("cancelled", "unplannable")
            if exc.reason == "consumed" and (ask.number, rank.name) not in service.discharged:
                self._violate("was refused as consumed, though this reader released nothing")
            self._in_time(called, frozen)
            if exc.held and not await self._wait(exc.returned()):
                return False
        except asyncio.CancelledError as exc:
            service.outcomes["pull.cancelled_task"] += 1
            self._in_time(called, frozen)
            cancelled = exc
            if not await self._wait(engine.returned(request_id)):
                raise
        except AsyncKVError:
            self._give_back(blocks)
            raise
        else:
            service.outcomes["pull.complete"] += 1
            self.reason = "complete"
            world.note(rank.name, "pull complete", ask.number)
            self._in_time(called, frozen)
            world.at(self.process.now, partial(self._verify, blocks, first))
            is_last = True
        if is_last:
            service.discharged.setdefault((ask.number, rank.name), self.process.now)
        # The process may be ahead of the world; memory is looked at and given back when the world is there.
        world.at(self.process.now, partial(self._give_back, blocks))
        if cancelled is not None:
            raise cancelled
        return again

    async def _wait(self, returned: Any) -> bool:
        """Wait for blocks, however often the task is cancelled; False if they are lost."""
        waiting = self.process.loop.create_task(returned)
        self.is_open = False
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                continue
            except BlocksRetired:
                self.service.outcomes["blocks.retired"] += 1
                self.service.world.note(self.rank.name, "blocks retired", self.lent.ask.number)
                return False
        self.is_open = True
        return True

    def _in_time(self, called: float, frozen: float) -> None:
        # Deadlines are bounds for a process that runs: what it was stopped for comes on top.
        stopped = self.process.frozen_s - frozen
        took = self.process.now - called - stopped
        if took > (PULL.timeout_s + 0.1) * 1.001:
            self._violate(f"ended after {took:.3f} s")

    def _violate(self, what: str) -> None:
        # A task's exception would wait until somebody asks for it.
        self.service.world.violate(f"{self} {what}")

    def _verify(self, blocks: Sequence[int], first: int) -> None:
        rank, lent = self.rank, self.lent
        for i, block in enumerate(blocks):
            place = first // BLOCK + i
            lo = max(first - place * BLOCK, 0)
            hi = min(lent.ask.tokens - place * BLOCK, BLOCK)
            for head in range(*rank.held):
                words = rank.words[block, head - rank.held[0]]
                if not (words[:, lo:hi] == _value(lent.contents[place], head)).all():
                    found = sorted({hex(x) for x in words[:, lo:hi].ravel().tolist()})
                    self._violate(f"published wrong bytes: block {block} head {head} holds {found}")
                if not (words[:, :lo] == UNUSED).all():
                    self._violate("wrote below its first token")

    def _give_back(self, blocks: Sequence[int]) -> None:
        if self.process.is_dead:
            return  # its memory is gone; only its remains are being swept up
        for block in blocks:
            del self.rank.owner[block]
            self.rank.words[block] = FREED
            self.rank.free.append(block)


# -- from outside ---------------------------------------------------------------------------------------------------


@contextmanager
def _silent() -> Iterator[None]:
    logger = logging.getLogger("asynckv")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def play(script: Script) -> Outcome:
    """Run one script."""
    with _silent():
        return Service(script).run()


def simulate(seed: int, faults: Sequence[str] = FAULTS) -> Outcome:
    """Run what a seed stands for."""
    return play(make_script(seed, faults))


@dataclass(slots=True)
class Found:
    """What many seeds showed."""

    seeds: int = 0
    violations: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


CHUNK = 25
MOST_VIOLATIONS = 20


def _chunk(seeds: Sequence[int], faults: Sequence[str]) -> tuple[int, dict[int, str], Counter[str]]:
    violations, counts = {}, Counter[str]()
    for seed in seeds:
        outcome = simulate(seed, faults)
        counts += outcome.counts
        if outcome.violation:
            violations[seed] = outcome.violation
    return len(seeds), violations, counts


def simulate_many(
    seeds: Sequence[int],
    faults: Sequence[str] = FAULTS,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Found:
    """Run many seeds, on several processes; stops early once there are many violations.

    Args:
        seeds: Which.
        faults: Kinds that may happen.
        jobs: Processes.
        progress: Called with how many more are done.
    """
    found, begun = Found(), time.perf_counter()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    with ExitStack() as stack:
        results: Iterator[tuple[int, dict[int, str], Counter[str]]]
        if jobs == 1 or len(chunks) == 1:
            results = (_chunk(chunk, faults) for chunk in chunks)
        else:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(min(jobs, len(chunks))))
            results = pool.imap(partial(_chunk, faults=faults), chunks)
        for done, violations, counts in results:
            found.seeds += done
            found.violations |= violations
            found.counts += counts
            progress(done)
            if len(found.violations) >= MOST_VIOLATIONS:
                break
    found.seconds = time.perf_counter() - begun
    return found


def minimise(script: Script, most: int = 200) -> Outcome:
    """Leave out faults and requests as long as the same kind of violation comes."""
    best = play(script)
    kind = _kind(best.violation)
    changed = True
    while changed and most > 0:
        changed = False
        for what in ("faults", "asks"):
            items = getattr(best.script, what)
            for item in items:
                most -= 1
                left = tuple(x for x in items if x is not item)
                smaller = replace(best.script, faults=left) if what == "faults" else replace(best.script, asks=left)
                found = play(smaller)
                if found.violation and _kind(found.violation) == kind:
                    best, changed = found, True
                    break
                if most <= 0:
                    break
            if changed:
                break
    return best


def _kind(violation: str) -> str:
    return "".join(c for c in violation if not c.isdigit())[:40]
