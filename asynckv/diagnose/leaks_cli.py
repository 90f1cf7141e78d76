"""`asynckv leaks`: which blocks came back late, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from asynckv.errors import ConfigError

__all__ = ["EPILOG", "leaks"]

EPILOG = """
[bold]Examples[/bold]

  asynckv leaks prefill-*.log decode-*.log

  asynckv leaks /var/log/asynckv/ --details

  zcat old.log.gz | asynckv leaks - --request chat-4711

  asynckv leaks logs/ --json - | jq '.leaks[] | [.cause, .request_id, .sentence]'

  asynckv leaks tcp://10.0.0.1:5555 tcp://10.0.0.2:5555

[bold]Exit status[/bold]  0 nothing was late, 1 something was, 2 bad input
"""


def leaks(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="LOGS|ADDRESS...",
            help="JSON logs of any processes (files, directories, - for stdin, .gz), or addresses of running engines.",
            show_default=False,
        ),
    ],
    details: Annotated[
        bool, typer.Option("--details", help="Show requests one by one, --limit of each cause.")
    ] = False,
    request: Annotated[
        str | None, typer.Option(help="Only this request, by either side's id.", metavar="ID", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(help="Requests shown of each cause.", metavar="N")] = 3,
    json: Annotated[
        str | None, typer.Option(help="Write the report as JSON; - for stdout.", metavar="FILE", show_default=False)
    ] = None,
) -> None:
    """Say which blocks came back late, or have not come back, and why: from logs, or from running engines.

    Logs of any number of processes, in any order, rotated or cut short; with both sides' logs it says most. What is
    late, and every cause, is in docs/leaks.md.
    """
    import rich.progress
    from rich.console import Console

    from asynckv.diagnose import leaks_page
    from asynckv.diagnose.join import join
    from asynckv.diagnose.leaks import find_leaks
    from asynckv.diagnose.records import read_logs
    from asynckv.observe.output import check_writable, write_json

    if limit < 0:
        raise ConfigError(f"--limit {limit} is less than 0; 0 shows none")
    check_writable("--json", json)
    errors = Console(stderr=True)
    columns = ("{task.description}", rich.progress.BarColumn(), rich.progress.DownloadColumn())
    with rich.progress.Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("reading")
        # Every transition at debug level says again what the ends of requests say.
        logs = read_logs(
            sources,
            lambda done, total: bar.update(task, completed=done, total=total or None),
            keep=lambda event: not event.endswith("_transition"),
        )
    if logs.nothing:
        raise ConfigError(logs.nothing)
    service = join(logs)
    found = find_leaks(service)
    if request is not None:
        found = [x for x in found if request in (x.request_id, *x.decode_request_ids)]
    report = leaks_page.report(found, service, logs)
    write_json(json, report)
    one_by_one = limit if details or request is not None else min(limit, 1)
    leaks_page.show(report, Console(stderr=json == "-"), details=one_by_one, request=request or "")
    if found:
        raise typer.Exit(1)
