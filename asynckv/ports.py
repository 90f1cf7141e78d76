"""Ports of the engine to the outside: a clock, a control plane, a data plane, and a copy plane if it has tiers.

The *control plane* carries packets between ranks and promises nothing. The *data plane* moves bytes from remote memory
into ours. It promises only that it never reports the end of a transfer that may still write.

The words of the data plane are NIXL's. An *agent* registers memory and reads; with its *metadata* a remote agent can
read from it. A read names descriptors by their index in a *table* (`DescTable`). A plane prepares the descriptor lists
of a table when it first posts one of its reads, keeps them within bounds, and never releases them under a transfer.

The *copy plane* moves bytes between the rank's own memory (*near*) and that of its tiers (*far*), by the same tables
and with the same promise, on threads of its own. A *move* is one caller's set of copies, and has one
ending. The *record plane* keeps whole records of such a memory in files, or elsewhere beyond the life of the process.

All planes live on the engine's event loop, and their methods are called on its thread. None blocks for longer than one
call to the library beneath. A plane's threads report through `on_ready` and `poll`, on the loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.geometry.gather import Gathered, Packing
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import ReadCosts


class TimerHandle(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None:
        """Forget the callback; harmless after it ran."""


class Clock(Protocol):
    """The time by which the core decides."""

    def now(self) -> float:
        """Seconds since some fixed moment, counting time spent suspended."""

    def cpu(self) -> float:
        """Seconds of CPU that the calling thread has used."""

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call back on the event loop once `now() >= when`."""


class ControlPlane(Protocol):
    """Carries packets: one listener, and one outgoing link per remote rank's address.

    Delivery is at most once per call, in order per link, and not promised, because the core repeats important messages.
    A full queue drops the packet and counts it.
    """

    @property
    def address(self) -> Address:
        """The address that others should use; valid after `start`."""

    async def start(
        self,
        on_packet: Callable[[Address | ReplyTo, bytes, str], bool | None],
        on_refused: Callable[[str, str], None] = lambda cause, peer: None,
    ) -> None:
        """Bind the listener and deliver every incoming packet to `on_packet` on the event loop.

        `on_packet` gets the origin, the bytes, and the principal: `key:` and the key that the connection proved,
        `host:` and its address if there are no keys, and an empty text for an answer over our own link. A `ReplyTo`
        means one connection and is never used again. `on_packet` returns True if that connection sends far too much, so
        that the plane may leave what follows unread for a while.

        `on_refused` gets a word for the cause, and the peer that was refused or must not be contacted. The cause
        `ended` means that the plane has ended by itself, and comes with the reason instead of a peer.

        Raises:
            BackendError: The address cannot be bound.
        """

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        """Send, connecting first if `to` is an address; False if the packet was dropped."""

    def refusal(self, to: Address | ReplyTo) -> str:
        """Say why no packet can be sent there, and the remedy; empty if one can.

        For a connection it is asked right after `send` returned False: the connection has ended, or its peer reads too
        slowly.
        """

    def host(self, address: Address) -> str:
        """Return the IP address at the end of the link to an address, because a host can make up its name."""

    def disconnect(self, address: Address) -> None:
        """Drop the link to an address; harmless if there is none."""

    def statistics(self) -> dict[str, int]:
        """Counters: packets and bytes in and out, drops by cause."""

    async def aclose(self) -> None:
        """Close everything, keeping sent packets moving for a moment. Idempotent."""


class AgentInfo(NamedTuple):
    """Data with which a remote data plane reaches an agent's memory."""

    name: str  # unique per agent, in this process and all others
    metadata: bytes  # opaque to all but the data planes
    is_trusted: bool = True  # True if it came with a key that is listed here, or from this host
    host: str = ""  # host that it came from, as `ControlPlane.host` returns it
    packing: Packing | None = None  # its memory for packed copies; None if it makes none


class AgentLost(NamedTuple):
    """The agent that remote readers reach has ended. Another follows (`AgentReplaced`). Our own reads go on."""

    cause: str
    pause_s: float = 0.0  # seconds until the next one serves, because too many have ended


class AgentReplaced(NamedTuple):
    """Another agent serves the same memory, under another name."""

    agent: AgentInfo
    cause: str  # reason for which the previous one ended
    seconds: float  # seconds without an agent


class CopyMade(NamedTuple):
    """A packed copy is in its slot; or not, for a cause."""

    slot: int
    cause: str = ""


DataNews = TransferEnded | AgentLost | AgentReplaced | CopyMade


class _Plane(Protocol):
    """Common methods of the planes that move bytes."""

    def statistics(self) -> dict[str, int]:
        """Gauges and counters: what is posted, running and in doubt, wake-ups, back end facts."""

    def describe(self) -> dict[str, str]:
        """Versions, transports and modes in use, for reports."""


class DataPlane(_Plane, Protocol):
    """Moves bytes between registered memories."""

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        """Create an agent, register memory with it, and return the data with which remote planes reach it.

        From now on `on_ready` is called on the loop when `poll` may have news. May follow `close`: every start has an
        agent of another name, without the state of the previous one.

        Raises:
            BackendError: No usable back end, or it refuses the memory.
        """

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        """Load a remote rank's metadata, and note the memory of its tables.

        A plane with several addresses is added once for each, and gone when it was removed as often.

        Raises:
            BackendError: Metadata refused, remote process not reachable, or the name is taken by another.
        """

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        """Forget a remote agent. Never called while one of its transfers is posted or in doubt.

        `keep` is True if its process lives and may be met again, so that costly resources may be kept within bounds.
        """

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        """Start reading from an agent, or hand the read to a thread; return news if it has ended, else `poll` reports
        it. A look is read into its place, and compared.

        Never raises for errors of the back end: a failed post is news, and so is a table that cannot be prepared.
        """

    @property
    def costs(self) -> ReadCosts | None:
        """Costs of reads, measured at the start, by which tables are staged or not; None if this plane stages none."""

    def detach(self, transfer_id: TransferId) -> bool:
        """Let a staged read place nothing from now on; return False if that cannot be promised, as for a direct read.

        The read itself goes on, into its slot, and `poll` still reports its end. Waits for one placement at most, which
        takes less than a millisecond.
        """

    def pack(self, slot: int, gathered: Gathered) -> None:
        """Make a packed copy of our memory in a slot, on a thread; `poll` reports the end. Only with `packing`.

        The memory may change meanwhile; the copy is then good for nothing, and is not announced.
        """

    def poll(self) -> Sequence[DataNews]:
        """Return news since the last call, in order, and make progress for remote readers. Never blocks.

        A transfer is reported once with an ending that is final; its handle is released by then, or kept to be
        released later.
        """

    def watch(self, serving: bool) -> None:
        """Set whether remote readers may need this plane's progress (leases or handshakes are open)."""

    async def quiesce(self) -> None:
        """Stop threads before `close`, and wait for them off the loop, so that `close` does not.

        Idempotent. Only `close` reports whether they ended.
        """

    def close(self) -> None:
        """Deregister and destroy the agent; nothing writes afterwards. Idempotent. Waits for threads, if any.

        Raises:
            BackendError: A call is still inside the back end and may write. Everything else is closed; call again to
                wait again.
        """


# -- tiers ---------------------------------------------------------------------------------------------------


class CopyOp(enum.StrEnum):
    """Direction of the bytes, seen from the rank's own memory; NIXL's words."""

    READ = "read"  # from a tier: blocks are loaded, records are fetched
    WRITE = "write"  # to a tier: blocks are stored, records are written


class _MovePlane(_Plane, Protocol):
    """Common methods of copy planes and record planes."""

    async def quiesce(self, timeout_s: float | None = None) -> None:
        """Finish running copies before `close`, stop threads; wait off the loop for at most `timeout_s`. Idempotent."""

    def close(self) -> None:
        """End everything; nothing reads or writes the memory afterwards. Idempotent. Waits for threads, if any.

        Moves that had not ended have `FAILED`; a last `poll` reports them.

        Raises:
            BackendError: A call is still inside the back end or the system and may write: keep the memory, and call
                again.
        """


class CopyPlane(_MovePlane, Protocol):
    """Copies between a rank's own memory and that of its tiers, by the tables of `asynckv/geometry`.

    A table's local side is near and its remote side is far, in both directions.
    """

    def start(self, near: Sequence[Memory], far: Mapping[str, Sequence[Memory]], on_ready: Callable[[], None]) -> None:
        """Register all memory: near memory in the order of the tables, far memory by the names that moves give.

        From now on `on_ready` is called on the loop when `poll` has news. May follow `close`.

        Raises:
            BackendError: No usable back end, or it refuses the memory.
        """

    def post(self, move_id: TransferId, op: CopyOp, far: str, pieces: Iterable[ReadRequest]) -> None:
        """Take over a move with an id that no unfinished move has; `poll` reports its end. Never raises.

        Moves that read go before moves that write, and among equals the oldest first. The pieces (such as those of
        `Plan.posts`) may be lazy, because the plane takes them one by one. Small pieces (some MiB) let other moves in
        between, and end sooner if the move is cancelled.
        """

    def cancel(self, move_id: TransferId) -> None:
        """Start no further copies of a move. It ends once its running copies have ended; harmless afterwards."""

    def poll(self) -> Sequence[TransferEnded]:
        """Return moves that have ended, or are in doubt, since the last call. Never blocks.

        After `DONE`, `FAILED` and `REFUSED` nothing of the move reads or writes either side. After `IN_DOUBT` a
        transfer may, and one of the other endings follows once it cannot.
        """


class Record(NamedTuple):
    """One record to move between memory and a record plane."""

    key: bytes  # identity of its bytes: no other bytes are ever read under this key
    near: int  # offset in memory: bytes from the start of the memory that `start` was given
    far: int  # offset in the record plane's range, in bytes
    size: int
    layout: str = ""  # fingerprint of the packed layout of the bytes
    tag: str = ""  # name of the record's group, for people


class StoredRecord(NamedTuple):
    """A record that a record plane found when it started."""

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
    """Positions of lost records of a move that `FAILED`: their bytes differed from the stored ones, or could not be
    read. If there are any, all other records of the move are good."""


class RecordsLost(NamedTuple):
    """A record plane takes no more writes, or no moves at all; reported once. Later moves fail at once."""

    cause: str  # description of the event, with the numbers and the remedy
    reads: bool  # True if records cannot be read either


RecordNews = RecordsEnded | RecordsLost

FOUND_DAMAGED = ("index_damaged", "missing", "malformed", "overlapping")
"""Kinds of damage that a plane may find at its start, in `statistics` with the prefix `found_`."""


class RecordPlane(_MovePlane, Protocol):
    """Keeps whole records beyond the life of the process, in a range of addresses that its user divides.

    It is a cache: each of its records may turn out to be lost, and then a read has `FAILED`. Written records of a write
    that `FAILED` are forgotten. `quiesce` writes the index, and `close` lets other processes in.
    """

    def start(
        self,
        memory: Memory,
        on_ready: Callable[[], None],
        loop: asyncio.AbstractEventLoop | None = None,
        layouts: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Sequence[StoredRecord]:
        """Open the records, register the memory that they move from and to, and return them, the oldest first.

        The `layouts` of records, encoded, are kept by their fingerprints for processes that find the records later.
        This may take seconds, so it may be called on another thread, with the loop of all other calls.

        Raises:
            BackendError: It cannot be opened, has no room, or belongs to a living process; the message has the remedy.
        """

    def post(self, move_id: TransferId, op: CopyOp, records: Sequence[Record]) -> None:
        """Take over a move; `poll` reports its end. Reads go before writes. Never raises for errors of the back end.

        Unfinished moves must not share a place, neither in memory nor in the range.
        """

    def forget(self, places: Iterable[int]) -> None:
        """Drop the records that begin at some places, before all later moves; harmless if none does."""

    def poll(self) -> Sequence[RecordNews]:
        """Return the moves that have ended since the last call, as `CopyPlane.poll` does. Never blocks."""
