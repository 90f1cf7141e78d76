"""Find the request that the operator means, by any of its names.

Ids reach people as either side logs them, as a terminal shows them (with escapes), and cut off; a sequence or a pull id
is as good. A name that is in no log is a mistake, not a request that is well.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections.abc import Iterable

from asynckv.arguments import without_control
from asynckv.errors import ConfigError
from asynckv.tools.diagnose.join import Request, Service
from asynckv.tools.diagnose.leaks_values import some
from asynckv.tools.diagnose.timeline_model import named, names

SHOWN = 5
"""Most ids, leases or pulls that are named."""

MAX_LETTERS = 200
"""Most characters of an id that is compared with others."""


def find_requests(service: Service, wanted: str, others: Iterable[str] = ()) -> list[Request]:
    """Find requests by exact name, else by sequence, else by the beginning of their names.

    Names in `others` are stores and loads, which are no requests between engines.

    Raises:
        ConfigError: Nothing was asked for, or there is no such request.
    """
    if not wanted.strip():
        raise ConfigError("'' names nothing; give an id of either side, a pull id or a sequence")
    every = [[x] for x in service.requests]
    if found := [x for (x,) in named(every, wanted, exactly=True)]:
        return found
    if wanted in (others := set(others)):
        return []
    found = [x for (x,) in named(every, wanted)]
    shown = without_control(wanted)[:MAX_LETTERS]
    if not found:
        ids = _nearest(wanted, others.union(*map(names, every)))
        near = dict.fromkeys(without_control(x)[:MAX_LETTERS] for x in ids)
        raise ConfigError(
            f"{shown}: no such request among {len(every):,}"
            + (f"; the nearest ids are {some(near, SHOWN)}" if near else "")
            + "; successes are sampled, of stores and loads only failures are logged, and it may be in other logs"
        )
    return found


def _nearest(wanted: str, known: Iterable[str]) -> list[str]:
    """Find similar ids; if there are very many, only those with the same beginning are compared."""

    def shared(name: str) -> int:
        return sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(name, wanted, strict=False)))

    near = heapq.nlargest(1000, (x[:MAX_LETTERS] for x in known), key=shared)
    return difflib.get_close_matches(wanted[:MAX_LETTERS], near, n=3)
