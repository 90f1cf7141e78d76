"""`asynckv timeline`."""

from __future__ import annotations

from asynckv.errors import ConfigError

__all__ = ["EPILOG", "timeline"]

EPILOG = ""


def timeline() -> None:
    """Not there yet."""
    raise ConfigError("timeline is not there yet")
