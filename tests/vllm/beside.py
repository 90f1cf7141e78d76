"""A connector beside ours in vLLM's MultiConnector: it has some prompts, and loads them at once."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class Empty(KVConnectorMetadata):
    """Nothing to say to workers."""


class Shelf(KVConnectorBase_V1, SupportsHMA):
    """Has the first `tokens` of prompts whose request id begins with `shelf`; may keep the blocks of ended ones."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.tokens = self._kv_transfer_config.get_from_extra_config("tokens", 32)
        self.keeps = self._kv_transfer_config.get_from_extra_config("keeps", False)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.request_id.startswith("shelf"):
            return 0, False
        more = min(self.tokens, request.num_prompt_tokens) - num_computed_tokens
        return (more, True) if more > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Empty:
        return Empty()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.keeps, {"shelf": 1} if self.keeps else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
