"""KV-cache geometry of models: presets, and what a Hugging Face `config.json` says."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import msgspec

from asynckv.core.layout import ITEMSIZE
from asynckv.errors import ConfigError

__all__ = ["PRESETS", "Geometry", "dtype_named", "preset", "read_hf_config"]

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
_MOST = 1 << 20


class Geometry(msgspec.Struct, frozen=True):
    """What decides how many bytes a token takes.

    Attributes:
        num_kv_heads: Of the whole model; a rank holds its share.
    """

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for option, value in (
            ("--layers", self.num_layers),
            ("--kv-heads", self.num_kv_heads),
            ("--head-dim", self.head_dim),
        ):
            if not 1 <= value <= _MOST:
                raise ConfigError(f"{option} {value} is outside 1 ... {_MOST}")

    def token_bytes(self, num_heads: int) -> int:
        """Bytes of keys and values that one token takes in `num_heads` heads of all layers."""
        return 2 * self.num_layers * num_heads * self.head_dim * ITEMSIZE[self.dtype]


PRESETS = {
    g.model: g
    for g in (
        Geometry("llama-3.1-8b", 32, 8, 128),
        Geometry("llama-3.1-70b", 80, 8, 128),
        Geometry("qwen3-0.6b", 28, 8, 128),
        Geometry("qwen3-8b", 36, 8, 128),
        Geometry("qwen3-32b", 64, 8, 128),
    )
}


def preset(name: str) -> Geometry:
    """Find a preset by its name, in any case.

    Raises:
        ConfigError: Unknown; names the nearest and all others.
    """
    if (found := PRESETS.get(name.lower())) is not None:
        return found
    near = difflib.get_close_matches(name.lower(), PRESETS, 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"model {name!r} is unknown; {hint}Presets: {', '.join(PRESETS)}. For any other, give --hf-config PATH"
    )


def dtype_named(name: str) -> str:
    """Resolve the name of an element type.

    Raises:
        ConfigError: Unknown; names all.
    """
    plain = name.lower().removeprefix("torch.")
    plain = _ALIASES.get(plain, plain)
    if plain not in ITEMSIZE:
        raise ConfigError(f"dtype {name!r} is unknown; use one of {', '.join(sorted(ITEMSIZE))}")
    return plain


def read_hf_config(path: Path) -> Geometry:
    """Read the geometry from a Hugging Face `config.json`, or from the folder that holds one.

    Raises:
        ConfigError: Names the file, and what is wrong with it.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--hf-config {path}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"--hf-config {path}: is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-config {path}: holds no JSON object")
    try:
        return _geometry(config, path)
    except ConfigError as exc:
        raise ConfigError(f"--hf-config {path}: {exc}") from exc


def _geometry(config: dict[str, Any], path: Path) -> Geometry:
    # Multimodal models keep the language model's own configuration one level down.
    text = config.get("text_config")
    inner = {**config, **text} if isinstance(text, dict) else config
    if inner.get("kv_lora_rank"):
        raise ConfigError("keeps latents (MLA), not keys and values per head; no such model can be benched yet")
    heads = _number(inner, "num_attention_heads")
    head_dim = inner.get("head_dim")
    if head_dim is None:
        hidden = _number(inner, "hidden_size")
        if hidden % heads:
            raise ConfigError(f"has no head_dim, and hidden_size {hidden} is no multiple of {heads} attention heads")
        head_dim = hidden // heads
    else:
        head_dim = _number(inner, "head_dim")
    kv_heads = heads if inner.get("num_key_value_heads") is None else _number(inner, "num_key_value_heads")
    dtype = inner.get("dtype") or inner.get("torch_dtype") or "bfloat16"
    name = config.get("_name_or_path") or path.parent.name or path.stem
    return Geometry(str(name), _number(inner, "num_hidden_layers"), kv_heads, head_dim, dtype_named(str(dtype)))


def _number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        what = "is missing" if value is None else f"is {value!r}, not a number of 1 or more"
        raise ConfigError(f"{key} {what}")
    return value
