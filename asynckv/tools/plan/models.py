"""The cached arrays of each layer of a model, from presets and from Hugging Face configurations."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asynckv.errors import ConfigError
from asynckv.geometry.layout import ITEMSIZE

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
MOST = 1 << 20
MOST_LAYERS = 4096
MOST_CONFIG = 16 << 20

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80


class Heads(Struct, frozen=True, tag="heads"):
    """Attention that keeps keys and values per KV head (MHA, GQA, MQA). A `v_head_dim` of 0 means `head_dim`.

    With a `window`, the next token attends to itself and the `window - 1` tokens before it.
    """

    num_heads: int
    head_dim: int
    v_head_dim: int = 0
    window: int = 0


class Latent(Struct, frozen=True, tag="latent"):
    """Attention that keeps one latent and a rotary key per token (MLA), the same on all tensor-parallel ranks."""

    rank: int
    rope_dim: int
    window: int = 0


class Projection(Struct, frozen=True):
    """One sub-projection of a convolution's state, sharded along its units.

    Mamba-1 has `x` (channels, 1). Mamba-2 has `x` (heads, head_dim), `b` and `c` (groups, state size). A gated delta
    net has `q` and `k` (key heads, key head dim) and `v` (value heads, value head dim).
    """

    name: str
    units: int
    width: int


class State(Struct, frozen=True, tag="state"):
    """A recurrent layer: one convolution state and one recurrent state per request of any length."""

    conv: tuple[Projection, ...]  # sub-projections in memory order, without empty ones
    columns: int  # columns that the convolution keeps per channel: its kernel size - 1
    units: int  # entries of the recurrent state's sharded axis (channels, or heads)
    shape: tuple[int, ...]  # its other dims, such as (head_dim, state size)
    dtype: str = ""


Layer = Heads | Latent | State


class Model(Struct, frozen=True):
    name: str
    layers: tuple[Layer, ...]
    dtype: str = "bfloat16"

    def token_bytes(self) -> int:
        heads = [layer for layer in self.layers if isinstance(layer, Heads)]
        elements = sum(x.num_heads * (x.head_dim + (x.v_head_dim or x.head_dim)) for x in heads)
        elements += sum(layer.rank + layer.rope_dim for layer in self.layers if isinstance(layer, Latent))
        return elements * ITEMSIZE[self.dtype]

    def state_bytes(self) -> int:
        """Return the bytes of one request's convolution and recurrent states in the whole model."""
        states = [layer for layer in self.layers if isinstance(layer, State)]
        conv = sum(p.units * p.width * x.columns for x in states for p in x.conv) * ITEMSIZE[self.dtype]
        return conv + sum(x.units * math.prod(x.shape) * ITEMSIZE[x.dtype or self.dtype] for x in states)

    def resized(
        self,
        *,
        layers: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        dtype: str | None = None,
    ) -> Model:
        """Change sizes for an experiment. Fewer layers keep one of every kind if there is room."""
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
    """Return `count` layers: first one of every kind, then of every shape; repeat layers if there are fewer."""
    if count >= len(layers):
        return tuple(layers[i % len(layers)] for i in range(count))
    kinds: dict[tuple[type[Layer], int], int] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault((type(layer), 0 if isinstance(layer, State) else layer.window), i)
    shapes = {layer: i for i, layer in reversed(list(enumerate(layers)))}
    order = dict.fromkeys([*kinds.values(), *sorted(shapes.values()), *range(len(layers))])
    return tuple(layers[i] for i in sorted(list(order)[:count]))


def _mamba1(channels: int, state: int, kernel: int) -> State:
    return State((Projection("x", channels, 1),), kernel - 1, channels, (state,))


def preset(name: str) -> Model:
    if (found := PRESETS.get(name.lower())) is not None:
        return found
    near = difflib.get_close_matches(name.lower(), PRESETS, 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"model {name!r} is unknown; {hint}Presets: {', '.join(PRESETS)}. For any other, give --hf-config PATH"
    )


def chosen(name: str | None, hf_config: str | None, default: str) -> Model:
    """Find a preset, or read a Hugging Face configuration."""
    if name is not None and hf_config is not None:
        raise ConfigError(f"--model {name} and --hf-config {hf_config} were both given; choose one")
    return read_hf_config(Path(hf_config)) if hf_config is not None else preset(name or default)


def dtype_named(name: str) -> str:
    plain = name.lower().removeprefix("torch.")
    plain = _ALIASES.get(plain, plain)
    if plain not in ITEMSIZE:
        raise ConfigError(f"dtype {_shown.repr(name)} is unknown; use one of {', '.join(sorted(ITEMSIZE))}")
    return plain


# -- Hugging Face ------------------------------------------------------------------------------------------


def read_hf_config(path: Path) -> Model:
    """Read a Hugging Face `config.json`, or the folder that holds one."""
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            raw = file.read(MOST_CONFIG + 1)
        if len(raw) > MOST_CONFIG:
            raise ConfigError(f"--hf-config {path}: is longer than {MOST_CONFIG >> 20} MiB, so it is no configuration")
        config: Any = json.loads(raw)
    except OSError as exc:
        raise ConfigError(f"--hf-config {path}: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--hf-config {path}: is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-config {path}: holds no JSON object")
    # Both sides of a transfer compare the name, so it depends on the configuration and not on the file's path.
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    name = config.get("_name_or_path") or config.get("model_type") or "model"
    try:
        return model_of_config(config, f"{str(name)[:400]}@{digest}")
    except ConfigError as exc:
        raise ConfigError(f"--hf-config {path}: {exc}") from exc


def model_of_config(config: Mapping[str, Any], name: str) -> Model:
    # Multimodal models keep the language model's own configuration one level down.
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ConfigError(f"text_config is {_shown.repr(text)}, not an object")
    kind = (text or {}).get("model_type") or config.get("model_type") or ""
    if not isinstance(kind, str):
        raise ConfigError(f"model_type is {_shown.repr(kind)}, not a name")
    kind = kind.removesuffix("_text")
    defaults = _DEFAULTS.get(kind, {})
    if text is None:
        inner = _Config({**({"head_dim": defaults["head_dim"]} if "head_dim" in defaults else {}), **config})
    else:
        # The outer fields describe other models, such as a vision tower; only the element type is taken from them.
        around = {k: config[k] for k in ("dtype", "torch_dtype") if k in config}
        inner = _Config({**around, **defaults, **text})
        if not defaults and kind not in _RECURRENT and text.get("kv_lora_rank") is None:
            for field in ("num_key_value_heads", "head_dim"):
                if field not in text:
                    raise ConfigError(
                        f"text_config leaves {field} to the default of model_type {_shown.repr(kind)}, which is not "
                        f"known here; write it out (config.to_dict() of transformers does)"
                    )
    layers = _family(inner, kind)
    if not layers:
        raise ConfigError("describes no layer with a cache")
    return Model(name, tuple(layers), inner.dtype("dtype", "torch_dtype") or "bfloat16")


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR}  # before Transformers 5


class _Config(dict[str, Any]):
    """An untrusted configuration."""

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        key = next((k for k in keys if self.get(k) is not None), keys[0])
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            what = "is missing" if value is None else f"is {_shown.repr(value)}, not a number from {least} to {MOST}"
            raise ConfigError(f"{' or '.join(keys) if value is None else key} {what}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{key} is {_shown.repr(value)}, not true or false")
        return default if value is None else value

    def dtype(self, *keys: str) -> str:
        key = next((k for k in keys if self.get(k) not in (None, "", "auto")), "")
        if not key:
            return ""
        if not isinstance(self[key], str):
            raise ConfigError(f"{key} is {_shown.repr(self[key])}, not a name")
        try:
            return dtype_named(self[key])
        except ConfigError as exc:
            raise ConfigError(f"{key.removesuffix('dtype')}{exc}") from None

    def kinds(self, *keys: str, known: tuple[str, ...], length: int = 0) -> list[str]:
        """Read the kind of each layer, and check that there are `length` of them if it is given."""
        key = next((k for k in keys if self.get(k) is not None), keys[0])
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{' or '.join(keys)} is missing")
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value) or length not in (0, len(value)):
            raise ConfigError(f"{key} is not a list of {length or 'all'} names, one per layer")
        if len(value) > MOST_LAYERS:
            raise ConfigError(f"{key} names {len(value)} layers, more than {MOST_LAYERS}")
        if strange := sorted({x for x in value if _OLD_NAMES.get(x, x) not in known}):
            raise ConfigError(f"{key} has {_shown.repr(strange[0])}, so the cache of such a layer is not known")
        names: list[str] = value
        return [_OLD_NAMES.get(x, x) for x in names]


def _heads(c: _Config, window: int = 0) -> Heads:
    heads = c.number("num_attention_heads", "n_head")
    head_dim = c.number("head_dim", "attention_head_dim", "kv_channels", default=0, least=0)
    if not head_dim:
        hidden = c.number("hidden_size", "n_embd")
        if hidden % heads:
            raise ConfigError(f"has no head_dim, and hidden_size {hidden} is no multiple of {heads} attention heads")
        head_dim = hidden // heads
    kv_heads = c.number("num_key_value_heads", "num_kv_heads", default=heads)
    if kv_heads > heads:
        raise ConfigError(f"num_key_value_heads {kv_heads} are more than the {heads} attention heads")
    v_head_dim = c.number("v_head_dim", default=0, least=0)
    return Heads(kv_heads, head_dim, 0 if v_head_dim == head_dim else v_head_dim, window)


def _family(c: _Config, kind: str) -> list[Layer]:
    if (recurrent := _RECURRENT.get(kind)) is not None:
        return recurrent(c)
    _refuse_unknown(c, kind)
    if kind in _KNOWN["encoders"] or c.flag("is_encoder_decoder", False) or c.flag("add_cross_attention", False):
        raise ConfigError(f"model_type {_shown.repr(kind)} is not a decoder alone, so it keeps no such KV cache")
    if c.get("kv_lora_rank") is not None:
        return [Latent(c.number("kv_lora_rank"), c.number("qk_rope_head_dim"))] * _depth(c)
    # These have one KV head unless they say otherwise.
    if c.flag("multi_query", kind in ("falcon", "gpt_bigcode")) and not c.flag("new_decoder_architecture", False):
        return [_heads(_Config(c, num_key_value_heads=1))] * _depth(c)
    return _attention(c, kind)


def _refuse_unknown(c: _Config, kind: str) -> None:
    """Refuse a model with an unknown cache, so that it is never taken for plain attention."""
    for key in sorted(k for k in c if k.startswith(_STRANGE)):
        value = c[key]
        plain = key == "attn_type_list" and isinstance(value, list) and all(x == 1 for x in value)
        if value not in (None, False, 0, [], {}) and not plain:
            raise ConfigError(f"model_type {_shown.repr(kind)} has {key}, so the cache of its layers is not known")
    names = c.get("architectures")
    if kind == "mimo_v2_flash":
        raise ConfigError(f"model_type {kind!r} has other heads in its sliding layers, but no field for them")
    for name in (kind, *(names if isinstance(names, list) else [])):
        if isinstance(name, str) and _SOUNDS_RECURRENT.search(name.lower()):
            raise ConfigError(f"model_type {_shown.repr(name)} sounds recurrent, so its cache is not known")


def _attention(c: _Config, kind: str) -> list[Layer]:
    depth = _depth(c)
    window = c.number("sliding_window", default=0, least=0)
    # Qwen has windows only if `use_sliding_window` is set.
    used = c.flag("use_sliding_window", not kind.startswith("qwen"))
    window = window if used else 0
    kinds = _kinds(c, kind, depth, window)
    if used and SLIDING in kinds and not window:
        raise ConfigError(f"layer_types has {SLIDING!r}, but sliding_window is missing")
    made: list[Layer] = []
    for name in kinds:
        layer = _Config(c, **_override(c, kind, name))
        made.append(_heads(layer, window if name == SLIDING else 0))
    # The last layers of some models read the cache of earlier ones, so they have none.
    shared = c.number("num_kv_shared_layers", default=0, least=0)
    if shared >= depth:
        raise ConfigError(f"num_kv_shared_layers {shared} leaves none of {depth} layers")
    return made[: depth - shared]


def _kinds(c: _Config, kind: str, depth: int, window: int) -> list[str]:
    if c.get("layer_types") is not None:
        kinds = c.kinds("layer_types", known=(FULL, SLIDING), length=depth)
    elif not window:
        kinds = [FULL] * depth
    elif kind in ("qwen2", "qwen3"):
        # Their first `max_window_layers` layers are full.
        full = c.number("max_window_layers", default=28, least=0)
        kinds = [FULL if i < full else SLIDING for i in range(depth)]
    elif kind == "qwen2_moe":
        near = c.number("max_window_layers", default=28, least=0)
        kinds = [SLIDING if i % 2 == 0 and i < near else FULL for i in range(depth)]
    else:
        usual = _KNOWN["patterns"].get(kind, 0)
        pattern = c.number("sliding_window_pattern", "_sliding_window_pattern", default=usual, least=0)
        kinds = [FULL if pattern and (i + 1) % pattern == 0 else SLIDING for i in range(depth)]
    # Gemma 4 makes its last layer full in any case.
    return [*kinds[:-1], FULL] if kind == "gemma4" else kinds


def _override(c: _Config, kind: str, name: str) -> dict[str, Any]:
    """Return the fields in which a layer differs from the rest."""
    if kind != "gemma4" or name == SLIDING:
        return {}
    wide = {"head_dim": c.number("global_head_dim", default=512)}
    if c.flag("attention_k_eq_v", False) and c.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = c.number("num_global_key_value_heads")
    return wide


def _mamba(c: _Config) -> list[Layer]:
    channels = c.number("intermediate_size", default=0, least=0) or _expanded(c, "expand")
    return [_mamba1(channels, c.number("state_size"), c.number("conv_kernel", least=2))] * _depth(c)


def _jamba(c: _Config) -> list[Layer]:
    channels = _expanded(c, "mamba_expand")
    state = _mamba1(channels, c.number("mamba_d_state"), c.number("mamba_d_conv", least=2))
    period, offset = c.number("attn_layer_period"), c.number("attn_layer_offset", least=0)
    if offset >= period:
        raise ConfigError(f"attn_layer_offset {offset} is not below attn_layer_period {period}")
    return [_heads(c) if i % period == offset else state for i in range(_depth(c))]


def _bamba_state(c: _Config) -> State:
    return _mamba2(c, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _bamba(c: _Config) -> list[Layer]:
    depth, state = _depth(c), _bamba_state(c)
    if c.get("layer_types") is not None or c.get("layers_block_type") is not None:
        kinds = c.kinds("layer_types", "layers_block_type", known=(FULL, LINEAR), length=depth)
        return [_heads(c) if k == FULL else state for k in kinds]
    chosen = [] if c.get("attn_layer_indices") is None else c["attn_layer_indices"]
    if not isinstance(chosen, list) or not all(type(i) is int and 0 <= i < depth for i in chosen):
        raise ConfigError(f"attn_layer_indices is {_shown.repr(chosen)}, not a list of layers below {depth}")
    return [_heads(c) if i in set(chosen) else state for i in range(depth)]


def _nemotron_h(c: _Config) -> list[Layer]:
    pattern = c.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        if strange := sorted(set(pattern) - set("M*-E|")):
            raise ConfigError(f"hybrid_override_pattern has {strange[0]!r}; M, *, - and E are known")
        if len(pattern) > MOST_LAYERS:
            raise ConfigError(f"hybrid_override_pattern names {len(pattern)} layers, more than {MOST_LAYERS}")
        kinds = [FULL if k == "*" else LINEAR for k in pattern if k in "M*"]
    elif pattern is not None:
        raise ConfigError(f"hybrid_override_pattern is {_shown.repr(pattern)}, not a string")
    else:
        kinds = c.kinds(
            "hybrid_override_pattern", "layers_block_type", "layer_types", known=(FULL, LINEAR, "mlp", "moe")
        )
    state = _mamba2(c, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
    # vLLM keeps it in float32 unless the configuration says otherwise (NemotronHForCausalLMConfig).
    state = msgspec.structs.replace(state, dtype=state.dtype or "float32")
    return [_heads(c) if k == FULL else state for k in kinds if k in (FULL, LINEAR)]


def _qwen3_next(c: _Config) -> list[Layer]:
    depth = _depth(c)
    (k_heads, k_dim), (v_heads, v_dim) = (
        (c.number(f"linear_num_{x}_heads"), c.number(f"linear_{x}_head_dim")) for x in ("key", "value")
    )
    conv = (Projection("q", k_heads, k_dim), Projection("k", k_heads, k_dim), Projection("v", v_heads, v_dim))
    kernel = c.number("linear_conv_kernel_dim", least=2)
    net = State(conv, kernel - 1, v_heads, (k_dim, v_dim), _state_dtype(c))
    if c.get("layer_types") is not None:
        kinds = c.kinds("layer_types", known=(FULL, LINEAR), length=depth)
    else:
        every = c.number("full_attention_interval", default=4)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(depth)]
    return [net if k == LINEAR else _heads(c) for k in kinds]


def _state_dtype(c: _Config) -> str:
    """Return the type of recurrent states, or "" for the model's type, which is vLLM's default.

    vLLM (`MambaStateDtypeCalculator`) reads the first field for Nemotron-H, and the second for Qwen 3.5.
    """
    return c.dtype("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def _mamba2(c: _Config, heads: str, head_dim: str, groups: str, state: str, kernel: str) -> State:
    num, size = c.number(heads), c.get(head_dim)
    if size in (None, "auto"):
        channels = c.number("mamba_d_ssm", default=0, least=0)
        channels = channels or _expanded(c, "mamba_expand" if "mamba_expand" in c else "expand")
        if channels % num:
            raise ConfigError(f"has no {head_dim}, and {channels} channels are no multiple of {heads} {num}")
        size = channels // num
    else:
        size = c.number(head_dim)
    num_groups, num_states = c.number(groups, default=1, least=0), c.number(state)
    conv = [Projection("x", num, size)]
    if num_groups:
        conv += [Projection("b", num_groups, num_states), Projection("c", num_groups, num_states)]
    return State(tuple(conv), c.number(kernel, least=2) - 1, num, (size, num_states), _state_dtype(c))


def _expanded(c: _Config, key: str) -> int:
    hidden, expand = c.number("hidden_size"), c.number(key, default=2)
    if hidden * expand > MOST:
        raise ConfigError(f"{key} {expand} makes more than {MOST} channels of hidden_size {hidden}")
    return hidden * expand


def _depth(c: _Config) -> int:
    depth = c.number("num_hidden_layers", "n_layer")
    if depth > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers {depth} is more than {MOST_LAYERS}")
    return depth


_RECURRENT: Mapping[str, Callable[[_Config], list[Layer]]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), _mamba),
    "mamba2": lambda c: [_mamba2(c, "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")] * _depth(c),
    "jamba": _jamba,
    **dict.fromkeys(("bamba", "granitemoehybrid"), _bamba),
    "falcon_h1": lambda c: [layer for _ in range(_depth(c)) for layer in (_heads(c), _bamba_state(c))],
    "nemotron_h": _nemotron_h,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _qwen3_next),
}
_KNOWN = tomllib.loads(resources.files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))
_DEFAULTS: Mapping[str, Mapping[str, int]] = _KNOWN["defaults"]
_STRANGE = tuple(_KNOWN["strange"])
_SOUNDS_RECURRENT = re.compile("|".join(_KNOWN["recurrent"]))
PRESETS = {name: model_of_config(config, name) for name, config in _KNOWN["presets"].items()}
