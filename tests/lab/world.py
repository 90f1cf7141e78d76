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
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVarTuple

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.slots import Slots
from asynckv.core.types import Address, ReplyTo, TransferId
from asynckv.geometry.gather import Gathered
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, CopyMade, DataNews
from asynckv.testing.fabric import Bytes, Fabric, Nic, Origin, Port, Transfer, Violation

Ts = TypeVarTuple("Ts")


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
    """An event loop that keeps its process's time, and makes its turns events of the world."""

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
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def fire() -> None:
            if not handle.cancelled():
                self.call_soon(callback, *args, context=context)

        self._process.at(when, fire)
        return handle

    def run_in_executor(self, executor: object, func: Callable[[*Ts], Any], *args: *Ts) -> asyncio.Future[Any]:
        """Other threads take a moment, unseen."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as exc:  # the caller that waits is told
                if not future.done():
                    future.set_exception(exc)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(1e-3, run)
        return future

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
        self.away: list[tuple[float, float]] = []
        """From when to when it was stopped, or did not come to run."""
        self.pauses = 0.0
        self.is_dead, self.died_at = False, math.inf
        self.hung_up: set[str] = set()
        """Addresses to which it has ended a connection."""
        self.random, self.wire = world.random_of(name), world.random_of("wire", name)
        self._is_turn_due = False
        self._left: set[asyncio.Task[Any]] = set()
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
            self.away.append((self.now, self.now + pause))
            self.now += pause
            self.frozen_s += pause
        else:
            self.now += r * 2e-5

    def freeze(self, seconds: float) -> None:
        """Stop it (SIGSTOP), and let it go on later."""
        until = self.world.now + seconds
        self.away.append((self.world.now, until))
        self.frozen_s += max(until - max(self.frozen_until, self.world.now), 0.0)
        self.frozen_until = max(self.frozen_until, until)

    def has_hung_up(self, address: str) -> bool:
        """A connection of it to an address has ended."""
        return self.is_dead or address in self.hung_up

    def kill(self) -> None:
        """End it without a word: it answers and reads no more."""
        self.is_dead, self.died_at = True, self.world.now
        self._left = asyncio.all_tasks(self.loop)  # which are kept nowhere else, and are swept up at the end
        self.world.ports.pop(ReplyTo(self.name.encode()), None)
        for nic in [nic for nic in self.world.nics.values() if nic.host == self.name]:
            nic.leave()
            nic.ends += 1

    def close(self) -> None:
        """Give back what the loop holds."""
        self.is_dead = True
        self.loop.set_exception_handler(lambda loop, context: None)
        for task in asyncio.all_tasks(self.loop):
            # Never to be run again, and not to be complained about.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if inspect.iscoroutine(coroutine := task.get_coro()):
                with contextlib.suppress(Exception):  # no loop runs any more
                    coroutine.close()
        self.loop.close()


WireFate = Callable[[str, str, random.Random], Sequence[float]]
"""Given sender and receiver: delays of every copy that arrives; none is a loss."""


class World(Fabric):
    """All processes, everything between them, and time.

    Args:
        seed: Decides everything.
        fate: Decides over packets; the default delivers each once after 50 to 250 microseconds.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.now = 0.0
        self.violation = ""
        self.trace: list[tuple[float, str, str, Any]] = []
        self.asides: list[tuple[float, str, str, Any]] = []
        """Lines for people alone, in the report: the trace is what a hostile rank draws from."""
        self.counts: Counter[str] = Counter()
        self.processes: dict[str, Process] = {}
        self.asked: defaultdict[str, set[ReplyTo]] = defaultdict(set)
        """Which routes a process has heard questions from."""
        self.fate: WireFate = lambda sender, to, rng: (5e-5 + rng.random() * 2e-4,)
        self.is_calm: Callable[[float], bool] = lambda until: True
        """No process is going to die before a time."""
        self.transfer_fate: Callable[[str, str, random.Random], TransferFate] = _usual
        self.on_sent: Callable[[Process, str, bytes], None] = lambda process, to, packet: None
        """Called with what a process says to an address."""
        self.on_delivered: Callable[[Process, str, bytes], None] = lambda process, origin, packet: None
        """Called with what a process is about to hear from an address."""
        self.on_heard: Callable[[Process, bytes], None] = lambda process, packet: None
        """Called with what a process is about to hear from an asker."""
        self.censor: Callable[[Process, Process, bytes], bytes] = lambda source, target, packet: packet
        """Says what is left of a packet that is about to leave; nothing: it is lost."""
        self._heap: list[tuple[float, int, Callable[[], object], Process | None]] = []
        self._order = itertools.count()

    def carry(self, sender: Port, receiver: Port, origin: Origin, packet: bytes) -> None:
        """Let fate decide when a packet arrives, and how often."""
        source, target = self.processes[sender.name], self.processes[receiver.name]
        if not (packet := self.censor(source, target, packet)):
            return
        if isinstance(origin, bytes):
            self.asked[receiver.name].add(origin)
        sent_at = source.now

        def arrive() -> None:
            # A process that was ahead of the world may have died before it came to send this.
            if sent_at <= source.died_at:
                target.loop.call_soon(receiver.hear, origin, packet)

        for delay in self.fate(source.name, target.name, source.wire):
            self.note(source.name, f"-> {target.name}", packet)
            target.at(sent_at + delay, arrive)

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

    def note(self, name: str, what: str, detail: Any = "") -> None:
        self.trace.append((self.now, name, what, detail))

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

    def cpu(self) -> float:
        """Return the time, as if this process had a core of its own."""
        return self._process.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back once the clock has reached `when`."""
        process = self._process
        at = (when - process.epoch) / process.rate
        while process.epoch + at * process.rate < when:
            at = math.nextafter(at + 1e-9, math.inf)
        return process.loop.call_at(at, callback)


class WorldControl(Port):
    """Packets between processes; the same address after a restart."""

    def __init__(self, process: Process, address: str) -> None:
        super().__init__(process.world, address, process.name)
        self.process = process

    def send(self, to: Origin, packet: bytes) -> bool:
        """Hand a packet to the wire."""
        self.process.spend()
        if self.is_open and isinstance(to, str):
            self.process.world.on_sent(self.process, to, packet)
        return super().send(to, packet)

    def hear(self, origin: Origin, packet: bytes) -> None:
        """Take a packet, in the process's loop."""
        if not self.is_open or (isinstance(origin, str) and origin not in self.links):
            return
        self.process.spend()
        self.process.world.note(self.process.name, "received", packet)
        if isinstance(origin, str):
            self.process.world.on_delivered(self.process, origin, packet)
        else:
            self.process.world.on_heard(self.process, packet)
        super().hear(origin, packet)
        self.process.spend()

    def disconnect(self, address: Address) -> None:
        """Drop a link."""
        super().disconnect(address)
        self.process.hung_up.add(address)

    async def aclose(self) -> None:
        """Listen no more; what was sent may take a moment to leave."""
        await super().aclose()
        await asyncio.sleep(self.process.wire.random() ** 2 * 0.5)


@dataclass(frozen=True, slots=True)
class TransferFate:
    """The fate of one transfer.

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


def _usual(reader: str, owner: str, rng: random.Random) -> TransferFate:
    return TransferFate(2e-5 + rng.random() ** 3 * 2e-3, inline=rng.random() < 0.3)


NUM_SLOTS = 8  # staged reads of one rank that run at a time
PATIENCE_S = 0.5  # a staged read without a slot is read directly after this time


class WorldData(Nic):
    """Bytes between processes: a transfer lands piece by piece, whatever its reader does meanwhile.

    A staged transfer lands in its slot, and is placed in one go when it ends well, unless it was detached.

    Attributes:
        on_post, on_land: Called with a transfer when it is posted, and before some of it lands or is placed, with the
            places in our memory that are written.
        on_done: Called with a transfer whose good end this process is told.
        fate_of: Says what becomes of one transfer, given what became of it otherwise.
    """

    def __init__(self, process: Process, agent_name: str, arrays: Sequence[Bytes], memories: Sequence[Memory]) -> None:
        super().__init__(process.world, agent_name, process.name, arrays)
        self.process, self._declared = process, tuple(memories)
        self.on_post: Callable[[Transfer], None] = lambda transfer: None
        self.on_land: Callable[[Transfer, Sequence[tuple[int, int, int]]], None] = lambda transfer, spots: None
        self.on_done: Callable[[TransferId], None] = lambda transfer_id: None
        self.fate_of: Callable[[Transfer, TransferFate], TransferFate] = lambda transfer, fate: fate
        self.is_closed = False
        self._life = 0  # counts its ends, after which no copy is made
        self._has_agent = True
        self._put_off: dict[TransferId, float] = {}
        self._slots = Slots[TransferId](NUM_SLOTS)
        self._in_slots: dict[TransferId, Transfer] = {}
        self._slotless: list[tuple[Transfer, TransferFate, float]] = []
        self._random = process.world.random_of("nic", process.name)

    # -- the port ----------------------------------------------------------------------------------

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        """Join the world, each time as another agent, with the memory that this plane was made for."""
        assert tuple(memories) == self._declared
        self.is_closed, self._has_agent = False, True
        return await super().start(memories, on_ready)

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        """Load it, which takes a while."""
        await asyncio.sleep(self._random.random() * 2e-3)
        await super().add_remote_agent(agent, memories)

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        """Begin to read."""
        world, process = self.process.world, self.process
        process.spend()
        self.posts += 1
        if name not in self.remotes:
            raise Violation(f"{process.name} reads from {name}, which it has not loaded")
        if name not in world.nics:
            return TransferEnded(transfer_id, Ending.FAILED, "the remote process is gone", peer_lost=True)
        transfer = self.prepare(transfer_id, name, read)
        fate = self.fate_of(transfer, world.transfer_fate(self.host, transfer.owner.host, self._random))
        self.on_post(transfer)
        world.note(process.name, f"posted {transfer_id} from {name}", fate)
        if (
            fate.inline
            and fate.ending is Ending.DONE
            and fate.seconds < 0.1
            and not transfer.is_staged
            and world.is_quiet(process.now + fate.seconds)
        ):
            # Local transports copy before they return.
            process.now += fate.seconds
            self._land(transfer)
            process.spend()
            transfer.is_over = transfer.is_dead = True
            self.on_done(transfer_id)
            return TransferEnded(transfer_id, Ending.DONE, difference=transfer.difference)
        self.running[transfer_id] = transfer
        if transfer.is_staged:
            self._slotless.append((transfer, fate, process.now))
            process.call_at(process.now + PATIENCE_S, self._take_slots)
            self._take_slots()
        else:
            self._begin(transfer, fate)
        process.spend()
        return None

    def pack(self, slot: int, gathered: Gathered) -> None:
        """Make a packed copy, in two halves. Where transfers from this rank go wrong, copies fail or take long."""
        world, rng, life = self.process.world, self._random, self._life
        self.process.spend()
        fate = world.transfer_fate(self.host, self.host, rng)
        begin, seconds = self.process.now, min(fate.seconds, 2.0)
        half = gathered.num_bytes // (2 * min(row[3] for row in gathered.rows))
        cause = "" if fate.ending is Ending.DONE else "a copy has failed"
        world.counts["copies"] += 1
        world.note(self.process.name, f"packs {gathered.num_bytes} bytes in slot {slot}", cause)

        def gather(part: slice) -> None:
            if life == self._life and not self.process.is_dead:
                self.gather(slot, gathered, part)

        def end() -> None:
            gather(slice(half, None))
            if life == self._life and not self.process.is_dead:
                self._news.append(CopyMade(slot, cause))
                self.process.call_at(world.now, self._on_ready)

        world.at(begin + seconds * rng.random(), lambda: gather(slice(half)))
        world.at(begin + seconds, end)

    def _take_slots(self) -> None:
        """Begin the staged reads that may have a slot, or have waited for long."""
        for transfer in [each for each in self._in_slots.values() if each.is_dead]:
            self._slots.give_back(transfer.transfer_id)
            del self._in_slots[transfer.transfer_id]
        waiting, self._slotless = self._slotless, []
        for transfer, fate, since in waiting:
            name = transfer.agent_name
            if transfer.is_detached or transfer.is_dead:
                transfer.is_dead = True
                self._report(transfer, Ending.FAILED, False, "it was detached before it began")
            elif self._slots.has_room(name):
                self._in_slots[transfer.transfer_id] = transfer
                self._slots.take(transfer.transfer_id, name)
                self._begin(transfer, fate)
            elif self.process.now >= since + PATIENCE_S:
                transfer.pieces, transfer.places = transfer.direct, []  # piece by piece, as if not staged
                self._begin(transfer, fate)
            else:
                self._slotless.append((transfer, fate, since))

    def _begin(self, transfer: Transfer, fate: TransferFate) -> None:
        world = self.process.world
        begin, half = self.process.now, math.floor(len(transfer.pieces) * fate.lands / 2)
        if fate.ending is Ending.DONE:
            transfer.done_at = begin + fate.seconds
        if fate.seconds < math.inf:
            world.at(begin + fate.seconds * self._random.random(), lambda: self._land(transfer, half))
            world.at(begin + fate.seconds, lambda: self._end(transfer, fate))
        elif fate.late_s < math.inf:
            world.at(begin + fate.late_s, lambda: self._land(transfer))

    def poll(self) -> list[DataNews]:
        """Return news; what ends while this call takes its time is news as well."""
        self.process.spend()
        world, until = self.process.world, self.process.now
        if until > world.now + 1e-4 and world.is_calm(until):
            # The bytes land when the world is there; nothing of this process's is seen before.
            for transfer in self.running.values():
                if transfer.done_at <= until and not (transfer.is_over or transfer.is_dead or transfer.ours):
                    transfer.is_over = True
                    self._news.append(TransferEnded(transfer.transfer_id, Ending.DONE))
        news = super().poll()
        for ended in news:
            if isinstance(ended, TransferEnded) and ended.ending not in (Ending.IN_DOUBT, Ending.DETACHED):
                self.running.pop(ended.transfer_id, None)
                if ended.ending is Ending.DONE:
                    self.on_done(ended.transfer_id)
        self.process.spend()
        return news

    def close(self) -> None:
        """Leave: without its agent nothing is written any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self._life += 1
        left = list(self.running.values())
        for transfer in left:
            transfer.is_over = True

        def end() -> None:
            self.ends += 1
            for transfer in left:
                transfer.is_dead = True

        # A process may be ahead of the world: what lands until then has landed before.
        self.process.world.at(self.process.now, end)
        super().close()

    # -- what happens ------------------------------------------------------------------------------

    def lose_agent(self, down_s: float) -> None:
        """The agent that others reach dies; another follows. In our loop."""
        world = self.process.world
        if self.is_closed or not self._has_agent or world.nics.get(self.name) is not self:
            return
        world.note(self.process.name, "loses its agent")
        self._has_agent = False
        self.leave()
        self.ends, self.starts = self.ends + 1, self.starts + 1
        starts = self.starts
        self._news.append(AgentLost("our agent has died"))
        self._on_ready()

        def follow() -> None:
            if self.is_closed or self.starts != starts:
                return
            self._has_agent = True
            self._news.append(AgentReplaced(self.join(), "our agent has died", down_s))
            self._on_ready()

        self.process.call_at(world.now + down_s, follow)

    def end_at(self, transfer: Transfer, when: float) -> None:
        """Let a transfer that runs end well at a time, neither before nor after it."""
        if transfer.done_at < math.inf:
            self._put_off[transfer.transfer_id] = transfer.done_at = when
            self.process.world.at(when, lambda: self._end(transfer, TransferFate(0.0)))

    def lose(self, owner: Nic) -> None:
        """The process that is read from died."""
        for transfer in list(self.running.values()):
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

    def _land(self, transfer: Transfer, upto: int | None = None) -> None:
        upto = len(transfer.pieces) if upto is None else upto
        if upto > transfer.landed and not (transfer.is_dead or transfer.is_cut or self.process.is_dead):
            self.on_land(transfer, () if transfer.is_staged else transfer.spots[transfer.landed : upto])
            transfer.land(upto)

    def _place(self, transfer: Transfer) -> Ending:
        """Copy what has landed in a slot to its place."""
        if transfer.is_detached:
            return Ending.FAILED
        if transfer.is_staged and not (transfer.is_dead or transfer.is_cut or self.process.is_dead):
            self.on_land(transfer, transfer.spots)
            transfer.place()
        return Ending.DONE

    def _end(self, transfer: Transfer, fate: TransferFate) -> None:
        world = self.process.world
        if transfer.is_dead or self.process.is_dead or world.now < self._put_off.get(transfer.transfer_id, 0.0):
            return
        self._land(transfer, round(len(transfer.pieces) * fate.lands))
        ending = self._place(transfer) if fate.ending is Ending.DONE else fate.ending
        if ending is Ending.IN_DOUBT:
            if fate.late_s < math.inf:
                world.at(world.now + fate.late_s, lambda: self._land(transfer))
            if fate.after_s < math.inf:
                world.at(world.now + fate.after_s, lambda: self._resolve(transfer, fate.after))
        else:
            transfer.is_dead = True
        self._report(transfer, ending, fate.peer_lost, fate.cause)

    def _resolve(self, transfer: Transfer, ending: Ending) -> None:
        if transfer.is_dead or self.process.is_dead:
            return
        if ending is Ending.DONE:
            self._land(transfer)
            ending = self._place(transfer)
        transfer.is_dead = True
        self._report(transfer, ending, False, "after all")

    def _report(self, transfer: Transfer, ending: Ending, peer_lost: bool, cause: str) -> None:
        if self.is_closed or self.process.is_dead or transfer.is_over:
            return
        if ending is Ending.IN_DOUBT and self.detach(transfer.transfer_id):
            ending = Ending.DETACHED
        transfer.is_over = ending not in (Ending.IN_DOUBT, Ending.DETACHED)
        if transfer.is_staged:
            self.process.call_at(self.process.world.now, self._take_slots)
        difference = transfer.difference if ending is Ending.DONE else None
        self._news.append(TransferEnded(transfer.transfer_id, ending, cause, peer_lost, difference))
        self.process.call_at(self.process.world.now, self._on_ready)
