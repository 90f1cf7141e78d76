"""Break real workers on purpose and watch what is published: `python -m scripts.chaos --help`.

Real processes, NIXL over UCX on CPU memory, ZMQ on 127.0.0.1. Scenarios kill, restart, freeze and garble prefill
workers, or the wire to them, while a decode worker pulls. Every block that is published is compared byte by byte
with what its request must hold. Both sides' allocators are hostile: what they get back they overwrite at once, and a
free block that changes shows as well. This process plays schedulers and router; its workers are this very script.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import gc
import itertools
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import zmq

from asynckv import (
    Engine,
    EngineConfig,
    KeysConfig,
    LeaseConfig,
    LimitsConfig,
    NixlConfig,
    PrefillGroup,
    PullConfig,
    Registration,
    configure_logging,
    register_memory,
)
from asynckv.core import wire as m
from asynckv.core.types import Cohort, Outcome, decode_params
from asynckv.edges.sharing import shared_memory
from asynckv.errors import AsyncKVError, EngineClosed, PullError, RemoteProtocolError
from asynckv.keys import KeyPair
from asynckv.tools.layouts import model_layout, with_addresses
from asynckv.tools.models import Heads, Model

MODULE = "scripts.chaos"
ROOT = Path(__file__).resolve().parents[1]
MODEL = Model("chaos", (Heads(2, 64),) * 8)
BLOCK = 16
"""Tokens per block; 64 KiB."""

NUM_BLOCKS, MOST_BLOCKS = 640, 48
RUBBISH = {"decode": 0xDEADBEEFDEADBEEF, "prefill": 0xBADC0FFEEBADF00D}
"""What each side's allocator writes into free blocks."""

TIMEOUT_S, PATIENCE_S = 4.0, 20.0
SLACK_S = 1.0
"""How much later than its deadline a pull may end on a machine that is busy."""

TRANSPORTS = {
    "tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    "cma": {"UCX_TLS": "cma,posix,tcp", "UCX_NET_DEVICES": "lo"},
    "auto": {},
}
"""What is said to UCX; tcp carries what shared memory does not."""

BUSY = ("leases", "pulls", "transfers", "blocks_lent", "blocks_writing", "blocks_quarantined")
HUGE = 100 << 20
MARK = "ASYNCKV_CHAOS"
SETTLED, GROWTH = 10, {"fds": 2, "threads": 0, "rss_mib": 8, "tasks": 8}
GROWTH |= {"children": 0, "children_fds": 2, "children_threads": 0, "children_rss_mib": 8}
"""After how many cycles a survivor has all it needs, and how much more it may have at the end, under load."""

Words = npt.NDArray[np.uint64]


# -- a worker process --------------------------------------------------------------------------------


class Blocks:
    """One worker's memory under a hostile allocator."""

    words: Words
    registration: Registration

    def __init__(self, seed: int, rubbish: int, model: Model = MODEL, count: int = NUM_BLOCKS) -> None:
        self._layout = model_layout(model, num_blocks=count, block_size=BLOCK, order="cross-nhd")
        self.rubbish = np.uint64(rubbish)
        self.free = list(range(count))
        self.stray = 0
        """Bytes that were written into free blocks."""
        self._changed, self._rng = asyncio.Condition(), random.Random(seed)
        self.move()

    def move(self) -> None:
        """Lie in other memory from now on."""
        raw = np.frombuffer(shared_memory(self._layout.memories[0].length), np.uint8)
        self.registration = register_memory(with_addresses(self._layout, [raw.ctypes.data]), (raw,))
        self.words = raw.view(np.uint64).reshape(len(self.free), -1)
        self.words[:] = self.rubbish

    @property
    def num_taken(self) -> int:
        return len(self.words) - len(self.free)

    async def take(self, count: int) -> list[int]:
        """Wait for so many free blocks, at random places."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.free) >= count)
            self._rng.shuffle(self.free)
            self.free, ids = self.free[count:], self.free[:count]
        self.audit(ids)
        return ids

    async def give(self, ids: list[int]) -> None:
        self.words[ids] = self.rubbish
        async with self._changed:
            self.free += ids
            self._changed.notify_all()

    def audit(self, ids: list[int]) -> None:
        self.stray += 8 * int(np.count_nonzero(self.words[ids] != self.rubbish))

    def pattern(self, request: int, first: int, count: int) -> Words:
        """Every 8 bytes depend on the request, the place of the block in it, and the place in the block."""
        rows = np.arange(first, first + count, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        columns = np.arange(self.words.shape[1], dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        return rows + columns + np.uint64((request * 0xD6E8FEB86659FD93) % (1 << 64))


def family(pid: int) -> list[int]:
    """A process and all that it has started and that live."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):  # it ends this moment
            for task in os.listdir(f"/proc/{each}/task"):
                pids += map(int, Path(f"/proc/{each}/task/{task}/children").read_text().split())
    return pids


def marked(mark: str) -> list[int]:
    """Processes that have a mark in their environment, whoever started them."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found


def own_usage() -> dict[str, int]:
    """What this process has open, runs and occupies, and what its children have."""
    found = Counter[str](children=0, children_fds=0, children_threads=0, children_rss_mib=0)
    for whose, pid in zip(itertools.chain([""], itertools.repeat("children_")), family(os.getpid()), strict=False):
        with contextlib.suppress(OSError):  # it ends this moment
            found[f"{whose}fds"] += len(os.listdir(f"/proc/{pid}/fd"))
            found[f"{whose}threads"] += len(os.listdir(f"/proc/{pid}/task"))
            # Of its own: pages of the pool count for whoever has touched them.
            found[f"{whose}rss_mib"] += (
                int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) >> 10
            )
            found["children"] += bool(whose)
    return dict(found)


def waited_s() -> float:
    """Seconds for which this thread was ready to run and had no core; 0 where the system does not count them."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class Side:
    """One rank under the driver's commands: JSON lines in, JSON lines out."""

    def __init__(self, setup: Mapping[str, Any], out: int) -> None:
        self._rng = random.Random(setup["seed"])
        model = Model("chaos", (Heads(*setup["heads"]),) * setup["layers"]) if "heads" in setup else MODEL
        self.blocks = Blocks(setup["seed"], RUBBISH[setup["role"]], model, setup.get("blocks", NUM_BLOCKS))
        self._lease = LeaseConfig(lease_s=setup["lease_s"], grant_s=setup["grant_s"])
        # Shorter than the defaults, so that what is bounded is seen to be; small posts, so that many run.
        pull: dict[str, Any] = {
            "handshake_s": 2.0,
            "max_backoff_s": 1.0,
            "drain_s": 1.0,
            "gone_s": 5.0,
            "release_timeout_s": 6.0,
        }
        pull = pull | {"max_post_bytes": 1 << 18} | setup.get("pull", {})
        keys = KeysConfig(**setup["keys"]) if setup["keys"] else None
        config = EngineConfig(
            engine_id=setup["name"],
            bind=setup["bind"],
            lease=self._lease,
            pull=PullConfig(**pull),
            keys=keys,
            limits=LimitsConfig(**setup.get("limits", {})),
            nixl=NixlConfig(process=setup.get("process", "auto")),
        )
        self.engine = Engine(config, self.blocks.registration)
        self.counts: Counter[str] = Counter()
        self._out = out
        self._group: PrefillGroup | None = None
        self._group_epoch = 0

    def say(self, ask: int, **fields: Any) -> None:
        """Answer one command."""
        data = json.dumps({"ask": ask, **fields}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the end of stdin will end this process
            while data:
                data = data[os.write(self._out, data) :]

    def group(self) -> PrefillGroup:
        """The scheduler's view of this engine as it is now."""
        engine = self.engine
        if self._group is None or self._group_epoch != engine.memory_epoch:
            name, self._group_epoch = engine.config.engine_id, engine.memory_epoch
            self._group = PrefillGroup(name, [engine.endpoint], memory_epoch=self._group_epoch, lease=self._lease)
        return self._group

    async def where(self, ask: int) -> None:
        """Tell where the engine listens."""
        self.say(ask, address=self.engine.endpoint.address)

    async def lend(self, ask: int, number: int, blocks: int, early: bool, lease_s: float | None) -> None:
        """Fill blocks, lend them, and overwrite them as soon as the lease is over; params may leave early."""
        ids = await self.blocks.take(blocks)
        lists, tokens = [(0, ids)], blocks * BLOCK
        params = self.group().make_params(f"p-{number}", lists, tokens, written=not early, lease_s=lease_s)
        if early:
            self.say(ask, params=params)
            await asyncio.sleep(self._rng.uniform(0, 0.004))  # the forward pass
        self.blocks.words[ids] = self.blocks.pattern(number, 0, blocks)
        try:
            lent = self.engine.lend(params)
        except AsyncKVError:
            await self.blocks.give(ids)
            raise
        if not early:
            self.say(ask, params=params)
        self.counts[f"lease.{(await lent.wait_released()).cause}"] += 1
        await self.blocks.give(ids)

    async def pull(self, ask: int, lent: dict[str, Any], timeout_s: float, how: str, after_s: float) -> None:
        """Pull one request, compare what is published, and overwrite the blocks as soon as they are back."""
        engine, loop, name, cached = self.engine, asyncio.get_running_loop(), f"d-{lent['number']}", lent["cached"]
        ids = await self.blocks.take(lent["blocks"] - cached)
        began, waited, reason, detail, wrong = loop.time(), waited_s(), "complete", "", 0
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
        seconds, pattern = loop.time() - began, self.blocks.pattern(lent["number"], cached, len(ids))
        if reason == "complete":
            wrong = 8 * int(np.count_nonzero(self.blocks.words[ids] != pattern))
        fields = {"seconds": seconds, "waited_s": waited, "bytes": pattern.nbytes, "wrong": wrong}
        self.say(ask, reason=reason, detail=detail, **fields)
        if reason != "complete":
            await returned()
            found = self.blocks.words[ids]
            # What only the proof kept from being published.
            foreign = (found != pattern) & (found != self.blocks.rubbish)
            self.counts["withheld_bytes"] += 8 * int(np.count_nonzero(foreign))
        await self.blocks.give(ids)

    async def state(self, ask: int, wait_s: float) -> None:
        """Wait until nothing is owed and held, as long as asked to; then audit and tell."""
        deadline, blocks = time.monotonic() + wait_s, self.blocks
        while True:
            statistics = self.engine.statistics()
            left = {k: v for k in BUSY if (v := statistics.gauges[k])}
            if blocks.num_taken:
                left["taken"] = blocks.num_taken
            if not left or time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.01)  # gauges tell nobody when they change
        try:
            self.engine.check_integrity()
            integrity = ""
        except AsyncKVError as exc:
            integrity = str(exc)
        blocks.audit(blocks.free)
        gc.collect()  # failed pulls leave cycles of exceptions and frames, with whole requests' bytes
        usage = own_usage() | {
            "nixl_peers": statistics.counters["data.peers"],
            "zmq_links": statistics.counters["control.links"],
            "tasks": len(asyncio.all_tasks()),
            "peers_remembered": statistics.gauges["peers"],
        }
        counters = dict(statistics.counters) | dict(self.counts)
        self.say(ask, left=left, counters=counters, integrity=integrity, stray=blocks.stray, usage=usage)

    def commands(self) -> dict[str, Callable[..., Coroutine[Any, Any, None]]]:
        """What the driver may ask for."""
        return {"where": self.where, "lend": self.lend, "pull": self.pull, "state": self.state}


async def serve(setup: Mapping[str, Any], kind: type[Side]) -> None:
    """Run one worker until its driver is gone."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    side = kind(setup, out)
    commands = side.commands()
    tasks: set[asyncio.Task[None]] = set()

    async def run(ask: int, op: str, fields: dict[str, Any]) -> None:
        try:
            await commands[op](ask, **fields)
        except Exception as exc:
            side.say(ask, error=f"{op}: {exc!r}", closed=isinstance(exc, EngineClosed))

    async with side.engine:
        while line := await reader.readline():
            task = asyncio.create_task(run(*json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def play(role: str, kind: type[Side] = Side) -> int:
    """Be a worker process."""
    setup = json.loads(role)
    faulthandler.enable()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a stopped worker could not see that its driver died
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(setup.get("log", "warning"))
    asyncio.run(serve(setup, kind))
    return 0


# -- the driver's view of its workers ----------------------------------------------------------------


class Failure(Exception):
    """A scenario cannot go on."""


class Lost(Failure):
    """A worker process is gone, or its engine serves nobody now."""


class Worker:
    """One engine, whichever process plays it now; and how the pulls from it ended."""

    def __init__(self, arena: Arena, name: str) -> None:
        self.arena, self.name = arena, name
        self.process: asyncio.subprocess.Process | None = None
        self.address, self.reached_by = "", ""
        """Where it listens, and what the decode side is told instead, if anything."""
        self.counts: Counter[str] = Counter(complete=0, bytes_compared=0, bytes_wrong=0, late=0)
        self.failed: Counter[str] = Counter()
        self.slowest_s, self.latest_s, self.latest_running_s = 0.0, -math.inf, -math.inf
        """The longest pull, and by how much the latest missed its deadline (negative if none did), with the time for
        which its process had no core and without."""
        self.reader: Worker | None = None
        """Who pulls from it; the decode worker if nobody else is named."""
        self.aborts = 0
        """How often its process ended by itself."""
        self.stops = 0
        """How often it was stopped, or told to go on: what runs meanwhile may be late by as long."""
        self._is_ending = False
        self._setup: dict[str, Any] = {}
        self.up, self._news = asyncio.Event(), asyncio.Event()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None

    # -- process -----------------------------------------------------------------------------------

    async def start(self, bind: str = "tcp://127.0.0.1:0", **setup: Any) -> Self:
        """Start a process and wait for its engine; what it was set up with before holds until it is changed."""
        arena, role = self.arena, "decode" if self.name == "decode" else "prefill"
        self._setup = {"lease_s": 8.0, "grant_s": 2.0} | arena.setup | self._setup | setup
        said = {"role": role, "name": self.name, "bind": bind, "seed": arena.rng.getrandbits(32)}
        said["keys"] = arena.keys.get(self.name)
        command = (sys.executable, "-m", arena.module, "--role", json.dumps(self._setup | said))
        pipe = asyncio.subprocess.PIPE
        with open(arena.logs / f"{self.name}.log", "ab") as log:  # noqa: ASYNC230
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=log, env=arena.env, cwd=ROOT, limit=1 << 24
            )
        self._is_ending = False
        self._reader = asyncio.create_task(self._read(self.process))
        self.address = (await self.ask("where"))["address"]
        self.up.set()
        return self

    async def kill(self) -> None:
        """Kill -9, and collect it."""
        self.up.clear()
        if self.process is not None and self._reader is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
            assert self.process.stdin is not None
            self.process.stdin.close()
            await self._reader

    async def end(self, within_s: float = PATIENCE_S) -> None:
        """Let it close its engine and end in order."""
        self.up.clear()
        assert self.process is not None
        assert self.process.stdin is not None
        self._is_ending = True
        self.process.stdin.close()
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            raise Failure(f"{self.name} did not end in order within {within_s:g} s") from None
        finally:
            await self.kill()

    async def revive(self) -> None:
        """Start its process again where it has ended by itself."""
        if self._reader is not None and self._reader.done():
            await self.kill()
            await self.start(self.address)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.stops += number in (signal.SIGSTOP, signal.SIGCONT)
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def ask(self, op: str, within_s: float = PATIENCE_S, **fields: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            Lost: The process is gone, or its engine is closed.
            Failure: It did not answer in time, or the command failed.
        """
        if self._reader is None or self._reader.done():
            raise Lost(f"{self.name} is gone")
        assert self.process is not None
        assert self.process.stdin is not None
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.process.stdin.write(json.dumps([number, op, fields]).encode() + b"\n")
        try:
            async with asyncio.timeout(within_s):
                answer: dict[str, Any] = await future
        except TimeoutError:
            raise Failure(f"{self.name} did not answer {op!r} within {within_s:g} s") from None
        finally:
            del self._asked[number]
        if "error" in answer:
            raise (Lost if answer["closed"] else Failure)(f"{self.name}: {answer['error']}")
        return answer

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            future = self._asked.get(answer["ask"])
            if future is not None and not future.done():
                future.set_result(answer)
        status = await process.wait()
        if status != -signal.SIGKILL and not (self._is_ending and status == 0):
            self.aborts += 1
            self.arena.note(f"{self.name} ended by itself, status {status}")
        self.up.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Lost(f"{self.name} is gone"))

    # -- requests ----------------------------------------------------------------------------------

    async def lend(self, blocks: int = 0, lease_s: float | None = None, reads: bool = False) -> dict[str, Any]:
        """Have a request lent; returns what a pull of it needs. Unless it `reads`, decode may have all of it."""
        rng, number = self.arena.rng, next(self.arena.numbers)
        blocks, early = blocks or rng.randint(1, MOST_BLOCKS), rng.random() < 0.2
        params = (await self.ask("lend", number=number, blocks=blocks, early=early, lease_s=lease_s))["params"]
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
        outcome = await reader.ask("pull", timeout_s + PATIENCE_S, **fields)
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
        state = await self.ask("state", within_s + PATIENCE_S, wait_s=within_s)
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

    def __init__(self, name: str, seed: int, transport: str, logs: Path, module: str = MODULE) -> None:
        self.name, self.logs, self.module = name, logs, module
        self.seconds = 4.0
        """About how long the load is kept up."""
        self.cycles = 20
        """How many faults `survive` has."""
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
        self.env = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.env |= TRANSPORTS[transport]
        # Else the C library keeps what the comparisons have freed, more and more of it, and memory could not be judged.
        self.env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
        self.mark = f"{os.getpid()}-{random.getrandbits(64):x}"
        """In the environment of all processes of this run, and of what they start."""
        self.env[MARK] = self.mark

    def note(self, text: str) -> None:
        """Tell the person who watches."""
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
        """Judge what holds in every scenario; of a prefill engine that nobody harmed, nothing may have failed."""
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


# -- a proxy between control planes, and garbage -----------------------------------------------------


class Proxy:
    """A TCP proxy that delays, swallows, truncates, cuts and refuses, as long as it is told to."""

    def __init__(self, rng: random.Random, target: str) -> None:
        self._rng, self._target = rng, int(target.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.is_bad = False
        self.flow = asyncio.Event()
        """While it is cleared, everything waits."""
        self.flow.set()
        self.did: Counter[str] = Counter()
        self.recorded: list[bytes] = []
        """What readers sent first."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.is_bad = False
        self.flow.set()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        writers = [writer]
        try:
            if self.is_bad and self._rng.random() < 0.2:
                self.did["refused"] += 1
                return
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(back)
            self._writers.update(writers)
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, back), (there, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            self.did["nobody_there"] += 1
        finally:
            self._writers.difference_update(writers)
            for each in writers:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self.flow.wait()
            if writer.get_extra_info("peername")[1] == self._target and len(self.recorded) < 20:
                self.recorded.append(data)
            does = ("passed", "delayed", "cut", "truncated", "swallowed")
            (deed,) = self._rng.choices(does, (70, 18, 4, 4, 4)) if self.is_bad else does[:1]
            self.did[deed] += 1
            if deed == "delayed":
                await asyncio.sleep(self._rng.expovariate(1 / 0.08))
            elif deed == "truncated":
                data = data[: self._rng.randrange(len(data))]
            elif deed == "swallowed":
                # The rest goes nowhere for a while; then the connection breaks.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._rng.uniform(0.1, 1.0)):
                        while await reader.read(1 << 16):
                            pass
            if deed not in ("cut", "swallowed"):
                writer.write(data)
                await writer.drain()
            if deed not in does[:2]:
                return


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change some bytes, or cut, repeat and insert some."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(out) + 1), rng.randint(1, 16)
        new = (b"", rng.randbytes(1), rng.randbytes(size), bytes(out[at : at + 4 * size]) * 2)
        out[at : at + rng.choice((0, 1, size))] = rng.choice(new)
    return bytes(out)


def real_packets(params: Mapping[str, Any]) -> list[bytes]:
    """Packets about one lent request that its rank would take from a reader."""
    known = decode_params(params)
    key, name, cohort = known.key, known.request_id, Cohort("stranger")
    digest = m.blocks_digest(known.groups, known.num_tokens, known.written)
    said: list[m.Message] = [
        m.Hello(7, m.MAJOR, m.MINOR, known.engine_id, 0, cohort),
        m.Claim(key, name, cohort, "stranger-1", 8, digest, 5.0),
        m.Renew(key, "stranger-1", 9, 5.0),
        m.Release(key, name, cohort, "stranger-1", Outcome.FAILED),
        m.StatusRequest(11),
    ]
    return [m.encode_packet("stranger", known.endpoints[0].incarnation, x) for x in (*([y] for y in said), said)]


def is_malformed(data: bytes) -> bool:
    """The engine's one decoder refuses it."""
    try:
        m.decode_packet(data)
    except RemoteProtocolError:
        return True
    return False


class Stranger:
    """A DEALER that sends anything, with keys if it has some. Blocks.

    A ping after each batch tells when the batch was taken.
    """

    def __init__(self, address: str, pair: KeyPair | None = None, within_s: float = 5.0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, int(within_s * 1000))
        self._socket.setsockopt(zmq.RCVTIMEO, int(within_s * 1000))
        endpoint, _, key = address.partition("#")
        if pair is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key))
        self._socket.connect(endpoint)
        self._nonces = itertools.count(1 << 40)

    def send(self, batch: list[list[bytes]]) -> bool:
        """Send; False if not all was taken."""
        try:
            for frames in batch:
                self._socket.send_multipart(frames)
            ping = m.Ping(next(self._nonces))
            self._socket.send(m.encode_packet("stranger", "", [ping]))
            while m.Pong(ping.nonce) not in m.decode_packet(self._socket.recv()).messages:
                pass
        except zmq.Again:
            return False
        return True

    def send_huge(self) -> bool:
        """Send a frame that is too large; True if the listener cut the connection for it."""
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.send(bytes(HUGE), copy=False)
        was_cut = bool(monitor.poll(10_000))
        self._socket.disable_monitor()
        monitor.close(0)
        return was_cut

    def close(self) -> None:
        self._context.destroy(0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HANDSHAKE = GREETING + bytes([4, len(READY)]) + READY
"""With which a DEALER of ZMTP 3.0 begins."""


def place(address: str) -> tuple[str, int]:
    """Host and port of a control plane's address."""
    return "127.0.0.1", int(address.partition("#")[0].rpartition(":")[2])


async def shout(address: str, chunks: Iterable[bytes]) -> int:
    """Write to a raw TCP connection until all is said or the other side has had enough; the bytes it took."""
    reader, writer = await asyncio.open_connection(*place(address))
    sent = 0
    try:
        async with asyncio.timeout(5.0):
            for chunk in chunks:
                if chunk.startswith(HANDSHAKE):
                    # What follows is only taken for frames once the other side is ready.
                    writer.write(HANDSHAKE)
                    size = (await reader.readexactly(len(GREETING) + 2))[-1]
                    await reader.readexactly(size)
                    chunk, sent = chunk.removeprefix(HANDSHAKE), sent + len(HANDSHAKE)
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
    except (OSError, EOFError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return sent


# -- scenarios ---------------------------------------------------------------------------------------


async def kill(arena: Arena) -> None:
    """Kill -9 a prefill worker in the middle of pulls, three times, beside a healthy one."""
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    outages: list[float] = []
    async with healthy.load(3), victim.load(6):
        for _ in range(3):
            await victim.more(20, arena.seconds / 3)
            stock = [await victim.lend(reads=True) for _ in range(6)]
            during = [asyncio.create_task(victim.pull(lent)) for lent in stock[:3]]
            await asyncio.sleep(arena.rng.uniform(0, 0.02))  # a random moment
            began = time.monotonic()
            await victim.kill()
            for lent in stock[3:]:
                arena.check(await victim.pull(lent) != "complete", "a request of a dead process completed")
            await asyncio.gather(*during, healthy.more(5))
            await victim.start()
            await victim.more(5)
            outages.append(round(time.monotonic() - began, 2))
            arena.note(f"kill {len(outages)}: {victim.record()}; healthy: {healthy.counts['complete']}")
    arena.found["outages_s"] = outages
    await arena.finish(healthy)
    arena.check(bool(victim.failed), "no pull was hit by a kill")


async def restart(arena: Arena) -> None:
    """Restart a prefill worker on its port, ten times or more, under load; nothing in the decode worker may grow."""
    victim = await arena.start("victim")
    address, refusals, seen = victim.address, Counter[str](), list[dict[str, int]]()
    for number in range(1 + max(10, int(2.5 * arena.seconds))):
        async with victim.load(6):
            await victim.more(5, arena.seconds / 20)
            if number:
                old = await victim.lend(reads=True)
                await victim.kill()
                await victim.start(address)
                arena.check(victim.address == address, f"restarted at {victim.address}, not {address}")
                refusals[await victim.pull(old)] += 1
                await victim.more(10)
        seen.append((await arena.decode.state())["usage"])
        arena.note(f"start {number}: {seen[-1]} {victim.counts['complete']} complete")
    arena.found |= {"restarts": len(seen) - 1, "old_params": dict(refusals)} | {
        k: [x[k] for x in seen] for k in seen[0]
    }
    arena.check(set(refusals) <= {"restarted", "peer_lost", "peer_unreachable"}, f"old params: {refusals}")
    for what in ("nixl_peers", "zmq_links", "fds", "tasks"):
        # The second process of the data plane is started after a while; each takes a socket and a process descriptor.
        third, last = (x[what] - (2 * x["children"] if what == "fds" else 0) for x in (seen[3], seen[-1]))
        arena.check(last <= third, f"{what} grew from {third} after 3 restarts to {last} after {len(seen) - 1}")
    await arena.finish()


async def freeze(arena: Arena) -> None:
    """Stop a prefill worker for 3 s in the middle of pulls, beside a healthy one."""
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    async with healthy.load(3), victim.load(6):
        await victim.more(20, arena.seconds / 2)
        stock = [await victim.lend(reads=True, lease_s=10.0) for _ in range(12)]
        before = healthy.counts["complete"]
        victim.signal(signal.SIGSTOP)
        # Some deadlines pass during the stop, some after it.
        during = [asyncio.create_task(victim.pull(lent, arena.rng.uniform(0.3, 5.0))) for lent in stock]
        await asyncio.sleep(3.0)
        meanwhile = healthy.counts["complete"] - before
        victim.signal(signal.SIGCONT)
        reasons = Counter(await asyncio.gather(*during))
        await victim.more(20, arena.seconds / 2)
    arena.found |= {"healthy_meanwhile": meanwhile, "stopped_pulls": dict(reasons)}
    arena.check(meanwhile > 20, f"the healthy worker served {meanwhile} pulls in 3 s")
    arena.check(reasons["timeout"] > 0, "no pull noticed the stop")
    await arena.finish(healthy)


async def expire(arena: Arena) -> None:
    """Let leases expire under running reads; what was lent is overwritten as soon as its lease is over."""
    lease_s, variants = 2.0, dict[str, Counter[str]]()
    victim = await arena.start("victim", lease_s=lease_s, grant_s=0.5)
    async with Proxy(arena.rng, victim.address) as between:
        victim.reached_by = between.address
        for variant in ("reader_stopped", "owner_stopped", "claims_late", "read_late") * max(1, int(arena.seconds / 4)):
            await victim.pull(await victim.lend())
            before = (await arena.decode.state())["counters"].get("withheld_bytes", 0)
            stock = [await victim.lend(MOST_BLOCKS, lease_s, True) for _ in range(12)]
            if variant.endswith("late"):
                between.flow.clear()
            overwritten = asyncio.create_task(victim.state())
            if variant == "read_late":
                await overwritten
            pulls = [asyncio.create_task(victim.pull(lent, 8.0)) for lent in stock]
            await asyncio.sleep(arena.rng.uniform(0, 0.01))  # a random moment
            if variant == "owner_stopped":
                victim.signal(signal.SIGSTOP)
                await asyncio.sleep(lease_s + 0.3)
                victim.signal(signal.SIGCONT)
            elif variant == "reader_stopped":
                arena.decode.signal(signal.SIGSTOP)
                await overwritten
                arena.decode.signal(signal.SIGCONT)
            await overwritten
            between.flow.set()
            found = variants.setdefault(variant, Counter())
            found.update(await asyncio.gather(*pulls))
            found["withheld_bytes"] += (await arena.decode.state())["counters"].get("withheld_bytes", 0) - before
            arena.note(f"{variant}: {dict(found)}")
        await arena.finish()
    arena.found["variants"] = {k: dict(v) for k, v in variants.items()}
    for variant in ("claims_late", "read_late"):
        arena.check(not variants[variant]["complete"], f"{variant}: pulls completed without a lease")
    tried = sum(variants[x]["withheld_bytes"] for x in ("reader_stopped", "owner_stopped"))
    arena.check(variants["read_late"]["withheld_bytes"] > 0, "nothing read what was overwritten before")
    # Through shared memory a read may be over before anybody can be stopped.
    arena.check(tried > 0 or "UCX_TLS" not in arena.env, "no read was overtaken by its lease's end")


async def cancel(arena: Arena) -> None:
    """Cancel nine of ten requests at random moments: tasks, calls of `cancel`, and announced requests."""
    prefill = await arena.start("prefill", lease_s=60.0)
    total = max(500, int(100 * arena.seconds))
    todo, asked = iter(range(total)), Counter[str]()

    async def client() -> None:
        for _ in todo:
            how = arena.rng.choice(("task", "engine", "announce")) if arena.rng.random() < 0.9 else ""
            asked[how or "left_alone"] += 1
            reason = await prefill.pull(await prefill.lend(), PATIENCE_S, how, arena.rng.expovariate(1 / 0.015))
            arena.check(reason == "complete" or bool(how), f"not cancelled, but {reason}")

    async with asyncio.TaskGroup() as group:
        for _ in range(24):
            group.create_task(client())
    await arena.finish()  # long before the leases would expire
    counters = (await prefill.state())["counters"]
    leases = {k: v for k, v in counters.items() if k.startswith("lease.")}
    arena.found |= {"requests": total, "asked": dict(asked), "leases": leases}
    arena.check(leases == {"lease.released": total}, f"leases ended {leases}, all should be released")
    arena.check(set(prefill.failed) <= {"cancelled", "task_cancelled"}, f"cancelled pulls ended {prefill.failed}")
    arena.check(prefill.failed.total() > total / 10, f"only {prefill.failed.total()} were cancelled in time")


async def garbage(arena: Arena) -> None:
    """Send random bytes, mutated packets and frames of 100 MB to a prefill worker's port while it serves."""
    prefill, rng, sent = await arena.start("prefill"), arena.rng, Counter[str]()
    packets, stranger = real_packets((await prefill.lend())["params"]), Stranger(prefill.address)

    async def shout_any(recorded: bytes) -> None:
        sent["raw_streams"] += 1
        payload = mutate(rng, rng.choice(packets))[:255]
        said = (
            rng.randbytes(rng.randint(1, 4096)),
            mutate(rng, recorded),
            GREETING[: rng.randrange(64)],
            HANDSHAKE + b"\x02" + rng.randbytes(1000),
            HANDSHAKE + bytes([rng.choice((0, 1, 4, 6)), len(payload)]) + payload,
        )
        await shout(prefill.address, [rng.choice(said)])

    try:
        async with Proxy(rng, prefill.address) as between:  # only to record what a reader says
            prefill.reached_by = between.address
            async with prefill.load(4):
                await prefill.more(10)
                rss, until = (
                    (await prefill.ask("state", wait_s=0))["usage"]["rss_mib"],
                    time.monotonic() + arena.seconds,
                )
                while time.monotonic() < until:
                    batch = [[rng.randbytes(rng.randint(0, 300))] for _ in range(30)]
                    batch += [[mutate(rng, rng.choice(packets))] for _ in range(150)]
                    sent["malformed"] += sum(is_malformed(x) for (x,) in batch)
                    batch += [[rng.randbytes(8) for _ in range(rng.randint(2, 5))] for _ in range(10)]
                    sent.update(packets=len(batch), frames=10)
                    rng.shuffle(batch)
                    # Each has a connection of its own: one that sends so much rubbish is soon not listened to.
                    with contextlib.closing(Stranger(prefill.address)) as each:
                        arena.check(await asyncio.to_thread(each.send, batch), "a stranger's ping was not answered")
                    recorded = b"".join(between.recorded[: rng.randint(1, 20)])
                    await asyncio.gather(*(shout_any(recorded) for _ in range(8)))
                head = HANDSHAKE + b"\x02" + HUGE.to_bytes(8, "big")
                took = await shout(prefill.address, [head, *[bytes(HUGE // 100)] * 100])
                was_cut = await asyncio.to_thread(stranger.send_huge)
                await prefill.more(10)
            await arena.finish(prefill)
    finally:
        stranger.close()
    state = await prefill.state()
    names = {"malformed": "dropped.malformed", "frames": "control.dropped_frames"}
    counted, grown = {k: state["counters"].get(v, 0) for k, v in names.items()}, state["usage"]["rss_mib"] - rss
    arena.found |= {"sent": dict(sent), "counted": counted, "huge_bytes_taken": took, "rss_grown_mib": grown}
    for what, found in counted.items():
        arena.check(found >= sent[what], f"{what}: {sent[what]} were sent, {found} counted")
    arena.check(was_cut, "a frame of 100 MB from a DEALER did not end its connection")
    arena.check(took < HUGE, "a frame of 100 MB was taken from a raw connection")
    arena.check(grown < 100, f"the prefill worker grew by {grown} MiB")


async def proxy(arena: Arena) -> None:
    """Put a proxy that misbehaves between the control planes of one prefill worker and the decode worker."""
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    async with Proxy(arena.rng, victim.address) as between:
        victim.reached_by = between.address
        async with healthy.load(2), victim.load(6):
            await victim.more(10)
            between.is_bad, before = True, victim.counts["complete"]
            await asyncio.sleep(arena.seconds)
            while_bad = {"complete": victim.counts["complete"] - before, "failed": dict(victim.failed)}
            between.is_bad, began = False, time.monotonic()
            await victim.more(50)
            arena.found |= {"while_bad": while_bad, "recovered_s": round(time.monotonic() - began, 2)}
        await arena.finish(healthy)
    arena.found["proxy"] = dict(between.did)
    arena.check(any(between.did[x] for x in ("cut", "truncated", "swallowed")), "the proxy did no harm")


def restarts(counters: Mapping[str, int]) -> int:
    """How often a data plane in a process of its own was started anew."""
    return sum(count for name, count in counters.items() if name.startswith("data.") and name.endswith("restarts"))


async def survive(arena: Arena) -> None:
    """Kill, stop and restart one of two workers that lend to each other and pull; the other must go on, as it was."""
    left, right = arena.decode, await arena.start("prefill")
    left.reader, right.reader = right, left
    series: dict[str, list[dict[str, int]]] = {left.name: [], right.name: []}
    lost, faults, recovered = Counter[str](), Counter[str](), list[float]()
    planes_lost, unanswered, is_over = Counter[str](), 0, False

    async def client(owner: Worker, reader: Worker) -> None:
        nonlocal unanswered
        while not is_over:
            await owner.up.wait()
            await reader.up.wait()
            try:
                lent = await owner.lend(arena.rng.randint(MOST_BLOCKS // 2, MOST_BLOCKS), 4.0, True)
                await owner.pull(lent, arena.rng.uniform(0.3, TIMEOUT_S))
            except Lost:  # with one of them: nobody is left to ask, or to tell
                unanswered += 1

    async def hurt(victim: Worker, survivor: Worker, fault: str) -> None:
        rng = arena.rng
        if fault == "away_kill":
            # The survivor's loop is busy meanwhile, and finds what a dead process has asked for.
            survivor.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            await victim.kill()
            survivor.signal(signal.SIGCONT)
        if fault in ("stop", "stop_kill"):
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.05, 1.5))
        if fault == "stop":
            victim.signal(signal.SIGCONT)
            return
        await (victim.end() if fault == "restart" else victim.kill())
        await asyncio.sleep(rng.uniform(0, 0.3))
        await victim.start(victim.address)

    async def cycle(number: int, victim: Worker, survivor: Worker) -> None:
        fault = arena.rng.choice(("kill", "away_kill", "stop_kill", "restart", "stop"))
        faults[fault] += 1
        aborts = survivor.aborts
        await asyncio.gather(left.more(3), right.more(3))
        await asyncio.sleep(arena.rng.uniform(0, 0.1))  # a random moment
        began = time.monotonic()
        await hurt(victim, survivor, fault)
        while True:
            # The survivor may be dead by now, or be about to die.
            for worker in (survivor, victim):
                await worker.revive()
            deaths = left.aborts + right.aborts
            causes = await asyncio.gather(left.more(3), right.more(3), return_exceptions=True)
            if not any(causes):
                break
            if left.aborts + right.aborts == deaths:
                raise Failure(f"cycle {number}, {fault} of {victim.name}: {', '.join(map(str, filter(None, causes)))}")
        recovered.append(round(time.monotonic() - began, 2))
        lost[fault] += survivor.aborts - aborts
        state = await survivor.ask("state", wait_s=0)
        series[survivor.name].append(state["usage"])
        planes_lost[survivor.name] = max(planes_lost[survivor.name], restarts(state["counters"]))
        arena.note(f"cycle {number}: {fault} of {victim.name}; survivors lost {lost.total()}, {state['usage']}")

    async with asyncio.TaskGroup() as group:
        for owner, reader in ((left, right), (right, left)) * 6:
            group.create_task(client(owner, reader))
        for number in range(arena.cycles):
            # Each survives half of them without a break, so that what grows is seen to.
            sides = (right, left) if number < arena.cycles / 2 else (left, right)
            await cycle(number, *sides)
        is_over = True
    await arena.finish()
    arena.found |= {
        "cycles": arena.cycles,
        "faults": dict(faults),
        "survivors_lost": lost.total(),
        "lost_by_fault": {k: v for k, v in lost.items() if v},
        "planes_lost": planes_lost.total(),
        "without_outcome": unanswered,
        "recovered_s": {"median": sorted(recovered)[len(recovered) // 2], "most": max(recovered)},
        "pulls_from_decode": left.record(),
        "usage": {name: {k: [x[k] for x in seen] for k in seen[0]} for name, seen in series.items() if seen},
    }
    arena.check(not lost.total(), f"{lost.total()} survivors of {arena.cycles} died: {dict(+lost)}")
    for name, seen in series.items():
        for what, most in GROWTH.items():
            if len(seen) >= 2 * SETTLED:
                early, late = (
                    sorted(x[what] for x in part)[len(part) // 2]
                    for part in (seen[SETTLED:][:SETTLED], seen[-SETTLED:])
                )
                arena.check(late <= early + most, f"{name}: {what} grew from {early} after {SETTLED} cycles to {late}")


SCENARIOS = {work.__name__: work for work in (kill, restart, freeze, expire, cancel, garbage, proxy, survive)}


async def run(
    name: str, *, seconds: float = 4.0, seed: int = 0, transport: str = "tcp", cycles: int = 20, process: str = "auto"
) -> dict[str, Any]:
    """Run one scenario; returns its record. Bounded in time, and no process is left."""

    async def work(arena: Arena) -> None:
        arena.seconds, arena.cycles, arena.setup = seconds, cycles, {"process": process}
        await arena.decode.start()
        arena.found["decode_before"] = (await arena.decode.state())["usage"]
        await SCENARIOS[name](arena)

    return await perform(name, work, seed=seed, transport=transport, within_s=60 + 10 * max(seconds, cycles))


async def perform(
    name: str,
    work: Callable[[Arena], Awaitable[None]],
    *,
    within_s: float,
    seed: int = 0,
    transport: str = "tcp",
    module: str = MODULE,
) -> dict[str, Any]:
    """Let a scenario happen between processes of a module; returns its record."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asynckv-chaos-") as logs:
        arena = Arena(name, seed, transport, Path(logs), module)
        try:
            async with asyncio.timeout(within_s):
                await work(arena)
        except* (Failure, TimeoutError) as group:
            arena.blame(group)
        finally:
            for worker in (arena.decode, *arena.prefill):
                await worker.kill()
            for _ in range(30):  # what a worker has started ends by itself, soon
                if not (left := marked(arena.mark)):
                    break
                await asyncio.sleep(0.1)
            arena.check(not left, f"{len(left)} processes that workers had started outlive them")
        for log in os.listdir(logs) if arena.problems else ():
            for line in (arena.logs / log).read_text(errors="replace").splitlines()[-12:]:
                arena.note(f"{log}: {line[:300]}")
    record = {"scenario": name, "ok": not arena.problems, "seconds": round(time.monotonic() - began, 2), "seed": seed}
    return record | {"problems": arena.problems, "pulls": {x.name: x.record() for x in arena.prefill}} | arena.found


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; returns the exit status."""
    lines = "\n".join(f"  {name:8} {(work.__doc__ or '').splitlines()[0]}" for name, work in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Break real asynckv workers on purpose, and compare every byte that is published.",
        epilog=f"scenarios:\n{lines}\n\nexit status: 0 all good, 1 a scenario failed, 2 bad input",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="what to run; everything if left out")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long each keeps its load up (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes, moments and garbage (default 0)")
    parser.add_argument("--json", default="-", metavar="FILE", help="where the JSON lines go (default -, stdout)")
    transport = (
        "of UCX; cma and auto are shared memory on one host, where a stopped process can still be read (default tcp)"
    )
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), default="tcp", help=transport)
    parser.add_argument("--cycles", type=int, default=20, help="how many faults survive has (default 20)")
    process = "what of NIXL runs in a process of its own, as NixlConfig(process=...) says (default auto)"
    parser.add_argument("--process", choices=("auto", "serving", "always", "never"), default="auto", help=process)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role is not None:
        return play(options.role)
    if unknown := [name for name in options.scenarios if name not in SCENARIOS]:
        parser.error(f"unknown scenario {unknown[0]!r}; choose from {', '.join(SCENARIOS)}")
    if not 0 < options.seconds <= 3600:
        parser.error(f"--seconds {options.seconds:g} is outside (0, 3600]")
    if not 1 <= options.cycles <= 10_000:
        parser.error(f"--cycles {options.cycles} is outside [1, 10000]")
    keywords = {"seconds": options.seconds, "seed": options.seed, "transport": options.transport}
    keywords |= {"cycles": options.cycles, "process": options.process}
    runs = [functools.partial(run, name, **keywords) for name in options.scenarios or SCENARIOS]
    return report(parser, options.json, runs)


def report(
    parser: argparse.ArgumentParser, json_to: str, runs: Iterable[Callable[[], Coroutine[Any, Any, dict[str, Any]]]]
) -> int:
    """Run scenarios one by one and print their records; returns the exit status."""
    try:
        out = sys.stdout if json_to == "-" else open(json_to, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as exc:
        parser.error(f"--json {json_to}: {exc.strerror}")
    status = 0
    with contextlib.nullcontext() if out is sys.stdout else out:
        for work in runs:
            try:
                record = asyncio.run(work())
            except KeyboardInterrupt:
                return 130
            name = record["scenario"]
            print(json.dumps(record), file=out, flush=True)
            verdict = "good" if record["ok"] else "FAILED: " + "; ".join(record["problems"])
            print(f"[{name}] {record['seconds']} s, {verdict}", file=sys.stderr, flush=True)
            status |= not record["ok"]
    return status


if __name__ == "__main__":
    sys.exit(main())
