"""Measure stores to and loads from host memory and files, with raw copies of the same bytes in the same rounds.

Blocks of a model's layout are stored and loaded as in a rank: planned from lists of blocks and slots
(`asynckv.geometry.kept`), and moved by the copy plane, over NIXL. The time includes planning. Records go to files and
back through the file tier, with checksums and index. The stored blocks of a prompt are looked up in a catalogue.

In the same round the same bytes are moved raw: by `memcpy`, the same pieces in the same order; by `pwrite` and `pread`,
the same records to a file in the same folder, past the page cache if the tier bypasses it. The time of Python's loop
around `memcpy` is measured with empty pieces, and subtracted. Order, blocks and slots are random in every round, so a
ratio compares neighbours in time. A ratio of CPU time is given too, for busy machines. Medians have 95 % intervals
(`asynckv.tools.bench.noise`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import mmap
import os
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.files.tier import FileTier
from asynckv.edges.nic.copies import NixlCopies
from asynckv.errors import AsyncKVError
from asynckv.geometry.kept import kept_tables, plan_copies
from asynckv.geometry.overlap import part_bytes
from asynckv.geometry.packed import placed, record_form, record_sizes
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.keys import StoredGroup
from asynckv.ports import CopyOp, CopyPlane, Record, RecordNews, RecordPlane, RecordsEnded, RecordsLost
from asynckv.tools.bench.noise import Interval, median_of
from asynckv.tools.output import print_table
from asynckv.tools.plan.layouts import model_layout, with_addresses
from asynckv.tools.plan.models import Model

LEAST = 0.9  # least speed of a tier, as a share of raw speed

MAX_BYTES = 32 << 20
"""Largest transfer, as in `OffloadConfig`."""

MAX_DESCRIPTORS = 4096
"""Most descriptors of a transfer, as in the engine."""

LOOKED_UP = 1000
"""Blocks of the prompt that is looked up."""

PATIENCE_S = 120.0
FACTOR = 3
"""All blocks per blocks of one request, so that CPU caches hold none of them."""

ABOUT = {
    "store": "blocks from the engine's memory to slots of the host pool; raw: memcpy of the same pieces",
    "load": "slots of the host pool to blocks; raw: memcpy of the same pieces",
    "write": "records from the host pool to files; raw: pwrite, one record after another",
    "read": "records from files to the host pool; raw: pread",
}
Bytes = npt.NDArray[np.uint8]
Pieces = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Addresses to copy to, to copy from, and lengths."""
Round = tuple[float, float]
"""Seconds by the wall, and of CPU of all threads."""
Found = dict[str, list[Round]]
"""Rounds by `ours` or `raw`."""


def _memory(size: int) -> Bytes:
    """Return bytes that begin at a page, with data in each page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    chunk = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    for at in range(0, size, len(chunk)):
        array[at : at + len(chunk)] = chunk[: size - at]
        array[at : at + 8] = np.frombuffer(at.to_bytes(8, "little"), np.uint8)[: size - at]
    return array


class Waiter:
    """Waits for the ends of moves."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._ended: dict[int, TransferEnded | RecordsEnded] = {}
        self._polls: list[Callable[[], Sequence[TransferEnded | RecordNews]]] = []
        self._event = asyncio.Event()

    def listen(self, poll: Callable[[], Sequence[TransferEnded | RecordNews]]) -> Callable[[], None]:
        """Poll a plane for news from now on, and return the function that it calls when it has news."""
        self._polls.append(poll)
        return self._event.set

    async def end_of(self, post: Callable[[TransferId], None]) -> None:
        """Post a move, and wait for its end.

        Raises:
            AsyncKVError: The move has failed.
        """
        number = TransferId(next(self._ids))
        post(number)
        with anyio.fail_after(PATIENCE_S):
            while number not in self._ended:
                await self._event.wait()
                self._event.clear()
                for poll in self._polls:
                    for news in poll():
                        if isinstance(news, RecordsLost):
                            raise AsyncKVError(f"the file tier was given up: {news.cause}")
                        self._ended[news[0]] = news
        if (ended := self._ended.pop(number)).ending is not Ending.DONE:
            raise AsyncKVError(f"a move has ended with {ended.ending}: {ended.cause}")


class Rig:
    """An engine's memory, a host pool, and the copy plane between them.

    Args:
        model: Model with layers of one kind.
        blocks: Blocks per request.
        max_bytes: Largest transfer.
        at_once: Requests in flight together, which share the blocks.
        shape: Further arguments of `model_layout`.
    """

    def __init__(
        self, model: Model, *, blocks: int, max_bytes: int = MAX_BYTES, at_once: int = 1, **shape: Any
    ) -> None:
        made = model_layout(model, num_blocks=FACTOR * blocks, **shape)
        self.blocks, self.max_bytes, self.at_once = blocks, max_bytes, at_once
        self.rng = np.random.default_rng(0)
        self.arrays = [_memory(memory.length) for memory in made.memories]
        device = with_addresses(made, [array.ctypes.data for array in self.arrays])
        [self.record] = record_sizes(record_form(device))
        self.pool = _memory(FACTOR * blocks * self.record.stride)
        kept = placed(record_form(device), self.pool.ctypes.data, len(self.pool))
        began = time.perf_counter()
        [tables] = kept_tables(device, [kept], itertools.count(1))
        self.tables_s = time.perf_counter() - began
        assert tables is not None
        self.tables, self.device, self.kept = tables, device, kept
        self.num_bytes = blocks * self.record.num_bytes
        self.plan_s: list[float] = []
        self.num_descriptors = 0
        self._waiter = Waiter()
        self._plane: CopyPlane | None = None

    @contextlib.asynccontextmanager
    async def started(self, threads: int) -> AsyncIterator[Waiter]:
        """Start a copy plane."""
        self._plane = plane = NixlCopies("bench-offload", threads=threads)
        ready = self._waiter.listen(plane.poll)
        plane.start(self.device.memories, {"host": self.kept.memories}, ready)
        try:
            yield self._waiter
        finally:
            await plane.quiesce()
            plane.close()

    def draw(self, is_run: bool) -> tuple[list[int], list[int]]:
        """Return blocks of a request and slots for them."""
        most = FACTOR * self.blocks
        if is_run:
            first, slot = (int(self.rng.integers(0, most - self.blocks)) for _ in range(2))
            return list(range(first, first + self.blocks)), list(range(slot, slot + self.blocks))
        blocks, slots = (self.rng.permutation(most)[: self.blocks].tolist() for _ in range(2))
        return blocks, slots

    async def move(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Store or load the blocks of `at_once` requests, as a rank does."""
        lists = [(blocks[at :: self.at_once], slots[at :: self.at_once]) for at in range(self.at_once)]
        if self.at_once == 1:
            await self._move(op, *lists[0])
        else:
            await asyncio.gather(*(self._move(op, *each) for each in lists))

    async def _move(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> None:
        plane = self._plane
        assert plane is not None
        began = time.perf_counter()
        plan = plan_copies(self.tables, [(blocks, slots)])
        posts = plan.posts(self.max_bytes, MAX_DESCRIPTORS)
        self.plan_s.append(time.perf_counter() - began)
        await self._waiter.end_of(lambda number: plane.post(number, op, "host", posts))

    def pieces(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> Pieces:
        """Return the pieces for memcpy: the descriptors of the plan, in its order."""
        near, far, sizes = [], [], []
        bases = np.array([memory.base for memory in self.device.memories])
        for post in plan_copies(self.tables, [(blocks, slots)]).posts(self.max_bytes, MAX_DESCRIPTORS):
            table = post.table
            row, at = np.divmod(post.local.astype(np.int64), table.local_blocks)
            near.append(bases[table.local[row, 0]] + table.local[row, 1] + at * table.local[row, 2])
            row, at = np.divmod(post.remote.astype(np.int64), table.remote_blocks)
            far.append(self.pool.ctypes.data + table.remote[row, 1] + at * table.remote[row, 2])
            sizes.append(table.length[row])
        to, of = (far, near) if op is CopyOp.WRITE else (near, far)
        return np.concatenate(to).tolist(), np.concatenate(of).tolist(), np.concatenate(sizes).tolist()

    async def check(self, is_run: bool) -> None:
        """Store, load into other blocks, and compare.

        Raises:
            AsyncKVError: The contents differ.
        """
        blocks, slots = self.draw(is_run)
        others = [(block + 1) % (FACTOR * self.blocks) for block in blocks]
        before = self._digests(blocks)
        await self.move(CopyOp.WRITE, blocks, slots)
        await self.move(CopyOp.READ, others, slots)
        if self._digests(others) != before:
            raise AsyncKVError("the loaded bytes differ from the stored ones")
        plan = plan_copies(self.tables, [(blocks, slots)])
        self.num_descriptors = sum(post.num_descriptors for post in plan.posts(self.max_bytes, MAX_DESCRIPTORS))
        self.plan_s.clear()

    def _digests(self, blocks: Sequence[int]) -> list[int]:
        """Return a checksum per block over all its parts; all layers have one shape."""
        sums = [0] * len(blocks)
        for view in self.device.views:
            for part in view.parts:
                size = part_bytes(part)
                for at, block in enumerate(blocks):
                    lo = view.offset + part.offset + block * view.stride
                    sums[at] = zlib.crc32(self.arrays[view.memory][lo : lo + size].data, sums[at])
        return sums


class Files:
    """A file tier for records of the host pool, and a plain file of the same size."""

    def __init__(self, rig: Rig, folder: str, tier: RecordPlane, waiter: Waiter, is_direct: bool) -> None:
        self._waiter, self._tier, self._stride = waiter, tier, rig.record.stride
        self._pool = rig.pool.data
        self._fd = os.open(f"{folder}/plain", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, len(rig.pool))

    async def move(self, op: CopyOp, slots: Sequence[int], places: Sequence[int]) -> None:
        """Write or read records, as a rank does; a record's key is its place."""
        records = [
            Record(place.to_bytes(8, "little"), slot * self._stride, place * self._stride, self._stride)
            for slot, place in zip(slots, places, strict=True)
        ]
        await self._waiter.end_of(lambda number: self._tier.post(number, op, records))

    def raw(self, op: CopyOp, slots: Sequence[int], places: Sequence[int]) -> Round:
        """Write or read the same records by system calls, one after another."""
        stride, began = self._stride, _now()
        for slot, place in zip(slots, places, strict=True):
            part = self._pool[slot * stride : (slot + 1) * stride]
            done = (os.pwritev if op is CopyOp.WRITE else os.preadv)(self._fd, [part], place * stride)
            if done != stride:
                raise AsyncKVError(f"{done} of {stride} bytes were moved by a system call")
        return _since(began)

    def close(self) -> None:
        """Close the plain file."""
        os.close(self._fd)


@contextlib.asynccontextmanager
async def _files(rig: Rig, folder: str, waiter: Waiter, is_direct: bool) -> AsyncIterator[Files]:
    tier = FileTier(f"{folder}/tier", len(rig.pool), name="bench-offload", direct=is_direct)
    tier.start(rig.kept.memories[0], waiter.listen(tier.poll))
    try:
        files = Files(rig, folder, tier, waiter, tier.describe()["page_cache"] == "bypassed")
        try:
            yield files
        finally:
            files.close()
    finally:
        await tier.quiesce()
        tier.close()


def _now() -> Round:
    return time.perf_counter(), time.process_time()


def _since(began: Round) -> Round:
    wall, cpu = _now()
    return wall - began[0], cpu - began[1]


def _memcpy(pieces: Pieces) -> Round:
    """Copy, and return the time of the copying."""
    copy = ctypes.memmove
    began = _now()
    for to, of, size in zip(*pieces, strict=True):
        copy(to, of, size)
    wall, cpu = _since(began)
    began = _now()
    for to, of, _ in zip(*pieces, strict=True):
        copy(to, of, 0)
    loop = _since(began)
    # Other load may make the loop look longer than it is.
    return max(wall - loop[0], wall / 2), max(cpu - loop[1], cpu / 2)


async def measured(
    rig: Rig, rounds: int, threads: int, folder: str, *, is_run: bool, is_direct: bool
) -> dict[str, Found]:
    """Copy in turns for each way; with files only if there is a folder."""
    found: dict[str, Found] = {way: {} for way in (ABOUT if folder else ("store", "load"))}
    source = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        waiter = await stack.enter_async_context(rig.started(threads))
        files = await stack.enter_async_context(_files(rig, folder, waiter, is_direct)) if folder else None
        await rig.check(is_run)
        for number in range(rounds + 1):
            lists = rig.draw(is_run)
            for way, of in found.items():
                op = CopyOp.WRITE if way in ("store", "write") else CopyOp.READ
                for mover_name in source.sample(("ours", "raw"), 2):
                    if mover_name == "ours":
                        mover = rig if way in ("store", "load") else files
                        assert mover is not None
                        began = _now()
                        await mover.move(op, *lists)
                        took = _since(began)
                    elif files is not None and way in ("write", "read"):
                        took = files.raw(op, *lists)
                    else:
                        took = _memcpy(rig.pieces(op, *lists))
                    if number:  # the first round warms up
                        of.setdefault(mover_name, []).append(took)
    return found


def lookup_us(keys: int) -> Interval:
    """Return the microseconds of a catalogue look-up for a prompt of `keys` blocks that are all stored."""
    hashes = [number.to_bytes(32, "little") for number in range(keys)]
    catalogue = Catalogue([StoredGroup(name="bench", block_size=16, record_bytes=4096)], 16, 2 * keys * 4096)
    catalogue.store("stored", hashes)
    while moves := catalogue.moves(0.0):
        for move in moves:
            catalogue.ended(move.move_id, Ending.DONE)
    took = []
    for _ in range(101):
        began = time.perf_counter()
        found = catalogue.lookup(hashes)
        took.append((time.perf_counter() - began) * 1e6)
        if found.ready_tokens != 16 * keys:
            raise AsyncKVError(f"{found.ready_tokens} of {16 * keys} tokens were found")
    return median_of(took)


def interval(found: Interval, digits: int = 3) -> dict[str, Any]:
    """Round a figure."""
    return {name: round(value, digits) for name, value in msgspec.to_builtins(found).items()}


def figures(found: Mapping[str, Found], num_bytes: int) -> dict[str, dict[str, Any]]:
    """Return GB/s of both, and their ratio within each round, because these are neighbours in time."""

    def speed(rounds: Sequence[Round]) -> dict[str, Any]:
        return interval(median_of([num_bytes / wall / 1e9 for wall, _ in rounds]))

    def part(ours: Sequence[Round], raw: Sequence[Round], which: int) -> dict[str, Any]:
        return interval(median_of([b[which] / max(a[which], 1e-9) for a, b in zip(ours, raw, strict=True)]))

    out: dict[str, dict[str, Any]] = {}
    for way, of in found.items():
        out[way] = {
            "gb_per_s": speed(of["ours"]),
            "raw_gb_per_s": speed(of["raw"]),
            "of_raw": part(of["ours"], of["raw"], 0),
            "of_raw_by_cpu": part(of["ours"], of["raw"], 1),
            "request_ms": interval(median_of([wall * 1e3 for wall, _ in of["ours"]])),
        }
    return out


def show(ways: Mapping[str, Any], console: Console) -> None:
    """Print figures."""
    heads = ("copies", "GB/s", "raw GB/s", "of raw", "between", f">= {LEAST:g}", "by CPU")
    rows = []
    for way, each in ways.items():
        part = each["of_raw"]
        row = (
            way,
            f"{each['gb_per_s']['median']:.2f}",
            f"{each['raw_gb_per_s']['median']:.2f}",
            f"{part['median']:.2f}",
            f"{part['low']:.2f}-{part['high']:.2f}",
            met(part),
            f"{each['of_raw_by_cpu']['median']:.2f}",
        )
        rows.append(row)
    print_table(console, heads, rows)


def met(part: Mapping[str, float]) -> str:
    """Return whether a tier is fast enough, or 'maybe' if the interval contains the limit."""
    return "yes" if part["low"] >= LEAST else "no" if part["high"] < LEAST else "maybe"
