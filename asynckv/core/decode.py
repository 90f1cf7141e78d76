"""The decode side of one rank: its pulls, the peers that they read from, and the choice of the pull that reads next.

This module carries out, in order, the effects of pulls (`core/pull.py`) and the duties of peers (`core/peer.py`). An
event at one peer touches only the pulls that read from that peer.

A pull first meets the ranks that the usual rule predicts. If the memory of those ranks does not cover ours, the pull
meets all ranks that this rank answers for, and any of them may be missing.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never, get_args

from asynckv.config import PullConfig
from asynckv.core import wire
from asynckv.core.attempts import Request, RequestState
from asynckv.core.events import ENDING, TransferEnded
from asynckv.core.flow import READING, Admission, Posting
from asynckv.core.following import Following
from asynckv.core.follows import Follows
from asynckv.core.limits import Limiter, remember
from asynckv.core.news import release_refused, release_unanswered
from asynckv.core.outbox import DetachRead, Milestone, PostRead, PullReached, RequestReached, Shared, Traced
from asynckv.core.peer import FINAL, Due, Peer, PeerState
from asynckv.core.peers import Peers
from asynckv.core.pull import DO, KIND, Effect, Pull, PullState
from asynckv.core.readers import Identity
from asynckv.core.routes import ReadyRoute, Routes
from asynckv.core.slots import Slots
from asynckv.core.source import RELEASE, ROLE, UNBLAMED, Blame, RemoteRank, Source
from asynckv.core.types import Address, How, Key, PullId, Reason, RequestId, TransferId, members
from asynckv.errors import LayoutError, LocalProtocolError, PlanRefused, RemoteTooShort
from asynckv.geometry.bounds import Int64s
from asynckv.geometry.gather import can_ask, recipe
from asynckv.geometry.look import NUM_PLACES, Look
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import Plan, ReadRequest, plan_read
from asynckv.geometry.staging import ReadCosts
from asynckv.geometry.tables import PeerTables
from asynckv.told import BytesDiffer, PeerDraining, SlowGeometry, TableRefused

S, P, M = members(PeerState), members(PullState), members(Milestone)

FEW, MEETINGS_PER_S, MEETING_BURST = 16, 3_200.0, 128
"""Unknown ranks of a request that are met at once, however many there are; of requests with more ranks, those that are
met in a second, and at once after a silence. A request of 128 takes the loop some milliseconds."""

MAX_ABANDONED = 1024
"""Requests that are remembered as abandoned during a standstill; beyond that the oldest is forgotten."""


@dataclass(slots=True)
class _Transfer:
    pull: Pull
    source: Source
    peer: Peer
    read: ReadRequest | Look
    posted_at: float
    is_packed: bool = False  # True once a packed copy of the owner's is read
    beside: int = 0  # transfers of the peer when this one began, if it shows how long reads take with or without copies
    is_detached: bool = False  # True once it concerns only the peer: its pull goes on without it


PROOF_S = 2.0  # for the grant of a piece that was read: a rank may get the order to lend it a step later than another
_TAKEN_BACK = frozenset({Reason.UNKNOWN, Reason.REVOKED})  # refusals of the claim of a piece that its owner has ended

Answer = wire.Ack | wire.Granted | wire.NotYet | wire.Refused | wire.Packed
_ANSWERS = get_args(Answer)


class DecodeSide:
    def __init__(self, identity: Identity, config: PullConfig, shared: Shared, costs: ReadCosts | None) -> None:
        self._ledger, self._outbox, self._timers, self._arrivals = shared
        self._layout, self._config, self._nonces = identity.layout, config, itertools.count(identity.first_nonce)
        self.pulls: dict[PullId, Pull] = {}
        self.by_request: dict[RequestId, Pull] = {}  # pulls without an outcome, by the caller's id
        self.started: set[PullId] = set()
        self.between: dict[RequestId, Request] = {}
        """Requests that are to begin another attempt, or to tell their ranks that none follows (`RankCore`)."""
        self.transfers: dict[TransferId, _Transfer] = {}
        self.admission = Admission(config.total_requests, config.window_requests)
        self.alive_at = math.inf
        """When the embedder last gave a sign of life; infinite if the embedder itself runs this loop."""
        self.abandoned: dict[Key, tuple[float, str]] = {}
        """Requests that were let go because the embedder stood still: its last sign of life, and a text."""
        self.answered: deque[PostRead] = deque()  # reads that waited for a packed copy, and are to be posted
        self.entered: dict[Pull, None] = {}  # pulls that may read and never waited; their plans come after their claims
        self.posting = Posting(config.total_bytes, config.total_descriptors)
        self.routes = Routes(self._layout, self._tables_made, costs)
        self.peers = Peers(identity, config, shared, self._nonces, self.routes)
        self.follows = Follows(config, shared, self._nonces, self.peers)
        self._transfer_ids = itertools.count(1)
        self.scheduled_at = math.inf  # when the next pull of `_to_meet` has its turn
        self._to_meet: dict[Pull, None] = {}
        self._meetings = Limiter(MEETINGS_PER_S, MEETING_BURST)
        self._least_packed = 0 if costs is None else costs.least_packed
        self._places: Slots[TransferId] = Slots(NUM_PLACES if config.second_look else 0)
        self._to_look: dict[Source, None] = {}  # sources that wait for one of these places

    # -- calls -------------------------------------------------------------------------------------

    def announce(self, pull: Pull, now: float) -> None:
        """Take a new pull without blocks: meet the peers that it will read from, claim, and wait for `start`."""
        self.start(pull, None, {}, math.inf, now)

    def start(
        self, pull: Pull, lists: BlockLists | None, blocks: Mapping[int, Int64s], deadline: float, now: float
    ) -> None:
        """Give a new or announced pull its blocks, which the ledger has just found free; or announce a new one."""
        # A full prefix hit reads nothing, so routes remember nothing about it.
        ready = None if lists is None else pull.route.ready.get(lists.wanted)
        if ready is not None and (ready.num_changes != self.peers.num_changes or pull.params.key in self.abandoned):
            ready = None
        if pull.pull_id in self.pulls:
            pull.arrival = next(self._arrivals)  # an announced pull queues from the moment that it has blocks
        else:
            if pull.kind is not KIND.PIECE:
                if pull.request_id in self.by_request:
                    raise LocalProtocolError(
                        f"request {pull.request_id!r} is being pulled already; cancel it or wait for its outcome first"
                    )
                self.by_request[pull.request_id] = pull
                if pull.kind is not KIND.DISCHARGE:
                    self._outbox.counters["pulls.started"] += 1
            self.pulls[pull.pull_id] = pull
            pull.arrival = pull.number = next(self._arrivals)
            if ready is None:
                self._to_meet[pull] = None
                self.meet_waiting(now, pull)
                if pull.failure is not None:
                    return
        if lists is None:
            self._route(pull, now)
            return
        if pull.kind is not KIND.PIECE:  # a piece's blocks are held by its head start
            self._ledger.hold(pull.pull_id, "writing", pull.request_id, blocks, now)
            self.started.add(pull.pull_id)
        if ready is not None:
            for peer in ready.peers:
                self.peers.attach(peer, pull.pull_id, now)
            self._carry_out(pull, pull.routed(ready.tables, now, (lists, deadline)), now, at_once=True)
            return
        self._carry_out(pull, pull.start(lists, deadline, now), now)
        for source in () if lists.is_empty else pull.sources:
            if source.role is ROLE.RELEASE_ONLY and source.tables is None and pull.failure is None:
                # The rank could not be met while the request was only announced, perhaps long ago: try once more.
                source.role = ROLE.READ
                self._meet(pull, source, now)
        self._route(pull, now, at_once=True)

    def meet_waiting(self, now: float, newest: Pull | None = None) -> None:
        """Meet the ranks of pulls that wait for that, in order; a new pull of few unknown ranks does not wait."""
        if newest is not None and self.peers.num_new(newest.route.ranks) <= FEW:
            del self._to_meet[newest]
            self._meet_all(newest, now)
        while self._to_meet and self._meetings.take("", now):
            pull = next(iter(self._to_meet))
            del self._to_meet[pull]
            self._meetings.charge("", now, self.peers.num_new(pull.route.ranks) - 1)
            if pull.is_unrouted:
                self._meet_all(pull, now)
                if pull is not newest:  # else its caller does
                    self._route(pull, now)
        if self._to_meet:
            self._timers.wake(self, now + MEETING_BURST / MEETINGS_PER_S)

    def follow(self, following: Following, now: float) -> None:
        following.number = next(self._arrivals)
        self._make_way(following.target.engine_id, (following.rank,), now)
        self.follows.begin(following, now)

    def _meet_all(self, pull: Pull, now: float) -> None:
        if not pull.route.ready:
            self._make_way(pull.params.engine_id, pull.route.ranks, now)
        # Attach all first, because meeting one may end the pull, and `_tell` treats a rank without a peer as gone.
        for source in pull.sources:
            self._attach(pull, source, now)
        if pull.params.key in self.abandoned and pull.kind in (KIND.PULL, KIND.ANNOUNCEMENT):
            self.fail(pull, Reason.STANDSTILL, self.abandoned[pull.params.key][1], now)
        for source in pull.sources:
            if source.role is ROLE.READ and pull.failure is None:
                self._meet(pull, source, now)

    def cancel(self, pull: Pull, now: float, reason: Reason = Reason.CANCELLED) -> None:
        if pull.reason is None:
            self.fail(pull, reason, reason.value, now)

    def extend(self, pull: Pull, deadline: float, now: float) -> None:
        pull.deadline = deadline
        self._carry_out(pull, [], now)

    def fail(self, pull: Pull, reason: Reason, detail: str, now: float, blame: Blame = UNBLAMED) -> None:
        self._carry_out(pull, pull.fail(reason, detail, now, blame), now)

    def _make_way(self, engine_id: str, ranks: Sequence[RemoteRank], now: float) -> None:
        """Drop ranks that never answered, so that unmet ranks of a new pull have room; see `MAX_UNMET`."""
        for peer in self.peers.in_the_way(engine_id, ranks):
            text = f"{peer.where} has not answered, and gave way to others that were named since; correct the endpoints"
            for other in self._pulls_of(peer):
                source = _source_at(peer, other)
                if source.reads and not source.proven and other.reason is None:
                    # Other ranks might hold the same, but meeting them would take the room that is needed here.
                    other.could_not_meet(now + self._config.backoff_s)
                    self.fail(other, Reason.UNREACHABLE, text, now, Blame((source.name,), How.GAVE_WAY))
            if not peer.hellos:
                peer.told_as = S.GONE  # nothing was said to it, so its end is none
            self._lose(peer, Reason.UNREACHABLE, text, now, How.GAVE_WAY)
            self.peers.drop(peer)

    # -- posting -----------------------------------------------------------------------------------

    def admit(self, now: float) -> Pull | None:
        """Plan the reads of the pull that is next, so that they are posted. A bug met here fails the pull."""
        if (pull := next(iter(self.entered), None)) is not None:
            del self.entered[pull]
        while pull is None and (pull_id := self.admission.next()) is not None:
            pull = self.pulls[pull_id]
            if not self.can_read(pull):
                self.admission.leave(pull_id)  # the pull asks again when its ranks are heard of
                pull = None
        if pull is None:
            return None
        plans: list[tuple[Source, Plan]] = []
        try:
            for source in pull.sources:
                if source.role is not ROLE.READ:
                    continue
                if not source.proven and self.peers.by_place[source.rank.place].line.is_set_aside:
                    self.admission.count(pull.pull_id, False)
                if source.plan is not None:
                    continue
                assert source.tables is not None
                assert pull.lists is not None
                plan = plan_read(source.tables, pull.lists)
                self._outbox.counters["descriptors.planned"] += plan.num_descriptors
                plans.append((source, plan))
                if source.tables.is_full:
                    source.tables.evict()
            effects = pull.admitted(plans, now)
        except Exception as exc:
            reason = Reason.REMOTE_TOO_SHORT if isinstance(exc, RemoteTooShort) else Reason.UNPLANNABLE
            pull.measures.admitted_at = min(pull.measures.admitted_at, now)
            self.fail(pull, reason, str(exc) or repr(exc), now)
            if not isinstance(exc, RemoteTooShort | PlanRefused | LayoutError):
                raise
            return pull
        # A pull that has waited for long warns earlier again, from now on.
        self._carry_out(pull, effects, now, wakes=pull.reason is not None or pull.warn_at < pull.scheduled_at)
        return pull

    def next_read(self, now: float) -> PostRead | None:
        while self.answered:
            post = self.answered.popleft()
            if post.pull.failure is None and post.pull.reason is None:
                return post
            self.ended(TransferEnded(post.transfer_id, ENDING.FAILED, "its request has ended"), 0.0, now)
        while (source := self.posting.next()) is not None:
            pull, peer = self.pulls[source.pull_id], self.peers.by_place[source.rank.place]
            transfer_id = TransferId(next(self._transfer_ids))
            has_room = type(source.next_read) is not Look or self._places.has_room(peer.place)
            if not has_room:
                using = [self.transfers[each] for each in self._places.users]
                if not all(x.is_detached for x in [x for x in using if x.peer is peer] or using):
                    self.posting.pass_over(peer.line)
                    self._to_look[source] = None
                    continue
                source.following = iter(())  # what would be looked at later is not looked at either
            read = pull.posted(source, transfer_id, now)
            self.transfers[transfer_id] = _Transfer(pull, source, peer, read, now)
            peer.transfers.add(transfer_id)
            if not peer.line.in_flight.sizes:
                peer.moved_at = now
            self.posting.posted(peer.line, transfer_id, read.num_bytes, read.num_descriptors)
            self._outbox.counters["descriptors.posted"] += read.num_descriptors
            if not has_room:
                # Looks that hang have the places of this peer, or all. They must not fail pulls, least of other peers.
                self._outbox.counters["looks.skipped"] += 1
                self.ended(TransferEnded(transfer_id, ENDING.DONE), 0.0, now)
                continue
            if isinstance(read, Look):
                place = self._places.take(transfer_id, peer.place)
                return PostRead(transfer_id, peer.agent_name, replace(read, place=place), pull)
            may_ask = pull.kind is not KIND.PIECE and read.table.pack_bytes  # a piece has no grant while it is read
            if not (may_ask and read.num_bytes >= self._least_packed and can_ask(read)):
                return PostRead(transfer_id, peer.agent_name, read, pull)
            self.transfers[transfer_id].beside = len(peer.transfers)
            if not peer.asks.may_ask(now):
                return PostRead(transfer_id, peer.agent_name, read, pull)
            peer.asks.add(transfer_id, read)
            self._ask(peer, now)
        return None

    def _ask(self, peer: Peer, now: float) -> None:
        """Ask a peer for the next packed copies, unless it is lost and its pulls are about to fail."""
        while peer.state in (S.READY, S.SUSPECT) and (wish := peer.asks.next(now)) is not None:
            transfer_id, read = wish
            pull = self.transfers[transfer_id].pull
            self._outbox.send(*peer.place, wire.Pack(pull.params.key, pull.pull_id, transfer_id, recipe(read)))
        self.peers.wake(peer)

    def _packed(self, pull: Pull, source: Source, packed: wire.Packed, now: float) -> None:
        """Read a packed copy, or the blocks if the owner makes none."""
        transfer_id = TransferId(packed.nonce)
        transfer = self.transfers.get(transfer_id)
        read = transfer.peer.asks.take(transfer_id) if transfer is not None and transfer.source is source else None
        if transfer is None or read is None:
            self._outbox.counters["dropped.stale_answer"] += 1
            if packed.slot >= 0 and (transfer is None or not transfer.is_packed):
                self._outbox.send(*source.rank.place, wire.Unpack(packed.key, packed.pull_id, packed.nonce))
            return
        packing = transfer.peer.packing
        if packing is not None and 0 <= packed.slot < packing.num_slots:
            transfer.is_packed, read = True, read._replace(slot=packed.slot)
            pull.measures.num_packed += 1
        else:
            transfer.beside = 0
        self.answered.append(PostRead(transfer_id, transfer.peer.agent_name, read, pull))
        self._ask(transfer.peer, now)

    def ended(self, transfer_ended: TransferEnded, detect_s: float, now: float) -> None:
        transfer = self.transfers.get(transfer_ended.transfer_id)
        if transfer is None:
            self._outbox.counters["transfers.late_news"] += 1
            return
        look = transfer.read if isinstance(transfer.read, Look) else None
        has_place = look is not None and transfer_ended.transfer_id in self._places.users
        if look is not None and transfer_ended.ending is ENDING.IN_DOUBT:
            # It may still write its place, and no block.
            transfer_ended = transfer_ended._replace(ending=ENDING.DETACHED)
        transfer_id, ending, cause, peer_lost, difference = transfer_ended
        pull, source, peer, counters = transfer.pull, transfer.source, transfer.peer, self._outbox.counters
        was_detached = transfer.is_detached
        # A transfer in doubt may stay in doubt for ever, so it must not take room from others.
        self.posting.left(peer.line, transfer_id)
        if ending is ENDING.IN_DOUBT:
            counters["transfers.in_doubt"] += 1
        elif ending is ENDING.DETACHED:
            transfer.is_detached = True
            counters["transfers.detached"] += not was_detached
        else:
            del self.transfers[transfer_id]
            peer.transfers.discard(transfer_id)
            counters["transfers.done" if ending is ENDING.DONE else "transfers.failed"] += 1
        if ending is ENDING.DONE and (look is None or has_place):
            peer.moved_at = now  # only a transfer that is done shows that the peer makes progress
            if peer.line.is_set_aside and peer.state is S.READY:
                self._take_back(peer)
            counters["bytes.read" if look is None else "bytes.looked_at"] += transfer.read.num_bytes
            if transfer.beside and now > transfer.posted_at:
                # By Little's law a peer's reads end that far apart, with packed copies or without.
                apart_s = (now - transfer.posted_at) / transfer.beside
                peer.asks.pace.note(is_first=transfer.is_packed, num_bytes=transfer.read.num_bytes, seconds=apart_s)
        elif ending is ENDING.REFUSED:
            # Preparing a table takes a while, so that its refusal and the pull's deadline may be found in one turn. The
            # pull must fail with the rank's fault, so the rank is lost before the pull hears of its transfer.
            self._outbox.commands.append(TableRefused(peer.name, cause))
            self._lose(peer, Reason.GEOMETRY, f"{peer.where} cannot be read: {cause}", now)
        if has_place:
            if transfer_id not in self.transfers:
                self._places.give_back(transfer_id)
            waiting, self._to_look = self._to_look, {}
            for other in waiting:
                if (its_peer := self.peer_of(other)) is not None:
                    self.posting.offer(its_peer.line, other)
        if not was_detached:
            if peer_lost:
                pull.could_not_meet(now + self._config.backoff_s)
            if look is not None and has_place and ending is ENDING.DONE:
                pull.looked(source, look, difference)
            detect_s, read_bytes = min(detect_s, now - transfer.posted_at), 0 if look else transfer.read.num_bytes
            effects = pull.ended(source, transfer_ended, read_bytes, detect_s, now)
            is_read = pull.kind is KIND.PIECE and pull.state is P.CONFIRMING
            if is_read:
                pull.deadline = min(pull.deadline, now + PROOF_S)
            # The pull has to be woken earlier only if it sends something, or has failed.
            self._carry_out(pull, effects, now, wakes=pull.failure is not None or DO.SEND in effects)
            if is_read and isinstance(pull.owner, Request) and pull.owner.head and (asked := pull.owner.head.asked):
                # Ask for the next piece in the packet that claims this one. If the claim is refused, it asks anew.
                self.follows.ask(asked, pull.params.num_tokens, now)
            if pull.reason is not None and not pull.is_over:
                self._let_go(pull, source, now)
        if transfer.is_packed and ending is not ENDING.IN_DOUBT and pull.reason is None:  # else its release says it
            self._outbox.send(*peer.place, wire.Unpack(pull.params.key, pull.pull_id, transfer_id))
        if peer_lost:
            self._lose(peer, Reason.PEER_LOST, cause, now, How.BROKEN)
        if peer.line.posters:
            self.posting.take_turn(peer.line)
        if peer.state is S.GONE:
            self.peers.reap(peer)

    # -- events of the data plane and the control plane ------------------------------------------------

    def load_ended(self, peer: Peer, failure: str, now: float) -> None:
        """Take the end of loading a peer in the data plane; `failure` is empty if it was loaded."""
        if not self.peers.load_ended(peer, now, is_loaded=not failure):
            return
        if failure:
            self._failed(peer, Reason.UNREACHABLE, failure, now, How.NOT_LOADED)
            return
        for other in self.peers.at(peer.address, S.READY, S.SUSPECT):
            # One address serves one process start at a time.
            if other is not peer:
                self._lose(other, Reason.RESTARTED, f"{peer.where} answers there now", now, How.REPLACED)
        self._ready(peer, now)

    def destroyed(self, now: float) -> None:
        for transfer_id, transfer in list(self.transfers.items()):
            transfer.peer.asks.take(transfer_id)
            self.ended(TransferEnded(transfer_id, ENDING.FAILED, "its agent was destroyed"), 0.0, now)

    def forget(self, address: Address, now: float) -> None:
        """Treat the rank at an address as gone, because a router says so."""
        for peer in [p for p in self.peers.by_place.values() if p.state is not S.GONE]:
            # With keys an address ends in `#` and its key; a router may know only the part before the mark.
            if address in (peer.address, peer.address.partition("#")[0]):
                peer.is_orderly = True
                self._lose(peer, Reason.PEER_LOST, "forgotten by request", now, How.FORGOTTEN)

    def leave(self, now: float, detail: str = "this side has closed its connections") -> None:
        """Lose all peers, because our memory, process or control plane is about to end."""
        for peer in [p for p in self.peers.by_place.values() if p.state is not S.GONE]:
            peer.is_orderly = True
            self._lose(peer, Reason.ENGINE_CLOSED, detail, now, How.LEFT)

    def hint(self, address: Address, how: How, text: str = "") -> None:
        for peer in self.peers.at(address, S.CONNECTING):
            peer.hint = how, text

    def refused(self, address: Address, detail: str, now: float) -> None:
        for peer in self.peers.at(address, S.CONNECTING):
            how = peer.hint[0] if peer.hint is not None else How.NO_ANSWER
            self._failed(peer, Reason.UNREACHABLE, f"{peer.where} cannot be asked: {detail}", now, how)

    def foreign_version(self, address: Address, detail: str, now: float) -> None:
        for peer in self.peers.at(address, S.CONNECTING):
            self._lose(peer, Reason.PROTOCOL, detail, now)

    def receive(self, message: wire.Message, address: Address, sender: str, now: float) -> None:
        """Take a message from the process start `sender`, over our own link to `address`."""
        peer = self.peers.by_place.get((address, sender))
        if peer is not None:
            if peer.is_doubted or peer.state is S.SUSPECT:
                if peer.heard(now):
                    self.peers.wake(peer)
                    self._take_back(peer)
                    self._ready(peer, now)
            else:
                peer.heard_at = now
        if isinstance(message, _ANSWERS):
            self._answered(message, address, sender, now)
        elif isinstance(message, wire.Offered):
            if (following := self.follows.offered(message, address, sender, now)) is not None:
                successor = self.peers.by_place.get(following.rank.place)
                if successor is not None:
                    text = f"{successor.where}: {message.detail}"
                    self._lose(successor, Reason.RESTARTED, text, now, How.REPLACED)
        else:
            self._told(message, peer, address, sender, now)

    def _answered(self, answer: Answer, address: Address, sender: str, now: float) -> None:
        """Take the answer to a claim, a renewal, a release, or a wish for a packed copy."""
        pull, source = self.pulls.get(PullId(answer.pull_id)), None
        for each in pull.sources if pull is not None else ():
            if each.rank.place[0] == address:
                source = each
                break
        if pull is None or source is None or answer.key != pull.params.key:
            self._outbox.counters["dropped.stale_answer"] += 1
            return
        effects: list[Effect] | None = None
        match answer:
            case wire.Refused(nonce=nonce, reason=Reason.RESTARTED):
                # The prefill process was restarted at the same address, and its successor answers our claim. It is the
                # one answer that may come from another start, so it needs a nonce that only the asked rank has seen.
                peer = self.peers.by_place.get(source.rank.place)
                if peer is not None and source.has_asked(nonce):
                    self._lose(peer, Reason.RESTARTED, f"{peer.where}: {answer.detail}", now, How.REPLACED)
                return
            case _ if source.rank.place[1] != sender:
                self._outbox.counters["dropped.foreign_answer"] += 1
                return
            case wire.Packed():
                self._packed(pull, source, answer, now)
                return
            case wire.Ack() | wire.Refused(nonce=wire.RELEASE_NONCE) if source.release is RELEASE.UNSENT:
                pass  # nothing was released, so it answers nothing
            case wire.Ack():
                effects = pull.settled(source, "acknowledged", now)
            case wire.Refused(nonce=wire.RELEASE_NONCE):
                if not source.is_settled:
                    self._outbox.commands.append(release_refused(pull, source.name, answer))
                effects = pull.settled(source, f"refused: {answer.reason}", now)
            case _:
                effects = pull.answered(source, answer, now)
        if effects is None:
            self._outbox.counters["dropped.stale_answer"] += 1
            return
        self._carry_out(pull, effects, now)
        if source.release is RELEASE.SETTLED and pull.state is not P.RELEASED:
            self._let_go(pull, source, now)

    def _told(self, message: wire.Message, peer: Peer | None, address: Address, sender: str, now: float) -> None:
        """Take a message about the rank itself."""
        match message:
            case wire.Welcome() | wire.Unwelcome():
                if (refused := self.peers.hello_answered(message, address, sender, now)) is not None:
                    peer, reason, detail = refused
                    serve_no_more = self._lose if reason in FINAL else self._failed
                    serve_no_more(peer, reason, detail, now)
            case wire.Ping():  # a lender checks whether this process still lives
                self._outbox.send(address, sender, wire.Pong(message.nonce))
            case wire.Pong() | wire.Status():
                pass
            case wire.Goodbye():
                if peer is not None:
                    peer.is_orderly = True
                    self._lose(peer, Reason.PEER_LOST, f"{peer.where} said goodbye", now, How.GOODBYE)
            case wire.Draining():
                if peer is not None and not peer.is_draining:
                    peer.is_draining = True
                    self._outbox.commands.append(PeerDraining(peer.name, peer.address))
            case _:
                self._outbox.counters["dropped.unexpected"] += 1

    # -- time ----------------------------------------------------------------------------------------

    def tick_pull(self, pull: Pull, now: float) -> bool:
        """Let time pass for a pull. Return True if it has been held for long in the state in which it is."""
        if self.alive_at < now and pull.is_abandoned(now - self.alive_at):
            self._abandon(pull, now)
        was_retired, num_gone = pull.is_retired, len(pull.unanswered)
        effects = pull.tick(now)
        if silent := pull.unanswered[num_gone:]:
            self._outbox.commands.append(release_unanswered(pull, silent, Reason.TIMEOUT, now))
        if pull.is_retired and not was_retired:
            self._outbox.counters["blocks.retired"] += 1
            self._outbox.commands.append(PullReached(pull, M.RETIRED))
            self._blocks_settled(pull, now)
        for source in pull.sources:
            self._let_go(pull, source, now)
        is_overdue, state = now >= pull.warn_at and not pull.is_over and pull.take_warning(now), pull.state
        self._carry_out(pull, effects, now)
        return is_overdue and pull.state is state

    def tick_peer(self, peer: Peer, now: float) -> None:
        config = self._config
        for transfer_id, read in peer.asks.give_up(now):
            transfer = self.transfers[transfer_id]
            transfer.beside, key, pull_id = 0, transfer.pull.params.key, transfer.pull.pull_id
            self._outbox.send(*peer.place, wire.Unpack(key, pull_id, transfer_id))
            self._outbox.counters["copies.late"] += 1
            self.answered.append(PostRead(transfer_id, peer.agent_name, read, transfer.pull))
        for due in self.peers.tick(peer, now):
            match due:
                case Due.UNREACHABLE if peer.is_doubted:
                    text = f"{peer.where} was lost before, and has said nothing since"
                    self._lose(peer, Reason.PEER_LOST, text, now, How.SILENT, pause_s=peer.take_pause(config))
                case Due.UNREACHABLE:
                    how, hint = peer.hint or (How.NO_ANSWER, "")
                    text = f"{peer.where} did not answer within {config.handshake_s:g} s"
                    self._failed(peer, Reason.UNREACHABLE, f"{text}; {hint}" if hint else text, now, how)
                case Due.NOT_LOADED:
                    text = f"the metadata of {peer.where} was not loaded within {config.handshake_s:g} s"
                    self._failed(peer, Reason.UNREACHABLE, text, now, How.NOT_LOADED)
                case Due.SILENT | Due.STALLED:
                    self._set_aside(peer)
                case Due.LOST:
                    text = f"{peer.where} was silent for {peer.silent_s(now):.1f} s"
                    self._lose(peer, Reason.PEER_LOST, text, now, How.SILENT)
                case Due.IDLE:
                    peer.keep_connected = peer.is_orderly = True
                    text = f"nothing was read from {peer.where} for {config.idle_s:g} s"
                    self._lose(peer, Reason.UNREACHABLE, text, now, How.IDLE, pause_s=0.0)
                case _:
                    raise AssertionError(due)
            self.peers.wake(peer)

    # -- questions -----------------------------------------------------------------------------------

    def can_read(self, pull: Pull) -> bool:
        """True if none of the ranks that a pull reads has fallen silent."""
        for source in pull.sources:
            if source.role is ROLE.READ and not source.proven:  # a proven source is not read again
                peer = self.peers.by_place.get(source.rank.place)
                if peer is None or not peer.line.is_open:
                    return False
        return True

    def peer_of(self, source: Source) -> Peer | None:
        return self.peers.by_place.get(source.rank.place)

    @property
    def num_waiting(self) -> int:
        """Number of started pulls that do not read: they meet their ranks, queue, or wait to be lent or proven."""
        return len(self.started) - self.admission.num[READING]

    # -- inside: pulls -------------------------------------------------------------------------------

    def _carry_out(
        self, pull: Pull, effects: list[Effect], now: float, *, at_once: bool = False, wakes: bool = True
    ) -> None:
        """Carry out the effects of a pull's transition, in order. With `at_once` it need not queue if there is room;
        its ranks have to be ready.
        """
        for effect in effects:
            match effect:
                case DO.SEND:
                    for source, message in pull.make_messages(self._nonces, now):
                        self._outbox.send(*source.rank.place, message)
                case DO.POST:
                    for source in pull.sources:
                        if source.next_read is not None:
                            self.posting.offer(self.peers.by_place[source.rank.place].line, source)
                case DO.QUEUE:
                    if at_once and self.admission.enter(pull.route.flow, pull.pull_id):
                        self.entered[pull] = None
                    else:
                        self._queue(pull)
                case DO.DETACH:
                    self._detach_reads(pull, now)
                case DO.LEAVE:
                    self.entered.pop(pull, None)
                    self.admission.leave(pull.pull_id)
                case DO.TELL:
                    effects += self._tell_outcome(pull, now)
                case DO.RETURN:
                    self._ledger.drop(pull.pull_id)
                    # Mostly the blocks return with the outcome, which follows as TELL and says so. They return alone if
                    # a read still ran at the deadline: its caller was told that they are held, and waits for this.
                    if self.by_request.get(pull.request_id) is not pull:
                        self._outbox.commands.append(PullReached(pull, M.RETURNED))
                        self._blocks_settled(pull, now)
                case DO.FINISH:
                    del self.pulls[pull.pull_id]
                    pull.owner = None  # or only the garbage collector would find the two
                    self._timers.forget(pull)
                    for source in pull.sources:
                        self.peers.detach(source.rank.place, pull.pull_id, now)
                    self._outbox.commands.append(PullReached(pull, M.OVER))
                case _:
                    assert_never(effect)
        if self._outbox.trace and len(pull.history) > pull.num_traced and pull.kind is not KIND.PIECE:
            self._outbox.commands.append(Traced(pull, tuple(pull.history[pull.num_traced :])))
            pull.num_traced = len(pull.history)
        if wakes and pull.state is not P.RELEASED and (when := pull.wake_at) < pull.scheduled_at:
            self._timers.wake(pull, when)

    def _detach_reads(self, pull: Pull, now: float) -> None:
        asked: dict[Peer, None] = {}
        for transfer_id in [each for source in pull.sources for each in source.running]:
            # A transfer that is not known has just ended.
            transfer = self.transfers.get(transfer_id)
            if transfer is None:
                continue
            if isinstance(transfer.read, Look):
                self._outbox.commands.append(DetachRead(transfer_id, is_posted=True, is_look=True))
            elif transfer.read.table.boxes and not transfer.is_packed:
                is_posted = transfer.peer.asks.take(transfer_id) is None
                self._outbox.commands.append(DetachRead(transfer_id, is_posted))
                asked[transfer.peer] = None
        for peer in asked:
            self._ask(peer, now)

    def _tell_outcome(self, pull: Pull, now: float) -> list[Effect]:
        """Tell the caller, and give back what the pull needs no more. Return what follows where a rank is gone."""
        self.started.discard(pull.pull_id)
        if self.by_request.get(pull.request_id) is pull:
            del self.by_request[pull.request_id]
        self._outbox.commands.append(PullReached(pull, M.ENDED))
        if pull.kind is KIND.PIECE:
            self._piece_ended(pull, now)
        else:
            if pull.kind is not KIND.DISCHARGE:
                self._outbox.counters[f"pulls.{pull.reason}"] += 1
            if isinstance(pull.owner, Request):
                self._attempt_ended(pull, pull.owner, now)
        effects: list[Effect] = []
        for source in pull.sources:
            peer = self.peers.by_place.get(source.rank.place)
            if (peer is None or peer.state is S.GONE) and source.release is not RELEASE.SETTLED:
                # The rank may still be alive. Send one release anyway, so that its lease need not expire.
                self._outbox.send(*source.rank.place, pull.make_release(source, now))
                pull.unanswered += (source.name,)
                if peer is None:  # the rank gave way, and nothing else would close the link
                    self.peers.unlink(source.address)
                effects += pull.settled(source, "the rank is gone", now)
            elif peer is not None and peer.is_doubted:
                self.peers.probe(peer, now)
            if peer in self.peers.waiting and all(self.pulls[p].is_published for p in peer.pulls) and not peer.follows:
                del self.peers.waiting[peer]  # no pull needs it any more
            if source.running or source.is_waiting:
                self._make_room(source)
            if self._to_look:
                self._to_look.pop(source, None)
            differs = source.differs if pull.reason is Reason.DIFFERS else None
            if differs is not None and peer is not None and not peer.has_differed:
                peer.has_differed = True
                self._outbox.commands.append(BytesDiffer(peer.name, pull.request_id, *differs))
        return effects

    def _attempt_ended(self, pull: Pull, request: Request, now: float) -> None:
        request.ended(now)
        if request.state is RequestState.OVER and (pull.reason not in pull.retryable or request.discharge is None):
            self._outbox.commands.append(RequestReached(request, M.ENDED))
            return
        # A request may be over although its ranks were promised another attempt (`Outcome.RETRY`), because its deadline
        # leaves no time for the pause. `RankCore` ends such a request in the next turn, with a discharge.
        self.between[pull.request_id] = request
        if request.state is RequestState.PAUSING:
            self._outbox.commands.append(RequestReached(request, M.PAUSES))
            self._timers.wake(request, request.next_at)
        else:
            self._timers.wake(request, now)

    def _piece_ended(self, pull: Pull, now: float) -> None:
        """Count a piece that was read, or ask for another; without one the request's pull reads it all."""
        request, reason = pull.owner, pull.reason
        self._outbox.counters[f"pieces.{reason}"] += 1
        if not isinstance(request, Request) or request.head is None:
            return
        if reason is Reason.COMPLETE:
            request.head.took(pull.params, pull.measures.num_bytes)
        else:
            request.head.waiting = None
        asked, have = request.head.asked, request.head.have
        if asked is not None and (reason is not Reason.COMPLETE or asked.have != have):  # else it has asked so
            self.follows.ask(asked, have if reason is Reason.COMPLETE or reason in _TAKEN_BACK else -1, now)
        self._timers.wake(request, now)

    def _blocks_settled(self, pull: Pull, now: float) -> None:
        """Pass on to a pull's request that the blocks have returned after the outcome, or are given up."""
        request = pull.owner
        if not isinstance(request, Request) or request.pull is not pull:
            return
        if pull.is_returned and request.head is not None and request.state is RequestState.OVER:
            self._ledger.drop(request.head.holder)
        if self.between.get(pull.request_id) is request:
            self._timers.wake(request, now)  # also of a piece, behind which the request waits
            return
        if request.state is RequestState.OVER and not (pull.is_returned and pull.is_retired):  # else given up before
            self._outbox.commands.append(RequestReached(request, M.RETIRED if pull.is_retired else M.RETURNED))

    def _queue(self, pull: Pull) -> None:
        """Queue a pull. A pull with a silent rank gets no place yet; `_ready` queues it later."""
        if pull not in self.entered and not self.admission.waits(pull.pull_id) and self.can_read(pull):
            self.admission.ask(pull.route.flow, pull.pull_id, pull.priority, pull.arrival)

    def _abandon(self, pull: Pull, now: float) -> None:
        """Fail a pull that has read nothing, because its embedder stands still and others may need the blocks."""
        text = (
            f"the embedder took no results and sent no commands for {now - self.alive_at:.0f} s, so the request was "
            f"let go; compute it or prefill it anew, and call take_finished in every step"
        )
        remember(self.abandoned, pull.params.key, (self.alive_at, text), MAX_ABANDONED)
        self.fail(pull, Reason.STANDSTILL, text, now)

    def _make_room(self, source: Source) -> None:
        """Give back the room of a source's transfers. The pull has its outcome, and the transfers may never end."""
        for transfer_id in source.running:
            if (transfer := self.transfers.get(transfer_id)) is not None:  # else the transfer has just ended
                self.posting.left(transfer.peer.line, transfer_id)
        if (peer := self.peers.by_place.get(source.rank.place)) is not None:
            self.posting.take_turn(peer.line)

    def _let_go(self, pull: Pull, source: Source, now: float) -> None:
        """Detach a pull from a released rank, once no transfer from there can write or is waited for."""
        # A read of one rank may stay in doubt for ten minutes. Another rank that has acknowledged the release is not
        # pinged for that long. Nor is the rank in doubt after retirement, though it stays in the data plane.
        if source.is_settled and (pull.is_retired or not (source.running or source.doubtful)):
            self.peers.detach(source.rank.place, pull.pull_id, now)

    # -- inside: the choice of ranks -----------------------------------------------------------------

    def _route(self, pull: Pull, now: float, *, at_once: bool = False) -> None:
        """Choose what is read of which rank, and claim, once every rank that may be read is ready."""
        effects: list[Effect] = []
        while pull not in self._to_meet and pull.is_unrouted:
            sources = [source for source in pull.sources if source.role is ROLE.READ]
            if not sources:
                if pull.kind in (KIND.HIT, KIND.DISCHARGE):
                    break
                self._widen(pull, "no prefill rank holds our data", now)
                continue
            known = [source for source in sources if self.peers.by_place[source.rank.place].is_loaded]
            for source in known:
                effects += pull.met(source, now)
            if pull.lists is None or pull.state is not P.CONNECTING:
                break
            chosen = self._choose(pull, sources, known, pull.lists.wanted)
            if isinstance(chosen, str):
                self._widen(pull, f"layouts differ: {chosen}", now)
                continue
            if chosen is not None:
                effects += pull.routed(chosen, now)
            break
        self._carry_out(pull, effects, now, at_once=at_once and self.can_read(pull))

    def _choose(
        self, pull: Pull, sources: list[Source], known: list[Source], wanted: tuple[int, ...]
    ) -> list[PeerTables | None] | str | None:
        """Return what is read of each rank, why nothing can be, or None while ranks have to be waited for."""
        if all(source.tables is not None for source in sources):
            return [source.tables for source in pull.sources]
        # The ranks that have answered may be enough, because a rank that holds nothing of ours need not be waited for.
        # But without stages here, every remote stage holds layers of ours, and must have answered.
        may_answer, stages = len(known) < len(sources), {source.rank.pp_stage for source in known}
        is_whole = self._layout.pp_size == 1 and len(wanted) == len(self._layout.groups)
        if may_answer and is_whole and len(stages) < pull.params.pp_size:
            return None
        peers = [self.peers.by_place[source.rank.place] for source in known]
        chosen = self.routes.choose_sources(peers, wanted) if known else ""
        if isinstance(chosen, str):
            return None if may_answer else chosen
        read_of = dict(zip([source.rank.place for source in known], chosen, strict=True))
        tables = [read_of.get(source.rank.place) for source in pull.sources]
        self._remember(pull, wanted, tables)
        return tables

    def _remember(self, pull: Pull, wanted: tuple[int, ...], tables: list[PeerTables | None]) -> None:
        """Remember what is read of each rank for later requests, if all of the route's ranks are ready."""
        if pull.unmet is not None:
            return  # a rank that could not be met must be tried again
        ready: list[Peer] = []
        for source, read in zip(pull.sources, tables, strict=True):
            peer = self.peers.by_place.get(source.rank.place)
            if peer is None:
                return
            is_same = peer.is_named(pull.params.engine_id, source.rank)
            if not is_same or peer.state is S.GONE or (read is not None and not peer.line.is_open):
                return
            ready.append(peer)
        pull.route.ready[wanted] = ReadyRoute(self.peers.num_changes, ready, tables)

    def _widen(self, pull: Pull, detail: str, now: float) -> None:
        """Meet all ranks that this rank answers for, or fail the pull, because they are met and do not hold enough."""
        others = [source for source in pull.sources if source.role is ROLE.UNKNOWN]
        for source in others:
            source.role = ROLE.READ
        for source in others:
            if pull.failure is None:
                self._meet(pull, source, now)
        if not others:
            reason, detail, blame = pull.unmet or (Reason.GEOMETRY, detail, UNBLAMED)
            self.fail(pull, reason, detail, now, blame)

    def _tables_made(self, peer: Peer, tables: PeerTables) -> None:
        for warning in tables.warnings:
            self._outbox.commands.append(SlowGeometry(peer.name, warning))

    # -- inside: peers -------------------------------------------------------------------------------

    def _attach(self, pull: Pull, source: Source, now: float) -> Peer:
        peer = self.peers.by_place.get(source.rank.place)
        if peer is None or peer.state is S.GONE:
            before, peer = peer, self.peers.find(pull.params.engine_id, source.rank, now)
            if before is not None and before is not peer:
                # The link broke while other pulls owed a release there, and this pull meets the same process start
                # again. The releases are still owed to it, and fail with the new peer if it is lost as well.
                for pull_id in before.pulls:
                    if not _source_at(before, self.pulls[pull_id]).is_settled:
                        self.peers.attach(peer, pull_id, now)
                before.pulls.clear()
        if pull.pull_id not in peer.pulls:
            self.peers.attach(peer, pull.pull_id, now)
        return peer

    def _meet(self, pull: Pull, source: Source, now: float) -> None:
        # Since the pull began, the peer may have been lost, and met anew for another pull.
        peer = self._attach(pull, source, now)
        failure = self.peers.meet(peer, pull.pull_id, pull.params.engine_id, source.rank, now)
        if failure is not None:
            self._unmet(pull, source, *failure, now)

    def _unmet(self, pull: Pull, source: Source, reason: Reason, detail: str, now: float) -> None:
        """Fail a pull because a rank cannot be read, unless others hold the same. A wrong geometry always fails it."""
        peer = self.peers.by_place.get(source.rank.place)
        pull.could_not_meet(peer.not_before if peer is not None else now)
        blame = Blame((source.name,), peer.how if peer is not None else None)
        if source.tables is None and reason is not Reason.GEOMETRY:
            pull.goes_without(source, reason, detail, blame)
        elif not source.proven:
            self.fail(pull, reason, detail, now, blame)

    def _pulls_of(self, peer: Peer) -> list[Pull]:
        """Return the pulls that owe or hold something at a peer, in order of arrival."""
        return sorted((self.pulls[p] for p in peer.pulls), key=lambda pull: pull.arrival)

    def _ready(self, peer: Peer, now: float) -> None:
        """Continue all pulls that waited for a peer."""
        self.posting.take_turn(peer.line)
        self.follows.ready(peer, now)
        for pull in self._pulls_of(peer):
            source = _source_at(peer, pull)
            if source.role is ROLE.READ and not pull.is_published:
                # Two requests may give one endpoint different names while its handshake runs. The answer decides, and
                # the request that named it wrongly fails here.
                self._meet(pull, source, now)
            self._route(pull, now)
            if pull.is_queued:
                self._queue(pull)

    def _failed(self, peer: Peer, reason: Reason, detail: str, now: float, how: How | None = None) -> None:
        self.peers.failed(peer, reason, detail, now, how)
        self._fail_readers(peer, reason, detail, now)

    def _lose(
        self, peer: Peer, reason: Reason, detail: str, now: float, how: How | None = None, pause_s: float | None = None
    ) -> None:
        pause_s = self._config.backoff_s if pause_s is None else pause_s
        if self.peers.lost(peer, reason, detail, pause_s, now, how):
            self._fail_readers(peer, reason, detail, now)
            peer.line.clear()
            self.peers.reap(peer)

    def _fail_readers(self, peer: Peer, reason: Reason, detail: str, now: float) -> None:
        peer.num_failed = 0
        self.follows.lost(peer, reason, detail, now)
        for pull in self._pulls_of(peer):
            was_well, source = pull.failure is None, _source_at(peer, pull)
            if pull.is_published:
                there = self.peers.by_place.get(source.rank.place)  # another peer, if the rank was met anew
                if source.release is not RELEASE.SETTLED and (there is None or there.state is S.GONE):
                    unanswered = release_unanswered(pull, (source.name,), reason, now, detail)
                    self._outbox.commands.append(unanswered)
                    self._carry_out(pull, pull.settled(source, "the rank is gone", now), now)
            elif source.role is ROLE.READ:
                # A rank from which nothing is read never fails a pull.
                if reason is Reason.WRONG_TARGET and not peer.is_named(pull.params.engine_id, source.rank):
                    self._meet(pull, source, now)  # another pull used the wrong name
                else:
                    self._unmet(pull, source, reason, detail, now)
                self._route(pull, now)
            peer.num_failed += was_well and pull.failure is not None

    def _set_aside(self, peer: Peer) -> None:
        """Stop counting the transfers of a peer that sends nothing, so that others have the room.

        A prefill rank whose NIC hangs answers pings, while its reads never end: with `total_requests` of them in
        flight, no pull of any other engine could begin before their deadlines.
        """
        if not peer.line.is_set_aside:
            self._outbox.counters["peers.set_aside"] += 1
            peer.line.is_set_aside = True
            for transfer_id in peer.transfers:
                self.posting.in_flight.leave(transfer_id)
            for pull_id in peer.pulls:
                if self._is_aside(self.pulls[pull_id]):  # not a pull that only releases there, or has its bytes
                    self.admission.count(pull_id, False)

    def _take_back(self, peer: Peer) -> None:
        """Count the transfers of a peer that sends again, for pulls without an outcome."""
        peer.line.is_set_aside = False
        for transfer_id in peer.transfers:
            transfer = self.transfers[transfer_id]
            if transfer.pull.reason is None and transfer_id in transfer.source.running:
                self.posting.in_flight.enter(transfer_id, transfer.read.num_bytes, transfer.read.num_descriptors)
        for pull_id in peer.pulls:
            if not self._is_aside(self.pulls[pull_id]):
                self.admission.count(pull_id, True)

    def _is_aside(self, pull: Pull) -> bool:
        """True if the pull waits for a rank that sends nothing."""
        waits_for = [self.peer_of(source) for source in pull.sources if source.reads and not source.proven]
        return any(peer is not None and peer.line.is_set_aside for peer in waits_for)


def _source_at(peer: Peer, pull: Pull) -> Source:
    return pull.sources[pull.route.index[peer.place]]
