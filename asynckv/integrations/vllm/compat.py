"""All names of vLLM that are private, or that change between its versions.

Each name is looked up here, once. Optional names have a stand-in (`STAND_INS`), and a warning names those that are
missing (`options.remarks`). Nothing is guessed that could move wrong bytes. So a missing field that tells prompts
apart, or gives the place or meaning of bytes, is refused by name, and so is an unknown kind of cache (`is_known`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from asynckv.errors import ConfigError

_KV = "vllm.distributed.kv_transfer.kv_connector"
SPECS = "FullAttentionSpec MambaSpec MLAAttentionSpec SlidingWindowSpec"
RARE_SPECS = (
    "ChunkedLocalAttentionSpec CircularBufferSpec EncoderOnlyAttentionSpec HiddenStateCacheSpec RSWASpec "
    "SinkFullAttentionSpec SlidingWindowMLASpec"
)
"""Other known kinds of cache. A vLLM that lacks one has no such model, or another name for the kind."""

NAMES: Mapping[str, str] = {
    f"{_KV}.factory": "KVConnectorFactory",
    f"{_KV}.v1.base": (
        "KVConnectorBase_V1 KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorRole "
        "KVConnectorTransferResults KVConnectorWorkerMetadata SupportsHMA"
    ),
    f"{_KV}.v1.metrics": "KVConnectorPromMetrics KVConnectorStats",
    f"{_KV}.v1.multi_connector": "MultiConnector",
    "vllm.config": "KVTransferConfig VllmConfig",
    "vllm.distributed": "parallel_state",
    "vllm.model_executor.layers.attention": "Attention MLAAttention",
    "vllm.model_executor.layers.mamba.mamba_utils": "is_conv_state_dim_first",
    "vllm.platforms": "current_platform",
    "vllm.v1.executor": "Executor",
    "vllm.v1.metrics.cache_hit_source": "CacheHitSource",
    "vllm.v1.kv_cache_interface": f"AttentionSpec {SPECS} {RARE_SPECS}",
    f"{_KV}.v1.offloading.metrics": "OffloadingConnectorStats",
    "vllm.v1.kv_offload.base": (
        "CanonicalKVCaches GPULoadStoreSpec LoadStoreSpec Locality LookupResult Medium OffloadingCounterMetadata "
        "OffloadingEvent OffloadingGaugeMetadata OffloadingManager OffloadingMetricMetadata OffloadingSpec "
        "OffloadingWorker OffloadKey PrepareStoreOutput ReqContext RequestOffloadingContext ScheduleEndContext "
        "TransferResult get_offload_group_idx"
    ),
    "vllm.v1.kv_offload.config": "OffloadingConfig",
    "vllm.v1.kv_offload.cpu.common": "CPULoadStoreSpec",
}
"""The names that are taken from each module of vLLM; the last four are for offloading alone."""


class Absent: ...


STAND_INS: Mapping[str, Any] = {
    **dict.fromkeys(
        ["Attention", "Executor", "MLAAttention", "SupportsHMA", "VllmConfig", *RARE_SPECS.split()], Absent
    ),
    **dict.fromkeys(["KVConnectorHandshakeMetadata", "KVConnectorStats", "KVConnectorPromMetrics"], Absent),
    "KVConnectorWorkerMetadata": Absent,
    **dict.fromkeys(["CacheHitSource", "KVConnectorFactory", "current_platform", "parallel_state"]),
    "is_conv_state_dim_first": lambda: None,
}
"""Replacements for missing names. A missing name without a replacement ends the start with an error."""

_MODULES = {name: module for module, names in NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in globals():
        return globals()[name]
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(_MODULES[name]), name)
    except (ImportError, AttributeError) as exc:
        if name not in STAND_INS:
            raise ImportError(
                f"vLLM {version()} has no {name} in {_MODULES[name]}, and asynckv cannot do without it; use a "
                f"version of vLLM that asynckv was tested with"
            ) from exc
        found = STAND_INS[name]
    globals()[name] = found
    return found


def lacking() -> list[str]:
    return [name for name, other in STAND_INS.items() if __getattr__(name) is other]


def version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of an unknown version"))


def needed(of: str, given: Any, names: Sequence[str], what: str) -> list[Any]:
    """Return required fields, or raise `ConfigError` for those that are missing."""
    if absent := [name for name in names if not hasattr(given, name)]:
        raise ConfigError(
            f"{of} of vLLM {version()} have no {' and no '.join(absent)}, so that nothing shows {what}; use a version "
            f"of vLLM that asynckv was tested with"
        )
    return [getattr(given, name) for name in names]


def transfer_group_ids(config: Any) -> tuple[int, ...]:
    """Return the cache groups that are transferred; all if vLLM does not name them."""
    ids = getattr(config, "transfer_group_ids", None)
    return tuple(range(len(config.kv_cache_groups)) if ids is None else ids)


def transfer_groups(config: Any) -> list[Any]:
    return [config.kv_cache_groups[index] for index in transfer_group_ids(config)]


def calls(hook: str) -> bool:
    """Return True if this vLLM calls a hook of its connectors."""
    return hasattr(__getattr__("KVConnectorBase_V1"), hook)


def runs_late(vllm_config: Any) -> bool:
    """Return True for vLLM's second runner, which zeroes and copies blocks before it calls `handle_preemptions`."""
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def copies_blocks(step: Any) -> bool:
    return bool(getattr(step, "kv_cache_block_copies", None))


def zeroes_blocks(kv_cache_config: Any) -> bool:
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True))


def holds_drafts(vllm_config: Any, kv_cache_config: Any, index: int) -> bool:
    """Return True unless a group is known to hold nothing of a drafter: vLLM marks groups only for some drafters."""
    marks = [getattr(group, "is_eagle_group", False) for group in kv_cache_config.kv_cache_groups]
    return vllm_config.speculative_config is not None and (marks[index] or not any(marks))


def is_known(spec: Any) -> bool:
    """Return True if a layer's cache is exactly of a known kind; a subclass may lay out its bytes differently."""
    return type(spec) in map(__getattr__, f"{SPECS} {RARE_SPECS}".split())


def layer_specs(group: Any) -> Mapping[str, Any]:
    spec = group.kv_cache_spec
    if (each := getattr(spec, "kv_cache_specs", None)) is not None:
        return {layer: each[layer] for layer in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def num_token_shards(spec: Any, dcp_size: int) -> int:
    """Return the number of ranks that share the tokens of a group's blocks, out of the engine's `dcp_size`."""
    if dcp_size == 1:
        return 1
    (is_shared,) = needed("caches", spec, ("dcp_sharded",), "whether ranks share their tokens")
    return dcp_size if is_shared else 1


def quantisation(spec: Any) -> str:
    (mode,) = needed("caches", spec, ("kv_quant_mode",), "how their bytes are quantised")
    return "" if mode.name == "NONE" else str(mode.name).lower()


def is_by_token(layer: Any, spec: Any) -> bool:
    """Return True if an attention layer keeps one entry per token, in the order of tokens.

    Kernels that take tokens outside of heads, or any order of both, do. Kernels that want the tokens of a head together
    may have an order of their own, and so may sparse attention and unusual layers of attention.
    """
    backend = layer.get_attn_backend()
    is_common = isinstance(layer, (__getattr__("Attention"), __getattr__("MLAAttention")))
    if not is_common or getattr(spec, "model_version", None) is not None or backend.is_sparse():
        return False
    if (supported := getattr(backend, "supported_kv_cache_layouts", None)) is None:
        return False
    orders = supported()
    return orders is None or any(getattr(order, "name", str(order)).endswith("NHC") for order in orders)


IDENTITY = ("lora_request", "cache_salt", "mm_features", "prompt_embeds", "prompt_is_token_ids")


def identity(request: Any) -> list[Any]:
    """Return the fields besides the tokens on which a request's KV depends (`IDENTITY`)."""
    return needed("requests", request, IDENTITY, "which prompt KV is of")


def num_received(request: Any) -> int:
    """Return how many of a request's tokens have their KV in its blocks; a running step may write beyond them."""
    (in_flight,) = needed("requests", request, ("num_in_flight_tokens",), "which tokens are still written")
    return int(min(request.num_computed_tokens - in_flight, request.num_tokens))
