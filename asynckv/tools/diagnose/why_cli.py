"""`asynckv why`: what is wrong with a service, out of logs, out of what running engines say, or out of both."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from asynckv.config import KeysConfig
from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from asynckv.tools.diagnose.ask import Answer
    from asynckv.tools.diagnose.findings import Findings, Seen
    from asynckv.tools.diagnose.join import Service
    from asynckv.tools.diagnose.records import Logs
    from asynckv.tools.diagnose.timeline_model import Story

EPILOG = """
[bold]Examples[/bold]

  asynckv why /var/log/asynckv/

  asynckv why tcp://10.0.0.1:5555 tcp://10.0.0.2:5555

  asynckv why /run/asynckv /var/log/asynckv --since 10m

  asynckv why chat-4711 logs/

  kubectl logs -l app=vllm --tail=-1 | asynckv why - --html why.html

  asynckv why logs/ --json - | jq '.findings[] | [.heading, .what, .remedy]'

[bold]Exit status[/bold]  0 all is well, 1 something is wrong, 2 bad input, no such request, or several,
130 Ctrl-C, 141 nobody reads the output any more
"""

ASK, SHOW = "Asking", "Showing"
MOST_SHOWN = 10_000  # requests in one page
MAX_TOP = 4096
WATCH_S = 2.0
AGAIN_S = 0.5  # what two engines say is of two moments; what is wrong between them is wrong again after so long


def why(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[REQUEST] LOGS|ADDRESS|DIR...",
            help="JSON logs of any processes (files, directories, - for stdin), running engines (host:port, sockets), "
            "or both. What is neither, in the first place, is a request: an id of either side, ENGINE:ID, a pull id, "
            "#SEQUENCE, or how one begins.",
            show_default=False,
        ),
    ],
    since: Annotated[
        str | None,
        typer.Option(
            help="Only what was wrong then or later: a time (2026-01-31T12:00 or 12:00, UTC), or so long before the "
            "last event (90s, 10m, 2h). Shows whether a repair has helped.",
            metavar="TIME",
            rich_help_panel=SHOW,
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(help="Write a page with all requests on one time axis.", metavar="FILE", rich_help_panel=SHOW),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            help="Write JSON; - for stdout, with --watch one document per line.", metavar="FILE", rich_help_panel=SHOW
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            help="Show what running engines hold, and so many of their oldest requests; 5, if something is wrong.",
            metavar="N",
            rich_help_panel=SHOW,
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Ask running engines again every 2 seconds.", rich_help_panel=ASK)
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(help="Who asks, for engines with keys: NAME.key_secret.", metavar="FILE", rich_help_panel=ASK),
    ] = None,
    authorized: Annotated[
        Path | None,
        typer.Option(help="Directory with the *.key files of the engines.", metavar="DIR", rich_help_panel=ASK),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="How long an engine may take to answer.", metavar="SECONDS", rich_help_panel=ASK)
    ] = 5.0,
) -> None:
    """Say what is wrong with a service and what to do about it: the worst first, with its evidence.

    Who is not there, which blocks are late and who holds them, what failed, and what could not be judged. With a
    request, what became of it over all ranks and both sides, on one time axis. docs/why.md explains every finding.
    """
    from rich.console import Console

    from asynckv.tools.diagnose import why_text
    from asynckv.tools.diagnose.findings import find
    from asynckv.tools.diagnose.leaks_live import is_address
    from asynckv.tools.diagnose.why_report import finding, report
    from asynckv.tools.output import check_writable, write, write_json

    if (keys is None) is not (authorized is None):
        raise ConfigError("--keys and --authorized belong together: who asks, and whom it trusts")
    if top is not None and not 0 <= top <= MAX_TOP:
        raise ConfigError(f"--top {top} is outside 0 ... {MAX_TOP}")
    if json == "-" == html:
        raise ConfigError("--html and --json cannot share stdout; give one of them a file")
    for name, target in (("--html", html), ("--json", json)):
        check_writable(name, target)
    request, sources = _request(sources)
    if watch and (not all(map(is_address, sources)) or html is not None or json not in (None, "-")):
        raise ConfigError("--watch asks running engines: give addresses alone, and at most --json -")
    pair = KeysConfig(secret=keys, authorized=authorized) if keys is not None and authorized is not None else None
    console = Console(stderr="-" in (json, html))
    looking = Looking(sources, request, since, pair, timeout)
    if watch:
        _watch(looking, console, 5 if top is None else top, is_json=json == "-")
    seen = looking.look()
    found = find(seen)
    story = None
    if request is not None:
        stories = looking.stories(seen)
        if len(stories) > 1:
            why_text.show_matches(stories, request, console)
            raise typer.Exit(2)
        story = stories[0] if stories else None
    document = report(found, seen, story) if request is None or json is not None else {}
    write_json(json, document)
    if html is not None:
        write("--html", html, _page(seen, found, sources, story))
    if request is None:
        _show(document, seen, console, top)
        raise typer.Exit(1 if found.wrong else 0)
    mine = [x for x in found.wrong if set(x.requests) & looking.called]
    _show_request(seen, found, story, console)
    for each in mine:
        why_text.show_finding(finding(each), console)
    raise typer.Exit(1 if mine or found.late or found.copies else 0)


def _request(given: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell a request from the sources behind it."""
    from asynckv.tools.diagnose.leaks_live import is_address

    first, *rest = given
    if not first.strip():
        raise ConfigError("'' names nothing; give an id of either side, a pull id or #SEQUENCE")
    if first == "-" or Path(first).exists() or is_address(first) or any(x in first for x in "*?/"):
        return None, list(given)
    if not rest:
        raise ConfigError(
            f"{first!r:.200} is no file, directory or address; give logs or engines, behind a request if one is meant: "
            f"asynckv why [REQUEST] LOGS|ADDRESS|DIR..."
        )
    return first, rest


class Looking:
    """Reads logs and asks engines, once or again and again."""

    def __init__(
        self, sources: Sequence[str], request: str | None, since: str | None, keys: KeysConfig | None, timeout_s: float
    ) -> None:
        from rich.console import Console

        from asynckv.tools.diagnose.leaks_live import has_logs, is_address
        from asynckv.tools.diagnose.reading import read_with_progress
        from asynckv.tools.diagnose.records import Logs

        self._request, self._since, self._keys, self._timeout_s = request, since, keys, timeout_s
        self.called: set[str] = set()  # what the request that is asked about is called, on either side
        self._addresses = [x for x in sources if is_address(x)]
        paths = [x for x in sources if has_logs(x)]
        errors = Console(stderr=True)
        self._logs = read_with_progress(paths, errors, request=request or "", since=since) if paths else Logs()

    def look(self) -> Seen:
        """Ask, and join what was said with what was read."""
        seen = self._once()
        if seen.late and seen.answers:
            time.sleep(AGAIN_S)
            again = self._once()
            late = {(x.cause, x.engine_id, x.request_id) for x in seen.late}
            return replace(again, late=[x for x in again.late if (x.cause, x.engine_id, x.request_id) in late])
        return seen

    def _once(self) -> Seen:
        from asynckv.core import told
        from asynckv.tools.diagnose import leaks_copies, leaks_live
        from asynckv.tools.diagnose.axis import make_axis
        from asynckv.tools.diagnose.findings import Seen
        from asynckv.tools.diagnose.join import join
        from asynckv.tools.diagnose.leaks import find_leaks
        from asynckv.tools.diagnose.leaks_request import find_requests
        from asynckv.tools.diagnose.leaks_values import moment as clock
        from asynckv.tools.diagnose.reading import moment
        from asynckv.tools.diagnose.timeline_model import ground, named, names

        answers = self._asked()
        now = time.time()

        def joined(*, every: bool) -> tuple[Logs, Service]:
            said = leaks_live.records_of(answers, now, every=every)
            # An engine that has told all that it holds is the last word on that.
            whole = {x.account.incarnation for x in answers if not x.error and not x.is_cut}
            held = (told.LeaseHeld.event, told.PullHeld.event)
            kept = [x for x in self._logs.records if x.event not in held or x.incarnation not in whole]
            logs = replace(self._logs, records=[*kept, *said])
            if logs.nothing and (self._logs.sources or not answers):
                raise ConfigError(logs.nothing)
            service = join(logs)
            leaks_live.tell(service, answers, now)
            leaks_live.look_here(service)
            return logs, service

        # What is young is told of one request, and is not late.
        logs, service = joined(every=self._request is not None)
        axis = make_axis(service)
        called, wanted = None, None
        if self._request is not None:
            wanted = find_requests(service, self._request, leaks_copies.called(service))
            self.called = called = {self._request, *names(wanted)}
        last = max((x.at for x in logs.records), default=now)
        begin = moment("--since", self._since, last) if self._since is not None else -math.inf
        if begin > last:
            raise ConfigError(f"no event is later than --since {self._since}; the last is of {clock(last)} UTC")

        def counts(rank: str, until: float) -> bool:
            """Whether something was late within the time that is asked about; what has no time was."""
            process = service.process_named(rank)
            return not (axis.at(process, until) if process is not None else until) < begin

        if wanted is not None and answers:
            _, service = joined(every=False)
            wanted = [x for (x,) in named([[x] for x in service.requests], self._request or "")]
        late = [x for x in find_leaks(service, axis.when, wanted) if counts(x.holders[0] if x.holders else "", x.until)]
        copies = [x for x in leaks_copies.late_copies(service, called) if counts(x.rank, x.since + x.seconds)]
        failed = leaks_copies.failures(service, called or ())
        return Seen(logs, axis, ground(axis), late, copies, answers, begin, failed)

    def _asked(self) -> list[Answer]:
        """Ask the engines, and those that they read from."""
        if not self._addresses:
            return []
        from asynckv.tools.diagnose.ask import Asker, targets

        async def ask() -> list[Answer]:
            async with Asker(self._keys, self._timeout_s) as asker:
                most = MAX_TOP if self._request is not None else 256
                answers = await asker.ask_all(targets(self._addresses), most=most)
                known = {x.address for x in answers} | {x.account.facts.address for x in answers}
                peers = {peer.address: peer for x in answers for peer in x.account.peers if peer.state != "gone"}
                more = [x for x in peers if x not in known and x.startswith("tcp://")]
                found = await asker.ask_all(more, most=most)
                # Nobody asked for these: that they do not answer here says nothing if their readers hear from them.
                return answers + [x for x in found if not x.error or peers[x.address].state != "ready"]

        return asyncio.run(ask())

    def stories(self, seen: Seen) -> list[Story]:
        """Tell the request that is meant, or all that may be."""
        from asynckv.tools.diagnose.timeline_model import families, named, stories

        assert self._request is not None
        return stories(seen.axis, named(list(families(seen.axis.service.requests)), self._request))


def _show(document: dict[str, Any], seen: Seen, console: Console, top: int | None) -> None:
    from asynckv.tools.diagnose import why_text

    why_text.show_findings(document, console)
    if seen.answers and (document["findings"] or top is not None):
        why_text.show_engines(seen.answers, 5 if top is None else top, console)


def _show_request(seen: Seen, found: Findings, story: Story | None, console: Console) -> None:
    from asynckv.tools.diagnose import why_text

    if story is not None:
        why_text.show_story(seen.axis, story, seen.grounds, console)
    why_text.show_late(found.late, console)
    why_text.show_copies(found.copies, seen.failed, console)


def _watch(looking: Looking, console: Console, top: int, *, is_json: bool) -> NoReturn:
    """Look again and again; Ctrl-C ends it."""
    import msgspec

    from asynckv.tools.diagnose.findings import find
    from asynckv.tools.diagnose.why_report import report
    from asynckv.tools.output import write

    while True:
        began = time.monotonic()
        seen = looking.look()
        document = report(find(seen), seen)
        if is_json:
            write("--json", "-", msgspec.json.encode(document).decode() + "\n")
        else:
            if console.is_terminal:
                console.clear()
            _show(document, seen, console, top)
            sys.stdout.flush()
        time.sleep(max(began + WATCH_S - time.monotonic(), 0.0))


def _page(seen: Seen, found: Findings, sources: Sequence[str], story: Story | None) -> str:
    """Make the page; a browser can show only so many requests: what went wrong, and what took longest."""
    from asynckv.tools.diagnose.timeline_model import stories
    from asynckv.tools.diagnose.why_page import make

    every = stories(seen.axis) if story is None else [story]
    kept = sorted(every, key=lambda x: (x.level == "info", -x.seconds))[:MOST_SHOWN]
    left_out = len(every) - len(kept)
    return make(seen.axis, sorted(kept, key=lambda x: x.number), seen.grounds, sources, found, left_out)
