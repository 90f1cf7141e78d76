"""Where logs end without a goodbye: a process that was killed writes no last line, and others notice later.

Whether it died is the verdict of `presence.py`, the same for all commands. Here is what can be drawn of it: its
last line, by when it was gone, and who noticed when. In between nobody knows. A log that only ends early, of a process
that may live and have nothing to say, is no death, and is told as what it is.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from asynckv.core import told
from asynckv.tools.diagnose.axis import Axis, counted, shown_seconds
from asynckv.tools.diagnose.join import Process
from asynckv.tools.diagnose.leaks_values import moment
from asynckv.tools.diagnose.presence import Fate, Presence, early_ends

MAX_NOTICED = 8  # of one process; of a prefill rank with a thousand readers the first will do
MAX_TEXT = 400  # letters of what others say; it comes from logs


@dataclass(frozen=True, slots=True)
class Notice:
    """Somebody noticed that a process was gone."""

    at: float
    process: Process
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """A log that ends without a goodbye."""

    process: Process  # whose
    at: float  # its last line, on the axis
    by: float  # when it was surely gone, clocks included; nan if nobody can say
    how: str  # `died`; `died or was cut off`, if nothing but its silence says so; `silent`, if it may live
    text: str  # the same in words, with the evidence
    noticed: tuple[Notice, ...]  # by whom, and when; the first of them

    @property
    def is_death(self) -> bool:
        """It is more than a log that ends early."""
        return self.how != "silent"

    @property
    def is_proved(self) -> bool:
        """It is a death, and more than silence says so."""
        return self.how == "died"


def ends(axis: Axis) -> dict[str, End]:
    """Find them, by incarnation."""
    processes = Presence(axis.service, axis.when, lambda process, at: moment(axis.at(process, at)))
    early = {x.rank: x.before_s for x in early_ends(axis.service, axis.when)}
    noticed = _noticed(axis)
    out = {}
    for process in axis.service.processes.values():
        fate = processes.fate(process)
        is_early = fate.kind == "silent" and process.rank in early
        if fate.kind != "died" and not is_early:
            continue
        said = fate.why[: 2 * MAX_TEXT]
        if is_early:
            said += f" ({shown_seconds(early[process.rank])} before the last line of all)"
        out[process.incarnation] = _end(axis, process, fate, said, noticed[process.incarnation])
    return out


def _end(axis: Axis, process: Process, fate: Fate, said: str, noticed: list[Notice]) -> End:
    at = axis.at(process, process.last_at)
    # Everybody's time is that of the first group.
    by = max(fate.before, at) if math.isfinite(fate.before) and axis.group(process) == 0 else math.nan
    if fate.kind == "died":
        said = f"{fate.gone}: {said}"
        if math.isfinite(by):
            said += f"; it was gone within {shown_seconds(by - at)} of its last line"
    # Who lost it before its last line has made up with it since.
    after = sorted((x for x in noticed if x.at >= at - axis.offset(process).within_s), key=lambda x: x.at)
    if len(after) > MAX_NOTICED:
        said += f"; {counted(len(after), 'line')} of others tell of it"
    how = fate.gone if fate.kind == "died" else "silent"
    return End(process, at, by, how, said, tuple(after[:MAX_NOTICED]))


def _noticed(axis: Axis) -> dict[str, list[Notice]]:
    """Return what others said of processes that they lost."""
    out: dict[str, list[Notice]] = defaultdict(list)
    for incarnation, notice in itertools.chain(_lost(axis), _lapsed(axis)):
        if math.isfinite(notice.at):
            out[incarnation].append(notice)
    return out


def _lost(axis: Axis) -> Iterator[tuple[str, Notice]]:
    """Readers lose a prefill rank."""
    for process in axis.service.processes.values():
        for record in process.of(told.PeerChanged):
            if record.text("state") == "gone" and record.text("cause") in ("peer_lost", "restarted"):
                said = f"lost it: {record.text('detail') or record.text('cause')}"[:MAX_TEXT]
                yield record.text("peer_incarnation"), Notice(axis.at(process, record.at), process, said)


def _lapsed(axis: Axis) -> Iterator[tuple[str, Notice]]:
    """A prefill rank hears no more of a reader, of which it knows nothing else."""
    for request in axis.service.requests:
        for lease in request.leases.values():
            if lease.state != "expired" or lease.ended is None:
                continue
            for name in lease.owed:
                reader = axis.service.process_named(name)
                if reader is not None:
                    said = f"saw the lease of {(request.name or '?')[:MAX_TEXT]} expire without its release"
                    yield reader.incarnation, Notice(axis.at(lease.process, lease.ended.at), lease.process, said)
