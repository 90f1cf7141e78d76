"""The tiers of one rank, as its engine's guest: how their memory is taken, their files are opened, and all is let go.

What takes long, taking memory page by page and reading what files hold, is done on another thread. The order in which
it ends keeps memory safe: first nothing is begun any more, then what is copied is waited for, then planes are left, and
only then blocks are given back that something might have written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
import numpy as np

from asynckv.config import EngineConfig, OffloadConfig
from asynckv.core.inspect import HeldBlocks
from asynckv.core.lifecycle import LifeState
from asynckv.engine.copying import ByTokens, Copying, SlotBySlot, reading
from asynckv.engine.engine import Engine
from asynckv.engine.figures import Figures
from asynckv.engine.jobs import OffloadJob
from asynckv.engine.mover import Mover
from asynckv.engine.shelf import Shelf
from asynckv.errors import BackendError, ConfigError, EngineClosed, LocalProtocolError
from asynckv.geometry.blocks import BlockList
from asynckv.geometry.check import Registration
from asynckv.geometry.packed import record_form
from asynckv.observe.events import EVENT
from asynckv.offload.found import Codes, Found, GroupFound, known, longest
from asynckv.offload.job import JobOutcome, MoveKind
from asynckv.offload.keys import StoredGroup
from asynckv.offload.tier import Place
from asynckv.ports import FOUND_DAMAGED, CopyPlane, RecordPlane

__all__ = ["GRACE_S", "Leftovers", "Serve", "Tiers"]

HOST = "host"
"""The name of the host tier's memory among what the copy plane knows."""

THROUGH_BYTES, THROUGH_RECORDS = 32 << 20, 16
"""Of host memory through which the records of another geometry pass, per rank that has left some: so much, or for so
many of the largest records per group where that is more."""

MAX_THROUGH_BYTES = 512 << 20
"""The same at most: how large a record is says another's index."""

MAX_TOLD = 8
"""Directories that are left out, one line each."""

GRACE_S = 1.0
"""How long closing writes to files, and waits for copies that run, unless it is told otherwise."""

WRITTEN = f"blocks.{MoveKind.WRITE_BACK.value}"

Serve = Callable[[EngineConfig, Registration], Engine]
Leftovers = Callable[[OffloadConfig, Shelf, str], list[Shelf]]


class Tiers:
    """A rank's own shelf, and those that ranks of another geometry have left.

    Args:
        owner: Whose calls it serves.
        config: The offload's.
        engine: Whose blocks these are.
        copies: Copy plane; NIXL if left out.
        records: Record plane; files of `config.directory` if left out.
        serve: Makes the host tier's own engine.
        leftovers: Finds what ranks of another geometry have left in files.

    Attributes:
        own: The rank's own shelf.
        others: All of them are needed for a prefix; and how each is read.
        align: Prefixes end at multiples of it.
        mover: Carries out what catalogues want.
        network: The host tier's own engine.
        is_started: Somebody has called `start`.
    """

    def __init__(
        self,
        owner: object,
        config: OffloadConfig,
        engine: Engine,
        copies: CopyPlane | None,
        records: RecordPlane | None,
        serve: Serve,
        leftovers: Leftovers | None,
    ) -> None:
        self.owner, self.config, self.engine, self.driver = owner, config, engine, engine._driver
        self._left_out: list[str] = []
        """What ranks of another geometry have left and cannot be used, and why."""
        self._serve, self._leftovers = serve, leftovers or partial(_left_by_others, self._left_out)
        self.own = Shelf(
            HOST,
            record_form(engine.registration.layout),
            config,
            host_bytes=config.host_bytes,
            file_bytes=config.file_bytes,
            records=records,
        )
        self.others: dict[Shelf, ByTokens] = {}
        self.align = self.own.align
        self.mover = Mover(self.driver, config)
        self.mover.shelves = (self.own,)
        self.figures = Figures(self.driver, self.mover, config)
        self.mover.on_moved = self.figures.tell
        self.network: Engine | None = None
        self.is_started = False
        self._copies = copies
        self._closing: asyncio.Task[tuple[HeldBlocks, ...]] | None = None
        self._opening = asyncio.Lock()
        """Held while another thread takes memory and opens files."""

    # -- beginning -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the memory, open the files, and find out what they hold."""
        driver, config = self.driver, self.config
        if self.is_started:
            raise LocalProtocolError("the offload was started before; make a new one")
        driver.attach(self)
        self.is_started, began = True, driver.clock.now()
        try:
            async with self._opening:
                found = await self._open()
            if config.network is not None:
                self.network = self._serve(config.network, Registration(self.own.layout, (self.own.memory,)))
                await self.network.start()
            if self._closing is not None or driver.life.state is not LifeState.RUNNING:
                raise EngineClosed("the engine ended while its offload started")
            self._take()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._let_go_of_planes(0.0)
            if self in driver.guests:
                driver.guests.remove(self)
            raise
        self.mover.cause = ""
        driver.recorder.event(
            "info",
            EVENT.OFFLOAD_STARTED,
            host_bytes=config.host_bytes,
            file_bytes=config.file_bytes,
            blocks_found=found,
            seconds=round(driver.clock.now() - began, 6),
            tiers=self.describe(),
        )
        self.mover.pump()

    def _take(self) -> None:
        """Use the engine's memory, as it is registered now."""
        layout, mover = self.engine.registration.layout, self.mover
        if record_form(layout) != self.own.form:
            raise LocalProtocolError(
                "the engine's blocks have another form than those that the offload keeps; make a new Offload"
            )
        most = self.config.max_post_bytes
        copying: dict[Shelf, Copying] = {self.own: SlotBySlot(self.own, layout, most)}
        if self.others:
            self.others = reading(layout, list(self.others), most)
            copying |= self.others
        if self._copies is None:
            self._copies = _nixl_copies(f"{self._name}-{self.engine.memory_epoch}")
        far = {shelf.far: [shelf.memory.memory] for shelf in mover.shelves if shelf.memory is not None}
        self._copies.start(layout.memories, far, mover.on_copies)
        mover.use(self._copies, copying)

    @property
    def _name(self) -> str:
        """Of NIXL's agents; unique."""
        layout = self.engine.registration.layout
        return f"{self.engine.config.engine_id}-tp{layout.tp_rank}-pp{layout.pp_stage}-{self.engine.incarnation[:16]}"

    async def _open(self) -> int:
        """Take the memory, and open the files, away from the loop; returns how many blocks these have."""
        loop, mover = asyncio.get_running_loop(), self.mover
        work = loop.run_in_executor(None, self._open_all, loop)
        try:
            found = await asyncio.shield(work)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):  # nobody may close what is still being opened
                await asyncio.wait([work])
            raise
        for cause in self._left_out[:MAX_TOLD]:
            self.driver.recorder.event("warning", EVENT.OFFLOAD_LEFT_OUT, cause=cause)
        self._tell_of_damage()
        opened, mover.shelves = mover.shelves, (self.own, *self.others)
        for shelf in opened:
            if shelf not in mover.shelves:
                await shelf.close()
        mover.is_open = True
        for shelf in mover.shelves:
            if shelf.records is not None:
                mover.on_records(shelf)  # what was not heard meanwhile
        return found

    def _tell_of_damage(self) -> None:
        """Say if the rank's own files have not all that they should have."""
        if self.own.records is None:
            return
        said = self.own.records.statistics()
        damage = {what: said.get(f"found_{what}", 0) for what in FOUND_DAMAGED} | {"unfit": self.own.unfit}
        if any(damage.values()):
            self.driver.recorder.event(
                "warning",
                EVENT.OFFLOAD_FILES_DAMAGED,
                folder=self.own.records.describe().get("folder", ""),
                found=said.get("found_records", 0),
                **damage,
            )

    def _open_all(self, loop: asyncio.AbstractEventLoop) -> int:
        """Take memory page by page, take space on disks, and read what is there: each takes seconds if there is much.

        Runs on a thread of its own. Says how many blocks there are.
        """
        own, config, mover = self.own, self.config, self.mover
        own.take_memory(self.engine.registration.layout)
        if own.records is None and config.directory:
            own.records = _files(config, own, self._name)
        found = own.open_files(partial(mover.on_records, own), loop)
        try:
            for shelf in self._leftovers(config, own, self._name):
                mover.shelves = (*mover.shelves, shelf)
                shelf.take_memory(self.engine.registration.layout)
                found += shelf.open_files(partial(mover.on_records, shelf), loop)
            if opened := mover.shelves[1:]:
                self.others = reading(self.engine.registration.layout, opened, config.max_post_bytes)
        except (BackendError, ConfigError) as exc:
            self._left_out.append(str(exc))
        return found

    # -- its end -------------------------------------------------------------------------------------

    async def close(self, timeout_s: float | None, flush_s: float) -> tuple[HeldBlocks, ...]:
        """End everything, or wait until all has ended; if that failed before, try again."""
        if self._closing is None or (self._closing.done() and self._closing.exception() is not None):
            self._closing = asyncio.get_running_loop().create_task(self._close(timeout_s, flush_s))
        left: tuple[HeldBlocks, ...] = ()
        with anyio.CancelScope(shield=True):
            left = await asyncio.shield(self._closing)
        return left

    async def _close(self, timeout_s: float | None, flush_s: float) -> tuple[HeldBlocks, ...]:
        driver, mover = self.driver, self.mover
        was_open, mover.cause = not mover.cause, mover.cause or "it was closed"
        before = mover.counts[WRITTEN]
        left = await mover.end_work(GRACE_S if timeout_s is None else timeout_s, flush_s)
        written, lost = mover.counts[WRITTEN] - before, mover.to_write_back
        await self._let_go_of_planes(timeout_s)
        mover.forsake()
        if self in driver.guests:
            driver.guests.remove(self)
        if was_open:
            self.figures.tell(0.0)
            driver.recorder.event(
                "info", EVENT.OFFLOAD_STOPPED, counters=self.figures.counters(), written_back=written, lost=lost
            )
        driver.soon()
        return left

    async def _let_go_of_planes(self, timeout_s: float | None) -> None:
        """End all planes; nothing touches any memory afterwards."""
        async with self._opening:
            pass
        if self.network is not None:
            await self.network.aclose(timeout_s)
        await self.mover.let_go_of_device()
        for shelf in self.mover.shelves:
            await shelf.close()

    # -- what the engine asks of its guest -----------------------------------------------------------

    async def let_go(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]:
        """The engine ends, or is suspended: use its memory no more."""
        if self.driver.life.state is not LifeState.SUSPENDING:
            return await self.close(timeout_s, GRACE_S if timeout_s is None else min(timeout_s, GRACE_S))
        self.mover.cause = "its engine is suspended"
        left = await self.mover.end_work(GRACE_S if timeout_s is None else timeout_s)
        await self.mover.let_go_of_device()
        self.mover.forsake((MoveKind.STORE, MoveKind.LOAD))
        return left

    def take_again(self) -> None:
        """The engine was resumed: use its memory as it is registered now."""
        try:
            self._take()
        except (LocalProtocolError, BackendError) as exc:
            self.mover.cause = str(exc)
            self.driver.recorder.event("error", EVENT.OFFLOAD_BROKEN, cause=str(exc))
        else:
            self.mover.cause = ""
            self.mover.pump()

    def counters(self) -> dict[str, int]:
        """What is told with the engine's own."""
        return {f"offload.{name}": count for name, count in self.figures.counters().items()}

    def gauges(self) -> dict[str, int]:
        """The same, of how things stand."""
        return {f"offload.{name}": value for name, value in self.figures.gauges().items()}

    def describe(self) -> dict[str, str]:
        """Name versions, transports and modes in use, and why what is not used is not."""
        planes = self._copies, self.own.records, self.own.memory
        said = {name: what for plane in planes if plane is not None for name, what in plane.describe().items()}
        off = {"off": self.mover.cause, "files_off": self.own.files_lost}
        return said | {name: cause for name, cause in off.items() if cause}

    # -- what they hold ------------------------------------------------------------------------------

    def found(self, chain: list[bytes]) -> Found:
        """What is kept of a prefix on the rank's own shelf, or on those of others if that is more."""
        if self.mover.cause:
            chain = []  # a load is refused
        found = self.own.catalogue.lookup(chain)
        if self.others and found.tokens < len(chain) * self.config.hash_tokens:
            there = self._left(chain)
            if there.tokens > found.tokens:
                ready = there.ready_tokens if there.ready_tokens > found.tokens else found.ready_tokens
                return msgspec.structs.replace(there, ready_tokens=ready)
        return found

    def _left(self, chain: list[bytes]) -> Found:
        """What ranks of another geometry have left of a prefix: all of them, for every block that it takes here."""
        groups, codes, partners = list[StoredGroup](), list[Codes](), list[list[int]]()
        for shelf, copying in self.others.items():
            kept = shelf.catalogue
            codes += known(copying.groups, self.config.hash_tokens, kept.host, kept.file, chain)
            groups += copying.groups.values()
            partners += copying.partners.values()
        there = longest(groups, codes, self.align)
        joined = []
        for index in self.own.kept:
            parts = [part for part, mine in zip(there.groups, partners, strict=True) if index in mine]
            counts = [sum(each) for each in zip(*((p.ready, p.in_file, p.storing) for p in parts), strict=True)]
            joined.append(GroupFound(min(part.tokens for part in parts), *counts))
        return msgspec.structs.replace(there, groups=tuple(joined))

    def pin(self, name: str, chain: list[bytes]) -> None:
        """Keep what is kept of a prompt: of its own, and what others have left, if that is more.

        Of that in their files: through the little memory beside them other prompts have to pass.
        """
        own = self.own.catalogue
        own.pin(name, chain)
        if self.others and own.lookup(chain).tokens < (tokens := self._left(chain).tokens):
            nothing = [(0, np.zeros(0, np.int64))] * len(self.engine.registration.layout.groups)
            for shelf, copying in self.others.items():
                shelf.catalogue.pin(name, chain, tokens, positions=copying.wanted(nothing, tokens), place=Place.FILE)

    def sources(
        self, chain: list[bytes], tokens: int, blocks: Sequence[BlockList], wanted: list[list[int]]
    ) -> dict[Shelf, list[list[int]]]:
        """Say of which shelves a prefix is loaded, and which blocks of their groups are needed for those wanted."""
        whole = chain[: tokens // self.config.hash_tokens]
        if self.others and self.own.catalogue.lookup(whole).tokens < tokens == self._left(whole).tokens:
            return {shelf: copying.wanted(blocks, tokens) for shelf, copying in self.others.items()}
        return {self.own: wanted}

    def shorter(self, wanted: list[list[int]], job: OffloadJob) -> tuple[int, dict[Shelf, list[list[int]]]] | None:
        """Say which prefix can still be loaded of one of which some is lost, and of which shelves; None if none can."""
        tokens = self.found(job.chain[: job.tokens // self.config.hash_tokens]).tokens
        if self._is_hybrid or not self._had(job) < tokens < job.tokens:
            return None
        sizes = [group.block_size for group in self.own.groups]
        less = [[at for at in some if (at + 1) * size <= tokens] for some, size in zip(wanted, sizes, strict=True)]
        return tokens, self.sources(job.chain, tokens, job.blocks, less)

    @property
    def _is_hybrid(self) -> bool:
        """Another prefix needs other blocks."""
        return any(group.is_state or group.window for group in self.own.groups)

    def _had(self, job: OffloadJob) -> int:
        """How long a prefix was there before a load."""
        return min(min(job.blocks[index][0], job.tokens) for index in self.own.kept) // self.align * self.align

    def loaded(self, job: OffloadJob) -> int:
        """Say how long a prefix is in place in all groups: all, what precedes the first gap, or what was there."""
        tokens = job.tokens
        if all(part is not None and not any(part.missing) for part in job.parts.values()):
            return tokens
        had = self._had(job)
        if self._is_hybrid:
            return had  # a shorter prefix would need other blocks
        ends = [tokens]
        for shelf in self.mover.shelves:
            if (part := job.parts.get(shelf.far)) is None:
                continue
            if part.outcome is JobOutcome.MISSING and not part.blocks:
                return had  # nothing was moved
            ends += [min(m) * g.block_size for g, m in zip(shelf.groups, part.missing, strict=True) if m]
        return max(min(ends) // self.align * self.align, had)


def _nixl_copies(name: str) -> CopyPlane:
    from asynckv.edges.copies import NixlCopies

    return NixlCopies(name)


def _files(config: OffloadConfig, own: Shelf, name: str) -> RecordPlane:
    from asynckv.edges.file_tier import FileTier
    from asynckv.edges.leftovers import rank_folder

    smallest = min(group.record_bytes for group in own.groups)
    return FileTier(rank_folder(config.directory, own.form), config.file_bytes, name=name, record_bytes=smallest)


def _left_by_others(left_out: list[str], config: OffloadConfig, own: Shelf, name: str) -> list[Shelf]:
    """Make shelves of what ranks of another geometry have left in the same directory; what cannot be used is added."""
    if not config.directory:
        return []
    from asynckv.edges.file_tier import FileTier
    from asynckv.edges.leftovers import left_in

    shelves = []
    for at, left in enumerate(left_in(Path(config.directory), own.form, left_out)):
        largest, groups = left.form.memories[0].length, len(left.form.groups)
        through = max(THROUGH_BYTES, THROUGH_RECORDS * largest * groups)
        if through > MAX_THROUGH_BYTES:
            left_out.append(
                f"{left.folder} has blocks of {largest} bytes, in {groups} groups: {THROUGH_RECORDS} of each need "
                f"{through} bytes of host memory to pass through, and {MAX_THROUGH_BYTES} are given; with smaller "
                f"blocks they can be read"
            )
            return []  # all of them are needed
        files = FileTier(left.folder, left.num_bytes, name=f"{name}-left{at}", read_only=True)
        far = f"left{at}"
        shelves.append(
            Shelf(far, left.form, config, host_bytes=through, file_bytes=left.num_bytes, records=files, is_own=False)
        )
    return shelves
