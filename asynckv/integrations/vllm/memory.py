"""Declares vLLM's KV caches: makes a `Registration` from its configuration and the tensors that it registers.

Each layer's blocks are a strided view of a storage, so tensors and strides give the bytes of a block. Their meaning is
in the specification of each layer's group, in the model's configuration and in the layer objects. Nothing is guessed: a
layer of unknown structure is declared as opaque, and a cache that cannot be moved is refused at start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asynckv.edges.torch import TensorPart, identity, register_parts
from asynckv.errors import ConfigError
from asynckv.geometry.check import Registration
from asynckv.geometry.layout import ONE_PER_REQUEST, Group, TokenShard
from asynckv.geometry.pairing import Padding
from asynckv.integrations.vllm import compat
from asynckv.integrations.vllm.caches import Attention, Opaque, Place, is_known, kv_heads, states
from asynckv.integrations.vllm.early import check_parallel

if TYPE_CHECKING:
    from asynckv.edges.torch import Tensor

log = logging.getLogger("vllm.asynckv")
NULL_BLOCK = 0  # vLLM's id for a place without a block


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts that specifications lack, from the model's configuration and its layers; None if not known."""

    name: str = ""
    num_kv_heads: int | None = None  # KV heads of the whole model, as vLLM gives them; some layers may have others
    num_mamba_groups: int | None = None  # groups of Mamba-2's B and C in the whole model
    is_conv_dim_first: bool | None = False  # True if convolution states have channels before columns; None if not known
    cache_dtype: str = "auto"  # `--kv-cache-dtype`
    layers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any) -> ModelFacts:
        model, heads = vllm_config.model_config, None
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            heads = int(model.get_total_num_kv_heads())
        config = getattr(model, "hf_text_config", None)
        named = (getattr(config, key, None) for key in ("mamba_n_groups", "mamba_ngroups", "n_groups", "ngroups"))
        layers = getattr(vllm_config.compilation_config, "static_forward_context", None)
        return cls(
            name=str(getattr(model, "model", "") or ""),
            num_kv_heads=heads,
            num_mamba_groups=next((n for n in named if type(n) is int and n > 0), None),
            is_conv_dim_first=compat.is_conv_state_dim_first(),
            cache_dtype=str(vllm_config.cache_config.cache_dtype),
            layers=layers if isinstance(layers, Mapping) else {},
        )

    def backend(self, layer: str) -> str:
        """Return the name of a layer's attention backend; empty without a layer object (in vLLM's tests)."""
        found: Any = self.layers.get(layer)
        if not hasattr(found, "get_attn_backend"):
            return ""
        name = str(found.get_attn_backend().get_name())
        # On CPUs keys are packed for one instruction set, so engines with different ones must not meet.
        isa = getattr(found, "isa", None)
        return f"{name} {isa}" if isinstance(isa, str) else name

    def mamba_groups(self, layer: str, place: Place) -> int | None:
        """Return the whole model's number of groups of B and C. A layer may count replicas, but its norm does not."""
        found = self.layers.get(layer)
        own = getattr(getattr(found, "norm", None), "n_groups", None)
        if type(own) is not int:
            own = getattr(found, "n_groups", None)
            own = None if own == place.tp_size else own
        return own if type(own) is int else self.num_mamba_groups

    def is_by_token(self, layer: str, spec: Any) -> bool:
        """Return True if every entry of a layer can be moved alone; without a backend the tensor's dims decide."""
        return not self.backend(layer) or compat.is_by_token(self.layers[layer], spec)


def place_of(vllm_config: Any) -> Place:
    """Return a worker's place from its process groups, or from its rank if there are none."""
    parallel, state = vllm_config.parallel_config, compat.parallel_state
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pcp_size = parallel.prefill_context_parallel_size
    # vLLM numbers workers by stage, then by PCP rank, then by TP rank.
    rest, tp_rank = divmod(parallel.rank % (tp_size * pcp_size * pp_size), tp_size)
    pp_stage, pcp_rank = divmod(rest, pcp_size)
    if state is not None and state.model_parallel_is_initialized():
        found = state.get_tp_group(), state.get_pp_group(), state.get_pcp_group()
        if tuple(each.world_size for each in found) == (tp_size, pp_size, pcp_size):
            tp_rank, pp_stage, pcp_rank = (each.rank_in_group for each in found)
    dcp_size, interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
    return Place(tp_rank, tp_size, pp_stage, pp_size, pcp_rank, pcp_size, dcp_size, interleave)


def check_supported(vllm_config: Any, config: Any) -> None:
    """Raise `ConfigError` for caches that cannot be moved, before they are allocated; it names the option to change."""
    check_parallel(vllm_config.parallel_config, vllm_config.kv_transfer_config.kv_role)
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not compat.calls("unregister_kv_caches"):
        raise ConfigError(
            f"--enable-sleep-mode: vLLM {compat.version()} does not tell a connector that its memory goes, so "
            f"readers would get other bytes; remove the option, or use vLLM 0.33 or later"
        )
    for group in compat.transfer_groups(config):
        if getattr(group, "host_resident", False):
            raise ConfigError(
                f"layers {_some(group.layer_names)} keep their blocks in host memory (HiSparse), which "
                f"AsyncKVConnector does not move; remove the option hisparse_config"
            )
        for layer, spec in compat.layer_specs(group).items():
            _check_spec(layer, spec)


def _check_spec(layer: str, spec: Any) -> None:
    if type(spec).__name__ == "CrossAttentionSpec":
        raise ConfigError(
            f"layer {layer!r} attends to an encoder, and a prompt's length does not give the encoder's tokens. "
            f"Encoder-decoder models cannot be disaggregated with AsyncKVConnector: remove --kv-transfer-config"
        )
    if not compat.is_known(spec):
        raise ConfigError(
            f"layer {layer!r} has a cache of kind {type(spec).__name__}, which AsyncKVConnector does not know; remove "
            f"--kv-transfer-config for this model"
        )


def register(config: Any, tensors: Mapping[str, Tensor], place: Place, facts: ModelFacts) -> Registration:
    """Declare a worker's KV caches, without the groups that are not transferred."""
    groups: list[Group] = []
    shards: list[TokenShard] = []
    made: list[TensorPart] = []
    owners: dict[tuple[object, ...], str] = {}
    opaque: list[str] = []
    is_guess = False
    for index, group in enumerate(compat.transfer_groups(config)):
        ratios: dict[int, str] = {}
        shared_by = compat.num_token_shards(group.kv_cache_spec, place.dcp_size)
        shards.append(TokenShard(index, shared_by, place.rank % shared_by, place.interleave))
        for layer, spec in compat.layer_specs(group).items():
            _check_spec(layer, spec)
            if isinstance(spec, compat.EncoderOnlyAttentionSpec):
                continue  # has no cache
            tensor = _tensor_of(layer, tensors)
            owners.setdefault(identity(tensor), layer)
            what = layer, spec, place, facts
            kind = _states(*what, tensor, index) if isinstance(spec, compat.MambaSpec) else _attention(*what)
            if shared_by > 1:
                kind = _shared(layer, spec, kind, tensor, place, facts)
            ratios.setdefault(_ratio(layer, spec, tensor), layer)
            made += kind if isinstance(kind, list) else [kind.part(layer, tensor, index, place)]
            if isinstance(kind, Opaque) and not kind.is_replicated:
                opaque.append(layer)
            if isinstance(kind, Attention) and kind.heads is not None:
                # Layers may differ in heads, and a draft model's may be others. vLLM gives one number for the model.
                is_guess |= not is_known(spec.num_kv_heads, facts.num_kv_heads, place)
        if len(ratios) > 1:
            (one, layer), (other, second) = list(ratios.items())[:2]
            raise ConfigError(
                f"layer {layer!r} has {one} kernel blocks per block, but {second!r} of the same group has {other}; set "
                f"--block-size to a size that all attention backends take undivided"
            )
        groups.append(_group(index, group, config.num_blocks, next(iter(ratios), 1), shared_by))
    aliases = _aliases(tensors, {part.layer for part in made}, owners)
    if opaque:
        log.info(
            "the caches of layers %s are moved whole, and only between engines of tensor-parallel size %d, because "
            "their structure is not known",
            _some(opaque),
            place.tp_size,
        )
    if not made:
        raise ConfigError(
            f"pipeline stage {place.pp_stage} of {place.pp_size} has no layer with a KV cache, so readers could not "
            f"meet it; use fewer stages (--pipeline-parallel-size), or distribute the layers differently "
            f"(VLLM_PP_LAYER_PARTITION)"
        )
    registration = register_parts(
        made,
        groups=groups,
        tp_rank=place.rank,
        tp_size=place.size,
        pp_stage=place.pp_stage,
        pp_size=place.pp_size,
        model=facts.name,
        aliases=aliases,
        token_shards=shards,
    )
    if not is_guess:
        return registration
    return Registration(replace(registration.layout, guessed_axis="head"), registration.owners)


def _group(index: int, group: Any, num_blocks: int, ratio: int, shared_by: int) -> Group:
    specs = list(compat.layer_specs(group).values()) or [group.kv_cache_spec]
    spec = specs[0]
    if each := getattr(spec, "kv_cache_specs", None):  # this stage has none of the group's layers
        spec = next(iter(each.values()))
    window, kind, block_size = 0, "tokens", group.kv_cache_spec.block_size * shared_by
    if isinstance(spec, compat.MambaSpec | compat.CircularBufferSpec):
        kind = "state"
        if isinstance(spec, compat.CircularBufferSpec) or spec.mamba_cache_mode == "none":
            block_size = ONE_PER_REQUEST
    elif isinstance(spec, compat.SlidingWindowSpec):
        window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    name = f"{index}: {type(spec).__name__.removesuffix('Spec')}"
    return Group(name, block_size, num_blocks, ratio, kind=kind, window=window, null_block=NULL_BLOCK)  # type: ignore[arg-type]


def _tensor_of(layer: str, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(layer)
    if tensor is None:
        raise ConfigError(f"layer {layer!r} is in the KV cache's configuration, but vLLM registered no tensor for it")
    if isinstance(tensor, list | tuple) or tensor.dim() != 4:
        shape = [tuple(t.shape) for t in tensor] if isinstance(tensor, list | tuple) else tuple(tensor.shape)
        raise ConfigError(
            f"layer {layer!r}: a KV cache of shape {shape} is not (block, head, entry, content), and this is vLLM "
            f"{compat.version()}; use a version of vLLM that asynckv was tested with"
        )
    return tensor


def _attention(layer: str, spec: Any, place: Place, facts: ModelFacts) -> Attention | Opaque:
    is_latent = isinstance(spec, compat.MLAAttentionSpec | compat.SlidingWindowMLASpec)
    backend, by_token = facts.backend(layer), facts.is_by_token(layer, spec)
    # Engines that quantise differently must not meet, although their sizes are equal, so the name has the mode.
    content = "latent" if is_latent else "kv"
    if mode := compat.quantisation(spec):
        content += f" {mode}{' e5m2' if 'e5m2' in facts.cache_dtype else ''}"
    if not by_token and backend:
        content += f" {backend}"
    num_bytes = spec.num_heads * spec.num_states * spec.state_content_size_bytes
    if is_latent or spec.max_tp_shards == 1:
        held = None
    else:
        shares = spec.max_tp_shards
        if shares is None and spec.num_kv_heads == 1:
            shares = facts.num_kv_heads
        held = kv_heads(spec.num_kv_heads, shares, place)
    if isinstance(spec, compat.CircularBufferSpec) or (held is not None and spec.num_heads != spec.num_kv_heads):
        return Opaque(content=content, num_bytes=num_bytes, is_replicated=held is None)
    return Attention(
        content=content, heads=held, tokens_per_entry=Fraction(spec.tokens_per_state), is_by_token=by_token
    )


def _shared(layer: str, spec: Any, kind: Any, tensor: Tensor, place: Place, facts: ModelFacts) -> Attention:
    """Return a kind of layer for ranks that share its tokens, or raise `ConfigError` if they cannot be told apart."""
    where = f"layer {layer!r} ({facts.backend(layer) or type(spec).__name__})"
    apart = f"so the tokens of {place.dcp_size} ranks cannot be told apart"
    if not isinstance(kind, Attention):
        raise ConfigError(
            f"{where}: the structure of its blocks is not known, {apart}; set --decode-context-parallel-size to 1"
        )
    if not kind.is_by_token and place.interleave % (tensor.shape[2] * kind.tokens_per_entry):
        raise ConfigError(
            f"{where} keeps an order of its own inside a kernel block of {tensor.shape[2]} entries, {apart}; set "
            f"--cp-kv-cache-interleave-size (now {place.interleave}) to a block, or --decode-context-parallel-size to 1"
        )
    return dataclasses.replace(kind, is_shared=True)


def _states(
    layer: str, spec: Any, place: Place, facts: ModelFacts, pages: Tensor, group: int
) -> list[TensorPart] | Opaque:
    kind = spec.mamba_type.name.lower()
    is_dim_first = facts.is_conv_dim_first
    if is_dim_first is None:
        raise ConfigError(
            f"layer {layer!r}: vLLM {compat.version()} does not give the order of a convolution's state; use a "
            f"version of vLLM that asynckv was tested with"
        )
    if len(spec.shapes) == 2 and not spec.tp_replicated:
        given = spec.shapes, spec.dtypes, is_dim_first, facts.mamba_groups(layer, place)
        if (known := states(layer, kind, *given, pages, group, place)) is not None:
            return known
    dtypes = " ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
    return Opaque(
        content=f"{kind} {'channels' if is_dim_first else 'columns'} first {dtypes}",
        num_bytes=spec.state_content_size_bytes,
        is_replicated=spec.tp_replicated,
    )


def _ratio(layer: str, spec: Any, tensor: Tensor) -> int:
    if isinstance(spec, compat.MambaSpec | compat.CircularBufferSpec):
        return 1
    entries = spec.num_states
    if tensor.shape[2] < 1 or entries % tensor.shape[2]:
        raise ConfigError(
            f"layer {layer!r}: a kernel block holds {tensor.shape[2]} entries, which do not divide the {entries} of a "
            f"block of {spec.block_size} tokens; set --block-size to a multiple of the kernel block size"
        )
    return int(entries // tensor.shape[2])


def _aliases(
    tensors: Mapping[str, Tensor], known: set[str], owners: Mapping[tuple[object, ...], str]
) -> dict[str, str]:
    """Return the layers that are in no group, because they use the cache of a layer that is in one."""
    others = [each for each in tensors.items() if each[0] not in known and not isinstance(each[1], list | tuple)]
    return {layer: owners[at] for layer, tensor in others if (at := identity(tensor)) in owners}


@dataclass(frozen=True, slots=True)
class Tails:
    """Clears the end of last blocks that a pull did not fill, in models that rely on new blocks being zeroed.

    vLLM does not zero blocks that a connector loads. The unfilled end would keep an earlier owner's bytes, and a kernel
    that multiplies them by zero could get a NaN.

    Attributes:
        tensors: By group, the tensors of its layers as `[block, kernel block, head, entry, content]`, and the tokens
            per entry; 0 if entries are in the kernel's own order, because those kernel blocks came whole.
    """

    tensors: Mapping[int, Sequence[tuple[Tensor, Fraction]]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, tensors: Mapping[str, Tensor], facts: ModelFacts) -> Tails:
        """Collect the tensors of every group of tokens, if the model relies on zeroed blocks."""
        found: dict[int, list[tuple[Tensor, Fraction]]] = {}
        if not compat.zeroes_blocks(config):
            return cls()
        for index, group in enumerate(compat.transfer_groups(config)):
            for layer, spec in compat.layer_specs(group).items():
                if not isinstance(spec, compat.AttentionSpec) or isinstance(spec, compat.CircularBufferSpec):
                    continue
                tensor = _tensor_of(layer, tensors)
                ratio = int(spec.num_states // tensor.shape[2])
                kernel_blocks = tensor[: config.num_blocks * ratio]
                blocks = kernel_blocks.unflatten(0, (config.num_blocks, ratio))  # type: ignore[no-untyped-call]
                each = Fraction(spec.tokens_per_state) if facts.is_by_token(layer, spec) else Fraction(0)
                found.setdefault(index, []).append((blocks, each))
        return cls(found)

    def clear(self, padding: Iterable[Padding]) -> None:
        """Zero the entries of these tokens up to the ends of their blocks, in every layer of their group."""
        for group, block, first, num_tokens in padding:
            for tensor, each in self.tensors.get(group, ()):
                num_kernel, entries = tensor.shape[1], tensor.shape[3]
                if each:
                    kernel, within = divmod(math.ceil(first / each), entries)
                    if within:
                        tensor[block, kernel, :, within:].zero_()
                else:
                    # Kernel blocks with a token of the request came whole from the prefill side, so they stay.
                    kernel, within = -(-first * num_kernel // (first + num_tokens)), 0
                tensor[block, kernel + bool(within) :].zero_()


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
