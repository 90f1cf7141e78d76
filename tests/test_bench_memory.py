"""The pattern: what was written is recognised on whatever rank holds it, and nothing else passes for it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from asynckv.tools.bench.memory import Lists, Pool
from asynckv.tools.plan.layouts import CONV_ORDERS, ORDERS, model_layout
from asynckv.tools.plan.models import Heads, Latent, Model, Projection, State

STATE = State((Projection("x", 8, 4), Projection("b", 2, 8)), 3, 8, (4, 8), "float32")
MODEL = Model("tiny", (Heads(4, 16), Heads(4, 16, window=20), Latent(32, 8), STATE, Heads(4, 16)))
LISTS: Lists = [(0, [1, 2, 3]), (0, [None, 2, 3]), (0, [1, 2, 3]), (0, [5])]
TOKENS = 40
SIZE = 2 * 40 * 4 * 16 * 2 * 2 + 19 * 4 * 16 * 2 * 2 + 40 * 40 * 2 + (8 * 4 + 2 * 8) * 3 * 2 + 8 * 4 * 8 * 4


def pool(order: str = "nhd", seed: int = 1, model: Model = MODEL, **sizes: Any) -> Pool:
    return Pool(model_layout(model, num_blocks=8, order=order, **sizes), seed)


@pytest.mark.parametrize("conv_order", CONV_ORDERS)
@pytest.mark.parametrize("order", ORDERS)
def test_what_was_filled_is_right_and_poison_is_wrong(order: str, conv_order: str) -> None:
    it = pool(order, conv_order=conv_order, ratio=2)
    it.poison(LISTS)
    compared, wrong = it.check(3, LISTS, TOKENS)
    assert compared == SIZE == it.wanted(LISTS, TOKENS)
    assert wrong > 0.98 * SIZE
    it.fill(3, LISTS, TOKENS)
    assert it.check(3, LISTS, TOKENS) == (SIZE, 0)


def test_one_wrong_byte_is_counted_once() -> None:
    it = pool()
    it.fill(3, LISTS, TOKENS)
    view = it.registration.layout.views[0]
    at = it.registration.layout.memories[view.memory].base + view.offset + 2 * view.stride + view.parts[1].offset + 3
    ctypes.c_ubyte.from_address(at).value ^= 1
    assert it.check(3, LISTS, TOKENS) == (SIZE, 1)


@pytest.mark.parametrize("changed", [{"request": 4}, {"tokens": 39}, {"lists": [(0, [2, 1, 3]), *LISTS[1:]]}])
def test_another_request_state_or_order_does_not_pass(changed: dict[str, Any]) -> None:
    it = pool()
    it.fill(3, LISTS, TOKENS)
    _, wrong = it.check(changed.get("request", 3), changed.get("lists", LISTS), changed.get("tokens", TOKENS))
    assert wrong > 500


def test_what_was_cached_must_stay_untouched() -> None:
    it = pool()
    lists = [(20, [2, 3]), (20, [2, 3]), (20, [2, 3]), (20, [5])]
    it.poison(lists)
    assert it.check(3, lists, TOKENS)[1] > 0
    it.fill(3, lists, TOKENS)
    compared, wrong = it.check(3, lists, TOKENS)
    # `fill` writes whole blocks: tokens 16 to 19 were cached, and are no longer what they were.
    assert wrong > 0.9 * 4 * (2 * 4 * 16 * 2 * 2 + 40 * 2)
    assert compared == it.wanted(lists, TOKENS)


@pytest.mark.parametrize("order", ["nhd", "cross-hnd"])
def test_ranks_hold_their_shares_of_one_pattern(order: str) -> None:
    one = Model("one", (Heads(4, 16), STATE))
    lists: Lists = [(0, [1, 2]), (0, [5])]
    whole = Pool(model_layout(one, num_blocks=8, order=order), 1)
    halves = [Pool(model_layout(one, num_blocks=8, order=order, tp_rank=r, tp_size=2), 1) for r in range(2)]
    for it in (whole, *halves):
        it.fill(3, lists, 20)
    for field, shares in zip(whole._fields, zip(*(h._fields for h in halves), strict=True), strict=True):
        axis = field.array.ndim - field.places.ndim
        for half, share in enumerate(shares):
            size = share.array.shape[axis]
            cut = [slice(None)] * axis + [slice(half * size, (half + 1) * size)]
            assert (field.array[tuple(cut)] == share.array).all()


def test_other_blocks_stay_untouched() -> None:
    it = pool()
    others: Lists = [(0, [4, 5]), (0, [4, 5]), (0, [4, 5]), (0, [1])]
    it.fill(3, others, 30)
    it.fill(4, LISTS, TOKENS)
    assert it.check(3, others, 30)[1] == 0


@pytest.mark.parametrize("order", ["nhd", "cross-hnd"])
def test_requests_that_share_chunks_share_their_tokens_and_nothing_else(order: str) -> None:
    one = Model("one", (Heads(4, 16), STATE))
    it = Pool(model_layout(one, num_blocks=8, order=order), 1)
    mine, theirs = (16, [7, 8]), (16, [7, 9])
    it.fill(3, [(0, [1, 2, 3]), (0, [5])], TOKENS, mine)
    it.fill(4, [(0, [None, 4, 6]), (0, [7])], TOKENS, theirs)
    # The first block is the same for both; the second is another chunk, and the third everybody's own.
    assert it.check(4, [(0, [1, 4, 6]), (0, [7])], TOKENS, theirs)[1] == 0
    assert it.check(3, [(0, [1, 2, 3]), (0, [5])], TOKENS, mine)[1] == 0
    for blocks, state in (([1, 2, 6], 7), ([1, 4, 3], 7), ([1, 4, 6], 5)):
        assert it.check(4, [(0, blocks), (0, [state])], TOKENS, theirs)[1] > 500
    assert it.check(3, [(0, [1, 2, 3]), (0, [5])], TOKENS)[1] > 500
