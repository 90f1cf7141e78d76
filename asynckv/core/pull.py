"""One attempt to read one request, from the first message to the last returned block.

    ANNOUNCED -> CONNECTING -> QUEUED -> READING -> CONFIRMING -> NOTIFYING -> RELEASED

is the usual path. A failure before NOTIFYING leads to DRAINING, then NOTIFYING. QUARANTINED follows NOTIFYING if a
transfer may still write. `docs/structure.md` has all paths, drawn from the tables.

The **outcome** is bounded by the caller's deadline. The **custody** of the blocks is not, because NIXL cannot cancel a
transfer: blocks go back only when nothing can write them any more. DRAINING waits for outcome and custody, QUARANTINED
for custody alone.

`ON_EVENT` and `WHEN` are the machine, and nothing else changes the state. A transition returns its effects on others,
as `Effect`s, in order.

A pull claims and renews from the moment its ranks are known, so that a long queue (`core/flow.py`) costs no lease. It
goes back to QUEUED while its request is not lent yet, so that others can read.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import Struct

from asynckv.config import PullConfig
from asynckv.core import notes
from asynckv.core.events import ENDING, TransferEnded
from asynckv.core.routes import Route, refusal
from asynckv.core.source import MAX_CLAIM_PAUSE_S, RELEASE, ROLE, UNBLAMED, Blame, Source
from asynckv.core.types import Cohort, How, KVTransferParams, Outcome, PullId, Reason, RequestId, TransferId, members
from asynckv.core.wire import Claim, Granted, Message, NotYet, Refused, Release, Renew
from asynckv.errors import LocalProtocolError, RemoteTooShort
from asynckv.geometry.blocks import BlockIds
from asynckv.geometry.look import Difference, Look, differing, looks
from asynckv.geometry.pairing import BlockLists, common_prefix
from asynckv.geometry.plan import Plan, ReadRequest
from asynckv.geometry.tables import PeerTables

MAX_ASKED_S = 86_400.0  # seconds that one claim asks for at most; if the deadline is later, renewals ask again
MAX_HISTORY = 256
MAX_RELEASE_PAUSE_S = 5.0  # longest pause between two releases that are not acknowledged


class Kind(enum.Enum):
    ANNOUNCEMENT = enum.auto()
    """Meets ranks and renews the lease. It becomes one of the next two kinds when its caller asks for the blocks."""
    PULL = enum.auto()  # fills blocks
    HIT = enum.auto()  # fills nothing, and only releases all ranks
    PIECE = enum.auto()  # fills blocks with a piece; its caller hears nothing of it (`core/head_start.py`)
    DISCHARGE = enum.auto()  # tells all ranks that no attempt follows after all; it has no caller


class PullState(enum.StrEnum):
    ANNOUNCED = "announced"
    CONNECTING = "connecting"
    QUEUED = "queued"
    READING = "reading"
    CONFIRMING = "confirming"
    DRAINING = "draining"
    NOTIFYING = "notifying"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class PullEvent(enum.StrEnum):
    STARTED = "started"  # the caller gave the blocks to fill
    ROUTED = "routed"  # every rank to read is ready, and the reads are assigned to ranks
    ADMITTED = "admitted"  # there is room to read
    POSTED = "posted"  # a transfer is about to be posted
    ANSWERED = "answered"  # a claim or renewal was answered before the outcome
    ENDED = "ended"  # a transfer ended well
    TRANSFER_FAILED = "transfer_failed"  # a transfer failed, or fell in doubt
    FAILED = "failed"
    """A claim or a plan was refused, a peer was lost, the deadline has passed, or the caller needs nothing any more."""
    SETTLED = "settled"  # a rank acknowledged or refused the release, or is gone


class Effect(enum.Enum):
    QUEUE = enum.auto()
    POST = enum.auto()
    DETACH = enum.auto()  # staged reads that still run place nothing any more, so the blocks need not wait for them
    LEAVE = enum.auto()  # the pull needs no room and no place in the queue any more
    SEND = enum.auto()
    RETURN = enum.auto()
    TELL = enum.auto()
    FINISH = enum.auto()  # the pull is over: every rank is settled, and every block has returned


S, E, DO, KIND = members(PullState), members(PullEvent), members(Effect), members(Kind)

ON_EVENT: Mapping[PullState, Mapping[PullEvent, PullState]] = {
    S.ANNOUNCED: {E.FAILED: S.DRAINING, E.ANSWERED: S.ANNOUNCED, E.STARTED: S.CONNECTING},
    S.CONNECTING: {E.FAILED: S.DRAINING, E.ANSWERED: S.CONNECTING, E.ROUTED: S.QUEUED},
    S.QUEUED: {E.FAILED: S.DRAINING, E.ANSWERED: S.QUEUED, E.ADMITTED: S.READING},
    S.READING: {
        E.FAILED: S.DRAINING,
        E.ANSWERED: S.READING,
        E.POSTED: S.READING,
        E.ENDED: S.READING,
        E.TRANSFER_FAILED: S.DRAINING,
    },
    S.CONFIRMING: {E.FAILED: S.DRAINING, E.ANSWERED: S.CONFIRMING},
    S.DRAINING: dict.fromkeys((E.ANSWERED, E.ENDED, E.TRANSFER_FAILED, E.FAILED), S.DRAINING),
    S.NOTIFYING: dict.fromkeys((E.SETTLED, E.ENDED, E.TRANSFER_FAILED), S.NOTIFYING),
    S.QUARANTINED: dict.fromkeys((E.SETTLED, E.ENDED, E.TRANSFER_FAILED), S.QUARANTINED),
    S.RELEASED: {},
}
"""Events that each state takes. Most only add knowledge, and `WHEN` decides what follows. Late events are normal."""


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """A condition on a pull at some time."""

    words: str
    holds: Callable[[Pull, float], bool]

    def __str__(self) -> str:
        return self.words


def _runs(pull: Pull) -> bool:
    for source in pull.sources:  # no generators here, because these are called often
        if source.running:
            return True
    return False


def _is_told(pull: Pull, _: float) -> bool:
    for source in pull.sources:
        if source.release is not RELEASE.SETTLED:
            return False
    return True


def _began_early(pull: Pull, _: float) -> bool:
    for source in pull.sources:
        if source.was_early:
            return True
    return False


def _all_landed(pull: Pull, _: float) -> bool:
    for source in pull.sources:
        if source.role is ROLE.READ and not source.has_landed:
            return False
    return True


def _all_proven(pull: Pull, _: float) -> bool:
    for source in pull.sources:
        if source.role is ROLE.READ and not source.proven:
            return False
    return True


EMPTY = Fact("nothing is wanted: a full prefix hit", lambda pull, _: pull.kind is KIND.HIT)
LANDED = Fact("every read has landed", _all_landed)
UNLENT = Fact("it is not lent yet, and nothing runs", lambda pull, _: pull.not_lent_yet and not _runs(pull))
PROVEN = Fact("every read is proven", _all_proven)
EARLY = Fact("a read began before the request was lent", _began_early)
DRAINED = Fact("nothing runs, or the time is up", lambda pull, now: now >= pull.drain_by or not _runs(pull))
OVER = Fact(
    "every rank is told, and nothing can write the blocks",
    lambda pull, now: _is_told(pull, now) and not pull.holds_blocks,
)
TOLD = Fact("every rank is told", _is_told)
FREE = Fact("nothing can write the blocks any more", lambda pull, _: not pull.holds_blocks)

WHEN: Mapping[PullState, Mapping[Fact, PullState]] = {
    S.ANNOUNCED: {},
    S.CONNECTING: {EMPTY: S.NOTIFYING},
    S.QUEUED: {},
    # UNLENT makes room, or two requests may wait for each other for ever: before it can compute request B, the prefill
    # engine may need the blocks of request A, which is lent, and queued here behind B.
    S.READING: {LANDED: S.CONFIRMING, UNLENT: S.QUEUED},
    S.CONFIRMING: {PROVEN: S.NOTIFYING, EARLY: S.QUEUED},
    S.DRAINING: {DRAINED: S.NOTIFYING},
    S.NOTIFYING: {OVER: S.RELEASED, TOLD: S.QUARANTINED},
    S.QUARANTINED: {FREE: S.RELEASED},
    S.RELEASED: {},
}
"""Facts that act at once. The first that holds is taken, until none holds."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A caller's request, as `Engine.pull` takes it. It is the same for all attempts."""

    request_id: str
    groups: Sequence[tuple[int, BlockIds]]
    params: KVTransferParams
    cohort_id: str = ""
    hashes: Sequence[str] | None = None
    num_tokens: int | None = None
    is_last: bool = True
    priority: int = 0

    def wanted_tokens(self) -> int:
        """Return how many tokens are read, from the prompt's start: those on which both sides' hashes agree."""
        params = self.params
        wanted = params.num_tokens if self.num_tokens is None else self.num_tokens
        if not 0 <= wanted <= params.num_tokens:
            raise RemoteTooShort(
                f"remote too short: {wanted} tokens are wanted, but the prefill side offers {params.num_tokens}",
                request_id=self.request_id,
                reason=Reason.REMOTE_TOO_SHORT,
            )
        if self.hashes is None:
            return wanted
        if not params.hash_tokens:
            raise refusal(
                self.request_id,
                f"hashes were given to compare, but the params of request {params.request_id[:80]!r} carry none; "
                f"give hashes and hash_tokens to make_params",
            )
        return common_prefix(self.hashes, params.hashes, params.hash_tokens, wanted)


class Measures(Struct, gc=False):
    """Times and amounts of a pull that are told, and steer nothing. Each time is infinite until it has come."""

    ready_at: float = math.inf
    admitted_at: float = math.inf
    planned_at: float = math.inf
    posted_at: float = math.inf
    read_at: float = -math.inf
    failed_at: float = math.inf
    released_at: float = math.inf
    post_s: float = 0.0
    detect_s: float = 0.0
    num_bytes: int = 0
    num_descriptors: int = 0
    num_descriptors_posted: int = 0
    rereads: int = 0
    num_packed: int = 0  # packed copies that were read
    looked_bytes: int = 0


@dataclass(slots=True, eq=False)
class Pull:
    pull_id: PullId
    request_id: RequestId
    params: KVTransferParams
    cohort: Cohort
    digest: bytes
    sources: list[Source]
    route: Route  # the ranks of the prefill group, and the flow with the budget that the pull uses
    limits: PullConfig
    called_at: float
    deadline: float
    history: notes.History  # states and notes, beginning with ANNOUNCED
    warn_s: float = math.inf
    warn_at: float = math.inf
    priority: int = 0
    attempt: int = 1
    retryable: frozenset[Reason] = frozenset()
    is_last: bool = True  # True if no other attempt follows a failure, so that the reader is discharged
    kind: Kind = KIND.PULL
    owner: object = None  # the `core/attempts.Request` that this is an attempt of, if any
    looks: bool = False  # True if what is read is looked at a second time

    state: PullState = S.ANNOUNCED
    lists: BlockLists | None = None  # blocks to fill, and blocks to read; None while only announced
    reason: Reason | None = None  # the outcome, once there is one: COMPLETE, or the reason of the failure
    detail: str = ""
    failure: tuple[Reason, str] | None = None
    blame: Blame = UNBLAMED  # the ranks that the failure is about
    unmet: tuple[Reason, str, Blame] | None = None  # why a rank that might have been read was not met
    not_before: float = -math.inf  # time until which another attempt would meet a rank in its back-off
    drain_by: float = math.inf
    is_returned: bool = False
    was_held: bool = False  # True once the engine has told an outcome before the blocks returned
    is_retired: bool = False  # True once the blocks were held for `held_s`: they are never reused in this process
    number: int = 0  # place among all leases and pulls of the rank, in the order in which they began
    arrival: int = 0

    begun_at: float = math.inf
    failed_in: str = ""
    waited_for: str = ""
    unanswered: tuple[str, ...] = ()  # ranks that did not acknowledge the release before it was given up
    published_at: float = math.inf
    num_posted: int = 0
    measures: Measures = field(default_factory=Measures)
    num_traced: int = 0  # number of history entries that were reported one by one
    scheduled_at: float = math.inf
    _effects: list[Effect] = field(default_factory=list)

    # -- questions ---------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.state is S.RELEASED

    @property
    def is_published(self) -> bool:
        return self.reason is not None

    @property
    def is_queued(self) -> bool:
        return self.state is S.QUEUED and not self.not_lent_yet

    @property
    def is_unrouted(self) -> bool:
        return self.failure is None and self.state in (S.ANNOUNCED, S.CONNECTING)

    @property
    def not_lent_yet(self) -> bool:
        """Return True if a rank has said that the request is not lent yet, so that reading now would be useless."""
        for source in self.sources:  # no generator, because this is called often
            if source.not_lent_yet and source.role is ROLE.READ:
                return True
        return False

    @property
    def holds_blocks(self) -> bool:
        for source in self.sources:
            if source.running or source.doubtful:
                return True
        return False

    @property
    def wake_at(self) -> float:
        when = self.warn_at
        match self.state:
            case S.RELEASED:
                return math.inf
            case S.QUARANTINED:
                return min(when, self.retire_at)
            case S.NOTIFYING:
                if (over := self.published_at + self.limits.release_timeout_s) < when:
                    when = over
                if not self.is_returned:
                    when = min(when, self.retire_at)
                for source in self.sources:
                    if source.release_at < when:
                        when = source.release_at
                return when
            case S.DRAINING:
                when = min(when, self.drain_by, self.deadline)
            case _:
                if self.deadline < when:
                    when = self.deadline
        for source in self.sources:
            if source.claim_at < when:
                when = source.claim_at
        return when

    @property
    def retire_at(self) -> float:
        held = not self.is_retired and self.begun_at < math.inf and self.holds_blocks
        return self.published_at + self.limits.held_s if held else math.inf

    def is_abandoned(self, silent_s: float) -> bool:
        """Return True if nothing was read and the embedder was silent for about a lease, so that renewals stop."""
        # Renewals stop one earlier, because a silence that is noticed at the next renewal would outlast the lease.
        patience_s = max(self.params.lease_s - self.params.renew_s, self.params.lease_s / 2)
        return silent_s >= patience_s and self.state in _UNREAD and not self.num_posted and self.failure is None

    @property
    def since(self) -> float:
        return next(at for at, text in reversed(self.history) if text is self.state)

    @property
    def until(self) -> float:
        """Return when this state ends at the latest; infinite if nothing bounds it."""
        if self.state is S.DRAINING:
            return min(self.drain_by, self.deadline)
        if self.is_published:
            notifies = self.state is S.NOTIFYING
            return self.published_at + self.limits.release_timeout_s if notifies else self.retire_at
        return self.deadline

    @property
    def steps(self) -> int:
        return 1 + len(self.sources)

    def take_warning(self, now: float) -> bool:
        """Return True once after `warn_s` in one state, and again at each doubling of that time."""
        if now < self.warn_at:
            return False
        since = self.since
        self.warn_at = since + self.warn_s
        if now < self.warn_at:
            return False  # the state has changed since
        while self.warn_at <= now:
            self.warn_at = since + 2 * (self.warn_at - since)
        return True

    # -- events ------------------------------------------------------------------------------------

    def start(self, lists: BlockLists, deadline: float, now: float) -> list[Effect]:
        after = ON_EVENT[self.state].get(E.STARTED) or self._impossible(E.STARTED)
        self.lists, self.deadline, self.called_at, self.begun_at = lists, deadline, now, now
        self.warn_at = now + self.warn_s
        if self.kind is not KIND.PIECE:
            self.kind = KIND.HIT if lists.is_empty else KIND.PULL
        if lists.is_empty:
            for source in self.sources:
                source.not_wanted()
        return self._settle(after, now)

    def routed(
        self, tables: Sequence[PeerTables | None], now: float, start: tuple[BlockLists, float] | None = None
    ) -> list[Effect]:
        """Take the tables to read from each source, or None for one that is only released. The claim leaves with the
        read. With `start`, a pull that reads something takes its blocks and deadline first, in the same walk.
        """
        if start is None:
            after, then = ON_EVENT[self.state].get(E.ROUTED) or self._impossible(E.ROUTED), None
        else:
            after, then = ON_EVENT[self.state].get(E.STARTED) or self._impossible(E.STARTED), E.ROUTED
            self.lists, self.deadline = start
            self.called_at, self.begun_at, self.warn_at = now, now, now + self.warn_s
            if self.kind is KIND.ANNOUNCEMENT:
                self.kind = KIND.PULL
        self.measures.ready_at = now
        for source, read in zip(self.sources, tables, strict=True):
            if read is not None:
                source.role, source.tables = ROLE.READ, read
                if source.claim_at == math.inf and not source.nonces and self.kind is not KIND.PIECE:
                    source.claim_at = now
                    self._effects.append(DO.SEND)
            elif source.role is ROLE.READ:
                source.not_wanted()
        return self._settle(after, now, then)

    def could_not_meet(self, not_before: float) -> None:
        """Note that a rank could not be met, and may not be met again before a certain time."""
        self.not_before = max(self.not_before, not_before)

    def goes_without(self, source: Source, reason: Reason, detail: str, blame: Blame = UNBLAMED) -> None:
        """Give up reading a rank that could not be met, because another rank may hold the same bytes."""
        source.not_wanted()
        self.unmet = self.unmet or (reason, detail, blame)

    def admitted(self, plans: Iterable[tuple[Source, Plan]], now: float) -> list[Effect]:
        """Begin to read, with these plans for the sources that have none yet."""
        after, measures = ON_EVENT[self.state].get(E.ADMITTED) or self._impossible(E.ADMITTED), self.measures
        for source, plan in plans:
            source.plan = plan
            source.following = plan.posts(self.limits.max_post_bytes, self.limits.max_post_descriptors)
            source.next_read = next(source.following, None)
            source.has_landed, source.looks = source.next_read is None, self._draw(source) if self.looks else None
            measures.num_bytes += plan.num_bytes
            measures.num_descriptors += plan.num_descriptors
            if source.next_read is None:
                source.claim_at = math.inf
                source.prove()
        if measures.admitted_at == math.inf:  # else the pull reads again
            measures.admitted_at = measures.planned_at = now
        self.warn_at = now + self.warn_s
        return self._settle(after, now)

    def met(self, source: Source, now: float) -> list[Effect]:
        """Claim at once from a rank that will be read and is ready, so that the claim leaves with the read."""
        if source.claim_at < math.inf or source.nonces or self.state not in _CLAIMS or self.kind is KIND.PIECE:
            return []  # a piece is claimed once it was read
        source.claim_at = now
        return [DO.SEND]

    def answered(self, source: Source, answer: Granted | NotYet | Refused, now: float) -> list[Effect] | None:
        """Take an answer to a claim or renewal. Return None if it changes nothing (stale, repeated, forged)."""
        if answer.nonce not in source.nonces or self.reason is not None:
            return None
        event = E.ANSWERED
        waited = source.not_lent_yet
        match answer:
            case Granted():
                source.granted(answer, self.params, now)
                if len(self.history) < MAX_HISTORY:
                    self.history.append((now, notes.Promised(source.rank.name, answer.seconds)))
            case NotYet():
                source.not_lent_yet, source.not_lent_yet_at = source.covered_until == -math.inf, now
                self._note(now, notes.AnsweredNotYet(source.name))
            case Refused():
                reads_yet = self.state not in (S.ANNOUNCED, S.CONNECTING)
                if failure := source.refused(answer, now, reads_yet=reads_yet):
                    reason, detail, how = failure
                    if how is How.RECALLED:
                        self.retryable = frozenset()  # what was recalled is never lent again
                    self._fail(reason, detail, now, Blame((source.name,), how))
                    event = E.FAILED
                elif source.claim_at == math.inf:
                    self._note(now, notes.Unrenewed(source.name, answer.reason))
            case _:
                assert_never(answer)
        if source.claim_at <= now:
            self._effects.append(DO.SEND)
        if waited is not source.not_lent_yet and source.role is ROLE.READ:
            if self.state is S.QUEUED:
                self._effects.append(DO.LEAVE if self.not_lent_yet else DO.QUEUE)
            elif self.state is S.READING and waited:
                self._effects.append(DO.POST)
        return self._settle(ON_EVENT[self.state][event], now)

    def posted(self, source: Source, transfer_id: TransferId, before: float) -> ReadRequest | Look:
        """Return the next read of a source, which is about to be posted. `before` is a time before that."""
        after = ON_EVENT[self.state].get(E.POSTED) or self._impossible(E.POSTED)
        if after is not self.state:
            self._settle(after, before)
        read = source.next_read
        assert read is not None
        # The read after it is fetched now, so that the last read is known as last.
        source.next_read = next(source.following, None)
        source.running.add(transfer_id)
        if before < source.first_posted_at:
            source.first_posted_at = before
        if not self.num_posted:
            self.measures.posted_at = before
        self.num_posted += 1
        self.measures.num_descriptors_posted += read.num_descriptors
        return read

    def ended(
        self, source: Source, transfer: TransferEnded, num_bytes: int, detect_s: float, now: float
    ) -> list[Effect]:
        """Take the end of a transfer, observed before `now`. The transfer ended at most `detect_s` earlier."""
        is_done = transfer.ending is ENDING.DONE
        event = E.ENDED if is_done else E.TRANSFER_FAILED
        after = ON_EVENT[self.state].get(event) or self._impossible(event)
        if is_done:
            self.measures.detect_s = max(self.measures.detect_s, detect_s)
        if transfer.ending is ENDING.IN_DOUBT:
            source.doubtful.add(transfer.transfer_id)
        elif source.doubtful:
            source.doubtful.discard(transfer.transfer_id)
        source.running.discard(transfer.transfer_id)
        source.has_landed = source.next_read is None and not source.running and not source.doubtful
        if is_done:
            source.bytes_read += num_bytes
            if source.has_landed and source.looks is not None and self.failure is None:
                self._look_again(source)
        if is_done and source.has_landed:
            source.done_at = self.measures.read_at = now
            source.nonce_when_done = max(source.nonces, default=0)
            if source.confirms and self.failure is None:
                source.claims, source.claim_at = 0, now
                self._effects.append(DO.SEND)
            if source.lent_by < math.inf:  # else nothing is granted, so nothing is proven
                source.prove()
        if not is_done:
            reason = Reason.PEER_LOST if transfer.peer_lost else Reason.READ_FAILED
            blame = Blame((source.name,), How.BROKEN if transfer.peer_lost else None)
            self._fail(reason, f"a transfer from {source.where} failed: {transfer.cause}", now, blame)
        if self.reason is not None and not self.is_returned and not self.holds_blocks:
            self.is_returned = True
            self._effects.append(DO.RETURN)
        return self._settle(after, now)

    def _draw(self, source: Source) -> Iterator[Look]:
        """Draw what is looked at again of a source, before it is read, because the caches are warm then."""
        assert source.tables is not None
        assert self.lists is not None
        limits, seed = self.limits, int.from_bytes(f"{self.pull_id} {source.name}".encode(), "big")
        most = None if limits.second_look_bytes == "all" else limits.second_look_bytes
        budget = limits.max_post_bytes, limits.max_post_descriptors
        return looks(source.tables, self.lists, most, seed, *budget)

    def _look_again(self, source: Source) -> None:
        """Begin the second look at all that a source has brought. It is part of the read, and proven with it."""
        assert source.looks is not None
        source.following, source.looks = source.looks, None
        source.next_read = next(source.following, None)
        source.has_landed = source.next_read is None
        self._effects.append(DO.POST)

    def looked(self, source: Source, look: Look, found: Difference | None) -> None:
        """Take what a look has found, before its end is taken. After a difference there is nothing to look for."""
        self.measures.looked_bytes += look.num_bytes
        if found is not None and self.lists is not None and source.tables is not None:
            source.differs = source.differs or differing(source.tables, self.lists, look, found)
            source.next_read = None

    def fail(self, reason: Reason, detail: str, now: float, blame: Blame = UNBLAMED) -> list[Effect]:
        after = ON_EVENT[self.state].get(E.FAILED) or self._impossible(E.FAILED)
        self._fail(reason, detail, now, blame)
        return self._settle(after, now)

    def settled(self, source: Source, how: str, now: float) -> list[Effect]:
        after = ON_EVENT[self.state].get(E.SETTLED) or self._impossible(E.SETTLED)
        if source.release is not RELEASE.SETTLED and len(self.history) < MAX_HISTORY:
            self.history.append((now, notes.Settled(source.rank.name, how)))
        source.release, source.release_at, source.claim_at = RELEASE.SETTLED, math.inf, math.inf
        for other in self.sources:
            if other.release is not RELEASE.SETTLED:
                return []  # nothing follows before all ranks are told, and a request may name a hundred of them
        return self._settle(after, now)

    def tick(self, now: float) -> list[Effect]:
        if now >= self.retire_at:
            self.is_retired = True
            self._note(now, notes.Retired())
        if self.state is S.NOTIFYING and now >= self.published_at + self.limits.release_timeout_s:
            for source in self.sources:
                if source.release is not RELEASE.SETTLED:
                    self._note(now, notes.Settled(source.name, "given up, the lease will expire"))
                    self.unanswered += (source.name,)
                    source.release, source.release_at, source.claim_at = RELEASE.SETTLED, math.inf, math.inf
        after = self.state
        if now >= self.deadline and self.failure is None and self.reason is None:
            after = ON_EVENT[self.state].get(E.FAILED) or self._impossible(E.FAILED)
            reason, waiting, sources = self.waiting_for(now)
            blame = Blame(tuple(source.name for source in sources))
            self._fail(reason, f"{waiting} when the deadline passed", now, blame)
        self._effects.append(DO.SEND)
        return self._settle(after, now)

    # -- messages ----------------------------------------------------------------------------------

    def make_messages(self, nonces: Iterator[int], now: float) -> Iterable[tuple[Source, Message]]:
        out: list[tuple[Source, Message]] = []
        key, request_id = self.params.key, self.params.request_id
        for source in self.sources:
            if now >= source.claim_at:
                if source.role is ROLE.READ and self.reason is None:
                    left = (self.drain_by if self.drain_by < self.deadline else self.deadline) - now
                    seconds = 0.001 if left < 0.001 else left if left < MAX_ASKED_S else MAX_ASKED_S
                    nonce, covered = next(nonces), now < source.covered_until
                    source.claimed(nonce, self.limits.claim_retry_s, now)
                    if covered:
                        out.append((source, Renew(key, self.pull_id, nonce, seconds)))
                    else:
                        claim = Claim(key, request_id, self.cohort, self.pull_id, nonce, self.digest, seconds)
                        out.append((source, claim))
                else:
                    source.claim_at = math.inf
            if now >= source.release_at:
                out.append((source, self.make_release(source, now)))
        return out

    def make_release(self, source: Source, now: float) -> Release:
        source.release, source.releases = RELEASE.SENT, source.releases + 1
        pause_s = self.limits.release_retry_s * 2 ** (source.releases - 1 if source.releases < 7 else 6)
        source.release_at = now + (pause_s if pause_s < MAX_RELEASE_PAUSE_S else MAX_RELEASE_PAUSE_S)
        outcome = Outcome.COMPLETE if self.reason is Reason.COMPLETE else self.outcome
        return Release(self.params.key, self.params.request_id, self.cohort, self.pull_id, outcome)

    @property
    def outcome(self) -> Outcome:
        match self.reason:
            case Reason.COMPLETE | Reason.DISCHARGED:
                return Outcome.COMPLETE
            case Reason.STANDSTILL | Reason.DIFFERS:
                return Outcome.FAILED  # else the lease would wait for a reader that does not come back
            case reason if not self.is_last or reason in self.retryable:
                return Outcome.RETRY
            case reason if self.kind is KIND.ANNOUNCEMENT and reason not in (Reason.CANCELLED, Reason.TIMEOUT):
                # The caller has only announced the request, and may still ask for the blocks.
                return Outcome.RETRY
            case Reason.CANCELLED:
                return Outcome.CANCELLED
            case _:
                return Outcome.FAILED

    # -- inside ------------------------------------------------------------------------------------

    def _impossible(self, event: PullEvent) -> PullState:
        raise LocalProtocolError(f"{event.name} while pull {self.pull_id} is {self.state.name}")

    def _enter(self, after: PullState, now: float) -> None:
        effects, sources = self._effects, self.sources
        before, self.state = self.state, after
        self.history.append((now, after))
        if before is S.READING:
            for source in sources:
                source.may_post = False
        match after:
            case S.QUEUED:
                if before is S.CONFIRMING:
                    self._read_again(now)
                effects.append(DO.LEAVE if self.not_lent_yet else DO.QUEUE)
            case S.READING:
                for source in sources:
                    source.may_post = True
                effects.append(DO.POST)
            case S.CONFIRMING:
                effects.append(DO.LEAVE)
            case S.NOTIFYING:
                self._publish(before, now)
            case S.QUARANTINED:
                self.measures.released_at = now
            case S.RELEASED:
                self.measures.released_at = min(self.measures.released_at, now)
                effects.append(DO.FINISH)
            case S.DRAINING:
                effects.append(DO.DETACH)
            case S.ANNOUNCED | S.CONNECTING:
                pass
            case _:
                assert_never(after)

    def _publish(self, before: PullState, now: float) -> None:
        """Take the outcome, and release every rank that was not settled before."""
        for source in self.sources if self.looks and self.failure is None else ():
            if source.differs is not None:
                detail = f"what {source.where} lent, or our copy, has changed since it was read: {source.differs}"
                self._fail(Reason.DIFFERS, detail, now, Blame((source.name,)))
                self.waited_for = ""
        self.reason, self.detail = self.failure or (Reason.COMPLETE, "")
        self.published_at, self.warn_at = now, now + self.warn_s
        if before is not S.CONFIRMING:  # else the pull left when its bytes had landed
            self._effects.append(DO.LEAVE)
        may_write = False
        for source in self.sources:
            source.claim_at, source.next_read = math.inf, None
            if source.release is not RELEASE.SETTLED and self.kind is KIND.PIECE:
                source.release = RELEASE.SETTLED  # a piece is never released: its owner ends it with its request
            elif source.release is not RELEASE.SETTLED:
                source.release_at = now
            if source.running or source.doubtful:
                may_write = True
        if not may_write:
            self.is_returned = True
            self._effects.append(DO.RETURN)
        self._effects += (DO.TELL, DO.SEND)

    def _settle(self, after: PullState, now: float, then: PullEvent | None = None) -> list[Effect]:
        """Enter a state and those that follow by `WHEN`, then take another event, if given. Return the effects."""
        for _ in WHEN:
            if after is not self.state:
                self._enter(after, now)
            for fact, following in WHEN[after].items():
                if fact.holds(self, now):
                    after = following
                    break
            else:
                if then is None:
                    break
                after, then = ON_EVENT[after].get(then) or self._impossible(then), None
        else:
            raise AssertionError(f"the conditions of pull {self.pull_id} have a cycle through {self.state.name}")
        if after is S.CONFIRMING:
            self._ask_for_proof(now)
        effects, self._effects = self._effects, []
        return effects

    def _ask_for_proof(self, now: float) -> None:
        """Claim once more, now that all has landed, from each source that no grant so far covers."""
        for source in self.sources:
            if source.role is not ROLE.READ or source.proven or now >= source.claim_at:
                continue
            asked = bool(source.nonces) and next(reversed(source.nonces)) > source.nonce_when_done
            if not asked and (source.claims == 0 or source.covered_until > -math.inf):
                source.claim_at = now
                self._effects.append(DO.SEND)

    def _note(self, now: float, note: notes.Note) -> None:
        if len(self.history) < MAX_HISTORY:
            self.history.append((now, note))

    def _fail(self, reason: Reason, detail: str, now: float, blame: Blame) -> None:
        if self.failure is not None or self.reason is not None:
            return
        assert reason is not Reason.COMPLETE
        self.failure, self.blame = (reason, detail), blame
        self.measures.failed_at, self.failed_in, self.waited_for = now, self._phase, self.waiting_for(now)[1]
        is_late = reason in (Reason.TIMEOUT, Reason.NOT_LENT_YET)
        self.drain_by = now if is_late else min(self.deadline, now + self.limits.drain_s)
        self._note(now, notes.Failed(reason, detail))

    def _read_again(self, now: float) -> None:
        for source in self.sources:
            if source.was_early:
                self._note(now, notes.ReadAgain(source.name))
                drawn = self._draw(source) if self.looks else None
                source.restart(self.limits.max_post_bytes, self.limits.max_post_descriptors, looks=drawn)
                self.measures.rereads += 1

    @property
    def _phase(self) -> str:
        """Return the phase of the pull, or its phase before its end, as `asynckv.observe.log.phases` names it."""
        states = (text for _, text in reversed(self.history) if isinstance(text, PullState) and text not in _ENDS)
        match next(states, S.ANNOUNCED):
            case S.ANNOUNCED:
                return "announced"
            case S.CONNECTING:
                return "handshake"
            case S.QUEUED if self.measures.admitted_at < math.inf and self.measures.planned_at == math.inf:
                return "plan"
            case S.READING if self.measures.posted_at < math.inf:
                return "read"
            case S.CONFIRMING:
                return "confirm"
            case _:
                return "queue"

    def waiting_for(self, now: float) -> tuple[Reason, str, list[Source]]:
        """Return the reason if the deadline passes now, a description of what the pull waits for, and its ranks."""
        reads = [source for source in self.sources if source.reads]
        if self.state is S.ANNOUNCED:
            return Reason.TIMEOUT, "announced and never pulled", []
        if self.state is S.CONNECTING:
            unmet = [source for source in reads if source.tables is None]
            return Reason.TIMEOUT, f"no handshake with {named(unmet)}", unmet
        ahead = [source for source in reads if source.not_lent_yet]
        not_lent = ", ".join(source.where + _since(now - source.not_lent_yet_at) for source in ahead)
        if self.state is S.READING and (running := [source for source in reads if source.running]):
            text = f"still reading from {named(running)}"
            return Reason.TIMEOUT, f"{text}, and not lent yet by {not_lent}" if ahead else text, running
        if ahead:
            return Reason.NOT_LENT_YET, f"not lent yet by {not_lent}", ahead
        if silent := [source for source in reads if source.claims > 0 and source.covered_until == -math.inf]:
            return Reason.TIMEOUT, f"no answer to the claim from {named(silent)}", silent
        if self.state is S.QUEUED:
            return Reason.TIMEOUT, "still queued behind others", []
        if self.state is S.READING:
            left = [source for source in reads if not source.has_landed]
            return Reason.TIMEOUT, f"still reading from {named(left)}", left
        unproven = [source for source in reads if not source.proven]
        return Reason.TIMEOUT, f"no proof of the lease from {named(unproven)}", unproven


_ENDS = (S.DRAINING, S.NOTIFYING)  # a difference is judged in NOTIFYING
_UNREAD = (S.ANNOUNCED, S.CONNECTING, S.QUEUED)
_CLAIMS = (S.ANNOUNCED, S.CONNECTING, S.QUEUED, S.READING)


def named(sources: list[Source]) -> str:
    return ", ".join(source.where for source in sources) or "no rank"


def _since(seconds: float) -> str:
    """Return words for the age of an answer that should have been repeated since."""
    return f" (its last answer was {seconds:.0f} s ago)" if seconds > 2 * MAX_CLAIM_PAUSE_S else ""
