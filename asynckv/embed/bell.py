"""A descriptor that one thread rings to wake another that sleeps in `epoll`.

Python's own calls release its lock (the GIL) around every system call, so a busy thread that rings with them may get
the lock back only after the switch interval (5 ms). A bell keeps the lock, because ringing takes a microsecond and
never blocks.
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
    """A descriptor that is readable from `ring` on, until `silence`. Any thread may do either."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def fileno(self) -> int:
        """Return the descriptor; it lives as long as this object."""
        return self._fd

    def ring(self) -> None:
        """Make it readable."""
        _write(self._fd, 1)

    def silence(self) -> None:
        """Make the descriptor unreadable, however often it was rung."""
        _read(self._fd, _unread)
