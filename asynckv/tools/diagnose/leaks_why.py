"""The verdict on one late lease: the cause that both logs support, for each reader that the lease waits for.

Causes that are sufficient by themselves are checked in this order: a refused message, the end of the reader, an
obstacle to its messages, and a message that came too late.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from asynckv.core.told import RefusedMessage
from asynckv.tools.diagnose import leaks_between as between
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE, FAILED_AS, WHY, Owner, Reader
from asynckv.tools.diagnose.join import Lease, Process, Pull, Request, base_name, start_of
from asynckv.tools.diagnose.leaks_values import engine_of, in_seconds, listed, moment, other_id
from asynckv.tools.diagnose.presence import AT_ONCE_S, DEFAULT_LEASE_S, LATE_S, SILENCE_S, UNDER_WAY_S, Presence

W, R = Owner, Reader
REFUSED_AT_HELLO = ("geometry_refused", "protocol_version")
"""Reasons for which a reader refuses a rank that has answered its handshake: the network and the address are right."""


@dataclass(slots=True)
class Verdict:
    """Verdict about one owed reader: a cell of the table, and the names and numbers of its sentence."""

    owner: Owner
    reader: Reader
    names: dict[str, Any]
    at: float = math.inf  # sort key among the verdicts of one request
    missing: tuple[str, ...] = ()  # processes with logs that would say more
    cause: CAUSE = field(init=False)

    def __post_init__(self) -> None:
        self.cause = WHY[self.owner][self.reader]

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: is a class of causes, is only silence, time."""
        return CATALOGUE[self.cause].is_class, self.reader is Reader.LEFT_OUT, self.at

    @property
    def sentence(self) -> str:
        entry = CATALOGUE[self.cause]
        names = defaultdict(lambda: "?", {"gone": "died", "also": "", "waited": ""} | self.names)
        return entry.of.get(self.owner, entry.sentence).format_map(names)


def verdicts(presence: Presence, request: Request, lease: Lease, state: str) -> list[Verdict]:
    """Return the causes of a late lease: a verdict for each reader that it waits for."""
    holder, fate = lease.process.rank, presence.fate(lease.process)
    if state == "died":
        return [Verdict(W.DIED, R.ANY, {"holder": holder, "why": fate.why, "gone": fate.gone}, lease.seconds)]
    if state == "closed":
        how = lease.ended.text("revoked_by") if lease.ended is not None else ""
        why = f"after {in_seconds(lease.seconds)} s; {how or fate.why}"
        return [Verdict(W.CLOSED, R.ANY, {"holder": holder, "owed": listed(lease.owed), "why": why}, lease.seconds)]
    return [_Debt(presence, request, lease, name).verdict() for name in dict.fromkeys(lease.owed or ("*",))]


class _Debt:
    """One reader's debt of one lease, and the lines of both logs about it."""

    def __init__(self, presence: Presence, request: Request, lease: Lease, name: str) -> None:
        self.presence, self.request, self.lease, self.name = presence, request, lease, name
        self.since, self.until = presence.span(lease)
        self.claims = lease.claims
        claim = self.claims.get(name)
        self.heard_s = claim.heard_s if claim is not None else math.nan
        self.pulls = between.pulls_of(request, lease, name)
        mine = (x for x in self.pulls if claim is not None and x.pull_id == claim.pull_id and not x.retried)
        # Otherwise the last attempt counts, although this rank received no message of it.
        self.pull = next(mine, self.pulls[-1] if self.pulls else None)
        service, pull_id = presence.service, claim.pull_id if claim is not None else ""
        self.process = service.process_named(name) or service.process_of(pull_id)
        self.is_claimed = claim is not None or start_of(name) != ""
        self.owner = W.CLAIMED if self.is_claimed else W.UNCLAIMED
        if name in lease.retrying and not self._is_followed():
            self.owner = W.RETRYING

    def verdict(self) -> Verdict:
        return self._refused() or self._weighed(self.pull)

    def _weighed(self, pull: Pull | None) -> Verdict:
        if pull is not None and between.is_forgotten(self.presence, pull):
            return self._away(pull) or self._is(R.ANNOUNCED)
        if self._is_overstayed():
            most = in_seconds(self.lease.process.durations["max_lease_s"])
            return self._is(R.OVERSTAYED, f"lent for {in_seconds(self.lease.seconds)} s, of {most} s")
        if self.is_claimed and (pull is None or pull.ended is None):
            return self._of_silence()
        if pull is None:
            return self._of_nobody()
        return (not self.is_claimed and self._of_unmet(pull)) or self._of_done(pull)

    def _is(self, state: Reader, why: str | None = None, *, missing: tuple[str, ...] = (), **names: Any) -> Verdict:
        pull, waited_s = self.pull, math.nan
        if pull is not None and pull.ended is not None:
            waited_s = pull.ended.number("seconds")
        known: dict[str, Any] = {
            "reader": pull.process.rank if pull is not None and not self.is_claimed else self.name,
            "holder": self.lease.process.rank,
            "why": self._said() if why is None else why,
            "lease_s": in_seconds(self.lease.lease_s),
            "heard_s": in_seconds(self.heard_s),
            "heard_at": moment(self.lease.lent_at + self.heard_s),
            "seconds": in_seconds(self.lease.seconds if math.isnan(waited_s) else waited_s),
        }
        if not math.isnan(waited_s):
            known["waited"] = f"; its pull ended {in_seconds(waited_s)} s after it was asked for"
        at = self.heard_s if self.is_claimed else self.lease.seconds if pull is None else math.inf
        return Verdict(self.owner, state, known | names, at, missing)

    def _said(self) -> str:
        pull = self.pull
        if pull is None:
            return "no log says more"
        if pull.detail:
            return f"{pull.cause}, {pull.detail}"
        return pull.cause or f"it was {pull.state or 'asked for'} when last spoken of"

    # -- what was refused, and bugs ------------------------------------------------------------------------------------

    def _is_followed(self) -> bool:
        """Return True if a claim of another attempt was refused since, and not one that was on its way."""
        theirs = (x for x in self.lease.refused if x.message == "claim" and base_name(x.who) == base_name(self.name))
        return any(x.after_s > self.heard_s + UNDER_WAY_S for x in theirs)

    def _refused(self) -> Verdict | None:
        """Return a refused message as the cause, whatever the reader did afterwards."""
        name, lease = self.name, self.lease
        reader = name if start_of(name) else listed(x.process.rank for x in self.pulls) or name
        found = [x for x in lease.refused if name == "*" or base_name(x.who) in (base_name(name), "")]
        found = [x for x in found if self._is_known(x.who)]
        for pull in self.pulls:  # refusals that are missing in the prefill log
            for record in pull.refused:
                if any(start_of(x) in ("", lease.process.start) for x in record.texts("ranks") or ("",)):
                    said = record.text("cause"), pull.process.rank, record.text("detail")
                    found.append(RefusedMessage(math.inf, "release", *said))
        for refusal in found:
            state = between.refused_as(refusal.reason, refusal.detail)
            if state is None or (state is R.REFUSED and refusal.message != "release" and name in self.claims):
                continue
            reader = refusal.who if start_of(refusal.who) and name == "*" else reader
            why = f"{refusal.message} {refusal.reason}{f', {refusal.detail}' if refusal.detail else ''}"
            names = {"reader": "a reader" if reader == "*" else reader, "why": why, "message": refusal.message}
            if state is R.RENAMED:
                others = [x.prefill_request_id for x in (*self.request.others.values(), *self.pulls)]
                other = next((x for x in others if x not in ("", lease.request_id)), "")
                names |= other_id(other) or {"other": f"another id than it was lent under ({why})"}
            return Verdict(W.REFUSED, state, names, refusal.after_s)
        return None

    def _is_known(self, rank: str) -> bool:
        """Return True if one side has heard of the reader of a message; others only bear its name."""
        start, met = start_of(rank), self.presence.met
        if start in ("", start_of(self.name)) or start in met or not (start_of(self.name) or met):
            return True
        return self.presence.service.process_named(rank) is not None

    # -- a reader that had claimed, and of which no outcome is known ---------------------------------------------------

    def _is_overstayed(self) -> bool:
        """Return True if it expired at `max_lease_s` and this reader had asked for all that was left, so that its last
        grant was cut."""
        lease, said = self.lease, self.lease.process.durations
        is_longest = lease.state == "expired" and lease.seconds >= said.get("max_lease_s", math.inf) - AT_ONCE_S
        return is_longest and self.heard_s + said.get("grant_s", 0.0) >= lease.seconds

    def _of_silence(self) -> Verdict:
        presence, lease, process = self.presence, self.lease, self.process
        state = (self.pull.state if self.pull is not None else "") or "claimed"
        if process is None:
            is_renewed = lease.seconds - self.heard_s < lease.process.durations.get("grant_s", 10.0) / 2
            if lease.ended is None and is_renewed:
                return self._is(R.WAITING, f"claimed and renewed by {self.name}", missing=(self.name,))
            return self._is(R.NO_LOG, "its last word; it may have died", missing=(self.name,))
        fate = presence.fate(process)
        if not process.says_info and not fate.is_proved:  # such a log has warnings only, and a goodbye is none
            return self._is(R.NO_LOG, fate.why, missing=(self.name,))
        if fate.kind == "stopped":
            return self._is(R.CLOSED, fate.why)
        if fate.hangs and fate.after <= self.until:
            return self._is(R.ABSENT, fate.why)
        if lease.state == "lent" and fate.kind != "died":
            return self._is(R.WAITING, f"{state} by {self.name}", seconds=in_seconds(lease.seconds))
        if fate.after <= self.until:
            # A living process renews, and logs the end of a pull; but with a blocked loop it writes nothing.
            quiet_s = process.durations.get("lease_s", DEFAULT_LEASE_S) + LATE_S
            if not (fate.kind == "died" and fate.is_proved) and presence.last <= self.until + quiet_s:
                return self._is(R.NO_LOG, "its last word; it may have died")  # or the logs were cut
            why = fate.why
            if fate.after < presence.when(lease.process, lease.lent_at + self.heard_s)[0]:
                why += f"; what it did after {moment(process.last_at)} is not in its log"
            return self._is(R.DIED, why, gone=fate.gone)
        begun_at = self.pull.begun_at if self.pull is not None else math.nan
        since = begun_at if not math.isnan(begun_at) else process.first_at
        if (away_s := presence.away_s(process, since, process.last_at)) > 0.0:
            return self._is(R.AWAY, away_s=in_seconds(away_s))
        return self._is(R.NO_LOG, "its log goes on, and does not speak of it")

    # -- a reader that knew of the request, and never claimed ----------------------------------------------------------

    def _of_unmet(self, pull: Pull) -> Verdict | None:
        """Return a cause that keeps a reader from meeting the rank, or from asking it for this request."""
        presence, lease, cause, fate = self.presence, self.lease, pull.cause, self.presence.fate(pull.process)
        begun = presence.when(pull.process, pull.begun_at)[0]
        if cause != "peer_unreachable" and lease.request_id and pull.prefill_request_id not in ("", lease.request_id):
            return self._is(R.RENAMED, message="claim", **other_id(pull.prefill_request_id))
        if pull.ended is None and fate.kind == "died":
            return self._is(R.DIED, fate.why, gone=fate.gone)
        if begun > self.until or cause in ("expired", "unknown_key", "lease_lost"):
            return self._late(pull)
        if pull.ended is not None and not between.is_unanswered(pull, lease):
            parked_s = lease.process.durations.get("parked_s", LATE_S)
            if presence.when(pull.process, pull.ended.at)[1] + parked_s < self.since:
                return self._is(R.EARLY)
        if cause == "wrong_target":
            return self._is(R.WRONG_TARGET)
        if cause in REFUSED_AT_HELLO:
            return self._is(R.REFUSED_HERE, reason=cause)
        is_old = (cause == "engine_closed" or pull.failed_in == "handshake") and self._names_another_start(pull)
        if is_old or FAILED_AS.get(cause) is R.STALE:
            return self._is(R.STALE)
        if keys := between.refused_keys(presence, pull, lease):
            return self._is(R.KEYS, keys)
        in_vain = pull.failed_in == "handshake" and lease.process.rank in pull.detail  # at this address
        is_met = self._is_only_released(pull) or (between.shook_hands(presence, pull.process, lease) and not in_vain)
        if cause == "peer_unreachable" or not is_met:
            # A reader that is away hears no answer.
            others = between.turned_away(lease.process, -math.inf, lease.lent_at + lease.seconds)
            return self._away(pull) or self._is(R.UNMET, f"{self._said()}; {others}" if others else None)
        return None

    def _names_another_start(self, pull: Pull) -> bool:
        """Return True if the reader's params name another start of the rank than the one that lent the request."""
        starts = {start_of(x) for x in pull.peer_ranks if base_name(x) == self.lease.process.base} - {""}
        return bool(starts) and self.lease.process.start not in starts

    def _is_only_released(self, pull: Pull) -> bool:
        """Return True if nothing is to be read from this rank, so that it hears nothing before the pull is done."""
        if pull.ended is not None and (pull.ended.texts("read_ranks") or pull.cause in ("complete", "discharged")):
            return all(base_name(x) != self.lease.process.base for x in pull.ended.texts("read_ranks"))
        states = {base_name(x): state for held in pull.held for x, state in held.mapping("ranks").items()}
        return states.get(self.lease.process.base) == "only_released"

    # -- a reader with a known pull ----------------------------------------------------------------------------------

    def _of_done(self, pull: Pull) -> Verdict:
        """Return why the reader was not heard in time."""
        presence, lease, fate = self.presence, self.lease, self.presence.fate(pull.process)
        if (away := self._away(pull)) is not None:
            return away
        if pull.ended is None:
            return self._is(R.LATE)
        lost = pull.cause == "peer_lost" and self.is_claimed  # this rank, or another one of its engine
        owners = [x for x in map(presence.service.process_named, pull.peer_ranks) if x is not None]
        for owner in owners if lost else ():
            if presence.fate(owner).hangs and (away_s := presence.away_s(owner, owner.last_at, math.inf)):
                return self._is(R.OWNER_AWAY, holder=owner.rank, away_s=in_seconds(away_s))
        low, high = presence.when(pull.process, pull.ended.at)
        closed = fate.kind == "stopped" and fate.after <= self.until + LATE_S
        if (last := self.pulls[-1]) is not pull and between.is_unanswered(last, lease):
            return self._is(R.UNANSWERED, between.how_unanswered(last))
        if lost and pull.failed_in == "announced" and "was silent" in pull.detail:  # an announcement promised no pull
            return self._is(R.BROKEN)
        said = [x.text("outcome") for x in (*pull.unanswered, *pull.refused)]
        if self.owner is W.RETRYING or (self.is_claimed and last is pull and ("retry" in said or pull.retried)):
            return self._is(R.DIED, fate.why, gone=fate.gone) if fate.kind == "died" else self._is(R.RETRIES)
        # A release waits for the end of these transfers.
        over = presence.when(lease.process, lease.lent_at + lease.seconds)[0]
        if pull.held_transfers and self.is_claimed and high < over:
            if pull.returned is None or presence.when(pull.process, pull.returned.at)[0] > self.until:
                return self._is(R.READING, held=f"for {in_seconds(lease.seconds)} s at least")
        if lost and low > self.until:
            died = next((x for x in owners if presence.fate(x).kind == "died"), None)
            if died is None:
                return self._is(R.BROKEN)
            return self._is(R.OWNER_DIED, presence.fate(died).why, gone=presence.fate(died).gone, holder=died.rank)
        if pull.cause in ("lease_lost", "expired", "timeout", "not_lent_yet") or low > self.until:
            return self._is(R.LATE)
        if between.is_unanswered(pull, lease) and not closed:
            return self._is(R.UNANSWERED, between.how_unanswered(pull))
        if fate.kind == "died":  # it had its outcome, and died before its release was heard
            return self._is(R.DIED, fate.why, gone=fate.gone)
        if closed:
            return self._is(R.CLOSED, f"{self._said()}; {fate.why}")
        if not between.would_be_given_up(presence, pull.process, pull.ended.at):
            return self._is(R.NO_LOG, f"{self._said()}; an unanswered release would be logged later")
        # Every message was answered, so the release arrived after the lease had ended.
        return self._is(R.LATE)

    def _away(self, pull: Pull) -> Verdict | None:
        """Return the process with a loop that was blocked for so long that it explains an expired lease, if any."""
        presence, lease, owner = self.presence, self.lease, self.lease.process
        long = 0.5 * min(x for x in (owner.durations.get("grant_s", 10.0), lease.lease_s, 10.0) if not math.isnan(x))
        until = max((x.at for x in (pull.ended, *pull.unanswered) if x is not None), default=pull.last_at)
        # A blocked loop after the end of the lease does not count.
        until += min(self.until - presence.when(pull.process, until)[0], 0.0)
        since = pull.begun_at
        for claim in self.claims.values():
            if claim.pull_id == pull.pull_id and not math.isnan(claim.claimed_s):  # a short line omits the announcement
                claimed = presence.when(owner, lease.lent_at + claim.claimed_s)[1]
                since -= max(presence.when(pull.process, since)[0] - claimed, 0.0)
        here = presence.away_s(pull.process, since, until)
        # A blocked loop before the lend does not count.
        there = presence.away_s(owner, lease.lent_at + AT_ONCE_S, lease.lent_at + lease.seconds)
        there = max(there, lease.ended.number("late_s", 0.0) if lease.ended is not None else 0.0)
        if max(here, there) < long:
            return None
        cell = R.AWAY if here >= there else R.OWNER_AWAY
        return self._is(cell, reader=pull.process.rank, away_s=in_seconds(max(here, there)))

    def _late(self, pull: Pull) -> Verdict:
        """Return the cause of a late message: a blocked loop, or a late call."""
        if (away := self._away(pull)) is not None:
            return away
        away_s, back_at = self.presence.long_away(self.lease, pull.process)
        if away_s and back_at - away_s <= pull.begun_at <= back_at + self.lease.seconds / 2:
            return self._is(R.AWAY, away_s=in_seconds(away_s))
        return self._is(R.LATE)

    # -- readers that never spoke of it --------------------------------------------------------------------------------

    def _of_nobody(self) -> Verdict:
        """Return why no log of a reader mentions it."""
        presence, lease, name = self.presence, self.lease, self.name
        bound = {engine_of(x) for x in (*lease.owed, *self.claims, *lease.released)}
        spoke = [x for x in dict.fromkeys(x.process for x in self.request.all_pulls) if engine_of(x.rank) not in bound]
        readers = presence.decoders(lease.process.engine_id)
        # It is not known since when a process without a log is there.
        began = {x: x.first_at if x.num_records or not presence.fate(x).hangs else -math.inf for x in readers}
        readers = [x for x in readers if not presence.when(x, began[x])[0] > self.until]
        if name != "*":
            readers = [x for x in readers if x.base == base_name(name)]
        elif spoke:  # others of its engine, to this rank or another
            engines = {x.engine_id for x in spoke}
            readers = [x for x in readers if x.engine_id in engines and x not in spoke]
        gone = [x for x in readers if presence.fate(x).before < self.since]
        alive = [x for x in readers if x not in gone] or gone
        is_nobody = name == "*" and not spoke
        fates = [(x, presence.fate(x)) for x in alive if x not in gone]
        silent = [x for x, fate in fates if fate.kind == "silent" and fate.after < self.until]
        strangers = presence.strangers(lease)
        if lease.state != "lent":
            # A rank that lives claims as soon as others of its engine did.
            claimed = presence.near(lease.process, lease.lent_at) + presence.claims_take_s
            by = self.until if is_nobody else claimed
            if died := [x for x, fate in fates if fate.kind == "died" and fate.after <= by]:
                dead, fate = listed(x.rank for x in died), presence.fate(died[0])
                if fate.is_proved and len(died) == len(alive) and not strangers:  # no other reader could have got it
                    return self._is(R.DIED, fate.why, reader=dead, gone=fate.gone)
                why = f"; its params never arrived, or arrived at {dead}, which {fate.gone} meanwhile ({fate.why})"
                return self._is(R.NO_LOG, why)
        if not is_nobody:
            return self._of_left_out(spoke, alive, silent)
        absent = presence.absent(lease, alive)
        there = {engine_of(x.rank) for x in alive if x.rank not in absent}  # they would have spoken of a request
        if absent := {rank: why for rank, why in absent.items() if engine_of(rank) not in there}:
            return self._absent(absent, missing=strangers)
        if alive and not strangers and all(presence.had_no_step(x, lease) for x in alive):
            return self._is(R.IDLE, reader=listed(x.rank for x in alive))
        # If logs end before their readers do, and soon after the lease, the request may still be pulled.
        is_open = any(presence.fate(x).kind == "silent" for x in alive)
        is_cut = is_open and presence.last < self.until + SILENCE_S
        if not alive or strangers or lease.state == "lent" or is_cut:
            missing = strangers or (tuple(x.rank for x in silent) if alive else ("the decode side",))
            return self._is(R.NO_LOG, self._circumstances(alive, silent, strangers), missing=missing)
        also = f"; or they were with {listed(x.rank for x in silent)}, with logs that end before the lease did"
        if alive == gone:
            also = f"; {listed(x.rank for x in gone)} had died before it was lent"
        return self._is(R.UNHEARD, listed(x.rank for x in alive), also=also if silent or alive == gone else "")

    def _of_left_out(self, spoke: list[Process], alive: list[Process], silent: list[Process]) -> Verdict:
        """Return the verdict that other ranks of the engine have mentioned a request, and one has not."""
        lease = self.lease
        if absent := self.presence.absent(lease, alive):
            rank = next(iter(absent))
            if away_s := self.presence.long_away(lease, next(x for x in alive if x.rank == rank))[0]:
                return self._is(R.AWAY, reader=rank, away_s=in_seconds(away_s))
            return self._absent(absent, "was given it, as other ranks of its engine were")
        others = [x for x in (*self.claims, *lease.released, *(x.rank for x in spoke)) if x != self.name]
        why = (listed(others) or "none did yet") + ("; it may have died" if silent or not alive else "")
        named = self.name if self.name != "*" else listed(x.rank for x in alive) or "a rank"
        return self._is(R.LEFT_OUT, why, reader=named, missing=() if alive else (named,))

    def _absent(
        self, found: dict[str, str], given: str = "may have been given it", missing: tuple[str, ...] = ()
    ) -> Verdict:
        """Return the verdict about readers that were not there."""
        ranks = {why: listed(x for x, y in found.items() if y == why) for why in found.values()}
        (why, first), *rest = ranks.items()
        why = "; or ".join([why, *(f"{more}, but {other}" for other, more in rest)])
        return self._is(R.ABSENT, why, reader=first, given=given, missing=missing)

    def _circumstances(self, alive: list[Process], silent: list[Process], strangers: Iterable[str]) -> str:
        """Describe the other lines of one side's logs about a request that was never claimed."""
        out, lease = list[str](), self.lease
        if silent:
            out.append(f"no log of the decode side speaks of it, and {listed(x.rank for x in silent)} may have died")
        elif alive:
            out.append(f"{listed(x.rank for x in alive)} knows nothing of it")
        if strangers:
            out.append(f"{listed(strangers)} shook hands")
        if refused := between.turned_away(lease.process, lease.lent_at, lease.lent_at + lease.seconds):
            out.append(f"meanwhile {refused}")
        return "".join(f"; {x}" for x in out)
