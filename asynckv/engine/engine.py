"""The engine's public calls and properties.

A call checks its arguments, schedules a turn of the loop, and passes them to the core with the time. `driver.py`
carries out the results, and `ending.py` ends the engine.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import anyio
import msgspec

from asynckv import told
from asynckv.account.inspect import HeldBlocks, Inspector, RequestStatus, retry_status
from asynckv.account.survey import Survey
from asynckv.account.values import Facts, Lag
from asynckv.arguments import MAX_INTEGER, MAX_NAME, flag, integer, number, seconds, shown, text, texts
from asynckv.config import MAX_RETRIES, EngineConfig
from asynckv.core.attempts import Request
from asynckv.core.following import Follower, Following
from asynckv.core.lifecycle import LifeEvent, LifeState
from asynckv.core.pull import PullRequest
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import (
    MAX_HASHES,
    Address,
    Endpoint,
    FollowParams,
    KVTransferParams,
    Waiter,
    check_ticket,
    decode_follow,
    decode_params,
    rank_name,
    sendable,
)
from asynckv.edges.control.local import LocalDoor, socket_name
from asynckv.edges.kernel import identity, processor_waits
from asynckv.engine.caller import Caller, offer_of, outcome
from asynckv.engine.driver import Driver
from asynckv.engine.ending import Shutdown
from asynckv.engine.home import NOT_STARTED
from asynckv.engine.lag import LoopLag
from asynckv.engine.lent import LentRequest, recallable
from asynckv.engine.observation import Observation
from asynckv.errors import AsyncKVError, ConfigError, EngineClosed, LocalProtocolError
from asynckv.geometry.blocks import BlockIds, check_block_ids
from asynckv.geometry.bounds import MAX_RANKS, MAX_TOKENS
from asynckv.geometry.check import Registration
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.observe.log import Recorder, process_facts
from asynckv.ports import Clock, ControlPlane, DataPlane
from asynckv.results import PullResult, Statistics
from asynckv.version import VERSION

Groups = Sequence[tuple[int, BlockIds]]

UNNAMED = "the layout does not name its model, so nothing keeps engines of different models apart; give it model="
"""Text of a warning, because the layouts of two models with the same shape differ only in their name."""

MAX_RETRYING = 64


class Engine:
    """One rank of an inference engine, which lends its own blocks and pulls those of other ranks.

    Use it as an async context manager, or call `start` and `aclose`. It belongs to the event loop on which `start` ran.
    Elsewhere every method raises `WrongThread`, and changes nothing. The queries (`statistics`, `holds`, `requests`
    ...) may be called on that loop's thread at any time. `config`, `registration`, `incarnation`, `endpoint`,
    `memory_epoch` and `observation` (for metrics and traces) may be read from any thread.

    Args:
        config: Checked configuration.
        registration: This rank's memory, from `register_memory`, `register_tensors` or `register_parts`.
        data: Data plane; NIXL if left out.
        control: Control plane; ZeroMQ if left out.
        clock: Clock; the system's if left out.
        token_hex: Source of randomness like `secrets.token_hex`, for simulations.

    Raises:
        ConfigError: The configuration or the registration has the wrong type.
    """

    def __init__(
        self,
        config: EngineConfig,
        registration: Registration,
        *,
        data: DataPlane | None = None,
        control: ControlPlane | None = None,
        clock: Clock | None = None,
        token_hex: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config is {shown(config)}; it must be an EngineConfig")
        _check(registration, ConfigError)
        self.config = config
        self.registration = registration
        self._token_hex = token_hex
        self.incarnation = token_hex(16)
        self._recorder = Recorder(
            config.log,
            engine_id=config.engine_id,
            tp_rank=registration.layout.tp_rank,
            incarnation=self.incarnation,
            rank=self._rank,
        )
        self._is_data_given = data is not None
        lag = LoopLag(config.log.away_s, processor_waits() if clock is None else dict)
        if clock is None:
            from asynckv.edges.clock import LoopClock

            clock = LoopClock()
        if control is None:
            from asynckv.edges.control.zmq import ZmqPlane

            control = ZmqPlane(config.bind, config.advertise, config.allow_insecure, config.keys)
        if data is None:
            data = self._choose_data()
        self._clock = clock
        self._driver = Driver(data, control, clock, self._recorder, lag)
        self._home, self._life = self._driver.home, self._driver.life
        self._started_at, self._planes = math.inf, dict[str, str]()
        self._untaken: Callable[[], list[float]] = list
        """Function that returns the times of results that wait to be taken. A desk sets it."""
        self._ending = Shutdown(self._driver, config)
        self.observation = Observation(self._driver, config, registration.layout)

    # -- life --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Start the control plane and the data plane, and register the memory.

        Raises:
            BackendError: NIXL cannot start or register the memory, or the address cannot be bound; nothing is left
                running.
            LayoutError: The layout is inconsistent.
        """
        self._home.here(self.start, is_first=True)
        if self._ending.is_closing or self._life.is_shut:
            raise EngineClosed("the engine was closed; make a new one")
        if self._home.loop is not None:
            raise LocalProtocolError("the engine was started before")
        driver = self._driver
        # Bind the loop first, because a data plane may take seconds to start, and no other thread may call meanwhile.
        self._home.settle()
        try:
            await self._begin()
            await driver.control.start(driver.on_packet, driver.on_refused)
            await self._open_door()
            if self._ending.is_closing:
                raise EngineClosed("the engine was closed while it started")
            planes = self._planes = driver.data.describe()
            self._started_at = self._clock.now()
            self._life.receive(LifeEvent.STARTED)
        except BaseException:
            if not self._home.is_settled:
                self._home.leave()
            with anyio.CancelScope(shield=True):
                try:
                    await self._ending.close_planes()
                finally:
                    self._ending.tell_stopped()
                    await self._recorder.aclose()
            raise
        layout = self.registration.layout
        started = told.EngineStarted(
            address=driver.control.address,
            layout=fingerprint(layout),
            bytes=sum(m.length for m in layout.memories),
            backend=planes.get("backend", ""),
            token_shards=[msgspec.structs.astuple(each) for each in layout.token_shards or ()] or None,
            **process_facts(self.config),
            **identity(),
        )
        self._recorder.log(started, more=planes)
        if not layout.model:
            self._recorder.log(told.SetupDoubtful(UNNAMED))
        driver.soon()

    async def _open_door(self) -> None:
        """Open this rank's socket for processes of this host, if one is configured."""
        if not (directory := self.config.inspect.directory):
            return
        layout = self.registration.layout
        door = self._ending.door = LocalDoor(directory, self._driver.on_question)
        name = socket_name(self.config.engine_id, layout.pp_stage, layout.tp_rank, self.incarnation)
        await door.open(name, self.incarnation)

    def _choose_data(self) -> DataPlane:
        """Choose whether NIXL runs in this process or in its own."""
        from asynckv.edges.choice import choose_plane

        config, layout = self.config, self.registration.layout
        place = f"{config.engine_id}-tp{layout.tp_rank}-{self.incarnation}"
        return choose_plane(
            config, layout.memories, place, lambda cause: self._recorder.log(told.DataPlaneInProcess(cause))
        )

    async def _begin(self, memory_epoch: int = 0) -> None:
        """Start the data plane, register the memory, and make a core for it."""
        driver, layout = self._driver, self.registration.layout
        agent = await driver.data.start(layout.memories, driver.on_data)
        if self._ending.is_closing:
            raise EngineClosed("the engine was closed while it started")
        names, first_nonce = (self.config.engine_id, self.incarnation, agent.name), int(self._token_hex(6), 16)
        identity = Identity(*names, agent.metadata, layout, first_nonce, memory_epoch, agent.packing)
        core = RankCore(identity, self.config, driver.data.costs)
        inspect = Inspector(core, driver.guest_gauges, lambda: self._untaken())
        driver.begin(core, Survey(core, inspect, self._facts))
        self._home.is_settled = True

    async def drain(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        """Take nothing new, tell the readers so, and wait for what is under way.

        Nothing is cancelled: call `aclose` for that. Announced requests may still be pulled, and failed ones tried
        again.

        Args:
            timeout_s: How long to wait.

        Returns:
            Holders of unfinished work after `timeout_s`, the oldest first; empty if all is done.
        """
        self._home.here(self.drain)
        timeout_s = number("timeout_s", timeout_s, 0)
        return await self._ending.drain(timeout_s)

    async def aclose(self, timeout_s: float | None = None) -> tuple[HeldBlocks, ...]:
        """End everything: cancel pulls, revoke leases, keep the grants, then close. Idempotent.

        Grants to readers run for `lease.grant_s` at most. Give `timeout_s` if there is less time, for example because
        the process is about to be killed. Grants that still run then are cut short. Readers get a goodbye, and use no
        unproven bytes. Ending the NIXL agent takes milliseconds more (a second if a peer is just being loaded, ten if a
        call is stuck inside NIXL).

        **Do not write the memory after grants were cut short**, before this process ends or the grants have run out
        (`HeldBlocks.left_s`). Until then a reader that missed the goodbye may read and accept it.

        Args:
            timeout_s: Seconds to wait for grants and transfers; as long as they need if left out. A later call may
                shorten the time of an earlier one.

        Returns:
            Holders that were not waited for (granted blocks, transfers, unacknowledged releases).

        Raises:
            BackendError: A call is still inside NIXL, so the memory may still be written; no held block is returned
                yet. Call again to wait again.
        """
        self._home.here(self.aclose, is_first=True)
        timeout = None if timeout_s is None else number("timeout_s", timeout_s, 0)
        return await self._ending.close(timeout)

    async def suspend(self, timeout_s: float = 0.0) -> tuple[HeldBlocks, ...]:
        """Let go of the memory, as for an engine that goes to sleep: nothing reads or writes it afterwards. Idempotent.

        Drains for `timeout_s`, then cancels and revokes what is left, and keeps the promises that run (at most
        `lease.grant_s`). Readers hear goodbye, and the NIXL agent is destroyed. The address stays, and answers that
        nothing is served.

        Args:
            timeout_s: How long to drain.

        Returns:
            Grants that were cut short.

        Raises:
            BackendError: Something is still inside NIXL, so the memory may still be read and written. Call again to
                wait again, or `aclose`.
        """
        self._home.here(self.suspend)
        timeout_s = number("timeout_s", timeout_s, 0)
        if self._ending.is_closing:
            raise EngineClosed("the engine was closed")
        if self._life.state is LifeState.SUSPENDED:
            return ()
        return await self._ending.suspend(timeout_s)

    async def resume(self, registration: Registration | None = None) -> None:
        """Register memory and serve again. As after a restart of the process, old params are refused.

        `endpoint` and `memory_epoch` change, so make a new `PrefillRanks` of them.

        Args:
            registration: The memory to use; the same as before if left out.

        Raises:
            LocalProtocolError: The engine is not suspended.
            BackendError: NIXL cannot register the memory; the engine stays suspended.
            LayoutError: The layout is inconsistent; the engine stays suspended.
        """
        self._home.here(self.resume)
        if registration is not None:
            _check(registration, LocalProtocolError)
        if self._ending.is_closing:
            raise EngineClosed("the engine was closed")
        if not self._life.takes(LifeEvent.RESUMED):
            raise LocalProtocolError("the engine is not suspended; `await suspend()` first")
        if self._ending.is_busy:
            raise LocalProtocolError(
                "another resume is under way, or releases the memory after it failed; try again later"
            )
        driver, before, old = self._driver, (self.registration, self.incarnation), self._driver.core
        self.registration, self.incarnation = registration or self.registration, self._token_hex(16)
        self._ending.is_busy = True
        try:
            if not self._is_data_given:
                driver.data = self._choose_data()  # chosen again, because other memory may need the other choice
            await self._begin(self.memory_epoch + 1)
        except BaseException:
            self.registration, self.incarnation = before
            with anyio.CancelScope(shield=True):
                await self._ending.close_data()
            raise
        finally:
            self._ending.is_busy = False
        for address in {peer.address for peer in old.decode.peers.by_place.values()}:
            driver.control.disconnect(address)
        driver.core.outbox.counters, driver.core.prefill.spent = old.outbox.counters, old.prefill.spent
        self._planes = driver.data.describe()
        self._recorder.bind(incarnation=self.incarnation, rank=self._rank)
        self._life.receive(LifeEvent.RESUMED)
        for guest in driver.guests:
            guest.take_again()
        self._recorder.log(told.EngineResumed(self.memory_epoch, fingerprint(self.registration.layout)))
        driver.soon()

    def __repr__(self) -> str:
        address = self._driver.control.address.partition("#")[0] or "without an address"
        return f"<Engine {self._rank}, {self._life.state.value}, {address}>"

    @property
    def _rank(self) -> str:
        layout = self.registration.layout
        return rank_name(self.config.engine_id, layout.tp_rank, layout.pp_stage, self.incarnation)

    @property
    def endpoint(self) -> Endpoint:
        """Address at which decode ranks reach this rank, for the `endpoints` of a `PrefillRanks`.

        Raises:
            EngineClosed: The engine was not started.
        """
        layout, address = self.registration.layout, self._driver.control.address
        if not address:
            raise EngineClosed("the engine is not started, so it has no address yet; use `async with Engine(...)`")
        return Endpoint(layout.tp_rank, address, self.incarnation, layout.pp_stage)

    @property
    def memory_epoch(self) -> int:
        """Number of times that this engine's memory was registered again. A `PrefillRanks` needs the greatest number of
        all ranks."""
        # Any thread may ask, even while the engine starts.
        return self._driver.core.prefill.memory_epoch if hasattr(self._driver, "core") else 0

    @property
    def _inspect(self) -> Inspector:
        if not self._home.is_settled:
            raise EngineClosed(NOT_STARTED)
        return self._driver.inspect

    # -- prefill -----------------------------------------------------------------------------------

    def lend(
        self, params: KVTransferParams | Mapping[str, Any], *, num_readers: int = 1, ticket: str = ""
    ) -> LentRequest:
        """Lend the blocks that params describe. Call it on every prefill rank.

        The KV must be in the blocks already (`synchronize` waits for a GPU). Lend requests in any order, each once.

        Args:
            params: Params from `PrefillRanks.make_params`. The decode side may have them already.
            num_readers: Number of decode engines that will read the request, each once. The blocks return when all of
                them have released. A reader that never comes costs the rest of `lease_s`; one more is refused.
            ticket: Ticket that the request came with, if any. Its followers are offered the params (`follow`).

        Raises:
            EngineClosed: The engine is closed or draining.
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: The params belong to another engine, were lent before or withdrawn, or a block is being
                written.
        """
        self._home.here(self.lend)
        driver, now = self._driver, self._clock.now()
        driver.soon()  # first, because nothing may begin without a turn
        checked = check_ticket(ticket) if not isinstance(ticket, str) or ticket else ""
        try:
            if type(num_readers) is not int or not 0 < num_readers <= MAX_RANKS:
                num_readers = integer("num_readers", num_readers, 1, MAX_RANKS)
            wanted = decode_params(params)
            lease = driver.core.lend(wanted, num_readers, now, checked)
        except AsyncKVError:
            if checked:  # its caller takes the blocks for free, and pieces must not outlive them
                driver.core.prefill.offers.end_pieces(checked)
            raise
        driver.tell(driver.observers.lease_lent, lease, wanted, now)
        return LentRequest(driver, lease)

    def lend_piece(self, params: KVTransferParams | Mapping[str, Any], ticket: str) -> None:
        """Lend finished blocks of a request that is still computed, to a decode engine that follows its ticket.

        Call it on every prefill rank, only for whole blocks, and only once **every** rank has written them. Give groups
        whose blocks may still change an empty list: windows, states and drafts. If there are hashes, let each piece end
        with a whole one; readers trust no token behind it. Lend the request at its end as any other, with its ticket
        and all of its blocks. A piece without a reader costs nothing.

        A piece holds no block. All pieces of a ticket end with its loan, with `withdraw_ticket`, or with `end_pieces`.

        Args:
            params: Params of their own, from `PrefillRanks.make_params(..., written=True, recall=True)`; `num_tokens`
                is where the piece ends.
            ticket: The request's ticket.

        Raises:
            EngineClosed: The engine is closed or draining.
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: The params are of another engine, lack `written` or `recall`, or were used before.
        """
        self._home.here(self.lend_piece)
        wanted, ticket = decode_params(params), check_ticket(ticket)
        if not (wanted.written and wanted.recall is True):
            raise LocalProtocolError(
                f"the params of piece {wanted.request_id[:200]!r} do not say that it is written and may be taken back; "
                f"make them with written=True and recall=True"
            )
        self._driver.soon()
        self._driver.core.lend(wanted, 1, self._clock.now(), ticket, is_piece=True)

    def end_pieces(self, ticket: str) -> None:
        """Take back all pieces of a request, before its blocks are used for anything else, as after a preemption.

        When this returns, no reader can prove a read of them any more. Call it on every prefill rank.

        Raises:
            EngineClosed: The engine was not started.
            LocalProtocolError: The ticket is malformed.
        """
        self._home.here(self.end_pieces)
        self._driver.core.prefill.offers.end_pieces(check_ticket(ticket))

    def is_followed(self, ticket: str) -> bool:
        """Return True if a decode engine waits for a piece of the request that came with a ticket."""
        self._home.here(self.is_followed)
        return self._driver.core.prefill.offers.is_followed(check_ticket(ticket))

    def withdraw(self, params: KVTransferParams | Mapping[str, Any]) -> None:
        """Declare that a request was aborted and will never be lent. Call it on every prefill rank.

        Readers that wait for it, or come later, are refused (`withdrawn`). The caller need not know the state of the
        request: one that is lent is revoked, and one that has ended is left unchanged. A lent request that may be
        recalled has ended when this returns, whatever was granted (see `recall`).

        Args:
            params: Params from `PrefillRanks.make_params`.

        Raises:
            EngineClosed: The engine was not started.
            LocalProtocolError: The params belong to another engine.
            RemoteProtocolError: The params are malformed.
        """
        self._home.here(self.withdraw)
        found, driver = decode_params(params), self._driver
        driver.soon()
        waited = driver.core.withdraw(found, self._clock.now())
        if waited is not None:
            ids = found.request_id, found.key.sequence
            self._recorder.log(told.RequestWithdrawn(*ids, len(waited), list(waited[:8])))

    def withdraw_ticket(self, ticket: str) -> None:
        """Declare that the request that came with a ticket ends without a loan. Call it on every prefill rank.

        Followers that wait, or come later, are told (`NoOffer`). A ticket that is lent stays as it is.

        Raises:
            EngineClosed: The engine was not started.
            LocalProtocolError: The ticket is malformed.
        """
        self._home.here(self.withdraw_ticket)
        self._driver.soon()
        self._driver.core.withdraw_ticket(check_ticket(ticket))

    def recall(self, requests: Iterable[KVTransferParams | Mapping[str, Any]]) -> tuple[HeldBlocks, ...]:
        """Take requests back at once: when this returns, nothing of them is lent. Call it on every prefill rank.

        The next instruction may write the blocks, except those that this returns. A reader that has not confirmed its
        read by then fails. A request that was not lent yet never will be, as after `withdraw`.

        Args:
            requests: Params that were made with `recall=True`.

        Returns:
            Other holders of these blocks, such as requests with the same cached prefix, and of each only these blocks.

        Raises:
            EngineClosed: The engine was not started.
            LocalProtocolError: Params are of another engine, made without `recall=True`, or not those of the loan.
                Nothing has changed.
            RemoteProtocolError: Params are malformed. Nothing was changed.
        """
        self._home.here(self.recall)
        found = recallable(requests, self._driver)
        for params in found:
            self._driver.core.prefill.check_recall(params)
        for params in found:
            self.withdraw(params)
        return self._driver.inspect.sharing(found, self._clock.now())

    def reclaim(self, num_blocks: int) -> int:
        """Revoke requests that were lent for long, so that about `num_blocks` blocks return.

        The reader engine that holds the most blocks loses its oldest request first. Every request is kept for
        `lease.grant_s`. Each reader engine keeps an equal share of all blocks; unclaimed requests count as one more
        engine. A reader that has not begun to read releases within a third of `grant_s`; one that reads has until its
        grant ends. Both get `LeaseRefused` (`revoked`), and have to prefill again.

        Args:
            num_blocks: Number of blocks wanted, of all groups, including those revoked before that have not returned.

        Returns:
            Number of requests that were revoked (`LentRequest.wait_released` reports `revoked`).

        Raises:
            EngineClosed: The engine was not started.
        """
        self._home.here(self.reclaim)
        self._driver.soon()
        num_blocks = integer("num_blocks", num_blocks, 0, MAX_INTEGER)
        return len(self._driver.core.prefill.reclaim(num_blocks, self._clock.now()))

    # -- decode ------------------------------------------------------------------------------------

    async def follow(
        self,
        request_id: str,
        follow: FollowParams | Mapping[str, Any],
        *,
        wait_s: float | None = None,
        cohort_id: str = "",
        groups: Groups | None = None,
        hashes: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Wait for the params of a request that its prefill engine still computes.

        Call it on every decode rank. Give the params of the first rank that has some to `announce` or `pull` on all
        ranks, and cancel the others. An offer that comes after the end is released by this rank alone.

        With `groups` the rank has a head start: it fills these blocks with pieces that the prefill engine lends
        meanwhile (`lend_piece`). Give `pull` the same id and blocks then, without `announce`. If this raises, or you
        `cancel` the request, wait for `returned` before anything else uses the blocks.

        Args:
            request_id: The decode side's id.
            follow: What the router gave: a ticket, and `engine_id`, `tp_size`, `pp_size` and `endpoints` of the prefill
                engine that got the same ticket.
            wait_s: Seconds to wait; `pull.follow_s` if left out.
            cohort_id: As for `pull`.
            groups: The blocks of the whole request, as for `pull`.
            hashes: As for `pull`; pieces of another prompt are not read.

        Returns:
            The params.

        Raises:
            NoOffer: The time is over, or the request or its rank ended (`reason`).
            EngineClosed: The engine is closed or draining.
            LocalProtocolError: The ticket or the request is followed already.
            PlanRefused: The ranks are no whole group, or one of them is this very rank.
            RemoteProtocolError: `follow` is malformed.
        """
        self._home.here(self.follow)
        caller, chain = Caller(), None if hashes is None else texts("hashes", hashes, MAX_HASHES, MAX_NAME)
        if groups is not None:
            given = tuple(groups) if isinstance(groups, Iterable) else groups
            check_block_ids(self.registration.layout, given)
            caller.begin_early = lambda piece: self._begin_pull(
                None, request_id, given, piece, cohort_id=cohort_id, hashes=chain, is_early=True
            )
        following = self._begin_follow(caller, request_id, follow, wait_s, cohort_id, groups is not None)
        return await caller.offer(self._driver, following)

    def _begin_follow(
        self,
        waiter: Follower,
        request_id: str,
        follow: FollowParams | Mapping[str, Any],
        wait_s: float | None,
        cohort_id: str,
        takes_pieces: bool = False,
    ) -> Following:
        """Begin to follow; the waiter is told of the end, of an offer that comes later, and of a first piece."""
        self._home.here(self.follow)
        wait = self.config.pull.follow_s if wait_s is None else seconds("wait_s", wait_s)
        request_id, cohort_id = text("request_id", request_id), text("cohort_id", cohort_id, MAX_NAME)
        takes_pieces, target = flag("takes_pieces", takes_pieces), decode_follow(follow)
        driver, now = self._driver, self._clock.now()
        driver.soon()
        following = driver.core.follow(request_id, target, cohort_id, wait, now, takes_pieces=takes_pieces)
        following.waiter = waiter
        return following

    def _offer_of(self, following: Following) -> dict[str, Any]:
        return offer_of(following)

    def announce(
        self,
        request_id: str,
        params: KVTransferParams | Mapping[str, Any],
        *,
        wait_s: float | None = None,
        cohort_id: str = "",
    ) -> None:
        """Say that a request will be pulled: handshake, claim and renewals start now.

        Call `pull` or `cancel` with the same id within `wait_s`; else the prefill side is told that this reader failed.
        Until then the engine renews the request, up to the prefill side's `lease.max_lease_s`. Announce it again with
        the same params to restart `wait_s`.

        Args:
            request_id: The decode side's id.
            params: What the prefill side gave out for the request.
            wait_s: Seconds for which the request may wait; `pull.announce_s` if left out.
            cohort_id: As for `pull`.

        Raises:
            EngineClosed: The engine is closed; or it drains, and this was not announced before.
            LocalProtocolError: The request is being pulled already, or was announced with other params or another
                cohort_id.
            PlanRefused: The params do not list a whole group of ranks, or list this very rank.
            RemoteProtocolError: The params are malformed.
        """
        self._home.here(self.announce)
        wait = self.config.pull.announce_s if wait_s is None else seconds("wait_s", wait_s)
        request_id, cohort_id = text("request_id", request_id), text("cohort_id", cohort_id, MAX_NAME)
        driver, now, wanted = self._driver, self._clock.now(), None
        driver.soon()
        try:
            wanted = decode_params(params)
            driver.core.announce(request_id, wanted, cohort_id, wait, now)
        except AsyncKVError as exc:
            driver.recorder.pull_refused(request_id, wanted or params, exc, now)
            raise

    async def pull(
        self,
        request_id: str,
        groups: Groups,
        params: KVTransferParams | Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        cohort_id: str = "",
        hashes: Sequence[str] | None = None,
        num_tokens: int | None = None,
        is_last: bool = True,
        priority: int = 0,
        retries: int | None = None,
    ) -> PullResult:
        """Fill blocks with a lent request's KV. Call it on every decode rank.

        Args:
            request_id: The decode side's id; one pull at a time per id.
            groups: One `(first_token, block ids)` per cache group: these blocks take the tokens from `first_token` on,
                and the first block is the one that holds `first_token`. `None` in the list is a place where nothing is
                wanted (outside a sliding window, a state that is not kept). In a group of states the list has one place
                per `block_size` tokens, and the state after the last token goes into the place of that token. No blocks
                at all is a full prefix hit: nothing is read, and the request is released.
            params: What the prefill side gave out for the request.
            timeout_s: Deadline; `pull.timeout_s` if left out.
            cohort_id: Names the ranks that read this request together; the engine's id if left out. Engines that share
                an id (siblings) give different ones.
            hashes: This side's hashes of the prompt, one per `hash_tokens` of the params, each covering all tokens
                before it. Only tokens on which both sides agree are read (`PullResult.num_tokens`).
            num_tokens: Tokens that are wanted, from the prompt's start; all that are lent if left out. The lists of
                blocks have to reach them.
            is_last: True if the caller makes no other attempt. If False, the request stays lent to this reader if the
                pull fails or its task is cancelled.
            priority: Of pulls that wait, the one with the smaller number goes first (as in vLLM), then the older one.
            retries: How often to try again within the deadline, into the same blocks once nothing can write them any
                more; `pull.retries` if left out.

        Returns:
            The result, after the proof that the bytes are those that were lent.

        Raises:
            PullError: A subclass by cause; it says which blocks are still held. `PlanRefused` (the blocks do not fit,
                or this very rank lends them) and `Overloaded` (too many pulls wait) come before anything was started.
            EngineClosed: The engine is closed or draining.
            LocalProtocolError: The request is being pulled already, or a block is in use.
            RemoteProtocolError: The params are malformed.
        """
        caller = Caller()
        request = self._begin_pull(
            caller, request_id, groups, params, timeout_s, cohort_id, hashes, num_tokens, is_last, priority, retries
        )
        return await caller.wait(self._driver, request)

    def _begin_pull(
        self,
        waiter: Waiter[Request] | None,
        request_id: str,
        groups: Groups,
        params: KVTransferParams | Mapping[str, Any],
        timeout_s: float | None = None,
        cohort_id: str = "",
        hashes: Sequence[str] | None = None,
        num_tokens: int | None = None,
        is_last: bool = True,
        priority: int = 0,
        retries: int | None = None,
        *,
        is_early: bool = False,
    ) -> Request:
        """Begin a pull, or a head start with a first piece, which these params describe; the waiter is told of its
        end.
        """
        self._home.here(self.pull)
        config = self.config.pull
        timeout = config.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        most = config.retries if retries is None else integer("retries", retries, 0, MAX_RETRIES)
        request_id = text("request_id", request_id)
        if type(cohort_id) is not str or cohort_id:
            cohort_id = text("cohort_id", cohort_id, MAX_NAME)
        if num_tokens is not None:
            num_tokens = integer("num_tokens", num_tokens, 0, MAX_TOKENS)
        if hashes is not None:
            hashes = texts("hashes", hashes, MAX_HASHES, MAX_NAME)
        if is_last is not True:
            flag("is_last", is_last)
        if type(priority) is not int or priority:
            priority = integer("priority", priority, -MAX_INTEGER)
        if type(groups) is not list and isinstance(groups, Iterable):
            groups = tuple(groups)  # because a retry iterates over it again
        driver, now, wanted = self._driver, self._clock.now(), None
        driver.soon()  # also after a refusal, because a message to a peer may be waiting
        try:
            wanted = decode_params(params)
            asked = PullRequest(request_id, groups, wanted, cohort_id, hashes, num_tokens, is_last, priority)
            request = driver.core.start_early(asked, now) if is_early else driver.core.pull(asked, most, timeout, now)
        except AsyncKVError as exc:
            if not is_early:
                driver.recorder.pull_refused(request_id, wanted or params, exc, now)
            raise
        request.waiter = waiter
        return request

    def _result_of(self, request: Request) -> PullResult:
        return outcome(self._driver, request)

    def cancel(
        self,
        request_id: str,
        params: KVTransferParams | Mapping[str, Any] | None = None,
        *,
        cohort_id: str = "",
        follows_on: bool = False,
    ) -> bool:
        """Give up a request that is followed, announced, pulled or waiting for a retry; with `params` any other too.

        The reader is discharged on the prefill side, whatever `is_last` was. Between two attempts of the caller's own
        (`is_last=False`) the params are needed; without them the lease runs out instead.

        With params the request is released although nothing was read: for a full prefix hit, or for a request that is
        aborted before its blocks are allocated. Call it on every decode rank. It needs no handshake, and costs one
        message per prefill rank that this rank answers for. The message repeats until it is acknowledged, or for
        `pull.release_timeout_s`. A request that is not lent yet is freed when it is lent (within the prefill side's
        `lease.parked_s`). A draining engine still does all this.

        Args:
            request_id: The decode side's id.
            params: Params of the request, from the prefill side.
            cohort_id: As for `pull`; for a request with params.
            follows_on: True to release what a request that is followed is offered later, as for a full prefix hit.

        Returns:
            True if there was something to give up; always True with params.

        Raises:
            EngineClosed: With params: the engine was not started, is closed or suspended.
            PlanRefused: The params do not list a whole group of ranks.
            LocalProtocolError: The request was announced with other params or another cohort_id.
            RemoteProtocolError: The params are malformed.
        """
        self._home.here(self.cancel)
        request_id, cohort_id = text("request_id", request_id), text("cohort_id", cohort_id, MAX_NAME)
        driver, follows_on = self._driver, flag("follows_on", follows_on)
        given = None if params is None else decode_params(params)
        if given is not None and not driver.core.is_pulled(request_id):
            if self._life.is_shut or self._life.state is LifeState.SUSPENDED:
                raise EngineClosed(f"the engine is {self._life.state.value}, and cannot tell its peers")
            driver.soon()
            driver.core.discharge(request_id, given, cohort_id, self._clock.now())
            return True
        driver.soon()
        return driver.core.cancel(request_id, self._clock.now(), follows_on=follows_on, params=given)

    async def returned(self, request_id: str) -> None:
        """Wait until no pull of a request can write any block. Return at once if nothing is held.

        Use it after the task of a pull was cancelled, because a `CancelledError` cannot carry `PullError.returned`.

        Raises:
            BlocksRetired: A transfer did not end within `held_s`; the blocks must never be used again.
        """
        self._home.here(self.returned)
        request_id = text("request_id", request_id)
        driver, core = self._driver, self._driver.core
        while self._life.state is not LifeState.CLOSED and driver.core is core:
            open_pulls = (p for p in core.decode.pulls.values() if p.request_id == request_id)
            held = next((p for p in open_pulls if p.lists is not None and not p.is_returned), None)
            if held is None:
                return
            await driver.until_returned(held)

    def forget_peer(self, address: str) -> None:
        """Treat the rank at an address as gone, by the caller's word, and fail everything that waits for it."""
        self._home.here(self.forget_peer)
        address = text("address", address, MAX_NAME)
        driver = self._driver
        driver.soon()
        driver.core.decode.forget(Address(address), self._clock.now())

    # -- for a desk and its thread -------------------------------------------------------------------

    @property
    def _is_asleep(self) -> bool:
        return self._driver.core.decode.alive_at == math.inf

    def _shows_life(self, *, is_asleep: bool = False) -> None:
        """Note that the embedder is alive, or that it sleeps until there are results."""
        self._driver.core.decode.alive_at = math.inf if is_asleep else self._clock.now()

    # -- questions ---------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return a snapshot of counters and gauges."""
        self._home.asked(self.statistics)
        inspect, driver, lag = self._inspect, self._driver, self._driver.lag
        counters = driver.counters()
        return Statistics(counters, inspect.gauges(), tuple(driver.release_s), lag.last_s, lag.most_s, lag.counts())

    def _facts(self) -> Facts:
        """Return facts that the core cannot know, for status answers about this engine."""
        driver, now, lag = self._driver, self._clock.now(), self._driver.lag
        between = self._inspect.between_attempts(now)
        return Facts(
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=driver.control.address or "",
            life=self._life.state.value,
            uptime_s=max(now - self._started_at, 0.0),
            planes=self._planes | {f"offload.{k}": v for guest in driver.guests for k, v in guest.describe().items()},
            counters=driver.counters(),
            lag=Lag(last_s=lag.last_s, most_s=lag.most_s, was_away=lag.num_away, counts=lag.counts()),
            retrying=tuple(map(retry_status, between[:MAX_RETRYING])),
            num_retrying=len(between),
        )

    def holds(self) -> tuple[HeldBlocks, ...]:
        """Return the holders of blocks, with reasons, ages, remaining times and the peers that they wait for; oldest
        first."""
        self._home.asked(self.holds)
        return self._inspect.holds(self._clock.now())

    def requests(self) -> tuple[RequestStatus, ...]:
        """Return the status of every request that is announced, pulled or lent here, the oldest first.

        `holds` lists holders of blocks; this lists requests. An announcement holds no block of this engine, but keeps
        blocks of prefill engines lent. The values are plain: `json.dumps([asdict(r) for r in engine.requests()])`.
        """
        self._home.asked(self.requests)
        return self._inspect.requests(self._clock.now())

    def describe(self) -> dict[str, str]:
        """Return the versions, transports and modes in use."""
        self._home.asked(self.describe)
        return self._driver.data.describe()

    def check_integrity(self) -> None:
        """Compare the holders of blocks with the running requests, as tests do.

        Raises:
            AsyncKVError: They contradict each other. This is a bug; please report it with the message.
        """
        self._home.asked(self.check_integrity)
        if wrong := self._inspect.check_integrity():
            raise AsyncKVError("integrity: " + "; ".join(wrong))


def _check(registration: Registration, error: type[AsyncKVError]) -> None:
    """Refuse a registration that no registering function made."""
    try:
        if isinstance(registration, Registration):
            sendable(registration.layout, Layout)
            return
        why = ""
    except msgspec.ValidationError as exc:
        why = f" ({exc})"
    raise error(f"registration is {shown(registration)}{why}; give what register_memory (or _tensors, _parts) returned")
