"""The tiers of one rank, as its engine's guest: how their memory is taken, their files are opened, and all is let go.

Memory is taken and files are read on another thread. The order of ending keeps memory safe: nothing is begun any more,
what is copied is waited for, planes are left, and only then blocks are given back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import msgspec
import numpy as np

from asynckv import told
from asynckv.account.inspect import HeldBlocks
from asynckv.config import EngineConfig, OffloadConfig
from asynckv.core.lifecycle import LifeState
from asynckv.edges.aside import Aside
from asynckv.engine.driver import kept, wait_until
from asynckv.engine.engine import Engine
from asynckv.errors import AsyncKVError, BackendError, EngineClosed, LocalProtocolError
from asynckv.geometry.blocks import BlockList
from asynckv.geometry.check import Registration
from asynckv.geometry.packed import record_form
from asynckv.offload.found import Codes, Found, GroupFound, known, longest
from asynckv.offload.job import JobOutcome, MoveKind
from asynckv.offload.keys import StoredGroup
from asynckv.offload.tier import Place
from asynckv.ports import FOUND_DAMAGED, CopyPlane, RecordPlane
from asynckv.tiers.copying import ByTokens, Copying, SlotBySlot, reading
from asynckv.tiers.figures import Figures
from asynckv.tiers.jobs import OffloadJob
from asynckv.tiers.mover import Mover
from asynckv.tiers.shelf import Shelf

HOST = "host"  # the name of the host tier's memory among what the copy plane knows
THROUGH_BYTES, THROUGH_RECORDS = 32 << 20, 16
"""Of host memory through which the records of another geometry pass, per rank that has left some: so much, or for so
many of the largest records per group where that is more."""

MAX_THROUGH_BYTES = 512 << 20  # the same at most: how large a record is says another's index
MAX_TOLD = 8

GRACE_S = 1.0  # seconds for which closing writes to files and waits for running copies, by default
CLOSE_S = 10.0  # seconds for which closing waits for a plane's threads, by default
WRITTEN = f"blocks.{MoveKind.WRITE_BACK.value}"

Serve = Callable[[EngineConfig, Registration], Engine]
Leftovers = Callable[[OffloadConfig, Shelf, str], list[Shelf]]


class Tiers:
    """A rank's own shelf, and the shelves that ranks of another geometry left; for the arguments see `Offload`."""

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
        self._serve, self._leftovers = serve, leftovers or partial(_left_by_others, self._left_out)
        self.own = Shelf(
            HOST,
            record_form(engine.registration.layout),
            config,
            host_bytes=config.host_bytes,
            file_bytes=config.file_bytes,
            records=records,
        )
        self.others: dict[Shelf, ByTokens] = {}  # shelves that are all needed for a prefix, and how each is read
        self.align = self.own.align  # tokens of which every prefix length is a multiple
        if copies is None:
            from asynckv.edges.nic.copies import NixlCopies

            copies = NixlCopies(self._name, threads=config.copy_threads)
        self.mover = Mover(self.driver, config, copies, self.own)
        self.figures = Figures(self.driver, self.mover, config)
        self.mover.on_moved = self.figures.tell
        self.network: Engine | None = None  # the host tier's own
        self.is_started = False  # True after the first call of `start`
        self._is_to_be_told = False
        self._written_before: int | None = None
        self._closing: asyncio.Task[tuple[HeldBlocks, ...]] | None = None
        self._opening: asyncio.Future[int] | None = None  # until it has ended, memory and files are its thread's
        self._num_left = 0  # times that it did not come back in time; once left, it lets go of all by itself
        self._turned = asyncio.Event()  # set when it has come back, or was left
        self._tidying: asyncio.Task[None] | None = None

    # -- beginning -----------------------------------------------------------------------------------

    async def start(self) -> None:
        driver, config = self.driver, self.config
        if self.is_started:
            raise LocalProtocolError("the offload was started before; make a new one")
        driver.attach(self)
        self.is_started, began = True, driver.clock.now()
        try:
            found = await self._open()
            if config.network is not None:
                self.network = self._serve(config.network, Registration(self.own.layout, (self.own.memory,)))
                await self.network.start()
            if self._closing is not None or driver.life.state is not LifeState.RUNNING:
                raise EngineClosed("the engine ended while its offload started")
            self._take()
        except BaseException:
            with anyio.CancelScope(shield=True):
                if not self._num_left:
                    await self._let_go_of_planes(driver.clock.now() + CLOSE_S)
            if self in driver.guests:
                driver.guests.remove(self)
            raise
        self.mover.cause, self._is_to_be_told = "", True
        seconds = round(driver.clock.now() - began, 6)
        driver.recorder.log(told.OffloadStarted(config.host_bytes, config.file_bytes, found, seconds, self.describe()))
        self.mover.pump()

    def _take(self) -> None:
        layout, mover = self.engine.registration.layout, self.mover
        if record_form(layout) != self.own.form:
            raise LocalProtocolError(
                "the engine's blocks have another form than those that the offload keeps; make a new Offload"
            )
        most = self.config.max_post_bytes
        copying: dict[Shelf, Copying] = {self.own: SlotBySlot(self.own, layout, most)}
        if self.others:
            self.others = reading(layout, list(self.others), self.engine.config, most)
            copying |= self.others
        far = {shelf.far: [shelf.memory.memory] for shelf in mover.shelves if shelf.memory is not None}
        mover.copies.start(layout.memories, far, mover.on_copies)
        mover.copying, mover.is_copying = copying, True

    @property
    def _name(self) -> str:
        layout = self.engine.registration.layout
        return f"{self.engine.config.engine_id}-tp{layout.tp_rank}-pp{layout.pp_stage}-{self.engine.incarnation[:16]}"

    async def _open(self) -> int:
        """Take the memory, and open the files, away from the loop; returns how many blocks these have."""
        loop, mover = asyncio.get_running_loop(), self.mover
        work = self._opening = loop.run_in_executor(Aside(f"{self._name}-opening"), self._open_all, loop)
        work.add_done_callback(self._came_back)
        try:
            await self._until_opened(math.inf)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True), suppress(BackendError):  # which the log has told
                await self._until_opened(GRACE_S)
            raise
        if self._num_left:
            raise BackendError(self._hangs)  # it came back just now, and is let go of
        found = work.result()
        for cause in self._left_out[:MAX_TOLD]:
            self.driver.recorder.log(told.OffloadLeftOut(cause))
        self._tell_of_damage()
        opened, mover.shelves = mover.shelves, (self.own, *self.others)
        for shelf in opened:
            if shelf not in mover.shelves:
                await shelf.close(CLOSE_S)
        mover.is_open = True
        for shelf in mover.shelves:
            mover.on_records(shelf)  # what was not heard meanwhile
        return found

    async def _until_opened(self, timeout_s: float) -> None:
        """Wait until nothing is being opened any more; raise `BackendError` if it took too long for any caller."""
        work, clock, before = self._opening, self.driver.clock, self._num_left
        if work is None or work.done():
            return

        def is_over() -> bool:
            return work.done() or self._num_left > before

        await wait_until(clock, self._turned, is_over, clock.now() + timeout_s)
        if not is_over():
            if not before:
                self.driver.recorder.log(told.OffloadBroken(self._hangs))
            self._num_left += 1
            self._turned.set()
        if not work.done():
            raise BackendError(self._hangs)

    @property
    def _hangs(self) -> str:
        where = f"opening the files in {self.config.directory!r}, or taking" if self.config.directory else "taking"
        return (
            f"{where} {self.config.host_bytes} bytes of host memory, has not come to an end: the disk or the system "
            f"does not answer. The thread that waits for it is left behind with the memory and the directory, and lets "
            f"go of them once it is answered; close again to wait again"
        )

    def _came_back(self, work: asyncio.Future[int]) -> None:
        """Note that opening has ended; release the shelves if no caller has waited for them."""
        work.exception()
        self._turned.set()
        if self._num_left:
            self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    async def _tidy(self) -> None:
        with suppress(BackendError):  # a disk that hangs again: `aclose` tells
            await self._let_go_of_planes(self.driver.clock.now() + CLOSE_S)

    def _tell_of_damage(self) -> None:
        if self.own.records is None:
            return
        said = self.own.records.statistics()
        damage = {what: said.get(f"found_{what}", 0) for what in FOUND_DAMAGED} | {"unfit": self.own.unfit}
        if any(damage.values()):
            folder, found = self.own.records.describe().get("folder", ""), said.get("found_records", 0)
            self.driver.recorder.log(told.OffloadFilesDamaged(folder, found, **damage))

    def _open_all(self, loop: asyncio.AbstractEventLoop) -> int:
        """Take memory page by page, take space on disks, and read what is there: each takes seconds if there is much.

        Runs on a thread of its own. Says how many blocks there are.
        """
        own, config, mover = self.own, self.config, self.mover
        own.take_memory(self.engine.registration.layout)
        if own.records is None and config.directory:
            from asynckv.edges.files.leftovers import rank_folder
            from asynckv.edges.files.tier import FileTier

            own.records = FileTier(rank_folder(config.directory, own.form), config.file_bytes, name=self._name)
        found = own.open_files(partial(mover.on_records, own), loop)
        try:
            for shelf in self._leftovers(config, own, self._name):
                if self._num_left:
                    break
                mover.shelves = (*mover.shelves, shelf)
                shelf.take_memory(self.engine.registration.layout)
                found += shelf.open_files(partial(mover.on_records, shelf), loop)
            if opened := mover.shelves[1:]:
                engine = self.engine
                self.others = reading(engine.registration.layout, opened, engine.config, config.max_post_bytes)
        except AsyncKVError as exc:
            self._left_out.append(str(exc))
        return found

    # -- its end -------------------------------------------------------------------------------------

    async def close(self, timeout_s: float | None, flush_s: float) -> tuple[HeldBlocks, ...]:
        """End everything, or wait until all has ended; if that failed before, try again."""
        if self._closing is None or (self._closing.done() and self._closing.exception() is not None):
            self._closing = asyncio.get_running_loop().create_task(self._close(timeout_s, flush_s))
        return await kept(self._closing)

    async def _close(self, timeout_s: float | None, flush_s: float) -> tuple[HeldBlocks, ...]:
        driver, mover = self.driver, self.mover
        if is_first := self._written_before is None:
            self._written_before = mover.counts[WRITTEN]
        mover.cause = mover.cause or "it was closed"
        by = driver.clock.now() + (GRACE_S if timeout_s is None else timeout_s)
        left = await mover.end_work(by - driver.clock.now(), flush_s if is_first else 0.0)
        written, lost = mover.counts[WRITTEN] - (self._written_before or 0), mover.to_write_back
        await self._let_go_of_planes(None if timeout_s is None else by)
        mover.forsake()
        if self in driver.guests:
            driver.guests.remove(self)
        if self._is_to_be_told:
            self._is_to_be_told = False
            self.figures.tell(0.0)
            driver.recorder.log(told.OffloadStopped(self.figures.counters(), written, lost))
        driver.soon()
        return left

    async def _let_go_of_planes(self, by: float | None) -> None:
        """End all planes within `by` (None: `CLOSE_S` each); `BackendError` if something may still touch memory."""

        def left(least: float) -> float:
            return CLOSE_S if by is None else max(by - self.driver.clock.now(), least)

        await self._until_opened(left(0.0))
        if self.network is not None:
            await self.network.aclose(None if by is None else left(0.0))
        await self.mover.let_go_of_device(left(GRACE_S))
        shelves = self.mover.shelves
        ended = await asyncio.gather(*(shelf.close(left(GRACE_S)) for shelf in shelves), return_exceptions=True)
        for each in ended:
            if isinstance(each, BaseException):
                raise each

    # -- what the engine asks of its guest -----------------------------------------------------------

    async def let_go(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]:
        """The engine ends, or is suspended: use its memory no more."""
        if self.driver.life.state is not LifeState.SUSPENDING:
            try:
                return await self.close(timeout_s, GRACE_S if timeout_s is None else min(timeout_s, GRACE_S))
            except BackendError:
                if self._opening is None or self._opening.done():
                    raise
                return ()  # what is left behind touches no block of the engine
        self.mover.cause = "its engine is suspended"
        left = await self.mover.end_work(GRACE_S if timeout_s is None else timeout_s)
        await self.mover.let_go_of_device(CLOSE_S)
        self.mover.forsake((MoveKind.STORE, MoveKind.LOAD))
        return left

    def take_again(self) -> None:
        try:
            self._take()
        except (LocalProtocolError, BackendError) as exc:
            self.mover.cause = str(exc)
            self.driver.recorder.log(told.OffloadBroken(str(exc)))
        else:
            self.mover.cause = ""
            self.mover.pump()

    def counters(self) -> dict[str, int]:
        return {f"offload.{name}": count for name, count in self.figures.counters().items()}

    def gauges(self) -> dict[str, int]:
        return {f"offload.{name}": value for name, value in self.figures.gauges().items()}

    def describe(self) -> dict[str, str]:
        planes = self.mover.copies, self.own.records, self.own.memory
        said = {name: what for plane in planes if plane is not None for name, what in plane.describe().items()}
        off = {"off": self.mover.cause, "files_off": self.own.files_lost}
        return said | {name: cause for name, cause in off.items() if cause}

    # -- what they hold ------------------------------------------------------------------------------

    def found(self, chain: list[bytes]) -> Found:
        """Find a prefix on the rank's own shelf, or on those of others if they have more."""
        if self.mover.cause:
            chain = []  # a load is refused
        found = self.own.catalogue.lookup(chain)
        if self.others and found.tokens < len(chain) * self.config.hash_tokens:
            there = self._left(chain)
            if there.tokens > found.tokens:
                # What of it is in the little memory beside its files may be gone in a moment, pinned or not.
                return msgspec.structs.replace(there, ready_tokens=found.ready_tokens)
        return found

    def _left(self, chain: list[bytes]) -> Found:
        """Find a prefix that ranks of another geometry left: each block here needs all of them."""
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
        kept = own.lookup(chain).tokens
        # Another prefix needs other blocks of windows and states.
        own.pin(name, chain, kept if self._is_hybrid and kept else None)
        if self.others and kept < (tokens := self._left(chain).tokens):
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
        return not all(group.needs_all for group in self.own.groups)

    def _had(self, job: OffloadJob) -> int:
        """Return the tokens of the prefix that was there before a load."""
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


def _left_by_others(left_out: list[str], config: OffloadConfig, own: Shelf, name: str) -> list[Shelf]:
    """Make shelves of what ranks of another geometry have left in the same directory; what cannot be used is added."""
    if not config.directory:
        return []
    from asynckv.edges.files.leftovers import left_in
    from asynckv.edges.files.tier import FileTier

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
