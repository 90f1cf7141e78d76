"""Why blocks came back late in a simulated service, by one who saw everything: a judge of what is concluded from logs.

Logs tell what each process knew. A `Witness` sits beside the world: it sees every packet leave and every packet arrive
(or not), which process died and when, which loop was away, the readers of all params, the calls of each decode engine
to asynckv, and what the engines' own tables say of their leases and pulls. `Witness.late` lists every lease and every
pull with late blocks, each with all the reasons that are true of it (`WHY`). It reads no log.

Late is a lease that expired, or ran on beyond its time at the end of the simulation; and a failed pull whose blocks
came back after its outcome was told, or never.

Several things may be true of one late request at once (its reader's loop was away, then its process died), and each is
a true answer. What befell it by script is the first of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from asynckv.core import notes
from asynckv.core.outbox import Command, DetachRead, LeaseEnded, Milestone, PullReached
from asynckv.core.pull import Kind, Pull
from asynckv.core.types import Key, Outcome, Reason, TransferId, rank_name
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

WHY = {
    "never_handed": "its reader was never given the params, or not before the lease had ended",
    "handed_late": "it was given them when the lease had ended",
    "never_asked": "its reader had the params and asked nothing of asynckv: aborted before it was scheduled",
    "announced_only": "it was announced there, and neither pulled nor discharged",
    "died_before_claim": "its reader died, and no claim of it had arrived",
    "died_after_claim": "its reader died, and had claimed",
    "unmet": "its reader greeted the rank that lent it, and never had a welcome",
    "keys": "one side does not know the other's key",
    "claim_lost": "its reader's claims were sent, and none arrived",
    "not_granted": "its reader never had an answer to a claim that arrived",
    "refused": "the owner refused what its reader said of it",
    "other_id": "its reader spoke of another prefill request id under the same key",
    "release_lost": "its reader's releases were sent, and none arrived in time",
    "release_late": "its reader's release arrived when the lease had ended",
    "release_unsent": "its reader's pull had ended, and it had not said so to the owner",
    "still_pulling": "its reader's pull had no outcome when the lease ended",
    "retry_never": "its reader said that it would try again, and did not in time",
    "reader_away": "its reader's loop was away for a second or longer",
    "owner_away": "the owner's loop was",
    "packets_lost": "packets between the two were lost",
    "rank_dead": "its reader was dead when the params came",
    "silent": "nothing of its reader had arrived",
    "spoke": "something of its reader had arrived",
    "claimed": "a claim of its reader had arrived",
    "lapsed": "and the owner refused what it said later, for its promise had ended",
    "siblings_spoke": "other ranks of the same decode engine had spoken of it, to whomever",
    "untold": "some process of the decode side died or fell silent, or somebody without a log shook hands, and no log "
    "tells that it was not the one",
    "other_away": "all ranks of some decode engine were away for a part of its time: it may have been the one",
    "asked_late": "its reader asked for it when the lease had ended",
    "asked": "its reader had asked for it, by a pull, an announcement or a discharge",
    "stale": "its reader was told that the process, or the memory, is another now",
    "reader_closed": "its reader's engine was closed or suspended",
    "max_lease": "it had been lent for as long as any may be",
    "released_early": "its reader's release came before it was lent",
    "owner_died": "the process that lent it died",
    "owner_closed": "the engine that lent it was closed",
    "agent_died": "the data plane of its reader or of the owner had died",
    "completed": "its reader had all that it wanted",
    # of pulls
    "transfer_running": "a transfer of it had not ended when its outcome was told",
    "transfer_doubt": "a transfer of it had failed and might still have written",
    "peer_died": "the process that it read from had died",
    "peer_lost": "its reader took the process that it read from for lost",
    "cancelled": "it was cancelled while it read",
    "ended_soon": "its caller gave up, and its transfers ended within a second, or within the time that it had had",
}


@dataclass(slots=True)
class Owed:
    """A reader that had not released when a lease ended.

    Attributes:
        reader: Its name as in logs, without the start of a process: `decode0/tp1`.
        whys: All that is true of it, of `WHY`.
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
    """Ends of its engine while it was lent, of `WHY`."""

    @property
    def whys(self) -> set[str]:
        """All that is true of any of its readers."""
        return self.gone.union(*(owed.whys for owed in self.owed))


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
            case LeaseEnded(lease):
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
                whys.add("refused")
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
        service, ask = self.service, holder.lent.ask
        found = Owed(reader.title)
        whys, token = found.whys, holder.handle._lease.lent.key.token
        attempts = [a for a in service.attempts if a.lent is holder.lent and a.rank is reader]
        in_time = [a for a in attempts if a.handed_at < end]
        sent = [s for s in self._sent[token] if self._of(s, reader) and s.other == rank.name]
        heard = [s for s in self._heard[token] if s.process == owner.name]
        arrived = [s for s in heard if any(s.target in self._starts[a.process.name] for a in attempts)]
        if not in_time:
            addressed, at = service.addressed.get((ask.number, reader.name), (None, math.inf))
            if addressed is not None and addressed.died_at <= at:
                whys.add("rank_dead")
            else:
                whys.add("handed_late" if at < math.inf else "never_handed")
            if addressed is not None and _overlap(addressed.away, lent_at, end):
                whys.add("reader_away")
        for attempt in in_time:
            whys |= self._attempt(attempt, rank, owner, token, sent, arrived, end)
            found.starts |= {i[:8] for i in self._starts[attempt.process.name]}
            if _overlap(attempt.process.away, lent_at, end):
                whys.add("reader_away")
            for _, source, target in [x for x in self._lost if lent_at - 3.0 <= x[0] <= end]:
                if {source, target} == {attempt.process.name, owner.name}:
                    whys.add("packets_lost")
            for pull_id in {s.message.pull_id for s in sent if isinstance(s.message, Claim | Release)}:
                if reason := self._was_refused(token, pull_id, reader, owner):
                    whys.add("refused")
                    found.reasons.add(reason)
        spoke = [s for s in arrived if s.at <= end - AT_ONCE_S]
        whys.add("spoke" if spoke else "silent")
        if any(isinstance(x, notes.Granted) and found.reader in x.reader for _, x in holder.handle._lease.history):
            whys.add("claimed")
            if "expired" in found.reasons:
                whys.add("lapsed")
        if any(_is_last(s.message) and s.at < lent_at for s in arrived):
            whys.add("released_early")
        siblings = set(service.script.decode_names[reader.engine_number]) - {reader.name}
        if any(s.process.partition("#")[0] in siblings and s.at <= end for s in self._sent[token]):
            whys.add("siblings_spoke")
        has_asked = any(s.at <= end for s in self._sent[token] if self._of(s, reader))
        if any(a.called for a in attempts) and (not has_asked or not in_time):
            whys.add("asked_late")
        if any(a.called for a in attempts):
            whys.add("asked")
        processes = {a.process.name for a in attempts}
        if found.reasons & STALE or any(
            s.process in processes and isinstance(s.message, Unwelcome) and s.message.reason in STALE
            for s in self._welcomed
        ):
            whys.add("stale")
        unasked = {"never_handed", "handed_late", "rank_dead", "died_before_claim", "never_asked"}
        if whys & unasked and (self._is_open(end) or any(at <= end for at in self._strangers[owner.name])):
            whys.add("untold")
        if whys & unasked and self._is_some_engine_away(lent_at, end):
            whys.add("other_away")
        if any(self._is_closed(a.process, lent_at - LONG_S, end) for a in attempts):
            whys.add("reader_closed")
        if end - lent_at >= LEASE.max_lease_s * 0.99:
            whys.add("max_lease")
        if self._agent_died([owner, *(a.process for a in attempts)], lent_at - LONG_S, end):
            whys.add("agent_died")
        request_id = holder.lent.params["request_id"]
        if any(s.message.request_id != request_id for s in arrived if isinstance(s.message, Claim | Release)):
            whys.add("other_id")
        if service.mishaps.is_turned_away(reader.name, rank.name, lent_at):
            whys.add("keys")
        if _overlap(owner.away, lent_at, end):
            whys.add("owner_away")
        return found

    def _attempt(
        self,
        attempt: Attempt,
        rank: Any,
        owner: Process,
        token: str,
        sent: list[_Said],
        arrived: list[_Said],
        end: float,
    ) -> set[str]:
        """Return what is true of what one reader did with the params that it was handed."""
        whys, process = set[str](), attempt.process
        mine = [s for s in sent if s.process == process.name]
        theirs = [s for s in arrived if s.target in self._starts[process.name]]
        claims = [s for s in theirs if isinstance(s.message, Claim) and s.at <= end]
        died = process.died_at <= end
        if died:
            whys.add("died_after_claim" if claims else "died_before_claim")
        if attempt.called == "" or (attempt.is_turned_away and not mine):
            whys.add("never_asked")
        elif attempt.called == "announced":
            whys.add("announced_only")
        has_claimed = any(isinstance(s.message, Claim) and s.at <= end for s in mine)
        greeted = [s for s in self._greeted if s.process == process.name and s.other == rank.name and s.at <= end]
        welcomes = [
            s
            for s in self._welcomed
            if s.process == process.name and s.target in self._starts[owner.name] and s.at <= end
        ]
        met = [s.at for s in welcomes if isinstance(s.message, Welcome)]
        # Or it met that rank at another time, and not when it asked for this.
        tries = [s.at for s in greeted if attempt.handed_at <= s.at]
        if (greeted and not met) or any(not any(at <= x <= at + HANDSHAKE_S for x in met) for at in tries):
            whys.add("unmet")
        if has_claimed and not claims:
            whys.add("claim_lost")
        granted = any(
            isinstance(s.message, Granted) and s.process == process.name and s.target in self._starts[owner.name]
            for s in self._heard[token]
        )
        if claims and not granted:
            whys.add("not_granted")
        releases = [s for s in mine if isinstance(s.message, Release)]
        final = [s for s in releases if _is_last(s.message)]
        came = [s for s in theirs if _is_last(s.message)]
        if any(s.at <= end for s in final) and not any(s.at <= end for s in came):
            whys.add("release_lost")
        said = [s.at for s in theirs if isinstance(s.message, Release)]
        if any(s.at > end - AT_ONCE_S for s in came) or any(s.at > end for s in final):
            whys.add("release_late")
        elif said and min(said) > end - AT_ONCE_S:
            whys.add("release_late")  # that of an attempt which another was to follow
        retried = [s for s in theirs if isinstance(s.message, Release) and not _is_last(s.message) and s.at <= end]
        given_up = {s.message.pull_id for s in retried}  # a claim of these came late, and is no other attempt
        last = max((s.at for s in retried), default=math.inf)
        again = [s for s in claims if s.message.pull_id not in given_up and s.at > last]
        if (releases and not final and not died) or (retried and not again):
            whys.add("retry_never")
        pulls = [p for p in self._pulled.values() if p.process is process and p.pull.params.key.token == token]
        claimed = {s.message.pull_id for s in claims}
        if attempt.called == "pulled" and (
            not any(p.ended_at <= end - AT_ONCE_S for p in pulls)
            or any(p.ended_at > end - AT_ONCE_S and p.pull.pull_id in claimed for p in pulls)  # another attempt
        ):
            whys.add("still_pulling")
        if any(p.pull.reason is Reason.COMPLETE for p in pulls):
            whys.add("completed")
        if any(p.was_held for p in pulls):
            whys.add("transfer_running")
        if any(p.ended_at <= end and p.pull.reason is not Reason.COMPLETE for p in pulls) and not final:
            whys.add("release_unsent")
        return whys

    def _pull(self, pulled: _Pulled) -> LatePull | None:
        if not pulled.was_held:
            return None
        pull, process = pulled.pull, pulled.process
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
        if pull.reason is Reason.CANCELLED:
            whys.add("cancelled")
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
