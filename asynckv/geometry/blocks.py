"""Lists of block ids from engines: checked, as arrays to compute with, and as runs to send.

An engine gives a list, with `None` or its own `null_block` where there is no block. Our lists become arrays with `NULL`
there. Lent lists cross the wire as runs `(first id, count)` (`BlockRuns`) and are never expanded: `LentBlocks` looks
places up. No id outside a group ever becomes an address.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from asynckv.arguments import NO_SEQUENCE, shown
from asynckv.errors import LayoutError, PlanRefused
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_DESCRIPTORS, MAX_TOKENS, NULL, BlockRuns, Int32s, Int64s
from asynckv.geometry.layout import Group, Layout

BlockIds = Sequence[int | None] | npt.NDArray[np.integer]  # block ids as an engine gives them
BlockList = tuple[int, Int64s]  # first token, and the ids of our blocks from the one on that holds it
SHORT = 160  # lists up to about this length are checked id by id, which is faster than as an array
FEW = 40  # the same for writing them as runs
PlainIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]  # msgspec checks it at 4 ns per id


def as_block_ids(ids: BlockIds, null_block: int = NULL) -> Int64s:
    """Return block ids as an array, with `NULL` in place of `None` and of the engine's `null_block`."""
    plain = _plain_ids(ids)
    out = np.fromiter(plain, np.int64, len(plain)) if plain is not None else _checked_ids(ids)
    if null_block != NULL:
        out[out == null_block] = NULL
    return out


def _checked_ids(ids: BlockIds) -> Int64s:
    """Return any ids as an array, with `NULL` in place of `None`."""
    is_flat = isinstance(ids, Sequence) or hasattr(ids, "__array__")
    if not is_flat or isinstance(ids, NO_SEQUENCE):
        raise LayoutError(f"block ids are {shown(ids)}; give a flat list of integers")
    if isinstance(ids, list | tuple) and bool in set(map(type, ids)):
        raise LayoutError("block ids hold a bool; give a flat list of integers")
    try:
        array = np.asarray(ids)
        if array.dtype == object:
            array = np.asarray([NULL if b is None else b for b in ids])
            nulls = np.asarray([b is None for b in ids])
        else:
            nulls = np.zeros(array.shape, np.bool_)
    except (ValueError, OverflowError, TypeError):
        raise LayoutError("block ids must be a flat list of integers") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise LayoutError("block ids must be a flat list of integers")
    if (bad := np.flatnonzero(((array < 0) & ~nulls) | (array > MAX_BLOCK_ID))).size:
        raise LayoutError(
            f"block id {int(array[bad[0]])} is not one from 0 to {MAX_BLOCK_ID}; give None for a place without a block"
        )
    return array.astype(np.int64)


def _plain_ids(ids: object) -> list[int] | None:
    """Return a list of plain ids unchanged; None if an entry is a placeholder or anything else."""
    try:
        return msgspec.convert(ids, PlainIds) if isinstance(ids, list | tuple) else None
    except msgspec.ValidationError:
        return None


def runs_of(block_ids: BlockIds, null_block: int = NULL) -> tuple[tuple[int, int], ...]:
    """Return block ids as `(first, count)` runs of consecutive ids or of placeholders, in the same order.

    >>> runs_of([None, None, 7, 8, 9, 3, 5, 6])
    ((-1, 2), (7, 3), (3, 1), (5, 2))
    """
    if isinstance(block_ids, list | tuple) and len(block_ids) <= FEW:
        few = _few_runs(block_ids, null_block)
        if few is not None:
            return few
    ids = as_block_ids(block_ids, null_block)
    if len(ids) == 0:
        return ()
    a, b = ids[:-1], ids[1:]
    cut = b - a != 1
    if ids.min() == NULL:
        cut = np.where((a == NULL) | (b == NULL), a != b, cut)
    starts = np.flatnonzero(cut) + 1
    counts: Iterable[int]
    if len(starts) == len(ids) - 1:
        firsts, counts = ids.tolist(), repeat(1)
    else:
        starts = np.concatenate(([0], starts))
        firsts, counts = ids[starts].tolist(), np.diff(starts, append=len(ids)).tolist()
    # A list is made first, because every garbage collection would scan a growing tuple meanwhile.
    return tuple(list(zip(firsts, counts)))  # noqa: B905, C414


def _few_runs(block_ids: Sequence[object], null_block: int) -> tuple[tuple[int, int], ...] | None:
    """Return the same as `runs_of`, id by id; None if an entry is neither a plain id nor None."""
    runs: list[tuple[int, int]] = []
    first, count, following = NULL, 0, NULL
    for given in block_ids:
        if type(given) is int and 0 <= given <= MAX_BLOCK_ID:
            block = NULL if given == null_block else given
        elif given is None:
            block = NULL
        else:
            return None
        if count and block == following:
            count += 1
        else:
            if count:
                runs.append((first, count))
            first, count = block, 1
        following = block if block == NULL else block + 1
    if count:
        runs.append((first, count))
    return tuple(runs)


def as_columns(runs: Sequence[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    flat = np.fromiter(chain.from_iterable(runs), np.int64, 2 * len(runs))
    return flat[::2], flat[1::2]


def expanded(first: Int64s, count: Int64s) -> Int64s:
    """Return the ids of runs without placeholders; bound the sum of the counts first."""
    ends = np.cumsum(count)
    return np.repeat(first - (ends - count), count) + np.arange(int(count.sum()), dtype=np.int64)


def check_block_ids(
    layout: Layout, groups: Sequence[tuple[int, BlockIds]], num_tokens: int | None = None
) -> tuple[BlockList, ...]:
    """Refuse block lists that do not fit our own layout; return them as arrays, with `NULL` for placeholders.

    Args:
        groups: Per group, the first token, and the blocks from the one on that holds it.
        num_tokens: Number of tokens that a list with any block has to reach.
    """
    pairs: list[tuple[Any, Any]] = []
    try:
        for first, ids in groups:
            pairs.append((first, ids))
    except (TypeError, ValueError):
        raise PlanRefused(f"groups is {shown(groups)}; give one (first_token, block_ids) per group") from None
    if len(pairs) != len(layout.groups):
        raise PlanRefused(
            f"{len(pairs)} groups of blocks were given, but the layout has {len(layout.groups)} "
            f"({', '.join(repr(g.name) for g in layout.groups)}); give one (first_token, block_ids) per group"
        )
    out = []
    for index, (group, (first, ids)) in enumerate(zip(layout.groups, pairs, strict=True)):
        try:
            begin = operator.index(first)
        except TypeError:
            begin = -1
        if isinstance(first, bool) or not 0 <= begin <= MAX_TOKENS:
            text = f"first_token {shown(first)} is not a number from 0 to {MAX_TOKENS}"
            raise PlanRefused(f"{_named(index, group)}: {text}")
        if (
            isinstance(ids, list | tuple)
            and 0 < len(ids) <= SHORT
            and set(map(type, ids)) == {int}
            and min(ids) >= 0
            and max(ids) < group.num_blocks
            and len(set(ids)) == len(ids)
            and group.null_block not in ids
        ):  # a short list of different, existing block ids and nothing else needs no further check
            array = np.array(ids, np.int64)
        else:
            try:
                array = as_block_ids(ids, group.null_block)
            except LayoutError as exc:
                raise PlanRefused(f"{_named(index, group)}: {exc}") from None
            check_blocks(_named(index, group), group, array)
        end = (begin // group.block_size + len(array)) * group.block_size
        if num_tokens is not None and len(array) and end < num_tokens:
            raise PlanRefused(
                f"{_named(index, group)}: {len(array)} blocks of {group.block_size} tokens from token {begin} on end "
                f"at token {end}, but {num_tokens} are wanted; give all blocks (None where nothing is wanted), or a "
                f"smaller num_tokens"
            )
        out.append((begin, array))
    return tuple(out)


def _named(index: int, group: Group) -> str:
    return f"group {index} ({group.name!r})"


def check_covers(
    where: str, group: Group, offer: BlockRuns, num_tokens: int, columns: tuple[Int64s, Int64s] | None = None
) -> None:
    """Refuse a lent list that ends before its declared number of tokens; states may end anywhere."""
    first, counts = columns or as_columns(offer.runs)
    if group.kind == "state" or group.window == 1 or not (first != NULL).any():
        return
    count = int(counts.sum())
    end = (offer.first_token // group.block_size + count) * group.block_size
    if end < num_tokens:
        raise PlanRefused(
            f"{where}: {count} blocks of {group.block_size} tokens from token {offer.first_token} on end at token "
            f"{end}, but num_tokens is {num_tokens}; give make_params all blocks, or as many tokens as they hold"
        )


def check_blocks(where: str, group: Group, ids: Int64s) -> None:
    """Refuse block ids outside a group, or given twice, with a `PlanRefused` that names the id."""
    real = ids[ids != NULL]
    if not len(real):
        return
    if group.null_block != NULL and (real == group.null_block).any():
        raise PlanRefused(
            f"{where}: names block {group.null_block}, which is its placeholder; give None there, or null_block to "
            f"PrefillRanks"
        )
    if (most := int(real.max())) >= group.num_blocks:
        raise PlanRefused(f"{where}: block id {most} is outside [0, {group.num_blocks}), the declared num_blocks")
    ordered = np.sort(real)
    if (twice := np.flatnonzero(ordered[1:] == ordered[:-1])).size:
        raise PlanRefused(f"{where}: block id {int(ordered[twice[0]])} is given twice")


class LentBlocks:
    """The blocks that a prefill rank lends in one group, as runs that are never expanded."""

    def __init__(self, lent: BlockRuns) -> None:
        self.first_token = lent.first_token
        self._runs = lent.runs
        self.is_one_run = len(lent.runs) == 1  # True if ids ascend from each block to the next

    def kernel_blocks(self, first: int, begin: int, stop: int, group: Group) -> Int32s | None:
        """Return the ids of kernel blocks `begin ... stop - 1` of the prompt, or None if one of them is not lent."""
        if first < self.first_token:
            return None
        ratio = group.ratio
        place = self.first_token // group.block_size
        if self.is_one_run:
            block, count = self._runs[0]
            inside = begin >= place * ratio and stop <= (place + count) * ratio
            if not inside or block == NULL or block <= group.null_block < block + count:
                return None
            shift = (block - place) * ratio
            if shift + stop > MAX_DESCRIPTORS:
                return None
            return np.arange(shift + begin, shift + stop, dtype=np.int32)
        kernel = np.arange(begin, stop, dtype=np.int64)
        blocks = self.lookup(kernel // ratio - place)
        if np.minimum.reduce(blocks) == NULL or (group.null_block != NULL and (blocks == group.null_block).any()):
            return None
        out = blocks * ratio + kernel % ratio
        return None if np.maximum.reduce(out) > MAX_DESCRIPTORS else out.astype(np.int32)

    @cached_property
    def _index(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return per run its first id, the place behind its last block, and the number to add to a place for its id."""
        first, count = as_columns(self._runs)
        ends = np.add.accumulate(count)
        return first, ends, first + count - ends

    @property
    def num_blocks(self) -> int:
        return sum([count for _, count in self._runs])

    @property
    def num_null(self) -> int:
        return sum([count for first, count in self._runs if first == NULL])

    def lookup(self, places: Int64s) -> Int64s:
        """Return the block ids at places of the list; `NULL` at placeholders and outside of it."""
        if not self._runs:
            return np.full(len(places), NULL, np.int64)
        first, ends, shift = self._index
        run = ends.searchsorted(places, side="right")
        outside = (places < 0) | (run >= len(ends))
        run[outside] = 0
        block: Int64s = shift[run] + places
        block[outside | (first[run] == NULL)] = NULL
        return block
