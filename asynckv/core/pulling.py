"""The decode side of one rank: its pulls, the peers it reads from, and whose turn it is to post.

Peers fail alone: handshakes, back-offs, queues and byte windows are per peer, and what happens to one
touches only the pulls that read from it. A rank that is only released is never waited for.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from asynckv.config import PullConfig
from asynckv.core.commands import (
    AddTable,
    BlocksReturned,
    Desk,
    Disconnect,
    LoadPeer,
    PeerChanged,
    PostRead,
    PullEnded,
    PullOver,
    RemovePeer,
    Timers,
    Traced,
)
from asynckv.core.layout import Layout, check_layout
from asynckv.core.ledger import Ledger
from asynckv.core.messages import (
    MAJOR,
    MINOR,
    Ack,
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
from asynckv.core.peer import ON_EVENT, Peer, PeerEvent, PeerState
from asynckv.core.plan import PeerMap, compare, plan_read
from asynckv.core.pull import Leg, News, Pull, PullState, ReleaseState
from asynckv.core.types import Address, Cohort, PullId, Reason, RequestId, TransferId
from asynckv.errors import LayoutError, LocalProtocolError, PlanRefused, RemoteTooShort

__all__ = ["News", "Pulling"]

E, S = PeerEvent, PeerState

TOMBSTONE_S = 60.0
"""How long a peer that is gone is remembered, so that late requests fail with the same cause."""

FINAL = {Reason.GEOMETRY, Reason.WRONG_TARGET, Reason.PROTOCOL, Reason.RESTARTED}
"""Refusals that no further handshake with this start of the process can change."""


@dataclass(slots=True)
class _Transfer:
    pull: Pull
    leg: Leg
    peer: Peer
    num_bytes: int
    windowed: int
    """Bytes it still takes from the peer's window."""


class Pulling:
    """All pulls and peers of one rank."""

    def __init__(
        self,
        layout: Layout,
        cohort: Cohort,
        config: PullConfig,
        ledger: Ledger,
        desk: Desk,
        timers: Timers,
        nonces: Iterator[int],
    ) -> None:
        self.pulls: dict[PullId, Pull] = {}
        self.by_request: dict[RequestId, Pull] = {}
        """Pulls without an outcome, by the caller's id."""
        self.peers: dict[tuple[Address, str], Peer] = {}
        self.transfers: dict[TransferId, _Transfer] = {}
        self._layout, self._cohort, self._config = layout, cohort, config
        self._ledger, self._desk, self._timers, self._nonces = ledger, desk, timers, nonces
        self._hellos: dict[int, Peer] = {}
        self._turns: deque[Peer] = deque()
        self._ids = itertools.count(1)

    # -- calls -------------------------------------------------------------------------------------

    def add(self, pull: Pull, now: float) -> None:
        """Start an announced pull: meet the peers it will read from."""
        if pull.request_id in self.by_request:
            raise LocalProtocolError(
                f"request {pull.request_id!r} is being pulled already; cancel it or wait for its outcome first"
            )
        self.pulls[pull.pull_id] = self.by_request[pull.request_id] = pull
        self._desk.counters["pulls.started"] += 1
        for leg in pull.legs:
            peer = self._peer(pull, leg, now)
            if not peer.pulls:
                peer.watched_at = now
            peer.pulls.add(pull.pull_id)
        for leg in pull.legs:
            if leg.reads and not pull.failure:
                self._meet(pull, leg, now)
        self._after(pull, now)

    def begin(self, pull: Pull, groups: tuple[tuple[int, list[int]], ...], deadline: float, now: float) -> None:
        """Give an announced pull its blocks.

        Raises:
            LocalProtocolError: A block is lent, or written by another pull.
        """
        self._ledger.take(pull.pull_id, "writing", pull.request_id, {g: ids for g, (_, ids) in enumerate(groups)}, now)
        if not any(len(ids) for _, ids in groups):
            # A full prefix hit: nobody is read, everybody is released.
            for leg in pull.legs:
                leg.reads = False
        pull.begin(groups, deadline, now)
        for leg in pull.legs:
            if leg.reads and not pull.failure:
                self._plan(pull, leg, now)
        self._after(pull, now)

    def cancel(self, pull: Pull, now: float) -> None:
        """Give up a pull."""
        pull.cancel(now)
        self._after(pull, now)

    # -- posting -----------------------------------------------------------------------------------

    def next_post(self, now: float) -> PostRead | None:
        """Return the next read to post, if any may be; the peers take turns, each in order of arrival."""
        while self._turns:
            peer = self._turns.popleft()
            peer.is_queued = False
            while peer.queue and not peer.queue[0][0].may_post(peer.queue[0][1]):
                peer.queue.popleft()[1].queued = False
            if not peer.queue or not peer.is_usable:
                continue
            pull, leg = peer.queue[0]
            assert leg.next_post is not None
            if peer.in_flight_bytes and peer.in_flight_bytes + leg.next_post.num_bytes > self._config.window_bytes:
                continue
            post = leg.take_post()
            if leg.next_post is None:
                peer.queue.popleft()
                leg.queued = False
            self._take_turn(peer)
            transfer_id = TransferId(next(self._ids))
            self.transfers[transfer_id] = _Transfer(pull, leg, peer, post.num_bytes, post.num_bytes)
            peer.transfers.add(transfer_id)
            peer.in_flight_bytes += post.num_bytes
            pull.posted(leg, transfer_id, post.num_descriptors, now)
            self._desk.counters["descriptors.posted"] += post.num_descriptors
            return PostRead(transfer_id, peer.agent_name, post)
        return None

    def spent(self, transfer_id: TransferId, post_s: float) -> None:
        """Note how long the call that posted a transfer took."""
        if (transfer := self.transfers.get(transfer_id)) is not None:
            transfer.pull.post_s += post_s

    def ended(self, news: News, detect_s: float, now: float) -> None:
        """Take news of a transfer; `now` was read after it was observed."""
        transfer = self.transfers.get(news.transfer_id)
        if transfer is None:
            self._desk.counters["transfers.late_news"] += 1
            return
        pull, leg, peer = transfer.pull, transfer.leg, transfer.peer
        # What is in doubt may stay so for ever: it must not take the window from others.
        peer.in_flight_bytes -= transfer.windowed
        transfer.windowed = 0
        if news.in_doubt:
            self._desk.counters["transfers.in_doubt"] += 1
        else:
            del self.transfers[news.transfer_id]
            peer.transfers.discard(news.transfer_id)
            self._desk.counters["transfers.done" if news.ok else "transfers.failed"] += 1
        if news.ok:
            pull.detect_s = max(pull.detect_s, detect_s)
            self._desk.counters["bytes.read"] += transfer.num_bytes
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
            self._desk.commands.append(RemovePeer(peer))
            return
        peer.loaded, peer.failures, peer.heard_at = True, 0, now
        assert peer.map is not None
        peer.tables = {table.table_id for table in peer.map.regular}
        self._change(peer, E.LOADED)
        for other in list(self.peers.values()):
            # One address serves one start of a process at a time.
            if other.address == peer.address and other is not peer and other.state in (S.READY, S.SUSPECT):
                self._lose(other, Reason.RESTARTED, f"{peer.name} answers as {peer.incarnation} now", now)
        self._ready(peer, now)

    def load_failed(self, peer: Peer, cause: str, now: float) -> None:
        """The data plane could not load the peer."""
        peer.is_loading = False
        if peer.state is S.LOADING:
            self._failed(peer, Reason.UNREACHABLE, cause, now)

    def tick_peer(self, peer: Peer, now: float) -> None:
        """Let time pass for a peer."""
        config = self._config
        if peer.state is S.CONNECTING:
            if now >= peer.deadline:
                text = f"{peer.name} at {peer.address} did not answer within {config.handshake_s:g} s"
                self._failed(peer, Reason.UNREACHABLE, text, now)
            elif now >= peer.retry_at:
                self._hello(peer, now)
        elif peer.state is S.LOADING:
            if now >= peer.deadline:
                text = f"the metadata of {peer.name} at {peer.address} was not loaded within {config.handshake_s:g} s"
                self._failed(peer, Reason.UNREACHABLE, text, now)
        elif peer.state in (S.READY, S.SUSPECT) and peer.pulls:
            silent = now - max(peer.heard_at, peer.watched_at)
            if silent >= config.gone_s:
                self._lose(peer, Reason.PEER_LOST, f"{peer.name} was silent for {silent:.1f} s", now)
            elif now >= self._ping_at(peer):
                peer.pinged_at = now
                self._desk.send(peer.address, peer.incarnation, Ping(next(self._nonces)))
            if silent >= config.suspect_s and peer.state is S.READY:
                self._change(peer, E.SILENT)
        elif peer.state is S.GONE and now >= peer.gone_at + TOMBSTONE_S and not peer.transfers and not peer.pulls:
            self.peers.pop((peer.address, peer.incarnation), None)
            if not any(p.address == peer.address for p in self.peers.values()):
                self._desk.commands.append(Disconnect(peer.address))
            return
        self._wake(peer)

    def forget(self, address: Address, now: float) -> None:
        """Take a router's word that the rank at an address is gone."""
        for peer in [p for p in self.peers.values() if p.address == address and p.state is not S.GONE]:
            self._lose(peer, Reason.PEER_LOST, "forgotten by request", now)

    def foreign_version(self, address: Address, detail: str, now: float) -> None:
        """The listener at an address speaks another protocol version."""
        for peer in [p for p in self.peers.values() if p.address == address and p.state is S.CONNECTING]:
            self._lose(peer, Reason.PROTOCOL, detail, now)

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
                self._acked(message.pull_id, address, source, "acknowledged", now)
            case Pong() | Status():
                pass
            case Goodbye():
                if peer is not None:
                    self._lose(peer, Reason.PEER_LOST, f"{peer.name} said goodbye", now)
            case _:
                self._desk.counters["dropped.unexpected"] += 1

    # -- inside: pulls -----------------------------------------------------------------------------

    def tick_pull(self, pull: Pull, now: float) -> None:
        """Let time pass for a pull."""
        pull.tick(now)
        self._after(pull, now)

    def _after(self, pull: Pull, now: float) -> None:
        """Settle what a change of a pull brings about."""
        if pull.is_reading:
            for leg in pull.legs:
                if not leg.queued and pull.may_post(leg):
                    peer = self.peers[leg.address, leg.incarnation]
                    leg.queued = True
                    peer.queue.append((pull, leg))
                    self._take_turn(peer)
        if pull.reason is not None and not pull.is_told:
            pull.is_told = True
            if self.by_request.get(pull.request_id) is pull:
                del self.by_request[pull.request_id]
            self._desk.counters[f"pulls.{pull.reason}"] += 1
            for leg in pull.legs:
                if self._settles_itself(pull, leg):
                    pull.settled(leg, "the rank is gone", now)
            self._return(pull)
            self._desk.commands.append(PullEnded(pull))
        elif pull.is_told:
            self._return(pull)
        for leg, message in pull.due(self._nonces, now):
            self._desk.send(leg.address, leg.incarnation, message)
        if self._desk.trace and len(pull.history) > pull.num_traced:
            self._desk.commands.append(Traced(pull, tuple(pull.history[pull.num_traced :])))
            pull.num_traced = len(pull.history)
        if pull.is_over:
            self._finish(pull)
        else:
            self._timers.wake(pull, pull.wake_at)

    def _return(self, pull: Pull) -> None:
        if not pull.is_returned and not pull.holds_blocks:
            pull.is_returned = True
            self._ledger.drop(pull.pull_id)
            self._desk.commands.append(BlocksReturned(pull))

    def _finish(self, pull: Pull) -> None:
        if self.pulls.pop(pull.pull_id, None) is None:
            return
        self._timers.forget(pull)
        for leg in pull.legs:
            peer = self.peers.get((leg.address, leg.incarnation))
            if peer is not None:
                peer.pulls.discard(pull.pull_id)
                self._reap(peer)
        self._desk.commands.append(PullOver(pull))

    def _settles_itself(self, pull: Pull, leg: Leg) -> bool:
        peer = self.peers.get((leg.address, leg.incarnation))
        return leg.release is not ReleaseState.SETTLED and (peer is None or peer.state is S.GONE)

    def _claim_answered(self, answer: Granted | NotYet | Refused, address: Address, source: str, now: float) -> None:
        pull = self.pulls.get(PullId(answer.pull_id))
        leg = next((x for x in pull.legs if x.address == address), None) if pull else None
        if pull is None or leg is None or answer.key != pull.params.key:
            self._desk.counters["dropped.stale_answer"] += 1
            return
        restarted = isinstance(answer, Refused) and answer.reason is Reason.RESTARTED
        if leg.incarnation != source and not restarted:
            self._desk.counters["dropped.foreign_answer"] += 1
            return
        if restarted:
            peer = self.peers.get((address, leg.incarnation))
            asked = answer.nonce in leg.nonces or (answer.nonce == 0 and leg.release is ReleaseState.SENT)
            if peer is not None and asked and isinstance(answer, Refused):
                self._lose(peer, Reason.RESTARTED, answer.detail, now)
            return
        if isinstance(answer, Refused) and answer.nonce == 0:
            self._acked(answer.pull_id, address, source, f"refused: {answer.reason}", now)
            return
        if not pull.answered(leg, answer, now):
            self._desk.counters["dropped.stale_answer"] += 1
        self._after(pull, now)

    def _acked(self, pull_id: str, address: Address, source: str, note: str, now: float) -> None:
        pull = self.pulls.get(PullId(pull_id))
        leg = next((x for x in pull.legs if x.address == address), None) if pull else None
        if pull is None or leg is None or leg.incarnation != source or leg.release is ReleaseState.UNSENT:
            self._desk.counters["dropped.stale_answer"] += 1
            return
        pull.settled(leg, note, now)
        self._after(pull, now)

    # -- inside: handshakes ------------------------------------------------------------------------

    def _peer(self, pull: Pull, leg: Leg, now: float) -> Peer:
        place = (leg.address, leg.incarnation)
        peer = self.peers.get(place)
        if peer is not None and peer.state is S.GONE and peer.reason not in FINAL and now >= peer.not_before:
            # The connection broke, but the process may live: meet it anew once everything has drained.
            if not peer.transfers and not peer.pulls and not (peer.loaded or peer.is_loading):
                self._timers.forget(peer)
                peer = None
        if peer is None:
            peer = Peer(pull.params.engine_id, leg.tp_rank, leg.address, leg.incarnation)
            self.peers[place] = peer
        return peer

    def _meet(self, pull: Pull, leg: Leg, now: float) -> None:
        """Make sure that a rank to read from is, or is becoming, ready."""
        peer = self.peers[leg.address, leg.incarnation]
        if peer.state is S.NEW and now >= peer.not_before and not peer.is_loading:
            peer.deadline = now + self._config.handshake_s
            self._change(peer, E.WANTED)
            peer.nonce, peer.hellos = next(self._nonces), 0
            self._hellos[peer.nonce] = peer
            self._hello(peer, now)
            self._wake(peer)
        elif peer.state in (S.NEW, S.GONE):
            wait = f"; the next attempt is possible in {peer.not_before - now:.2g} s" if peer.not_before > now else ""
            pull.fail(peer.reason, peer.detail + wait, now)
        elif peer.is_usable:
            pull.want_claim(leg, now)
        self._wake(peer)

    def _hello(self, peer: Peer, now: float) -> None:
        peer.retry_at = now + self._config.hello_retry_s * 2 ** min(peer.hellos, 3)
        peer.hellos += 1
        hello = Hello(peer.nonce, MAJOR, MINOR, peer.engine_id, peer.tp_rank, self._cohort)
        self._desk.send(peer.address, peer.incarnation, hello)

    def _answered(self, message: Welcome | Unwelcome, address: Address, source: str, now: float) -> None:
        peer = self._hellos.get(message.nonce)
        if peer is None or peer.state is not S.CONNECTING or peer.address != address:
            self._desk.counters["dropped.stale_answer"] += 1
            return
        if isinstance(message, Unwelcome):
            text = f"{peer.name} at {address} refused the handshake: {message.detail or message.reason}"
            if message.reason in FINAL:
                self._lose(peer, message.reason, text, now)
            else:
                self._failed(peer, message.reason, text, now)
            return
        refusal = self._inspect(peer, message, source)
        if refusal:
            self._lose(peer, refusal[0], f"{peer.name} at {address}: {refusal[1]}", now)
            return
        peer.agent_name = message.agent_name
        self._hellos.pop(peer.nonce, None)
        self._change(peer, E.WELCOMED)
        peer.is_loading = True
        self._wake(peer)
        self._desk.commands.append(LoadPeer(peer, message.metadata))

    def _inspect(self, peer: Peer, welcome: Welcome, source: str) -> tuple[Reason, str] | None:
        """Refuse what a remote rank says of itself, or make the map to it."""
        if source != peer.incarnation:
            return Reason.RESTARTED, f"answers as incarnation {source}, expected {peer.incarnation}"
        if welcome.major != MAJOR:
            return Reason.PROTOCOL, f"speaks protocol {welcome.major}, this side {MAJOR}; upgrade the older side"
        found = (welcome.engine_id, welcome.layout.tp_rank)
        if found != (peer.engine_id, peer.tp_rank):
            return (
                Reason.WRONG_TARGET,
                f"engine {found[0]!r} tp_rank {found[1]} answers, but the params name {peer.engine_id!r} "
                f"tp_rank {peer.tp_rank}; correct the roster's address",
            )
        if hashlib.sha256(welcome.metadata).digest() != welcome.digest:
            return Reason.PROTOCOL, "its NIXL metadata does not match the digest that came with it"
        try:
            check_layout(welcome.layout)
            if differences := compare(self._layout, welcome.layout):
                return Reason.GEOMETRY, "layouts differ: " + "; ".join(map(str, differences))
            peer.map = PeerMap(self._layout, welcome.layout)
        except LayoutError as exc:
            return Reason.GEOMETRY, f"its layout cannot be used: {exc}"
        return None

    def _ready(self, peer: Peer, now: float) -> None:
        self._wake(peer)
        self._take_turn(peer)
        for pull in [self.pulls[p] for p in sorted(peer.pulls)]:
            for leg in pull.legs:
                if leg.reads and (leg.address, leg.incarnation) == (peer.address, peer.incarnation):
                    pull.want_claim(leg, now)
                    if pull.state is PullState.CONNECTING and leg.plan is None:
                        self._plan(pull, leg, now)
            self._after(pull, now)

    def _plan(self, pull: Pull, leg: Leg, now: float) -> None:
        peer = self.peers[leg.address, leg.incarnation]
        if not peer.is_usable or pull.state is not PullState.CONNECTING:
            return
        assert peer.map is not None
        if pull.ready_at == math.inf:
            pull.ready_at = now
        try:
            plan = plan_read(peer.map, pull.groups, pull.params.groups, pull.params.num_tokens)
        except RemoteTooShort as exc:
            pull.fail(Reason.REMOTE_TOO_SHORT, str(exc), now)
            return
        except (PlanRefused, LayoutError) as exc:
            pull.fail(Reason.UNPLANNABLE, str(exc), now)
            return
        for section in plan.sections:
            if section.table.table_id not in peer.tables:
                peer.tables.add(section.table.table_id)
                self._desk.commands.append(AddTable(peer, section.table))
        self._desk.counters["descriptors.planned"] += plan.num_descriptors
        pull.want_claim(leg, now)
        pull.planned(leg, plan, now)

    # -- inside: peers -----------------------------------------------------------------------------

    def _change(self, peer: Peer, event: PeerEvent) -> None:
        before = peer.state
        if peer.receive(event):
            self._desk.commands.append(PeerChanged(peer, before))

    def _heard(self, peer: Peer, now: float) -> None:
        peer.heard_at = now
        if peer.state is S.SUSPECT:
            self._change(peer, E.HEARD)
            self._ready(peer, now)

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
        self._reap(peer)
        self._wake(peer)

    def _fail_readers(self, peer: Peer, reason: Reason, detail: str, now: float) -> None:
        for pull in [self.pulls[p] for p in sorted(peer.pulls)]:
            for leg in pull.legs:
                if (leg.address, leg.incarnation) != (peer.address, peer.incarnation):
                    continue
                if pull.is_told:
                    if self._settles_itself(pull, leg):
                        pull.settled(leg, "the rank is gone", now)
                elif leg.reads:
                    # A rank that was read nothing from never fails a pull.
                    pull.fail(reason, detail, now)
            self._after(pull, now)

    def _reap(self, peer: Peer) -> None:
        """Take a peer that is gone out of the data plane, once nothing of it can write any more."""
        if peer.state is S.GONE and peer.loaded and not peer.transfers:
            peer.loaded = False
            self._desk.commands.append(RemovePeer(peer))
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
            case S.GONE if not peer.pulls and not peer.transfers:
                # Not before: a tombstone that cannot be cleared yet must not be woken for it again and again.
                self._timers.wake(peer, peer.gone_at + TOMBSTONE_S)
            case _:
                pass


assert set(ON_EVENT) == set(PeerState)
