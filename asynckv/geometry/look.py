"""The second look: what a read has brought is read again, in part, from the lent blocks themselves, and compared.

A look names pieces, each a range of bytes here and one there. The data plane reads them into a *place* of its own and
compares them with ours, as bytes. The sample is drawn with the planner's pairs and descriptors, so for any two layouts.
It has a piece of every part, with the last tokens, because they are written last. Nothing beyond `num_tokens` is
compared, because the owner may write its next tokens there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.geometry.bounds import Int32s, Int64s
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.tables import GroupPair, PeerTables

PLACE_BYTES, NUM_PLACES = 1 << 20, 8
PIECE_BYTES, LEAST_BYTES = 16 << 10, 64  # of a piece that is drawn, and of one that stands for its part
MAX_DRAWN = 256  # pieces that are drawn: so many descriptors take about half a millisecond
MAX_PIECES = 2048  # of one look
SHOWN = 16  # bytes of a difference that people see


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Pieces of one group to read into a place, one behind the other, and to compare."""

    table: ClassVar[None] = None  # of a `ReadRequest`, beside which looks are posted
    is_staged: ClassVar[bool] = False
    pair: GroupPair
    pieces: Int64s
    """int64 `[pieces, 7]`: memory and offset here, memory and offset there, length; index among the pair's shares, and
    local block."""
    num_bytes: int
    place: int = -1  # the plane's place that it may use

    @property
    def num_descriptors(self) -> int:
        return len(self.pieces)

    @property
    def local(self) -> Int64s:
        return self.pieces


class Difference(NamedTuple):
    """The first bytes of a look that differ."""

    piece: int
    here: bytes
    there: bytes


def first_difference(pairs: Iterable[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> Difference | None:
    """Compare pairs of arrays of bytes."""
    for piece, (mine, theirs) in enumerate(pairs):
        if (at := np.flatnonzero(mine != theirs)).size:
            shown = slice(int(at[0]), int(at[0]) + SHOWN)
            return Difference(piece, mine[shown].tobytes(), theirs[shown].tobytes())
    return None


class Differing(NamedTuple):
    """The part of a layer in which bytes differ, and the tokens of their block. A state is after the last of them."""

    layer: str
    part: str
    first_token: int
    num_tokens: int
    read: str  # in hex
    seen: str

    def __str__(self) -> str:
        last = self.first_token + self.num_tokens - 1
        return (
            f"part {self.part!r} of layer {self.layer!r}, tokens {self.first_token} to {last}: {self.read} was read "
            f"first, and {self.seen} at a second look"
        )


class _Strip(NamedTuple):
    """Pieces of one length: each row of parts that are alike, with each pair of blocks."""

    rows: Int64s  # int64 `[rows, 7]`: as tables have them
    shares: Int64s  # int64 `[rows]`: index of each row's share
    local: Int32s
    remote: Int32s
    last: tuple[int, int]  # how far the last tokens reach into the request's last block, and their column

    @property
    def num_pieces(self) -> int:
        return len(self.rows) * len(self.local)

    @property
    def num_bytes(self) -> int:
        return self.num_pieces * int(self.rows[0, 6])

    def pieces(self, row: Int64s, column: Int64s, begin: Int64s | int = 0, most: int = PLACE_BYTES) -> Int64s:
        """Return some pieces, at most `most` bytes of each, from `begin` on."""
        rows, mine, theirs = self.rows[row], self.local[column].astype(np.int64), self.remote[column].astype(np.int64)
        here, there = rows[:, 1] + mine * rows[:, 2] + begin, rows[:, 4] + theirs * rows[:, 5] + begin
        lengths = np.minimum(rows[:, 6] - begin, most)
        return np.stack((rows[:, 0], here, rows[:, 3], there, lengths, self.shares[row], mine), axis=1)

    def all_pieces(self) -> Iterator[Int64s]:
        parts = range(0, int(self.rows[0, 6]), PLACE_BYTES)
        for begin in range(0, self.num_pieces, MAX_PIECES):
            column, row = np.divmod(np.arange(begin, min(begin + MAX_PIECES, self.num_pieces)), len(self.rows))
            yield from (self.pieces(row, column, part) for part in parts)


def looks(tables: PeerTables, lists: BlockLists, most: int | None, seed: int) -> Iterator[Look]:
    """Draw about `most` bytes of what is read of a rank, or take all of it, as looks."""
    strips, exact = dict[GroupPair, list[_Strip]](), lists.exact()
    for pair in tables.group_pairs:
        some = strips[pair] = list[_Strip]()
        for span, local, remote in exact.pairs(tables, pair):
            last = _last(exact, pair, span.local_offset, local)
            some += [_Strip(rows, shares, local, remote, last) for rows, shares in tables.rows_by_share(span)]
    all_strips = [strip for some in strips.values() for strip in some]
    num_bytes, rng = sum(strip.num_bytes for strip in all_strips), np.random.default_rng(seed)
    is_whole = most is None or (num_bytes <= most and sum(strip.num_pieces for strip in all_strips) <= MAX_DRAWN)
    for pair, some in strips.items():
        if most is None or is_whole:
            chosen: Iterator[Int64s] = (pieces for strip in some for pieces in strip.all_pieces())
        else:
            chosen = iter(
                [_sample(some, most * sum(strip.num_bytes for strip in some) // num_bytes, rng)] if some else ()
            )
        for pieces in chosen:
            yield from _in_places(pair, pieces)


def differing(tables: PeerTables, lists: BlockLists, look: Look, found: Difference) -> Differing:
    """Say where in the model a look differs."""
    *_, index, block = look.pieces[found.piece].tolist()
    pair, share, group = look.pair, tables.shares(look.pair)[index], look.pair.local
    (listed, ids), per = lists.local[pair.local_index], group.ratio * pair.units[0]
    first, size = int(np.flatnonzero(ids == block // per)[0]) * group.block_size, group.block_size
    if not pair.is_shared:
        first, size = first + block % per // pair.units[0] * group.kernel_size, group.kernel_size
    first += listed // size * size
    begin, end = max(first, listed), min(first + size, lists.num_tokens)
    layer, part = share.local_view.layer, share.local_part.name
    return Differing(layer, part, begin, end - begin, found.here.hex(), found.there.hex())


def _last(lists: BlockLists, pair: GroupPair, offset: int, local: Int32s) -> tuple[int, int]:
    (listed, ids), group, per = lists.local[pair.local_index], pair.local, pair.local.ratio * pair.units[0]
    at = min((lists.num_tokens - 1) // group.block_size - listed // group.block_size, len(ids) - 1)
    if not len(found := np.flatnonzero(local // per == ids[at])):
        return -1, 0
    column = int(found[np.argmax(local[found])])
    return int(local[column]) % per * pair.unit[0] + offset, column


def _sample(strips: Sequence[_Strip], most: int, rng: np.random.Generator) -> Int64s:
    """Take the end of a piece of each share, with the last tokens that there are of it, and draw others."""
    best: dict[int, _Strip] = {}  # by the first share of those that are alike
    for strip in strips:
        before = best.setdefault(int(strip.shares[0]), strip)
        if strip.last > before.last:
            best[int(strip.shares[0])] = strip
    ends = [np.flatnonzero(np.append(np.diff(strip.shares), 1)) for strip in best.values()]
    least, chosen = max(most // 2 // sum(map(len, ends)), LEAST_BYTES), []
    for strip, rows in zip(best.values(), ends, strict=True):
        columns = np.full(len(rows), strip.last[1])
        chosen.append(strip.pieces(rows, columns, max(int(strip.rows[0, 6]) - least, 0), least))
    left = most - sum(int(pieces[:, 4].sum()) for pieces in chosen)
    sizes = np.array([strip.num_bytes for strip in strips])
    each = np.minimum([int(strip.rows[0, 6]) for strip in strips], PIECE_BYTES)
    number = min(max(int(left / ((each * sizes).sum() / sizes.sum())), 0), MAX_DRAWN)
    for strip, count in zip(strips, rng.multinomial(number, sizes / sizes.sum()), strict=True):
        row, column = rng.integers(len(strip.rows), size=count), rng.integers(len(strip.local), size=count)
        begin = rng.integers(max(int(strip.rows[0, 6]) - PIECE_BYTES, 0) + 1, size=count)
        chosen.append(strip.pieces(row, column, begin, PIECE_BYTES))
    pieces = np.concatenate(chosen)
    return pieces[np.lexsort((pieces[:, 3], pieces[:, 2]))]  # NIXL merges pieces that touch


def _in_places(pair: GroupPair, pieces: Int64s) -> Iterator[Look]:
    """Divide pieces into looks that fit into a place."""
    ends, first, before = np.cumsum(pieces[:, 4]), 0, 0
    while first < len(pieces):
        stop = int(np.searchsorted(ends, before + PLACE_BYTES, side="right"))
        yield Look(pair, pieces[first:stop], int(ends[stop - 1]) - before)
        first, before = stop, int(ends[stop - 1])
