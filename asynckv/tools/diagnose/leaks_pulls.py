"""Evidence of pulls: reasons of failures, blocks that might still be written, and leases that only they mention.

If a prefill rank's log is missing, or ends before a lease could have expired, it does not show the end of the lease. A
refused or unanswered release is then known from the decode side alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asynckv.core import told
from asynckv.core.types import How
from asynckv.tools.diagnose.causes import CATALOGUE, FAILED_AS, Owner, Reader, remedy_of
from asynckv.tools.diagnose.join import Process, Pull, Request, start_of
from asynckv.tools.diagnose.leaks_between import how_unanswered, key_trouble_at, refused_as, said_of, unanswered_ranks
from asynckv.tools.diagnose.leaks_values import in_seconds, listed, other_id
from asynckv.tools.diagnose.leaks_why import REFUSED_AT_HELLO, Verdict
from asynckv.tools.diagnose.presence import AT_ONCE_S, Presence
from asynckv.tools.diagnose.records import Record
from asynckv.tools.diagnose.stalls import stalled_s

W, R = Owner, Reader

# -- why pulls fail ----------------------------------------------------------------------------------------------------

WELL = frozenset({"", "complete", "discharged", "cancelled", "withdrawn", "revoked"})
"""Ends of a pull that are no failures."""


class Failure(NamedTuple):
    """Pulls that failed for one reason and by one rank: `by`, which was away, died, or was to be read from, or the
    reader itself."""

    verdict: Verdict
    pulls: Sequence[Pull]

    @property
    def times(self) -> list[float]:
        """When they failed, by their readers' clocks."""
        return [x.ended.at for x in self.pulls if x.ended is not None]

    @property
    def remedy(self) -> str:
        return remedy_of(self.verdict.cause, self.verdict.names.get("reason", ""))

    @property
    def sentence(self) -> str:
        ends, names = Counter(x.cause for x in self.pulls), self.verdict.names
        told_as = ", ".join(f"{number:,} {cause}" for cause, number in ends.most_common(4))
        title = CATALOGUE[self.verdict.cause].title
        why = f" for {names['away_s']} s" if "away_s" in names else f" ({names['why']})" if names["why"] else ""
        readers = listed(x.process.rank for x in self.pulls)
        return f"pulls of {readers} from {names['holder']} failed ({told_as}): {title}{why}"


def failures(presence: Presence, counts: Callable[[Pull], bool] = lambda pull: True) -> list[Failure]:
    """Group failed pulls by reason and by rank; the most frequent first.

    A pull counts whether or not its lease was late, also if its own engine refused it.
    """
    groups: dict[tuple[Reader, str, str], list[tuple[Pull, Verdict]]] = defaultdict(list)
    for request in presence.service.requests:
        for pull in request.all_pulls:
            if pull.cause not in WELL and counts(pull):
                verdict = _why_failed(presence, pull)
                groups[verdict.reader, verdict.names["by"], verdict.names.get("reason", "")].append((pull, verdict))
    longest = ((max(found, key=lambda x: float(x[1].names.get("away", 0.0))), found) for found in groups.values())
    out = [Failure(verdict, [pull for pull, _ in found]) for (_, verdict), found in longest]
    return sorted(out, key=lambda x: (-len(x.pulls), min(x.times)))


def _why_failed(presence: Presence, pull: Pull) -> Verdict:
    """Say why a pull failed: from events during it, else from its own words."""
    holder = listed(_read_ranks(pull)) or pull.peer
    names = {"reader": pull.process.rank, "holder": holder, "by": holder, "why": pull.detail}
    state, more = _befell(presence, pull, pull.ended)
    if state is None:
        state = FAILED_AS.get(pull.cause, R.LATE if pull.failed_in == "queue" else R.NO_LOG)
        if pull.cause == "engine_closed" and pull.process.stopped is None:
            state = R.STALE
        if state is R.UNMET and any(key_trouble_at(pull, x)[0] for x in _read_ranks(pull) or ("",)):
            state = R.KEYS
        if state in (R.REFUSED_HERE, R.CLOSED, R.STUCK):
            more = {"by": pull.process.rank}
        if state is R.REFUSED_HERE:
            more["reason"] = pull.cause  # each has a remedy of its own
        if state in (R.BROKEN, R.LATE) and (lost := _lost(pull)):
            state, more = _what_became(presence, pull, lost), {"why": lost.text("detail")}
    return Verdict(W.FAILED, state, names | more)


def _lost(pull: Pull) -> Record | None:
    """Return the loss of a rank that a reader read from, during its pull or since: a rank is silent before it is
    lost."""
    starts = {start_of(x) for x in _read_ranks(pull)}
    said = (x for x in pull.process.since(told.PeerChanged, pull.begun_at) if start_of(x.text("peer")) in starts)
    return next((x for x in said if x.text("cause") == "peer_lost"), None)


def _what_became(presence: Presence, pull: Pull, lost: Record) -> Reader:
    """Return the fate of a lost rank; its silence proves neither its death nor its life."""
    if lost.text("how") == How.GOODBYE:
        return R.OWNER_CLOSED
    has_logs = all(presence.service.process_named(x) for x in _read_ranks(pull))
    return R.BROKEN if has_logs else R.NO_LOG


def _read_ranks(pull: Pull) -> tuple[str, ...]:
    """The ranks that a pull read from, or was to; the ones that its blocks were retired for, if it says so."""
    held_by = pull.retired.texts("held_by") if pull.retired is not None else ()
    return held_by or (pull.said.texts("read_ranks") if pull.said is not None else ()) or pull.peer_ranks


def _befell(presence: Presence, pull: Pull, until: Record | None) -> tuple[Reader | None, dict[str, Any]]:
    """Return an event during a pull that explains it: a dead data plane or process, or a blocked loop."""
    reader = pull.process
    owners = [x for x in map(presence.service.process_named, _read_ranks(pull)) if x is not None]
    low = presence.when(reader, pull.begun_at)[0]
    high = presence.when(reader, until.at if until is not None else pull.last_at)[1]
    failed = presence.near(reader, pull.ended.at) if pull.ended is not None else high
    for process in (reader, *owners):
        for record in process.of(told.DataPlaneRestarted, told.DataPlaneBroken):
            # The death is logged once another process runs. A death after the failure did not cause it.
            at = presence.when(process, record.at - record.number("seconds", 0.0))
            if at[1] >= low and sum(at) / 2 <= failed + AT_ONCE_S:
                return R.PLANE_DIED, {"by": process.rank, "holder": process.rank, "why": record.text("cause")}
    for owner in owners:
        fate = presence.fate(owner)
        if fate.kind == "died" and fate.after <= high:
            return R.OWNER_DIED, {"by": owner.rank, "holder": owner.rank, "why": fate.why}
        if pull.cause == "not_lent_yet" and stalled_s(owner, low, high, "claim") > 0.0:
            return R.STUCK, {"by": owner.rank, "holder": owner.rank}
    for process, state in (*((x, R.OWNER_AWAY) for x in owners), (reader, R.AWAY)):
        least, most = presence.when(process, 0.0)  # as far as its clock may be apart
        if (away_s := presence.away_s(process, low - most, high - least)) > 0.0:
            holder = {"holder": process.rank} if state is R.OWNER_AWAY else {}
            return state, {"by": process.rank, "away": away_s, "away_s": in_seconds(away_s), **holder}
    return None, {}


# -- blocks of failed pulls --------------------------------------------------------------------------------------------


def why_kept(presence: Presence, pull: Pull) -> Verdict:
    """Say why a pull's blocks might still be written when it had its outcome."""
    ranks = _read_ranks(pull)
    after = ", and has given them up" if pull.retired else "" if pull.returned else " so far"
    names = {
        "reader": pull.process.rank,
        "holder": listed(ranks) or pull.peer,
        "about": (pull.process.rank, *ranks),
        "held": f"for {in_seconds(kept_s(pull))} s after its pull had failed{after}",
        "why": f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}" or pull.state,
    }
    until = pull.returned or pull.retired or pull.ended or pull.held[-1]
    state, more = _befell(presence, pull, until)
    if state in (None, R.AWAY):
        high = presence.when(pull.process, until.at)[1]
        fates = [presence.fate(x) for x in map(presence.service.process_named, ranks) if x is not None]
        may_be_dead = not fates or any(x.kind != "stopped" and x.after < high for x in fates)
        is_lost = pull.cause in ("peer_lost", "restarted") and may_be_dead
        state = R.READING if not is_lost else R.OWNER_DIED if pull.cause == "restarted" else R.NO_LOG
        more = {}
    return Verdict(W.READ, state, names | more)


def kept_s(pull: Pull) -> float:
    """Return for how long a pull's blocks were not free after its outcome."""
    if (record := pull.returned or pull.retired) is not None:
        return record.number("seconds_after_failure", 0.0)
    return max(pull.process.last_at - (pull.ended.at if pull.ended is not None else pull.last_at), 0.0)


# -- leases of which only the decode side speaks -----------------------------------------------------------------------


def unheard_releases(presence: Presence, request: Request) -> list[tuple[Verdict, str, Pull]]:
    """Find releases that were refused, or never answered, by ranks with logs that do not show the end of the lease."""
    found: list[tuple[Verdict, str, Pull]] = []
    for pull in request.all_pulls:
        unheard = ((_unheard(presence, request, pull, rank), rank) for rank in unanswered_ranks(pull))
        found += [(verdict, rank, pull) for verdict, rank in unheard if verdict is not None]
        for record in pull.refused:
            state = refused_as(record.text("cause"))
            why = f"release {record.text('cause')}{f', {detail}' if (detail := record.text('detail')) else ''}"
            names = {"reader": pull.process.rank, "why": why, "message": "release"} | other_id(pull.prefill_request_id)
            for rank in record.texts("ranks"):
                is_known = _is_told(presence, request, pull, rank, (pull.ended or record).at) or _is_gone(
                    pull.process, rank
                )
                if state is not None and not is_known:
                    found.append((Verdict(W.UNKNOWN, state, names), rank, pull))
    return sorted(found, key=lambda x: x[0].order)


def _is_told(presence: Presence, request: Request, pull: Pull, rank: str, at: float) -> bool:
    """Return True if the log of a prefill rank shows the end of what a pull had of it."""
    owner = presence.service.process_named(rank)
    ended = any(x.process is owner and x.ended is not None for x in request.leases.values())
    return owner is not None and (ended or presence.tells(owner, pull.process, at))


def _unheard(presence: Presence, request: Request, pull: Pull, rank: str) -> Verdict | None:
    """Judge a release without an answer: the prefill rank's log shows the lease's end, if there is a log."""
    names = {"reader": pull.process.rank, "holder": rank, "why": how_unanswered(pull)}
    owner = presence.service.process_named(rank)
    records = [x for x in pull.unanswered if rank in x.texts("ranks")]
    if owner is not None:
        fate, is_over = presence.fate(owner), any(x.process is owner and x.ended for x in request.leases.values())
        if fate.kind == "died" and pull.was_granted_by(rank) and not is_over:
            return Verdict(W.UNKNOWN, R.OWNER_DIED, names | {"why": fate.why, "gone": fate.gone})
        if _is_told(presence, request, pull, rank, (pull.ended or records[0]).at):
            return None
    # A rank that was closed in order has revoked it, and one that was restarted holds it no more.
    # Nor did a reader that closed wait for long: the answer may have been on its way.
    causes = {x.text("cause") for x in records} or {pull.cause}
    if causes & {"restarted", "peer_lost", "engine_closed"} or _is_gone(pull.process, rank):
        return None
    state = R.UNANSWERED
    if pull.cause == "peer_unreachable":
        keys = key_trouble_at(pull, rank)[1]
        state, names["why"] = R.KEYS if keys else R.UNMET, keys or pull.detail
    elif pull.cause == "wrong_target":
        state, names["why"] = R.WRONG_TARGET, pull.detail
    elif pull.cause in REFUSED_AT_HELLO:
        state, names["why"], names["reason"] = R.REFUSED_HERE, pull.detail, pull.cause
    return Verdict(W.UNKNOWN, state, names, missing=(rank,))


def _is_gone(reader: Process, rank: str) -> bool:
    """A prefill rank has ended, by its reader's log: with it, or by its word, went what it had lent."""
    said = said_of(reader, rank)
    return any(x.text("state") == "gone" and x.text("cause") in ("peer_lost", "restarted") for x in said)
