"""Heads of which a rank does not know how many the model has, as vLLM gives one number for all layers.

The oracle knows the heads of every layer. The layouts say what a rank of vLLM can know: its own heads, and a number
from the model's configuration that may be right, wrong, or missing.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynckv.geometry.layout import Layout, fingerprint, shard
from asynckv.geometry.match import NotCovered, assign, compare, predicted, remote_ranks
from asynckv.integrations.vllm.caches import Place, is_known, kv_heads
from tests import oracle
from tests.oracle import Cache, Engine, GroupSpec, LayerSpec, PartSpec, Rank, check_transfer

SIZES = (1, 2, 4, 8, 16, 3, 6)


def starts(heads: tuple[int, ...], tp: int) -> bool:
    """Return True if vLLM starts such a model: heads are cut evenly, or every head is on equally many ranks."""
    return all(each % tp == 0 or tp % each == 0 for each in heads)


def engine(heads: tuple[int, ...], said: int | None, tp: int, windows: tuple[int, ...] = ()) -> Engine:
    """Describe an engine behind vLLM, whose configuration says `said` of a model with these heads per layer."""

    def declare(held: tuple[int, int], rank: int, size: int) -> tuple[int, int, int]:
        local = held[1] - held[0]
        made = kv_heads(local, said if local == 1 else None, Place(rank, size))
        return made.lo, made.hi, made.extent

    layers = tuple(
        LayerSpec(f"layers.{i}", (PartSpec("kv", (("head", each), ("dim", 2)), "head", 1),), window=window)
        for i, (each, window) in enumerate(itertools.zip_longest(heads, windows[: len(heads)], fillvalue=0))
    )
    by_window = {layer.window: None for layer in layers}
    groups = tuple(
        GroupSpec(tuple(i for i, layer in enumerate(layers) if layer.window == window), 4, 1, 8) for window in by_window
    )
    is_guess = not all(is_known(max(1, each // tp), said, Place(0, tp)) for each in heads)
    return Engine(
        layers,
        groups,
        tp,
        style="cross",
        orders={"kv": ("head", "token", "dim")},
        declare=declare,
        guessed_axis="head" if is_guess else msgspec.UNSET,
    )


def check(prefill: Engine, decode: Engine) -> None:
    """Compare every byte that every decode rank gets with the true heads."""
    tokens, cache = 10, Cache(prefill.layers, 5)
    theirs = [(0, [1, 2, 3]) for _ in prefill.groups]
    mine = [(0, [5, 6, 7]) for _ in decode.groups]
    remotes = [Rank(prefill, rank, base=(1 + rank) << 41) for rank in range(prefill.tp_size)]
    for remote in remotes:
        oracle.fill(remote, theirs, cache, tokens)
    for rank in range(decode.tp_size):
        local = Rank(decode, rank)
        for remote in oracle.peers_of(local, remotes):
            assert compare(local.layout, remote.layout) == ()
        check_transfer(local, remotes, mine, theirs, cache, tokens)


HEADS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, int, int]:
    prefill, decode = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    fitting = HEADS.filter(lambda each: starts((each,), prefill) and starts((each,), decode))
    heads = tuple(draw(st.lists(fitting, min_size=1, max_size=3)))
    said = draw(st.one_of(st.sampled_from(heads), st.just(max(heads)), st.none(), st.integers(0, 64)))
    return heads, said, prefill, decode


@given(pair=pairs())
@example(pair=((4, 1), 4, 1, 2))
@example(pair=((4, 1), 4, 2, 1))
@example(pair=((1, 2), 1, 1, 2))
@example(pair=((8, 2), 8, 2, 4))
@example(pair=((16, 4), 16, 4, 8))
@example(pair=((4, 8), 4, 8, 4))
@example(pair=((4, 8), 4, 4, 8))
@example(pair=((8, 1), 128, 8, 2))
@example(pair=((2,), 1, 2, 4))
@example(pair=((4,), 2, 8, 4))
@example(pair=((8,), 4, 8, 16))
@settings(max_examples=150)
def test_every_pair_that_vllm_starts_gets_every_byte(pair: tuple[tuple[int, ...], int | None, int, int]) -> None:
    heads, said, prefill, decode = pair
    check(engine(heads, said, prefill), engine(heads, said, decode))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_layers_with_a_window_may_have_other_heads(prefill: int, decode: int) -> None:
    heads, windows = (4, 1), (5, 0)
    check(engine(heads, 4, prefill, windows), engine(heads, 4, decode, windows))


def test_the_two_engines_may_be_told_different_numbers() -> None:
    for said, other in itertools.product((None, 1, 2, 4, 8), repeat=2):
        check(engine((4, 2), said, 4), engine((4, 2), other, 2))


def layout_of(heads: tuple[int, ...], said: int | None, tp: int, rank: int = 0) -> Layout:
    return Rank(engine(heads, said, tp), rank).layout


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_layers_that_agree_with_the_configuration_are_declared_as_before(heads: int, tp: int) -> None:
    layout = layout_of((heads, heads), heads, tp, tp - 1)
    assert layout.guessed_axis is msgspec.UNSET
    assert b"guessed" not in msgspec.msgpack.encode(layout)
    for view in layout.views:
        assert (view.parts[0].held, view.parts[0].extent) == (shard(heads, tp - 1, tp), heads)
    assert fingerprint(layout) == fingerprint(msgspec.structs.replace(layout, guessed_axis=msgspec.UNSET))


def test_extents_that_are_declared_are_never_settled() -> None:
    true, other = (msgspec.structs.replace(layout_of((h,), None, h), guessed_axis=msgspec.UNSET) for h in (8, 4))
    [found] = compare(true, other)
    assert (found.field, found.local, found.remote) == (
        "sharded axis of part 'kv' of layer 'layers.0'",
        "'head' of 8",
        "'head' of 4",
    )
    assert compare(msgspec.structs.replace(true, guessed_axis="dim"), other) == (found,)


def test_an_extent_that_cannot_be_the_guessers_is_refused_with_both_numbers() -> None:
    one, many = layout_of((1,), None, 4), layout_of((6,), 6, 2)
    [found] = compare(one, many)
    assert (found.local, found.remote) == ("'head' of 4", "'head' of 6")
    assert [(x.local, x.remote) for x in compare(many, one)] == [("'head' of 6", "'head' of 4")]


def test_a_state_with_one_head_is_not_a_guess() -> None:
    def layout(heads: int, tp: int) -> Layout:
        layers = (LayerSpec("ssm", (PartSpec("state", (("head", heads), ("dim", 2)), "head", 4),), "state"),)
        return Rank(Engine(layers, (GroupSpec((0,), 4),), tp, guessed_axis="head"), 0).layout

    assert compare(layout(4, 4), layout(4, 2)) == ()
    [found] = compare(layout(4, 4), layout(2, 2))
    assert (found.local, found.remote) == ("'head' of 4", "'head' of 2")


def test_ranks_of_one_engine_that_settle_differently_are_refused() -> None:
    local = layout_of((8,), None, 8)
    remotes = [layout_of((2,), 2, 1), layout_of((4,), 4, 1)]
    assert compare(local, remotes[0]) == compare(local, remotes[1]) == ()
    with pytest.raises(NotCovered, match="'head' of 4, remote 'head' of 2"):
        assign(local, remotes)


def test_a_rank_of_all_heads_meets_all_ranks_whatever_the_configuration_says() -> None:
    decode = layout_of((4,), 1, 1)
    assert decode.guessed_axis == "head"
    prefill = [layout_of((4,), 1, 4, rank) for rank in range(4)]
    first = predicted(decode, remote_ranks(0, 1, 4), 4)
    assert first == [0, 1, 2, 3]
    assert [len(shares) for shares in assign(decode, prefill)] == [1, 1, 1, 1]
    with pytest.raises(NotCovered, match=r"needs \[1, 4\) of 4"):
        assign(decode, prefill[:1])
