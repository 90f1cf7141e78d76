"""What models keep per layer: the arrays of their KV cache, as presets and as Hugging Face configs say."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asynckv.core.layout import ITEMSIZE
from asynckv.errors import ConfigError

__all__ = [
    "PRESETS",
    "Heads",
    "Latent",
    "Model",
    "Projection",
    "State",
    "dtype_named",
    "model_of_config",
    "preset",
    "read_hf_config",
]

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
MOST = 1 << 20
MOST_LAYERS = 4096


class Heads(Struct, frozen=True, tag="heads"):
    """Attention that keeps keys and values per KV head (MHA, GQA, MQA).

    Attributes:
        num_heads: KV heads of the whole model.
        head_dim: Elements of one head's key.
        v_head_dim: Elements of one head's value; 0 for the same as `head_dim`.
        window: Sliding window: the next token attends to itself and the `window - 1` tokens before it. 0: all.
    """

    num_heads: int
    head_dim: int
    v_head_dim: int = 0
    window: int = 0


class Latent(Struct, frozen=True, tag="latent"):
    """Attention that keeps one latent per token (MLA), the same on all tensor-parallel ranks.

    Attributes:
        rank: Elements of the latent.
        rope_dim: Elements of the rotary key beside it.
        window: As for `Heads`.
    """

    rank: int
    rope_dim: int
    window: int = 0


class Projection(Struct, frozen=True):
    """One sub-projection of a convolution's state, sharded along its units.

    `x` of Mamba-1 is (channels, 1), `x` of Mamba-2 (heads, head_dim), its `b` and `c` (groups, state size),
    `q` and `k` of a gated delta net (key heads, key head dim), its `v` (value heads, value head dim).
    """

    name: str
    units: int
    width: int


class State(Struct, frozen=True, tag="state"):
    """A recurrent layer: one convolution state and one recurrent state per request, whatever its length.

    Attributes:
        conv: Sub-projections, in the order in which they lie in memory; empty ones are left out.
        columns: Columns that the convolution keeps per channel: its kernel size - 1.
        units: Entries of the recurrent state's sharded axis (channels, or heads).
        shape: Its other dims, such as (head_dim, state size).
        dtype: Element type of the recurrent state; empty for the model's.
    """

    conv: tuple[Projection, ...]
    columns: int
    units: int
    shape: tuple[int, ...]
    dtype: str = ""


Layer = Heads | Latent | State


class Model(Struct, frozen=True):
    """A model's layers that keep something, in order. Layers without a cache are left out."""

    name: str
    layers: tuple[Layer, ...]
    dtype: str = "bfloat16"

    def token_bytes(self) -> int:
        """Bytes of KV that one token takes in the whole model."""
        elements = 0
        for layer in self.layers:
            match layer:
                case Heads():
                    elements += layer.num_heads * (layer.head_dim + (layer.v_head_dim or layer.head_dim))
                case Latent():
                    elements += layer.rank + layer.rope_dim
                case State():
                    pass
        return elements * ITEMSIZE[self.dtype]

    def state_bytes(self) -> int:
        """Bytes of convolution and recurrent states that one request takes in the whole model."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, State):
                conv = sum(p.units * p.width for p in layer.conv) * layer.columns
                total += conv * ITEMSIZE[self.dtype]
                total += layer.units * math.prod(layer.shape) * ITEMSIZE[layer.dtype or self.dtype]
        return total

    def resized(
        self,
        *,
        layers: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dtype: str | None = None,
    ) -> Model:
        """Change sizes for an experiment. Fewer layers keep one of every kind, as far as they reach.

        Raises:
            ConfigError: A size is out of range, or the model has no such thing.
        """
        for option, value in (("--layers", layers), ("--kv-heads", kv_heads), ("--head-dim", head_dim)):
            if value is not None and not 1 <= value <= MOST:
                raise ConfigError(f"{option} {value} is outside 1 ... {MOST}")
            if value is not None and option != "--layers" and not any(isinstance(x, Heads) for x in self.layers):
                raise ConfigError(f"{option} {value}: {self.name} keeps no keys and values per head")
        changes = {k: v for k, v in (("num_heads", kv_heads), ("head_dim", head_dim)) if v is not None}
        if head_dim is not None:
            changes["v_head_dim"] = 0
        made = tuple(
            msgspec.structs.replace(layer, **changes) if isinstance(layer, Heads) else layer for layer in self.layers
        )
        if layers is not None:
            made = _pick(made, layers)
        return Model(self.name, made, self.dtype if dtype is None else dtype_named(dtype))


def _pick(layers: tuple[Layer, ...], count: int) -> tuple[Layer, ...]:
    """Take so many layers: the first of every kind, then whatever comes first; or repeat the pattern."""
    if count >= len(layers):
        return tuple(layers[i % len(layers)] for i in range(count))
    first = list(dict.fromkeys(layers.index(layer) for layer in layers))[:count]
    rest = [i for i in range(len(layers)) if i not in first][: count - len(first)]
    return tuple(layers[i] for i in sorted(first + rest))


def _mamba1(channels: int, state: int, kernel: int) -> State:
    return State((Projection("x", channels, 1),), kernel - 1, channels, (state,))


def _mamba2(heads: int, head_dim: int, groups: int, state: int, kernel: int) -> State:
    conv = [Projection("x", heads, head_dim)]
    if groups and state:
        conv += [Projection("b", groups, state), Projection("c", groups, state)]
    return State(tuple(conv), kernel - 1, heads, (head_dim, state))


def _delta_net(k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int) -> State:
    conv = (Projection("q", k_heads, k_dim), Projection("k", k_heads, k_dim), Projection("v", v_heads, v_dim))
    return State(conv, kernel - 1, v_heads, (k_dim, v_dim))


def _pattern(pattern: str, **kinds: Layer) -> tuple[Layer, ...]:
    return tuple(kinds[c] for c in pattern)


_GEMMA3: dict[str, Layer] = {"s": Heads(4, 256, window=1024), "f": Heads(4, 256)}
_GPT_OSS: dict[str, Layer] = {"s": Heads(8, 64, window=128), "f": Heads(8, 64)}
_BAMBA: dict[str, Layer] = {"m": _mamba2(128, 64, 1, 256, 4), "a": Heads(8, 128)}
_NEMOTRON: dict[str, Layer] = {"M": _mamba2(128, 64, 8, 128, 4), "A": Heads(8, 128)}
_JAMBA: dict[str, Layer] = {"m": _mamba1(8192, 16, 4), "a": Heads(8, 128)}
_QWEN3_NEXT: dict[str, Layer] = {"l": _delta_net(16, 128, 32, 128, 4), "f": Heads(2, 256)}

PRESETS = {
    m.name: m
    for m in (
        Model("llama-3.1-8b", (Heads(8, 128),) * 32),
        Model("llama-3.1-70b", (Heads(8, 128),) * 80),
        Model("llama-2-7b", (Heads(32, 128),) * 32, "float16"),
        Model("falcon-7b", (Heads(1, 64),) * 32),
        Model("qwen3-0.6b", (Heads(8, 128),) * 28),
        Model("qwen3-8b", (Heads(8, 128),) * 36),
        Model("qwen3-32b", (Heads(8, 128),) * 64),
        Model("mistral-7b-v0.1", (Heads(8, 128, window=4096),) * 32),
        Model("gemma-3-4b", _pattern("sssssf" * 5 + "ssss", **_GEMMA3)),
        Model("gpt-oss-20b", _pattern("sf" * 12, **_GPT_OSS)),
        Model("deepseek-v3", (Latent(512, 64),) * 61),
        Model("mamba2-2.7b", (_mamba2(80, 64, 1, 128, 4),) * 64, "float16"),
        Model("falcon-mamba-7b", (_mamba1(8192, 16, 4),) * 64),
        Model("bamba-9b", tuple(_BAMBA["a" if i in (9, 18, 27) else "m"] for i in range(32))),
        # M-M-M-MM-M-M-M*-M-... : its MLP layers keep nothing.
        Model("nemotron-h-8b", _pattern("MMMMMMMAMMMMMAMMMMMAMMMMMAMMMM", **_NEMOTRON)),
        Model("jamba-v0.1", tuple(_JAMBA["a" if i % 8 == 4 else "m"] for i in range(32))),
        Model("qwen3-next-80b-a3b", _pattern("lllf" * 12, **_QWEN3_NEXT)),
    )
}


def preset(name: str) -> Model:
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


# -- Hugging Face ------------------------------------------------------------------------------------------


def read_hf_config(path: Path) -> Model:
    """Read a Hugging Face `config.json`, or the folder that holds one.

    Raises:
        ConfigError: Names the file, the field and what is wrong with it.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--hf-config {path}: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--hf-config {path}: is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-config {path}: holds no JSON object")
    name = config.get("_name_or_path") or path.parent.name or path.stem
    try:
        return model_of_config(config, str(name)[:512])
    except ConfigError as exc:
        raise ConfigError(f"--hf-config {path}: {exc}") from exc


def model_of_config(config: Mapping[str, Any], name: str) -> Model:
    """Say what the model of a Hugging Face configuration keeps.

    Raises:
        ConfigError: A field is missing or out of range, or the model keeps something unknown.
    """
    # Multimodal models keep the language model's own configuration one level down.
    text = config.get("text_config")
    inner = _Config({**config, **text} if isinstance(text, dict) else dict(config))
    layers = _family(inner)
    if not layers:
        raise ConfigError("describes no layer that keeps a cache")
    dtype = inner.get("dtype") or inner.get("torch_dtype") or "bfloat16"
    return Model(name, tuple(layers), dtype_named(str(dtype)))


class _Config(dict[str, Any]):
    """A configuration from a stranger."""

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        key = next((k for k in keys if self.get(k) is not None), keys[0])
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            what = "is missing" if value is None else f"is {value!r}, not a number from {least} to {MOST}"
            raise ConfigError(f"{' or '.join(keys) if value is None else key} {what}")
        return value

    def texts(self, key: str, length: int) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(x, str) for x in value):
            raise ConfigError(f"{key} is not a list of {length} names, one per layer")
        return value


def _heads(c: _Config, window: int = 0) -> Heads:
    heads = c.number("num_attention_heads", "n_head")
    head_dim = c.number("head_dim", "attention_head_dim", default=0, least=0)
    if not head_dim:
        hidden = c.number("hidden_size", "n_embd")
        if hidden % heads:
            raise ConfigError(f"has no head_dim, and hidden_size {hidden} is no multiple of {heads} attention heads")
        head_dim = hidden // heads
    kv_heads = c.number("num_key_value_heads", "num_kv_heads", default=heads)
    if kv_heads > heads:
        raise ConfigError(f"num_key_value_heads {kv_heads} are more than the {heads} attention heads")
    return Heads(kv_heads, head_dim, window=window)


def _family(c: _Config) -> list[Layer]:
    kind = str(c.get("model_type", ""))
    if kind in ("mamba", "falcon_mamba"):
        channels = c.number("intermediate_size", default=0, least=0) or _expanded(c, "expand")
        return [_mamba1(channels, c.number("state_size"), c.number("conv_kernel"))] * _depth(c)
    if kind == "mamba2":
        return [_mamba2_of(c, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")] * _depth(c)
    if kind == "jamba":
        state = _mamba1(_expanded(c, "mamba_expand"), c.number("mamba_d_state"), c.number("mamba_d_conv"))
        period, offset = c.number("attn_layer_period"), c.number("attn_layer_offset", least=0)
        return [_heads(c) if i % period == offset else state for i in range(_depth(c))]
    if kind in ("bamba", "granitemoehybrid"):
        state2 = _mamba2_of(c, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
        kinds = c.get("layer_types") or c.get("layers_block_type")
        if isinstance(kinds, list):
            return [_heads(c) if k in ("attention", "full_attention") else state2 for k in kinds[:MOST]]
        chosen = c.get("attn_layer_indices")
        if chosen is not None and not isinstance(chosen, list):
            raise ConfigError(f"attn_layer_indices is {chosen!r}, not a list")
        return [_heads(c) if i in (chosen or []) else state2 for i in range(_depth(c))]
    if kind == "falcon_h1":
        state2 = _mamba2_of(c, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
        return [layer for _ in range(_depth(c)) for layer in (_heads(c), state2)]
    if kind == "nemotron_h":
        return _nemotron_h(c)
    if kind in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"):
        net = _delta_net(
            c.number("linear_num_key_heads"),
            c.number("linear_key_head_dim"),
            c.number("linear_num_value_heads"),
            c.number("linear_value_head_dim"),
            c.number("linear_conv_kernel_dim"),
        )
        depth = _depth(c)
        every = c.number("full_attention_interval", default=4)
        kinds = (
            c.texts("layer_types", depth)
            if c.get("layer_types")
            else ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(depth)]
        )
        return [net if k == "linear_attention" else _heads(c) for k in kinds]
    if strange := sorted(k for k in c if k.startswith(_RECURRENT) and c[k] not in (None, False, 0, [])):
        raise ConfigError(f"model_type {kind!r} has {strange[0]}, so it keeps more than KV, but what is not known")
    if c.get("kv_lora_rank") is not None:
        return [Latent(c.number("kv_lora_rank"), c.number("qk_rope_head_dim"))] * _depth(c)
    if kind == "falcon" and c.get("multi_query") and not c.get("new_decoder_architecture"):
        return [msgspec.structs.replace(_heads(c), num_heads=1)] * _depth(c)
    return _attention(c, kind)


_RECURRENT = (
    "index_head_dim",
    "mamba",
    "ssm",
    "linear_",
    "conv_kernel",
    "conv_L",
    "state_size",
    "rwkv",
    "lru_width",
    "time_mix",
)


def _attention(c: _Config, kind: str) -> list[Layer]:
    depth = _depth(c)
    if c.get("layer_types") is not None:
        strange = sorted(set(c.texts("layer_types", depth)) - {"full_attention", "sliding_attention"})
        if strange:
            raise ConfigError(f"layer_types has {strange[0]!r}, and what such a layer keeps is not known")
    # The last layers of some models read what earlier ones keep.
    kept = depth - c.number("num_kv_shared_layers", default=0, least=0)
    return _windows(c, kind, depth)[: max(kept, 0)]


def _windows(c: _Config, kind: str, depth: int) -> list[Layer]:
    window = c.number("sliding_window", default=0, least=0)
    if c.get("use_sliding_window") is False:
        window = 0
    if not window:
        return [_heads(c)] * depth
    if c.get("layer_types") is not None:
        kinds = c.texts("layer_types", depth)
        return [_heads(c, window if k == "sliding_attention" else 0) for k in kinds]
    pattern = c.number(
        "sliding_window_pattern", default={"gemma2": 2, "cohere2": 4, "gpt_oss": 2}.get(kind, 0), least=0
    )
    if kind.startswith("gemma3"):
        pattern = pattern or 6
    if kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
        # Their first `max_window_layers` layers are full.
        full = c.number("max_window_layers", default=depth, least=0)
        return [_heads(c, 0 if i < full else window) for i in range(depth)]
    return [_heads(c, 0 if pattern and (i + 1) % pattern == 0 else window) for i in range(depth)]


def _nemotron_h(c: _Config) -> list[Layer]:
    state = _mamba2_of(c, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    pattern = c.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        if strange := sorted(set(pattern) - set("M*-E|")):
            raise ConfigError(f"hybrid_override_pattern has {strange[0]!r}; M, *, - and E are known")
        return [_heads(c) if k == "*" else state for k in pattern if k in "M*"]
    kinds = c.get("layers_block_type")
    if not isinstance(kinds, list):
        raise ConfigError("hybrid_override_pattern is missing")
    known = {"attention", "full_attention", "mamba", "linear_attention", "mlp", "moe"}
    if strange := [k for k in kinds[:MOST] if k not in known]:
        raise ConfigError(f"layers_block_type has {strange[0]!r}; {', '.join(sorted(known))} are known")
    return [_heads(c) if "attention" in k and k[0] != "l" else state for k in kinds[:MOST] if k not in ("mlp", "moe")]


def _mamba2_of(c: _Config, heads: str, head_dim: str, groups: str, state: str, kernel: str) -> State:
    num, size = c.number(heads), c.get(head_dim)
    if size in (None, "auto"):
        hidden = _expanded(c, "mamba_expand" if "mamba_expand" in c else "expand")
        if hidden % num:
            raise ConfigError(f"has no {head_dim}, and {hidden} channels are no multiple of {heads} {num}")
        size = hidden // num
    else:
        size = c.number(head_dim)
    made = _mamba2(num, size, c.number(groups, default=1, least=0), c.number(state), c.number(kernel))
    # Kept in float32 where the configuration says so (vLLM reads the same field).
    dtype = c.get("mamba_ssm_cache_dtype")
    return (
        msgspec.structs.replace(made, dtype=dtype_named(dtype)) if isinstance(dtype, str) and dtype != "auto" else made
    )


def _expanded(c: _Config, key: str) -> int:
    return c.number("hidden_size") * c.number(key, default=2)


def _depth(c: _Config) -> int:
    depth = c.number("num_hidden_layers", "n_layer")
    if depth > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers {depth} is more than {MOST_LAYERS}")
    return depth
