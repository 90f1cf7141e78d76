"""The driver: it acts as both schedulers and the router, and collects the figures.

Requests go in *waves*: fill the blocks, tell the pulling ranks, lend, open the window in which they pull, close it,
verify, and wait until every lease has ended. Only the windows are timed. The concurrency sets the size of the pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import structlog
from msgspec.structs import asdict, replace

from asynckv.core.types import Endpoint, FollowParams
from asynckv.errors import AsyncKVError
from asynckv.scheduler import PrefillRanks
from asynckv.tools.bench import head_start, ucx
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench.blocks import Allocation, Allocator
from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.floor import ROUNDS, Round
from asynckv.tools.bench.head_start import HEAD_START, LATE, ONE_CHUNK, WAYS
from asynckv.tools.bench.schedule import Place, Request
from asynckv.tools.bench.workers import END_S, Host, Worker, WorkerLost, Workers
from asynckv.tools.console import grouped
from asynckv.tools.progress import Bar

T = TypeVar("T")
Groups = dict[Place, PrefillRanks]

_log = structlog.get_logger("asynckv.bench")

START_S = 120.0
GRACE_S = 30.0
CANCELLED_S = 0.5
PARKED_S = 0.02  # until the messages of readers that wait for a loan have come
FILLED_PER_S = 2e8  # bytes that a slow machine fills, poisons or compares in a second


@dataclass(slots=True)
class Measured:
    submitted: int = 0
    outcomes: dict[int, list[p.Outcome]] = field(default_factory=dict)
    warmup: list[p.Outcome] = field(default_factory=list)
    windows_s: list[float] = field(default_factory=list)
    scheduled_s: float = 0.0
    """Scheduled arrival of the last submitted request, in seconds."""
    lent: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    cpu_s: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    lags: list[float] = field(default_factory=list)
    release_s: list[float] = field(default_factory=list)
    peak_rss: dict[str, int] = field(default_factory=dict)
    pool_bytes: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    floor: list[Round] = field(default_factory=list)
    followed: set[int] = field(default_factory=set)  # with `--follow`; the other requests were announced
    turns: head_start.Turns = field(default_factory=lambda: {way: [] for way in WAYS})


class Driver:
    def __init__(self, experiment: Experiment, num_blocks: Mapping[str, Sequence[int]], progress: Bar) -> None:
        self.found = Measured()
        self._experiment, self._options = experiment, experiment.options
        self._num_blocks, self._progress = num_blocks, progress
        self._schedule = experiment.schedule()
        self._engines: dict[Place, Sequence[Worker]] = {}
        self._roles: dict[Worker, str] = {}
        self._lenders: list[Worker] = []
        self._readers: list[Worker] = []
        self._floor_at: p.Opened | None = None
        self._rng = np.random.default_rng(self._options.seed)
        self._cpu_at: dict[str, float] = {}

    async def run(self, workers: Workers) -> Measured:
        """Run all requests on these workers, which already have their setup; the time is bounded."""
        self._engines = {place: workers[place] for place in self._experiment.engines.places}
        for place, ranks in self._engines.items():
            self._roles |= dict.fromkeys(ranks, place.role)
            (self._lenders if place.role == "prefill" else self._readers).extend(ranks)
        started = time.monotonic()
        try:
            groups = await self._ready()
            _log.info("workers_started", pids=self.found.pids, seconds=round(time.monotonic() - started, 3))
            try:
                await self._waves(groups)
            except WorkerLost as exc:
                self._lost(str(exc))
                with contextlib.suppress(WorkerLost):
                    # The other workers still have leases that must end.
                    await self._finish()
            await self._reports()
        except WorkerLost as exc:
            self.found.problems.append(str(exc))
        return self.found

    async def _ready(self) -> Groups:
        """Wait until all workers are up, and return the schedulers' views of the lending engines."""
        endpoints: dict[Place, list[Endpoint]] = {}
        self._progress.begin(f"starting {len(self._roles)} workers", len(self._roles))
        self._progress.note("registering memory")
        for place, workers in self._engines.items():
            for worker in workers:
                ready = await worker.hear(p.Ready, START_S)
                self._progress.at(len(self.found.pids) + 1)
                self.found.environment = ready.environment
                self._floor_at = self._floor_at or ready.floor
                self.found.pids[worker.name] = ready.pid
                endpoints.setdefault(place, []).append(ready.endpoint)
        side = self._experiment.sides["prefill"]
        more: Any = {"lease": self._options.lease, "pp_size": side.pp, "num_token_shards": side.dcp}
        names = {place: self._experiment.engines.name(place) for place in self._engines if place.role == "prefill"}
        return {place: PrefillRanks(name, endpoints[place], **more) for place, name in names.items()}

    # -- waves -------------------------------------------------------------------------------------

    async def _waves(self, groups: Groups) -> None:
        await self._warm_up(groups)
        self._progress.begin("requests (including filling and comparing)", len(self._schedule))
        done, clock_s, total = 0, 0.0, len(self._schedule)
        most = -(-total // ROUNDS) if self._options.floor else total
        most = self._options.concurrency if self._options.follow else most
        while done < total and not self.found.problems:
            requests = self._schedule[done : min(done + most, total)]
            if self._options.chunks and WAYS[done % len(WAYS)] == ONE_CHUNK:
                requests = [x._replace(tokens=x.tokens // self._options.chunks) for x in requests]
            wave = self._allocate(requests)
            await self._wave(groups, wave, clock_s, is_open=self._experiment.is_open)
            # The schedule's clock stops between windows. If a window took too long, the requests of the next one count
            # as late by that time, because they would have waited.
            clock_s += self.found.windows_s[-1]
            self.found.scheduled_s = wave[-1].request.arrival_s
            done += len(wave)
            self._progress.at(self.found.submitted)
        self._progress.begin("ending the workers")

    async def _warm_up(self, groups: Groups) -> None:
        """Move some requests of the workload before the clock runs; of these only faults count."""
        found, todo = self.found, list[Request]()
        for requests in grouped(((x.lender, x.reader), x) for x in self._schedule).values():
            for i in range(self._options.warmup):
                # These numbers belong to no measured request.
                number = len(self._schedule) + len(todo)
                todo.append(requests[i % len(requests)]._replace(number=number, chunks=()))
        self._progress.begin("warm-up, first handshakes", len(todo))
        while todo and not self.found.problems:
            wave = self._allocate(todo)
            todo = todo[len(wave) :]
            await self._wave(groups, wave, 0.0, is_open=False)
            for request, _, _ in wave:
                found.warmup += found.outcomes.pop(request.number)
        found.submitted, found.bytes = 0, Counter(wrong=found.bytes["wrong"])
        found.lent, found.leases = Counter(), Counter()
        found.windows_s, found.lags, found.floor, found.turns = [], [], [], {way: [] for way in WAYS}
        found.cpu_s = dict.fromkeys(found.cpu_s, 0.0)

    async def _wave(self, groups: Groups, wave: Sequence[Allocation], clock_s: float, *, is_open: bool) -> None:
        it, options, found = self._experiment, self._options, self.found
        lend: dict[Place, list[p.Work]] = {place: [] for place in self._engines}
        pull: dict[Place, list[p.Work]] = {place: [] for place in self._engines}
        way = WAYS[len(found.windows_s) % len(WAYS)] if options.chunks else ""
        follows = options.follow and (bool(way) or not len(found.windows_s) % 2)
        before = {**found.cpu_s, **found.bytes}
        for r, lent, pulled in wave:
            arrival_s = r.arrival_s - clock_s if is_open else 0.0
            # All are lent before the window opens.
            lease_s = min(options.lease.lease_s + max(arrival_s, 0.0), options.lease.max_lease_s)
            told = params = groups[r.lender].make_params(
                f"prefill-{r.number}", lent, r.tokens, lease_s=lease_s, written=follows or not options.follow
            )
            num_chunks = 1 if way == ONE_CHUNK else options.chunks or 0
            ticket = secrets.token_hex(16) if follows else ""
            if follows:
                found.followed |= {r.number} if way in ("", HEAD_START) else set()
                told = {k: params[k] for k in FollowParams.__struct_fields__ if k in params} | {"ticket": ticket}
            work = p.Work(r.number, lent, r.tokens, params, (it.workload.chunk_tokens, r.chunks), ticket)
            lend[r.lender].append(replace(work, num_chunks=num_chunks))
            ahead = num_chunks if way in (HEAD_START, LATE) else 0
            pull[r.reader].append(replace(work, lists=pulled, arrival_s=arrival_s, params=told, num_chunks=ahead))
        ranks = Counter(self._roles.values())
        pools = sum(number * it.pool_bytes(role, self._num_blocks[role]) for role, number in ranks.items())
        patience = GRACE_S + pools / FILLED_PER_S + len(wave) * options.computed_s
        for place, workers in self._engines.items():
            for worker in workers:
                worker.tell(p.Prepare(lend[place], pull[place]))
        self._progress.note("filling blocks" if options.verify != "off" else "")
        for worker in self._roles:
            await worker.hear(p.Done, patience)
        sample: p.Sample | None = None
        if options.floor and len(found.floor) % 2:
            sample = await self._measure_floor(patience)
            (reader,) = self._readers
            reader.tell(p.Prepare([], pull[Place("decode", 0)]))
            await reader.hear(p.Done, patience)
        # Lend after the floor: it blocks the readers' loops, so earlier leases could expire meanwhile.
        lending = asyncio.ensure_future(self._lend(patience))
        lending.add_done_callback(lambda x: x.cancelled() or x.exception())  # a lost worker is told by the readers too
        if not options.follow or way == LATE:
            await lending
        found.submitted += len(wave)
        for request, _, _ in wave:
            found.outcomes[request.number] = []
        span_s = max(wave[-1].request.arrival_s - clock_s, 0.0) if is_open else 0.0
        rounds, cpu_s = 1 if is_open else -(-len(wave) // options.concurrency), found.cpu_s["decode"]
        longest_s = span_s + rounds * (options.timeout_s + GRACE_S) + options.timeout_s + patience
        self._progress.note("pulling")
        await self._pull(0 if is_open else options.concurrency, longest_s)
        cpu_s = found.cpu_s["decode"] - cpu_s
        if options.follow and way != LATE:
            lent_at, outcomes = await lending, [o for r, _, _ in wave for o in found.outcomes[r.number] if o.ended_at]
            for outcome in outcomes:
                outcome.seconds = outcome.ended_at - lent_at
            found.windows_s[-1] = max((o.seconds for o in outcomes), default=0.0)
        self._progress.note("comparing" if options.verify != "off" else "")
        await self._verify(patience)
        await self._finish()
        if way:
            costs = {name: n - before.get(name, 0) for name, n in {**found.cpu_s, **found.bytes}.items()}
            for o in (o for r, _, _ in wave for o in found.outcomes[r.number] if not o.error):
                found.turns[way].append({"p50_s": o.seconds, "pieces": o.pieces, **costs})
        if options.floor and not self.found.problems:
            sample = sample or await self._measure_floor(patience)
            good = [o for r, _, _ in wave for o in found.outcomes[r.number] if not o.error and o.num_bytes]
            seconds, moved = [o.seconds for o in good], sum(o.num_bytes for o in good)
            failed = sum(any(o.error for o in found.outcomes[r.number]) for r, _, _ in wave)
            window_s = found.windows_s[-1]
            found.floor.append(Round(window_s, seconds, moved, cpu_s, options.concurrency, sample, failed))

    async def _lend(self, patience_s: float) -> float:
        """Let all ranks lend, with `--follow` once the readers wait; return when the last one did."""
        await asyncio.sleep(PARKED_S if self._options.follow else 0.0)
        for worker in self._lenders:
            worker.tell(p.Do("lend"))
        ends = [await worker.hear(p.Done, patience_s) for worker in self._lenders]
        self._cpu_at |= {worker.name: end.cpu_s for worker, end in zip(self._lenders, ends, strict=True)}
        return max(end.lent_at for end in ends)

    async def _measure_floor(self, patience_s: float) -> p.Sample:
        (lender,), (reader,) = self._lenders, self._readers
        assert self._floor_at is not None
        lender.tell(p.Do("serve"))
        await lender.hear(p.Done, GRACE_S)
        reader.tell(p.Measure(self._floor_at, self._options.concurrency))
        sample = await reader.hear(p.Sample, 4 * patience_s)
        lender.tell(p.Do("rest"))
        await lender.hear(p.Done, GRACE_S)
        return sample

    def _allocate(self, requests: Iterable[Request]) -> list[Allocation]:
        """Give blocks to the first requests, as many as fit at once."""
        it, out = self._experiment, []
        allocator = Allocator(self._num_blocks, it, self._rng if it.options.block_order == "random" else None)
        for request in requests:
            if (taken := allocator.take(request)) is None:
                break
            out.append(taken)
        self.found.lent.update(lent_blocks=allocator.num_lent, lent_shared=allocator.num_shared)
        return out

    async def _pull(self, concurrency: int, patience_s: float) -> None:
        """Open the window on all readers, and wait until each has closed it."""
        found, windows = self.found, []
        async for worker, pulled in self._ask(self._readers, p.Go(concurrency), p.Pulled, patience_s):
            windows.append(pulled.window_s)
            found.cpu_s[self._roles[worker]] += pulled.cpu_s
            found.lags += pulled.lags
            found.blocks["decode_leaked"] += pulled.held
            found.bytes["read"] += pulled.read_bytes
            for outcome in pulled.outcomes:
                found.outcomes[outcome.number].append(outcome)
        found.windows_s.append(max(windows, default=0.0))

    async def _verify(self, patience_s: float) -> None:
        async for _, verified in self._ask(self._readers, p.Do("verify"), p.Verified, patience_s):
            self.found.bytes.update(asdict(verified))

    async def _finish(self) -> None:
        found = self.found
        # If a reader never came, its lease must expire first.
        patience = self._options.lease.lease_s + 2 * self._options.lease.grant_s + 10.0
        async for worker, ended in self._ask(self._lenders, p.Finish(patience), p.Ended, patience + GRACE_S):
            found.leases.update(ended.causes)
            found.blocks["prefill_leaked"] += ended.leaked_blocks
            found.lags += ended.lags
            found.cpu_s["prefill"] += ended.cpu_s - self._cpu_at[worker.name]

    async def _reports(self) -> None:
        found = self.found
        patience, transports = self._options.timeout_s + 2 * GRACE_S, Counter[str]()
        async for worker, report in self._ask([*self._roles], p.Do("stop"), p.Report, patience, AsyncKVError):
            found.peak_rss[worker.name] = report.peak_rss_bytes
            found.pool_bytes[worker.name] = report.pool_bytes
            transports.update(report.transports)
            found.release_s += report.release_s
            gauges = Counter(report.gauges)
            found.blocks["quarantined"] += gauges["blocks_quarantined"]
            found.blocks["prefill_leaked"] += gauges["blocks_lent"]
            found.blocks["decode_leaked"] += gauges["blocks_writing"] - gauges["blocks_quarantined"]
            if report.integrity:
                found.problems.append(f"{worker.name}: {report.integrity}")
        found.environment["ucx_transports"] = ucx.named(transports)

    async def _ask(
        self, workers: Sequence[Worker], command: p.Command, kind: type[T], patience_s: float, *noted: type[Exception]
    ) -> AsyncIterator[tuple[Worker, T]]:
        """Send a command to all living workers, and yield the answers; a lost worker or `noted` error ends the run."""
        alive = [worker for worker in workers if not worker.is_lost]
        errors: tuple[type[Exception], ...] = (WorkerLost, *noted)
        for worker in alive:
            worker.tell(command)
        for worker in alive:
            try:
                answer = await worker.hear(kind, patience_s)
            except errors as exc:
                self._lost(str(exc))
                continue
            yield worker, answer

    def _lost(self, what: str) -> None:
        if what not in self.found.problems:
            self.found.problems.append(what)


async def run(experiment: Experiment, progress: Bar) -> Measured:
    """Run a benchmark, and end all its processes. SIGINT and SIGTERM cancel it."""
    num_blocks = await asyncio.to_thread(experiment.num_blocks)
    driver = await asyncio.to_thread(Driver, experiment, num_blocks, progress)
    host, task, end_s = Host(experiment, num_blocks), asyncio.current_task(), END_S
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        # Cancel once only, because a second signal must not cancel the ending of the workers.
        asyncio.get_running_loop().add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    try:
        return await driver.run(await host.start())
    except asyncio.CancelledError:
        end_s = CANCELLED_S
        raise
    finally:
        await host.end(end_s)
