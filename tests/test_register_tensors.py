"""Tensors become layouts, or one clear refusal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynckv import LayoutError, register_tensors
from asynckv.geometry.layout import Layout, fingerprint, shard
from asynckv.geometry.match import NotCovered, assign, compare, predicted, remote_ranks
from asynckv.integrations.vllm.caches import Place, is_known, kv_heads
from asynckv.layout import Group, TensorPart, TokenShard, register_parts
from tests import oracle
from tests.oracle import Cache, Engine, GroupSpec, LayerSpec, PartSpec, Rank, check_transfer

ORDER = ("kv", "block", "token", "head", "dim")
DECLARED: dict[str, Any] = {"order": ORDER, "block_size": 4, "num_blocks": 8, "heads": (0, 2), "num_heads": 2}


def kv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*(shape or (2, 8, 4, 2, 16)), dtype=dtype)


def test_a_tensor_becomes_a_memory_and_a_view() -> None:
    tensor = kv()
    registration = register_tensors({"layers.0": tensor}, **DECLARED)
    (memory,), (view,) = registration.layout.memories, registration.layout.views
    assert (memory.base, memory.length) == (tensor.data_ptr(), tensor.numel() * 2)
    assert (view.layer, view.stride, [p.name for p in view.parts]) == ("layers.0", 4 * 2 * 16 * 2, ["k", "v"])
    assert registration.owners == (tensor,)


def test_tensors_of_one_storage_share_a_memory() -> None:
    whole = torch.zeros(2, 2, 8, 4, 2, 16, dtype=torch.bfloat16)
    registration = register_tensors({"a": whole[0], "b": whole[1]}, **DECLARED)
    assert len(registration.layout.memories) == 1
    assert [v.offset for v in registration.layout.views] == [0, whole[0].numel() * 2]


def test_permuted_and_cross_layer_tensors_keep_their_strides() -> None:
    stored = torch.zeros(8, 3, 2, 2, 4, 16, dtype=torch.bfloat16)  # block, layer, kv, head, token, dim
    tensors = {f"l{i}": stored[:, i].permute(1, 0, 3, 2, 4) for i in range(3)}
    layout = register_tensors(tensors, **DECLARED).layout
    assert {v.stride for v in layout.views} == {3 * 2 * 2 * 4 * 16 * 2}


def test_num_blocks_is_what_is_declared() -> None:
    assert register_tensors({"a": kv(2, 20, 4, 2, 16)}, **DECLARED).layout.groups[0].num_blocks == 8


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        (kv(2, 7, 4, 2, 16), {}, "7 kernel blocks, fewer than the 8 declared"),
        (kv(2, 8, 5, 2, 16), {}, "dim 'token' has 5 entries, but 4 were declared"),
        (kv(2, 8, 4, 3, 16), {}, "dim 'head' has 3 entries, but 2 were declared"),
        (kv(8, 4, 2, 16), {}, "has 4 dims"),
        (kv(2, 16, 4, 2, 16), {"ratio": 2}, "dim 'token' has 4 entries, but 2 were declared"),
        (kv(2, 15, 2, 2, 16), {"ratio": 2}, "15 kernel blocks, fewer than the 16 declared"),
        (kv(dtype=torch.float64), {}, "dtype 'float64' is unknown"),
        (torch.zeros(2, 8, 4, 2, 16, device="meta"), {}, "meta device"),
        (torch.zeros(2, 8, 1, 2, 16, dtype=torch.bfloat16).expand(2, 8, 4, 2, 16), {}, "stride 0"),
        (kv(), {"block_size": 5, "ratio": 2}, "not a positive multiple"),
        (kv(), {"order": ("kv", "block", "token", "heads", "dim")}, "'heads' is none of them; did you mean 'head'"),
        (kv(), {"order": ("kv", "blokc", "token", "head", "dim")}, "'blokc' is none of them; did you mean 'block'"),
        (kv(), {"order": ("kv", "block", "token", "token", "dim")}, "'token' is named twice"),
        (kv(8, 4, 2, 16), {"order": ("kv", "block", "token", "head")}, "'dim' is missing"),
    ],
)
def test_what_does_not_fit_is_refused(tensor: torch.Tensor, change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        register_tensors({"layers.0": tensor}, **{**DECLARED, **change})


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("blocks", "token", "dim"), r"names 'blocks'; did you mean 'block'\?"),
        (("block", "tokens", "dim"), r"names 'tokens'; did you mean 'token'\?"),
        (("place", "token", "dim"), "has no 'block', the dim of kernel blocks or states"),
    ],
)
def test_a_mistyped_dim_of_a_part_is_named(order: tuple[str, ...], message: str) -> None:
    part = TensorPart(layer="a", name="latent", tensor=torch.zeros(8, 4, 16), order=order)
    with pytest.raises(LayoutError, match=message):
        register_parts([part], groups=[Group("attention", 4, 8)])


def test_a_mistyped_axis_is_named() -> None:
    part = TensorPart(
        layer="a", name="k", tensor=torch.zeros(8, 4, 2, 16), order=("block", "token", "head", "dim"), axis="heads",
        held=(0, 2), extent=2,
    )  # fmt: skip
    with pytest.raises(LayoutError, match="axis 'heads' is not one of its dims token, head, dim; did you mean 'head'"):
        register_parts([part], groups=[Group("attention", 4, 8)])


def test_a_block_of_several_kernel_blocks_is_so_many_places_of_the_tensor() -> None:
    (group,) = register_tensors({"a": kv(2, 16, 2, 2, 16)}, **DECLARED, ratio=2).layout.groups
    assert (group.block_size, group.num_blocks, group.num_kernel_blocks, group.kernel_size) == (4, 8, 16, 2)


SHARED: dict[str, Any] = {"order": ("block", "token", "dim"), "num_blocks": 8, "tp_rank": 5, "tp_size": 8}


@pytest.mark.parametrize("shape", [(8, 4, 16), (16, 2, 16)])
def test_ranks_that_share_tokens_register_their_own(shape: tuple[int, ...]) -> None:
    ratio = shape[0] // 8
    layout = register_tensors(
        {"a": torch.zeros(*shape)}, **SHARED, block_size=16, ratio=ratio, token_shard=(4, 1, 2)
    ).layout
    assert (layout.schema, layout.token_shards) == (2, (TokenShard(0, 4, 1, 2),))
    assert (str(layout.shard(0)), layout.num_token_shards, layout.groups[0].block_size) == ("tokens 1 of 4 by 2", 4, 16)


@pytest.mark.parametrize("more", [{}, {"token_shard": None}, {"token_shard": (1, 0, 1)}, {"token_shard": (1, 0, 16)}])
def test_a_rank_with_all_tokens_has_the_layout_that_it_always_had(more: dict[str, Any]) -> None:
    layout = register_tensors({"a": torch.zeros(8, 16, 16)}, **SHARED, block_size=16, **more).layout
    assert (layout.schema, layout.token_shards) == (1, msgspec.UNSET)


@pytest.mark.parametrize(
    ("given", "change", "message"),
    [
        ((4, 1), {}, r"token_shard is \(4, 1\); give \(size, rank, interleave\)"),
        (4, {}, "token_shard is 4; give"),
        ("411", {}, "token_shard is '411'; give"),
        (("4", 1, 1), {}, "token shard 0 size is '4': expected `int`, got `str`"),
        ((4.0, 1, 1), {}, "size is 4.0: expected `int`, got `float`"),
        ((0, 0, 1), {}, "size is 0: expected `int` >= 1"),
        ((4, -1, 1), {}, "rank is -1: expected `int` >= 0"),
        ((4, 1, 0), {}, "interleave is 0: expected `int` >= 1"),
        ((1 << 20, 1, 1), {}, "size is 1048576: expected `int` <= 65536"),
        ((4, 2, 1), {}, "tp_rank 5 of 8 cannot have shard 2 of 4; .* the rank is tp_rank modulo the size"),
        ((1, 5, 1), {}, "tp_rank 5 of 8 cannot have shard 5 of 1; the size is 2 or more"),
        ((3, 2, 1), {}, "tp_rank 5 of 8 cannot have shard 2 of 3; the size .* divides tp_size"),
        ((4, 1, 3), {}, "an interleave of 3 does not fit 4 tokens per block and 4 per kernel block on each of 4 ranks"),
        ((4, 1, 1), {"block_size": 18}, "kernel blocks of 18 tokens on all ranks cannot be shared by 4"),
        ((4, 1, 1), {"block_size": 4}, "holds 4 tokens .* 4 tokens per block .* / 4 ranks = 1; .* give 16, or tensors"),
        ((2, 1, 1), {}, "holds 4 tokens per kernel block, .* / ratio 1 = 16 / 2 ranks = 8; .* so give 8, or tensors"),
        (None, {}, "dim 'token' has 4 entries, but 16 were declared"),
    ],
)
def test_a_share_of_tokens_that_does_not_fit_is_refused(given: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        register_tensors({"a": torch.zeros(8, 4, 16)}, **{**SHARED, "block_size": 16, **change}, token_shard=given)


def parts_of(shards: Any, *groups: Group, **changes: Any) -> Layout:
    """Register a latent of 4 tokens per block on this rank in group 0, and a state in the last group."""
    latent = TensorPart(
        **{
            "layer": "a",
            "name": "latent",
            "tensor": torch.zeros(8, 4, 16),
            "order": ("block", "token", "dim"),
            **changes,
        }
    )
    state = TensorPart(
        layer="b", name="state", tensor=torch.zeros(8, 16), order=("block", "dim"), group=len(groups) - 1
    )
    parts = [latent, state] if len(groups) > 1 else [latent]
    return register_parts(parts, groups=groups, tp_rank=5, tp_size=8, token_shards=shards).layout


STATES = Group("states", 1 << 40, 8, kind="state")


def test_some_groups_share_tokens_and_others_are_whole() -> None:
    layout = parts_of([TokenShard(0, 4, 1, 2), TokenShard(1)], Group("latents", 16, 8), STATES)
    assert (layout.schema, layout.token_shards) == (2, (TokenShard(0, 4, 1, 2),))
    assert [str(layout.shard(g)) for g in range(2)] == ["tokens 1 of 4 by 2", "all tokens"]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (None, "token_shards is None; give a sequence of TokenShard"),
        (TokenShard(0, 4, 1), "give a sequence of TokenShard"),
        ([(0, 4, 1, 1)], r"token_shards is \[\(0, 4, 1, 1\)\]; give a sequence of TokenShard"),
        ([TokenShard(0, "4", 1)], "token shard 0 size is '4': expected `int`"),  # type: ignore[arg-type]
        ([TokenShard(2, 4, 1)], "a token shard names group 2, but the layout has 2 groups"),
        ([TokenShard(0, 4, 1)] * 2, r"token_shards have \(group, size\) \[\(0, 4\), \(0, 4\)\]; give one per group"),
        ([TokenShard(0, 4, 1), TokenShard(1, 2, 1)], "all of one size"),
        ([TokenShard(1, 4, 1)], "group 1 .'states'.*: a group with states cannot be shared by token; keep it whole"),
    ],
)
def test_a_wrong_list_of_shares_is_refused(shards: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parts_of(shards, Group("latents", 16, 8), STATES)


@pytest.mark.parametrize(
    ("group", "changes", "message"),
    [
        (Group("g", 16, 8, window=8), {}, "a group with a window of 8 tokens cannot be shared by token"),
        (Group("g", 16, 8), {"order": ("block", "x", "dim")}, "has no dim named 'token'.*keep its group whole"),
        (Group("g", 32, 8), {"tokens_per_entry": 2}, "entries of 2 tokens would be cut .* interleave a multiple of 2"),
        (
            Group("g", 32, 8),
            {},
            "holds 4 tokens per kernel block, .* / ratio 1 = 32 / 4 ranks = 8; .* so give 16, or tensors",
        ),
    ],
)
def test_a_group_that_cannot_be_shared_is_refused(group: Group, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parts_of([TokenShard(0, 4, 1, 1)], group, **changes)


def test_a_part_that_no_axis_cuts_holds_no_range_of_one() -> None:
    part = TensorPart(layer="a", name="latent", tensor=torch.zeros(8, 4, 16), order=("block", "token", "dim"))
    ((made,),) = (view.parts for view in register_parts([part], groups=[Group("g", 4, 8)]).layout.views)
    assert (made.axis, made.held, made.extent, made.tokens_per_entry) == ("", (0, 0), 0, 1)


def test_overlapping_tensors_are_refused() -> None:
    whole = torch.zeros(3, 8, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="overlap"):
        register_tensors({"a": whole[:2], "b": whole[1:]}, **DECLARED)


def test_freed_tensors_are_refused() -> None:
    tensor = kv()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="freed"):
        register_tensors({"a": tensor}, **DECLARED)


def test_a_layer_that_uses_anothers_kv_is_an_alias() -> None:
    tensor, other = kv(), kv()
    # The engine's dictionary may list it with the other's tensor, or leave it out.
    for tensors in ({"a": tensor, "b": tensor}, {"a": tensor}):
        layout = register_tensors(tensors, **DECLARED, aliases={"b": "a"}).layout
        assert (layout.aliases, [v.layer for v in layout.views]) == ((("b", "a"),), ["a"])
    with pytest.raises(LayoutError, match=r"'a' part 'k' and layer 'b' part 'k' overlap .*declare it an alias"):
        register_tensors({"a": tensor, "b": tensor}, **DECLARED)
    with pytest.raises(LayoutError, match=r"layer 'b' is declared an alias of layer 'a', but .* not the same memory"):
        register_tensors({"a": tensor, "b": other}, **DECLARED, aliases={"b": "a"})
    with pytest.raises(LayoutError, match="layer 'b' is declared an alias of layer 'x', but"):
        register_tensors({"a": tensor, "b": tensor}, **DECLARED, aliases={"b": "x"})
    with pytest.raises(LayoutError, match="'b' is an alias of 'x', which has no memory"):
        register_tensors({"a": tensor}, **DECLARED, aliases={"b": "x"})


def test_parts_of_an_alias_are_its_layers() -> None:
    tensor = torch.zeros(8, 4, 16)
    group = Group("g", 4, 8)
    parts = [TensorPart(layer=n, name="latent", tensor=tensor, order=("block", "token", "dim")) for n in "ab"]
    layout = register_parts(parts, groups=[group], aliases={"b": "a"}).layout
    assert (layout.aliases, [v.layer for v in layout.views]) == ((("b", "a"),), ["a"])
    parts[1] = replace(parts[1], tensor=tensor.clone())
    with pytest.raises(LayoutError, match=r"layer 'b' part 'latent' is declared an alias of layer 'a', but"):
        register_parts(parts, groups=[group], aliases={"b": "a"})


def test_a_packed_tensor_is_keys_and_values_if_its_order_says_so() -> None:
    packed = torch.zeros(8, 4, 2, 32, dtype=torch.bfloat16)  # block, token, head, keys then values
    unpacked = packed.view(8, 4, 2, 2, 16)
    order = ("block", "token", "head", "kv", "dim")
    layout = register_tensors({"a": unpacked}, **{**DECLARED, "order": order}).layout
    assert [(p.name, p.offset) for p in layout.views[0].parts] == [("k", 0), ("v", 32)]
    assert layout.memories[0].base == packed.data_ptr()
    assert compare(layout, register_tensors({"a": kv()}, **DECLARED).layout) == ()
    # Widths that differ: a slice each.
    halves = [
        TensorPart(layer="a", name=n, tensor=packed[..., i], order=("block", "token", "head", "dim"))
        for n, i in (("k", slice(0, 20)), ("v", slice(20, 32)))
    ]
    made = register_parts(halves, groups=[Group("g", 4, 8)]).layout
    assert [v.offset for v in made.views] == [0, 40]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0; it must be an integer from 1"),
        ({"tp_rank": -1}, "tp_rank is -1: expected `int` >= 0"),
        ({"model": b"raw"}, "model is b'raw': expected `str`, got `bytes`"),
        ({"heads": (-1, 1)}, r"heads\[0\] is -1; it must be an integer from 0"),
    ],
)
def test_what_is_out_of_bounds_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        register_tensors({"layers.0": kv()}, **{**DECLARED, **change})


def test_a_layers_name_in_bytes_is_refused_by_its_place() -> None:
    with pytest.raises(LayoutError, match=r"a layer's name is b'layers\.0'; it must be a str"):
        register_tensors({b"layers.0": kv()}, **DECLARED)  # type: ignore[dict-item]


# -- Heads that are guessed -------------------------------------------------------------------------------------------

SIZES = (1, 2, 4, 8, 16, 3, 6)


def starts(heads: tuple[int, ...], tp: int) -> bool:
    """Return True if vLLM starts such a model: heads are cut evenly, or every head is on equally many ranks."""
    return all(each % tp == 0 or tp % each == 0 for each in heads)


def engine(heads: tuple[int, ...], said: int | None, tp: int, windows: tuple[int, ...] = ()) -> Engine:
    """Describe an engine behind vLLM, whose configuration says `said` of a model with these heads per layer."""

    def declare(held: tuple[int, int], rank: int, size: int) -> tuple[int, int, int]:
        local = held[1] - held[0]
        made = kv_heads(local, said if local == 1 else None, Place(rank, size))
        return made.lo, made.hi, made.extent

    layers = tuple(
        LayerSpec(f"layers.{i}", (PartSpec("kv", (("head", each), ("dim", 2)), "head", 1),), window=window)
        for i, (each, window) in enumerate(itertools.zip_longest(heads, windows[: len(heads)], fillvalue=0))
    )
    by_window = {layer.window: None for layer in layers}
    groups = tuple(
        GroupSpec(tuple(i for i, layer in enumerate(layers) if layer.window == window), 4, 1, 8) for window in by_window
    )
    is_guess = not all(is_known(max(1, each // tp), said, Place(0, tp)) for each in heads)
    return Engine(
        layers,
        groups,
        tp,
        style="cross",
        orders={"kv": ("head", "token", "dim")},
        declare=declare,
        guessed_axis="head" if is_guess else msgspec.UNSET,
    )


def check(prefill: Engine, decode: Engine) -> None:
    """Compare every byte that every decode rank gets with the true heads."""
    tokens, cache = 10, Cache(prefill.layers, 5)
    theirs = [(0, [1, 2, 3]) for _ in prefill.groups]
    mine = [(0, [5, 6, 7]) for _ in decode.groups]
    remotes = [Rank(prefill, rank, base=(1 + rank) << 41) for rank in range(prefill.tp_size)]
    for remote in remotes:
        oracle.fill(remote, theirs, cache, tokens)
    for rank in range(decode.tp_size):
        local = Rank(decode, rank)
        for remote in oracle.peers_of(local, remotes):
            assert compare(local.layout, remote.layout) == ()
        check_transfer(local, remotes, mine, theirs, cache, tokens)


HEADS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, int, int]:
    prefill, decode = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    fitting = HEADS.filter(lambda each: starts((each,), prefill) and starts((each,), decode))
    heads = tuple(draw(st.lists(fitting, min_size=1, max_size=3)))
    said = draw(st.one_of(st.sampled_from(heads), st.just(max(heads)), st.none(), st.integers(0, 64)))
    return heads, said, prefill, decode


@given(pair=pairs())
@example(pair=((4, 1), 4, 1, 2))
@example(pair=((4, 1), 4, 2, 1))
@example(pair=((1, 2), 1, 1, 2))
@example(pair=((8, 2), 8, 2, 4))
@example(pair=((16, 4), 16, 4, 8))
@example(pair=((4, 8), 4, 8, 4))
@example(pair=((4, 8), 4, 4, 8))
@example(pair=((8, 1), 128, 8, 2))
@example(pair=((2,), 1, 2, 4))
@example(pair=((4,), 2, 8, 4))
@example(pair=((8,), 4, 8, 16))
@settings(max_examples=150)
def test_every_pair_that_vllm_starts_gets_every_byte(pair: tuple[tuple[int, ...], int | None, int, int]) -> None:
    heads, said, prefill, decode = pair
    check(engine(heads, said, prefill), engine(heads, said, decode))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_layers_with_a_window_may_have_other_heads(prefill: int, decode: int) -> None:
    heads, windows = (4, 1), (5, 0)
    check(engine(heads, 4, prefill, windows), engine(heads, 4, decode, windows))


def test_the_two_engines_may_be_told_different_numbers() -> None:
    for said, other in itertools.product((None, 1, 2, 4, 8), repeat=2):
        check(engine((4, 2), said, 4), engine((4, 2), other, 2))


def layout_of(heads: tuple[int, ...], said: int | None, tp: int, rank: int = 0) -> Layout:
    return Rank(engine(heads, said, tp), rank).layout


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_layers_that_agree_with_the_configuration_are_declared_as_before(heads: int, tp: int) -> None:
    layout = layout_of((heads, heads), heads, tp, tp - 1)
    assert layout.guessed_axis is msgspec.UNSET
    assert b"guessed" not in msgspec.msgpack.encode(layout)
    for view in layout.views:
        assert (view.parts[0].held, view.parts[0].extent) == (shard(heads, tp - 1, tp), heads)
    assert fingerprint(layout) == fingerprint(msgspec.structs.replace(layout, guessed_axis=msgspec.UNSET))


def test_extents_that_are_declared_are_never_settled() -> None:
    true, other = (msgspec.structs.replace(layout_of((h,), None, h), guessed_axis=msgspec.UNSET) for h in (8, 4))
    [found] = compare(true, other)
    assert (found.field, found.local, found.remote) == (
        "sharded axis of part 'kv' of layer 'layers.0'",
        "'head' of 8",
        "'head' of 4",
    )
    assert compare(msgspec.structs.replace(true, guessed_axis="dim"), other) == (found,)


def test_an_extent_that_cannot_be_the_guessers_is_refused_with_both_numbers() -> None:
    one, many = layout_of((1,), None, 4), layout_of((6,), 6, 2)
    [found] = compare(one, many)
    assert (found.local, found.remote) == ("'head' of 4", "'head' of 6")
    assert [(x.local, x.remote) for x in compare(many, one)] == [("'head' of 6", "'head' of 4")]


def test_a_state_with_one_head_is_not_a_guess() -> None:
    def layout(heads: int, tp: int) -> Layout:
        layers = (LayerSpec("ssm", (PartSpec("state", (("head", heads), ("dim", 2)), "head", 4),), "state"),)
        return Rank(Engine(layers, (GroupSpec((0,), 4),), tp, guessed_axis="head"), 0).layout

    assert compare(layout(4, 4), layout(4, 2)) == ()
    [found] = compare(layout(4, 4), layout(2, 2))
    assert (found.local, found.remote) == ("'head' of 4", "'head' of 2")


def test_ranks_of_one_engine_that_settle_differently_are_refused() -> None:
    local = layout_of((8,), None, 8)
    remotes = [layout_of((2,), 2, 1), layout_of((4,), 4, 1)]
    assert compare(local, remotes[0]) == compare(local, remotes[1]) == ()
    with pytest.raises(NotCovered, match="'head' of 4, remote 'head' of 2"):
        assign(local, remotes)


def test_a_rank_of_all_heads_meets_all_ranks_whatever_the_configuration_says() -> None:
    decode = layout_of((4,), 1, 1)
    assert decode.guessed_axis == "head"
    prefill = [layout_of((4,), 1, 4, rank) for rank in range(4)]
    first = predicted(decode, remote_ranks(0, 1, 4), 4)
    assert first == [0, 1, 2, 3]
    assert [len(shares) for shares in assign(decode, prefill)] == [1, 1, 1, 1]
    with pytest.raises(NotCovered, match=r"needs \[1, 4\) of 4"):
        assign(decode, prefill[:1])
