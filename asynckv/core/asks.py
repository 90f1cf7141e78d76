"""The packed copies that a reader wants of one owner.

A reader without an answer for `PATIENCE_S` reads the blocks themselves, and asks that owner for nothing for `PAUSE_S`.
An owner whose event loop runs in long steps answers late, so both ways are measured, and the faster one is taken.
"""

from __future__ import annotations

import math

from asynckv.core.pace import Pace
from asynckv.core.types import TransferId
from asynckv.geometry.plan import ReadRequest

MAX_ASKED = 4  # copies that one owner is asked for at a time, so that its slots go round
SLOWER = 1.5  # a copy may take this much longer than reading the blocks, which keeps cores busy for all
PATIENCE_S = 0.5
PAUSE_S = 5.0


class Asks:
    """Reads that wait for a copy: those that the owner was asked for, and those that follow."""

    __slots__ = ("_asked", "_may_ask_at", "_waiting", "pace")

    def __init__(self) -> None:
        self._waiting: dict[TransferId, ReadRequest] = {}
        self._asked: dict[TransferId, tuple[ReadRequest, float]] = {}  # the read, and until when an answer may come
        self._may_ask_at = -math.inf
        self.pace = Pace(SLOWER)

    def may_ask(self, now: float) -> bool:
        """Return True if a copy is wanted: of the blocks that are read once a second if copies are the faster way."""
        if self.pace.probed_at == -math.inf:
            self.pace.probed_at = now
        return now >= self._may_ask_at and self.pace.choose(now)

    def add(self, transfer_id: TransferId, read: ReadRequest) -> None:
        self._waiting[transfer_id] = read

    def next(self, now: float) -> tuple[TransferId, ReadRequest] | None:
        """Return the next wish to send, if there is one and few are under way."""
        if not self._waiting or len(self._asked) >= MAX_ASKED:
            return None
        transfer_id = next(iter(self._waiting))
        read = self._waiting.pop(transfer_id)
        self._asked[transfer_id] = read, now + PATIENCE_S
        return transfer_id, read

    def take(self, transfer_id: TransferId) -> ReadRequest | None:
        """Return the read of a wish that ends here; None if it has ended before."""
        if transfer_id in self._asked:
            return self._asked.pop(transfer_id)[0]
        return self._waiting.pop(transfer_id, None)

    @property
    def until(self) -> float:
        return next(iter(self._asked.values()))[1] if self._asked else math.inf

    def give_up(self, now: float) -> list[tuple[TransferId, ReadRequest]]:
        """Return all reads if an answer is overdue."""
        if now < self.until:
            return []
        self._may_ask_at = now + PAUSE_S
        reads = [*[(each, read) for each, (read, _) in self._asked.items()], *self._waiting.items()]
        self._asked.clear()
        self._waiting.clear()
        return reads
