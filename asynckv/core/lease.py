"""One lent request, as its prefill rank sees it: which readers may read, which are owed, and when the blocks return.

A lease (Gray and Cheriton, 1989) runs out by itself, so that a dead holder costs time and never memory. Three sets
decide everything:

- **owed**: the readers that have not released. A request is lent to `Lent.readers` cohorts, usually one. A cohort's
  first message binds the lease to that cohort and to its exact set of readers. A cohort that has sent no message
  yet is owed too (`*` in lists). A message that is repeated, late or forged changes nothing.
- **grants**: for each pull, the deadline until which the blocks are promised. Revoking only stops new grants. The
  blocks return when the holders release, or after the last granted deadline. No grant is ever shortened, except that
  a *recall* drops all grants of a request that was lent for this.
- **final**: the pulls that have released. A reader is struck off only by an attempt that is not tried again.

No lease outlives `max_lease_s`. A lease expires before `lease_s` only if all readers that it waits for are *gone*:
their last grant has run out, and their process is known to have ended. `core/prefill.py` sends, frees and wakes.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, product

from msgspec import Struct

from asynckv.core import notes
from asynckv.core.types import SHOWN_LETTERS, Key, Outcome, PullId, Reason, ReplyTo, RequestId, members, rank_name
from asynckv.core.wire import RELEASE_NONCE, Ack, Claim, Granted, OfReader, Refused, Release, Renew
from asynckv.errors import LocalProtocolError
from asynckv.geometry.bounds import BlockRuns, Int64s
from asynckv.geometry.match import owed_readers

NOWHERE = ReplyTo(b"")
RECALL = "recall"  # why blocks are taken back at once
MAX_READERS = 4096
MAX_WAYS = 4  # connections remembered for one attempt of a reader, as repeats may come over another one
MAX_HISTORY = 1024
PROBE_S = 1.0  # seconds until a reader without a running grant is looked at again; the time doubles after each look
MAX_REFUSALS = 8

MAX_SHOWN_ID = 80
MAX_OWED = 64  # readers that are named to the caller

MAX_ATTEMPTS = 64  # grants and releases of one reader that one lease takes, because all of them are remembered
MAX_GRANTS = 2 * MAX_READERS  # grants of one lease that run at a time
AT_ONCE = 128  # grants that lapse in one step, and readers that are looked at; more wait for the next turn of the loop


class LeaseState(enum.StrEnum):
    LENT = "lent"
    ENDING = "ending"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class Revoke:
    """The engine takes its blocks back."""


class Gone:
    """The processes of readers without a running grant have ended."""


def everybody_has_released(lease: Lease, now: float) -> bool:
    """No reader is owed, and no grant runs."""
    return not lease.grants and len(lease.discharged) == lease.num_readers and len(lease.cohorts) >= lease.lent.readers


def time_is_up(lease: Lease, now: float) -> bool:
    """It was lent for `lease_s`, and for as long as the last grant was to run; or all owed readers are gone."""
    return not lease.grants and (now >= lease.expires_at or (bool(lease.gone) and lease.is_forsaken()))


def no_grant_runs(lease: Lease, now: float) -> bool:
    """All grants have been released, or have run out."""
    return not lease.grants


L = members(LeaseState)
ON_EVENT: Mapping[LeaseState, Mapping[type, LeaseState]] = {
    L.LENT: {Claim: L.LENT, Renew: L.LENT, Release: L.LENT, Gone: L.LENT, Revoke: L.ENDING},
    L.ENDING: {Claim: L.ENDING, Renew: L.ENDING, Release: L.ENDING, Gone: L.ENDING, Revoke: L.ENDING},
    L.RELEASED: {},
    L.EXPIRED: {},
    L.REVOKED: {},
}
"""Messages and calls that each state takes. An ended lease takes none; `core/prefill.py` answers for it."""

WHEN: Mapping[LeaseState, Mapping[Callable[[Lease, float], bool], LeaseState]] = {
    L.LENT: {everybody_has_released: L.RELEASED, time_is_up: L.EXPIRED},
    L.ENDING: {no_grant_runs: L.REVOKED},
    L.RELEASED: {},
    L.EXPIRED: {},
    L.REVOKED: {},
}
"""States that are entered as soon as a condition holds; the first that holds counts. Conditions are checked after an
event, so a late claim is granted if it comes before the check, because the blocks are still unchanged."""


class Lent(Struct, frozen=True, kw_only=True, gc=False):
    """The subject of a lease, fixed when the request is lent."""

    key: Key
    request_id: RequestId
    groups: tuple[BlockRuns, ...]
    num_tokens: int
    lease_s: float
    grant_s: float
    max_lease_s: float
    readers: int  # cohorts that may read and are waited for; above 1 for siblings, and routers that retry elsewhere
    tp_rank: int
    tp_size: int
    num_token_shards: int = 1
    warn_s: float = math.inf
    recall: bool = False  # True if its owner may take it back at once, whatever was granted


class Reader(Struct, frozen=True, order=True, gc=False):
    """One decode rank of one cohort, over all starts of its process."""

    cohort: str
    tp_rank: int
    pp_stage: int = 0

    def __str__(self) -> str:
        return rank_name(self.cohort, self.tp_rank, self.pp_stage)

    def name(self, sender: str = "") -> str:
        return rank_name(self.cohort, self.tp_rank, self.pp_stage, sender)


class Grant(Struct):
    """A promise to one pull of the process start `sender`, which alone may renew and release it.

    `ways` are the newest connections that carried messages about the grant. They are pinged once it has run out.
    """

    pull_id: PullId
    reader: Reader
    sender: str
    name: str
    until: float
    since: float
    asked_at: float
    ways: tuple[ReplyTo, ...]
    probed_at: float = math.inf
    has_copies: bool = False  # True if packed copies were asked for

    def came_by(self, reply_to: ReplyTo) -> None:
        if reply_to not in self.ways:
            self.ways = (*self.ways, reply_to)[-MAX_WAYS:]


class Discharge(Struct, frozen=True, gc=False):
    outcome: Outcome
    name: str


class Refusal(Struct, frozen=True, gc=False):
    """A refused message about this request, the first of its kind (`claim`, `renew` or `release`)."""

    at: float
    what: str
    reason: str
    who: str
    detail: str = ""
    limit: str = ""  # the setting that is the reason, if it is one: `max_lease_s`


class BoundCohort(Struct, frozen=True, gc=False):
    """A cohort that the lease is bound to, and the ranks of it that are readers here, each in every stage.

    They are not listed one by one, because a single claim says how many there are.
    """

    sizes: tuple[int, int]
    ranks: range


class Effects(Struct, frozen=True, gc=False):
    """Effects of a transition outside the lease. `first_grant` is a pull that held no grant before."""

    wake_at: float
    answer: Granted | Refused | Ack | None = None
    first_grant: PullId | None = None
    has_ended: bool = False
    is_overdue: bool = False
    strays: tuple[Grant, ...] = ()
    """Last grants of owed readers that hold none now, are not known to be gone, and are due to be looked at."""


@dataclass(slots=True, eq=False)
class Lease:
    """The state machine of one lent request. Other code writes only `number`, `offers`, `on_end` and `is_sampled`."""

    lent: Lent
    lent_at: float
    digest: bytes  # of the params
    number: int = 0  # place among all leases and pulls of the rank, in the order in which they began
    state: LeaseState = L.LENT
    since: float = field(init=False)
    expires_at: float = field(init=False)
    """Time at which the lease expires. A grant may postpone it; an early release of that grant does not undo this."""
    look_at: float = field(init=False)  # time of the next check for grants that ran out, and readers that are gone
    warn_at: float = field(init=False)  # time of the next warning that it is held for long; the interval doubles
    history: notes.History = field(init=False)
    is_over: bool = False
    cohorts: dict[str, BoundCohort] = field(default_factory=dict)
    num_readers: int = 0  # readers of these cohorts; those that are not discharged are owed
    grants: dict[PullId, Grant] = field(default_factory=dict)
    running: dict[Reader, int] = field(default_factory=dict)  # number of these grants by reader
    deadlines: list[tuple[float, PullId]] = field(default_factory=list)
    """Heap of the times at which each grant is checked. A renewed grant gets a later entry only at that check."""
    looks: list[tuple[float, PullId, Reader]] = field(default_factory=list)
    """Heap of the times at which each reader without a running grant is looked at, by its attempt in `past`."""
    names: dict[str, str] = field(default_factory=dict)
    """Process start -> name for people, for every process that was granted the blocks."""
    past: dict[Reader, Grant] = field(default_factory=dict)
    final: set[PullId] = field(default_factory=set)
    spoilt: set[PullId] = field(default_factory=set)
    """Pulls whose packed copies have gone with their grant. A later grant would vouch for these, so none follows."""
    ended_copies: bool = False  # True if a grant with packed copies has ended since these were last settled
    num_packed: int = 0  # packed copies that readers asked for
    offers: int | None = None  # times that its params were offered to followers; None if it came without a ticket
    in_order: dict[int, Int64s] = field(default_factory=dict)
    """Lent blocks in ascending order, once copies are asked for."""
    attempts: dict[Reader, int] = field(default_factory=dict)
    """Number of grants to each reader, and of its releases without a grant, to limit attempts."""
    keys: dict[Reader, str] = field(default_factory=dict)
    """Key of each reader's first message. Messages in that reader's name under another key are refused."""
    discharged: dict[Reader, Discharge] = field(default_factory=dict)
    gone: set[Reader] = field(default_factory=set)  # owed readers without a running grant, whose process has ended
    refused: list[Refusal] = field(default_factory=list)
    revoked_by: str = ""
    on_end: Callable[[], None] | None = None  # the engine calls it at the end, and it is None from then on
    scheduled_at: float = math.inf
    is_sampled: bool = False  # True if the end is logged even if all is well

    def __post_init__(self) -> None:
        lent, now = self.lent, self.lent_at
        self.since, self.history = now, [(now, L.LENT)]
        self.expires_at, self.look_at, self.warn_at = now + lent.lease_s, now + lent.grant_s, now + lent.warn_s

    # -- events ------------------------------------------------------------------------------------

    def receive(
        self, message: OfReader, sender: str, now: float, proven: str = "", reply_to: ReplyTo = NOWHERE
    ) -> Effects:
        """Take a message of the process start `sender`. `proven` is the key that its connection `reply_to` proved."""
        after = ON_EVENT[self.state].get(type(message)) or self._impossible(type(message))
        num_grants = len(self.grants)
        if isinstance(message, Renew):
            reader = self._renewer(message, sender, proven)
        else:
            reader = self._bind(message, sender, proven)
        answer: Granted | Refused | Ack
        if not isinstance(reader, Reader):
            answer = reader
        elif isinstance(message, Release):
            answer = self._release(message, reader, sender, now, reply_to)
        else:
            answer = self._grant(message, reader, sender, now, reply_to)
        first = PullId(message.pull_id) if len(self.grants) > num_grants else None
        if type(answer) is Refused and len(self.refused) < MAX_REFUSALS:
            is_too_long = answer.reason is Reason.EXPIRED and now > self.lent_at + self.lent.max_lease_s - 0.001
            name, limit = self.name_of(message, sender), "max_lease_s" if is_too_long else ""
            self.turned_down(Refusal(now, WHAT[type(message)], answer.reason, name, answer.detail, limit))
        if type(answer) is Granted and after is self.state and self.deadlines[0][0] > now:
            # No condition holds while this grant runs, so nothing else follows.
            return Effects(min(self.expires_at, self.look_at, self.warn_at), answer, first)
        self._go_on(after, now)
        return Effects(math.inf if self.is_over else self.wake_at, answer, first, self.is_over)

    def grant_of(self, pull_id: PullId, sender: str, now: float, proven: str) -> Grant | None:
        """Return the grant of a pull if it still runs, and if its own reader asks."""
        grant = self.grants.get(pull_id)
        if grant is None or grant.until <= now or grant.sender != sender:
            return None
        return grant if self.keys.get(grant.reader, proven) == proven else None

    def revoke(self, now: float, by: str = "caller") -> Effects:
        """Stop granting. The blocks return when no grant runs any more. A request that may be recalled, and that its
        `caller` takes back or withdraws (`withdraw`), ends at once. Any other `by` is a word for people.
        """
        after = ON_EVENT[self.state].get(Revoke) or self._impossible(Revoke)
        is_recall = self.lent.recall and by in ("caller", "withdraw")
        self.revoked_by = RECALL if is_recall else self.revoked_by or by
        if is_recall:
            # Readers trust only what they confirm after their read, and nothing is confirmed from now on.
            self._note(now, notes.Recalled(len(self.grants)))
            self.grants.clear()
            self.running.clear()
        self._go_on(after, now)
        return Effects(self.wake_at, has_ended=self.is_over)

    def lose(self, readers: Iterable[Reader], now: float) -> Effects:
        """Note that the processes of these `strays` have ended."""
        after = ON_EVENT[self.state].get(Gone) or self._impossible(Gone)
        for reader in readers:
            self.gone.add(reader)
            self._note(now, notes.ReaderGone(self.past[reader].name))
        self._go_on(after, now)
        return Effects(self.wake_at, has_ended=self.is_over)

    def tick(self, now: float) -> Effects:
        was_over, strays = self.is_over, list[Grant]()
        self._go_on(self.state, now)
        if now >= self.look_at:
            for _ in range(AT_ONCE):
                if not self.looks or self.looks[0][0] > now:
                    break
                _, pull_id, reader = heapq.heappop(self.looks)
                grant = self.past[reader]
                is_known = reader in self.discharged or reader in self.gone or reader in self.running
                if grant.pull_id == pull_id and not is_known:
                    strays.append(grant)
                    heapq.heappush(self.looks, (now + max(PROBE_S, now - grant.until), pull_id, reader))
            times = [at for at, _, _ in self.looks[:1]] + [at for at, _ in self.deadlines[:1]]
            self.look_at = min(times, default=math.inf)
        if self.is_over:
            return Effects(math.inf, has_ended=not was_over)
        is_overdue = now >= self.warn_at
        while self.warn_at <= now:
            self.warn_at = self.lent_at + 2 * (self.warn_at - self.lent_at)
        return Effects(self.wake_at, is_overdue=is_overdue, strays=tuple(strays))

    def turned_down(self, refusal: Refusal) -> None:
        """Remember a refused message, because it may be the reason why a reader stays owed."""
        kind = refusal.what, refusal.reason, refusal.who
        if len(self.refused) < MAX_REFUSALS and all((x.what, x.reason, x.who) != kind for x in self.refused):
            self.refused.append(refusal)

    def name_of(self, message: OfReader, sender: str) -> str:
        if not isinstance(message, Renew):
            return message.cohort.name(sender)
        return self.names.get(sender, f"?@{sender[:SHOWN_LETTERS]}")

    def _impossible(self, event: type) -> LeaseState:
        raise LocalProtocolError(
            f"{event.__name__} while the lease of request {self.lent.request_id!r} is {self.state.name}"
        )

    def _go_on(self, after: LeaseState, now: float) -> None:
        """Enter the state that an event leads to, then the states with conditions that hold."""
        for _ in range(1 + len(WHEN)):  # no state is entered twice
            if after is not self.state:
                self.state, self.since, self.is_over = after, now, not ON_EVENT[after]
                if after is L.ENDING:
                    owed = self.num_readers - len(self.discharged) + self.lent.readers - len(self.cohorts)
                    self._note(now, notes.Revoked(owed, len(self.grants)))
                else:
                    self.history.append((now, after))  # the end is noted even beyond MAX_HISTORY
            if self.deadlines and self.deadlines[0][0] <= now:
                self._lapse(now)
            for condition, follows in WHEN[self.state].items():
                if condition(self, now):
                    after = follows
                    break
            else:
                return
        raise AssertionError(f"the tables have a cycle through {self.state.name}")

    def _lapse(self, now: float) -> None:
        """Forget some grants that have run out. Their readers know, because a reader's own deadline is earlier."""
        for _ in range(AT_ONCE):
            if not self.deadlines or self.deadlines[0][0] > now:
                break
            pull_id = heapq.heappop(self.deadlines)[1]
            grant = self.grants.get(pull_id)
            if grant is None:
                continue
            if grant.until > now:
                heapq.heappush(self.deadlines, (grant.until, pull_id))
                continue
            del self.grants[pull_id]
            self.running[grant.reader] -= 1
            if not self.running[grant.reader]:
                del self.running[grant.reader]
            self.past[grant.reader] = grant
            heapq.heappush(self.looks, (now, pull_id, grant.reader))
            if grant.has_copies:
                self.spoilt.add(pull_id)
                self.ended_copies = True
            self._note(now, notes.Lapsed(grant.name, pull_id))

    def _note(self, now: float, note: notes.Note) -> None:
        if len(self.history) < MAX_HISTORY:  # bounded, because a reader can repeat messages without end
            self.history.append((now, note))

    # -- questions ---------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Return how many steps a `tick` or a question takes at most. A step takes about as long as a message."""
        return 1 + len(self.grants) + len(self.past) + len(self.discharged)

    @property
    def ended_at(self) -> float:
        return self.since if self.is_over else math.inf

    @property
    def wake_at(self) -> float:
        if self.state is L.LENT and self.is_owed():
            wake_at = self.expires_at if self.expires_at < self.warn_at else self.warn_at
            return wake_at if wake_at < self.look_at else self.look_at
        # Only the last grant matters, but finding it costs more with every grant, so each is checked in turn.
        return min(self.deadlines[0][0], self.warn_at) if self.grants else math.inf

    @property
    def until(self) -> float:
        """Return when the blocks return at the latest, unless a reader asks for more."""
        if self.state is not L.ENDING:
            return self.expires_at
        return max([grant.until for grant in self.grants.values()], default=-math.inf)

    def is_owed(self) -> bool:
        return len(self.discharged) < self.num_readers or len(self.cohorts) < self.lent.readers

    def is_forsaken(self) -> bool:
        """Return True if all owed readers are gone, and no grant runs."""
        num_owed = self.num_readers - len(self.discharged)
        return not self.grants and len(self.cohorts) == self.lent.readers and len(self.gone) == num_owed

    def owing(self) -> Iterator[Reader]:
        """Yield the readers of known cohorts that are owed, because they have not released."""
        for name, bound in self.cohorts.items():
            for tp_rank, pp_stage in product(bound.ranks, range(bound.sizes[1])):
                if (reader := Reader(name, tp_rank, pp_stage)) not in self.discharged:
                    yield reader

    def owed(self) -> tuple[str, ...]:
        """Name the first readers that are owed, and `*` for a cohort that has sent no message."""
        return (*map(str, islice(self.owing(), MAX_OWED)), *["*"] * (self.lent.readers - len(self.cohorts)))

    # -- answers -----------------------------------------------------------------------------------

    def _renewer(self, renew: Renew, sender: str, proven: str) -> Reader | Ack | Refused:
        """Return the reader that renews, or a refusal."""
        if self.state is not L.LENT:
            return refused(renew, Reason.REVOKED)
        grant = self.grants.get(PullId(renew.pull_id))
        if grant is None or grant.sender != sender:
            known = renew.pull_id in self.final
            return refused(renew, Reason.RELEASED_ALREADY if known else Reason.EXPIRED)
        if self.keys.get(grant.reader, proven) != proven:
            return refused(renew, Reason.FOREIGN_PULL, _OTHER_KEY)
        return grant.reader

    def _grant(
        self, ask: Claim | Renew, reader: Reader, sender: str, now: float, reply_to: ReplyTo
    ) -> Granted | Refused:
        left = min(self.lent.grant_s, ask.seconds, self.lent_at + self.lent.max_lease_s - now)
        seconds = math.floor(left * 1000) / 1000
        if seconds <= 0:
            too_short = f"{ask.seconds:g} s were asked for, but the shortest grant is 1 ms"
            too_long = f"lent for longer than max_lease_s {self.lent.max_lease_s}"
            return refused(ask, Reason.EXPIRED, too_short if ask.seconds < 0.001 else too_long)
        pull_id = PullId(ask.pull_id)
        grant = self.grants.get(pull_id)
        if grant is None:
            if len(self.grants) >= MAX_GRANTS:
                return refused(ask, Reason.OVERLOADED, f"more than {MAX_GRANTS} grants of this request run")
            name = _rank_name(reader.cohort, reader.tp_rank, reader.pp_stage, sender)
            if len(self.history) < MAX_HISTORY:
                self.history.append((now, notes.GrantedTo(name, pull_id)))
            self.attempts[reader] = self.attempts.get(reader, 0) + 1
            self.grants[pull_id] = Grant(pull_id, reader, sender, name, now + seconds, now, now, (reply_to,))
            self.running[reader] = self.running.get(reader, 0) + 1
            self.names[sender] = name
            self.gone.discard(reader)
            heapq.heappush(self.deadlines, (now + seconds, pull_id))
            if now + seconds < self.look_at:
                self.look_at = now + seconds
        else:
            # A shorter grant takes nothing back, because its reader may still rely on the longer one.
            grant.until, grant.asked_at = max(grant.until, now + seconds), now
            if reply_to != grant.ways[0]:
                grant.came_by(reply_to)
        self.expires_at = max(self.expires_at, now + seconds)
        return Granted(ask.key, pull_id, ask.nonce, seconds, math.floor((now - self.lent_at) * 1e6) / 1e6)

    def _release(self, release: Release, reader: Reader, sender: str, now: float, reply_to: ReplyTo) -> Ack:
        pull_id = PullId(release.pull_id)
        grant = self.grants.pop(pull_id, None)
        self.final.add(pull_id)
        if grant is None:
            name, self.attempts[reader] = reader.name(sender), self.attempts.get(reader, 0) + 1
        else:
            name, self.ended_copies = grant.name, self.ended_copies or grant.has_copies
            self.running[reader] -= 1
            if not self.running[reader]:
                del self.running[reader]
        if release.outcome is not Outcome.RETRY:
            self.gone.discard(reader)
            self.discharged.setdefault(reader, Discharge(release.outcome, name))
        else:
            since, ways = (now, ()) if grant is None else (grant.since, grant.ways)
            self.past[reader] = Grant(pull_id, reader, sender, name, now, since, now, ways)
            self.past[reader].came_by(reply_to)
            self.gone.discard(reader)  # a later start of the process has taken over
            self.look_at = min(self.look_at, now + self.lent.grant_s)
            heapq.heappush(self.looks, (now + self.lent.grant_s, pull_id, reader))
        if len(self.history) < MAX_HISTORY:
            self.history.append((now, notes.Released(name, pull_id, release.outcome)))
        return Ack(release.key, pull_id)

    def _bind(self, message: Claim | Release, sender: str, proven: str) -> Reader | Ack | Refused:
        """Bind the lease to the message's cohort and return its reader, or an answer. A refusal changes nothing."""
        pull_id, is_claim = PullId(message.pull_id), isinstance(message, Claim)
        if is_claim and self.state is not L.LENT:
            return refused(message, Reason.REVOKED)
        if isinstance(message, Claim) and message.digest != self.digest:
            detail = "the params name other blocks or tokens than were lent under this key"
            if self.lent.recall:
                detail += "; or its reader is older than 0.5.0 and cannot read what may be recalled: upgrade the reader"
            return refused(message, Reason.BLOCKS_DIFFER, detail)
        if pull_id in self.final:
            return refused(message, Reason.RELEASED_ALREADY) if is_claim else Ack(message.key, pull_id)
        if is_claim and pull_id in self.spoilt:
            return refused(message, Reason.EXPIRED, "its grant ran out, and its packed copies with it")
        cohort, sizes = message.cohort, (message.cohort.tp_size, message.cohort.pp_size)
        reader, grant = Reader(cohort.id, cohort.tp_rank, cohort.pp_stage), self.grants.get(pull_id)
        if grant is not None and (grant.sender != sender or grant.reader != reader):
            return refused(message, Reason.FOREIGN_PULL)
        if grant is None and self.attempts.get(reader, 0) >= MAX_ATTEMPTS:
            return refused(message, Reason.OVERLOADED, f"more than {MAX_ATTEMPTS} attempts of this reader")
        if message.request_id != self.lent.request_id:
            return refused(
                message,
                Reason.WRONG_REQUEST,
                f"the key belongs to another prefill request id, not to {message.request_id[:MAX_SHOWN_ID]!r}",
            )
        if self.keys.get(reader, proven) != proven:
            return refused(message, Reason.FOREIGN_PULL, _OTHER_KEY)
        bound, lent = self.cohorts.get(cohort.id), self.lent
        if bound is None:
            ranks = _owed_readers(lent.tp_rank, lent.tp_size, cohort.tp_size, lent.num_token_shards)
        else:
            ranks = bound.ranks
        has_room = len(self.cohorts) < lent.readers if bound is None else bound.sizes == sizes
        is_reader = cohort.tp_rank in ranks and cohort.pp_stage < cohort.pp_size
        if not (has_room and is_reader and len(ranks) * cohort.pp_size <= MAX_READERS):
            return self._stranger(message)
        if bound is None:
            self.cohorts[cohort.id] = BoundCohort(sizes, ranks)
            self.num_readers += len(ranks) * cohort.pp_size
        if proven:
            self.keys[reader] = proven
        if is_claim and reader in self.discharged:
            return refused(message, Reason.CONSUMED, "this reader has released the request before")
        return reader

    def _stranger(self, message: Claim | Release) -> Refused:
        """Say why the lease cannot be bound to the message's cohort."""
        cohort, lent = message.cohort, self.lent
        owed = owed_readers(lent.tp_rank, lent.tp_size, cohort.tp_size, lent.num_token_shards)
        reason, shards = Reason.WRONG_COHORT, lent.num_token_shards
        if cohort.tp_rank >= cohort.tp_size or cohort.pp_stage >= cohort.pp_size:
            why = f"tp_rank {cohort.tp_rank} of {cohort.tp_size}, stage {cohort.pp_stage} of {cohort.pp_size}: too high"
        elif len(owed) * cohort.pp_size > MAX_READERS:
            why = f"{len(owed)} x {cohort.pp_size} readers are more than {MAX_READERS}"
        elif cohort.tp_rank not in owed:
            reason, there = Reason.NOT_OWED, f"prefill tp_rank {lent.tp_rank} of {lent.tp_size}"
            if shards > 1:
                there += f", of which each {shards} neighbours share tokens"
            why = f"decode tp_rank {cohort.tp_rank} of {cohort.tp_size} does not answer for {there}"
        elif (bound := self.cohorts.get(cohort.id)) is not None:
            why = f"{cohort.id!r} has (tp_size, pp_size) {bound.sizes}, not {cohort.tp_size, cohort.pp_size}"
        else:
            others = ", ".join(map(repr, self.cohorts))
            why = f"lent to {others}; lend with num_readers={lent.readers + 1} for more"
        return refused(message, reason, why)


_rank_name, _owed_readers = lru_cache(1024)(rank_name), lru_cache(1024)(owed_readers)
_OTHER_KEY = "this reader used another key before"
WHAT = {Claim: "claim", Renew: "renew", Release: "release"}


def refused(message: OfReader, reason: Reason, detail: str = "") -> Refused:
    nonce = RELEASE_NONCE if isinstance(message, Release) else message.nonce
    return Refused(message.key, message.pull_id, nonce, reason, detail)
