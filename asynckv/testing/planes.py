"""Simulated planes: packets and bytes move within one process, and go wrong when told to.

Data really moves, between the registered addresses, and every index and address is checked against
what was registered: a mistake in the core is an `AssertionError`, not a crash.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import DescTable, ReadRequest
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, DataNews

__all__ = ["SimControl", "SimData", "SimNetwork"]

Fate = Literal["deliver", "drop", "hold", "repeat"]


class SimNetwork:
    """What connects simulated planes of one process.

    Attributes:
        fate: Decides over every packet, given who sends it to whom; delivers by default.
        held: Packets that `hold` kept back, as calls that deliver them.
    """

    def __init__(self) -> None:
        self.controls: dict[Address, SimControl] = {}
        self.agents: dict[str, SimData] = {}
        self.fate: Callable[[str, str, bytes], Fate] = lambda sender, to, packet: "deliver"
        self.held: list[Callable[[], None]] = []
        self._ports = 0

    def new_address(self) -> Address:
        """Make up an address."""
        self._ports += 1
        return Address(f"sim://{self._ports}")

    def carry(self, sender: str, to: str, packet: bytes, deliver: Callable[[], None]) -> None:
        """Let fate decide over one packet."""
        loop = asyncio.get_running_loop()
        match self.fate(sender, to, packet):
            case "deliver":
                loop.call_soon(deliver)
            case "repeat":
                loop.call_soon(deliver)
                loop.call_soon(deliver)
            case "hold":
                self.held.append(deliver)
            case "drop":
                pass

    def release(self) -> None:
        """Deliver what was held, in order."""
        held, self.held = self.held, []
        for deliver in held:
            asyncio.get_running_loop().call_soon(deliver)

    def crash(self, agent_name: str) -> None:
        """End a data plane without a word: reads from it fail, those that run as well."""
        self.agents.pop(agent_name)
        for data in self.agents.values():
            for transfer_id in [t for t, (source, _) in data.running.items() if source == agent_name]:
                data.fail(transfer_id, peer_lost=True)


class SimControl:
    """A control plane on a `SimNetwork`."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._address = network.new_address()
        self._on_packet: Callable[[Address | ReplyTo, bytes], None] | None = None
        self._links: set[Address] = set()
        self._counts: Counter[str] = Counter(packets_in=0, packets_out=0)

    @property
    def address(self) -> Address:
        """Where others reach this one."""
        return self._address

    async def start(
        self,
        on_packet: Callable[[Address | ReplyTo, bytes], None],
        on_refused: Callable[[str, str], None] = lambda cause, who: None,
    ) -> None:
        """Listen."""
        self._on_packet = on_packet
        self._network.controls[self._address] = self

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        """Hand a packet to the network."""
        if self._on_packet is None:
            return False
        if isinstance(to, bytes):
            # A route is the asker's address; it hears the answer as coming from ours.
            asker = self._network.controls.get(Address(to.decode(errors="replace")))
            if asker is None or self._address not in asker._links:
                self._counts["dropped_out"] += 1
                return False
            self._counts["packets_out"] += 1
            self._network.carry(self._address, asker._address, packet, lambda: asker._deliver(self._address, packet))
            return True
        self._links.add(Address(to))
        self._counts["packets_out"] += 1
        origin = ReplyTo(self._address.encode())

        def deliver() -> None:
            listener = self._network.controls.get(Address(to))
            if listener is not None:
                listener._deliver(origin, packet)

        self._network.carry(self._address, to, packet, deliver)
        return True

    def refusal(self, address: Address) -> str:
        """Whoever can be named can be asked."""
        return ""

    def disconnect(self, address: Address) -> None:
        """Drop a link."""
        self._links.discard(address)

    def statistics(self) -> dict[str, int]:
        """Count packets."""
        return {**self._counts, "links": len(self._links)}

    async def aclose(self) -> None:
        """Listen no more."""
        self._on_packet = None
        if self._network.controls.get(self._address) is self:
            del self._network.controls[self._address]

    def _deliver(self, origin: Address | ReplyTo, packet: bytes) -> None:
        if self._on_packet is not None and (isinstance(origin, bytes) or origin in self._links):
            self._counts["packets_in"] += 1
            self._on_packet(origin, packet)


class SimData:
    """A data plane on a `SimNetwork`.

    Attributes:
        deferred: Reads stay running until `finish`; otherwise they are done when posted.
        running: Reads that are posted and not done.
    """

    def __init__(self, network: SimNetwork, agent_name: str) -> None:
        self._network, self._name, self._base_name = network, agent_name, agent_name
        self._starts = 0
        self.deferred = False
        self.running: dict[TransferId, tuple[str, Callable[[], None]]] = {}
        self.memories: tuple[Memory, ...] = ()
        self._remotes: dict[str, Sequence[Memory]] = {}
        self._users: Counter[str] = Counter()
        self._news: list[DataNews] = []
        self._on_ready: Callable[[], None] = lambda: None
        self._counts: Counter[str] = Counter(posts=0)

    def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        """Join the network, and remember what may be read and written."""
        self._starts += 1
        if self._starts > 1:
            self._name = f"{self._base_name}-{self._starts}"
        self.memories, self._on_ready = tuple(memories), on_ready
        self._network.agents[self._name] = self
        return self.agent

    @property
    def agent(self) -> AgentInfo:
        """How this plane is reached now."""
        return AgentInfo(self._name, self._name.encode())

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        """Check name and metadata."""
        name = agent.name
        if agent.metadata.decode(errors="replace") != name or name not in self._network.agents:
            raise BackendError(f"no agent {name!r} behind its metadata")
        self._remotes.setdefault(name, tuple(memories))
        self._users[name] += 1

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        """Forget a remote agent."""
        if name in self._users:
            self._users[name] -= 1
            if not self._users[name]:
                del self._remotes[name], self._users[name]

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest) -> TransferEnded | None:
        """Copy now, or when told."""
        self._counts["posts"] += 1
        if name not in self._network.agents:
            return TransferEnded(transfer_id, Ending.FAILED, "the remote process is gone", peer_lost=True)
        if name not in self._remotes:
            return TransferEnded(transfer_id, Ending.FAILED, f"peer {name} is not loaded")
        table, theirs, there = read.table, self._remotes[name], self._network.agents[name].memories
        if max(table.local[:, 0]) >= len(self.memories) or max(table.remote[:, 0]) >= len(theirs):
            return TransferEnded(transfer_id, Ending.REFUSED, f"table {table.table_id} names memory that is not there")
        try:
            pieces = [
                (
                    self._place(table.local, table.local_blocks, a, self.memories, table, self.memories),
                    self._place(table.remote, table.remote_blocks, b, theirs, table, there),
                )
                for a, b in zip(read.local.tolist(), read.remote.tolist(), strict=True)
            ]
        except IndexError as exc:
            return TransferEnded(transfer_id, Ending.FAILED, str(exc))

        def copy() -> None:
            for (target, length), (source, _) in pieces:
                ctypes.memmove(target, source, length)

        if not self.deferred:
            copy()
            return TransferEnded(transfer_id, Ending.DONE)
        self.running[transfer_id] = (name, copy)
        return None

    def finish(self, transfer_id: TransferId | None = None) -> None:
        """Let one read, or all, land and be done."""
        for one in [transfer_id] if transfer_id is not None else list(self.running):
            self.running.pop(one)[1]()
            self.report(TransferEnded(one, Ending.DONE))

    def fail(self, transfer_id: TransferId, *, peer_lost: bool = False) -> None:
        """End a read without landing it; nothing will be written any more."""
        del self.running[transfer_id]
        self.report(TransferEnded(transfer_id, Ending.FAILED, "failed on request", peer_lost))

    def doubt(self, transfer_id: TransferId) -> None:
        """Report trouble with a read that goes on: `finish` may still land it."""
        self.report(TransferEnded(transfer_id, Ending.IN_DOUBT, "in doubt on request"))

    def lose_agent(self, *, reads: bool = True) -> None:
        """End by itself, as a process that dies: reads from here fail, and unless `reads` is false our own as well."""
        self._network.crash(self._name)
        if reads:
            for one in list(self.running):
                self.fail(one)
            self._remotes.clear()
            self._users.clear()
        self.report(AgentLost("killed on request", 0.0, reads))

    def replace_agent(self) -> None:
        """Serve again after `lose_agent`, by another name."""
        self._starts += 1
        self._name = f"{self._base_name}-{self._starts}"
        self._network.agents[self._name] = self
        self.report(AgentReplaced(self.agent, "killed on request", 0.0, 0))

    def report(self, news: DataNews) -> None:
        """Queue news."""
        self._news.append(news)
        asyncio.get_running_loop().call_soon(self._on_ready)

    def poll(self) -> list[DataNews]:
        """Return news."""
        news, self._news = self._news, []
        return news

    def watch(self, serving: bool) -> None:
        """Note it."""
        self._counts["serving"] = int(serving)

    def statistics(self) -> dict[str, int]:
        """Count posts and handles."""
        return {**self._counts, "running": len(self.running), "peers": len(self._remotes)}

    def describe(self) -> dict[str, str]:
        """Say what this is."""
        return {"backend": "simulated"}

    async def quiesce(self) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Leave the network."""
        if self._network.agents.get(self._name) is self:
            del self._network.agents[self._name]
        # As with NIXL: without its agent nothing is written any more.
        self.running.clear()
        self._remotes.clear()
        self._users.clear()
        self._news.clear()
        self.memories = ()

    def _place(
        self,
        rows: npt.NDArray[np.int64],
        blocks: int,
        index: int,
        at: Sequence[Memory],
        table: DescTable,
        registered: Sequence[Memory],
    ) -> tuple[int, int]:
        row, block = divmod(index, blocks)
        if not 0 <= row < len(rows):
            raise IndexError(f"descriptor {index} is outside the table")
        memory, offset, stride = (int(x) for x in rows[row])
        address, length = at[memory].base + offset + block * stride, int(table.length[row])
        inside = any(m.base <= address and address + length <= m.base + m.length for m in registered)
        assert inside, f"descriptor {index} is outside registered memory"
        return address, length
