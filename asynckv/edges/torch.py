"""Tensors as registered memory, and a wait until a GPU has written them. Beside vLLM's connector, no file knows torch.

Storages become the memories of a `Layout`; shapes and strides become its views. NIXL does not wait for any stream, so
`synchronize` waits for the events recorded after the kernels that write blocks, before these are lent. torch is loaded
on first use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio.to_thread
import msgspec

from asynckv.arguments import MAX_INTEGER, MAX_NAME, integer, nearest, one_of, shown, text, texts
from asynckv.core.types import sendable
from asynckv.edges.sharing import NotShared, shared_memory
from asynckv.errors import ConfigError, LayoutError, LocalProtocolError
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_TOKENS
from asynckv.geometry.check import Registration, register_memory
from asynckv.geometry.layout import (
    ITEMSIZE,
    TOKEN,
    Dim,
    Group,
    Layout,
    Memory,
    Part,
    TokenShard,
    View,
    attention_view,
    check_order,
)
from asynckv.geometry.look import Difference, first_difference
from asynckv.observe.setup import logger_for

if TYPE_CHECKING:
    import torch

    # For modules that may not import torch themselves.
    Tensor: TypeAlias = torch.Tensor
    Dtype: TypeAlias = torch.dtype

MAX_DIMS = 9  # dims of a tensor: `block`, and as many as a part may have


def shared_tensor(shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocate a tensor of zeros in host memory that a data plane in a process of its own can map.

    Use it for a KV cache in place of `torch.zeros`, because no other process can map the memory of the latter. Its
    pages are allocated here, as `shared_memory` does.

    Args:
        shape, dtype: As for `torch.zeros`.

    Raises:
        ConfigError: The shape is empty, or is no shape.
        BackendError: The system does not have that much memory, or none that can be shared.
    """
    began = time.monotonic()
    tensor = _shared(shape, dtype)
    _log_allocated(tensor.nbytes, began)
    return tensor


def _log_allocated(num_bytes: int, began: float) -> None:
    logger_for()[0].info("memory_allocated", bytes=num_bytes, seconds=round(time.monotonic() - began, 3))


def _shared(shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    import torch

    if not isinstance(shape, Sequence) or not shape:
        raise ConfigError(f"shape is {shown(shape)}; give a sequence of sizes")
    sizes = [integer(f"shape[{i}]", size, 1, MAX_INTEGER, ConfigError) for i, size in enumerate(shape)]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {shown(dtype)}; give a torch.dtype")
    memory = shared_memory(math.prod(sizes) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes)


@contextmanager
def shared_zeros() -> Iterator[None]:
    """Make `torch.zeros` allocate host tensors that can be shared within this context, where the system allows it."""
    import torch
    from torch.overrides import TorchFunctionMode

    began, sizes = time.monotonic(), list[int]()

    class Sharing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            is_plain = func is torch.zeros and kwargs.keys() <= {"dtype", "device"}
            if is_plain and torch.device(kwargs.get("device") or torch.get_default_device()).type == "cpu":
                shape = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
                with suppress(NotShared, ConfigError):  # a tensor that cannot be shared is allocated as usual
                    tensor = _shared(shape, kwargs.get("dtype"))
                    sizes.append(tensor.nbytes)
                    return tensor
            return func(*args, **kwargs)

    with Sharing():
        yield
    if sizes:
        _log_allocated(sum(sizes), began)


class Event(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


async def synchronize(*events: Event) -> None:
    """Wait until a GPU has passed these events, without holding the loop: `await synchronize(event); engine.lend(...)`.

    Record one event on every stream that runs kernels which write the blocks, because NIXL reads the memory without
    waiting for any stream. Make the events with `torch.cuda.Event(blocking=True)`, so that the waiting thread sleeps.

    Raises:
        LocalProtocolError: An argument is not an event; no event was waited for.
    """
    for event in events:
        if not (callable(getattr(event, "query", None)) and callable(getattr(event, "synchronize", None))):
            raise LocalProtocolError(f"{shown(event)} is not an event; give a torch.cuda.Event (query, synchronize)")
    for event in events:
        if not event.query():
            await anyio.to_thread.run_sync(event.synchronize, abandon_on_cancel=True)


def stream_event() -> Event:
    """Record an event behind the work that this thread's current stream has so far."""
    import torch

    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream())
    return event


class CudaMirror:
    """A GPU's memory with a copy on the host, which code of the host can fill and compare."""

    def __init__(self, lengths: Sequence[int]) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"--memory cuda: torch {torch.__version__} finds no CUDA device here; use --memory host, or a host "
                f"with a GPU and a torch that was built for it"
            )
        self._torch = torch
        self.device = torch.cuda.current_device()  # index of the GPU
        try:
            self._pieces = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in lengths]
            self._copies = [torch.zeros(n, dtype=torch.uint8, pin_memory=True) for n in lengths]
        except torch.OutOfMemoryError as exc:
            raise ConfigError(f"--memory cuda: no room for a pool of {sum(lengths)} bytes; lower --pool-mb") from exc
        self.arrays: list[Any] = [t.numpy() for t in self._copies]  # the copies, as numpy arrays of bytes
        self.bases = [t.data_ptr() for t in self._pieces]  # addresses of the pieces on the GPU

    def upload(self) -> Event:
        for piece, copy in zip(self._pieces, self._copies, strict=True):
            piece.copy_(copy, non_blocking=True)
        return stream_event()

    def download(self) -> None:
        self._torch.cuda.synchronize()
        for piece, copy in zip(self._pieces, self._copies, strict=True):
            copy.copy_(piece)


def cuda_memory(num_bytes: int, device: int) -> torch.Tensor:
    import torch

    return torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")


def cuda_bytes(memory: Memory) -> torch.Tensor:
    """Return the bytes of registered GPU memory as a tensor."""
    import torch

    interface = {"shape": (memory.length,), "typestr": "|u1", "data": (memory.base, False), "version": 3}
    found = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{memory.device}")
    if found.data_ptr() != memory.base:
        raise RuntimeError(f"memory at {memory.base:#x} is not on GPU {memory.device}, so torch copied it")
    return found


def first_difference_of_tensors(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Difference | None:
    """Compare pairs of tensors of bytes on their device, which is waited for once."""
    import torch

    ours, theirs = zip(*pairs, strict=True)
    # On a stream of its own, or it would wait for the model's kernels.
    stream = torch.cuda.Stream(ours[0].device) if ours[0].is_cuda else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        if torch.equal(torch.cat(ours), torch.cat(theirs)):
            return None
    return first_difference((mine.cpu().numpy(), other.cpu().numpy()) for mine, other in pairs)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """One part of one layer, as a tensor: the whole of it, or a slice or view of a larger one.

    Attributes:
        tensor: The whole tensor, or a slice, permutation or `as_strided` view of one: its storage is registered.
        order: Names of the tensor's dims. One is `block` (kernel blocks, or states); `token` counts entries along the
            tokens; the others must be the same on both sides, in any order.
    """

    layer: str  # name of the layer, the same in both engines
    name: str  # name of the part, the same in both engines
    tensor: torch.Tensor
    order: Sequence[str]
    group: int = 0  # index of the group
    axis: str = ""  # the dim that tensor parallelism cuts; empty if every rank holds the same
    held: tuple[int, int] = (0, 0)  # `[lo, hi)` that this rank holds of the whole model's axis
    extent: int = 0  # size of the whole model's axis
    tokens_per_entry: int = 1  # tokens that one entry along `token` covers


def register_parts(
    parts: Iterable[TensorPart],
    *,
    groups: Sequence[Group],
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_stage: int = 0,
    pp_size: int = 1,
    model: str = "",
    aliases: Mapping[str, str] = MappingProxyType({}),
    token_shards: Sequence[TokenShard] = (),
) -> Registration:
    """Register the tensors of any model: attention of several kinds, latents, convolutions, states, scales.

    Args:
        parts: Every part of every layer of this rank.
        groups: The cache groups, as in the engine's configuration; the same list on all ranks.
        tp_rank, tp_size, pp_stage, pp_size, model: As for `Layout`.
        aliases: As for `register_tensors`.
        token_shards: This rank's share of the tokens of each group that ranks share by token. The group's `block_size`
            counts the tokens of all these ranks, and its tensors hold `block_size / ratio / size` per kernel block.

    Raises:
        LayoutError: The tensors do not fit the declaration; names the layer, both numbers and the remedy.
    """
    memories: dict[int, Memory] = {}
    views, owners = [], []
    if not isinstance(groups, list | tuple) or not all(isinstance(g, Group) for g in groups):
        raise LayoutError(f"groups is {shown(groups)}; give a sequence of Group")
    groups = [_checked(group) for group in groups]
    if not isinstance(parts, Iterable):
        raise LayoutError(f"parts is {shown(parts)}; give every part of every layer, as TensorPart")
    parts = list(parts)
    for part in parts:
        if not isinstance(part, TensorPart):
            raise LayoutError(f"parts holds {shown(part)}; give every part of every layer, as TensorPart")
        for what, name in (("layer", part.layer), ("name", part.name)):
            text(f"the {what} of a part", name, MAX_NAME, error=LayoutError)
        _check_tensor(f"layer {part.layer!r} part {part.name!r}", part.tensor)
    aliases = _aliases(aliases)
    given = {(part.layer, part.name): part.tensor for part in parts}
    for part in parts:
        if part.layer in aliases:
            layer = aliases[part.layer]
            _check_same(f"{part.layer!r} part {part.name!r}", part.tensor, layer, given.get((layer, part.name)))
            continue
        where = f"layer {part.layer!r} part {part.name!r} of shape {tuple(part.tensor.shape)}"
        group = integer(f"{where}: group", part.group, error=LayoutError)
        if group >= len(groups):
            raise LayoutError(f"{where}: group {group} is not among the {len(groups)} groups")
        order = texts(f"{where}: order", part.order, MAX_DIMS, 64, LayoutError)
        sizes = _sizes(where, part.tensor, order, {}, groups[group].num_kernel_blocks)
        memory, offset, strides = _place(where, part.tensor, order, memories)
        dtype = str(part.tensor.dtype).removeprefix("torch.")
        one_of(f"{where}: dtype", dtype, sorted(ITEMSIZE), LayoutError)
        itemsize = part.tensor.element_size()
        dims = tuple(Dim(n, sizes[n], strides[n]) for n in order if n != "block")
        made = Part(part.name, dtype, itemsize, 0, dims, part.axis, part.held, part.extent, part.tokens_per_entry)
        views.append(View(memory, group, part.layer, offset, strides["block"], (made,)))
        owners.append(part.tensor)
    if not views:
        raise LayoutError("no tensors were given; pass every part of every layer")
    layout = Layout(
        model=model,
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_stage=pp_stage,
        pp_size=pp_size,
        memories=tuple(memories.values()),
        groups=tuple(groups),
        views=tuple(views),
        aliases=tuple(aliases.items()),
        **_shared_tokens(token_shards),
    )
    return register_memory(layout, tuple(owners))


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that is equal for tensors that are the same memory, seen in the same way."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _check_same(alias: str, tensor: torch.Tensor, layer: str, other: torch.Tensor | None) -> None:
    if other is None or identity(tensor) != identity(other):
        raise LayoutError(
            f"layer {alias} is declared an alias of layer {layer!r}, but their tensors are not the same memory; give "
            f"it the other layer's tensor or none, or do not declare it an alias"
        )


def _aliases(given: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(given, Mapping):
        raise LayoutError(f"aliases is {shown(given)}; give a mapping of alias to layer")
    for alias, layer in given.items():
        text("an alias", alias, MAX_NAME, error=LayoutError)
        text(f"the layer of alias {shown(alias)}", layer, MAX_NAME, error=LayoutError)
    return given


def _checked(group: Group) -> Group:
    try:
        return sendable(group, Group)
    except msgspec.ValidationError as exc:
        raise LayoutError(f"group {shown(group.name)} cannot be described: {exc}") from exc


def _check_tensor(where: str, given: object) -> None:
    import torch

    if not isinstance(given, torch.Tensor):
        raise LayoutError(f"{where}: is {shown(given)}; give a torch.Tensor")


def _place(
    where: str, tensor: torch.Tensor, order: Sequence[str], memories: dict[int, Memory]
) -> tuple[int, int, dict[str, int]]:
    """Return the index of the memory that holds a tensor, the tensor's offset in it, and its strides in bytes."""
    storage = tensor.untyped_storage()
    base, length = storage.data_ptr(), storage.nbytes()
    if base == 0 or length == 0:
        raise LayoutError(f"{where}: its storage is empty or freed; register tensors that hold memory")
    if base not in memories:
        if tensor.device.type not in ("cpu", "cuda"):
            raise LayoutError(f"{where}: device {tensor.device} is not supported; use cpu or cuda memory")
        memories[base] = Memory(base, length, "cuda" if tensor.is_cuda else "cpu", tensor.device.index or 0)
    itemsize = tensor.element_size()
    # A dim of one entry may have any stride in torch, because it is never stepped along.
    strides = {name: max(stride, 1) * itemsize for name, stride in zip(order, tensor.stride(), strict=True)}
    return list(memories).index(base), tensor.data_ptr() - base, strides


def register_tensors(
    tensors: Mapping[str, torch.Tensor],
    *,
    order: Sequence[str],
    block_size: int,
    num_blocks: int,
    heads: tuple[int, int] = (0, 0),
    num_heads: int = 0,
    ratio: int = 1,
    tp_rank: int = 0,
    tp_size: int = 1,
    model: str = "",
    aliases: Mapping[str, str] = MappingProxyType({}),
    token_shard: tuple[int, int, int] | None = None,
) -> Registration:
    """Register the KV tensors of an engine's attention layers, one per layer, as one cache group.

    Args:
        tensors: Layer name -> tensor. Tensors may share a storage; they may be permuted or padded.
        order: Names of the tensors' dims: `kv` (2: keys, values), `block`, `head`, `token`, `dim`. Without `kv` a
            tensor is one part (keys and values packed in `dim`, or a latent); without `head` every rank holds the same
            (a latent).
        block_size: Tokens per block, of all ranks that share them.
        num_blocks: Number of blocks in the engine's configuration. Tensors may hold more.
        heads: `[lo, hi)` of the model's KV heads that this rank holds (`asynckv.shard`).
        num_heads: KV heads of the model.
        ratio: Kernel blocks per block; the `block` dim counts kernel blocks of `block_size / ratio` tokens.
        tp_rank, tp_size: Place in tensor parallelism.
        model: Name that must be the same in both engines; empty to not compare.
        aliases: Layers that use the KV of another layer, as in several models: `{"layers.20": "layers.18"}`. They need
            not be among `tensors`; if they are, then with the other layer's tensor. Its bytes move once, and land
            wherever the other side has memory for either layer.
        token_shard: `(size, rank, interleave)` if `size` neighbouring ranks share the tokens of every block (decode
            context parallelism): this one holds token `t` if `t // interleave % size == rank`, and its tensors hold
            `block_size / ratio / size` tokens per kernel block. `rank` is `tp_rank % size`.

    Raises:
        LayoutError: The tensors do not fit the declaration; names the layer, both numbers and the remedy.
    """
    if not isinstance(tensors, Mapping):
        raise LayoutError(f"tensors is {shown(tensors)}; give a mapping of layer names to tensors")
    if not tensors:
        raise LayoutError("no tensors were given; pass one KV tensor per attention layer")
    for layer, tensor in tensors.items():
        text("a layer's name", layer, MAX_NAME, error=LayoutError)
        _check_tensor(f"layer {layer!r}", tensor)
    aliases = _aliases(aliases)
    order = check_order(order)
    block_size = integer("block_size", block_size, 1, MAX_TOKENS, LayoutError)
    num_blocks = integer("num_blocks", num_blocks, 1, MAX_BLOCK_ID, LayoutError)
    ratio = integer("ratio", ratio, 1, MAX_BLOCK_ID, LayoutError)
    if not isinstance(heads, tuple | list) or len(heads) != 2:
        raise LayoutError(f"heads is {shown(heads)}; give (lo, hi), as asynckv.shard does")
    heads = (integer("heads[0]", heads[0], error=LayoutError), integer("heads[1]", heads[1], error=LayoutError))
    if block_size % ratio:
        raise LayoutError(f"block_size {block_size} is not a positive multiple of the ratio {ratio}")
    if token_shard is not None and (not isinstance(token_shard, tuple | list) or len(token_shard) != 3):
        raise LayoutError(f"token_shard is {shown(token_shard)}; give (size, rank, interleave)")
    expected = {"kv": 2, "head": heads[1] - heads[0]}
    if token_shard is None:  # else the check of the layout compares them, and its refusal names the sharing ranks
        expected[TOKEN] = block_size // ratio
    memories: dict[int, Memory] = {}
    views = []
    for layer, tensor in tensors.items():
        if layer in aliases:
            _check_same(repr(layer), tensor, aliases[layer], tensors.get(aliases[layer]))
            continue
        where = f"layer {layer!r} of shape {tuple(tensor.shape)}"
        sizes = _sizes(where, tensor, order, expected, num_blocks * ratio)
        memory, offset, strides = _place(where, tensor, order, memories)
        views.append(
            attention_view(
                layer=layer,
                order=order,
                sizes=sizes,
                dtype=str(tensor.dtype).removeprefix("torch."),
                heads=heads,
                num_heads=num_heads,
                strides=strides,
                memory=memory,
                offset=offset,
            )
        )
    layout = Layout(
        model=model,
        tp_rank=tp_rank,
        tp_size=tp_size,
        memories=tuple(memories.values()),
        groups=(Group("attention", block_size, num_blocks, ratio),),
        views=tuple(views),
        aliases=tuple(aliases.items()),
        **_shared_tokens(() if token_shard is None else (TokenShard(0, *token_shard),)),
    )
    return register_memory(layout, tuple(tensors.values()))


def _shared_tokens(shards: Sequence[TokenShard]) -> dict[str, Any]:
    """Return the fields of a layout that say how ranks share tokens; none if they do not."""
    given: Any = shards
    if not isinstance(given, tuple | list) or not all(isinstance(each, TokenShard) for each in given):
        raise LayoutError(f"token_shards is {shown(shards)}; give a sequence of TokenShard")
    shared = tuple([each for each in given if (each.size, each.rank) != (1, 0)])
    return {"schema": 2, "token_shards": shared} if shared else {}


def _sizes(
    where: str, tensor: torch.Tensor, order: Sequence[str], expected: Mapping[str, int], num_blocks: int
) -> dict[str, int]:
    if tensor.device.type == "meta":
        raise LayoutError(f"{where}: is on the meta device and holds no memory; allocate it first")
    if tensor.ndim != len(order) or len(set(order)) != len(order):
        raise LayoutError(
            f"{where}: has {tensor.ndim} dims, but the order {tuple(order)!r} names {len(set(order))} different ones"
        )
    sizes = dict(zip(order, tensor.shape, strict=True))
    for name in ("block", TOKEN):  # a name that is almost one of these is mistyped
        if name not in sizes and (near := nearest(name, order, 0.8)):
            raise LayoutError(f"{where}: the order {tuple(order)!r} names {near!r}; did you mean {name!r}?")
    if "block" not in sizes:
        raise LayoutError(f"{where}: the order {tuple(order)!r} has no 'block', the dim of kernel blocks or states")
    for name, want in expected.items():
        if name in sizes and sizes[name] != want:
            raise LayoutError(
                f"{where}: dim {name!r} has {sizes[name]} entries, but {want} were declared; correct the order or the "
                f"declaration"
            )
    if sizes["block"] < num_blocks:
        raise LayoutError(
            f"{where}: dim 'block' has {sizes['block']} kernel blocks, fewer than the {num_blocks} declared; "
            f"declare fewer num_blocks"
        )
    for name, stride in zip(order, tensor.stride(), strict=True):
        if stride < 1 and sizes[name] > 1:
            raise LayoutError(f"{where}: dim {name!r} has stride {stride} (expanded?); register a tensor of its own")
    return sizes
