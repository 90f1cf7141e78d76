"""One remote rank as a reader knows it: `NEW -> CONNECTING -> LOADING -> READY <-> SUSPECT -> GONE`.

A peer is one *start* of a remote process (address and incarnation). A restarted engine is a new peer.
A failed handshake goes back to NEW with a back-off, during which every request fails at once with the
same cause; a refusal that cannot change (geometry, wrong engine) is GONE for good.
SUSPECT stops new work and fails nothing; GONE needs evidence, or a long silence.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from asynckv.core.flow import Window
from asynckv.core.pull import Pull, Source
from asynckv.core.types import Address, PullId, Reason, TransferId, rank_name
from asynckv.errors import LocalProtocolError
from asynckv.geometry.layout import Layout
from asynckv.geometry.plan import PeerTables

__all__ = ["Peer", "PeerEvent", "PeerState"]


class PeerState(enum.StrEnum):
    """Where a peer stands."""

    NEW = "new"
    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    GONE = "gone"


class PeerEvent(enum.StrEnum):
    """What happens to a peer."""

    WANTED = "wanted"
    WELCOMED = "welcomed"
    LOADED = "loaded"
    FAILED = "failed"
    """This handshake failed; another may do better."""
    HEARD = "heard"
    SILENT = "silent"
    UNLOADED = "unloaded"
    """Our own data plane has lost all that it had loaded; the process is met again when it is needed."""
    LOST = "lost"
    """Evidence that this process start serves us no more, or a refusal for good."""


S, E = PeerState, PeerEvent
ON_EVENT: Mapping[PeerState, Mapping[PeerEvent, PeerState]] = {
    S.NEW: {E.WANTED: S.CONNECTING, E.HEARD: S.NEW, E.LOST: S.GONE},
    S.CONNECTING: {E.WELCOMED: S.LOADING, E.FAILED: S.NEW, E.HEARD: S.CONNECTING, E.LOST: S.GONE},
    S.LOADING: {E.LOADED: S.READY, E.FAILED: S.NEW, E.UNLOADED: S.NEW, E.HEARD: S.LOADING, E.LOST: S.GONE},
    S.READY: {E.HEARD: S.READY, E.SILENT: S.SUSPECT, E.UNLOADED: S.NEW, E.LOST: S.GONE},
    S.SUSPECT: {E.HEARD: S.READY, E.SILENT: S.SUSPECT, E.UNLOADED: S.NEW, E.LOST: S.GONE},
    S.GONE: {E.HEARD: S.GONE, E.LOST: S.GONE},
}


@dataclass(slots=True, eq=False)
class Peer:
    """One start of a remote rank."""

    engine_id: str
    tp_rank: int
    pp_stage: int
    address: Address
    incarnation: str
    state: PeerState = S.NEW
    nonce: int = 0
    """Of the handshake under way."""
    deadline: float = math.inf
    """When the handshake under way fails."""
    retry_at: float = math.inf
    """When to repeat the hello."""
    hellos: int = 0
    """Sent in the handshake under way."""
    not_before: float = -math.inf
    """End of the back-off."""
    failures: int = 0
    reason: Reason = Reason.UNREACHABLE
    hint: str = ""
    """What may keep the handshake under way from being answered."""
    detail: str = ""
    """Why the last handshake failed, or why the peer is gone."""
    heard_at: float = -math.inf
    pinged_at: float = -math.inf
    agent_name: str = ""
    layout: Layout | None = None
    """What it holds, once it has said so."""
    maps: dict[tuple[object, ...], PeerTables] = field(default_factory=dict)
    """By what is read of it."""
    table_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    is_loading: bool = False
    loaded: bool = False
    """The data plane knows it."""
    pulls: set[PullId] = field(default_factory=set)
    """Who has something owed or held here."""
    transfers: set[TransferId] = field(default_factory=set)
    window: Window = field(default_factory=Window)
    """What is in flight from it."""
    queue: deque[tuple[Pull, Source]] = field(default_factory=deque)
    """Who has reads to post here, first come first served."""
    is_queued: bool = False
    """In the node's turn of peers that may post."""
    is_alive: bool = False
    """It is given up for another reason than its end."""
    is_orderly: bool = False
    """It said goodbye, or we did: nobody need look into its end."""
    num_failed: int = 0
    """Pulls that its last failure, or its end, took along."""
    moved_at: float = -math.inf
    """When something was last posted into an empty window, or arrived."""
    is_set_aside: bool = False
    """Nothing comes from it: what waits for it takes no room from others."""
    is_draining: bool = False
    """It has said that it lends nothing new."""
    watched_at: float = math.inf
    """Since when something is owed or held here; silence counts from then."""
    unused_at: float = math.inf
    """Since when nothing is owed or held here."""
    gone_at: float = math.inf
    scheduled_at: float = math.inf
    """For the node's timers only."""

    @property
    def name(self) -> str:
        """For people."""
        return rank_name(self.engine_id, self.tp_rank, self.pp_stage, self.incarnation)

    @property
    def where(self) -> str:
        """The rank and its address, for people."""
        return f"{self.name} ({self.address})"

    @property
    def identity(self) -> tuple[str, int, int]:
        """Whom the params say it is: engine, stage, rank."""
        return self.engine_id, self.pp_stage, self.tp_rank

    @property
    def is_usable(self) -> bool:
        """Reads may be posted."""
        return self.state is S.READY

    def receive(self, event: PeerEvent) -> bool:
        """Take an event; True if the state changed.

        Raises:
            LocalProtocolError: The event is impossible here; nothing was changed.
        """
        after = ON_EVENT[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.name} while the peer {self.name} is {self.state.name}")
        before, self.state = self.state, after
        return before is not after
