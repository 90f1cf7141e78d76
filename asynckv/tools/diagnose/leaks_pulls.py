"""Evidence of pulls: reasons of failures, blocks that might still be written, and leases that only they mention.

If a prefill rank's log is missing, or ends before a lease could have expired, it does not show the end of the lease. A
refused or unanswered release is then known from the decode side alone.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asynckv import told
from asynckv.core.types import How
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.causes import CATALOGUE, FAILED_AS, OwnerView, ReaderView
from asynckv.tools.diagnose.join import LoggedPull, LoggedRequest, Process, base_name, engine_of, start_of
from asynckv.tools.diagnose.leaks_between import how_unanswered, key_trouble_at, refused_as, said_of, unanswered_ranks
from asynckv.tools.diagnose.leaks_values import in_seconds, listed, other_id
from asynckv.tools.diagnose.leaks_why import REFUSED_AT_HELLO, Verdict
from asynckv.tools.diagnose.presence import AT_ONCE_S, LATE_S, SILENCE_S, Presence
from asynckv.tools.diagnose.records import Record
from asynckv.tools.diagnose.stalls import stalled_s

W, R = OwnerView, ReaderView
Told = tuple[ReaderView, dict[str, Any]]
SURE = {R.REFUSED_HERE, R.REFUSED, R.TWICE, R.WRONG_TARGET, R.RENAMED, R.KEYS, R.KEYS_HERE, R.DIFFERS, R.OTHER_TICKET}
"""Views that a failure's own reason proves, whatever happened besides."""
NOTICED_S = 2.0  # the owner of a data plane that died notices later than its readers, by so much at most

# -- why pulls fail ----------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """Pulls that failed for one reason and by one rank: `by`, which was away, died, or was to be read from, or the
    reader itself."""

    verdict: Verdict
    pulls: Sequence[LoggedPull]

    @property
    def times(self) -> list[float]:
        """When they failed, by their readers' clocks."""
        return [x.ended.at for x in self.pulls if x.ended is not None]

    @property
    def sentence(self) -> str:
        ends, names = Counter(x.cause for x in self.pulls), self.verdict.names
        told_as = ", ".join(f"{number:,} {cause}" for cause, number in ends.most_common(4))
        title = CATALOGUE[self.verdict.cause].title
        why = f" for {names['away_s']} s" if "away_s" in names else f" ({names['why']})" if names["why"] else ""
        readers = listed(x.process.rank for x in self.pulls)
        what = "follows" if self.pulls[0].is_follow else "pulls"
        return f"{what} of {readers} from {names['holder']} failed ({told_as}): {title}{why}"


def failures(presence: Presence, counts: Callable[[LoggedPull], bool] = lambda pull: True) -> list[Failure]:
    """Group failed pulls by reason and by rank, whichever start of it; the most frequent first.

    A pull counts whether or not its lease was late, also if its own engine refused it.
    """
    pulls = ((x, pull) for x in presence.service.requests for pull in x.all_pulls)
    failed = ((x, pull) for x, pull in pulls if pull.cause and not pull.is_well and counts(pull))
    verdicts = ((_Failed(presence, x, pull).verdict(), pull) for x, pull in failed)
    groups = grouped(((x.reader, base_name(x.names["by"]), x.names.get("reason", "")), (x, y)) for x, y in verdicts)
    longest = (max(same, key=lambda x: float(x[0].names.get("away", 0.0)))[0] for same in groups.values())
    out = [Failure(x, [pull for _, pull in same]) for x, same in zip(longest, groups.values(), strict=True)]
    return sorted(out, key=lambda x: (-len(x.pulls), min(x.times)))


class _Failed:
    """One failed pull, and the events during it; `until` is the last that counts."""

    def __init__(
        self, presence: Presence, request: LoggedRequest, pull: LoggedPull, until: Record | None = None
    ) -> None:
        self.presence, self.request, self.pull = presence, request, pull
        held_by = pull.retired.texts("held_by") if pull.retired is not None else ()
        read = held_by or (pull.said.texts("read_ranks") if pull.said is not None else ())
        self.ranks = read or pull.failed_with or pull.peer_ranks  # that it read from, or was to
        self.owners = [x for x in map(presence.service.process_named, self.ranks) if x is not None]
        last, reader = until or pull.ended, pull.process
        self.low = presence.when(reader, pull.begun_at)[0]
        self.high = presence.when(reader, last.at if last is not None else pull.last_at)[1]
        self.seconds = pull.ended.number("seconds", 0.0) if pull.ended is not None else 0.0
        holder, waited_s = listed(self.ranks) or pull.peer, in_seconds(self.seconds)
        self.names: dict[str, Any] = {"reader": reader.rank, "holder": holder, "by": holder, "why": pull.detail}
        self.names |= {"waited_s": waited_s, "seconds": waited_s, "address": presence.address_of(*self.ranks)}
        self.names["limit"] = "its caller cancelled it" if pull.cause == "cancelled" else "its caller's `timeout_s`"

    def verdict(self) -> Verdict:
        """Say why it failed: by a reason that says it all, else from events during it."""
        state, more = self.by_reason()
        if state not in SURE:
            state, more = self.befell() or (state, more)
        return Verdict(W.FAILED, state, self.names | more)

    # -- events during it --------------------------------------------------------------------------------------------

    def befell(self) -> Told | None:
        if self.pull.is_follow:  # nothing was read, and it waits through pauses
            return self._owner_died()
        return self._plane_died() or self._owner_died() or self._was_away()

    def _plane_died(self) -> Told | None:
        """Find a data plane that died while it ran, or that did not serve as it was lost. The owner logs the death once
        another one runs, and notices it later than readers do. A death after the failure did not cause it."""
        presence, pull = self.presence, self.pull
        failed = presence.near(pull.process, pull.ended.at) if pull.ended is not None else self.high
        for process in (pull.process, *self.owners):
            is_lost = pull.cause == "peer_lost" and process is not pull.process
            for record in process.of(told.DataPlaneRestarted, told.DataPlaneBroken):
                died = presence.when(process, record.at - record.number("seconds", 0.0))
                last = presence.when(process, record.at)[1] if is_lost else died[1]
                if last >= self.low and sum(died) / 2 <= failed + (NOTICED_S if is_lost else AT_ONCE_S):
                    return R.PLANE_DIED, {"by": process.rank, "holder": process.rank, "why": record.text("cause")}
        return None

    def was_given_up(self) -> bool:
        """Return True if its caller gave up shortly before its transfers ended by themselves: they were slow, or the
        caller in a hurry, and the network is not to blame."""
        pull, ended, returned = self.pull, self.pull.ended, self.pull.returned
        if pull.cause not in ("timeout", "cancelled") or ended is None or returned is None:
            return False
        planes = pull.process.since(told.DataPlaneRestarted, ended.at)  # or another data plane ended them
        is_own = not any(x.at <= returned.at + AT_ONCE_S for x in planes)
        return is_own and kept_s(pull) <= max(LATE_S, self.seconds)

    def _owner_died(self) -> Told | None:
        for owner in self.owners:
            fate = self.presence.fate(owner)
            if fate.kind == "died" and fate.after <= self.high:
                return R.OWNER_DIED, {"by": owner.rank, "holder": owner.rank, "why": fate.why}
        return None

    def _was_away(self) -> Told | None:
        presence, reader = self.presence, self.pull.process
        for process, state in (*((x, R.OWNER_AWAY) for x in self.owners), (reader, R.AWAY)):
            least, most = presence.when(process, 0.0)  # as far as its clock may be apart
            if (away_s := presence.away_s(process, self.low - most, self.high - least)) > 0.0:
                holder = {"holder": process.rank} if state is R.OWNER_AWAY else {}
                return state, {"by": process.rank, "away": away_s, "away_s": in_seconds(away_s), **holder}
        return None

    # -- by its own word ---------------------------------------------------------------------------------------------

    def by_reason(self) -> Told:
        pull, cause = self.pull, self.pull.cause
        state = FAILED_AS.get(cause, R.NO_LOG)
        if state is R.TIMED_OUT:
            state = self._phase()
        if cause == "engine_closed":
            state = self._closed()
        match state:
            case R.UNMET:
                return self._unmet()
            case R.RENAMED:
                return state, {"message": "claim", **other_id(pull.prefill_request_id)}
            case R.DIFFERS:
                owner = listed(pull.failed_with) or self.names["holder"]
                return state, {"by": owner, "holder": owner}
            case R.REFUSED | R.TWICE:
                return self._refused()
            case R.UNLENT:
                return self._unlent()
            case R.UNOFFERED:
                return self._unoffered()
            case R.BROKEN if pull.how == How.GOODBYE:  # before it began
                return R.OWNER_CLOSED, {}
            case R.BROKEN | R.LATE | R.TIMED_OUT if (lost := self._lost()) is not None:
                return lost
            case R.REFUSED_HERE | R.CLOSED | R.STUCK:
                return state, {"by": pull.process.rank, "reason": cause if state is R.REFUSED_HERE else ""}
            case _:
                return state, {"reason": cause} if cause == "unknown_key" else {}

    def _closed(self) -> ReaderView:
        """Tell a rank that closed during a pull from the reader's own end, and from params of one that had closed."""
        for owner in self.owners:
            closes_s = owner.durations.get("grant_s", 10.0) + SILENCE_S  # it keeps its grants before it says so
            stopped = self.presence.near(owner, owner.stopped.at) if owner.stopped is not None else math.nan
            if self.low <= stopped <= self.high + closes_s:
                return R.OWNER_CLOSED
        return R.STALE if self.pull.process.stopped is None else R.CLOSED

    def _phase(self) -> ReaderView:
        """Say what kept a pull until its deadline."""
        pull = self.pull
        if pull.failed_in == "handshake":
            states = (x.text("state") for y in pull.failed_with for x in said_of(pull.process, y))
            return R.TIMED_OUT if not pull.failed_with or {"loading", "ready"} & {*states} else R.UNMET
        return {"announced": R.ANNOUNCED, "": R.NO_LOG}.get(pull.failed_in, R.TIMED_OUT)

    def _unmet(self) -> Told:
        how = next(filter(None, (key_trouble_at(self.pull, x)[0] for x in self.ranks or ("",))), "")
        if not how:
            return R.UNMET, {"reason": self.pull.how} if self.pull.how == How.NO_FILES else {}
        return (R.KEYS_HERE, {}) if how == How.UNLISTED_LISTENER else (R.KEYS, {"reason": how})

    def _refused(self) -> Told:
        """Tell params that two readers had, who is refused as `consumed` or as `wrong_cohort`, from other refusals."""
        pull, request = self.pull, self.request
        own = [x for x in request.all_pulls if x.process is pull.process and x.begun_at < pull.begun_at]
        if pull.cause == "consumed" and (first := next((x for x in own if x.cause != "complete"), None)) is not None:
            if first.failed_in == "announced" and first.ended is not None:
                return R.ANNOUNCED, {"seconds": in_seconds(first.ended.number("seconds"))}
            return R.REFUSED, {"reason": "released_already"}
        readers = {x.process.engine_id for x in request.all_pulls}
        readers |= {engine_of(x) for lease in request.leases.values() for x in (*lease.released, *lease.claims)}
        if pull.cause == "consumed" or (pull.cause == "wrong_cohort" and readers - {pull.process.engine_id}):
            return R.TWICE, {}
        return R.REFUSED, {"reason": pull.cause}

    def _unlent(self) -> Told:
        """Tell a request that was lent too late, or passed over, from a prefill engine that lends nothing."""
        presence, begun, ended = self.presence, self.low, self.high
        for owner in self.owners:
            if stalled_s(owner, begun, ended, "claim") > 0.0:
                return R.STUCK, {"by": owner.rank, "holder": owner.rank}
        lent_at = [presence.near(x.process, x.lent_at) for x in self.request.leases.values()]
        if seconds := min((x - ended for x in lent_at if x > ended), default=0.0):
            return R.OVERTAKEN, {"why": f"it was lent {in_seconds(seconds)} s after the deadline"}
        lends = [presence.lends[base] for base in {base_name(x) for x in self.ranks}]
        if num_lent := sum(bisect.bisect(x, ended) - bisect.bisect(x, begun) for x in lends):
            return R.OVERTAKEN, {"why": f"it was not lent, and {num_lent:,} others were meanwhile"}
        if not self.owners:
            return R.NO_LOG, {}
        return (R.UNLENT if self.seconds >= SILENCE_S else R.OVERTAKEN), {}

    def _unoffered(self) -> Told:
        """Tell a request that never came from one that was lent too late, or under another ticket."""
        state, more = self._unlent()
        lent_at = [at for x in self.ranks for at in self.presence.unfollowed[base_name(x)] if at >= self.low]
        if state is R.STUCK or not lent_at:
            return (state, more) if state is R.STUCK else (R.UNOFFERED, more)
        if min(lent_at) <= self.high:
            return R.OTHER_TICKET, {"why": "a request was lent meanwhile, with a ticket that no reader followed"}
        late_s = in_seconds(min(lent_at) - self.high)
        return R.OVERTAKEN, {
            "why": f"a request with a ticket that no reader followed any more was lent {late_s} s later"
        }

    def _lost(self) -> Told | None:
        """Return the fate of a rank that it read from and that was lost during it or since, because a rank is silent
        before it is lost; its silence proves neither its death nor its life."""
        starts, pull = {start_of(x) for x in self.ranks}, self.pull
        said = (x for x in pull.process.since(told.PeerChanged, pull.begun_at) if start_of(x.text("peer")) in starts)
        if (lost := next((x for x in said if x.text("cause") == "peer_lost"), None)) is None:
            return None
        has_logs = len(self.owners) == len(self.ranks)
        state = R.OWNER_CLOSED if lost.text("how") == How.GOODBYE else R.BROKEN if has_logs else R.NO_LOG
        return state, {"why": lost.text("detail")}


# -- blocks of failed pulls --------------------------------------------------------------------------------------------


def why_kept(presence: Presence, request: LoggedRequest, pull: LoggedPull) -> Verdict:
    """Say why a pull's blocks might still be written when it had its outcome."""
    until = pull.returned or pull.retired or pull.ended or pull.held[-1]
    failed = _Failed(presence, request, pull, until)
    after = ", and has given them up" if pull.retired else "" if pull.returned else " so far"
    names = failed.names | {
        "about": (pull.process.rank, *failed.ranks),
        "held": f"for {in_seconds(kept_s(pull))} s after its pull had failed{after}",
        "kept_s": in_seconds(kept_s(pull)),
        "why": f"{pull.cause}{f', {pull.detail}' if pull.detail else ''}" or pull.state,
    }
    state, more = failed.befell() or (None, {})
    if state in (None, R.AWAY):
        high = presence.when(pull.process, until.at)[1]
        fates = [presence.fate(x) for x in failed.owners]
        may_be_dead = not fates or any(x.kind != "stopped" and x.after < high for x in fates)
        if pull.cause in ("peer_lost", "restarted") and may_be_dead:
            state, more = R.OWNER_DIED if pull.cause == "restarted" else R.NO_LOG, {}
        elif not failed.was_given_up():
            state, more = R.READING, {}
        elif state is None:
            state, more = R.TIMED_OUT, {"reason": pull.cause if pull.cause == "cancelled" else ""}
    return Verdict(W.READ, state, names | more)


def kept_s(pull: LoggedPull) -> float:
    """Return for how long a pull's blocks were not free after its outcome."""
    if (record := pull.returned or pull.retired) is not None:
        return record.number("seconds_after_failure", 0.0)
    return max(pull.process.last_at - (pull.ended.at if pull.ended is not None else pull.last_at), 0.0)


# -- leases of which only the decode side speaks -----------------------------------------------------------------------


def unheard_releases(presence: Presence, request: LoggedRequest) -> list[tuple[Verdict, str, LoggedPull]]:
    """Find releases that were refused, or never answered, by ranks with logs that do not show the end of the lease."""
    found: list[tuple[Verdict, str, LoggedPull]] = []
    for pull in request.all_pulls:
        unheard = ((_unheard(presence, request, pull, rank), rank) for rank in unanswered_ranks(pull))
        found += [(verdict, rank, pull) for verdict, rank in unheard if verdict is not None]
        for record in pull.refused:
            state = refused_as(record.text("cause"))
            why = f"release {record.text('cause')}{f', {detail}' if (detail := record.text('detail')) else ''}"
            names = {"reader": pull.process.rank, "why": why, "message": "release"} | other_id(pull.prefill_request_id)
            names |= {"holder": listed(record.texts("ranks"))}
            names |= {"reason": record.text("cause")} if state is R.REFUSED else {}
            for rank in record.texts("ranks"):
                is_known = _is_told(presence, request, pull, rank, (pull.ended or record).at)
                if state is not None and not is_known and not _is_gone(pull.process, rank):
                    found.append((Verdict(W.UNKNOWN, state, names), rank, pull))
    return sorted(found, key=lambda x: x[0].order)


def _is_told(presence: Presence, request: LoggedRequest, pull: LoggedPull, rank: str, at: float) -> bool:
    """Return True if the log of a prefill rank shows the end of what a pull had of it."""
    owner = presence.service.process_named(rank)
    ended = any(x.process is owner and x.ended is not None for x in request.leases.values())
    return owner is not None and (ended or presence.tells(owner, pull.process, at))


def _unheard(presence: Presence, request: LoggedRequest, pull: LoggedPull, rank: str) -> Verdict | None:
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
    if pull.cause not in ("peer_unreachable", "wrong_target", *REFUSED_AT_HELLO):
        return Verdict(W.UNKNOWN, R.UNANSWERED, names, missing=(rank,))
    state, more = _Failed(presence, request, pull).by_reason()
    return Verdict(W.UNKNOWN, state, names | {"why": pull.detail} | more, missing=(rank,))


def _is_gone(reader: Process, rank: str) -> bool:
    """A prefill rank has ended, by its reader's log: with it, or by its word, went what it had lent."""
    said = said_of(reader, rank)
    return any(x.text("state") == "gone" and x.text("cause") in ("peer_lost", "restarted") for x in said)
