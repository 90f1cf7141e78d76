"""Every kind of cache that vLLM makes, between two engines over real NIXL, and every byte compared with an oracle."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    RSWASpec,
    SinkFullAttentionSpec,
)

from asynckv import EngineConfig, PrefillRanks
from asynckv.embed import EngineThread
from asynckv.errors import ConfigError, GeometryRefused, LayoutError
from asynckv.geometry.layout import ONE_PER_REQUEST
from asynckv.geometry.pairing import Padding
from asynckv.integrations.vllm import caches
from asynckv.integrations.vllm.caches import Place
from asynckv.integrations.vllm.memory import ModelFacts, Tails, check_supported, register
from asynckv.integrations.vllm.shape import Shape
from tests.vllm.keeps import FP8, PER_TOKEN_HEAD, Attention, Recurrent, delta_net, mamba1, mamba2
from tests.vllm.planned import Planned, plan, vllm_config

Layers = Mapping[str, Attention | Recurrent]

NUM_BLOCKS = 120


@dataclass
class Side:
    """One engine's memory, as it was started."""

    layers: Layers
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    interleave: int = 1
    layout: str = "LBHNC"
    kernel_sizes: Sequence[int] | None = None
    kv_heads: int = 8
    stages: Sequence[Sequence[str]] | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    cache_dtype: str = "auto"
    facts: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """All ranks of an engine."""

    def __init__(self, name: str, side: Side, folder: Path, stack: ExitStack) -> None:
        self.name, self.side = name, side
        states = [layer for layer in side.layers.values() if isinstance(layer, Recurrent)]
        block_size = next((x.block_size for x in side.layers.values() if isinstance(x, Attention)), 16)
        config = vllm_config(
            folder,
            layout=side.layout,
            block_size=block_size,
            tp=side.tp,
            pp=side.pp,
            dcp=side.dcp,
            interleave=side.interleave,
            num_blocks=NUM_BLOCKS,
            mamba_mode=states[0].mode if states else None,
            num_key_value_heads=side.kv_heads,
            cache_dtype=side.cache_dtype,
        )
        stages = side.stages or [list(side.layers)]
        specs = [{n: side.layers[n].spec(side.tp) for n in stage} for stage in stages for _ in range(side.tp)]
        self.ranks: list[Planned] = plan(config, specs, side.kernel_sizes, side.shared)
        facts = ModelFacts.of(config)
        facts = dataclasses.replace(
            facts, is_conv_dim_first=all(s.is_dim_first for s in states), name="model", **side.facts
        )
        self.groups = self.ranks[0].config.kv_cache_groups
        self.threads = []
        for rank in self.ranks:
            registration = register(rank.config, rank.tensors, rank.place, facts)
            thread = EngineThread(EngineConfig(engine_id=name), registration)
            thread.start(30.0)
            stack.callback(thread.close, 10.0)
            self.threads.append(thread)

    def group_of(self, layer: str) -> int:
        return next(i for r in self.ranks for i, g in enumerate(r.config.kv_cache_groups) if layer in g.layer_names)

    def storage(self, rank: int) -> torch.Tensor:
        """All bytes of a rank."""
        storage = next(iter(self.ranks[rank].tensors.values())).untyped_storage()
        return torch.tensor([], dtype=torch.uint8).set_(storage)

    def size(self, group: int) -> int:
        """Tokens per block of a group; 0 for one state per request."""
        layer = self.kind(group)
        shares = self.side.dcp if self.groups[group].kv_cache_spec.dcp_sharded else 1
        return 0 if isinstance(layer, Recurrent) and layer.mode == "none" else layer.block_size * shares

    def kind(self, group: int) -> Attention | Recurrent:
        name = next(n for r in self.ranks for n in r.config.kv_cache_groups[group].layer_names)
        return self.layer(name, group)

    def layer(self, name: str, group: int) -> Attention | Recurrent:
        """A layer with the blocks that vLLM has given it: larger ones where its pages would be smaller than others'."""
        layer = self.side.layers[name]
        if isinstance(layer, Recurrent):
            return layer
        return dataclasses.replace(layer, block_size=self.groups[group].kv_cache_spec.block_size)

    def blocks(self, chosen: random.Random, num_tokens: int, cached: int) -> list[tuple[int, list[int | None]]]:
        """Blocks of a request, per group: some of each, in no order, none of them twice."""
        free = list(range(1, NUM_BLOCKS))
        chosen.shuffle(free)
        out: list[tuple[int, list[int | None]]] = []
        for group in range(len(self.groups)):
            kind, size = self.kind(group), self.size(group)
            if not size:
                out.append((cached, [free.pop()]))
                continue
            first = cached // size * size
            ids: list[int | None] = [free.pop() for _ in range(ceil(num_tokens / size) - first // size)]
            if isinstance(kind, Recurrent):
                ids[:-1] = [None] * (len(ids) - 1)
            elif kind.window:
                for place in range(len(ids)):
                    if first + (place + 1) * size <= num_tokens - kind.window:
                        ids[place] = None
            out.append((cached, ids))
        return out


@contextmanager
def engines(tmp_path: Path, prefill: Side, decode: Side) -> Iterator[tuple[Engine, Engine]]:
    with ExitStack() as stack:
        yield Engine("prefill", prefill, tmp_path / "a", stack), Engine("decode", decode, tmp_path / "b", stack)


def check_moved(
    tmp_path: Path, prefill: Side, decode: Side, num_tokens: int = 150, cached: int = 0, clears: bool = False
) -> None:
    """Lend a request, pull it on all ranks, and compare every byte of their memories with what it should be."""
    tmp_path.mkdir(exist_ok=True)
    chosen = random.Random(num_tokens)
    with engines(tmp_path, prefill, decode) as (source, target):
        theirs, ours = source.blocks(chosen, num_tokens, 0), target.blocks(chosen, num_tokens, cached)
        truths = {}
        whole = ceil(num_tokens / 512) * 512
        for seed, (name, layer) in enumerate(prefill.layers.items()):
            truths[name] = layer.truth(whole, 100 * seed)
        for rank in range(len(source.ranks)):
            fill(source, rank, seed=1)
            write(source, rank, truths, theirs, 0, None)
        expected = []
        for rank in range(len(target.ranks)):
            fill(target, rank, seed=2 + rank)
            before = target.storage(rank).clone()
            write(target, rank, truths, ours, cached, (source, num_tokens))
            if clears:
                nothing = {n: torch.zeros_like(t) for n, t in truths.items() if isinstance(t, torch.Tensor)}
                write(target, rank, nothing, ours, num_tokens, None)
            expected.append(target.storage(rank).clone())
            target.storage(rank).copy_(before)
        params = lend(source, theirs, num_tokens)
        for rank, thread in enumerate(target.threads):
            result = thread.call(thread.engine.pull("request", ours, params), 30.0)
            assert result.num_tokens == num_tokens
            if clears:
                one = target.ranks[rank]
                needs = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=one.config.kv_cache_groups)
                Tails.of(needs, one.tensors, ModelFacts()).clear(result.padding)
            same = torch.equal(target.storage(rank), expected[rank])
            assert same, where_differs(target, rank, expected[rank])


def lend(source: Engine, blocks: Any, num_tokens: int) -> dict[str, Any]:
    group = PrefillRanks(
        "prefill",
        [thread.engine.endpoint for thread in source.threads],
        tp_size=source.side.tp,
        pp_size=source.side.pp,
        num_token_shards=source.threads[0].engine.registration.layout.num_token_shards,
        null_block=0,
    )
    params = group.make_params("request", blocks, num_tokens=num_tokens, written=True)
    for thread in source.threads:
        thread.call(later(thread.engine.lend, params), 10.0)
    return params


def check_refused(tmp_path: Path, prefill: Side, decode: Side, match: str) -> None:
    """The two sides' memories do not fit, and the message says why."""
    chosen = random.Random(1)
    with engines(tmp_path, prefill, decode) as (source, target):
        theirs, ours = source.blocks(chosen, 100, 0), target.blocks(chosen, 100, 0)
        params, thread = lend(source, theirs, 100), target.threads[0]
        with pytest.raises(GeometryRefused, match=match):
            thread.call(thread.engine.pull("request", ours, params), 30.0)


async def later(function: Any, *args: Any) -> Any:
    return function(*args)


def one_rank(tmp_path: Path, layers: Layers) -> Planned:
    """The memory of an engine of one rank."""
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS)
    (planned,) = plan(config, [{n: x.spec(1) for n, x in layers.items()}])
    return planned


def fill(engine: Engine, rank: int, seed: int) -> None:
    storage = engine.storage(rank)
    generator = torch.Generator().manual_seed(1000 + seed)
    storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator))


def write(
    engine: Engine,
    rank: int,
    truths: Mapping[str, Any],
    blocks: Sequence[tuple[int, list[int | None]]],
    start: int,
    reads: tuple[Engine, int] | None,
) -> None:
    """Write a rank's share of the truth; what a pull fills (from another engine, so many tokens), or all of it."""
    planned = engine.ranks[rank]
    for index, group in enumerate(planned.config.kv_cache_groups):
        first, ids = blocks[index]
        for name in group.layer_names:
            layer = engine.layer(name, index)
            if isinstance(layer, Recurrent):
                block = ids[-1]
                assert block is not None
                layer.write(planned.tensors[name], truths[name], planned.place, block)
                continue
            size, begin = engine.size(index), start
            end = (first // size + len(ids)) * size
            if reads is not None:
                # Whole kernel blocks of both sides, as far as both have them.
                source, num_tokens = reads
                sizes = [
                    int(e.ranks[0].tensors[n].shape[2] * layer.tokens_per_state) for e, n in both(engine, source, name)
                ]
                # Where ranks share tokens, no others are read, unless only whole kernel blocks can be moved.
                if engine.side.dcp * source.side.dcp > 1 and not engine.side.facts:
                    sizes = [1]
                end = min(ceil(num_tokens / each) * each for each in sizes)
                if layer.window:
                    begin = max(begin, num_tokens - layer.window)
                    if sizes[0] == sizes[1]:
                        begin -= begin % sizes[0]
                    begin = max(begin, start)
            layer.write(planned.tensors[name], truths[name], planned.place, ids, first, begin, end)


def both(engine: Engine, source: Engine, name: str) -> list[tuple[Any, str]]:
    @dataclass
    class One:
        ranks: list[Planned]

    return [(One([next(r for r in e.ranks if name in r.tensors)]), name) for e in (engine, source)]


def where_differs(engine: Engine, rank: int, expected: torch.Tensor) -> str:
    storage = engine.storage(rank)
    at = (storage != expected).nonzero().flatten()
    return f"rank {rank}: {len(at)} of {len(storage)} bytes differ, from {at[0].item()} to {at[-1].item()}"


DENSE = {f"model.layers.{i}.self_attn.attn": Attention() for i in range(3)}
MLA = {f"model.layers.{i}.self_attn.attn": Attention(head_size=48, is_mla=True) for i in range(3)}
WINDOWS = {f"model.layers.{i}.self_attn.attn": Attention(window=0 if i % 2 else 40) for i in range(4)}


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("layers", [DENSE, MLA, WINDOWS], ids=["dense", "mla", "windows"])
def test_attention_in_every_order(tmp_path: Path, layers: Layers, layout: str) -> None:
    check_moved(tmp_path, Side(layers, layout=layout), Side(layers, layout=layout))


LAYERS = [f"model.layers.{i}.mixer" for i in range(8)]


def hybrid(state: Recurrent, heads: int = 8, block_size: int = 64) -> Layers:
    """Two layers of attention, and four that keep states, in pages of one size."""
    page = max(block_size * heads * 2 * 16 * 2, 1)
    state = dataclasses.replace(state, page=page)
    return {
        name: Attention(heads=heads, block_size=block_size) if i % 3 == 2 else state
        for i, name in enumerate(LAYERS[:6])
    }


STATES = {
    "mamba1": mamba1(),
    "mamba2": mamba2(groups=4),
    "mamba2-one-group": mamba2(groups=1),
    "gdn": delta_net(),
    "kda": delta_net(k=8, v=8),
}


@pytest.mark.parametrize("first", [True, False], ids=["channels-first", "columns-first"])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize(("p", "d"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
def test_states_and_attention(tmp_path: Path, name: str, first: bool, p: int, d: int) -> None:
    def side(tp: int) -> Side:
        state = dataclasses.replace(STATES[name], is_dim_first=first)
        # Pages are as large as each rank's share of a block of attention.
        layers = {
            n: dataclasses.replace(x, page=64 * 8 // tp * 64) if isinstance(x, Recurrent) else x
            for n, x in hybrid(state).items()
        }
        return Side(layers, tp=tp, facts={"num_mamba_groups": 1 if "one" in name else 4})

    check_moved(tmp_path, side(p), side(d))


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_states_that_are_kept_at_every_block(tmp_path: Path, kind: str) -> None:
    layers = hybrid(dataclasses.replace(STATES[kind], mode="align", block_size=64))
    check_moved(tmp_path, Side(layers), Side(layers), cached=64)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (2, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BHLNC"])
def test_attention_on_other_numbers_of_ranks(tmp_path: Path, layout: str, p: int, d: int) -> None:
    check_moved(tmp_path, Side(DENSE, tp=p, layout=layout), Side(DENSE, tp=d, layout=layout))


@pytest.mark.parametrize(("p", "d"), [(4, 1), (1, 4), (4, 2), (2, 8), (4, 4)])
def test_fewer_heads_than_ranks(tmp_path: Path, p: int, d: int) -> None:
    layers = {n: Attention(heads=2) for n in LAYERS[:2]}
    check_moved(tmp_path, Side(layers, tp=p, kv_heads=2), Side(layers, tp=d, kv_heads=2))


def heads(*of_layers: int, window: int = 0) -> Layers:
    """Layers with these heads; the first ones have the window."""
    return {
        f"model.layers.{i}.self_attn.attn": Attention(heads=each, window=window if each == of_layers[0] else 0)
        for i, each in enumerate(of_layers)
    }


@pytest.mark.parametrize(
    ("layers", "said", "sizes"),
    [
        (heads(4, 4, 1, window=48), 4, [(1, 2), (2, 1), (2, 4)]),
        (heads(1, 2, 2), 1, [(1, 2), (2, 1), (4, 2)]),
        (heads(8, 8, 2, window=48), 8, [(2, 4), (4, 2), (8, 2)]),
        (heads(16, 4), 16, [(4, 8), (8, 4)]),
        (heads(4, 8), 4, [(8, 4), (4, 8), (8, 1)]),
        (heads(2, 2), 1, [(2, 4), (4, 2), (1, 4)]),
        (heads(4, 4), 2, [(8, 4), (4, 8)]),
        (heads(8, 8), 4, [(8, 4), (4, 8), (8, 8)]),
        (heads(8, 1), 128, [(8, 2), (2, 4)]),
    ],
    ids=["gemma", "mimo", "gemma-4", "16-and-4", "mimo-flash", "2-said-1", "4-said-2", "8-said-4", "draft-of-mla"],
)
def test_layers_whose_heads_the_configuration_does_not_say(
    tmp_path: Path, layers: Layers, said: int, sizes: Sequence[tuple[int, int]]
) -> None:
    # vLLM's own configuration wants heads that fit its ranks, so the facts say the number that a worker would get.
    for i, (p, d) in enumerate(sizes):
        prefill, decode = (Side(layers, tp=tp, facts={"num_kv_heads": said}) for tp in (p, d))
        check_moved(tmp_path / str(i), prefill, decode)


def test_latents_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    check_moved(tmp_path, Side(MLA, tp=2), Side(MLA, tp=4))


@pytest.mark.parametrize(("theirs", "ours"), [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC"), ("BLHNC", "LBHNC")])
def test_another_order_on_the_other_side(tmp_path: Path, theirs: str, ours: str) -> None:
    check_moved(tmp_path, Side(DENSE, layout=theirs), Side(DENSE, layout=ours))


def of_size(layers: Layers, block_size: int) -> Layers:
    return {n: dataclasses.replace(x, block_size=block_size) for n, x in layers.items()}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [((32, 16), (32, 16)), ((32, 16), (16, 16)), ((16, 16), (32, 16)), ((32, 32), (16, 16)), ((64, 16), (32, 32))],
    ids=str,
)
@pytest.mark.parametrize("cached", [0, 64])
def test_kernel_blocks(tmp_path: Path, theirs: tuple[int, int], ours: tuple[int, int], cached: int) -> None:
    prefill = Side(of_size(DENSE, theirs[0]), kernel_sizes=[theirs[1]])
    check_moved(tmp_path, prefill, Side(of_size(DENSE, ours[0]), kernel_sizes=[ours[1]]), cached=cached)


@pytest.mark.parametrize("cached", [16, 144])
def test_only_what_the_prefix_cache_lacks(tmp_path: Path, cached: int) -> None:
    check_moved(tmp_path, Side(WINDOWS), Side(WINDOWS, tp=2), cached=cached)


WHOLE = {**MLA, "model.layers.9.self_attn.attn": Attention(head_size=48, is_mla=True, more={"dcp_sharded": False})}


@pytest.mark.parametrize("cached", [0, 77])
@pytest.mark.parametrize(("theirs", "ours"), [((1, 1), (4, 2)), ((4, 1), (1, 1)), ((2, 16), (4, 1)), ((4, 4), (4, 8))])
@pytest.mark.parametrize("layers", [MLA, WHOLE, "mqa"], ids=["mla", "draft", "mqa"])
def test_tokens_that_ranks_share(
    tmp_path: Path, layers: Any, theirs: tuple[int, int], ours: tuple[int, int], cached: int
) -> None:
    layers = dict.fromkeys(LAYERS[:2], OTHERS["mqa"]) if layers == "mqa" else layers
    # vLLM says that a draft is whole only where others are not.
    alone = {n: dataclasses.replace(x, more={}) for n, x in layers.items()}
    sides = [
        Side(layers if dcp > 1 else alone, tp=dcp, dcp=dcp, interleave=run, kv_heads=1) for dcp, run in (theirs, ours)
    ]
    check_moved(tmp_path, sides[0], sides[1], cached=cached, clears=True)


@pytest.mark.parametrize("cached", [0, 70])
def test_tokens_that_ranks_share_in_kernel_blocks_and_stages(tmp_path: Path, cached: int) -> None:
    names, layers = list(MLA), of_size(MLA, 32)
    common: dict[str, Any] = {"tp": 4, "kernel_sizes": [16], "kv_heads": 1}
    here = Side(layers, dcp=2, pp=2, stages=[names[:1], names[1:]], **common)
    there = Side(layers, dcp=4, interleave=32, **common)
    check_moved(tmp_path / "there", there, here, cached=cached, clears=True)
    check_moved(tmp_path / "here", here, there, cached=cached, clears=True)


OTHERS: Mapping[str, Attention] = {
    "fp8": Attention(**FP8),
    "fp8-per-token-head": Attention(**PER_TOKEN_HEAD),
    "float8": Attention(dtype=torch.float8_e4m3fn),
    "values-narrower-than-keys": Attention(head_size=24, head_size_v=8),
    "float64": Attention(dtype=torch.float64),
    "mqa": Attention(heads=1),
    "sinks": Attention(kind=SinkFullAttentionSpec, more={"sink_len": 16}),
    "chunked": Attention(kind=ChunkedLocalAttentionSpec, more={"attention_chunk_size": 256}),
    "reference-windows": Attention(kind=RSWASpec, more={"rswa_window": 64}),
    "windows-kept-by-all": Attention(more={"sliding_window": 64}),
    "pooled": Attention(tokens_per_state=Fraction(1, 2)),
    "compressed": Attention(tokens_per_state=4, is_mla=True),
    "latent-fp8": Attention(is_mla=True, head_size=40, **FP8),
    "shards": Attention(heads=2, more={"max_tp_shards": 2}),
    "opaque-latent": Attention(is_mla=True, dtype=torch.uint8, more={"state_content_bytes": 656}),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1)])
def test_other_kinds_of_attention(tmp_path: Path, name: str, p: int, d: int) -> None:
    layers = dict.fromkeys(LAYERS[:3], OTHERS[name])
    heads = OTHERS[name].heads
    check_moved(tmp_path, Side(layers, tp=p, kv_heads=heads), Side(layers, tp=d, kv_heads=heads))


@pytest.mark.parametrize(("p", "d"), [(4, 2), (2, 8), (4, 1)])
def test_as_many_shares_as_a_layer_says(tmp_path: Path, p: int, d: int) -> None:
    layers = dict.fromkeys(LAYERS[:2], OTHERS["shards"])
    check_moved(tmp_path, Side(layers, tp=p), Side(layers, tp=d))


def test_layers_of_several_shapes_in_one_group(tmp_path: Path) -> None:
    layers = {n: Attention(head_size=16 if i % 2 else 32) for i, n in enumerate(LAYERS[:4])}
    check_moved(tmp_path, Side(layers), Side(layers, tp=2))


def test_layers_that_use_the_cache_of_another(tmp_path: Path) -> None:
    shared = {"model.layers.9.self_attn.attn": "model.layers.1.self_attn.attn"}
    check_moved(tmp_path, Side(DENSE, shared=shared), Side(DENSE, tp=2, shared=shared))


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    names = list(WINDOWS)
    stages = [names[:2], names[2:]]
    check_moved(tmp_path, Side(WINDOWS, pp=2, stages=stages), Side(WINDOWS, tp=2))
    check_moved(tmp_path, Side(WINDOWS, tp=2), Side(WINDOWS, pp=2, stages=stages))


def test_a_stage_without_any_layer_of_a_group(tmp_path: Path) -> None:
    names = list(WINDOWS)
    stages = [names[::2], names[1::2]]
    check_moved(tmp_path, Side(WINDOWS, pp=2, stages=stages), Side(WINDOWS, pp=2, stages=stages))
    check_moved(tmp_path, Side(WINDOWS, pp=2, stages=stages), Side(WINDOWS))


# -- equal ranks only, and what is refused -----------------------------------------------------------------


SLOTS = Attention(more={"num_head_slots": 2, "state_content_bytes": 8 * 16 * 2})
"""Keys and values in a plane each, with all heads of the rank side by side."""


@pytest.mark.parametrize("layout", ["LBHNC", "BHLNC"])
def test_planes_of_keys_and_values_move_between_equal_ranks(tmp_path: Path, layout: str) -> None:
    layers = {n: dataclasses.replace(SLOTS, heads=2) for n in LAYERS[:2]}
    check_moved(tmp_path, Side(layers, layout=layout), Side(layers, layout=layout))


def test_planes_of_keys_and_values_are_refused_to_unequal_ranks(tmp_path: Path) -> None:
    layers = dict.fromkeys(LAYERS[:2], SLOTS)
    check_refused(tmp_path, Side(layers), Side(layers, tp=2), "rank")


def test_a_state_of_unknown_structure_is_refused_to_unequal_ranks(tmp_path: Path) -> None:
    layers = hybrid(dataclasses.replace(STATES["mamba1"], kind="SHORT_CONV"))
    check_moved(tmp_path, Side(layers), Side(layers))
    check_refused(tmp_path, Side(layers), Side(layers, tp=2), "rank")


@pytest.mark.parametrize("is_known", [False, True])
def test_what_moves_between_equal_ranks_only_is_said_and_nothing_of_the_rest(
    tmp_path: Path, is_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = STATES["mamba1"] if is_known else dataclasses.replace(STATES["mamba1"], kind="SHORT_CONV")
    layers = hybrid(state)
    with caplog.at_level("INFO", "vllm.asynckv"):
        check_moved(tmp_path, Side(layers), Side(layers))
    said = [text for text in caplog.messages if "are moved whole" in text]
    assert bool(said) is not is_known
    for text in said:
        assert LAYERS[0] in text
        assert LAYERS[2] not in text  # attention
        assert "only between engines of tensor-parallel size 1" in text


def test_a_ring_moves_like_a_state(tmp_path: Path) -> None:
    page = 16 * 8 * 2 * 16 * 2
    ring = CircularBufferSpec(
        block_size=12, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, max_tp_shards=1, page_size_padded=page
    )
    (planned,) = plan(
        vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS), [{LAYERS[0]: ring, LAYERS[1]: Attention().spec(1)}]
    )
    layout = register(planned.config, planned.tensors, planned.place, ModelFacts()).layout
    view = next(view for view in layout.views if view.layer == LAYERS[0])
    group, (part,) = layout.groups[view.group], view.parts
    assert (group.kind, group.block_size, group.num_blocks) == ("state", ONE_PER_REQUEST, NUM_BLOCKS)
    assert part.axis == ""
    assert {dim.name: dim.size for dim in part.dims} == {"rank": 1, "row": 1, "slot": 12, "dim": 32}
    shape = Shape.of(vllm_config(tmp_path / "model"), planned.config)
    lists = tuple([KVCacheBlock(id) for id in ([5] if i == view.group else [1, 2])] for i in range(2))
    assert shape.missing(KVCacheBlocks(lists), 0, 30)[view.group] == (0, [5])


def test_a_wrong_number_of_groups_is_refused_to_unequal_ranks(tmp_path: Path) -> None:
    layers = hybrid(STATES["mamba2-one-group"])
    check_refused(tmp_path, Side(layers), Side(layers, tp=2), "conv_b")


@pytest.mark.parametrize(
    ("one", "match"),
    [(FP8, "remote .'kv fp8_per_tensor'."), ({"dtype": torch.float8_e5m2}, "local uint8, remote float8_e5m2")],
    ids=["mode", "dtype"],
)
def test_caches_of_other_precisions_do_not_meet(tmp_path: Path, one: dict[str, Any], match: str) -> None:
    ours, theirs = {LAYERS[0]: Attention(dtype=torch.uint8)}, {LAYERS[0]: Attention(**one)}
    check_refused(tmp_path, Side(theirs), Side(ours), match)


@pytest.mark.parametrize(("ours", "theirs"), [("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3"), ("fp8", "fp8_e5m2")])
def test_caches_of_both_formats_of_fp8_do_not_meet(tmp_path: Path, ours: str, theirs: str) -> None:
    """vLLM keeps both as uint8."""
    here, there = (Side({LAYERS[0]: Attention(**FP8)}, cache_dtype=name) for name in (ours, theirs))
    check_refused(tmp_path, here, there, "fp8_per_tensor")
    check_moved(tmp_path, here, here)


class Layer:
    """A layer object whose backend has a name."""

    def __init__(self, backend: str, isa: str) -> None:
        self._backend, self.isa = backend, isa

    def get_attn_backend(self) -> Any:
        return self

    def get_name(self) -> str:
        return self._backend


def test_blocks_with_an_order_of_their_own_move_whole(tmp_path: Path) -> None:
    ours, theirs = ({"layers": {n: Layer("CPU_ATTN", isa) for n in DENSE}} for isa in ("amx", "vec"))
    kernels: dict[str, Any] = {"kernel_sizes": [16]}
    big, small = of_size(DENSE, 32), DENSE
    check_moved(tmp_path, Side(big, facts=ours, **kernels), Side(small, facts=ours, tp=2, **kernels))
    check_refused(tmp_path, Side(big, facts=ours), Side(small, facts=ours), "slot")
    check_refused(tmp_path, Side(small, facts=ours), Side(small, facts=theirs), "CPU_ATTN vec")


def test_the_number_of_blocks_is_what_the_configuration_says(tmp_path: Path) -> None:
    planned = one_rank(tmp_path, DENSE)
    larger = {n: torch.zeros(2 * NUM_BLOCKS, *t.shape[1:], dtype=t.dtype) for n, t in planned.tensors.items()}
    layout = register(planned.config, larger, planned.place, ModelFacts()).layout
    assert [(g.num_blocks, g.ratio) for g in layout.groups] == [(NUM_BLOCKS, 1)]
    with pytest.raises(LayoutError, match=f"fewer than the {NUM_BLOCKS} declared"):
        register(planned.config, {n: t[:-1] for n, t in planned.tensors.items()}, planned.place, ModelFacts())


def test_what_cannot_be_moved_is_refused_by_name(tmp_path: Path) -> None:
    config = vllm_config(tmp_path / "model", num_blocks=NUM_BLOCKS)
    (planned,) = plan(config, [{n: x.spec(1) for n, x in DENSE.items()}])
    with pytest.raises(ConfigError, match="no tensor"):
        register(planned.config, {}, planned.place, ModelFacts())
    nothing = copy.deepcopy(planned.config)
    nothing.kv_cache_groups[0].layer_names = []
    with pytest.raises(ConfigError, match=r"stage 1 of 2 .*--pipeline-parallel-size"):
        register(nothing, {}, Place(0, 1, 1, 2), ModelFacts())
    name = next(iter(DENSE))
    with pytest.raises(ConfigError, match=f"{name}.*shape"):
        register(planned.config, {n: t.flatten(0, 1) for n, t in planned.tensors.items()}, planned.place, ModelFacts())
    group = planned.config.kv_cache_groups[0]
    group.kv_cache_spec = CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=16, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="encoder"):
        check_supported(config, planned.config)
    group.kv_cache_spec = KVCacheSpec(block_size=16)
    with pytest.raises(ConfigError, match="kind KVCacheSpec"):
        check_supported(config, planned.config)
    group.host_resident = True
    with pytest.raises(ConfigError, match=f"{name}.*host memory.*hisparse_config"):
        check_supported(config, planned.config)
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match="--prefill-context-parallel-size 2"):
        check_supported(config, planned.config)


def test_ranks_share_blocks_with_an_order_of_their_own_by_whole_kernel_blocks(tmp_path: Path) -> None:
    facts = {"layers": {n: Layer("SPARSE", "of_gpu") for n in MLA}}
    big = of_size(MLA, 32)

    def side(dcp: int, interleave: int, kernel: int = 16) -> Side:
        given = {"tp": dcp, "dcp": dcp, "interleave": interleave, "kv_heads": 1, "kernel_sizes": [kernel]}
        return Side(big, facts=facts, **given)  # type: ignore[arg-type]

    check_moved(tmp_path / "same", side(2, 32), side(4, 16), num_tokens=155)
    check_moved(tmp_path / "more", side(4, 16), side(2, 16), num_tokens=155, cached=64)
    check_refused(tmp_path, side(2, 32, 32), side(2, 32), "tokens_per_entry")
    check_refused(tmp_path, side(1, 1), side(2, 32), "slot")
    with pytest.raises(ConfigError, match=r"SPARSE of_gpu.*tokens of 2 ranks.*--cp-kv-cache-interleave-size \(now 8\)"):
        check_moved(tmp_path, side(2, 8), side(2, 32))


def test_groups_that_are_not_for_transfers_are_not_counted(tmp_path: Path) -> None:
    planned = one_rank(tmp_path, WINDOWS)
    layouts = []
    for _ in range(2):
        layouts.append(register(planned.config, planned.tensors, planned.place, ModelFacts()).layout)
        planned.config.kv_cache_groups[0].enable_kv_transfer = False
        for cached in ("transfer_group_ids", "transfer_groups"):
            planned.config.__dict__.pop(cached, None)
    assert [len(each.groups) for each in layouts] == [2, 1]
    assert {view.group for view in layouts[1].views} == {0}


@pytest.mark.parametrize(
    ("kind", "conv", "state", "fits"),
    [
        # A gated delta net's channels are q, k and v: of 8 x 16 values, and twice as many keys.
        ("gdn_attn", (130, 3), (8, 16, 16), True),
        ("gdn_attn", (129, 3), (8, 16, 16), False),
        ("gdn_attn", (128, 3), (8, 16, 16), False),
        ("gdn_attn", (127, 3), (8, 16, 16), False),
        ("gdn_attn", (64, 3), (8, 16, 16), False),
        # Those of Mamba-2 are x, and B and C of as many states per group.
        ("mamba2", (160, 3), (8, 16, 16), True),
        ("mamba2", (144, 3), (8, 16, 16), False),
        ("mamba2", (96, 3), (8, 16, 16), False),
        ("mamba1", (8, 3), (8, 16), True),
        ("mamba1", (9, 3), (8, 16), False),
        ("mamba1", (8, 3, 1), (8, 16), False),
    ],
)
def test_states_are_cut_only_where_their_sizes_add_up(
    kind: str, conv: tuple[int, ...], state: tuple[int, ...], fits: bool
) -> None:
    dtypes, pages = (torch.bfloat16, torch.float32), torch.zeros(2, 1, 1, 1 << 14, dtype=torch.uint8)
    found = caches.states("layer", kind, [conv, state], dtypes, True, 1, pages, 0, Place())
    assert (found is not None) == fits
    if found is None:
        return
    slices = [(x.tensor.storage_offset() // conv[1], x.tensor.shape[1]) for x in found if x.name.startswith("conv")]
    assert [first for first, _ in slices] == [sum(size for _, size in slices[:i]) for i in range(len(slices))]
    assert sum(size for _, size in slices) == conv[0]
    assert all(size > 0 for _, size in slices)


# -- tails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "kernel"), [("LBHNC", 16), ("LBHNC", 64), ("BHLNC", 64)])
def test_tokens_that_were_not_filled_are_zeroed_where_vllm_relies_on_it(
    tmp_path: Path, layout: str, kernel: int
) -> None:
    layers = hybrid(STATES["mamba2"])
    config = vllm_config(tmp_path / "model", layout=layout, block_size=64, num_blocks=NUM_BLOCKS, mamba_mode="none")
    (planned,) = plan(config, [{n: x.spec(1) for n, x in layers.items()}])
    groups = planned.config.kv_cache_groups
    sizes = [kernel if isinstance(layers[g.layer_names[0]], Attention) else 512 for g in groups]
    (planned,) = plan(config, [{n: x.spec(1) for n, x in layers.items()}], sizes)
    assert planned.config.needs_kv_cache_zeroing
    storage = torch.tensor([], dtype=torch.uint8).set_(next(iter(planned.tensors.values())).untyped_storage())
    storage.fill_(7)
    index = next(i for i, g in enumerate(groups) if isinstance(layers[g.layer_names[0]], Attention))
    tails = Tails.of(planned.config, planned.tensors, ModelFacts())
    tails.clear([Padding(index, 5, 21, 43), Padding(index, 9, 0, 64)])
    expected = storage.clone().fill_(7)
    want = {n: t.as_strided(t.shape, t.stride(), t.storage_offset()) for n, t in planned.tensors.items()}
    zeroed = storage.clone()
    storage.copy_(expected)
    for name in groups[index].layer_names:
        nothing = torch.zeros(64, 8, 64, dtype=torch.uint8)
        layers[name].write(want[name], nothing, planned.place, [5], 0, 21, 64)  # type: ignore[call-arg, arg-type]
        layers[name].write(want[name], nothing, planned.place, [9], 0, 0, 64)  # type: ignore[call-arg, arg-type]
    assert torch.equal(storage, zeroed)
    assert int((storage == 0).sum()) == 2 * (43 + 64) * 8 * 64


def test_plain_attention_needs_no_zeroed_tails(tmp_path: Path) -> None:
    planned = one_rank(tmp_path, DENSE)
    before = {n: t.fill_(1.0).clone() for n, t in planned.tensors.items()}
    Tails.of(planned.config, planned.tensors, ModelFacts()).clear([Padding(0, 5, 3, 13)])
    assert all(torch.equal(before[n], t) for n, t in planned.tensors.items())
