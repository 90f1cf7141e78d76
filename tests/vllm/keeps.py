"""What layers keep, for tests: specifications as vLLM's layers make them, and an oracle of what is where.

Every kind of layer knows the whole model's arrays (`truth`), and writes a rank's share of them into that rank's tensor
as vLLM's kernels would see it. It knows nothing of layouts and parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from asynckv.integrations.vllm.caches import Place

BF16 = torch.bfloat16


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def share(total: int, place: Place) -> slice:
    """A rank's entries of an axis: as many each, or replicas."""
    if total < place.tp_size:
        at = place.tp_rank * total // place.tp_size
        return slice(at, at + 1)
    each = total // place.tp_size
    return slice(place.tp_rank * each, (place.tp_rank + 1) * each)


@dataclass
class Attention:
    """Keys and values of every token."""

    heads: int = 8
    head_size: int = 16
    head_size_v: int | None = None
    dtype: torch.dtype = BF16
    window: int = 0
    block_size: int = 16
    is_mla: bool = False
    tokens_per_state: int | Fraction = 1
    more: dict[str, Any] = field(default_factory=dict)
    kind: Any = None

    def spec(self, tp: int) -> KVCacheSpec:
        """As the layer of a rank would say."""
        given: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": 1 if self.is_mla else max(1, self.heads // tp),
            "head_size": self.head_size,
            "dtype": self.dtype,
            "tokens_per_state": self.tokens_per_state,
        } | self.more
        if self.head_size_v is not None:
            given["head_size_v"] = self.head_size_v
        if self.kind is not None:
            return self.kind(**given)
        if self.is_mla:
            return MLAAttentionSpec(**given)
        if self.window:
            return SlidingWindowSpec(**given, sliding_window=self.window)
        return FullAttentionSpec(**given)

    def truth(self, num_tokens: int, seed: int) -> torch.Tensor:
        """Bytes of every entry of every head: [entry, head, byte]."""
        spec = self.spec(1)
        entries = int(num_tokens / self.tokens_per_state)
        return noise(entries, spec.num_heads, spec.state_content_size_bytes, seed=seed)

    def write(
        self,
        tensor: torch.Tensor,
        truth: torch.Tensor,
        place: Place,
        ids: Sequence[int | None],
        first: int,
        start: int,
        end: int,
    ) -> None:
        """Write tokens [start, end) into the blocks of a list that begins with the block of token `first`."""
        view = tensor.view(torch.uint8)
        heads = slice(0, 1) if self.is_mla else share(self.heads, place)
        kernel = int(view.shape[2] * self.tokens_per_state)
        ratio = self.block_size // kernel
        shares, run = place.dcp_size if self.spec(place.tp_size).dcp_sharded else 1, place.interleave
        for entry in range(int(start / self.tokens_per_state), int(end / self.tokens_per_state)):
            token = int(entry * self.tokens_per_state)
            # vLLM's formula for slots, from `v1/worker/block_table.py` of 0.33.0, lines 351 to 375.
            virtual = self.block_size * shares
            block, inside = ids[token // virtual - first // virtual], token % virtual
            if block in (None, 0) or inside // run % shares != place.rank % shares:
                continue
            inside = inside // (shares * run) * run + inside % run
            within = int((inside % kernel) / self.tokens_per_state)
            if self.tokens_per_state < 1:
                within += entry % int(1 / self.tokens_per_state)
            view[block * ratio + inside // kernel, :, within] = truth[entry, heads]


@dataclass
class Recurrent:
    """A convolution's state and a recurrent one; `slices` are the convolution's channels: (name, total, replicated)."""

    kind: str
    slices: Sequence[tuple[int, bool]]
    state: tuple[int, ...]
    columns: int = 3
    is_dim_first: bool = True
    mode: str = "none"
    block_size: int = 512
    state_dtype: torch.dtype = torch.float32
    page: int | None = None

    def channels(self, place: Place) -> int:
        return sum(total if replicated else total // place.tp_size for total, replicated in self.slices)

    def shapes(self, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        channels = self.channels(Place(0, tp))
        conv = (channels, self.columns) if self.is_dim_first else (self.columns, channels)
        return conv, (self.state[0] // tp, *self.state[1:])

    def spec(self, tp: int) -> KVCacheSpec:
        """As the layer of a rank would say."""
        return MambaSpec(
            block_size=self.block_size,
            shapes=self.shapes(tp),
            dtypes=(BF16, self.state_dtype),
            mamba_type=MambaAttentionBackendEnum[self.kind],
            mamba_cache_mode=self.mode,
            page_size_padded=self.page,
        )

    def truth(self, num_tokens: int, seed: int) -> list[torch.Tensor]:
        """[channel, column, byte] of each slice, and the state."""
        out = [noise(total, self.columns, 2, seed=seed + i) for i, (total, _) in enumerate(self.slices)]
        return [*out, noise(*self.state, self.state_dtype.itemsize, seed=seed + 9)]

    def write(self, tensor: torch.Tensor, truth: list[torch.Tensor], place: Place, block: int) -> None:
        """Write the state into a block."""
        cut = [
            t if replicated else t[share(total, place)]
            for t, (total, replicated) in zip(truth, self.slices, strict=False)
        ]
        conv = torch.cat(cut)
        conv = conv if self.is_dim_first else conv.transpose(0, 1)
        state = truth[-1][share(self.state[0], place)]
        page = torch.cat([conv.reshape(-1), state.reshape(-1)])
        assert len(page) == sum(
            prod(s) * d.itemsize for s, d in zip(self.shapes(place.tp_size), (BF16, self.state_dtype), strict=True)
        )
        tensor.view(torch.uint8)[block, 0, 0, : len(page)] = page


def mamba1(channels: int = 64, state: int = 16, **more: Any) -> Recurrent:
    """x alone."""
    return Recurrent("MAMBA1", [(channels, False)], (channels, state), **more)


def mamba2(heads: int = 8, head_dim: int = 16, groups: int = 2, state: int = 32, **more: Any) -> Recurrent:
    """x, B and C; a single group is on all ranks."""
    each = (groups * state, groups == 1)
    return Recurrent("MAMBA2", [(heads * head_dim, False), each, each], (heads, head_dim, state), **more)


def delta_net(k: int = 4, k_dim: int = 16, v: int = 8, v_dim: int = 16, **more: Any) -> Recurrent:
    """q, k and v."""
    return Recurrent(
        "GDN_ATTN", [(k * k_dim, False), (k * k_dim, False), (v * v_dim, False)], (v, v_dim, k_dim), **more
    )


FP8: dict[str, Any] = {"dtype": torch.uint8, "more": {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}}
PER_TOKEN_HEAD: dict[str, Any] = {
    "dtype": torch.uint8,
    "more": {"kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD, "state_content_bytes": 2 * 16 + 8},
}
