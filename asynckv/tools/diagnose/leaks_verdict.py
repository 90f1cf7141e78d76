"""The verdict on one late lease: a story for each reader that it waits for.

The evidence is weighed in the order in which one thing would have been enough by itself: what was refused, then what
became of the reader that claimed it or did not, then whose side has an internal error.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence

from asynckv.core import told
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE
from asynckv.tools.diagnose.join import Lease, Pull, Refusal, Request, base_name, start_of
from asynckv.tools.diagnose.leaks_between import HARMLESS, STALE, is_stranger, pulls_of, ranks_of
from asynckv.tools.diagnose.leaks_claimed import claimed
from asynckv.tools.diagnose.leaks_processes import Processes
from asynckv.tools.diagnose.leaks_unclaimed import unclaimed
from asynckv.tools.diagnose.leaks_values import Story, in_seconds, listed, other_id

__all__ = ["stories_of"]

C = CAUSE

_OTHER = re.compile(r"not to ('.*'|\".*\")\Z", re.DOTALL)


def stories_of(processes: Processes, request: Request, lease: Lease, state: str) -> list[Story]:
    """Say why a lease is late: one story for each reader that it waits for."""
    holder, fate = lease.process.rank, processes.fate(lease.process)
    if state == "died":
        why = fate.why
        if fate.kind != "died":
            why = f"{why.partition(';')[0]}, nor a word of what it held, and others went on to their end"
        return [Story(C.PREFILL_DIED, {"holder": holder, "why": why, "gone": fate.gone}, lease.seconds)]
    if state == "closed":
        how = lease.ended.text("revoked_by") if lease.ended is not None else ""
        names = {
            "holder": holder,
            "owed": listed(lease.owed),
            "why": f"after {in_seconds(lease.seconds)} s; {how or fate.why}",
        }
        return [Story(C.PREFILL_CLOSED, names, lease.seconds)]
    owed = list(dict.fromkeys(lease.owed)) or ["*"]
    return [_story(processes, request, lease, name) for name in owed]


def _story(processes: Processes, request: Request, lease: Lease, name: str) -> Story:
    claim = lease.claims.get(name)
    pulls = pulls_of(request, lease, name)
    if (story := _was_refused(processes, request, lease, name, pulls)) is not None:
        return story
    is_claimed = claim is not None or bool(start_of(name))
    story = claimed(processes, lease, name, pulls) if is_claimed else unclaimed(processes, request, lease, name, pulls)
    if CATALOGUE[story.cause].is_class and (bug := _bug(processes, lease, name, pulls)) is not None:
        return bug
    return story


def _was_refused(
    processes: Processes, request: Request, lease: Lease, name: str, pulls: Sequence[Pull]
) -> Story | None:
    """What was turned down is why a reader is owed, whatever became of it."""
    reader = _reader(name, pulls)
    found = [x for x in lease.refused if name == "*" or base_name(x.who) == base_name(name) or not base_name(x.who)]
    found = [x for x in found if not is_stranger(processes, x.who, name)]
    for pull in pulls:  # what the prefill side has not said, or could not
        for record in pull.refused:
            ranks = ranks_of(record)
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
                return Story(C.OTHER_REQUEST_ID, names | other_id(other), refusal.after_s)
            case "parked_too_long":
                return Story(C.RELEASE_TOO_EARLY, names, 0.0)
            case "expired" if "max_lease_s" in refusal.detail:
                return Story(C.MAX_LEASE, names, refusal.after_s)
            case reason if reason in STALE:
                return Story(C.STALE_PARAMS, names, refusal.after_s)
            case reason if reason not in HARMLESS and (refusal.message == "release" or name not in lease.claims):
                return Story(C.RELEASE_REFUSED, names, refusal.after_s)
            case _:
                pass
    return None


def _bug(processes: Processes, lease: Lease, name: str, pulls: Sequence[Pull]) -> Story | None:
    """An internal error on either side meanwhile."""
    low, high = processes.span(lease)
    readers = [processes.service.process_named(name), *(x.process for x in pulls)]
    for process in (lease.process, *(x for x in readers if x is not None)):
        for record in process.of(told.InternalError):
            at = processes.when(process.incarnation, record.at)
            if at[1] >= low and at[0] <= high:
                return Story(C.INTERNAL_ERROR, {"reader": process.rank, "why": record.text("error")})
    return None


def _reader(name: str, pulls: Sequence[Pull]) -> str:
    if name == "*" or not start_of(name):
        return listed(x.process.rank for x in pulls) if pulls else name
    return name


def _named_in(detail: str) -> str:
    """The request id that a refusal's words quote; empty in old logs."""
    found = _OTHER.search(detail)
    try:
        value = ast.literal_eval(found[1]) if found is not None else ""
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
