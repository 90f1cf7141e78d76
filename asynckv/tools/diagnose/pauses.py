"""Blocked event loops: of one process, or of all processes of a machine at once, which is the machine's fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from asynckv import told
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.join import Process
from asynckv.tools.diagnose.records import Record

MOST = 0.5  # part of a pause for which the loop's thread was ready to run, so that it lacked a processor


@dataclass(slots=True, eq=False)
class Pause:
    """An absence of one process's event loop, on the axis."""

    process: Process
    record: Record
    start: float
    end: float
    is_hosts: bool = False  # its machine is the cause, and not what ran on the loop

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def held(self) -> dict[str, int]:
        """The number of leases and of pulls that were open meanwhile."""
        return {x: self.record.integer(f"{x}s", 0) for x in ("lease", "pull")}

    @property
    def why(self) -> str:
        """Sentence about the processes of the machine, if it is the machine's fault."""
        if self.lacked("throttled_s"):
            return "had no processor time, because a CPU limit of their cgroup stopped them"
        if self.lacked("waited_s"):
            return "had no processor time"
        return "stood still at once, so their machine had no processor time, or was suspended"

    def lacked(self, what: str) -> bool:
        """Return True if it had no processor for most of it (`waited_s`), or was stopped by a limit (`throttled_s`)."""
        return self.seconds > 0 and self.record.number(what, 0.0) >= MOST * self.seconds


def pauses(axis: Axis, since: float) -> list[Pause]:
    """Find the pauses after a moment of the axis, by time."""
    found: list[Pause] = []
    machines = grouped((x.clock, x) for x in axis.service.processes.values())
    for process in axis.service.processes.values():
        for record in process.of(told.LoopWasAway):
            at = axis.at(process, record.at)
            if not at < since:
                found.append(Pause(process, record, at - max(record.number("seconds", 0.0), 0.0), at))
    found.sort(key=lambda x: x.start)
    away: dict[str, dict[str, Pause]] = defaultdict(dict)  # by machine and process: a loop is away once at a time
    for pause in found:
        pause.is_hosts |= pause.lacked("waited_s")
        others = away[pause.process.clock]
        others |= {pause.process.incarnation: pause}
        for name in [name for name, x in others.items() if x.end < pause.start]:
            del others[name]
        at = pause.record.at - pause.seconds
        running = [x for x in machines[pause.process.clock] if x.first_at <= at <= x.last_at]
        # Ranks of one engine wait for each other, and engines of one process share its loop.
        if len({x.engine_id for x in running}) > 1 and len({x.pid or x.incarnation for x in running}) > 1:
            if all(x.incarnation in others for x in running):
                for other in others.values():
                    other.is_hosts = True
    return found


def longest(found: Iterable[Pause], ranks: Iterable[str], since: float, until: float) -> Pause | None:
    """Find the longest pause of some ranks between two moments of the axis."""
    names = set(ranks)
    mine = (x for x in found if x.process.rank in names and x.start <= until and x.end >= since)
    return max(mine, key=lambda x: x.seconds, default=None)
