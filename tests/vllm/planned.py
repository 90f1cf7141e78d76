"""KV caches as vLLM plans and allocates them, for tests: of ranks of one engine, in this process, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.utils import allocate_kv_cache

from asynckv.integrations.vllm.caches import Place
from tests.vllm.configs import LLAMA, config_of
from tests.vllm.versions import planned

MAX_LEN = 512


@dataclass
class Planned:
    """One rank's cache."""

    place: Place
    config: Any
    tensors: dict[str, torch.Tensor]


def vllm_config(
    folder: Path,
    *,
    layout: str = "LBHNC",
    block_size: int = 16,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    interleave: int = 1,
    num_blocks: int = 40,
    mamba_mode: str | None = None,
    cache_dtype: str = "auto",
    engine_id: str = "engine",
    **config: Any,
) -> Any:
    """Make vLLM's configuration of a model that consists of a `config.json`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": MAX_LEN} | config))
    cache = CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks, cache_dtype=cache_dtype)
    cache.kv_cache_layout = layout
    if mamba_mode is not None:
        cache.mamba_cache_mode = mamba_mode
        cache.mamba_block_size = block_size if mamba_mode == "align" else MAX_LEN
    return config_of(
        folder,
        cache,
        max_len=MAX_LEN,
        max_seqs=4,
        max_batched=MAX_LEN,
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=interleave,
            distributed_executor_backend="mp",
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="AsyncKVConnector",
            kv_connector_module_path="asynckv.integrations.vllm",
            kv_role="kv_both",
            engine_id=engine_id,
        ),
    )


def plan(
    config: Any,
    specs: Sequence[Mapping[str, KVCacheSpec]],
    kernel_sizes: Sequence[int] | None = None,
    shared: Mapping[str, str] | None = None,
) -> list[Planned]:
    """Plan and allocate the caches of an engine, of every worker's specifications: stages first, then ranks."""
    made = planned(config, specs, 1 << 40)
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shares = {"dcp_size": parallel.decode_context_parallel_size, "interleave": parallel.cp_kv_cache_interleave_size}
    out = []
    for rank, one in enumerate(made):
        sizes = list(kernel_sizes) if kernel_sizes is not None else None
        tensors = allocate_kv_cache(one, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), sizes)
        for alias, layer in (shared or {}).items():
            if layer in tensors:
                tensors[alias] = tensors[layer]
        out.append(Planned(Place(rank % tp, tp, rank // tp, pp, **shares), one, tensors))
    return out
