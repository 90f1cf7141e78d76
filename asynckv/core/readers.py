"""Ranks that read from this one: answers to their hellos, and messages to them when service ends.

Every refusal names the rank that was meant and the rank that is here. Hellos wait while no agent serves our memory.
`Draining` and `Goodbye` are a courtesy, and nothing depends on them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from asynckv.core import wire
from asynckv.core.lease import WHAT, refused
from asynckv.core.limits import remember
from asynckv.core.outbox import Outbox
from asynckv.core.types import SHOWN_LETTERS, Cohort, Reason, ReplyTo, rank_name
from asynckv.geometry.gather import Packing
from asynckv.geometry.layout import Layout
from asynckv.told import ReaderMet, ReaderRefused, short

_Rank = tuple[str, int, int]  # a reading rank: its engine, TP rank and stage, as it names itself
DOCTOR = "asynckv-doctor-"  # prefix of the cohort of `asynckv doctor --to`
MAX_READERS = 65_536
MAX_WAITING = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """The names of this rank, once its data plane is up. Nonces start at random, not to be guessed from older runs."""

    engine_id: str
    incarnation: str
    agent_name: str
    metadata: bytes = field(repr=False)
    layout: Layout
    first_nonce: int = 1
    memory_epoch: int = 0
    packing: Packing | None = None

    @property
    def cohort(self) -> Cohort:
        layout = self.layout
        return Cohort(self.engine_id, layout.tp_size, layout.tp_rank, layout.pp_size, layout.pp_stage)

    @property
    def name(self) -> str:
        return rank_name(self.engine_id, self.layout.tp_rank, self.layout.pp_stage, self.incarnation)


class Readers:
    def __init__(self, identity: Identity, outbox: Outbox) -> None:
        self.minor_versions: dict[tuple[str, ReplyTo], int] = {}
        """Protocol minor version by process start and way back, the latest last. A process that greets in another's
        name hears what the other hears, but the other still hears it as well."""
        self._identity, self._outbox = identity, outbox
        self._layout = msgspec.Raw(msgspec.msgpack.encode(identity.layout))
        self._set_agent(identity.agent_name, identity.metadata)
        self._met: OrderedDict[tuple[str, str], _Rank] = OrderedDict()
        """Welcomed process start and the key that it proved -> its rank."""
        self._newest: dict[tuple[_Rank, str], str] = {}  # rank and key -> the process start that was welcomed last
        self._waiting: dict[tuple[str, ReplyTo], tuple[wire.Hello, str]] = {}
        """Last hello of each process that came while there was no agent, with the key that its connection proved."""

    # -- our side ----------------------------------------------------------------------------------

    def agent_lost(self) -> None:
        self._has_agent = False

    def agent_replaced(self, agent_name: str, metadata: bytes, closed_as: str, lends: bool) -> None:
        self._set_agent(agent_name, metadata)
        waiting, self._waiting = self._waiting, {}
        for (source, route), (hello, proven) in waiting.items():
            self.greet(hello, route, source, proven, closed_as, lends)

    def _set_agent(self, agent_name: str, metadata: bytes) -> None:
        self._has_agent = True
        self._agent = agent_name, metadata, hashlib.sha256(metadata).digest()

    def say_draining(self) -> None:
        for (source, route), minor in self.minor_versions.items():
            self._say_draining(route, source, minor)

    def say_goodbye(self) -> None:
        for source, route in self.minor_versions:
            self._outbox.send(route, source, wire.Goodbye())
        self.minor_versions.clear()

    # -- theirs ------------------------------------------------------------------------------------

    def greet(self, hello: wire.Hello, route: ReplyTo, source: str, proven: str, closed_as: str, lends: bool) -> None:
        """Answer a hello. `proven` is its connection's key, and `closed_as` says why this rank takes nothing new."""
        if not self._has_agent:
            # The answer waits until there is an agent to name. If there is no room, the reader repeats its hello.
            if (source, route) in self._waiting or len(self._waiting) < MAX_WAITING:
                self._waiting[source, route] = hello, proven
            return
        answer = self._answer(hello, closed_as, lends)
        if isinstance(answer, wire.Unwelcome):
            self.refuse(hello.reader.name(source), "hello", route, source, answer)
        else:
            self._outbox.send(route, source, answer)
            self._meet(hello, source, proven)
            # Beyond the limit the process that was not heard of for longest goes without the courtesy.
            remember(self.minor_versions, (source, route), hello.minor, MAX_READERS)
            if closed_as:
                self._say_draining(route, source, hello.minor)

    def _answer(self, hello: wire.Hello, closed_as: str, lends: bool) -> wire.Welcome | wire.Unwelcome:
        if hello.major != wire.MAJOR:
            text = f"this side speaks protocol {wire.MAJOR}, the reader {hello.major}; upgrade the older side"
            return wire.Unwelcome(hello.nonce, Reason.PROTOCOL, text)
        if not self._is_meant(hello):
            return self._wrong_target(hello)
        if closed_as and not lends:
            return wire.Unwelcome(hello.nonce, Reason.ENGINE_CLOSED, f"the engine is {closed_as}")
        ours = self._identity
        return wire.Welcome(
            hello.nonce, wire.MAJOR, wire.MINOR, ours.engine_id, *self._agent, self._layout, ours.packing
        )

    def misdirected(self, message: wire.Message, route: ReplyTo, source: str) -> None:
        """Refuse a message that was meant for a process that no longer exists."""
        detail, reader = f"{self._identity.name} listens here now", f"?@{source[:SHOWN_LETTERS]}"
        answer: wire.Refused | wire.Unwelcome | wire.Offered
        match message:
            case wire.Follow(ticket=ticket, nonce=nonce):
                answer = wire.Offered(ticket, nonce, reason=Reason.RESTARTED, detail=detail)
                what, reader = "follow", message.cohort.name(source)
            case wire.Claim() | wire.Renew() | wire.Release():
                answer, what = refused(message, Reason.RESTARTED, detail), WHAT[type(message)]
                if not isinstance(message, wire.Renew):
                    reader = message.cohort.name(source)
            case wire.Hello():
                answer = wire.Unwelcome(message.nonce, Reason.RESTARTED, detail)
                if not self._is_meant(message):
                    answer = self._wrong_target(message)
                what, reader = "hello", message.reader.name(source)
            case _:
                return
        self.refuse(reader, what, route, source, answer)

    def refuse(
        self, name: str, what: str, route: ReplyTo, source: str, answer: wire.Refused | wire.Unwelcome | wire.Offered
    ) -> None:
        self._outbox.send(route, source, answer)
        assert answer.reason is not None
        self._outbox.commands.append(ReaderRefused(name, what, answer.reason, short(answer.detail)))

    # -- inside ------------------------------------------------------------------------------------

    def is_replaced(self, source: str, proven: str) -> bool:
        """Return True if a later start of the same rank, with the same key, was welcomed after this one."""
        rank = self._met.get((source, proven))
        return rank is not None and self._newest.get((rank, proven), source) != source

    def engine_of(self, source: str) -> str:
        """Return the engine that a process start without a key names as its own, or that start itself."""
        rank = self._met.get((source, ""))
        return source if rank is None else rank[0]

    def _meet(self, hello: wire.Hello, source: str, proven: str) -> None:
        reader = hello.reader
        rank = self._met.get((source, proven)) or (reader.id, reader.tp_rank, reader.pp_stage)
        self._newest[rank, proven] = source
        if (source, proven) in self._met:
            return
        self._met[source, proven] = rank
        if len(self._met) > MAX_READERS:
            (oldest, key), rank = self._met.popitem(last=False)
            if self._newest.get((rank, key)) == oldest:
                del self._newest[rank, key]
        # `asynckv doctor --to` never reads, so naming it would make people look for a process that has long ended.
        if not reader.id.startswith(DOCTOR):
            self._outbox.commands.append(ReaderMet(reader.name(source), source, hello.minor))

    def _is_meant(self, hello: wire.Hello) -> bool:
        layout = self._identity.layout
        here = self._identity.engine_id, layout.pp_stage, layout.tp_rank
        return here == (hello.engine_id, hello.pp_stage, hello.tp_rank)

    def _wrong_target(self, hello: wire.Hello) -> wire.Unwelcome:
        there = rank_name(hello.engine_id, hello.tp_rank, hello.pp_stage)
        text = f"{self._identity.name} listens here, not {there}; correct the endpoint's address"
        return wire.Unwelcome(hello.nonce, Reason.WRONG_TARGET, text)

    def _say_draining(self, route: ReplyTo, source: str, minor: int) -> None:
        if minor >= 1:
            self._outbox.send(route, source, wire.Draining())
