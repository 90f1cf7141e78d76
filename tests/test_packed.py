"""Where blocks are kept: records that hold what blocks hold, slots that fit, and what is read out of them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asynckv
from asynckv import EngineConfig, PrefillRanks
from asynckv.core.events import Ending, TransferEnded
from asynckv.core.types import TransferId
from asynckv.edges.nic.copies import NixlCopies
from asynckv.errors import LayoutError, PlanRefused, RemoteTooShort
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.kept import kept_tables, plan_copies, plan_load
from asynckv.geometry.layout import ONE_PER_REQUEST, Layout, Memory, fingerprint
from asynckv.geometry.match import assign, compare
from asynckv.geometry.overlap import pools
from asynckv.geometry.packed import placed, record_form, record_sizes
from asynckv.geometry.plan import Plan
from asynckv.geometry.staging import ReadCosts
from asynckv.geometry.tables import PeerTables
from asynckv.layout import register_memory
from asynckv.ports import CopyOp
from asynckv.testing import SimControl, SimData
from asynckv.tools.plan.layouts import model_layout, with_addresses
from asynckv.tools.plan.models import PRESETS, preset
from tests import oracle
from tests.engines import Bench, passing
from tests.oracle import Cache, Engine, GroupSpec, Kept, LayerSpec, PartSpec, Rank, packed
from tests.test_geometry import allocate, attention, engine, engines, latent, mamba2, models


def rows(device: Layout, kept: Layout) -> list[int]:
    """Descriptors per kernel block of each group that is stored."""
    [shares] = assign(kept, [device])
    return [table.num_rows for table in PeerTables(kept, device, shares, iter(range(99))).regular]


HYBRID = engine((attention(12), mamba2(), latent()), sizes=[(16, 2), 8, 4], style="pages", num_blocks=48)


def test_a_record_is_what_a_block_consists_of_padded_to_whole_pages() -> None:
    layout = Rank(HYBRID, 0).layout
    form = record_form(layout)
    # 12 heads x 2 x 16 tokens of 2 bytes, keys and values; a convolution's x, b and c and the state; a latent.
    state = 4 * 2 * 3 * 2 + 2 * (1 * 2 * 3 * 2) + 4 * 2 * 2 * 4
    assert [tuple(r) for r in record_sizes(form)] == [(1536, 4096, 1), (state, 4096, 1), (4 * 5 * 2, 4096, 1)]
    kept = placed(form, 1 << 30, 40_000)
    assert [r.num_slots for r in record_sizes(kept)] == [9, 9, 9]
    assert (kept.memories[0].base, kept.memories[0].length) == (1 << 30, 40_000)
    assert compare(kept, layout) == compare(layout, kept) == ()
    assert [v.stride for v in record_form(layout, align=1).views] == [768] * 1 + [state, 40]


def test_slots_of_several_groups_share_a_range_and_no_pages() -> None:
    layout = Rank(engine((attention(12, dim=64), latent())), 0).layout
    kept = packed(layout, 1 << 20, base=1 << 30)
    assert [r.stride for r in record_sizes(kept)] == [12288, 4096]
    assert pools(kept) == (0, 1)
    with pytest.raises(LayoutError, match=r"groups 0 and 1 overlap .* pages of 12288 and 4096 bytes"):
        check_layout(msgspec.structs.replace(kept, slotted=msgspec.UNSET))
    # It crosses the wire as it is, and layouts that share no range are encoded as they always were.
    assert decode_layout(msgspec.msgpack.encode(kept)) == kept
    assert b"slotted" not in msgspec.msgpack.encode(layout)


def test_a_form_does_not_say_where_nor_how_many() -> None:
    small, large = (
        Rank(engine((attention(),), num_blocks=n), 0, base=b).layout for n, b in ((9, 1 << 40), (77, 1 << 41))
    )
    assert fingerprint(record_form(small)) == fingerprint(record_form(large))
    assert fingerprint(record_form(packed(small, 1 << 20))) == fingerprint(record_form(large))
    other = Rank(engine((attention(),), sizes=8), 0).layout
    assert fingerprint(record_form(small)) != fingerprint(record_form(other))


@pytest.mark.parametrize("groups", [((0,), (1,), (2,)), ((0, 1, 2),)])
def test_where_memories_lie_and_how_they_are_counted_is_no_matter(groups: tuple[tuple[int, ...], ...]) -> None:
    layers = attention(4, "a"), attention(2, "b"), attention(6, "c")
    layout = Rank(Engine(layers, tuple(GroupSpec(group, 16) for group in groups)), 0).layout
    assert [view.memory for view in layout.views] == [0, 1, 2]
    counted = {0: 2, 1: 0, 2: 1}
    other = msgspec.structs.replace(
        layout,
        memories=tuple(msgspec.structs.replace(layout.memories[i], base=(9 - i) << 41) for i in (1, 2, 0)),
        views=tuple(msgspec.structs.replace(v, memory=counted[v.memory]) for v in layout.views),
    )
    check_layout(other)
    assert record_form(other) == record_form(layout)


def test_how_many_blocks_there_are_is_as_declared_and_no_matter_to_what_keeps_them() -> None:
    layout = Rank(HYBRID, 0).layout
    fewer = msgspec.structs.replace(
        layout, groups=tuple(msgspec.structs.replace(g, num_blocks=3, null_block=0) for g in layout.groups)
    )
    assert packed(fewer, 1 << 20) == packed(layout, 1 << 20)
    assert packed(layout, 1 << 20).memories == (Memory(0, 1 << 20),)


@pytest.mark.parametrize("style", ["layers", "split", "cross", "pages"])
def test_what_is_adjacent_stays_adjacent(style: str) -> None:
    layers = tuple(attention(4, f"l{i}") for i in range(6))
    orders = dict.fromkeys("kv", ("token", "head", "dim"))
    device = Rank(Engine(layers, (GroupSpec(tuple(range(6)), 16),), orders=orders, style=style), 0).layout
    assert rows(device, packed(device, 1 << 20)) == [{"layers": 6, "split": 12, "cross": 1, "pages": 1}[style]]


def test_keys_and_values_that_alternate_are_kept_as_they_are() -> None:
    made = Rank(engine((attention(4),), orders=dict.fromkeys("kv", ("token", "head", "dim"))), 0).layout
    [view] = made.views
    size = 4 * 2 * 2

    def alternate(gap: int) -> Layout:
        step = 2 * size + gap
        parts = tuple(
            msgspec.structs.replace(
                part,
                offset=i * size,
                dims=tuple(msgspec.structs.replace(d, stride=step) if d.name == "token" else d for d in part.dims),
            )
            for i, part in enumerate(view.parts)
        )
        wider = (msgspec.structs.replace(made.memories[0], length=1 << 20),)
        layout = msgspec.structs.replace(
            made, views=(msgspec.structs.replace(view, offset=96, stride=4 * step, parts=parts),), memories=wider
        )
        check_layout(layout)
        return layout

    for gap, expected in ((0, 1), (2, 8)):
        device = alternate(gap)
        kept = packed(device, 1 << 20)
        assert record_sizes(kept)[0].num_bytes == 4 * 2 * size
        assert rows(device, kept) == [expected]


def test_a_group_without_a_layer_here_takes_nothing() -> None:
    layers = tuple(attention(4, f"l{i}") for i in range(4))
    stages = Engine(layers, (GroupSpec((0, 1), 4), GroupSpec((2, 3), 8)), pp_size=2)
    kept = packed(Rank(stages, 0, 1).layout, 1 << 16)
    assert [tuple(r) for r in record_sizes(kept)] == [(0, 0, 16), (2 * 2 * 4 * 8 * 2 * 2, 4096, 16)]


def test_ranks_of_different_sizes_may_have_the_same_slots() -> None:
    def half(extent: int, rank: int, size: int) -> tuple[int, int]:
        return [(0, 5), (5, 6)][rank]

    uneven = (LayerSpec("a", (PartSpec("kv", (("head", 6), ("dim", 256)), "head", held=half),)),)
    forms = [record_form(Rank(engine(uneven, 2), r).layout) for r in range(2)]
    most = [max(r.stride for r in each) for each in zip(*map(record_sizes, forms), strict=True)]
    assert [record_sizes(f)[0].stride for f in forms] == [12288, 4096]

    def wide(form: Layout, stride: int) -> Layout:
        views = [msgspec.structs.replace(view, stride=stride) for view in form.views]
        return placed(msgspec.structs.replace(form, views=tuple(views)), 0, 1 << 20)

    assert [record_sizes(wide(form, most[0]))[0].num_slots for form in forms] == [85, 85]
    two = record_form(Rank(engine((latent(),), sizes=[(8, 2)]), 0).layout)
    assert record_sizes(wide(two, 6144))[0] == (80, 12288, 85)
    with pytest.raises(LayoutError, match="with stride 4096 up to byte 10240: that is not a record of group 'g0'"):
        wide(forms[0], 4096)


def test_a_group_alone_has_its_range_for_itself() -> None:
    assert record_form(Rank(engine((latent(),)), 0).layout).slotted is msgspec.UNSET


def test_a_range_without_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match=r"4095 bytes have no room for one block of group 'g0', .* 4096; give 12288"):
        packed(Rank(HYBRID, 0).layout, 4095)
    with pytest.raises(LayoutError, match="capacity is 0"):
        packed(Rank(HYBRID, 0).layout, 0)
    for align in ("x", 0):
        with pytest.raises(LayoutError, match=f"align is {align!r}"):
            packed(Rank(HYBRID, 0).layout, 1 << 20, align=align)  # type: ignore[arg-type]


def test_a_form_that_was_tampered_with_is_refused() -> None:
    form = record_form(Rank(HYBRID, 0).layout)
    [first, *others] = form.views
    for wrong, message in (
        ({"stride": 8}, "stride 8 up to byte 768: that is not a record of group 'g0'"),
        ({"offset": 4000}, "up to byte 4768"),
        ({"memory": 1}, "lies in memory 1"),
        ({"parts": first.parts * 2}, "listed more than once"),
    ):
        views = (msgspec.structs.replace(first, **wrong), *others)
        with pytest.raises(LayoutError, match=message):
            placed(msgspec.structs.replace(form, views=views), 0, 1 << 20)
    two = record_form(Rank(Engine((attention(name="a"), attention(name="b")), (GroupSpec((0, 1), 4),)), 0).layout)
    slower = msgspec.structs.replace(two.views[0], stride=8192)
    with pytest.raises(LayoutError, match=r"stride 8192 .* is not a record of group 'g0'"):
        placed(msgspec.structs.replace(two, views=(slower, two.views[1])), 0, 1 << 20)


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_of_every_known_model_are_kept_in_a_tebibyte_per_rank(name: str) -> None:
    device = model_layout(preset(name), num_blocks=64, tp_size=8)
    kept = packed(device, 1 << 40)
    parts = [sum(len(view.parts) for view in device.views if view.group == g) for g in range(len(kept.groups))]
    # A descriptor per part at most; those of a state follow each other.
    assert all(mine <= most for mine, most in zip(rows(device, kept), parts, strict=True))
    # At most one page in each record is padding.
    assert all(r.stride - r.num_bytes < 4096 for r in record_sizes(kept))


@given(data=st.data())
@settings(max_examples=40)
def test_every_layout_has_a_form(data: st.DataObject) -> None:
    layers = data.draw(models())
    each = data.draw(engines(layers, data.draw(st.integers(0, 30)), stages=True))
    align = data.draw(st.sampled_from([1, 64, 4096]))
    for stage in range(each.pp_size):
        layout = Rank(each, each.tp_size - 1, stage).layout
        if not layout.views:
            continue
        form = record_form(layout, align=align)
        check_layout(form)
        assert record_form(form, align=align) == form
        size: dict[int, int] = {}
        for view in layout.views:
            bytes_ = sum(p.itemsize * math.prod(d.size for d in p.dims) for p in view.parts)
            size[view.group] = size.get(view.group, 0) + bytes_ * layout.groups[view.group].ratio
        for group, record in enumerate(record_sizes(form)):
            assert record.num_bytes == size.get(group, 0)
            assert record.stride % align == 0
            assert record.num_bytes <= record.stride < record.num_bytes + align * layout.groups[group].ratio
        assert compare(layout, form) == compare(form, layout) == ()


# -- stored and loaded ---------------------------------------------------------------------------------------

Pairs = list[list[tuple[int, int]]]
"""Per group `(block, slot)`."""


def slots_for(kept: Layout, counts: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    end, found = 0, []
    for group in rng.permutation(len(counts)).tolist():
        stride = record_sizes(kept)[group].stride
        first = -(-end // stride) if stride else 0
        gaps = int(rng.integers(0, 3))
        ids = (first + rng.permutation(counts[group] + gaps)[: counts[group]]).tolist()
        found.append((group, ids))
        end = max(end, (first + counts[group] + gaps) * stride)
    return [ids for _, ids in sorted(found)]


def room_for(layout: Layout, counts: Sequence[int]) -> int:
    strides = [r.stride for r in record_sizes(record_form(layout, align=64))]
    return sum((n + 3) * s for n, s in zip(counts, strides, strict=True)) + sum(strides)


def store(
    rank: Rank, blocks: Sequence[Sequence[int]], rng: np.random.Generator, base: int, **more: Any
) -> tuple[Kept, Pairs]:
    """Copy a rank's blocks to slots of a range of its own, and compare every byte."""
    counts = [len(ids) for ids in blocks]
    kept = Kept(rank, room_for(rank.layout, counts), base=base, align=64)
    slots = slots_for(kept.layout, counts, rng)
    [tables] = kept_tables(rank.layout, [kept.layout], itertools.count())
    assert tables is not None
    plan = plan_copies(tables, list(zip(blocks, slots, strict=True)))
    pairs = [list(zip(*each, strict=True)) for each in zip(blocks, slots, strict=True)]
    oracle.check_copies(rank, kept, plan, pairs, store=True, **more)
    return kept, pairs


def ranks_of(each: Engine, base: int = 0) -> list[Rank]:
    made = [
        Rank(each, r, s, base=(base + 1 + r + 8 * s) << 41) for s in range(each.pp_size) for r in range(each.tp_size)
    ]
    return [rank for rank in made if rank.layout.views]


Costs = ReadCosts | None


def reload(
    stored: Engine, loading: Engine, tokens: int, wanted: int, seed: int = 0, costs: Costs = None, **more: Any
) -> list[tuple[Plan | None, ...]]:
    """Store whole blocks of a request on every rank of one engine, load them on every rank of another."""
    rng, cache = np.random.default_rng(seed), Cache(stored.layers, 7)
    lists = allocate(stored, tokens, rng, [0] * len(stored.groups), lean=False)
    whole = [
        [b for b in ids if b is not None][: tokens // g.block_size]
        for (_, ids), g in zip(lists, stored.groups, strict=True)
    ]
    ranges, slots = [], []
    for number, rank in enumerate(ranks_of(stored, 100)):
        oracle.fill(rank, lists, cache, tokens)
        kept, pairs = store(rank, whole, rng, (1 + number) << 50, **more)
        ranges.append(kept)
        slots.append(oracle.offers([(0, [slot for _, slot in each]) for each in pairs]))
    out = []
    cached = [int(rng.integers(0, wanted + 1)) if rng.random() < 0.3 else 0 for _ in loading.groups]
    for i, group in enumerate(loading.groups):
        entry = math.lcm(
            *(p.entry or group.block_size // group.ratio for at in group.layers for p in loading.layers[at].parts)
        )
        cached[i] -= cached[i] % entry
    mine = allocate(loading, wanted, rng, cached, lean=bool(rng.integers(0, 2)))
    for local in ranks_of(loading):
        tables = kept_tables(local.layout, [kept.layout for kept in ranges], itertools.count(), costs)
        plans = plan_loads(tables, oracle.arrays(mine), slots, wanted)
        oracle.check_plans(local, ranges, plans, mine, cache, tokens, wanted, **more)
        out.append(plans)
    return out


def plan_loads(tables: Any, local: Any, slots: Any, num_tokens: int) -> tuple[Plan | None, ...]:
    """Say what is loaded out of each range; None where nothing is read."""
    both = zip(tables, slots, strict=True)
    return tuple(plan_load(each, local, some, num_tokens) if each is not None else None for each, some in both)


def with_kept_states(each: Engine) -> Engine:
    """Without groups of one state per request, which nobody could load again."""
    groups = [GroupSpec(g.layers, 8, 1, 2 * 8 + 3) if g.block_size == ONE_PER_REQUEST else g for g in each.groups]
    if each.style == "pages":
        most = max(g.num_blocks for g in groups) * len(groups)
        groups = [GroupSpec(g.layers, g.block_size, g.ratio, most) for g in groups]
    return dataclasses.replace(each, groups=tuple(groups))


def most_wanted(stored: Engine, tokens: int) -> int:
    most = min(tokens // g.block_size * g.block_size for g in stored.groups)
    states = [g.block_size for g in stored.groups if stored.layers[g.layers[0]].kind == "state"]
    return most - most % math.lcm(*states)


@given(data=st.data())
@settings(max_examples=12)
def test_what_one_geometry_stored_another_loads(data: st.DataObject) -> None:
    layers = data.draw(models())
    tokens = data.draw(st.integers(8, 40), label="tokens")
    stored = with_kept_states(data.draw(engines(layers, tokens, stages=True), label="stored"))
    loading = with_kept_states(data.draw(engines(layers, tokens, stages=True), label="loading"))
    limits = data.draw(st.sampled_from([(1, 1), (7, 3), (1 << 20, 512)]), label="limits")
    seed, costs = data.draw(st.integers(0, 1 << 32)), data.draw(st.sampled_from([None, oracle.STAGED]))
    reload(stored, loading, tokens, most_wanted(stored, tokens), seed, costs, limits=limits)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(data=st.data())
@settings(max_examples=200)
def test_what_one_geometry_stored_another_loads_for_long(data: st.DataObject) -> None:
    test_what_one_geometry_stored_another_loads.hypothesis.inner_test(data)  # type: ignore[attr-defined]


@given(data=st.data())
@settings(max_examples=20)
def test_a_rank_gets_its_own_blocks_back(data: st.DataObject) -> None:
    layers = data.draw(models())
    each = data.draw(engines(layers, 30, stages=True))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    for rank in ranks_of(each):
        blocks = [ids for _, ids in allocate(each, 30, rng, [0] * len(each.groups), lean=False)]
        kept, pairs = store(rank, blocks, rng, 1 << 50)  # type: ignore[arg-type]
        some = [[p for p in pairs_ if rng.random() < 0.7] for pairs_ in pairs]
        back: list[list[int]] = [
            [b for b in ids if b is not None][: len(chosen)]
            for (_, ids), chosen in zip(allocate(each, 30, rng, [0] * len(each.groups), lean=False), some, strict=True)
        ]
        loads = [
            list(zip(ids, [slot for _, slot in chosen], strict=True)) for ids, chosen in zip(back, some, strict=True)
        ]
        [tables] = kept_tables(rank.layout, [kept.layout], itertools.count())
        assert tables is not None
        plan = plan_copies(tables, [([b for b, _ in p], [s for _, s in p]) for p in loads])
        oracle.check_copies(rank, kept, plan, loads, store=False)


# -- by name -------------------------------------------------------------------------------------------------

HND, NHD = (dict.fromkeys("kv", order) for order in (("head", "token", "dim"), ("token", "head", "dim")))
WINDOWED = (attention(4), attention(4, "near", window=20))
SCALED = (
    LayerSpec(
        "a", (PartSpec("k", (("head", 4), ("dim", 2)), "head", 1), PartSpec("scale", (("head", 4),), "head", 4, 0))
    ),
)
SIX = tuple(attention(4, f"l{i}") for i in range(6))


OPAQUE = (LayerSpec("a", (PartSpec("bytes", (("rank", 2), ("byte", 37)), "rank", 1, 0),)), attention(4, "b"))
PAGED = attention(4, "a"), attention(2, "b", dim=3), latent("c")
STAGES = (GroupSpec((0, 1, 2, 3, 4, 5), 4, 1, 64),), (GroupSpec((0, 1, 2), 8, 1, 64), GroupSpec((3, 4, 5), 4, 1, 64))
WAYS: dict[str, tuple[Engine, Engine]] = {
    "tp 4 to 2": (engine((attention(),), 4), engine((attention(),), 2)),
    "tp 2 to 4": (engine((attention(),), 2), engine((attention(),), 4)),
    "tp 3 to 2": (engine((attention(),), 3), engine((attention(),), 2)),
    "blocks of 16 to 64": (engine((attention(2),), sizes=16), engine((attention(2),), sizes=64)),
    "blocks of 64 to 16": (engine((attention(2),), sizes=64), engine((attention(2),), sizes=16)),
    "kernel blocks": (engine((attention(2),), sizes=[(48, 3)]), engine((attention(2),), sizes=[(64, 2)])),
    "heads or tokens first": (engine((attention(4),), 2, orders=HND), engine((attention(4),), orders=NHD)),
    "memory orders": (engine((attention(4),), style="split"), engine((attention(4),), 2, style="cross")),
    "a latent": (engine((latent(),), 4), engine((latent(),), 2)),
    "to more ranks than heads": (engine((attention(2),), 4), engine((attention(2),), 8)),
    "from more ranks than heads": (engine((attention(2),), 8), engine((attention(2),), 1)),
    "a hybrid whose groups see the same pages": (
        engine((attention(4), mamba2()), 2, sizes=[16, 16], style="pages"),
        engine((attention(4), mamba2()), 4, sizes=[8, 32]),
    ),
    "layers with page sizes of their own": (
        engine(PAGED, 2, sizes=[(12, 3), 4, 8], style="pages"),
        engine(PAGED, 1, sizes=[4, 8, (24, 3)], style="cross"),
    ),
    "windows": (engine(WINDOWED, 2, sizes=16), engine(WINDOWED, 4, sizes=[16, 8])),
    "scales of kernel blocks": (engine(SCALED, 2, sizes=[(16, 2)]), engine(SCALED, 4, sizes=[8])),
    "bytes that nobody described": (engine(OPAQUE, 2, sizes=8), engine(OPAQUE, 2, sizes=8, style="cross")),
    "stages": (Engine(SIX, STAGES[0], 2, 3), Engine(SIX, STAGES[1], 1, 2)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_stored_is_loaded_into_another_geometry(way: str) -> None:
    stored, loading = WAYS[way]
    for costs in (None, oracle.STAGED):
        plans = reload(stored, loading, 71, most_wanted(stored, 71), costs=costs)
        assert any(plan is not None and plan.num_bytes for each in plans for plan in each)


def test_of_replicas_one_is_read() -> None:
    for layer in (latent(), attention(2)):
        [plans] = reload(engine((layer,), 8), engine((layer,), 1), 16, 16)
        assert sum(plan is not None for plan in plans) == (1 if layer.name == "mla" else 2)


# -- refusals ------------------------------------------------------------------------------------------------


def tables_of(stored: Engine, loading: Engine) -> PeerTables:
    kept = packed(Rank(stored, 0).layout, 1 << 20)
    [tables] = kept_tables(Rank(loading, 0).layout, [kept], itertools.count())
    assert tables is not None
    return tables


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([([1], [2])], "blocks of 1 groups are given, but the layout has 2"),
        ([([1, 2], [2]), ([], [])], r"group 0 \('g0'\): 2 blocks and 1 slots; each block needs one slot"),
        ([([48], [2]), ([], [])], r"'g0'\), blocks: block id 48 is outside \[0, 48\), the declared num_blocks"),
        ([([1], [256]), ([], [])], r"'g0'\), slots: block id 256 is outside \[0, 256\)"),
        ([([1, 1], [2, 3]), ([], [])], "blocks: block id 1 is given twice"),
        ([([1, 2], [3, 3]), ([], [])], "slots: block id 3 is given twice"),
        ([([-1], [3]), ([], [])], "blocks: -1 is not an id"),
        ([([], []), ([0], [-2])], r"'g1'\), slots: -2 is not an id"),
    ],
)
def test_copies_of_blocks_that_there_are_not_are_refused(blocks: Any, message: str) -> None:
    both = engine((attention(2), latent()))
    with pytest.raises(PlanRefused, match=message):
        plan_copies(tables_of(both, both), blocks)


def test_blocks_are_not_copied_one_for_one_to_a_range_with_another_share_of_tokens() -> None:
    layers = (latent(),)
    whole, shared = (Engine(layers, (GroupSpec((0,), 16, share=share),), tp_size=2) for share in ((1, 1), (2, 1)))
    with pytest.raises(
        PlanRefused, match="tokens 0 of 2 by 1 cannot be copied one for one to all tokens; load them by"
    ):
        plan_copies(tables_of(whole, shared), [([1], [1])])


def test_a_range_of_too_many_slots_is_refused_with_both_numbers() -> None:
    device = Rank(engine((attention(12),), style="split"), 0).layout
    with pytest.raises(LayoutError, match=r"2 pieces per kernel block x 1073741824 blocks .* or declare fewer blocks"):
        kept_tables(device, [packed(device, 1 << 42)], itertools.count())


def test_nothing_to_copy_is_an_empty_plan() -> None:
    both = engine((attention(2), latent()))
    assert plan_copies(tables_of(both, both), [([], []), ([], [])]).num_bytes == 0


def test_blocks_of_other_sizes_are_not_copied_one_for_one() -> None:
    two = engine((attention(2),), sizes=8), engine((attention(2),), sizes=[(16, 2)])
    with pytest.raises(PlanRefused, match=r"16 tokens in 2 kernel blocks cannot .* 8 in 1; load them by their tokens"):
        plan_copies(tables_of(*two), [([1], [1])])


def test_what_does_not_fit_is_refused_with_what_differs() -> None:
    with pytest.raises(LayoutError, match=r"that tp0 of 1 stored do not fit: sharded axis .*'head' of 4, .* of 8"):
        tables_of(engine((attention(8),)), engine((attention(4),)))
    with pytest.raises(LayoutError, match=r"held ranges .* needs \[2, 4\) of 4 along 'head'"):
        tables_of(engine((attention(4),), 2), engine((attention(4),)))


def test_slots_that_hold_too_little_are_refused() -> None:
    stored, loading = (
        engine((attention(2, window=6), mamba2()), sizes=[4, 8]),
        engine((attention(2, window=6), mamba2())),
    )
    tables = tables_of(stored, loading)
    local = oracle.arrays([(0, [1, 2, 3, 4]), (0, [5, 6, 7, 8])])
    cases: list[tuple[Any, int, str]] = [
        ([(0, [None, None, None, 3]), (0, [None, 1])], 16, "needs KV from token 8 on of 16.*3 placeholders"),
        ([(0, [None, None, 2, 3]), (0, [1, None])], 16, "no state was lent in place 1 of 2"),
        ([(0, [None, None, 2, 3]), (0, [None, None])], 16, "no state was lent in place 1 of 2"),
        # The state in place 1 is the one after 16 tokens, and none is after 12.
        ([(0, [None, 1, 2, 3]), (0, [None, 1])], 12, "needs the state after token 12 on .* kept every 8 tokens only"),
    ]
    for slots, tokens, message in cases:
        with pytest.raises(RemoteTooShort, match=message):
            plan_load(tables, local, oracle.offers(slots), tokens)
    plan = plan_load(tables, local, oracle.offers([(0, [None, None, 2, 3]), (0, [None, 1])]), 16)
    assert {s.table.span.group: len(s.local) for s in plan.sections} == {0: 2, 1: 1}


# -- on real NIXL --------------------------------------------------------------------------------------------

OTHERS = "kernel blocks", "heads or tokens first"


async def copy(near: Rank, far: Sequence[Rank], op: CopyOp, plans: Sequence[Plan | None]) -> None:
    """Have a copy plane carry plans out, and compare all memory with what the oracle makes of them."""
    sides = [near, *far]
    real = [[array.copy() for array in side.arrays] for side in sides]
    kept = [[Memory(a.ctypes.data, a.nbytes) for a in arrays] for arrays in real]
    plane, done = NixlCopies("packed"), asyncio.Event()
    plane.start(kept[0], {str(i): memories for i, memories in enumerate(kept[1:])}, done.set)
    news: list[TransferEnded] = []
    try:
        posted = [(i, plan) for i, plan in enumerate(plans) if plan is not None]
        for i, plan in posted:
            plane.post(TransferId(i), op, str(i), plan.posts(1 << 12, 64))
        with anyio.fail_after(10):
            while len(news) < len(posted):
                await done.wait()
                done.clear()
                news += plane.poll()
    finally:
        plane.close()
    assert {ended.ending for ended in news} == {Ending.DONE}
    for i, plan in posted:
        written = [np.zeros(len(a), np.bool_) for a in (far[i] if op is CopyOp.WRITE else near).arrays]
        oracle.execute(plan, near, far[i], written, (1 << 12, 64), store=op is CopyOp.WRITE)
    for side, arrays in zip(sides, real, strict=True):
        assert all(map(np.array_equal, side.arrays, arrays))


@pytest.mark.nixl
@pytest.mark.parametrize("costs", [None, oracle.STAGED], ids=["direct", "staged"])
@pytest.mark.parametrize(
    "way", ["a hybrid whose groups see the same pages", "layers with page sizes of their own", *OTHERS]
)
async def test_nixl_stores_and_loads_what_the_oracle_does(way: str, costs: Costs) -> None:
    (stored, loading), rng = WAYS[way], np.random.default_rng(1)
    wanted = most_wanted(stored, 71)
    lists = [ids for _, ids in allocate(stored, 71, rng, [0] * len(stored.groups), lean=False)]
    ranges, slots = [], []
    for rank in ranks_of(stored, 100):
        kept = Kept(rank, room_for(rank.layout, list(map(len, lists))), align=64)
        slots.append(slots_for(kept.layout, list(map(len, lists)), rng))
        [tables] = kept_tables(rank.layout, [kept.layout], itertools.count())
        assert tables is not None
        await copy(rank, [kept], CopyOp.WRITE, [plan_copies(tables, list(zip(lists, slots[-1], strict=True)))])  # type: ignore[arg-type]
        ranges.append(kept)
    local = ranks_of(loading)[-1]
    loads = plan_loads(
        kept_tables(local.layout, [kept.layout for kept in ranges], itertools.count(), costs),
        oracle.arrays(allocate(loading, wanted, rng, [0] * len(loading.groups), lean=True)),
        [oracle.offers([(0, ids) for ids in each]) for each in slots],
        wanted,
    )
    assert (costs is not None) == any(load is not None and load.is_staged for load in loads)
    await copy(local, ranges, CopyOp.READ, loads)


# -- lent over the network -----------------------------------------------------------------------------------


async def test_what_is_kept_is_lent_as_any_block_is(sim: Bench) -> None:
    stored, loading = engine(WINDOWED, sizes=[16, 8]), engine(WINDOWED, sizes=[4, 16])
    rng, cache, tokens = np.random.default_rng(3), Cache(WINDOWED, 7), 48
    [rank], [local] = ranks_of(stored, 100), ranks_of(loading)
    lists = allocate(stored, tokens, rng, [0, 0], lean=False)
    oracle.fill(rank, lists, cache, tokens)
    kept, pairs = store(rank, [[b for b in ids if b is not None] for _, ids in lists], rng, 1 << 50)
    assert kept.layout.slotted is True

    def made(name: str, side: Rank) -> asynckv.Engine:
        layout = with_addresses(side.layout, [array.ctypes.data for array in side.arrays])
        planes: dict[str, Any] = {"data": SimData(sim.network, name), "control": SimControl(sim.network)}
        return asynckv.Engine(
            EngineConfig(engine_id=name), register_memory(layout, tuple(side.arrays)), clock=sim.clock, **planes
        )

    async with made("prefill-host", kept) as host, made("decode", local) as decode:
        group = PrefillRanks("prefill-host", [host.endpoint])
        params = group.make_params("r", [(0, [slot for _, slot in each]) for each in pairs], tokens, written=True)
        lent = host.lend(params)
        mine = allocate(loading, tokens, rng, [0, 0], lean=True)
        await decode.pull("d", mine, params)
        with anyio.fail_after(10):
            assert (await lent.wait_released()).cause == "released"
        for memory, places, data, must in oracle.cells(local, mine, cache, tokens, tokens):
            at = places[..., None] + np.arange(data.shape[-1])
            assert not must or (local.arrays[memory][at] == data).all()
        host.check_integrity()
        decode.check_integrity()
        await passing(sim, asyncio.gather(decode.aclose(), host.aclose()))
