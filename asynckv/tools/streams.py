"""Handle a stdout or stderr that is closed, full or cut off, or that cannot show every character.

Every command calls `prepare` first. From then on, a failed write to stdout raises `Unwritten`.
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
    """Raised if stdout takes no more. It has no `errno`, because click and rich would then end the process."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output cannot be written: {error.strerror}")
        self.cause = error

    def told(self) -> tuple[str, int]:
        """Return a line with the reason, and an exit status; afterwards stdout is discarded, also at exit."""
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The reader of a pipe such as `| head` has ended, which is no error.
        return ("", 141) if self.cause.errno == errno.EPIPE else (str(self), 2)


class _Stdout(io.FileIO):
    """stdout, with errors that differ from those of other files."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            raise Unwritten(exc) from None


def prepare() -> None:
    """Change stdout and stderr so that a write works or, on stdout, raises `Unwritten`."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file or socket gets this number, and libraries print into it.
            with contextlib.suppress(OSError):
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(out := sys.stdout, io.TextIOWrapper):
        held = out.buffer
        if type(getattr(held, "raw", held)) is io.FileIO:  # not a replacement by the caller
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
