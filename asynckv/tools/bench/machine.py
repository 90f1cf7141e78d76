"""Influences on a figure besides its parameters: the machine, the versions, and the code itself."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

from asynckv.edges.pages import text_of
from asynckv.version import VERSION


def environment() -> dict[str, str]:
    """Describe this machine and the installed versions, so that sweeps of different ones are not mixed."""
    return {
        "host": platform.node(),
        "cpu": field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cpu_count": str(os.cpu_count()),
        "memory": field(Path("/proc/meminfo"), "MemTotal"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "asynckv": VERSION,
        **{name: version(name) for name in ("nixl", "numpy", "pyzmq")},
        "asynckv_source": _source(),
    }


def field(path: Path, name: str) -> str:
    """Return the value of the first `name: value` line of this name; empty if there is none."""
    lines = text_of(path).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _source() -> str:
    """Return a digest of the package's code, because a checkout changes without a new version."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
