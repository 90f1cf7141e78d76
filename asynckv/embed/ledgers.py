"""The ledgers of an engine's schedulers: the blocks of every request, and the reports of every rank about it.

A ledger makes the orders of a step, takes each rank's report (`Finished`), and returns the requests that the scheduler
has to act on. All ranks use the same block ids, so a block is free when no rank uses it. Both ledgers are plain data
for one thread, and can be pickled between two steps. A step is:

    for rank, finished in step_all_ranks(ledger.take_orders()):   # the same orders for every rank
        ledger.update(rank, finished)                             # or ledger.rank_died(rank)
    act(ledger.take_outcome())                                    # take_free(), of a prefill ledger

While no rank lives, `take_orders` returns nothing: pulls fail, and the other orders wait for the next rank.

A new request is called `ID~2` on the wire and in logs while an earlier request with the same id still holds blocks.
"""

from __future__ import annotations

import enum
import itertools
from collections import ChainMap
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from asynckv.arguments import MAX_NAME, integer, shown, text, texts
from asynckv.core.limits import remember
from asynckv.core.types import MAX_ID, Key, KVTransferParams, check_ticket, decode_follow, decode_params
from asynckv.embed.orders import (
    Announce,
    Cancel,
    EndPieces,
    Failed,
    Finished,
    Follow,
    Lend,
    LendPiece,
    Order,
    Pull,
    StartEarly,
    Withdraw,
    WithdrawTicket,
)
from asynckv.errors import AsyncKVError, LocalProtocolError, PeerLost
from asynckv.geometry.bounds import MAX_RANKS
from asynckv.results import LeaseEnd, PullResult
from asynckv.scheduler import PrefillRanks, trace_of

if TYPE_CHECKING:
    from asynckv.core.types import Endpoint, FollowParams
    from asynckv.embed.orders import Offer

MAX_SPENT = 4096  # number of used params that are remembered, and of names that followed a ticket
MAX_TICKETS = 16_384  # number of tickets that a prefill ledger remembers
OF_BLOCKS = (Pull, StartEarly, Lend, LendPiece)  # orders about blocks that a rank in place of a dead one has not
MAX_KEPT = 1024  # number of orders that wait for a rank; the leases of older ones end by themselves
Groups = Sequence[tuple[int, Sequence[int | None]]]


class _Ledger:
    """Keep the engine's ranks, the dead ones among them, and the orders of the next step."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks, self._missing = set(range(num_ranks)), set[int]()
        self._orders: dict[int, Order] = {}  # in the sequence in which they were made, by number
        self._num_orders = 0

    @property
    def has_orders(self) -> bool:
        """True if orders wait for the next step. While no rank lives: if pulls have to fail."""
        return len(self._orders) > len(self._kept())

    @property
    def _living(self) -> set[int]:
        return self._ranks - self._missing

    def _kept(self) -> dict[int, Order]:
        """Return the orders that wait for a rank: none if one lives. Pulls and lends end instead, with free blocks."""
        return {} if self._living else {n: x for n, x in self._orders.items() if not isinstance(x, OF_BLOCKS)}

    def _order(self, order: Order) -> int:
        self._num_orders += 1
        self._orders[self._num_orders] = order
        if len(self._orders) > MAX_KEPT and len(kept := self._kept()) > MAX_KEPT:
            del self._orders[next(iter(kept))]
        return self._num_orders

    def _take(self) -> list[Order]:
        """Take the orders of this step, and keep those that wait for a rank."""
        made, self._orders = self._orders, self._kept()
        return [order for n, order in made.items() if n not in self._orders]

    def _check(self, rank: int) -> int:
        return integer("rank", rank, 0, len(self._ranks) - 1)

    def _check_report(self, rank: int, finished: Finished) -> None:
        self._check(rank)
        if finished is None:
            raise LocalProtocolError(
                f"rank {rank} has no report (None): if it has died, call rank_died({rank}), and rank_joined({rank}) "
                f"when another one is in its place; if it only was not asked, do not call update"
            )
        if not isinstance(finished, Finished):
            raise LocalProtocolError(
                f"the report of rank {rank} is {shown(finished)}; give the Finished that its take_finished returned"
            )

    def _joining(self, rank: int) -> int:
        if rank not in self._missing:
            raise LocalProtocolError(f"rank {rank} has not died (rank_died), so no other rank can take its place")
        return rank


# -- decode ----------------------------------------------------------------------------------------


class State(enum.Enum):
    """States of a request in the decode engine."""

    FOLLOWING = "following"  # it has no params yet: the ranks wait until the request of its ticket is offered
    EARLY = "early"  # it is followed, and pieces of it fill its blocks
    QUEUED = "queued"  # announced: the ranks connect to its prefill ranks and renew its claim
    WAITING = "waiting"  # queued behind a request with the same params or ticket, which is pulled for both
    PULLING = "pulling"  # its blocks are being filled
    RECEIVED = "received"  # its blocks are filled on every rank, but the scheduler was not told yet
    ENDING = "ending"  # it was cancelled or has failed on a rank, but another rank has not reported the end of its pull
    HELD = "held"  # its pull has ended on every rank, but on some rank its blocks may still be written
    REFUSED = "refused"  # it is not offered, and the scheduler has not cancelled it
    OVER = "over"


class Event(enum.Enum):
    """Events of a request in the decode engine."""

    OFFER = "offer"
    SHARE = "share"  # it is offered what another request reads, or has read
    REFUSE = "refuse"  # it is not offered
    START = "start"  # it has blocks for pieces
    SPARE = "spare"  # it needs no lent KV, and the ranks release what they are offered
    PULL = "pull"
    CANCEL = "cancel"
    FAIL = "fail"  # its pull has failed on one rank, or the rank has died
    COMPLETE = "complete"  # every rank has reported the end of its pull
    RETURN = "return"  # no rank holds its blocks
    TELL = "tell"  # the scheduler is told that it was received


S, E = State, Event
ON_EVENT: Mapping[State, Mapping[Event, State]] = {
    S.FOLLOWING: {E.OFFER: S.QUEUED, E.SHARE: S.WAITING, E.START: S.EARLY, E.REFUSE: S.REFUSED}
    | dict.fromkeys((E.SPARE, E.CANCEL), S.OVER),
    S.EARLY: {E.PULL: S.PULLING} | dict.fromkeys((E.REFUSE, E.FAIL, E.CANCEL), S.ENDING),
    S.QUEUED: {E.PULL: S.PULLING, E.CANCEL: S.OVER},
    S.WAITING: {E.REFUSE: S.REFUSED, E.CANCEL: S.OVER},
    S.PULLING: {E.COMPLETE: S.RECEIVED, E.FAIL: S.ENDING, E.CANCEL: S.ENDING},
    S.RECEIVED: {E.TELL: S.OVER, E.FAIL: S.ENDING, E.CANCEL: S.OVER},
    S.ENDING: {E.FAIL: S.ENDING, E.CANCEL: S.ENDING, E.COMPLETE: S.HELD},
    S.HELD: {E.RETURN: S.OVER},
    S.REFUSED: {E.CANCEL: S.OVER},
    S.OVER: {},
}
"""Events that each state takes, and the next state. Any other event raises before anything has changed."""

WAITS = (S.FOLLOWING, S.WAITING)
FOLLOWED = (S.FOLLOWING, S.EARLY)
ENDS = (S.HELD, S.REFUSED, S.OVER)  # no other request waits for one in these


@dataclass(slots=True, eq=False)
class Fetch:
    """A request of the decode engine that came with params, or with a ticket to follow.

    Attributes:
        request_id: The scheduler's id.
        name: The id on the wire, which differs while an earlier request of this id holds blocks.
        params: The params, checked; None until they are offered.
        plain: The params as they travel, or until they are offered what it follows.
        keys: The key of its params, once they are known, and its ticket, if it has one.
        state: State of the request.
        follow: What it follows; None if it came with params.
        trace: `traceparent` and `tracestate`, in place of those that are offered; empty if none.
        piece: Params of the first piece that it was offered, if any.
        groups: The blocks that its pull fills, as they were given to `pull`.
        results: Results of the pull, by rank.
        errors: Errors by rank. The first is the cause, because the pull may have been cancelled on the ranks after it.
            For a request that is `WAITING` or `REFUSED`: the errors of the request that it waited for.
        is_cancelled: True if the scheduler has cancelled it.
        ranks: Ranks that have not reported the end of the pull; None until `take_orders` has returned its order.
        held: Ranks on which the blocks may still be written.
        announcement: Number of the announcement among all orders.
        is_released: True if a rank has refused the pull before it began, and was told to release the request.
        is_retired: True if a rank has retired its blocks (`BlocksRetired`).
        takes_pieces: True if it may have a head start.
    """

    request_id: str
    name: str
    params: KVTransferParams | None
    plain: dict[str, Any] = field(repr=False)
    keys: list[Key | str] = field(repr=False)
    state: State = State.QUEUED
    follow: FollowParams | None = None
    trace: tuple[str, str] = ("", "")
    piece: KVTransferParams | None = None
    groups: Groups = ()
    results: dict[int, PullResult] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    is_cancelled: bool = False
    ranks: set[int] | None = None
    held: set[int] = field(default_factory=set)
    announcement: int = 0
    is_released: bool = False
    is_retired: bool = False
    takes_pieces: bool = False

    @property
    def lent(self) -> dict[str, Any] | None:
        """Its params, as `Cancel` takes them; None until they are offered."""
        return None if self.params is None else self.plain

    @property
    def num_tokens(self) -> int:
        """Number of tokens, from the prompt's start, that are in place on every rank."""
        return min((result.num_tokens for result in self.results.values()), default=0)


@dataclass(slots=True)
class Outcome:
    """Requests that the decode engine's scheduler has to act on. Each appears once per list. For a cancelled request,
    only its blocks are reported.

    Attributes:
        received: Requests with their KV in place on every rank. Compute the tokens beyond `num_tokens`.
        failed: Requests that failed (`errors`). Compute the prompt in other blocks, or have it prefilled again.
        free: Failed or cancelled requests. Nothing can write their blocks (`groups`) any more, so they may be reused.
        retired: Requests with blocks that a rank has retired (`BlocksRetired`). They follow in `free` only if the rank
            dies.
    """

    received: list[Fetch] = field(default_factory=list)
    failed: list[Fetch] = field(default_factory=list)
    free: list[Fetch] = field(default_factory=list)
    retired: list[Fetch] = field(default_factory=list)


class DecodeLedger(_Ledger):
    """The ledger of a decode engine's scheduler. The engine's ranks are called 0, 1, ... `num_ranks` - 1.

    For each request, call `announce`, or `follow`, when it is queued, `pull` when it has blocks, and `cancel`, in any
    state, when it is not wanted. The ledger makes the orders. If a pull fails on one rank, it cancels it on the others.

    Raises:
        LocalProtocolError: `num_ranks` is out of range.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(integer("num_ranks", num_ranks, 1, MAX_RANKS))
        self._fetches: dict[str, Fetch] = {}  # all that are not over, by name
        self._current: dict[str, Fetch] = {}  # those that were not cancelled and have no reported end, by request id
        self._siblings: dict[Key | str, list[Fetch]] = {}
        """Of each key, and of each ticket, the request that is pulled or followed, and those that wait for it."""
        self._spent: dict[Key | str, None] = {}  # keys and tickets that were read or given up, oldest first
        self._followed: dict[str, Key | None] = {}
        """Names that have followed a ticket, and which key each took; a rank may still report on any of them."""
        self._outcome = Outcome()

    def __len__(self) -> int:
        return len(self._fetches)

    def get(self, request_id: str) -> Fetch | None:
        """Return the request of an id, or None if it is unknown, was cancelled, or its end was reported."""
        return self._current.get(request_id)

    # -- what the scheduler decides ----------------------------------------------------------------

    def announce(
        self, request_id: str, params: Mapping[str, Any], *, trace: Mapping[str, str] | None = None
    ) -> Fetch | None:
        """Queue a request, so that its lease is renewed. No order is made if its pull follows in the same step.

        Args:
            request_id: The scheduler's id.
            params: The params that came with the request.
            trace: `traceparent` and `tracestate`, in place of those in the params.

        Returns:
            The request; None if its params were used before, so the prompt has to be computed here.

        Raises:
            ConfigError: `trace` is not a mapping.
            LocalProtocolError: A request of this id is queued or pulled, or the id is empty or too long.
            RemoteProtocolError: The params are malformed.
        """
        self._check_new(request_id)
        checked = decode_params(params)
        if checked.key in self._spent:
            return None
        checked = _traced(checked, trace_of(trace))
        name = unused(request_id, self._fetches)
        return self._queue(Fetch(request_id, name, checked, msgspec.to_builtins(checked), [checked.key]))

    def follow(
        self,
        request_id: str,
        follow: Mapping[str, Any],
        *,
        trace: Mapping[str, str] | None = None,
        takes_pieces: bool = False,
    ) -> Fetch | None:
        """Queue a request that has a ticket, and no params until it is offered (`may_pull`). All else is as for
        `announce`: also None, if the ticket's request was read or given up here.

        Args:
            takes_pieces: True to hear of a first piece (`Fetch.piece`), for which `start_early` gives blocks.
        """
        self._check_new(request_id)
        checked = decode_follow(follow)
        if checked.ticket in self._spent:
            return None
        # A rank may still report on an earlier follow, so this one has a name of its own.
        name = unused(request_id, ChainMap[str, Any](self._fetches, self._followed))
        plain, keys = msgspec.to_builtins(checked), list[Key | str]([checked.ticket])
        remember(self._followed, name, None, MAX_SPENT)
        fetch = Fetch(request_id, name, None, plain, keys, State.FOLLOWING, checked, trace_of(trace))
        # A head start has one name from its first piece to its end, so it needs the request's own.
        fetch.takes_pieces = takes_pieces and name == request_id
        return self._queue(fetch)

    def start_early(
        self, request_id: str, groups: Groups, *, num_tokens: int | None = None, hashes: Sequence[str] | None = None
    ) -> None:
        """Order every rank to fill the blocks with pieces. Call `pull` with these blocks when it is offered (`params`).

        Raises:
            LocalProtocolError: The request is not followed, or was offered no piece (`Fetch.piece`).
        """
        fetch = self._current.get(request_id)
        if fetch is None or fetch.piece is None:
            raise LocalProtocolError(f"request {request_id[:200]!r} was offered no piece, or is over")
        self._move(fetch, Event.START)
        fetch.groups, piece = groups, msgspec.to_builtins(fetch.piece)
        self._order(
            StartEarly(request_id=fetch.name, groups=groups, params=piece, num_tokens=num_tokens, hashes=hashes)
        )

    def may_pull(self, request_id: str) -> bool | None:
        """Return True if a request can be pulled, and False if the caller should `cancel` it and compute its prompt.
        One with a head start can be pulled once it has `params`.

        None means ask again later, because the request is not offered yet, or one with the same params is being pulled,
        with blocks that will serve both through a prefix cache. If a followed request is not offered, it has `errors`.
        """
        fetch = self._current.get(request_id)
        if fetch is None or fetch.state is State.QUEUED:
            return fetch is not None
        if fetch.state is State.EARLY:
            return None if fetch.params is None else True
        return None if fetch.state in WAITS and fetch.keys[0] in self._siblings else False

    def pull(
        self,
        request_id: str,
        groups: Groups,
        *,
        num_tokens: int | None = None,
        timeout_s: float | None = None,
        hashes: Sequence[str] | None = None,
        priority: int = 0,
    ) -> None:
        """Order every rank to fill the blocks. The arguments are those of `Engine.pull`.

        Raises:
            LocalProtocolError: The request may not be pulled (`may_pull`).
        """
        fetch = self._current.get(request_id)
        if fetch is None:
            raise LocalProtocolError(f"request {request_id[:200]!r} was not announced, or is over")
        if (goes_on := fetch.state is State.EARLY) and fetch.params is None:
            raise LocalProtocolError(f"request {request_id[:200]!r} has a head start, and is not offered yet: may_pull")
        if goes_on and (not (given := _listed(groups)) or given != _listed(fetch.groups)):
            raise LocalProtocolError(f"request {request_id[:200]!r} has a head start: give the blocks of start_early")
        self._move(fetch, Event.PULL)
        fetch.groups = groups
        self._order(
            Pull(
                request_id=fetch.name,
                groups=groups,
                params=fetch.plain,
                num_tokens=num_tokens,
                timeout_s=timeout_s,
                hashes=hashes,
                priority=priority,
                goes_on=goes_on,
            )
        )

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state. A request that is unknown or over is ignored.

        If it was pulled, its blocks follow in `Outcome.free`.
        """
        fetch = self._current.pop(request_id, None)
        if fetch is None:
            return
        before, fetch.is_cancelled = fetch.state, True
        if fetch in self._outcome.failed:
            self._outcome.failed.remove(fetch)
            return
        self._move(fetch, Event.CANCEL)
        if before is State.RECEIVED:
            self._outcome.received.remove(fetch)
            self._outcome.free.append(fetch)
        if before in (State.FOLLOWING, State.EARLY, State.QUEUED):
            self._order(Cancel(fetch.name, fetch.lent))
        elif before is State.PULLING:
            # If no rank lives, none takes the pull and releases the request, so that the next one needs its params.
            self._order(Cancel(fetch.name, fetch.plain if fetch.ranks is None and not self._living else None))

    def release(self, request_id: str) -> None:
        """Need no lent KV for a request, because its prompt is cached: release it now, or as soon as it is offered."""
        fetch = self._current.get(request_id)
        if fetch is not None and fetch.params is None and fetch.state in FOLLOWED:
            is_early = fetch.state is State.EARLY
            fetch.is_cancelled = is_early
            self._move(self._current.pop(request_id), Event.CANCEL if is_early else Event.SPARE)
            self._order(Cancel(fetch.name, follows_on=True))  # the ranks release it, because no step may come any more
        else:
            self.cancel(request_id)

    def refuse(self, request_id: str, error: Exception) -> None:
        """Follow a request no more, because the scheduler's own time is over. One that was offered is left alone."""
        if self.may_pull(request_id) is None:
            self._refuse(self._current[request_id], 0, error)

    # -- steps -------------------------------------------------------------------------------------

    def take_orders(self) -> Sequence[Order]:
        """Return the orders of this step. Give them to every rank that lives.

        While no rank lives, pulls fail, and announcements and cancellations wait for the next rank.
        """
        if not self._orders:
            return ()
        orders = self._take()
        for order in orders:
            if isinstance(order, Pull | StartEarly) and not (isinstance(order, Pull) and order.goes_on):
                fetch = self._fetches[order.request_id]
                fetch.ranks = self._living
                for rank in self._missing:
                    self._fail(fetch, rank, died(rank))
                self._conclude(fetch)
        return orders if self._living else ()

    def update(self, rank: int, finished: Finished) -> None:
        """Record a rank's report. Entries that are not pulls of this ledger are left to the caller.

        Raises:
            LocalProtocolError: It is no report. A rank without one may have died: `rank_died`.
        """
        self._check_report(rank, finished)
        for failed in finished.not_offered:
            self.not_offered(rank, failed)
        for offer in finished.offered:
            self.offered(rank, offer)
        for result in finished.finished_recving:
            if (fetch := self._ended(rank, result.request_id)) is not None:
                fetch.results[rank] = result
                self._conclude(fetch)
        pulls = [(x.order, x.error) for x in finished.refused]
        refused = [Failed(order.request_id, error) for order, error in pulls if isinstance(order, Pull | StartEarly)]
        for failed in (*finished.failed, *refused):
            if (fetch := self._ended(rank, failed.request_id)) is not None:
                if failed.is_held:
                    fetch.held.add(rank)
                self._fail(fetch, rank, failed.error)
                self._conclude(fetch)
        for name in finished.returned:
            if (fetch := self._fetches.get(name)) is not None:
                fetch.held.discard(rank)
                self._conclude(fetch)
        for name in finished.retired:
            if (fetch := self._fetches.get(name)) is not None and not fetch.is_retired:
                fetch.is_retired = True
                self._outcome.retired.append(fetch)

    def offered(self, rank: int, offer: Offer) -> None:
        """Record that a rank was offered a request; `update` does. The first report of any rank decides for all. What
        nothing needs any more, and other params, are released on every rank, once per key."""
        self._check(rank)
        params, name = decode_params(offer.params), offer.request_id
        key, fetch = params.key, self._fetches.get(name)
        if offer.is_piece:
            if fetch is not None and fetch.state is State.FOLLOWING and fetch.takes_pieces:
                fetch.piece = params
            return
        if fetch is not None and fetch.state in FOLLOWED and fetch.params is None and not offer.is_late:
            self._take_offer(fetch, params)
            return
        if self._followed.get(name) != key and key not in self._spent and key not in self._siblings:
            remember(self._spent, key, None, MAX_SPENT)
            # By a name that is free, because a rank takes a cancellation for the request that has the name.
            self._order(Cancel(unused(name, self._fetches), offer.params))

    def not_offered(self, rank: int, failed: Failed) -> None:
        """Record that a rank follows a request no more; `update` does. The first report of any rank decides for all."""
        self._refuse(self._fetches.get(failed.request_id), self._check(rank), failed.error)

    def ended(self, request_id: str, error: Exception | None = None) -> None:
        """Record that a pull ended on all ranks, which hold no blocks. For workers that agree among themselves, as in
        vLLM."""
        fetch = self._fetches.get(request_id)
        if fetch is not None and fetch.ranks:
            fetch.ranks.clear()
            if error is not None:
                fetch.errors[0] = error
                self._move(fetch, Event.FAIL)
            self._conclude(fetch)

    def rank_died(self, rank: int) -> None:
        """Record that a rank has died: nothing writes its memory any more, and every pull without a reported end fails.

        Requests that were received before have lost the rank's part of their KV, so compute them again.
        """
        self._missing.add(self._check(rank))
        for fetch in list(self._fetches.values()):
            if fetch.ranks is not None:
                fetch.ranks.discard(rank)
                fetch.held.discard(rank)
                if fetch.state is State.RECEIVED:
                    self._outcome.received.remove(fetch)
                if fetch.state in (State.EARLY, State.PULLING, State.RECEIVED, State.ENDING):
                    self._fail(fetch, rank, died(rank))
                self._conclude(fetch)

    def rank_joined(self, rank: int) -> None:
        """Add a new rank in place of one that died, and announce the queued requests to it, or let it follow them."""
        self._missing.remove(self._joining(rank))
        for fetch in self._fetches.values():
            if fetch.state in (S.FOLLOWING, S.QUEUED) and fetch.announcement not in self._orders:
                self._announce(fetch)  # the other ranks refuse to follow a second time

    def take_outcome(self) -> Outcome:
        """Return the requests to act on since the last call."""
        outcome, self._outcome = self._outcome, Outcome()
        for fetch in outcome.received:
            self._move(fetch, Event.TELL)
        for fetch in (*outcome.received, *outcome.failed):
            del self._current[fetch.request_id]
        return outcome

    # -- inside ------------------------------------------------------------------------------------

    def _check_new(self, request_id: str) -> None:
        if text("request_id", request_id, MAX_ID, 1) in self._current:
            raise LocalProtocolError(f"request {request_id[:200]!r} is {self._current[request_id].state.value} already")

    def _queue(self, fetch: Fetch) -> Fetch:
        self._fetches[fetch.name] = self._current[fetch.request_id] = fetch
        siblings = self._siblings.setdefault(fetch.keys[0], [])
        siblings.append(fetch)
        if (first := siblings[0]) is fetch:
            self._announce(fetch)
        else:
            fetch.state = State.WAITING
            if fetch.params is None:
                fetch.params, fetch.plain, fetch.keys = first.params, first.plain, first.keys
        return fetch

    def _announce(self, fetch: Fetch) -> None:
        follow = Follow(fetch.name, fetch.plain, takes_pieces=fetch.takes_pieces)
        fetch.announcement = self._order(follow if fetch.params is None else Announce(fetch.name, fetch.plain))

    def _take_offer(self, fetch: Fetch, params: KVTransferParams) -> None:
        """Let a request that was followed, and those that wait for it, go on as if they had come with these params."""
        remember(self._followed, fetch.name, key := params.key, MAX_SPENT)
        siblings = self._siblings.pop(ticket := fetch.keys[0])
        params = _traced(params, fetch.trace)
        plain, keys = msgspec.to_builtins(params), [key, ticket]
        for each in siblings:
            each.params, each.plain, each.keys = params, plain, keys
        if fetch.state is State.EARLY:  # it goes on under its name, and its pull will end what ranks still follow
            self._siblings[key] = self._siblings[ticket] = siblings
            return
        # From here on it is called as if it had come with params: vLLM's workers report pulls by the scheduler's id.
        followed_as = fetch.name
        del self._fetches[followed_as]
        fetch.name = unused(fetch.request_id, self._fetches)
        self._fetches[fetch.name] = fetch
        if key in self._siblings or key in self._spent:
            self._move(fetch, Event.SHARE)
            self._siblings.get(key, []).extend(siblings)
        else:
            self._siblings[key] = self._siblings[ticket] = siblings
            self._move(fetch, Event.OFFER)
            self._announce(fetch)
        if fetch.state is State.WAITING or fetch.name != followed_as:
            self._order(Cancel(followed_as))  # else a rank that is told of its params follows no more

    def _refuse(self, fetch: Fetch | None, rank: int, error: Exception) -> None:
        """End a follow that nothing has decided, also on the ranks that have reported nothing."""
        if fetch is not None and fetch.params is None and Event.REFUSE in ON_EVENT[fetch.state]:
            fetch.errors[rank] = error
            self._order(Cancel(fetch.name))
            self._move(fetch, Event.REFUSE)

    def _ended(self, rank: int, name: str) -> Fetch | None:
        """Record that a rank has ended a pull; return None if none was expected from it."""
        fetch = self._fetches.get(name)
        if fetch is None or fetch.ranks is None or rank not in fetch.ranks:
            return None
        fetch.ranks.discard(rank)
        return fetch

    def _fail(self, fetch: Fetch, rank: int, error: Exception) -> None:
        """Record a failure, and cancel the pull on the other ranks, because their parts are not needed any more."""
        fetch.errors.setdefault(rank, error)  # that it is not offered, before that its head start was cancelled
        is_unbegun = not getattr(error, "failed_in", "") and rank not in self._missing and not fetch.is_released
        fetch.is_released |= is_unbegun
        if is_unbegun or fetch.state is State.EARLY:
            # A rank that failed before it began released nothing, so it needs the params. On the others the same order
            # only ends the pull. In a head start the ranks follow on, and one that has failed does not know the params
            # that came since. What is offered later is released, because its prefill engine does not know of it.
            self._order(Cancel(fetch.name, fetch.lent, follows_on=fetch.params is None))
        elif fetch.state is State.PULLING and fetch.ranks:
            self._order(Cancel(fetch.name))
        self._move(fetch, Event.FAIL)

    def _conclude(self, fetch: Fetch) -> None:
        """Report a request to the scheduler when all ranks have reported."""
        if fetch.ranks or fetch.ranks is None:
            return
        if fetch.state is State.PULLING:
            self._move(fetch, Event.COMPLETE)
            self._outcome.received.append(fetch)
        elif fetch.state is State.ENDING:
            self._move(fetch, Event.COMPLETE)
            if not fetch.is_cancelled:
                self._outcome.failed.append(fetch)
        if fetch.state is State.HELD and not fetch.held:
            self._move(fetch, Event.RETURN)
            self._outcome.free.append(fetch)

    def _move(self, fetch: Fetch, event: Event) -> None:
        before, after = fetch.state, ON_EVENT[fetch.state].get(event)
        if after is None:
            raise LocalProtocolError(
                f"request {fetch.request_id[:200]!r} is {before.value}: {event.value} is not possible"
            )
        if event is not Event.SPARE:
            self._orders.pop(fetch.announcement, None)
        fetch.state = after
        siblings = self._siblings.get(fetch.keys[0], [])
        if after in ENDS and siblings and siblings[0] is fetch:
            # Siblings use the blocks that are in place by now, or compute their prompts, or fail too.
            is_failed = bool(fetch.errors) and not fetch.is_cancelled
            for key in fetch.keys:
                self._siblings.pop(key, None)
                if not is_failed:  # else a later request may still try these params
                    remember(self._spent, key, None, MAX_SPENT)
            for other in siblings[1:] if is_failed else ():
                other.errors.update(fetch.errors)
                if after is State.REFUSED:
                    self._move(other, event)
        elif after in ENDS and fetch in siblings:
            siblings.remove(fetch)
        if after is State.OVER:
            del self._fetches[fetch.name]


def _traced(params: KVTransferParams, trace: tuple[str, str]) -> KVTransferParams:
    return msgspec.structs.replace(params, traceparent=trace[0], tracestate=trace[1]) if trace[0] else params


# -- prefill ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Loan:
    """A lent request of the prefill engine, which must not use its blocks.

    Attributes:
        request_id: The scheduler's id.
        name: The id on the wire, which differs while an earlier request of this id is lent.
        params: Data that travels to the decode engine.
        groups: The lent blocks, as they were given to `lend`.
        decode_engines: The only decode engines that have the params; empty if that is not known.
        is_written: True if the KV is in the blocks, so that ranks lend them.
        ends: Ends of the loan, by rank, without ranks that refused to lend or have died.
        ranks: Ranks on which the loan has not ended; None until its order has left.
        is_withdrawn: True if the scheduler has taken it back, or one of its ranks is missing.
        ticket: Ticket of the decode engines that follow the request; empty if none.
    """

    request_id: str
    name: str
    params: dict[str, Any] = field(repr=False)
    groups: Groups
    decode_engines: set[str]
    is_written: bool
    ends: dict[int, LeaseEnd] = field(default_factory=dict)
    ranks: set[int] | None = None
    is_withdrawn: bool = False
    ticket: str = field(default="", repr=False)


class PrefillLedger(_Ledger):
    """The ledger of a prefill engine's scheduler. `ranks` describes the engine's ranks to readers.

    For each request, call `lend` when its KV is in the blocks, and `withdraw` if it is aborted afterwards. `take_free`
    returns the loans that are over, however they ended.
    """

    def __init__(self, ranks: PrefillRanks) -> None:
        super().__init__(len(ranks.endpoints))
        self.ranks = ranks
        self._loans: dict[str, Loan] = {}  # all that are not over, by name
        self._of: dict[str, list[Loan]] = {}  # the same by the scheduler's ids, the newest last
        self._free: list[Loan] = []
        self._tickets: dict[str, bool] = {}  # all that requests have brought, oldest first; False if they are over
        self._pieces_of: dict[str, str] = {}  # requests with pieces, by ticket
        self.followed = dict[str, None]()  # tickets of followers that wait for a piece, until `lend_piece` makes one

    def __len__(self) -> int:
        return len(self._loans)

    def get(self, request_id: str) -> Loan | None:
        """Return the newest loan of an id that is not over."""
        return self._of[request_id][-1] if request_id in self._of else None

    # -- what the scheduler decides ----------------------------------------------------------------

    def take_ticket(self, ticket: str) -> bool:
        """Take a request's ticket, for `lend` or `withdraw_ticket`; return False if it is malformed, or another's."""
        with suppress(LocalProtocolError):
            if check_ticket(ticket) not in self._tickets:
                remember(self._tickets, ticket, True, MAX_TICKETS)
                return True
        return False

    def lend_piece(
        self,
        request_id: str,
        ticket: str,
        groups: Groups,
        num_tokens: int,
        *,
        hashes: Sequence[str] = (),
        hash_tokens: int = 0,
    ) -> None:
        """Lend finished blocks of a request that is still computed, on every rank, for a ticket that is `followed`.

        The rules are those of `Engine.lend_piece`; the arguments are those of `PrefillRanks.make_params`. A piece is
        never in `take_free`. Order `end_pieces` before its blocks are used for anything else.

        Raises:
            ConfigError: A value is out of range or has the wrong type.
            LocalProtocolError: The ticket is malformed.
        """
        if self._missing:
            return  # no reader could read the whole piece
        is_over = not self._tickets.get(check_ticket(ticket), True)
        if is_over or self._pieces_of.setdefault(ticket, request_id) != request_id:
            raise LocalProtocolError(f"request {request_id[:200]!r} lends a piece under the ticket of another request")
        name = f"{num_tokens} tokens of {request_id}"[:MAX_ID]
        params = self.ranks.make_params(
            name, groups, num_tokens, written=True, hashes=hashes, hash_tokens=hash_tokens, recall=True
        )
        self.followed.pop(ticket, None)
        self._order(LendPiece(params, ticket))

    def end_pieces(self, ticket: str) -> None:
        """Take back the pieces of a request: each rank grants nothing of them once it has carried out the order."""
        self._order(EndPieces(check_ticket(ticket)))

    def withdraw_ticket(self, ticket: str) -> None:
        """Declare that no request will be lent for a ticket, so that decode engines that follow it are refused."""
        self._close_ticket(check_ticket(ticket))
        self._order(WithdrawTicket(ticket))

    def lend(
        self,
        request_id: str,
        groups: Groups,
        num_tokens: int,
        *,
        written: bool = True,
        decode_engines: Collection[str] = (),
        lease_s: float | None = None,
        hashes: Sequence[str] = (),
        hash_tokens: int = 0,
        trace: Mapping[str, str] | None = None,
        recall: bool = False,
        ticket: str = "",
    ) -> dict[str, Any]:
        """Lend a request on every rank, and return its params for the decode engine. Its blocks return in `take_free`.

        The other arguments are those of `PrefillRanks.make_params`.

        Args:
            written: True if the KV is in the blocks. If False, the params may be sent ahead of the KV; call
                `mark_written` when it is in the blocks.
            decode_engines: Ids of all decode engines that may get the params, if they are known. One of them reads the
                request. Once all of them have restarted, no engine will read it (`decode_restarted`).
            ticket: The request's ticket (`take_ticket`): decode engines that follow it are offered the params.

        Raises:
            ConfigError: A value is out of range or has the wrong type.
            LocalProtocolError: A rank has died and was not replaced, so the request could not be read; or a request of
                this id waits for its KV.
        """
        ticket = ticket and check_ticket(ticket)
        try:
            if self._missing:
                raise LocalProtocolError(f"rank {min(self._missing)} has died: nothing can be lent before rank_joined")
            request_id = text("request_id", request_id, MAX_ID, 1)
            readers = set(texts("decode_engines", decode_engines, MAX_RANKS, MAX_NAME))
            if (loan := self.get(request_id)) is not None and not loan.is_written:
                raise LocalProtocolError(f"request {request_id[:200]!r} waits for its KV already; withdraw it first")
            name = unused(request_id, self._loans)
            params = self.ranks.make_params(
                name,
                groups,
                num_tokens,
                lease_s=lease_s,
                written=written,
                hashes=hashes,
                hash_tokens=hash_tokens,
                trace=trace,
                recall=recall,
            )
        except AsyncKVError:
            if ticket:  # its caller takes the blocks for free, and pieces must not outlive them
                self.end_pieces(ticket)
            raise
        loan = self._loans[name] = Loan(request_id, name, params, groups, readers, written, ticket=ticket)
        self._of.setdefault(request_id, []).append(loan)
        for other, name in list(self._pieces_of.items()):
            if (name == request_id) is not (other == ticket):  # this loan's end would not end them
                del self._pieces_of[other]
                self.end_pieces(other)
        self._close_ticket(ticket)
        if written:
            self._order(Lend(params, ticket=ticket))
        return params

    def mark_written(self, request_id: str) -> None:
        """Lend a request with params that were sent before, because its KV is in the blocks now.

        If it was taken back meanwhile (`rank_died`, `decode_restarted`), it ends instead, and its blocks are free.

        Raises:
            LocalProtocolError: No request of this id waits for its KV.
        """
        loan = self.get(request_id)
        if loan is None or loan.is_written:
            raise LocalProtocolError(f"no request {request_id[:200]!r} waits for its KV")
        loan.is_written = True
        if loan.is_withdrawn:
            self._never_lent(loan)
        else:
            self._order(Lend(loan.params, ticket=loan.ticket))

    def withdraw(self, request_id: str) -> None:
        """Take a request back on all ranks: readers are refused from now on. A request that is over is ignored.

        If its KV is not in the blocks yet, it ends at once: stop computing it. Blocks with a running grant return when
        the grant ends (after `lease.grant_s`, 10 s, at most). Those of a request that may be recalled return when each
        rank has carried out the order (`EngineThread.recall` waits for that), as do those with pieces.
        """
        if (loan := self.get(request_id)) is not None:
            self._withdraw(loan)
            if not loan.is_written:
                self._never_lent(loan)

    def decode_restarted(self, engine_id: str) -> None:
        """Take back the requests that only this decode engine could read, because a restart loses the params."""
        for loan in list(self._loans.values()):
            if engine_id in loan.decode_engines:
                loan.decode_engines.discard(engine_id)
                if not loan.decode_engines:
                    self._withdraw(loan)

    # -- steps -------------------------------------------------------------------------------------

    def take_orders(self) -> Sequence[Order]:
        """Return the orders of this step. Give them to every rank that lives; the others wait for the next rank."""
        orders = self._take()
        for order in orders:
            if isinstance(order, Lend):
                loan = self._loans[str(order.params["request_id"])]
                loan.ranks = self._living
                self._conclude(loan)
        return orders if self._living else ()

    def update(self, rank: int, finished: Finished) -> None:
        """Record a rank's report. Entries that are not loans of this ledger are left to the caller.

        Raises:
            LocalProtocolError: It is no report. A rank without one may have died: `rank_died`.
        """
        self._check_report(rank, finished)
        self.followed_by(finished.followed)
        for end in finished.finished_sending:
            # If the engine was closed before its grants ended, readers may read until its process ends (`rank_died`).
            if (loan := self._loans.get(end.request_id)) is not None and end.cause != "closed":
                loan.ends[rank] = end
                self._ended(loan, rank)
        for refused in finished.refused:
            if isinstance(refused.order, Lend):
                if (loan := self._loans.get(str(refused.order.params["request_id"]))) is not None:
                    self._ended(loan, rank)
                    self._withdraw(loan)  # no reader can read the whole request without this rank

    def followed_by(self, tickets: Collection[str]) -> None:
        """Record tickets of followers that wait for a piece; `update` does. They may be ahead of their requests."""
        for ticket in tickets:
            if self._tickets.get(ticket, True):
                remember(self.followed, ticket, None, MAX_TICKETS)

    def ended(self, request_id: str) -> None:
        """Record that a loan ended on all ranks. For workers that agree among themselves, as in vLLM."""
        if (loan := self._loans.get(request_id)) is not None and loan.ranks is not None:
            loan.ranks.clear()
            self._conclude(loan)

    def rank_died(self, rank: int) -> None:
        """Record that a rank has died, and take back all requests, because its part of each is lost."""
        self._missing.add(self._check(rank))
        # The rank that takes its place has not written these.
        self._orders = {n: order for n, order in self._orders.items() if not isinstance(order, LendPiece)}
        for loan in list(self._loans.values()):
            self._withdraw(loan)
            self._ended(loan, rank)

    def rank_joined(self, rank: int, endpoint: Endpoint | dict[str, Any]) -> None:
        """Add a new rank, with its `Engine.endpoint`, in place of one that died.

        Raises:
            ConfigError: The endpoint is malformed, or belongs to another rank.
            LocalProtocolError: This rank has not died.
        """
        self.ranks.set_endpoint(self._joining(rank), endpoint)
        self._missing.remove(rank)

    def take_free(self) -> list[Loan]:
        """Return the loans that have ended on every rank since the last call. Their blocks are free."""
        free, self._free = self._free, []
        return free

    # -- inside ------------------------------------------------------------------------------------

    def _close_ticket(self, ticket: str) -> None:
        """Make no more pieces of a ticket's request, even if a late report says that it is followed."""
        self.followed.pop(ticket, None)
        self._pieces_of.pop(ticket, None)
        if ticket in self._tickets:
            self._tickets[ticket] = False

    def _withdraw(self, loan: Loan) -> None:
        if not loan.is_withdrawn:
            loan.is_withdrawn = True
            self._order(Withdraw(loan.params))
            if loan.ticket:  # a rank that has lent nothing under it knows nothing of the loan's end
                self._order(WithdrawTicket(loan.ticket))

    def _never_lent(self, loan: Loan) -> None:
        """End a loan that no rank lent, because no rank will report its end."""
        loan.is_written, loan.ranks = True, set()
        self._conclude(loan)

    def _ended(self, loan: Loan, rank: int) -> None:
        if loan.ranks is not None:
            loan.ranks.discard(rank)
            self._conclude(loan)

    def _conclude(self, loan: Loan) -> None:
        if not loan.ranks and self._loans.pop(loan.name, None) is not None:
            self._free.append(loan)
            self._of[loan.request_id].remove(loan)
            if not self._of[loan.request_id]:
                del self._of[loan.request_id]


def _listed(groups: Groups) -> list[tuple[int, list[int | None]]]:
    """Return lists of blocks in a form that can be compared; nothing if they are malformed."""
    with suppress(TypeError, ValueError):
        return [(first, list(ids)) for first, ids in groups]
    return []


def unused(request_id: str, names: Container[str]) -> str:
    """Return the id, or the id with a number if an earlier request still uses it as its name."""
    if request_id not in names:
        return request_id
    return next(name for number in itertools.count(2) if (name := f"{request_id}~{number}") not in names)


def died(rank: int) -> PeerLost:
    """Return the error of a pull on a rank that has died."""
    return PeerLost(f"rank {rank} of this engine has died", reason="rank_died")
