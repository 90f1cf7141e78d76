"""Which blocks came back late, and why: one finding per request, with its evidence.

What is late is said in `asynckv/diagnose/causes.py`, and so is what each cause needs. Here the evidence is weighed, in
the order in which one thing would have been enough by itself: what was refused, then what became of the reader's
process, then what its pull says, then whose loop was away. Every reader that is owed has a story; of a request with
several the most certain one counts, and among these the first.

What follows from a log that *lacks* a line rests on what logs always have: expiries, failures, releases that nobody
answered and orderly ends are never left out. So a reader that is owed, and whose log has no outcome of its pull, is
dead, or its log is not whole. That a process died is believed if another start of it follows, if others lost it, or if
its own log just stops and somebody whose end it would have told of goes on to an orderly one; otherwise it may only
have nothing to say.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from asynckv.diagnose.axis import make_axis
from asynckv.diagnose.causes import CATALOGUE, CAUSE
from asynckv.diagnose.join import Lease, Process, Pull, Refusal, Request, Service, base_name, start_of
from asynckv.diagnose.records import Record, number
from asynckv.observe.events import EVENT

__all__ = ["Early", "Leak", "When", "Word", "aligned", "early_ends", "find_leaks"]

CLOCKS_S = 10.0
"""How far the clocks of two hosts may be apart where nothing else is known of them."""

HOST_S = 0.1
"""How far apart the lines of one moment may be that processes of one host have written."""

DEFAULT_LEASE_S = 30.0
"""As in `LeaseConfig`, where a log does not say."""

LATE_S = 1.0
"""That a lease has expired is logged so much later than it is due, at most, where no loop is away."""

SILENCE_S = 5.0
"""A loop is seldom away for longer: who is lost, while logs of others go on for so long, is dead or hangs for good."""

UNDER_WAY_S = 0.25
"""No message is on its way for longer."""

AT_ONCE_S = 0.01
"""Things that one process tells of within this time happened at the same moment."""

QUIET = 10.0
"""A process that only seems to have died wrote its last line so many times its usual pause before that, at most."""

GATHERED_S = 11.0
"""A warning may come so much later than it is due."""

When = Callable[[str, float], tuple[float, float]]
"""Between which moments of one time for all something happened: the start of a process, and a time by its clock."""

C = CAUSE
NOT_MET = frozenset({"peer_unreachable", "protocol_version", "geometry_refused"})
STALE = frozenset({"restarted", "stale_memory"})
HARMLESS = frozenset(
    {"expired", "revoked", "released_already", "consumed", "withdrawn", "unknown_key", "engine_closed"}
)
"""Reasons for which a message is turned down that say nothing new of why the lease is not released."""


@dataclass(frozen=True, slots=True)
class Word:
    """What became of what one reader had to say to one prefill rank.

    Attributes:
        claim: `came after 0.1 s`, `never came`, `was refused: ...`.
        release: `came: complete`, `was refused: ...`, `was lost`, `was never sent`, `never came`.
    """

    holder: str
    reader: str
    claim: str
    release: str


@dataclass(frozen=True, slots=True)
class Leak:
    """Blocks of one request that came back late, on one side.

    Attributes:
        cause: Out of the catalogue.
        sentence: The cause, with names and numbers.
        side: Whose blocks: `prefill` or `decode`.
        state: What became of them: `expired`, `closed`, `died`, `held`, `announced`, `unknown` (no log says so);
            `returned`, `retired` or `quarantined` on the decode side.
        engine_id: The prefill engine.
        request_id: The prefill side's id.
        decode_request_ids: What the decode side calls it, as far as that is known.
        holders: Ranks whose blocks they are.
        blocks: How many, on all of these; -1 if no log says so.
        seconds: For how long they were held, as far as is known.
        since: Since when, in seconds since 1970 by the holder's clock; nan if unknown.
        owed: Readers that were waited for; `*` is a decode engine that never spoke up.
        reader: The one that the sentence speaks of, as far as one is known.
        other_request_id: Under which id it was spoken of, if not under its own.
        released: Readers that did release, and how.
        words: What was said and heard, per reader and rank.
        last_prefill: The last that the prefill side's logs say of it.
        last_decode: The last that the decode side's logs say of it.
        also: Other stories that are true of other readers.
        missing: Whose logs would say more.
    """

    cause: CAUSE
    sentence: str
    side: str
    state: str
    engine_id: str
    request_id: str
    sequence: int
    decode_request_ids: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    blocks: int = -1
    seconds: float = math.nan
    since: float = math.nan
    owed: tuple[str, ...] = ()
    reader: str = ""
    other_request_id: str = ""
    released: Mapping[str, str] = field(default_factory=dict)
    words: tuple[Word, ...] = ()
    last_prefill: str = ""
    last_decode: str = ""
    also: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """What to do."""
        return CATALOGUE[self.cause].remedy


@dataclass(slots=True)
class _Story:
    """Why one reader is owed; `at` orders those of one request."""

    cause: CAUSE
    names: dict[str, Any]
    at: float = math.inf
    missing: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[bool, bool, float]:
        return CATALOGUE[self.cause].is_class, self.cause is C.RANK_NEVER_SPOKE, self.at

    @property
    def sentence(self) -> str:
        return CATALOGUE[self.cause].sentence.format_map(_Names(self.names))


class _Names(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return {"gone": "died", "other": "another id than it was lent under"}.get(key, "?")


def find_leaks(service: Service, when: When | None = None, of: Iterable[Request] | None = None) -> list[Leak]:
    """Find what was late, the oldest first.

    Args:
        service: Of `join`.
        when: Aligns clocks; if left out, they are aligned by what the processes said to each other.
        of: Of these requests only.
    """
    judge = _Judge(service, when or aligned(service))
    leaks = [leak for request in (service.requests if of is None else of) for leak in judge.leaks(request)]
    return sorted(leaks, key=lambda x: (math.isnan(x.since), x.since if not math.isnan(x.since) else 0.0))


def aligned(service: Service) -> When:
    """Align the clocks of all processes by what they said to each other.

    Of those who said nothing to anybody it is only known that clocks are seldom more than `CLOCKS_S` apart.
    """
    clocks = make_axis(service).clocks
    main = clocks.group(clocks.groups[0][0]) if clocks.groups else 0
    # Who exchanged nothing with anybody has the clock of the others on its host.
    on_host = {x.host: name for name, x in service.processes.items() if x.host and clocks.group(name) == main}

    def when(incarnation: str, at: float) -> tuple[float, float]:
        name, slack = incarnation, 0.0
        if clocks.group(incarnation) != main:
            name, slack = on_host.get(service.processes[incarnation].host, ""), HOST_S
        if not name:
            return at - CLOCKS_S, at + CLOCKS_S
        offset = clocks.offset(name, at)
        if not math.isfinite(offset.seconds):
            return at - CLOCKS_S, at + CLOCKS_S
        within_s = min(offset.within_s + slack, CLOCKS_S)
        return at - offset.seconds - within_s, at - offset.seconds + within_s

    return when


@dataclass(frozen=True, slots=True)
class Early:
    """A process whose log ends, without a goodbye, long before the logs of others do.

    Attributes:
        before_s: By how much, at least.
    """

    rank: str
    last_at: float
    before_s: float


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


def moment(at: float) -> str:
    """Write a time by somebody's clock."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3] if 0 < at < 1e11 else "?"


def _s(seconds: float) -> str:
    """Write seconds as people do."""
    return "?" if math.isnan(seconds) else f"{seconds:.3g}" if abs(seconds) < 100 else f"{seconds:.0f}"


def _all(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


@dataclass(frozen=True, slots=True)
class _Fate:
    """What became of a process: `stopped`, `died`, `silent` or `alive` (it was asked, and answered), between which
    moments of everybody's time, and how that is known; a death that is not proved may be a log that was cut off."""

    kind: str
    why: str
    after: float
    before: float
    is_proved: bool = True

    @property
    def gone(self) -> str:
        """A death in words; without a next start of the rank, or somebody that lost it, only its log has ended."""
        return "died" if self.is_proved else "died or was cut off"


class _Judge:
    """Weighs the evidence of one service."""

    def __init__(self, service: Service, when: When) -> None:
        self._service = service
        self._when = when
        self._lost: dict[str, list[tuple[Process, Record]]] = defaultdict(list)
        ends = [self._when(x.incarnation, x.stopped.at)[0] for x in service.processes.values() if x.stopped]
        self._last_end = max(ends, default=-math.inf)
        self._siblings: dict[str, list[Process]] = defaultdict(list)
        for process in service.processes.values():
            self._siblings[process.engine_id].append(process)
            for record in process.of(EVENT.PEER_CHANGED):
                if record.text("state") == "gone" and record.text("cause") in ("peer_lost", "restarted"):
                    self._lost[record.text("peer_incarnation")].append((process, record))
        self._lapsed: dict[str, float] = {}
        """By when readers were gone that let their promises run out and said no more."""
        self._lenders = {x.engine_id for x in service.requests}
        met = (y for x in service.processes.values() for y in x.of(EVENT.READER_MET))
        self._met = {start_of(x.text("reader")) for x in met}
        for request in service.requests:
            for lease in request.leases.values():
                self._note_lapses(request, lease)
        self._fates: dict[str, _Fate] = {}
        self._last = max((self._when(x.incarnation, x.last_at)[0] for x in service.processes.values()), default=0.0)
        """Until when logs go on, at least."""
        leases = [x for request in service.requests for x in request.leases.values()]
        claims = [claim for lease in leases for claim in lease.claims.values()]
        self._asked = {start_of(name) for x in leases for name in (*x.claims, *x.released)}
        """Starts of readers that have claimed or released anything."""
        self._asked |= {x.process.start for request in service.requests for x in request.all_pulls}
        self._is_ahead = any(x.claimed_s <= 0.0 for x in claims)
        """Params leave before their requests are lent: claims wait for them."""
        self._unknown: dict[str, tuple[str, ...]] = {}

    def _note_lapses(self, request: Request, lease: Lease) -> None:
        if lease.state != "expired":
            return
        for name in lease.owed:
            process = self._service.process_named(name)
            pulls = (x for x in request.all_pulls if x.process is process)
            if process is not None and name not in lease.retrying and all(x.ended is None for x in pulls):
                gone_by = self._when(lease.process.incarnation, lease.lent_at + lease.seconds)[1]
                self._lapsed[process.incarnation] = min(gone_by, self._lapsed.get(process.incarnation, math.inf))

    # -- processes -------------------------------------------------------------------------------------------------

    def fate(self, process: Process) -> _Fate:
        """Say what became of a process."""
        known = self._fates.get(process.incarnation)
        if known is None:
            known = self._fates[process.incarnation] = self._fate(process)
        return known

    def _fate(self, process: Process) -> _Fate:
        low, high = self._when(process.incarnation, process.last_at)
        ends = f"its log ends at {moment(process.last_at)} without a goodbye"
        if process.answers:
            return _Fate("alive", "it answers", math.inf, math.inf)
        if process.stopped is not None:
            how = "closed" if process.stopped.event == EVENT.ENGINE_STOPPED else "suspended"
            return _Fate("stopped", f"{how} at {moment(process.stopped.at)}", low, high)
        for other, record in self._lost.get(process.incarnation, ()):
            detail = record.text("detail")
            if detail.endswith("said goodbye"):  # and its own log's level leaves that out
                return _Fate("stopped", f"{other.rank} heard at {moment(record.at)} that {detail}", low, high)
        if (after := process.successor) is not None:
            began = self._when(after.incarnation, after.first_at)[1]
            if began >= low:  # else both go by one name at once, and one says nothing of the other
                return _Fate("died", f"{ends}, and {after.rank} started at {moment(after.first_at)}", low, began)
        for other, record in self._lost.get(process.incarnation, ()):
            at, detail = self._when(other.incarnation, record.at), record.text("detail")
            if detail == "failed" and at[0] <= low:
                continue  # a transfer has failed, and the process may have said more since
            if at[1] > low and not detail.startswith("forgotten") and self._last >= low + SILENCE_S:
                return _Fate("died", f"{ends}, and {other.rank} lost it: {record.text('detail')}", low, at[1])
        if not process.says_info:
            why = f"its log has warnings only, the last of {moment(process.last_at)}"
            return _Fate("silent", why, low, math.inf, False)
        gone_by = self._lapsed.get(process.incarnation, -math.inf)
        if gone_by >= low and self._last >= gone_by + SILENCE_S / 2:
            return _Fate("died", f"{ends}, and it let its promises run out", low, gone_by, False)
        for other in self._would_be_told_of(process):
            if other.stopped is not None and self._when(other.incarnation, other.stopped.at)[0] > high:
                return _Fate("died", f"{ends}, and {other.rank} went on to its end", low, math.inf, False)
        return _Fate("silent", f"{ends}; it may live and have nothing to say", low, math.inf, False)

    def _tells(self, process: Process, pull: Pull, record: Record | None = None) -> bool:
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
        low, high = self._when(process.incarnation, process.last_at)
        since = sum(self._when(pull.process.incarnation, told.at)) / 2
        return (low + high) / 2 >= since + longest + LATE_S

    def _gone_by(self, process: Process) -> float:
        """By when, in everybody's time, a process no longer lived, as far as can be told.

        Of a death that only its silence tells, its last line does: it was not long before, by what it used to write.
        """
        fate = self.fate(process)
        if fate.kind != "died" or fate.is_proved:
            return fate.before
        pause_s = (process.last_at - process.first_at) / max(process.num_records - 1, 1)
        known = (process.durations.get(x, 0.0) for x in ("lease_s", "timeout_s"))
        quiet_s = max(DEFAULT_LEASE_S, QUIET * pause_s, *known)
        return min(fate.before, self._when(process.incarnation, process.last_at)[1] + quiet_s)

    def _would_be_told_of(self, process: Process) -> Iterator[Process]:
        """Those whose orderly end a process that lives would speak of: ranks that it read from, and of its own engine.

        Of others it hears nothing, and it may have nothing to say when they end.
        """
        states = {x.text("peer_incarnation"): x.text("state") for x in process.of(EVENT.PEER_CHANGED)}
        for incarnation, state in states.items():
            if state != "gone" and (peer := self._service.processes.get(incarnation)) is not None:
                yield peer
        yield from (x for x in self._siblings[process.engine_id] if x.base != process.base)

    def _lives_until(self, process: Process, at: float) -> bool:
        """It surely lived at some moment of everybody's time."""
        fate = self.fate(process)
        return fate.after >= at

    def _decoders(self, engine_id: str) -> list[Process]:
        """Whoever may have read from a prefill engine."""
        others = [x for x in self._service.processes.values() if x.engine_id != engine_id]
        known = [x for x in others if x.pulls or x.start in self._met]
        if not known and len(self._lenders) > 1:
            return []  # who has said nothing yet may be of either side
        found = (x for x in others if x in known or not (x.lends or x.engine_id in self._lenders))
        return sorted(found, key=lambda x: x.first_at)

    def _unknown_readers(self, process: Process) -> tuple[str, ...]:
        """Readers that shook hands with a prefill rank, and whose logs are not there."""
        known = self._unknown.get(process.incarnation)
        if known is None:
            names = dict.fromkeys(x.text("reader") for x in process.of(EVENT.READER_MET))
            known = tuple(x for x in names if x and self._service.process_named(x) is None)
            self._unknown[process.incarnation] = known
        return known

    def _away(self, process: Process, since: float, until: float) -> float:
        """For how long a process's loop was away between two moments of its own clock, at most at once."""
        out = 0.0
        for record in process.since(EVENT.LOOP_WAS_AWAY, since):
            seconds = record.number("seconds", 0.0)
            if record.at - seconds > until:  # and so are those after it: a loop is away once at a time
                break
            out = max(out, seconds)
        return out

    def _span(self, lease: Lease) -> tuple[float, float]:
        """From when to when a lease was lent, in everybody's time, generously."""
        name, ended = lease.process.incarnation, lease.lent_at + lease.seconds
        return self._when(name, lease.lent_at)[0], self._when(name, ended)[1]

    # -- what is late ----------------------------------------------------------------------------------------------

    def leaks(self, request: Request) -> Iterator[Leak]:
        """Find what was late of one request."""
        late = {
            lease: state
            for lease in request.leases.values()
            if (state := self._late(lease)) and not (state == "held" and self._was_read_since(request, lease))
        }
        forgotten = [x for x in request.all_pulls if self._is_forgotten(x)]
        if late:
            yield self._of_leases(request, late)
        elif any(map(_is_overdue, forgotten)):
            yield self._of_announcement(request, forgotten)
        elif (unheard := self._of_releases(request)) is not None:
            yield unheard
        kept = [x for x in request.all_pulls if self._is_kept(x)]
        if kept:
            yield self._of_blocks(request, kept)

    def _was_read_since(self, request: Request, lease: Lease) -> bool:
        """All that it waits for have read it, and told it, by their own logs: its log ends before it could say so."""

        def has_read(pull: Pull) -> bool:
            return pull.cause == "complete" and not pull.refused and not self._is_unanswered(pull, lease)

        owed = lease.owed
        return bool(owed) and all(
            start_of(name) and any(has_read(x) for x in self._pulls_of(request, lease, name)) for name in owed
        )

    def _late(self, lease: Lease) -> str:
        """How a lease's blocks came back late, or did not; empty if they are not."""
        if lease.ended is not None:
            return {"expired": "expired", "closed": "closed"}.get(lease.state, "")
        fate = self.fate(lease.process)
        if fate.kind == "stopped" or not self._is_open(lease):
            return ""  # closing ends all leases, and says so of those that do not end well
        if fate.kind == "died" or self._last_end > self._due(lease):
            return "died"
        overdue = lease.seconds > (lease.lease_s if not math.isnan(lease.lease_s) else DEFAULT_LEASE_S)
        return "held" if lease.held or overdue else ""

    def _due(self, lease: Lease) -> float:
        """Until when, in everybody's time, an owner that lives has spoken of an open lease again."""
        if lease.held:
            record, entry = lease.held[-1]
            due = record.at + number(entry.get("lent_s"), 0.0)
        else:
            due = lease.lent_at + (lease.lease_s if not math.isnan(lease.lease_s) else DEFAULT_LEASE_S)
        return self._when(lease.process.incarnation, max(due, lease.process.last_at) + GATHERED_S)[1]

    def _is_open(self, lease: Lease) -> bool:
        """It is held when the log ends. What ended well without a word was not sampled."""
        if lease.lent is not None:
            return True
        if not lease.held:
            return False
        record, entry = lease.held[-1]
        if not lease.process.says_info:
            # A release is no warning: only a warning past its lease says that it was not released.
            lent_s = number(entry.get("lent_s"), 0.0)
            promised = (number(x.get("lent_s")) + number(x.get("left_s")) for _, x in lease.held[:-1])
            if not any(until <= lent_s for until in promised):
                return False
        due = number(entry.get("lent_s"), 0.0) + GATHERED_S
        if not lease.claims:
            due = min(due, number(entry.get("left_s"), math.inf) + 1.0)  # then it would have expired, and been told
        return lease.process.last_at <= record.at + due

    def _is_forgotten(self, pull: Pull) -> bool:
        """An announcement that nobody pulled, for as long as it may last."""
        if pull.ended is not None:
            return pull.cause == "timeout" and pull.failed_in == "announced"
        return pull.state == "announced" and self.fate(pull.process).kind in ("silent", "alive") and _is_last_word(pull)

    def _is_kept(self, pull: Pull) -> bool:
        """Its blocks were not free when it had its outcome."""
        if pull.ended is None and pull.state in ("quarantined", "draining"):
            return _is_last_word(pull)
        return pull.held_transfers > 0 or pull.returned is not None or pull.retired is not None

    # -- leases ----------------------------------------------------------------------------------------------------

    def _of_leases(self, request: Request, late: Mapping[Lease, str]) -> Leak:
        stories = [story for lease, state in late.items() for story in self._stories(request, lease, state)]
        stories.sort(key=lambda x: x.order)
        first = stories[0]
        oldest = min(late, key=lambda x: x.lent_at if not math.isnan(x.lent_at) else math.inf)
        blocks = [x.blocks for x in late]
        return self._leak(
            request,
            first,
            side="prefill",
            state=late[oldest],
            holders=tuple(x.process.rank for x in late),
            blocks=sum(blocks) if all(x >= 0 for x in blocks) else -1,
            seconds=max(x.seconds for x in late),
            since=oldest.lent_at,
            owed=tuple(dict.fromkeys(name for x in late for name in x.owed)),
            released={k: v for x in late for k, v in x.released.items()},
            words=tuple(self._words(request, late)),
            also=tuple(dict.fromkeys(x.sentence for x in stories[1:] if x.cause is not first.cause)),
        )

    def _stories(self, request: Request, lease: Lease, state: str) -> list[_Story]:
        """Say why a lease is late: one story for each reader that it waits for."""
        holder, fate = lease.process.rank, self.fate(lease.process)
        if state == "died":
            why = fate.why
            if fate.kind != "died":
                why = f"{why.partition(';')[0]}, nor a word of what it held, and others went on to their end"
            return [_Story(C.PREFILL_DIED, {"holder": holder, "why": why, "gone": fate.gone}, lease.seconds)]
        if state == "closed":
            how = lease.ended.text("revoked_by") if lease.ended is not None else ""
            names = {
                "holder": holder,
                "owed": _all(lease.owed),
                "why": f"after {_s(lease.seconds)} s; {how or fate.why}",
            }
            return [_Story(C.PREFILL_CLOSED, names, lease.seconds)]
        owed = list(dict.fromkeys(lease.owed)) or ["*"]
        return [self._story(request, lease, name) for name in owed]

    def _story(self, request: Request, lease: Lease, name: str) -> _Story:
        claim = lease.claims.get(name)
        pulls = self._pulls_of(request, lease, name)
        if (story := self._was_refused(request, lease, name, pulls)) is not None:
            return story
        is_claimed = claim is not None or bool(start_of(name))
        story = self._claimed(lease, name, pulls) if is_claimed else self._unclaimed(request, lease, name, pulls)
        if CATALOGUE[story.cause].is_class and (bug := self._bug(lease, name, pulls)) is not None:
            return bug
        return story

    def _pulls_of(self, request: Request, lease: Lease, name: str) -> list[Pull]:
        """Find the attempts that a reader's name means, by time."""
        claim = lease.claims.get(name)
        out = []
        for pull in request.all_pulls:
            if name == "*":
                spoke = (*lease.claims, *lease.released)
                ranks = {base_name(x) for x in pull.peer_ranks}
                is_his = all(pull.process.start != start_of(x) for x in spoke)
                is_his = is_his and (not ranks or lease.process.base in ranks)
            elif claim is not None and claim.pull_id == pull.pull_id:
                is_his = True
            else:
                start = start_of(name)
                is_his = pull.process.start == start if start else pull.process.base == base_name(name)
            if is_his:
                out.append(pull)
        return sorted(out, key=lambda x: x.begun_at if not math.isnan(x.begun_at) else math.inf)

    def _was_refused(self, request: Request, lease: Lease, name: str, pulls: Sequence[Pull]) -> _Story | None:
        """What was turned down is why a reader is owed, whatever became of it."""
        reader = self._reader(name, pulls)
        found = [x for x in lease.refused if name == "*" or base_name(x.who) == base_name(name) or not base_name(x.who)]
        found = [x for x in found if not self._is_stranger(x.who, name)]
        for pull in pulls:  # what the prefill side has not said, or could not
            for record in pull.refused:
                ranks = _ranks_of(record)
                if not ranks or any(start_of(x) in ("", lease.process.start) for x in ranks):
                    cause = record.text("cause")
                    found.append(Refusal(math.inf, "release", cause, pull.process.rank, record.text("detail")))
        for refusal in found:
            who = refusal.who if start_of(refusal.who) and name == "*" else reader
            who = "a reader" if who == "*" else who
            why = f"{refusal.message} {refusal.reason}{f', {refusal.detail}' if refusal.detail else ''}"
            names = {"reader": who, "why": why, "message": refusal.message, "holder": lease.process.rank}
            match refusal.reason:
                case "wrong_request":
                    others = [x.prefill_request_id for x in (*request.others.values(), *pulls) if x.prefill_request_id]
                    other = next((x for x in others if x != lease.request_id), "") or _named_in(refusal.detail)
                    return _Story(C.OTHER_REQUEST_ID, names | _other(other), refusal.after_s)
                case "parked_too_long":
                    return _Story(C.RELEASE_TOO_EARLY, names, 0.0)
                case "expired" if "max_lease_s" in refusal.detail:
                    return _Story(C.MAX_LEASE, names, refusal.after_s)
                case reason if reason in STALE:
                    return _Story(C.STALE_PARAMS, names, refusal.after_s)
                case reason if reason not in HARMLESS and (refusal.message == "release" or name not in lease.claims):
                    return _Story(C.RELEASE_REFUSED, names, refusal.after_s)
                case _:
                    pass
        return None

    def _is_stranger(self, who: str, name: str) -> bool:
        """Somebody who bears a reader's name, and of whose start neither side has ever heard."""
        start = start_of(who)
        if not start or start == start_of(name) or start in self._met or self._service.process_named(who) is not None:
            return False
        return bool(start_of(name) or self._met)

    def _reader(self, name: str, pulls: Sequence[Pull]) -> str:
        if name == "*" or not start_of(name):
            return _all(x.process.rank for x in pulls) if pulls else name
        return name

    # -- ... that nobody claimed -----------------------------------------------------------------------------------

    def _unclaimed(self, request: Request, lease: Lease, name: str, pulls: Sequence[Pull]) -> _Story:
        """Say why a reader never spoke up."""
        if pulls:
            return self._never_got_through(lease, pulls[-1])
        holder = lease.process.rank
        since, until = self._span(lease)
        readers = self._decoders(lease.process.engine_id)
        # Others of an engine have spoken of it, to this rank or another: then it is one of theirs that did not.
        bound = {_engine_of(x) for x in (*lease.owed, *lease.claims, *lease.released)}
        spoke = [x for x in dict.fromkeys(x.process for x in request.all_pulls) if _engine_of(x.rank) not in bound]
        if name != "*":
            readers = [x for x in readers if x.base == base_name(name)]
        elif spoke:
            engines = {x.engine_id for x in spoke}
            readers = [x for x in readers if x.engine_id in engines and x not in spoke]
        unknown = self._unknown_readers(lease.process)
        died, silent = [], []
        gone = [x for x in readers if self._gone_by(x) < since]
        readers = [x for x in readers if x not in gone] or gone
        for reader in readers:
            fate = self.fate(reader)
            if self._gone_by(reader) < since or self._when(reader.incarnation, reader.first_at)[0] > until:
                continue
            if fate.kind == "died" and fate.after <= until:
                died.append(reader)
            elif fate.kind == "silent" and fate.after < until:
                silent.append(reader)
        if not spoke and name == "*":
            # Other ranks of the same engine live: they would have spoken of a request that it had.
            ranks = {x.base for x in died} | {x.base for x in silent}
            whole = {x.engine_id for x in died} - {x.engine_id for x in readers if x.base not in ranks}
            died = [x for x in died if x.engine_id in whole]
        met = {start_of(x.text("reader")) for x in lease.process.of(EVENT.READER_MET)}
        died = [x for x in died if x.start in met] or died
        if name == "*" and not spoke and lease.state != "lent" and not unknown:
            lost = self._lost_about(readers, since, until)
            is_meant = len({x.engine_id for x in readers}) == 1
            # Who shook hands here, and never came to speak of anything else, did so for this request.
            is_meant = is_meant or any(x.start in met - self._asked for x in died)
            if lost and not (died and is_meant):
                # Its params never arrived, or arrived at somebody who died: nothing tells for whom it was.
                lost = died or lost
                why = (
                    "; no log of the decode side speaks of it: its params never arrived, or whoever had them died, as "
                    f"{_all(x.rank for x in lost)} did about then ({self.fate(lost[0]).why})"
                )
                return _Story(C.NEVER_CLAIMED, {"why": why})
        if died and lease.state != "lent":
            gone_as = self.fate(died[0])
            who = _all(x.rank for x in died)
            names = {"reader": who, "why": gone_as.why, "gone": gone_as.gone, "holder": holder}
            return _Story(C.DIED_BEFORE_CLAIM, names, lease.seconds)
        if name != "*" or spoke:
            others = [x for x in (*lease.claims, *lease.released, *(x.rank for x in spoke)) if x != name]
            reserve = "; it may have died" if silent or not readers else ""
            why = f"{_all(others)}{reserve}" if others else f"nobody did yet{reserve}"
            named = name if name != "*" else _all(x.rank for x in readers) or "a rank"
            return _Story(C.RANK_NEVER_SPOKE, {"reader": named, "why": why}, missing=() if readers else (named,))
        is_cut = len(silent) == len(readers) and self._last < until + SILENCE_S
        if readers and not unknown and lease.state != "lent" and not is_cut:
            gone_too = _all(x.rank for x in silent)
            reserve = f"; or {gone_too} died with them, for there a log ends before the lease did" if silent else ""
            if readers == gone:
                reserve = f"; {_all(x.rank for x in gone)} had died before it was lent"
            return _Story(C.NEVER_HEARD_OF, {"why": _all(x.rank for x in readers), "died": reserve})
        return _Story(
            C.NEVER_CLAIMED,
            {"why": self._circumstances(lease, readers, silent, unknown)},
            missing=unknown or (("the decode side",) if not readers else tuple(x.rank for x in silent)),
        )

    def _lost_about(self, readers: Sequence[Process], since: float, until: float) -> list[Process]:
        """Who died about when a request was lent, and may have known of it: params arrive early, and late."""
        out = []
        for reader in readers:
            fate, waits_s = self.fate(reader), reader.durations.get("timeout_s", CLOCKS_S)
            began = self._when(reader.incarnation, reader.first_at)[0]
            early_s = waits_s if self._is_ahead else -HOST_S
            if fate.kind == "died" and self._gone_by(reader) >= since - early_s and fate.after <= until + waits_s:
                out += [reader] if began <= until + waits_s else []
        return out

    def _circumstances(
        self, lease: Lease, readers: Sequence[Process], silent: Sequence[Process], unknown: Sequence[str]
    ) -> str:
        """What else one side's logs say of a request that nobody claimed."""
        out = []
        if silent:
            out.append(f"no log of the decode side speaks of it, and {_all(x.rank for x in silent)} may have died")
        elif readers and all(x.answers for x in readers):
            out.append(
                f"{_all(x.rank for x in readers)} "
                + ("answers and knows nothing of it" if len(readers) == 1 else "answer and know nothing of it")
            )
        elif readers:
            out.append("no log of the decode side that is given speaks of it")
        if unknown:
            out.append(f"{_all(unknown)} shook hands")
        refused = self._turned_away(lease.process, lease.lent_at, lease.lent_at + lease.seconds)
        if refused:
            out.append(f"meanwhile {refused}")
        return "; " + "; ".join(out) if out else ""

    def _turned_away(self, process: Process, since: float, until: float) -> str:
        """Who was not let in by a process between two moments of its own clock."""
        out: dict[str, None] = {}
        for event in (EVENT.REFUSED, EVENT.READER_REFUSED):
            for record in process.since(event, since):
                if record.at > until:
                    break
                who = record.text("who") or record.text("reader")
                out[f"{who} was turned away ({record.text('cause')})"] = None
        return _all(out)

    def _never_got_through(self, lease: Lease, pull: Pull) -> _Story:
        """Say why a reader that knew of the request never claimed it."""
        reader, holder, fate = pull.process.rank, lease.process.rank, self.fate(pull.process)
        cause, detail = pull.cause, pull.detail
        waited_s = pull.ended.number("seconds") if pull.ended is not None else math.nan
        why = f"{cause}, {detail}" if detail else cause or f"it was {pull.state or 'asked for'} when last spoken of"
        names = {
            "reader": reader,
            "holder": holder,
            "why": why,
            "lease_s": _s(lease.lease_s),
            "waited_s": _s(waited_s),
            "message": "claim",
            "seconds": _s(waited_s),
        } | _other(pull.prefill_request_id)
        if pull.prefill_request_id and lease.request_id and pull.prefill_request_id != lease.request_id:
            return _Story(C.OTHER_REQUEST_ID, names)
        if self._is_forgotten(pull) and not self._failed_to_meet(pull.process, lease):
            return _Story(C.ANNOUNCED_AND_FORGOTTEN, names)
        if pull.ended is None and fate.kind == "died":
            return _Story(C.DIED_BEFORE_CLAIM, names | {"why": fate.why, "gone": fate.gone})
        if self._when(pull.process.incarnation, pull.begun_at)[0] > self._span(lease)[1]:
            return _Story(C.CAME_TOO_LATE, names)
        if self._was_forgotten(lease, pull):
            return _Story(C.RELEASE_TOO_EARLY, names)
        if cause == "wrong_target":
            return _Story(C.WRONG_TARGET, names)
        if cause in STALE:
            return _Story(C.STALE_PARAMS, names)
        if cause in ("expired", "unknown_key", "lease_lost") and (away := self._excuse(lease, pull)) is not None:
            return away
        if cause in ("expired", "unknown_key", "lease_lost"):
            # Asked for at once, and over already; or its own wait was what took so long.
            waited = waited_s > 0.5 * lease.lease_s
            return _Story(C.EXPIRED_WHILE_QUEUED if waited else C.CAME_TOO_LATE, names)
        if keys := self._keys(pull, lease):
            return _Story(C.KEYS_REFUSED, names | {"why": keys})
        if self._is_only_released(pull, lease) and not self._is_unanswered(pull, lease):
            # Nothing is said to a rank that nothing is read of, before the pull is done.
            is_told = self._would_be_given_up(pull)
            return self._excuse(lease, pull) or _Story(C.CAME_TOO_LATE if is_told else C.EXPIRED_WHILE_QUEUED, names)
        if (stale := self._stale_at(lease, pull)) and pull.failed_in == "handshake":
            return _Story(C.STALE_PARAMS, names | {"why": stale})
        if pull.ended is None and any(
            base_name(x) == lease.process.base and state == "only_released"
            for _, entry in pull.held
            for x, state in (entry["ranks"].items() if isinstance(entry.get("ranks"), dict) else ())
        ):
            return _Story(C.EXPIRED_WHILE_QUEUED, names)  # it says nothing to this rank before it is done
        if cause == "peer_unreachable" or not self._shook_hands(pull.process, lease):
            others = self._turned_away(lease.process, -math.inf, lease.lent_at + lease.seconds)
            return _Story(C.NEVER_SHOOK_HANDS, names | ({"why": f"{why}; {others}"} if others else {}))
        if away := self._excuse(lease, pull):
            return away
        if pull.ended is None or pull.failed_in in ("queue", "handshake", "plan", "announced"):
            return _Story(C.EXPIRED_WHILE_QUEUED, names)
        if self._is_unanswered(pull, lease):
            return _Story(C.RELEASE_LOST, names | {"why": self._how_unanswered(pull)})
        if pull.process.stopped is not None and cause in ("cancelled", "engine_closed"):
            return _Story(C.READER_CLOSED, names)
        # Whatever it said at last was answered, so it came as the lease was over.
        return _Story(C.EXPIRED_WHILE_QUEUED, names)

    def _is_only_released(self, pull: Pull, lease: Lease) -> bool:
        """A pull had its outcome, and nothing of it was to be read from this rank."""
        if pull.ended is None or pull.cause == "peer_unreachable" or not pull.peer_ranks:
            return False
        read = pull.ended.texts("read_ranks")
        is_planned = bool(read) or pull.cause in ("complete", "discharged")
        return is_planned and all(base_name(x) != lease.process.base for x in read)

    def _was_forgotten(self, lease: Lease, pull: Pull) -> bool:
        """A pull was done, and said so, before the request was lent here: that this was taken is all that it knows."""
        if pull.ended is None or pull.retried or self._is_unanswered(pull, lease):
            return False
        if not self._would_be_given_up(pull):
            return False
        ended_at = self._when(pull.process.incarnation, pull.ended.at)
        return ended_at[1] < self._when(lease.process.incarnation, lease.lent_at)[0]

    def _would_be_given_up(self, pull: Pull) -> bool:
        """Logs go on for long enough that a release which nobody answered would have been told of."""
        if pull.ended is None:
            return False
        ended_at = self._when(pull.process.incarnation, pull.ended.at)[0]
        return self._last >= ended_at + pull.process.durations.get("release_timeout_s", 0.0)

    def _stale_at(self, lease: Lease, pull: Pull) -> str:
        """How the rank that lends turned its reader away, for it asked for an earlier start."""
        for record in lease.process.of(EVENT.READER_REFUSED):
            if record.text("reader") == pull.process.rank and record.text("cause") in STALE:
                return f"{record.text('cause')}, {record.text('detail')}"
        return ""

    def _shook_hands(self, reader: Process, lease: Lease) -> bool:
        """One of both has said that they met before it was over."""
        owner, until = lease.process, lease.lent_at + lease.seconds
        for record in reader.of(EVENT.PEER_CHANGED):
            mine = record.text("peer_incarnation") == owner.incarnation or start_of(record.text("peer")) == owner.start
            if mine and record.text("state") in ("loading", "ready", "suspect"):
                return self._when(reader.incarnation, record.at)[0] <= self._when(owner.incarnation, until)[1]
        met = (x for x in owner.of(EVENT.READER_MET) if x.text("reader_incarnation") == reader.incarnation)
        return any(x.at <= until for x in met)

    def _failed_to_meet(self, reader: Process, lease: Lease) -> bool:
        """A reader greeted the rank, and never had an answer."""
        owner = lease.process
        names = (x for x in reader.of(EVENT.PEER_CHANGED) if start_of(x.text("peer")) == owner.start)
        return any(x.text("state") == "connecting" for x in names) and not self._shook_hands(reader, lease)

    def _keys(self, pull: Pull, lease: Lease) -> str:
        """How keys kept them apart; empty if they did not."""
        if self._shook_hands(pull.process, lease):
            return pull.detail if pull.cause == "peer_unreachable" and _speaks_of_keys(pull.detail) else ""
        address = lease.process.started.text("address") if lease.process.started is not None else ""
        return self._turned_away_at(pull, lease.process.rank, address)

    def _turned_away_at(self, pull: Pull, rank: str, address: str = "") -> str:
        """What a reader's log says of keys that a prefill rank did not take, or was not to take; empty if nothing."""
        changed = [x for x in pull.process.of(EVENT.PEER_CHANGED) if start_of(x.text("peer")) == start_of(rank)]
        known = {address, *(x.text("address") for x in changed)} - {""}
        for record in pull.process.of(EVENT.REFUSED):
            who = record.text("who")
            if record.at <= pull.last_at + 1.0 and any(x in who or who in x for x in known):
                return f"{record.text('cause')}: {who}"
        return pull.detail if _speaks_of_keys(pull.detail) else ""

    # -- ... that was claimed --------------------------------------------------------------------------------------

    def _claimed(self, lease: Lease, name: str, pulls: Sequence[Pull]) -> _Story:
        """Say why a reader that had claimed is owed."""
        claim = lease.claims.get(name)
        heard_s = claim.heard_s if claim is not None else math.nan
        pull_id = claim.pull_id if claim is not None else ""
        process = self._service.process_named(name) or self._service.process_of(pull_id)
        pull = next((x for x in pulls if x.pull_id == pull_id), pulls[-1] if pulls else None)
        names: dict[str, Any] = {
            "reader": name,
            "holder": lease.process.rank,
            "heard_s": _s(heard_s),
            "heard_at": moment(lease.lent_at + heard_s),
            "seconds": _s(lease.seconds),
            "lease_s": _s(lease.lease_s),
        }
        grant_s = lease.process.durations.get("grant_s", 10.0)
        if process is None and lease.ended is None and lease.seconds - heard_s < grant_s / 2:
            return _Story(C.STILL_HELD, names | {"why": f"claimed and renewed by {name}"}, heard_s, (name,))
        if process is None:
            # That a claim of it was turned down since is another attempt, and no claim that was on its way.
            theirs = (x for x in lease.refused if x.message == "claim" and base_name(x.who) == base_name(name))
            followed = any(x.after_s > heard_s + UNDER_WAY_S for x in theirs)
            cause = C.NO_ATTEMPT_FOLLOWED if name in lease.retrying and not followed else C.READER_SILENT
            why = "its last word; it may have died"
            return _Story(cause, names | {"why": why}, heard_s, (name,))
        fate = self.fate(process)
        names["why"] = fate.why
        if not process.says_info and not fate.is_proved and (pull is None or pull.ended is None):
            # Neither a good outcome nor a goodbye is a warning.
            return _Story(C.READER_SILENT, names | {"why": "its log has warnings only"}, heard_s, (name,))
        if pull is not None and self._is_forgotten(pull):
            seconds = pull.ended.number("seconds") if pull.ended is not None else lease.seconds
            if lease.seconds < seconds - 1.0 and (away := self._excuse(lease, pull)) is not None:
                return away  # the promise was lost before the announcement's time was up
            return _Story(C.ANNOUNCED_AND_FORGOTTEN, names | {"seconds": _s(seconds)}, 0.0)
        if pull is None or pull.ended is None:
            return self._without_outcome(lease, name, process, pull, names, heard_s)
        said = f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}"
        names["why"] = said
        if (away := self._excuse(lease, pull)) is not None:
            return away
        if process.stopped is not None and any(x.text("cause") == "engine_closed" for x in pull.unanswered):
            return _Story(C.READER_CLOSED, names | {"why": f"{said}; {fate.why}"}, heard_s)
        if (last := self._last_lost(lease, pulls)) is not None and last is not pull:
            return _Story(C.RELEASE_LOST, names | {"why": self._how_unanswered(last)}, heard_s)
        if name in lease.retrying or (pull.ended is not None and self._retries(pull, pulls)):
            if fate.kind == "died":
                return _Story(C.DIED_AFTER_CLAIM, names | {"why": fate.why, "gone": fate.gone}, heard_s)
            return _Story(C.NO_ATTEMPT_FOLLOWED, names, heard_s)
        if pull.cause in ("lease_lost", "expired"):
            return _Story(C.LEASE_TOO_SHORT, names, heard_s)
        if self._is_unanswered(pull, lease):
            return _Story(C.RELEASE_LOST, names | {"why": self._how_unanswered(pull)}, heard_s)
        if pull.cause in ("timeout", "not_lent_yet"):
            # No promise is asked for beyond the caller's deadline, so the lease was over as the release was said.
            return _Story(C.LEASE_TOO_SHORT, names, heard_s)
        if fate.kind == "died":
            # It had its outcome, and died before its release was heard.
            return _Story(C.DIED_AFTER_CLAIM, names | {"why": fate.why, "gone": fate.gone}, heard_s)
        if fate.kind == "stopped":
            return _Story(C.READER_CLOSED, names | {"why": f"{said}; {fate.why}"}, heard_s)
        waits_s = process.durations.get("release_timeout_s", 30.0)
        if self._last < self._when(process.incarnation, pull.ended.at)[0] + waits_s:
            return _Story(C.READER_SILENT, names, heard_s)  # it would not have said yet that nobody answers
        # Whatever it said was answered, so it came as the lease was over.
        return _Story(C.LEASE_TOO_SHORT, names, heard_s)

    def _without_outcome(
        self,
        lease: Lease,
        name: str,
        process: Process,
        pull: Pull | None,
        names: dict[str, Any],
        heard_s: float,
    ) -> _Story:
        """Say why a reader that had claimed has no outcome in its log."""
        fate = self.fate(process)
        heard = self._when(lease.process.incarnation, lease.lent_at + (0.0 if math.isnan(heard_s) else heard_s))
        if fate.kind == "stopped" and fate.after >= heard[0]:
            if name in lease.retrying:
                return _Story(C.NO_ATTEMPT_FOLLOWED, names, heard_s)
            return _Story(C.READER_CLOSED, names, heard_s)
        ended = self._span(lease)[1]
        if fate.kind != "stopped" and (fate.kind == "died" or lease.state != "lent") and fate.after <= ended:
            # A process that lives renews, and says how it ended: silence is its end, whatever else is known of it.
            if name in lease.retrying and fate.kind != "died":
                return _Story(C.NO_ATTEMPT_FOLLOWED, names | {"why": "its last word; it may have died"}, heard_s)
            if fate.kind != "died" and self._last < ended + SILENCE_S / 2 and name not in lease.retrying:
                return _Story(C.READER_SILENT, names, heard_s)  # the logs were cut, and its loop may be away
            why = fate.why if fate.kind == "died" else fate.why.partition(";")[0]
            if fate.after < heard[0]:
                why += f"; what it did after {moment(process.last_at)} is not in its log"
            return _Story(C.DIED_AFTER_CLAIM, names | {"why": why, "gone": fate.gone}, heard_s)
        if lease.state == "lent":
            why = f"{pull.state or 'claimed'} by {name}" if pull is not None else f"claimed by {name}"
            return _Story(C.STILL_HELD, names | {"why": why}, heard_s)
        own = [x for x in (pull.begun_at if pull is not None else math.nan,) if not math.isnan(x)]
        away = self._away(process, own[0] if own else lease.lent_at - CLOCKS_S, process.last_at)
        if away > 0.0:
            return _Story(C.DECODE_LOOP_AWAY, names | {"away_s": _s(away)}, heard_s)
        if name in lease.retrying:
            return _Story(C.NO_ATTEMPT_FOLLOWED, names | {"why": "its log goes on"}, heard_s)
        return _Story(C.UNEXPLAINED, names | {"why": "its log goes on, and does not speak of it"}, heard_s)

    def _last_lost(self, lease: Lease, pulls: Sequence[Pull]) -> Pull | None:
        """The attempt that said that it was the last, and was never heard."""
        for pull in reversed(pulls):
            outcomes = {x.text("outcome") for x in pull.unanswered if lease.process.rank in x.texts("ranks")}
            if outcomes - {"", "retry"}:
                return pull
        return None

    def _retries(self, pull: Pull, pulls: Sequence[Pull]) -> bool:
        """Its release said that another attempt would follow, and none did."""
        said = [x.text("outcome") for x in (*pull.unanswered, *pull.refused)]
        return "retry" in said and pulls[-1] is pull

    def _excuse(self, lease: Lease, pull: Pull) -> _Story | None:
        """Whose loop was away for so long that it explains a lease that ran out, if one was."""
        names: dict[str, Any] = {"reader": pull.process.rank, "holder": lease.process.rank}
        grant_s = lease.process.durations.get("grant_s", math.nan)
        long = 0.5 * min(x for x in (grant_s, lease.lease_s, 10.0) if not math.isnan(x))
        ends = [x.at for x in (pull.ended, *pull.unanswered) if x is not None]
        here = self._away(pull.process, pull.begun_at, max(ends, default=pull.last_at))
        there = self._away(lease.process, lease.lent_at, lease.lent_at + lease.seconds + 1.0)
        there = max(there, lease.ended.number("late_s", 0.0) if lease.ended is not None else 0.0)
        if max(here, there) < long:
            return None
        if here >= there:
            return _Story(C.DECODE_LOOP_AWAY, names | {"away_s": _s(here)})
        return _Story(C.PREFILL_LOOP_AWAY, names | {"away_s": _s(there)})

    def _is_unanswered(self, pull: Pull, lease: Lease) -> bool:
        ranks = [x for record in pull.unanswered for x in record.texts("ranks")]
        ranks += pull.ended.texts("unanswered") if pull.ended is not None else ()
        return any(start_of(x) == lease.process.start or base_name(x) == lease.process.base for x in ranks)

    def _how_unanswered(self, pull: Pull) -> str:
        for record in pull.unanswered:
            cause, detail = record.text("cause"), record.text("detail")
            after = f"given up {_s(record.number('seconds'))} s after its pull had ended: {cause or 'no answer'}"
            return f"{after}, {detail}" if detail else after
        return f"the pull ended as {pull.cause}{f', {pull.detail}' if pull.detail else ''}"

    def _bug(self, lease: Lease, name: str, pulls: Sequence[Pull]) -> _Story | None:
        """An internal error on either side meanwhile."""
        low, high = self._span(lease)
        readers = [self._service.process_named(name), *(x.process for x in pulls)]
        for process in (lease.process, *(x for x in readers if x is not None)):
            for record in process.of(EVENT.INTERNAL_ERROR):
                at = self._when(process.incarnation, record.at)
                if at[1] >= low and at[0] <= high:
                    return _Story(C.INTERNAL_ERROR, {"reader": process.rank, "why": record.text("error")})
        return None

    # -- announcements, releases and blocks --------------------------------------------------------------------------

    def _of_announcement(self, request: Request, pulls: Sequence[Pull]) -> Leak:
        pull = max(pulls, key=lambda x: x.ended.number("seconds", 0.0) if x.ended is not None else 0.0)
        leases = request.leases.values()
        seconds = pull.ended.number("seconds") if pull.ended is not None else pull.process.last_at - pull.begun_at
        names = {"reader": _all(x.process.rank for x in pulls), "seconds": _s(seconds)}
        blocks = [x.blocks for x in leases if x.blocks >= 0]
        return self._leak(
            request,
            _Story(C.ANNOUNCED_AND_FORGOTTEN, names),
            side="prefill",
            state="announced",
            holders=tuple(x.process.rank for x in leases) or pull.peer_ranks,
            blocks=sum(blocks) if blocks else -1,
            seconds=max([x.seconds for x in leases], default=seconds),
            since=min([x.lent_at for x in leases], default=pull.begun_at),
            owed=tuple(x.process.rank for x in pulls if x.ended is None),
            released={x.process.rank: "failed" for x in pulls if x.ended is not None},
            words=tuple(self._words(request, leases)),
            missing=() if request.leases else tuple(pull.peer_ranks),
        )

    def _of_releases(self, request: Request) -> Leak | None:
        """What only the decode side's logs tell of: releases that were refused, or that nobody answered."""
        stories: list[tuple[_Story, str, Pull]] = []
        for pull in request.all_pulls:
            ranks = [x for record in pull.unanswered for x in record.texts("ranks")]
            ranks += pull.ended.texts("unanswered") if pull.ended is not None else ()
            stories += [
                (found, rank, pull) for rank in ranks if (found := self._unheard(request, pull, rank)) is not None
            ]
            for record in pull.refused:
                if (story := self._refused_only(pull, record)) is not None:
                    missing = [
                        x
                        for x in _ranks_of(record)
                        if not self._is_told(request, pull, x, record) and not self._is_gone(pull.process, x)
                    ]
                    stories += [(story, rank, pull) for rank in missing]
        if not stories:
            return None
        stories.sort(key=lambda x: x[0].order)
        story, _, pull = stories[0]
        holders = tuple(dict.fromkeys(rank for _, rank, _ in stories))
        known = [x for x in map(self._service.process_named, holders) if x is not None]
        leases = [x for x in request.leases.values() if x.process in known]
        blocks = [x.blocks for x in leases]
        is_dead = story.cause is C.PREFILL_DIED
        return self._leak(
            request,
            story,
            side="prefill",
            state="died" if is_dead else "unknown",
            holders=holders,
            blocks=sum(blocks) if len(blocks) == len(holders) and all(x >= 0 for x in blocks) else -1,
            seconds=math.nan,
            since=min([x.lent_at for x in leases], default=pull.begun_at),
            also=()
            if is_dead
            else tuple(
                f"the log of {x.rank} ends at {moment(x.last_at)}, before its lease could have expired" for x in known
            ),
            owed=tuple(dict.fromkeys(x.process.rank for _, _, x in stories)),
            words=tuple(
                Word(rank, x.process.rank, "is not in this side's log", self._release_of(x, rank))
                for _, rank, x in stories
            ),
            missing=() if is_dead else holders,
        )

    def _is_told(self, request: Request, pull: Pull, rank: str, record: Record | None) -> bool:
        """The log of a prefill rank says what became of what a pull had of it."""
        owner = self._service.process_named(rank)
        ended = any(x.process is owner and x.ended is not None for x in request.leases.values())
        return owner is not None and (ended or self._tells(owner, pull, record))

    def _unheard(self, request: Request, pull: Pull, rank: str) -> _Story | None:
        """A release that nobody answered: what became of the lease is in the prefill rank's log, if there is one."""
        names = {"reader": pull.process.rank, "holder": rank, "why": self._how_unanswered(pull)}
        owner = self._service.process_named(rank)
        causes = {x.text("cause") for x in pull.unanswered if rank in x.texts("ranks")} or {pull.cause}
        if owner is None and self._was_away_meanwhile(pull, rank):
            return None
        if owner is not None and (fate := self.fate(owner)).kind == "died" and pull.was_granted_by(rank):
            return _Story(C.PREFILL_DIED, names | {"why": fate.why, "gone": fate.gone})
        unanswered = next((x for x in pull.unanswered if rank in x.texts("ranks")), None)
        if owner is None or not self._is_told(request, pull, rank, unanswered):
            # What was closed in order has revoked it, and what was restarted holds it no more.
            # Nor was it waited for long by who closed: the answer may have been on its way.
            is_over = causes & {"restarted", "peer_lost", "engine_closed"} or self._is_gone(pull.process, rank)
            if is_over:
                return None
            if pull.cause == "peer_unreachable":
                keys = self._turned_away_at(pull, rank)
                cause = C.KEYS_REFUSED if keys else C.NEVER_SHOOK_HANDS
                return _Story(cause, names | {"why": keys or pull.detail}, missing=(rank,))
            return _Story(C.RELEASE_UNANSWERED, names, missing=(rank,))
        return None

    def _was_away_meanwhile(self, pull: Pull, rank: str) -> bool:
        """The reader's own loop was away while the answer was due: it may lie in its socket."""
        for record in pull.unanswered:
            if rank in record.texts("ranks") and record.text("cause") == "timeout":
                waited_s = record.number("seconds", 0.0)
                away_s = self._away(pull.process, record.at - waited_s, record.at)
                return away_s > 0.0 and waited_s - away_s < pull.process.durations.get("release_timeout_s", 30.0) / 2
        return False

    def _is_gone(self, reader: Process, rank: str) -> bool:
        """A prefill rank has ended, by its reader's log: with it, or by its word, went what it had lent."""
        return any(
            start_of(x.text("peer")) == start_of(rank) and x.text("state") == "gone"
            for x in reader.of(EVENT.PEER_CHANGED)
            if x.text("cause") in ("peer_lost", "restarted")
        )

    def _refused_only(self, pull: Pull, record: Record) -> _Story | None:
        reason, detail = record.text("cause"), record.text("detail")
        names = {
            "reader": pull.process.rank,
            "why": f"release {reason}{f', {detail}' if detail else ''}",
            "message": "release",
        } | _other(pull.prefill_request_id)
        if reason == "wrong_request":
            return _Story(C.OTHER_REQUEST_ID, names)
        if reason in STALE:
            return _Story(C.STALE_PARAMS, names)
        return None if reason in HARMLESS else _Story(C.RELEASE_REFUSED, names)

    def _of_blocks(self, request: Request, pulls: Sequence[Pull]) -> Leak:
        """Blocks of pulls that might still be written when they had their outcome."""
        stories = sorted((self._kept(request, x) for x in pulls), key=lambda x: x.order)
        state, seconds = "returned", 0.0
        for pull in pulls:
            if pull.retired is not None:
                state = "retired"
            elif pull.returned is None and state != "retired":
                state = "quarantined"
            seconds = max(seconds, self._kept_s(pull))
        blocks = [x.held_blocks for x in pulls]
        return self._leak(
            request,
            stories[0],
            side="decode",
            state=state,
            holders=tuple(dict.fromkeys(x.process.rank for x in pulls)),
            blocks=sum(blocks) if all(x >= 0 for x in blocks) else -1,
            seconds=seconds,
            since=min((x.ended.at if x.ended is not None else x.begun_at) for x in pulls),
            also=tuple(dict.fromkeys(x.sentence for x in stories[1:] if x.cause is not stories[0].cause)),
            missing=tuple(
                dict.fromkeys(n for x in pulls for n in x.peer_ranks if self._service.process_named(n) is None)
            ),
        )

    def _kept_s(self, pull: Pull) -> float:
        for record in (pull.returned, pull.retired):
            if record is not None:
                return record.number("seconds_after_failure", 0.0)
        return max(pull.process.last_at - (pull.ended.at if pull.ended is not None else pull.last_at), 0.0)

    def _kept(self, request: Request, pull: Pull) -> _Story:
        ranks = pull.retired.texts("held_by") if pull.retired is not None else ()
        ranks = ranks or (pull.said.texts("read_ranks") if pull.said is not None else ()) or pull.peer_ranks
        owners = [x for x in map(self._service.process_named, ranks) if x is not None]
        seconds = self._kept_s(pull)
        held = f"for {_s(seconds)} s after its pull had failed"
        if pull.retired is not None:
            held += ", and has given them up"
        elif pull.returned is None:
            held += " so far"
        names = {
            "reader": pull.process.rank,
            "holder": _all(ranks) or pull.peer,
            "held": held,
            "why": f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}" or pull.state,
        }
        since, until = pull.begun_at, (pull.returned or pull.retired or pull.ended or pull.held[-1][0]).at
        low = self._when(pull.process.incarnation, since)[0]
        high = self._when(pull.process.incarnation, until)[1]
        broken = (EVENT.DATA_PLANE_RESTARTED, EVENT.DATA_PLANE_BROKEN)
        failed = self._when(pull.process.incarnation, pull.ended.at)[1] if pull.ended is not None else high
        for owner in (pull.process, *owners):
            for record in owner.of(*broken):
                # It is told of when another runs. What died when the pull had failed is not why it did.
                at = self._when(owner.incarnation, record.at - record.number("seconds", 0.0))
                if at[1] >= low and at[0] <= failed + AT_ONCE_S:
                    return _Story(C.DATA_PLANE_DIED, names | {"holder": owner.rank, "why": record.text("cause")})
        for owner in owners:
            fate = self.fate(owner)
            if fate.kind == "died" and fate.after <= high and fate.before >= low:
                return _Story(C.READ_FROM_THE_DEAD, names | {"holder": owner.rank, "why": fate.why})
        for owner in owners:
            away = max(
                (
                    r.number("seconds", 0.0)
                    for r in owner.of(EVENT.LOOP_WAS_AWAY)
                    if self._overlaps(owner, r, low, high)
                ),
                default=0.0,
            )
            if away > 0.0:
                return _Story(C.PREFILL_LOOP_AWAY, names | {"holder": owner.rank, "away_s": _s(away)})
        if pull.cause in ("peer_lost", "restarted") and (
            not owners or any(self.fate(x).kind != "stopped" and not self._lives_until(x, high) for x in owners)
        ):
            return _Story(C.READ_FROM_THE_DEAD, names)
        return _Story(C.STUCK_TRANSFER, names)

    def _overlaps(self, process: Process, away: Record, low: float, high: float) -> bool:
        at = self._when(process.incarnation, away.at)
        return at[1] >= low and at[0] - away.number("seconds", 0.0) <= high

    # -- what was said -----------------------------------------------------------------------------------------------

    def _words(self, request: Request, leases: Iterable[Lease]) -> Iterator[Word]:
        """Say what became of each claim and release."""
        for lease in leases:
            claims, retrying = lease.claims, lease.retrying
            readers = dict.fromkeys((*lease.owed, *lease.released, *claims))
            for name in readers:
                refused = [x for x in lease.refused if base_name(x.who) == base_name(name) or name == "*"]
                claim = claims.get(name)
                turned_down = next((x for x in refused if x.message in ("claim", "renew")), None)
                if claim is not None:
                    said = f"came after {_s(claim.claimed_s)} s, heard of last after {_s(claim.heard_s)} s"
                elif turned_down is not None:
                    said = f"was refused after {_s(turned_down.after_s)} s: {turned_down.reason}"
                else:
                    said = "is not told" if name in lease.released else "never came"
                pulls = self._pulls_of(request, lease, name)
                denied = next((x for x in refused if x.message == "release"), None)
                if name in lease.released:
                    release = f"came: {lease.released[name]}"
                elif denied is not None:
                    release = f"was refused: {denied.reason}"
                elif name in retrying:
                    release = "came: retry, and no other followed"
                elif pulls:
                    release = self._release_of(pulls[-1], lease.process.rank)
                else:
                    known = name != "*" and self._service.process_named(name) is not None
                    release = "was never sent, as far as its log goes" if known else "never came"
                yield Word(lease.process.rank, name, said, release)

    def _release_of(self, pull: Pull, rank: str) -> str:
        """Say what became of a pull's release to a rank, by the decode side's log."""
        for record in pull.refused:
            if rank in (*record.texts("ranks"), record.text("rank")):
                return f"was refused: {record.text('cause')}"
        for record in pull.unanswered:
            if rank in record.texts("ranks"):
                return f"was never answered, given up after {_s(record.number('seconds'))} s"
        if pull.ended is None:
            return "was never sent: the pull has no outcome"
        if rank in pull.ended.texts("unanswered"):
            return "was sent once, to a rank that was gone"
        return f"was sent as the pull ended ({pull.cause})"

    def _leak(self, request: Request, story: _Story, **fields: Any) -> Leak:
        pulls = request.all_pulls
        owners = {x.process.incarnation for x in request.leases.values()}
        records = request.records()
        here = next((x for x in reversed(records) if x.incarnation in owners), None)
        there = next((x for x in reversed(records) if x.incarnation not in owners), None)
        if there is None:  # what its reader said last, of whatever
            process = next(
                (p for n in fields.get("owed", ()) if (p := self._service.process_named(n)) is not None), None
            )
            ends = self.fate(process).why.partition(";")[0] if process is not None else ""
            last_decode = f"nothing of this request; {process.rank}: {ends}" if process is not None else ""
        else:
            last_decode = _told(there)
        missing = tuple(dict.fromkeys((*fields.pop("missing", ()), *story.missing)))
        reader = str(story.names.get("reader", ""))
        return Leak(
            cause=story.cause,
            sentence=story.sentence,
            engine_id=request.engine_id,
            request_id=request.request_id,
            sequence=request.sequence,
            decode_request_ids=tuple(dict.fromkeys(x.request_id for x in pulls if x.request_id)),
            last_prefill=_told(here) if here is not None else "",
            last_decode=last_decode,
            missing=missing,
            reader=reader if "/tp" in reader else "",
            other_request_id=story.names.get("other_id", "") if story.cause is C.OTHER_REQUEST_ID else "",
            **fields,
        )


_OTHER = re.compile(r"not to ('.*'|\".*\")\Z", re.DOTALL)


def _named_in(detail: str) -> str:
    """The request id that a refusal's words quote; empty in old logs."""
    found = _OTHER.search(detail)
    try:
        value = ast.literal_eval(found[1]) if found is not None else ""
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _other(request_id: str) -> dict[str, str]:
    """Another request id in words, and as it is, if it is known."""
    return {"other": repr(request_id), "other_id": request_id} if request_id else {}


def _ranks_of(record: Record) -> tuple[str, ...]:
    """The prefill ranks that a release was for."""
    return record.texts("ranks") or ((record.text("rank"),) if record.text("rank") else ())


def _engine_of(rank: str) -> str:
    """The engine, or cohort, that a rank's name begins with."""
    return base_name(rank).rpartition("/tp")[0].partition("/pp")[0]


def _is_overdue(pull: Pull) -> bool:
    """An announcement's time was up before its process's log ends."""
    if pull.ended is not None or not pull.held:
        return True
    record, entry = pull.held[-1]
    return number(entry.get("left_s"), 0.0) <= pull.process.last_at - record.at


def _speaks_of_keys(detail: str) -> bool:
    return any(word in detail for word in (" key", "turned away", "turn our"))


def _is_last_word(pull: Pull) -> bool:
    """Nothing more of a pull was due before its process's log ends."""
    record, entry = pull.held[-1]
    return pull.process.last_at <= record.at + number(entry.get("state_s"), 0.0) + GATHERED_S


def _told(record: Record) -> str:
    said = record.text("cause") or record.text("state") or record.text("to")
    return f"{moment(record.at)} {record.rank}: {record.event}{f' ({said})' if said else ''}"
