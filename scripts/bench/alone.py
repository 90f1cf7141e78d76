"""Measure one small request at a time, beside bare ZMQ and NIXL: `python -m scripts.bench alone --help`.

Two processes on this host read 8 KiB in two descriptors, by asynckv and without it, in turns. The bare round trip asks
and is answered on one ZMQ socket, posts one NIXL read and asks for its status until it has ended; it has no proof, and
lets go of the blocks after the clock has stopped. A request that was announced needs no message before the read.
"""

from __future__ import annotations

import asyncio
import base64
import statistics
import time
from json import dumps
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import typer
import zmq
import zmq.asyncio

from asynckv import Engine, EngineConfig, PrefillRanks
from asynckv.core.types import Endpoint
from asynckv.edges.nixl import load_nixl
from asynckv.tools.bench.memory import Pool
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from tests.lab.fleet import Fleet

PIECE, PLACES = 4096, 64
WAYS = ("asynckv", "bare", "asynckv, announced", "bare, announced")
GOAL = 1.5  # of the bare round trip, at most


class Side:
    """An engine of one layer and one KV head, and bare memory with a NIXL agent."""

    def __init__(self, *, name: str) -> None:
        self.pool = Pool(model_layout(Model("alone", (Heads(1, 128),)), num_blocks=PLACES), seed=0)
        self.engine = Engine(EngineConfig(engine_id=name), self.pool.registration)
        api = load_nixl()
        self.agent = api.nixl_agent(f"bare-{name}", api.nixl_agent_config(enable_prog_thread=False))
        self.array = np.ones(PLACES * PIECE, np.uint8)
        self.base = self.array.ctypes.data
        self.agent.register_memory([(self.base, len(self.array), 0, "")], "DRAM")
        self.context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        await self.engine.aclose()
        self.context.destroy(linger=0)

    # -- asked of the owner's process ----------------------------------------------------------------

    def meet(self) -> dict[str, Any]:
        socket = self.context.socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._task = asyncio.create_task(self._answer(socket))
        agent = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"engine": msgspec.to_builtins(self.engine.endpoint), "port": port, "base": self.base, "agent": agent}

    async def _answer(self, socket: Any) -> None:
        while True:
            reader, _ = await socket.recv_multipart()
            self.agent.get_new_notifs()  # makes the progress that a new connection needs
            await socket.send_multipart([reader, b"granted"])

    def lend(self, every: list[dict[str, Any]]) -> None:
        for params in every:
            self.engine.lend(params)

    # -- the reader ----------------------------------------------------------------------------------

    def open(self, met: dict[str, Any]) -> None:
        self.group = PrefillRanks("owner", [msgspec.convert(met["engine"], Endpoint)])
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{met['port']}")
        name = self.agent.add_remote_agent(base64.b64decode(met["agent"]))
        sides = ("", self.base), (name, met["base"])
        self._lists = [
            self.agent.prep_xfer_dlist(of, [(base + i * PIECE, PIECE, 0) for i in range(PLACES)], "DRAM")
            for of, base in sides
        ]

    async def bare(self, *, announced: bool) -> float:
        raw, chosen = self.agent.agent, np.array([1, PLACES // 2], np.int32)
        began = time.perf_counter()
        if not announced:
            await self._ask()
        mine, theirs = [each._handle for each in self._lists]
        handle = raw.makeXferReq(self.agent.nixl_ops["READ"], mine, chosen, theirs, chosen, b"", [], False)
        status = int(raw.postXferReq(handle, b""))
        while status:
            if time.perf_counter() - began > 0.01:
                await self._ask()  # the connection is being made
            status = int(raw.getXferStatus(handle))
        raw.releaseXferReq(handle)
        seconds = time.perf_counter() - began
        await self._ask()
        return seconds

    async def _ask(self) -> None:
        await self.socket.send(b"")
        await self.socket.recv()

    async def pull(self, params: dict[str, Any], name: str) -> float:
        began = time.perf_counter()
        await self.engine.pull(name, [(0, [PLACES // 2])], params)
        return time.perf_counter() - began


async def measure(rounds: int, requests: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    async with Fleet() as fleet, Side(name="reader") as reader:
        owner = await fleet.start("owner", "scripts.bench.alone:Side", name="owner")
        reader.open(await owner.ask("meet"))
        for number in range(-1, rounds):
            for way in WAYS:
                announced, seconds = way.endswith("announced"), []
                every = [
                    reader.group.make_params(f"{number}.{way}.{i}", [(0, [1])], 16, written=True)
                    for i in range(requests)
                ]
                if way.startswith("bare"):
                    seconds = [await reader.bare(announced=announced) for _ in every]
                else:
                    await owner.ask("lend", every=every)
                    names = [f"{number}.{way}.{i}" for i in range(requests)]
                    for name, params in zip(names, every, strict=True) if announced else ():
                        reader.engine.announce(name, params)
                    await asyncio.sleep(0.5 if announced else 0.0)  # the grants arrive
                    seconds = [await reader.pull(*each) for each in zip(every, names, strict=True)]
                if number >= 0:  # the first round makes connections
                    found[way].append(round(1e6 * statistics.median(seconds), 1))
    return found


def alone(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with all four ways in turn.")] = 5,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Requests of each way in a round.")] = 300,
    json: command.Json = "-",
) -> None:
    """Measure one small request at a time, beside bare ZMQ and NIXL."""
    with command.output(json) as out:
        p50 = asyncio.run(measure(rounds, requests))
        pairs = {ours: zip(p50[ours], p50[bare], strict=True) for ours, bare in (WAYS[:2], WAYS[2:])}
        ratios = {ours: round(statistics.median(a / b for a, b in pair), 2) for ours, pair in pairs.items()}
        print(dumps({"p50_us": p50, "ratio": ratios, "goal": GOAL}), file=out)


main = command.script(alone, "Times are medians of each round, in microseconds.")
