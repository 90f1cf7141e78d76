"""`asynckv leaks`."""

from __future__ import annotations

from asynckv.errors import ConfigError

__all__ = ["EPILOG", "leaks"]

EPILOG = ""


def leaks() -> None:
    """Not there yet."""
    raise ConfigError("leaks is not there yet")
