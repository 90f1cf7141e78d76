"""An offload on simulated tiers: what is stored comes back to the byte, and blocks are in use until nothing moves."""

from __future__ import annotations

import asyncio

import pytest

from asynckv import LocalProtocolError, PullCancelled, PullError
from asynckv.testing.tiers import SimDisk
from tests.offloads import RECORD, Rank, chain, layout_of, until

pytestmark = pytest.mark.anyio


async def test_what_is_stored_is_loaded_into_other_blocks() -> None:
    rank = Rank(layout_of())
    async with rank.running() as offload:
        before = rank.block(3, 4, 9)
        stored = await offload.store("a", [(0, [3, 4, 9])], chain("p", 3))
        assert (stored.num_blocks, stored.num_new, stored.num_missed, stored.num_bytes) == (3, 3, 0, 3 * RECORD)
        rank.scribble([3, 4, 9])
        assert offload.lookup(chain("p", 5)).tokens == 48
        assert not offload.would_wait(chain("p", 5))
        loaded = await offload.load("b", [(0, [7, 5, 6, None])], chain("p", 5), num_tokens=48)
        assert (loaded.num_tokens, loaded.num_blocks, loaded.file_bytes) == (48, 3, 0)
        assert rank.block(7, 5, 6) == before
