"""Loads the metadata of peers that are not trusted in a separate process first, so that it cannot kill the engine.

Only UCX can show whether it survives its part of the metadata (`metadata.py`). One process is kept for that. It takes
one peer at a time, so that its end has one cause. A peer that hangs it costs seconds, so hosts take turns, and those
that were refused come last.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from asynckv.config import NixlConfig
from asynckv.core.limits import remember
from asynckv.edges.survivor import wire
from asynckv.edges.survivor.keeper import Keeper
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.ports import AgentInfo

MAX_TRIED = 64  # peers after which the process is replaced, because UCX keeps a socket for each until the process ends
MAX_HOSTS = 1024  # hosts with remembered turns
TRY_S = 2.0  # seconds that one load may take, which usually takes milliseconds; a process that hangs in it is killed


class _Child:
    """A process of its own that loads one peer at a time."""

    def __init__(self, config: NixlConfig, name: str) -> None:
        self.keeper = Keeper(config, name, self._hear, self._lost, lambda: None, deaths=0, has_spare=False)
        self._loaded: asyncio.Future[str] | None = None
        self._cause = ""  # the reason of its process's end

    async def load(self, remote: AgentInfo, memories: Sequence[Memory]) -> str:
        """Return why a peer cannot be loaded, or why the process ended meanwhile; empty if it was loaded."""
        if not self.keeper.is_serving:
            return self._cause or "its process has ended"
        self._loaded = asyncio.get_running_loop().create_future()
        self.keeper.order(wire.Load(remote, tuple(memories)))
        cause = await self._loaded or self._cause  # the process may have ended just after its answer
        self.keeper.order(wire.Drop(remote.name))
        return cause

    def _hear(self, news: wire.News) -> None:
        if isinstance(news, wire.LoadEnded):
            self._end(news.cause)

    def _lost(self, cause: str, pause_s: float) -> None:
        self._cause = cause
        self._end(cause)

    def _end(self, cause: str) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(cause)


class Taster:
    """Try peers, one at a time. If no process can be started, call `go_on` and try none; without it, refuse all."""

    def __init__(self, config: NixlConfig, name: str, go_on: Callable[[str], None] | None) -> None:
        self._config, self._name, self._go_on = replace(config, process="never", posting_threads=0), name, go_on
        self._child: _Child | None = None
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
                await asyncio.sleep(0)  # a cancelled peer leaves the queue only now
        finally:
            del self._queue[place]

    async def _try(self, remote: AgentInfo, memories: Sequence[Memory]) -> None:
        if self._is_off:
            return
        if self._child is not None and not self._child.keeper.pid:
            await self.quiesce()  # it ended between two trials
        if (child := self._child) is None:
            self._starts, self._tried = self._starts + 1, 0
            child = _Child(self._config, f"{self._name}-{self._starts}")
            try:
                await child.keeper.start(())
            except BackendError as exc:
                if self._go_on is None:
                    raise
                self._go_on(str(exc))
                self._is_off = True
                return
            self._child = child
        refusals, self._num_turns = self._turns.pop(remote.host, (0, 0))[0], self._num_turns + 1
        remember(self._turns, remote.host, (refusals, self._num_turns), MAX_HOSTS)
        has_hung = False
        try:
            async with asyncio.timeout(TRY_S):
                cause = await child.load(remote, memories)
        except asyncio.CancelledError:
            await self.quiesce()  # it may hang, and the next peer must not be blamed for that
            raise
        except TimeoutError:
            cause, has_hung = f"it hung for {TRY_S:g} s", True
        if cause:
            self.num_refused += 1
            self._turns[remote.host] = refusals + 1, self._num_turns
            if has_hung or not child.keeper.pid:
                cause = f"it ends a process inside NIXL, as a trial in a separate process has shown ({cause})"
                await self.quiesce()
            raise BackendError(f"NIXL refuses the metadata of {remote.name}: {cause}")
        self._tried += 1
        if self._tried >= MAX_TRIED:
            await self.quiesce()

    async def quiesce(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.keeper.pid:
                with suppress(ProcessLookupError):
                    os.kill(child.keeper.pid, signal.SIGKILL)
            await child.keeper.quiesce()
            child.keeper.close()
