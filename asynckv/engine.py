"""The engine: one rank on an asyncio loop. A switchboard between the pure core and the planes.

Everything that happens (a packet, a completion, a timer, a call) is handed to the core's `RankCore` with the
time read after it was observed. What the core leaves on its desk is done once per turn of the loop:
messages first, so that a claim leaves before its read is posted, then commands, then as many posts as
fit into a short slice. The engine decides nothing.

All of it happens on one event loop, the one that `start` ran on: whoever calls from elsewhere is refused at once.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar, TypeVarTuple, assert_never

import anyio
import msgspec

from asynckv.arguments import MAX_INTEGER, flag, integer, number, seconds, shown, text, texts
from asynckv.config import MAX_NAME, MAX_RETRIES, EngineConfig
from asynckv.core.attempts import RETRYABLE, Request, RequestState
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.inspect import HeldBlocks, RequestStatus
from asynckv.core.lease import Lease
from asynckv.core.lifecycle import Lifecycle, LifeEvent, LifeState
from asynckv.core.outbox import (
    BlocksRetired,
    BlocksReturned,
    Command,
    Disconnect,
    HeldForLong,
    LeaseEnded,
    LeaseGranted,
    LoadPeer,
    PeerChanged,
    PeerDraining,
    PullEnded,
    PullOver,
    RemovePeer,
    SlowGeometry,
    TableRefused,
    Traced,
)
from asynckv.core.peer import Peer
from asynckv.core.pull import Pull, PullRequest
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import (
    MAX_HASHES,
    Address,
    Endpoint,
    Params,
    PullId,
    Reason,
    ReplyTo,
    decode_params,
    rank_name,
    sendable,
)
from asynckv.errors import (
    AsyncKVError,
    BackendError,
    ConfigError,
    EngineClosed,
    GeometryRefused,
    LeaseLost,
    LeaseRefused,
    LocalProtocolError,
    NotLentYet,
    PeerLost,
    PeerUnreachable,
    PlanRefused,
    PullCancelled,
    PullError,
    PullTimeout,
    ReadFailed,
    RemoteProtocolError,
    RemoteTooShort,
    WrongThread,
)
from asynckv.errors import BlocksRetired as Retired
from asynckv.geometry.bounds import MAX_RANKS, MAX_TOKENS, NULL
from asynckv.geometry.check import Registration
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.observe.log import Recorder, phases
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, Clock, ControlPlane, DataPlane, TimerHandle
from asynckv.results import LeaseEnd, LoopLag, PullResult, Statistics

__all__ = ["Engine", "LentRequest"]

NOT_STARTED = "the engine is not started; use `async with Engine(...)`"

GRACE_S = 1.0
"""How long closing waits for what owes nothing but an acknowledgement."""

TURNED_AWAY = (
    "it seems to turn our connection away: with keys, this engine's .key file has to be in its directory of "
    "authorized keys"
)
POST_SLICE_S = 0.001
"""How long a turn may go on posting before the loop gets its turn."""

BEAT_S = 0.25
"""While anything is under way the engine's timer runs at least this often, to notice that the loop was away."""

IDLE_BEAT_S = 2.5
"""And else this often: who comes for the first time gives up after `handshake_s`, and nobody here has a deadline."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Groups = Sequence[tuple[int, Sequence[int | None]]]
RenewParams = Callable[[PullError], Awaitable[Params | Mapping[str, Any] | None]]

_ERRORS: Mapping[Reason, type[PullError]] = {
    Reason.CANCELLED: PullCancelled,
    Reason.ENGINE_CLOSED: PeerUnreachable,
    Reason.TIMEOUT: PullTimeout,
    Reason.NOT_LENT_YET: NotLentYet,
    Reason.GEOMETRY: GeometryRefused,
    Reason.UNPLANNABLE: PlanRefused,
    Reason.REMOTE_TOO_SHORT: RemoteTooShort,
    Reason.UNREACHABLE: PeerUnreachable,
    Reason.WRONG_TARGET: PeerUnreachable,
    Reason.PROTOCOL: PeerUnreachable,
    Reason.PEER_LOST: PeerLost,
    Reason.RESTARTED: PeerLost,
    Reason.READ_FAILED: ReadFailed,
    Reason.LEASE_LOST: LeaseLost,
}
"""What a failed pull raises; every other reason is a refusal of its claim."""


class LentRequest:
    """A lent request in its owner's hands."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._engine = engine
        self._lease = lease
        self._ended = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The prefill side's id."""
        return self._lease.lent.request_id

    @property
    def is_over(self) -> bool:
        """The blocks are the engine's again."""
        return self._lease.is_over

    def owed(self) -> tuple[str, ...]:
        """Name the readers that have not released yet; `*` for a cohort that never spoke up."""
        self._engine._asked("LentRequest.owed")
        return self._lease.owed()

    def revoke(self) -> None:
        """Grant nothing any more; the blocks return when no promise runs."""
        self._engine._here("LentRequest.revoke")
        self._engine._revoke(self._lease)

    async def wait_released(self) -> LeaseEnd:
        """Wait until the blocks are the engine's again, whatever the reason."""
        self._engine._here("LentRequest.wait_released")
        await self._ended.wait()
        lease = self._lease
        cause = lease.state.value if lease.is_over else "closed"
        ended_at = lease.ended_at if lease.is_over else self._engine._clock.now()
        return LeaseEnd(
            lease.lent.request_id,
            cause,
            {str(r): o.value for r, o in lease.outcomes.items()},
            () if cause == "released" else lease.owed(),
            ended_at - lease.lent_at,
        )


@dataclass(slots=True)
class _Waiting:
    """Whoever waits for a pull's outcome, and for its blocks."""

    outcome: asyncio.Future[None] | None = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is nothing more to wait for."""
    retired: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def wait(self) -> None:
        """Wait for the blocks.

        Raises:
            BlocksRetired: They were given up.
            WrongThread: This is not the engine's event loop.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise _wrong_thread("PullError.returned", self.loop)
        await self.returned.wait()
        if self.retired:
            raise Retired("a transfer that does not end may still write these blocks; never use them again")


@dataclass(slots=True, eq=False)
class _Retrying:
    """A request whose attempts follow each other, and whoever waits for the next."""

    request: Request
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Time is up, or no attempt may follow."""

    def end(self, reason: Reason) -> None:
        """No attempt may follow."""
        self.request.stop(reason)
        self.wake.set()

    async def first(self, work: Awaitable[T]) -> tuple[T] | None:
        """Wait for some work, at most until woken; None if that came first."""
        task, woken = asyncio.ensure_future(work), asyncio.ensure_future(self.wake.wait())
        try:
            await asyncio.wait({task, woken}, return_when=asyncio.FIRST_COMPLETED)
            return (task.result(),) if task.done() and not task.cancelled() else None
        finally:
            # Not awaited: what does not let itself be cancelled must not keep the caller beyond his deadline.
            task.add_done_callback(_swallow)
            for each in (task, woken):
                each.cancel()


class Engine:
    """One rank of an inference engine: lends its blocks, pulls others'.

    Use it as an async context manager, or call `start` and `aclose`. It belongs to the event loop that `start` ran on:
    every method raises `WrongThread` elsewhere, with nothing changed. `statistics`, `holds` and the other questions
    may be asked on that loop's thread whatever runs there. `config`, `registration`, `incarnation`, `endpoint` and
    `memory_epoch` may be read from any thread.

    Args:
        config: Checked configuration.
        registration: The memory this rank holds (`register_memory`, `register_tensors`).
        data: Data plane; NIXL if left out.
        control: Control plane; ZMQ if left out.
        clock: Clock; the system's if left out.
        token_hex: Source of randomness, as `secrets.token_hex`; for simulations.

    Raises:
        ConfigError: The configuration or the registration is something else.
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._token_hex = token_hex
        self.incarnation = token_hex(16)
        layout = registration.layout
        self._recorder = Recorder(
            config.log,
            engine_id=config.engine_id,
            tp_rank=layout.tp_rank,
            incarnation=self.incarnation,
            rank=self._rank,
        )
        self._is_data_given = data is not None
        self._data = data if data is not None else self._choose_data()
        self._control = control if control is not None else _zmq(config)
        self._clock = clock if clock is not None else _loop_clock()
        self._core_or_none: RankCore | None = None
        self._waiting: dict[PullId, _Waiting] = {}
        self._lent: dict[int, LentRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: TimerHandle | None = None
        self._timer_at = math.inf
        self._is_due = False
        self._has_waited = False
        """What is to be sent has waited a turn for more."""
        self._is_serving = False
        self._closing: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[Any] | None = None
        """A suspension or resumption under way."""
        self._life = Lifecycle()
        self._retrying: dict[str, _Retrying] = {}
        self._turned = asyncio.Event()
        """Set by every turn, for whoever waits for something to be over."""
        self._held: set[PullId] = set()
        """Pulls that failed while something could still write their blocks."""
        self._polled_at = -math.inf
        self._release_s: deque[float] = deque(maxlen=4096)
        self._beat_at = math.inf
        """When the timer runs even if the core wants nothing."""
        self._beats_fast = False
        """Something is under way."""
        self._lag = LoopLag(config.log.away_s)

    # -- life --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Bring both planes up and register the memory.

        Raises:
            BackendError: NIXL or the address is not to be had; nothing is left running.
            LayoutError: The layout does not hold together.
        """
        self._here("start")
        if self._closing is not None or self._life.is_shut:
            raise EngineClosed("the engine was closed; make a new one")
        if self._core_or_none is not None:
            raise LocalProtocolError("the engine was started before")
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        try:
            self._core_or_none = self._begin()
            await self._control.start(self._on_packet, self._on_refused)
            if self._closing is not None:
                raise EngineClosed("the engine was closed while it started")
            self._life.receive(LifeEvent.STARTED)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._close_planes()
            raise
        self._recorder.event(
            "info",
            "engine_started",
            address=self._control.address,
            layout=fingerprint(self.registration.layout),
            bytes=sum(m.length for m in self.registration.layout.memories),
            **self._data.describe(),
        )
        self._beat_at = self._clock.now() + IDLE_BEAT_S
        self._soon()

    def _choose_data(self) -> DataPlane:
        """Choose where NIXL runs: in this process, or in one of its own."""
        from asynckv.edges.choice import choose_plane

        config, layout = self.config, self.registration.layout
        place = f"{config.engine_id}-tp{layout.tp_rank}-{self.incarnation}"
        plane, warning = choose_plane(config, layout.memories, place)
        if warning:
            self._recorder.event("warning", "data_plane_in_process", detail=warning)
        return plane

    def _begin(self, memory_epoch: int = 0) -> RankCore:
        """Bring the data plane up, register the memory, and make the core that speaks for it."""
        agent = self._data.start(self.registration.layout.memories, self._on_data)
        identity = Identity(
            self.config.engine_id,
            self.incarnation,
            agent.name,
            agent.metadata,
            self.registration.layout,
            int(self._token_hex(6), 16),
            memory_epoch,
        )
        core = RankCore(identity, self.config)
        core.outbox.trace = self._recorder.is_tracing
        return core

    async def drain(self, timeout_s: float) -> tuple[HeldBlocks, ...]:
        """Take nothing new, tell the readers so, and wait for what is under way.

        Nothing is cancelled: call `aclose` for that. What was announced may still be pulled, and what failed be
        tried again.

        Returns:
            What is still under way after `timeout_s`, the oldest holders of blocks first; empty if all is done.
        """
        self._here("drain")
        timeout_s = number("timeout_s", timeout_s, 0)
        core = self._core
        self._soon()
        self._life.receive(LifeEvent.DRAIN)
        core.shut()
        await self._wait(lambda: self._is_idle() or self._closing is not None, timeout_s)
        stragglers = core.inspect.stragglers(self._clock.now()) + self._between_attempts()
        if stragglers:
            self._recorder.event("warning", "drain_incomplete", stragglers=len(stragglers), oldest=_names(stragglers))
        else:
            self._recorder.event("info", "drained")
        return stragglers

    async def aclose(self) -> None:
        """End everything: cancel pulls, revoke leases, keep the promises, then let go. Idempotent.

        Raises:
            BackendError: Something is still inside NIXL, so the memory may still be written: nothing that is held is
                returned yet. Call again to wait again.
        """
        self._here("aclose")
        if self._closing is None or _has_failed(self._closing):
            # A task of its own, so that a caller who is cancelled does not leave it half done.
            self._closing = asyncio.get_running_loop().create_task(self._close())
        with anyio.CancelScope(shield=True):
            await asyncio.shield(self._closing)

    async def suspend(self, timeout_s: float = 0.0) -> tuple[HeldBlocks, ...]:
        """Let go of the memory, as for an engine that goes to sleep: nothing reads or writes it afterwards.

        Drains for `timeout_s`, then cancels and revokes what is left and keeps the promises that run (at most
        `lease.grant_s`). Readers are told goodbye, and the NIXL agent is destroyed. The address stays, and answers
        that nothing is served. Idempotent.

        Returns:
            What had to be cut short.

        Raises:
            BackendError: Something is still inside NIXL, so the memory may still be read and written. Call again to
                wait again, or `aclose`.
        """
        self._here("suspend")
        timeout_s = number("timeout_s", timeout_s, 0)
        if self._closing is not None:
            raise EngineClosed("the engine was closed")
        core = self._core
        if self._life.state is LifeState.SUSPENDED:
            return ()
        if self._moving is None:
            self._life.receive(LifeEvent.SUSPEND)
            self._moving = asyncio.get_running_loop().create_task(self._suspend(core, timeout_s))
            self._moving.add_done_callback(self._moved)
        stragglers: tuple[HeldBlocks, ...] = ()
        with anyio.CancelScope(shield=True):
            stragglers = await asyncio.shield(self._moving)
        return stragglers

    async def resume(self, registration: Registration | None = None) -> None:
        """Register memory again and serve anew, as another start of the process: every old reference is refused.

        `endpoint` and `memory_epoch` have changed: make a new `PrefillGroup` of them.

        Args:
            registration: Where the memory lies now; where it was before if left out.

        Raises:
            LocalProtocolError: The engine is not suspended.
            BackendError: NIXL cannot register the memory; the engine stays suspended.
            LayoutError: The layout does not hold together; the engine stays suspended.
        """
        self._here("resume")
        if registration is not None:
            _check(registration, LocalProtocolError)
        if self._closing is not None:
            raise EngineClosed("the engine was closed")
        if self._life.state is not LifeState.SUSPENDED or self._moving is not None:
            raise LocalProtocolError("the engine is not suspended; `await suspend()` first")
        before, old = (self.registration, self.incarnation), self._core
        self.registration, self.incarnation = registration or self.registration, self._token_hex(16)
        try:
            if not self._is_data_given:
                self._data = self._choose_data()  # other memory may be shared or not
            core = self._begin(self.memory_epoch + 1)
        except BaseException:
            self.registration, self.incarnation = before
            with anyio.CancelScope(shield=True):
                await self._close_data()
            raise
        for address in {peer.address for peer in old.decode.peers.by_place.values()}:
            self._control.disconnect(address)
        core.outbox.counters.update(old.outbox.counters)
        self._recorder.bind(incarnation=self.incarnation, rank=self._rank)
        self._core_or_none, self._is_serving = core, False
        self._life.receive(LifeEvent.RESUMED)
        self._recorder.event(
            "info", "engine_resumed", memory_epoch=self.memory_epoch, layout=fingerprint(self.registration.layout)
        )
        self._soon()

    @property
    def _rank(self) -> str:
        layout = self.registration.layout
        return rank_name(self.config.engine_id, layout.tp_rank, layout.pp_stage, self.incarnation)

    @property
    def endpoint(self) -> Endpoint:
        """How decode ranks reach this one; goes into the endpoints of a `PrefillGroup`."""
        layout = self.registration.layout
        if not self._control.address:
            raise EngineClosed("the engine is not started, so it has no address yet; use `async with Engine(...)`")
        return Endpoint(layout.tp_rank, self._control.address, self.incarnation, layout.pp_stage)

    @property
    def memory_epoch(self) -> int:
        """How often this engine's memory was registered anew; a `PrefillGroup` takes the greatest of its ranks'."""
        return self._core_or_none.prefill.memory_epoch if self._core_or_none is not None else 0

    # -- prefill -----------------------------------------------------------------------------------

    def lend(self, params: Params | Mapping[str, Any], *, readers: int = 1) -> LentRequest:
        """Lend the blocks that params (`PrefillGroup.make_params`) describe; on every prefill rank.

        The KV has to be in the blocks. Requests are lent in any order, each once.

        Args:
            params: From the group's scheduler; may have reached the decode side already.
            readers: Decode engines (cohorts) that will each read the request once.

        Raises:
            EngineClosed: The engine is closed or draining.
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: The params are another engine's, were lent before or withdrawn, or a block is being
                written.
        """
        self._here("lend")
        readers = integer("readers", readers, 1, MAX_RANKS)
        core, wanted = self._core, _params(params)
        self._soon()  # first: without a turn nothing may begin
        now = self._clock.now()
        lease = core.lend(wanted, readers, now)
        lent = LentRequest(self, lease)
        self._recorder.lease_lent(lease, now)
        if lease.is_over:  # released before it was lent
            lent._ended.set()
        else:
            self._lent[id(lease)] = lent
        return lent

    def withdraw(self, params: Params | Mapping[str, Any]) -> None:
        """Say that a request whose params have left will never be lent: it was aborted; on every prefill rank.

        Readers that wait for it are refused at once, as `withdrawn`, and so are those that come later. (Of very many
        that wait, those that found no room, `lease.max_parked`, hear of it when they ask again, within 2 s.) A request
        that is lent already is revoked, and of one that has ended nothing changes: whoever aborts need not know.

        Raises:
            EngineClosed: The engine was not started.
            LocalProtocolError: The params are another engine's.
            RemoteProtocolError: The params are malformed.
        """
        self._here("withdraw")
        found, core = _params(params), self._core
        self._soon()
        waited = core.withdraw(found, self._clock.now())
        if waited is not None:
            self._recorder.withdrawn(found, waited)

    # -- decode ------------------------------------------------------------------------------------

    def announce(
        self, request_id: str, params: Params | Mapping[str, Any], *, wait_s: float | None = None, cohort_id: str = ""
    ) -> None:
        """Say that a request will be pulled: handshake, claim and renewals start now.

        Follow it by `pull` under the same id, or by `cancel`, within `wait_s`.

        Raises:
            EngineClosed: The engine is closed or draining.
            LocalProtocolError: The request is being pulled already.
            RemoteProtocolError: The params are malformed.
        """
        self._here("announce")
        wait = self.config.pull.announce_s if wait_s is None else seconds("wait_s", wait_s)
        request_id, cohort_id = text("request_id", request_id), text("cohort_id", cohort_id, MAX_NAME)
        if request_id in self._retrying:
            raise LocalProtocolError(f"request {request_id[:200]!r} is being pulled already; cancel it first")
        core, wanted = self._core, _params(params)
        self._soon()
        core.announce(request_id, wanted, cohort_id, wait, self._clock.now())

    async def pull(
        self,
        request_id: str,
        groups: Groups,
        params: Params | Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        cohort_id: str = "",
        hashes: Sequence[str] | None = None,
        num_tokens: int | None = None,
        is_last: bool = True,
        priority: int = 0,
        retries: int | None = None,
        renew_params: RenewParams | None = None,
    ) -> PullResult:
        """Fill blocks with a lent request's KV; on every decode rank.

        Args:
            request_id: The decode side's id; one pull at a time per id.
            groups: Per cache group `(first_token, block ids)`: which tokens are missing here, and where
                they go. The first block is the one that holds `first_token`; nothing below is written.
                `None` in the list is a place where nothing is wanted (outside a sliding window, a state
                that is not kept). In a group of states the list has one place per `block_size` tokens,
                and the state after the last token goes into the place of that token.
                No blocks at all is a full prefix hit: nothing is read, everybody is released.
            params: What the prefill side gave out for the request.
            timeout_s: Deadline; the configuration's if left out.
            cohort_id: Name of this decode engine's attempt, if it is not the engine's id (siblings).
            hashes: This side's hashes of the prompt, one per `hash_tokens` of the params and each covering
                all tokens before it. Only tokens on which both sides agree are read; the result's
                `num_tokens` says how many that are.
            num_tokens: Tokens that are wanted; all that are lent if left out. The lists have to reach them.
            is_last: False says that another attempt will follow if this one fails, or its task is cancelled: the
                request stays lent to this reader. A last attempt discharges it whatever the outcome.
            priority: Among pulls that have to wait the smaller goes first (vLLM's convention), then who came first.
            retries: How often to try again within the deadline if this fails, into the same blocks once nothing
                can write them any more; the configuration's if left out.
            renew_params: Asked before every retry, with the error: returns params to go on with (a router may have
                had the prompt prefilled elsewhere; the old ones are discharged), or None to give up. It makes
                refusals retryable that the same params cannot get over, such as a prefill rank that was restarted. If
                it raises, the pull fails with the last error, and the exception is that error's cause.

        Returns:
            What was moved, once it is proven to be what was lent.

        Raises:
            PullError: A subclass by cause; says which blocks are still held. `PlanRefused` for blocks
                that do not fit and `Overloaded` if too many wait already, before anything was started.
            EngineClosed: The engine is closed or draining.
            LocalProtocolError: The request is being pulled already, or a block is in use.
            RemoteProtocolError: The params are malformed.
        """
        self._here("pull")
        config = self.config.pull
        timeout = config.timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)
        most = config.retries if retries is None else integer("retries", retries, 0, MAX_RETRIES)
        request_id, cohort_id = text("request_id", request_id), text("cohort_id", cohort_id, MAX_NAME)
        if num_tokens is not None:
            num_tokens = integer("num_tokens", num_tokens, 0, MAX_TOKENS)
        if hashes is not None:
            hashes = texts("hashes", hashes, MAX_HASHES, MAX_NAME)
        flag("is_last", is_last)
        priority = integer("priority", priority, -MAX_INTEGER)
        if type(groups) is not list and isinstance(groups, Iterable):
            groups = tuple(groups)  # which can be looked at again by another attempt
        if request_id in self._retrying:
            raise LocalProtocolError(f"request {request_id[:200]!r} is being pulled already; cancel it first")
        if renew_params is not None and not (callable(renew_params) and most):
            raise LocalProtocolError("renew_params is called before retries: give a callable, and retries of 1 or more")
        now = self._clock.now()
        wanted = PullRequest(request_id, groups, _params(params), cohort_id, hashes, num_tokens, is_last, priority)
        request = Request(wanted, most, config.retry_s, now + timeout, renew_params is not None, now)
        if not most:
            pull, waiting = await self._attempt(request, timeout)
            if pull.reason is not Reason.COMPLETE:
                raise self._error(pull, waiting)
            return _result(pull, self.registration.layout)
        retrying = self._retrying[request_id] = _Retrying(request)
        try:
            return await self._attempts(retrying, timeout, renew_params)
        finally:
            del self._retrying[request_id]
            self._soon()

    async def _attempts(self, retrying: _Retrying, seconds: float, renew_params: RenewParams | None) -> PullResult:
        """Try a request until it is over."""
        request = retrying.request
        while True:
            try:
                pull, waiting = await self._attempt(request, seconds)
            except AsyncKVError:
                request.refused()
                self._discharge(request)
                raise
            request.ended(self._clock.now())
            if pull.reason is Reason.COMPLETE:
                return _result(pull, self.registration.layout)
            error = self._error(pull, waiting)
            try:
                await self._wait_for_next(retrying, error, renew_params)
            finally:
                if request.state not in (RequestState.OVER, RequestState.TRYING):
                    request.give_up()
                self._discharge(request)
            if request.state is RequestState.OVER:
                if request.stopped is Reason.CANCELLED and request.was_promised:
                    raise _cancelled(error) from error
                raise error
            seconds = max(request.deadline - self._clock.now(), 1e-3)

    async def _attempt(self, request: Request, seconds: float) -> tuple[Pull, _Waiting]:
        """Pull once, to its outcome."""
        core = self._core
        self._soon()  # also where it is refused: there may be something to say to somebody
        now = self._clock.now()
        pull = core.pull(request.wanted, seconds, now, attempt=request.attempts, retryable=request.retryable)
        if pull.planned_at == pull.admitted_at < math.inf:
            pull.plan_took(self._clock.now())  # the core cannot tell how long it took
        request.tried(pull)
        waiting = self._waiting.get(pull.pull_id)
        if waiting is None:
            waiting = self._waiting[pull.pull_id] = _Waiting()
        try:
            await self._outcome(pull, waiting)
        except asyncio.CancelledError:
            core.decode.cancel(pull, self._clock.now())
            self._soon()
            # NIXL may still be writing: wait as long as `drain_s` allows, however often we are cancelled.
            while pull.reason is None and not self._life.is_shut and self._core_or_none is core:
                with suppress(asyncio.CancelledError, EngineClosed), anyio.CancelScope(shield=True):
                    await self._outcome(pull, waiting)
            if pull.reason is not None:
                request.abandoned(self._clock.now())
                self._discharge(request)  # it had failed just before
            raise
        return pull, waiting

    async def _wait_for_next(self, retrying: _Retrying, error: PullError, renew_params: RenewParams | None) -> None:
        """Wait for what a request waits for, until its next attempt may begin, or none follows."""
        request, state = retrying.request, RequestState
        if request.state is state.PAUSING and request.pull is not None:
            self._recorder.pull_retried(request.pull, request.attempts + 1, request.next_at - self._clock.now())
            with self._waking(retrying, request.next_at):
                await retrying.wake.wait()
            if request.stopped is None:
                request.time()
            else:
                request.give_up()
        with self._waking(retrying, request.deadline):
            try:
                if request.state is state.RECOVERING:
                    found = await retrying.first(error.returned())
                    request.give_up() if found is None else request.returned()
                if request.state is state.RENEWING and renew_params is not None:
                    given = await retrying.first(renew_params(error))
                    params = None if given is None or given[0] is None else _params(given[0])
                    request.give_up() if params is None else request.renewed(params)
            except Retired:
                request.give_up()
            except Exception as exc:
                raise error from exc  # `renew_params` failed, so there is nothing to go on with

    @contextmanager
    def _waking(self, retrying: _Retrying, when: float) -> Iterator[None]:
        retrying.wake.clear()
        if retrying.request.stopped is not None:
            retrying.wake.set()
        timer = self._clock.call_at(when, retrying.wake.set)
        try:
            yield
        finally:
            timer.cancel()

    def _discharge(self, request: Request) -> None:
        """Tell the prefill ranks that no attempt follows, if they were told that one would."""
        for wanted, reason in request.discharges():
            if not self._life.is_shut and self._life.state is not LifeState.SUSPENDED:
                with suppress(AsyncKVError):
                    self._core.discharge(wanted, reason, self._clock.now())
                self._soon()

    def cancel(self, request_id: str) -> bool:
        """Give up a request, announced, being pulled or waiting for a retry; False if there is nothing to give up.

        The reader is discharged on the prefill side, whatever `is_last` said: the request is needed no more. Between
        two attempts of the caller's own (`is_last=False`) there is nothing to give up: the lease runs out, unless a
        last attempt is made.
        """
        self._here("cancel")
        request_id = text("request_id", request_id)
        core = self._core
        self._soon()
        found = core.cancel(request_id, self._clock.now())
        if (state := self._retrying.get(request_id)) is not None:
            state.end(Reason.CANCELLED)
            found = True
        return found

    async def returned(self, request_id: str) -> None:
        """Wait until no attempt at a request may write any block.

        What `PullError.returned` is for a failed pull, this is for one whose task was cancelled: the
        `CancelledError` cannot carry it. Returns at once if nothing is held.

        Raises:
            BlocksRetired: A transfer did not end within `held_s`; the blocks must never be used again.
        """
        self._here("returned")
        request_id = text("request_id", request_id)
        core = self._core
        while self._life.state is not LifeState.CLOSED and self._core_or_none is core:
            open_pulls = (p for p in core.decode.pulls.values() if p.request_id == request_id)
            held = next((p for p in open_pulls if p.lists is not None and not p.is_returned), None)
            if held is None:
                return
            await self._waiting.setdefault(held.pull_id, _Waiting()).wait()

    def would_block(self, params: Params | Mapping[str, Any]) -> bool:
        """Say whether a pull of this request would have to wait for others before it reads, if it came now.

        For schedulers that would rather allocate blocks for another request, or ask another engine.
        """
        self._asked("would_block")
        wanted = _params(params)
        return self._core.is_closed or self._core.would_block(wanted)

    def forget_peer(self, address: str) -> None:
        """Take the caller's word that the rank at an address is gone; what waits for it fails."""
        self._here("forget_peer")
        address = text("address", address, MAX_NAME)
        core = self._core
        self._soon()
        core.decode.forget(Address(address), self._clock.now())

    # -- questions ---------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Take a snapshot of counters and gauges."""
        self._asked("statistics")
        core = self._core
        counters = dict(core.outbox.counters)
        counters |= {f"control.{k}": v for k, v in self._control.statistics().items()}
        counters |= {f"data.{k}": v for k, v in self._data.statistics().items()}
        counters["loop.was_away"] = (lag := self._lag).num_away
        counters["keys.given_up"] = core.prefill.spent.num_given_up
        counters["keys.forgotten"] = core.prefill.spent.num_forgotten
        counters["log.failed"] = self._recorder.num_failed
        return Statistics(counters, core.inspect.gauges(), tuple(self._release_s), lag.last_s, lag.most_s, lag.counts())

    def holds(self) -> tuple[HeldBlocks, ...]:
        """Say who holds which blocks, why, since when, until when, and waiting for whom; the oldest first."""
        self._asked("holds")
        return self._core.inspect.holds(self._clock.now()) + self._between_attempts()

    def requests(self) -> tuple[RequestStatus, ...]:
        """Say how every request stands that is announced, pulled or lent here, the oldest first.

        What `holds` is for blocks, this is for requests: an announcement holds no block of this engine, and yet keeps
        blocks of prefill engines lent. The values are plain: `json.dumps([asdict(r) for r in engine.requests()])`.
        """
        self._asked("requests")
        return self._core.inspect.requests(self._clock.now()) + self._retries()

    def describe(self) -> dict[str, str]:
        """Name versions, transports and modes in use."""
        self._asked("describe")
        return self._data.describe()

    def check_integrity(self) -> None:
        """Audit holders against what is under way.

        Raises:
            AsyncKVError: Something does not add up; a bug to report, with this message.
        """
        self._asked("check_integrity")
        if wrong := self._core.inspect.check_integrity():
            raise AsyncKVError("integrity: " + "; ".join(wrong))

    # -- where it is called from -------------------------------------------------------------------

    def _here(self, call: str) -> None:
        """Refuse a call from elsewhere than the engine's event loop, before anything is changed.

        Raises:
            WrongThread: This is another thread or event loop, or none runs.
            EngineClosed: It was not started, so it has no loop yet.
        """
        try:
            if asyncio.get_running_loop() is self._loop:
                return
        except RuntimeError:
            raise _wrong_thread(call, self._loop) from None
        if self._loop is not None:
            raise _wrong_thread(call, self._loop)
        if call not in ("start", "aclose"):
            raise EngineClosed(NOT_STARTED)

    def _asked(self, call: str) -> None:
        """Refuse a question that another thread asks while things change under its eyes.

        Raises:
            WrongThread: This is another thread than that of the engine's event loop, which goes on.
        """
        if threading.get_ident() != self._thread and self._loop is not None and not self._loop.is_closed():
            raise _wrong_thread(call, self._loop)

    # -- events ------------------------------------------------------------------------------------

    @property
    def _core(self) -> RankCore:
        if self._core_or_none is None:
            raise EngineClosed(NOT_STARTED)
        return self._core_or_none

    def _on_packet(self, origin: Address | ReplyTo, data: bytes) -> None:
        core = self._core_or_none
        assert core is not None
        try:
            core.receive(origin, data, self._clock.now())
        except Exception as exc:  # a bug that one packet meets must not take others with it
            self._internal_error(exc)
        self._soon()

    def _on_refused(self, cause: str, who: str) -> None:
        """The control plane let somebody not in, or may not talk to somebody."""
        self._recorder.refused(cause, who, self._clock.now())
        if cause == "turned_away":
            self._safely(self._core.decode.hint, Address(who), TURNED_AWAY)

    def _on_data(self) -> None:
        before = self._polled_at
        found = self._data.poll()
        now = self._polled_at = self._clock.now()
        for news in found:
            match news:
                case TransferEnded():
                    self._safely(self._core.decode.ended, news, now - before, now)
                case AgentLost():
                    self._safely(self._core.agent_lost, news.cause, news.reads, now)
                    if news.pause_s:
                        self._recorder.event("error", "data_plane_broken", cause=news.cause, pause_s=news.pause_s)
                case AgentReplaced():
                    self._safely(self._core.agent_replaced, news.agent.name, news.agent.metadata)
                    self._recorder.event(
                        "warning",
                        "data_plane_restarted",
                        cause=news.cause,
                        agent=news.agent.name,
                        seconds=round(news.seconds, 6),
                        transfers_failed=news.transfers_failed,
                    )
                case _:
                    assert_never(news)
        if found:
            self._soon()

    def _on_timer(self) -> None:
        due, self._timer, self._timer_at = self._timer_at, None, math.inf
        self._safely(self._tick, due)
        if self._timer is None:
            self._soon()  # which arms it, as everybody's deadlines hang on it

    def _tick(self, due: float) -> None:
        now, core = self._clock.now(), self._core
        if self._lag.take(now - due):
            self._recorder.loop_was_away(now - due, core.inspect.gauges(), now)
        if not self._life.is_shut:
            self._beats_fast = not core.is_idle or core.prefill.num_parked > 0
            self._beat_at = now + (BEAT_S if self._beats_fast else IDLE_BEAT_S)
        if core.next_at <= now:
            core.tick(now)
            self._soon()
        self._arm(min(core.next_at, self._beat_at))

    def _safely(self, take: Callable[[*Ts], object], *args: *Ts) -> None:
        """Hand one event to the core: a bug that one of them meets must not take the others with it."""
        try:
            take(*args)
        except Exception as exc:
            self._internal_error(exc)

    def _internal_error(self, exc: Exception) -> None:
        self._core.outbox.counters["internal_errors"] += 1
        self._recorder.internal_error(exc)

    def _soon(self) -> None:
        """Do what the core wants, once, in the loop's next turn."""
        if not self._is_due:
            # In this order: a turn that could not be had is asked for again by whatever happens next.
            asyncio.get_running_loop().call_soon(self._turn)
            self._is_due = True

    def _turn(self) -> None:
        self._is_due = False
        if self._life.is_shut:
            if self._life.state is LifeState.STUCK:
                self._watch_held(self._core)
            return
        core = self._core_or_none
        assert core is not None
        try:
            self._work(core)
            is_serving = bool(core.prefill.leases)
            if is_serving is not self._is_serving:
                self._data.watch(is_serving)
                self._is_serving = is_serving
            if not self._beats_fast and (is_serving or core.decode.pulls):
                # Something has begun.
                self._beats_fast, self._beat_at = True, min(self._beat_at, self._clock.now() + BEAT_S)
        except Exception as exc:
            self._internal_error(exc)
        self._turned.set()
        # Whatever happened: without its timer the engine would keep no deadline.
        when = min(core.timers.earliest, core.prefill.next_at, core.watch.next_at, self._beat_at)
        if when < self._timer_at or self._timer is None:
            self._arm(when)

    def _watch_held(self, core: RankCore) -> None:
        """Closing failed: nothing is sent or read any more, but blocks are given up in time."""
        core.outbox.take_packets()
        self._obey(core)
        self._arm(core.next_at)

    def _work(self, core: RankCore) -> None:
        """One turn: messages that somebody waits for, commands, reads for a short slice, and then the rest."""
        outbox, decode = core.outbox, core.decode
        has_waited, self._has_waited = self._has_waited, False
        if outbox.is_urgent:
            self._send_all(core)
        if outbox.commands:
            self._obey(core)
        if decode.posting.turns or decode.admission.turns:
            self._read_some(core)
            if outbox.commands:
                self._obey(core)
        if outbox.messages:
            # Nobody waits for a release, and who has just been told often asks for more: both go in one packet.
            if has_waited or outbox.is_urgent:
                self._send_all(core)
            else:
                self._has_waited = True
                self._soon()

    def _read_some(self, core: RankCore) -> None:
        """Plan and post as much as fits into a short slice of the loop's time."""
        clock, decode = self._clock, core.decode
        started = began = clock.now()
        while True:
            if decode.posting.turns and (post := decode.next_read(began)) is not None:
                try:
                    ended = self._data.post_read(post.transfer_id, post.agent_name, post.read)
                except Exception as exc:  # a bug of the plane's, which may have posted it
                    self._internal_error(exc)
                    ended = TransferEnded(post.transfer_id, Ending.IN_DOUBT, f"posting it failed: {exc!r}")
                now = clock.now()
                decode.spent(post.transfer_id, now - began)
                if ended is not None:
                    decode.ended(ended, 0.0, now)
            elif decode.admission.turns and (pull := decode.admit(began)) is not None:
                now = clock.now()
                pull.plan_took(now)
            else:
                break
            began = now
            if now - started > POST_SLICE_S:
                self._soon()
                break

    def _send_all(self, core: RankCore) -> None:
        for to, packet in core.outbox.take_packets():
            try:
                self._send(to, packet)
            except Exception as exc:
                self._internal_error(exc)

    def _do(self, core: RankCore) -> None:
        """Do at once all that the core wants, outside of a turn."""
        self._send_all(core)
        self._obey(core)

    def _obey(self, core: RankCore) -> None:
        outbox = core.outbox
        while outbox.commands:
            commands, outbox.commands, now = outbox.commands, [], self._clock.now()
            for command in commands:
                try:
                    self._execute(command, core, now)
                except Exception as exc:
                    self._internal_error(exc)

    def _send(self, to: Address | ReplyTo, packet: bytes) -> None:
        if not self._control.send(to, packet):
            self._core.outbox.counters["dropped.not_sent"] += 1
            if isinstance(to, str) and (why := self._control.refusal(to)):
                self._core.decode.refused(to, why, self._clock.now())
                self._soon()

    def _arm(self, when: float) -> None:
        if when >= self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when < math.inf:
            self._timer = self._clock.call_at(when, self._on_timer)
        self._timer_at = when

    def _execute(self, command: Command, core: RankCore, now: float) -> None:
        match command:
            case PullEnded(pull):
                if not pull.is_returned:
                    self._held.add(pull.pull_id)
                waiting = self._waiting.get(pull.pull_id)
                if waiting is not None and waiting.outcome is not None and not waiting.outcome.done():
                    waiting.outcome.set_result(None)
                if not pull.is_discharge:
                    self._recorder.pull_ended(pull, now)
            case BlocksReturned(pull):
                if (waiting := self._waiting.get(pull.pull_id)) is not None:
                    waiting.retired = False
                    waiting.returned.set()
                if pull.pull_id in self._held:
                    self._held.discard(pull.pull_id)
                    self._recorder.blocks_returned(pull, now)
            case PullOver(pull):
                self._waiting.pop(pull.pull_id, None)
                self._release_s.append(pull.released_at - pull.published_at)
            case BlocksRetired(pull):
                if (waiting := self._waiting.get(pull.pull_id)) is not None:
                    waiting.retired = True
                    waiting.returned.set()
                self._recorder.blocks_retired(pull, now)
            case LeaseGranted(lease, pull_id):
                self._recorder.lease_granted(lease, pull_id, now)
            case HeldForLong():
                self._recorder.held_for_long(command, [core.inspect.status(held, now) for held in command.oldest])
            case LeaseEnded(lease):
                if (lent := self._lent.pop(id(lease), None)) is not None:
                    lent._ended.set()
                self._recorder.lease_ended(lease, now)
            case LoadPeer(peer, metadata):
                task = asyncio.get_running_loop().create_task(self._load(peer, metadata))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case TableRefused(peer, cause):
                self._recorder.event("error", "table_refused", peer=peer.name, detail=cause)
            case SlowGeometry(peer, detail):
                self._recorder.event("warning", "slow_geometry", peer=peer.name, detail=detail)
            case RemovePeer(peer, keep):
                self._data.remove_remote_agent(peer.agent_name, keep=keep)
            case Disconnect(address):
                self._control.disconnect(address)
            case PeerChanged(peer, before, after):
                self._recorder.peer_changed(peer, before, after)
            case PeerDraining(peer):
                self._recorder.event("info", "peer_draining", peer=peer.name, address=peer.address)
            case Traced(subject, entries):
                self._recorder.traced(subject, entries)
            case _:
                assert_never(command)

    async def _load(self, peer: Peer, metadata: bytes) -> None:
        core = self._core
        assert peer.layout is not None
        try:
            await self._data.add_remote_agent(AgentInfo(peer.agent_name, metadata), peer.layout.memories)
        except Exception as exc:  # whatever it is, who waits for this peer must hear of it
            cause = str(exc) if isinstance(exc, BackendError) else repr(exc)
            self._safely(core.decode.load_failed, peer, cause, self._clock.now())
        else:
            self._safely(core.decode.loaded, peer, self._clock.now())
        self._soon()

    # -- inside ------------------------------------------------------------------------------------

    async def _outcome(self, pull: Pull, waiting: _Waiting) -> None:
        while pull.reason is None:
            waiting.outcome = asyncio.get_running_loop().create_future()
            await waiting.outcome

    def _error(self, pull: Pull, waiting: _Waiting) -> PullError:
        held: dict[int, tuple[int, ...]] = {}
        wait_returned: Callable[[], Awaitable[Any]] | None = None
        if not pull.is_returned:
            held = _blocks(pull)
            wait_returned = waiting.wait
        assert pull.reason is not None
        kind = _ERRORS.get(pull.reason, LeaseRefused)
        return kind(
            f"request {pull.request_id[:200]!r} failed in {pull.failed_in}: {pull.detail}",
            request_id=pull.request_id,
            pull_id=pull.pull_id,
            failed_in=pull.failed_in,
            reason=pull.reason.value,
            held=held,
            wait_returned=wait_returned,
            is_retryable=pull.reason in RETRYABLE,
            attempts=pull.attempt,
        )

    def _revoke(self, lease: Lease) -> None:
        self._soon()
        self._core.prefill.revoke(lease, self._clock.now())

    async def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until something is over, for so long at most."""
        until = self._clock.now() + seconds
        handle = self._clock.call_at(until, self._turned.set)
        try:
            while not is_over() and self._clock.now() < until:
                self._turned.clear()
                await self._turned.wait()
        finally:
            handle.cancel()

    def _is_idle(self) -> bool:
        return self._core.is_idle and not self._retrying

    async def _end_work(self, core: RankCore, how: str) -> None:
        """Cancel pulls, revoke leases, keep the promises that run, and say goodbye."""
        for state in self._retrying.values():
            state.end(Reason.ENGINE_CLOSED)
        core.close(self._clock.now(), how)
        self._soon()
        # A promise outlives the wish to leave: the longest one running, or a drain, bounds this. Who only owes an
        # acknowledgement is not waited for that long, nor what holds nothing but blocks: those end with the agent.
        patience = max(self.config.lease.grant_s, self.config.pull.drain_s) + 1.0
        await self._wait(lambda: not core.is_bound and not self._retrying, patience)
        if not core.is_bound:
            await self._wait(self._is_idle, GRACE_S)
        if left := core.inspect.stragglers(self._clock.now()):
            names = _names(left)
            self._recorder.event(
                "warning", "engine_closed_with_stragglers", how=how, stragglers=len(left), oldest=names
            )
        core.say_goodbye()
        self._do(core)

    async def _end_loading(self) -> None:
        # A peer is loaded in a thread, which holds the agent: cancelling its task would not end it.
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.pull.handshake_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _between_attempts(self) -> tuple[HeldBlocks, ...]:
        """Say which requests wait for another attempt."""
        now, known = self._clock.now(), self._core.decode.by_request
        return tuple(
            HeldBlocks(
                request_id,
                "retrying",
                _blocks(retrying.request.pull) if retrying.request.pull is not None else {},
                now - retrying.request.begun_at,
                max(retrying.request.deadline - now, 0.0),
                (),
            )
            for request_id, retrying in self._retrying.items()
            if request_id not in known
        )

    def _retries(self) -> tuple[RequestStatus, ...]:
        """Say how requests stand that wait for another attempt."""
        return tuple(
            RequestStatus(
                kind="retrying",
                request_id=hold.request_id,
                prefill_request_id="",
                state="retrying",
                age_s=hold.held_s,
                state_s=hold.held_s,
                left_s=hold.left_s,
                blocks=sum(map(len, hold.blocks.values())),
                waits="another attempt follows",
                ranks=(),
            )
            for hold in self._between_attempts()
        )

    def _end_waiting(self) -> None:
        """Without its agent nothing writes any more, nor reads: nobody waits for that."""
        for waiting in self._waiting.values():
            if waiting.outcome is not None and not waiting.outcome.done():
                waiting.outcome.set_exception(EngineClosed("the engine was closed"))
            waiting.retired = False
            waiting.returned.set()
        for lent in self._lent.values():
            lent._ended.set()

    async def _suspend(self, core: RankCore, timeout_s: float) -> tuple[HeldBlocks, ...]:
        stragglers = await self.drain(timeout_s)
        await self._end_work(core, "suspended")
        core.decode.leave(self._clock.now())
        self._do(core)
        # Before loading ends, as no turn of the loop may lie between that and the end of the agent.
        await self._data.quiesce()
        await self._end_loading()
        self._data.close()
        # From here on nothing of ours can be read or written.
        core.decode.destroyed(self._clock.now())
        self._do(core)
        self._end_waiting()
        self._waiting.clear()
        self._lent.clear()
        self._held.clear()
        self._life.receive(LifeEvent.LET_GO)
        self._recorder.event("info", "engine_suspended", cut_short=len(stragglers))
        return stragglers

    def _moved(self, task: asyncio.Task[Any]) -> None:
        self._moving = None

    async def _close(self) -> None:
        self._turned.set()
        if self._moving is not None:
            await asyncio.gather(self._moving, return_exceptions=True)
        core = self._core_or_none
        # CLOSING once more if whoever closed before was cancelled: the promises are still to be kept.
        living = (LifeState.RUNNING, LifeState.DRAINING, LifeState.SUSPENDING, LifeState.CLOSING)
        if core is not None and self._life.state in living:
            self._life.receive(LifeEvent.CLOSE)
            await self._end_work(core, "closed")
        await self._end_loading()
        try:
            if self._life.state is not LifeState.CLOSED:  # as it is if it could not be started
                await self._close_planes()
        finally:
            if self._life.state is LifeState.STUCK and core is not None:
                # Whoever waits for blocks is told by `held_s` that they are given up, if nobody closes again.
                self._soon()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if core is not None:
            core.decode.destroyed(self._clock.now())
            self._obey(core)
        self._end_waiting()
        if core is not None:
            self._recorder.event("info", "engine_stopped")

    async def _close_planes(self) -> None:
        if self._life.state is not LifeState.CLOSED:  # or what came up after that is closed
            self._life.receive(LifeEvent.SHUT)
        self._beat_at = math.inf
        try:
            await self._control.aclose()
        finally:
            try:
                await self._close_data()
            except BaseException:
                if self._life.state is LifeState.SHUT:
                    self._life.receive(LifeEvent.STUCK)
                raise
            # From here on nothing of ours can be written.
            if self._life.state is LifeState.SHUT:
                self._life.receive(LifeEvent.DESTROYED)

    async def _close_data(self) -> None:
        try:
            await self._data.quiesce()
        finally:
            self._data.close()


def _result(pull: Pull, layout: Layout) -> PullResult:
    assert pull.lists is not None
    return PullResult(
        request_id=pull.request_id,
        pull_id=pull.pull_id,
        num_bytes=pull.num_bytes,
        num_posts=pull.num_posted,
        descriptors_planned=pull.num_descriptors,
        descriptors_posted=pull.num_descriptors_posted,
        phases=phases(pull),
        padding=tuple(pull.lists.padding(layout)),
        num_tokens=pull.lists.num_tokens,
        attempts=pull.attempt,
    )


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _swallow(task: asyncio.Future[Any]) -> None:
    """Nobody waits for this one any more, nor for what it may raise."""
    if not task.cancelled():
        task.exception()


def _cancelled(last: PullError) -> PullCancelled:
    return PullCancelled(
        f"request {last.request_id[:200]!r}: cancelled between two attempts; the last one: {last}",
        request_id=last.request_id,
        pull_id=last.pull_id,
        reason=Reason.CANCELLED.value,
        failed_in="retry",
        held=last.held,
        wait_returned=last.returned,
        attempts=last.attempts,
    )


def _names(stragglers: Sequence[HeldBlocks]) -> list[str]:
    """Name a few of them in a log."""
    return [f"{h.request_id[:80]} ({h.reason}, waits for {', '.join(h.waits_for) or 'nobody'})" for h in stragglers[:8]]


def _params(value: Params | Mapping[str, Any]) -> Params:
    try:
        return decode_params(value)
    except msgspec.ValidationError as exc:
        raise RemoteProtocolError(f"params are malformed: {exc}") from exc


def _check(registration: Registration, error: type[AsyncKVError]) -> None:
    """Refuse what none of the functions made that register memory."""
    try:
        if isinstance(registration, Registration):
            sendable(registration.layout, Layout)
            return
        why = ""
    except msgspec.ValidationError as exc:
        why = f" ({exc})"
    raise error(f"registration is {shown(registration)}{why}; give what register_memory or its like return")


def _blocks(pull: Pull) -> dict[int, tuple[int, ...]]:
    """Name the blocks that a pull fills."""
    lists = pull.lists.local if pull.lists else ()
    return {g: tuple(ids[ids != NULL].tolist()) for g, (_, ids) in enumerate(lists) if len(ids)}


def _wrong_thread(call: str, loop: asyncio.AbstractEventLoop | None) -> WrongThread:
    """Say where a call has to be made, and how to make it there."""
    owner, _, name = call.rpartition(".")
    method = getattr({"LentRequest": LentRequest, "PullError": PullError}.get(owner, Engine), name)
    what = {"LentRequest": "lent", "PullError": "error"}.get(owner, "engine") + f".{name}"
    if loop is None:
        where = (
            "outside of an event loop; await engine.start() in the one that the engine is to run on, then call it there"
        )
    elif loop.is_closed():
        where = "after the engine's event loop was closed, so that nothing can be done; close engines before their loop"
    else:
        remedy = (
            f"asyncio.run_coroutine_threadsafe({what}(...), loop)"
            if inspect.iscoroutinefunction(method)
            else f"loop.call_soon_threadsafe({what}, ...)"
        )
        where = (
            f"from thread {threading.current_thread().name!r} or another event loop than the one that the engine was "
            f"started on; nothing was changed: use {remedy}, where loop is the engine's"
        )
    return WrongThread(f"{what} was called {where}")


def _zmq(config: EngineConfig) -> ControlPlane:
    from asynckv.edges.zmq import ZmqPlane

    return ZmqPlane(config.bind, config.advertise, config.allow_insecure, config.keys)


def _loop_clock() -> Clock:
    from asynckv.edges.clock import LoopClock

    return LoopClock()
