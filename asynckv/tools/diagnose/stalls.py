"""Engines that make no steps although something waits for one, by their signs of life and their answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from asynckv import told
from asynckv.tools.diagnose.axis import counted, shown_seconds
from asynckv.tools.diagnose.join import Process
from asynckv.tools.diagnose.records import integer, number

LEAST_S = {"result": 5.0, "announcement": 5.0, "claim": 10.0}
"""Seconds from which a wait is told. A claim may wait for longer, because a prompt has to be computed before."""

LEAST_NOW_S = 10.0  # the same, if nothing was late by it so far: a step that compiles a model's graph takes seconds
UNSEEN_S = 20.0
"""The same for a claim where no step is seen but a lend, so that one long prompt looks like a scheduler that hangs."""

WORDS = {"result": "not taken", "announcement": "not pulled", "claim": "not lent"}


@dataclass(frozen=True, slots=True)
class Stall:
    """A time without a step, by its process's clock; `what` has the number of waiting things by kind."""

    since: float
    until: float
    what: dict[str, int]

    @property
    def seconds(self) -> float:
        return self.until - self.since

    @property
    def text(self) -> str:
        waiting = ", ".join(f"{counted(number, what)} {WORDS[what]}" for what, number in self.what.items())
        return f"{waiting} for {shown_seconds(self.seconds)}"


def stalls(process: Process, since: float = -math.inf, until: float = math.inf) -> Iterator[Stall]:
    """Yield a process's known times without a step, by its signs of life from one moment to the first after another."""
    for record in process.since(told.EngineAlive, since):
        said = record.objects("waits_for_step")
        waits = {what: number(said[what].get("seconds"), 0.0) for what in LEAST_S if what in said}
        is_seen = record.fields.get("step_s") is not None
        least = LEAST_S if is_seen else LEAST_S | {"claim": UNSEEN_S}
        long = {what: s for what, s in waits.items() if s >= least[what]}
        if long:
            yield Stall(record.at - max(long.values()), record.at, {x: integer(said[x].get("number"), 0) for x in long})
        if record.at >= until:
            return


def stalled_s(process: Process, since: float, until: float, what: str = "") -> float:
    """Return for how long a process made no step between two moments of its clock, as far as one line says."""
    found = (x for x in stalls(process, since, until) if not what or what in x.what)
    return max([0.0, *(min(x.until, until) - max(x.since, since) for x in found)])


def last_stall(process: Process) -> Stall | None:
    """Return the time without a step that had not ended at the last sign of life."""
    last = max((x.at for x in process.of(told.EngineAlive)), default=0.0)
    return next((x for x in stalls(process) if x.until == last and x.seconds >= LEAST_NOW_S), None)
