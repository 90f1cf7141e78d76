"""Text for a terminal: strings from other processes or files, and numbers of bytes."""

from __future__ import annotations

from typing import TypeVar

from rich.markup import escape

from asynckv.arguments import without_control

T = TypeVar("T")


def printable(value: T) -> T:
    """Make every string in a value safe to print: without control characters, and with rich's markup escaped."""
    out: object = value
    if isinstance(value, str):
        out = escape(without_control(value))
    elif isinstance(value, dict):
        out = {printable(k): printable(v) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        out = type(value)(printable(x) for x in value)
    return out  # type: ignore[return-value]


def size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.1f} {unit}" if unit != "bytes" else f"{num_bytes:.0f} bytes"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
