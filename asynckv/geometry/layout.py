"""The declaration of one rank's memory: memories, groups, views and their parts. `check` checks it.

A **memory** is one registered range of addresses. A **group** is a set of layers that share block ids. A **view**
places the blocks of one layer in a memory: block `b` begins at `offset + b * stride`. A block consists of **parts**
(keys, values, scales, a latent, a convolution's state ...): arrays of dims with names, sizes and byte strides. A part
is *replicated*, or *sharded* along one axis; then it names the range of the whole model's axis that is here.

A group of *tokens* has blocks with the KV of `block_size` tokens. A group of *states* has blocks with a recurrent
layer's state after some token: the one in place `i` after `(i + 1) * block_size` tokens, or after the last token.

A block may consist of several **kernel blocks**, the unit that attention kernels address. Views, strides and plans
count kernel blocks; only the lists that engines give count blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from asynckv.arguments import did_you_mean, integer, one_of, shown, texts
from asynckv.errors import LayoutError
from asynckv.geometry.bounds import (
    MAX_BLOCK_ID,
    MAX_BYTES,
    MAX_GROUPS,
    MAX_RANKS,
    MAX_TOKENS,
    MAX_VIEWS,
    NULL,
    Name,
    Rank,
    Size,
)

TOKEN = "token"  # the dim along which a part covers tokens
DIMS = ("block", "kv", "head", TOKEN, "dim")  # those of an attention layer
ONE_PER_REQUEST = MAX_TOKENS
"""The `block_size` of a `Group` of states in which a request has a single slot, whatever its length."""

ITEMSIZE: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Positive = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
Blocks = Annotated[int, Meta(ge=1, le=MAX_BLOCK_ID)]


class Memory(Struct, frozen=True, array_like=True):
    """One registered range of addresses.

    Attributes:
        base: The first address.
        length: Number of bytes.
        kind: `cpu` for host memory, `cuda` for memory of a GPU.
        device: Index of the GPU.
    """

    base: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    length: Positive
    kind: Literal["cpu", "cuda"] = "cpu"
    device: Annotated[int, Meta(ge=0, le=65_535)] = 0


class Dim(Struct, frozen=True, array_like=True):
    """One dim of a part.

    Attributes:
        name: Name such as `token`, `head` or `dim`, by which engines match it.
        size: Number of entries that this rank holds.
        stride: Bytes from one entry to the next.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    size: Annotated[int, Meta(ge=1, le=1 << 31)]
    stride: Positive


class Part(Struct, frozen=True, array_like=True):
    """One logical array inside a block.

    Attributes:
        name: Name such as `k` or `v`, by which engines match it.
        dtype: Element type; must be equal on both sides.
        itemsize: Bytes per element.
        offset: Bytes from the start of the block to the first element.
        dims: The dims in any order.
        axis: Name of the sharded dim, or empty if every rank holds the whole part.
        held: `[lo, hi)` of the global axis that this rank holds; `hi - lo` is the dim's size.
        extent: Size of the global axis.
        tokens_per_entry: Tokens that one entry of the dim `token` covers: 1, or more for scales and other summaries. A
            part of a group of tokens without that dim covers a whole kernel block.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(min_length=1, max_length=64)]
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    offset: Bytes
    dims: Annotated[tuple[Dim, ...], Meta(min_length=1, max_length=8)]
    axis: Annotated[str, Meta(max_length=64)] = ""
    held: tuple[Bytes, Bytes] = (0, 0)
    extent: Bytes = 0
    tokens_per_entry: Annotated[int, Meta(ge=1, le=1 << 31)] = 1

    @property
    def has_tokens(self) -> bool:
        return any(dim.name == TOKEN for dim in self.dims)


class View(Struct, frozen=True, array_like=True):
    """One layer's kernel blocks inside a memory.

    Attributes:
        memory: Index of the memory.
        group: Index of the group.
        layer: The layer's name, by which engines match it. A layer with parts in several memories has a view in each.
        offset: Bytes from the memory's base to kernel block 0.
        stride: Bytes from one kernel block to the next.
        parts: The parts of a kernel block.
    """

    memory: Annotated[int, Meta(ge=0, lt=MAX_VIEWS)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    layer: Name
    offset: Bytes
    stride: Positive
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=16)]


class Group(Struct, frozen=True, array_like=True):
    """Layers that share block ids.

    Attributes:
        name: Name for logs and errors.
        block_size: Tokens per block, as the engine's block table counts them. For states: tokens from one stored state
            to the next, or `ONE_PER_REQUEST`.
        num_blocks: Number of blocks that the engine declares; the tensors may have more.
        ratio: Kernel blocks per block: block `b` is kernel blocks `b*ratio ... b*ratio+ratio-1`.
        kind: `tokens`: a block holds the KV of tokens. `state`: a block holds a recurrent layer's state after some
            token.
        window: Sliding window in tokens: the next token attends to itself and the `window - 1` tokens before it, and no
            more than these are needed. 0: all tokens.
        null_block: Id that marks a place without a block in the engine's lists (vLLM: 0); -1 if there is none. `None`
            in a list always marks such a place.
    """

    name: Name
    block_size: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    num_blocks: Blocks
    ratio: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    kind: Literal["tokens", "state"] = "tokens"
    window: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    null_block: Annotated[int, Meta(ge=NULL, le=MAX_BLOCK_ID)] = NULL

    @property
    def kernel_size(self) -> int:
        """Number of tokens per kernel block."""
        return self.block_size // self.ratio

    @property
    def num_kernel_blocks(self) -> int:
        """Number of kernel blocks in `num_blocks` blocks."""
        return self.num_blocks * self.ratio


class TokenShard(Struct, frozen=True, array_like=True):
    """The tokens of a group that a rank holds, where ranks share each block's tokens (context parallelism).

    Token `t` is held by the rank with `rank == t // interleave % size`, behind the tokens before it that this rank
    holds (vLLM's rule for decode context parallelism). The group's `block_size` counts the tokens of all these ranks.

    Attributes:
        group: Index of the group.
        size: Number of ranks that share the tokens.
        rank: This rank's place among them.
        interleave: Number of consecutive tokens on one rank.
    """

    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    rank: Rank = 0
    interleave: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 1

    def __str__(self) -> str:
        return f"tokens {self.rank} of {self.size} by {self.interleave}" if self.size > 1 else "all tokens"

    def holds(self, token: Any) -> Any:
        """Return True if this rank holds a token; of an array of tokens, an array."""
        return token // self.interleave % self.size == self.rank

    def place(self, token: Any) -> Any:
        """Return the number of tokens that this rank holds before a token that it holds."""
        return token // (self.interleave * self.size) * self.interleave + token % self.interleave

    def count(self, tokens: Any) -> Any:
        """Return the number of the first `tokens` tokens that this rank holds."""
        rest = tokens % (self.interleave * self.size) - self.rank * self.interleave
        return tokens // (self.interleave * self.size) * self.interleave + min(max(rest, 0), self.interleave)


class Layout(Struct, frozen=True, kw_only=True):
    """All that a peer has to know about one rank's memory.

    Attributes:
        schema: Version of this structure: 2 with `token_shards`, which version 1 would overlook, else 1.
        model: Name that must be the same in both engines; empty to not compare.
        tp_rank: This rank's place among the ranks that share layers (tensor parallelism).
        tp_size: Number of these ranks.
        pp_stage: This rank's pipeline stage.
        pp_size: Number of pipeline stages.
        memories: Registered ranges of addresses.
        groups: Cache groups, the same on all ranks.
        views: Places of each layer's blocks.
        aliases: `(alias, layer)`: layers without memory of their own, because the model lets them use the KV of another
            one. The other side may have memory for both, or for the other of the two.
        slotted: True if groups share a memory as slots, each group with slots of its own size, and the allocator of
            slots keeps those in use from overlapping. Then groups with blocks of different sizes may overlap, and a
            block id of one group says nothing about another group's. The field is not encoded if it is left out.
        guessed_axis: Axis (such as `head`) of which a rank with one entry does not know how many the model has, because
            several ranks may hold the same one. Ranks cut it as `shard` does. In parts of tokens with one entry of it,
            `held` and `extent` are then a guess, and the handshake settles them. Not encoded if it is left out.
        token_shards: This rank's share of the tokens of each group that ranks share by token. Not encoded if left out.
    """

    schema: Annotated[int, Meta(ge=1, le=2)] = 1
    model: Name = ""
    tp_rank: Rank = 0
    tp_size: Size = 1
    pp_stage: Rank = 0
    pp_size: Size = 1
    memories: Annotated[tuple[Memory, ...], Meta(min_length=1, max_length=MAX_VIEWS)]
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    views: Annotated[tuple[View, ...], Meta(min_length=1, max_length=MAX_VIEWS)]
    aliases: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_VIEWS)] = ()
    slotted: bool | UnsetType = UNSET
    guessed_axis: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET
    token_shards: Annotated[tuple[TokenShard, ...], Meta(max_length=MAX_GROUPS)] | UnsetType = UNSET

    def shard(self, group: int) -> TokenShard:
        """Return this rank's share of the tokens of a group: all, if it is not named among `token_shards`."""
        return next((each for each in self.token_shards or () if each.group == group), TokenShard(group))

    @property
    def num_token_shards(self) -> int:
        """Number of neighbouring ranks that share tokens; 1 if none do."""
        return max([each.size for each in self.token_shards or ()], default=1)


def fingerprint(layout: Layout) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(layout)).hexdigest()[:16]


def shard(extent: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return the range `[lo, hi)` of an axis that a rank holds if the engine cuts it evenly.

    If there are fewer entries than ranks, neighbouring ranks hold the same one (GQA replicas): 2 heads on 4 ranks are
    0, 0, 1, 1.

    Args:
        extent: Number of entries of the whole axis, such as the model's KV heads.
        tp_rank: This rank.
        tp_size: Number of ranks that share the axis.

    Raises:
        LayoutError: Neither `extent` nor `tp_size` divides the other; give each rank's `held` yourself.
    """
    extent = integer("extent", extent, 1, MAX_BYTES, LayoutError)
    tp_size = integer("tp_size", tp_size, 1, MAX_RANKS, LayoutError)
    tp_rank = integer("tp_rank", tp_rank, 0, MAX_RANKS, LayoutError)
    if not 0 <= tp_rank < tp_size:
        raise LayoutError(f"tp_rank {tp_rank} is outside its group of tp_size {tp_size}")
    if extent % tp_size == 0:
        each = extent // tp_size
        return tp_rank * each, (tp_rank + 1) * each
    if tp_size % extent == 0:
        lo = tp_rank * extent // tp_size
        return lo, lo + 1
    raise LayoutError(
        f"{extent} entries cannot be cut evenly over tp_size {tp_size}; choose a tp_size that divides {extent} "
        f"or is a multiple of it, or give each rank's range yourself as `held` in its layout"
    )


def dense_part(
    name: str,
    dtype: str,
    dims: Sequence[tuple[str, int]],
    *,
    offset: int = 0,
    axis: str = "",
    held: tuple[int, int] = (0, 0),
    extent: int = 0,
    tokens_per_entry: int = 1,
) -> Part:
    """Declare a part with dims that lie densely one in another; `register_memory` checks it with its layout.

    Args:
        dtype: Element type: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8 or uint8.
        dims: `(name, entries)`, slowest first.
        name, offset, axis, held, extent, tokens_per_entry: As for `Part`.

    Raises:
        LayoutError: The dtype is unknown, or a dim has no size.
    """
    itemsize = _itemsize(dtype)
    given: Any = dims
    try:
        pairs: list[tuple[Any, Any]] = [(dim, size) for dim, size in given]
    except (TypeError, ValueError):
        raise LayoutError(f"dims is {shown(dims)}; give one (name, entries) per dim, slowest first") from None
    out, step = [], itemsize
    for dim, size in reversed(pairs):
        out.append(Dim(dim, integer(f"dim {shown(dim)}", size, 1, MAX_BYTES, LayoutError), step))
        step *= out[-1].size
    return Part(name, dtype, itemsize, offset, tuple(reversed(out)), axis, held, extent, tokens_per_entry)


def _itemsize(dtype: str) -> int:
    return ITEMSIZE[one_of("dtype", dtype, sorted(ITEMSIZE), LayoutError)]


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """Return the order of an attention layer's dims, or raise `LayoutError` that names the wrong one."""
    order = texts("order", order, 16, 64, LayoutError)
    wrong = [f"{name!r} is none of them{did_you_mean(name, DIMS)}" for name in order if name not in DIMS]
    wrong += [f"{name!r} is named twice" for i, name in enumerate(order) if name in order[:i]]
    wrong += [f"{name!r} is missing" for name in DIMS if name not in (*order, "kv", "head")]
    if wrong:
        raise LayoutError(
            f"order {order!r} is not a permutation of {', '.join(DIMS)} (kv and head may be left out): {wrong[0]}"
        )
    return order


def attention_view(
    *,
    layer: str,
    order: Sequence[str],
    sizes: Mapping[str, int],
    dtype: str,
    heads: tuple[int, int] = (0, 0),
    num_heads: int = 0,
    strides: Mapping[str, int] | None = None,
    memory: int = 0,
    group: int = 0,
    offset: int = 0,
) -> View:
    """Declare one attention layer from the order of its dims.

    Args:
        layer: Name of the layer, the same in both engines.
        order: A permutation of `block`, `kv`, `head`, `token`, `dim`, slowest first. Without `kv` the memory holds one
            part named `kv` (keys and values packed in `dim`, or a latent). Without `head` every rank holds the same (a
            latent), and none has a share of the heads.
        sizes: Entries per dim; `block` counts kernel blocks, `token` is the kernel block size.
        dtype: Element type, as for `dense_part`.
        heads: `[lo, hi)` of the global KV heads that this rank holds.
        num_heads: Global number of KV heads.
        strides: Bytes between entries per dim; dense in `order` if left out.
        memory: Index of the memory that holds the layer.
        group: Index of the layer's group.
        offset: Bytes from the memory's base to the first element.

    Raises:
        LayoutError: The order is no permutation, or has no `head` for the given heads; sizes are missing, or the dtype
            is unknown.
    """
    order = check_order(order)
    if "head" not in order and heads != (0, num_heads):
        raise LayoutError(
            f"heads {shown(heads)} of num_heads {shown(num_heads)} are given, but the order {tuple(order)!r} has no "
            f"head, which means that every rank holds the same; name the dim of the heads, or give no heads"
        )
    itemsize = _itemsize(dtype)
    sizes = {
        name: integer(f"sizes[{name!r}]", size, 1, MAX_BYTES, LayoutError) for name, size in _items(sizes, "sizes")
    }
    for name in order:
        if name not in sizes:
            raise LayoutError(f"sizes[{name!r}] is missing; every dim of the order needs a size of 1 or more")
    if sizes.get("kv", 2) != 2:
        raise LayoutError(f"sizes['kv'] is {sizes['kv']}; it counts keys and values, so it is 2")
    if strides is None:
        dense, step = {}, itemsize
        for name in reversed(order):
            dense[name] = step
            step *= sizes[name]
        strides = dense
    else:
        found = dict(_items(strides, "strides"))
        strides = {n: integer(f"strides[{n!r}]", found.get(n), 0, MAX_BYTES, LayoutError) for n in order}
    dims = tuple(Dim(n, sizes[n], strides[n]) for n in order if n not in ("block", "kv"))
    names = ("k", "v") if "kv" in order else ("kv",)
    place = ("head", heads, num_heads) if "head" in order else ("", (0, 0), 0)
    parts = tuple(Part(name, dtype, itemsize, i * strides.get("kv", 0), dims, *place) for i, name in enumerate(names))
    return View(memory, group, layer, offset, strides["block"], parts)


def _items(given: Any, name: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(given, Mapping):
        raise LayoutError(f"{name} is {shown(given)}; give a mapping of names of dims to integers")
    return given.items()
