"""One start of a remote rank, as a reader knows it: `NEW -> CONNECTING -> LOADING -> READY <-> SUSPECT -> GONE`.

A restarted engine is a new peer. A peer owns the conversation with its process: the handshake and its repeats, the
back-off after a failure, the heartbeat while something is owed or held there, and its end.

- A failed handshake goes back to NEW with a back-off, during which every request fails at once with the same cause. A
  refusal that cannot change (geometry, wrong engine) leads to GONE.
- SUSPECT stops new work and fails nothing. GONE needs evidence, or a long silence.
- A lost peer may still be alive (perhaps only its connection broke), but usually is not. So the next message to it is a
  *probe* with a ping. Without an answer within `suspect_s` it is GONE again, and nobody waits for `handshake_s`.
- What is GONE is remembered for `TOMBSTONE_S`. After that, or sooner if only the connection was lost, the same place is
  met as a new `Peer`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from asynckv.config import PullConfig
from asynckv.core.events import ENDING, Ending
from asynckv.core.flow import Line
from asynckv.core.source import RemoteRank
from asynckv.core.types import Address, Cohort, Place, PullId, Reason, TransferId, members, rank_name
from asynckv.core.wire import MAJOR, MINOR, Hello, Ping
from asynckv.errors import LocalProtocolError
from asynckv.geometry.layout import Layout
from asynckv.geometry.tables import PeerTables

TOMBSTONE_S = 60.0
"""How long a peer that is gone is remembered, so that late requests fail with the same cause."""

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
    WANTED = "wanted"
    """Something is to be read from it."""
    WELCOMED = "welcomed"
    """It answered our hello: it says what it holds."""
    LOADED = "loaded"
    """The data plane knows it."""
    FAILED = "failed"
    """This handshake failed; another may do better."""
    HEARD = "heard"
    """It speaks again."""
    SILENT = "silent"
    """It has said nothing for a while, though it was asked."""
    UNLOADED = "unloaded"
    """Our own data plane has lost all that it had loaded; the process is met again when it is needed."""
    LOST = "lost"
    """Evidence that this process start serves us no more, or a refusal for good."""


S, E = members(PeerState), members(PeerEvent)
ON_EVENT: Mapping[PeerState, Mapping[PeerEvent, PeerState]] = {
    S.NEW: {E.WANTED: S.CONNECTING, E.LOST: S.GONE},
    S.CONNECTING: {E.WELCOMED: S.LOADING, E.FAILED: S.NEW, E.LOST: S.GONE},
    S.LOADING: {E.LOADED: S.READY, E.FAILED: S.NEW, E.UNLOADED: S.NEW, E.LOST: S.GONE},
    S.READY: {E.SILENT: S.SUSPECT, E.UNLOADED: S.NEW, E.LOST: S.GONE},
    S.SUSPECT: {E.HEARD: S.READY, E.UNLOADED: S.NEW, E.LOST: S.GONE},
    S.GONE: {},
}
"""What each state takes, and where it leads; anything else raises before anything has changed."""


class Due(enum.Enum):
    UNREACHABLE = enum.auto()
    NOT_LOADED = enum.auto()
    HELLO = enum.auto()
    PING = enum.auto()
    SILENT = enum.auto()
    STALLED = enum.auto()
    """It answers, and yet nothing arrives."""
    LOST = enum.auto()
    """It has been silent for so long that it is given up."""
    IDLE = enum.auto()
    """Nothing was read from it for long: the connection is closed."""
    FORGET = enum.auto()


@dataclass(slots=True, eq=False)
class Peer:
    """One start of a remote rank."""

    engine_id: str
    tp_rank: int
    pp_stage: int
    address: Address
    incarnation: str
    line: Line
    """Whose turn it is to read from it."""
    state: PeerState = S.NEW
    told_as: PeerState = S.NEW
    """The state that others were told of last."""

    nonce: int = 0
    deadline: float = math.inf
    load_by: float = math.inf
    """When it fails even if others were loaded all the time."""
    is_doubted: bool = False
    """It was lost before, and has said nothing since."""
    word_by: float = math.inf
    """When a probe fails, if it says nothing."""
    retry_at: float = math.inf
    hellos: int = 0
    hint: str = ""
    """What may keep the handshake under way from being answered."""
    not_before: float = -math.inf
    failures: int = 0
    reason: Reason = Reason.UNREACHABLE
    detail: str = ""

    agent_name: str = ""
    layout: Layout | None = None
    tables: dict[tuple[object, ...], PeerTables] = field(default_factory=dict)
    is_loading: bool = False
    is_loaded: bool = False

    pulls: set[PullId] = field(default_factory=set)
    transfers: set[TransferId] = field(default_factory=set)
    watched_at: float = math.inf
    """Since when something is owed or held here; silence counts from then."""
    unused_at: float = math.inf
    """Since when nothing is owed or held here."""
    heard_at: float = -math.inf
    pinged_at: float = -math.inf
    moved_at: float = -math.inf
    """When something was last posted while nothing ran, or arrived."""

    is_draining: bool = False
    is_orderly: bool = False
    """It said goodbye, or we did: nobody need look into its end."""
    keep_connected: bool = False
    """Its process lives: the data plane may keep the connection for when it is met again."""
    num_failed: int = 0
    """Pulls that its last failure, or its end, took along."""
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
        """Whether this is the rank of that engine; until it has answered, it is whom params say that it is."""
        return (self.engine_id, self.pp_stage, self.tp_rank) == (engine_id, rank.pp_stage, rank.tp_rank)

    @property
    def may_be_met(self) -> bool:
        return self.state is S.NEW and not self.is_loading

    # -- events ------------------------------------------------------------------------------------

    def receive(self, event: PeerEvent) -> bool:
        """Take an event; True if the state changed. One that is impossible here raises, and changes nothing."""
        after = ON_EVENT[self.state].get(event)
        if after is None:
            raise LocalProtocolError(f"{event.name} while the peer {self.name} is {self.state.name}")
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

    def welcomed(self, agent_name: str, layout: Layout, config: PullConfig, now: float) -> None:
        self.receive(E.WELCOMED)
        self.agent_name, self.layout, self.is_loading = agent_name, layout, True
        self.load_by = now + max(config.timeout_s, config.handshake_s)
        self.await_load(config, now)

    def await_load(self, config: PullConfig, now: float) -> None:
        """It is loaded from now on, as far as is known: whatever the data plane had to do before is not its fault."""
        self.deadline = min(now + config.handshake_s, self.load_by)

    def loaded(self, now: float) -> None:
        self.receive(E.LOADED)
        self.is_loaded, self.failures, self.heard_at = True, 0, now

    def failed(self, reason: Reason, detail: str, config: PullConfig, now: float) -> None:
        self.receive(E.FAILED)
        self.reason, self.detail = reason, detail
        self.not_before = now + self.take_pause(config)

    def take_pause(self, config: PullConfig) -> float:
        """Return the pause after a handshake that failed; the next one is longer."""
        pause_s: float = min(config.backoff_s * 2**self.failures, config.max_backoff_s)
        self.failures = min(self.failures + 1, 16)
        return pause_s

    def lost(self, reason: Reason, detail: str, pause_s: float, now: float) -> None:
        self.receive(E.LOST)
        self.reason, self.detail, self.gone_at, self.not_before = reason, detail, now, now + pause_s

    def unloaded(self, reason: Reason, detail: str, now: float) -> None:
        self.receive(E.UNLOADED)
        self.reason, self.detail, self.not_before, self.is_loaded = reason, detail, now, False
        self.tables.clear()

    def heard(self, now: float) -> bool:
        self.heard_at = now
        self.is_doubted, self.word_by = False, math.inf
        if self.state is not S.SUSPECT:
            return False
        self.moved_at = now
        return self.receive(E.HEARD)

    def posted(self, transfer_id: TransferId, now: float) -> None:
        self.transfers.add(transfer_id)
        if not self.line.in_flight:
            self.moved_at = now

    def transfer_ended(self, transfer_id: TransferId, ending: Ending, now: float) -> None:
        """A transfer of it ended, or fell in doubt and may still write; only one that is done shows that it moves."""
        if ending is ENDING.DONE:
            self.moved_at = now
        if ending is not ENDING.IN_DOUBT:
            self.transfers.discard(transfer_id)

    # -- time --------------------------------------------------------------------------------------

    def due(self, config: PullConfig, now: float) -> list[Due]:
        match self.state:
            case S.CONNECTING:
                if now >= self.deadline or self._says_nothing(config, now):
                    return [Due.UNREACHABLE]
                return [Due.HELLO] if now >= self.retry_at else []
            case S.LOADING:
                return [Due.NOT_LOADED] if now >= self.deadline else []
            case S.READY | S.SUSPECT if self.pulls:
                return self._heartbeat(config, now)
            case S.READY | S.SUSPECT:
                return [Due.IDLE] if now >= self.unused_at + config.idle_s else []
            case S.NEW if self.pulls:
                return [Due.UNREACHABLE] if self._says_nothing(config, now) else []
            case S.NEW:
                return [Due.FORGET] if not self.is_loading and now >= self._forget_at(config) else []
            case _:
                over = now >= self.gone_at + TOMBSTONE_S and not self.transfers and not self.pulls
                return [Due.FORGET] if over else []

    def _says_nothing(self, config: PullConfig, now: float) -> bool:
        if self.word_by + config.heartbeat_s < now < self.deadline:
            # We were away: what it said may wait unread.
            self.word_by = now + config.suspect_s
        return now >= self.word_by

    def _heartbeat(self, config: PullConfig, now: float) -> list[Due]:
        ping_at = self._ping_at(config)
        if now > ping_at + config.heartbeat_s:
            # We were away (stopped, asleep, busy) since then: that is no silence of theirs, and what they said may wait
            # unread. What was silence before stays so, or who is always late would never miss anybody.
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
        """How long it has said nothing, of the time that it was watched."""
        return now - max(self.heard_at, self.watched_at)

    def _ping_at(self, config: PullConfig) -> float:
        # One expression for the wish and the check: with two, rounding could wake it for ever.
        return max(self.heard_at, self.watched_at, self.pinged_at) + config.heartbeat_s

    def _forget_at(self, config: PullConfig) -> float:
        # It could not be met, or was only released: then the link is kept, for whoever hits the same prefix again. One
        # that never said anything may be made up.
        if self.failures:
            return self.not_before
        return max(self.not_before, self.unused_at + (0.0 if self.heard_at == -math.inf else config.idle_s))

    def wake_at(self, config: PullConfig) -> float:
        match self.state:
            case S.CONNECTING:
                return min(self.deadline, self.word_by, self.retry_at)
            case S.LOADING:
                return self.deadline
            case S.READY | S.SUSPECT if self.pulls:
                return self._ping_at(config)
            case S.READY | S.SUSPECT:
                return self.unused_at + config.idle_s
            case S.NEW if self.pulls:
                return self.word_by
            case S.NEW if not self.is_loading:
                return self._forget_at(config)
            case S.GONE if not self.pulls and not self.transfers:
                # Not before: a tombstone that cannot be cleared yet must not be woken for it again and again.
                return self.gone_at + TOMBSTONE_S
            case _:
                return math.inf
