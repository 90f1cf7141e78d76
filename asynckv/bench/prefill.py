"""What a prefill rank does in the benchmark: fill, lend, wait until everything came back."""

from __future__ import annotations

import asyncio
from collections import Counter

from asynckv import LentRequest
from asynckv.bench.pattern import chosen_blocks
from asynckv.bench.wire import Close, Closed, Command, Done, Fill, Job, Lend, Reply, Run, Settle, Settled
from asynckv.bench.worker import Rank, ids_of

__all__ = ["PrefillRank"]


class PrefillRank(Rank):
    """Lends what it filled."""

    _lent: list[tuple[LentRequest, Job]] = []  # noqa: RUF012 - replaced, never changed in place

    async def do(self, command: Command) -> Reply:
        """Carry out one command."""
        match command:
            case Fill(jobs):
                # In a thread: the loop goes on answering decode ranks.
                await asyncio.to_thread(self._fill, jobs)
                return Done()
            case Lend(jobs):
                self._lend(jobs)
                return Done()
            case Run():
                self.lag.start()
                return Done()
            case Close():
                return Closed(*await self.lag.stop())
            case Settle(timeout_s, revoke):
                return await self._settle(timeout_s, revoke)
            case _:
                raise ValueError(f"a prefill rank does not {type(command).__name__}")

    def stock(self) -> tuple[int, int]:
        """Count blocks that are lent although every lease should have ended."""
        return max(self.custody.num_out, self.engine.statistics().gauges.get("blocks_lent", 0)), 0

    def _fill(self, jobs: tuple[Job, ...]) -> None:
        for job in jobs:
            ids = ids_of(job)
            self.pattern.fill(job.request, ids, chosen_blocks(len(ids), job.request, self.start.verify))

    def _lend(self, jobs: tuple[Job, ...]) -> None:
        lent = []
        for job in jobs:
            self.custody.take(ids_of(job))
            lent.append((self.engine.lend(job.params), job))
        self._lent = lent

    async def _settle(self, timeout_s: float, revoke: bool) -> Settled:
        lent, self._lent = self._lent, []
        if revoke:
            for lease, _ in lent:
                if not lease.is_over:
                    lease.revoke()
        waits = [asyncio.create_task(self._ended(lease, job)) for lease, job in lent]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s)
        causes: Counter[str] = Counter()
        expired: list[tuple[str, tuple[str, ...]]] = []
        for wait, (lease, _) in zip(waits, lent, strict=True):
            wait.cancel()
            cause, owed = wait.result() if wait.done() and not wait.cancelled() else ("open", lease.owed())
            causes[cause] += 1
            if cause != "released" and not revoke:
                expired.append((lease.request_id, owed))
        await asyncio.gather(*waits, return_exceptions=True)
        return Settled(dict(causes), expired)

    async def _ended(self, lease: LentRequest, job: Job) -> tuple[str, tuple[str, ...]]:
        end = await lease.wait_released()
        self.custody.give_back(ids_of(job))
        return end.cause, end.owed
