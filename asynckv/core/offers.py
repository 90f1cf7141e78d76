"""The tickets of a prefill rank: requests that decode ranks follow before they are lent.

A router draws a ticket for a request, and gives it to a prefill and to a decode engine at once. A follower names the
ticket to one prefill rank. What the rank knows of the ticket decides the answer:

- **lent**: the params of the request, now and to every later follower;
- **ended**: the reason why it will not be lent (`withdrawn`), or is lent no more;
- **closed**: refused, because the engine lends nothing new;
- **unknown**: the ticket may be ahead of its request, so the follower is parked like an early claim.

An offer only tells params. The lease judges claims as if they had come through a router.

While a request with a ticket is computed, its finished chunks can be lent as *pieces*. Only a follower that says what
it has is offered one, and one cohort per ticket. A piece holds nothing: its owner takes all pieces of a ticket back in
one call, and they never outlive the request's loan. A follower reads a piece, and then claims it. A granted claim
proves the read (`core/source.py`), because an ended piece grants nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from msgspec import Raw

from asynckv.core.lease import Lease, LeaseState
from asynckv.core.limits import remember
from asynckv.core.outbox import Outbox
from asynckv.core.parking import AT_ONCE, ParkedMessage, Parking
from asynckv.core.types import Key, KVTransferParams, Reason, ReplyTo
from asynckv.core.wire import Follow, Offered, Unfollow, encode_offer

MAX_PIECES = 256  # pieces of one ticket; the rest of its request comes with its loan
MAX_BYTES = 1 << 25  # of the params of these


class LentPiece(NamedTuple):
    lease: Lease
    begin: int  # its tokens
    end: int
    params: Raw


@dataclass(slots=True)
class Pieces:
    """The pieces of one ticket, in the order in which they were lent, and the cohort that is offered them."""

    lent: list[LentPiece] = field(default_factory=list)
    cohort_id: str = ""
    num_bytes: int = 0  # of their params

    def behind(self, follow: Follow) -> Raw | None:
        """Assign the newest piece that a follower can add to what it has, without a gap, and return its params."""
        return next((piece.params for piece in reversed(self.lent) if self.assign(piece, follow)), None)

    def assign(self, piece: LentPiece, follow: Follow) -> bool:
        """Return True if a follower can add a piece to what it has. Then only its cohort is offered pieces."""
        if not piece.begin <= follow.have < piece.end or self.cohort_id not in ("", follow.cohort.id):
            return False
        self.cohort_id = follow.cohort.id
        return True


class Offers:
    def __init__(self, parking: Parking, outbox: Outbox, max_ended: int) -> None:
        self.lent: dict[str, tuple[Lease, Raw]] = {}
        self.tickets: dict[Key, str] = {}  # of the same requests, and of pieces
        self.pieces: dict[Key, Lease] = {}  # no timer wakes these
        self.unread = set[Key]()  # of the newest piece of each ticket, until all its readers were granted it
        self.on_followed: Callable[[str], None] = lambda _: None
        """Hears of tickets with a follower that waits for a piece. The engine sets it."""
        self._pieces: dict[str, Pieces] = {}
        self._ended: OrderedDict[str, Reason] = OrderedDict()
        self._parking, self._outbox, self._max_ended = parking, outbox, max_ended

    # -- calls -------------------------------------------------------------------------------------

    def lend(self, ticket: str, lease: Lease, params: KVTransferParams) -> None:
        """Offer a request that was lent just now. A ticket belongs to the first request that brings it."""
        if ticket in self.lent or ticket in self._ended:
            self._outbox.counters["tickets.taken"] += 1
            self.end_pieces(ticket)  # they may be of this request, and its end says nothing of the ticket
            return
        self.lent[ticket], lease.offers = (lease, encode_offer(params)), 0
        self.tickets[lease.lent.key] = ticket
        for parked in self._parking.take(ticket)[:AT_ONCE]:  # the others repeat themselves
            self.answer(parked)

    def withdraw(self, ticket: str) -> None:
        """Declare that no request will be lent under a ticket. One that is lent stays as it is, without pieces."""
        self.end_pieces(ticket)
        if ticket not in self.lent and ticket not in self._ended:
            remember(self._ended, ticket, Reason.WITHDRAWN, self._max_ended)
            for parked in self._parking.take(ticket):
                self.answer(parked)

    def lend_piece(self, ticket: str, lease: Lease, params: KVTransferParams) -> None:
        """Offer a piece of a request that is still computed. It is nothing if the request has ended, or was lent."""
        if ticket in self.lent or ticket in self._ended:
            return
        pieces, key = self._pieces.setdefault(ticket, Pieces()), lease.lent.key
        if len(pieces.lent) >= MAX_PIECES:
            return
        begin = max([runs.first_token for runs in params.groups if runs.runs], default=params.num_tokens)
        piece = LentPiece(lease, begin, params.num_tokens, encode_offer(params))
        pieces.num_bytes += len(memoryview(piece.params))
        if pieces.num_bytes > MAX_BYTES:
            return
        self._outbox.counters["pieces.lent"] += 1
        self.unread -= {before.lease.lent.key for before in pieces.lent[-1:]}
        pieces.lent.append(piece)
        self.pieces[key], self.tickets[key] = lease, ticket
        self.unread.add(key)
        # Those that are parked could take none of the earlier pieces.
        parked = self._parking.by_key.get(ticket, {}).items()
        takers = (x for x in parked if isinstance(x[1].message, Follow) and pieces.assign(piece, x[1].message))
        for place, taker in list(islice(takers, AT_ONCE)):
            self._parking.drop(ticket, place)
            self.answer(taker)
        if self.is_followed(ticket):  # by one that can take nothing of this piece, and waits for the next
            self.on_followed(ticket)

    def end_pieces(self, ticket: str) -> None:
        """Take back all pieces of a ticket: when this returns, no claim of them is granted any more."""
        for piece in self._pieces.pop(ticket, Pieces()).lent:
            self._forget(piece.lease.lent.key)

    def end_piece(self, key: Key) -> None:
        """Take back one piece, and offer it no more."""
        pieces = self._pieces[self._forget(key)]
        pieces.lent = [piece for piece in pieces.lent if piece.lease.lent.key != key]

    def _forget(self, key: Key) -> str:
        """Forget a piece; return its ticket."""
        self.unread.discard(key)
        del self.pieces[key]
        return self.tickets.pop(key)

    def end_all_pieces(self) -> None:
        for ticket in list(self._pieces):
            self.end_pieces(ticket)

    def piece_granted(self, lease: Lease) -> None:
        """Note that a reader has a piece. Once all have it, nothing of the ticket is read before the next one."""
        if len(lease.attempts) >= lease.num_readers:
            self.unread.discard(lease.lent.key)

    def is_followed(self, ticket: str) -> bool:
        """Return True if a follower of the cohort that is offered pieces waits for one."""
        return any(self._wants_pieces(each.message) for each in self._parking.by_key.get(ticket, {}).values())

    def lease_ended(self, key: Key, reason: Reason) -> None:
        ticket = self.tickets.pop(key)
        del self.lent[ticket]
        self.end_pieces(ticket)
        remember(self._ended, ticket, reason, self._max_ended)

    # -- messages ----------------------------------------------------------------------------------

    def follow(self, message: Follow, reply_to: ReplyTo, sender: str, now: float, proven: str, closed_as: str) -> None:
        known = message.ticket in self.lent or message.ticket in self._ended
        if known or closed_as or self._piece_behind(message) is not None:
            self.answer(ParkedMessage(message, reply_to, sender, now, proven), closed_as)
        elif not self._parking.park(message, reply_to, sender, now, proven):
            self._outbox.counters["parked.refused"] += 1
        elif self._wants_pieces(message):
            self.on_followed(message.ticket)

    def unfollow(self, message: Unfollow, reply_to: ReplyTo, sender: str) -> None:
        self._parking.drop(message.ticket, ("", sender, reply_to), message.nonce)

    def answer(self, parked: ParkedMessage, closed_as: str = "") -> None:
        """Answer a follower. Of an unknown ticket it is refused, because the engine lends nothing new."""
        follow = parked.message
        assert isinstance(follow, Follow)
        lease, params = self.lent.get(follow.ticket, (None, None))
        piece = None if lease is not None or closed_as else self._piece_behind(follow)
        if piece is not None:
            self._outbox.counters["pieces.offered"] += 1
            answer = Offered(follow.ticket, follow.nonce, piece, is_piece=True)
        elif lease is not None and params is not None and lease.state is LeaseState.LENT:
            self._outbox.counters["offers.made"] += 1
            lease.offers = (lease.offers or 0) + 1
            answer = Offered(follow.ticket, follow.nonce, params)
        else:
            reason = Reason.REVOKED if lease is not None else self._ended.get(follow.ticket, Reason.ENGINE_CLOSED)
            detail = f"the engine is {closed_as}" if reason is Reason.ENGINE_CLOSED else ""
            self._outbox.counters[f"offers.refused.{reason}"] += 1
            answer = Offered(follow.ticket, follow.nonce, reason=reason, detail=detail)
        self._outbox.send(parked.reply_to, parked.sender, answer)

    def _piece_behind(self, follow: Follow) -> Raw | None:
        return None if (pieces := self._pieces.get(follow.ticket)) is None else pieces.behind(follow)

    def _wants_pieces(self, message: object) -> bool:
        if not isinstance(message, Follow) or message.have < 0:
            return False
        pieces = self._pieces.get(message.ticket)
        return pieces is None or pieces.cohort_id in ("", message.cohort.id)
