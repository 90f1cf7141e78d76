"""Tensors become layouts, or one clear refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from asynckv import LayoutError, register_tensors
from asynckv.geometry.match import compare
from asynckv.layout import Group, TensorPart, register_parts

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
