"""The first screen of a timeline's page: what is wrong with a service, the worst first, and what to do about it.

Pure: what was read and joined goes in, lines come out. Texts in them are of logs, to be escaped before they are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from asynckv.core import told
from asynckv.tools.diagnose.axis import Axis, clock_time, counted, shown_seconds
from asynckv.tools.diagnose.join import Request
from asynckv.tools.diagnose.leaks_page import by_cause, summed
from asynckv.tools.diagnose.leaks_values import Leak
from asynckv.tools.diagnose.records import Logs, Record
from asynckv.tools.diagnose.timeline_model import GOOD, Ground, last_attempt

ELSEWHERE = {told.PullEnded.event, told.LeaseEnded.event, told.LeaseHeld.event, told.PullHeld.event}
ELSEWHERE |= {told.LoopWasAway.event}
"""Events of which other lines tell."""

MOST = 12
"""Lines of a kind."""

MAX_TEXT = 300
DIED = "Look at its stderr, its supervisor and the kernel's log (out of memory?); start it again."
UNSEEN = "Give the logs of all processes, from level info on, and of the whole time."


class Line(NamedTuple):
    """One thing that an operator should know.

    Attributes:
        what: What is wrong, with numbers.
        example: The first or worst of it, as the logs say.
        remedy: What to do.
        is_bad: The service is not well; else this only limits what can be said.
    """

    what: str
    example: str = ""
    remedy: str = ""
    is_bad: bool = True


def overview(
    logs: Logs, axis: Axis, requests: Iterable[Sequence[Request]], grounds: Sequence[Ground], leaks: Sequence[Leak]
) -> list[Line]:
    """Say what is wrong, the worst first; empty if all is well and everything could be judged.

    Args:
        logs: What was read.
        axis: Gives all times.
        requests: All of them, as `families` puts them together.
        grounds: All processes.
        leaks: What was late.
    """
    every = (_gone(grounds), _away(axis), _late(leaks), _failed(axis, requests), _warned(logs.records))
    return [line for lines in every for line in lines] + list(_unseen(logs, axis, grounds))


def _gone(grounds: Sequence[Ground]) -> Iterator[Line]:
    """Processes whose logs end without a goodbye, the earliest first."""
    found = sorted((x.gone for x in grounds if x.gone is not None and x.gone.is_death), key=lambda end: end.at)
    for end in found[:MOST]:
        noticed = f"{end.noticed[0].process.rank} {end.noticed[0].text}" if end.noticed else ""
        yield Line(f"{end.process.rank} {end.text}", noticed, DIED)
    if (more := len(found) - MOST) > 0:
        yield Line(f"{counted(more, 'more process')} died or fell silent")


def _away(axis: Axis) -> Iterator[Line]:
    """Processes whose event loops were away, the longest first."""
    found = []
    for process in axis.service.processes.values():
        away = [(x.number("seconds", 0.0), x) for x in process.of(told.LoopWasAway)]
        if away:
            found.append((*max(away, key=lambda x: x[0]), process, len(away)))
    for seconds, record, process, times in sorted(found, key=lambda x: -x[0])[:MOST]:
        held = [counted(record.integer(f"{what}s", 0), what) for what in ("lease", "pull")]
        yield Line(
            f"The event loop of {process.rank} was away: {counted(times, 'time')}, at most {shown_seconds(seconds)}",
            f"until {clock_time(axis.at(process, record.at))}; open: {', '.join(held)}",
            "While it is away its engine answers nothing. Find what blocks it: a profiler, or asyncio's debug mode.",
        )


def _late(leaks: Sequence[Leak]) -> Iterator[Line]:
    """Causes of late blocks, the most frequent first."""
    for cause, found in by_cause(leaks).items():
        about = summed(cause, found)
        blocks = "" if about["blocks"] is None else f", {counted(about['blocks'], 'block')}"
        longest = "" if about["longest_s"] is None else f", held for {shown_seconds(about['longest_s'])} at most"
        what = f"Blocks came back late: {about['title']} ({counted(len(found), 'request')}{blocks}{longest})"
        yield Line(what, found[0].sentence, about["remedy"])


def _failed(axis: Axis, every: Iterable[Sequence[Request]]) -> Iterator[Line]:
    """Causes for which requests failed, the most frequent first; an attempt that another one followed is not told."""
    failed: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for family in every:
        bad = (x for x in last_attempt([p for r in family for p in r.all_pulls]) if x.cause not in GOOD)
        if (pull := next(bad, None)) is not None and pull.ended is not None:
            failed[pull.cause].append((axis.at(pull.process, pull.ended.at), pull.ended.text("detail")))
    for cause, found in sorted(failed.items(), key=lambda x: -len(x[1]))[:MOST]:
        first, last_at = min(found)[0], max(found)[0]
        when = clock_time(first) + (f" to {clock_time(last_at)}" if len(found) > 1 else "")
        detail = next((text for _, text in sorted(found) if text), "")
        yield Line(f"{counted(len(found), 'request')} failed: {cause[:MAX_TEXT]}, {when}", detail[:MAX_TEXT])


def _warned(records: Iterable[Record]) -> Iterator[Line]:
    """Other warnings and errors, by event; errors first."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.level in ("warning", "error") and record.event not in ELSEWHERE:
            found[record.event].append(record)
    for event, same in sorted(found.items(), key=lambda x: (x[1][0].level != "error", -len(x[1])))[:MOST]:
        texts = [x for name in ("cause", "detail", "error", "who", "peer", "reader") if (x := same[0].text(name))]
        example = ", ".join([same[0].rank, *texts])[:MAX_TEXT]
        is_bad = same[0].level == "error"
        yield Line(f"{counted(len(same), same[0].level)} {event}", example, "See docs/events.md.", is_bad)


def _unseen(logs: Logs, axis: Axis, grounds: Sequence[Ground]) -> Iterator[Line]:
    """Limits of what can be said: logs that are not there, end early, or cannot be read, and clocks."""
    if missing := axis.service.missing():
        more = f" and {len(missing) - MOST:,} more" if len(missing) > MOST else ""
        yield Line(f"There is no log of {', '.join(missing[:MOST])}{more}", "", UNSEEN, False)
    for ground in grounds:
        if ground.gone is not None and not ground.gone.is_death:
            yield Line(f"The log of {ground.process.rank} ends early", ground.gone.text, "", False)
    if quiet := [x.rank for x in axis.service.processes.values() if not x.says_info]:
        what = f"{counted(len(quiet), 'process')} logged warnings and errors alone: of what went well nothing is known"
        yield Line(what, ", ".join(quiet[:MOST]), UNSEEN, False)
    for skipped in logs.skipped[:MOST]:
        what = f"{counted(skipped.lines, 'line')} could not be read: {skipped.reason}"
        yield Line(what, f"{skipped.where}: {skipped.first}"[:MAX_TEXT], "", False)
    for note in axis.notes():
        yield Line(f"Clocks: {note}", "", "", False)
