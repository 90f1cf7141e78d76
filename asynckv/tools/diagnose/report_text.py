"""Words of a report: numbers with units, times, and what an operator reads first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from asynckv.tools.console import without_control
from asynckv.tools.diagnose.presence import DEFAULT_LEASE_S, HABIT, QUIET
from asynckv.tools.diagnose.summary_model import Engine, Summary, Unseen

__all__ = [
    "EARLY_S",
    "Card",
    "bytes_text",
    "count_text",
    "duration",
    "ended_early",
    "is_unusual",
    "named",
    "number",
    "safe",
    "share",
    "span",
    "time_text",
    "unseen_text",
    "verdict",
]

MOST_LETTERS = 200
MOST_NAME = 1_000
GAP = "\u00a0"
"""Between a number and its unit, which stay in one line."""


class Card(NamedTuple):
    """One number of the first screen."""

    name: str
    value: str
    of: str
    is_bad: bool = False


def duration(seconds: float) -> str:
    """Write a duration with three digits."""
    if not math.isfinite(seconds):
        return "?"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f}{GAP}{unit}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_digits(seconds / size)}{GAP}{unit}"
    return f"{_digits(seconds * 1e6)}{GAP}µs" if seconds else f"0{GAP}s"


def _digits(number: float) -> str:
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}" if number else "0"


def bytes_text(number: float) -> str:
    """Write bytes with three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{_digits(number / size)}{GAP}{unit}"
    return f"{number:.0f}{GAP}B"


def number(count: float, one: str, many: str) -> str:
    """Write a count of things."""
    return f"one {one}" if round(count) == 1 else f"{count_text(count)} {many}"


def count_text(number: float) -> str:
    """Write a count, or an estimate of one."""
    return f"{round(number):,}"


def share(part: float, whole: float) -> str:
    """Write a part in percent."""
    percent = 100 * part / whole if whole else 0.0
    if not part:
        return f"0{GAP}%"
    return (
        f"{percent:.0f}{GAP}%" if percent >= 10 else f"{percent:.2g}{GAP}%" if percent >= 0.01 else f"<{GAP}0.01{GAP}%"
    )


def time_text(at: float, *, with_day: bool = False) -> str:
    """Write a moment, UTC."""
    try:
        when = datetime.fromtimestamp(at, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{at:.3f}"
    return f"{when:%Y-%m-%d %H:%M:%S}" if with_day else f"{when:%H:%M:%S}.{when.microsecond // 1000:03}"


def safe(text: str, most: int = MOST_LETTERS) -> str:
    """Make a text of strangers fit to be escaped and shown: without control characters, and not too long."""
    shown = without_control(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def named(rank: str, most: int = 60) -> str:
    """Make a process's name fit: names often begin alike and differ at their ends, so both are kept."""
    shown = without_control(rank[:MOST_NAME])
    return shown if len(shown) <= most else f"{shown[: most // 2 - 1]}…{shown[-(most - most // 2) :]}"


DAY_S = 86_400.0
EARLY_S = 5.0
"""Logs of processes that live end at different moments, by some seconds."""


def ended_early(summary: Summary) -> list[Engine]:
    """Return processes whose logs end, without a goodbye, while others go on; the earliest first.

    What such a process did since then is not known: it died, it is stopped, or it had nothing to say.
    """
    found = (x for x in summary.engines if x.stopped is None and summary.last - x.last > EARLY_S)
    return sorted(found, key=lambda x: x.last)


def is_unusual(engine: Engine, last: float) -> bool:
    """Whether a process was silent at the end for much longer than it used to be, as `asynckv leaks` has it."""
    pause_s = (engine.last - engine.first) / max(engine.events - 1, 1)
    return engine.events >= HABIT and last - engine.last > max(DEFAULT_LEASE_S, QUIET * pause_s)


def verdict(summary: Summary) -> tuple[list[str], bool]:
    """Say in sentences what an operator wants to know first, the worst first, and whether all is well."""
    pulls, leases, engines = summary.pulls, summary.leases, summary.engines
    if not engines:
        return ["There is no event of asynckv's in these logs."], False
    early = ended_early(summary)
    away = max(summary.away, key=lambda x: x.seconds, default=None)
    gone, bad, neutral = list[str](), list[str](), list[str]()
    if pulls.ended:
        (bad if pulls.failed else neutral).append(_ended(summary))
    elif not any(x.released for x in summary.unseen):
        neutral.append(f"No pull ended within {duration(summary.last - summary.first)}.")
    neutral += [_unseen(summary, pulls.ended)] if summary.unseen else []
    late = summary.late
    if late.requests:
        told = list(late.causes.values())
        causes = [f"{safe(x['title'], 90)} ({x['requests']:,})" for x in told[:2]]
        causes += [f"other causes ({sum(x['requests'] for x in told[2:]):,})"] if told[2:] else []
        ends = [x["since"] + x["seconds"] for x in late.worst if x["since"] is not None and x["seconds"] is not None]
        when = f", {span(summary, min(ends), max(ends))}" if ends else ""
        bad.append(
            f"Blocks of {number(late.requests, 'request', 'requests')} came back late{when}: {'; '.join(causes)}."
        )
    elif leases.lent and leases.ended_badly:
        bad.append(
            f"{leases.ended_badly:,} of {count_text(leases.lent)} leases ended without their release"
            f"{_causes(summary, 'lease')}."
        )
    elif leases.lent:
        over = leases.lent - leases.open
        all_ = "The one lease that ended was" if round(over) == 1 else f"All {count_text(over)} leases that ended were"
        neutral.append(f"{all_} released.")
    if retired := summary.quarantine.retired:
        bad.append(f"{number(retired, 'pull', 'pulls').capitalize()} gave up blocks: a transfer did not end.")
    if errors := sum(x.errors for x in engines):
        bad.append(f"There {'is' if errors == 1 else 'are'} {number(errors, 'event', 'events')} of level error.")
    if pulls.latency_s is not None:
        neutral.append(
            f"The latency of pulls that completed: p99 {duration(pulls.latency_s.p99)}, the slowest in the logs "
            f"{duration(pulls.latency_s.max)}."
        )
    if away is not None:
        more = {x.rank for x in summary.away} - {away.rank}
        others = f"; loops of {number(len(more), 'other process', 'other processes')} were away too" if more else ""
        said = f"The event loop of {named(away.rank)} was away for {duration(away.seconds)}, "
        (gone if away.seconds > EARLY_S else bad if bad else neutral).append(
            f"{said}{span(summary, away.since, away.until)}{others}."
        )
    if early:
        is_news = bool(bad) or any(is_unusual(x, summary.last) for x in early)
        (gone if is_news else neutral).append(_early(summary, early))
    return [*gone, *bad, *neutral], not (gone or bad)


def span(summary: Summary, since: float, until: float) -> str:
    """Say between which times of day something happened."""
    is_long = summary.last - summary.first > DAY_S
    begin, end = (time_text(x, with_day=True) for x in (since, until))
    if not is_long:
        begin, end = begin[-8:], end[-8:]
    return f"at {begin} UTC" if begin == end else f"{begin} to {end} UTC"


def _ended(summary: Summary) -> str:
    """Say how pulls ended."""
    pulls = summary.pulls
    asked = pulls.ended - pulls.retried
    how = [f"{count_text(pulls.cancelled)} {'was' if round(pulls.cancelled) == 1 else 'were'} cancelled"]
    how = how if round(pulls.cancelled) else []
    if pulls.failed:
        times = [x for x in summary.failures if x.side == "pull"]
        when = f" ({span(summary, min(x.first for x in times), max(x.last for x in times))})" if times else ""
        how = [f"{pulls.failed:,} ({share(pulls.failed, asked)}) failed{_causes(summary, 'pull')}{when}", *how]
    else:
        how.append("none failed")
    many = number(asked, "pull", "pulls").capitalize()
    return f"{many} ended within {duration(summary.last - summary.first)}; {'; '.join(how)}."


def _early(summary: Summary, early: Sequence[Engine]) -> str:
    first = early[0]
    others = f", and {number(len(early) - 1, 'other ends', 'others end')} early too" if len(early) > 1 else ""
    return (
        f"The log of {named(first.rank)} ends {span(summary, first.last, first.last)}, "
        f"{duration(summary.last - first.last)} before the last line of all, without a goodbye{others}: it died, is "
        f"stopped, or logged nothing more."
    )


def _unseen(summary: Summary, ended: float) -> str:
    """Say what is known of pulls from the prefill side alone."""
    released: dict[str, int] = {}
    for x in summary.unseen:
        for how, n in x.released.items():
            released[how] = released.get(how, 0) + n
    readers = number(len(summary.unseen), "process", "processes")
    whose = f"{readers} whose {'log is' if len(summary.unseen) == 1 else 'logs are'} missing or cut short"
    more = "more " if ended else ""
    if not released:
        return f"What became of the pulls of {whose} is not known."
    how = ", ".join(f"{n:,} {safe(k, 40)}" for k, n in sorted(released.items(), key=lambda x: -x[1])[:4])
    count = sum(released.values())
    pulls = f"{count:,} {more}{'pull' if count == 1 else 'pulls'}"
    return f"Prefill sides heard of {pulls} that ended ({how}), at least: by {whose}."


def unseen_text(unseen: Unseen) -> str:
    """Say what is known of one process from other logs."""
    if unseen.ends is None:
        said = f"There is no log of {named(unseen.rank, 80)}, which others name"
    else:
        said = f"The log of {named(unseen.rank, 80)} ends at {time_text(unseen.ends)} without a goodbye"
    known = [f"{n:,} {'pull' if n == 1 else 'pulls'} {safe(how, 40)}" for how, n in unseen.released.items()]
    known += [f"{number(unseen.owed, 'request', 'requests')} that it never released"] if unseen.owed else []
    since = " since then" if unseen.ends is not None else ""
    return f"{said}. What prefill sides know of it{since}: {', '.join(known)}."


def _causes(summary: Summary, side: str) -> str:
    found = [x for x in summary.failures if x.side == side]
    if not found:
        return ""
    rest = sum(x.count for x in found[3:])
    causes = [f"{x.count:,} {safe(x.cause, 40)}" for x in found[:3]] + ([f"{rest:,} other"] if rest else [])
    return f": {', '.join(causes)}"
