"""Measure stores to and loads from host memory and files: `python -m scripts.bench offload --help`.

Blocks of a model's layout are stored and loaded as in a rank: planned from lists of blocks and slots
(`asynckv.geometry.kept`), and moved by the copy plane, over NIXL. The time includes planning. Records go to files and
back through the file tier, with checksums and index.

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
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from asynckv.config import COPY_THREADS, MAX_COPY_THREADS
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.files.tier import FileTier
from asynckv.edges.nic.copies import NixlCopies
from asynckv.errors import AsyncKVError
from asynckv.geometry.kept import kept_tables, plan_copies
from asynckv.geometry.overlap import part_bytes
from asynckv.geometry.packed import placed, record_form, record_sizes
from asynckv.ports import CopyOp, CopyPlane, Record, RecordNews, RecordPlane, RecordsEnded, RecordsLost
from asynckv.tools.bench import garbage
from asynckv.tools.bench.noise import Interval, median_of
from asynckv.tools.output import consoles, print_table, write_json
from asynckv.tools.plan.layouts import ORDERS, model_layout, with_addresses
from asynckv.tools.plan.models import Heads, Model
from scripts import command

SCHEMA = 3
LEAST = 0.9  # least speed of a tier, as a share of raw speed

MAX_BYTES, MAX_DESCRIPTORS = 32 << 20, 4096
"""Most bytes of a transfer, as in `OffloadConfig`, and most descriptors, as in the engine."""

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
    np.random.default_rng(1).random(out=np.frombuffer(memory, np.float64))
    return np.frombuffer(memory, np.uint8)


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
        shape: Further arguments of `model_layout`.
    """

    def __init__(self, model: Model, *, blocks: int, **shape: Any) -> None:
        made = model_layout(model, num_blocks=FACTOR * blocks, **shape)
        self.blocks = blocks
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
        """Store or load the blocks of a request, as a rank does."""
        plane = self._plane
        assert plane is not None
        began = time.perf_counter()
        plan = plan_copies(self.tables, [(blocks, slots)])
        posts = plan.posts(MAX_BYTES, MAX_DESCRIPTORS)
        self.plan_s.append(time.perf_counter() - began)
        await self._waiter.end_of(lambda number: plane.post(number, op, "host", posts))

    def pieces(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> Pieces:
        """Return the pieces for memcpy: the descriptors of the plan, in its order."""
        near, far, sizes = [], [], []
        bases = np.array([memory.base for memory in self.device.memories])
        for post in plan_copies(self.tables, [(blocks, slots)]).posts(MAX_BYTES, MAX_DESCRIPTORS):
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
        self.num_descriptors = sum(post.num_descriptors for post in plan.posts(MAX_BYTES, MAX_DESCRIPTORS))
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


def measure(
    order: Annotated[str, typer.Option(help=f"Order of the engine's memory: {', '.join(ORDERS)}.")] = "nhd",
    blocks: Annotated[int, typer.Option(help="Blocks per request.", min=1, max=100_000)] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1, max=1000)] = 32,
    heads: Annotated[int, typer.Option(help="KV heads on this rank, of 128 elements of 2 bytes.", min=1, max=128)] = 8,
    block_size: Annotated[int, typer.Option(help="Tokens per block.", min=1, max=4096)] = 16,
    runs: Annotated[bool, typer.Option("--runs", help="Use contiguous blocks and slots, not scattered ones.")] = False,
    threads: Annotated[int, typer.Option(help="Threads that copy.", min=1, max=MAX_COPY_THREADS)] = COPY_THREADS,
    rounds: Annotated[int, typer.Option(help="Rounds of every way.", min=3, max=10_000)] = 31,
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for temporary files; by default the system's.")
    ] = "",
    host_only: Annotated[bool, typer.Option("--host-only", help="Measure without files.")] = False,
    page_cache: Annotated[
        bool, typer.Option("--page-cache", help="Use it for files; by default bypass it if possible.")
    ] = False,
    json: command.TableJson = None,
) -> int:
    """Measure how fast blocks are stored and loaded, compared with raw copies of the same bytes in the same rounds."""
    command.check(order in ORDERS, f"--order {order!r} is none of {', '.join(ORDERS)}")
    need = 3 * FACTOR * blocks * layers * heads * block_size * 512
    have = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    command.check(
        need < have,
        f"{blocks} blocks of {layers} layers need {need >> 20} MiB of memory, but {have >> 20} are free; use fewer",
    )
    command.check(
        not folder or os.access(folder, os.W_OK | os.X_OK), f"--folder {folder}: files cannot be created there"
    )
    console, progress = consoles(json)
    with contextlib.ExitStack() as stack:
        within = "" if host_only else stack.enter_context(tempfile.TemporaryDirectory("", "akv-", folder or None))
        with progress.status(f"{rounds} rounds of {blocks} blocks ..."):
            model = Model("bench", (Heads(heads, 128),) * layers)
            rig = Rig(model, blocks=blocks, block_size=block_size, order=order)
            garbage.settle()
            found = asyncio.run(measured(rig, rounds, threads, within, is_run=runs, is_direct=not page_cache))
        ways = figures(found, rig.num_bytes)
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "order": order,
            "blocks": blocks,
            "block_bytes": rig.record.num_bytes,
            "record_bytes": rig.record.stride,
            "runs": runs,
            "threads": threads,
            "page_cache": page_cache,
            "descriptors_per_block": round(rig.num_descriptors / blocks, 3),
            "tables_ms": round(rig.tables_s * 1e3, 3),
            "plan_us_per_block": round(float(np.median(rig.plan_s)) / blocks * 1e6, 3),
            "ways": ways,
        }
    write_json(json, report)
    show(ways, console)
    console.print(
        f"{blocks} blocks of {rig.record.num_bytes:,} bytes, {report['descriptors_per_block']:g} descriptors and "
        f"{report['plan_us_per_block']:g} us of planning per block; on a busy machine, CPU says more than time"
    )
    return 1 if any(met(each["of_raw"]) == "no" for each in ways.values()) else 0


EPILOG = f"""
[bold]Ways[/bold]

{command.listed(ABOUT)}

[bold]Examples[/bold]

  python -m scripts.bench offload --order cross-nhd --runs

  python -m scripts.bench offload --heads 1 --json - | jq .ways.store.of_raw

[bold]Exit status[/bold]  0 {LEAST:.0%} of raw or more (or uncertain), 1 less, 2 bad input, 130 Ctrl-C
"""
main = command.script(measure, EPILOG)
