"""Engines of random models and geometries, one after the other in one directory, on real NIXL and real files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.lab.caches import GroupKind, Model, PartKind, Shape
from tests.lab.soak_offload import HASH_TOKENS, Life, soak

pytestmark = [pytest.mark.nixl, pytest.mark.slow]


@pytest.mark.parametrize("seed", range(3))
async def test_every_byte_is_what_was_stored(seed: int, tmp_path: Path) -> None:
    counts = await soak(seed, tmp_path, engines=3, requests=15)
    assert counts["blocks.compared"] > 0


async def test_what_all_ranks_have_left_the_same_is_read_of_one(tmp_path: Path) -> None:
    """Latents, which each of two ranks has, beside heads, of which each has its own."""
    keys = PartKind("k", "bfloat16", (("head", 4), ("dim", 8)), "head")
    groups = GroupKind("heads", (keys,), 1), GroupKind("latents", (PartKind("kv", "bfloat16", (("dim", 32),)),), 1)
    model, rng = Model(groups, HASH_TOKENS, 4), random.Random(1)
    two, one = (Shape(tp_size, (1, 1), (1, 1), 48, "layers", 1) for tp_size in (2, 1))
    await Life(model, two, tmp_path, rng).run(20)
    last = Life(model, one, tmp_path, rng)
    await last.run(20)
    assert last.counts["from_others"] > 0
