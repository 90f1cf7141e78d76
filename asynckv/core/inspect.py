"""Which requests hold which blocks, for how long, and what they wait for, as plain values; and what does not add up.

`holds` is about blocks (entries of the ledger), `requests` is about leases, announcements and pulls, with blocks or
without. Nothing here changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from asynckv.core.attempts import Request, blocks_of
from asynckv.core.decode import DecodeSide
from asynckv.core.flow import READING, WAITING
from asynckv.core.lease import Lease
from asynckv.core.ledger import Holding, Ledger
from asynckv.core.peer import Peer, PeerState
from asynckv.core.prefill import PrefillSide
from asynckv.core.pull import Kind, Pull
from asynckv.core.source import ReleaseState, Source
from asynckv.core.types import PullId

MAX_DETAIL = 200


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks that are not the engine's to use now, as an operator asks for them.

    Attributes:
        request_id: This side's id of the request.
        reason: `lent` or `ending` (a lease), what a pull is at (`reading` ...), `storing` or `loading` (an offload's),
            `quarantined` (the pull or load has failed, something may still write) or `retired`.
        blocks: Group -> block ids.
        held_s: For how long.
        left_s: How long this can last at most, if nobody asks for more; infinite if nothing bounds it.
        waits_for: Readers that are owed, or remote ranks whose transfers run, as they are written in the logs.
        pull_id: Of a pull, as in the logs; of an offload's, its job.
    """

    request_id: str
    reason: str
    blocks: Mapping[int, tuple[int, ...]]
    held_s: float
    left_s: float
    waits_for: tuple[str, ...]
    pull_id: str = ""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one side knows of one rank of the other, in one request.

    Attributes:
        rank: Its name, as in the logs of both sides (`decode/tp0@5c3acdd9`); `*` for a decode engine that never spoke
            up.
        state: Of a prefill rank that is pulled from: `connecting`, `unreachable`, `silent`, `met`, `not_lent`,
            `granted`, `landed` (all bytes are there), `proven`, `only_released` (nothing is read of it), `releasing`,
            `released`. Of a reader: `unclaimed`, `granted`, `lapsed` (it let its promise run out), `gone` (that,
            and its process has ended), `retrying`, or how it released: `complete`, `failed`, `cancelled`.
        address: Of a prefill rank.
        pull_id: Of a reader's newest attempt.
        granted_s: How long the newest promise still runs, as this side counts; None if there is none.
        heard_s: For how long nothing was heard: of a prefill rank at all, of a reader for this request; None if never.
        bytes_read: Bytes that have landed.
        bytes_planned: Bytes that are to be read from this rank.
        transfers: Under way, or in doubt.
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
    """One request: announced, pulled or lent here, and not over.

    Attributes:
        kind: `lease` (lent by this rank), `announced`, `pull`, or `retrying` (between two attempts).
        request_id: This side's id.
        prefill_request_id: The prefill side's.
        state: Of the lease or the pull, see `docs/structure.md`.
        age_s: How long ago it was lent, announced or asked for.
        state_s: For how long it has been in this state.
        left_s: How long this can last at most, if nobody asks for more; None if nothing bounds it.
        blocks: How many blocks of this engine it holds.
        waits: What it waits for, in words.
        ranks: The ranks of the other side, by stage and rank.
        pull_id: As in the logs.
        attempt: Which attempt at the request this is.
        sequence: Of the key under which it is lent; the same on all ranks of both sides.
        refused: Of a lease, messages that were turned down: how long ago, what (`claim`, `renew`, `release`), for which
            reason, whose, and in which words.
        history: What happened to it, and how long after it began; only where it is asked for alone.
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


@dataclass(slots=True)
class Tally:
    """What can only be told of pulls by looking at every one of them."""

    unanswered: int = 0
    transfers_in_doubt: int = 0
    blocks_quarantined: int = 0

    def add(self, pull: Pull, ledger: Ledger) -> None:
        for source in pull.sources:
            self.transfers_in_doubt += len(source.doubtful)
        if not pull.is_published:
            self.unanswered += not pull.is_answered
        elif (hold := ledger.get(pull.pull_id)) is not None:
            self.blocks_quarantined += hold.num_blocks


class Guest(Protocol):
    """A holder of blocks beside leases and pulls: an offload's `store` or `load`, as `what` says."""

    @property
    def what(self) -> str: ...

    @property
    def begun_at(self) -> float: ...

    @property
    def held_as(self) -> tuple[str, float]:
        """Why it holds them, and until when at most."""

    def waits_for(self) -> tuple[str, ...]: ...


class Inspector:
    """What a rank holds and owes, as its ledger and its two sides know it."""

    def __init__(self, ledger: Ledger, prefill: PrefillSide, decode: DecodeSide) -> None:
        self._ledger, self._prefill, self._decode = ledger, prefill, decode
        self.guests: dict[str, Guest] = {}
        """Who else holds blocks, by the holder's name in the ledger."""
        self.beside: Callable[[], Mapping[str, int]] = dict
        """Gauges of whoever uses the memory beside this rank; the engine puts its own function here."""

    def gauges(self, tally: Tally | None = None) -> dict[str, int]:
        """Return what is owed and held right now; `tally` if every pull was counted already."""
        if tally is None:
            tally = Tally()
            for pull in self._decode.pulls.values():
                tally.add(pull, self._ledger)
        return {
            "leases": len(self._prefill.leases),
            "parked": self._prefill.num_parked,
            "pulls": len(self._decode.pulls),
            "pulls_waiting": len(self._decode.by_request),
            "pulls_unanswered": tally.unanswered,
            "pulls_queued": self._decode.admission.num[WAITING],
            "pulls_admitted": self._decode.admission.num[READING],
            "bytes_in_flight": self._decode.posting.in_flight.num_bytes,
            "transfers": len(self._decode.transfers),
            "transfers_in_doubt": tally.transfers_in_doubt,
            "peers": len(self._decode.peers.by_place),
            "blocks_lent": self._ledger.num_held("lent"),
            "blocks_writing": self._ledger.num_held("writing"),
            "blocks_quarantined": tally.blocks_quarantined,
            **self.beside(),
        }

    def holds(self, now: float) -> tuple[HeldBlocks, ...]:
        leases = {key.token: lease for key, lease in self._prefill.leases.items()}
        return tuple(
            self._hold(
                hold,
                self._decode.pulls.get(PullId(hold.holder)) or leases.get(hold.holder) or self.guests.get(hold.holder),
                now,
            )
            for hold in sorted(self._ledger, key=lambda h: h.since)
        )

    def guest_holds(self, most: int, num_ids: int, now: float) -> tuple[HeldBlocks, ...]:
        some = [(self._ledger.get(holder), guest) for holder, guest in list(self.guests.items())[:most]]
        return tuple(self._hold(hold, guest, now, num_ids) for hold, guest in some if hold is not None)

    def hold(self, request: Lease | Pull, most: int, now: float) -> HeldBlocks | None:
        hold = self._ledger.get(_holder(request))
        return self._hold(hold, request, now, most) if hold is not None else None

    def _hold(
        self, hold: Holding, request: Lease | Pull | Guest | None, now: float, most: int | None = None
    ) -> HeldBlocks:
        reason, until, waits_for = str(hold.kind), math.inf, tuple[str, ...]()
        if isinstance(request, Pull):
            waits_for = tuple(x.where for x in request.sources if x.is_waited_for)
            reason, until = request.held_as
        elif isinstance(request, Lease):
            waits_for, reason, until = request.waits_for(), request.state.value, request.until
        elif request is not None:
            waits_for, (reason, until) = request.waits_for(), request.held_as
        return HeldBlocks(
            request_id=hold.request_id,
            reason=reason,
            blocks={g: tuple(ids[:most].tolist()) for g, ids in hold.blocks.items()},
            held_s=now - hold.since,
            left_s=max(until - now, 0.0),
            waits_for=waits_for,
            pull_id="" if request is None or isinstance(request, Lease) else hold.holder,
        )

    def requests(self, now: float) -> tuple[RequestStatus, ...]:
        requests = [self.status(lease, now) for lease in self._prefill.leases.values()]
        requests += [self.status(pull, now) for pull in self._decode.pulls.values()]
        return tuple(sorted(requests, key=lambda request: -request.age_s))

    def status(self, request: Lease | Pull, now: float) -> RequestStatus:
        hold = self._ledger.get(_holder(request))
        blocks = hold.num_blocks if hold is not None else 0
        if isinstance(request, Lease):
            return _lease_status(request, blocks, now)
        return _pull_status(request, self._decode.peer_of, blocks, now)

    def check_integrity(self) -> list[str]:
        wrong = self._ledger.audit()
        holders = {hold.holder for hold in self._ledger}
        leases = {key.token: lease.lent.request_id for key, lease in self._prefill.leases.items()}
        names = leases | {hold.holder: hold.request_id for hold in self._ledger}  # a token is nobody's to see
        expected = set(leases) | set(self.guests)
        expected |= {p.pull_id for p in self._decode.pulls.values() if math.isfinite(p.begun_at) and not p.is_returned}
        for holder in sorted(holders ^ expected):
            who = f"request {names[holder]!r}" if holder in names else holder
            wrong.append(f"{who} {'holds blocks for nobody' if holder in holders else 'holds no blocks'}")
        return wrong

    def stragglers(self, now: float) -> tuple[HeldBlocks, ...]:
        """Return what is still under way: holders of blocks, and pulls that have yet to be begun or released."""
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
            if pull.pull_id not in known
        ]
        return holds + tuple(others)

    def between_attempts(self, requests: Iterable[Request], now: float) -> tuple[HeldBlocks, ...]:
        """Return what requests hold that wait for another attempt."""
        return tuple(
            HeldBlocks(
                request_id=request.wanted.request_id,
                reason="retrying",
                blocks=blocks_of(request.pull) if request.pull is not None else {},
                held_s=now - request.begun_at,
                left_s=max(request.deadline - now, 0.0),
                waits_for=(),
            )
            for request in requests
            if request.wanted.request_id not in self._decode.by_request
        )


def _holder(request: Lease | Pull) -> str:
    return request.lent.key.token if isinstance(request, Lease) else request.pull_id


def retry_status(hold: HeldBlocks) -> RequestStatus:
    return RequestStatus(
        kind="retrying",
        request_id=hold.request_id,
        prefill_request_id="",
        state="retrying",
        age_s=hold.held_s,
        state_s=hold.held_s,
        left_s=hold.left_s,
        blocks=sum(map(len, hold.blocks.values())),
        waits="another attempt follows",
        ranks=(),
    )


def _lease_status(lease: Lease, blocks: int, now: float) -> RequestStatus:
    ranks = []
    for name, state, grant in lease.readers():
        if state == "granted" and grant is not None and grant.until <= now:
            state = "lapsed"  # though nobody has noticed it yet
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
        waits=lease.waits(now),
        ranks=tuple(ranks),
        sequence=lease.lent.key.sequence,
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
        waits=pull.waits(now),
        ranks=tuple(_rank_status(source, peer_of(source), now) for source in pull.sources),
        pull_id=pull.pull_id,
        attempt=pull.attempt,
        sequence=pull.params.key.sequence,
    )


def _rank_status(source: Source, peer: Peer | None, now: float) -> RankStatus:
    return RankStatus(
        rank=source.name,
        state=_rank_state(source, peer, now),
        address=source.address,
        granted_s=source.covered_until - now if source.covered_until > now else None,
        heard_s=max(now - peer.heard_at, 0.0) if peer is not None and peer.heard_at > -math.inf else None,
        bytes_read=source.bytes_read,
        bytes_planned=source.plan.num_bytes if source.plan is not None else 0,
        transfers=len(source.running | source.doubtful),
    )


def _rank_state(source: Source, peer: Peer | None, now: float) -> str:
    met = peer.state if peer is not None else PeerState.NEW
    words = [
        (source.release is ReleaseState.SETTLED, "released"),
        (source.release is ReleaseState.SENT, "releasing"),
        (not source.reads, "only_released"),
        (source.proven, "proven"),
        (met is PeerState.SUSPECT, "silent"),
        (met in (PeerState.CONNECTING, PeerState.LOADING), "connecting"),
        (met in (PeerState.NEW, PeerState.GONE), "unreachable"),
        (source.has_landed, "landed"),
        (source.not_lent_yet, "not_lent"),
        (source.covered_until > now, "granted"),
    ]
    return next((word for is_so, word in words if is_so), "met")


def _finite(seconds: float) -> float | None:
    return max(seconds, 0.0) if seconds < math.inf else None
