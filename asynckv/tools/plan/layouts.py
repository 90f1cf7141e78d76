"""Layouts of whole models before their memory is allocated: for benchmarks and capacity planning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET

from asynckv.arguments import one_of
from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.layout import (
    ITEMSIZE,
    ONE_PER_REQUEST,
    Dim,
    Group,
    Layout,
    Memory,
    Part,
    TokenShard,
    View,
    dense_part,
    shard,
)
from asynckv.geometry.overlap import part_bytes
from asynckv.tools.console import grouped
from asynckv.tools.plan.models import Heads, Index, Latent, Layer, Model, State

ORDERS = ("nhd", "hnd", "block-nhd", "block-hnd", "cross-nhd", "cross-hnd")
"""Memory orders: `nhd` has tokens before heads, `hnd` heads before tokens. Keys of all blocks come first, then values.
With `block-` one block has both; with `cross-` a block's layers are adjacent in one region per group."""

CONV_ORDERS = ("channel", "row")  # the dim of a convolution's state that varies slowest


def model_groups(model: Model) -> tuple[tuple[Layer, tuple[int, ...]], ...]:
    """Sort a model's layers into cache groups: layers of the same kind, window and shape share block ids."""
    groups = grouped((layer, number) for number, layer in enumerate(model.layers))
    return tuple((layer, tuple(numbers)) for layer, numbers in groups.items())


def model_layout(
    model: Model,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_stage: int = 0,
    pp_size: int = 1,
    block_size: int = 16,
    ratio: int = 1,
    num_blocks: int | Sequence[int] = 1,
    order: str = "nhd",
    conv_order: str = "channel",
    dcp: int = 1,
    cp_interleave: int = 1,
) -> Layout:
    """Return one rank's layout of a model, with its memories one after another from address 0 on.

    `ratio` is the number of kernel blocks per block. `num_blocks` is for every group, or lists one number for each of
    `model_groups`. `block_size` is for attention layers; a recurrent layer has one state per request. Neighbouring
    ranks, `dcp` of them, share the tokens of attention without a window, each `cp_interleave` at a time. `block_size`
    counts the tokens of all these ranks.
    """
    for name, value, known in (("order", order, ORDERS), ("conv_order", conv_order, CONV_ORDERS)):
        one_of(name, value, known, ConfigError)
    if not 0 <= pp_stage < pp_size <= len(model.layers):
        raise ConfigError(
            f"stage {pp_stage} of pp_size {pp_size} does not exist for {len(model.layers)} layers; use pp_size 1 ... "
            f"{len(model.layers)}"
        )
    if block_size < 1 or ratio < 1 or block_size % ratio:
        raise ConfigError(f"block_size {block_size} is not a positive multiple of the ratio {ratio}")
    kinds = model_groups(model)
    counts = [num_blocks] * len(kinds) if isinstance(num_blocks, int) else list(num_blocks)
    if len(counts) != len(kinds) or min(counts) < 1:
        raise ConfigError(f"num_blocks {counts} does not give 1 or more blocks for each of the {len(kinds)} groups")
    # Stages are as equal as whole layers allow.
    stage = range(pp_stage * len(model.layers) // pp_size, (pp_stage + 1) * len(model.layers) // pp_size)
    _check_dcp(model, dcp, tp_size)
    groups: list[Group] = []
    shards: list[TokenShard] = []
    views: list[View] = []
    lengths: list[int] = []  # of the memories
    for index, (layer, numbers) in enumerate(kinds):
        group = _group(layer, index, block_size, ratio, counts[index])
        groups.append(group)
        here = [n for n in numbers if n in stage]
        blocks, tokens = group.num_kernel_blocks, group.kernel_size
        if dcp > 1 and _is_shared(layer):
            shards.append(TokenShard(index, dcp, tp_rank % dcp, cp_interleave))
            tokens = max(1, tokens // dcp)  # `check_layout` refuses what does not divide
        arrays = [_parts(model, layer, tokens, tp_rank, tp_size, order, conv_order)]
        if not isinstance(layer, State) and layer.index is not None:
            # An index has memory of its own, as in vLLM.
            arrays.append(_index_parts(layer.index, tokens))
        for parts, size in arrays:
            if order.startswith("cross-") and here:
                step = size * len(here)
                views += [View(len(lengths), index, f"layers.{n}", i * size, step, parts) for i, n in enumerate(here)]
                lengths.append(step * blocks)
                continue
            length = size * blocks
            if order in ("nhd", "hnd") and parts[0].name == "k" and parts[0].dims == parts[1].dims:
                # Keys of all blocks precede the values, so each part has a region of its own.
                size //= 2
                parts = tuple(msgspec.structs.replace(p, offset=i * size * blocks) for i, p in enumerate(parts))
            views += [View(len(lengths) + i, index, f"layers.{n}", 0, size, parts) for i, n in enumerate(here)]
            lengths += [length] * len(here)
    bases = itertools.accumulate((-(-length // 4096) * 4096 for length in lengths), initial=0)
    return Layout(
        schema=2 if shards else 1,
        model=model.name,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_stage=pp_stage,
        pp_size=pp_size,
        memories=tuple(map(Memory, bases, lengths)),
        groups=tuple(groups),
        views=tuple(views),
        token_shards=tuple(shards) or UNSET,
    )


def model_bytes(model: Model, kind: Literal["tokens", "state"]) -> int:
    """Return the bytes of one token, or of one request's states, in the whole model."""
    layout = model_layout(model, block_size=1)
    return sum(part_bytes(p) for v in layout.views if layout.groups[v.group].kind == kind for p in v.parts)


def _is_shared(layer: Layer) -> bool:
    """Return True if ranks can share a layer's tokens: states and windows are whole on every rank."""
    return not isinstance(layer, State) and not layer.window


def _check_dcp(model: Model, dcp: int, tp_size: int) -> None:
    """Refuse to share tokens where nothing can be shared, or where a rank's neighbours hold other heads than it."""
    shared = [layer for layer in model.layers if _is_shared(layer)]
    if dcp > 1 and not shared:
        raise LayoutError(
            f"{model.name} keeps only states and sliding windows, which cannot be shared by dcp {dcp}; use dcp 1"
        )
    for layer in shared:
        if dcp > 1 and isinstance(layer, Heads) and tp_size % (layer.num_heads * dcp):
            raise LayoutError(
                f"dcp {dcp} shares tokens over ranks with the same heads, but tp {tp_size} is no multiple of "
                f"{layer.num_heads} KV heads x {dcp}; change tp or dcp"
            )


def with_addresses(layout: Layout, bases: Sequence[int]) -> Layout:
    memories = [msgspec.structs.replace(m, base=base) for m, base in zip(layout.memories, bases, strict=True)]
    return msgspec.structs.replace(layout, memories=tuple(memories))


def _group(layer: Layer, index: int, block_size: int, ratio: int, num_blocks: int) -> Group:
    if isinstance(layer, State):
        return Group(f"{index}: states", ONE_PER_REQUEST, num_blocks, kind="state")
    what = "latents" if isinstance(layer, Latent) else "attention"
    name = f"{index}: {what}" + (f", window {layer.window}" if layer.window else "")
    return Group(name, block_size, num_blocks, ratio, window=layer.window)


def _parts(
    model: Model, layer: Layer, tokens: int, tp_rank: int, tp_size: int, order: str, conv_order: str
) -> tuple[tuple[Part, ...], int]:
    """Return the parts of one kernel block, one after the other, and their bytes."""
    match layer:
        case Heads():
            held = shard(layer.num_heads, tp_rank, tp_size)
            heads = ("head", held[1] - held[0])
            rows = [heads, ("token", tokens)] if order.endswith("hnd") else [("token", tokens), heads]
            parts, at = [], 0
            for name, width in (("k", layer.head_dim), ("v", layer.v_head_dim or layer.head_dim)):
                dims = [*rows, ("dim", width)]
                part = dense_part(name, model.dtype, dims, offset=at, axis="head", held=held, extent=layer.num_heads)
                parts.append(part)
                at += tokens * heads[1] * width * part.itemsize
            return tuple(parts), at
        case Latent():
            width = layer.rank + layer.rope_dim
            part = dense_part("latent", model.dtype, [("token", tokens), ("dim", width)])
            return (part,), tokens * width * part.itemsize
        case State():
            return _state_parts(model, layer, tp_rank, tp_size, conv_order)


def _index_parts(index: Index, tokens: int) -> tuple[tuple[Part, ...], int]:
    key = dense_part("index", index.dtype, [("token", tokens), ("dim", index.dim)])
    size = tokens * index.dim * key.itemsize
    scales = [("token", tokens), ("dim", index.scales)]
    parts = (dense_part("index_scale", "float32", scales, offset=size),) if index.scales else ()
    return (key, *parts), size + tokens * index.scales * 4


def _axes(layer: State) -> tuple[Mapping[str, str], str, Sequence[str]]:
    """Name the sharded axis of every sub-projection, that of the recurrent state, and the state's other dims."""
    if any(p.name == "q" for p in layer.conv):
        return {"q": "key_head", "k": "key_head", "v": "value_head"}, "value_head", ("value_dim", "key_dim")
    if len(layer.shape) == 1:
        return {"x": "channel"}, "channel", ("state",)
    return {"x": "head", "b": "group", "c": "group"}, "head", ("head_dim", "state")


def _state_parts(model: Model, layer: State, tp_rank: int, tp_size: int, order: str) -> tuple[tuple[Part, ...], int]:
    itemsize = ITEMSIZE[model.dtype]
    held = {p.name: shard(p.units, tp_rank, tp_size) for p in layer.conv}
    channels = sum((held[p.name][1] - held[p.name][0]) * p.width for p in layer.conv)
    column, channel = (channels * itemsize, itemsize) if order == "row" else (itemsize, layer.columns * itemsize)
    axes, axis, names = _axes(layer)
    parts, at = [], 0
    for p in layer.conv:
        lo, hi = held[p.name]
        conv_axis = axes.get(p.name, "unit")
        dims = (
            Dim(conv_axis, hi - lo, p.width * channel),
            Dim("width", p.width, channel),
            Dim("column", layer.columns, column),
        )
        parts.append(Part(f"conv_{p.name}", model.dtype, itemsize, at * channel, dims, conv_axis, (lo, hi), p.units))
        at += (hi - lo) * p.width
    start = -(-channels * layer.columns * itemsize // 8) * 8
    held_state = shard(layer.units, tp_rank, tp_size)
    sizes = [(axis, held_state[1] - held_state[0]), *zip(names, layer.shape, strict=True)]
    dtype, units = layer.dtype or model.dtype, layer.units
    state = dense_part("state", dtype, sizes, offset=start, axis=axis, held=held_state, extent=units)
    size = start + state.itemsize * math.prod(d.size for d in state.dims)
    return (*parts, state), -(-size // 8) * 8
