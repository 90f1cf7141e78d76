"""Page faults of the process that copies: none of the first copies of an engine waits for fresh pages."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from asynckv import Engine, EngineConfig, PrefillRanks, shared_memory
from asynckv.geometry.layout import Layout, Memory
from asynckv.layout import register_memory
from asynckv.offload import Offload, OffloadConfig
from scripts.bench.versus.workload import minor_faults
from tests.test_staging import HND, NHD
from tests.world import make_layout

pytestmark = [pytest.mark.nixl, pytest.mark.anyio]

BLOCKS = 40
BLOCK_BYTES = 512 << 10  # 16 layers, keys and values of 16 KiB each
COUNT = (8 << 20) // BLOCK_BYTES
MOST_FAULTS = 300  # 8 MiB of fresh memory take 2,048


class Side:
    """An engine whose KV cache is as fresh as `shared_memory` gives it."""

    def __init__(self, engine_id: str, layout: Layout) -> None:
        self.arrays = [np.frombuffer(shared_memory(m.length), np.uint8) for m in layout.memories]
        memories = tuple(Memory(a.ctypes.data, a.nbytes) for a in self.arrays)
        registration = register_memory(msgspec.structs.replace(layout, memories=memories), tuple(self.arrays))
        self.engine = Engine(EngineConfig(engine_id=engine_id), registration)

    def blocks(self, ids: list[int], **shape: int) -> list[npt.NDArray[np.uint8]]:
        return [a.reshape(2, BLOCKS, *shape.values(), -1)[:, ids] for a in self.arrays]

    def fill(self, ids: list[int]) -> None:
        rng = np.random.default_rng(len(ids))
        for array in self.arrays:
            part = array.reshape(2, BLOCKS, -1)
            part[:, ids] = rng.integers(0, 256, part[:, ids].shape, np.uint8)


def layout(**more: Any) -> Layout:
    return make_layout(num_blocks=BLOCKS, block_size=16, layers=16, num_heads=8, head_dim=64, **more)


def is_same(ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.uint8], order: tuple[str, ...]) -> bool:
    if order == HND:
        ours = ours.reshape(2, -1, 8, 16, 128).swapaxes(2, 3)
    return np.array_equal(ours.ravel(), theirs.ravel())


@pytest.mark.slow
@pytest.mark.parametrize("order", [NHD, HND], ids=["direct", "staged"])
async def test_the_first_large_pull_waits_for_no_page(order: tuple[str, ...]) -> None:
    prefill, decode = Side("prefill", layout()), Side("decode", layout(order=order))
    theirs, mine = list(range(1, 1 + COUNT)), list(range(20, 20 + COUNT))
    prefill.fill([0, *theirs])
    async with prefill.engine, decode.engine:
        group = PrefillRanks("prefill", [prefill.engine.endpoint])
        for name, there, here in (("warm", [0], [0]), ("first", theirs, mine)):
            params = group.make_params(name, [(0, there)], 16 * len(there), written=True)
            prefill.engine.lend(params)
            before = minor_faults()
            result = await decode.engine.pull(name, [(0, here)], params)
            taken = minor_faults() - before
        assert result.num_bytes == COUNT * BLOCK_BYTES
        assert bool(decode.engine.statistics().counters["data.posts_staged"]) is (order == HND)
    assert taken < MOST_FAULTS
    assert all(is_same(a, b, order) for a, b in zip(decode.blocks(mine), prefill.blocks(theirs), strict=True))


@pytest.mark.slow
async def test_the_first_large_load_waits_for_no_page() -> None:
    side = Side("worker", layout())
    stored, loaded = list(range(1, 1 + COUNT)), list(range(20, 20 + COUNT))
    side.fill([0, *stored])
    offload = Offload(OffloadConfig(model="toy", hash_tokens=16, host_bytes=2 * COUNT * BLOCK_BYTES), side.engine)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(side.engine)
        await stack.enter_async_context(offload)
        for name, of, to in (("warm", [0], [19]), ("first", stored, loaded)):
            hashes = [f"{name}-{i}" for i in of]
            await offload.store(name, [(0, of)], hashes)
            before = minor_faults()
            await offload.load(f"{name}-again", [(0, to)], hashes, num_tokens=16 * len(of))
            taken = minor_faults() - before
    assert taken < MOST_FAULTS
    assert all(map(np.array_equal, side.blocks(loaded), side.blocks(stored)))
