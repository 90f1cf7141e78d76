"""Measure one small request at a time, beside bare ZMQ and NIXL: `python -m scripts.bench alone --help`.

Two processes on this host read 8 KiB in two descriptors, with asynckv and without it, in turns. The bare round trip
asks and is answered on a socket of `zmq.asyncio`, posts a NIXL read, and asks for its status until it has ended. It
proves nothing, and lets go of the blocks when the clock has stopped. (With blocking sockets, outside of any loop, it
takes half the time.) An announced request needs no message before its read. All run on asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import base64
import statistics
import time
from typing import Annotated, Any

import numpy as np
import typer
import zmq
import zmq.asyncio

from asynckv import Engine, EngineConfig, PrefillRanks
from asynckv.edges.nic.nixl import load_nixl
from asynckv.tools.bench.memory import Pool
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Model
from scripts import command
from scripts.bench.lender import Lender, tell
from tests.lab.fleet import Fleet

PIECE, PLACES, CHOSEN = 4096, 64, np.array([1, 32], np.int32)
WAYS = ("asynckv", "bare", "asynckv, announced", "bare, announced")
GOAL = 2.0  # of the bare round trip, at most
ANSWER_S = 10.0


class Side(Lender):
    """An engine of one layer and one KV head; and bare memory, with a NIXL agent and a ZMQ context."""

    def __init__(self, *, name: str) -> None:
        pool, api = Pool(model_layout(Model("alone", (Heads(1, 128),)), num_blocks=PLACES), seed=0), load_nixl()
        super().__init__(Engine(EngineConfig(engine_id=name), pool.registration))
        self._pool = pool
        self._agent = api.nixl_agent(f"bare-{name}", api.nixl_agent_config(enable_prog_thread=False))
        self._array, self._context = np.ones(PLACES * PIECE, np.uint8), zmq.asyncio.Context()
        self._agent.register_memory([(self._array.ctypes.data, self._array.nbytes, 0, "")], "DRAM")

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
        await super().__aexit__()

    # -- asked of the owner's process ----------------------------------------------------------------

    def meet(self) -> dict[str, Any]:
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._answering = asyncio.create_task(self._answer())
        agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"engine": self.endpoint(), "port": port, "base": self._array.ctypes.data, "agent": agent}

    async def _answer(self) -> None:
        while True:
            reader, _ = await self._router.recv_multipart()
            self._agent.get_new_notifs()  # makes the progress that a new connection needs
            await self._router.send_multipart([reader, b"granted"])

    # -- the reader ----------------------------------------------------------------------------------

    def open(self, met: dict[str, Any]) -> None:
        self.group = PrefillRanks("owner", [met["engine"]])
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(f"tcp://127.0.0.1:{met['port']}")
        name = self._agent.add_remote_agent(base64.b64decode(met["agent"]))
        self._lists = [
            self._agent.prep_xfer_dlist(of, [(base + i * PIECE, PIECE, 0) for i in range(PLACES)], "DRAM")
            for of, base in (("", self._array.ctypes.data), (name, met["base"]))
        ]

    async def bare(self, *, is_announced: bool) -> float:
        raw, (mine, theirs), began = self._agent.agent, [each._handle for each in self._lists], time.perf_counter()
        if not is_announced:
            await self._ask()
        handle = raw.makeXferReq(self._agent.nixl_ops["READ"], mine, CHOSEN, theirs, CHOSEN, b"", [], False)
        status = int(raw.postXferReq(handle, b""))
        while status:
            if time.perf_counter() - began > 0.01:
                await self._ask()  # the connection is being made, or the owner is gone
            status = int(raw.getXferStatus(handle))
        raw.releaseXferReq(handle)
        seconds = time.perf_counter() - began
        await self._ask()
        return seconds

    async def _ask(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            await self._dealer.send(b"")
            await self._dealer.recv()

    async def pull(self, name: str, params: dict[str, Any]) -> float:
        began = time.perf_counter()
        await self.engine.pull(name, [(0, [1])], params)
        return time.perf_counter() - began


async def measure(rounds: int, requests: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    async with Fleet() as fleet, Side(name="reader") as reader:
        owner = await fleet.start("owner", "scripts.bench.alone:Side", name="owner")
        reader.open(await owner.ask("meet"))
        for number in range(rounds + 1):
            for way in WAYS:
                names, is_announced = [f"{number}.{way}.{i}" for i in range(requests)], way.endswith("announced")
                every = {name: reader.group.make_params(name, [(0, [1])], 16, written=True) for name in names}
                if way.startswith("bare"):
                    seconds = [await reader.bare(is_announced=is_announced) for _ in names]
                else:
                    await owner.ask("lend", every=list(every.values()))
                    for name, params in every.items() if is_announced else ():
                        reader.engine.announce(name, params)
                    await asyncio.sleep(0.5 if is_announced else 0.0)  # the grants arrive
                    seconds = [await reader.pull(*each) for each in every.items()]
                if number:  # the first round makes connections
                    found[way].append(round(1e6 * statistics.median(seconds), 1))
    pairs = {ours: zip(found[ours], found[bare], strict=True) for ours, bare in (WAYS[:2], WAYS[2:])}
    ratios = {ours: sorted(round(a / b, 2) for a, b in pair) for ours, pair in pairs.items()}
    return {"p50_us": found, "ratios": ratios, "goal": GOAL}


def alone(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with all four ways in turn.")] = 5,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Requests of each way in a round.")] = 300,
    json: command.Json = "-",
) -> int:
    """Measure one small request at a time, beside bare ZMQ and NIXL."""
    return tell("alone", json, lambda: asyncio.run(measure(rounds, requests)))


main = command.script(alone, "Times are medians of each round, in microseconds.")
