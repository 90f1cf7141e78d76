"""Text for a terminal: strings from other processes or files, and numbers of bytes."""

from __future__ import annotations

from typing import TypeVar

from rich.markup import escape

from asynckv.arguments import each_text, without_control

T = TypeVar("T")


def printable(value: T) -> T:
    """Make every string in a value safe to print: without control characters, and with rich's markup escaped."""
    return each_text(value, lambda text: escape(without_control(text)))


def size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.1f} {unit}" if unit != "bytes" else f"{num_bytes:.0f} bytes"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
