"""Engines whose ranks share tokens, on real NIXL and ZMQ: every byte, and every rank released."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import torch

from asynckv import Engine, EngineConfig, NixlConfig, PrefillRanks, register_tensors

pytestmark = pytest.mark.nixl

TOKENS, DIM, LAYERS, BLOCKS = 150, 8, 2, 12
UNWRITTEN = -7.0
# Reads this small are posted on the loop: agents of posting threads would only be made and closed.
NIXL = NixlConfig(posting_threads=0)


class Side(NamedTuple):
    """One engine: its ranks, how many neighbours share tokens, and in which turns."""

    tp_size: int
    shards: int
    turn: int
    block_size: int


PREFILL = Side(4, 4, 1, 64)


def expected(layer: int, token: int) -> torch.Tensor:
    return torch.arange(DIM, dtype=torch.float32) + 1000 * layer + 8 * token


class Rank:
    """One rank's latents, and where each token of a request belongs."""

    def __init__(self, side: Side, rank: int) -> None:
        self.side = side
        tokens = side.block_size // side.shards
        self.tensors = {f"layers.{i}": torch.full((BLOCKS, tokens, DIM), UNWRITTEN) for i in range(LAYERS)}
        self.held = [t for t in range(2 * TOKENS) if t // side.turn % side.shards == rank % side.shards]
        self.registration = register_tensors(
            self.tensors,
            order=("block", "token", "dim"),
            block_size=side.block_size,
            num_blocks=BLOCKS,
            heads=(0, 0),
            num_heads=0,
            tp_rank=rank,
            tp_size=side.tp_size,
            token_shard=(side.shards, rank % side.shards, side.turn),
        )

    def places(self, blocks: list[int]) -> dict[int, tuple[int, int]]:
        """Return the block and the place in it of every token of a request that this rank holds."""
        here = self.side.block_size // self.side.shards
        places = [(block, place) for block in blocks for place in range(here)]
        return {token: places[i] for i, token in enumerate(self.held) if i < len(places)}


def blocks_of(side: Side, first: int) -> list[int]:
    return [first + 2 * i for i in range(-(-TOKENS // side.block_size))]


@pytest.mark.parametrize("cached", [37, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "decode", [Side(1, 1, 1, 48), Side(4, 2, 4, 32), pytest.param(Side(4, 4, 2, 64), marks=pytest.mark.slow)]
)
async def test_engines_that_share_tokens_move_every_byte_and_release_every_rank(decode: Side, cached: int) -> None:
    theirs, mine = blocks_of(PREFILL, 1), blocks_of(decode, 0)
    lenders = [Rank(PREFILL, r) for r in range(PREFILL.tp_size)]
    readers = [Rank(decode, r) for r in range(decode.tp_size)]
    for rank in lenders:
        for token, (block, place) in rank.places(theirs).items():
            for layer, tensor in enumerate(rank.tensors.values()):
                tensor[block, place] = expected(layer, token)
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, list[Engine]] = {"prefill": [], "decode": []}
        for role, ranks in (("prefill", lenders), ("decode", readers)):
            for rank in ranks:
                engine = Engine(EngineConfig(engine_id=role, nixl=NIXL), rank.registration)
                engines[role].append(await stack.enter_async_context(engine))
        group = PrefillRanks("prefill", [e.endpoint for e in engines["prefill"]], num_token_shards=PREFILL.shards)
        params = group.make_params("P", [(0, theirs)], TOKENS, written=True)
        lent = [engine.lend(params) for engine in engines["prefill"]]
        for engine, rank in zip(engines["decode"], readers, strict=True):
            given = mine[cached // decode.block_size :]
            await engine.pull("D", [(cached, given)], params)
            places = rank.places(mine)
            for layer, tensor in enumerate(rank.tensors.values()):
                found = {token: tensor[place].clone() for token, place in places.items()}
                for token, value in found.items():
                    if cached <= token < TOKENS:
                        assert torch.equal(value, expected(layer, token)), (layer, token)
                    else:
                        assert (value == UNWRITTEN).all(), (layer, token)
                    tensor[places[token]] = UNWRITTEN
                assert (tensor == UNWRITTEN).all(), "something else was written"
        for each in lent:
            end = await each.wait_released()
            assert (end.cause, end.owed) == ("released", ())
            assert len(end.readers) == decode.tp_size
        for engine in (*engines["prefill"], *engines["decode"]):
            engine.check_integrity()
