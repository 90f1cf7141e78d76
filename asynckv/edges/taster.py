"""Loads the metadata of peers that nobody vouches for in a process of its own first: what kills that kills no engine.

UCX reads its part of the metadata without being told the length (`metadata.py`), so nobody but UCX can say whether it
survives. One such process is started for the first peer, is kept, and takes one peer at a time, so that its end is one
peer's fault. It reads nothing, has none of the engine's memory, and idles at no cost but its 30 MB.
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

__all__ = ["Taster"]

MAX_TRIED = 64
"""Peers after which another process tries: UCX keeps a socket of each, on both sides, until the process ends."""

TRY_S = 2.0
"""How long one load may take, which takes milliseconds; a process that hangs in it is killed."""


class Taster:
    """Tries peers, one at a time.

    Args:
        config: Of the agent that tries.
        name: Of that agent; later ones get a number.
        go_on: Told why no process can be started; peers are not tried then. If it is left out they are refused.
    """

    def __init__(self, config: NixlConfig, name: str, go_on: Callable[[str], None] | None) -> None:
        self._config, self._name, self._go_on = replace(config, process="never", posting_threads=0), name, go_on
        self._plane: ProcessPlane | None = None
        self._turn = asyncio.Lock()
        self._starts = self._tried = 0
        self._is_off = False
        self.num_refused = 0

    async def try_out(self, remote: AgentInfo, memories: Sequence[Memory]) -> None:
        """Load a peer's metadata there.

        Raises:
            BackendError: NIXL refuses it there, or that process ended or hung.
        """
        async with self._turn:
            if self._is_off:
                return
            if self._plane is not None and not self._plane.pid:
                await self._end()  # it ended while it tried nobody
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
            try:
                async with asyncio.timeout(TRY_S):
                    await plane.add_remote_agent(remote, memories)
            except (BackendError, TimeoutError) as exc:
                self.num_refused += 1
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
        """End the process, off the loop; the next peer would start another."""
        await self._end()
