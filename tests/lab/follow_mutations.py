"""Bugs planted on purpose in what engines do with tickets, one at a time, as in `tests.lab.mutations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from asynckv.core.follows import Follows
from asynckv.core.lease import LeaseState
from asynckv.core.offers import Offers
from asynckv.core.parking import Parking
from asynckv.core.rank import RankCore
from asynckv.core.types import FollowParams, Reason, decode_params
from asynckv.core.wire import Follow, Offered, decode_offer, encode_offer
from asynckv.embed import Announce, Cancel
from asynckv.embed.ledgers import DecodeLedger, PrefillLedger
from tests.lab.mutations import LONG, Bugs, configured
from tests.lab.rigged import Rank, Said

BUGS = Bugs()
PLANTED, planted, inside, replaced, doors = BUGS.plants, BUGS.planted, BUGS.within, BUGS.replaced, BUGS.doors


# -- offers ------------------------------------------------------------------------------------------------------------

PROMISED: dict[str, Any] = {}
"""Params by ticket, of requests that are computed still."""


@planted
def an_offer_before_the_lend(rank: Rank) -> None:
    """A rank offers a request whose params are made, and which is lent later."""

    @rank.hears(Follow)
    def offer(said: Said) -> Said:
        if (params := PROMISED.get(said.message.ticket)) is not None:
            offered = Offered(said.message.ticket, said.message.nonce, encode_offer(decode_params(params)))
            rank.say(Said(offered, said.other, said.start))
        return said


@inside("an_offer_before_the_lend")
def _(patch: pytest.MonkeyPatch) -> None:
    PROMISED.clear()
    lend = PrefillLedger.lend

    def promise(self: PrefillLedger, *args: Any, ticket: str = "", **options: Any) -> dict[str, Any]:
        PROMISED[ticket] = params = lend(self, *args, ticket=ticket, **options)
        return params

    patch.setattr(PrefillLedger, "lend", promise)


@planted
def an_offer_of_another_ticket(rank: Rank) -> None:
    """A rank offers each follower what it has lent last."""
    lent: list[Any] = []

    def lend(params: Any, **options: Any) -> Any:
        handle = rank.engine.honest.lend(params, **options)
        lent.append(encode_offer(decode_params(params)))
        return handle

    rank.engine.lend = lend

    @rank.sends(Offered)
    def offer(said: Said) -> Said:
        return said.but(params=lent[-1]) if said.message.reason is None and lent else said


@inside()
def a_lend_offers_to_the_followers_of_all_tickets(patch: pytest.MonkeyPatch) -> None:
    honest = Parking.take

    def take(self: Parking, key: Any) -> Any:
        others = [each for each in self.by_key if isinstance(each, str) and each != key] if isinstance(key, str) else []
        found = [parked for other in others for parked in honest(self, other)]
        return honest(self, key) + [
            msgspec.structs.replace(each, message=msgspec.structs.replace(each.message, ticket=key)) for each in found
        ]

    patch.setattr(Parking, "take", take)


@inside()
def what_is_revoked_is_offered(patch: pytest.MonkeyPatch) -> None:
    """A loan is offered while a grant of it runs, though it was taken back."""
    honest = Offers.answer

    def answer(self: Offers, parked: Any, *args: Any) -> None:
        lease, params = self.lent.get(parked.message.ticket, (None, None))
        if lease is not None and params is not None and lease.state is not LeaseState.LENT:
            self._outbox.send(
                parked.reply_to, parked.sender, Offered(parked.message.ticket, parked.message.nonce, params)
            )
        else:
            honest(self, parked, *args)

    patch.setattr(Offers, "answer", answer)


# A scheduler takes each ticket for its request's own.
replaced("a_second_request_under_a_ticket", PrefillLedger, "take_ticket", lambda ledger, ticket: True)


@inside()
def a_second_loan_under_a_ticket(patch: pytest.MonkeyPatch) -> None:
    """A rank offers the newest loan of a ticket."""
    honest = Offers.lend

    def lend(self: Offers, ticket: str, *args: Any) -> None:
        if (before := self.lent.pop(ticket, None)) is not None:
            del self.tickets[before[0].lent.key]
        self._ended.pop(ticket, None)
        honest(self, ticket, *args)

    patch.setattr(Offers, "lend", lend)


# A rank forgets that a loan has ended.
replaced("a_ticket_that_outlives_its_request", Offers, "lease_ended", lambda offers, key, reason: None)

# A scheduler tells no rank that a request has ended without a loan.
replaced("a_dropped_request_keeps_its_ticket", PrefillLedger, "withdraw_ticket", lambda ledger, ticket: None)


@inside()
def a_withdrawn_request_keeps_its_ticket(patch: pytest.MonkeyPatch) -> None:
    """The same, of a request whose params were made."""
    honest = PrefillLedger._withdraw

    def withdraw(self: PrefillLedger, loan: Any) -> None:
        loan.ticket = ""
        honest(self, loan)

    patch.setattr(PrefillLedger, "_withdraw", withdraw)


@planted
def an_early_ticket_refused(rank: Rank) -> None:
    """A ticket that a rank does not know is taken for one that was withdrawn."""
    known = set[str]()

    def lend(params: Any, *, ticket: str = "", **options: Any) -> Any:
        known.add(ticket)
        return rank.engine.honest.lend(params, ticket=ticket, **options)

    rank.engine.lend = lend

    @rank.hears(Follow)
    def refuse(said: Said) -> Said | None:
        ticket, nonce = said.message.ticket, said.message.nonce
        if ticket in known:
            return said
        rank.say(Said(Offered(ticket, nonce, reason=Reason.WITHDRAWN), said.other, said.start))
        return None


# -- followers ---------------------------------------------------------------------------------------------------------


@inside()
def a_follower_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A rank parks no follower, so that only a repeat that comes after the lend is answered."""
    honest = Parking.park

    def park(self: Parking, message: Any, *args: Any) -> bool:
        return True if isinstance(message, Follow) else honest(self, message, *args)

    patch.setattr(Parking, "park", park)


@planted
def a_lost_question_is_not_repeated(rank: Rank) -> None:
    """A follower asks once."""
    asked = set[str]()

    @rank.sends(Follow)
    def ask(said: Said) -> Said | None:
        is_new = said.message.ticket not in asked
        asked.add(said.message.ticket)
        return said if is_new else None


@inside()
def a_follower_of_a_lost_rank_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A following whose rank was lost ends, and nobody is told."""
    honest = Follows.lost

    def lost(self: Follows, *args: Any) -> None:
        before = len(self._outbox.commands)
        honest(self, *args)
        del self._outbox.commands[before:]

    patch.setattr(Follows, "lost", lost)


@planted
def a_follower_waits_for_ever(rank: Rank) -> None:
    """A following that is offered nothing has no end."""
    configured(lambda pull: replace(pull, follow_s=LONG), rank)


@inside()
def params_of_another_engine_taken(patch: pytest.MonkeyPatch) -> None:
    """A follower does not compare what it is offered with what it follows."""
    honest = Follows._take

    def take(self: Follows, following: Any, offered: Offered, now: float) -> None:
        params, ticket = decode_offer(offered), following.target.ticket
        following.target = FollowParams(
            ticket=ticket,
            engine_id=params.engine_id,
            tp_size=params.tp_size,
            pp_size=params.pp_size,
            endpoints=params.endpoints,
            num_token_shards=params.num_token_shards,
        )
        honest(self, following, offered, now)

    patch.setattr(Follows, "_take", take)


@planted
def _misled(rank: Rank) -> None:
    """A rank is offered what another engine has lent."""

    @rank.hears(Offered)
    def mislead(said: Said) -> Said:
        if said.message.reason is not None:
            return said
        params = decode_offer(said.message)
        return said.but(params=encode_offer(msgspec.structs.replace(params, engine_id=f"{params.engine_id}'")))


PLANTED["params_of_another_engine_taken"] = PLANTED.pop("_misled")


# What is offered too late is not released by the rank that is offered it.
replaced("late_offers_are_kept", RankCore, "_release_late", lambda core, following, now: None)


# -- schedulers --------------------------------------------------------------------------------------------------------


@planted
def each_rank_pulls_by_its_own_offer(rank: Rank) -> None:
    """A rank announces and pulls what it was offered itself, whatever its scheduler has decided."""
    own: dict[str, Any] = {}
    waiting: dict[str, Any] = {}
    engine = rank.engine

    def offer_of(following: Any) -> Any:
        params = engine.honest._offer_of(following)
        own.setdefault(following.request_id, params)
        if (options := waiting.pop(following.request_id, None)) is not None:
            engine.honest.announce(following.request_id, own[following.request_id], **options)
        return params

    def announce(request_id: str, params: Any, **options: Any) -> None:
        if request_id in own:
            engine.honest.announce(request_id, own[request_id], **options)
        else:
            waiting[request_id] = options  # for its own

    def begin_pull(waiter: Any, request_id: str, groups: Any, params: Any, **options: Any) -> Any:
        return engine.honest._begin_pull(waiter, request_id, groups, own.get(request_id, params), **options)

    engine._offer_of, engine.announce, engine._begin_pull = offer_of, announce, begin_pull


def ordering_no(kind: type, honest: Callable[..., None]) -> Callable[..., None]:
    """Return a method of a decode ledger that makes no order of a kind, and else does what the honest one does."""

    def method(self: DecodeLedger, *args: Any) -> None:
        before = set(self._orders)
        honest(self, *args)
        self._orders = {n: x for n, x in self._orders.items() if n in before or not isinstance(x, kind)}

    return method


# A request that was offered is not announced.
replaced(
    "no_claim_before_there_are_blocks", DecodeLedger, "_take_offer", ordering_no(Announce, DecodeLedger._take_offer)
)

# A scheduler lets the other ranks of its engine keep what one was offered too late.
replaced("offers_that_nobody_needs_are_kept", DecodeLedger, "offered", ordering_no(Cancel, DecodeLedger.offered))

# Nobody releases what is offered for a prompt that is cached whole.
replaced("a_cached_prompt_is_followed_no_more", DecodeLedger, "release", DecodeLedger.cancel)

# A rank in the place of one that died follows nothing.
replaced(
    "a_dead_rank_takes_its_follows_along", DecodeLedger, "rank_joined", ordering_no(object, DecodeLedger.rank_joined)
)

# A scheduler waits on for a request that a rank is not offered.
replaced("a_refusal_of_one_rank_is_passed_over", DecodeLedger, "not_offered", lambda ledger, rank, failed: None)
