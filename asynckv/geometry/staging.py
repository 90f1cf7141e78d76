"""Staged reads: long runs of remote bytes are read into staging memory, and their pieces are copied to their places.

Two memory orders may share only small pieces, and a descriptor costs more than a small piece. A staged table has one
row per *run* instead: bytes that are contiguous on the remote side, whatever the order here. A `Box` says where the
pieces of a run go. The data plane reads the runs into a slot of its own, places the pieces, and reports `DONE` then.

A run may contain bytes that this rank does not need, such as the heads of other ranks between two tokens. It never
leaves the remote part of one block. Which way is cheaper is arithmetic on measured costs (`ReadCosts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asynckv.geometry.strides import StridedDim, fold

MAX_PARTS = 64  # into which a piece that is longer than a slot is cut at most
MERGED = 4  # descriptors of one row that NIXL is taken to merge, if consecutive blocks touch; no ids are known yet
LEAST_PIECE = 64  # bytes; copying a smaller piece takes as long


class ReadCosts(NamedTuple):
    """The costs of reads on one data plane, in seconds, and the length of a slot of its staging memory."""

    descriptor_s: float  # per descriptor
    read_s: float  # per byte that is read
    place_s: float  # per byte that is copied from staging memory to its place
    slot_bytes: int  # most bytes of a run
    ask_s: float = 0.3e-9  # per byte of a packed copy, for the messages about it
    least_packed: int = 64 * 1024  # least bytes of a packed copy that is worth a round trip

    def packed(self, rows: int, dense: int, wanted: int, placed: int) -> float:
        """Return the seconds that a pair of blocks takes by a packed copy, which the owner makes as we would place."""
        return self.of(rows, dense, wanted, placed) + wanted * self.ask_s

    def of(self, rows: int, dense: int, read: int, placed: int = 0) -> float:
        """Return the seconds that a pair of blocks takes; `dense` of its rows touch those of the next pair."""
        descriptors = rows - dense + dense / MERGED
        return descriptors * self.descriptor_s + read * self.read_s + placed * self.place_s


SLOT_BYTES = 1 << 20  # of staging memory: smaller ones stay in a closer cache, but Python's lock is taken more often
TYPICAL = ReadCosts(2.2e-6, 0.25e-9, 0.25e-9, SLOT_BYTES)
"""Costs for tools that have no data plane: measured with UCX 1.20 over CMA on an Intel Xeon of 2.5 GHz."""
WITHIN = ReadCosts(0.12e-6, 0.05e-9, 0.45e-9, SLOT_BYTES)
"""Costs within a process, where descriptors are cheap: runs of 20 and more pieces of 256 bytes gain (measured so)."""


class Box(NamedTuple):
    """The pieces of a run: an array of byte ranges that lies in the run and in a local block, with strides for each."""

    piece: int  # bytes of a range, contiguous on both sides
    shape: tuple[int, ...]
    in_local: tuple[int, ...]  # byte strides
    in_run: tuple[int, ...]
    skip: int  # bytes of the run before its first piece

    @property
    def num_bytes(self) -> int:
        return self.piece * math.prod(self.shape)

    def in_local_order(self) -> Box | None:
        """Return the box with its pieces as they follow one another in the local block; None if there are gaps."""
        dims = sorted(zip(self.shape, self.in_local, self.in_run, strict=True), key=lambda dim: -dim[1])
        length = self.piece
        for size, step, _ in reversed(dims):
            if step != length:
                return None
            length *= size
        shape, in_local, in_run = [tuple([dim[i] for dim in dims]) for i in range(3)]
        return Box(self.piece, shape, in_local, in_run, self.skip)


class Run(NamedTuple):
    """A way to read a part in runs: `outer` are the dims that step from run to run."""

    box: Box
    length: int
    outer: tuple[StridedDim, ...]

    @property
    def number(self) -> int:
        return math.prod(d[0] for d in self.outer)

    @property
    def placed(self) -> int:
        """Bytes to place per run, where a small piece counts as `LEAST_PIECE`."""
        return max(self.box.piece, LEAST_PIECE) * math.prod(self.box.shape)


def runs(itemsize: int, dims: Sequence[StridedDim], around: tuple[int, int], most: int) -> Iterator[Run]:
    """Yield ways to read an array in runs, the shortest runs first.

    Args:
        dims: Dims as in `strides`; a is the local memory, b the remote one.
        around: Bytes of the remote part before and after a slice of its sharded dim, within each entry of the others.
        most: Most bytes of a run.
    """
    piece, rest = fold(itemsize, dims)
    rest.sort(key=lambda d: d[2])
    if piece > most:
        parts = next((n for n in range(2, MAX_PARTS + 1) if piece % n == 0 and piece // n <= most), 0)
        if parts:
            box = Box(piece // parts, (), (), (), 0)
            yield Run(box, box.piece, ((parts, box.piece, box.piece), *rest))
        return
    box, length = Box(piece, (), (), (), 0), piece
    yield Run(box, length, tuple(rest))
    for i, (size, in_local, in_remote) in enumerate(rest, 1):
        if in_remote < length:
            return  # this dim is meshed with the last one, so no longer run is contiguous
        if any(around) and in_remote - length == sum(around):
            # Whole periods are read, so that the runs of consecutive blocks may touch.
            box, length, around = box._replace(skip=around[0]), in_remote, (0, 0)
        length += (size - 1) * in_remote
        if length > most:
            return
        box = Box(piece, (size, *box.shape), (in_local, *box.in_local), (in_remote, *box.in_run), box.skip)
        yield Run(box, length, tuple(rest[i:]))
