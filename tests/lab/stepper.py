"""A small engine as a service has them: an HTTP server, a scheduler's thread that makes steps, and an `EngineThread`.

Nothing is computed: a step takes its time. Like vLLM, the scheduler makes no steps while it is idle. It can be made to
hang. With `asynckv proxy` in front it is a service of prefill and decode engines.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from aiohttp import web

from asynckv import (
    EngineConfig,
    EngineThread,
    Finished,
    InspectConfig,
    LeaseConfig,
    LogConfig,
    Metrics,
    MetricsEndpoint,
    NixlConfig,
    PrefillRanks,
)
from asynckv.embed import Announce, Lend, Order, Pull
from asynckv.tools.proxy.server import errors_as_json, serving
from tests.engines import BLOCKS, memory

DRAIN_S, CLOSE_S = 3.0, 12.0


class Scheduler:
    """A thread that makes steps while any request is under way, and sleeps else, as vLLM's does.

    Args:
        thread: The engine that gets the orders.
        step_s: How long a step takes.
    """

    def __init__(self, thread: EngineThread, step_s: float) -> None:
        self._engine, self._step_s = thread, step_s
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._under_way, self._asked = set[str](), dict[str, asyncio.Future[str]]()
        self._begins, self._returns = threading.Event(), threading.Event()  # steps do, while these are set
        self._begins.set()
        self._returns.set()
        self._forgets = False

    def start(self) -> None:
        """Begin to make steps, on behalf of the running event loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, *orders: Order | None) -> None:
        """Give orders in the next step; `None` ends the thread."""
        for order in orders:
            self._orders.put(order)

    async def ended(self, *orders: Announce | Pull) -> str:
        """Give orders, and wait for the end of the request."""
        future: asyncio.Future[str] = self._loop.create_future()
        self._asked[orders[-1].request_id] = future
        self.give(*orders)
        return await future

    def hang(self) -> None:
        """Make no further step."""
        self._begins.clear()

    def hang_in_step(self) -> None:
        """Hang once the next orders are given, and take no results of them."""
        self._returns.clear()
        self._begins.set()

    def go_on(self) -> None:
        """Make steps again, which were not to begin."""
        self._begins.set()

    def forget(self) -> None:
        """Make steps that give orders, and take no results."""
        self._forgets = True

    def _run(self) -> None:
        while True:
            orders = [] if self._under_way else [self._orders.get()]
            self._begins.wait()
            while not self._orders.empty():
                orders.append(self._orders.get())
            if None in orders:
                return
            self._step([x for x in orders if x is not None])

    def _step(self, orders: list[Order]) -> None:
        self._under_way |= {_request_of(x) for x in orders if isinstance(x, Announce | Lend | Pull)}
        self._engine.submit(orders)
        self._returns.wait()
        time.sleep(self._step_s)
        finished = Finished() if self._forgets else self._engine.take_finished()
        ends = {x.request_id: "complete" for x in finished.finished_recving}
        ends |= {x.request_id: str(getattr(x.error, "reason", x.error)) for x in finished.failed}
        ends |= {x.request_id: x.cause for x in finished.finished_sending}
        ends |= {_request_of(x.order): "refused" for x in finished.refused if isinstance(x.order, Lend | Pull)}
        self._under_way -= ends.keys()
        for request_id, end in ends.items():
            self._loop.call_soon_threadsafe(self._told, request_id, end)

    def _told(self, request_id: str, end: str) -> None:
        if (future := self._asked.pop(request_id, None)) is not None and not future.done():
            future.set_result(end)


def _request_of(order: Announce | Lend | Pull) -> str:
    request_id: str = order.params["request_id"] if isinstance(order, Lend) else order.request_id
    return request_id


class Stepper:
    """One engine.

    Args:
        name: Of the engine.
        directory: Of its socket and its log.
        port, metrics_port: Where it listens; 0 lets the system choose.
        step_s: How long a step takes.
    """

    def __init__(
        self,
        *,
        name: str,
        directory: str,
        port: int = 0,
        metrics_port: int = 0,
        step_s: float = 0.02,
        lease_s: float = 30.0,
        grant_s: float = 10.0,
    ) -> None:
        self._lease, self._name = LeaseConfig(lease_s=lease_s, grant_s=grant_s), name
        config = EngineConfig(
            engine_id=name,
            inspect=InspectConfig(directory=directory),
            lease=self._lease,
            log=LogConfig(file=f"{directory}/{name}-{{pid}}.jsonl"),
            nixl=NixlConfig(posting_threads=0, process="never"),
        )
        self.thread = EngineThread(config, memory(1)[0])
        self._endpoint = MetricsEndpoint(Metrics(self.thread), port=metrics_port)
        self._scheduler, self._blocks = Scheduler(self.thread, step_s), itertools.cycle(range(BLOCKS))
        self._is_ready = True
        app = web.Application(middlewares=[errors_as_json])
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        self._serving = serving(app, "127.0.0.1", port, DRAIN_S)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.thread.start)
        self._endpoint.start()
        self._group = PrefillRanks(self._name, [self.thread.engine.endpoint], lease=self._lease)
        self._scheduler.start()
        self.url = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End in order: finish the requests, let readers read, and say goodbye."""
        await self._serving.__aexit__(None, None, None)
        await asyncio.to_thread(self.thread.call, self.thread.engine.drain(DRAIN_S), 2 * DRAIN_S)
        self._scheduler.give(None)
        await asyncio.to_thread(self.thread.close, CLOSE_S)
        self._endpoint.close()

    # -- questions -------------------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Tell where it serves, and where its metrics are."""
        return [self.url, self._endpoint.url]

    def retire(self) -> None:
        """Say that no requests are to be sent here any more, as a pod does that is about to go."""
        self._is_ready = False

    def hang(self) -> None:
        """Have the scheduler make no further step."""
        self._scheduler.hang()

    def hang_in_step(self) -> None:
        """Have the scheduler hang once its next orders are given."""
        self._scheduler.hang_in_step()

    def block(self, seconds: float) -> None:
        """Keep the engine's loop away."""
        self.thread.engine._driver.home.loop.call_soon_threadsafe(time.sleep, seconds)  # type: ignore[union-attr]

    def make(self, request_id: str) -> dict[str, Any]:
        """Make the params of a request of one block, and order it to be lent in the next step."""
        params = self._group.make_params(request_id, [(0, [next(self._blocks)])], 16)
        self._scheduler.give(Lend(params))
        return params

    async def pull(self, request_id: str, params: Mapping[str, Any]) -> str:
        """Announce and pull a request; tell what came of it."""
        pull = Pull(request_id=request_id, groups=[(0, [next(self._blocks)])], params=params)
        return await self._scheduler.ended(Announce(request_id, params), pull)

    # -- requests --------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.Response:
        params = (await request.json()).get("kv_transfer_params") or {}
        request_id = request.headers.get("X-Request-Id") or f"{id(request):x}"
        said: dict[str, Any] = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
        if params.get("do_remote_decode"):
            said["kv_transfer_params"] = {"do_remote_prefill": True, "asynckv": self.make(request_id)}
        elif params.get("do_remote_prefill"):
            said["pulled"] = await self.pull(
                request_id, params["asynckv"]
            )  # if that failed, the prompt is computed here
        return web.json_response(said)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=200 if self._is_ready else 503)
