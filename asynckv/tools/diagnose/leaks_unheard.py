"""What only the decode side's logs tell of: releases that were refused, or that nobody answered."""

from __future__ import annotations

import math

from asynckv.core import told
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Process, Pull, Request, start_of
from asynckv.tools.diagnose.leaks_between import HARMLESS, STALE, how_unanswered, ranks_of, turned_away_at
from asynckv.tools.diagnose.leaks_finding import make_leak, what_became_of_release
from asynckv.tools.diagnose.leaks_processes import Processes
from asynckv.tools.diagnose.leaks_values import Leak, Story, Word, moment, other_id
from asynckv.tools.diagnose.records import Record

__all__ = ["of_releases"]

C = CAUSE


def of_releases(processes: Processes, request: Request) -> Leak | None:
    """What only the decode side's logs tell of: releases that were refused, or that nobody answered."""
    stories: list[tuple[Story, str, Pull]] = []
    for pull in request.all_pulls:
        ranks = [x for record in pull.unanswered for x in record.texts("ranks")]
        ranks += pull.ended.texts("unanswered") if pull.ended is not None else ()
        stories += [
            (found, rank, pull) for rank in ranks if (found := _unheard(processes, request, pull, rank)) is not None
        ]
        for record in pull.refused:
            if (story := _refused_only(pull, record)) is not None:
                missing = [
                    x
                    for x in ranks_of(record)
                    if not _is_told(processes, request, pull, x, record) and not _is_gone(pull.process, x)
                ]
                stories += [(story, rank, pull) for rank in missing]
    if not stories:
        return None
    stories.sort(key=lambda x: x[0].order)
    story, _, pull = stories[0]
    holders = tuple(dict.fromkeys(rank for _, rank, _ in stories))
    known = [x for x in map(processes.service.process_named, holders) if x is not None]
    leases = [x for x in request.leases.values() if x.process in known]
    blocks = [x.blocks for x in leases]
    is_dead = story.cause is C.PREFILL_DIED
    return make_leak(
        processes,
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
            Word(rank, x.process.rank, "is not in this side's log", what_became_of_release(x, rank))
            for _, rank, x in stories
        ),
        missing=() if is_dead else holders,
    )


def _is_told(processes: Processes, request: Request, pull: Pull, rank: str, record: Record | None) -> bool:
    """The log of a prefill rank says what became of what a pull had of it."""
    owner = processes.service.process_named(rank)
    ended = any(x.process is owner and x.ended is not None for x in request.leases.values())
    return owner is not None and (ended or processes.tells(owner, pull, record))


def _unheard(processes: Processes, request: Request, pull: Pull, rank: str) -> Story | None:
    """A release that nobody answered: what became of the lease is in the prefill rank's log, if there is one."""
    names = {"reader": pull.process.rank, "holder": rank, "why": how_unanswered(pull)}
    owner = processes.service.process_named(rank)
    causes = {x.text("cause") for x in pull.unanswered if rank in x.texts("ranks")} or {pull.cause}
    if owner is None and _was_away_meanwhile(processes, pull, rank):
        return None
    is_ended = any(x.process is owner and x.ended is not None for x in request.leases.values())
    if (
        owner is not None
        and (fate := processes.fate(owner)).kind == "died"
        and pull.was_granted_by(rank)
        and not is_ended
    ):
        return Story(C.PREFILL_DIED, names | {"why": fate.why, "gone": fate.gone})
    unanswered = next((x for x in pull.unanswered if rank in x.texts("ranks")), None)
    if owner is None or not _is_told(processes, request, pull, rank, unanswered):
        # What was closed in order has revoked it, and what was restarted holds it no more.
        # Nor was it waited for long by who closed: the answer may have been on its way.
        is_over = causes & {"restarted", "peer_lost", "engine_closed"} or _is_gone(pull.process, rank)
        if is_over:
            return None
        if pull.cause == "peer_unreachable":
            keys = turned_away_at(pull, rank)
            cause = C.KEYS_REFUSED if keys else C.NEVER_SHOOK_HANDS
            return Story(cause, names | {"why": keys or pull.detail}, missing=(rank,))
        if pull.cause == "wrong_target":
            return Story(C.WRONG_TARGET, names | {"why": pull.detail}, missing=(rank,))
        return Story(C.RELEASE_UNANSWERED, names, missing=(rank,))
    return None


def _was_away_meanwhile(processes: Processes, pull: Pull, rank: str) -> bool:
    """The reader's own loop was away while the answer was due: it may lie in its socket."""
    for record in pull.unanswered:
        if rank in record.texts("ranks") and record.text("cause") == "timeout":
            waited_s = record.number("seconds", 0.0)
            away_s = processes.away_s(pull.process, record.at - waited_s, record.at)
            return away_s > 0.0 and waited_s - away_s < pull.process.durations.get("release_timeout_s", 30.0) / 2
    return False


def _is_gone(reader: Process, rank: str) -> bool:
    """A prefill rank has ended, by its reader's log: with it, or by its word, went what it had lent."""
    return any(
        start_of(x.text("peer")) == start_of(rank) and x.text("state") == "gone"
        for x in reader.of(told.PeerChanged)
        if x.text("cause") in ("peer_lost", "restarted")
    )


def _refused_only(pull: Pull, record: Record) -> Story | None:
    reason, detail = record.text("cause"), record.text("detail")
    names = {
        "reader": pull.process.rank,
        "why": f"release {reason}{f', {detail}' if detail else ''}",
        "message": "release",
    } | other_id(pull.prefill_request_id)
    if reason == "wrong_request":
        return Story(C.OTHER_REQUEST_ID, names)
    if reason in STALE:
        return Story(C.STALE_PARAMS, names)
    return None if reason in HARMLESS else Story(C.RELEASE_REFUSED, names)
