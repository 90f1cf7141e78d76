"""The descriptors of every span of tokens, in tables that NIXL prepares and requests index; made once per peer.

Each `Share` that is read of a peer is, per layer and part, an array that lies in two memories with two sets of strides.
One pair of kernel blocks gives a number of **descriptors**, byte ranges that are contiguous on both sides. They are the
same for every other pair, except for `block * stride`. A `DescTable` holds one row per descriptor.

The tokens that two blocks have in common are a **span**: `(offset here, offset there, tokens)`, or several such
stretches at equal distances where ranks share tokens. There is a table per span: regular ones are made when the peer is
first met, others when a request needs them. The remote strides come from an untrusted peer, so the cost of a table is
counted before it is made.

An example: one local rank holds 8 heads of 128 elements of 2 bytes, one remote rank 4 of these; a kernel block is 16
tokens. With tokens within heads, the 4 heads are 4 x 16 x 128 x 2 = 16 KiB, one row. With heads within tokens they are
contiguous only within one token, 1 KiB, which takes 16 rows. A staged table (`staging`) has 1 row, of all 16 KiB.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.errors import LayoutError
from asynckv.geometry.bounds import MAX_DESCRIPTORS, Int32s, Int64s
from asynckv.geometry.layout import TOKEN, Group, Layout, Part, TokenShard, View
from asynckv.geometry.match import Share
from asynckv.geometry.staging import Box, ReadCosts, Run, runs
from asynckv.geometry.strides import count_descriptors, step_along, strided_descriptors

# The cost of an untrusted peer's layout is bounded step by step:
#
#     tokens until blocks begin anew  MAX_PERIOD    where ranks share tokens, before any is looked at
#     spans of two block sizes        MAX_KINDS     before they are listed, or after, where ranks share tokens
#     spans x shapes of parts         MAX_SHAPES    before any row is counted
#     rows of all regular tables      MAX_ROWS      counted before any is made; later for each table by itself
#     tables made beforehand          MAX_REGULAR   none for a pair of groups that has more of them
#     tables kept, and their rows     MAX_TABLES, MAX_KEPT_ROWS    after each plan

MAX_TABLES = 1024  # most tables kept per peer; the least recently used go first
MAX_PERIOD = 65_536  # most tokens after which both sides' shared blocks begin anew, of all pairs of groups together
MAX_KINDS = 1024  # most kinds of spans of two block sizes; sizes that share boundaries too rarely are refused
MAX_SHAPES = 4096  # most kinds of spans times shapes of parts, because the strides come from an untrusted peer
MAX_REGULAR = 64  # most tables that are made for a pair of groups before any request needs them
MAX_ROWS = 1 << 18  # most rows of all tables made for a peer beforehand, and of one made later: these take 50 ms
MAX_KEPT_ROWS = 4 * MAX_ROWS  # most rows of all tables kept per peer, some 70 MB
WARN_ROWS = 8  # rows per layer beyond which the operator is warned of small pieces
WARN_OVER = 3  # bytes read for each that is needed, from which on the operator is warned
MOST_WHOLE = 1.5  # time that runs of packed copies may take if they are read whole, relative to the best other way
SMALL_PIECE = 4096  # bytes below which a descriptor costs more: over UCX 1 KiB took 5 us and 16 KiB 9 us
SHARES = "equal shares of tokens, or a greater interleave,"
_NO_BOXES: Int32s = np.zeros(0, np.int32)


class Span(NamedTuple):
    """Stretches of tokens inside one local and one remote kernel block; or a whole state, of 0 tokens.

    Offsets and steps count the tokens that each rank holds.
    """

    group: int
    remote_group: int
    local_offset: int
    remote_offset: int
    tokens: int  # of one stretch
    count: int = 1  # type: ignore[assignment]  # number of stretches: several only where ranks share tokens
    local_step: int = 0  # from one stretch to the next
    remote_step: int = 0


class Cuts(NamedTuple):
    """The tokens that two ranks have in common, cut at the kernel blocks of both."""

    token: Int64s  # int64 `[cuts]`: the first token
    local: Int64s  # int64 `[cuts]`: kernel block, counted from the one with token 0
    remote: Int64s
    spans: Int64s  # int64 `[fields of a span without its groups, cuts]`


@dataclass(frozen=True, slots=True, eq=False)
class DescTable:
    """The descriptors of one span, on both sides; row `i` of block `b` is descriptor `i * blocks + b`."""

    table_id: int  # unique among all tables of this rank, because two peers may be one process under two addresses
    span: Span  # the tokens of two kernel blocks that it is for
    length: Int64s  # bytes per descriptor, int64 `[rows]`
    local: Int64s  # int64 `[rows, 3]`: index of the memory, byte offset of block 0 in it, stride
    remote: Int64s
    local_blocks: int  # kernel blocks that every row can index
    remote_blocks: int
    boxes: tuple[Box, ...] = ()  # of a staged table: how pieces of a row lie, the first at its place in `local`
    box_of: Int32s = field(default_factory=lambda: _NO_BOXES)  # int32 `[rows]`: its box
    pack_bytes: int = 0  # most bytes of a packed copy, if the owner is asked for them; `row_bytes` lie densely here
    row_bytes: Int64s = field(init=False)  # int64 `[rows]`: bytes that are wanted
    num_rows: int = field(init=False)  # descriptors per pair of kernel blocks
    block_bytes: int = field(init=False)  # bytes that are read per pair of kernel blocks, wanted or not
    placed_bytes: int = field(init=False)  # bytes that are wanted per pair of kernel blocks
    dense: npt.NDArray[np.bool_] = field(init=False)  # rows that NIXL merges, because consecutive blocks touch
    num_dense: int = field(init=False)
    local_index: Int32s = field(init=False)  # int32 `[rows, 1]`: index of every row's block 0
    remote_index: Int32s = field(init=False)

    def __post_init__(self) -> None:
        rows = np.arange(len(self.length), dtype=np.int32)[:, None]
        wanted = np.array([box.num_bytes for box in self.boxes])[self.box_of] if self.boxes else self.length
        dense = self.remote[:, 2] == self.length
        if self.pack_bytes:  # in a packed copy the pieces of consecutive blocks always touch, as runs do in a slot
            dense = self.local[:, 2] == wanted
        elif not self.boxes:
            dense &= self.local[:, 2] == self.length
        for name, value in (
            ("num_rows", len(self.length)),
            ("block_bytes", int(self.length.sum())),
            ("row_bytes", wanted),
            ("placed_bytes", int(wanted.sum())),
            ("dense", dense),
            ("num_dense", int(np.count_nonzero(dense))),
            ("local_index", rows * np.int32(self.local_blocks)),
            ("remote_index", rows * np.int32(self.remote_blocks)),
        ):
            object.__setattr__(self, name, value)

    def box(self, row: int) -> Box:
        return self.boxes[int(self.box_of[row])]


class GroupPair:
    """A group of ours and one of theirs that share layers, with all facts that the pairing of their blocks needs."""

    def __init__(
        self,
        local_index: int,
        remote_index: int,
        local: Group,
        remote: Group,
        entry: int,
        shards: tuple[TokenShard, TokenShard] = (TokenShard(0), TokenShard(0)),
    ) -> None:
        self.local_index, self.remote_index = local_index, remote_index
        self.local, self.remote = local, remote
        self.shards = mine, theirs = shards
        self.is_shared = mine.size > 1 or theirs.size > 1
        self.entry = entry  # the first token read must be a multiple of it, because a scale's entry is read whole
        self.local_size, self.remote_size = local.kernel_size, remote.kernel_size  # in tokens
        self.remote_blocks = remote.num_kernel_blocks  # kernel blocks of the remote group
        self.held = self.local_size // mine.size, self.remote_size // theirs.size  # tokens of a kernel block
        self.unit = self.held  # tokens of what is addressed as a block (`divide`)
        self.whole = Span(local_index, remote_index, 0, 0, self.held[0] if local.kind == "tokens" else 0)
        # Equal for ranks with the same pairs of blocks.
        self.key: tuple[object, ...] = (local_index, remote_index, remote, entry, theirs)

    @property
    def units(self) -> tuple[int, int]:
        """Number of units in each kernel block, here and there."""
        return self.held[0] // self.unit[0], self.held[1] // self.unit[1]

    def divide(self, here: bool, there: bool) -> None:
        """Address units of kernel blocks as blocks, so that cuts that differ only in their place are of one span.

        Fewer tables, longer reads and fewer packed copies follow. An example: our rank holds every eighth token, in
        blocks of 64, and theirs all, in blocks of 64. Eight of their blocks fill one of ours, each another eighth.

        Args:
            here, there: True if the blocks of our rank, or of theirs, follow one another as their tokens do.
        """
        *offsets, tokens, count, mine, theirs = self.regular.spans
        # A recipe names blocks of the owner. So theirs are divided only if there is nothing to gather in them.
        there = there and bool(((count == 1) | (theirs == tokens)).all())
        units = []
        for can, offset, step, held in zip((here, there), offsets, (mine, theirs), self.held, strict=True):
            unit = int(np.gcd.reduce(np.append(offset - offset[0], held)))
            # Each cut must lie in one unit. `_cut` sees to that for the first and the last tokens of a request.
            units.append(unit if can and (offset % unit + (count - 1) * step + tokens <= unit).all() else held)
        self.unit = units[0], units[1]
        self.key = (*self.key, self.unit)

    def cuts(self, first: int, end: int) -> Cuts:
        """Cut the tokens `first ... end - 1` that both ranks hold, where ranks share tokens."""
        period, regular = self.period, self.regular
        begin, stop = -(-first // period), end // period
        if begin >= stop:
            return self._cut(first, end)
        turns = np.arange(begin, stop, dtype=np.int64)[:, None]
        steps = period, period // self.local_size, period // self.remote_size
        whole = [(turns * step + each).ravel() for step, each in zip(steps, regular, strict=False)]
        found = [Cuts._make([*whole, np.tile(regular.spans, len(turns))])]
        found += [self._cut(*edge) for edge in ((first, begin * period), (stop * period, end)) if edge[0] < edge[1]]
        return Cuts._make([np.concatenate(each, axis=-1) for each in zip(*found, strict=True)])

    @cached_property
    def period(self) -> int:
        """The number of tokens after which the blocks of both ranks begin anew."""
        period = 1
        for group, shard in zip((self.local, self.remote), self.shards, strict=True):
            is_fine = group.kernel_size // shard.size % shard.interleave == 0
            period = math.lcm(period, group.kernel_size if is_fine else group.block_size)
        return period

    @cached_property
    def regular(self) -> Cuts:
        """The cuts of one period."""
        return self._cut(0, self.period)

    def _cut(self, first: int, end: int) -> Cuts:
        tokens = np.arange(first, end, dtype=np.int64)
        mine, theirs = self.shards
        tokens = tokens[mine.holds(tokens) & theirs.holds(tokens)]
        local, here = np.divmod(mine.place(tokens), self.held[0])
        remote, there = np.divmod(theirs.place(tokens), self.held[1])
        # First tokens that follow one another on both sides are joined to stretches, then stretches of equal length and
        # distance to spans.
        rows = np.stack((tokens, local, remote, here // self.unit[0], there // self.unit[1], here, there))
        steps = np.diff(rows, prepend=rows[:, :1] - 2)
        rows, lengths = _joined(rows, ~((steps[1:5] == 0).all(axis=0) & (steps[5:] == 1).all(axis=0)))
        steps = np.diff(rows, prepend=rows[:, :1])
        follows = (steps[1:5] == 0).all(axis=0) & (np.diff(lengths, prepend=0) == 0)
        follows[1:] &= ~follows[:-1] | (steps[5:, 1:] == steps[5:, :-1]).all(axis=0)
        after = np.append(steps[5:, 1:], np.zeros((2, 1), np.int64), axis=1)[:, : len(lengths)]
        rows, counts = _joined(np.concatenate((rows, lengths[None], after)), ~follows)
        return Cuts._make([*rows[:3], np.stack((*rows[5:8], counts, *np.where(counts > 1, rows[8:], 0)))])


def _joined(rows: Int64s, begins: npt.NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Return the columns of `rows` at which something begins, and the number of columns up to the next of them."""
    heads = np.flatnonzero(begins)
    return rows[:, heads], np.diff(heads, append=len(begins))


class PeerTables:
    """The mapping of all that is read of one remote rank to our memory; made once per peer.

    Args:
        ids: Source of table ids for all peers.
        costs: Costs of the data plane's reads; None if it stages none.
        pack_bytes: Most bytes of a packed copy that the remote rank makes; 0 if it makes none.

    Raises:
        LayoutError: The two memory orders would need too many descriptors.
    """

    def __init__(
        self,
        local: Layout,
        remote: Layout,
        shares: Sequence[Share],
        ids: Iterator[int],
        costs: ReadCosts | None = None,
        pack_bytes: int = 0,
    ) -> None:
        self.local = local
        self.remote = remote
        self._costs, self._pack_bytes = costs, pack_bytes
        pairs: dict[tuple[int, int], list[Share]] = {}
        for share in shares:
            pairs.setdefault((share.local_view.group, share.remote_view.group), []).append(share)
        self._layers = {pair: len({s.local_view.layer for s in shares}) for pair, shares in pairs.items()}
        self._tables: OrderedDict[Span, DescTable] = OrderedDict()
        self._num_kept_rows = 0
        self.is_full = False
        self._ids = ids
        self.warnings: list[str] = []
        self.group_pairs = tuple(
            GroupPair(
                *(a, b, local.groups[a], remote.groups[b]),
                math.lcm(*(_entry(s, local.groups[a]) for s in shares)),
                (local.shard(a), remote.shard(b)),
            )
            for (a, b), shares in pairs.items()
        )
        self._pairs = dict(zip(pairs, self.group_pairs, strict=True))
        shared = [pair for pair in self.group_pairs if pair.is_shared]
        if (tokens := sum([pair.period for pair in shared])) > MAX_PERIOD:
            raise LayoutError(
                f"groups {[pair.local_index for pair in shared][:8]}, which ranks share by token, have blocks of "
                f"{[pair.local.block_size for pair in shared][:8]} tokens here and "
                f"{[pair.remote.block_size for pair in shared][:8]} there, which begin together only every {tokens} "
                f"tokens in all, more than {MAX_PERIOD}; use block sizes with a common factor"
            )
        for key, pair in self._pairs.items():
            if pair.is_shared:
                here = all(_is_dense(share.local_view, share.local_part) for share in pairs[key])
                there = all(_is_dense(share.remote_view, share.remote_part) for share in pairs[key])
                pair.divide(here, there)
        self._alike = {key: _sort_alike(pairs[key], pair.units) for key, pair in self._pairs.items()}
        spans = [span for pair in self.group_pairs for span in self._regular_spans(pair)]
        if (rows := sum(map(self._num_rows, spans))) > MAX_ROWS:
            raise LayoutError(
                f"{rows} pieces would be needed for {len(spans)} kinds of cuts, more than {MAX_ROWS}; use the same "
                f"memory order and block size on both sides"
            )
        kinds = Counter(span[:2] for span in spans)
        self.regular = [self.table(span) for span in spans if kinds[span[:2]] <= MAX_REGULAR]  # of aligned requests
        largest = {table.span[:2]: table for table in sorted(self.regular, key=lambda table: table.num_rows)}
        for table in largest.values():
            self._warn(table)

    def _regular_spans(self, pair: GroupPair) -> list[Span]:
        if pair.local.kind == "state":
            return [pair.whole]
        group, local_size, remote_size, period = pair.local_index, pair.local_size, pair.remote_size, pair.period
        if pair.is_shared:
            here, there, *others = pair.regular.spans
            cuts = np.unique((here % pair.unit[0], there % pair.unit[1], *others), axis=1).T.tolist()
            count = len(cuts)
        else:
            count = period // local_size + period // remote_size
        if count > MAX_KINDS:
            raise LayoutError(
                f"group {group}: kernel blocks of {local_size} tokens here and {remote_size} there share a boundary "
                f"only every {period} tokens, which makes more than {MAX_KINDS} kinds of cuts; use sizes with a common "
                f"factor"
            )
        if not pair.is_shared:
            starts = sorted({*range(0, period, local_size), *range(0, period, remote_size)})
            both = pairwise([*starts, period])
            cuts = list(dict.fromkeys((start % local_size, start % remote_size, end - start) for start, end in both))
        kinds = [Span(group, pair.remote_index, *cut) for cut in cuts]
        shapes = len(self._alike[group, pair.remote_index])
        if len(kinds) * shapes > MAX_SHAPES:
            raise LayoutError(
                f"group {group}: kernel blocks of {local_size} tokens here and {remote_size} there make {len(kinds)} "
                f"kinds of cuts of {shapes} differently shaped parts, more than {MAX_SHAPES} in all; use one memory "
                f"order for all layers, or block sizes with a common factor"
            )
        return kinds

    def _warn(self, table: DescTable) -> None:
        pair, layers = self._pairs[table.span[:2]], self._layers[table.span[:2]]
        num_bytes = float(table.length.mean()) if table.num_rows else 0.0
        is_read_whole = table.boxes and not table.pack_bytes
        if is_read_whole and (over := table.block_bytes / table.placed_bytes) >= WARN_OVER:
            why = "a sharded dim lies within tokens; heads before tokens (hnd) on the prefill side, or equal TP sizes,"
            if pair.is_shared:
                why = f"tokens of other ranks lie between; {SHARES}"
            self.warnings.append(
                f"group {table.span.group}: {over:.1f} bytes are read for each byte that is needed, because {why} "
                f"avoid that"
            )
        if table.num_rows > WARN_ROWS * layers and num_bytes < SMALL_PIECE:
            differ, remedy = "TP sizes, memory orders or block sizes", "heads before tokens (hnd) and equal block sizes"
            if pair.is_shared:
                differ, remedy = "Shares of tokens, memory orders or block sizes", SHARES
            elif pair.local.kind == "state":
                remedy = "the same order, with the dim that TP cuts first,"
            self.warnings.append(
                f"group {table.span.group} is read in pieces of {num_bytes:,.0f} bytes, "
                f"{table.num_rows / layers:.0f} per block and layer; pieces below {SMALL_PIECE:,} bytes are slow. "
                f"{differ} differ; {remedy} on both sides make few and large ones"
                + ("" if self._costs else "; with KV in host memory, posting threads and staging_bytes stage them")
            )

    def shares(self, pair: GroupPair) -> list[Share]:
        """Return what is read of a pair of groups, sorted into parts that are alike."""
        return [share for kind in self._alike[pair.local_index, pair.remote_index] for share in kind.shares]

    def rows_by_share(self, pair: GroupPair, span: Span) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield direct rows of parts that are alike, and so of one length, and of each the index of its share. Parts
        of which the span has no whole entry are left out.
        """
        first = 0
        for kind in self._alike[span.group, span.remote_group]:
            rows, end = kind.rows(span), first + len(kind.shares)
            if kind.has_entry(span, pair.whole):
                yield rows, np.repeat(np.arange(first, end), len(rows) // len(kind.shares))
            first = end

    def table(self, span: Span) -> DescTable:
        if (table := self._tables.get(span)) is not None:
            self._tables.move_to_end(span)
            return table
        table = self._tables[span] = self._compile(span)
        self._keep(table.num_rows)
        return table

    def _keep(self, num_rows: int) -> None:
        self._num_kept_rows += num_rows
        self.is_full = len(self._tables) > MAX_TABLES or self._num_kept_rows > MAX_KEPT_ROWS

    def evict(self) -> list[DescTable]:
        """Forget tables beyond the limits, the least recently used first, and return them. Plans hold their own."""
        kept, out = {table.table_id for table in self.regular}, []
        for table in [table for table in self._tables.values() if table.table_id not in kept]:
            if not self.is_full:
                break
            del self._tables[table.span]
            self._keep(-table.num_rows)
            out.append(table)
        return out

    def _num_rows(self, span: Span) -> int:
        return sum(len(kind.places) * kind.num_rows(span) for kind in self._alike[span.group, span.remote_group])

    def _compile(self, span: Span) -> DescTable:
        pair = span.group, span.remote_group
        count = self._num_rows(span)
        units = self._pairs[pair].units
        local_blocks = self.local.groups[span.group].num_kernel_blocks * units[0]
        remote_blocks = self.remote.groups[span.remote_group].num_kernel_blocks * units[1]
        if count > MAX_ROWS or count * max(local_blocks, remote_blocks) > MAX_DESCRIPTORS:
            raise LayoutError(
                f"group {span.group}: {count} pieces per kernel block x {max(local_blocks, remote_blocks)} blocks are "
                f"more than {MAX_ROWS} pieces or int32 descriptor indices; use the same memory order on both sides, or "
                f"declare fewer blocks"
            )
        kinds = self._alike[pair]
        rows = _merge(np.concatenate([kind.rows(span) for kind in kinds]))
        pack_bytes = self._pack_bytes if units[1] == 1 else 0  # a recipe names whole blocks
        staged = _stage(kinds, span, self._costs, rows, pack_bytes) if self._costs is not None else None
        rows, boxes, box_of, pack_bytes = staged or (rows, (), _NO_BOXES, 0)
        sides = rows[:, 0:3], rows[:, 3:6], local_blocks, remote_blocks
        return DescTable(next(self._ids), span, rows[:, 6], *sides, boxes, box_of, pack_bytes)


_Staged = tuple[Int64s, tuple[Box, ...], Int32s, int]  # rows, boxes, the box of each row, bytes of a packed copy


def _stage(kinds: Sequence[_Alike], span: Span, costs: ReadCosts, direct: Int64s, pack_bytes: int) -> _Staged | None:
    """Return the cheapest runs, by length; None if direct rows cost no more, or there are no runs."""
    dense = int(np.count_nonzero((direct[:, (2, 5)] == direct[:, 6:7]).all(axis=1)))
    least, found, packed = costs.of(len(direct), dense, int(direct[:, 6].sum())), [], 0
    for most in (0, pack_bytes) if pack_bytes else (0,):
        runs = [best for kind in kinds if (best := kind.cheapest_run(span, costs, most)) is not None]
        if len(runs) < len(kinds) or (seconds := sum([seconds for seconds, _ in runs])) >= least:
            continue
        # Without a copy, as after a refusal, the same runs are read whole.
        whole = sum([kind.seconds(run, costs) for kind, (_, run) in zip(kinds, runs, strict=True)])
        if not most or whole <= MOST_WHOLE * least:
            least, found, packed = seconds, runs, most
    if not found:
        return None
    each = [kind.run_rows(span, run) for kind, (_, run) in zip(kinds, found, strict=True)]
    rows, box_of = np.concatenate(each), np.repeat(np.arange(len(each), dtype=np.int32), [len(x) for x in each])
    order = np.argsort(rows[:, 6], kind="stable")
    boxes = tuple([run.box for _, run in found])
    return rows[order], boxes, box_of[order], packed


def _entry(share: Share, group: Group) -> int:
    return share.local_part.tokens_per_entry if share.local_part.has_tokens else group.kernel_size


class _Shape(NamedTuple):
    """The shape of parts that fall into the same descriptors; there are few shapes, because layers are much alike."""

    itemsize: int
    tokens_per_entry: int
    dims: tuple[tuple[int, int, int], ...]  # `(entries, local stride, remote stride)`, tokens left out
    token: tuple[int, int]  # byte strides along the tokens, local and remote; 0, 0 for a part without that dim
    around: tuple[int, int]  # bytes of the remote part's sharded dim before and after the slice that is read


class _Alike:
    def __init__(self, shape: _Shape, places: Int64s, shares: Sequence[Share]) -> None:
        self._shape, self.shares = shape, shares
        self.places = places  # rows `[local memory, offset, stride, remote memory, offset, stride]`

    def _dims(self, span: Span) -> list[tuple[int, int, int]]:
        _, each, dims, token, _ = self._shape
        if not any(token):
            return list(dims)
        stretches = span.count, span.local_step // each * token[0], span.remote_step // each * token[1]
        return [*dims, (span.tokens // each, *token), stretches]

    def has_entry(self, span: Span, whole: Span) -> bool:
        return span.tokens >= self._shape.tokens_per_entry if any(self._shape.token) else span == whole

    def num_rows(self, span: Span) -> int:
        return count_descriptors(self._shape.itemsize, self._dims(span))

    def rows(self, span: Span) -> Int64s:
        """Return rows `[local memory, offset, stride, remote memory, offset, stride, length]` of one span."""
        return self._rows(span, *strided_descriptors(self._shape.itemsize, self._dims(span)))

    def cheapest_run(self, span: Span, costs: ReadCosts, pack_bytes: int) -> tuple[float, Run] | None:
        """Return the best way to read these parts in runs, and the seconds that it takes per pair of blocks.

        Args:
            pack_bytes: Most bytes of a packed copy, for runs of packed copies: what is wanted of a run lies densely
                here. 0: for runs that are read whole.
        """
        number, strides = len(self.places), self.places[:, 5]
        most = min(costs.slot_bytes, int(strides.min()))  # no run may reach into another block
        found = []
        for run in runs(self._shape.itemsize, self._dims(span), self._shape.around, most):
            rows, wanted = number * run.number, run.box.num_bytes
            if not pack_bytes:
                found.append((self.seconds(run, costs), run))
            elif wanted <= pack_bytes and (box := run.box.in_local_order()) is not None:
                dense = run.number * int(np.count_nonzero(self.places[:, 2] == wanted))
                found.append((costs.packed(rows, dense, rows * wanted, rows * run.placed), run._replace(box=box)))
        return min(found, key=lambda each: each[0], default=None)

    def seconds(self, run: Run, costs: ReadCosts) -> float:
        """Return the seconds per pair of blocks of reading these parts in whole runs."""
        rows, dense = len(self.places) * run.number, run.number * int(np.count_nonzero(self.places[:, 5] == run.length))
        return costs.of(rows, dense, rows * run.length, rows * run.placed)

    def run_rows(self, span: Span, run: Run) -> Int64s:
        """Return rows like those of `rows`, of runs; `local` is the place of the first piece."""
        in_local, in_remote = step_along(run.outer)
        return self._rows(span, in_local, in_remote - run.box.skip, run.length)

    def _rows(self, span: Span, in_local: Int64s, in_remote: Int64s, length: int) -> Int64s:
        each, (local_stride, remote_stride) = self._shape.tokens_per_entry, self._shape.token
        rows = np.empty((len(self.places), len(in_local), 7), np.int64)
        rows[:, :, :6] = self.places[:, None, :]
        rows[:, :, 1] += in_local + span.local_offset // each * local_stride
        rows[:, :, 4] += in_remote + span.remote_offset // each * remote_stride
        rows[:, :, 6] = length
        return rows.reshape(-1, 7)


def _is_dense(view: View, part: Part) -> bool:
    """Return True if kernel blocks follow one another as their tokens do, so that some of these are like a block."""
    return any(dim.name == TOKEN and dim.size * dim.stride == view.stride for dim in part.dims)


def _sort_alike(shares: Sequence[Share], units: tuple[int, int]) -> list[_Alike]:
    """Sort shares by shape; `units` of each kernel block, here and there, are addressed as blocks."""
    found: dict[_Shape, list[tuple[tuple[int, ...], Share]]] = {}
    for share in shares:
        local_view, remote_view, local, remote, lo, hi = share
        twins = {d.name: d for d in remote.dims}
        local_start, remote_start = local_view.offset + local.offset, remote_view.offset + remote.offset
        dims, token, around = [], (0, 0), (0, 0)
        for dim in local.dims:
            # The other side may leave out a dim of one entry.
            twin, size = twins.get(dim.name, dim), dim.size
            if dim.name == TOKEN:
                token = (dim.stride, twin.stride)
                continue
            if dim.name == local.axis:
                local_start += (lo - local.held[0]) * dim.stride
                around = (lo - remote.held[0]) * twin.stride, (remote.held[1] - hi) * twin.stride
                remote_start += around[0]
                size = hi - lo
            if size > 1:
                dims.append((size, dim.stride, twin.stride))
        shape = _Shape(local.itemsize, local.tokens_per_entry, tuple(dims), token, around)
        place = (
            *(local_view.memory, local_start, local_view.stride // units[0]),
            *(remote_view.memory, remote_start, remote_view.stride // units[1]),
        )
        found.setdefault(shape, []).append((place, share))
    return [
        _Alike(shape, np.array([x for x, _ in some], np.int64), [x for _, x in some]) for shape, some in found.items()
    ]


def _merge(rows: Int64s) -> Int64s:
    """Join rows that continue each other on both sides, also across parts and layers."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 2], rows[:, 0]))]
    row, following = rows[:-1], rows[1:]
    same = (row[:, (0, 2, 3, 5)] == following[:, (0, 2, 3, 5)]).all(axis=1)
    joined = same & (row[:, 1] + row[:, 6] == following[:, 1]) & (row[:, 4] + row[:, 6] == following[:, 4])
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    out = rows[heads].copy()
    out[:, 6] = np.add.reduceat(rows[:, 6], heads)
    return out
