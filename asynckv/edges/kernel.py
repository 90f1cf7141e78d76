"""The kernel's view of this process: its identity, and the time for which it had no processor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asynckv.edges.pages import control_groups, text_of

FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the inode of the first PID namespace, on every host
_THROTTLED = re.compile(r"^throttled_(usec|time) (\d{1,19})$", re.MULTILINE)


def identity(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Return the facts that tell this process from every other; only those that the system tells.

    A pid alone is a number that other namespaces, other hosts and later processes have too.
    """
    found = {
        "boot_id": text_of(proc / "sys/kernel/random/boot_id").strip(),
        "pid_namespace": inode(proc / "self/ns/pid"),
        "pid_began": began(fields_of(proc / "self/stat")),
    }
    return {name: value for name, value in found.items() if value not in ("", 0, -1)}


def inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def fields_of(stat: Path) -> list[str]:
    """Return the fields of a `/proc/PID/stat` from the state on; the name before it may have any letters in it."""
    return text_of(stat).rpartition(")")[2].split()


def began(fields: list[str]) -> int:
    """Return the ticks from the boot to the start of a process; -1 if its fields do not say so."""
    return int(fields[19]) if len(fields) > 19 else -1


def processor_waits(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Callable[[], dict[str, float]]:
    """Return a function that reads, in some 20 microseconds, for how long the calling thread had no processor.

    `waited_s` counts the seconds in which it was ready to run and did not, and `throttled_s` those in which a CPU limit
    of a control group stopped its group. A counter that the system does not have is left out.
    """
    groups = (at / "cpu.stat" for x in ("", "cpu") for at in control_groups(x, proc, cgroups))
    limited = [x for x in groups if _THROTTLED.search(text_of(x))]

    def read() -> dict[str, float]:
        ran = text_of(proc / "thread-self/schedstat").split()
        out = {"waited_s": int(ran[1]) / 1e9} if len(ran) == 3 else {}
        stopped = (_THROTTLED.search(text_of(x)) for x in limited)
        if limited:
            seconds = (int(x[2]) / (1e6 if x[1] == "usec" else 1e9) for x in stopped if x)
            out["throttled_s"] = max(seconds, default=0.0)
        return out

    return read
