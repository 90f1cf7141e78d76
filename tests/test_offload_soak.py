"""Engines of random models and geometries, one after the other in one directory, on real NIXL and real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.soak_offload import soak

pytestmark = [pytest.mark.nixl, pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.parametrize("seed", range(3))
async def test_every_byte_is_what_was_stored(seed: int, tmp_path: Path) -> None:
    counts = await soak(seed, tmp_path, engines=3, requests=20)
    assert counts["blocks.compared"] > 0
