"""One start of a remote rank, as this rank sees it: `NEW -> CONNECTING -> LOADING -> READY <-> SUSPECT -> GONE`.

A restarted engine is a new peer. A peer owns the conversation with its process: the handshake and its repeats, the
back-off after a failure, the heartbeat while something is owed or held there, and the end.

- A failed handshake goes back to NEW with a back-off, during which every request fails at once with the same cause. A
  refusal that cannot change (geometry, wrong engine) leads to GONE.
- SUSPECT stops new work and fails nothing. GONE needs evidence, or a long silence.
- A lost peer may still be alive (perhaps only its connection broke), but usually is not. So the next message to it is a
  *probe* with a ping. Without an answer within `suspect_s` the peer is GONE again, so that no pull waits for
  `handshake_s`.
- A peer in GONE is remembered for `TOMBSTONE_S`. After that, or sooner if only the connection was lost, the same place
  is met as a new `Peer`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from asynckv.config import PullConfig
from asynckv.core.asks import Asks
from asynckv.core.flow import PeerLine
from asynckv.core.source import RemoteRank
from asynckv.core.types import Address, Cohort, How, Place, PullId, Reason, TransferId, impossible, members, rank_name
from asynckv.core.wire import MAJOR, MINOR, Hello, Ping
from asynckv.geometry.gather import Packing
from asynckv.geometry.layout import Layout
from asynckv.geometry.tables import PeerTables

TOMBSTONE_S = 60.0  # seconds that a peer in GONE is remembered, so that late requests fail with the same cause
FINAL = {Reason.GEOMETRY, Reason.WRONG_TARGET, Reason.PROTOCOL, Reason.RESTARTED}
"""Refusals that no further handshake with this start of the process can change."""


class PeerState(enum.StrEnum):
    NEW = "new"
    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    GONE = "gone"


class PeerEvent(enum.StrEnum):
    WANTED = "wanted"  # a pull needs to read from the peer
    WELCOMED = "welcomed"  # the peer answered our hello with its layout
    LOADED = "loaded"  # the data plane has loaded the peer
    FAILED = "failed"  # this handshake failed; another may succeed
    HEARD = "heard"  # the peer answers again
    SILENT = "silent"  # the peer sent nothing for a while, in spite of pings
    LOST = "lost"  # there is evidence that this process start no longer serves us, or its refusal is final


S, E = members(PeerState), members(PeerEvent)
ON_EVENT: Mapping[PeerState, Mapping[PeerEvent, PeerState]] = {
    S.NEW: {E.WANTED: S.CONNECTING, E.LOST: S.GONE},
    S.CONNECTING: {E.WELCOMED: S.LOADING, E.FAILED: S.NEW, E.LOST: S.GONE},
    S.LOADING: {E.LOADED: S.READY, E.FAILED: S.NEW, E.LOST: S.GONE},
    S.READY: {E.SILENT: S.SUSPECT, E.LOST: S.GONE},
    S.SUSPECT: {E.HEARD: S.READY, E.LOST: S.GONE},
    S.GONE: {},
}
"""The events that each state takes, and where each leads. Any other event raises before anything has changed."""


class Due(enum.Enum):
    UNREACHABLE = enum.auto()
    NOT_LOADED = enum.auto()
    HELLO = enum.auto()
    PING = enum.auto()
    SILENT = enum.auto()
    STALLED = enum.auto()  # the peer answers, but no bytes arrive
    LOST = enum.auto()  # the peer was silent for so long that it is given up
    IDLE = enum.auto()  # the connection is closed, because nothing was read from the peer for long
    FORGET = enum.auto()


@dataclass(slots=True, eq=False)
class Peer:
    engine_id: str
    tp_rank: int
    pp_stage: int
    address: Address
    incarnation: str
    line: PeerLine  # queue of the sources that read from the peer
    state: PeerState = S.NEW
    told_as: PeerState = S.NEW  # state in the last event about the peer

    nonce: int = 0
    deadline: float = math.inf
    load_by: float = math.inf  # time at which loading fails even if the data plane was busy with other peers
    is_doubted: bool = False  # True if the peer was lost before, and was not heard of since
    word_by: float = math.inf  # time at which a probe fails without an answer
    retry_at: float = math.inf
    hellos: int = 0
    hint: tuple[How, str] | None = None  # possible reason why the handshake under way is not answered
    not_before: float = -math.inf
    failures: int = 0
    reason: Reason = Reason.UNREACHABLE
    detail: str = ""
    how: How | None = None

    agent_name: str = ""
    layout: Layout | None = None
    minor: int = 0  # minor version of the protocol that it speaks
    packing: Packing | None = None
    asks: Asks = field(default_factory=Asks)
    tables: dict[tuple[object, ...], PeerTables] = field(default_factory=dict)
    is_loading: bool = False
    is_loaded: bool = False

    pulls: set[PullId] = field(default_factory=set)
    follows: set[PullId] = field(default_factory=set)  # names of followings that ask here
    transfers: set[TransferId] = field(default_factory=set)
    watched_at: float = math.inf
    """Time since which something is owed or held here. Silence counts from then."""
    unused_at: float = math.inf  # time since which nothing is owed or held here
    heard_at: float = -math.inf
    pinged_at: float = -math.inf
    moved_at: float = -math.inf  # last time at which bytes arrived, or a read was posted while none ran

    is_draining: bool = False
    has_differed: bool = False  # True once a second look has found other bytes than a read of it
    is_orderly: bool = False  # True if either side said goodbye, so that the end needs no attention
    keep_connected: bool = False
    """True if the process lives, so that the data plane may keep the connection for the next meeting."""
    num_failed: int = 0  # number of pulls that failed with the peer's last failure or end
    gone_at: float = math.inf
    scheduled_at: float = math.inf

    # -- questions ---------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        return self.address, self.incarnation

    @property
    def name(self) -> str:
        return rank_name(self.engine_id, self.tp_rank, self.pp_stage, self.incarnation)

    @property
    def where(self) -> str:
        return f"{self.name} ({self.address})"

    def is_named(self, engine_id: str, rank: RemoteRank | Layout) -> bool:
        """Return True if this is the rank of that engine. Until the peer has answered, params say which rank it is."""
        return (self.engine_id, self.pp_stage, self.tp_rank) == (engine_id, rank.pp_stage, rank.tp_rank)

    @property
    def may_be_met(self) -> bool:
        return self.state is S.NEW and not self.is_loading

    # -- events ------------------------------------------------------------------------------------

    def receive(self, event: PeerEvent) -> bool:
        """Take an event, and return True if the state changed. An impossible event raises, and changes nothing."""
        after = ON_EVENT[self.state].get(event) or impossible(event, f"the peer {self.name}", self.state)
        before, self.state = self.state, after
        self.line.is_open = after is S.READY
        return before is not after

    def greet(self, nonce: int, config: PullConfig, now: float) -> None:
        self.receive(E.WANTED)
        self.nonce, self.hellos, self.deadline = nonce, 0, now + config.handshake_s
        if self.is_doubted:
            self.word_by = min(now + config.suspect_s, self.deadline)

    def make_hello(self, cohort: Cohort, retry_s: float, now: float) -> Hello:
        self.retry_at = now + retry_s * 2 ** min(self.hellos, 3)
        self.hellos += 1
        return Hello(self.nonce, MAJOR, MINOR, self.engine_id, self.tp_rank, cohort, self.pp_stage)

    def welcomed(
        self, agent_name: str, layout: Layout, minor: int, packing: Packing | None, config: PullConfig, now: float
    ) -> None:
        self.receive(E.WELCOMED)
        self.agent_name, self.layout, self.minor, self.packing = agent_name, layout, minor, packing
        self.is_loading = True
        self.load_by = now + max(config.timeout_s, config.handshake_s)
        self.await_load(config, now)

    def await_load(self, config: PullConfig, now: float) -> None:
        """Start the deadline of loading anew, because the data plane was busy with other peers until now."""
        self.deadline = min(now + config.handshake_s, self.load_by)

    def loaded(self, now: float) -> None:
        self.receive(E.LOADED)
        self.is_loaded, self.failures, self.heard_at = True, 0, now

    def failed(self, reason: Reason, detail: str, config: PullConfig, now: float, how: How | None = None) -> None:
        self.receive(E.FAILED)
        self.reason, self.detail, self.how = reason, detail, how
        self.not_before = now + self.take_pause(config)

    def take_pause(self, config: PullConfig) -> float:
        """Return the pause after a failed handshake. The next pause is longer."""
        pause_s: float = min(config.backoff_s * 2**self.failures, config.max_backoff_s)
        self.failures = min(self.failures + 1, 16)
        return pause_s

    def lost(self, reason: Reason, detail: str, pause_s: float, now: float, how: How | None = None) -> None:
        self.receive(E.LOST)
        self.reason, self.detail, self.how = reason, detail, how
        self.gone_at, self.not_before = now, now + pause_s

    def heard(self, now: float) -> bool:
        self.heard_at = now
        self.is_doubted, self.word_by = False, math.inf
        if self.state is not S.SUSPECT:
            return False
        self.moved_at = now
        return self.receive(E.HEARD)

    # -- time --------------------------------------------------------------------------------------

    def due(self, config: PullConfig, now: float) -> list[Due]:
        match self.state:
            case S.CONNECTING:
                if now >= self.deadline or self._says_nothing(config, now):
                    return [Due.UNREACHABLE]
                return [Due.HELLO] if now >= self.retry_at else []
            case S.LOADING:
                return [Due.NOT_LOADED] if now >= self.deadline else []
            case S.READY | S.SUSPECT if self.pulls or self.follows:
                return self._heartbeat(config, now)
            case S.READY | S.SUSPECT:
                return [Due.IDLE] if now >= self.unused_at + config.idle_s else []
            case S.NEW if self.pulls or self.follows:
                return [Due.UNREACHABLE] if self._says_nothing(config, now) else []
            case S.NEW:
                return [Due.FORGET] if not self.is_loading and now >= self._forget_at(config) else []
            case _:
                over = now >= self.gone_at + TOMBSTONE_S and not (self.transfers or self.pulls or self.follows)
                return [Due.FORGET] if over else []

    def _says_nothing(self, config: PullConfig, now: float) -> bool:
        if self.word_by + config.heartbeat_s < now < self.deadline:
            # This process was away, so the peer's answer may still wait to be read.
            self.word_by = now + config.suspect_s
        return now >= self.word_by

    def _heartbeat(self, config: PullConfig, now: float) -> list[Due]:
        ping_at = self._ping_at(config)
        if now > ping_at + config.heartbeat_s:
            # This process was away (stopped, asleep, busy) since then, and messages may wait unread, so this time is no
            # silence. Earlier silence still counts, or a process that is always late would find no peer silent.
            self.watched_at = max(self.heard_at, self.watched_at) + now - ping_at
            ping_at = self._ping_at(config)
        silent_s = self.silent_s(now)
        if silent_s >= config.gone_s:
            return [Due.LOST]
        due = []
        if now >= ping_at:
            due.append(Due.PING)
        if silent_s >= config.suspect_s and self.state is S.READY:
            due.append(Due.SILENT)
        elif self.line.in_flight and now >= self.moved_at + config.suspect_s:
            due.append(Due.STALLED)
        return due

    def make_ping(self, nonce: int, now: float) -> Ping:
        self.pinged_at = now
        return Ping(nonce)

    def silent_s(self, now: float) -> float:
        """Return for how long the peer sent nothing, of the time that it was watched."""
        return now - max(self.heard_at, self.watched_at)

    def _ping_at(self, config: PullConfig) -> float:
        # One expression for the timer and the check, because rounding of two could wake the peer for ever.
        return max(self.heard_at, self.watched_at, self.pinged_at) + config.heartbeat_s

    def _forget_at(self, config: PullConfig) -> float:
        # The peer could not be met, or was only released. In the second case the link is kept for the next hit of the
        # same prefix, unless the peer never answered, because such an endpoint may be made up.
        if self.failures:
            return self.not_before
        return max(self.not_before, self.unused_at + (0.0 if self.heard_at == -math.inf else config.idle_s))

    def wake_at(self, config: PullConfig) -> float:
        return min(self._wake_at(config), self.asks.until)

    def _wake_at(self, config: PullConfig) -> float:
        match self.state:
            case S.CONNECTING:
                return min(self.deadline, self.word_by, self.retry_at)
            case S.LOADING:
                return self.deadline
            case S.READY | S.SUSPECT if self.pulls or self.follows:
                return self._ping_at(config)
            case S.READY | S.SUSPECT:
                return self.unused_at + config.idle_s
            case S.NEW if self.pulls or self.follows:
                return self.word_by
            case S.NEW if not self.is_loading:
                return self._forget_at(config)
            case S.GONE if not (self.pulls or self.follows or self.transfers):
                # Only now, because a tombstone that cannot be cleared yet must not be woken again and again.
                return self.gone_at + TOMBSTONE_S
            case _:
                return math.inf
