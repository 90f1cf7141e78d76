"""Real engines in processes of their own, as chaos, pressure and attack hurt them.

`Side` runs in a process: an engine whose memory is under the hostile allocator of `tests.lab.fleet`. Every
block that is published is compared byte by byte with what its request must hold, and free memory that changes shows
as well. `Worker` is the driver's view of one, whichever process plays it now, and how the pulls from it ended. `Arena`
is one scenario: a decode worker, prefill workers, and the problems that were found. The driver plays schedulers and
router.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from asynckv import (
    Engine,
    EngineConfig,
    KeysConfig,
    LeaseConfig,
    LimitsConfig,
    NixlConfig,
    PrefillRanks,
    PullConfig,
    Registration,
    configure_logging,
)
from asynckv.edges.sharing import shared_memory
from asynckv.errors import AsyncKVError, EngineClosed, PullError
from asynckv.geometry.layout import Layout
from asynckv.layout import register_memory
from asynckv.tools.bench.processes import Failure
from asynckv.tools.plan.layouts import model_layout, with_addresses
from asynckv.tools.plan.models import Heads, Model
from tests.lab.fleet import TRANSPORTS, Blocks, Fleet, Lost, Process, Refused, Words, free_memory, usage

TARGET = "tests.lab.arena:Side"
HEADS, LAYERS = (2, 64), 8
BLOCK = 16
"""Tokens per block; 64 KiB."""

NUM_BLOCKS, MOST_BLOCKS = 640, 48
RUBBISH = {"decode": 0xDEADBEEFDEADBEEF, "prefill": 0xBADC0FFEEBADF00D}
"""Words that each side's allocator writes into free blocks."""

TIMEOUT_S, PATIENCE_S = 4.0, 20.0
SLACK_S = 1.0
"""Seconds by which a pull may miss its deadline on a machine that is busy."""

BUSY = ("leases", "pulls", "transfers", "blocks_lent", "blocks_writing", "blocks_quarantined")
PULL = {
    "handshake_s": 2.0,
    "max_backoff_s": 1.0,
    "drain_s": 1.0,
    "gone_s": 5.0,
    "release_timeout_s": 6.0,
    "max_post_bytes": 1 << 18,
}
"""Shorter than the defaults, so that what is bounded is seen to be; small posts, so that many run."""


# -- a worker process --------------------------------------------------------------------------------


def layout_of(
    heads: tuple[int, int] = HEADS, layers: int = LAYERS, blocks: int = NUM_BLOCKS, block_tokens: int = BLOCK
) -> Layout:
    """Lay out a worker's memory."""
    model = Model("chaos", (Heads(*heads),) * layers)
    return model_layout(model, num_blocks=blocks, block_size=block_tokens, order="cross-nhd")


def allocate(layout: Layout) -> tuple[Registration, Words]:
    """Make memory, `[block, word]`, that another process can map."""
    raw = np.frombuffer(shared_memory(layout.memories[0].length), np.uint8)
    registration = register_memory(with_addresses(layout, [raw.ctypes.data]), (raw,))
    return registration, raw.view(np.uint64).reshape(layout.groups[0].num_blocks, -1)


def waited_s() -> float:
    """Seconds for which this thread was ready to run and had no core; 0 where the system does not count them."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class Side:
    """One rank, and what its driver may ask for.

    Attributes:
        pulls: Fields of its `PullConfig`, unless the driver gives others.
    """

    pulls: ClassVar[Mapping[str, Any]] = PULL

    def __init__(
        self,
        *,
        role: str,
        name: str,
        bind: str,
        seed: int,
        lease_s: float,
        grant_s: float,
        keys: dict[str, str] | None = None,
        heads: tuple[int, int] = HEADS,
        layers: int = LAYERS,
        blocks: int = NUM_BLOCKS,
        block_tokens: int = BLOCK,
        lease: dict[str, Any] | None = None,
        pull: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        process: Any = "auto",
        log: Any = "warning",
    ) -> None:
        configure_logging(log)
        self._rng = random.Random(seed)
        self._layout = layout_of(heads, layers, blocks, block_tokens)
        registration, words = self._allocate(self._layout)
        self.blocks = Blocks(words, rubbish=RUBBISH[role], seed=seed)
        self._lease = LeaseConfig(lease_s=lease_s, grant_s=grant_s, **lease or {})
        config = EngineConfig(
            engine_id=name,
            bind=bind,
            lease=self._lease,
            pull=PullConfig(**{**self.pulls, **(pull or {})}),
            keys=KeysConfig(**keys) if keys else None,
            limits=LimitsConfig(**limits or {}),
            nixl=NixlConfig(process=process),
        )
        self.engine = Engine(config, registration)
        self.counts: Counter[str] = Counter()
        self._group: PrefillRanks | None = None
        self._group_epoch = 0

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.aclose()

    def _allocate(self, layout: Layout) -> tuple[Registration, Words]:
        return allocate(layout)

    def group(self) -> PrefillRanks:
        """The scheduler's view of this engine as it is now."""
        engine = self.engine
        if self._group is None or self._group_epoch != engine.memory_epoch:
            name, self._group_epoch = engine.config.engine_id, engine.memory_epoch
            self._group = PrefillRanks(name, [engine.endpoint], memory_epoch=self._group_epoch, lease=self._lease)
        return self._group

    def address(self) -> str:
        """Tell where the engine listens."""
        return self.engine.endpoint.address

    async def lend(self, number: int, blocks: int, early: bool, lease_s: float | None) -> AsyncIterator[dict[str, Any]]:
        """Fill blocks, lend them, and overwrite them as soon as the lease is over; params may leave early."""
        ids = await self.blocks.take(blocks)
        lists, tokens = [(0, ids)], blocks * BLOCK
        params = self.group().make_params(f"p-{number}", lists, tokens, written=not early, lease_s=lease_s)
        if early:
            yield params
            await asyncio.sleep(self._rng.uniform(0, 0.004))  # the forward pass
        self.blocks.fill(number, ids)
        try:
            lent = self.engine.lend(params)
        except AsyncKVError:
            self.blocks.give(ids)
            raise
        if not early:
            yield params
        self.counts[f"lease.{(await lent.wait_released()).cause}"] += 1
        self.blocks.give(ids)

    async def pull(
        self, lent: dict[str, Any], timeout_s: float, how: str, after_s: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Pull one request, compare what is published, and overwrite the blocks as soon as they are back."""
        engine, loop, number, cached = self.engine, asyncio.get_running_loop(), lent["number"], lent["cached"]
        name, ids = f"d-{number}", await self.blocks.take(lent["blocks"] - cached)
        began, waited, reason, detail = loop.time(), waited_s(), "complete", ""
        returned: Callable[[], Awaitable[None]] = functools.partial(engine.returned, name)
        if how == "announce":
            engine.announce(name, lent["params"])
            await asyncio.sleep(after_s)
            reason = "cancelled" if engine.cancel(name) else "announce_ended"
        else:
            pull = engine.pull(name, [(cached * BLOCK, ids)], lent["params"], timeout_s=timeout_s)
            task = asyncio.create_task(pull)
            if how:
                loop.call_later(after_s, task.cancel if how == "task" else functools.partial(engine.cancel, name))
            await asyncio.wait({task})
            try:
                task.result()
            except PullError as exc:
                reason, detail, returned = exc.reason, f"{type(exc).__name__}: {exc}", exc.returned
            except asyncio.CancelledError:
                reason = "task_cancelled"
            except EngineClosed:
                reason = "closed"
            except Exception as exc:
                reason, detail = "untyped", repr(exc)
        waited = waited_s() - waited
        yield {
            "reason": reason,
            "detail": detail,
            "seconds": loop.time() - began,
            "waited_s": waited,
            "bytes": self.blocks.words[ids].nbytes,
            "wrong": self.blocks.wrong(number, ids, cached) if reason == "complete" else 0,
        }
        if reason != "complete":
            await returned()
            found = self.blocks.words[ids]
            # What only the proof kept from being published.
            foreign = (found != self.blocks.pattern(number, len(ids), cached)) & (found != self.blocks.rubbish)
            self.counts["withheld_bytes"] += 8 * int(np.count_nonzero(foreign))
        self.blocks.give(ids)

    async def hold(self, seconds: float) -> None:
        """Keep the event loop away, as an embedder's long call does; libzmq's thread goes on."""
        time.sleep(seconds)  # noqa: ASYNC251

    async def state(self, wait_s: float) -> dict[str, Any]:
        """Wait until nothing is owed and held, as long as asked to; then audit and tell."""
        deadline, blocks = time.monotonic() + wait_s, self.blocks
        while True:
            left = self._owed()
            if not left or time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.01)  # no event announces a change of a gauge
        try:
            self.engine.check_integrity()
            integrity = ""
        except AsyncKVError as exc:
            integrity = str(exc)
        blocks.audit()
        free_memory()  # failed pulls leave cycles of exceptions and frames, with whole requests' bytes
        statistics = self.engine.statistics()
        used = usage() | {
            "nixl_peers": statistics.counters["data.peers"],
            "zmq_links": statistics.counters["control.links"],
            "tasks": len(asyncio.all_tasks()),
            "peers_remembered": statistics.gauges["peers"],
        }
        counters = dict(statistics.counters) | dict(self.counts)
        return {"left": left, "counters": counters, "integrity": integrity, "stray": blocks.stray, "usage": used}

    def _owed(self) -> dict[str, int]:
        """Return what is owed or held."""
        gauges = {**self.engine.statistics().gauges, "taken": self.blocks.num_taken}
        return {k: v for k in (*BUSY, "taken") if (v := gauges[k])}


# -- the driver's view of its workers ----------------------------------------------------------------


class Worker:
    """One engine, whichever process plays it now; and how the pulls from it ended."""

    def __init__(self, arena: Arena, name: str) -> None:
        self.arena, self.name = arena, name
        self.process: Process | None = None
        self.address, self.reached_by = "", ""
        """Where it listens, and what the decode side is told instead, if anything."""
        self.counts: Counter[str] = Counter(complete=0, bytes_compared=0, bytes_wrong=0, late=0)
        self.failed: Counter[str] = Counter()
        self.slowest_s, self.latest_s, self.latest_running_s = 0.0, -math.inf, -math.inf
        """The longest pull, and by how much the latest missed its deadline (negative if none did), with the time for
        which its process had no core and without."""
        self.reader: Worker | None = None
        """The worker that pulls from it; the decode worker if `None`."""
        self.aborts = 0
        """Number of times that its process ended by itself."""
        self.stops = 0
        """Number of times that it was stopped or continued: calls that run meanwhile may be late by as long."""
        self._setup: dict[str, Any] = {}
        self.up, self._news = asyncio.Event(), asyncio.Event()

    # -- process -----------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.process.is_lost

    async def start(self, bind: str = "tcp://127.0.0.1:0", **setup: Any) -> Self:
        """Start a process and wait for its engine; what it was set up with before holds until it is changed."""
        arena, role = self.arena, "decode" if self.name == "decode" else "prefill"
        self._setup = {"lease_s": 8.0, "grant_s": 2.0} | arena.setup | self._setup | setup
        said = {"role": role, "name": self.name, "bind": bind, "seed": arena.rng.getrandbits(32)}
        said["keys"] = arena.keys.get(self.name)
        start = functools.partial(arena.fleet.start, self.name, arena.target, on_abort=self._aborted)
        self.process = await start(**self._setup | said)
        self.address = await self.ask("address")
        self.up.set()
        return self

    def _aborted(self, how: str) -> None:
        self.up.clear()
        self.aborts += 1
        self.arena.note(how)

    async def kill(self) -> None:
        """Kill -9, and collect it."""
        self.up.clear()
        if self.process is not None:
            await self.process.kill()

    async def end(self, within_s: float = PATIENCE_S) -> None:
        """Let it close its engine and end in order."""
        self.up.clear()
        assert self.process is not None
        await self.process.end(within_s)

    async def revive(self) -> None:
        """Start its process again where it has ended by itself."""
        if not self.is_running:
            await self.kill()
            await self.start(self.address)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.stops += number in (signal.SIGSTOP, signal.SIGCONT)
        self.process.signal(number)

    async def ask(self, what: str, within_s: float | None = PATIENCE_S, /, **fields: Any) -> Any:
        """Have something done, and wait for the answer.

        Raises:
            Lost: The process is gone, or its engine is closed.
            Failure: It did not answer in time, or what was asked failed.
        """
        if self.process is None:
            raise Lost(f"{self.name} was never there")
        try:
            return await self.process.ask(what, within_s, **fields)
        except Refused as exc:
            raise (Lost(str(exc)) if exc.kind == "EngineClosed" else exc) from None

    # -- requests ----------------------------------------------------------------------------------

    async def lend(self, blocks: int = 0, lease_s: float | None = None, reads: bool = False) -> dict[str, Any]:
        """Have a request lent; returns what a pull of it needs. Unless it `reads`, decode may have all of it."""
        rng, number = self.arena.rng, next(self.arena.numbers)
        blocks, early = blocks or rng.randint(1, MOST_BLOCKS), rng.random() < 0.2
        params = await self.ask("lend", number=number, blocks=blocks, early=early, lease_s=lease_s)
        if self.reached_by:
            params["endpoints"][0]["address"] = self.reached_by
        cached = rng.randint(0, blocks - reads) if rng.random() < 0.1 else 0
        return {"number": number, "params": params, "blocks": blocks, "cached": cached}

    async def pull(
        self, lent: dict[str, Any], timeout_s: float = TIMEOUT_S, how: str = "", after_s: float = 0.0
    ) -> str:
        """Have the decode worker, or its own reader, pull it; returns the reason for which it ended."""
        fields = {"lent": lent, "timeout_s": timeout_s, "how": how, "after_s": after_s}
        reader = self.reader or self.arena.decode
        stops = reader.stops
        outcome: dict[str, Any] = await reader.ask("pull", timeout_s + PATIENCE_S, **fields)
        reason: str = outcome["reason"]
        self.slowest_s = max(self.slowest_s, outcome["seconds"])
        if reader.stops == stops:  # a process is late by what it was stopped for itself, or had no core for
            self.latest_s = max(self.latest_s, outcome["seconds"] - timeout_s)
            late_s = outcome["seconds"] - outcome["waited_s"] - timeout_s
            self.latest_running_s = max(self.latest_running_s, late_s)
            if late_s > SLACK_S:
                self.counts["late"] += 1
                self.arena.note(f"{reader.name} was told {late_s:.3f} s late: {reason} {outcome['detail']}")
        if reason == "complete":
            self.counts.update(complete=1, bytes_compared=outcome["bytes"], bytes_wrong=outcome["wrong"])
        else:
            self.failed[reason] += 1
            self.arena.check(reason != "untyped", f"{self.name}: {outcome['detail']}")
        self._news.set()
        return reason

    async def more(self, count: int, seconds: float = 0.0) -> None:
        """Wait until so many more pulls are complete, and at least so long."""
        goal, began = self.counts["complete"] + count, time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.counts["complete"] < goal:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            text = f"{self.name} did not complete {count} more pulls within {PATIENCE_S:g} s; failed: {self.failed}"
            raise Failure(text) from None
        await asyncio.sleep(began + seconds - time.monotonic())

    @contextlib.asynccontextmanager
    async def load(self, clients: int) -> AsyncIterator[None]:
        """Keep so many pulls running whenever the worker is up; on leaving, wait for the last."""
        is_over = False

        async def client() -> None:
            while not is_over:
                await self.up.wait()
                try:
                    lent = await self.lend()
                except Lost:
                    continue
                await self.pull(lent)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
            yield
            is_over = True

    async def state(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until it owes and holds nothing, and audit it."""
        state: dict[str, Any] = await self.ask("state", within_s + PATIENCE_S, wait_s=within_s)
        check = self.arena.check
        check(not state["left"], f"{self.name} still holds {state['left']} after {within_s:g} s")
        check(not state["integrity"], f"{self.name}: {state['integrity']}")
        check(not state["stray"], f"{self.name}: {state['stray']} bytes were written into free blocks")
        return state

    def record(self) -> dict[str, Any]:
        seconds = {"slowest_s": self.slowest_s, "latest_s": self.latest_s, "latest_running_s": self.latest_running_s}
        seconds = {name: round(value, 3) for name, value in seconds.items() if math.isfinite(value)}
        return {**self.counts, "failed": dict(self.failed), **seconds}


class Arena:
    """One scenario's processes, and what was found."""

    def __init__(self, name: str, seed: int, transport: str, fleet: Fleet, target: str) -> None:
        self.name, self.transport, self.fleet, self.target = name, transport, fleet, target
        self.seconds = 4.0
        """About how long the load is kept up."""
        self.cycles = 20
        """Number of faults in `survive`."""
        self.setup: dict[str, Any] = {}
        """Of all workers."""
        self.rng = random.Random(f"{seed}/{name}")
        self.numbers = itertools.count(1)
        self.problems: list[str] = []
        self.found: dict[str, Any] = {}
        self.decode = Worker(self, "decode")
        self.prefill: list[Worker] = []
        self.keys: dict[str, dict[str, str]] = {}
        """Fields of `KeysConfig` by worker; none has any if left empty."""

    def note(self, text: str) -> None:
        """Print a line for the person who watches."""
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

    def blame(self, group: BaseException) -> None:
        """Remember every cause in an exception group."""
        causes = [group]
        for cause in causes:
            causes += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        self.problems += [f"{type(x).__name__}: {x}" for x in causes if not isinstance(x, BaseExceptionGroup)]

    def check(self, is_so: bool, problem: str) -> None:
        """Remember a problem unless all is well."""
        if not is_so and len(self.problems) < 50:
            self.problems.append(problem)

    async def start(self, name: str, **setup: Any) -> Worker:
        """Start a prefill engine."""
        self.prefill.append(Worker(self, name))
        return await self.prefill[-1].start(**setup)

    async def finish(self, healthy: Worker | None = None) -> None:
        """Check the conditions of every scenario; on a prefill engine that was not harmed, nothing may have failed."""
        began = time.monotonic()
        for worker in (self.decode, *self.prefill):
            state = await worker.state()
            if worker is self.decode:
                self.found["decode_after"] = state["usage"]
                self.found["withheld_bytes"] = state["counters"].get("withheld_bytes", 0)
        self.found["settle_s"] = round(time.monotonic() - began, 2)
        for worker in (self.decode, *self.prefill):
            self.check(not worker.counts["bytes_wrong"], f"{worker.name}: wrong bytes were published")
            self.check(not worker.counts["late"], f"{worker.name}: pulls ended after their deadline")
        if healthy is not None:
            self.check(not healthy.failed, f"{healthy.name} was left alone, but {dict(healthy.failed)}")


@contextlib.asynccontextmanager
async def arena(
    name: str, seed: int, *, transport: str = "tcp", target: str = TARGET, within_s: float | None = None
) -> AsyncIterator[Arena]:
    """Make a place for processes; none is left, and what made a scenario fail is among its problems."""
    # Else the C library keeps what the comparisons have freed, more and more of it, and memory could not be judged.
    async with Fleet({**TRANSPORTS[transport], "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}) as fleet:
        made = Arena(name, seed, transport, fleet, target)
        try:
            async with asyncio.timeout(within_s):
                yield made
        except* (Failure, TimeoutError) as group:
            made.blame(group)
        finally:
            left = await fleet.stop()
            made.check(not left, f"{len(left)} processes that workers had started outlive them")
            for line in fleet.last_words() if made.problems else ():
                made.note(line)


async def perform(
    name: str,
    work: Callable[[Arena], Awaitable[None]],
    *,
    within_s: float,
    seed: int = 0,
    transport: str = "tcp",
    target: str = TARGET,
) -> dict[str, Any]:
    """Let a scenario happen; returns its record. Bounded in time, and no process is left."""
    began = time.monotonic()
    async with arena(name, seed, transport=transport, target=target, within_s=within_s) as place:
        await work(place)
    record = {"scenario": name, "ok": not place.problems, "seconds": round(time.monotonic() - began, 2), "seed": seed}
    pulls = {x.name: x.record() for x in place.prefill}
    return record | {"problems": place.problems, "pulls": pulls} | place.found
