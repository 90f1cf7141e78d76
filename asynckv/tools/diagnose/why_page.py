"""Findings and all requests, as bars to zoom into, on one page that opens from a file without a network.

The page draws only the visible part on a canvas, so ten thousand requests are no more work than ten. Its data is that
of `--json`, and texts of logs are only ever shown as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import msgspec

from asynckv.arguments import without_control
from asynckv.tools.diagnose.axis import Axis, clock_time, counted, shown_seconds
from asynckv.tools.diagnose.findings import NOT_JUDGED, Finding, Findings, Seen
from asynckv.tools.diagnose.leaks_values import Leak, some
from asynckv.tools.diagnose.timeline_model import PHASES, Story
from asynckv.tools.diagnose.why_report import plain, process_of, story_of

MAX_MARKS = 100_000  # in one page; of more, those of requests that went well are left out
MOST_SHOWN = 10_000  # requests in one page


def make(seen: Seen, found: Findings, sources: Sequence[str], every: Sequence[Story]) -> str:
    """Make the page; if there are too many requests, with the failed and the slowest ones.

    `found` is for its first screen and the causes of late requests, `sources` for its title.
    """
    kept = sorted(every, key=lambda x: (x.level == "info", -x.seconds))[:MOST_SHOWN]
    left_out, stories = len(every) - len(kept), sorted(kept, key=lambda x: x.number)
    data = msgspec.json.encode(_data(seen, stories, found.late)).decode()
    parts = {
        "title": escape(without_control(f"Why: {some(sources, 3)}")),
        "about": escape(_about(seen.axis, stories, left_out)),
        "overview": _overview(found),
        # A "</script" inside a string must not end the script; letters that turn a line around are escaped.
        "data": re.sub("[^ -;=-~]", lambda x: json.dumps(x[0])[1:-1] if x[0] != "<" else "\\u003c", data),
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
    """Write the first screen: the findings, then the limits."""
    bad = len(found.wrong)
    head = f'<p class="bad">{counted(bad, "thing")} went wrong, the worst first.</p>' if bad else "<p>All is well.</p>"
    head = f"<p>{NOT_JUDGED}.</p>" if found.limits and not bad else head
    rows = [_row(x, " class=bad") for x in found.wrong] + [_row(x, "") for x in (*found.limits, *found.notes)]
    heads = "<tr><th>what</th><th>evidence</th><th>what to do</th></tr>"
    return head + (f"<table><thead>{heads}</thead><tbody>{''.join(rows)}</tbody></table>" if rows else "")


def _row(finding: Finding, kind: str) -> str:
    requests = f" ({some(finding.requests, 3)})" if finding.requests else ""
    texts = f"{finding.heading}: {finding.what}{requests}", finding.evidence, finding.remedy
    return f"<tr{kind}>{''.join(f'<td>{escape(without_control(text))}</td>' for text in texts)}</tr>"


def _data(seen: Seen, stories: Sequence[Story], late: Sequence[Leak]) -> dict[str, Any]:
    """Return what the page draws: requests and processes as `--json` has them, without what is empty."""
    causes = {(x.engine_id, x.request_id): f"{x.sentence} {x.remedy}" for x in late}
    is_full = sum(len(x.marks) for x in stories) > MAX_MARKS
    return {
        "zero": min([x.start for x in stories] or [x.start for x in seen.grounds], default=0.0),
        "phases": [[name, x.about, x.light, x.dark] for name, x in PHASES.items()],
        "processes": [
            _lean(process_of(seen, x) | {"compared": seen.axis.compared(x.process), "marks": plain(x.marks)})
            for x in seen.grounds
        ],
        "requests": [_request(x, causes.get((x.engine_id, x.name), ""), is_full) for x in stories],
        "few": is_full,
    }


def _request(story: Story, cause: str, is_full: bool) -> Any:
    marks = [] if is_full and story.level == "info" else story.marks
    events = [plain(x) | {"lane": story.lane_of(x)} for x in marks]
    more = {"ended": story.ended, "cause": cause, "is_bad": bool(cause) or story.level != "info"}
    return _lean(story_of(story) | more | {"events": events})


def _lean(value: Any) -> Any:
    """Remove empty values, which are most of a page of ten thousand requests."""
    if isinstance(value, dict):
        return {k: _lean(x) for k, x in value.items() if x or (x == 0 and x is not False)}
    if isinstance(value, list):
        return [_lean(x) for x in value]
    return value
