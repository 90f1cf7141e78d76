"""What UCX really used: read from the tables that it writes when its endpoints end."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_TITLE = re.compile(r"\| remote memory read ")
_ROW = re.compile(r"\|\s*(\d+) \| [^|]+ \| ([^|]+?) +\| ([^|]+?) +\|\s*$")


def environment(folder: Path) -> dict[str, str]:
    """Have UCX write its tables there."""
    return {"UCX_PROTO_INFO": "used", "UCX_LOG_FILE": str(folder / "ucx.%p.log")}


def read(folder: Path) -> dict[str, int]:
    """Count the uses of each way of reading remote memory, and pass UCX's own complaints on to stderr."""
    ctypes.CDLL(None).fflush(None)  # this process may be one that writes them
    uses: dict[str, int] = {}
    for path in sorted(folder.glob("ucx.*.log")):
        is_read = False
        for line in path.read_text(errors="replace").splitlines():
            if row := _ROW.search(line):
                if is_read:
                    name = f"{row[3]} ({row[2]})"
                    uses[name] = uses.get(name, 0) + int(row[1])
            elif "|" not in line and "+-" not in line:
                print(line, file=sys.stderr)
            elif "| remote memory" in line or " cfg#" in line:
                is_read = bool(_TITLE.search(line))
    return uses


def named(uses: Mapping[str, int]) -> str:
    """Name the ways, most used first."""
    return ", ".join(sorted(uses, key=lambda name: -uses[name])) or "unknown (no endpoint ended in order)"
