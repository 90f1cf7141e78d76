"""A timeline as data: everything that the pictures show, for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.timeline_ends import End
from asynckv.tools.diagnose.timeline_model import Bar, Ground, Lane, Mark, Story


def report(axis: Axis, stories: Sequence[Story], grounds: Sequence[Ground]) -> dict[str, Any]:
    """Return all of it; times are seconds since 1970 by the clock of each group's reference."""
    return {
        "schema": "asynckv.timeline/1",
        "clocks": {
            "references": [x.rank for x in axis.references],
            "exchanges": axis.clocks.pairs,
            "notes": axis.notes(),
            "conflicts": [
                {
                    "ranks": [axis.service.processes[x].rank for x in each.names],
                    "seconds": each.seconds,
                    "since": each.since,
                    "until": each.until,
                }
                for each in axis.clocks.conflicts
            ],
        },
        "processes": [_process(axis, x) for x in grounds],
        "missing": axis.service.missing(),
        "requests": [_request(x) for x in stories],
    }


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _process(axis: Axis, each: Ground) -> Mapping[str, Any]:
    process = each.process
    offset = axis.offset(process, (process.first_at + process.last_at) / 2)
    return {
        "rank": process.rank,
        "incarnation": process.incarnation,
        "host": process.host,
        "group": each.group,
        "ahead_s": _finite(offset.seconds),
        "within_s": _finite(offset.within_s),
        "start": _finite(each.start),
        "end": _finite(each.end),
        "away": [_bar(x) for x in each.away],
        "events": [_mark(x) for x in each.marks],
        "gone": _end(each.gone) if each.gone is not None else None,
    }


def _end(end: End) -> Mapping[str, Any]:
    return {
        "how": end.how,
        "last": _finite(end.at),
        "by": _finite(end.by),
        "text": end.text,
        "noticed": [{"at": _finite(x.at), "rank": x.process.rank, "text": x.text} for x in end.noticed],
    }


def _request(story: Story) -> Mapping[str, Any]:
    return {
        "request_id": story.name,
        "decode_request_ids": list(story.others),
        "engine_id": story.engine_id,
        "sequence": story.sequence,
        "pull_ids": list(story.pull_ids),
        "outcome": story.outcome,
        "lease": story.lease,
        "pull": story.pull,
        "level": story.level,
        "group": story.group,
        "start": _finite(story.start),
        "end": _finite(story.end),
        "seconds": _finite(story.seconds),
        "took": story.took,
        "lanes": [_lane(x) for x in story.lanes],
        "events": [_mark(x) for x in story.marks],
    }


def _lane(lane: Lane) -> Mapping[str, Any]:
    return {
        "rank": lane.process.rank,
        "side": lane.side,
        "what": lane.what,
        "within_s": _finite(lane.within_s),
        "fields": dict(lane.fields),
        "bars": [_bar(x) for x in lane.bars],
    }


def _bar(bar: Bar) -> Mapping[str, Any]:
    out: dict[str, Any] = {"phase": bar.phase, "start": _finite(bar.start), "end": _finite(bar.end)}
    out |= {"derived": bar.derived} if bar.derived else {}
    out |= {"note": bar.note} if bar.note else {}
    out |= {"is_open": True} if bar.is_open else {}
    out |= {"inside": {k: round(v, 6) for k, v in bar.parts.items()}} if bar.parts else {}
    return out


def _mark(mark: Mark) -> Mapping[str, Any]:
    return {"at": _finite(mark.at), "rank": mark.process.rank, "level": mark.level, "text": mark.text}
