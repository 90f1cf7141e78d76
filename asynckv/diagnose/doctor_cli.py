"""`asynckv doctor`."""

from __future__ import annotations

from asynckv.errors import ConfigError

__all__ = ["EPILOG", "doctor"]

EPILOG = ""


def doctor() -> None:
    """Not there yet."""
    raise ConfigError("doctor is not there yet")
