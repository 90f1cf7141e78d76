"""Why blocks came back late in a simulated service, by one who saw everything: a judge of what is concluded from logs.

Logs tell what each process knew. A `Witness` sits beside the world: it sees every packet leave and every packet arrive
(or not), which process died and when, which loop was away, the readers of all params, the calls of each decode engine
to asynckv, and what the engines' own tables say of their leases and pulls. `Witness.late` lists every lease and every
pull with late blocks, each with all the reasons that are true of it (`OF_A_DEBT`, `OF_AN_ATTEMPT`, `OF_AN_UNASKED`; of
a pull, `Witness._pull`). It reads no log.

Late is a lease that expired, or ran on beyond its time at the end of the simulation; and a failed pull whose blocks
came back after its outcome was told, or never.

Several things may be true of one late request at once (its reader's loop was away, then its process died), and each is
a true answer. What befell it by script is the first of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from asynckv.core import notes
from asynckv.core.outbox import Command, DetachRead, LeaseOver, Milestone, PullReached
from asynckv.core.pull import Kind, Pull
from asynckv.core.types import How, Key, Outcome, Reason, TransferId, rank_name
from asynckv.core.wire import (
    Ack,
    Claim,
    Granted,
    Hello,
    Message,
    Refused,
    Release,
    Renew,
    Unwelcome,
    Welcome,
    decode_packet,
)
from asynckv.engine import Engine
from asynckv.errors import AsyncKVError
from tests.lab.logs import Logs
from tests.lab.script import Script
from tests.lab.service import LEASE, PULL, Attempt, Service
from tests.lab.world import Process

AWAY_S = 1.0
"""A loop that was away for as long is no accident."""

AT_ONCE_S = 0.01
"""Seconds before an end, within which an arrival may have been taken after it: a loop that comes back finds both."""

LONG_S = 8.0
"""A pull may have begun so long before."""

HANDSHAKE_S = 2.5
"""A handshake that takes longer has failed."""

STALE = {"restarted", "stale_memory"}


@dataclass(slots=True)
class Owed:
    """A reader that had not released when a lease ended.

    Attributes:
        reader: Its name as in logs, without the start of a process: `decode0/tp1`.
        whys: All that is true of it.
        starts: Its processes that were concerned, as the first letters of their incarnations.
    """

    reader: str
    whys: set[str] = field(default_factory=set)
    reasons: set[str] = field(default_factory=set)
    """In what words its messages were refused."""
    starts: set[str] = field(default_factory=set)


@dataclass(slots=True)
class LateLease:
    """A lease with blocks that came back late, or not at all.

    Attributes:
        ask: The request's number in the script.
        owner: The rank that lent it, as in logs: `prefill/tp0@0a1b2c3d`.
        is_sure: Anybody would call it late. (Not so if the owner's process was dead before it could say.)
    """

    ask: int
    owner: str
    engine_id: str
    request_id: str
    sequence: int
    state: str
    is_sure: bool
    owed: list[Owed]
    ended_at: float
    told_at: float
    """When its process said so; it may have been away just then."""
    gone: set[str]
    """Ends of its engine while it was lent: `owner_died`, `owner_closed`."""


@dataclass(slots=True)
class LatePull:
    """A pull with blocks that came back after its outcome, or never."""

    ask: int
    reader: str
    """As in logs: `decode0/tp1@0a1b2c3d`."""
    request_id: str
    prefill_request_id: str
    engine_id: str
    """Of the prefill engine."""
    sequence: int
    pull_id: str
    is_sure: bool
    is_returned: bool
    whys: set[str]


@dataclass(slots=True)
class Forgotten:
    """An announcement that was not followed up until its time was up."""

    ask: int
    reader: str
    request_id: str
    prefill_request_id: str
    engine_id: str
    sequence: int
    pull_id: str


@dataclass(slots=True)
class _Pulled:
    pull: Pull
    process: Process
    ended_at: float
    was_held: bool
    whys: set[str]
    returned_at: float = math.inf
    retired_at: float = math.inf


@dataclass(frozen=True, slots=True)
class _Said:
    at: float
    process: str
    other: str
    """Rank or process start that it was said to, or heard from."""
    target: str
    """The incarnation that is meant, of what was sent; that it is from, of what was heard."""
    message: Any


@lru_cache(maxsize=4096)
def _opened(packet: bytes) -> tuple[str, str, tuple[Message, ...]]:
    try:
        opened = decode_packet(packet)
    except AsyncKVError:
        return "", "", ()
    return opened.sender, opened.target, opened.messages


class Witness:
    """Sees one service from its beginning to its end."""

    def __init__(self) -> None:
        self.service: Service
        self._incarnations: dict[str, list[tuple[float, str]]] = defaultdict(list)
        """Since when a process has which; another after each sleep."""
        self._starts: dict[str, dict[str, None]] = defaultdict(dict)
        """Of each process, its incarnations (another after each sleep), in order."""
        self._pulled: dict[tuple[str, str], _Pulled] = {}
        self._last_said: dict[str, float] = {}
        self._forgotten: list[tuple[Process, Pull]] = []
        self._ended: dict[int, float] = {}
        """Leases, by when their ends were told."""
        self._sent: dict[str, list[_Said]] = defaultdict(list)
        """By token: what readers said."""
        self._heard: dict[str, list[_Said]] = defaultdict(list)
        """By token: what arrived, on either side."""
        self._greeted: list[_Said] = []
        self._welcomed: list[_Said] = []
        self._strangers: dict[str, list[float]] = defaultdict(list)
        """Times at which a process outside the service greeted one of its processes."""
        self._lost: list[tuple[float, str, str]] = []
        self._noted: dict[tuple[str, str], list[float]] = defaultdict(list)
        """When a process lost its agent, or began to close or to fall asleep."""

    # -- while it runs -------------------------------------------------------------------------------------------------

    def listen(self, process: Process, engine: Engine) -> None:
        """See what becomes of an engine's leases and pulls, by its core's word."""
        self._incarnations[process.name].append((-math.inf, engine.incarnation))
        self._starts[process.name][engine.incarnation] = None
        driver = engine._driver
        obey = driver._obey

        def watched() -> None:
            commands, running = driver.core.outbox.commands, driver.data.running  # type: ignore[attr-defined]
            asked = {command.transfer_id for command in commands if isinstance(command, DetachRead)}
            detached = {t for t in asked if t in running and running[t].is_staged}
            for command in commands:
                self._command(process, command, detached)
            obey()

        driver._obey = watched  # type: ignore[method-assign]
        for name in ("aclose", "suspend", "resume"):
            self._wrap(process, engine, name)

    def _wrap(self, process: Process, engine: Engine, name: str) -> None:
        call = getattr(engine, name)

        async def ends(*args: Any, **options: Any) -> Any:
            if name != "resume":
                self._noted[process.name, "ends"].append(process.now)
                return await call(*args, **options)
            result = await call(*args, **options)
            self._incarnations[process.name].append((process.now - AT_ONCE_S, engine.incarnation))
            self._starts[process.name][engine.incarnation] = None
            return result

        setattr(engine, name, ends)

    def attend(self, service: Service) -> None:
        """See what is sent in a service that is about to begin."""
        self.service = service
        world = service.world
        on_sent, censor, fate = world.on_sent, world.censor, world.fate

        def sent(process: Process, to: str, packet: bytes) -> None:
            sender, target, messages = _opened(packet)
            if sender:
                self._starts[process.name][sender] = None
            for message in messages:
                said = _Said(process.now, process.name, to.removeprefix("sim://"), target, message)
                if isinstance(message, Claim | Renew | Release):
                    self._sent[message.key.token].append(said)
                elif isinstance(message, Hello):
                    self._greeted.append(said)
            on_sent(process, to, packet)

        def censored(source: Process, target: Process, packet: bytes) -> bytes:
            left = censor(source, target, packet)
            if left != packet:
                self._lost.append((source.now, source.name, target.name))
            return left

        def fated(sender: str, to: str, rng: Any) -> Any:
            delays = fate(sender, to, rng)
            if not delays:
                self._lost.append((world.now, sender, to))
            return delays

        world.on_sent, world.censor, world.fate = sent, censored, fated

    def _command(self, process: Process, command: Command, detached: Set[TransferId]) -> None:
        match command:
            case PullReached(pull, Milestone.ENDED) if pull.lists is None and pull.kind is not Kind.DISCHARGE:
                if pull.reason is Reason.TIMEOUT:
                    self._forgotten.append((process, pull))
            case PullReached(pull, Milestone.ENDED) if pull.lists is not None:
                whys = {
                    *(["transfer_running"] if any(x.running - detached for x in pull.sources) else []),
                    *(["transfer_doubt"] if any(x.doubtful for x in pull.sources) else []),
                }
                is_held = not pull.is_returned and bool(whys)  # what is detached now returns before this is told
                self._pulled[process.name, pull.pull_id] = _Pulled(pull, process, process.now, is_held, whys)
            case PullReached(pull, Milestone.RETURNED) if (
                known := self._pulled.get((process.name, pull.pull_id))
            ) is not None:
                known.returned_at = process.now
            case PullReached(pull, Milestone.RETIRED) if (
                known := self._pulled.get((process.name, pull.pull_id))
            ) is not None:
                known.retired_at = process.now
            case LeaseOver(lease):
                self._ended[id(lease)] = process.now
            case _:
                pass

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def conclude(self, logs: Logs) -> None:
        """Read the world's own trace of what arrived, and until when each process said anything."""
        self._last_said = {log.process: max(log.times, default=-math.inf) for log in logs.processes}
        for at, name, what, packet in self.service.world.trace:
            if what == "loses its agent":
                self._noted[name, "agent"].append(at)
            if what != "received" or not isinstance(packet, bytes):
                continue
            sender, _, messages = _opened(packet)
            for message in messages:
                said = _Said(at, name, "", sender, message)
                if isinstance(message, Claim | Renew | Release | Granted | Refused | Ack):
                    self._heard[message.key.token].append(said)
                elif isinstance(message, Welcome | Unwelcome):
                    self._welcomed.append(said)
                elif isinstance(message, Hello) and not self._rank_of(sender):
                    self._strangers[name].append(at)

    def late(self) -> tuple[list[LateLease], list[LatePull]]:
        """Say which leases and which pulls were late, and all that is true of why."""
        return [x for x in map(self._lease, self.service.leases) if x is not None], [
            x for x in map(self._pull, self._pulled.values()) if x is not None
        ]

    def forgotten(self) -> list[Forgotten]:
        """Say which announcements ended by themselves."""
        return [
            Forgotten(
                int(pull.request_id[1:]),
                self._name(self.service.ranks[process.name.partition("#")[0]], pull.pull_id.partition("-")[0]),
                pull.request_id,
                pull.params.request_id,
                pull.params.engine_id,
                pull.params.key.sequence,
                pull.pull_id,
            )
            for process, pull in self._forgotten
        ]

    def said_of(self, engine_id: str, sequence: int, request_id: str) -> set[str]:
        """Return what is true of some reader of a request, of its messages alone: `unanswered`, `refused`, ...

        Unanswered is a reader that had to say that it was done, and never heard that this was taken, or had given up.
        """
        whys, script = set[str](), self.service.script
        for lent in self.service.lent_ever:
            key = msgspec.convert(lent.params["key"], Key)
            if (lent.params["engine_id"], key.sequence, lent.params["request_id"]) != (engine_id, sequence, request_id):
                continue
            token = key.token
            answers = [s for s in self._heard[token] if isinstance(s.message, Ack) and not self._is_given_up(s)]
            heard = {(s.process, self._rank_of(s.target)) for s in answers}
            taken = {(s.process, self._rank_of(s.target), s.message.pull_id) for s in answers}
            releases = [s for s in self._sent[token] if isinstance(s.message, Release)]
            if any((s.process, s.other, s.message.pull_id) not in taken for s in releases):
                whys.add("unanswered")
            for attempt in self.service.attempts:
                if attempt.lent is lent and attempt.called:
                    for owner in lent.engine.ranks:
                        owes = attempt.rank.rank in script.readers_of(owner.rank)
                        if owes and (attempt.process.name, owner.name) not in heard:
                            whys.add("unanswered")
                        if self._is_unmet(attempt.process, owner.name):
                            whys.add("unmet")
                        asked_at = min(lent.lent_from, attempt.handed_at)  # it may never have been lent
                        if owes and self.service.mishaps.is_turned_away(attempt.rank.name, owner.name, asked_at):
                            whys.add("keys")
            said = [
                s.message for s in (*self._sent[token], *self._heard[token]) if isinstance(s.message, Claim | Release)
            ]
            if any(m.request_id != request_id for m in said):
                whys.add("other_id")
            if any(isinstance(s.message, Refused) for s in self._heard[token]):
                whys |= {"refused", "released_early"}  # which of both, its reader may not know
        return whys

    def _is_given_up(self, answer: _Said) -> bool:
        """Whether an acknowledgement came when its reader waited for it no more."""
        key, pull_id = answer.message.key, answer.message.pull_id
        said = [s.at for s in self._sent[key.token] if isinstance(s.message, Release) and s.message.pull_id == pull_id]
        return bool(said) and answer.at > min(said) + PULL.release_timeout_s - AT_ONCE_S

    def _is_unmet(self, process: Process, owner: str) -> bool:
        """Whether a process has greeted a rank in vain, at some time."""
        times = [s.at for s in self._greeted if s.process == process.name and s.other == owner]
        welcomes = [
            s.at
            for s in self._welcomed
            if s.process == process.name and isinstance(s.message, Welcome) and self._rank_of(s.target) == owner
        ]
        return any(not any(at <= welcome <= at + HANDSHAKE_S for welcome in welcomes) for at in times)

    def _rank_of(self, incarnation: str) -> str:
        return next((p.partition("#")[0] for p, known in self._starts.items() if incarnation in known), "")

    def under_way(self, since: float, until: float) -> set[tuple[str, int, str]]:
        """Requests that were lent, announced, pulled or not released by everybody yet at some time between two."""
        found = set()
        for lent in self.service.lent_ever:
            key = msgspec.convert(lent.params["key"], Key)
            times = [a.handed_at for a in self.service.attempts if a.lent is lent]
            for _, process, holder in self.service.leases:
                if holder.lent is lent:
                    lease = holder.handle._lease
                    times += [(lease.lent_at - process.epoch) / process.rate, self._end_of(lease, process)]
            times += [s.at for s in (*self._sent[key.token], *self._heard[key.token])]
            times += [
                x
                for p in self._pulled.values()
                if p.pull.params.key.token == key.token
                for x in (p.ended_at, p.returned_at, p.retired_at)
                if x < math.inf
            ]
            if times and min(times) <= until and since <= max(times):
                found.add((lent.params["engine_id"], key.sequence, lent.params["request_id"]))
        return found

    def _end_of(self, lease: Any, process: Process) -> float:
        ended_at = (lease.ended_at - process.epoch) / process.rate if lease.is_over else math.inf
        return min(ended_at, process.died_at, self.service.world.now)

    def requests(self) -> dict[tuple[str, int, str], int]:
        """All requests that were lent anywhere: prefill engine, sequence and request id, and the script's number."""
        found = {}
        for rank, _, holder in self.service.leases:
            params = holder.lent.params
            key = msgspec.convert(params["key"], Key)
            found[rank.engine_id, key.sequence, params["request_id"]] = holder.ask
        return found

    def _name(self, rank: Any, incarnation: str) -> str:
        return rank_name(rank.engine_id, rank.layout.tp_rank, rank.layout.pp_stage, incarnation)

    def _lease(self, entry: tuple[Any, Process, Any]) -> LateLease | None:
        rank, process, holder = entry
        lease = holder.handle._lease
        state = lease.state.value
        lent_at, end = (lease.lent_at - process.epoch) / process.rate, self._end_of(lease, process)
        # What ended in the very turn in which its process died was not given back to anybody.
        if state in ("released", "revoked") and (id(lease) in self._ended or process.died_at > end):
            return None
        # What ended with its engine or its process is late to some, if they know that it was lent.
        is_sure = state == "expired" and id(lease) in self._ended
        gone = {"owner_died"} if process.died_at <= end else set()
        gone |= {"owner_closed"} if holder.ended == "closed" or self._is_closed(process, lent_at, end) else set()
        key, incarnation = lease.lent.key, self._incarnation_at(process, lent_at)
        owed = []
        ask = holder.lent.ask
        for engine in ask.engines:
            for number in self.service.script.readers_of(rank.rank):
                reader = self.service.decode[engine][number]
                if not any(str(r) == reader.title for r in lease.discharged):
                    owed.append(self._owed(reader, rank, process, holder, lent_at, end))
        return LateLease(
            holder.ask,
            self._name(rank, incarnation),
            rank.engine_id,
            lease.lent.request_id,
            key.sequence,
            state,
            is_sure,
            owed,
            end,
            self._ended.get(id(lease), math.inf),
            gone,
        )

    def _incarnation_at(self, process: Process, at: float) -> str:
        """Which start it was; after a sleep it is another."""
        return max((since, incarnation) for since, incarnation in self._incarnations[process.name] if since <= at)[1]

    def _is_open(self, end: float) -> bool:
        """Whether some decode process died, or was suspended, or says nothing after this: it may have been meant."""
        for engine in self.service.decode:
            for rank in engine:
                for process in self.service.world.processes.values():
                    if process.name.partition("#")[0] == rank.name:
                        if process.died_at <= end + LONG_S or self._noted[process.name, "ends"]:
                            return True
                        if self._last_said.get(process.name, -math.inf) < end:
                            return True
        return False

    def _is_some_engine_away(self, lent_at: float, end: float) -> bool:
        """Whether of some decode engine every rank's loop was away meanwhile."""
        away = {
            x.name.partition("#")[0] for x in self.service.world.processes.values() if _overlap(x.away, lent_at, end)
        }
        return any(all(rank.name in away for rank in engine) for engine in self.service.decode)

    def _is_closed(self, process: Process, since: float, end: float) -> bool:
        """Whether an engine began to close, or to fall asleep, within this time."""
        return any(since <= at <= end for at in self._noted[process.name, "ends"])

    def _agent_died(self, processes: Iterable[Process], since: float, end: float) -> bool:
        return any(since <= at <= end for p in processes for at in self._noted[p.name, "agent"])

    def _of(self, said: _Said, reader: Any) -> bool:
        return bool(said.process.partition("#")[0] == reader.name)

    def _was_refused(self, token: str, pull_id: str, reader: Any, owner: Process) -> str:
        """Return how the owner refused what a pull said, as far as the reader has heard; empty if it did not."""
        for said in self._heard[token]:
            if isinstance(said.message, Refused) and said.message.pull_id == pull_id and self._of(said, reader):
                if said.target in self._starts[owner.name]:
                    return said.message.reason.value
        return ""

    def _owed(self, reader: Any, rank: Any, owner: Process, holder: Any, lent_at: float, end: float) -> Owed:
        """Find all that is true of a reader that had not released."""
        debt = _Debt(self, reader, rank, owner, holder, lent_at, end)
        starts = {i[:8] for attempt in debt.in_time for i in self._starts[attempt.process.name]}
        whys = set[str]().union(*(debt.attempt_whys(attempt) for attempt in debt.in_time))
        whys |= {why for why, is_true in OF_A_DEBT.items() if is_true(debt)}
        if whys & UNASKED:
            whys |= {why for why, is_true in OF_AN_UNASKED.items() if is_true(debt)}
        return Owed(reader.title, whys | debt.whys_of_silence(whys), debt.reasons, starts)

    def _pull(self, pulled: _Pulled) -> LatePull | None:
        pull, process = pulled.pull, pulled.process
        is_soon = pulled.returned_at - pulled.ended_at <= AWAY_S / process.rate
        is_well = pull.reason is Reason.CANCELLED or pull.blame.how is How.RECALLED
        if not pulled.was_held or (is_well and is_soon):
            return None
        ask, reader = int(pull.request_id[1:]), self.service.ranks[process.name.partition("#")[0]]
        whys = set(pulled.whys)
        for other in self.service.world.processes.values():
            starts = self._starts[other.name]
            if (
                other.died_at <= pulled.returned_at
                and other.died_at < math.inf
                and any(s.rank.place[1] in starts for s in pull.sources)
            ):
                whys.add("peer_died")
        if pull.reason in (Reason.PEER_LOST, Reason.RESTARTED):
            whys.add("peer_lost")
        had_s = (pull.published_at - pull.called_at) / process.rate
        if pull.reason in (Reason.CANCELLED, Reason.TIMEOUT) and pulled.returned_at - pulled.ended_at <= max(
            1.0, had_s
        ):
            whys.add("ended_soon")
        processes = [
            p
            for p in self.service.world.processes.values()
            if p is process or any(s.rank.place[1] in self._starts[p.name] for s in pull.sources)
        ]
        if self._agent_died(processes, pulled.ended_at - LONG_S, pulled.ended_at):
            whys.add("agent_died")
        if any(_overlap(p.away, pulled.ended_at - LONG_S, min(pulled.returned_at, 1e9)) for p in processes):
            whys.add("owner_away")
        is_over = pulled.returned_at < math.inf or pulled.retired_at < math.inf
        return LatePull(
            ask,
            self._name(reader, pull.pull_id.partition("-")[0]),
            pull.request_id,
            pull.params.request_id,
            pull.params.engine_id,
            pull.params.key.sequence,
            pull.pull_id,
            # Blocks that die with their process have no owner any more.
            is_over or process.died_at == math.inf,
            pulled.returned_at < math.inf,
            whys,
        )


class _Debt:
    """One reader that had not released when a lease ended, and what was said between the two.

    Attributes:
        attempts: Its readings of the request; `in_time` those that were handed the params before the end.
        sent: What it said to the owner.
        arrived: What arrived of it at the owner.
    """

    def __init__(
        self, witness: Witness, reader: Any, rank: Any, owner: Process, holder: Any, lent_at: float, end: float
    ) -> None:
        self.witness, self.reader, self.rank, self.owner, self.holder = witness, reader, rank, owner, holder
        self.lent_at, self.end, self.token = lent_at, end, holder.handle._lease.lent.key.token
        self.attempts = [a for a in witness.service.attempts if a.lent is holder.lent and a.rank is reader]
        self.in_time = [a for a in self.attempts if a.handed_at < end]
        self.processes = {a.process.name for a in self.attempts}
        self.starts = {x for name in self.processes for x in witness._starts[name]}
        self.sent = [s for s in witness._sent[self.token] if witness._of(s, reader) and s.other == rank.name]
        heard = (s for s in witness._heard[self.token] if s.process == owner.name)
        self.arrived = [s for s in heard if s.target in self.starts]
        never: tuple[Process | None, float] = None, math.inf
        addressed = witness.service.addressed.get((holder.lent.ask.number, reader.name), never)
        self.addressed, self.addressed_at = addressed
        pull_ids = {s.message.pull_id for s in self.sent if isinstance(s.message, Claim | Release)}
        refused = (witness._was_refused(self.token, x, reader, owner) for x in pull_ids if self.in_time)
        self.reasons = {reason for reason in refused if reason}

    def was_away(self) -> bool:
        """Its loop, or that of the process that the params were addressed to if none had them in time."""
        late = [self.addressed] if self.addressed is not None and not self.in_time else []
        return any(_overlap(x.away, self.lent_at, self.end) for x in (*late, *(a.process for a in self.in_time)))

    def is_rank_dead(self) -> bool:
        """The process that the params were addressed to was dead when they came."""
        return not self.in_time and self.addressed is not None and self.addressed.died_at <= self.addressed_at

    def has_claimed(self) -> bool:
        history = self.holder.handle._lease.history
        return any(isinstance(x, notes.GrantedTo) and self.reader.title in x.reader for _, x in history)

    def whys_of_silence(self, whys: Set[str]) -> set[str]:
        """Return what follows from what was said of a request when, given what is true besides."""
        is_silent, found = not any(s.at <= self.end - AT_ONCE_S for s in self.arrived), set[str]()
        if self.has_claimed():
            is_too_short = bool(whys & {"still_pulling", "release_late"}) or "expired" in self.reasons
        else:
            is_handed = self.asked() and "handed_late" not in whys
            is_too_short = self.asked_late() or (is_silent and (is_handed or "release_late" in whys))
            found |= {"silenced"} if whys & {"untold", "other_away"} else set()
            found |= {"none_runs"} if "untold" in whys else set()
        found |= {"left_out"} if is_silent and self.siblings_spoke() else set()
        return found | ({"too_short"} if is_too_short else set())

    def siblings_spoke(self) -> bool:
        siblings = set(self.witness.service.script.decode_names[self.reader.engine_number]) - {self.reader.name}
        said = self.witness._sent[self.token]
        return any(s.process.partition("#")[0] in siblings and s.at <= self.end for s in said)

    def asked(self) -> bool:
        return any(a.called for a in self.attempts)

    def asked_late(self) -> bool:
        said = self.witness._sent[self.token]
        has_asked = any(s.at <= self.end for s in said if self.witness._of(s, self.reader))
        return self.asked() and (not has_asked or not self.in_time)

    def is_stale(self) -> bool:
        welcomed = (s for s in self.witness._welcomed if s.process in self.processes)
        return bool(self.reasons & STALE) or any(
            isinstance(s.message, Unwelcome) and s.message.reason in STALE for s in welcomed
        )

    def is_other_id(self) -> bool:
        request_id = self.holder.lent.params["request_id"]
        return any(s.message.request_id != request_id for s in self.arrived if isinstance(s.message, Claim | Release))

    def is_closed(self) -> bool:
        return any(self.witness._is_closed(a.process, self.lent_at - LONG_S, self.end) for a in self.attempts)

    def has_lost_agent(self) -> bool:
        processes = [self.owner, *(a.process for a in self.attempts)]
        return self.witness._agent_died(processes, self.lent_at - LONG_S, self.end)

    def is_untold(self) -> bool:
        strangers = self.witness._strangers[self.owner.name]
        return self.witness._is_open(self.end) or any(at <= self.end for at in strangers)

    def is_turned_away(self) -> bool:
        return bool(self.witness.service.mishaps.is_turned_away(self.reader.name, self.rank.name, self.lent_at))

    def attempt_whys(self, attempt: Attempt) -> set[str]:
        """Return what is true of what one reader did with the params that it was handed."""
        tried = _Tried(self, attempt)
        whys = {why for why, is_true in OF_AN_ATTEMPT.items() if is_true(tried)}
        if attempt.called == "" or (attempt.is_turned_away and not tried.mine):
            return whys | {"never_asked"}
        return whys | ({"announced_only"} if attempt.called == "announced" else set())


class _Tried:
    """One attempt of a reader: what it said (`mine`), and what of it arrived (`theirs`)."""

    def __init__(self, debt: _Debt, attempt: Attempt) -> None:
        witness, process = debt.witness, attempt.process
        self.debt, self.attempt, self.process, self.end, self.witness = debt, attempt, process, debt.end, witness
        self.died = process.died_at <= self.end
        self.mine = [s for s in debt.sent if s.process == process.name]
        self.theirs = [s for s in debt.arrived if s.target in witness._starts[process.name]]
        self.claims = [s for s in self.theirs if isinstance(s.message, Claim) and s.at <= self.end]
        self.final = [s for s in self.mine if _is_last(s.message)]
        self.came = [s for s in self.theirs if _is_last(s.message)]
        pulls = (p for p in witness._pulled.values() if p.process is process)
        self.pulls = [p for p in pulls if p.pull.params.key.token == debt.token]
        self.owners = witness._starts[debt.owner.name]

    def is_unmet(self) -> bool:
        """It greeted the owner in vain, or met it at another time, and not when it asked for this."""
        witness, name, end = self.witness, self.process.name, self.end
        to = self.debt.rank.name
        greeted = [s for s in witness._greeted if s.process == name and s.other == to and s.at <= end]
        met = [s.at for s in witness._welcomed if s.process == name and s.target in self.owners and s.at <= end
               and isinstance(s.message, Welcome)]  # fmt: skip
        tries = [s.at for s in greeted if self.attempt.handed_at <= s.at]
        return bool(greeted and not met) or any(not any(at <= x <= at + HANDSHAKE_S for x in met) for at in tries)

    def is_release_lost(self) -> bool:
        return any(s.at <= self.end for s in self.final) and not any(s.at <= self.end for s in self.came)

    def is_release_late(self) -> bool:
        """That of this attempt, or of one which another was to follow."""
        end = self.end - AT_ONCE_S
        said = [s.at for s in self.theirs if isinstance(s.message, Release)]
        is_late = any(s.at > end for s in self.came) or any(s.at > self.end for s in self.final)
        return is_late or (bool(said) and min(said) > end)

    def is_retry_missing(self) -> bool:
        releases = [s for s in self.mine if isinstance(s.message, Release)]
        retried = [s for s in self.theirs if isinstance(s.message, Release) and not _is_last(s.message)]
        retried = [s for s in retried if s.at <= self.end]
        given_up = {s.message.pull_id for s in retried}  # a claim of these came late, and is no other attempt
        last = max((s.at for s in retried), default=math.inf)
        again = [s for s in self.claims if s.message.pull_id not in given_up and s.at > last]
        return bool(releases and not self.final and not self.died) or bool(retried and not again)

    def is_pulling(self) -> bool:
        end, claimed = self.end - AT_ONCE_S, {s.message.pull_id for s in self.claims}
        is_open = not any(p.ended_at <= end for p in self.pulls)
        other = any(p.ended_at > end and p.pull.pull_id in claimed for p in self.pulls)  # another attempt
        return self.attempt.called == "pulled" and (is_open or other)


OF_AN_ATTEMPT: Mapping[str, Callable[[_Tried], bool]] = {
    "died": lambda x: x.died,
    "died_unheard": lambda x: x.died and not x.claims,
    "unmet": _Tried.is_unmet,
    "release_lost": _Tried.is_release_lost,
    "release_late": _Tried.is_release_late,
    "retry_never": _Tried.is_retry_missing,
    "still_pulling": _Tried.is_pulling,
    "completed": lambda x: any(p.pull.reason is Reason.COMPLETE for p in x.pulls),
    "transfer_running": lambda x: any(p.was_held for p in x.pulls),
}
OF_A_DEBT: Mapping[str, Callable[[_Debt], bool]] = {
    "late": lambda x: True,
    "rank_dead": _Debt.is_rank_dead,
    "handed_late": lambda x: not x.in_time and not x.is_rank_dead() and x.addressed_at < math.inf,
    "never_handed": lambda x: not x.in_time and not x.is_rank_dead() and x.addressed_at == math.inf,
    "reader_away": _Debt.was_away,
    "refused": lambda x: bool(x.reasons),
    "released_early": lambda x: any(_is_last(s.message) and s.at < x.lent_at for s in x.arrived),
    "stale": _Debt.is_stale,
    "reader_closed": _Debt.is_closed,
    "max_lease": lambda x: x.end - x.lent_at >= LEASE.max_lease_s * 0.99,
    "agent_died": _Debt.has_lost_agent,
    "other_id": _Debt.is_other_id,
    "keys": _Debt.is_turned_away,
    "owner_away": lambda x: _overlap(x.owner.away, x.lent_at, x.end),
}
UNASKED = {"never_handed", "handed_late", "rank_dead", "died_unheard", "never_asked"}
OF_AN_UNASKED: Mapping[str, Callable[[_Debt], bool]] = {
    "untold": _Debt.is_untold,
    "other_away": lambda x: x.witness._is_some_engine_away(x.lent_at, x.end),
}
"""What is true of an attempt, of a reader that had not released, and of one of which nothing was heard (`UNASKED`)."""


def _is_last(message: Message) -> bool:
    """Whether its reader needs the request no more."""
    return isinstance(message, Release) and message.outcome is not Outcome.RETRY


def _overlap(away: list[tuple[float, float]], start: float, end: float) -> bool:
    """Whether it was away for long within this time, or just before it."""
    return any(until - since >= AWAY_S and since < end and until > start for since, until in away)


def watch(script: Script) -> tuple[Service, Logs, Witness]:
    """Play a script, with all that its processes log, and with a witness."""
    logs, witness = Logs(), Witness()
    service = Service(script, listeners=[logs, witness])
    witness.attend(service)
    service.run()
    witness.conclude(logs)
    return service, logs, witness
