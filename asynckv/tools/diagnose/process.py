"""What the kernel says of a process that does not answer: it is stopped, waits for a device, is busy, or is blocked.

    before = look(pid)
    ...  # it is asked, and does not answer
    verdict(before, look(pid))  # "pid 27848 is stopped (T): kill -CONT 27848"

`look` reads `/proc/PID/stat` of this host; `verdict` is pure.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.5
"""Cores. A loop that waits for messages takes far less; one that is away because it computes takes one or more."""

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Seen:
    """A process at one moment.

    Attributes:
        pid: As this host numbers it.
        state: One letter, as in `ps`; empty if it cannot be read.
        began: Ticks from the boot to its start: another process with the same pid has another.
        cpu_s: The processor time of all its threads until now.
        at: When that was.
    """

    pid: int
    state: str = ""
    began: int = 0
    cpu_s: float = 0.0
    at: float = 0.0


def look(pid: int, proc: Path = Path("/proc")) -> Seen:
    """Look at a process."""
    with suppress(OSError, ValueError, IndexError):
        # The name is in parentheses, and may have any letters in it.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return Seen(pid, fields[0], int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS, time.monotonic())
    return Seen(pid)


def is_same(before: Seen, now: Seen) -> bool:
    """Whether it still is that process; it is taken for that where `/proc` cannot be read."""
    return not before.state or now.began == before.began


def verdict(before: Seen, now: Seen) -> str:
    """Say what is the matter with a process that has not answered, and what to do about it."""
    pid = before.pid
    if not is_same(before, now):
        return f"its process (pid {pid}) has ended meanwhile"
    match now.state:
        case "":
            return f"pid {pid} listens, and its event loop is away"
        case "T":
            return f"pid {pid} is stopped (T): kill -CONT {pid}"
        case "t":
            return f"pid {pid} is stopped by a debugger (t): let it run on there"
        case "D":
            return f"pid {pid} waits for a device or a file system (D): see dmesg, and /proc/{pid}/stack as root"
        case "Z" | "X":
            return f"pid {pid} has ended ({now.state}), or its main thread has"
        case _:
            pass
    cores = (now.cpu_s - before.cpu_s) / max(now.at - before.at, 0.01)
    share = f"{now.state}, {cores:.0%} of a core"
    what = (
        f"pid {pid} computes ({share}) and its event loop is away"
        if cores >= BUSY
        else f"pid {pid} waits ({share}): its event loop is blocked, or the engine is closing"
    )
    return f"{what}; py-spy dump --pid {pid} shows where"
