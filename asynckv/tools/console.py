"""Small things of all commands: text for a terminal, numbers of bytes, and values by their keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.markup import escape

from asynckv.arguments import each_text, without_control

K = TypeVar("K")
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


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Collect the values of each key, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
