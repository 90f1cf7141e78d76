"""One lent request, as its prefill rank sees it: who may read, who is owed, when the blocks return.

What binds:

- The first message binds the lease to a cohort (a decode engine's group of ranks), and with it the
  exact set of readers it is owed is known. It ends early only when **no reader is owed and no granted
  pull is held**: sets, never counts, so repeats and forgeries change nothing.
- **A grant is a promise.** Expiry and revocation only stop new grants; the blocks return at the
  holders' releases or after the last granted deadline, whichever is first.
- A release is final for its `pull_id`. An attempt that will be retried does not strike its reader off.
- A lease is never shortened, and never outlives `max_lease_s`.

It refuses to know: sockets, other leases, and what the blocks hold.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from asynckv.core.types import Cohort, Key, Outcome, PullId, Reason, RequestId, rank_name
from asynckv.core.wire import Ack, Claim, Granted, Refused, Release, Renew, blocks_digest
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.match import owed_readers

__all__ = ["Lease", "LeaseState", "Lent", "Reader"]

MAX_READERS = 4096
MAX_HISTORY = 1024
NOTICED_S = 0.1
"""Longer ago than that, history says when: nobody is woken for a promise that runs out while a reader is owed."""

MAX_NAMED = 4
"""Readers named in a sentence."""

MAX_PULLS = 4096
"""Attempts that one lease remembers; a reader that needs more is refused."""


class LeaseState(enum.StrEnum):
    """Where a lease stands."""

    LENT = "lent"
    ENDING = "ending"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class Expire:
    """The lease's time is up."""


class Revoke:
    """The engine wants its blocks back."""


L = LeaseState
ON_EVENT: Mapping[LeaseState, Mapping[type, LeaseState]] = {
    L.LENT: {Claim: L.LENT, Renew: L.LENT, Release: L.LENT, Expire: L.ENDING, Revoke: L.ENDING},
    L.ENDING: {Claim: L.ENDING, Renew: L.ENDING, Release: L.ENDING, Expire: L.ENDING, Revoke: L.ENDING},
    L.RELEASED: {},
    L.EXPIRED: {},
    L.REVOKED: {},
}
"""Messages and calls. What has ended takes no events: the node answers for it."""

WHEN_SETTLED: Mapping[LeaseState, Mapping[Reason, LeaseState]] = {
    L.LENT: {Reason.RELEASED: L.RELEASED},
    L.ENDING: {Reason.EXPIRED: L.EXPIRED, Reason.REVOKED: L.REVOKED},
}
"""Taken at once when nothing holds the blocks any more. In LENT that means: no reader is owed either."""


@dataclass(frozen=True, slots=True)
class Lent:
    """What a lease is about; fixed when it is lent."""

    key: Key
    request_id: RequestId
    groups: tuple[BlockRuns, ...]
    num_tokens: int
    written: bool
    lease_s: float
    grant_s: float
    """Length of one promise."""
    max_lease_s: float
    readers: int
    """Cohorts that may read: 1, or more for siblings and routers that retry elsewhere."""
    tp_rank: int
    tp_size: int
    warn_s: float = math.inf
    """Held for longer, it is worth a word."""


@dataclass(frozen=True, slots=True, order=True)
class Reader:
    """One decode rank of one cohort.

    Attributes:
        incarnation: The start of its process that spoke up, if any has; whichever it is, it is the same reader.
    """

    cohort: str
    tp_rank: int
    pp_stage: int = 0
    incarnation: str = field(default="", compare=False)

    def __str__(self) -> str:
        return rank_name(self.cohort, self.tp_rank, self.pp_stage)

    @property
    def name(self) -> str:
        """The reader and its process, for people."""
        return rank_name(self.cohort, self.tp_rank, self.pp_stage, self.incarnation)


@dataclass(slots=True)
class Promise:
    """What was granted to one pull, and when it was last asked for."""

    pull_id: PullId
    reader: Reader
    source: str
    until: float
    since: float
    asked_at: float


@dataclass(slots=True)
class _Bound:
    """A cohort that spoke up, and which of its readers are still owed."""

    sizes: tuple[int, int]
    owed: set[Reader]


@dataclass(slots=True, eq=False)
class Lease:
    """The state machine of one lent request."""

    lent: Lent
    lent_at: float
    state: LeaseState = L.LENT
    cause: Reason = Reason.RELEASED
    expires_at: float = field(init=False)
    cohorts: dict[str, _Bound] = field(default_factory=dict)
    held: dict[PullId, Promise] = field(default_factory=dict)
    past: dict[Reader, Promise] = field(default_factory=dict)
    """The last promise to readers that let it lapse, or will try again."""
    final: set[PullId] = field(default_factory=set)
    lapsed: int = 0
    """Grants that ran out; only bounds how often a reader may try."""
    outcomes: dict[Reader, Outcome] = field(default_factory=dict)
    history: list[tuple[float, str]] = field(default_factory=list)
    digest: bytes = field(init=False)
    scheduled_at: float = math.inf
    """For the node's timers only."""
    num_traced: int = 0
    """History entries that were reported one by one."""
    ended_at: float = math.inf
    warn_at: float = math.inf
    """When it will have been lent for so long that it is worth a word, or for twice as long as that."""
    is_sampled: bool = False
    """What becomes of it is reported though it be well."""

    def __post_init__(self) -> None:
        self.expires_at = self.lent_at + self.lent.lease_s
        self.warn_at = self.lent_at + self.lent.warn_s
        self.digest = blocks_digest(self.lent.groups, self.lent.num_tokens, self.lent.written)
        self._note((self.lent_at, "lent"))

    @property
    def is_over(self) -> bool:
        """The blocks are the engine's again."""
        return not ON_EVENT[self.state]

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do."""
        if self.is_over:
            return math.inf
        lapse = [hold.until for hold in self.held.values()]
        if self.state is L.ENDING:
            return min(max(lapse, default=-math.inf), self.warn_at)
        return min(self.expires_at, self.warn_at, *() if self._owes() else lapse)

    @property
    def until(self) -> float:
        """When the blocks return at the latest, if nobody asks for more."""
        lapse = max((hold.until for hold in self.held.values()), default=-math.inf)
        return lapse if self.state is L.ENDING else max(self.expires_at, lapse)

    def owed(self) -> tuple[str, ...]:
        """Names of the readers that have not released; `*` for cohorts that never spoke up."""
        names = [str(r) for bound in self.cohorts.values() for r in sorted(bound.owed)]
        return (*names, *["*"] * (self.lent.readers - len(self.cohorts)))

    def waits_for(self) -> tuple[str, ...]:
        """Name the same readers with the process that was last promised the blocks, if any was."""
        known = self.promises()
        names = [known[r].reader.name if r in known else r.name for b in self.cohorts.values() for r in sorted(b.owed)]
        return (*names, *["*"] * (self.lent.readers - len(self.cohorts)))

    def promises(self) -> dict[Reader, Promise]:
        """Return the last promise to each reader that is owed, or holds one."""
        return self.past | {promise.reader: promise for promise in self.held.values()}

    def readers(self) -> Iterator[tuple[Reader | None, str, Promise | None]]:
        """Say of every reader what it is at, and what it was promised last; None is a cohort that never spoke up.

        `unclaimed`, `granted`, `lapsed`, `retrying`, or how it released.
        """
        known = self.promises()
        owed = {reader for bound in self.cohorts.values() for reader in bound.owed}
        holding = {promise.reader for promise in self.held.values()} - owed
        for reader in (*sorted(owed), *sorted(holding)):
            promise = known.get(reader)
            if promise is None:
                yield reader, "unclaimed", None
            elif promise.pull_id in self.held:
                yield promise.reader, "granted", promise
            else:
                yield promise.reader, "retrying" if promise.pull_id in self.final else "lapsed", promise
        for reader, outcome in self.outcomes.items():
            if reader not in holding:
                yield reader, outcome.value, None
        for _ in range(self.lent.readers - len(self.cohorts)):
            yield None, "unclaimed", None

    def waits(self, now: float) -> str:
        """What this waits for, in words."""
        said: dict[str, list[str]] = {}
        for reader, state, promise in self.readers():
            if reader is None:
                continue
            if state == "granted" and self.state is L.ENDING:
                words = "still promised to"
            elif state == "granted" and promise is not None and now - promise.asked_at > self.lent.grant_s / 2:
                words = "claimed, but a renewal is overdue, by"
            else:
                words = _WAITS.get(state, "")
            said.setdefault(words, []).append(reader.name)
        if unknown := self.lent.readers - len(self.cohorts):
            more = "another decode engine" if unknown == 1 else f"{unknown} decode engines"
            said.setdefault(_WAITS["unclaimed"], []).append(more if self.cohorts or unknown > 1 else "anybody")
        return "; ".join(f"{words} {_few(said[words])}" for words in sorted(said) if words)

    @property
    def since(self) -> float:
        """Since when it is in this state."""
        begun = (at for at, text in reversed(self.history) if text.startswith("ending"))
        return next(begun, self.lent_at) if self.state is L.ENDING else self.lent_at

    def is_stuck(self, now: float) -> bool:
        """It has been lent for `warn_s`, or for twice as long as when this was last so."""
        if now < self.warn_at:
            return False
        while self.warn_at <= now:
            self.warn_at = self.lent_at + 2 * (self.warn_at - self.lent_at)
        return True

    def receive(self, message: Claim | Renew | Release, source: str, now: float) -> Granted | Refused | Ack:
        """Take a message from the process start `source` and answer it."""
        after = ON_EVENT[self.state][type(message)]
        answer = self._answer(message, source, now)
        self.state = after
        self._settle(now)
        return answer

    def revoke(self, now: float) -> None:
        """Stop granting; the blocks return when no promise runs any more."""
        self._stop(Revoke, Reason.REVOKED, now)

    def tick(self, now: float) -> None:
        """Let time pass."""
        if self.state is L.LENT and now >= self.expires_at:
            self._stop(Expire, Reason.EXPIRED, now)
        self._settle(now)

    def _stop(self, event: type[Expire] | type[Revoke], cause: Reason, now: float) -> None:
        after = ON_EVENT[self.state].get(event)
        if after is None:
            return
        if self.state is not after:
            self.cause = cause
            self._note((now, f"ending: {cause}, owed {len(self.owed())}, held {len(self.held)}"))
        self.state = after
        self._settle(now)

    def _note(self, entry: tuple[float, str]) -> None:
        # The last word is always said; what a reader can repeat is not kept without end.
        if len(self.history) < MAX_HISTORY or entry[1] == self.state:
            self.history.append(entry)

    def _owes(self) -> bool:
        return len(self.cohorts) < self.lent.readers or any(bound.owed for bound in self.cohorts.values())

    def _settle(self, now: float) -> None:
        for pull_id in [p for p, hold in self.held.items() if hold.until <= now]:
            # The promise has run out, so it cannot bind us; the reader knows, it counted faster.
            self.lapsed += 1
            lapsed = self.held.pop(pull_id)
            self.past[lapsed.reader] = lapsed
            late = f" ({now - lapsed.until:.1f} s ago)" if now - lapsed.until > NOTICED_S else ""
            self._note((now, f"grant lapsed to {lapsed.reader.name}, pull {pull_id}{late}"))
        if self.is_over or self.held or (self.state is L.LENT and self._owes()):
            return
        self.state, self.ended_at = WHEN_SETTLED[self.state][self.cause], now
        self._note((now, self.state))

    def _answer(self, message: Claim | Renew | Release, source: str, now: float) -> Granted | Refused | Ack:
        match message:
            case Claim():
                refusal = self._refuse_claim(message, source)
                return refusal or self._grant(message, self._reader(message.cohort, source), source, now)
            case Renew():
                hold = self.held.get(PullId(message.pull_id))
                if self.state is not L.LENT:
                    return _refused(message, self.cause)
                if hold is None or hold.source != source:
                    known = message.pull_id in self.final
                    return _refused(message, Reason.RELEASED_ALREADY if known else Reason.EXPIRED)
                return self._grant(message, hold.reader, source, now)
            case Release():
                return self._release(message, source, now)

    def _grant(self, ask: Claim | Renew, reader: Reader, source: str, now: float) -> Granted | Refused:
        left = min(self.lent.grant_s, ask.seconds, self.lent_at + self.lent.max_lease_s - now)
        seconds = math.floor(left * 1000) / 1000
        if seconds <= 0:
            return _refused(ask, Reason.EXPIRED, f"lent for longer than max_lease_s {self.lent.max_lease_s}")
        pull_id = PullId(ask.pull_id)
        hold = self.held.get(pull_id)
        if hold is None:
            self._note((now, f"granted to {reader.name}, pull {pull_id}"))
            self.held[pull_id] = Promise(pull_id, reader, source, now + seconds, now, now)
        else:
            hold.until, hold.asked_at = max(hold.until, now + seconds), now
        self.expires_at = max(self.expires_at, now + seconds)
        return Granted(ask.key, pull_id, ask.nonce, seconds, math.floor((now - self.lent_at) * 1e6) / 1e6)

    def _refuse_claim(self, claim: Claim, source: str) -> Refused | None:
        if self.state is not L.LENT:
            return _refused(claim, self.cause)
        if claim.digest != self.digest:
            return _refused(
                claim, Reason.BLOCKS_DIFFER, "the params name other blocks or tokens than were lent under this key"
            )
        if claim.pull_id in self.final:
            return _refused(claim, Reason.RELEASED_ALREADY)
        hold = self.held.get(PullId(claim.pull_id))
        if hold is not None and (hold.source != source or hold.reader != self._reader(claim.cohort)):
            return _refused(claim, Reason.FOREIGN_PULL)
        if hold is None and len(self.held) + len(self.final) + self.lapsed >= MAX_PULLS:
            return _refused(claim, Reason.OVERLOADED, f"more than {MAX_PULLS} attempts")
        if refusal := self._bind(claim):
            return refusal
        if self._reader(claim.cohort) not in self.cohorts[claim.cohort.id].owed:
            return _refused(claim, Reason.CONSUMED, "this reader has released the request before")
        return None

    def _release(self, release: Release, source: str, now: float) -> Ack | Refused:
        pull_id, reader = PullId(release.pull_id), self._reader(release.cohort, source)
        if pull_id in self.final:
            return Ack(release.key, pull_id)
        hold = self.held.get(pull_id)
        if hold is not None and (hold.source != source or hold.reader != reader):
            return _refused(release, Reason.FOREIGN_PULL)
        if len(self.final) >= MAX_PULLS:
            return _refused(release, Reason.OVERLOADED, f"more than {MAX_PULLS} attempts")
        if refusal := self._bind(release):
            return refusal
        self.held.pop(pull_id, None)
        self.final.add(pull_id)
        if release.outcome is not Outcome.RETRY:
            self.cohorts[reader.cohort].owed.discard(reader)
            self.outcomes.setdefault(reader, release.outcome)
        else:
            self.past[reader] = Promise(pull_id, reader, source, now, now if hold is None else hold.since, now)
        self._note((now, f"released by {reader.name}, pull {pull_id}: {release.outcome}"))
        return Ack(release.key, pull_id)

    def _bind(self, message: Claim | Release) -> Refused | None:
        """Bind the lease to the message's cohort, or say why not; a refusal leaves nothing behind."""
        cohort = message.cohort
        if message.request_id != self.lent.request_id:
            return _refused(message, Reason.WRONG_REQUEST, "the key belongs to another prefill request id")
        if cohort.tp_rank >= cohort.tp_size or cohort.pp_stage >= cohort.pp_size:
            return _refused(
                message,
                Reason.WRONG_COHORT,
                f"tp_rank {cohort.tp_rank} of {cohort.tp_size}, stage {cohort.pp_stage} of {cohort.pp_size} not served",
            )
        owed = owed_readers(self.lent.tp_rank, self.lent.tp_size, cohort.tp_size)
        if len(owed) * cohort.pp_size > MAX_READERS:
            return _refused(
                message, Reason.WRONG_COHORT, f"{len(owed)} x {cohort.pp_size} readers are more than {MAX_READERS}"
            )
        if cohort.tp_rank not in owed:
            return _refused(
                message,
                Reason.NOT_OWED,
                f"decode tp_rank {cohort.tp_rank} of {cohort.tp_size} does not answer for prefill tp_rank "
                f"{self.lent.tp_rank} of {self.lent.tp_size}",
            )
        sizes = (cohort.tp_size, cohort.pp_size)
        bound = self.cohorts.get(cohort.id)
        if bound is None:
            if len(self.cohorts) >= self.lent.readers:
                return _refused(
                    message,
                    Reason.WRONG_COHORT,
                    f"lent to {', '.join(map(repr, self.cohorts))}; lend with readers={self.lent.readers + 1} for more",
                )
            stages = range(cohort.pp_size)
            self.cohorts[cohort.id] = _Bound(sizes, {Reader(cohort.id, r, s) for r in owed for s in stages})
        elif bound.sizes != sizes:
            return _refused(
                message,
                Reason.WRONG_COHORT,
                f"{cohort.id!r} has (tp_size, pp_size) {bound.sizes}, not {sizes}",
            )
        return None

    @staticmethod
    def _reader(cohort: Cohort, source: str = "") -> Reader:
        return Reader(cohort.id, cohort.tp_rank, cohort.pp_stage, source)


_WAITS = {
    "granted": "claimed and renewed by",
    "lapsed": "claimed and no longer renewed by",
    "retrying": "to be tried again by",
    "unclaimed": "not claimed by",
}


def _few(names: list[str]) -> str:
    """Name a few of many."""
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _refused(message: Claim | Renew | Release, reason: Reason, detail: str = "") -> Refused:
    nonce = 0 if isinstance(message, Release) else message.nonce
    return Refused(message.key, message.pull_id, nonce, reason, detail)
