"""The options of `kv_connector_extra_config` for `OffloadingConnector` with asynckv's spec; others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asynckv.config import OffloadConfig
from asynckv.errors import ConfigError
from asynckv.integrations.vllm.options import WHERE, WORDS, made, refuse_unknown

OURS = ("host_bytes", "directory", "file_bytes", "policy", "timeout_s", "model")
"""Fields of `OffloadConfig` that mean the same here."""

THEIRS = (
    *("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only"),
    *("sync_load_budget_bytes", "self_describing_kv_events"),
)
"""Options that vLLM's connector reads with any spec."""

OF_OTHER_SPECS: Mapping[str, str] = WORDS["of_other_specs"]
"""Options of vLLM's own specs, and their replacements."""


def parse(given: Mapping[str, Any], model: str, hash_tokens: int) -> OffloadConfig:
    """Parse the user's options; `model` is the default for the option of that name."""
    for name in given:
        if name in OF_OTHER_SPECS and (name != "canonical_layout" or given[name]):
            raise ConfigError(f"{WHERE}.{name} is an option of vLLM's own offloading specs; {OF_OTHER_SPECS[name]}")
    refuse_unknown(WHERE, [name for name in given if name != "canonical_layout"], sorted((*OURS, *THEIRS)))
    if "host_bytes" not in given:
        raise ConfigError(f"{WHERE} lacks host_bytes: the host memory for blocks of all ranks together")
    values = {name: given[name] for name in OURS if name in given}
    config: OffloadConfig = made(WHERE, OffloadConfig, {"model": model, **values, "hash_tokens": hash_tokens})
    return config
