"""What models keep: presets, and what is believed of a config.json."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.check import check_layout
from asynckv.geometry.layout import ONE_PER_REQUEST, TokenShard
from asynckv.geometry.match import assign, compare, remote_ranks
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.tables import GroupPair
from asynckv.tools.plan import models
from asynckv.tools.plan.layouts import CONV_ORDERS, ORDERS, model_bytes, model_groups, model_layout, with_addresses
from asynckv.tools.plan.models import (
    PRESETS,
    Heads,
    Index,
    Latent,
    Layer,
    Model,
    Projection,
    State,
    dtype_named,
    model_of_config,
    preset,
    read_hf_config,
)
from scripts import disagg_generate
from tests.commands import python

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def config(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}))
    return path


def shape(model: Model) -> tuple[int, int, int, str]:
    [layer] = set(model.layers)
    assert isinstance(layer, Heads)
    return len(model.layers), layer.num_heads, layer.head_dim, model.dtype


def test_a_preset_is_found_in_any_case() -> None:
    assert preset("Llama-3.1-8B") is PRESETS["llama-3.1-8b"]
    assert {"llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b"} <= PRESETS.keys()


def test_an_unknown_model_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"'lama-3.1-8b' is unknown; did you mean llama-3.1-8b\?.*qwen3-32b"):
        preset("lama-3.1-8b")


def test_head_dim_and_kv_heads_fall_back(tmp_path: Path) -> None:
    assert shape(read_hf_config(config(tmp_path))) == (32, 8, 128, "bfloat16")
    assert shape(read_hf_config(config(tmp_path, num_key_value_heads=...))) == (32, 32, 128, "bfloat16")
    assert shape(read_hf_config(config(tmp_path, head_dim=64, dtype="float16"))) == (32, 8, 64, "float16")


def test_a_folder_and_a_nested_text_config_will_do(tmp_path: Path) -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "torch_dtype"} | {"model_type": "llama"}
    around = {"text_config": inner, "torch_dtype": "float16", "num_hidden_layers": 6, "head_dim": 3}
    (tmp_path / "config.json").write_text(json.dumps(around))
    assert shape(read_hf_config(tmp_path)) == (32, 8, 128, "float16")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers or n_layer or num_layers or n_layers is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"hidden_size": 4097}, "no multiple of 32"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"num_key_value_heads": 64}, "64 are more than the 32"),
        ({"sliding_window": 9, "layer_types": ["x"] * 32}, "layer_types has 'x'"),
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, "layer_types is not a list of 32"),
        ({"model_type": "rwkv9", "time_mix_extra": 3}, "'rwkv9' has time_mix_extra"),
        ({"model_type": "zamba9", "mamba_d_state": 3}, "'zamba9' has mamba_d_state"),
        ({"model_type": "mamba2"}, "num_heads is missing"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, "hybrid_override_pattern is 'M?', not"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, "mamba_num_heads is missing"),
        ({"num_hidden_layers": 5000}, "more than 4096"),
        ({"model_type": "mimo_v2_flash"}, "hybrid_layer_pattern and layer_types are missing"),
        ({"model_type": "mllama", "cross_attention_layers": [3]}, "'mllama' has cross_attention_layers"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "'gpt2' is not a decoder alone"),
        ({"text_config": {"model_type": "foo9_text", "num_hidden_layers": 2}}, "leaves num_key_value_heads to"),
        ({"text_config": {**LLAMA, "model_type": "foo9"}}, "leaves head_dim to the default"),
        ({"model_type": "hrm_text", "H_cycles": 2, "L_cycles": 3}, "'hrm' has H_cycles"),
        ({"model_type": "phi9", "token_mixer": "rwkv"}, "'phi9' has token_mixer"),
        ({"model_type": "phi9", "compressed_kv_norm": 5}, "'phi9' has compressed_kv_norm"),
        ({"model_type": "phi9", "mtp_kv_heads": 5}, "'phi9' has mtp_kv_heads"),
        ({"model_type": "iquestloopcoder"}, "'iquestloopcoder' has loop_num"),
        ({"num_hidden_layers": ..., "thinker": {"num_hidden_layers": 2}}, "; thinker has one"),
        (
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}},
            "quantization_config has the KV cache scheme",
        ),
        (
            {"model_type": "step3p5", "attention_other_setting": {"head_dim": 64}, "head_dim": 128},
            "has head_dim 64, not 128",
        ),
        ({"model_type": "bert"}, "'bert' is not a decoder alone"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is not a decoder alone"),
        ({"model_type": "llama9_text", "attention_chunk_size": 8192}, "'llama9' has attention_chunk_size"),
    ],
)
def test_a_wrong_config_names_file_and_field(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hf_config(config(tmp_path, **changes))
    assert "config.json" in str(caught.value)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_what_is_no_config_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: [^\n]+$"):
        read_hf_config(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_hf_config(tmp_path / "none.json")


def test_dtypes_have_short_names() -> None:
    assert [dtype_named(x) for x in ("bf16", "torch.float16", "FP8")] == ["bfloat16", "float16", "float8_e4m3fn"]


def kinds(**fields: Any) -> list[Any]:
    return list(model_of_config({**LLAMA, "num_hidden_layers": 8, **fields}, "m").layers)


FULL, NEAR = Heads(8, 128), Heads(8, 128, window=512)
# Families whose `head_dim` is a default of its own, not hidden_size / num_attention_heads.
WIDE, WIDE_NEAR = Heads(8, 256), Heads(8, 256, window=512)
MAMBA2 = {"state_size": 64, "n_groups": 2, "num_heads": 16, "head_dim": 32, "conv_kernel": 4}
TWO = State((Projection("x", 16, 32), Projection("b", 2, 64), Projection("c", 2, 64)), 3, 16, (32, 64))
TWO32 = State(TWO.conv, 3, 16, (32, 64), "float32")


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 512}, [NEAR] * 8),
        ({"model_type": "mistral", "sliding_window": None}, [FULL] * 8),
        ({"model_type": "qwen3", "sliding_window": 512, "use_sliding_window": False}, [FULL] * 8),
        (
            {"model_type": "qwen3", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 6},
            [FULL] * 6 + [NEAR] * 2,
        ),
        ({"model_type": "gemma2", "sliding_window": 512}, [WIDE_NEAR, WIDE] * 4),
        ({"model_type": "gemma3_text", "sliding_window": 512}, [WIDE_NEAR] * 5 + [WIDE] + [WIDE_NEAR] * 2),
        (
            {
                "model_type": "gpt_oss",
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"] * 4,
            },
            [Heads(8, 64, window=512), Heads(8, 64)] * 4,
        ),
        ({"model_type": "jetmoe", "kv_channels": 96}, [Heads(8, 96)] * 8),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, [Latent(512, 64)] * 8),
        ({"model_type": "falcon", "multi_query": True, "num_key_value_heads": None}, [Heads(1, 128)] * 8),
        ({"model_type": "mamba2", **MAMBA2}, [TWO] * 8),
        (
            {"model_type": "falcon_mamba", "intermediate_size": 512, "state_size": 16, "conv_kernel": 4},
            [State((Projection("x", 512, 1),), 3, 512, (16,))] * 8,
        ),
        (
            {
                "model_type": "jamba",
                "attn_layer_period": 4,
                "attn_layer_offset": 2,
                "mamba_expand": 2,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
            },
            [FULL if i % 4 == 2 else State((Projection("x", 8192, 1),), 3, 8192, (16,)) for i in range(8)],
        ),
        (
            {
                "model_type": "bamba",
                "attn_layer_indices": [1],
                "mamba_n_heads": 16,
                "mamba_d_head": 32,
                "mamba_n_groups": 2,
                "mamba_d_state": 64,
                "mamba_d_conv": 4,
            },
            [TWO, FULL, *[TWO] * 6],
        ),
        (
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M-M*-M",
                "mamba_num_heads": 16,
                "mamba_head_dim": 32,
                "n_groups": 2,
                "ssm_state_size": 64,
                "conv_kernel": 4,
            },
            [TWO32, TWO32, FULL, TWO32],
        ),
        (
            {
                "model_type": "qwen3_next",
                "num_hidden_layers": 4,
                "linear_num_key_heads": 4,
                "linear_key_head_dim": 8,
                "linear_num_value_heads": 8,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
            },
            [State((Projection("q", 4, 8), Projection("k", 4, 8), Projection("v", 8, 16)), 3, 8, (16, 8))] * 3 + [WIDE],
        ),
    ],
)
def test_every_family_says_what_its_layers_keep(fields: dict[str, Any], layers: list[Any]) -> None:
    assert kinds(**fields) == layers


KEYS = Index(128, "float8_e4m3fn", 1)
SPARSE = Heads(4, 128, index=Index(128, "bfloat16"))
# As the models' own files have these fields.
STEP: dict[str, Any] = {
    **{"model_type": "step3p5", "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128},
    **{"num_key_value_heads": None, "sliding_window": 512, "use_head_wise_attn_gate": True, "use_swa": True},
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96},
}
NEAR_THREE = ["full_attention", *["sliding_attention"] * 3] * 2
STEP["layer_types"] = NEAR_THREE
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
INDEXED = {**MLA, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
GEMMA = {
    **{"model_type": "gemma4_text", "head_dim": 256, "sliding_window": 512, "attention_k_eq_v": True},
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
MIMO = {
    **{"model_type": "mimo_v2_flash", "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128},
    **{"sliding_window": 128, "attention_chunk_size": 128, "attention_value_scale": 0.707},
    "add_swa_attention_sink_bias": True,
}
SWA = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 64, "swa_v_head_dim": 32}
M3 = {
    **{"use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16},
    **{"sparse_attention_freq": [0] * 3 + [1] * 5, "sparse_block_size": 128},
}
KIMI = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
KDA = State((Projection("q", 4, 8), Projection("k", 4, 8), Projection("v", 4, 8)), 3, 4, (8, 8), "float32")


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        (STEP, [Heads(8, 128), *[Heads(8, 128, window=512)] * 3] * 2),
        (
            {**STEP, "layer_types": [*NEAR_THREE, *["full_attention"] * 3], "num_nextn_predict_layers": 3},
            [Heads(8, 128), *[Heads(8, 128, window=512)] * 3] * 2,
        ),
        (
            {"model_type": "chatglm", "num_layers": 8, "num_hidden_layers": None, "num_key_value_heads": None}
            | {"multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128},
            [Heads(2, 128)] * 8,
        ),
        (
            {"model_type": "falcon", "n_head_kv": 8, "num_attention_heads": 128, "hidden_size": 8192}
            | {"num_key_value_heads": None, "new_decoder_architecture": True, "multi_query": True},
            [Heads(8, 64)] * 8,
        ),
        (
            {"model_type": "dbrx", "n_layers": 8, "n_heads": 48, "d_model": 6144, "num_attention_heads": None}
            | {"hidden_size": None, "num_key_value_heads": None, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}},
            [Heads(8, 128)] * 8,
        ),
        ({"model_type": "deepseek_v32", **INDEXED}, [Latent(512, 64, index=KEYS)] * 8),
        (
            {"model_type": "glm_moe_dsa", **INDEXED, "index_topk_freq": 4, "index_skip_topk_offset": 3}
            | {"indexer_types": [*["full"] * 3, *["shared"] * 3, "full", "shared"]},
            [Latent(512, 64, index=None if i in (3, 4, 5, 7) else KEYS) for i in range(8)],
        ),
        (
            {"model_type": "kimi_linear", **MLA, "num_key_value_heads": 32}
            | {"linear_attn_config": {**KIMI, "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]}},
            [KDA, KDA, KDA, Latent(512, 64)] * 2,
        ),
        (
            {
                "text_config": {**LLAMA, "model_type": "minimax_m3_text", "num_hidden_layers": 8, "head_dim": 128}
                | {"num_key_value_heads": 4, "sparse_attention_config": M3}
            },
            [Heads(4, 128)] * 3 + [SPARSE] * 5,
        ),
        (
            {**GEMMA, "global_head_dim": 512, "num_global_key_value_heads": 2, "num_kv_shared_layers": 2},
            [Heads(8, 256, window=512), Heads(2, 512)] * 3,
        ),
        (
            {**GEMMA, "per_layer_config": {f"0{i}": {"head_dim": 512, "num_key_value_heads": 2} for i in (1, 3, 5, 7)}},
            [Heads(8, 256, window=512), Heads(2, 512)] * 4,
        ),
        (
            {**MIMO, **SWA, "hybrid_layer_pattern": [0, 1, 1, 1] * 2, "sliding_window_size": 64},
            [Heads(4, 192, 128), *[Heads(8, 64, 32, window=64)] * 3] * 2,
        ),
        (
            {**MIMO, "layer_types": ["full_attention", "sliding_attention"] * 4},
            [Heads(4, 192, 128), Heads(8, 192, 128, window=128)] * 4,
        ),
        (
            {"model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0] * 2},
            [*[Heads(8, 128, window=64)] * 3, FULL] * 2,
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": None, "no_rope_layers": [1] * 8}, [FULL] * 8),
        ({"model_type": "llama4_text", "no_rope_layers": [1] * 8}, [Heads(8, 128, window=8192)] * 8),
        ({"model_type": "cohere2", "sliding_window": 64}, [*[Heads(8, 128, window=65)] * 3, FULL] * 2),
        (
            {**MIMO, "swa_head_dim": 64, "layer_types": ["full_attention", "sliding_attention"] * 4},
            [Heads(4, 192, 128), Heads(8, 64, window=128)] * 4,
        ),
        ({"model_type": "falcon", "multi_query": False, "num_key_value_heads": 4}, [Heads(32, 128)] * 8),
        ({"model_type": "mamba2", **MAMBA2, "mamba_ssm_dtype": "float32"}, [TWO] * 8),
        (
            {"model_type": "chatglm", "num_key_value_heads": None, "multi_query_group_num": 2}
            | {"multi_query_attention": False},
            [Heads(32, 128)] * 8,
        ),
        ({"model_type": "phi9", "multi_query": True, "num_key_value_heads": 4}, [Heads(4, 128)] * 8),
        ({"model_type": "phi9", "use_gqa": True, "num_key_value_heads": 4}, [Heads(4, 128)] * 8),
        ({"model_type": "minicpm3", **MLA, "num_key_value_heads": 32}, [Heads(32, 192)] * 8),
        ({"model_type": "longcat_flash", **MLA, "num_hidden_layers": None, "num_layers": 2}, [Latent(512, 64)] * 4),
        ({"model_type": "opt", "num_key_value_heads": None, "do_layer_norm_before": True}, [Heads(32, 128)] * 8),
    ],
)
def test_models_that_people_disaggregate_have_a_layout(fields: dict[str, Any], layers: list[Any]) -> None:
    assert kinds(**fields) == layers


@pytest.mark.parametrize(
    ("fields", "heads", "window"),
    [
        ({"model_type": "mistral"}, 8, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 8, 0),
        ({"model_type": "glm4"}, 2, 0),
        ({"model_type": "glm4", "multi_query_group_num": 4}, 4, 0),
        ({"text_config": {**LLAMA, "model_type": "qwen2_vl_text", "num_key_value_heads": 8}}, 8, 0),
        ({"model_type": "gemma2", "sliding_window": 64, "sliding_window_size": 64, "head_dim": 128}, 4, 64),
    ],
)
def test_a_field_that_is_left_out_has_the_value_of_transformers(
    fields: dict[str, Any], heads: int, window: int
) -> None:
    layers = kinds(**{"num_key_value_heads": None, **fields}) if "text_config" in fields else kinds_without(**fields)
    assert {(x.num_heads, x.head_dim, x.window) for x in layers if x.window == window} == {(heads, 128, window)}


def kinds_without(**fields: Any) -> list[Any]:
    given = {k: v for k, v in {**LLAMA, **fields}.items() if k != "num_key_value_heads"}
    return list(model_of_config(given, "m").layers)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "fp8"}},
    ],
)
def test_a_quantised_cache_has_its_own_type(quantised: dict[str, Any]) -> None:
    model = model_of_config({**LLAMA, "quantization_config": quantised}, "m")
    assert (model.dtype, model_bytes(model, "tokens")) == ("float8_e4m3fn", 2 * 32 * 8 * 128)
    inner = {**LLAMA, "model_type": "llama", "quantization_config": quantised}
    assert model_of_config({"text_config": inner}, "m").dtype == "float8_e4m3fn"
    plain = model_of_config({**LLAMA, "quantization_config": {"quant_method": "awq", "kv_cache_scheme": None}}, "m")
    assert plain.dtype == "bfloat16"


def test_what_was_saved_in_32_bits_is_served_in_16() -> None:
    assert model_of_config({**LLAMA, "torch_dtype": "float32"}, "m").dtype == "bfloat16"


def test_an_index_takes_its_keys_and_scales() -> None:
    model = model_of_config({**LLAMA, "model_type": "deepseek_v32", **INDEXED}, "m")
    assert model_bytes(model, "tokens") == 32 * (576 * 2 + 132)
    assert model_bytes(Model("m", (SPARSE,)), "tokens") == (2 * 4 * 128 + 128) * 2
    assert Model("m", (Heads(4, 128), SPARSE, SPARSE)).resized(layers=2).layers == (Heads(4, 128), SPARSE)


WORDS = [
    *("attention", "attn", "index", "sparse", "cache", "kv", "window", "compress"),
    *("group", "latent", "key_value", "conv", "key_head", "memory", "ngram", "sink", "head_dim"),
]


@pytest.mark.parametrize("word", WORDS)
def test_a_field_that_may_speak_of_a_cache_is_refused_by_its_name(word: str) -> None:
    for value in (64, True, [8] * 8, {"dim": 64}, "on"):
        with pytest.raises(ConfigError, match=f"'llama' has foo{word}_rank"):
            kinds(model_type="llama", **{f"foo{word}_rank": value})
    assert kinds(model_type="llama", **dict.fromkeys((f"foo{word}_rank", f"{word}s"))) == [FULL] * 8
    nothing: tuple[Any, ...] = (0, False, [], {}, "", [0, None])
    for empty in nothing:
        assert kinds(model_type="llama", **{f"foo{word}_rank": empty}) == [FULL] * 8


def test_fields_that_do_not_matter_are_accepted() -> None:
    names = ("attention_bias", "use_cache", "qkv_bias", "use_flash_attn", "interleaved_qkv", "attn_output_gate")
    sizes = {
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
        "moe_latent_size": 64,
        "image_token_index": 9,
    }
    rates = {"attention_dropout": 0.1, "attn_pdrop": 0.1, "attention_multiplier": 0.5, "attn_logit_softcapping": 50.0}
    texts = {"attn_implementation": "sdpa", "_attn_implementation": "eager", "cache_implementation": "hybrid"}
    assert kinds(model_type="llama", **dict.fromkeys(names, True), **sizes, **rates, **texts) == [FULL] * 8
    unused = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
    assert kinds(model_type="qwen2", **unused) == [FULL] * 8


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({**STEP, "layer_types": [*NEAR_THREE, *["full_attention"] * 3]}, "3 more than num_hidden_layers 8"),
        ({"num_key_value_heads": None, "num_query_groups": 8}, "has num_query_groups"),
        ({"num_key_value_heads": None, "use_gqa": True}, "has use_gqa"),
        ({"num_kv_heads": [4] * 8, "num_key_value_heads": None}, r"num_kv_heads is \[4"),
        ({"model_type": "deepseek_v9", **INDEXED}, "has index_head_dim"),
        ({"model_type": "glm_moe_dsa", **INDEXED, "indexer_types": ["shared"] * 8}, "indexer_types differs"),
        ({"model_type": "deepseek_v32", **INDEXED, "index_topk_pattern": "FX"}, "index_topk_pattern is 'FX'"),
        ({"model_type": "glm_moe_dsa", **INDEXED, "index_kpool": 4}, "has index_kpool"),
        ({**MIMO, "hybrid_layer_pattern": [0, 2] * 4}, "hybrid_layer_pattern has 2"),
        ({**GEMMA, "per_layer_config": {"x": {}}}, "per_layer_config is"),
        ({**GEMMA, "per_layer_config": {"01": {"skip": ["self_attn"]}}}, "has per_layer_config.skip"),
        ({**GEMMA, "use_bidirectional_attention": "all"}, "has use_bidirectional_attention"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {**KIMI, "kda_layers": [1], "full_attn_layers": [1]}},
            "kda_layers",
        ),
        ({"model_type": "minimax_m3", "head_dim": 128}, "layer_types is not a list of 8"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "attn_layer_period"),
        ({"model_type": "mpt", "attn_config": {"attn_type": "multiquery_attention"}}, "has attn_config.attn_type"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_field(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        kinds(**fields)


def test_a_smaller_model_keeps_one_layer_of_every_kind() -> None:
    small = preset("nemotron-h-8b").resized(layers=3)
    assert [type(layer).__name__ for layer in small.layers] == ["State", "State", "Heads"]
    assert len(preset("gpt-oss-20b").resized(layers=30).layers) == 30
    assert preset("gpt-oss-20b").resized(layers=30).layers[:24] == preset("gpt-oss-20b").layers
    assert preset("qwen3-8b").resized(kv_heads=2, head_dim=64, dtype="fp8").layers[0] == Heads(2, 64)
    with pytest.raises(ConfigError, match="--kv-heads 2: deepseek-v3 keeps no keys"):
        preset("deepseek-v3").resized(kv_heads=2)
    with pytest.raises(ConfigError, match="--layers 0"):
        preset("deepseek-v3").resized(layers=0)


def test_what_a_token_and_a_request_take() -> None:
    assert model_bytes(preset("llama-3.1-8b"), "tokens") == 2 * 32 * 8 * 128 * 2
    model = preset("bamba-9b")
    assert model_bytes(model, "tokens") == 3 * 2 * 8 * 128 * 2
    assert model_bytes(model, "state") == 29 * ((128 * 64 + 2 * 256) * 3 + 128 * 64 * 256) * 2


@pytest.mark.slow
def test_what_a_class_of_transformers_leaves_out_is_what_it_has_by_default() -> None:
    from transformers import AutoConfig

    for kind, ours in models._KNOWN["defaults"].items():
        there = AutoConfig.for_model(kind).get_text_config().to_dict()
        assert {name: there[name] for name in ours} == ours, kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"])
def test_windows_and_states_lie_where_transformers_puts_them(kind: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind).to_dict()
    assert (known := config.pop("layer_types"))
    names = {Heads: "full_attention", State: "linear_attention"}
    found = [
        "sliding_attention" if isinstance(x, Heads) and x.window else names[type(x)]
        for x in model_of_config(config, kind).layers
    ]
    assert found == known


# -- layouts of whole models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_laid_out_and_read_between_unequal_engines(name: str, order: str) -> None:
    model = PRESETS[name].resized(layers=5)
    here = [
        model_layout(
            model, tp_rank=r, tp_size=2, block_size=48, ratio=3, num_blocks=4, order=order, conv_order=CONV_ORDERS[0]
        )
        for r in range(2)
    ]
    there = [
        model_layout(model, tp_rank=r, tp_size=4, pp_stage=s, pp_size=2, num_blocks=7, conv_order=CONV_ORDERS[1])
        for s in range(2)
        for r in range(4)
    ]
    for layout in (*here, *there):
        check_layout(with_addresses(layout, [i << 30 for i in range(1, len(layout.memories) + 1)]))
    for d, layout in enumerate(here):
        answered = [t for t in there if t.tp_rank in remote_ranks(d, 2, 4)]
        assert all(compare(layout, t) == () for t in answered)
        shares = assign(layout, answered)
        assert {s.local_view.layer for row in shares for s in row} == {f"layers.{i}" for i in range(5)}


def test_groups_are_layers_of_one_kind() -> None:
    groups = model_groups(preset("gpt-oss-20b"))
    assert [(layer.window, len(numbers)) for layer, numbers in groups if isinstance(layer, Heads)] == [
        (128, 12),
        (0, 12),
    ]
    layout = model_layout(preset("qwen3-next-80b-a3b"), num_blocks=[3, 5])
    assert [(g.kind, g.block_size, g.num_blocks) for g in layout.groups] == [
        ("state", ONE_PER_REQUEST, 3),
        ("tokens", 16, 5),
    ]


def test_stages_share_out_all_layers() -> None:
    stages = [model_layout(Model("m", (Heads(8, 16),) * 5), pp_stage=s, pp_size=3) for s in range(3)]
    assert [list(dict.fromkeys(x.layer for x in stage.views)) for stage in stages] == [
        ["layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"order": "dhn"}, ConfigError, "order 'dhn' is unknown; use one of nhd"),
        ({"conv_order": "x"}, ConfigError, "conv_order 'x'"),
        ({"block_size": 16, "ratio": 3}, ConfigError, "block_size 16 is not a positive multiple of the ratio 3"),
        ({"pp_size": 99}, ConfigError, "pp_size 99 does not exist for 2 layers"),
        ({"num_blocks": [1, 2]}, ConfigError, "num_blocks"),
        ({"tp_size": 3}, LayoutError, "8 entries cannot be cut evenly over tp_size 3"),
        ({"tp_size": 8, "dcp": 2}, LayoutError, "tp 8 is no multiple of 8 KV heads x 2; change tp or dcp"),
        ({"tp_size": 4, "dcp": 2}, LayoutError, "tp 4 is no multiple of 8 KV heads x 2"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model_layout(Model("m", (Heads(8, 16),) * 2), **changes)


MIXED = Model(
    "mixed",
    (
        Heads(2, 16),
        Heads(2, 16, window=8),
        Latent(32, 8, index=Index(16, "float8_e4m3fn", 1)),
        Latent(32, 8, window=8),
        State((Projection("x", 16, 1),), 3, 16, (8,)),
    ),
)


@pytest.mark.parametrize("order", ORDERS)
def test_neighbours_share_the_tokens_of_attention_without_a_window(order: str) -> None:
    sizes: dict[str, Any] = {"block_size": 48, "ratio": 3, "num_blocks": 4, "order": order, "tp_size": 8}
    alone = model_layout(MIXED, tp_rank=6, **sizes)
    assert (alone.schema, alone.num_token_shards) == (1, 1)
    layout = model_layout(MIXED, tp_rank=6, dcp=4, cp_interleave=2, **sizes)
    check_layout(with_addresses(layout, [i << 30 for i in range(1, len(layout.memories) + 1)]))
    assert (layout.schema, layout.token_shards) == (2, (TokenShard(0, 4, 2, 2), TokenShard(2, 4, 2, 2)))
    assert layout.groups == alone.groups, "block_size counts the tokens of all ranks"
    tokens = {
        (view.group, part.name): dim.size
        for view in layout.views
        for part in view.parts
        for dim in part.dims
        if dim.name == "token"
    }
    whole, shared = dict.fromkeys([(1, "k"), (1, "v"), (3, "latent")], 16), [(0, "k"), (0, "v"), (2, "latent")]
    assert tokens == whole | dict.fromkeys([*shared, (2, "index"), (2, "index_scale")], 4)


@pytest.mark.parametrize("dcp", [2, 3, 8])
def test_a_model_of_states_and_windows_has_nothing_to_share(dcp: int) -> None:
    for name in ("mamba2-2.7b", "mistral-7b-v0.1"):
        with pytest.raises(
            LayoutError, match=f"{name} keeps only states and sliding windows.* by dcp {dcp}; use dcp 1"
        ):
            model_layout(preset(name), tp_size=8, dcp=dcp)


# -- Real models prefilled and decoded --------------------------------------------------------------------------------


def disagg(*argv: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "scripts.disagg_generate", *argv, timeout_s=250)


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options", [[], ["--prefill-tp", "1", "--decode-tp", "6"], ["--prefill-tp", "6", "--cached-tokens", "0"]]
)
def test_every_family_goes_on_bit_for_bit(options: list[str]) -> None:
    assert importlib.util.find_spec("transformers"), "install the test dependencies: transformers is among them"
    done = disagg(*options)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["family"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows.keys() == disagg_generate.FAMILIES.keys()
    for row in rows.values():
        assert disagg_generate.is_good(row)
        assert row["tensors_equal"] and row["logits_equal"] and row["tokens_equal"]  # noqa: PT018
    # Every part of every layer is seen to matter: with it zeroed, the logits differ.
    awake = {name.split(".")[1] for row in rows.values() for name, seen in row["controls_see"].items() if seen}
    asleep = {(f, name) for f, row in rows.items() for name, seen in row["controls_see"].items() if not seen}
    assert awake == {"k", "v", "latent", "conv_x", "conv_b", "conv_c", "conv_q", "conv_k", "conv_v", "state"}
    assert not asleep


NUMBERS = disagg_generate.Numbers(45, 21, 2, 3, 2, 12, 8, 0)


SPOILT = [
    ("llama", 0, "k"),
    ("deepseek_v3", 0, "latent"),
    ("deepseek_v3", 1, "latent"),
    ("bamba", 0, "conv_b"),
    ("bamba", 1, "state"),
    ("qwen3_next", 1, "conv_q"),
]
"""Which family's rank has one wrong value, and in which part; all in one run, for processes take seconds to start."""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_judge_sees_one_wrong_value_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = iter(SPOILT)

    def spoil(ranks: list[disagg_generate.Rank]) -> None:
        _, rank, part = next(spoilt)
        tensors = [t for _, _, p, t in ranks[rank].tensors() if p.name == part]
        # One value, in a block that holds something.
        values = tensors[-1].reshape(-1)
        at = int((tensors[-1].contiguous().view(torch.int32).reshape(-1) != MARK).nonzero()[0])
        index = torch.unravel_index(torch.tensor(at), tensors[-1].shape)
        assert values[at] == tensors[-1][index]
        tensors[-1][index] += 1.0

    assert not asyncio.run(disagg_generate.decode_process([family for family, _, _ in SPOILT], NUMBERS, spoil))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["family"], disagg_generate.is_good(row)) for row in rows] == [
        (family, False) for family, _, _ in SPOILT
    ]
    for row, (_, rank, part) in zip(rows, SPOILT, strict=True):
        assert [x.split()[0] + x.split()[2] for x in row["differing"]] == [f"tp{rank}{part}"]


MARK = -0x54545455
"""What memory holds that nobody has written: 0xAB everywhere."""


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("up", [True, False])
def test_the_judge_sees_a_prefix_that_is_rounded(
    up: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = BlockLists._pair_tokens

    def rounded(self: BlockLists, pair: GroupPair, is_exact: bool = False) -> Any:
        group, here = pair.local_index, pair.local
        first, ids = self.local[group]
        if first % here.block_size:
            step = here.block_size if up else 0
            at = first - first % here.block_size + step
            self.local = (*self.local[:group], (at, ids[1:] if up else ids), *self.local[group + 1 :])
        return honest(self, pair, is_exact)

    monkeypatch.setattr(BlockLists, "_pair_tokens", rounded)
    assert not asyncio.run(disagg_generate.decode_process(["llama"], NUMBERS))
    row = json.loads(capsys.readouterr().out)
    assert row["written_beside"] == ([] if up else ["the cached prefix was written again"])
    assert row["tensors_equal"] is not up


@pytest.mark.slow
def test_without_transformers_it_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['disagg_generate', 'llama']\n"
        "from scripts import disagg_generate; sys.exit(disagg_generate.main())"
    )
    done = python("-c", code)
    assert done.returncode == 2
    assert "transformers is not installed; run: pip install 'transformers==5.23.0'" in done.stderr


# -- Every configuration of transformers ------------------------------------------------------------------------------

# The expectations come from transformers' own configuration objects and from the rules of vLLM's
# `model_arch_config_convertor.py`, and not from `models.toml`.

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


def layer_kinds(text: Any) -> list[str]:
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
    names = layer_kinds(text)
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
        ("near" if layer.window else "far")
        if "_" in layer_kinds(configs()[name].get_text_config(decoder=True))[0]
        else ""
    )
    return (
        (window, layer.num_heads, layer.head_dim)
        if isinstance(layer, Heads)
        else (window, 1, layer.rank + layer.rope_dim)
    )


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_every_layer_of_these_has_an_index(name: str) -> None:
    layers = found(name)
    assert all(isinstance(x, Latent) and x.index is not None and x.index.dim == 128 for x in layers)
