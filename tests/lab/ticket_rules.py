"""What ranks of a simulated service may say of tickets, judged by packets as they leave."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from asynckv.core.types import Reason, decode_params
from asynckv.core.wire import Follow, Message, Offered, Packet, Unfollow, decode_offer, decode_packet
from asynckv.errors import AsyncKVError, RemoteProtocolError
from tests.lab.oracles import TURN_S, Stopwatch, is_about
from tests.lab.service import Lent
from tests.lab.world import Process

_TAGS = {kind.__struct_config__.tag for kind in (Follow, Unfollow, Offered)}


@lru_cache(maxsize=64)
def about_tickets(packet: bytes) -> Packet | None:
    """Return what a packet says, if it says anything about a ticket."""
    with suppress(AsyncKVError):
        return decode_packet(packet) if is_about(packet, _TAGS) else None
    return None


@dataclass(slots=True)
class _Loan:
    """A request that a rank lends under a ticket."""

    lent: Lent
    since: Stopwatch
    over: Stopwatch | None = None
    """Since when it is lent no more."""


class Tickets:
    """Rules about what ranks say of tickets.

    A rank offers what it lends under that ticket, while it lends it, and nothing else. It says that a request was
    withdrawn or has ended if that is so.
    """

    def __init__(self, service: Any) -> None:
        self._service, self._world = service, service.world
        self._loans: dict[tuple[str, str], _Loan] = {}
        """By process start of the owner, and ticket."""
        self._withdrawn: dict[tuple[str, str], float] = {}
        self.asked: dict[tuple[Process, str], tuple[str, float]] = {}
        """By reader and ticket: the process start that was asked last, and when a rank was asked first."""
        self._questions: dict[tuple[str, int], str] = {}
        """Tickets, by the reader's process start and the transmission that asked."""

    def lends(self, process: Process, owner: str, ticket: str, lent: Lent) -> None:
        """A rank is about to lend a request. A ticket belongs to the first."""
        self._loans.setdefault((owner, ticket), _Loan(lent, Stopwatch.start(process)))

    def does_not_lend(self, owner: str, ticket: str, lent: Lent) -> None:
        if self._loans[owner, ticket].lent is lent:
            del self._loans[owner, ticket]

    def ends(self, process: Process, lent: Lent) -> None:
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
            case Follow(ticket=ticket):
                _, since = self.asked.get((source, ticket), ("", source.now))
                self.asked[source, ticket] = packet.target, since
                self._questions[packet.sender, message.nonce] = ticket
            case Offered(ticket=ticket, nonce=nonce, reason=None):
                if self._questions.get((packet.target, nonce), ticket) != ticket:
                    self._world.violate(f"{source.name} offers to a follower of another ticket")
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
