"""A worker process: one rank of a prefill or decode engine, controlled by the driver's commands.

Filling, poisoning and verifying run in a thread and outside the window.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import assert_never

import anyio
import anyio.to_thread

from asynckv.config import EngineConfig, KeysConfig, NixlConfig, PullConfig
from asynckv.edges.pages import memory_available
from asynckv.engine import Engine, LentRequest
from asynckv.errors import AsyncKVError, BackendError, ConfigError, PullError
from asynckv.keys import write_pair
from asynckv.observe.setup import configure_logging
from asynckv.scheduler import PrefillRanks
from asynckv.tools.bench import garbage, head_start, ucx
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench.floor import Floor
from asynckv.tools.bench.memory import CudaPool, Pool

LAG_S = 0.005


class LagSampler:
    """Measure how late the loop calls back, by `perf_counter`: uvloop's clock stands still while the loop is busy."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.lags = []
        self._again()

    def stop(self) -> list[float]:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            # A stall that still lasts counts as well.
            if (late := time.perf_counter() - self._due) > 0:
                self.lags.append(late)
        return [round(x, 6) for x in self.lags]

    def _tick(self) -> None:
        self.lags.append(max(0.0, time.perf_counter() - self._due))
        self._again()

    def _again(self) -> None:
        self._due = time.perf_counter() + LAG_S
        self._handle = asyncio.get_running_loop().call_later(LAG_S, self._tick)


class Worker:
    def __init__(self, setup: p.Setup, pool: Pool, engine: Engine) -> None:
        self.setup, self.options, self.pool, self.engine = setup, setup.options, pool, engine
        self.works: list[p.Work] = []
        self.filled: list[p.Work] = []
        self.lent: list[tuple[p.Work, LentRequest]] = []
        self.outcomes: list[p.Outcome] = []
        self.sampler = LagSampler()
        self.stopping = threading.Event()
        self.held: list[tuple[PullError, asyncio.Task[None]]] = []
        self.window: asyncio.Task[None] | None = None
        self.floor = Floor(pool, self.options.verify != "off", engine.config.pull)

    async def prepare(self, lent: list[p.Work], pulled: list[p.Work]) -> None:
        self.filled, self.works, self.outcomes = lent, pulled, []
        if self.options.verify != "off":
            await anyio.to_thread.run_sync(self._fill, lent, pulled)
            await self.pool.publish()

    async def lend(self) -> p.Done:
        """Lend what was filled, with `--chunks` once it is computed; tell the CPU time from which on it counts."""
        garbage.settle()
        cpu = time.process_time()
        if self.options.chunks:
            ranks = PrefillRanks(self.setup.engine_id, [self.engine.endpoint], lease=self.options.lease)
            for work in self.filled:
                await head_start.compute(self.engine, ranks, work, self.options.computed_s / self.options.chunks)
        lent_at = time.perf_counter()
        self.lent = [(work, self.engine.lend(work.params, ticket=work.ticket)) for work in self.filled]
        if self.options.chunks:
            return p.Done(cpu, lent_at)  # and no sampler, which takes as much as what is compared
        self.sampler.start()
        return p.Done(time.process_time(), lent_at)

    def _fill(self, lent: list[p.Work], pulled: list[p.Work]) -> None:
        filled: list[set[int]] = [set() for _ in self.setup.num_blocks]
        for work in lent:
            # Blocks that requests share are written once.
            new = []
            for there, (first, blocks) in zip(filled, work.lists, strict=True):
                new.append((first, [None if b in there else b for b in blocks]))
                there.update(b for b in blocks if b is not None)
            self.pool.fill(work.number, new, work.tokens, work.prefix)
        for work in pulled:
            self.pool.poison(work.lists)

    async def announce(self) -> None:
        """Announce the wave, and wait until every rank has granted it."""
        for work in self.works:
            self.engine.announce(f"decode-{work.number}", work.params, wait_s=self.options.timeout_s)
        with anyio.move_on_after(self.options.timeout_s):
            while self.engine.statistics().gauges["pulls_unanswered"]:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.001)

    async def pull_all(self, concurrency: int, pipe: p.Pipe) -> None:
        """Pull the wave in a closed loop, or each request at its arrival."""
        if self.options.announced:
            await self.announce()
        garbage.settle()
        if not self.options.chunks:
            self.sampler.start()
        read = self.engine.statistics().counters.get("bytes.read", 0)
        cpu, start = time.process_time(), time.perf_counter()
        if concurrency:
            queue = iter(self.works)
            async with anyio.create_task_group() as group:
                for _ in range(min(concurrency, len(self.works))):
                    group.start_soon(self._reader, queue)
        else:
            await self._arrive(start)
        window_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        lags = self.sampler.stop()
        read = self.engine.statistics().counters.get("bytes.read", 0) - read
        pipe.write(p.Pulled(window_s, cpu_s, lags, self.outcomes, read, await self._returned()))

    async def _reader(self, queue: Iterator[p.Work]) -> None:
        for work in queue:
            self.outcomes.append(await self._pull(work, time.perf_counter()))

    async def _arrive(self, start: float) -> None:
        """Start every pull at its scheduled time, however many are in flight (no coordinated omission)."""
        loop = asyncio.get_running_loop()
        pulls: list[asyncio.Task[None]] = []

        async def pull(work: p.Work) -> None:
            self.outcomes.append(await self._pull(work, start + work.arrival_s))

        def begin(work: p.Work) -> None:
            pulls.append(loop.create_task(pull(work)))

        def keep_time() -> None:
            # A thread keeps time, because the loop's timers are up to 1 ms late, which is longer than a small pull.
            for work in self.works:
                ahead = start + work.arrival_s - time.perf_counter()
                if self.stopping.wait(ahead) if ahead > 0 else self.stopping.is_set():
                    return
                loop.call_soon_threadsafe(begin, work)

        await anyio.to_thread.run_sync(keep_time)
        await asyncio.gather(*pulls)

    async def _pull(self, work: p.Work, due: float) -> p.Outcome:
        late = time.perf_counter() - due
        request_id, params, timeout_s = f"decode-{work.number}", work.params, self.options.timeout_s
        try:
            if work.ticket:
                wait_s = timeout_s + self.options.computed_s
                groups = work.lists if work.num_chunks else None
                params = await self.engine.follow(request_id, params, wait_s=wait_s, groups=groups)
            elif self.options.follow:
                self.engine.announce(request_id, params)
                await asyncio.sleep(LAG_S)  # a pull of what is known to be not lent yet does not read too early
            result = await self.engine.pull(request_id, work.lists, params, timeout_s=timeout_s)
        except PullError as exc:
            if exc.held:
                self.held.append((exc, asyncio.ensure_future(exc.returned())))
            return p.Outcome(work.number, str(exc), exc.reason, time.perf_counter() - due, late)
        except AsyncKVError as exc:
            return p.Outcome(work.number, str(exc), type(exc).__name__, time.perf_counter() - due, late)
        return p.Outcome(
            work.number,
            seconds=time.perf_counter() - due,
            late=late,
            num_bytes=result.num_bytes + result.piece_bytes,
            pieces=result.num_pieces,
            planned=result.descriptors_planned,
            posted=result.descriptors_posted,
            phases=dict(result.phases),
            ended_at=time.perf_counter(),
        )

    async def _returned(self) -> int:
        """Wait until the failed pulls' blocks cannot be written; return the number of those that still can be."""
        held, self.held = self.held, []
        if held:
            await asyncio.wait([task for _, task in held], timeout=self.options.timeout_s)
        leaked = 0
        for exc, task in held:
            if not task.done() or task.exception() is not None:
                task.cancel()
                leaked += sum(map(len, exc.held.values()))
        return leaked

    def verify(self) -> p.Verified:
        done = {o.number for o in self.outcomes if not o.error}
        works = [work for work in self.works if work.number in done]
        wanted = sum(self.pool.wanted(work.lists, work.tokens) for work in works)
        if self.options.verify == "off":
            return p.Verified(0, wanted, 0)
        self.pool.fetch()
        found = [self.pool.check(x.number, x.lists, x.tokens, x.prefix) for x in works]
        return p.Verified(sum(compared for compared, _ in found), wanted, sum(wrong for _, wrong in found))

    async def finish(self, patience_s: float) -> p.Ended:
        causes: Counter[str] = Counter()
        leaked = 0
        with anyio.move_on_after(patience_s):
            for _, lent in self.lent:
                causes[(await lent.wait_released()).cause] += 1
        for work, lent in self.lent:
            if not lent.is_over:
                leaked += sum(b is not None for _, blocks in work.lists for b in blocks)
                causes["leaked"] += 1
        self.lent = []
        return p.Ended(dict(causes), leaked, self.sampler.stop(), time.process_time())

    async def stop(self) -> p.Report:
        self.floor.close()
        await self.engine.drain(self.options.timeout_s)
        integrity = ""
        try:
            self.engine.check_integrity()
        except AsyncKVError as exc:
            integrity = str(exc)
        statistics = self.engine.statistics()
        return p.Report(
            dict(statistics.gauges),
            list(statistics.release_s),
            integrity,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            sum(m.length for m in self.pool.registration.layout.memories),
        )


async def run(setup: p.Setup, stdout: int, folder: Path) -> None:
    pipe, options = await p.Pipe.open(0, stdout), setup.options
    stream = open(setup.log, "a", buffering=1, encoding="utf-8") if setup.log else sys.stderr  # noqa: ASYNC230, SIM115
    configure_logging(options.level, form="json", stream=stream)
    try:
        layout = options.shape(setup.role).layout(setup.model, setup.tp_rank, setup.pp_stage, setup.num_blocks)
        if (need := sum(m.length for m in layout.memories)) > (room := memory_available()[0]):
            raise ConfigError(
                f"{setup.engine_id} needs a pool of {need:,} bytes, but its host has {room:,} bytes of memory; lower "
                f"--pool-mb or --concurrency"
            )
        keys = None
        if setup.keys is not None:  # from files, as engines read them
            keys = KeysConfig(secret=write_pair(folder, "bench", setup.keys)[0], authorized=folder)
        pool = (CudaPool if options.memory == "cuda" else Pool)(layout, options.seed)
        pull = PullConfig(timeout_s=options.timeout_s, second_look=options.second_look)
        nixl = NixlConfig(posting_threads=options.posters, process=options.process)
        config = EngineConfig(
            engine_id=setup.engine_id, bind=setup.bind, keys=keys, lease=options.lease, pull=pull, nixl=nixl
        )
        async with Engine(config, pool.registration) as engine:
            loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
            worker = Worker(setup, pool, engine)
            opened = worker.floor.open() if options.floor and setup.role == "prefill" else None
            pipe.write(p.Ready(os.getpid(), engine.endpoint, {**engine.describe(), "event_loop": loop}, opened))
            report = await _serve(pipe, worker)
        if report is not None:
            report.transports = ucx.read(folder)
            pipe.write(report)
    except AsyncKVError as exc:
        pipe.write(p.Failed(str(exc), isinstance(exc, ConfigError | BackendError)))
    except MemoryError:
        pipe.write(
            p.Failed(f"no memory for a pool of {setup.num_blocks} blocks; lower --pool-mb or --concurrency", True)
        )


async def _guard(work: Coroutine[None, None, None], pipe: p.Pipe) -> None:
    try:
        await work
    except Exception as exc:  # the driver ends the run
        pipe.write(p.Failed(f"the window failed: {exc!r}", False))


async def _serve(pipe: p.Pipe, worker: Worker) -> p.Report | None:
    """Carry out commands until the driver says stop, and return the report; None if the driver is gone."""
    while (command := await pipe.read()) is not None:
        answer: p.Answer = p.Done()
        match command:
            case p.Prepare(lent, pulled):
                await worker.prepare(lent, pulled)
            case p.Do("lend"):
                answer = await worker.lend()
            case p.Go(concurrency):
                # The window is a task of its own, so that the loss of the driver is noticed while it is open.
                worker.window = asyncio.create_task(_guard(worker.pull_all(concurrency, pipe), pipe))
                continue
            case p.Do("verify"):
                answer = await anyio.to_thread.run_sync(worker.verify)
            case p.Finish(patience_s):
                answer = await worker.finish(patience_s)
            case p.Do("serve" | "rest" as what):
                # The raw loop needs progress at all times, else it is enough when something wakes the agent.
                worker.floor.plane.watch(what == "serve")
            case p.Measure(opened, concurrency):
                await worker.floor.connect(opened)
                answer = await worker.floor.measure(worker.works, concurrency)
            case p.Do("stop"):
                return await worker.stop()
            case p.Setup() | p.Do():
                break
            case _:
                assert_never(command)
        pipe.write(answer)
    # The driver is gone, so end the pulls that wait for their time.
    worker.stopping.set()
    return None
