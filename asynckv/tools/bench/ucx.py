"""The transports that UCX really used, from the tables that it writes when its endpoints end."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from pathlib import Path

from asynckv.tools.doctor.ucx_log import read_log


def environment(folder: Path) -> dict[str, str]:
    """Return variables that make UCX write its tables into this folder."""
    return {"UCX_PROTO_INFO": "used", "UCX_LOG_FILE": str(folder / "ucx.%p.log")}


def read(folder: Path) -> Counter[str]:
    """Count the uses of each way of reading remote memory; print UCX's own messages to stderr."""
    ctypes.CDLL(None).fflush(None)  # UCX may have buffered tables in this process
    lines = [x for path in sorted(folder.glob("ucx.*.log")) for x in path.read_text(errors="replace").splitlines()]
    for line in lines:
        if "|" not in line and "+-" not in line:
            print(line, file=sys.stderr)
    uses = Counter[str]()
    for use in read_log(lines).uses:
        uses[f"{use.transport} ({use.how})"] += use.count
    return uses


def named(uses: Counter[str]) -> str:
    """Return the names of the ways, most used first."""
    return ", ".join(name for name, _ in uses.most_common()) or "unknown (no endpoint ended in order)"
