"""Sentences for people about leases and pulls: which ranks they wait for, and why."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain, islice

from asynckv.core.lease import Grant, Lease, LeaseState, Reader
from asynckv.core.pull import Pull, PullState, named
from asynckv.core.types import members

MAX_NAMED = 4  # readers that are named in a sentence
L, S = members(LeaseState), members(PullState)
_WAITS = {
    "granted": "claimed and renewed by",
    "lapsed": "claimed and no longer renewed by",
    "retrying": "to be tried again by",
    "gone": "claimed before its process ended by",
    "unclaimed": "not claimed by",
}


def waits(held: Lease | Pull, now: float) -> str:
    """Return in words what a request waits for."""
    return _lease_waits(held, now) if isinstance(held, Lease) else _pull_waits(held, now)


def is_orderly(held: Lease | Pull, now: float) -> bool:
    """Return True if every owed reader renews its grant, or if a pull is only announced and not late."""
    if isinstance(held, Pull):
        return held.lists is None and not held.is_published and now < held.deadline
    if held.state is not L.LENT or len(held.cohorts) < held.lent.readers:
        return False
    renewed = {x.reader for x in held.grants.values() if now - x.asked_at <= held.lent.grant_s / 2}
    return len(renewed.difference(held.discharged)) == held.num_readers - len(held.discharged)


# -- a lease -----------------------------------------------------------------------------------------


def waits_for(lease: Lease, most: int | None = None) -> tuple[str, ...]:
    """Return names of readers that are owed or hold a grant, with the process that was granted last."""
    return tuple(islice((name for name, state, _ in readers(lease) if state in _WAITS), most))


def readers(lease: Lease) -> Iterator[tuple[str, str, Grant | None]]:
    """Yield name, state and last grant of every reader. The state is `unclaimed`, `granted`, `lapsed`, `retrying`,
    `gone` or the outcome of the release.
    """
    known = last_grants(lease)
    for reader in chain(lease.owing(), sorted(reader for reader in known if reader in lease.discharged)):
        if (grant := known.get(reader)) is None:
            yield str(reader), "unclaimed", None
        else:
            yield grant.name, _state_of(lease, grant), grant
    for reader, discharge in lease.discharged.items():
        if reader not in lease.running:
            yield discharge.name, discharge.outcome.value, None
    for _ in range(lease.lent.readers - len(lease.cohorts)):
        yield "*", "unclaimed", None


def last_grants(lease: Lease) -> dict[Reader, Grant]:
    """Return the last grants of the readers that are owed or hold one."""
    known = lease.past | {grant.reader: grant for grant in lease.grants.values()}
    return {x: grant for x, grant in known.items() if x in lease.running or x not in lease.discharged}


def _state_of(lease: Lease, grant: Grant) -> str:
    if grant.pull_id in lease.grants:
        return "granted"
    if grant.reader in lease.gone:
        return "gone"
    return "retrying" if grant.pull_id in lease.final else "lapsed"


def _lease_waits(lease: Lease, now: float) -> str:
    known, said = last_grants(lease), dict[str, list[Reader]]()
    for reader, grant in known.items():
        words = _WAITS[state := _state_of(lease, grant)]
        if state == "granted" and lease.state is L.ENDING:
            words = "still promised to"
        elif state == "granted" and now - grant.asked_at > lease.lent.grant_s / 2:
            words = "claimed, but a renewal is overdue, by"
        said.setdefault(words, []).append(reader)
    first = {words: heapq.nsmallest(MAX_NAMED, some) for words, some in said.items()}
    lines = {words: _few([known[x].name for x in some], len(said[words])) for words, some in first.items()}
    num_silent = lease.num_readers - len(lease.discharged) - sum(reader not in lease.discharged for reader in known)
    silent = list(map(str, islice((reader for reader in lease.owing() if reader not in known), MAX_NAMED)))
    if unknown := lease.lent.readers - len(lease.cohorts):
        more = "another decode engine" if unknown == 1 else f"{unknown} decode engines"
        silent.append(more if lease.cohorts or unknown > 1 else "any reader")
        num_silent += 1
    if silent:
        lines[_WAITS["unclaimed"]] = _few(silent, num_silent)
    return "; ".join(f"{words} {lines[words]}" for words in sorted(lines))


def _few(names: list[str], number: int) -> str:
    return ", ".join(names[:MAX_NAMED]) + (f" and {number - MAX_NAMED} more" if number > MAX_NAMED else "")


# -- a pull ------------------------------------------------------------------------------------------


def _pull_waits(pull: Pull, now: float) -> str:
    match pull.state:
        case S.DRAINING | S.QUARANTINED:
            writing = [x for x in pull.sources if x.running or x.doubtful]
            return f"a transfer may still write the blocks, from {named(writing)}"
        case S.NOTIFYING:
            return f"the release is not acknowledged by {named([x for x in pull.sources if not x.is_settled])}"
        case S.ANNOUNCED if renewed := [x for x in pull.sources if x.covered_until > now]:
            return f"announced and never pulled; its lease is renewed at {named(renewed)}"
        case S.RELEASED:
            return ""
        case _:
            return pull.waiting_for(now)[1]
