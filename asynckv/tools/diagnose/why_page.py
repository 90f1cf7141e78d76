"""What is wrong, and all requests as bars to zoom into, as one page that opens without a network, from a file.

The page draws on a canvas what is in view, so that ten thousand requests are no more work than ten. What it draws is
data, embedded as JSON with whole microseconds; texts of logs are only ever shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import msgspec

from asynckv.arguments import without_control
from asynckv.tools.diagnose.axis import Axis, clock_time, counted, shown_seconds
from asynckv.tools.diagnose.findings import Finding, Findings, Seen
from asynckv.tools.diagnose.leaks_values import Leak, some
from asynckv.tools.diagnose.timeline_model import PHASES, Ground, Lane, Mark, Story

MAX_MARKS = 100_000  # in one page; of more, those of requests that went well are left out
MOST_SHOWN = 10_000  # requests in one page
IN_TABLE = 20
NAMES = list(PHASES)


def make(seen: Seen, found: Findings, sources: Sequence[str], every: Sequence[Story]) -> str:
    """Make the page; of too many requests those that went wrong, and those that took longest.

    Args:
        seen: What was read and asked.
        found: What is wrong, for its first screen, and the causes of late requests.
        sources: What was read or asked, for its title.
        every: The requests.
    """
    axis, grounds = seen.axis, seen.grounds
    kept = sorted(every, key=lambda x: (x.level == "info", -x.seconds))[:MOST_SHOWN]
    left_out, stories = len(every) - len(kept), sorted(kept, key=lambda x: x.number)
    data = msgspec.json.encode(_Writer(axis, stories, grounds, found.late).data()).decode()
    parts = {
        "title": escape(without_control(f"Why: {some(sources, 3)}")),
        "about": escape(_about(axis, stories, left_out)),
        "overview": _overview(found),
        "table": _table(stories),
        "clocks": "".join(
            f"<tr><th>{escape(without_control(x.process.rank))}</th>"
            f"{_cells(x.compared, x.gone.text if x.gone is not None else '')}</tr>"
            for x in grounds[:256]
        ),
        # A "</script" inside a string must not end the script.
        "data": data.replace("<", "\\u003c"),
    }
    text = resources.files("asynckv.tools.diagnose").joinpath("why.html").read_text(encoding="utf-8")
    head, *rest = text.split("@@")
    return head + "".join(parts[x] if i % 2 == 0 else x for i, x in enumerate(rest))


def _about(axis: Axis, stories: Sequence[Story], left_out: int) -> str:
    if not stories:
        return "No requests."
    start, end = min(x.start for x in stories), max(x.end for x in stories)
    wrong = sum(x.level != "info" for x in stories)
    requests = "One request" if len(stories) == 1 else f"{len(stories):,} requests"
    said = f"{requests} in {shown_seconds(end - start)} from {clock_time(start)}"
    if wrong:
        said += "; something went wrong" + (f" with {wrong:,} of them" if len(stories) > 1 else "")
        said += " (an attempt failed, a lease was not released, or a message was refused or never answered)"
    if left_out:
        said += f"; {left_out:,} more that went well and were shorter are left out"
    return f"{said}. Times are by the clock of {', '.join(without_control(x.rank) for x in axis.references[:3])}."


def _overview(found: Findings) -> str:
    """Write the first screen: what is wrong, then what could not be judged."""
    bad = len(found.wrong)
    head = f'<p class="bad">{counted(bad, "thing")} went wrong, the worst first.</p>' if bad else "<p>All is well.</p>"
    rows = [_row(x, " class=bad") for x in found.wrong] + [_row(x, "") for x in found.limits]
    heads = "<tr><th>what</th><th>evidence</th><th>what to do</th></tr>"
    return head + (f"<table><thead>{heads}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else "")


def _row(finding: Finding, kind: str) -> str:
    requests = f" ({some(finding.requests, 3)})" if finding.requests else ""
    return f"<tr{kind}>{_cells(f'{finding.heading}: {finding.what}{requests}', finding.evidence, finding.remedy)}</tr>"


def _table(stories: Sequence[Story]) -> str:
    """List the slowest, for print and for those who do not see the picture."""
    slowest = sorted(stories, key=lambda x: -x.seconds)[:IN_TABLE]
    rows = (_cells(x.name or "?", x.ended, shown_seconds(x.seconds), clock_time(x.start)) for x in slowest)
    return "".join(f"<tr>{row}</tr>" for row in rows)


def _cells(*texts: str) -> str:
    return "".join(f"<td>{escape(without_control(text))}</td>" for text in texts)


class _Writer:
    """Writes everything as short lists: in a page of ten thousand requests names of fields are most of it."""

    def __init__(self, axis: Axis, stories: Sequence[Story], grounds: Sequence[Ground], leaks: Sequence[Leak]) -> None:
        self._axis, self._stories, self._grounds = axis, stories, grounds
        self._zero = min([x.start for x in stories], default=min([x.start for x in grounds], default=0.0))
        self._processes = {x.process.incarnation: i for i, x in enumerate(grounds)}
        self._texts: dict[str, int] = {}
        self._causes = {(x.engine_id, x.request_id): f"{x.sentence} {x.remedy}" for x in leaks}
        self._can_mark = sum(len(x.marks) for x in stories) <= MAX_MARKS

    def data(self) -> dict[str, Any]:
        """Return all of it."""
        requests = [self._request(x) for x in self._stories]
        processes = [self._process(x) for x in self._grounds]
        return {
            "zero": self._zero,
            "phases": [[name, x.about, x.light, x.dark] for name, x in PHASES.items()],
            "processes": processes,
            "requests": requests,
            "texts": list(self._texts),
            "groups": len(self._axis.references),
            "few": not self._can_mark,
        }

    def _us(self, at: float) -> int:
        return round((at - self._zero) * 1e6)

    def _text(self, text: str) -> int:
        return self._texts.setdefault(without_control(text), len(self._texts))

    def _mark(self, mark: Mark, lane: int = -1) -> list[Any]:
        level = {"debug": 0, "info": 1, "warning": 2}.get(mark.level, 3)
        return [self._us(mark.at), self._processes[mark.process.incarnation], level, self._text(mark.text), lane]

    def _process(self, each: Ground) -> list[Any]:
        process = each.process
        return [
            without_control(process.rank),
            "prefill" if process.lends else "decode" if process.pulls else "",
            without_control(each.compared),
            self._us(each.start),
            self._us(each.end),
            [[self._us(x.start), self._us(x.end)] for x in each.away],
            [self._mark(x) for x in each.marks],
            each.group,
            None if each.gone is None else [int(each.gone.kind == "died"), self._text(each.gone.text)],
        ]

    def _request(self, story: Story) -> list[Any]:
        marks = story.marks if self._can_mark or story.level != "info" else []
        cause = self._causes.get((story.engine_id, story.name), "")
        return [
            without_control(story.name or "?"),
            without_control(", ".join(x for x in story.others if x != story.name)),
            self._text(story.ended),
            1 if cause or story.level != "info" else 0,
            round(story.seconds * 1e6),
            [self._lane(x) for x in story.lanes],
            [self._mark(x, story.lane_of(x)) for x in marks],
            story.group,
            story.sequence,
            self._text(cause),
        ]

    def _lane(self, lane: Lane) -> list[Any]:
        within = round(lane.within_s * 1e6) if math.isfinite(lane.within_s) else -1
        fields = [[self._text(k), self._text(v)] for k, v in lane.fields.items() if v]
        bars = []
        for bar in lane.bars:
            notes = [bar.note] if bar.note else []
            notes += [f"{name} {shown_seconds(x)}" for name, x in bar.inside.items()]
            start = self._us(bar.start)
            shown = [NAMES.index(bar.phase), start, self._us(bar.end) - start]
            if notes or bar.is_open:
                shown += [self._text("; ".join(notes)), int(bar.is_open)]
            bars.append(shown)
        side = 0 if lane.side == "prefill" else 1
        return [self._processes[lane.process.incarnation], side, self._text(lane.title), within, fields, bars]
