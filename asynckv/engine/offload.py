"""Offload, as its owner sees it: blocks go to host memory and to files, and come back before they are needed.

Blocks are found by what they hold, not by who stored them: a caller gives the hashes of a prompt, and the longest
prefix of it that is kept anywhere is loaded. `asynckv/offload/` decides what is where, what is given up and what is
moved next; the copy plane and the record plane move it, on threads of their own. What is said here is who may call,
which blocks of the engine are in use meanwhile, and what a caller hears.

No call waits for a copy but those that are awaited, and these may be cancelled. What is under way then is drained:
blocks that are read for a store stay *lent*, and blocks that are loaded into stay *written* in the engine's ledger,
until nothing can read or write them any more.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
import numpy as np

from asynckv.arguments import integer, number, seconds, shown, text
from asynckv.config import EngineConfig, OffloadConfig
from asynckv.core.inspect import HeldBlocks
from asynckv.core.lifecycle import LifeState
from asynckv.core.rank import RankCore
from asynckv.engine.driver import Driver
from asynckv.engine.engine import Engine, Groups
from asynckv.engine.jobs import OffloadJob
from asynckv.engine.lent import LentRequest
from asynckv.engine.mover import Mover
from asynckv.engine.shelf import Shelf, reading
from asynckv.errors import (
    AsyncKVError,
    BackendError,
    ConfigError,
    EngineClosed,
    LocalProtocolError,
    PlanRefused,
)
from asynckv.geometry.blocks import BlockList, check_block_ids
from asynckv.geometry.bounds import MAX_TOKENS, NULL, Int64s
from asynckv.geometry.check import Registration
from asynckv.geometry.layout import Layout
from asynckv.geometry.packed import record_form
from asynckv.observe.events import EVENT
from asynckv.offload.found import Found
from asynckv.offload.job import JobEnded, JobKind, JobOutcome, MoveKind
from asynckv.offload.keys import as_hashes, needed
from asynckv.ports import Clock, CopyPlane, RecordPlane
from asynckv.results import Loaded, Statistics, Stored
from asynckv.scheduler import PrefillGroup

__all__ = ["Offload", "Pin"]

HOST = "host"
"""The name of the host tier's memory among what the copy plane knows."""

THROUGH_BYTES = 32 << 20
"""Of host memory through which the records of another geometry pass, per rank that has left some."""

GRACE_S = 1.0
"""How long closing waits for copies that run, unless it is told otherwise: they take milliseconds, or hang."""


COUNTED = {
    "host_evicted": "evicted.host",
    "file_evicted": "evicted.file",
    "lost_before_write_back": "not_written_back.evicted",
    "write_backs_without_room": "not_written_back.no_room",
}
"""Which of the catalogue's figures only grow, and what they are called here."""

TOLD_S = 60.0
"""At least so long is between two lines of what was moved."""

TOLD = ("bytes.", "blocks.", "tokens.", "evicted.", "not_written_back.", "records_lost", "moves_failed", "lookup")
"""Which counters these lines have."""

GAUGES = ("host_blocks", "file_blocks", "to_write_back", "jobs", "pins", "moves", "moves_in_doubt")


class Pin:
    """What is kept from being given up, until it is released."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let go; harmless a second time."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Offload:
    """What one rank keeps of its blocks outside of the accelerator.

    Use it as an async context manager inside of its engine's, or call `start` and `aclose`; an engine that ends closes
    it first. It belongs to the engine's event loop, and every method raises `WrongThread` elsewhere.

    Ranks of one engine have one each, and are told the same in the same order. A prefix is usable if every rank has it:
    take the least `Found.tokens`, and the least `Loaded.num_tokens`.

    Args:
        config: Checked configuration.
        engine: Whose blocks these are; started before this is.
        copies: Copy plane; NIXL if left out.
        records: Record plane; files of `config.directory` if left out.
        serve: Makes the host tier's own engine of `config.network`; for tests.
        leftovers: Finds what ranks of another geometry have left in files; for tests.

    Attributes:
        network: The host tier's own engine, by which stored blocks are lent; None without `config.network`.

    Raises:
        ConfigError: A block size is not a multiple of `hash_tokens`, a group cannot be kept, or the host tier is too
            small; names the numbers and the remedy.
    """

    def __init__(
        self,
        config: OffloadConfig,
        engine: Engine,
        *,
        copies: CopyPlane | None = None,
        records: RecordPlane | None = None,
        serve: Callable[[EngineConfig, Registration], Engine] = Engine,
        leftovers: Callable[[OffloadConfig, Shelf, str], list[Shelf]] | None = None,
    ) -> None:
        if not isinstance(config, OffloadConfig):
            raise ConfigError(f"config is {shown(config)}; it must be an OffloadConfig")
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is {shown(engine)}; it must be an Engine")
        self.config, self.engine = config, engine
        self.network: Engine | None = None
        self._serve, self._leftovers = serve, leftovers or _left_by_others
        layout = engine.registration.layout
        self._own = Shelf(
            HOST,
            record_form(layout),
            config,
            host_bytes=config.host_bytes,
            file_bytes=config.file_bytes,
            records=records,
        )
        self._others: list[Shelf] = []
        """What ranks of another geometry have left: all of them are needed for a prefix."""
        self._catalogue, self._groups, self._kept = self._own.catalogue, self._own.groups, self._own.kept
        self._align, self._copies = self._own.align, copies
        self._driver: Driver | None = None
        self._closing: asyncio.Task[tuple[HeldBlocks, ...]] | None = None
        self._leases: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        """Held while another thread takes memory and opens files."""

    # -- life ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Take the memory, open the files, and find out what they hold.

        Raises:
            BackendError: The memory, the disk's space or NIXL is not to be had, or another process has the directory;
                nothing is left running.
            EngineClosed: The engine does not run.
        """
        engine, config = self.engine, self.config
        if self._driver is not None:
            raise LocalProtocolError("the offload was started before; make a new one")
        driver = self._driver = engine.attach(self)
        self._mover, began = Mover(driver, config.held_s), driver.clock.now()
        self._mover.shelves, self._mover.on_moved = (self._own,), self._tell_moved
        self._told_at, self._told = began, Counter[str]()
        try:
            async with self._opening:
                found = await self._open()
            if config.network is not None:
                self.network = self._serve(config.network, Registration(self._own.layout, (self._own.memory,)))
                await self.network.start()
            if self._closing is not None or driver.life.state is not LifeState.RUNNING:
                raise EngineClosed("the engine ended while its offload started")
            self._take(engine)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._let_go_of_planes(0.0)
            if self in driver.guests:
                driver.guests.remove(self)
            raise
        self._mover.cause = ""
        driver.recorder.event(
            "info",
            EVENT.OFFLOAD_STARTED,
            host_bytes=config.host_bytes,
            file_bytes=config.file_bytes,
            blocks_found=found,
            seconds=round(driver.clock.now() - began, 6),
            tiers=self.describe(),
        )
        self._mover.pump()

    def _take(self, engine: Engine) -> None:
        """Use the engine's memory, as it is registered now."""
        layout = engine.registration.layout
        if record_form(layout) != self._own.form:
            raise LocalProtocolError(
                "the engine's blocks have another form than those that the offload keeps; make a new Offload"
            )
        self._own.use(layout)
        if self._others:
            reading(layout, self._others)
        if self._copies is None:
            self._copies = _nixl_copies(f"{self._name}-{engine.memory_epoch}")
        mover = self._mover
        far = {shelf.far: [shelf.memory.memory] for shelf in mover.shelves if shelf.memory is not None}
        self._copies.start(layout.memories, far, mover.on_copies)
        mover.copies, mover.is_copying = self._copies, True

    @property
    def _name(self) -> str:
        """Of NIXL's agents; unique."""
        layout = self._layout
        return f"{self.engine.config.engine_id}-tp{layout.tp_rank}-pp{layout.pp_stage}-{self.engine.incarnation[:16]}"

    async def _open(self) -> int:
        """Take the memory, and open the files, away from the loop; returns how many blocks these have."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, self._open_all, loop)
        try:
            found, left_out = await asyncio.shield(work)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):  # nobody may close what is still being opened
                await asyncio.wait([work])
            raise
        shelves = self._mover.shelves
        self._mover.shelves = (self._own, *self._others)
        if left_out:
            assert self._driver is not None
            self._driver.recorder.event("info", EVENT.OFFLOAD_LEFT_OUT, cause=left_out)
        for shelf in shelves:
            if shelf not in self._mover.shelves:
                await shelf.close()
        self._mover.is_open = True
        for shelf in self._mover.shelves:
            if shelf.records is not None:
                self._mover.on_records(shelf)  # what was not heard meanwhile
        return found

    def _open_all(self, loop: asyncio.AbstractEventLoop) -> tuple[int, str]:
        """Take memory page by page, take space on disks, and read what is there: each takes seconds if there is much.

        Runs on a thread of its own. Says how many blocks there are, and why what others have left is not used.
        """
        own, config, mover = self._own, self.config, self._mover
        own.take_memory(self._layout)
        if own.records is None and config.directory:
            own.records = _files(config, own, self._name)
        found = own.open_files(partial(mover.on_records, own), loop)
        try:
            for shelf in self._leftovers(config, own, self._name):
                mover.shelves = (*mover.shelves, shelf)
                shelf.take_memory(self._layout)
                found += shelf.open_files(partial(mover.on_records, shelf), loop)
            opened = mover.shelves[1:]
            self._others = reading(self._layout, opened) if opened else []
        except (BackendError, ConfigError) as exc:
            return found, str(exc)
        return found, ""

    async def aclose(self, timeout_s: float | None = None) -> tuple[HeldBlocks, ...]:
        """Take nothing new, cancel loads and stores, wait until nothing is copied any more, and let go. Idempotent.

        What is in files stays there; what is in host memory alone is lost.

        Args:
            timeout_s: How long copies that run are waited for (a second if left out), and promises of what is lent.

        Returns:
            What was not waited for.

        Raises:
            BackendError: Something may still write the memory. Call again to wait again.
        """
        if self._driver is None:
            return ()
        self._here(self.aclose)
        timeout = None if timeout_s is None else number("timeout_s", timeout_s, 0)
        if self._closing is None or (self._closing.done() and self._closing.exception() is not None):
            self._closing = asyncio.get_running_loop().create_task(self._close(timeout))
        left: tuple[HeldBlocks, ...] = ()
        with anyio.CancelScope(shield=True):
            left = await asyncio.shield(self._closing)
        return left

    async def _close(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]:
        driver = self._driver
        assert driver is not None
        was_open, self._mover.cause = not self._mover.cause, self._mover.cause or "it was closed"
        left = await self._mover.end_work(GRACE_S if timeout_s is None else timeout_s)
        await self._let_go_of_planes(timeout_s)
        self._mover.forsake()
        if self in driver.guests:
            driver.guests.remove(self)
        if was_open:
            self._tell_moved(0.0)
            driver.recorder.event("info", EVENT.OFFLOAD_STOPPED, counters=self._said())
        driver.soon()
        return left

    async def _let_go_of_planes(self, timeout_s: float | None) -> None:
        """End all planes; nothing touches any memory afterwards."""
        async with self._opening:
            pass
        if self.network is not None:
            await self.network.aclose(timeout_s)
        await self._mover.let_go_of_device()
        for shelf in self._mover.shelves:
            await shelf.close()

    def _tell_moved(self, least_s: float = TOLD_S) -> None:
        """Log what was moved, now and then."""
        assert self._driver is not None
        now, before = self._clock.now(), self._told
        if now - self._told_at < least_s:
            return
        self._told = Counter(self._said())
        counters = {name: count for name, count in (self._told - before).items() if name.startswith(TOLD)}
        if not any(name.startswith("bytes.") for name in counters):
            self._told = before
            return
        seconds, self._told_at = round(now - self._told_at, 6), now
        said = self._catalogue.statistics()
        blocks = {tier: said[f"{tier}_blocks"] for tier in ("host", "file") if f"{tier}_blocks" in said}
        self._driver.recorder.event("info", EVENT.OFFLOAD_MOVED, seconds=seconds, counters=counters, blocks=blocks)

    # -- what the engine asks of its guest -----------------------------------------------------------

    async def let_go(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]:
        """The engine ends, or is suspended: use its memory no more."""
        driver = self._driver
        assert driver is not None
        if driver.life.state is not LifeState.SUSPENDING:
            return await self.aclose(timeout_s)
        self._mover.cause = "its engine is suspended"
        left = await self._mover.end_work(GRACE_S if timeout_s is None else timeout_s)
        await self._mover.let_go_of_device()
        self._mover.forsake((MoveKind.STORE, MoveKind.LOAD))
        return left

    def take_again(self) -> None:
        """The engine was resumed: use its memory as it is registered now."""
        try:
            self._take(self.engine)
        except (LocalProtocolError, BackendError) as exc:
            self._mover.cause = str(exc)
            assert self._driver is not None
            self._driver.recorder.event("error", EVENT.OFFLOAD_BROKEN, cause=str(exc))
        else:
            self._mover.cause = ""
            self._mover.pump()

    def counters(self) -> dict[str, int]:
        """What is told with the engine's own, which answers for it."""
        said = self._catalogue.statistics()
        now = {"limit_bytes.host": self.config.host_bytes, "limit_bytes.file": self.config.file_bytes}
        for name, of in (("kept", "blocks"), ("kept_bytes", "bytes"), ("leaving", "leaving")):
            now |= {f"{name}.{tier}": said.get(f"{tier}_{of}", 0) for tier in ("host", "file")}
        return {f"offload.{name}": count for name, count in (self._said() | now).items()}

    # -- questions: answered at once -----------------------------------------------------------------

    def lookup(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> Found:
        """Say how long a prefix of a prompt could be loaded. Microseconds; nothing is changed or waited for.

        Args:
            hashes: One per `hash_tokens` tokens, each covering all tokens before it as well.
            num_tokens: Consider no more tokens than these; a scheduler that computes the last token again gives one
                less than the prompt has.

        Raises:
            LocalProtocolError: These are no hashes.
        """
        self._here(self.lookup)
        self._mover.counts["lookups"] += 1
        chain = self._chain(hashes, num_tokens)
        found = self._found(chain)
        self._mover.counts["tokens.looked_up"] += len(chain) * self.config.hash_tokens
        self._mover.counts["tokens.found"] += found.tokens
        self._mover.counts["lookup_hits"] += found.tokens > 0
        return found

    def would_wait(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> bool:
        """Say whether loading that prefix would wait for files, or for a store that is under way."""
        self._here(self.would_wait)
        return self._found(self._chain(hashes, num_tokens)).would_wait

    def _found(self, chain: list[bytes]) -> Found:
        """What is kept on the rank's own shelf, or on those of others if that is more."""
        found = self._catalogue.lookup(chain)
        if self._others and found.tokens < len(chain) * self.config.hash_tokens:
            there = min((shelf.catalogue.lookup(chain) for shelf in self._others), key=lambda each: each.tokens)
            tokens = there.tokens // self._align * self._align
            if tokens > found.tokens:
                return msgspec.structs.replace(there, tokens=tokens, ready_tokens=found.ready_tokens)
        return found

    def touch(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> None:
        """Say that a prompt is wanted: what is kept of it is given up later."""
        self._here(self.touch)
        self._catalogue.touch(self._chain(hashes, num_tokens))

    def pin(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> Pin:
        """Keep what is kept of a prompt, until the pin is released or left (`with offload.pin(hashes):`)."""
        self._here(self.pin)
        name = f"pin-{next(self._mover.ids)}"
        self._catalogue.pin(name, self._chain(hashes, num_tokens))
        return Pin(lambda: self._unpin(name))

    def _unpin(self, name: str) -> None:
        if self._catalogue.unpin(name) and not self._mover.cause:
            self._mover.soon()

    def evict(self, hashes: Sequence[str | bytes] | None = None) -> int:
        """Give up what is kept of a prompt, or all that is kept, unless it is in use; returns how many blocks."""
        self._here(self.evict)
        count = self._catalogue.evict(None if hashes is None else self._chain(hashes, None))
        self._mover.soon()
        return count

    # -- moves: awaited, and given up by cancelling --------------------------------------------------

    async def store(self, request_id: str, groups: Groups, hashes: Sequence[str | bytes]) -> Stored:
        """Copy blocks to the host tier; returns when they are there, and nobody reads the blocks any more.

        What is there already is not copied, and what another store copies just now is waited for. From the host tier
        they go on to the files, in the background.

        Args:
            request_id: For people, and for `cancel` and `returned`; several stores may have the same.
            groups: Per cache group `(first_token, block ids)`, as for `Engine.pull`. `None` in the list is a place of
                which nothing is to be stored. Blocks that end after the last hash are not whole, and left out.
            hashes: Of the whole prompt, from its start.

        Raises:
            EngineClosed: The offload or its engine is closed or suspended.
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: A block is being written, or an argument is malformed.
            PullCancelled: It was given up (`cancel`); the blocks are the engine's again.
        """
        self._here(self.store)
        request_id, chain = text("request_id", request_id), as_hashes(hashes)
        blocks = check_block_ids(self.engine.registration.layout, groups)
        tokens = len(chain) * self.config.hash_tokens
        wanted: list[list[int]] = []
        for index in self._kept:
            (first, ids), size = blocks[index], self._layout.groups[index].block_size
            start, end = first // size, tokens // size
            wanted.append([start + i for i, block in enumerate(ids[: max(end - start, 0)].tolist()) if block != NULL])
        job = self._begin(JobKind.STORE, request_id, blocks, chain, tokens, wanted, None)
        ended = await self._outcome(job)
        if ended.outcome is JobOutcome.CANCELLED:
            raise job.error()
        missed = sum(map(len, ended.missing))
        seconds = self._clock.now() - job.begun_at
        return Stored(request_id, ended.known + ended.blocks, ended.blocks, missed, job.num_bytes, seconds)

    async def load(
        self,
        request_id: str,
        groups: Groups,
        hashes: Sequence[str | bytes],
        *,
        num_tokens: int,
        timeout_s: float | None = None,
    ) -> Loaded:
        """Fill blocks with what is kept of a prompt, from files if need be.

        A miss is no error: the result says how many tokens are in place. What lies above them is to be computed, and
        the blocks given for that may have been written in part.

        Args:
            request_id: One load at a time per id.
            groups: Per cache group `(first_token, block ids)`, as for `Engine.pull`: what is before `first_token`,
                where a block has to begin, is there already. `None` is a place where nothing is wanted.
            hashes: Of the whole prompt, from its start.
            num_tokens: Tokens that are wanted: `Found.tokens`, or less by whole blocks of all groups.
            timeout_s: What is not copied by then is a miss; the configuration's if left out.

        Raises:
            EngineClosed: The offload or its engine is closed or suspended.
            PlanRefused: The blocks do not fit the layout or the tokens.
            LocalProtocolError: A block is in use, the request is being loaded already, or an argument is malformed.
            PullError: A copy failed so that it may still write; says which blocks are held, as for a pull.
                `PullCancelled` if the load was given up (`cancel`).
        """
        self._here(self.load)
        request_id, chain = text("request_id", request_id), as_hashes(hashes)
        timeout = self.config.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        tokens = self._whole(num_tokens, chain)
        if len(set(chain)) < len(chain):
            raise LocalProtocolError("two of the hashes are the same; each has to cover all tokens before it as well")
        if any(job.request_id == request_id and job.kind is JobKind.LOAD for job in self._mover.jobs.values()):
            raise LocalProtocolError(f"request {request_id[:200]!r} is being loaded already; cancel it first")
        blocks = list(check_block_ids(self.engine.registration.layout, groups, tokens))
        wanted = []
        for group, index in zip(self._groups, self._kept, strict=True):
            first, ids = blocks[index]
            if first % group.block_size and first < tokens:
                raise PlanRefused(
                    f"group {index} ({group.name!r}): the first token {first} is inside a block of {group.block_size} "
                    f"tokens; blocks are loaded whole, so begin at token {first - first % group.block_size}",
                    request_id=request_id,
                )
            start, places = first // group.block_size, needed(group, first, tokens)
            wanted.append([j for j in places if 0 <= j - start < len(ids) and ids[j - start] != NULL])
            # Larger blocks of another geometry hold more than is wanted: the rest is nowhere to be written.
            only = np.full_like(ids, NULL)
            at = np.asarray(wanted[-1], np.int64) - start
            only[at] = ids[at]
            blocks[index] = first, only
        job = self._begin(JobKind.LOAD, request_id, blocks, chain, tokens, wanted, timeout)
        ended = await self._outcome(job)
        if ended.is_held or ended.outcome is JobOutcome.CANCELLED:
            raise job.error()
        loaded = self._loaded_tokens(job, ended, tokens)
        self._mover.counts["tokens.loaded"] += loaded
        self._mover.counts["tokens.missed"] += tokens - loaded
        seconds_ = self._clock.now() - job.begun_at
        return Loaded(request_id, loaded, ended.blocks, job.num_bytes, job.file_bytes, seconds_)

    async def lend(
        self,
        request_id: str,
        hashes: Sequence[str | bytes],
        *,
        num_tokens: int,
        lease_s: float | None = None,
        readers: int = 1,
    ) -> dict[str, Any]:
        """Lend what is kept of a prompt to engines of other processes, which pull it as any other request.

        What is in files alone is brought to the host tier first. All of it is pinned until the lease has ended.

        Args:
            request_id: For people, and for the decode side.
            hashes: Of the whole prompt, from its start; texts travel along, for `Engine.pull(hashes=)`.
            num_tokens: Tokens that are lent: `Found.tokens`, or less by whole blocks of all groups.
            lease_s: As for `PrefillGroup.make_params`.
            readers: As for `Engine.lend`.

        Returns:
            Params, as `PrefillGroup.make_params` makes them.

        Raises:
            LocalProtocolError: There is no `config.network`; or not all of it is kept (any more).
            EngineClosed: The offload or its engine is closed.
        """
        self._here(self.lend)
        chain = as_hashes(hashes)
        tokens = self._whole(num_tokens, chain)
        if (host := self.network) is None:
            raise LocalProtocolError("nothing can be lent without OffloadConfig(network=EngineConfig(...))")
        if self._layout.tp_size * self._layout.pp_size > 1:
            raise LocalProtocolError("stored blocks are lent by engines of one rank: ranks choose their slots apart")
        job = self._begin(JobKind.LOAD, request_id, (), chain, tokens, None, self.config.timeout_s)
        ended = await self._outcome(job)
        pin = f"{job.job_id}-lent"
        pieces = {piece.group: piece for piece in self._catalogue.pin(pin, chain, tokens)}
        try:
            groups = []
            for at, group in enumerate(self._groups):
                places, slots = needed(group, 0, tokens), list[int | None]()
                if (piece := pieces.get(at)) is not None:
                    known = dict(zip(piece.positions, piece.host_slots, strict=True))
                    slots = [known.get(place) for place in range(places.stop)]
                if len(slots) < places.stop or any(slots[place] is None for place in places):
                    raise LocalProtocolError(
                        f"request {request_id[:200]!r}: not all of its {tokens} tokens are kept any more "
                        f"({ended.cause or 'they were given up'}); look them up again"
                    )
                groups.append((0, slots))
            texts = [h for h in hashes if isinstance(h, str)]
            scheduler = PrefillGroup(host.config.engine_id, [host.endpoint], lease=host.config.lease)
            params = scheduler.make_params(
                request_id,
                groups,
                tokens,
                lease_s=lease_s,
                written=True,
                hashes=texts if len(texts) == len(chain) else (),
                hash_tokens=self.config.hash_tokens if len(texts) == len(chain) else 0,
            )
            lent = host.lend(params, readers=readers)
        except BaseException:
            self._unpin(pin)
            raise
        self._mover.counts["lent"] += 1
        task = asyncio.get_running_loop().create_task(self._keep(lent, pin))
        self._leases.add(task)
        task.add_done_callback(self._leases.discard)
        return params

    async def _keep(self, lent: LentRequest, pin: str) -> None:
        """Keep what is lent until nobody may read it any more."""
        await lent.wait_released()
        self._unpin(pin)

    def cancel(self, request_id: str) -> bool:
        """Give up the stores and the load of a request; False if there are none."""
        self._here(self.cancel)
        jobs = [job for job in self._mover.jobs.values() if job.request_id == request_id and job.ended is None]
        self._mover.give_up(jobs)
        return bool(jobs)

    async def returned(self, request_id: str) -> None:
        """Wait until nothing reads or writes a request's blocks, whatever became of its stores and loads.

        What `PullError.returned` is for a load that failed, this is for a call whose task was cancelled.

        Raises:
            BlocksRetired: A copy did not end within `held_s`; the blocks must never be used again.
        """
        self._here(self.returned)
        for job in [job for job in self._mover.jobs.values() if job.request_id == request_id]:
            await job.until_returned()

    def _whole(self, num_tokens: int, chain: list[bytes]) -> int:
        """Refuse tokens that are not hashed, or end inside of a block."""
        tokens = integer("num_tokens", num_tokens, 0, len(chain) * self.config.hash_tokens)
        if tokens % self._align:
            raise LocalProtocolError(
                f"num_tokens is {tokens}, which is no end of a block in all groups; give a multiple of {self._align}, "
                f"such as Found.tokens"
            )
        return tokens

    def _begin(
        self,
        kind: JobKind,
        request_id: str,
        blocks: Sequence[BlockList],
        chain: list[bytes],
        tokens: int,
        wanted: Sequence[Sequence[int]] | None,
        timeout_s: float | None,
    ) -> OffloadJob:
        """Take the blocks, and hand a job to the catalogue; without blocks it only brings them to the host tier."""
        if self._mover.cause:
            raise EngineClosed(f"the offload takes nothing: {self._mover.cause}")
        ledger, now = self._core.ledger, self._clock.now()
        ids: dict[int, Int64s] = {}
        for index, places in zip(self._kept, wanted or (), strict=wanted is not None):
            if places:
                first, given = blocks[index]
                ids[index] = given[np.asarray(places) - first // self._layout.groups[index].block_size]
        held = ledger.check("lent" if kind is JobKind.STORE else "writing", ids)
        until = math.inf if timeout_s is None else now + timeout_s
        job = OffloadJob(f"{kind.value}-{next(self._mover.ids)}", request_id, kind, blocks, held, now, until)
        if kind is JobKind.STORE:
            self._catalogue.store(job.job_id, chain, tokens, positions=wanted)
            job.parts[self._own.far] = None
        else:
            for shelf in self._sources(chain, tokens, blocks):
                where = wanted if shelf is self._own else _by_their_blocks(shelf, self._own, blocks, tokens)
                shelf.catalogue.load(job.job_id, chain, tokens, positions=where, until=until)
                job.parts[shelf.far] = None
        ledger.hold(job.job_id, "lent" if kind is JobKind.STORE else "writing", request_id, held, now)
        self._core.inspect.guests[job.job_id] = job
        self._mover.jobs[job.job_id] = job
        self._mover.pump()
        return job

    def _sources(self, chain: list[bytes], tokens: int, blocks: Sequence[BlockList]) -> Sequence[Shelf]:
        """Say of which shelves a prefix is loaded; what is only to be in the host tier is not there on others'."""
        found = self._catalogue.lookup(chain[: tokens // self.config.hash_tokens])
        if blocks and found.tokens < tokens and all(tokens % shelf.align == 0 for shelf in self._others):
            if self._others and self._found(chain[: tokens // self.config.hash_tokens]).tokens >= tokens:
                return self._others
        return (self._own,)

    async def _outcome(self, job: OffloadJob) -> JobEnded:
        try:
            return await job.outcome
        except asyncio.CancelledError:
            if job.ended is None:
                self._mover.give_up([job])
            raise

    def _loaded_tokens(self, job: OffloadJob, ended: JobEnded, tokens: int) -> int:
        """Say how long a prefix is in place in all groups: all, what precedes the first gap, or what was there."""
        if all(part is not None and not any(part.missing) for part in job.parts.values()):
            return tokens
        had = min(min(job.blocks[index][0], tokens) for index in self._kept) // self._align * self._align
        if any(group.is_state or group.window for group in self._groups):
            return had  # a shorter prefix would need other blocks
        ends = [tokens]
        for shelf in self._mover.shelves:
            if (part := job.parts.get(shelf.far)) is None:
                continue
            if part.outcome is JobOutcome.MISSING and not part.blocks:
                return had  # nothing was moved
            ends += [min(m) * g.block_size for g, m in zip(shelf.groups, part.missing, strict=True) if m]
        return max(min(ends) // self._align * self._align, had)

    # -- what is said --------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Take a snapshot: counters and gauges of this offload; the loop's are its engine's."""
        self._here(self.statistics)
        said = self._catalogue.statistics()
        gauges = {name: said.get(name, 0) for name in GAUGES}
        gauges["bytes_under_way"] = sum(said[f"{kind.value}_bytes_under_way"] for kind in MoveKind)
        return Statistics(self._said(), gauges, (), 0.0, 0.0, {})

    def _said(self) -> dict[str, int]:
        said, counters = self._catalogue.statistics(), dict(self._mover.counts)
        counters |= {name: said.get(of, 0) for of, name in COUNTED.items()}
        for plane, name in ((self._copies, "copies"), (self._own.records, "files")):
            if plane is not None:
                counters |= {f"{name}.{key}": count for key, count in plane.statistics().items()}
        return counters

    def describe(self) -> dict[str, str]:
        """Name versions, transports and modes in use."""
        said = {} if self._copies is None else dict(self._copies.describe())
        if self._own.memory is not None and self._own.memory.how:
            said["host_memory"] = self._own.memory.how
        if self._own.records is not None:
            said |= self._own.records.describe()
        return said

    def check_integrity(self) -> None:
        """Audit what is kept against what is under way.

        Raises:
            AsyncKVError: Something does not add up; a bug to report, with this message.
        """
        self._here(self.check_integrity)
        wrong = [text for shelf in self._mover.shelves for text in shelf.catalogue.check_integrity()]
        idle = {job_id for job_id in self._mover.jobs if self._core.ledger.get(job_id) is None}
        wrong += [f"job {job_id} holds no blocks" for job_id in sorted(idle) if self._mover.jobs[job_id].ids]
        if wrong:
            raise AsyncKVError("integrity: " + "; ".join(wrong))

    # -- inside --------------------------------------------------------------------------------------

    @property
    def _layout(self) -> Layout:
        return self.engine.registration.layout

    @property
    def _core(self) -> RankCore:
        assert self._driver is not None
        return self._driver.core

    @property
    def _clock(self) -> Clock:
        assert self._driver is not None
        return self._driver.clock

    def _here(self, call: Callable[..., Any]) -> None:
        if self._driver is None:
            raise EngineClosed("the offload is not started; use `async with Offload(config, engine)`")
        self._driver.home.here(call)

    def _chain(self, hashes: Sequence[str | bytes], num_tokens: int | None) -> list[bytes]:
        chain = as_hashes(hashes)
        if num_tokens is not None:
            return chain[: integer("num_tokens", num_tokens, 0, MAX_TOKENS) // self.config.hash_tokens]
        return chain


def _nixl_copies(name: str) -> CopyPlane:
    from asynckv.edges.copies import NixlCopies

    return NixlCopies(name)


def _folder(config: OffloadConfig, own: Shelf) -> Path:
    """Where a rank keeps its files: each geometry has a directory of its own, for what it keeps has another form."""
    form = own.form
    stage = f"-pp{form.pp_stage}of{form.pp_size}" if form.pp_size > 1 else ""
    return Path(config.directory) / f"tp{form.tp_rank}of{form.tp_size}{stage}-{own.form_id}"


def _files(config: OffloadConfig, own: Shelf, name: str) -> RecordPlane:
    from asynckv.edges.file_tier import FileTier

    return FileTier(_folder(config, own), config.file_bytes, name=name)


def _left_by_others(config: OffloadConfig, own: Shelf, name: str) -> list[Shelf]:
    """Make shelves of what ranks of another geometry have left in the same directory."""
    if not config.directory:
        return []
    from asynckv.edges.file_tier import FileTier
    from asynckv.edges.leftovers import left_in

    shelves = []
    for at, left in enumerate(left_in(Path(config.directory), own.form)):
        files = FileTier(left.folder, left.num_bytes, name=f"{name}-left{at}")
        through = max(THROUGH_BYTES, 16 * left.form.memories[0].length * len(left.form.groups))
        far = f"left{at}"
        shelves.append(
            Shelf(far, left.form, config, host_bytes=through, file_bytes=left.num_bytes, records=files, is_own=False)
        )
    return shelves


def _by_their_blocks(shelf: Shelf, own: Shelf, blocks: Sequence[BlockList], tokens: int) -> list[list[int]]:
    """Per group of another geometry, which blocks are needed of it."""
    firsts = {group.namespace: blocks[index][0] for group, index in zip(own.groups, own.kept, strict=True)}
    return [list(needed(group, firsts.get(group.namespace, 0), tokens)) for group in shelf.groups]
