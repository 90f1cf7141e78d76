"""`asynckv leaks`: which blocks came back late, and why."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from asynckv.tools.diagnose.ask import Answer

EPILOG = """
[bold]Examples[/bold]

  asynckv leaks prefill-*.log decode-*.log

  asynckv leaks /var/log/asynckv/ --limit 3

  zcat old.log.gz | asynckv leaks - --request chat-4711

  asynckv leaks logs/ --json - | jq '.leaks[] | [.cause, .request_id, .sentence]'

  asynckv leaks tcp://10.0.0.1:5555 tcp://10.0.0.2:5555

  asynckv leaks /run/asynckv

  asynckv leaks /var/log/asynckv/ --since 10m

[bold]Exit status[/bold]  0 nothing was late, 1 something was, 2 bad input, no such request, or no answer
"""


MAX_FAILED = 20
"""Stores and loads of one id that are told."""


def leaks(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="LOGS|ADDRESS...",
            help="JSON logs of any processes (files, directories, - for stdin, .gz), or running engines (addresses, "
            "sockets).",
            show_default=False,
        ),
    ],
    request: Annotated[
        str | None,
        typer.Option(
            help="Only this request: an id of either side, ENGINE:ID, a pull id, a sequence, or how one begins.",
            metavar="ID",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Requests shown of each cause: 1, with --request 3.", metavar="N", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only what was late then or later: a time (2026-01-31T12:00 or 12:00, UTC), or so long before the "
            "last event (90s, 10m, 2h). Shows whether a repair has helped.",
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        str | None, typer.Option(help="Write the report as JSON; - for stdout.", metavar="FILE", show_default=False)
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Who asks, for engines with keys: NAME.key_secret.", metavar="FILE", show_default=False),
    ] = None,
    authorized: Annotated[
        Path | None,
        typer.Option(help="Directory with the *.key files of the engines.", metavar="DIR", show_default=False),
    ] = None,
) -> None:
    """Say which blocks came back late, or have not come back, and why: from logs, or from running engines.

    Logs of any number of processes, in any order, rotated or cut short; with both sides' logs it says most. What is
    late, and every cause, is in docs/leaks.md.
    """
    from rich.console import Console

    from asynckv.tools.diagnose import leaks_copies, leaks_live, leaks_page, leaks_request, timeline_model
    from asynckv.tools.diagnose.axis import make_axis
    from asynckv.tools.diagnose.join import join
    from asynckv.tools.diagnose.leaks import find_leaks
    from asynckv.tools.diagnose.leaks_values import moment as clock
    from asynckv.tools.diagnose.presence import early_ends
    from asynckv.tools.diagnose.reading import moment, read_with_progress
    from asynckv.tools.diagnose.records import Logs
    from asynckv.tools.output import check_writable, write_json

    if limit is not None and limit < 0:
        raise ConfigError(f"--limit {limit} is less than 0; 0 shows none")
    if (keys is None) is not (authorized is None):
        raise ConfigError("--keys and --authorized belong together: who asks, and whom it trusts")
    check_writable("--json", json)
    addresses = [x for x in sources if leaks_live.is_address(x)]
    paths = [x for x in sources if leaks_live.has_logs(x)]
    errors = Console(stderr=True)
    logs = read_with_progress(paths, errors) if paths else Logs()
    answers: list[Answer] = []
    unanswered: list[str] = []
    ended: list[str] = []
    if addresses:
        answers, unanswered, ended = _asked(addresses, keys, authorized)
        logs = replace(logs, records=[*logs.records, *leaks_live.records_of(answers, time.time())])
    if logs.nothing:
        raise ConfigError("; ".join([*unanswered, *ended]) or logs.nothing)
    service = join(logs)
    service.unanswered = leaks_live.who_hangs(answers, service)
    when = make_axis(service).when
    wanted, names = None, None
    if request is not None:
        wanted = leaks_request.find_requests(service, request, leaks_copies.called(service))
        names = {request, *timeline_model.names(wanted)}
    last = max(x.at for x in logs.records)
    begin = moment("--since", since, last) if since is not None else -math.inf
    if begin > last:
        raise ConfigError(f"no event is later than --since {since}; the last is of {clock(last)} UTC")

    def counts(rank: str, until: float) -> bool:
        """Whether something was late within the time that is asked about; what has no time was."""
        process = service.process_named(rank)
        return not (sum(when(process.incarnation, until)) / 2 if process is not None else until) < begin

    found = [x for x in find_leaks(service, when, wanted) if counts(x.holders[0] if x.holders else "", x.until)]
    early = early_ends(service, when)
    failed = leaks_copies.failures(service, names or ())[:MAX_FAILED]
    copies = [x for x in leaks_copies.late_copies(service, names) if counts(x.rank, x.since + x.seconds)]
    report = leaks_page.report(found, service, logs, unanswered, failed, early, copies, begin)
    write_json(json, report)
    if limit is None:
        limit = 3 if request is not None else 1
    leaks_page.show(report, Console(stderr=json == "-"), details=limit, request=request or "")
    if found or copies or unanswered:
        raise typer.Exit(1 if found or copies else 2)


def _asked(
    addresses: list[str], keys: Path | None, authorized: Path | None
) -> tuple[list[Answer], list[str], list[str]]:
    """Ask running engines, and say who did not answer, and whose processes have ended."""
    from asynckv.config import KeysConfig
    from asynckv.tools.diagnose.ask import ask_all, targets

    pair = KeysConfig(secret=keys, authorized=authorized) if keys is not None and authorized is not None else None
    answers = asyncio.run(ask_all(targets(addresses), pair))
    vain = [(x, f"{x.address}: {x.error}") for x in answers if not x.account.incarnation]
    # A socket that was found in a directory, of a process that has ended, holds nothing: nobody asked for that one.
    ended = [why for x, why in vain if x.is_left_behind and x.address not in addresses]
    silent = [why for _, why in vain if why not in ended]
    return answers, silent, ended
