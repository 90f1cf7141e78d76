"""Wake a thread that sleeps in `epoll`, by a file descriptor that another thread makes readable.

Python's own calls release the GIL around every system call, so a busy thread that used them might get the GIL back only
after the switch interval (5 ms). A bell keeps the GIL, because ringing takes a microsecond and never blocks.
"""

from __future__ import annotations

import ctypes
import os
import weakref

_libc = ctypes.PyDLL(None)
_write, _read = _libc.eventfd_write, _libc.eventfd_read
_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_unread = ctypes.c_uint64()


class Bell:
    """File descriptor that `ring` makes readable and `silence` makes unreadable. Any thread may call either."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False

    def fileno(self) -> int:
        """Return the descriptor, which stays open until `close`, or as long as this object lives."""
        return self._fd

    def close(self) -> None:
        """Close the descriptor. A later `ring` does nothing, so that it never writes to another file of that number."""
        self._fd = -1
        self._close()

    def ring(self) -> None:
        """Make the descriptor readable."""
        _write(self._fd, 1)

    def silence(self) -> None:
        """Make the descriptor unreadable, however often it was rung."""
        _read(self._fd, _unread)
