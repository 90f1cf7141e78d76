"""The plan of all that one request reads of one remote rank, cut into the read requests that are posted.

A plan has, per span of tokens, pairs of kernel blocks (`pairing`) and a table of descriptors (`tables`): each pair with
each row of the table is one descriptor. Both stay small, however long the prompt is; only the next posts are expanded.
NIXL merges consecutive indices if their bytes touch on both sides. So rows follow one another, blocks ascend within a
row, and a plan is cut between rows where possible. The rows of one read of a staged table have one length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.geometry.bounds import Int32s, Int64s
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.strides import joined, step_along
from asynckv.geometry.tables import DescTable, PeerTables


class ReadRequest(NamedTuple):
    table: DescTable
    local: Int32s
    remote: Int32s
    num_bytes: int
    num_descriptors: int  # after NIXL's merging
    slot: int = -1  # slot of the owner's with a packed copy of what this staged read wants, if there is one

    @property
    def is_staged(self) -> bool:
        return self.slot < 0 and self.table.boxes != ()

    @property
    def rows(self) -> tuple[int, int]:
        """Return its first row, and the number of its rows: each is read for the same blocks."""
        first, last = int(self.local[0]) // self.table.local_blocks, int(self.local[-1]) // self.table.local_blocks
        return first, last - first + 1

    def chunks(self, most: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut a read of rows of one length into chunks of at most `most` bytes each, or of one descriptor.

        A chunk is several whole rows, or some blocks of one: its first row and their number, its first descriptor and
        the one after its last.
        """
        first, count = self.rows
        blocks = len(self.local) // count
        number = most // int(self.table.length[first])
        rows = number // blocks or 1
        step = number // blocks * blocks or number or 1
        for row in range(0, count, rows):
            end = min(row + rows, count) * blocks
            for start in range(row * blocks, end, step):
                yield first + row, min(rows, count - row), start, min(start + step, end)

    def pieces(self) -> Int64s:
        """Return the pieces of a staged read, `[local memory, offset, remote memory, offset, length]` each, for a plane
        that has to read them directly.
        """
        table, (first, count) = self.table, self.rows
        ids, theirs = (x[: len(x) // count, None].astype(np.int64) for x in (self.local, self.remote))
        ids, theirs = ids - first * table.local_blocks, theirs - first * table.remote_blocks
        out = []
        for row in range(first, first + count):
            box = table.box(row)
            in_local, in_run = step_along(tuple(zip(box.shape, box.in_local, box.in_run, strict=True)))
            (memory, start, stride), (other, begin, step) = table.local[row].tolist(), table.remote[row].tolist()
            pieces = np.empty((len(ids), len(in_local), 5), np.int64)
            pieces[..., 0], pieces[..., 1] = memory, start + ids * stride + in_local
            pieces[..., 2], pieces[..., 3] = other, begin + theirs * step + box.skip + in_run
            pieces[..., 4] = box.piece
            out.append(pieces.reshape(-1, 5))
        return np.concatenate(out)

    def places(self) -> Int64s:
        """Return the places of a packed copy's ranges in our memory, `[memory, offset, length]` each, in its order."""
        table, (first, count) = self.table, self.rows
        ids = self.local[: len(self.local) // count].astype(np.int64) - first * table.local_blocks
        ours, length = table.local[first : first + count], table.row_bytes[first : first + count]
        out = np.empty((count, len(ids), 3), np.int64)
        out[..., 0], out[..., 2] = ours[:, :1], length[:, None]
        out[..., 1] = ours[:, 1:2] + ids * ours[:, 2:3]
        return joined(out.reshape(-1, 3))


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    table: DescTable
    local: Int32s
    remote: Int32s

    def breaks(self) -> npt.NDArray[np.bool_]:
        """Return, per pair `i`, True if a descriptor ends there: the ids of pair `i + 1` do not both follow its ids.

        Staged reads follow one another in staging memory, so only the remote ids count; in packed copies the local ids.
        """
        a, b = (self.local, self.local) if self.table.pack_bytes else (self.local, self.remote)
        found: npt.NDArray[np.bool_] = b[1:] - b[:-1] != 1
        return found if self.table.boxes else np.logical_or(found, a[1:] - a[:-1] != 1)

    def num_merged(self) -> tuple[int, int]:
        """Return the number of runs in which both ids step by one, and of descriptors after NIXL's merging."""
        table, blocks = self.table, len(self.local)
        # `np.count_nonzero` is two Python calls, which are slow for a few blocks.
        runs = 1 + int(np.add.reduce(self.breaks(), dtype=np.int64)) if blocks > 1 else blocks
        return runs, runs * table.num_dense + blocks * (table.num_rows - table.num_dense)


class Plan:
    """All reads of one pull from one remote rank: the bytes that it needs, and the descriptors before merging."""

    __slots__ = ("is_staged", "num_bytes", "num_descriptors", "sections")

    def __init__(self, sections: tuple[Section, ...]) -> None:
        self.sections = sections
        self.num_bytes = 0
        self.num_descriptors = 0
        self.is_staged = False
        for section in sections:
            blocks = len(section.local)
            self.num_bytes += section.table.placed_bytes * blocks
            self.num_descriptors += section.table.num_rows * blocks
            self.is_staged = self.is_staged or section.table.boxes != ()

    def posts(self, max_bytes: int, max_descriptors: int) -> Iterator[ReadRequest]:
        """Cut the plan into transfers, lazily: nothing is expanded before it is asked for.

        A post holds at least one descriptor. Only a post of a single descriptor may exceed `max_bytes`.
        """
        if self.num_bytes <= max_bytes and self.num_descriptors <= max_descriptors and not self.is_staged:
            # In a small plan each section is one transfer, and all are expanded at once to save the generators.
            small = []
            for section in self.sections:
                table, local, remote = section.table, section.local, section.remote
                blocks = len(local)
                merged = table.num_rows if blocks == 1 else section.num_merged()[1]
                if table.num_rows > 1:
                    local = (table.local_index + local).ravel()
                    remote = (table.remote_index + remote).ravel()
                small.append(ReadRequest(table, local, remote, table.block_bytes * blocks, merged))
            return iter(small)
        return (_expand(part) for s in self.sections for part in _split(s, max_bytes, max_descriptors))

    def count_posts(self, max_bytes: int, max_descriptors: int) -> tuple[int, int]:
        """Return the number of transfers that `posts` would yield, and of their descriptors, without expanding any."""
        counts = [part.num_descriptors for s in self.sections for part in _split(s, max_bytes, max_descriptors)]
        return len(counts), sum(counts)


def plan_read(tables: PeerTables, lists: BlockLists) -> Plan:
    """Plan the reads of one request from one remote rank; raise `RemoteTooShort` if the prefill side offers less."""
    sections = []
    for pair in tables.group_pairs:
        for span, local, remote in lists.pairs(tables, pair):
            table = tables.table(span)
            if table.pack_bytes and pair.units[0] > 1:
                # Units of one block of ours touch, but the blocks that they are packed of do not follow one another.
                order = local.argsort(kind="stable")
                local, remote = local[order], remote[order]
            sections.append(Section(table, local, remote))
    return Plan(tuple(sections))


class _Part(NamedTuple):
    section: Section
    row: int
    end: int
    lo: int
    hi: int
    num_bytes: int
    num_descriptors: int  # after NIXL's merging


def _split(section: Section, max_bytes: int, max_descriptors: int) -> Iterator[_Part]:
    """Cut a section so that every part is within bounds: between rows, and within a row that is too large by itself."""
    table, blocks = section.table, len(section.local)
    runs, num_descriptors = section.num_merged()
    dense, length = table.dense, table.length
    is_even = not table.boxes or bool(length[0] == length[-1])
    num_bytes = table.block_bytes * blocks
    if table.pack_bytes:
        length, num_bytes, max_bytes = table.row_bytes, table.placed_bytes * blocks, min(max_bytes, table.pack_bytes)
    if num_bytes <= max_bytes and num_descriptors <= max_descriptors and is_even:
        yield _Part(section, 0, table.num_rows, 0, blocks, num_bytes, num_descriptors)
        return
    if table.pack_bytes and is_even:
        # A packed copy costs messages. If rows are cut, each leaves a short copy at its end, which blocks of all rows
        # together do not.
        step = min(max_bytes // table.placed_bytes, max_descriptors // table.num_rows)
        together = max_bytes // int(length[0] * blocks)
        each = -(-table.num_rows // together) if together else table.num_rows * -(-blocks * int(length[0]) // max_bytes)
        if step and -(-blocks // step) < each:
            for lo in range(0, blocks, step):
                part = Section(table, section.local[lo : lo + step], section.remote[lo : lo + step])
                yield next(_split(part, max_bytes, max_descriptors))
            return
    per_row = np.where(dense, runs, blocks)
    # Consecutive rows go together while their whole block lists fit; a row that is too large by itself is split.
    size, descs = (np.concatenate(([0], np.cumsum(x))) for x in (length * blocks, per_row))
    ends: Int64s | None = None  # ends of runs
    row = 0
    while row < table.num_rows:
        # `bisect_right`, because numpy's search takes as long for a few rows as for many.
        end = min(bisect_right(size, size[row] + max_bytes), bisect_right(descs, descs[row] + max_descriptors)) - 1
        if not is_even:
            end = min(end, int(np.searchsorted(table.length, table.length[row], side="right")))
        if end > row:
            yield _Part(section, row, end, 0, blocks, int(size[end] - size[row]), int(descs[end] - descs[row]))
            row = end
            continue
        one, lo = int(length[row]), 0
        while lo < blocks:
            hi = min(lo + max(1, max_bytes // one), blocks)
            if dense[row]:
                if ends is None:
                    ends = np.flatnonzero(section.breaks()) + 1
                ended = int(np.searchsorted(ends, lo, side="right"))
                if ended + max_descriptors <= len(ends):
                    hi = min(hi, int(ends[ended + max_descriptors - 1]))
                num_descriptors = 1 + int(np.searchsorted(ends, hi)) - ended
            else:
                hi = min(hi, lo + max_descriptors)
                num_descriptors = hi - lo
            yield _Part(section, row, row + 1, lo, hi, one * (hi - lo), num_descriptors)
            lo = hi
        row += 1


def _expand(part: _Part) -> ReadRequest:
    section = part.section
    table, local, remote = section.table, section.local[part.lo : part.hi], section.remote[part.lo : part.hi]
    if part.end > 1:  # the indices of the first row are the blocks themselves
        local = (table.local_index[part.row : part.end] + local).ravel()
        remote = (table.remote_index[part.row : part.end] + remote).ravel()
    return ReadRequest(table, local, remote, part.num_bytes, part.num_descriptors)
