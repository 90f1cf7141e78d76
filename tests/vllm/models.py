"""A model that needs no weights: the KV cache that it writes is known, so that every byte that moved can be judged.

What a layer stores for a token follows from the layer, the head, the position and the token; a recurrent state follows
from all tokens so far. Both are the same however many ranks share the layer, and a rank knows which heads and channels
are its own. The next token follows from all tokens before it, so that a request's text is known too, wherever it was
generated.

Nothing here imports vLLM: tests judge by the same numbers in a process of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

VOCABULARY = 30_000
MASK = (1 << 64) - 1

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer of attention.

    Attributes:
        heads: KV heads of the whole layer.
        size: Elements of a head's key, two bytes each.
        window: Tokens that a token sees, itself among them; None for all.
        is_mla: One latent vector for all heads, the same on every rank.
        kernel_block: Tokens of the kernel's blocks, where they are smaller than vLLM's.
        is_draft: Of a model that guesses (EAGLE, MTP): what it stores for a token depends on the one that follows.
        is_whole: Ranks that share other layers' tokens hold all of this one's.
    """

    heads: int = 4
    size: int = 16
    window: int | None = None
    is_mla: bool = False
    kernel_block: int | None = None
    is_draft: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Mamba:
    """A recurrent layer: a convolution's last columns, and a state per head.

    The channels of the convolution are parts that are split over ranks one by one: x, B, C in Mamba-2, and q, k, v in
    gated delta nets. `groups` is the number of B's (and C's) heads, and of q's and k's.
    """

    kind: Literal["mamba2", "gdn"] = "mamba2"
    heads: int = 4
    head_size: int = 8
    state_size: int = 8
    groups: int = 2
    columns: int = 3

    def parts(self) -> list[tuple[int, int]]:
        """How many heads each part of the convolution has, and how many channels each of them."""
        if self.kind == "mamba2":
            return [(self.heads, self.head_size), (self.groups, self.state_size), (self.groups, self.state_size)]
        return [(self.groups, self.state_size), (self.groups, self.state_size), (self.heads, self.head_size)]


Layer = Attention | Mamba


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine holds."""

    layers: tuple[Layer, ...] = field(default=(Attention(), Attention()))
    block_size: int = 16
    mamba_mode: Literal["none", "align"] = "align"
    said_heads: int | None = None
    """KV heads in the model's configuration; None for the most that a layer has."""

    @property
    def is_mla(self) -> bool:
        return any(isinstance(layer, Attention) and layer.is_mla for layer in self.layers)

    @property
    def kv_heads(self) -> int:
        """KV heads of the model's attention, as its configuration says."""
        if self.said_heads is not None:
            return self.said_heads
        return max((layer.heads for layer in self.layers if isinstance(layer, Attention)), default=1)

    @property
    def has_state(self) -> bool:
        return any(isinstance(layer, Mamba) for layer in self.layers)

    def stage(self, rank: int, stages: int) -> range:
        """The layers of a pipeline stage."""
        size = len(self.layers) // stages
        return range(rank * size, len(self.layers) if rank == stages - 1 else (rank + 1) * size)


def mixed(values: Words) -> Words:
    """Spread values over all 64 bits (splitmix64)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _column(values: Sequence[int] | range) -> Words:
    return np.asarray(values, dtype=np.uint64)


def attention_words(layer: int, heads: Sequence[int], first: int, tokens: Sequence[int], words: int) -> Words:
    """What a layer stores for tokens from position `first` on: (head, token, word of eight bytes)."""
    positions = _column(range(first, first + len(tokens)))
    of_token = mixed(mixed(_column(tokens)) ^ mixed(positions + np.uint64(1 << 32)) ^ np.uint64(layer + 1 << 48))
    of_head = mixed(_column(heads) + np.uint64(1 << 40))
    return mixed(of_head[:, None, None] ^ of_token[None, :, None] ^ mixed(_column(range(words)))[None, None, :])


def prefix_hash(tokens: Sequence[int]) -> int:
    """One number for all tokens of a prefix."""
    value = 0
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1442695040888963407) & MASK
    return value


def state_values(layer: int, tokens: Sequence[int], part: int, ids: Words) -> Words:
    """What a layer's state holds after these tokens: a number for each of a part's elements, by their global ids."""
    return mixed(ids ^ np.uint64(prefix_hash(tokens)) ^ np.uint64((layer + 1 << 48) + (part + 1 << 56)))


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return int(mixed(_column([prefix_hash(tokens)]))[0] % np.uint64(VOCABULARY - 10)) + 5
