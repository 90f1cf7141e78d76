"""The verdict on one late lease: for each reader that it waits for, the cell of the table that both logs put it into.

The evidence is weighed in the order in which one thing would have been enough by itself: what was refused, then what
became of the reader, then what kept it from being heard; and if it was heard too late, that.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asynckv.core import told
from asynckv.tools.diagnose.axis import CLOCKS_S
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, WHY, Owner, Reader
from asynckv.tools.diagnose.join import Lease, Process, Pull, Refusal, Request, base_name, start_of
from asynckv.tools.diagnose.leaks_between import (
    STALE,
    how_unanswered,
    is_unanswered,
    pulls_of,
    refused_as,
    refused_keys,
    shook_hands,
    turned_away,
    would_be_given_up,
)
from asynckv.tools.diagnose.leaks_late import is_forgotten, is_overdue
from asynckv.tools.diagnose.leaks_values import engine_of, in_seconds, listed, moment, other_id
from asynckv.tools.diagnose.presence import AT_ONCE_S, LATE_S, SILENCE_S, UNDER_WAY_S, Presence

W, R = Owner, Reader

CLOSING_S = 1.0
"""An engine that ends so long after a lease had most likely not begun to when the lease ended."""

SOON = 0.5
"""A reader that comes back and asks within such a part of a lease asks late because it was away."""

_OTHER = re.compile(r"not to ('.*'|\".*\")\Z", re.DOTALL)


@dataclass(slots=True)
class Verdict:
    """Why one reader is owed: a cell of the table, and the names and numbers of its sentence.

    Attributes:
        at: Orders those of one request.
        missing: Whose logs would say more.
    """

    owner: Owner
    reader: Reader
    names: dict[str, Any]
    at: float = math.inf
    missing: tuple[str, ...] = ()
    cause: CAUSE = field(init=False)

    def __post_init__(self) -> None:
        self.cause = WHY[self.owner][self.reader]

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Whether it is a class, and whether it says no more than that a rank is silent, then the time."""
        return CATALOGUE[self.cause].is_class, self.reader is Reader.LEFT_OUT, self.at

    @property
    def sentence(self) -> str:
        entry = CATALOGUE[self.cause]
        return entry.of.get(self.owner, entry.sentence).format_map(_Names(self.names))


class _Names(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        unknown = {"gone": "died", "other": "another id than it was lent under", "also": "", "waited": ""}
        return unknown.get(key, "?")


def verdicts(presence: Presence, request: Request, lease: Lease, state: str) -> list[Verdict]:
    """Say why a lease is late: a verdict for each reader that it waits for."""
    holder, fate = lease.process.rank, presence.fate(lease.process)
    if state == "died":
        why = fate.why
        if fate.kind != "died":
            why = f"{why.partition(';')[0]}, nor a word of what it held, and others went on to their end"
        return [Verdict(W.DIED, R.ANY, {"holder": holder, "why": why, "gone": fate.gone}, lease.seconds)]
    if state == "closed":
        how = lease.ended.text("revoked_by") if lease.ended is not None else ""
        why = f"after {in_seconds(lease.seconds)} s; {how or fate.why}"
        return [Verdict(W.CLOSED, R.ANY, {"holder": holder, "owed": listed(lease.owed), "why": why}, lease.seconds)]
    return [_Debt(presence, request, lease, name).verdict() for name in dict.fromkeys(lease.owed or ("*",))]


class _Debt:
    """What one reader owes of one lease, and what both logs say of it."""

    def __init__(self, presence: Presence, request: Request, lease: Lease, name: str) -> None:
        self.presence, self.request, self.lease, self.name = presence, request, lease, name
        self.since, self.until = presence.span(lease)
        self.claims = lease.claims
        claim = self.claims.get(name)
        self.heard_s = claim.heard_s if claim is not None else math.nan
        self.pulls = pulls_of(request, lease, name)
        mine = (x for x in self.pulls if claim is not None and x.pull_id == claim.pull_id and not x.retried)
        self.pull = next(mine, self.pulls[-1] if self.pulls else None)  # or a later attempt, of which nothing came here
        self.process = presence.service.process_named(name) or presence.service.process_of(
            claim.pull_id if claim else ""
        )
        if claim is None and not start_of(name):
            self.owner = W.UNCLAIMED
        else:
            self.owner = W.RETRYING if name in lease.retrying and not self._is_followed() else W.CLAIMED

    def verdict(self) -> Verdict:
        if (refused := self._refused()) is not None:
            return refused
        if self.owner is not W.UNCLAIMED:
            found = self._of_claimed()
        else:
            found = self._of_nobody() if self.pull is None else self._of_unclaimed(self.pull)
        if CATALOGUE[found.cause].is_class and (bug := self._bug()) is not None:
            return bug
        return found

    def _is(self, state: Reader, why: str | None = None, *, missing: tuple[str, ...] = (), **names: Any) -> Verdict:
        """Put it into a cell."""
        pull, claimed = self.pull, self.owner is not W.UNCLAIMED
        who = pull.process.rank if pull is not None and not claimed else self.name
        waited_s = pull.ended.number("seconds") if pull is not None and pull.ended is not None else math.nan
        known: dict[str, Any] = {
            "reader": who,
            "holder": self.lease.process.rank,
            "why": self._said() if why is None else why,
            "lease_s": in_seconds(self.lease.lease_s),
            "heard_s": in_seconds(self.heard_s),
            "heard_at": moment(self.lease.lent_at + self.heard_s),
            "seconds": in_seconds(waited_s if not math.isnan(waited_s) else self.lease.seconds),
            "message": "claim",
        }
        if not math.isnan(waited_s):
            known["waited"] = f"; its pull ended {in_seconds(waited_s)} s after it was asked for"
        at = self.heard_s if claimed else self.lease.seconds if state is R.DIED and pull is None else math.inf
        return Verdict(self.owner, state, known | names, at, missing)

    def _said(self) -> str:
        """How its pull ended, in words."""
        pull = self.pull
        if pull is None:
            return "no log says more"
        if pull.detail:
            return f"{pull.cause}, {pull.detail}"
        return pull.cause or f"it was {pull.state or 'asked for'} when last spoken of"

    # -- what was refused, and bugs ------------------------------------------------------------------------------------

    def _is_followed(self) -> bool:
        """A claim was turned down since: another attempt, and no claim that was on its way."""
        theirs = (x for x in self.lease.refused if x.message == "claim" and base_name(x.who) == base_name(self.name))
        return any(x.after_s > self.heard_s + UNDER_WAY_S for x in theirs)

    def _refused(self) -> Verdict | None:
        """What was turned down is why a reader is owed, whatever became of it."""
        name, lease = self.name, self.lease
        reader = name
        if not start_of(name):
            reader = listed(x.process.rank for x in self.pulls) or name
        found = [x for x in lease.refused if name == "*" or base_name(x.who) in (base_name(name), "")]
        found = [x for x in found if not self._is_stranger(x.who)]
        for pull in self.pulls:  # what the prefill side has not said, or could not
            for record in pull.refused:
                ranks = record.texts("ranks")
                if not ranks or any(start_of(x) in ("", lease.process.start) for x in ranks):
                    said = record.text("cause"), pull.process.rank, record.text("detail")
                    found.append(Refusal(math.inf, "release", *said))
        for refusal in found:
            state = refused_as(refusal.reason, refusal.detail)
            if state is None or (state is R.REFUSED and refusal.message != "release" and name in self.claims):
                continue
            who = refusal.who if start_of(refusal.who) and name == "*" else reader
            why = f"{refusal.message} {refusal.reason}{f', {refusal.detail}' if refusal.detail else ''}"
            names = {"reader": "a reader" if who == "*" else who, "why": why, "message": refusal.message}
            if state is R.RENAMED:
                others = [x.prefill_request_id for x in (*self.request.others.values(), *self.pulls)]
                other = next((x for x in others if x not in ("", lease.request_id)), "")
                names |= other_id(other or _named_in(refusal.detail))
            return Verdict(W.REFUSED, state, names, 0.0 if state is R.EARLY else refusal.after_s)
        return None

    def _is_stranger(self, who: str) -> bool:
        """It bears a reader's name, and neither side has ever heard of its start."""
        start, met = start_of(who), self.presence.met
        is_known = start in ("", start_of(self.name)) or start in met
        if is_known or self.presence.service.process_named(who) is not None:
            return False
        return bool(start_of(self.name) or met)

    def _bug(self) -> Verdict | None:
        readers = (self.process, *(x.process for x in self.pulls))
        for process in (self.lease.process, *(x for x in readers if x is not None)):
            for record in process.of(told.InternalError):
                low, high = self.presence.when(process.incarnation, record.at)
                if high >= self.since and low <= self.until:
                    return self._is(R.BUG, record.text("error"), reader=process.rank)
        return None

    # -- what both know of a reader that had claimed -------------------------------------------------------------------

    def _of_claimed(self) -> Verdict:
        """Say why a reader that had claimed is owed."""
        presence, lease, pull, process = self.presence, self.lease, self.pull, self.process
        forgotten = pull is not None and is_forgotten(presence, pull)
        unheard_s = lease.seconds - self.heard_s
        if process is None and lease.ended is None and unheard_s < lease.process.durations.get("grant_s", 10.0) / 2:
            return self._is(R.WAITING, f"claimed and renewed by {self.name}", missing=(self.name,))
        if not forgotten and self._is_overstayed():
            most = in_seconds(lease.process.durations["max_lease_s"])
            return self._is(R.OVERSTAYED, f"lent for {in_seconds(lease.seconds)} s, of {most} s")
        if process is None:
            return self._is(R.NO_LOG, "its last word; it may have died", missing=(self.name,))
        fate = presence.fate(process)
        has_outcome = pull is not None and pull.ended is not None
        if not process.says_info and not fate.is_proved and not has_outcome:
            # Neither a good outcome nor a goodbye is a warning.
            return self._is(R.NO_LOG, "its log has warnings only", missing=(self.name,))
        if pull is not None and forgotten:
            seconds = pull.ended.number("seconds") if pull.ended is not None else lease.seconds
            if lease.seconds < seconds - 1.0 and (away := self._away(pull)) is not None:
                return away  # the promise was lost before the announcement's time was up
            found = self._is(R.ANNOUNCED, seconds=in_seconds(seconds))
            found.at = 0.0
            return found
        if pull is None or pull.ended is None:
            return self._of_no_outcome(process)
        if (away := self._away(pull)) is not None:
            return away
        low, high = presence.when(process.incarnation, pull.ended.at)
        closed_later = process.stopped is not None and (
            presence.when(process.incarnation, process.stopped.at)[0] > self.until + CLOSING_S
        )
        if process.stopped is not None and any(x.text("cause") == "engine_closed" for x in pull.unanswered):
            return self._unanswered(pull) if closed_later else self._is(R.CLOSED, f"{self._said()}; {fate.why}")
        if (last := self._last_lost()) is not None and last is not pull:
            return self._unanswered(last)
        said = [x.text("outcome") for x in (*pull.unanswered, *pull.refused)]
        if self.owner is W.RETRYING or (self.pulls[-1] is pull and ("retry" in said or pull.retried)):
            return self._is(R.DIED, fate.why, gone=fate.gone) if fate.kind == "died" else self._is(R.RETRIES)
        if pull.held_transfers and high < presence.over(lease):
            # What may still be read is not released.
            if pull.returned is None or presence.when(process.incarnation, pull.returned.at)[0] > self.until:
                return self._is(R.READING, held=f"for {in_seconds(lease.seconds)} s at least")
        if pull.cause in ("lease_lost", "expired") or low > self.until:
            return self._is(R.LATE)
        if is_unanswered(pull, lease):
            return self._unanswered(pull)
        if pull.cause in ("timeout", "not_lent_yet"):
            # No promise is asked for beyond the caller's deadline, so the lease was over as the release was said.
            return self._is(R.LATE)
        if fate.kind == "died":  # it had its outcome, and died before its release was heard
            return self._is(R.DIED, fate.why, gone=fate.gone)
        if fate.kind == "stopped" and not closed_later:
            return self._is(R.CLOSED, f"{self._said()}; {fate.why}")
        if presence.last < high + process.durations.get("release_timeout_s", 30.0):
            return self._is(R.NO_LOG, f"{self._said()}; that it is not answered would be told later")
        # Whatever it said was answered, so it came as the lease was over.
        return self._is(R.LATE)

    def _is_overstayed(self) -> bool:
        """It expired at `max_lease_s`, and this reader had asked for as much as was left: its last promise was cut."""
        lease, said = self.lease, self.lease.process.durations
        is_longest = lease.state == "expired" and lease.seconds >= said.get("max_lease_s", math.inf) - AT_ONCE_S
        return is_longest and self.heard_s + said.get("grant_s", 0.0) >= lease.seconds

    def _of_no_outcome(self, process: Process) -> Verdict:
        """Say why a reader that had claimed has no outcome in its log."""
        presence, lease, fate = self.presence, self.lease, self.presence.fate(process)
        heard_at = lease.lent_at + (0.0 if math.isnan(self.heard_s) else self.heard_s)
        heard = presence.when(lease.process.incarnation, heard_at)[0]
        if fate.kind == "stopped" and fate.after >= heard:
            return self._is(R.CLOSED, fate.why)
        is_dead, is_over = fate.kind == "died", lease.state != "lent"
        if fate.kind != "stopped" and (is_dead or is_over) and fate.after <= self.until:
            # A process that lives renews, and says how it ended: silence is its end, whatever else is known of it.
            if not is_dead and (self.owner is W.RETRYING or presence.last < self.until + SILENCE_S / 2):
                return self._is(R.NO_LOG, "its last word; it may have died")  # or the logs were cut
            why = fate.why if is_dead else fate.why.partition(";")[0]
            if fate.after < heard:
                why += f"; what it did after {moment(process.last_at)} is not in its log"
            return self._is(R.DIED, why, gone=fate.gone)
        if not is_over:
            state = self.pull.state if self.pull is not None else ""
            return self._is(R.WAITING, f"{state or 'claimed'} by {self.name}", seconds=in_seconds(lease.seconds))
        begun_at = self.pull.begun_at if self.pull is not None else math.nan
        since = begun_at if not math.isnan(begun_at) else lease.lent_at - CLOCKS_S
        if (away_s := presence.away_s(process, since, process.last_at)) > 0.0:
            return self._is(R.AWAY, away_s=in_seconds(away_s))
        return self._is(R.NO_LOG, "its log goes on, and does not speak of it")

    def _last_lost(self) -> Pull | None:
        """The attempt that said that it was the last, while it was lent, and was never heard."""
        for pull in reversed(self.pulls):
            for record in pull.unanswered:
                said_at = record.at - record.number("seconds", 0.0)
                is_last = record.text("outcome") not in ("", "retry")
                is_in_time = self.presence.when(pull.process.incarnation, said_at)[0] <= self.until
                if is_last and is_in_time and self.lease.process.rank in record.texts("ranks"):
                    return pull
        return None

    # -- what kept it from being heard ---------------------------------------------------------------------------------

    def _unanswered(self, pull: Pull) -> Verdict:
        return self._is(R.UNANSWERED, how_unanswered(pull))

    def _away(self, pull: Pull) -> Verdict | None:
        """Whose loop was away for so long that it explains a lease that ran out, if one was."""
        presence, lease, owner = self.presence, self.lease, self.lease.process
        long = 0.5 * min(
            x for x in (owner.durations.get("grant_s", math.nan), lease.lease_s, 10.0) if not math.isnan(x)
        )
        until = max((x.at for x in (pull.ended, *pull.unanswered) if x is not None), default=pull.last_at)
        # What it went away for when the lease was over came after.
        until += min(self.until - presence.when(pull.process.incarnation, until)[0], 0.0)
        claims = [
            x.claimed_s for x in self.claims.values() if x.pull_id == pull.pull_id and not math.isnan(x.claimed_s)
        ]
        if pull.cause == "complete" and pull.ended is not None:  # what it had claimed before, whatever its clock shows
            until = min([until, *(pull.ended.at + lease.seconds - x + AT_ONCE_S for x in claims)])
        since = pull.begun_at
        if claims:  # a short line leaves its announcement out
            claimed = presence.when(owner.incarnation, lease.lent_at + claims[0])[1]
            since -= max(presence.when(pull.process.incarnation, since)[0] - claimed, 0.0)
        here = presence.away_s(pull.process, since, until)
        # What it came back from as it lent this was before.
        there = presence.away_s(owner, lease.lent_at + AT_ONCE_S, lease.lent_at + lease.seconds)
        there = max(there, lease.ended.number("late_s", 0.0) if lease.ended is not None else 0.0)
        if max(here, there) < long:
            return None
        cell = R.AWAY if here >= there else R.OWNER_AWAY
        return self._is(cell, reader=pull.process.rank, away_s=in_seconds(max(here, there)))

    def _late(self, pull: Pull) -> Verdict:
        """It was heard too late: because a loop was away, or because it spoke too late."""
        if (away := self._away(pull)) is not None:
            return away
        away_s, back_at = self.presence.long_away(self.lease, pull.process)
        if away_s and back_at - away_s <= pull.begun_at <= back_at + SOON * self.lease.seconds:
            return self._is(R.AWAY, away_s=in_seconds(away_s))
        return self._is(R.LATE)

    # -- what both know of a reader that never claimed -----------------------------------------------------------------

    def _of_unclaimed(self, pull: Pull) -> Verdict:
        """Say why a reader that knew of the request never claimed it."""
        presence, lease, fate, cause = self.presence, self.lease, self.presence.fate(pull.process), pull.cause
        begun = presence.when(pull.process.incarnation, pull.begun_at)[0]
        is_met = shook_hands(presence, pull.process, lease)
        is_unheard = is_unanswered(pull, lease)
        if cause != "peer_unreachable" and lease.request_id and pull.prefill_request_id not in ("", lease.request_id):
            return self._is(R.RENAMED, missing=(), **other_id(pull.prefill_request_id))
        if is_forgotten(presence, pull) and is_overdue(pull) and (is_met or not self._has_greeted(pull)):
            return self._is(R.ANNOUNCED)
        if pull.ended is None and fate.kind == "died":
            return self._is(R.DIED, fate.why, gone=fate.gone)
        if begun > self.until:
            return self._late(pull)
        if self._is_early(pull):
            return self._is(R.EARLY)
        if cause == "wrong_target":
            return self._is(R.WRONG_TARGET)
        if cause in STALE or (cause == "engine_closed" and self._names_another_start(pull)):
            return self._is(R.STALE)
        if cause in ("expired", "unknown_key", "lease_lost"):
            return self._late(pull)
        if keys := refused_keys(presence, pull, lease):
            return self._is(R.KEYS, keys)
        if self._is_only_released(pull):
            # Nothing is said to a rank that nothing is read of, before the pull is done: they need not meet.
            if (away := self._away(pull)) is not None or is_unheard:
                return away or self._unanswered(pull)
            if fate.kind == "silent" and pull.ended is not None and not would_be_given_up(presence, pull):
                if presence.when(pull.process.incarnation, pull.ended.at)[1] > presence.over(lease):
                    # Too late, or lost: its log ends before that could be told.
                    return self._is(R.NO_LOG, f"; {pull.process.rank} was done with it then, or later ({self._said()})")
            return self._late(pull)
        if pull.failed_in == "handshake" and (stale := self._stale_at(pull)):
            return self._is(R.STALE, stale)
        if cause in ("cancelled", "engine_closed") and any(x.text("cause") == "engine_closed" for x in pull.unanswered):
            return self._is(R.CLOSED, how_unanswered(pull))
        waited_s = pull.ended.number("seconds") if pull.ended is not None else math.nan
        if cause == "peer_unreachable" or not (is_met or self._is_released_later(pull)):
            away_s = presence.away_s(pull.process, pull.begun_at, pull.last_at) if pull.ended is not None else 0.0
            if away_s > 0.5 * waited_s and (away := self._away(pull)) is not None:
                return away  # a reader that is away hears no answer
            others = turned_away(lease.process, -math.inf, lease.lent_at + lease.seconds)
            return self._is(R.UNMET, f"{self._said()}; {others}" if others else None)
        if (away := self._away(pull)) is not None:
            return away
        is_begun = pull.ended is not None and pull.failed_in not in ("queue", "handshake", "plan", "announced")
        if is_begun and is_unheard:
            return self._unanswered(pull)
        if is_begun and waited_s >= UNDER_WAY_S and pull.process.stopped is not None:
            if cause in ("cancelled", "engine_closed"):
                return self._is(R.CLOSED)
        # Whatever it said at last was answered, so it came as the lease was over.
        return self._late(pull)

    def _has_greeted(self, pull: Pull) -> bool:
        """A reader has greeted the rank."""
        said = (x for x in pull.process.of(told.PeerChanged) if start_of(x.text("peer")) == self.lease.process.start)
        return any(x.text("state") == "connecting" for x in said)

    def _is_early(self, pull: Pull) -> bool:
        """A pull was done, and said so, before the request was lent here: that this was taken is all that it knows."""
        if pull.ended is None or pull.retried or is_unanswered(pull, self.lease):
            return False
        ended_at = self.presence.when(pull.process.incarnation, pull.ended.at)[1]
        parked_s = self.lease.process.durations.get("parked_s", LATE_S)
        return ended_at + parked_s < self.since and would_be_given_up(self.presence, pull)

    def _names_another_start(self, pull: Pull) -> bool:
        """What a reader was given names another start of the rank than the one that lent the request."""
        starts = {start_of(x) for x in pull.peer_ranks if base_name(x) == self.lease.process.base} - {""}
        stopped, ended = pull.process.stopped, pull.ended
        if stopped is not None and ended is not None:
            if stopped.at <= ended.at + pull.process.durations.get("release_timeout_s", 30.0):
                return False  # it was its reader's own engine that was closed
        return bool(starts) and self.lease.process.start not in starts

    def _stale_at(self, pull: Pull) -> str:
        """How the rank that lends turned its reader away, for it asked for an earlier start."""
        if self.lease.process.start in map(start_of, pull.peer_ranks):
            return ""  # then it was for another request
        for record in self.lease.process.of(told.ReaderRefused):
            if record.text("reader") == pull.process.rank and record.text("cause") in STALE:
                return f"{record.text('cause')}, {record.text('detail')}"
        return ""

    def _is_only_released(self, pull: Pull) -> bool:
        """A pull had its outcome, and nothing of it was to be read from this rank."""
        if pull.ended is None or pull.cause == "peer_unreachable" or not pull.peer_ranks:
            return False
        read = pull.ended.texts("read_ranks")
        is_planned = bool(read) or pull.cause in ("complete", "discharged")
        return is_planned and all(base_name(x) != self.lease.process.base for x in read)

    def _is_released_later(self, pull: Pull) -> bool:
        """Nothing is to be read from this rank, so that nothing is said to it before the pull is done."""
        ranks = (entry["ranks"].items() for _, entry in pull.held if isinstance(entry.get("ranks"), dict))
        states = {base_name(x): state for found in ranks for x, state in found}
        is_open = pull.ended is None or pull.like is not None
        return is_open and states.get(self.lease.process.base) == "only_released"

    # -- what is known of readers that never spoke of it ---------------------------------------------------------------

    def _of_nobody(self) -> Verdict:
        """Say why no log of a reader speaks of it."""
        presence, lease, name = self.presence, self.lease, self.name
        bound = {engine_of(x) for x in (*lease.owed, *self.claims, *lease.released)}
        spoke = [x for x in dict.fromkeys(x.process for x in self.request.all_pulls) if engine_of(x.rank) not in bound]
        readers = presence.decoders(lease.process.engine_id)
        if name != "*":
            readers = [x for x in readers if x.base == base_name(name)]
        elif spoke:  # others of its engine, to this rank or another
            engines = {x.engine_id for x in spoke}
            readers = [x for x in readers if x.engine_id in engines and x not in spoke]
        gone = [x for x in readers if presence.gone_by(x) < self.since]
        alive = [x for x in readers if x not in gone] or gone
        is_nobody = name == "*" and not spoke
        died, silent = self._ended_meanwhile([x for x in alive if x not in gone], is_nobody)
        if lease.state != "lent":
            if came := [x for x in died if presence.has_come_for(lease, x)]:
                fate = presence.fate(came[0])
                return self._is(R.DIED, fate.why, reader=listed(x.rank for x in came), gone=fate.gone)
            strange = is_nobody and presence.strangers(lease)
            lost = died or [x for x in readers if engine_of(x.rank) not in bound and presence.died_about(lease, x)]
            if lost and not strange:
                return self._may_have_died(lost, alive, is_nobody)
        if not is_nobody and not self._may_be_cut(spoke, silent):
            return self._of_left_out(spoke, alive, silent)
        return self._of_unheard(spoke, alive, gone, silent)

    def _ended_meanwhile(self, readers: list[Process], is_nobody: bool) -> tuple[list[Process], list[Process]]:
        """Find those that died while it was lent, and those whose logs end before its lease does."""
        fates = [(x, self.presence.fate(x)) for x in readers]
        fates = [(x, y) for x, y in fates if self.presence.when(x.incarnation, x.first_at)[0] <= self.until]
        died = [x for x, fate in fates if fate.kind == "died" and fate.after <= self.until]
        silent = [x for x, fate in fates if fate.kind == "silent" and fate.after < self.until]
        if not is_nobody:  # a rank claims as soon as others did, if it lives
            lent_at = self.presence.when(self.lease.process.incarnation, self.lease.lent_at)[1]
            died = [x for x in died if self.presence.fate(x).after <= lent_at + self.presence.claims_take_s]
        else:
            # Other ranks of the same engine live: they would have spoken of a request that it had.
            ranks = {x.base for x in (*died, *silent)}
            there = {x.engine_id for x in readers if x.base not in ranks}
            died = [x for x in died if x.engine_id not in there]
        met = {start_of(x.text("reader")) for x in self.lease.process.of(told.ReaderMet)}
        return [x for x in died if x.start in met] or died, silent

    def _may_have_died(self, lost: list[Process], alive: list[Process], is_nobody: bool) -> Verdict:
        """Its params never arrived, or arrived at a reader that died: nothing tells which."""
        whose = "the decode side" if is_nobody else listed(x.base for x in lost)
        why = (
            f"; no log of {whose} speaks of it: its params never arrived there, or whoever had them died, as "
            f"{listed(x.rank for x in lost)} did about then ({self.presence.fate(lost[0]).why})"
        )
        others = self.presence.absent(self.lease, [x for x in alive if x not in lost])
        return self._is(R.NO_LOG, why + "".join(f"; or {x} had them, but {how}" for x, how in [*others.items()][:4]))

    def _may_be_cut(self, spoke: list[Process], silent: list[Process]) -> bool:
        """Its engine may have come too late as a whole: the log of the rank that is owed ends before it could tell."""
        if self.name != "*" or self.claims or self.lease.released or not silent:
            return False
        asked = [x for x in self.request.all_pulls if x.process in spoke]
        over, when = self.presence.over(self.lease), self.presence.when
        return all(when(x.process.incarnation, x.begun_at)[1] > over for x in asked)

    def _of_left_out(self, spoke: list[Process], alive: list[Process], silent: list[Process]) -> Verdict:
        """Say that others of its engine have spoken of a request, and one rank has not."""
        lease = self.lease
        if absent := self.presence.absent(lease, alive):
            rank = next(iter(absent))
            away_s = self.presence.long_away(lease, next(x for x in alive if x.rank == rank))[0]
            if away_s:
                return self._is(R.AWAY, reader=rank, away_s=in_seconds(away_s))
            return self._absent(absent, "was given it, as other ranks of its engine were")
        others = [x for x in (*self.claims, *lease.released, *(x.rank for x in spoke)) if x != self.name]
        why = (listed(others) or "none did yet") + ("; it may have died" if silent or not alive else "")
        named = self.name if self.name != "*" else listed(x.rank for x in alive) or "a rank"
        return self._is(R.LEFT_OUT, why, reader=named, missing=() if alive else (named,))

    def _of_unheard(
        self, spoke: list[Process], alive: list[Process], gone: list[Process], silent: list[Process]
    ) -> Verdict:
        """Say that no log speaks of a request, and why that may be."""
        presence, lease = self.presence, self.lease
        strangers = presence.strangers(lease)
        hanging = dict.fromkeys(presence.unanswered_decoders(), "it does not answer") if not spoke else {}
        if found := _whole(presence.absent(lease, alive) | hanging, alive):
            return self._absent(found, missing=strangers)
        # Where logs end before readers do, and soon after the lease, it may be asked for yet.
        open_ = [x for x in alive if presence.fate(x).kind == "silent"]
        waits_s = SILENCE_S
        if len(open_) == len(alive):  # of no log is known that it was not cut off long before
            waits_s = max((x.durations.get("timeout_s", SILENCE_S) for x in open_), default=SILENCE_S)
        is_cut = bool(open_) and presence.last < self.until + waits_s
        if not alive or strangers or lease.state == "lent" or is_cut:
            missing = strangers or (tuple(x.rank for x in silent) if alive else ("the decode side",))
            return self._is(R.NO_LOG, self._circumstances(alive, silent, strangers), missing=missing)
        if found := _whole(presence.quiet(silent), alive):
            return self._absent(found)
        also = f"; or they were with {listed(x.rank for x in silent)}, whose log ends before the lease did"
        if alive == gone:
            also = f"; {listed(x.rank for x in gone)} had died before it was lent"
        return self._is(R.UNHEARD, listed(x.rank for x in alive), also=also if silent or alive == gone else "")

    def _absent(
        self, found: dict[str, str], given: str = "may have been given it", missing: tuple[str, ...] = ()
    ) -> Verdict:
        """Tell of readers that were not there."""
        ranks = {why: listed(x for x, y in found.items() if y == why) for why in found.values()}
        (why, first), *rest = ranks.items()
        why = "; or ".join([why, *(f"{more}, but {other}" for other, more in rest)])
        return self._is(R.ABSENT, why, reader=first, given=given, missing=missing)

    def _circumstances(self, alive: list[Process], silent: list[Process], strangers: tuple[str, ...]) -> str:
        """What else one side's logs say of a request that was never claimed."""
        out, lease = list[str](), self.lease
        if silent:
            out.append(f"no log of the decode side speaks of it, and {listed(x.rank for x in silent)} may have died")
        elif alive and all(x.answers for x in alive):
            verbs = "answers and knows" if len(alive) == 1 else "answer and know"
            out.append(f"{listed(x.rank for x in alive)} {verbs} nothing of it")
        elif alive:
            out.append("no log of the decode side that is given speaks of it")
        if strangers:
            out.append(f"{listed(strangers)} shook hands")
        if refused := turned_away(lease.process, lease.lent_at, lease.lent_at + lease.seconds):
            out.append(f"meanwhile {refused}")
        return "".join(f"; {x}" for x in out)


def _whole(found: dict[str, str], readers: Iterable[Process]) -> dict[str, str]:
    """Leave out ranks of an engine of which others were there: they would have spoken of a request that it had."""
    there = {engine_of(x.rank) for x in readers if x.rank not in found}
    return {rank: why for rank, why in found.items() if engine_of(rank) not in there}


def _named_in(detail: str) -> str:
    """The request id that a refusal's words quote; empty in old logs."""
    found = _OTHER.search(detail)
    try:
        value = ast.literal_eval(found[1]) if found is not None else ""
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
