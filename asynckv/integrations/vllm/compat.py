"""All that the connector knows of vLLM by name and that is private, or moves from one of its versions to the next.

Each name is looked up here, once. What the connector can do without has a stand-in (`STAND_INS`), and a warning
(`options.remarks`). A guess that could move wrong bytes is never made: a missing field that tells prompts apart, or
says where or what bytes are, is refused by name, and so is an unknown kind of cache (`is_known`).
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
"""The other kinds of cache that are known: a vLLM that lacks one has no such model, or calls it by another name."""

NAMES: Mapping[str, str] = {
    f"{_KV}.factory": "KVConnectorFactory",
    f"{_KV}.v1.base": (
        "KVConnectorBase_V1 KVConnectorHandshakeMetadata KVConnectorMetadata KVConnectorRole "
        "KVConnectorTransferResults SupportsHMA"
    ),
    f"{_KV}.v1.metrics": "KVConnectorPromMetrics KVConnectorStats",
    f"{_KV}.v1.multi_connector": "MultiConnector",
    "vllm.config": "KVTransferConfig",
    "vllm.distributed": "parallel_state",
    "vllm.model_executor.layers.attention": "Attention MLAAttention",
    "vllm.model_executor.layers.mamba.mamba_utils": "is_conv_state_dim_first",
    "vllm.platforms": "current_platform",
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
"""What is taken from which module of vLLM; the last four are for offloading alone."""


class Absent: ...


STAND_INS: Mapping[str, Any] = {
    **dict.fromkeys(["Attention", "MLAAttention", "SupportsHMA", *RARE_SPECS.split()], Absent),
    **dict.fromkeys(["KVConnectorHandshakeMetadata", "KVConnectorStats", "KVConnectorPromMetrics"], Absent),
    **dict.fromkeys(["CacheHitSource", "KVConnectorFactory", "current_platform", "parallel_state"]),
    "is_conv_state_dim_first": lambda: None,
}
"""What takes the place of a name that is missing. A name without one ends the start, with an error that says so."""

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
    """Return fields for which there is no stand-in, or raise `ConfigError`."""
    if absent := [name for name in names if not hasattr(given, name)]:
        raise ConfigError(
            f"{of} of vLLM {version()} have no {' and no '.join(absent)}, so that nothing shows {what}; use a version "
            f"of vLLM that asynckv was tested with"
        )
    return [getattr(given, name) for name in names]


def transfer_group_ids(config: Any) -> tuple[int, ...]:
    """Return the cache groups that are transferred; all where vLLM does not tell them apart."""
    ids = getattr(config, "transfer_group_ids", None)
    return tuple(range(len(config.kv_cache_groups)) if ids is None else ids)


def transfer_groups(config: Any) -> list[Any]:
    return [config.kv_cache_groups[index] for index in transfer_group_ids(config)]


def tells_of_sleep() -> bool:
    """Say whether vLLM tells a connector that its memory goes, as it does from 0.33 on."""
    return hasattr(__getattr__("KVConnectorBase_V1"), "unregister_kv_caches")


def is_known(spec: Any) -> bool:
    """Say whether a layer's cache is of a known kind; whatever derives from one of them is another."""
    return type(spec) in map(__getattr__, f"{SPECS} {RARE_SPECS}".split())


def layer_specs(group: Any) -> Mapping[str, Any]:
    spec = group.kv_cache_spec
    if (each := getattr(spec, "kv_cache_specs", None)) is not None:
        return {layer: each[layer] for layer in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def quantisation(spec: Any) -> str:
    (mode,) = needed("caches", spec, ("kv_quant_mode",), "how their bytes are quantised")
    return "" if mode.name == "NONE" else str(mode.name).lower()


def is_by_token(layer: Any, spec: Any) -> bool:
    """Say whether an attention layer keeps an entry of every token by itself, in the order of tokens.

    Kernels do if they take tokens outside of heads, or any order of both. Kernels that want the tokens of a head
    together may have an order of their own, and so may sparse attention and whatever is no common layer of attention.
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
    """Return what a request's KV depends on besides its tokens (`IDENTITY`)."""
    return needed("requests", request, IDENTITY, "which prompt KV is of")


def num_received(request: Any) -> int:
    """Count the tokens of a request whose KV is in its blocks: a step under way may write beyond them."""
    (in_flight,) = needed("requests", request, ("num_in_flight_tokens",), "which tokens are still written")
    return int(min(request.num_computed_tokens - in_flight, request.num_tokens))
