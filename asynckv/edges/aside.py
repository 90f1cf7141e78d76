"""Work on a thread that nobody has to wait for.

A call into a disk that hangs never returns, and cannot be ended. The threads of asyncio's own executor are waited for
when a loop and when a process ends, each of which would hang as well; this one's are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

__all__ = ["Aside"]

P = ParamSpec("P")
T = TypeVar("T")


class Aside(Executor):
    """Runs each call on a thread of its own, which ends with the process at the latest.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin a call."""
        ended: Future[T] = Future()

        def run() -> None:
            try:
                ended.set_result(fn(*args, **kwargs))
            except BaseException as exc:  # whoever waits is told
                ended.set_exception(exc)

        ended.set_running_or_notify_cancel()
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return ended
