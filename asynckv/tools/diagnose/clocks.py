"""Clocks that were put back while a process logged: its times go on as they went before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

from asynckv import told
from asynckv.tools.console import grouped
from asynckv.tools.diagnose.records import Record

MAX_SET = 2  # times that the clock of one process is set
PUT_BACK_S = 2.0  # most seconds by which lines of one process are out of order; a clock that goes back by more was set


class PutBack(NamedTuple):
    """Finding that a process's clock was put back."""

    at: float  # when, as it went before
    seconds: float  # by how much at least


def mended(records: Sequence[Record]) -> tuple[Sequence[Record], dict[str, list[PutBack]]]:
    """Correct times after a clock was put back, by the order of the lines in each file.

    Args:
        records: By time. How long a process was silent as its clock was put back is not known, and taken for nothing.
    """
    places = ((x, *x.where.rpartition(":")) for x in records)
    files = grouped(
        ((record.incarnation, path), (int(line) if line.isdecimal() else 0, record)) for record, path, _, line in places
    )
    found: dict[str, list[PutBack]] = {}
    moved: dict[int, Record] = {}
    for (incarnation, _), lines in files.items():
        lines.sort(key=itemgetter(0))
        first = before = lines[0][1].at
        ahead = 0.0
        for _, record in lines:
            at = record.at + record.ago_s
            # Lines that were merged or exported in the wrong order are older than all lines above them.
            if before - at > PUT_BACK_S and at > first:
                found.setdefault(incarnation, []).append(PutBack(before + ahead, before - at))
                ahead += before - at
            first, before = min(first, at), at
            if record.event == told.EngineStarted.event:  # nothing is written before that
                first = -math.inf
            elif record.event in (told.EngineStopped.event, told.EngineSuspended.event):  # nor after
                first = math.inf
            if ahead:
                moved[id(record)] = replace(record, at=record.at + ahead)
    if any(len(x) > MAX_SET for x in found.values()):
        return records, {}  # the files were merged in another order than they were written
    if moved:
        records = sorted((moved.get(id(x), x) for x in records), key=attrgetter("at"))
    return records, found
