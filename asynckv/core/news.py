"""Events about leases and pulls, made from them."""

from __future__ import annotations

from collections.abc import Sequence

from asynckv.core.lease import Lease
from asynckv.core.pull import Pull
from asynckv.core.types import PullId
from asynckv.core.wire import Refused
from asynckv.told import MAX_NAMED, LeaseGranted, ReleaseRefused, ReleaseUnanswered, short


def pull_ids(pull: Pull) -> tuple[str, str, str, str, int]:
    """Return the fields of `OfPull`."""
    params = pull.params
    return pull.request_id, params.request_id, pull.pull_id, params.engine_id, params.key.sequence


def release_unanswered(pull: Pull, ranks: Sequence[str], cause: str, now: float, detail: str = "") -> ReleaseUnanswered:
    seconds = round(now - pull.published_at, 6)
    return ReleaseUnanswered(*pull_ids(pull), cause, pull.outcome, list(ranks[:MAX_NAMED]), seconds, short(detail))


def release_refused(pull: Pull, rank: str, answer: Refused) -> ReleaseRefused:
    return ReleaseRefused(*pull_ids(pull), answer.reason, short(answer.detail), pull.outcome, [rank])


def lease_granted(lease: Lease, pull_id: PullId) -> LeaseGranted:
    grant, sequence = lease.grants[pull_id], lease.lent.key.sequence
    seconds, after_s = round(grant.until - grant.since, 6), round(grant.since - lease.lent_at, 6)
    return LeaseGranted(lease.lent.request_id, sequence, grant.name, pull_id, seconds, after_s)
