"""Blocks of failed pulls that came back late, for something might still have written them."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.core import told
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Process, Pull, Request
from asynckv.tools.diagnose.leaks_finding import make_leak
from asynckv.tools.diagnose.leaks_processes import Processes
from asynckv.tools.diagnose.leaks_values import Leak, Story, in_seconds, listed
from asynckv.tools.diagnose.records import Record

__all__ = ["of_blocks"]

C = CAUSE

AT_ONCE_S = 0.01
"""Things that one process tells of within this time happened at the same moment."""


def of_blocks(processes: Processes, request: Request, pulls: Sequence[Pull]) -> Leak:
    """Blocks of pulls that might still be written when they had their outcome."""
    stories = sorted((_why_kept(processes, x) for x in pulls), key=lambda x: x.order)
    state, seconds = "returned", 0.0
    for pull in pulls:
        if pull.retired is not None:
            state = "retired"
        elif pull.returned is None and state != "retired":
            state = "quarantined"
        seconds = max(seconds, _kept_s(pull))
    blocks = [x.held_blocks for x in pulls]
    return make_leak(
        processes,
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
            dict.fromkeys(n for x in pulls for n in x.peer_ranks if processes.service.process_named(n) is None)
        ),
    )


def _why_kept(processes: Processes, pull: Pull) -> Story:
    ranks = pull.retired.texts("held_by") if pull.retired is not None else ()
    ranks = ranks or (pull.said.texts("read_ranks") if pull.said is not None else ()) or pull.peer_ranks
    owners = [x for x in map(processes.service.process_named, ranks) if x is not None]
    seconds = _kept_s(pull)
    held = f"for {in_seconds(seconds)} s after its pull had failed"
    if pull.retired is not None:
        held += ", and has given them up"
    elif pull.returned is None:
        held += " so far"
    names = {
        "reader": pull.process.rank,
        "holder": listed(ranks) or pull.peer,
        "held": held,
        "why": f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}" or pull.state,
    }
    since, until = pull.begun_at, (pull.returned or pull.retired or pull.ended or pull.held[-1][0]).at
    low = processes.when(pull.process.incarnation, since)[0]
    high = processes.when(pull.process.incarnation, until)[1]
    broken = (told.DataPlaneRestarted, told.DataPlaneBroken)
    failed = sum(processes.when(pull.process.incarnation, pull.ended.at)) / 2 if pull.ended is not None else high
    for owner in (pull.process, *owners):
        for record in owner.of(*broken):
            # It is told of when another runs. What died when the pull had failed is not why it did.
            at = processes.when(owner.incarnation, record.at - record.number("seconds", 0.0))
            if at[1] >= low and sum(at) / 2 <= failed + AT_ONCE_S:
                return Story(C.DATA_PLANE_DIED, names | {"holder": owner.rank, "why": record.text("cause")})
    for owner in owners:
        fate = processes.fate(owner)
        if fate.kind == "died" and fate.after <= high and fate.before >= low:
            return Story(C.READ_FROM_THE_DEAD, names | {"holder": owner.rank, "why": fate.why})
    for owner in owners:
        away = max(
            (r.number("seconds", 0.0) for r in owner.of(told.LoopWasAway) if _overlaps(processes, owner, r, low, high)),
            default=0.0,
        )
        if away > 0.0:
            return Story(C.PREFILL_LOOP_AWAY, names | {"holder": owner.rank, "away_s": in_seconds(away)})
    if pull.cause in ("peer_lost", "restarted") and (
        not owners or any(processes.fate(x).kind != "stopped" and not processes.lives_until(x, high) for x in owners)
    ):
        return Story(C.READ_FROM_THE_DEAD, names)
    return Story(C.STUCK_TRANSFER, names)


def _overlaps(processes: Processes, process: Process, away: Record, low: float, high: float) -> bool:
    at = processes.when(process.incarnation, away.at)
    return at[1] >= low and at[0] - away.number("seconds", 0.0) <= high


def _kept_s(pull: Pull) -> float:
    for record in (pull.returned, pull.retired):
        if record is not None:
            return record.number("seconds_after_failure", 0.0)
    return max(pull.process.last_at - (pull.ended.at if pull.ended is not None else pull.last_at), 0.0)
