"""Observers of an engine: its log, metrics, traces, or the application's own.

The engine calls an `Observer` (`engine.observation.observe`) on its loop, in the middle of a turn, so the observer must
be quick and must change nothing; the log alone notes which requests it samples. Its exceptions are only counted
(`observers.failed`). Counts that the engine keeps anyway are read as a `Reading`, from any thread (`Observed.ask`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from asynckv.arguments import shown
from asynckv.core.lease import Lease
from asynckv.core.peer import Peer, PeerState
from asynckv.core.pull import Pull
from asynckv.core.types import KVTransferParams
from asynckv.errors import ConfigError
from asynckv.told import StepWait

T = TypeVar("T")


class Observer:
    """Base of observers, called on the engine's loop; override the methods that you want."""

    def pull_ended(self, pull: Pull, now: float) -> None:
        """Observe that a pull has its outcome."""

    def pull_retried(self, pull: Pull, now: float) -> None:
        """Observe that another attempt follows a failed one."""

    def pull_over(self, pull: Pull, now: float) -> None:
        """Observe that every rank knows a pull's outcome, and that all its blocks returned."""

    def blocks_retired(self, pull: Pull, now: float) -> None:
        """Observe that a pull's blocks are given up, because a transfer may still write them."""

    def lease_lent(self, lease: Lease, params: KVTransferParams, now: float) -> None:
        """Observe that a request was lent with these params."""

    def lease_ended(self, lease: Lease, now: float) -> None:
        """Observe that a lease ended, or that the engine ended before it (`is_over` is false then)."""

    def peer_changed(self, peer: Peer, before: PeerState, after: PeerState, now: float) -> None:
        """Observe that a remote rank changed its state."""

    def offload_ended(self, call: str, seconds: float, now: float) -> None:
        """Observe the outcome of a `store` or `load` of blocks outside of the accelerator."""

    def loop_came(self, lag_s: float, now: float) -> None:
        """Observe that the engine's timer fired `lag_s` late."""

    def engine_stopped(self) -> None:
        """Observe that the engine was closed; no further calls follow."""


class Observers:
    """All observers of an engine, as the calls to make for each kind of news."""

    def __init__(self, *everyone: Observer) -> None:
        self.everyone = everyone
        self.pull_ended = [each.pull_ended for each in everyone]
        self.pull_retried = [each.pull_retried for each in everyone]
        self.pull_over = [each.pull_over for each in everyone]
        self.blocks_retired = [each.blocks_retired for each in everyone]
        self.lease_lent = [each.lease_lent for each in everyone]
        self.lease_ended = [each.lease_ended for each in everyone]
        self.peer_changed = [each.peer_changed for each in everyone]
        self.offload_ended = [each.offload_ended for each in everyone]
        self.loop_came = [each.loop_came for each in everyone]
        self.engine_stopped = [each.engine_stopped for each in everyone]


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of an engine at one moment.

    Attributes:
        state: The engine's state (`docs/structure.md`).
        incarnation: The incarnation of the process, or of its memory since it was resumed.
        counters: Counters, as in `Statistics`.
        gauges: Gauges, as in `Statistics`.
        pulls: Number of pulls in each state.
        leases: Number of leases in each state.
        peers: Number of peers in each state.
        waiting: Pulls that were asked for but do not read yet.
        retrying: Requests that wait for another attempt.
        lease_ages_s: Age of each lease.
        oldest_s: Age of the last `step`, and of the oldest `lease`, `unclaimed` lease, `pull` (since it was asked for)
            and `quarantined` blocks (since their pull failed); 0 if there is none.
        waits_for_step: What waits for a step of the engine around this rank (`Inspector.waits_for_step`).
        blocks_retired: Blocks that were given up and are still held.
        limits: Configured limits: `bytes`, `descriptors`, `requests`, `queued`, `parked`.
        data_down: Reason why the data plane does not serve now; empty while it serves.
        descriptors_in_flight: Descriptors of the transfers in flight.
        planes: Facts that the data plane reports about itself.
    """

    state: str
    incarnation: str
    counters: Mapping[str, int]
    gauges: Mapping[str, int]
    pulls: Mapping[str, int]
    leases: Mapping[str, int]
    peers: Mapping[str, int]
    waiting: int
    retrying: int
    lease_ages_s: tuple[float, ...]
    oldest_s: Mapping[str, float]
    waits_for_step: Mapping[str, StepWait]
    blocks_retired: int
    limits: Mapping[str, float]
    descriptors_in_flight: int
    data_down: str
    planes: Mapping[str, str]


class Observed(Protocol):
    """The interface to an engine for metrics and traces; its `observation` documents the methods."""

    engine_id: str
    rank: str

    def observe(self, observer: Observer) -> None: ...

    def unobserve(self, observer: Observer) -> None: ...

    def ask(self, question: Callable[[], T], timeout_s: float) -> T: ...

    def condition(self) -> tuple[str, str]: ...

    def reading(self) -> Reading: ...


def observation_of(engine: Any) -> Observed:
    """Return the observation of an `Engine`, `EngineThread` or `EngineDesk`."""
    found = getattr(getattr(engine, "engine", engine), "observation", None)
    if found is None:
        raise ConfigError(f"engine is {shown(engine)}; give an Engine, EngineThread or EngineDesk")
    observed: Observed = found
    return observed
