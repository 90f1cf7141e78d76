"""Pairs our blocks with the lent ones by the tokens that they cover, once per request.

Both sides give per group `(first token, blocks)`; the two lists are never matched by place. The wanted tokens are cut
at the kernel block boundaries of *both* sides. The tokens between two cuts are in one kernel block here and in one
there, at some offset in each: a `Span`. Blocks of one span go together into a `Pairs`. One pairing serves all remote
ranks with equal groups.

An example: our kernel blocks have 16 tokens, theirs 32. Tokens 40 to 99 are wanted; the first 40 are cached.

    tokens     32      40      48              64              80              96  100         112
    local      | 2             |       3       |       4       |       5       |       6       |
    remote     |               1               |               2               |       3
    spans              |8,8,8  |  0,16,16      |  0,0,16       |  0,16,16      |  0,0,16       |

*Tokens*: every wanted token of a given block is read, from the sliding window on if there is one. `_pair_aligned` is a
shortcut for the usual case. Where ranks share tokens, the wanted ones that both ranks hold are cut in the same way, but
their spans repeat, so `GroupPair.cuts` makes those of one period once. *States*: exactly one block is read, with the
state after the last wanted token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynckv.errors import PlanRefused, RemoteTooShort
from asynckv.geometry.blocks import BlockList, LentBlocks
from asynckv.geometry.bounds import NULL, BlockRuns, Int32s, Int64s
from asynckv.geometry.layout import Group, Layout
from asynckv.geometry.tables import GroupPair, PeerTables, Span


class Padding(NamedTuple):
    """Tokens of a local block that the pull did not fill, for the engine to zero or ignore.

    Attributes:
        group: Index of the cache group.
        block_id: Id of the block.
        first_token: The first of these tokens, counted from the begin of the block. Where ranks share tokens, this
            rank's own are counted.
        num_tokens: Number of these tokens.
    """

    group: int
    block_id: int
    first_token: int
    num_tokens: int


class Pairs(NamedTuple):
    span: Span
    local: Int32s
    remote: Int32s


class BlockLists:
    """The blocks of one request on both sides, and their pairs; made once, used for every remote rank.

    Args:
        local: Per group of ours, the first token to fill and the blocks. Nothing below `first_token` is written, and
            nothing is wanted where the list has a placeholder.
        offered_tokens: Number of tokens with lent KV; `num_tokens` if left out.
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
        self._lent = list(map(LentBlocks, remote))
        self._places: dict[int, Int64s] = {}
        self._pairs: dict[tuple[tuple[object, ...], bool], Sequence[Pairs]] = {}
        wanted = []
        for group, (first, ids) in enumerate(self.local):
            if first < num_tokens and len(ids) and (ids[0] != NULL or ids.max() > NULL):
                wanted.append(group)
        self.wanted = tuple(wanted)  # our groups with a block to fill
        self.is_empty = not wanted  # True if no block is to be filled: a full prefix hit

    def places(self, group: int) -> Int64s:
        """Return the place in our list of each block, by its id; the last is that of placeholders. Made once."""
        if (known := self._places.get(group)) is None:
            ids = self.local[group][1]
            known = self._places[group] = np.empty(int(ids.max()) + 2, np.int64)
            known[ids] = np.arange(len(ids))
        return known

    def pairs(self, tables: PeerTables, pair: GroupPair, *, is_exact: bool = False) -> Sequence[Pairs]:
        """Pair the blocks of two groups. `is_exact`: without tokens from `num_tokens` on."""
        is_exact = is_exact and self.num_tokens % pair.local_size != 0
        if (known := self._pairs.get((pair.key, is_exact))) is not None:
            return known
        if pair.local_index >= len(self.local) or pair.remote_index >= len(self._lent):
            raise PlanRefused(
                f"the request names {len(self.local)} local and {len(self._lent)} remote groups, but the layouts "
                f"have {len(tables.local.groups)} and {len(tables.remote.groups)}"
            )
        found = self._pair_states(pair) if pair.local.kind == "state" else self._pair_tokens(pair, is_exact)
        self._pairs[pair.key, is_exact] = found
        return found

    def padding(self, layout: Layout) -> Iterator[Padding]:
        """Yield the tokens of our blocks that are not filled, except states and tokens before a sliding window."""
        for index, (group, (first, ids)) in enumerate(zip(layout.groups, self.local, strict=False)):
            if group.kind == "state":
                continue
            size, place = group.block_size, first // group.block_size
            end = max(self.num_tokens, first)
            for i in range(max(end // size - place, 0), len(ids)):
                lo, held = max(end - (place + i) * size, 0), size
                if layout.token_shards:
                    shard = layout.shard(index)
                    lo, held = shard.count(lo), size // shard.size
                if ids[i] != NULL and lo < held:
                    yield Padding(index, int(ids[i]), lo, held - lo)

    def _pair_tokens(self, pair: GroupPair, is_exact: bool = False) -> Sequence[Pairs]:
        (listed, ids), lent = self.local[pair.local_index], self._lent[pair.remote_index]
        here, there, entry = pair.local, pair.remote, pair.entry
        mine, theirs = pair.local_size, pair.remote_size
        first = inside = listed
        if here.window:
            first, inside = self._window(pair, listed, lent.first_token)
        end = min((listed // here.block_size + len(ids)) * here.block_size, self.num_tokens)
        if first >= end:
            return ()
        if first % entry:
            raise PlanRefused(
                f"group {pair.local_index} ({here.name!r}): the first token {first} is inside an entry that covers "
                f"{entry} tokens, which can only be read whole; begin at token {first - first % entry}"
            )
        is_cut = is_exact and end % mine != 0
        if mine == theirs and not is_cut and not pair.is_shared and (aligned := self._pair_aligned(pair, first, end)):
            return aligned
        if pair.is_shared:
            start, kernel, source, spans = pair.cuts(first, end if is_exact else -(-end // entry) * entry)
        else:
            # A last, partial kernel block is read to its end where both sides have one.
            whole = end if is_exact else min(-(-end // mine) * mine, -(-end // theirs) * theirs)
            start = _cuts(first, whole, mine, theirs)
            start, tokens = start[:-1], np.diff(start)
            kernel, source = start // mine, start // theirs
            spans = np.stack((start - kernel * mine, start - source * theirs, tokens))
        at = ids[kernel // here.ratio - listed // here.block_size]
        if (at == NULL).any():
            chosen = at != NULL
            start, kernel, source, spans, at = _chosen(chosen, start, kernel, source, spans, at)
        if not len(at):
            return ()
        if (least := int(start.min())) < lent.first_token:
            raise self._too_short(pair, least, f"lent from token {lent.first_token} on")
        block = lent.lookup(source // there.ratio - lent.first_token // there.block_size)
        block[block == there.null_block] = NULL
        if here.window and block.min() == NULL:
            # Tokens before the window are read only to fill whole blocks, so they may be missing on the other side.
            # Of several stretches the last counts. A group with a window is whole here, so its steps count all tokens.
            reach = spans[2] + ((spans[3] - 1) * spans[4] if pair.is_shared else 0)
            needed = (block != NULL) | (np.minimum(start + reach, self.num_tokens) > inside)
            start, kernel, source, spans, at, block = _chosen(needed, start, kernel, source, spans, at, block)
        if not len(block):
            return ()
        if (absent := np.flatnonzero(block == NULL)).size:
            raise self._too_short(
                pair,
                int(start[absent[0]]),
                f"{lent.num_blocks} blocks of {there.block_size} from token "
                f"{lent.first_token} on were lent, with {lent.num_null} placeholders among them",
            )
        if int(block.max()) >= there.num_blocks:
            raise _no_such_block(pair, int(block.max()))
        local, remote = at * here.ratio + kernel % here.ratio, block * there.ratio + source % there.ratio
        if pair.unit != pair.held:
            local, remote = (
                block * units + offset // unit
                for block, units, offset, unit in zip((local, remote), pair.units, spans, pair.unit, strict=False)
            )
            spans[:2] %= np.array(pair.unit)[:, None]
        return tuple(_by_span(pair, spans, local, remote))

    def _window(self, pair: GroupPair, listed: int, lent_from: int) -> tuple[int, int]:
        """Return the first token that is read of a group with a sliding window, and the first that is needed."""
        # `inside` is the first token that is needed: a window of 1,024 at token 5,000 begins at 3,977. The read begins
        # earlier if those tokens were lent. `wider` is one token earlier, for an engine that computes the last token
        # again (vLLM does after a full hit). `whole` is the start of its block, which makes fewer kinds of spans, and
        # fills no block in part, because an engine's prefix cache also gives that block to a prompt that ends sooner.
        inside = max(0, self.num_tokens - pair.local.window + 1)
        wider = max(0, inside - 1)
        whole = wider - wider % pair.local.block_size
        wider -= wider % (pair.local_size if pair.local_size == pair.remote_size else pair.entry)
        if inside < self.num_tokens:  # not for a window of one token, which needs no earlier token
            inside -= inside % pair.entry
        inside = max(listed, inside)
        for first in (whole, wider):
            if max(first, listed) >= lent_from:
                return max(listed, first), inside
        return inside, inside

    def _pair_aligned(self, pair: GroupPair, first: int, end: int) -> Sequence[Pairs]:
        """Pair kernel blocks one to one if both sides have one size and none is missing; else return nothing."""
        (listed, ids), lent, size = self.local[pair.local_index], self._lent[pair.remote_index], pair.local_size
        here = pair.local
        begin, stop = first // size, -(-end // size)
        theirs = lent.kernel_blocks(first, begin, stop, pair.remote)
        if theirs is None:
            return ()
        if here.ratio > 1:
            ids = (ids[:, None] * here.ratio + np.arange(here.ratio)).ravel()
        skipped = begin - listed // here.block_size * here.ratio
        mine = ids[skipped : skipped + stop - begin].astype(np.int32)
        # The `reduce` of a ufunc is used, because numpy's functions and `min` are several Python calls each.
        if np.minimum.reduce(mine) <= NULL:
            return ()
        if (most := int(theirs[-1] if lent.is_one_run else np.maximum.reduce(theirs))) >= pair.remote_blocks:
            raise _no_such_block(pair, most // pair.remote.ratio)
        partly = []
        if head := first % size:
            partly.append(
                Pairs(Span(pair.local_index, pair.remote_index, head, head, size - head), mine[:1], theirs[:1])
            )
            mine, theirs = mine[1:], theirs[1:]
            if not len(mine):
                return partly
        if not lent.is_one_run:
            order = theirs.argsort(kind="stable")
            mine, theirs = mine[order], theirs[order]
        return [Pairs(pair.whole, mine, theirs), *partly]

    def _pair_states(self, pair: GroupPair) -> Sequence[Pairs]:
        (first, ids), lent, tokens = self.local[pair.local_index], self._lent[pair.remote_index], self.num_tokens
        here, there = pair.local, pair.remote
        if first >= tokens or not len(ids) or ids.max() == NULL:
            return ()
        at = _state_place(here, first, tokens)
        if not at < len(ids) or ids[at] == NULL:
            what = "a placeholder" if at < len(ids) else f"beyond the {len(ids)} that were given"
            raise PlanRefused(
                f"group {pair.local_index} ({here.name!r}): the state after {tokens} tokens belongs in place {at} "
                f"of the list from token {first} on ({here.block_size} tokens per state), which is {what}; give a "
                f"block there"
            )
        if tokens < self.offered_tokens and tokens % there.block_size:
            raise self._too_short(pair, tokens, f"states are kept every {there.block_size} tokens only")
        place = _state_place(there, lent.first_token, tokens)
        block = int(lent.lookup(np.array([place]))[0])
        if block in (NULL, there.null_block):
            raise self._too_short(pair, tokens - 1, f"no state was lent in place {place} of {lent.num_blocks}")
        if block >= there.num_blocks:
            raise _no_such_block(pair, block)
        return (Pairs(pair.whole, np.array([ids[at]], np.int32), np.array([block], np.int32)),)

    def _too_short(self, pair: GroupPair, token: int, what: str) -> RemoteTooShort:
        thing = "the state after" if pair.local.kind == "state" else "KV from"
        return RemoteTooShort(
            f"remote too short: group {pair.local_index} ({pair.local.name!r}) needs {thing} token {token} on of "
            f"{self.num_tokens}, but the prefill side does not offer it: {what}"
        )


def _state_place(group: Group, first: int, tokens: int) -> int:
    return (tokens - 1) // group.block_size - first // group.block_size


def _no_such_block(pair: GroupPair, block: int) -> PlanRefused:
    return PlanRefused(
        f"group {pair.local_index} ({pair.local.name!r}): the prefill side names block {block}, but declared "
        f"{pair.remote.num_blocks} blocks"
    )


def _cuts(first: int, end: int, mine: int, theirs: int) -> Int64s:
    """Return the tokens at which blocks of either size begin, with both ends of all that is read."""
    edges = np.arange(first // mine + 1, -(-end // mine), dtype=np.int64) * mine
    if mine != theirs:
        edges = np.union1d(edges, np.arange(first // theirs + 1, -(-end // theirs), dtype=np.int64) * theirs)
    return np.concatenate(([first], edges, [end]))


def _chosen(columns: npt.NDArray[np.bool_], *arrays: Int64s) -> list[Int64s]:
    return [array[..., columns] for array in arrays]


def _by_span(pair: GroupPair, spans: Int64s, local: Int64s, remote: Int64s) -> Iterator[Pairs]:
    mine, theirs = local.astype(np.int32), remote.astype(np.int32)
    if (spans == spans[:, :1]).all():
        kinds = [np.arange(len(mine))]
    else:
        order = np.lexsort(spans[::-1])
        ordered = spans[:, order]
        kinds = np.split(order, np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1)
    for chosen in kinds:
        ascending = chosen[np.argsort(theirs[chosen], kind="stable")]
        span = Span(pair.local_index, pair.remote_index, *spans[:, chosen[0]].tolist())
        yield Pairs(span, mine[ascending], theirs[ascending])


def common_prefix(local: Sequence[str], remote: Sequence[str], hash_tokens: int, num_tokens: int) -> int:
    """Return the number of tokens at the start of a prompt on which two chains of hashes agree.

    Every hash covers all tokens before it as well. Tokens after the last whole hash are counted on trust if both chains
    are the same, but not if one chain is longer.
    """
    same = next(
        (i for i, (a, b) in enumerate(zip(local, remote, strict=False)) if a != b), min(len(local), len(remote))
    )
    whole = same == len(local) == len(remote) and num_tokens - same * hash_tokens < hash_tokens
    return num_tokens if whole else min(same * hash_tokens, num_tokens)
