"""The verdict on one late lease: the cause that both logs support, for each reader that the lease waits for.

Causes that are sufficient by themselves are checked in this order: a refused message, the end of the reader, an
obstacle to its messages, and a message that came too late. The way to a cell is a table as well (`SILENT`, `UNMET`,
`DONE`, `NOBODY`, `LEFT_OUT`): the first of its steps that finds a view of the reader counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asynckv.core.types import How
from asynckv.told import RefusedMessage
from asynckv.tools.diagnose import leaks_between as between
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, FAILED_AS, WHY, OwnerView, ReaderView, in_words, remedy_of
from asynckv.tools.diagnose.join import LoggedLease, LoggedPull, LoggedRequest, Process, base_name, engine_of, start_of
from asynckv.tools.diagnose.leaks_values import in_seconds, listed, other_id
from asynckv.tools.diagnose.presence import AT_ONCE_S, LATE_S, SILENCE_S, UNDER_WAY_S, Fate, Presence, lease_of

W, R = OwnerView, ReaderView
REFUSED_AT_HELLO = ("geometry_refused", "protocol_version")
"""Reasons for which a reader refuses a rank that has answered its handshake: the network and the address are right."""
LAST_WORD = "its last word; it may have died"


@dataclass(slots=True)
class Verdict:
    """Verdict about one owed reader: a cell of the table, and the names and numbers of its sentence."""

    owner: OwnerView
    reader: ReaderView
    names: dict[str, Any]
    at: float = math.inf  # sort key among the verdicts of one request
    missing: tuple[str, ...] = ()  # processes with logs that would say more

    @property
    def cause(self) -> CAUSE:
        return WHY[self.owner][self.reader]

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: is a class of causes, is only silence, time."""
        return CATALOGUE[self.cause].is_class, self.reader is ReaderView.LEFT_OUT, self.at

    @property
    def about(self) -> tuple[str, ...]:
        """The ranks that the sentence speaks of."""
        one = self.names.get("holder" if self.reader is ReaderView.OWNER_AWAY else "reader", "")
        return tuple(self.names.get("about", (one,)))

    @property
    def sentence(self) -> str:
        entry = CATALOGUE[self.cause]
        return in_words(entry.of.get(self.owner, entry.sentence), self.names)

    @property
    def remedy(self) -> str:
        return remedy_of(self.cause, self.names.get("reason", ""), self.names)


def verdicts(presence: Presence, request: LoggedRequest, lease: LoggedLease, state: str) -> list[Verdict]:
    """Return the causes of a late lease: a verdict for each reader that it waits for."""
    holder, fate = lease.process.rank, presence.fate(lease.process)
    if state == "died":
        return [Verdict(W.DIED, R.ANY, {"holder": holder, "why": fate.why, "gone": fate.gone}, lease.seconds)]
    if state == "closed":
        how = lease.ended.text("revoked_by") if lease.ended is not None else ""
        why = f"after {in_seconds(lease.seconds)} s; {how or fate.why}"
        return [Verdict(W.CLOSED, R.ANY, {"holder": holder, "owed": listed(lease.owed), "why": why}, lease.seconds)]
    return [Debt(presence, request, lease, name).verdict() for name in dict.fromkeys(lease.owed or ("*",))]


class Debt:
    """One reader's debt of one lease, and the lines of both logs about it.

    Attributes:
        process: The reader's process, if one is known.
        pull: Its attempt: the one that claimed, or the last one.
        since, until: The lease's time.
    """

    def __init__(self, presence: Presence, request: LoggedRequest, lease: LoggedLease, name: str) -> None:
        self.presence, self.request, self.lease, self.name = presence, request, lease, name
        self.since, self.until = presence.span(lease)
        self.claims, self.strangers = lease.claims, presence.strangers(lease)
        claim = self.claims.get(name)
        self.heard_s = claim.heard_s if claim is not None else math.nan
        self.pulls = between.pulls_of(request, lease, name)
        service, pull_id = presence.service, claim.pull_id if claim is not None else ""
        ids = [x.pull_id for x in self.pulls]
        self.is_claimed = claim is not None or start_of(name) != ""
        self.owner, is_tried_again = W.CLAIMED if self.is_claimed else W.UNCLAIMED, pull_id in ids[:-1]
        if name in lease.retrying and not (is_tried_again or self._is_followed()):
            self.owner = W.RETRYING
        mine = (x for x in self.pulls if claim is not None and x.pull_id == pull_id and not x.retried)
        # Otherwise the last attempt counts, although this rank received no message of it.
        last = self.pulls[-1] if self.pulls else None
        self.pull = last if is_tried_again and name in lease.retrying else next(mine, last)
        named = service.process_named(name) or service.process_of(pull_id)
        self.process = named if self.pull is None else self.pull.process

    def _is_followed(self) -> bool:
        """Return True if a claim of another attempt was refused since, and not one that was on its way."""
        theirs = (x for x in self.lease.refused if x.message == "claim" and base_name(x.who) == base_name(self.name))
        return any(x.after_s > self.heard_s + UNDER_WAY_S for x in theirs)

    @cached_property
    def fate(self) -> Fate:
        assert self.process is not None
        return self.presence.fate(self.process)

    # -- the way to its cell -----------------------------------------------------------------------------------------

    def verdict(self) -> Verdict:
        if self.is_claimed and (self.pull is None or self.pull.ended is None):
            steps = SILENT
        elif self.pull is None:
            steps = NOBODY if self.is_nobody else LEFT_OUT
        else:
            steps = DONE if self.is_claimed else UNMET + DONE
        return next(filter(None, (step(self) for step in ALWAYS + steps)))

    def _is(self, cell: ReaderView, why: str | None = None, *, missing: tuple[str, ...] = (), **names: Any) -> Verdict:
        pull, lease, ended = self.pull, self.lease, self.pull.ended if self.pull is not None else None
        waited_s = ended.number("seconds") if ended is not None else math.nan
        known: dict[str, Any] = {
            "reader": pull.process.rank if pull is not None and not self.is_claimed else self.name,
            "holder": lease.process.rank,
            "address": self.presence.address_of(lease.process.rank),
            "why": self._said() if why is None else why,
            "lease_s": in_seconds(lease.lease_s),
            "heard_s": in_seconds(self.heard_s),
            "heard_at": self.presence.moment(lease.lent_at + self.heard_s),
            "seconds": in_seconds(lease.seconds if math.isnan(waited_s) else waited_s),
        }
        if not math.isnan(waited_s):
            known["waited"] = f"; its pull ended {in_seconds(waited_s)} s after it was asked for"
        at = self.heard_s if self.is_claimed else lease.seconds if pull is None else math.inf
        return Verdict(self.owner, cell, known | names, at, missing)

    def _said(self) -> str:
        pull = self.pull
        if pull is None:
            return "no log says more"
        if pull.detail:
            return f"{pull.cause}, {pull.detail}"
        return pull.cause or f"it was {pull.state or 'asked for'} when last spoken of"

    # -- what was refused --------------------------------------------------------------------------------------------

    def of_its_refusals(self) -> Verdict | None:
        """Return a refused message as the cause, whatever the reader did afterwards."""
        name = self.name
        reader = name if start_of(name) else listed(x.process.rank for x in self.pulls) or name
        for refusal in self._refusals():
            state = between.refused_as(refusal.reason, refusal.limit)
            if state is None or (state is R.REFUSED and refusal.message != "release" and name in self.claims):
                continue
            reader = refusal.who if start_of(refusal.who) and name == "*" else reader
            why = f"{refusal.message} {refusal.reason}{f', {refusal.detail}' if refusal.detail else ''}"
            names = {"reader": "a reader" if reader == "*" else reader, "why": why, "message": refusal.message}
            names |= {"holder": self.lease.process.rank, "reason": refusal.reason if state is R.REFUSED else ""}
            if state is R.RENAMED:
                others = [x.prefill_request_id for x in (*self.request.others.values(), *self.pulls)]
                other = next((x for x in others if x not in ("", self.lease.request_id)), "")
                names |= other_id(other) or {"other": f"another id than it was lent under ({why})"}
            return Verdict(W.REFUSED, state, names, refusal.after_s)
        return None

    def _refusals(self) -> Iterator[RefusedMessage]:
        """Yield refused messages of the reader, by either side, if one side has heard of the sender."""
        name, known = self.name, {"", start_of(self.name)} | self.presence.met
        for x in self.lease.refused:
            is_met = known == {""} or start_of(x.who) in known
            if name == "*" or base_name(x.who) in (base_name(name), ""):
                if is_met or self.presence.service.process_named(x.who) is not None:
                    yield x
        for pull in self.pulls:  # refusals that are missing in the prefill log
            for record in pull.refused:
                if any(start_of(x) in ("", self.lease.process.start) for x in record.texts("ranks") or ("",)):
                    said = record.text("cause"), pull.process.rank, record.text("detail")
                    yield RefusedMessage(math.inf, "release", *said)

    # -- its attempt -------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> LoggedPull:
        assert self.pull is not None
        return self.pull

    @property
    def outcome(self) -> tuple[float, float]:
        """The time of its outcome, within the uncertainty of its clock."""
        ended = self.attempt.ended
        return self.presence.when(self.attempt.process, ended.at if ended is not None else math.nan)

    def _away(self) -> Verdict | None:
        """Return the process with a loop that was blocked for so long that it explains an expired lease, if any."""
        presence, lease, owner, pull = self.presence, self.lease, self.lease.process, self.attempt
        long = 0.5 * min(x for x in (owner.durations.get("grant_s", 10.0), lease.lease_s, 10.0) if not math.isnan(x))
        here = presence.away_s(pull.process, *self._under_way)
        # A blocked loop before the lend does not count.
        there = presence.away_s(owner, lease.lent_at + AT_ONCE_S, lease.lent_at + lease.seconds)
        there = max(there, lease.ended.number("late_s", 0.0) if lease.ended is not None else 0.0)
        if max(here, there) < long:
            return None
        cell = R.AWAY if here >= there else R.OWNER_AWAY
        return self._is(cell, reader=pull.process.rank, away_s=in_seconds(max(here, there)))

    @property
    def _under_way(self) -> tuple[float, float]:
        """The time of the attempt, while the lease ran, by the reader's clock."""
        presence, pull = self.presence, self.attempt
        until = max((x.at for x in (pull.ended, *pull.unanswered) if x is not None), default=pull.last_at)
        # A blocked loop after the end of the lease does not count.
        until += min(self.until - presence.when(pull.process, until)[0], 0.0)
        since = pull.begun_at
        for claim in self.claims.values():
            if claim.pull_id == pull.pull_id and not math.isnan(claim.claimed_s):  # a short line omits the announcement
                claimed = presence.when(self.lease.process, self.lease.lent_at + claim.claimed_s)[1]
                since -= max(presence.when(pull.process, since)[0] - claimed, 0.0)
        return since, until

    # -- the processes that may have been meant ----------------------------------------------------------------------

    @cached_property
    def spoke(self) -> list[Process]:
        """Processes of engines that have not claimed, and that speak of the request to some rank."""
        bound = {engine_of(x) for x in (*self.lease.owed, *self.claims, *self.lease.released)}
        every = dict.fromkeys(x.process for x in self.request.all_pulls)
        return [x for x in every if engine_of(x.rank) not in bound]

    @property
    def is_nobody(self) -> bool:
        """True if no log of any reader's engine speaks of the request."""
        return self.name == "*" and not self.spoke

    @cached_property
    def readers(self) -> list[Process]:
        """Processes that may have been meant, and had started before the lease was over."""
        presence = self.presence
        readers = presence.decoders(self.lease.process.engine_id)
        # It is not known since when a process without a log is there.
        began = {x: x.first_at if x.num_records or not presence.fate(x).hangs else -math.inf for x in readers}
        readers = [x for x in readers if not presence.when(x, began[x])[0] > self.until]
        if self.name != "*":
            return [x for x in readers if x.base == base_name(self.name)]
        engines = {x.engine_id for x in self.spoke}  # others of its engine have spoken, to this rank or another
        return [x for x in readers if not engines or (x.engine_id in engines and x not in self.spoke)]

    @cached_property
    def gone(self) -> list[Process]:
        """Those that had ended before it was lent."""
        return [x for x in self.readers if self.presence.fate(x).before < self.since]

    @cached_property
    def alive(self) -> list[Process]:
        return [x for x in self.readers if x not in self.gone] or self.gone

    def _ended(self, kind: str, by: float) -> list[Process]:
        """Those that were there when it was lent, and whose logs end before some time."""
        fates = ((x, self.presence.fate(x)) for x in self.alive if x not in self.gone)
        return [x for x, fate in fates if fate.kind == kind and fate.after <= by]

    @property
    def silent(self) -> list[Process]:
        return self._ended("silent", self.until)

    @cached_property
    def absent(self) -> dict[str, str]:
        """Those that were not there for most of the time, with the reasons; of an engine all of them, if none spoke."""
        absent = self.presence.absent(self.lease, self.alive)
        if not self.is_nobody:
            return absent
        there = {engine_of(x.rank) for x in self.alive if x.rank not in absent}  # they would have spoken of a request
        return {rank: why for rank, why in absent.items() if engine_of(rank) not in there}

    # -- steps: any reader, and one that had claimed and of which no outcome is known ----------------------------------

    def of_forgotten(self) -> Verdict | None:
        if self.pull is None or not between.is_forgotten(self.presence, self.request, self.pull):
            return None
        return self._away() or self._is(R.ANNOUNCED)

    def of_the_longest(self) -> Verdict | None:
        """It expired at `max_lease_s`, and this reader had asked for all that was left: its last grant was cut."""
        lease, said = self.lease, self.lease.process.durations
        is_longest = lease.state == "expired" and lease.seconds >= said.get("max_lease_s", math.inf) - AT_ONCE_S
        if not is_longest or self.heard_s + said.get("grant_s", 0.0) < lease.seconds or math.isnan(self.heard_s):
            return None
        return self._is(R.OVERSTAYED, f"lent for {in_seconds(lease.seconds)} s, of {in_seconds(said['max_lease_s'])} s")

    def of_no_log(self) -> Verdict | None:
        lease, process = self.lease, self.process
        if process is None:
            is_renewed = lease.seconds - self.heard_s < lease.process.durations.get("grant_s", 10.0) / 2
            if lease.ended is None and is_renewed:
                return self._is(R.WAITING, f"claimed and renewed by {self.name}", missing=(self.name,))
            return self._is(R.NO_LOG, LAST_WORD, missing=(self.name,))
        if process.says_info or self.fate.is_proved:
            return None
        return self._is(R.NO_LOG, self.fate.why, missing=(self.name,))  # of warnings only, and a goodbye is none

    def of_its_state(self) -> Verdict | None:
        lease, fate = self.lease, self.fate
        if fate.kind == "stopped":
            return self._is(R.CLOSED, fate.why)
        if fate.hangs and fate.after <= self.until:
            return self._is(R.ABSENT, fate.why)
        if lease.state == "lent" and fate.kind != "died":
            state = (self.pull.state if self.pull is not None else "") or "claimed"
            return self._is(R.WAITING, f"{state} by {self.name}", seconds=in_seconds(lease.seconds))
        return None

    def of_its_last_word(self) -> Verdict | None:
        presence, lease, fate = self.presence, self.lease, self.fate
        assert self.process is not None
        if fate.after > self.until:
            return None
        # A living process renews, and logs the end of a pull; but with a blocked loop it writes nothing.
        quiet_s = lease_of(self.process) + LATE_S
        if not fate.is_known and presence.last <= self.until + quiet_s:
            return self._is(R.NO_LOG, LAST_WORD)  # or the logs were cut
        why = fate.why
        if fate.after < presence.when(lease.process, lease.lent_at + self.heard_s)[0]:
            why += f"; what it did after {self.presence.moment(self.process.last_at)} is not in its log"
        return self._is(R.DIED, why, gone=fate.gone)

    def of_its_loop(self) -> Verdict:
        assert self.process is not None
        begun_at = self.pull.begun_at if self.pull is not None else math.nan
        since = begun_at if not math.isnan(begun_at) else self.process.first_at
        if (away_s := self.presence.away_s(self.process, since, self.process.last_at)) > 0.0:
            return self._is(R.AWAY, away_s=in_seconds(away_s))
        return self._is(R.NO_LOG, "its log goes on, and does not speak of it")

    # -- steps: a reader that knew of the request, and never claimed ---------------------------------------------------

    def of_another_id(self) -> Verdict | None:
        pull, own = self.attempt, self.lease.request_id
        if pull.cause == "peer_unreachable" or not own or pull.prefill_request_id in ("", own):
            return None
        return self._is(R.RENAMED, message="claim", **other_id(pull.prefill_request_id))

    def of_its_call(self) -> Verdict | None:
        """It died with the call, or called too late or too early."""
        presence, lease, pull = self.presence, self.lease, self.attempt
        if pull.ended is None and self.fate.kind == "died":
            return self._is(R.DIED, self.fate.why, gone=self.fate.gone)
        if presence.when(pull.process, pull.begun_at)[0] > self.until or FAILED_AS.get(pull.cause) is R.LATE:
            away_s, back_at = presence.long_away(lease, pull.process)
            if away_s and back_at - away_s <= pull.begun_at <= back_at + lease.seconds / 2:
                return self._away() or self._is(R.AWAY, away_s=in_seconds(away_s))
            return self._away() or self._is(R.LATE)
        if pull.ended is not None and not between.is_unanswered(pull, lease):
            parked_s = lease.process.durations.get("parked_s", LATE_S)
            if presence.when(pull.process, pull.ended.at)[1] + parked_s < self.since:
                return self._is(R.EARLY)
        return None

    def of_the_address(self) -> Verdict | None:
        pull, process = self.attempt, self.lease.process
        if pull.cause == "wrong_target":
            return self._is(R.WRONG_TARGET)
        if pull.cause in REFUSED_AT_HELLO:
            return self._is(R.REFUSED_HERE, reason=pull.cause)
        starts = {start_of(x) for x in pull.peer_ranks if base_name(x) == process.base} - {""}
        is_other = bool(starts) and process.start not in starts  # its params name another start of the rank
        is_old = (pull.cause == "engine_closed" or pull.failed_in == "handshake") and is_other
        return self._is(R.STALE) if is_old or FAILED_AS.get(pull.cause) is R.STALE else None

    def of_keys(self) -> Verdict | None:
        how, why = between.key_trouble(self.presence, self.attempt, self.lease)
        if how == How.UNLISTED_LISTENER:
            return self._is(R.KEYS_HERE, why)
        return self._is(R.KEYS, why, reason=how) if how else None

    def of_no_handshake(self) -> Verdict | None:
        pull, lease = self.attempt, self.lease
        in_vain = pull.failed_in == "handshake" and lease.process.rank in pull.failed_with  # at this address
        is_met = between.shook_hands(self.presence, pull.process, lease) and not in_vain
        if (is_met or between.is_only_released(pull, lease)) and pull.cause != "peer_unreachable":
            return None
        # A reader that is away hears no answer.
        others = between.turned_away(lease.process, -math.inf, lease.lent_at + lease.seconds)
        why = f"{self._said()}; {others}" if others else None
        return self._away() or self._is(R.UNMET, why, reason=pull.how if pull.how == How.NO_FILES else "")

    # -- steps: a reader with a known pull, that was not heard in time -------------------------------------------------

    @cached_property
    def lost(self) -> list[tuple[Process, Fate]]:
        """The prefill ranks of its pull, if it lost one of them."""
        service, is_lost = self.presence.service, self.attempt.cause == "peer_lost" and self.is_claimed
        ranks = map(service.process_named, self.attempt.peer_ranks if is_lost else ())
        return [(x, self.presence.fate(x)) for x in ranks if x is not None]

    def of_a_loop(self) -> Verdict | None:
        if (away := self._away()) is not None or self.attempt.ended is None:
            return away or self._is(R.LATE)
        for owner, fate in self.lost:
            if fate.hangs and (away_s := self.presence.away_s(owner, owner.last_at, math.inf)):
                return self._is(R.OWNER_AWAY, holder=owner.rank, away_s=in_seconds(away_s))
        return None

    def of_a_promise(self) -> Verdict | None:
        """Another attempt was to follow, or its release was lost."""
        pull, last = self.attempt, self.pulls[-1]
        if last is not pull and between.is_unanswered(last, self.lease):
            return self._is(R.UNANSWERED, between.how_unanswered(last))
        if pull.cause == "peer_lost" and pull.failed_in == "announced" and pull.how == How.SILENT and self.is_claimed:
            return self._is(R.BROKEN)  # an announcement promised no pull
        said = [x.text("outcome") for x in (*pull.unanswered, *pull.refused)]
        is_last = self.is_claimed and last is pull
        if not (self.owner is W.RETRYING or (is_last and ("retry" in said or pull.retried))):
            return None
        if self.fate.kind == "died":
            return self._is(R.DIED, self.fate.why, gone=self.fate.gone)
        other = between.tried_elsewhere(self.presence, self.request, pull)
        return self._is(R.ELSEWHERE, other=other) if other else self._is(R.RETRIES)

    def of_its_transfers(self) -> Verdict | None:
        """A release waits for their end."""
        presence, lease, pull = self.presence, self.lease, self.attempt
        over = presence.when(lease.process, lease.lent_at + lease.seconds)[0]
        if not (pull.held_transfers and self.is_claimed and self.outcome[1] < over):
            return None
        if pull.returned is None or presence.when(pull.process, pull.returned.at)[0] > self.until:
            return self._is(R.READING, held=f"for {in_seconds(lease.seconds)} s at least")
        return None

    def of_its_time(self) -> Verdict | None:
        is_late, pull = self.outcome[0] > self.until, self.attempt
        if is_late and pull.cause == "peer_lost" and self.is_claimed:
            died = next((x for x, fate in self.lost if fate.kind == "died"), None)
            return self._is(R.OWNER_DIED, holder=died.rank) if died is not None else self._is(R.BROKEN)
        if pull.cause == "not_lent_yet":  # by another rank, while this one's lease ran
            return self._is(R.LATE, about=(pull.process.rank, *pull.failed_with), reason=pull.cause)
        is_up = pull.cause in ("lease_lost", "expired", "timeout")
        return self._is(R.LATE) if is_late or is_up else None

    def of_its_release(self) -> Verdict:
        pull, lease, fate = self.attempt, self.lease, self.fate
        assert pull.ended is not None
        closed = fate.kind == "stopped" and fate.after <= self.until + LATE_S
        if between.is_unanswered(pull, lease) and not closed:
            return self._is(R.UNANSWERED, between.how_unanswered(pull))
        if fate.kind == "died":  # it had its outcome, and died before its release was heard
            return self._is(R.DIED, fate.why, gone=fate.gone)
        if closed:
            return self._is(R.CLOSED, f"{self._said()}; {fate.why}")
        if not between.would_be_given_up(self.presence, pull.process, pull.ended.at):
            return self._is(R.NO_LOG, f"{self._said()}; an unanswered release would be logged later")
        # Every message was answered, so the release arrived after the lease had ended.
        return self._is(R.LATE)

    # -- steps: readers that never spoke of it -------------------------------------------------------------------------

    def of_the_dead(self) -> Verdict | None:
        presence, lease = self.presence, self.lease
        # A rank that lives claims as soon as others of its engine did.
        claimed = presence.near(lease.process, lease.lent_at) + presence.claims_take_s
        died = self._ended("died", self.until if self.is_nobody else claimed)
        if not died or lease.state == "lent":
            return None
        dead, fate = listed(x.rank for x in died), presence.fate(died[0])
        if fate.is_proved and len(died) == len(self.alive) and not self.strangers:  # no other could have got it
            return self._is(R.DIED, fate.why, gone=fate.gone, reader=dead)
        why = f"; its params never arrived, or arrived at {dead}, which {fate.gone} meanwhile ({fate.why})"
        return self._is(R.NO_LOG, why)

    def of_none(self) -> Verdict | None:
        """Every decode engine had ended in a known way, at the latest when a living one would have claimed, and others
        started later."""
        presence, lent_at = self.presence, self.presence.near(self.lease.process, self.lease.lent_at)
        by = lent_at + max(presence.claims_take_s, LATE_S)
        later = [x for x in self.readers if x.num_records and presence.when(x, x.first_at)[0] > by]
        fates = [(presence.fate(x), x.rank) for x in self.readers if x not in later]
        ended = [x for x in fates if x[0].is_known and x[0].before <= by]
        if not ended or len(ended) < len(fates) or self.strangers:
            return None
        fate, last = max(ended, key=lambda x: x[0].before)
        since = "no decode engine ran since"
        if later:
            since = f"{later[0].rank} started at {presence.moment(later[0].first_at)}"
        return self._is(R.NONE_RUNS, f"{last} {fate.text}, and {since}", reader=last)

    def of_the_absent(self) -> Verdict | None:
        """Return the verdict about readers that were not there."""
        if not self.absent:
            return None
        rank = next(iter(self.absent))
        away_s = sum(self.presence.long_away(self.lease, x)[0] for x in self.alive if x.rank == rank)
        if away_s and not self.is_nobody:
            return self._is(R.AWAY, reader=rank, away_s=in_seconds(away_s))
        ranks = {why: listed(x for x, y in self.absent.items() if y == why) for why in self.absent.values()}
        (why, first), *rest = ranks.items()
        why = "; or ".join([why, *(f"{more}, but {other}" for other, more in rest)])
        given = "may have been given it" if self.is_nobody else "was given it, as other ranks of its engine were"
        missing = self.strangers if self.is_nobody else ()
        return self._is(R.ABSENT, why, reader=first, given=given, missing=missing, about=tuple(self.absent))

    def of_the_idle(self) -> Verdict | None:
        if self.alive and not self.strangers and all(self.presence.had_no_step(x, self.lease) for x in self.alive):
            return self._is(R.IDLE, reader=listed(x.rank for x in self.alive))
        return None

    def of_the_untold(self) -> Verdict | None:
        """Logs are missing, or end before their readers do and soon after the lease: it may still be pulled."""
        alive, lease, strangers = self.alive, self.lease, self.strangers
        is_cut = self.presence.last < self.until + SILENCE_S
        is_cut = is_cut and any(self.presence.fate(x).kind == "silent" for x in alive)
        if alive and not strangers and lease.state != "lent" and not is_cut:
            return None
        missing, out = strangers or (tuple(x.rank for x in self.silent) if alive else ("the decode side",)), list[str]()
        if silent := listed(x.rank for x in self.silent):
            out.append(f"no log of the decode side speaks of it, and {silent} may have died")
        elif alive:
            out.append(f"{listed(x.rank for x in alive)} knows nothing of it")
        if strangers:
            out.append(f"{listed(strangers)} shook hands")
        if refused := between.turned_away(lease.process, lease.lent_at, lease.lent_at + lease.seconds):
            out.append(f"meanwhile {refused}")
        return self._is(R.NO_LOG, "".join(f"; {x}" for x in out), missing=missing)

    def of_the_unheard(self) -> Verdict:
        gone, silent = (listed(x.rank for x in some) for some in (self.gone, self.silent))
        also = f"; or they were with {silent}, with logs that end before the lease did" if silent else ""
        also = f"; {gone} had died before it was lent" if self.alive == self.gone else also
        return self._is(R.UNHEARD, listed(x.rank for x in self.alive), also=also)

    def of_the_left_out(self) -> Verdict:
        """Others of its engine have mentioned the request."""
        others = [x for x in (*self.claims, *self.lease.released, *(x.rank for x in self.spoke)) if x != self.name]
        why = (listed(others) or "none did yet") + ("; it may have died" if self.silent or not self.alive else "")
        named = self.name if self.name != "*" else listed(x.rank for x in self.alive) or "a rank"
        return self._is(R.LEFT_OUT, why, reader=named, missing=() if self.alive else (named,))


Steps = tuple[Callable[[Debt], Verdict | None], ...]
D = Debt
ALWAYS: Steps = (D.of_its_refusals, D.of_forgotten, D.of_the_longest)
SILENT: Steps = (D.of_no_log, D.of_its_state, D.of_its_last_word, D.of_its_loop)
UNMET: Steps = (D.of_another_id, D.of_its_call, D.of_the_address, D.of_keys, D.of_no_handshake)
DONE: Steps = (D.of_a_loop, D.of_a_promise, D.of_its_transfers, D.of_its_time, D.of_its_release)
NOBODY: Steps = (D.of_the_dead, D.of_none, D.of_the_absent, D.of_the_idle, D.of_the_untold, D.of_the_unheard)
LEFT_OUT: Steps = (D.of_the_dead, D.of_the_absent, D.of_the_left_out)
