"""An engine with an offload: on simulated planes and a manual clock, or on real NIXL and files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv import Engine, EngineConfig, Registration
from asynckv.geometry.check import decode_layout
from asynckv.geometry.layout import Group, Layout, Memory, View, dense_part
from asynckv.layout import register_memory
from asynckv.offload import Offload, OffloadConfig
from asynckv.testing import ManualClock, SimControl, SimData, SimNetwork
from asynckv.tiers.shelf import Shelf
from tests.engines import passing, until
from tests.lab.offload_audit import check as check_offload
from tests.lab.tiers import SimCopies, SimDisk, SimRecords
from tests.world import make_layout

BLOCKS = 32
SIZE = 16
"""Tokens per block, and per hash."""

RECORD = 4096
"""Bytes of one block in a tier: 2 layers, keys and values, 16 tokens, 4 heads of 8, of 2 bytes."""


def layout_of(tp_rank: int = 0, tp_size: int = 1, *, num_blocks: int = BLOCKS, **more: Any) -> Layout:
    """A small attention layout."""
    return make_layout(tp_rank, tp_size, num_blocks=num_blocks, **{"block_size": SIZE, "head_dim": 8} | more)


def hybrid(num_blocks: int = BLOCKS) -> Layout:
    """Three groups: attention over all tokens, a window, and states; each with pages of its own size."""
    groups = (
        Group("attention", SIZE, num_blocks),
        Group("window", SIZE, num_blocks, window=40),
        Group("state", 2 * SIZE, num_blocks, kind="state"),
    )
    views, memories = [], []
    for i, (width, tokens) in enumerate(((64, True), (32, True), (192, False))):
        dims = [("token", SIZE)] * tokens + [("dim", width)]
        part = dense_part("kv", "uint8", dims)
        stride = width * (SIZE if tokens else 1)
        views.append(View(i, i, f"layers.{i}", 0, stride, (part,)))
        memories.append(Memory((1 << 40) + (i << 30), stride * num_blocks))
    return Layout(groups=groups, views=tuple(views), memories=tuple(memories))


def chain(name: str, count: int) -> list[str]:
    """Hashes of a prompt."""
    return [f"{name}-{i}" for i in range(count)]


T = TypeVar("T")


def _left(disks: Sequence[SimDisk], config: OffloadConfig, own: Shelf, name: str) -> list[Shelf]:
    forms = [next(decode_layout(body) for body in disk.layouts.values()) for disk in disks]
    return [
        Shelf(
            f"left{i}",
            form,
            config,
            host_bytes=4 * RECORD,
            file_bytes=disk.num_bytes,
            records=SimRecords(disk),
            is_own=False,
        )
        for i, (form, disk) in enumerate(zip(forms, disks, strict=True))
    ]


class Rank:
    """An engine with its memory and its offload.

    Attributes:
        arrays: One per memory of the layout.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        seed: int = 1,
        real: bool = False,
        disk: SimDisk | None = None,
        network: SimNetwork | None = None,
        engine: dict[str, Any] | None = None,
        network_: EngineConfig | None = None,
        left: Sequence[SimDisk] = (),
        **config: Any,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.arrays: list[npt.NDArray[np.uint8]] = [rng.integers(0, 256, m.length, np.uint8) for m in layout.memories]
        memories = tuple(Memory(a.ctypes.data, a.nbytes) for a in self.arrays)
        self.layout = msgspec.structs.replace(layout, memories=memories)
        self.clock, self.network = ManualClock(), network or SimNetwork()
        registration = register_memory(self.layout, tuple(self.arrays))
        settings = EngineConfig(**{"engine_id": "worker"} | (engine or {}))
        wanted: dict[str, Any] = {
            "model": "toy",
            "hash_tokens": SIZE,
            "host_bytes": 16 * RECORD,
            "network": network_,
        } | config
        if real:
            self.engine = Engine(settings, registration)
            self.offload = Offload(OffloadConfig(**wanted), self.engine)
            return
        data = SimData(self.network, f"{settings.engine_id}-{seed}")
        self.engine = Engine(settings, registration, data=data, control=SimControl(self.network), clock=self.clock)
        self.copies = SimCopies()
        self._records = SimRecords(disk) if disk is not None else None
        if disk is not None:
            wanted |= {"directory": "simulated", "file_bytes": disk.num_bytes}
        self.offload = Offload(
            OffloadConfig(**wanted),
            self.engine,
            copies=self.copies,
            records=self._records,
            serve=self._serve,
            leftovers=partial(_left, left),
        )

    def _serve(self, config: EngineConfig, registration: Registration) -> Engine:
        data, control = SimData(self.network, config.engine_id), SimControl(self.network)
        return Engine(config, registration, data=data, control=control, clock=self.clock)

    @property
    def records(self) -> SimRecords:
        assert self._records is not None
        return self._records

    async def begun(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a store or a load, whose copies end when they are told to."""
        self.copies.deferred = True
        task = asyncio.create_task(call)
        await until(lambda: self.copies.moves)
        return task

    def block(self, *ids: int) -> bytes:
        """Return the bytes of blocks, layer by layer."""
        n = self.layout.groups[0].num_blocks
        return b"".join(a.reshape(2, n, -1)[:, [i]].tobytes() for i in ids for a in self.arrays)

    def fill(self, block: int, data: bytes) -> None:
        """Put into a block what `block` has said of one."""
        per, n = len(data) // len(self.arrays), self.layout.groups[0].num_blocks
        for at, array in enumerate(self.arrays):
            part = np.frombuffer(data[at * per : (at + 1) * per], np.uint8)
            array.reshape(2, n, -1)[:, block] = part.reshape(2, -1)

    def scribble(self, ids: Sequence[int], seed: int = 99) -> None:
        """Use blocks for something else."""
        rng, n = np.random.default_rng(seed), self.layout.groups[0].num_blocks
        for a in self.arrays:
            some = a.reshape(2, n, -1)
            some[:, list(ids)] = rng.integers(0, 256, some[:, list(ids)].shape, np.uint8)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Offload]:
        """Start both; afterwards all adds up, nothing is held, and both are closed."""
        async with self.engine:
            await self.offload.start()
            yield self.offload
            if not self.offload._mover.cause:
                check_offload(self.offload)
                self.engine.check_integrity()
            await passing(self, asyncio.create_task(self.engine.aclose()))
            assert not self.engine.holds()


@contextlib.asynccontextmanager
async def offloading(layout: Layout, **options: Any) -> AsyncIterator[tuple[Rank, Offload]]:
    """Run an engine with an offload."""
    rank = Rank(layout, **options)
    async with rank.running() as offload:
        yield rank, offload
