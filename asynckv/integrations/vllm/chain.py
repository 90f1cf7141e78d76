"""The chain of hashes that params carry: over a prompt's tokens, and over everything else that their KV depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from asynckv.edges.torch import as_bytes
from asynckv.hashes import token_hashes
from asynckv.integrations.vllm.compat import identity

HASH_TOKENS, MAX_CHAIN = 256, 256  # tokens per hash double for long prompts, so params have 9 kB at most


def hash_tokens_of(num_tokens: int) -> int:
    """Return the tokens per hash that keep a chain within `MAX_CHAIN`."""
    every = HASH_TOKENS
    while num_tokens > every * MAX_CHAIN:
        every *= 2
    return every


def chain_of(request: Any, num_tokens: int, every: int, tokens: Sequence[int] = ()) -> list[str]:
    """Return the chain of a request's first tokens. These may be given as an array, which takes half the time."""
    tokens = tokens or request.all_token_ids[:num_tokens]
    return token_hashes(tokens, every, also=_also(request, num_tokens, every))


def _also(request: Any, num_tokens: int, every: int) -> Iterator[tuple[int, str | bytes]]:
    adapter, salt, features, embeds, mask = identity(request)
    if adapter is not None:
        # Each engine numbers adapters itself. The path tells versions of one name apart.
        yield 0, repr(("adapter", adapter.lora_name, adapter.lora_path))
    if salt:
        yield 0, repr(("salt", salt))
    for feature in features:
        place = feature.mm_position
        yield place.offset, repr(("feature", feature.modality, feature.identifier, place.length))
    for begin in range(0, 0 if embeds is None else min(num_tokens, len(embeds)), every):
        end = min(begin + every, num_tokens)
        yield begin, hashlib.sha256(as_bytes(embeds[begin:end].flatten().cpu().contiguous()).numpy().data).digest()
        yield begin, repr(("dtype", str(embeds.dtype), None if mask is None else bytes(mask[begin:end])))
