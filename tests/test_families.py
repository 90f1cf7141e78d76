"""Every model family between unequal engines, on real NIXL and ZMQ, every byte compared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from asynckv import Engine, EngineConfig, GeometryRefused, NixlConfig, PrefillRanks, Registration, shard
from asynckv.layout import ONE_PER_REQUEST, Group, TensorPart, register_parts
from asynckv.tools.bench.memory import Lists, Pool
from asynckv.tools.plan.layouts import model_groups, model_layout
from asynckv.tools.plan.models import Heads, Index, Latent, Model, Projection, State

pytestmark = pytest.mark.nixl

MAMBA1 = State((Projection("x", 24, 1),), 3, 24, (4,))
MAMBA2 = State((Projection("x", 12, 4), Projection("b", 1, 8), Projection("c", 1, 8)), 3, 12, (4, 8), "float32")
DELTA = State((Projection("q", 12, 4), Projection("k", 12, 4), Projection("v", 12, 8)), 3, 12, (4, 8))
GQA, MQA, NEAR = Heads(12, 16), Heads(1, 16), Heads(12, 16, window=20)
MODELS = {
    m.name: m
    for m in (
        Model("gqa", (GQA, GQA)),
        Model("mqa", (MQA, MQA)),
        Model("mla", (Latent(32, 8), Latent(32, 8))),
        Model("mla-indexed", (Latent(32, 8, index=Index(16, "float8_e4m3fn", 1)), Latent(32, 8))),
        Model("gqa-indexed", (GQA, Heads(12, 16, index=Index(16, "bfloat16")))),
        Model("window", (NEAR, GQA, NEAR)),
        Model("mamba-1", (MAMBA1, GQA)),
        Model("mamba-2", (MAMBA2, MAMBA2, GQA)),
        Model("delta-net", (DELTA, GQA, DELTA)),
        Model("keys-wider", (Heads(12, 16, v_head_dim=8),)),
        Model("scaled", (Heads(12, 16),), "float8_e4m3fn"),
    )
}
TOKENS = 75
# Reads this small are posted on the loop: agents of posting threads would only be made and closed.
NIXL = NixlConfig(posting_threads=0)


def lists(model: Model, block_size: int, cached: int, start: int) -> Lists:
    """A request's blocks on one side, as an engine would give them."""
    out: list[tuple[int, list[int | None]]] = []
    for layer, _ in model_groups(model):
        if isinstance(layer, State):
            out.append((cached, [start] if cached < TOKENS else []))
            continue
        begin = max(0, TOKENS - layer.window + 1) // block_size if layer.window else 0
        places = range(cached // block_size, math.ceil(TOKENS / block_size))
        out.append((cached, [start + i if i >= begin else None for i in places] if cached < TOKENS else []))
    return out


async def move(
    model: Model,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    *,
    cached: Sequence[int] = (0,),
    here: dict[str, Any] | None = None,
    there: dict[str, Any] | None = None,
) -> None:
    """Pull a request on every decode rank, once for each number of cached tokens; sizes are (tp, pp)."""
    here, there = {"block_size": 16, **(here or {})}, {"block_size": 16, **(there or {})}
    pools: dict[str, list[Pool]] = {}
    for role, (tp, pp), sizes in (("prefill", prefill, there), ("decode", decode, here)):
        pools[role] = [
            Pool(model_layout(model, tp_rank=r, tp_size=tp, pp_stage=s, pp_size=pp, num_blocks=24, **sizes), seed=5)
            for s in range(pp)
            for r in range(tp)
        ]
    theirs = lists(model, there["block_size"], 0, 3)
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, list[Engine]] = {"prefill": [], "decode": []}
        for role, row in pools.items():
            for pool in row:
                engine = Engine(EngineConfig(engine_id=role, nixl=NIXL), pool.registration)
                engines[role].append(await stack.enter_async_context(engine))
        group = PrefillRanks("prefill", [e.endpoint for e in engines["prefill"]], pp_size=prefill[1])
        for number, hit in enumerate(cached):
            params = group.make_params(f"req-P{number}", theirs, TOKENS, written=True)
            mine = lists(model, here["block_size"], hit, 9)
            for pool in pools["prefill"]:
                pool.fill(number, theirs, TOKENS)
            for pool in pools["decode"]:
                pool.poison(mine)
            lent = [engine.lend(params) for engine in engines["prefill"]]
            for engine, pool in zip(engines["decode"], pools["decode"], strict=True):
                result = await engine.pull(f"req-D{number}", mine, params)
                wanted = pool.wanted(mine, TOKENS)
                assert result.num_bytes >= wanted
                assert pool.check(number, mine, TOKENS) == (wanted, 0)
            for each in lent:
                end = await each.wait_released()
                assert (end.cause, end.owed) == ("released", ())
            for engine in (*engines["prefill"], *engines["decode"]):
                engine.check_integrity()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_unequal_tensor_parallel_sizes(name: str, prefill: int, decode: int) -> None:
    await move(MODELS[name], (prefill, 1), (decode, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (3, 2), (2, 3), (4, 6)])
async def test_more_sizes_and_a_prefix(name: str, prefill: int, decode: int) -> None:
    here = {"block_size": 12, "ratio": 3, "order": "hnd", "conv_order": "row"}
    there = {"block_size": 16, "ratio": 2, "order": "cross-hnd", "conv_order": "channel"}
    await move(MODELS[name], (prefill, 1), (decode, 1), cached=(0, 37), here=here, there=there)


@pytest.mark.parametrize(("here", "there"), [(16, 64), (64, 16), (48, 32), (32, 48)])
async def test_block_sizes_with_a_prefix_inside_a_block(here: int, there: int) -> None:
    model = Model("both", (GQA, MAMBA2, NEAR))
    await move(model, (1, 1), (1, 1), cached=(21,), here={"block_size": here}, there={"block_size": there})


async def test_a_full_hit_reads_nothing_and_frees_every_rank() -> None:
    await move(MODELS["mamba-2"], (3, 1), (2, 1), cached=(TOKENS,))


@pytest.mark.parametrize(("prefill", "decode"), [((1, 2), (1, 3)), ((2, 1), (1, 2)), ((1, 3), (2, 1))])
async def test_stages_that_differ(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    await move(Model("three", (GQA, MAMBA2, GQA)), prefill, decode)


async def test_orders_that_differ() -> None:
    await move(MODELS["gqa"], (1, 1), (2, 1), here={"order": "cross-nhd"}, there={"order": "block-hnd"})


# -- as vLLM has it: one raw tensor of pages, seen as attention blocks by one group and as states by another --------


class Pages:
    """A hybrid model's rank: pages of one tensor are attention blocks (of kernel blocks) or Mamba states."""

    def __init__(self, tp_rank: int, tp_size: int, ratio: int, fill: float) -> None:
        heads, (lo, hi) = 4, shard(4, tp_rank, tp_size)
        n, kernel = hi - lo, 4
        self.page = 2 * ratio * kernel * n * 8 * 2
        self.raw = torch.full((16 * self.page // 2,), fill, dtype=torch.bfloat16)
        half = self.page // 2 // 2 // ratio
        kv = self.raw.as_strided((16 * ratio, 2, kernel, n, 8), (2 * half, half, n * 8, 8, 1))
        x = self.raw.as_strided((16, n, 4, 3), (self.page // 2, 12, 3, 1))
        offset = n * 12
        bc = self.raw.as_strided((16, 2, 8, 3), (self.page // 2, 24, 3, 1), offset)
        ssm = self.raw.as_strided((16, n, 4, 4), (self.page // 2, 16, 4, 1), offset + 48)
        self.kv, self.parts = kv, (x, bc, ssm)
        head: dict[str, Any] = {"axis": "head", "held": (lo, hi), "extent": heads}
        state: dict[str, Any] = {"layer": "mamba", "group": 1}
        self.registration: Registration = register_parts(
            [
                TensorPart(layer="attn", name="k", tensor=kv[:, 0], order=("block", "token", "head", "dim"), **head),
                TensorPart(layer="attn", name="v", tensor=kv[:, 1], order=("block", "token", "head", "dim"), **head),
                TensorPart(name="conv_x", tensor=x, order=("block", "head", "dim", "column"), **head, **state),
                TensorPart(name="conv_b", tensor=bc[:, 0], order=("block", "dim", "column"), **state),
                TensorPart(name="conv_c", tensor=bc[:, 1], order=("block", "dim", "column"), **state),
                TensorPart(name="ssm", tensor=ssm, order=("block", "head", "dim", "state"), **head, **state),
            ],
            groups=[
                Group("attention", ratio * kernel, 16, ratio, null_block=0),
                Group("mamba", ONE_PER_REQUEST, 16, kind="state", null_block=0),
            ],
            tp_rank=tp_rank,
            tp_size=tp_size,
        )


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
async def test_pages_shared_by_groups_with_a_ratio_of_each_sides_own(prefill: int, decode: int) -> None:
    there = [Pages(r, prefill, 5, 0.0) for r in range(prefill)]
    here = [Pages(r, decode, 7, -1.0) for r in range(decode)]
    whole_kv = torch.randn(2, 50, 4, 8).bfloat16()
    whole = (torch.randn(4, 4, 3).bfloat16(), torch.randn(2, 8, 3).bfloat16(), torch.randn(4, 4, 4).bfloat16())
    for r, side in enumerate(there):
        cut = slice(*shard(4, r, prefill))
        kernel = [b * 5 + i for b in (3, 9, 4) for i in range(5)]
        for t in range(50):
            side.kv[kernel[t // 4], :, t % 4] = whole_kv[:, t, cut]
        for tensor, value in zip(side.parts, (whole[0][cut], whole[1], whole[2][cut]), strict=True):
            tensor[7] = value
    async with contextlib.AsyncExitStack() as stack:
        engines: list[list[Engine]] = []
        for role, sides in (("prefill", there), ("decode", here)):
            made = [Engine(EngineConfig(engine_id=role, nixl=NIXL), side.registration) for side in sides]
            engines.append([await stack.enter_async_context(engine) for engine in made])
        group = PrefillRanks("prefill", [e.endpoint for e in engines[0]], null_block=0)
        params = group.make_params("P", [(0, [3, 9, 4]), (0, [7])], 50, written=True)
        lent = [engine.lend(params) for engine in engines[0]]
        for r, (engine, side) in enumerate(zip(engines[1], here, strict=True)):
            before = side.raw.clone()
            # Tokens up to 6 were in the prefix cache.
            result = await engine.pull("D", [(7, [2, 11]), (7, [5])], params)
            cut = slice(*shard(4, r, decode))
            kernel = [b * 7 + i for b in (2, 11) for i in range(7)]
            for t in range(50):
                found = side.kv[kernel[t // 4], :, t % 4]
                assert torch.equal(found, whole_kv[:, t, cut] if t >= 7 else torch.full_like(found, -1.0))
            for tensor, value in zip(side.parts, (whole[0][cut], whole[1], whole[2][cut]), strict=True):
                assert torch.equal(tensor[5], value)
            other = [b for b in range(16) if b not in (2, 5, 11)]
            assert torch.equal(side.raw.view(16, -1)[other], before.view(16, -1)[other])
            assert [tuple(p) for p in result.padding] == [(0, 11, 22, 6)]
        for each in lent:
            assert (await each.wait_released()).cause == "released"


def registration(**changes: Any) -> Registration:
    return Pool(model_layout(Model("m", (GQA, MAMBA2)), num_blocks=8, **changes), 1).registration


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model("m", (GQA,)), r"layers only on one side: local \['layers.1'\], remote none"),
        (Model("m", (Heads(12, 8), MAMBA2)), "dims of part 'k' of layer 'layers.0': local dim=16, head, token, remote"),
        (Model("m", (GQA, MAMBA2), "float16"), "dtype of part 'k' of layer 'layers.0': local bfloat16, remote float16"),
        (Model("other", (GQA, MAMBA2)), "model: local m, remote other"),
        (
            Model("m", (GQA, msgspec.structs.replace(MAMBA2, columns=MAMBA2.columns + 2))),
            rf"columns of the convolution of part 'conv_x' of layer 'layers.1': local {MAMBA2.columns}, remote "
            rf"{MAMBA2.columns + 2} \(speculative decoding: .* the same num_speculative_tokens",
        ),
    ],
)
async def test_what_cannot_be_planned_is_refused_at_the_handshake(model: Model, message: str) -> None:
    there = Pool(model_layout(model, num_blocks=8), 1).registration
    sides: Sequence[Engine] = [
        Engine(EngineConfig(engine_id="prefill", nixl=NIXL), there),
        Engine(EngineConfig(engine_id="decode", nixl=NIXL), registration()),
    ]
    async with sides[0] as prefill, sides[1] as decode:
        params = PrefillRanks("prefill", [prefill.endpoint]).make_params("P", [(0, [1])] * len(there.layout.groups), 5)
        with pytest.raises(GeometryRefused, match=message):
            await decode.pull("D", [(0, [1]), (0, [1])], params)
