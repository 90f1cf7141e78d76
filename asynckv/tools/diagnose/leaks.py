"""Find late blocks and their causes: one finding per request, with its evidence. (`causes.py` defines late.)

Every reader that is owed has a verdict; of a request with several the most certain one counts, and among these the
first. Conclusions from a *missing* line rest on lines that logs always have: expiries, failures, releases without an
answer and orderly ends are never left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from asynckv.tools.diagnose.causes import OwnerView, ReaderView
from asynckv.tools.diagnose.join import LoggedLease, LoggedPull, LoggedRequest
from asynckv.tools.diagnose.leaks_between import has_read, is_forgotten, spoken_of
from asynckv.tools.diagnose.leaks_pulls import kept_s, unheard_releases, why_kept
from asynckv.tools.diagnose.leaks_values import Leak, in_seconds, listed
from asynckv.tools.diagnose.leaks_why import Verdict, verdicts
from asynckv.tools.diagnose.presence import LATE_S, UNDER_WAY_S, Presence


def find_leaks(presence: Presence, of: Iterable[LoggedRequest] | None = None) -> list[Leak]:
    """Find late requests of a service, or only among some of its requests, the oldest first."""
    requests = presence.service.requests if of is None else of
    leaks = [leak for request in requests for leak in _of_request(presence, request)]
    return sorted(leaks, key=lambda x: (math.isnan(x.since), x.since if not math.isnan(x.since) else 0.0))


def _of_request(presence: Presence, request: LoggedRequest) -> Iterator[Leak]:
    states = {lease: _how_late(presence, request, lease) for lease in request.leases.values()}
    late = {lease: state for lease, state in states.items() if state}
    if late:
        yield _of_leases(presence, request, late)
    elif forgotten := [x for x in request.all_pulls if is_forgotten(presence, request, x)]:
        yield _of_announcement(presence, request, forgotten)
    elif unheard := unheard_releases(presence, request):
        yield _of_releases(presence, request, unheard)
    if kept := [x for x in request.all_pulls if _is_kept(x)]:
        yield _of_blocks(presence, request, kept)


# -- what is late ------------------------------------------------------------------------------------------------------


def _how_late(presence: Presence, request: LoggedRequest, lease: LoggedLease) -> str:
    """Return the way in which a lease's blocks came back late; empty if they did not."""
    if lease.ended is not None:
        return lease.state if lease.state in ("expired", "closed") else ""
    fate = presence.fate(lease.process)
    if fate.kind == "stopped" or not lease.is_open:
        return ""  # closing ends all leases, and says so of those that do not end well
    if fate.kind == "died":
        return "died" if fate.is_proved or not _is_well(presence, request, lease) else ""
    return "held" if lease.held and not _is_well(presence, request, lease) else ""


def _is_well(presence: Presence, request: LoggedRequest, lease: LoggedLease) -> bool:
    """Return True if all awaited readers have read it by now, by their own logs, or have announced it and may still
    wait."""
    warned = next((x for x in lease.held[-1:] if x.level == "warning"), None)
    # A rank that is still owed was not told of what was read before.
    since = -math.inf if warned is None else presence.when(lease.process, warned.at)[0] - UNDER_WAY_S

    def is_read(pull: LoggedPull) -> bool:
        ended = pull.ended if has_read(pull, lease) else None
        return ended is not None and presence.when(pull.process, ended.at)[1] >= since

    def may_wait(pull: LoggedPull) -> bool:
        is_waiting = warned is None and pull.is_announced and not is_forgotten(presence, request, pull)
        return is_waiting and not presence.fate(pull.process).is_over

    names = lease.owed or tuple(lease.claims) or ("*",)
    return all(any(is_read(x) or may_wait(x) for x in spoken_of(request, lease, name)) for name in names)


def _is_kept(pull: LoggedPull) -> bool:
    """Return True if its blocks were not free at its outcome, unless that is well and they were free a moment later."""
    if pull.ended is None and pull.state == "quarantined":
        return pull.is_open
    if pull.is_well and pull.returned is not None and kept_s(pull) <= LATE_S:
        return False
    return pull.held_transfers > 0 or pull.returned is not None or pull.retired is not None


# -- findings ----------------------------------------------------------------------------------------------------------


def _of_leases(presence: Presence, request: LoggedRequest, late: Mapping[LoggedLease, str]) -> Leak:
    found = [verdict for lease, state in late.items() for verdict in verdicts(presence, request, lease, state)]
    oldest = min(late, key=lambda x: x.lent_at if not math.isnan(x.lent_at) else math.inf)
    return _make_leak(
        presence,
        request,
        sorted(found, key=lambda x: x.order),
        side="prefill",
        state=late[oldest],
        holders=tuple(x.process.rank for x in late),
        blocks=_sum(x.blocks for x in late),
        seconds=max(x.seconds for x in late),
        since=oldest.lent_at,
        owed=tuple(dict.fromkeys(name for x in late for name in x.owed)),
    )


def _of_announcement(presence: Presence, request: LoggedRequest, pulls: Sequence[LoggedPull]) -> Leak:
    """Find a lease that was renewed for an announcement until its time was up, whichever reader released it then."""
    leases = request.leases.values()
    seconds = max(x.ended.number("seconds") if x.ended is not None else x.process.last_at - x.begun_at for x in pulls)
    names = {"reader": listed(x.process.rank for x in pulls), "seconds": in_seconds(seconds)}
    return _make_leak(
        presence,
        request,
        [Verdict(OwnerView.UNKNOWN, ReaderView.ANNOUNCED, names)],
        side="prefill",
        state="announced",
        holders=tuple(x.process.rank for x in leases) or pulls[0].peer_ranks,
        blocks=_sum(x.blocks for x in leases) if leases else -1,
        seconds=max([x.seconds for x in leases], default=seconds),
        since=min([x.lent_at for x in leases], default=pulls[0].begun_at),
        owed=tuple(x.process.rank for x in pulls if x.ended is None),
        missing=() if request.leases else tuple(pulls[0].peer_ranks),
    )


def _of_releases(presence: Presence, request: LoggedRequest, found: Sequence[tuple[Verdict, str, LoggedPull]]) -> Leak:
    """Find releases that were refused, or never answered, by ranks with logs that do not show the end of the lease."""
    verdict, _, pull = found[0]
    holders = tuple(dict.fromkeys(rank for _, rank, _ in found))
    known = [x for x in map(presence.service.process_named, holders) if x is not None]
    leases = [x for x in request.leases.values() if x.process in known]
    is_dead = verdict.reader is ReaderView.OWNER_DIED
    ends = (
        f"the log of {x.rank} ends at {presence.moment(x.last_at)}, before its lease could have expired" for x in known
    )
    return _make_leak(
        presence,
        request,
        [verdict],
        side="prefill",
        state="died" if is_dead else "unknown",
        holders=holders,
        blocks=_sum(x.blocks for x in leases) if len(leases) == len(holders) else -1,
        since=min([x.lent_at for x in leases], default=pull.begun_at),
        also=() if is_dead else tuple(ends),
        owed=tuple(dict.fromkeys(x.process.rank for _, _, x in found)),
        missing=() if is_dead else holders,
    )


def _of_blocks(presence: Presence, request: LoggedRequest, pulls: Sequence[LoggedPull]) -> Leak:
    """Find blocks of pulls that might still be written at the outcome."""
    kept = {"retired" if x.retired else "returned" if x.returned else "quarantined" for x in pulls}
    named = (name for x in pulls for name in x.peer_ranks)
    return _make_leak(
        presence,
        request,
        sorted((why_kept(presence, request, x) for x in pulls), key=lambda x: x.order),
        side="decode",
        state=next(x for x in ("retired", "quarantined", "returned") if x in kept),
        holders=tuple(dict.fromkeys(x.process.rank for x in pulls)),
        blocks=_sum(x.held_blocks for x in pulls),
        seconds=max(map(kept_s, pulls)),
        since=min((x.ended.at if x.ended is not None else x.begun_at) for x in pulls),
        missing=tuple(dict.fromkeys(x for x in named if presence.service.process_named(x) is None)),
    )


def _sum(blocks: Iterable[int]) -> int:
    known = list(blocks)
    return sum(known) if all(x >= 0 for x in known) else -1


def _make_leak(presence: Presence, request: LoggedRequest, found: Sequence[Verdict], **fields: Any) -> Leak:
    """Make a finding of a request's verdicts, of which the first counts."""
    verdict = found[0]
    also = tuple(dict.fromkeys(x.sentence for x in found[1:] if x.cause is not verdict.cause))
    until = fields["since"] + fields.get("seconds", math.nan)
    reader = str(verdict.names.get("reader", ""))
    return Leak(
        cause=verdict.cause,
        sentence=verdict.sentence + _clocks_that_were_set(presence, request, verdict),
        cell=(verdict.owner, verdict.reader),
        engine_id=request.engine_id,
        request_id=request.request_id,
        sequence=request.sequence,
        decode_request_ids=tuple(request.decode_ids),
        missing=tuple(dict.fromkeys((*fields.pop("missing", ()), *verdict.missing))),
        about=verdict.about,
        # Of a reader that may have been meant, nothing is known.
        reader=reader if "/tp" in reader and verdict.reader is not ReaderView.ABSENT else "",
        until=until if not math.isnan(until) else max((x.at for x in request.records()), default=math.nan),
        reason=str(verdict.names.get("reason", "")),
        remedy=verdict.remedy,
        other_request_id=verdict.names.get("other_id", "") if verdict.reader is ReaderView.RENAMED else "",
        also=fields.pop("also", also),
        **fields,
    )


def _clocks_that_were_set(presence: Presence, request: LoggedRequest, verdict: Verdict) -> str:
    """Name the processes of a request with clocks that were put back."""
    named = [presence.service.process_named(str(verdict.names.get(x, ""))) for x in ("reader", "holder")]
    named += [x.process for x in request.leases.values()]
    named += [x.process for x in request.all_pulls]
    named += presence.decoders(request.engine_id) if not request.all_pulls else []
    known = {x.rank: x for x in named if x is not None}
    return "".join(
        f"; the clock of {rank} was set: it went back by {in_seconds(x.seconds)} s at {presence.moment(x.at)}, and "
        f"times after that are less sure"
        for rank, process in known.items()
        for x in process.put_back
    )
