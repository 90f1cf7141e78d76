"""What a decode rank does in the benchmark: pull in a closed loop, then compare every byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from asynckv import AsyncKVError, PullError
from asynckv.bench.pattern import chosen_blocks
from asynckv.bench.wire import Command, Done, Job, Load, News, Pulled, Reply, Run, Stop, Verified, Verify
from asynckv.bench.worker import Rank, ids_of

__all__ = ["DecodeRank"]

_NEWS_EVERY_S = 0.1


class DecodeRank(Rank):
    """Pulls what the prefill ranks lent."""

    _jobs: tuple[Job, ...] = ()
    _pulled: list[Job] = []  # noqa: RUF012 - replaced with every wave
    _is_stopped = False
    _told_at = 0.0

    async def do(self, command: Command) -> Reply:
        """Carry out one command."""
        match command:
            case Load(jobs):
                self._jobs, self._pulled = jobs, []
                return Done()
            case Run():
                return await self._run()
            case Verify():
                return await asyncio.to_thread(self._verify)
            case Stop():
                self._is_stopped = True
                for request_id in list(self._under_way):
                    self.engine.cancel(request_id)
                return Done()
            case _:
                raise ValueError(f"a decode rank does not {type(command).__name__}")
