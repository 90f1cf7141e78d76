"""What one rank holds in memory, declared: memories, groups, views and their parts.

A KV block is a list of *parts*. Each part is a logical array whose dims have names, sizes and byte
strides; it is *sharded* along one axis (and says which global range it holds) or *replicated*. A
*view* places the parts of one layer's blocks inside a *memory*; a *group* is the set of layers that
share block ids. Nothing is guessed from a base address, and `num_blocks` is what the engine declares.

Blocks of a group of *tokens* hold the KV of `block_size` tokens. Blocks of a group of *states* hold a
recurrent layer's state after some token: the one in place `i` of a request's list is the state after
`(i + 1) * block_size` tokens, or after the last token.

Layouts arrive from remote peers too, so `check_layout` trusts nothing: it bounds every product with
Python's integers before anything is handed to numpy, and never allocates by a declared count.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from asynckv.arguments import NO_SEQUENCE, integer, shown, texts
from asynckv.core.types import MAX_BLOCK_ID, MAX_GROUPS, MAX_RANKS, MAX_TOKENS, NULL, Name, Rank, Size
from asynckv.errors import LayoutError

__all__ = [
    "ITEMSIZE",
    "ONE_PER_REQUEST",
    "TOKEN",
    "Dim",
    "Group",
    "Layout",
    "Memory",
    "Part",
    "View",
    "as_block_ids",
    "attention_view",
    "blocks_of",
    "check_layout",
    "dense_part",
    "fingerprint",
    "num_pieces",
    "pools",
    "runs_of",
    "shard",
    "strided_pieces",
]

TOKEN = "token"
"""The dim along which a part covers tokens, one entry each."""

ONE_PER_REQUEST = MAX_TOKENS
"""The `block_size` of a group of states in which a request has a single slot, whatever its length."""

MAX_PIECES = 65_536
"""Most contiguous pieces that one view's block may fall into."""

MAX_VIEWS = 65_536

MAX_ALL_PIECES = 1 << 22
"""Most pieces over all views: checking a hostile layout must end soon."""

MAX_BYTES = 1 << 56
MAX_DESCRIPTORS = (1 << 31) - 1

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
Int64s = npt.NDArray[np.int64]


class Memory(Struct, frozen=True, array_like=True):
    """One registered range of addresses."""

    base: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    length: Positive
    kind: Literal["cpu", "cuda"] = "cpu"
    device: Annotated[int, Meta(ge=0, le=65_535)] = 0


class Dim(Struct, frozen=True, array_like=True):
    """One dim of a part: its name, how many entries this rank holds, and the bytes between them."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    size: Annotated[int, Meta(ge=1, le=1 << 31)]
    stride: Positive


class Part(Struct, frozen=True, array_like=True):
    """One logical array inside a block.

    Attributes:
        name: Matched by name between engines, such as `k` and `v`.
        dtype: Element type; must be equal on both sides.
        itemsize: Bytes per element.
        offset: Bytes from the start of the block to the first element.
        dims: The dims in any order.
        axis: Name of the sharded dim, or empty if every rank holds the whole part.
        held: `[lo, hi)` of the global axis that this rank holds; `hi - lo` is the dim's size.
        extent: Size of the global axis.
        tokens_per_entry: Tokens that one entry of the dim `token` covers: 1, or more for scales and
            other summaries. A part of a group of tokens without that dim covers a whole kernel block.
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
        """One of its dims is along the tokens."""
        return any(dim.name == TOKEN for dim in self.dims)


class View(Struct, frozen=True, array_like=True):
    """One layer's kernel blocks inside a memory.

    Attributes:
        memory: Index of the memory.
        group: Index of the group.
        layer: Matched by name between engines. A layer whose parts lie in several memories has a view in each.
        offset: Bytes from the memory's base to kernel block 0.
        stride: Bytes from one kernel block to the next.
        parts: What a kernel block consists of.
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
        name: For people.
        block_size: Tokens per block, as the engine's block table counts them. For states: tokens
            between the states that are kept, or `ONE_PER_REQUEST`.
        num_blocks: Blocks as the engine declares them, whatever the tensors' shapes say.
        ratio: Kernel blocks per block: block `b` is kernel blocks `b*ratio ... b*ratio+ratio-1`.
        kind: Whether blocks hold tokens, or states after some token.
        window: Sliding window: the next token attends to itself and the `window - 1` tokens before it,
            so that no more than these are ever read. 0: all tokens.
        null_block: Id by which the engine's lists mark a place without a block (vLLM: 0); `NULL` if
            there is none. `None` in a list always means that.
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
        """Tokens per kernel block."""
        return self.block_size // self.ratio

    @property
    def num_kernel_blocks(self) -> int:
        """Kernel blocks that `num_blocks` blocks consist of."""
        return self.num_blocks * self.ratio


class Layout(Struct, frozen=True, kw_only=True):
    """All that a peer has to know about one rank's memory."""

    schema: Annotated[int, Meta(ge=1, le=1)] = 1
    model: Name = ""
    tp_rank: Rank = 0
    tp_size: Size = 1
    pp_stage: Rank = 0
    pp_size: Size = 1
    memories: Annotated[tuple[Memory, ...], Meta(min_length=1, max_length=MAX_VIEWS)]
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    views: Annotated[tuple[View, ...], Meta(min_length=1, max_length=MAX_VIEWS)]


def fingerprint(layout: Layout) -> str:
    """Short digest by which two statements of a layout can be compared."""
    return hashlib.sha256(msgspec.msgpack.encode(layout)).hexdigest()[:16]


def shard(extent: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return the usual contiguous range `[lo, hi)` of an axis that rank `tp_rank` of `tp_size` holds.

    Where there are fewer entries than ranks, neighbouring ranks hold the same one (GQA replicas):
    2 heads on 4 ranks are 0, 0, 1, 1.

    Raises:
        LayoutError: Neither size divides the other; declare `held` yourself.
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
    """Declare a part whose dims, `(name, entries)` slowest first, lie densely one in another.

    What is only written down here is checked when its layout is registered.

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
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise LayoutError(f"dtype {shown(dtype)} is unknown; use one of {', '.join(sorted(ITEMSIZE))}")
    return ITEMSIZE[dtype]


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
        layer: Name by which both engines know the layer.
        order: A permutation of `block`, `kv`, `head`, `token`, `dim`, slowest first. Without `kv` the
            memory holds one part named `kv` (keys and values packed in `dim`, or a latent). Without
            `head` every rank holds the same (a latent).
        sizes: Entries per dim; `block` counts kernel blocks, `token` is the kernel block size.
        dtype: Element type, a key of `ITEMSIZE`.
        heads: `[lo, hi)` of the global KV heads that this rank holds.
        num_heads: Global number of KV heads.
        strides: Bytes between entries per dim; dense in `order` if left out.
        memory: Index of the memory that holds the layer.
        group: Index of the layer's group.
        offset: Bytes from the memory's base to the first element.

    Raises:
        LayoutError: The order is no permutation, sizes are missing, or the dtype is unknown.
    """
    order = texts("order", order, 16, 64, LayoutError)
    known = {"block", "kv", "head", TOKEN, "dim"}
    if len(set(order)) != len(order) or not known - {"kv", "head"} <= set(order) <= known:
        raise LayoutError(
            f"order {tuple(order)!r} is not a permutation of block, kv, head, token, dim (kv and head may be left out)"
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


def num_pieces(itemsize: int, dims: Sequence[tuple[int, int, int]]) -> int:
    """Count the pieces that `strided_pieces` would make, without making them."""
    return math.prod(d[0] for d in _fold(itemsize, dims)[1])


def _fold(itemsize: int, dims: Sequence[tuple[int, int, int]]) -> tuple[int, list[tuple[int, int, int]]]:
    """Join the dims that are contiguous on both sides; the length of a piece, and the dims that remain."""
    length, rest = itemsize, [d for d in dims if d[0] > 1]
    while folds := [d for d in rest if d[1] == length and d[2] == length]:
        length *= folds[0][0]
        rest.remove(folds[0])
    return length, rest


def strided_pieces(itemsize: int, dims: Sequence[tuple[int, int, int]]) -> tuple[Int64s, Int64s, int]:
    """Cut an array that lies in two memories into pieces that are contiguous in both.

    Args:
        itemsize: Bytes per element.
        dims: `(entries, byte stride in a, byte stride in b)` per dim, in any order.

    Returns:
        Byte offsets in a and in b (int64, ascending in a), and the length of every piece.

    Raises:
        LayoutError: There would be more than `MAX_PIECES` pieces.
    """
    length, rest = _fold(itemsize, dims)
    if math.prod(d[0] for d in rest) > MAX_PIECES:
        raise LayoutError(
            f"the two memory orders share only pieces of {length} bytes, more than {MAX_PIECES} per block and "
            f"part; use the same order of dims on both sides"
        )
    a, b = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for size, in_a, in_b in sorted(rest, key=lambda d: -d[1]):
        steps = np.arange(size, dtype=np.int64)
        a = (a[:, None] + steps * in_a).ravel()
        b = (b[:, None] + steps * in_b).ravel()
    order = np.argsort(a, kind="stable")
    return a[order], b[order], length


def check_layout(layout: Layout) -> None:
    """Refuse a layout that does not hold together; afterwards all products fit and nothing overlaps.

    Raises:
        LayoutError: Naming the field, both numbers and the remedy.
    """
    if layout.tp_rank >= layout.tp_size:
        raise LayoutError(f"tp_rank {layout.tp_rank} is outside its group of tp_size {layout.tp_size}")
    if layout.pp_stage >= layout.pp_size:
        raise LayoutError(f"pp_stage {layout.pp_stage} is outside its group of pp_size {layout.pp_size}")
    for i, memory in enumerate(layout.memories):
        if memory.base + memory.length > 1 << 63:
            raise LayoutError(f"memory {i}: base {memory.base:#x} + length {memory.length} leaves the address space")
    for i, group in enumerate(layout.groups):
        if group.block_size % group.ratio:
            raise LayoutError(
                f"group {i} ({group.name!r}): block_size {group.block_size} is not a multiple of its ratio of "
                f"{group.ratio} kernel blocks per block; make block_size a multiple of the kernel block size"
            )
        if group.kind == "state" and (group.ratio != 1 or group.window):
            raise LayoutError(
                f"group {i} ({group.name!r}): holds states, but has ratio {group.ratio} and window {group.window}; "
                f"a state is one whole block of ratio 1 and has no window"
            )
        if group.null_block >= group.num_blocks:
            raise LayoutError(
                f"group {i} ({group.name!r}): null_block {group.null_block} is outside its {group.num_blocks} blocks"
            )
        if group.num_kernel_blocks > MAX_BLOCK_ID:
            raise LayoutError(f"group {i} ({group.name!r}): {group.num_blocks} blocks x {group.ratio} do not fit int32")
    parts = Counter((view.layer, part.name) for view in layout.views for part in view.parts)
    twice = [f"{layer!r} part {part!r}" for (layer, part), n in parts.items() if n > 1]
    if twice:
        raise LayoutError(f"layer {', '.join(twice[:3])} is listed more than once; every part of a layer has one place")
    _check_memories(layout)
    pieces = 0
    for view in layout.views:
        _check_view(layout, view)
        pieces += sum(_num_pieces(part) for part in view.parts)
        if pieces > MAX_ALL_PIECES:
            raise LayoutError(
                f"the views fall into more than {MAX_ALL_PIECES} contiguous pieces per block; use a denser memory order"
            )
    _check_overlap(layout)
    pools(layout)


def _check_memories(layout: Layout) -> None:
    """No byte is in two memories."""
    spots = sorted((m.kind, m.device, m.base, m.base + m.length, i) for i, m in enumerate(layout.memories))
    for (kind, device, lo, end, i), (other, number, start, _, j) in pairwise(spots):
        if (kind, device) == (other, number) and start < end:
            raise LayoutError(
                f"memories {i} and {j} overlap: {i} is [{lo:#x}, {end:#x}) and {j} begins at {start:#x}; register the "
                f"whole range once, with views at their offsets"
            )


def _check_view(layout: Layout, view: View) -> None:
    where = f"layer {view.layer!r}"
    if view.memory >= len(layout.memories):
        raise LayoutError(f"{where}: memory {view.memory} is not among the {len(layout.memories)} memories")
    if view.group >= len(layout.groups):
        raise LayoutError(f"{where}: group {view.group} is not among the {len(layout.groups)} groups")
    group, memory = layout.groups[view.group], layout.memories[view.memory]
    for part in view.parts:
        _check_part(where, part, group)
        last = view.offset + view.stride * (group.num_kernel_blocks - 1) + part.offset + _span(part)
        if last > memory.length:
            raise LayoutError(
                f"{where}, part {part.name!r}: {group.num_kernel_blocks} kernel blocks of stride {view.stride} end at "
                f"byte {last}, but memory {view.memory} has {memory.length}; declare fewer num_blocks or register more"
            )


def _check_part(where: str, part: Part, group: Group) -> None:
    where = f"{where}, part {part.name!r}"
    dims = {d.name: d for d in part.dims}
    if len(dims) != len(part.dims):
        raise LayoutError(f"{where}: two dims have the same name")
    if TOKEN in dims:
        if group.kind == "state":
            raise LayoutError(f"{where}: has a dim {TOKEN!r}, but group {group.name!r} holds states, not tokens")
        if dims[TOKEN].size * part.tokens_per_entry != group.kernel_size:
            each = f" entries of {part.tokens_per_entry}" if part.tokens_per_entry > 1 else ""
            raise LayoutError(
                f"{where}: holds {dims[TOKEN].size}{each} tokens per kernel block, but group {group.name!r} has "
                f"{group.block_size} tokens per block / ratio {group.ratio} = {group.kernel_size}"
            )
    elif part.tokens_per_entry != 1:
        raise LayoutError(
            f"{where}: has {part.tokens_per_entry} tokens per entry, but no dim named {TOKEN!r} to count entries along"
        )
    if part.axis:
        lo, hi = part.held
        if part.axis not in dims or part.axis == TOKEN:
            raise LayoutError(f"{where}: sharded axis {part.axis!r} is not one of its dims {', '.join(dims)}")
        if not lo < hi <= part.extent or dims[part.axis].size != hi - lo:
            raise LayoutError(
                f"{where}: holds [{lo}, {hi}) of {part.extent} along {part.axis!r}, "
                f"but the dim has {dims[part.axis].size} entries"
            )
    if _span(part) > MAX_BYTES:
        raise LayoutError(f"{where}: spans {_span(part)} bytes per block")
    by_stride = sorted((d for d in part.dims if d.size > 1), key=lambda d: d.stride)
    reach = part.itemsize
    for dim in by_stride:
        if dim.stride < reach:
            raise LayoutError(
                f"{where}: dim {dim.name!r} has stride {dim.stride}, less than the {reach} bytes of one entry; "
                f"entries overlap"
            )
        reach = dim.stride * (dim.size - 1) + reach


def _span(part: Part) -> int:
    return part.itemsize + sum(d.stride * (d.size - 1) for d in part.dims)


def _num_pieces(part: Part) -> int:
    """Contiguous pieces of one block, without making them."""
    pieces, reach = 1, part.itemsize
    for dim in sorted(part.dims, key=lambda d: d.stride):
        if dim.stride == reach and pieces == 1:
            reach *= dim.size
        else:
            pieces *= dim.size
    return pieces


def _check_overlap(layout: Layout) -> None:
    """Within one group no byte may belong to two parts or two blocks."""
    places: dict[tuple[int, int], list[tuple[int, int, str, View, Part]]] = {}
    for view in layout.views:
        n = layout.groups[view.group].num_kernel_blocks
        for part in view.parts:
            lo = view.offset + part.offset
            hi = lo + view.stride * (n - 1) + _span(part)
            name = f"layer {view.layer!r} part {part.name!r}"
            places.setdefault((view.group, view.memory), []).append((lo, hi, name, view, part))
    for spots in places.values():
        spots.sort(key=lambda s: s[:3])
        # Parts whose ranges touch form a cluster; only within it can bytes coincide.
        cluster, end = spots[:1], spots[0][1]
        for spot in spots[1:]:
            if spot[0] < end:
                cluster.append(spot)
            else:
                _check_cluster(layout, cluster)
                cluster = [spot]
            end = max(end, spot[1])
        _check_cluster(layout, cluster)


def _check_cluster(layout: Layout, cluster: list[tuple[int, int, str, View, Part]]) -> None:
    """Parts that interleave must share one block stride; then one block's bytes, folded by it, decide."""
    view = cluster[0][3]
    blocks = layout.groups[view.group].num_kernel_blocks
    if len(cluster) == 1 and blocks == 1:
        return
    stride = view.stride
    starts, lengths, owners, total = [], [], [], 0
    for i, (lo, _, name, other, part) in enumerate(cluster):
        if other.stride != stride and blocks > 1:
            raise LayoutError(
                f"{cluster[0][2]} and {name} overlap in memory {view.memory} with different strides "
                f"{stride} and {other.stride}; place them apart or give them one stride"
            )
        offsets, _, size = strided_pieces(part.itemsize, [(d.size, d.stride, d.stride) for d in part.dims])
        if size > stride and blocks > 1:
            raise LayoutError(f"{name}: a block has {size} contiguous bytes, more than the stride {stride}")
        starts.append(lo + offsets)
        lengths.append(np.full(len(offsets), size))
        owners.append(np.full(len(offsets), i))
        total += len(offsets)
        if total > 16 * MAX_PIECES:
            raise LayoutError(f"{cluster[0][2]}: too many pieces interleave to check; use a denser memory order")
    start, length, owner = (np.concatenate(x) for x in (starts, lengths, owners))
    order = np.argsort(start, kind="stable")
    start, length, owner = start[order], length[order], owner[order]
    # Pieces that all blocks together keep apart (keys of all blocks, then values) are no neighbours.
    reach = np.maximum.accumulate(start + length + (blocks - 1) * stride)
    run = np.concatenate(([0], np.cumsum(start[1:] >= reach[:-1])))
    if blocks > 1:
        start = start % stride
        order = np.lexsort((start, run))
        start, length, owner, run = start[order], length[order], owner[order], run[order]
    last = np.append(run[1:] != run[:-1], True)
    first = np.flatnonzero(np.append(True, last[:-1]))
    # Closing the circle: the last piece may reach round into the first of the next block.
    following = np.append(start[1:], 0)
    following[last] = start[first] + stride if blocks > 1 else (1 << 62)
    if (bad := np.flatnonzero(start + length > following)).size:
        at = int(bad[0])
        one, two = owner[at], owner[first[run[at] - run[0]] if last[at] else at + 1]
        raise LayoutError(f"{cluster[one][2]} and {cluster[two][2]} overlap in memory {view.memory}")


def pools(layout: Layout) -> tuple[int, ...]:
    """Say which groups share memory: per group the number of its pool, the lowest group's in it.

    Groups of one pool see the same pages, so that a block id means the same memory in each.

    Raises:
        LayoutError: Two groups overlap with pages of different sizes.
    """
    pool = list(range(len(layout.groups)))
    spots: dict[int, list[tuple[int, int, int, int]]] = {}
    for view in layout.views:
        group = layout.groups[view.group]
        page = view.stride * group.ratio
        for part in view.parts:
            lo = view.offset + part.offset
            hi = lo + view.stride * (group.num_kernel_blocks - 1) + _span(part)
            spots.setdefault(view.memory, []).append((lo, hi, view.group, page))
    for memory, rows in spots.items():
        rows.sort()
        ends: dict[int, tuple[int, int]] = {}
        """Group -> where what was seen of it ends, and its page."""
        for lo, hi, index, page in rows:
            for other, (end, size) in list(ends.items()):
                if end <= lo:
                    del ends[other]
                elif other != index and size != page:
                    raise LayoutError(
                        f"groups {other} and {index} overlap in memory {memory} with pages of {size} and {page} bytes; "
                        f"give them one page size, or place them apart"
                    )
                elif other != index:
                    old, new = sorted((pool[other], pool[index]), reverse=True)
                    pool = [new if x == old else x for x in pool]
            if index not in ends or ends[index][0] < hi:
                ends[index] = (hi, page)
    return tuple(pool)


def as_block_ids(ids: Sequence[int | None] | npt.NDArray[np.integer], null_block: int = NULL) -> Int64s:
    """Return block ids as an array, with `NULL` wherever a list says `None` or the engine's `null_block`.

    Raises:
        LayoutError: An id is no integer, or negative.
    """
    is_flat = type(ids) is list or isinstance(ids, Sequence) or hasattr(ids, "__array__")
    if not is_flat or (type(ids) is not list and isinstance(ids, NO_SEQUENCE)):
        raise LayoutError(f"block ids are {shown(ids)}; give a flat list of integers")
    if isinstance(ids, list | tuple) and bool in set(map(type, ids)):
        raise LayoutError("block ids hold a bool; give a flat list of integers")
    try:
        array = np.asarray(ids)
        if array.dtype == object:
            array = np.asarray([NULL if b is None else b for b in ids])
            nulls = np.asarray([b is None for b in ids])
        else:
            nulls = np.zeros(array.shape, np.bool_)
    except (ValueError, OverflowError, TypeError):
        raise LayoutError("block ids must be a flat list of integers") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise LayoutError("block ids must be a flat list of integers")
    if (bad := np.flatnonzero(((array < 0) & ~nulls) | (array > MAX_BLOCK_ID))).size:
        raise LayoutError(
            f"block id {int(array[bad[0]])} is not a block's; a place without a block is None in the list"
        )
    out = array.astype(np.int64)
    if null_block != NULL:
        out[out == null_block] = NULL
    return out


def runs_of(block_ids: Sequence[int | None] | npt.NDArray[np.integer]) -> tuple[tuple[int, int], ...]:
    """Write block ids as `(first, count)` runs of consecutive ids or of placeholders, keeping their order.

    >>> runs_of([None, None, 7, 8, 9, 3, 5, 6])
    ((-1, 2), (7, 3), (3, 1), (5, 2))
    """
    ids = block_ids if isinstance(block_ids, np.ndarray) else as_block_ids(block_ids)
    if len(ids) == 0:
        return ()
    a, b = ids[:-1], ids[1:]
    joined = np.where((a == NULL) | (b == NULL), a == b, b - a == 1)
    cuts = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(ids)]
    return tuple((int(ids[i]), j - i) for i, j in pairwise(cuts))


def blocks_of(runs: Sequence[tuple[int, int]]) -> Int64s:
    """Undo `runs_of`. The counts decide how much is allocated: bound their sum first."""
    first = np.array([r[0] for r in runs], np.int64)
    count = np.array([r[1] for r in runs], np.int64)
    ends = np.cumsum(count)
    out = np.repeat(first - (ends - count), count) + np.arange(int(count.sum()), dtype=np.int64)
    out[np.repeat(first == NULL, count)] = NULL
    return out
