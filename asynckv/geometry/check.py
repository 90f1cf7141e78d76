"""Checks that refuse an inconsistent layout, wherever it comes from.

`decode_layout` takes bytes from an untrusted peer, `valid_layout` a value that an engine built. Both apply the bounds
of every field, and name a wrong field in words that users know. `check_layout` then compares fields: products are
bounded with Python's integers before numpy sees them, nothing is allocated by a declared count, parts fill their
kernel blocks, views fit their memories, and no byte belongs to two things (`overlap`). The data path checks no more.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from asynckv.arguments import did_you_mean, shown
from asynckv.errors import LayoutError
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_BYTES, MAX_GROUPS, MAX_VIEWS
from asynckv.geometry.layout import TOKEN, Dim, Group, Layout, Memory, Part, TokenShard, View
from asynckv.geometry.overlap import Spot, check_overlap, check_pools, part_bytes, spot

# Layouts come from untrusted peers, and the event loop is blocked while one is decoded, checked and compared. The most
# that real models need: 126 layers with keys, values and a scale of each, every part a view of its own with long names,
# are 504 views and parts with 1,260 dims in 58 KB. The presets of `asynckv models` have at most 80 views, 256 parts and
# 18 KB. Four times as much fits, and takes 17 ms; the worst takes 41 ms (`python -m scripts.bench plan --layouts`).

MAX_LAYOUT_BYTES = 256 * 1024  # checked before decoding, and so bounds its time
MAX_PARTS = 2048  # most parts in all views together
MAX_LAYER_PARTS = 64  # most parts of one layer; the largest known has six
MAX_DIMS = 8192  # most dims in all parts together


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A checked layout, with its memory.

    Attributes:
        layout: The parts that this rank holds, and their places.
        owners: Objects (tensors, buffers) that must live as long as the engine does.
    """

    layout: Layout
    owners: tuple[object, ...] = ()


def register_memory(layout: Layout, owners: tuple[object, ...] = ()) -> Registration:
    """Declare explicit memory ranges.

    Args:
        layout: Addresses, groups, views and parts.
        owners: Objects that must not be freed while the engine lives.

    Raises:
        LayoutError: The layout is inconsistent; names the field, both numbers and the remedy.
    """
    checked = valid_layout(layout)
    if not isinstance(owners, tuple | list):
        raise LayoutError(f"owners is {shown(owners)}; give a tuple of the objects that must not be freed")
    check_layout(checked)
    return Registration(checked, tuple(owners))


_decoder: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def decode_layout(data: bytes | memoryview) -> Layout:
    """Decode the layout of a remote rank, or raise `LayoutError`; call `check_layout` next."""
    _check_length(len(data))
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        said = f"a layout of {len(data)} bytes that cannot be decoded: {exc}"
        if isinstance(exc, msgspec.ValidationError):
            # The bytes after the wrong field may not decode at all.
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
                said = _blamed(exc, msgspec.msgpack.decode(data))
        raise LayoutError(said) from exc


def valid_layout(layout: Layout) -> Layout:
    """Apply the bounds of a decoded layout to one that was made by hand; numpy's integers become Python's."""
    try:
        made = msgspec.convert(msgspec.to_builtins(layout, builtin_types=(bytes,), enc_hook=_builtin), Layout)
        _check_length(len(msgspec.msgpack.encode(made)))
    except msgspec.ValidationError as exc:
        raise LayoutError(_blamed(exc, layout)) from exc
    except UnicodeEncodeError as exc:
        raise LayoutError(f"a name in the layout cannot be encoded: {exc}") from exc
    except (TypeError, OverflowError, RecursionError) as exc:
        raise LayoutError(f"the layout holds a value that cannot be encoded: {exc}") from exc
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
        return {}  # no field takes a mapping, so msgspec refuses it


_NESTED: Mapping[tuple[type[Struct], str], tuple[type[Struct], str, str]] = {
    (Layout, "memories"): (Memory, "memory", ""),
    (Layout, "groups"): (Group, "group", "name"),
    (Layout, "views"): (View, "layer", "layer"),
    (Layout, "token_shards"): (TokenShard, "token shard", ""),
    (View, "parts"): (Part, "part", "name"),
    (Part, "dims"): (Dim, "dim", "name"),
}


def _blamed(exc: msgspec.ValidationError, layout: Any) -> str:
    """Return the name of the wrong field, and its value; msgspec itself gives only places in arrays."""
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
    is_what = f"of {len(value)} entries" if isinstance(value, list | tuple) else f"{value!r:.80}"
    return f"{' '.join(said) or 'the layout'} is {is_what}: {told[:1].lower()}{told[1:200]}"


def _field(value: Any, kind: type[Struct], name: str) -> Any:
    if isinstance(value, Struct):
        return getattr(value, name)
    if isinstance(value, Mapping):
        return value.get(name)
    return _entry(value, kind.__struct_fields__.index(name))


def _entry(value: Any, at: int) -> Any:
    # A peer may send a field twice; msgspec then blames one and keeps the other.
    return value[at] if isinstance(value, list | tuple) and at < len(value) else None


def check_layout(layout: Layout) -> None:
    """Raise `LayoutError` for an inconsistent layout; afterwards all products fit and nothing overlaps."""
    _check_size(layout)
    if layout.tp_rank >= layout.tp_size:
        raise LayoutError(f"tp_rank {layout.tp_rank} is outside its group of tp_size {layout.tp_size}")
    if layout.pp_stage >= layout.pp_size:
        raise LayoutError(f"pp_stage {layout.pp_stage} is outside its group of pp_size {layout.pp_size}")
    for i, memory in enumerate(layout.memories):
        if memory.base + memory.length > 1 << 63:
            raise LayoutError(f"memory {i}: its {memory.length} bytes end beyond the address space")
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
    _check_shards(layout)
    parts = Counter([(view.layer, part.name) for view in layout.views for part in view.parts])
    twice = [f"{layer!r} part {part!r}" for (layer, part), n in parts.items() if n > 1]
    if twice:
        raise LayoutError(f"layer {', '.join(twice[:3])} is listed more than once; every part of a layer has one place")
    for layer, count in Counter([layer for layer, _ in parts]).most_common(1):
        _check_count(f"parts in layer {layer!r}", count, MAX_LAYER_PARTS)
    _check_aliases(layout)
    _check_memories(layout)
    spots = _check_views(layout)
    check_overlap(spots)
    check_pools(layout, spots)


def _check_shards(layout: Layout) -> None:
    shards = layout.token_shards or ()
    if layout.schema != (2 if shards else 1) or layout.token_shards == ():
        raise LayoutError(
            f"the layout has schema {layout.schema} and {len(shards)} token_shards; give schema=2 with any, and else "
            f"schema=1 and no token_shards"
        )
    if len({each.group for each in shards}) < len(shards) or len({each.size for each in shards}) > 1:
        raise LayoutError(
            f"token_shards have (group, size) {[(each.group, each.size) for each in shards][:16]}; give one per "
            f"group at most, all of one size (groups with all tokens have none)"
        )
    for each in shards:
        if each.group >= len(layout.groups):
            raise LayoutError(f"a token shard names group {each.group}, but the layout has {len(layout.groups)} groups")
        group = layout.groups[each.group]
        where, here = f"group {each.group} ({group.name!r}), {each}", group.block_size // each.size
        kernel, turn = here // group.ratio, each.interleave
        if group.kind != "tokens" or group.window:
            what = "states" if group.kind != "tokens" else f"a window of {group.window} tokens"
            raise LayoutError(f"{where}: a group with {what} cannot be shared by token; keep it whole on every rank")
        if each.size == 1 or layout.tp_size % each.size or each.rank != layout.tp_rank % each.size:
            raise LayoutError(
                f"{where}: tp_rank {layout.tp_rank} of {layout.tp_size} cannot have shard {each.rank} of {each.size}; "
                f"the size is 2 or more and divides tp_size, and the rank is tp_rank modulo the size"
            )
        if group.kernel_size % each.size:
            raise LayoutError(
                f"{where}: kernel blocks of {group.kernel_size} tokens on all ranks cannot be shared by {each.size}; "
                f"block_size / ratio counts the tokens of all ranks, so make it a multiple"
            )
        if here % turn or (kernel % turn and turn % kernel):
            raise LayoutError(
                f"{where}: an interleave of {turn} does not fit {here} tokens per block and {kernel} per kernel block "
                f"on each of {each.size} ranks; it must divide the first, and divide or be a multiple of the second "
                f"(block_size counts the tokens of all ranks)"
            )


def _check_size(layout: Layout) -> None:
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
            raise LayoutError(f"layer {alias!r} is an alias of {layer!r}, but has memory of its own; drop one of them")
        if alias in known:
            raise LayoutError(f"layer {alias!r} is declared an alias twice")
        if layer not in layers:
            raise LayoutError(
                f"layer {alias!r} is an alias of {layer!r}, which has no memory on this rank; name the layer that has "
                f"the memory"
            )
        known.add(alias)


def _check_memories(layout: Layout) -> None:
    spots = sorted((m.kind, m.device, m.base, m.base + m.length, i) for i, m in enumerate(layout.memories))
    for (kind, device, lo, end, i), (other, number, start, _, j) in pairwise(spots):
        if (kind, device) == (other, number) and start < end:
            raise LayoutError(
                f"memories {i} and {j} overlap: {i} has {end - lo} bytes, and {j} begins {start - lo} bytes after it "
                f"does; register the whole range once, with views at their offsets"
            )


def _check_views(layout: Layout) -> list[Spot]:
    out = []
    known: dict[tuple[int, Part], int] = {}  # by group and part: the bytes that it spans, once for all layers
    for view in layout.views:
        if view.memory >= len(layout.memories):
            raise LayoutError(
                f"layer {view.layer!r}: memory {view.memory} is not among the {len(layout.memories)} memories"
            )
        if view.group >= len(layout.groups):
            raise LayoutError(f"layer {view.layer!r}: group {view.group} is not among the {len(layout.groups)} groups")
        group, memory = layout.groups[view.group], layout.memories[view.memory]
        blocks = group.num_kernel_blocks
        for part in view.parts:
            if (length := known.get((view.group, part))) is None:
                _check_part(f"layer {view.layer!r}, part {part.name!r}", part, group, layout.shard(view.group))
                length = known[view.group, part] = part_bytes(part)
            found = spot(view, part, blocks, length)
            if found.hi > memory.length:
                raise LayoutError(
                    f"layer {view.layer!r}, part {part.name!r}: {blocks} kernel blocks of stride {view.stride} end at "
                    f"byte {found.hi}, but memory {view.memory} has {memory.length}; declare fewer num_blocks or "
                    f"register more"
                )
            out.append(found)
    return out


def _check_part(where: str, part: Part, group: Group, shard: TokenShard) -> None:
    dims = {d.name: d for d in part.dims}
    if len(dims) != len(part.dims):
        raise LayoutError(f"{where}: two dims have the same name")
    if TOKEN in dims:
        if group.kind == "state":
            raise LayoutError(f"{where}: has a dim {TOKEN!r}, but group {group.name!r} holds states, not tokens")
        if shard.interleave % part.tokens_per_entry and shard.size > 1:
            raise LayoutError(
                f"{where}: its entries of {part.tokens_per_entry} tokens would be cut by {shard}; make the interleave "
                f"a multiple of {part.tokens_per_entry}"
            )
        if dims[TOKEN].size * part.tokens_per_entry * shard.size != group.kernel_size:
            each = f" entries of {part.tokens_per_entry}" if part.tokens_per_entry > 1 else ""
            shared, here = "", dims[TOKEN].size * part.tokens_per_entry
            if shard.size > 1:
                shared = (
                    f" / {shard.size} ranks = {group.kernel_size // shard.size}; block_size counts the tokens of all "
                    f"ranks, so give {here * shard.size * group.ratio}, or tensors that hold less"
                )
            raise LayoutError(
                f"{where}: holds {dims[TOKEN].size}{each} tokens per kernel block, but group {group.name!r} has "
                f"{group.block_size} tokens per block / ratio {group.ratio} = {group.kernel_size}{shared}"
            )
    elif shard.size > 1:
        raise LayoutError(
            f"{where}: has no dim named {TOKEN!r}, so it covers whole kernel blocks and cannot be shared by token "
            f"({shard}); keep its group whole"
        )
    elif part.tokens_per_entry != 1:
        raise LayoutError(
            f"{where}: has {part.tokens_per_entry} tokens per entry, but no dim named {TOKEN!r} to count entries along"
        )
    if part.axis:
        lo, hi = part.held
        if part.axis == TOKEN:
            raise LayoutError(
                f"{where}: axis {TOKEN!r} cannot be sharded, because every rank holds whole blocks of tokens; name the "
                f"dim that tensor parallelism cuts, or none (axis='') if every rank holds the same, and give "
                f"token_shards if ranks share tokens"
            )
        if part.axis not in dims:
            near = did_you_mean(part.axis, dims)
            raise LayoutError(f"{where}: sharded axis {part.axis!r} is not one of its dims {', '.join(dims)}{near}")
        if not lo < hi <= part.extent or dims[part.axis].size != hi - lo:
            raise LayoutError(
                f"{where}: holds [{lo}, {hi}) of {part.extent} along {part.axis!r}, "
                f"but the dim has {dims[part.axis].size} entries"
            )
    if part_bytes(part) > MAX_BYTES:
        raise LayoutError(f"{where}: spans {part_bytes(part)} bytes per block")
    by_stride = sorted([d for d in part.dims if d.size > 1], key=lambda d: d.stride)
    reach = part.itemsize
    for dim in by_stride:
        if dim.stride < reach:
            raise LayoutError(
                f"{where}: dim {dim.name!r} has stride {dim.stride}, less than the {reach} bytes of one entry; "
                f"entries overlap"
            )
        reach = dim.stride * (dim.size - 1) + reach
