"""Observers of an engine beside its log: metrics, traces, or something of the application's own.

An `Observer` (`engine.observation.observe`) is told on the engine's loop, in the middle of a turn: it has to be quick,
and may change nothing. What it raises is only counted (`observers.failed`). What is counted anyway is read as a
`Reading`, from whatever thread asks (`Observed.ask`).
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

T = TypeVar("T")


class Observer:
    """Told of what happens, on the engine's loop; override what is wanted."""

    def pull_ended(self, pull: Pull, now: float) -> None:
        """A pull has its outcome."""

    def pull_retried(self, pull: Pull, now: float) -> None:
        """Another attempt follows one that has failed."""

    def pull_over(self, pull: Pull, now: float) -> None:
        """Every rank was told of a pull's outcome, and every block returned."""

    def blocks_retired(self, pull: Pull, now: float) -> None:
        """A pull's blocks are given up, since something may write them still."""

    def lease_lent(self, lease: Lease, params: KVTransferParams, now: float) -> None:
        """A request was lent, as these params say."""

    def lease_ended(self, lease: Lease, now: float) -> None:
        """A lease is over; or the engine is before it, which cuts it short (`is_over` is false then)."""

    def peer_changed(self, peer: Peer, before: PeerState, after: PeerState, now: float) -> None:
        """A remote rank changed its state."""

    def offload_ended(self, call: str, seconds: float, now: float) -> None:
        """A `store` or a `load` of blocks that are kept outside of the accelerator has its outcome."""

    def loop_came(self, lag_s: float, now: float) -> None:
        """The engine's timer fired so much later than it should have."""

    def engine_stopped(self) -> None:
        """The engine was closed, and tells nothing any more."""


@dataclass(frozen=True, slots=True)
class Reading:
    """An engine at one moment.

    Attributes:
        state: The engine's (`docs/structure.md`).
        incarnation: Of its process, or of its memory since it was resumed.
        counters: As in `Statistics`.
        gauges: As in `Statistics`.
        pulls: How many are in which state.
        leases: How many are in which state.
        peers: How many are in which state.
        waiting: Pulls that were asked for and do not read yet.
        retrying: Requests that wait for another attempt.
        lease_ages_s: For how long each lease has been lent.
        oldest_s: What has been held or waited for longest: `lease`, `pull` (since it was asked for), `quarantined`
            (since its pull had failed); 0 if there is none.
        blocks_retired: Blocks that were given up and are held still.
        limits: What the configuration allows: `bytes`, `descriptors`, `requests`, `queued`, `parked`.
        data_down: Why the data plane does not serve now; empty while it does.
        descriptors_in_flight: Of the transfers that are under way.
        planes: What the data plane says of itself.
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
    blocks_retired: int
    limits: Mapping[str, float]
    descriptors_in_flight: int
    data_down: str
    planes: Mapping[str, str]


class Observed(Protocol):
    """What metrics and traces want of an engine: its `observation`, which says more."""

    engine_id: str
    rank: str

    def observe(self, observer: Observer) -> None: ...

    def unobserve(self, observer: Observer) -> None: ...

    def ask(self, question: Callable[[], T], timeout_s: float) -> T: ...

    def condition(self) -> tuple[str, str]: ...

    def reading(self) -> Reading: ...


def observation_of(engine: Any) -> Observed:
    """Return the observation of an engine, in whatever form it runs."""
    found = getattr(getattr(engine, "engine", engine), "observation", None)
    if found is None:
        raise ConfigError(f"engine is {shown(engine)}; give an Engine, EngineThread or EngineDesk")
    observed: Observed = found
    return observed
