"""What `asynckv leaks` shows: what was read, what was late by cause, and every request in detail; as text and as JSON.

Everything in it came from logs, which is to say from strangers: it is made printable before a terminal sees it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from asynckv.arguments import without_control
from asynckv.tools.console import printable
from asynckv.tools.diagnose.axis import counted
from asynckv.tools.diagnose.causes import CATALOGUE, CAUSE
from asynckv.tools.diagnose.join import Service
from asynckv.tools.diagnose.leaks_copies import REMEDY, LateCopy, has_offload
from asynckv.tools.diagnose.leaks_values import Early, Leak, moment
from asynckv.tools.diagnose.records import Logs
from asynckv.tools.output import print_unpadded

SCHEMA = "asynckv.leaks/1"
SHOWN_NAMES = 8
MAX_FILES = 100
"""Files that are told one by one."""


def report(
    leaks: Sequence[Leak],
    service: Service,
    logs: Logs,
    unanswered: Sequence[str] = (),
    failed: Sequence[str] = (),
    early: Sequence[Early] = (),
    copies: Sequence[LateCopy] = (),
    since: float = -math.inf,
) -> dict[str, Any]:
    """Make plain data of all that was found.

    Args:
        leaks: Of `find_leaks`, or some of them.
        service: Of `join`.
        logs: What was read.
        unanswered: Engines that were asked in vain, and why.
        failed: Stores and loads of the requests that were asked for, each in a line.
        early: Of `early_ends`.
        copies: Of `late_copies`.
        since: Only what was late then or later is among these.
    """
    prefill, decode = service.sides
    others = [x for x in service.processes.values() if not x.lends and not x.pulls]
    keeps = {x.rank for x in others if has_offload(x)}
    times = [x.first_at for x in service.processes.values()] + [x.last_at for x in service.processes.values()]
    return {
        "schema": SCHEMA,
        "leaked": len(leaks),
        "causes": {cause.value: summed(cause, found) for cause, found in by_cause(leaks).items()},
        "leaks": [_entry(x) for x in leaks],
        "copies": [_plain(x) for x in copies],
        "failed": list(failed),
        "read": {
            "files": len(logs.sources),
            "lines": logs.num_lines,
            "bytes": logs.num_bytes,
            "events": len(logs.records),
            "since": moment(since) if math.isfinite(since) else None,
            "others": logs.num_others,
            "others_in": [{"path": x.path, "lines": x.num_others} for x in logs.sources if x.num_others][:MAX_FILES],
            "repeated": logs.num_repeated,
            "repeated_in": [{"path": x.path, "lines": x.num_repeated} for x in logs.sources if x.num_repeated][
                :MAX_FILES
            ],
            "skipped": [
                {"reason": x.reason, "lines": x.lines, "where": x.where, "first": x.first} for x in logs.skipped
            ],
            "first": moment(min(times)) if times else None,
            "last": moment(max(times)) if times else None,
            "seconds": round(max(times) - min(times), 3) if times else 0.0,
            "prefill": [x.rank for x in prefill],
            "decode": [x.rank for x in decode],
            "offload": sorted(keeps),
            "quiet": sorted({x.rank for x in others} - keeps),
            "missing": service.missing(),
            "early": [{"rank": x.rank, "last": moment(x.last_at), "before_s": round(x.before_s, 3)} for x in early],
            "warnings_only": sorted(x.rank for x in service.processes.values() if not x.says_info),
            "unanswered": list(unanswered),
            "requests": len(service.requests),
        },
    }


def _plain(found: Leak | LateCopy) -> dict[str, Any]:
    """Make plain data of a finding; what is not known is None."""
    out: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(found).items()
    }
    out["blocks"] = found.blocks if found.blocks >= 0 else None
    for name, digits in (("seconds", 3), ("since", 6)):
        out[name] = None if math.isnan(out[name]) else round(out[name], digits)
    return out


def _entry(leak: Leak) -> dict[str, Any]:
    plain = {name: value for name, value in _plain(leak).items() if name not in ("cell", "told_at")}
    return plain | {
        "cause": leak.cause.value,
        "is_class": CATALOGUE[leak.cause].is_class,
        "evidence": leak.evidence,
        "remedy": leak.remedy,
        "reader": leak.reader or None,
        "other_request_id": leak.other_request_id or None,
    }


def summed(cause: CAUSE, found: Sequence[Leak]) -> dict[str, Any]:
    """Sum up the findings of one cause."""
    seconds = [x.seconds for x in found if not math.isnan(x.seconds)]
    return {
        "title": CATALOGUE[cause].title,
        "is_class": CATALOGUE[cause].is_class,
        "requests": len(found),
        "blocks": _blocks(found),
        "longest_s": round(max(seconds), 3) if seconds else None,
        "remedy": CATALOGUE[cause].remedy,
    }


def by_cause(leaks: Sequence[Leak]) -> dict[CAUSE, list[Leak]]:
    """Sort findings by their cause, the most frequent cause first."""
    found: dict[CAUSE, list[Leak]] = defaultdict(list)
    for leak in leaks:
        found[leak.cause].append(leak)
    return dict(sorted(found.items(), key=lambda x: (-len(x[1]), x[0])))


def _blocks(leaks: Sequence[Leak]) -> int | None:
    known = [x.blocks for x in leaks if x.blocks >= 0]
    return sum(known) if known else None


def show(found: dict[str, Any], console: Console, *, details: int, request: str = "") -> None:
    """Show it to people: the table by cause, then so many requests of each in detail, then what was read.

    On a terminal lines are wrapped at its width; elsewhere they are whole, and end where their text does, for tools.
    """
    shown: dict[str, Any] = printable(found)
    if not shown["leaks"] and not shown["copies"]:
        name = escape(without_control(request))
        after = _since(shown["read"])
        text = f"Request {name} was not late{after}" if name else f"Nothing was late{after}"
        if unanswered := shown["read"]["unanswered"]:
            silent = _few([x.partition(": ")[0] for x in unanswered])
            what = f"Cannot say{f' of request {name}' if name else ''}"
            text = f"{what}: {silent} did not answer; of the others nothing was late{after}"
        elif (limits := _limits(shown["read"])) and not name:
            text += f", as far as {limits}"
        _print(console, f"[bold]{text}.[/bold]")
        if name and shown["read"]["files"]:
            _print(console, f"What became of it: asynckv timeline LOGS --request {name}", 2)
        for story in shown["failed"]:
            _print(console, story, 2)
    elif shown["leaks"]:
        _show_table(shown, console)
    else:
        for story in shown["failed"]:
            _print(console, story)
    for cause in shown["causes"]:
        leaks = [x for x in shown["leaks"] if x["cause"] == cause]
        for leak in leaks[:details]:
            console.print()
            _show_one(leak, console)
        if rest := leaks[details:]:
            more = counted(len(rest), "more request" if details else "request")
            names = _few([x["request_id"] for x in rest])
            console.print()
            _print(console, f"{cause}: {more}: {names}; --limit shows more, --request one")
    _show_copies(shown["copies"], console, details)
    console.print()
    for line in _summary(shown["read"]):
        _print(console, line)


def _since(read: dict[str, Any]) -> str:
    return f" since {read['since']} UTC" if read["since"] else ""


def _limits(read: dict[str, Any]) -> str:
    """Whose word it is that nothing was late, where others may know better."""
    if read["decode"] and not read["prefill"]:
        return "the decode side's logs say" if read["files"] else "the decode side says"
    if read["prefill"] and not read["decode"] and not (read["quiet"] or read["offload"]):
        return "the prefill side's logs say" if read["files"] else "the prefill side says"
    return "these logs go" if read["early"] or read["warnings_only"] else ""


def _print(console: Console, text: str, indent: int = 0) -> None:
    """Print a line of markup."""
    if console.is_terminal:
        console.print(Padding(Text.from_markup(text), (0, 0, 0, indent), expand=False), highlight=False)
    else:
        console.print(" " * indent + text, highlight=False, soft_wrap=True)


def _show_table(shown: dict[str, Any], console: Console) -> None:
    title = f"{shown['leaked']:,} late{_since(shown['read'])}, by cause"
    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    table.add_column("cause", style="bold", no_wrap=True)
    table.add_column("requests", justify="right")
    table.add_column("blocks", justify="right")
    table.add_column("longest", justify="right")
    table.add_column("")
    for cause, row in shown["causes"].items():
        longest = "" if row["longest_s"] is None else f"{row['longest_s']:,.1f} s"
        blocks = "" if row["blocks"] is None else f"{row['blocks']:,}"
        table.add_row(cause, f"{row['requests']:,}", blocks, longest, row["title"])
    print_unpadded(console, table, is_whole=True)


def _show_copies(copies: Sequence[dict[str, Any]], console: Console, most: int) -> None:
    """Show stores and loads whose copies did not end."""
    if not copies:
        return
    console.print()
    which = "copy of a store or load" if len(copies) == 1 else "copies of stores and loads"
    _print(console, f"[bold]{len(copies):,} {which} did not end in time[/bold]")
    for copy in copies[: max(most, 1) * SHOWN_NAMES]:
        blocks = "" if copy["blocks"] is None else f", {counted(copy['blocks'], 'block')}"
        held = "" if copy["seconds"] is None else f" {copy['seconds']:,.1f} s"
        name = f"{copy['what']} of {copy['request_id']} on {copy['rank']}{blocks}: held{held}, {_STATE[copy['state']]}"
        _print(console, f"{name}{': ' + copy['detail'] if copy['detail'] else ''}", 2)
    _print(console, f"remedy: {REMEDY}", 2)


def _show_one(leak: dict[str, Any], console: Console) -> None:
    decode = ", ".join(leak["decode_request_ids"][:4])
    name = f"{leak['request_id']}" + (f" (decode: {decode})" if decode else "")
    # What is to be copied is never broken.
    console.print(f"[bold]{leak['cause']}[/bold]  {name}", highlight=False, soft_wrap=True)
    _print(console, leak["sentence"], 2)
    known = f" from which nothing was accepted: {leak['reader']}" if leak["reader"] else " that never spoke up"
    nobody = f"* (a decode engine{known})"
    rows = [
        ("held", _held(leak)),
        ("owed by", _few([nobody if x == "*" else x for x in leak["owed"]])),
        ("released", _few([f"{k} ({v})" for k, v in leak["released"].items()])),
    ]
    rows += [
        (
            (leak["reader"] or "nobody") if x["reader"] == "*" else x["reader"],
            f"to {x['holder']}: claim {x['claim']}; release {x['release']}",
        )
        for x in leak["words"][:SHOWN_NAMES]
    ]
    rows += [("prefill side", leak["last_prefill"]), ("decode side", leak["last_decode"])]
    rows += [("also", x) for x in leak["also"]]
    rows += [("missing", f"logs of {_few(leak['missing'])} would say more")] if leak["missing"] else []
    rows.append(("what to do", leak["remedy"]))
    for title, text in rows:
        if text:
            _print(console, f"[dim]{title}:[/dim] {text}", 2)


def _held(leak: dict[str, Any]) -> str:
    """Whose blocks, how many and for how long, as far as that is known."""
    blocks = "blocks" if leak["blocks"] is None else counted(leak["blocks"], "block")
    took = "" if leak["seconds"] is None else f" {leak['seconds']:,.3f} s"
    since = "" if leak["since"] is None else f" since {moment(leak['since'])}"
    span = f",{took}{since}" if took or since else ""
    return f"{blocks} of {_few(leak['holders'])}{span}; {_STATE[leak['state']]}"


_STATE = {
    "expired": "its lease expired",
    "closed": "its engine was closed",
    "died": "its process died, as far as its log tells",
    "held": "still held when the log ends",
    "announced": "kept for an announcement",
    "unknown": "what became of it is not in these logs",
    "returned": "returned since",
    "retired": "retired: lost to this process",
    "quarantined": "not returned when the log ends",
}


def _few(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _summary(read: dict[str, Any]) -> list[str]:
    lines = counted(read["lines"], "line")
    source = f"{lines} of {counted(read['files'], 'file')}" if read["files"] else "what running engines said"
    out = [
        f"[dim]read {counted(read['events'], 'event')} in {source}, {counted(read['requests'], 'request')}, "
        f"{read['first']} to {read['last']} UTC[/dim]"
    ]
    for side in ("prefill", "decode", "offload", "quiet"):
        if read[side]:
            title = {"quiet": "no request of", "offload": "offload alone"}.get(side, side)
            out.append(f"[dim]{title}: {_few(read[side])}[/dim]")
    if read["missing"]:
        out.append(f"[yellow]no log of {_few(read['missing'])}, which others name[/yellow]")
    if read["early"]:
        ends = _few([f"{x['rank']} at {x['last']}, {x['before_s']:,.3g} s before the last line" for x in read["early"]])
        out.append(f"[yellow]ends early: log of {ends}; what came after is not in it, and not judged[/yellow]")
    if read["warnings_only"]:
        out.append(
            f"[yellow]warnings only, of {_few(read['warnings_only'])}: what ended well is not logged there, so missing "
            f"lines do not tell what is still held, or who died; level info has them[/yellow]"
        )
    out += [f"[yellow]no answer from {x}[/yellow]" for x in read["unanswered"]]
    for name, what in (("repeated", "that were there twice"), ("others", "of other programs")):
        if read[name]:
            where = _few([f"{x['path']} ({x['lines']:,})" for x in read[f"{name}_in"]])
            out.append(f"[dim]{counted(read[name], 'line')} {what}: {where}[/dim]")
    out += [
        f"[yellow]{counted(x['lines'], 'line')} left out: {x['reason']} (first {x['where']})[/yellow]"
        for x in read["skipped"]
    ]
    return out
