"""Questions about a rank: which requests hold which blocks, for how long, and what they wait for, as plain values.

`holds` lists blocks (entries of the ledger). `requests` lists leases, followings, announcements and pulls, with blocks
or without.
`check_integrity` finds contradictions. Nothing in this module changes any state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from asynckv.account.waits import readers, waits, waits_for
from asynckv.core.attempts import RequestState, blocks_of, holder_of
from asynckv.core.flow import READING, WAITING
from asynckv.core.following import Following
from asynckv.core.lease import Lease
from asynckv.core.ledger import Holding, Ledger, Occupant
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Kind, Pull
from asynckv.core.rank import RankCore
from asynckv.core.source import ReleaseState, Source
from asynckv.core.types import KVTransferParams
from asynckv.told import StepWait

MAX_DETAIL = 200
LEAST_STEP_S = 1.0  # nothing is said to wait for a step before this time, because healthy engines compute between steps
MAX_RANKS = 256
"""Ranks that are listed for one request. A claim alone says how many ranks its engine has, so thousands may be owed."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks that the engine must not use now, for an operator.

    Attributes:
        request_id: This side's id of the request.
        reason: `lent` or `ending` (a lease), the state of a pull (`reading` ...), `storing` or `loading` (an offload),
            `quarantined` (the pull or load has failed, and a transfer may still write) or `retired`; `early` or
            `retrying` for all blocks of a request with a head start, or between two attempts.
        blocks: Group -> block ids.
        held_s: Seconds for which the blocks have been held.
        left_s: Seconds that this can last at most, unless a reader asks for more; infinite if nothing bounds it.
        waits_for: The first 256 readers that are owed, or remote ranks with running transfers, as the logs write them.
        pull_id: Id of the pull, as in the logs; for an offload, its job.
        copies: Packed copies of the blocks that readers wait for or read.
    """

    request_id: str
    reason: str
    blocks: Mapping[int, tuple[int, ...]]
    held_s: float
    left_s: float
    waits_for: tuple[str, ...]
    pull_id: str = ""
    copies: int = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One side's knowledge of one rank of the other side, in one request.

    Attributes:
        rank: Name as in the logs of both sides (`decode/tp0@5c3acdd9`); `*` for a decode engine never heard of.
        state: For a prefill rank that is pulled from: `connecting`, `unreachable`, `silent`, `met`, `not_lent`,
            `granted`, `landed` (all bytes are there), `proven`, `only_released` (nothing is read from it), `releasing`,
            `released`. For a reader: `unclaimed`, `granted`, `lapsed` (its grant ran out), `gone` (its grant ran out,
            and its process has ended), `retrying`, or the outcome of its release: `complete`, `failed`, `cancelled`.
        address: Address of a prefill rank.
        pull_id: Newest attempt of a reader.
        granted_s: Seconds that the newest grant still runs, by this side's clock; None if there is no grant.
        heard_s: Seconds since any message of a prefill rank, or a reader's last one on this request; None without one.
        bytes_read: Bytes that have landed.
        bytes_planned: Bytes that are to be read from this rank.
        transfers: Transfers under way, or in doubt.
    """

    rank: str
    state: str
    address: str = ""
    pull_id: str = ""
    granted_s: float | None = None
    heard_s: float | None = None
    bytes_read: int = 0
    bytes_planned: int = 0
    transfers: int = 0


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One request: followed, announced, pulled or lent here, and not over.

    Attributes:
        kind: `lease` (lent by this rank), `follow`, `announced`, `pull`, `early` (it reads pieces, or waits for the
            last one), or `retrying` (between two attempts). A piece that failed and may still write is a `pull`.
        request_id: This side's id of the request.
        prefill_request_id: The prefill side's id of the request; empty while it is followed.
        state: State of the lease or the pull, see `docs/structure.md`.
        age_s: Seconds since the request was lent, announced or asked for.
        state_s: Seconds in this state.
        left_s: Seconds that this can last at most, unless a reader asks for more; None if nothing bounds it.
        blocks: Number of this engine's blocks that the request holds.
        waits: Reason for waiting, in words.
        ranks: Ranks of the other side, by stage and rank; of readers the first 256.
        pull_id: Attempt, as in the logs.
        attempt: Number of the attempt.
        sequence: Number of the key under which the request is lent; the same on all ranks of both sides.
        refused: Messages about a lease that were refused: seconds ago, kind (`claim`, `renew`, `release`), reason,
            sender and words.
        history: Events and the seconds at which they happened after the begin; only if one request is asked for alone.
        warn_s: Seconds in this state, or of being lent, after which the log says so; None if it never does.
    """

    kind: str
    request_id: str
    prefill_request_id: str
    state: str
    age_s: float
    state_s: float
    left_s: float | None
    blocks: int
    waits: str
    ranks: tuple[RankStatus, ...]
    pull_id: str = ""
    attempt: int = 1
    sequence: int | None = None
    refused: tuple[tuple[float, str, str, str, str], ...] = ()
    history: tuple[tuple[float, str], ...] = ()
    warn_s: float | None = None


@dataclass(slots=True)
class Tally:
    """Counts that need a look at every pull."""

    unanswered: int = 0
    transfers_in_doubt: int = 0
    blocks_quarantined: int = 0

    def add(self, pull: Pull, ledger: Ledger) -> None:
        for source in pull.sources:
            self.transfers_in_doubt += len(source.doubtful)
        if not pull.is_published:
            self.unanswered += pull.kind is not Kind.PIECE and any(
                x.covered_until == -math.inf for x in pull.sources if x.reads
            )
        elif (hold := ledger.get(holder_of(pull))) is not None:
            self.blocks_quarantined += hold.num_blocks


class Inspector:
    """Everything that a rank holds and owes, from its ledger and its two sides.

    Args:
        beside: Function that returns the gauges of other users of the memory.
        untaken: Function that returns the times of results that wait to be taken.
    """

    def __init__(
        self, core: RankCore, beside: Callable[[], Mapping[str, int]] = dict, untaken: Callable[[], list[float]] = list
    ) -> None:
        self._ledger, self._prefill, self._decode = core.ledger, core.prefill, core.decode
        self._beside, self._untaken = beside, untaken

    def gauges(self, tally: Tally | None = None) -> dict[str, int]:
        """Return counts of what is owed and held now. `tally` saves the count if every pull was counted already."""
        if tally is None:
            tally = Tally()
            for pull in self._decode.pulls.values():
                tally.add(pull, self._ledger)
        return {
            "leases": len(self._prefill.leases),
            "parked": self._prefill.parking.num_parked,
            "followers": self._prefill.parking.num_followers,
            "tickets": len(self._prefill.offers.lent),
            "follows": len(self._decode.follows.by_id),
            "copies": self._prefill.copies.slots.num_in_use,
            "pulls": len(self._decode.pulls),
            "pulls_waiting": len(self._decode.by_request),
            "pulls_unanswered": tally.unanswered,
            "pulls_queued": self._decode.admission.num[WAITING],
            "pulls_admitted": self._decode.admission.num[READING],
            "bytes_in_flight": self._decode.posting.in_flight.num_bytes,
            "transfers": len(self._decode.transfers),
            "transfers_in_doubt": tally.transfers_in_doubt,
            "transfers_detached": sum([each.is_detached for each in self._decode.transfers.values()]),
            "peers": len(self._decode.peers.by_place),
            "blocks_lent": self._ledger.num_held("lent"),
            "blocks_writing": self._ledger.num_held("writing"),
            "blocks_quarantined": tally.blocks_quarantined,
            **self._beside(),
        }

    def step_s(self, now: float) -> float | None:
        return None if self._decode.alive_at == math.inf else round(max(now - self._decode.alive_at, 0.0), 3)

    def waits_for_step(self, now: float) -> dict[str, StepWait]:
        """Return what only a step of the engine around this rank can take: `result`, `announcement` or `claim`.

        A step is a call that gives orders or takes results. Where that engine runs this loop itself, it is a lend, and
        a claim waits for one only after the time of a lease, because its prompt may be long.
        Nothing waits in an engine that is idle, however long it makes no steps.
        """
        decode, prefill, step_at = self._decode, self._prefill, self._decode.alive_at
        since = {"result": self._untaken(), "announcement": list[float](), "claim": prefill.claimed_at(now)}
        if now - step_at >= LEAST_STEP_S:  # otherwise nothing is counted, because there may be very many
            announced = [x for x in decode.pulls.values() if x.kind is Kind.ANNOUNCEMENT and not x.is_published]
            since["announcement"] = [x.called_at for x in announced]
            since["announcement"] += [at for at, _ in decode.abandoned.values() if at == step_at]
        least = dict.fromkeys(since, LEAST_STEP_S)
        if step_at == math.inf:
            step_at, least["claim"] = prefill.lent_at, prefill.lease_s
        waits = {
            what: now - (min(at) if what == "result" else max(min(at), step_at)) for what, at in since.items() if at
        }
        return {what: StepWait(len(since[what]), round(s, 3)) for what, s in waits.items() if s >= least[what]}

    def holds(self, now: float) -> tuple[HeldBlocks, ...]:
        """Return the holders of blocks, and the requests that wait for another attempt at filling theirs."""
        early = self._early()  # `between_attempts` lists these
        others = [hold for hold in self._ledger if hold.holder not in early]
        return self._holds(others, now) + self.between_attempts(now)

    def _early(self) -> set[str]:
        """Return the holders of blocks that pieces fill."""
        early = [x for x in self._decode.between.values() if not x.attempts]
        return {x.head.holder for x in early if x.head is not None and not (x.state is RequestState.OVER and x.is_free)}

    def sharing(
        self, requests: Collection[KVTransferParams], now: float, *, has_ended: bool = False
    ) -> tuple[HeldBlocks, ...]:
        """Return other holders of blocks that these requests name, and of each only those blocks. An engine that has
        ended grants no more, so that its leases hold blocks only while a grant runs.
        """
        own, free = {params.key for params in requests}, set[str]()
        for key, lease in self._prefill.leases.items() if has_ended else ():
            if (key in own and lease.lent.recall) or all(grant.until <= now for grant in lease.grants.values()):
                free.add(key.token)
        shared = self._ledger.shared(params.groups for params in requests)
        return self._holds([hold for hold in shared if hold.holder not in free], now)

    def _holds(self, holdings: Collection[Holding], now: float) -> tuple[HeldBlocks, ...]:
        if not holdings:
            return ()
        leases = {key.token: lease for key, lease in self._prefill.leases.items()}
        pulls, occupants = {holder_of(pull): pull for pull in self._decode.pulls.values()}, self._ledger.occupants
        return tuple(
            self._hold(hold, pulls.get(hold.holder) or leases.get(hold.holder) or occupants.get(hold.holder), now)
            for hold in sorted(holdings, key=lambda h: h.since)
        )

    def occupants(self, most: int, num_ids: int, now: float) -> tuple[HeldBlocks, ...]:
        some = [(self._ledger.get(holder), each) for holder, each in islice(self._ledger.occupants.items(), most)]
        return tuple(self._hold(hold, each, now, num_ids) for hold, each in some if hold is not None)

    def hold(self, request: Lease | Pull | Following, most: int, now: float) -> HeldBlocks | None:
        if isinstance(request, Following) or (hold := self._ledger.get(_holder(request))) is None:
            return None
        return self._hold(hold, request, now, most)

    def _hold(
        self, hold: Holding, request: Lease | Pull | Occupant | None, now: float, most: int | None = None
    ) -> HeldBlocks:
        reason, until, names = str(hold.kind), math.inf, tuple[str, ...]()
        if isinstance(request, Pull):
            names = tuple(x.where for x in request.sources if x.is_waited_for)
            reason, until = request.state.value, request.deadline
            if request.is_published:
                reason, until = "retired" if request.is_retired else "quarantined", request.retire_at
        elif isinstance(request, Lease):
            names, reason, until = waits_for(request, MAX_RANKS), request.state.value, request.until
        elif request is not None:
            names, (reason, until) = request.waits_for(), request.held_as
        return HeldBlocks(
            request_id=hold.request_id,
            reason=reason,
            blocks={g: tuple(ids[:most].tolist()) for g, ids in hold.blocks.items()},
            held_s=now - hold.since,
            left_s=max(until - now, 0.0),
            waits_for=names,
            pull_id="" if request is None or isinstance(request, Lease) else hold.holder,
            copies=len(self._prefill.copies.by_key.get(request.lent.key, ())) if isinstance(request, Lease) else 0,
        )

    def requests(self, now: float) -> tuple[RequestStatus, ...]:
        requests = [self.status(lease, now) for lease in self._prefill.leases.values()]
        requests += [self.status(pull, now) for pull in self._decode.pulls.values() if not is_hidden(pull)]
        requests += [self.status(following, now) for following in self._decode.follows.by_id.values()]
        requests.sort(key=lambda request: -request.age_s)
        return (*requests, *map(retry_status, self.between_attempts(now)))

    def status(self, request: Lease | Pull | Following, now: float) -> RequestStatus:
        if isinstance(request, Following):
            return _follow_status(request, self._decode.peers.by_place.get(request.rank.place), now)
        hold = self._ledger.get(_holder(request))
        blocks = hold.num_blocks if hold is not None else 0
        if isinstance(request, Lease):
            return _lease_status(request, blocks, now)
        return _pull_status(request, self._decode.peer_of, blocks, now)

    def check_integrity(self) -> list[str]:
        wrong = self._ledger.audit()
        holders = {hold.holder for hold in self._ledger}
        leases = {key.token: lease.lent.request_id for key, lease in self._prefill.leases.items()}
        names = leases | {hold.holder: hold.request_id for hold in self._ledger}  # a token must stay secret
        expected = set(leases) | set(self._ledger.occupants) | self._early()
        expected |= {
            holder_of(p) for p in self._decode.pulls.values() if math.isfinite(p.begun_at) and not p.is_returned
        }
        for holder in sorted(holders ^ expected):
            name = f"request {names[holder]!r}" if holder in names else holder
            wrong.append(f"{name} holds {'blocks without a lease, pull or job' if holder in holders else 'no blocks'}")
        wrong += self._decode.follows.audit()
        offers = self._prefill.offers
        lent = {ticket for key, ticket in offers.tickets.items() if key not in offers.pieces}
        unlent = offers.tickets.keys() - self._prefill.leases.keys()
        if lent != offers.lent.keys() or unlent != offers.pieces.keys():
            wrong.append("tickets are not those of lent requests and of pieces")
        strays = sum([key not in self._prefill.leases for key in self._prefill.copies.by_key])
        return [*wrong, f"{strays} requests are not lent, and have packed copies"] if strays else wrong

    def stragglers(self, now: float) -> tuple[HeldBlocks, ...]:
        """Return everything under way: holders of blocks, and pulls that have yet to be begun or released."""
        holds = self.holds(now)
        known = {hold.pull_id for hold in holds}
        others = [
            HeldBlocks(
                request_id=pull.request_id,
                reason=pull.state.value,
                blocks={},
                held_s=now - pull.history[0][0],
                left_s=max(pull.until - now, 0.0),
                waits_for=tuple(source.where for source in pull.sources if not source.is_settled),
                pull_id=pull.pull_id,
            )
            for pull in self._decode.pulls.values()
            if pull.pull_id not in known and not is_hidden(pull)
        ]
        return holds + tuple(others)

    def between_attempts(self, now: float) -> tuple[HeldBlocks, ...]:
        """Return the blocks of requests that have a head start, or wait for another attempt."""
        return tuple(
            HeldBlocks(
                request_id=request.wanted.request_id,
                reason="retrying" if request.attempts else "early",
                blocks=blocks_of(request.pull, request.head),
                held_s=now - request.begun_at,
                left_s=max(request.deadline - now, 0.0),
                waits_for=(),
            )
            for request in self._decode.between.values()
        )


def _holder(request: Lease | Pull) -> str:
    return request.lent.key.token if isinstance(request, Lease) else holder_of(request)


def is_hidden(request: Lease | Pull | Following) -> bool:
    """Return True for a piece that is part of its request, and holds nothing after its end; and for a pull that only
    claims while its request waits for a piece."""
    if not isinstance(request, Pull) or (request.is_published and not request.is_returned):
        return False
    return request.kind is Kind.PIECE or (request.kind is Kind.PULL and request.lists is None)


def retry_status(hold: HeldBlocks) -> RequestStatus:
    return RequestStatus(
        kind=hold.reason,
        request_id=hold.request_id,
        prefill_request_id="",
        state=hold.reason,
        age_s=hold.held_s,
        state_s=hold.held_s,
        left_s=_finite(hold.left_s),
        blocks=sum(map(len, hold.blocks.values())),
        waits="another attempt follows" if hold.reason == "retrying" else "pieces of it are read while it is computed",
        ranks=(),
    )


def _lease_status(lease: Lease, blocks: int, now: float) -> RequestStatus:
    ranks = []
    for name, state, grant in islice(readers(lease), MAX_RANKS):
        if state == "granted" and grant is not None and grant.until <= now:
            state = "lapsed"  # the lease itself notices at its next event
        granted = grant.until - now if grant is not None and state == "granted" else None
        heard = max(now - grant.asked_at, 0.0) if grant is not None else None
        pull_id = grant.pull_id if grant is not None else ""
        ranks.append(RankStatus(name, state, pull_id=pull_id, granted_s=granted, heard_s=heard))
    return RequestStatus(
        kind="lease",
        request_id=lease.lent.request_id,
        prefill_request_id=lease.lent.request_id,
        state=lease.state.value,
        age_s=now - lease.lent_at,
        state_s=max(now - lease.since, 0.0),
        left_s=_finite(lease.until - now),
        blocks=blocks,
        waits=waits(lease, now),
        ranks=tuple(ranks),
        sequence=lease.lent.key.sequence,
        warn_s=_finite(lease.lent.warn_s),
        refused=tuple((now - x.at, x.what, x.reason, x.who, x.detail[:MAX_DETAIL]) for x in lease.refused),
    )


def _pull_status(pull: Pull, peer_of: Callable[[Source], Peer | None], blocks: int, now: float) -> RequestStatus:
    return RequestStatus(
        kind="announced" if pull.kind is Kind.ANNOUNCEMENT else "pull",
        request_id=pull.request_id,
        prefill_request_id=pull.params.request_id,
        state=pull.state.value,
        age_s=now - pull.history[0][0],
        state_s=max(now - pull.since, 0.0),
        left_s=_finite(pull.until - now),
        blocks=blocks,
        waits=waits(pull, now),
        ranks=tuple(_rank_status(source, peer_of(source), now) for source in pull.sources),
        pull_id=pull.pull_id,
        attempt=pull.attempt,
        sequence=pull.params.key.sequence,
        warn_s=_finite(pull.warn_s),
    )


def _follow_status(following: Following, peer: Peer | None, now: float) -> RequestStatus:
    rank, state, age_s = following.rank, following.state.value, max(now - following.since, 0.0)
    met = _MET.get(peer.state if peer is not None else PeerState.NEW, "not_lent")
    ranks = (RankStatus(rank.name, met, rank.place[0], heard_s=_heard_s(peer, now)),)
    left_s, said = _finite(following.deadline - now), f"not offered yet by {rank.name}"
    name, follow_id = following.request_id, following.follow_id
    return RequestStatus("follow", name, "", state, age_s, age_s, left_s, 0, said, ranks, follow_id)


def _heard_s(peer: Peer | None, now: float) -> float | None:
    return max(now - peer.heard_at, 0.0) if peer is not None and peer.heard_at > -math.inf else None


def _rank_status(source: Source, peer: Peer | None, now: float) -> RankStatus:
    return RankStatus(
        rank=source.name,
        state=_rank_state(source, peer, now),
        address=source.address,
        granted_s=source.covered_until - now if source.covered_until > now else None,
        heard_s=_heard_s(peer, now),
        bytes_read=source.bytes_read,
        bytes_planned=source.plan.num_bytes if source.plan is not None else 0,
        transfers=len(source.running | source.doubtful),
    )


_MET = {PeerState.SUSPECT: "silent"} | dict.fromkeys((PeerState.CONNECTING, PeerState.LOADING), "connecting")
_MET |= dict.fromkeys((PeerState.NEW, PeerState.GONE), "unreachable")  # words for ranks that cannot be asked now


def _rank_state(source: Source, peer: Peer | None, now: float) -> str:
    met = peer.state if peer is not None else PeerState.NEW
    words = [
        (source.release is ReleaseState.SETTLED, "released"),
        (source.release is ReleaseState.SENT, "releasing"),
        (not source.reads, "only_released"),
        (source.proven, "proven"),
        (met in _MET, _MET.get(met, "")),
        (source.not_lent_yet, "not_lent"),
        (source.has_landed, "landed"),
        (source.covered_until > now, "granted"),
    ]
    return next((word for is_so, word in words if is_so), "met")


def _finite(seconds: float) -> float | None:
    return max(seconds, 0.0) if seconds < math.inf else None
