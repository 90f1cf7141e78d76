"""Simulated services whose router sends both legs of a request at once, so that decode engines follow it.

The schedulers are the package's ledgers, beside all processes: their orders reach each rank one after the other, and
the reports come back as late. A rank of a decode engine has a desk, as in an embedding. What a rank of a prefill engine
lends is lent as in other services. A request without legs is served beside them, as there.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import msgspec

from asynckv.core.source import MAX_CLAIM_PAUSE_S
from asynckv.core.types import Address, Key, Reason, ReplyTo, decode_follow, decode_params
from asynckv.core.wire import Follow as FollowMessage
from asynckv.core.wire import Message, Offered, Packet, Unfollow, decode_offer, decode_packet, encode_packet
from asynckv.embed import Announce, Cancel, EngineDesk, Follow, Lend, Offer, Order, Pull, Withdraw, WithdrawTicket
from asynckv.embed import desk as desk_module
from asynckv.embed.ledgers import DecodeLedger, Fetch, PrefillLedger
from asynckv.embed.orders import Failed, Finished, Refused
from asynckv.errors import AsyncKVError, EngineClosed, LocalProtocolError, NoOffer, RemoteProtocolError
from asynckv.results import LeaseEnd
from asynckv.scheduler import PrefillRanks
from tests.lab.doors import Doors
from tests.lab.follow_script import ANNOUNCED, FOLLOWED, LENDING, MOMENTS, OFFERED, OWNER, PULLED, TAKEN, TOLD
from tests.lab.oracles import TURN_S, Stopwatch, is_about
from tests.lab.script import ABORTED, BLOCK, DROPPED, LENT, WITHDRAWN, Ask, Fault, Legs, Script
from tests.lab.service import (
    FREED,
    HOSTILE_S,
    LEASE,
    PROBE,
    PULL,
    UNTROUBLED_PACKETS,
    UNTROUBLED_S,
    Attempt,
    Listener,
    Service,
    _Lease,
    _Lent,
    _Prefill,
    _Rank,
    number_of,
)
from tests.lab.world import Process

OWN_S = 1.5
"""A scheduler gives a follow up so much later than its ranks do."""

STEP_S = 0.01
"""Seconds that an order takes to its rank, or a report back, at most."""

DEATH_S = 0.3
"""Seconds until a scheduler knows that a rank has died, at most."""

SETTLE_S = 2.0
"""Seconds after which a rank has carried out whatever it was ordered."""

_TAGS = {kind.__struct_config__.tag for kind in (FollowMessage, Unfollow, Offered)}


@lru_cache(maxsize=64)
def _about_tickets(packet: bytes) -> Packet | None:
    """Return what a packet says, if it says anything about a ticket."""
    with suppress(AsyncKVError):
        return decode_packet(packet) if is_about(packet, _TAGS) else None
    return None


@contextmanager
def _in_one_go() -> Iterator[None]:
    """Let desks carry out all orders at once: how many fit into a slice of this machine's time is no seed's."""
    module = vars(desk_module)
    before = module["SLICE_S"]
    module["SLICE_S"] = math.inf
    try:
        yield
    finally:
        module["SLICE_S"] = before


@dataclass(slots=True)
class _Loan:
    """A request that a rank lends under a ticket."""

    lent: _Lent
    since: Stopwatch
    over: Stopwatch | None = None
    """Since when it is lent no more."""


class Tickets:
    """Rules about what ranks say of tickets.

    A rank offers what it lends under that ticket, while it lends it, and nothing else. It says that a request was
    withdrawn or has ended if that is so.
    """

    def __init__(self, service: FollowService) -> None:
        self._service, self._world = service, service.world
        self._loans: dict[tuple[str, str], _Loan] = {}
        """By process start of the owner, and ticket."""
        self._withdrawn: dict[tuple[str, str], float] = {}
        self.asked: dict[tuple[Process, str], tuple[str, float]] = {}
        """By reader and ticket: the process start that was asked last, and when a rank was asked first."""

    def lends(self, process: Process, owner: str, ticket: str, lent: _Lent) -> None:
        """A rank is about to lend a request. A ticket belongs to the first."""
        self._loans.setdefault((owner, ticket), _Loan(lent, Stopwatch.start(process)))

    def does_not_lend(self, owner: str, ticket: str, lent: _Lent) -> None:
        if self._loans[owner, ticket].lent is lent:
            del self._loans[owner, ticket]

    def ends(self, process: Process, lent: _Lent) -> None:
        """A rank lends a request no more."""
        for loan in self._loans.values():
            if loan.lent is lent and loan.since.process is process:
                loan.over = loan.over or Stopwatch.start(process)

    def withdraws(self, process: Process, owner: str, ticket: str) -> None:
        self._withdrawn.setdefault((owner, ticket), process.now)

    def is_lent(self, owner: str, ticket: str) -> bool:
        """Whether a rank lends a request under a ticket, as far as its engine knows."""
        return (owner, ticket) in self._loans and self._over(self._loans[owner, ticket]) is None

    def known_at(self, owner: str, ticket: str) -> tuple[float, float]:
        """Return when a rank has lent a request under a ticket, and when it has withdrawn that; never: infinity."""
        loan = self._loans.get((owner, ticket))
        return loan.since.at if loan else math.inf, self._withdrawn.get((owner, ticket), math.inf)

    def _over(self, loan: _Loan) -> Stopwatch | None:
        """Since when a request may not be offered: it has ended, or was revoked."""
        leases = [x for _, process, x in self._service.leases if process is loan.since.process and x.lent is loan.lent]
        return loan.over or next((x.revoked for x in leases if x.revoked), None)

    def sent(self, source: Process, packet: Packet, message: Message) -> None:
        """A process says something about a ticket."""
        match message:
            case FollowMessage(ticket=ticket):
                _, since = self.asked.get((source, ticket), ("", source.now))
                self.asked[source, ticket] = packet.target, since
            case Offered(ticket=ticket, reason=None):
                self._judge_offer(source, message, self._loans.get((packet.sender, ticket)))
            case Offered(ticket=ticket, reason=reason) if reason is not None:
                judge = partial(self._judge_refusal, source, packet.sender, ticket, reason.value)
                if reason in (Reason.ENGINE_CLOSED, Reason.WITHDRAWN, Reason.RESTARTED):
                    judge()
                else:
                    self._world.at(source.now + TURN_S, judge)  # its engine is told of an end a moment later
            case _:
                pass

    def _judge_offer(self, source: Process, message: Offered, loan: _Loan | None) -> None:
        try:
            offered = decode_offer(message)
        except RemoteProtocolError as exc:
            self._world.violate(f"{source.name} offers what is malformed: {exc}")
            return
        what = f"{source.name} offers request {offered.request_id!r}"
        if loan is None:
            self._world.violate(f"{what}, which it has not lent under that ticket")
        elif offered != decode_params(loan.lent.params):
            self._world.violate(f"{what} under the ticket of request {loan.lent.params['request_id']!r}")
        elif (over := self._over(loan)) is not None and over.ran_s > TURN_S:
            self._world.violate(f"{what} {over.ran_s:.3f} s after its end")

    def _judge_refusal(self, source: Process, owner: str, ticket: str, reason: str) -> None:
        rank, loan = self._service.ranks[source.name.partition("#")[0]], self._loans.get((owner, ticket))
        is_ending = source.is_dead or rank.process is not source or rank.is_moving or rank.is_draining
        match reason:
            case "withdrawn":
                is_so = (owner, ticket) in self._withdrawn
            case "restarted":
                is_so = owner == rank.engine.incarnation  # it speaks for itself, and another one was asked
            case "engine_closed":
                is_so = is_ending
            case _:
                is_so = is_ending or (loan is not None and self._over(loan) is not None)
        if not is_so:
            self._world.violate(f"{source.name} says that a request is {reason}, and it is not")


@dataclass(slots=True, eq=False)
class _Book:
    """The scheduler of a prefill engine with one address book."""

    ledger: PrefillLedger
    processes: list[Process]
    tickets: dict[str, int] = field(default_factory=dict)
    """The first request that brought each."""


@dataclass(slots=True, eq=False)
class _Route:
    """One request on its way: its ticket, and its prefill engine's scheduler once that has it."""

    ask: Ask
    ticket: str
    book: _Book | None = None
    owns_ticket: bool = False
    is_over: bool = False
    """Nothing is lent for it any more."""


class Lines:
    """Ways to and from processes, on which nothing passes by another."""

    def __init__(self, service: FollowService) -> None:
        self._service, self._last = service, defaultdict[object, float](float)

    def next_at(self, way: object, now: float, most_s: float = STEP_S) -> float:
        self._last[way] = max(self._last[way], now + self._service.dice.random() ** 3 * most_s)
        return self._last[way]


@dataclass(slots=True, eq=False)
class _Followed:
    """A request of a decode engine."""

    route: _Route
    fetch: Fetch
    blocks_at: float = math.inf
    """When there are blocks for it."""


@dataclass(slots=True, eq=False)
class _Following:
    """What a rank was ordered to follow, and what it has reported of it."""

    ticket: str
    follow: dict[str, Any]
    clock: Stopwatch
    orders: int = 1
    reports: int = 0
    has_ended: bool = False
    """It was reported that it is not offered."""
    is_unwanted: bool = False
    """It was cancelled since."""


class Fetching(Attempt):
    """What one rank does for a request that its engine follows, from its announcement on."""

    def __init__(self, decoder: Decoder, rank: _Rank, lent: _Lent, name: str) -> None:
        super().__init__(decoder.service, rank, lent)
        self.name, self.is_open, self._is_odd = name, False, decoder.service.is_odd(lent.ask)
        self._result: asyncio.Future[str] = self.process.loop.create_future()

    async def pull(self, order: Pull) -> None:
        try:
            await self._pull(self.name, True, [block for _, ids in order.groups for block in ids if block is not None])
        except asyncio.CancelledError:
            self.service.outcomes["pull.task_cancelled"] += 1
        except (EngineClosed, LocalProtocolError) as exc:
            self.is_turned_away = True
            self.service.outcomes[f"pull.{type(exc).__name__}"] += 1
        finally:
            self.is_open = False

    async def _ask(self, request_id: str, blocks: list[int], is_last: bool) -> str:
        return await self._result

    def reported(self, pull_id: str, error: Exception | None = None) -> None:
        """The desk has reported how the pull ended."""
        if self._result.done():
            self._violate("has two ends")
        elif error is None:
            self._result.set_result(pull_id)
        else:
            self._result.set_exception(error)

    def _is_late(self, called: float) -> bool:
        # An announced request is renewed; but an announcement does not last for ever, nor may a lease.
        lent, at = self.lent, self.announced_at
        lasts_until = min(at + PULL.announce_s * 0.99, lent.lent_from + LEASE.max_lease_s - 2.0)
        return self._is_odd or at > lent.lent_from + lent.ask.lease_s - 1.0 or called > lasts_until

    def _give_back(self, blocks: Sequence[int]) -> None:
        """The scheduler gives them back."""


class Decoder:
    """A decode engine's scheduler, and what its ranks do for it."""

    def __init__(self, service: FollowService, number: int) -> None:
        self.service, self.world, self.number = service, service.world, number
        self.ranks = service.decode[number]
        self.ledger = DecodeLedger(len(self.ranks))
        self.processes: list[Process | None] = [None] * len(self.ranks)
        """Those that the scheduler believes alive; None: it knows of none."""
        self.followed: dict[str, _Followed] = {}
        self.blocks: dict[str, tuple[list[int], list[Process]]] = {}
        """By name of a pull: its blocks, and where they were taken."""
        self.followings: dict[tuple[Process, str], _Following] = {}
        self.fetching: dict[tuple[Process, str], Fetching] = {}
        self.tasks: list[tuple[Fetching, asyncio.Task[None]]] = []
        self.received: set[int] = set()
        """Numbers of requests that were received on all ranks."""
        self.decided: dict[str, Key] = {}
        """The key that each request was decided to have, by name."""
        self.offered: dict[_Lent, tuple[float, list[tuple[Process, int]]]] = {}
        """What any rank was offered: when first, and by whom it is to be released since."""
        self._desks: dict[Process, EngineDesk] = {}

    # -- the scheduler ------------------------------------------------------------------------------

    def begin(self) -> None:
        self.processes = [rank.process for rank in self.ranks]

    def follow(self, route: _Route, follow: dict[str, Any], number: int) -> None:
        request_id = f"D{route.ask.number}" + f"~n{number}" * bool(number)
        fetch = self.ledger.follow(request_id, follow)
        self.service.outcomes["follow.known" if fetch is None else "follow"] += 1
        if fetch is None:
            return
        self.followed[request_id] = followed = _Followed(route, fetch)
        legs = route.ask.legs
        assert legs is not None
        self.world.at(self.world.now + PULL.follow_s + OWN_S, partial(self._time_is_over, followed))
        if legs.cached_s >= 0.0:
            self.world.at(self.world.now + legs.cached_s, partial(self.release, followed))
        self.step()

    def release(self, followed: _Followed) -> None:
        """The whole prompt is cached here."""
        if self.followed.get(followed.fetch.request_id) is followed and followed.fetch.name not in self.blocks:
            self.service.outcomes[f"follow.cached.{followed.fetch.state.value}"] += 1
            self.ledger.release(followed.fetch.request_id)
            del self.followed[followed.fetch.request_id]
            self.step()

    def cancel(self, followed: _Followed) -> None:
        if self.followed.get(followed.fetch.request_id) is followed:
            self.service.outcomes[f"follow.cancelled.{followed.fetch.state.value}"] += 1
            self.ledger.cancel(followed.fetch.request_id)
            del self.followed[followed.fetch.request_id]
            self.step()

    def of(self, number: int) -> list[_Followed]:
        return [each for each in self.followed.values() if each.route.ask.number == number]

    def _time_is_over(self, followed: _Followed) -> None:
        if self.followed.get(followed.fetch.request_id) is followed and followed.fetch.params is None:
            self.service.outcomes["follow.refused_by_scheduler"] += not followed.fetch.errors
            text = f"request {followed.fetch.request_id!r} was offered nothing in time"
            self.ledger.refuse(followed.fetch.request_id, NoOffer(text, reason="no_offer", failed_in="follow"))
            self.step()

    def step(self) -> None:
        """Decide what can be decided, and hand out the orders."""
        now = self.world.now
        outcome = self.ledger.take_outcome()
        for fetch in outcome.retired:
            blocks, processes = self.blocks[fetch.name]
            for rank, process in zip(self.ranks, processes, strict=True):
                if rank.process is process:
                    rank.retired |= set(blocks)
        for fetch in (*outcome.received, *outcome.failed):
            self.followed.pop(fetch.request_id, None)
            self.service.outcomes["follow.failed" if fetch.errors else "follow.received"] += 1
        self.received |= {number_of(fetch.request_id) for fetch in outcome.received}
        for fetch in (*outcome.received, *outcome.free):
            self._blocks_back(fetch)
        for request_id, followed in list(self.followed.items()):
            may = self.ledger.may_pull(request_id)
            if may is False and followed.fetch.name not in self.blocks:
                self.service.outcomes[f"follow.over.{followed.fetch.state.value}"] += 1
                self.ledger.cancel(request_id)
                del self.followed[request_id]
            elif may and followed.blocks_at == math.inf:
                legs = followed.route.ask.legs
                assert legs is not None
                followed.blocks_at = now + legs.waits_s
                self.world.at(followed.blocks_at, self.step)
            if may and followed.blocks_at <= now:
                self._pull(followed)
        self._hand_out()

    def _pull(self, followed: _Followed) -> None:
        fetch = followed.fetch
        assert fetch.params is not None
        ask = self.service.lent_by(fetch.plain).ask
        count = -(-ask.tokens // BLOCK) - ask.cached // BLOCK if ask.cached < ask.tokens else 0
        living = [rank for rank in self.ranks if not rank.process.is_dead]
        free = sorted(set.intersection(*(set(rank.free) for rank in living))) if living else []
        if living and len(free) < count:
            self.world.at(self.world.now + 0.2, self.step)
            return
        blocks = self.service.dice.sample(free, count if living else 0)
        for rank in living:
            rank.free = [block for block in rank.free if block not in blocks]
        self.blocks[fetch.name] = blocks, [rank.process for rank in self.ranks]
        self.ledger.pull(fetch.request_id, [(ask.cached, blocks)], priority=ask.priority)

    def _blocks_back(self, fetch: Fetch) -> None:
        """All ranks have given the blocks of a pull back: they are overwritten at once."""
        blocks, processes = self.blocks.pop(fetch.name)
        for rank, process in zip(self.ranks, processes, strict=True):
            if rank.process is process and not process.is_dead:
                for block in blocks:
                    rank.owner.pop(block, None)
                    rank.words[block] = FREED
                    rank.retired.discard(block)
                    rank.free.append(block)

    def _hand_out(self) -> None:
        if orders := self.ledger.take_orders():
            for index in sorted(self.ledger._living):
                if (process := self.processes[index]) is not None:
                    at = self.service.lines.next_at((process, "orders"), self.world.now)
                    process.call_at(at, self._carry_out, index, process, orders)

    def died(self, index: int, process: Process) -> None:
        """The scheduler hears that a rank has died."""
        if self.processes[index] is process:
            self.processes[index] = None
            self.ledger.rank_died(index)
            self.step()

    def joined(self, index: int, process: Process) -> None:
        if self.ranks[index].process is process and not process.is_dead:
            if (before := self.processes[index]) is not None:
                self.died(index, before)
            self.processes[index] = process
            self.ledger.rank_joined(index)
            self.step()

    def _report(self, index: int, process: Process, finished: Finished) -> None:
        if self.processes[index] is process:
            self.ledger.update(index, finished)
            self.step()

    # -- the ranks ----------------------------------------------------------------------------------

    def _desk(self, index: int, process: Process) -> EngineDesk:
        if process not in self._desks:
            news = partial(self._news, index, process)
            self._desks[process] = EngineDesk(self.ranks[index].engine, on_news=news)
        return self._desks[process]

    def _carry_out(self, index: int, process: Process, orders: Sequence[Order]) -> None:
        """Take orders to a rank's desk."""
        rank, desk, service = self.ranks[index], self._desk(index, process), self.service
        for order in orders:
            match order:
                case Follow(request_id=name, follow=follow):
                    place, plain = (process, name), dict(follow)
                    if place in self.followings:
                        self.followings[place].orders += 1
                    else:
                        self.followings[place] = _Following(plain["ticket"], plain, Stopwatch.start(process))
                case Announce(request_id=name, params=params):
                    fetching = self._fetching(rank, name, params)
                    fetching.called, fetching.memory_epoch = "announced", rank.engine.memory_epoch
                    fetching.announced_at = min(fetching.announced_at, process.now)
                    self._decide(rank, name, fetching.lent.key)
                    service.met_at(ANNOUNCED, fetching.lent.ask.number, process)
                case Pull(request_id=name, params=params):
                    fetching = self._fetching(rank, name, params)
                    self._decide(rank, name, fetching.lent.key)
                    fetching.is_open = True
                    task = process.loop.create_task(fetching.pull(order))
                    self.tasks.append((fetching, task))
                    service.met_at(PULLED, fetching.lent.ask.number, process)
                case Cancel(request_id=name, params=params):
                    if (following := self.followings.get((process, name))) is not None:
                        following.is_unwanted = True
                    known = self.fetching.get((process, name))
                    if params is not None and (known is None or not known.is_pulling):
                        known = self._fetching(rank, name, params)
                        known.said |= {"complete", "failed", "cancelled"}
                    if known is not None:
                        known.give_up()
                        known.said.add("cancelled")
                        service.discharged.setdefault((known.lent.ask.number, rank.name), process.now)
                case _:
                    self.world.violate(f"{rank.name} is ordered {order}")
        with suppress(EngineClosed):
            desk.submit(orders)

    def _fetching(self, rank: _Rank, name: str, params: Any) -> Fetching:
        place = rank.process, name
        if place not in self.fetching:
            lent = self.service.lent_by(params)
            self.fetching[place] = fetching = Fetching(self, rank, lent, name)
            self.service.attempts.append(fetching)
        return self.fetching[place]

    def _decide(self, rank: _Rank, name: str, key: Key) -> None:
        if self.decided.setdefault(name, key) != key:
            self.world.violate(f"{rank.name} has other params for {name} than another rank of its engine")

    def _news(self, index: int, process: Process) -> None:
        """A desk has news: judge them as the rank tells them, and take them to the scheduler a moment later."""
        finished, rank = self._desks[process].take_finished(), self.ranks[index]
        for offer in finished.offered:
            self._judge_offer(rank, process, offer)
        for failed in finished.not_offered:
            self._judge_end(process, failed)
        for refused in finished.refused:
            if isinstance(refused.order, Follow):
                self.followings[process, refused.order.request_id].reports += 1
            elif isinstance(refused.order, Pull):
                self.fetching[process, refused.order.request_id].reported("", refused.error)
        for result in finished.finished_recving:
            self.fetching[process, result.request_id].reported(result.pull_id)
        for failed in finished.failed:
            self.fetching[process, failed.request_id].reported("", failed.error)
        process.loop.call_soon(self._forward, index, process, finished)  # once the bytes of its pulls were judged

    def _forward(self, index: int, process: Process, finished: Finished) -> None:
        at = self.service.lines.next_at((process, "reports"), process.now)
        self.world.at(at, partial(self._report, index, process, finished))

    def _judge_offer(self, rank: _Rank, process: Process, offer: Offer) -> None:
        following, params = self.followings[process, offer.request_id], decode_params(offer.params)
        token, asked = params.key.token, decode_follow(following.follow)
        lent = self.service.known.get((params.engine_id, token))
        if lent is None or (params.engine_id, params.endpoints) != (asked.engine_id, asked.endpoints):
            self.world.violate(f"{rank.name} takes an offer of {params.engine_id}, and follows {asked.engine_id}")
            return
        following.reports += not offer.is_late
        if offer.is_late and not following.has_ended:
            self.world.violate(f"{rank.name} says that {offer.request_id} is offered late, and not that it had ended")
        self.service.outcomes[f"offer.{'late' if offer.is_late else 'in_time'}"] += 1
        if offer.is_late:
            self._fetching(rank, f"{offer.request_id}~late", offer.params).said |= {"complete", "cancelled"}
            self.service.discharged.setdefault((lent.ask.number, rank.name), process.now)
        if lent not in self.offered:
            living = [(r.process, r.engine.memory_epoch) for r in self.ranks if not r.process.is_dead]
            self.offered[lent] = process.now, living
        if not offer.is_late:
            self._in_time(rank, process, offer.request_id, following, "was offered")
        self.service.met_at(TOLD, lent.ask.number, process)

    def _judge_end(self, process: Process, failed: Failed) -> None:
        following, error = self.followings[process, failed.request_id], failed.error
        reason = str(getattr(error, "reason", "")) or type(error).__name__
        following.reports, following.has_ended = following.reports + 1, True
        self.service.outcomes[f"not_offered.{reason}"] += 1
        rank = self.service.ranks[process.name.partition("#")[0]]
        if not isinstance(error, AsyncKVError):
            self.world.violate(f"{process.name} follows {failed.request_id} no more because of {error!r}")
        if following.is_unwanted or rank.is_moving or rank.is_draining:
            return
        took_s = process.now - following.clock.at
        if reason == "no_offer" and took_s < PULL.follow_s - TURN_S:
            self.world.violate(f"{process.name} follows {failed.request_id} no more after {took_s:.3f} s")
        self._in_time(rank, process, failed.request_id, following, f"ended ({reason})")

    def _in_time(self, rank: _Rank, process: Process, name: str, following: _Following, how: str) -> None:
        """What no fault touches is told as soon as it is known."""
        script, ask, ran_s = self.service.script, self.service.asks[number_of(name)], following.clock.ran_s
        if ran_s > PULL.follow_s * 1.001 + TURN_S:
            self.world.violate(f"{process.name} has followed {name} for {ran_s:.3f} s, and {how}")
        if self.service.is_odd(ask) or not (script.is_only_hostile or ask.prefill in self.service.spared):
            return
        owner, asked_at = self.service.tickets.asked.get((process, following.ticket), ("", math.inf))
        lent_at, withdrawn_at = self.service.tickets.known_at(owner, following.ticket)
        known_at = min(lent_at, withdrawn_at)
        bound = UNTROUBLED_S + UNTROUBLED_PACKETS * 2.5e-4 * script.wire + HOSTILE_S * script.is_only_hostile
        if known_at > asked_at + LEASE.parked_s * 0.99:
            bound += MAX_CLAIM_PAUSE_S  # its question is parked for a while, and then asked again
        begin = max(known_at, following.clock.at)
        is_too_late = begin + bound > following.clock.at + PULL.follow_s
        if how == "was offered" and process.now > begin + bound:
            self.world.violate(
                f"{process.name} {how} {name} {process.now - begin:.3f} s after it could be, not {bound:.3f}"
            )
        elif how != "was offered" and known_at == lent_at < math.inf and not is_too_late:
            if self.service.tickets.is_lent(owner, following.ticket):
                self.world.violate(f"{process.name} follows {name}, which is lent, and it {how}")
        elif how == "ended (no_offer)" and withdrawn_at < math.inf and not is_too_late:
            self.world.violate(f"{process.name} follows {name}, which was withdrawn, and it {how}")

    # -- afterwards ---------------------------------------------------------------------------------

    def wrong(self) -> str:
        """Name what must not be, once everything has had its time."""
        if self.followed:
            name, followed = next(iter(self.followed.items()))
            return f"decode engine {self.number} waits for {name} for ever: {followed.fetch.state.value}"
        for (process, name), following in self.followings.items():
            if not process.is_dead and following.reports != following.orders:
                return f"{process.name} was ordered to follow {name}, and has reported {following.reports} ends of it"
        for lent, (at, living) in self.offered.items():
            for process, epoch in living:
                rank = self.service.ranks[process.name.partition("#")[0]]
                if rank.process is not process or process.is_dead or rank.engine.memory_epoch != epoch:
                    continue
                if (lent.ask.number, rank.name) not in self.service.discharged:
                    return f"{rank.name} never released request {lent.ask.number}, offered to its engine at {at:.3f} s"
        if left := [fetch.name for fetch in self.ledger._fetches.values() if not fetch.is_retired]:
            return f"the ledger of decode engine {self.number} still knows {left}"
        for fetching, task in self.tasks:
            is_over = task.done() and not task.cancelled() and not fetching.process.is_dead
            if is_over and (exc := task.exception()) is not None:
                return f"{fetching} ended with {exc!r}"
        return ""


class FollowService(Service):
    """A service with requests that are followed."""

    def __init__(
        self, script: Script, doors: Callable[[Process], Doors] = Doors, listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(script, doors, listeners)
        self.dice = self.world.random_of("followed")
        self.lines, self.tickets = Lines(self), Tickets(self)
        self.asks = {ask.number: ask for ask in script.asks}
        self.known: dict[tuple[str, str], _Lent] = {}
        """All requests that have params, by their engines and tokens."""
        self.decoders = [Decoder(self, number) for number in range(script.decode_engines)]
        self._routes: dict[int, _Route] = {}
        self._books: dict[int, list[_Book]] = {number: [] for number in range(len(self.prefill))}
        """Of each prefill engine, the newest last: one per scheduler and address book."""
        self._identities: dict[int, list[PrefillRanks]] = {number: [] for number in range(len(self.prefill))}
        """The address books of each prefill engine that the router has seen."""
        self._moments: list[Fault] = []
        self.world.on_heard = self._heard
        self.world.censor = self._censor

    def run(self) -> None:
        for decoder in self.decoders:
            self.world.at(0.0, decoder.begin)
        with _in_one_go():
            super().run()

    def lent_by(self, params: Mapping[str, Any]) -> _Lent:
        """Return the request that params are of."""
        return self.known[params["engine_id"], msgspec.convert(params["key"], Key).token]

    def is_odd(self, ask: Ask) -> bool:
        """Whether anything but the request's own engines decides what becomes of it."""
        if (legs := ask.legs) is None:
            return True
        is_shared = [each.legs.ticket for each in self.asks.values() if each.legs].count(legs.ticket) > 1
        return is_shared or legs.is_lost or legs.is_stale or legs.astray >= 0 or bool(legs.strangers)

    def _probe(self) -> None:
        """A fresh request that is followed must complete as well."""
        super()._probe()
        world, engines = self.world, tuple(range(self.script.decode_engines))
        able = [
            decoder
            for decoder in self.decoders
            if all(decoder.processes) and len(set.intersection(*(set(r.free) for r in decoder.ranks))) >= len(engines)
        ]
        numbers = [PROBE + 10 + engine for engine in range(len(self.prefill))]
        for engine, number in enumerate(numbers):
            ask = Ask(
                number, world.now, BLOCK, False, engines, -1, 0, 0.0, 0, 4.0, 0.01, engine, legs=Legs(number, 0.2)
            )
            self.asks[number] = ask
            self._ask(ask, 0)
        if not world.violation:
            world.run(world.now + PULL.timeout_s + PULL.follow_s)
        for decoder in able:
            if (left := set(numbers) - decoder.received) and not world.violation:
                world.violate(
                    f"decode engine {decoder.number} did not get the fresh request {min(left)} that it follows"
                )

    # -- messages ---------------------------------------------------------------------------------------

    def _heard(self, process: Process, packet: bytes) -> None:
        self.wire.heard(process, packet)
        for message in found.messages if (found := _about_tickets(packet)) else ():
            if isinstance(message, FollowMessage):
                for number in [n for n, route in self._routes.items() if route.ticket == message.ticket][:1]:
                    self.met_at(FOLLOWED, number, process)

    def _censor(self, source: Process, target: Process, packet: bytes) -> bytes:
        """Judge what is said about tickets, and lose some of it, or let it come later, or once more."""
        if (found := _about_tickets(packet)) is None:
            return packet
        left = []
        for message in found.messages:
            if isinstance(message, FollowMessage | Unfollow | Offered):
                self.tickets.sent(source, found, message)
                if isinstance(message, Offered) and message.reason is None:
                    for number in [n for n, route in self._routes.items() if route.ticket == message.ticket][:1]:
                        self.met_at(OFFERED, number, source)
                if not self._arrives(source, target, found, message):
                    continue
            left.append(message)
        if len(left) == len(found.messages):
            return packet
        return encode_packet(found.sender, found.target, left) if left else b""

    def _arrives(self, source: Process, target: Process, packet: Packet, message: Message) -> bool:
        """Whether a message goes on with its packet; it may come later, or once more."""
        names = source.name.partition("#")[0], target.name.partition("#")[0]
        dice = [self.dice.random() for _ in range(4)]
        if dice[0] < self._active("offer_loss", *names):
            return False
        is_late = dice[1] < self._active("offer_delay", *names)
        if is_late or dice[2] < self._active("offer_repeat", *names):
            is_answer = isinstance(message, Offered)
            port = self.world.ports.get(ReplyTo(target.name.encode()) if is_answer else Address(f"sim://{names[1]}"))
            origin = Address(f"sim://{names[0]}") if is_answer else ReplyTo(source.name.encode())
            if port is not None and port.name == target.name:
                alone = encode_packet(packet.sender, packet.target, [message])
                target.call_at(source.now + dice[3] ** 2 * 4.0, port.hear, origin, alone)
        return not is_late

    # -- moments ----------------------------------------------------------------------------------------

    def met_at(self, moment: str, number: int, process: Process | None = None) -> None:
        """Let what waits for such a moment of a request happen, a little after it."""
        for fault in self._moments if self.world.now <= self._seconds else ():
            if fault.when == moment and fault.who[0] == str(number):
                self._moments.remove(fault)
                self.outcomes[f"moment.{fault.kind}"] += 1
                self.world.note("script", fault.kind, fault)
                now = self.world.now if process is None else process.now
                self.world.at(
                    now + self.dice.choice([0.0, 1e-4, 3e-3]) * self.script.wire, partial(self._happens, fault, process)
                )
                return

    def _happens(self, fault: Fault, process: Process | None) -> None:
        ask = self.asks[int(fault.who[0])]
        if len(fault.who) == 1:
            getattr(self, f"_begin_{fault.kind}")(fault)
            return
        is_owner = fault.who[1] == OWNER
        ranks = self.prefill[ask.prefill].ranks if is_owner else self.decode[self.dice.choice(ask.engines)]
        here = [rank for rank in ranks if rank.process is process]
        getattr(self, f"_meet_{fault.kind}")(here[0] if here else self.dice.choice(ranks), fault)

    def _meet(self, fault: Fault) -> None:
        if fault.when in MOMENTS:
            self._moments.append(fault)
        else:
            super()._meet(fault)

    def _begin_cancel(self, fault: Fault) -> None:
        super()._begin_cancel(fault)
        for decoder, followed in self._followed_as(fault):
            decoder.cancel(followed)

    def _begin_cached(self, fault: Fault) -> None:
        for decoder, followed in self._followed_as(fault):
            decoder.release(followed)

    def _followed_as(self, fault: Fault) -> list[tuple[Decoder, _Followed]]:
        return [
            (decoder, each) for number in fault.who for decoder in self.decoders for each in decoder.of(int(number))
        ]

    def _begin_abort(self, fault: Fault) -> None:
        for route in [route for number in fault.who if (route := self._routes.get(int(number)))]:
            book, request_id = route.book, _name(route.ask)
            if book is not None and book.ledger.get(request_id) is not None:
                book.ledger.withdraw(request_id)
                self._carry_out(book)
            elif not route.is_over:
                self._drop(route)

    # -- the router and the prefill engines ---------------------------------------------------------------

    def _ask(self, ask: Ask, patience: int, wanted: Sequence[int] = ()) -> None:
        if ask.legs is None or not self.prefill[ask.prefill].groups:
            super()._ask(ask if ask.legs is None else replace(ask, legs=None), patience, wanted)
        elif (route := self._routes.get(ask.number)) is None:
            self._send_legs(ask, ask.legs)
        elif not route.is_over:
            if route.book is None or route.book not in self._books_of(ask) or route.book.ledger._missing:
                self._drop(route)  # its scheduler has lost it, or a rank has died
            else:
                super()._ask(ask, patience, wanted)

    def _send_legs(self, ask: Ask, legs: Legs) -> None:
        world, dice = self.world, self.dice
        self._routes[ask.number] = route = _Route(ask, world.token("ticket", legs.ticket)(16))
        follow = self._identity(ask, legs) | {"ticket": route.ticket}
        if not legs.is_lost:
            world.at(world.now + dice.random() ** 3 * 0.1, partial(self._take, route))
        for number in (*ask.engines, *legs.strangers):
            at = world.now + legs.late_s + dice.random() ** 3 * 0.1
            world.at(at, partial(self.decoders[number].follow, route, follow, 0))
            if legs.again_s >= 0.0:
                world.at(at + legs.again_s, partial(self.decoders[number].follow, route, follow, 1))

    def _identity(self, ask: Ask, legs: Legs) -> dict[str, Any]:
        """Return what the router knows of the prefill engine."""
        number = ask.prefill if legs.astray < 0 else legs.astray
        seen, newest = self._identities[number], self.prefill[number].groups[0]
        if newest not in seen:
            seen.append(newest)
        ranks = seen[-2] if legs.is_stale and len(seen) > 1 else newest
        shards = {"num_token_shards": ranks.num_token_shards} if ranks.num_token_shards > 1 else {}
        endpoints = [msgspec.to_builtins(each) for each in ranks.endpoints]
        sizes = {"tp_size": ranks.tp_size, "pp_size": ranks.pp_size}
        return {"engine_id": ranks.engine_id, "endpoints": endpoints, **sizes, **shards}

    def _books_of(self, ask: Ask) -> list[_Book]:
        """Return the schedulers of a prefill engine that know its newest addresses."""
        engine, books = self.prefill[ask.prefill], self._books[ask.prefill]
        for ranks in engine.groups:
            if not any(book.ledger.ranks is ranks for book in books):
                book = _Book(PrefillLedger(ranks), [rank.process for rank in engine.ranks])
                books.append(book)
                for rank in engine.ranks:
                    if rank.process.is_dead:
                        book.ledger.rank_died(rank.rank)
        return [book for book in books if book.ledger.ranks in engine.groups]

    def _take(self, route: _Route) -> None:
        """The prefill leg comes to a scheduler."""
        if route.is_over:
            return
        ask, legs, books = route.ask, route.ask.legs, self._books_of(route.ask)
        assert legs is not None
        book = route.book = books[ask.number % len(books)]
        route.owns_ticket = book.ledger.take_ticket(route.ticket)
        if route.owns_ticket != (route.ticket not in book.tickets):
            self.world.violate(f"request {ask.number} brought a ticket, which the scheduler took for that of another")
        book.tickets.setdefault(route.ticket, ask.number)
        self.met_at(TAKEN, ask.number)
        self.world.at(self.world.now + legs.compute_s, partial(self._computed, route))

    def _computed(self, route: _Route) -> None:
        if route.ask.fate == DROPPED and not route.is_over:
            self._drop(route)
        else:
            self._ask(route.ask, 3)

    def _drop(self, route: _Route) -> None:
        """A request ends without a loan; the router ends its decode legs, if it is told before they are."""
        route.is_over = True
        self.outcomes["legs.dropped"] += 1
        if route.book is not None and route.owns_ticket:
            route.book.ledger.withdraw_ticket(route.ticket)
            self._carry_out(route.book)
        if self.dice.random() < 0.5:
            cancel = partial(self._begin_cancel, Fault("cancel", 0.0, 0.0, (str(route.ask.number),)))
            self.world.at(self.world.now + self.dice.random() * 0.5, cancel)

    def _given_up(self, ask: Ask) -> None:
        if ask.legs is not None:
            self._drop(self._routes[ask.number])

    def _make_params(self, engine: _Prefill, ask: Ask, blocks: Sequence[int]) -> dict[str, Any]:
        if ask.legs is None:
            return super()._make_params(engine, ask, blocks)
        route = self._routes[ask.number]
        assert route.book is not None
        return route.book.ledger.lend(
            _name(ask),
            [(0, blocks)],
            ask.tokens,
            written=ask.fate == LENT and not ask.ahead,
            lease_s=ask.lease_s,
            recall=ask.recall,
            ticket=route.ticket if route.owns_ticket else "",
        )

    def _hand_out(self, lent: _Lent, written_at: float) -> None:
        self.known[lent.params["engine_id"], lent.key.token] = lent
        if lent.ask.legs is None:
            super()._hand_out(lent, written_at)
            return
        for rank in lent.engine.ranks:
            if not rank.process.is_dead:
                lent.open.add(rank.name)
                if not lent.ask.ahead:
                    self._fill(rank, rank.words, lent)
        if not lent.open:
            self._settle(lent)
        self.world.at(written_at, partial(self._written, lent, self._routes[lent.ask.number]))

    def _written(self, lent: _Lent, route: _Route) -> None:
        """The prompt is done, or its request is over: its ranks are told."""
        book, name = route.book, _name(lent.ask)
        assert book is not None
        route.is_over = True
        if (loan := book.ledger.get(name)) is not None and not loan.is_written:
            if lent.ask.fate == LENT:
                book.ledger.mark_written(name)
            elif lent.ask.fate == WITHDRAWN:
                book.ledger.withdraw(name)
        if lent.ask.fate == ABORTED:  # without a word
            for rank in lent.engine.ranks:
                self._given_back(rank, lent)
        self._carry_out(book)

    def _carry_out(self, book: _Book) -> None:
        """Take a scheduler's orders to its ranks."""
        for order in book.ledger.take_orders():
            if isinstance(order, Lend):
                self._judge_loan(book, order)
            for rank in self._ranks_of(book):
                at = self.lines.next_at((rank.process, "orders"), self.world.now, 0.3)
                if isinstance(order, Lend):
                    lent = self.lent_by(order.params)
                    lent.lent_from, lent.lent_by = min(lent.lent_from, at), max(lent.lent_by, at)
                rank.process.call_at(at, self._execute, rank, rank.process, book, order)

    def _ranks_of(self, book: _Book) -> list[_Rank]:
        ranks = next(e.ranks for e in self.prefill if book in self._books[e.number])
        return [
            rank for rank in ranks if rank.process is book.processes[rank.rank] and rank.rank in book.ledger._living
        ]

    def _judge_loan(self, book: _Book, order: Lend) -> None:
        lent = self.lent_by(order.params)
        if order.ticket and book.tickets[order.ticket] != lent.ask.number:
            self.world.violate(f"request {lent.ask.number} is lent under a ticket that another brought before")

    def _execute(self, rank: _Rank, process: Process, book: _Book, order: Order) -> None:
        engine, owner = rank.engine, rank.engine.incarnation
        match order:
            case Lend(params=params, ticket=ticket):
                lent = self.lent_by(params)
                if lent.ask.ahead:
                    self._write(rank, lent)
                if ticket:
                    self.tickets.lends(process, owner, ticket, lent)
                exc = self._lend(rank, lent, **({"ticket": ticket} if ticket else {}))
                if exc is not None:
                    if ticket:
                        self.tickets.does_not_lend(owner, ticket, lent)
                    self._report(book, rank, process, Finished(refused=[Refused(order, exc)]))
                else:
                    self.met_at(LENDING, lent.ask.number, process)
            case Withdraw(params=params):
                self._withdraw(rank, process, self.lent_by(params))
            case WithdrawTicket(ticket=ticket):
                self.tickets.withdraws(process, owner, ticket)
                with suppress(EngineClosed):
                    engine.withdraw_ticket(ticket)
            case _:
                self.world.violate(f"{rank.name} is ordered {order}")

    def _withdraw(self, rank: _Rank, process: Process, lent: _Lent) -> None:
        """Take a request back on a rank, whether it lends it or not."""
        leases = [lease for owner, p, lease in self.leases if owner is rank and p is process and lease.lent is lent]
        with suppress(EngineClosed):
            self._tighten(rank)
            rank.engine.withdraw(lent.params)
            self._spent(rank, lent)
        for lease in leases:
            lease.revoked = lease.revoked or Stopwatch.start(process)
        if not leases:
            self.world.at(process.now, partial(self._given_back, rank, lent))

    def _lease_over(self, rank: _Rank, lease: _Lease, end: LeaseEnd) -> None:
        self.tickets.ends(lease.process, lease.lent)
        if lease.lent.ask.legs is not None and (book := self._routes[lease.lent.ask.number].book) is not None:
            self._report(book, rank, lease.process, Finished(finished_sending=[end]))

    def _report(self, book: _Book, rank: _Rank, process: Process, finished: Finished) -> None:
        def arrive() -> None:
            if rank in self._ranks_of(book):
                book.ledger.update(rank.rank, finished)
                self._carry_out(book)
                for loan in book.ledger.take_free():
                    lent = self.lent_by(loan.params)
                    if loan.ends and lent.open:
                        self.world.violate(f"request {lent.ask.number} is free, and {sorted(lent.open)} hold it")

        self.world.at(self.lines.next_at((process, "reports"), process.now), arrive)

    # -- lives ------------------------------------------------------------------------------------------

    def _kill(self, rank: _Rank) -> None:
        process = rank.process
        if not process.is_dead:
            self.world.at(self.world.now + self.dice.random() * DEATH_S, partial(self._died, rank, process))
        super()._kill(rank)

    def _died(self, rank: _Rank, process: Process) -> None:
        if rank.role == "decode":
            self.decoders[rank.engine_number].died(rank.rank, process)
            return
        for book in self._books[rank.engine_number]:
            if book.processes[rank.rank] is process and rank.rank in book.ledger._living:
                book.ledger.rank_died(rank.rank)
                self._carry_out(book)

    def _restart(self, rank: _Rank) -> None:
        super()._restart(rank)
        if rank.role == "decode":
            self._join(rank, rank.process)

    def _join(self, rank: _Rank, process: Process) -> None:
        """Tell the scheduler of a rank once that has started."""
        if rank.engine._started_at < math.inf:
            self.decoders[rank.engine_number].joined(rank.rank, process)
        elif rank.process is process and not process.is_dead:
            self.world.at(self.world.now + 5e-3, partial(self._join, rank, process))

    # -- judgement --------------------------------------------------------------------------------------

    def reads(self, rank: _Rank, request_id: str, key: Key) -> None:
        if self.decoders[rank.engine_number].decided.get(request_id, key) != key:
            self.world.violate(f"{rank.name} reads for {request_id} by other params than its scheduler's")

    @property
    def _is_mild(self) -> bool:
        return False

    def _was_done_with(self, rank: _Rank, lease: _Lease) -> bool:
        is_odd = lease.lent.ask.legs is not None and self.is_odd(lease.lent.ask)
        return not is_odd and super()._was_done_with(rank, lease)

    def _was_told(self, rank: _Rank, lease: _Lease) -> str:
        is_odd = lease.lent.ask.legs is not None and self.is_odd(lease.lent.ask)
        return "" if is_odd else super()._was_told(rank, lease)

    def _check(self) -> None:
        super()._check()
        for decoder in self.decoders:
            if wrong := decoder.wrong():
                self.world.violate(wrong)
        for rank in self.ranks.values():
            if not rank.process.is_dead and rank.engine._home.is_settled and not rank.data.is_closed:
                offers = rank.engine._driver.core.prefill.offers
                if offers.lent or offers.tickets:
                    self.world.violate(f"{rank.name} offers requests that it has back")


def _name(ask: Ask) -> str:
    """Return the id of a request in its prefill engine."""
    return f"P:{ask.number},\n"
