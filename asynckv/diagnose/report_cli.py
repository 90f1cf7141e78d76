"""`asynckv report`."""

from __future__ import annotations

from asynckv.errors import ConfigError

__all__ = ["EPILOG", "report"]

EPILOG = ""


def report() -> None:
    """Not there yet."""
    raise ConfigError("report is not there yet")
