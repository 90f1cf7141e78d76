"""The decode side of one rank: its pulls, the peers it reads from, and whose turn it is to post.

Peers fail alone: handshakes, back-offs, queues and byte windows are per peer, and what happens to one
touches only the pulls that read from it. A rank that is only released is never waited for.

A pull meets the ranks that the usual rule predicts as its sources. What they say they hold decides: if
that does not cover what we hold, all ranks that we answer for are met, and may be missing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asynckv.config import PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.flow import Admission, LaneKey, Window
from asynckv.core.ledger import Int64s, Ledger
from asynckv.core.outbox import (
    BlocksRetired,
    BlocksReturned,
    Disconnect,
    LoadPeer,
    Outbox,
    PeerChanged,
    PeerDraining,
    PostRead,
    PullEnded,
    PullOver,
    RemovePeer,
    SlowGeometry,
    TableRefused,
    Timers,
    Traced,
)
from asynckv.core.peer import ON_EVENT, Peer, PeerEvent, PeerState
from asynckv.core.pull import Pull, PullState, ReleaseState, Source
from asynckv.core.types import Address, Cohort, PullId, Reason, RequestId, TransferId, rank_name
from asynckv.core.watch import Watch
from asynckv.core.wire import (
    MAJOR,
    MINOR,
    Ack,
    Draining,
    Goodbye,
    Granted,
    Hello,
    Message,
    NotYet,
    Ping,
    Pong,
    Refused,
    Status,
    Unwelcome,
    Welcome,
)
from asynckv.errors import LayoutError, LocalProtocolError, PlanRefused, RemoteTooShort
from asynckv.geometry.layout import Layout, check_layout, decode_layout
from asynckv.geometry.match import NotCovered, assign, compare
from asynckv.geometry.plan import BlockLists, PeerTables, plan_read

__all__ = ["DecodeSide"]

E, S = PeerEvent, PeerState

MAX_ROUTES = 4096

TOMBSTONE_S = 60.0
"""How long a peer that is gone is remembered, so that late requests fail with the same cause."""

FINAL = {Reason.GEOMETRY, Reason.WRONG_TARGET, Reason.PROTOCOL, Reason.RESTARTED}
"""Refusals that no further handshake with this start of the process can change."""


_Place = tuple[Address, str]
"""Address and incarnation of a rank."""


def _lane(pull: Pull) -> LaneKey:
    return tuple([(leg.address, leg.incarnation) for leg in pull.sources])


def _leg_at(pull: Pull | None, address: Address) -> Source | None:
    for leg in pull.sources if pull is not None else ():
        if leg.address == address:
            return leg
    return None


def _known(peer: Peer) -> Layout:
    assert peer.layout is not None
    return peer.layout


@dataclass(slots=True)
class _Transfer:
    pull: Pull
    leg: Source
    peer: Peer
    num_bytes: int
    num_descriptors: int
    posted_at: float


class DecodeSide:
    """All pulls and peers of one rank."""

    def __init__(
        self,
        layout: Layout,
        cohort: Cohort,
        config: PullConfig,
        ledger: Ledger,
        outbox: Outbox,
        timers: Timers,
        nonces: Iterator[int],
        watch: Watch,
    ) -> None:
        self.pulls: dict[PullId, Pull] = {}
        self.by_request: dict[RequestId, Pull] = {}
        """Pulls without an outcome, by the caller's id."""
        self.begun: set[PullId] = set()
        """Those of them whose blocks are to be filled."""
        self.peers: dict[tuple[Address, str], Peer] = {}
        self.transfers: dict[TransferId, _Transfer] = {}
        self._layout, self._cohort, self._config = layout, cohort, config
        self._ledger, self._outbox, self._timers, self._nonces = ledger, outbox, timers, nonces
        self._hellos: dict[int, Peer] = {}
        self._routes: dict[tuple[tuple[_Place, ...], tuple[int, ...]], tuple[PeerTables | None, ...] | str] = {}
        """Ranks that were met together, and groups of which something is wanted -> what is read of each, or why
        these ranks are not enough."""
        self.admission = Admission(config.total_requests, config.window_requests)
        self.window = Window(config.total_bytes, config.total_descriptors)
        """What is in flight in all."""
        self._turns: deque[Peer] = deque()
        self._arrivals = itertools.count()
        self._ids = itertools.count(1)
        self._table_ids = itertools.count(1)
        """One for all peers: two of them may be one process under two addresses."""
        self._watch = watch

    # -- calls -------------------------------------------------------------------------------------

    def add(self, pull: Pull, now: float, *, begins: bool = False) -> None:
        """Start an announced pull: meet the peers it will read from.

        Args:
            pull: New.
            now: The time.
            begins: Its blocks follow at once (`begin`), which does the rest.
        """
        if pull.request_id in self.by_request:
            raise LocalProtocolError(
                f"request {pull.request_id!r} is being pulled already; cancel it or wait for its outcome first"
            )
        self.pulls[pull.pull_id] = self.by_request[pull.request_id] = pull
        pull.arrival = next(self._arrivals)
        if not pull.is_discharge:
            self._outbox.counters["pulls.started"] += 1
        for leg in pull.sources:
            self._attach(pull, leg, now)
        for leg in pull.sources:
            if leg.reads:
                self._meet(pull, leg, now)
        if not begins or pull.failure is not None:
            self._route(pull, now)
            self._after(pull, now)

    def begin(self, pull: Pull, lists: BlockLists, blocks: Mapping[int, Int64s], deadline: float, now: float) -> None:
        """Give an announced pull its blocks.

        Args:
            pull: Without blocks so far.
            lists: What is to be filled, and from where.
            blocks: What is to be filled, as the ledger has just found it free.
            deadline: When its caller waits no longer.
            now: The time.
        """
        self._ledger.hold(pull.pull_id, "writing", pull.request_id, blocks, now)
        pull.arrival = next(self._arrivals)
        self.begun.add(pull.pull_id)
        pull.begin(lists, deadline, now)
        for leg in pull.sources:
            if leg.was_met and not leg.reads and leg.map is None and not lists.is_empty and pull.failure is None:
                # It could not be met while the request was only announced; that may be long ago.
                leg.reads = True
                self._meet(pull, leg, now)
        self._route(pull, now)
        # Where there is room its plan is made at once, in its caller's time: a turn of the loop is for all.
        if pull.is_queued and self.can_read(pull) and self.admission.enter(_lane(pull), pull):
            self._read(pull, now)
        else:
            self._after(pull, now)

    def cancel(self, pull: Pull, now: float) -> None:
        """Give up a pull."""
        pull.cancel(now)
        self._after(pull, now)

    def fail(self, pull: Pull, reason: Reason, detail: str, now: float) -> None:
        """End a pull that nobody waits for."""
        pull.fail(reason, detail, now)
        self._after(pull, now)

    # -- posting -----------------------------------------------------------------------------------

    def admit(self, now: float) -> Pull | None:
        """Let the next pull of the queue read, if one may; say `planned` once its plan is made."""
        while (pull := self.admission.next()) is not None and not self.can_read(pull):
            self.admission.leave(pull)  # it asks again when its ranks are heard of
        if pull is None:
            return None
        self._read(pull, now)
        return pull

    def _read(self, pull: Pull, now: float) -> None:
        """Make the plan of a pull that was admitted, and let it read."""
        if self._is_aside(pull):
            self.admission.discount(pull.pull_id)
        pull.admitted_at = min(pull.admitted_at, now)
        if self._plan(pull, now):
            pull.admitted(now)
        self._after(pull, now)

    def next_post(self, now: float) -> PostRead | None:
        """Return the next read to post, if any may be; the peers take turns, each in order of arrival."""
        while self._turns:
            peer = self._turns[0]
            while peer.queue and not peer.queue[0][0].may_post(peer.queue[0][1]):
                peer.queue.popleft()[1].queued = False
            post = peer.queue[0][1].next_post if peer.queue and peer.is_usable else None
            if post is not None and peer.window.fits(post) and not self.window.fits(post):
                return None  # it keeps its turn
            self._turns.popleft()
            peer.is_queued = False
            if post is None or not peer.window.fits(post):
                continue
            pull, leg = peer.queue[0]
            leg.take_post()
            if leg.next_post is None:
                peer.queue.popleft()
                leg.queued = False
            self._take_turn(peer)
            transfer_id = TransferId(next(self._ids))
            self.transfers[transfer_id] = _Transfer(pull, leg, peer, post.num_bytes, post.num_descriptors, now)
            peer.transfers.add(transfer_id)
            if not peer.window:
                peer.moved_at = now
            peer.window.enter(transfer_id, post.num_bytes, post.num_descriptors)
            if not peer.is_set_aside:
                self.window.enter(transfer_id, post.num_bytes, post.num_descriptors)
            pull.posted(leg, transfer_id, post.num_descriptors, now)
            self._outbox.counters["descriptors.posted"] += post.num_descriptors
            return PostRead(transfer_id, peer.agent_name, post)
        return None

    def spent(self, transfer_id: TransferId, post_s: float) -> None:
        """Note how long the call that posted a transfer took."""
        if (transfer := self.transfers.get(transfer_id)) is not None:
            transfer.pull.post_s += post_s

    def ended(self, news: TransferEnded, detect_s: float, now: float) -> None:
        """Take news of a transfer; `now` was read after it was observed."""
        transfer = self.transfers.get(news.transfer_id)
        if transfer is None:
            self._outbox.counters["transfers.late_news"] += 1
            return
        pull, leg, peer = transfer.pull, transfer.leg, transfer.peer
        # What is in doubt may stay so for ever: it must not take the window from others.
        peer.window.leave(news.transfer_id)
        self.window.leave(news.transfer_id)
        is_done = news.ending is Ending.DONE
        if news.ending is Ending.IN_DOUBT:
            self._outbox.counters["transfers.in_doubt"] += 1
        else:
            del self.transfers[news.transfer_id]
            peer.transfers.discard(news.transfer_id)
            self._outbox.counters["transfers.done" if is_done else "transfers.failed"] += 1
        peer.moved_at = now
        if peer.is_set_aside and peer.state is S.READY:
            self._take_back(peer)
        if is_done:
            pull.detect_s = max(pull.detect_s, min(detect_s, now - transfer.posted_at))
            leg.bytes_read += transfer.num_bytes
            self._outbox.counters["bytes.read"] += transfer.num_bytes
        if news.ending is Ending.REFUSED:
            # Before the pull hears of its transfer, so that it fails for what is wrong with the rank.
            self._outbox.commands.append(TableRefused(peer, news.cause))
            self._lose(peer, Reason.GEOMETRY, f"{peer.where} cannot be read: {news.cause}", now)
        pull.ended(leg, news, now)
        if news.peer_lost:
            self._lose(peer, Reason.PEER_LOST, news.cause, now)
        self._take_turn(peer)
        self._reap(peer)
        self._after(pull, now)

    # -- peers -------------------------------------------------------------------------------------

    def loaded(self, peer: Peer, now: float) -> None:
        """The data plane knows the peer."""
        peer.is_loading = False
        if peer.state is not S.LOADING:
            # Lost, or given up, while it was being loaded.
            self._outbox.commands.append(RemovePeer(peer))
            self._wake(peer)
            return
        peer.loaded, peer.failures, peer.heard_at = True, 0, now
        self._change(peer, E.LOADED)
        for other in list(self.peers.values()):
            # One address serves one start of a process at a time.
            if other.address == peer.address and other is not peer and other.state in (S.READY, S.SUSPECT):
                self._lose(other, Reason.RESTARTED, f"{peer.where} answers there now", now)
        self._ready(peer, now)

    def load_failed(self, peer: Peer, cause: str, now: float) -> None:
        """The data plane could not load the peer."""
        peer.is_loading = False
        if peer.state is S.LOADING:
            self._failed(peer, Reason.UNREACHABLE, cause, now)
        self._wake(peer)

    def unloaded(self, cause: str, now: float) -> None:
        """Our own data plane has lost all that it had loaded, after the end of every transfer: all is met anew.

        The remote processes live, so what they are owed is still said to them.
        """
        known = [p for p in self.peers.values() if p.state in (S.LOADING, S.READY, S.SUSPECT)]
        detail = f"this side's data plane has lost its connections: {cause}"
        # What was to be done with what is lost must not be done with what follows.
        self._outbox.commands[:] = [c for c in self._outbox.commands if not isinstance(c, RemovePeer)]
        self._routes.clear()
        for peer in known:
            if peer.is_set_aside:
                self._take_back(peer)
            peer.loaded = False
            peer.maps.clear()
            peer.reason, peer.detail, peer.not_before = Reason.READ_FAILED, detail, now
            self._change(peer, E.UNLOADED)
            for _, leg in peer.queue:
                leg.queued = False
            peer.queue.clear()
        for peer in known:
            self._fail_readers(peer, Reason.READ_FAILED, detail, now)
            self._wake(peer)

    def tick_peer(self, peer: Peer, now: float) -> None:
        """Let time pass for a peer."""
        config = self._config
        if peer.state is S.CONNECTING:
            if now >= peer.deadline:
                text = f"{peer.where} did not answer within {config.handshake_s:g} s"
                text += f"; {peer.hint}" if peer.hint else ""
                self._failed(peer, Reason.UNREACHABLE, text, now)
            elif now >= peer.retry_at:
                self._hello(peer, now)
        elif peer.state is S.LOADING:
            if now >= peer.deadline:
                text = f"the metadata of {peer.where} was not loaded within {config.handshake_s:g} s"
                self._failed(peer, Reason.UNREACHABLE, text, now)
        elif peer.state in (S.READY, S.SUSPECT) and peer.pulls:
            if now > self._ping_at(peer) + config.heartbeat_s:
                # We were away (stopped, asleep, busy): that is no silence of theirs. What they said may wait unread.
                peer.watched_at = now - config.heartbeat_s
            silent = now - max(peer.heard_at, peer.watched_at)
            if silent >= config.gone_s:
                self._lose(peer, Reason.PEER_LOST, f"{peer.where} was silent for {silent:.1f} s", now)
            elif now >= self._ping_at(peer):
                peer.pinged_at = now
                self._outbox.send(peer.address, peer.incarnation, Ping(next(self._nonces)))
            if silent >= config.suspect_s and peer.state is S.READY:
                self._change(peer, E.SILENT)
                self._set_aside(peer)
            elif peer.window and now >= peer.moved_at + config.suspect_s:
                # It answers, and yet nothing arrives.
                self._set_aside(peer)
        elif peer.state is S.NEW and not peer.pulls and not peer.is_loading and now >= peer.not_before:
            # It was only released, or could not be met: nothing is known of it that is worth keeping.
            self._drop(peer)
            return
        elif peer.state in (S.READY, S.SUSPECT) and now >= peer.unused_at + config.idle_s:
            peer.is_alive = peer.is_orderly = True
            self._lose(peer, Reason.UNREACHABLE, f"nothing was read from {peer.where} for {config.idle_s:g} s", now)
            peer.not_before = now
        elif peer.state is S.GONE and now >= peer.gone_at + TOMBSTONE_S and not peer.transfers and not peer.pulls:
            self._drop(peer)
            return
        self._wake(peer)

    def peer_of(self, leg: Source) -> Peer | None:
        """The rank that a leg is about, if it is known still."""
        return self.peers.get((leg.address, leg.incarnation))

    def forget(self, address: Address, now: float) -> None:
        """Take a router's word that the rank at an address is gone."""
        for peer in [p for p in self.peers.values() if p.state is not S.GONE]:
            # With keys an address names its key after a mark; a router may know only what is before it.
            if address in (peer.address, peer.address.partition("#")[0]):
                peer.is_orderly = True
                self._lose(peer, Reason.PEER_LOST, "forgotten by request", now)

    def leave(self, now: float) -> None:
        """Part from everybody: our memory, or our process, is going."""
        for peer in [p for p in self.peers.values() if p.state is not S.GONE]:
            peer.is_orderly = True
            self._lose(peer, Reason.ENGINE_CLOSED, "this side has closed its connections", now)

    def destroyed(self, now: float) -> None:
        """The data plane is gone: whatever was posted can write nothing any more."""
        for transfer_id in list(self.transfers):
            self.ended(TransferEnded(transfer_id, Ending.FAILED, "its agent was destroyed"), 0.0, now)

    def can_read(self, pull: Pull) -> bool:
        """None of the ranks that a pull reads has fallen silent."""
        for leg in pull.sources:
            if leg.reads and not self.peers[leg.address, leg.incarnation].is_usable:
                return False
        return True

    @property
    def num_waiting(self) -> int:
        """Pulls that were asked for and do not read: they meet their ranks, queue, or wait to be lent or proven."""
        return len(self.begun) - self.admission.num_admitted

    def hint(self, address: Address, text: str) -> None:
        """Something may keep an address from answering."""
        for peer in self._greeted(address):
            peer.hint = text

    def refused(self, address: Address, detail: str, now: float) -> None:
        """The control plane may not talk to an address at all."""
        for peer in self._greeted(address):
            self._failed(peer, Reason.UNREACHABLE, f"{peer.where} cannot be asked: {detail}", now)

    def foreign_version(self, address: Address, detail: str, now: float) -> None:
        """The listener at an address speaks another protocol version."""
        for peer in self._greeted(address):
            self._lose(peer, Reason.PROTOCOL, detail, now)

    def _greeted(self, address: Address) -> list[Peer]:
        """Return whom we are shaking hands with at an address."""
        return [p for p in self.peers.values() if p.address == address and p.state is S.CONNECTING]

    def receive(self, message: Message, address: Address, source: str, now: float) -> None:
        """Take an answer that came from a remote rank over our own link to it."""
        peer = self.peers.get((address, source))
        if peer is not None:
            self._heard(peer, now)
        match message:
            case Welcome() | Unwelcome():
                self._answered(message, address, source, now)
            case Granted() | NotYet() | Refused():
                self._claim_answered(message, address, source, now)
            case Ack():
                self._acked(message, address, source, "acknowledged", now)
            case Pong() | Status():
                pass
            case Goodbye():
                if peer is not None:
                    peer.is_orderly = True
                    self._lose(peer, Reason.PEER_LOST, f"{peer.where} said goodbye", now)
            case Draining():
                if peer is not None and not peer.is_draining:
                    peer.is_draining = True
                    self._outbox.commands.append(PeerDraining(peer))
            case _:
                self._outbox.counters["dropped.unexpected"] += 1

    # -- inside: pulls -----------------------------------------------------------------------------

    def tick_pull(self, pull: Pull, now: float) -> None:
        """Let time pass for a pull."""
        was_retired = pull.is_retired
        pull.tick(now)
        if pull.is_retired and not was_retired:
            self._outbox.counters["blocks.retired"] += 1
            self._outbox.commands.append(BlocksRetired(pull))
            for leg in pull.sources:
                # Nothing is waited for any more; what runs keeps the peer in the data plane, not its heartbeat.
                self._part(pull, leg, now)
        if now >= pull.warn_at and not pull.is_over and pull.is_stuck(now):
            self._watch.add(pull, now)
        self._after(pull, now)

    def _after(self, pull: Pull, now: float) -> None:
        """Settle what a change of a pull brings about."""
        state = pull.state
        if state is PullState.READING:
            for leg in pull.sources:
                if not leg.queued and pull.may_post(leg):
                    peer = self.peers[leg.address, leg.incarnation]
                    leg.queued = True
                    peer.queue.append((pull, leg))
                    self._take_turn(peer)
        elif state is not PullState.DRAINING:
            self._queue(pull)
        if pull.reason is not None:
            if not pull.is_told:
                self._tell(pull, now)
            elif not pull.is_returned:
                self._return(pull)
        for leg, message in pull.due(self._nonces, now):
            self._outbox.send(leg.address, leg.incarnation, message)
        if self._outbox.trace and len(pull.history) > pull.num_traced:
            self._outbox.commands.append(Traced(pull, tuple(pull.history[pull.num_traced :])))
            pull.num_traced = len(pull.history)
        if pull.is_over:
            self._finish(pull, now)
        else:
            self._timers.wake(pull, pull.wake_at)

    def _tell(self, pull: Pull, now: float) -> None:
        """Hand a pull's outcome over."""
        pull.is_told = True
        self.begun.discard(pull.pull_id)
        if self.by_request.get(pull.request_id) is pull:
            del self.by_request[pull.request_id]
        if not pull.is_discharge:
            self._outbox.counters[f"pulls.{pull.reason}"] += 1
        for leg in pull.sources:
            if self._settles_itself(pull, leg):
                # It may live after all: one word costs nothing, and its lease need not run out.
                if (release := pull.due_release(leg, now)) is not None:
                    self._outbox.send(leg.address, leg.incarnation, release)
                pull.settled(leg, "the rank is gone", now)
            self._make_room(leg)
        self._return(pull)
        self._outbox.commands.append(PullEnded(pull))

    def _queue(self, pull: Pull) -> None:
        """Keep a pull's place in the queue, or give it back."""
        state = pull.state
        if pull.is_queued:
            if not self.admission.waits(pull) and self.can_read(pull):
                self.admission.leave(pull)
                self.admission.ask(_lane(pull), pull)
        elif state is PullState.CONNECTING:
            self.admission.expect(_lane(pull), pull)
        else:
            self.admission.leave(pull)

    def _make_room(self, leg: Source) -> None:
        """What still runs for a pull that has its outcome may never end: it must not take the window from others."""
        if not leg.running and not leg.queued:
            return
        peer = self.peers.get((leg.address, leg.incarnation))
        for transfer_id in leg.running:
            self.transfers[transfer_id].peer.window.leave(transfer_id)
            self.window.leave(transfer_id)
        if peer is not None:
            self._take_turn(peer)

    def _return(self, pull: Pull) -> None:
        if not pull.is_returned and not pull.holds_blocks:
            pull.is_returned = True
            self._ledger.drop(pull.pull_id)
            self._outbox.commands.append(BlocksReturned(pull))

    def _finish(self, pull: Pull, now: float) -> None:
        if self.pulls.pop(pull.pull_id, None) is None:
            return
        self._timers.forget(pull)
        for leg in pull.sources:
            self._part(pull, leg, now)
        self._outbox.commands.append(PullOver(pull))

    def _part(self, pull: Pull, leg: Source, now: float) -> None:
        """A pull and a peer have nothing to do with each other any more."""
        peer = self.peers.get((leg.address, leg.incarnation))
        if peer is None:
            return
        if pull.pull_id in peer.pulls:
            peer.pulls.discard(pull.pull_id)
            if not peer.pulls:
                peer.unused_at = now
        if not peer.pulls and peer.state is S.NEW and now >= peer.not_before and not peer.is_loading:
            self._drop(peer)
            return
        self._reap(peer)
        self._wake(peer)

    def _drop(self, peer: Peer) -> None:
        self._timers.forget(peer)
        self.peers.pop((peer.address, peer.incarnation), None)
        if not any(p.address == peer.address for p in self.peers.values()):
            self._outbox.commands.append(Disconnect(peer.address))

    def _settles_itself(self, pull: Pull, leg: Source) -> bool:
        peer = self.peers.get((leg.address, leg.incarnation))
        return leg.release is not ReleaseState.SETTLED and (peer is None or peer.state is S.GONE)

    def _claim_answered(self, answer: Granted | NotYet | Refused, address: Address, source: str, now: float) -> None:
        pull = self.pulls.get(PullId(answer.pull_id))
        leg = _leg_at(pull, address)
        if pull is None or leg is None or answer.key != pull.params.key:
            self._outbox.counters["dropped.stale_answer"] += 1
            return
        restarted = isinstance(answer, Refused) and answer.reason is Reason.RESTARTED
        if leg.incarnation != source and not restarted:
            self._outbox.counters["dropped.foreign_answer"] += 1
            return
        if restarted:
            peer = self.peers.get((address, leg.incarnation))
            asked = answer.nonce in leg.nonces or (answer.nonce == 0 and leg.release is ReleaseState.SENT)
            if peer is not None and asked and isinstance(answer, Refused):
                self._lose(peer, Reason.RESTARTED, f"{peer.where}: {answer.detail}", now)
            return
        if isinstance(answer, Refused) and answer.nonce == 0:
            self._acked(answer, address, source, f"refused: {answer.reason}", now)
            return
        if not pull.answered(leg, answer, now):
            self._outbox.counters["dropped.stale_answer"] += 1
        self._after(pull, now)

    def _acked(self, answer: Ack | Refused, address: Address, source: str, note: str, now: float) -> None:
        pull = self.pulls.get(PullId(answer.pull_id))
        leg = _leg_at(pull, address)
        is_ours = pull is not None and leg is not None and (answer.key, source) == (pull.params.key, leg.incarnation)
        if pull is None or leg is None or not is_ours or leg.release is ReleaseState.UNSENT:
            self._outbox.counters["dropped.stale_answer"] += 1
            return
        pull.settled(leg, note, now)
        self._after(pull, now)

    # -- inside: handshakes ------------------------------------------------------------------------

    def _peer(self, pull: Pull, leg: Source, now: float) -> Peer:
        place = (leg.address, leg.incarnation)
        identity = (pull.params.engine_id, leg.pp_stage, leg.tp_rank)
        peer = self.peers.get(place)
        if peer is not None and peer.state is S.GONE:
            # The connection broke, but the process may live; or other params named it wrongly.
            again = peer.identity != identity or (peer.reason not in FINAL and now >= peer.not_before)
            if again and not peer.is_loading:
                # Transfers that may never end keep the old one in the data plane; the new one is loaded beside it.
                self._timers.forget(peer)
                peer = None
        if peer is None:
            engine_id, stage, rank = identity
            peer = self.peers[place] = Peer(
                engine_id,
                rank,
                stage,
                leg.address,
                leg.incarnation,
                table_ids=self._table_ids,
                window=Window(self._config.window_bytes, self._config.window_descriptors),
            )
        return peer

    def _attach(self, pull: Pull, leg: Source, now: float) -> Peer:
        """Return the peer of a leg; it is there for as long as the pull has something owed or held at it."""
        peer = self._peer(pull, leg, now)
        if not peer.pulls:
            peer.watched_at = now
        peer.pulls.add(pull.pull_id)
        return peer

    def _meet(self, pull: Pull, leg: Source, now: float) -> None:
        """Make sure that a rank to read from is, or is becoming, ready."""
        # Since the pull began, the peer may have been lost, and met anew for another.
        peer = self._attach(pull, leg, now)
        identity = (pull.params.engine_id, leg.pp_stage, leg.tp_rank)
        if peer.identity != identity:
            text = f"{leg.address} is {peer.name}, but the params name {leg.name}; correct the endpoints"
            self._unmet(pull, leg, Reason.WRONG_TARGET, text, now)
        elif peer.state is S.NEW and now >= peer.not_before and not peer.is_loading:
            peer.deadline = now + self._config.handshake_s
            self._change(peer, E.WANTED)
            peer.nonce, peer.hellos = next(self._nonces), 0
            self._hellos[peer.nonce] = peer
            self._hello(peer, now)
        elif peer.state in (S.NEW, S.GONE):
            wait = f"; the next attempt is possible in {peer.not_before - now:.2g} s" if peer.not_before > now else ""
            self._unmet(pull, leg, peer.reason, peer.detail + wait, now)
        self._wake(peer)

    def _unmet(self, pull: Pull, leg: Source, reason: Reason, detail: str, now: float) -> None:
        """A rank that was to be read cannot be: the end of the pull, unless others hold the same.

        Another geometry is the end whoever answers first: the engines do not fit.
        """
        if (peer := self.peers.get((leg.address, leg.incarnation))) is not None:
            pull.not_before = max(pull.not_before, peer.not_before)
        if leg.map is None and reason is not Reason.GEOMETRY:
            leg.reads = False
            pull.unmet = pull.unmet or (reason, detail)
        elif not leg.proven:
            pull.fail(reason, detail, now)

    def _hello(self, peer: Peer, now: float) -> None:
        peer.retry_at = now + self._config.hello_retry_s * 2 ** min(peer.hellos, 3)
        peer.hellos += 1
        hello = Hello(peer.nonce, MAJOR, MINOR, peer.engine_id, peer.tp_rank, self._cohort, peer.pp_stage)
        self._outbox.send(peer.address, peer.incarnation, hello)

    def _answered(self, message: Welcome | Unwelcome, address: Address, source: str, now: float) -> None:
        peer = self._hellos.get(message.nonce)
        if peer is None or peer.state is not S.CONNECTING or peer.address != address:
            self._outbox.counters["dropped.stale_answer"] += 1
            return
        if isinstance(message, Unwelcome):
            text = f"{peer.where} refused the handshake: {message.detail or message.reason}"
            if message.reason in FINAL:
                self._lose(peer, message.reason, text, now)
            else:
                self._failed(peer, message.reason, text, now)
            return
        refusal = self._inspect(peer, message, source)
        if refusal:
            self._lose(peer, refusal[0], f"{peer.where}: {refusal[1]}", now)
            return
        peer.agent_name = message.agent_name
        self._hellos.pop(peer.nonce, None)
        self._change(peer, E.WELCOMED)
        peer.is_loading = True
        self._wake(peer)
        self._outbox.commands.append(LoadPeer(peer, message.metadata))

    def _inspect(self, peer: Peer, welcome: Welcome, source: str) -> tuple[Reason, str] | None:
        """Refuse what a remote rank says of itself, or make the map to it."""
        if source != peer.incarnation:
            there = rank_name(welcome.engine_id, peer.tp_rank, peer.pp_stage, source)
            return Reason.RESTARTED, f"{there} answers there now"
        if welcome.major != MAJOR:
            return Reason.PROTOCOL, f"speaks protocol {welcome.major}, this side {MAJOR}; upgrade the older side"
        try:
            layout = decode_layout(memoryview(welcome.layout))
        except LayoutError as exc:
            return Reason.GEOMETRY, f"its layout cannot be used: {exc}"
        if (welcome.engine_id, layout.pp_stage, layout.tp_rank) != peer.identity:
            return (
                Reason.WRONG_TARGET,
                f"{rank_name(welcome.engine_id, layout.tp_rank, layout.pp_stage, source)} answers there; correct the "
                f"endpoints",
            )
        if hashlib.sha256(welcome.metadata).digest() != welcome.digest:
            return Reason.PROTOCOL, "its NIXL metadata does not match the digest that came with it"
        try:
            check_layout(layout)
        except LayoutError as exc:
            return Reason.GEOMETRY, f"its layout cannot be used: {exc}"
        if differences := compare(self._layout, layout):
            return Reason.GEOMETRY, "layouts differ: " + "; ".join(map(str, differences))
        peer.layout = layout
        return None

    def _ready(self, peer: Peer, now: float) -> None:
        self._wake(peer)
        self._take_turn(peer)
        for pull in self._pulls_of(peer):
            self._route(pull, now)
            self._after(pull, now)

    def _route(self, pull: Pull, now: float) -> None:
        """Once every rank that may be read is ready: decide what is read of which, claim, and plan."""
        while pull.failure is None and pull.state in (PullState.ANNOUNCED, PullState.CONNECTING):
            sources = [leg for leg in pull.sources if leg.reads]
            if not sources:
                if pull.is_hit:
                    return
                if not self._widen(pull, now):
                    pull.fail(*(pull.unmet or (Reason.GEOMETRY, "no rank holds anything of ours")), now)
                continue
            known = [leg for leg in sources if self.peers[leg.address, leg.incarnation].loaded]
            for leg in known:
                pull.want_claim(leg, now)
            if pull.lists is None or pull.state is not PullState.CONNECTING:
                return
            if not all(leg.map is not None for leg in sources):
                # Those that have answered may be enough: a rank that holds nothing of ours is not waited for. (Without
                # stages of our own every stage holds layers of ours, and may turn out not to fit.)
                if len(known) < len(sources):
                    stages = {leg.pp_stage for leg in known}
                    whole = self._layout.pp_size == 1 and len(pull.lists.wanted) == len(self._layout.groups)
                    if whole and len(stages) < pull.params.pp_size:
                        return
                maps = self._maps(known, pull.lists.wanted) if known else ""
                if isinstance(maps, str):
                    if len(known) < len(sources):
                        return
                    if not self._widen(pull, now):
                        pull.fail(*(pull.unmet or (Reason.GEOMETRY, f"layouts differ: {maps}")), now)
                    continue
                for leg in sources if len(known) < len(sources) else ():
                    leg.map, leg.reads = None, False
                for leg, read in zip(known, maps, strict=True):
                    leg.map, leg.reads = read, read is not None
            pull.routed(now)
            return

    def _widen(self, pull: Pull, now: float) -> bool:
        """Meet all ranks that were not met yet; False if there are none."""
        others = [leg for leg in pull.sources if not leg.was_met]
        for leg in others:
            leg.reads = leg.was_met = True
        for leg in others:
            self._meet(pull, leg, now)
        return bool(others)

    def _maps(self, sources: list[Source], groups: tuple[int, ...]) -> tuple[PeerTables | None, ...] | str:
        """Say what is read of each of these ranks, or why they are not enough."""
        places = tuple([(leg.address, leg.incarnation) for leg in sources])
        if (known := self._routes.get((places, groups))) is not None:
            return known
        peers = [self.peers[place] for place in places]
        found: list[PeerTables | None] = []
        try:
            shared = assign(self._layout, [_known(peer) for peer in peers], groups)
            for peer, shares in zip(peers, shared, strict=True):
                key = tuple((s.here.layer, s.a.name, s.lo, s.hi) for s in shares)
                if shares and key not in peer.maps:
                    peer.maps[key] = PeerTables(self._layout, _known(peer), shares, peer.table_ids)
                    for warning in peer.maps[key].warnings:
                        self._outbox.commands.append(SlowGeometry(peer, warning))
                found.append(peer.maps[key] if shares else None)
        except (NotCovered, LayoutError) as exc:
            route: tuple[PeerTables | None, ...] | str = str(exc)
        else:
            route = tuple(found)
        if len(self._routes) >= MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        self._routes[places, groups] = route
        return route

    def _plan(self, pull: Pull, now: float) -> bool:
        """Decide which pieces are read of every rank; False if it cannot be done, and the pull has failed."""
        assert pull.lists is not None
        for leg in pull.sources:
            if not leg.reads or leg.plan is not None:
                continue
            assert leg.map is not None
            try:
                plan = plan_read(leg.map, pull.lists)
            except RemoteTooShort as exc:
                pull.fail(Reason.REMOTE_TOO_SHORT, str(exc), now)
                return False
            except (PlanRefused, LayoutError) as exc:
                pull.fail(Reason.UNPLANNABLE, str(exc), now)
                return False
            self._outbox.counters["descriptors.planned"] += plan.num_descriptors
            pull.planned(leg, plan)
            # A plan holds the tables that it reads with.
            leg.map.evict(set())
        return True

    def _pulls_of(self, peer: Peer) -> list[Pull]:
        """Return who has something owed or held at a peer, in order of arrival."""
        return sorted((self.pulls[p] for p in peer.pulls), key=lambda pull: pull.arrival)

    # -- inside: peers -----------------------------------------------------------------------------

    def _change(self, peer: Peer, event: PeerEvent) -> None:
        before = peer.state
        if peer.receive(event):
            self._outbox.commands.append(PeerChanged(peer, before, peer.state))

    def _heard(self, peer: Peer, now: float) -> None:
        peer.heard_at = now
        if peer.state is S.SUSPECT:
            peer.moved_at = now
            self._change(peer, E.HEARD)
            self._take_back(peer)
            self._ready(peer, now)

    def _set_aside(self, peer: Peer) -> None:
        """Nothing comes from a peer: what waits for it takes no room from others."""
        if not peer.is_set_aside:
            peer.is_set_aside = True
            self._outbox.counters["peers.set_aside"] += 1
            for transfer_id in peer.transfers:
                self.window.leave(transfer_id)
            for pull_id in peer.pulls:
                self.admission.discount(pull_id)

    def _take_back(self, peer: Peer) -> None:
        """It goes on."""
        peer.is_set_aside = False
        for transfer_id in peer.transfers:
            transfer = self.transfers[transfer_id]
            if transfer.pull.reason is None and transfer_id in transfer.leg.running:
                self.window.enter(transfer_id, transfer.num_bytes, transfer.num_descriptors)
        for pull_id in peer.pulls:
            if not self._is_aside(self.pulls[pull_id]):
                self.admission.recount(pull_id)

    def _is_aside(self, pull: Pull) -> bool:
        """It waits for a rank from which nothing comes."""
        for leg in pull.sources:
            if leg.reads and (peer := self.peers.get((leg.address, leg.incarnation))) is not None and peer.is_set_aside:
                return True
        return False

    def _failed(self, peer: Peer, reason: Reason, detail: str, now: float) -> None:
        """A handshake failed: everyone who waited for it fails with its cause, then there is a pause."""
        self._hellos.pop(peer.nonce, None)
        peer.reason, peer.detail = reason, detail
        peer.not_before = now + min(self._config.backoff_s * 2**peer.failures, self._config.max_backoff_s)
        peer.failures = min(peer.failures + 1, 16)
        self._change(peer, E.FAILED)
        self._fail_readers(peer, reason, detail, now)

    def _lose(self, peer: Peer, reason: Reason, detail: str, now: float) -> None:
        if peer.state is S.GONE:
            return
        self._hellos.pop(peer.nonce, None)
        peer.reason, peer.detail, peer.gone_at = reason, detail, now
        peer.not_before = now + self._config.backoff_s
        self._change(peer, E.LOST)
        self._fail_readers(peer, reason, detail, now)
        for _, leg in peer.queue:
            leg.queued = False
        peer.queue.clear()
        self._reap(peer)
        self._wake(peer)

    def _fail_readers(self, peer: Peer, reason: Reason, detail: str, now: float) -> None:
        peer.num_failed = 0
        for pull in self._pulls_of(peer):
            was_well = pull.failure is None
            for leg in pull.sources:
                if (leg.address, leg.incarnation) != (peer.address, peer.incarnation):
                    continue
                if pull.is_told:
                    if self._settles_itself(pull, leg):
                        pull.settled(leg, "the rank is gone", now)
                elif leg.reads:
                    # A rank that was read nothing from never fails a pull.
                    self._unmet(pull, leg, reason, detail, now)
                    self._route(pull, now)
            peer.num_failed += was_well and pull.failure is not None
            self._after(pull, now)

    def _reap(self, peer: Peer) -> None:
        """Take a peer that is gone out of the data plane, once nothing of it can write any more."""
        if peer.state is S.GONE and peer.loaded and not peer.transfers:
            peer.loaded = False
            self._outbox.commands.append(RemovePeer(peer, peer.is_alive))
        if peer.state is S.GONE and peer.maps:
            peer.maps.clear()
            place = (peer.address, peer.incarnation)
            for route in [route for route in self._routes if place in route[0]]:
                del self._routes[route]
        if peer.state is S.GONE:
            self._wake(peer)

    def _take_turn(self, peer: Peer) -> None:
        if peer.queue and not peer.is_queued:
            peer.is_queued = True
            self._turns.append(peer)

    def _ping_at(self, peer: Peer) -> float:
        # One expression for the wish and the check: with two, rounding could wake it for ever.
        return max(peer.heard_at, peer.watched_at, peer.pinged_at) + self._config.heartbeat_s

    def _wake(self, peer: Peer) -> None:
        match peer.state:
            case S.CONNECTING:
                self._timers.wake(peer, min(peer.deadline, peer.retry_at))
            case S.LOADING:
                self._timers.wake(peer, peer.deadline)
            case S.READY | S.SUSPECT if peer.pulls:
                self._timers.wake(peer, self._ping_at(peer))
            case S.READY | S.SUSPECT:
                self._timers.wake(peer, peer.unused_at + self._config.idle_s)
            case S.NEW if not peer.pulls and not peer.is_loading:
                self._timers.wake(peer, max(peer.not_before, peer.unused_at))
            case S.GONE if not peer.pulls and not peer.transfers:
                # Not before: a tombstone that cannot be cleared yet must not be woken for it again and again.
                self._timers.wake(peer, peer.gone_at + TOMBSTONE_S)
            case _:
                pass


assert set(ON_EVENT) == set(PeerState)
