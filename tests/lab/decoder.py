"""The scheduler of a simulated decode engine whose requests are followed, and what its ranks do for it.

The scheduler is a `DecodeLedger`, beside all processes. Its orders reach each rank's desk one after the other, and the
reports come back as late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from asynckv.core.source import MAX_CLAIM_PAUSE_S
from asynckv.core.types import Key, decode_follow, decode_params
from asynckv.embed import Announce, Cancel, EngineDesk, Follow, Offer, Order, Pull
from asynckv.embed.ledgers import DecodeLedger, Fetch, State
from asynckv.embed.orders import Failed, Finished
from asynckv.errors import AsyncKVError, EngineClosed, LocalProtocolError, NoOffer
from tests.lab.follow_script import ANNOUNCED, PULLED, TOLD
from tests.lab.oracles import TURN_S, Stopwatch
from tests.lab.script import BLOCK
from tests.lab.service import (
    FREED,
    HOSTILE_S,
    LEASE,
    PULL,
    UNTROUBLED_PACKETS,
    UNTROUBLED_S,
    Attempt,
    Lent,
    Rank,
    number_of,
)
from tests.lab.world import Process

STEP_S = 0.01
"""Seconds that an order takes to its rank, or a report back, at most."""

OWN_S = 1.5
"""A scheduler gives a follow up so much later than its ranks do."""


@dataclass(slots=True, eq=False)
class Followed:
    """A request of a decode engine."""

    route: Any
    fetch: Fetch
    since: float
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

    def __init__(self, decoder: Decoder, rank: Rank, lent: Lent, name: str) -> None:
        super().__init__(decoder.service, rank, lent)
        self.name, self.is_open, self.is_odd = name, False, decoder.service.is_odd(lent.ask)
        self._decoder = decoder
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
        lent, (offered_at, _) = self.lent, self._decoder.offered[self.lent]
        at = min(self.announced_at, offered_at + 2 * STEP_S)
        lasts_until = min(at + PULL.announce_s * 0.99, lent.lent_from + LEASE.max_lease_s - 2.0)
        return self.is_odd or at > lent.lent_from + lent.ask.lease_s - 1.0 or called > lasts_until

    def _give_back(self, blocks: Sequence[int]) -> None:
        """The scheduler gives them back."""


class Decoder:
    """A decode engine's scheduler, and what its ranks do for it."""

    def __init__(self, service: Any, number: int) -> None:
        self.service, self.world, self.number = service, service.world, number
        self.ranks = service.decode[number]
        self.ledger = DecodeLedger(len(self.ranks))
        self.processes: list[Process | None] = [None] * len(self.ranks)
        """Those that the scheduler believes alive; None: it knows of none."""
        self.followed: dict[str, Followed] = {}
        self.blocks: dict[str, tuple[list[int], list[Process]]] = {}
        """By name of a pull: its blocks, and where they were taken."""
        self.followings: dict[tuple[Process, str], _Following] = {}
        self.fetching: dict[tuple[Process, str], Fetching] = {}
        self.tasks: list[tuple[Fetching, asyncio.Task[None]]] = []
        self.received: set[int] = set()
        """Numbers of requests that were received on all ranks."""
        self.spared: dict[int, float] = {}
        """Numbers of requests that were cached whole before they were offered, and since when each was followed."""
        self.decided: dict[str, Key] = {}
        """The key that each request was decided to have, by name."""
        self.offered: dict[Lent, tuple[float, list[tuple[Process, int]]]] = {}
        """What any rank was offered: when first, and by whom it is to be released since."""
        self.heard: set[Lent] = set()
        """What the scheduler knows to be offered; a rank may die before it can say so."""
        self.is_lazy = self.world.random_of("lazy", number).random() < 0.3
        """It takes no step, and so no report, while it has no request, as vLLM does."""
        self._untaken: list[tuple[int, Process, Finished]] = []
        self._desks: dict[Process, EngineDesk] = {}

    # -- the scheduler ------------------------------------------------------------------------------

    def begin(self) -> None:
        self.processes = [rank.process for rank in self.ranks]

    def follow(self, route: Any, follow: dict[str, Any], number: int) -> None:
        request_id = f"D{route.ask.number}" + f"~n{number}" * bool(number)
        fetch = self.ledger.follow(request_id, follow)
        self.service.outcomes["follow.known" if fetch is None else "follow"] += 1
        if fetch is None:
            return
        self.followed[request_id] = followed = Followed(route, fetch, self.world.now)
        legs = route.ask.legs
        assert legs is not None
        self.world.at(self.world.now + PULL.follow_s + OWN_S, partial(self._time_is_over, followed))
        if legs.cached_s >= 0.0:
            self.world.at(self.world.now + legs.cached_s, partial(self.release, followed))
        self.step()

    def release(self, followed: Followed) -> None:
        """The whole prompt is cached here."""
        if self.followed.get(followed.fetch.request_id) is followed and followed.fetch.name not in self.blocks:
            self.service.outcomes[f"follow.cached.{followed.fetch.state.value}"] += 1
            if followed.fetch.state is State.FOLLOWING:
                self.spared.setdefault(followed.route.ask.number, followed.since)
            self.ledger.release(followed.fetch.request_id)
            del self.followed[followed.fetch.request_id]
            self.step()

    def cancel(self, followed: Followed) -> None:
        if self.followed.get(followed.fetch.request_id) is followed:
            self.service.outcomes[f"follow.cancelled.{followed.fetch.state.value}"] += 1
            self.ledger.cancel(followed.fetch.request_id)
            del self.followed[followed.fetch.request_id]
            self.step()

    def of(self, number: int) -> list[Followed]:
        return [each for each in self.followed.values() if each.route.ask.number == number]

    def _time_is_over(self, followed: Followed) -> None:
        if self.followed.get(followed.fetch.request_id) is followed and followed.fetch.params is None:
            self.service.outcomes["follow.refused_by_scheduler"] += not followed.fetch.errors
            text = f"request {followed.fetch.request_id!r} was offered nothing in time"
            self.ledger.refuse(followed.fetch.request_id, NoOffer(text, reason="no_offer", failed_in="follow"))
            self.step()

    def step(self) -> None:
        """Decide what can be decided, and hand out the orders."""
        now = self.world.now
        self._take_reports()
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

    def _pull(self, followed: Followed) -> None:
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
            queued = [each.fetch for each in self.followed.values()]
            process.call_at(self.world.now + 2 * STEP_S, self._follows, index, process, queued)

    def _follows(self, index: int, process: Process, queued: Sequence[Fetch]) -> None:
        """A rank in the place of one that died follows what its engine follows."""
        missed = [x.name for x in queued if x.state is State.FOLLOWING and (process, x.name) not in self.followings]
        if missed and self.processes[index] is process:
            self.world.violate(f"{self.ranks[index].name} does not follow {missed}")

    def _report(self, index: int, process: Process, finished: Finished) -> None:
        self._untaken.append((index, process, finished))
        if self.followed or self.blocks or not self.is_lazy:
            self.step()

    def _take_reports(self) -> None:
        untaken, self._untaken = self._untaken, []
        for index, process, finished in untaken:
            if self.processes[index] is process:
                self.heard |= {self.service.lent_by(offer.params) for offer in finished.offered}
                self.ledger.update(index, finished)

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
                case Cancel(request_id=name, params=params, follows_on=follows_on):
                    if (following := self.followings.get((process, name))) is not None:
                        following.is_unwanted = True
                    known = None if follows_on else self.fetching.get((process, name))
                    if params is not None and (known is None or not known.is_pulling):
                        known = self._fetching(rank, name, params)
                        known.said |= {"complete", "failed", "cancelled"}
                    if known is not None:
                        known.give_up()
                        known.said.add("cancelled")
                        service.discharged.setdefault((known.lent.ask.number, rank.name), process.now)
                case _:
                    self.world.violate(f"{rank.name} is ordered {order}")
        process.loop.call_soon(self._submit, desk, orders)  # once the blocks of its pulls are theirs

    @staticmethod
    def _submit(desk: EngineDesk, orders: Sequence[Order]) -> None:
        with suppress(EngineClosed):
            desk.submit(orders)

    def _fetching(self, rank: Rank, name: str, params: Any) -> Fetching:
        place, lent = (rank.process, name), self.service.lent_by(params)
        if place not in self.fetching or self.fetching[place].lent is not lent:
            self.fetching[place] = fetching = Fetching(self, rank, lent, name)
            self.service.attempts.append(fetching)
        return self.fetching[place]

    def _decide(self, rank: Rank, name: str, key: Key) -> None:
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

    def _judge_offer(self, rank: Rank, process: Process, offer: Offer) -> None:
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
            if self.is_lazy:
                self.spared.pop(lent.ask.number, None)  # it crossed the release, and only a request makes a next step
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
        if following.clock.ran_s > PULL.follow_s * 1.001 + TURN_S:
            self.world.violate(f"{process.name} followed {failed.request_id} for {following.clock.ran_s:.3f} s")
        if following.is_unwanted or rank.is_moving or rank.is_draining:
            return
        took_s = process.now - following.clock.at
        if reason == "no_offer" and took_s < PULL.follow_s - TURN_S:
            self.world.violate(f"{process.name} follows {failed.request_id} no more after {took_s:.3f} s")
        self._in_time(rank, process, failed.request_id, following, f"ended ({reason})")

    def _in_time(self, rank: Rank, process: Process, name: str, following: _Following, how: str) -> None:
        """What no fault touches is told as soon as it is known."""
        script, ask = self.service.script, self.service.asks[number_of(name)]
        if self.service.is_odd(ask):
            return
        owner, asked_at = self.service.tickets.asked.get((process, following.ticket), ("", math.inf))
        lent_at, withdrawn_at = self.service.tickets.known_at(owner, following.ticket)
        if how == "ended (no_offer)" and self.service.tickets.is_lent(owner, following.ticket):
            # A rank may be away for longer than the fault that its pauses are of.
            back = (until for each in self.service.ranks.values() for _, until in each.process.away)
            begin = max(lent_at, asked_at, self.service.troubled_until, *back)
            if begin + MAX_CLAIM_PAUSE_S + 1.0 < following.clock.at + PULL.follow_s:
                self.world.violate(f"{process.name} follows {name}, which has long been lent, and it {how}")
        if not (script.is_only_hostile or ask.prefill in self.service.spared):
            return
        known_at = min(lent_at, withdrawn_at)
        bound = UNTROUBLED_S + UNTROUBLED_PACKETS * 2.5e-4 * script.wire + HOSTILE_S * script.is_only_hostile
        begin = max(known_at, following.clock.at)
        is_too_late = begin + bound > following.clock.at + PULL.follow_s
        if how == "was offered" and process.now > begin + bound:
            self.world.violate(
                f"{process.name} {how} {name} {process.now - begin:.3f} s after it could be, not {bound:.3f}"
            )
        elif how != "was offered" and known_at == lent_at < math.inf and not is_too_late:
            if self.service.tickets.is_lent(owner, following.ticket):
                self.world.violate(f"{process.name} follows {name}, which is lent, and it {how}")
        elif how == "ended (no_offer)":
            begin = max(min(withdrawn_at, self.service.withdrawn_at(ask.number)), following.clock.at)
            if begin + bound < following.clock.at + PULL.follow_s:
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
        self._take_reports()
        for lent, (at, living) in () if self.is_lazy else self.offered.items():
            for process, epoch in living if lent in self.heard else ():
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
