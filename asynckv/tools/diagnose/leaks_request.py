"""Find the request that the operator means, by any of its names.

Ids reach people as either side logs them, as a terminal shows them (with escapes), and cut off; a sequence or a pull id
is as good. A name that is in no log is a mistake, not a request that is well.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from asynckv.arguments import without_control
from asynckv.core.notes import GrantedTo
from asynckv.errors import ConfigError
from asynckv.tools.diagnose.axis import steps_of
from asynckv.tools.diagnose.join import LoggedRequest, Service
from asynckv.tools.diagnose.leaks_values import some

SHOWN = 5  # most ids, leases or pulls that are named
MAX_LETTERS = 200  # most characters of an id that is compared with others


def find_requests(service: Service, wanted: str, others: Iterable[str] = ()) -> list[LoggedRequest]:
    """Find requests by exact name, else by sequence, else by the beginning of their names.

    Names in `others` are stores and loads, which are no requests between engines.

    Raises:
        ConfigError: Nothing was asked for, or there is no such request.
    """
    if not wanted.strip():
        raise ConfigError("'' names nothing; give an id of either side, a pull id or a sequence")
    every, others = [(x, names(x)) for x in service.requests], set(others)
    number = wanted.removeprefix("#")
    ways: Sequence[Callable[[LoggedRequest, set[str]], bool]] = (
        lambda request, _: wanted in _shown(handles(request)),
        lambda _, known: wanted in _shown(known),
        lambda request, _: number.isdecimal() and number == str(request.sequence),
        lambda _, known: wanted not in others and any(x.startswith(wanted) for x in _shown(known)),
    )
    for is_meant in ways:
        if found := [x for x, known in every if is_meant(x, known)]:
            return found
    if wanted in others:
        return []
    ids = _nearest(wanted, others.union(*(known for _, known in every)))
    near = dict.fromkeys(without_control(x)[:MAX_LETTERS] for x in ids)
    raise ConfigError(
        f"{without_control(wanted)[:MAX_LETTERS]}: no such request among {len(every):,}"
        + (f"; the nearest ids are {some(near, SHOWN)}" if near else "")
        + "; successes are sampled, of stores and loads only failures are logged, and it may be in other logs"
    )


def names(request: LoggedRequest) -> set[str]:
    """Return all names of a request: ids of both sides, right or wrong, and of its pulls."""
    out = {request.request_id, request.name, *request.decode_ids}
    out |= {name for x in request.all_pulls for name in (x.prefill_request_id, x.pull_id)}
    for lease in request.leases.values():  # they know the pulls of a reader with a missing log
        out |= lease.pull_ids | {x.text("pull_id") for x in lease.granted}
        out |= {x.what.pull_id for x in steps_of(lease) if isinstance(x.what, GrantedTo)}
    return out - {""}


def handles(request: LoggedRequest) -> set[str]:
    """Return the unique names of a request: `ENGINE:ID` or `ENGINE#N`, with the prefill engine."""
    ids = {
        f"{request.engine_id}:{x}" for x in (request.request_id, request.name, request.sequence) if x not in ("", -1)
    }
    return ids | ({f"{request.engine_id}#{request.sequence}"} if request.sequence >= 0 else set())


def _shown(known: Iterable[str]) -> set[str]:
    """Return names with their displayed forms."""
    return {x for name in known for x in (name, without_control(name))}


def _nearest(wanted: str, known: Iterable[str]) -> list[str]:
    """Find similar ids; if there are very many, only those with the same beginning are compared."""

    def shared(name: str) -> int:
        return sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(name, wanted, strict=False)))

    near = heapq.nlargest(1000, (x[:MAX_LETTERS] for x in known), key=shared)
    return difflib.get_close_matches(wanted[:MAX_LETTERS], near, n=3)
