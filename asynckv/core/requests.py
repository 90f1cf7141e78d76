"""Every request that a rank has to do with now, as an operator asks for them: plain values, fit for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from asynckv.core.lease import Lease
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.source import ReleaseState, Source

__all__ = ["RankStatus", "RequestStatus", "lease_status", "pull_status"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one side knows of one rank of the other, in one request.

    Attributes:
        rank: Its name, as in the logs of both sides (`decode/tp0@5c3acdd9`); `*` for a decode engine that never spoke
            up.
        state: Of a prefill rank that is pulled from: `connecting`, `unreachable`, `silent`, `met`, `not_lent`,
            `granted`, `landed` (all bytes are there), `proven`, `only_released` (nothing is read of it), `releasing`,
            `released`. Of a reader: `unclaimed`, `granted`, `lapsed` (it let its promise run out), `retrying`, or how
            it released: `complete`, `failed`, `cancelled`.
        address: Of a prefill rank.
        pull_id: Of a reader's newest attempt.
        granted_s: How long the newest promise still runs, as this side counts; None if there is none.
        heard_s: Since when nothing was heard: of a prefill rank at all, of a reader for this request; None if never.
        bytes_read: Landed, of `bytes_planned`.
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
        state: Of the lease or the pull, see `docs/states.md`.
        age_s: Since it was lent, announced or asked for.
        state_s: Since when it is in this state.
        left_s: How long this can last at most, if nobody asks for more; None if nothing bounds it.
        blocks: How many blocks of this engine it holds.
        waits: What it waits for, in words.
        ranks: The ranks of the other side, by stage and rank.
        pull_id: As in the logs.
        attempt: Which attempt at the request this is.
        sequence: Of the key under which it is lent; the same on all ranks of both sides.
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


def lease_status(lease: Lease, blocks: int, now: float) -> RequestStatus:
    """Say how a lent request stands."""
    ranks = []
    for name, state, grant in lease.readers():
        granted = grant.until - now if grant is not None and state == "granted" else None
        heard = now - grant.asked_at if grant is not None else None
        pull_id = grant.pull_id if grant is not None else ""
        ranks.append(RankStatus(name, state, pull_id=pull_id, granted_s=granted, heard_s=heard))
    return RequestStatus(
        kind="lease",
        request_id=lease.lent.request_id,
        prefill_request_id=lease.lent.request_id,
        state=lease.state.value,
        age_s=now - lease.lent_at,
        state_s=now - lease.since,
        left_s=_finite(lease.until - now),
        blocks=blocks,
        waits=lease.waits(now),
        ranks=tuple(ranks),
        sequence=lease.lent.key.sequence,
    )


def pull_status(pull: Pull, peer_of: Callable[[Source], Peer | None], blocks: int, now: float) -> RequestStatus:
    """Say how a pull or an announcement stands."""
    return RequestStatus(
        kind="announced" if pull.is_announced else "pull",
        request_id=pull.request_id,
        prefill_request_id=pull.params.request_id,
        state=pull.state.value,
        age_s=now - pull.history[0][0],
        state_s=now - pull.since,
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
        heard_s=now - peer.heard_at if peer is not None and peer.heard_at > -math.inf else None,
        bytes_read=source.bytes_read,
        bytes_planned=source.plan.num_bytes if source.plan is not None else 0,
        transfers=len(source.running | source.doubtful),
    )


def _rank_state(source: Source, peer: Peer | None, now: float) -> str:
    """The last word that is true."""
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
