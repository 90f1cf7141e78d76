"""Second looks over real NIXL: by every way on which a read goes, bytes that change between the two reads are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

from asynckv import BytesDiffer, Engine, EngineConfig, PrefillRanks
from asynckv.config import NixlConfig, PullConfig
from asynckv.core.events import Ending, TransferEnded
from asynckv.edges.nic import places
from asynckv.edges.nic.agent import Agent
from asynckv.edges.nic.nixl import NixlPlane
from asynckv.edges.torch import first_difference_of_tensors
from asynckv.errors import BackendError
from asynckv.geometry.layout import Memory
from asynckv.geometry.look import PLACE_BYTES, Look
from tests.engines import Bench, memory
from tests.test_nixl_edge import Side, pairs, table
from tests.test_process import Real, over_tcp

__all__ = ["over_tcp"]
pytestmark = pytest.mark.nixl

LOOKS = PullConfig(second_look=1.0, second_look_bytes="all")
LOOP = NixlConfig(posting_threads=0, process="never")
THREADS = NixlConfig(posting_threads=1, process="never", bulk_bytes=1, bulk_descriptors=1)


def flip(array: Any, at: Any) -> None:
    array[at] ^= 1


class Between:
    """A hook on the thread that posts looks: it does something once, before the next look."""

    def __init__(self) -> None:
        self.once: Callable[[], object] | None = None
        self.on_loop = list[bool]()

    def __call__(self) -> None:
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        once, self.once = self.once, None
        if once is not None:
            once()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    hook, honest = Between(), Agent._post_look

    def post(self: Agent, *args: Any) -> TransferEnded | None:
        hook()
        return honest(self, *args)

    monkeypatch.setattr(Agent, "_post_look", post)
    return hook


@pytest.fixture(params=["cma", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.mark.parametrize("nixl", [LOOP, THREADS], ids=["loop", "threads"])
@pytest.mark.usefixtures("transport")
async def test_one_byte_that_changes_between_the_two_reads_is_found_in_any_memory(
    nixl: NixlConfig, between: Between
) -> None:
    async with Bench(True).pair(pull=LOOKS, nixl=nixl) as (prefill, decode, group):
        spots = [(0, 0), (1, -1), (1, 17 << 8)]
        block_bytes = 16 * 4 * 32 * 2
        for turn in range(4):
            if turn:
                layer, at = spots[turn - 1]
                between.once = partial(flip, prefill.arrays[layer].reshape(2, -1)[1], at % block_bytes)
            params, lent = prefill.lent(group, f"r{turn}", [0], written=True)
            pull = decode.engine.pull(f"d{turn}", [(0, [5])], params)
            if turn:
                with pytest.raises(
                    BytesDiffer,
                    match=r"of layer 'layers.[01]', tokens 0 to 15: our block has \w+, and the lent one \w+",
                ):
                    await pull
            else:
                await pull
                assert decode.blocks([5]) == prefill.blocks([0])
            await lent.wait_released()
        counters = decode.engine.statistics().counters
        assert counters["pulls.differs"] == 3
        assert set(between.on_loop) == {nixl is LOOP}
        assert decode.engine._driver.core.decode._places.num_in_use == 0


@pytest.mark.usefixtures("transport")
async def test_a_sample_of_a_large_read_is_compared(between: Between) -> None:
    pull = PullConfig(second_look=1.0, second_look_bytes=20_000)
    async with Bench(True).pair(pull=pull, nixl=LOOP) as (prefill, decode, group):
        ids = list(range(8))
        params, _ = prefill.lent(group, "r", ids, 121, written=True)
        await decode.engine.pull("d", [(0, ids)], params)
        assert decode.blocks(ids[:-1]) == prefill.blocks(ids[:-1])
        assert 10_000 < decode.engine.statistics().counters["bytes.looked_at"] < 30_000
        between.once = partial(flip, prefill.arrays[0], slice(None))
        params, _ = prefill.lent(group, "again", ids, 121, written=True)
        with pytest.raises(BytesDiffer):
            await decode.engine.pull("again", [(0, ids)], params)


@pytest.mark.slow
@pytest.mark.parametrize("is_tcp", [False, True], ids=["cma", "tcp"])
async def test_looks_find_a_byte_that_changes_in_memory_that_another_process_serves(
    is_tcp: bool, between: Between, request: pytest.FixtureRequest
) -> None:
    if is_tcp:
        request.getfixturevalue("over_tcp")
    prefill, decode = Real("prefill", 1), Real("decode", 9, pull=LOOKS)
    async with prefill.engine, decode.engine:
        group = PrefillRanks("prefill", [prefill.engine.endpoint], memory_epoch=prefill.engine.memory_epoch)
        for turn in range(2):
            params = group.make_params(f"r{turn}", [(0, [3, 4])], 32, written=True)
            prefill.engine.lend(params)
            pull = decode.engine.pull(f"d{turn}", [(0, [5, 6])], params)
            if turn:
                with pytest.raises(BytesDiffer):
                    await pull
                continue
            await pull
            assert decode.blocks([5, 6]) == prefill.blocks([3, 4])
            between.once = partial(flip, prefill.arrays[0].reshape(2, 64, -1), (1, 4, 0))


OWNER = """
import asyncio, json, sys
from asynckv import Engine, EngineConfig, PrefillRanks
from asynckv.config import NixlConfig
from tests.engines import memory

async def main():
    registration, arrays = memory(1)
    nixl = NixlConfig(posting_threads=0, process="never")
    async with Engine(EngineConfig(engine_id="prefill", nixl=nixl), registration) as engine:
        group = PrefillRanks("prefill", [engine.endpoint])
        for turn in range(2):
            params = group.make_params(f"r{turn}", [(0, [1, 2])], 28, written=True)
            engine.lend(params)
            print(json.dumps(params), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            arrays[1].reshape(2, -1)[1, 2 * 16 * 4 * 32 * 2] ^= 1
            print("changed", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("nixl", [LOOP, THREADS], ids=["loop", "threads"])
@pytest.mark.usefixtures("transport")
async def test_a_byte_that_another_process_changes_is_found(nixl: NixlConfig, between: Between) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(places.__file__).parents[3])}
    registration, _ = memory(100)
    config = EngineConfig(engine_id="decode", nixl=nixl, pull=LOOKS)
    with subprocess.Popen(  # noqa: ASYNC220 - once, before anything is awaited
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as owner:
        try:
            assert owner.stdin is not None
            assert owner.stdout is not None
            lines = iter(owner.stdout.readline, "")
            unchanged, changed = [json.loads(await anyio.to_thread.run_sync(next, lines)) for _ in range(2)]
            async with Engine(config, registration) as engine:
                await engine.pull("d0", [(0, [3, 4])], unchanged)

                def change() -> None:
                    assert owner.stdin is not None
                    owner.stdin.write("\n")
                    owner.stdin.flush()
                    assert next(lines) == "changed\n"

                between.once = change
                with pytest.raises(BytesDiffer, match=r"part 'v' of layer 'layers.1', tokens 16 to 27"):
                    await engine.pull("d1", [(0, [3, 4])], changed)
        finally:
            owner.kill()


# -- places ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def looking() -> AsyncIterator[Side]:
    side = Side("looking", 1)
    side.plane.close()
    side.plane = NixlPlane(THREADS, "looks", looks=True)
    side.agent = side.plane.begin(side.memories, side._poll)
    yield side
    side.plane.close()


async def test_no_remote_agent_reaches_a_place(sides: list[Side], looking: Side) -> None:
    reader = Side("reader", 2)
    sides.append(reader)
    agent = looking.plane._agent
    assert agent is not None
    assert agent._places is not None
    (place,) = agent._places.memories.values()
    looking.plane.watch(True)
    await reader.plane.add_remote_agent(looking.agent, [*looking.memories, place])
    for row, ending in ((1, Ending.DONE), (2, Ending.REFUSED)):
        found = table(row, [64], [[0, 0, 64]], [[row, 0, 64]])
        local, remote = pairs(found, 0)
        reader.news.clear()
        reader.read(row, "looks", found, local, remote)
        (ended,) = await reader.heard(1)
        assert ended.ending is ending


async def test_all_agents_of_a_plane_share_its_places(looking: Side) -> None:
    agents = [looking.plane._agent, *(poster.agent for poster in looking.plane._posters)]
    assert len(agents) == 2
    assert len({id(agent._places) for agent in agents if agent is not None}) == 1


async def test_places_that_cannot_be_had_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.zeros(4096, np.uint8)]
    plane = NixlPlane(LOOP, "no-room", looks=True)
    monkeypatch.setattr(places, "SIZE", 1 << 62)
    with pytest.raises(BackendError, match=r"\d+ bytes for second looks cannot be had: .*; set pull.second_look to 0"):
        plane.begin([Memory(a.ctypes.data, a.nbytes) for a in arrays], lambda: None)
    assert plane.statistics()["running"] == 0
    plane.close()


async def test_without_looks_a_plane_has_no_places() -> None:
    arrays = [np.zeros(4096, np.uint8)]
    plane = NixlPlane(LOOP, "plain")
    plane.begin([Memory(a.ctypes.data, a.nbytes) for a in arrays], lambda: None)
    assert plane._agent is not None
    assert plane._agent._places is None
    plane.close()


def test_a_place_is_compared_with_all_pieces_whether_they_touch_or_not() -> None:
    ours = np.random.default_rng(1).integers(0, 256, (2, 400), np.uint8)
    made = places.Places([Memory(each.ctypes.data, each.nbytes) for each in ours])
    pieces = [(0, 10, 30), (0, 40, 5), (1, 45, 7), (1, 300, 60), (1, 360, 40), (0, 0, 1)]
    rows = np.array([(memory, at, 0, 0, length, 0, 0) for memory, at, length in pieces])
    look = Look(None, rows, 143, place=3)  # type: ignore[arg-type]
    theirs = made._areas["cpu", 0][3 * PLACE_BYTES :]
    theirs[:143] = np.concatenate([ours[memory][at : at + length] for memory, at, length in pieces])
    assert made.compare(look) is None
    for number, (index, at, length) in enumerate(pieces):
        for byte in range(at, at + length):
            ours[index][byte] ^= 1
            found, mine = made.compare(look), int(ours[index][byte])
            assert found is not None
            assert (found.piece, found.here[0], found.there[0]) == (number, mine, mine ^ 1)
            ours[index][byte] ^= 1


# -- the comparison of tensors -----------------------------------------------------------------------------------


def test_tensors_are_compared_as_bytes_and_not_as_values() -> None:
    import torch

    numbers = torch.tensor([float("nan"), 0.0, 1.0, float("nan")])
    same, other = numbers.clone(), numbers.clone()
    other[1] = -0.0
    pieces = [(numbers.view(torch.uint8), each.view(torch.uint8)) for each in (same, other)]
    assert first_difference_of_tensors(pieces[:1]) is None
    found = first_difference_of_tensors(pieces)
    assert found == (1, bytes(numbers.view(torch.uint8)[7:].tolist()), b"\x80" + pieces[1][1].numpy()[8:].tobytes())


def test_the_first_byte_that_differs_is_found_in_its_piece_of_tensors() -> None:
    import torch

    pieces = [torch.arange(length).to(torch.uint8) for length in (1, 40, 3, 300)]
    theirs = [piece.clone() for piece in pieces]
    for piece, at in [(3, 299), (3, 0), (2, 2), (1, 20), (0, 0)]:
        theirs[piece][at] ^= 1
        found = first_difference_of_tensors(list(zip(pieces, theirs, strict=True)))
        assert found == (piece, *(bytes(each[piece][at : at + 16].tolist()) for each in (pieces, theirs)))
