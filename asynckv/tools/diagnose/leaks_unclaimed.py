"""Why a reader never claimed what was lent: it never heard of it, never got through, came too late, or died before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asynckv.core import told
from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Lease, Process, Pull, Request, base_name, start_of
from asynckv.tools.diagnose.leaks_absent import absent, came_back_too_late, is_long_away, quiet, unresponsive, whole
from asynckv.tools.diagnose.leaks_between import (
    STALE,
    excuse,
    failed_to_meet,
    how_unanswered,
    is_only_released,
    is_unanswered,
    refused_keys,
    shook_hands,
    stale_at,
    turned_away,
    would_be_given_up,
)
from asynckv.tools.diagnose.leaks_late import is_forgotten, is_overdue
from asynckv.tools.diagnose.leaks_processes import LATE_S, SILENCE_S, UNDER_WAY_S, Processes
from asynckv.tools.diagnose.leaks_values import Story, engine_of, in_seconds, listed, other_id

__all__ = ["unclaimed"]

C = CAUSE

MOST_NAMED = 4


@dataclass(slots=True)
class _Readers:
    """Who may have been meant by a request that nobody asked one prefill rank for.

    Attributes:
        spoke: Other ranks of the engine that was meant: they have spoken of it, to this rank or another.
        alive: Of those that may have been meant, who lived then; who had died before, if there is nobody else.
        gone: Who had died before it was lent.
        died: Who died while it was lent.
        silent: Whose logs end before its lease did.
        unknown: Who shook hands, and of whom no log was given.
        lost: Who died about then, and may have had its params for some time, or was to have them.
    """

    spoke: list[Process]
    alive: list[Process]
    gone: list[Process]
    died: list[Process]
    silent: list[Process]
    unknown: tuple[str, ...]
    lost: list[Process]


def unclaimed(processes: Processes, request: Request, lease: Lease, name: str, pulls: Sequence[Pull]) -> Story:
    """Say why a reader never spoke up."""
    if pulls:
        return _never_got_through(processes, lease, pulls[-1])
    readers = _find_readers(processes, request, lease, name)
    is_nobody = name == "*" and not readers.spoke
    is_over = lease.state != "lent"
    died = readers.died if is_nobody else [x for x in readers.died if _in_time(processes, lease, x)]
    lost = died or readers.lost if is_nobody else died
    died = [x for x in died if _has_come_for(processes, lease, x)]
    if is_over and lost and not died and not (is_nobody and readers.unknown):
        # Its params never arrived, or arrived at somebody who died: nothing tells which.
        whose = "the decode side" if is_nobody else listed(x.base for x in lost)
        why = (
            f"; no log of {whose} speaks of it: its params never arrived there, or whoever had them died, as "
            f"{listed(x.rank for x in lost)} did about then ({processes.fate(lost[0]).why})"
        )
        others = absent(processes, lease, [x for x in readers.alive if x not in lost])
        why += "".join(f"; or {rank} had them, but {how}" for rank, how in list(others.items())[:MOST_NAMED])
        return Story(C.NEVER_CLAIMED, {"why": why})
    if died and is_over:
        fate = processes.fate(died[0])
        who = listed(x.rank for x in died)
        names = {"reader": who, "why": fate.why, "gone": fate.gone, "holder": lease.process.rank}
        return Story(C.DIED_BEFORE_CLAIM, names, lease.seconds)
    if not is_nobody and not _may_be_cut(processes, request, lease, name, readers):
        return _silent_rank(processes, lease, name, readers)
    return _unheard_of(processes, lease, readers)


def _find_readers(processes: Processes, request: Request, lease: Lease, name: str) -> _Readers:
    since, until = processes.span(lease)
    readers = processes.decoders(lease.process.engine_id)
    bound = {engine_of(x) for x in (*lease.owed, *lease.claims, *lease.released)}
    spoke = [x for x in dict.fromkeys(x.process for x in request.all_pulls) if engine_of(x.rank) not in bound]
    if name != "*":
        readers = [x for x in readers if x.base == base_name(name)]
    elif spoke:
        engines = {x.engine_id for x in spoke}
        readers = [x for x in readers if x.engine_id in engines and x not in spoke]
    gone = [x for x in readers if processes.gone_by(x) < since]
    alive = [x for x in readers if x not in gone] or gone
    died, silent = [], []
    for reader in alive:
        fate = processes.fate(reader)
        if processes.gone_by(reader) < since or processes.when(reader.incarnation, reader.first_at)[0] > until:
            continue
        if fate.kind == "died" and fate.after <= until:
            died.append(reader)
        elif fate.kind == "silent" and fate.after < until:
            silent.append(reader)
    if not spoke and name == "*":
        # Other ranks of the same engine live: they would have spoken of a request that it had.
        ranks = {x.base for x in died} | {x.base for x in silent}
        whole = {x.engine_id for x in died} - {x.engine_id for x in alive if x.base not in ranks}
        died = [x for x in died if x.engine_id in whole]
    met = _met(lease)
    died = [x for x in died if x.start in met] or died
    unknown = processes.unknown_readers(lease.process, lease.lent_at + lease.seconds)
    lost = processes.died_about([x for x in readers if engine_of(x.rank) not in bound], since, until)
    return _Readers(spoke, alive, gone, died, silent, unknown, lost)


def _met(lease: Lease) -> set[str]:
    """Starts of readers that shook hands with the rank that lends."""
    return {start_of(x.text("reader")) for x in lease.process.of(told.ReaderMet)}


def _has_come_for(processes: Processes, lease: Lease, reader: Process) -> bool:
    """A log shows that a reader which died had heard of the request.

    That it died meanwhile does not: others die while params are lost. But whoever has met the rank that lends (or has
    begun to), and never came to speak of anything, did so for the only request there that nobody claimed.
    """
    if (reader.start, lease.process.engine_id) in processes.asked or processes.num_unclaimed(
        lease.process, reader
    ) != 1:
        return False
    greeted = (start_of(x.text("peer")) for x in reader.of(told.PeerChanged))
    return reader.start in _met(lease) or lease.process.start in greeted


def _in_time(processes: Processes, lease: Lease, reader: Process) -> bool:
    """It may have died before it would have claimed, which takes no longer than it took others."""
    lent_at = processes.when(lease.process.incarnation, lease.lent_at)[1]
    return processes.fate(reader).after <= lent_at + processes.claims_take_s


def _may_be_cut(processes: Processes, request: Request, lease: Lease, name: str, readers: _Readers) -> bool:
    """Its engine may have come too late as a whole: the log of the rank that is owed ends before it could say so."""
    if name != "*" or lease.claims or lease.released or not readers.silent:
        return False
    over = processes.when(lease.process.incarnation, lease.lent_at + lease.seconds)[0]
    asked = (x for x in request.all_pulls if x.process in readers.spoke)
    return all(processes.when(x.process.incarnation, x.begun_at)[1] > over for x in asked)


def _silent_rank(processes: Processes, lease: Lease, name: str, readers: _Readers) -> Story:
    """Say that others of its engine have spoken of a request, and one rank has not."""
    away = [(x, seconds) for x in readers.alive if (seconds := is_long_away(processes, lease, x)[0])]
    if away:
        reader, seconds = away[0]
        return Story(C.DECODE_LOOP_AWAY, {"reader": reader.rank, "away_s": in_seconds(seconds)})
    if hanging := absent(processes, lease, readers.alive):
        return unresponsive(hanging, "was given it, as other ranks of its engine were")
    others = [x for x in (*lease.claims, *lease.released, *(x.rank for x in readers.spoke)) if x != name]
    reserve = "; it may have died" if readers.silent or not readers.alive else ""
    reserve = "; it died later" if readers.died else reserve
    why = f"{listed(others)}{reserve}" if others else f"nobody did yet{reserve}"
    named = name if name != "*" else listed(x.rank for x in readers.alive) or "a rank"
    return Story(C.RANK_NEVER_SPOKE, {"reader": named, "why": why}, missing=() if readers.alive else (named,))


def _unheard_of(processes: Processes, lease: Lease, readers: _Readers) -> Story:
    """Say that no log speaks of a request, and why that may be."""
    until = processes.span(lease)[1]
    hanging = dict.fromkeys(processes.unanswered_decoders(), "it does not answer") if not readers.spoke else {}
    if found := whole(absent(processes, lease, readers.alive) | hanging, readers.alive):
        return unresponsive(found, missing=readers.unknown)
    # Where logs end before readers do, and soon after the lease, it may be asked for yet.
    open_ = [x for x in readers.alive if processes.fate(x).kind == "silent"]
    waits_s = SILENCE_S
    if len(open_) == len(readers.alive):  # of nobody's log is known that it was not cut off long before
        waits_s = max((x.durations.get("timeout_s", SILENCE_S) for x in open_), default=SILENCE_S)
    is_cut = bool(open_) and processes.last < until + waits_s
    if readers.alive and not readers.unknown and lease.state != "lent" and not is_cut:
        if found := whole(quiet(processes, readers.silent), readers.alive):
            return unresponsive(found)
        gone_too = listed(x.rank for x in readers.silent)
        reserve = f"; or they were with {gone_too}, whose log ends before the lease did" if gone_too else ""
        if readers.alive == readers.gone:
            reserve = f"; {listed(x.rank for x in readers.gone)} had died before it was lent"
        return Story(C.NEVER_HEARD_OF, {"why": listed(x.rank for x in readers.alive), "died": reserve})
    silent = tuple(x.rank for x in readers.silent) if readers.alive else ("the decode side",)
    return Story(C.NEVER_CLAIMED, {"why": _circumstances(lease, readers)}, missing=readers.unknown or silent)


def _circumstances(lease: Lease, found: _Readers) -> str:
    """What else one side's logs say of a request that nobody claimed."""
    readers, silent, unknown, out = found.alive, found.silent, found.unknown, list[str]()
    if silent:
        out.append(f"no log of the decode side speaks of it, and {listed(x.rank for x in silent)} may have died")
    elif readers and all(x.answers for x in readers):
        out.append(
            f"{listed(x.rank for x in readers)} "
            + ("answers and knows nothing of it" if len(readers) == 1 else "answer and know nothing of it")
        )
    elif readers:
        out.append("no log of the decode side that is given speaks of it")
    if unknown:
        out.append(f"{listed(unknown)} shook hands")
    refused = turned_away(lease.process, lease.lent_at, lease.lent_at + lease.seconds)
    if refused:
        out.append(f"meanwhile {refused}")
    return "; " + "; ".join(out) if out else ""


def _never_got_through(processes: Processes, lease: Lease, pull: Pull) -> Story:
    """Say why a reader that knew of the request never claimed it."""
    reader, holder, fate = pull.process.rank, lease.process.rank, processes.fate(pull.process)
    cause, detail = pull.cause, pull.detail
    waited_s = pull.ended.number("seconds") if pull.ended is not None else math.nan
    why = f"{cause}, {detail}" if detail else cause or f"it was {pull.state or 'asked for'} when last spoken of"
    names = {
        "reader": reader,
        "holder": holder,
        "why": why,
        "lease_s": in_seconds(lease.lease_s),
        "waited_s": in_seconds(waited_s),
        "message": "claim",
        "seconds": in_seconds(waited_s),
    } | other_id(pull.prefill_request_id)
    is_renamed = pull.prefill_request_id and lease.request_id and pull.prefill_request_id != lease.request_id
    if is_renamed and cause != "peer_unreachable":
        return Story(C.OTHER_REQUEST_ID, names)
    if is_forgotten(processes, pull) and is_overdue(pull) and not failed_to_meet(processes, pull.process, lease):
        return Story(C.ANNOUNCED_AND_FORGOTTEN, names)
    if pull.ended is None and fate.kind == "died":
        return Story(C.DIED_BEFORE_CLAIM, names | {"why": fate.why, "gone": fate.gone})
    if processes.when(pull.process.incarnation, pull.begun_at)[0] > processes.span(lease)[1]:
        return came_back_too_late(processes, lease, pull) or Story(C.CAME_TOO_LATE, names)
    if _was_forgotten(processes, lease, pull):
        return Story(C.RELEASE_TOO_EARLY, names)
    if cause == "wrong_target":
        return Story(C.WRONG_TARGET, names)
    if cause in STALE or (cause == "engine_closed" and _names_another_start(lease, pull)):
        return Story(C.STALE_PARAMS, names)
    if cause in ("expired", "unknown_key", "lease_lost") and (away := excuse(processes, lease, pull)) is not None:
        return away
    if cause in ("expired", "unknown_key", "lease_lost"):
        # Asked for at once, and over already; or its own wait was what took so long.
        if waited_s > 0.5 * lease.lease_s:
            return Story(C.EXPIRED_WHILE_QUEUED, names)
        return came_back_too_late(processes, lease, pull) or Story(C.CAME_TOO_LATE, names)
    if keys := refused_keys(processes, pull, lease):
        return Story(C.KEYS_REFUSED, names | {"why": keys})
    if is_only_released(pull, lease):
        # Nothing is said to a rank that nothing is read of, before the pull is done: nobody has to meet.
        if (away := excuse(processes, lease, pull)) is not None:
            return away
        if is_unanswered(pull, lease):
            return Story(C.RELEASE_LOST, names | {"why": how_unanswered(pull)})
        if would_be_given_up(processes, pull):
            return came_back_too_late(processes, lease, pull) or Story(C.CAME_TOO_LATE, names)
        over = processes.when(lease.process.incarnation, lease.lent_at + lease.seconds)[0]
        if (
            fate.kind == "silent"
            and pull.ended is not None
            and processes.when(pull.process.incarnation, pull.ended.at)[1] > over
        ):
            # Too late, or lost: its log ends before that could be told.
            return Story(C.NEVER_CLAIMED, {"why": f"; {reader} was done with it then, or later ({why})"})
        return Story(C.EXPIRED_WHILE_QUEUED, names)
    if (stale := stale_at(lease, pull)) and pull.failed_in == "handshake":
        return Story(C.STALE_PARAMS, names | {"why": stale})
    if (pull.ended is None or pull.like is not None) and any(
        base_name(x) == lease.process.base and state == "only_released"
        for _, entry in pull.held
        for x, state in (entry["ranks"].items() if isinstance(entry.get("ranks"), dict) else ())
    ):
        return Story(C.EXPIRED_WHILE_QUEUED, names)  # it says nothing to this rank before it is done
    if cause in ("cancelled", "engine_closed") and any(x.text("cause") == "engine_closed" for x in pull.unanswered):
        return Story(C.READER_CLOSED, names | {"why": how_unanswered(pull)})
    if cause == "peer_unreachable" or not shook_hands(processes, pull.process, lease):
        if pull.ended is not None and processes.away_s(pull.process, pull.begun_at, pull.ended.at) > 0.5 * waited_s:
            if (away := excuse(processes, lease, pull)) is not None:
                return away  # nobody can answer who is not heard
        others = turned_away(lease.process, -math.inf, lease.lent_at + lease.seconds)
        return Story(C.NEVER_SHOOK_HANDS, names | ({"why": f"{why}; {others}"} if others else {}))
    if away := excuse(processes, lease, pull):
        return away
    if waited_s < UNDER_WAY_S and not is_unanswered(pull, lease):
        # It failed at once, and its release came when the lease was over.
        return came_back_too_late(processes, lease, pull) or Story(C.CAME_TOO_LATE, names)
    if pull.ended is None or pull.failed_in in ("queue", "handshake", "plan", "announced"):
        return Story(C.EXPIRED_WHILE_QUEUED, names)
    if is_unanswered(pull, lease):
        return Story(C.RELEASE_LOST, names | {"why": how_unanswered(pull)})
    if pull.process.stopped is not None and cause in ("cancelled", "engine_closed"):
        return Story(C.READER_CLOSED, names)
    # Whatever it said at last was answered, so it came as the lease was over.
    return Story(C.EXPIRED_WHILE_QUEUED, names)


def _names_another_start(lease: Lease, pull: Pull) -> bool:
    """What a reader was given names another start of the rank than the one that lent the request."""
    starts = {start_of(x) for x in pull.peer_ranks if base_name(x) == lease.process.base} - {""}
    stopped, ended = pull.process.stopped, pull.ended
    if stopped is not None and ended is not None:
        if stopped.at <= ended.at + pull.process.durations.get("release_timeout_s", 30.0):
            return False  # it was its reader's own engine that was closed
    return bool(starts) and lease.process.start not in starts


def _was_forgotten(processes: Processes, lease: Lease, pull: Pull) -> bool:
    """A pull was done, and said so, before the request was lent here: that this was taken is all that it knows."""
    if pull.ended is None or pull.retried or is_unanswered(pull, lease):
        return False
    if not would_be_given_up(processes, pull):
        return False
    ended_at = processes.when(pull.process.incarnation, pull.ended.at)
    parked_s = lease.process.durations.get("parked_s", LATE_S)
    return ended_at[1] + parked_s < processes.when(lease.process.incarnation, lease.lent_at)[0]
