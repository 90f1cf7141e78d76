"""One engine rank as a whole: calls, packets and time come in, messages and commands go out.

    calls     lend, withdraw, withdraw_ticket  -> prefill side
              follow, announce, pull, cancel, abandon, discharge -> decode side
              shut                              -> prefill side, readers
              close                             -> both sides
    packets   of readers                        -> prefill side, readers
              of ranks that we read             -> decode side
    time      tick                              -> the parts that asked to be woken

Inputs come with `now` if they depend on it. Reports of the planes on transfers, peers and addresses go directly to
`RankCore.decode`, those on packed copies and lost readers to `RankCore.prefill`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import msgspec

from asynckv.arguments import MAX_INTEGER
from asynckv.config import EngineConfig
from asynckv.core import wire
from asynckv.core.attempts import NONE, Request, RequestState
from asynckv.core.decode import DecodeSide
from asynckv.core.following import Following
from asynckv.core.head_start import HeadStart
from asynckv.core.lease import Lease
from asynckv.core.ledger import Ledger
from asynckv.core.limits import Limiter, warn_after
from asynckv.core.outbox import FollowReached, Milestone, Outbox, RequestReached, Shared
from asynckv.core.peer import Peer, PeerState
from asynckv.core.peers import Peers
from asynckv.core.prefill import PrefillSide
from asynckv.core.pull import KIND, Kind, Pull, PullRequest, PullState
from asynckv.core.readers import Identity, Readers
from asynckv.core.routes import Route, refusal
from asynckv.core.source import ROLE, Source
from asynckv.core.timers import Timed, Timers
from asynckv.core.types import Address, Cohort, FollowParams, KVTransferParams, PullId, Reason, ReplyTo, RequestId
from asynckv.errors import AsyncKVError, EngineClosed, LocalProtocolError, Overloaded, RemoteProtocolError
from asynckv.geometry.blocks import check_block_ids
from asynckv.geometry.check import check_layout
from asynckv.geometry.overlap import pools
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.staging import ReadCosts

AGAIN_S = 1.0  # seconds until an item is woken again after its turn met a bug
PARTS = 4  # rows, boxes, dims and runs of a recipe that take as long as a ping
MALFORMED = 100  # cost of a malformed packet to its sender, in pings

_OF_READERS, _QUESTIONS = get_args(wire.OfReader), (wire.Hello, wire.StatusRequest)
_RECEIVED = {kind: f"received.{kind.__name__.lower()}" for kind in get_args(wire.Message)}
COSTS = dict.fromkeys(_RECEIVED, 2.0) | {
    wire.Ping: 1.0,
    wire.Pong: 1.0,
    wire.Claim: 2.5,
    wire.Release: 2.5,
    wire.Pack: 10.0,
    wire.Follow: 10.0,
}
"""Most work of a message, in pings (2 to 3 us each); a `Pack` costs more with a longer recipe (`PARTS`)."""

Ask = Callable[[ReplyTo, wire.StatusRequest, Callable[[wire.Status], None], float, str], bool]
"""Take a question: its connection, the question, a call that answers it, the time, and the key or host of the asker.
Return False if there is no answer at all."""

SLICE = 1024.0  # work of a part of a packet, 2 to 3 ms; a larger packet is handled in several turns of the loop
BYTES = 4  # a packet of so many bytes takes no longer than a ping
MAX_UNREAD, MAX_SENDERS = 16, 64  # packets that wait behind a large one of the same connection, and such connections


class RankCore:
    def __init__(self, identity: Identity, config: EngineConfig, costs: ReadCosts | None = None) -> None:
        check_layout(identity.layout)
        layout = identity.layout
        self.identity, self.config = identity, config
        self.outbox = Outbox(identity.incarnation)
        self.timers = Timers()
        self.ledger = Ledger([g.num_blocks for g in layout.groups], pools(layout))
        self.cohort, self.readers = identity.cohort, Readers(identity, self.outbox)
        shared = Shared(self.ledger, self.outbox, self.timers, itertools.count())
        self.prefill = PrefillSide(identity, config, shared, self.readers)
        self.lend, self.withdraw = self.prefill.lend, self.prefill.withdraw
        self.withdraw_ticket = self.prefill.offers.withdraw
        self.decode = DecodeSide(identity, config.pull, shared, costs)
        self.decode.follows.on_late, self.decode.follows.on_piece = self._release_late, self._offered_piece
        self.on_question: Ask = lambda *_: True
        self.on_overdue: Callable[[Lease | Pull, float], None] = lambda *_: None
        """The engine sets both: what answers questions about this rank, and what hears of requests held for long."""
        limits = config.limits
        self._messages = Limiter(limits.messages_per_s, limits.message_burst)
        self._hellos = Limiter(limits.hellos_per_s, limits.hello_burst)
        self._refusals = Limiter(limits.hellos_per_s, limits.hello_burst)
        self._hellos_of_one = Limiter(limits.hellos_per_s / 4, limits.hello_burst / 4)
        """Limit of each connection, because without keys a whole host shares the other limit."""
        self._unread: OrderedDict[Address | ReplyTo, deque[tuple[bytes | wire.Packet, str]]] = OrderedDict()
        """The rest of a large packet, and packets that came behind it, by connection; the next one comes first."""
        self.read_on_at = math.inf
        self._pull_ids = itertools.count(1)
        self._pull_prefix = f"{identity.incarnation[:16]}-"

    # -- calls -------------------------------------------------------------------------------------

    def follow(
        self,
        request_id: str,
        target: FollowParams,
        cohort_id: str,
        wait_s: float,
        now: float,
        *,
        takes_pieces: bool = False,
    ) -> Following:
        """Ask a prefill rank for the params of the request that brings a ticket, for `wait_s` at most."""
        self.prefill.check_open()
        self._check_not_between(request_id)
        if len(self.decode.follows.by_id) >= self.config.pull.max_queued:
            raise self._overloaded(request_id, "requests are followed")
        route = self.decode.routes.answered_for(request_id, target)
        self._check_other(request_id, target.engine_id, route)
        following = Following(
            follow_id=PullId(f"{self._pull_prefix}f{next(self._pull_ids)}"),
            request_id=RequestId(request_id),
            target=target,
            cohort=self._cohort(cohort_id),
            rank=next((rank for rank in route.ranks if rank.is_predicted), route.ranks[0]),
            since=now,
            deadline=now + wait_s,
            have=0 if takes_pieces else -1,
        )
        self.decode.follow(following, now)
        return following

    def _need_not_follow(self, request_id: str, params: KVTransferParams, now: float) -> None:
        """End a following whose request has its params, because another rank heard of them first."""
        if (following := self.decode.follows.by_request.get(RequestId(request_id))) is not None:
            self.decode.follows.known(following, params, now)

    def _release_late(self, following: Following, now: float) -> None:
        assert following.params is not None
        early = [x.head for x in self.decode.between.values() if x.state is RequestState.EARLY]
        if self.is_read(following.params) or any(head is not None and head.following is following for head in early):
            return  # another rank was offered it, and this one reads it; or its caller hears of it too, and decides
        cohort_id = following.cohort.id if following.cohort.id != self.cohort.id else ""
        with suppress(AsyncKVError):
            # Under a name of its own, because the request's may be another's by now.
            request = PullRequest(following.follow_id, (), following.params, cohort_id)
            self.let_go(request, Reason.DISCHARGED, now)

    def _cohort(self, cohort_id: str) -> Cohort:
        return msgspec.structs.replace(self.cohort, id=cohort_id) if cohort_id else self.cohort

    def _check_other(self, request_id: str, engine_id: str, route: Route) -> None:
        if engine_id == self.identity.engine_id and self.identity.incarnation in [r.place[1] for r in route.ranks]:
            raise refusal(
                request_id,
                f"request {request_id[:200]!r} is lent by this very rank, and a NIXL agent cannot read from itself; "
                f"use the blocks in place, or discharge the request",
            )

    def announce(self, request_id: str, params: KVTransferParams, cohort_id: str, wait_s: float, now: float) -> Pull:
        """Start a pull without blocks. Handshake, claim and renewals begin now, and last for `wait_s` at most."""
        self._check_not_between(request_id)
        self._need_not_follow(request_id, params, now)
        pull = self.decode.by_request.get(RequestId(request_id))
        if pull is not None and pull.lists is None:
            self._check_announced(pull, PullRequest(request_id, (), params, cohort_id))
            self.decode.extend(pull, now + wait_s, now)
            return pull
        self.prefill.check_open()
        pull = self._make_pull(PullRequest(request_id, (), params, cohort_id), wait_s, now, KIND.ANNOUNCEMENT)
        self.decode.announce(pull, now)
        return pull

    def _make_pull(
        self, request: PullRequest, wait_s: float, now: float, kind: Kind, owner: Request | None = None
    ) -> Pull:
        params, cohort_id = request.params, request.cohort_id
        route = self.decode.routes.answered_for(request.request_id, params)
        reads = kind in (KIND.PULL, KIND.ANNOUNCEMENT)
        if reads and params.engine_id == self.identity.engine_id:
            self._check_other(request.request_id, params.engine_id, route)
        pull_id = PullId(f"{self._pull_prefix}{next(self._pull_ids)}")
        # Only the stages themselves know their layers, so any of them may turn out to hold nothing of ours.
        predicted, other = (ROLE.READ, ROLE.UNKNOWN) if reads else (ROLE.RELEASE_ONLY, ROLE.RELEASE_ONLY)
        warn_s = warn_after(params.lease_s, self.config.log.held_fraction)
        share = self.config.pull.second_look
        sources: list[Source] = []
        for rank in route.ranks:
            role = predicted if rank.is_predicted else other
            sources.append(Source(pull_id, rank, role, confirms=params.recall is True))
        return Pull(
            pull_id=pull_id,
            request_id=RequestId(request.request_id),
            params=params,
            cohort=self._cohort(cohort_id) if cohort_id else self.cohort,
            digest=wire.blocks_digest(params),
            sources=sources,
            route=route,
            limits=self.config.pull,
            called_at=now,
            deadline=now + wait_s,
            history=[(now, PullState.ANNOUNCED)],
            warn_s=warn_s,
            warn_at=now + warn_s,
            priority=request.priority,
            attempt=1 if owner is None else max(owner.attempts, 1),
            retryable=owner.retryable if owner is not None and owner.retries else NONE,
            is_last=request.is_last,
            kind=kind,
            owner=owner,
            looks=share > 0 and int(hashlib.sha256(pull_id.encode()).hexdigest()[:8], 16) < share * (1 << 32),
        )

    def pull(self, wanted: PullRequest, retries: int, timeout_s: float, now: float) -> Request:
        """Fill blocks: continue the pull that was announced under this id, or start a new one. After a failure that may
        pass, other attempts follow, at most `retries`. If this raises, nothing was begun.
        """
        early = self.decode.between.get(RequestId(wanted.request_id)) if self.decode.between else None
        if early is not None:
            self._check_goes_on(early, wanted)
        if self.decode.follows.by_id:
            self._need_not_follow(wanted.request_id, wanted.params, now)
        if early is not None:
            early.known(wanted, retries, now + timeout_s, now)
            if (piece := early.pull) is not None and piece.reason is None:
                if piece.num_posted:
                    self.decode.extend(piece, min(piece.deadline, early.deadline), now)
                else:
                    self.decode.cancel(piece, now)  # it queues behind all others, and the request must not
            self._go_on(early, now)
            if early.state is RequestState.PAUSING:  # claim and renew meanwhile, as any other pull that waits
                wait_s = timeout_s + self.config.pull.drain_s  # the request ends it before that
                with suppress(AsyncKVError):  # then the attempt is refused
                    pull = self._make_pull(wanted, wait_s, now, KIND.PULL)
                    pull.retryable = early.retryable  # if it fails, the attempt itself follows
                    self.decode.announce(pull, now)
            return early
        request = Request(wanted, retries, self.config.pull.retry_s, now + timeout_s, now)
        self._attempt(request, now)
        return request

    def start_early(self, wanted: PullRequest, now: float) -> Request:
        """Fill blocks with pieces of a request that is followed, first of all with the one that its params describe.

        `pull` with the same id and blocks goes on with the whole request, and `cancel` ends it.
        """
        self._check_not_between(wanted.request_id)
        self.prefill.check_open()
        if (name := RequestId(wanted.request_id)) in self.decode.by_request:
            raise LocalProtocolError(f"request {name[:200]!r} is being pulled already; it needs no head start")
        layout = self.identity.layout
        blocks = check_block_ids(layout, wanted.groups, wanted.num_tokens)
        held = self.ledger.check("writing", {group: ids for group, (_, ids) in enumerate(blocks)})
        following = self.decode.follows.by_request.get(name)
        until = (now if following is None else following.deadline) + self.config.pull.announce_s
        request = Request(wanted, 0, self.config.pull.retry_s, until, now, RequestState.EARLY, 0, is_known=False)
        holder = f"{self._pull_prefix}e{next(self._pull_ids)}"
        request.head = HeadStart(layout, holder, blocks, wanted.hashes, following, waiting=wanted.params)
        self.ledger.hold(holder, "writing", name, held, now)
        self.decode.between[name] = request
        self.timers.wake(request, until)
        self._ahead(request, now)
        return request

    def _offered_piece(self, following: Following, piece: KVTransferParams, now: float) -> None:
        request = self.decode.between.get(following.request_id)
        if request is not None and (head := request.head) is not None:
            if head.waiting is None or head.waiting.num_tokens < piece.num_tokens:  # else it is a late offer
                head.waiting = piece
            self._ahead(request, now)
        elif following.have >= 0:
            # It needs blocks first. Until its caller has some, ask for the whole request alone.
            self.decode.follows.ask(following, -1, now)
            self.outbox.commands.append(FollowReached(following, piece=piece))

    def _ahead(self, request: Request, now: float) -> None:
        """Read the piece that waits, unless the one before may still write, or nothing says what comes after it."""
        head, name = request.head, RequestId(request.wanted.request_id)
        following = None if head is None else head.asked
        if head is None or head.waiting is None or following is None or not request.is_free:
            return
        piece, head.waiting = head.waiting, None
        is_known = piece.num_tokens <= head.have  # it is cached, or offered late
        lists = head.lists(piece) if piece.key != head.tried else None
        if is_known or lists is None:
            if (have := head.have if is_known else -1) > following.have or have < 0 <= following.have:
                self.decode.follows.ask(following, have, now)
            return
        head.tried, wait_s = piece.key, self.config.pull.timeout_s
        asked = PullRequest(name, (), piece, following.cohort.id, priority=MAX_INTEGER)
        before = request.pull
        try:
            request.pull = pull = self._make_pull(asked, wait_s, now, KIND.PIECE, request)
            self.decode.start(pull, lists, {}, now + wait_s, now)
        except AsyncKVError:  # its ranks cannot be read
            self.outbox.counters["pieces.refused"] += 1
            request.pull = before
            self.decode.follows.ask(following, -1, now)

    def _check_goes_on(self, early: Request, wanted: PullRequest) -> None:
        """Refuse a pull of a request that is between two attempts, or that names other blocks than its head start."""
        if early.state is not RequestState.EARLY or early.head is None:
            self._check_not_between(wanted.request_id)
        elif not early.head.is_of(wanted.params):
            raise LocalProtocolError(
                f"request {wanted.request_id[:200]!r} has a head start of what it follows, and these params are of "
                f"another request; cancel it first"
            )
        else:
            tokens = wanted.wanted_tokens()
            early.head.rest(check_block_ids(self.identity.layout, wanted.groups, tokens), tokens, wanted.params)

    def _attempt(self, request: Request, now: float) -> None:
        """Begin the next attempt at a request."""
        wanted, is_first = request.wanted, request.attempts == 1
        request_id, params = wanted.request_id, wanted.params
        pull = self.decode.by_request.get(RequestId(request_id))
        if is_first and pull is None and self.prefill.closed_as and request.head is None:
            self.prefill.check_open()
        num_tokens = params.num_tokens
        if wanted.num_tokens is not None or wanted.hashes is not None:
            num_tokens = wanted.wanted_tokens()
        blocks = whole = check_block_ids(self.identity.layout, wanted.groups, num_tokens)
        if request.head is not None:
            blocks = request.head.rest(whole, num_tokens, params)
        # Check before anything is started, so that a caller with a wrong block may ask again with another.
        written = {}
        for group, (_, ids) in enumerate(whole):  # a comprehension is one more call
            written[group] = ids  # also what pieces have brought, which nothing else may fill meanwhile
        held = self.ledger.check("writing", written)
        lists = BlockLists(blocks, params.groups, num_tokens, params.num_tokens)
        most = self.config.pull.max_queued
        may_be_full = is_first and len(self.decode.started) >= most
        if may_be_full and self.decode.num_waiting >= most and not lists.is_empty:
            raise self._overloaded(request_id, "pulls wait")
        if pull is not None and pull.lists is None:
            self._check_announced(pull, wanted)
            # The announcement lacked these options, or the caller has changed them since.
            pull.is_last, pull.priority, pull.retryable = wanted.is_last, wanted.priority, request.retryable
        else:
            # A full prefix hit reads no rank, so no rank need be met, and all ranks are released.
            kind = KIND.HIT if lists.is_empty else KIND.PULL
            pull = self._make_pull(wanted, request.deadline - now, now, kind, request)
        before = request.pull
        request.pull, pull.owner = pull, request
        try:
            self.decode.start(pull, lists, held, request.deadline, now)
        except BaseException:
            # After an error the caller reuses its blocks, so nothing may fill them any more.
            pull.owner, request.pull = None, before
            if self.decode.between.get(pull.request_id) is request:  # it failed for now, and something raised then
                del self.decode.between[pull.request_id]
                self.timers.forget(request)
            if self.decode.pulls.get(pull.pull_id) is pull:
                if pull.reason is None:
                    self.decode.cancel(pull, now)
                else:
                    self.timers.wake(pull, now)
            raise

    def _overloaded(self, request_id: str, what: str) -> Overloaded:
        self.outbox.counters["pulls.overloaded"] += 1
        most = self.config.pull.max_queued
        return Overloaded(
            f"request {request_id[:200]!r} is not taken: {most} {what} already; ask again later, elsewhere, or raise "
            f"max_queued",
            request_id=request_id,
            reason=Reason.QUEUE_FULL,
            is_retryable=True,
        )

    def _go_on(self, request: Request, now: float) -> None:
        """Begin the next attempt at a request, wait on for it, or tell the ranks and the caller that none follows."""
        name = RequestId(request.wanted.request_id)
        if self.decode.between.get(name) is not request:
            return  # its turn has come already
        if request.state is RequestState.EARLY and now < request.deadline:
            self.timers.wake(request, request.deadline)
            return self._ahead(request, now)
        if request.state is RequestState.EARLY:
            request.stop(Reason.TIMEOUT)  # no pull has come
        if request.state is RequestState.PAUSING:
            request.time(now)
        if request.state is RequestState.PAUSING:
            self.timers.wake(request, request.next_at if now < request.next_at else request.deadline)
            return
        if not request.has_ended and not request.attempts and request.pull is not None:
            return self.decode.cancel(request.pull, now, request.stopped or Reason.TIMEOUT)  # its end comes back here
        del self.decode.between[name]
        self.timers.forget(request)
        if request.head is not None and request.is_free:
            self.ledger.drop(request.head.holder)
        bug: Exception | None = None
        if request.state is RequestState.TRYING:
            try:
                return self._attempt(request, now)
            except Exception as exc:
                bug = None if isinstance(exc, AsyncKVError) else exc
                # The traceback of a refusal would keep this frame, and so the request with its blocks.
                request.refused(exc if bug else exc.with_traceback(None))
        self.outbox.commands.append(RequestReached(request, Milestone.ENDED))
        if request.pull is not None and request.pull.is_retired:
            self.outbox.commands.append(RequestReached(request, Milestone.RETIRED))
        reason, ahead = request.discharge, None if request.attempts else self.decode.by_request.get(name)
        if ahead is not None:
            ahead.kind, ahead.is_last = KIND.DISCHARGE, request.wanted.is_last  # the request itself is told and logged
            self.decode.cancel(ahead, now, reason or Reason.CANCELLED)
        elif reason is not None:
            with suppress(AsyncKVError):
                self.let_go(request.wanted, reason, now)
        if bug is not None:
            raise bug

    def _check_not_between(self, request_id: str) -> None:
        if request_id in self.decode.between:
            raise LocalProtocolError(f"request {request_id[:200]!r} is being pulled already; cancel it first")

    def _check_announced(self, pull: Pull, request: PullRequest) -> None:
        if pull.params != request.params or pull.cohort.id != (request.cohort_id or self.cohort.id):
            raise LocalProtocolError(
                f"request {request.request_id[:200]!r} was announced with other params or another cohort_id; cancel it "
                f"first"
            )

    def cancel(
        self, request_id: str, now: float, *, follows_on: bool = False, params: KVTransferParams | None = None
    ) -> bool:
        """Give up a request that is followed, announced, pulled, or between two attempts; return False if none is.

        A request with a head start needs its `params`, if it has some by now, to release it.
        """
        name = RequestId(request_id)
        request, pull = self.decode.between.get(name), self.decode.by_request.get(name)
        following = self.decode.follows.by_request.get(name)
        if following is not None and follows_on:
            self.decode.follows.spare(following)
        elif following is not None:
            self.decode.follows.end(following, Reason.CANCELLED, Reason.CANCELLED.value, now)
        if request is not None:
            if not request.is_known and params is not None:
                request.wanted, request.is_known = replace(request.wanted, params=params), True
            request.stop(Reason.CANCELLED, is_last=True)
            self._go_on(request, now)
        elif pull is not None:
            if isinstance(pull.owner, Request):
                pull.owner.stop(Reason.CANCELLED, is_last=True)
            pull.is_last = True
            self.decode.cancel(pull, now)
        return request is not None or pull is not None or following is not None

    def abandon(self, request: Request, now: float) -> None:
        """Give up a request because its caller was cancelled, and may still try again (`is_last`)."""
        request.stop(Reason.CANCELLED)
        if request.pull is not None and request.state is RequestState.TRYING:
            self.decode.cancel(request.pull, now)
        else:
            self._go_on(request, now)

    def is_early(self, request_id: str) -> bool:
        """Return True if a request fills blocks with pieces, and its pull has not been asked for."""
        request = self.decode.between.get(RequestId(request_id))
        return request is not None and request.state is RequestState.EARLY

    def is_pulled(self, request_id: str) -> bool:
        pull = self.decode.by_request.get(RequestId(request_id))
        return (pull is not None and pull.lists is not None) or request_id in self.decode.between

    def is_read(self, params: KVTransferParams) -> bool:
        """Return True if a request is announced, pulled or between two attempts with these params."""
        waiting = [request.wanted.params.key for request in self.decode.between.values()]
        return params.key in waiting or params.key in [pull.params.key for pull in self.decode.pulls.values()]

    def discharge(self, request_id: str, params: KVTransferParams, cohort_id: str, now: float) -> None:
        """Tell all ranks of a request that this reader needs nothing of it, announced or not.

        No rank is met and nothing new begins, so this is allowed while the engine drains.
        """
        self._need_not_follow(request_id, params, now)
        request = PullRequest(request_id, (), params, cohort_id)
        pull = self.decode.by_request.get(RequestId(request_id))
        if pull is None:
            pull = self._make_pull(request, self.config.pull.timeout_s, now, KIND.HIT)
            self.decode.announce(pull, now)
        elif pull.lists is not None:
            raise LocalProtocolError(f"request {request_id[:200]!r} is being pulled; cancel it")
        else:
            self._check_announced(pull, request)
        self.decode.cancel(pull, now, Reason.DISCHARGED)

    def let_go(self, request: PullRequest, reason: Reason, now: float) -> None:
        """Tell all ranks of a request that no attempt follows. No pull of the request may be without an outcome."""
        request = replace(request, is_last=True)
        pull = self._make_pull(request, self.config.pull.timeout_s, now, KIND.DISCHARGE)
        self.decode.announce(pull, now)
        self.decode.fail(pull, reason, "no attempt follows", now)

    def close(self, now: float, how: str = "closed") -> None:
        """Take nothing new, cancel every pull, and revoke every lease. Goodbye follows once that has settled."""
        self.shut(how)
        self._stop_requests(now)
        for pull in list(self.decode.by_request.values()):
            self.decode.cancel(pull, now)
        self.prefill.offers.end_all_pieces()
        for lease in list(self.prefill.leases.values()):
            self.prefill.revoke(lease, now, how)

    def destroyed(self, now: float) -> None:
        """End all transfers and requests, because nothing reads or writes our memory any more."""
        self.decode.destroyed(now)
        self._stop_requests(now)
        for request in self.requests:  # of a bug, because all pulls were cancelled
            if request.pull is not None:
                request.pull.owner = None
            request.refused(EngineClosed("the engine was closed"))
            self.outbox.commands.append(RequestReached(request, Milestone.ENDED))

    def _stop_requests(self, now: float) -> None:
        for following in list(self.decode.follows.by_id.values()):
            self.decode.follows.end(following, Reason.ENGINE_CLOSED, "the engine was closed", now)
        for request in self.requests:
            request.stop(Reason.ENGINE_CLOSED if request.attempts else Reason.CANCELLED)  # as pulls that have begun
            self._go_on(request, now)

    def shut(self, how: str = "draining") -> None:
        """Take nothing new, and tell all ranks that shook hands. `how` is a word for people."""
        was_open = not self.prefill.closed_as
        self.prefill.shut(how)
        if was_open:
            self.readers.say_draining()

    def say_goodbye(self) -> None:
        """Tell all ranks on either side that this one ends in order, so that no alert takes it for killed."""
        self.readers.say_goodbye()
        for peer in self.decode.peers.by_place.values():
            if peer.state is PeerState.READY:
                self.outbox.send(peer.address, peer.incarnation, wire.Goodbye())

    @property
    def requests(self) -> list[Request]:
        """Requests that are not over, or of which ranks are still to be told so."""
        owners = [pull.owner for pull in self.decode.by_request.values()]  # no pieces are among these
        return [*self.decode.between.values(), *[owner for owner in owners if isinstance(owner, Request)]]

    @property
    def is_idle(self) -> bool:
        """True if no block and no promise is left to wait for. A request that is only followed holds nothing."""
        decode = self.decode
        return not (decode.pulls or decode.between or self.prefill.leases or self.ledger.occupants)

    @property
    def is_bound(self) -> bool:
        """True while a lease is open, a pull has no outcome yet, or another attempt may follow it."""
        has_promised = bool(self.prefill.leases or self.decode.between)
        return has_promised or any(not pull.is_published for pull in self.decode.pulls.values())

    # -- events ------------------------------------------------------------------------------------

    def receive(self, origin: Address | ReplyTo, data: bytes | wire.Packet, now: float, principal: str = "") -> bool:
        """Take a packet's bytes, received before `now`. `principal` is the key or host that it came from.

        Of a packet that takes long, only a part is handled now, and the rest (a `wire.Packet`) in later turns. Return
        True if its connection asks so often that it should not be heard for a while.
        """
        proven = principal if principal.startswith("key:") else ""
        sharer = proven or origin  # one key's connections share, one host's do not
        if isinstance(data, wire.Packet):
            packet = data
        else:
            waiting = self._unread.get(origin) if self._unread else None
            is_full = waiting is not None and len(waiting) >= MAX_UNREAD
            if is_full or not self._messages.take(sharer, now):
                self.outbox.counters["dropped.too_many"] += 1
                return False
            if waiting is not None:
                waiting.append((data, principal))
                return False
            try:
                packet = wire.decode(data)
            except wire.UNREADABLE:
                return self._refuse(origin, data, now, sharer)
            if packet.major != wire.MAJOR:
                return self._refuse(origin, data, now, sharer)
            cost = 0.0 if packet.messages else 1.0
            for message in packet.messages:
                cost += COSTS[type(message)] if type(message) is not wire.Pack else _cost_of_copy(message)
            self._messages.buckets[sharer][0] -= cost - 1.0  # one was taken before the messages were known
            if cost > SLICE and len(packet.messages) > 1:
                if len(self._unread) >= MAX_SENDERS:
                    self.outbox.counters["dropped.too_many"] += 1
                    return False
                packet, *rest = _parts(packet)
                self._unread[origin] = deque([(part, principal) for part in rest])
                self.read_on_at = now
        misdirected = packet.target not in ("", self.identity.incarnation)
        if isinstance(origin, str):
            if misdirected:
                self.outbox.counters["dropped.misdirected"] += 1
                return False
            for message in packet.messages:
                self.decode.receive(message, Address(origin), packet.sender, now)
            return False
        refused: wire.Message | None = None
        for message in packet.messages:
            if refused is not None and isinstance(message, _QUESTIONS):
                self.outbox.counters["dropped.too_many_hellos"] += 1  # a packet may hold hundreds of them
                continue
            self.outbox.counters[_RECEIVED[type(message)]] += 1
            if misdirected:
                self.outbox.counters["dropped.misdirected"] += 1
                self.readers.misdirected(message, ReplyTo(origin), packet.sender)
            elif isinstance(message, _OF_READERS):
                self.prefill.receive(message, ReplyTo(origin), packet.sender, now, proven)
            elif not self._serve(message, ReplyTo(origin), packet.sender, now, principal, proven):
                self.outbox.counters["dropped.too_many_hellos"] += 1
                refused = message
        return isinstance(refused, wire.StatusRequest) and not self._refusals.take(principal or origin, now)

    def agent_lost(self) -> None:
        """Note that the agent that remote readers reach has ended. Lent blocks stay lent."""
        self.readers.agent_lost()
        self.outbox.counters["agents_lost"] += 1

    def agent_replaced(self, agent_name: str, metadata: bytes) -> None:
        """Let readers that shake hands from now on read through another agent."""
        self.readers.agent_replaced(agent_name, metadata, self.prefill.closed_as, bool(self.prefill.leases))

    def tick(self, now: float, most: int = 128) -> None:
        """Let time pass for pulls, leases and peers, in about `most` steps. `next_at` says when to call again."""
        if self._unread:
            self._read_on(now)
        self.prefill.tick(now)
        while most > 0 and (item := self.timers.pop(now)) is not None:
            try:
                most -= self._wake(item, now)
            except Exception:
                self.timers.wake(item, now + AGAIN_S)  # a reported bug must not stop the item's deadlines
                raise

    def _wake(self, item: Timed, now: float) -> int:
        """Let time pass for one item, and return the steps that this takes at most."""
        match item:
            case Pull() as pull:
                if self.decode.tick_pull(pull, now) and (pull.kind is not KIND.PIECE or pull.is_published):
                    self.on_overdue(pull, now)
                return pull.steps
            case Lease() as lease:
                steps = lease.steps
                if self.prefill.tick_lease(lease, now):
                    self.on_overdue(lease, now)
                return steps
            case Peer() as peer:
                steps = 1 + len(peer.pulls) + len(peer.follows)
                self.decode.tick_peer(peer, now)
                return steps
            case Following() as following:
                self.decode.follows.tick(following, now)
            case Request() as request:
                steps = 1 if request.pull is None else request.pull.steps
                self._go_on(request, now)
                return steps
            case DecodeSide() as decode:
                decode.meet_waiting(now)
            case Peers() as peers:
                peers.greet(now)
            case other:
                raise AssertionError(other)
        return 1

    @property
    def next_at(self) -> float:
        return min(self.timers.next_at, self.prefill.parking.next_at, self.read_on_at)

    # -- inside ------------------------------------------------------------------------------------

    def _read_on(self, now: float) -> None:
        """Handle the next part of a large packet, or small ones that came behind one. Connections take turns."""
        left = SLICE
        while self._unread and left > 0:
            origin, waiting = self._unread.popitem(last=False)
            packet, principal = waiting.popleft()
            left -= SLICE if isinstance(packet, wire.Packet) else len(packet) / BYTES
            try:
                self.receive(origin, packet, now, principal)
            finally:
                if waiting:
                    self._unread.setdefault(origin, deque()).extend(waiting)
                self.read_on_at = now if self._unread else math.inf

    def _serve(
        self, message: wire.Message, route: ReplyTo, source: str, now: float, principal: str, proven: str
    ) -> bool:
        """Take a message that is about no lease. Return False if it is a question, and one too many."""
        match message:
            case wire.Hello() if self._may_ask(principal, route, now):
                self.readers.greet(message, route, source, proven, self.prefill.closed_as, bool(self.prefill.leases))
            case wire.Ping():
                self.outbox.send(route, source, wire.Pong(message.nonce))
            case wire.Pong():
                self.prefill.answered(route, now)
            case wire.Pack():
                self.prefill.pack(message, route, source, now, principal, proven)
            case wire.Unpack():
                self.prefill.unpack(message, source, now, proven)
            case wire.Follow():
                self.prefill.offers.follow(message, route, source, now, proven, self.prefill.closed_as)
            case wire.Unfollow():
                self.prefill.offers.unfollow(message, route, source)
            case wire.StatusRequest(most=0) if self.config.inspect.enabled and not self._may_ask(principal, route, now):
                return False  # a question for counts alone is limited here, as counting many requests takes long
            case wire.StatusRequest():
                return self.on_question(route, message, lambda s: self.outbox.send(route, source, s), now, principal)
            case wire.Goodbye() if self.readers.minor_versions.pop((source, route), None) is not None:
                self.outbox.counters["readers.left"] += 1
            case wire.Hello():
                return False
            case _:
                self.outbox.counters["dropped.unexpected"] += 1
        return True

    def _may_ask(self, principal: str, route: ReplyTo, now: float) -> bool:
        is_shared = principal.startswith("host:")
        return (not is_shared or self._hellos_of_one.take(route, now)) and self._hellos.take(principal or route, now)

    def _refuse(self, origin: Address | ReplyTo, data: bytes, now: float, sharer: str | bytes) -> bool:
        self.outbox.counters["dropped.malformed"] += 1
        self._messages.charge(sharer, now, MALFORMED)
        try:
            wire.decode_packet(data)
        except wire.OtherVersion as exc:
            if isinstance(origin, str):
                self.decode.foreign_version(Address(origin), str(exc), now)
            else:
                # The first field of the answer tells the sender which version this side speaks, whatever it asked.
                self.readers.refuse("", "hello", ReplyTo(origin), "", wire.Unwelcome(0, Reason.PROTOCOL, str(exc)))
        except RemoteProtocolError:
            pass  # it is no packet of any version
        return False


def _cost_of_copy(pack: wire.Pack) -> float:
    recipe = pack.recipe
    parts = len(recipe.rows) + len(recipe.blocks) + sum([1 + len(dims) for _, dims in recipe.boxes])
    return COSTS[wire.Pack] + parts / PARTS


def _parts(packet: wire.Packet) -> list[wire.Packet]:
    """Cut a packet into parts that take about `SLICE` each."""
    parts, messages, cost = list[wire.Packet](), list[wire.Message](), 0.0
    for message in packet.messages:
        more = _cost_of_copy(message) if isinstance(message, wire.Pack) else COSTS[type(message)]
        if messages and cost + more > SLICE:
            parts.append(msgspec.structs.replace(packet, messages=tuple(messages)))
            messages, cost = [], 0.0
        messages.append(message)
        cost += more
    return [*parts, msgspec.structs.replace(packet, messages=tuple(messages))]
