"""What a second look compares, for any two layouts: judged by arrays, and by an oracle that knows nothing of plans."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from asynckv.geometry.look import (
    MAX_PIECES,
    PLACE_BYTES,
    Difference,
    Differing,
    Look,
    differing,
    first_difference,
    looks,
)
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import plan_read
from asynckv.geometry.tables import PeerTables
from tests import oracle
from tests.oracle import PACK_BYTES, PACKED, Bytes, Cache, Engine, GroupSpec, Int64s, LayerSpec, Lists, PartSpec, Rank
from tests.test_geometry import allocate, attention, is_covered
from tests.test_token_shards import pairs, ranks_of

Ends = list[Int64s]
NOWHERE, STATE = -1, 0
MOST_EXPANDED = 1 << 16  # bytes of a look whose ranges are judged byte by byte


def ends(rank: Rank, lists: Lists) -> Ends:
    """Return for every byte of a rank the token at which its entry ends; `STATE` for states, else `NOWHERE`."""
    out = [np.full(len(array), NOWHERE, np.int64) for array in rank.arrays]
    for _, view, part, spec in rank.each():
        group, (first, ids) = rank.layout.groups[view.group], lists[view.group]
        for number, block in enumerate(ids, first // group.block_size):
            if block is None:
                continue
            if group.kind == "state":
                at = rank.places(view, part, spec, block)[..., None] + np.arange(part.itemsize)
                out[view.memory][at.ravel()] = STATE
                continue
            tokens = rank.slots(view.group)
            each, rows = spec.entry or group.kernel_size, len(tokens) // group.ratio
            for kernel in range(group.ratio):
                places = rank.places(view, part, spec, block * group.ratio + kernel)
                for token, place in zip(tokens[kernel * rows : (kernel + 1) * rows : each], places, strict=True):
                    at = place[..., None] + np.arange(part.itemsize)
                    out[view.memory][at.ravel()] = number * group.block_size + token + each
    return out


class Read:
    """A read of one rank's blocks that has been made, and all looks at it."""

    def __init__(
        self, prefill: Engine, local: Rank, mine: Lists, theirs: Lists, tokens: int, wanted: int, remotes: list[Rank]
    ) -> None:
        cache = Cache(prefill.layers, 11)
        for remote in remotes:
            oracle.fill(remote, theirs, cache, tokens)
        self.local, self.wanted = local, wanted
        self.ends = ends(local, mine)
        self.lists = BlockLists(oracle.arrays(mine), oracle.offers(theirs), wanted, tokens)
        self.written = [np.zeros(len(array), np.bool_) for array in local.arrays]
        self.tables = list[tuple[PeerTables, PeerTables, Rank, Ends]]()
        found = zip(oracle.maps(local, remotes), oracle.maps(local, remotes, PACKED, PACK_BYTES), remotes, strict=True)
        for direct, packed, remote in found:
            if direct is not None and packed is not None:
                oracle.execute(plan_read(direct, self.lists), local, remote, self.written, (1 << 20, 512))
                self.tables.append((direct, packed, remote, ends(remote, theirs)))

    def looks(self, tables: PeerTables, most: int | None = None, seed: int = 0) -> list[Look]:
        return list(looks(tables, self.lists, most, seed))

    def found(self, tables: PeerTables, remote: Rank) -> list[tuple[Look, Difference]]:
        """Return what all looks at a rank find."""
        made = [(look, first_difference(bytes_of(look, self.local, remote))) for look in self.looks(tables)]
        return [(look, difference) for look, difference in made if difference is not None]


def bytes_of(look: Look, local: Rank, remote: Rank) -> list[tuple[Bytes, Bytes]]:
    """Return the bytes that a look compares, and see that they lie in memory, and fit into a place."""
    out = []
    for memory, offset, far, behind, length, *_ in look.pieces.tolist():
        assert 0 <= offset < offset + length <= len(local.arrays[memory])
        assert 0 <= behind < behind + length <= len(remote.arrays[far])
        out.append((local.arrays[memory][offset : offset + length], remote.arrays[far][behind : behind + length]))
    assert look.num_bytes == sum(len(mine) for mine, _ in out) <= PLACE_BYTES
    assert 1 <= look.num_descriptors <= MAX_PIECES
    for side in (0, 2) if look.num_bytes <= MOST_EXPANDED else ():
        every, joined = (
            [(memory, at) for memory, begin, length in some.tolist() for at in range(begin, begin + length)]
            for some in (look.pieces[:, (side, side + 1, 4)], look.ranges(side))
        )
        assert every == joined
    return out


def check(read: Read, rng: np.random.Generator) -> None:
    seen = [np.zeros(len(array), np.int64) for array in read.local.arrays]
    for direct, packed, remote, far_ends in read.tables:
        whole = read.looks(direct)
        for look, same in zip(whole, read.looks(packed), strict=True):
            assert (look.pieces == same.pieces).all(), "it depends on how the blocks were read first"
        assert read.found(direct, remote) == []
        reached = list[tuple[int, int, int, Differing]]()
        for look in whole:
            for number, (memory, offset, far, behind, length, *_) in enumerate(look.pieces.tolist()):
                seen[memory][offset : offset + length] += 1
                there = far_ends[far][behind : behind + length]
                assert ((there > NOWHERE) & (there <= read.wanted)).all(), "a byte of the owner's that may change"
                said = differing(direct, read.lists, look, Difference(number, b"", b""))
                reached.append((far, behind, length, said))
                of = read.ends[memory][offset : offset + length]
                if of[0] != STATE:
                    assert said.first_token < of.min() <= of.max() <= said.first_token + said.num_tokens
        if reached:
            far, behind, length, said = reached[rng.integers(len(reached))]
            at = behind + int(rng.integers(length))
            remote.arrays[far][at] ^= 0x40
            ((look, difference),) = read.found(direct, remote)
            assert differing(direct, read.lists, look, difference)[:4] == said[:4]
            remote.arrays[far][at] ^= 0x40
        check_sample(read, direct, whole, remote, int(rng.choice([1, 100, 700, 5000])))
    for count, wrote, end in zip(seen, read.written, read.ends, strict=True):
        assert (count == (wrote & (end > NOWHERE) & (end <= read.wanted))).all(), "not each byte is compared once"


def by_share(made: Sequence[Look]) -> dict[tuple[Any, int], list[list[int]]]:
    out = defaultdict(list)
    for look in made:
        for piece in look.pieces.tolist():
            out[look.pair, piece[5]].append(piece)
    return out


def check_sample(read: Read, tables: PeerTables, whole: Sequence[Look], remote: Rank, most: int) -> None:
    """See that a sample has the last tokens of every part, is about as large as it may be, and is drawn by seed."""
    sample, again = read.looks(tables, most, 3), read.looks(tables, most, 3)
    assert all((look.pieces == same.pieces).all() for look, same in zip(sample, again, strict=True))
    assert all((mine == theirs).all() for look in sample for mine, theirs in bytes_of(look, read.local, remote))
    parts, drawn = by_share(whole), by_share(sample)
    assert parts.keys() == drawn.keys()
    for key, pieces in parts.items():
        last, chosen = (
            max(int(read.ends[memory][at : at + length].max()) for memory, at, _, _, length, *_ in some)
            for some in (pieces, drawn[key])
        )
        assert chosen == last, "the last tokens of a part are left out"
    largest = max((piece[4] for some in parts.values() for piece in some), default=0)
    size = sum(look.num_bytes for look in sample)
    assert size <= max(2 * most, 64 * len(parts)) + 256 * largest


def reading(pair: dict[str, Any]) -> Read | None:
    (prefill, decode), tokens, rng = pair["engines"], pair["tokens"], np.random.default_rng(pair["seed"])
    theirs = allocate(prefill, tokens, rng, [pair["lent_from"]] * len(prefill.groups), lean=pair["lean"][0])
    mine = allocate(decode, tokens, rng, pair["cached"], lean=pair["lean"][1])
    local = Rank(decode, *pair["rank"])
    remotes = ranks_of(prefill, local)
    if not local.layout.views or not is_covered(local, remotes):
        return None
    return Read(prefill, local, mine, theirs, tokens, pair["wanted"], remotes)


@given(pair=pairs())
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_looks_compare_each_byte_of_the_wanted_tokens_once_and_no_other(pair: dict[str, Any]) -> None:
    if (read := reading(pair)) is not None:
        check(read, np.random.default_rng(pair["seed"]))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(pair=pairs())
@settings(
    max_examples=int(os.environ.get("ASYNCKV_PAIRS", 600)), suppress_health_check=[HealthCheck.too_slow], deadline=None
)
def test_looks_compare_each_byte_of_the_wanted_tokens_once_in_very_many_pairs(pair: dict[str, Any]) -> None:
    if (read := reading(pair)) is not None:
        check(read, np.random.default_rng(pair["seed"]))


def read_of(
    layers: tuple[LayerSpec, ...],
    sizes: Sequence[Any],
    tokens: int,
    cached: int = 0,
    tp: tuple[int, int] = (1, 1),
    order: Sequence[str] = (),
    num_blocks: int = 48,
) -> Read:
    """Read a request of one group, with blocks of a size and a ratio per side, into its first rank."""
    orders = {part.name: order for layer in layers for part in layer.parts} if order else {}
    prefill, decode = (
        Engine(
            layers,
            (GroupSpec(tuple(range(len(layers))), size[0], size[1], num_blocks),),
            each,
            seed=number,
            orders=orders,
        )
        for number, (size, each) in enumerate(zip(sizes, tp, strict=True))
    )
    rng = np.random.default_rng(tokens)
    theirs, mine = (
        allocate(each, tokens, rng, [first], lean=False) for each, first in ((prefill, 0), (decode, cached))
    )
    local = Rank(decode, 0)
    return Read(prefill, local, mine, theirs, tokens, tokens, ranks_of(prefill, local))


ORDER = ("token", "head", "dim")
MIXED = LayerSpec(
    "mixed",
    (
        PartSpec("k", (("head", 4), ("dim", 2)), "head"),
        PartSpec("scale", (("head", 4),), "head", 4, 4),
        PartSpec("opaque", (("dim", 5),), itemsize=1, entry=0),
    ),
)


@pytest.mark.parametrize("cached", [0, 8, 16])
@pytest.mark.parametrize("sizes", [((8, 1), (8, 1)), ((16, 2), (8, 1)), ((8, 1), (24, 3))], ids=str)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_each_part_is_compared_up_to_its_own_last_whole_entry(sizes: Any, cached: int, tp: tuple[int, int]) -> None:
    """A part without tokens is compared where its kernel block is full, and keeps no other part from being compared."""
    for tokens in {cached + 1, cached + 4, 20, 23, 24, 29, 32} - set(range(cached + 1)):
        read = read_of((MIXED, LayerSpec("other", MIXED.parts)), sizes, tokens, cached, tp)
        check(read, np.random.default_rng(tokens))
        tables = read.tables[0][0]
        parts = {tables.shares(pair)[index].local_part.name for pair, index in by_share(read.looks(tables))}
        last = tokens - tokens % 8 > cached, tokens - tokens % 4 > cached
        assert parts == {"k", *["opaque"][: last[0]], *["scale"][: last[1]]}


@pytest.mark.parametrize("most", [None, 1, 1 << 20, 5 << 20])
def test_a_piece_that_is_larger_than_a_place_is_cut(most: int | None) -> None:
    state = PartSpec("ssm", (("head", 4), ("dim", 1 << 17), ("state", 7)), "head", 1)
    read = read_of(
        (LayerSpec("ssm", (state,), "state"),), [(4, 1), (4, 1)], 7, order=("head", "dim", "state"), num_blocks=2
    )
    made = read.looks(read.tables[0][0], most)
    assert all(
        (mine == theirs).all() for look in made for mine, theirs in bytes_of(look, read.local, read.tables[0][2])
    )
    assert sum(look.num_bytes for look in made) == 4 * 7 << 17 if most is None else len(made) >= 1


@pytest.mark.parametrize("most", [1 << 14, 1 << 16, 1 << 18, 3 << 20])
@pytest.mark.parametrize("dim", [8, 256], ids="dim of {}".format)
def test_a_sample_is_about_as_large_as_it_may_be(most: int, dim: int) -> None:
    """Unless its pieces are small: of these no more are read than a post takes half a millisecond for."""
    layers = tuple(attention(4, f"l{i}", dim=dim) for i in range(4))
    read = read_of(layers, [(16, 1), (16, 1)], 700, order=ORDER)
    total = sum(look.num_bytes for look in read.looks(read.tables[0][0]))
    assert total == 700 * 4 * 2 * 4 * dim * 2
    size = sum(look.num_bytes for look in read.looks(read.tables[0][0], most))
    if dim == 256 and most < total:
        assert 0.45 < size / most < 1.25
    else:
        assert 64 * 8 <= size <= total


def test_bytes_are_drawn_from_everywhere() -> None:
    read = read_of((attention(4, dim=64),), [(16, 1), (16, 1)], 300, order=ORDER)
    seen = [np.zeros(len(array), np.bool_) for array in read.local.arrays]
    for seed in range(150):
        for look in read.looks(read.tables[0][0], 20_000, seed):
            for memory, offset, _, _, length, *_ in look.pieces.tolist():
                seen[memory][offset : offset + length] = True
    share = sum(int(each.sum()) for each in seen) / sum(int(each.sum()) for each in read.written)
    assert share > 0.9


def test_the_first_byte_that_differs_is_found_in_its_piece() -> None:
    rng = np.random.default_rng(1)
    ours = [rng.integers(0, 256, n, np.uint8) for n in (1, 40, 3, 500)]
    theirs = [each.copy() for each in ours]
    pieces = [(number, at) for number, each in enumerate(ours) for at in range(len(each))]
    assert first_difference(zip(ours, theirs, strict=True)) is None
    for piece, at in reversed(pieces):
        theirs[piece][at] ^= 1
        found = first_difference(zip(ours, theirs, strict=True))
        assert found == (piece, ours[piece][at : at + 16].tobytes(), theirs[piece][at : at + 16].tobytes())


@pytest.mark.parametrize(("cached", "ratio"), [(40, 1), (20, 2), (16, 4)])
def test_a_difference_names_the_tokens_of_its_kernel_block_whatever_was_cached(cached: int, ratio: int) -> None:
    read = read_of((attention(),), [(32, ratio), (32, ratio)], 75, cached)
    direct, _, remote, far_ends = read.tables[0]
    for token in range(cached, 75):
        at = int(np.flatnonzero(far_ends[0] == token + 1)[0])
        remote.arrays[0][at] ^= 1
        ((look, difference),) = read.found(direct, remote)
        said, kernel = differing(direct, read.lists, look, difference), 32 // ratio
        begin = token - token % kernel
        assert (said.layer, said.first_token) == ("attn", max(begin, cached))
        assert said.first_token + said.num_tokens == min(begin + kernel, 75)
        remote.arrays[0][at] ^= 1
