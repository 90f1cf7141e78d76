"""One remote rank of one attempt: its claims, its reads, the proof of its bytes, and its release.

A pull has a `Source` for every remote rank that this reader answers for. The source claims (and renews) a grant of the
blocks, reads them one read request after the other, and releases the rank in the end, whether it was read or not.

Its bytes are *proven* if

- every read ended well, and the clock, read after the last end was observed, is before the end of some grant: the
  moment before *that* claim was sent, plus the seconds granted, less a rate margin; and
- the first read began after the blocks were lent. Params may travel ahead of the data. A grant says how long the blocks
  have been lent, and a read that cannot be shown to be younger is repeated.

An owner that may *recall* a request takes its blocks back whatever it has granted. No clock proves a read of those.
Instead of the first condition, a claim or renewal has to be granted that was sent after the end of the read was
observed: the owner grants only what is lent, and lends no key twice, so the blocks were lent until then.

Proven bytes stay proven, whatever happens to the lease or the rank.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from asynckv.core.types import Address, How, KVTransferParams, Place, PullId, Reason, TransferId, members
from asynckv.core.wire import RELEASE_NONCE, Granted, Refused
from asynckv.geometry.look import Differing, Look
from asynckv.geometry.plan import Plan, ReadRequest
from asynckv.geometry.tables import PeerTables

RATE_MARGIN = 1e-3  # largest difference between the rates of two hosts' clocks (NTP slews by at most 500 ppm)
MIN_RENEW_S = 0.05  # shortest time between renewals, so that no peer can make us renew more often
MAX_CLAIM_PAUSE_S = 2.0  # longest pause between two claims that are not answered, or answered `NotYet`
MAX_NONCES = 8

NEVER = -math.inf

LONG_AGO = -math.inf  # time before anything that this rank did, for events in an order that is known without a clock
_NOTHING: Iterator[ReadRequest | Look] = iter(())


class Role(enum.StrEnum):
    """The part of a remote rank in an attempt."""

    UNKNOWN = "unknown"  # the rank may hold something of ours, and was not asked yet
    READ = "read"  # the rank is expected to be read; the exact reads are known once all such ranks are met
    RELEASE_ONLY = "release_only"
    """Nothing is read from the rank, but it has lent the request to us and waits for our release."""


class ReleaseState(enum.StrEnum):
    UNSENT = "unsent"
    SENT = "sent"
    SETTLED = "settled"


ROLE, RELEASE = members(Role), members(ReleaseState)


class RemoteRank(NamedTuple):
    """A rank as params list it, with the number of ranks that share tokens. `is_predicted`: the usual rule reads it."""

    tp_rank: int
    pp_stage: int
    place: Place
    name: str
    is_predicted: bool
    num_token_shards: int = 1


class Blame(NamedTuple):
    """The prefill ranks that the failure of a pull is about, and how they were lost or not met, if they were."""

    ranks: tuple[str, ...] = ()
    how: How | None = None


UNBLAMED = Blame()


@dataclass(slots=True, eq=False)
class Source:
    pull_id: PullId
    rank: RemoteRank
    role: Role

    tables: PeerTables | None = None
    plan: Plan | None = None
    next_read: ReadRequest | Look | None = None  # next read to post; None once everything is posted
    following: Iterator[ReadRequest | Look] = _NOTHING
    looks: Iterator[Look] | None = None  # what is looked at again, once all has landed
    differs: Differing | None = None  # what a look has found; it counts once the read and the look are proven
    may_post: bool = False
    is_waiting: bool = False  # True while the source stands in the line of its peer (`core/flow.py`)
    running: set[TransferId] = field(default_factory=set)
    doubtful: set[TransferId] = field(default_factory=set)
    first_posted_at: float = math.inf
    done_at: float = NEVER
    nonce_when_done: int = 0
    has_landed: bool = False
    """True once everything was posted and has ended, well or not, and nothing is in doubt. If the attempt has neither
    failed nor been cancelled, all bytes are there."""
    bytes_read: int = 0

    nonces: dict[int, float] = field(default_factory=dict)
    granted_nonce: int = 0
    confirms: bool = False  # True if the owner may recall the request
    confirmed_nonce: int = 0  # newest claim or renewal that was granted; `granted_nonce` may be greater: see `refused`
    covered_until: float = NEVER
    lent_by: float = math.inf  # latest moment, on our clock, at which the blocks were lent; infinite until a grant
    not_lent_yet: bool = False  # True if the rank said that it is not lent yet, so that reading would be useless
    not_lent_yet_at: float = NEVER
    proven: bool = False  # True once the bytes are known to be the lent ones
    claim_at: float = math.inf
    claims: int = 0

    release: ReleaseState = RELEASE.UNSENT
    release_at: float = math.inf
    releases: int = 0

    # -- questions ---------------------------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        return bool(self.running or self.doubtful) or (self.reads and not self.proven)

    @property
    def was_early(self) -> bool:
        """True if the first read began before the blocks were lent, so that it proves nothing."""
        return self.role is ROLE.READ and not self.proven and self.first_posted_at <= self.lent_by < math.inf

    @property
    def reads(self) -> bool:
        return self.role is ROLE.READ

    @property
    def address(self) -> Address:
        return self.rank.place[0]

    @property
    def name(self) -> str:
        return self.rank.name

    @property
    def where(self) -> str:
        return f"{self.rank.name} ({self.rank.place[0]})"

    @property
    def is_settled(self) -> bool:
        return self.release is RELEASE.SETTLED

    def not_wanted(self) -> None:
        self.role, self.tables, self.claim_at = ROLE.RELEASE_ONLY, None, math.inf
        self.nonces.clear()  # it claims anew if it is wanted after all

    # -- reads -------------------------------------------------------------------------------------

    def restart(self, max_bytes: int, max_descriptors: int, *, looks: Iterator[Look] | None) -> None:
        assert self.plan is not None
        self.first_posted_at, self.done_at, self.bytes_read = math.inf, NEVER, 0
        self.looks, self.differs = looks, None
        self.lent_by = LONG_AGO  # already granted, so every read that begins from here on is late enough
        self.following = self.plan.posts(max_bytes, max_descriptors)
        self.next_read = next(self.following, None)
        self.has_landed = self.next_read is None

    def prove(self) -> None:
        if not self.proven and self.has_landed:
            timely = self.lent_by < self.first_posted_at
            # A grant counts from before its claim was sent, so a claim after the end of the read covers it as well.
            covered = NEVER < self.done_at < self.covered_until
            if self.confirms:
                covered = self.done_at > NEVER and self.nonce_when_done < self.confirmed_nonce
            self.proven = self.first_posted_at == math.inf or (timely and covered)

    # -- claims ------------------------------------------------------------------------------------

    def claimed(self, nonce: int, retry_s: float, now: float) -> None:
        self.nonces[nonce] = now
        if len(self.nonces) > MAX_NONCES:
            del self.nonces[next(iter(self.nonces))]
        self.claims += 1
        pause_s = retry_s * 2 ** (self.claims - 1 if self.claims < 7 else 6)
        self.claim_at = now + (pause_s if pause_s < MAX_CLAIM_PAUSE_S else MAX_CLAIM_PAUSE_S)

    def has_asked(self, nonce: int) -> bool:
        """Return True if a claim, a renewal or a release of ours carried this nonce."""
        return nonce in self.nonces or (nonce == RELEASE_NONCE and self.release is RELEASE.SENT)

    def granted(self, grant: Granted, params: KVTransferParams, now: float) -> None:
        """Take a grant, which counts from before the answered claim was sent."""
        sent_at = self.nonces[grant.nonce]
        deadline = sent_at + grant.seconds * (1 - RATE_MARGIN)
        if deadline > self.covered_until:
            self.covered_until = deadline
        if grant.nonce > self.granted_nonce:
            self.granted_nonce = grant.nonce
        if grant.nonce > self.confirmed_nonce:
            self.confirmed_nonce = grant.nonce
        self.not_lent_yet = False
        # If params left after the KV was written, a read can be too late, but never too early. A grant before the first
        # read needs no clock either.
        if params.written or self.first_posted_at == math.inf:
            self.lent_by = LONG_AGO
        else:
            self.lent_by = min(self.lent_by, now - grant.lent_for_s * (1 - RATE_MARGIN))
        # Where nothing was to be read, nothing is renewed, even if an old grant arrives late. Such a lease may expire
        # before the pull ends.
        reads = self.first_posted_at < math.inf or not self.proven
        if self.confirms and self.done_at > NEVER and grant.nonce <= self.nonce_when_done:
            pass  # the claim that confirms the read is under way, and is repeated until it is granted
        elif reads and (deadline > now or grant.nonce == next(reversed(self.nonces))):
            self.claims = 0
            self.claim_at = max(sent_at + min(params.renew_s, grant.seconds / 2), now + MIN_RENEW_S)
        self.prove()

    def refused(self, answer: Refused, now: float, *, reads_yet: bool) -> tuple[Reason, str, How | None] | None:
        """Take a refusal, and return why the attempt fails, if it does. `reads_yet`: the pull reads or is queued."""
        if answer.nonce < self.granted_nonce:
            return None  # late or repeated, because a later claim was granted
        # A lender that revokes gets its blocks back at once if the pull has begun nothing.
        lets_go = answer.reason is Reason.REVOKED and not reads_yet
        stands = now < self.covered_until and not self.confirms and not lets_go
        if stands and answer.reason in (Reason.REVOKED, Reason.EXPIRED):
            # Nothing more is granted, but the last grant stands, so read on until it runs out.
            self.claim_at = self.covered_until
            return None
        if answer.reason is Reason.EXPIRED and self.nonces[answer.nonce] < self.covered_until:
            # The renewal came after the end of its own grant. The lease itself may stand, so claim anew, once.
            self.covered_until, self.claim_at = NEVER, now
            self.granted_nonce = next(reversed(self.nonces)) + 1  # other renewals may have come too late as well
            return None
        self.claim_at = math.inf
        if self.proven or self.role is not ROLE.READ:
            return None
        reason = Reason.LEASE_LOST if self.lent_by < math.inf and not lets_go else answer.reason
        how = How.RECALLED if self.confirms and answer.reason is Reason.REVOKED else None
        text = f"{self.where} {f'refused: {answer.reason}' if how is None else 'took the blocks back'}"
        return reason, f"{text} ({answer.detail})" if answer.detail else text, how
