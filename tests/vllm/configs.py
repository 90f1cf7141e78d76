"""vLLM's configuration of a model that consists of a `config.json`: for engines, schedulers and workers of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 30_000,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A small model of attention alone."""


def config_of(
    folder: Path | str,
    cache: CacheConfig,
    *,
    max_len: int,
    max_seqs: int,
    max_batched: int,
    asynchronous: bool = False,
    drafts: int | None = None,
    **more: Any,
) -> VllmConfig:
    """Make the configuration of an engine without a device; `more` are further parts of it."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=max_len
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_batched,
            max_model_len=max_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
            disable_hybrid_kv_cache_manager=False,
        ),
        device_config=DeviceConfig("cpu"),
        speculative_config=SpeculativeConfig(model="ngram", num_speculative_tokens=drafts) if drafts else None,
        **more,
    )
    # On CPUs vLLM switches this off, whatever was asked for.
    config.scheduler_config.async_scheduling = asynchronous
    return config
