"""Text of `asynckv why`: findings, the worst first; one request's story as bars; and the state of engines.

Each phase of a bar is a letter of its own, on a terminal in its colour. Texts of logs and of engines are shown with
their control characters escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from asynckv.account.inspect import RequestStatus
from asynckv.arguments import without_control
from asynckv.tools.console import grouped, size
from asynckv.tools.diagnose.ask import Answer
from asynckv.tools.diagnose.axis import Axis, clock_time, counted, shown_seconds
from asynckv.tools.diagnose.findings import NOT_JUDGED, Seen
from asynckv.tools.diagnose.leaks_copies import REMEDY, LateCopy
from asynckv.tools.diagnose.leaks_values import Leak, some
from asynckv.tools.diagnose.timeline_model import PHASES, Bar, Ground, Mark, Story
from asynckv.tools.output import print_unpadded

MAX_LANES, MAX_EVENTS, TOLD_LANES, MAX_MATCHES, MAX_NAMES = 64, 60, 8, 32, 8
MAX_FINDINGS, MAX_LIMITS = 32, 12
ALSO_HELD = ("blocks_quarantined", "transfers_in_doubt", "followers")


def _line(console: Console, text: str, style: str = "", indent: int = 0, *, is_whole: bool = False) -> None:
    """Print a line. It is wrapped only on a terminal, and not inside of text to copy."""
    shown = Text(without_control(text), style=style)
    if console.is_terminal and indent and not is_whole:
        console.print(Padding(shown, (0, 0, 0, indent), expand=False), highlight=False)
    else:
        shown = Text.assemble(" " * indent, shown)
        console.print(shown, highlight=False, soft_wrap=is_whole or not console.is_terminal)


# -- what is wrong -------------------------------------------------------------------------------------


def show(report: Mapping[str, Any], seen: Seen, top: int | None, console: Console) -> None:
    """Show findings, and the state of engines if there are findings or if their requests are asked for."""
    show_findings(report, console)
    if seen.answers and (report["findings"] or top is not None):
        show_engines(seen.answers, 5 if top is None else top, console)


def show_findings(report: Mapping[str, Any], console: Console) -> None:
    findings, limits, notes, read = report["findings"], report["limits"], report["notes"], report["read"]
    after = f" since {read['since']} UTC" if read["since"] else ""
    if not findings:
        text = NOT_JUDGED if limits else "All is well"
        text += " now (what is over is in logs alone)" if report["engines"] and not read["files"] else ""
        also = "" if limits else "".join(f"; {x['what']}" for x in notes[:MAX_LIMITS])
        # No more is claimed than the first log to end shows.
        _line(console, f"{text}{after}: {_span(read, read['until'])}{also}.", "bold")
    else:
        is_one = len(findings) == 1
        _line(console, f"{'One thing is' if is_one else f'{len(findings):,} things are'} wrong{after}.", "bold red")
    for i, each in enumerate(findings[:MAX_FINDINGS], 1):
        show_finding(each, console, f"{i}. ")
    if (more := len(findings) - MAX_FINDINGS) > 0:
        _line(console, f"and {more:,} more; --json has all", "bold", 3)
    for title, rows in (("What could not be judged:", limits), ("Also seen:", notes if findings or limits else ())):
        if rows:
            console.print()
            _line(console, title, "yellow")
        for each in rows[:MAX_LIMITS]:
            _line(console, each["what"] + (f" ({each['evidence']})" if each["evidence"] else ""), "yellow", 3)
        if (more := len(rows) - MAX_LIMITS) > 0:
            _line(console, f"and {more:,} more; --json has all", "yellow", 3)
    if findings or limits:
        console.print()
        lines = counted(read["lines"], "line")
        source = f"{lines} of {counted(read['files'], 'file')}" if read["files"] else "what running engines said"
        others = f"; {counted(read['others'], 'line')} of other programs" if read["others"] else ""
        repeated = f"; {counted(read['repeated'], 'line')} there twice" if read["repeated"] else ""
        _line(
            console,
            f"read {counted(read['events'], 'event')} in {source}{others}{repeated}: {_span(read, read['last'])}",
            "dim",
        )
    if any(x["requests"] for x in findings):
        _line(console, "asynckv why REQUEST with the same logs or engines shows one request's story.", "dim")


def show_finding(each: Mapping[str, Any], console: Console, number: str = "") -> None:
    console.print()
    _line(console, f"{number}{each['heading']}: {each['what']}", "bold")
    if each["requests"]:
        held = "" if each["blocks"] is None else f", {counted(each['blocks'], 'block')}"
        _line(console, f"requests: {some(each['requests'], MAX_NAMES)}{held}", "", 3, is_whole=True)
    if each["evidence"]:
        _line(console, f"evidence: {each['evidence']}", "", 3)
    if each["remedy"]:
        _line(console, f"what to do: {each['remedy']}", "", 3)


def _span(read: Mapping[str, Any], until: str) -> str:
    """Describe what was looked at: requests, ranks and time."""
    requests = counted(read["requests"], "request")
    if not read["files"]:
        requests = f"{read['lent_now']:,} lent and {read['pulled_now']:,} announced or pulled now"
    sides = (counted(len(read[side]), f"{side} rank") for side in ("prefill", "decode") if read[side])
    ranks = " and ".join(sides) or counted(len(read["quiet"]) + len(read["offload"]), "rank")
    return f"{requests}, {ranks}" + (f", {read['first']} to {until} UTC" if read["first"] else "")


# -- one request ---------------------------------------------------------------------------------------


def show_late(axis: Axis, late: Sequence[Leak], console: Console) -> None:
    """Show the causes of one late request, with the evidence of each side."""
    for leak in late:
        console.print()
        _line(console, f"{leak.cause.value}: {leak.sentence}", "bold")
        blocks = "blocks" if leak.blocks < 0 else counted(leak.blocks, "block")
        took = "" if math.isnan(leak.seconds) else f" for {shown_seconds(leak.seconds)}"
        since = "" if math.isnan(leak.since) else f" since {axis.moment(leak.since)}"
        rows = [
            ("held", f"{blocks} of {some(leak.holders)}{took}{since}; {leak.state}"),
            ("owed by", some("a decode engine that never spoke up" if x == "*" else x for x in leak.owed)),
            *(("also", x) for x in leak.also),
            ("missing", f"logs of {some(leak.missing)} would say more" if leak.missing else ""),
            ("what to do", leak.remedy),
        ]
        for title, text in rows:
            if text:
                _line(console, f"{title}: {text}", "", 3)


def show_copies(copies: Sequence[LateCopy], failed: Sequence[str], console: Console) -> None:
    for copy in copies:
        blocks = "" if copy.blocks < 0 else f", {counted(copy.blocks, 'block')}"
        held = "" if math.isnan(copy.seconds) else f", held for {shown_seconds(copy.seconds)}"
        _line(console, f"{copy.what} of {copy.request_id} on {copy.rank}{blocks}{held}: {copy.state} {copy.detail}")
        _line(console, f"what to do: {REMEDY}", "", 3)
    for line in failed[:MAX_EVENTS]:
        _line(console, line)


def show_story(axis: Axis, story: Story, grounds: Sequence[Ground], console: Console) -> None:
    names = f" (decode: {', '.join(story.others)})" if story.others and story.others != (story.name,) else ""
    _line(console, f"{story.name or '?'}{names}  {story.ended}", "bold", is_whole=True)
    engine = f"prefill engine {story.engine_id}, " if story.engine_id else ""
    sequence = f"sequence {story.sequence}, " if story.sequence >= 0 else ""
    _line(console, f"{engine}{sequence}from {clock_time(story.start)}, {shown_seconds(story.end - story.start)}")
    for text in _clock_lines(axis, story):
        _line(console, text, "dim")
    console.print()
    print_unpadded(console, _gantt(story, console.width))
    used = {bar.phase for lane in story.lanes for bar in lane.bars}
    legend = [Text.assemble((PHASES[x].letter, _style(x)), f" {x}") for x in PHASES if x in used]
    print_unpadded(console, Columns(legend, padding=(0, 2)))
    console.print()
    print_unpadded(console, _events(story, grounds), is_whole=True)


def show_limits(limits: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Show why a request could not be judged."""
    for each in limits[:MAX_LIMITS]:
        _line(console, f"could not be judged: {each['what']}", "yellow")


def show_matches(found: Sequence[Story], wanted: str, console: Console) -> None:
    """List requests that could be meant, with their names, which are never broken."""
    _line(console, f"{counted(len(found), 'request')} match {wanted}; name one exactly, by ENGINE:ID or a pull id")
    for x in found[:MAX_MATCHES]:
        sequence = f"  #{x.sequence}" if x.sequence >= 0 else ""
        _line(console, f"{x.name or '?'}{sequence}  {x.ended}  from {clock_time(x.start)}", "bold", is_whole=True)
        handle = [f"{x.engine_id}:{x.name}"] if x.name else []
        for what, names in (("only", handle), ("decode", [y for y in x.others if y != x.name]), ("pull", x.pull_ids)):
            if names:
                _line(console, f"  {what} {', '.join(names[:4])}", is_whole=True)
    if len(found) > MAX_MATCHES:
        _line(console, f"... and {len(found) - MAX_MATCHES:,} more; more of the name finds fewer", "dim")


def bar_line(bars: Sequence[Bar], start: float, end: float, width: int) -> Text:
    """Draw bars side by side; the shortest is still seen, unless there are fewer cells than phases."""
    scale = width / (end - start) if end > start else 0.0
    phases = [""] * width
    for bar in sorted(bars, key=lambda x: -x.seconds):
        first = max(min(math.floor((bar.start - start) * scale), width - 1), 0)
        for i in range(first, min(max(round((bar.end - start) * scale), first + 1), width)):
            phases[i] = bar.phase
    if sum(map(bool, phases)) < len({x.phase for x in bars if x.seconds > 0}):
        # Otherwise it would be chance which of them is drawn.
        phases = [x and max(bars, key=lambda x: x.seconds).phase for x in phases]
    out = Text(no_wrap=True, overflow="crop")
    for phase in phases:
        out.append(PHASES[phase].letter if phase else " ", _style(phase) if phase else "")
    return out


def _style(phase: str) -> Style:
    """Background of bars, because most terminals are dark."""
    return Style(color=PHASES[phase].dark, reverse=True)


def _clock_lines(axis: Axis, story: Story) -> list[str]:
    processes = dict.fromkeys([x.process for x in story.lanes] + [x.process for x in story.marks])
    out = [f"{x.rank}: {axis.compared(x)}" for x in processes if x not in axis.references]
    return out[:16] + ([f"... and {len(out) - 16} more"] if len(out) > 16 else [])


def _gantt(story: Story, width: int) -> RenderableType:
    lanes = story.lanes[:MAX_LANES]
    start, end = story.start, story.end
    room = min(max((len(without_control(x.title)) for x in lanes), default=0), max(width // 2, 30))
    across = max(width - room - 12, 16)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=room, no_wrap=True, overflow="ellipsis")
    table.add_column(width=across, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    last = shown_seconds(end - start)
    ruler = Text("0".ljust(across - len(last)) + last, style="dim", no_wrap=True, overflow="crop")
    table.add_row("", ruler, "")
    for lane in lanes:
        mark = "> " if any(b.is_open for b in lane.bars) else ""
        line = bar_line(lane.bars, start, end, across)
        table.add_row(Text(without_control(lane.title)), line, Text(mark + shown_seconds(lane.end - lane.start)))
        if len(lanes) <= TOLD_LANES:
            told = ", ".join(f"{b.phase} {shown_seconds(b.seconds)}{_parts(b)}" for b in lane.bars)
            table.add_row("", Text(told, style="dim", overflow="fold"), "")
    if len(story.lanes) > len(lanes):
        table.add_row("", Text(f"... and {len(story.lanes) - len(lanes)} more; --html shows all", style="dim"), "")
    return table


def _parts(bar: Bar) -> str:
    found = ", ".join(f"{name} {shown_seconds(x)}" for name, x in bar.inside.items())
    return f" (in it {found})" if found else ""


def _meanwhile(story: Story, grounds: Sequence[Ground]) -> list[Mark]:
    """Return the events of a request's processes while it was under way."""
    mine = {x.process.incarnation for x in story.lanes}
    out: list[Mark] = []
    for each in (x for x in grounds if x.process.incarnation in mine):
        out += [x for x in each.marks if story.start <= x.at <= story.end]
        for bar in each.away:
            if bar.start <= story.end and bar.end >= story.start:
                text = f"its event loop was away for {shown_seconds(bar.seconds)} from then on"
                out.append(Mark(bar.start, each.process, text, "warning"))
        if each.gone is not None and story.start <= each.end <= story.end:
            out.append(Mark(each.end, each.process, each.gone.text, "warning"))
    return out


def _events(story: Story, grounds: Sequence[Ground]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    every = sorted([*story.marks, *_meanwhile(story, grounds)], key=lambda x: x.at)
    told = grouped(((x.process.rank, x.text), x) for x in every)
    for i, marks in enumerate(told.values()):
        half = MAX_EVENTS // 2
        if len(told) > MAX_EVENTS and half <= i < len(told) - half:
            if i == half:
                table.add_row("", "", Text(f"... {len(told) - MAX_EVENTS} more; --json has all", style="dim"))
            continue
        mark = marks[0]
        style = "bold red" if mark.level == "error" else "yellow" if mark.level == "warning" else ""
        text = Text(without_control(mark.text), style=style)
        if len(marks) > 1:
            text.append(f" ({len(marks)} times, until {_since(marks[-1].at - story.start)})", "dim")
        table.add_row(_since(mark.at - story.start), Text(without_control(mark.process.rank)), text)
    return table


def _since(seconds: float) -> str:
    return f"{seconds * 1e3:+,.3f} ms" if abs(seconds) < 10.0 else f"{seconds:+,.3f} s"


# -- what engines hold ---------------------------------------------------------------------------------


def show_engines(answers: Sequence[Answer], top: int, console: Console) -> None:
    """Show what each engine that was asked holds, and the oldest requests of them all."""
    for answer in answers:
        console.print()
        facts = answer.account.facts
        if answer.error:
            _line(console, f"{answer.rank} ({answer.address}): {answer.error}", "bold red")
            continue
        where = f", pid {facts.pid} on {facts.host}" if facts.pid else ""
        where += "".join(f", {shard}" for shard in dict.fromkeys(map(str, answer.account.token_shards)))
        life = facts.life or "?"
        _line(console, f"{answer.rank} ({answer.address}): {life} for {shown_seconds(facts.uptime_s)}{where}", "bold")
        for line in _holds(answer):
            _line(console, line, "", 3)
    requests = [(x, answer.rank) for answer in answers if not answer.error for x in answer.requests]
    requests.sort(key=lambda x: -x[0].age_s)
    if requests[:top]:
        console.print()
        _line(console, "The oldest requests:", "bold")
    for status, rank in requests[:top]:
        for line in _status(status, rank):
            _line(console, line, "", 3)
    if (more := sum(x.number for answer in answers for x in answer.account.counts) - min(top, len(requests))) > 0:
        _line(console, f"and {more:,} more; --top N shows more of them", "dim", 3)


def _status(status: RequestStatus, rank: str) -> Iterator[str]:
    left = "" if status.left_s is None else f", {shown_seconds(status.left_s)} left"
    blocks = counted(status.blocks, "block")
    yield f"{status.request_id} on {rank}: {status.state} for {shown_seconds(status.age_s)}{left}, {blocks}"
    if status.waits:
        yield f"   {status.waits}"
    for ago, what, reason, peer, detail in status.refused[:4]:
        yield f"   a {what} of {peer} was refused {shown_seconds(ago)} ago: {reason} {detail}"


def _holds(answer: Answer) -> Iterator[str]:
    account, gauges, lag = answer.account, answer.gauges, answer.account.facts.lag
    if account.closed_as:
        yield f"takes nothing new: {account.closed_as}"
    if account.waits_for_step:
        what = (f"{x.number:,} {what} ({shown_seconds(x.seconds)})" for what, x in account.waits_for_step.items())
        yield f"waits for a step of the engine around it: {', '.join(what)}"
    held = {name: f"{used:,} of {most:,}" for name, (used, most) in account.budgets.items() if used}
    held |= {name: f"{gauges[name]:,}" for name in ALSO_HELD if gauges.get(name)}
    lags = f"loop late {shown_seconds(lag.last_s)}, at most {shown_seconds(lag.most_s)}, away {lag.was_away:,} times"
    yield ", ".join([*(f"{name.replace('_', ' ')} {x}" for name, x in held.items()), lags])
    if account.counts:
        yield ", ".join(f"{x.kind} {x.phase} {x.number:,} (oldest {shown_seconds(x.oldest_s)})" for x in account.counts)
    for tier in ("host", "file", "others"):
        if (blocks := gauges.get(f"offload.kept.{tier}")) is not None:
            used, most = gauges.get(f"offload.kept_bytes.{tier}", 0), gauges.get(f"offload.limit_bytes.{tier}")
            yield f"offload, {tier}: {counted(blocks, 'block')}, {size(used)}" + (f" of {size(most)}" if most else "")
    for name in ("offload.off", "offload.files_off"):
        if why := account.facts.planes.get(name):
            yield f"{name}: {why}"
    if account.num_peers:
        yield "peers " + ", ".join(f"{state} {number:,}" for state, number in account.num_peers.items())
    for peer in account.peers[: 4 * MAX_NAMES]:
        if peer.state not in ("ready", "new") or peer.cause or peer.is_draining:
            heard = "never heard" if peer.heard_s is None else f"heard {shown_seconds(peer.heard_s)} ago"
            yield f"   {peer.rank} {peer.state}, {heard}, {counted(peer.pulls, 'request')}: {peer.cause}"
