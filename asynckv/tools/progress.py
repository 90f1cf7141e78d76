"""Progress of a command on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 15.0  # between two lines if stderr is not a terminal


class Bar:
    def __init__(self, console: Console, every_s: float = EVERY_S) -> None:
        from rich import progress

        self._is_drawn = console.is_terminal and not console.is_dumb_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=16),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not self._is_drawn,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._every_s, self._said_at = every_s, time.monotonic()
        self._what = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int | None = None) -> None:
        """Begin a new step with its description and, if known, its total."""
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total)
        self._what = what
        self.at(0)

    def at(self, done: float) -> None:
        self._bar.update(self._task, completed=done)
        if not self._is_drawn and (now := time.monotonic()) - self._said_at >= self._every_s:
            self._said_at = now
            total = self._bar.tasks[0].total
            count = "" if total is None else f": {done:,}/{total:,}"
            self._bar.console.print(f"{self._what}{count}", markup=False, highlight=False, soft_wrap=True)

    def advance(self, more: int = 1) -> None:
        self.at(self._bar.tasks[0].completed + more)

    def note(self, text: str) -> None:
        self._bar.update(self._task, description=f"{self._what}: {text}" if text else self._what)
