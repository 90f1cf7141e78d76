"""Requests as bars on one time axis, with a lane for every rank that took part.

A prefill rank's lane is its lease: lent and not claimed, then granted, then (if it was revoked) ending. A decode rank
has a lane for every attempt: announced, handshake, queue, plan, read, confirm, drain, and after the outcome release or
quarantine. Lengths are exact, because each process counts its own; positions are as sure as the process's clock, and if
the log has only sums, the order is the protocol's. Marks show events of one moment.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from operator import itemgetter
from typing import NamedTuple

from asynckv import told
from asynckv.core.notes import GrantedTo, Revoked
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.axis import Axis, counted, is_time, shown_seconds, steps_of
from asynckv.tools.diagnose.join import LEASE_EVENTS, PULL_EVENTS, LoggedLease, LoggedPull, LoggedRequest, Process
from asynckv.tools.diagnose.presence import Fate, Presence
from asynckv.tools.diagnose.records import Record, number


class Phase(NamedTuple):
    """Name, letter and colours of a bar.

    The colours were found by search: all differ from each other, also for colour-blind readers, and stand out from the
    page (a contrast of 3 or more). Colour alone never carries information.
    """

    letter: str
    light: str  # its colour on a light page
    dark: str  # on a dark one, and on a terminal
    about: str


_ROWS = tomllib.loads(files(__package__).joinpath("phases.toml").read_text(encoding="utf-8"))
PHASES = {name: Phase(*row) for name, row in _ROWS.items()}  # phases in the order of the protocol
ORDER = ("announced", "handshake", "queue", "plan", "read", "confirm", "drain")
MAX_MARKS = 400  # of one request
GOOD = frozenset({"complete", "cancelled", "discharged"})  # ends of a pull that need no look
MAX_AWAY_S = 86_400.0
Said = tuple[float, str, str]  # an event for a mark: its moment by the process's clock, its text, and its level
_OF_REQUESTS = (told.LeaseHeld, told.PullHeld, told.PullRefused, told.RequestWithdrawn)
_TOLD = {x.event for x in (*_OF_REQUESTS, told.EngineAlive)}
"""Lines of a process that are told with its requests, or tell nothing new."""
_STATES = {"connecting": "handshake", "queued": "queue", "reading": "read", "confirming": "confirm"}
_STATES |= dict.fromkeys(("meeting", "following", "spared"), "follow")
_STATES |= {"draining": "drain", "notifying": "release", "quarantined": "quarantine"}
_STATES |= {state: state for state in ("announced", "lent", "ending")}


@dataclass(slots=True)
class Bar:
    """One phase, on the axis."""

    phase: str  # one of `PHASES`
    start: float
    end: float
    note: str = ""  # more about it
    is_open: bool = False  # it had not ended when the log did
    inside: Mapping[str, float] = field(default_factory=dict)  # seconds of what has no place of its own, by name

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Lane:
    """One rank's part in one attempt."""

    process: Process
    side: str  # `prefill` or `decode`
    what: str  # which of its parts, if it has several
    bars: list[Bar]
    fields: dict[str, str] = field(default_factory=dict)  # what else is known of it
    within_s: float = 0.0  # how unsure its place is

    @property
    def start(self) -> float:
        return self.bars[0].start

    @property
    def end(self) -> float:
        return max(x.end for x in self.bars)

    @property
    def title(self) -> str:
        if self.what in ("lease", "pull"):
            return self.process.rank
        return f"{self.what}, {self.process.rank}"


@dataclass(slots=True)
class Mark:
    at: float
    process: Process
    text: str
    level: str = "info"


@dataclass(slots=True)
class Story:
    """One request over all ranks and attempts."""

    number: int  # in the order of time
    name: str  # the prefill side's id, if that is known
    others: tuple[str, ...]  # the decode side's ids
    engine_id: str
    sequence: int
    pull_ids: tuple[str, ...]
    lease: str  # how it ended on the prefill side; empty if no log says so
    pull: str  # on the decode side
    level: str  # `info`, or `warning` if something went wrong
    group: int  # which axis it is on
    seconds: float  # how long it took on the side where that was longest; it is ranked by this
    lanes: list[Lane]
    marks: list[Mark]

    @property
    def start(self) -> float:
        return min([b.start for x in self.lanes for b in x.bars] + [m.at for m in self.marks], default=0.0)

    @property
    def end(self) -> float:
        return max([b.end for x in self.lanes for b in x.bars] + [m.at for m in self.marks], default=0.0)

    @property
    def ended(self) -> str:
        sides = (("lease", self.lease), ("pull", self.pull))
        return ", ".join(f"{side} {how}" for side, how in sides if how) or "?"

    def lane_of(self, mark: Mark) -> int:
        """Return the lane that a mark lies on; -1 if its process has none."""
        mine = [i for i, x in enumerate(self.lanes) if x.process is mark.process]
        inside = [i for i in mine if self.lanes[i].start <= mark.at <= self.lanes[i].end]
        return (inside or mine or [-1])[0]


@dataclass(slots=True)
class Ground:
    """The life of a process apart from requests: when it ran, when its loop was blocked, its peers and its end."""

    process: Process
    start: float
    end: float  # its last line
    away: list[Bar]
    marks: list[Mark]
    gone: Fate | None  # its log ends without a goodbye: it died, or `silent`, it may live


def stories(axis: Axis, of: Iterable[Sequence[LoggedRequest]] | None = None) -> list[Story]:
    """Make the story of every request, by time, or only of some, as `families` groups them."""
    every = (_story(axis, requests) for requests in (families(axis.service.requests) if of is None else of))
    out = sorted((x for x in every if x.lanes or x.marks), key=lambda x: (x.group, x.start))
    for i, each in enumerate(out):
        each.number = i
    return out


def families(requests: Iterable[LoggedRequest]) -> Iterator[list[LoggedRequest]]:
    """Group requests that are attempts at one: with new params an attempt belongs to another prefill request."""
    every = list(requests)
    family = [[i] for i in range(len(every))]
    pulls = ((x, i) for i, request in enumerate(every) for x in request.all_pulls if x.request_id)
    attempts = grouped(
        ((x.process.incarnation, x.request_id), (x.ended.at, x.attempt, i)) for x, i in pulls if x.ended is not None
    )
    for found in attempts.values():
        for (_, before, one), (_, after, other) in itertools.pairwise(sorted(found)):
            if after == before + 1 and family[one] is not family[other]:
                less, more = sorted((family[one], family[other]), key=len)
                more += less
                for i in less:
                    family[i] = more
    for members in {id(x): x for x in family}.values():
        yield [every[i] for i in sorted(members)]


def _story(axis: Axis, requests: Sequence[LoggedRequest]) -> Story:
    leases = sorted((x for r in requests for x in r.leases.values()), key=lambda x: x.process.rank)
    pulls = sorted((p for r in requests for p in r.all_pulls), key=lambda p: (p.attempt, p.begun_at))
    lanes = [*(_lease_lane(axis, x) for x in leases)]
    lanes += [_pull_lane(axis, x) for x in sorted(pulls, key=lambda p: (p.attempt, p.process.rank))]
    lanes = [x for x in lanes if x.bars]
    marks = sorted(_marks(axis, requests), key=lambda x: x.at)
    first, claimed = requests[0], (pull_id for x in leases for pull_id in sorted(x.pull_ids))
    how_lease, how_pull, is_bad = _ends(requests, leases, pulls)
    sides = ([x for x in lanes if x.side == side] for side in ("prefill", "decode"))
    processes = [*(x.process for x in lanes), *(x.process for x in marks)]
    return Story(
        number=0,
        name=first.name,
        others=tuple(dict.fromkeys(x for r in requests for x in r.decode_ids)),
        engine_id=first.engine_id,
        sequence=first.sequence if first.sequence < 1 << 53 else -1,
        pull_ids=tuple(dict.fromkeys((*(p.pull_id for p in pulls), *claimed))),
        lease=how_lease,
        pull=how_pull,
        level="warning" if is_bad else "info",
        group=axis.group(processes[0]) if processes else 0,
        seconds=max((max(x.end for x in side) - min(x.start for x in side) for side in sides if side), default=0.0),
        lanes=lanes,
        marks=marks[:MAX_MARKS],
    )


def _marks(axis: Axis, requests: Sequence[LoggedRequest]) -> Iterator[Mark]:
    for request in requests:
        lived: tuple[LoggedLease | LoggedPull, ...] = (*request.leases.values(), *request.all_pulls)
        for each in lived:
            said = list(_lease_marks(each) if isinstance(each, LoggedLease) else _pull_marks(each))
            said += [(x.at, text, x.level) for x in each.records if (text := _about(x))]
            if each.ended is None and each.process.stopped is None:
                side = "lease" if isinstance(each, LoggedLease) else "pull"
                said.append((each.process.last_at, f"log ends; what became of the {side} is not told", "warning"))
            yield from _placed(axis, each.process, said)
        for pull in request.others.values():
            why = f"speaks of it under another prefill request id: {pull.prefill_request_id}"
            yield from _placed(axis, pull.process, [(pull.begun_at, why, "warning")])
        for record in request.before:
            process = axis.service.processes[record.incarnation]
            yield from _placed(axis, process, [(record.at, _about(record), record.level)])


def _ends(
    requests: Sequence[LoggedRequest], leases: Sequence[LoggedLease], pulls: Sequence[LoggedPull]
) -> tuple[str, str, bool]:
    """Return how a request ended on both sides, and True if something went wrong."""
    before = {"refused" if x.event == told.PullRefused.event else "withdrawn" for r in requests for x in r.before}
    causes, states = [p.cause for p in last_attempt(pulls)], [x.state for x in leases]
    bad, late = [x for x in causes if x not in GOOD], [x for x in states if x in ("expired", "revoked")]
    known = [*bad, *causes, *filter(None, (p.state for p in pulls)), *(before & {"refused"}), ""]
    lent = [*late, *(x for x in states if x != "released"), *states, *(before & {"withdrawn"}), ""]
    has_fault = any(p.returned or p.retired or p.unanswered or (p.ended is None and p.held) for p in pulls)
    return lent[0], known[0], bool(bad or late or "refused" in before or has_fault)


def last_attempt(pulls: Sequence[LoggedPull]) -> list[LoggedPull]:
    ended = [p for p in pulls if p.ended is not None]
    last = max((x.attempt for x in ended), default=0)
    return [p for p in ended if p.attempt == last]


# -- the prefill side --------------------------------------------------------------------------------


def _lease_lane(axis: Axis, lease: LoggedLease) -> Lane:
    process, start, steps = lease.process, lease.lent_at, steps_of(lease)
    is_open = lease.ended is None
    end = start + lease.ended.number("seconds", 0.0) if lease.ended is not None else max(process.last_at, start)
    grants = [start + x.claimed_s for x in lease.claims.values()]
    grants += [x.at for x in steps if isinstance(x.what, GrantedTo)]
    grants += [x.at for x in lease.granted]  # a line is late, but not as late as the sum of a late lend and a duration
    cuts = [("lent", start)]
    if (first := min((x for x in grants if start <= x <= end), default=math.nan)) <= end:
        cuts.append(("granted", first))
    if (ending := next((s.at for s in steps if isinstance(s.what, Revoked)), math.nan)) <= end:
        cuts.append(("ending", ending))
    fields = {
        "state": lease.state,
        "blocks": str(lease.blocks) if lease.blocks >= 0 else "",
        "lease_s": f"{lease.lease_s:g}" if math.isfinite(lease.lease_s) else "",
        "released by": ", ".join(f"{name}: {how}" for name, how in lease.released.items()),
        "owed": ", ".join(lease.owed),
    }
    unknown = "whether it was claimed is not told" if is_open and len(cuts) == 1 else ""
    bars = [
        Bar(phase, at, until, note=unknown, is_open=is_open and phase == cuts[-1][0])
        for (phase, at), (_, until) in itertools.pairwise([*cuts, ("", end)])
        if until > at or len(cuts) == 1 or (is_open and phase == "granted")
    ]
    return _lane(axis, process, "prefill", "lease", bars, {name: x for name, x in fields.items() if x})


def _lease_marks(lease: LoggedLease) -> Iterator[Said]:
    start, steps = lease.lent_at, steps_of(lease)
    yield start, "lent" + (f", {counted(lease.blocks, 'block')}" if lease.blocks >= 0 else ""), "info"
    for step in steps:
        if step.what not in ("lent", lease.state):
            yield step.at, str(step.what), "info"
    for name, claim in () if steps else lease.claims.items():
        yield start + claim.claimed_s, f"granted to {name}, pull {claim.pull_id}", "info"
    for refusal in lease.refused:
        why = f"{refusal.reason}: {refusal.detail}" if refusal.detail else refusal.reason
        yield start + refusal.after_s, f"{refusal.message} of {refusal.who} refused: {why}", "warning"
    if lease.ended is not None:
        owed = f", owed by {', '.join(lease.owed)}" if lease.owed else ""
        seconds = lease.ended.number("seconds", 0.0)
        yield start + seconds, f"{lease.state} after {shown_seconds(seconds)}{owed}", lease.ended.level


# -- the decode side ---------------------------------------------------------------------------------


def _pull_lane(axis: Axis, pull: LoggedPull) -> Lane:
    fields = {"request_id": pull.request_id, "prefill_request_id": pull.prefill_request_id, "pull_id": pull.pull_id}
    if pull.ended is not None:
        fields["outcome"] = pull.cause
        for name in ("failed_in", "bytes", "pieces", "piece_bytes", "descriptors", "posts", "rereads"):
            if (value := pull.ended.fields.get(name)) not in (None, "", 0) and isinstance(value, str | int):
                fields[name] = str(value)
    if pull.detail:
        fields["detail"] = pull.detail
    if pull.like is not None:
        fields["same_as"] = pull.like.pull_id
    what = f"attempt {pull.attempt}" if pull.attempt > 1 or pull.retried else "pull"
    return _lane(axis, pull.process, "decode", what, list(_pull_bars(pull)), fields)


def _pull_bars(pull: LoggedPull) -> Iterator[Bar]:
    """Make the bars of one attempt, by its process's clock."""
    steps = steps_of(pull)
    if (ended := pull.ended) is None:
        yield from _open_bars(pull)
        return
    sums = {name: max(number(x), 0.0) for name, x in ended.mapping("phases").items() if math.isfinite(number(x))}
    outcome = next((s.at for s in steps if s.what == "notifying"), ended.at)
    begun = outcome - max(ended.number("seconds", 0.0), 0.0)
    announced = steps[0].at if steps else begun
    if begun - announced > 1e-6 and "announced" not in sums:
        yield Bar("announced", announced, begun)
    at = begun
    inside = {name: sums[name] for name in ("post", "detect") if sums.get(name)}
    known = [(name, sums[name]) for name in ORDER if sums.get(name)]
    for i, (name, seconds) in enumerate(known):
        # What is left is rounding.
        until = outcome if i == len(known) - 1 else min(at + seconds, outcome)
        note = "some of it may have been after planning" if name == "queue" and sums.get("plan") else ""
        yield Bar(name, at, until, note, inside=inside if name == "read" else {})
        at = until
    if not known and outcome > begun:
        yield Bar("follow" if pull.is_follow else "pull", begun, outcome)
    yield from _after(pull, outcome)


def _after(pull: LoggedPull, outcome: float) -> Iterator[Bar]:
    """Yield the bars after an outcome: its release, and blocks that may still be written."""
    ends = [s.at for s in steps_of(pull) if s.what in ("released", "quarantined")]
    ends += [x.at for x in pull.unanswered]
    if ends:
        yield Bar("release", outcome, ends[0], note="given up" if pull.unanswered else "")
    for record in pull.retried:
        yield Bar("pause", record.at, record.at + max(record.number("after_s", 0.0), 0.0))
    back = pull.returned or pull.retired
    if back is not None:
        seconds = back.number("seconds_after_failure", max(back.at - outcome, 0.0))
        yield Bar("quarantine", outcome, outcome + seconds, note="given up: retired" if pull.retired else "")
    elif pull.held_transfers:
        yield Bar("quarantine", outcome, max(pull.process.last_at, outcome), note="its end is not told", is_open=True)


def _open_bars(pull: LoggedPull) -> Iterator[Bar]:
    """Make the bars of a pull without an end in the log: from its steps, or from warnings."""
    last = pull.process.last_at
    found = [(s.at, _STATES[s.what]) for s in steps_of(pull) if isinstance(s.what, str) and s.what in _STATES]
    for record in pull.held:
        seconds = record.number("state_s")
        phase = _STATES.get(record.text("state"))
        if phase is not None and math.isfinite(seconds):
            found.append((record.at - seconds, phase))
    merged = [next(alike) for _, alike in itertools.groupby(sorted(found), key=itemgetter(1))]
    for (at, phase), (until, _) in itertools.pairwise([*merged, (max(last, merged[-1][0] if merged else last), "")]):
        yield Bar(phase, at, until, is_open=until >= last)


def _pull_marks(pull: LoggedPull) -> Iterator[Said]:
    steps = steps_of(pull)
    for step in steps:
        yield step.at, str(step.what), "debug" if step.what in _STATES else "info"
    if not steps:
        yield pull.begun_at, f"pull {pull.pull_id} began", "info"
    if pull.ended is not None:
        outcome = next((s.at for s in steps if s.what == "notifying"), pull.ended.at)
        detail = f": {pull.detail}" if pull.detail and not steps else ""
        after = shown_seconds(pull.ended.number("seconds", 0.0))
        why = ", because the prefill engine took its blocks back at once" if pull.is_recalled else ""
        pieces = pull.ended.number("pieces", 0.0)
        ahead = f", with {pieces:g} piece{'s' * (pieces != 1)} read before it" if pieces > 0 else ""
        yield outcome, f"outcome {pull.cause} after {after}{ahead}{why}{detail}", pull.ended.level


def _lane(axis: Axis, process: Process, side: str, what: str, bars: list[Bar], fields: dict[str, str]) -> Lane:
    bars = [x for x in bars if is_time(x.start) and is_time(x.end)]
    for bar in bars:
        bar.start, bar.end = axis.at(process, bar.start), axis.at(process, bar.end)
    return Lane(process, side, what, bars, fields, axis.offset(process).within_s if bars else 0.0)


def _placed(axis: Axis, process: Process, said: Iterable[Said]) -> Iterator[Mark]:
    """Put a process's events on the axis, without those of no plausible moment."""
    return (Mark(axis.at(process, at), process, text, level) for at, text, level in said if is_time(at))


# -- what was there besides --------------------------------------------------------------------------


def ground(presence: Presence) -> list[Ground]:
    out, axis = [], presence.axis
    known = (x for x in axis.service.processes.values() if x.num_records)
    for process in sorted(known, key=lambda x: (not x.lends, x.rank)):
        away: list[Bar] = []
        marks: list[Mark] = []
        for record in process.records:
            at = axis.at(process, record.at)
            if record.event == told.LoopWasAway.event:
                seconds = min(max(record.number("seconds", 0.0), 0.0), MAX_AWAY_S)
                away.append(Bar("away", at - seconds, at, note="its event loop did not come to the engine"))
            elif record.event not in _TOLD and (text := _about(record)) and len(marks) < MAX_MARKS:
                marks.append(Mark(at, process, text, record.level))
        start, end = axis.at(process, process.first_at), axis.at(process, process.last_at)
        fate = presence.fate(process)
        gone = fate if fate.kind == "died" or presence.ends_early(process) else None
        out.append(Ground(process, start, end, away, marks, gone))
    return out


def _about(record: Record) -> str:
    """Describe an event; the text is empty if a request's life and end say it."""
    match record.event:
        case told.PeerChanged.event:
            cause = f": {record.text('detail') or record.text('cause')}" if record.text("cause") else ""
            return f"{record.text('peer')} {record.text('state')}{cause}"
        case told.ReaderMet.event:
            return f"met {record.text('reader')}"
        case told.ReaderRefused.event | told.Refused.event:
            return f"refused {record.text('reader') or record.text('who')}: {record.text('cause')}"
        case told.PullRefused.event:
            return f"refused at once: {record.text('cause')}: {record.text('detail')}"
        case told.RequestWithdrawn.event:
            return "withdrawn: it will never be lent"
        case told.LeaseHeld.event | told.PullHeld.event:
            return f"held for long: {record.text('waits')}"
        case told.PullRetried.event:
            return f"attempt {record.integer('attempt')} follows after {record.number('after_s', 0.0):g} s"
        case told.BlocksReturned.event:
            return "its blocks came back"
        case told.BlocksRetired.event:
            return "its blocks are given up: a transfer does not end"
        case told.ReleaseUnanswered.event:
            return f"release given up: not acknowledged by {', '.join(record.texts('ranks'))}"
        case told.ReleaseRefused.event:  # its field `rank` would name the pull's own rank
            return f"release refused by {', '.join(record.texts('ranks')) or '?'}: {record.text('cause')}"
        case event if event in LEASE_EVENTS | PULL_EVENTS:
            return ""
        case _:
            said = record.text("detail") or record.text("cause")
            return record.event.replace("_", " ") + (f": {said}" if said else "")
