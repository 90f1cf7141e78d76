"""The kernel's view of a process: it has ended, is stopped, paused, waits for a device, is busy, or is blocked.

    before = look(pid)
    ...  # it is asked, and does not answer
    verdict(before, look(pid))  # "pid 27848 is stopped (T): kill -CONT 27848"

`look` reads `/proc/PID` and the cgroups of this host; `verdict` is pure.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asynckv.edges.kernel import began, fields_of
from asynckv.edges.pages import control_groups, text_of

BUSY = 0.5  # number of cores above which a loop computes; a loop that waits for messages takes far less than one
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Seen:
    pid: int  # as this host numbers it
    state: str = ""  # one letter, as in `ps`; empty if it cannot be read
    began: int = 0  # ticks from the boot to its start: another process with the same pid has another
    cpu_s: float = 0.0  # the processor time of all its threads until now
    at: float = 0.0  # when that was
    frozen: str = ""  # the cgroup that keeps it from running, as `docker pause` does; empty if none does


def look(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Seen:
    if (start := began(fields := fields_of(proc / str(pid) / "stat"))) < 0:
        return Seen(pid)
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
    return Seen(pid, fields[0], start, cpu_s, time.monotonic(), _frozen(pid, proc, cgroups))


def _frozen(pid: int, proc: Path, cgroups: Path) -> str:
    """Name the frozen cgroup that a process is in: of version 2, or of version 1's freezer."""
    for controller, file, sign in (("", "cgroup.events", "frozen 1"), ("freezer", "freezer.state", "FR")):
        for group in control_groups(controller, proc, cgroups, pid):
            if sign in text_of(group / file):  # FROZEN or FREEZING
                return f"/{group.relative_to(cgroups / controller)}"
    return ""


def shows_all(proc: Path = Path("/proc")) -> bool:
    """Return True if a process that is not in `/proc` is not in this namespace either.

    It may be mounted from another namespace, or hide the processes of other users (`hidepid`).
    """
    with suppress(OSError):
        return os.readlink(proc / "self") == str(os.getpid()) and began(fields_of(proc / "1/stat")) >= 0
    return False


def is_same(before: Seen, now: Seen) -> bool:
    """Return True if it still is that process, or if `/proc` cannot be read."""
    return not before.state or now.began == before.began


def verdict(before: Seen, now: Seen) -> str:
    """Describe the state of a process that has not answered, and the remedy."""
    pid = before.pid
    if not is_same(before, now):
        return f"its process (pid {pid}) has ended meanwhile"
    if now.frozen:
        return (
            f"pid {pid} is paused: its cgroup {now.frozen} is frozen; resume its container (`docker unpause`), for "
            f"kill -CONT does nothing"
        )
    known = {
        "": "listens, and its event loop is away",
        "T": f"is stopped (T): kill -CONT {pid}",
        "t": "is stopped by a debugger (t): let it run on there",
        "D": f"waits for a device or a file system (D): see dmesg, and /proc/{pid}/stack as root",
        **dict.fromkeys("ZX", f"has ended ({now.state}), or its main thread has"),
    }
    if now.state in known:
        return f"pid {pid} {known[now.state]}"
    cores = (now.cpu_s - before.cpu_s) / max(now.at - before.at, 0.01)
    share = f"{now.state}, {cores:.0%} of a core"
    what = (
        f"pid {pid} computes ({share}) and its event loop is away"
        if cores >= BUSY
        else f"pid {pid} waits ({share}): its event loop is blocked, or the engine is closing"
    )
    return f"{what}; py-spy dump --pid {pid} shows where"
