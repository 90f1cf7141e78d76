"""Geometry of models: presets, and what is believed of a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asynckv.bench.models import PRESETS, Geometry, dtype_named, preset, read_hf_config
from asynckv.errors import ConfigError

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


def shape(geometry: Geometry) -> tuple[int, int, int, str]:
    return geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.dtype


def test_a_preset_is_found_in_any_case() -> None:
    assert preset("Llama-3.1-8B") is PRESETS["llama-3.1-8b"]
    assert {"llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b"} <= PRESETS.keys()


def test_an_unknown_model_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"'lama-3.1-8b' is unknown; did you mean llama-3.1-8b\?.*qwen3-32b"):
        preset("lama-3.1-8b")


def test_a_token_takes_keys_and_values_in_every_layer() -> None:
    assert preset("llama-3.1-8b").token_bytes(8) == 2 * 32 * 8 * 128 * 2


def test_head_dim_and_kv_heads_fall_back(tmp_path: Path) -> None:
    assert shape(read_hf_config(config(tmp_path))) == (32, 8, 128, "bfloat16")
    assert shape(read_hf_config(config(tmp_path, num_key_value_heads=...))) == (32, 32, 128, "bfloat16")
    assert shape(read_hf_config(config(tmp_path, head_dim=64, dtype="float16"))) == (32, 8, 64, "float16")


def test_a_folder_and_a_nested_text_config_will_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    assert shape(read_hf_config(tmp_path)) == (32, 8, 128, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"hidden_size": 4097}, "no multiple of 32"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"kv_lora_rank": 512}, "MLA"),
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
