"""Very many small transfers with faults among them: `python -m tests.lab.soak --help`.

A prefill and a decode process on real NIXL and ZMQ make transfers of 1 to 4 blocks, 16 to 64 in flight. One
in a hundred goes wrong on purpose: cancelled, revoked, never lent, withdrawn, never read, wrong blocks, too late. Now
and then the decode side forgets the prefill rank, with everything in flight.

The allocators are hostile. What the prefill side gets back it overwrites at once, so a byte that was read
too late shows; what the decode side gets back it poisons and looks at again before the next use, so a byte
that was written too late shows. Every published byte is compared.

Now and then, and at the end, both sides become quiet: nothing may be owed, held or running, and file
descriptors, tasks and memory are counted. Memory is the process's own after a garbage collection, with
free pages given back to the system.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from asynckv import NixlConfig, Registration
from asynckv.engine import LentRequest
from asynckv.errors import LocalProtocolError, PlanRefused, PullError
from asynckv.geometry.layout import Layout
from asynckv.tools.bench.memory import Pool
from asynckv.tools.progress import Bar
from scripts import command
from tests.lab import arena as workers
from tests.lab.fleet import Words, answer, connect

BLOCK_SIZE = 4
NUM_BLOCKS = {"prefill": 4096, "decode": 1024}
MOST_BLOCKS = 4
IN_FLIGHT = (16, 64)
UNREAD_LEASE_S, TIMEOUT_S = 2.0, 30.0
QUIET_S = 60.0
BASELINE, STEADY = 1_000, 10_000
"""Descriptors and tasks are compared with those after the first, memory with that after the second."""
MOST_MIB = 5
"""Limit of growth."""
SETUP = {"lease_s": 4.0, "grant_s": 2.0, "lease": {"parked_s": 4.0}, "log": "error"}
SETUP |= {"heads": (2, 32), "layers": 2, "block_tokens": BLOCK_SIZE}
FORGET_EVERY = 4_000
FDS_PER_FORGET = 1 + NixlConfig().num_posters
"""NIXL 1.5.1 alone: UCX keeps a socket, on both sides and per agent (the loop's and every posting thread's), for every
removal of a peer with a process that lives on."""
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


def make_memory(layout: Layout, seed: int) -> tuple[Pool, Words]:
    """Make a pool, which knows what belongs into it, and its words."""
    pool = Pool(layout, seed)
    raw: Any = pool.registration.owners[0]
    return pool, raw[0].view(np.uint64).reshape(layout.groups[0].num_blocks, -1)


class Side(workers.Side):
    """One rank. The prefill rank makes, fills and lends what the decode rank asks for, which pulls it."""

    pulls = MappingProxyType({"timeout_s": TIMEOUT_S})

    def __init__(self, *, requests: int, faults: float, path: str, **setup: Any) -> None:
        self.requests, self.faults, self.path = requests, faults, path
        super().__init__(**setup)
        self.errors: list[str] = []
        asyncio.get_running_loop().set_exception_handler(self._failed)
        self.tasks: set[asyncio.Task[None]] = set()
        self.ends: Counter[str] = Counter()
        self.expired = 0
        """Leases of faultless requests that expired without a release."""
        self.outcomes: Counter[str] = Counter()
        self.faulty: Counter[str] = Counter()
        self.asked = self.finished = self.forgets = self.wrong = self.compared = self.lost = 0
        self.paused_until = 0.0
        self.moved = asyncio.Event()
        self._draws = random.Random(requests)

    def _allocate(self, layout: Layout) -> tuple[Registration, Words]:
        self.pool, words = make_memory(layout, self.requests)
        return self.pool.registration, words

    async def listen(self) -> None:
        """Answer the decode rank."""
        self._server = await asyncio.start_unix_server(lambda r, w: answer(self, r, w), self.path)

    async def meet(self) -> None:
        """Open a conversation with the prefill rank, which listens."""
        self.prefill = await connect(self.path, "prefill")

    def request(self, number: int) -> Request:
        return request(self.requests, number, self.faults)

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

    def _owed(self) -> dict[str, int]:
        statistics = self.engine.statistics()
        handles = {k: statistics.counters[f"data.{k}"] for k in ("running", "in_doubt", "unreleased")}
        gauges = {k: v for k, v in statistics.gauges.items() if k != "peers"}
        return super()._owed() | {k: v for k, v in (gauges | handles | {"tasks": len(self.tasks)}).items() if v}

    def report(self) -> dict[str, Any]:
        """Tell what has become of all requests, as this rank sees it."""
        return {
            "errors": self.errors,
            "counters": dict(sorted(self.engine.statistics().counters.items())),
            "leases": self.ends,
            "expired": self.expired,
            "outcomes": self.outcomes,
            "faults": self.faulty,
            "forgets": self.forgets,
            "lost": self.lost,
            "wrong_bytes": self.wrong,
            "compared_bytes": self.compared,
        }

    # -- prefill -----------------------------------------------------------------------------------

    async def make(self, first: int, last: int, ahead: bool) -> AsyncIterator[list[tuple[int, dict[str, Any]]]]:
        """Make requests; params may travel ahead of the data."""
        made, requests = [], [self.request(n) for n in range(first, last)]
        for it in requests:
            ids = await self.blocks.take(-(-it.tokens // BLOCK_SIZE))
            if not ahead:
                self._fill(it, ids)
            lease_s = UNREAD_LEASE_S if it.fault == "never read" else None
            params = self.group().make_params(
                f"prefill-{it.number}", [(0, ids)], it.tokens, written=not ahead, lease_s=lease_s
            )
            made.append((it, ids, params))
            if not ahead:
                self._lend(it, ids, params)
        yield [(it.number, params) for it, _, params in made]
        if ahead:
            await asyncio.sleep(max(it.delay_s for it in requests))
            for it, ids, params in made:
                self._fill(it, ids)
                self._lend(it, ids, params)

    def _fill(self, it: Request, ids: list[int]) -> None:
        self.pool.fill(it.number, [(0, ids)], it.tokens)

    def _lend(self, it: Request, ids: list[int], params: dict[str, Any]) -> None:
        if it.fault in ("never lent", "withdrawn"):
            self.blocks.give(ids)
            if it.fault == "withdrawn":
                self.engine.withdraw(params)
            return
        lent = self.engine.lend(params)
        if it.fault == "lease revoked":
            asyncio.get_running_loop().call_later(it.delay_s, lent.withdraw)
        self.spawn(self._watch(it, ids, lent))

    async def _watch(self, it: Request, ids: list[int], lent: LentRequest) -> None:
        ended = await lent.wait_released()
        self.blocks.give(ids)
        self.ends[ended.cause] += 1
        self.expired += ended.cause == "expired" and not it.fault

    # -- decode ------------------------------------------------------------------------------------

    def progress(self) -> int:
        """Say how many transfers are over."""
        return self.finished

    async def advance(self, to: int) -> None:
        """Make transfers until so many are over: 16 to 64 in flight, asked for in batches."""
        rng = self._draws
        while self.asked < to:
            batch = min(rng.randint(1, 16), to - self.asked)
            most = rng.randint(*IN_FLIGHT)
            while self.asked + batch - self.finished > most:
                await self._moved()
            self.spawn(self._ask(self.asked, self.asked + batch, rng.random() < 0.2))
            self.asked += batch
        while self.finished < to:
            await self._moved()

    async def _ask(self, first: int, last: int, ahead: bool) -> None:
        for number, params in await self.prefill.ask("make", QUIET_S, first=first, last=last, ahead=ahead):
            self.spawn(self._one(self.request(number), params))

    async def _moved(self) -> None:
        self.moved.clear()
        try:
            await asyncio.wait_for(self.moved.wait(), QUIET_S)
        except TimeoutError:
            raise RuntimeError(f"no request ended for {QUIET_S:g} s: {self._owed()}") from None

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
        ids = await self.blocks.take(count)
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
                compared, wrong = self.pool.check(it.number, [(it.first_token, ids)], it.tokens)
                self.compared += compared
                self.wrong += wrong
        self.blocks.give(ids)
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


# -- the driver ----------------------------------------------------------------------------------------------


async def soak(transfers: int, seed: int, faults: float) -> dict[str, Any]:
    """Let both processes make all transfers, and gather what they say."""
    rest = range(STEADY, transfers, STEADY)
    marks = sorted({min(BASELINE, max(transfers // 2, 1)), *rest, transfers})
    points: list[dict[str, Any]] = []
    said: dict[str, Any] = {}
    began, busy_s = time.monotonic(), 0.0
    async with workers.arena("soak", seed, transport="auto", target="tests.lab.soak:Side") as place:
        place.setup = {"requests": seed, "faults": faults, "path": str(place.fleet.folder / "prefill.socket")} | SETUP
        prefill, decode = await place.start("prefill", blocks=NUM_BLOCKS["prefill"]), place.decode
        await prefill.ask("listen")
        await decode.start(blocks=NUM_BLOCKS["decode"])
        await decode.ask("meet")
        with Bar(Console(stderr=True)) as bar:
            bar.begin("transfers", transfers)
            for mark in marks:
                start = time.monotonic()
                advancing = asyncio.create_task(decode.ask("advance", None, to=mark))
                while not (await asyncio.wait({advancing}, timeout=0.5))[0]:
                    bar.at(await decode.ask("progress"))
                await advancing
                busy_s += time.monotonic() - start
                states = [await worker.state(QUIET_S) for worker in (prefill, decode)]
                points.append({"transfers": mark, "prefill": states[0]["usage"], "decode": states[1]["usage"]})
                place.note(f"{mark:>9,} transfers, {[x['usage']['rss_mib'] for x in states]} MiB of its own each")
        said = {"prefill": await prefill.ask("report"), "decode": await decode.ask("report")}
        for worker in (decode, prefill):
            await worker.end(30.0)
    return {
        "transfers": transfers,
        "fault_share": faults,
        "seed": seed,
        "per_second": round(transfers / busy_s) if said else 0,
        "seconds": round(time.monotonic() - began, 1),
        "busy_s": round(busy_s, 1),
        "exit_status": [process.status for process in place.fleet.processes],
        **said,
        "points": points,
        "problems": place.problems,
    }


def judge(result: dict[str, Any]) -> list[str]:
    """Say what is not as it should be."""
    wrong = list(result["problems"])
    if "decode" not in result:
        return wrong or ["a worker ended before its time"]
    prefill, decode = result["prefill"], result["decode"]
    if decode["wrong_bytes"]:
        wrong.append(f"{decode['wrong_bytes']} published bytes are wrong")
    if any(result["exit_status"]):
        wrong.append(f"the workers ended with {result['exit_status']}")
    if prefill["expired"] > decode["lost"]:
        wrong.append(f"{prefill['expired']} leases expired, but only {decode['lost']} readers were lost")
    for side in ("prefill", "decode"):
        wrong += [f"{side}: {text}" for text in result[side]["errors"]]
        first, last = (result["points"][i][side] for i in (0, -1))
        for what, more in (("fds", FDS_PER_FORGET * decode["forgets"]), ("tasks", 0)):
            if last[what] > first[what] + more:
                count = result["points"][0]["transfers"]
                wrong.append(f"{side}: {last[what]} {what} at the end, {first[what]} after the first {count} transfers")
        rss = [point[side]["rss_mib"] for point in result["points"] if point["transfers"] >= STEADY]
        if rss and (growth := rss[-1] - rss[0]) > MOST_MIB:
            wrong.append(f"{side}: memory grew by {growth} MiB after the first {STEADY} transfers")
    return wrong


def make_transfers(
    transfers: Annotated[int, typer.Option(metavar="N", help="Requests in all.")] = 100_000,
    faults: Annotated[float, typer.Option(metavar="SHARE", help="Share that goes wrong, 0 to 0.5.")] = 0.01,
    seed: Annotated[int, typer.Option(metavar="N", help="Of requests and faults.")] = 0,
    json_to: command.Json = "-",
) -> int:
    """Make very many small transfers with faults among them, and see that nothing is left behind."""
    command.check(1 <= transfers <= 10**9, f"--transfers {transfers} is outside [1, {10**9}]")
    command.check(0 <= faults <= 0.5, f"--faults {faults:g} is outside [0, 0.5]")
    command.check(0 <= seed < 1 << 62, f"--seed {seed} is not a number from 0 on")
    with command.output(json_to) as out:
        result = asyncio.run(soak(transfers, seed, faults))
        wrong = judge(result)
        json.dump(result | {"good": not wrong, "wrong": wrong}, out, indent=2)
        out.write("\n")
    for text in wrong:
        print(f"soak: {text}", file=sys.stderr)
    return 1 if wrong else 0


EPILOG = (
    (__doc__ or "").partition("\n\n")[2]
    + """
[bold]UCX's variables apply[/bold]  UCX_TLS=tcp UCX_NET_DEVICES=lo moves all bytes over TCP

[bold]Examples[/bold]

  python -m tests.lab.soak

  python -m tests.lab.soak --transfers 3000 --faults 0.05 --seed 3 | jq .decode.outcomes

[bold]Exit status[/bold]  0 all good, 1 something is not (the report says what), 2 bad input, 130 Ctrl-C
"""
)
main = command.script(make_transfers, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
