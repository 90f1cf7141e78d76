"""Stored blocks are lent to engines of other processes, by the host tier's own engine.

Lent blocks are pinned until no reader may read them any more. For a reader, such a request is like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asynckv.arguments import integer, number, text
from asynckv.config import MIN_LEASE_S
from asynckv.core.types import MAX_ID, Reason
from asynckv.errors import LocalProtocolError, Overloaded
from asynckv.geometry.bounds import MAX_RANKS
from asynckv.offload.job import JobEnded, JobKind, JobOutcome
from asynckv.offload.keys import needed
from asynckv.scheduler import PrefillRanks
from asynckv.tiers.rank import Tiers


async def lend(
    tiers: Tiers,
    request_id: str,
    hashes: Sequence[str | bytes],
    chain: list[bytes],
    tokens: int,
    lease_s: float | None,
    num_readers: int,
) -> dict[str, Any]:
    request_id = text("request_id", request_id, MAX_ID, 1)
    num_readers = integer("num_readers", num_readers, 1, MAX_RANKS)
    if (host := tiers.network) is None:
        raise LocalProtocolError("nothing can be lent without OffloadConfig(network=EngineConfig(...))")
    lease, mover, config = host.config.lease, tiers.mover, tiers.config
    if lease_s is not None:
        lease_s = number("lease_s", lease_s, MIN_LEASE_S, lease.max_lease_s)
    if tiers.own.form.tp_size * tiers.own.form.pp_size > 1:
        raise LocalProtocolError("stored blocks are lent by engines of one rank: ranks choose their slots apart")
    job = mover.begin(JobKind.LOAD, request_id, [], {}, config.timeout_s, chain, tokens, {tiers.own: None})
    pin, is_text = f"{job.job_id}-lent", all(isinstance(h, str) for h in hashes)
    try:
        ended = await mover.outcome(job)
        if ended.outcome is JobOutcome.NO_ROOM:
            raise Overloaded(
                f"request {request_id[:200]!r}: its {tokens} tokens cannot be brought to host memory: {ended.cause}",
                request_id=request_id,
                reason=Reason.QUEUE_FULL,
                is_retryable=True,
            )
        params = PrefillRanks(host.config.engine_id, [host.endpoint], lease=lease).make_params(
            request_id,
            _pinned(tiers, pin, request_id, chain, tokens, ended),
            tokens,
            lease_s=lease_s,
            written=True,
            hashes=[str(h) for h in hashes] if is_text else (),
            hash_tokens=config.hash_tokens if is_text else 0,
        )
        lent = host.lend(params, num_readers=num_readers)
    except BaseException:
        mover.unpin(pin)
        raise
    finally:
        mover.unpin(job.job_id)  # what was brought is pinned for the lease, or not at all
    mover.counts["lent"] += 1
    lent._when_released(lambda _: mover.unpin(pin))
    return params


def _pinned(
    tiers: Tiers, pin: str, request_id: str, chain: list[bytes], tokens: int, ended: JobEnded
) -> list[tuple[int, list[int | None]]]:
    """Pin a prefix; returns its slots, as `make_params` takes them."""
    pieces = {piece.group: piece for piece in tiers.own.catalogue.pin(pin, chain, tokens)}
    groups, is_miss = [], ended.outcome in (JobOutcome.DONE, JobOutcome.MISSING)
    for at, group in enumerate(tiers.own.groups):
        places, piece = needed(group, 0, tokens), pieces.get(at)
        known = dict(zip(piece.positions, piece.host_slots, strict=True)) if piece is not None else {}
        if any(place not in known for place in places):
            if is_miss and tiers.own.catalogue.lookup(chain).tokens < tokens <= tiers.found(chain).tokens:
                raise LocalProtocolError(
                    f"request {request_id[:200]!r}: not all of its {tokens} tokens are this geometry's own, and "
                    f"what another has left cannot be lent as it is; load them, store what was loaded, then lend"
                )
            raise LocalProtocolError(
                f"request {request_id[:200]!r}: not all of its {tokens} tokens "
                f"{'are kept any more' if is_miss else 'could be brought to host memory'} "
                f"({ended.cause or 'they were given up'}); look them up again"
            )
        groups.append((0, [known.get(place) for place in range(places.stop)]))
    return groups
