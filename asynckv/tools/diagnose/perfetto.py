"""A timeline in the format of ui.perfetto.dev and chrome://tracing: JSON of trace events.

The format knows processes with threads, and slices that lie on a thread and, if they overlap, inside one another. So a
rank is a process, and what it did for one request lies on a thread; a thread is used again when it is free, as on a
machine with so many lanes, so that ten thousand requests need as many as were under way at once. What led to what in
another process is an arrow (`s`, `f`), how many requests are under way is a counter (`C`), and what was said at one
moment is an instant (`i`). Times are microseconds since the first.

See "Trace Event Format" (Google, 2016); what is used of it is: `ph` M, X, i, C, s, f with `ts`, `pid`, `tid`, `dur`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.timeline_model import Ground, Lane, Mark, Story

__all__ = ["trace"]

GROUND = 1
"""The thread on which a process's own events lie."""
COLORS: Mapping[str, str] = {
    "read": "good",
    "drain": "terrible",
    "quarantine": "terrible",
    "queue": "yellow",
    "handshake": "thread_state_iowait",
    "granted": "thread_state_running",
    "lent": "grey",
    "announced": "grey",
}
"""Of the few that the format names."""


def trace(axis: Axis, stories: Sequence[Story], grounds: Sequence[Ground]) -> str:
    """Return the trace as JSON."""
    times = [x.start for x in stories] + [x.start for x in grounds]
    # Axes of two groups are not one: each begins at zero, and its processes say which group they are of.
    zero = min(times, default=0.0)
    events = [*_Writer(axis, stories, grounds, zero).events()]
    value = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "begins": f"{zero:.6f}",
            "clocks": [f"{x.process.rank}: {x.compared}" for x in grounds],
            "notes": axis.notes(),
        },
    }
    return msgspec.json.encode(value).decode() + "\n"


class _Writer:
    """Puts everything on processes and threads."""

    def __init__(self, axis: Axis, stories: Sequence[Story], grounds: Sequence[Ground], zero: float) -> None:
        self._axis, self._stories, self._grounds, self._zero = axis, stories, grounds, zero
        self._pids = {x.process.incarnation: i + 1 for i, x in enumerate(grounds)}
        self._tids: dict[int, int] = {}
        """Where each lane lies."""
        self._arrows = itertools.count(1)

    def events(self) -> Iterator[dict[str, Any]]:
        """Go through all of them; what names processes and threads comes first."""
        lanes = [lane for story in self._stories for lane in story.lanes]
        threads = self._place(lanes)
        groups = len(self._axis.references)
        for each in self._grounds:
            pid = self._pids[each.process.incarnation]
            name = each.process.rank + (f" (clocks {each.group + 1} of {groups})" if groups > 1 else "")
            yield _meta("process_name", pid, 0, name=name)
            yield _meta("process_labels", pid, 0, labels=each.compared)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
            yield _meta("thread_name", pid, GROUND, name="process")
            for i in range(threads.get(pid, 0)):
                yield _meta("thread_name", pid, GROUND + 1 + i, name=f"requests {i + 1}")
        for each in self._grounds:
            yield from self._ground(each)
        for story in self._stories:
            yield from self._story(story)
        yield from self._counters(lanes)

    def _place(self, lanes: Sequence[Lane]) -> dict[int, int]:
        """Give every lane the lowest thread of its process that is free; return how many each process needs."""
        free: dict[int, list[int]] = defaultdict(list)
        busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
        threads: dict[int, int] = defaultdict(int)
        for lane in sorted(lanes, key=lambda x: x.start):
            pid = self._pids[lane.process.incarnation]
            start, end = self._us(lane.start), self._us(lane.end)
            while busy[pid] and busy[pid][0][0] <= start:
                heapq.heappush(free[pid], heapq.heappop(busy[pid])[1])
            if free[pid]:
                thread = heapq.heappop(free[pid])
            else:
                thread = threads[pid] = threads[pid] + 1
            heapq.heappush(busy[pid], (max(end, start + 1), thread))
            self._tids[id(lane)] = GROUND + thread
        return threads

    def _us(self, at: float) -> int:
        return max(round((at - self._zero) * 1e6), 0)

    def _slice(self, name: str, pid: int, tid: int, start: float, end: float, **args: Any) -> dict[str, Any]:
        ts = self._us(start)
        out = {"ph": "X", "name": name, "cat": "asynckv", "pid": pid, "tid": tid, "ts": ts, "dur": self._us(end) - ts}
        if name in COLORS:
            out["cname"] = COLORS[name]
        return {**out, "args": args} if args else out

    def _story(self, story: Story) -> Iterator[dict[str, Any]]:
        name = story.name or "?"
        for lane in story.lanes:
            pid, tid = self._pids[lane.process.incarnation], self._tids[id(lane)]
            start, end = lane.start, lane.end
            about = {
                **lane.fields,
                "prefill_request_id": lane.fields.get("prefill_request_id") or story.name,
                "sequence": story.sequence,
                "outcome": story.outcome,
                "uncertainty_us": round(min(lane.within_s, 1e9) * 1e6),
            }
            title = name if lane.what in ("lease", "pull") else f"{name}, {lane.what}"
            yield self._slice(title, pid, tid, start, end, **about)
            over = start
            for bar in sorted(lane.bars, key=lambda x: (x.start, -x.end)):
                # A slice may lie inside another one, but not begin in it and end after it.
                left = over if bar.start < over < bar.end else bar.start
                over = max(over, bar.end)
                more = {k: v for k, v in (("derived", bar.derived), ("note", bar.note)) if v}
                more |= {"open": "the log ends before it"} if bar.is_open else {}
                more |= {f"{k}_s": f"{v:.6f}" for k, v in bar.parts.items()}
                yield self._slice(bar.phase, pid, tid, left, bar.end, **more)
        for mark in story.marks:
            if mark.level != "debug":
                lane_of = story.lane_of(mark)
                yield self._instant(mark, self._tids[id(story.lanes[lane_of])] if lane_of >= 0 else GROUND)
        for arrow in story.arrows():
            # An end that lies on the edge of a slice is not seen to belong to it.
            sender, receiver = story.lanes[arrow.sender], story.lanes[arrow.receiver]
            came = max(arrow.came - 1e-6 * (arrow.name == "release"), arrow.left)
            yield from self._arrow(arrow.name, sender, arrow.left, receiver, came)

    def _instant(self, mark: Mark, tid: int, **args: Any) -> dict[str, Any]:
        pid = self._pids[mark.process.incarnation]
        where = {"ph": "i", "name": mark.text[:200], "cat": "asynckv", "pid": pid, "tid": tid}
        return {**where, "ts": self._us(mark.at), "s": "t"} | ({"args": args} if args else {})

    def _arrow(self, name: str, one: Lane, left: float, other: Lane, came: float) -> Iterator[dict[str, Any]]:
        number = next(self._arrows)
        for phase, lane, at, more in (("s", one, left, {}), ("f", other, came, {"bp": "e"})):
            where = {"pid": self._pids[lane.process.incarnation], "tid": self._tids[id(lane)]}
            yield {"ph": phase, "id": number, "name": name, "cat": "flow", "ts": self._us(at), **where, **more}

    def _ground(self, each: Ground) -> Iterator[dict[str, Any]]:
        pid = self._pids[each.process.incarnation]
        yield self._slice("logged", pid, GROUND, each.start, each.end, clock=each.compared)
        for bar in each.away:
            yield self._slice("loop was away", pid, GROUND, max(bar.start, each.start), bar.end)
        for mark in each.marks:
            yield self._instant(mark, GROUND)
        if (gone := each.gone) is not None:
            noticed = {f"noticed {i + 1}": f"{x.process.rank} {x.text}" for i, x in enumerate(gone.noticed)}
            if math.isfinite(gone.by):
                said = f"{gone.how}, at some time in here"
                yield self._slice(said, pid, GROUND, gone.at, gone.by, how=gone.text, **noticed)
            yield self._instant(Mark(gone.at, each.process, gone.text, "warning"), GROUND, **noticed)

    def _counters(self, lanes: Sequence[Lane]) -> Iterator[dict[str, Any]]:
        """Count, for every process, what is under way."""
        changes: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for lane in lanes:
            if lane.what.startswith("grant to"):
                continue
            key = self._pids[lane.process.incarnation], "leases" if lane.side == "prefill" else "pulls"
            over = [b for b in lane.bars if lane.side == "prefill" or b.phase not in ("release", "quarantine")]
            if over:
                changes[key][self._us(over[0].start)] += 1
                changes[key][self._us(over[-1].end)] -= 1
        for (pid, name), found in changes.items():
            number = 0
            for ts, change in sorted(found.items()):
                number += change
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": {name: number}}


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
