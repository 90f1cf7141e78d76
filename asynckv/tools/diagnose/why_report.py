"""Findings of `asynckv why` as plain data, for `--json` and for the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.axis import clock_time
from asynckv.tools.diagnose.causes import CATALOGUE
from asynckv.tools.diagnose.findings import Findings, Seen
from asynckv.tools.diagnose.join import Process
from asynckv.tools.diagnose.leaks_copies import has_offload
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.timeline_model import Ground, Story

SCHEMA = "asynckv.why/1"
MAX_FILES = 100  # files that are told one by one


def report(found: Findings, seen: Seen, story: Story | None = None) -> dict[str, Any]:
    """Make plain data of all findings; times are seconds since 1970 by the clock of the first reference."""
    return {
        "schema": SCHEMA,
        "is_well": not (found.wrong or found.limits),
        "findings": plain(found.wrong),
        "limits": plain(found.limits),
        "notes": plain(found.notes),
        "late": [_leak(x) for x in found.late],
        "copies": plain(seen.copies),
        "request": None if story is None else story_of(story),
        "processes": [process_of(seen, x) for x in seen.grounds],
        "engines": [engine(x) for x in seen.answers],
        "read": _read(seen),
    }


def plain(value: Any) -> Any:
    """Make plain data of a finding: a process is its rank's name, and an unknown value is None."""
    match value:
        case Process():
            return value.rank
        case Enum():
            return value.value
        case float():
            return round(value, 6) if math.isfinite(value) else None
        case list() | tuple():
            return [plain(x) for x in value]
        case Mapping():
            return {name: plain(x) for name, x in value.items()}
        case _ if is_dataclass(value):
            every = ((x.name, getattr(value, x.name)) for x in fields(value))
            said = {"rank" if isinstance(x, Process) else name: plain(x) for name, x in every}
            return said | ({"blocks": None} if said.get("blocks", 0) == -1 else {})
        case _:
            return value


def _leak(leak: Leak) -> dict[str, Any]:
    said = {name: value for name, value in plain(leak).items() if name not in ("cell", "until")}
    return said | {
        "heading": CATALOGUE[leak.cause].heading.value,
        "is_class": CATALOGUE[leak.cause].is_class,
        "evidence": leak.evidence,
        "reader": leak.reader or None,
        "other_request_id": leak.other_request_id or None,
    }


def _read(seen: Seen) -> dict[str, Any]:
    logs, total, service = seen.logs, seen.logs.total, seen.service
    every = sorted(service.processes.values(), key=lambda x: (x.rank, x.first_at))
    others = [x for x in every if not x.lends and not x.pulls]
    counts = [x for answer in seen.answers for x in answer.account.counts]
    keeps = {x.rank for x in others if has_offload(x)}
    times = [t for x in every for t in (x.first_at, x.last_at)]
    running = [x.last_at for x in every if x.num_records and x.stopped is None and x.successor is None]
    return {
        "files": len(logs.sources),
        "lines": total.num_lines,
        "bytes": total.num_bytes,
        "events": len(logs.records) + sum(logs.counted.values()),
        "requests": len(service.requests) + logs.num_well,
        "lent_now": sum(x.number for x in counts if x.kind == "lease"),
        "pulled_now": sum(x.number for x in counts if x.kind != "lease"),
        "since": clock_time(seen.since)[:19] if math.isfinite(seen.since) else None,
        "first": seen.axis.moment(min(times)) if times else None,
        "last": seen.axis.moment(max(times)) if times else None,
        "until": seen.axis.moment(min(running, default=max(times))) if times else None,
        "others": total.num_others,
        "others_in": [{"path": x.path, "lines": x.num_others} for x in logs.sources if x.num_others][:MAX_FILES],
        "repeated": total.num_repeated,
        "prefill": [x.rank for x in every if x.lends],
        "decode": [x.rank for x in every if x.pulls],
        "offload": sorted(keeps),
        "quiet": sorted({x.rank for x in others} - keeps),
    }


def engine(answer: Answer) -> dict[str, Any]:
    head = {"address": answer.address, "took_s": round(answer.took_s, 6)}
    if answer.error:
        return head | {"error": answer.error, "trouble": answer.trouble.name.lower(), "pid": answer.pid or None}
    said: dict[str, Any] = msgspec.to_builtins(answer.account, str_keys=True)
    for name in ("refused", "retry_s", "after"):
        del said[name]
    requests: Sequence[Any] = msgspec.to_builtins(answer.requests, str_keys=True)
    head |= {"is_cut": bool(answer.account.after), "peers_left_out": answer.peers_left_out}
    return head | said | {"gauges": dict(answer.gauges), "requests": requests}


def story_of(story: Story) -> dict[str, Any]:
    said: dict[str, Any] = plain(story)
    names = {"request_id": said.pop("name"), "decode_request_ids": said.pop("others"), "events": said.pop("marks")}
    return names | said | {"start": plain(story.start), "end": plain(story.end)}


def process_of(seen: Seen, each: Ground) -> dict[str, Any]:
    process, offset = each.process, seen.axis.offset(each.process)
    return {
        "rank": process.rank,
        "incarnation": process.incarnation,
        "host": process.host,
        "group": seen.axis.group(process),
        "ahead_s": plain(offset.seconds),
        "within_s": plain(offset.within_s),
        "start": plain(each.start),
        "end": plain(each.end),
        "away": plain(each.away),
        "gone": None if each.gone is None else {"how": each.gone.kind, "text": each.gone.text},
    }
