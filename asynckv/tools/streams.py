"""stdout and stderr as they really are: closed, full, hung up on, or unable to show every letter.

`prepare` comes first in every command. From then on, what stdout does not take raises `Unwritten`.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
from typing import Any


class Unwritten(OSError):
    """stdout takes no more. Without an `errno`, by which click and rich would end the process in ways of their own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output cannot be written: {error.strerror}")
        self.cause = error

    def told(self) -> tuple[str, int]:
        """Say in a line, with an exit status, why; nothing is written to stdout after this, nor at exit."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The reader has heard enough: `| head`.
        return ("", 141) if self.cause.errno == errno.EPIPE else (str(self), 2)


class _Stdout(io.FileIO):
    """stdout, whose errors are told from those of all other files."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            raise Unwritten(exc) from None


def prepare() -> None:
    """Make stdout and stderr such that writing to them either works or, on stdout, raises `Unwritten`."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file or socket gets this number, and what libraries print goes there.
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(out := sys.stdout, io.TextIOWrapper):
        held = out.buffer
        if type(getattr(held, "raw", held)) is io.FileIO:  # not whatever a caller has put there
            out.flush()
            raw = _Stdout(out.fileno(), "w", closefd=False)
            sys.stdout = io.TextIOWrapper(
                io.BufferedWriter(raw) if isinstance(held, io.BufferedWriter) else raw,
                out.encoding,
                out.errors,
                line_buffering=out.line_buffering,
                write_through=out.write_through,
            )
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding or "ascii").name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
