"""Every geometry against an oracle that knows arrays and nothing of plans."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.errors import LayoutError, PlanRefused, RemoteTooShort
from asynckv.geometry.blocks import check_block_ids, check_blocks
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import ONE_PER_REQUEST, Group, Layout, Memory, View, dense_part, fingerprint
from asynckv.geometry.match import NotCovered, _cover, assign, compare, in_words, predicted, remote_ranks
from asynckv.geometry.packed import record_form
from asynckv.geometry.pairing import BlockLists, common_prefix
from asynckv.geometry.plan import plan_read
from tests import oracle
from tests.oracle import Cache, Engine, GroupSpec, LayerSpec, Lists, PartSpec, Rank, check_transfer, even
from tests.world import make_layout

SIZES = st.sampled_from([1, 2, 3, 4, 6])
STYLES = st.sampled_from(["layers", "split", "cross", "pages"])


@st.composite
def parts(draw: st.DrawFn, kind: str) -> tuple[PartSpec, ...]:
    out = []
    for i in range(draw(st.integers(1, 3))):
        axis = draw(st.sampled_from(["head", "head", ""]))
        dims = [("dim", draw(st.integers(1, 3)))]
        if axis:
            dims.insert(0, (axis, draw(st.integers(1, 12))))
        if kind == "state":
            dims.append(("column", draw(st.integers(1, 3))))
        entry = draw(st.sampled_from([1, 1, 1, 2])) if kind == "tokens" else 1
        out.append(PartSpec(f"p{i}", tuple(dims), axis, draw(st.sampled_from([1, 2, 4])), entry, even))
    return tuple(out)


@st.composite
def models(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["tokens", "tokens", "state"]))
        window = draw(st.sampled_from([0, 0, 1, 5, 9])) if kind == "tokens" else 0
        kinds.append((kind, window, draw(parts(kind))))
    chosen = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=4))
    return tuple(LayerSpec(f"layers.{i}", kinds[k][2], *kinds[k][:2]) for i, k in enumerate(chosen))


@st.composite
def engines(draw: st.DrawFn, layers: tuple[LayerSpec, ...], tokens: int, *, stages: bool) -> Engine:
    alike: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        alike.setdefault((layer.kind, layer.window, layer.parts), []).append(i)
    groups = []
    for (kind, _, specs), members in alike.items():
        # Engines may put alike layers into one group, or into several.
        halves = [members] if len(members) == 1 or draw(st.booleans()) else [members[:1], members[1:]]
        for half in halves:
            if kind == "state":
                size, ratio = draw(st.sampled_from([ONE_PER_REQUEST, 4, 8])), 1
            else:
                ratio = draw(st.integers(1, 3))
                size = draw(st.integers(1, 4)) * ratio * math.lcm(*(p.entry for p in specs))
            blocks = 1 if size == ONE_PER_REQUEST else math.ceil(tokens / size)
            groups.append(GroupSpec(tuple(half), size, ratio, 2 * blocks + 3))
    style = draw(STYLES)
    if style == "pages":
        most = max(g.num_blocks for g in groups) * len(groups)
        groups = [GroupSpec(g.layers, g.block_size, g.ratio, most) for g in groups]
    return Engine(
        layers,
        tuple(groups),
        tp_size=draw(SIZES),
        pp_size=draw(st.integers(1, min(2, len(layers)))) if stages else 1,
        seed=draw(st.integers(0, 1 << 16)),
        style=style,
        pad=draw(st.sampled_from([0, 0, 3])),
    )


def allocate(engine: Engine, tokens: int, rng: np.random.Generator, first: list[int], *, lean: bool) -> Lists:
    """Blocks for a request; `lean` leaves out what is not needed: before a window, all states but the last."""
    if engine.style == "pages":
        free = rng.permutation(engine.groups[0].num_blocks).tolist()
        pools = [free] * len(engine.groups)
    else:
        pools = [rng.permutation(g.num_blocks).tolist() for g in engine.groups]
    lists: list[tuple[int, list[int | None]]] = []
    for group, pool, begin in zip(engine.groups, pools, first, strict=True):
        layer = engine.layers[group.layers[0]]
        start, end = begin // group.block_size, math.ceil(tokens / group.block_size)
        needed = (tokens - layer.window + 1) // group.block_size if layer.window else 0
        if layer.kind == "state":
            needed = max(tokens - 1, 0) // group.block_size
        ids: list[int | None] = [None if lean and i < needed else pool.pop() for i in range(start, end)]
        lists.append((begin, ids if begin < tokens else []))
    return lists


def is_covered(local: Rank, remotes: list[Rank]) -> bool:
    """Whether the ranks that this one answers for hold all it needs, entry by entry; refused if not."""
    covered = True
    for layer, _, part, spec in local.each():
        held = [p.held for r in remotes for at, _, p, s in r.each() if (at, s) == (layer, spec)]
        covered &= all(any(lo <= i < hi for lo, hi in held) for i in range(*part.held))
    if not covered:
        with pytest.raises(NotCovered, match=r"held (ranges|tokens)"):
            oracle.maps(local, remotes)
    return covered


@given(data=st.data())
@settings(max_examples=80)
def test_every_byte_is_where_it_belongs_and_no_other_is_touched(data: st.DataObject) -> None:
    layers = data.draw(models())
    tokens = data.draw(st.integers(0, 30), label="tokens")
    prefill = data.draw(engines(layers, tokens, stages=True), label="prefill")
    decode = data.draw(engines(layers, tokens, stages=True), label="decode")
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32), label="seed"))
    cached = []
    for group in decode.groups:
        entry = math.lcm(*(p.entry for i in group.layers for p in layers[i].parts))
        cached.append(data.draw(st.integers(0, tokens // entry), label="cached") * entry)
    theirs = allocate(prefill, tokens, rng, [0] * len(prefill.groups), lean=data.draw(st.booleans()))
    mine = allocate(decode, tokens, rng, cached, lean=data.draw(st.booleans()))
    cache = Cache(layers, 11)
    remotes = [
        Rank(prefill, r, s, base=(1 + r + 8 * s) << 41) for s in range(prefill.pp_size) for r in range(prefill.tp_size)
    ]
    for remote in remotes:
        oracle.fill(remote, theirs, cache, tokens)
    limits = data.draw(st.sampled_from([(1, 1), (7, 3), (1 << 20, 512)]), label="limits")
    for stage in range(decode.pp_size):
        for rank in range(decode.tp_size):
            local = Rank(decode, rank, stage)
            if local.layout.views and is_covered(local, oracle.peers_of(local, remotes)):
                check_transfer(local, remotes, mine, theirs, cache, tokens, limits=limits)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(data=st.data())
@settings(max_examples=400)
def test_every_byte_is_where_it_belongs_and_no_other_is_touched_for_long(data: st.DataObject) -> None:
    test_every_byte_is_where_it_belongs_and_no_other_is_touched.hypothesis.inner_test(data)  # type: ignore[attr-defined]


# -- layers and engines of the cases below ---------------------------------------------------------------

KV = (PartSpec("k", (("head", 12), ("dim", 2)), "head"), PartSpec("v", (("head", 12), ("dim", 2)), "head"))


def attention(heads: int = 12, name: str = "attn", window: int = 0, dim: int = 2, parts: str = "kv") -> LayerSpec:
    dims = (("head", heads), ("dim", dim))
    return LayerSpec(name, tuple(PartSpec(part, dims, "head") for part in parts), window=window)


def latent(name: str = "mla") -> LayerSpec:
    return LayerSpec(name, (PartSpec("kv", (("dim", 5),)),))


def mamba2(heads: int = 4, groups: int = 1, name: str = "ssm", rows: int = 3, along: str = "row") -> LayerSpec:
    conv = [PartSpec("conv_x", (("head", heads), ("dim", 2), (along, rows)), "head")]
    if groups:
        conv += [PartSpec(f"conv_{n}", (("group", groups), ("state", 2), (along, rows)), "group") for n in "bc"]
    ssm = PartSpec("ssm", (("head", heads), ("dim", 2), ("state", 2)), "head", 4)
    return LayerSpec(name, (*conv, ssm), "state")


def engine(layers: tuple[LayerSpec, ...], tp: int = 1, sizes: Any = 4, **fields: Any) -> Engine:
    """One group per layer. `sizes` per group: block size, or (block size, ratio)."""
    sizes = [sizes] * len(layers) if not isinstance(sizes, list) else sizes
    groups = tuple(
        GroupSpec((i,), size, ratio, fields.get("num_blocks", 48))
        for i, (size, ratio) in enumerate(s if isinstance(s, tuple) else (s, 1) for s in sizes)
    )
    return Engine(layers, groups, tp, **{k: v for k, v in fields.items() if k != "num_blocks"})


def transfer(
    prefill: Engine, decode: Engine, theirs: Lists, mine: Lists, tokens: int, *, wanted: int | None = None
) -> list[list[Any]]:
    """Move a request to every decode rank, compare all bytes; the plans per decode rank and answered rank."""
    cache = Cache(prefill.layers, 5)
    remotes = [
        Rank(prefill, r, s, base=(1 + r + 8 * s) << 41) for s in range(prefill.pp_size) for r in range(prefill.tp_size)
    ]
    real: Lists = [
        (first, [b if b is not None and b < g.num_blocks else None for b in ids])
        for (first, ids), g in zip(theirs, prefill.groups, strict=True)
    ]
    for remote in remotes:
        oracle.fill(remote, real, cache, tokens)
    locals_ = [Rank(decode, r, s) for s in range(decode.pp_size) for r in range(decode.tp_size)]
    return [check_transfer(rank, remotes, mine, theirs, cache, tokens, wanted=wanted) for rank in locals_]


@pytest.mark.parametrize("mine", [[2, 3], [3, 2], [4, 2, 3]], ids=str)
@pytest.mark.parametrize("theirs", [[5, 6, 7], [7, 6, 5]], ids=str)
@pytest.mark.parametrize(("here", "there"), [("layers", "layers"), ("layers", "cross"), ("split", "layers")])
def test_blocks_in_any_order_arrive_in_layers_that_lie_in_separate_memories(
    here: str, there: str, mine: list[int], theirs: list[int]
) -> None:
    """In one memory, the last of blocks 3 and 2 would end where the next layer's first block begins."""
    orders = dict.fromkeys("kv", ("token", "head", "dim"))
    layers = tuple(attention(name=f"l{i}", parts="k" if here == "layers" else "kv") for i in range(3))
    prefill, decode = (
        Engine(layers, (GroupSpec((0, 1, 2), 4),), tp, style=style, orders=orders)
        for tp, style in ((1, there), (3, here))
    )
    transfer(prefill, decode, [(0, theirs[: len(mine)])], [(0, mine)], 4 * len(mine))


def pairs(plan: Any, group: int = 0) -> list[tuple[int, int]]:
    """(local, remote) kernel blocks of one group."""
    return [
        (a, b)
        for s in plan.sections
        if s.table.span.group == group
        for a, b in zip(s.local.tolist(), s.remote.tolist(), strict=True)
    ]


def sources(plans: list[Any]) -> list[int]:
    """Which of the answered ranks is read."""
    return [i for i, plan in enumerate(plans) if plan is not None]


# -- CASES A: pairing and planning -----------------------------------------------------------------------


def one(prefill: Engine, decode: Engine, theirs: Lists, mine: Lists, tokens: int, **more: Any) -> Any:
    [[plan]] = transfer(prefill, decode, theirs, mine, tokens, **more)
    return plan


def test_a2_one_group_is_hit_and_the_other_is_not() -> None:
    e = engine((attention(name="a"), attention(name="b")))
    plan = one(e, e, [(0, [1, 2, 3]), (0, [4, 5, 6])], [(12, []), (4, [7, 8])], 12)
    assert (pairs(plan, 0), pairs(plan, 1)) == ([], [(7, 5), (8, 6)])


def test_a3_attention_is_hit_and_only_the_state_is_moved() -> None:
    e = engine((attention(), mamba2()), sizes=[4, ONE_PER_REQUEST])
    plan = one(e, e, [(0, [1, 2, 3]), (0, [9])], [(12, []), (0, [5])], 12)
    assert (pairs(plan, 0), pairs(plan, 1)) == ([], [(5, 9)])


def test_a4_no_state_is_wanted_and_placeholders_are_no_blocks() -> None:
    e = engine((attention(), mamba2()))
    plan = one(e, e, [(0, [1, 2, 3]), (0, [None, None, 14])], [(4, [6, 7]), (12, [])], 12)
    assert (pairs(plan, 0), pairs(plan, 1)) == ([(6, 2), (7, 3)], [])


def test_a5_the_state_is_paired_by_its_token_not_by_its_place() -> None:
    prefill = engine((mamba2(),), num_blocks=64)
    decode = engine((mamba2(),), sizes=[ONE_PER_REQUEST], num_blocks=64)
    assert pairs(one(prefill, decode, [(0, [40, 41, 42, 43])], [(0, [42])], 16)) == [(42, 43)]
    # Room for speculation after the last token does not shift it.
    assert pairs(one(prefill, decode, [(0, [40, 41, 42, 43, 44, 45])], [(0, [42, 50])], 15)) == [(42, 43)]
    assert pairs(one(prefill, prefill, [(0, [40, 41, 42, 43])], [(12, [42])], 16)) == [(42, 43)]


def test_a6_a7_kernel_blocks_after_a_prefix_and_the_last_state() -> None:
    e = engine((attention(), mamba2()), sizes=[(40, 10), 14], num_blocks=100)
    plan = one(e, e, [(0, [0]), (0, [10, 20, 99])], [(24, [0]), (28, [99])], 40)
    assert (pairs(plan, 0), pairs(plan, 1)) == ([(i, i) for i in range(6, 10)], [(99, 99)])


def test_a8_a9_each_side_rounds_its_own_allocation() -> None:
    six, ten = engine((attention(2),), sizes=[(384, 6)]), engine((attention(2),), sizes=[(640, 10)])
    assert pairs(one(ten, six, [(0, [1])], [(0, [0, 1])], 640)) == [(i, 10 + i) for i in range(10)]
    assert pairs(one(six, ten, [(0, [0, 1])], [(0, [1])], 640)) == [(10 + i, i) for i in range(10)]


def test_a11_a12_each_side_has_its_own_ratio() -> None:
    here, there = engine((attention(2),), sizes=[(66, 66)]), engine((attention(2),), sizes=[(34, 34)])
    plan = one(there, here, [(0, [5, 6])], [(0, [1, 2])], 68)
    assert sorted(b for _, b in pairs(plan)) == list(range(170, 238))
    assert sorted(a for a, _ in pairs(plan)) == list(range(66, 134))
    plan = one(engine((attention(2),)), engine((attention(2),), sizes=[(16, 4)]), [(0, [5, 9, 7])], [(0, [2])], 12)
    assert sorted(pairs(plan)) == [(8, 5), (9, 9), (10, 7)]


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("there", [4, 6, (12, 3)])
def test_a15_partial_last_blocks(tokens: int, there: Any) -> None:
    prefill, decode = engine((attention(2),), sizes=[there]), engine((attention(2),))
    size = prefill.groups[0].block_size
    plan = one(
        prefill, decode, [(0, range(9, 9 + math.ceil(tokens / size)))], [(0, range(math.ceil(tokens / 4)))], tokens
    )
    assert {a for a, _ in pairs(plan)} == set(range(math.ceil(tokens / 4)))


@pytest.mark.parametrize(("here", "there"), [(16, 16), (16, 64), (64, 16), (48, 32), ((48, 3), 64)])
def test_a17_only_blocks_inside_the_window_are_read(here: Any, there: Any) -> None:
    prefill, decode = (engine((attention(2, window=128),), sizes=[s]) for s in (there, here))
    size, mine = prefill.groups[0].block_size, decode.groups[0].block_size
    lost, gone = (1000 - 127) // size, (1000 - 127) // mine
    theirs: Lists = [(0, [None] * lost + list(range(math.ceil(1000 / size) - lost)))]
    for listed in ([None] * gone + list(range(math.ceil(1000 / mine) - gone)), None):
        ids = listed or list(range(math.ceil(1000 / mine) - gone))
        plan = one(prefill, decode, theirs, [(0 if listed else gone * mine, ids)], 1000)
        assert min(b for _, b in pairs(plan)) >= 0
        assert plan.num_bytes < (129 + mine + size) * 2 * 2 * 2 * 2


def test_a17_a_window_is_enough_where_all_blocks_are_listed() -> None:
    e = engine((attention(2, window=5),), num_blocks=99)
    assert sorted(pairs(one(e, e, [(0, range(25))], [(0, range(50, 75))], 101 - 1))) == [(73, 23), (74, 24)]
    # The token before the window is for engines that compute the last token again; it may be gone.
    gone = [(0, [None] * 24 + [24])]
    assert pairs(one(e, e, gone, [(0, range(50, 75))], 100)) == [(74, 24)]
    with pytest.raises(RemoteTooShort, match="token 92 on of 99"):
        one(e, e, gone, [(0, range(50, 75))], 99)


def test_a19_only_tokens_on_which_the_hashes_agree() -> None:
    e = engine((attention(2), mamba2()))
    theirs: Lists = [(0, range(10)), (0, range(10))]
    plan = one(e, e, theirs, [(0, range(20, 30)), (0, range(20, 30))], 40, wanted=28)
    assert (pairs(plan, 0), pairs(plan, 1)) == ([(20 + i, i) for i in range(7)], [(26, 6)])


# -- CASES B: topology -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (8, 4), (4, 4), (1, 4), (2, 3), (3, 2)])
def test_b1_b3_a_latent_is_read_once_from_one_rank(prefill: int, decode: int) -> None:
    plans = transfer(engine((latent(),), prefill), engine((latent(),), decode), [(0, [1, 2])], [(0, [3, 4])], 8)
    assert [len(sources(p)) for p in plans] == [1] * decode
    chosen = [remote_ranks(d, decode, prefill)[sources(p)[0]] for d, p in enumerate(plans)]
    # Readers are spread over the replicas.
    assert len(set(chosen)) == min(prefill, decode)


def test_b6_b7_heads_are_mapped_contiguously_and_replicas_are_skipped() -> None:
    layers = (attention(2),)
    ranks = [Rank(engine(layers, 4), r) for r in range(4)]
    assert [r.layout.views[0].parts[0].held for r in ranks] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    plans = transfer(engine(layers, 4), engine(layers, 1), [(0, [1, 2])], [(0, [3, 4])], 8)
    assert [sources(p) for p in plans] == [[0, 2]]
    assert predicted(Rank(engine(layers, 1), 0).layout, range(4), 4) == [0, 2]


CHANNEL_FIRST = {"conv_x": ("head", "dim", "row"), "conv_b": ("group", "state", "row")}
ROW_FIRST = {"conv_x": ("row", "head", "dim"), "conv_b": ("row", "group", "state")}


@pytest.mark.parametrize("style", ["layers", "split", "cross", "pages"])
@pytest.mark.parametrize("orders", [(CHANNEL_FIRST,) * 2, (ROW_FIRST,) * 2, (CHANNEL_FIRST, ROW_FIRST)])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2), (2, 4), (3, 2), (4, 6)])
def test_b9_conv_and_state_between_unequal_groups(prefill: int, decode: int, orders: Any, style: str) -> None:
    groups = 2 if max(prefill, decode) <= 4 and 3 not in (prefill, decode) else 1
    layers = (mamba2(heads=12, groups=groups), attention(12))
    here, there = (
        engine(layers, tp, sizes=[ONE_PER_REQUEST, 4], style=style, orders=o, num_blocks=9, seed=3)
        for tp, o in zip((decode, prefill), orders, strict=True)
    )
    transfer(there, here, [(0, [1]), (0, [2, 3])], [(0, [4]), (0, [5, 6])], 7)


def test_b9_three_sub_projections_at_their_own_offsets() -> None:
    # Widths 8, 2 and 2 (times three columns of two bytes), from one rank to the second of two.
    conv = [PartSpec(n, (("channel", w), ("row", 3)), "channel") for n, w in (("x", 8), ("b", 2), ("c", 2))]
    layers = (LayerSpec("ssm", tuple(conv), "state"),)
    orders = dict.fromkeys("xbc", ("channel", "row"))
    local, remote = Rank(engine(layers, 2, orders=orders), 1), Rank(engine(layers, 1, orders=orders), 0, base=1 << 41)
    [peer] = oracle.maps(local, [remote])
    assert peer is not None
    assert peer.regular[0].remote[:, 1].tolist() == [4 * 6, 9 * 6, 11 * 6]
    assert peer.regular[0].local[:, 1].tolist() == [0, 4 * 6, 5 * 6]
    assert peer.regular[0].length.tolist() == [4 * 6, 6, 6]


def test_b10_no_group_width_is_legal() -> None:
    layers = (mamba2(heads=4, groups=0),)
    transfer(engine(layers, 2), engine(layers, 4), [(0, [1])], [(0, [2])], 3)


def test_b11_a_gated_delta_net_is_other_parts_and_no_other_code() -> None:
    conv = [PartSpec(n, (("head", h), ("dim", 2), ("row", 3)), "head") for n, h in (("q", 2), ("k", 2), ("v", 4))]
    state = PartSpec("state", (("head", 4), ("k", 2), ("v", 2)), "head", 4)
    layers = (LayerSpec("gdn", (*conv, state), "state"), attention(2))
    for prefill, decode in [(1, 2), (2, 1), (4, 2), (2, 4)]:
        there, here = (engine(layers, tp, sizes=[ONE_PER_REQUEST, 4]) for tp in (prefill, decode))
        transfer(there, here, [(0, [1]), (0, [2, 3])], [(0, [4]), (0, [5, 6])], 7)


def test_b12_a_model_without_recurrent_layers_knows_no_order_of_theirs() -> None:
    transfer(engine((attention(),), 2), engine((attention(),), 3), [(0, [1, 2])], [(0, [4, 5])], 7)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (3, 2), (2, 3), (4, 6), (6, 4), (12, 1), (1, 12)])
@pytest.mark.parametrize("orders", [("token", "head", "dim"), ("head", "token", "dim"), None])
def test_b15_b16_any_sizes_and_any_order(prefill: int, decode: int, orders: Any) -> None:
    first = ("token", "head", "dim")
    there = engine((attention(),), prefill, orders=dict.fromkeys("kv", orders or ("head", "token", "dim")))
    here = engine((attention(),), decode, orders=dict.fromkeys("kv", first), style="split")
    plans = transfer(there, here, [(0, [1, 2])], [(0, [4, 5])], 7)
    for rank, row in enumerate(plans):
        # One piece per K and V and rank where whole blocks are contiguous on both sides, else one per token.
        expected = {
            p for p in range(prefill) if max(p * decode, rank * prefill) < min((p + 1) * decode, (rank + 1) * prefill)
        }
        assert len(sources(row)) == len(expected)


def test_head_first_needs_one_piece_per_head_range_whatever_the_sizes() -> None:
    order = dict.fromkeys("kv", ("head", "token", "dim"))
    there, here = (engine((attention(),), tp, orders=order, style="split") for tp in (4, 6))
    plans = transfer(there, here, [(0, [1, 2])], [(0, [4, 5])], 8)
    assert {s.table.num_rows for row in plans for p in row if p for s in p.sections} == {2}


def test_any_declared_ranges_will_do() -> None:
    def uneven(extent: int, rank: int, size: int) -> tuple[int, int]:
        return [(0, 3), (3, 6), (6, 8)][rank] if size == 3 else even(extent, rank, size)

    layers = (LayerSpec("a", (PartSpec("kv", (("head", 8), ("dim", 2)), "head", held=uneven),)),)
    for prefill, decode in [(3, 2), (2, 3), (3, 1), (1, 3), (3, 4), (3, 3)]:
        transfer(engine(layers, prefill), engine(layers, decode), [(0, [1, 2])], [(0, [4, 5])], 7)


# -- groups, memories, stages ----------------------------------------------------------------------------


@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16), (48, 32), (32, 48), ((48, 3), (64, 2)), (5, 7)])
@pytest.mark.parametrize("first", [0, 16, 37])
def test_block_sizes_in_any_ratio(here: Any, there: Any, first: int) -> None:
    prefill, decode = engine((attention(2),), sizes=[there]), engine((attention(2),), sizes=[here])
    size, mine = prefill.groups[0].block_size, decode.groups[0].block_size
    theirs, ids = range(math.ceil(100 / size)), range(20, 20 + math.ceil(100 / mine) - first // mine)
    transfer(prefill, decode, [(0, theirs)], [(first, ids)], 100)


def test_layers_of_different_page_sizes_in_one_memory_as_declared() -> None:
    layers = (attention(4, "a", dim=2), attention(2, "b", dim=3), latent("c"), mamba2(name="d"))
    for style in ("pages", "cross"):
        e = [engine(layers, tp, sizes=[(12, 3), 4, (8, 2), 6], style=style, num_blocks=40, seed=tp) for tp in (2, 1)]
        theirs: Lists = [(0, [1, 2]), (0, range(3, 8)), (0, [8, 9, 10]), (0, [None, None, 11])]
        mine: Lists = [(0, [20, 21]), (4, range(23, 27)), (8, [28, 29]), (12, [30])]
        transfer(e[0], e[1], theirs, mine, 17)


def test_scales_beside_the_data_are_parts_like_any_other() -> None:
    heads = (("head", 4), ("dim", 2))
    parts = (
        PartSpec("k", heads, "head", 1),
        PartSpec("k_scale", (("head", 4),), "head", 4, entry=0),
        PartSpec("k_zero", (("head", 4),), "head", 4, entry=2),
    )
    layers = (LayerSpec("a", parts),)
    transfer(engine(layers, 2), engine(layers, 4), [(0, [1, 2])], [(4, [5])], 7)
    # A scale of a whole kernel block cannot be read in halves.
    with pytest.raises(PlanRefused, match=r"first token 6 is inside an entry that covers 4 tokens.*begin at token 4"):
        transfer(engine(layers, 2), engine(layers, 4), [(0, [1, 2])], [(6, [5])], 8)
    with_other_blocks = compare(Rank(engine(layers), 0).layout, Rank(engine(layers, sizes=[8]), 0).layout)
    assert [(d.local, d.remote) for d in with_other_blocks] == [("4", "8")]


def test_stages_that_differ() -> None:
    layers = tuple(attention(4, f"l{i}") for i in range(6))
    lists: Lists = [(0, [1, 2])]
    for prefill, decode in [((2, 3), (1, 2)), ((1, 2), (2, 3)), ((2, 1), (2, 2)), ((1, 3), (1, 1))]:
        there, here = (Engine(layers, (GroupSpec(tuple(range(6)), 4),), tp, pp) for tp, pp in (prefill, decode))
        transfer(there, here, lists, [(0, [5, 6])], 7)


def test_the_remote_may_group_layers_otherwise() -> None:
    layers = (attention(2, "full"), attention(2, "near", window=6))
    there = Engine((layers[0], attention(2, "near")), (GroupSpec((0, 1), 4),))
    here = Engine(layers, (GroupSpec((0,), 4), GroupSpec((1,), 8)))
    local, remote = Rank(here, 0), Rank(there, 0, base=1 << 41)
    cache = Cache(there.layers, 3)
    oracle.fill(remote, [(0, range(5))], cache, 18)
    check_transfer(local, [remote], [(0, range(5)), (8, [5, 6])], [(0, range(5))], Cache(layers, 3), 18)


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there", "field", "values"),
    [
        (attention(4), LayerSpec("attn", attention(4).parts[:1]), "parts", ("['k', 'v']", "['k']")),
        (mamba2(rows=3), mamba2(rows=4), "dims of part 'conv_x'", ("dim=2, head, row=3", "dim=2, head, row=4")),
        (attention(4), attention(8), "sharded axis", ("'head' of 4", "'head' of 8")),
        (attention(4, dim=2), attention(4, dim=3), "dims", ("dim=2, head, token", "dim=3, head, token")),
        (attention(4, dim=1), attention(4, dim=2), "dims", ("dim=1, head, token", "dim=2, head, token")),
        (attention(4, window=0), attention(4, window=8), "window", ("none", "8")),
        (attention(4, window=9), attention(4, window=8), "window", ("9", "8")),
        (attention(4), LayerSpec("attn", attention(4).parts, "state"), "kind", ("tokens", "state")),
        (attention(4), attention(4, "other"), "layers only on one side", (["attn"], ["other"])),
    ],
)
def test_what_cannot_be_planned_is_named_with_both_values(here: Any, there: Any, field: str, values: Any) -> None:
    orders = dict.fromkeys(("conv_x",), ("head", "dim", "row")) | dict.fromkeys("kv", ("token", "head", "dim"))
    a, b = (
        Rank(engine((layer,), orders=orders if layer.kind == "tokens" or layer.name == "ssm" else {}), 0).layout
        for layer in (here, there)
    )
    [found, *_] = compare(a, b)
    assert field in found.field
    mine, theirs = values
    assert (found.local, found.remote) == (mine, theirs)
    assert found.remedy
    assert found.remedy in in_words([found])


def test_columns_of_a_convolution_that_differ_name_speculative_decoding() -> None:
    def layout(columns: int) -> Layout:
        return Rank(engine((mamba2(rows=columns, along="column"),)), 0).layout

    found = compare(layout(3), layout(5))
    assert {(x.local, x.remote) for x in found} == {("3", "5")}
    assert all(x.field.startswith("columns of the convolution of part 'conv_") for x in found)
    told = in_words(found)
    assert told.count("num_speculative_tokens (vLLM: --speculative-config)") == 1, "once, after the first"
    assert compare(layout(3), layout(3)) == ()
    [first, *_] = compare(layout(1), layout(4))  # a dim of one entry may be left out
    assert (first.local, first.remote) == ("1", "4")


def test_a_difference_in_many_layers_is_told_once() -> None:
    def layout(dim: int) -> Layout:
        orders = dict.fromkeys("kv", ("token", "head", "dim"))
        return Rank(engine(tuple(attention(4, f"l{i}", dim=dim) for i in range(9)), orders=orders), 0).layout

    assert len(compare(layout(2), layout(3))) == 2
    assert str(compare(layout(2), layout(3))[0]).startswith("dims of part 'k' of layer 'l0' and 8 more: local ")


def test_a_missing_layer_and_a_gap_between_ranks_are_refused() -> None:
    local = Rank(engine((attention(4, "a"), attention(4, "b"))), 0)
    with pytest.raises(NotCovered, match=r"layers that no remote rank has: local \['b'\]"):
        assign(local.layout, [Rank(engine((attention(4, "a"),)), 0).layout])
    halves = [Rank(engine((attention(4, "a"), attention(4, "b")), 2), r).layout for r in range(2)]
    with pytest.raises(NotCovered, match=r"and 1 more: local needs \[2, 4\) of 4 along 'head' .*tp0 \[0, 2\)"):
        assign(local.layout, halves[:1])
    assert [len(s) for s in assign(local.layout, halves)] == [4, 4]


def test_ranks_that_cut_a_part_along_different_axes_are_refused() -> None:
    def cut(tp_rank: int, axis: str, heads: int, dim: int) -> Layout:
        held = (tp_rank, tp_rank + 1) if axis else (0, 0)
        dims, extent = [("token", 4), ("head", heads), ("dim", dim)], 2 * bool(axis)
        part = dense_part("kv", "uint8", dims, axis=axis, held=held, extent=extent)
        views, size = (View(0, 0, "l", 0, 4 * heads * dim, (part,)),), 1 + bool(axis)
        memories, groups = (Memory(4096, 16 * heads * dim),), (Group("g", 4, 4),)
        return Layout(tp_rank=tp_rank, tp_size=size, memories=memories, groups=groups, views=views)

    whole, remotes = cut(0, "", 2, 2), [cut(0, "head", 1, 2), cut(1, "dim", 2, 1)]
    assert [compare(whole, remote) for remote in remotes] == [(), ()]
    with pytest.raises(NotCovered, match=r"sharded axis of layer 'l' part 'kv': local 'head' of 2, remote 'dim' of 2"):
        assign(whole, remotes)


@pytest.mark.parametrize(
    ("theirs", "mine", "tokens", "error", "message"),
    [
        ([(0, [0, 1])], [(0, [0, 1, 2])], 12, RemoteTooShort, "8 on of 12, but .*: 2 blocks of 4 from token 0"),
        ([(4, [0, 1])], [(0, [0, 1])], 8, RemoteTooShort, "lent from token 4 on"),
        ([(0, [0, None, 1])], [(0, [0, 1, 2])], 12, RemoteTooShort, "token 4 on.*1 placeholders"),
        ([(0, [])], [(0, [0])], 1, RemoteTooShort, "0 blocks"),
        ([(0, [48])], [(0, [0])], 1, PlanRefused, "names block 48, but declared 48"),
    ],
)
def test_what_is_not_offered_is_refused(theirs: Lists, mine: Lists, tokens: int, error: Any, message: str) -> None:
    e = engine((attention(2),))
    with pytest.raises(error, match=message):
        transfer(e, e, theirs, mine, tokens)


@pytest.mark.parametrize(
    ("theirs", "mine", "wanted", "error", "message"),
    [
        ([(0, [0, 1, 2])], [(0, [5])], 12, PlanRefused, "after 12 tokens belongs in place 2 .*beyond the 1 that"),
        ([(0, [0, 1, 2])], [(0, [5, None, None])], 12, PlanRefused, "place 2 .*a placeholder"),
        ([(0, [0, 1])], [(0, [5, 6, 7])], 12, RemoteTooShort, "token 11 on of 12.*no state was lent in place 2 of 2"),
        ([(0, [0, 1, None])], [(0, [5, 6, 7])], 12, RemoteTooShort, "no state was lent in place 2 of 3"),
        ([(0, [0, 1, 2])], [(0, [5, 6])], 7, RemoteTooShort, "states are kept every 4 tokens only"),
        ([(0, [0, 1, 48])], [(0, [5, 6, 7])], 12, PlanRefused, "names block 48"),
    ],
)
def test_a_state_that_is_not_there_is_refused(
    theirs: Lists, mine: Lists, wanted: int, error: Any, message: str
) -> None:
    e = engine((mamba2(),))
    with pytest.raises(error, match=message):
        transfer(e, e, theirs, mine, 12, wanted=wanted)


def test_padding_names_what_was_not_filled() -> None:
    e = engine((attention(2), mamba2(), attention(2, "near", window=5)))
    local = Rank(e, 0)
    lists = BlockLists(check_block_ids(local.layout, [(4, [1, 2, 3]), (0, [4, None, 5]), (0, [1, 2, 3])]), [], 10)
    assert list(lists.padding(local.layout)) == [(0, 2, 2, 2), (0, 3, 0, 4), (2, 3, 2, 2)]


def test_the_engine_may_have_a_placeholder_id_of_its_own() -> None:
    layout = Rank(engine((attention(2),)), 0).layout
    [group] = layout.groups
    layout = msgspec.structs.replace(layout, groups=(msgspec.structs.replace(group, null_block=0),))
    [(_, ids)] = check_block_ids(layout, [(0, [0, 0, 7, None])])
    assert ids.tolist() == [-1, -1, 7, -1]


def test_a_window_inside_a_block_needs_no_more_than_is_lent() -> None:
    e = engine((attention(2, window=5),), sizes=[4])
    plan = one(e, e, [(14, [3, 4])], [(12, [5, 6])], 18)
    assert sorted(pairs(plan)) == [(5, 3), (6, 4)]
    with pytest.raises(RemoteTooShort, match=r"token 14 on.*lent from token 15"):
        one(e, e, [(15, [3, 4])], [(12, [5, 6])], 18)


def test_neither_sides_placeholder_becomes_an_address() -> None:
    def ours(layout: Layout, null: int) -> Layout:
        return msgspec.structs.replace(
            layout, groups=tuple(msgspec.structs.replace(g, null_block=null) for g in layout.groups)
        )

    local, remote = Rank(engine((attention(2), mamba2())), 0), Rank(engine((attention(2), mamba2())), 0, base=1 << 41)
    remote.layout = ours(remote.layout, 9)
    for offer in ([(0, [9, 5]), (0, [2, 3])], [(0, [4, 5]), (0, [2, 9])]):
        [peer] = oracle.maps(local, [remote])
        assert peer is not None
        lists = BlockLists(check_block_ids(local.layout, [(0, [1, 2]), (0, [3, 4])]), oracle.offers(offer), 8)
        with pytest.raises(RemoteTooShort):
            plan_read(peer, lists)
    [(_, ids), _] = check_block_ids(ours(local.layout, 9), [(0, [9, 5]), (0, [2, 3])])
    assert ids.tolist() == [-1, 5]
    with pytest.raises(PlanRefused, match="names block 9, which is its placeholder; give None"):
        check_blocks("group 0", remote.layout.groups[0], np.array([9]))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(0, (b for b in (1, 2)))], "flat list of integers"),
        ([(0, {1, 2})], "flat list of integers"),
        ([(0, "12")], "flat list of integers"),
        ([(0, [[1], [2, 3]])], "flat list of integers"),
        ([(0, [1 << 70])], "flat list of integers|not a block"),
        ([(0, None)], "flat list of integers"),
        ([(0, [0.5])], "flat list of integers"),
        ([(0, [0, 48])], r"block id 48 is outside \[0, 48\)"),
        ([(0, [-1, 2])], "block id -1 is not one from 0 to"),
        ([(0, [3, 4, 3])], "block id 3 is given twice"),
        ([], "0 groups of blocks"),
        ([(-1, [3])], "first_token -1"),
        ([(0,)], "give one .first_token, block_ids. per group"),
        ([7], "give one .first_token, block_ids. per group"),
        (5, "give one .first_token, block_ids. per group"),
        ([("0", [1])], "first_token '0' is not a number"),
        ([(True, [1])], "first_token True is not a number"),
        ([(1 << 60, [1])], "is not a number from 0"),
        ([(0, [1])], "1 blocks of 4 tokens from token 0 on end at token 4, but 7 are wanted; give all blocks"),
        ([(4, [])], ""),
        ([(np.int64(4), np.array([1]))], ""),
        ([(7, [1])], ""),
        ([(0, range(2))], ""),
    ],
)
def test_lists_of_any_kind_are_taken_or_refused(groups: Any, message: str) -> None:
    layout = Rank(engine((attention(2),)), 0).layout
    if not message:
        check_block_ids(layout, groups, 7)
        return
    with pytest.raises(PlanRefused, match=message):
        check_block_ids(layout, groups, 7)


def test_the_last_blocks_of_any_size_use_the_tables_of_the_handshake() -> None:
    for here, there in [(4, 4), (48, 32), (12, 16)]:
        local, remote = (Rank(engine((attention(2),), sizes=[s]), 0, base=b << 41) for s, b in ((here, 1), (there, 2)))
        [peer] = oracle.maps(local, [remote])
        assert peer is not None
        known = {table.table_id for table in peer.regular}
        for tokens in (1, 47, 50, 95):
            lists: Lists = [(0, list(range(math.ceil(tokens / here))))]
            offer = oracle.offers([(0, list(range(math.ceil(tokens / there))))])
            plan = plan_read(peer, BlockLists(check_block_ids(local.layout, lists), offer, tokens))
            assert {s.table.table_id for s in plan.sections} <= known


@pytest.mark.parametrize(("here", "there"), [(16, 10007), (16, 1 << 20), (4093, 4099)])
def test_sizes_that_share_no_boundary_are_refused_before_any_table(here: int, there: int) -> None:
    local, remote = (
        Rank(engine((latent(),), sizes=[s], num_blocks=2), 0, base=b << 41) for s, b in ((here, 1), (there, 2))
    )
    if math.lcm(here, there) == max(here, there):
        with pytest.raises(LayoutError, match="kinds of cuts"):
            oracle.maps(local, [remote])
        return
    with pytest.raises(LayoutError, match=f"kernel blocks of {here} tokens here and {there} there .*common factor"):
        oracle.maps(local, [remote])


def test_placeholders_in_a_row_are_none_of_them_blocks() -> None:
    e = engine((attention(2),))
    with pytest.raises(RemoteTooShort, match="token 8 on of 16"):
        one(e, e, [(0, [0, None, None, 1])], [(8, [5, 6])], 16)


def test_hashes_end_the_prefix_where_they_first_differ() -> None:
    ours, theirs = [str(i) for i in range(10)], [*map(str, range(7)), "x", "8", "9"]
    assert common_prefix(ours, theirs, 4, 40) == 28
    assert common_prefix(ours, ours, 4, 42) == 42  # the last, partial block is in no hash
    assert common_prefix(ours[:5], ours, 4, 42) == 20
    assert common_prefix(["other"], ours, 4, 42) == 0
    assert common_prefix([], ours, 4, 42) == 0
    assert common_prefix([], [], 4, 3) == 3
    assert common_prefix([], [], 4, 7) == 0
    assert common_prefix(ours[:1], ours[:1], 4, 9) == 4


@given(
    agreed=st.integers(0, 6),
    more=st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1), (0, 3)]),
    hash_tokens=st.integers(1, 6),
    tail=st.integers(-3, 7),
)
def test_tokens_after_the_last_hash_are_trusted_only_between_chains_that_say_the_same(
    agreed: int, more: tuple[int, int], hash_tokens: int, tail: int
) -> None:
    both = [str(i) for i in range(agreed)]
    ours, theirs = both + ["a"] * more[0], both + ["b"] * more[1]
    hashed = agreed * hash_tokens
    num_tokens = max(hashed + tail, 0)
    # A hash that one side has alone covers tokens of which the other has said nothing, or something else.
    is_trusted = more == (0, 0) and 0 < tail < hash_tokens
    assert common_prefix(ours, theirs, hash_tokens, num_tokens) == (
        num_tokens if is_trusted else min(hashed, num_tokens)
    )


# -- layers that share their KV ----------------------------------------------------------------------------

ALIASES = [None, ("b", "a"), ("a", "b")]


class Shared(Cache):
    """Two layers, one KV."""

    def entry(self, layer: int, spec: PartSpec, index: int, held: tuple[int, int]) -> Any:
        return super().entry(0, spec, index, held)


def sharing(each: Engine, rank: int, alias: tuple[str, str] | None, base: int = 1 << 40) -> Rank:
    """A rank with memory for both layers, or for one of them that the other is an alias of."""
    made = Rank(each, rank, base=base)
    if alias is not None:
        kept = tuple(v for v in made.layout.views if v.layer != alias[0])
        made.layout = msgspec.structs.replace(made.layout, views=kept, aliases=(alias,))
        check_layout(made.layout)
    return made


@pytest.mark.parametrize("here", ALIASES)
@pytest.mark.parametrize("there", ALIASES)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_layers_that_share_kv_are_read_wherever_they_have_memory(
    here: Any, there: Any, prefill: int, decode: int
) -> None:
    layers = (attention(12, "a"), attention(12, "b"))
    engines = [Engine(layers, (GroupSpec((0, 1), size),), tp, seed=tp) for tp, size in ((prefill, 4), (decode, 6))]
    cache = Shared(layers, 3)
    remotes = [sharing(engines[0], r, there, (1 + r) << 41) for r in range(prefill)]
    for remote in remotes:
        oracle.fill(remote, [(0, range(5))], cache, 18)
    for rank in range(decode):
        local = sharing(engines[1], rank, here)
        assert all(compare(local.layout, remote.layout) == () for remote in remotes)
        plans = check_transfer(local, remotes, [(6, [7, 4])], [(0, range(5))], cache, 18)
        # Memory of our own is filled once, however many names its layer has.
        size = sum(p.itemsize * math.prod(d.size for d in p.dims) for v in local.layout.views for p in v.parts)
        assert sum(plan.num_bytes for plan in plans if plan) == 2 * size


def test_a_side_that_does_not_know_an_alias_misses_nothing() -> None:
    both, first, second = (
        Engine(tuple(attention(4, n) for n in names), (GroupSpec(tuple(range(len(names))), 4),))
        for names in ("ab", "a", "b")
    )
    aliased = sharing(both, 0, ("b", "a"))
    for one in (first, second):
        other = Rank(one, 0, base=1 << 42)
        for local, remote in ((aliased, other), (other, aliased)):
            assert compare(local.layout, remote.layout) == ()
            assert [len(s) for s in assign(local.layout, [remote.layout])] == [2]
    [difference] = compare(sharing(both, 0, None).layout, Rank(first, 0).layout)
    assert (difference.field, difference.local) == ("layers only on one side", ["b"])


def test_of_very_many_layers_eight_are_named() -> None:
    one = Rank(engine((attention(name="z"),)), 0).layout
    for count, last in ((8, "layer7"), (9, "... 1 more")):
        many = Rank(engine(tuple(attention(name=f"layer{i}") for i in range(count))), 0).layout
        [difference] = compare(many, one)
        assert isinstance(difference.local, list)
        assert (len(difference.local), difference.local[-1]) == (count, last)


def test_a_layouts_digest_is_the_same_in_all_versions() -> None:
    """Files are found by it. A change on purpose means that what older versions stored is lost."""
    assert fingerprint(make_layout()) == "f734b1b83b549feb"
    assert fingerprint(record_form(make_layout())) == "632c80f892872f0b"


def test_one_memory_under_two_names_is_refused_with_the_remedy() -> None:
    made = sharing(Engine((attention(4, "a"), attention(4, "b")), (GroupSpec((0, 1), 4),)), 0, ("b", "a")).layout
    twice = msgspec.structs.replace(
        made, aliases=(), views=(*made.views, msgspec.structs.replace(made.views[0], layer="b"))
    )
    with pytest.raises(LayoutError, match=r"'a' part 'k' and layer 'b' part 'k' overlap.* declare it an alias"):
        check_layout(twice)


# -- the same array, declared in other words ---------------------------------------------------------------


def whole(heads: int, *, named: bool = True) -> LayerSpec:
    """Heads that every rank holds; one of a single head may say so, or not."""
    dims = (("head", heads), ("dim", 2)) if named else (("dim", 2),)
    return LayerSpec("attn", (PartSpec("k", dims), PartSpec("v", dims)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (whole(1), attention(1)),
        (whole(1, named=False), attention(1)),
        (whole(1, named=False), whole(1)),
        (whole(6), attention(6)),
    ],
)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_whole_on_one_side_and_sharded_on_the_other(one: Any, other: Any, prefill: int, decode: int) -> None:
    def heads(rank: Rank) -> set[int]:
        part = rank.layout.views[0].parts[0]
        return set(range(*part.held)) if part.axis else set(range(dict(other.parts[0].dims)["head"]))

    for a, b in ((one, other), (other, one)):
        there, here = (engine((layer,), tp, seed=tp) for layer, tp in ((a, prefill), (b, decode)))
        remotes = [Rank(there, r, base=(1 + r) << 41) for r in range(prefill)]
        for remote in remotes:
            oracle.fill(remote, [(0, [1, 2])], Cache((a,), 3), 7)
        for rank in range(decode):
            local = Rank(here, rank)
            assert all(compare(local.layout, remote.layout) == () for remote in remotes)
            answered = oracle.peers_of(local, remotes)
            if heads(local) <= set[int]().union(*map(heads, answered)):
                check_transfer(local, remotes, [(0, [4, 5])], [(0, [1, 2])], Cache((b,), 3), 7)
            else:
                with pytest.raises(NotCovered, match=r"held ranges .* along 'head'"):
                    oracle.maps(local, answered)


def test_a_share_is_not_taken_for_the_whole() -> None:
    [found, *_] = compare(Rank(engine((whole(2),)), 0).layout, Rank(engine((attention(4),)), 0).layout)
    assert str(found).endswith("local none, remote 'head' of 4")


def test_a_packed_tensor_against_keys_and_values_names_the_remedy() -> None:
    packed = LayerSpec("attn", (PartSpec("kv", (("head", 4), ("dim", 4)), "head"),))
    [found] = compare(Rank(engine((packed,)), 0).layout, Rank(engine((attention(4),)), 0).layout)
    assert "a packed tensor is k and v, if its order names a dim 'kv'" in found.field


# -- windows -----------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150)
def test_a_window_of_one_token_needs_nothing_of_the_past(data: st.DataObject) -> None:
    size, there = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    tokens = data.draw(st.integers(1, 30))
    prefill, decode = (engine((attention(2, window=1),), sizes=[s], num_blocks=64) for s in (there, size))
    count = math.ceil(tokens / there)
    theirs: Any = data.draw(st.sampled_from([[], [None] * count, [None] * count + [3]]))
    plan = one(prefill, decode, [(0, theirs)], [(0, range(math.ceil(tokens / size)))], tokens)
    assert plan.num_bytes == 0


@pytest.mark.parametrize(
    ("size", "window", "theirs"),
    [
        (4, 2, [4, None, 5]),  # one older block, then a hole, then the token that is needed
        (12, 2, [3, 4, None, None, 5]),
        (20, 2, [1, None, 2, None, 3]),
        (20, 6, [1, None, None, 4, 5]),
    ],
)
def test_a_hole_before_the_window_is_no_obstacle_wherever_it_is(size: int, window: int, theirs: Any) -> None:
    """Of 20 tokens in blocks of four, a window of 2 needs token 19, and one of 6 needs tokens 15 to 19."""
    prefill, decode = (engine((attention(2, window=window),), sizes=[s]) for s in (4, size))
    listed: Any = [None] * (5 - len(theirs)) + theirs
    plan = one(prefill, decode, [(0, listed)], [(0, range(10, 10 + math.ceil(20 / size)))], 20)
    assert {b for _, b in pairs(plan)} >= {b for b in theirs[-((window + 2) // 4) :] if b is not None}
    with pytest.raises(RemoteTooShort, match="token 16 on of 20"):
        one(prefill, decode, [(0, [*listed[:-1], None])], [(0, range(10, 10 + math.ceil(20 / size)))], 20)


@given(data=st.data())
@settings(max_examples=300)
def test_a_window_is_read_exactly_if_all_that_it_sees_is_lent(data: st.DataObject) -> None:
    """Every other block of the prefill engine may be gone, in any order; the oracle compares the bytes."""
    window, tokens = data.draw(st.integers(2, 14), label="window"), data.draw(st.integers(1, 30), label="tokens")
    here, there = (data.draw(st.sampled_from([1, 2, 3, 4, 6, (4, 2), (6, 3), 12]), label="size") for _ in "ab")
    prefill, decode = (engine((attention(2, window=window),), sizes=[s]) for s in (there, here))
    size, mine = prefill.groups[0].block_size, decode.groups[0].block_size
    first = data.draw(st.integers(0, tokens), label="cached")
    gone = data.draw(st.sets(st.integers(0, math.ceil(tokens / size) - 1)), label="gone")
    theirs: Lists = [(0, [None if i in gone else i for i in range(math.ceil(tokens / size))])]
    ids = range(math.ceil(tokens / mine) - first // mine) if first < tokens else []
    needed = range(max(first, tokens - window + 1, 0), tokens)
    if any(token // size in gone for token in needed):
        with pytest.raises(RemoteTooShort):
            one(prefill, decode, theirs, [(first, ids)], tokens)
    else:
        one(prefill, decode, theirs, [(first, ids)], tokens)


RANGES = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.tuples(st.integers(0, 6), st.integers(1, 12)), st.lists(RANGES, max_size=12))
@settings(max_examples=200)
def test_a_range_is_covered_from_the_left_by_whoever_reaches_farthest(
    wanted: tuple[int, int], held: list[tuple[int, int]]
) -> None:
    lo, hi = wanted[0], sum(wanted)
    at = lo
    for index, start, end in _cover(lo, hi, held):
        assert start == at < end <= hi
        here = [i for i, (a, b) in enumerate(held) if a <= start < b]
        if index is None:
            assert not here
            assert end == min([a for a, _ in held if a > start] + [hi])
        else:
            farthest = max(held[i][1] for i in here)
            assert index == min(i for i in here if held[i][1] == farthest)
            assert end == min(farthest, hi)
        at = end
    assert at == hi
