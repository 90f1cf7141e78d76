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

import contextlib
import hashlib
import heapq
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from asynckv.arguments import NO_SEQUENCE, integer, shown, texts
from asynckv.errors import LayoutError
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_GROUPS, MAX_RANKS, MAX_TOKENS, NULL, Name, Rank, Size

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
    "decode_layout",
    "dense_part",
    "fingerprint",
    "num_pieces",
    "pools",
    "runs_of",
    "shard",
    "strided_pieces",
    "valid_layout",
]

TOKEN = "token"
"""The dim along which a part covers tokens, one entry each."""

ONE_PER_REQUEST = MAX_TOKENS
"""The `block_size` of a group of states in which a request has a single slot, whatever its length."""

MAX_PIECES = 65_536
"""Most contiguous pieces that one view's block may fall into."""

# Layouts come from strangers, and the event loop waits while one is decoded, checked and compared. The most that real
# models need: 126 layers with keys, values and a scale of each, every part a view of its own under a long name, are 504
# views and parts with 1,260 dims in 58 KB; the presets of `asynckv models` have up to 80 views, 256 parts and 18 KB.
# Four times as much fits, and takes 17 ms; what costs most takes 41 (`python -m scripts.bench_plan --layouts`).

MAX_LAYOUT_BYTES = 256 * 1024
"""Most bytes that a layout takes on the wire: what bounds decoding, and is known before it."""

MAX_VIEWS = 2048

MAX_PARTS = 2048
"""Most parts in all views together."""

MAX_LAYER_PARTS = 64
"""Most parts of one layer, of which the largest known has six."""

MAX_DIMS = 8192
"""Most dims in all parts together."""

MAX_CHECKED = 1 << 14
"""Most pieces that are compared one by one in a search for overlaps: parts whose dims are not nested in each other."""

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
    """All that a peer has to know about one rank's memory.

    Attributes:
        aliases: `(alias, layer)`: layers without memory of their own, because the model lets them use the KV of
            another one. The other side may have memory for both, or for the other of the two.
    """

    schema: Annotated[int, Meta(ge=1, le=1)] = 1
    model: Name = ""
    tp_rank: Rank = 0
    tp_size: Size = 1
    pp_stage: Rank = 0
    pp_size: Size = 1
    memories: Annotated[tuple[Memory, ...], Meta(min_length=1, max_length=MAX_VIEWS)]
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    views: Annotated[tuple[View, ...], Meta(min_length=1, max_length=MAX_VIEWS)]
    aliases: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=MAX_VIEWS)] = ()


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


_decoder: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def decode_layout(data: bytes | memoryview) -> Layout:
    """Decode what a remote rank says of itself; `check_layout` is next.

    Raises:
        LayoutError: It is too long, which is seen before anything is read, or a field is not what it has to be.
    """
    _check_length(len(data))
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        said = f"a layout of {len(data)} bytes that cannot be decoded: {exc}"
        if isinstance(exc, msgspec.ValidationError):
            # What is behind the wrong field may be no value at all.
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
                said = _blamed(exc, msgspec.msgpack.decode(data))
        raise LayoutError(said) from exc


def valid_layout(layout: Layout) -> Layout:
    """Hold a layout that was made by hand to the bounds that a decoded one has; numpy's integers become Python's.

    Raises:
        LayoutError: Naming the field and its value.
    """
    try:
        made = msgspec.convert(msgspec.to_builtins(layout, builtin_types=(bytes,), enc_hook=_builtin), Layout)
        _check_length(len(msgspec.msgpack.encode(made)))
    except msgspec.ValidationError as exc:
        raise LayoutError(_blamed(exc, layout)) from exc
    except UnicodeEncodeError as exc:
        raise LayoutError(f"a name in the layout cannot be encoded: {exc}") from exc
    except (TypeError, OverflowError, RecursionError) as exc:
        raise LayoutError(f"the layout holds what none can: {exc}") from exc
    return made


def _check_length(length: int) -> None:
    if length > MAX_LAYOUT_BYTES:
        raise LayoutError(
            f"the layout is {length} bytes long, and at most {MAX_LAYOUT_BYTES} are taken; declare several parts per "
            f"view, and shorter names"
        )


def _builtin(value: object) -> object:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return {}  # no field takes that


_NESTED: Mapping[tuple[type[Struct], str], tuple[type[Struct], str, str]] = {
    (Layout, "memories"): (Memory, "memory", ""),
    (Layout, "groups"): (Group, "group", "name"),
    (Layout, "views"): (View, "layer", "layer"),
    (View, "parts"): (Part, "part", "name"),
    (Part, "dims"): (Dim, "dim", "name"),
}
"""Fields that hold structures: which, what one is called, and by which of its fields people know it."""


def _blamed(exc: msgspec.ValidationError, layout: Any) -> str:
    """Say which field is wrong, and its value; msgspec names places in arrays."""
    told, _, path = str(exc).partition(" - at `$")
    kind: type[Struct] | None = Layout
    nested, value = None, layout
    said: list[str] = []
    for name, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        at = int(place or 0)
        if kind is not None:
            name = name or msgspec.structs.fields(kind)[at].name
            said.append(name)
            value, nested, kind = _field(value, kind, name), _NESTED.get((kind, name)), None
        elif nested is not None:
            kind, called, known_by = nested
            value, nested = _entry(value, at), None
            label = _field(value, kind, known_by) if known_by else ""
            if isinstance(label, str):
                said[-1] = f"{called} {label!r:.80}" if label else f"{called} {at}"
            else:
                said[-1] += f"[{at}]"
        else:
            said[-1] += f"[{at}]"
            value = _entry(value, at)
    shown = f"of {len(value)} entries" if isinstance(value, list | tuple) else f"{value!r:.80}"
    return f"{' '.join(said) or 'the layout'} is {shown}: {told[:1].lower()}{told[1:200]}"


def _field(value: Any, kind: type[Struct], name: str) -> Any:
    """A field of a structure, or of what was decoded without knowing that it is one."""
    if isinstance(value, Struct):
        return getattr(value, name)
    if isinstance(value, Mapping):
        return value.get(name)
    return _entry(value, kind.__struct_fields__.index(name))


def _entry(value: Any, at: int) -> Any:
    # A stranger may say a field twice, of which msgspec blames one and keeps the other.
    return value[at] if isinstance(value, list | tuple) and at < len(value) else None


def check_layout(layout: Layout) -> None:
    """Refuse a layout that does not hold together; afterwards all products fit and nothing overlaps.

    Raises:
        LayoutError: Naming the field, both numbers and the remedy.
    """
    _check_size(layout)
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
    parts = Counter([(view.layer, part.name) for view in layout.views for part in view.parts])
    twice = [f"{layer!r} part {part!r}" for (layer, part), n in parts.items() if n > 1]
    if twice:
        raise LayoutError(f"layer {', '.join(twice[:3])} is listed more than once; every part of a layer has one place")
    for layer, count in Counter([layer for layer, _ in parts]).most_common(1):
        _check_count(f"parts in layer {layer!r}", count, MAX_LAYER_PARTS)
    _check_aliases(layout)
    _check_memories(layout)
    spots = _spots(layout)
    _check_overlap(layout, spots)
    _pools(layout, spots)


def _check_size(layout: Layout) -> None:
    """Refuse what no real layout needs, before anything is looked at."""
    _check_count("memories", len(layout.memories), MAX_VIEWS)
    _check_count("groups", len(layout.groups), MAX_GROUPS)
    _check_count("aliases", len(layout.aliases), MAX_VIEWS)
    _check_count("views", len(layout.views), MAX_VIEWS)
    _check_count("parts in all views together", sum(len(v.parts) for v in layout.views), MAX_PARTS)
    _check_count("dims in all parts together", sum(len(p.dims) for v in layout.views for p in v.parts), MAX_DIMS)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise LayoutError(f"the layout has {count} {what}, and at most {most} are taken; declare fewer, larger ones")


def _check_aliases(layout: Layout) -> None:
    layers = {view.layer for view in layout.views}
    known: set[str] = set()
    for alias, layer in layout.aliases:
        if alias in layers:
            raise LayoutError(f"layer {alias!r} is an alias of {layer!r}, but has memory of its own; drop either")
        if alias in known:
            raise LayoutError(f"layer {alias!r} is declared an alias twice")
        if layer not in layers:
            raise LayoutError(
                f"layer {alias!r} is an alias of {layer!r}, which has no memory on this rank; name the layer whose "
                f"memory it is"
            )
        known.add(alias)


def _check_memories(layout: Layout) -> None:
    """No byte is in two memories."""
    spots = sorted((m.kind, m.device, m.base, m.base + m.length, i) for i, m in enumerate(layout.memories))
    for (kind, device, lo, end, i), (other, number, start, _, j) in pairwise(spots):
        if (kind, device) == (other, number) and start < end:
            raise LayoutError(
                f"memories {i} and {j} overlap: {i} is [{lo:#x}, {end:#x}) and {j} begins at {start:#x}; register the "
                f"whole range once, with views at their offsets"
            )


_Step = tuple[int, int, bool]
"""Byte stride, entries, and whether they are the blocks."""


class _Spot(NamedTuple):
    """Where one part of one view lies in its memory, over all blocks."""

    lo: int
    hi: int
    """Behind the last byte."""
    view: View
    part: Part
    steps: tuple[_Step, ...]
    """The blocks and the dims, the largest stride first; what has one entry is left out."""

    @property
    def name(self) -> str:
        return f"layer {self.view.layer!r} part {self.part.name!r}"


def _spots(layout: Layout) -> list[_Spot]:
    """Check every view by itself, and say where its parts are."""
    out = []
    known: dict[tuple[int, Part], int] = {}
    """Layers are much alike: what was checked for one is known of the others. The bytes that a block's part spans."""
    for view in layout.views:
        if view.memory >= len(layout.memories):
            raise LayoutError(
                f"layer {view.layer!r}: memory {view.memory} is not among the {len(layout.memories)} memories"
            )
        if view.group >= len(layout.groups):
            raise LayoutError(f"layer {view.layer!r}: group {view.group} is not among the {len(layout.groups)} groups")
        group, memory, stride = layout.groups[view.group], layout.memories[view.memory], view.stride
        blocks = group.num_kernel_blocks
        for part in view.parts:
            if (span := known.get((view.group, part))) is None:
                _check_part(f"layer {view.layer!r}, part {part.name!r}", part, group)
                span = known[view.group, part] = _span(part)
            lo = view.offset + part.offset
            hi = lo + stride * (blocks - 1) + span
            if hi > memory.length:
                raise LayoutError(
                    f"layer {view.layer!r}, part {part.name!r}: {blocks} kernel blocks of stride {stride} end at byte "
                    f"{hi}, but memory {view.memory} has {memory.length}; declare fewer num_blocks or register more"
                )
            steps = [(d.stride, d.size, False) for d in part.dims if d.size > 1]
            if blocks > 1:
                steps.append((stride, blocks, True))
            steps.sort(reverse=True)
            out.append(_Spot(lo, hi, view, part, tuple(steps)))
    return out


def _check_part(where: str, part: Part, group: Group) -> None:
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
        if part.axis == TOKEN:
            raise LayoutError(
                f"{where}: axis {TOKEN!r} cannot be the sharded one, for every rank holds whole blocks of tokens; name "
                f"the dim that tensor parallelism cuts, or none (axis='') if every rank holds the same"
            )
        if part.axis not in dims:
            raise LayoutError(f"{where}: sharded axis {part.axis!r} is not one of its dims {', '.join(dims)}")
        if not lo < hi <= part.extent or dims[part.axis].size != hi - lo:
            raise LayoutError(
                f"{where}: holds [{lo}, {hi}) of {part.extent} along {part.axis!r}, "
                f"but the dim has {dims[part.axis].size} entries"
            )
    if _span(part) > MAX_BYTES:
        raise LayoutError(f"{where}: spans {_span(part)} bytes per block")
    by_stride = sorted([d for d in part.dims if d.size > 1], key=lambda d: d.stride)
    reach = part.itemsize
    for dim in by_stride:
        if dim.stride < reach:
            raise LayoutError(
                f"{where}: dim {dim.name!r} has stride {dim.stride}, less than the {reach} bytes of one entry; "
                f"entries overlap"
            )
        reach = dim.stride * (dim.size - 1) + reach


def _span(part: Part) -> int:
    return part.itemsize + sum([d.stride * (d.size - 1) for d in part.dims])


def _check_overlap(layout: Layout, spots: Sequence[_Spot]) -> None:
    """Within one group no byte may belong to two parts or two blocks."""
    places: dict[tuple[int, int], list[_Spot]] = {}
    for spot in spots:
        places.setdefault((spot.view.group, spot.view.memory), []).append(spot)
    budget = [MAX_CHECKED]
    for group in places.values():
        _check_apart(group, budget)


def _check_apart(spots: list[_Spot], budget: list[int]) -> None:
    """No byte is in two of these arrays, nor twice in one.

    Arrays whose ranges are apart are apart. Those that mesh mostly do so along a dim that all of them have, the blocks
    or the tokens: if what one entry of it holds, of all together, is no longer than its stride, entries are apart, and
    one tells of all. What remains where no dim is of this kind is compared piece by piece, of which there may be few.
    """
    for cluster in _clusters(spots):
        first = cluster[0]
        if len(cluster) == 1 and _is_nested(first):
            continue
        lo = min(spot.lo for spot in cluster)
        hi = max(spot.hi for spot in cluster)
        stride, size, _ = first.steps[0] if first.steps else (0, 0, False)
        if stride and hi - lo - stride * (size - 1) <= stride and all(s.steps[:1] == first.steps[:1] for s in cluster):
            skip = stride * (size - 1)
            _check_apart([s._replace(hi=s.hi - skip, steps=s.steps[1:]) for s in cluster], budget)
        else:
            _check_pieces(cluster, budget)


def _clusters(spots: list[_Spot]) -> Iterator[list[_Spot]]:
    spots.sort(key=lambda spot: spot[:2])
    cluster, end = spots[:1], spots[0].hi
    for spot in spots[1:]:
        if spot.lo < end:
            cluster.append(spot)
        else:
            yield cluster
            cluster = [spot]
        end = max(end, spot.hi)
    yield cluster


def _is_nested(spot: _Spot) -> bool:
    """Each entry of each dim begins behind the one before it."""
    reach = spot.part.itemsize
    for stride, size, _ in reversed(spot.steps):
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True


def _check_pieces(cluster: list[_Spot], budget: list[int]) -> None:
    """Parts that interleave must share one block stride; then one block's bytes, folded by it, decide."""
    view = cluster[0].view
    stride, blocks = next(((step, size) for step, size, is_block in cluster[0].steps if is_block), (view.stride, 1))
    starts, lengths, owners = [], [], []
    for i, spot in enumerate(cluster):
        if spot.view.stride != stride and blocks > 1:
            raise LayoutError(
                f"{cluster[0].name} and {spot.name} overlap in memory {view.memory} with different strides "
                f"{stride} and {spot.view.stride}; place them apart or give them one stride"
            )
        dims = [(size, step, step) for step, size, is_block in spot.steps if not is_block]
        # Each part costs some, however few its pieces are.
        budget[0] -= max(num_pieces(spot.part.itemsize, dims), 16)
        if budget[0] < 0:
            raise LayoutError(
                f"{cluster[0].name} and {len(cluster) - 1} others interleave in more than {MAX_CHECKED} pieces per "
                f"block, too many to check; give them dims of the same strides, or place them apart"
            )
        offsets, _, size = strided_pieces(spot.part.itemsize, dims)
        if size > stride and blocks > 1:
            raise LayoutError(f"{spot.name}: a block has {size} contiguous bytes, more than the stride {stride}")
        starts.append(spot.lo + offsets)
        lengths.append(np.full(len(offsets), size))
        owners.append(np.full(len(offsets), i))
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
        one, two = (cluster[owner[x]] for x in (at, first[run[at] - run[0]] if last[at] else at + 1))
        raise LayoutError(
            f"{one.name} and {two.name} overlap in memory {view.memory}; place them apart, or, if the model lets one "
            f"layer use the KV of the other, declare it an alias (aliases)"
        )


def pools(layout: Layout) -> tuple[int, ...]:
    """Say which groups of a checked layout share memory: per group the number of its pool, the lowest group's in it.

    Groups of one pool see the same pages, so that a block id means the same memory in each.
    """
    return _pools(layout, _spots(layout))


def _pools(layout: Layout, spots: Sequence[_Spot]) -> tuple[int, ...]:
    """Sweep every memory from end to end; refuse where two groups overlap with pages of different sizes."""
    pool = list(range(len(layout.groups)))
    if len(pool) == 1:
        return (0,)
    rows = sorted([(s.view.memory, s.lo, s.hi, s.view.group, s.view.stride) for s in spots])
    here: list[tuple[int, int, int]] = []
    """(end, group, page) of all that covers where the sweep is. Any two of it overlap: so it is of one page size, or of
    one group, and in one pool."""
    known: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    swept = -1
    for memory, lo, hi, index, stride in rows:
        page = stride * layout.groups[index].ratio
        while here and (here[0][0] <= lo or memory != swept):
            for count, value in zip(known, heapq.heappop(here)[1:], strict=True):
                count[value] -= 1
                if not count[value]:
                    del count[value]
        swept = memory
        if all(count.keys() - {value} for count, value in zip(known, (index, page), strict=True)):
            other, size = next((g, p) for _, g, p in here if g != index and p != page)
            raise LayoutError(
                f"groups {other} and {index} overlap in memory {memory} with pages of {size} and {page} bytes; "
                f"give them one page size, or place them apart"
            )
        if here and pool[here[0][1]] != pool[index]:
            old, new = sorted((pool[here[0][1]], pool[index]), reverse=True)
            pool = [new if x == old else x for x in pool]
        heapq.heappush(here, (hi, index, page))
        known[0][index] += 1
        known[1][page] += 1
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
