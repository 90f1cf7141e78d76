"""The life of an engine, as one table.

SUSPENDING and CLOSING cancel pulls and revoke leases, but keep the grants that run. SHUT closes the planes. In STUCK
the data plane did not end and may still write. In CLOSED nothing can write any more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from asynckv.core.types import impossible


class LifeState(enum.StrEnum):
    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    CLOSING = "closing"
    SHUT = "shut"
    STUCK = "stuck"
    CLOSED = "closed"


class LifeEvent(enum.StrEnum):
    STARTED = "started"  # both planes are up, and the memory is registered
    DRAIN = "drain"  # the owner asks the engine to take nothing new
    SUSPEND = "suspend"  # the owner asks the engine to release its memory for a while
    LET_GO = "let_go"  # the agent is destroyed: nothing reads or writes the memory until the engine is resumed
    RESUMED = "resumed"  # a new agent has registered the memory anew
    CLOSE = "close"  # the owner asks the engine to end
    SHUT = "shut"  # the planes are about to be closed
    STUCK = "stuck"  # the data plane did not end, and may still write
    DESTROYED = "destroyed"  # the data plane is gone


S, E = LifeState, LifeEvent
ON_EVENT: Mapping[LifeState, Mapping[LifeEvent, LifeState]] = {
    S.NEW: {E.STARTED: S.RUNNING, E.DRAIN: S.NEW, E.SHUT: S.SHUT},
    S.RUNNING: {E.DRAIN: S.DRAINING, E.SUSPEND: S.SUSPENDING, E.CLOSE: S.CLOSING},
    S.DRAINING: {E.DRAIN: S.DRAINING, E.SUSPEND: S.SUSPENDING, E.CLOSE: S.CLOSING},
    S.SUSPENDING: {E.DRAIN: S.SUSPENDING, E.SUSPEND: S.SUSPENDING, E.LET_GO: S.SUSPENDED, E.CLOSE: S.CLOSING},
    S.SUSPENDED: {E.DRAIN: S.SUSPENDED, E.RESUMED: S.RUNNING, E.SHUT: S.SHUT},
    S.CLOSING: {E.DRAIN: S.CLOSING, E.CLOSE: S.CLOSING, E.SHUT: S.SHUT},
    S.SHUT: {E.DRAIN: S.SHUT, E.SHUT: S.SHUT, E.STUCK: S.STUCK, E.DESTROYED: S.CLOSED},
    S.STUCK: {E.DRAIN: S.STUCK, E.SHUT: S.SHUT},
    S.CLOSED: {E.DRAIN: S.CLOSED},
}
"""The events that each state takes, and where each leads. Any other event raises before anything has changed."""

_SHUT = {S.SHUT, S.STUCK, S.CLOSED}


class Lifecycle:
    def __init__(self) -> None:
        self.state = S.NEW
        self.is_shut = False  # True once the engine takes no turn any more

    def takes(self, event: LifeEvent) -> bool:
        return event in ON_EVENT[self.state]

    def receive(self, event: LifeEvent) -> None:
        """Take an event. An event that is impossible in this state raises, and changes nothing."""
        after = ON_EVENT[self.state].get(event) or impossible(event, "the engine", self.state)
        self.state, self.is_shut = after, after in _SHUT
