"""`asynckv timeline`: requests over all ranks and both sides, on one time axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from asynckv.tools.diagnose.timeline_model import Story

EPILOG = """
[bold]Examples[/bold]

  asynckv timeline logs/ --request chat-17

  asynckv timeline prefill.log decode.log.gz --slowest 20

  asynckv timeline logs/ --html timeline.html

  kubectl logs -l app=vllm --tail=-1 | asynckv timeline - --request cmpl-5 --json - | jq .requests

[bold]Exit status[/bold]  0 shown, 1 more than one request matches, 2 bad input, or no such request
"""

CHOOSE, OUT = "Which requests", "Output"
MOST_SHOWN = 10_000
"""Requests in one page."""


def timeline(
    logs: Annotated[
        list[str], typer.Argument(help="Logs of any processes: files, directories, - for stdin.", metavar="LOGS...")
    ],
    request: Annotated[
        str | None,
        typer.Option(
            help="One: by either side's id, ENGINE:ID, a pull id or a sequence.", rich_help_panel=CHOOSE, metavar="ID"
        ),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option(help="So many that took longest, on any side.", rich_help_panel=CHOOSE, metavar="N")
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(help="Write a page to zoom into; - for stdout.", rich_help_panel=OUT, metavar="FILE"),
    ] = None,
    json: Annotated[
        str | None, typer.Option(help="Write all that is known; - for stdout.", rich_help_panel=OUT, metavar="FILE")
    ] = None,
) -> None:
    """Show what became of requests, over all ranks and both sides, on one time axis.

    Reads JSON logs of any number of processes, in any order, rotated or cut short.
    Clocks of hosts are aligned by what was exchanged; how sure that is, is told.
    """
    from rich.console import Console

    from asynckv.arguments import without_control
    from asynckv.tools.diagnose import timeline_text
    from asynckv.tools.diagnose.axis import counted, make_axis
    from asynckv.tools.diagnose.join import join
    from asynckv.tools.diagnose.reading import read_with_progress
    from asynckv.tools.diagnose.timeline_model import families, ground, named, stories
    from asynckv.tools.output import check_writable, write, write_json

    if request is not None and slowest is not None:
        raise ConfigError("--request and --slowest exclude each other; give one of them")
    if slowest is not None and not 1 <= slowest <= MOST_SHOWN:
        raise ConfigError(f"--slowest {slowest} is outside 1 ... {MOST_SHOWN}")
    outputs = {"--html": html, "--json": json}
    if len(piped := [name for name, target in outputs.items() if target == "-"]) > 1:
        raise ConfigError(f"{' and '.join(piped)} cannot share stdout; give one of them a file")
    for name, target in outputs.items():
        check_writable(name, target)
    errors = Console(stderr=True)
    found = read_with_progress(logs, errors, transitions=True)
    if found.nothing:
        raise ConfigError(found.nothing)
    for skipped in found.skipped[:8]:
        said = f"left out: {counted(skipped.lines, 'line')}, {skipped.reason} (first {skipped.where})"
        errors.print(without_control(said), markup=False, highlight=False, soft_wrap=not errors.is_terminal)
    service = join(found)
    axis = make_axis(service)
    console = Console(stderr=bool(piped))
    # Of a million requests one is wanted at times.
    together = list(families(service.requests))
    grounds = ground(axis)
    every = stories(axis, named(together, request) if request is not None else together)
    if request is not None:
        chosen = every
        if not chosen:
            raise ConfigError(
                f"--request {request}: no such request among {len(together):,}; give either side's id, a pull id or a "
                f"sequence, as they are in the logs (successes may have been left out of them)"
            )
        if len(chosen) > 1:
            timeline_text.show_matches(chosen, request, console)
            raise typer.Exit(1)
        timeline_text.show_one(axis, chosen[0], grounds, console)
    elif slowest is not None:
        chosen = sorted(every, key=lambda x: -x.seconds)[:slowest]
        timeline_text.show_slowest(axis, every, slowest, console)
    else:
        chosen = every
        timeline_text.show_all(axis, every, grounds, console)
    if request is None:
        timeline_text.show_ends(grounds, console)
    timeline_text.show_read(found, service, console)
    if any(outputs.values()):
        shown = _most(chosen, errors)
        if json is not None:
            from asynckv.tools.diagnose.timeline_json import report

            write_json(json, report(axis, shown, grounds))
        if html is not None:
            from asynckv.tools.diagnose.leaks import find_leaks
            from asynckv.tools.diagnose.overview import overview
            from asynckv.tools.diagnose.timeline_page import make

            leaks = find_leaks(service, axis.when)
            write(
                "--html", html, make(axis, shown, grounds, logs, overview(found, axis, together, grounds, leaks), leaks)
            )


def _most(chosen: Sequence[Story], errors: Console) -> list[Story]:
    """Keep what a browser can show: what went wrong, and what took longest."""
    if len(chosen) <= MOST_SHOWN:
        return list(chosen)
    kept = sorted(chosen, key=lambda x: (x.level == "info", -x.seconds))[:MOST_SHOWN]
    said = f"{len(chosen):,} requests are too many for one file; in it are the {MOST_SHOWN:,} that"
    errors.print(f"{said} went wrong or took longest", markup=False, highlight=False)
    return sorted(kept, key=lambda x: x.number)
