"""What every command has in common that reads logs: a bar on a terminal, and how a person writes a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, time
from typing import TYPE_CHECKING

from asynckv.errors import ConfigError
from asynckv.tools.diagnose.records import Logs, read_logs

if TYPE_CHECKING:
    from rich.console import Console


def read_with_progress(paths: Sequence[str], errors: Console, *, request: str = "", since: str | None = None) -> Logs:
    """Read logs, and show on a terminal how far that is.

    What is logged of every transition at level debug is read only for a request: the ends of others say it again.

    Args:
        paths: As for `read_logs`.
        errors: Where the bar goes, if that is a terminal.
        request: As for `read_logs`.
        since: The time from which on something is asked about, as `moment` reads it.

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
            keep=lambda event: bool(request) or not event.endswith("_transition"),
            request=request,
            since=(lambda last: moment("--since", since, last)) if since is not None else None,
        )


def moment(option: str, text: str, last: float) -> float:
    """Return the time that a person means, in seconds since 1970.

    Args:
        option: Where it was written.
        text: A time (UTC unless it says otherwise), one of the last day (`02:15`), or how long before the last event:
            `90s`, `10m`, `2h`.
        last: When that was.

    Raises:
        ConfigError: It is neither.
    """
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text.strip()):
        return last - float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[found[2]]
    with suppress(ValueError, OverflowError, OSError):  # a time of day
        day = datetime.fromtimestamp(last, UTC)
        at = datetime.combine(day, time.fromisoformat(text.strip() if ":" in text else ""), UTC).timestamp()
        return at if at <= last else at - 86400
    try:
        when = datetime.fromisoformat(text.strip())
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option} {text[:80]!r} is no time; write 2026-01-31T12:00 (UTC), 12:00 (of the last day), or 10m: so "
            "long before the last event"
        ) from None
