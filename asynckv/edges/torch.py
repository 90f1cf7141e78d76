"""Tensors as registered memory: the only file that knows torch, and it loads it on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from asynckv.core.layout import TOKEN, Group, Layout, Memory, attention_view
from asynckv.errors import LayoutError
from asynckv.registration import Registration, register_memory

if TYPE_CHECKING:
    import torch

__all__ = ["register_tensors"]


def register_tensors(
    tensors: Mapping[str, torch.Tensor],
    *,
    order: Sequence[str],
    block_size: int,
    num_blocks: int,
    heads: tuple[int, int],
    num_heads: int,
    ratio: int = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
    model: str = "",
) -> Registration:
    """Register the KV tensors of an engine's attention layers, one per layer, as one cache group.

    Args:
        tensors: Layer name -> tensor. Tensors may share a storage; they may be permuted or padded.
        order: Names of the tensors' dims: `kv` (2: keys, values), `block`, `head`, `token`, `dim`.
            Without `kv` a tensor is one part (keys and values packed in `dim`, or a latent).
        block_size: Tokens per block.
        num_blocks: Blocks, as the engine's configuration says. Tensors may hold more.
        heads: `[lo, hi)` of the model's KV heads that this rank holds (`asynckv.shard`).
        num_heads: KV heads of the model.
        ratio: Kernel blocks per block; the `block` dim counts kernel blocks of `block_size / ratio` tokens.
        tp_rank, tp_size: Place in tensor parallelism.
        model: Name that both engines must agree on; empty to not compare.

    Raises:
        LayoutError: Naming the layer, both numbers and the remedy.
    """
    if not tensors:
        raise LayoutError("no tensors were given; pass one KV tensor per attention layer")
    if block_size < 1 or ratio < 1 or block_size % ratio:
        raise LayoutError(f"block_size {block_size} is not a positive multiple of the ratio {ratio}")
    expected = {"kv": 2, "head": heads[1] - heads[0], TOKEN: block_size // ratio}
    memories: dict[int, tuple[int, Memory]] = {}
    views = []
    for layer, tensor in tensors.items():
        sizes = _sizes(layer, tensor, order, expected, num_blocks * ratio)
        storage = tensor.untyped_storage()
        base, length = storage.data_ptr(), storage.nbytes()
        if base == 0 or length == 0:
            raise LayoutError(f"layer {layer!r}: its storage is empty or freed; register tensors that hold memory")
        if base not in memories:
            kind, device = _kind(layer, tensor)
            memories[base] = (len(memories), Memory(base, length, kind, device))
        itemsize = tensor.element_size()
        views.append(
            attention_view(
                layer=layer,
                order=order,
                sizes=sizes,
                dtype=str(tensor.dtype).removeprefix("torch."),
                heads=heads,
                num_heads=num_heads,
                # A dim of one entry has any stride in torch; it is never stepped along.
                strides={n: max(s, 1) * itemsize for n, s in zip(order, tensor.stride(), strict=True)},
                memory=memories[base][0],
                offset=tensor.data_ptr() - base,
            )
        )
    layout = Layout(
        model=model,
        tp_rank=tp_rank,
        tp_size=tp_size,
        memories=tuple(memory for _, memory in memories.values()),
        groups=(Group("attention", block_size, num_blocks, ratio),),
        views=tuple(views),
    )
    return register_memory(layout, tuple(tensors.values()))


def _sizes(
    layer: str, tensor: torch.Tensor, order: Sequence[str], expected: Mapping[str, int], num_blocks: int
) -> dict[str, int]:
    where = f"layer {layer!r} of shape {tuple(tensor.shape)}"
    if tensor.device.type == "meta":
        raise LayoutError(f"{where}: is on the meta device and holds no memory; allocate it first")
    if tensor.ndim != len(order):
        raise LayoutError(f"{where}: has {tensor.ndim} dims, but the order {tuple(order)!r} names {len(order)}")
    sizes = dict(zip(order, tensor.shape, strict=True))
    for name, want in expected.items():
        if name in sizes and sizes[name] != want:
            raise LayoutError(
                f"{where}: dim {name!r} has {sizes[name]} entries, but {want} were declared; correct the order or the "
                f"declaration"
            )
    if sizes.get("block", 0) < num_blocks:
        raise LayoutError(
            f"{where}: dim 'block' has {sizes.get('block', 0)} kernel blocks, fewer than the {num_blocks} declared; "
            f"declare fewer num_blocks"
        )
    for name, stride in zip(order, tensor.stride(), strict=True):
        if stride < 1 and sizes[name] > 1:
            raise LayoutError(f"{where}: dim {name!r} has stride {stride} (expanded?); register a tensor of its own")
    return sizes


def _kind(layer: str, tensor: torch.Tensor) -> tuple[Literal["cpu", "cuda"], int]:
    match tensor.device.type:
        case "cpu":
            return "cpu", 0
        case "cuda":
            return "cuda", tensor.device.index or 0
        case _:
            raise LayoutError(f"layer {layer!r}: device {tensor.device} is not supported; use cpu or cuda memory")
