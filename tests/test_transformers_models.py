"""Every causal configuration of transformers, read as vLLM's convertors read it, or refused by a field's name.

The expectations come from transformers' own configuration objects and from the rules of vLLM's
`model_arch_config_convertor.py`, and not from `models.toml`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from asynckv.errors import ConfigError
from asynckv.tools.plan.models import Heads, Latent, Layer, State, model_of_config

pytestmark = pytest.mark.slow

KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
# The model types of transformers for which vLLM keeps latents. It does not serve Youtu itself.
LATENT = {
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "longcat_flash",
    "youtu",
}
# Nothing but states, with the states of Falcon-H1 before its heads.
STATES = {"mamba", "mamba2", "falcon_mamba"}
REFUSED = {
    *("axk2", "bailing_hybrid", "blt", "deepseek_v4", "dots3_note", "dots3_note_text"),
    *("gemma4_unified_assistant", "glm4_moe", "gpt_neo", "hy_v4", "inkling2_text", "inkling_text", "lfm2", "lfm2_moe"),
    *("lfm3", "minimax", "mllama", "olmo_hybrid", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer"),
    *("rwkv", "trocr", "xlm", "xlnet", "xlstm", "zamba", "zamba2", "zaya"),
    # with encoders
    *("bart", "bert", "bigbird_pegasus", "blenderbot", "blenderbot-small", "electra", "marian", "mbart", "musicgen"),
    *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "roberta", "whisper", "xlm-roberta"),
}


@functools.cache
def configs() -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # Gemma 4's assistant has no configuration without its target's.
    names = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name != "gemma4_assistant"]
    return {name: CONFIG_MAPPING[name]() for name in names}


@functools.cache
def found(name: str) -> tuple[Layer, ...] | str:
    try:
        return model_of_config(configs()[name].to_dict(), name).layers
    except ConfigError as exc:
        return str(exc)


def kinds(text: Any) -> list[str]:
    names = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if text.model_type in STATES:
        return ["linear_attention"] * text.num_hidden_layers
    if text.model_type == "falcon_h1":
        return ["full_attention", "linear_attention"] * text.num_hidden_layers
    return names or ["attention"] * text.num_hidden_layers


def heads_and_size(text: Any, kind: str) -> tuple[int, int]:
    """Return the KV heads and the size of a head that vLLM keeps for a layer with this configuration."""
    if text.model_type in LATENT:
        return 1, text.kv_lora_rank + text.qk_rope_head_dim
    heads = next((getattr(text, name) for name in KV_HEADS if hasattr(text, name)), None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    match text.model_type:
        case "falcon" if text.multi_query and not text.new_decoder_architecture:
            heads = 1
        case "gpt_bigcode" if text.multi_query:
            heads = 1
        case "dbrx":
            heads = text.attn_config.kv_n_heads
        case "mimo_v2_flash" if kind == "sliding_attention":
            heads *= 2  # in the model's own code
        case "minicpm3":
            size = text.qk_nope_head_dim + text.qk_rope_head_dim  # in vLLM's own code
        case _:
            pass
    return heads, size


def expected(name: str) -> Iterator[tuple[str, int, int]]:
    text = configs()[name].get_text_config(decoder=True)
    names = kinds(text)
    if name == "longcat_flash":
        names = ["attention"] * (2 * text.num_layers)
    for number, kind in enumerate(names[: len(names) - (getattr(text, "num_kv_shared_layers", 0) or 0)]):
        if kind in ("linear_attention", "mamba"):
            yield "state", 0, 0
        elif kind not in ("mlp", "moe"):
            layer = text.per_layer_config[number] if getattr(text, "is_heterogeneous", False) else text
            near = "near" if kind in ("sliding_attention", "chunked_attention") else "far"
            yield (near if "_" in kind else ""), *heads_and_size(layer, kind)


def told(name: str, layer: Layer) -> tuple[str, int, int]:
    if isinstance(layer, State):
        return "state", 0, 0
    window = (
        ("near" if layer.window else "far") if "_" in kinds(configs()[name].get_text_config(decoder=True))[0] else ""
    )
    return (
        (window, layer.num_heads, layer.head_dim)
        if isinstance(layer, Heads)
        else (window, 1, layer.rank + layer.rope_dim)
    )


def test_every_configuration_is_read_as_vllm_reads_it_or_refused_by_a_fields_name() -> None:
    differ, refused = [], set()
    for name, config in configs().items():
        layers = found(name)
        if isinstance(layers, str):
            fields = {"model_type", "head_dim", "num_hidden_layers", "num_attention_heads", "hidden_size"}
            fields |= config.to_dict().keys() | config.get_text_config(decoder=True).to_dict().keys()
            assert any(field in layers for field in fields), layers
            refused.add(name)
        elif [told(name, layer) for layer in layers] != list(expected(name)):
            differ.append(name)
    print(f"{len(configs()) - len(refused) - len(differ)} are right, {len(refused)} are refused, {len(differ)} differ")
    assert not differ, [(n, found(n)[:2], list(expected(n))[:2]) for n in differ]
    assert refused == REFUSED


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_every_layer_of_these_has_an_index(name: str) -> None:
    layers = found(name)
    assert all(isinstance(x, Latent) and x.index is not None and x.index.dim == 128 for x in layers)
