"""Loads the metadata of peers that nobody vouches for in a process of its own first: what kills that kills no engine.

Only UCX can say whether it survives its part of the metadata (`metadata.py`). One process is kept for that, and takes
one peer at a time, so that its end is one peer's fault. A peer that hangs it costs seconds, so hosts take turns, and
those that were refused come last.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from asynckv.config import NixlConfig
from asynckv.edges.process import ProcessPlane
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo

MAX_TRIED = 64  # peers after which another process tries: UCX keeps a socket of each until the process ends
MAX_HOSTS = 1024  # hosts whose turns are remembered
TRY_S = 2.0  # how long one load may take, which takes milliseconds; a process that hangs in it is killed


class Taster:
    """Tries peers, one at a time. Without a process they go untried, which `go_on` is told, or are refused."""

    def __init__(self, config: NixlConfig, name: str, go_on: Callable[[str], None] | None) -> None:
        self._config, self._name, self._go_on = replace(config, process="never", posting_threads=0), name, go_on
        self._plane: ProcessPlane | None = None
        self._turn = asyncio.Lock()
        self._queue: dict[object, str] = {}  # hosts of the peers that wait or are tried, the oldest first
        self._turns: dict[str, tuple[int, int]] = {}  # by host: its refusals, and the number of its last turn
        self._starts = self._tried = self._num_turns = 0
        self._is_off = False
        self.num_refused = 0

    async def try_out(self, remote: AgentInfo, memories: Sequence[Memory]) -> None:
        self._queue[place := object()] = remote.host
        try:
            while True:
                async with self._turn:
                    if place is min(self._queue, key=lambda each: self._turns.get(self._queue[each], (0, 0))):
                        return await self._try(remote, memories)
                await asyncio.sleep(0)  # one that was cancelled leaves the queue only now
        finally:
            del self._queue[place]

    async def _try(self, remote: AgentInfo, memories: Sequence[Memory]) -> None:
        if self._is_off:
            return
        if self._plane is not None and not self._plane.pid:
            await self._end()  # it ended between two trials
        if (plane := self._plane) is None:
            self._starts, self._tried = self._starts + 1, 0
            plane = ProcessPlane(self._config, f"{self._name}-{self._starts}", deaths=0, has_spare=False)
            try:
                await plane.start((), lambda: None)
            except BackendError as exc:
                if self._go_on is None:
                    raise
                self._go_on(str(exc))
                self._is_off = True
                return
            self._plane = plane
        refusals, self._num_turns = self._turns.pop(remote.host, (0, 0))[0], self._num_turns + 1
        self._turns[remote.host] = refusals, self._num_turns
        if len(self._turns) > MAX_HOSTS:
            del self._turns[next(iter(self._turns))]
        try:
            async with asyncio.timeout(TRY_S):
                await plane.add_remote_agent(remote, memories)
        except asyncio.CancelledError:
            await self._end()  # it may hang, which is not to be the next peer's fault
            raise
        except (BackendError, TimeoutError) as exc:
            self.num_refused += 1
            self._turns[remote.host] = refusals + 1, self._num_turns
            cause = str(exc) or f"it hung for {TRY_S:g} s"
            if isinstance(exc, TimeoutError) or not plane.pid:
                cause = f"it ends a process inside NIXL, as one that loaded it first has shown ({cause})"
                await self._end()
            raise BackendError(f"NIXL refuses the metadata of {remote.name}: {cause}") from None
        plane.remove_remote_agent(remote.name)
        self._tried += 1
        if self._tried >= MAX_TRIED:
            await self._end()

    async def _end(self) -> None:
        plane, self._plane = self._plane, None
        if plane is not None:
            if plane.pid:
                with suppress(ProcessLookupError):
                    os.kill(plane.pid, signal.SIGKILL)
            await plane.quiesce()
            plane.close()

    async def quiesce(self) -> None:
        await self._end()
