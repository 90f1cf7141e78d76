"""`asynckv why`: what is wrong with a service, out of logs, out of what running engines say, or out of both."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asynckv.config import KeysConfig
from asynckv.errors import ConfigError
from asynckv.tools.output import HELP, check_writable, consoles, write, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from asynckv.tools.diagnose.findings import Findings, Seen
    from asynckv.tools.diagnose.timeline_model import Story

said = HELP["why"]
asking, shown = (partial(typer.Option, rich_help_panel=panel) for panel in ("Asking", "Showing"))
WATCH_S = 2.0


def why(
    sources: Annotated[
        list[str], typer.Argument(metavar="[REQUEST] LOGS|ADDRESS|DIR...", help=said["sources"], show_default=False)
    ],
    since: Annotated[str | None, shown(help=said["since"], metavar="TIME")] = None,
    html: Annotated[str | None, shown(help=said["html"], metavar="FILE")] = None,
    json: Annotated[str | None, shown(help=said["json"], metavar="FILE")] = None,
    top: Annotated[int | None, shown(help=said["top"], metavar="N", min=0, max=4096)] = None,
    watch: Annotated[bool, asking("--watch", help=said["watch"])] = False,
    keys: Annotated[Path | None, asking(help=said["keys"], metavar="FILE")] = None,
    authorized: Annotated[Path | None, asking(help=said["authorized"], metavar="DIR")] = None,
    timeout: Annotated[float, asking(help=said["timeout"], metavar="SECONDS")] = 5.0,
) -> None:
    """Find what is wrong with a service and what to do about it: the worst first, with its evidence.

    The output names missing processes, late blocks with their holders, failures, and things that could not be judged.
    With a request it shows that request over all ranks, on one time axis. docs/why.md explains every finding.
    """
    from rich.console import Console

    from asynckv.tools.diagnose import why_text
    from asynckv.tools.diagnose.ask import targets
    from asynckv.tools.diagnose.findings import find
    from asynckv.tools.diagnose.reading import Looking
    from asynckv.tools.diagnose.timeline_model import stories
    from asynckv.tools.diagnose.why_page import make
    from asynckv.tools.diagnose.why_report import report

    if (keys is None) is not (authorized is None):
        raise ConfigError("--keys and --authorized belong together: the asker's keys, and the keys that it trusts")
    if json == "-" == html:
        raise ConfigError("--html and --json cannot share stdout; give one of them a file")
    check_writable("--html", html)
    console, errors = consoles(json)
    request, sources = _request(sources)
    if watch and (targets(sources)[0] or html is not None or json not in (None, "-")):
        raise ConfigError("--watch asks running engines: give addresses alone, and at most --json -")
    pair = KeysConfig(secret=keys, authorized=authorized) if keys is not None and authorized is not None else None
    if html == "-":
        console = errors
    looking = Looking(sources, request, since, pair, timeout)
    while watch:  # Ctrl-C ends it
        began = time.monotonic()
        seen = looking.look()
        document = report(find(seen), seen)
        if json is not None:
            write("--json", "-", msgspec.json.encode(document).decode() + "\n")
        else:
            if console.is_terminal:
                console.clear()
            why_text.show(document, seen, 5 if top is None else top, console)
            sys.stdout.flush()
        time.sleep(max(began + WATCH_S - time.monotonic(), 0.0))
    seen = looking.look()
    found = find(seen)
    meant = looking.stories(seen) if request is not None else []
    if request is not None and len(meant) > 1:
        why_text.show_matches(meant, request, Console(stderr=True) if json == "-" else console)
        raise typer.Exit(2)
    story = meant[0] if meant else None
    document = report(found, seen, story)
    write_json(json, document)
    if html is not None:
        write("--html", html, make(seen, found, sources, stories(seen.axis) if story is None else [story]))
    if request is not None:
        raise typer.Exit(_show_request(seen, found, story, looking.called, console))
    why_text.show(document, seen, top, console)
    raise typer.Exit(1 if found.wrong else 3 if found.limits else 0)


def _show_request(seen: Seen, found: Findings, story: Story | None, called: set[str], console: Console) -> int:
    """Show all that is known of a request by some of its names, and return the exit status."""
    from asynckv.tools.diagnose import why_text
    from asynckv.tools.diagnose.why_report import plain

    mine = [x for x in found.wrong if set(x.requests) & called]
    causes = {x.cause.value for x in found.late}  # which are shown with all that is known of the request
    if story is not None:
        why_text.show_story(seen.axis, story, seen.grounds, console)
    why_text.show_late(seen.axis, found.late, console)
    why_text.show_copies(seen.copies, seen.failed, console)
    for each in (x for x in mine if x.code not in causes):
        why_text.show_finding(plain(each), console)
    is_judged = not found.limits or (story is not None and bool(story.lease and story.pull))
    if not is_judged:
        why_text.show_limits(plain(found.limits), console)
    return 1 if mine or found.late or seen.copies else 0 if is_judged else 3


def _request(given: Sequence[str]) -> tuple[str | None, list[str]]:
    from asynckv.tools.diagnose.ask import is_of_no_host, targets

    first, *rest = given
    if not first.strip():
        raise ConfigError("'' names nothing; give an id of either side, a pull id or #SEQUENCE")
    with suppress(OSError):  # it is longer than names of files are
        is_log = Path(first).suffix in {".jsonl", ".log", ".gz", ".xz", ".zst"}  # if none is there, it was mistyped
        is_file = first == "-" or is_log or Path(first).exists() or any(x in first for x in "*?" if rest)
        is_path = "/" in first and "://" not in first  # and of nothing that is there
        if is_file or (not (rest and (is_path or is_of_no_host(first))) and (is_path or targets([first])[1])):
            return None, list(given)
    if not rest:
        raise ConfigError(
            f"{first!r:.200} is no file, directory or address; give logs or engines, behind a request if one is meant: "
            f"asynckv why [REQUEST] LOGS|ADDRESS|DIR..."
        )
    return first, rest
