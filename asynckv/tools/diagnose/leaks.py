"""Which blocks came back late, and why: one finding per request, with its evidence.

What is late is said in `causes.py`, and so is what each cause needs. Here the parts are put together: what became of
each process (`leaks_processes.py`), what is late (`leaks_late.py`), why a lease is (`leaks_verdict.py`, with
`leaks_unclaimed.py` and `leaks_claimed.py`), why blocks of a pull are (`leaks_blocks.py`), and what one side's logs
alone can say (`leaks_unheard.py`). Every reader that is owed has a story; of a request with several the most certain
one counts, and among these the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from asynckv.tools.diagnose.causes import CAUSE
from asynckv.tools.diagnose.join import Lease, Pull, Request, Service
from asynckv.tools.diagnose.leaks_blocks import of_blocks
from asynckv.tools.diagnose.leaks_clocks import When, aligned
from asynckv.tools.diagnose.leaks_finding import make_leak, words_of
from asynckv.tools.diagnose.leaks_late import how_late, is_forgotten, is_kept, is_overdue, was_read_since
from asynckv.tools.diagnose.leaks_processes import Processes
from asynckv.tools.diagnose.leaks_unheard import of_releases
from asynckv.tools.diagnose.leaks_values import Leak, Story, in_seconds, listed
from asynckv.tools.diagnose.leaks_verdict import stories_of

__all__ = ["find_leaks"]

C = CAUSE


def find_leaks(service: Service, when: When | None = None, of: Iterable[Request] | None = None) -> list[Leak]:
    """Find what was late, the oldest first.

    Args:
        service: Of `join`.
        when: Aligns clocks; if left out, they are aligned by what the processes said to each other.
        of: Of these requests only.
    """
    processes = Processes(service, when or aligned(service))
    wanted = service.requests if of is None else of
    leaks = [leak for request in wanted for leak in _of_request(processes, request)]
    return sorted(leaks, key=lambda x: (math.isnan(x.since), x.since if not math.isnan(x.since) else 0.0))


def _of_request(processes: Processes, request: Request) -> Iterator[Leak]:
    """Find what was late of one request."""
    late = {
        lease: state
        for lease in request.leases.values()
        if (state := how_late(processes, lease)) and not (state == "held" and was_read_since(request, lease))
    }
    forgotten = [x for x in request.all_pulls if is_forgotten(processes, x)]
    if late:
        yield _of_leases(processes, request, late)
    elif any(map(is_overdue, forgotten)):
        yield _of_announcement(processes, request, forgotten)
    elif (unheard := of_releases(processes, request)) is not None:
        yield unheard
    kept = [x for x in request.all_pulls if is_kept(x)]
    if kept:
        yield of_blocks(processes, request, kept)


def _of_leases(processes: Processes, request: Request, late: Mapping[Lease, str]) -> Leak:
    stories = [story for lease, state in late.items() for story in stories_of(processes, request, lease, state)]
    stories.sort(key=lambda x: x.order)
    first = stories[0]
    oldest = min(late, key=lambda x: x.lent_at if not math.isnan(x.lent_at) else math.inf)
    blocks = [x.blocks for x in late]
    return make_leak(
        processes,
        request,
        first,
        side="prefill",
        state=late[oldest],
        holders=tuple(x.process.rank for x in late),
        blocks=sum(blocks) if all(x >= 0 for x in blocks) else -1,
        seconds=max(x.seconds for x in late),
        since=oldest.lent_at,
        owed=tuple(dict.fromkeys(name for x in late for name in x.owed)),
        released={k: v for x in late for k, v in x.released.items()},
        words=tuple(words_of(processes, request, late)),
        also=tuple(dict.fromkeys(x.sentence for x in stories[1:] if x.cause is not first.cause)),
    )


def _of_announcement(processes: Processes, request: Request, pulls: Sequence[Pull]) -> Leak:
    pull = max(pulls, key=lambda x: x.ended.number("seconds", 0.0) if x.ended is not None else 0.0)
    leases = request.leases.values()
    seconds = pull.ended.number("seconds") if pull.ended is not None else pull.process.last_at - pull.begun_at
    names = {"reader": listed(x.process.rank for x in pulls), "seconds": in_seconds(seconds)}
    blocks = [x.blocks for x in leases if x.blocks >= 0]
    return make_leak(
        processes,
        request,
        Story(C.ANNOUNCED_AND_FORGOTTEN, names),
        side="prefill",
        state="announced",
        holders=tuple(x.process.rank for x in leases) or pull.peer_ranks,
        blocks=sum(blocks) if blocks else -1,
        seconds=max([x.seconds for x in leases], default=seconds),
        since=min([x.lent_at for x in leases], default=pull.begun_at),
        owed=tuple(x.process.rank for x in pulls if x.ended is None),
        released={x.process.rank: "failed" for x in pulls if x.ended is not None},
        words=tuple(words_of(processes, request, leases)),
        missing=() if request.leases else tuple(pull.peer_ranks),
    )
