"""What pulls tell of late blocks: those of their own that might still be written, and leases that only they speak of.

A prefill rank whose log is missing, or ends before a lease could have expired, does not say what became of the lease.
Then a release that was refused or never answered, and an announcement that was never pulled, are known from the decode
side alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asynckv.core import told
from asynckv.tools.diagnose.causes import Owner, Reader
from asynckv.tools.diagnose.join import Process, Pull, Request, start_of
from asynckv.tools.diagnose.leaks_between import how_unanswered, refused_as, turned_away_at, unanswered_ranks
from asynckv.tools.diagnose.leaks_finding import make_leak, what_became_of_release, words_of
from asynckv.tools.diagnose.leaks_values import Leak, Word, in_seconds, listed, moment, other_id
from asynckv.tools.diagnose.leaks_why import Verdict
from asynckv.tools.diagnose.presence import AT_ONCE_S, Presence
from asynckv.tools.diagnose.records import Record

W, R = Owner, Reader


# -- blocks of failed pulls --------------------------------------------------------------------------------------------


def of_blocks(presence: Presence, request: Request, pulls: Sequence[Pull]) -> Leak:
    """Blocks of pulls that might still be written when they had their outcome."""
    found = sorted((_why_kept(presence, x) for x in pulls), key=lambda x: x.order)
    kept = {"retired" if x.retired else "returned" if x.returned else "quarantined" for x in pulls}
    blocks = [x.held_blocks for x in pulls]
    named = (name for x in pulls for name in x.peer_ranks)
    return make_leak(
        presence,
        request,
        found,
        side="decode",
        state=next(x for x in ("retired", "quarantined", "returned") if x in kept),
        holders=tuple(dict.fromkeys(x.process.rank for x in pulls)),
        blocks=sum(blocks) if all(x >= 0 for x in blocks) else -1,
        seconds=max(map(_kept_s, pulls)),
        since=min((x.ended.at if x.ended is not None else x.begun_at) for x in pulls),
        missing=tuple(dict.fromkeys(x for x in named if presence.service.process_named(x) is None)),
    )


def _why_kept(presence: Presence, pull: Pull) -> Verdict:
    reader = pull.process
    ranks = pull.retired.texts("held_by") if pull.retired is not None else ()
    ranks = ranks or (pull.said.texts("read_ranks") if pull.said is not None else ()) or pull.peer_ranks
    owners = [x for x in map(presence.service.process_named, ranks) if x is not None]
    after = ", and has given them up" if pull.retired else "" if pull.returned else " so far"
    names = {
        "reader": reader.rank,
        "holder": listed(ranks) or pull.peer,
        "held": f"for {in_seconds(_kept_s(pull))} s after its pull had failed{after}",
        "why": f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}" or pull.state,
    }
    until = (pull.returned or pull.retired or pull.ended or pull.held[-1][0]).at
    low, high = presence.when(reader.incarnation, pull.begun_at)[0], presence.when(reader.incarnation, until)[1]

    def kept(state: Reader, **more: Any) -> Verdict:
        return Verdict(W.READ, state, names | more)

    failed = presence.near(reader, pull.ended.at) if pull.ended is not None else high
    for owner in (reader, *owners):
        for record in owner.of(told.DataPlaneRestarted, told.DataPlaneBroken):
            # It is told of when another runs. What died when the pull had failed is not why it did.
            at = presence.when(owner.incarnation, record.at - record.number("seconds", 0.0))
            if at[1] >= low and sum(at) / 2 <= failed + AT_ONCE_S:
                return kept(R.PLANE_DIED, holder=owner.rank, why=record.text("cause"))
    for owner in owners:
        fate = presence.fate(owner)
        if fate.kind == "died" and fate.after <= high and fate.before >= low:
            return kept(R.OWNER_DIED, holder=owner.rank, why=fate.why)
    for owner in owners:
        spans = [(x.number("seconds", 0.0), presence.when(owner.incarnation, x.at)) for x in owner.of(told.LoopWasAway)]
        away_s = max((s for s, at in spans if at[1] >= low and at[0] - s <= high), default=0.0)
        if away_s > 0.0:
            return kept(R.OWNER_AWAY, holder=owner.rank, away_s=in_seconds(away_s))
    fates = [presence.fate(x) for x in owners]
    may_be_dead = not owners or any(x.kind != "stopped" and x.after < high for x in fates)
    return kept(R.OWNER_DIED if pull.cause in ("peer_lost", "restarted") and may_be_dead else R.READING)


def _kept_s(pull: Pull) -> float:
    if (record := pull.returned or pull.retired) is not None:
        return record.number("seconds_after_failure", 0.0)
    return max(pull.process.last_at - (pull.ended.at if pull.ended is not None else pull.last_at), 0.0)


# -- leases of which only the decode side speaks -----------------------------------------------------------------------


def of_announcement(presence: Presence, request: Request, pulls: Sequence[Pull]) -> Leak:
    """A lease that was renewed for an announcement until its time was up, whoever released it then."""
    pull = max(pulls, key=lambda x: x.ended.number("seconds", 0.0) if x.ended is not None else 0.0)
    leases = request.leases.values()
    seconds = pull.ended.number("seconds") if pull.ended is not None else pull.process.last_at - pull.begun_at
    names = {"reader": listed(x.process.rank for x in pulls), "seconds": in_seconds(seconds)}
    blocks = [x.blocks for x in leases if x.blocks >= 0]
    return make_leak(
        presence,
        request,
        [Verdict(W.UNKNOWN, R.ANNOUNCED, names)],
        side="prefill",
        state="announced",
        holders=tuple(x.process.rank for x in leases) or pull.peer_ranks,
        blocks=sum(blocks) if blocks else -1,
        seconds=max([x.seconds for x in leases], default=seconds),
        since=min([x.lent_at for x in leases], default=pull.begun_at),
        owed=tuple(x.process.rank for x in pulls if x.ended is None),
        released={x.process.rank: "failed" for x in pulls if x.ended is not None},
        words=tuple(words_of(presence, request, leases)),
        missing=() if request.leases else tuple(pull.peer_ranks),
    )


def of_releases(presence: Presence, request: Request) -> Leak | None:
    """Releases that were refused, or never answered, by ranks whose logs do not say what became of the lease."""
    found: list[tuple[Verdict, str, Pull]] = []
    for pull in request.all_pulls:
        unheard = ((_unheard(presence, request, pull, rank), rank) for rank in unanswered_ranks(pull))
        found += [(verdict, rank, pull) for verdict, rank in unheard if verdict is not None]
        for record in pull.refused:
            state = refused_as(record.text("cause"), record.text("detail"))
            why = f"release {record.text('cause')}{f', {detail}' if (detail := record.text('detail')) else ''}"
            names = {"reader": pull.process.rank, "why": why, "message": "release"} | other_id(pull.prefill_request_id)
            for rank in record.texts("ranks"):
                is_known = _is_told(presence, request, pull, rank, record) or _is_gone(pull.process, rank)
                if state is not None and not is_known:
                    found.append((Verdict(W.UNKNOWN, state, names), rank, pull))
    if not found:
        return None
    found.sort(key=lambda x: x[0].order)
    verdict, _, pull = found[0]
    holders = tuple(dict.fromkeys(rank for _, rank, _ in found))
    known = [x for x in map(presence.service.process_named, holders) if x is not None]
    leases = [x for x in request.leases.values() if x.process in known]
    blocks = [x.blocks for x in leases]
    is_dead = verdict.reader is R.OWNER_DIED
    ends = (f"the log of {x.rank} ends at {moment(x.last_at)}, before its lease could have expired" for x in known)
    return make_leak(
        presence,
        request,
        [verdict],
        side="prefill",
        state="died" if is_dead else "unknown",
        holders=holders,
        blocks=sum(blocks) if len(blocks) == len(holders) and all(x >= 0 for x in blocks) else -1,
        seconds=math.nan,
        since=min([x.lent_at for x in leases], default=pull.begun_at),
        also=() if is_dead else tuple(ends),
        owed=tuple(dict.fromkeys(x.process.rank for _, _, x in found)),
        words=tuple(
            Word(rank, x.process.rank, "is not in this side's log", what_became_of_release(x, rank))
            for _, rank, x in found
        ),
        missing=() if is_dead else holders,
    )


def _is_told(presence: Presence, request: Request, pull: Pull, rank: str, record: Record | None) -> bool:
    """The log of a prefill rank says what became of what a pull had of it."""
    owner = presence.service.process_named(rank)
    ended = any(x.process is owner and x.ended is not None for x in request.leases.values())
    return owner is not None and (ended or presence.tells(owner, pull, record))


def _unheard(presence: Presence, request: Request, pull: Pull, rank: str) -> Verdict | None:
    """A release that was never answered: what became of the lease is in the prefill rank's log, if there is one."""
    names = {"reader": pull.process.rank, "holder": rank, "why": how_unanswered(pull)}
    owner = presence.service.process_named(rank)
    records = [x for x in pull.unanswered if rank in x.texts("ranks")]
    if owner is not None:
        fate, is_over = presence.fate(owner), any(x.process is owner and x.ended for x in request.leases.values())
        if fate.kind == "died" and pull.was_granted_by(rank) and not is_over:
            return Verdict(W.UNKNOWN, R.OWNER_DIED, names | {"why": fate.why, "gone": fate.gone})
        if _is_told(presence, request, pull, rank, next(iter(records), None)):
            return None
    elif any(_was_away_meanwhile(presence, pull, x) for x in records):
        return None
    # A rank that was closed in order has revoked it, and one that was restarted holds it no more.
    # Nor did a reader that closed wait for long: the answer may have been on its way.
    causes = {x.text("cause") for x in records} or {pull.cause}
    if causes & {"restarted", "peer_lost", "engine_closed"} or _is_gone(pull.process, rank):
        return None
    state = R.UNANSWERED
    if pull.cause == "peer_unreachable":
        keys = turned_away_at(pull, rank)
        state, names["why"] = R.KEYS if keys else R.UNMET, keys or pull.detail
    elif pull.cause == "wrong_target":
        state, names["why"] = R.WRONG_TARGET, pull.detail
    return Verdict(W.UNKNOWN, state, names, missing=(rank,))


def _was_away_meanwhile(presence: Presence, pull: Pull, record: Record) -> bool:
    """The reader's own loop was away while the answer was due: it may lie in its socket."""
    waited_s = record.number("seconds", 0.0)
    away_s = presence.away_s(pull.process, record.at - waited_s, record.at)
    short = waited_s - away_s < pull.process.durations.get("release_timeout_s", 30.0) / 2
    return record.text("cause") == "timeout" and away_s > 0.0 and short


def _is_gone(reader: Process, rank: str) -> bool:
    """A prefill rank has ended, by its reader's log: with it, or by its word, went what it had lent."""
    said = (x for x in reader.of(told.PeerChanged) if start_of(x.text("peer")) == start_of(rank))
    return any(x.text("state") == "gone" and x.text("cause") in ("peer_lost", "restarted") for x in said)
