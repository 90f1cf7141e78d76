"""Put real workers under pressure and judge order, memory, latency and bytes: `python -m tests.lab.pressure --help`.

Real processes, NIXL over UCX on CPU memory, ZMQ on 127.0.0.1 (`tests.lab.arena`). Every scenario proves what the
documentation says of queues, budgets, isolation, drains, sleep and retries. What is published is compared byte by byte;
free memory that changes shows as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from asynckv import Engine, PullCancelled
from asynckv.core.flow import READING
from asynckv.errors import AsyncKVError, EngineClosed, PullError
from asynckv.tools.bench.processes import Failure
from scripts import command
from tests.lab import arena as workers
from tests.lab.arena import BLOCK, BUSY, MOST_BLOCKS, Arena, Worker, allocate, perform
from tests.lab.fleet import Lost, Words, memory_kib

TARGET = "tests.lab.pressure:Side"
IN_FLIGHT = 64
"""Pulls that may read at a time in `load`."""

FEW = 500
"""Asked for at once before the many, to compare with."""

SMALL = {"heads": [1, 16], "layers": 1}
"""Blocks of 1 KiB."""

ASLEEP = np.uint64(0x5A5A5A5AA5A5A5A5)
"""Word that fills a sleeper's memory."""

MOST_KIB = 48.0
"""KiB that one queued pull may cost the process that asks for it: engine, task, lists and all."""

MOST_RATIO = 1.2
"""Limit of healthy peers' slowest hundredth beside a slow and a dead one, as a multiple of it without them."""

ABORT = re.compile(r"Assertion|assert|Caught signal|Fatal|SIGABRT|terminate called", re.IGNORECASE)
Schedule = list[tuple[float, str, dict[str, Any]]]
"""When, at which peer, which lent request."""


# -- a worker process --------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Order:
    """In which order requests were admitted, as the engine decided it."""

    names: list[str] = dataclasses.field(default_factory=list)
    most: int = 0

    @contextlib.contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Listen to an engine's admission, which does not announce its order."""
        decode: Any = engine._driver.core.decode
        admission = decode.admission
        before_next, before_enter = admission.next, admission.enter

        def admitted(pull_id: str) -> None:
            self.names.append(decode.pulls[pull_id].request_id)
            self.most = max(self.most, admission.num[READING])

        def following() -> str | None:
            pull_id: str | None = before_next()
            if pull_id is not None:
                admitted(pull_id)
            return pull_id

        def enter(key: Any, pull_id: str) -> bool:
            is_in: bool = before_enter(key, pull_id)
            if is_in:
                admitted(pull_id)
            return is_in

        admission.next, admission.enter = following, enter
        try:
            yield
        finally:
            del admission.next, admission.enter


class Side(workers.Side):
    """A worker that can do many things at once, drain, and sleep."""

    def __init__(self, **setup: Any) -> None:
        super().__init__(**setup)
        self._asleep: list[int] = []
        self._left: Words | None = None
        """Memory that was left at the last waking."""
        self._tasks: set[asyncio.Task[None]] = set()

    # -- lending -----------------------------------------------------------------------------------

    async def lend_many(self, first: int, count: int, blocks: int) -> list[dict[str, Any]]:
        """Lend many requests at once."""
        ids, given = await self.blocks.take(count * blocks), []
        for number, place in zip(range(first, first + count), range(0, count * blocks, blocks), strict=True):
            mine = ids[place : place + blocks]
            self.blocks.fill(number, mine)
            params = self.group().make_params(f"p-{number}", [(0, mine)], blocks * BLOCK, written=True)
            task = asyncio.create_task(self._take_back(self.engine.lend(params), mine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            given.append({"number": number, "params": params, "blocks": blocks, "cached": 0})
        return given

    async def _take_back(self, lent: Any, ids: list[int]) -> None:
        self.counts[f"lease.{(await lent.wait_released()).cause}"] += 1
        self.blocks.give(ids)

    def make(self, number: int, blocks: int) -> dict[str, Any]:
        """Make params of a request that is not lent yet."""
        lists = [(0, list(range(blocks)))]
        params = self.group().make_params(f"p-{number}", lists, blocks * BLOCK, written=True)
        return {"number": number, "params": params, "blocks": blocks, "cached": 0}

    def try_lend(self, params: dict[str, Any]) -> str:
        """Lend what should be refused."""
        try:
            self.engine.lend(params)
        except AsyncKVError as exc:
            return type(exc).__name__
        return ""

    async def try_pull(self, lent: dict[str, Any]) -> str:
        """Pull what should be refused before it begins."""
        try:
            await self.engine.pull(f"d-{lent['number']}", [(0, list(range(lent["blocks"])))], lent["params"])
        except (EngineClosed, PullError) as exc:
            return type(exc).__name__
        return ""

    # -- many pulls at once ------------------------------------------------------------------------

    async def storm(
        self,
        queue: list[dict[str, Any]],
        other: list[dict[str, Any]],
        urgent: list[dict[str, Any]],
        cancel: int,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Ask for all of a queue at once and one of another peer; later cancel the last, and ask for urgent ones."""
        engine, loop, blocks = self.engine, asyncio.get_running_loop(), self.blocks
        order = Order()
        everybody = [*queue, *other, *urgent]
        ids = await blocks.take(sum(lent["blocks"] for lent in everybody))
        places = itertools.accumulate((lent["blocks"] for lent in everybody), initial=0)
        given = {lent["number"]: ids[i : i + lent["blocks"]] for lent, i in zip(everybody, places, strict=False)}
        done: list[str] = []
        before: dict[str, tuple[int, int]] = {}
        """Numbers of pulls that had been admitted, and were done, when it was asked for."""
        reasons, wrong, more = Counter[str](), 0, asyncio.Event()
        ended, back = dict[str, float](), dict[str, float]()

        async def one(lent: dict[str, Any], priority: int = 0) -> None:
            nonlocal wrong
            name, mine = f"d-{lent['number']}", given[lent["number"]]
            before[name] = len(order.names), len(done)
            try:
                await engine.pull(name, [(0, mine)], lent["params"], timeout_s=timeout_s, priority=priority)
            except (PullCancelled, asyncio.CancelledError):
                ended[name] = loop.time()
                reasons["cancelled"] += 1
                await engine.returned(name)
                back[name] = loop.time()
            except PullError as exc:
                reasons[exc.reason] += 1
                await exc.returned()
            else:
                done.append(name)
                reasons["complete"] += 1
                wrong += blocks.wrong(lent["number"], mine)
            blocks.give(mine)
            more.set()

        def gauges() -> Mapping[str, int]:
            return engine.statistics().gauges

        async def until(count: int) -> None:
            while sum(reasons.values()) < count:
                more.clear()
                await more.wait()

        gc.collect()
        rss = memory_kib()
        Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - the peak is counted from here
        began = loop.time()
        with order.watch(engine):
            tasks = {f"d-{lent['number']}": asyncio.create_task(one(lent)) for lent in (*queue, *other)}
            await asyncio.sleep(0)  # each has run up to its first wait
            asked_s, num_queued, rss_queued = loop.time() - began, gauges()["pulls_queued"], memory_kib()
            await until(len(queue) // 10)
            victims = [f"d-{lent['number']}" for lent in queue[len(queue) - cancel :]]
            early = set(order.names).intersection(victims)
            called = dict[str, float]()
            for i, name in enumerate(victims):
                called[name] = loop.time()
                (engine.cancel(name) if i % 2 else tasks[name].cancel())
            await asyncio.sleep(0)  # cancelled tasks have run
            queued = {each.request_id for each in engine.requests() if each.state == "queued"}
            queued_still, waiting = len(queued.intersection(victims)), gauges()["pulls_queued"]
            tasks |= {f"d-{lent['number']}": asyncio.create_task(one(lent, -1)) for lent in urgent}
            await asyncio.gather(*tasks.values())
        seconds, peak = loop.time() - began, memory_kib("VmHWM")
        place = {name: i for i, name in enumerate(done)}
        gone = set(victims)
        in_queue = [f"d-{lent['number']}" for lent in queue if f"d-{lent['number']}" not in gone]
        set_of_queue = set(in_queue)
        admitted_of_queue = [name for name in order.names if name in set_of_queue]
        ranks = [i for i, _ in sorted(enumerate(n for n in in_queue if n in place), key=lambda x: place[x[1]])]
        names = [f"d-{lent['number']}" for lent in other]
        late = [order.names.index(n) - before[n][0] for n in names if n in order.names]
        overtaken = [place[n] - before[n][1] for n in names if n in place]
        urgent_names = [f"d-{lent['number']}" for lent in urgent]
        overtook_late = [
            len(set(order.names[before[n][0] : order.names.index(n)]) - set(urgent_names))
            for n in urgent_names
            if n in order.names
        ]
        return {
            "reasons": dict(reasons),
            "bytes": sum(len(given[int(n[2:])]) for n in done) * blocks.words[0].nbytes,
            "wrong": wrong,
            "asked_s": asked_s,
            "seconds": seconds,
            "queued": num_queued,
            "most_admitted": order.most,
            "rss_kib": {"before": rss, "queued": rss_queued, "peak": peak, "after": memory_kib()},
            "admitted_in_order": admitted_of_queue == in_queue,
            "most_ahead": max((i - p for p, i in enumerate(ranks)), default=0),
            "most_behind": max((p - i for p, i in enumerate(ranks)), default=0),
            "other": {"admitted_after": late, "completed_before_it": overtaken},
            "urgent": {"others_admitted_before_it": overtook_late, "waiting_when_asked": waiting},
            "cancelled": {
                "count": len(victims),
                "were_admitted": len(early),
                "queued_still": queued_still,
                "slowest_outcome_ms": max((1e3 * (ended[n] - called[n]) for n in victims if n in ended), default=-1.0),
                "blocks_back_ms": max((1e3 * (back[n] - called[n]) for n in victims if n in back), default=-1.0),
                "all_back_ms": 1e3 * (max(back.values()) - min(called.values())) if back and called else -1.0,
            },
        }

    async def round(self, schedule: Schedule, timeouts: dict[str, float]) -> dict[str, Any]:
        """Pull each request at its time, however long the others take; latency counts from that time."""
        engine, loop, blocks = self.engine, asyncio.get_running_loop(), self.blocks
        ids = await blocks.take(sum(lent["blocks"] for _, _, lent in schedule))
        latencies: dict[str, list[float]] = {}
        reasons: dict[str, Counter[str]] = {}
        landed: list[tuple[int, list[int]]] = []
        gc.collect()
        start = loop.time() + 0.1

        async def one(offset: float, peer: str, lent: dict[str, Any], mine: list[int]) -> None:
            await asyncio.sleep(start + offset - loop.time())
            reason = "complete"
            try:
                timeout = timeouts.get(peer, 10.0)
                await engine.pull(f"d-{lent['number']}", [(0, mine)], lent["params"], timeout_s=timeout)
            except PullError as exc:
                reason = exc.reason
                await exc.returned()
            else:
                latencies.setdefault(peer, []).append(loop.time() - start - offset)
                landed.append((lent["number"], mine))
            reasons.setdefault(peer, Counter())[reason] += 1

        tasks, at = [], 0
        for offset, peer, lent in schedule:
            tasks.append(asyncio.create_task(one(offset, peer, lent, ids[at : at + lent["blocks"]])))
            at += lent["blocks"]
        self.counts["rounds_begun"] += 1
        await asyncio.gather(*tasks)
        wrong = sum(blocks.wrong(number, mine) for number, mine in landed)
        blocks.give(ids)
        compared = sum(len(i) for _, i in landed) * blocks.words[0].nbytes
        said = {peer: dict(found) for peer, found in reasons.items()}
        return {"latencies": latencies, "reasons": said, "wrong": wrong, "bytes": compared}

    async def read_some(self, least: int) -> None:
        """Wait until so many more bytes have been read, in the middle of whatever is being pulled."""
        goal = self._bytes_read() + least
        while self._bytes_read() < goal:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # no event announces a change of a counter

    def _bytes_read(self) -> int:
        return self.engine.statistics().counters.get("bytes.read", 0)

    # -- draining and sleeping ---------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> dict[str, Any]:
        """Drain, and name the stragglers."""
        began = time.monotonic()
        stragglers = await self.engine.drain(timeout_s)
        names = [{"request": h.request_id, "reason": h.reason, "waits_for": h.waits_for} for h in stragglers]
        return {"stragglers": names, "seconds": time.monotonic() - began}

    async def aclose(self) -> dict[str, Any]:
        """Close the engine."""
        began = time.monotonic()
        await self.engine.aclose()
        seconds = time.monotonic() - began
        await self.blocks.take(len(self.blocks.words))  # all of them have come back, and are overwritten
        return {"seconds": seconds, "leases": {k: v for k, v in self.counts.items() if k.startswith("lease.")}}

    async def suspend(self, timeout_s: float, busy: Sequence[str], ports: list[int]) -> dict[str, Any]:
        """Go to sleep, once one of these gauges is above 0, and have the memory used for something else.

        `ports` are the control planes'.
        """
        began, before = time.monotonic(), self.engine.statistics().gauges
        while busy and not any(before[k] for k in busy) and time.monotonic() < began + 0.5:
            await asyncio.sleep(0)  # no event announces a change of a gauge
            before = self.engine.statistics().gauges
        began = time.monotonic()
        stragglers = await self.engine.suspend(timeout_s)
        seconds = time.monotonic() - began
        self._asleep = await self.blocks.take(len(self.blocks.words))
        self.blocks.words[:] = ASLEEP
        gauges = self.engine.statistics().gauges
        return {
            "seconds": seconds,
            "cut": len(stragglers),
            "under_way": {k: before[k] for k in ("pulls_admitted", "transfers", "leases")},
            "left": {k: v for k in BUSY if (v := gauges[k])},
            "holds": len(self.engine.holds()),
            "agent_fds": sum(1 for _ in tcp_sockets(set(ports))),
        }

    async def resume(self, move: bool) -> int:
        """Wake up, in the same memory or in other; returns the bytes that were written meanwhile."""
        blocks, registration = self.blocks, None
        written = int(np.count_nonzero(blocks.words != ASLEEP))
        if self._left is not None:
            written += int(np.count_nonzero(self._left != ASLEEP))
        self._left = blocks.words if move else None
        if move:
            registration, blocks.words = allocate(self._layout)
        blocks.words[:] = blocks.rubbish
        await self.engine.resume(registration)
        blocks.audit(self._asleep)
        blocks.give(self._asleep)
        return 8 * written

    # -- retrying ----------------------------------------------------------------------------------

    async def pull_retrying(self, lent: dict[str, Any], retries: int, timeout_s: float) -> dict[str, Any]:
        """Pull with retries."""
        engine, blocks, number = self.engine, self.blocks, lent["number"]
        mine, name, source = await blocks.take(lent["blocks"]), f"d-{number}", number
        reason, attempts, wrong, text = "complete", 0, 0, ""
        try:
            result = await engine.pull(name, [(0, mine)], lent["params"], timeout_s=timeout_s, retries=retries)
            attempts = result.attempts
            wrong = blocks.wrong(source, mine)
        except PullError as exc:
            reason, attempts, text = exc.reason, exc.attempts, str(exc)
            await exc.returned()
        blocks.give(mine)
        size = len(mine) * blocks.words[0].nbytes
        return {"reason": reason, "attempts": attempts, "wrong": wrong, "bytes": size, "detail": text}

    def cut_wires(self, ports: list[int]) -> int:
        """Shut every TCP connection of UCX's down; `ports` are the control planes'."""
        cut = 0
        for wire in tcp_sockets(set(ports)):
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
                cut += 1
        return cut


def tcp_sockets(control_ports: set[int]) -> Iterator[socket.socket]:
    """Go through this process's TCP connections that are not the control plane's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as each:
                if each.family != socket.AF_INET or each.type != socket.SOCK_STREAM:
                    continue
                if not {each.getsockname()[1], each.getpeername()[1]} & control_ports:
                    yield each


# -- the driver --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of peers, requests and cycles."""

    pulls: int = 5000
    rounds: int = 8
    round_s: float = 3.0
    peers: int = 8
    rate: float = 24.0
    """Requests per second and peer in `isolate`."""
    crowd: int = 1
    """Factor by which more is asked of a slow and a dead peer than of a healthy one: 3 uses up the whole budget."""
    ratio: float = MOST_RATIO
    cycles: int = 20
    trials: int = 5
    mib: int = 64
    """Of the long pulls in `drain`."""


@contextlib.contextmanager
def progress(arena: Arena, total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal how far a scenario has come."""
    done, is_tty = itertools.count(1), sys.stderr.isatty()

    def step(text: str) -> None:
        count = next(done)
        if is_tty:
            print(f"\r\x1b[K[{arena.name}] {what} {count}/{total} {text}"[:110], end="", file=sys.stderr, flush=True)

    try:
        yield step
    finally:
        if is_tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


async def lend_many(arena: Arena, worker: Worker, count: int, blocks: int = 1) -> list[dict[str, Any]]:
    """Have requests lent."""
    first = next(arena.numbers)
    arena.numbers = itertools.count(first + count)
    requests: list[dict[str, Any]] = await worker.ask("lend_many", 60.0, first=first, count=count, blocks=blocks)
    return requests


def control_ports(arena: Arena) -> list[int]:
    """Where everybody listens: what is connected to these is no data connection."""
    return [int(each.address.rpartition(":")[2]) for each in (arena.decode, *arena.prefill) if each.address]


def messages(arena: Arena, worker: Worker) -> list[str]:
    """Return what UCX or the C library said when a worker's process ended by itself."""
    lines = (arena.fleet.folder / f"{worker.name}.log").read_text(errors="replace").splitlines()
    return [re.sub(r"^\[.*?\]\s*", "", line.strip())[:200] for line in lines if ABORT.search(line)][-4:]


async def settle(arena: Arena, *workers: Worker) -> None:
    """Everybody owes and holds nothing, has written nowhere else, and published what was lent."""
    for worker in workers:
        await worker.state()
        arena.check(not worker.counts["bytes_wrong"], f"{worker.name}: wrong bytes were published")


# -- scenarios ---------------------------------------------------------------------------------------


async def load(arena: Arena, sizes: Sizes) -> None:
    """Ask for 5,000 pulls at once under a budget for 64: memory, order, turns, urgent ones, cancellations."""
    check, count = arena.check, sizes.pulls
    budget = {"total_requests": IN_FLIGHT, "window_requests": IN_FLIGHT}
    arena.setup = SMALL | {"blocks": count + 64, "lease_s": 30.0, "grant_s": 10.0}
    first, second = await arena.start("first"), await arena.start("second")
    seen: dict[int, dict[str, Any]] = {}
    for asked in (FEW, count):
        cancelled, within_s = asked // 10, 30.0 + asked / 50
        await arena.decode.start(pull=budget)
        for worker in (first, second):
            for _ in range(2):
                await worker.pull(await worker.lend(1, reads=True))
        lent = await lend_many(arena, first, asked)
        other, urgent = await lend_many(arena, second, 1), await lend_many(arena, first, 8)
        storm = {"queue": lent, "other": other, "urgent": urgent, "cancel": cancelled, "timeout_s": within_s}
        found = seen[asked] = await arena.decode.ask("storm", within_s + 30, **storm)
        rss, expected = found["rss_kib"], {"complete": asked - cancelled + 9, "cancelled": cancelled}
        peak = rss["peak"] - rss["before"]
        found["peak_kib_per_queued_pull"] = round(peak / found["queued"], 2)
        found["pulls_per_s"] = round(asked / found["seconds"])
        arena.note(f"{asked}: peak +{peak} KiB, {found['pulls_per_s']} pulls/s, cancelled {found['cancelled']}")
        check(found["reasons"] == expected, f"{asked} asked at once ended {found['reasons']}, not {expected}")
        check(not found["wrong"], f"{found['wrong']} wrong bytes were published")
        check(found["most_admitted"] == IN_FLIGHT, f"{found['most_admitted']} were admitted at a time, not {IN_FLIGHT}")
        check(found["queued"] == asked + 1 - IN_FLIGHT, f"{found['queued']} were queued")
        check(found["admitted_in_order"], "one peer's requests were not admitted in the order of asking")
        check(found["most_ahead"] < IN_FLIGHT, f"a request came {found['most_ahead']} places before its turn")
        check(found["other"]["admitted_after"][0] <= 1, f"the other peer waited for {found['other']} turns")
        late = found["urgent"]["others_admitted_before_it"]
        check(late == [0] * len(urgent), f"before urgent requests others were admitted: {late}")
        check(found["urgent"]["waiting_when_asked"] >= IN_FLIGHT, "hardly anybody was left to be overtaken")
        gone = found["cancelled"]
        check(not gone["were_admitted"], f"{gone['were_admitted']} of the cancelled did not wait")
        check(not gone["queued_still"], f"{gone['queued_still']} of {cancelled} stayed in the queue")
        check(0 <= gone["all_back_ms"] < 2000, f"the last cancelled one's blocks were back after {gone['all_back_ms']}")
        check(found["peak_kib_per_queued_pull"] < MOST_KIB or asked < count, f"memory: {rss}")
        await settle(arena, arena.decode, first, second)
        again = await lend_many(arena, first, asked // 2)
        storm |= {"queue": again, "other": await lend_many(arena, second, 1), "urgent": [], "cancel": 0}
        repeat = await arena.decode.ask("storm", within_s + 30, **storm)
        check(repeat["reasons"] == {"complete": asked // 2 + 1}, f"a second time: {repeat['reasons']}")
        found["rss_kib"]["second_peak"] = repeat["rss_kib"]["peak"]
        check(repeat["rss_kib"]["peak"] <= rss["peak"] * 1.05 + 2048, f"memory a second time: {repeat['rss_kib']}")
        await settle(arena, arena.decode, first, second)
        await arena.decode.kill()
    few, many = sorted(seen)
    grown = [seen[n]["rss_kib"]["peak"] - seen[n]["rss_kib"]["before"] for n in (few, many)]
    arena.found |= {
        "by_number_asked": {str(n): found for n, found in seen.items()},
        "bytes_per_extra_pull": round(1024 * (grown[1] - grown[0]) / (many - few)),
    }
    await larger_than_everything(arena, first)


async def larger_than_everything(arena: Arena, prefill: Worker) -> None:
    """Pull what is larger than all budgets, one post at a time or in one post that is too large itself."""
    budget = {"total_bytes": 4096, "window_bytes": 4096, "total_descriptors": 2, "window_descriptors": 2}
    for post in ({"max_post_bytes": 2048, "max_post_descriptors": 2}, {}):
        await arena.decode.start(pull=budget | post)
        big, *small = [await lend_many(arena, prefill, 1, n) for n in (400, *[1] * 20)]
        asked = [*big, *[each[0] for each in small]]
        storm = {"queue": asked, "other": [], "urgent": [], "cancel": 0, "timeout_s": 30.0}
        found = await arena.decode.ask("storm", 60.0, **storm)
        arena.check(found["reasons"] == {"complete": len(asked)}, f"under 4 KiB of budget: {found['reasons']}")
        arena.check(not found["wrong"], f"{found['wrong']} wrong bytes were published under 4 KiB of budget")
        arena.found.setdefault("larger_than_budgets_s", []).append(round(found["seconds"], 3))
        await settle(arena, arena.decode, prefill)
        await arena.decode.kill()


async def isolate(arena: Arena, sizes: Sizes) -> None:
    """Compare healthy peers' latencies with and without a slow and a dead peer beside them."""
    check, blocks = arena.check, 4
    each = math.ceil(sizes.round_s * sizes.rate)
    requests = each * (sizes.peers + 2 * sizes.crowd)
    arena.setup = {"heads": [1, 64], "layers": 4, "blocks": blocks * (requests + 8), "lease_s": 20.0}
    # Budgets as the default ones relate to each other, but so small that two peers could use their share up.
    window = {"window_requests": 8, "window_bytes": 1 << 19, "window_descriptors": 64}
    await arena.decode.start(pull=window | {f"total_{k[7:]}": 4 * v for k, v in window.items()})
    healthy = [await arena.start(f"healthy{i}") for i in range(sizes.peers)]
    slow, dead = await arena.start("slow"), await arena.start("dead")
    for worker in (*healthy, slow, dead):
        await worker.pull(await worker.lend(blocks, reads=True))
    ends: dict[str, Counter[str]] = {}
    seen: dict[str, list[dict[str, float]]] = {"alone": [], "beside_healthy": [], "beside_bad": []}

    async def hamper(until: asyncio.Event) -> None:
        while not until.is_set():
            slow.signal(signal.SIGSTOP)
            for seconds, number in ((0.5, signal.SIGCONT), (0.05, None)):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(until.wait(), seconds)
                if number is not None:
                    slow.signal(number)

    async def measure(arm: str, number: int) -> None:
        beside = [] if arm == "alone" else [slow, dead]
        if beside and not dead.is_running:
            await dead.start()
            await dead.pull(await dead.lend(blocks, reads=True))
        schedule: Schedule = []
        rng = random.Random(number)  # healthy peers see the same in every arm
        for worker in (*healthy, *beside):
            lent = await lend_many(arena, worker, each * (sizes.crowd if worker in beside else 1), blocks)
            times = sorted(rng.uniform(0, sizes.round_s) for _ in lent)
            schedule += [(at, worker.name, request) for at, request in zip(times, lent, strict=True)]
        is_over, helpers = asyncio.Event(), list[asyncio.Task[None]]()
        begun = await rounds_begun(arena)
        timeouts = {slow.name: 3.0, dead.name: 2.0}
        asking = arena.decode.ask("round", sizes.round_s + 60, schedule=schedule, timeouts=timeouts)
        work = asyncio.create_task(asking)
        try:
            if arm == "beside_bad":
                helpers.append(asyncio.create_task(hamper(is_over)))
                while await rounds_begun(arena) == begun:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                await asyncio.sleep(sizes.round_s / 4)
                await dead.kill()
            answer = await work
        finally:
            is_over.set()
            await asyncio.gather(*helpers)
        check(not answer["wrong"], f"{arm}: {answer['wrong']} wrong bytes were published")
        values = sorted(x for worker in healthy for x in answer["latencies"].get(worker.name, ()))
        for worker in healthy:
            reasons = answer["reasons"][worker.name]
            check(set(reasons) == {"complete"}, f"{arm}: {worker.name} was left alone, but {reasons}")
        if arm == "beside_bad":
            for worker in (slow, dead):
                ends.setdefault(worker.name, Counter()).update(answer["reasons"][worker.name])
        figures = {f"p{p}_ms": round(1e3 * values[min(len(values) * p // 100, len(values) - 1)], 3) for p in (50, 99)}
        seen[arm].append(figures)
        await arena.decode.state()

    await measure("alone", 0)
    seen["alone"].clear()  # everything is warm from here on
    with progress(arena, 3 * sizes.rounds, "round") as step:
        for number in range(sizes.rounds):
            arms = list(seen) if number % 2 == 0 else list(reversed(seen))
            for arm in arms:
                await measure(arm, number)
                step(f"{arm} {seen[arm][-1]}")
    arena.found |= {"rounds": seen, "bad_ones_ended": {k: dict(v) for k, v in ends.items()}}
    arena.found["in_a_round"] = each * sizes.peers
    for what in ("p50_ms", "p99_ms"):
        alone = [figures[what] for figures in seen["alone"]]
        for arm in ("beside_healthy", "beside_bad"):
            arena.found[f"{what}.{arm}"] = ratio([figures[what] for figures in seen[arm]], alone)
    found = arena.found["p99_ms.beside_bad"]
    arena.note(f"p99 beside bad: {found}; beside healthy: {arena.found['p99_ms.beside_healthy']}")
    check(found["ratio"] <= sizes.ratio, f"p99 beside a slow and a dead peer: {found}, at most {sizes.ratio} is wanted")
    check(ends["dead"].total() > ends["dead"]["complete"], "the dead peer did not die")
    await settle(arena, arena.decode, *healthy, slow)


async def rounds_begun(arena: Arena) -> int:
    """Count the rounds that the decode worker has begun."""
    count: int = (await arena.decode.ask("state", wait_s=0))["counters"].get("rounds_begun", 0)
    return count


def ratio(values: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Compare medians over rounds, with an interval of 95 % from drawing rounds again."""
    rng, drawn = random.Random(1), []
    pairs = list(zip(values, reference, strict=True))
    for _ in range(2000):
        some = rng.choices(pairs, k=len(pairs))
        drawn.append(statistics.median(a for a, _ in some) / statistics.median(b for _, b in some))
    drawn.sort()
    median, before = statistics.median(values), statistics.median(reference)
    low, high = drawn[len(drawn) // 40], drawn[-len(drawn) // 40]
    numbers = {"median": median, "alone": before, "ratio": median / before, "low": low, "high": high}
    return {name: round(x, 3) for name, x in numbers.items()}


async def drain(arena: Arena, sizes: Sizes) -> None:
    """Drain a prefill engine while a reader is in the middle of a long pull, with time enough and without."""
    check, blocks = arena.check, sizes.mib * 256
    arena.setup = {"heads": [1, 64], "layers": 1, "blocks": blocks + 64, "log": "info", "lease_s": 8.0, "grant_s": 4.0}
    small = {"window_bytes": 4096, "total_bytes": 4096, "max_post_bytes": 4096}
    await arena.decode.start(pull=small)
    for variant in ("in_time", "cut_short", "reader_stopped"):
        prefill = await arena.start(variant)
        await prefill.pull(await prefill.lend(1, reads=True))
        (lent,) = await lend_many(arena, prefill, 1, blocks)
        never = await prefill.ask("make", number=next(arena.numbers), blocks=1)
        decode = asyncio.create_task(prefill.pull(lent, 30.0))
        waiting = asyncio.create_task(prefill.pull(never, 30.0))
        await arena.decode.ask("read_some", least=sizes.mib << 18)
        if variant == "reader_stopped":
            arena.decode.signal(signal.SIGSTOP)
        began = time.monotonic()
        deadline = 20.0 if variant == "in_time" else 0.1
        check(not decode.done(), f"{variant}: the pull was over before the drain began; give --mib more")
        draining = asyncio.create_task(prefill.ask("drain", deadline + 20.0, timeout_s=deadline))
        await asyncio.sleep(0)  # it has been asked for
        if variant != "reader_stopped":
            reason, told_s = await waiting, time.monotonic() - began
            check(reason == "engine_closed", f"{variant}: whoever waited for what is not lent was told {reason}")
            check(told_s < 1.0, f"{variant}: whoever waited for what is not lent was told after {told_s:.2f} s")
            check(variant == "cut_short" or not decode.done(), f"{variant}: told only when the pull was over")
        refused = await prefill.ask("try_lend", params=never["params"])
        check(refused == "EngineClosed", f"{variant}: lending while draining: {refused}")
        drained = await draining
        found: dict[str, Any] = {"drain_s": round(drained["seconds"], 3), "stragglers": drained["stragglers"]}
        arena.found[variant] = found
        if variant == "in_time":
            check(drained["stragglers"] == [], f"in_time: {drained['stragglers']}")
            reason = await asyncio.wait_for(decode, 5.0)
            check(reason == "complete", f"in_time: the pull under way ended {reason}")
        else:
            expected = [{"request": f"p-{lent['number']}", "reason": "lent", "waits_for": ["decode/tp0"]}]
            for straggler in drained["stragglers"]:
                # Which start of it that is, its log says.
                straggler["waits_for"] = [name.partition("@")[0] for name in straggler["waits_for"]]
            check(drained["stragglers"] == expected, f"{variant}: stragglers {drained['stragglers']}, not {expected}")
            check(drained["seconds"] < deadline + 0.5, f"{variant}: a drain of {deadline} s took {drained['seconds']}")
            check(not decode.done() or variant == "cut_short", f"{variant}: the drain ended the pull")
        closed = await prefill.ask("aclose", 40.0)
        if variant == "reader_stopped":
            # Its promise has run out, and what it was reading is overwritten.
            arena.decode.signal(signal.SIGCONT)
            await waiting
        reason = await asyncio.wait_for(decode, 35.0)
        found |= {"close_s": round(closed["seconds"], 3), "leases": closed["leases"], "pull": reason}
        check(closed["seconds"] < 4.0 + 1.5, f"{variant}: closing took {closed['seconds']} s")
        if variant == "cut_short":
            # It takes less than the promise lasts: an owner that keeps that lets it finish.
            check(reason == "complete", f"cut_short: the promise was not kept, the pull ended {reason}")
        elif variant == "reader_stopped":
            check(reason != "complete", "reader_stopped: what was overwritten was published")
            check(closed["seconds"] > 1.0, f"reader_stopped: closing waited {closed['seconds']} s for a promise of 4 s")
        arena.note(f"{variant}: {found}")
        check(not prefill.counts["bytes_wrong"], f"{variant}: wrong bytes were published")
        check(not prefill.aborts, f"{variant}: the process ended by itself: {messages(arena, prefill)}")
        said = (arena.fleet.folder / "decode.log").read_text(errors="replace").count("peer_draining")
        found["peer_draining_logged"] = said
    await settle(arena, arena.decode)
    check(said >= 2, f"the decode side logged peer_draining {said} times for three drains")


async def sleep(arena: Arena, sizes: Sizes) -> None:
    """Suspend and resume under load, on either side and on both; the memory is used for something else meanwhile."""
    check, grown = arena.check, ("fds", "tasks", "zmq_links", "nixl_peers", "rss_mib")
    arena.setup = {"grant_s": 0.5, "lease_s": 3.0, "blocks": 480}
    # Slow enough for reads to be under way whenever sleep comes. Local transports read within the call that posts.
    is_tcp = arena.found["transport"] == "tcp"
    busy, most_cut = (["transfers", "leases"], 0.6) if is_tcp else (["pulls_admitted", "leases"], 0.4)
    await arena.decode.start(pull={"window_bytes": 1 << 17, "max_post_bytes": 1 << (15 if is_tcp else 12)})
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    seen: list[dict[str, dict[str, int]]] = []
    refusals, cuts, under_way = dict[str, Counter[str]](), list[int](), Counter[str]()
    written = 0
    asleep_s: list[float] = []
    aborted: list[str] = []

    async def cycle(number: int, side: str) -> None:
        nonlocal written
        sleepers = {"prefill": [victim], "decode": [arena.decode], "both": [victim, arena.decode]}[side]
        await victim.more(5)
        old = [await victim.lend(2, reads=True) for _ in range(2)]
        unlent = await victim.ask("make", number=next(arena.numbers), blocks=1)
        is_deaf = arena.decode in sleepers
        victim.up.clear()
        if is_deaf:
            healthy.up.clear()
        timeout_s = 0.05 if number % 3 == 2 else 0.0
        stock = [await victim.lend(MOST_BLOCKS, reads=True) for _ in range(3)]
        cut_short = [asyncio.create_task(victim.pull(lent)) for lent in stock]
        how = {"timeout_s": timeout_s, "busy": busy, "ports": control_ports(arena)}
        answers = await asyncio.gather(*(w.ask("suspend", 30.0, **how) for w in sleepers))
        for worker, answer in zip(sleepers, answers, strict=True):
            cuts.append(answer["cut"] if not timeout_s else -1)
            asleep_s.append(answer["seconds"])
            under_way.update({f"{worker.name}.{k}": v > 0 for k, v in answer["under_way"].items()})
            check(not answer["left"] and not answer["holds"], f"{worker.name} asleep still holds {answer}")
            check(not answer["agent_fds"], f"{worker.name} asleep has {answer['agent_fds']} data connections")
        if victim in sleepers:
            refused = await victim.ask("try_lend", params=unlent["params"])
            check(refused == "EngineClosed", f"lending in its sleep: {refused}")
            if not is_deaf:
                said = await arena.decode.ask("pull_retrying", lent=old[0], retries=0, timeout_s=4.0)
                refusals.setdefault("asleep", Counter())[said["reason"]] += 1
                check(said["reason"] != "complete", "a sleeper was read")
        if is_deaf:
            refused = await arena.decode.ask("try_pull", lent=old[0])
            check(refused == "EngineClosed", f"pulling in its sleep: {refused}")
        await asyncio.sleep(0.05)  # for a process that would write now
        for worker in sleepers:
            found = await worker.ask("resume", move=number % 2 == 1)
            written += found
            check(not found, f"{found} bytes were written into {worker.name}'s memory")
        if victim in sleepers:
            refused = await victim.ask("try_lend", params=unlent["params"])
            check(refused == "LocalProtocolError", f"what was made before the sleep was lent: {refused}")
            for lent in (*old, unlent):
                said = await arena.decode.ask("pull_retrying", lent=lent, retries=0, timeout_s=4.0)
                refusals.setdefault("awake", Counter())[said["reason"]] += 1
                check(said["reason"] in {"restarted", "peer_lost"}, f"an old reference: {said}")
        else:
            # The owner did not sleep: blocks that it lent and told no reader of are good.
            for lent in old:
                said = await arena.decode.ask("pull_retrying", lent=lent, retries=0, timeout_s=4.0)
                victim.counts.update({"bytes_compared": said["bytes"], "bytes_wrong": said["wrong"]})
                check(said["reason"] == "complete", f"lent before the reader slept: {said}")
        await asyncio.gather(*cut_short, return_exceptions=True)
        healthy.up.set()
        victim.up.set()

    with progress(arena, 3 * sizes.cycles, "sleep") as step:
        for side in ("prefill", "decode", "both"):
            for number in range(sizes.cycles):
                async with healthy.load(2), victim.load(8):
                    try:
                        await cycle(number, side)
                    except Lost as exc:
                        aborted.append(f"{side}, cycle {number}: {exc}: {messages(arena, victim)}")
                        if victim.is_running:
                            raise
                        healthy.up.set()
                        await victim.start()
                    await victim.more(5)
                    await healthy.more(2)
                states = {w.name: await w.state() for w in (arena.decode, victim, healthy)}
                seen.append({name: {k: s["usage"][k] for k in grown} for name, s in states.items()})
                step(f"{side} {seen[-1]['decode']}")
            arena.note(f"{side}: {seen[-1]}, victim {victim.record()}")
    had_time = [n for n in cuts if n >= 0]
    check(sum(n > 0 for n in had_time) > len(had_time) * most_cut, f"hardly anything was cut short: {had_time}")
    arena.found["aborted"] = aborted
    check(not aborted, f"processes ended by themselves: {aborted}")
    check(not healthy.failed.keys() - {"engine_closed", "closed", "cancelled"}, f"beside sleepers: {healthy.failed}")
    usage: dict[str, Any] = {}
    for name, k in itertools.product(("decode", "victim", "healthy"), grown):
        # After each kind of sleep's first times nothing grows. (Every second time it has two memories.)
        parts = [[x[name][k] for x in seen[i * sizes.cycles : (i + 1) * sizes.cycles]] for i in range(3)]
        usage[f"{name}.{k}"] = [[p[min(2 + (len(p) + 1) % 2, len(p) - 1)], p[-1]] for p in parts]
    arena.found |= {
        "cycles": 3 * sizes.cycles,
        "early_and_last_by_kind": usage,
        "cut_short": had_time,
        "under_way_when_suspended": dict(under_way),
        "suspend_s": {"median": round(statistics.median(asleep_s), 3), "max": round(max(asleep_s), 3)},
        "written_while_asleep": written,
        "refusals": {k: dict(v) for k, v in refusals.items()},
    }
    for name in usage if sizes.cycles >= 5 else ():
        for third, last in usage[name]:
            slack = {"rss_mib": 4, "fds": 2 + sizes.cycles // 10}.get(name.rpartition(".")[2], 1)
            check(last <= third + slack, f"{name} grew from {third} to {last}")
    await settle(arena, arena.decode, healthy, victim)
    await stuck(arena, sizes, victim)


async def stuck(arena: Arena, sizes: Sizes, victim: Worker) -> None:
    """Suspend while the other side is stopped in the middle of reads: connections break where bytes are under way."""
    found: dict[str, Any] = {}
    for side in ("decode", "prefill"):
        sleeper, stopped = (arena.decode, victim) if side == "decode" else (victim, arena.decode)
        results = Counter[str]()
        for number in range(sizes.trials):
            victim.aborts = 0
            stock = [await victim.lend(MOST_BLOCKS, reads=True) for _ in range(4)]
            pulls = [asyncio.create_task(victim.pull(lent, 6.0)) for lent in stock]
            await arena.decode.ask("read_some", least=arena.rng.randint(1, 6 << 20))  # a random moment
            stopped.signal(signal.SIGSTOP)
            answer = await sleeper.ask("suspend", 40.0, timeout_s=0.0, busy=[], ports=[])
            results["transfers_under_way"] += answer["under_way"]["transfers"]
            stopped.signal(signal.SIGCONT)
            for pull in pulls:
                with contextlib.suppress(Lost):
                    results[await pull] += 1
            written = await sleeper.ask("resume", move=number % 2 == 0)
            arena.check(not written, f"stuck: {written} bytes were written into a sleeper's memory")
            try:
                reason = await victim.pull(await victim.lend(4, reads=True))
            except Lost:
                reason = "lost"
            if victim.aborts:
                # With a connection that breaks UCX may take the owner along, which asynckv cannot prevent.
                arena.check(bool(messages(arena, victim)), "stuck: a process ended by itself and said nothing")
                results["owner_aborted"] += 1
                await victim.start()
            else:
                arena.check(reason == "complete", f"stuck: a pull after waking ended {reason}")
        found[f"{side}_sleeps"] = dict(results)
    said = set(messages(arena, victim))
    arena.found["stuck"] = found | {"said": sorted(said)}
    arena.note(f"stuck: {arena.found['stuck']}")
    await settle(arena, arena.decode, victim)


async def retry(arena: Arena, sizes: Sizes) -> None:
    """Cut the wire in the middle of reads; with retries pulls complete where they can."""
    check, blocks = arena.check, 384
    small = {"window_bytes": 1 << 17, "max_post_bytes": 1 << 15, "gone_s": 3.0}
    await arena.decode.start(pull=small)
    victim = await arena.start("victim")

    async def begin(retries: int) -> tuple[dict[str, Any], asyncio.Task[dict[str, Any]]]:
        for _ in range(10):
            try:
                reason = await victim.pull(await victim.lend(1, reads=True))
                (lent,) = await lend_many(arena, victim, 1, blocks)
            except Lost:
                await victim.start()
            else:
                if reason == "complete":
                    break
        else:
            raise Failure("no pull would begin")
        how = {"lent": lent, "retries": retries, "timeout_s": 15.0}
        task = asyncio.create_task(arena.decode.ask("pull_retrying", 40.0, **how))
        await arena.decode.ask("read_some", least=blocks << 13)
        return lent, task

    for what, retries in (("cut_with_retries", 2), ("cut_without", 0)):
        results, attempts = Counter[str](), Counter[str]()
        for _ in range(sizes.trials):
            aborts = victim.aborts
            _, task = await begin(retries)
            cut = await arena.decode.ask("cut_wires", ports=control_ports(arena))
            found = await task
            with contextlib.suppress(Lost):
                await victim.ask("address")
            died = victim.aborts > aborts
            results[found["reason"] + (", owner aborted" if died else "")] += 1
            attempts[str(found["attempts"])] += 1
            check(not found["wrong"], f"{what}: {found['wrong']} wrong bytes were published")
            check(cut > 0, f"{what}: there was nothing to cut")
            if not died:
                expected = found["reason"] == "complete" if retries else found["reason"] != "complete"
                check(expected, f"{what}: ended {found}")
        arena.found[what] = {"outcomes": dict(results), "attempts": dict(attempts)}
        arena.note(f"{what}: {arena.found[what]}; {messages(arena, victim)}")
    await settle(arena, arena.decode, victim)


Scenario = Callable[[Arena, Sizes], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {work.__name__: work for work in (load, isolate, drain, sleep, retry)}


async def run(name: str, *, sizes: Sizes | None = None, seed: int = 0, transport: str = "tcp") -> dict[str, Any]:
    """Run one scenario; returns its record. Bounded in time, and no process is left."""
    size = sizes or Sizes()
    rounds = 3 * size.rounds * (2 * size.round_s + 5)
    within_s = {"load": 120 + size.pulls / 20, "isolate": 60 + rounds, "sleep": 120 + 15 * size.cycles}.get(name, 180)
    scenario = SCENARIOS[name]

    async def work(arena: Arena) -> None:
        arena.found["transport"] = transport
        await scenario(arena, size)

    return await perform(name, work, within_s=within_s, seed=seed, transport=transport, target=TARGET)


USUAL = Sizes()


def pressure(
    scenarios: command.Scenarios = None,
    pulls: Annotated[int, typer.Option(help="Asked for at once in load.")] = USUAL.pulls,
    rounds: Annotated[int, typer.Option(help="Of each arm in isolate.")] = USUAL.rounds,
    round_s: Annotated[float, typer.Option(help="Seconds per round in isolate.")] = USUAL.round_s,
    peers: Annotated[int, typer.Option(help="Healthy peers in isolate.")] = USUAL.peers,
    rate: Annotated[float, typer.Option(help="Requests per second and peer in isolate.")] = USUAL.rate,
    crowd: Annotated[
        int, typer.Option(help="Times more is asked of the bad peers than of each healthy one in isolate.")
    ] = USUAL.crowd,
    ratio: Annotated[float, typer.Option(help="Most that healthy peers' p99 may grow by in isolate.")] = USUAL.ratio,
    cycles: Annotated[int, typer.Option(help="Of each kind of sleep.")] = USUAL.cycles,
    trials: Annotated[int, typer.Option(help="Of each kind of broken connection in sleep and retry.")] = USUAL.trials,
    mib: Annotated[int, typer.Option(help="Of the long pulls in drain.")] = USUAL.mib,
    seed: Annotated[int, typer.Option(help="Of sizes and moments.")] = 0,
    json: command.Json = "-",
    transport: Annotated[
        Literal["tcp", "auto", "both"],
        typer.Option(help="Of UCX; auto is shared memory on one host; both runs every scenario twice."),
    ] = "tcp",
) -> int:
    """Put real asynckv workers under pressure, and compare every byte that is published."""
    names = command.chosen(scenarios, SCENARIOS)
    given = locals()
    found = {each.name: given[each.name] for each in dataclasses.fields(Sizes)}
    least = {"pulls": 1300, "peers": 1, "mib": 1}
    for number, value in found.items():
        wanted = f"at least {least[number]}" if number in least else "a positive, finite number"
        is_good = least.get(number, 0) <= value < math.inf and value != 0
        command.check(is_good, f"--{number.replace('_', '-')} {value:g} is not {wanted}")
    asked = itertools.product(names, ("tcp", "auto") if transport == "both" else (transport,))
    sizes = Sizes(**found)
    work = (functools.partial(asyncio.run, run(n, sizes=sizes, seed=seed, transport=t)) for n, t in asked)
    return command.report(json, work)


EPILOG = f"""
[bold]Scenarios[/bold]

{command.listed(command.first_lines(SCENARIOS))}

[bold]Examples[/bold]

  python -m tests.lab.pressure load --pulls 5000

  python -m tests.lab.pressure isolate --rounds 8 --json isolate.jsonl

[bold]Exit status[/bold]  0 all good, 1 a scenario failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(pressure, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
