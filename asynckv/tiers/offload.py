"""Offload, as its owner sees it: blocks go to host memory and to files, and come back before they are needed.

A caller gives the hashes of a prompt, and the longest kept prefix of it is loaded. `asynckv/offload/` decides what is
where; the copy plane and the record plane move it, on threads of their own.

Awaited calls may be cancelled. What is under way then is drained: blocks that are read for a store stay *lent*, and
blocks that are loaded into stay *written* in the engine's ledger, until nothing can touch them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from asynckv.account.inspect import HeldBlocks
from asynckv.arguments import integer, number, seconds, shown, text
from asynckv.config import OffloadConfig
from asynckv.core.types import Waiter
from asynckv.engine.engine import Engine, Groups
from asynckv.errors import ConfigError, EngineClosed, LocalProtocolError, PlanRefused
from asynckv.geometry.blocks import BlockList, check_block_ids
from asynckv.geometry.bounds import MAX_TOKENS, NULL, Int64s
from asynckv.offload.found import Found
from asynckv.offload.job import JobKind
from asynckv.offload.keys import as_hashes, needed
from asynckv.ports import CopyPlane, RecordPlane
from asynckv.results import Evicted, Loaded, Statistics, Stored
from asynckv.tiers.jobs import OffloadJob
from asynckv.tiers.lending import lend
from asynckv.tiers.mover import Mover
from asynckv.tiers.rank import GRACE_S, Leftovers, Serve, Tiers


class Pin:
    """Keeps stored blocks from being given up, until it is released or its `with` block is left."""

    def __init__(self, mover: Mover, name: str) -> None:
        self._mover, self._name = mover, name

    def release(self) -> None:
        """Let them be given up again. Harmless a second time."""
        self._mover.unpin(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Offload:
    """Blocks that one rank keeps in host memory and in files.

    Use it as an async context manager inside of its engine's, or call `start` and `aclose`; an engine that ends closes
    it first. It belongs to the engine's event loop, and every method raises `WrongThread` elsewhere.

    Every rank of an engine has one; make the same calls on all of them, in the same order. A prefix is usable if every
    rank has it: take the smallest `Found.tokens`, and the smallest `Loaded.num_tokens`.

    Args:
        config: Checked configuration.
        engine: Engine of these blocks; it must be started before.
        copies: Copy plane; NIXL if left out.
        records: Record plane; files of `config.directory` if left out.
        serve: Makes the host tier's own engine of `config.network`; for tests.
        leftovers: Finds blocks that ranks of another geometry left in files; for tests.

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
        serve: Serve = Engine,
        leftovers: Leftovers | None = None,
    ) -> None:
        if not isinstance(config, OffloadConfig):
            raise ConfigError(f"config is {shown(config)}; it must be an OffloadConfig")
        if not isinstance(engine, Engine):
            raise ConfigError(f"engine is {shown(engine)}; it must be an Engine")
        if config.network is not None and config.network.engine_id == engine.config.engine_id:
            raise ConfigError(
                f"offload.network.engine_id is {config.network.engine_id!r}, as the engine's own; give the host tier's "
                f"engine another, such as {config.network.engine_id + '-host'!r}: readers have to tell them apart"
            )
        self.config, self.engine = config, engine
        tiers = self._tiers = Tiers(self, config, engine, copies, records, serve, leftovers)
        self._mover, self._own, self._catalogue = tiers.mover, tiers.own, tiers.own.catalogue

    # -- life ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Take the memory, open the files, and find out what they hold.

        A cancelled caller waits for at most a second for what is being opened. A disk that does not answer is left
        behind with what it holds (`offload_broken`), and lets go of that once it has answered.

        Raises:
            BackendError: There is not enough memory or disk space, NIXL cannot start, or another process has the
                directory; nothing is left running.
            EngineClosed: The engine does not run.
        """
        self._tiers.driver.home.here(self.start)
        await self._tiers.start()

    async def aclose(self, timeout_s: float | None = None) -> tuple[HeldBlocks, ...]:
        """Take nothing new, cancel loads and stores, wait until nothing is copied any more, and let go. Idempotent.

        Blocks that are in host memory alone are written to files first, as far as there is time; `offload_stopped` says
        how many were lost. An engine that closes its offload gives it one second: close the offload before the engine,
        with more time, if a restart should find more.

        Args:
            timeout_s: How long all of it takes at most. If left out: a second for writing to files and waiting for
                copies and promises of what is lent, and ten for ending threads.

        Returns:
            Holders that were not waited for.

        Raises:
            BackendError: Something may still write the memory, or a `start` has not come to its end. Call again to wait
                again.
        """
        if not self._tiers.is_started:
            return ()
        self._here(self.aclose)
        timeout = None if timeout_s is None else number("timeout_s", timeout_s, 0)
        return await self._tiers.close(timeout, GRACE_S if timeout is None else timeout)

    @property
    def network(self) -> Engine | None:
        """The host tier's own engine, by which stored blocks are lent; None without `config.network`."""
        return self._tiers.network

    # -- questions: answered at once -----------------------------------------------------------------

    def lookup(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> Found:
        """Say how long a prefix of a prompt could be loaded now; 0 tokens while a load would be refused.

        It changes nothing and waits for nothing. 1,000 hashes take half a millisecond.

        Args:
            hashes: One per `hash_tokens` tokens, each covering all tokens before it as well.
            num_tokens: Consider no more tokens than these. A scheduler that computes the last token again gives one
                less than the prompt has.

        Raises:
            LocalProtocolError: These are no hashes.
        """
        self._here(self.lookup)
        chain = self._chain(hashes, num_tokens)
        found = self._tiers.found(chain)
        self._mover.counts["lookups"] += 1
        self._mover.counts["tokens.looked_up"] += len(chain) * self.config.hash_tokens
        self._mover.counts["tokens.found"] += found.tokens
        self._mover.counts["lookup_hits"] += found.tokens > 0
        return found

    def would_wait(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> bool:
        """Say whether loading that prefix would wait for files, or for a store that is under way."""
        self._here(self.would_wait)
        return self._tiers.found(self._chain(hashes, num_tokens)).would_wait

    def touch(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> None:
        """Say that a prompt is wanted: what is kept of it is given up later than the rest.

        What ranks of another geometry have left in the files is never given up to make room.
        """
        self._opened(self.touch)
        self._catalogue.touch(self._chain(hashes, num_tokens))

    def pin(self, hashes: Sequence[str | bytes], num_tokens: int | None = None) -> Pin:
        """Let nothing of a prompt be given up until the pin is released (`with offload.pin(hashes):`)."""
        self._opened(self.pin)
        name = f"pin-{next(self._mover.ids)}"
        self._tiers.pin(name, self._chain(hashes, num_tokens))
        return Pin(self._mover, name)

    def evict(self, hashes: Sequence[str | bytes] | None = None) -> Evicted:
        """Evict the kept blocks of a prompt, or of all prompts, except pinned and lent blocks.

        Running copies continue, but lookups no longer find their blocks. Blocks that ranks of another geometry left are
        not found any more either, until the next start, because this rank may not change their files.

        Args:
            hashes: Hashes of the prompt; all prompts if left out.
        """
        self._opened(self.evict)
        chain = None if hashes is None else self._chain(hashes, None)
        evicted = [shelf.catalogue.evict(chain) for shelf in (self._own, *self._tiers.others)]
        self._mover.soon()
        return Evicted(*map(sum, zip(*evicted, strict=True)))

    # -- moves: awaited, and given up by cancelling --------------------------------------------------

    async def store(self, request_id: str, groups: Groups, hashes: Sequence[str | bytes]) -> Stored:
        """Copy blocks to the host tier; returns when they are there, and nothing reads the given blocks any more.

        Blocks that are there already are not copied again; those that another store is copying are waited for. From the
        host tier they go on to the files, in the background. Copies that have not begun within the configuration's
        `timeout_s` are left out.

        Args:
            request_id: For people, and for `cancel` and `returned`; several stores may have the same.
            groups: One `(first_token, block ids)` per cache group, as for `Engine.pull`. `None` in the list is a place
                of which nothing is to be stored. Blocks that end after the last hash are left out.
            hashes: Of the whole prompt, from its start; one per `hash_tokens` tokens.

        Raises:
            EngineClosed: The offload or its engine is closed or suspended.
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: A block is being written, or an argument is malformed.
            PullError: A copy failed and may still read the blocks, or has not ended `timeout_s` after its begin; it
                says which blocks are held, as for a pull. `PullCancelled` if the store was given up (`cancel`).
        """
        job = self._begin_store(None, request_id, groups, hashes)
        await self._mover.outcome(job)
        return self._stored(job)

    def _begin_store(
        self, waiter: Waiter[OffloadJob] | None, request_id: str, groups: Groups, hashes: Sequence[str | bytes]
    ) -> OffloadJob:
        self._here(self.store)
        request_id, chain = text("request_id", request_id), as_hashes(hashes)
        blocks = check_block_ids(self.engine.registration.layout, groups)
        tokens = len(chain) * self.config.hash_tokens
        wanted: list[list[int]] = []
        for index in self._own.kept:
            (first, ids), size = blocks[index], self._size(index)
            start, end = first // size, tokens // size
            wanted.append([start + i for i, block in enumerate(ids[: max(end - start, 0)].tolist()) if block != NULL])

        used, where = self._ids(blocks, wanted), {self._own: wanted}
        timeout_s = self.config.timeout_s
        return self._mover.begin(
            JobKind.STORE, request_id, blocks, used, timeout_s, chain, tokens, where, waiter=waiter
        )

    def _stored(self, job: OffloadJob) -> Stored:
        ended = job.how_it_ended()
        missed = sum(map(len, ended.missing))
        took = self._tiers.driver.clock.now() - job.begun_at
        return Stored(job.request_id, ended.known + ended.blocks, ended.blocks, missed, job.num_bytes, took)

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

        A miss is no error: the result says how many tokens are in place. The engine computes the rest; the blocks for
        it may have been written in part. If a block of the middle is lost, the tokens before it are loaded; with
        sliding windows and states nothing is, because a shorter prefix needs other blocks of those.

        Args:
            request_id: One load at a time per id.
            groups: One `(first_token, block ids)` per cache group, as for `Engine.pull`. A block has to begin at
                `first_token`; what is before it is in place already. `None` is a place where nothing is wanted.
            hashes: Of the whole prompt, from its start.
            num_tokens: Tokens that are wanted: `Found.tokens`, or less by whole blocks of all groups.
            timeout_s: What is not copied by then is a miss; `OffloadConfig.timeout_s` if left out.

        Raises:
            EngineClosed: The offload or its engine is closed or suspended.
            PlanRefused: The blocks do not fit the layout or the tokens.
            LocalProtocolError: A block is in use, the request is being loaded already, or an argument is malformed.
            PullError: A copy failed and may still write the blocks; it says which blocks are held, as for a pull.
                `PullCancelled` if the load was given up (`cancel`).
        """
        job = self._begin_load(None, request_id, groups, hashes, num_tokens, timeout_s)
        await self._mover.outcome(job)
        return self._loaded(job)

    def _begin_load(
        self,
        waiter: Waiter[OffloadJob] | None,
        request_id: str,
        groups: Groups,
        hashes: Sequence[str | bytes],
        num_tokens: int,
        timeout_s: float | None = None,
    ) -> OffloadJob:
        self._here(self.load)
        request_id, chain = text("request_id", request_id), as_hashes(hashes)
        timeout = self.config.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        tokens = self._whole(num_tokens, chain)
        if len(set(chain)) < len(chain):
            raise LocalProtocolError("two of the hashes are the same; each has to cover all tokens before it as well")
        if any(job.kind is JobKind.LOAD for job in self._mover.of_request(request_id)):
            raise LocalProtocolError(f"request {request_id[:200]!r} is being loaded already; cancel it first")
        blocks = list(check_block_ids(self.engine.registration.layout, groups, tokens))
        wanted = []
        for group, index in zip(self._own.groups, self._own.kept, strict=True):
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
        where = self._tiers.sources(chain, tokens, blocks, wanted)
        used = self._ids(blocks, wanted)
        shorter = partial(self._tiers.shorter, wanted)
        return self._mover.begin(JobKind.LOAD, request_id, blocks, used, timeout, chain, tokens, where, shorter, waiter)

    def _loaded(self, job: OffloadJob) -> Loaded:
        ended, loaded = job.how_it_ended(), self._tiers.loaded(job)
        self._mover.counts["tokens.loaded"] += loaded
        self._mover.counts["tokens.missed"] += job.wanted - loaded
        took = self._tiers.driver.clock.now() - job.begun_at
        return Loaded(job.request_id, loaded, ended.blocks, job.num_bytes, job.file_bytes, took)

    async def lend(
        self,
        request_id: str,
        hashes: Sequence[str | bytes],
        *,
        num_tokens: int,
        lease_s: float | None = None,
        num_readers: int = 1,
    ) -> dict[str, Any]:
        """Lend what is kept of a prompt to engines of other processes, which pull it like any other request.

        Blocks that are in files alone are brought to the host tier first. All of them are pinned until the lease has
        ended.

        Args:
            request_id: For people, and for the decode side.
            hashes: Of the whole prompt, from its start; texts travel along, for `Engine.pull(hashes=)`.
            num_tokens: Tokens that are lent: `Found.tokens`, or less by whole blocks of all groups.
            lease_s: As for `PrefillRanks.make_params`.
            num_readers: As for `Engine.lend`.

        Returns:
            KVTransferParams, as `PrefillRanks.make_params` makes them.

        Raises:
            LocalProtocolError: There is no `config.network`; or not all of the tokens are kept (any more), or ranks of
                another geometry left them: load and store those first.
            Overloaded: What is pinned or lent leaves no room in host memory (the message says how much), or `max_jobs`
                wait or run already.
            PullCancelled: It was given up (`cancel`).
            EngineClosed: The offload or its engine is closed.
        """
        self._here(self.lend)
        chain = as_hashes(hashes)
        tokens = self._whole(num_tokens, chain)
        return await lend(self._tiers, request_id, hashes, chain, tokens, lease_s, num_readers)

    def cancel(self, request_id: str) -> bool:
        """Give up the stores and the load of a request; returns whether there were any."""
        self._here(self.cancel)
        request_id = text("request_id", request_id)
        jobs = [job for job in self._mover.of_request(request_id) if job.ended is None]
        self._mover.give_up(jobs)
        return bool(jobs)

    async def returned(self, request_id: str) -> None:
        """Wait until nothing reads or writes a request's blocks, after any end of its stores and loads.

        It is for a call with a cancelled task, because a `CancelledError` cannot carry `PullError.returned`.

        Raises:
            BlocksRetired: A copy did not end within `held_s`; the blocks must never be used again.
        """
        self._here(self.returned)
        request_id = text("request_id", request_id)
        for job in self._mover.of_request(request_id):
            await job.until_returned()

    def _whole(self, num_tokens: int, chain: list[bytes]) -> int:
        tokens = integer("num_tokens", num_tokens, 0, len(chain) * self.config.hash_tokens)
        if tokens % self._tiers.align:
            raise LocalProtocolError(
                f"num_tokens is {tokens}, which is no end of a block in all groups; give a multiple of "
                f"{self._tiers.align}, such as Found.tokens"
            )
        return tokens

    # -- what is said --------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Take a snapshot of this offload's counters and gauges. (Those of the loop are in the engine's.)"""
        self._here(self.statistics)
        figures = self._tiers.figures
        return Statistics(figures.counters(), figures.gauges(), (), 0.0, 0.0, {})

    def describe(self) -> dict[str, str]:
        """Name versions, transports and modes in use."""
        return self._tiers.describe()

    # -- inside --------------------------------------------------------------------------------------

    def _here(self, call: Callable[..., Any]) -> None:
        if not self._tiers.is_started:
            raise EngineClosed("the offload is not started; use `async with Offload(config, engine)`")
        self._tiers.driver.home.here(call)

    def _opened(self, call: Callable[..., Any]) -> None:
        self._here(call)
        if not self._mover.is_open:  # what is kept is another thread's still
            raise EngineClosed("the offload has not found out yet what is kept; wait until its `start` has returned")

    def _chain(self, hashes: Sequence[str | bytes], num_tokens: int | None) -> list[bytes]:
        chain = as_hashes(hashes)
        if num_tokens is not None:
            return chain[: integer("num_tokens", num_tokens, 0, MAX_TOKENS) // self.config.hash_tokens]
        return chain

    def _size(self, group: int) -> int:
        return self.engine.registration.layout.groups[group].block_size

    def _ids(self, blocks: Sequence[BlockList], wanted: Sequence[Sequence[int]]) -> dict[int, Int64s]:
        return {
            index: blocks[index][1][np.asarray(places) - blocks[index][0] // self._size(index)]
            for index, places in zip(self._own.kept, wanted, strict=True)
            if places
        }
