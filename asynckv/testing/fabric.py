"""The one simulated network and the one simulated NIC for all tests of more than one rank.

A `Fabric` joins ranks. Packets go from `Port` to `Port`, and reads from `Nic` to `Nic`: `Nic.prepare` finds the bytes
of a read on both sides, and `Transfer.land` copies them; a staged read lands in its slot, and `Transfer.place` copies
its pieces from there. Every index and address is checked against the registered memory, so a mistake of the core is a
`Violation` and not a crash.

The driver of a fabric decides the times and the faults: `carry` gets each packet that was sent, and a prepared transfer
lands and ends when the driver says so. `SimNetwork`, `SimControl` and `SimData` drive one for real engines on any
asyncio loop; `tests.lab.world` drives another through seeded faults in virtual time.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.errors import BackendError
from asynckv.geometry.gather import Gathered, Packing
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import NUM_PLACES, PLACE_BYTES, Difference, Look, first_difference
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.staging import Box, ReadCosts
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, CopyMade, DataNews

Bytes = npt.NDArray[np.uint8]
Origin = Address | ReplyTo  # the address of a listener, or the route back to a peer that connected


def bytes_at(memory: Memory) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * memory.length).from_address(memory.base)), np.uint8)


class Violation(AssertionError): ...


class Fabric:
    """The connections of ranks: listening ports by address, asking ports by route, and agents by name."""

    def __init__(self) -> None:
        self.ports: dict[Origin, Port] = {}
        self.nics: dict[str, Nic] = {}

    def carry(self, sender: Port, receiver: Port, origin: Origin, packet: bytes) -> None:
        receiver.hear(origin, packet)


class Port:
    """The control plane of one rank, which sends and receives packets; `links` are the addresses that it has asked."""

    def __init__(self, fabric: Fabric, address: str, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.address, self.route = Address(address), ReplyTo(name.encode())
        self.links: set[Address] = set()
        self.is_open = False
        self.packets_in = self.packets_out = 0
        self._on_packet: Callable[[Origin, bytes, str], bool | None] = lambda origin, packet, principal: None

    def open(self) -> None:
        self.is_open = True
        self.fabric.ports[self.address] = self.fabric.ports[self.route] = self

    async def start(
        self,
        on_packet: Callable[[Origin, bytes, str], bool | None],
        on_refused: Callable[[str, str], None] = lambda cause, peer: None,
    ) -> None:
        self._on_packet = on_packet
        self.open()

    def send(self, to: Origin, packet: bytes) -> bool:
        """Hand a packet to the fabric; return False if it cannot arrive: this port is closed, or the asker hung up."""
        if not self.is_open:
            return False
        receiver = self.fabric.ports.get(to)
        origin: Origin
        if isinstance(to, bytes):
            if receiver is None or self.address not in receiver.links:
                return False
            origin = self.address
        else:
            self.links.add(to)
            origin = self.route
        self.packets_out += 1
        if receiver is not None:
            self.fabric.carry(self, receiver, origin, packet)
        return True

    def hear(self, origin: Origin, packet: bytes) -> None:
        if self.is_open and (isinstance(origin, bytes) or origin in self.links):
            self.packets_in += 1
            self._on_packet(origin, packet, f"host:{origin!r}" if isinstance(origin, bytes) else "")

    def refusal(self, to: Origin) -> str:
        return "it has hung up" if isinstance(to, bytes) else ""

    def host(self, address: Address) -> str:
        return address

    def disconnect(self, address: Address) -> None:
        self.links.discard(address)

    def statistics(self) -> dict[str, int]:
        return {"packets_in": self.packets_in, "packets_out": self.packets_out, "links": len(self.links)}

    async def aclose(self) -> None:
        self.is_open = False
        if self.fabric.ports.get(self.address) is self:
            del self.fabric.ports[self.address]


@dataclass(slots=True, eq=False)
class Transfer:
    """One read that was posted, or is about to be; the driver maintains the fields from `landed` on."""

    transfer_id: TransferId
    owner: Nic  # the NIC with the memory that it reads
    agent_name: str
    pieces: list[tuple[Bytes, Bytes]]  # target and source of each copy: our bytes or those of a slot, and theirs
    spots: list[tuple[int, int, int]]  # its targets: memory, start, and the length that counts as in flight
    places: list[tuple[Bytes, Bytes]]  # of a staged read: our bytes, and those of its slot
    direct: list[tuple[Bytes, Bytes]]  # of a staged read: our bytes, and theirs, in case that it has no slot
    owner_ends: int  # the owner's `ends` when it was posted
    landed: int = 0
    is_over: bool = False  # True if it writes no more, and its end was reported
    is_dead: bool = False  # True if it writes no more
    done_at: float = math.inf  # time at which it is done, if that is certain
    is_detached: bool = False  # True if it is staged, and was told to place nothing
    ours: Sequence[Bytes] = ()  # of a look: our bytes, with which the targets of its pieces are compared

    @property
    def is_staged(self) -> bool:
        return bool(self.places)

    @property
    def is_cut(self) -> bool:
        return self.owner.ends != self.owner_ends

    def land(self, upto: int | None = None) -> None:
        """Copy the next pieces, all that are left or those before `upto`."""
        upto = len(self.pieces) if upto is None else upto
        for target, source in self.pieces[self.landed : upto]:
            target[:] = source
        self.landed = max(self.landed, upto)

    @property
    def difference(self) -> Difference | None:
        """The first difference that a look has found."""
        return (
            first_difference(zip(self.ours, [target for target, _ in self.pieces], strict=True)) if self.ours else None
        )

    def place(self) -> None:
        """Copy the pieces of a staged read, all of which has landed, from its slot to their places."""
        if self.is_detached:
            raise Violation(f"transfer {self.transfer_id} is placed after it was detached")
        for target, source in self.places:
            target[...] = source


def _placed(box: Box, array: Bytes, start: int, run: Bytes) -> tuple[Bytes, Bytes]:
    """Return the pieces of a run as they lie in our memory, from `start` on, and in the run."""
    shape = (*box.shape, box.piece)
    try:
        return (
            np.ndarray(shape, np.uint8, array.data, start, (*box.in_local, 1)),
            np.ndarray(shape, np.uint8, run.data, box.skip, (*box.in_run, 1)),
        )
    except (TypeError, ValueError) as exc:
        raise Violation(f"pieces lie outside of registered memory: {exc}") from exc


@dataclass(slots=True)
class _Remote:
    nic: Nic
    memories: tuple[Memory, ...]  # as the peer announced them
    users: int = 0


class Nic:
    """A data plane without the ends of its reads: registered memory, the agent that serves it, known remote agents, and
    packed copies.

    Args:
        name: Name of the first agent; the next ones have this name and a number.
        host: Name of the process that it is in.
        arrays: The bytes of its memory. Without them, the bytes at the addresses of the memory are used.

    Attributes:
        ends: Number of times that reads of its memory were cut off; counted by a driver with transfers that may outlive
            their owner.
    """

    def __init__(self, fabric: Fabric, name: str, host: str = "", arrays: Sequence[Bytes] = ()) -> None:
        self.fabric, self.name, self.host = fabric, name, host or name
        self.memories: tuple[Memory, ...] = ()
        self.arrays: Sequence[Bytes] = arrays
        self.running: dict[TransferId, Transfer] = {}
        self.remotes: dict[str, _Remote] = {}
        self.starts = self.ends = self.posts = 0
        self.costs: ReadCosts | None = None  # costs of its reads; None if it stages none
        self.packing: Packing | None = None
        self._copies = self._places = np.empty(0, np.uint8)
        self._base_name, self._given = name, arrays
        self._news: list[DataNews] = []
        self._on_ready: Callable[[], None] = lambda: None

    # -- our memory, and the agent by which it is read -------------------------------------------------

    @property
    def agent(self) -> AgentInfo:
        return AgentInfo(self.name, self.name.encode(), packing=self.packing)

    def make_copies(self, num_slots: int, slot_bytes: int) -> None:
        """Have memory for packed copies from now on."""
        self._copies = np.zeros(num_slots * slot_bytes, np.uint8)
        self.packing = Packing(self._copies.ctypes.data, num_slots, slot_bytes)

    def gather(self, slot: int, gathered: Gathered, part: slice = slice(None)) -> None:
        """Make a packed copy, or a part of its pieces."""
        if self.packing is None:
            raise Violation(f"{self.host} has no memory for packed copies")
        begin, pieces = slot * self.packing.slot_bytes, []
        for memory, offset, stride, piece, shape, strides in gathered.rows:
            for block in gathered.blocks.tolist():
                for place in np.ndindex(shape):
                    start = offset + block * stride + sum(i * step for i, step in zip(place, strides, strict=True))
                    pieces.append((begin, self.arrays[memory][start : start + piece]))
                    begin += piece
        if begin > (slot + 1) * self.packing.slot_bytes:
            raise Violation(f"{self.host} packs {begin} bytes beyond slot {slot}")
        for at, data in pieces[part]:
            self._copies[at : at + len(data)] = data

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        return self.begin(memories, on_ready)

    def begin(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        self.arrays = self._given or [bytes_at(memory) for memory in memories]
        self.memories, self._on_ready = tuple(memories), on_ready
        self.starts += 1
        return self.join()

    def join(self) -> AgentInfo:
        if self.starts > 1:
            self.name = f"{self._base_name}-{self.starts}"
        self.fabric.nics[self.name] = self
        return self.agent

    def leave(self) -> None:
        if self.fabric.nics.get(self.name) is self:
            del self.fabric.nics[self.name]

    def close(self) -> None:
        """Leave the fabric; as with NIXL, nothing is written any more without its agent."""
        self.leave()
        self.memories = ()
        for what in (self.running, self.remotes, self._news):
            what.clear()

    # -- what is read ----------------------------------------------------------------------------------

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        nic = self.fabric.nics.get(agent.metadata.decode(errors="replace"))
        if nic is None or nic.name != agent.name:
            raise BackendError(f"no agent {agent.name!r} behind its metadata")
        self.load(agent.name, nic, memories)

    def lose(self, owner: Nic) -> None:
        """Note that the agent of `owner`, from which this NIC may read, has ended; drivers override this."""

    def load(self, name: str, nic: Nic, memories: Sequence[Memory]) -> None:
        self.remotes.setdefault(name, _Remote(nic, tuple(memories))).users += 1

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        if (remote := self.remotes.get(name)) is None:
            return
        remote.users -= 1
        if not remote.users:
            for transfer in self.running.values():
                if transfer.agent_name == name:
                    raise Violation(f"{self.host} removes {name} under transfer {transfer.transfer_id}")
            del self.remotes[name]

    def prepare(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> Transfer:
        """Find the bytes of a read from a loaded agent.

        Raises:
            BackendError: The read's table names memory that does not exist.
            IndexError: The read names descriptors that its table does not have.
            Violation: The read would touch bytes that are not registered.
        """
        remote = self.remotes[name]
        if isinstance(read, Look):
            return self._prepare_look(transfer_id, name, remote, read)
        table = read.table
        if read.slot >= 0:
            return self._prepare_packed(transfer_id, name, remote.nic, read)
        pieces, spots, places, direct = [], [], [], []
        for a, b in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            (row, mine), (other, theirs) = divmod(a, table.local_blocks), divmod(b, table.remote_blocks)
            if not 0 <= row < table.num_rows:
                raise IndexError(f"descriptor {a} is outside the table")
            (memory, offset, stride), (far, behind, step) = table.local[row].tolist(), table.remote[row].tolist()
            if memory >= len(self.arrays) or far >= len(remote.memories):
                raise BackendError(f"table {table.table_id} names memory that does not exist")
            source, begin = remote.nic._registered(remote.memories[far])
            array, length = self.arrays[memory], int(table.length[row])
            start, origin = offset + mine * stride, begin + behind + theirs * step
            target, data = array[start : start + length], source[origin : origin + length]
            if table.boxes:
                target = np.empty(length, np.uint8)
                places.append(_placed(table.box(row), array, start, target))
                direct.append(_placed(table.box(row), array, start, data))
            if row != other or len(target) != length or len(data) != length:
                raise Violation(f"{self.host} reads outside of registered memory")
            pieces.append((target, data))
            spots.append((memory, start, int(table.row_bytes[row]) if table.pack_bytes else length))
        return Transfer(transfer_id, remote.nic, name, pieces, spots, places, direct, remote.nic.ends)

    def _prepare_packed(self, transfer_id: TransferId, name: str, owner: Nic, read: ReadRequest) -> Transfer:
        """Find the bytes of a packed copy, row after row and block after block."""
        if owner.packing is None or read.slot >= owner.packing.num_slots:
            raise Violation(f"{self.host} reads slot {read.slot}, which {name} does not have")
        begin, pieces, spots = read.slot * owner.packing.slot_bytes, [], []
        for row, block in (divmod(index, read.table.local_blocks) for index in read.local.tolist()):
            memory, offset, stride = read.table.local[row].tolist()
            start, length = offset + block * stride, int(read.table.row_bytes[row])
            pieces.append((self.arrays[memory][start : start + length], owner._copies[begin : begin + length]))
            spots.append((memory, start, length))
            begin += length
        return Transfer(transfer_id, owner, name, pieces, spots, [], [], owner.ends)

    def _prepare_look(self, transfer_id: TransferId, name: str, remote: _Remote, look: Look) -> Transfer:
        pieces, ours, at = [], [], look.place * PLACE_BYTES
        if not len(self._places):
            self._places = np.empty(NUM_PLACES * PLACE_BYTES, np.uint8)
        for memory, offset, far, behind, length in look.pieces[:, :5].tolist():
            source, begin = remote.nic._registered(remote.memories[far])
            mine, theirs = self.arrays[memory][offset : offset + length], source[begin + behind :][:length]
            if len(mine) != length or len(theirs) != length:
                raise Violation(f"{self.host} looks outside of registered memory")
            pieces.append((self._places[at : at + length], theirs))
            ours.append(mine)
            at += length
        return Transfer(transfer_id, remote.nic, name, pieces, [], [], [], remote.nic.ends, ours=ours)

    def _registered(self, told: Memory) -> tuple[Bytes, int]:
        for memory, array in zip(self.memories, self.arrays, strict=True):
            if memory.base <= told.base and told.base + told.length <= memory.base + memory.length:
                return array, told.base - memory.base
        raise Violation(f"{self.host} has not registered {told}")

    def detach(self, transfer_id: TransferId) -> bool:
        transfer = self.running.get(transfer_id)
        if transfer is None or not transfer.is_staged:
            return False
        transfer.is_detached = True
        return True

    # -- the rest of the port --------------------------------------------------------------------------

    def poll(self) -> list[DataNews]:
        news, self._news = self._news, []
        return news

    def watch(self, serving: bool) -> None: ...

    def statistics(self) -> dict[str, int]:
        return {"posts": self.posts, "running": len(self.running), "peers": len(self.remotes)}

    def describe(self) -> dict[str, str]:
        return {"backend": "simulated"}

    async def quiesce(self) -> None: ...


# -- for real engines, on any event loop -----------------------------------------------------------------


Fate = Literal["deliver", "drop", "hold", "repeat"]


class SimNetwork(Fabric):
    """A network that connects simulated planes of one process.

    Attributes:
        fate: Decides over every packet, given the addresses of sender and receiver; delivers by default.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fate: Callable[[str, str, bytes], Fate] = lambda sender, to, packet: "deliver"
        self.held: list[Callable[[], None]] = []  # calls that deliver the packets that `hold` kept back
        self._addresses = itertools.count(1)

    def new_address(self) -> Address:
        return Address(f"sim://{next(self._addresses)}")

    def carry(self, sender: Port, receiver: Port, origin: Origin, packet: bytes) -> None:
        """Let `fate` decide over one packet; a delivered packet arrives in the loop's next turn."""
        deliver = partial(receiver.hear, origin, packet)
        fate = self.fate(sender.address, receiver.address, packet)
        if fate == "hold":
            self.held.append(deliver)
        for _ in range({"deliver": 1, "repeat": 2}.get(fate, 0)):
            asyncio.get_running_loop().call_soon(deliver)

    def release(self) -> None:
        """Deliver the held packets, in order."""
        held, self.held = self.held, []
        for deliver in held:
            asyncio.get_running_loop().call_soon(deliver)

    def crash(self, agent_name: str) -> None:
        """End a data plane without a message to peers; reads from it fail, including those in flight."""
        owner = self.nics[agent_name]
        owner.leave()
        for nic in self.nics.values():
            nic.lose(owner)


class SimControl(Port):
    """A control plane on a `SimNetwork`."""

    def __init__(self, network: SimNetwork) -> None:
        address = network.new_address()
        super().__init__(network, address, address)


class SimData(Nic):
    """A data plane on a `SimNetwork`."""

    def __init__(self, network: SimNetwork, agent_name: str) -> None:
        super().__init__(network, agent_name)
        self._network = network
        self.deferred = False  # if True, reads run until `finish`; otherwise they are done when posted

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        self.posts += 1
        if name not in self.fabric.nics:
            return TransferEnded(transfer_id, Ending.FAILED, "the remote process is gone", peer_lost=True)
        if name not in self.remotes:
            return TransferEnded(transfer_id, Ending.FAILED, f"peer {name} is not loaded")
        try:
            transfer = self.prepare(transfer_id, name, read)
        except BackendError as exc:
            return TransferEnded(transfer_id, Ending.REFUSED, str(exc))
        except IndexError as exc:
            return TransferEnded(transfer_id, Ending.FAILED, str(exc))
        if self.deferred:
            self.running[transfer_id] = transfer
            return None
        return self._done(transfer)

    def pack(self, slot: int, gathered: Gathered) -> None:
        self.gather(slot, gathered)
        self.report(CopyMade(slot))

    def _done(self, transfer: Transfer) -> TransferEnded:
        transfer.land()
        if transfer.is_detached:
            return TransferEnded(transfer.transfer_id, Ending.FAILED, "it was detached")
        transfer.place()
        return TransferEnded(transfer.transfer_id, Ending.DONE, difference=transfer.difference)

    def finish(self, transfer_id: TransferId | None = None) -> None:
        """Complete one read, or all."""
        for one in [transfer_id] if transfer_id is not None else list(self.running):
            self.report(self._done(self.running.pop(one)))

    def fail(self, transfer_id: TransferId, *, peer_lost: bool = False) -> None:
        del self.running[transfer_id]
        self.report(TransferEnded(transfer_id, Ending.FAILED, "failed on request", peer_lost))

    def doubt(self, transfer_id: TransferId) -> None:
        """Report trouble with a read that goes on, so that `finish` may still complete it, unless it is staged."""
        ending = Ending.DETACHED if self.detach(transfer_id) else Ending.IN_DOUBT
        self.report(TransferEnded(transfer_id, ending, "in doubt on request"))

    def lose(self, owner: Nic) -> None:
        """Fail all reads from `owner` at once, because its process died."""
        for transfer in [t for t in self.running.values() if t.owner is owner]:
            self.fail(transfer.transfer_id, peer_lost=True)

    def lose_agent(self) -> None:
        """End like a process that serves and dies: reads from this plane fail, and its own go on."""
        self._network.crash(self.name)
        self.report(AgentLost("killed on request"))

    def replace_agent(self) -> None:
        """Serve again after `lose_agent`, under another name."""
        self.starts += 1
        self.report(AgentReplaced(self.join(), "killed on request", 0.0))

    def report(self, news: DataNews) -> None:
        self._news.append(news)
        asyncio.get_running_loop().call_soon(self._on_ready)
