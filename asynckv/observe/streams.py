"""stdout and stderr as they really are: closed, full, hung up on, or unable to show every letter.

`prepare` comes first in every command; what writing then raises, `unwritten` turns into a line and an exit status.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys

__all__ = ["prepare", "unwritten"]

PLAIN = str.maketrans({"µ": "u", "×": "x", "–": "-", "—": "-", "…": "...", "●": "*", "○": "o", "━": "-", "→": "->"})
"""What stands for a letter where a terminal has only ASCII; all others are escaped."""
HANDLER = "asynckv-plain"


class _Closed(io.TextIOBase):
    """What stands for a stdout that was closed before we began: whoever writes to it is told."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "stdout is closed")


def prepare() -> None:
    """Make stdout and stderr such that writing to them either works or raises an `OSError`."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # Otherwise the next file or socket gets this number, and what libraries print goes there.
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error(HANDLER, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding or "ascii").name != "utf-8":
            stream.reconfigure(errors=HANDLER)


def unwritten(error: BaseException) -> tuple[str, int] | None:
    """Say in a line, with an exit status, why stdout takes no more; None if the error is another one.

    Nothing is written to stdout after this, nor at exit.
    """
    if not isinstance(error, OSError) or error.filename is not None:
        return None
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT):
        return None
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        # The reader has heard enough: `| head`.
        return "", 141
    why = "stdout is closed" if error.errno == errno.EBADF else error.strerror
    return f"the output cannot be written: {why}", 2


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end
