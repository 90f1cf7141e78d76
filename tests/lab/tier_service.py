"""A simulated engine that offloads: real engines and offloads on simulated tiers, a reader beside them, and all checks.

The ranks of one engine store, lose and load blocks by one allocator, which overwrites what it gets back at once. They
are killed, put to sleep, and begun anew with other block sizes, orders and parallel sizes on the disks that the last
ones have left. Another engine pulls what is lent from their host tier.

Nothing may touch a block whose call has ended; what a load or a pull says to be in place is what the prompt says, byte
by byte; a record that is found in a tier is what its key says; every call ends, and afterwards nothing is held.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.config import EngineConfig, LeaseConfig, OffloadConfig, PullConfig
from asynckv.core.types import TransferId
from asynckv.engine import Engine
from asynckv.errors import AsyncKVError, BlocksRetired, EngineClosed, LayoutError, LocalProtocolError, PullError
from asynckv.geometry.check import Registration, decode_layout
from asynckv.geometry.kept import kept_tables
from asynckv.geometry.layout import Layout
from asynckv.geometry.packed import placed, record_form, record_sizes
from asynckv.offload.entry import EntryState
from asynckv.offload.keys import NAMESPACE_BYTES
from asynckv.ports import CopyOp
from asynckv.results import Loaded
from asynckv.testing.fabric import bytes_at
from asynckv.tiers.offload import Offload
from asynckv.tiers.shelf import Shelf
from tests.lab.caches import FREED, Blocks, Cache, Model, Pools, Shape, allocated, layout_of
from tests.lab.doors import Doors
from tests.lab.offload_audit import check as check_offload
from tests.lab.oracles import TURN_S, Stopwatch
from tests.lab.script import Fault
from tests.lab.service import Listener, Stage, StagedRank
from tests.lab.tier_planes import MoveFate, WorldCopies, WorldDisk, WorldRecords
from tests.lab.tier_script import LONG, TierAsk, TierScript, prompt_hashes
from tests.lab.world import Process, WorldClock, WorldControl, WorldData

HELD_S = 5.0
TIMEOUT_S = 4.0
SLACK_S = 3.0
"""Seconds that a copy that was begun may take, with the calls that wait for it."""

QUIET_S = 30.0
"""Seconds that everything may take to settle after the faults."""

AUDIT_S = 0.2
PROBE, TRIES = 1_000_000, 12
LEASE = LeaseConfig(lease_s=4.0, grant_s=2.0, max_lease_s=15.0, parked_s=5.0, max_parked=100)
PULL = PullConfig(timeout_s=6.0, announce_s=6.0, handshake_s=2.0, drain_s=1.0, held_s=10.0, release_timeout_s=5.0)

Key = tuple[int, int]
"""Of a block: its pool and its id."""


@lru_cache(maxsize=64)
def _tags(model: Model, shape: Shape, tp_rank: int) -> list[npt.NDArray[np.int32]]:
    """Per memory and byte: the pool and the block that it belongs to, or -1."""
    layout = layout_of(model, shape, tp_rank)
    found = [np.full(memory.length, -1, np.int32) for memory in layout.memories]
    cache = Cache(model, layout, ())
    for group in range(len(layout.groups)):
        for block in range(shape.num_blocks):
            for memory, index in cache.places(group, block):
                found[memory][index] = shape.pool(group) * shape.num_blocks + block
    return found


class _Call:
    """A call of an engine, with its blocks."""

    def __init__(self, ask: TierAsk, kind: str, blocks: Blocks, hashes: list[str]) -> None:
        self.ask, self.kind, self.blocks, self.hashes = ask, kind, blocks, hashes
        self.request_id = f"{kind}-{ask.number}"
        self.ranks: set[_Rank] = set()
        """Those that have not given its blocks back."""
        self.tasks: dict[_Rank, asyncio.Task[None]] = {}
        self.begun: set[_Rank] = set()
        self.found: dict[_Rank, int] = {}
        self.loaded: dict[Process, int] = {}
        """Tokens that are in place, in the memory of a process."""
        self.is_lost = False
        """A rank's copy may write its blocks for ever."""
        self.is_whole = True
        """Every rank has said that all of it is in place."""

    def __str__(self) -> str:
        return f"{self.kind} of request {self.ask.number}"


class _Rank(StagedRank):
    """One rank of the engine, or the reader."""

    def __init__(self, service: TierService, name: str, tp_rank: int) -> None:
        super().__init__(service.world, name)
        self.service, self.tp_rank = service, tp_rank
        self.is_ready = False
        self.offload: Offload | None = None
        self.records: WorldRecords | None = None

    def start(self, shape: Shape) -> None:
        """Start a process with memory of its own."""
        service, process = self.service, self.begin()
        self.shape = shape
        self.bytes, self.cache = allocated(service.script.model, shape, self.tp_rank)
        layout = self.cache.layout
        self.tags = _tags(service.script.model, shape, self.tp_rank)
        self.owner: dict[Key, _Call] = {}
        self.calls: dict[str, _Call] = {}
        self.shelved: dict[str, Cache] = {}
        """Host memory of each shelf."""
        self.is_ready = False
        data = WorldData(process, f"agent-{process.name}", self.cache.arrays, layout.memories)
        config = EngineConfig(engine_id=self.name, lease=LEASE, pull=PULL)
        self.engine = self.connect(service, config, layout, data)
        if self.name != "d":
            self._offload()
        process.spawn(self._begin)
        self.world.note(self.name, "started", f"{process.name}: {shape}")

    def _offload(self) -> None:
        script, service = self.service.script, self.service
        form = record_form(self.cache.layout)
        strides = [record.stride for record in record_sizes(form)]
        room, least = sum(strides), 8 * max(strides) * len(set(strides))
        disk = service.disk_of(form, max(round(script.file * room), least)) if script.file else None
        self.copies = WorldCopies(self.process, partial(service.fate, self.name, ""))
        self.copies.on_land = self._landing
        self.records = WorldRecords(self.process, disk, partial(service.fate, self.name, "disk_")) if disk else None
        config = OffloadConfig(
            model="toy",
            hash_tokens=script.model.hash_tokens,
            host_bytes=max(round(script.host * room), least),
            directory="simulated" if disk else "",
            file_bytes=disk.num_bytes if disk else 0,
            policy=script.policy,  # type: ignore[arg-type]
            max_bytes=round(script.max_records * max(strides)),
            max_post_bytes=script.post_bytes,
            timeout_s=TIMEOUT_S,
            held_s=HELD_S,
            network=EngineConfig(engine_id=f"{self.name}-host", lease=LEASE, pull=PULL),
        )
        self.offload = Offload(
            config, self.engine, copies=self.copies, records=self.records, serve=self._serve, leftovers=self._leftovers
        )

    def _serve(self, config: EngineConfig, registration: Registration) -> Engine:
        """The host tier's own engine, in the same process."""
        process, name, memories = self.process, f"{self.process.name}-host", registration.layout.memories
        process.world.processes[name] = process
        control = WorldControl(process, f"sim://{self.name}-host")
        control.name, control.route = name, type(control.route)(name.encode())
        arrays = [bytes_at(memory) for memory in memories]
        return Engine(
            config,
            registration,
            data=WorldData(process, f"agent-{name}", arrays, memories),
            control=control,
            clock=WorldClock(process),
            token_hex=process.world.token(name),
        )

    def _leftovers(self, config: OffloadConfig, own: Shelf, name: str) -> list[Shelf]:
        """Return what the engine that ran last has left, as `asynckv.edges.files.leftovers` finds it in directories."""
        engines: dict[object, list[tuple[float, Layout, WorldDisk]]] = {}
        for form, disk in self.service.disks:
            if disk.layouts and form != own.form and _engine(form) != _engine(own.form):
                engines.setdefault(_engine(form), []).append((disk.opened_at, form, disk))
        if not engines:
            return []
        newest = max(engines.values(), key=lambda ranks: max(at for at, _, _ in ranks))
        ranks = {form.tp_rank: (form, disk) for _, form, disk in sorted(newest, key=lambda each: each[0])}
        forms = [form for form, _ in ranks.values()]
        try:
            tables = kept_tables(own.form, forms, iter(range(1, 1 << 20)))
        except LayoutError:
            return []
        shelves: list[Shelf] = []
        for (form, disk), some in zip(ranks.values(), tables, strict=True):
            if some is None:
                continue
            records = WorldRecords(self.process, disk, partial(self.service.fate, self.name, "disk_"), is_shared=True)
            room = 10 * max(record.stride for record in record_sizes(form))
            far = f"left{len(shelves)}"
            shelves.append(
                Shelf(far, form, config, host_bytes=room, file_bytes=disk.num_bytes, records=records, is_own=False)
            )
        return shelves

    async def _begin(self) -> None:
        await self.engine.start()
        try:
            if self.offload is not None:
                await self.offload.start()
        except EngineClosed:
            assert self.service.is_changing  # it was closed meanwhile
            return
        self.service.world.at(self.process.now, partial(self._ready, self.process))

    def _ready(self, process: Process) -> None:
        if process is self.process and not process.is_dead:
            self.is_ready = True
            self.service.world.note(self.name, "is ready")

    def keys(self, blocks: Blocks) -> Iterator[Key]:
        """Name blocks by their pools."""
        for group, ids in enumerate(blocks):
            for block in ids:
                if block is not None:
                    yield self.shape.pool(group), block

    def _landing(self, move_id: TransferId, op: CopyOp, memory: int, start: int, length: int) -> None:
        """Nothing is copied from or to a block but for the call that has it, as the ledger says."""
        world, offload = self.service.world, self.offload
        assert offload is not None
        where = f"a copy ({op.value}) of {self.process.name}"
        if self.is_asleep:
            world.violate(f"{where} touches memory that sleeps")
        posted = offload._mover.posted.get(move_id)
        job = offload._mover.jobs.get(posted.move.job_id) if posted is not None else None
        if job is None:
            world.violate(f"{where} goes on after its blocks were given back")
            return
        call, holding = self.calls.get(job.request_id), self.engine._driver.core.ledger.get(job.job_id)
        for tag in np.unique(self.tags[memory][start : start + length]).tolist():
            if tag < 0:
                continue
            pool, block = divmod(tag, self.shape.num_blocks)
            if call is None or self.owner.get((pool, block)) is not call:
                world.violate(f"{where} for {job.request_id} touches block {block}, which is not its own any more")
                return
            kind = "writing" if op is CopyOp.READ else "lent"
            mine = holding is not None and any(
                self.shape.pool(group) == pool and block in ids for group, ids in holding.blocks.items()
            )
            if holding is None or holding.kind != kind or not mine:
                world.violate(f"{where} for {job.request_id} touches block {block}, which the ledger does not know")
                return

    # -- calls --------------------------------------------------------------------------------------

    def spawn(self, call: _Call, work: Callable[[_Call], Any]) -> None:
        """Let this rank do its part of a call."""
        process = self.process
        self.calls[call.request_id] = call
        call.ranks.add(self)
        self.owner.update(dict.fromkeys(self.keys(call.blocks), call))

        def begin() -> None:
            call.tasks[self] = process.loop.create_task(self._do(call, work))

        process.call_at(process.now, begin)

    async def _do(self, call: _Call, work: Callable[[_Call], Any]) -> None:
        """Do it, and wait for its blocks whatever became of it."""
        service, process = self.service, self.process
        what = f"{call} on {process.name}"
        is_held, outcome = False, "done"
        call.begun.add(self)
        begun = Stopwatch.start(process)
        try:
            await work(call)
        except PullError as exc:
            outcome, is_held = exc.reason, bool(exc.held)
        except EngineClosed:
            outcome, is_held = "closed", True
        except LocalProtocolError as exc:
            outcome = "refused"
            if call.kind not in ("lend",):
                service.world.violate(f"{what} was refused: {exc}")
        except asyncio.CancelledError:
            outcome, is_held = "task_cancelled", True
        except Exception as exc:  # no promise says that anything else may be raised
            if process.is_dead:
                raise  # what is left of it is being swept up
            service.world.violate(f"{what} raised {exc!r}")
        call.begun.discard(self)  # calls that wait for blocks are not disturbed
        if outcome != "done":
            call.is_whole = False
            is_short = outcome == "timeout" and call.ask.timeout_s < 1.0  # for copies that are drawn to be slow
            if not service.script.faults and call.kind != "lend" and not is_short:
                service.world.violate(f"{what} ended as {outcome} without any fault")
        service.outcomes[f"{call.kind}.{outcome}"] += 1
        service.world.note(self.name, f"{call} ended", outcome)
        within_s = {"load": call.ask.timeout_s, "store": 2 * TIMEOUT_S}.get(call.kind, math.inf)
        if begun.ran_s > (within_s + SLACK_S) * 1.001 + TURN_S:
            service.world.violate(f"{what} ended after {begun.ran_s:.3f} s, its deadline was {within_s} s")
        is_lost = False
        if is_held:
            since = Stopwatch.start(process)
            is_lost = not await self._returned(call)
            held_s = PULL.held_s if call.kind == "pull" else HELD_S
            if since.ran_s > (held_s + SLACK_S) * 1.001 + TURN_S:
                service.world.violate(f"{what} waited {since.ran_s:.3f} s for its blocks")
        elif any(holding.request_id == call.request_id for holding in self.engine._driver.core.ledger):
            service.world.violate(f"{what} has ended as {outcome}, and the ledger says that it holds blocks")
        service.world.at(process.now, partial(self.give_back, call, process, is_lost))

    async def _returned(self, call: _Call) -> bool:
        """Wait for its blocks; False if they are lost."""
        if self.offload is None:
            wait = self.engine.returned(call.request_id)
        else:
            wait = self.offload.returned(call.request_id)
        try:
            await wait
        except BlocksRetired:
            self.service.outcomes["blocks.retired"] += 1
            return False
        return True

    def give_back(self, call: _Call, process: Process, is_lost: bool = False) -> None:
        """The blocks of a call are the allocator's again, which overwrites them."""
        if self not in call.ranks or process is not self.process:
            return
        call.ranks.discard(self)
        call.is_lost |= is_lost
        if not is_lost:
            del self.calls[call.request_id]
        if not is_lost and not process.is_dead:
            for key in self.keys(call.blocks):
                del self.owner[key]
            if call.kind != "load" or not self.service.goes_on(call):
                for group, ids in enumerate(call.blocks):
                    for block in ids:
                        if block is not None:
                            self.cache.scribble(group, block)
        if not call.ranks:
            self.service.settle(call)

    async def store(self, call: _Call) -> None:
        """Store what a call has."""
        assert self.offload is not None
        groups = [(0, ids) for ids in call.blocks]
        await self.offload.store(call.request_id, groups, call.hashes)

    async def look(self, call: _Call) -> None:
        """See what there is, and load it."""
        assert self.offload is not None
        found = self.offload.lookup(call.hashes)
        call.found[self] = found.tokens
        if self.service.shape.tp_size > 1:
            # The least of what all ranks have.
            await asyncio.sleep(0.002)
            tokens = min(call.found.values()) if len(call.found) == self.service.shape.tp_size else 0
        else:
            tokens = found.tokens
        if not tokens:
            self.service.outcomes["load.nothing"] += 1
            call.is_whole = False
            return
        groups = self.service.from_cached(call)
        begun = Stopwatch.start(self.process)
        result = await self.offload.load(
            call.request_id, groups, call.hashes, num_tokens=tokens, timeout_s=call.ask.timeout_s
        )
        service = self.service
        first = min(start for start, _ in groups)
        call.loaded[self.process] = result.num_tokens
        if result.num_tokens < tokens:
            call.is_whole = False
            if self.cache.model.is_hybrid:
                del call.loaded[self.process]  # nothing of it is said to be in place
            if call.ask.number >= PROBE and (found.tokens == tokens or not self.cache.model.is_hybrid):
                service.outcomes["probes.less"] += 1
            if not service.script.faults and self.service.shape.tp_size == 1 and found.ready_tokens >= tokens:
                if begun.ran_s < call.ask.timeout_s * 0.99:
                    service.world.violate(f"{call} found {tokens} tokens ready, and has {result.num_tokens}")
        if not min(first, tokens) <= result.num_tokens <= tokens:
            service.world.violate(f"{call} has {result.num_tokens} tokens of {tokens} from {first} on")
        service.outcomes["load.tokens"] += max(result.num_tokens - first, 0)
        service.outcomes["load.from_files"] += result.file_bytes > 0
        if self.offload._tiers.others and result.file_bytes and not found.ready_tokens:
            service.outcomes["load.from_others"] += result.num_tokens > first
            service.outcomes["load.staged"] += self.copies.num_staged > 0
        service.world.at(self.process.now, partial(self._verify, call, self.process, result, tokens))

    def _verify(self, call: _Call, process: Process, result: Loaded, tokens: int) -> None:
        if process is not self.process or process.is_dead:
            return
        if result.num_tokens < tokens and self.cache.model.is_hybrid:
            return  # nothing of it is said to be in place
        firsts = [first for first, _ in self.service.from_cached(call)]
        self.judge(call, firsts, result.num_tokens, str(call))

    def judge(self, call: _Call, firsts: Sequence[int], tokens: int, name: str) -> None:
        """Compare the blocks that are said to be in place with the prompt."""
        for group, at, is_right in self.cache.compared(self.shape, call.blocks, call.hashes, firsts, tokens):
            self.service.outcomes["blocks.judged"] += 1
            if not is_right:
                self.service.world.violate(
                    f"{name} on {self.process.name}: block {at} of group {group} "
                    f"({self.cache.model.groups[group].name}) is wrong, and {tokens} tokens are said to be in place"
                )
                return

    async def lend(self, call: _Call) -> None:
        """Lend what there is, and have it pulled."""
        assert self.offload is not None
        tokens = self.offload.lookup(call.hashes).tokens
        if tokens:
            lease_s = max(call.ask.timeout_s, LEASE.grant_s)
            params = await self.offload.lend(call.request_id, call.hashes, num_tokens=tokens, lease_s=lease_s)
            self.service.world.at(self.process.now, partial(self.service.pull, call, params, tokens))

    async def pull(self, call: _Call, params: Mapping[str, Any], tokens: int) -> None:
        """Read the KV of a lender."""
        result = await self.engine.pull(call.request_id, [(0, ids) for ids in call.blocks], params, hashes=call.hashes)
        done = partial(self._pulled, call, self.process, result.num_tokens)
        self.service.world.at(self.process.now, done)

    def _pulled(self, call: _Call, process: Process, tokens: int) -> None:
        if process is self.process and not process.is_dead:
            self.judge(call, [0] * len(call.blocks), tokens, str(call))

    async def pin(self, call: _Call) -> None:
        """Check that a pinned prefix stays in the host tier."""
        offload = self.offload
        assert offload is not None
        ready = offload.lookup(call.hashes).ready_tokens
        with offload.pin(call.hashes, ready):
            await asyncio.sleep(call.ask.timeout_s)
            with suppress(EngineClosed):
                after = offload.lookup(call.hashes, ready).ready_tokens
                if after < ready and not offload._mover.cause:  # what is closed or suspended finds nothing
                    self.service.world.violate(f"{call}: {ready} tokens were pinned, and {after} are there")

    async def evict(self, call: _Call) -> None:
        """Give up what is kept of a prompt, now and then of all."""
        assert self.offload is not None
        is_all, chains = call.ask.number % 4 == 0, [call.hashes]
        if is_all:
            chains += [prompt_hashes(prompt, LONG) for prompt in self.service.prompts]
        said = self.offload.evict(None if is_all else call.hashes)
        left = max(self.offload.lookup(chain).tokens for chain in chains)
        if left and not said.num_pinned:
            self.service.world.violate(f"{call} on {self.process.name}: {left} tokens are found of what was evicted")

    async def touch(self, call: _Call) -> None:
        """Want it."""
        assert self.offload is not None
        self.offload.touch(call.hashes)

    # -- what is kept ---------------------------------------------------------------------------------

    def audit(self) -> None:
        """Whatever is found in the host tier is what its key says, and all adds up."""
        offload = self.offload
        if offload is None or not self.is_ready or self.process.is_dead:
            return
        for shelf in offload._mover.shelves:
            if shelf.memory is None or shelf.memory.array is None:
                continue
            if (cache := self.shelved.get(shelf.far)) is None:
                cache = self.shelved[shelf.far] = Cache(self.cache.model, shelf.layout, [shelf.memory.array])
            for index in shelf.catalogue.host.index:
                for entry in index.values():
                    if entry.state is EntryState.READY:
                        self._judge_record(cache, shelf.kept[entry.group], entry.slot, entry.hash, "the host tier")
        if not offload._mover.cause:
            self.process.call_at(self.process.world.now, self._check)

    def _check(self) -> None:
        if self.offload is not None and not self.offload._mover.cause:
            try:
                check_offload(self.offload)
                self.engine.check_integrity()
            except AsyncKVError as exc:
                self.service.world.violate(f"{self.process.name}: {exc}")

    def _judge_record(self, cache: Cache, group: int, slot: int, hash_: bytes, where: str) -> None:
        if not cache.is_right(group, slot, self.service.block_hashes(cache.layout, group, hash_.decode())):
            self.service.world.violate(f"{where} of {self.process.name} has wrong bytes as {hash_.decode()}")

    def audit_disk(self) -> None:
        """Whatever is on the disk with a checksum that fits is what its key says."""
        if self.records is None or self.offload is None:
            return
        disk, own = self.records.disk, self.offload._own
        spaces = [bytes.fromhex(group.namespace) for group in own.groups]
        for far, (record, data) in disk.records.items():
            form = decode_layout(disk.layouts[record.layout])
            if disk.is_good(far) and record.key[:NAMESPACE_BYTES] in spaces:
                group = own.kept[spaces.index(record.key[:NAMESPACE_BYTES])]
                array = np.frombuffer(data, np.uint8)
                whole = np.zeros(max(r.stride for r in record_sizes(form)), np.uint8)
                whole[: len(array)] = array
                cache = Cache(self.cache.model, placed(form, 0, len(whole)), [whole])
                self._judge_record(cache, group, 0, record.key[NAMESPACE_BYTES:], "the disk")


def _engine(form: Layout) -> tuple[object, ...]:
    return form.tp_size, tuple((group.name, group.block_size) for group in form.groups)


class TierService(Stage):
    """An engine that offloads, its callers, and an engine that pulls.

    Args:
        script: The calls and the faults.
        doors: The doors of every rank, each time its process starts.
        listeners: Functions that get each engine before it starts.
    """

    def __init__(
        self, script: TierScript, doors: Callable[[Process], Doors] = Doors, listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(script, doors, listeners, 0.05)
        self.script, self.world.fate = script, self._wire
        self.prompts = sorted({ask.prompt for ask in script.asks})
        self.disks: list[tuple[Layout, WorldDisk]] = []
        self.ranks: list[_Rank] = []
        self._ever: list[_Rank] = []
        """Those of any geometry."""
        self.reader = _Rank(self, "d", 0)
        self.life = -1
        self.is_changing = False
        self.calls: dict[str, _Call] = {}
        self.free: dict[str, Pools] = {}

    @property
    def shape(self) -> Shape:
        """The engine's geometry."""
        return self.script.shapes[self.life % len(self.script.shapes)]

    # -- running --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Play the script to its end, and check; the world knows what was violated."""
        world, script = self.world, self.script
        self.reader.start(script.reader)
        self.free["d"] = Pools(script.reader)
        self._next_life(0)
        for ask in script.asks:
            world.at(0.05 + ask.at, partial(self._ask, ask))
        world.at(AUDIT_S, self._audit)
        try:
            self._play(script.faults, QUIET_S, self._check, self._probe)
        finally:
            for rank in self.ranks:
                self._let_go(rank)

    def _next_life(self, by: int) -> None:
        """Begin the engine, with the next geometry or the same."""
        self.life += by if self.life >= 0 else 1
        for rank in self.ranks:
            self._let_go(rank)
        for i in range(len(self._ever), self.shape.tp_size):
            self._ever.append(_Rank(self, f"p{i}", i))
        self.ranks = self._ever[: self.shape.tp_size]
        self.free["p"], self.calls = Pools(self.shape), {}
        self.is_changing = False
        for rank in self.ranks:
            rank.start(self.shape)

    def _let_go(self, rank: _Rank) -> None:
        """A process that was killed has no memory any more."""
        if rank.offload is not None:
            for shelf in rank.offload._mover.shelves if rank.offload._tiers.is_started else ():
                if shelf.memory is not None:
                    shelf.memory.close()

    def disk_of(self, form: Layout, num_bytes: int) -> WorldDisk:
        """The disk that a rank of this form has."""
        for other, disk in self.disks:
            if other == form:
                return disk
        self.disks.append((form, WorldDisk(num_bytes)))
        return self.disks[-1][1]

    # -- faults ---------------------------------------------------------------------------------------

    def fate(self, name: str, prefix: str, rng: random.Random) -> MoveFate:
        r = [rng.random() for _ in range(8)]
        usual = (1e-5 + r[0] ** 3 * 1e-3) * self.script.data * (5 if prefix else 1)
        after = rng.randrange(3) if not prefix else 0
        if r[1] < self._active(f"{prefix}stuck", name):
            late = r[0] * 8 if r[7] < 0.6 else math.inf
            return MoveFate(usual, "stuck", after, late, "fail" if prefix else "finish")
        if r[2] < self._active(f"{prefix}doubt", name):
            late = r[0] * 6 if r[7] < 0.8 else math.inf
            return MoveFate(usual, "doubt", after, late, "finish" if r[5] < 0.5 else "fail")
        if r[3] < self._active(f"{prefix}fail", name):
            return MoveFate(usual, "fail", after)
        if r[4] < self._active(f"{prefix}slow", name):
            return MoveFate(r[0] * (2.0 if prefix else 0.2))
        return MoveFate(usual)

    def _wire(self, sender: str, to: str, rng: random.Random) -> Sequence[float]:
        usual, lost = 5e-5 + rng.random() * 2e-4, rng.random()
        if lost < max(self._active("loss", sender.split("#")[0]), self._active("loss", to.split("#")[0])):
            return ()
        return (usual,)

    def _meet(self, fault: Fault) -> None:
        world = self.world
        if fault.kind in ("restart", "reshape"):
            self._end_life(fault)
            return
        for rank in [*self.ranks, self.reader]:
            if rank.name not in fault.who or rank.process.is_dead:
                continue
            if fault.kind == "kill":
                self._kill(rank)
                world.at(world.now + fault.seconds * 0.3, partial(self._again, rank, self.life))
            elif fault.kind == "freeze":
                rank.process.freeze(fault.seconds)
            elif fault.kind == "pause":
                rank.process.pauses = fault.p
            elif fault.kind == "sleep":
                self._sleep(rank, fault.seconds)
            elif rank.records is not None and rank.records.is_open:
                if fault.kind in ("disk_full", "disk_gone"):
                    rank.records.lose(f"{fault.kind} on request", reads=fault.kind == "disk_gone")
                elif fault.kind == "rot":
                    keys = [record.key for record, _ in rank.records.disk.records.values()]
                    rank.records.disk.rot(key for key in keys if self.rng.random() < fault.p)
        if fault.kind == "cancel":
            self._cancel(int(fault.who[0]))

    def _cancel(self, number: int) -> None:
        is_task = self.rng.random() < 0.5
        for rank in [*self.ranks, self.reader]:
            for call in [call for call in rank.calls.values() if call.ask.number == number]:
                self.world.note(rank.name, "cancels", call)
                rank.process.call_at(self.world.now, self._give_up, rank, call, is_task)

    def _give_up(self, rank: _Rank, call: _Call, is_task: bool) -> None:
        if is_task:
            if rank in call.begun:
                call.begun.discard(rank)  # once
                call.tasks[rank].cancel()
        elif rank.offload is not None:
            with suppress(EngineClosed):
                rank.offload.cancel(call.request_id)
        else:
            rank.engine.cancel(call.request_id)

    def _kill(self, rank: _Rank) -> None:
        process = rank.process
        if process.is_dead:
            return
        self.world.note(rank.name, "killed", process.name)
        if rank.records is not None:
            rank.records.tear()
        process.kill()
        rank.is_ready = False
        for other in [*self.ranks, self.reader]:
            if other is not rank and not other.process.is_dead:
                for nic in list(self.world.nics.values()):
                    if isinstance(nic, WorldData) and nic.host == other.process.name:
                        for owner in {t.owner for t in nic.running.values()}:
                            if owner.host == process.name:
                                nic.lose(owner)
        for call in list(rank.calls.values()):
            rank.give_back(call, process)

    def _again(self, rank: _Rank, life: int) -> None:
        if rank.process.is_dead and not self.is_changing and (life == self.life or rank is self.reader):
            self._let_go(rank)
            rank.start(rank.shape)

    def _end_life(self, fault: Fault) -> None:
        """End all ranks of the engine, well or not, and begin anew."""
        if self.is_changing:
            return
        self.is_changing = True
        step = fault.kind == "reshape"
        if fault.p < 0.5:
            for rank in self.ranks:
                self._kill(rank)
            self.world.at(self.world.now + fault.seconds * 0.1, partial(self._next_life, int(step)))
            return
        left = {rank for rank in self.ranks if not rank.process.is_dead}

        async def close(rank: _Rank) -> None:
            try:
                await rank.engine.aclose(None if fault.seconds > 0.5 else 0.1)
            finally:
                self.world.at(rank.process.now, partial(closed, rank))

        def closed(rank: _Rank) -> None:
            self._kill(rank)
            left.discard(rank)
            if not left:
                self._next_life(int(step))

        for rank in list(left):
            rank.is_ready = False
            rank.process.spawn(partial(close, rank))
        if not left:
            self._next_life(int(step))

    def _sleep(self, rank: _Rank, seconds: float) -> None:
        if rank.is_moving or not rank.is_ready:
            return

        def change(process: Process, is_asleep: bool) -> None:
            if rank.process is process and not process.is_dead:
                self.world.note(rank.name, "sleeps" if is_asleep else "wakes")
                rank.is_asleep, rank.is_moving = is_asleep, is_asleep
                for call in self.calls.values():
                    call.loaded.pop(process, None)
                rank.bytes[:] = FREED

        rank.sleep(seconds, change, partial(self.world.note, rank.name, "resumed"))

    # -- what is asked --------------------------------------------------------------------------------

    def _ask(self, ask: TierAsk) -> None:
        ranks = [rank for rank in self.ranks if rank.is_ready and not rank.process.is_dead]
        hashes = prompt_hashes(ask.prompt, ask.hashes)
        if not ranks or self.is_changing:
            self.outcomes["asks.dropped"] += 1
            return
        self.outcomes[f"asks.{ask.kind}"] += 1
        if ask.kind in ("pin", "evict", "touch", "lend"):
            if ask.kind == "lend" and self.shape.tp_size > 1:
                return
            call = _Call(ask, ask.kind, [], hashes)
            self.calls[call.request_id] = call
            for rank in ranks:
                rank.spawn(call, getattr(rank, ask.kind))
            return
        blocks = self._take("p", self.shape, ask)
        if blocks is None:
            self.outcomes["asks.no_room"] += 1
        elif ask.kind == "compute":
            self._compute(_Call(ask, "store", blocks, hashes), ranks)
        else:
            call = _Call(ask, "load", blocks, hashes)
            self.calls[call.request_id] = call
            for rank in ranks:
                rank.spawn(call, rank.look)

    def _take(self, name: str, shape: Shape, ask: TierAsk, tokens: int = 0) -> Blocks | None:
        """Take blocks for a prompt."""
        counts = [ask.hashes // every for every in shape.hashes]
        if tokens:
            counts = [-(-tokens // (every * self.script.model.hash_tokens)) for every in shape.hashes]
        return self.free[name].take(counts, self.rng)

    def _compute(self, call: _Call, ranks: Sequence[_Rank]) -> None:
        """Fill blocks with what the prompt says, but for what was loaded, and store them."""
        self.calls[call.request_id] = call
        loaded = min(call.loaded.get(rank.process, 0) for rank in ranks)
        model, firsts = self.script.model, [first for first, _ in self.from_cached(call)]
        for group, (kind, every, first) in enumerate(zip(model.groups, self.shape.hashes, firsts, strict=True)):
            ids, size = call.blocks[group], every * model.hash_tokens
            in_place = kind.in_place(size, first, loaded)
            for at, block in enumerate(ids):
                if block is None or at in in_place:
                    continue
                is_computed = at * size < first or (at + 1) * size > loaded
                for rank in ranks:
                    if is_computed:
                        rank.cache.fill(group, block, call.hashes[at * every : (at + 1) * every])
                    else:
                        rank.cache.scribble(group, block)
                if not is_computed:  # a call that goes on after what was loaded does not need it
                    self.free["p"].free[self.shape.pool(group)].append(block)
                    ids[at] = None
        for rank in ranks:
            rank.spawn(call, rank.store)

    def from_cached(self, call: _Call) -> list[tuple[int, list[int | None]]]:
        """Return the blocks that a load is given: `None` for those that are there already."""
        out = []
        for every, ids in zip(self.shape.hashes, call.blocks, strict=True):
            first = min(call.ask.cached // self.shape.align * self.shape.align // every, len(ids))
            out.append((first * every * self.script.model.hash_tokens, ids[first:]))
        return out

    def goes_on(self, call: _Call) -> bool:
        """The blocks of a load are to be computed and stored next."""
        return call.kind == "load" and call.ask.kind == "both"

    def settle(self, call: _Call) -> None:
        """All ranks have given a call's blocks back."""
        if self.calls.pop(call.request_id, None) is None:
            return
        if call.is_lost:
            return
        ranks = [rank for rank in self.ranks if rank.is_ready and not rank.process.is_dead]
        if self.goes_on(call) and ranks and not self.is_changing and call.ask.number < PROBE:
            store = _Call(call.ask, "store", call.blocks, call.hashes)
            store.loaded = call.loaded
            self._compute(store, ranks)
            return
        self.free["d" if call.kind == "pull" else "p"].give(call.blocks)

    def pull(self, lent: _Call, params: Mapping[str, Any], tokens: int) -> None:
        """Have something pulled that was lent."""
        if not self.reader.is_ready or self.reader.process.is_dead:
            return
        blocks = self._take("d", self.script.reader, lent.ask, tokens)
        if blocks is None:
            self.outcomes["pull.no_room"] += 1
            return
        call = _Call(lent.ask, "pull", blocks, lent.hashes)
        self.calls[call.request_id] = call
        self.reader.spawn(call, partial(self.reader.pull, params=params, tokens=tokens))

    # -- afterwards -------------------------------------------------------------------------------------

    def block_hashes(self, layout: Layout, group: int, last: str) -> list[str]:
        """Return the hashes of a block by the last one that it covers."""
        name, _, at = last.partition(":")
        every = layout.groups[group].block_size // self.script.model.hash_tokens
        return prompt_hashes(int(name[1:]), int(at) + 1)[-every:]

    def _audit(self) -> None:
        for rank in self.ranks:
            rank.audit()
        if self.world.now < self.script.seconds + 2.0:
            self.world.at(self.world.now + AUDIT_S, self._audit)

    def _check(self) -> None:
        """Everything has had its time: nothing is asked, nothing held, everything idle."""
        world = self.world
        for call in self.calls.values():
            if not call.is_lost:
                world.violate(f"{call} never ended on {', '.join(r.process.name for r in call.ranks)}")
                return
        for rank in self.ranks:
            rank.audit()
            rank.audit_disk()
            if world.violation or rank.process.is_dead or rank.offload is None or not rank.offload._tiers.is_started:
                continue
            mover = rank.offload._mover
            if any(not job.is_retired for job in mover.jobs.values()):
                world.violate(f"{rank.process.name} has jobs left: {list(mover.jobs)}")
            stuck = len(rank.copies.moves) + sum(
                len(shelf.records.moves) for shelf in mover.shelves if isinstance(shelf.records, WorldRecords)
            )
            if len(mover.posted) > stuck:
                world.violate(f"{rank.process.name} waits for {len(mover.posted)} moves, and {stuck} are under way")
            said = rank.offload._catalogue.statistics()
            if said["pins"]:
                world.violate(f"{rank.process.name} has {said['pins']} pins left")
            held = {hold.request_id for hold in rank.engine._driver.core.ledger} - {
                job.request_id for job in mover.jobs.values()
            }
            if held:
                world.violate(f"{rank.process.name} holds blocks of {held}")
        if not any(f.kind in ("stuck", "doubt", "kill", "restart", "reshape") for f in self.script.faults):
            for name, shape in (("p", self.shape), ("d", self.script.reader)):
                if sum(map(len, self.free[name].free)) != len(self.free[name].free) * shape.num_blocks:
                    world.violate(f"blocks of {name} are lost")

    def _probe(self) -> None:
        """With the faults over, a fresh prompt must be stored, and found, and loaded."""
        world, kinds = self.world, {fault.kind for fault in self.script.faults}
        ranks = [rank for rank in self.ranks if rank.is_ready and not rank.process.is_dead]
        if len(ranks) < self.shape.tp_size or kinds & {"stuck", "doubt", "disk_stuck", "disk_doubt"}:
            return
        for prompt in self.prompts:
            self._probe_kept(prompt)
        before = self.outcomes["load.tokens"]
        for kind, number in (("compute", PROBE), ("reuse", PROBE + 1)):
            self._ask(TierAsk(number, world.now, kind, 1000, self.shape.align, 0, 4.0))
            world.run(world.now + 6.0)
        tokens = self.shape.align * self.script.model.hash_tokens * self.shape.tp_size
        if self.outcomes["load.tokens"] != before + tokens and not world.violation:
            world.violate(f"a fresh prompt: {self.outcomes['load.tokens'] - before} tokens of {tokens} were loaded")
        if not world.violation:
            self._ask(TierAsk(PROBE + 4, world.now, "evict", 1000, LONG, 0, 4.0))
            world.run(world.now + 1.0)

    def _probe_kept(self, prompt: int) -> None:
        """Check that a found prefix can be loaded: all of it, or the next look says that it is less."""
        world = self.world
        for _ in range(TRIES):
            if world.violation:
                return
            less = self.outcomes["probes.less"]
            for hashes in (LONG, LONG // 2):
                had_room = self.outcomes["asks.no_room"]
                self._ask(TierAsk(PROBE + 2, world.now, "reuse", prompt, hashes, 0, 4.0))
                if self.outcomes["asks.no_room"] == had_room:
                    break
            world.run(world.now + 4.5)
            if self.outcomes["probes.less"] == less:
                return
        world.violate(f"what is found of prompt {prompt} cannot be loaded, {TRIES} times in a row")
