"""Why a reader that had claimed never released in time: it died, was away, had too little time, or was not heard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Lease, Process, Pull, base_name
from asynckv.tools.diagnose.leaks_between import excuse, how_unanswered, is_unanswered, last_lost, retries
from asynckv.tools.diagnose.leaks_clocks import CLOCKS_S
from asynckv.tools.diagnose.leaks_late import is_forgotten
from asynckv.tools.diagnose.leaks_processes import SILENCE_S, UNDER_WAY_S, Processes
from asynckv.tools.diagnose.leaks_values import Story, in_seconds, moment

__all__ = ["claimed"]

C = CAUSE

AT_ONCE_S = 0.01
"""Promises are of whole milliseconds, so that the last may end so much before `max_lease_s`."""
CLOSING_S = 1.0
"""An engine that ends so long after a lease had most likely not begun to when the lease ended."""


def claimed(processes: Processes, lease: Lease, name: str, pulls: Sequence[Pull]) -> Story:
    """Say why a reader that had claimed is owed."""
    claim = lease.claims.get(name)
    heard_s = claim.heard_s if claim is not None else math.nan
    pull_id = claim.pull_id if claim is not None else ""
    process = processes.service.process_named(name) or processes.service.process_of(pull_id)
    pull = next((x for x in pulls if x.pull_id == pull_id), pulls[-1] if pulls else None)
    if pull is not None and pull.retried:
        pull = pulls[-1]  # a later attempt, of which nothing came here
    names: dict[str, Any] = {
        "reader": name,
        "holder": lease.process.rank,
        "heard_s": in_seconds(heard_s),
        "heard_at": moment(lease.lent_at + heard_s),
        "seconds": in_seconds(lease.seconds),
        "lease_s": in_seconds(lease.lease_s),
    }
    grant_s = lease.process.durations.get("grant_s", 10.0)
    if process is None and lease.ended is None and lease.seconds - heard_s < grant_s / 2:
        return Story(C.STILL_HELD, names | {"why": f"claimed and renewed by {name}"}, heard_s, (name,))
    is_pulled = pull is None or not is_forgotten(processes, pull)
    if is_pulled and _was_renewed_for_as_long_as_may_be(lease, heard_s):
        most = in_seconds(lease.process.durations["max_lease_s"])
        return Story(C.MAX_LEASE, names | {"why": f"lent for {in_seconds(lease.seconds)} s, of {most} s"}, heard_s)
    if process is None:
        # That a claim of it was turned down since is another attempt, and no claim that was on its way.
        theirs = (x for x in lease.refused if x.message == "claim" and base_name(x.who) == base_name(name))
        followed = any(x.after_s > heard_s + UNDER_WAY_S for x in theirs)
        cause = C.NO_ATTEMPT_FOLLOWED if name in lease.retrying and not followed else C.READER_SILENT
        why = "its last word; it may have died"
        return Story(cause, names | {"why": why}, heard_s, (name,))
    fate = processes.fate(process)
    names["why"] = fate.why
    if not process.says_info and not fate.is_proved and (pull is None or pull.ended is None):
        # Neither a good outcome nor a goodbye is a warning.
        return Story(C.READER_SILENT, names | {"why": "its log has warnings only"}, heard_s, (name,))
    if pull is not None and is_forgotten(processes, pull):
        seconds = pull.ended.number("seconds") if pull.ended is not None else lease.seconds
        if lease.seconds < seconds - 1.0 and (away := excuse(processes, lease, pull)) is not None:
            return away  # the promise was lost before the announcement's time was up
        return Story(C.ANNOUNCED_AND_FORGOTTEN, names | {"seconds": in_seconds(seconds)}, 0.0)
    if pull is None or pull.ended is None:
        return _without_outcome(processes, lease, name, process, pull, names, heard_s)
    said = f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}"
    names["why"] = said
    if (away := excuse(processes, lease, pull)) is not None:
        return away
    if process.stopped is not None and any(x.text("cause") == "engine_closed" for x in pull.unanswered):
        if _closed_later(processes, lease, process):
            return Story(C.RELEASE_LOST, names | {"why": how_unanswered(pull)}, heard_s)
        return Story(C.READER_CLOSED, names | {"why": f"{said}; {fate.why}"}, heard_s)
    if (last := last_lost(processes, lease, pulls)) is not None and last is not pull:
        return Story(C.RELEASE_LOST, names | {"why": how_unanswered(last)}, heard_s)
    if name in lease.retrying or retries(pull, pulls):
        if fate.kind == "died":
            return Story(C.DIED_AFTER_CLAIM, names | {"why": fate.why, "gone": fate.gone}, heard_s)
        return Story(C.NO_ATTEMPT_FOLLOWED, names, heard_s)
    if pull.held_transfers and processes.when(process.incarnation, pull.ended.at)[1] < _over(processes, lease):
        # Nobody releases what may still be read.
        if pull.returned is None or processes.when(process.incarnation, pull.returned.at)[0] > processes.span(lease)[1]:
            held = f"for {in_seconds(lease.seconds)} s at least"
            return Story(C.STUCK_TRANSFER, names | {"held": held}, heard_s)
    is_over = processes.when(process.incarnation, pull.ended.at)[0] > processes.span(lease)[1]
    if pull.cause in ("lease_lost", "expired") or is_over:
        return Story(C.LEASE_TOO_SHORT, names, heard_s)
    if is_unanswered(pull, lease):
        return Story(C.RELEASE_LOST, names | {"why": how_unanswered(pull)}, heard_s)
    if pull.cause in ("timeout", "not_lent_yet"):
        # No promise is asked for beyond the caller's deadline, so the lease was over as the release was said.
        return Story(C.LEASE_TOO_SHORT, names, heard_s)
    if fate.kind == "died":
        # It had its outcome, and died before its release was heard.
        return Story(C.DIED_AFTER_CLAIM, names | {"why": fate.why, "gone": fate.gone}, heard_s)
    if fate.kind == "stopped" and not _closed_later(processes, lease, process):
        return Story(C.READER_CLOSED, names | {"why": f"{said}; {fate.why}"}, heard_s)
    waits_s = process.durations.get("release_timeout_s", 30.0)
    if processes.last < processes.when(process.incarnation, pull.ended.at)[1] + waits_s:
        return Story(C.READER_SILENT, names, heard_s)  # it would not have said yet that nobody answers
    # Whatever it said was answered, so it came as the lease was over.
    return Story(C.LEASE_TOO_SHORT, names, heard_s)


def _closed_later(processes: Processes, lease: Lease, reader: Process) -> bool:
    """Its engine ended when a lease had been over for some time."""
    if reader.stopped is None:
        return False
    return processes.when(reader.incarnation, reader.stopped.at)[0] > processes.span(lease)[1] + CLOSING_S


def _over(processes: Processes, lease: Lease) -> float:
    """When a lease was over, in everybody's time, at the earliest."""
    return processes.when(lease.process.incarnation, lease.lent_at + lease.seconds)[0]


def _was_renewed_for_as_long_as_may_be(lease: Lease, heard_s: float) -> bool:
    """It expired at `max_lease_s`, and this reader had asked for as much as was left: its last promise was cut."""
    most = lease.process.durations.get("max_lease_s", math.inf)
    grant_s = lease.process.durations.get("grant_s", 0.0)
    return lease.state == "expired" and lease.seconds >= most - AT_ONCE_S and heard_s + grant_s >= lease.seconds


def _without_outcome(
    processes: Processes,
    lease: Lease,
    name: str,
    process: Process,
    pull: Pull | None,
    names: dict[str, Any],
    heard_s: float,
) -> Story:
    """Say why a reader that had claimed has no outcome in its log."""
    fate = processes.fate(process)
    heard = processes.when(lease.process.incarnation, lease.lent_at + (0.0 if math.isnan(heard_s) else heard_s))
    if fate.kind == "stopped" and fate.after >= heard[0]:
        if name in lease.retrying:
            return Story(C.NO_ATTEMPT_FOLLOWED, names, heard_s)
        return Story(C.READER_CLOSED, names, heard_s)
    ended = processes.span(lease)[1]
    if fate.kind != "stopped" and (fate.kind == "died" or lease.state != "lent") and fate.after <= ended:
        # A process that lives renews, and says how it ended: silence is its end, whatever else is known of it.
        if name in lease.retrying and fate.kind != "died":
            return Story(C.NO_ATTEMPT_FOLLOWED, names | {"why": "its last word; it may have died"}, heard_s)
        if fate.kind != "died" and processes.last < ended + SILENCE_S / 2 and name not in lease.retrying:
            return Story(C.READER_SILENT, names, heard_s)  # the logs were cut, and its loop may be away
        why = fate.why if fate.kind == "died" else fate.why.partition(";")[0]
        if fate.after < heard[0]:
            why += f"; what it did after {moment(process.last_at)} is not in its log"
        return Story(C.DIED_AFTER_CLAIM, names | {"why": why, "gone": fate.gone}, heard_s)
    if lease.state == "lent":
        why = f"{pull.state or 'claimed'} by {name}" if pull is not None else f"claimed by {name}"
        return Story(C.STILL_HELD, names | {"why": why}, heard_s)
    own = [x for x in (pull.begun_at if pull is not None else math.nan,) if not math.isnan(x)]
    away = processes.away_s(process, own[0] if own else lease.lent_at - CLOCKS_S, process.last_at)
    if away > 0.0:
        return Story(C.DECODE_LOOP_AWAY, names | {"away_s": in_seconds(away)}, heard_s)
    if name in lease.retrying:
        return Story(C.NO_ATTEMPT_FOLLOWED, names | {"why": "its log goes on"}, heard_s)
    return Story(C.UNEXPLAINED, names | {"why": "its log goes on, and does not speak of it"}, heard_s)
