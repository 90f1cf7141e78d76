"""Where blocks are kept: records that hold what blocks hold, slots that fit, and what is read out of them."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.errors import LayoutError
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.layout import Layout, fingerprint
from asynckv.geometry.match import assign, compare
from asynckv.geometry.overlap import pools
from asynckv.geometry.packed import packed, placed, record_form, record_sizes
from asynckv.geometry.plan import PeerTables
from tests.oracle import Engine, GroupSpec, LayerSpec, PartSpec, Rank
from tests.test_geometry import attention, engine, engines, latent, mamba2, models


def rows(device: Layout, kept: Layout) -> list[int]:
    """Descriptors per kernel block of each group that is stored."""
    [shares] = assign(kept, [device])
    return [table.num_rows for table in PeerTables(kept, device, shares, iter(range(99))).regular]


HYBRID = engine((attention(12), mamba2(), latent()), sizes=[(16, 2), 8, 4], style="pages", num_blocks=48)


def test_a_record_is_what_a_block_consists_of_padded_to_whole_pages() -> None:
    layout = Rank(HYBRID, 0).layout
    form = record_form(layout)
    # 12 heads x 2 x 16 tokens of 2 bytes, keys and values; a convolution's x, b and c and the state; a latent.
    state = 4 * 2 * 3 * 2 + 2 * (1 * 2 * 3 * 2) + 4 * 2 * 2 * 4
    assert [tuple(r) for r in record_sizes(form)] == [(1536, 4096, 1), (state, 4096, 1), (4 * 5 * 2, 4096, 1)]
    kept = placed(form, 1 << 30, 40_000)
    assert [r.num_slots for r in record_sizes(kept)] == [9, 9, 9]
    assert (kept.memories[0].base, kept.memories[0].length) == (1 << 30, 40_000)
    assert compare(kept, layout) == compare(layout, kept) == ()
    assert [v.stride for v in record_form(layout, align=1).views] == [768] * 1 + [state, 40]


def test_slots_of_several_groups_share_a_range_and_no_pages() -> None:
    layout = Rank(engine((attention(12, dim=64), latent())), 0).layout
    kept = packed(layout, 1 << 20, base=1 << 30)
    assert [r.stride for r in record_sizes(kept)] == [12288, 4096]
    assert pools(kept) == (0, 1)
    with pytest.raises(LayoutError, match=r"groups 0 and 1 overlap .* pages of 12288 and 4096 bytes"):
        check_layout(msgspec.structs.replace(kept, slotted=msgspec.UNSET))
    # It crosses the wire as it is, and layouts that share no range are encoded as they always were.
    assert decode_layout(msgspec.msgpack.encode(kept)) == kept
    assert b"slotted" not in msgspec.msgpack.encode(layout)


def test_a_form_does_not_say_where_nor_how_many() -> None:
    small, large = (
        Rank(engine((attention(),), num_blocks=n), 0, base=b).layout for n, b in ((9, 1 << 40), (77, 1 << 41))
    )
    assert fingerprint(record_form(small)) == fingerprint(record_form(large))
    assert fingerprint(record_form(packed(small, 1 << 20))) == fingerprint(record_form(large))
    other = Rank(engine((attention(),), sizes=8), 0).layout
    assert fingerprint(record_form(small)) != fingerprint(record_form(other))


def test_how_many_blocks_there_are_is_as_declared_and_no_matter_to_what_keeps_them() -> None:
    layout = Rank(HYBRID, 0).layout
    fewer = msgspec.structs.replace(
        layout, groups=tuple(msgspec.structs.replace(g, num_blocks=3, null_block=0) for g in layout.groups)
    )
    assert packed(fewer, 1 << 20) == packed(layout, 1 << 20)


@pytest.mark.parametrize("style", ["layers", "split", "cross", "pages"])
def test_what_is_adjacent_stays_adjacent(style: str) -> None:
    layers = tuple(attention(4, f"l{i}") for i in range(6))
    orders = dict.fromkeys("kv", ("token", "head", "dim"))
    device = Rank(Engine(layers, (GroupSpec(tuple(range(6)), 16),), orders=orders, style=style), 0).layout
    assert rows(device, packed(device, 1 << 20)) == [{"layers": 6, "split": 12, "cross": 1, "pages": 1}[style]]


def test_keys_and_values_that_alternate_are_kept_as_they_are() -> None:
    made = Rank(engine((attention(4),), orders=dict.fromkeys("kv", ("token", "head", "dim"))), 0).layout
    [view] = made.views
    size = 4 * 2 * 2

    def alternate(gap: int) -> Layout:
        step = 2 * size + gap
        parts = tuple(
            msgspec.structs.replace(
                part,
                offset=i * size,
                dims=tuple(msgspec.structs.replace(d, stride=step) if d.name == "token" else d for d in part.dims),
            )
            for i, part in enumerate(view.parts)
        )
        wider = (msgspec.structs.replace(made.memories[0], length=1 << 20),)
        layout = msgspec.structs.replace(
            made, views=(msgspec.structs.replace(view, stride=4 * step, parts=parts),), memories=wider
        )
        check_layout(layout)
        return layout

    for gap, expected in ((0, 1), (2, 8)):
        device = alternate(gap)
        kept = packed(device, 1 << 20)
        assert record_sizes(kept)[0].num_bytes == 4 * 2 * size
        assert rows(device, kept) == [expected]


def test_a_group_without_a_layer_here_takes_nothing() -> None:
    layers = tuple(attention(4, f"l{i}") for i in range(4))
    stages = Engine(layers, (GroupSpec((0, 1), 4), GroupSpec((2, 3), 8)), pp_size=2)
    kept = packed(Rank(stages, 0, 1).layout, 1 << 16)
    assert [tuple(r) for r in record_sizes(kept)] == [(0, 0, 16), (2 * 2 * 4 * 8 * 2 * 2, 4096, 16)]


def test_ranks_of_different_sizes_may_have_the_same_slots() -> None:
    def half(extent: int, rank: int, size: int) -> tuple[int, int]:
        return [(0, 5), (5, 6)][rank]

    uneven = (LayerSpec("a", (PartSpec("kv", (("head", 6), ("dim", 256)), "head", held=half),)),)
    forms = [record_form(Rank(engine(uneven, 2), r).layout) for r in range(2)]
    most = [max(r.stride for r in each) for each in zip(*map(record_sizes, forms), strict=True)]
    assert [record_sizes(f)[0].stride for f in forms] == [12288, 4096]
    kept = [packed(Rank(engine(uneven, 2), r).layout, 1 << 20, strides=most) for r in range(2)]
    assert [record_sizes(k)[0].num_slots for k in kept] == [85, 85]
    for wrong, message in (
        ([4096], "strides.0. is 4096, but a record of group 'g0' takes 12288 bytes; give a multiple of 4096"),
        ([12289], "give a multiple of 4096"),
        ([1, 2], "2 strides are given for 1 groups"),
    ):
        with pytest.raises(LayoutError, match=message):
            record_form(Rank(engine(uneven, 2), 0).layout, strides=wrong)


def test_a_range_without_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(LayoutError, match=r"4095 bytes have not room for one block of group 'g0', .* 4096; give 12288"):
        packed(Rank(HYBRID, 0).layout, 4095)
    with pytest.raises(LayoutError, match="capacity is 0"):
        packed(Rank(HYBRID, 0).layout, 0)
    with pytest.raises(LayoutError, match="align is 'x'"):
        packed(Rank(HYBRID, 0).layout, 1 << 20, align="x")  # type: ignore[arg-type]


def test_a_form_that_was_tampered_with_is_refused() -> None:
    form = record_form(Rank(HYBRID, 0).layout)
    [first, *others] = form.views
    for wrong, message in (
        ({"stride": 8}, "stride 8 up to byte 768: that is no record of group 'g0'"),
        ({"offset": 4000}, "up to byte 4768"),
        ({"memory": 1}, "lies in memory 1"),
        ({"parts": first.parts * 2}, "listed more than once"),
    ):
        views = (msgspec.structs.replace(first, **wrong), *others)
        with pytest.raises(LayoutError, match=message):
            placed(msgspec.structs.replace(form, views=views), 0, 1 << 20)
    two = record_form(Rank(Engine((attention(name="a"), attention(name="b")), (GroupSpec((0, 1), 4),)), 0).layout)
    slower = msgspec.structs.replace(two.views[0], stride=8192)
    with pytest.raises(LayoutError, match=r"stride 8192 .* is no record of group 'g0'"):
        placed(msgspec.structs.replace(two, views=(slower, two.views[1])), 0, 1 << 20)


@given(data=st.data())
@settings(max_examples=100)
def test_every_layout_has_a_form(data: st.DataObject) -> None:
    layers = data.draw(models())
    each = data.draw(engines(layers, data.draw(st.integers(0, 30)), stages=True))
    align = data.draw(st.sampled_from([1, 64, 4096]))
    for stage in range(each.pp_size):
        layout = Rank(each, each.tp_size - 1, stage).layout
        if not layout.views:
            continue
        form = record_form(layout, align=align)
        check_layout(form)
        assert record_form(form, align=align) == form
        size: dict[int, int] = {}
        for view in layout.views:
            bytes_ = sum(p.itemsize * math.prod(d.size for d in p.dims) for p in view.parts)
            size[view.group] = size.get(view.group, 0) + bytes_ * layout.groups[view.group].ratio
        for group, record in enumerate(record_sizes(form)):
            assert record.num_bytes == size.get(group, 0)
            assert record.stride % align == 0
            assert record.num_bytes <= record.stride < record.num_bytes + align * layout.groups[group].ratio
        assert compare(layout, form) == compare(form, layout) == ()
