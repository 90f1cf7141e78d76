"""The second look: what a read has brought is read again, in part, from the lent blocks themselves, and compared.

A look names pieces, each a range of bytes here and one there. The data plane reads them into a *place* of its own and
compares them with ours, as bytes. The sample is drawn with the planner's pairs and descriptors, so for any two layouts.
It has a piece of every part, with the last tokens, because they are written last. Nothing beyond `num_tokens` is
compared, because the owner may write its next tokens there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.geometry.bounds import Int32s, Int64s
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.strides import joined
from asynckv.geometry.tables import GroupPair, PeerTables

PLACE_BYTES, NUM_PLACES = 1 << 20, 8
LEAST_BYTES = 64  # of a piece of a sample, if there are as many
RUNS, RUN = 32, 8  # runs of pieces that are drawn per place, and most pieces of one; those of consecutive blocks touch
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

    def ranges(self, side: int) -> Int64s:
        """Return int64 `[ranges, 3]`, memory, offset and length here (0) or there (2), joined where pieces touch."""
        return joined(self.pieces[:, (side, side + 1, 4)])


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
            f"part {self.part!r} of layer {self.layer!r}, tokens {self.first_token} to {last}: our block has "
            f"{self.read}, and the lent one {self.seen} at a second look"
        )


class _Strip(NamedTuple):
    """Pieces of one length: each row of parts that are alike, with each pair of blocks."""

    rows: Int64s  # int64 `[rows, 7]`: as tables have them
    shares: Int64s  # int64 `[rows]`: index of each row's share
    local: Int32s
    remote: Int32s
    offset: int  # tokens from the begin of a block of ours

    @property
    def length(self) -> int:
        return int(self.rows[0, 6])

    @property
    def num_pieces(self) -> int:
        return len(self.rows) * len(self.local)

    def pieces(self, number: Int64s, begin: Int64s | int, most: int) -> Int64s:
        """Return pieces by their numbers, at most `most` bytes of each, from `begin` on."""
        row, column = np.divmod(number, len(self.local))
        rows, pieces, mine = self.rows[row].T, np.empty((7, len(number)), np.int64), self.local[column]
        pieces[0], pieces[1] = rows[0], rows[1] + mine * rows[2] + begin
        pieces[2], pieces[3] = rows[3], rows[4] + self.remote[column] * rows[5] + begin
        pieces[4], pieces[5], pieces[6] = np.minimum(self.length - begin, most), self.shares[row], mine
        return pieces.T


def looks(
    tables: PeerTables,
    lists: BlockLists,
    most: int | None,
    seed: int,
    max_bytes: int = PLACE_BYTES,
    max_pieces: int = MAX_PIECES,
) -> Iterator[Look]:
    """Draw about `most` bytes of what is read of a rank, or take all of it, as looks of so many bytes and pieces."""
    strips = {
        pair: [
            _Strip(rows, shares, local, remote, span.local_offset)
            for span, local, remote in lists.pairs(tables, pair, is_exact=True)
            for rows, shares in tables.rows_by_share(pair, span)
        ]
        for pair in tables.group_pairs
    }
    sizes = {pair: sum(strip.num_pieces * strip.length for strip in some) for pair, some in strips.items()}
    total = sum(sizes.values())
    found = list[tuple[GroupPair, Iterable[Int64s]]]()
    for pair, some in strips.items():
        chosen: Iterable[Int64s] = itertools.chain.from_iterable(map(_all, some))
        if most is not None and some:
            part = min(most, total) * sizes[pair] // total
            runs = RUNS * -(-part // PLACE_BYTES)
            is_few = part == sizes[pair] and sum(strip.num_pieces for strip in some) <= MAX_PIECES
            chosen = [np.concatenate(list(chosen)) if is_few else _sample(pair, lists, some, part, runs, seed)]
        found.append((pair, chosen))
    budget = min(max_bytes, PLACE_BYTES), max_pieces
    return (look for pair, chosen in found for pieces in chosen for look in _in_places(pair, pieces, *budget))


def differing(tables: PeerTables, lists: BlockLists, look: Look, found: Difference) -> Differing:
    """Say where in the model a look differs."""
    *_, index, block = look.pieces[found.piece : found.piece + 1].T
    pair, share, group = look.pair, tables.shares(look.pair)[int(index[0])], look.pair.local
    place, units = int(_in_request(pair, lists, block)[0]), pair.units[0]
    # Where ranks share tokens, those of one kernel block are spread over the whole block.
    count, size = (group.ratio * units, group.block_size) if pair.is_shared else (units, group.kernel_size)
    listed = lists.local[pair.local_index][0]
    first = listed - listed % group.block_size + place // count * size
    begin, end = max(first, listed), min(first + size, lists.num_tokens)
    layer, part = share.local_view.layer, share.local_part.name
    return Differing(layer, part, begin, end - begin, found.here.hex(), found.there.hex())


def _in_request(pair: GroupPair, lists: BlockLists, local: Int32s | Int64s) -> Int64s:
    """Return the places in the request of blocks of ours, as tables index them."""
    per = pair.local.ratio * pair.units[0]
    return lists.places(pair.local_index)[local // per] * per + local % per


def _all(strip: _Strip) -> Iterator[Int64s]:
    for first in range(0, strip.num_pieces, MAX_PIECES):
        numbers = np.arange(first, min(first + MAX_PIECES, strip.num_pieces))
        for begin in range(0, strip.length, PLACE_BYTES):
            yield strip.pieces(numbers, begin, PLACE_BYTES)


def _sample(pair: GroupPair, lists: BlockLists, strips: Sequence[_Strip], most: int, runs: int, seed: int) -> Int64s:
    """Take the end of a piece of each share, which has the last tokens that are read of it, and draw runs of pieces."""
    last: dict[int, tuple[tuple[int, int], int, Int64s]] = {}  # by the first share of those that are alike
    for index, strip in enumerate(strips):
        places, share = _in_request(pair, lists, strip.local), int(strip.shares[0])
        at, rows = (int(places.max()), strip.offset), np.flatnonzero(np.append(np.diff(strip.shares), 1))
        if share not in last or at > last[share][0]:
            last[share] = at, index, rows * len(places) + places.argmax()
    ends = {index: numbers for _, index, numbers in last.values()}
    num_ends, rng, chosen = sum(map(len, ends.values())), np.random.default_rng(seed), []
    least = max(most // (num_ends + runs), LEAST_BYTES)
    left = most - sum(len(numbers) * min(strips[index].length, least) for index, numbers in ends.items())
    each = max(left // max(runs, 1), least)
    sizes = np.array([strip.num_pieces * strip.length for strip in strips])
    drawn = rng.multinomial(min(runs, max(left // each, 0)), sizes / sizes.sum())
    for index, (strip, count) in enumerate(zip(strips, drawn, strict=True)):
        slack, run = max(strip.length - each, 0), np.arange(max(min(each // strip.length, RUN), 1))
        begins = np.sort(rng.integers(strip.num_pieces, size=(count, 1)), axis=0)
        numbers = np.append(ends.get(index, ()), (begins + run) % strip.num_pieces).astype(np.int64)
        begin = rng.integers(slack + 1, size=len(numbers))
        begin[: len(ends.get(index, ()))] = max(strip.length - least, 0)
        chosen.append(strip.pieces(numbers, begin, each))
    return np.concatenate(chosen)


def _in_places(pair: GroupPair, pieces: Int64s, max_bytes: int, max_pieces: int) -> Iterator[Look]:
    """Divide pieces into looks that fit into a place. Only a look of a single piece may exceed `max_bytes`."""
    ends, first, before = np.cumsum(pieces[:, 4]), 0, 0
    while first < len(pieces):
        stop = int(np.searchsorted(ends, before + max_bytes, side="right"))
        stop = max(min(stop, first + max_pieces), first + 1)
        yield Look(pair, pieces[first:stop], int(ends[stop - 1]) - before)
        first, before = stop, int(ends[stop - 1])
