"""What became of each process, as far as logs tell: it stopped in order, died, fell silent, or answers.

That a process died is believed if another start of it follows, if others lost it, or if its own log just stops and
somebody whose end it would have told of goes on to an orderly one; otherwise it may only have nothing to say. Who may
have read from whom, and whose loop was away, is known here too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asynckv.core import told
from asynckv.tools.diagnose.join import Lease, Process, Pull, Request, Service, start_of
from asynckv.tools.diagnose.leaks_clocks import CLOCKS_S, HOST_S, When
from asynckv.tools.diagnose.leaks_values import Early, engine_of, moment
from asynckv.tools.diagnose.records import Record

__all__ = ["DEFAULT_LEASE_S", "HABIT", "LATE_S", "QUIET", "SILENCE_S", "Fate", "Processes", "early_ends"]

DEFAULT_LEASE_S = 30.0
"""As in `LeaseConfig`, where a log does not say."""

LATE_S = 1.0
"""That a lease has expired is logged so much later than it is due, at most, where no loop is away."""

SILENCE_S = 5.0
"""Who lives writes a line again, where others go on for so long: whoever is lost is dead or hangs for good."""

AWAY_S = 10.0
"""A loop is seldom away for longer: of who is lost for its silence alone, logs of others must go on for so long.

Or for as long as it lends, and `LAPSE_S`: what it had lent has run out by then, and it would have said so.
"""

LAPSE_S = 3.0

UNDER_WAY_S = 0.25
"""No message is on its way for longer."""

HABIT = 10
"""Lines of a process that tell how long it usually pauses."""

QUIET = 10.0
"""A process that only seems to have died wrote its last line so many times its usual pause before that, at most."""


def early_ends(service: Service, when: When) -> list[Early]:
    """Find logs that end early, and what is known of their processes does not say why; the earliest first.

    What such a process did later is not judged: it died, its log was cut off or collected early, or it had nothing to
    say. Early is half a lease: what was lent meanwhile could have expired in the logs of others.
    """
    ends = {x.incarnation: when(x.incarnation, x.last_at) for x in service.processes.values()}
    last = max((low for low, _ in ends.values()), default=0.0)
    out = []
    for process in service.processes.values():
        before_s = last - ends[process.incarnation][1]
        bound = max(0.5 * process.durations.get("lease_s", DEFAULT_LEASE_S), LATE_S)
        if process.stopped is None and process.successor is None and not process.answers and before_s > bound:
            out.append(Early(process.rank, process.last_at, before_s))
    return sorted(out, key=lambda x: -x.before_s)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a process: `stopped`, `died`, `silent` or `alive` (it was asked, and answered), between which
    moments of everybody's time, and how that is known; a death that is not proved may be a log that was cut off. One
    that is silent hangs if it was asked, lives, and does not answer."""

    kind: str
    why: str
    after: float
    before: float
    is_proved: bool = True
    hangs: bool = False

    @property
    def gone(self) -> str:
        """A death in words; without a next start of the rank, or somebody that lost it, only its log has ended."""
        return "hangs" if self.hangs else "died" if self.is_proved else "died or was cut off"


class Processes:
    """All processes of a service, on one time for all."""

    def __init__(self, service: Service, when: When) -> None:
        self.service = service
        self.when = when
        self._lost: dict[str, list[tuple[Process, Record]]] = defaultdict(list)
        ends = [self.when(x.incarnation, x.stopped.at)[0] for x in service.processes.values() if x.stopped]
        self.last_end = max(ends, default=-math.inf)
        self._siblings: dict[str, list[Process]] = defaultdict(list)
        for process in service.processes.values():
            self._siblings[process.engine_id].append(process)
            for record in process.of(told.PeerChanged):
                if record.text("state") == "gone" and record.text("cause") in ("peer_lost", "restarted"):
                    self._lost[record.text("peer_incarnation")].append((process, record))
        self._lapsed: dict[str, float] = {}
        """By when readers were gone that let their promises run out and said no more."""
        self._unanswered = {start_of(x) for x in service.unanswered}
        self._lenders = {x.engine_id for x in service.requests}
        met = (y for x in service.processes.values() for y in x.of(told.ReaderMet))
        self.met = {start_of(x.text("reader")) for x in met}
        for request in service.requests:
            for lease in request.leases.values():
                self._note_lapses(request, lease)
        self._fates: dict[str, Fate] = {}
        self.last = max((self.when(x.incarnation, x.last_at)[0] for x in service.processes.values()), default=0.0)
        """Until when logs go on, at least."""
        leases = [x for request in service.requests for x in request.leases.values()]
        claims = [claim for lease in leases for claim in lease.claims.values()]
        self.asked = {(start_of(name), x.process.engine_id) for x in leases for name in (*x.claims, *x.released)}
        """Starts of readers that have spoken of anything to a prefill engine."""
        self.asked |= {(x.process.start, r.engine_id) for r in service.requests for x in r.all_pulls}
        self.claims_take_s = max((x.claimed_s for x in claims if x.claimed_s > UNDER_WAY_S), default=UNDER_WAY_S)
        """For how long after it was lent a request was claimed, at most."""
        self._unclaimed = [x for x in leases if any(name not in x.claims for name in x.owed or ("*",))]
        self._ahead_s = max(map(self._came_ahead_s, service.requests), default=0.0)
        """For how long before their requests were lent params have come, at most."""
        self._unknown: dict[str, list[tuple[float, str]]] = {}

    def fate(self, process: Process) -> Fate:
        """Say what became of a process."""
        known = self._fates.get(process.incarnation)
        if known is None:
            known = self._fates[process.incarnation] = self._fate(process)
        return known

    def _fate(self, process: Process) -> Fate:
        low, high = self.when(process.incarnation, process.last_at)
        ends = f"its log ends at {moment(process.last_at)} without a goodbye"
        if process.answers:
            return Fate("alive", "it answers", math.inf, math.inf)
        if process.stopped is not None:
            how = "closed" if process.stopped.event == told.EngineStopped.event else "suspended"
            return Fate("stopped", f"{how} at {moment(process.stopped.at)}", low, high)
        if process.start in self._unanswered:
            why = f"it does not answer (its log ends at {moment(process.last_at)})"
            return Fate("silent", why, low, math.inf, False, hangs=True)
        for other, record in self._lost.get(process.incarnation, ()):
            detail = record.text("detail")
            if detail.endswith("said goodbye"):  # and its own log's level leaves that out
                return Fate("stopped", f"{other.rank} heard at {moment(record.at)} that {detail}", low, high)
        if (after := process.successor) is not None:
            began = self.when(after.incarnation, after.first_at)[1]
            if began >= low:  # else both go by one name at once, and one says nothing of the other
                return Fate("died", f"{ends}, and {after.rank} started at {moment(after.first_at)}", low, began)
        for other, record in self._lost.get(process.incarnation, ()):
            at, detail = self.when(other.incarnation, record.at), record.text("detail")
            if detail == "failed" and at[0] <= low:
                continue  # a transfer has failed, and the process may have said more since
            waits_s = SILENCE_S
            if "was silent" in detail:
                waits_s = min(process.durations.get("lease_s", DEFAULT_LEASE_S) + LAPSE_S, AWAY_S)
            if at[1] > low and not detail.startswith("forgotten") and self.last >= high + waits_s:
                return Fate("died", f"{ends}, and {other.rank} lost it: {record.text('detail')}", low, at[1])
        if not process.says_info:
            why = f"its log has warnings only, the last of {moment(process.last_at)}"
            return Fate("silent", why, low, math.inf, False)
        gone_by = self._lapsed.get(process.incarnation, -math.inf)
        if gone_by >= low and self.last >= gone_by + SILENCE_S / 2:
            return Fate("died", f"{ends}, and it let its grants run out", low, gone_by, False)
        others = list(self._would_be_told_of(process))
        ended = [(self.when(x.incarnation, x.stopped.at)[0], x.rank) for x in others if x.stopped is not None]
        ended = [x for x in ended if x[0] > high]
        # Where others of them are without a goodbye as well, the logs may be of a service that is being closed.
        open_ = [x for x in others if x.stopped is None and self.when(x.incarnation, x.last_at)[0] > high]
        waits_for = min(ended)[0] if ended and open_ else high  # it may be closing, too
        if ended and self.last >= waits_for + SILENCE_S:
            return Fate("died", f"{ends}, and {min(ended)[1]} went on to its end", low, math.inf, False)
        return Fate("silent", f"{ends}; it may live and have nothing to say", low, math.inf, False)

    def tells(self, process: Process, pull: Pull, record: Record | None = None) -> bool:
        """A prefill rank's log goes on for as long as what a pull had of it may have been lent, or its death is known.

        What it says nothing of after that has not expired; what comes after the end of its log is not known.
        """
        fate = self.fate(process)
        if fate.kind == "stopped" or (fate.kind == "died" and fate.is_proved):
            return True
        told = pull.ended or record
        if told is None:
            return True
        said = process.durations
        longest = max(said.get("lease_s", DEFAULT_LEASE_S), said.get("grant_s", 0.0))
        low, high = self.when(process.incarnation, process.last_at)
        since = sum(self.when(pull.process.incarnation, told.at)) / 2
        return (low + high) / 2 >= since + longest + LATE_S

    def gone_by(self, process: Process) -> float:
        """By when, in everybody's time, a process no longer lived, as far as can be told.

        Of a death that only its silence tells, its last line does: it was not long before, by what it used to write.
        """
        fate = self.fate(process)
        if fate.kind != "died" or fate.is_proved:
            return fate.before
        pause_s = _pause_s(process)
        known = (process.durations.get(x, 0.0) for x in ("lease_s", "timeout_s"))
        quiet_s = max(DEFAULT_LEASE_S, QUIET * pause_s, *known)
        return min(fate.before, self.when(process.incarnation, process.last_at)[1] + quiet_s)

    def is_quiet(self, process: Process) -> bool:
        """Its log ends while others go on for longer than it was ever silent, as far as its usual pause tells."""
        if self.fate(process).kind != "silent" or not process.says_info or process.num_records < HABIT:
            return False
        quiet_s = max(process.durations.get("lease_s", DEFAULT_LEASE_S), QUIET * _pause_s(process))
        return self.last - self.when(process.incarnation, process.last_at)[1] > quiet_s

    def unanswered_decoders(self) -> list[str]:
        """Ranks that were asked and do not answer, of which there is no log, and that may be of the decode side."""
        named = (x for x in self.service.unanswered if self.service.process_named(x) is None)
        return [x for x in named if engine_of(x) not in self._lenders]

    def _would_be_told_of(self, process: Process) -> Iterator[Process]:
        """Those whose orderly end a process that lives would speak of: ranks that it read from, and of its own engine.

        Of others it hears nothing, and it may have nothing to say when they end.
        """
        states = {x.text("peer_incarnation"): x.text("state") for x in process.of(told.PeerChanged)}
        for incarnation, state in states.items():
            if state != "gone" and (peer := self.service.processes.get(incarnation)) is not None:
                yield peer
        yield from (x for x in self._siblings[process.engine_id] if x.base != process.base)

    def lives_until(self, process: Process, at: float) -> bool:
        """It surely lived at some moment of everybody's time."""
        fate = self.fate(process)
        return fate.after >= at

    def decoders(self, engine_id: str) -> list[Process]:
        """Whoever may have read from a prefill engine."""
        others = [x for x in self.service.processes.values() if x.engine_id != engine_id]
        known = [x for x in others if x.pulls or x.start in self.met]
        if not known and len(self._lenders) > 1:
            return []  # who has said nothing yet may be of either side
        found = (x for x in others if x in known or not (x.lends or x.engine_id in self._lenders))
        return sorted(found, key=lambda x: x.first_at)

    def unknown_readers(self, process: Process, until: float) -> tuple[str, ...]:
        """Readers that shook hands with a prefill rank by a moment of its clock, and whose logs are not there."""
        known = self._unknown.get(process.incarnation)
        if known is None:
            met = ((x.at, x.text("reader")) for x in process.of(told.ReaderMet))
            known = [(at, name) for at, name in met if name and self.service.process_named(name) is None]
            self._unknown[process.incarnation] = known
        return tuple(dict.fromkeys(name for at, name in known if at <= until))

    def away_s(self, process: Process, since: float, until: float) -> float:
        """For how long a process's loop was away between two moments of its own clock, at most at once."""
        out = 0.0
        for record in process.since(told.LoopWasAway, since):
            seconds = record.number("seconds", 0.0)
            if record.at - seconds > until:  # and so are those after it: a loop is away once at a time
                break
            out = max(out, seconds)
        return out

    def num_unclaimed(self, holder: Process, reader: Process) -> int:
        """Count what a rank lent while a reader lived, and what nobody claimed."""
        low, high = self.when(reader.incarnation, reader.first_at)[0], self.gone_by(reader)
        spans = (self.span(x) for x in self._unclaimed if x.process is holder)
        return sum(since <= high and until >= low for since, until in spans)

    def span(self, lease: Lease) -> tuple[float, float]:
        """From when to when a lease was lent, in everybody's time, generously."""
        name, ended = lease.process.incarnation, lease.lent_at + lease.seconds
        return self.when(name, lease.lent_at)[0], self.when(name, ended)[1]

    def _note_lapses(self, request: Request, lease: Lease) -> None:
        if lease.state != "expired":
            return
        for name in lease.owed:
            process = self.service.process_named(name)
            pulls = (x for x in request.all_pulls if x.process is process)
            if process is not None and name not in lease.retrying and all(x.ended is None for x in pulls):
                gone_by = self.when(lease.process.incarnation, lease.lent_at + lease.seconds)[1]
                self._lapsed[process.incarnation] = min(gone_by, self._lapsed.get(process.incarnation, math.inf))

    def _came_ahead_s(self, request: Request) -> float:
        if not any(x.claimed_s <= 0.0 for lease in request.leases.values() for x in lease.claims.values()):
            return 0.0
        asked = (self.when(x.process.incarnation, x.begun_at)[0] for x in request.pulls.values())
        lent = (self.when(x.process.incarnation, x.lent_at)[1] for x in request.leases.values())
        return max(lent) - min(asked, default=math.inf)

    def died_about(self, readers: Sequence[Process], since: float, until: float) -> list[Process]:
        """Who died about when a request was lent, and may have known of it: params arrive early, and late."""
        out = []
        for reader in readers:
            fate, waits_s = self.fate(reader), reader.durations.get("timeout_s", CLOCKS_S)
            began = self.when(reader.incarnation, reader.first_at)[0]
            early_s = min(self._ahead_s, waits_s) - HOST_S
            if fate.kind == "died" and self.gone_by(reader) >= since - early_s and fate.after <= until + waits_s:
                out += [reader] if began <= until + waits_s else []
        return out


def _pause_s(process: Process) -> float:
    """Return how long a process is silent between two lines, on average."""
    return (process.last_at - process.first_at) / max(process.num_records - 1, 1)
