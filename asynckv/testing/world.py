"""A world of processes on one thread: virtual time, clocks that disagree, planes that go wrong.

Every `Process` has an event loop of its own, driven one turn at a time by a `World` that keeps all events
in order. A process that computes, pauses or is frozen falls behind without holding up the others, as on
real hosts. All randomness comes from the seed, so a run repeats exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import heapq
import inspect
import itertools
import math
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVarTuple

import numpy as np
import numpy.typing as npt

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import DescTable, ReadRequest
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, DataNews

__all__ = ["Process", "Transfer", "Violation", "WireFate", "World", "WorldClock", "WorldControl", "WorldData"]

Ts = TypeVarTuple("Ts")
Bytes = npt.NDArray[np.uint8]


class Violation(Exception):
    """Something happened that must never happen."""


class _NoSelector(selectors.BaseSelector):
    """Nothing to wait for: time moves when the world says so."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time is its process's, and whose turns are the world's events."""

    def __init__(self, process: Process) -> None:
        self._process = process
        super().__init__(_NoSelector())
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._process.now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._process.want_turn()
        return super().call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def fire() -> None:
            if not handle.cancelled():
                self.call_soon(callback, *args, context=context)

        self._process.at(when, fire)
        return handle

    def turn(self) -> None:
        """Run what is ready now, and nothing that becomes ready by it."""
        # What `run_forever` sets up and takes down each time costs as much as what most turns do.
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if self._process.is_dead:
            return  # what is left of it is being swept up
        exc = context.get("exception")
        if isinstance(exc, Violation):
            self._process.world.violate(str(exc))
        else:
            self._process.world.violate(f"{self._process.name}: {context.get('message')}: {exc!r}")


class Process:
    """One start of a simulated process.

    Attributes:
        now: How far it has come in the world's time; ahead of the world while it is busy.
        epoch, rate: Its clock reads `epoch + rate * now`.
        pauses: Chance that a call or a reading of the clock takes long.
    """

    def __init__(self, world: World, name: str, *, epoch: float = 0.0, rate: float = 1.0) -> None:
        self.world, self.name, self.epoch, self.rate = world, name, epoch, rate
        self.now = world.now
        self.frozen_until = -math.inf
        self.frozen_s = 0.0
        self.pauses = 0.0
        self.is_dead, self.died_at = False, math.inf
        self.random = world.random_of(name)
        self._is_turn_due = False
        self.loop = _Loop(self)

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do something in this process at a time of the world's, or as soon after as it can."""
        self.world.at(max(when, self.now), action, self)

    def call_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call something in this process's event loop."""
        self.at(when, functools.partial(self.loop.call_soon, callback, *args))

    def spawn(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start a coroutine in the process's next turn."""
        self.call_at(self.now, lambda: self.loop.create_task(make()))

    def want_turn(self) -> None:
        """Have the loop run a turn, once."""
        if not self._is_turn_due and not self.is_dead:
            self._is_turn_due = True
            self.world.at(self.now, self._turn, self)

    def _turn(self) -> None:
        self._is_turn_due = False
        self.loop.turn()

    def spend(self) -> None:
        """Let the time pass that anything takes: microseconds, and now and then much more."""
        r = self.random.random()
        if r < self.pauses:
            pause = self.random.choice((0.001, 0.05, 0.4, 1.5, 2.5))
            self.now += pause
            self.frozen_s += pause
        else:
            self.now += r * 2e-5

    def freeze(self, seconds: float) -> None:
        """Stop it (SIGSTOP), and let it go on later."""
        until = self.world.now + seconds
        self.frozen_s += max(until - max(self.frozen_until, self.world.now), 0.0)
        self.frozen_until = max(self.frozen_until, until)

    def kill(self) -> None:
        """End it without a word."""
        self.is_dead, self.died_at = True, self.world.now

    def close(self) -> None:
        """Give back what the loop holds."""
        self.is_dead = True
        self.loop.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self.loop):
            # Never to be run again, and not to be complained about.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if inspect.iscoroutine(coroutine := task.get_coro()):
                with contextlib.suppress(RuntimeError, Violation):
                    coroutine.close()
        self.loop.close()


WireFate = Callable[[str, str, random.Random], Sequence[float]]
"""Given sender and receiver: delays of every copy that arrives; none is a loss."""


class World:
    """All processes, everything between them, and time.

    Args:
        seed: Decides everything.
        fate: Decides over packets; the default delivers each once after 50 to 250 microseconds.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.violation = ""
        self.trace: list[tuple[float, str, str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.processes: dict[str, Process] = {}
        self.listeners: dict[str, WorldControl] = {}
        self.agents: dict[str, WorldData] = {}
        self.fate: WireFate = lambda sender, to, rng: (5e-5 + rng.random() * 2e-4,)
        self.is_calm: Callable[[float], bool] = lambda until: True
        """No process is going to die before a time."""
        self.transfer_fate: Callable[[WorldData, WorldData, random.Random], TransferFate] = _usual
        self.on_sent: Callable[[Process, str, bytes], None] = lambda process, to, packet: None
        """Called with what a process says to an address."""
        self.on_delivered: Callable[[Process, str, bytes], None] = lambda process, origin, packet: None
        """Called with what a process is about to hear from an address."""
        self._heap: list[tuple[float, int, Callable[[], object], Process | None]] = []
        self._order = itertools.count()

    def random_of(self, *names: object) -> random.Random:
        """A source of randomness of its own, so that one fault more does not change all others."""
        return random.Random(repr((self.seed, *names)))

    def token(self, *names: object) -> Callable[[int], str]:
        """Make what stands in for `secrets.token_hex`: unique and repeatable."""
        count = itertools.count()
        return lambda size: hashlib.sha256(repr((self.seed, *names, next(count))).encode()).hexdigest()[: 2 * size]

    def at(self, when: float, action: Callable[[], object], process: Process | None = None) -> None:
        """Do something at a time, in a process or beside all of them."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action, process))

    def note(self, who: str, what: str, detail: Any = "") -> None:
        """Remember what happened."""
        self.trace.append((self.now, who, what, detail))

    def is_quiet(self, until: float) -> bool:
        """Nothing is going to happen before a time: what a process that is ahead sees now is what it would see then."""
        return not self._heap or self._heap[0][0] > until

    def violate(self, what: str) -> None:
        """Note the first thing that must never happen, and stop."""
        if not self.violation:
            self.violation = what
            self.note("world", "VIOLATION", what)

    def run(self, until: float, most: int = 1_000_000) -> None:
        """Let everything happen up to a time, or to the first violation."""
        heap = self._heap
        while heap and heap[0][0] <= until and not self.violation:
            most -= 1
            if most < 0:
                self.violate("events follow each other without end")
                return
            when, order, action, process = heapq.heappop(heap)
            self.now = when
            if process is not None:
                if process.is_dead:
                    continue
                start = max(when, process.now, process.frozen_until)
                if start > when:
                    heapq.heappush(heap, (start, order, action, process))
                    continue
                process.now = when
            try:
                action()
            except Violation as exc:
                self.violate(str(exc))
            except AssertionError as exc:
                self.violate(f"assertion: {exc!r}")
        self.now = max(self.now, until) if not self.violation else self.now

    def close(self) -> None:
        """Give back what loops hold."""
        for process in self.processes.values():
            process.close()


class WorldClock:
    """A process's clock."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        """Read it; time may pass before the reader does anything with what it read."""
        process = self._process
        value = process.epoch + process.now * process.rate
        process.spend()
        return value

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back once the clock has reached `when`."""
        process = self._process
        at = (when - process.epoch) / process.rate
        while process.epoch + at * process.rate < when:
            at = math.nextafter(at + 1e-9, math.inf)
        return process.loop.call_at(at, callback)


class WorldControl:
    """Packets between processes."""

    def __init__(self, process: Process, address: str) -> None:
        self.process, self._address = process, Address(address)
        self._on_packet: Callable[[Address | ReplyTo, bytes], None] | None = None
        self._links: set[Address] = set()
        self._random = process.world.random_of("wire", process.name)
        self.asked: dict[bytes, WorldControl] = {}

    @property
    def address(self) -> Address:
        """Where others reach it; the same after a restart."""
        return self._address

    async def start(
        self,
        on_packet: Callable[[Address | ReplyTo, bytes], None],
        on_refused: Callable[[str, str], None] = lambda cause, who: None,
    ) -> None:
        """Listen."""
        self._on_packet = on_packet
        self.process.world.listeners[self._address] = self

    def send(self, to: Address | ReplyTo, packet: bytes) -> bool:
        """Hand a packet to the wire."""
        process, world = self.process, self.process.world
        process.spend()
        if self._on_packet is None:
            return False
        if isinstance(to, bytes):
            asker = self.asked.get(to)
            if asker is None or asker.process.is_dead or self._address not in asker._links:
                return False
            for delay in world.fate(process.name, asker.process.name, self._random):
                self._carry(asker, self._address, packet, delay)
            return True
        self._links.add(to)
        world.on_sent(process, to, packet)
        listener = world.listeners.get(to)
        if listener is not None:
            route = ReplyTo(process.name.encode())
            listener.asked[route] = self
            for delay in world.fate(process.name, listener.process.name, self._random):
                self._carry(listener, route, packet, delay)
        return True

    def _carry(self, to: WorldControl, origin: Address | ReplyTo, packet: bytes, delay: float) -> None:
        sender, receiver = self.process, to.process
        sender.world.note(sender.name, f"-> {receiver.name}", packet)
        sent_at = sender.now

        def arrive() -> None:
            # A process that was ahead of the world may have died before it came to send this.
            if sent_at <= sender.died_at:
                receiver.loop.call_soon(to.deliver, origin, packet)

        receiver.at(sent_at + delay, arrive)

    def deliver(self, origin: Address | ReplyTo, packet: bytes) -> None:
        """Take a packet, in the process's loop."""
        if self._on_packet is None or (isinstance(origin, str) and origin not in self._links):
            return
        self.process.spend()
        self.process.world.note(self.process.name, "received", packet)
        if isinstance(origin, str):
            self.process.world.on_delivered(self.process, origin, packet)
        self._on_packet(origin, packet)
        self.process.spend()

    def refusal(self, address: Address) -> str:
        """Whoever can be named can be asked."""
        return ""

    def disconnect(self, address: Address) -> None:
        """Drop a link."""
        self._links.discard(address)

    def statistics(self) -> dict[str, int]:
        """Count links."""
        return {"links": len(self._links)}

    async def aclose(self) -> None:
        """Listen no more; what was sent may take a moment to leave."""
        self._on_packet = None
        if self.process.world.listeners.get(self._address) is self:
            del self.process.world.listeners[self._address]
        await asyncio.sleep(self._random.random() ** 2 * 0.5)


@dataclass(frozen=True, slots=True)
class TransferFate:
    """What becomes of one transfer.

    Attributes:
        seconds: How long it takes; infinite: it never ends.
        ending: How it ends.
        inline: It ends inside the call that posts it.
        lands: Share of its bytes that land before it ends.
        late_s: When the rest lands after that (in doubt only), or never.
        after_s: When what was in doubt ends after all, or never.
    """

    seconds: float
    ending: Ending = Ending.DONE
    inline: bool = False
    lands: float = 1.0
    late_s: float = math.inf
    after_s: float = math.inf
    after: Literal[Ending.DONE, Ending.FAILED] = Ending.FAILED
    peer_lost: bool = False
    cause: str = ""

    def __str__(self) -> str:
        late = f", the rest lands {self.late_s:.3f} s later" if self.late_s < math.inf else ""
        after = f", {self.after.value} {self.after_s:.3f} s later" if self.after_s < math.inf else ""
        when = f"{self.ending.value} after {self.seconds:.6f} s" if self.seconds < math.inf else "never ends"
        return f"({when}, {self.lands:.0%} landed{late}{after})"


def _usual(reader: WorldData, owner: WorldData, rng: random.Random) -> TransferFate:
    return TransferFate(2e-5 + rng.random() ** 3 * 2e-3, inline=rng.random() < 0.3)


_Piece = tuple[Bytes, Bytes]


@dataclass(slots=True, eq=False)
class Transfer:
    """One posted read."""

    transfer_id: TransferId
    owner: WorldData
    pieces: list[_Piece]
    spots: list[tuple[int, int, int]]
    """Where they land: memory, start, length."""
    name: str
    """The agent it reads from, as it is known by."""
    fate: TransferFate
    end_at: float = math.inf
    landed: int = 0
    is_over: bool = False
    """Nothing will be written, and its end was reported."""
    is_dead: bool = False
    """Nothing will be written any more."""
    owner_start: int = 1
    """Which start of its data plane it reads from."""


_Row = tuple[list[int], list[int], int]
"""Memory, offset and stride on both sides, and the length, as plain numbers."""


@dataclass(frozen=True, slots=True)
class _Table:
    table: DescTable
    rows: list[_Row]


class WorldData:
    """Bytes between processes: a transfer lands piece by piece, whatever its reader does meanwhile.

    Attributes:
        arrays: The registered memories' bytes.
        on_post, on_land: Called with a transfer when it is posted, and before some of it lands.
    """

    def __init__(self, process: Process, agent_name: str, arrays: Sequence[Bytes], memories: Sequence[Memory]) -> None:
        self.process, self._name, self._base_name = process, agent_name, agent_name
        self.starts, self.closed_at = 0, math.inf
        self.arrays, self._memories = list(arrays), tuple(memories)
        self.transfers: dict[TransferId, Transfer] = {}
        self.on_post: Callable[[Transfer], None] = lambda transfer: None
        self.on_land: Callable[[Transfer, Sequence[tuple[int, int, int]]], None] = lambda transfer, spots: None
        self.posted = 0
        self.is_closed = False
        self._tables: dict[str, dict[int, _Table]] = {}
        """By remote agent, then by the table's id; an entry holds its table, so that no other gets its id."""
        self._users: Counter[str] = Counter()
        self._news: list[DataNews] = []
        self._on_ready: Callable[[], None] = lambda: None
        self._has_agent = self._can_read = self._reads_stay = True
        self._random = process.world.random_of("nic", process.name)

    # -- the port ----------------------------------------------------------------------------------

    def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        """Join the world, each time as another agent, with the memory that this plane was made for."""
        assert tuple(memories) == self._memories
        self.starts += 1
        if self.starts > 1:
            self._name = f"{self._base_name}-{self.starts}"
        self.is_closed, self.closed_at = False, math.inf
        self._on_ready = on_ready
        self._has_agent = self._can_read = True
        self.process.world.agents[self._name] = self
        return self._agent

    @property
    def _agent(self) -> AgentInfo:
        return AgentInfo(self._name, self._name.encode())

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        """Load it, which takes a while."""
        starts = self.starts
        await asyncio.sleep(self._random.random() * 2e-3)
        if not self._can_read or (starts != self.starts and not self._reads_stay):
            raise BackendError("our agent has died")
        owner = self.process.world.agents.get(agent.metadata.decode())
        if owner is None or owner.process.is_dead:
            raise BackendError(f"no agent {agent.name!r} behind its metadata")
        self._tables.setdefault(agent.name, {})
        self._users[agent.name] += 1

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        """Forget a remote agent that nothing reads from."""
        if self.is_closed or name not in self._users:
            return
        self._users[name] -= 1
        if self._users[name] <= 0:
            for transfer in self.transfers.values():
                if transfer.name == name:
                    raise Violation(f"{self.process.name} removes {name} under transfer {transfer.transfer_id}")
            del self._tables[name], self._users[name]

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest) -> TransferEnded | None:
        """Begin to read."""
        world, process = self.process.world, self.process
        process.spend()
        self.posted += 1
        owner, tables = world.agents.get(name), self._tables.get(name)
        if tables is None and not self._can_read:
            return TransferEnded(transfer_id, Ending.FAILED, "our agent has died")
        if tables is None:
            raise Violation(f"{process.name} reads from {name}, which it has not loaded")
        if owner is None or owner.process.is_dead:
            return TransferEnded(transfer_id, Ending.FAILED, "the remote process is gone", peer_lost=True)
        transfer = self._transfer(transfer_id, owner, self._rows(tables, read.table), name, read)
        self.on_post(transfer)
        fate = transfer.fate
        world.note(process.name, f"posted {transfer_id} from {name}", fate)
        if (
            fate.inline
            and fate.ending is Ending.DONE
            and fate.seconds < 0.1
            and world.is_quiet(process.now + fate.seconds)
        ):
            # Local transports copy before they return.
            process.now += fate.seconds
            self._land(transfer, len(transfer.pieces))
            process.spend()
            transfer.is_over = transfer.is_dead = True
            return TransferEnded(transfer_id, Ending.DONE)
        self.transfers[transfer_id] = transfer
        begin, half = process.now, len(transfer.pieces) * fate.lands / 2
        transfer.end_at = begin + fate.seconds
        if fate.seconds < math.inf:
            world.at(begin + fate.seconds * self._random.random(), lambda: self._land(transfer, math.floor(half)))
            world.at(begin + fate.seconds, lambda: self._end(transfer))
        elif fate.late_s < math.inf:
            world.at(begin + fate.late_s, lambda: self._land(transfer, len(transfer.pieces)))
        process.spend()
        return None

    def poll(self) -> list[DataNews]:
        """Return news; what ends while this call takes its time is news as well."""
        self.process.spend()
        world, until = self.process.world, self.process.now
        if until > world.now + 1e-4 and world.is_calm(until):
            # The bytes land when the world is there; nothing of this process's is seen before.
            ends = [t for t in self.transfers.values() if t.end_at <= until and t.fate.ending is Ending.DONE]
            for transfer in ends:
                if not transfer.is_over and not transfer.is_dead:
                    transfer.is_over = True
                    self._news.append(TransferEnded(transfer.transfer_id, Ending.DONE))
        news, self._news = self._news, []
        for ended in news:
            if isinstance(ended, TransferEnded) and ended.ending is not Ending.IN_DOUBT:
                self.transfers.pop(ended.transfer_id, None)
        self.process.spend()
        return news

    def watch(self, serving: bool) -> None:
        """Nothing to do."""

    def statistics(self) -> dict[str, int]:
        """Count."""
        return {"posts": self.posted, "running": len(self.transfers), "peers": len(self._tables)}

    def describe(self) -> dict[str, str]:
        """Say what this is."""
        return {"backend": "simulated"}

    async def quiesce(self) -> None:
        """There are no threads."""

    def close(self) -> None:
        """Leave: without its agent nothing is written any more."""
        if self.is_closed:
            return
        self.is_closed, self.closed_at = True, self.process.now
        if self.process.world.agents.get(self._name) is self:
            del self.process.world.agents[self._name]
        left = list(self.transfers.values())
        for transfer in left:
            transfer.is_over = True

        def end() -> None:
            for transfer in left:
                transfer.is_dead = True

        # A process may be ahead of the world: what lands until then has landed before.
        self.process.world.at(self.process.now, end)
        for what in (self.transfers, self._tables, self._users, self._news):
            what.clear()

    # -- what happens ------------------------------------------------------------------------------

    def lose_agent(self, down_s: float, *, reads: bool) -> None:
        """The agent that others reach dies, and with `reads` what posts our reads; another follows. In our loop."""
        world = self.process.world
        if self.is_closed or not self._has_agent or world.agents.get(self._name) is not self:
            return
        world.note(self.process.name, "loses its agent", "and its reads" if reads else "")
        self._has_agent, self._can_read, self._reads_stay = False, not reads, not reads
        del world.agents[self._name]
        # What reads from us, and what we read, stops at this start.
        self.starts += 1
        starts, left = self.starts, list(self.transfers.values()) if reads else []

        def end() -> None:
            for transfer in left:
                transfer.is_dead = True

        # A process may be ahead of the world: what lands until then has landed before.
        world.at(self.process.now, end)
        for transfer in left:
            if not transfer.is_over:
                transfer.is_over = True
                self._news.append(TransferEnded(transfer.transfer_id, Ending.FAILED, "our agent has died"))
        if reads:
            self._tables.clear()
            self._users.clear()
        self._news.append(AgentLost("our agent has died", 0.0, reads))
        self._on_ready()

        def follow() -> None:
            if self.is_closed or self.starts != starts:
                return
            self._name, self._has_agent, self._can_read = f"{self._base_name}-{starts}", True, True
            world.agents[self._name] = self
            self._news.append(AgentReplaced(self._agent, "our agent has died", down_s, len(left)))
            self._on_ready()

        self.process.call_at(world.now + down_s, follow)

    def lose(self, owner: WorldData) -> None:
        """The process that is read from died."""
        for transfer in list(self.transfers.values()):
            if transfer.owner is owner and not transfer.is_dead:
                transfer.is_dead = True
                r = self._random.random()
                when = self.process.world.now + self._random.random() * 0.5
                if r < 0.5:
                    self.process.world.at(when, self._reporter(transfer, Ending.FAILED, True))
                elif r < 0.8:
                    self.process.world.at(when, self._reporter(transfer, Ending.IN_DOUBT, False))
                    later = when + self._random.random() * 3
                    self.process.world.at(later, self._reporter(transfer, Ending.FAILED, True))
                # Else nothing is heard of it again.

    def _reporter(self, transfer: Transfer, ending: Ending, lost: bool) -> Callable[[], None]:
        return lambda: self._report(transfer, ending, lost, "the remote process died")

    def _rows(self, tables: dict[int, _Table], table: DescTable) -> list[_Row]:
        """Return a table's rows, made on its first read as descriptor lists are."""
        if (known := tables.get(id(table))) is None:
            rows = zip(table.local.tolist(), table.remote.tolist(), table.length.tolist(), strict=True)
            known = tables[id(table)] = _Table(table, list(rows))
        return known.rows

    def _transfer(
        self,
        transfer_id: TransferId,
        owner: WorldData,
        rows: list[_Row],
        name: str,
        read: ReadRequest,
    ) -> Transfer:
        pieces: list[_Piece] = []
        spots = []
        table = read.table
        for a, b in zip(read.local.tolist(), read.remote.tolist(), strict=True):
            (row, mine), (other, theirs) = divmod(a, table.local_blocks), divmod(b, table.remote_blocks)
            (memory, offset, stride), (remote_memory, remote_offset, remote_stride), length = rows[row]
            start = offset + mine * stride
            source = remote_offset + theirs * remote_stride
            target = self.arrays[memory][start : start + length]
            origin = owner.arrays[remote_memory][source : source + length]
            if row != other or len(target) != length or len(origin) != length:
                raise Violation(f"{self.process.name} reads outside of registered memory")
            pieces.append((target, origin))
            spots.append((memory, start, length))
        fate = self.process.world.transfer_fate(self, owner, self._random)
        return Transfer(transfer_id, owner, pieces, spots, name, fate, owner_start=owner.starts)

    def _land(self, transfer: Transfer, upto: int) -> None:
        owner = transfer.owner
        gone = owner.process.is_dead or owner.starts != transfer.owner_start or self.process.world.now > owner.closed_at
        if transfer.is_dead or self.process.is_dead or gone:
            return
        if upto > transfer.landed:
            self.on_land(transfer, transfer.spots[transfer.landed : upto])
            for target, origin in transfer.pieces[transfer.landed : upto]:
                target[:] = origin
            transfer.landed = upto

    def _end(self, transfer: Transfer) -> None:
        if transfer.is_dead or self.process.is_dead:
            return
        fate, world = transfer.fate, self.process.world
        self._land(transfer, round(len(transfer.pieces) * fate.lands))
        if fate.ending is Ending.IN_DOUBT:
            if fate.late_s < math.inf:
                world.at(world.now + fate.late_s, lambda: self._land(transfer, len(transfer.pieces)))
            if fate.after_s < math.inf:
                world.at(world.now + fate.after_s, lambda: self._resolve(transfer))
        else:
            transfer.is_dead = True
        self._report(transfer, fate.ending, fate.peer_lost, fate.cause)

    def _resolve(self, transfer: Transfer) -> None:
        if transfer.is_dead or self.process.is_dead:
            return
        if transfer.fate.after is Ending.DONE:
            self._land(transfer, len(transfer.pieces))
        transfer.is_dead = True
        self._report(transfer, transfer.fate.after, False, "after all")

    def _report(self, transfer: Transfer, ending: Ending, peer_lost: bool, cause: str) -> None:
        if self.is_closed or self.process.is_dead or transfer.is_over:
            return
        transfer.is_over = ending is not Ending.IN_DOUBT
        self._news.append(TransferEnded(transfer.transfer_id, ending, cause, peer_lost))
        self.process.call_at(self.process.world.now, self._on_ready)
