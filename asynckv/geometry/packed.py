"""The layout of blocks that are only stored: packed, one record per block, in slots of a range of bytes.

All data of a block of one group (every layer, every part, its kernel blocks one after another) is one **record**, dense
and padded to whole pages. One read or write of a file moves a record, and a checksum covers a record.

    device     layer 0  |b0 |b1 |b2 |b3 |...       a slot of group 0    | layer 0 | layer 1 | ... | pad |
               layer 1  |b0 |b1 |b2 |b3 |...       a slot of group 1    | layer 7 | layer 8 | pad |

Slot `s` of a group begins at `s` times the group's record size. All groups see the same range, and the allocator of
slots keeps those in use apart (`Layout.slotted`). So a range is a layout like any other, and stores and loads are
planned like reads. Records keep the device's order of layers, parts and dims where they can, for few descriptors.

A record's *form* (`record_form`) has one slot per group, and is stored with the bytes. `placed` gives it a range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, structs

from asynckv.arguments import integer
from asynckv.errors import LayoutError
from asynckv.geometry.bounds import MAX_BLOCK_ID, MAX_BYTES, NULL
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import Dim, Layout, Memory, Part, View
from asynckv.geometry.overlap import clusters, part_bytes

ALIGN = 4096  # records are padded to pages, because files are read without the page cache


class RecordSize(NamedTuple):
    num_bytes: int  # bytes of its parts in all kernel blocks; 0 for a group without a layer on this rank
    stride: int  # bytes from slot to slot
    num_slots: int  # slots that the range would have if this group had it alone


def record_form(layout: Layout, *, align: int = ALIGN) -> Layout:
    """Return the form of one stored block of each group: a layout with one slot per group, at address 0.

    Args:
        align: Unit of record sizes, in bytes.
    """
    align = integer("align", align, 1, MAX_BYTES, LayoutError)
    views: list[View] = []
    for index, group in enumerate(layout.groups):
        mine = [view for view in layout.views if view.group == index]
        # Kernel blocks follow each other at one stride, so each is padded, by as little as makes a block a multiple of
        # `align`.
        unit = align // math.gcd(align, group.ratio)
        size = sum(_payload(part) for view in mine for part in view.parts)
        views += _pack(mine, -(-size // unit) * unit)
    groups = tuple(structs.replace(group, num_blocks=1, null_block=NULL) for group in layout.groups)
    length = max(view.stride * groups[view.group].ratio for view in views)
    return structs.replace(
        layout,
        memories=(Memory(0, length),),
        groups=groups,
        views=tuple(views),
        slotted=True if len({view.group for view in views}) > 1 else UNSET,
    )


def placed(form: Layout, base: int, capacity: int) -> Layout:
    """Place a form, or a packed layout, in a range of memory, with as many slots of each group as it holds."""
    capacity = integer("capacity", capacity, 1, MAX_BYTES, LayoutError)
    strides = [record.stride for record in record_sizes(form)]
    for view in form.views:
        reach = view.offset + max(part.offset + part_bytes(part) for part in view.parts)
        if view.memory or view.stride * form.groups[view.group].ratio != strides[view.group] or reach > view.stride:
            raise LayoutError(
                f"layer {view.layer!r} lies in memory {view.memory} with stride {view.stride} up to byte {reach}: that "
                f"is not a record of group {form.groups[view.group].name!r}; make the form with record_form"
            )
    if capacity < max(strides):
        index = strides.index(max(strides))
        raise LayoutError(
            f"{capacity} bytes have no room for one block of group {form.groups[index].name!r}, which takes "
            f"{strides[index]}; give {sum(strides)} or more, so that each group may have one"
        )
    # A group without a layer here takes no bytes. It gets the most slots of any, as other ranks may have its layers.
    slots = [
        min(capacity // stride, MAX_BLOCK_ID // group.ratio) if stride else 0
        for stride, group in zip(strides, form.groups, strict=True)
    ]
    groups = tuple(
        structs.replace(group, num_blocks=count or min(max(slots), MAX_BLOCK_ID // group.ratio))
        for group, count in zip(form.groups, slots, strict=True)
    )
    made = structs.replace(form, memories=(Memory(base, capacity),), groups=groups)
    check_layout(made)
    return made


def record_sizes(layout: Layout) -> tuple[RecordSize, ...]:
    """Return, per group of a packed layout or a form, the size of its records and the number of slots."""
    size, stride = [0] * len(layout.groups), [0] * len(layout.groups)
    for view in layout.views:
        ratio = layout.groups[view.group].ratio
        size[view.group] += ratio * sum(_payload(part) for part in view.parts)
        stride[view.group] = ratio * view.stride
    return tuple(map(RecordSize, size, stride, [group.num_blocks for group in layout.groups]))


def _payload(part: Part) -> int:
    return part.itemsize * math.prod(dim.size for dim in part.dims)


def _pack(views: Sequence[View], stride: int) -> list[View]:
    """Put the parts of one group's kernel block one behind the other, and the views in the order of their addresses."""
    # Memories are ordered by their first layer, because a memory's number says nothing about its blocks.
    memories = {memory: at for at, memory in enumerate(dict.fromkeys(view.memory for view in views))}
    # Parts that follow each other on the device, in one memory and with one stride, can be one row of a table.
    places = sorted(
        (memories[view.memory], view.stride, view.offset + part.offset, number, at)
        for number, view in enumerate(views)
        for at, part in enumerate(view.parts)
    )
    moved: dict[tuple[int, int], Part] = {}
    end = 0
    for _, same_base in itertools.groupby(places, key=lambda place: place[:2]):
        here = [(lo, views[number].parts[at], (number, at)) for _, _, lo, number, at in same_base]
        for meshed in clusters([(lo, lo + part_bytes(part), part, key) for lo, part, key in here]):
            lo = meshed[0][0]
            reach = max(hi for _, hi, _, _ in meshed) - lo
            if sum(_payload(part) for _, _, part, _ in meshed) == reach:
                for at, _, part, key in meshed:
                    moved[key] = structs.replace(part, offset=end + at - lo)
                end += reach
                continue
            for _, _, part, key in meshed:
                moved[key] = structs.replace(part, offset=end, dims=_dense(part))
                end += _payload(part)
    out = []
    for number, view in sorted(enumerate(views), key=lambda each: (memories[each[1].memory], each[1].offset)):
        parts = [moved[number, at] for at in range(len(view.parts))]
        offset = min(part.offset for part in parts)
        parts = [structs.replace(part, offset=part.offset - offset) for part in parts]
        out.append(structs.replace(view, memory=0, offset=offset, stride=stride, parts=tuple(parts)))
    return out


def _dense(part: Part) -> tuple[Dim, ...]:
    """Return the dims of a part without gaps between elements, in the order of its strides."""
    steps, step = {}, part.itemsize
    for dim in sorted(part.dims, key=lambda dim: (dim.stride, dim.size)):
        steps[dim.name] = step
        step *= dim.size
    return tuple(structs.replace(dim, stride=steps[dim.name]) for dim in part.dims)
