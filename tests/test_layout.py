"""Layouts that do not hold together are refused with the field, the numbers and the remedy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv.core.layout import (
    MAX_VIEWS,
    Dim,
    Group,
    Layout,
    Memory,
    Part,
    View,
    attention_view,
    check_layout,
    pools,
    runs_of,
    shard,
)
from asynckv.core.topology import owed_readers, remote_ranks
from asynckv.errors import LayoutError
from tests.world import make_layout

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
        (layout(memories=(Memory((1 << 63) - 1, 640),)), "address space"),
        (
            layout(
                views=(View(0, 0, "a", 0, 64, (part(),)), View(0, 0, "b", 32, 64, (part(),))),
                memories=(Memory(0, 999),),
            ),
            "overlap",
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


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_layouts_are_fine_or_refused(data: st.DataObject) -> None:
    tree = msgspec.to_builtins(make_layout())
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(node[key], dict | list) or not node[key]:
                break
            node = node[key]
        if isinstance(node[key], int):
            node[key] = data.draw(st.integers(0, 1 << 60))
    try:
        check_layout(msgspec.convert(tree, Layout))
    except (LayoutError, msgspec.ValidationError):
        return


@pytest.mark.parametrize(
    ("order", "message"),
    [(("block", "kv", "token", "head"), "permutation"), (("block", "kv", "token", "head", "dim", "x"), "permutation")],
)
def test_orders_must_be_whole(order: tuple[str, ...], message: str) -> None:
    sizes = {"kv": 2, "block": 2, "token": 2, "head": 2, "dim": 2, "x": 2}
    with pytest.raises(LayoutError, match=message):
        attention_view(layer="l", order=order, sizes=sizes, dtype="float16", heads=(0, 2), num_heads=2)


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
