"""`asynckv offload`: look at a directory of stored blocks, check it, and make room in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from asynckv.tools.offload_folder import Checked, Folder

__all__ = ["offload_app"]

offload_app = typer.Typer(rich_markup_mode="rich", add_completion=False, no_args_is_help=True)

INSPECT_EPILOG = """
[bold]Examples[/bold]

  asynckv offload inspect /var/cache/asynckv/rank-0

  asynckv offload inspect /var/cache/asynckv/rank-0 --json - | jq .kinds

[bold]Exit status[/bold]  0 shown, 2 no such directory, or not one of stored blocks
"""

VERIFY_EPILOG = """
[bold]Examples[/bold]

  asynckv offload verify /var/cache/asynckv/rank-0

  asynckv offload verify /var/cache/asynckv/rank-0 --drop

[bold]Exit status[/bold]  0 every block is sound, 1 some are not, 2 no such directory, or a process has it, 130 Ctrl-C
"""

PRUNE_EPILOG = """
[bold]Examples[/bold]

  asynckv offload prune /var/cache/asynckv/rank-0 --older-than 7d

  asynckv offload prune /var/cache/asynckv/rank-0 --layout 3f2a

  asynckv offload prune /var/cache/asynckv/rank-0 --all

[bold]Exit status[/bold]  0 done, 2 bad input, no such directory, or a process has it
"""

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a file tier.", show_default=False)]
Json = Annotated[
    str | None, typer.Option(help="Write the report as JSON; - for stdout.", metavar="FILE", show_default=False)
]


@offload_app.callback()
def offload() -> None:
    """Blocks that are stored in files: look at them, check them, and make room."""


@offload_app.command(epilog=INSPECT_EPILOG)
def inspect(dir: Dir, json: Json = None) -> None:
    """Say what a directory holds, for whom, and who has it. Changes nothing; a process may have it meanwhile."""
    from asynckv.observe.output import check_writable, write_json
    from asynckv.tools.offload_folder import look

    check_writable("--json", json)
    found = look(dir)
    write_json(json, found)
    _show(found, to_stderr=json == "-")


@offload_app.command(epilog=VERIFY_EPILOG)
def verify(
    dir: Dir,
    drop: Annotated[bool, typer.Option("--drop", help="Forget the blocks that are not sound.")] = False,
    json: Json = None,
) -> None:
    """Read every block and compare it with its checksum. No process may have the directory.

    A block that is not sound is never served either way; it is dropped when somebody asks for it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from asynckv.observe.output import check_writable, columns, write_json
    from asynckv.tools.offload_folder import check

    check_writable("--json", json)
    errors = Console(stderr=True)
    with Progress(*columns(), console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("blocks", total=None)
        found = check(dir, drop=drop, progress=lambda done, total: bar.update(task, completed=done, total=total))
    write_json(json, found)
    _show_checked(found, to_stderr=json == "-")
    if found.bad:
        raise typer.Exit(1)


@offload_app.command(epilog=PRUNE_EPILOG)
def prune(
    dir: Dir,
    older_than: Annotated[
        str | None,
        typer.Option(help="Blocks that were stored longer ago: 90s, 30m, 12h, 7d.", metavar="AGE", show_default=False),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Blocks in this layout: how its fingerprint begins.", metavar="HEX", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks; the files go as well.")] = False,
    json: Json = None,
) -> None:
    """Forget blocks, and give the files that hold none any more back to the disk. No process may have the directory.

    Engines of another geometry that only read it do not mind; the space is free when they have ended. The next start of
    the owner takes again what it is configured for.
    """
    from rich.console import Console

    from asynckv.observe.output import check_writable, write_json
    from asynckv.tools.offload_folder import prune_folder

    if sum((older_than is not None, layout is not None, everything)) != 1:
        raise ConfigError("give one of --older-than, --layout and --all")
    check_writable("--json", json)
    age = _seconds(older_than) if older_than is not None else None
    found = prune_folder(dir, older_than_s=age, layout=layout)
    write_json(json, found)
    Console(stderr=json == "-").print(
        f"{found.blocks:,} of {found.blocks_before:,} blocks forgotten, {_size(found.bytes_freed)} of files removed",
        highlight=False,
    )


def _seconds(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:], 0)
    try:
        number = float(text[:-1])
    except ValueError:
        number = -1.0
    if not unit or not 0 <= number < 1e9:
        raise ConfigError(f"--older-than {text!r} is no age; such as 90s, 30m, 12h or 7d")
    return number * unit


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def _show(found: Folder, *, to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from asynckv.observe.console import printable

    console = Console(stderr=to_stderr)
    stored = f"{found.blocks:,}, {_size(found.bytes_stored)}"
    if found.blocks:
        stored += f", stored {found.oldest} to {found.newest}"
    who = f"process {found.owner.pid} on {found.owner.host}, {found.owner.since}" if found.owner else "nobody"
    for name, value in (
        ("directory", found.folder),
        ("owner", f"{who}{'' if found.is_live or not found.owner else ' (has ended)'}"),
        ("range", f"{_size(found.num_bytes)} in {found.segments} files, {_size(found.bytes_on_disk)} on the disk"),
        ("blocks", stored),
        ("unreadable", f"{found.malformed:,} rows of the index make no sense" if found.malformed else ""),
    ):
        if value:
            console.print(f"{name:<11}{printable(value)}", highlight=False, soft_wrap=True)
    if found.kinds:
        table = Table("group", "layout", "blocks", "bytes", box=None, pad_edge=False)
        for kind in found.kinds:
            table.add_row(printable(kind.tag[:32]), printable(kind.layout[:16]), f"{kind.blocks:,}", _size(kind.bytes))
        console.print()
        console.print(table)


def _show_checked(found: Checked, *, to_stderr: bool) -> None:
    from rich.console import Console

    from asynckv.observe.console import printable

    console = Console(stderr=to_stderr)
    rate = _size(int(found.bytes_read / max(found.seconds, 1e-9)))
    console.print(
        f"{found.sound:,} of {found.blocks:,} blocks are sound ({_size(found.bytes_read)} read, {rate}/s)",
        highlight=False,
    )
    for cause, count in found.bad.items():
        console.print(f"{count:,} are not: {printable(cause)}", highlight=False, soft_wrap=True)
    if found.bad:
        console.print(
            "they were forgotten" if found.dropped else "they are never served; --drop forgets them now",
            highlight=False,
        )
