"""Layouts that do not hold together are refused with the field, the numbers and the remedy."""

from __future__ import annotations

import enum
import json
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry import blocks, check, overlap
from asynckv.geometry.blocks import runs_of
from asynckv.geometry.bounds import MAX_VIEWS, NULL
from asynckv.geometry.check import MAX_DIMS, MAX_LAYOUT_BYTES, check_layout, decode_layout, register_memory
from asynckv.geometry.layout import Dim, Group, Layout, Memory, Part, View, attention_view, dense_part, shard
from asynckv.geometry.match import assign, owed_readers, remote_ranks
from asynckv.geometry.overlap import pools
from asynckv.geometry.strides import strided_descriptors
from asynckv.tools.plan.layout_file import Role, dump_layouts, load_layouts
from asynckv.tools.plan.layouts import ORDERS, model_layout
from asynckv.tools.plan.models import PRESETS, Heads, Model, preset

change = msgspec.structs.replace


def part(**fields: Any) -> Part:
    given: dict[str, Any] = {
        "name": "k",
        "dtype": "float16",
        "itemsize": 2,
        "offset": 0,
        "dims": (Dim("token", 4, 16), Dim("head", 2, 8), Dim("dim", 4, 2)),
        "axis": "head",
        "held": (0, 2),
        "extent": 2,
    }
    return Part(**{**given, **fields})


def layout(*parts: Part, stride: int = 64, length: int = 640, **fields: Any) -> Layout:
    views = (View(0, 0, "l", 0, stride, parts or (part(),)),)
    given: dict[str, Any] = {
        "memories": (Memory(1 << 30, length),),
        "groups": (Group("attention", 4, 10),),
        "views": views,
    }
    return Layout(**{**given, **fields})


def test_memories_that_overlap_are_refused() -> None:
    one = layout()
    twice = change(one, memories=(Memory(1 << 30, 640), Memory((1 << 30) + 32, 640)))
    with pytest.raises(LayoutError, match="memories 0 and 1 overlap"):
        check_layout(twice)
    check_layout(change(one, memories=(Memory(1 << 30, 640), Memory((1 << 30) + 640, 640))))
    check_layout(change(one, memories=(Memory(1 << 30, 640), Memory(1 << 30, 640, "cuda"))))
    check_layout(change(one, memories=(Memory(1 << 30, 640, "cuda", 0), Memory(1 << 30, 640, "cuda", 1))))


def test_keys_of_all_blocks_then_values_may_be_one_part() -> None:
    dims = (Dim("kv", 2, 640), Dim("token", 4, 16), Dim("head", 2, 8), Dim("dim", 4, 2))
    check_layout(layout(part(dims=dims), length=1280))
    with pytest.raises(LayoutError, match="overlap"):
        check_layout(layout(part(dims=(Dim("kv", 2, 639), *dims[1:])), length=1280))


def test_groups_that_see_the_same_pages_share_a_pool() -> None:
    def two(stride: int, offset: int = 0, ratio: int = 1) -> Layout:
        groups = (Group("a", 4, 10), Group("b", 4, 10), Group("c", 4 * ratio, 10 // ratio, ratio))
        other = View(0, 2, "m", offset, stride, (part(),))
        apart = View(1, 1, "n", 0, 64, (part(),))
        memories = (Memory(1 << 30, 1280 + 640), Memory(1 << 31, 640))
        return layout(memories=memories, groups=groups, views=(View(0, 0, "l", 0, 64, (part(),)), apart, other))

    assert pools(two(64)) == (0, 1, 0)
    assert pools(two(64, 640)) == (0, 1, 2)
    with pytest.raises(LayoutError, match="groups 0 and 2 overlap in memory 0 with pages of 64 and 128 bytes"):
        check_layout(two(128))
    with pytest.raises(LayoutError, match="pages of 64 and 128 bytes"):
        check_layout(two(64, ratio=2))


@pytest.mark.timeout(10)
def test_a_hostile_number_of_interleaved_parts_is_checked_in_time() -> None:
    n = MAX_VIEWS
    views = tuple(View(0, 0, f"l{i}", i, n, (Part("k", "int8", 1, 0, (Dim("token", 1, 1),)),)) for i in range(n))
    check_layout(layout(memories=(Memory(1 << 30, 10 * n),), groups=(Group("g", 1, 10),), views=views))


def test_a_plain_layout_is_fine() -> None:
    check_layout(layout())
    check_layout(layout(part(), part(name="v", offset=640), length=1280))  # keys, then values
    check_layout(layout(part(), part(name="v", offset=64), stride=128, length=1280))  # in one block


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (layout(length=639), "end at byte 640, but memory 0 has 639"),
        (layout(stride=63), "contiguous bytes, more than the stride 63|overlap"),
        (layout(part(), part(name="v", offset=32), length=999), "overlap"),
        (layout(part(), part()), "'l' part 'k' is listed more than once"),
        (layout(part(dims=(Dim("head", 2, 8), Dim("dim", 4, 2)), tokens_per_entry=4)), "no dim named 'token'"),
        (layout(part(dims=(Dim("token", 5, 16), Dim("head", 2, 8), Dim("dim", 4, 2)))), "holds 5 tokens"),
        (layout(part(held=(0, 3))), r"holds \[0, 3\) of 2"),
        (layout(part(axis="none")), "axis 'none' is not one of its dims"),
        (layout(part(dims=(Dim("token", 4, 16), Dim("head", 2, 6), Dim("dim", 4, 2)))), "entries overlap"),
        (layout(views=(View(1, 0, "l", 0, 64, (part(),)),)), "memory 1 is not among"),
        (layout(views=(View(0, 1, "l", 0, 64, (part(),)),)), "group 1 is not among"),
        (layout(views=(View(0, 0, "l", 0, 64, (part(),)),) * 2), "'l' part 'k' is listed more than once"),
        (layout(groups=(Group("attention", 4, 10, 3),)), "block_size 4 is not a multiple of its ratio of 3"),
        (layout(tp_rank=2, tp_size=2), "tp_rank 2 is outside"),
        (layout(groups=(Group("attention", 4, 1 << 29, 4),)), "536870912 blocks x 4 do not fit int32"),
        (layout(part(dims=(Dim("token", 4, 1 << 55), *part().dims[1:]))), "spans 108086391056891920 bytes per block"),
        (layout(memories=(Memory((1 << 63) - 1, 640),)), "address space"),
        (
            layout(
                views=(View(0, 0, "a", 0, 64, (part(),)), View(0, 0, "b", 32, 64, (part(),))),
                memories=(Memory(0, 999),),
            ),
            "overlap",
        ),
        (
            # The last bytes of each block of b are the first ones of a's next block.
            layout(
                views=(
                    View(0, 0, "a", 0, 64, (part(dims=(Dim("token", 4, 4), Dim("dim", 2, 2)), axis=""),)),
                    View(0, 0, "b", 50, 64, (part(dims=(Dim("token", 4, 4), Dim("dim", 2, 2)), axis=""),)),
                ),
                memories=(Memory(0, 999),),
            ),
            "'b' part 'k' and layer 'a' part 'k' overlap",
        ),
    ],
)
def test_what_does_not_hold_together_is_refused(broken: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(broken)


def test_a_hostile_layout_is_refused_before_it_costs_anything() -> None:
    dims = (Dim("token", 4, 1 << 40), *(Dim(f"d{i}", 1 << 10, (1 << 36) >> (11 * i)) for i in range(3)))
    view = View(0, 0, "l", 0, 1 << 50, (part(dims=dims, axis=""),))
    with pytest.raises(LayoutError):
        check_layout(layout(views=(view,), memories=(Memory(0, 1 << 56),)))


@pytest.mark.parametrize("names", ["block kv token head", "block kv token head dim x"])
def test_orders_must_be_whole(names: str) -> None:
    sizes = {"kv": 2, "block": 2, "token": 2, "head": 2, "dim": 2, "x": 2}
    with pytest.raises(LayoutError, match="permutation"):
        attention_view(layer="l", order=tuple(names.split()), sizes=sizes, dtype="float16", heads=(0, 2), num_heads=2)


def test_heads_are_shared_contiguously() -> None:
    assert [shard(8, r, 4) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [shard(2, r, 4) for r in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    with pytest.raises(LayoutError, match="12 entries cannot be cut evenly over tp_size 5"):
        shard(12, 0, 5)


@given(st.integers(1, 24), st.integers(1, 24))
def test_both_sides_agree_on_who_answers_for_whom(prefill: int, decode: int) -> None:
    answers = {(d, p) for d in range(decode) for p in remote_ranks(d, decode, prefill)}
    owed = {(d, p) for p in range(prefill) for d in owed_readers(p, prefill, decode)}
    overlap = {
        (d, p)
        for d in range(decode)
        for p in range(prefill)
        if d * prefill < (p + 1) * decode and p * decode < (d + 1) * prefill
    }
    assert answers == owed == overlap
    assert {p for _, p in answers} == set(range(prefill))


def test_runs() -> None:
    assert runs_of([]) == ()
    assert runs_of([7, 8, 9, 3, 5, 6]) == ((7, 3), (3, 1), (5, 2))


class Counted(enum.IntEnum):
    THREE = 3


ODD = [None, True, -1, 1.0, 1.5, math.nan, "1", b"1", [1], 2**31, 2**80, np.int64(7), np.float64(7), np.bool_(True)]


@given(
    st.lists(st.integers(0, 9) | st.sampled_from([2**31 - 1, Counted.THREE]), min_size=1, max_size=200),
    st.dictionaries(st.integers(0, 199), st.sampled_from([*ODD, None, None]), max_size=3),
    st.sampled_from([-1, 0, 3]),
    st.sampled_from([list, tuple]),
)
def test_plain_ids_are_taken_and_refused_as_any_others_are(
    ids: list[Any], odd: dict[int, Any], null_block: int, kind: type[Any]
) -> None:
    given_ids = kind(odd.get(i, block) for i, block in enumerate(ids))
    found = runs_or_refusal(given_ids, null_block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_plain_ids", lambda _: None)
        patch.setattr(blocks, "_few_runs", lambda *_: None)
        assert runs_or_refusal(given_ids, null_block) == found
    if isinstance(found, tuple):
        assert all(type(n) is int for run in found for n in run)
        wanted = [NULL if b in (None, null_block) else int(b) for b in given_ids]
        assert [first if first == NULL else first + i for first, n in found for i in range(n)] == wanted
        joined = [NULL if a == NULL else a + n for a, n in found]
        assert not any(end == first for end, (first, _) in zip(joined, found[1:], strict=False))


def runs_or_refusal(ids: Any, null_block: int) -> tuple[tuple[int, int], ...] | str:
    try:
        return runs_of(ids, null_block)
    except LayoutError as exc:
        return str(exc)


@given(st.lists(st.integers(0, 200), max_size=200), st.sampled_from([-1, 0, 3]), st.sampled_from([np.int32, np.uint64]))
def test_arrays_are_written_as_the_same_runs_as_lists(ids: list[int], null_block: int, dtype: Any) -> None:
    assert runs_of(np.array(ids, dtype), null_block) == runs_of(ids, null_block)


@pytest.mark.parametrize("ids", [[True], [-1], ["a"], [1.0], [2**40], [[1]], "ab", 7])
def test_runs_of_what_are_no_block_ids_are_refused(ids: Any) -> None:
    with pytest.raises(LayoutError):
        runs_of(ids, 1)


# -- what a stranger's layout may cost ---------------------------------------------------------------------


class Untouchable(tuple[Any, ...]):
    """Views that say how many they are, and nothing else."""

    def __iter__(self) -> Any:
        raise AssertionError("a view was looked at")

    __getitem__ = __iter__  # type: ignore[assignment]


def views(count: int, parts: int = 1, dims: int = 1) -> tuple[View, ...]:
    more = tuple(Dim(f"d{i}", 1, 1) for i in range(dims - 1))
    made = tuple(Part(f"p{i}", "int8", 1, 64 * i, (Dim("token", 4, 16), *more)) for i in range(parts))
    return tuple(View(0, 0, f"l{i}", 0, 4096, made) for i in range(count))


def test_a_layout_that_is_too_long_is_refused_before_any_byte_is_read() -> None:
    class Length(bytes):
        def __len__(self) -> int:
            return 3 << 20

    with pytest.raises(LayoutError, match=r"the layout is 3145728 bytes long, and at most 262144 are taken; declare"):
        decode_layout(Length(b"this is no layout"))


def test_too_many_views_are_refused_before_any_is_looked_at() -> None:
    with pytest.raises(LayoutError, match="the layout has 64000 views, and at most 2048 are taken"):
        check_layout(layout(views=Untouchable(range(64_000))))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (layout(views=views(2049)), "2049 views, and at most 2048"),
        (layout(views=views(400, 8)), "3200 parts in all views together, and at most 2048"),
        (layout(views=views(1025, 1, 8)), "8200 dims in all parts together, and at most 8192"),
        (layout(memories=(Memory(0, 1),) * 2049), "2049 memories, and at most 2048"),
        (layout(aliases=(("a", "l"),) * 2049), "2049 aliases, and at most 2048"),
        (
            layout(views=tuple(change(v, layer="l", parts=(change(v.parts[0], name=v.layer),)) for v in views(65))),
            "65 parts in layer 'l', and at most 64",
        ),
        (layout(groups=(Group("g", 4, 10),) * 65), "65 groups, and at most 64"),
    ],
)
def test_what_no_model_needs_is_refused_with_the_numbers(
    broken: Layout, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    for name in ("_check_views", "_check_part", "_check_memories", "check_overlap", "check_pools"):
        monkeypatch.setattr(check, name, lambda *_, name=name: looked_at.append(name))
    with pytest.raises(LayoutError, match=message):
        check_layout(broken)
    assert looked_at == []


def test_the_largest_models_take_a_quarter_of_what_is_allowed() -> None:
    def scale(name: str, at: int) -> Part:
        return dense_part(name, "float32", [("token", 16), ("head", 8)], offset=at, axis="head", held=(0, 8), extent=8)

    model = Model("m", (Heads(8, 128),) * 126, "float8_e4m3fn")
    made = model_layout(model, num_blocks=1000, order="block-hnd")
    size = made.views[0].stride
    fp8 = [
        change(v, stride=size + 1024, parts=(p,))
        for v in made.views
        for p in (*v.parts, scale("k_scale", size), scale("v_scale", size + 512))
    ]
    memories = [Memory(i << 40, (size + 1024) * 1000) for i in range(126)]
    largest = [change(made, views=tuple(fp8), memories=tuple(memories))]
    largest += [model_layout(preset(name), num_blocks=1000, order=order) for name in PRESETS for order in ORDERS]
    for each in largest:
        check_layout(each)
        assert 4 * len(msgspec.msgpack.encode(each)) <= MAX_LAYOUT_BYTES
        assert 4 * max(len(each.views), len(each.memories), sum(len(v.parts) for v in each.views)) <= MAX_VIEWS
        assert 4 * sum(len(p.dims) for v in each.views for p in v.parts) <= MAX_DIMS


def pieces_compared(each: Layout, monkeypatch: pytest.MonkeyPatch) -> int:
    made: list[int] = []

    def counting(*args: Any) -> Any:
        pieces = strided_descriptors(*args)
        made.append(len(pieces[0]))
        return pieces

    monkeypatch.setattr(overlap, "strided_descriptors", counting)
    check_layout(each)
    return sum(made)


@pytest.mark.parametrize("order", ORDERS)
def test_no_piece_of_a_real_model_is_compared(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRESETS:
        assert pieces_compared(model_layout(preset(name), num_blocks=1000, order=order), monkeypatch) == 0


def test_entries_of_all_layers_side_by_side_are_compared_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of every token all layers' keys, values and scales in turn, as in tensors (block, token, layer, ...).
    row, each = 126 * 656, []
    for i in range(126):
        dims = Dim("token", 64, row)
        parts = [
            Part(n, "int8", 1, at, (dims, Dim("dim", w, 1)))
            for n, at, w in (("k", 0, 512), ("s", 512, 16), ("r", 528, 128))
        ]
        each.append(View(0, 0, f"l{i}", i * 656, 64 * row, tuple(parts)))
    made = layout(views=tuple(each), groups=(Group("g", 64, 100),), memories=(Memory(0, 6400 * row),))
    assert pieces_compared(made, monkeypatch) == 0
    wide = change(each[3], offset=each[3].offset + 1)
    with pytest.raises(LayoutError, match=r"'l3' part 'r' and layer 'l4' part 'k' overlap"):
        check_layout(change(made, views=(*each[:3], wide, *each[4:])))


def test_pieces_that_have_to_be_compared_are_few_or_refused() -> None:
    def comb(i: int) -> View:
        dims = (Dim("token", 1, 1), Dim("a", 4 + i % 2, 1 << 20), Dim("b", 6 + i % 3, 1 << 24))
        return View(0, 0, f"l{i}", 2 * i, 1 << 40, (Part("k", "int8", 1, 0, dims),))

    groups, memories = (Group("g", 1, 4),), (Memory(0, 1 << 50),)
    check_layout(layout(views=tuple(comb(i) for i in range(400)), groups=groups, memories=memories))
    with pytest.raises(LayoutError, match="'l0' part 'k' and 2047 others interleave in more than 16384 pieces"):
        check_layout(layout(views=tuple(comb(i) for i in range(2048)), groups=groups, memories=memories))


def test_many_groups_in_one_memory_are_swept_once() -> None:
    each = Part("k", "int8", 1, 0, (Dim("token", 1, 1), Dim("dim", 64, 1)))
    made = tuple(View(0, i % 64, f"l{i}", i // 64 * 64, 1 << 20, (each,)) for i in range(MAX_VIEWS))
    groups = tuple(Group(f"g{i}", 1, 4) for i in range(64))
    one = layout(views=made, groups=groups, memories=(Memory(0, 1 << 30),))
    check_layout(one)
    assert pools(one) == (0,) * 64
    other = [change(view, stride=1 << 21) if view.group == 63 else view for view in made]
    with pytest.raises(LayoutError, match=r"groups \d+ and \d+ overlap in memory 0 with pages of"):
        check_layout(change(one, views=tuple(other)))


@st.composite
def small_layouts(draw: st.DrawFn) -> Layout:
    """Anything: nested, interleaved, folded by the block stride, and mostly overlapping."""
    made = []
    for i in range(draw(st.integers(1, 3))):
        dims = [Dim("token", 1, 1)]
        reach = 1
        for name in "ab"[: draw(st.integers(0, 2))]:
            size, stride = draw(st.integers(1, 3)), reach + draw(st.integers(0, 6))
            dims.append(Dim(name, size, stride))
            reach += stride * (size - 1)
        made.append(
            View(0, draw(st.integers(0, 1)), f"l{i}", draw(st.integers(0, 30)), draw(st.sampled_from([3, 8, 16])),
                 (Part("k", "int8", 1, 0, tuple(dims)),))
        )  # fmt: skip
    groups = tuple(Group(f"g{i}", 1, draw(st.integers(1, 4))) for i in range(2))
    return layout(views=tuple(made), groups=groups, memories=(Memory(0, 500),))


def bytes_of(made: Layout, view: View) -> list[int]:
    at = [view.offset + b * view.stride for b in range(made.groups[view.group].num_kernel_blocks)]
    for dim in view.parts[0].dims:
        at = [a + i * dim.stride for a in at for i in range(dim.size)]
    return at


@given(small_layouts())
@settings(max_examples=600)
def test_what_passes_has_no_byte_twice_in_a_group(made: Layout) -> None:
    owned = [[a for v in made.views if v.group == g for a in bytes_of(made, v)] for g in range(2)]
    twice = any(len(set(each)) < len(each) for each in owned)
    try:
        check_layout(made)
    except LayoutError:
        return
    assert not twice
    spans = [(min(x), max(x) + 1, v) for v in made.views for x in [bytes_of(made, v)]]
    for lo, hi, one in spans:
        for start, end, two in spans:
            if one.group != two.group and lo < end and start < hi:
                assert one.stride == two.stride
                assert len(set(pools(made))) == 1


# -- every refusal names its field -------------------------------------------------------------------------

WHOLE = layout(model="m", aliases=(("twin", "l"),))
NAMES = {
    Layout: "",
    Memory: "memory 0",
    Group: "group 'attention'",
    View: "layer 'l'",
    Part: "part 'k'",
    Dim: "dim 'token'",
}
PLACES: list[tuple[type[msgspec.Struct], tuple[Any, ...]]] = [
    (Layout, ()),
    (Memory, ("memories", 0)),
    (Group, ("groups", 0)),
    (View, ("views", 0)),
    (Part, ("views", 0, "parts", 0)),
    (Dim, ("views", 0, "parts", 0, "dims", 0)),
]
FIELDS = [(kind, place, name) for kind, place in PLACES for name in kind.__struct_fields__]


def with_value(node: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A structure in which what is at a place is something else."""
    if not place:
        return value
    key, *rest = place
    if isinstance(key, int):
        return (*node[:key], with_value(node[key], tuple(rest), value), *node[key + 1 :])
    return change(node, **{key: with_value(getattr(node, key), tuple(rest), value)})


@pytest.mark.parametrize("value", [-7, 1 << 62, 2.5, b"raw", None, True, "x" * 600, {}])
@pytest.mark.parametrize(("kind", "place", "name"), FIELDS, ids=lambda x: str(x).rpartition(".")[2])
def test_an_impossible_value_is_named_with_its_field(kind: Any, place: Any, name: str, value: Any) -> None:
    broken = with_value(WHOLE, (*place, name), value)
    said = set()
    for refuse in (register_memory, lambda x: check_layout(decode_layout(msgspec.msgpack.encode(x)))):
        try:
            refuse(broken)
        except LayoutError as exc:
            said.add(str(exc))
    if not said:
        # 600 letters are a dtype or a kind to nobody, but a base of 2**62 is an address, and True is what a flag says.
        assert (name, value) in {("base", 1 << 62), ("slotted", True)}
    for text in said:
        assert name in text
        if "expected" in text or "invalid" in text:
            assert NAMES[kind] in text or name in ("name", "layer")
            assert f"{value!r:.80}" in text
            assert "[" not in text.partition(" is ")[0] or name in ("name", "layer")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("groups", 0, "num_blocks"), 0, "group 'attention' num_blocks is 0: expected `int` >= 1"),
        (
            ("views", 0, "parts", 0, "dims", 0, "stride"),
            0,
            "layer 'l' part 'k' dim 'token' stride is 0: expected `int` >= 1",
        ),
        (("views", 0, "parts", 0, "held"), (0, -1), r"layer 'l' part 'k' held\[1\] is -1: expected `int` >= 0"),
        (("memories", 0, "kind"), "tpu", "memory 0 kind is 'tpu': invalid enum value 'tpu'"),
        (("views",), (), "views is of 0 entries: expected `array` of length >= 1"),
        (("aliases",), (("a", 3),), r"aliases\[0\]\[1\] is 3: expected `str`, got `int`"),
        (("views", 0, "layer"), "\ud800", "a name in the layout cannot be encoded"),
    ],
)
def test_a_field_out_of_its_bounds(place: Any, value: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        register_memory(with_value(WHOLE, place, value))


def test_numpys_integers_are_integers() -> None:
    made = with_value(WHOLE, ("groups", 0, "num_blocks"), np.int32(10))
    assert register_memory(made).layout == WHOLE
    with pytest.raises(LayoutError, match=r"num_blocks is np.float32\(10.0\)"):
        register_memory(with_value(WHOLE, ("groups", 0, "num_blocks"), np.float32(10)))


def test_the_tokens_cannot_be_the_sharded_axis_and_the_reason_is_said() -> None:
    with pytest.raises(LayoutError, match="axis 'token' cannot be sharded, because every rank holds whole blocks"):
        check_layout(layout(part(axis="token", held=(0, 4), extent=8)))


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ((("b", "x"),), "layer 'b' is an alias of 'x', which has no memory on this rank"),
        ((("l", "l"),), "layer 'l' is an alias of 'l', but has memory of its own"),
        ((("b", "l"), ("b", "l")), "layer 'b' is declared an alias twice"),
        ((("b", "l"), ("c", "b")), "layer 'c' is an alias of 'b', which has no memory"),
    ],
)
def test_an_alias_is_another_name_of_a_layer_with_memory(aliases: Any, message: str) -> None:
    check_layout(layout(aliases=(("b", "l"), ("c", "l"))))
    with pytest.raises(LayoutError, match=message):
        check_layout(layout(aliases=aliases))


def test_what_is_not_said_of_a_dense_part_is_what_a_part_says_by_itself() -> None:
    dims = (Dim("token", 4, 4), Dim("dim", 2, 2))
    assert dense_part("k", "float16", [("token", 4), ("dim", 2)]) == Part("k", "float16", 2, 0, dims)


@pytest.mark.parametrize("heads", [(0, 1), (1, 2), (2, 4)])
def test_a_share_of_the_heads_is_refused_where_no_dim_has_them(heads: tuple[int, int]) -> None:
    """All ranks would be taken to hold the same, and one be read for another."""
    order, sizes = ("block", "token", "dim"), {"block": 10, "token": 4, "dim": 8}
    with pytest.raises(LayoutError, match=rf"heads \({heads[0]}, {heads[1]}\) of num_heads 4 .* has no head"):
        attention_view(layer="l", order=order, sizes=sizes, dtype="float16", heads=heads, num_heads=4)
    for whole, num_heads in (((0, 0), 0), ((0, 1), 1), ((0, 4), 4)):
        view = attention_view(layer="l", order=order, sizes=sizes, dtype="float16", heads=whole, num_heads=num_heads)
        assert view.parts[0].axis == ""


def test_a_share_of_a_part_that_is_not_sharded_has_no_range() -> None:
    latent = attention_view(
        layer="l", order=("block", "token", "dim"), sizes={"block": 10, "token": 4, "dim": 8}, dtype="float16"
    )
    made = layout(views=(latent,))
    [[share]] = assign(made, [made])
    assert (share.local_view, share.remote_view, share.lo, share.hi) == (latent, latent, 0, 0)


# -- Layouts as files -------------------------------------------------------------------------------------------------


def ranks(name: str, **sizes: Any) -> list[Layout]:
    model = PRESETS[name].resized(layers=4)
    return [model_layout(model, tp_rank=r, tp_size=2, num_blocks=8, **sizes) for r in range(2)]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v3", "nemotron-h-8b", "qwen3-next-80b-a3b"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    layouts = ranks(name, ratio=2, order="cross-hnd")
    path.write_text(dump_layouts(layouts))
    assert load_layouts(path) == layouts


def test_a_file_says_how_ranks_share_tokens(tmp_path: Path) -> None:
    path, layouts = tmp_path / "ranks.json", ranks("deepseek-v3", dcp=2, cp_interleave=4)
    path.write_text(dump_layouts(layouts))
    assert load_layouts(path) == layouts
    first, second = json.loads(path.read_text())["ranks"]
    assert (first["schema"], first["token_shards"]) == (2, [{"group": 0, "size": 2, "interleave": 4}])
    assert second["token_shards"] == [{"group": 0, "size": 2, "rank": 1, "interleave": 4}]
    assert '"token_shards"' not in dump_layouts(ranks("deepseek-v3"))


@pytest.mark.parametrize("role", [None, "prefill", "decode"])
def test_a_file_says_its_role_and_older_ones_have_none(role: Role | None, tmp_path: Path) -> None:
    path, layouts = tmp_path / "ranks.json", ranks("llama-3.1-8b")
    path.write_text(dump_layouts(layouts, role))
    assert json.loads(path.read_text()).get("role") == role
    for place in get_args(Role):
        if role in (None, place):
            assert load_layouts(path, place) == load_layouts(path) == layouts
        else:
            with pytest.raises(ConfigError, match=f"ranks of a {role} engine, in the place of the {place} engine"):
                load_layouts(path, place)


def broken(path: Path, *keys: Any, **change: Any) -> Path:
    """A good file with something changed below `keys`; `...` takes a field away."""
    whole = json.loads(dump_layouts(ranks("llama-3.1-8b")))
    at = whole
    for key in keys:
        at = at[key]
    for name, value in change.items():
        if value is ...:
            del at[name]
        else:
            at[name] = value
    path.write_text(json.dumps(whole))
    return path


VIEW = ("ranks", 0, "views", 0)


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ((), {"schema": "asynckv.layout/2"}, "schema is 'asynckv.layout/2', but this version reads"),
        ((), {"rank": []}, "unknown field `rank`"),
        ((), {"role": "lender"}, r"Invalid enum value 'lender' - at `\$.role`"),
        ((), {"ranks": []}, r"Expected `array` of length >= 1 - at `\$.ranks`"),
        ((), {"ranks": [3]}, r"Expected `object`, got `int` - at `\$.ranks\[0\]`"),
        (("ranks", 0), {"tp_rnak": 1}, r"unknown field `tp_rnak` - at `\$.ranks\[0\]`"),
        (("ranks", 1), {"tp_rank": 7}, r"ranks\[1\]: tp_rank 7 is outside its group of tp_size 2"),
        (("ranks", 0), {"model": "\ud800"}, "JSON is malformed"),
        (("ranks", 1), {"tp_rank": 0}, "a file holds different ranks of one engine"),
        (("ranks", 1), {"tp_size": 4}, "a file holds ranks of one engine"),
        (
            ("ranks", 0),
            {"schema": 2},
            r"ranks\[0\]: the layout has schema 2 and 0 token_shards; give schema=2 with any",
        ),
        (("ranks", 0), {"token_shards": []}, r"Expected `array` of length >= 1 - at `\$.ranks\[0\].token_shards`"),
        (("ranks", 0), {"token_shards": [{"size": 2}]}, "missing required field `group`"),
        (("ranks", 0), {"token_shards": [{"group": 0, "size": 2}]}, "schema 1 and 1 token_shards; give schema=2"),
        (("ranks", 0), {"tp_rank": "x"}, r"Expected `int`, got `str` - at `\$.ranks\[0\].tp_rank`"),
        (("ranks", 0), {"views": ...}, r"missing required field `views` - at `\$.ranks\[0\]`"),
        (("ranks", 0), {"views": {}}, r"Expected `array`, got `object` - at `\$.ranks\[0\].views`"),
        (("ranks", 0), {"groups": []}, r"Expected `array` of length >= 1 - at `\$.ranks\[0\].groups`"),
        (VIEW, {"stride": -8}, r"Expected `int` >= 1 - at `\$.ranks\[0\].views\[0\].stride`"),
        (VIEW, {"memory": 99}, r"layer 'layers.0': memory 99 is not among the 4 memories"),
        ((*VIEW, "parts", 0), {"axes": "head"}, r"unknown field `axes` - at `\$.ranks\[0\].views\[0\].parts\[0\]`"),
        ((*VIEW, "parts", 0), {"held": [0, 9]}, r"holds \[0, 9\) of 8 along 'head'"),
        ((*VIEW, "parts", 0, "dims", 0), {"size": 1 << 40}, r"dims\[0\].size`"),
        (
            ("ranks", 0, "groups", 0),
            {"kind": "token"},
            r"Invalid enum value 'token' - at `\$.ranks\[0\].groups\[0\].kind`",
        ),
        (("ranks", 0, "groups", 0), {"num_blocks": 9999}, "but memory 0 has"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_field(
    keys: tuple[Any, ...], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = broken(tmp_path / "ranks.json", *keys, **change)
    with pytest.raises(ConfigError, match=message) as caught:
        load_layouts(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "truncated"),
        ("a.json", "[]", "Expected `object`, got `array`"),
        ("a.json", "[" * 100_000, "Expected `object`"),
        ("a.json", "\x00", "malformed"),
    ],
)
def test_what_does_not_parse_is_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_layouts(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_layouts(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_layouts(tmp_path)
