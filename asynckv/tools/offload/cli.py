"""The command line of `asynckv offload`: inspect directories of stored blocks, or remove them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from asynckv.arguments import without_control
from asynckv.errors import BackendError, ConfigError
from asynckv.tools.console import printable, size
from asynckv.tools.output import HELP, consoles, print_table, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from asynckv.tools.offload.folder import Folder, Pruned

T = TypeVar("T")

offload_app = typer.Typer(rich_markup_mode="rich", add_completion=False, no_args_is_help=True)

Dir = Annotated[Path, typer.Argument(metavar="DIR", help=HELP["offload"]["dir"], show_default=False)]
Json = Annotated[str | None, typer.Option(help=HELP["offload"]["json"], metavar="FILE", show_default=False)]


@offload_app.callback()
def offload() -> None:
    """Inspect blocks that are stored in files, or remove them."""


@offload_app.command(epilog=HELP["epilogs"]["offload inspect"])
def inspect(dir: Dir, json: Json = None) -> None:
    """Show the blocks in a directory, their layouts and their owner. Changes nothing; the owner may be running."""
    from asynckv.tools.offload.folder import look

    _each(dir, json, look, _show)


@offload_app.command(epilog=HELP["epilogs"]["offload prune"])
def prune(
    dir: Dir,
    everything: Annotated[bool, typer.Option("--all", help=HELP["offload"]["everything"])] = False,
    json: Json = None,
) -> None:
    """Remove all stored blocks and the directory. Refused while a process owns the directory.

    Engines of another geometry may still read it; the disk space is free when they have ended.
    """
    from asynckv.tools.offload.folder import prune_folder

    if not everything:
        raise ConfigError("prune removes all blocks and the directory; give --all to confirm")
    _each(dir, json, prune_folder, _show_pruned)


def _each(
    dir: Path, json: str | None, use: Callable[[Path], T], show: Callable[[Sequence[T], bool, Console], None]
) -> None:
    """Call `use` on a directory or each one in it; show the results, and write them with errors for `--json`."""
    from asynckv.tools.offload.folder import folders_in

    shown, _ = consoles(json)
    folders = folders_in(dir)
    is_one = folders == [dir]
    found: list[T] = []
    report: list[object] = []
    errors: list[str] = []
    for folder in folders:
        try:
            found.append(use(folder))
            report.append(found[-1])
        except BackendError as exc:
            if is_one:
                raise
            errors.append(str(exc))
            report.append({"folder": str(folder), "error": str(exc)})
    write_json(json, report[0] if is_one else report)
    if found:
        show(found, is_one, shown)
    for error in errors:
        print(f"asynckv: {without_control(error)}", file=sys.stderr)
    if errors:
        raise typer.Exit(2)


def _show(found: Sequence[Folder], is_one: bool, console: Console) -> None:
    if not is_one:
        _show_all(found, console)
        return
    (each,) = found
    stored = f"{each.blocks:,}, {size(each.bytes_stored)}"
    if each.blocks:
        stored += f", stored {each.oldest} to {each.newest}"
    has_ended = "" if each.is_live else " (has ended)"
    for name, value in (
        ("directory", each.folder),
        ("owner", f"{each.owner}{has_ended}" if each.owner else "none"),
        ("range", f"{size(each.num_bytes)} in {each.segments} files, {size(each.bytes_on_disk)} on the disk"),
        ("blocks", stored),
        ("unreadable", f"{each.malformed:,} rows of the index make no sense" if each.malformed else ""),
    ):
        if value:
            console.print(f"{name:<11}{printable(value)}", soft_wrap=True)
    if each.kinds:
        rows = [
            (without_control(x.tag[:32]), without_control(x.layout[:16]), f"{x.blocks:,}", size(x.bytes))
            for x in each.kinds
        ]
        console.print()
        print_table(console, ("group", "layout", "blocks", "bytes"), rows, texts=(0, 1))


def _show_all(found: Sequence[Folder], console: Console) -> None:
    rows = []
    for each in found:
        counts = f"{each.blocks:,}", size(each.bytes_stored), size(each.bytes_on_disk)
        owner = f"pid {each.owner.pid}" if each.owner is not None and each.is_live else "none"
        rows.append((without_control(Path(each.folder).name), *counts, each.newest[:10], owner))
    heads = ("directory", "blocks", "bytes", "on the disk", "newest", "in use by")
    print_table(console, heads, rows, texts=(0, 4, 5))
    console.print(
        f"{len(found):,} directories, {sum(each.blocks for each in found):,} blocks, "
        f"{size(sum(each.bytes_on_disk for each in found))} on the disk"
    )


def _show_pruned(found: Sequence[Pruned], is_one: bool, console: Console) -> None:
    for each in found:
        what = f"{each.blocks:,} blocks forgotten, {size(each.bytes_freed)} of files removed"
        if each.removed:
            what += ", and the directory"
        if each.left:
            what += f"; the directory stays, because it holds {', '.join(each.left[:3])}{' ...' * (len(each.left) > 3)}"
        console.print(printable(what if is_one else f"{each.folder}: {what}"), soft_wrap=True)
