"""What UCX really used: read from the tables that it writes when its endpoints end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["ENV", "read"]

ENV = {"UCX_PROTO_INFO": "used", "UCX_LOG_FILE": "ucx.%p.log"}

_TITLE = re.compile(r"\| remote memory read ")
_ROW = re.compile(r"\|\s*(\d+) \| [^|]+ \| ([^|]+?) +\| ([^|]+?) +\|\s*$")


def read(folder: Path) -> str:
    """Name how remote memory was read, most used first, and pass UCX's own complaints on to stderr."""
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
    return ", ".join(sorted(uses, key=lambda name: -uses[name])) or "unknown (no endpoint ended in order)"
