"""The engine: one rank on an asyncio loop. A switchboard between the pure core and the planes.

Everything that happens (a packet, a completion, a timer, a call) is handed to the core's `Node` with the
time read after it was observed. What the core leaves on its desk is done once per turn of the loop:
messages first, so that a claim leaves before its read is posted, then commands, then as many posts as
fit into a short slice. The engine decides nothing.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVarTuple, assert_never

import anyio
import msgspec

from asynckv.config import EngineConfig
from asynckv.core.commands import (
    AddTable,
    BlocksRetired,
    BlocksReturned,
    Command,
    Disconnect,
    LeaseEnded,
    LoadPeer,
    PeerChanged,
    PullEnded,
    PullOver,
    RemovePeer,
    RemoveTable,
    SlowGeometry,
    Traced,
)
from asynckv.core.layout import fingerprint
from asynckv.core.lease import Lease
from asynckv.core.node import Hold, Identity, Node
from asynckv.core.peer import Peer
from asynckv.core.pull import Pull
from asynckv.core.pulling import News
from asynckv.core.types import NULL, Address, Endpoint, Params, PullId, Reason, Route, decode_params
from asynckv.errors import (
    AsyncKVError,
    BackendError,
    EngineClosed,
    GeometryRefused,
    LeaseLost,
    LeaseRefused,
    LocalProtocolError,
    PeerLost,
    PeerUnreachable,
    PlanRefused,
    PullCancelled,
    PullError,
    PullTimeout,
    ReadFailed,
    RemoteProtocolError,
    RemoteTooShort,
)
from asynckv.errors import BlocksRetired as Retired
from asynckv.observe.log import Recorder, phases
from asynckv.ports import Clock, ControlPlane, DataPlane, Ended, Ending, TimerHandle
from asynckv.registration import Registration
from asynckv.results import LeaseEnd, PullResult, Statistics

__all__ = ["Engine", "LentRequest"]

POST_SLICE_S = 0.001
"""How long a turn may go on posting before the loop gets its turn."""

Ts = TypeVarTuple("Ts")
Groups = Sequence[tuple[int, Sequence[int | None]]]

_ERRORS: Mapping[Reason, type[PullError]] = {
    Reason.CANCELLED: PullCancelled,
    Reason.ENGINE_CLOSED: PeerUnreachable,
    Reason.TIMEOUT: PullTimeout,
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
        return self._lease.owed()

    def revoke(self) -> None:
        """Grant nothing any more; the blocks return when no promise runs."""
        self._engine._revoke(self._lease)

    async def wait_released(self) -> LeaseEnd:
        """Wait until the blocks are the engine's again, whatever the reason."""
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

    async def wait(self) -> None:
        """Wait for the blocks.

        Raises:
            BlocksRetired: They were given up.
        """
        await self.returned.wait()
        if self.retired:
            raise Retired("a transfer that does not end may still write these blocks; never use them again")


class Engine:
    """One rank of an inference engine: lends its blocks, pulls others'.

    Use it as an async context manager, or call `start` and `aclose`.

    Args:
        config: Checked configuration.
        registration: The memory this rank holds (`register_memory`, `register_tensors`).
        data: Data plane; NIXL if left out.
        control: Control plane; ZMQ if left out.
        clock: Clock; the system's if left out.
        token_hex: Source of randomness, as `secrets.token_hex`; for simulations.
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
        self.config = config
        self.registration = registration
        self.incarnation = token_hex(16)
        self._first_nonce = int(token_hex(6), 16)
        layout = registration.layout
        self._recorder = Recorder(
            config.log,
            engine_id=config.engine_id,
            tp_rank=layout.tp_rank,
            incarnation=self.incarnation,
        )
        self._data = data if data is not None else _nixl(config, self.incarnation, layout.tp_rank)
        self._control = control if control is not None else _zmq(config)
        self._clock = clock if clock is not None else _loop_clock()
        self._node_or_none: Node | None = None
        self._waiting: dict[PullId, _Waiting] = {}
        self._lent: dict[int, LentRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: TimerHandle | None = None
        self._timer_at = math.inf
        self._is_due = False
        self._is_serving = False
        self._closing: asyncio.Task[None] | None = None
        self._is_shut = False
        """No turn is taken any more."""
        self._is_destroyed = False
        """The data plane is gone."""
        self._idle = asyncio.Event()
        self._held: set[PullId] = set()
        """Pulls that failed while something could still write their blocks."""
        self._polled_at = -math.inf
        self._release_s: deque[float] = deque(maxlen=4096)

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
        if self._closing is not None:
            raise EngineClosed("the engine was closed; make a new one")
        if self._node_or_none is not None:
            raise LocalProtocolError("the engine was started before")
        try:
            self._data.start(self._on_data)
            self._data.register(self.registration.layout.memories)
            identity = Identity(
                self.config.engine_id,
                self.incarnation,
                self._data.agent_name,
                self._data.metadata(),
                self.registration.layout,
                self._first_nonce,
            )
            node = Node(identity, self.config)
            node.desk.trace = self._recorder.is_tracing
            self._node_or_none = node
            await self._control.start(self._on_packet)
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

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what is under way; False if something still is.

        Nothing is cancelled: call `aclose` for that.
        """
        node = self._node
        node.shut()
        with anyio.move_on_after(timeout_s):
            await self._wait_idle()
        return node.is_idle

    async def aclose(self) -> None:
        """End everything: cancel pulls, revoke leases, keep the promises, then let go. Idempotent."""
        if self._closing is None:
            # A task of its own, so that a caller who is cancelled does not leave it half done.
            self._closing = asyncio.get_running_loop().create_task(self._close())
        with anyio.CancelScope(shield=True):
            await asyncio.shield(self._closing)

    @property
    def endpoint(self) -> Endpoint:
        """How decode ranks reach this one; goes into the roster of a `PrefillGroup`."""
        layout = self.registration.layout
        return Endpoint(layout.tp_rank, self._control.address, self.incarnation, layout.pp_stage)

    # -- prefill -----------------------------------------------------------------------------------

    def lend(self, params: Params | Mapping[str, Any], *, readers: int = 1) -> LentRequest:
        """Lend the blocks that params (`PrefillGroup.make_params`) describe; on every prefill rank.

        The KV has to be in the blocks. Lend requests in the order in which their params were made.

        Args:
            params: From the group's scheduler; may have reached the decode side already.
            readers: Decode engines (cohorts) that will each read the request once.

        Raises:
            EngineClosed: The engine is closed or draining.
            PlanRefused: The blocks do not fit the layout.
            LocalProtocolError: The params are another engine's, were lent before, or a block is being written.
        """
        node = self._node
        lease = node.lend(_params(params), readers, self._clock.now())
        lent = LentRequest(self, lease)
        if lease.is_over:  # released before it was lent
            lent._ended.set()
        else:
            self._lent[id(lease)] = lent
        self._soon()
        return lent

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
        wait = self.config.pull.announce_s if wait_s is None else _timeout(wait_s)
        self._node.announce(request_id, _params(params), cohort_id, wait, self._clock.now())
        self._soon()

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

        Returns:
            What was moved, once it is proven to be what was lent.

        Raises:
            PullError: A subclass by cause; says which blocks are still held. `PlanRefused` for blocks
                that do not fit, before anything was started.
            EngineClosed: The engine is closed or draining.
            LocalProtocolError: The request is being pulled already, or a block is in use.
            RemoteProtocolError: The params are malformed.
        """
        node = self._node
        timeout = self.config.pull.timeout_s if timeout_s is None else _timeout(timeout_s)
        pull = node.pull(
            request_id, groups, _params(params), cohort_id, timeout, self._clock.now(), hashes, num_tokens, is_last
        )
        if pull.planned_at == pull.called_at:
            pull.planned_at = self._clock.now()  # the core cannot tell how long it took
        waiting = self._waiting.setdefault(pull.pull_id, _Waiting())
        self._soon()
        try:
            await self._outcome(pull, waiting)
        except asyncio.CancelledError:
            node.pulling.cancel(pull, self._clock.now())
            self._soon()
            # NIXL may still be writing: wait as long as `drain_s` allows, however often we are cancelled.
            while not pull.is_told and not self._is_shut:
                with suppress(asyncio.CancelledError, EngineClosed), anyio.CancelScope(shield=True):
                    await self._outcome(pull, waiting)
            raise
        if pull.reason is not Reason.COMPLETE:
            raise self._error(pull, waiting)
        assert pull.lists is not None
        return PullResult(
            request_id=request_id,
            pull_id=pull.pull_id,
            num_bytes=pull.num_bytes,
            num_posts=pull.num_posted,
            descriptors_planned=pull.num_descriptors,
            descriptors_posted=pull.num_descriptors_posted,
            phases=phases(pull),
            padding=tuple(pull.lists.padding(node.identity.layout)),
            num_tokens=pull.lists.num_tokens,
        )

    def cancel(self, request_id: str) -> bool:
        """Give up a request, announced or being pulled; False if there is no pull without an outcome.

        The reader is discharged on the prefill side, whatever `is_last` said: the request is needed no more. Between
        two attempts there is nothing to give up: the lease runs out, unless a last attempt is made.
        """
        found = self._node.cancel(request_id, self._clock.now())
        self._soon()
        return found

    async def returned(self, request_id: str) -> None:
        """Wait until no attempt at a request may write any block.

        What `PullError.returned` is for a failed pull, this is for one whose task was cancelled: the
        `CancelledError` cannot carry it. Returns at once if nothing is held.

        Raises:
            BlocksRetired: A transfer did not end within `held_s`; the blocks must never be used again.
        """
        node = self._node
        while not self._is_destroyed:
            open_pulls = (p for p in node.pulling.pulls.values() if p.request_id == request_id)
            held = next((p for p in open_pulls if p.lists is not None and not p.is_returned), None)
            if held is None:
                return
            await self._waiting.setdefault(held.pull_id, _Waiting()).wait()

    def forget_peer(self, address: str) -> None:
        """Take the caller's word that the rank at an address is gone; what waits for it fails."""
        self._node.pulling.forget(Address(address), self._clock.now())
        self._soon()

    # -- questions ---------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Take a snapshot of counters and gauges."""
        node = self._node
        counters = dict(node.desk.counters)
        counters |= {f"control.{k}": v for k, v in self._control.statistics().items()}
        counters |= {f"data.{k}": v for k, v in self._data.statistics().items()}
        return Statistics(counters, node.gauges(), tuple(self._release_s))

    def holds(self) -> tuple[Hold, ...]:
        """Say who holds which blocks, why, since when, until when, and waiting for whom; the oldest first."""
        return self._node.holds(self._clock.now())

    def describe(self) -> dict[str, str]:
        """Name versions, transports and modes in use."""
        return self._data.describe()

    def check_integrity(self) -> None:
        """Audit holders against what is under way.

        Raises:
            AsyncKVError: Something does not add up; a bug to report, with this message.
        """
        if wrong := self._node.check_integrity():
            raise AsyncKVError("integrity: " + "; ".join(wrong))

    # -- events ------------------------------------------------------------------------------------

    @property
    def _node(self) -> Node:
        if self._node_or_none is None:
            raise EngineClosed("the engine is not started; use `async with Engine(...)`")
        return self._node_or_none

    def _on_packet(self, origin: Address | Route, data: bytes) -> None:
        self._safely(self._node.receive, origin, data, self._clock.now())
        self._soon()

    def _on_data(self) -> None:
        before = self._polled_at
        news = self._data.poll()
        now = self._polled_at = self._clock.now()
        for ended in news:
            self._safely(self._node.pulling.ended, _news(ended), now - before, now)
        if news:
            self._soon()

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._safely(self._node.tick, self._clock.now())
        self._soon()

    def _safely(self, take: Callable[[*Ts], object], *args: *Ts) -> None:
        """Hand one event to the core: a bug that one of them meets must not take the others with it."""
        try:
            take(*args)
        except Exception as exc:
            self._node.desk.counters["internal_errors"] += 1
            self._recorder.internal_error(exc)

    def _soon(self) -> None:
        """Do what the core wants, once, in the loop's next turn."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        if self._is_shut:
            return
        node = self._node
        self._safely(self._work, node)
        if node.is_serving is not self._is_serving:
            self._is_serving = node.is_serving
            self._data.watch(self._is_serving)
        if node.is_idle:
            self._idle.set()
        # Whatever happened: without its timer the engine would keep no deadline.
        self._arm(node.next_at)

    def _work(self, node: Node) -> None:
        self._do(node)
        clock = self._clock
        started = began = clock.now()
        while (read := node.pulling.next_post(began)) is not None:
            post = read.post
            ended = self._data.post_read(read.transfer_id, read.agent_name, post.table_id, post.local, post.remote)
            now = clock.now()
            node.pulling.spent(read.transfer_id, now - began)
            if ended is not None:
                node.pulling.ended(_news(ended), 0.0, now)
            began = now
            if now - started > POST_SLICE_S:
                self._soon()
                break
        self._do(node)

    def _do(self, node: Node) -> None:
        for to, packet in node.desk.take_packets():
            self._safely(self._send, to, packet)
        while commands := node.desk.take_commands():
            for command in commands:
                self._safely(self._execute, command, node)

    def _send(self, to: Address | Route, packet: bytes) -> None:
        if not self._control.send(to, packet):
            self._node.desk.counters["dropped.not_sent"] += 1

    def _arm(self, when: float) -> None:
        if when >= self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = when
        if when < math.inf:
            self._timer = self._clock.call_at(when, self._on_timer)

    def _execute(self, command: Command, node: Node) -> None:
        now = self._clock.now()
        match command:
            case PullEnded(pull):
                self._recorder.pull_ended(pull, now)
                if not pull.is_returned:
                    self._held.add(pull.pull_id)
                waiting = self._waiting.get(pull.pull_id)
                if waiting is not None and waiting.outcome is not None and not waiting.outcome.done():
                    waiting.outcome.set_result(None)
            case BlocksReturned(pull):
                if (waiting := self._waiting.get(pull.pull_id)) is not None:
                    waiting.retired = False
                    waiting.returned.set()
                if pull.pull_id in self._held:
                    self._held.discard(pull.pull_id)
                    self._recorder.blocks_returned(pull, now)
            case BlocksRetired(pull):
                if (waiting := self._waiting.get(pull.pull_id)) is not None:
                    waiting.retired = True
                    waiting.returned.set()
                self._recorder.blocks_retired(pull, now)
            case PullOver(pull):
                self._waiting.pop(pull.pull_id, None)
                self._release_s.append(pull.released_at - pull.published_at)
            case LeaseEnded(lease):
                self._recorder.lease_ended(lease, now)
                if (lent := self._lent.pop(id(lease), None)) is not None:
                    lent._ended.set()
            case LoadPeer(peer, metadata):
                task = asyncio.get_running_loop().create_task(self._load(peer, metadata))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case AddTable(peer, table):
                assert peer.layout is not None
                mine, theirs = node.identity.layout.memories, peer.layout.memories
                try:
                    self._data.add_table(peer.agent_name, table, mine, theirs)
                except BackendError as exc:
                    self._recorder.event("error", "table_refused", peer=peer.name, detail=str(exc))
                    node.pulling.table_failed(peer, str(exc), now)
            case RemoveTable(peer, table_id):
                self._data.remove_table(peer.agent_name, table_id)
            case SlowGeometry(peer, detail):
                self._recorder.event("warning", "slow_geometry", peer=peer.name, detail=detail)
            case RemovePeer(peer, keep):
                self._data.remove_peer(peer.agent_name, keep=keep)
            case Disconnect(address):
                self._control.disconnect(address)
            case PeerChanged(peer, before):
                self._recorder.peer_changed(peer, before)
            case Traced(subject, entries):
                self._recorder.traced(subject, entries)
            case _:
                assert_never(command)

    async def _load(self, peer: Peer, metadata: bytes) -> None:
        node = self._node
        try:
            await self._data.prepare_peer(peer.agent_name, metadata)
        except Exception as exc:  # whatever it is, who waits for this peer must hear of it
            cause = str(exc) if isinstance(exc, BackendError) else repr(exc)
            node.pulling.load_failed(peer, cause, self._clock.now())
        else:
            node.pulling.loaded(peer, self._clock.now())
        self._soon()

    # -- inside ------------------------------------------------------------------------------------

    async def _outcome(self, pull: Pull, waiting: _Waiting) -> None:
        while not pull.is_told:
            waiting.outcome = asyncio.get_running_loop().create_future()
            await waiting.outcome

    def _error(self, pull: Pull, waiting: _Waiting) -> PullError:
        held: dict[int, tuple[int, ...]] = {}
        wait_returned: Callable[[], Awaitable[Any]] | None = None
        if not pull.is_returned:
            blocks = pull.lists.local if pull.lists else ()
            held = {g: tuple(ids[ids != NULL].tolist()) for g, (_, ids) in enumerate(blocks) if len(ids)}
            wait_returned = waiting.wait
        assert pull.reason is not None
        kind = _ERRORS.get(pull.reason, LeaseRefused)
        return kind(
            f"request {pull.request_id[:200]!r}: {pull.detail}",
            request_id=pull.request_id,
            pull_id=pull.pull_id,
            reason=pull.reason.value,
            held=held,
            wait_returned=wait_returned,
        )

    def _revoke(self, lease: Lease) -> None:
        self._node.lending.revoke(lease, self._clock.now())
        self._soon()

    async def _wait_idle(self) -> None:
        while not self._node.is_idle:
            self._idle.clear()
            await self._idle.wait()

    async def _close(self) -> None:
        node = self._node_or_none
        if node is not None and not self._is_shut:
            config = self.config
            node.close(self._clock.now())
            self._soon()
            # A promise outlives the wish to leave: the longest one running, or a drain, bounds this.
            patience = max(config.lease.grant_s, config.pull.drain_s) + 1.0
            timer_done = asyncio.Event()
            handle = self._clock.call_at(self._clock.now() + patience, timer_done.set)
            idle = asyncio.ensure_future(self._wait_idle())
            expired = asyncio.ensure_future(timer_done.wait())
            await asyncio.wait({idle, expired}, return_when=asyncio.FIRST_COMPLETED)
            handle.cancel()
            for task in (idle, expired):
                task.cancel()
            await asyncio.gather(idle, expired, return_exceptions=True)
            if not node.is_idle:
                self._recorder.event("warning", "engine_closed_with_stragglers", **node.gauges())
            node.say_goodbye()
            self._do(node)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_planes()
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting.values():
            if waiting.outcome is not None and not waiting.outcome.done():
                waiting.outcome.set_exception(EngineClosed("the engine was closed"))
            waiting.retired = False
            waiting.returned.set()  # without its agent nothing writes any more
        for lent in self._lent.values():
            lent._ended.set()  # nor reads
        if node is not None:
            self._recorder.event("info", "engine_stopped")

    async def _close_planes(self) -> None:
        self._is_shut = True
        try:
            await self._control.aclose()
        finally:
            self._data.close()
            # From here on nothing of ours can be written.
            self._is_destroyed = True


def _news(ended: Ended) -> News:
    return News(
        ended.transfer_id, ended.ending is Ending.DONE, ended.ending is Ending.IN_DOUBT, ended.cause, ended.peer_lost
    )


def _params(value: Params | Mapping[str, Any]) -> Params:
    try:
        return decode_params(value)
    except msgspec.ValidationError as exc:
        raise RemoteProtocolError(f"params are malformed: {exc}") from exc


def _timeout(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise LocalProtocolError(f"a timeout of {seconds} s is not a positive, finite number")
    return seconds


def _nixl(config: EngineConfig, incarnation: str, tp_rank: int) -> DataPlane:
    from asynckv.edges.nixl import NixlPlane

    return NixlPlane(config.nixl, f"{config.engine_id}-tp{tp_rank}-{incarnation}")


def _zmq(config: EngineConfig) -> ControlPlane:
    from asynckv.edges.zmq import ZmqPlane

    return ZmqPlane(config.bind, config.advertise, config.allow_insecure, config.keys)


def _loop_clock() -> Clock:
    from asynckv.edges.clock import LoopClock

    return LoopClock()
