"""From two layouts and two block lists to the pieces that must be read.

Two steps, because most of the work depends on the peer only:

1. `PeerMap`, once per peer: match views and parts by name, intersect what the two ranks hold, and cut
   each kernel block into pieces that are contiguous on both sides (`PieceTable`, one row per piece).
2. `plan_read`, once per request: pair the two block lists by the *tokens* they cover. A block pair
   times a table's rows are the descriptors; they are indices (int32), expanded only when posted.

A *cut* is how a stretch of tokens lies in its two kernel blocks: `(offset here, offset there, tokens)`.
Equal block sizes on aligned boundaries know a single cut, the whole block. Others get a table of their
own the first time they occur.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.core.layout import MAX_DESCRIPTORS, TOKEN, Layout, Part, View, strided_pieces
from asynckv.core.types import BlockRuns
from asynckv.errors import LayoutError, PlanRefused, RemoteTooShort

__all__ = ["Cut", "Difference", "Padding", "PeerMap", "PieceTable", "Plan", "Post", "compare", "plan_read"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

MAX_CUTS = 1024
"""Most tables kept per peer; the least recently used go first."""

WARN_PIECES = 64


class Difference(NamedTuple):
    """One field in which two layouts differ so that nothing can be planned."""

    field: str
    local: object
    remote: object

    def __str__(self) -> str:
        return f"{self.field}: local {self.local}, remote {self.remote}"


class Cut(NamedTuple):
    """A stretch of tokens inside one local and one remote kernel block of a group."""

    group: int
    local_offset: int
    remote_offset: int
    tokens: int


class Padding(NamedTuple):
    """Tokens of a local block that the pull did not fill, for the engine to zero or ignore."""

    group: int
    block_id: int
    first_token: int
    """Position inside the block."""
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The contiguous pieces of one cut, on both sides; row `i` of block `b` is one descriptor.

    Descriptor index = `first[i] + b`, where `first` is the running sum of the rows' block counts.

    Attributes:
        table_id: Unique within the peer map.
        length: Bytes per piece, int64 `[rows]`.
        local, remote: int64 `[rows, 3]`: index of the memory, byte offset of block 0 in it, stride.
        local_blocks, remote_blocks: Kernel blocks that every row can index.
    """

    table_id: int
    cut: Cut
    length: Int64s
    local: Int64s
    remote: Int64s
    local_blocks: int
    remote_blocks: int

    @property
    def num_rows(self) -> int:
        """Pieces per kernel block pair."""
        return len(self.length)

    @property
    def block_bytes(self) -> int:
        """Bytes per kernel block pair."""
        return int(self.length.sum())

    @property
    def dense(self) -> npt.NDArray[np.bool_]:
        """Rows in which consecutive blocks touch on both sides, so that NIXL merges them."""
        mine: npt.NDArray[np.bool_] = self.local[:, 2] == self.length
        theirs: npt.NDArray[np.bool_] = self.remote[:, 2] == self.length
        return np.logical_and(mine, theirs)


class Post(NamedTuple):
    """One transfer to post: equally long index arrays into one table, and what it amounts to."""

    table_id: int
    local: Int32s
    remote: Int32s
    num_bytes: int
    num_descriptors: int
    """After NIXL's merging."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Block pairs that share a cut, sorted by remote block."""

    table: PieceTable
    local: Int32s
    remote: Int32s

    @property
    def num_runs(self) -> int:
        """Stretches in which both ids step by one."""
        if not len(self.local):
            return 0
        return 1 + int(((np.diff(self.local) != 1) | (np.diff(self.remote) != 1)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one pull reads from one remote rank."""

    sections: tuple[Section, ...]
    padding: tuple[Padding, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that will land."""
        return sum(s.table.block_bytes * len(s.local) for s in self.sections)

    @property
    def num_descriptors(self) -> int:
        """Descriptors before merging."""
        return sum(s.table.num_rows * len(s.local) for s in self.sections)

    def posts(self, max_bytes: int, max_descriptors: int) -> Iterator[Post]:
        """Cut the plan into transfers, lazily: nothing is expanded before it is asked for.

        Every post holds at least one descriptor, whatever the bounds. Rows come in order and blocks
        within a row ascend, so that neighbours stay neighbours.
        """
        for section in self.sections:
            yield from _section_posts(section, max_bytes, max_descriptors)


def _section_posts(section: Section, max_bytes: int, max_descriptors: int) -> Iterator[Post]:
    table, blocks = section.table, len(section.local)
    runs, dense, length = section.num_runs, table.dense, table.length
    per_row = np.where(dense, runs, blocks)
    # Consecutive rows go together while their whole block lists fit; a row too large alone is split.
    row = 0
    while row < table.num_rows:
        size = np.cumsum(length[row:] * blocks)
        descs = np.cumsum(per_row[row:])
        fit = int(np.count_nonzero((size <= max_bytes) & (descs <= max_descriptors)))
        if fit:
            yield _expand(section, row, row + fit, 0, blocks, int(size[fit - 1]), int(descs[fit - 1]))
            row += fit
            continue
        one = int(length[row])
        step = max(1, min(max_bytes // one, max_descriptors * blocks // int(per_row[row]), blocks))
        for lo in range(0, blocks, step):
            hi = min(lo + step, blocks)
            part = Section(table, section.local[lo:hi], section.remote[lo:hi])
            yield _expand(section, row, row + 1, lo, hi, one * (hi - lo), part.num_runs if dense[row] else hi - lo)
        row += 1


def _expand(section: Section, row: int, end: int, lo: int, hi: int, num_bytes: int, num_descriptors: int) -> Post:
    rows = np.arange(row, end, dtype=np.int32)[:, None]
    return Post(
        section.table.table_id,
        (rows * np.int32(section.table.local_blocks) + section.local[lo:hi]).ravel(),
        (rows * np.int32(section.table.remote_blocks) + section.remote[lo:hi]).ravel(),
        num_bytes,
        num_descriptors,
    )


def compare(local: Layout, remote: Layout) -> tuple[Difference, ...]:
    """List every field in which two checked layouts differ so that nothing can be planned."""
    out: list[Difference] = []

    def differ(field: str, here: object, there: object) -> None:
        if here != there:
            out.append(Difference(field, here, there))

    if local.model and remote.model:
        differ("model", local.model, remote.model)
    differ("pp_size", local.pp_size, remote.pp_size)
    differ("number of groups", len(local.groups), len(remote.groups))
    ours, theirs = {v.layer: v for v in local.views}, {v.layer: v for v in remote.views}
    differ("layers only on one side", sorted(ours.keys() - theirs.keys())[:8], sorted(theirs.keys() - ours.keys())[:8])
    for layer in ours.keys() & theirs.keys() if len(out) < 16 else ():
        a, b = ours[layer], theirs[layer]
        differ(f"layer {layer!r} group", a.group, b.group)
        parts, others = {p.name: p for p in a.parts}, {p.name: p for p in b.parts}
        differ(f"layer {layer!r} parts", sorted(parts), sorted(others))
        for name in parts.keys() & others.keys():
            out += _compare_parts(f"layer {layer!r} part {name!r}", parts[name], others[name])
    return tuple(out[:32])


def _compare_parts(where: str, a: Part, b: Part) -> Iterator[Difference]:
    if (a.dtype, a.itemsize) != (b.dtype, b.itemsize):
        yield Difference(f"{where} dtype", a.dtype, b.dtype)
    if a.axis != b.axis or a.extent != b.extent:
        yield Difference(
            f"{where} sharded axis", f"{a.axis or 'none'} of {a.extent}", f"{b.axis or 'none'} of {b.extent}"
        )
    elif a.axis and not (b.held[0] <= a.held[0] and a.held[1] <= b.held[1]):
        yield Difference(f"{where} held range of {a.axis!r}", list(a.held), list(b.held))
    sizes = {d.name: d.size for d in a.dims if d.name not in (TOKEN, a.axis)}
    others = {d.name: d.size for d in b.dims if d.name not in (TOKEN, b.axis)}
    if sizes != others:
        yield Difference(f"{where} dims", sizes, others)


class PeerMap:
    """How one remote rank's memory maps onto ours; made once per peer.

    Args:
        local: Our layout, checked.
        remote: The remote rank's layout, checked, and found comparable by `compare`.

    Raises:
        LayoutError: The two memory orders would need absurdly many pieces.
    """

    def __init__(self, local: Layout, remote: Layout) -> None:
        self.local = local
        self.remote = remote
        theirs = {v.layer: v for v in remote.views}
        self._pairs: list[list[tuple[View, View, Part, Part]]] = [[] for _ in local.groups]
        for view in local.views:
            other = theirs[view.layer]
            others = {p.name: p for p in other.parts}
            self._pairs[view.group] += [(view, other, p, others[p.name]) for p in view.parts]
        self._tables: OrderedDict[Cut, PieceTable] = OrderedDict()
        self._next_id = 0
        self.warnings: list[str] = []
        self.regular = [table for g in range(len(local.groups)) if (table := self._whole_block(g)) is not None]
        """Tables of the cuts that aligned requests use, to be prepared with the handshake."""
        for table in self.regular:
            views = len({v.layer for v, _, _, _ in self._pairs[table.cut.group]})
            if table.num_rows > WARN_PIECES * views:
                self.warnings.append(
                    f"group {table.cut.group} needs {table.num_rows / views:.0f} pieces per block and layer because "
                    f"the two sides order token and head differently; the same order would need one or two"
                )

    def _whole_block(self, group: int) -> PieceTable | None:
        size = self.local.groups[group].kernel_size
        return self.table(Cut(group, 0, 0, size)) if size == self.remote.groups[group].kernel_size else None

    def table(self, cut: Cut) -> PieceTable:
        """Return the piece table of a cut, made on first use."""
        if (table := self._tables.get(cut)) is not None:
            self._tables.move_to_end(cut)
            return table
        table = self._compile(cut)
        self._tables[cut] = table
        if len(self._tables) > MAX_CUTS:
            self._tables.popitem(last=False)
        return table

    def _compile(self, cut: Cut) -> PieceTable:
        rows = [_part_rows(cut, *pair) for pair in self._pairs[cut.group]]
        merged = _merge(np.concatenate(rows)) if rows else np.zeros((0, 7), np.int64)
        local_blocks = self.local.groups[cut.group].num_kernel_blocks
        remote_blocks = self.remote.groups[cut.group].num_kernel_blocks
        if len(merged) * max(local_blocks, remote_blocks) > MAX_DESCRIPTORS:
            raise LayoutError(
                f"group {cut.group}: {len(merged)} pieces x {max(local_blocks, remote_blocks)} blocks do not fit int32 "
                f"descriptor indices; use the same memory order on both sides"
            )
        self._next_id += 1
        return PieceTable(self._next_id, cut, merged[:, 6], merged[:, 0:3], merged[:, 3:6], local_blocks, remote_blocks)


def _part_rows(cut: Cut, here: View, there: View, a: Part, b: Part) -> Int64s:
    """Rows `[local memory, offset, stride, remote memory, offset, stride, length]` of one part."""
    other = {d.name: d for d in b.dims}
    start_a = here.offset + a.offset
    start_b = there.offset + b.offset
    dims = []
    for dim in a.dims:
        twin, size = other[dim.name], dim.size
        if dim.name == TOKEN:
            start_a += cut.local_offset * dim.stride
            start_b += cut.remote_offset * twin.stride
            size = cut.tokens
        elif dim.name == a.axis:
            start_b += (a.held[0] - b.held[0]) * twin.stride
        dims.append((size, dim.stride, twin.stride))
    in_a, in_b, length = strided_pieces(a.itemsize, dims)
    rows = np.empty((len(in_a), 7), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = here.memory, start_a + in_a, here.stride
    rows[:, 3], rows[:, 4], rows[:, 5] = there.memory, start_b + in_b, there.stride
    rows[:, 6] = length
    return rows


def _merge(rows: Int64s) -> Int64s:
    """Join rows that continue each other on both sides, whatever parts or layers they belong to."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 2], rows[:, 0]))]
    a, b = rows[:-1], rows[1:]
    same = (a[:, (0, 2, 3, 5)] == b[:, (0, 2, 3, 5)]).all(axis=1)
    joined = same & (a[:, 1] + a[:, 6] == b[:, 1]) & (a[:, 4] + a[:, 6] == b[:, 4])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    out = rows[heads].copy()
    out[:, 6] = np.add.reduceat(rows[:, 6], heads)
    return out


def plan_read(
    peer: PeerMap, local: Sequence[tuple[int, Sequence[int]]], remote: Sequence[BlockRuns], num_tokens: int
) -> Plan:
    """Pair the blocks of every group by the tokens they cover.

    Args:
        peer: The map of the remote rank.
        local: Per group `(first_token, block ids)`: the tokens to fill, and where. The first block is
            the one that holds `first_token`; nothing below it is written. Checked by `check_block_ids`.
        remote: Per group what the prefill side lent.
        num_tokens: Tokens whose KV exists.

    Raises:
        RemoteTooShort: The prefill side does not offer every token that is asked for.
        PlanRefused: The number of groups differs, or a remote block id does not exist.
    """
    if not len(local) == len(remote) == len(peer.local.groups):
        raise PlanRefused(
            f"the request names {len(local)} local and {len(remote)} remote groups, "
            f"but the layouts have {len(peer.local.groups)}"
        )
    sections: list[Section] = []
    padding: list[Padding] = []
    for index, ((first, ids), offer) in enumerate(zip(local, remote, strict=True)):
        if len(ids) == 0:
            continue
        size = peer.local.groups[index].block_size
        end = min((first // size + len(ids)) * size, num_tokens)
        if first < end:
            sections += _pair(peer, index, first, end, np.asarray(ids, np.int64), offer, num_tokens)
        padding += _padding(index, size, first, max(end, first), ids)
    return Plan(tuple(sections), tuple(padding))


def _padding(group: int, size: int, first: int, end: int, ids: Sequence[int]) -> Iterator[Padding]:
    start = first // size
    for i in range(max(end // size, start), start + len(ids)):
        lo = max(end - i * size, 0)
        if lo < size:
            yield Padding(group, int(ids[i - start]), lo, size - lo)


def _pair(
    peer: PeerMap, index: int, first: int, end: int, ids: Int64s, offer: BlockRuns, num_tokens: int
) -> Iterator[Section]:
    here, there = peer.local.groups[index], peer.remote.groups[index]
    mine, theirs = here.kernel_size, there.kernel_size
    offer_start = offer.first_token // there.block_size
    offered = sum(count for _, count in offer.runs)
    last = min((offer_start + offered) * there.block_size, num_tokens)
    if first < offer.first_token or end > last:
        raise RemoteTooShort(
            f"remote too short: group {index} ({here.name!r}) needs tokens {first}...{end - 1}, but the prefill side "
            f"offers {offer.first_token}...{last - 1} ({offered} blocks of {there.block_size})"
        )
    # A last, partial kernel block is read to its end where both sides have one: fewer kinds of cuts.
    whole = min(-(-end // mine) * mine, -(-end // theirs) * theirs)
    if mine == theirs:
        edges = np.arange(first // mine + 1, -(-whole // mine), dtype=np.int64) * mine
    else:
        edges = np.union1d(
            np.arange(first // mine + 1, -(-whole // mine), dtype=np.int64) * mine,
            np.arange(first // theirs + 1, -(-whole // theirs), dtype=np.int64) * theirs,
        )
    start = np.concatenate(([first], edges))
    tokens = np.diff(np.append(start, whole))
    at_local, at_remote = start // mine, start // theirs
    local = _kernel_blocks(ids, at_local - first // here.block_size * here.ratio, here.ratio)
    wanted = at_remote // there.ratio - offer_start
    remote = _lookup(offer, wanted) * there.ratio + at_remote % there.ratio
    if remote.max() >= there.num_kernel_blocks:
        raise PlanRefused(
            f"group {index} ({here.name!r}): the prefill side names block {int(remote.max()) // there.ratio}, "
            f"but declared {there.num_blocks} blocks"
        )
    cuts = np.stack((start - at_local * mine, start - at_remote * theirs, tokens), axis=1)
    if (cuts == cuts[0]).all():
        kinds, which = cuts[:1], np.zeros(len(cuts), np.int64)
    else:
        kinds, which = np.unique(cuts, axis=0, return_inverse=True)
    for kind, (local_offset, remote_offset, n) in enumerate(kinds.tolist()):
        chosen = np.flatnonzero(which.ravel() == kind) if len(kinds) > 1 else slice(None)
        table = peer.table(Cut(index, local_offset, remote_offset, n))
        if table.num_rows == 0:
            continue
        a, b = local[chosen].astype(np.int32), remote[chosen].astype(np.int32)
        if len(b) > 1 and (b[1:] < b[:-1]).any():
            order = np.argsort(b, kind="stable")
            a, b = a[order], b[order]
        yield Section(table, a, b)


def _kernel_blocks(ids: Int64s, positions: Int64s, ratio: int) -> Int64s:
    """Kernel block ids at kernel positions within a list of blocks."""
    return ids[positions // ratio] * ratio + positions % ratio


def _lookup(runs: BlockRuns, positions: Int64s) -> Int64s:
    """Block ids at positions of a list written as runs; allocates by the positions, never by the runs."""
    first = np.fromiter((r[0] for r in runs.runs), np.int64, len(runs.runs))
    ends = np.cumsum(np.fromiter((r[1] for r in runs.runs), np.int64, len(runs.runs)))
    run = np.searchsorted(ends, positions, side="right")
    before = np.concatenate(([0], ends[:-1]))
    return first[run] + positions - before[run]


def check_block_ids(layout: Layout, groups: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Refuse block lists that do not fit our own layout.

    Raises:
        PlanRefused: A group is missing, or an id is negative, too large or given twice.
    """
    if len(groups) != len(layout.groups):
        raise PlanRefused(
            f"{len(groups)} groups of blocks were given, but the layout has {len(layout.groups)} "
            f"({', '.join(repr(g.name) for g in layout.groups)}); give one (first_token, block_ids) per group"
        )
    for index, (group, (first, ids)) in enumerate(zip(layout.groups, groups, strict=True)):
        where = f"group {index} ({group.name!r})"
        if first < 0:
            raise PlanRefused(f"{where}: first_token {first} is negative")
        if len(ids) == 0:
            continue
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise PlanRefused(f"{where}: block ids must be a flat list of integers")
        lo, hi = int(array.min()), int(array.max())
        if lo < 0 or hi >= group.num_blocks:
            raise PlanRefused(
                f"{where}: block id {lo if lo < 0 else hi} is outside [0, {group.num_blocks}), the declared num_blocks"
            )
        if len(np.unique(array)) != len(array):
            ordered = np.sort(array)
            raise PlanRefused(f"{where}: block id {int(ordered[:-1][np.diff(ordered) == 0][0])} is given twice")
