"""What the engine needs from outside: a clock, a control plane and a data plane.

The *clock* says what time it is and calls back later. The *control plane* carries packets between ranks and promises
nothing. The *data plane* moves bytes from remote memory into ours, and promises one thing only, the one on which
everything else stands: it never says that a transfer has ended while that transfer may still write.

The words of the data plane are NIXL's. An *agent* is what registers memory and reads; it has a name, and *metadata*
with which a remote agent can read from it. A read names descriptors by their index in a *table* (`DescTable`), and NIXL
wants the two sides of a table prepared as *descriptor lists* before it takes indices. When that happens is the plane's
own business: on the first read of a table, in the place that posts it. So a read carries its table, nobody announces
tables or takes them back, and a plane keeps what it has prepared for as long as it likes, within bounds, but never
releases it under a transfer.

The life of a data plane: `start` with the memory that is to be read and written; `add_remote_agent` for everybody who
is read from; `post_read`, and `poll` for what becomes of it; `remove_remote_agent`; `quiesce` and `close`.

Both planes live on the engine's event loop, and all their methods are called on its thread. Neither
ever blocks longer than one call to the library beneath takes. A plane may have threads of its own; what they
find comes back through `on_ready` and `poll`, on the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from asynckv.core.events import TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest

__all__ = [
    "AgentInfo",
    "AgentLost",
    "AgentReplaced",
    "Clock",
    "ControlPlane",
    "DataNews",
    "DataPlane",
    "TimerHandle",
]


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


class AgentInfo(NamedTuple):
    """With what a remote data plane can reach an agent's memory."""

    name: str
    """Unique per agent, in this process and all others."""
    metadata: bytes
    """Opaque to all but the data planes."""


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The agent that remote readers reach has ended by itself. Another follows (`AgentReplaced`)."""

    cause: str
    pause_s: float = 0.0
    """Seconds until the next serves, because too many have ended."""
    reads: bool = True
    """It posted our reads as well: all remote agents are gone from it, and every transfer was reported."""


@dataclass(frozen=True, slots=True)
class AgentReplaced:
    """Another agent serves the same memory, by another name."""

    agent: AgentInfo
    cause: str
    """Why the one before ended."""
    seconds: float
    """How long there was none."""
    transfers_failed: int
    """Transfers that ended with the one before."""


DataNews = TransferEnded | AgentLost | AgentReplaced


class DataPlane(Protocol):
    """Moves bytes between registered memories."""

    def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        """Create an agent, register memory with it, and say with what remote planes reach it.

        From now on `on_ready` is called on the loop when `poll` may have news. May follow `close`: every start has an
        agent of another name, and nothing of the one before.

        Raises:
            BackendError: No usable back end, or it refuses the memory.
        """

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        """Load a remote rank's metadata, and note the memory that its tables speak of.

        A plane may be reached by several addresses: it is there as often as it was added, and gone when it was removed
        as often.

        Raises:
            BackendError: Metadata refused, remote process not reachable, or the name is taken by another.
        """

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        """Forget a remote agent. Never called while one of its transfers is posted or in doubt.

        `keep` says that its process lives and may be met again: what is costly to open may be kept, within bounds.
        """

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest) -> TransferEnded | None:
        """Start reading from an agent, or hand it to a thread that will; news if it has ended, else `poll` will tell.

        Never raises for what the back end does: a failed post is news, and so is a table that cannot be prepared.
        """

    def poll(self) -> Sequence[DataNews]:
        """News since the last call, in order, and progress for remote readers. Never blocks.

        A transfer is reported once with an ending that is final; its handle is released by then, or kept to be
        released later.
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
