"""Simulated services whose router sends both legs of a request at once, so that decode engines follow it.

The schedulers are the package's ledgers, beside all processes: their orders reach each rank one after the other, and
the reports come back as late. A request without legs is served beside them, as in other services.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from asynckv.core.types import Address, Key, ReplyTo
from asynckv.core.wire import Follow, Message, Offered, Packet, Unfollow, encode_packet
from asynckv.embed import Lend, Order, Withdraw, WithdrawTicket
from asynckv.embed import desk as desk_module
from asynckv.embed.ledgers import PrefillLedger
from asynckv.embed.orders import Finished, Refused
from asynckv.errors import EngineClosed
from asynckv.results import LeaseEnd
from asynckv.scheduler import PrefillRanks
from tests.lab.decoder import STEP_S, Decoder, Followed
from tests.lab.doors import Doors
from tests.lab.follow_script import FOLLOWED, LENDING, MESSAGES, MOMENTS, OFFERED, OWNER, TAKEN
from tests.lab.oracles import Stopwatch
from tests.lab.script import ABORTED, BLOCK, DROPPED, LENT, WITHDRAWN, Ask, Fault, Legs, Script
from tests.lab.service import PROBE, PULL, Lease, Lent, Listener, Prefill, Rank, Service
from tests.lab.ticket_rules import Tickets, about_tickets
from tests.lab.world import Process

ORDER_S = 0.3
"""Seconds that an order takes to a rank of a prefill engine, at most."""

SETTLE_S = 1.0
"""Seconds after which what was offered is released, if nothing goes wrong."""

DEATH_S = 0.3
"""Seconds until a scheduler knows that a rank has died, at most."""


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
    withdrawn_at: float = math.inf
    """When its scheduler ended it without a loan."""


class Lines:
    """Ways to and from processes, on which nothing passes by another."""

    def __init__(self, service: Any) -> None:
        self._service, self._last = service, defaultdict[object, float](float)

    def next_at(self, way: object, now: float, most_s: float = STEP_S) -> float:
        self._last[way] = max(self._last[way], now + self._service.dice.random() ** 3 * most_s)
        return self._last[way]


class FollowService(Service):
    """A service with requests that are followed."""

    def __init__(
        self, script: Script, doors: Callable[[Process], Doors] = Doors, listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(script, doors, listeners)
        self.dice = self.world.random_of("followed")
        self.lines, self.tickets = Lines(self), Tickets(self)
        self.asks = {ask.number: ask for ask in script.asks}
        self.known: dict[tuple[str, str], Lent] = {}
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

    def lent_by(self, params: Mapping[str, Any]) -> Lent:
        """Return the request that params are of."""
        return self.known[params["engine_id"], msgspec.convert(params["key"], Key).token]

    def withdrawn_at(self, number: int) -> float:
        """Return when the ranks of a prefill engine knew that a request had ended without a loan; never: infinity."""
        route = self._routes[number]
        return route.withdrawn_at + ORDER_S if route.owns_ticket else math.inf

    @property
    def troubled_until(self) -> float:
        """When the last fault that has begun, and what it has delayed, was over."""
        begun = [fault for fault in self.script.faults if self.begins_s + fault.at <= self.world.now]
        ends = [self.begins_s + fault.at + fault.seconds + 4.0 * ("delay" in fault.kind) for fault in begun]
        return math.inf if any(fault.when in MOMENTS for fault in begun) else max(ends, default=0.0)

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
        for message in found.messages if (found := about_tickets(packet)) else ():
            if isinstance(message, Follow):
                for number in [n for n, route in self._routes.items() if route.ticket == message.ticket][:1]:
                    self.met_at(FOLLOWED, number, process)

    def _censor(self, source: Process, target: Process, packet: bytes) -> bytes:
        """Judge what is said about tickets, and lose some of it, or let it come later, or once more."""
        if (found := about_tickets(packet)) is None:
            return packet
        left = []
        for message in found.messages:
            if isinstance(message, Follow | Unfollow | Offered):
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

    def _followed_as(self, fault: Fault) -> list[tuple[Decoder, Followed]]:
        return [
            (decoder, each) for number in fault.who for decoder in self.decoders for each in decoder.of(int(number))
        ]

    def _begin_abort(self, fault: Fault) -> None:
        for route in [route for number in fault.who if (route := self._routes.get(int(number)))]:
            book, request_id = route.book, _name(route.ask)
            if book is not None and (loan := book.ledger.get(request_id)) is not None:
                if loan.ranks is None:
                    route.withdrawn_at = min(route.withdrawn_at, self.world.now)
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
        route.is_over, route.withdrawn_at = True, min(route.withdrawn_at, self.world.now)
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

    def _make_params(self, engine: Prefill, ask: Ask, blocks: Sequence[int]) -> dict[str, Any]:
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

    def _hand_out(self, lent: Lent, written_at: float) -> None:
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

    def _written(self, lent: Lent, route: _Route) -> None:
        """The prompt is done, or its request is over: its ranks are told."""
        book, name = route.book, _name(lent.ask)
        assert book is not None
        route.is_over = True
        if (loan := book.ledger.get(name)) is not None and not loan.is_written:
            if lent.ask.fate == LENT:
                book.ledger.mark_written(name)
            elif lent.ask.fate == WITHDRAWN:
                route.withdrawn_at = min(route.withdrawn_at, self.world.now)
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
                at = self.lines.next_at((rank.process, "orders"), self.world.now, ORDER_S)
                if isinstance(order, Lend):
                    lent = self.lent_by(order.params)
                    lent.lent_from, lent.lent_by = min(lent.lent_from, at), max(lent.lent_by, at)
                rank.process.call_at(at, self._execute, rank, rank.process, book, order)

    def _ranks_of(self, book: _Book) -> list[Rank]:
        ranks = next(e.ranks for e in self.prefill if book in self._books[e.number])
        return [
            rank for rank in ranks if rank.process is book.processes[rank.rank] and rank.rank in book.ledger._living
        ]

    def _judge_loan(self, book: _Book, order: Lend) -> None:
        lent = self.lent_by(order.params)
        if order.ticket and book.tickets[order.ticket] != lent.ask.number:
            self.world.violate(f"request {lent.ask.number} is lent under a ticket that another brought before")

    def _execute(self, rank: Rank, process: Process, book: _Book, order: Order) -> None:
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

    def _withdraw(self, rank: Rank, process: Process, lent: Lent) -> None:
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

    def _lease_over(self, rank: Rank, lease: Lease, end: LeaseEnd) -> None:
        self.tickets.ends(lease.process, lease.lent)
        if lease.lent.ask.legs is not None and (book := self._routes[lease.lent.ask.number].book) is not None:
            self._report(book, rank, lease.process, Finished(finished_sending=[end]))

    def _report(self, book: _Book, rank: Rank, process: Process, finished: Finished) -> None:
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

    def _kill(self, rank: Rank) -> None:
        process = rank.process
        if not process.is_dead:
            self.world.at(self.world.now + self.dice.random() * DEATH_S, partial(self._died, rank, process))
        super()._kill(rank)

    def _died(self, rank: Rank, process: Process) -> None:
        if rank.role == "decode":
            self.decoders[rank.engine_number].died(rank.rank, process)
            return
        for book in self._books[rank.engine_number]:
            if book.processes[rank.rank] is process and rank.rank in book.ledger._living:
                book.ledger.rank_died(rank.rank)
                self._carry_out(book)

    def _restart(self, rank: Rank) -> None:
        was_dead = rank.process.is_dead  # else another fault has started it again
        super()._restart(rank)
        if was_dead and rank.role == "decode":
            self._join(rank, rank.process)

    def _join(self, rank: Rank, process: Process) -> None:
        """Tell the scheduler of a rank once that has started."""
        if rank.engine._started_at < math.inf:
            self.decoders[rank.engine_number].joined(rank.rank, process)
        elif rank.process is process and not process.is_dead:
            self.world.at(self.world.now + 5e-3, partial(self._join, rank, process))

    # -- judgement --------------------------------------------------------------------------------------

    def reads(self, rank: Rank, request_id: str, key: Key) -> None:
        if self.decoders[rank.engine_number].decided.get(request_id, key) != key:
            self.world.violate(f"{rank.name} reads for {request_id} by other params than its scheduler's")

    @property
    def _troubles(self) -> Sequence[Fault]:
        return [fault for fault in self.script.faults if fault.kind not in (*MESSAGES, "cached")]

    def _was_done_with(self, rank: Rank, lease: Lease) -> bool:
        is_odd = lease.lent.ask.legs is not None and self.is_odd(lease.lent.ask)
        return not is_odd and super()._was_done_with(rank, lease)

    def _was_told(self, rank: Rank, lease: Lease) -> str:
        is_odd = lease.lent.ask.legs is not None and self.is_odd(lease.lent.ask)
        return "" if is_odd else super()._was_told(rank, lease)

    def _was_spared(self, lent: Lent) -> bool:
        """Whether nothing kept readers from releasing a request that they had cached whole."""
        ask = lent.ask
        if ask.legs is None or self.is_odd(ask) or ask.prefill not in self.spared:
            return False
        since = [self.decoders[engine].spared.get(ask.number, math.inf) for engine in ask.engines]
        until = min(min(since) + PULL.follow_s, lent.lent_from + ask.lease_s)
        return max(lent.lent_by, *since) + SETTLE_S < until

    def _check(self) -> None:
        super()._check()
        for rank, _, lease in self.leases:
            if lease.ended == "expired" and self._was_spared(lease.lent):
                self.world.violate(f"nobody released request {lease.ask} on {rank.name}, whose prompt was cached whole")
        for decoder in self.decoders:
            if wrong := decoder.wrong():
                self.world.violate(wrong)
        for rank in self.ranks.values():
            if not rank.process.is_dead and rank.engine._home.is_settled and not rank.data.is_closed:
                core = rank.engine._driver.core
                if core.prefill.offers.lent or core.prefill.offers.tickets:
                    self.world.violate(f"{rank.name} offers requests that it has back")
                if core.decode.follows.by_id:
                    self.world.violate(f"{rank.name} follows requests for ever")


def _name(ask: Ask) -> str:
    """Return the id of a request in its prefill engine."""
    return f"P:{ask.number},\n"
