"""The tickets of a prefill rank: requests that decode ranks follow before they are lent.

A router draws a ticket for a request, and gives it to a prefill and to a decode engine at once. A follower names the
ticket to one prefill rank. What the rank knows of the ticket decides the answer:

- **lent**: the params of the request, now and to every later follower;
- **ended**: the reason why it will not be lent (`withdrawn`), or is lent no more;
- **closed**: refused, because the engine lends nothing new;
- **unknown**: the ticket may be ahead of its request, so the follower is parked like an early claim.

An offer only tells params. The lease judges claims as if they had come through a router.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import Raw

from asynckv.core.lease import Lease, LeaseState
from asynckv.core.limits import remember
from asynckv.core.outbox import Outbox
from asynckv.core.parking import AT_ONCE, ParkedMessage, Parking
from asynckv.core.types import Key, KVTransferParams, Reason, ReplyTo
from asynckv.core.wire import Follow, Offered, Unfollow, encode_offer


class Offers:
    def __init__(self, parking: Parking, outbox: Outbox, max_ended: int) -> None:
        self.lent: dict[str, tuple[Lease, Raw]] = {}
        self.tickets: dict[Key, str] = {}  # of the same requests
        self._ended: OrderedDict[str, Reason] = OrderedDict()
        self._parking, self._outbox, self._max_ended = parking, outbox, max_ended

    # -- calls -------------------------------------------------------------------------------------

    def lend(self, ticket: str, lease: Lease, params: KVTransferParams) -> None:
        """Offer a request that was lent just now. A ticket belongs to the first request that brings it."""
        if ticket in self.lent or ticket in self._ended:
            self._outbox.counters["tickets.taken"] += 1
            return
        self.lent[ticket], lease.offers = (lease, encode_offer(params)), 0
        self.tickets[lease.lent.key] = ticket
        for parked in self._parking.take(ticket)[:AT_ONCE]:  # the others repeat themselves
            self._answer(parked)

    def withdraw(self, ticket: str) -> None:
        """Declare that no request will be lent under a ticket. One that is lent stays as it is."""
        if ticket not in self.lent and ticket not in self._ended:
            remember(self._ended, ticket, Reason.WITHDRAWN, self._max_ended)
            for parked in self._parking.take(ticket):
                self._answer(parked)

    def lease_ended(self, key: Key, reason: Reason) -> None:
        ticket = self.tickets.pop(key)
        del self.lent[ticket]
        remember(self._ended, ticket, reason, self._max_ended)

    # -- messages ----------------------------------------------------------------------------------

    def follow(self, message: Follow, reply_to: ReplyTo, sender: str, now: float, proven: str, closed_as: str) -> None:
        known = message.ticket in self.lent or message.ticket in self._ended
        if known or closed_as:
            self._answer(ParkedMessage(message, reply_to, sender, now, proven), closed_as)
        elif not self._parking.park(message.ticket, "", message, reply_to, sender, now, proven):
            self._outbox.counters["parked.refused"] += 1

    def unfollow(self, message: Unfollow, reply_to: ReplyTo, sender: str) -> None:
        self._parking.drop(message.ticket, ("", sender, reply_to), message.nonce)

    def refuse(self, parked: ParkedMessage, closed_as: str) -> None:
        """Refuse a follower of an unknown ticket, because the engine lends nothing new."""
        self._answer(parked, closed_as)

    def _answer(self, parked: ParkedMessage, closed_as: str = "") -> None:
        follow = parked.message
        assert isinstance(follow, Follow)
        lease, params = self.lent.get(follow.ticket, (None, None))
        if lease is not None and params is not None and lease.state is LeaseState.LENT:
            self._outbox.counters["offers.made"] += 1
            lease.offers = (lease.offers or 0) + 1
            answer = Offered(follow.ticket, follow.nonce, params)
        else:
            reason = Reason.REVOKED if lease is not None else self._ended.get(follow.ticket, Reason.ENGINE_CLOSED)
            detail = f"the engine is {closed_as}" if reason is Reason.ENGINE_CLOSED else ""
            self._outbox.counters[f"offers.refused.{reason}"] += 1
            answer = Offered(follow.ticket, follow.nonce, reason=reason, detail=detail)
        self._outbox.send(parked.reply_to, parked.sender, answer)
