"""From shares of memory and lists of blocks to the pieces that must be read.

Three steps, because most of the work depends on the peer only, and most of the rest on the request:

1. `PeerTables`, once per peer: what is read of it (its `Share`s), each kernel block cut into pieces that
   are contiguous on both sides (`DescTable`, one row per piece).
2. `BlockLists`, once per request: our lists and the remote ones paired by the *tokens* they cover.
3. `plan_read`, per request and peer: pairs times a table's rows are the descriptors. They stay
   indices (int32), expanded only when posted.

A *cut* is how a stretch of tokens lies in its two kernel blocks: `(offset here, offset there, tokens)`.
Equal block sizes on aligned boundaries know a single cut, the whole block; two sizes know a few, that
repeat. A first token inside a block adds one of its own, the first time it occurs. States have a single
cut, the whole.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.arguments import shown
from asynckv.errors import LayoutError, PlanRefused, RemoteTooShort
from asynckv.geometry.bounds import MAX_TOKENS, NULL, BlockRuns
from asynckv.geometry.layout import (
    MAX_DESCRIPTORS,
    TOKEN,
    Group,
    Layout,
    as_block_ids,
    num_pieces,
    strided_pieces,
)
from asynckv.geometry.match import Share

__all__ = [
    "BlockLists",
    "DescTable",
    "Padding",
    "PeerTables",
    "Plan",
    "ReadRequest",
    "Section",
    "Span",
    "check_block_ids",
    "check_covers",
    "common_prefix",
    "plan_read",
]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
BlockList = tuple[int, Int64s]
"""First token, and the ids of our blocks from the one on that holds it."""

MAX_CUTS = 1024
"""Most tables kept per peer; the least recently used go first."""

MAX_KINDS = 1024
"""Most kinds of cuts of two block sizes; sizes that share no boundary for longer are refused."""

MAX_SHAPES = 4096
"""Most kinds of cuts times shapes of parts: each is cut by itself, and the strides there are a stranger's."""

MAX_REGULAR = 64
"""Most tables that are made for a pair of groups before any request needs them."""

MAX_ROWS = 1 << 18
"""Most pieces of all tables made for a peer beforehand, and of one made later: the remote strides decide it. So
many take 50 ms; 128 layers of keys and values have as many where blocks of 1,024 tokens share one token at a time."""

WARN_PIECES = 64

SHORT = 256
"""Block ids that are checked one by one: faster than as an array, up to about so many."""


class Span(NamedTuple):
    """A stretch of tokens inside one local and one remote kernel block; or a whole state, of 0 tokens."""

    group: int
    remote_group: int
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
class DescTable:
    """The contiguous pieces of one cut, on both sides; row `i` of block `b` is one descriptor.

    Descriptor index = `i * blocks + b`, with that side's number of kernel blocks.

    Attributes:
        table_id: Unique per peer.
        length: Bytes per piece, int64 `[rows]`.
        local, remote: int64 `[rows, 3]`: index of the memory, byte offset of block 0 in it, stride.
        local_blocks, remote_blocks: Kernel blocks that every row can index.
        num_rows, block_bytes: Pieces and bytes per kernel block pair.
        dense: Rows in which consecutive blocks touch on both sides, so that NIXL merges them; `num_dense` in all.
        local_index, remote_index: int32 `[rows, 1]`: index of every row's block 0.
    """

    table_id: int
    cut: Span
    length: Int64s
    local: Int64s
    remote: Int64s
    local_blocks: int
    remote_blocks: int
    num_rows: int = field(init=False)
    block_bytes: int = field(init=False)
    dense: npt.NDArray[np.bool_] = field(init=False)
    num_dense: int = field(init=False)
    local_index: Int32s = field(init=False)
    remote_index: Int32s = field(init=False)

    def __post_init__(self) -> None:
        rows = np.arange(len(self.length), dtype=np.int32)[:, None]
        dense = np.logical_and(self.local[:, 2] == self.length, self.remote[:, 2] == self.length)
        for name, value in (
            ("num_rows", len(self.length)),
            ("block_bytes", int(self.length.sum())),
            ("dense", dense),
            ("num_dense", int(np.count_nonzero(dense))),
            ("local_index", rows * np.int32(self.local_blocks)),
            ("remote_index", rows * np.int32(self.remote_blocks)),
        ):
            object.__setattr__(self, name, value)


class ReadRequest(NamedTuple):
    """One transfer to post: equally long index arrays into one table, and what it amounts to."""

    table: DescTable
    local: Int32s
    remote: Int32s
    num_bytes: int
    num_descriptors: int
    """After NIXL's merging."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Block pairs that share a table, sorted by remote block."""

    table: DescTable
    local: Int32s
    remote: Int32s

    def breaks(self) -> npt.NDArray[np.bool_]:
        """Whether the ids of pair `i + 1` do not both follow those of pair `i`: a descriptor ends there."""
        a, b = self.local, self.remote
        found: npt.NDArray[np.bool_] = np.logical_or(a[1:] - a[:-1] != 1, b[1:] - b[:-1] != 1)
        return found

    @property
    def num_runs(self) -> int:
        """Stretches in which both ids step by one."""
        return 1 + int(np.count_nonzero(self.breaks())) if len(self.local) > 1 else len(self.local)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one pull reads from one remote rank."""

    sections: tuple[Section, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that will land."""
        return sum(s.table.block_bytes * len(s.local) for s in self.sections)

    @property
    def num_descriptors(self) -> int:
        """Descriptors before merging."""
        return sum(s.table.num_rows * len(s.local) for s in self.sections)

    def posts(self, max_bytes: int, max_descriptors: int) -> Iterator[ReadRequest]:
        """Cut the plan into transfers, lazily: nothing is expanded before it is asked for.

        Every post holds at least one descriptor, whatever the bounds; only one of a single descriptor may exceed
        them, in bytes. Rows come in order and blocks within a row ascend, so that neighbours stay neighbours.
        """
        return (_expand(s, piece) for s in self.sections for piece in _cut_section(s, max_bytes, max_descriptors))

    def count_posts(self, max_bytes: int, max_descriptors: int) -> tuple[int, int]:
        """Count what `posts` would yield, and the descriptors in all of it, without expanding any."""
        pieces = [p.num_descriptors for s in self.sections for p in _cut_section(s, max_bytes, max_descriptors)]
        return len(pieces), sum(pieces)


class _Piece(NamedTuple):
    """What of a section one post takes: rows `[row, end)` times blocks `[lo, hi)`."""

    row: int
    end: int
    lo: int
    hi: int
    num_bytes: int
    num_descriptors: int
    """After NIXL's merging."""


def _cut_section(section: Section, max_bytes: int, max_descriptors: int) -> Iterable[_Piece]:
    table, blocks = section.table, len(section.local)
    runs = section.num_runs
    num_bytes = table.block_bytes * blocks
    num_descriptors = runs * table.num_dense + blocks * (table.num_rows - table.num_dense)
    if num_bytes <= max_bytes and num_descriptors <= max_descriptors:
        return (_Piece(0, table.num_rows, 0, blocks, num_bytes, num_descriptors),)
    return _pieces(section, runs, max_bytes, max_descriptors)


def _pieces(section: Section, runs: int, max_bytes: int, max_descriptors: int) -> Iterator[_Piece]:
    table, blocks, dense, length = section.table, len(section.local), section.table.dense, section.table.length
    per_row = np.where(dense, runs, blocks)
    # Consecutive rows go together while their whole block lists fit; a row too large alone is split.
    size, descs = (np.concatenate(([0], np.cumsum(x))) for x in (length * blocks, per_row))
    ends: Int64s | None = None
    """Where runs end: they differ in length as they like, and a slice has so many of them at most."""
    row = 0
    while row < table.num_rows:
        end = min(
            int(np.searchsorted(total, total[row] + most, side="right")) - 1
            for total, most in ((size, max_bytes), (descs, max_descriptors))
        )
        if end > row:
            yield _Piece(row, end, 0, blocks, int(size[end] - size[row]), int(descs[end] - descs[row]))
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
            yield _Piece(row, row + 1, lo, hi, one * (hi - lo), num_descriptors)
            lo = hi
        row += 1


def _expand(section: Section, piece: _Piece) -> ReadRequest:
    table, local, remote = section.table, section.local, section.remote
    if piece.hi - piece.lo < len(local):
        local, remote = local[piece.lo : piece.hi], remote[piece.lo : piece.hi]
    if piece.end > 1:  # the first row's indices are the blocks themselves
        local = (table.local_index[piece.row : piece.end] + local).ravel()
        remote = (table.remote_index[piece.row : piece.end] + remote).ravel()
    return ReadRequest(table, local, remote, piece.num_bytes, piece.num_descriptors)


class PeerTables:
    """How what is read of one remote rank maps onto our memory; made once per peer.

    Args:
        local: Our layout, checked.
        remote: The remote rank's layout, checked, and found comparable by `compare`.
        shares: What is read of it, from `assign`.
        ids: Where table ids come from; one per peer.

    Raises:
        LayoutError: The two memory orders would need absurdly many pieces.
    """

    def __init__(self, local: Layout, remote: Layout, shares: Sequence[Share], ids: Iterator[int]) -> None:
        self.local = local
        self.remote = remote
        pairs: dict[tuple[int, int], list[Share]] = {}
        for share in shares:
            pairs.setdefault((share.here.group, share.there.group), []).append(share)
        self._layers = {pair: len({s.here.layer for s in shares}) for pair, shares in pairs.items()}
        self._alike = {pair: _sort_alike(shares) for pair, shares in pairs.items()}
        self._tables: OrderedDict[Span, DescTable] = OrderedDict()
        self._ids = ids
        self.warnings: list[str] = []
        self.entries = {
            pair: math.lcm(*(_entry(s, local.groups[pair[0]]) for s in shares)) for pair, shares in pairs.items()
        }
        """Tokens of which the first token to be read must be a multiple, per pair of groups."""
        cuts = [cut for pair in pairs for cut in self._regular_cuts(*pair)]
        if (pieces := sum(map(self._num_pieces, cuts))) > MAX_ROWS:
            raise LayoutError(
                f"{pieces} pieces would be needed for {len(cuts)} kinds of cuts, more than {MAX_ROWS}; use the same "
                f"memory order and block size on both sides"
            )
        kinds = Counter(cut[:2] for cut in cuts)
        self.regular = [self.table(cut) for cut in cuts if kinds[cut[:2]] <= MAX_REGULAR]
        """Tables of the cuts that aligned requests use, to be prepared before the first."""
        for table in self.regular:
            self._warn(table)

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """Local and remote groups that share layers."""
        return tuple(self._alike)

    def _regular_cuts(self, group: int, remote_group: int) -> list[Span]:
        here, there = self.local.groups[group], self.remote.groups[remote_group]
        if here.kind == "state":
            return [Span(group, remote_group, 0, 0, 0)]
        mine, theirs = here.kernel_size, there.kernel_size
        period = math.lcm(mine, theirs)
        if period // mine + period // theirs > MAX_KINDS:
            raise LayoutError(
                f"group {group}: kernel blocks of {mine} tokens here and {theirs} there share a boundary only every "
                f"{period} tokens, which makes more than {MAX_KINDS} kinds of cuts; use sizes with a common factor"
            )
        edges = sorted({*range(0, period, mine), *range(0, period, theirs)})
        ends = [*edges[1:], period]
        cuts = (Span(group, remote_group, a % mine, a % theirs, b - a) for a, b in zip(edges, ends, strict=True))
        kinds, shapes = list(dict.fromkeys(cuts)), len(self._alike[group, remote_group])
        if len(kinds) * shapes > MAX_SHAPES:
            raise LayoutError(
                f"group {group}: kernel blocks of {mine} tokens here and {theirs} there make {len(kinds)} kinds of "
                f"cuts of {shapes} differently shaped parts, more than {MAX_SHAPES} in all; use one memory order for "
                f"all layers, or block sizes with a common factor"
            )
        return kinds

    def _warn(self, table: DescTable) -> None:
        layers = self._layers[table.cut.group, table.cut.remote_group]
        if table.num_rows > WARN_PIECES * layers:
            self.warnings.append(
                f"group {table.cut.group} needs {table.num_rows / layers:.0f} pieces (of {int(table.length.min())} "
                f"bytes and more) per block and layer of prefill tp{self.remote.tp_rank}: the two sides lie in "
                f"different memory orders, or take part of the heads of each token; with head before token on both "
                f"sides few are needed"
            )

    def table(self, cut: Span) -> DescTable:
        """Return the piece table of a cut, made on first use."""
        if (table := self._tables.get(cut)) is not None:
            self._tables.move_to_end(cut)
            return table
        table = self._tables[cut] = self._compile(cut)
        return table

    @property
    def is_full(self) -> bool:
        """There are more tables than are kept."""
        return len(self._tables) > MAX_CUTS

    def evict(self, in_use: set[int]) -> list[DescTable]:
        """Forget tables beyond `MAX_CUTS`, the least recently used first, and return them."""
        excess = len(self._tables) - MAX_CUTS
        if excess <= 0:
            return []
        kept = in_use | {table.table_id for table in self.regular}
        out = [table for table in self._tables.values() if table.table_id not in kept][:excess]
        for table in out:
            del self._tables[table.cut]
        return out

    def _num_pieces(self, cut: Span) -> int:
        return sum(len(kind.places) * kind.num_pieces(cut) for kind in self._alike[cut.group, cut.remote_group])

    def _compile(self, cut: Span) -> DescTable:
        pair = cut.group, cut.remote_group
        count = self._num_pieces(cut)
        local_blocks = self.local.groups[cut.group].num_kernel_blocks
        remote_blocks = self.remote.groups[cut.remote_group].num_kernel_blocks
        if count > MAX_ROWS or count * max(local_blocks, remote_blocks) > MAX_DESCRIPTORS:
            raise LayoutError(
                f"group {cut.group}: {count} pieces per kernel block x {max(local_blocks, remote_blocks)} blocks are "
                f"more than {MAX_ROWS} pieces or int32 descriptor indices; use the same memory order on both sides"
            )
        rows = _merge(np.concatenate([kind.rows(cut) for kind in self._alike[pair]]))
        return DescTable(next(self._ids), cut, rows[:, 6], rows[:, 0:3], rows[:, 3:6], local_blocks, remote_blocks)


def _entry(share: Share, here: Group) -> int:
    """Tokens that one entry of a part covers."""
    if here.kind == "state":
        return 1
    return share.a.tokens_per_entry if share.a.has_tokens else here.kernel_size


class _Shape(NamedTuple):
    """What parts that are cut alike have in common: layers are much alike, so that there are few."""

    itemsize: int
    tokens_per_entry: int
    dims: tuple[tuple[int, int, int], ...]
    """`(entries, byte stride here, byte stride there)` of what is read along every dim but the tokens."""
    token: tuple[int, int]
    """Byte strides along the tokens, here and there; 0, 0 for a part without that dim."""


class _Alike:
    """Parts of one shape, and where each begins in its views' block 0."""

    def __init__(self, shape: _Shape, places: Int64s) -> None:
        self._shape = shape
        self.places = places
        """Rows `[local memory, offset, stride, remote memory, offset, stride]`."""

    def _dims(self, cut: Span) -> list[tuple[int, int, int]]:
        _, each, dims, token = self._shape
        return [*dims, (cut.tokens // each, *token)] if any(token) else list(dims)

    def num_pieces(self, cut: Span) -> int:
        """Pieces per part, of one cut."""
        return num_pieces(self._shape.itemsize, self._dims(cut))

    def rows(self, cut: Span) -> Int64s:
        """Rows `[local memory, offset, stride, remote memory, offset, stride, length]` of one cut."""
        in_a, in_b, length = strided_pieces(self._shape.itemsize, self._dims(cut))
        each, (here, there) = self._shape.tokens_per_entry, self._shape.token
        rows = np.empty((len(self.places), len(in_a), 7), np.int64)
        rows[:, :, :6] = self.places[:, None, :]
        rows[:, :, 1] += in_a + cut.local_offset // each * here
        rows[:, :, 4] += in_b + cut.remote_offset // each * there
        rows[:, :, 6] = length
        return rows.reshape(-1, 7)


def _sort_alike(shares: Sequence[Share]) -> list[_Alike]:
    """Put parts of one shape together."""
    found: dict[_Shape, list[tuple[int, ...]]] = {}
    for here, there, a, b, lo, hi in shares:
        twins = {d.name: d for d in b.dims}
        start_a, start_b = here.offset + a.offset, there.offset + b.offset
        dims, token = [], (0, 0)
        for dim in a.dims:
            # A dim of one entry may be missing.
            twin, size = twins.get(dim.name, dim), dim.size
            if dim.name == TOKEN:
                token = (dim.stride, twin.stride)
                continue
            if dim.name == a.axis:
                start_a += (lo - a.held[0]) * dim.stride
                start_b += (lo - b.held[0]) * twin.stride
                size = hi - lo
            if size > 1:
                dims.append((size, dim.stride, twin.stride))
        shape = _Shape(a.itemsize, a.tokens_per_entry, tuple(dims), token)
        place = (here.memory, start_a, here.stride, there.memory, start_b, there.stride)
        found.setdefault(shape, []).append(place)
    return [_Alike(shape, np.array(places, np.int64)) for shape, places in found.items()]


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


class BlockLists:
    """The blocks of one request on both sides, and how they pair; made once, used for every remote rank.

    Args:
        local: Per group of ours the first token to fill and where, from `check_block_ids`. The first block
            is the one that holds `first_token`; nothing below it is written. Where the list has a
            placeholder nothing is wanted.
        remote: Per group of theirs what was lent.
        num_tokens: Tokens that are wanted.
        offered_tokens: Tokens whose KV was lent; `num_tokens` if left out.
    """

    def __init__(
        self,
        local: Sequence[BlockList],
        remote: Sequence[BlockRuns],
        num_tokens: int,
        offered_tokens: int | None = None,
    ) -> None:
        self.local = tuple(local)
        self.num_tokens = num_tokens
        self.offered_tokens = num_tokens if offered_tokens is None else offered_tokens
        self._remote = [_Offer(runs) for runs in remote]
        self._pairs: dict[tuple[object, ...], tuple[Pairs, ...]] = {}
        self.wanted = tuple(
            group
            for group, (first, ids) in enumerate(self.local)
            if first < num_tokens and len(ids) and (ids[0] != NULL or ids.max() > NULL)
        )
        """Our groups in which something is to be filled."""
        self.is_empty = not self.wanted
        """No block is to be filled: a full prefix hit."""

    def pairs(self, peer: PeerTables, group: int, remote_group: int) -> tuple[Pairs, ...]:
        """Pair one group of ours with one of theirs.

        Raises:
            RemoteTooShort: What is asked for is not offered.
            PlanRefused: The lists do not fit the layouts.
        """
        if group >= len(self.local) or remote_group >= len(self._remote):
            raise PlanRefused(
                f"the request names {len(self.local)} local and {len(self._remote)} remote groups, but the layouts "
                f"have {len(peer.local.groups)} and {len(peer.remote.groups)}"
            )
        here, there, entry = (
            peer.local.groups[group],
            peer.remote.groups[remote_group],
            peer.entries[group, remote_group],
        )
        key = (group, remote_group, there, entry)
        if (pairs := self._pairs.get(key)) is None:
            pair = self._pair_states if here.kind == "state" else self._pair_tokens
            pairs = self._pairs[key] = tuple(pair(group, remote_group, here, there, entry))
        return pairs

    def padding(self, layout: Layout) -> Iterator[Padding]:
        """What of our blocks is not filled. Tokens before a sliding window are nobody's, and not listed.

        Blocks of states hold no tokens: one is filled, whole, and of the others nothing is said.
        """
        for index, (group, (first, ids)) in enumerate(zip(layout.groups, self.local, strict=False)):
            if group.kind == "state":
                continue
            size, place = group.block_size, first // group.block_size
            end = max(self.num_tokens, first)
            for i in range(max(end // size - place, 0), len(ids)):
                lo = max(end - (place + i) * size, 0)
                if ids[i] != NULL and lo < size:
                    yield Padding(index, int(ids[i]), lo, size - lo)

    def _pair_tokens(self, group: int, remote_group: int, here: Group, there: Group, entry: int) -> Iterator[Pairs]:
        (first, ids), offer = self.local[group], self._remote[remote_group]
        mine, theirs = here.kernel_size, there.kernel_size
        inside = first
        if here.window:
            # To the start of its block, where that is one on both sides: fewer kinds of cuts.
            # One token more than the next one needs, where it is there: an engine that computes the last token
            # again needs it (vLLM does after a full hit).
            inside = max(0, self.num_tokens - here.window + 1)
            wider = max(0, inside - 1)
            wider -= wider % (mine if mine == theirs else entry)
            if inside < self.num_tokens:  # a window of one token needs none
                inside -= inside % entry
            inside = max(first, inside)
            first = max(first, wider if wider >= offer.first_token else inside)
        end = min((self.local[group][0] // here.block_size + len(ids)) * here.block_size, self.num_tokens)
        if first >= end:
            return
        if first % entry:
            raise PlanRefused(
                f"group {group} ({here.name!r}): the first token {first} is inside an entry that covers {entry} "
                f"tokens, which can only be read whole; begin at token {first - first % entry}"
            )
        if mine == theirs and (aligned := self._pair_aligned(group, remote_group, here, there, first, end)):
            yield from aligned
            return
        # A last, partial kernel block is read to its end where both sides have one.
        whole = min(-(-end // mine) * mine, -(-end // theirs) * theirs)
        edges = np.arange(first // mine + 1, -(-whole // mine), dtype=np.int64) * mine
        if mine != theirs:
            edges = np.union1d(edges, np.arange(first // theirs + 1, -(-whole // theirs), dtype=np.int64) * theirs)
        start = np.concatenate(([first], edges))
        tokens = np.diff(np.append(start, whole))
        kernel = start // mine
        at = ids[kernel // here.ratio - self.local[group][0] // here.block_size]
        if at.min() == NULL:
            chosen = at != NULL
            start, tokens, kernel, at = start[chosen], tokens[chosen], kernel[chosen], at[chosen]
            if not len(at):
                return
        source = start // theirs
        if start[0] < offer.first_token:
            raise self._too_short(group, here, int(start[0]), f"lent from token {offer.first_token} on")
        block = offer.lookup(source // there.ratio - offer.first_token // there.block_size)
        block[block == there.null_block] = NULL
        if here.window and block[0] == NULL:
            needed = (block != NULL) | (np.minimum(start + tokens, self.num_tokens) > inside)
            start, tokens, kernel, at = start[needed], tokens[needed], kernel[needed], at[needed]
            source, block = source[needed], block[needed]
        if not len(block):
            return
        if (absent := np.flatnonzero(block == NULL)).size:
            raise self._too_short(
                group,
                here,
                int(start[absent[0]]),
                f"{offer.num_blocks} blocks of {there.block_size} from token "
                f"{offer.first_token} on were lent, with {offer.num_null} placeholders among them",
            )
        if int(block.max()) >= there.num_blocks:
            raise _no_such_block(group, here, int(block.max()), there)
        local, remote = at * here.ratio + kernel % here.ratio, block * there.ratio + source % there.ratio
        yield from _by_cut(group, remote_group, start - kernel * mine, start - source * theirs, tokens, local, remote)

    def _pair_aligned(
        self, group: int, remote_group: int, here: Group, there: Group, first: int, end: int
    ) -> list[Pairs]:
        """Pair kernel blocks one to one: the usual case, where both sides' have one size and none is missing.

        Returns nothing where that is not so; what follows in `_pair_tokens` is the rule, and says the same.
        """
        (listed, ids), offer, size = self.local[group], self._remote[remote_group], here.kernel_size
        begin, stop = first // size, -(-end // size)
        theirs = offer.kernel_blocks(first, begin, stop, there)
        if theirs is None:
            return []
        if here.ratio > 1:
            ids = (ids[:, None] * here.ratio + np.arange(here.ratio)).ravel()
        skipped = begin - listed // here.block_size * here.ratio
        mine = ids[skipped : skipped + stop - begin].astype(np.int32)
        if mine.min() <= NULL:
            return []
        if (most := int(theirs[-1] if offer.is_one_run else theirs.max())) >= there.num_kernel_blocks:
            raise _no_such_block(group, here, most // there.ratio, there)
        parts = [(0, mine, theirs)]
        if head := first % size:
            parts = [(0, mine[1:], theirs[1:]), (head, mine[:1], theirs[:1])]
        out = []
        for offset, local, remote in parts:
            if len(local) > 1 and not offer.is_one_run:
                order = np.argsort(remote, kind="stable")
                local, remote = local[order], remote[order]
            if len(local):
                out.append(Pairs(Span(group, remote_group, offset, offset, size - offset), local, remote))
        return out

    def _pair_states(self, group: int, remote_group: int, here: Group, there: Group, entry: int) -> Iterator[Pairs]:
        (first, ids), offer, tokens = self.local[group], self._remote[remote_group], self.num_tokens
        if first >= tokens or not len(ids) or ids.max() == NULL:
            return
        at = _state_place(here, first, tokens)
        if not at < len(ids) or ids[at] == NULL:
            what = "a placeholder" if at < len(ids) else f"beyond the {len(ids)} that were given"
            raise PlanRefused(
                f"group {group} ({here.name!r}): the state after {tokens} tokens belongs into place {at} of the list "
                f"from token {first} on ({here.block_size} tokens per state), which is {what}; give a block there"
            )
        if tokens < self.offered_tokens and tokens % there.block_size:
            raise self._too_short(group, here, tokens, f"states are kept every {there.block_size} tokens only")
        place = (tokens - 1) // there.block_size - offer.first_token // there.block_size
        block = int(offer.lookup(np.array([place]))[0])
        if block in (NULL, there.null_block):
            raise self._too_short(group, here, tokens - 1, f"no state was lent in place {place} of {offer.num_blocks}")
        if block >= there.num_blocks:
            raise _no_such_block(group, here, block, there)
        cut = Span(group, remote_group, 0, 0, 0)
        yield Pairs(cut, np.array([ids[at]], np.int32), np.array([block], np.int32))

    def _too_short(self, group: int, here: Group, token: int, what: str) -> RemoteTooShort:
        thing = "the state after" if here.kind == "state" else "KV from"
        return RemoteTooShort(
            f"remote too short: group {group} ({here.name!r}) needs {thing} token {token} on of {self.num_tokens}, "
            f"but the prefill side does not offer it: {what}"
        )


class Pairs(NamedTuple):
    """Kernel blocks that share a cut, sorted by remote block."""

    cut: Span
    local: Int32s
    remote: Int32s


class _Offer:
    """Remote block ids of one group as runs; never expanded."""

    def __init__(self, offer: BlockRuns) -> None:
        self.first_token = offer.first_token
        self._runs = offer.runs
        self.is_one_run = len(offer.runs) == 1
        """In which a later block has a greater id."""

    def kernel_blocks(self, first: int, begin: int, stop: int, group: Group) -> Int32s | None:
        """Ids of kernel blocks `begin ... stop - 1` of the prompt, the first token being `first`; None if one is not
        lent."""
        place = self.first_token // group.block_size
        if first < self.first_token:
            return None
        if self.is_one_run:
            block, count = self._runs[0]
            inside = begin >= place * group.ratio and stop <= (place + count) * group.ratio
            if not inside or block == NULL or block <= group.null_block < block + count:
                return None
            shift = (block - place) * group.ratio
            if shift + stop > MAX_DESCRIPTORS:
                return None
            return np.arange(shift + begin, shift + stop, dtype=np.int32)
        kernel = np.arange(begin, stop, dtype=np.int64)
        blocks = self.lookup(kernel // group.ratio - place)
        if blocks.min() == NULL or (group.null_block != NULL and (blocks == group.null_block).any()):
            return None
        out = blocks * group.ratio + kernel % group.ratio
        return None if out.max() > MAX_DESCRIPTORS else out.astype(np.int32)

    @cached_property
    def _first(self) -> Int64s:
        return np.array(self._runs, np.int64).reshape(-1, 2)[:, 0]

    @cached_property
    def _ends(self) -> Int64s:
        return np.cumsum(np.array(self._runs, np.int64).reshape(-1, 2)[:, 1])

    @cached_property
    def _shift(self) -> Int64s:
        return self._first - np.concatenate(([0], self._ends[:-1]))

    @property
    def num_blocks(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_null(self) -> int:
        return int(np.diff(self._ends, prepend=0)[self._first == NULL].sum())

    def lookup(self, places: Int64s) -> Int64s:
        """Block ids at places of the list; `NULL` at placeholders and outside of it."""
        if not len(self._ends):
            return np.full(len(places), NULL, np.int64)
        run = np.searchsorted(self._ends, places, side="right")
        outside = (places < 0) | (run >= len(self._ends))
        run[outside] = 0
        block = self._shift[run] + places
        block[outside | (self._first[run] == NULL)] = NULL
        return block


def _state_place(group: Group, first: int, tokens: int) -> int:
    """Where in a list from `first` on the state after `tokens` tokens is."""
    return max(tokens - 1, 0) // group.block_size - first // group.block_size


def _no_such_block(group: int, here: Group, block: int, there: Group) -> PlanRefused:
    return PlanRefused(
        f"group {group} ({here.name!r}): the prefill side names block {block}, but declared {there.num_blocks} blocks"
    )


def _by_cut(
    group: int, remote_group: int, here: Int64s, there: Int64s, tokens: Int64s, local: Int64s, remote: Int64s
) -> Iterator[Pairs]:
    """Sort block pairs into those that share a cut."""
    mine, theirs = local.astype(np.int32), remote.astype(np.int32)
    if (tokens == tokens[0]).all() and (here == here[0]).all() and (there == there[0]).all():
        kinds = [np.arange(len(mine))]
    else:
        order = np.lexsort((tokens, there, here))
        cuts = np.stack((here[order], there[order], tokens[order]))
        kinds = np.split(order, np.flatnonzero((cuts[:, 1:] != cuts[:, :-1]).any(axis=0)) + 1)
    for chosen in kinds:
        ascending = chosen[np.argsort(theirs[chosen], kind="stable")]
        at = chosen[0]
        cut = Span(group, remote_group, int(here[at]), int(there[at]), int(tokens[at]))
        yield Pairs(cut, mine[ascending], theirs[ascending])


def plan_read(peer: PeerTables, lists: BlockLists) -> Plan:
    """Say what is read of one remote rank for one request.

    Raises:
        RemoteTooShort: The prefill side does not offer everything that is asked for.
        PlanRefused: A group is missing, a remote block does not exist, a place for a state is missing.
        LayoutError: A cut would need absurdly many pieces.
    """
    return Plan(
        tuple(
            Section(peer.table(pairs.cut), pairs.local, pairs.remote)
            for pair in peer.pairs
            for pairs in lists.pairs(peer, *pair)
        )
    )


def common_prefix(local: Sequence[str], remote: Sequence[str], hash_tokens: int, num_tokens: int) -> int:
    """Count the tokens at the start of a prompt on which two chains of hashes agree.

    Every hash covers all tokens before it as well, so the first that differs ends the prefix. Tokens
    after the last whole hash are in none: they are taken on trust if both chains are the same.
    """
    same = next(
        (i for i, (a, b) in enumerate(zip(local, remote, strict=False)) if a != b), min(len(local), len(remote))
    )
    whole = same == len(local) == len(remote) and num_tokens - same * hash_tokens < hash_tokens
    return num_tokens if whole else min(same * hash_tokens, num_tokens)


def check_block_ids(
    layout: Layout, groups: Sequence[tuple[int, Sequence[int | None] | Int64s]], num_tokens: int | None = None
) -> tuple[BlockList, ...]:
    """Refuse block lists that do not fit our own layout; return them as arrays, with `NULL` for placeholders.

    Args:
        layout: Ours.
        groups: Per group the first token, and the blocks from the one on that holds it.
        num_tokens: Tokens that a list has to reach, if it has any block.

    Raises:
        PlanRefused: A group is missing, an id is negative, too large or given twice, or a list ends too soon.
    """
    given: Any = groups  # compiled, what is annotated is believed
    try:
        pairs: list[tuple[Any, Any]] = [(first, ids) for first, ids in given]
    except (TypeError, ValueError):
        raise PlanRefused(f"groups is {shown(groups)}; give one (first_token, block_ids) per group") from None
    if len(pairs) != len(layout.groups):
        raise PlanRefused(
            f"{len(pairs)} groups of blocks were given, but the layout has {len(layout.groups)} "
            f"({', '.join(repr(g.name) for g in layout.groups)}); give one (first_token, block_ids) per group"
        )
    out = []
    for index, (group, (first, ids)) in enumerate(zip(layout.groups, pairs, strict=True)):
        where = f"group {index} ({group.name!r})"
        try:
            begin = operator.index(first)
        except TypeError:
            begin = -1
        if isinstance(first, bool) or not 0 <= begin <= MAX_TOKENS:
            raise PlanRefused(f"{where}: first_token {shown(first)} is not a number from 0 to {MAX_TOKENS}")
        if _is_plain(ids, group):
            array = np.array(ids, np.int64)
        else:
            try:
                array = as_block_ids(ids, group.null_block)
            except LayoutError as exc:
                raise PlanRefused(f"{where}: {exc}") from None
            check_blocks(where, group, array)
        end = (begin // group.block_size + len(array)) * group.block_size
        if num_tokens is not None and len(array) and begin < num_tokens and end < num_tokens:
            raise PlanRefused(
                f"{where}: {len(array)} blocks of {group.block_size} tokens from token {begin} on end at token {end}, "
                f"but {num_tokens} are wanted; give all blocks (None where nothing is wanted), or a smaller num_tokens"
            )
        out.append((begin, array))
    return tuple(out)


def _is_plain(ids: object, group: Group) -> bool:
    """A short list of different ids of blocks that there are, and nothing else: it needs no further check."""
    if not isinstance(ids, list | tuple) or not 0 < len(ids) <= SHORT:
        return False
    for block in ids:
        if type(block) is not int:
            return False
    return min(ids) >= 0 and max(ids) < group.num_blocks and len(set(ids)) == len(ids) and group.null_block not in ids


def check_covers(where: str, group: Group, offer: BlockRuns, num_tokens: int) -> None:
    """Refuse a lent list that ends before the tokens which it is said to hold.

    Where nothing is needed nothing need be given: an empty list, placeholders alone, a window of one token. States are
    kept here and there, and a list of them may end anywhere.

    Raises:
        PlanRefused: Naming both numbers.
    """
    if group.kind == "state" or group.window == 1 or all(first == NULL for first, _ in offer.runs):
        return
    count = sum(count for _, count in offer.runs)
    end = (offer.first_token // group.block_size + count) * group.block_size
    if offer.first_token < num_tokens and end < num_tokens:
        raise PlanRefused(
            f"{where}: {count} blocks of {group.block_size} tokens from token {offer.first_token} on end at token "
            f"{end}, but num_tokens is {num_tokens}; give make_params all blocks, or as many tokens as they hold"
        )


def check_blocks(where: str, group: Group, ids: Int64s) -> None:
    """Refuse block ids outside a group, or given twice.

    Raises:
        PlanRefused: Naming the id.
    """
    real = ids[ids != NULL]
    if not len(real):
        return
    if group.null_block != NULL and (real == group.null_block).any():
        raise PlanRefused(
            f"{where}: names block {group.null_block}, which is its placeholder; give None there, or null_block to "
            f"PrefillGroup"
        )
    if (most := int(real.max())) >= group.num_blocks:
        raise PlanRefused(f"{where}: block id {most} is outside [0, {group.num_blocks}), the declared num_blocks")
    ordered = np.sort(real)
    if (twice := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
        raise PlanRefused(f"{where}: block id {int(ordered[twice[0]])} is given twice")
