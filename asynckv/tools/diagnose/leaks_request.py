"""The request that a person means: by whatever it is called somewhere, and what became of it in one line.

Ids reach people as either side logs them, as a terminal shows them (with escapes), and cut off; a sequence or a pull id
is as good. What begins several ids names none of them, and what is in no log is a mistake, not a request that is well.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

from asynckv.arguments import without_control
from asynckv.errors import ConfigError
from asynckv.tools.diagnose.join import Lease, Pull, Request, Service
from asynckv.tools.diagnose.leaks_values import moment
from asynckv.tools.diagnose.timeline_model import named, names

SHOWN = 5
"""Ids, leases or pulls that are named."""

MAX_LETTERS = 200
"""Of an id that is compared with others."""


def find_requests(service: Service, wanted: str, others: Iterable[str] = ()) -> list[Request]:
    """Find what is called so: exactly, else by sequence, else the one whose name begins so.

    Nothing else is meant by a name of `others`, which are no requests between engines: stores and loads.

    Raises:
        ConfigError: Nothing was asked for, there is no such request, or several begin so.
    """
    if not wanted.strip():
        raise ConfigError("--request '' names nothing; give an id of either side, a pull id or a sequence")
    every = [[x] for x in service.requests]
    if found := [x for (x,) in named(every, wanted, exactly=True)]:
        return found
    if wanted in (others := set(others)):
        return []
    found = [x for (x,) in named(every, wanted)]
    shown = without_control(wanted)[:MAX_LETTERS]
    if len({x.name for x in found}) > 1:  # a request that is tried again elsewhere may have its id there too
        begun = _some(x.name for x in found)
        raise ConfigError(f"--request {shown}: {len(found):,} requests begin so: {begun}; give more of its id")
    if not found:
        near = _nearest(wanted, others.union(*map(names, every)))
        raise ConfigError(
            f"--request {shown}: no such request among {len(every):,}"
            + (f"; the nearest ids are {_some(near)}" if near else "")
            + "; successes are sampled, of stores and loads only failures are logged, and it may be in other logs"
        )
    return found


def _some(ids: Iterable[str]) -> str:
    listed = list(dict.fromkeys(without_control(x)[:MAX_LETTERS] for x in ids))
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN:,} more" if len(listed) > SHOWN else "")


def _nearest(wanted: str, known: Iterable[str]) -> list[str]:
    """Find ids that are like one; of very many those are compared that begin or end as it does."""

    def begins(one: str, other: str) -> int:
        return sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(one, other, strict=False)))

    def shared(name: str) -> int:
        return max(begins(wanted, name), begins(wanted[::-1], name[::-1]))

    near = heapq.nlargest(1000, sorted({x[:MAX_LETTERS] for x in known}), key=shared)
    return difflib.get_close_matches(wanted[:MAX_LETTERS], near, n=3)


def life(request: Request) -> str:
    """Say in one line what became of a request, as far as the logs say."""
    said = [_lease(x) for x in request.leases.values()]
    pulls = [_pull(x) for x in sorted(request.all_pulls, key=lambda x: (math.isnan(x.begun_at), x.begun_at))]
    said = [*_few(said), *_few(pulls)]
    if request.withdrawn:
        said.append(f"{request.withdrawn[-1].rank} withdrew it at {moment(request.withdrawn[-1].at)}")
    return "; ".join(said) or "the logs have nothing but its name"


def _few(said: Sequence[str]) -> list[str]:
    return [*said[:SHOWN], *([f"{len(said) - SHOWN:,} more"] if len(said) > SHOWN else [])]


def _lease(lease: Lease) -> str:
    said = [f"{lease.process.rank} lent it at {moment(lease.lent_at)}"]
    said += [f"{x.name} claimed it after {x.claimed_s:.3g} s" for x in lease.claims.values() if x.claimed_s >= 0]
    if lease.ended is not None:
        by = ", ".join(f"{name}: {how}" for name, how in lease.released.items())
        said.append(f"it was {lease.state} after {lease.seconds:.3g} s{f' ({by})' if by else ''}")
    else:
        said.append(f"no end is logged until {moment(lease.process.last_at)}")
    return ", ".join(said)


def _pull(pull: Pull) -> str:
    called = f" as {pull.request_id}" if pull.request_id else ""
    if pull.ended is None:
        return f"{pull.process.rank} has it{called}, {pull.state or 'without an outcome'}"
    seconds = pull.ended.number("seconds")
    took = f" after {seconds:.3g} s" if not math.isnan(seconds) else ""
    return f"{pull.process.rank} pulled it{called}: {pull.cause}{took}"
