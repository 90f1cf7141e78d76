"""The state of running engines in the form of their logs, so that the same rules find causes.

An engine's answer becomes a start, facts about its peers, warnings about its pulls and about leases that a log would
warn of, and a log's lines about younger leases; all of one moment, by one clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asynckv import told
from asynckv.account.inspect import RequestStatus
from asynckv.edges.kernel import identity
from asynckv.tools.diagnose.ask import Answer, Trouble
from asynckv.tools.diagnose.join import Logged, LoggedLease, LoggedPull, Process, Service, engine_of, start_of
from asynckv.tools.diagnose.process import look, shows_all, verdict
from asynckv.tools.diagnose.records import Record, integer

LEAST_S, LATE_S = 0.5, 10.0
"""Ages from which on blocks of failed copies, and requests of engines that do not say so, are held for long."""
RELEASED = frozenset({"complete", "failed", "cancelled"})


def records_of(answers: Iterable[Answer], now: float) -> Iterator[Record]:
    """Convert engines' answers to records, as if they had just logged them; an answer without a time is of `now`."""
    for answer in (x for x in answers if x.has_told):
        log = _Log(answer, now if math.isnan(answer.at) else answer.at)
        yield from itertools.chain(log.of_engine(), log.of_offload())
        for status in answer.requests:
            yield from log.of_lease(status) if status.kind == "lease" else (log.of_pull(status),)


class _Log:
    """The lines that one engine that answered would log at that moment (`came`)."""

    def __init__(self, answer: Answer, came: float) -> None:
        self._answer, self._account, self._came = answer, answer.account, came
        self._began = came - answer.account.facts.uptime_s

    def _say(self, event: type[told.Told], at: float | None = None, *, level: str = "info", **fields: Any) -> Record:
        account, at = self._account, self._came if at is None else at
        process = account.engine_id, account.rank, account.incarnation
        return Record(at, event.event, level, *process, fields, self._answer.address)

    def of_engine(self) -> Iterator[Record]:
        account, gauges, counted = self._account, self._answer.gauges, self._account.facts.counters
        lends, pulls = counted.get("leases.lent", 0) > 0, counted.get("pulls.started", 0) > 0
        said: dict[str, Any] = {"pid": account.facts.pid, "address": self._answer.address, "answers": True}
        yield self._say(told.EngineStarted, self._began, host="asked", lends=lends, pulls=pulls, **said)
        waits = {what: {"number": x.number, "seconds": x.seconds} for what, x in account.waits_for_step.items()}
        yield self._say(told.EngineAlive, waits_for_step=waits, step_s=account.step_s)
        for peer in account.peers:
            is_bad = peer.state == "suspect" or (peer.state == "gone" and not peer.is_orderly)
            known: dict[str, Any] = {"peer": peer.rank, "address": peer.address}
            known |= {"state": peer.state, "detail": peer.cause}
            yield self._say(told.PeerChanged, level="warning" if is_bad else "info", **known)
        for plane, event in (("offload.files_off", told.OffloadFilesLost), ("offload.off", told.OffloadBroken)):
            if why := account.facts.planes.get(plane):
                yield self._say(event, level=event.levels[0], cause=why)
        if "prompts_in_a_row" in gauges:
            computed = _below("computed_locally.", counted)
            seen = _below("prompts.", counted) | _below("prompts_", gauges) | {"computed_locally": computed}
            yield self._say(told.PromptsCounted, **seen)

    def of_offload(self) -> Iterator[Record]:
        """Yield failed stores and loads with blocks that may still be in use."""
        if "offload.jobs" in self._answer.gauges:
            yield self._say(told.OffloadStarted, self._began)
        for hold in self._account.holds:
            what = hold.pull_id.partition("-")[0]
            if what in ("store", "load") and hold.reason in ("quarantined", "retired") and hold.held_s >= LEAST_S:
                copy: dict[str, Any] = {"what": what, "job": hold.pull_id, "request_id": hold.request_id}
                copy["blocks"] = sum(map(len, hold.blocks.values()))
                yield self._say(told.OffloadFailed, self._came - hold.held_s, **copy, held=1)
                if hold.reason == "retired":
                    yield self._say(told.OffloadRetired, **copy)

    def of_pull(self, status: RequestStatus) -> Record:
        state = "announced" if status.kind == "announced" else status.state
        may_wait = status.kind in ("announced", "follow", "early")
        level = "warning" if not may_wait and status.state_s >= _late_s(status) else "info"
        fields: dict[str, Any] = {"waits": status.waits, "requests": 1, "oldest": [_pull(status)]}
        return self._say(told.PullHeld, level=level, state=state, **fields)

    def of_lease(self, status: RequestStatus) -> Iterator[Record]:
        if status.age_s >= _late_s(status):
            fields: dict[str, Any] = {"waits": status.waits, "requests": 1, "oldest": [_lease(status)]}
            yield self._say(told.LeaseHeld, state=status.state, **fields)
            return
        lent_at = self._came - status.age_s
        key: dict[str, Any] = {"request_id": status.request_id, "sequence": status.sequence}
        lease_s = None if status.left_s is None else status.age_s + status.left_s
        yield self._say(told.LeaseLent, lent_at, blocks=status.blocks, lease_s=lease_s, **key)
        for rank in (x for x in status.ranks if x.pull_id and x.state not in RELEASED):
            after_s = max(status.age_s - (rank.heard_s or 0.0), 0.0)
            granted: dict[str, Any] = {"reader": rank.rank, "pull_id": rank.pull_id, "after_s": after_s}
            yield self._say(told.LeaseGranted, lent_at + after_s, **key, **granted)


def settle(service: Service, answers: Iterable[Answer], logs: Iterable[Record]) -> None:
    """Note in a service how far the logs of engines reach that answered, and the requests that are over since.

    An engine that listed all that it holds overrides its log.
    """
    heard = {x.account.incarnation: x for x in answers if x.has_told}
    for record in (x for x in logs if x.incarnation in heard):
        process = service.processes[record.incarnation]
        before = process.logged or Logged(-math.inf)
        says_info = before.says_info or record.level not in ("warning", "error")
        is_begin = record.event in (told.EngineStarted.event, told.EngineResumed.event)
        process.logged = Logged(max(before.at, record.at), says_info, before.is_whole or is_begin)
        if is_begin:  # an answer knows neither the host's name nor the engine's address
            process.started, process.host = record, record.text("host")
    for request in service.requests:
        subjects: tuple[LoggedLease | LoggedPull, ...] = (*request.leases.values(), *request.all_pulls)
        for subject in (x for x in subjects if x.held):
            answer = heard.get(subject.process.incarnation)
            if answer is not None and not answer.account.after:
                _override(subject, answer)


def _override(subject: LoggedLease | LoggedPull, answer: Answer) -> None:
    """Have an answer's word of a lease or pull replace that of the log, or end it."""
    now = [x for x in subject.held if x.where == answer.address]
    logged = [x for x in subject.held if x.where != answer.address]
    if not now and subject.ended is None:
        subject.process.over.append(subject.request_id)
    if any(x.level == "warning" for x in logged):  # what was late is later now
        now = [replace(x, level="warning") for x in now]
    subject.held = [*logged, *now] if now else []


def tell(service: Service, answers: Iterable[Answer], now: float) -> None:
    """Note in a service the ranks that did not answer: by their sockets' names, or addresses in logs and of peers.

    A process without a log is known from then on, without its own words.
    """
    named = service.ranks_by_address()
    for answer in answers:
        rank = answer.account.rank or named.get(answer.address, "")
        if not answer.error or not start_of(rank):
            continue
        if (process := service.process_named(rank)) is None:
            process = Process(start_of(rank), engine_of(rank), rank, first_at=now, last_at=now)
            service.add(process)
        process.gone = answer.error if answer.trouble is Trouble.GONE else process.gone
        process.hangs |= answer.trouble is Trouble.AWAY


def look_here(service: Service, proc: Path = Path("/proc")) -> None:
    """Note in a service the processes that are gone or stopped, by the kernel.

    A pid is believed if the log says of which boot and of which namespace it is, and both are those of this process:
    hosts and containers with one name count alike. A log that was copied may lack a goodbye, so another process of
    these logs has to be there.
    """
    here = identity(proc)
    ours = here.get("boot_id"), here.get("pid_namespace")
    ended: dict[Process, int] = {}
    every = service.processes.values()
    for process in every if None not in ours and shows_all(proc) else ():
        said = process.started.fields if process.started is not None else {}
        is_known = "pid_began" in said and (said.get("boot_id"), said.get("pid_namespace")) == ours
        if process.stopped is not None or process.answers or not is_known:
            continue
        seen = look(integer(said.get("pid")), proc)
        if seen.state in ("", "Z", "X") or seen.began != said["pid_began"]:
            ended[process] = seen.pid
            continue
        process.is_here = True
        if seen.frozen or seen.state in "Tt":
            process.halted = verdict(seen, seen)
    is_one_there = any(x.is_here or x.answers for x in every)
    for process, pid in ended.items():
        process.is_elsewhere = not is_one_there
        if is_one_there:
            process.gone = process.gone or f"pid {pid} is not there any more"


def _below(prefix: str, figures: Mapping[str, int]) -> dict[str, Any]:
    return {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix)}


def _late_s(status: RequestStatus) -> float:
    return LATE_S if status.warn_s is None else status.warn_s


def _lease(status: RequestStatus) -> dict[str, Any]:
    return {
        "request_id": status.request_id,
        "sequence": status.sequence,
        "blocks": status.blocks,
        "lent_s": status.age_s,
        "left_s": status.left_s,
        "owed": [x.rank for x in status.ranks if x.state not in RELEASED],
        "complete": [x.rank for x in status.ranks if x.state == "complete"],
        "claims": {x.rank: {"pull_id": x.pull_id, "heard_s": x.heard_s} for x in status.ranks if x.pull_id},
    }


def _pull(status: RequestStatus) -> dict[str, Any]:
    names = ("request_id", "prefill_request_id", "pull_id", "sequence", "age_s", "state_s", "left_s")
    return {x: getattr(status, x) for x in names} | {"ranks": {x.rank: x.state for x in status.ranks}}
