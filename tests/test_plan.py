"""Planning against an oracle that walks every token, and the published cases of planning gone wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.config import EngineConfig
from asynckv.core import routes
from asynckv.core.rank import RankCore
from asynckv.core.readers import Identity
from asynckv.core.types import Endpoint, Key, KVTransferParams
from asynckv.errors import LayoutError, PlanRefused, RemoteTooShort
from asynckv.geometry import tables
from asynckv.geometry.blocks import check_block_ids, check_covers, runs_of
from asynckv.geometry.bounds import NULL, BlockRuns
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View
from asynckv.geometry.match import compare
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import Plan, plan_read
from asynckv.geometry.tables import DescTable, GroupPair, PeerTables, Span
from tests import oracle
from tests.lab.simulation import simulate
from tests.world import Buffers, block_lists, make_layout, peer_map

ORDERS = [
    o for o in itertools.permutations(("block", "kv", "head", "token", "dim")) if o[-1] == "dim" or o[0] == "block"
]


def execute(plan: Plan, local: Buffers, remote: Buffers, max_bytes: int = 1 << 20, max_descriptors: int = 512) -> int:
    """Run a plan as memory copies, checking that no byte is written twice; the bytes it wrote."""
    written = [np.zeros(len(a), np.bool_) for a in local.arrays]
    return oracle.execute(plan, local, remote, written, (max_bytes, max_descriptors))


def token_cells(layout: Layout, ids: list[int], token: int) -> list[tuple[int, int, int]]:
    """Where one token of a request lies: `(memory, offset, length)` per element, in logical order."""
    group = layout.groups[0]
    kernel, at = divmod(token % group.block_size, group.kernel_size)
    block = ids[token // group.block_size] * group.ratio + kernel
    cells = []
    for view in layout.views:
        for part in view.parts:
            dims = {d.name: d for d in part.dims}
            base = view.offset + part.offset + block * view.stride + at * dims["token"].stride
            lo, hi = part.held
            for head, dim in itertools.product(range(hi - lo), range(dims["dim"].size)):
                cells.append((view.memory, base + head * dims["head"].stride + dim * dims["dim"].stride, part.itemsize))
    return cells


def read_token(buffers: Buffers, ids: list[int], token: int) -> bytes:
    return b"".join(buffers.arrays[m][o : o + n].tobytes() for m, o, n in token_cells(buffers.layout, ids, token))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes = []
    for _ in range(2):
        kernel = draw(st.integers(1, 6))
        ratio = draw(st.integers(1, 3))
        sizes.append((kernel * ratio, ratio))
    tokens = draw(st.integers(0, 40))
    first = draw(st.integers(0, max(tokens, 1)))
    return {
        "sizes": sizes,
        "orders": draw(st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS))),
        "tokens": tokens,
        "first": first,
        "spare": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "max_bytes": draw(st.sampled_from([1, 7, 64, 4096])),
        "max_descriptors": draw(st.sampled_from([1, 3, 512])),
    }


@given(case=cases())
@settings(max_examples=150)
def test_a_plan_writes_exactly_the_tokens_asked_for(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(case["seed"])
    layouts, lists = [], []
    for i, ((size, ratio), order) in enumerate(zip(case["sizes"], case["orders"], strict=True)):
        blocks = math.ceil(case["tokens"] / size) + case["spare"][i]
        layouts.append(
            make_layout(
                num_blocks=blocks + 3,
                block_size=size,
                ratio=ratio,
                order=order,
                layers=1,
                base=(i + 1) << 40,
                num_heads=2,
            )
        )
        lists.append(rng.permutation(blocks + 3)[:blocks].tolist())
    (mine, theirs), first = lists, case["first"]
    local, remote = Buffers(layouts[0], 1), Buffers(layouts[1], 2)
    before = [a.copy() for a in local.arrays]
    skipped = first // case["sizes"][0][0]
    assert compare(*layouts) == ()
    asked = block_lists(layouts[0], [(first, mine[skipped:])], [BlockRuns(0, runs_of(theirs))], case["tokens"])
    plan = plan_read(peer_map(*layouts), asked)
    execute(plan, local, remote, case["max_bytes"], case["max_descriptors"])

    for token in range(first, case["tokens"]):
        assert read_token(local, mine, token) == read_token(remote, theirs, token)
    # Below the first token, and in blocks that were not given, nothing changed.
    touched = [np.zeros(len(a), np.bool_) for a in local.arrays]
    size = case["sizes"][0][0]
    for token in range(first, max(len(mine) * size, first)):
        for m, o, n in token_cells(layouts[0], mine, token):
            touched[m][o : o + n] = True
    for now, was, may in zip(local.arrays, before, touched, strict=True):
        assert (now[~may] == was[~may]).all()
    # What the request does not cover is reported, block by block.
    padded = {(p.block_id, p.first_token + i) for p in asked.padding(layouts[0]) for i in range(p.num_tokens)}
    assert padded == {(mine[t // size], t % size) for t in range(max(case["tokens"], first), len(mine) * size)}


def plan_of(first: int, ids: list[int], offered: list[int], tokens: int, **remote: Any) -> tuple[PeerTables, Plan]:
    here, there = make_layout(num_blocks=64), make_layout(num_blocks=64, base=1 << 41, **remote)
    peer = peer_map(here, there)
    return peer, read(peer, first, ids, offered, tokens)


def read(peer: PeerTables, first: int, ids: list[int], offered: list[int], tokens: int) -> Plan:
    return plan_read(peer, block_lists(peer.local, [(first, ids)], [BlockRuns(0, runs_of(offered))], tokens))


def test_a_full_prefix_hit_reads_nothing() -> None:
    for first in (0, 40):
        _, plan = plan_of(first, [], list(range(10)), 40)
        assert plan.num_bytes == 0
        assert list(plan.posts(1 << 20, 512)) == []


def test_allocation_rounding_is_padding() -> None:
    # 640 tokens in kernel blocks of 64: ten there in one block, two blocks of six here.
    here = make_layout(num_blocks=4, block_size=384, ratio=6, layers=1)
    there = make_layout(num_blocks=4, block_size=640, ratio=10, layers=1, base=1 << 41)
    lists = block_lists(here, [(0, [0, 1])], [BlockRuns(0, ((0, 1),))], 640)
    assert list(lists.padding(here)) == [(0, 1, 256, 128)]
    assert list(block_lists(there, [(0, [0])], [], 640).padding(there)) == []


def test_absurd_runs_cost_nothing() -> None:
    here, there = make_layout(), make_layout(base=1 << 41)
    offer = BlockRuns(0, ((0, (1 << 31) - 1), (5, (1 << 31) - 1)))
    with pytest.raises(PlanRefused, match="declared"):
        plan_read(peer_map(here, there), block_lists(here, [(400, [0])], [offer], 1 << 39))


def test_consecutive_blocks_are_one_descriptor_per_row() -> None:
    peer, plan = plan_of(0, list(range(8, 40)), list(range(20, 52)), 128)
    assert [p.num_descriptors for p in plan.posts(1 << 30, 512)] == [peer.regular[0].num_rows]
    assert plan.num_descriptors == 32 * peer.regular[0].num_rows


def test_cross_layer_blocks_merge_into_one_piece() -> None:
    def one(base: int) -> Layout:
        layout = make_layout(num_blocks=8, layers=2, base=base, order=("block", "kv", "token", "head", "dim"))
        size = layout.views[0].stride
        views = [
            msgspec.structs.replace(v, memory=0, offset=i * size, stride=2 * size) for i, v in enumerate(layout.views)
        ]
        memory = msgspec.structs.replace(layout.memories[0], length=16 * size)
        return msgspec.structs.replace(layout, views=tuple(views), memories=(memory,))

    assert peer_map(one(1 << 40), one(1 << 41)).regular[0].num_rows == 1


@pytest.mark.parametrize(("change", "field"), [({"dtype": "bfloat16"}, "dtype"), ({"model": "b"}, "model")])
def test_layouts_that_differ_are_told_apart_with_both_values(change: dict[str, Any], field: str) -> None:
    differences = compare(make_layout(model="a"), make_layout(**{"model": "a", **change}))
    assert any(field in d.field and d.local != d.remote for d in differences)


@given(data=st.data())
@settings(max_examples=100)
def test_no_post_exceeds_its_limits_whatever_the_runs(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.one_of(st.integers(1, 3), st.integers(1, 66)), min_size=1, max_size=12))
    ids: list[int] = []
    at = 0
    for length in lengths:
        ids += range(at, at + length)
        at += length + data.draw(st.integers(0, 2))
    mine = ids if data.draw(st.booleans()) else np.random.default_rng(1).permutation(ids).tolist()
    orders = data.draw(st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)))
    here, there = (
        make_layout(num_blocks=at + 3, layers=1, base=(i + 1) << 40, order=order, num_heads=2)
        for i, order in enumerate(orders)
    )
    plan = read(peer_map(here, there), 0, mine, ids, 4 * len(ids))
    most_bytes, most = data.draw(st.sampled_from([1, 200, 4000, 1 << 30])), data.draw(st.sampled_from([1, 2, 7, 64]))
    total = 0
    for post in plan.posts(most_bytes, most):
        table = post.table
        row = post.local // table.local_blocks
        merges = (np.diff(post.local) == 1) & (np.diff(post.remote) == 1) & (np.diff(row) == 0) & table.dense[row[1:]]
        assert post.num_descriptors == len(post.local) - np.count_nonzero(merges) <= most
        assert post.num_bytes == table.length[row].sum()
        assert post.num_bytes <= most_bytes or len(post.local) == 1
        total += post.num_bytes
    assert total == plan.num_bytes


@given(data=st.data())
@settings(max_examples=100)
def test_a_plan_that_fits_is_posted_as_it_would_be_cut(data: st.DataObject) -> None:
    orders = data.draw(st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)))
    here, there = (
        make_layout(num_blocks=8, layers=1, base=(i + 1) << 40, order=order, num_heads=2)
        for i, order in enumerate(orders)
    )
    mine, theirs = (data.draw(st.permutations(range(8))) for _ in "ab")
    if data.draw(st.booleans()):
        mine, theirs = sorted(mine), sorted(theirs)
    count = data.draw(st.integers(1, 6))
    plan = read(peer_map(here, there), data.draw(st.integers(0, 2)), mine[:count], theirs[:count], 4 * count)
    whole = list(plan.posts(plan.num_bytes, plan.num_descriptors))
    assert len(whole) == len(plan.sections)
    assert sum(post.num_bytes for post in whole) == plan.num_bytes
    assert sum(len(post.local) for post in whole) == plan.num_descriptors
    assert (len(whole), sum(p.num_descriptors for p in whole)) == plan.count_posts(1 << 40, 1 << 30)
    for post, section in zip(whole, plan.sections, strict=True):
        rows, blocks = section.table.num_rows, len(section.local)
        assert post.table is section.table
        for ids, each, size in (
            (post.local, section.local, section.table.local_blocks),
            (post.remote, section.remote, section.table.remote_blocks),
        ):
            assert ids.tolist() == [row * size + block for row in range(rows) for block in each.tolist()]
        merges = (np.diff(post.local) == 1) & (np.diff(post.remote) == 1)
        dense = np.repeat(section.table.dense, blocks)
        assert post.num_descriptors == len(post.local) - np.count_nonzero(
            merges & dense[1:] & (np.arange(1, rows * blocks) % blocks > 0)
        )
    # One byte or one descriptor less, and it is cut: the same indices in the same order.
    for limits in ((plan.num_bytes - 1, 1 << 30), (1 << 40, plan.num_descriptors - 1)):
        if min(limits) > 0:
            posts = list(plan.posts(*limits))
            for side in ("local", "remote"):
                cut, kept = (np.concatenate([getattr(p, side) for p in each]).tolist() for each in (posts, whole))
                assert cut == kept
            assert all(p.num_bytes <= limits[0] or len(p.local) == 1 for p in posts)


def test_one_long_run_beside_scattered_blocks_is_cut_like_any_other() -> None:
    here, there = make_layout(num_blocks=40_000, layers=1), make_layout(num_blocks=40_000, layers=1, base=1 << 44)
    ids = [*range(20_000), *range(20_000, 32_000, 2)]
    plan = read(peer_map(here, there), 0, ids, ids, 4 * len(ids))
    assert max(post.num_descriptors for post in plan.posts(4 << 20, 256)) == 256
    assert plan.count_posts(4 << 20, 256) == (48, 12_000)


def test_strides_that_differ_in_every_layer_and_block_sizes_that_do_not_meet_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def layout(tokens: int, pad: int, base: int) -> Layout:
        views, at = [], 0
        for i in range(256):
            row = 32 + pad * i
            dims = (Dim("token", tokens, row), Dim("head", 4, 8), Dim("dim", 4, 2))
            parts = tuple(Part(n, "float16", 2, k * tokens * row, dims, "head", (0, 4), 4) for k, n in enumerate("kv"))
            views.append(View(0, 0, f"l{i}", at, 2 * tokens * row, parts))
            at += 2 * tokens * row * 8
        return Layout(memories=(Memory(base, at),), groups=(Group("g", tokens, 8),), views=tuple(views))

    cut: list[int] = []
    monkeypatch.setattr(tables, "strided_descriptors", lambda *_: cut.append(1))
    ours = layout(16, 0, 0)
    for theirs, message in (
        (layout(17, 2, 1 << 44), "32 kinds of cuts of 256 differently shaped parts, more than 4096"),
        (layout(1001, 0, 1 << 44), r"\d+ pieces would be needed for 1016 kinds of cuts, more than 262144"),
    ):
        check_layout(theirs)
        with pytest.raises(LayoutError, match=message):
            peer_map(ours, theirs)
    assert cut == []


@given(data=st.data())
@settings(max_examples=300)
def test_only_a_list_that_ends_before_its_tokens_is_refused_at_lending(data: st.DataObject) -> None:
    size, ratio = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    kind: Any = data.draw(st.sampled_from(["tokens", "tokens", "state"]))
    window = data.draw(st.sampled_from([0, 1, 2, 30])) if kind == "tokens" else 0
    group = Group("g", size * ratio, 64, ratio if kind == "tokens" else 1, kind, window)
    ids: list[int | None] = data.draw(st.lists(st.one_of(st.none(), st.integers(0, 63)), max_size=9))
    first, tokens = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 200))
    places = {first // group.block_size + i for i in range(len(ids))}
    needed = {t // group.block_size for t in range(max(first, tokens - max(window - 1, 0) if window else 0), tokens)}
    try:
        check_covers("group 0", group, BlockRuns(first, runs_of(ids)), tokens)
        refused = False
    except PlanRefused as exc:
        refused = True
        assert f"num_tokens is {tokens}" in str(exc)  # noqa: PT017
        assert f"{len(ids)} blocks of {group.block_size} tokens from token {first}" in str(exc)  # noqa: PT017
    nothing = kind == "state" or all(b is None for b in ids)
    assert refused == (not nothing and not needed <= places and bool(needed))


@given(st.lists(st.integers(0, 9) | st.none(), max_size=20))
def test_what_was_written_as_runs_is_read_from_them(ids: list[int | None]) -> None:
    read = [NULL if first == NULL else first + i for first, count in runs_of(ids) for i in range(count)]
    assert read == [NULL if block is None else block for block in ids]


@pytest.mark.parametrize(("first", "end"), [(0, 4), (3, 4), (4, 8), (11, 12)])
def test_our_own_list_has_to_reach_the_tokens_that_are_wanted(first: int, end: int) -> None:
    layout = make_layout(block_size=4)
    for ids in ([1], np.array([1])):
        check_block_ids(layout, [(first, ids)], end)
        check_block_ids(layout, [(first, [])], end + 1)
        with pytest.raises(PlanRefused, match=rf"1 blocks of 4 tokens from token {first} on end at token {end}, but"):
            check_block_ids(layout, [(first, ids)], end + 1)


# -- which tables are kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "made"), [(3, 0), (4, 4), (5, 4)])
def test_tables_are_made_ahead_only_for_groups_that_need_few(
    monkeypatch: pytest.MonkeyPatch, most: int, made: int
) -> None:
    """Blocks of 6 and of 4 tokens meet in four ways, from 0, 4, 6 and 8 on."""
    monkeypatch.setattr(tables, "MAX_REGULAR", most)
    here, there = (make_layout(num_blocks=8, block_size=size, layers=1, base=size << 40) for size in (6, 4))
    assert len(peer_map(here, there).regular) == made


def tables_of(plan: Plan) -> set[int]:
    return {section.table.table_id for section in plan.sections}


def crowded(monkeypatch: pytest.MonkeyPatch, most: int, spans: int) -> tuple[PeerTables, list[int]]:
    """A peer that keeps `most` tables, after as many requests with a first token of their own; their tables' ids."""
    monkeypatch.setattr(tables, "MAX_TABLES", most)
    here, there = (make_layout(num_blocks=8, block_size=64, layers=1, base=(i + 1) << 40) for i in range(2))
    peer = peer_map(here, there)
    assert len(peer.regular) == 1
    made = []
    for first in range(1, spans + 1):
        [section] = read(peer, first, [1], [2], 64).sections
        made.append(section.table.table_id)
    return peer, made


def test_the_tables_used_longest_ago_go_first_and_regular_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, made = crowded(monkeypatch, 8, 12)
    assert peer.is_full
    assert tables_of(read(peer, 1, [1], [2], 64)) == {made[0]}  # used again: the youngest now
    gone = [table.table_id for table in peer.evict()]
    assert gone == made[1:6]
    assert not peer.is_full
    assert peer.evict() == []
    assert tables_of(read(peer, 0, [1], [2], 64)) == {peer.regular[0].table_id}
    # What is kept is known still, and what went is made anew, under an id that was never used.
    assert [tables_of(read(peer, first, [1], [2], 64)) for first in (1, 7, 12)] == [{made[i]} for i in (0, 6, 11)]
    assert tables_of(read(peer, 2, [1], [2], 64)).isdisjoint(made)


@given(data=st.data())
@settings(max_examples=100)
def test_no_more_tables_are_evicted_than_have_to_be(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        peer, made = crowded(patch, data.draw(st.integers(1, 8)), data.draw(st.integers(0, 12)))
        gone = {table.table_id for table in peer.evict()}
        kept = {1 + i: name for i, name in enumerate(made) if name not in gone}
        assert peer.regular[0].table_id not in gone
        assert len(kept) + 1 == min(tables.MAX_TABLES, len(made) + 1)
        for first, name in kept.items():
            assert peer.table(Span(0, 0, first, first, 64 - first)).table_id == name


def test_a_full_peer_is_one_with_more_tables_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for spans, full in ((6, False), (7, False), (8, True)):
        peer, _ = crowded(monkeypatch, 8, spans)
        assert peer.is_full is full
        assert bool(peer.evict()) is full


def test_few_large_tables_are_kept_as_many_small_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a peer is bounded by its memory: the rows of a table are as many as its strides make them."""
    monkeypatch.setattr(tables, "MAX_KEPT_ROWS", 20)
    peer, made = crowded(monkeypatch, 1000, 12)  # of two rows each, beside the regular one
    assert {table.num_rows for table in peer.regular} == {2}
    assert peer.is_full
    assert [table.table_id for table in peer.evict()] == made[:3]
    assert not peer.is_full
    assert [tables_of(read(peer, first, [1], [2], 64)) for first in range(4, 13)] == [{name} for name in made[3:]]
    assert not peer.is_full
    read(peer, 1, [1], [2], 64)
    assert peer.is_full


def test_services_that_keep_a_single_table_read_with_none_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_TABLES", 1)
    evicted: list[int] = []
    honest = PeerTables.evict

    def evict(self: PeerTables) -> list[DescTable]:
        gone = honest(self)
        evicted.extend(table.table_id for table in gone)
        return gone

    monkeypatch.setattr(PeerTables, "evict", evict)
    for seed in range(14, 34):
        assert not simulate(seed).violation
    assert evicted


@pytest.mark.parametrize("layers", [1, 3])
def test_memory_orders_that_do_not_go_together_are_warned_about(layers: int) -> None:
    """A descriptor per token and head of keys and values: 8 per block and layer are taken in silence, more are not."""
    for tokens, said in ((2, []), (3, ["group 0 is read in pieces of 4 bytes, 12 per block and layer"])):
        here, there = (
            make_layout(layers=layers, num_heads=2, block_size=tokens, base=(i + 1) << 40, order=order)
            for i, order in enumerate(("kv", "block", *each, "dim") for each in (("token", "head"), ("head", "token")))
        )
        warned = peer_map(here, there).warnings
        assert [text.split(";")[0] for text in warned] == said


def test_rows_go_together_as_long_as_their_blocks_fit() -> None:
    """Scattered blocks of eight layers, two rows of keys and values each: no post has room for one row more."""
    here, there = make_layout(layers=8), make_layout(layers=8, base=1 << 44)
    plan = read(peer_map(here, there), 0, [1, 3, 5], [5, 3, 1], 12)
    (section,) = plan.sections
    rows, size = section.table.num_rows, section.table.block_bytes // section.table.num_rows * 3
    assert (rows, plan.num_descriptors) == (16, 48)
    for limits in ((1 << 30, 15), (1 << 30, 17), (5 * size, 1 << 30), (6 * size - 1, 1 << 30)):
        assert [len(post.local) for post in plan.posts(*limits)] == [15, 15, 15, 3]


# -- Pairings of blocks -----------------------------------------------------------------------------------------------

FAR = 2**31


@st.composite
def pairings(draw: st.DrawFn) -> dict[str, Any]:
    """Blocks of one group on both sides: ratios, windows, placeholders, runs, ids up to the largest there can be."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    window = draw(st.sampled_from([0, 0, 0, 1, 7, 40]))
    ratios = [draw(st.sampled_from([1, 1, 2, 3])) for _ in "ab"]
    here = Group(
        "g", ratios[0] * size, 200, ratios[0], window=window, null_block=draw(st.sampled_from([NULL, NULL, 0]))
    )
    many = draw(st.sampled_from([40, 200, FAR // ratios[1] - 5]))
    there = Group(
        "g", ratios[1] * size, many, ratios[1], window=window, null_block=draw(st.sampled_from([NULL, NULL, 0, 5]))
    )
    tokens = draw(st.integers(1, 120))
    first = draw(st.integers(0, tokens + 3))
    most = max(0, -(-tokens // here.block_size) - first // here.block_size) + 1
    ids = draw(st.lists(st.integers(1, 199) | st.just(NULL), max_size=most))
    block = st.integers(0, 45) | st.just(NULL) | st.integers(FAR - 40, FAR - 1)
    runs = draw(st.lists(st.tuples(block, st.integers(1, 60)), max_size=3))
    offer = BlockRuns(draw(st.sampled_from([0, 0, 0, 5, 17])), tuple(runs))
    return {"here": here, "there": there, "lists": ((first, ids), offer, tokens)}


def outcome(case: dict[str, Any]) -> Any:
    (first, ids), offer, tokens = case["lists"]
    lists = BlockLists([(first, np.array(ids, np.int64))], [offer], tokens)
    try:
        found = list(lists._pair_tokens(GroupPair(0, 0, case["here"], case["there"], 1)))
    except (PlanRefused, RemoteTooShort) as exc:
        return type(exc), str(exc)
    return [(tuple(p.span[:5]), p.local.tolist(), p.remote.tolist(), p.local.dtype, p.remote.dtype) for p in found]


@given(case=pairings())
@settings(max_examples=400)
def test_the_usual_pairing_is_the_general_one(case: dict[str, Any]) -> None:
    usual = outcome(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockLists, "_pair_aligned", lambda self, *args: ())
        assert usual == outcome(case)


def test_a_first_block_that_is_filled_in_part_comes_last_either_way() -> None:
    group = Group("g", 4, 200, 2)
    case = {"here": group, "there": group, "lists": ((1, [1, 4]), BlockRuns(0, ((0, 2),)), 8)}
    assert [(span, local) for span, local, *_ in outcome(case)] == [
        ((0, 0, 0, 0, 2), [3, 8, 9]),
        ((0, 0, 1, 1, 1), [2]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        usual = outcome(case)
        patch.setattr(BlockLists, "_pair_aligned", lambda self, *args: ())
        assert usual == outcome(case)


def test_a_window_of_one_token_needs_nothing() -> None:
    here, there = (Group("g", 16, n, window=1) for n in (200, 40))
    assert outcome({"here": here, "there": there, "lists": ((80, [1]), BlockRuns(0, ()), 96)}) == []


@pytest.mark.parametrize("run", [[5, 0], [5, -1], [-2, 1], [FAR, 1], [5, FAR]])
def test_runs_outside_their_bounds_never_arrive(run: list[int]) -> None:
    assert msgspec.convert([0, [[NULL, 1], [FAR - 1, FAR - 1]]], BlockRuns).runs == ((NULL, 1), (FAR - 1, FAR - 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([0, [run]], BlockRuns)


@pytest.mark.parametrize("runs", [((4, 3),), ((4, 2), (8, 1))])
def test_a_placeholder_of_theirs_inside_a_run_is_no_block(runs: Any) -> None:
    group = Group("g", 4, 40, null_block=5)
    case = {"here": Group("g", 4, 40), "there": group, "lists": ((0, [1, 2, 3]), BlockRuns(0, runs), 12)}
    kind, text = outcome(case)
    assert kind is RemoteTooShort
    assert "token 4" in text


def test_ids_beyond_what_indices_can_say_are_refused_and_not_wrapped() -> None:
    there = Group("g", 4, FAR - 1)
    case = {"here": Group("g", 4, 40), "there": there, "lists": ((0, [1, 2]), BlockRuns(0, ((FAR - 2, 2),)), 8)}
    kind, text = outcome(case)
    assert kind is PlanRefused
    assert str(FAR - 1) in text


@pytest.mark.parametrize(
    ("runs", "named"), [(((37, 4),), 40), (((40, 1),), 40), (((37, 3), (41, 1)), 41), (((41, 1), (1, 3)), 41)]
)
def test_a_block_that_the_other_side_never_declared_is_refused_wherever_it_stands(runs: Any, named: int) -> None:
    group = Group("g", 4, 40)
    tokens = 4 * sum(count for _, count in runs)
    lists = ((0, list(range(1, tokens // 4 + 1))), BlockRuns(0, runs), tokens)
    kind, text = outcome({"here": Group("g", 4, 40), "there": group, "lists": lists})
    assert kind is PlanRefused
    assert f"block {named}," in text


@pytest.mark.parametrize(("window", "size"), [(5, 4), (6, 4), (5, 2), (6, 2)])
def test_of_a_window_every_token_that_the_next_one_sees_has_to_be_there(window: int, size: int) -> None:
    """Of 16 tokens, a window of 6 lets the next one see 11 ... 15, and one of 5 only the last block."""
    here, there = Group("g", 4, 40, window=window), Group("g", size, 40, window=window)
    lent = 4 // size  # blocks in the last four tokens
    case = {"here": here, "there": there, "lists": ((0, [1, 2, 3, 4]), BlockRuns(0, ((NULL, 3 * lent), (7, lent))), 16)}
    if window == 6:
        kind, text = outcome(case)
        assert kind is RemoteTooShort
        assert f"token {12 - size} on" in text
    else:
        assert [local for _, local, *_ in outcome(case)] == [[4]] * lent


# -- what is remembered of endpoints -----------------------------------------------------------------


def make_node() -> RankCore:
    return RankCore(Identity("d", "b" * 32, "agent", b"", make_layout()), EngineConfig(engine_id="d"))


def params(number: int, endpoints: Sequence[Endpoint], changes: dict[str, Any]) -> KVTransferParams:
    given: dict[str, Any] = {
        "engine_id": "p",
        "request_id": f"r{number}",
        "key": Key("epoch", 0, number, "f" * 32),
        "tp_size": len(endpoints),
        "endpoints": tuple(endpoints),
        "groups": (BlockRuns(0, ((0, 1),)),),
        "num_tokens": 4,
    }
    return KVTransferParams(**given | changes)


def places(core: RankCore, number: int, endpoints: Sequence[Endpoint], **changes: Any) -> list[tuple[int, str]]:
    """Announce a request, and say which ranks it answers for."""
    pull = core.announce(f"d{number}", params(number, endpoints, changes), "", 30.0, 0.0)
    return [(source.rank.tp_rank, source.address) for source in pull.sources]


def endpoints(count: int, port: int) -> list[Endpoint]:
    return [Endpoint(rank, f"tcp://127.0.0.1:{port + rank}", "c" * 32) for rank in range(count)]


def test_a_group_is_known_by_all_of_its_ranks() -> None:
    core = make_node()
    one, other = endpoints(2, 1000), endpoints(2, 1000)
    other[1] = msgspec.structs.replace(other[1], address="tcp://127.0.0.1:2000")
    assert places(core, 1, one) == [(0, "tcp://127.0.0.1:1000"), (1, "tcp://127.0.0.1:1001")]
    assert places(core, 2, other)[1] == (1, "tcp://127.0.0.1:2000")
    assert places(core, 3, one) == places(core, 4, list(one))


def test_endpoints_may_be_a_list() -> None:
    core, listed = make_node(), endpoints(1, 1000)
    pull = core.announce("d1", params(1, tuple(listed), {"endpoints": listed}), "", 30.0, 0.0)
    assert [(source.rank.tp_rank, source.address) for source in pull.sources] == [(0, "tcp://127.0.0.1:1000")]


def test_endpoints_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_ENDPOINTS", 8)
    core = make_node()
    for number in range(20):
        places(core, number, endpoints(3, 1000 + 10 * number))
        assert sum(len(listed) for _, listed, *_ in core.decode.routes._groups) <= 8


def test_a_group_that_is_not_whole_is_refused_every_time() -> None:
    core = make_node()
    for number in (1, 2):
        with pytest.raises(PlanRefused, match="must be listed once"):
            places(core, number, endpoints(1, 1000), tp_size=2)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_there_cannot_be_makes_no_group_whole(rank: int) -> None:
    listed = [*endpoints(1, 1000), Endpoint(rank, "tcp://127.0.0.1:2000", "c" * 32)]
    if rank == 1:
        assert len(places(make_node(), 1, listed)) == 2
        return
    with pytest.raises(PlanRefused, match="must be listed"):
        places(make_node(), 1, listed, tp_size=2)


# -- what may wait a turn --------------------------------------------------------------------------


def test_only_releases_wait_for_company() -> None:
    from asynckv.core.outbox import Outbox
    from asynckv.core.types import Cohort, Outcome, ReplyTo
    from asynckv.core.wire import Ack, Ping, Release

    key, to = Key("epoch", 0, 1, "f" * 32), ReplyTo(b"r")
    outbox = Outbox("b" * 32)
    outbox.send(to, "", Release(key, "r", Cohort("d"), "pull", Outcome.COMPLETE))
    assert (bool(outbox.messages), outbox.is_urgent) == (True, False)
    for message in (Ping(1), Ack(key, "pull")):
        outbox.send(to, "", message)
        assert outbox.is_urgent
        assert len(list(outbox.take_packets())) == 1
        assert (bool(outbox.messages), outbox.is_urgent) == (False, False)


@pytest.mark.parametrize(
    ("here", "there", "filled"),
    [
        (Group("g", 64, 8, 4, window=100), Group("g", 64, 8, 4, window=100), [0, 128]),
        (Group("g", 64, 8, 1, window=100), Group("g", 16, 32, 1, window=100), [0, 128]),
        (Group("g", 16, 32, 1, window=100), Group("g", 64, 8, 1, window=100), [16, 128]),
    ],
    ids=["kernel blocks", "smaller there", "larger there"],
)
def test_of_a_window_the_first_block_is_read_whole(here: Group, there: Group, filled: list[int]) -> None:
    """A prefix cache gives a block to a prompt that ends sooner as well, which needs its first tokens."""
    lists = BlockLists([(0, np.arange(128 // here.block_size))], [BlockRuns(0, ((0, 128 // there.block_size),))], 128)
    pair = GroupPair(0, 0, here, there, 1)
    size, tokens = pair.local_size, set[int]()
    for pairs in lists._pair_tokens(pair):
        for block in pairs.local.tolist():
            begin = block * size + pairs.span.local_offset
            tokens |= set(range(begin, begin + pairs.span.tokens))
    assert tokens == set(range(*filled))
