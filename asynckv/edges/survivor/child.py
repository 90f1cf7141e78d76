"""The program of the data plane's own process: a `NixlPlane` on an event loop that obeys orders from a socket.

Each order becomes one call of the plane. A bug ends the process, as does the engine's end; after that nothing writes.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any, assert_never

from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.survivor import wire
from asynckv.errors import BackendError

STATS_S = 0.1  # seconds after a change within which gauges and counters are reported
GROWTH = 1 << 29  # bytes that this process may grow by; it grows by some MiB
BROKEN = 70  # exit status: a bug; its traceback was printed


class Child:
    _plane: NixlPlane  # made by the first order, `Setup`; no other comes before the answer

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats: dict[str, int] = {}
        self._stats_due: asyncio.TimerHandle | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_end_at_once)
        self._link = wire.Link(self._end)
        self._loop.add_reader(self._link.fileno(), self._on_orders)
        await self._over.wait()
        self._loop.remove_reader(self._link.fileno())
        await self._plane.quiesce()
        # A load in progress holds the agent, and the engine does not wait for it any more.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._plane.close()

    def _on_orders(self) -> None:
        frames, is_there = self._link.receive()
        for frame in frames:
            self._obey(wire.orders.decode(frame))
            self._tell_soon()
        if not is_there:
            self._over.set()

    def _obey(self, order: wire.Order) -> None:
        match order:
            case wire.Load():
                task = self._loop.create_task(self._load(order))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case wire.Drop(name):
                self._plane.remove_remote_agent(name)
            case wire.WatchReaders(serving):
                self._plane.watch(serving)
            case wire.Setup():
                self._set_up(order)
            case wire.Beat():
                self._link.send(wire.Stats(self._plane.statistics()))
            case wire.Close():
                self._over.set()
            case _:
                assert_never(order)

    def _set_up(self, order: wire.Setup) -> None:
        self._plane = NixlPlane(order.config, order.agent_name)
        try:
            agent = self._plane.begin(order.memories, self._on_ready)
        except BackendError as exc:
            self._link.send(wire.Unready(str(exc)))
            self._over.set()
            return
        _bound_growth()
        self._link.send(wire.Ready(agent))

    async def _load(self, order: wire.Load) -> None:
        cause = ""
        try:
            await self._plane.add_remote_agent(order.remote, order.memories)
        except Exception as exc:
            cause = (str(exc) if isinstance(exc, BackendError) else "") or repr(exc)  # an empty cause means success
        self._link.send(wire.LoadEnded(cause))

    def _on_ready(self) -> None:
        self._plane.poll()  # makes progress for remote readers
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._stats_due is None:
            self._stats_due = self._loop.call_later(STATS_S, self._tell_stats)

    def _tell_stats(self) -> None:
        self._stats_due = None
        stats = self._plane.statistics()
        if stats != self._stats:
            self._stats = stats
            self._link.send(wire.Stats(stats))


def _bound_growth() -> None:
    """Let this process grow by `GROWTH` at most: NIXL keeps notifications without a bound, so a flood ends it."""
    now = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if now is not None:
        most = int(now[1]) * 1024 + GROWTH
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _end_at_once(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process after a bug: its keeper can report a clean end, but not a process that goes on half broken."""
    loop.default_exception_handler(context)
    os._exit(BROKEN)
