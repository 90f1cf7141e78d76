"""The pattern: what was written is recognised, and nothing else passes for it."""

from __future__ import annotations

import ctypes

import pytest

from asynckv.bench.memory import ORDERS, Pool
from asynckv.bench.models import Geometry

GEOMETRY = Geometry("tiny", 2, 4, 16)
BLOCKS = [5, 6, 7, 2]


def pool(order: str = "nhd", tp_rank: int = 0, tp_size: int = 1, seed: int = 1) -> Pool:
    return Pool(GEOMETRY, order, tp_rank, tp_size, 4, 8, seed)


def size(of: Pool) -> int:
    return of.block_bytes * GEOMETRY.num_layers * len(BLOCKS)


@pytest.mark.parametrize("order", ORDERS)
def test_what_was_filled_is_right_and_poison_is_wrong(order: str) -> None:
    it = pool(order)
    it.fill(3, BLOCKS)
    assert it.count_wrong(3, BLOCKS) == 0
    it.poison(BLOCKS)
    assert it.count_wrong(3, BLOCKS) > 0.98 * size(it)


@pytest.mark.parametrize("order", ORDERS)
def test_one_wrong_byte_is_counted_once(order: str) -> None:
    it = pool(order)
    it.fill(3, BLOCKS)
    view = it.registration.layout.views[1]
    base = it.registration.layout.memories[view.memory].base
    at = base + view.offset + 6 * view.stride + view.parts[1].offset + 3
    byte = ctypes.c_ubyte.from_address(at)
    byte.value ^= 1
    assert it.count_wrong(3, BLOCKS) == 1
    assert it.count_wrong(3, BLOCKS, only=[0, 2, 3]) == 0
    assert it.count_wrong(3, BLOCKS, only=[1]) == 1


def test_another_request_does_not_pass() -> None:
    it = pool()
    it.fill(3, BLOCKS)
    assert it.count_wrong(4, BLOCKS) > 0.98 * size(it)


def test_blocks_in_another_order_do_not_pass() -> None:
    it = pool()
    it.fill(3, BLOCKS)
    assert it.count_wrong(3, [6, 5, 7, 2]) > 0.48 * size(it)


def test_another_rank_or_seed_does_not_pass() -> None:
    one, two = pool(tp_rank=0, tp_size=2), pool(tp_rank=1, tp_size=2)
    seeded = pool(tp_rank=0, tp_size=2, seed=2)
    for it in (one, two, seeded):
        it.fill(3, BLOCKS)
    sums = {bytes(memoryview(it._maps[0])) for it in (one, two, seeded)}
    assert len(sums) == 3


def test_layers_differ() -> None:
    it = pool()
    it.fill(3, BLOCKS)
    first, second = (bytes(memoryview(m)) for m in it._maps)
    assert first != second


def test_other_blocks_stay_untouched() -> None:
    it = pool()
    it.fill(3, [0, 1])
    before = [bytes(memoryview(m)) for m in it._maps]
    it.fill(4, BLOCKS)
    assert it.count_wrong(3, [0, 1]) == 0
    assert [bytes(memoryview(m)) for m in it._maps] != before
