"""A data plane that runs its serving part in a process of its own, because that part can die inside UCX.

Remote readers reach the agent of a child (`keeper.py`), because UCX can end the owner's process. A plane of this
process posts the engine's own reads. When the child ends, the engine is told (`AgentLost`, `AgentReplaced`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from asynckv.config import NixlConfig
from asynckv.edges.survivor import wire
from asynckv.edges.survivor.keeper import DEATHS, Keeper
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.staging import ReadCosts
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, DataNews, DataPlane


class ServingPlane:
    """A plane of this process for own reads, and an agent in a process of its own for remote readers.

    Args:
        go_on: Called with the reason if the child cannot be started; remote readers then reach the reader's agent.
            Without it the start fails.
    """

    def __init__(
        self,
        config: NixlConfig,
        agent_name: str,
        reader: DataPlane,
        *,
        go_on: Callable[[str], None] | None = None,
        deaths: int = DEATHS,
    ) -> None:
        serving = replace(config, process="never", posting_threads=0, packing_bytes=0)
        self._keeper = Keeper(serving, agent_name, self._hear, self._lost, self._served, deaths)
        self._reader, self._go_on = reader, go_on
        self.add_remote_agent, self.remove_remote_agent = reader.add_remote_agent, reader.remove_remote_agent
        self.post_read, self.detach, self.pack = reader.post_read, reader.detach, reader.pack
        self._is_alone = False  # True without a child, when remote readers reach the reader's agent
        self._on_ready: Callable[[], None] = lambda: None
        self._inbox: list[DataNews] = []
        self._cause = ""
        self._lost_at = 0.0  # time at which the agent was lost; 0 if there is one
        self._num_restarts = 0
        self._stats: dict[str, int] = {}

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def _hear(self, news: wire.News) -> None:
        if isinstance(news, wire.Stats):
            self._stats = news.values

    def _lost(self, cause: str, pause_s: float) -> None:
        self._cause = cause
        self._lost_at = self._lost_at or time.monotonic()
        self._tell(AgentLost(cause, pause_s))

    def _served(self) -> None:
        if self._lost_at:
            seconds, self._lost_at = time.monotonic() - self._lost_at, 0.0
            self._num_restarts += 1
            self._tell(AgentReplaced(self._keeper.agent, self._cause, seconds))

    def _tell(self, news: DataNews) -> None:
        self._inbox.append(news)
        asyncio.get_running_loop().call_soon(self._on_ready)

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        self._on_ready, self._is_alone = on_ready, False
        here = await self._reader.start(memories, on_ready)
        copies = [] if here.packing is None else [here.packing.memory]
        try:
            return (await self._keeper.start([*memories, *copies]))._replace(packing=here.packing)
        except BackendError as exc:
            if self._go_on is None:
                raise
            self._go_on(str(exc))
        self._is_alone = True
        return here

    def watch(self, serving: bool) -> None:
        (self._reader if self._is_alone else self._keeper).watch(serving)

    @property
    def costs(self) -> ReadCosts | None:
        return self._reader.costs

    def poll(self) -> list[DataNews]:
        news, self._inbox = self._inbox, []
        return [*self._reader.poll(), *news]

    def statistics(self) -> dict[str, int]:
        """Return the counts of this process's reads; those of the child (`serving.`) are up to 0.1 s old."""
        return {
            **self._reader.statistics(),
            **{f"serving.{key}": value for key, value in self._stats.items()},
            "restarts": self._num_restarts,
            "processes": self._keeper.num_processes,
            "frames_out": self._keeper.frames_out,
            "frames_in": self._keeper.frames_in,
        }

    def describe(self) -> dict[str, str]:
        child = f"process {self.pid}" if self.pid else "no process now"
        return {**self._reader.describe(), "serving": "this process" if self._is_alone else child}

    async def quiesce(self) -> None:
        await asyncio.gather(self._reader.quiesce(), self._keeper.quiesce())

    def close(self) -> None:
        try:
            self._keeper.close()
        finally:
            self._reader.close()
        self._inbox.clear()
        self._lost_at = 0.0
