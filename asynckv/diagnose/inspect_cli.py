"""`asynckv inspect`."""

from __future__ import annotations

from asynckv.errors import ConfigError

__all__ = ["EPILOG", "inspect"]

EPILOG = ""


def inspect() -> None:
    """Not there yet."""
    raise ConfigError("inspect is not there yet")
