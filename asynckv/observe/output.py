"""Where a command's results and progress go."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from asynckv.errors import ConfigError

__all__ = ["check_writable", "columns", "write", "write_json"]


def write(option: str, target: str, text: str) -> None:
    """Write to a file, or to stdout where it is `-`.

    Raises:
        ConfigError: The file cannot be written.
    """
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{option} {target}: cannot be written: {exc.strerror}") from exc


def write_json(target: str | None, value: Any) -> None:
    """Write what `--json` asks for, if it does.

    Raises:
        ConfigError: The file cannot be written.
    """
    import msgspec

    if target is not None:
        write("--json", target, msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def check_writable(option: str, target: str | None) -> None:
    """Refuse what `write` could not write to, before anything starts; nothing is changed.

    Raises:
        ConfigError: The file cannot be written.
    """
    if target not in (None, "-"):
        path, is_new = Path(target), not os.path.lexists(target)
        try:
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as exc:
            raise ConfigError(f"{option} {target}: cannot be written: {exc.strerror}") from exc


def columns() -> tuple[Any, ...]:
    """Columns of a progress bar that counts."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
