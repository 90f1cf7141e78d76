"""What `asynckv why` found as plain data: for `--json`, and what the text is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.causes import CATALOGUE
from asynckv.tools.diagnose.findings import Finding, Findings, Seen
from asynckv.tools.diagnose.leaks_copies import LateCopy, has_offload
from asynckv.tools.diagnose.leaks_values import Leak, moment
from asynckv.tools.diagnose.timeline_model import Bar, Ground, Lane, Mark, Story

SCHEMA = "asynckv.why/1"
MAX_FILES = 100  # files that are told one by one


def report(found: Findings, seen: Seen, story: Story | None = None) -> dict[str, Any]:
    """Make plain data of all that was found; times are seconds since 1970 by the clock of the first reference."""
    return {
        "schema": SCHEMA,
        "is_well": not found.wrong,
        "findings": [finding(x) for x in found.wrong],
        "limits": [finding(x) for x in found.limits],
        "late": [_leak(x) for x in found.late],
        "copies": [_plain(x) for x in found.copies],
        "request": None if story is None else story_of(story),
        "processes": [process_of(seen, x) for x in seen.grounds],
        "engines": [engine(x) for x in seen.answers],
        "read": _read(seen),
    }


def finding(each: Finding) -> dict[str, Any]:
    """Make plain data of one thing that is wrong."""
    return asdict(each) | {"requests": list(each.requests), "blocks": each.blocks if each.blocks >= 0 else None}


def _plain(found: Leak | LateCopy) -> dict[str, Any]:
    """Make plain data of what was late; what is not known is None."""
    out: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(found).items()}
    out["blocks"] = found.blocks if found.blocks >= 0 else None
    return out | {name: _finite(out[name]) for name in ("seconds", "since")}


def _leak(leak: Leak) -> dict[str, Any]:
    plain = {name: value for name, value in _plain(leak).items() if name not in ("cell", "told_at")}
    return plain | {
        "cause": leak.cause.value,
        "heading": CATALOGUE[leak.cause].heading.value,
        "is_class": CATALOGUE[leak.cause].is_class,
        "evidence": leak.evidence,
        "remedy": leak.remedy,
        "reader": leak.reader or None,
        "other_request_id": leak.other_request_id or None,
    }


def _read(seen: Seen) -> dict[str, Any]:
    logs, total, service = seen.logs, seen.logs.total, seen.axis.service
    prefill, decode = service.sides
    others = [x for x in service.processes.values() if not x.lends and not x.pulls]
    counts = [x for answer in seen.answers for x in answer.account.counts]
    keeps = {x.rank for x in others if has_offload(x)}
    times = [t for x in service.processes.values() for t in (x.first_at, x.last_at)]
    return {
        "files": len(logs.sources),
        "lines": total.num_lines,
        "bytes": total.num_bytes,
        "events": logs.num_events,
        "requests": len(service.requests) + logs.num_well,
        "lent_now": sum(x.number for x in counts if x.kind == "lease"),
        "pulled_now": sum(x.number for x in counts if x.kind != "lease"),
        "since": moment(seen.since) if math.isfinite(seen.since) else None,
        "first": moment(min(times)) if times else None,
        "last": moment(max(times)) if times else None,
        "others": total.num_others,
        "others_in": [{"path": x.path, "lines": x.num_others} for x in logs.sources if x.num_others][:MAX_FILES],
        "repeated": total.num_repeated,
        "prefill": [x.rank for x in prefill],
        "decode": [x.rank for x in decode],
        "offload": sorted(keeps),
        "quiet": sorted({x.rank for x in others} - keeps),
    }


def engine(answer: Answer) -> dict[str, Any]:
    """Make plain data of what an engine said of itself."""
    head = {"address": answer.address, "took_s": round(answer.took_s, 6)}
    if answer.error:
        return head | {"error": answer.error, "trouble": answer.trouble.name.lower(), "pid": answer.pid or None}
    said: dict[str, Any] = msgspec.to_builtins(answer.account, str_keys=True)
    for name in ("refused", "retry_s", "after"):
        del said[name]
    requests: Sequence[Any] = msgspec.to_builtins(answer.requests, str_keys=True)
    return head | said | {"gauges": dict(answer.gauges), "is_cut": answer.is_cut, "requests": requests}


def process_of(seen: Seen, each: Ground) -> dict[str, Any]:
    """Make plain data of a process."""
    ahead_s, within_s = seen.axis.offset(each.process)
    return {
        **_fields(each.process, "rank", "incarnation", "host"),
        **_fields(each, "group", "start", "end"),
        "ahead_s": _finite(ahead_s),
        "within_s": _finite(within_s),
        "away": [_bar(x) for x in each.away],
        "gone": None if each.gone is None else _fields(each.gone, "how", "text"),
    }


def story_of(story: Story) -> dict[str, Any]:
    """Make plain data of one request."""
    return {
        "request_id": story.name,
        "decode_request_ids": list(story.others),
        **_fields(story, "engine_id", "sequence", "pull_ids", "lease", "pull", "start", "end"),
        "lanes": [_lane(x) for x in story.lanes],
        "events": [mark_of(x) for x in story.marks],
    }


def mark_of(mark: Mark) -> dict[str, Any]:
    """Make plain data of what was said at one moment."""
    return {"rank": mark.process.rank, **_fields(mark, "at", "level", "text")}


def _lane(lane: Lane) -> dict[str, Any]:
    bars = [_bar(x) for x in lane.bars]
    return {"rank": lane.process.rank, **_fields(lane, "side", "what", "within_s", "fields"), "bars": bars}


def _bar(bar: Bar) -> dict[str, Any]:
    inside = {k: round(v, 6) for k, v in bar.parts.items()}
    return {**_fields(bar, "phase", "start", "end", "derived", "note", "is_open"), "inside": inside}


def _fields(value: object, *names: str) -> dict[str, Any]:
    """Return some fields of a value; what is no number is None."""
    found = ((name, getattr(value, name)) for name in names)
    return {name: _finite(x) if isinstance(x, float) else x for name, x in found}


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
