"""The tickets that a decode rank follows (`core/following.py`).

The rank meets one prefill rank, the first that it would read, and sends it a `Follow` until an `Offered` answers. A
following that ends otherwise says so (`Unfollow`). An offer that crosses that message is late, and is released.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from asynckv.config import PullConfig
from asynckv.core.following import FollowEvent, Following, FollowState
from asynckv.core.limits import remember
from asynckv.core.outbox import FollowReached, Shared
from asynckv.core.peer import Peer, PeerState
from asynckv.core.peers import Peers
from asynckv.core.source import MAX_CLAIM_PAUSE_S
from asynckv.core.types import Address, KVTransferParams, PullId, Reason, RequestId
from asynckv.core.wire import OFFERS, Follow, Offered, Unfollow, decode_offer
from asynckv.errors import LocalProtocolError, RemoteProtocolError

S, E = FollowState, FollowEvent
MAX_LEFT = 4096  # followings without an offer that are remembered, because one may come late


class Follows:
    def __init__(self, config: PullConfig, shared: Shared, nonces: Iterator[int], peers: Peers) -> None:
        self.by_request: dict[RequestId, Following] = {}
        self.by_id: dict[PullId, Following] = {}
        self.on_late: Callable[[Following, float], None] = lambda *_: None
        self.on_piece: Callable[[Following, KVTransferParams, float], None] = lambda *_: None
        """Releases what was offered too late, and takes a piece. `RankCore` sets both."""
        self._by_ticket: dict[str, Following] = {}
        self._left: OrderedDict[str, Following] = OrderedDict()
        self._outbox, self._timers = shared.outbox, shared.timers
        self._config, self._nonces, self._peers = config, nonces, peers

    def begin(self, following: Following, now: float) -> None:
        """Follow a ticket. The caller has made way for its rank."""
        ticket = following.target.ticket
        if (spared := self._by_ticket.get(ticket)) is not None and spared.state is S.SPARED:
            self.end(spared, Reason.CANCELLED, "followed anew", now, tells=False)
        if (other := self._by_ticket.get(ticket)) is not None or following.request_id in self.by_request:
            name, what = (other or following).request_id, "this ticket" if other is not None else "a ticket"
            raise LocalProtocolError(f"request {name[:200]!r} follows {what} already; cancel it first")
        self.by_request[following.request_id] = self.by_id[following.follow_id] = following
        self._by_ticket[ticket] = following
        self._left.pop(ticket, None)  # or a late offer to that one would release what this one is offered
        self._outbox.counters["follows.started"] += 1
        self._timers.wake(following, following.deadline)
        self._meet(following, now)

    def _meet(self, following: Following, now: float) -> None:
        engine_id, rank = following.target.engine_id, following.rank
        peer = self._peers.find(engine_id, rank, now)
        self._peers.attach(peer, following.follow_id, now, follows=True)
        failure = self._peers.meet(peer, following.follow_id, engine_id, rank, now)
        if failure is not None:
            self.end(following, *failure, now)
        elif peer.state is PeerState.READY and peer.minor < OFFERS:
            text = f"{peer.where} speaks protocol 1.{peer.minor}, which knows no tickets; upgrade it"
            self.end(following, Reason.PROTOCOL, text, now)
        elif peer.state is PeerState.READY:
            following.receive(E.READY)
            self._send(following, now)

    def ready(self, peer: Peer, now: float) -> None:
        for follow_id in sorted(peer.follows):
            self._meet(self.by_id[follow_id], now)

    def lost(self, peer: Peer, reason: Reason, detail: str, now: float) -> None:
        for following in [self.by_id[each] for each in sorted(peer.follows)]:
            if reason is Reason.WRONG_TARGET and not peer.is_named(following.target.engine_id, following.rank):
                peer.follows.discard(following.follow_id)
                self._meet(following, now)  # another request used the wrong name
            else:
                self.end(following, reason, detail, now, tells=False)

    def end(self, following: Following, reason: Reason, detail: str, now: float, *, tells: bool = True) -> None:
        """End a following without an offer, and tell its rank, which may still have it parked."""
        is_told = following.state is S.SPARED
        following.receive(E.END)
        if following.nonces:
            remember(self._left, following.target.ticket, following, MAX_LEFT)
            if tells:
                self._outbox.send(*following.rank.place, Unfollow(following.target.ticket, next(self._nonces)))
        self._forget(following, now)
        if not is_told:
            self._tell_end(following, reason, detail)

    def spare(self, following: Following) -> None:
        """End a following for its caller, but follow on, and release what is offered."""
        following.receive(E.SPARE)
        following.have = -1
        del self.by_request[following.request_id]
        self._tell_end(following, Reason.CANCELLED, "what it is offered is released")

    def known(self, following: Following, params: KVTransferParams, now: float) -> None:
        """End a following with params that another rank was offered."""
        following.receive(E.KNOWN)
        following.params = params
        self._outbox.counters["follows.offered"] += 1
        if following.nonces:
            self._outbox.send(*following.rank.place, Unfollow(following.target.ticket, next(self._nonces)))
        self._forget(following, now)
        self._outbox.commands.append(FollowReached(following))

    def offered(self, offered: Offered, address: Address, sender: str, now: float) -> Following | None:
        """Take an answer of the process start `sender`. Return the following if it says that its rank is gone."""
        following = self._by_ticket.get(offered.ticket) or self._left.get(offered.ticket)
        if following is None or following.rank.place[0] != address or offered.nonce not in following.nonces:
            self._outbox.counters["dropped.stale_answer"] += 1
        elif offered.reason is Reason.RESTARTED:
            return following  # its successor answers, and only the asked rank has seen the nonce
        elif following.rank.place[1] != sender:
            self._outbox.counters["dropped.foreign_answer"] += 1
        elif offered.is_piece and following.state is S.FOLLOWING and following.have >= 0:
            if (piece := self._params(following, offered, now)) is not None:
                # The rank knows of the follower no more. It asks again with what it has by then, or after this pause.
                following.pause_s = MAX_CLAIM_PAUSE_S
                following.retry_at = now + MAX_CLAIM_PAUSE_S
                self.on_piece(following, piece, now)
        elif offered.reason is None and not offered.is_piece and (following.is_open or following.state is S.ENDED):
            self._take(following, offered, now)
        elif offered.reason is not None and following.is_open:
            text = offered.detail or f"{following.rank.name} lends it no more, or never"
            self.end(following, offered.reason, text, now, tells=False)
        return None

    def ask(self, following: Following, have: int, now: float) -> None:
        """Ask on, now that this rank has the first `have` tokens; with -1 for the request alone."""
        following.have, following.pause_s = have, 0.0
        if following.state is not S.MEETING:  # else it asks once its rank can be asked
            self._send(following, now)

    def _params(self, following: Following, offered: Offered, now: float) -> KVTransferParams | None:
        """Return what was offered; None, and the end of the following, if that cannot be right."""
        target = following.target
        try:
            params = decode_offer(offered)
            said = params.engine_id, params.tp_size, params.pp_size, params.num_token_shards, set(params.endpoints)
            asked = target.engine_id, target.tp_size, target.pp_size, target.num_token_shards, set(target.endpoints)
            if said != asked:
                raise RemoteProtocolError(f"{following.rank.name} offered params of another engine or of other ranks")
        except RemoteProtocolError as exc:
            if following.is_open:
                self.end(following, Reason.WRONG_TARGET, str(exc), now)
            return None
        return params

    def _take(self, following: Following, offered: Offered, now: float) -> None:
        was_open, params = following.is_open, self._params(following, offered, now)
        if params is None:
            return
        following.receive(E.OFFER)
        following.params, is_late = params, following.state is S.LATE
        if was_open:
            self._forget(following, now)
        self._outbox.counters["follows.late" if is_late else "follows.offered"] += 1
        self._outbox.commands.append(FollowReached(following, is_late))
        if is_late:
            self.on_late(following, now)

    def tick(self, following: Following, now: float) -> None:
        if not following.is_open:
            return
        if now >= following.deadline:
            waited_s = now - following.since
            self.end(following, Reason.NO_OFFER, f"{following.rank.name} offered nothing in {waited_s:.3g} s", now)
        elif now >= following.retry_at:
            self._send(following, now)
        else:
            self._timers.wake(following, min(following.deadline, following.retry_at))

    def audit(self) -> list[str]:
        """Return contradictions between followings, peers and timers."""
        asked = {name: peer.place for peer in self._peers.by_place.values() for name in peer.follows}
        wrong = [f"{name} is asked for, and not followed" for name in asked.keys() - self.by_id.keys()]
        for name, each in self.by_id.items():
            is_named = each.state is S.SPARED or self.by_request.get(each.request_id) is each
            is_known = is_named and self._by_ticket.get(each.target.ticket) is each
            if not (is_known and each.is_open and each.scheduled_at < math.inf and asked.get(name) == each.rank.place):
                wrong.append(
                    f"request {each.request_id!r} is followed, but not in all tables, at its rank and by a timer"
                )
        if len(self.by_id) != len(self._by_ticket) or len(self.by_id) < len(self.by_request):
            wrong.append("some requests or tickets are followed no more, and not forgotten")
        return wrong

    # -- inside ------------------------------------------------------------------------------------

    def _send(self, following: Following, now: float) -> None:
        following.nonces.append(nonce := next(self._nonces))
        following.pause_s = min(2 * following.pause_s, MAX_CLAIM_PAUSE_S) or self._config.claim_retry_s
        following.retry_at = now + following.pause_s
        message = Follow(following.target.ticket, nonce, following.cohort, following.have)
        self._outbox.send(*following.rank.place, message)
        self._timers.wake(following, min(following.deadline, following.retry_at))

    def _tell_end(self, following: Following, reason: Reason, detail: str) -> None:
        following.reason, following.detail = reason, detail
        self._outbox.counters[f"follows.{reason}"] += 1
        self._outbox.commands.append(FollowReached(following))

    def _forget(self, following: Following, now: float) -> None:
        if self.by_request.get(following.request_id) is following:
            del self.by_request[following.request_id]
        del self.by_id[following.follow_id], self._by_ticket[following.target.ticket]
        self._timers.forget(following)
        self._peers.detach(following.rank.place, following.follow_id, now)
