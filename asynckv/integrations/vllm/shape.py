"""A model's cache groups for the scheduler, and the translation of vLLM's lists of blocks.

vLLM lists a request's blocks per cache group from its first token on, with block 0 for a missing block. asynckv takes
per group `(first_token, block ids)`, with None for a missing block, and only the state after the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asynckv.geometry.layout import ONE_PER_REQUEST
from asynckv.integrations.vllm import compat

NULL_BLOCK = 0
Blocks = list[tuple[int, list[int | None]]]  # per group the first token, and ids from its block on


@dataclass(frozen=True, slots=True)
class CacheGroup:
    index: int  # index among all of vLLM's groups
    block_size: int  # tokens per block on all ranks together; for states, tokens from one kept state to the next
    is_state: bool = False
    is_window: bool = False  # True if old tokens are dropped
    is_draft: bool = False  # True if layers of a drafter may be among its layers


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups that are transferred, in vLLM's order."""

    groups: tuple[CacheGroup, ...]
    back_off: int  # tokens at the end of a prompt that are left to its reader
    has_drafts: bool = False  # states of all guesses are kept, and only workers know the valid one
    num_token_shards: int = 1  # ranks that share the tokens of blocks

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Shape:
        groups, shards, dcp_size = [], 1, vllm_config.parallel_config.decode_context_parallel_size
        for index in compat.transfer_group_ids(kv_cache_config):
            spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
            layers = list(getattr(spec, "kv_cache_specs", {0: spec}).values())
            # A ring counts as a state, because it is one block that holds only the last tokens.
            is_ring = any(isinstance(each, compat.CircularBufferSpec) for each in layers)
            is_state = is_ring or any(isinstance(each, compat.MambaSpec) for each in layers)
            shared_by = compat.num_token_shards(spec, dcp_size)
            size, shards = ONE_PER_REQUEST if is_ring else spec.block_size * shared_by, max(shards, shared_by)
            keeps_all = all(
                isinstance(each, compat.FullAttentionSpec) and not isinstance(each, compat.RSWASpec) for each in layers
            )
            is_draft = compat.holds_drafts(vllm_config, kv_cache_config, index)
            groups.append(CacheGroup(index, size, is_state, not is_state and not keeps_all, is_draft))
        # Every kind except full attention drops old tokens: states, sliding windows, chunks.
        forgets = any(group.is_state or group.is_window for group in groups)
        # Draft layers that look ahead need the sampled tokens, not their own drafts.
        back_off = max(int(forgets), getattr(vllm_config, "num_prefill_lookahead_tokens", 1) - 1)
        return cls(tuple(groups), back_off, vllm_config.speculative_config is not None, shards)

    def num_blocks(self, num_tokens: int) -> int:
        return sum(1 if group.is_state else -(-num_tokens // group.block_size) for group in self.groups)

    def missing(self, blocks: Any, first_token: int, num_tokens: int) -> Blocks:
        """Return the blocks (of vLLM's `KVCacheBlocks`) to be filled with tokens from `first_token` to `num_tokens`.

        The local prefix cache may have dropped blocks of a sliding window, so those that are new are read too.
        """
        lists, ids = [], blocks.get_block_ids()
        for group in self.groups:
            first, listed = first_token, blocks.blocks[group.index]
            while group.is_window and (place := -(-first // group.block_size) - 1) >= 0 and _is_new(listed, place):
                first = place * group.block_size
            lists.append(self._listed(group, ids[group.index], first, num_tokens))
        return lists

    def held(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> Blocks | None:
        """Return the blocks that hold a request's first `num_tokens`; None if there are none, or a state is gone."""
        lists = [self._listed(group, block_ids[group.index], 0, num_tokens) for group in self.groups]
        for group, (_, ids) in zip(self.groups, lists, strict=True):
            if group.is_state and not (ids and ids[0] is not None):
                return None
        return lists if any(ids for _, ids in lists) else None

    @staticmethod
    def _listed(
        group: CacheGroup, ids: Sequence[int], first_token: int, num_tokens: int
    ) -> tuple[int, list[int | None]]:
        size = group.block_size
        end = -(-num_tokens // size)
        begin = end - 1 if group.is_state else first_token // size
        while begin < end and begin < len(ids) and ids[begin] == NULL_BLOCK:
            begin += 1
        first = begin * size if group.is_state or begin * size > first_token else first_token
        listed: list[int | None] = list(ids[begin:end])
        if NULL_BLOCK in listed:  # a fast check, because most lists have none
            listed = [None if block == NULL_BLOCK else block for block in listed]
        return first, listed


def _is_new(blocks: Sequence[Any], place: int) -> bool:
    return place < len(blocks) and not blocks[place].is_null and blocks[place].block_hash is None
