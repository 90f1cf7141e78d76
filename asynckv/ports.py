"""What the engine needs from outside: a clock, a control plane, a data plane, and a copy plane where it has tiers.

The *control plane* carries packets between ranks and promises nothing. The *data plane* moves bytes from remote memory
into ours, and promises one thing only: it never says that a transfer has ended while that transfer may still write.

The words of the data plane are NIXL's. An *agent* registers memory and reads; with its *metadata* a remote agent can
read from it. A read names descriptors by their index in a *table* (`DescTable`). A plane prepares the descriptor lists
of a table when it first posts one of its reads, keeps them within bounds, and never releases them under a transfer.

The *copy plane* moves bytes between the rank's own memory (*near*) and that of its tiers (*far*), by the same tables
and with the same promise, on threads of its own. A *move* is all that one caller wants copied at a time; it has one
ending. The *record plane* keeps whole records of such a memory in files, or wherever else bytes outlive the process.

All planes live on the engine's event loop, and their methods are called on its thread. None blocks for longer than one
call to the library beneath. What a plane's threads find comes back through `on_ready` and `poll`, on the loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest


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
        on_packet: Callable[[Address | ReplyTo, bytes, str], None],
        on_refused: Callable[[str, str], None] = lambda cause, who: None,
    ) -> None:
        """Bind the listener and deliver every incoming packet to `on_packet` on the event loop.

        `on_packet` is told the origin, the bytes, and the principal: `key:` and the key that the connection proved,
        `host:` and its address where there are no keys, and nothing for an answer over a link of ours. A `ReplyTo`
        means one connection and is never used again.

        `on_refused` is told who was not let in, or may not be talked to, and in a word why. `ended` means that the
        plane has ended by itself, and comes with the reason.

        Raises:
            BackendError: The address cannot be bound.
        """

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        """Send, connecting first if `to` is an address; False if the packet was dropped."""

    def refusal(self, to: Address | ReplyTo) -> str:
        """Say why no packet can be sent there, and the remedy; empty if one can.

        Of a connection it is asked right after `send` returned False: it has ended, or its peer only reads too little.
        """

    def host(self, address: Address) -> str:
        """Name the host that the link to an address goes to by what it cannot make up: its IP address, not its name."""

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
    is_trusted: bool = True
    """It came with a key that is listed here, or from this host."""
    host: str = ""
    """What it came from, as `ControlPlane.host` says."""


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

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
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


# -- tiers ---------------------------------------------------------------------------------------------------


class CopyOp(enum.StrEnum):
    """Which way bytes go, seen from the rank's own memory; NIXL's words."""

    READ = "read"
    """From a tier: blocks are loaded, records are fetched."""
    WRITE = "write"
    """To a tier: blocks are stored, records are written."""


class _MovePlane(Protocol):
    """What copy planes and record planes have in common."""

    def cancel(self, move_id: TransferId) -> None:
        """Begin nothing more of a move. It ends like any other, once all that had begun has; harmless afterwards."""

    def statistics(self) -> dict[str, int]:
        """Gauges and counters."""

    def describe(self) -> dict[str, str]:
        """Versions, transports and modes in use, for reports."""

    async def quiesce(self, timeout_s: float | None = None) -> None:
        """Before `close`: finish what runs, stop threads, and wait off the loop, so long at most. Idempotent."""

    def close(self) -> None:
        """End everything; nothing reads or writes the memory afterwards. Idempotent. Waits for threads, if any.

        Moves that had not ended have `FAILED`; a last `poll` tells.

        Raises:
            BackendError: Something is still inside the back end, or the system, and may write: keep the memory, and
                call again.
        """


class CopyPlane(_MovePlane, Protocol):
    """Copies between a rank's own memory and that of its tiers, by the tables of `asynckv/geometry`.

    A table's local side is near, its remote side is far, whichever way the bytes go.
    """

    def start(self, near: Sequence[Memory], far: Mapping[str, Sequence[Memory]], on_ready: Callable[[], None]) -> None:
        """Register all memory, the near as tables count it, and the far by the names that moves give.

        From now on `on_ready` is called on the loop when `poll` has news. May follow `close`.

        Raises:
            BackendError: No usable back end, or it refuses the memory.
        """

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterable[ReadRequest]) -> None:
        """Take over a move, whose id no other has that has not ended; `poll` will tell what became of it. Never raises.

        Moves that read go before moves that write, and among equals the oldest first. The pieces (such as `Plan.posts`
        makes them) may be lazy: the plane takes them one by one. Small ones (some MiB) let others in between, and end
        sooner if the move is cancelled.
        """

    def poll(self) -> Sequence[TransferEnded]:
        """Moves that have ended, or are in doubt, since the last call. Never blocks.

        After `DONE`, `FAILED` and `REFUSED` nothing of the move reads or writes either side. After `IN_DOUBT` something
        may, and one of the others follows once it cannot.
        """


class Record(NamedTuple):
    """One record to move between memory and a record plane."""

    key: bytes
    """What its bytes are bound to: nothing else is ever read under this key."""
    near: int
    """Where it lies in memory: bytes from the start of what `start` was given."""
    far: int
    """Where it lies in the record plane's range: bytes from its start."""
    size: int
    layout: str = ""
    """Fingerprint of the packed layout that the bytes are in."""
    tag: str = ""
    """For people: the group that it belongs to."""


class Stored(NamedTuple):
    """What a record plane found when it started."""

    key: bytes
    far: int
    size: int
    layout: str
    tag: str


class RecordsEnded(NamedTuple):
    """A move of records has ended, or is in doubt."""

    move_id: TransferId
    ending: Ending
    cause: str = ""
    lost: tuple[int, ...] = ()
    """Of a move that `FAILED`: the positions of records that are not there, and never will be (their bytes were not
    what had been stored, or could not be read). If there are any, all others of the move are good."""


class RecordsLost(NamedTuple):
    """A record plane takes no more writes, or nothing at all; said once. What is posted from now on fails at once."""

    cause: str
    """What happened, with the numbers and the remedy."""
    reads: bool
    """Nothing is read either."""


RecordNews = RecordsEnded | RecordsLost

FOUND_DAMAGED = ("index_damaged", "missing", "malformed", "overlapping")
"""What a plane may have found at its start instead of records: in `statistics` with `found_` before it."""


class RecordPlane(_MovePlane, Protocol):
    """Keeps whole records beyond the life of the process, in a range of addresses that its user divides.

    It is a cache: whatever it says to have may turn out to be lost, and then a read `FAILED`. What was written of a
    cancelled move is forgotten; `quiesce` writes the index, and `close` lets others in.
    """

    @property
    def num_bytes(self) -> int:
        """Length of its range."""

    def start(
        self, memory: Memory, on_ready: Callable[[], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> Sequence[Stored]:
        """Open what is there, register the memory that records come from and go to, and say what was found: the oldest
        first.

        It may take seconds, so it may be called on another thread, with the loop that everything else is called on.

        Raises:
            BackendError: It cannot be opened, has no room, or belongs to a process that lives; says what to do.
        """

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        """Take over a move; `poll` will tell. Reads go before writes. Never raises for what the back end does.

        No two moves that have not ended may have a place in common, in memory or in the range.
        """

    def forget(self, places: Iterable[int]) -> None:
        """Drop the records that begin at some places, before anything that is posted later; harmless if none does."""

    def keep_layout(self, fingerprint: str, body: bytes) -> None:
        """Write down what the layout of records is, for those who find them later."""

    def poll(self) -> Sequence[RecordNews]:
        """What has ended since the last call, as for `CopyPlane`. Never blocks."""
