"""Every kind of cache that vLLM makes, between two engines over real NIXL, and every byte compared with an oracle."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckv import EngineConfig, PrefillGroup
from asynckv.embed import EngineThread
from asynckv.integrations.vllm.memory import ModelFacts, has_nothing, register
from tests.vllm.keeps import Attention, Recurrent
from tests.vllm.planned import Planned, plan, vllm_config

Layers = Mapping[str, Attention | Recurrent]

NUM_BLOCKS = 120


@dataclass
class Side:
    """One engine's memory, as it was started."""

    layers: Layers
    tp: int = 1
    pp: int = 1
    layout: str = "LBHNC"
    kernel_sizes: Sequence[int] | None = None
    kv_heads: int = 8
    stages: Sequence[Sequence[str]] | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
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
            num_blocks=NUM_BLOCKS,
            mamba_mode=states[0].mode if states else None,
            num_key_value_heads=side.kv_heads,
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
            assert not has_nothing(registration.layout)

    def group_of(self, layer: str) -> int:
        return next(i for r in self.ranks for i, g in enumerate(r.config.kv_cache_groups) if layer in g.layer_names)

    def storage(self, rank: int) -> torch.Tensor:
        """All bytes of a rank."""
        storage = next(iter(self.ranks[rank].tensors.values())).untyped_storage()
        return torch.tensor([], dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]

    def size(self, group: int) -> int:
        """Tokens per block of a group; 0 for one state per request."""
        layer = self.kind(group)
        return 0 if isinstance(layer, Recurrent) and layer.mode == "none" else layer.block_size

    def kind(self, group: int) -> Attention | Recurrent:
        return next(self.side.layers[n] for r in self.ranks for n in r.config.kv_cache_groups[group].layer_names)

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
                ids = [None] * (len(ids) - 1) + ids[-1:]
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


def check_moved(tmp_path: Path, prefill: Side, decode: Side, num_tokens: int = 150, cached: int = 0) -> None:
    """Lend a request, pull it on all ranks, and compare every byte of their memories with what it should be."""
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
            expected.append(target.storage(rank).clone())
            target.storage(rank).copy_(before)
        group = PrefillGroup(
            "prefill",
            [thread.engine.endpoint for thread in source.threads],
            tp_size=prefill.tp,
            pp_size=prefill.pp,
            null_block=0,
        )
        params = group.make_params("request", theirs, num_tokens=num_tokens, written=True)
        for thread in source.threads:
            thread.call(later(thread.engine.lend, params), 10.0)
        for rank, thread in enumerate(target.threads):
            result = thread.call(thread.engine.pull("request", ours, params), 30.0)
            assert result.num_tokens == num_tokens
            same = torch.equal(target.storage(rank), expected[rank])
            assert same, where_differs(target, rank, expected[rank])


async def later(function: Any, *args: Any) -> Any:
    return function(*args)


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
            layer = engine.side.layers[name]
            if isinstance(layer, Recurrent):
                block = ids[-1]
                assert block is not None
                layer.write(planned.tensors[name], truths[name], planned.place, block)
                continue
            size, begin = layer.block_size, start
            end = (first // size + len(ids)) * size
            if reads is not None:
                # Whole kernel blocks of both sides, as far as both have them.
                source, num_tokens = reads
                sizes = [
                    int(e.ranks[0].tensors[n].shape[2] * layer.tokens_per_state) for e, n in both(engine, source, name)
                ]
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
