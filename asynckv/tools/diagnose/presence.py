"""The fate of each process, as far as logs show it: it stopped in order, died, fell silent, or answers.

A process counts as dead if another start of it follows, if others lost it, or if its log just stops and another process
with an end that it would have logged goes on to an orderly one. Otherwise it may only have nothing to log. This module
also knows the processes that may have read from each other, and the blocked loops.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from asynckv import told
from asynckv.core.types import How
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.join import LoggedLease, LoggedPull, LoggedRequest, Process, start_of
from asynckv.tools.diagnose.leaks_values import in_seconds
from asynckv.tools.diagnose.records import Record
from asynckv.tools.diagnose.stalls import stalled_s

AT_ONCE_S = 0.01  # lines of one moment are written within this time; promises are of whole milliseconds
LATE_S = 1.0  # longest delay of the line about an expired lease, unless a loop is away
SIGN_S = 2.0  # longest delay of a sign of life, which is due every half lease; a longer one is a line itself
SILENCE_S = 5.0
"""Seconds after which a living process writes a line that is due, also an idle one; a lost one without a line is dead
or hangs."""
LAPSE_S = 3.0  # the same after a lease, by which a reader loses a silent rank
UNDER_WAY_S = 0.25  # no message is on its way for longer
MOST = 0.9  # part of a lease's time for which a blocked loop explains a missing claim; it is known to seconds


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of a process: `stopped`, `died`, `silent` or `alive` (it answered), with the times in the common clock,
    and the evidence. An unproved death may be a log that was cut off. A silent process hangs if it lives and does not
    answer."""

    kind: str
    why: str
    after: float
    before: float
    is_proved: bool = True
    hangs: bool = False

    @property
    def is_over(self) -> bool:
        """True if the process has ended, in order or not."""
        return self.kind in ("stopped", "died")

    @property
    def is_known(self) -> bool:
        """True if it has ended, and more than the end of its log shows that."""
        return self.is_over and self.is_proved

    @property
    def gone(self) -> str:
        """Describe a death; without a next start of the rank, or a process that lost it, only its log has ended."""
        return "hangs" if self.hangs else "died" if self.is_proved else "died or was cut off"

    @property
    def text(self) -> str:
        return f"{self.gone}: {self.why}" if self.kind == "died" else self.why


class _End(NamedTuple):
    """The time of the last line of a process's log, and how the log ends; `silently` says that it has no goodbye."""

    low: float
    high: float
    ends: str
    silently: str

    def silent(self, why: str, *, hangs: bool = False) -> Fate:
        return Fate("silent", why, self.low, math.inf, False, hangs)


def lease_of(process: Process) -> float:
    """Return its `lease_s`; that of `LeaseConfig` if its log does not say."""
    return process.durations.get("lease_s", 30.0)


def seats(process: Process) -> set[object]:
    """Return what two living processes of a machine never have both: a port, and a pid in its namespace."""
    address = process.started.text("address") if process.started is not None else ""
    found: set[object] = {address, process.pid if process.pid and -1 not in process.pid else None}
    return found - {"", None}


class Presence:
    """The fates of all processes of a service, in one common time."""

    def __init__(self, axis: Axis) -> None:
        self.service, self.axis, self.moment = (service := axis.service), axis, axis.moment
        self.when = when = axis.when
        processes = service.processes.values()
        self.fate = cache(self._fate)  # says what became of a process
        # Clocks that cannot be compared do not show which process goes on after another.
        told_at = (when(x, x.last_at)[0] for x in processes if self.axis.group(x) == 0)
        self.last = max(told_at, default=0.0)  # time until which logs continue, at least
        self.met = {start_of(x.text("reader")) for process in processes for x in process.of(told.ReaderMet)}
        self._lenders = {x.engine_id for x in service.requests if x.leases or x.all_pulls}
        self._lost: dict[str, list[tuple[Process, Record]]] = defaultdict(list)
        self._addresses = {x.start: x.started.text("address") for x in processes if x.started is not None}
        for process in processes:
            for record in process.of(told.PeerChanged):
                self._addresses.setdefault(start_of(record.text("peer")), record.text("address"))
                if record.text("state") == "gone" and record.text("cause") in ("peer_lost", "restarted"):
                    self._lost[record.text("peer_incarnation")].append((process, record))
        self._heard: dict[str, float] = defaultdict(lambda: -math.inf)
        self.attempts: dict[tuple[str, str], list[tuple[LoggedRequest, LoggedPull]]] = defaultdict(list)
        """All attempts of a process at one of its requests."""
        self.lends: dict[str, list[float]] = defaultdict(list)
        """Times at which each rank lent something, by its name without a start."""
        self.unfollowed: dict[str, list[float]] = defaultdict(list)  # the same, of tickets that no reader followed
        claims = list[float]()
        for request in service.requests:
            offers = [x.ended.integer("offers") for x in request.leases.values() if x.ended is not None]
            for lease in request.leases.values():
                bisect.insort(self.lends[lease.process.base], lent_at := self.near(lease.process, lease.lent_at))
                if max(offers, default=-1) == 0:  # each decode rank follows one rank only
                    self.unfollowed[lease.process.base].append(lent_at)
                for name, claim in lease.claims.items():
                    claims.append(claim.claimed_s)
                    self._hear(name, lease.process, lease.lent_at + claim.heard_s)
            for pull in request.all_pulls:
                self.attempts[pull.process.incarnation, pull.request_id].append((request, pull))
                if pull.ended is not None and pull.cause == "complete":
                    for rank in pull.ended.texts("read_ranks"):
                        self._hear(rank, pull.process, pull.ended.at - pull.ended.number("seconds", 0.0))
        self.decoders = cache(self._decoders)  # lists the processes that may have read from a prefill engine
        self._strangers = cache(self._find_strangers)
        self.claims_take_s = max((x for x in claims if x > UNDER_WAY_S), default=UNDER_WAY_S)
        """Most seconds after the lend at which a request was claimed."""

    def address_of(self, *ranks: str) -> str:
        """Return the address of the first of some ranks that has a known one; empty if none has."""
        return next((x for rank in ranks if (x := self._addresses.get(start_of(rank), ""))), "")

    def _shown(self, process: Process, at: float) -> str:
        return self.moment(self.axis.at(process, at))

    def _hear(self, rank: str, other: Process, at: float) -> None:
        """Note that a process has heard of a rank at some time of its own clock."""
        process = self.service.process_named(rank)
        if process is not None and self.axis.group(other) == self.axis.group(process) and not math.isnan(at):
            known = self._heard[process.incarnation]
            self._heard[process.incarnation] = max(known, self.when(other, at)[0])

    def _fate(self, process: Process) -> Fate:
        low, high = self.when(process, process.last_at)
        ends = f"its log ends at {self._shown(process, process.last_at)}"
        end = _End(low, high, ends, f"{ends} without a goodbye")
        if not process.num_records:
            end = _End(-math.inf, high, none := "there is no log of it", none)
        return self._by_itself(process, end) or self._by_others(process, end) or self._by_silence(process, end)

    def _by_itself(self, process: Process, end: _End) -> Fate | None:
        """Return the fate that a process's answer, the kernel, or its own goodbye shows."""
        stopped = process.stopped
        if process.answers:
            return Fate("alive", "it answers", math.inf, math.inf)
        if process.gone and stopped is None:
            return Fate("died", f"{process.gone} ({end.silently})", end.low, self._replaced_at(process))
        if stopped is not None:
            how = "closed" if stopped.event == told.EngineStopped.event else "suspended"
            return Fate("stopped", f"{how} at {self._shown(process, stopped.at)}", end.low, end.high)
        if process.hangs or process.halted:
            return end.silent(f"{process.halted or 'it does not answer'} ({end.ends})", hangs=True)
        return None

    def _by_others(self, process: Process, end: _End) -> Fate | None:
        """Return the fate that peers, or the next start of the rank, show, unless the process is there."""
        lost = self._lost.get(process.incarnation, ())
        if heard := next((x for x in lost if x[1].text("how") == How.GOODBYE), None):  # its own log's level omits that
            why = f"{heard[0].rank} heard at {self._shown(heard[0], heard[1].at)} that {heard[1].text('detail')}"
            return Fate("stopped", why, end.low, end.high)
        if process.is_here:
            return end.silent(f"its process is there ({end.ends})", hangs=self._is_overdue(process))
        if (after := process.successor) is not None and (began := self._replaced_at(process)) < math.inf:
            why = f"{end.silently}, and {after.rank} started at {self._shown(after, after.first_at)}"
            return Fate("died", why, end.low, began)
        for other, record in lost:
            at, how = self.when(other, record.at), record.text("how")
            is_late = at[0 if how == How.BROKEN else 1] > end.low  # a transfer that failed shows less
            waits_s = lease_of(process) + LAPSE_S if how == How.SILENT else SILENCE_S
            if is_late and how != How.FORGOTTEN and self.last >= end.high + waits_s:
                why = f"{end.silently}, and {other.rank} lost it: {record.text('detail')}"
                return Fate("died", why, end.low, at[1], how != How.SILENT)
        return None

    def _by_silence(self, process: Process, end: _End) -> Fate:
        if not process.says_info:
            return end.silent(f"its log has warnings only, the last of {self._shown(process, process.last_at)}")
        if self._is_overdue(process):
            why = f"{end.silently}, and a living engine writes a line every {in_seconds(lease_of(process) / 2)} s"
            return Fate("died", why, end.low, end.high + lease_of(process), False)
        return end.silent(f"{end.silently}; it may live and have nothing to say")

    def _replaced_at(self, process: Process) -> float:
        """Return when the next start of its rank shows that a process has ended; infinity if none does."""
        after = process.successor
        return self.when(after, after.first_at)[1] if after and self._replaces(after, process) else math.inf

    def _is_overdue(self, process: Process) -> bool:
        """Return True if logs go on for so long that a living process would have written a line, or be heard of."""
        heard = max(self.when(process, process.last_at)[1], self._heard[process.incarnation])
        is_told = process.says_info and self.axis.group(process) == 0
        return is_told and self.last >= heard + lease_of(process) + LATE_S

    def _replaces(self, after: Process, process: Process) -> bool:
        """Return True if a start of a rank shows that an earlier one has ended, since two may use one name at once."""
        is_here = after.boot_id == process.boot_id if after.boot_id and process.boot_id else after.host == process.host
        if not is_here or self._heard[process.incarnation] > self.when(after, after.first_at)[1]:
            return False
        silent_s = max(self.last - self.when(process, process.last_at)[1], after.last_at - process.last_at)
        is_silent = process.says_info and silent_s > 0.5 * lease_of(process) + SILENCE_S
        return is_silent or not seats(process).isdisjoint(seats(after))

    def ends_early(self, process: Process) -> bool:
        """Return True if a log ends half a lease before others without a reason, so that missing ends prove nothing.

        The process died, its log was cut off or collected early, or it had nothing to say.
        """
        fate = self.fate(process)
        may_be_cut = not fate.hangs or process.is_here
        is_silent = bool(process.num_records) and fate.kind == "silent" and may_be_cut
        sign_s = max(0.5 * lease_of(process), LATE_S) + SIGN_S  # a living process writes another line within that
        return is_silent and self.last - self.when(process, process.last_at)[1] > sign_s

    def reaches(self, process: Process) -> bool:
        """Return True unless an engine answered so long after its log's last line that the log lacks one."""
        if not process.answers or (logged := process.logged) is None:
            return not process.answers
        return logged.says_info and process.last_at - logged.at <= lease_of(process) / 2 + SIGN_S

    def tells(self, process: Process, reader: Process, at: float) -> bool:
        """Return True if a prefill rank's log continues for as long as blocks may have been lent after a moment of a
        reader's clock, or ends in a known way.

        Only then does a missing line prove that they did not expire: the time after the end of a log is not known.
        """
        if self.fate(process).is_known:
            return True
        if not self.reaches(process):
            return False
        longest = max(lease_of(process), process.durations.get("grant_s", 0.0))
        return self.near(process, process.last_at) >= self.near(reader, at) + longest + LATE_S

    def near(self, process: Process, at: float) -> float:
        """Convert a moment of a process's clock to common time, in the middle of the uncertainty."""
        return sum(self.when(process, at)) / 2

    def span(self, lease: LoggedLease) -> tuple[float, float]:
        """Return the interval of common time in which a lease was lent, at most."""
        return self.when(lease.process, lease.lent_at)[0], self.when(lease.process, lease.lent_at + lease.seconds)[1]

    def _decoders(self, engine_id: str) -> list[Process]:
        """List the processes that may have read from a prefill engine."""
        others = [x for x in self.service.processes.values() if x.engine_id != engine_id]
        known = [x for x in others if x.pulls or x.start in self.met]
        if not known and len(self._lenders) > 1:
            return []  # a process without a word yet may be of either side
        found = (x for x in others if x in known or not (x.lends or x.engine_id in self._lenders))
        return sorted(found, key=lambda x: x.first_at)

    def strangers(self, lease: LoggedLease) -> tuple[str, ...]:
        """Return readers without a log that shook hands with the rank before its lease was over."""
        return tuple(name for name, at in self._strangers(lease.process).items() if at <= lease.lent_at + lease.seconds)

    def _find_strangers(self, process: Process) -> dict[str, float]:
        met = {x.text("reader"): x.at for x in reversed(list(process.of(told.ReaderMet)))}
        return {x: at for x, at in met.items() if x and self.service.process_named(x) is None}

    # -- presence -------------------------------------------------------------------------------------------------

    def away_s(self, process: Process, since: float, until: float) -> float:
        """Return the longest absence of a loop between two moments of its process's clock; until now if it hangs."""
        spans = [(x.number("seconds", 0.0), x.at) for x in process.since(told.LoopWasAway, since)]
        if self.fate(process).hangs and process.num_records:
            seconds = max(self.last - self.near(process, process.last_at), 0.0)
            spans.append((seconds, process.last_at + seconds))
        return max((s for s, back in spans if back - s <= until), default=0.0)

    def long_away(self, lease: LoggedLease, reader: Process) -> tuple[float, float]:
        """Return the absence of a reader's loop over most of a lease's time, and its end by its own clock."""
        since, until = self._span_of(lease, reader)
        for record in reader.since(told.LoopWasAway, since):
            seconds, back = record.number("seconds", 0.0), record.at
            if back - seconds > until:  # all later absences begin after it, too: a loop is away once at a time
                break
            if min(until, back) - max(since, back - seconds) > MOST * max(until - since, 0.0):
                return seconds, back
        return 0.0, -math.inf

    def had_no_step(self, reader: Process, lease: LoggedLease) -> bool:
        """Return True if a reader's scheduler made no step for most of a lease's time, whether or not it was idle."""
        since, until = self._span_of(lease, reader)
        sign = next(reader.since(told.EngineAlive, since + 0.5 * (until - since)), None)
        return sign is not None and sign.at - sign.number("step_s", 0.0) <= since

    def _span_of(self, lease: LoggedLease, reader: Process) -> tuple[float, float]:
        """Return the times at which a lease began and ended, by a reader's clock."""
        ahead = reader.last_at - self.near(reader, reader.last_at) if reader.num_records else 0.0
        since = self.near(lease.process, lease.lent_at) + ahead
        return since, since + lease.seconds

    def absent(self, lease: LoggedLease, readers: Iterable[Process]) -> dict[str, str]:
        """Return the reasons for which readers were surely not there for most of a lease's time, by ranks."""
        out = {}
        for reader in readers:
            fate, away_s = self.fate(reader), self.long_away(lease, reader)[0]
            if fate.hangs and fate.after < self.span(lease)[1]:
                out[reader.rank] = fate.why
            elif stalled_s(reader, *self._span_of(lease, reader)) > 0.5 * lease.seconds:
                out[reader.rank] = "its scheduler made no step meanwhile, although something waited for one"
            elif away_s and not (fate.kind == "died" and fate.after <= self.span(lease)[1]):
                out[reader.rank] = f"its event loop was away for {in_seconds(away_s)} s then"
        return out
