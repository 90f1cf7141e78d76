"""Where geometry ends: the last that is accepted, and the first that is refused."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from asynckv.errors import LayoutError, PlanRefused, RemoteTooShort
from asynckv.geometry import tables
from asynckv.geometry.bounds import NULL, BlockRuns, Int64s
from asynckv.geometry.check import check_layout
from asynckv.geometry.gather import Ranges, Recipe, check_recipe
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View, attention_view, shard
from asynckv.geometry.match import compare
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.tables import GroupPair, PeerTables, Span
from tests.world import Buffers, make_layout, peer_map

change = msgspec.structs.replace


# -- tables ------------------------------------------------------------------------------------------------


def test_block_sizes_make_at_most_so_many_kinds_of_cuts() -> None:
    """Sizes a and b without a common factor share a boundary every a * b tokens: a + b blocks."""
    assert tables.MAX_KINDS == 1024

    def sizes(here: int, there: int) -> None:
        ours, theirs = (make_layout(num_blocks=2, block_size=n, layers=1, base=n << 40) for n in (here, there))
        peer_map(ours, theirs)

    sizes(511, 513)
    for here, there in ((512, 513), (513, 512)):
        with pytest.raises(LayoutError, match=r"more than 1024 kinds of cuts"):
            sizes(here, there)


def scattered(blocks: int, pieces: int, base: int) -> Layout:
    """A layout with blocks that fall into so many pieces, because no element lies beside another."""
    dims = (Dim("token", 1, 8), Dim("head", 1, 8), Dim("dim", pieces, 8))
    part = Part("kv", "int8", 1, 0, dims)
    return Layout(
        memories=(Memory(base, 1 << 40),),
        groups=(Group("g", 1, blocks),),
        views=(View(0, 0, "l0", 0, 8 * pieces, (part,)),),
    )


MOST = (1 << 31) - 1


@pytest.mark.parametrize("large", [0, 1])
@pytest.mark.parametrize(("pieces", "blocks"), [(1, MOST), (2, MOST // 2)])
def test_descriptors_of_a_table_are_as_many_as_int32_can_index_on_either_side(
    large: int, pieces: int, blocks: int
) -> None:
    """An index beyond would wrap, and name another block's bytes."""

    def both(most: int) -> PeerTables:
        here, there = (scattered(most if side == large else 4, pieces, side << 44) for side in (0, 1))
        return peer_map(here, there)

    [table] = both(blocks).regular
    assert max(table.local_blocks, table.remote_blocks) * table.num_rows <= MOST
    with pytest.raises(LayoutError, match=rf"{pieces} pieces per kernel block x {blocks + 1} blocks .* int32"):
        both(blocks + 1)


def test_a_table_that_is_made_later_has_at_most_as_many_rows_as_all_that_are_made_at_once() -> None:
    """A whole block is one piece; a few of its tokens are one for every entry of the other dims."""

    def whole(parts: int, base: int) -> Layout:
        dims = (Dim("dim", 65_536, 4), Dim("token", 4, 1))
        views = [View(0, 0, f"l{i}", i << 20, 1 << 18, (Part("kv", "int8", 1, 0, dims),)) for i in range(parts)]
        return Layout(
            memories=(Memory(base, parts << 20),), groups=(Group("g", 4, 4),), views=tuple(views), model="toy"
        )

    assert tables.MAX_ROWS == 4 * 65_536
    few, many = (peer_map(whole(parts, 0), whole(parts, 1 << 44)) for parts in (4, 5))
    assert [table.num_rows for table in (*few.regular, *many.regular)] == [4, 5]
    assert few.table(Span(0, 0, 1, 1, 2)).num_rows == 4 * 65_536
    with pytest.raises(LayoutError, match="327680 pieces per kernel block x 4 blocks are more than 262144 pieces"):
        many.table(Span(0, 0, 1, 1, 2))


@pytest.mark.parametrize("apart", [0, 1])
def test_pieces_that_are_side_by_side_in_different_memories_are_two(apart: int) -> None:
    """Merged, the second would be read from, or written to, where something else lies."""

    def layout(base: int, is_apart: bool) -> Layout:
        dims = (Dim("token", 4, 2), Dim("dim", 2, 1))
        views = [View(i * is_apart, 0, f"l{i}", 8 * i, 16, (Part("kv", "int8", 1, 0, dims),)) for i in range(2)]
        memories = tuple(Memory(base + 1024 * i, 64) for i in range(1 + is_apart))
        made = Layout(memories=memories, groups=(Group("g", 4, 2),), views=tuple(views))
        check_layout(made)
        return made

    [table] = peer_map(*(layout(side << 40, side == apart) for side in (0, 1))).regular
    both: list[Any] = [[[0, 0, 16], [0, 8, 16]], [[0, 0, 16], [1, 8, 16]]]
    assert [table.local.tolist(), table.remote.tolist()] == [both[apart == 0], both[apart == 1]]
    [merged] = peer_map(layout(0, False), layout(1 << 40, False)).regular
    assert (merged.length.tolist(), merged.local.tolist()) == ([16], [[0, 0, 16]])


@pytest.mark.parametrize("step", [4, 8])
def test_a_recipe_of_pieces_in_the_gaps_of_other_blocks_reads_its_own_block_alone(step: int) -> None:
    """Every recipe of a few bytes is tried; at the start of the second memory lie bytes of no block."""
    found = meshed(3, (0, 4, 12), (1, step, 12))
    views = (*found.views, change(found.views[0], layer="l2", memory=1, offset=6))
    layout = change(found, views=views, memories=(Memory(0, 64), Memory(64, 64)))
    check_layout(layout)
    owners = np.full((2, 64), -1)
    for block in range(3):
        for memory, start, length in Buffers(layout, 0).block_spans(block):
            owners[memory, start : start + length] = block
    ranges, taken = Ranges(layout), 0
    shapes = [(), *(((size, by),) for size in (2, 3) for by in (1, 4, 8, 12))]
    for memory, offset, piece, dims in itertools.product((0, 1), range(40), (1, 2), shapes):
        asked = Recipe(0, ((piece, dims),), ((memory, offset, 0),), ((1, 1),))
        with contextlib.suppress(LayoutError):
            (row,) = check_recipe(asked, ranges, np.arange(3), 64).rows
            each = [offset + row[2] + sum(at) for at in itertools.product(*(range(0, n * by, by) for n, by in dims))]
            own = np.flatnonzero(owners[memory] == 1)
            for at in each:
                assert {*owners[memory, at : at + piece].tolist()} <= {-1, 1}, asked
                assert own[0] <= at <= at + piece - 1 <= own[-1], asked
            taken += 1
    assert taken > 6


# -- what layouts say --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("tp_rank", "tp_size"), ("pp_stage", "pp_size")])
def test_a_rank_and_a_stage_are_numbered_from_nought(name: str, size: str) -> None:
    check_layout(change(make_layout(), **{size: 2, name: 1}))
    with pytest.raises(LayoutError, match=f"{name} 2 is outside its group of {size} 2"):
        check_layout(change(make_layout(), **{size: 2, name: 2}))


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(0, 0, "tp_size is 0"), (2, 2, "tp_rank 2 is outside its group of tp_size 2"), (-1, 2, "tp_rank is -1")],
)
def test_a_share_is_of_a_rank_that_there_is(rank: int, size: int, message: str) -> None:
    assert shard(8, 0, 1) == (0, 8)
    with pytest.raises(LayoutError, match=message):
        shard(8, rank, size)


@pytest.mark.parametrize("size", [1, 3])
def test_keys_and_values_are_two(size: int) -> None:
    given: dict[str, Any] = {"layer": "l", "order": ("kv", "block", "token", "dim"), "dtype": "float16"}
    sizes = {"kv": 2, "block": 10, "token": 4, "dim": 8}
    attention_view(**given, sizes=sizes)
    with pytest.raises(LayoutError, match=rf"sizes\['kv'\] is {size}; it counts keys and values, so it is 2"):
        attention_view(**given, sizes={**sizes, "kv": size})


@pytest.mark.parametrize(("heads", "num_heads"), [((0, 1), 1), ((0, 4), 4)])
def test_what_every_rank_holds_whole_is_the_same_however_that_is_said(heads: tuple[int, int], num_heads: int) -> None:
    given: dict[str, Any] = {"layer": "l", "order": ("block", "token", "dim"), "dtype": "float16"}
    given["sizes"] = {"block": 10, "token": 4, "dim": 8}
    assert attention_view(**given, heads=heads, num_heads=num_heads) == attention_view(**given)


# -- what lies on what else --------------------------------------------------------------------------------


def meshed(blocks: int, *parts: tuple[int, int, int], size: int = 1) -> Layout:
    """Parts of three pieces of `size` bytes, each given by its offset, the step of its pieces, and its block stride."""
    views = [
        View(
            0,
            0,
            f"l{i}",
            offset,
            stride,
            (Part("k", "int8", 1, 0, (Dim("token", 1, 1), Dim("head", 3, step), Dim("dim", size, 1))),),
        )
        for i, (offset, step, stride) in enumerate(parts)
    ]
    return Layout(memories=(Memory(0, 1 << 20),), groups=(Group("g", 1, blocks),), views=tuple(views))


def test_of_a_single_block_the_stride_says_nothing() -> None:
    """Bytes 0, 4, 8 and 1, 6, 11: as blocks of 4 bytes they would lie on each other, but there is one block."""
    check_layout(meshed(1, (0, 4, 4), (1, 5, 4)))
    check_layout(meshed(1, (0, 4, 4), (1, 5, 6)))
    for made in (meshed(1, (0, 4, 4), (3, 5, 6)), meshed(1, (4, 16, 5), (5, 30, 5), size=4)):
        with pytest.raises(LayoutError, match="'l0' part 'k' and layer 'l1' part 'k' overlap"):
            check_layout(made)


@pytest.mark.parametrize("blocks", [2, 3])
def test_a_byte_of_the_next_block_is_found_however_few_blocks_there_are(blocks: int) -> None:
    """Pieces at 0, 4, 8 of each block of 12, and others that reach into the next block: into its gaps, or not."""
    check_layout(meshed(blocks, (0, 4, 12), (1, 5, 12)))
    check_layout(meshed(blocks, (0, 4, 12), (1, 8, 12)))
    check_layout(meshed(blocks, (0, 8, 24), (3, 9, 24), size=3))
    for made in (meshed(blocks, (0, 4, 12), (2, 5, 12)), meshed(blocks, (0, 8, 24), (3, 10, 24), size=3)):
        with pytest.raises(LayoutError, match="overlap in memory 0"):
            check_layout(made)
    with pytest.raises(LayoutError, match="with different strides 12 and 13"):
        check_layout(meshed(blocks, (0, 4, 12), (1, 5, 13)))


# -- windows -----------------------------------------------------------------------------------------------


def outcome(window: int, tokens: int, entry: int, lent: BlockRuns) -> Any:
    ids: Int64s = np.arange(1, 1 - -tokens // 4 + 1, dtype=np.int64)[: -(-tokens // 4)]
    group = Group("g", 4, 40, window=window)
    lists = BlockLists([(0, ids)], [lent], tokens)
    try:
        found = lists._pair_tokens(GroupPair(0, 0, group, group, entry))
    except RemoteTooShort as exc:
        return str(exc)
    return [(tuple(pairs.span[2:5]), pairs.local.tolist(), pairs.remote.tolist()) for pairs in found]


def test_a_window_of_one_token_needs_nothing_though_an_entry_covers_several() -> None:
    """Of six tokens the next one sees none; of a window of two it sees the sixth, which is in the second entry."""
    nothing = BlockRuns(0, ((NULL, 2),))
    assert outcome(1, 6, 4, nothing) == []
    assert "token 4 on of 6" in outcome(2, 6, 4, nothing)
    assert outcome(2, 6, 4, BlockRuns(0, ((NULL, 1), (7, 1)))) == [((0, 0, 4), [2], [7])]


def test_a_window_that_begins_inside_an_entry_needs_all_of_it() -> None:
    """Token 6 is all that is needed of seven, but the entry that holds it covers tokens 4 ... 7, and 4 is not lent."""
    assert "token 4 on of 7" in outcome(2, 7, 4, BlockRuns(5, ((7, 1),)))
    assert outcome(2, 7, 1, BlockRuns(5, ((7, 1),))) == [((2, 2, 2), [2], [7])]


def test_reading_begins_where_every_part_has_a_whole_entry() -> None:
    """Scales of four tokens and of six: of token 6 the one has a whole entry, and the other the middle of one."""

    def layout(base: int) -> Layout:
        parts, at = [], 0
        for name, tokens in (("a", 4), ("b", 6)):
            parts.append(Part(name, "int8", 1, at, (Dim("token", 12 // tokens, 1),), tokens_per_entry=tokens))
            at += 12 // tokens
        made = Layout(
            memories=(Memory(base, 64),), groups=(Group("g", 12, 4),), views=(View(0, 0, "l", 0, at, tuple(parts)),)
        )
        check_layout(made)
        return made

    peer = peer_map(layout(0), layout(1 << 40))
    [pair] = peer.group_pairs
    assert pair.entry == 12
    lists = BlockLists([(6, np.array([1], np.int64))], [BlockRuns(0, ((2, 1),))], 12)
    with pytest.raises(PlanRefused, match="the first token 6 is inside an entry that covers 12 tokens"):
        lists.pairs(peer, pair)


@pytest.mark.parametrize(
    ("here", "there", "fits"), [(0, 0, True), (8, 0, True), (8, 8, True), (7, 8, True), (9, 8, False), (0, 8, False)]
)
def test_a_window_is_read_of_one_that_is_as_wide_and_the_whole_of_none(here: int, there: int, fits: bool) -> None:
    ours, theirs = (change(make_layout(), groups=(Group("attention", 4, 12, window=n),)) for n in (here, there))
    assert [str(each).partition(" ")[0] for each in compare(ours, theirs)] == ([] if fits else ["window"])
