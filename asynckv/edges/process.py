"""The data plane of which a part lives in a process of its own: what can die inside UCX dies there.

Remote readers always reach the agent of the child (`keeper.py`), because UCX can end the owner's process. Our own reads
are posted by a plane of this process (`ServingPlane`), or go through the child as well (`ProcessPlane`). When the child
ends, whatever it had posted has ended, and the engine is told (`AgentLost`, `AgentReplaced`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from asynckv.config import NixlConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges import process_wire as wire
from asynckv.edges.keeper import DEATHS, Keeper
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.plan import ReadRequest
from asynckv.geometry.tables import MAX_KEPT_ROWS, DescTable
from asynckv.ports import AgentInfo, AgentLost, AgentReplaced, DataNews, DataPlane

MAX_TABLES = 1024  # tables of one remote agent that the child knows by number: as many as the core keeps


class _Kept:
    """What both planes have in common: an agent in a child, and how its ends are told."""

    def __init__(self, config: NixlConfig, agent_name: str, *, reads: bool, deaths: int, has_spare: bool) -> None:
        self._reads = reads
        self._keeper = Keeper(config, agent_name, self._hear, self._lost, self._served, deaths, has_spare)
        self._on_ready: Callable[[], None] = lambda: None
        self._inbox: list[DataNews] = []
        self._cause = ""
        self._lost_at = 0.0  # since when there is no agent; 0 if there is one
        self._num_failed = 0
        self._num_restarts = 0
        self._stats: dict[str, int] = {}

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def _hear(self, news: wire.News | None) -> None:
        """Take what the child says; after that, tell the engine."""
        match news:
            case None:
                if self._inbox:
                    self._on_ready()
            case wire.Stats(values):
                self._stats = values
            case wire.Ends(ends):
                self._take_ends(ends)
            case wire.Loaded(number, cause):
                self._take_loaded(number, cause)
            case wire.Ready() | wire.Unready():
                pass  # the keeper's
            case _:
                assert_never(news)

    def _lost(self, cause: str, pause_s: float) -> None:
        self._cause = cause
        if not self._lost_at:
            self._lost_at = time.monotonic()
            self._num_failed = self._fail_all(cause)
        self._inbox.append(AgentLost(cause, pause_s, self._reads))

    def _served(self) -> None:
        if self._lost_at:
            seconds, self._lost_at = time.monotonic() - self._lost_at, 0.0
            self._num_restarts += 1
            self._inbox.append(AgentReplaced(self._keeper.agent, self._cause, seconds, self._num_failed))
        self._cause = ""

    def _take_ends(self, ends: Sequence[TransferEnded]) -> None: ...

    def _take_loaded(self, number: int, cause: str) -> None: ...

    def _fail_all(self, cause: str) -> int:
        return 0

    def _take_inbox(self) -> list[DataNews]:
        news, self._inbox = self._inbox, []
        return news

    def _forget(self) -> None:
        self._inbox.clear()
        self._lost_at = 0.0

    def _counts(self) -> dict[str, int]:
        return {
            "restarts": self._num_restarts,
            "processes": self._keeper.num_processes,
            "frames_out": self._keeper.frames_out,
            "frames_in": self._keeper.frames_in,
        }

    def _place(self) -> str:
        return f"process {self.pid}" if self.pid else "no process now"


class ServingPlane(_Kept):
    """Reads here, by a plane of this process; remote readers reach an agent in a process of its own.

    Args:
        go_on: If the child cannot be started, it is told why, and remote readers reach the reader's agent; else the
            start fails.
        deaths: How many ends of the child within a minute are followed by another at once.
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
        super().__init__(_in_child(config, posting_threads=0), agent_name, reads=False, deaths=deaths, has_spare=True)
        self._reader, self._go_on = reader, go_on
        self._is_alone = False  # there is no child: remote readers reach the reader's agent

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        self._on_ready, self._is_alone = on_ready, False
        here = await self._reader.start(memories, on_ready)
        try:
            return await self._keeper.start(memories)
        except BackendError as exc:
            if self._go_on is None:
                raise
            self._go_on(str(exc))
        self._is_alone = True
        return here

    def watch(self, serving: bool) -> None:
        (self._reader if self._is_alone else self._keeper).watch(serving)

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        await self._reader.add_remote_agent(agent, memories)

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        self._reader.remove_remote_agent(name, keep=keep)

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest) -> TransferEnded | None:
        return self._reader.post_read(transfer_id, name, read)

    def poll(self) -> list[DataNews]:
        return [*self._reader.poll(), *self._take_inbox()]

    def statistics(self) -> dict[str, int]:
        """Count reads here; what the present child counts (`serving.`) is up to a tenth of a second old."""
        serving = {f"serving.{key}": value for key, value in self._stats.items()}
        return {**self._reader.statistics(), **serving, **self._counts()}

    def describe(self) -> dict[str, str]:
        return {**self._reader.describe(), "serving": "this process" if self._is_alone else self._place()}

    async def quiesce(self) -> None:
        await asyncio.gather(self._reader.quiesce(), self._keeper.quiesce())

    def close(self) -> None:
        try:
            self._keeper.close()
        finally:
            self._reader.close()
        self._forget()


class ProcessPlane(_Kept):
    """Everything in a process of its own, reads as well; see `Keeper` for `deaths` and `has_spare`."""

    def __init__(self, config: NixlConfig, agent_name: str, *, deaths: int = DEATHS, has_spare: bool = True) -> None:
        super().__init__(_in_child(config), agent_name, reads=True, deaths=deaths, has_spare=has_spare)
        self._users: Counter[str] = Counter()  # remote agents, and how often they were added
        self._tables: dict[str, dict[int, tuple[int, DescTable]]] = {}  # number and table, the oldest first
        self._num_tables = 0
        self._loads: dict[int, asyncio.Future[None]] = {}
        self._num_loads = 0
        self._settled = asyncio.Event()  # set when an agent serves, or none will for a while
        self._running: set[TransferId] = set()  # transfers that have not ended, those in doubt included
        self._doubtful: set[TransferId] = set()
        self._num_posts = 0

    async def start(self, memories: Sequence[Memory], on_ready: Callable[[], None]) -> AgentInfo:
        self._on_ready = on_ready
        return await self._keeper.start(memories)

    def watch(self, serving: bool) -> None:
        self._keeper.watch(serving)

    async def add_remote_agent(self, agent: AgentInfo, memories: Sequence[Memory]) -> None:
        while not self._keeper.is_serving or self._keeper.is_closing:
            if self._keeper.is_closing or self._settled.is_set():
                raise BackendError(self._cause or "the data plane was closed")
            await self._settled.wait()
        future = asyncio.get_running_loop().create_future()
        self._num_loads += 1
        self._loads[self._num_loads] = future
        loader = self._keeper.name
        self._keeper.order(wire.Load(self._num_loads, agent, tuple(memories)))
        await future
        if loader != self._keeper.name or not self._keeper.is_serving:
            raise BackendError(f"{agent.name} was loaded by a process that has ended")
        self._users[agent.name] += 1

    def remove_remote_agent(self, name: str, *, keep: bool = False) -> None:
        if name in self._users:
            self._keeper.order(wire.Drop(name, keep))
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                for number, _ in self._tables.pop(name, {}).values():
                    self._keeper.order(wire.Forget(number))

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest) -> TransferEnded | None:
        self._num_posts += 1
        if not self._keeper.is_serving or self._keeper.is_closing:
            return TransferEnded(transfer_id, Ending.FAILED, self._cause or "the data plane was closed")
        self._running.add(transfer_id)
        table = self._number_of(name, read.table)
        indices = read.local.tobytes(), read.remote.tobytes()
        self._keeper.order(wire.Read(transfer_id, name, table, *indices, read.num_bytes, read.num_descriptors))
        return None

    def _number_of(self, name: str, table: DescTable) -> int:
        """Return the number by which the child knows a table; one that it does not know is sent."""
        tables = self._tables.setdefault(name, {})
        if (known := tables.get(id(table))) is not None:
            return known[0]
        num_rows = table.num_rows + sum([known.num_rows for _, known in tables.values()])
        while tables and (len(tables) >= MAX_TABLES or num_rows > MAX_KEPT_ROWS):
            oldest, gone = tables.pop(next(iter(tables)))
            num_rows -= gone.num_rows
            self._keeper.order(wire.Forget(oldest))
        self._num_tables += 1
        tables[id(table)] = self._num_tables, table
        arrays = table.length.tobytes(), table.local.tobytes(), table.remote.tobytes()
        self._keeper.order(wire.Table(self._num_tables, *arrays, table.local_blocks, table.remote_blocks))
        return self._num_tables

    def poll(self) -> list[DataNews]:
        return self._take_inbox()

    def _take_ends(self, ends: Sequence[TransferEnded]) -> None:
        for ended in ends:
            if ended.transfer_id not in self._running:
                continue
            if ended.ending is Ending.IN_DOUBT:
                self._doubtful.add(ended.transfer_id)
            else:
                self._running.discard(ended.transfer_id)
                self._doubtful.discard(ended.transfer_id)
            self._inbox.append(ended)

    def _take_loaded(self, number: int, cause: str) -> None:
        future = self._loads.pop(number, None)
        if future is not None and not future.done():
            if cause:
                future.set_exception(BackendError(cause))
            else:
                future.set_result(None)

    def _fail_all(self, cause: str) -> int:
        running = sorted(self._running)
        self._inbox += [TransferEnded(each, Ending.FAILED, cause) for each in running]
        self._running.clear()
        self._doubtful.clear()
        self._users.clear()
        self._tables.clear()
        self._fail_loads(cause)
        return len(running)

    def _fail_loads(self, cause: str) -> None:
        loads, self._loads = self._loads, {}
        for future in loads.values():
            if not future.done():
                future.set_exception(BackendError(cause))

    def _lost(self, cause: str, pause_s: float) -> None:
        super()._lost(cause, pause_s)
        # Nobody waits so long for the next.
        if pause_s:
            self._settled.set()
        else:
            self._settled.clear()

    def _served(self) -> None:
        super()._served()
        self._settled.set()

    def statistics(self) -> dict[str, int]:
        """Count transfers and restarts; what the present child counts is up to a tenth of a second old."""
        return {
            **self._stats,
            **self._counts(),
            "posts": self._num_posts,
            "running": len(self._running) - len(self._doubtful),
            "in_doubt": len(self._doubtful),
            "peers": len(self._users),
        }

    def describe(self) -> dict[str, str]:
        return {**self._keeper.facts, "serving": self._place(), "reading": "by the same process"}

    async def quiesce(self) -> None:
        self._settled.set()
        await self._keeper.quiesce()

    def close(self) -> None:
        self._settled.set()
        self._keeper.close()
        self._fail_loads("the data plane was closed")
        for each in (self._users, self._tables, self._running, self._doubtful):
            each.clear()
        self._forget()


def _in_child(config: NixlConfig, **changes: int) -> NixlConfig:
    return replace(config, process="never", **changes)  # type: ignore[arg-type]
