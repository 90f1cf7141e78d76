"""Timelines on a terminal: one request as bars, the slowest as a table, all of them in numbers.

Each phase is a letter of its own, on a terminal in its colour. Texts of logs are shown with their control characters
escaped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from asynckv.arguments import without_control
from asynckv.tools.diagnose.axis import Axis, clock_time, counted, shown_seconds
from asynckv.tools.diagnose.join import Service
from asynckv.tools.diagnose.records import Logs
from asynckv.tools.diagnose.timeline_model import COLORS, LOG_ENDS, NO_LOG, PHASES, Bar, Ground, Lane, Mark, Story
from asynckv.tools.output import print_unpadded

LETTERS: Mapping[str, str] = {
    "lent": "-",
    "granted": "=",
    "ending": "e",
    "announced": "a",
    "handshake": "h",
    "queue": "q",
    "plan": "p",
    "read": "R",
    "confirm": "c",
    "drain": "d",
    "release": "r",
    "quarantine": "X",
    "pause": ".",
    "pull": "#",
    "unlogged": "?",
}
AWAY = "event loop away"
MAX_LANES, MAX_EVENTS, TOLD_LANES, MAX_MATCHES, MAX_NAMES, MAX_NOTICES = 64, 60, 8, 32, 8, 3


MOST_PHASES = 2
"""Phases of one request that are told in figures, the longest."""


def bar_line(bars: Sequence[Bar], start: float, end: float, width: int, away: Sequence[Bar] = ()) -> Text:
    """Draw bars side by side; the shortest is still seen, unless there are fewer cells than phases.

    Where there is none, it is shown when the rank's event loop was `away`.
    """
    scale = width / (end - start) if end > start else 0.0

    def cells(bar: Bar, least: int) -> range:
        first = max(min(math.floor((bar.start - start) * scale), width - least), 0)
        return range(first, min(max(round((bar.end - start) * scale), first + least), width))

    phases = [""] * width
    for bar in sorted(bars, key=lambda x: -x.seconds):
        for i in cells(bar, 1):
            phases[i] = bar.phase
    if sum(map(bool, phases)) < len({x.phase for x in bars if x.seconds > 0}):
        # Which of them is drawn would be chance.
        phases = [x and _by_phase(bars)[0][0] for x in phases]
    dark = {i for bar in away for i in cells(bar, 0)}
    out = Text(no_wrap=True, overflow="crop")
    for i, phase in enumerate(phases):
        out.append(LETTERS[phase] if phase else "~" if i in dark else " ", _style(phase) if phase else "red")
    return out


def _by_phase(bars: Iterable[Bar]) -> list[tuple[str, float]]:
    """Return how long each phase took, the longest first."""
    sums: dict[str, float] = {}
    for bar in bars:
        sums[bar.phase] = sums.get(bar.phase, 0.0) + bar.seconds
    return sorted(sums.items(), key=lambda x: -x[1])


def _style(phase: str) -> Style:
    """Terminals are dark, mostly."""
    return Style(color=COLORS[phase].dark, reverse=True)


def _legend(bars: Iterable[Bar], width: int, is_away: bool = False) -> Text:
    out, used = Text(), {bar.phase for bar in bars}
    left = width
    for phase in (x for x in PHASES if x in used):
        if len(phase) + 2 > left:
            out.append("\n")
            left = width
        out.append(LETTERS[phase], _style(phase))
        out.append(f" {phase}   "[: left - 1])
        left -= len(phase) + 5
    if is_away:
        out.append("\n" if left < len(AWAY) + 2 else "")
        out.append("~", "red")
        out.append(f" {AWAY}")
    return out


def _ruler(width: int, seconds: float) -> Text:
    """Write the start, the middle and the end of the axis."""
    middle, last = shown_seconds(seconds / 2), shown_seconds(seconds)
    line = "0".ljust(width)
    at = width // 2 - len(middle) // 2
    if width > len(middle) + len(last) + 6:
        line = line[:at] + middle + line[at + len(middle) :]
    return Text(line[: width - len(last)] + last, style="dim", no_wrap=True, overflow="crop")


def show_one(axis: Axis, story: Story, grounds: Sequence[Ground], console: Console) -> None:
    """Show one request, with what befell its processes meanwhile."""
    names = f" (decode: {', '.join(story.others)})" if story.others and story.others != (story.name,) else ""
    _line(console, f"{story.name or '?'}{names}  {story.ended}", "bold", is_whole=True)
    engine = f"prefill engine {story.engine_id}, " if story.engine_id else ""
    sequence = f"sequence {story.sequence}, " if story.sequence >= 0 else ""
    _line(console, f"{engine}{sequence}from {clock_time(story.start)}, {shown_seconds(story.end - story.start)}")
    for text in _clock_lines(axis, story):
        _line(console, text, "dim")
    console.print()
    away = {
        each.process.incarnation: [x for x in each.away if x.end > story.start and x.start < story.end]
        for each in grounds
    }
    print_unpadded(console, _gantt(story, away, console.width))
    is_away = any(away.get(x.process.incarnation) for x in story.lanes)
    print_unpadded(console, _legend((b for x in story.lanes for b in x.bars), console.width, is_away))
    console.print()
    print_unpadded(console, _events(story, grounds), is_whole=True)
    _notes(axis, console)


def _clock_lines(axis: Axis, story: Story) -> list[str]:
    seen: dict[str, float] = {}
    for process, at in [(x.process, x.start) for x in story.lanes] + [(x.process, x.at) for x in story.marks]:
        seen.setdefault(process.incarnation, at)
    out = []
    for incarnation, at in seen.items():
        process = axis.service.processes[incarnation]
        if process is axis.references[axis.group(process)]:
            continue
        shown = at + axis.offset(process, at).seconds
        out.append(f"{process.rank}: {axis.compared(process, shown)}")
    return out[:16] + ([f"... and {len(out) - 16} more"] if len(out) > 16 else [])


def _gantt(story: Story, away: Mapping[str, Sequence[Bar]], width: int) -> RenderableType:
    lanes = story.lanes[:MAX_LANES]
    start, end = story.start, story.end
    room = min(max((len(without_control(x.title)) for x in lanes), default=0), max(width // 2, 30))
    across = max(width - room - 12, 16)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=room, no_wrap=True, overflow="ellipsis")
    table.add_column(width=across, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_row("", _ruler(across, end - start), "")
    for lane in lanes:
        took = lane.end - lane.start
        is_open = any(b.is_open for b in lane.bars)
        mark = "> " if is_open else ""
        line = bar_line(lane.bars, start, end, across, away.get(lane.process.incarnation, ()))
        table.add_row(Text(without_control(lane.title)), line, Text(mark + shown_seconds(took)))
        if len(lanes) > TOLD_LANES:
            mark += f"{_by_phase(lane.bars)[0][0]} "
        else:
            told = ", ".join(f"{b.phase} {shown_seconds(b.seconds)}{_parts(b)}" for b in lane.bars)
            table.add_row("", Text(told, style="dim", overflow="fold"), "")
    if len(story.lanes) > len(lanes):
        table.add_row("", Text(f"... and {len(story.lanes) - len(lanes)} more; --html shows all", style="dim"), "")
    return table


def _parts(bar: Bar) -> str:
    found = ", ".join(f"{name} {shown_seconds(x)}" for name, x in bar.parts.items())
    return f" (in it {found})" if found else ""


def _meanwhile(story: Story, grounds: Sequence[Ground]) -> list[Mark]:
    """Return what befell a request's processes while it was under way."""
    mine = {x.process.incarnation for x in story.lanes}
    out: list[Mark] = []
    for each in (x for x in grounds if x.process.incarnation in mine):
        out += [x for x in each.marks if story.start <= x.at <= story.end]
        for bar in each.away:
            if bar.start <= story.end and bar.end >= story.start:
                text = f"its event loop was away for {shown_seconds(bar.seconds)} from then on"
                out.append(Mark(bar.start, each.process, text, "warning"))
        if each.gone is not None and story.start <= each.gone.at <= story.end:
            out.append(Mark(each.gone.at, each.process, each.gone.text, "warning"))
    return out


def _events(story: Story, grounds: Sequence[Ground]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    told: dict[tuple[str, str], list[Mark]] = {}
    for mark in sorted([*story.marks, *_meanwhile(story, grounds)], key=lambda x: x.at):
        told.setdefault((mark.process.rank, mark.text), []).append(mark)
    found = list(told.values())
    for i, marks in enumerate(found):
        if len(found) > MAX_EVENTS and MAX_EVENTS // 2 <= i < len(found) - MAX_EVENTS // 2:
            if i == MAX_EVENTS // 2:
                table.add_row("", "", Text(f"... {len(found) - MAX_EVENTS} more; --json has all", style="dim"))
            continue
        mark = marks[0]
        style = "bold red" if mark.level == "error" else "yellow" if mark.level == "warning" else ""
        text = Text(without_control(mark.text), style=style)
        if len(marks) > 1:
            text.append(f" ({len(marks)} times, until {_since(marks[-1].at - story.start)})", "dim")
        table.add_row(_since(mark.at - story.start), Text(without_control(mark.process.rank)), text)
    return table


def _since(seconds: float) -> str:
    return f"{seconds * 1e3:+,.3f} ms"


def show_slowest(axis: Axis, found: Sequence[Story], number: int, console: Console) -> None:
    """Show those that took longest on any side, with what they did on each."""
    slowest = sorted(found, key=lambda x: -x.seconds)[:number]
    across = min(max(console.width - 52, 20), 80)
    drawn: list[Bar] = []
    for story in slowest:
        style = "yellow" if story.level == "warning" else ""
        _line(console, story.name or "?", f"bold {style}", is_whole=True)
        lanes = [x for x in (_longest(story, "prefill"), _longest(story, "decode")) if x is not None]
        # One axis for both sides, of this request alone: a pull that began late is seen to, and none is one letter.
        first, last = min((x.start for x in lanes), default=0.0), max((x.end for x in lanes), default=0.0)
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right", no_wrap=True, min_width=7)
        table.add_column(width=across, no_wrap=True)
        table.add_column(overflow="fold")
        for lane in lanes:
            bars = [b for b in lane.bars if b.phase != "release"] or lane.bars
            drawn += bars
            phases = ", ".join(f"{phase} {shown_seconds(seconds)}" for phase, seconds in _by_phase(bars)[:MOST_PHASES])
            how = f"lease {story.lease}" if lane.side == "prefill" else f"pull {story.pull or 'unknown'}"
            took = shown_seconds(max(b.end for b in bars) - lane.start)
            said = Text(without_control(f"{phases}; {how}"), style=style)
            table.add_row(took, bar_line(bars, first, last, across), said)
        print_unpadded(console, table, is_whole=True)
    print_unpadded(console, _legend(drawn, console.width))
    why = Counter(x.took for x in slowest if x.took).most_common()
    ranked = (
        f", ranked by what took longest on any side ({', '.join(f'{what} {n:,}' for what, n in why)})" if why else ""
    )
    _line(console, f"{len(slowest):,} of {counted(len(found), 'request')}{ranked}; --request ID shows one", "dim")
    _notes(axis, console)


def _longest(story: Story, side: str) -> Lane | None:
    """Return the lane of a side that says best where a request's time went."""
    lanes = [x for x in story.lanes if x.side == side]
    return max(lanes, key=lambda x: x.end - x.start, default=None)


WIDE = 72
"""Columns of a terminal that has room to say what each phase is."""


def show_all(axis: Axis, found: Sequence[Story], grounds: Sequence[Ground], console: Console) -> None:
    """Show all requests in numbers."""
    _outcomes(axis, found, console)
    console.print()
    is_wide = not console.is_terminal or console.width >= WIDE
    print_unpadded(console, Group(_processes(found, grounds), "", _phases(found, is_wide)), is_whole=True)
    _notes(axis, console)


NOT_LOGGED, NOT_PULLED, NOT_HERE = "successes not logged", "not pulled", "not in these logs"


def _silence(story: Story, side: str, has_logs: bool) -> str:
    """Say why a side does not tell how a request ended."""
    if not has_logs:
        return NOT_HERE
    if side == "prefill":
        return NOT_LOGGED if story.pull == "complete" else NOT_HERE
    is_cut = any(x.text.startswith((LOG_ENDS, NO_LOG)) for x in story.marks)
    if story.lease == "released" and not is_cut:
        return NOT_LOGGED
    is_claimed = is_cut or any(b.phase == "unlogged" for x in story.lanes for b in x.bars)
    return NOT_HERE if is_claimed else NOT_PULLED


def _outcomes(axis: Axis, found: Sequence[Story], console: Console) -> None:
    """Say how many there are, and how they ended on each side."""
    start, end = min((x.start for x in found), default=0.0), max((x.end for x in found), default=0.0)
    span = f" in {shown_seconds(end - start)} from {clock_time(start)}" if found else ""
    _line(console, f"{counted(len(found), 'request')}{span}")
    lends, pulls = axis.service.sides
    is_sampled = False
    for side, has_logs in (("prefill", bool(lends)), ("decode", bool(pulls))):
        outcomes = [(x, x.lease if side == "prefill" else x.pull) for x in found]
        said = [f"{n:,} {how}" for how, n in Counter(how for _, how in outcomes if how).most_common(12)]
        silent = Counter(_silence(x, side, has_logs) for x, how in outcomes if not how)
        is_sampled |= NOT_LOGGED in silent
        said += [f"{n:,} {why}" for why, n in silent.most_common()]
        if said:
            _line(console, f"  {side} side: {', '.join(said)}")
    if is_sampled:
        _line(
            console,
            f"  ({NOT_LOGGED}: an engine logs log.successes_per_s of them a second; raise it to see more)",
            "dim",
        )


def show_ends(grounds: Sequence[Ground], console: Console) -> None:
    """Say whose logs end without a goodbye, and who noticed."""
    found = [x.gone for x in grounds if x.gone is not None]
    found.sort(key=lambda x: (not x.is_death, x.at))
    for end in found[:MAX_NAMES]:
        _line(console, f"{end.process.rank} {end.text}", "yellow")
        for notice in end.noticed[:MAX_NOTICES]:
            after = shown_seconds(notice.at - end.at)
            _line(console, f"  {after} after its last line {notice.process.rank} {notice.text}", "dim")
    if len(found) > MAX_NAMES:
        _line(console, f"... and {len(found) - MAX_NAMES:,} more logs end without a goodbye; --json has all", "dim")


def show_read(logs: Logs, service: Service, console: Console) -> None:
    """Say what was read, what of it did not count, and whose logs are missing."""
    lines, files = counted(logs.num_lines, "line"), counted(len(logs.sources), "file")
    said = f"read {counted(len(logs.records), 'event')} in {lines} of {files}"
    if logs.num_others:
        said += f"; {counted(logs.num_others, 'line')} of other programs"
    if logs.num_repeated:
        said += f"; {counted(logs.num_repeated, 'line')} there twice"
    _line(console, said, "dim")
    if missing := service.missing():
        more = f" and {len(missing) - MAX_NAMES:,} more" if len(missing) > MAX_NAMES else ""
        _line(console, f"no log of {', '.join(missing[:MAX_NAMES])}{more}, which others name", "yellow")


def _processes(found: Sequence[Story], grounds: Sequence[Ground]) -> Table:
    parts: Counter[str] = Counter()
    for story in found:
        parts.update({x.process.incarnation for x in story.lanes})
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("process", no_wrap=True, overflow="fold")
    table.add_column("requests", justify="right")
    table.add_column("away", justify="right")
    table.add_column("clock", overflow="fold")
    for each in grounds[:MAX_LANES]:
        away = sum(x.seconds for x in each.away)
        table.add_row(
            Text(without_control(each.process.rank)),
            f"{parts[each.process.incarnation]:,}",
            shown_seconds(away) if away else "",
            Text(without_control(each.compared)),
        )
    return table


def _phases(found: Sequence[Story], is_wide: bool) -> Table:
    times: dict[str, list[float]] = {}
    for story in found:
        for phase, seconds in story.phases().items():
            times.setdefault(phase, []).append(seconds)
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("phase")
    for name in ("requests", "median", "p99", "longest"):
        table.add_column(name, justify="right")
    if is_wide:
        table.add_column("", overflow="fold", style="dim")
    for phase, about in PHASES.items():
        if values := sorted(times.get(phase, [])):
            at = [values[min(math.ceil(q * len(values)), len(values)) - 1] for q in (0.5, 0.99, 1.0)]
            table.add_row(phase, f"{len(values):,}", *map(shown_seconds, at), *([about] if is_wide else []))
    return table


def _notes(axis: Axis, console: Console) -> None:
    for note in axis.notes():
        _line(console, f"Clocks: {note}.", "yellow")


def show_matches(found: Sequence[Story], wanted: str, console: Console) -> None:
    """List requests that could be meant, with what each is called; names are never broken."""
    _line(
        console,
        f"{counted(len(found), 'request')} match {without_control(wanted)}; ENGINE:ID or a pull id is nobody else's",
    )
    for x in found[:MAX_MATCHES]:
        sequence = f"  #{x.sequence}" if x.sequence >= 0 else ""
        _line(console, f"{x.name or '?'}{sequence}  {x.ended}  from {clock_time(x.start)}", "bold", is_whole=True)
        handle = [f"{x.engine_id}:{x.name}"] if x.name else []
        for what, named in (("only", handle), ("decode", [y for y in x.others if y != x.name]), ("pull", x.pull_ids)):
            if named:
                _line(console, f"  {what} {', '.join(named[:4])}", is_whole=True)
    if len(found) > MAX_MATCHES:
        _line(console, f"... and {len(found) - MAX_MATCHES:,} more; more of the name finds fewer", "dim")


def _line(console: Console, text: str, style: str = "", *, is_whole: bool = False) -> None:
    """Print a line; it is wrapped on a terminal only, and there not inside what is to be copied."""
    shown = Text(without_control(text), style=style)
    console.print(shown, highlight=False, soft_wrap=is_whole or not console.is_terminal)
