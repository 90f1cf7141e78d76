"""Logs are read with a bar on a terminal, by every command that reads logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asynckv.diagnose.records import Logs, read_logs

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["read_with_progress"]


def read_with_progress(paths: Sequence[str], errors: Console, *, transitions: bool = False) -> Logs:
    """Read logs, and show on a terminal how far that is.

    Args:
        paths: As for `read_logs`.
        errors: Where the bar goes, if that is a terminal.
        transitions: Keep what is logged of every transition at level debug; the ends of requests say it again.

    Raises:
        ConfigError: A file cannot be read.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        return read_logs(
            paths,
            lambda done, total: bar.update(task, completed=done, total=total or None),
            keep=lambda event: transitions or not event.endswith("_transition"),
        )
