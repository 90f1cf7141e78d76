"""Blocks that were late because a copy to or from a tier did not end: a store or a load has failed, and something may
still read or write them.

No other process has a part in it, so nothing has to be joined: an offload says itself what it holds
(`offload_failed` with `held`), and what became of it (`offload_returned`, `offload_retired`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from asynckv import told
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.join import Process, Service

_OFFLOADS = (told.OffloadStarted, told.OffloadMoved, told.OffloadStopped)
_JOBS = (told.OffloadFailed, told.OffloadRetired, told.OffloadReturned)

REMEDY = (
    "a copy within the process hangs, or its thread has died: look at the disk if it waits for files (dmesg), "
    "and at what else uses the memory; start the engine anew if blocks were given up"
)


@dataclass(frozen=True, slots=True)
class LateCopy:
    """Blocks of one store or load."""

    rank: str  # the rank with the blocks
    what: str  # `store` or `load`
    job: str  # as the rank calls it
    request_id: str
    state: str  # `returned`, `retired` (lost to this process), `closed` (with its engine), or `held` when the log ends
    blocks: int  # how many; -1 if no log says so
    seconds: float  # for how long they were held after the failure, as far as is known
    since: float  # when it failed, in seconds since 1970 by the rank's clock; nan if unknown
    detail: str  # why it failed


def has_offload(process: Process) -> bool:
    """Return True if a process has stored or loaded blocks, or could have."""
    return any(True for _ in process.of(*_OFFLOADS, *_JOBS))


def called(service: Service) -> set[str]:
    """Return the names of stores and loads in the logs: their requests and their jobs."""
    told = (x for process in service.processes.values() for x in process.of(*_JOBS))
    return {name for x in told for name in (x.text("request_id"), x.text("job"))} - {""}


def failures(axis: Axis, names: Iterable[str]) -> list[str]:
    """Describe, a line each, failed stores and loads of some names with blocks that nothing touched afterwards."""
    wanted = set(names)
    return [
        f"its {x.text('what')} on {process.rank} failed at {axis.moment(x.at)} after {x.number('seconds'):,.3g} s "
        f"({x.text('cause')}{': ' if x.text('detail') else ''}{x.text('detail')}); "
        f"{x.integer('blocks'):,} blocks were not moved"
        for process in axis.service.processes.values()
        for x in process.of(told.OffloadFailed)
        if x.integer("held", 0) != 1 and wanted & {x.text("request_id"), x.text("job")}
    ]


def late_copies(service: Service, names: Iterable[str] | None = None) -> list[LateCopy]:
    """Find unfinished stores and loads, the longest held first; only of some requests or jobs, if they are named."""
    wanted = None if names is None else set(names)
    found = [
        copy
        for process in service.processes.values()
        for copy in _of(process)
        if wanted is None or wanted & {copy.request_id, copy.job}
    ]
    return sorted(found, key=lambda x: (-x.seconds if not math.isnan(x.seconds) else -math.inf, x.rank, x.job))


def _of(process: Process) -> Iterable[LateCopy]:
    failed = {x.text("job"): x for x in process.of(told.OffloadFailed) if x.integer("held", 0) == 1}
    retired = {x.text("job"): x for x in process.of(told.OffloadRetired)}
    returned = {x.text("job"): x for x in process.of(told.OffloadReturned)}
    for job in dict.fromkeys([*failed, *retired, *returned]):
        said = [x[job] for x in (returned, retired, failed) if job in x]
        since = failed[job].at if job in failed else math.nan
        ends = "closed" if process.stopped is not None else "held"
        yield LateCopy(
            rank=process.rank,
            what=said[0].text("what"),
            job=job,
            request_id=said[0].text("request_id"),
            state="retired" if job in retired else "returned" if job in returned else ends,
            blocks=max(x.integer("blocks") for x in said if x.event != told.OffloadFailed.event or len(said) == 1),
            seconds=said[0].number("seconds_after_failure", max(process.last_at - since, 0.0)),
            since=since,
            detail=failed[job].text("detail") if job in failed else "",
        )
