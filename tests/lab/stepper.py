"""A small engine as a service has them: an HTTP server, a scheduler's thread that makes steps, and an `EngineThread`.

Nothing is computed: a step takes its time. Like vLLM, it makes no steps while it is idle. Its scheduler can be made to
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
        self._lease, self._step_s, self._name = LeaseConfig(lease_s=lease_s, grant_s=grant_s), step_s, name
        config = EngineConfig(
            engine_id=name,
            inspect=InspectConfig(directory=directory),
            lease=self._lease,
            log=LogConfig(file=f"{directory}/{name}-{{pid}}.jsonl"),
            nixl=NixlConfig(posting_threads=0, process="never"),
        )
        self.thread = EngineThread(config, memory(1)[0])
        self._endpoint = MetricsEndpoint(Metrics(self.thread), port=metrics_port)
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._pulled: dict[str, asyncio.Future[str]] = {}
        self._under_way = 0  # lends and pulls without a result
        self._hangs_in_step = False
        self._hangs, self._blocks = threading.Event(), itertools.cycle(range(BLOCKS))
        self._scheduler = threading.Thread(target=self._run, daemon=True)
        app = web.Application(middlewares=[errors_as_json])
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        self._serving = serving(app, "127.0.0.1", port, DRAIN_S)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
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
        self._orders.put(None)
        await asyncio.to_thread(self.thread.close, CLOSE_S)
        self._endpoint.close()

    # -- questions -------------------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        """Tell where it serves, and where its metrics are."""
        return [self.url, self._endpoint.url]

    def hang(self) -> None:
        """Have the scheduler make no further step."""
        self._hangs.set()

    def hang_in_step(self) -> None:
        """Have the scheduler hang once its next orders are given."""
        self._hangs_in_step = True

    def block(self, seconds: float) -> None:
        """Keep the engine's loop away."""
        self.thread.engine._driver.home.loop.call_soon_threadsafe(time.sleep, seconds)  # type: ignore[union-attr]

    def make(self, request_id: str) -> dict[str, Any]:
        """Make the params of a request of one block, and order it to be lent in the next step."""
        params = self._group.make_params(request_id, [(0, [next(self._blocks)])], 16)
        self._orders.put(Lend(params))
        return params

    async def pull(self, request_id: str, params: Mapping[str, Any]) -> str:
        """Announce and pull a request; tell what came of it."""
        future: asyncio.Future[str] = self._loop.create_future()
        self._pulled[request_id] = future
        self._orders.put(Announce(request_id, params))
        self._orders.put(Pull(request_id=request_id, groups=[(0, [next(self._blocks)])], params=params))
        return await future

    # -- requests --------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.Response:
        params = (await request.json()).get("kv_transfer_params") or {}
        request_id = request.headers.get("X-Request-Id") or f"{id(request):x}"
        said: dict[str, Any] = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
        if params.get("do_remote_decode"):
            said["kv_transfer_params"] = {"do_remote_prefill": True, "asynckv": self.make(request_id)}
        elif params.get("do_remote_prefill"):
            await self.pull(request_id, params["asynckv"])  # if that failed, the prompt is computed here
        return web.json_response(said)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Make steps while anything is under way, and sleep else."""
        while True:
            orders = [] if self._under_way else [self._orders.get()]
            while not self._orders.empty():
                orders.append(self._orders.get())
            if self._hangs.is_set():
                threading.Event().wait()
            if None in orders:
                return
            self._step([x for x in orders if x is not None])

    def _step(self, orders: list[Order]) -> None:
        self._under_way += sum(isinstance(x, Lend | Pull) for x in orders)
        self.thread.submit(orders)
        if self._hangs_in_step:
            threading.Event().wait()
        time.sleep(self._step_s)
        finished = self.thread.take_finished()
        ends = {x.request_id: "complete" for x in finished.finished_recving}
        ends |= {x.request_id: str(getattr(x.error, "reason", x.error)) for x in finished.failed}
        ends |= {x.order.request_id: "refused" for x in finished.refused if isinstance(x.order, Pull)}
        for request_id, end in ends.items():
            self._loop.call_soon_threadsafe(self._told, request_id, end)
        lends = len(finished.finished_sending) + sum(isinstance(x.order, Lend) for x in finished.refused)
        self._under_way -= len(ends) + lends

    def _told(self, request_id: str, end: str) -> None:
        if (future := self._pulled.pop(request_id, None)) is not None and not future.done():
            future.set_result(end)
