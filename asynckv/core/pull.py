"""One pull: a request whose KV a decode rank reads, from the first word to the last block returned.

    ANNOUNCED -> CONNECTING -> QUEUED <-> READING -> CONFIRMING -> NOTIFYING -> RELEASED
                      \\_________\\__________\\____________\\-> DRAINING -> NOTIFYING -> HELD -> RELEASED

Two promises end at different times. The **outcome** is bounded by the caller's deadline. The
**custody** of the blocks is not: NIXL cannot cancel a transfer, so blocks go back only when nothing
can write them any more. `DRAINING` waits for both, `HELD` for custody alone.

Bytes are *proven*, for every remote rank that was read, if

- every transfer ended well, and the clock read after observing the last one says less than the
  deadline of some grant: the moment before *that* claim was sent, plus the seconds granted, less a
  rate margin; or a claim sent after the last transfer was granted, which needs no clock; and
- the first transfer began after the blocks were lent. Params may travel ahead of the data, so a read
  can be too early; a grant says how long the blocks have been lent, and a read that cannot be shown
  to be younger is done again, once everything has landed.

One `Source` per remote rank that this reader answers for, read or not: each of them is released. A leg
once proven stays so: what becomes of its lease, or of its rank, cannot take the bytes back.

QUEUED is where a pull waits to be admitted (`core/admission.py`). It claims and renews from the moment
its ranks are known, so that a long queue costs no lease; and it goes back there, out of others' way,
while it has to wait for its request to be lent.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, Cohort, Outcome, Params, PullId, Reason, RequestId, TransferId
from asynckv.core.wire import Claim, Granted, Message, NotYet, Refused, Release, Renew
from asynckv.errors import LocalProtocolError
from asynckv.geometry.plan import BlockLists, PeerTables, Plan, ReadRequest

__all__ = ["Pull", "PullEvent", "PullState", "Source"]

RATE_MARGIN = 1e-3
"""Two hosts' clocks may run at rates that differ by this much (NTP slews by at most 500 ppm)."""

MIN_RENEW_S = 0.05
"""No peer can make us renew more often."""

MAX_ASKED_S = 86_400.0
"""No claim asks for more at once, however far the deadline is; renewals ask again."""

MAX_CLAIM_PAUSE_S = 2.0
"""Between two claims that are not answered, or answered `NotYet`."""

MAX_NONCES = 8
"""Transmissions per leg whose answers still count."""


class PullState(enum.StrEnum):
    """Where a pull stands."""

    ANNOUNCED = "announced"
    CONNECTING = "connecting"
    QUEUED = "queued"
    READING = "reading"
    CONFIRMING = "confirming"
    DRAINING = "draining"
    NOTIFYING = "notifying"
    HELD = "held"
    RELEASED = "released"


class PullEvent(enum.StrEnum):
    """What happens to a pull."""

    BEGUN = "begun"
    """The caller asked for the blocks to be filled."""
    ROUTED = "routed"
    """Every rank to read is ready, and it is known what is read of which."""
    PLANNED = "planned"
    """It is known which pieces are read of a rank."""
    ADMITTED = "admitted"
    """It may read now."""
    ANSWERED = "answered"
    """A claim, renewal or release was answered."""
    ENDED = "ended"
    """A transfer ended, or fell in doubt."""
    FAILED = "failed"
    """A plan was refused, a peer is lost, a claim was refused ..."""
    CANCELLED = "cancelled"
    TIME_UP = "time_up"


S, E = PullState, PullEvent
_ENDING = {E.ANSWERED, E.ENDED, E.FAILED, E.CANCELLED, E.TIME_UP}
ON_EVENT: Mapping[PullState, Mapping[PullEvent, PullState]] = {
    S.ANNOUNCED: {
        E.BEGUN: S.CONNECTING,
        E.ANSWERED: S.ANNOUNCED,
        E.FAILED: S.DRAINING,
        E.CANCELLED: S.DRAINING,
        E.TIME_UP: S.DRAINING,
    },
    S.CONNECTING: {
        E.ROUTED: S.QUEUED,
        E.ANSWERED: S.CONNECTING,
        E.FAILED: S.DRAINING,
        E.CANCELLED: S.DRAINING,
        E.TIME_UP: S.DRAINING,
    },
    S.QUEUED: {
        E.PLANNED: S.QUEUED,
        E.ADMITTED: S.READING,
        E.ANSWERED: S.QUEUED,
        E.FAILED: S.DRAINING,
        E.CANCELLED: S.DRAINING,
        E.TIME_UP: S.DRAINING,
    },
    S.READING: {
        E.ANSWERED: S.READING,
        E.ENDED: S.READING,
        E.FAILED: S.DRAINING,
        E.CANCELLED: S.DRAINING,
        E.TIME_UP: S.DRAINING,
    },
    S.CONFIRMING: {
        E.ANSWERED: S.CONFIRMING,
        E.FAILED: S.DRAINING,
        E.CANCELLED: S.DRAINING,
        E.TIME_UP: S.DRAINING,
    },
    S.DRAINING: dict.fromkeys(_ENDING, S.DRAINING),
    S.NOTIFYING: dict.fromkeys(_ENDING, S.NOTIFYING),
    S.HELD: dict.fromkeys(_ENDING, S.HELD),
    S.RELEASED: dict.fromkeys(_ENDING, S.RELEASED),
}
"""Event-triggered transitions. Late news is normal: after the outcome it changes custody at most."""

WHEN: Mapping[PullState, Mapping[str, PullState]] = {
    S.CONNECTING: {"nothing is to be read": S.READING},
    S.READING: {"every read is done": S.CONFIRMING, "it is not lent yet, and nothing runs": S.QUEUED},
    S.CONFIRMING: {"every read is proven": S.NOTIFYING, "a read began too early": S.QUEUED},
    S.DRAINING: {"nothing runs, or the time is up": S.NOTIFYING},
    S.NOTIFYING: {"every rank is told, no block is held": S.RELEASED, "every rank is told": S.HELD},
    S.HELD: {"no block is held": S.RELEASED},
}
"""State-triggered transitions: taken at once, to a fixed point, whatever event led there."""


class ReleaseState(enum.StrEnum):
    """How far one rank's release has come."""

    UNSENT = "unsent"
    SENT = "sent"
    SETTLED = "settled"


@dataclass(slots=True, eq=False)
class Source:
    """One pull's dealings with one remote rank."""

    tp_rank: int
    address: Address
    incarnation: str
    reads: bool
    """This rank is a source, as far as is known. What it is read *of* is known once all sources are met."""
    name: str
    """The rank, for people."""
    pp_stage: int = 0
    was_met: bool = False
    """It was asked what it holds, or is being asked."""

    map: PeerTables | None = None
    """What is read of it, once all sources are met."""
    plan: Plan | None = None
    next_post: ReadRequest | None = None
    """What to post next; None once everything is posted."""
    posts: Iterator[ReadRequest] = field(default_factory=lambda: iter(()))
    """What follows it."""
    queued: bool = False
    """For the node's post queue only."""
    is_not_yet: bool = False
    """The rank has said that the request is not lent yet: reading now would be in vain."""
    not_yet_at: float = -math.inf
    """When it said so last."""
    running: set[TransferId] = field(default_factory=set)
    doubtful: set[TransferId] = field(default_factory=set)
    first_posted_at: float = math.inf
    done_at: float = -math.inf
    nonce_when_done: int = 0
    bytes_read: int = 0
    """Landed so far."""

    nonces: dict[int, float] = field(default_factory=dict)
    """Transmission -> the moment before it was sent."""
    granted_nonce: int = 0
    """The newest transmission that was granted."""
    covered_until: float = -math.inf
    lent_before: float = math.inf
    """The blocks were lent by then, on our clock."""
    confirmed: bool = False
    """A claim sent after the last read was granted."""
    proven: bool = False
    """The bytes are what was lent."""
    claim_at: float = math.inf
    """When to claim or renew next."""
    claims: int = 0
    """Sent since the last answer."""

    release: ReleaseState = ReleaseState.UNSENT
    release_at: float = math.inf
    releases: int = 0

    @property
    def is_done(self) -> bool:
        """Everything that is to be read has landed."""
        return self.plan is not None and self.next_post is None and not self.running and not self.doubtful

    @property
    def is_settled(self) -> bool:
        """The rank was told, or need not be."""
        return self.release is ReleaseState.SETTLED

    @property
    def is_early(self) -> bool:
        """Granted, but the first read cannot be shown to be younger than the lease."""
        return self.first_posted_at <= self.lent_before < math.inf

    def take_post(self) -> ReadRequest:
        """Return the next post and look one further, so that the last one is known as such."""
        post = self.next_post
        assert post is not None
        self.next_post = next(self.posts, None)
        return post

    @property
    def where(self) -> str:
        """The rank and its address, for people."""
        return f"{self.name} ({self.address})"

    def prove(self) -> None:
        """Note it if the bytes are what was lent: nothing that comes later changes that."""
        if self.is_done:
            timely = self.lent_before < math.inf and not self.is_early
            covered = self.confirmed or self.done_at < self.covered_until
            self.proven = self.first_posted_at == math.inf or (timely and covered)


@dataclass(slots=True, eq=False)
class Pull:
    """The state machine of one attempt to read one request."""

    pull_id: PullId
    request_id: RequestId
    params: Params
    cohort: Cohort
    digest: bytes
    sources: list[Source]
    called_at: float
    deadline: float
    drain_s: float
    claim_retry_s: float
    release_retry_s: float
    release_timeout_s: float
    held_s: float
    max_post_bytes: int
    max_post_descriptors: int
    warn_s: float = math.inf
    """In one state for longer, and again at each doubling, it is worth a word."""
    priority: int = 0
    """The smaller goes first, as in vLLM."""
    attempt: int = 1
    """Which attempt at the caller's request this is."""
    retryable: frozenset[Reason] = frozenset()
    """Failures after which another attempt follows, so that the reader is not discharged."""

    state: PullState = S.ANNOUNCED
    lists: BlockLists | None = None
    """What to fill, and from which blocks; None while only announced."""
    reason: Reason | None = None
    """The outcome, once there is one (COMPLETE or why not)."""
    detail: str = ""
    failure: tuple[Reason, str] | None = None
    is_last: bool = True
    """If it fails no other attempt follows: the reader is discharged."""
    is_announced: bool = False
    """Nobody has asked for the blocks yet."""
    is_hit: bool = False
    """Nothing is to be filled: everybody is only released."""
    unmet: tuple[Reason, str] | None = None
    """Why a rank that might have been read was not met."""
    drain_by: float = math.inf
    published_at: float = math.inf
    history: list[tuple[float, str]] = field(default_factory=list)
    begun_at: float = math.inf
    ready_at: float = math.inf
    admitted_at: float = math.inf
    planned_at: float = math.inf
    posted_at: float = math.inf
    read_at: float = -math.inf
    failed_at: float = math.inf
    failed_in: str = ""
    """The phase in which it failed."""
    warn_at: float = math.inf
    """When to look whether it has been in one state for too long."""
    released_at: float = math.inf
    post_s: float = 0.0
    detect_s: float = 0.0
    num_posted: int = 0
    num_descriptors_posted: int = 0
    rereads: int = 0
    scheduled_at: float = math.inf
    """For the node's timers only."""
    num_traced: int = 0
    """History entries that were reported one by one."""
    is_told: bool = False
    """The outcome was handed over."""
    is_returned: bool = False
    """The blocks were handed back."""
    is_retired: bool = False
    """They were held for so long that nobody waits for them any more."""
    is_discharge: bool = False
    """It only says that its reader needs the request no more; there is no caller."""
    not_before: float = -math.inf
    """Another attempt would meet a rank in its back-off until then."""
    arrival: int = 0
    """Its place among all pulls, by when they were asked for."""

    def __post_init__(self) -> None:
        self.history.append((self.called_at, self.state))
        self.warn_at = self.called_at + self.warn_s

    # -- questions ---------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Nothing is owed to anybody."""
        return self.state is S.RELEASED

    @property
    def is_queued(self) -> bool:
        """It could read, if it were admitted."""
        return self.state is S.QUEUED and not self.is_ahead

    @property
    def is_ahead(self) -> bool:
        """A rank has said that the request is not lent yet: reading now would be in vain."""
        for leg in self.sources:  # asked often: no generator
            if leg.is_not_yet and leg.reads:
                return True
        return False

    @property
    def is_answered(self) -> bool:
        """Every rank that is to be read has granted the request."""
        return all(leg.covered_until > -math.inf for leg in self.sources if leg.reads)

    def may_post(self, leg: Source) -> bool:
        """This rank has something to post now."""
        return leg.next_post is not None and not leg.is_not_yet and self.state is S.READING

    @property
    def holds_blocks(self) -> bool:
        """Some transfer may still write our blocks."""
        for leg in self.sources:
            if leg.running or leg.doubtful:
                return True
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes that the plans cover."""
        return sum([leg.plan.num_bytes for leg in self.sources if leg.plan is not None])

    @property
    def num_descriptors(self) -> int:
        """Descriptors before merging."""
        return sum([leg.plan.num_descriptors for leg in self.sources if leg.plan is not None])

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do."""
        match self.state:
            case S.RELEASED:
                return math.inf
            case S.HELD:
                return min(self.retire_at, self.warn_at)
            case S.NOTIFYING:
                when = min(self.published_at + self.release_timeout_s, self.retire_at, self.warn_at)
                for leg in self.sources:
                    when = min(when, leg.release_at)
                return when
            case S.DRAINING:
                return min(self.drain_by, self.deadline, self._claims_due, self.warn_at)
            case _:
                return min(self.deadline, self._claims_due, self.warn_at)

    @property
    def retire_at(self) -> float:
        """When blocks that something may still write are given up."""
        held = not self.is_retired and self.begun_at < math.inf and self.holds_blocks
        return self.published_at + self.held_s if held else math.inf

    @property
    def until(self) -> float:
        """When this state ends at the latest; infinite if nothing bounds it."""
        if self.state is S.DRAINING:
            return min(self.drain_by, self.deadline)
        if self.is_told:
            return self.published_at + self.release_timeout_s if self.state is S.NOTIFYING else self.retire_at
        return self.deadline

    @property
    def since(self) -> float:
        """Since when it has been in this state."""
        return next(at for at, text in reversed(self.history) if text is self.state)

    def is_stuck(self, now: float) -> bool:
        """It has been in one state for `warn_s`, or for twice as long as when this was last so."""
        if now < self.warn_at:
            return False
        since = self.since
        self.warn_at = since + self.warn_s
        if now < self.warn_at:
            return False  # it has moved on
        while self.warn_at <= now:
            self.warn_at = since + 2 * (self.warn_at - since)
        return True

    @property
    def held_as(self) -> tuple[str, float]:
        """Why the blocks are held, in a word, and when that ends at the latest."""
        if self.is_told:
            return "retired" if self.is_retired else "quarantined", self.retire_at
        return self.state.value, self.deadline

    @property
    def _claims_due(self) -> float:
        when = math.inf
        for leg in self.sources:
            if leg.claim_at < when:
                when = leg.claim_at
        return when

    # -- events ------------------------------------------------------------------------------------

    def begin(self, lists: BlockLists, deadline: float, now: float) -> None:
        """Attach the blocks to fill; from here on the caller waits."""
        after = self._allow(E.BEGUN)
        self.lists, self.deadline, self.called_at, self.begun_at = lists, deadline, now, now
        self.warn_at = now + self.warn_s
        self.is_announced = False
        if lists.is_empty:
            self.is_hit = True
            for leg in self.sources:
                leg.reads = False
        self._enter(after, now)
        self._advance(now)

    def routed(self, now: float) -> None:
        """Every rank to read is ready, and it is known what is read of which."""
        self._enter(self._allow(E.ROUTED), now)
        self.ready_at = min(self.ready_at, now)
        self._advance(now)

    def planned(self, leg: Source, plan: Plan) -> None:
        """These pieces are read of a rank."""
        self._allow(E.PLANNED)
        leg.plan = plan
        self._start_posts(leg)
        if leg.next_post is None:
            leg.claim_at = math.inf

    def admitted(self, now: float) -> None:
        """It may read now; every rank to read is planned."""
        after = self._allow(E.ADMITTED)
        assert all(leg.plan is not None for leg in self.sources if leg.reads)
        self.planned_at = min(self.planned_at, now)
        self.warn_at = now + self.warn_s
        self._enter(after, now)
        self._advance(now)

    def _start_posts(self, leg: Source) -> None:
        assert leg.plan is not None
        leg.posts = leg.plan.posts(self.max_post_bytes, self.max_post_descriptors)
        leg.next_post = next(leg.posts, None)

    def want_claim(self, leg: Source, now: float) -> None:
        """A rank that will be read is ready: claim at once, beside the read."""
        if (
            self.state in (S.ANNOUNCED, S.CONNECTING, S.QUEUED, S.READING)
            and leg.claim_at == math.inf
            and not leg.nonces
        ):
            leg.claim_at = now

    def answered(self, leg: Source, answer: Granted | NotYet | Refused, now: float) -> bool:
        """An answer to a claim or renewal; False if it changed nothing (stale, repeated, forged)."""
        after = self._allow(E.ANSWERED)
        sent_at = leg.nonces.get(answer.nonce)
        if sent_at is None or after in (S.NOTIFYING, S.HELD, S.RELEASED):
            return False
        self._enter(after, now)
        match answer:
            case Granted():
                self._granted(leg, answer, sent_at, now)
            case NotYet():
                leg.is_not_yet, leg.not_yet_at = leg.covered_until == -math.inf, now
                self._note(now, f"{leg.name} not yet")
            case Refused():
                self._refused(leg, answer, now)
            case _:
                assert_never(answer)
        self._advance(now)
        return True

    def posted(self, leg: Source, transfer_id: TransferId, num_descriptors: int, before: float) -> None:
        """A transfer is about to be posted; `before` was read before that."""
        leg.running.add(transfer_id)
        leg.first_posted_at = min(leg.first_posted_at, before)
        if not self.num_posted:
            self.posted_at = before
        self.num_posted += 1
        self.num_descriptors_posted += num_descriptors

    def ended(self, leg: Source, news: TransferEnded, now: float) -> None:
        """News of a transfer; `now` was read after it was observed."""
        transfer_id = news.transfer_id
        after = self._allow(E.ENDED)
        if news.ending is Ending.IN_DOUBT:
            leg.doubtful.add(transfer_id)
        else:
            leg.doubtful.discard(transfer_id)
        leg.running.discard(transfer_id)
        self._enter(after, now)
        is_done = news.ending is Ending.DONE
        if is_done and leg.is_done:
            leg.done_at = now
            leg.nonce_when_done = max(leg.nonces, default=0)
            self.read_at = now
        elif not is_done:
            reason = Reason.PEER_LOST if news.peer_lost else Reason.READ_FAILED
            self._fail(reason, f"a transfer from {leg.where} failed: {news.cause}", now)
        self._advance(now)

    def fail(self, reason: Reason, detail: str, now: float) -> None:
        """Something else went wrong; the first cause is the one that counts."""
        self._enter(self._allow(E.FAILED), now)
        self._fail(reason, detail, now)
        self._advance(now)

    def cancel(self, now: float) -> None:
        """The caller wants it no more."""
        self._enter(self._allow(E.CANCELLED), now)
        self._fail(Reason.CANCELLED, "cancelled", now)
        self._advance(now)

    def settled(self, leg: Source, note: str, now: float) -> None:
        """One rank needs no release any more: acknowledged, refused, or gone."""
        if leg.release is not ReleaseState.SETTLED:
            self._note(now, f"release {leg.name}: {note}")
        leg.release, leg.release_at, leg.claim_at = ReleaseState.SETTLED, math.inf, math.inf
        self._advance(now)

    def tick(self, now: float) -> None:
        """Let time pass."""
        if now >= self.retire_at:
            self.is_retired = True
            self._note(now, "blocks retired")
        if self.state in (S.RELEASED, S.HELD):
            return
        if self.state is S.NOTIFYING:
            if now >= self.published_at + self.release_timeout_s:
                for leg in self.sources:
                    if leg.release is not ReleaseState.SETTLED:
                        self.settled(leg, "given up, the lease will expire", now)
            return
        if now >= self.deadline and self.failure is None:
            reason, waiting = self._waiting_for(now)
            self._enter(self._allow(E.TIME_UP), now)
            self._fail(reason, f"{waiting} when the deadline passed", now)
        self._advance(now)

    # -- messages that are due ---------------------------------------------------------------------

    def due_claim(self, leg: Source, nonce: int, now: float) -> Claim | Renew | None:
        """The claim or renewal to send now, if one is due; `now` was read before it is sent."""
        if now < leg.claim_at:
            return None
        if not leg.reads:
            leg.claim_at = math.inf
            return None
        if self.state in (S.NOTIFYING, S.HELD, S.RELEASED):
            leg.claim_at = math.inf
            return None
        leg.nonces[nonce] = now
        while len(leg.nonces) > MAX_NONCES:
            del leg.nonces[next(iter(leg.nonces))]
        leg.claims += 1
        leg.claim_at = now + min(self.claim_retry_s * 2 ** min(leg.claims - 1, 6), MAX_CLAIM_PAUSE_S)
        seconds = min(max(min(self.drain_by, self.deadline) - now, 0.001), MAX_ASKED_S)
        if now < leg.covered_until:
            return Renew(self.params.key, self.pull_id, nonce, seconds)
        return Claim(self.params.key, self.params.request_id, self.cohort, self.pull_id, nonce, self.digest, seconds)

    def due_release(self, leg: Source, now: float) -> Release | None:
        """The release to send now, if one is due."""
        if self.state not in (S.NOTIFYING, S.HELD) or leg.release is ReleaseState.SETTLED or now < leg.release_at:
            return None
        leg.release = ReleaseState.SENT
        leg.releases += 1
        leg.release_at = now + min(self.release_retry_s * 2 ** min(leg.releases - 1, 6), 5.0)
        return Release(self.params.key, self.params.request_id, self.cohort, self.pull_id, self._outcome)

    @property
    def _outcome(self) -> Outcome:
        match self.reason:
            case Reason.COMPLETE:
                return Outcome.COMPLETE
            case reason if not self.is_last or reason in self.retryable:
                return Outcome.RETRY
            case reason if self.is_announced and reason not in (Reason.CANCELLED, Reason.TIMEOUT):
                # Only announced: whoever announced it has not given up, and may still ask for the blocks.
                return Outcome.RETRY
            case Reason.CANCELLED:
                return Outcome.CANCELLED
            case _:
                return Outcome.FAILED

    def due(self, next_nonce: Iterator[int], now: float) -> list[tuple[Source, Message]]:
        """Every message that is due now, per leg."""
        out: list[tuple[Source, Message]] = []
        for leg in self.sources:
            if now >= leg.claim_at and (claim := self.due_claim(leg, next(next_nonce), now)):
                out.append((leg, claim))
            if now >= leg.release_at and (release := self.due_release(leg, now)):
                out.append((leg, release))
        return out

    # -- inside ------------------------------------------------------------------------------------

    def _allow(self, event: PullEvent) -> PullState:
        after = ON_EVENT[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.name} while pull {self.pull_id} is {self.state.name}")
        return after

    def _enter(self, after: PullState, now: float) -> None:
        if after is not self.state:
            self.state = after
            self.history.append((now, after))

    def _note(self, now: float, text: str) -> None:
        if len(self.history) < 256:
            self.history.append((now, text))

    def _granted(self, leg: Source, answer: Granted, sent_at: float, now: float) -> None:
        deadline = sent_at + answer.seconds * (1 - RATE_MARGIN)
        leg.covered_until = max(leg.covered_until, deadline)
        leg.granted_nonce = max(leg.granted_nonce, answer.nonce)
        leg.is_not_yet = False
        # Params that left after the KV was written can only be read too late, never too early; and what
        # is granted before the first post needs no clock either.
        known = self.params.written or leg.first_posted_at == math.inf
        began = now - answer.lent_for_s * (1 - RATE_MARGIN)
        leg.lent_before = -math.inf if known else min(leg.lent_before, began)
        if leg.is_done and answer.nonce > leg.nonce_when_done:
            leg.confirmed = True
        newest = answer.nonce == next(reversed(leg.nonces))
        if newest or deadline > now:
            leg.claims = 0
            leg.claim_at = max(sent_at + min(self.params.renew_s, answer.seconds / 2), now + MIN_RENEW_S)
        self._note(now, f"{leg.name} granted {answer.seconds:g} s")

    def _refused(self, leg: Source, answer: Refused, now: float) -> None:
        if answer.nonce < leg.granted_nonce:
            return  # late, or repeated: what was asked after it was granted
        covered = leg.covered_until > -math.inf
        if now < leg.covered_until and answer.reason in (Reason.REVOKED, Reason.EXPIRED):
            # Nothing is granted any more, but what was promised stands: read on until it runs out.
            leg.claim_at = leg.covered_until
            return
        if covered and answer.reason is Reason.EXPIRED and leg.nonces[answer.nonce] < leg.covered_until:
            # A renewal that crossed its own deadline. The lease itself may stand: claim anew, once.
            leg.covered_until, leg.confirmed, leg.claim_at = -math.inf, False, now
            return
        leg.claim_at = math.inf
        if leg.proven or not leg.reads:
            self._note(now, f"{leg.name} grants no more: {answer.reason}")
            return
        reason = Reason.LEASE_LOST if leg.lent_before < math.inf else answer.reason
        text = f"{leg.where} refused: {answer.reason}"
        self._fail(reason, f"{text} ({answer.detail})" if answer.detail else text, now)

    def _fail(self, reason: Reason, detail: str, now: float) -> None:
        if self.failure is None and self.reason is None:
            self.failure = (reason, detail)
            self.failed_at, self.failed_in = now, self._phase
            is_late = reason in (Reason.TIMEOUT, Reason.NOT_LENT_YET)
            self.drain_by = now if is_late else min(self.deadline, now + self.drain_s)
            self._note(now, f"{reason}: {detail}")
            if self.state is not S.DRAINING:
                self._enter(S.DRAINING, now)

    def waits(self, now: float) -> str:
        """What this waits for, in words."""
        match self.state:
            case S.DRAINING | S.HELD:
                return "a transfer may still write the blocks, from " + self._names(
                    lambda leg: bool(leg.running or leg.doubtful)
                )
            case S.NOTIFYING:
                return "the release is not acknowledged by " + self._names(lambda leg: not leg.is_settled)
            case S.ANNOUNCED if any(leg.covered_until > now for leg in self.sources):
                renewed = self._names(lambda leg: leg.covered_until > now)
                return f"announced and never pulled; its lease is renewed at {renewed}"
            case S.RELEASED:
                return ""
            case _:
                return self._waiting_for(now)[1]

    @property
    def _phase(self) -> str:
        """What this is at, or was when it began to drain, by the names of `asynckv.observe.log.phases`."""
        states = (text for _, text in reversed(self.history) if isinstance(text, S) and text is not S.DRAINING)
        match next(states, S.ANNOUNCED):
            case S.ANNOUNCED:
                return "announced"
            case S.CONNECTING:
                return "handshake"
            case S.QUEUED if self.admitted_at < math.inf and self.planned_at == math.inf:
                return "plan"
            case S.READING if self.posted_at < math.inf:
                return "read"
            case S.CONFIRMING:
                return "confirm"
            case _:
                return "queue"

    def _waiting_for(self, now: float) -> tuple[Reason, str]:
        """Say what a pull waits for, and why it fails if that does not come in time."""
        if self.state is S.ANNOUNCED:
            return Reason.TIMEOUT, "announced and never pulled"
        if self.state is S.CONNECTING:
            return Reason.TIMEOUT, "no handshake with " + self._names(lambda leg: leg.reads and leg.map is None)
        ahead = [leg for leg in self.sources if leg.reads and leg.is_not_yet]
        not_lent = ", ".join(leg.where + _since(now - leg.not_yet_at) for leg in ahead)
        if self.state is S.READING and any(leg.running for leg in self.sources):
            reading = "still reading from " + self._names(lambda leg: leg.reads and bool(leg.running))
            return Reason.TIMEOUT, f"{reading}, and not lent yet by {not_lent}" if ahead else reading
        if ahead:
            return Reason.NOT_LENT_YET, f"not lent yet by {not_lent}"
        if silent := self._names(lambda leg: leg.reads and leg.claims > 0 and leg.covered_until == -math.inf, ""):
            return Reason.TIMEOUT, f"no answer to the claim from {silent}"
        if self.state is S.QUEUED:
            return Reason.TIMEOUT, "still queued behind others"
        if self.state is S.READING:
            return Reason.TIMEOUT, "still reading from " + self._names(lambda leg: leg.reads and not leg.is_done)
        return Reason.TIMEOUT, "no proof of the lease from " + self._names(lambda leg: leg.reads and not leg.proven)

    def _names(self, chosen: Callable[[Source], bool], nobody: str = "nobody") -> str:
        return ", ".join(leg.where for leg in self.sources if chosen(leg)) or nobody

    def _advance(self, now: float) -> None:
        """Take state-triggered transitions to a fixed point."""
        state = self.state
        if state is S.QUEUED or state is S.RELEASED:
            return
        for leg in self.sources:
            if not leg.proven:
                leg.prove()
        while self._step(now):
            pass

    def _step(self, now: float) -> bool:
        match self.state:
            case S.READING:
                if self._has_read:
                    self._enter(S.CONFIRMING, now)
                    return True
                if self.is_ahead and not any(leg.running for leg in self.sources):
                    # Others may be lent already, and nobody lends anything while they wait behind this one.
                    self._enter(S.QUEUED, now)
            case S.CONFIRMING:
                return self._confirm(now)
            case S.NOTIFYING:
                if self._has_told:
                    self._enter(S.HELD if self.holds_blocks else S.RELEASED, now)
                    self.released_at = now
                    return True
            case S.CONNECTING:
                # Nobody to read is the end only if nothing is wanted.
                if self.is_hit and not any(leg.reads for leg in self.sources):
                    self._enter(S.READING, now)
                    return True
            case S.DRAINING:
                if now >= self.drain_by or not any(leg.running for leg in self.sources):
                    assert self.failure is not None
                    self._publish(*self.failure, now)
                    return True
            case S.HELD:
                if not self.holds_blocks:
                    self._enter(S.RELEASED, now)
            case S.ANNOUNCED | S.QUEUED | S.RELEASED:
                pass
            case _:
                assert_never(self.state)
        return False

    @property
    def _has_read(self) -> bool:
        for leg in self.sources:
            if leg.reads and not leg.is_done:
                return False
        return True

    @property
    def _has_told(self) -> bool:
        for leg in self.sources:
            if leg.release is not ReleaseState.SETTLED:
                return False
        return True

    def _confirm(self, now: float) -> bool:
        sources = [leg for leg in self.sources if leg.reads and not leg.proven]
        if not sources:
            self._publish(Reason.COMPLETE, "", now)
            return True
        early = [leg for leg in sources if leg.is_early]
        for leg in early:
            self._note(now, f"{leg.name} read before it was lent, reading again")
            leg.first_posted_at, leg.done_at, leg.confirmed, leg.bytes_read = math.inf, -math.inf, False, 0
            leg.lent_before = -math.inf  # granted by now, so whatever begins from here on is late enough
            self._start_posts(leg)
            self.rereads += 1
        if early:
            self._enter(S.QUEUED, now)
            return False
        for leg in sources:
            # Too late for every grant so far: ask once more, now that everything has landed.
            asked = bool(leg.nonces) and next(reversed(leg.nonces)) > leg.nonce_when_done
            if not asked and (leg.claims == 0 or leg.covered_until > -math.inf):
                leg.claim_at = min(leg.claim_at, now)
        return False

    def _publish(self, reason: Reason, detail: str, now: float) -> None:
        self.reason, self.detail, self.published_at = reason, detail, now
        self.warn_at = now + self.warn_s
        self._enter(S.NOTIFYING, now)
        for leg in self.sources:
            leg.claim_at, leg.next_post = math.inf, None
            if leg.release is not ReleaseState.SETTLED:
                leg.release_at = now


def _since(seconds: float) -> str:
    """Say how old an answer is, if it should have been repeated since."""
    return f" (as it said {seconds:.0f} s ago, and nothing since)" if seconds > 2 * MAX_CLAIM_PAUSE_S else ""
