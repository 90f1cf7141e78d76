"""The ledgers of schedulers, against simulated ranks that end pulls and loans as they like, refuse orders, and die."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asynckv.embed.ledgers import (
    ENDS,
    MAX_KEPT,
    MAX_SPENT,
    MAX_TICKETS,
    ON_EVENT,
    DecodeLedger,
    Event,
    Fetch,
    PrefillLedger,
    State,
)
from asynckv.embed.orders import (
    Announce,
    Cancel,
    EndPieces,
    Failed,
    Finished,
    Follow,
    Lend,
    LendPiece,
    Offer,
    Order,
    Pull,
    Refused,
    StartEarly,
    Withdraw,
    WithdrawTicket,
)
from asynckv.errors import ConfigError, EngineClosed, LocalProtocolError, NoOffer, PullError, RemoteProtocolError
from asynckv.results import LeaseEnd, PullResult
from asynckv.scheduler import PrefillRanks

NUM_BLOCKS, NUM_RANKS = 24, 2
IDS = st.sampled_from("abc")
RANKS = st.integers(0, NUM_RANKS - 1)


def ranks_of(size: int = NUM_RANKS, incarnation: str = "a") -> PrefillRanks:
    endpoints = [{"tp_rank": i, "address": f"tcp://127.0.0.1:{i + 1}", "incarnation": incarnation} for i in range(size)]
    return PrefillRanks("prefill", endpoints)


GROUP = ranks_of()


def new_params(request_id: str = "p") -> dict[str, Any]:
    return GROUP.make_params(request_id, [(0, [1, 2])], 32)


def ticket_of(number: int) -> str:
    return f"{number:032x}"


def to_follow(ticket: str) -> dict[str, Any]:
    endpoints = [{"tp_rank": each.tp_rank, "address": each.address, "incarnation": "a"} for each in GROUP.endpoints]
    return {"ticket": ticket, "engine_id": "prefill", "tp_size": len(endpoints), "endpoints": endpoints}


def no_offer(name: str, reason: str = "withdrawn") -> Failed:
    return Failed(name, NoOffer("nothing", request_id=name, reason=reason, failed_in="follow"))


def received(name: str, num_tokens: int = 32) -> PullResult:
    return PullResult(name, "p", 1, 1, 1, 1, {}, (), num_tokens)


def failed(name: str, *held: int, failed_in: str = "read") -> Failed:
    return Failed(name, PullError("it broke", request_id=name, held={0: held} if held else {}, failed_in=failed_in))


def ended(name: str, cause: str = "released") -> LeaseEnd:
    return LeaseEnd(name, cause, {}, (), 1.0)


def kinds(orders: Iterable[Any]) -> list[tuple[str, str]]:
    return [(type(order).__name__, name_in(order)) for order in orders]


def name_in(order: Any) -> str:
    if isinstance(order, WithdrawTicket):
        return order.ticket
    return str(order.params["request_id"] if isinstance(order, Lend | Withdraw) else order.request_id)


# -- decode: simulated ranks -----------------------------------------------------------------------


@dataclass
class DecodeRank:
    """A rank that pulls: what it writes, what it may still write, and what it keeps claimed."""

    writes: dict[str, set[int]] = field(default_factory=dict)
    held: dict[str, set[int]] = field(default_factory=dict)
    retired: set[int] = field(default_factory=set)
    claims: set[str] = field(default_factory=set)
    """Tokens of keys."""
    news: Finished = field(default_factory=Finished)
    keys: dict[str, str] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    announced: dict[str, str] = field(default_factory=dict)
    """Tokens of keys by name."""
    follows: dict[str, str] = field(default_factory=dict)
    """Tickets by name."""
    left: dict[str, str] = field(default_factory=dict)
    """Names that follow a ticket for their caller no more, by ticket: an offer may come late."""
    released: set[str] = field(default_factory=set)
    early: dict[str, set[int]] = field(default_factory=dict)
    """Blocks that pieces fill, by name."""

    def do(self, order: Order, refuses: bool) -> None:
        if isinstance(order, Announce | Pull | Cancel) and order.params is not None:
            if self.follows.pop(order.request_id, None) is not None:  # it is told the params that another rank heard of
                self.news.offered.append(Offer(order.request_id, dict(order.params)))
        match order:
            case Follow(name, follow) if name in self.follows:
                assert self.follows[name] == follow["ticket"]
                self.news.refused.append(Refused(order, LocalProtocolError("it follows already")))
            case Follow(name, follow):
                assert follow["ticket"] not in self.follows.values(), "a rank follows a ticket once"
                self.left.pop(follow["ticket"], None)
                if refuses:
                    self.news.not_offered.append(Failed(name, EngineClosed("it drains")))
                else:
                    self.follows[name] = follow["ticket"]
            case Announce(name):
                assert self.announced.setdefault(name, key_of(order)) == key_of(order)
                self.claims.add(key_of(order))
            case StartEarly(request_id=name):
                assert name not in self.early.keys() | self.writes.keys() | self.held.keys()
                if refuses:
                    self.news.failed.append(failed(name, failed_in=""))
                else:
                    self.early[name] = {block for _, ids in order.groups for block in ids if block}
            case Pull(request_id=name, goes_on=True) if name not in self.early:  # it has failed, and was reported
                self.claims.discard(key_of(order))
                self.released.add(key_of(order))
            case Pull(request_id=name, goes_on=True):
                self.keys[name] = key_of(order)
                self.claims.add(key_of(order))
                self.writes[name] = self.early.pop(name)
                assert self.writes[name] == {block for _, ids in order.groups for block in ids if block}
            case Pull():
                assert self.announced.pop(order.request_id, key_of(order)) == key_of(order)
                assert order.request_id not in self.writes, "a name is given to one pull at a time"
                assert order.request_id not in self.held, "`returned` would not say of which"
                self.keys[order.request_id] = key_of(order)
                if refuses:
                    self.news.failed.append(failed(order.request_id, failed_in=""))
                else:
                    self.claims.add(key_of(order))
                    self.writes[order.request_id] = {block for _, ids in order.groups for block in ids if block}
            case Cancel(name, params):
                if (ticket := self.follows.pop(name, None)) is not None:
                    self.left[ticket] = name
                    self.news.not_offered.append(no_offer(name, "cancelled"))
                if name in self.early:
                    self.fail_early(name, *(self.early[name] if len(self.released) % 2 else ()))
                if name in self.writes:
                    assert params is None or self.keys[name] == key_of(order), "it would end the pull of another"
                    self.cancelled.add(name)
                elif params is not None:
                    assert self.announced.pop(name, key_of(order)) == key_of(order), "it would be refused"
                    self.claims.discard(key_of(order))
                    self.released.add(key_of(order))
            case _:
                raise AssertionError(order)

    def fail_early(self, name: str, *held: int) -> None:
        """End a head start, of which a piece may still write its blocks."""
        blocks = self.early.pop(name)
        if (ticket := self.follows.pop(name, None)) is not None:
            self.left[ticket] = name
            self.news.not_offered.append(no_offer(name, "differs"))
        if held:
            self.held[name] = blocks
        self.news.failed.append(failed(name, *held, failed_in="head_start"))

    def offer(self, name: str, params: dict[str, Any]) -> None:
        """Offer what a name follows, unless this rank has released it."""
        ticket = self.follows.pop(name)
        if (key := str(params["key"])) in self.released:
            self.left[ticket] = name
            self.news.not_offered.append(no_offer(name, "consumed"))
        else:
            self.claims.add(key)
            self.news.offered.append(Offer(name, params))

    def offer_late(self, ticket: str, params: dict[str, Any]) -> None:
        """Offer what nothing follows any more, or only to release it; a rank that reads nothing of it does so."""
        name, key = self.left.pop(ticket), str(params["key"])
        if key not in self.released:
            if key not in self.announced.values() and key not in [self.keys[each] for each in self.writes]:
                self.released.add(key)
            self.news.offered.append(Offer(name, params, is_late=True))

    def end(self, name: str, how: str) -> None:
        blocks = self.writes.pop(name)
        self.claims.discard(self.keys[name])
        self.released.add(self.keys[name])
        if how == "received" and name not in self.cancelled:
            self.news.finished_recving.append(received(name))
        elif how == "held":
            self.held[name] = blocks
            self.news.failed.append(failed(name, *blocks))
        else:
            self.news.failed.append(failed(name))

    def let_go(self, name: str, for_good: bool) -> None:
        blocks = self.held.pop(name)
        if for_good:
            self.retired |= blocks
            self.news.retired.append(name)
        else:
            self.news.returned.append(name)


def key_of(order: Any) -> str:
    return str(order.params["key"])


class DecodeMachine(RuleBasedStateMachine):
    """A scheduler of a decode engine does what a ledger says, whatever its ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = DecodeLedger(NUM_RANKS)
        self.ranks: list[DecodeRank | None] = [DecodeRank() for _ in range(NUM_RANKS)]
        self.noticed: set[int] = set()
        self.free = set(range(1, NUM_BLOCKS + 1))
        self.pulled: dict[int, set[int]] = {}
        """Blocks of pulls whose end was not told, by the fetch."""
        self.live: dict[str, Fetch] = {}
        self.lost: set[Fetch] = set()
        """Pulls that lost a rank before their end was told."""
        self.retired: set[int] = set()
        self.params = [new_params() for _ in range(3)]
        self.lent: dict[str, dict[str, Any]] = {}
        """Params by ticket, of all that were offered."""
        self.ends: Counter[str] = Counter()
        """By key, how many orders would release it on a rank that has it."""
        self.pulled_names: set[tuple[str, str]] = set()
        self.tried: set[str] = set()  # keys of pulls that failed, which a later request may try again
        self.is_lone = False  # True once no rank lived, so that orders were lost

    # -- what the scheduler does

    @rule(request_id=IDS, which=st.integers(0, 2), is_new=st.booleans())
    def announce(self, request_id: str, which: int, is_new: bool) -> None:
        if is_new:
            self.params[which] = new_params()
        if request_id in self.live:
            with pytest.raises(LocalProtocolError):
                self.ledger.announce(request_id, self.params[which])
        elif (fetch := self.ledger.announce(request_id, self.params[which])) is not None:
            self.live[request_id] = fetch

    @rule(request_id=IDS)
    def pull(self, request_id: str) -> None:
        if self.ledger.may_pull(request_id) and len(self.free) >= 2:
            blocks = sorted(self.free)[:2]
            self.free -= set(blocks)
            self.pulled[id(self.live[request_id])] = set(blocks)
            self.ledger.pull(request_id, [(0, blocks)])
        elif request_id not in self.live:
            with pytest.raises(LocalProtocolError):
                self.ledger.pull(request_id, [(0, [1])])

    @rule(request_id=IDS)
    def cancel(self, request_id: str) -> None:
        self.ledger.cancel(request_id)
        self.live.pop(request_id, None)
        assert self.ledger.get(request_id) is None

    @rule(refuses=st.booleans(), joins=st.booleans(), acts=st.booleans())
    def step(self, refuses: bool, joins: bool, acts: bool = True) -> None:
        orders = self.ledger.take_orders()
        self.is_lone = self.is_lone or len(self.noticed) == NUM_RANKS
        for order in orders:
            if isinstance(order, Pull):
                self.pulled_names.add((order.request_id, key_of(order)))
                self.ends[key_of(order)] += 1
            elif isinstance(order, Cancel) and order.params is not None:
                self.ends[key_of(order)] += (order.request_id, key_of(order)) not in self.pulled_names
        for number, rank in enumerate(self.ranks):
            if rank is None:
                if number not in self.noticed:
                    self.noticed.add(number)
                    self.lost |= {fetch for fetch in self.live.values() if fetch.ranks is not None}
                    self.ledger.rank_died(number)
                if joins:
                    self.noticed.discard(number)
                    # What was released before it joined is left to its lease, which has run out here.
                    self.ranks[number] = DecodeRank(released=set(self.ends))
                    self.ledger.rank_joined(number)
                continue
            for order in orders:
                rank.do(order, refuses and number == 0)
            news, rank.news = rank.news, Finished()
            self.ledger.update(number, pickle.loads(pickle.dumps(news)))
        if acts:
            self.act()

    @rule()
    def act(self) -> None:
        outcome = self.ledger.take_outcome()
        for fetch in outcome.received:
            assert self.live.pop(fetch.request_id) is fetch
            assert set(fetch.results) == set(range(NUM_RANKS))
            assert fetch not in self.lost
            assert fetch.num_tokens == 32
            self.free |= self.pulled.pop(id(fetch))
        for fetch in outcome.failed:
            assert fetch.params is not None or fetch.piece is not None
            self.tried |= set() if fetch.params is None else {str(fetch.plain["key"])}
            assert self.live.pop(fetch.request_id) is fetch
            assert fetch.errors
        for fetch in outcome.free:
            self.free |= self.pulled.pop(id(fetch))
        for fetch in outcome.retired:
            self.retired |= self.pulled[id(fetch)]

    @rule(number=RANKS, data=st.data(), how=st.sampled_from(["received", "received", "failed", "held"]))
    def a_pull_ends(self, number: int, data: st.DataObject, how: str) -> None:
        rank = self.ranks[number]
        if rank is not None and rank.writes:
            rank.end(data.draw(st.sampled_from(sorted(rank.writes))), how)

    @rule(number=RANKS, data=st.data(), for_good=st.integers(0, 9))
    def blocks_return(self, number: int, data: st.DataObject, for_good: int) -> None:
        rank = self.ranks[number]
        if rank is not None and rank.held:
            rank.let_go(data.draw(st.sampled_from(sorted(rank.held))), for_good == 0)

    @rule(number=RANKS)
    def a_rank_dies(self, number: int) -> None:
        self.ranks[number] = None

    # -- what must hold

    @invariant()
    def what_others_wait_for_has_not_ended(self) -> None:
        for siblings in self.ledger._siblings.values():
            assert siblings[0].state not in ENDS
            assert self.ledger._fetches[siblings[0].name] is siblings[0]

    @invariant()
    def no_free_block_is_written(self) -> None:
        for rank in self.ranks:
            if rank is not None:
                busy = set().union(*rank.early.values(), *rank.writes.values(), *rank.held.values(), rank.retired)
                assert not busy & self.free

    def teardown(self) -> None:
        """Let everything end: no block, no request and no claim is left behind."""
        for turn in range(7):
            for request_id in list(self.live):
                if self.live[request_id].state in (State.QUEUED, State.WAITING, State.REFUSED, State.EARLY):
                    self.cancel(request_id)
            self.step(refuses=False, joins=True)
            for rank in filter(None, self.ranks):
                for name in list(rank.writes):
                    rank.end(name, "received")
                for name in list(rank.held):
                    rank.let_go(name, for_good=False)
                for name, ticket in list(rank.follows.items() if turn < 2 else ()):
                    rank.offer(name, self.lent.setdefault(ticket, new_params()))
        assert not self.live
        retired = set().union(*(rank.retired for rank in self.ranks if rank is not None))
        assert self.free | retired == set(range(1, NUM_BLOCKS + 1))
        assert not self.free & retired
        assert retired <= self.retired
        assert len(self.ledger) == len(retired) / 2
        for rank in filter(None, self.ranks):
            assert not rank.claims
            assert not rank.follows
        for key, number in self.ends.items():
            assert number == 1 or self.is_lone or key in self.tried, "it is released once"


TestDecode = DecodeMachine.TestCase
TestDecode.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class FollowMachine(DecodeMachine):
    """The same scheduler, with requests that mostly have no params when they come, but a ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets = map(ticket_of, itertools.count())
        self.followed = [next(self.tickets) for _ in range(2)]

    @rule(request_id=IDS, which=st.integers(0, 1), is_new=st.booleans(), how=st.sampled_from(["", "", "", "params"]))
    def announce(self, request_id: str, which: int, is_new: bool, how: str) -> None:
        if is_new:
            self.followed[which] = next(self.tickets)
        ticket = self.followed[which]
        if how == "params":  # one leg after the other, perhaps after a decode leg that was given up
            self.params[which] = self.lent.get(ticket, self.params[which])
            super().announce(request_id, which, False)
        elif request_id in self.live:
            with pytest.raises(LocalProtocolError):
                self.ledger.follow(request_id, to_follow(ticket))
        elif (fetch := self.ledger.follow(request_id, to_follow(ticket))) is not None:
            self.live[request_id] = fetch

    @rule(request_id=IDS, how=st.sampled_from(["", "", "cancel", "release", "refuse"]))
    def cancel(self, request_id: str, how: str = "cancel") -> None:
        fetch = self.live.get(request_id)
        if how in ("cancel", "release"):
            (self.ledger.cancel if how == "cancel" else self.ledger.release)(request_id)
            self.live.pop(request_id, None)
            assert self.ledger.get(request_id) is None
        elif how and fetch is not None:
            is_over = fetch.params is None and self.ledger.may_pull(request_id) is None
            state, error = fetch.state, no_offer(request_id, "no_offer").error
            self.ledger.refuse(request_id, error)
            assert fetch.state is (State.REFUSED if is_over else state)
            assert not is_over or (self.ledger.may_pull(request_id), fetch.errors[0]) == (False, error)

    @rule(number=RANKS, is_so=st.integers(0, 7))
    def a_rank_dies(self, number: int, is_so: int) -> None:
        if is_so == 0:
            self.ranks[number] = None

    @rule(
        number=RANKS, data=st.data(), how=st.sampled_from(["", "", "", "other", "refused", "late"]), soon=st.booleans()
    )
    def the_prefill_answers(self, number: int, data: st.DataObject, how: str, soon: bool) -> None:
        if soon:
            self.step(refuses=False, joins=True)
        if (rank := self.ranks[number]) is None or not (rank.left if how == "late" else rank.follows):
            return
        if how == "late":
            ticket = data.draw(st.sampled_from(sorted(rank.left)))
            rank.offer_late(ticket, self.lent.setdefault(ticket, new_params()))
            return
        name = data.draw(st.sampled_from(sorted(rank.follows)))
        if how == "refused":
            rank.left[rank.follows.pop(name)] = name
            rank.news.not_offered.append(no_offer(name))
        else:
            params = self.lent.setdefault(rank.follows[name], new_params())
            rank.offer(name, new_params() if how == "other" else params)


class EarlyMachine(FollowMachine):
    """The same scheduler, whose requests mostly have a head start before they are offered."""

    def __init__(self) -> None:
        super().__init__()
        honest = self.ledger.follow
        self.ledger.follow = lambda *args: honest(*args, takes_pieces=True)  # type: ignore[method-assign]

    @rule(request_id=IDS, which=st.integers(0, 1), number=RANKS, goes_on=st.booleans())
    def a_piece_is_offered(self, request_id: str, which: int, number: int, goes_on: bool) -> None:
        """Follow a new ticket, and mostly get far enough for a head start, and for the offer of the whole."""
        if request_id not in self.live:
            self.announce(request_id, which, True, "")
        for turn in range(3):
            self.step(refuses=False, joins=True)
            rank = self.ranks[number]
            if rank is None or request_id not in rank.follows:
                return
            if turn == 0 and request_id not in rank.early:
                rank.news.offered.append(Offer(request_id, new_params("piece"), is_piece=True))
            elif turn == 1:
                self.start(request_id)
            elif goes_on:
                rank.offer(request_id, self.lent.setdefault(rank.follows[request_id], new_params()))

    @rule(request_id=IDS)
    def start(self, request_id: str) -> None:
        fetch = self.live.get(request_id)
        if fetch is not None and fetch.piece is not None and fetch.state is State.FOLLOWING and len(self.free) >= 2:
            blocks = sorted(self.free)[:2]
            self.free -= set(blocks)
            self.pulled[id(fetch)] = set(blocks)
            self.ledger.start_early(request_id, [(0, blocks)])
            assert self.ledger.may_pull(request_id) is None
        else:
            with pytest.raises(LocalProtocolError):
                self.ledger.start_early(request_id, [(0, [1])])

    @rule(request_id=IDS)
    def pull(self, request_id: str) -> None:
        fetch = self.live.get(request_id)
        if fetch is None or fetch.state is not State.EARLY:
            super().pull(request_id)
        elif self.ledger.may_pull(request_id):
            self.ledger.pull(request_id, fetch.groups)
        else:
            with pytest.raises(LocalProtocolError, match="not offered yet"):
                self.ledger.pull(request_id, fetch.groups)

    @rule(request_id=IDS, how=st.sampled_from(["", "", "cancel", "refuse"]))
    def cancel(self, request_id: str, how: str = "cancel") -> None:
        fetch = self.live.get(request_id)
        if how != "refuse" or fetch is None or fetch.state is not State.EARLY:
            super().cancel(request_id, how)
        else:
            is_over = fetch.params is None
            self.ledger.refuse(request_id, no_offer(request_id, "no_offer").error)
            assert fetch.state is (State.ENDING if is_over else State.EARLY)

    @rule(number=RANKS, data=st.data(), is_held=st.booleans())
    def a_head_start_fails(self, number: int, data: st.DataObject, is_held: bool) -> None:
        if (rank := self.ranks[number]) is not None and rank.early:
            name = data.draw(st.sampled_from(sorted(rank.early)))
            rank.fail_early(name, *(rank.early[name] if is_held else ()))


TestEarly = EarlyMachine.TestCase
TestEarly.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestFollow = FollowMachine.TestCase
TestFollow.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


# -- prefill: simulated ranks ----------------------------------------------------------------------


@dataclass
class PrefillRank:
    """A rank that lends: which blocks may be read, and of which requests readers need not wait."""

    lent: dict[str, set[int]] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """Keys that were lent or withdrawn here, and tickets: no reader waits for them, and nothing follows them."""
    news: Finished = field(default_factory=Finished)

    def do(self, order: Order, refuses: bool) -> None:
        if isinstance(order, WithdrawTicket):
            self.told.add(order.ticket)
            return
        assert isinstance(order, Lend | Withdraw)
        name = str(order.params["request_id"])
        if isinstance(order, Withdraw):
            self.told.add(key_of(order))
            if name in self.lent:
                self.revoked.add(name)
        elif refuses:
            self.news.refused.append(Refused(order, EngineClosed("it drains")))
        else:
            assert name not in self.lent, "`sent` would not say of which"
            self.told |= {key_of(order), order.ticket or key_of(order)}
            self.lent[name] = {
                block for _, runs in order.params["groups"] for run in runs for block in range(run[0], run[0] + run[1])
            }

    def end(self, name: str, cause: str) -> None:
        del self.lent[name]
        self.news.finished_sending.append(ended(name, "revoked" if name in self.revoked else cause))
        self.revoked.discard(name)


class PrefillMachine(RuleBasedStateMachine):
    """A scheduler of a prefill engine does what a ledger says, whatever its ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PrefillLedger(ranks_of())
        self.ranks: list[PrefillRank | None] = [PrefillRank() for _ in range(NUM_RANKS)]
        self.noticed: set[int] = set()
        self.free = set(range(NUM_BLOCKS))
        self.keys: set[str] = set()
        self.computing: dict[str, set[int]] = {}
        """Blocks that the model still fills, by the scheduler's id."""
        self.incarnations = itertools.count()

    @property
    def is_whole(self) -> bool:
        return not self.noticed

    @precondition(lambda self: self.is_whole and len(self.free) >= 2)
    @rule(request_id=IDS, is_written=st.booleans(), reader=st.sampled_from(["", "d0", "d1"]), is_followed=st.booleans())
    def lend(self, request_id: str, is_written: bool, reader: str, is_followed: bool) -> None:
        if (loan := self.ledger.get(request_id)) is not None and not loan.is_written:
            with pytest.raises(LocalProtocolError, match="waits for its KV already"):
                self.ledger.lend(request_id, [(0, [1])], 16)
            return
        blocks = sorted(self.free)[:2]
        self.free -= set(blocks)
        ticket = ticket_of(len(self.keys)) if is_followed else ""
        params = self.ledger.lend(
            request_id, [(0, blocks)], 32, written=is_written, decode_engines=[reader] if reader else [], ticket=ticket
        )
        assert params["written"] is is_written
        if not is_written:
            self.computing[request_id] = set(blocks)
        self.keys |= {str(params["key"]), ticket or str(params["key"])}

    @rule(request_id=IDS)
    def written(self, request_id: str) -> None:
        loan = self.ledger.get(request_id)
        if loan is None or loan.is_written:
            with pytest.raises(LocalProtocolError):
                self.ledger.mark_written(request_id)
        else:
            self.ledger.mark_written(request_id)
            del self.computing[request_id]

    @rule(request_id=IDS)
    def withdraw(self, request_id: str) -> None:
        loan = self.ledger.get(request_id)
        self.ledger.withdraw(request_id)
        if loan is not None:
            self.computing.pop(request_id, None)

    @rule(reader=st.sampled_from(["d0", "d1"]))
    def a_decode_engine_restarts(self, reader: str) -> None:
        self.ledger.decode_restarted(reader)

    @rule(refuses=st.booleans(), joins=st.booleans())
    def step(self, refuses: bool, joins: bool) -> None:
        orders = self.ledger.take_orders()
        for number, rank in enumerate(self.ranks):
            if rank is None:
                if number not in self.noticed:
                    self.noticed.add(number)
                    self.ledger.rank_died(number)
                if joins:
                    self.noticed.discard(number)
                    self.ranks[number] = PrefillRank(told=set(self.keys))  # nobody waits for a rank that died
                    new = ranks_of(incarnation=f"i{next(self.incarnations)}")
                    self.ledger.rank_joined(number, new.endpoints[number])
                continue
            for order in orders:
                rank.do(order, refuses and number == 0)
            news, rank.news = rank.news, Finished()
            self.ledger.update(number, news)
        for loan in self.ledger.take_free():
            self.free |= {block for _, ids in loan.groups for block in ids if block is not None}

    @precondition(lambda self: self.is_whole)
    @rule()
    def the_scheduler_is_pickled(self) -> None:
        self.ledger = pickle.loads(pickle.dumps(self.ledger))

    @rule(number=RANKS, data=st.data(), cause=st.sampled_from(["released", "expired"]))
    def a_loan_ends(self, number: int, data: st.DataObject, cause: str) -> None:
        rank = self.ranks[number]
        if rank is not None and rank.lent:
            rank.end(data.draw(st.sampled_from(sorted(rank.lent))), cause)

    @rule(number=RANKS)
    def a_rank_dies(self, number: int) -> None:
        self.ranks[number] = None

    @invariant()
    def no_free_block_is_lent(self) -> None:
        for rank in self.ranks:
            if rank is not None:
                assert not set().union(*rank.lent.values()) & self.free
        assert not set().union(*self.computing.values()) & self.free

    def teardown(self) -> None:
        """Let everything end: every block is back, and no reader waits for what no rank lends."""
        for request_id in "abc":
            if (loan := self.ledger.get(request_id)) is not None and not loan.is_written:
                self.withdraw(request_id)
        for _ in range(4):
            self.step(refuses=False, joins=True)
            for rank in filter(None, self.ranks):
                for name in list(rank.lent):
                    rank.end(name, "expired")
        assert len(self.ledger) == 0
        assert self.free == set(range(NUM_BLOCKS))
        for rank in filter(None, self.ranks):
            assert rank.told >= self.keys


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- one thing at a time ---------------------------------------------------------------------------


def pull_of(request_id: str) -> Pull:
    return Pull(request_id=request_id, groups=[(0, [1])], params=new_params())


def pulling(num_ranks: int = 2, request_id: str = "a") -> DecodeLedger:
    ledger = DecodeLedger(num_ranks)
    ledger.announce(request_id, new_params())
    ledger.pull(request_id, [(0, [1, 2])])
    ledger.take_orders()
    return ledger


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_what_does_not_stand_in_the_table_is_refused_and_changes_nothing(state: State, event: Event) -> None:
    ledger = DecodeLedger(1)
    fetch = ledger.announce("a", new_params())
    assert fetch is not None
    fetch.state = state
    if event in ON_EVENT[state]:
        ledger._move(fetch, event)
        assert fetch.state is ON_EVENT[state][event]
    else:
        with pytest.raises(LocalProtocolError, match=f"'a' is {state.value}: {event.value} is not possible"):
            ledger._move(fetch, event)
        assert fetch.state is state


def test_an_announcement_is_left_out_if_what_it_announces_comes_at_once() -> None:
    ledger = DecodeLedger(1)
    for name in "abc":
        ledger.announce(name, new_params())
    assert ledger.has_orders
    ledger.pull("b", [(0, [1])], num_tokens=16, timeout_s=3.0, hashes=["h"], priority=-2)
    ledger.cancel("c")
    orders = ledger.take_orders()
    assert kinds(orders) == [("Announce", "a"), ("Pull", "b"), ("Cancel", "c")]
    assert isinstance(orders[1], Pull)
    assert (orders[1].num_tokens, orders[1].timeout_s, orders[1].hashes, orders[1].priority) == (16, 3.0, ["h"], -2)
    assert not ledger.has_orders
    assert ledger.take_orders() == ()
    ledger.pull("a", [(0, [2])])
    assert kinds(ledger.take_orders()) == [("Pull", "a")]


def test_siblings_wait_for_the_first_and_read_nothing_themselves() -> None:
    ledger, params = DecodeLedger(1), new_params()
    ledger.announce("a", params)
    ledger.announce("b", params)
    assert (ledger.may_pull("a"), ledger.may_pull("b"), ledger.may_pull("c")) == (True, None, False)
    ledger.pull("a", [(0, [1])])
    ledger.take_orders()
    assert ledger.may_pull("b") is None
    ledger.update(0, Finished(finished_recving=[received("a", 20)]))
    (done,) = ledger.take_outcome().received
    assert (done.request_id, done.num_tokens) == ("a", 20)
    assert ledger.may_pull("b") is False
    ledger.cancel("b")
    assert not ledger.has_orders, "there is nothing that b could release"
    assert ledger.announce("c", params) is None, "they were used up"


def test_a_sibling_that_is_cancelled_leaves_the_others_and_the_params_as_they_are() -> None:
    ledger, params = DecodeLedger(1), new_params()
    for name in "abc":
        ledger.announce(name, params)
    ledger.cancel("b")
    assert (ledger.may_pull("a"), ledger.may_pull("c")) == (True, None)
    assert ledger.announce("d", params) is not None
    ledger.pull("a", [(0, [1])])
    ledger.take_orders()
    ledger.update(0, Finished(failed=[failed("a")]))
    assert [each.errors == {} for each in map(ledger.get, "cd") if each is not None] == [False, False]


def test_requests_that_waited_for_one_that_is_cancelled_have_none_of_its_errors() -> None:
    ledger, params = DecodeLedger(1), new_params()
    ledger.announce("a", params)
    sibling = ledger.announce("b", params)
    ledger.pull("a", [(0, [1])])
    ledger.take_orders()
    ledger.cancel("a")
    ledger.update(0, Finished(failed=[failed("a")]))
    assert sibling is not None
    assert (ledger.may_pull("b"), sibling.errors) == (False, {})
    assert ledger.announce("c", params) is None, "they were given up"


def test_params_are_remembered_for_a_while_once_they_were_used_up() -> None:
    ledger, first = DecodeLedger(1), new_params()
    ledger.announce("a", first)
    ledger.cancel("a")
    for _ in range(MAX_SPENT):
        assert ledger.announce("a", first) is None
        ledger.announce("a", new_params())
        ledger.cancel("a")
    assert ledger.announce("a", first) is not None


def test_malformed_params_are_refused_before_anything_is_ordered() -> None:
    ledger = DecodeLedger(1)
    with pytest.raises(RemoteProtocolError):
        ledger.announce("a", {"junk": True})
    assert (len(ledger), ledger.has_orders, ledger.get("a")) == (0, False, None)


def test_where_one_rank_fails_the_others_are_cancelled_and_the_blocks_wait_for_all() -> None:
    ledger = pulling()
    ledger.update(0, Finished(failed=[failed("a", 1, 2)]))
    assert kinds(ledger.take_orders()) == [("Cancel", "a")]
    assert ledger.take_outcome().failed == [], "rank 1 has not said how its pull ended"
    ledger.update(1, Finished(finished_recving=[received("a")]))
    outcome = ledger.take_outcome()
    assert [(each.request_id, list(each.errors)) for each in outcome.failed] == [("a", [0])]
    assert (outcome.received, outcome.free) == ([], [])
    ledger.update(0, Finished(returned=["a"]))
    assert [each.groups for each in ledger.take_outcome().free] == [[(0, [1, 2])]]
    assert len(ledger) == 0


def test_an_id_that_comes_again_while_its_blocks_are_held_has_another_name() -> None:
    ledger = pulling(1)
    ledger.update(0, Finished(failed=[failed("a", 1, 2)]))
    assert len(ledger.take_outcome().failed) == 1
    ledger.announce("a", new_params())
    ledger.pull("a", [(0, [3])])
    assert kinds(ledger.take_orders()) == [("Pull", "a~2")]
    ledger.update(0, Finished(finished_recving=[received("a~2")], returned=["a"]))
    outcome = ledger.take_outcome()
    assert [each.request_id for each in outcome.received] == ["a"]
    assert [each.groups for each in outcome.free] == [[(0, [1, 2])]]


def test_a_pull_that_was_refused_before_it_began_releases_its_request_once() -> None:
    ledger = pulling(3)
    for rank in range(2):
        ledger.update(rank, Finished(failed=[failed("a", failed_in="")]))
    (order,) = ledger.take_orders()
    assert isinstance(order, Cancel)
    assert order.params is not None


def test_what_is_no_pull_of_the_ledger_is_left_alone() -> None:
    ledger = pulling()
    stored: dict[str, Any] = {
        "offload_failed": [failed("a", failed_in="")],
        "offload_returned": ["a"],
        "offload_retired": ["a"],
    }
    ledger.update(0, Finished(failed=[failed("b")], finished_recving=[received("c")], returned=["d"], **stored))
    ledger.update(0, Finished(retired=["e"]))
    assert (ledger.has_orders, len(ledger), ledger.take_outcome().failed) == (False, 1, [])
    ledger.ended("unknown")
    ledger.update(0, Finished(finished_recving=[received("a")]))
    ledger.update(0, Finished(finished_recving=[received("a")]))
    assert ledger.take_outcome().received == [], "rank 1 has said nothing, however often rank 0 has"


def test_a_pull_that_a_rank_refused_has_failed_and_the_end_of_another_is_not_taken_for_its() -> None:
    ledger = pulling(1)
    ledger.update(0, Finished(refused=[Refused(pull_of("a"), LocalProtocolError("it is pulled already"))]))
    ledger.update(0, Finished(finished_recving=[received("a")]))
    outcome = ledger.take_outcome()
    assert (outcome.received, len(outcome.failed), len(outcome.free)) == ([], 1, 1)


@pytest.mark.parametrize("wrong", [None, 5, "", "x" * 20_000, "\ud800", []])
def test_an_id_that_no_message_could_carry_is_refused_by_either_ledger(wrong: Any) -> None:
    with pytest.raises(LocalProtocolError, match="request_id"):
        DecodeLedger(1).announce(wrong, new_params())
    with pytest.raises(LocalProtocolError, match="request_id"):
        PrefillLedger(ranks_of()).lend(wrong, [(0, [1])], 16)


def test_a_trace_is_all_that_headers_can_change_of_params() -> None:
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "engine_id": "mallory", "tracestate": "x" * 5000}
    fetch = DecodeLedger(1).announce("a", params := new_params(), trace=headers)
    assert fetch is not None
    assert fetch.plain == {**params, "traceparent": headers["traceparent"]}


def test_workers_that_agree_among_themselves_say_once_that_a_pull_is_over() -> None:
    ledger = pulling(1)
    ledger.ended("a")
    assert len(ledger.take_outcome().received) == 1
    ledger.announce("b", new_params())
    ledger.pull("b", [(0, [1])])
    ledger.ended("b")
    assert ledger.take_outcome().received == [], "its order has not left"
    ledger.cancel("b")
    assert kinds(ledger.take_orders()) == [("Pull", "b"), ("Cancel", "b")]
    ledger.ended("b")
    outcome = ledger.take_outcome()
    assert (len(outcome.received), len(outcome.failed), len(outcome.free)) == (0, 0, 1)


def test_a_rank_that_died_has_failed_what_it_pulled_and_a_new_one_hears_what_is_queued() -> None:
    ledger = pulling()
    ledger.announce("b", new_params())
    ledger.take_orders()
    ledger.announce("c", new_params())
    ledger.rank_died(1)
    ledger.rank_joined(1)
    assert kinds(ledger.take_orders()) == [("Announce", "c"), ("Cancel", "a"), ("Announce", "b")]
    ledger.update(0, Finished(failed=[failed("a")]))
    outcome = ledger.take_outcome()
    assert (len(outcome.failed), len(outcome.free)) == (1, 1)
    assert "rank 1 of this engine has died" in str(outcome.failed[0].errors[1])


def test_a_pull_that_leaves_while_a_rank_is_missing_has_failed() -> None:
    ledger = DecodeLedger(2)
    ledger.announce("a", new_params())
    ledger.rank_died(1)
    ledger.pull("a", [(0, [1])])
    assert kinds(ledger.take_orders()) == [("Pull", "a")]
    assert kinds(ledger.take_orders()) == [("Cancel", "a")]
    ledger.update(0, Finished(finished_recving=[received("a")]))
    assert list(ledger.take_outcome().failed[0].errors) == [1]


def test_orders_wait_for_the_next_rank_while_none_lives_but_pulls_fail() -> None:
    ledger = DecodeLedger(2)
    for name in "abcd":
        ledger.announce(name, new_params())
    ledger.rank_died(0)
    ledger.pull("b", [(0, [5])])
    ledger.rank_died(1)
    ledger.cancel("c")  # its announcement is left out
    ledger.pull("d", [(0, [6])])
    ledger.cancel("d")
    assert ledger.has_orders, "pulls have to fail"
    assert not ledger.take_orders()
    outcome = ledger.take_outcome()
    assert [each.request_id for each in outcome.failed] == ["b"]
    assert [each.groups for each in outcome.free] == [[(0, [5])], [(0, [6])]]
    assert not ledger.has_orders, "a step would find nothing to do"
    assert not ledger.take_orders()
    ledger.announce("e", new_params())
    ledger = pickle.loads(pickle.dumps(ledger))
    ledger.rank_joined(1)
    orders = ledger.take_orders()
    assert kinds(orders) == [("Announce", "a"), ("Cancel", "c"), ("Cancel", "d"), ("Announce", "e")]
    assert all(order.params is not None for order in orders if isinstance(order, Cancel)), "no rank knows of these"
    ledger.pull("a", [(0, [7])])
    ledger.rank_joined(0)
    assert kinds(ledger.take_orders()) == [("Pull", "a"), ("Announce", "e")]


def test_an_announcement_that_was_kept_is_made_once_however_often_ranks_start_again() -> None:
    ledger = DecodeLedger(1)
    ledger.announce("a", new_params())
    for _ in range(3):
        ledger.rank_died(0)
        assert not ledger.take_orders()
        ledger.rank_joined(0)
    assert kinds(ledger.take_orders()) == [("Announce", "a")]
    ledger.rank_died(0)
    ledger.rank_joined(0)
    ledger.rank_died(0)
    ledger.pull("a", [(0, [1])])
    assert not ledger.take_orders(), "it has failed, so it is not announced any more"
    ledger.rank_joined(0)
    assert (kinds(ledger.take_orders()), len(ledger.take_outcome().failed)) == ([], 1)


@pytest.mark.parametrize("takes", [True, False])
def test_orders_that_wait_for_a_rank_are_bounded_and_no_announcement_is_lost(takes: bool) -> None:
    ledger = DecodeLedger(1)
    ledger.announce("first", new_params())
    ledger.rank_died(0)
    for number in range(MAX_KEPT + 50):
        ledger.announce(f"{number}", new_params())
        ledger.cancel(f"{number}")
        if takes:
            assert not ledger.take_orders()
    ledger.rank_joined(0)
    orders = kinds(ledger.take_orders())
    assert len(orders) == MAX_KEPT + 1
    assert orders[-2:] == [("Cancel", f"{MAX_KEPT + 49}"), ("Announce", "first")]


def test_a_withdrawal_waits_for_the_next_rank_and_a_lend_does_not() -> None:
    ledger, _ = lent()
    ledger.lend("b", [(0, [3])], 16, written=False)
    for rank in range(2):
        ledger.rank_died(rank)
    assert not ledger.take_orders()
    assert [loan.request_id for loan in ledger.take_free()] == ["a"], "no rank has lent it"
    ledger.withdraw("b")
    assert not ledger.take_orders()
    assert [loan.request_id for loan in ledger.take_free()] == ["b"]
    ledger.rank_joined(0, ranks_of(incarnation="b").endpoints[0])
    assert kinds(ledger.take_orders()) == [("Withdraw", "a"), ("Withdraw", "b")]


@pytest.mark.parametrize("ledger", [DecodeLedger(2), PrefillLedger(GROUP)])
def test_a_rank_without_a_report_is_told_apart_from_one_without_news(ledger: Any) -> None:
    with pytest.raises(LocalProtocolError, match=r"rank 1 has no report \(None\): if it has died, call rank_died\(1\)"):
        ledger.update(1, None)
    with pytest.raises(LocalProtocolError, match=r"the report of rank 0 is \{\}; give the Finished"):
        ledger.update(0, {})
    ledger.update(0, Finished())


def test_retired_blocks_are_free_when_their_rank_has_died() -> None:
    ledger = pulling(1)
    ledger.update(0, Finished(failed=[failed("a", 1, 2)], retired=["a"]))
    outcome = ledger.take_outcome()
    assert (len(outcome.retired), len(outcome.free)) == (1, 0)
    ledger.rank_died(0)
    assert [each.groups for each in ledger.take_outcome().free] == [[(0, [1, 2])]]


def test_a_decode_ledger_can_be_pickled_in_the_middle_of_everything() -> None:
    ledger = pulling()
    ledger.update(0, Finished(failed=[failed("a", 1, 2)]))
    other: DecodeLedger = pickle.loads(pickle.dumps(ledger))
    assert kinds(other.take_orders()) == [("Cancel", "a")]
    other.update(1, Finished(failed=[failed("a")]))
    other.update(0, Finished(returned=["a"]))
    assert len(other.take_outcome().free) == 1


def test_a_rank_that_cannot_be_is_refused_by_either_ledger() -> None:
    decode, (prefill, _) = DecodeLedger(NUM_RANKS), lent()
    for call in (decode.rank_died, decode.rank_joined, prefill.rank_died):
        for wrong in (NUM_RANKS, -1, None):
            with pytest.raises(LocalProtocolError, match=f"{wrong}"):
                call(cast(Any, wrong))
    for wrong in (NUM_RANKS, -1, 0):
        with pytest.raises(LocalProtocolError, match=f"{wrong} has not died"):
            prefill.rank_joined(wrong, ranks_of().endpoints[0])
    for ledger in (decode, prefill):
        with pytest.raises(LocalProtocolError, match="7"):
            ledger.update(7, Finished())


@pytest.mark.parametrize("ends", ["received", "failed"])
def test_nothing_is_told_of_a_request_that_was_cancelled_before_its_end_was_told(ends: str) -> None:
    ledger = pulling(1)
    first = ledger.get("a")
    ledger.update(
        0, Finished(finished_recving=[received("a")]) if ends == "received" else Finished(failed=[failed("a")])
    )
    with pytest.raises(LocalProtocolError):
        ledger.announce("a", new_params())
    ledger.cancel("a")
    second = ledger.announce("a", new_params())
    outcome = ledger.take_outcome()
    assert (outcome.received, outcome.failed, outcome.free) == ([], [], [first])
    assert ledger.get("a") is second


def test_what_was_received_and_not_told_has_failed_if_a_rank_dies() -> None:
    ledger = pulling(NUM_RANKS)
    fetch = ledger.get("a")
    for rank in range(NUM_RANKS):
        ledger.update(rank, Finished(finished_recving=[received("a")]))
    ledger.rank_died(1)
    outcome = ledger.take_outcome()
    assert (outcome.received, outcome.failed, outcome.free) == ([], [fetch], [fetch])
    assert ledger.get("a") is None


@pytest.mark.parametrize("wrong", [0, -1, True, "2", 100_000])
def test_a_number_of_ranks_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(LocalProtocolError, match="num_ranks"):
        DecodeLedger(wrong)


def lent(**options: Any) -> tuple[PrefillLedger, dict[str, Any]]:
    ledger = PrefillLedger(ranks_of())
    params = ledger.lend("a", [(0, [1, 2])], 32, **options)
    return ledger, params


def test_a_loan_is_over_when_every_rank_has_told_its_end() -> None:
    ledger, params = lent(lease_s=7.0, hashes=["h", "i"], hash_tokens=16)
    assert (params["lease_s"], params["hashes"], params["hash_tokens"]) == (7.0, ("h", "i"), 16)
    assert ledger.has_orders
    assert kinds(ledger.take_orders()) == [("Lend", "a")]
    ledger.update(0, Finished(finished_sending=[ended("a"), ended("unknown")]))
    assert ledger.take_free() == []
    ledger.update(1, Finished(finished_sending=[ended("a", "expired")]))
    (loan,) = ledger.take_free()
    assert (loan.request_id, loan.groups, {rank: end.cause for rank, end in loan.ends.items()}) == (
        "a",
        [(0, [1, 2])],
        {0: "released", 1: "expired"},
    )
    assert (ledger.take_free(), ledger.get("a"), len(ledger), ledger.has_orders) == ([], None, 0, False)


def test_params_that_leave_ahead_of_the_data_are_lent_when_it_is_there() -> None:
    ledger, params = lent(written=False)
    assert (params["written"], ledger.has_orders) == (False, False)
    ledger.mark_written("a")
    assert kinds(ledger.take_orders()) == [("Lend", "a")]
    with pytest.raises(LocalProtocolError, match="no request 'a' waits for its KV"):
        ledger.mark_written("a")


def test_a_request_that_is_aborted_before_its_kv_is_there_has_its_blocks_back_at_once() -> None:
    ledger, _ = lent(written=False)
    ledger.withdraw("a")
    ledger.withdraw("a")
    assert len(ledger.take_free()) == 1
    assert kinds(ledger.take_orders()) == [("Withdraw", "a")]


def test_a_refused_loan_is_withdrawn_once_on_every_rank() -> None:
    ledger, _ = lent()
    (order,) = ledger.take_orders()
    refused = Finished(refused=[Refused(order, EngineClosed("it drains")), Refused(Cancel("a"), EngineClosed("-"))])
    ledger.update(0, refused)
    ledger.withdraw("a")
    assert kinds(ledger.take_orders()) == [("Withdraw", "a")]
    ledger.update(1, Finished(finished_sending=[ended("a", "revoked")]))
    assert [list(loan.ends) for loan in ledger.take_free()] == [[1]]


def test_blocks_of_an_engine_that_closed_too_soon_wait_for_the_end_of_its_process() -> None:
    ledger, _ = lent()
    ledger.take_orders()
    ledger.update(0, Finished(finished_sending=[ended("a", "closed")]))
    ledger.update(1, Finished(finished_sending=[ended("a")]))
    assert ledger.take_free() == []
    ledger.rank_died(0)
    assert len(ledger.take_free()) == 1


def test_kv_that_is_computed_for_nothing_keeps_its_blocks_until_it_is_there() -> None:
    ledger, _ = lent(written=False, decode_engines=["d0"])
    ledger.decode_restarted("d0")
    assert kinds(ledger.take_orders()) == [("Withdraw", "a")]
    assert ledger.take_free() == []
    ledger.mark_written("a")
    assert not ledger.has_orders
    assert len(ledger.take_free()) == 1
    with pytest.raises(LocalProtocolError, match="decode_engines"):
        ledger.lend("b", [(0, [1])], 16, decode_engines="d0")


def test_an_id_that_is_lent_again_has_another_name_and_the_newest_is_withdrawn() -> None:
    ledger, _ = lent()
    second = ledger.lend("a", [(0, [3])], 16)
    assert second["request_id"] == "a~2"
    ledger.withdraw("a")
    assert kinds(ledger.take_orders()) == [("Lend", "a"), ("Lend", "a~2"), ("Withdraw", "a~2")]
    for rank in range(2):
        ledger.update(rank, Finished(finished_sending=[ended("a")]))
    assert ledger.get("a") is not None, "the second one is still lent"
    third = ledger.lend("a", [(0, [4])], 16)
    ledger.withdraw("a")
    assert [kind for kind, _ in kinds(ledger.take_orders())] == ["Lend", "Withdraw"]
    ledger.ended(third["request_id"])
    assert ledger.take_free()[-1].groups == [(0, [4])]
    assert (loan := ledger.get("a")) is not None
    assert loan.name == "a~2"
    ledger.ended("a~2")
    ledger.ended("a~2")
    assert [each.groups for each in ledger.take_free()] == [[(0, [3])]]
    assert ledger.get("a") is None


def test_only_what_nobody_else_may_read_is_withdrawn_when_a_decode_engine_restarts() -> None:
    ledger, _ = lent(decode_engines=["d0"])
    ledger.lend("b", [(0, [3])], 16, decode_engines=["d0", "d1"])
    ledger.lend("c", [(0, [4])], 16)
    ledger.take_orders()
    ledger.decode_restarted("d0")
    assert kinds(ledger.take_orders()) == [("Withdraw", "a")]
    ledger.decode_restarted("d1")
    assert kinds(ledger.take_orders()) == [("Withdraw", "b")]


def test_nothing_is_lent_while_a_rank_is_missing_and_params_name_the_new_one_afterwards() -> None:
    ledger, _ = lent()
    ledger.take_orders()
    ledger.rank_died(1)
    with pytest.raises(LocalProtocolError, match="rank 1 has died"):
        ledger.lend("b", [(0, [3])], 16)
    assert kinds(ledger.take_orders()) == [("Withdraw", "a")]
    ledger.update(0, Finished(finished_sending=[ended("a", "revoked")]))
    assert len(ledger.take_free()) == 1
    for endpoint, error in ((ranks_of().endpoints[0], ConfigError), (None, ConfigError)):
        with pytest.raises(error):
            ledger.rank_joined(1, cast(Any, endpoint))
    ledger.rank_joined(1, ranks_of(incarnation="b").endpoints[1])
    assert ledger.lend("b", [(0, [3])], 16)["endpoints"][1]["incarnation"] == "b"


def test_a_lend_that_leaves_after_a_rank_has_died_waits_for_the_others_alone() -> None:
    ledger, _ = lent()
    ledger.rank_died(1)
    assert kinds(ledger.take_orders()) == [("Lend", "a"), ("Withdraw", "a")]
    ledger.update(0, Finished(finished_sending=[ended("a", "revoked")]))
    assert len(ledger.take_free()) == 1


# -- tickets ---------------------------------------------------------------------------------------

TICKET = ticket_of(0xDECAF << 96)


def following(num_ranks: int = 2, *names: str) -> DecodeLedger:
    """Return a ledger with requests that follow one ticket; the order of the first has left."""
    ledger = DecodeLedger(num_ranks)
    for name in names or ("a",):
        assert ledger.follow(name, to_follow(TICKET)) is not None
    assert kinds(ledger.take_orders()) == [("Follow", names[0] if names else "a")]
    return ledger


def test_the_first_offer_is_announced_on_every_rank_and_the_next_changes_nothing() -> None:
    ledger, params = following(), new_params()
    fetch = ledger.get("a")
    assert fetch is not None
    assert (fetch.state, fetch.params, ledger.may_pull("a"), ledger.has_orders) == (State.FOLLOWING, None, None, False)
    with pytest.raises(LocalProtocolError, match="'a' is following: pull is not possible"):
        ledger.pull("a", [(0, [1])])
    ledger.update(1, Finished(offered=[Offer("a", params)]))
    assert (fetch.plain, fetch.state, ledger.may_pull("a")) == (params, State.QUEUED, True)
    assert kinds(ledger.take_orders()) == [("Announce", "a")]
    ledger.update(0, Finished(offered=[Offer("a", params)]))
    ledger.pull("a", [(0, [1])])
    ledger.update(0, Finished(offered=[Offer("a", params, is_late=True)], not_offered=[no_offer("a")]))
    assert kinds(ledger.take_orders()) == [("Pull", "a")]
    for rank in range(2):
        ledger.update(rank, Finished(finished_recving=[received("a")]))
    assert ledger.take_outcome().received == [fetch]
    ledger.update(0, Finished(offered=[Offer("a", params)]))
    assert (ledger.has_orders, len(ledger)) == (False, 0)


def test_the_first_refusal_fails_the_request_and_what_other_ranks_are_offered_is_released_once() -> None:
    ledger, params = following(3), new_params()
    ledger.update(2, Finished(not_offered=[no_offer("a", "peer_lost")]))
    fetch = ledger.get("a")
    assert fetch is not None
    assert (fetch.state, list(fetch.errors), ledger.may_pull("a")) == (State.REFUSED, [2], False)
    assert kinds(ledger.take_orders()) == [("Cancel", "a")]
    ledger.update(0, Finished(offered=[Offer("a", params, is_late=True)], not_offered=[no_offer("a", "cancelled")]))
    ledger.update(1, Finished(offered=[Offer("a", params)]))
    (order,) = ledger.take_orders()
    assert order == Cancel("a~2", params), "a cancellation of 'a' would say nothing, or be refused"
    assert list(fetch.errors) == [2]
    ledger.cancel("a")
    assert (ledger.has_orders, len(ledger)) == (False, 0)


@pytest.mark.parametrize("pulls", [True, False])
def test_an_offer_of_another_request_is_released_and_touches_nothing_of_the_first(pulls: bool) -> None:
    """Two workers of vLLM, which report as one rank."""
    ledger, params, other = following(1), new_params(), new_params()
    ledger.offered(0, Offer("a", params))
    if pulls:
        ledger.pull("a", [(0, [1])])
    ledger.offered(0, Offer("a", other))
    ledger.offered(0, Offer("a", other))
    first, second = ledger.take_orders()
    assert kinds([first]) == [("Pull" if pulls else "Announce", "a")]
    assert second == Cancel("a~2", other)
    assert ledger.may_pull("a") is not pulls


def test_requests_with_one_ticket_follow_once_and_are_siblings_from_the_offer_on() -> None:
    ledger, params = following(1, "a", "b"), new_params()
    assert (ledger.may_pull("a"), ledger.may_pull("b")) == (None, None)
    ledger.update(0, Finished(offered=[Offer("a", params)]))
    sibling = ledger.follow("c", to_follow(TICKET))
    assert sibling is not None
    assert (sibling.plain, [ledger.may_pull(name) for name in "abc"]) == (params, [True, None, None])
    ledger.pull("a", [(0, [1])])
    assert kinds(ledger.take_orders()) == [("Pull", "a")]
    ledger.update(0, Finished(finished_recving=[received("a")]))
    assert len(ledger.take_outcome().received) == 1
    assert [ledger.may_pull(name) for name in "bc"] == [False, False]
    assert sibling.errors == {}
    assert ledger.follow("d", to_follow(TICKET)) is None
    assert ledger.announce("d", params) is None


def test_requests_with_one_ticket_are_refused_together_and_the_ticket_may_be_followed_again() -> None:
    ledger = following(1, "a", "b", "c")
    ledger.cancel("c")
    ledger.refuse("b", error := PullError("its own time is over"))
    assert [each.state for each in map(ledger.get, "ab") if each] == [State.FOLLOWING, State.REFUSED]
    assert ledger.follow("d", to_follow(TICKET)) is not None
    ledger.update(0, Finished(not_offered=[no_offer("a")]))
    assert [(each.state, each.errors[0] is error) for each in map(ledger.get, "abd") if each] == [
        (State.REFUSED, False),
        (State.REFUSED, True),
        (State.REFUSED, False),
    ]
    ledger.refuse("a", error)
    for name in "abd":
        ledger.cancel(name)
    ledger.follow("a", to_follow(TICKET))
    assert kinds(ledger.take_orders())[-1] == ("Follow", "a~2"), "a rank may still report on the first"
    ledger.update(0, Finished(not_offered=[no_offer("a")]))
    assert ledger.may_pull("a") is None
    ledger.update(0, Finished(offered=[Offer("a~2", new_params())]))
    assert kinds(ledger.take_orders()) == [("Announce", "a"), ("Cancel", "a~2")]


def test_a_follower_that_goes_takes_the_ticket_along_and_a_crossing_offer_is_released_once() -> None:
    ledger, params = following(2, "a", "b"), new_params()
    ledger.cancel("a")
    assert ledger.follow("c", to_follow(TICKET)) is None
    assert (ledger.may_pull("b"), ledger.take_orders()) == (False, [Cancel("a")])
    ledger.refuse("b", PullError("too late"))
    fetch = ledger.get("b")
    assert fetch is not None
    assert (fetch.state, fetch.errors) == (State.WAITING, {}), "it computes its prompt"
    ledger.cancel("b")
    for rank in range(2):
        ledger.update(rank, Finished(not_offered=[no_offer("a", "cancelled")]))
        ledger.update(rank, Finished(offered=[Offer("a", params, is_late=True)]))
    assert ledger.take_orders() == [Cancel("a", params)]
    assert len(ledger) == 0


@pytest.mark.parametrize("is_offered", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_cached_prompt_follows_on_and_releases_what_it_is_offered(is_offered: bool, at_once: bool) -> None:
    ledger, params = DecodeLedger(2), new_params()
    ledger.follow("a", to_follow(TICKET))
    ledger.follow("b", to_follow(TICKET))
    if not at_once:
        ledger.take_orders()
    ledger.release("a")
    assert (ledger.get("a"), ledger.may_pull("b"), ledger.follow("c", to_follow(TICKET))) == (None, False, None)
    ledger.cancel("a")
    ledger.announce("a", other := new_params())
    orders = ledger.take_orders()
    assert kinds(orders) == [("Follow", "a")] * at_once + [("Cancel", "a"), ("Announce", "a")]
    assert Cancel("a", follows_on=True) in orders
    for rank in range(2):
        told = [Offer("a", params, is_late=True)] if is_offered else []
        ledger.update(rank, Finished(offered=told, not_offered=[no_offer("a", "cancelled")]))
    assert list(ledger.take_orders()) == [Cancel("a~2", params)] * is_offered, "once more on all ranks, by a free name"
    assert ledger.may_pull("a")
    ledger.cancel("a")
    assert ledger.take_orders() == [Cancel("a", other)]
    ledger.release("b")
    assert (len(ledger), ledger.has_orders) == (0, False)


def test_a_new_rank_follows_what_is_followed_and_while_none_lives_it_waits() -> None:
    ledger = following()
    ledger.follow("b", to_follow(ticket_of(2)))
    ledger.release("b")
    ledger.follow("c", to_follow(ticket_of(3)))
    ledger.take_orders()
    ledger.cancel("c")
    ledger.rank_died(0)
    assert (ledger.may_pull("a"), kinds(ledger.take_orders())) == (None, [("Cancel", "c")])
    ledger.rank_died(1)
    ledger.follow("d", to_follow(ticket_of(4)))
    ledger = pickle.loads(pickle.dumps(ledger))
    assert not ledger.take_orders()
    ledger.rank_joined(1)
    orders = ledger.take_orders()
    assert kinds(orders) == [("Follow", "d"), ("Follow", "a")]
    ledger.rank_joined(0)
    refused = [Refused(order, LocalProtocolError("it follows already")) for order in ledger.take_orders()]
    ledger.update(1, Finished(refused=refused))
    assert ([ledger.may_pull(name) for name in "ad"], ledger.has_orders) == ([None, None], False)
    ledger.update(0, Finished(offered=[Offer("a", new_params())]))
    assert ledger.may_pull("a")


@pytest.mark.parametrize("is_read", [True, False])
def test_an_offer_of_what_another_request_has_is_read_once(is_read: bool) -> None:
    """The router gave the params to another request, because the decode leg of the first was lost to it."""
    ledger, params = following(1, "a", "b"), new_params()
    ledger.announce("x", params)
    ledger.take_orders()
    if is_read:
        ledger.cancel("x")
        ledger.take_orders()
    ledger.update(0, Finished(offered=[Offer("a", params)]))
    assert [ledger.may_pull(name) for name in "ab"] == ([False, False] if is_read else [None, None])
    assert ledger.take_orders() == [Cancel("a")], "the ranks follow no more"
    ledger.update(0, Finished(not_offered=[no_offer("a", "cancelled")]))
    assert [each.errors for each in map(ledger.get, "ab") if each] == [{}, {}]
    if not is_read:
        ledger.pull("x", [(0, [1])])
        ledger.take_orders()
        ledger.update(0, Finished(failed=[failed("x")]))
        assert [len(each.errors) for each in map(ledger.get, "ab") if each] == [1, 1]


def test_an_offer_that_comes_late_releases_nothing_that_is_read_or_was() -> None:
    ledger, params = following(), new_params()
    ledger.update(0, Finished(not_offered=[no_offer("a")]))
    ledger.cancel("a")
    ledger.follow("b", to_follow(TICKET))
    ledger.update(0, Finished(offered=[Offer("b", params)]))
    ledger.pull("b", [(0, [1])])
    ledger.take_orders()
    ledger.update(1, Finished(offered=[Offer("a", params, is_late=True)]))
    assert not ledger.has_orders
    for rank in range(2):
        ledger.update(rank, Finished(failed=[failed("b")]))
    assert len(ledger.take_outcome().failed) == 1
    ledger.take_orders()
    ledger.update(1, Finished(offered=[Offer("b", params)]))
    assert not ledger.has_orders, "a later request may still try it"


def test_an_offer_that_a_rank_has_released_is_not_taken() -> None:
    ledger, params = following(), new_params()
    ledger.offered(0, Offer("a", params, is_late=True))
    assert (ledger.may_pull("a"), ledger.take_orders()) == (None, [Cancel("a~2", params)])
    ledger.offered(1, Offer("a", params))
    assert (ledger.may_pull("a"), ledger.take_orders()) == (False, [Cancel("a")])


def test_a_trace_of_the_follower_takes_the_place_of_the_one_that_is_offered() -> None:
    ledger, trace = DecodeLedger(1), f"00-{'1' * 32}-{'2' * 16}-01"
    ledger.follow("a", to_follow(TICKET), trace={"traceparent": trace})
    ledger.update(0, Finished(offered=[Offer("a", params := new_params())]))
    orders = ledger.take_orders()
    assert isinstance(orders[-1], Announce)
    assert orders[-1].params == {**params, "traceparent": trace}


def test_names_that_followed_are_remembered_for_a_while() -> None:
    ledger, params = following(1), new_params()
    ledger.cancel("a")
    for number in range(MAX_SPENT):
        ledger.follow(f"{number}", to_follow(ticket_of(number)))
        ledger.cancel(f"{number}")
    assert ledger.follow("a", to_follow(TICKET)) is not None
    ledger.update(0, Finished(offered=[Offer("a", params)]))
    assert ledger.may_pull("a")


@pytest.mark.parametrize("wrong", [None, {}, {**to_follow(TICKET), "ticket": "x"}, {**to_follow(TICKET), "tp_size": 0}])
def test_what_cannot_be_followed_is_refused_before_anything_is_ordered(wrong: Any) -> None:
    ledger = DecodeLedger(1)
    with pytest.raises(RemoteProtocolError):
        ledger.follow("a", wrong)
    assert (len(ledger), ledger.has_orders, ledger.get("a")) == (0, False, None)


def test_no_text_shows_a_ticket_or_a_key() -> None:
    decode, prefill, params = following(), PrefillLedger(ranks_of()), new_params()
    prefill.lend("a", [(0, [1])], 16, ticket=TICKET)
    shown: list[Any] = [Follow("a", to_follow(TICKET)), Lend(params, ticket=TICKET), WithdrawTicket(TICKET)]
    shown += [decode.get("a"), prefill.get("a"), Cancel("a", params), Offer("a", params)]
    decode.update(0, Finished(offered=[Offer("a", params)]))
    for each in (*shown, decode.get("a"), [Refused(order, LocalProtocolError("no")) for order in shown[:3]]):
        assert "decaf" not in repr(each)
        assert params["key"][3] not in repr(each)
    assert repr(shown[0]) == "Follow(request_id='a', wait_s=None, cohort_id='', takes_pieces=False)"
    with pytest.raises(LocalProtocolError) as refused:
        prefill.withdraw_ticket(f"{TICKET}0")
    assert "decaf" not in str(refused.value)


def test_a_ticket_belongs_to_the_first_request_that_brings_it() -> None:
    ledger = PrefillLedger(ranks_of())
    assert (ledger.take_ticket(TICKET), ledger.take_ticket(TICKET)) == (True, False)
    for wrong in (None, "", TICKET[1:], TICKET.upper(), f"{TICKET}\n", 7):
        assert not ledger.take_ticket(cast(Any, wrong))
    for number in range(MAX_TICKETS):
        assert ledger.take_ticket(ticket_of(number))
    assert ledger.take_ticket(TICKET), "it was brought so long ago that it is forgotten"


@pytest.mark.parametrize("written", [True, False])
def test_the_ticket_leaves_with_the_loan(written: bool) -> None:
    ledger, params = lent(ticket=TICKET, written=written)
    if not written:
        ledger.mark_written("a")
    assert ledger.take_orders() == [Lend(params, ticket=TICKET)]
    with pytest.raises(LocalProtocolError):
        ledger.lend("b", [(0, [3])], 16, ticket="short")
    assert ledger.get("b") is None


def test_what_ends_without_a_loan_withdraws_its_ticket() -> None:
    ledger, params = lent(ticket=TICKET, written=False)
    ledger.withdraw("a")
    ledger.withdraw_ticket(ticket_of(1))
    orders = [Withdraw(params), WithdrawTicket(TICKET), WithdrawTicket(ticket_of(1))]
    assert ledger.take_orders() == orders
    ledger, params = lent(ticket=TICKET)
    (order,) = ledger.take_orders()
    ledger.update(0, Finished(refused=[Refused(order, EngineClosed("it drains"))]))
    ledger.update(1, Finished(refused=[Refused(order, EngineClosed("it drains"))]))
    assert ledger.take_orders() == [Withdraw(params), WithdrawTicket(TICKET)]
    for rank in range(2):
        ledger.rank_died(rank)
    ledger.withdraw_ticket(TICKET)
    assert not ledger.take_orders()
    ledger.rank_joined(1, ranks_of(incarnation="b").endpoints[1])
    assert ledger.take_orders() == [WithdrawTicket(TICKET)]


def test_copies_of_a_scheduler_mint_keys_of_their_own() -> None:
    ledger, _ = lent()
    keys = []
    for each in (ledger, pickle.loads(pickle.dumps(ledger)), copy.copy(ledger.ranks)):
        group = each if isinstance(each, PrefillRanks) else each.ranks
        keys.append(str(group.make_params("x", [(0, [9])], 16)["key"][0]))
    assert len(set(keys)) == 3


# -- head starts, one by one -----------------------------------------------------------------------


def early(*offers: Offer, num_ranks: int = 1) -> DecodeLedger:
    """Return a ledger with a request whose blocks pieces fill."""
    ledger = DecodeLedger(num_ranks)
    ledger.follow("a", to_follow(TICKET), takes_pieces=True)
    ledger.take_orders()
    ledger.update(0, Finished(offered=[Offer("a", new_params("piece"), is_piece=True)]))
    ledger.start_early("a", [(0, [1, 2])])
    ledger.take_orders()
    ledger.update(0, Finished(offered=[*offers]))
    return ledger


def test_a_pull_behind_a_head_start_names_its_blocks() -> None:
    ledger = early(Offer("a", new_params()))
    with pytest.raises(LocalProtocolError, match="give the blocks of start_early"):
        ledger.pull("a", [(0, [1, 3])])
    ledger.pull("a", ((0, (1, 2)),))
    assert [order.goes_on for order in ledger.take_orders() if isinstance(order, Pull)] == [True]


def test_a_head_start_that_is_offered_nothing_fails_for_that_reason() -> None:
    ledger = early()
    ledger.update(0, Finished(not_offered=[no_offer("a")], failed=[failed("a", failed_in="head_start")]))
    (fetch,) = ledger.take_outcome().failed
    assert isinstance(fetch.errors[0], NoOffer)


def test_pieces_of_two_requests_do_not_share_a_ticket() -> None:
    ledger = PrefillLedger(ranks_of())
    assert ledger.take_ticket(TICKET)
    ledger.lend_piece("a", TICKET, [(0, [1])], 16)
    with pytest.raises(LocalProtocolError, match="under the ticket of another"):
        ledger.lend_piece("b", TICKET, [(0, [2])], 16)
    ledger.lend("b", [(0, [2])], 16, ticket=TICKET)
    assert [type(order) for order in ledger.take_orders()] == [LendPiece, EndPieces, Lend]
    with pytest.raises(LocalProtocolError, match="under the ticket of another"):
        ledger.lend_piece("a", TICKET, [(0, [1])], 16)


def test_no_piece_waits_for_a_rank_that_takes_the_place_of_a_dead_one() -> None:
    ledger = PrefillLedger(ranks_of())
    ledger.lend_piece("a", TICKET, [(0, [1])], 16)
    for rank in range(NUM_RANKS):
        ledger.rank_died(rank)
    ledger.lend_piece("a", TICKET, [(0, [1])], 16)
    ledger.rank_joined(0, {"tp_rank": 0, "address": "tcp://127.0.0.1:9", "incarnation": "new"})
    assert ledger.take_orders() == []
