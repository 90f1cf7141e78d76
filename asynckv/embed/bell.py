"""How one thread wakes another that sleeps in `epoll`: a descriptor that is rung and silenced.

Python's own calls let go of its lock (the GIL) around every system call, so a busy thread that rings in this way may
get it back only after the switch interval (5 ms). Ringing takes a microsecond and never blocks, so this keeps the lock.
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
        """Make it unreadable, whoever rang how often."""
        _read(self._fd, _unread)
