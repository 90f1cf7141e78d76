"""How fast blocks go to host memory and come back, beside memcpy: `python -m scripts.bench_offload --help`.

Blocks of a model's layout are stored and loaded as a rank does it: planned from lists of blocks and slots
(`asynckv.geometry.kept`), and carried out by the copy plane, over NIXL. Planning is in the time.

Beside each, the same bytes are moved raw in the same round: by `memcpy`, of the same pieces in the same order, and of
whole records, as if the engine kept its blocks so. What Python's loop takes is measured with pieces of no bytes, and
taken off. Which comes first is drawn anew for every round, as are blocks and slots; so a ratio compares neighbours in
time, and one of CPU time serves where others use the machine. Medians are given with intervals that hold them in 95
of 100 cases (`asynckv.bench.noise`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import random
import sys
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from asynckv.bench import garbage
from asynckv.bench.noise import Interval, median_of
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.copies import NixlCopies
from asynckv.errors import AsyncKVError
from asynckv.geometry.kept import kept_tables, plan_copies
from asynckv.geometry.overlap import part_bytes
from asynckv.geometry.packed import packed, record_sizes
from asynckv.ports import CopyOp, CopyPlane
from asynckv.tools.layouts import ORDERS, model_layout, with_addresses
from asynckv.tools.models import Heads, Model
from scripts import command

SCHEMA = 1
LEAST = 0.9
"""What a tier is worth, of what is raw."""

MAX_DESCRIPTORS = 1 << 16
"""Of one transfer."""

PATIENCE_S = 120.0
FACTOR = 3
"""How many times as many blocks there are as one request has: so that the caches hold none of them."""

ABOUT = {
    "store": "blocks from the engine's memory to slots of the host pool",
    "load": "slots of the host pool to blocks",
}
Bytes = npt.NDArray[np.uint8]
Pieces = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Addresses to copy to, to copy from, and lengths."""
Round = tuple[float, float]
"""Seconds by the wall, and of CPU of all threads."""
Found = dict[str, list[Round]]
"""By who copied."""


def _memory(size: int) -> Bytes:
    """Bytes that begin at a page, with something in each page."""
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
    """What becomes of moves, as something to wait for."""

    def __init__(self) -> None:
        self.plane: CopyPlane | None = None
        self._ended: dict[int, TransferEnded] = {}
        self.event = asyncio.Event()

    async def end_of(self, number: int) -> None:
        """Wait for the end of a move.

        Raises:
            AsyncKVError: It has failed.
        """
        assert self.plane is not None
        with anyio.fail_after(PATIENCE_S):
            while number not in self._ended:
                await self.event.wait()
                self.event.clear()
                self._ended.update((ended.transfer_id, ended) for ended in self.plane.poll())
        if (ended := self._ended.pop(number)).ending is not Ending.DONE:
            raise AsyncKVError(f"a move has ended with {ended.ending}: {ended.cause}")


class Rig:
    """An engine's memory, a host pool, and what copies between them."""

    def __init__(self, order: str, layers: int, heads: int, block_size: int, blocks: int, max_bytes: int) -> None:
        model = Model("bench", (Heads(heads, 128),) * layers)
        made = model_layout(model, block_size=block_size, num_blocks=FACTOR * blocks, order=order)
        self.blocks, self.max_bytes, self.rng = blocks, max_bytes, np.random.default_rng(0)
        self.arrays = [_memory(memory.length) for memory in made.memories]
        device = with_addresses(made, [array.ctypes.data for array in self.arrays])
        [self.record] = record_sizes(packed(device, 1 << 50))
        self.pool = _memory(FACTOR * blocks * self.record.stride)
        self.flat = _memory(len(self.pool))
        """For whole records: as large as the pool, and laid out as it is."""
        kept = packed(device, len(self.pool), base=self.pool.ctypes.data)
        began = time.perf_counter()
        [tables] = kept_tables(device, [kept], itertools.count(1))
        self.tables_s = time.perf_counter() - began
        assert tables is not None
        self.tables, self.device, self.kept = tables, device, kept
        self.num_bytes = blocks * self.record.num_bytes
        self.plan_s: list[float] = []
        self.num_descriptors = 0
        self._waiter, self._ids = Waiter(), itertools.count(1)

    @contextlib.asynccontextmanager
    async def started(self, threads: int) -> AsyncIterator[None]:
        """Have a copy plane."""
        plane: CopyPlane = NixlCopies("bench-offload", threads=threads)
        self._waiter.plane = plane
        plane.start(self.device.memories, {"host": self.kept.memories}, self._waiter.event.set)
        try:
            yield
        finally:
            await plane.quiesce()
            plane.close()

    def draw(self, is_run: bool) -> tuple[list[int], list[int]]:
        """Blocks of a request and slots for them."""
        most = FACTOR * self.blocks
        if is_run:
            first, slot = (int(self.rng.integers(0, most - self.blocks)) for _ in range(2))
            return list(range(first, first + self.blocks)), list(range(slot, slot + self.blocks))
        blocks, slots = (self.rng.permutation(most)[: self.blocks].tolist() for _ in range(2))
        return blocks, slots

    async def move(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Store or load one request's blocks, as a rank does."""
        assert self._waiter.plane is not None
        number = TransferId(next(self._ids))
        began = time.perf_counter()
        plan = plan_copies(self.tables, [(blocks, slots)])
        posts = plan.posts(self.max_bytes, MAX_DESCRIPTORS)
        self.plan_s.append(time.perf_counter() - began)
        self._waiter.plane.post(number, op, "host", posts)
        await self._waiter.end_of(number)

    def pieces(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> Pieces:
        """What memcpy is to copy: the descriptors of the plan, in its order."""
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

    def records(self, op: CopyOp, blocks: Sequence[int], slots: Sequence[int]) -> Pieces:
        """What memcpy is to copy: whole records."""
        near, far = self.flat.ctypes.data, self.pool.ctypes.data
        sides = [near + b * self.record.stride for b in blocks], [far + s * self.record.stride for s in slots]
        to, of = reversed(sides) if op is CopyOp.WRITE else sides
        return to, of, [self.record.num_bytes] * len(blocks)

    async def check(self) -> None:
        """Store, load into other blocks, and look whether they hold the same.

        Raises:
            AsyncKVError: They do not.
        """
        blocks, slots = self.draw(False)
        others = [(block + 1) % (FACTOR * self.blocks) for block in blocks]
        before = self._digests(blocks)
        await self.move(CopyOp.WRITE, blocks, slots)
        await self.move(CopyOp.READ, others, slots)
        if self._digests(others) != before:
            raise AsyncKVError("what was loaded is not what was stored")
        plan = plan_copies(self.tables, [(blocks, slots)])
        self.num_descriptors = sum(post.num_descriptors for post in plan.posts(self.max_bytes, MAX_DESCRIPTORS))
        self.plan_s.clear()

    def _digests(self, blocks: Sequence[int]) -> list[int]:
        """A checksum per block, over all its parts; all layers have one shape."""
        sums = [0] * len(blocks)
        for view in self.device.views:
            for part in view.parts:
                size = part_bytes(part)
                for at, block in enumerate(blocks):
                    lo = view.offset + part.offset + block * view.stride
                    sums[at] = zlib.crc32(self.arrays[view.memory][lo : lo + size].data, sums[at])
        return sums


def _now() -> Round:
    return time.perf_counter(), time.process_time()


def _since(began: Round) -> Round:
    wall, cpu = _now()
    return wall - began[0], cpu - began[1]


def _memcpy(pieces: Pieces) -> Round:
    """Copy, and say what the copying took."""
    copy = ctypes.memmove
    began = _now()
    for to, of, size in zip(*pieces, strict=True):
        copy(to, of, size)
    wall, cpu = _since(began)
    began = _now()
    for to, of, _ in zip(*pieces, strict=True):
        copy(to, of, 0)
    loop = _since(began)
    return wall - loop[0], cpu - loop[1]


async def measured(rig: Rig, rounds: int, threads: int, is_run: bool) -> dict[str, Found]:
    """Copy in turns, per way."""
    found: dict[str, Found] = {way: {who: [] for who in ("ours", "pieces", "records")} for way in ABOUT}
    source = random.Random(1)
    async with rig.started(threads):
        await rig.check()
        for number in range(rounds + 1):
            for way, op in (("store", CopyOp.WRITE), ("load", CopyOp.READ)):
                lists = rig.draw(is_run)
                for who in source.sample(("ours", "pieces", "records"), 3):
                    if who == "ours":
                        began = _now()
                        await rig.move(op, *lists)
                        took = _since(began)
                    else:
                        took = _memcpy((rig.pieces if who == "pieces" else rig.records)(op, *lists))
                    if number:  # the first round warms up
                        found[way][who].append(took)
    return found


def _interval(found: Interval, digits: int = 3) -> dict[str, Any]:
    return {name: round(value, digits) for name, value in msgspec.to_builtins(found).items()}


def figures(found: Mapping[str, Found], num_bytes: int) -> dict[str, dict[str, Any]]:
    """GB/s of each, and how much of memcpy's ours is: within a round, for they are neighbours in time."""

    def speed(rounds: Sequence[Round]) -> dict[str, Any]:
        return _interval(median_of([num_bytes / wall / 1e9 for wall, _ in rounds]))

    def part(ours: Sequence[Round], raw: Sequence[Round], which: int) -> dict[str, Any]:
        return _interval(median_of([b[which] / a[which] for a, b in zip(ours, raw, strict=True)]))

    return {
        way: {
            "gb_per_s": speed(of["ours"]),
            "memcpy_gb_per_s": speed(of["pieces"]),
            "of_memcpy": part(of["ours"], of["pieces"], 0),
            "of_memcpy_by_cpu": part(of["ours"], of["pieces"], 1),
            "memcpy_of_records_gb_per_s": speed(of["records"]),
            "of_memcpy_of_records": part(of["ours"], of["records"], 0),
            "request_ms": _interval(median_of([wall * 1e3 for wall, _ in of["ours"]])),
        }
        for way, of in found.items()
    }


def _table(ways: Mapping[str, Any]) -> Table:
    table = Table("", "GB/s", "memcpy", "of it", f">= {LEAST:g}", "by CPU")
    for way, each in ways.items():
        part, cpu = each["of_memcpy"], each["of_memcpy_by_cpu"]
        table.add_row(
            way,
            f"{each['gb_per_s']['median']:.2f}",
            f"{each['memcpy_gb_per_s']['median']:.2f}",
            f"{part['median']:.2f} [dim]{part['low']:.2f} ... {part['high']:.2f}[/dim]",
            _met(part),
            f"{cpu['median']:.2f} [dim]{cpu['low']:.2f} ... {cpu['high']:.2f}[/dim]",
        )
    return table


def _met(part: Mapping[str, float]) -> str:
    """Whether a tier is fast enough, as far as that can be told."""
    return "yes" if part["low"] >= LEAST else "no" if part["high"] < LEAST else "maybe"


def measure(
    order: Annotated[str, typer.Option(help=f"How the engine's memory is laid out: {', '.join(ORDERS)}.")] = "nhd",
    blocks: Annotated[int, typer.Option(help="Per request.", min=1, max=100_000)] = 64,
    layers: Annotated[int, typer.Option(help="Of the model.", min=1, max=1000)] = 32,
    heads: Annotated[int, typer.Option(help="KV heads on this rank, of 128 elements of 2 bytes.", min=1, max=128)] = 8,
    block_size: Annotated[int, typer.Option(help="Tokens per block.", min=1, max=4096)] = 16,
    runs: Annotated[bool, typer.Option("--runs", help="Blocks and slots one after another, not scattered.")] = False,
    transfer_mib: Annotated[int, typer.Option(help="Of one transfer; what is urgent waits for its end.", min=1)] = 16,
    threads: Annotated[int, typer.Option(help="That copy.", min=1, max=16)] = 1,
    rounds: Annotated[int, typer.Option(help="Of everything.", min=3, max=10_000)] = 31,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Where the JSON goes; - is stdout, without the table.")
    ] = None,
) -> int:
    """Measure how fast blocks are stored and loaded, beside raw copies of as many bytes in the same rounds."""
    command.check(order in ORDERS, f"--order {order!r} is none of {', '.join(ORDERS)}")
    need = 3 * FACTOR * blocks * layers * heads * block_size * 512
    have = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    command.check(
        need < have,
        f"{blocks} blocks of {layers} layers take {need >> 20} MiB of memory, and {have >> 20} are free; use fewer",
    )
    with command.output(json_to or os.devnull) as out:
        with Console(stderr=True).status(f"{rounds} rounds of {blocks} blocks ..."):
            rig = Rig(order, layers, heads, block_size, blocks, transfer_mib << 20)
            garbage.settle()
            found = asyncio.run(measured(rig, rounds, threads, runs))
        ways = figures(found, rig.num_bytes)
        report = {
            "schema": SCHEMA,
            "order": order,
            "blocks": blocks,
            "block_bytes": rig.record.num_bytes,
            "record_bytes": rig.record.stride,
            "runs": runs,
            "threads": threads,
            "transfer_mib": transfer_mib,
            "descriptors_per_block": round(rig.num_descriptors / blocks, 3),
            "tables_ms": round(rig.tables_s * 1e3, 3),
            "plan_us_per_block": round(float(np.median(rig.plan_s)) / blocks * 1e6, 3),
            "ways": ways,
        }
        if json_to:
            json.dump(report, out, indent=2)
            out.write("\n")
    if json_to != "-":
        console = Console()
        console.print(_table(ways))
        console.print(
            f"{blocks} blocks of {rig.record.num_bytes:,} bytes, {report['descriptors_per_block']:g} descriptors and "
            f"{report['plan_us_per_block']:g} us of planning per block; CPU tells more than time where others compute"
        )
    return 1 if any(_met(each["of_memcpy"]) == "no" for each in ways.values()) else 0


EPILOG = f"""
[bold]Ways[/bold]

{command.listed(ABOUT)}

[bold]Examples[/bold]

  python -m scripts.bench_offload --order cross-nhd --runs

  python -m scripts.bench_offload --heads 1 --json - | jq .ways.store.of_memcpy

[bold]Exit status[/bold]  0 {LEAST:.0%} of memcpy or more, as far as can be told; 1 less, 2 bad input, 130 Ctrl-C
"""
main = command.script(measure, "bench_offload", EPILOG)


if __name__ == "__main__":
    sys.exit(main())
