"""The two ways in which an engine is embedded, behind one face, so that one suite asks the same of each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from asynckv import Engine, EngineClosed, EngineConfig, HeldBlocks, Registration, Statistics
from asynckv.core.events import TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.embed import EngineDesk, EngineThread, Finished, Order
from asynckv.geometry.look import Look
from asynckv.geometry.plan import ReadRequest
from asynckv.ports import CopyMade

T = TypeVar("T")

PATIENCE_S = 15.0


class Held(NixlPlane):
    """NIXL that keeps the ends of its transfers to itself while told to: what it reads may still be written."""

    is_holding = False

    def __init__(self, honest: NixlPlane) -> None:
        super().__init__(honest._config, honest._name)
        self.kept: list[TransferEnded | CopyMade] = []
        self.running = 0

    def post_read(self, transfer_id: TransferId, name: str, read: ReadRequest | Look) -> TransferEnded | None:
        ended = super().post_read(transfer_id, name, read)
        if self.is_holding:
            self.running += 1
            if ended is not None:
                self.kept.append(ended)
            return None
        return ended

    def poll(self) -> list[TransferEnded | CopyMade]:
        self.kept += super().poll()
        news: list[TransferEnded | CopyMade] = []
        if not self.is_holding:
            news, self.kept = self.kept, news
        return news

    async def let_go(self) -> None:
        """Tell all that was kept."""
        self.is_holding = False
        self._on_ready()


class Native:
    """An engine on an event loop of the caller's own, which runs while something is waited for."""

    def __init__(self, config: EngineConfig, registration: Registration) -> None:
        self.engine = Engine(config, registration)
        self.loop = asyncio.new_event_loop()
        self.desk = EngineDesk(self.engine)
        self.is_running = False

    def start(self, timeout_s: float = PATIENCE_S) -> Native:
        self.call(self.engine.start(), timeout_s)
        self.is_running = True
        return self

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    def submit(self, orders: Sequence[Order]) -> None:
        if not self.is_running:
            raise EngineClosed

        async def submit() -> None:
            self.desk.submit(orders)

        self.call(submit(), PATIENCE_S)

    def take_finished(self) -> Finished:
        return self.desk.take_finished()

    def statistics(self, max_age_s: float = 1.0) -> Statistics:
        return self.engine.statistics()

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0.001))

    def close(self, timeout_s: float = PATIENCE_S) -> tuple[HeldBlocks, ...]:
        cut_short: tuple[HeldBlocks, ...] = ()
        if self.is_running:
            self.is_running = False
            cut_short = self.call(self.engine.aclose(timeout_s - 1), timeout_s)
            self.call(self.desk.settle(), timeout_s)
        self.loop.close()
        return cut_short


class Threaded(EngineThread):
    def turn(self) -> None:
        self.wait(0.001)


Way = Native | Threaded
WAYS: dict[str, type[Native] | type[Threaded]] = {"native": Native, "thread": Threaded}


def until(condition: Callable[[], object], *ways: Way) -> None:
    """Let engines run until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not come to pass: {[way.statistics(0.0) for way in ways]}"
        for way in ways:
            way.turn()


def on_loop(thread: EngineThread, call: Callable[[], object]) -> None:
    """Call something on the engine's loop, whatever comes of it."""
    assert thread._loop is not None
    thread._loop.call_soon_threadsafe(call)


class Stuck:
    """A loop that is held up until told otherwise."""

    def __init__(self, thread: EngineThread) -> None:
        self._began, self._go = threading.Event(), threading.Event()
        on_loop(thread, self._hold)
        assert self._began.wait(PATIENCE_S)

    def _hold(self) -> None:
        self._began.set()
        assert self._go.wait(PATIENCE_S)

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()


def end() -> None:
    raise SystemExit("enough")
