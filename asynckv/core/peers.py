"""All remote ranks that this rank deals with: met once for all pulls, watched while needed, forgotten in the end.

    meet            Hello ->
    hello_answered  <- Welcome: its layout is checked here, then the data plane loads its metadata
    load_ended      READY: it can be read
    tick            the hello again, a ping; the caller handles silence and idleness
    lost, reap      GONE: out of the data plane once nothing of it can write, forgotten after a while

A `Peer` (`core/peer.py`) knows its own conversation. The caller handles the pulls: the return value of a method says if
the peer no longer serves them.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle

from asynckv.config import PullConfig
from asynckv.core.flow import InFlight, PeerLine
from asynckv.core.limits import Limiter
from asynckv.core.outbox import LoadPeer, PeerReached, RemovePeer, Shared
from asynckv.core.peer import FINAL, Due, Peer, PeerEvent, PeerState
from asynckv.core.readers import Identity
from asynckv.core.routes import Routes
from asynckv.core.source import RemoteRank
from asynckv.core.types import SAME_SHARDS, Address, How, Place, PullId, Reason, members, rank_name
from asynckv.core.wire import MAJOR, SETTLES, Message, Unwelcome, Welcome
from asynckv.errors import LayoutError
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.layout import Layout
from asynckv.geometry.match import compare, in_words

S = members(PeerState)

MAX_UNMET = 512
"""Ranks that may be known by endpoint alone, a quarter of them of one engine. Each costs a link, though params may have
made it up. For one more rank the oldest gives way, because the engine's name comes from the params as well."""

GREETINGS_PER_S, GREETING_BURST = 200.0, 16
"""First hellos per second, and at once after a silence. Each costs up to a millisecond: a link, log lines, timers."""


class Peers:
    def __init__(
        self, identity: Identity, config: PullConfig, shared: Shared, nonces: Iterator[int], routes: Routes
    ) -> None:
        self.by_place: dict[Place, Peer] = {}
        self.num_changes = 0
        """Times that a peer ceased to be ready, was lost or forgotten. A `ReadyRoute` holds until the next."""
        self._there: defaultdict[Address, dict[Peer, None]] = defaultdict(dict)  # the same by address
        self._layout, self._cohort, self._config = identity.layout, identity.cohort, config
        self._outbox, self._timers, self._nonces, self._routes = shared.outbox, shared.timers, nonces, routes
        self._hellos: dict[int, Peer] = {}
        self.scheduled_at = math.inf  # when ranks that wait to be greeted have their next turn
        self.waiting: dict[Peer, PullId] = {}  # ranks that wait to be greeted, with the pull that wanted each first
        self._greetings, self._by_age = Limiter(GREETINGS_PER_S, GREETING_BURST), cycle((False, True))

    # -- places ------------------------------------------------------------------------------------

    def at(self, address: Address, *states: PeerState) -> list[Peer]:
        return [p for p in self._there.get(address, ()) if p.state in states]

    def find(self, engine_id: str, rank: RemoteRank, now: float) -> Peer:
        """Return the peer at a rank's place, or a new one if the place must be met anew."""
        peer, lost = self.by_place.get(rank.place), None
        if peer is not None and peer.state is S.GONE:
            # The connection broke, but the process may live; or other params used a wrong name.
            is_other = not peer.is_named(engine_id, rank)
            again = is_other or (peer.reason not in FINAL and now >= peer.not_before)
            if peer.reason is Reason.PEER_LOST and not is_other:
                lost = peer
            if again and not peer.is_loading:
                # Transfers that may never end keep the old peer in the data plane. The data plane then reads for the
                # new peer over the same connection, or over another if that one broke.
                self._timers.forget(peer)
                peer = None
        if peer is None:
            line = PeerLine(InFlight(self._config.window_bytes, self._config.window_descriptors))
            peer = Peer(engine_id, rank.tp_rank, rank.pp_stage, *rank.place, line)
            if lost is not None:
                peer.is_doubted, peer.failures = True, lost.failures
            self._take_out(self.by_place.get(rank.place))  # the order is that of finding
            self.by_place[rank.place] = peer
            self._there[peer.address][peer] = None
            # A peer that was just forgotten here must not take the link along that the new one needs.
            self._outbox.unlinked.pop(peer.address, None)
        return peer

    def num_new(self, ranks: Sequence[RemoteRank]) -> int:
        return len([rank for rank in ranks if rank.place not in self.by_place])

    def in_the_way(self, engine_id: str, ranks: Sequence[RemoteRank]) -> list[Peer]:
        """Return the ranks that never answered and must make room for the unmet ones among `ranks`.

        The oldest rank of the engine that has most of them goes first. A rank that only gets a release goes before a
        rank that is to be read.
        """
        if not (num_new := self.num_new(ranks)):
            return []
        unmet, places = [p for p in self.by_place.values() if p.layout is None], {rank.place for rank in ranks}
        by_engine: defaultdict[str, list[Peer]] = defaultdict(list)
        for peer in sorted(unmet, key=lambda p: p.state is S.CONNECTING or p in self.waiting):
            if peer.place not in places:
                by_engine[peer.engine_id].append(peer)
        theirs = by_engine[engine_id]
        num_theirs = len([p for p in unmet if p.engine_id == engine_id])
        # The ranks of one request always fit, so there are always enough other ranks to drop.
        going = theirs[: max(num_theirs + num_new - MAX_UNMET // 4, 0)]
        del theirs[: len(going)]
        for _ in range(len(unmet) - len(going) + num_new - MAX_UNMET):
            going.append(max(by_engine.values(), key=len).pop(0))
        return going

    # -- pulls at peers ----------------------------------------------------------------------------

    def attach(self, peer: Peer, pull_id: PullId, now: float, *, follows: bool = False) -> None:
        if not (peer.pulls or peer.follows):
            peer.watched_at = now
        (peer.follows if follows else peer.pulls).add(pull_id)
        if now + self._config.heartbeat_s < peer.scheduled_at:
            self.wake(peer)

    def detach(self, place: Place, pull_id: PullId, now: float) -> None:
        peer = self.by_place.get(place)
        if peer is None:
            return
        if pull_id in peer.pulls or pull_id in peer.follows:
            peer.pulls.discard(pull_id)
            peer.follows.discard(pull_id)
            peer.unused_at = now
            if not (peer.pulls or peer.follows):
                self.waiting.pop(peer, None)
        if peer.state is S.GONE:
            self.reap(peer)
        elif not (peer.pulls or peer.follows) and peer.scheduled_at == math.inf:
            self.wake(peer)  # else an earlier timer wakes the peer

    # -- handshakes --------------------------------------------------------------------------------

    def meet(
        self, peer: Peer, pull_id: PullId, engine_id: str, rank: RemoteRank, now: float
    ) -> tuple[Reason, str] | None:
        """Make sure that a rank to read from is ready or becomes ready, or return why it cannot."""
        failure: tuple[Reason, str] | None = None
        if peer.may_be_met and peer.layout is None and peer not in self.waiting:
            # The process has not named itself yet, so a wrong name in params that were only released must not stay.
            peer.engine_id, peer.pp_stage, peer.tp_rank = engine_id, rank.pp_stage, rank.tp_rank
        # Until the peer has answered, either of two names may be right.
        if not (peer.is_named(engine_id, rank) or peer.state is S.CONNECTING or peer in self.waiting):
            text = f"{peer.address} is {peer.name}, but the params name {rank.name}; correct the endpoints"
            failure = Reason.WRONG_TARGET, text
        elif peer.layout is not None and (found := peer.layout.num_token_shards) != rank.num_token_shards:
            text = f"{peer.where}: its layout has num_token_shards {found}, but the params say {rank.num_token_shards}"
            failure = Reason.GEOMETRY, f"{text}; {SAME_SHARDS}"
        elif peer.may_be_met and now >= peer.not_before:
            if peer.layout is None:
                self.waiting.setdefault(peer, pull_id)
                self.greet(now)
            else:  # its endpoint is not made up
                self._greet(peer, now)
        elif peer.state in (S.NEW, S.GONE):
            wait = f"; the next attempt is possible in {peer.not_before - now:.2g} s" if peer.not_before > now else ""
            failure = peer.reason, peer.detail + wait
        if peer.state is not S.READY:
            self.wake(peer)
        return failure

    def greet(self, now: float) -> None:
        """Greet ranks that wait for it, as many as the limit allows: in turns one of the pull with the fewest, and the
        one that has waited longest, because a client may name one rank in each of very many requests.
        """
        while self.waiting and self._greetings.take("", now):
            number, peer = Counter(self.waiting.values()), next(iter(self.waiting))
            if not next(self._by_age):
                peer = min(self.waiting, key=lambda each: number[self.waiting[each]])
            del self.waiting[peer]
            self._greet(peer, now)
            self.wake(peer)
        if self.waiting:
            self._timers.wake(self, now + 1 / GREETINGS_PER_S)

    def hello_answered(
        self, message: Welcome | Unwelcome, address: Address, sender: str, now: float
    ) -> tuple[Peer, Reason, str] | None:
        """Take the answer to a hello. Return the peer, reason and detail if the rank does not serve us."""
        peer = self._hellos.get(message.nonce)
        if peer is None or peer.state is not S.CONNECTING or peer.address != address:
            self._outbox.counters["dropped.stale_answer"] += 1
            return None
        if isinstance(message, Unwelcome):
            text = f"{peer.where} refused the handshake: {message.detail or message.reason}"
            return peer, message.reason, text
        layout = self._inspect(peer, message, sender)
        if not isinstance(layout, Layout):
            reason, why = layout
            return peer, reason, f"{peer.where}: {why}"
        self._hellos.pop(peer.nonce, None)
        peer.welcomed(message.agent_name, layout, message.minor, message.packing, self._config, now)
        self.wake(peer)
        self._outbox.commands.append(LoadPeer(peer, message.metadata))
        return None

    def _inspect(self, peer: Peer, welcome: Welcome, sender: str) -> Layout | tuple[Reason, str]:
        """Return the layout of a remote rank, or the final reason to refuse it."""
        if sender != peer.incarnation:
            there = rank_name(welcome.engine_id, peer.tp_rank, peer.pp_stage, sender)
            return Reason.RESTARTED, f"{there} answers there now"
        if welcome.major != MAJOR:
            return Reason.PROTOCOL, f"speaks protocol {welcome.major}, this side {MAJOR}; upgrade the older side"
        try:
            layout = decode_layout(memoryview(welcome.layout))
            check_layout(layout)
        except LayoutError as exc:
            return Reason.GEOMETRY, f"its layout cannot be used: {exc}"
        if not peer.is_named(welcome.engine_id, layout):
            there = rank_name(welcome.engine_id, layout.tp_rank, layout.pp_stage, sender)
            return Reason.WRONG_TARGET, f"{there} answers there; correct the endpoints"
        if hashlib.sha256(welcome.metadata).digest() != welcome.digest:
            return Reason.PROTOCOL, "its NIXL metadata does not match the digest that came with it"
        if differences := compare(self._layout, layout):
            told = in_words(differences)
            if welcome.minor < SETTLES:
                told += f" (it speaks protocol 1.{welcome.minor}; if the models agree, upgrade it to 1.{SETTLES})"
            return Reason.GEOMETRY, f"layouts differ: {told}"
        return layout

    def probe(self, peer: Peer, now: float) -> None:
        """Ping a doubted rank, because a pull waits for its acknowledgement."""
        if peer.may_be_met and peer.word_by == math.inf:
            peer.word_by = now + self._config.suspect_s
            self._send(peer, peer.make_ping(next(self._nonces), now))
            self.wake(peer)

    # -- their states ------------------------------------------------------------------------------

    def load_ended(self, peer: Peer, now: float, *, is_loaded: bool) -> bool:
        """Take the end of loading a peer, for which others may have waited. Return False if the peer was lost or given
        up meanwhile.
        """
        peer.is_loading = False
        for other in self.by_place.values():
            if other.state is S.LOADING:
                other.await_load(self._config, now)
        if peer.state is not S.LOADING:
            if is_loaded:
                self._outbox.commands.append(RemovePeer(peer))
            self.wake(peer)
            return False
        if is_loaded:
            peer.loaded(now)
            self.wake(peer)
        return True

    def failed(self, peer: Peer, reason: Reason, detail: str, now: float, how: How | None = None) -> None:
        self._hellos.pop(peer.nonce, None)
        peer.failed(reason, detail, self._config, now, how)
        self.wake(peer)

    def lost(self, peer: Peer, reason: Reason, detail: str, pause_s: float, now: float, how: How | None = None) -> bool:
        """Mark a peer as lost; return False if it was already. The caller tells its pulls, then calls `reap`."""
        if peer.state is S.GONE:
            return False
        self._hellos.pop(peer.nonce, None)
        self.waiting.pop(peer, None)
        peer.lost(reason, detail, pause_s, now, how)
        self.wake(peer)
        return True

    def reap(self, peer: Peer) -> None:
        """Take a lost peer out of the data plane, once nothing of it can write any more."""
        if peer.is_loaded and not peer.transfers:
            peer.is_loaded = False
            self._outbox.commands.append(RemovePeer(peer, peer.keep_connected))
        peer.tables.clear()
        self._routes.forget(peer.place)
        self.wake(peer)

    def drop(self, peer: Peer) -> None:
        self._timers.forget(peer)
        self.num_changes += 1
        self._take_out(peer)
        self.unlink(peer.address)

    def _take_out(self, peer: Peer | None) -> None:
        if peer is not None and self.by_place.get(peer.place) is peer:  # else the place was met anew
            del self.by_place[peer.place]
            del self._there[peer.address][peer]
            if not self._there[peer.address]:
                del self._there[peer.address]

    def unlink(self, address: Address) -> None:
        if not self._there.get(address):
            self._outbox.unlinked[address] = None

    # -- time --------------------------------------------------------------------------------------

    def tick(self, peer: Peer, now: float) -> list[Due]:
        """Let time pass for a peer. Return what the caller must handle, in order, before the peer is woken again."""
        left: list[Due] = []
        for due in peer.due(self._config, now):
            match due:
                case Due.HELLO:
                    self._say_hello(peer, now)
                case Due.PING:
                    self._send(peer, peer.make_ping(next(self._nonces), now))
                case Due.FORGET:
                    self.drop(peer)
                    return []
                case Due.SILENT:
                    peer.receive(PeerEvent.SILENT)
                    left.append(due)
                case _:
                    left.append(due)
        if not left:
            self.wake(peer)
        return left

    def wake(self, peer: Peer) -> None:
        """Report a peer's state if it has changed, and set its timer."""
        if peer.state is not peer.told_as:
            before, peer.told_as = peer.told_as, peer.state
            self.num_changes += before is S.READY or peer.state is S.GONE
            self._outbox.commands.append(PeerReached(peer, before, peer.state))
        self._timers.wake(peer, peer.wake_at(self._config))

    # -- inside ------------------------------------------------------------------------------------

    def _greet(self, peer: Peer, now: float) -> None:
        peer.greet(next(self._nonces), self._config, now)
        self._hellos[peer.nonce] = peer
        self._say_hello(peer, now)

    def _say_hello(self, peer: Peer, now: float) -> None:
        self._send(peer, peer.make_hello(self._cohort, self._config.hello_retry_s, now))
        if peer.is_doubted:
            # A process without an agent answers a hello only once it has another one, but a ping at once.
            self._send(peer, peer.make_ping(next(self._nonces), now))

    def _send(self, peer: Peer, message: Message) -> None:
        self._outbox.send(peer.address, peer.incarnation, message)
