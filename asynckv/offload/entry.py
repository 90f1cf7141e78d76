"""One stored block in one tier: being written, ready, or leaving.

    WRITING --WRITTEN--> READY --DROPPED--> LEAVING --nobody needs it--> GONE
       \\---FAILED, DOUBTED, DROPPED--------/

A block that is kept in host memory and in a file has two of them. Two sets decide when its slot may be given to
another:

- **holders**: who wants it to stay, each by its name: jobs that will read it or wait for it, pins, leases. Sets, never
  counts: letting go twice changes nothing.
- **moves**: the transfers that may still read or write the slot, those in doubt among them. Memory follows the writer:
  a transfer that failed without proof stays in the set, and with it the slot, until there is evidence.

While it is WRITING or READY it can be found by its key. A LEAVING one cannot: what is stored under its key meanwhile
gets a slot of its own. It is GONE, and its slot free, once both sets are empty and on no other ground.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from msgspec import Struct

from asynckv.core.types import members
from asynckv.errors import LocalProtocolError


class EntryState(enum.StrEnum):
    """Where a stored block stands."""

    WRITING = "writing"
    READY = "ready"
    LEAVING = "leaving"
    GONE = "gone"


class EntryEvent(enum.StrEnum):
    """What happens to a stored block."""

    WRITTEN = "written"
    """All of it is in place."""
    FAILED = "failed"
    """It is not, and nothing writes it any more."""
    DOUBTED = "doubted"
    """It is not, and something may still write it."""
    DROPPED = "dropped"
    """It was evicted, is not wanted, or was found to be corrupt."""


S, E = members(EntryState), members(EntryEvent)


def nobody_needs_it(entry: Entry) -> bool:
    """Nobody holds it, and no transfer may touch it."""
    return not entry.holders and not entry.moves


ON_EVENT: Mapping[EntryState, Mapping[EntryEvent, EntryState]] = {
    S.WRITING: {E.WRITTEN: S.READY, E.FAILED: S.LEAVING, E.DOUBTED: S.LEAVING, E.DROPPED: S.LEAVING},
    S.READY: {E.DROPPED: S.LEAVING},
    S.LEAVING: {E.WRITTEN: S.LEAVING, E.FAILED: S.LEAVING, E.DOUBTED: S.LEAVING, E.DROPPED: S.LEAVING},
    S.GONE: {},
}

WHEN: Mapping[EntryState, Mapping[Callable[[Entry], bool], EntryState]] = {
    S.WRITING: {},
    S.READY: {},
    S.LEAVING: {nobody_needs_it: S.GONE},
    S.GONE: {},
}
"""Looked at when an event has led there, and whenever a holder or a transfer lets go."""

CONDITIONS = {state: tuple(row.items()) for state, row in WHEN.items()}

NOBODY: frozenset[str] = frozenset()
NOTHING: frozenset[int] = frozenset()


@lru_cache(64)
def only(one: str | int) -> frozenset[Any]:
    """Return the set of one holder, or of one transfer: thousands of blocks share it."""
    return frozenset((one,))


class Entry(Struct, eq=False, gc=False):
    """One stored block in one tier. Its fields are everybody's to read, and nobody else's to write.

    There may be millions, so the garbage collector does not look at them: they refer to nothing that refers to them.

    Attributes:
        group: Index of the group.
        hash: Its key within the group.
        slot: Where it lies.
        state: Where it stands.
        used: When it was last used, in the tier's ticks.
        kind: Which size of record it has, as its tier counts them.
        chunk: The chunk of its tier that the slot lies in.
        holders: Who wants it to stay.
        moves: Transfers that may touch its slot.
        tries: How often it could not be written to the next tier.
    """

    group: int
    hash: bytes
    slot: int
    state: EntryState
    used: int = 0
    kind: int = 0
    chunk: int = 0
    holders: frozenset[str] = NOBODY
    moves: frozenset[int] = NOTHING
    tries: int = 0

    def receive(self, event: EntryEvent) -> bool:
        """Take an event; True if it has just gone.

        Raises:
            LocalProtocolError: The event is impossible here; nothing was changed.
        """
        after = ON_EVENT[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.name} while a stored block is {self.state.name}")
        self.state = after
        return self._settle()

    def hold(self, holder: str) -> None:
        """Keep it for somebody."""
        self.holders = self.holders | {holder} if self.holders else only(holder)

    def let_go(self, holder: str) -> bool:
        """Keep it for somebody no more; True if it has just gone."""
        if holder not in self.holders:
            return False
        self.holders = self.holders - {holder} or NOBODY
        return self._settle()

    def begin(self, move: int) -> None:
        """Note a transfer that will touch its slot."""
        self.moves = self.moves | {move} if self.moves else only(move)

    def end(self, move: int) -> bool:
        """Note that a transfer will not touch its slot any more; True if it has just gone."""
        self.moves = self.moves - {move} or NOTHING
        return self._settle()

    def _settle(self) -> bool:
        for condition, after in CONDITIONS[self.state]:
            if condition(self):
                self.state = after
                return True
        return False
