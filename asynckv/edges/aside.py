"""Work on daemon threads, which a process does not wait for at its end, and the end of threads that were not closed.

A call into a disk that hangs never returns. asyncio waits for its own executor when a loop or a process ends, so that
end would hang as well.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

EXIT_S = 2.0  # the end of the interpreter waits this long for threads that were not closed
P = ParamSpec("P")
T = TypeVar("T")


class Aside(Executor):
    """Run each call on a thread of its own, which ends with the process at the latest."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        ended: Future[T] = Future()

        def run() -> None:
            try:
                ended.set_result(fn(*args, **kwargs))
            except BaseException as exc:  # the waiting caller gets it
                ended.set_exception(exc)

        ended.set_running_or_notify_cancel()
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return ended


class Stoppable(Protocol):
    def stop(self) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...


_started: weakref.WeakSet[Stoppable] = weakref.WeakSet()

os.register_at_fork(after_in_child=_started.clear)  # a child has none of these threads, but maybe a lock they held


def end_at_exit(thread: Stoppable) -> None:
    """Register a thread to be ended at exit, because inside NIXL it would not survive the end of the interpreter."""
    _started.add(thread)


@atexit.register
def _end_all() -> None:
    left = list(_started)
    for thread in left:
        thread.stop()
    deadline = time.monotonic() + EXIT_S
    for thread in left:
        thread.wait(max(0.0, deadline - time.monotonic()))
