"""A finding about late blocks, and the words for its names and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from asynckv.tools.diagnose.causes import CAUSE, SAID, OwnerView, ReaderView


@dataclass(frozen=True, slots=True)
class Leak:
    """Blocks of one request that came back late, on one side.

    Attributes:
        state: What became of them: `expired`, `closed`, `died`, `held`, `announced`, `unknown` (no log says so);
            `returned`, `retired` or `quarantined` on the decode side.
    """

    cause: CAUSE  # out of the catalogue
    sentence: str  # the cause, with names and numbers
    cell: tuple[OwnerView, ReaderView]  # its cell in the table of verdicts
    side: str  # side of the blocks: `prefill` or `decode`
    state: str
    engine_id: str  # the prefill engine
    request_id: str  # the prefill side's id
    sequence: int
    decode_request_ids: tuple[str, ...] = ()  # what the decode side calls it, as far as that is known
    holders: tuple[str, ...] = ()  # ranks with the blocks
    blocks: int = -1  # number on all of these; -1 if no log says so
    seconds: float = math.nan  # seconds for which they were held, as far as is known
    since: float = math.nan  # start, in seconds since 1970 by the holder's clock; nan if unknown
    until: float = math.nan  # its end, or the last line about it, by the holder's clock
    owed: tuple[str, ...] = ()  # readers that were waited for; `*` is a decode engine that never spoke up
    reader: str = ""  # the one that the sentence speaks of, as far as one is known
    about: tuple[str, ...] = ()  # the ranks that the sentence speaks of
    reason: str = ""  # of the failed pull, if that explains it
    remedy: str = ""  # what to do about it
    other_request_id: str = ""  # the other id in the logs, if it was not its own
    also: tuple[str, ...] = ()  # other stories that are true of other readers
    missing: tuple[str, ...] = ()  # processes with logs that would say more

    @property
    def evidence(self) -> str:
        """General evidence for it in the logs of both sides."""
        return "; ".join(filter(None, (SAID[view] for view in self.cell)))


def in_seconds(seconds: float) -> str:
    """Write seconds with a readable unit."""
    return "?" if math.isnan(seconds) else f"{seconds:.3g}" if abs(seconds) < 100 else f"{seconds:.0f}"


def some(names: Iterable[str], most: int = 8) -> str:
    """Write the first of some names, and the number of the others."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


def listed(names: Iterable[str]) -> str:
    """Write the first four of some names, each once."""
    return some(dict.fromkeys(names), 4)


def other_id(request_id: str) -> dict[str, Any]:
    """Describe another request id, and return it, if it is known."""
    return {"other": repr(request_id), "other_id": request_id} if request_id else {}
