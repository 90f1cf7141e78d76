"""asynckv as a KV connector of vLLM: `"kv_connector_module_path": "asynckv.integrations.vllm"`."""

from __future__ import annotations

from asynckv.integrations.vllm.connector import AsyncKVConnector

__all__ = ["AsyncKVConnector"]
