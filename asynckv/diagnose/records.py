"""What logs say: one record per event of asynckv's, from JSON lines of any number of processes, in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Record"]


@dataclass(frozen=True, slots=True)
class Record:
    """One event of one process.

    Attributes:
        at: When it was logged, in seconds since 1970 by that process's own clock.
        event: Its name, of `asynckv.observe.events.EVENT`, or one that is not known here.
        level: `debug`, `info`, `warning`, `error`.
        engine_id: Which engine said it.
        rank: Which rank and which start of its process, as in all logs: `prefill/pp1/tp3@0a1b2c3d`.
        incarnation: Which start of the process, in full.
        fields: Everything else that the line says.
        where: File and line, for people.
    """

    at: float
    event: str
    level: str
    engine_id: str
    rank: str
    incarnation: str
    fields: Mapping[str, Any]
    where: str = ""
