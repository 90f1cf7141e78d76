"""One stored block in one tier: being written, ready, or leaving.

    WRITING --WRITTEN--> READY --DROPPED--> LEAVING --nothing needs it--> GONE
       \\---FAILED, DROPPED----------------/

**holders** are the names of jobs, pins and leases that keep the block, and the numbers of the moves that may still read
or write its slot, also those in doubt. They are a set, so letting go twice changes nothing. The slot is free only when
it is empty. A LEAVING block is not found by its key any more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import lru_cache

from msgspec import Struct

from asynckv.core.types import impossible, members


class EntryState(enum.StrEnum):
    WRITING = "writing"
    READY = "ready"
    LEAVING = "leaving"
    GONE = "gone"


class EntryEvent(enum.StrEnum):
    WRITTEN = "written"  # all of the block is in place
    FAILED = "failed"  # the block is not in place; a move in doubt, which may still write it, holds its slot
    DROPPED = "dropped"  # the block was evicted, is not wanted, or was found to be corrupt


S, E = members(EntryState), members(EntryEvent)


def nothing_needs_it(entry: Entry) -> bool:
    """No job, pin or lease holds it, and no transfer may touch it."""
    return not entry.holders


ON_EVENT: Mapping[EntryState, Mapping[EntryEvent, EntryState]] = {
    S.WRITING: {E.WRITTEN: S.READY, E.FAILED: S.LEAVING, E.DROPPED: S.LEAVING},
    S.READY: {E.DROPPED: S.LEAVING},
    S.LEAVING: {E.WRITTEN: S.LEAVING, E.FAILED: S.LEAVING, E.DROPPED: S.LEAVING},
    S.GONE: {},
}

WHEN: Mapping[EntryState, Mapping[Callable[[Entry], bool], EntryState]] = {
    S.WRITING: {},
    S.READY: {},
    S.LEAVING: {nothing_needs_it: S.GONE},
    S.GONE: {},
}
"""Checked after every event, and whenever a holder or a transfer lets go."""

CONDITIONS = {state: tuple(row.items()) for state, row in WHEN.items()}
Holder = str | int  # name of a job, pin or lease; or number of a move
NO_HOLDERS: frozenset[Holder] = frozenset()


@lru_cache(64)
def only(holder: Holder) -> frozenset[Holder]:
    """Return the set of one holder; it is cached because thousands of blocks share it."""
    return frozenset((holder,))


class Entry(Struct, eq=False, gc=False):
    """One stored block in one tier. There may be millions, so `gc` ignores them. Its tier and its job write it."""

    group: int
    hash: bytes  # its key within the group
    slot: int
    state: EntryState
    used: int = 0  # tick of the tier at which it was last used
    kind: int = 0  # index of its record size in the tier
    chunk: int = 0  # the chunk of its tier that the slot lies in
    holders: frozenset[Holder] = NO_HOLDERS
    tries: int = 0  # failed writes to the next tier

    def receive(self, event: EntryEvent) -> bool:
        """Take an event; return True if the entry has just gone. An impossible event raises `LocalProtocolError`."""
        self.state = ON_EVENT[self.state].get(event) or impossible(event, "a stored block", self.state)
        return self._settle()

    def hold(self, holder: Holder) -> None:
        self.holders = self.holders | {holder} if self.holders else only(holder)

    def let_go(self, holder: Holder) -> bool:
        if holder not in self.holders:
            return False
        self.holders = self.holders - {holder} or NO_HOLDERS
        return self._settle()

    def _settle(self) -> bool:
        for condition, after in CONDITIONS[self.state]:
            if condition(self):
                self.state = after
                return True
        return False
