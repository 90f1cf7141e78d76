"""What a decode rank does in the benchmark: pull in a closed loop, then compare every byte."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from asynckv import AsyncKVError, Engine, PullError
from asynckv.bench.pattern import chosen_blocks
from asynckv.bench.pool import Pool
from asynckv.bench.rank import Rank, ids_of
from asynckv.bench.wire import Command, Done, Job, Load, News, Pulled, Reply, Run, Start, Stop, Verified, Verify

__all__ = ["DecodeRank"]

_NEWS_EVERY_S = 0.1


@dataclass(slots=True)
class _Wave:
    """What is measured while a window is open: columns, so that little is done per request."""

    jobs: tuple[Job, ...] = ()
    pulled: list[Job] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    began: array[float] = field(default_factory=lambda: array("d"))
    took: array[float] = field(default_factory=lambda: array("d"))
    num_bytes: list[int] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    def note(self, job: Job, cause: str, began: float, num_bytes: int) -> None:
        """Write down how one pull ended."""
        self.took.append(time.monotonic() - began)
        self.began.append(began)
        self.requests.append(job.request)
        self.causes.append(cause)
        self.num_bytes.append(num_bytes)


class DecodeRank(Rank):
    """Pulls what the prefill ranks lent."""

    def __init__(self, start: Start, engine: Engine, pool: Pool, writer: asyncio.StreamWriter) -> None:
        super().__init__(start, engine, pool, writer)
        self._wave = _Wave()
        self._under_way: set[str] = set()
        self._held: dict[asyncio.Task[None], list[int]] = {}
        self._is_stopped = False

    async def do(self, command: Command) -> Reply:
        """Carry out one command."""
        match command:
            case Load(jobs):
                self._wave = _Wave(jobs)
                for job in jobs:
                    self.custody.take(ids_of(job))
                return Done()
            case Run():
                return await self._run(self._wave)
            case Verify():
                # In a thread: the loop goes on talking to prefill ranks.
                return await asyncio.to_thread(self._verify, self._wave)
            case Stop():
                self._is_stopped = True
                for request_id in self._under_way:
                    self.engine.cancel(request_id)
                return Done()
            case _:
                raise ValueError(f"a decode rank does not {type(command).__name__}")

    def stock(self) -> tuple[int, int]:
        """Count blocks that neither came back nor are known to be in quarantine."""
        gauges = self.engine.statistics().gauges
        quarantined = gauges.get("blocks_quarantined", 0)
        return max(0, max(self.custody.num_out, gauges.get("blocks_writing", 0)) - quarantined), quarantined

    async def wait_returned(self, timeout_s: float) -> None:
        """Wait for the blocks of failed pulls."""
        if self._held:
            await asyncio.wait(list(self._held), timeout=timeout_s)

    # -- inside ------------------------------------------------------------------------------------

    async def _run(self, wave: _Wave) -> Pulled:
        jobs = iter(wave.jobs)
        self.lag.start()
        opened_at = time.monotonic()
        news = asyncio.create_task(self._tell(wave))
        lanes = min(self.start.concurrency, len(wave.jobs))
        await asyncio.gather(*(self._lane(wave, jobs) for _ in range(lanes)))
        closed_at = time.monotonic()
        news.cancel()
        cpu_s, lag = await self.lag.stop()
        rest = list(jobs)
        for job in rest:
            self.custody.give_back(ids_of(job))
        return Pulled(
            wave.requests,
            wave.causes,
            list(wave.began),
            list(wave.took),
            wave.num_bytes,
            wave.phases,
            [b for ids in self._held.values() for b in ids],
            [job.request for job in rest],
            opened_at,
            closed_at,
            cpu_s,
            lag,
        )

    async def _lane(self, wave: _Wave, jobs: Iterator[Job]) -> None:
        """Send one request after the other until there are none."""
        while not self._is_stopped and (job := next(jobs, None)) is not None:
            await self._pull(wave, job)

    async def _pull(self, wave: _Wave, job: Job) -> None:
        request_id = f"decode-req-{job.request}"
        ids = ids_of(job)
        self._under_way.add(request_id)
        began = time.monotonic()
        try:
            result = await self.engine.pull(request_id, [(0, ids)], job.params, timeout_s=self.start.timeout_s)
        except AsyncKVError as exc:
            wave.note(job, f"{type(exc).__name__}: {exc}", began, 0)
            self._keep(ids, exc)
        else:
            wave.note(job, "", began, result.num_bytes)
            wave.pulled.append(job)
            for phase, seconds in result.phases.items():
                wave.phases.setdefault(phase, []).append(seconds)
        finally:
            self._under_way.discard(request_id)

    def _keep(self, ids: list[int], exc: AsyncKVError) -> None:
        """Give a failed pull's blocks back as soon as nothing can write them any more."""
        if isinstance(exc, PullError) and exc.held:
            held = sorted(set(ids) & {b for group in exc.held.values() for b in group})
            task = asyncio.create_task(self._returned(held, exc))
            self._held[task] = held
            ids = sorted(set(ids) - set(held))
        self.custody.give_back(ids)

    async def _returned(self, held: list[int], exc: PullError) -> None:
        await exc.returned()
        self.custody.give_back(held)
        if (task := asyncio.current_task()) is not None:
            self._held.pop(task, None)

    async def _tell(self, wave: _Wave) -> None:
        while True:
            await asyncio.sleep(_NEWS_EVERY_S)
            self.tell(News(len(wave.requests), sum(wave.num_bytes)))

    def _verify(self, wave: _Wave) -> Verified:
        compared = wrong = 0
        wrong_requests = []
        for job in wave.pulled:
            ids = ids_of(job)
            done, bad = self.pattern.check(job.request, ids, chosen_blocks(len(ids), job.request, self.start.verify))
            compared, wrong = compared + done, wrong + bad
            if bad:
                wrong_requests.append(job.request)
            self.custody.give_back(ids)
        return Verified(compared, wrong, wrong_requests)
