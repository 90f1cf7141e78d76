"""How far a command is, on stderr: a bar on a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 15.0  # between two lines where stderr is no terminal


class Bar:
    """A bar on a terminal, lines elsewhere. `says_interrupted` tells of Ctrl-C, where nobody else does."""

    def __init__(
        self, console: Console | None = None, every_s: float = EVERY_S, *, says_interrupted: bool = True
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console or Console(stderr=True)
        self._is_drawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._is_drawn,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self.says_interrupted = says_interrupted
        self._every_s, self._said_at = every_s, time.monotonic()
        self._what, self._note = "", ""
        self._done, self._begun_at = 0, time.monotonic()
        self._total: int | None = None
        self._has_rate = True

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt) and self.says_interrupted:
            where = f" at {self._what} {self.figures()}".rstrip()
            print(f"asynckv: interrupted{where}; there is no result", file=sys.stderr)
            error.add_note("it has been said")  # the command line says it of every other command

    def begin(self, what: str, total: int | None = None, *, has_rate: bool = True) -> None:
        """Say what is done from now on, how much of it there is, if anybody knows, and whether it goes at a rate."""
        self._what, self._note, self._begun_at = what, "", time.monotonic()
        self._done, self._total, self._has_rate = 0, total, has_rate
        self._show()

    def at(self, done: int, total: int | None = None) -> None:
        self._done, self._total = done, self._total if total is None else total
        self._show()

    def advance(self, more: int = 1) -> None:
        self.at(self._done + more)

    def note(self, text: str) -> None:
        self._note = text
        self._show()

    def _show(self) -> None:
        if self._is_drawn:
            what = f"{self._what}: {self._note}" if self._note else self._what
            self._bar.update(
                self._task, description=what, completed=self._done, total=self._total, figures=self.figures()
            )
        elif (now := time.monotonic()) - self._said_at >= self._every_s:
            self._said_at = now
            print(f"{self._what}: {self.figures()}".removesuffix(": "), file=sys.stderr, flush=True)

    def figures(self) -> str:
        """Say how much is done, how fast, and how long the rest takes."""
        if self._total is None:
            return ""
        said = f"{self._done:,}/{self._total:,}"
        seconds = time.monotonic() - self._begun_at
        if self._has_rate and self._done and seconds > 0:
            rate = self._done / seconds
            said += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.1f}/s"
            if self._done < self._total:
                said += f", {timedelta(seconds=round((self._total - self._done) / rate))} left"
        return said
