"""The models of these tests, by name."""

from __future__ import annotations

from tests.vllm.models import Attention, Mamba, Model

ATTENTION = {
    "dense": Model(layers=(Attention(),) * 4, block_size=32),
    "mla": Model(layers=(Attention(heads=1, size=64, is_mla=True),) * 4, block_size=32),
    "window": Model(layers=(Attention(window=48), Attention(window=48), Attention(), Attention()), block_size=32),
    "kernel-blocks": Model(layers=(Attention(kernel_block=16),) * 4, block_size=32),
}
"""Attention of several kinds; blocks of 32 tokens, which vLLM's own connector insists on."""

STATES = {
    "mamba2-align": Model(layers=(Mamba(), Mamba(), Attention(), Mamba()), block_size=32),
    "mamba2-none": Model(layers=(Mamba(), Mamba(), Attention(), Mamba()), block_size=32, mamba_mode="none"),
    "gdn-align": Model(layers=(Mamba(kind="gdn"), Mamba(kind="gdn"), Attention(), Mamba(kind="gdn")), block_size=32),
    "gdn-none": Model(
        layers=(Mamba(kind="gdn"), Mamba(kind="gdn"), Attention(), Mamba(kind="gdn")), block_size=32, mamba_mode="none"
    ),
}
"""Hybrids of attention and recurrent layers."""

MODELS = ATTENTION | STATES
