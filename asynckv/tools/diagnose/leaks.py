"""Which blocks came back late, and why: one finding per request, with its evidence.

What is late is said in `causes.py`, and so is the table of verdicts. Here the parts are put together: what became of
each process (`presence.py`), what is late (`leaks_late.py`), why a lease is (`leaks_why.py`), and what pulls alone tell
(`leaks_pulls.py`). Every reader that is owed has a verdict; of a request with several the most certain one counts, and
among these the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from asynckv.tools.diagnose.axis import When, make_axis
from asynckv.tools.diagnose.join import Lease, Request, Service
from asynckv.tools.diagnose.leaks_finding import make_leak, words_of
from asynckv.tools.diagnose.leaks_late import how_late, is_forgotten, is_kept, is_overdue, was_read_since
from asynckv.tools.diagnose.leaks_pulls import of_announcement, of_blocks, of_releases
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.leaks_why import verdicts
from asynckv.tools.diagnose.presence import Presence


def find_leaks(service: Service, when: When | None = None, of: Iterable[Request] | None = None) -> list[Leak]:
    """Find what was late, the oldest first.

    Args:
        service: Of `join`.
        when: Aligns clocks; if left out, they are aligned by what the processes said to each other.
        of: Of these requests only.
    """
    presence = Presence(service, when or make_axis(service).when)
    leaks = [leak for request in (service.requests if of is None else of) for leak in _of_request(presence, request)]
    return sorted(leaks, key=lambda x: (math.isnan(x.since), x.since if not math.isnan(x.since) else 0.0))


def _of_request(presence: Presence, request: Request) -> Iterator[Leak]:
    """Find what was late of one request."""
    late = {
        lease: state
        for lease in request.leases.values()
        if (state := how_late(presence, lease)) and not (state == "held" and was_read_since(request, lease))
    }
    forgotten = [x for x in request.all_pulls if is_forgotten(presence, x)]
    if late:
        yield _of_leases(presence, request, late)
    elif any(map(is_overdue, forgotten)):
        yield of_announcement(presence, request, forgotten)
    elif (unheard := of_releases(presence, request)) is not None:
        yield unheard
    kept = [x for x in request.all_pulls if is_kept(x)]
    if kept:
        yield of_blocks(presence, request, kept)


def _of_leases(presence: Presence, request: Request, late: Mapping[Lease, str]) -> Leak:
    found = [verdict for lease, state in late.items() for verdict in verdicts(presence, request, lease, state)]
    oldest = min(late, key=lambda x: x.lent_at if not math.isnan(x.lent_at) else math.inf)
    blocks = [x.blocks for x in late]
    return make_leak(
        presence,
        request,
        sorted(found, key=lambda x: x.order),
        side="prefill",
        state=late[oldest],
        holders=tuple(x.process.rank for x in late),
        blocks=sum(blocks) if all(x >= 0 for x in blocks) else -1,
        seconds=max(x.seconds for x in late),
        since=oldest.lent_at,
        owed=tuple(dict.fromkeys(name for x in late for name in x.owed)),
        released={k: v for x in late for k, v in x.released.items()},
        words=tuple(words_of(presence, request, late)),
    )
