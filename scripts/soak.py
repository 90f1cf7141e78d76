"""Very many small transfers with faults among them: `python -m scripts.soak --help`.

A prefill and a decode process on real NIXL and ZMQ make transfers of 1 to 4 blocks, 16 to 64 in flight. One
in a hundred goes wrong on purpose: cancelled, revoked, never lent, withdrawn, never read, wrong blocks, too late. Now
and then the decode side forgets the prefill rank, with everything in flight.

The allocators are hostile. What the prefill side gets back it overwrites at once, so a byte that was read
too late shows; what the decode side gets back it poisons and looks at again before the next use, so a byte
that was written too late shows. Every published byte is compared.

Now and then, and at the end, both sides become quiet: nothing may be owed, held or running, and file
descriptors, tasks and memory are counted. Memory is what is resident after a garbage collection, with
free pages given back to the system.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asynckv import Engine, EngineConfig, LeaseConfig, PrefillGroup, PullConfig, configure_logging
from asynckv.bench.memory import POISON, Pool
from asynckv.config import NixlConfig
from asynckv.engine import LentRequest
from asynckv.errors import AsyncKVError, LocalProtocolError, PlanRefused, PullError
from asynckv.tools.layouts import model_layout
from asynckv.tools.models import Heads, Model

MODEL = Model("soak", (Heads(2, 32),) * 2)
BLOCK_SIZE = 4
NUM_BLOCKS = {"prefill": 4096, "decode": 1024}
MOST_BLOCKS = 4
IN_FLIGHT = (16, 64)
LEASE_S, GRANT_S, UNREAD_LEASE_S, PARKED_S = 4.0, 2.0, 2.0, 4.0
TIMEOUT_S = 30.0
QUIET_S = 60.0
BASELINE, STEADY = 1_000, 10_000
"""Descriptors and tasks are compared with those after the first, memory with that after the second."""
MOST_GROWTH = 5e6
FORGET_EVERY = 4_000
FDS_PER_FORGET = 1 + NixlConfig().num_posters
"""NIXL 1.5.1 alone: UCX keeps a socket, on both sides and per agent (the loop's and every posting thread's), for every
removal of a peer whose process lives on."""
PAUSE_S = 0.6
"""A peer that was forgotten is not met again before half a second has passed."""

FAULTS = {
    "task cancelled": {"complete", "cancelled task"},
    "pull cancelled": {"complete", "cancelled"},
    "lease revoked": {"complete", "revoked", "lease_lost"},
    "never lent": {"not_lent_yet"},
    "withdrawn": {"withdrawn"},
    "wrong blocks": {"complete"},
    "wrong params": {"blocks_differ"},
    "never pulled": {"announced"},
    "too short a timeout": {"complete", "timeout", "not_lent_yet"},
    "never read": {"not read"},
}
"""Kind of fault -> the outcomes that it may have."""

LOST = {"peer_lost", "peer_unreachable"}


@dataclass(frozen=True, slots=True)
class Request:
    """One transfer; both sides draw the same one."""

    number: int
    fault: str
    tokens: int
    first_token: int
    is_announced: bool
    delay_s: float


def request(seed: int, number: int, faults: float) -> Request:
    """Draw a request."""
    rng = random.Random(seed << 40 | number)
    fault = rng.choice(list(FAULTS)) if rng.random() < faults else ""
    tokens = rng.randint(1, MOST_BLOCKS * BLOCK_SIZE)
    cached = rng.random()
    first = rng.randrange(tokens) if cached < 0.2 else tokens if cached < 0.22 else 0
    if fault:
        first = 0
    return Request(number, fault, tokens, first, rng.random() < 0.2, rng.choice((0.0, 0.001, 0.003)) * rng.random())


class Memory:
    """A pool with an allocator that spoils whatever is free."""

    def __init__(self, role: str, seed: int) -> None:
        count = NUM_BLOCKS[role]
        layout = model_layout(MODEL, block_size=BLOCK_SIZE, num_blocks=count, order="cross-nhd")
        self.pool = Pool(layout, seed)
        raw: Any = self.pool.registration.owners[0]
        self._words = raw[0].view(np.uint64).reshape(count, -1)
        self._words[:] = POISON
        self._free = deque(range(count))
        self._freed = asyncio.Event()
        self._rng = random.Random(seed)
        self.late = 0
        """Bytes that were written into free blocks."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def take(self, count: int) -> list[int]:
        """Take blocks, by turns those freed last or first, once nothing was written to them meanwhile."""
        while len(self._free) < count:
            self._freed.clear()
            await self._freed.wait()
        pop = self._free.pop if self._rng.random() < 0.5 else self._free.popleft
        ids = [pop() for _ in range(count)]
        self.look_at(ids)
        return ids

    def give(self, ids: Sequence[int]) -> None:
        """Spoil blocks at once and take them back."""
        self._words[ids] = POISON
        self._free.extend(ids)
        self._freed.set()

    def look_at(self, ids: Sequence[int]) -> None:
        """Count bytes in free blocks that somebody wrote."""
        found = self._words[ids]
        if (found != POISON).any():
            self.late += int(np.count_nonzero(found.view(np.uint8) != np.full_like(found, POISON).view(np.uint8)))

    def look_everywhere(self) -> None:
        """Look at all free blocks."""
        self.look_at(list(self._free))


_libc = ctypes.CDLL(None)


class _MallInfo(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]
    # man 3 mallinfo2: hblkhd is the fifth, uordblks the eighth.


def _heap() -> int:
    """Bytes in use in the C heap, Python's small objects not included."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    _libc.mallinfo2.restype = _MallInfo
    info = _libc.mallinfo2()
    return int(info.field7 + info.field4)


def _resident() -> int:
    gc.collect()
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(0)
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


class Side:
    """What both processes do alike."""

    def __init__(self, role: str, seed: int, faults: float) -> None:
        self.seed, self.faults = seed, faults
        self.memory = Memory(role, seed)
        self.errors: list[str] = []
        asyncio.get_running_loop().set_exception_handler(self._failed)
        self.engine = Engine(
            EngineConfig(
                engine_id=role,
                lease=LeaseConfig(lease_s=LEASE_S, grant_s=GRANT_S, parked_s=PARKED_S),
                pull=PullConfig(timeout_s=TIMEOUT_S),
            ),
            self.memory.pool.registration,
        )
        self.tasks: set[asyncio.Task[None]] = set()

    def request(self, number: int) -> Request:
        return request(self.seed, number, self.faults)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self.error(f"a task failed: {exc!r}")

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.error(f"{context['message']}: {context.get('exception')!r}")

    def error(self, text: str) -> None:
        if len(self.errors) < 20:
            self.errors.append(text[:500])

    async def quiet(self) -> dict[str, Any]:
        """Wait until nothing is owed, held or running, and count."""
        until = time.monotonic() + QUIET_S
        while (left := self._left()) and time.monotonic() < until:  # noqa: ASYNC110 - gauges ring no bell
            await asyncio.sleep(0.02)
        if left:
            self.error(f"not quiet after {QUIET_S:g} s: {left}")
        self.memory.look_everywhere()
        try:
            self.engine.check_integrity()
        except AsyncKVError as exc:
            self.error(str(exc))
        return {
            "rss": _resident(),
            "heap": _heap(),
            "python_blocks": sys.getallocatedblocks(),
            "fds": len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists them
            "tasks": len(asyncio.all_tasks()),
            "left": left,
        }

    def _left(self) -> dict[str, int]:
        statistics = self.engine.statistics()
        handles = {k: statistics.counters[f"data.{k}"] for k in ("running", "in_doubt", "unreleased")}
        own = {"tasks": len(self.tasks), "blocks": self.memory.pool.registration.layout.groups[0].num_blocks}
        own["blocks"] -= self.memory.num_free
        gauges = {k: v for k, v in statistics.gauges.items() if k != "peers"}
        return {k: v for k, v in (gauges | handles | own).items() if v}

    def report(self) -> dict[str, Any]:
        counters = dict(sorted(self.engine.statistics().counters.items()))
        return {"late_bytes": self.memory.late, "errors": self.errors, "counters": counters}


# -- prefill -------------------------------------------------------------------------------------------------


class Prefill(Side):
    """Makes, fills and lends what the decode side asks for."""

    def __init__(self, seed: int, faults: float) -> None:
        super().__init__("prefill", seed, faults)
        self.ends: Counter[str] = Counter()
        self.expired = 0
        """Leases of faultless requests that nobody released."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self.engine:
            self.group = PrefillGroup("prefill", [self.engine.endpoint], lease=self.engine.config.lease)
            while line := await reader.readline():
                match json.loads(line):
                    case {"make": [first, last], "ahead": ahead}:
                        await self._make([self.request(n) for n in range(first, last)], ahead, writer)
                    case {"quiet": _}:
                        _write(writer, await self.quiet())
                    case _:
                        _write(writer, self.report() | {"leases": self.ends, "expired": self.expired})
                        await writer.drain()
                        return

    async def _make(self, requests: list[Request], ahead: bool, writer: asyncio.StreamWriter) -> None:
        """Make requests; params may travel ahead of the data."""
        made = []
        for it in requests:
            ids = await self.memory.take(-(-it.tokens // BLOCK_SIZE))
            if not ahead:
                self._fill(it, ids)
            lease_s = UNREAD_LEASE_S if it.fault == "never read" else None
            params = self.group.make_params(
                f"prefill-{it.number}", [(0, ids)], it.tokens, written=not ahead, lease_s=lease_s
            )
            made.append((it, ids, params))
            if not ahead:
                self._lend(it, ids, params)
            _write(writer, {"number": it.number, "params": params})
        await writer.drain()
        if ahead:
            await asyncio.sleep(max(it.delay_s for it in requests))
            for it, ids, params in made:
                self._fill(it, ids)
                self._lend(it, ids, params)

    def _fill(self, it: Request, ids: list[int]) -> None:
        self.memory.pool.fill(it.number, [(0, ids)], it.tokens)

    def _lend(self, it: Request, ids: list[int], params: dict[str, Any]) -> None:
        if it.fault in ("never lent", "withdrawn"):
            self.memory.give(ids)
            if it.fault == "withdrawn":
                self.engine.withdraw(params)
            return
        lent = self.engine.lend(params)
        if it.fault == "lease revoked":
            asyncio.get_running_loop().call_later(it.delay_s, lent.revoke)
        self.spawn(self._watch(it, ids, lent))

    async def _watch(self, it: Request, ids: list[int], lent: LentRequest) -> None:
        ended = await lent.wait_released()
        self.memory.give(ids)
        self.ends[ended.cause] += 1
        self.expired += ended.cause == "expired" and not it.fault


# -- decode --------------------------------------------------------------------------------------------------


class Decode(Side):
    """Asks for requests and pulls them."""

    def __init__(self, seed: int, faults: float) -> None:
        super().__init__("decode", seed, faults)
        self.outcomes: Counter[str] = Counter()
        self.faulty: Counter[str] = Counter()
        self.finished = self.forgets = self.wrong = self.compared = self.lost = 0
        self.paused_until = 0.0
        self.moved = asyncio.Event()

    async def run(self, transfers: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Make all transfers; checkpoints and the report go to stdout."""
        points = {min(BASELINE, max(transfers // 2, 1)), *range(STEADY, transfers, STEADY), transfers}
        rng = random.Random(self.seed)
        began, busy = time.monotonic(), 0.0
        async with self.engine:
            at = 0
            for point in sorted(points):
                start = time.monotonic()
                listener = asyncio.create_task(self._listen(reader, point - at))
                await self._ask(at, point, rng, writer)
                await listener
                while self.finished < point:
                    await self._moved()
                busy += time.monotonic() - start
                at = point
                _write(writer, {"quiet": True})
                mine = await self.quiet()
                theirs = json.loads(await reader.readline())
                _say({"point": {"transfers": point, "prefill": theirs, "decode": mine}})
            _write(writer, {"stop": True})
            theirs = json.loads(await reader.readline())
            report = {
                "seconds": round(time.monotonic() - began, 1),
                "busy_s": round(busy, 1),
                "outcomes": self.outcomes,
                "faults": self.faulty,
                "forgets": self.forgets,
                "lost": self.lost,
                "wrong_bytes": self.wrong,
                "compared_bytes": self.compared,
                "prefill": theirs,
                "decode": self.report(),
            }
            _say({"report": report})

    async def _ask(self, at: int, point: int, rng: random.Random, writer: asyncio.StreamWriter) -> None:
        """Keep 16 to 64 in flight, asked for in batches."""
        while at < point:
            batch = min(rng.randint(1, 16), point - at)
            most = rng.randint(*IN_FLIGHT)
            while at + batch - self.finished > most:
                await self._moved()
            _write(writer, {"make": [at, at + batch], "ahead": rng.random() < 0.2})
            at += batch

    async def _moved(self) -> None:
        self.moved.clear()
        try:
            await asyncio.wait_for(self.moved.wait(), QUIET_S)
        except TimeoutError:
            raise RuntimeError(f"no request ended for {QUIET_S:g} s: {self._left()}") from None

    async def _listen(self, reader: asyncio.StreamReader, count: int) -> None:
        for _ in range(count):
            it = json.loads(await reader.readline())
            self.spawn(self._one(self.request(it["number"]), it["params"]))

    async def _one(self, it: Request, params: dict[str, Any]) -> None:
        if (wait := self.paused_until - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        forgets = self.forgets
        if self.faults and it.number % FORGET_EVERY == FORGET_EVERY // 2:
            asyncio.get_running_loop().call_later(it.delay_s, self._forget, params["endpoints"][0]["address"])
        outcome = "failed"
        try:
            outcome = await self._pull(it, params)
        finally:
            self.finished += 1
            self.moved.set()
            self.outcomes[outcome] += 1
            if it.fault:
                self.faulty[f"{it.fault}: {outcome}"] += 1
            lost = outcome in LOST and self.forgets > forgets
            # A rank that is not met any more is not told of a full prefix hit either.
            self.lost += lost or (self.forgets > forgets and it.first_token == it.tokens)
            if not lost and outcome not in FAULTS.get(it.fault, {"complete"}):
                self.error(f"request {it.number} ({it.fault or 'no fault'}): {outcome}")
            if self.finished % 200 == 0:
                _say({"finished": self.finished})

    def _forget(self, address: str) -> None:
        self.forgets += 1
        self.paused_until = time.monotonic() + PAUSE_S
        self.engine.forget_peer(address)

    async def _pull(self, it: Request, params: dict[str, Any]) -> str:
        name, engine = f"decode-{it.number}", self.engine
        if it.fault == "never read":
            return "not read"
        if it.fault == "never pulled":
            engine.announce(name, params, wait_s=max(it.delay_s, 1e-4))
            return "announced"
        if it.fault == "wrong params":
            run = params["groups"][0][1][0]
            run[0] = (run[0] + 7) % (NUM_BLOCKS["prefill"] - MOST_BLOCKS)
        if it.is_announced:
            engine.announce(name, params)
            await asyncio.sleep(it.delay_s)
        count = -(-it.tokens // BLOCK_SIZE) - it.first_token // BLOCK_SIZE if it.first_token < it.tokens else 0
        ids = await self.memory.take(count)
        if it.fault == "wrong blocks":
            await self._pull_wrong(it, name, ids, params)
        short = {"never lent": 0.5, "too short a timeout": max(it.delay_s, 1e-4)}.get(it.fault, TIMEOUT_S)
        pull = asyncio.ensure_future(engine.pull(name, [(it.first_token, ids)], params, timeout_s=short))
        if it.fault in ("task cancelled", "pull cancelled"):
            cancel: Callable[[], object] = pull.cancel if it.fault == "task cancelled" else lambda: engine.cancel(name)
            asyncio.get_running_loop().call_later(it.delay_s, cancel)
        try:
            result = await pull
        except PullError as exc:
            await exc.returned()
            outcome = exc.reason
        except asyncio.CancelledError:
            await engine.returned(name)
            outcome = "cancelled task"
        else:
            outcome = "complete"
            if result.num_tokens != it.tokens:
                self.error(f"request {it.number}: {result.num_tokens} of {it.tokens} tokens")
            if count:
                compared, wrong = self.memory.pool.check(it.number, [(it.first_token, ids)], it.tokens)
                self.compared += compared
                self.wrong += wrong
        self.memory.give(ids)
        return outcome

    async def _pull_wrong(self, it: Request, name: str, ids: list[int], params: dict[str, Any]) -> None:
        """Lists that must be refused before anything starts."""
        wrong = [[*ids[:-1], NUM_BLOCKS["decode"]], [*ids, ids[0]], [-2, *ids[1:]]]
        for blocks in wrong:
            try:
                await self.engine.pull(name, [(0, blocks)], params)
            except (PlanRefused, LocalProtocolError):
                continue
            self.error(f"request {it.number}: blocks {blocks} were accepted for {it.tokens} tokens")


# -- processes -----------------------------------------------------------------------------------------------


def _write(writer: asyncio.StreamWriter, value: object) -> None:
    writer.write(msgspec.json.encode(value) + b"\n")


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


def work(role: str, fd: int, transfers: int, seed: int, faults: float) -> None:
    """Be one of the two processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    configure_logging("error")

    async def run() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd), limit=1 << 24)
        if role == "prefill":
            await Prefill(seed, faults).serve(reader, writer)
        else:
            await Decode(seed, faults).run(transfers, reader, writer)
        writer.close()

    asyncio.run(run())


def soak(transfers: int, seed: int, faults: float) -> dict[str, Any]:
    """Start both processes and gather what they say."""
    ends = socket.socketpair()
    workers: list[subprocess.Popen[str]] = []
    points: list[dict[str, Any]] = []
    report: dict[str, Any] = {}
    try:
        for role, end in zip(("prefill", "decode"), ends, strict=True):
            options = [role, str(end.fileno()), str(transfers), str(seed), str(faults)]
            command = [sys.executable, "-m", "scripts.soak", "--worker", *options]
            out = subprocess.PIPE if role == "decode" else subprocess.DEVNULL
            workers.append(subprocess.Popen(command, stdout=out, text=True, pass_fds=(end.fileno(),)))
        for end in ends:
            end.close()
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("transfers", total=transfers)
            assert workers[1].stdout is not None
            for line in workers[1].stdout:
                match json.loads(line) if line.startswith("{") else None:
                    case {"finished": count}:
                        progress.update(task, completed=count)
                    case {"point": dict(point)}:
                        points.append(point)
                        sizes = (f"{r} {point[r]['rss'] / 1e6:.1f} MB" for r in ("prefill", "decode"))
                        print(f"{point['transfers']:>9,} transfers  {'  '.join(sizes)}", file=sys.stderr)
                    case {"report": dict(report)}:
                        pass
                    case _:
                        print(line, end="", file=sys.stderr)
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(30)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return {
        "transfers": transfers,
        "fault_share": faults,
        "seed": seed,
        "per_second": round(transfers / report["busy_s"]) if report else 0,
        "exit_status": [worker.returncode for worker in workers],
        **report,
        "points": points,
    }


def judge(result: dict[str, Any]) -> list[str]:
    """Say what is not as it should be."""
    if "outcomes" not in result:
        return ["a worker ended before its time"]
    wrong = [f"{result['wrong_bytes']} published bytes are wrong"] if result["wrong_bytes"] else []
    if any(result["exit_status"]):
        wrong.append(f"the workers ended with {result['exit_status']}")
    if result["prefill"]["expired"] > result["lost"]:
        wrong.append(f"{result['prefill']['expired']} leases expired, but only {result['lost']} readers were lost")
    for side in ("prefill", "decode"):
        said = result[side]
        wrong += [f"{side}: {text}" for text in said["errors"]]
        if said["late_bytes"]:
            wrong.append(f"{side}: {said['late_bytes']} bytes were written into free blocks")
        first, last = (result["points"][i][side] for i in (0, -1))
        for what, more in (("fds", FDS_PER_FORGET * result["forgets"]), ("tasks", 0)):
            if last[what] > first[what] + more:
                count = result["points"][0]["transfers"]
                wrong.append(f"{side}: {last[what]} {what} at the end, {first[what]} after the first {count} transfers")
        if (growth := grown(result, side)) > MOST_GROWTH:
            wrong.append(f"{side}: memory grew by {growth / 1e6:.1f} MB after the first {STEADY} transfers")
    return wrong


def grown(result: dict[str, Any], side: str) -> int:
    """Bytes by which memory grew after the first 10,000 transfers."""
    rss = [point[side]["rss"] for point in result["points"] if point["transfers"] >= STEADY]
    return int(rss[-1] - rss[0]) if rss else 0


def _share(text: str) -> float:
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value <= 0.5:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text.replace(",", "").replace("_", ""))
    if not 1 <= value <= 10**9:
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 all good, 1 something is not, 2 bad input."""
    more = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak",
        description="Make very many small transfers with faults among them, and see that nothing is left behind.",
        epilog=more + "\nExit status: 0 all good, 1 something is not (the report says what), 2 bad input.\n\n"
        "UCX's variables apply: UCX_TLS=tcp UCX_NET_DEVICES=lo moves all bytes over TCP.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--transfers", type=_count, default=100_000, metavar="N", help="requests in all (default: %(default)s)"
    )
    parser.add_argument(
        "--faults", type=_share, default=0.01, metavar="SHARE", help="share that goes wrong, 0 to 50%% (default: 1%%)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and faults (default: 0)")
    parser.add_argument("--json", default="-", metavar="FILE", help="where the report goes (default: -, stdout)")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        role, fd, transfers, seed, faults = options.worker
        work(role, int(fd), int(transfers), int(seed), float(faults))
        return 0
    if not 0 <= options.seed < 1 << 62:
        parser.error(f"--seed {options.seed} is not a number from 0 on")
    with contextlib.ExitStack() as stack:
        out = sys.stdout
        if options.json != "-":
            try:
                out = stack.enter_context(open(options.json, "w", encoding="utf-8"))
            except OSError as exc:
                parser.error(f"--json {options.json}: {exc.strerror}")
        try:
            result = soak(options.transfers, options.seed, options.faults)
        except KeyboardInterrupt:
            return 130
        wrong = judge(result)
        json.dump(result | {"good": not wrong, "wrong": wrong}, out, indent=2)
        out.write("\n")
    for text in wrong:
        print(f"soak: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
