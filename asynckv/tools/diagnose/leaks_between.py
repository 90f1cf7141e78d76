"""What passed between a reader and a prefill rank: did they meet, who was turned away, was a release answered?

And whose loop was away meanwhile. Each question is answered from what both logs say of it, whichever of them is there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from asynckv.core import told
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Lease, Process, Pull, Request, base_name, start_of
from asynckv.tools.diagnose.leaks_processes import Processes
from asynckv.tools.diagnose.leaks_values import Story, in_seconds, listed
from asynckv.tools.diagnose.records import Record

__all__ = [
    "HARMLESS",
    "STALE",
    "excuse",
    "failed_to_meet",
    "has_read",
    "how_unanswered",
    "is_only_released",
    "is_stranger",
    "is_unanswered",
    "last_lost",
    "pulls_of",
    "ranks_of",
    "refused_keys",
    "retries",
    "shook_hands",
    "stale_at",
    "turned_away",
    "turned_away_at",
    "would_be_given_up",
]

C = CAUSE

AT_ONCE_S = 0.01
"""Lines of one moment are written within this time."""

STALE = frozenset({"restarted", "stale_memory"})
"""Reasons for which who asks for an earlier start is turned down."""

HARMLESS = frozenset(
    {"expired", "revoked", "released_already", "consumed", "withdrawn", "unknown_key", "engine_closed"}
)
"""Reasons for which a message is turned down that say nothing new of why the lease is not released."""


def turned_away_at(pull: Pull, rank: str, address: str = "") -> str:
    """What a reader's log says of keys that a prefill rank did not take, or was not to take; empty if nothing."""
    changed = [x for x in pull.process.of(told.PeerChanged) if start_of(x.text("peer")) == start_of(rank)]
    known = {address, *(x.text("address") for x in changed)} - {""}
    for record in pull.process.of(told.Refused):
        who = record.text("who")
        if record.at <= pull.last_at + 1.0 and any(x in who or who in x for x in known):
            return f"{record.text('cause')}: {who}"
    return pull.detail if _speaks_of_keys(pull.detail) else ""


def shook_hands(processes: Processes, reader: Process, lease: Lease) -> bool:
    """One of both has said that they met before it was over."""
    owner, until = lease.process, lease.lent_at + lease.seconds
    for record in reader.of(told.PeerChanged):
        mine = record.text("peer_incarnation") == owner.incarnation or start_of(record.text("peer")) == owner.start
        if mine and record.text("state") in ("loading", "ready", "suspect"):
            return processes.when(reader.incarnation, record.at)[0] <= processes.when(owner.incarnation, until)[1]
    met = (x for x in owner.of(told.ReaderMet) if x.text("reader_incarnation") == reader.incarnation)
    return any(x.at <= until for x in met)


def failed_to_meet(processes: Processes, reader: Process, lease: Lease) -> bool:
    """A reader greeted the rank, and never had an answer."""
    owner = lease.process
    names = (x for x in reader.of(told.PeerChanged) if start_of(x.text("peer")) == owner.start)
    return any(x.text("state") == "connecting" for x in names) and not shook_hands(processes, reader, lease)


def refused_keys(processes: Processes, pull: Pull, lease: Lease) -> str:
    """How keys kept them apart; empty if they did not."""
    if shook_hands(processes, pull.process, lease):
        return pull.detail if pull.cause == "peer_unreachable" and _speaks_of_keys(pull.detail) else ""
    address = lease.process.started.text("address") if lease.process.started is not None else ""
    return turned_away_at(pull, lease.process.rank, address)


def excuse(processes: Processes, lease: Lease, pull: Pull) -> Story | None:
    """Whose loop was away for so long that it explains a lease that ran out, if one was."""
    names: dict[str, Any] = {"reader": pull.process.rank, "holder": lease.process.rank}
    grant_s = lease.process.durations.get("grant_s", math.nan)
    long = 0.5 * min(x for x in (grant_s, lease.lease_s, 10.0) if not math.isnan(x))
    ends = [x.at for x in (pull.ended, *pull.unanswered) if x is not None]
    until = max(ends, default=pull.last_at)
    over_s = processes.span(lease)[1] - processes.when(pull.process.incarnation, until)[0]
    # What it went away for when the lease was over came after.
    until += min(over_s, 0.0)
    if pull.cause == "complete" and pull.ended is not None:  # what it had claimed before, whatever its clock shows
        claims = [x.claimed_s for x in lease.claims.values() if x.pull_id == pull.pull_id]
        until = min([until, *(pull.ended.at + lease.seconds - x + AT_ONCE_S for x in claims if not math.isnan(x))])
    here = processes.away_s(pull.process, _begun_at(processes, lease, pull), until)
    # What it came back from as it lent this was before.
    there = processes.away_s(lease.process, lease.lent_at + AT_ONCE_S, lease.lent_at + lease.seconds)
    there = max(there, lease.ended.number("late_s", 0.0) if lease.ended is not None else 0.0)
    if max(here, there) < long:
        return None
    if here >= there:
        return Story(C.DECODE_LOOP_AWAY, names | {"away_s": in_seconds(here)})
    return Story(C.PREFILL_LOOP_AWAY, names | {"away_s": in_seconds(there)})


def _begun_at(processes: Processes, lease: Lease, pull: Pull) -> float:
    """Since when, by its own clock, a reader has had to do with it: a short line leaves its announcement out."""
    claims = [x.claimed_s for x in lease.claims.values() if x.pull_id == pull.pull_id and not math.isnan(x.claimed_s)]
    if not claims:
        return pull.begun_at
    claimed = processes.when(lease.process.incarnation, lease.lent_at + claims[0])[1]
    return pull.begun_at - max(processes.when(pull.process.incarnation, pull.begun_at)[0] - claimed, 0.0)


def would_be_given_up(processes: Processes, pull: Pull) -> bool:
    """Its reader lived for long enough that a release which nobody answered would have been told of."""
    if pull.ended is None:
        return False
    given_up_at = pull.ended.at + pull.process.durations.get("release_timeout_s", 0.0)
    match processes.fate(pull.process).kind:
        case "stopped":  # which gives up all releases, and says so
            return True
        case "died":
            return pull.process.last_at >= given_up_at
        case _:
            return processes.last >= processes.when(pull.process.incarnation, given_up_at)[1]


def is_stranger(processes: Processes, who: str, name: str) -> bool:
    """Somebody who bears a reader's name, and of whose start neither side has ever heard."""
    start = start_of(who)
    if (
        not start
        or start == start_of(name)
        or start in processes.met
        or processes.service.process_named(who) is not None
    ):
        return False
    return bool(start_of(name) or processes.met)


def pulls_of(request: Request, lease: Lease, name: str) -> list[Pull]:
    """Find the attempts that a reader's name means, by time."""
    claim = lease.claims.get(name)
    out = []
    for pull in request.all_pulls:
        if name == "*":
            spoke = (*lease.claims, *lease.released)
            ranks = {base_name(x) for x in pull.peer_ranks}
            is_his = all(pull.process.start != start_of(x) for x in spoke)
            is_his = is_his and (not ranks or lease.process.base in ranks)
            # Where a log ends before a lease does, it does not say who has released it.
            is_his = is_his and not (lease.ended is None and has_read(pull, lease))
        elif claim is not None and claim.pull_id == pull.pull_id:
            is_his = True
        else:
            start = start_of(name)
            is_his = pull.process.start == start if start else pull.process.base == base_name(name)
        if is_his:
            out.append(pull)
    return sorted(out, key=lambda x: x.begun_at if not math.isnan(x.begun_at) else math.inf)


def turned_away(process: Process, since: float, until: float) -> str:
    """Who was not let in by a process between two moments of its own clock."""
    out: dict[str, None] = {}
    for event in (told.Refused, told.ReaderRefused):
        for record in process.since(event, since):
            if record.at > until:
                break
            who = record.text("who") or record.text("reader")
            out[f"{who} was turned away ({record.text('cause')})"] = None
    return listed(out)


def stale_at(lease: Lease, pull: Pull) -> str:
    """How the rank that lends turned its reader away, for it asked for an earlier start."""
    if lease.process.start in map(start_of, pull.peer_ranks):
        return ""  # then it was for another request
    for record in lease.process.of(told.ReaderRefused):
        if record.text("reader") == pull.process.rank and record.text("cause") in STALE:
            return f"{record.text('cause')}, {record.text('detail')}"
    return ""


def is_unanswered(pull: Pull, lease: Lease) -> bool:
    """A reader has said that nobody at this rank took its release."""
    ranks = [x for record in pull.unanswered for x in record.texts("ranks")]
    ranks += pull.ended.texts("unanswered") if pull.ended is not None else ()
    ranks += _given_up(pull)
    return any(start_of(x) == lease.process.start or base_name(x) == lease.process.base for x in ranks)


def _given_up(pull: Pull) -> list[str]:
    """Who was given up as a pull failed, where a short line does not say that they are not told of its end."""
    if pull.ended is None or not pull.ended.text("same_as") or pull.cause not in ("peer_lost", "restarted"):
        return []
    low, high = pull.ended.at - AT_ONCE_S, pull.ended.at + AT_ONCE_S
    changed = itertools.takewhile(lambda x: x.at <= high, pull.process.since(told.PeerChanged, low))
    return [x.text("peer") for x in changed if x.text("state") == "gone" and x.text("cause") == pull.cause]


def has_read(pull: Pull, lease: Lease) -> bool:
    """All that a reader wanted was read, and this rank was told, by its reader's word."""
    return pull.cause in ("complete", "discharged") and not pull.refused and not is_unanswered(pull, lease)


def how_unanswered(pull: Pull) -> str:
    """How a release was given up, in words."""
    for record in pull.unanswered:
        cause, detail = record.text("cause"), record.text("detail")
        after = f"given up {in_seconds(record.number('seconds'))} s after its pull had ended: {cause or 'no answer'}"
        return f"{after}, {detail}" if detail else after
    return f"the pull ended as {pull.cause}{f', {pull.detail}' if pull.detail else ''}"


def last_lost(processes: Processes, lease: Lease, pulls: Sequence[Pull]) -> Pull | None:
    """The attempt that said that it was the last, while it was lent, and was never heard."""
    ended_at = processes.span(lease)[1]
    for pull in reversed(pulls):
        for record in pull.unanswered:
            said_at = processes.when(pull.process.incarnation, record.at - record.number("seconds", 0.0))[0]
            is_last = record.text("outcome") not in ("", "retry")
            if is_last and said_at <= ended_at and lease.process.rank in record.texts("ranks"):
                return pull
    return None


def retries(pull: Pull, pulls: Sequence[Pull]) -> bool:
    """It said that another attempt would follow, and none did."""
    said = [x.text("outcome") for x in (*pull.unanswered, *pull.refused)]
    return ("retry" in said or bool(pull.retried)) and pulls[-1] is pull


def is_only_released(pull: Pull, lease: Lease) -> bool:
    """A pull had its outcome, and nothing of it was to be read from this rank."""
    if pull.ended is None or pull.cause == "peer_unreachable" or not pull.peer_ranks:
        return False
    read = pull.ended.texts("read_ranks")
    is_planned = bool(read) or pull.cause in ("complete", "discharged")
    return is_planned and all(base_name(x) != lease.process.base for x in read)


def ranks_of(record: Record) -> tuple[str, ...]:
    """The prefill ranks that a release was for."""
    return record.texts("ranks") or ((record.text("rank"),) if record.text("rank") else ())


def _speaks_of_keys(detail: str) -> bool:
    return any(word in detail for word in (" key", "turned away", "turn our"))
