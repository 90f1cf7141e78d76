"""One stored block in one tier: being written, ready, or leaving.

    WRITING --WRITTEN--> READY --DROPPED--> LEAVING --nobody needs it--> GONE
       \\---FAILED, DOUBTED, DROPPED--------/

**holders** are the names of jobs, pins and leases that want it to stay; **moves** are the transfers that may still read
or write its slot, those in doubt among them. Both are sets: letting go twice changes nothing. Its slot is free once
both are empty, and on no other ground. A LEAVING block is not found by its key any more.
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
    """One stored block in one tier, of perhaps millions, so `gc` does not look at them; only this class writes them."""

    group: int
    hash: bytes  # its key within the group
    slot: int
    state: EntryState
    used: int = 0  # when it was last used, in the tier's ticks
    kind: int = 0  # which size of record it has, as its tier counts them
    chunk: int = 0  # the chunk of its tier that the slot lies in
    holders: frozenset[str] = NOBODY
    moves: frozenset[int] = NOTHING
    tries: int = 0  # how often it could not be written to the next tier

    def receive(self, event: EntryEvent) -> bool:
        """Take an event; True if it has just gone. An impossible one is a `LocalProtocolError`, and changes nothing."""
        after = ON_EVENT[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.name} while a stored block is {self.state.name}")
        self.state = after
        return self._settle()

    def hold(self, holder: str) -> None:
        self.holders = self.holders | {holder} if self.holders else only(holder)

    def let_go(self, holder: str) -> bool:
        if holder not in self.holders:
            return False
        self.holders = self.holders - {holder} or NOBODY
        return self._settle()

    def begin(self, move: int) -> None:
        self.moves = self.moves | {move} if self.moves else only(move)

    def end(self, move: int) -> bool:
        self.moves = self.moves - {move} or NOTHING
        return self._settle()

    def _settle(self) -> bool:
        for condition, after in CONDITIONS[self.state]:
            if condition(self):
                self.state = after
                return True
        return False
