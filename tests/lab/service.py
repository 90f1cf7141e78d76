"""A simulated service: real engines, their schedulers and allocators, the router between them, and all checks.

The allocators are hostile: blocks that are given back are overwritten at once, on both sides. While a script is
played every landing byte is judged; afterwards there must be one outcome per request and in time, no block lost
and everything idle.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.core.events import Ending
from asynckv.core.spent import SpentKeys
from asynckv.core.types import Address, Key, ReplyTo, TransferId, rank_name
from asynckv.engine import Engine
from asynckv.errors import AsyncKVError, BlocksRetired, EngineClosed, LocalProtocolError, PullError
from asynckv.geometry.check import Registration
from asynckv.geometry.layout import Group, Layout, Memory, TokenShard, attention_view, shard
from asynckv.results import LeaseEnd
from asynckv.scheduler import PrefillRanks
from asynckv.testing.fabric import Transfer
from tests.lab.ahead_script import AheadAsk, AheadScript
from tests.lab.doors import Doors
from tests.lab.hostile import Hostile
from tests.lab.looking import Filling, coordinates, few_places
from tests.lab.mishaps import Mishaps
from tests.lab.oracles import TURN_S, Stopwatch, Wire, check_belief, wrong_in
from tests.lab.script import (
    AFTER_FAILURE,
    BLOCK,
    LANDED,
    LENT,
    MILD,
    MOVING,
    NEVER_PULLED,
    SHORT_LOSS_S,
    WITHDRAWN,
    Ask,
    Fault,
    Script,
)
from tests.lab.tier_script import TierScript
from tests.lab.world import Process, TransferFate, World, WorldClock, WorldControl, WorldData
from tests.oracle import STAGED

NUM_BLOCKS, HEAD_DIM = 16, 2
FREED, UNUSED = 0xEEEE, 0xDDDD
PROBE = 1_000_000
AGAIN = 1000
"""Request 3 is lent again as request 1003, and then as 2003."""
TAKEN = {"recall", "preempt"}
CHANGED = {"scribble", "flip"}
HEARD = {"brink", "duplicate", "slow", "fail", "doubt", "stuck", "cancel", "revoke", "garbage", "hostile"}
HEARD |= TAKEN | CHANGED
"""Faults that make no process look dead."""

COUNTED = {"duplicate", "cancel", "revoke", "garbage", "hostile"} | TAKEN | CHANGED
"""Faults that make no rank fall silent, and no transfer take long: whatever runs takes room."""

HASTY = 0.5
"""Up to this likelihood an engine that closes has less time than its promises run, and its process dies at once."""

QUIET_S = 45.0
"""Seconds that everything may take to settle after the faults."""

UNTROUBLED_S, UNTROUBLED_PACKETS, UNTROUBLED_READS = 0.02, 6, 5
"""Limits of a pull that meets no trouble: seconds, packets one after the other, and transfers one after the other, each
as slow as they come. Scripts without faults are held to it as well, so it is what a pull takes without any; the worst
of 5,000 took 4 packets' or 2.6 transfers' time."""

HOSTILE_S = 2.1
"""Seconds that a hostile process may add: it can fill the memory for early claims, or have their answers, and claims
are repeated each 2 seconds at least."""

NUM_COPIES, COPY_BYTES = 3, 256
"""Slots of an owner for packed copies, and their length: few, and too short for some blocks."""
PACKED = STAGED._replace(ask_s=-1.0, least_packed=0)
"""Costs by which all is packed that can be."""
LEASE = LeaseConfig(lease_s=4.0, grant_s=2.0, max_lease_s=15.0, parked_s=5.0, max_parked=100)
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
    follow_s=5.0,
    max_post_bytes=128,
    max_post_descriptors=8,
    window_bytes=512,
    total_bytes=1024,
    retry_s=0.4,
)


Words = npt.NDArray[np.uint16]


def number_of(request_id: str) -> int:
    """Return the number of a request, given its id in a decode engine: what follows a tilde tells attempts apart."""
    return int(request_id[1:].partition("~")[0])


@lru_cache(maxsize=4096)
def _value(content: int, head: int, layer: int, token: int) -> int:
    """Return the value of a token's elements of one head: never one that freed or unused memory holds."""
    digest = hashlib.blake2b(repr((content, head + 1000 * layer, token)).encode(), digest_size=2).digest()
    return int.from_bytes(digest, "little") % 0xD000 + 1


def _held_tokens(script: Script, role: str, rank: int) -> list[int]:
    """Return the places of a block's tokens that a rank holds, in their order: neighbours take turns."""
    size, turn = script.shards[role]
    return [token for token in range(BLOCK) if token // turn % size == rank % size]


def _layout(script: Script, role: str, rank: int, layers: Sequence[int], base: int) -> Layout:
    """Return a rank's layout: in a prefill engine all layers, in a decode engine those of its stage."""
    size = script.prefill if role == "prefill" else script.decode
    order = ("kv", "block", "token", "head", "dim") if role == "prefill" else ("block", "head", "kv", "token", "dim")
    if script.is_packed and role == "decode":
        order = ("block", "kv", "head", "token", "dim")  # all that is wanted of a block lies densely
    shards, turn = script.shards[role]
    heads = shard(script.heads, rank % size // shards, size // shards)
    sizes = {"kv": 2, "block": NUM_BLOCKS, "token": BLOCK // shards, "head": heads[1] - heads[0], "dim": HEAD_DIM}
    length = math.prod(sizes.values()) * 2
    view = partial(attention_view, order=order, sizes=sizes, dtype="float16", heads=heads, num_heads=script.heads)
    return Layout(
        schema=2 if shards > 1 else 1,
        tp_rank=rank % size,
        tp_size=size,
        pp_stage=rank // size,
        pp_size=1 if role == "prefill" else script.stages,
        memories=(Memory(base, len(layers) * length),),
        groups=(Group("attention", BLOCK, NUM_BLOCKS),),
        views=tuple(view(layer="ab"[layer], offset=i * length) for i, layer in enumerate(layers)),
        token_shards=(TokenShard(0, shards, rank % shards, turn),) if shards > 1 else msgspec.UNSET,
    )


@dataclass(slots=True, eq=False)
class Lent:
    """One request on one prefill rank's memory, as the prefill engine's allocator sees it."""

    ask: Ask
    blocks: list[int]
    contents: list[int]
    params: dict[str, Any]
    engine: Prefill
    open: set[str] = field(default_factory=set)
    """Ranks that have not given it back."""
    lent_from: float = math.inf
    lent_by: float = -math.inf
    """When the first and the last rank lend it, or abort it."""
    is_preempted: bool = False
    """It is lent again as another request, once all ranks have it back."""

    @property
    def key(self) -> Key:
        return msgspec.convert(self.params["key"], Key)


class Listener(Protocol):
    """Watches engines of a service."""

    def listen(self, process: Process, engine: Engine) -> None:
        """Take an engine that was just made, in a process that has just begun."""


class StagedRank:
    """One rank, over all of its process's starts."""

    process: Process
    engine: Engine

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        rng = world.random_of("rank", name)
        self.rate, self.epoch = rng.choice([0.9996, 1.0, 1.0004]), rng.uniform(0, 1e7)
        self.starts = 0
        self.is_asleep = self.is_moving = False

    def begin(self) -> Process:
        """Begin a process."""
        self.starts += 1
        self.is_asleep = self.is_moving = False
        name = f"{self.name}#{self.starts}"
        self.process = self.world.processes[name] = Process(self.world, name, epoch=self.epoch, rate=self.rate)
        return self.process

    def connect(self, stage: Stage, config: EngineConfig, layout: Layout, data: WorldData) -> Engine:
        """Make the process's engine, behind its doors, and tell listeners."""
        process, doors = self.process, stage.doors(self.process)
        engine = Engine(
            doors.config(config),
            Registration(layout),
            data=doors.data(data),
            control=doors.control(WorldControl(process, f"sim://{self.name}")),
            clock=doors.clock(WorldClock(process)),
            token_hex=doors.token_hex(self.world.token(process.name)),
        )
        for listener in stage.listeners:
            listener.listen(process, engine)
        return doors.engine(engine)

    def sleep(self, seconds: float, change: Callable[[Process, bool], None], done: Callable[[], None]) -> None:
        """Suspend the engine for a while; its memory changes as it falls asleep, and as it wakes up."""
        process, engine, world = self.process, self.engine, self.world
        self.is_moving = True

        async def sleep() -> None:
            try:
                await engine.suspend(seconds * 0.2)
                world.at(process.now, partial(change, process, True))
                await asyncio.sleep(seconds)
                # Before anything can be lent or read again.
                world.at(process.now, partial(change, process, False))
                await asyncio.sleep(0)
                await engine.resume()
            except EngineClosed:
                return
            done()

        process.spawn(sleep)


class Stage:
    """A world in which a script is played: time, faults, and what both services count."""

    def __init__(
        self,
        script: Script | TierScript | AheadScript,
        doors: Callable[[Process], Doors],
        listeners: Sequence[Listener],
        begins_s: float,
    ) -> None:
        self.doors, self.listeners, self.begins_s = doors, listeners, begins_s
        self.world = World(script.seed)
        self.rng = self.world.random_of("service")
        self.outcomes: Counter[str] = Counter()
        self._seconds = script.seconds
        self._faults: dict[str, list[Fault]] = {}
        for fault in script.faults:
            self._faults.setdefault(fault.kind, []).append(fault)

    def _play(self, faults: Sequence[Fault], quiet_s: float, *judges: Callable[[], None]) -> None:
        """Let faults happen, heal what is left of them, and judge; the world knows what was violated."""
        world = self.world
        for fault in faults:
            world.at(self.begins_s + fault.at, partial(self._begin, fault))
        try:
            world.run(self._seconds)
            for process in world.processes.values():
                process.pauses = 0.0
            world.run(self._seconds + quiet_s)
            for judge in judges:
                if not world.violation:
                    judge()
        finally:
            world.close()

    def _begin(self, fault: Fault) -> None:
        if self.world.now <= self._seconds:
            self.world.note("script", fault.kind, fault)
            self.world.counts[f"fault.{fault.kind}"] += 1
            self._meet(fault)

    def _meet(self, fault: Fault) -> None:
        raise NotImplementedError

    def _active(self, kind: str, *names: str) -> float:
        """The likelihood of a fault of this kind at any of these ranks now."""
        now = self.world.now - self.begins_s
        if now >= self._seconds or not (faults := self._faults.get(kind)):
            return 0.0
        most = 0.0
        for fault in faults:
            if fault.at <= now < fault.at + fault.seconds and any(name in fault.who for name in names):
                most = max(most, fault.p)
        return most


class Rank(StagedRank):
    """One rank of an engine."""

    def __init__(self, service: Service, role: str, engine: int, rank: int) -> None:
        self.service, self.role, self.engine_number, self.rank = service, role, engine, rank
        script = service.script
        names = script.prefill_names[engine] if role == "prefill" else script.decode_names[engine]
        super().__init__(service.world, names[rank])
        self.engine_id = f"decode{engine}" if role == "decode" else f"prefill{engine}" if engine else "prefill"
        base = (1 + rank + 16 * (role == "decode") + 32 * engine) << 40
        self.layers = range(script.stages) if role == "prefill" else (rank // script.decode,)
        self.layout = _layout(script, role, rank, self.layers, base)
        self.held = self.layout.views[0].parts[0].held
        self.tokens = _held_tokens(script, role, self.layout.tp_rank)
        self.title = rank_name(self.engine_id, self.layout.tp_rank, self.layout.pp_stage)
        """Its name in the engines' logs."""
        self.free: list[int] = []
        self.owner: dict[int, object] = {}
        """Decode: which attempt owns which block."""
        self.retired: set[int] = set()
        """Blocks that were given up; what may have written them may have ended since."""
        self.is_draining = False
        self.words: Words

    def start(self) -> None:
        """Start a process with memory of its own."""
        process = self.begin()
        memory = np.empty(self.layout.memories[0].length, np.uint8)
        words: Words = memory.view(np.uint16)
        heads, tokens = self.held[1] - self.held[0], len(self.tokens)
        if self.role == "prefill":
            words = words.reshape(-1, 2, NUM_BLOCKS, tokens, heads, HEAD_DIM).transpose(2, 0, 4, 1, 3, 5)
        else:
            if self.service.script.is_packed:
                words = words.reshape(NUM_BLOCKS, 1, 2, heads, tokens, HEAD_DIM).swapaxes(2, 3)
            else:
                words = words.reshape(NUM_BLOCKS, 1, heads, 2, tokens, HEAD_DIM)
        self.words = words
        self.words[:] = UNUSED
        self.memory, self.bytes = memory, words.view(np.uint8)
        self.free = list(range(NUM_BLOCKS))
        self.owner, self.retired = {}, set()
        self.is_draining = False
        data = WorldData(process, f"agent-{process.name}", [memory], self.layout.memories)
        data.on_post, data.on_land, data.on_done = self._posted, self._landing, self._done
        data.costs = STAGED if self.service.script.is_staged else None
        if self.service.script.is_packed:
            data.costs = PACKED
            data.make_copies(NUM_COPIES, COPY_BYTES)
        if self.service.script.mishaps:
            data.fate_of = partial(self.service.mishaps.fate_of, self)
        if self.service.script.looks is not None and self.role == "decode":
            self.coordinates = coordinates(self.bytes, memory)
            data.on_landed = self._landed
        self.fillings: dict[str, Filling] = {}
        """By request of this side."""
        self.filled: dict[int, tuple[Filling, Any]] = {}
        """By transfer."""
        self.data = data
        self.owners: dict[int, dict[int, object]] = {}
        self.reads: dict[int, tuple[str, str]] = {}
        """By transfer: the process start that is read, and the pull."""
        self.engine = self.connect(self.service, self.config(), self.layout, data)
        process.spawn(self.engine.start)
        self.world.note(self.name, "started", process.name)

    def config(self) -> EngineConfig:
        script, pull = self.service.script, PULL
        if script.budget:
            total = script.budget * script.prefill_engines
            pull = replace(PULL, window_requests=script.budget, total_requests=total)
        if script.looks is not None:
            pull = replace(pull, second_look=script.looks.share, second_look_bytes=script.looks.most)
        return EngineConfig(engine_id=self.engine_id, lease=LEASE, pull=pull)

    # -- hostile checks ------------------------------------------------------------------------------

    def _block_of(self, start: int) -> int:
        return start // (self.layout.memories[0].length // NUM_BLOCKS)

    def _posted(self, transfer: Transfer) -> None:
        """Remember the owners of the blocks that a transfer may write."""
        blocks = {self._block_of(start) for _, start, _ in transfer.spots}
        if strange := [b for b in blocks if b not in self.owner]:
            self.service.world.violate(f"{self.process.name} posts a read into block {strange[0]}, nobody's to fill")
            return
        self.owners[int(transfer.transfer_id)] = {b: self.owner[b] for b in blocks}
        posted = self.engine._driver.core.decode.transfers
        mine = posted[transfer.transfer_id].pull
        self.service.reads(self, mine.request_id, mine.params.key)
        self.reads[int(transfer.transfer_id)] = posted[transfer.transfer_id].source.rank.place[1], mine.pull_id
        owner = transfer.owner.host.split("#")[0]
        if self.service.script.looks is not None:
            filling = self.fillings[mine.request_id]
            self.filled[int(transfer.transfer_id)] = filling, filling.posts(mine)
            for other in self.data.running.values() if transfer.ours else ():
                if other.ours and not other.is_dead and np.shares_memory(other.pieces[0][0], transfer.pieces[0][0]):
                    self.service.world.violate(f"two looks of {self.process.name} are read into one place at a time")
        if not self.service.wire.has_asked(self.process, f"sim://{owner}", mine.pull_id):
            self.service.world.violate(f"{self.process.name} reads for {mine.request_id} before it claims from {owner}")
        self.service.wire.posted(self.process, *self.reads[int(transfer.transfer_id)])
        self.service.met(MOVING, mine.request_id, self.process)
        if self.service.is_counted:
            self._fits(transfer)
        for other in self.data.running.values():
            theirs = posted.get(other.transfer_id)
            if other.is_dead or other.is_detached or other is transfer or (theirs is not None and theirs.pull is mine):
                continue
            if common := blocks & {self._block_of(start) for _, start, _ in other.spots}:
                self.service.world.violate(f"two pulls of {self.process.name} write block {min(common)} at a time")
        if self.service.is_heard and self.service.script.budget:
            reading = {t.pull.pull_id for t in posted.values() if t.pull.reason is None}
            most = self.service.script.budget * self.service.script.prefill_engines
            if len(reading) > most:
                self.service.world.violate(
                    f"{self.process.name} reads {len(reading)} requests at a time, {most} are allowed"
                )

    def _done(self, transfer_id: TransferId) -> None:
        """A read has ended well, and this process is about to know."""
        posted = self.engine._driver.core.decode.transfers.get(transfer_id)
        if posted is None:
            return
        source = posted.source
        self.service.wire.done(self.process, source.rank.place[1], posted.pull.pull_id)
        if source.next_read is None and not source.doubtful and source.running <= {transfer_id}:
            self.service.met(LANDED, posted.pull.request_id, self.process)

    def _landed(self, transfer: Transfer, pieces: range) -> None:
        """Bytes have landed, some of them changed on their way. What a look brings is what the owner has."""
        filling, of = self.filled[int(transfer.transfer_id)]
        owner = self.service.ranks[transfer.owner.host.split("#")[0]]
        filling.landed(of, owner, transfer, pieces, self.service._active("flip", self.name))

    def _fits(self, transfer: Transfer) -> None:
        """No more is in flight than may be, from each rank and in all."""
        posted = self.engine._driver.core.decode.transfers
        known = [t for t in self.data.running.values() if not t.is_over and t.transfer_id in posted]
        running = [t for t in known if posted[t.transfer_id].pull.reason is None]
        same = [t for t in running if t.owner is transfer.owner]
        for others, most in ((same, PULL.window_bytes), (running, PULL.total_bytes)):
            num_bytes = sum(length for t in (*others, transfer) for _, _, length in t.spots)
            if others and num_bytes > most:
                self.service.world.violate(f"{self.process.name} has {num_bytes} bytes in flight, {most} are allowed")

    def _landing(self, transfer: Transfer, spots: Sequence[tuple[int, int, int]]) -> None:
        """Nothing lands in a block that was given back, nor in memory that was let go."""
        if self.is_asleep and spots:
            self.service.world.violate(
                f"transfer {transfer.transfer_id} writes the memory of {self.process.name}, which sleeps"
            )
        owners = self.owners[int(transfer.transfer_id)]
        for _, start, _ in spots:
            block = self._block_of(start)
            if self.owner.get(block) is not owners[block]:
                self.service.world.violate(
                    f"transfer {transfer.transfer_id} writes block {block} of {self.process.name} after it came back"
                )
        self.service.wire.landed(self.process, *self.reads[int(transfer.transfer_id)])


class Prefill:
    """A prefill engine: its ranks, its scheduler and its allocator."""

    def __init__(self, service: Service, number: int) -> None:
        self.service, self.number = service, number
        self.ranks = [Rank(service, "prefill", number, r) for r in range(service.script.prefill)]
        self.groups: list[PrefillRanks] = []
        """One per scheduler."""
        self.memory_epoch = 0
        self.free = list(range(NUM_BLOCKS))
        self.uses: Counter[int] = Counter()
        """Blocks, and how many requests have them."""
        self.content: dict[int, int] = {}

    def new_group(self) -> None:
        """Hand out a new address book."""
        endpoints = [r.engine.endpoint for r in self.ranks]
        names = ("group", self.service.world.now, *([self.number] if self.number else []))
        # It never goes back: a rank that was restarted begins at 0, but others may remember more.
        self.memory_epoch = max(self.memory_epoch, *(r.engine.memory_epoch for r in self.ranks))
        self.groups = [
            PrefillRanks(
                self.ranks[0].engine_id,
                endpoints,
                lease=LEASE,
                memory_epoch=self.memory_epoch,
                num_token_shards=self.service.script.shards["prefill"][0],
                token_hex=self.service.world.token(*names, *([f"scheduler {i}"] if i else [])),
            )
            for i in range(self.service.script.schedulers)
        ]


class Service(Stage):
    """Prefill and decode engines, their schedulers and the router between them.

    Args:
        script: The requests and the faults.
        doors: The doors of every rank, each time its process starts.
        listeners: Functions that get each engine before it starts.
    """

    def __init__(
        self, script: Script, doors: Callable[[Process], Doors] = Doors, listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(script, doors, listeners, 0.01)
        self.script = script
        self.world.fate = self._fate
        self.world.transfer_fate = self._transfer_fate
        self.world.is_calm = self._is_calm
        # Each lease says a third of a grant, or of itself if that is shorter.
        self.wire = wire = Wire(self.world, PULL, LEASE.grant_s / 3, not any(f.kind == "forget" for f in script.faults))
        self.world.on_sent, self.world.on_delivered, self.world.on_heard = wire.sent, wire.delivered, wire.heard
        self.prefill = [Prefill(self, e) for e in range(script.prefill_engines)]
        self.decode = [
            [Rank(self, "decode", e, r) for r in range(len(names))] for e, names in enumerate(script.decode_names)
        ]
        self.ranks = {r.name: r for e in (*(p.ranks for p in self.prefill), *self.decode) for r in e}
        self.spared = script.spared
        self.is_heard = not script.mishaps and {f.kind for f in script.faults} <= HEARD
        """No process falls silent."""
        self.is_counted = not script.mishaps and {f.kind for f in script.faults} <= COUNTED
        self.lent: dict[int, Lent] = {}
        self.lent_ever: list[Lent] = []
        self.num_contents = 0
        self.tasks: dict[int, list[tuple[Attempt, asyncio.Task[None]]]] = {}
        self.attempts: list[Attempt] = []
        self.leases: list[tuple[Rank, Process, Any]] = []
        self.recalled: set[tuple[Process, Lent]] = set()
        self._armed: list[Fault] = []
        """Recalls and scribbles that wait for their moment."""
        self.scribbled: dict[tuple[int, ...], set[int]] = {}
        """Bytes that an owner has written into lent blocks: by content, layer, head, part, token and byte."""
        self.hasty: set[Process] = set()
        """Those that close without time for every promise: they give nothing back, and write nothing any more."""
        self.discharged: dict[tuple[int, str], float] = {}
        """Requests, the readers that need them no more, and since when."""
        self.closed_with: set[tuple[int, str]] = set()
        """What a rank had announced when it closed, which releases it for good."""
        self.mishaps = Mishaps(self, script.mishaps)
        self.addressed: dict[tuple[int, str], tuple[Process, float]] = {}
        """To which process of a reader the router sent a request's params, to arrive when."""

    # -- running --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the script to its end, and check; the world knows what was violated."""
        world, script = self.world, self.script
        for rank in self.ranks.values():
            rank.start()
        for engine in self.prefill:
            world.at(0.0, engine.new_group)
        for ask in script.asks:
            world.at(0.01 + ask.at, partial(self._ask, ask, 3))
        # Now and then for so long that even tombstones must be gone.
        with few_places(script.looks):
            self._play(script.faults, QUIET_S * (3 if script.is_long else 1), self._check, self._probe)

    def _probe(self) -> None:
        """With the faults over, a fresh request must complete on every rank that has a block for it."""
        world, engines = self.world, tuple(range(self.script.decode_engines))
        able = {r.name for e in self.decode for r in e if len(r.free) >= len(self.prefill) and not r.process.is_dead}
        count = len(self.attempts)
        for engine in range(len(self.prefill)):
            self._ask(Ask(PROBE + engine, world.now, BLOCK, False, engines, -1, 0, 0.0, 0, 4.0, 0.01, engine), 0)
        world.run(world.now + PULL.timeout_s + 1.0)
        for attempt in self.attempts[count:]:
            if attempt.rank.name in able and attempt.reason != "complete" and not world.violation:
                world.violate(f"a fresh request on {attempt.rank.name} failed: {attempt.reason}")

    # -- faults ---------------------------------------------------------------------------------------

    def _fate(self, sender: str, to: str, rng: random.Random) -> Sequence[float]:
        names = sender.split("#")[0], to.split("#")[0]
        usual = (5e-5 + rng.random() * 2e-4) * self.script.wire
        faults = rng.random(), rng.random(), rng.random()
        now = self.world.now - 0.01
        for fault in self._faults.get("partition", ()):
            if fault.at <= now < min(fault.at + fault.seconds, self.script.seconds):
                if (names[0] in fault.who) != (names[1] in fault.who):
                    return ()
        if faults[0] < self._active("loss", *names):
            return ()
        if faults[1] < self._active("delay", *names):
            usual += rng.random() ** 2 * 3.0
        if faults[2] < self._active("duplicate", *names):
            return (usual, usual + rng.random() ** 2 * 4.0)
        return (usual,)

    def _transfer_fate(self, reader: str, owner: str, rng: random.Random) -> TransferFate:
        names = reader.split("#")[0], owner.split("#")[0]
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

    def _meet(self, fault: Fault) -> None:
        """Let a fault happen that has a moment; the fates of packets and transfers ask for all others."""
        if begin := getattr(self, f"_begin_{fault.kind}", None):
            begin(fault)
        elif meet := getattr(self, f"_meet_{fault.kind}", None):
            for name in fault.who:
                if (rank := self.ranks.get(name)) is not None:
                    meet(rank, fault)

    def _meet_crash(self, rank: Rank, fault: Fault) -> None:
        self._crash(rank, fault.seconds)

    def _meet_close(self, rank: Rank, fault: Fault) -> None:
        # A rank without the time to keep every promise cuts them short, and is dead at once.
        self._close(rank, timeout_s=fault.seconds * 0.3 if fault.p < HASTY else None)

    def _meet_freeze(self, rank: Rank, fault: Fault) -> None:
        rank.process.freeze(min(fault.seconds, self.script.seconds - self.world.now))

    def _meet_pause(self, rank: Rank, fault: Fault) -> None:
        # Ranks that share tokens hear from more readers, and each message is several calls that may take long.
        rank.process.pauses = fault.p / self.script.shards["prefill"][0]
        self.world.at(self.world.now + fault.seconds, partial(setattr, rank.process, "pauses", 0.0))

    def _meet_hostile(self, rank: Rank, fault: Fault) -> None:
        if not rank.process.is_dead and rank.engine._home.is_settled:
            rng = self.world.random_of("hostile", rank.name, self.world.now)
            attack = Hostile(self.world, rank.process, f"sim://{rank.name}", rank.engine._driver.core, rng)
            attack.begin(min(fault.seconds, self.script.seconds - self.world.now))

    def _meet_drain(self, rank: Rank, fault: Fault) -> None:
        self._close(rank, fault.seconds)

    def _meet_sleep(self, rank: Rank, fault: Fault) -> None:
        self._sleep(rank, fault.seconds)

    def _meet_agent(self, rank: Rank, fault: Fault) -> None:
        if not rank.process.is_dead:
            lose = partial(self._lose_agent, rank, rank.data)
            rank.process.call_at(self.world.now, partial(lose, min(fault.seconds, 2.0)))

    def _lose_agent(self, rank: Rank, data: WorldData, down_s: float) -> None:
        data.lose_agent(down_s)
        for other in self.ranks.values():
            if other is not rank and not other.process.is_dead:
                other.data.lose(data)

    def _begin_cancel(self, fault: Fault) -> None:
        for number in map(int, fault.who):
            self._cancel(number)

    def _begin_revoke(self, fault: Fault) -> None:
        for number in map(int, fault.who):
            for owner, process, lease in self.leases:
                if not process.is_dead and lease.ask == number:
                    process.call_at(self.world.now, lease.revoke)
                    self.world.note(owner.name, "revokes", str(number))

    def _begin_brink(self, fault: Fault) -> None:
        for owner, process, lease in self.leases:
            if not process.is_dead and str(lease.ask) in fault.who and not lease.ended:
                process.call_at(self.world.now, self._to_the_brink, owner, process, lease)

    def _to_the_brink(self, owner: Rank, process: Process, lease: Lease) -> None:
        """Revoke a lease; let its reads end as its grants run out, and old messages arrive once more before."""
        rng, grants = self.world.random_of("brink", owner.name, lease.ask), [*lease.handle._lease.grants.values()]
        lease.revoke()
        key, address = lease.handle._lease.lent.key, Address(f"sim://{owner.name}")
        for grant in grants:
            until = (grant.until - process.epoch) / process.rate
            reader = next((r for r in self.ranks.values() if r.title == str(grant.reader)), None)
            if reader is None or reader.process.is_dead:
                continue  # a hostile peer's, or nothing is believed any more
            asked, port = self.wire.asked.get((reader.process, address, grant.pull_id)), self.world.ports.get(address)
            if asked is None or port is None:
                continue
            reach_s = rng.choice((0.001, 0.05))
            for transfer_id, posted in reader.engine._driver.core.decode.transfers.items():
                transfer = reader.data.running.get(transfer_id)
                if transfer is not None and posted.pull.params.key == key and posted.source.address == address:
                    believed = (posted.source.covered_until - reader.epoch) / reader.rate
                    reader.data.end_at(transfer, believed + rng.uniform(-0.2, 1.0) * reach_s)
            origin = ReplyTo(reader.process.name.encode())
            for reach_s in (0.004, 0.05):
                process.call_at(until - reach_s * rng.random(), port.hear, origin, asked[1])

    def _begin_recall(self, fault: Fault) -> None:
        if fault.when:
            self._armed.append(fault)
        else:
            self._act(fault)

    _begin_preempt = _begin_scribble = _begin_recall

    def _act(self, fault: Fault) -> None:
        (self._scribble if fault.kind == "scribble" else self._take_back)(fault)

    def met(self, when: str, request_id: str, process: Process) -> None:
        """Let what waits for such a moment of a request's reader happen, a little after it."""
        if self.script.goes_on and self.world.now <= self._seconds:
            self._go_on(number_of(request_id), process)
        for fault in self._armed if self.world.now <= self._seconds else ():
            if fault.when == when and number_of(request_id) % AGAIN == int(fault.who[0]):
                self._armed.remove(fault)
                rng = self.world.random_of("recall", fault, process.now)
                usual_s = 2e-3 * self.script.data if when == MOVING else 5e-4 * self.script.wire
                if fault.kind == "scribble":
                    usual_s = 1e-3 * self.script.data * rng.random()
                self.world.at(process.now + rng.random() * usual_s, partial(self._act, fault))
                return

    def reads(self, rank: Rank, request_id: str, key: Key) -> None:
        """A rank posts a read."""

    def _scribble(self, fault: Fault) -> None:
        """Let a rank write into blocks of a request that it has lent."""
        rng = self.world.random_of("scribble", fault, self.world.now)
        for lent in self.lent_ever:
            names = [n for n in sorted(lent.open) if not (self.ranks[n].process.is_dead or self.ranks[n].is_asleep)]
            if lent.ask.number % AGAIN != int(fault.who[0]) or not names:
                continue
            rank = self.ranks[rng.choice(names)]
            tokens = [token for token in range(lent.ask.tokens) if token % BLOCK in rank.tokens]
            for _ in range(rng.choice([1, 3, 9]) if tokens else 0):
                place, at = divmod(rng.choice([*tokens, tokens[-1]]), BLOCK)
                layer, head, kv, byte = (rng.randrange(rank.bytes.shape[i]) for i in (1, 2, 3, 5))
                index = lent.blocks[place], layer, head, kv, rank.tokens.index(at), byte
                where = lent.contents[place], rank.layers[layer], head + rank.held[0], kv, at, byte
                values = self.scribbled.setdefault(where, set())
                value = rng.choice([x for x in range(256) if x not in values and x != rank.bytes[index]])
                rank.bytes[index] = value
                values.add(value)
                self.outcomes["scribbles"] += 1

    def _go_on(self, number: int, reader: Process) -> None:
        """Let the owner of a request write its next tokens behind those that are lent, soon, into its last block."""
        if (lent := self.lent.get(number)) is None or not lent.ask.tokens % BLOCK:
            return
        rng = self.world.random_of("goes on", number, reader.now)

        def write(rank: Rank, process: Process) -> None:
            if rank.name in lent.open and rank.process is process:
                for place, token in enumerate(rank.tokens):
                    if token >= lent.ask.tokens % BLOCK:
                        rank.words[lent.blocks[-1], :, :, :, place] = rng.randrange(0x10000)
                        self.outcomes["writes.behind"] += 1

        for rank in lent.engine.ranks:
            self.world.at(reader.now + rng.random() * 2e-3 * self.script.data, partial(write, rank, rank.process))

    def _take_back(self, fault: Fault) -> None:
        """Recall a request from all of its ranks, at once or one after the other."""
        rng = self.world.random_of("recalls", fault, self.world.now)
        is_together = rng.random() < 0.5
        for lent in self.lent_ever:
            if not lent.ask.recall or lent.ask.number % AGAIN != int(fault.who[0]):
                continue
            lent.is_preempted |= fault.kind == "preempt" and bool(lent.open)
            for rank in lent.engine.ranks:
                late_s = 0.0 if is_together else rng.random() ** 3 * 0.5
                if not rank.process.is_dead:
                    rank.process.call_at(self.world.now + late_s, self._recall, rank, rank.process, lent)

    def _recall(self, rank: Rank, process: Process, lent: Lent) -> None:
        """Take a request back from a rank, and have its blocks overwritten before anything else happens."""
        if process in self.hasty:
            return  # its memory stays what it is until it dies
        engine, mine = rank.engine, [x for owner, p, x in self.leases if owner is rank and p is process]
        loans = [lease for lease in mine if not lease.handle.is_over]
        try:
            self._tighten(rank)
            self._count_recall(rank, lent, [lease for lease in mine if lease.lent is lent])
            others = engine.recall([lent.params])
        except EngineClosed:
            return
        self.wire.ended(process, engine.incarnation, lent.key.token)
        self.recalled.add((process, lent))
        self._spent(rank, lent)
        for lease in mine:
            if lease.lent is lent:
                lease.revoked = lease.revoked or Stopwatch.start(process)
                if not lease.handle.is_over:
                    self.world.violate(f"{rank.name} has recalled request {lent.ask.number}, and still lends it")
        if lent.params["request_id"] in {hold.request_id for hold in engine.holds()}:
            self.world.violate(f"{rank.name} has recalled request {lent.ask.number}, and still holds its blocks")
        named = {block for hold in others for ids in hold.blocks.values() for block in ids}
        if strange := named - {block for lease in loans if lease.lent is not lent for block in lease.lent.blocks}:
            self.world.violate(f"{rank.name} says that block {min(strange)} is lent to others as well")
        # The engine knows the other loans, and the allocator the requests that were not lent yet.
        lent_here = {id(lease.lent) for lease in mine}
        waiting = [x for x in self.lent.values() if rank.name in x.open and id(x) not in lent_here and x is not lent]
        kept = named.union(*(x.blocks for x in waiting))
        self.world.at(process.now, partial(self._taken_back, rank, process, lent, kept))

    def _count_recall(self, rank: Rank, lent: Lent, leases: Sequence[Lease]) -> None:
        """Note what a recall meets."""
        met = {"before" if not leases else "after" if leases[0].handle.is_over else "lent"}
        for reader in (r for e in lent.ask.engines for r in self.decode[e]):
            if reader.process.is_dead or not reader.engine._home.is_settled or "lent" not in met:
                continue
            for pull in reader.engine._driver.core.decode.pulls.values():
                for source in pull.sources:
                    if pull.params.key != lent.key or pull.reason is not None or source.address != f"sim://{rank.name}":
                        continue
                    if source.running:
                        met.add("moving")
                    elif source.has_landed and source.bytes_read:
                        met.add("proven" if source.proven else "landed")
        self.outcomes.update(f"recall.{what}" for what in met)

    def _taken_back(self, rank: Rank, process: Process, lent: Lent, kept: Set[int]) -> None:
        """A rank has recalled a request: its blocks are the engine's again, but for those that others hold."""
        if rank.name not in lent.open or rank.process is not process:
            return
        lent.open.discard(rank.name)
        for block in set(lent.blocks) - kept:
            rank.words[block] = FREED
        if not lent.open:
            self._settle(lent)

    def _is_calm(self, until: float) -> bool:
        deaths = (f for f in self.script.faults if f.kind in ("agent", "crash", "close"))
        return not (self.script.mishaps or any(f.at < until and f.at + 5.0 > self.world.now for f in deaths))

    def _crash(self, rank: Rank, down_s: float) -> None:
        self._kill(rank)
        self.world.at(self.world.now + down_s, lambda: self._restart(rank))

    def _kill(self, rank: Rank) -> None:
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

    def _restart(self, rank: Rank) -> None:
        if rank.process.is_dead:
            rank.start()
            if rank.role == "prefill":
                # Once it listens, its scheduler hands out its new address book.
                self.world.at(self.world.now + 1e-3, self.prefill[rank.engine_number].new_group)

    def _close(self, rank: Rank, drain_s: float = 0.0, timeout_s: float | None = None) -> None:
        process, engine = rank.process, rank.engine
        if process.is_dead or rank.is_moving:
            return
        rank.is_moving = True

        async def close() -> None:
            cut: set[str] = set()
            try:
                if drain_s:
                    await self._drain(rank, drain_s)
                announced = [a for a in self.attempts if a.process is process and a.called == "announced"]
                self.closed_with |= {(a.lent.ask.number, rank.name) for a in announced}
                if timeout_s is None:
                    await engine.aclose()
                else:
                    clock = Stopwatch.start(process)
                    self.hasty.add(process)
                    cut = {hold.request_id for hold in await engine.aclose(timeout_s)}
                    self.outcomes["closed.hastily"] += 1
                    self.outcomes["closed.cut_short"] += bool(cut)
                    if clock.ran_s * process.rate > timeout_s + 1.0 + TURN_S:
                        self.world.violate(f"{rank.name} took {clock.ran_s:.3f} s to close in {timeout_s:.3f} s")
            finally:
                self.world.note(rank.name, "closed", sorted(cut))
                self.world.at(process.now, partial(self._closed, rank, process, cut))
                self.world.at(self.world.now, lambda: self._crash(rank, 0.1) if rank.process is process else None)

        process.spawn(close)

    async def _drain(self, rank: Rank, seconds: float) -> None:
        """Nothing new is lent, nothing is cut short, and what is left at the deadline is named."""
        clock, rank.is_draining = Stopwatch.start(rank.process), True
        self.world.note(rank.name, "drains")
        try:
            stragglers = await rank.engine.drain(seconds)
        except EngineClosed:
            return
        finally:
            rank.is_draining = False
        if clock.ran_s > seconds * 1.001 + TURN_S:
            self.world.violate(f"{rank.name} drained for {clock.ran_s:.3f} s instead of {seconds:.3f} s")
        held = {hold.request_id for hold in rank.engine.holds()} - {hold.request_id for hold in stragglers}
        if held or (not stragglers and not rank.engine._driver.core.is_idle):
            self.world.violate(f"{rank.name} has drained and does not name {held or 'who is left'}")
        self.world.note(rank.name, "drained", [f"{s.request_id} {s.reason}" for s in stragglers])

    def _sleep(self, rank: Rank, seconds: float) -> None:
        process, engine = rank.process, rank.engine
        if process.is_dead or rank.is_moving or not engine._home.is_settled:
            return

        def resumed() -> None:
            self.world.note(rank.name, "resumed", engine.memory_epoch)
            if rank.role == "prefill":
                self.world.at(process.now, self.prefill[rank.engine_number].new_group)

        rank.sleep(seconds, partial(self._change, rank), resumed)

    def _change(self, rank: Rank, process: Process, is_asleep: bool) -> None:
        """The memory belongs to another owner while the engine sleeps."""
        if rank.process is not process or process.is_dead:
            return
        rank.is_asleep = rank.is_moving = is_asleep
        if is_asleep:
            self.world.note(rank.name, "sleeps")
            self.wire.forget(process)
            self._closed(rank, process)
            rank.words[:] = FREED
            for other in self.ranks.values():
                if other is not rank and not other.process.is_dead:
                    other.data.lose(rank.data)

    def _closed(self, rank: Rank, process: Process, cut: Set[str] = frozenset()) -> None:
        """An engine that has closed has kept its promises, but for those that it says were cut short."""
        for owner, holder_process, lease in self.leases:
            is_cut = lease.lent.params["request_id"] in cut
            if owner is rank and holder_process is process and lease.ended in ("", "closed") and not is_cut:
                self._check_belief(rank, lease.lent.key, lease.lent.ask)

    def _check_belief(self, rank: StagedRank, key: Key, ask: Ask | AheadAsk) -> None:
        """No reader believes in a promise of blocks that their owner has back."""
        readers = [
            (r.process, r.engine._driver.core)
            for r in self.ranks.values()
            if not r.process.is_dead and r.engine._home.is_settled
        ]
        incarnation, now = rank.engine.incarnation, self.world.now
        is_confirmed = partial(self.wire.is_confirmed, incarnation, key.token) if ask.recall else None
        wrong = check_belief(readers, key, incarnation, now, is_confirmed)
        if wrong := wrong or self.wire.freed(key.token, incarnation, now):
            self.world.violate(f"request {ask.number} was given back on {rank.name}, but {wrong}")

    def _meet_forget(self, rank: Rank, fault: Fault) -> None:
        for other in self.ranks.values():
            if other is not rank and not other.process.is_dead:
                engine, address = other.engine, f"sim://{rank.name}"

                def forget(engine: Engine = engine, address: str = address) -> None:
                    with suppress(EngineClosed):
                        engine.forget_peer(address)

                other.process.call_at(self.world.now, forget)

    def _meet_garbage(self, rank: Rank, fault: Fault) -> None:
        rng = self.world.random_of("garbage", rank.name, self.world.now)
        seen = [d for _, _, what, d in self.world.trace if isinstance(d, bytes)]
        packets = [rng.randbytes(rng.randint(1, 40))]
        for packet in [p for p in rng.sample(seen, min(len(seen), 4)) if p]:
            bad = bytearray(packet)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            packets += [bytes(bad), packet]
        control = self.world.ports.get(Address(f"sim://{rank.name}"))
        if control is not None:
            for packet in packets:
                when = self.world.now + rng.random() * 0.01
                rank.process.call_at(when, control.hear, ReplyTo(b"stranger"), packet)

    def _cancel(self, number: int) -> None:
        for attempt, task in self.tasks.get(number, ()):
            if not attempt.process.is_dead and not task.done():
                self.world.note(attempt.rank.name, "cancels", number)
                give_up = self._cancel_task if self.rng.random() < 0.5 else self._cancel_request
                attempt.process.call_at(self.world.now, give_up, attempt, task)

    def _cancel_task(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        if task.cancel():
            attempt.give_up()

    def _cancel_request(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        number, rank = attempt.lent.ask.number, attempt.rank
        if attempt.process is rank.process and rank.engine.cancel(f"D{number}"):
            attempt.give_up()
            attempt.said.add("cancelled")
            self.discharged.setdefault((number, rank.name), rank.process.now)

    # -- the prefill engine -----------------------------------------------------------------------------

    def _ask(self, ask: Ask, patience: int, wanted: Sequence[int] = ()) -> None:
        """Compute a request, and lend it; in the `wanted` blocks if these are free."""
        world = self.world
        count = -(-ask.tokens // BLOCK)
        shared = self.lent.get(ask.shares)
        engine = self.prefill[ask.prefill]
        is_common = shared is not None and shared.engine is engine
        common = list(shared.blocks[: max(min(len(shared.blocks), count) - 1, 0)]) if shared and is_common else []
        if len(engine.free) < count - len(common) or not engine.groups:
            if patience:
                world.at(world.now + 0.5, lambda: self._ask(ask, patience - 1, wanted))
            else:
                self.outcomes["asks.given_up"] += 1
                self._given_up(ask)
            return
        fresh = [block for block in wanted if block in engine.free][: count - len(common)]
        engine.free = [block for block in engine.free if block not in fresh]
        fresh += [
            engine.free.pop(self.rng.randrange(len(engine.free))) for _ in range(count - len(common) - len(fresh))
        ]
        for block in fresh:
            self.num_contents += 1
            engine.content[block] = self.num_contents
        blocks = common + fresh
        for block in blocks:
            engine.uses[block] += 1
        params = self._make_params(engine, ask, blocks)
        lent = self.lent[ask.number] = Lent(ask, blocks, [engine.content[b] for b in blocks], params, engine)
        self.lent_ever.append(lent)
        self.outcomes["asks"] += 1
        for endpoint in engine.groups[ask.number % len(engine.groups)].endpoints if ask.recall else ():
            self.wire.may_recall(endpoint.incarnation, lent.key.token)
        self.mishaps.asked(ask.number, params)
        self._hand_out(lent, world.now + ask.lend_s + (self.rng.random() ** 2 * 1.0 if ask.ahead else 0.0))

    def _given_up(self, ask: Ask) -> None:
        """A request never got blocks in its prefill engine."""

    def _make_params(self, engine: Prefill, ask: Ask, blocks: Sequence[int]) -> dict[str, Any]:
        return engine.groups[ask.number % len(engine.groups)].make_params(
            f"P:{ask.number},\n",
            [(0, blocks)],
            ask.tokens,
            written=not ask.ahead,
            lease_s=ask.lease_s,
            recall=ask.recall,
        )

    def _hand_out(self, lent: Lent, written_at: float) -> None:
        """Let each rank lend a request when it is written, and its readers have the params."""
        ask, now = lent.ask, self.world.now
        for rank in lent.engine.ranks:
            if rank.process.is_dead:
                continue
            lent.open.add(rank.name)
            lend_at = written_at + self.rng.random() ** 3 * 0.3
            lent.lent_from, lent.lent_by = min(lent.lent_from, lend_at), max(lent.lent_by, lend_at)
            if not ask.ahead:
                # `written` is said of every rank's KV before the params leave.
                self._fill(rank, rank.words, lent)
            elif ask.fate == LENT:
                # KV is written, and lent at once.
                rank.process.call_at(lend_at, self._write, rank, lent)
            rank.process.call_at(lend_at, self._lend if ask.fate == LENT else self._abort, rank, lent)
        if not lent.open:
            self._settle(lent)
        for number in ask.engines:
            for reader in self.decode[number]:
                is_lost = self.rng.random() < 0.03 and not self.script.mishaps
                if is_lost or self.mishaps.at(ask.number, reader.name, "params_lost"):
                    continue  # the router lost it
                at = now + self.rng.random() ** 3 * ask.routed_s
                if (late := self.mishaps.at(ask.number, reader.name, "late")) is not None:
                    at = now + late.seconds
                self.addressed[ask.number, reader.name] = reader.process, at
                reader.process.call_at(at, self._read, reader, lent, ask.retries)

    def _write(self, rank: Rank, lent: Lent) -> None:
        if rank.name in lent.open:  # else it was recalled before
            # A process may be ahead of the world: what it does to memory is seen when the world is there.
            self.world.at(rank.process.now, partial(self._fill, rank, rank.words, lent))

    def _fill(self, rank: Rank, words: Words, lent: Lent) -> None:
        for block, content in zip(lent.blocks, lent.contents, strict=True):
            for i, layer in enumerate(rank.layers):
                for head in range(*rank.held):
                    for place, token in enumerate(rank.tokens):
                        words[block, i, head - rank.held[0], :, place] = _value(content, head, layer, token)

    def _abort(self, rank: Rank, lent: Lent) -> None:
        """The request is never lent: its blocks belong to another request from now on."""
        if lent.ask.fate == WITHDRAWN:
            with suppress(EngineClosed):
                self._tighten(rank)
                rank.engine.withdraw(lent.params)
                self._spent(rank, lent)
                self._lend_again(rank, lent)
        self.outcomes[f"asks.{lent.ask.fate}"] += 1
        self.world.at(rank.process.now, partial(self._given_back, rank, lent))

    def _tighten(self, rank: Rank) -> None:
        """Let a rank remember little of what has been."""
        memory, core = self.script.memory, rank.engine._driver.core
        if memory and core.prefill.max_ended != memory:
            core.prefill.max_ended, core.prefill.spent = memory, SpentKeys(memory)

    def _spent(self, rank: Rank, lent: Lent) -> None:
        key = lent.key
        if key.memory_epoch >= rank.engine.memory_epoch:
            self.wire.spent(rank.process, rank.engine.incarnation, key.token)
        if self.script.memory and rank.engine._driver.core.prefill.spent.num_gaps > self.script.memory:
            self.world.violate(f"{rank.name} remembers {rank.engine._driver.core.prefill.spent.num_gaps} gaps")

    def _lend_again(self, rank: Rank, lent: Lent) -> None:
        """A confused scheduler: what was lent or withdrawn may not be lent once more."""
        if self.rng.random() < 0.5:
            return
        try:
            rank.engine.lend(lent.params, num_readers=len(lent.ask.engines))
        except (AsyncKVError, EngineClosed):
            self.outcomes["lend.refused_again"] += 1
        else:
            self.world.violate(f"request {lent.ask.number} was lent again on {rank.name}")

    def _lend(self, rank: Rank, lent: Lent, **options: str) -> Exception | None:
        """Lend a request on a rank, or return why that is not possible."""
        process = rank.process
        clock = Stopwatch.start(process)
        try:
            self._tighten(rank)
            handle = rank.engine.lend(lent.params, num_readers=len(lent.ask.engines), **options)
        except (AsyncKVError, EngineClosed) as exc:
            self.world.note(rank.name, "does not lend", repr(exc))
            is_forgotten = "was open for too long" in str(exc) and rank.engine._driver.core.prefill.spent.num_given_up
            self.outcomes["lend.given_up"] += bool(is_forgotten)
            is_expected = isinstance(exc, EngineClosed) or "memory epoch" in str(exc) or is_forgotten
            if not is_expected and (process, lent) not in self.recalled:
                self.world.violate(f"{rank.name} does not lend request {lent.ask.number}: {exc}")
            self._given_back(rank, lent)
            return exc
        if (process, lent) in self.recalled:
            self.world.violate(f"{rank.name} lends request {lent.ask.number}, which was recalled")
        if rank.is_draining:
            self.world.violate(f"{rank.name} drains, and lends request {lent.ask.number}")
        told = f"request {lent.ask.number}, readers={len(lent.ask.engines)}"
        self.world.asides.append((self.world.now, rank.name, "lent", told))
        holder = Lease(lent.ask.number, handle, lent, process, clock, rank.engine)
        self.leases.append((rank, process, holder))
        self._spent(rank, lent)
        incarnation = rank.engine.incarnation
        if lent.ask.recall:
            self.wire.lent(process, incarnation, lent.key.token)

        async def wait() -> None:
            try:
                end = await handle.wait_released()
            except asyncio.CancelledError:
                return
            if holder.ended:
                self.world.violate(f"two ends of lease {lent.ask.number} on {rank.name}")
            holder.ended, holder.ended_at, holder.words = end.cause, process.now, end.readers
            if lent.ask.recall:
                self.wire.ended(process, incarnation, lent.key.token)
            if end.cause == "revoked" and rank.is_draining and holder.revoked is None:
                self.world.violate(f"request {lent.ask.number} was revoked by the drain of {rank.name}")
            self.outcomes[f"lease.{end.cause}"] += 1
            self.world.note(rank.name, "lease ended", (lent.ask.number, end.cause))
            self._lend_again(rank, lent)
            process.call_at(process.now + self.rng.random() * 4.0, self._lend_again, rank, lent)
            self._in_time(rank, holder)
            self.world.at(process.now, partial(self._ended, rank, lent, process, end.cause))
            self._lease_over(rank, holder, end)

        process.loop.create_task(wait())
        return None

    def _lease_over(self, rank: Rank, lease: Lease, end: LeaseEnd) -> None:
        """A rank has told the end of a lease."""

    def _in_time(self, rank: Rank, lease: Lease) -> None:
        """A lease lasts as long as it should."""
        ran_s = lease.clock.ran_s * lease.process.rate
        what = f"the lease of request {lease.ask} on {rank.name} {lease.ended} after {ran_s:.3f} s"
        if lease.ended == "expired" and lease.process.now - lease.clock.at < lease.lent.ask.lease_s * 0.999:
            of, address = lease.handle._lease, Address(f"sim://{rank.name}")
            alive = [
                r.name
                for r in self.ranks.values()
                for past in (of.past[reader] for reader in of.gone)
                if r.engine.incarnation == past.sender
                if not r.process.has_hung_up(address) and not self._was_forged(rank, of, past, r.process)
            ]
            is_waited_for = len(of.cohorts) < of.lent.readers or not of.gone.issuperset(of.owing())
            if alive or is_waited_for or not of.gone or of.grants:
                self.world.violate(f"{what}, before its time; {alive} live, and never hung up")
        if ran_s > LEASE.max_lease_s + TURN_S:
            self.world.violate(f"{what}, longer than any may last")
        most_s = TURN_S + (0.0 if lease.lent.ask.recall else LEASE.grant_s * 1.001)
        if lease.ended != "closed" and lease.revoked and lease.revoked.ran_s > most_s:
            self.world.violate(f"{what}, {lease.revoked.ran_s:.3f} s after it was revoked")
        if not any(a.lent is lease.lent for a in self.attempts) and ran_s > lease.lent.ask.lease_s + TURN_S:
            self.world.violate(f"{what}, though nobody asked for it")

    def _was_forged(self, rank: Rank, of: Any, past: Any, reader: Process) -> bool:
        """Without keys, others claim in a reader's place before it is heard itself, or greet as its later start."""
        if not {"garbage", "hostile"} & {f.kind for f in self.script.faults}:
            return False
        is_replaced = rank.engine._driver.core.prefill._readers.is_replaced(past.sender, of.keys.get(past.reader, ""))
        is_unheard = ReplyTo(reader.name.encode()) not in past.ways
        return is_replaced or (is_unheard and bool({b"hostile", b"stranger"} & set(past.ways)))

    def _ended(self, rank: Rank, lent: Lent, process: Process, cause: str) -> None:
        if cause == "closed" and process in self.hasty:
            return  # its memory stays what it is until it dies
        if not rank.process.is_dead:
            self._check_belief(rank, lent.key, lent.ask)
        self._given_back(rank, lent)

    def _given_back(self, rank: Rank, lent: Lent) -> None:
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

    def _settle(self, lent: Lent) -> None:
        for block in lent.blocks:
            lent.engine.uses[block] -= 1
            if not lent.engine.uses[block]:
                lent.engine.free.append(block)
        self.lent.pop(lent.ask.number, None)
        if lent.is_preempted:
            lent.is_preempted = False
            ask = replace(lent.ask, number=lent.ask.number + AGAIN, at=self.world.now, shares=-1, lend_s=0.0, fate=LENT)
            ask = replace(ask, legs=None)
            self.world.at(self.world.now, partial(self._ask, ask, 3, lent.blocks))

    # -- the decode engines -----------------------------------------------------------------------------

    def _read(self, rank: Rank, lent: Lent, retries: int) -> None:
        if rank.process.is_dead:
            return
        attempt = Attempt(self, rank, lent)
        self.attempts.append(attempt)
        task = rank.process.loop.create_task(attempt.run(retries))
        self.tasks.setdefault(lent.ask.number, []).append((attempt, task))

    @property
    def _is_mild(self) -> bool:
        """Nothing keeps a reader's releases from arriving in time, nor claims in its place.

        A rank with reads that failed for good is told once that they are over, which may be lost.
        Garbage (a flipped bit in a pull id) and a hostile peer may, before a request is lent: they have its token.
        """
        if self.script.mishaps:
            return False
        return not {"fail", "loss"} <= {f.kind for f in self._troubles} and all(
            f.kind in ("forget", *TAKEN) or (f.kind in MILD and (f.kind != "loss" or f.seconds <= SHORT_LOSS_S))
            for f in self._troubles
        )

    @property
    def _troubles(self) -> Sequence[Fault]:
        """Faults that may keep a release from arriving in time."""
        return self.script.faults

    def _was_done_with(self, rank: Rank, lease: Lease) -> bool:
        """All readers that owed a release had been discharged for a while when the lease ended."""
        ask = lease.lent.ask
        readers = self.script.readers_of(rank.rank)
        since = [self.discharged.get((ask.number, self.decode[e][r].name)) for e in ask.engines for r in readers]
        # A release that was lost, or came early and found no room, is repeated after 0.2, 0.6, 1.4 and 3 seconds.
        slack = 3.3 if any(f.kind in ("loss", "hostile") for f in self.script.faults) else 1.0
        # A release that comes before its request is lent is remembered for a while, not for ever.
        begin = lease.clock.at - LEASE.parked_s
        return all(at is not None and begin < at < lease.ended_at - slack for at in since)

    def _was_told(self, rank: Rank, lease: Lease) -> str:
        """Say what a lease's end tells otherwise than its readers do."""
        readers = self.script.readers_of(rank.rank)
        for reader in (self.decode[e][r] for e in lease.lent.ask.engines for r in readers):
            said = [a.said for a in self.attempts if a.lent is lease.lent and a.rank is reader]
            is_only_discharged = lease.lent.ask.discharged == NEVER_PULLED and any(said)
            was_announced = not is_only_discharged and any(
                a.lent is lease.lent and a.announced_at < math.inf for a in self.attempts
            )
            word = lease.words.get(reader.title, "")
            if reader.starts > 1 or reader.process.is_dead or reader.engine.memory_epoch or was_announced:
                # What it said died with it, or was said for it: it went to sleep, or nothing came of its announcement.
                continue
            if word and not any(word in words for words in said):
                return f"was told {word!r} by {reader.name}, which said {said}"
            may_be = any("complete" in words for words in said) or (lease.ask, reader.name) in self.discharged
            if lease.ended == "released" and not may_be:
                return f"was released, though {reader.name} had not let go"
        return ""

    # -- afterwards -------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Everything has had its time: one outcome each, nothing held, everything idle."""
        world = self.world
        for attempt in self.attempts:
            if attempt.is_open and not attempt.process.is_dead:
                world.violate(f"{attempt} never ended")
                return
            if attempt.waits is not None and not attempt.process.is_dead:
                world.violate(f"{attempt} waits for its blocks for ever")
                return
        for attempt, task in [x for tasks in self.tasks.values() for x in tasks]:
            is_over = task.done() and not task.cancelled() and not attempt.process.is_dead
            if is_over and (exc := task.exception()) is not None:
                world.violate(f"an attempt on {attempt.rank.name} ended with {exc!r}")
                return
        for rank, process, lease in self.leases:
            if not process.is_dead and not lease.ended:
                world.violate(f"the lease of request {lease.ask} on {rank.name} never ended")
                return
            is_well = self._is_mild or lease.lent.ask.prefill in self.spared
            if lease.ended == "expired" and is_well and self._was_done_with(rank, lease):
                world.violate(f"the lease of request {lease.ask} on {rank.name} expired with all its readers done")
                return
            if lie := self._was_told(rank, lease):
                world.violate(f"the lease of request {lease.ask} on {rank.name} {lie}")
                return
        for rank in self.ranks.values():
            if rank.process.is_dead or not rank.engine._home.is_settled or rank.data.is_closed:
                continue
            core = rank.engine._driver.core
            if wrong := rank.engine._driver.inspect.check_integrity() + wrong_in(core.decode):
                world.violate(f"{rank.name}: {'; '.join(wrong)}")
                return
            if core.outbox.counters["internal_errors"]:
                world.violate(f"{rank.name}: internal errors")
                return
            malformed = (
                core.outbox.counters["dropped.malformed"] - world.counts[f"hostile.malformed.{rank.process.name}"]
            )
            if malformed > 0 and not any(f.kind == "garbage" for f in self.script.faults):
                world.violate(f"{rank.name} was sent {malformed} malformed packets by its own kind")
                return
            if late := [h for h in rank.engine.holds() if h.reason not in ("retired", "quarantined")]:
                world.violate(f"{rank.name} still holds blocks of {late[0].request_id}: {late[0].reason}")
                return
            stuck = [t for t in rank.data.running.values() if not t.is_over]
            writing = [t for t in stuck if not t.ours]  # a look that hangs writes no block
            if not stuck and not core.is_idle:
                world.violate(f"{rank.name} is not idle: {rank.engine._driver.inspect.gauges()}")
                return
            holds = [h for h in core.ledger if h.kind == "lent"]
            if holds or (len(core.ledger) and not writing):
                world.violate(f"{rank.name} holds blocks for nobody: {[h.request_id for h in core.ledger]}")
                return
            lost = set(range(NUM_BLOCKS)) - set(rank.free) - rank.retired
            if not writing and (lost or len(rank.free) > len(set(rank.free))) and rank.role == "decode":
                world.violate(f"{rank.name} has lost blocks: {sorted(lost)} (free are {sorted(rank.free)})")
                return
            if core.prefill.parking.num_parked or (self.script.is_long and core.decode.peers.by_place and not stuck):
                peers = [f"{p.name} {p.state.value}" for p in core.decode.peers.by_place.values()]
                world.violate(
                    f"{rank.name} remembers too long: {core.prefill.parking.num_parked} parked, peers {peers}"
                )
                return
            for peer in core.decode.peers.by_place.values():
                if not stuck and (peer.line.in_flight or peer.line.posters):
                    in_flight = peer.line.in_flight.num_bytes
                    world.violate(f"{rank.name} counts {in_flight} bytes in flight from {peer.name}")
                    return


@dataclass(slots=True)
class Lease:
    ask: int
    handle: Any
    lent: Lent
    process: Process
    clock: Stopwatch
    engine: Engine
    revoked: Stopwatch | None = None
    ended: str = ""
    ended_at: float = 0.0
    words: Mapping[str, str] = field(default_factory=dict)
    """The words of its readers."""

    def revoke(self) -> None:
        """Take it back: by its handle, or as a scheduler does that does not know whether it was lent."""
        if self.ask % 2:
            self.engine.withdraw(self.lent.params)
        else:
            self.handle.withdraw()
        self.revoked = self.revoked or Stopwatch.start(self.process)


class Attempt:
    """One decode rank's attempt at one request."""

    def __init__(self, service: Service, rank: Rank, lent: Lent) -> None:
        self.service, self.rank, self.lent, self.process = service, rank, lent, rank.process
        self.params = service.mishaps.params(lent.ask.number, rank.name, lent.params)
        self.is_open, self.is_odd = True, False
        """It runs; and others than its engine decide what becomes of it."""
        self.handed_at = self.process.now
        self.called = ""
        """Its state by the engine's calls: nothing, `announced`, `pulled`, `discharged`."""
        self.is_turned_away = False
        """The engine took nothing any more."""
        self.announced_at = math.inf
        self.memory_epoch = rank.engine.memory_epoch
        self.reason = ""
        self.is_pulling = False
        self.cancelled: Stopwatch | None = None
        """Since when the pull under way is not wanted any more."""
        self.waits: Stopwatch | None = None
        """Since when the blocks of a pull that has its outcome are waited for."""
        self.said: set[str] = set()
        """Words that prefill ranks may have been told of this reader, as in `LeaseEnd.readers`."""

    def __str__(self) -> str:
        return f"request {self.lent.ask.number} on {self.process.name}"

    async def run(self, retries: int) -> None:
        """Pull, check, give back; again if it fails and retries are left."""
        service, rank, ask = self.service, self.rank, self.lent.ask
        engine, world = rank.engine, service.world
        request_id, mishaps = f"D{ask.number}", service.mishaps
        if mishaps.at(ask.number, rank.name, "aborted"):
            self.is_open = False
            return
        is_forgotten = mishaps.at(ask.number, rank.name, "announced") is not None
        try:
            if ask.announce_s or is_forgotten:
                self.called = "announced"
                engine.announce(request_id, self.params)
                self.announced_at, self.memory_epoch = self.process.now, engine.memory_epoch
                await asyncio.sleep(ask.announce_s)
            if is_forgotten:
                return
            if ask.discharged == NEVER_PULLED:
                self._discharge(request_id)
                return
            own = 0 if ask.is_engine_retry else retries
            if mishaps.at(ask.number, rank.name, "retry_never"):
                await self._pull(request_id, False)
                return
            for attempt in range(own + 1):
                if not await self._pull(request_id, attempt == own):
                    break
                if attempt < own and ask.discharged == AFTER_FAILURE:
                    self._discharge(request_id)
                    return
                if attempt < own:
                    await asyncio.sleep(service.rng.random() ** 2 * 0.5)
        except asyncio.CancelledError:
            service.outcomes["pull.task_cancelled"] += 1
        except (EngineClosed, LocalProtocolError) as exc:
            self.is_turned_away = True
            world.note(rank.name, "cannot pull", exc)
            service.outcomes[f"pull.{type(exc).__name__}"] += 1
        except PullError as exc:
            # Refused before it began.
            service.outcomes[f"pull.{exc.reason}"] += 1
        finally:
            self.is_open = False

    def _discharge(self, request_id: str) -> None:
        """Say that nothing of the request is needed; some say it twice."""
        service, rank, self.called = self.service, self.rank, "discharged"
        times = service.rng.choice([1, 1, 2])
        for _ in range(times):
            rank.engine.cancel(request_id, self.params)
        service.outcomes["pull.discharged"] += 1
        self.said.add("complete")
        if (
            self.process.now > self.announced_at + PULL.announce_s * 0.99
            or self.memory_epoch != rank.engine.memory_epoch
        ):
            # Announced too long ago, or before a sleep: the engine has given it up before.
            self.said |= {"cancelled", "failed"}
        service.discharged.setdefault((self.lent.ask.number, rank.name), self.process.now)

    async def _pull(self, request_id: str, is_last: bool, given: Sequence[int] | None = None) -> bool:
        """One pull, into the given blocks if there are any; True if another may do better."""
        service, rank, ask = self.service, self.rank, self.lent.ask
        world, engine = service.world, rank.engine
        first = ask.cached
        count = -(-ask.tokens // BLOCK) - first // BLOCK if first < ask.tokens else 0
        while given is None and len(rank.free) < count:
            # All blocks may be held by transfers that never end: that is no pull's fault.
            self.is_open = False
            await asyncio.sleep(0.2)
        self.is_open = True
        self.called = "pulled"
        if given is None:
            given = [rank.free.pop(service.rng.randrange(len(rank.free))) for _ in range(count)]
        blocks = list(given)
        token = filling = Filling(rank, self.lent, first, blocks)
        if service.script.looks is not None:
            rank.fillings[request_id] = filling
        for block in blocks:
            rank.owner[block] = token
            rank.words[block] = UNUSED
        called, frozen = self.process.now, self.process.frozen_s
        if called > self.announced_at + PULL.announce_s * 0.99 or self.memory_epoch != engine.memory_epoch:
            # Announced and not pulled in time, or before a sleep: the engine has given it up.
            service.discharged.setdefault((ask.number, rank.name), called)
        again = False
        cancelled = None
        self.is_pulling, self.cancelled = True, None
        try:
            pull_id = await self._ask(request_id, blocks, is_last)
        except PullError as exc:
            service.outcomes[f"pull.{exc.reason}"] += 1
            self.reason = f"{exc.reason}: {exc}"
            world.note(rank.name, "pull failed", (ask.number, exc.reason, str(exc)[:160]))
            again = exc.reason not in ("cancelled", "unplannable")
            if exc.reason == "not_lent_yet" and exc.pull_id not in service.wire.told_to_wait:
                self._violate("ended as not lent yet, which nobody had told it")
            released = {*service.discharged, *service.closed_with}
            if exc.reason == "consumed" and (ask.number, rank.name) not in released and not self.is_odd:
                self._violate("was refused as consumed, though this reader released nothing")
            if exc.reason == "differs":
                is_last, again = True, False  # no attempt follows, whatever its caller has said
                world.at(self.process.now, partial(self._differs, filling, exc.pull_id))
            self._in_time(called, frozen)
            self.said.add("cancelled" if exc.reason == "cancelled" else "failed")
            self._is_spared(called, exc.reason)
            if is_last:
                service.discharged.setdefault((ask.number, rank.name), self.process.now)
            if exc.held and not await self._wait(exc.returned()):
                rank.retired |= set(blocks)
                return False
        except asyncio.CancelledError as exc:
            service.outcomes["pull.cancelled_task"] += 1
            self._in_time(called, frozen)
            # It may have been complete already.
            self.said |= {"cancelled", "complete", "failed"}
            if is_last:
                service.discharged.setdefault((ask.number, rank.name), self.process.now)
            cancelled = exc
            if not await self._wait(engine.returned(request_id)):
                rank.retired |= set(blocks)
                raise
        except AsyncKVError:
            self._give_back(blocks)
            raise
        else:
            service.outcomes["pull.complete"] += 1
            self.reason = "complete"
            world.note(rank.name, "pull complete", ask.number)
            self._in_time(called, frozen)
            if self._reads and ask.fate != LENT:
                self._violate("published bytes of a request that was never lent")
            if ask.recall and (owners := service.wire.unconfirmed(self.process, self.lent.key.token, pull_id)):
                self._violate(f"published bytes that {len(owners)} ranks have not confirmed")
            self.said = {"complete"}
            self._is_spared(called, "")
            world.at(self.process.now, partial(self._verify, blocks, first, filling))
            if service.script.looks is not None:
                world.at(self.process.now, partial(self._looked, filling, pull_id))
            is_last = True
        if is_last:
            service.discharged.setdefault((ask.number, rank.name), self.process.now)
        # The process may be ahead of the world; memory is looked at and given back when the world is there.
        world.at(self.process.now, partial(self._give_back, blocks))
        if cancelled is not None:
            raise cancelled
        return again

    async def _ask(self, request_id: str, blocks: list[int], is_last: bool) -> str:
        """Call asynckv as a decode engine does, and return the id of the attempt that succeeded."""
        groups = [(self.lent.ask.cached, blocks)]
        ask = self.lent.ask
        retries = ask.retries if ask.is_engine_retry else 0
        result = await self.rank.engine.pull(
            request_id, groups, self.params, is_last=is_last, priority=ask.priority, retries=retries
        )
        self.service.outcomes["pull.retried"] += result.attempts > 1
        return str(result.pull_id)

    async def _wait(self, returned: Any) -> bool:
        """Wait for blocks, however often the task is cancelled; False if they are lost."""
        waiting = self.process.loop.create_task(returned)
        self.waits = Stopwatch.start(self.process)
        self.is_open = False
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                continue
            except BlocksRetired:
                self._waited()
                self.service.outcomes["blocks.retired"] += 1
                filled, running = self.rank.filled, self.rank.data.running.values()
                hanging = [filled[int(t.transfer_id)][0] for t in running if filled and t.spots and not t.is_over]
                if filled and not any(filling.lent is self.lent for filling in hanging):
                    self._violate("lost its blocks, though no read of it hangs")
                self.service.world.note(self.rank.name, "blocks retired", self.lent.ask.number)
                return False
        self._waited()
        self.is_open = True
        return True

    def _waited(self) -> None:
        if self.waits is not None and self.waits.ran_s > PULL.held_s * 1.001 + TURN_S:
            self._violate(f"waited for its blocks for {self.waits.ran_s:.3f} s")
        self.waits = None

    def give_up(self) -> None:
        """The pull under way is not wanted any more."""
        if self.is_pulling:
            self.cancelled = self.cancelled or Stopwatch.start(self.process)

    def _in_time(self, called: float, frozen: float) -> None:
        # Deadlines are bounds for a process that runs: what it was stopped for comes on top.
        stopped = self.process.frozen_s - frozen
        took = self.process.now - called - stopped
        if took > (PULL.timeout_s + 0.1) * 1.001:
            self._violate(f"ended after {took:.3f} s")
        if self.cancelled is not None and self.cancelled.ran_s > PULL.drain_s * 1.001 + TURN_S:
            self._violate(f"ended {self.cancelled.ran_s:.3f} s after it was cancelled")
        self.is_pulling, self.cancelled = False, None

    @property
    def _reads(self) -> bool:
        """Whether the rank reads any token: of ranks that share them, one may hold none of these."""
        ask = self.lent.ask
        return any(token % BLOCK in self.rank.tokens for token in range(ask.cached, ask.tokens))

    def _is_spared(self, called: float, reason: str) -> None:
        """A pull that no fault touches is not affected: it completes, as fast as it would without any."""
        script, lent = self.service.script, self.lent
        is_spared = lent.ask.prefill in self.service.spared
        if not (is_spared or script.is_only_hostile) or self._is_late(called):
            return  # trouble is allowed, or it came late: the router took long, or there were no blocks to fill
        took = self.process.now - max(called, lent.lent_by)
        num_packets = UNTROUBLED_PACKETS + 2 * lent.ask.recall  # a read that may be recalled is confirmed
        num_reads = UNTROUBLED_READS * (1 if script.looks is None else 2)
        bound = UNTROUBLED_S + num_packets * 2.5e-4 * script.wire + num_reads * 2e-3 * script.data
        if script.budget:
            bound *= len(script.asks)  # it may be the last of the queue
        if script.is_packed:
            bound *= 4  # copies wait for each other's slots; who waited for an answer in vain still takes longer
        bound += 0.0 if is_spared else HOSTILE_S
        if reason == "unknown_key" and script.memory:
            return  # it was open for too long for what its ranks remember
        is_too_late = max(called, lent.lent_by) + bound > called + PULL.timeout_s
        if lent.ask.fate != LENT and lent.ask.cached < lent.ask.tokens and (reason or self._reads):
            if lent.ask.fate == WITHDRAWN and not is_too_late and (reason != "withdrawn" or took > bound):
                self._violate(f"of a withdrawn request ended as {reason!r}, {took:.3f} s after it could know")
            elif reason not in ("not_lent_yet", *([WITHDRAWN] if lent.ask.fate == WITHDRAWN else [])):
                self._violate(f"of a request that was never lent ended as {reason!r}")
            return
        if reason in ("timeout", "not_lent_yet") and is_too_late:
            return
        if reason == "timeout" and script.data >= 100:
            return  # several of them at one peer, with transfers that slow, may not fit into any deadline
        if reason:
            self._violate(f"was spared and failed: {self.reason}")
        elif took > bound:
            self._violate(f"was spared and took {took:.3f} s, more than {bound:.3f} s")

    def _is_late(self, called: float) -> bool:
        return called > self.lent.lent_from + self.lent.ask.lease_s - 1.0

    def _violate(self, what: str) -> None:
        # A task's exception would wait until it is asked for.
        self.service.world.violate(f"{self} {what}")

    def _differs(self, filling: Filling, pull_id: str) -> None:
        self.service.outcomes["looks.differ"] += 1
        if self.service.script.looks is None or not CHANGED & {fault.kind for fault in self.service.script.faults}:
            self._violate("was told that bytes differ, and nothing changes any")
        elif wrong := filling.wrong_in_difference(pull_id):
            self._violate(wrong)

    def _looked(self, filling: Filling, pull_id: str) -> None:
        assert self.service.script.looks is not None
        if wrong := filling.wrong_in_complete(pull_id, self.service.script.looks):
            self._violate(wrong)

    def _verify(self, blocks: Sequence[int], first: int, filling: Filling) -> None:
        rank, lent = self.rank, self.lent
        for i, block in enumerate(blocks):
            place = first // BLOCK + i
            lo = max(first - place * BLOCK, 0)
            hi = min(lent.ask.tokens - place * BLOCK, BLOCK)
            for head in range(*rank.held):
                words = rank.words[block, 0, head - rank.held[0]]
                for at, token in enumerate(rank.tokens):
                    if (
                        lo <= token < hi
                        and not (words[:, at] == _value(lent.contents[place], head, *rank.layers, token)).all()
                        and not self._is_changed(
                            filling, i, head, at, _value(lent.contents[place], head, *rank.layers, token)
                        )
                    ):
                        found = sorted({hex(x) for x in words[:, at].ravel().tolist()})
                        self._violate(f"published wrong bytes: block {block} head {head} token {token} holds {found}")
                    if token < lo and not (words[:, at] == UNUSED).all():
                        self._violate("wrote below its first token")

    def _is_changed(self, filling: Filling, place: int, head: int, at: int, value: int) -> bool:
        """Whether each wrong byte of a token may be so, because it was changed before it was read, or on its way."""
        head -= self.rank.held[0]
        found = self.rank.bytes[filling.blocks[place], 0, head, :, at]
        right = np.full(HEAD_DIM, value, np.uint16).view(np.uint8)
        return all(filling.may_be((place, 0, head, kv, at, byte)) for kv, byte in np.argwhere(found != right).tolist())

    def _give_back(self, blocks: Sequence[int]) -> None:
        if self.process.is_dead:
            return  # its memory is gone; only its remains are being swept up
        for block in blocks:
            del self.rank.owner[block]
            self.rank.words[block] = FREED
            self.rank.free.append(block)
