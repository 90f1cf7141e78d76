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
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
import numpy as np

from asynckv.arguments import integer, number, seconds, shown, text
from asynckv.config import EngineConfig, OffloadConfig
from asynckv.core.events import Ending
from asynckv.core.inspect import HeldBlocks
from asynckv.core.lifecycle import LifeState
from asynckv.core.rank import RankCore
from asynckv.core.types import TransferId
from asynckv.engine.driver import Driver
from asynckv.engine.engine import Engine, Groups
from asynckv.engine.jobs import OffloadJob
from asynckv.engine.lent import LentRequest
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
from asynckv.observe.sampling import Rate
from asynckv.offload.found import Found
from asynckv.offload.job import JobEnded, JobKind, JobOutcome, JobReturned, Move, MoveKind
from asynckv.offload.keys import as_hashes, needed
from asynckv.ports import Clock, CopyOp, CopyPlane, RecordPlane, RecordsEnded, RecordsLost, TimerHandle
from asynckv.results import Loaded, Statistics, Stored
from asynckv.scheduler import PrefillGroup

__all__ = ["Offload", "Pin"]

HOST = "host"
"""The name of the host tier's memory among what the copy plane knows."""

THROUGH_BYTES = 32 << 20
"""Of host memory through which the records of another geometry pass, per rank that has left some."""

MAX_FAILURES = 10
"""That are logged at once; then one per second."""

GRACE_S = 1.0
"""How long closing waits for copies that run, unless it is told otherwise: they take milliseconds, or hang."""


COUNTERS = (
    *("stores", "loads", "lent", "lookup_tokens", "lookup_tokens_found", "loaded_tokens", "missed_tokens"),
    *(f"{kind.value}_{what}" for kind in MoveKind for what in ("bytes", "blocks")),
    *("moves_failed", "moves_doubted", "records_lost", "blocks_of_another_form", "jobs_retired"),
)
"""What is counted here; `stores_` and `loads_` with an outcome besides."""

COUNTED = frozenset(
    (
        *("lookups", "hits", "host_evicted", "file_evicted", "corrupt_or_unread"),
        *("write_backs_without_room", "lost_before_write_back"),
    )
)
"""Which of the catalogue's figures only grow."""


@dataclass(slots=True)
class _Posted:
    """A move that has not ended."""

    shelf: Shelf
    move: Move
    is_doubtful: bool = False


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
        self._is_copying = False
        self._driver: Driver | None = None
        self._cause = "it is not started; use `async with Offload(config, engine)`"
        """Why nothing is taken; empty while something is."""
        self._jobs: dict[str, OffloadJob] = {}
        """Those that have not ended, or whose blocks something may still touch."""
        self._posted: dict[TransferId, _Posted] = {}
        """Moves that have not ended, those in doubt as well."""
        self._ids = itertools.count(1)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._timer: TimerHandle | None = None
        self._is_due = False
        self._closing: asyncio.Task[tuple[HeldBlocks, ...]] | None = None
        self._idle = asyncio.Event()
        self._leases: set[asyncio.Task[None]] = set()
        self._failures = Rate(1.0, MAX_FAILURES)

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
        began = driver.clock.now()
        try:
            self._own.take_memory()
            found = await self._open_files()
            self._take(engine)
            if config.network is not None:
                self.network = self._serve(config.network, Registration(self._own.layout, (self._own.memory,)))
                await self.network.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._let_go_of_planes(0.0)
            driver.guests.remove(self)
            raise
        self._cause = ""
        driver.recorder.event(
            "info",
            EVENT.OFFLOAD_STARTED,
            host_bytes=config.host_bytes,
            file_bytes=config.file_bytes,
            blocks_found=found,
            seconds=round(driver.clock.now() - began, 6),
            tiers=self.describe(),
        )
        self._pump()

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
        far = {shelf.far: [shelf.memory.memory] for shelf in self._shelves if shelf.memory is not None}
        self._copies.start(layout.memories, far, self._on_copies)
        self._is_copying = True

    @property
    def _name(self) -> str:
        """Of NIXL's agents; unique."""
        layout = self._layout
        return f"{self.engine.config.engine_id}-tp{layout.tp_rank}-pp{layout.pp_stage}-{self.engine.incarnation[:16]}"

    @property
    def _shelves(self) -> tuple[Shelf, ...]:
        return self._own, *self._others

    async def _open_files(self) -> int:
        """Open the files, this rank's own and what others have left; returns how many blocks they have."""
        own, config, layout = self._own, self.config, self._layout
        if own.records is None and config.directory:
            own.records = _files(config, own, self._name)
        found = own.open_files(partial(self._on_records, own))
        opened: list[Shelf] = []
        try:
            for shelf in self._leftovers(config, own, self._name):
                opened.append(shelf)
                shelf.take_memory()
                found += shelf.open_files(partial(self._on_records, shelf))
            self._others = reading(layout, opened) if opened else []
        except (BackendError, ConfigError) as exc:
            assert self._driver is not None
            self._driver.recorder.event("info", EVENT.OFFLOAD_LEFT_OUT, cause=str(exc))
        for shelf in opened:
            if shelf not in self._others:
                await shelf.close()
        return found

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
        was_open, self._cause = not self._cause, self._cause or "it was closed"
        left = await self._end_work(GRACE_S if timeout_s is None else timeout_s)
        await self._let_go_of_planes(timeout_s)
        self._forsake()
        if self in driver.guests:
            driver.guests.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        if was_open:
            driver.recorder.event("info", EVENT.OFFLOAD_STOPPED, counters=self._said())
        driver.soon()
        return left

    async def _end_work(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        """Cancel what is asked for, and wait for what runs; returns who holds blocks still."""
        driver = self._driver
        assert driver is not None
        for job in list(self._jobs.values()):
            self._give_up(job)
        until = driver.clock.now() + timeout_s
        handle = driver.clock.call_at(until, self._idle.set)
        try:
            while any(not posted.is_doubtful for posted in self._posted.values()) and driver.clock.now() < until:
                self._idle.clear()
                await self._idle.wait()
        finally:
            handle.cancel()
        now = driver.clock.now()
        return tuple(hold for hold in driver.core.inspect.holds(now) if hold.pull_id in self._jobs)

    async def _let_go_of_planes(self, timeout_s: float | None) -> None:
        """End all planes; nothing touches any memory afterwards."""
        if self.network is not None:
            await self.network.aclose(timeout_s)
        await self._let_go_of_device()
        for shelf in self._shelves:
            await shelf.close()

    async def _let_go_of_device(self) -> None:
        if self._copies is not None and self._is_copying:
            await self._copies.quiesce()
            self._copies.close()
            self._is_copying = False

    def _forsake(self, kinds: Sequence[MoveKind] = tuple(MoveKind)) -> None:
        """Moves whose plane is gone have ended: nothing touches their blocks any more."""
        for transfer_id, posted in list(self._posted.items()):
            if posted.move.kind in kinds:
                self._ended(transfer_id, Ending.FAILED, "the plane was closed")
        self._pump()
        if self._cause:
            for job in list(self._jobs.values()):
                job.closed()
                self._release(job)

    # -- what the engine asks of its guest -----------------------------------------------------------

    async def let_go(self, timeout_s: float | None) -> tuple[HeldBlocks, ...]:
        """The engine ends, or is suspended: use its memory no more."""
        driver = self._driver
        assert driver is not None
        if driver.life.state is not LifeState.SUSPENDING:
            return await self.aclose(timeout_s)
        self._cause = "its engine is suspended"
        left = await self._end_work(GRACE_S if timeout_s is None else timeout_s)
        await self._let_go_of_device()
        self._forsake((MoveKind.STORE, MoveKind.LOAD))
        return left

    def take_again(self) -> None:
        """The engine was resumed: use its memory as it is registered now."""
        try:
            self._take(self.engine)
        except (LocalProtocolError, BackendError) as exc:
            self._cause = str(exc)
            assert self._driver is not None
            self._driver.recorder.event("error", EVENT.OFFLOAD_BROKEN, cause=str(exc))
        else:
            self._cause = ""
            self._pump()

    def counters(self) -> dict[str, int]:
        """What is told with the engine's own."""
        return {f"offload.{name}": count for name, count in self._said().items()}

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
        self._counts["lookups"] += 1
        chain = self._chain(hashes, num_tokens)
        found = self._found(chain)
        self._counts["lookup_tokens"] += len(chain) * self.config.hash_tokens
        self._counts["lookup_tokens_found"] += found.tokens
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
        name = f"pin-{next(self._ids)}"
        self._catalogue.pin(name, self._chain(hashes, num_tokens))
        return Pin(lambda: self._unpin(name))

    def _unpin(self, name: str) -> None:
        if self._catalogue.unpin(name) and not self._cause:
            self._soon()

    def evict(self, hashes: Sequence[str | bytes] | None = None) -> int:
        """Give up what is kept of a prompt, or all that is kept, unless it is in use; returns how many blocks."""
        self._here(self.evict)
        count = self._catalogue.evict(None if hashes is None else self._chain(hashes, None))
        self._soon()
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
        if any(job.request_id == request_id and job.kind is JobKind.LOAD for job in self._jobs.values()):
            raise LocalProtocolError(f"request {request_id[:200]!r} is being loaded already; cancel it first")
        blocks = check_block_ids(self.engine.registration.layout, groups, tokens)
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
        job = self._begin(JobKind.LOAD, request_id, blocks, chain, tokens, wanted, timeout)
        ended = await self._outcome(job)
        if ended.is_held or ended.outcome is JobOutcome.CANCELLED:
            raise job.error()
        loaded = self._loaded_tokens(job, ended, tokens)
        self._counts["loaded_tokens"] += loaded
        self._counts["missed_tokens"] += tokens - loaded
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
        self._counts["lent"] += 1
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
        jobs = [job for job in self._jobs.values() if job.request_id == request_id and job.ended is None]
        for job in jobs:
            self._give_up(job)
        return bool(jobs)

    async def returned(self, request_id: str) -> None:
        """Wait until nothing reads or writes a request's blocks, whatever became of its stores and loads.

        What `PullError.returned` is for a load that failed, this is for a call whose task was cancelled.

        Raises:
            BlocksRetired: A copy did not end within `held_s`; the blocks must never be used again.
        """
        self._here(self.returned)
        for job in [job for job in self._jobs.values() if job.request_id == request_id]:
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
        if self._cause:
            raise EngineClosed(f"the offload takes nothing: {self._cause}")
        ledger, now = self._core.ledger, self._clock.now()
        ids: dict[int, Int64s] = {}
        for index, places in zip(self._kept, wanted or (), strict=wanted is not None):
            if places:
                first, given = blocks[index]
                ids[index] = given[np.asarray(places) - first // self._layout.groups[index].block_size]
        held = ledger.check("lent" if kind is JobKind.STORE else "writing", ids)
        until = math.inf if timeout_s is None else now + timeout_s
        job = OffloadJob(f"{kind.value}-{next(self._ids)}", request_id, kind, blocks, held, now, until)
        if kind is JobKind.STORE:
            self._catalogue.store(job.job_id, chain, tokens, positions=wanted)
            job.parts[self._own.far] = None
        else:
            for shelf in self._sources(chain, tokens):
                where = wanted if shelf is self._own else _by_their_blocks(shelf, self._own, blocks, tokens)
                shelf.catalogue.load(job.job_id, chain, tokens, positions=where, until=until)
                job.parts[shelf.far] = None
        ledger.hold(job.job_id, "lent" if kind is JobKind.STORE else "writing", request_id, held, now)
        self._core.inspect.guests[job.job_id] = job
        self._jobs[job.job_id] = job
        self._counts[f"{kind.value}s"] += 1
        self._pump()
        return job

    def _sources(self, chain: list[bytes], tokens: int) -> Sequence[Shelf]:
        """Say of which shelves a prefix is loaded."""
        found = self._catalogue.lookup(chain[: tokens // self.config.hash_tokens])
        if found.tokens < tokens and all(tokens % shelf.align == 0 for shelf in self._others):
            if self._others and self._found(chain[: tokens // self.config.hash_tokens]).tokens >= tokens:
                return self._others
        return (self._own,)

    async def _outcome(self, job: OffloadJob) -> JobEnded:
        try:
            return await job.outcome
        except asyncio.CancelledError:
            if job.ended is None:
                self._give_up(job)
            raise

    def _give_up(self, job: OffloadJob) -> None:
        """Begin nothing more of a job, and wait for what runs."""
        for shelf in self._shelves:
            shelf.catalogue.cancel(job.job_id)
        if job.kind is JobKind.LOAD and self._copies is not None:
            # A store's copies go on: others may wait for them.
            for transfer_id, posted in self._posted.items():
                if posted.move.job_id == job.job_id and posted.move.kind is MoveKind.LOAD:
                    self._copies.cancel(transfer_id)
        self._pump()

    def _loaded_tokens(self, job: OffloadJob, ended: JobEnded, tokens: int) -> int:
        """Say how long a prefix is in place in all groups: all, what precedes the first gap, or what was there."""
        if all(part is not None and not any(part.missing) for part in job.parts.values()):
            return tokens
        had = min(min(job.blocks[index][0], tokens) for index in self._kept) // self._align * self._align
        if any(group.is_state or group.window for group in self._groups):
            return had  # a shorter prefix would need other blocks
        ends = [tokens]
        for shelf in self._shelves:
            if (part := job.parts.get(shelf.far)) is None:
                continue
            if part.outcome is JobOutcome.MISSING and not part.blocks:
                return had  # nothing was moved
            ends += [min(m) * g.block_size for g, m in zip(shelf.groups, part.missing, strict=True) if m]
        return max(min(ends) // self._align * self._align, had)

    # -- between the catalogue and the planes --------------------------------------------------------

    def _soon(self) -> None:
        """Look what is to be done, in the loop's next turn."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pump_soon)

    def _pump_soon(self) -> None:
        self._is_due = False
        self._pump()

    def _pump(self) -> None:
        """Do what the catalogue wants, and tell what became of jobs."""
        now = self._clock.now()
        for shelf in self._shelves:
            shelf.forget()
            if not self._cause:
                for move in shelf.catalogue.moves(now):
                    self._post(shelf, move)
            for news in shelf.catalogue.news():
                self._take_news(shelf, news, now)
        self._retire(now)
        self._arm(now)

    def _take_news(self, shelf: Shelf, news: JobEnded | JobReturned, now: float) -> None:
        """A part of a job has ended, or touches its caller's blocks no more."""
        job = self._jobs[news.job_id]
        if isinstance(news, JobReturned):
            job.held_by.discard(shelf.far)
        else:
            job.parts[shelf.far] = news
            if news.is_held:
                job.held_by.add(shelf.far)
            if news.outcome is not JobOutcome.DONE:
                for other in self._shelves:  # a prefix needs all of them
                    other.catalogue.cancel(job.job_id)
        if job.ended is None and all(part is not None for part in job.parts.values()):
            ended = job.end(now, self.config.held_s)
            self._counts[f"{ended.kind.value}s_{ended.outcome.value}"] += 1
            if ended.outcome in (JobOutcome.FAILED, JobOutcome.TIMEOUT, JobOutcome.NO_ROOM):
                self._log_failed(job, ended)
        if job.ended is not None and not job.held_by:
            self._release(job)

    def _retire(self, now: float) -> None:
        """Give up blocks that something may have been touching for too long."""
        for job in self._jobs.values():
            if job.retired_at <= now and not job.is_retired:
                job.retire()
                self._counts["jobs_retired"] += 1
                self._log_retired(job, now)

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = [job.retired_at for job in self._jobs.values() if not job.is_retired]
        when = min([*(shelf.catalogue.wake_at for shelf in self._shelves), *held])
        if when < math.inf and self._is_copying:
            self._timer = self._clock.call_at(max(when, now), self._soon)

    def _release(self, job: OffloadJob) -> None:
        """Nothing touches a job's blocks any more: they are the engine's."""
        core = self._core
        core.ledger.drop(job.job_id)
        core.inspect.guests.pop(job.job_id, None)
        self._jobs.pop(job.job_id, None)
        job.is_free = True
        job.is_returned.set()
        assert self._driver is not None
        self._driver.soon()  # somebody may wait until nothing is held

    def _post(self, shelf: Shelf, move: Move) -> None:
        """Hand a move to its plane."""
        transfer_id = TransferId(next(self._ids))
        self._posted[transfer_id] = _Posted(shelf, move)
        match move.kind:
            case MoveKind.LOAD if not self._jobs[move.job_id].blocks:
                asyncio.get_running_loop().call_soon(self._arrived, transfer_id)  # it is where it was to be brought
            case MoveKind.LOAD | MoveKind.STORE:
                assert self._copies is not None
                op = CopyOp.READ if move.kind is MoveKind.LOAD else CopyOp.WRITE
                self._copies.post(transfer_id, op, shelf.far, shelf.pieces(move, self._jobs[move.job_id]))
            case MoveKind.PROMOTION | MoveKind.WRITE_BACK:
                assert shelf.records is not None
                op = CopyOp.READ if move.kind is MoveKind.PROMOTION else CopyOp.WRITE
                shelf.records.post(transfer_id, op, shelf.record_list(move))

    def _arrived(self, transfer_id: TransferId) -> None:
        self._ended(transfer_id, Ending.DONE, "")
        self._pump()

    def _on_copies(self) -> None:
        assert self._copies is not None
        for news in self._copies.poll():
            self._ended(news.transfer_id, news.ending, news.cause)
        self._pump()

    def _on_records(self, shelf: Shelf) -> None:
        assert shelf.records is not None
        for news in shelf.records.poll():
            if isinstance(news, RecordsEnded):
                self._ended(news.move_id, news.ending, news.cause, news.lost)
            else:
                self._lose_files(shelf, news)
        self._pump()

    def _ended(self, transfer_id: TransferId, ending: Ending, cause: str, lost: Sequence[int] = ()) -> None:
        """Tell the catalogue of a move, and count it."""
        posted = self._posted.get(transfer_id)
        if posted is None:
            return
        move = posted.move
        if ending is Ending.IN_DOUBT:
            posted.is_doubtful = True
            self._counts["moves_doubted"] += 1
        else:
            del self._posted[transfer_id]
            self._idle.set()
        if ending is Ending.FAILED and lost:
            ending = Ending.DONE  # but for those
        if ending is Ending.DONE:
            self._counts[f"{move.kind.value}_bytes"] += move.num_bytes
            self._counts[f"{move.kind.value}_blocks"] += move.num_blocks - len(lost)
            self._counts["records_lost"] += len(lost)
            if (job := self._jobs.get(move.job_id)) is not None:
                if move.kind is MoveKind.PROMOTION:
                    job.file_bytes += move.num_bytes
                else:
                    job.num_bytes += move.num_bytes
        elif ending is not Ending.IN_DOUBT:
            self._counts["moves_failed"] += 1
        posted.shelf.catalogue.ended(move.move_id, ending, cause, lost)

    def _lose_files(self, shelf: Shelf, news: RecordsLost) -> None:
        """The file tier takes no more writes, or nothing at all."""
        assert self._driver is not None
        if news.reads:
            shelf.catalogue.switch_off()
        self._driver.recorder.event("warning", EVENT.OFFLOAD_FILES_LOST, cause=news.cause, reads=int(news.reads))

    # -- what is said --------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Take a snapshot: counters and gauges of this offload; the loop's are its engine's."""
        self._here(self.statistics)
        said = self._catalogue.statistics()
        gauges = {name: said[name] for name in said if name not in COUNTED}
        return Statistics(self._said(), gauges, (), 0.0, 0.0, {})

    def _said(self) -> dict[str, int]:
        said = self._catalogue.statistics()
        counters = dict(self._counts) | {name: said[name] for name in COUNTED if name in said}
        for plane, name in ((self._copies, "copies"), (self._own.records, "files")):
            if plane is not None and self._driver is not None:
                counters |= {f"{name}.{key}": count for key, count in plane.statistics().items()}
        return counters

    def describe(self) -> dict[str, str]:
        """Name versions, transports and modes in use."""
        said = {} if self._copies is None else dict(self._copies.describe())
        if self._own.records is not None:
            said |= self._own.records.describe()
        return said

    def check_integrity(self) -> None:
        """Audit what is kept against what is under way.

        Raises:
            AsyncKVError: Something does not add up; a bug to report, with this message.
        """
        self._here(self.check_integrity)
        wrong = [text for shelf in self._shelves for text in shelf.catalogue.check_integrity()]
        idle = {job_id for job_id in self._jobs if self._core.ledger.get(job_id) is None}
        wrong += [f"job {job_id} holds no blocks" for job_id in sorted(idle) if self._jobs[job_id].ids]
        if wrong:
            raise AsyncKVError("integrity: " + "; ".join(wrong))

    def _log_failed(self, job: OffloadJob, ended: JobEnded) -> None:
        assert self._driver is not None
        now = self._clock.now()
        if self._failures.take(now):
            self._driver.recorder.event(
                "warning",
                EVENT.OFFLOAD_FAILED,
                cause=ended.outcome.value,
                detail=ended.cause,
                what=job.kind.value,
                request_id=job.request_id,
                blocks=sum(map(len, ended.missing)),
                held=int(ended.is_held),
                seconds=round(now - job.begun_at, 6),
                **self._failures.left_out(),
            )

    def _log_retired(self, job: OffloadJob, now: float) -> None:
        assert self._driver is not None
        self._driver.recorder.event(
            "error",
            EVENT.OFFLOAD_RETIRED,
            what=job.kind.value,
            request_id=job.request_id,
            blocks=sum(map(len, job.ids.values())),
            seconds_after_failure=round(now - job.ended_at, 6),
        )

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
            raise EngineClosed(f"the offload takes nothing: {self._cause}")
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
    for at, left in enumerate(left_in(Path(config.directory), _folder(config, own))):
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
