"""The cached arrays of each layer of a model, from presets and from Hugging Face configurations."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Container, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asynckv.arguments import nearest, one_of, shown
from asynckv.errors import ConfigError
from asynckv.geometry.layout import ITEMSIZE

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
MOST = 1 << 20
MOST_LAYERS = 4096
MOST_CONFIG = 16 << 20


class Index(Struct, frozen=True):
    """Keys by which sparse attention chooses tokens, the same on all ranks. A block has keys before their scales."""

    dim: int
    dtype: str
    scales: int = 0  # float32 scales per token


class Heads(Struct, frozen=True, tag="heads"):
    """Attention that keeps keys and values per KV head (MHA, GQA, MQA). A `v_head_dim` of 0 means `head_dim`.

    With a `window`, the next token attends to itself and the `window - 1` tokens before it. Attention in chunks keeps
    at most a chunk, so it has a window of that size.
    """

    num_heads: int
    head_dim: int
    v_head_dim: int = 0
    window: int = 0
    index: Index | None = None


class Latent(Struct, frozen=True, tag="latent"):
    """Attention that keeps one latent and a rotary key per token (MLA), the same on all tensor-parallel ranks."""

    rank: int
    rope_dim: int
    window: int = 0
    index: Index | None = None


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
        changes = {} if kv_heads is None else {"num_heads": kv_heads}
        changes |= {} if head_dim is None else {"head_dim": head_dim, "v_head_dim": 0}
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
    kinds: dict[tuple[object, ...], int] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault((State,) if isinstance(layer, State) else (type(layer), layer.window, layer.index), i)
    shapes = {layer: i for i, layer in reversed(list(enumerate(layers)))}
    order = dict.fromkeys([*kinds.values(), *sorted(shapes.values()), *range(len(layers))])
    return tuple(layers[i] for i in sorted(list(order)[:count]))


def preset(name: str) -> Model:
    if (found := PRESETS.get(name.lower())) is not None:
        return found
    hint = f"did you mean {near}? " if (near := nearest(name.lower(), PRESETS, 0.5)) else ""
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
    return plain if plain in ITEMSIZE else one_of("dtype", name, sorted(ITEMSIZE), ConfigError)


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
        raise ConfigError(f"text_config is {shown(text)}, not an object")
    kind = (text or {}).get("model_type") or config.get("model_type") or ""
    if not isinstance(kind, str):
        raise ConfigError(f"model_type is {shown(kind)}, not a name")
    kind = kind.removesuffix("_text")
    # Fields that transformers' class adds, but for the number of KV heads if the file has it by another name.
    has_heads = any(name in (text or config) for name in _KV_HEADS)
    defaults = {k: v for k, v in _DEFAULTS.get(kind, {}).items() if not (has_heads and k in _KV_HEADS)}
    if text is None:
        # Sizes of the whole model are never left out.
        inner = _Config({**{k: v for k, v in defaults.items() if k not in _SIZES}, **config})
    else:
        # The outer fields describe other models, such as a vision tower; only the element type is taken from them.
        around = {k: config[k] for k in ("dtype", "torch_dtype") if k in config}
        inner = _Config({**around, **defaults, **text})
        is_known = kind in _DEFAULTS or kind in _KNOWN["derived"] or kind in _KNOWN["states"]
        if not is_known and text.get("kv_lora_rank") is None:
            needed = ["head_dim"] if has_heads else ["num_key_value_heads", "head_dim"]
            if absent := [field for field in needed if field not in text]:
                raise ConfigError(
                    f"text_config leaves {absent[0]} to the default of model_type {shown(kind)}, which is not "
                    f"known here; write it out"
                )
    if kind in _KNOWN["encoders"] or any(inner.flag(x, False) for x in ("is_encoder_decoder", "add_cross_attention")):
        raise ConfigError(f"model_type {shown(kind)} is not a decoder alone, so it keeps no such KV cache")
    layers = (_hybrid if kind in _KNOWN["states"] else _attention)(inner, kind)
    _refuse_unknown(inner, kind)
    if not layers:
        raise ConfigError("describes no layer with a cache")
    dtype = inner.dtype("dtype", "torch_dtype")
    # vLLM computes in 16 bits what was saved in 32.
    return Model(name, tuple(layers), _quantised(config, layers) or ("bfloat16" if dtype in ("", "float32") else dtype))


def _quantised(config: Mapping[str, Any], layers: list[Layer]) -> str:
    """Return the type of the cache that a quantised model asks for, or "" if it asks for none."""
    quantised = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    inner = quantised.get("quantization") if isinstance(quantised, dict) else None
    objects = [x for x in (inner, quantised) if isinstance(x, dict)]
    schemes = [x.get(key) for x in objects for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    if (scheme := next((x for x in schemes if x), None)) is None:
        return ""
    asked = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, dict) else str(scheme).lower()
    if asked not in ((8, "float"), "fp8") or any(isinstance(x, State) or x.index is not None for x in layers):
        raise ConfigError(f"quantization_config has the KV cache scheme {shown(scheme)}, which is not known here")
    return "float8_e4m3fn"


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Names before Transformers 5, and kinds that differ from these in their other fields only.
_OLD_NAMES = dict.fromkeys(("attention", "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"), FULL)
_OLD_NAMES |= {"mamba": LINEAR, "chunked_attention": SLIDING}


class _Config(dict[str, Any]):
    """An untrusted configuration, which notes the fields that are read.

    Fields of the objects in `nested` are fields of the configuration too, such as `attn_config.kv_n_heads`.
    """

    def __init__(self, fields: Mapping[str, Any], read: set[str] | None = None) -> None:
        super().__init__(fields)
        self.read = set[str]() if read is None else read
        for outer in _KNOWN["nested"]:
            if isinstance(inner := fields.get(outer), dict):
                self.update({f"{outer}.{key}": value for key, value in inner.items()})
                self.read.add(outer)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        # Another name of the same number is read too.
        key = next(iter([k for k in keys if self.get(k) is not None]), keys[0])
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            what = "is missing" if value is None else f"is {shown(value)}, not a number from {least} to {MOST}"
            raise ConfigError(f"{' or '.join(keys) if value is None else key} {what}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{key} is {shown(value)}, not true or false")
        return default if value is None else value

    def dtype(self, *keys: str) -> str:
        key = next((k for k in keys if self.get(k) not in (None, "", "auto")), "")
        if not key:
            return ""
        if not isinstance(self[key], str):
            raise ConfigError(f"{key} is {shown(self[key])}, not a name")
        try:
            return dtype_named(self[key])
        except ConfigError as exc:
            raise ConfigError(f"{key.removesuffix('dtype')}{exc}") from None

    def listed(self, key: str, length: int, known: Container[object]) -> list[Any]:
        """Read a list of known entries, one for each of `length` layers if that is given."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) < length:
            raise ConfigError(f"{key} is not a list of {length or 'all'} names or numbers, one per layer")
        if len(value) > MOST_LAYERS:
            raise ConfigError(f"{key} names {len(value)} layers, more than {MOST_LAYERS}")
        # Layers that predict more tokens at once come last; they belong to a draft model.
        if length and (more := len(value) - length) not in (0, self.get("num_nextn_predict_layers")):
            raise ConfigError(f"{key} names {len(value)} layers, {more} more than num_hidden_layers {length}")
        if strange := [x for x in value if not isinstance(x, str | int) or x not in known]:
            raise ConfigError(f"{key} has {shown(strange[0])}, so the cache of such a layer is not known")
        return value[: length or None]

    def kinds(self, *keys: str, known: tuple[str, ...], length: int = 0) -> list[str]:
        """Read the kind of each layer, and check that there are `length` of them if it is given."""
        key = next((k for k in keys if self.get(k) is not None), "")
        if not key:
            raise ConfigError(f"{' or '.join(keys)} is missing")
        names = [*known, *(old for old, name in _OLD_NAMES.items() if name in known)]
        return [_OLD_NAMES.get(x, x) for x in self.listed(key, length, names)]


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_kv_shared_layers")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""vLLM's names for the number of KV heads, in its order."""


def _kept(c: _Config, kind: str, window: int = 0, index: Index | None = None) -> Heads | Latent:
    """Return what a layer of attention keeps."""
    is_latent = c.get("kv_lora_rank") is not None
    if is_latent and kind not in _KNOWN["unabsorbed"]:
        return Latent(c.number("kv_lora_rank"), c.number("qk_rope_head_dim", least=0), window, index)
    heads = c.number(*_KNOWN["heads"])
    if is_latent:
        # vLLM keeps what it computes from the latents, and pads values to the width of keys.
        return Heads(heads, c.number("qk_nope_head_dim") + c.number("qk_rope_head_dim"), 0, window)
    head_dim = c.number(*_KNOWN["head_dims"], default=0, least=0)
    if not head_dim:
        hidden = c.number(*_KNOWN["hidden_sizes"])
        if hidden % heads:
            raise ConfigError(f"has no head_dim, and hidden_size {hidden} is no multiple of {heads} attention heads")
        head_dim = hidden // heads
    # These have one KV head or all of them, but for Falcon's new architecture.
    has_flag, is_new = kind in _KNOWN["multi_query"], c.flag("new_decoder_architecture", False)
    is_one = c.flag("multi_query", has_flag) and not is_new
    is_grouped = c.get("multi_query_attention")  # of ChatGLM
    kv_heads = c.number("attn_config.kv_n_heads", *_KV_HEADS, default=1 if is_one or is_grouped else heads)
    if is_grouped is False or (has_flag and not is_new):
        kv_heads = 1 if is_one else heads
    if kv_heads > heads:
        raise ConfigError(f"num_key_value_heads {kv_heads} are more than the {heads} attention heads")
    v_head_dim = c.number("v_head_dim", default=0, least=0)
    return Heads(kv_heads, head_dim, 0 if v_head_dim == head_dim else v_head_dim, window, index)


def _refuse_unknown(c: _Config, kind: str) -> None:
    """Refuse a field that may speak of a cache but was not read, so that a model is never taken for plain attention."""
    # All readers of heads read these names.
    harmless = [*_KNOWN["harmless"], *_KNOWN["harmless_in"].get(kind, ()), *_KNOWN["heads"], *_KV_HEADS]
    for settled, names in _KNOWN["settled"].items():
        harmless += names if c.get(settled) is not None else []
    for key, value in sorted(c.items()):
        outer = next((x for x in ("per_layer_config", *_KNOWN["nested"]) if key.startswith(f"{x}.")), "")
        name = key.removeprefix(f"{outer}.")
        plain = (None, False, 0, "", [], {}, *_KNOWN["plain"].get(name, ()))
        is_read = key in c.read or (outer == "per_layer_config" and name in c.read)
        if is_read or all(x in plain for x in (value if isinstance(value, list) else [value])):
            continue
        if _SUSPICIOUS.search(name.lower()) and not re.fullmatch("|".join(harmless), name):
            raise ConfigError(f"model_type {shown(kind)} has {key}, so the cache of its layers is not known")
    names = c.get("architectures")
    for name in (kind, *(names if isinstance(names, list) else [])):
        if kind not in _KNOWN["states"] and isinstance(name, str) and _SOUNDS_RECURRENT.search(name.lower()):
            raise ConfigError(f"model_type {shown(name)} sounds recurrent, so its cache is not known")


def _attention(c: _Config, kind: str) -> list[Layer]:
    # Each of LongCat's `num_layers` has attention twice.
    depth = _depth(c) * (2 if kind.startswith("longcat_flash") and c.get("num_hidden_layers") is None else 1)
    # Qwen has windows only if `use_sliding_window` is set.
    used = c.flag("use_sliding_window", not kind.startswith("qwen"))
    window = c.number(*_KNOWN["windows"].get(kind, ("sliding_window",)), default=0, least=0) * used
    window += window > 0 and kind in _KNOWN["inclusive"]
    kinds = _kinds(c, kind, depth, window)
    if used and SLIDING in kinds and not window:
        raise ConfigError(f"layer_types has {SLIDING!r}, but sliding_window is missing")
    made: list[Layer] = []
    for name, other, index in zip(kinds, _others(c, kind, kinds), _indexes(c, kind, depth), strict=True):
        layer = _Config({**c, **other}, c.read) if other else c
        near = layer.number("sliding_window", default=0, least=0) if "sliding_window" in other else window
        made.append(_kept(layer, kind, near if name == SLIDING else 0, index))
    # The last layers of some models read the cache of earlier ones, so they have none.
    shared = c.number("num_kv_shared_layers", default=0, least=0)
    if shared >= depth:
        raise ConfigError(f"num_kv_shared_layers {shared} leaves none of {depth} layers")
    return made[: depth - shared]


def _kinds(c: _Config, kind: str, depth: int, window: int) -> list[str]:
    near = _KNOWN["near"].get(kind, "")
    if near and c.get(near):
        kinds = [SLIDING if x and window else FULL for x in c.listed(near, depth, (0, 1))]
    elif c.get("layer_types") is not None:
        kinds = c.kinds("layer_types", known=(FULL, SLIDING), length=depth)
    elif near and kind not in _KNOWN["patterns"]:
        raise ConfigError(f"{near} and layer_types are missing")
    elif not window:
        kinds = [FULL] * depth
        c.read.update(_KNOWN["windowed"])
    elif kind in ("qwen2", "qwen3", "qwen2_moe"):
        # The first `max_window_layers` layers are full, or every second of them has a window.
        first, odd = c.number("max_window_layers", default=28, least=0), 2 if kind == "qwen2_moe" else 0
        kinds = [SLIDING if (i < first and i % odd == 0 if odd else i >= first) else FULL for i in range(depth)]
    else:
        usual = _KNOWN["patterns"].get(kind, 0)
        names = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")
        pattern = c.number(*names, default=usual, least=0)
        kinds = [FULL if pattern and (i + 1) % pattern == 0 else SLIDING for i in range(depth)]
    # Gemma 4 makes its last layer full in any case.
    return [*kinds[:-1], FULL] if kind.startswith("gemma4") else kinds


def _others(c: _Config, kind: str, kinds: list[str]) -> list[Mapping[str, Any]]:
    """Return the fields in which each layer differs from the rest."""
    if (each := c.get("per_layer_config")) is not None:
        try:
            found = {int(key): dict(fields) for key, fields in each.items()}
        except (AttributeError, OverflowError, TypeError, ValueError):
            raise ConfigError(f"per_layer_config is {shown(each)}, not an object of layers") from None
        for fields in found.values():
            c.update({f"per_layer_config.{key}": value for key, value in fields.items()})
        return [found.get(i, {}) for i in range(len(kinds))]
    if kind.startswith("gemma4"):
        c.setdefault("global_head_dim", 512)
        if not c.flag("attention_k_eq_v", False):
            c["num_global_key_value_heads"] = None
    elif kind.startswith("mimo_v2") and c.get("swa_num_key_value_heads") is None:
        # Transformers doubles the heads of these layers without a field.
        c["swa_num_key_value_heads"] = 2 * c.number("num_key_value_heads")
    if kind.startswith("mimo_v2") and c.get("swa_v_head_dim") is None:
        c["swa_v_head_dim"] = c.get("swa_head_dim")
    if kind == "step3p5" and isinstance(other := c.get("attention_other_setting"), dict):
        # Versions of vLLM differ in whether they read it.
        for key in ("num_attention_groups", "head_dim"):
            if other.get(key, c.get(key)) != c.get(key):
                raise ConfigError(f"attention_other_setting has {key} {shown(other[key])}, not {c.get(key)}")
    others = {
        layer: {field: c.number(own) for field, own in names.items() if c.get(own) is not None}
        for layer, names in _KNOWN["others"].get(kind, {}).items()
    }
    return [others.get(name, {}) for name in kinds]


def _indexes(c: _Config, kind: str, depth: int) -> list[Index | None]:
    """Return the index of each layer, as vLLM keeps it."""
    if kind in _KNOWN["indexed"] and (kind != "deepseek_v3" or c.get("index_topk") is not None):
        # Some layers choose the tokens that the one before them chose.
        every, first = c.number("index_topk_freq", default=1), c.number("index_skip_topk_offset", default=2, least=0)
        pattern = c.get("index_topk_pattern")
        if pattern is not None and (not isinstance(pattern, str) or not re.fullmatch(f"[FS]{{{depth},}}", pattern)):
            raise ConfigError(f"index_topk_pattern is {shown(pattern)}, not F or S for each of {depth} layers")
        chosen = [pattern[i] == "F" if pattern else max(i - first + 1, 0) % every == 0 for i in range(depth)]
        types = ["full" if x else "shared" for x in chosen]
        if c.get("indexer_types") not in (None, types):
            raise ConfigError("indexer_types differs from index_topk_freq and index_topk_pattern, which vLLM reads")
        dim = c.number("index_head_dim")
        index = Index(dim, "float8_e4m3fn", dim // 128)
    elif kind.startswith("minimax_m3"):
        nested = "sparse_attention_config"
        key = "layer_types" if c.get(nested) is None else f"{nested}.sparse_attention_freq"
        chosen = [x not in (0, FULL) for x in c.listed(key, depth, (0, 1, FULL, "minimax_m3_sparse"))]
        index = Index(c.number(f"{nested}.sparse_index_dim", "index_head_dim"), "bfloat16")
    else:
        return [None] * depth
    return [index if x else None for x in chosen]


def _hybrid(c: _Config, kind: str) -> list[Layer]:
    """Read a model of which some or all layers are recurrent."""
    kinds, (maker, *names) = _hybrid_kinds(c, kind), _KNOWN["states"][kind]
    states = [_MAKERS[maker](c, *names)] if LINEAR in kinds else []
    return [states[0] if k == LINEAR else _kept(c, kind) for k in kinds if k in (FULL, LINEAR)]


def _hybrid_kinds(c: _Config, kind: str) -> list[str]:
    if (pattern := c.get("hybrid_override_pattern")) is not None:
        if not isinstance(pattern, str) or not re.fullmatch(f"[M*E|-]{{1,{MOST_LAYERS}}}", pattern):
            what = f"1 to {MOST_LAYERS} of M, *, - and E"
            raise ConfigError(f"hybrid_override_pattern is {shown(pattern)}, not {what}")
        return [FULL if k == "*" else LINEAR for k in pattern if k in "M*"]
    lists = ("layer_types", "layers_block_type")
    if kind == "nemotron_h":
        return c.kinds("hybrid_override_pattern", *lists[::-1], known=(FULL, LINEAR, "mlp", "moe"))
    depth = _depth(c)
    if (each := _KNOWN["each"].get(kind)) is not None:
        return [*each] * depth
    if any(c.get(key) is not None for key in lists):
        return c.kinds(*lists, known=(FULL, LINEAR), length=depth)
    if kind == "kimi_linear":
        names = [f"linear_attn_config.{key}" for key in ("kda_layers", "full_attn_layers")]
        linear, full = (c.listed(name, 0, range(1, depth + 1)) for name in names)
        if sorted([*linear, *full]) != list(range(1, depth + 1)):
            raise ConfigError(f"{' and '.join(names)} do not name each of {depth} layers once")
        return [LINEAR if i + 1 in linear else FULL for i in range(depth)]
    if kind in ("bamba", "granitemoehybrid"):
        chosen = c.listed("attn_layer_indices", 0, range(depth)) if c.get("attn_layer_indices") is not None else []
        return [FULL if i in chosen else LINEAR for i in range(depth)]
    is_jamba = kind == "jamba"
    period = c.number("attn_layer_period", "full_attention_interval", default=None if is_jamba else 4)
    offset = c.number("attn_layer_offset", default=None if is_jamba else period - 1, least=0)
    if offset >= period:
        raise ConfigError(f"attn_layer_offset {offset} is not below attn_layer_period {period}")
    return [FULL if i % period == offset else LINEAR for i in range(depth)]


def _mamba(c: _Config, width: str, state: str, kernel: str) -> State:
    channels = _channels(c, width)
    return State((Projection("x", channels, 1),), c.number(kernel, least=2) - 1, channels, (c.number(state),))


def _delta_net(c: _Config, key: str, value: str, field: str, usual: str) -> State:
    inner = "linear_attn_config"
    kernel = c.number(f"{inner}.short_conv_kernel_size", "linear_conv_kernel_dim", least=2)
    (k_heads, k_dim), (v_heads, v_dim) = (
        (c.number(f"linear_num_{x}heads", f"{inner}.num_heads"), c.number(f"linear_{x}head_dim", f"{inner}.head_dim"))
        for x in (key, value)
    )
    conv = (Projection("q", k_heads, k_dim), Projection("k", k_heads, k_dim), Projection("v", v_heads, v_dim))
    return State(conv, kernel - 1, v_heads, (v_dim, k_dim), c.dtype(field) or usual)


def _mamba2(
    c: _Config, heads: str, head_dim: str, groups: str, state: str, kernel: str, field: str, usual: str
) -> State:
    num, size = c.number(heads), c.get(head_dim)
    if size in (None, "auto"):
        channels = _channels(c, "mamba_d_ssm")
        if channels % num:
            raise ConfigError(f"has no {head_dim}, and {channels} channels are no multiple of {heads} {num}")
        size = channels // num
    else:
        size = c.number(head_dim)
    num_groups, num_states = c.number(groups, default=1, least=0), c.number(state)
    conv = Projection("x", num, size), *(Projection(x, num_groups, num_states) for x in "bc" if num_groups)
    return State(conv, c.number(kernel, least=2) - 1, num, (size, num_states), c.dtype(field) or usual)


def _channels(c: _Config, field: str) -> int:
    """Return the channels that a field gives, or those into which the hidden size is expanded."""
    if given := c.number(field, default=0, least=0):
        return given
    key = "mamba_expand" if "mamba_expand" in c else "expand"
    hidden, expand = c.number("hidden_size"), c.number(key, default=2)
    if hidden * expand > MOST:
        raise ConfigError(f"{key} {expand} makes more than {MOST} channels of hidden_size {hidden}")
    return hidden * expand


def _depth(c: _Config) -> int:
    if all(c.get(name) is None for name in _KNOWN["depths"]):
        for key, value in c.items():
            if isinstance(value, dict) and value.keys() & set(_KNOWN["depths"]):
                raise ConfigError(f"has no number of layers; {key} has one: give that object as the configuration")
    depth = c.number(*_KNOWN["depths"])
    if depth > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers {depth} is more than {MOST_LAYERS}")
    return depth


_KNOWN = tomllib.loads(resources.files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))
_DEFAULTS: Mapping[str, Mapping[str, int]] = _KNOWN["defaults"] | _KNOWN["defaults_of_vllm"]
_MAKERS: Mapping[str, Callable[..., State]] = {"mamba": _mamba, "mamba2": _mamba2, "delta_net": _delta_net}
_SUSPICIOUS = re.compile("|".join(_KNOWN["suspicious"]))
_SOUNDS_RECURRENT = re.compile("|".join(_KNOWN["recurrent"]))
PRESETS = {name: model_of_config(config, name) for name, config in _KNOWN["presets"].items()}
