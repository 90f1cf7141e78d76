"""One engine rank as a pure machine: everything that decides, with nothing that acts.

A node takes calls, packets, news of transfers and the passing of time, always with `now`, and leaves
messages and commands on its desk. The engine drives it with real planes, a simulator with simulated
ones; neither decides anything.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from asynckv.config import EngineConfig, check_lease
from asynckv.core.decode import DecodeSide
from asynckv.core.lease import Lease, Lent
from asynckv.core.ledger import Ledger
from asynckv.core.limits import Limiter
from asynckv.core.outbox import Outbox, Timers
from asynckv.core.peer import Peer
from asynckv.core.prefill import PrefillSide
from asynckv.core.pull import Pull, PullLimits, PullRequest
from asynckv.core.requests import RequestStatus, lease_status, pull_status
from asynckv.core.source import Role, Source
from asynckv.core.types import Address, Cohort, Params, PullId, Reason, ReplyTo, RequestId, rank_name
from asynckv.core.watch import Watch, warn_after
from asynckv.core.wire import (
    MAJOR,
    MINOR,
    Claim,
    Draining,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Release,
    Renew,
    Status,
    StatusRequest,
    Unwelcome,
    Welcome,
    blocks_digest,
    decode_packet,
)
from asynckv.errors import (
    EngineClosed,
    LocalProtocolError,
    Overloaded,
    PlanRefused,
    RemoteProtocolError,
    RemoteTooShort,
)
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import Layout
from asynckv.geometry.overlap import pools
from asynckv.geometry.pairing import common_prefix
from asynckv.geometry.plan import BlockLists

__all__ = ["HeldBlocks", "Identity", "RankCore"]

MAX_READERS = 65_536
MAX_GREETERS = 4096
"""Hellos that are kept while there is no agent."""
MAX_NAME = 512
MALFORMED = 100
"""What a malformed packet costs its sender, in messages."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank is, once its data plane is up.

    Attributes:
        incarnation: Random per process start.
        agent_name: The data plane's.
        metadata: With which remote data planes reach our memory.
        first_nonce: Where nonces start; random, so that they are not guessed from an older run.
        memory_epoch: How often the memory was registered anew.
    """

    engine_id: str
    incarnation: str
    agent_name: str
    metadata: bytes
    layout: Layout
    first_nonce: int = 1
    memory_epoch: int = 0


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks that are not the engine's to use now, as an operator asks for them.

    Attributes:
        request_id: This side's id of the request.
        reason: `lent` or `ending` (a lease), what a pull is at (`reading` ...), `quarantined` (the pull has failed,
            something may still write) or `retired`.
        blocks: Group -> block ids.
        held_s: Since when.
        left_s: How long this can last at most, if nobody asks for more; infinite if nothing bounds it.
        waits_for: Readers that are owed, or remote ranks whose transfers run, as they are written in the logs.
        pull_id: Of a pull, as in the logs.
    """

    request_id: str
    reason: str
    blocks: Mapping[int, tuple[int, ...]]
    held_s: float
    left_s: float
    waits_for: tuple[str, ...]
    pull_id: str = ""


class RankCore:
    """All state of one rank.

    Raises:
        LayoutError: The layout does not hold together.
    """

    def __init__(self, identity: Identity, config: EngineConfig) -> None:
        check_layout(identity.layout)
        layout = identity.layout
        self.identity, self.config = identity, config
        self.outbox = Outbox(identity.incarnation)
        self.timers = Timers()
        self.ledger = Ledger([g.num_blocks for g in layout.groups], pools(layout))
        self.cohort = Cohort(identity.engine_id, layout.tp_size, layout.tp_rank, layout.pp_size, layout.pp_stage)
        self.nonces: Iterator[int] = itertools.count(identity.first_nonce)
        self._readers: dict[tuple[str, ReplyTo], int] = {}
        """Process starts that shook hands with us and by which way, for saying goodbye, and their minor versions. (Who
        shakes hands in the name of another hears what the other hears, and takes nothing from it.)"""
        self.prefill = PrefillSide(layout, self.ledger, self.outbox, self.timers, config.lease, self._readers)
        self.watch = Watch(self.outbox)
        self.decode = DecodeSide(
            layout, self.cohort, config.pull, self.ledger, self.outbox, self.timers, self.nonces, self.watch
        )
        self.prefill.memory_epoch = identity.memory_epoch
        limits = config.limits
        self._messages = Limiter(limits.messages_per_s, limits.message_burst)
        self._hellos = Limiter(limits.hellos_per_s, limits.hello_burst)
        self._pull_ids = itertools.count(1)
        self._pull_prefix = f"{identity.incarnation[:16]}-"
        pull = config.pull
        self._pull_limits = PullLimits(
            pull.drain_s,
            pull.claim_retry_s,
            pull.release_retry_s,
            pull.release_timeout_s,
            pull.held_s,
            pull.max_post_bytes,
            pull.max_post_descriptors,
        )
        self._digest = hashlib.sha256(identity.metadata).digest()
        self._layout = msgspec.Raw(msgspec.msgpack.encode(layout))
        self._has_agent = True
        self._greeters: dict[tuple[str, ReplyTo], Hello] = {}
        """Hellos that came while there was no agent, the last of each."""

    @property
    def name(self) -> str:
        """This rank, for people on either side."""
        layout = self.identity.layout
        return rank_name(self.identity.engine_id, layout.tp_rank, layout.pp_stage, self.identity.incarnation)

    # -- calls -------------------------------------------------------------------------------------

    def lend(self, params: Params, readers: int, now: float) -> Lease:
        """Lend what the params describe.

        Raises:
            EngineClosed: Nothing new is lent.
            ConfigError: The lease time is out of range.
            LocalProtocolError: The params are another engine's, or were lent or withdrawn before.
            PlanRefused: The blocks do not fit the layout.
        """
        if self.prefill.closed_as:
            self._check_open()
        check_lease(params.lease_s, self.config.lease.max_lease_s)
        self._check_ours(params)
        layout = self.identity.layout
        if readers < 1:
            raise LocalProtocolError(f"readers is {readers}; a request is lent to at least one cohort")
        lent = Lent(
            key=params.key,
            request_id=RequestId(params.request_id),
            groups=params.groups,
            num_tokens=params.num_tokens,
            written=params.written,
            lease_s=params.lease_s,
            grant_s=min(self.config.lease.grant_s, params.lease_s),
            max_lease_s=self.config.lease.max_lease_s,
            readers=readers,
            tp_rank=layout.tp_rank,
            tp_size=layout.tp_size,
            warn_s=warn_after(params.lease_s, self.config.log.held_fraction),
        )
        return self.prefill.lend(lent, now)

    def withdraw(self, params: Params, now: float) -> tuple[str, ...] | None:
        """Never lend a request whose params left; revoke it if it is lent.

        Returns:
            The pulls that waited for it; None if it is, or was, lent or withdrawn already.

        Raises:
            LocalProtocolError: The params are another engine's.
        """
        self._check_ours(params)
        return self.prefill.withdraw(params.key, now)

    def _check_ours(self, params: Params) -> None:
        layout = self.identity.layout
        there = (params.engine_id, params.tp_size, params.pp_size)
        if there != (self.identity.engine_id, layout.tp_size, layout.pp_size):
            raise LocalProtocolError(
                f"the params are for engine {params.engine_id!r} of tp_size {params.tp_size} and pp_size "
                f"{params.pp_size}, but this is {self.identity.engine_id!r} of {layout.tp_size} and {layout.pp_size}"
            )

    def announce(self, request_id: str, params: Params, cohort_id: str, wait_s: float, now: float) -> Pull:
        """Start a pull without blocks: handshake, claim and renewals happen from here on.

        Raises:
            EngineClosed: Nothing new is pulled.
            PlanRefused: The params do not list a whole group.
            LocalProtocolError: The request is being pulled already.
        """
        self._check_open()
        pull = self._make_pull(PullRequest(request_id, (), params, cohort_id), wait_s, now, is_announced=True)
        self.decode.announce(pull, now)
        return pull

    def _make_pull(
        self,
        request: PullRequest,
        wait_s: float,
        now: float,
        *,
        reads: bool = True,
        is_announced: bool = False,
        is_discharge: bool = False,
        attempt: int = 1,
        retryable: frozenset[Reason] = frozenset(),
    ) -> Pull:
        """Make a pull that answers for every rank that overlaps ours, in every stage."""
        params, cohort_id = request.params, request.cohort_id
        if cohort_id and (len(cohort_id) > MAX_NAME or any(0xD800 <= ord(c) <= 0xDFFF for c in cohort_id)):
            raise LocalProtocolError(
                f"cohort_id {cohort_id[:80]!r} has {len(cohort_id)} characters; at most {MAX_NAME} can be sent, and no "
                f"lone surrogates"
            )
        route = self.decode.routes.answered_for(request.request_id, params)
        pull_id = PullId(f"{self._pull_prefix}{next(self._pull_ids)}")
        # Which stage has which layers only the stages know: any may turn out to hold nothing of ours.
        predicted, other = (Role.READ, Role.UNKNOWN) if reads else (Role.RELEASE_ONLY, Role.RELEASE_ONLY)
        return Pull(
            pull_id=pull_id,
            request_id=RequestId(request.request_id),
            params=params,
            cohort=msgspec.structs.replace(self.cohort, id=cohort_id) if cohort_id else self.cohort,
            digest=blocks_digest(params.groups, params.num_tokens, params.written),
            sources=[Source(pull_id, rank, predicted if rank.is_predicted else other) for rank in route.ranks],
            route=route,
            limits=self._pull_limits,
            called_at=now,
            deadline=now + wait_s,
            warn_s=warn_after(params.lease_s, self.config.log.held_fraction),
            priority=request.priority,
            attempt=attempt,
            retryable=retryable,
            is_last=request.is_last,
            is_announced=is_announced,
            is_hit=not reads,
            is_discharge=is_discharge,
        )

    def pull(
        self,
        request: PullRequest,
        timeout_s: float,
        now: float,
        *,
        attempt: int = 1,
        retryable: frozenset[Reason] = frozenset(),
    ) -> Pull:
        """Fill blocks: continue what was announced under this id, or start anew.

        Args:
            request: What is wanted.
            timeout_s: Of this attempt.
            now: The time.
            attempt: Which attempt at the request this is.
            retryable: Failures after which another attempt follows.

        Raises:
            EngineClosed: Nothing new is pulled.
            Overloaded: Too many wait already.
            PlanRefused: The blocks do not fit the layout or the tokens, or the endpoints are not a whole group.
            RemoteTooShort: More tokens are wanted than are lent.
            LocalProtocolError: The request is being pulled already, or a block is in use.
        """
        request_id, params = request.request_id, request.params
        pull = self.decode.by_request.get(RequestId(request_id))
        if attempt == 1 and pull is None and self.prefill.closed_as:
            self._check_open()
        wanted = params.num_tokens
        if request.num_tokens is not None or request.hashes is not None:
            wanted = self._wanted_tokens(request)
        blocks = check_block_ids(self.identity.layout, request.groups, wanted)
        # Before anything is started: a caller who got a block wrong may ask again with another.
        held = self.ledger.check("writing", {g: ids for g, (_, ids) in enumerate(blocks)})
        lists = BlockLists(blocks, params.groups, wanted, params.num_tokens)
        most = self.config.pull.max_queued
        may_be_full = attempt == 1 and len(self.decode.started) >= most
        if may_be_full and self.decode.num_waiting >= most and not lists.is_empty:
            self.outbox.counters["pulls.overloaded"] += 1
            raise Overloaded(
                f"request {request_id[:200]!r} is not taken: {most} pulls wait already; ask again later, "
                f"elsewhere, or raise max_queued",
                request_id=request_id,
                reason=Reason.QUEUE_FULL,
                is_retryable=True,
            )
        if pull is not None and pull.lists is None:
            if pull.params != params or pull.cohort.id != (request.cohort_id or self.cohort.id):
                raise LocalProtocolError(
                    f"request {request_id[:200]!r} was announced with other params or another cohort_id; cancel it "
                    f"first"
                )
            pull.wanted(request.is_last, request.priority, retryable)
            begin = self.decode.start
        else:
            # A full prefix hit: nobody is read, so nobody need be met; everybody is released.
            reads = not lists.is_empty
            pull = self._make_pull(request, timeout_s, now, reads=reads, attempt=attempt, retryable=retryable)
            begin = self.decode.begin
        try:
            begin(pull, lists, held, now + timeout_s, now)
        except BaseException:
            # Whoever is told that it failed must not have his blocks filled behind his back.
            if self.decode.pulls.get(pull.pull_id) is pull and pull.reason is None:
                self.decode.cancel(pull, now)
            raise
        return pull

    def _wanted_tokens(self, request: PullRequest) -> int:
        """Return how many tokens are to be there in the end.

        Raises:
            PlanRefused: There is nothing to compare the hashes with.
            RemoteTooShort: More tokens are wanted than are lent.
        """
        params = request.params
        wanted = params.num_tokens if request.num_tokens is None else request.num_tokens
        if not 0 <= wanted <= params.num_tokens:
            raise RemoteTooShort(
                f"remote too short: {wanted} tokens are wanted, but the prefill side offers {params.num_tokens}",
                request_id=request.request_id,
                reason=Reason.REMOTE_TOO_SHORT,
            )
        if request.hashes is None:
            return wanted
        if not params.hash_tokens:
            raise PlanRefused(
                f"hashes were given to compare, but the params of request {params.request_id[:80]!r} carry none; "
                f"give hashes and hash_tokens to make_params",
                request_id=request.request_id,
                reason=Reason.UNPLANNABLE,
            )
        return common_prefix(request.hashes, params.hashes, params.hash_tokens, wanted)

    def cancel(self, request_id: str, now: float) -> bool:
        """Give up a request by the caller's id; False if there is no pull of it without an outcome."""
        pull = self.decode.by_request.get(RequestId(request_id))
        if pull is None:
            return False
        pull.wanted(True, pull.priority, pull.retryable)
        self.decode.cancel(pull, now)
        return True

    def discharge(self, request: PullRequest, reason: Reason, now: float) -> None:
        """Tell all ranks of a request that its last attempt was the last; no pull of it may be without an outcome."""
        request = replace(request, is_last=True)
        pull = self._make_pull(request, self.config.pull.timeout_s, now, reads=False, is_discharge=True)
        self.decode.announce(pull, now)
        self.decode.fail(pull, reason, "no attempt follows", now)

    def would_block(self, params: Params) -> bool:
        """Whether a pull of this request would have to wait for others, if it came now."""
        try:
            flow = self.decode.routes.answered_for(params.request_id, params).flow
        except PlanRefused:
            return False  # it would be refused at once
        return self.decode.admission.would_block(flow)

    def close(self, now: float, how: str = "closed") -> None:
        """Take nothing new, cancel every pull, revoke every lease; say goodbye once that has settled."""
        self.shut(how)
        for pull in list(self.decode.by_request.values()):
            self.decode.cancel(pull, now)
        for lease in list(self.prefill.leases.values()):
            self.prefill.revoke(lease, now)

    def shut(self, how: str = "draining") -> None:
        """Take nothing new, and tell everyone who shook hands; `how` is for people."""
        was_open = not self.is_closed
        self.prefill.shut(how)
        if was_open:
            for (source, route), minor in self._readers.items():
                self._say_draining(route, source, minor)

    def _say_draining(self, route: ReplyTo, source: str, minor: int) -> None:
        if minor >= 1:
            self.outbox.send(route, source, Draining())

    def say_goodbye(self) -> None:
        """Tell everyone who shook hands that this process start serves nobody any more."""
        for source, route in self._readers:
            self.outbox.send(route, source, Goodbye())
        self._readers.clear()

    def stragglers(self, now: float) -> tuple[HeldBlocks, ...]:
        """Say what is still under way: who holds blocks, and which pulls have yet to be begun or released."""
        holds = self.holds(now)
        known = {hold.pull_id for hold in holds}
        others = [
            HeldBlocks(
                request_id=pull.request_id,
                reason=pull.state.value,
                blocks={},
                held_s=now - pull.history[0][0],
                left_s=max(pull.until - now, 0.0),
                waits_for=tuple(source.where for source in pull.sources if not source.is_settled),
                pull_id=pull.pull_id,
            )
            for pull in self.decode.pulls.values()
            if pull.pull_id not in known
        ]
        return holds + tuple(others)

    @property
    def is_closed(self) -> bool:
        """Nothing new is taken."""
        return self.prefill.is_closed

    @property
    def is_idle(self) -> bool:
        """Nothing is owed or held."""
        return not self.decode.pulls and not self.prefill.leases

    @property
    def is_bound(self) -> bool:
        """A promise runs, or a pull has no outcome yet."""
        return bool(self.prefill.leases) or any(not pull.is_published for pull in self.decode.pulls.values())

    @property
    def is_serving(self) -> bool:
        """Remote data planes may need ours to make progress."""
        return bool(self.prefill.leases)

    def holds(self, now: float) -> tuple[HeldBlocks, ...]:
        """Say who holds which blocks, the oldest first."""
        leases = {key.token: lease for key, lease in self.prefill.leases.items()}
        out = []
        for hold in sorted(self.ledger, key=lambda h: h.since):
            pull, lease = self.decode.pulls.get(PullId(hold.holder)), leases.get(hold.holder)
            reason, until, waits_for = str(hold.kind), math.inf, tuple[str, ...]()
            if pull is not None:
                open_ones = (x for x in pull.sources if x.running or x.doubtful or (x.reads and not x.proven))
                waits_for = tuple(x.where for x in open_ones)
                reason, until = pull.held_as
            elif lease is not None:
                waits_for, reason, until = lease.waits_for(), lease.state.value, lease.until
            out.append(
                HeldBlocks(
                    request_id=hold.request_id,
                    reason=reason,
                    blocks={g: tuple(ids.tolist()) for g, ids in hold.blocks.items()},
                    held_s=now - hold.since,
                    left_s=max(until - now, 0.0),
                    waits_for=waits_for,
                    pull_id=hold.holder if pull is not None else "",
                )
            )
        return tuple(out)

    def requests(self, now: float) -> tuple[RequestStatus, ...]:
        """Say how every pull, announcement and lease stands, the oldest first."""
        requests = [self.status(lease, now) for lease in self.prefill.leases.values()]
        requests += [self.status(pull, now) for pull in self.decode.pulls.values()]
        return tuple(sorted(requests, key=lambda request: -request.age_s))

    def status(self, request: Lease | Pull, now: float) -> RequestStatus:
        """Say how one of them stands."""
        hold = self.ledger.get(request.lent.key.token if isinstance(request, Lease) else request.pull_id)
        blocks = hold.num_blocks if hold is not None else 0
        if isinstance(request, Lease):
            return lease_status(request, blocks, now)
        return pull_status(request, self.decode.peer_of, blocks, now)

    def check_integrity(self) -> list[str]:
        """List what does not add up; empty is right."""
        wrong = self.ledger.audit()
        holders = {hold.holder for hold in self.ledger}
        expected = {key.token for key in self.prefill.leases}
        expected |= {p.pull_id for p in self.decode.pulls.values() if math.isfinite(p.begun_at) and not p.is_returned}
        for holder in sorted(holders ^ expected):
            wrong.append(f"{holder} {'holds blocks for nobody' if holder in holders else 'holds no blocks'}")
        wrong += self.decode.audit()
        return wrong

    # -- events ------------------------------------------------------------------------------------

    def receive(self, origin: Address | ReplyTo, data: bytes, now: float) -> None:
        """Take a packet's bytes; `now` was read after they were received."""
        if not self._messages.take(origin, now):
            self.outbox.counters["dropped.too_many"] += 1
            return
        try:
            packet = decode_packet(data)
        except RemoteProtocolError as exc:
            self.outbox.counters["dropped.malformed"] += 1
            self._messages.charge(origin, now, MALFORMED)
            if "protocol version" in str(exc):
                self._foreign_version(origin, str(exc), now)
            return
        if len(packet.messages) > 1:
            self._messages.charge(origin, now, len(packet.messages) - 1)
        misdirected = packet.target not in ("", self.identity.incarnation)
        if isinstance(origin, str):
            if misdirected:
                self.outbox.counters["dropped.misdirected"] += 1
                return
            for message in packet.messages:
                self.decode.receive(message, Address(origin), packet.sender, now)
            return
        for message in packet.messages:
            self.outbox.counters[f"received.{type(message).__name__.lower()}"] += 1
            if misdirected:
                self._misdirected(message, ReplyTo(origin), packet.sender)
            else:
                self._serve(message, ReplyTo(origin), packet.sender, now)

    def agent_lost(self, cause: str, reads: bool, now: float) -> None:
        """The data plane's agent has ended by itself; what is lent stays lent, and nobody can read it for now.

        `reads` says that our own reads have ended with it.
        """
        self._has_agent = False
        self.outbox.counters["agents_lost"] += 1
        if reads:
            self.decode.unloaded(cause, now)

    def agent_replaced(self, agent_name: str, metadata: bytes) -> None:
        """Another agent serves the same memory: whoever shakes hands from now on reads through it."""
        self.identity = replace(self.identity, agent_name=agent_name, metadata=metadata)
        self._digest = hashlib.sha256(metadata).digest()
        self._has_agent = True
        greeters, self._greeters = self._greeters, {}
        for (source, route), hello in greeters.items():
            self._greet(hello, route, source)

    def tick(self, now: float, most: int = 256) -> None:
        """Let time pass for up to `most` pulls, leases and peers; `next_at` says when to come back."""
        self.prefill.tick(now)
        self.watch.tick(now)
        for _ in range(most):
            match self.timers.pop(now):
                case None:
                    return
                case Pull() as pull:
                    self.decode.tick_pull(pull, now)
                case Lease() as lease:
                    if self.prefill.tick_lease(lease, now):
                        self.watch.add(lease, now)
                case Peer() as peer:
                    self.decode.tick_peer(peer, now)
                case other:
                    raise AssertionError(other)

    @property
    def next_at(self) -> float:
        """When `tick` will have something to do."""
        return min(self.timers.next_at, self.prefill.next_at, self.watch.next_at)

    # -- inside ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineClosed(f"engine {self.identity.engine_id!r} is {self.prefill.closed_as} and takes no new work")

    def _serve(self, message: Message, route: ReplyTo, source: str, now: float) -> None:
        match message:
            case Claim() | Renew() | Release():
                self.prefill.receive(message, route, source, now)
            case Hello():
                if self._hellos.take(route, now):
                    self._greet(message, route, source)
                else:
                    self.outbox.counters["dropped.too_many_hellos"] += 1
            case Ping():
                self.outbox.send(route, source, Pong(message.nonce))
            case StatusRequest():
                # Counting everything takes long where there is much.
                if self._hellos.take(route, now):
                    self.outbox.send(route, source, self._status(message.nonce))
                else:
                    self.outbox.counters["dropped.too_many_hellos"] += 1
            case _:
                self.outbox.counters["dropped.unexpected"] += 1

    def _misdirected(self, message: Message, route: ReplyTo, source: str) -> None:
        """Answer what was meant for a process that is no more."""
        detail = f"{self.name} listens here now"
        match message:
            case Claim() | Renew():
                self.outbox.send(
                    route, source, Refused(message.key, message.pull_id, message.nonce, Reason.RESTARTED, detail)
                )
            case Release():
                self.outbox.send(route, source, Refused(message.key, message.pull_id, 0, Reason.RESTARTED, detail))
            case Hello():
                if not self._is_meant(message):
                    self.outbox.send(route, source, self._wrong_target(message))
                else:
                    self.outbox.send(route, source, Unwelcome(message.nonce, Reason.RESTARTED, detail))
            case _:
                pass
        self.outbox.counters["dropped.misdirected"] += 1

    def _is_meant(self, hello: Hello) -> bool:
        layout = self.identity.layout
        here = self.identity.engine_id, layout.pp_stage, layout.tp_rank
        return here == (hello.engine_id, hello.pp_stage, hello.tp_rank)

    def _wrong_target(self, hello: Hello) -> Unwelcome:
        there = rank_name(hello.engine_id, hello.tp_rank, hello.pp_stage)
        text = f"{self.name} listens here, not {there}; correct the endpoint's address"
        return Unwelcome(hello.nonce, Reason.WRONG_TARGET, text)

    def _greet(self, hello: Hello, route: ReplyTo, source: str) -> None:
        if not self._has_agent:
            # It is answered when there is an agent to be told of; one that does not fit in is repeated.
            if (source, route) in self._greeters or len(self._greeters) < MAX_GREETERS:
                self._greeters[source, route] = hello
            return
        answer = self._welcome(hello, route, source)
        self.outbox.send(route, source, answer)
        if self.is_closed and isinstance(answer, Welcome):
            self._say_draining(route, source, hello.minor)

    def _welcome(self, hello: Hello, route: ReplyTo, source: str) -> Welcome | Unwelcome:
        identity = self.identity
        if hello.major != MAJOR:
            text = f"this side speaks protocol {MAJOR}, the reader {hello.major}; upgrade the older side"
            return Unwelcome(hello.nonce, Reason.PROTOCOL, text)
        if not self._is_meant(hello):
            return self._wrong_target(hello)
        if self.is_closed and not self.prefill.leases:
            return Unwelcome(hello.nonce, Reason.ENGINE_CLOSED, f"the engine is {self.prefill.closed_as}")
        self._readers.pop((source, route), None)
        self._readers[source, route] = hello.minor
        if len(self._readers) > MAX_READERS:
            # Only for saying goodbye: who has not been heard of for longest does without.
            del self._readers[next(iter(self._readers))]
        return Welcome(
            hello.nonce,
            MAJOR,
            MINOR,
            identity.engine_id,
            identity.agent_name,
            identity.metadata,
            self._digest,
            self._layout,
        )

    def _status(self, nonce: int) -> Status:
        layout = self.identity.layout
        return Status(nonce, self.identity.engine_id, layout.tp_rank, layout.tp_size, self.gauges())

    def gauges(self) -> dict[str, int]:
        """What is owed and held right now."""
        pulls = self.decode.pulls.values()
        return {
            "leases": len(self.prefill.leases),
            "parked": self.prefill.num_parked,
            "pulls": len(pulls),
            "pulls_waiting": len(self.decode.by_request),
            "pulls_unanswered": sum(not pull.is_published and not pull.is_answered for pull in pulls),
            "pulls_queued": self.decode.admission.num_waiting,
            "pulls_admitted": self.decode.admission.num_admitted,
            "bytes_in_flight": self.decode.in_flight.num_bytes,
            "transfers": len(self.decode.transfers),
            "transfers_in_doubt": sum(len(source.doubtful) for p in pulls for source in p.sources),
            "peers": len(self.decode.peers),
            "blocks_lent": self.ledger.num_held("lent"),
            "blocks_writing": self.ledger.num_held("writing"),
            "blocks_quarantined": sum(
                hold.num_blocks
                for hold in self.ledger
                if hold.kind == "writing" and (p := self.decode.pulls.get(PullId(hold.holder))) and p.is_published
            ),
        }

    def _foreign_version(self, origin: Address | ReplyTo, detail: str, now: float) -> None:
        if isinstance(origin, str):
            self.decode.foreign_version(Address(origin), detail, now)
        else:
            # Whatever it was, the answer's first field tells its sender which version is spoken here.
            self.outbox.send(ReplyTo(origin), "", Unwelcome(0, Reason.PROTOCOL, detail))
