"""What the engine needs from outside: a clock, a control plane and a data plane.

Both planes live on the engine's event loop, and all their methods are called on its thread. Neither
ever blocks longer than one call to the library beneath takes. A plane may have threads of its own; what they
find comes back through `on_ready` and `poll`, on the loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import DescTable

__all__ = [
    "AgentLost",
    "AgentReplaced",
    "Clock",
    "ControlPlane",
    "DataNews",
    "DataPlane",
    "Ended",
    "Ending",
    "TimerHandle",
]

IndexArray = npt.NDArray[np.int32]


class TimerHandle(Protocol):
    """A timer that can be taken back."""

    def cancel(self) -> None:
        """Forget the callback; harmless after it ran."""


class Clock(Protocol):
    """The only place where time is read."""

    def now(self) -> float:
        """Seconds since some fixed moment, counting time spent suspended."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back on the event loop once `now() >= when`."""


class ControlPlane(Protocol):
    """Carries packets: one listener, and one outgoing link per remote rank's address.

    Delivery is at most once per call, in order per link, without any promise: the core repeats what
    matters. A queue that is full drops the packet and counts it.
    """

    @property
    def address(self) -> Address:
        """The address that others should use; valid after `start`."""

    async def start(
        self,
        on_packet: Callable[[Address | ReplyTo, bytes], None],
        on_refused: Callable[[str, str], None] = lambda cause, who: None,
    ) -> None:
        """Bind the listener and deliver every incoming packet to `on_packet` on the event loop.

        `on_refused` is told, in a word, why somebody was not let in, or may not be talked to, and who it is.

        Raises:
            BackendError: The address cannot be bound.
        """

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        """Send, connecting first if `to` is an address; False if the packet was dropped."""

    def refusal(self, address: Address) -> str:
        """Say why no packet can be sent to an address, and the remedy; empty if one can."""

    def disconnect(self, address: Address) -> None:
        """Drop the link to an address; harmless if there is none."""

    def statistics(self) -> dict[str, int]:
        """Counters: packets and bytes in and out, drops by cause."""

    async def aclose(self) -> None:
        """Close everything, keeping sent packets moving for a moment. Idempotent."""


class Ending(enum.StrEnum):
    """What is known about a posted transfer that is no longer simply running."""

    DONE = "done"
    """All bytes are in place."""
    FAILED = "failed"
    """It failed, and it is proven that nothing will be written any more."""
    IN_DOUBT = "in_doubt"
    """It failed, but it may still write. `DONE` or `FAILED` may follow, or nothing at all."""


@dataclass(frozen=True, slots=True)
class Ended:
    """News of one transfer."""

    transfer_id: TransferId
    ending: Ending
    cause: str = ""
    peer_lost: bool = False
    """The failure says that the remote process is gone."""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent that remote readers reach has ended by itself. Another follows (`AgentReplaced`)."""

    cause: str
    pause_s: float = 0.0
    """Seconds until the next serves, because too many have ended."""
    reads: bool = True
    """It posted our reads as well: all that was loaded is gone, peers and tables, and every transfer was reported."""


@dataclass(frozen=True, slots=True)
class AgentReplaced:
    """Another agent serves the same memory, by another name."""

    agent_name: str
    metadata: bytes
    cause: str
    """Why the one before ended."""
    seconds: float
    """How long there was none."""
    transfers_failed: int
    """Transfers that ended with the one before."""


DataNews = Ended | AgentLost | AgentReplaced


class DataPlane(Protocol):
    """Moves bytes between registered memories."""

    def start(self, on_ready: Callable[[], None]) -> None:
        """Create the agent. From now on `on_ready` is called on the loop when `poll` may have news.

        May follow `close`: another start has an agent of another name, and nothing of the one before.

        Raises:
            BackendError: No usable back end.
        """

    def register(self, memories: Sequence[Memory]) -> None:
        """Register local memory, before any metadata is given out.

        Raises:
            BackendError: The back end refuses.
        """

    @property
    def agent_name(self) -> str:
        """Unique per agent, in this process and all others: another for every `start` and `AgentReplaced`."""

    def metadata(self) -> bytes:
        """Opaque bytes with which a remote data plane can reach this one's memory."""

    async def prepare_peer(self, name: str, metadata: bytes) -> None:
        """Load a remote rank's metadata.

        `name` is the remote plane's `agent_name`. A plane may be reached by several addresses: it is loaded as often
        as it is asked for, and gone when it was removed as often.

        Raises:
            BackendError: Metadata refused, peer not reachable.
        """

    def add_table(self, name: str, table: DescTable, memories: Sequence[Memory], remote: Sequence[Memory]) -> None:
        """Prepare descriptor lists for a piece table of a prepared peer.

        Raises:
            BackendError: The back end refuses.
        """

    def remove_table(self, name: str, table_id: int) -> None:
        """Forget a piece table. Never called while a transfer of it is posted or in doubt."""

    def remove_peer(self, name: str, *, keep: bool = False) -> None:
        """Forget a peer. Never called while one of its transfers is posted.

        `keep` says that its process lives and may be met again: what is costly to open may be kept, within bounds.
        """

    def post_read(
        self, transfer_id: TransferId, name: str, table_id: int, local: IndexArray, remote: IndexArray
    ) -> Ended | None:
        """Start reading, or hand it to a thread that will; news at once if it already ended, else `poll` will tell.

        `local` and `remote` are equally long arrays of descriptor indices into the table. Never
        raises for what the back end does: a failed post is news.
        """

    def poll(self) -> Sequence[DataNews]:
        """News since the last call, in order, and progress for remote readers. Never blocks.

        A transfer is reported `DONE` or `FAILED` once; its handle is released by then.
        """

    def watch(self, serving: bool) -> None:
        """Say whether remote readers may need this plane's progress (leases or handshakes are open)."""

    def statistics(self) -> dict[str, int]:
        """Gauges and counters: handles, in doubt, posted, wake-ups, back end facts."""

    def describe(self) -> dict[str, str]:
        """Versions, transports and modes in use, for reports."""

    async def quiesce(self) -> None:
        """Before `close`: stop threads, and wait for them off the loop, so that `close` does not.

        Idempotent. Only `close` says whether they came to an end.
        """

    def close(self) -> None:
        """Deregister and destroy the agent; nothing writes afterwards. Idempotent. Waits for threads, if any.

        Raises:
            BackendError: Something is still inside the back end and may write. What could be closed is closed; call
                again to wait again.
        """
