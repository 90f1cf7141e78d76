"""What a process can say about itself: CPU, memory, how late its loop is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["LoopLag", "available_memory", "peak_rss_bytes", "percentile"]

_PERIOD_S = 0.005


class LoopLag:
    """Samples how much later than asked a sleeping task wakes up.

    asyncio rounds timers up to a millisecond, so an idle loop shows up to that much.
    """

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._cpu_s = 0.0

    def start(self) -> None:
        """Begin a window."""
        self._samples = []
        self._cpu_s = time.process_time()
        self._task = asyncio.get_running_loop().create_task(self._sample())

    async def stop(self) -> tuple[float, list[float]]:
        """End the window: CPU seconds spent in it by all threads, and the samples."""
        cpu_s = time.process_time() - self._cpu_s
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        return cpu_s, self._samples

    async def _sample(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_PERIOD_S)
            self._samples.append(max(0.0, time.monotonic() - before - _PERIOD_S))


def peak_rss_bytes() -> int:
    """Return the most memory that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory() -> int:
    """Return the bytes that can still be taken without swapping, also under a container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((group / "memory.current").read_text(encoding="ascii")))
    return max(0, free)


def percentile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that at least `q` percent do not exceed; 0 if there are none."""
    if len(values) == 0:
        return 0.0
    return float(np.percentile(np.asarray(values), q, method="inverted_cdf"))
